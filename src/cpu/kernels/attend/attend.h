/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend.h - the inner functions of attention on the CPU: keys and values in panels, and chunks of query rows
 * that one thread runs against them under any mask. Stages compose these.
 *
 * Rows. A unit is the hs query heads that read one key/value head (or, with head-scope lists, one head). Row
 * r of a unit in a sequence is query r / hs, head r % hs. So a group's heads share every key tile, and the
 * rows of a tile have nearly the same position.
 *
 * Masks. A row sees an interval [lo, hi) of key indices (causal, window, compressed visibility), walked
 * whole, or only in the listed blocks. lo and hi never decrease from row to row.
 */
#ifndef QUERN_CPU_ATTEND_H
#define QUERN_CPU_ATTEND_H

#include "backend.h"
#include "core/arena.h"
#include "cpu/kernels/attention_kernels.h"

#include <math.h>

enum {
    TILE_ROWS = 192, /* query rows that use a tile of keys read from L3 */
    STEP_ROWS = 96,  /* rows per step: 16 micro-kernels of 6, 6 vectors of 16 */
    TILE_KEYS = 384, /* key columns of a tile */
    KEY_ALIGN = 64   /* in panels, sequences start at multiples of this */
};

static const float log2_e = 1.44269504088896340736f; /* scores are powers of 2: exp(x) = exp2(x log2 e) */

/* stages/attend.h says what is coarse; of f16 and bf16, whose gradients have wider bounds: */
enum { LSE_COARSE_HALF = 4096 };

static inline bool lse_is_coarse(float lse, quern_dtype dtype)
{
    const float size = lse < 0 ? -lse : lse;
    return size > (dtype == QUERN_F32 ? ATTEND_LSE_COARSE : LSE_COARSE_HALF) && size < INFINITY;
}

static inline float attend_sink(const attend_args *args, int64_t head)
{
    return args->sink.ndim > 0 ? ((const float *)args->sink.data)[head] : -INFINITY;
}

/* What a head's sink leaves to the keys: their part of the denominator. */
static inline double attend_keys_share(double lse, float sink)
{
    return 1.0 / (1.0 + exp((double)sink - lse));
}

/* One sequence of the call: its rows in the tensors, and the first row of its keys in the panels. */
typedef struct attend_sequence {
    int64_t view_b, q0, nq, k0, nk, packed0;
    int64_t list_row0; /* of its tiles' lists */
} attend_sequence;

typedef struct attend_plan {
    const attend_args *args;
    const attention_kernels *kernels;
    bool bf16; /* products over pairs of bf16; otherwise f32 */
    int32_t heads, kv_heads, group, hs, units, dim_k, dim_v;
    int64_t key_words;   /* 32-bit words of a key or query row in panels: D, or D / 2 */
    int64_t value_width; /* floats of an O row: Dv rounded up to 16 */
    int32_t value_panel; /* columns of a value panel */
    int64_t packed_rows; /* rows in panels, per kv head */
    int64_t list_block;  /* keys of a listed block */
    int64_t sequences;
    float scale2; /* scale * log2 e, the softmax's factor of scores: Q times it would be rounded */
} attend_plan;

typedef struct attend_packed {
    void *keys;   /* [kv_heads][packed_rows / panel][key_words][panel] */
    void *values; /* [kv_heads][value panels][packed_rows (or pairs)][value_panel] */
    uint8_t
        *nonfinite; /* [kv_heads][packed_rows / 64]: a value of these 64 rows is nonfinite (0 in `values`) */
} attend_packed;

/* The inverted index of a chunk's lists: tiles entries[start[x]] ... entries[start[x + 1] - 1], ascending and
 * counted from the chunk's first tile, chose block x. */
typedef struct attend_lists {
    int32_t *start;   /* [blocks + 2] */
    int32_t *stamps;  /* [blocks + 1]: the stamp of the last list that had the block */
    int32_t *entries; /* [tiles of a chunk * list_k] */
    int32_t *list;    /* [list_k] */
} attend_lists;

/* Consecutive query rows of one unit, copied for the products, with their running softmax. */
typedef struct attend_chunk {
    attend_sequence seq;
    int32_t unit, kv_head, head0, rows, capacity;
    int64_t row0;
    void *q;          /* [capacity][key_words] */
    float *o;         /* [capacity][value_width] */
    float *max, *sum; /* [capacity]; after attend_chunk_finish, sum holds the lse */
    int32_t *lo, *hi; /* [capacity] */
} attend_chunk;

/* Rows of Q that the thread will probably read next, prefetched during products. A head's rows lie pages
 * apart, so hardware prefetchers miss them, and loading them takes longer than packing them. */
typedef struct expected_rows {
    const char *row0; /* head 0 of the first query */
    int64_t query_step, head_step, bytes;
    int32_t hs, at, end; /* rows [at, end) are left; row r is head r % hs of query r / hs */
} expected_rows;

/* A thread's scratch for running chunks. */
typedef struct attend_scratch {
    float *s;       /* [STEP_ROWS][TILE_KEYS] */
    void *gather_q; /* [TILE_ROWS][key_words] */
    float *gather_o;
    float *max, *sum, *shrink; /* [TILE_ROWS] */
    int32_t *lo, *hi, *rows;   /* [TILE_ROWS] */
    int32_t *tile_lo, *tile_hi;
    attend_lists lists;
    expected_rows expected;
} attend_scratch;

attend_plan attend_plan_of(const stage_exec *exec, const attend_args *args);
/* Offsets and key ranges; reports the first that is wrong. */
quern_status attend_check(const stage_exec *exec, const attend_args *args);
attend_sequence attend_sequence_at(const attend_plan *plan, int64_t b);
/* The interval of keys that query `query` of a sequence sees. */
void attend_interval(const attend_args *args, const attend_sequence *seq, int64_t query, int64_t *lo,
                     int64_t *hi);
int64_t attend_list_length(const attend_plan *plan);
void attend_lists_carve(const attend_plan *plan, int64_t chunk_rows, arena *a, attend_lists *lists);
/* Clears the stamps. Call it before the first attend_list_clean() of a sequence. */
void attend_lists_reset(const attend_plan *plan, const attend_sequence *seq, attend_lists *lists);
/* Copies the valid blocks of tile `tile`'s list to lists->list, each once: those inside the sequence that
 * begin before key hi. `stamp` > 0 must differ between calls since the reset. Returns how many. */
int32_t attend_list_clean(const attend_plan *plan, const attend_sequence *seq, int32_t unit, int64_t tile,
                          int64_t hi, int32_t stamp, attend_lists *lists);
/* Sorts n indices in ascending order. */
void attend_list_sort(int32_t *list, int64_t n);
/* Inverts the lists of rows [row0, row0 + rows) of a unit. hi: each row's interval end. Returns the number of
 * blocks. */
int64_t attend_lists_invert(const attend_plan *plan, const attend_sequence *seq, int32_t unit, int64_t row0,
                            int32_t rows, const int32_t *hi, attend_lists *lists);

/* One tensor to pack into panels for every (sequence, kv head). Sequences start at multiples of KEY_ALIGN. */
typedef struct attend_pack_target {
    const quern_tensor *tensor;
    void *columns;      /* keys along columns, or NULL */
    void *rows;         /* keys along rows, or NULL */
    uint8_t *nonfinite; /* NULL without `rows`; these 64 keys have a nonfinite element, 0 in `rows` */
    int32_t row_panel;
} attend_pack_target;
void attend_pack_all(const stage_exec *exec, const attend_plan *plan, const attend_pack_target *targets,
                     int32_t count);
/* Columns of a row panel, and panels, for rows of `dim` elements. */
int32_t attend_row_panel(const attend_plan *plan, int64_t dim);
int64_t attend_row_panels(const attend_plan *plan, int64_t dim);

void attend_packed_carve(const attend_plan *plan, arena *a, attend_packed *packed);
void attend_pack(const stage_exec *exec, const attend_plan *plan, const attend_packed *packed);

/* Whether a chunk walks its lists key by key, not tile by tile (see attend_chunk.c). */
static inline bool attend_walks_by_key(const attend_plan *plan)
{
    return attend_list_length(plan) > 0 && plan->args->tile * plan->hs < TILE_ROWS / 2;
}

/* Rows of a chunk whose lists are walked key by key, so that they take 2 MiB. */
int32_t attend_chunk_rows(const attend_plan *plan);
void attend_chunk_carve(const attend_plan *plan, int32_t capacity, arena *a, attend_chunk *chunk);
void attend_scratch_carve(const attend_plan *plan, int32_t capacity, arena *a, attend_scratch *scratch);

void attend_chunk_begin(const attend_plan *plan, int64_t b, int32_t unit, int64_t row0, int32_t rows,
                        attend_chunk *chunk);
/* The first rows of chunk `index`: the thread's next chunk if all threads run equally fast. Chunks are
 * numbered as the stages do: by sequence, by unit, then by piece of chunk_rows rows, the last piece first.
 * Empty if there is no such chunk. */
expected_rows attend_expect(const attend_plan *plan, int64_t index, int64_t pieces, int64_t chunk_rows);
/* Resets the running softmax and sets the intervals of this plan's mask; attend_chunk_run() sets O. */
void attend_chunk_reset(const attend_plan *plan, attend_chunk *chunk);
void attend_chunk_run(const attend_plan *plan, const attend_packed *packed, attend_chunk *chunk,
                      attend_scratch *scratch);
/* Divides O by the sums; afterwards `sum` holds the natural-log LSE. */
void attend_chunk_finish(const attend_plan *plan, attend_chunk *chunk);
void attend_chunk_store(const attend_plan *plan, const attend_chunk *chunk);
/* Rows of a varlen batch past the end of its last sequence (if any): o = 0, lse = -inf. */
void attend_store_unused(const attend_plan *plan);

#endif
