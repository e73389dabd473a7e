/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - a step's dense attention on the f32 cores. */
#ifndef QUERN_CUDA_DECODE_PLAIN_KERNEL_CUH
#define QUERN_CUDA_DECODE_PLAIN_KERNEL_CUH

#include "decode/kernel.cuh"
#include "decode/plain/walk.cuh"

namespace decode_dense
{

template <typename T, int PANELS>
__global__ void __launch_bounds__(THREADS, PANELS == 1 ? 4 : 2)
    decode_plain(const __grid_constant__ dense_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_share(a, *(block_memory<plain_walk<T, PANELS>> *)memory);
}

template <typename T> static quern_status launch_plain(const dense_kernel &a, const launcher &to)
{
    const int dim = a.plane.dim > a.plane.dim_v ? a.plane.dim : a.plane.dim_v;
    return dim <= 128   ? launch<plain_walk<T, 1>>(decode_plain<T, 1>, a, to)
           : dim <= 256 ? launch<plain_walk<T, 2>>(decode_plain<T, 2>, a, to)
                        : launch<plain_walk<T, 4>>(decode_plain<T, 4>, a, to);
}

} // namespace decode_dense

#endif
