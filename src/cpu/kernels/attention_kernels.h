/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_kernels.h - the tile kernels of attention. They get pointers, sizes and strides; they never
 * validate, allocate or start threads.
 *
 * One micro-kernel computes every product C = A B of the forward and the backward pass, because operands
 * have these layouts:
 *   A: element (i, p) at a[i * a_row + p * a_k]. It is broadcast, so a transposed A costs nothing.
 *   B: row p at b + p * ldb, read in vectors along its columns.
 *   bf16: elements are 32-bit words of two bf16 values that are neighbours along k; k counts words.
 *   Key panels: [ceil(N / panel)][D][panel], keys along columns (the B of Q K^T).
 *   Value panels: [ceil(Dv / panel)][keys][panel], keys along rows (the B of P V), keys padded to a multiple
 *     of 64.
 * In bf16, a word of a panel holds two neighbours along D (keys) or two keys (values). Padding is zero.
 */
#ifndef QUERN_CPU_ATTENTION_KERNELS_H
#define QUERN_CPU_ATTENTION_KERNELS_H

#include "cpu/kernels/rows/row_kernels.h"

enum { MAX_DIM = 512 }; /* of a head */
enum { ACROSS_ROWS = 8, ACROSS_DEPTH = 256 };

/* A strided source of rows. */
typedef struct row_source {
    const void *data;
    quern_dtype dtype;
    int64_t stride; /* elements from row to row */
    int64_t rows, dim;
} row_source;

/* What a kernel that reads rows in place prefetches after them. */
typedef struct read_ahead {
    const void *next; /* any address: what is read next */
    bool l2;          /* stage_exec's prefetch_l2 */
} read_ahead;

/* The softmax of one tile of scores, row by row. Columns [lo[r], hi[r]) of row r are seen. */
typedef struct softmax_tile {
    float *s; /* [rows][lds]; P on return (f32, or bf16 from the row's start on) */
    int64_t lds;
    int32_t rows, columns; /* columns: how many P must define, a multiple of 16 */
    const int32_t *lo, *hi;
    float scale2;     /* scores are multiplied by this before exp2 */
    float *max, *sum; /* running; max of unscaled scores, -inf at first */
    float *shrink;    /* out: the factor for what the row has summed so far */
} softmax_tile;

/* The backward's row step: P = exp2((s - top) scale2) factor, dS = P (dp_scale dp - delta). Columns [lo[r],
 * hi[r]) of row r are seen; in the others both are 0. */
typedef struct softmax_backward_tile {
    float *s, *dp;         /* [rows][lds]; f32: row_scale * P and dS on return */
    int64_t lds;           /* even */
    int32_t rows, columns; /* columns: a multiple of 16; bf16: rows even */
    const int32_t *lo, *hi;
    float scale2;
    const float *top, *factor, *delta, *row_scale, *dp_scale; /* per row */
    /* bf16 results: row_scale * P and dS in pairs along rows [rows / 2][lds], dS in pairs along columns
     * [rows][lds / 2]. */
    uint32_t *p_pairs, *ds_pairs, *ds_words;
} softmax_backward_tile;

typedef void mm_kernel(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k,
                       const void *b, int64_t ldb, float *c, int64_t ldc, bool accumulate);

typedef void across_kernel(int64_t m, const void *a, int64_t lda, const row_source *b, float *c, int64_t ldc);

typedef void mm_scaled_kernel(int64_t m, int64_t n, int64_t k, const void *a, int64_t a_row, int64_t a_k,
                              const void *b, int64_t ldb, const float *scale, float *c, int64_t ldc,
                              bool accumulate);

typedef struct attention_kernels {
    quern_cpu_level level;
    const row_kernels *rows;
    int32_t panel; /* columns of a panel, a multiple of 16; n of a product is at most this */
    /* C[m][n] (+)= A B. The caller pads n to a multiple of 16. */
    mm_kernel *mm_f32, *mm_bf16; /* mm_bf16 is NULL where the level has no bf16 dot product */
    /* C[i][j] (+)= (A B)[i][j] scale[j], with one rounding where the level has FMA. */
    mm_scaled_kernel *mm_scaled_f32, *mm_scaled_bf16;
    /* c[i][j] = a[i] . b[j] for up to ACROSS_ROWS rows of a and the rows of b, whose dim is even, in place.
     * The bits are those of mm_bf16 over pieces of ACROSS_DEPTH, each added to c. lda counts elements. NULL
     * where mm_bf16 is. */
    across_kernel *mm_across_bf16;
    /* The same with weights, for which a level may have faster instructions: their bits may differ from those
     * of mm_bf16, but not from each other's. Words of A are neighbours (a_k is 1). */
    mm_kernel *mm_weights_bf16;
    across_kernel *across_weights_bf16;
    /* Products of few rows with bf16 keys and values in place; NULL where mm_bf16 is.
     * s[i][j] = q[i] . keys[j] for i < m, and any value in up to three columns past the last key; ldq counts
     * elements. o[i] (+)= sum of p[i][j] values[j] in the values' columns, and zeros up to a multiple of 16.
     * p are words of two weights; the word of a last single key has 0 as its other weight. */
    void (*score_rows_bf16)(int64_t m, const void *q, int64_t ldq, const row_source *keys, read_ahead ahead,
                            float *s, int64_t lds);
    void (*add_values_bf16)(int64_t m, const void *p, int64_t ldp, const row_source *values, read_ahead ahead,
                            float *o, int64_t ldo, bool accumulate);
    /* The same for rows of any dtype and f32 queries and weights, one a word, at every level. */
    void (*score_rows_f32)(int64_t m, const float *q, int64_t ldq, const row_source *keys, read_ahead ahead,
                           float *s, int64_t lds);
    void (*add_values_f32)(int64_t m, const float *p, int64_t ldp, const row_source *values, read_ahead ahead,
                           float *o, int64_t ldo, bool accumulate);
    /* dst[row][dim] = scale * row in contiguous f32, or bf16 without a scale. */
    void (*pack_rows_f32)(const row_source *src, float scale, float *dst, int64_t ldd);
    void (*pack_rows_bf16)(const row_source *src, uint16_t *dst, int64_t ldd);
    /* One key panel from up to `panel` rows. */
    void (*pack_keys_f32)(const row_source *src, int32_t panel, float *dst);
    void (*pack_keys_bf16)(const row_source *src, int32_t panel, uint32_t *dst);
    /* Rows [0, rows) of value panels; panel j at dst + j * panel_stride (elements or words). */
    void (*pack_values_f32)(const row_source *src, int32_t panel, float *dst, int64_t panel_stride);
    void (*pack_values_bf16)(const row_source *src, int32_t panel, uint32_t *dst, int64_t panel_stride);
    /* n rows of bf16 from anywhere, copied ldd elements apart, and the panels that pack_values_bf16() would
     * make of them. */
    void (*gather_pairs_bf16)(const void *const *rows, int64_t n, int64_t dim, uint16_t *to, int64_t ldd,
                              int32_t panel, uint32_t *pairs, int64_t panel_stride);
    void (*softmax_f32)(const softmax_tile *t);
    void (*softmax_bf16)(const softmax_tile *t);
    void (*softmax_backward_f32)(const softmax_backward_tile *t);
    void (*softmax_backward_bf16)(const softmax_backward_tile *t);
    /* o[0 .. n) = o * shrink. A zero becomes +0: 0 times an unseen key may have given it its sign. */
    void (*scale_row)(float *o, float shrink, int64_t n);
    /* o[0 .. n) = o * shrink + t. */
    void (*scale_add_row)(float *o, float shrink, const float *t, int64_t n);
} attention_kernels;

#endif
