/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * row_kernels.h - the row kernels that every family's stages use, to whose table others point. They get
 * pointers and sizes; they never validate, allocate or start threads. n is any number >= 0, and no alignment
 * beyond an element's is needed.
 */
#ifndef QUERN_CPU_ROW_KERNELS_H
#define QUERN_CPU_ROW_KERNELS_H

#include <quern/quern.h>

typedef struct row_kernels {
    quern_cpu_level level;
    /* dst[i] = src[i] in another dtype of f32, f16 and bf16, rounded to nearest even. */
    void (*convert)(const void *src, quern_dtype from, void *dst, quern_dtype to, int64_t n);
    /* sum[i] += scale * x[i]. An x of -0 counts as +0: 0 times an unseen key may have given it its sign. */
    void (*add_scaled)(float *sum, const float *x, float scale, int64_t n);
    /* The bits of the largest |x[i]|; 0x7f800000 or more if one of them is infinite or NaN. */
    uint32_t (*magnitude)(const void *x, quern_dtype dtype, int64_t n);
    /* Makes earlier non-temporal stores visible to other threads. */
    void (*fence)(void);
    /* out = x weight / sqrt(mean(x^2) + eps); out may be x. */
    void (*norm_row)(const float *x, const float *weight, float eps, int64_t n, float *out);
    /* From d, the gradient of out: d becomes that of x, and d_weight (may be NULL) gets its share added. */
    void (*norm_backward)(const float *x, const float *weight, float eps, int64_t n, float *d,
                          float *d_weight);
    /* Rotates the pairs (2m, 2m + 1) of a row's n channels by the angles whose n / 2 cosines and sines are
     * given. */
    void (*rotate_row)(float *row, const float *cosines, const float *sines, int64_t n, bool inverse);
    /* The Walsh-Hadamard transform in Sylvester's order over sqrt(n); n is a power of two. */
    void (*hadamard_row)(float *row, int64_t n);
} row_kernels;

#endif
