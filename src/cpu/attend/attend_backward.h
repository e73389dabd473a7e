/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward.h - the inner functions of the attention backward on the CPU: operands in panels, tiles of
 * query rows, and one step of such a tile against a tile of keys. Rows, units and masks are those of
 * attend.h.
 */
#ifndef QUERN_CPU_ATTEND_BACKWARD_H
#define QUERN_CPU_ATTEND_BACKWARD_H

#include "cpu/kernels/attend/attend.h"
#include "cpu/kernels/attend/gradients.h"

enum {
    BACKWARD_ROWS = 192, /* query rows of a tile */
    BACKWARD_KEYS = 192, /* key columns of a tile */
    BACKWARD_LDS = 208 /* floats of a score row: an odd number of cache lines spreads columns over all sets */
};

static inline float backward_dot(const float *x, const float *y, int64_t n)
{
    float lanes[16] = {0}, sum = 0.0f;
    int64_t c = 0;
    for (; c + 16 <= n; c += 16)
        for (int i = 0; i < 16; i++) lanes[i] += x[c + i] * y[c + i];
    for (; c < n; c++) lanes[c % 16] += x[c] * y[c];
    for (int i = 0; i < 16; i++) sum += lanes[i];
    return sum;
}

typedef struct backward_plan {
    attend_plan attend;
    int64_t value_words;            /* words of a value or d_o row: Dv, or Dv / 2 */
    int64_t key_width, value_width; /* D, Dv rounded up to 16 */
    int64_t key_ld, value_ld;       /* floats or words of a row: an odd number of cache lines */
    int64_t key_panel;              /* columns of a panel of key_rows */
    /* Panels of each kv head, packed once. Keys and values as operands of Q K^T and dO V^T: [rows /
     * panel][words][panel]. K as the B of dS K: [panels][rows or pairs][key_panel]. */
    void *keys, *values, *key_rows;
    uint8_t *nonfinite; /* [kv_heads][packed_rows / 64]: these 64 rows have a nonfinite key, 0 in key_rows */
    gradient_rows d_k, d_v;
} backward_plan;

/* Query rows as the products read them. Their number is even; a padding row has lo = hi. */
typedef struct backward_rows {
    void *q, *d_o;             /* f32 [rows][ld]; bf16 words [rows][words] */
    void *q_pairs, *d_o_pairs; /* bf16: pairs along rows, [rows / 2][ld]; f32: q and d_o again */
    float *d_q;                /* [rows][key_ld], not yet scaled */
    int32_t *lo, *hi;          /* keys that the row sees */
    float *top, *factor, *delta, *row_scale, *dp_scale; /* P = exp2((S - top) scale2) factor */
    float *lse;              /* as given; -inf where the sink leaves nothing to the keys */
    float *sink_weight;      /* the sink's part of the denominator */
    float *max, *sum, *mean; /* of S, of P, of P dP: running, by backward_weigh() */
    uint8_t *nonfinite; /* [rows]: q or d_o has a nonfinite value */
} backward_rows;

/* A tile of keys [key0, key1) of one kv head with its gradients so far. It has at most BACKWARD_KEYS - 15
 * keys unless key0 is a multiple of 16. */
typedef struct backward_keys {
    const attend_sequence *seq;
    int32_t head;
    int64_t key0, key1;
    float *d_k, *d_v;                      /* [BACKWARD_KEYS][ld]; row 0 is key0 rounded down to 16 */
    bool fresh[BACKWARD_KEYS / KEY_ALIGN]; /* nothing was written to these rows yet */
} backward_keys;

typedef struct backward_scratch {
    float *s, *dp; /* [BACKWARD_ROWS][BACKWARD_LDS] */
    uint32_t *p_pairs, *ds_pairs, *ds_words;
    int32_t *tile_lo, *tile_hi;  /* [BACKWARD_ROWS] */
    void *finite_q, *finite_d_o; /* q_pairs, d_o_pairs of a tile, nonfinite values as 0 */
} backward_scratch;

void backward_rows_carve(const backward_plan *plan, int64_t capacity, arena *a, backward_rows *rows);
/* The rows from `first` on, an even number. */
backward_rows backward_rows_from(const backward_plan *plan, const backward_rows *rows, int64_t first);
/* Copies row `from` of src to row `to` of dst, without pairs and d_q. backward_rows_pair() then makes the
 * pairs of n rows; where n is odd it appends a row without keys. */
void backward_rows_copy(const backward_plan *plan, const backward_rows *src, int64_t from,
                        const backward_rows *dst, int64_t to);
void backward_rows_prefetch(const backward_plan *plan, const backward_rows *rows, int64_t row);
void backward_rows_pair(const backward_plan *plan, const backward_rows *rows, int64_t n);
/* Reads rows [row0, row0 + n) of unit `unit` of a sequence; sets d_q to 0. Returns whether some row is
 * coarse: all its keys have to pass through backward_weigh(), then it through backward_rows_settle(). */
bool backward_rows_load(const backward_plan *plan, const attend_sequence *seq, int32_t unit, int64_t row0,
                        int64_t n, const backward_rows *rows);
void backward_rows_settle(const backward_plan *plan, int32_t unit, int64_t row0, int64_t n,
                          const backward_rows *rows);
/* Writes their d_q, or adds it to what is there; where d_sink is asked for, their shares of it to delta. */
void backward_rows_store(const backward_plan *plan, const attend_sequence *seq, int32_t unit, int64_t row0,
                         int64_t n, const backward_rows *rows);

void backward_scratch_carve(const backward_plan *plan, arena *a, backward_scratch *scratch);
/* Adds the tile of keys to max, sum and mean of n rows. */
void backward_weigh(const backward_plan *plan, const backward_rows *rows, int32_t n,
                    const backward_keys *keys, const backward_scratch *scratch);
/* Adds the contributions of n rows and the tile of keys to d_q, d_k and d_v. */
void backward_step(const backward_plan *plan, const backward_rows *rows, int32_t n, backward_keys *keys,
                   const backward_scratch *scratch);

#endif
