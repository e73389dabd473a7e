/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* wgmma.cuh - warpgroup products m64nNk16 of operands in shared memory, tiles of mma.cuh. A's 16 stand in a
 * row; so do B's, or else (ROWS) they are rows. */
#ifndef QUERN_CUDA_HOPPER_WGMMA_CUH
#define QUERN_CUDA_HOPPER_WGMMA_CUH

#include "common/wgmma.cuh"

#ifdef QUERN_WGMMA
#define HOPPER_SS(type, n, size, at_a, at_b, at_add, at_rows)                                                \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #at_add ", 0; wgmma.mma_async.sync.aligned.m64n" #n      \
                 "k16.f32." type "." type " {" WG_LIST_##size "}, %" #at_a ", %" #at_b                       \
                                                              ", p, 1, 1, 0, %" #at_rows "; }"               \
                 : WG_TILES_##size(c)                                                                        \
                 : "l"(a), "l"(b), "n"((int)ADD), "n"((int)ROWS))

/* C[64][N] (+)= A[64][16] B[16][N]; ADD false: C is overwritten. */
template <typename T, int N, bool ADD, bool ROWS>
__device__ __forceinline__ void wgmma_ss(float (&c)[N / 8][4], uint64_t a, uint64_t b)
{
    constexpr bool B16 = __is_same(T, bf16);
    static_assert(N == 64 || N == 128, "an instance a width");
    if constexpr (N == 64 && B16) HOPPER_SS("bf16", 64, 32, 32, 33, 34, 35);
    else if constexpr (N == 64) HOPPER_SS("f16", 64, 32, 32, 33, 34, 35);
    else if constexpr (N == 128 && B16) HOPPER_SS("bf16", 128, 64, 64, 65, 66, 67);
    else HOPPER_SS("f16", 128, 64, 64, 65, 66, 67);
}
#endif

#endif
