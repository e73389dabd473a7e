/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_gemm.h - the grouped product and SwiGLU in float64, with what bounds an f32 result. */
#ifndef QUERN_ORACLE_NVFP4_GEMM_H
#define QUERN_ORACLE_NVFP4_GEMM_H

#include <stdint.h>

/* Operands as values without their globals; a row's and a column's global multiply as one f32. */
typedef struct oracle_product {
    int64_t tokens, n, k, experts;
    const int32_t *ends;      /* [experts] */
    const double *a, *b;      /* [T, K], [E, K, N] */
    const double *a_global;   /* [T] */
    const double *b_global;   /* [E, N] */
    const double *bias, *old; /* [E, N], [T, N]; NULL: 0 */
    double *c, *size;         /* [T, N]: the result, and the sum of its terms' absolute values */
    double *root;             /* [T, N]: the root of the sum of the products' squares; NULL: not wanted */
} oracle_product;

/* Rows past the last end are left alone. */
void oracle_grouped_product(const oracle_product *p);
/* SwiGLU of a gate and an up value; limit 0: no clamp. */
double oracle_swiglu(double gate, double up, double limit, double alpha, double beta);

/* Its derivatives by gate and by up; 0 beyond the limit. */
void oracle_swiglu_gradient(double gate, double up, double limit, double alpha, double beta, double d[2]);

#endif
