/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tensor.cuh - a step's sparse attention on the tensor cores. */
#ifndef QUERN_CUDA_NSA_DECODE_TENSOR_CUH
#define QUERN_CUDA_NSA_DECODE_TENSOR_CUH

#include "decode/tensor/walk.cuh"
#include "nsa_decode/kernel.cuh"

namespace nsa_decode
{

template <typename T, int DP>
__global__ void __launch_bounds__(THREADS, DP <= 128 ? 2 : 1)
    nsa_decode_tensor(const __grid_constant__ nsa_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_queries(a, *(nsa_memory<tensor_walk<T, DP>> *)memory);
}

template <typename T, int DP>
static quern_status launch_tensor(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    return launch<tensor_walk<T, DP>>(nsa_decode_tensor<T, DP>, exec, a, to);
}

} // namespace nsa_decode

#endif
