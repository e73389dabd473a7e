/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e4m3_gemm.cu - the variants of products with e4m3 weights, which round activations themselves. */
#include "variants.cuh"

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_large, e4m3_gemm_sm90_row, e4m3_gemm_sm90_fp8,
    e4m3_gemm_sm90_short, e4m3_gemm_sm90_few, e4m3_gemm_sm90, e4m3_gemm_any;

static const variant<e4m3_gemm_args> *const list[] = {
#ifdef QUERN_SM90
    &e4m3_gemm_sm90_large,
    &e4m3_gemm_sm90_row,
    &e4m3_gemm_sm90_fp8,
    &e4m3_gemm_sm90_short,
    &e4m3_gemm_sm90_few,
    &e4m3_gemm_sm90,
#endif
    &e4m3_gemm_any,
};
static const variants<e4m3_gemm_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<e4m3_gemm_args, kernels>(backend.e4m3_gemm);
});
