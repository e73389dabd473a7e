/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* products.cuh - the products of any GPU's kernels by Hopper's warpgroups: four warps hold 64 consecutive
 * rows. They serve the calls that the kernels with TMA and specialised warps do not take: listed
 * blocks, and wide heads. */
#ifndef QUERN_CUDA_ATTEND_SM90_WGMMA_PRODUCTS_CUH
#define QUERN_CUDA_ATTEND_SM90_WGMMA_PRODUCTS_CUH

#include "common/mma.cuh"
#include "hopper/wgmma.cuh"

struct warpgroup_products {
    static __device__ __forceinline__ void show() { wg_show(); }
    static __device__ __forceinline__ void start() { wg_start(); }
    static __device__ __forceinline__ void finish() { wg_finish(); }

    template <typename T, int DP, int NT, int ROWS_A, int ROWS_B>
    static __device__ __forceinline__ void nt(float (&acc)[NT][4], uint32_t a, int row0, uint32_t b, int n0,
                                              int)
    {
        const int wg_row = row0 & ~63;
#pragma unroll
        for (int k0 = 0; k0 < DP; k0 += 16) {
            const uint64_t da = wg_tile(a + (k0 >> 6) * (ROWS_A * 128) + wg_row * 128 + (k0 & 63) * 2, 0);
            const uint64_t db = wg_tile(b + (k0 >> 6) * (ROWS_B * 128) + n0 * 128 + (k0 & 63) * 2, 0);
            wg_ss<T>(acc, da, db);
        }
    }

    template <typename T, int DP, int ROWS_B>
    static __device__ __forceinline__ void nn(float (&acc)[DP / 8][4], const uint32_t (&fa)[4], uint32_t b,
                                              int k0, int)
    {
#pragma unroll
        for (int p = 0; p < DP / 64; p++) {
            float(&part)[8][4] = *(float(*)[8][4]) & acc[p * 8];
            wg_rs<T>(part, fa, wg_tile(b + p * (ROWS_B * 128) + k0 * 128, ROWS_B * 128));
        }
    }
};

#endif
