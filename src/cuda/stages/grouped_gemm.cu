/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* grouped_gemm.cu - experts' products by NVFP4 weights. */
#include "variants.cuh"

extern const variant<grouped_gemm_args> grouped_gemm_sm90_fp8, grouped_gemm_any_fp8, grouped_gemm_sm90,
    grouped_gemm_any, grouped_gemm_backward_sm90, grouped_gemm_backward_any;

static const variant<grouped_gemm_args> *const forward_list[] = {
#ifdef QUERN_SM90
    &grouped_gemm_sm90_fp8,
    &grouped_gemm_sm90,
#endif
    &grouped_gemm_any_fp8,
    &grouped_gemm_any,
};
static const variants<grouped_gemm_args> forward(forward_list);
static const variant<grouped_gemm_args> *const backward_list[] = {
#ifdef QUERN_SM90
    &grouped_gemm_backward_sm90,
#endif
    &grouped_gemm_backward_any,
};
static const variants<grouped_gemm_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<grouped_gemm_args, forward>(backend.grouped_gemm);
    offer<grouped_gemm_args, backward>(backend.grouped_gemm_backward);
});
