/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_products.h - rows of x times columns of fn along their channels, written once over the level's
 * vectors.
 *
 * Sums stay in lanes from one piece of the channels to the next, the squares of x as one more column, and
 * fold() adds the lanes at the end: a block of 4 rows and 6 columns (AVX-512; 3 and 4 at the other levels)
 * loads and stores its sums once a piece. Lanes lie as blocks pass them: by rows taken at once, block, row,
 * column. A pair of vectors takes 48 FMAs, 12 loads of fn and 8 of x, whose widening is an instruction a
 * vector, so the limit is the FMA pipes: 0.97 of them over 1024 channels. fn that several rows meet is packed
 * by blocks of columns, [pair][column][vector], one stream of memory in the order of x's dtype.
 */
#ifndef QUERN_CPU_HYPER_PRODUCTS_H
#define QUERN_CPU_HYPER_PRODUCTS_H

#include "cpu/hyper/hyper_kernels.h"
#include "cpu/hyper/hyper_pairs.h"

#if defined(__AVX512F__)
enum { DOT_ROWS = 4, DOT_COLUMNS = 6 };
#else
enum { DOT_ROWS = 3, DOT_COLUMNS = 4 };
#endif

INLINE int64_t pack_floats(int64_t n, int64_t columns)
{
    return (n + PAIR - 1) / PAIR * PAIR * columns;
}

/* A block's columns from `from` on, ld apart. */
INLINE void pack_block(const quern_dtype order, const float *from, int64_t ld, int64_t columns, int64_t n,
                       float *to)
{
    for (int64_t at = 0; at < n; at += PAIR)
        for (int64_t j = 0; j < columns; j++, to += PAIR) {
            const float *column = from + j * ld;
            vpair v = {load_some(column, QUERN_F32, at, n),
                       at + LANES < n ? load_some(column, QUERN_F32, at + LANES, n) : (vfloat){0}};
            if (at + PAIR <= n) v = in_order_of(order, v);
            v_store(to, v.first);
            v_store(to + LANES, v.second);
        }
}

static void pack(const float *from, int64_t ld, int64_t columns, int64_t n, quern_dtype order, float *to)
{
    for (int64_t j = 0; j < columns;) {
        const int64_t width = columns - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
        if (order == QUERN_BF16) pack_block(QUERN_BF16, from + j * ld, ld, width, n, to);
        else pack_block(QUERN_F32, from + j * ld, ld, width, n, to);
        to += pack_floats(n, width);
        j += width;
    }
}

INLINE void unpack_block(const quern_dtype order, const float *from, int64_t columns, int64_t n, float *to,
                         int64_t ld)
{
    for (int64_t at = 0; at < n; at += PAIR)
        for (int64_t j = 0; j < columns; j++, from += PAIR) {
            vpair v = {v_load(from), v_load(from + LANES)};
            if (at + PAIR <= n) v = out_of_order(order, v);
            store_some(to + j * ld, QUERN_F32, at, n, v.first);
            if (at + LANES < n) store_some(to + j * ld, QUERN_F32, at + LANES, n, v.second);
        }
}

static void unpack(const float *from, int64_t columns, int64_t n, quern_dtype order, float *to, int64_t ld)
{
    for (int64_t j = 0; j < columns;) {
        const int64_t width = columns - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
        if (order == QUERN_BF16) unpack_block(QUERN_BF16, from, width, n, to + j * ld, ld);
        else unpack_block(QUERN_F32, from, width, n, to + j * ld, ld);
        from += pack_floats(n, width);
        j += width;
    }
}

/* Both vectors of a pair, at fn and row by row at x; `columns` and `rows` are constants. */
INLINE void multiply_pair(const quern_dtype from, const bool packed, const int rows, const int columns,
                          const char *x, int64_t step, const float *fn, int64_t ld_fn,
                          vfloat sum[DOT_ROWS][DOT_COLUMNS])
{
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        vfloat row[DOT_ROWS];
        /* Otherwise the compiler keeps the rows' words for their second half, and spills sums. */
        __asm__("" : "+r"(x));
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const char *p = x + i * step;
            if (!packed) row[i] = load_as(p, from, half * LANES);
            else row[i] = half == 0 ? load_first(p, from, 0) : load_second(p, from, 0);
        }
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) {
            const vfloat column = v_load(fn + (packed ? j * PAIR : j * ld_fn) + half * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][j] = v_fma(row[i], column, sum[i][j]);
        }
    }
}

/* The channels behind the whole pairs: rest [rows][columns][LANES]. */
INLINE void multiply_rest(const quern_dtype from, const bool packed, const int rows, const int columns,
                          const hyper_products *p, const char *x, const float *fn, float *rest)
{
    const int64_t whole = p->n / PAIR * PAIR;
    memset(rest, 0, (size_t)(rows * columns * LANES) * sizeof(float));
    for (int64_t at = whole; at < p->n; at += LANES)
        for (int j = 0; j < columns; j++) {
            const vfloat column = packed ? v_load(fn + (whole * columns + j * PAIR) + (at - whole))
                                         : load_some(fn + j * p->ld_fn, QUERN_F32, at, p->n);
            for (int i = 0; i < rows; i++) {
                float *sum = rest + (i * columns + j) * LANES;
                const vfloat row = load_some(x + i * p->ld_x * dtype_bytes(from), from, at, p->n);
                v_store(sum, v_fma(row, column, v_load(sum)));
            }
        }
}

/* A block: its sums of the whole pairs, then of the others, are added to the lanes at once, so that pieces
 * may as well be summed apart. Requests ahead[0], ahead[1] on its way. */
INLINE void multiply_block(const quern_dtype from, const bool packed, const int rows, const int columns,
                           const hyper_products *p, const char *x, const float *fn, float *lanes,
                           const char *const ahead[2])
{
    const int64_t step = p->ld_x * dtype_bytes(from);
    const char *first = ahead[0], *second = ahead[1];
    const float *next = lanes + rows * columns * LANES;
    float rest[DOT_ROWS * DOT_COLUMNS * LANES];
    if (p->n % PAIR != 0) multiply_rest(from, packed, rows, columns, p, x, fn, rest);
    vfloat sum[DOT_ROWS][DOT_COLUMNS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) sum[i][j] = (vfloat){0};
    for (int64_t at = 0; at + PAIR <= p->n; at += PAIR) {
        for (int64_t line = 0; line < PAIR * dtype_bytes(from); line += 64) {
            if (first != NULL) __builtin_prefetch(first + line, 0, 2);
            if (second != NULL) __builtin_prefetch(second + line, 0, 2);
        }
        __builtin_prefetch(next);
        next += LANES;
        multiply_pair(from, packed, rows, columns, x, step, fn, p->ld_fn, sum);
        x += PAIR * dtype_bytes(from);
        fn += packed ? columns * PAIR : PAIR;
        if (first != NULL) first += PAIR * dtype_bytes(from);
        if (second != NULL) second += PAIR * dtype_bytes(from);
    }
    if (p->n % PAIR != 0) {
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 6
            for (int j = 0; j < columns; j++) sum[i][j] += v_load(rest + (i * columns + j) * LANES);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 6
        for (int j = 0; j < columns; j++) {
            float *to = lanes + (i * columns + j) * LANES;
            v_store(to, v_load(to) + sum[i][j]);
        }
}

INLINE void add_squares(const quern_dtype from, const hyper_products *p, const char *x, float *lanes)
{
    vfloat sum[4] = {{0}, {0}, {0}, {0}};
    int64_t at = 0;
    for (; at + 2 * PAIR <= p->n; at += 2 * PAIR) {
        const vpair low = load_two(x, from, at), high = load_two(x, from, at + PAIR);
        sum[0] = v_fma(low.first, low.first, sum[0]);
        sum[1] = v_fma(low.second, low.second, sum[1]);
        sum[2] = v_fma(high.first, high.first, sum[2]);
        sum[3] = v_fma(high.second, high.second, sum[3]);
    }
    for (; at < p->n; at += LANES) {
        const vfloat y = load_some(x, from, at, p->n);
        sum[0] = v_fma(y, y, sum[0]);
    }
    v_store(lanes, v_load(lanes) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
}

/* Row `row` of what is read later; nothing past the block's rows. */
INLINE void ahead_row(const hyper_ahead *ahead, int64_t row, bool there, const char *at[2])
{
    for (int i = 0; i < 2; i++)
        at[i] = there && ahead->rows[i] != NULL ? ahead->rows[i] + row * ahead->stride[i] : NULL;
}

/* Rows from row0 on. Each block of columns requests one row of what is read later. */
INLINE void multiply_rows(const quern_dtype from, const bool packed, const int rows, const hyper_products *p,
                          int64_t row0)
{
    const char *x = (const char *)p->x + row0 * p->ld_x * dtype_bytes(from), *at[2];
    const float *fn = p->fn;
    float *lanes = p->lanes + row0 * (p->columns + 1) * LANES;
    const int64_t piece = packed ? pack_floats(p->n, 1) : p->ld_fn;
    int64_t j = 0;
    for (int block = 0; j + DOT_COLUMNS <= p->columns; j += DOT_COLUMNS, block++) {
        ahead_row(&p->ahead, row0 + block, block < rows, at);
        multiply_block(from, packed, rows, DOT_COLUMNS, p, x, fn + j * piece, lanes + j * rows * LANES, at);
    }
    ahead_row(&p->ahead, 0, false, at);
    for (; j < p->columns; j++)
        multiply_block(from, packed, rows, 1, p, x, fn + j * piece, lanes + j * rows * LANES, at);
    for (int i = 0; i < rows; i++)
        add_squares(from, p, x + i * p->ld_x * dtype_bytes(from), lanes + (p->columns * rows + i) * LANES);
}

INLINE void add_products_of(const quern_dtype from, const bool packed, const hyper_products *p)
{
    int64_t row = 0;
    for (; row + DOT_ROWS <= p->rows; row += DOT_ROWS) multiply_rows(from, packed, DOT_ROWS, p, row);
    for (; row < p->rows; row++) multiply_rows(from, packed, 1, p, row);
}

static void add_products(const hyper_products *p)
{
    if (p->ld_fn == 0) {
#define CALL(t) add_products_of(t, true, p)
        BY_DTYPE(p->from, CALL);
#undef CALL
    } else {
#define CALL(t) add_products_of(t, false, p)
        BY_DTYPE(p->from, CALL);
#undef CALL
    }
}

/* The sums of `count` vectors. */
INLINE void fold_some(const float *lanes, int count, float *sums)
{
    vfloat v[LANES];
    for (int k = 0; k < count; k++) v[k] = v_load(lanes + k * LANES);
    v_store_first(sums, count, lane_sums(v, count));
}

INLINE void fold_rows(const int rows, const float *lanes, int64_t columns, float *sums, int64_t ld)
{
    for (int64_t j = 0; j < columns;) {
        const int width = columns - j >= DOT_COLUMNS ? DOT_COLUMNS : 1;
        for (int i = 0; i < rows; i++)
            fold_some(lanes + (j * rows + i * width) * LANES, width, sums + i * ld + j);
        j += width;
    }
    for (int i = 0; i < rows; i++)
        fold_some(lanes + (columns * rows + i) * LANES, 1, sums + i * ld + columns);
}

static void fold(const float *lanes, int64_t rows, int64_t columns, float *sums, int64_t ld)
{
    int64_t row = 0;
    for (; row + DOT_ROWS <= rows; row += DOT_ROWS)
        fold_rows(DOT_ROWS, lanes + row * (columns + 1) * LANES, columns, sums + row * ld, ld);
    for (; row < rows; row++) fold_rows(1, lanes + row * (columns + 1) * LANES, columns, sums + row * ld, ld);
}

#endif
