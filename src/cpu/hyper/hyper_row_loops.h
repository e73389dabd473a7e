/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_row_loops.h - products and sums of hyper-connections' rows, written once over the level's vectors.
 *
 * dots() multiplies rows by rows along their channels, so that neither is packed: 4 x 6 sums in registers
 * (AVX-512), 3 x 4 (the others), whose lanes are added at the end. A step of 24 FMAs takes 10 loads. The
 * limit is the FMA pipes; 24 columns over 1024 channels lose a tenth to the lanes' sums. combine() does as
 * many FMAs as it has inputs times outputs for every channel, two vectors at a time, so that a factor is
 * loaded for two of them; it is bound by the memory or cache that holds the rows.
 */
#ifndef QUERN_CPU_HYPER_ROW_LOOPS_H
#define QUERN_CPU_HYPER_ROW_LOOPS_H

#include "cpu/hyper/hyper_kernels.h"
#include "cpu/kernels/vector_dtype.h"

#if defined(__AVX512F__)
enum { DOT_ROWS = 4, DOT_COLUMNS = 6 };
#else
enum { DOT_ROWS = 3, DOT_COLUMNS = 4 };
#endif

/* rows, columns are constants. Requests ahead[0], ahead[1] on its way. */
INLINE void dot_block(const int rows, const int columns, int64_t n, const float *a, int64_t lda,
                      const float *b, int64_t ldb, float *c, int64_t ldc, const char *const ahead[2],
                      int64_t element)
{
    const char *first = ahead[0], *second = ahead[1];
    vfloat sum[DOT_ROWS][LANES];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) sum[i][j] = (vfloat){0};
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) {
        vfloat row[DOT_ROWS];
        if (first != NULL) __builtin_prefetch(first + at * element, 0, 2);
        if (second != NULL) __builtin_prefetch(second + at * element, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) row[i] = v_load(a + i * lda + at);
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) {
            const vfloat column = v_load(b + j * ldb + at);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][j] = v_fma(row[i], column, sum[i][j]);
        }
    }
    if (at < n) {
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) {
            const vfloat column = load_tail(b + j * ldb, QUERN_F32, at, n);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++)
                sum[i][j] = v_fma(load_tail(a + i * lda, QUERN_F32, at, n), column, sum[i][j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        float lanes[LANES];
        v_store(lanes, lane_sums(sum[i], columns));
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) c[i * ldc + j] += lanes[j];
    }
}

/* Row `row` of what is read later; nothing past the block's rows. */
INLINE void ahead_row(const hyper_ahead *ahead, int64_t row, bool there, const char *at[2])
{
    for (int i = 0; i < 2; i++)
        at[i] =
            there && ahead != NULL && ahead->rows[i] != NULL ? ahead->rows[i] + row * ahead->stride[i] : NULL;
}

/* Rows from row0 on. Each block of columns requests one row of what is read later. */
INLINE void dot_columns(const int rows, int64_t row0, int64_t columns, int64_t n, const float *a, int64_t lda,
                        const float *b, int64_t ldb, float *c, int64_t ldc, const hyper_ahead *ahead)
{
    const int64_t element = ahead != NULL ? ahead->element : 0;
    const char *at[2];
    int64_t block = 0;
    for (; columns >= DOT_COLUMNS;
         columns -= DOT_COLUMNS, b += DOT_COLUMNS * ldb, c += DOT_COLUMNS, block++) {
        ahead_row(ahead, row0 + block, block < rows, at);
        dot_block(rows, DOT_COLUMNS, n, a, lda, b, ldb, c, ldc, at, element);
    }
    ahead_row(ahead, 0, false, at);
    if (columns >= 4) {
        dot_block(rows, 4, n, a, lda, b, ldb, c, ldc, at, element);
        columns -= 4;
        b += 4 * ldb;
        c += 4;
    }
    for (; columns > 0; columns--, b += ldb, c++) dot_block(rows, 1, n, a, lda, b, ldb, c, ldc, at, element);
}

static void dots(int64_t rows, int64_t columns, int64_t n, const float *a, int64_t lda, const float *b,
                 int64_t ldb, float *c, int64_t ldc, const hyper_ahead *ahead)
{
    int64_t row = 0;
    for (; row + DOT_ROWS <= rows; row += DOT_ROWS)
        dot_columns(DOT_ROWS, row, columns, n, a + row * lda, lda, b, ldb, c + row * ldc, ldc, ahead);
    for (; row + 2 <= rows; row += 2)
        dot_columns(2, row, columns, n, a + row * lda, lda, b, ldb, c + row * ldc, ldc, ahead);
    if (row < rows) dot_columns(1, row, columns, n, a + row * lda, lda, b, ldb, c + row * ldc, ldc, ahead);
}

static float squares(const float *x, int64_t n)
{
    vfloat sum[4] = {{0}};
    int64_t at = 0;
    for (; at + 4 * LANES <= n; at += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            const vfloat y = v_load(x + at + v * LANES);
            sum[v] = v_fma(y, y, sum[v]);
        }
    for (; at < n; at += LANES) {
        const vfloat y = load_some(x, QUERN_F32, at, n);
        sum[0] = v_fma(y, y, sum[0]);
    }
    return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* The vector of an input at `at`, whole or to the end of the row; 0 past it. */
INLINE vfloat input_at(const quern_dtype from, const hyper_rows *r, int i, int64_t at, const bool whole)
{
    if (whole) return load_as(r->in[i], from, at);
    return at < r->n ? load_some(r->in[i], from, at, r->n) : (vfloat){0};
}

INLINE void output_at(const quern_dtype from, const quern_dtype to, const hyper_rows *r, int k, int64_t at,
                      const bool whole, const bool stream, vfloat v)
{
    if (!whole && at >= r->n) return;
    if (r->shared != NULL) {
        const vfloat shared = whole ? v_load(r->shared + at) : load_some(r->shared, QUERN_F32, at, r->n),
                     own = whole ? load_as(r->own[k], from, at) : load_some(r->own[k], from, at, r->n);
        v = v_fma(v_splat(r->shared_m[k]), shared, v);
        v = v_fma(v_splat(r->own_m), own, v);
    }
    if (r->add[0] != NULL) v += whole ? v_load(r->add[k] + at) : load_some(r->add[k], QUERN_F32, at, r->n);
    if (stream) stream_as(r->out[k], to, at, v);
    else if (whole) store_as(r->out[k], to, at, v);
    else store_some(r->out[k], to, at, r->n, v);
}

/* Two vectors from channel `at` on; the dtypes, ins, whole and stream are constants. With ins the inputs stay
 * in registers for all outputs; with 0 they are loaded anew for each. */
INLINE void combine_two(const quern_dtype from, const quern_dtype to, const int ins, const hyper_rows *r,
                        int64_t at, const bool whole, const bool stream)
{
    vfloat low[HYPER_INPUTS], high[HYPER_INPUTS];
#pragma GCC unroll 9
    for (int i = 0; i < ins; i++) {
        low[i] = input_at(from, r, i, at, whole);
        high[i] = input_at(from, r, i, at + LANES, whole);
    }
    for (int k = 0; k < r->outs; k++) {
        const float *m = r->m + k * r->ldm;
        vfloat x = {0}, y = {0};
#pragma GCC unroll 9
        for (int i = 0; i < ins; i++) {
            x = v_fma(v_splat(m[i]), low[i], x);
            y = v_fma(v_splat(m[i]), high[i], y);
        }
        for (int i = 0; ins == 0 && i < r->ins; i++) {
            x = v_fma(v_splat(m[i]), input_at(from, r, i, at, whole), x);
            y = v_fma(v_splat(m[i]), input_at(from, r, i, at + LANES, whole), y);
        }
        output_at(from, to, r, k, at, whole, stream, x);
        output_at(from, to, r, k, at + LANES, whole, stream, y);
    }
}

INLINE void combine_ins(const quern_dtype from, const quern_dtype to, const int ins, const hyper_rows *r)
{
    int64_t at = 0;
    if (r->stream)
        for (; at + 2 * LANES <= r->n; at += 2 * LANES) combine_two(from, to, ins, r, at, true, true);
    else
        for (; at + 2 * LANES <= r->n; at += 2 * LANES) combine_two(from, to, ins, r, at, true, false);
    if (at < r->n) combine_two(from, to, ins, r, at, false, false);
}

INLINE void combine_as(const quern_dtype from, const quern_dtype to, const hyper_rows *r)
{
    switch (r->ins) {
    case 1: combine_ins(from, to, 1, r); break;
    case 2: combine_ins(from, to, 2, r); break;
    case 4: combine_ins(from, to, 4, r); break;
    case 5: combine_ins(from, to, 5, r); break;
    default: combine_ins(from, to, 0, r); break;
    }
}

static void combine(const hyper_rows *r)
{
    if (r->to == QUERN_F32) {
#define CALL(t) combine_as(t, QUERN_F32, r)
        BY_DTYPE(r->from, CALL);
#undef CALL
    } else if (r->to == QUERN_BF16) combine_as(QUERN_BF16, QUERN_BF16, r);
    else combine_as(QUERN_F16, QUERN_F16, r);
}

#endif
