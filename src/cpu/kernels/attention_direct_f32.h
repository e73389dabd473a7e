/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_direct_f32.h - products of a few query rows with keys and values in place, in f32, whatever the
 * dtype of keys and values: what attention_direct.h is for bf16 products.
 *
 * Scores: 4 queries by LANES / 4 keys, a register of partial sums each, which one tree turns into a register
 * of scores. Values: 4 queries by 2 registers of columns. Each widens a key or value once for 4 queries. Two
 * FMAs a cycle are the limit of AVX2 with 4 queries: a key and value of 128 take 64 cycles, and 46 to come
 * from memory (bf16, one thread of a Zen 4).
 */
#ifndef QUERN_CPU_ATTENTION_DIRECT_F32_H
#define QUERN_CPU_ATTENTION_DIRECT_F32_H

#include "cpu/kernels/line_walk.h"
#include "cpu/kernels/vector_dtype.h"

enum {
    GROUP_ROWS = 4,
    GROUP_KEYS = LANES / GROUP_ROWS,
    SCORE_BLOCK = 16, /* keys that a group of rows takes in one go */
    SUM_BLOCK = 32,   /* rows that one pass over two registers of columns takes */
    SUM_VECTORS = 2,
    SUM_COLUMNS = SUM_VECTORS * LANES
};

/* A walk, and the bytes that were read since its last unit. */
typedef struct row_walk {
    line_walk lines;
    int64_t bytes;
} row_walk;

INLINE void walk_bytes(row_walk *walk, int64_t bytes)
{
    if (walk == NULL) return;
    for (walk->bytes += bytes; walk->bytes >= UNIT; walk->bytes -= UNIT) prefetch_unit(&walk->lines);
}

INLINE const char *row_of(const row_source *src, const quern_dtype dtype, int64_t row)
{
    return (const char *)src->data + row * src->stride * dtype_bytes(dtype);
}

/* Up to 4 rows of q, and where their scores go. */
typedef struct score_rows {
    const float *q;
    int64_t ldq;
    float *s;
    int64_t lds;
} score_rows;

/* Keys [key, key + GROUP_KEYS); past the last one it is the last one again: nobody reads its scores. */
INLINE void score_keys(const int rows, const quern_dtype dtype, const bool whole, const score_rows *to,
                       const row_source *src, int64_t key)
{
    vfloat acc[LANES];
    const char *k[GROUP_KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < GROUP_KEYS; i++)
        k[i] = row_of(src, dtype, key + i < src->rows ? key + i : src->rows - 1);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) acc[i] = (vfloat){0};
    int64_t d = 0;
    do {
        vfloat kv[GROUP_KEYS];
#pragma GCC unroll 4
        for (int i = 0; i < GROUP_KEYS; i++)
            kv[i] = whole ? load_as(k[i], dtype, d) : load_some(k[i], dtype, d, src->dim);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const float *q = to->q + r * to->ldq;
            const vfloat qv = v_keep(whole ? v_load(q + d) : load_some(q, QUERN_F32, d, src->dim));
#pragma GCC unroll 4
            for (int i = 0; i < GROUP_KEYS; i++)
                acc[r * GROUP_KEYS + i] = v_fma(qv, kv[i], acc[r * GROUP_KEYS + i]);
        }
        d += LANES;
    } while (d < src->dim);
    float scores[LANES];
    v_store(scores, lane_sums(acc, rows * GROUP_KEYS));
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        memcpy(to->s + r * to->lds + key, scores + r * GROUP_KEYS, GROUP_KEYS * sizeof *scores);
}

INLINE void score_group(const int rows, const quern_dtype dtype, const score_rows *to, const row_source *src,
                        int64_t first, row_walk *walk)
{
    const int64_t end = first + SCORE_BLOCK < src->rows ? first + SCORE_BLOCK : src->rows,
                  bytes = GROUP_KEYS * src->stride * dtype_bytes(dtype);
    const bool whole = src->dim % LANES == 0;
    for (int64_t key = first; key < end; key += GROUP_KEYS) {
        walk_bytes(walk, bytes);
        if (whole) score_keys(rows, dtype, true, to, src, key);
        else score_keys(rows, dtype, false, to, src, key);
    }
}

INLINE void score_dtype(const quern_dtype dtype, int64_t m, const score_rows *all, const row_source *keys,
                        read_ahead ahead)
{
    row_walk walk = {walk_over(keys, dtype_bytes(dtype), ahead), 0};
    for (int64_t first = 0; first < keys->rows; first += SCORE_BLOCK)
        for (int64_t r = 0; r < m; r += GROUP_ROWS) {
            const score_rows to = {all->q + r * all->ldq, all->ldq, all->s + r * all->lds, all->lds};
            row_walk *asks = r == 0 ? &walk : NULL;
            switch (m - r) {
            case 1: score_group(1, dtype, &to, keys, first, asks); break;
            case 2: score_group(2, dtype, &to, keys, first, asks); break;
            case 3: score_group(3, dtype, &to, keys, first, asks); break;
            default: score_group(4, dtype, &to, keys, first, asks); break;
            }
        }
}

static void score_rows_f32(int64_t m, const float *q, int64_t ldq, const row_source *keys, read_ahead ahead,
                           float *s, int64_t lds)
{
    const score_rows all = {q, ldq, s, lds};
#define CALL(t) score_dtype(t, m, &all, keys, ahead)
    BY_DTYPE(keys->dtype, CALL);
#undef CALL
}

/* What a call of up to 4 rows adds. */
typedef struct value_sum {
    const float *p;
    int64_t ldp;
    float *o;
    int64_t ldo;
    bool accumulate;
} value_sum;

/* Adds values [first, end) times their weights to columns [c, c + SUM_COLUMNS) of `sums`, [row][MAX_DIM]. */
INLINE void sum_columns(const int rows, const quern_dtype dtype, const bool whole, const value_sum *v,
                        const row_source *src, int64_t first, int64_t end, int64_t c, float (*sums)[MAX_DIM])
{
    const int64_t stride = src->stride * dtype_bytes(dtype);
    const char *value = row_of(src, dtype, first);
    const float *p = v->p + first;
    vfloat acc[GROUP_ROWS][SUM_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < SUM_VECTORS; j++)
            acc[r][j] = first == 0 ? (vfloat){0} : v_load(sums[r] + c + j * LANES);
    for (const float *last = p + (end - first); p < last; p++, value += stride) {
        vfloat x[SUM_VECTORS];
#pragma GCC unroll 2
        for (int j = 0; j < SUM_VECTORS; j++) {
            const int64_t at = c + j * LANES;
            if (whole) x[j] = load_as(value, dtype, at);
            else x[j] = at < src->dim ? load_some(value, dtype, at, src->dim) : (vfloat){0};
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const vfloat weight = v_splat(p[r * v->ldp]);
#pragma GCC unroll 2
            for (int j = 0; j < SUM_VECTORS; j++) acc[r][j] = v_fma(weight, x[j], acc[r][j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < SUM_VECTORS; j++) v_store(sums[r] + c + j * LANES, acc[r][j]);
}

INLINE void sum_group(const int rows, const quern_dtype dtype, const value_sum *v, const row_source *src,
                      row_walk *walk)
{
    float sums[GROUP_ROWS][MAX_DIM];
    const int64_t width = (src->dim + 15) / 16 * 16;
    for (int64_t first = 0; first == 0 || first < src->rows; first += SUM_BLOCK) {
        const int64_t end = first + SUM_BLOCK < src->rows ? first + SUM_BLOCK : src->rows;
        for (int64_t c = 0; c < width; c += SUM_COLUMNS) {
            walk_bytes(walk, (end - first) * SUM_COLUMNS * dtype_bytes(dtype));
            if (c + SUM_COLUMNS <= src->dim) sum_columns(rows, dtype, true, v, src, first, end, c, sums);
            else sum_columns(rows, dtype, false, v, src, first, end, c, sums);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int64_t c = 0; c < width; c += LANES) {
            float *o = v->o + r * v->ldo + c;
            const vfloat sum = v_load(sums[r] + c);
            v_store(o, v->accumulate ? sum + v_load(o) : sum);
        }
}

INLINE void sum_dtype(const quern_dtype dtype, int64_t m, const value_sum *all, const row_source *values,
                      read_ahead ahead)
{
    row_walk walk = {walk_over(values, dtype_bytes(dtype), ahead), 0};
    for (int64_t r = 0; r < m; r += GROUP_ROWS) {
        const value_sum v = {all->p + r * all->ldp, all->ldp, all->o + r * all->ldo, all->ldo,
                             all->accumulate};
        row_walk *asks = r == 0 ? &walk : NULL;
        switch (m - r) {
        case 1: sum_group(1, dtype, &v, values, asks); break;
        case 2: sum_group(2, dtype, &v, values, asks); break;
        case 3: sum_group(3, dtype, &v, values, asks); break;
        default: sum_group(4, dtype, &v, values, asks); break;
        }
    }
}

static void add_values_f32(int64_t m, const float *p, int64_t ldp, const row_source *values, read_ahead ahead,
                           float *o, int64_t ldo, bool accumulate)
{
    const value_sum all = {p, ldp, o, ldo, accumulate};
#define CALL(t) sum_dtype(t, m, &all, values, ahead)
    BY_DTYPE(values->dtype, CALL);
#undef CALL
}

#endif
