/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* products.cuh - the products of a whole stage, and its return to the feed by the warps that have read it. */
#ifndef QUERN_CUDA_HOPPER_PRODUCTS_CUH
#define QUERN_CUDA_HOPPER_PRODUCTS_CUH

#include "hopper/ring.cuh"
#include "hopper/wgmma.cuh"

/* Arrivals of a warp that returns a stage: one, as 32 at one address come one after the other; all lanes' in
 * a build for compute-sanitizer's racecheck, which does not follow __syncwarp(). */
#ifdef QUERN_RACECHECK
enum { READER_ARRIVALS = 32 };
#else
enum { READER_ARRIVALS = 1 };
#endif

/* A warp has read its part of a stage. */
template <int STAGES>
__device__ __forceinline__ void give_back_by_warp(ring<STAGES> &stages, const ring_place<STAGES> &at)
{
    __syncwarp();
    if (threadIdx.x % 32 < READER_ARRIVALS) stages.give_back(at);
}

#ifdef QUERN_WGMMA
/* Begins C[64][N] = A[64][16 STEPS] B, A in registers, B a tile of mma.cuh of N rows of those 16 STEPS. */
template <typename T, int N, int STEPS>
__device__ __forceinline__ void wg_rs_tile(float (&c)[N / 8][4], const uint32_t (&a)[STEPS][4], uint32_t tile)
{
    const uint64_t b = wg_fresh(wg_tile(tile, 0));
    wg_start();
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const uint64_t step = wg_further(b, i / 4 * (N * 128) + i % 4 * 32);
        if (i == 0) wg_rs_wide<T, N, false, false>(c, a[i], step);
        else wg_rs_wide<T, N, true, false>(c, a[i], step);
    }
    wg_commit();
}
#endif

#endif
