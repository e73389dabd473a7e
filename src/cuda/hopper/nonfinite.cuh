/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nonfinite.cuh - the search for NaN and infinity in a stage by warps of the feed (common/nonfinite.cuh). */
#ifndef QUERN_CUDA_HOPPER_NONFINITE_CUH
#define QUERN_CUDA_HOPPER_NONFINITE_CUH

#include "common/nonfinite.cuh"
#include "hopper/barrier.cuh"

/* Whether something in part `part` of PARTS of a tile is not finite; where CLEAR it becomes 0, for threads
 * and copies alike. All lanes of a warp call. */
template <typename T, int BYTES, int PARTS, bool CLEAR>
__device__ __forceinline__ bool find_nonfinite(char *tile, int part)
{
    const int from = (part * 32 + (threadIdx.x & 31)) * 16;
    uint32_t most = 0;
#pragma unroll 4
    for (int i = from; i < BYTES; i += PARTS * 512) most = largest_bits(most, *(const uint4 *)(tile + i));
    const bool found = is_nonfinite<T>(most);
    if (CLEAR && found) {
#pragma unroll 1
        for (int i = from; i < BYTES; i += PARTS * 512) {
#pragma unroll 1
            for (int j = 0; j < 16; j += 2) clear_nonfinite<T>((uint16_t *)(tile + i + j));
        }
        async_fence();
    }
    return __any_sync(~0u, found);
}

#endif
