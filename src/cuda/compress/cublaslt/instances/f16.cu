/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "compress/cublaslt/kernel.cuh"

quern_status compress_gemm_forward_f16(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                       cudaStream_t stream)
{
    return p.f16 ? y_product<f16, f16>(p, m, at, stream) : y_product<f16, bf16>(p, m, at, stream);
}

quern_status compress_gemm_backward_f16(const gemm_plan &p, const matrix_kernel &m, const gemm_buffers &at,
                                        cudaStream_t stream)
{
    return p.f16 ? backward<f16, f16>(p, m, at, stream) : backward<f16, bf16>(p, m, at, stream);
}
