/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * grouped_gemm.h - C = A B, each expert's rows of A [T, K] by its NVFP4 matrix B [K, N]. A is in floats,
 * in NVFP4, or is rounded to int8 inside, or to e4m3 with the weights (<quern/nvfp4.h>). Without offsets
 * there is one expert, which has all rows.
 *
 * Result = fl(acc fl(G_A G_B)) + bias + C_old in f32, in that order. Then, under `swiglu`, columns that
 * interleave gate and up become half as many; then one rounding to C's dtype, or quantisation to c_codes and
 * c_scales with the global c_global.
 *
 * The backward makes d_a = (d_c G_B) B^T fl(G_A) from the gradient of the product as it stands before SwiGLU;
 * it looks at B, its globals, a_global and offsets alone.
 */
#ifndef QUERN_STAGES_GROUPED_GEMM_H
#define QUERN_STAGES_GROUPED_GEMM_H

#include "stages/prepack.h"
#include "stages/quantise.h"
#include "stages/swiglu.h"

typedef struct grouped_gemm_args {
    int64_t tokens, n, k;
    bool int8;                    /* a is rounded to int8, one scale per row */
    bool fp8;                     /* a and b are rounded to e4m3 */
    quern_tensor a;               /* f32, f16, bf16 [T, K]; or absent */
    quern_tensor a_codes;         /* u8 [T, K/2] */
    quern_tensor a_scales;        /* [T, K/16]; with pad_row_offsets [bytes], in the order of tensor cores */
    quern_tensor pad_row_offsets; /* i32 [E + 1]: where each expert's scales begin, in rows */
    quantise_global a_per;
    quern_tensor a_global; /* a trailing extent of 1; absent: 1 */
    bool k_major;
    scale_order order;
    quern_tensor b_codes, b_scales; /* as prepack's; or absent */
    quern_tensor b_repacked;        /* u8 [E, bytes] */
    quern_tensor b_global; /* [1, 1], [E, 1], or [E, 2]: gate's and up's by the rule's runs; absent: 1 */
    quern_tensor offsets;  /* i32 [E], or absent */
    quern_tensor bias;     /* f32, f16, bf16 [E, N], or absent */
    bool swiglu;
    swiglu_rule rule;
    quern_tensor c_old; /* as c, perhaps c itself: the result is added to it, rows past the last offset are
                         * copied; or absent */
    quern_tensor c;     /* f32, f16, bf16 [T, N], or [T, N/2] under swiglu; absent: */
    quantise_profile profile;
    quern_tensor c_codes, c_scales, c_global; /* c_global: [1, 1] or [E, 1] */
    /* f32, f16, bf16 [T, N] and [T, K]; of the backward. Zeros in d_a past the last offset */
    quern_tensor d_c, d_a;
} grouped_gemm_args;
STAGE_DECLARE(grouped_gemm);
#define GROUPED_GEMM_TENSORS(IN, OUT, GRAD)                                                                  \
    IN(a)                                                                                                    \
    IN(a_codes)                                                                                              \
    IN(a_scales)                                                                                             \
    IN(pad_row_offsets)                                                                                      \
    IN(a_global)                                                                                             \
    IN(b_codes)                                                                                              \
    IN(b_scales) IN(b_repacked) IN(b_global) IN(offsets) IN(bias) IN(c_old) OUT(c) OUT(c_codes)              \
        OUT(c_scales) IN(c_global) IN(d_c) GRAD(d_a)
#define GROUPED_GEMM_VALUES(F)                                                                               \
    F(tokens)                                                                                                \
    F(n)                                                                                                     \
    F(k) F(int8) F(fp8) F(a_per) F(k_major) F(order) F(swiglu) SWIGLU_RULE_VALUES(F) F(profile)

#endif
