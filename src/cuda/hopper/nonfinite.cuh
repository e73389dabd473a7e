/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nonfinite.cuh - NaN and infinity in tiles of 16-bit elements in shared memory: a factor of 0 does not undo
 * them, so a kernel finds and clears them where some row does not see all of a tile. */
#ifndef QUERN_CUDA_HOPPER_NONFINITE_CUH
#define QUERN_CUDA_HOPPER_NONFINITE_CUH

#include "hopper/barrier.cuh"
#include "common/device.cuh"

/* The least bits, without the sign, of what is not finite. */
template <typename T> static constexpr uint32_t NONFINITE_BITS = __is_same(T, bf16) ? 0x7f80 : 0x7c00;

/* The largest bits without signs so far, two values a word, and those of eight more elements. */
__device__ __forceinline__ uint32_t largest_bits(uint32_t most, const uint4 &x)
{
    return __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff),
                                   __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff)));
}
template <typename T> __device__ __forceinline__ bool is_nonfinite(uint32_t most)
{
    return (most & 0xffff) >= NONFINITE_BITS<T> || most >> 16 >= NONFINITE_BITS<T>;
}

template <typename T> __device__ __forceinline__ void clear_nonfinite(uint16_t *x)
{
    if ((*x & 0x7fff) >= NONFINITE_BITS<T>) *x = 0;
}

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
