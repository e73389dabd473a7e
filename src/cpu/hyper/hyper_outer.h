/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_outer.h - the two products of a tile's backward, over packed fn, written once over the level's
 * vectors: out = a fn, as deep as fn has columns, and d_fn += a^T x, as deep as the tile has tokens.
 *
 * A block of 6 rows and 4 vectors (AVX-512; 2 vectors at the other levels) stays in registers: a step of 24
 * FMAs takes 4 vectors of fn or x, whose widening is an instruction each, and 6 broadcasts. The limit is the
 * FMA pipes; loads and stores of the sums are a tenth at a depth of 24, so a tile has twice as many tokens.
 */
#ifndef QUERN_CPU_HYPER_OUTER_H
#define QUERN_CPU_HYPER_OUTER_H

#include "cpu/hyper/hyper_products.h"

#if defined(__AVX512F__)
enum { OUTER_PAIRS = 2 };
#else
enum { OUTER_PAIRS = 1 };
#endif
enum { OUTER_ROWS = 6 };

/* `width` columns of fn from column j on, `fn` at the first of `pairs` pairs of their block; all but j are
 * constants. */
INLINE void times_columns(const int rows, const int pairs, const int width, const float *a, int64_t lda,
                          const float *fn, vpair sum[OUTER_ROWS][OUTER_PAIRS])
{
#pragma GCC unroll 6
    for (int j = 0; j < width; j++) {
        vpair column[OUTER_PAIRS];
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) {
            column[p].first = v_load(fn + (p * width + j) * PAIR);
            column[p].second = v_load(fn + (p * width + j) * PAIR + LANES);
        }
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            const vfloat m = v_splat(a[i * lda + j]);
#pragma GCC unroll 2
            for (int p = 0; p < pairs; p++) {
                sum[i][p].first = v_fma(m, column[p].first, sum[i][p].first);
                sum[i][p].second = v_fma(m, column[p].second, sum[i][p].second);
            }
        }
    }
}

/* Rows from `row` on, channels from `at` on. */
INLINE void times_block(const int rows, const int pairs, const hyper_outer *o, int64_t row, int64_t at)
{
    const int64_t piece = pack_floats(o->piece, 1);
    const float *a = o->a + row * o->lda, *fn = o->fn;
    vpair sum[OUTER_ROWS][OUTER_PAIRS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) sum[i][p] = (vpair){{0}, {0}};
    int64_t j = 0;
    for (; j + DOT_COLUMNS <= o->columns; j += DOT_COLUMNS, a += DOT_COLUMNS, fn += DOT_COLUMNS * piece)
        times_columns(rows, pairs, DOT_COLUMNS, a, o->lda, fn + (o->first + at) * DOT_COLUMNS, sum);
    for (; j < o->columns; j++, a++, fn += piece)
        times_columns(rows, pairs, 1, a, o->lda, fn + o->first + at, sum);
    float *out = o->out + row * o->ld_out + at;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++, out += o->ld_out) {
        __asm__("" : "+r"(out)); /* else an address for each row stays in a register */
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) {
            v_store(out + p * PAIR, sum[i][p].first);
            v_store(out + p * PAIR + LANES, sum[i][p].second);
        }
    }
}

static void times_fn(const hyper_outer *o)
{
    int64_t at = 0;
    for (; at + OUTER_PAIRS * PAIR <= o->n; at += OUTER_PAIRS * PAIR) {
        int64_t row = 0;
        for (; row + OUTER_ROWS <= o->rows; row += OUTER_ROWS)
            times_block(OUTER_ROWS, OUTER_PAIRS, o, row, at);
        for (; row < o->rows; row++) times_block(1, OUTER_PAIRS, o, row, at);
    }
    for (; at < o->n; at += PAIR)
        for (int64_t row = 0; row < o->rows; row++) times_block(1, 1, o, row, at);
}

/* The block of d_fn of `width` columns from j on; x at its channels. `whole`: the pairs are. */
INLINE void outer_block(const quern_dtype from, const int width, const int pairs, const hyper_outer *o,
                        int64_t j, int64_t at, const bool whole)
{
    const float *a = o->a + j;
    const char *x = (const char *)o->x + at * dtype_bytes(from);
    float *d = o->d_fn + j * pack_floats(o->piece, 1) + (o->first + at) * width;
    vpair sum[DOT_COLUMNS][OUTER_PAIRS];
#pragma GCC unroll 6
    for (int i = 0; i < width; i++)
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) sum[i][p] = (vpair){{0}, {0}};
    for (int64_t row = 0; row < o->rows; row++, a += o->lda, x += o->ld_x * dtype_bytes(from)) {
        vpair v[OUTER_PAIRS];
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) {
            if (whole) v[p] = load_two(x, from, p * PAIR);
            else {
                v[p].first = load_some(x, from, 0, o->n - at);
                v[p].second = at + LANES < o->n ? load_some(x, from, LANES, o->n - at) : (vfloat){0};
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < width; i++) {
            const vfloat m = v_splat(a[i]);
#pragma GCC unroll 2
            for (int p = 0; p < pairs; p++) {
                sum[i][p].first = v_fma(m, v[p].first, sum[i][p].first);
                sum[i][p].second = v_fma(m, v[p].second, sum[i][p].second);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < width; i++)
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++) {
            float *to = d + (p * width + i) * PAIR;
            v_store(to, v_load(to) + sum[i][p].first);
            v_store(to + LANES, v_load(to + LANES) + sum[i][p].second);
        }
}

INLINE void outer_columns(const quern_dtype from, const int width, const hyper_outer *o, int64_t j)
{
    int64_t at = 0;
    for (; at + OUTER_PAIRS * PAIR <= o->n; at += OUTER_PAIRS * PAIR)
        outer_block(from, width, OUTER_PAIRS, o, j, at, true);
    for (; at + PAIR <= o->n; at += PAIR) outer_block(from, width, 1, o, j, at, true);
    if (at < o->n) outer_block(from, width, 1, o, j, at, false);
}

INLINE void add_outer_of(const quern_dtype from, const hyper_outer *o)
{
    int64_t j = 0;
    for (; j + DOT_COLUMNS <= o->columns; j += DOT_COLUMNS) outer_columns(from, DOT_COLUMNS, o, j);
    for (; j < o->columns; j++) outer_columns(from, 1, o, j);
}

static void add_outer(const hyper_outer *o)
{
#define CALL(t) add_outer_of(t, o)
    BY_DTYPE(o->from, CALL);
#undef CALL
}

#endif
