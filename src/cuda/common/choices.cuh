/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* choices.cuh - the inverted index of lists: for each entry, which queries of a slice chose it. */
#ifndef QUERN_CUDA_CHOICES_CUH
#define QUERN_CUDA_CHOICES_CUH

#include "common/device.cuh"

/* Of 32 queries of a slice: which chose an entry, and how many of the slice's queries before them did. */
struct choice {
    uint32_t chose;
    int32_t before;
};

/* Counts the queries before each of the `words` words of an entry; returns all of them. A warp calls. */
template <typename N> __device__ __forceinline__ int rank_choices(choice *x, N words)
{
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (N word = lane; word - lane < words; word += 32) {
        const int here = word < words ? __popc(x[word].chose) : 0;
        int sum = here;
#pragma unroll
        for (int w = 1; w < 32; w *= 2) {
            const int other = __shfl_up_sync(~0u, sum, w);
            sum += lane >= w ? other : 0;
        }
        if (word < words) x[word].before = before + sum - here;
        before += __shfl_sync(~0u, sum, 31);
    }
    return before;
}

#endif
