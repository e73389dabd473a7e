/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * row_kernels.h - the row kernels that every family's stages use: one table per CPU level, to which the other
 * tables point. They get pointers and sizes; they never validate, allocate or start threads. n is any number
 * >= 0, and no alignment beyond an element's is needed.
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
} row_kernels;

const row_kernels *row_kernels_for(quern_cpu_level level);
extern const row_kernels row_kernels_portable, row_kernels_avx2, row_kernels_avx512;

#endif
