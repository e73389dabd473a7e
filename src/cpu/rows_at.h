/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows_at.h - the addresses of rows in a stage's views, and the rows of a batch's sequences. */
#ifndef QUERN_CPU_ROWS_AT_H
#define QUERN_CPU_ROWS_AT_H

#include "backend.h"
#include "cpu/kernels/attention_kernels.h"
#include "stages/step.h"

static inline int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static inline int64_t round_up16(int64_t n)
{
    return round_up(n, 16);
}

static inline bool is_present(const quern_tensor *t)
{
    return t->ndim > 0;
}

/* Element [b][n][h][0] of a 4-D view, or [b][n][h] of a 3-D one. */
static inline void *row_at(const quern_tensor *t, int64_t b, int64_t n, int64_t h)
{
    const int64_t at = b * t->strides[0] + n * t->strides[1] + h * t->strides[2];
    return (char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

/* Rows n ... n + rows - 1 of head h. */
static inline row_source rows_at(const quern_tensor *t, int64_t b, int64_t n, int64_t h, int64_t rows)
{
    return (row_source){row_at(t, b, n, h), t->dtype, t->strides[1], rows, t->shape[3]};
}

/* How many heads one row may span: all if heads are adjacent in memory, else one. */
static inline int64_t heads_joined(const quern_tensor *t)
{
    return t->strides[2] == t->shape[3] ? t->shape[2] : 1;
}

/* A sequence's rows in the token views and in the compressed ones. */
typedef struct sequence_rows {
    int64_t view_b, token0, tokens, entry0, entries;
} sequence_rows;

static inline sequence_rows sequence_at(const stage_seqs *s, int64_t b)
{
    if (s->cu_q.data == NULL) return (sequence_rows){b, 0, s->n_q, 0, s->n_kv};
    const int32_t *q = s->cu_q.data, *kv = s->cu_kv.data != NULL ? s->cu_kv.data : q;
    return (sequence_rows){0, q[b], q[b + 1] - q[b], kv[b], kv[b + 1] - kv[b]};
}

/* Tokens of the longest sequence. */
static inline int64_t longest_sequence(const stage_seqs *s)
{
    if (s->cu_q.data == NULL) return s->n_q;
    int64_t most = 0;
    const int32_t *q = s->cu_q.data;
    for (int64_t b = 0; b < s->batch; b++)
        if (q[b + 1] - q[b] > most) most = q[b + 1] - q[b];
    return most;
}

/* The row of sequence b's first tile in varlen lists; 0 for fixed lengths. */
static inline int64_t first_list_row(const stage_seqs *s, int64_t tile, int64_t b)
{
    const int32_t *q = s->cu_q.data;
    int64_t row = 0;
    for (int64_t i = 0; q != NULL && i < b; i++) row += (q[i + 1] - q[i] + tile - 1) / tile;
    return row;
}

/* Rows of the batch view that hold tokens: all, or those before the last of cu_seqlens. */
static inline int64_t token_rows(const stage_seqs *s)
{
    return s->cu_q.data == NULL ? s->n_q : ((const int32_t *)s->cu_q.data)[s->batch];
}

/* Writes zeros to rows first ... of a 4-D view's only batch, where it has one. */
static inline void zero_rows(const quern_tensor *t, int64_t first)
{
    for (int64_t n = first; t->shape[0] > 0 && n < t->shape[1]; n++)
        for (int64_t h = 0; h < t->shape[2]; h++) {
            char *p = row_at(t, 0, n, h);
            for (size_t i = 0; i < (size_t)t->shape[3] * quern_dtype_size(t->dtype); i++) p[i] = 0;
        }
}

/* Element i of a vector of i32; `otherwise` where there is none. */
static inline int64_t i32_at(const quern_tensor *t, int64_t i, int64_t otherwise)
{
    return is_present(t) ? ((const int32_t *)t->data)[i * t->strides[0]] : otherwise;
}

/* Sequence b of a step: its state is in `slot`, its rows from `first` on are the `count` rows from `row` on
 * of the call. */
typedef struct step_run {
    int64_t b, slot, first, row, count;
} step_run;

/* Element i of a vector of i32 or i64. */
static inline int64_t index_at(const quern_tensor *t, int64_t i)
{
    const int64_t at = i * t->strides[0];
    return t->dtype == QUERN_I64 ? ((const int64_t *)t->data)[at] : ((const int32_t *)t->data)[at];
}

static inline step_run step_run_at(const stage_step *s, int64_t b)
{
    const int32_t *rows = (const int32_t *)s->rows.data + b * s->rows.strides[0];
    const int64_t slot = index_at(&s->slots, b), first = index_at(&s->positions, b);
    return (step_run){b, slot, first, rows[0], slot >= 0 ? rows[s->rows.strides[1]] - rows[0] : 0};
}

/* Whether a row of n elements can take non-temporal stores: it fills lines of 64 bytes. */
static inline bool may_stream(const void *row, quern_dtype dtype, int64_t n)
{
    return (uintptr_t)row % 64 == 0 && n * (int64_t)quern_dtype_size(dtype) % 64 == 0;
}

#endif
