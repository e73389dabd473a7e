/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - a step's dense attention on the tensor cores. */
#ifndef QUERN_CUDA_DECODE_TENSOR_KERNEL_CUH
#define QUERN_CUDA_DECODE_TENSOR_KERNEL_CUH

#include "decode/kernel.cuh"
#include "decode/tensor/walk.cuh"

namespace decode_dense
{

template <typename T, int DP>
__global__ void __launch_bounds__(THREADS, DP <= 128 ? 2 : 1)
    decode_tensor(const __grid_constant__ dense_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_share(a, *(block_memory<tensor_walk<T, DP>> *)memory);
}

template <typename T, int DP> static quern_status launch_tensor(const dense_kernel &a, const launcher &to)
{
    return launch<tensor_walk<T, DP>>(decode_tensor<T, DP>, a, to);
}

} // namespace decode_dense

#endif
