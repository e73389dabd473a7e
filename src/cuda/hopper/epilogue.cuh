/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* epilogue.cuh - an accumulator m64nN around its products: cleared before them, then scaled, rotated, rounded
 * and stored 16 bytes at a time, from registers or through shared memory. A thread has the elements that
 * rows.cuh says. SwiGLU of two columns is common/swiglu.cuh's. */
#ifndef QUERN_CUDA_HOPPER_EPILOGUE_CUH
#define QUERN_CUDA_HOPPER_EPILOGUE_CUH

#include "common/mma.cuh"

template <int TILES> __device__ __forceinline__ void clear_sums(float (&c)[TILES][4])
{
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] = 0.0f;
}

/* c += part times the scales of a thread's two rows: FP8 products sum each 128 of K from zero. */
template <int TILES>
__device__ __forceinline__ void add_scaled_rows(float (&c)[TILES][4], const float (&part)[TILES][4],
                                                float low, float high)
{
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        c[n][0] = fmaf(low, part[n][0], c[n][0]);
        c[n][1] = fmaf(low, part[n][1], c[n][1]);
        c[n][2] = fmaf(high, part[n][2], c[n][2]);
        c[n][3] = fmaf(high, part[n][3], c[n][3]);
    }
}

/* The byte of 16-bit element `column` of a row that waits in shared memory: rows of BYTES, whose chunks of 16
 * are permuted by the row, so that eight rows of a column lie in different banks. */
template <int BYTES> __device__ __forceinline__ int staged_at(int row, int column)
{
    return row * BYTES + ((column / 8 ^ (row & 7)) << 4) + column % 8 * 2;
}

/* A warpgroup stores ROWS rows that wait at `staged`, 16 bytes a thread: rows from `first` on of c, those
 * below `rows`, of `columns` elements each. wide: rows of c take stores of 16 bytes. */
template <typename T, int BYTES, int ROWS>
__device__ __forceinline__ void store_staged(const char *staged, T *c, int64_t c_row, int64_t first,
                                             int64_t rows, int64_t columns, bool wide)
{
    enum { CHUNKS = BYTES / 16 };
    const int thread = threadIdx.x % 128, column = thread % CHUNKS * 8;
    const int64_t left = columns - column;
#pragma unroll 4
    for (int r = thread / CHUNKS; r < ROWS; r += 128 / CHUNKS) {
        const T *const from = (const T *)(staged + staged_at<BYTES>(r, column));
        T *const to = c + (first + r) * c_row + column;
        if (first + r >= rows) break;
        if (left >= 8 && wide) *(uint4 *)to = *(const uint4 *)from;
        else
            for (int i = 0; i < 8 && i < left; i++) to[i] = from[i];
    }
}

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
