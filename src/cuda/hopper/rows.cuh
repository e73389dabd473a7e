/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.cuh - a thread's two rows of an accumulator m64nN: of 8 columns it has two, of rows lane / 4 and that
 * + 8 of its warp's 16. */
#ifndef QUERN_CUDA_HOPPER_ROWS_CUH
#define QUERN_CUDA_HOPPER_ROWS_CUH

#include "common/mma.cuh"

/* A running softmax. `base`: what is subtracted from scaled scores, in powers of two; -inf: no score yet. */
struct softmax_rows {
    float base[2], sum[2];
};

/* The base follows the maximum of the rows' scores only where that has risen by 2^8: until then exponentials
 * stay far from the largest numbers and lose no precision. shrink: what the sums and values so far are to be
 * multiplied by. */
template <int NT>
__device__ __forceinline__ void softmax_base(const float (&s)[NT][4], softmax_rows &r, float scale2,
                                             float (&shrink)[2])
{
    float top[4];
#pragma unroll
    for (int c = 0; c < 4; c++) top[c] = fmaxf(s[0][c], s[1][c]);
#pragma unroll
    for (int i = 2; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) top[c] = fmaxf(top[c], s[i][c]);
#pragma unroll
    for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h * 2], top[h * 2 + 1]);
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int h = 0; h < 2; h++) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], step));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float risen = top[h] * scale2;
        const bool first = r.base[h] == -INFINITY, rises = first || risen > r.base[h] + 8.0f;
        shrink[h] = rises && !first ? exp2_fast(r.base[h] - risen) : 1.0f;
        r.base[h] = rises ? risen : r.base[h];
        r.sum[h] *= shrink[h];
    }
}

/* Columns' scores, those of 16 keys, become their exponentials; the thread's share of the sums grows. */
__device__ __forceinline__ void softmax_exponentials(float (&a)[4], float (&b)[4], softmax_rows &r,
                                                     float scale2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float base = r.base[h] == -INFINITY ? 0.0f : r.base[h];
#pragma unroll
        for (int c = h * 2; c < h * 2 + 2; c++) {
            a[c] = exp2_fast(fmaf(a[c], scale2, -base));
            b[c] = exp2_fast(fmaf(b[c], scale2, -base));
        }
        r.sum[h] += (a[h * 2] + a[h * 2 + 1]) + (b[h * 2] + b[h * 2 + 1]);
    }
}

/* Sums of the four lanes of a row. */
__device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Stores 16 columns, tiles i and i + 1, of a warp's 16 rows from row0 on, rounded, into a tile of ROWS
 * rows. */
template <typename T, int ROWS>
__device__ __forceinline__ void store_columns(uint32_t tile, const float (&a)[4], const float (&b)[4],
                                              int row0, int i)
{
    const int lane = threadIdx.x & 31;
    const uint32_t x[4] = {pack2<T>(a[0], a[1]), pack2<T>(a[2], a[3]), pack2<T>(b[0], b[1]),
                           pack2<T>(b[2], b[3])};
    stmatrix4(tile + tile_at<ROWS>(row0 + (lane & 15), i + (lane >> 4)), x);
}

#endif
