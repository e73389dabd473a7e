/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* operands.cuh - products of 64 heads and 128 entries, sums of their columns, and the operands that are made
 * of which of them are positive. A thread has two rows, of heads head0 and head0 + 8, and of each tile of
 * eight columns those from 2 (lane % 4) on. */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_OPERANDS_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_OPERANDS_CUH

#include "indexer_loss/sm90/shared.cuh"

namespace sm90_loss
{

__device__ __forceinline__ int warp_of_group()
{
    return threadIdx.x / 32 % 4;
}

/* c (+)= heads entries^T over 128 channels, issued alone. ADD false: c is overwritten. */
template <bool ADD>
__device__ __forceinline__ void issue_scores(float (&c)[COLUMN_TILES][4], uint32_t heads, uint32_t stage)
{
    const uint64_t a = wg_fresh(wg_tile(heads, 0)), b = wg_fresh(wg_tile(stage, 0));
    wg_start();
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        const uint64_t x = wg_further(a, k / 4 * HEAD_PANEL + k % 4 * 32),
                       y = wg_further(b, k / 4 * ENTRY_PANEL + k % 4 * 32);
        if (!ADD && k == 0) wgmma_ss<bf16, TILE, false, false>(c, x, y);
        else wgmma_ss<bf16, TILE, true, false>(c, x, y);
    }
    wg_commit();
}

/* Rows of heads that are not there become 0, whatever the entries hold. */
__device__ __forceinline__ void clear_rows(float (&c)[COLUMN_TILES][4], int head0, int heads)
{
    if (heads == HEADS) return;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (head0 + e / 2 * 8 >= heads) c[j][e] = 0.0f;
}

/* Adds 2 BY columns of lanes that differ by BY; each keeps BY of them. */
template <int BY> __device__ __forceinline__ void halve_columns(float (&x)[32])
{
    const bool upper = (threadIdx.x & BY) != 0;
#pragma unroll
    for (int i = 0; i < BY; i++) {
        const float own = upper ? x[i + BY] : x[i], other = upper ? x[i] : x[i + BY];
        x[i] = own + __shfl_xor_sync(~0u, other, BY);
    }
}

/* Sums over a warp's rows of 32 columns a thread, of which it keeps four. */
__device__ __forceinline__ void sum_columns(float (&x)[32])
{
    halve_columns<16>(x);
    halve_columns<8>(x);
    halve_columns<4>(x);
}

/* Puts them where column e's sum belongs. */
__device__ __forceinline__ void put_columns(float *to, const float (&x)[32])
{
    const int lane = threadIdx.x % 32, tile0 = (lane & 28) / 2, column = lane % 4 * 2;
    *(float2 *)(to + tile0 * 8 + column) = make_float2(x[0], x[1]);
    *(float2 *)(to + (tile0 + 1) * 8 + column) = make_float2(x[2], x[3]);
}

/* The sum over a warp's heads of the indexer's scores z of a tile, and which of these are positive. */
__device__ __forceinline__ void sum_index(float *to, const float (&z)[COLUMN_TILES][4], const float (&w)[2],
                                          uint32_t (&positive)[2])
{
    float v[32];
    positive[0] = positive[1] = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float a = z[i / 2][i % 2], b = z[i / 2][2 + i % 2];
        const bool on_a = !(a <= 0.0f), on_b = !(b <= 0.0f);
        v[i] = (on_a ? w[0] * a : 0.0f) + (on_b ? w[1] * b : 0.0f);
        const int bit = i / 2 % 8 * 4 + i % 2;
        if (on_a) positive[i / 16] |= 1u << bit;
        if (on_b) positive[i / 16] |= 1u << (bit + 2);
    }
    sum_columns(v);
    put_columns(to, v);
}

/* 16 ones where bit 7 of byte `low` of x is set, and above them 16 where that of byte `high` of y is. */
__device__ __forceinline__ uint32_t mask_of(uint32_t x, int low, uint32_t y, int high)
{
    enum { SIGN = 8, OF_Y = 4 };
    uint32_t mask;
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(mask)
        : "r"(x), "r"(y), "r"((SIGN + low) * 0x11 + (SIGN + OF_Y + high) * 0x1100));
    return mask;
}

/* The A operand of 16 entries from the thread's own bits of them, byte `byte`, and two pairs of gradients. */
__device__ __forceinline__ void mask_pairs(uint32_t (&a)[4], uint32_t bits, int byte, uint32_t low,
                                           uint32_t high)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = (i < 2 ? low : high) & mask_of(bits << (7 - i * 2), byte, bits << (6 - i * 2), byte);
}

/* The A operand of 64 entries and the 16 heads of warp `warp`, the bits' columns as rows: half `half` of a
 * tile. Where a bit is set of rows of entries 16 w + lane / 4, and eight further, it has `value`: of the
 * first row and the second, then of both for heads eight further. */
__device__ __forceinline__ void turn_bits(uint32_t (&a)[4], const uint8_t *bits, int half, int warp,
                                          const uint32_t (&value)[4])
{
    const int lane = threadIdx.x % 32, thread = warp * 32 + lane % 4 * 8 + lane / 8,
              shift = lane / 4 % 2, byte = half * 4 + warp_of_group();
    const uint32_t x = bits[thread * 8 + byte], y = bits[(thread + 4) * 8 + byte],
                   both = (x | y << 16) << (7 - shift);
    a[0] = value[0] & mask_of(both, 0, both, 2);
    a[1] = value[1] & mask_of(both >> 4, 0, both >> 4, 2);
    a[2] = value[2] & mask_of(both >> 2, 0, both >> 2, 2);
    a[3] = value[3] & mask_of(both >> 6, 0, both >> 6, 2);
}

/* Row h of a thread's two, times `by`, to where it begins; a lane stores eight columns of four tiles. */
template <int TILES>
__device__ __forceinline__ void store_row(bf16 *to, const float (&x)[TILES][4], int h, float by,
                                          int width, bool here, bool wide)
{
#pragma unroll
    for (int i = 0; i < TILES; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = pack2<bf16>(x[i + j][h * 2] * by, x[i + j][h * 2 + 1] * by);
        transpose_by_four(words);
        const int column = (i + threadIdx.x % 4) * 8;
        if (here && column < width) store_eight(to + column, words, wide);
    }
}

} // namespace sm90_loss

#endif
