/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - how a product by weights is cut, and the products, compiled in a file for each
 * dtype. */
#ifndef QUERN_CUDA_COMPRESS_CUBLASLT_PARAMS_CUH
#define QUERN_CUDA_COMPRESS_CUBLASLT_PARAMS_CUH

#include "compress/matrix/params.cuh"

/* One product's cut: `rows` at a time, then `outer` (positions, or tokens of a block), then `inner` (covers).
 */
struct cut {
    int64_t all_rows, rows, outer, inner;
    int64_t weights, a, b, c; /* bytes */
};

struct gemm_plan {
    int64_t heads, dim, positions, covers, phases;
    int64_t x_pieces, g_pieces, terms; /* terms: of y's rows, or of d_x's */
    bool f16;                          /* of the products' operands */
    cut y, d_x, d_w;
    size_t weights, a, b, c, scratch; /* bytes of the parts of the workspace, in this order */
};

/* The parts of the workspace. */
struct gemm_room {
    char *weights, *a, *b, *c, *scratch;
};

/* The products of a direction. */
typedef quern_status gemm_part(const gemm_plan &p, const matrix_kernel &m, const gemm_room &at,
                               cudaStream_t stream);
gemm_part compress_gemm_forward_bf16, compress_gemm_forward_f16;
gemm_part compress_gemm_backward_bf16, compress_gemm_backward_f16;

#endif
