/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * panel.cuh - products of tokens with fn, a panel of which stays in a block's shared memory. fn's rows are
 * the product's rows, first 24 of the numbers in bf16, then 24 of what is left; tokens are its columns. A
 * lane has eight channels that follow one another of token lane / 4; as the order of a sum is free they count
 * as the lane's places in two steps of 16. fn stands in the same order, so x goes from memory to the product.
 */
#ifndef QUERN_CUDA_HYPER_FOUR_PANEL_CUH
#define QUERN_CUDA_HYPER_FOUR_PANEL_CUH

#include "hyper/four/params.cuh"

enum { DEPTH = 32, STEPS = 2, ROW_TILES = FN_PARTS * WEIGHTS / 16 };

/* Operands of DEPTH channels of a copy; of a panel. */
enum { PACK = STEPS * ROW_TILES * 32, PANEL_PACKS = PANEL / DEPTH * COPIES };

struct fn_panel {
    uint4 pack[PANEL_PACKS][STEPS][ROW_TILES][32];
};

/* Two numbers of fn, or what bf16 leaves of them. */
__device__ __forceinline__ uint32_t pack_two(float x, float y, int part)
{
    if (part > 0) x -= to_float(from_float<bf16>(x)), y -= to_float(from_float<bf16>(y));
    return pack2<bf16>(x, y);
}

__device__ __forceinline__ void load_panel(const four_params &p, fn_panel &s, int panel)
{
    const int units = min(PANEL, p.width - panel * PANEL) / DEPTH * COPIES * PACK;
    const uint4 *const from = p.fn_of_sums + (int64_t)panel * PANEL_PACKS * PACK;
    const uint32_t to = smem_address(&s);
    for (int i = threadIdx.x; i < units; i += blockDim.x) cp_async16(to + i * 16, from + i, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
}

/* Adds a lane's chunks of N x 8 tokens times a pack of fn. */
template <int N>
__device__ __forceinline__ void multiply(float (&sum)[ROW_TILES][N][4],
                                         const uint4 (&pack)[STEPS][ROW_TILES][32], const uint4 (&x)[N])
{
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            const uint4 here = pack[s][m][threadIdx.x % 32];
            const uint32_t a[] = {here.x, here.y, here.z, here.w};
#pragma unroll
            for (int n = 0; n < N; n++)
                mma16816<bf16>(sum[m][n], a, word_of(x[n], 2 * s), word_of(x[n], 2 * s + 1));
        }
}

/* The sums over fn, both parts together, of tokens 8 n + 2 (lane % 4) and the next: of weight lane / 4 + 8 w
 * in number w. */
template <int N>
__device__ __forceinline__ void join_parts(const float (&sum)[ROW_TILES][N][4], int n, float2 (&all)[3])
{
    all[0] = make_float2(sum[0][n][0] + sum[1][n][2], sum[0][n][1] + sum[1][n][3]);
    all[1] = make_float2(sum[0][n][2] + sum[2][n][0], sum[0][n][3] + sum[2][n][1]);
    all[2] = make_float2(sum[1][n][0] + sum[2][n][2], sum[1][n][1] + sum[2][n][3]);
}

/* Writes them for the tokens from token0 on. */
template <int N>
__device__ __forceinline__ void store_products(const four_params &p, float *columns, int64_t token0,
                                               const float (&sum)[ROW_TILES][N][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 all[3];
        join_parts<N>(sum, n, all);
#pragma unroll
        for (int w = 0; w < 3; w++)
            *(float2 *)(columns + (SUM_FN + w * 8 + lane / 4) * p.padded + token0 + n * 8 + lane % 4 * 2) =
                all[w];
    }
}

#endif
