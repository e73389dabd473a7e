/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "compress/cublaslt/kernel.cuh"

quern_status compress_gemm_forward_bf16(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                        cudaStream_t stream)
{
    return y_product<bf16, bf16>(p, m, at, stream);
}

quern_status compress_gemm_backward_bf16(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                         cudaStream_t stream)
{
    return backward<bf16, bf16>(p, m, at, stream);
}
