/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - how compression's products by weights are divided, and a function a dtype and direction. */
#ifndef QUERN_CUDA_COMPRESS_CUBLASLT_PARAMS_CUH
#define QUERN_CUDA_COMPRESS_CUBLASLT_PARAMS_CUH

#include "compress/matrix/params.cuh"

/* How one product is divided: `rows` at a time, then `outer` (positions, or tokens of a block), then `inner`
 * (entries that overlap). */
struct blocking {
    int64_t all_rows, rows, outer, inner;
    int64_t weights, a, b, c; /* bytes */
};

struct gemm_plan {
    int64_t heads, dim, positions, overlap, stride;
    int64_t x_parts, g_parts, terms; /* terms: of y's rows, or of d_x's */
    bool f16;                        /* of the products' operands */
    blocking y, d_x, d_w;
    size_t weights, a, b, c, scratch; /* bytes of gemm_buffers */
};

/* The workspace, in this order. */
struct gemm_buffers {
    char *weights, *a, *b, *c, *scratch;
};

/* The products of a direction. */
typedef quern_status compress_gemm(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                   cudaStream_t stream);
compress_gemm compress_gemm_forward_bf16, compress_gemm_forward_f16;
compress_gemm compress_gemm_backward_bf16, compress_gemm_backward_f16;

#endif
