/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plain.cuh - a step's sparse attention on the f32 cores. */
#ifndef QUERN_CUDA_NSA_DECODE_PLAIN_CUH
#define QUERN_CUDA_NSA_DECODE_PLAIN_CUH

#include "decode/plain/walk.cuh"
#include "nsa_decode/kernel.cuh"

namespace nsa_decode
{

template <typename T, int PANELS>
__global__ void __launch_bounds__(THREADS, 2) nsa_decode_plain(const __grid_constant__ nsa_kernel a)
{
    extern __shared__ __align__(128) char memory[];
    take_queries(a, *(nsa_memory<plain_walk<T, PANELS>> *)memory);
}

template <typename T>
static quern_status launch_plain(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    const int dim = a.plane[SLC].dim > a.plane[SLC].dim_v ? a.plane[SLC].dim : a.plane[SLC].dim_v;
    return dim <= 128 ? launch<plain_walk<T, 1>>(nsa_decode_plain<T, 1>, exec, a, to)
                      : launch<plain_walk<T, 2>>(nsa_decode_plain<T, 2>, exec, a, to);
}

} // namespace nsa_decode

#endif
