/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* epilogue.cuh - the end of an accumulator m64nN whose rows are a thread's as in rows.cuh: rotated, rounded,
 * and stored 16 bytes at a time. SwiGLU of two columns is common/swiglu.cuh's. */
#ifndef QUERN_CUDA_HOPPER_EPILOGUE_CUH
#define QUERN_CUDA_HOPPER_EPILOGUE_CUH

#include "common/mma.cuh"

/* Stores row h of a thread's two: tiles of eight columns from `to` on, which is the row's column
 * threadIdx.x % 4 * 8. All lanes call; here: whether the row is stored; wide: it begins at a multiple of 16
 * bytes. */
template <typename T, int TILES>
__device__ __forceinline__ void store_row(T *to, const float (&x)[TILES][4], int h, bool here, bool wide)
{
#pragma unroll
    for (int i = 0; i < TILES; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = pack2<T>(x[i + j][h * 2], x[i + j][h * 2 + 1]);
        transpose_by_four(words);
        if (here) store_eight(to + i * 8, words, wide);
    }
}

/* Rotates a thread's rows [first, end) of its two back by the angles of one position. at: the thread's first
 * column, counted from the first rotated one, where columns before it are negative. A: the table's dtype. */
template <typename A, int TILES>
__device__ __forceinline__ void rotate_back(const A *cosine, const A *sine, float (&o)[TILES][4], int at,
                                            int first = 0, int end = 2)
{
#pragma unroll
    for (int i = 0; i < TILES; i += 4, at += 32) {
        asm volatile("" : "+r"(at)); /* the angles of more steps at once would take too many registers */
        if (at + 24 < 0) continue;
        float c[4], s[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int pair = at + j * 8 < 0 ? 0 : at / 2 + j * 4;
            c[j] = to_float<A>(cosine[pair]);
            s[j] = to_float<A>(sine[pair]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int h = first * 2; h < end * 2; h += 2) {
                const float x = o[i + j][h], y = o[i + j][h + 1];
                if (at + j * 8 < 0) continue;
                o[i + j][h] = x * c[j] + y * s[j];
                o[i + j][h + 1] = y * c[j] - x * s[j];
            }
    }
}

#endif
