/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fold.cuh - sums over lanes by recursive halving: each lane ends with a part of them. */
#ifndef QUERN_CUDA_COMMON_FOLD_CUH
#define QUERN_CUDA_COMMON_FOLD_CUH

/* Adds what the lanes that differ in `bit` hold, half of the N values each. */
template <int N, int M> __device__ __forceinline__ void fold(float (&x)[M], int bit)
{
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float give = upper ? x[i] : x[i + N / 2], keep = upper ? x[i + N / 2] : x[i];
        x[i] = keep + __shfl_xor_sync(~0u, give, bit);
    }
}

/* The sums over all lanes: lane l ends with number l / (32 / N) of N, a power of two, in x[0]. */
template <int N, int BIT, int M> __device__ __forceinline__ void fold_lanes(float (&x)[M])
{
    if constexpr (N > 1) fold<N>(x, BIT);
    else x[0] += __shfl_xor_sync(~0u, x[0], BIT);
    if constexpr (BIT > 1) fold_lanes<(N > 1 ? N / 2 : 1), BIT / 2>(x);
}

#endif
