/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_backward.h - the inner functions of attention's backward: a chunk of query rows against the packed
 * keys, adding to f32 sums of dK and dV. */
#ifndef QUERN_CPU_ATTEND_BACKWARD_H
#define QUERN_CPU_ATTEND_BACKWARD_H

#include "cpu/attend.h"

enum { STEP_KEYS = 192 /* 32 micro-kernels of 6 keys, three panels of 64 */ };

/* Keys and values in the layouts that the backward's products need. */
typedef struct backward_packed {
    void *k_columns;  /* S = Q K^T */
    void *k_rows;     /* dQ = dS K */
    void *v_columns;  /* dP = dO V^T */
    uint8_t *special; /* per 64 keys: one of them is not finite */
} backward_packed;

/* f32 sums of dK and dV for one (sequence, kv head, part): [keys][grad_width], [keys][value_width]. */
typedef struct backward_sums {
    float *d_k, *d_v;
} backward_sums;

typedef struct backward_chunk {
    attend_sequence seq;
    int32_t unit, kv_head, head0, rows, capacity;
    int64_t row0;
    void *q, *d_o;             /* [capacity][words]: A of S and dP */
    void *q_panels, *o_panels; /* rows along k: B of dK and dV */
    float *d_q;                /* [capacity][grad_width] */
    float *lse2, *delta, *row_scale;
    int32_t *lo, *hi;
    uint8_t *special;          /* [capacity / 2]: q or d_o of a row pair is not finite */
} backward_chunk;

typedef struct backward_scratch {
    float *s, *dp;           /* [TILE_ROWS][STEP_KEYS] */
    uint32_t *p_pairs, *ds_pairs, *ds_words; /* bf16: P and dS by row pairs, dS by key pairs */
    backward_chunk gather;   /* TILE_ROWS gathered rows */
    int32_t *tile_lo, *tile_hi, *rows;
    attend_lists lists;
} backward_scratch;

int64_t backward_chunk_rows(const attend_plan *plan);
void backward_packed_carve(const attend_plan *plan, arena *a, backward_packed *packed);
void backward_pack(const quern_exec *exec, const attend_plan *plan, const backward_packed *packed);
void backward_chunk_carve(const attend_plan *plan, int64_t capacity, arena *a, backward_chunk *chunk);
void backward_scratch_carve(const attend_plan *plan, int64_t capacity, arena *a, backward_scratch *scratch);
void backward_chunk_begin(const attend_plan *plan, int64_t b, int32_t unit, int64_t row0, int32_t rows, backward_chunk *chunk);
void backward_chunk_run(const attend_plan *plan, const backward_packed *packed, backward_chunk *chunk, const backward_sums *sums,
                        backward_scratch *scratch);
void backward_chunk_store(const attend_plan *plan, const backward_chunk *chunk);

#endif
