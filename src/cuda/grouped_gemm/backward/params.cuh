/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the gradient of the grouped product's A as its kernels take it. */
#ifndef QUERN_CUDA_GROUPED_GEMM_BACKWARD_PARAMS_CUH
#define QUERN_CUDA_GROUPED_GEMM_BACKWARD_PARAMS_CUH

#include "grouped_gemm/params.cuh"

struct backward_params {
    int64_t tokens, width, stride; /* width: of a part, whole panels */
    expert_ends ends;
    weight_source b;
    bf16 *d; /* [tokens][parts][width] */
    int32_t parts;
    const void *d_c;
    quern_dtype d_c_dtype, d_a_dtype;
    int64_t d_c_stride, d_a_stride;
    void *d_a;
    const float *a_global, *b_global;
    int64_t a_global_stride, b_global_expert;
    quantise_global a_per;
    int32_t b_parts, run;
};

backward_params backward_params_of(const grouped_gemm_args *args, void *workspace);
/* The terms of the gradient's epilogue, and the faults of what it reads. */
gemm_params gradient_terms(const stage_exec *exec, const grouped_gemm_args *args, const backward_params &a);
/* Writes a.d. */
quern_status gradient_ready(const stage_exec *exec, const backward_params &a);
bool gradient_takes(const grouped_gemm_args *args, char why[STAGE_WHY_BYTES]);
size_t gradient_bytes(const stage_exec *exec, const grouped_gemm_args *args);

#endif
