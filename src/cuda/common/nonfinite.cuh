/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nonfinite.cuh - NaN and infinity in operands of 16 bits. A factor of 0 does not undo them: where some pairs
 * of a tile do not see each other, a kernel looks for them in the product's shared operand, sets them to 0
 * for the product, and adds them to the rows that see them. */
#ifndef QUERN_CUDA_NONFINITE_CUH
#define QUERN_CUDA_NONFINITE_CUH

#include "common/mma.cuh"

#include <math.h>

/* The least bits, without the sign, of what is not finite: an exponent of all ones. */
template <typename T> static constexpr uint32_t NONFINITE_BITS = __is_same(T, bf16) ? 0x7f80 : 0x7c00;

/* ---- words ---- */

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

/* Ones in place of two elements' bits where they are not finite. */
template <typename T> __device__ __forceinline__ uint32_t nonfinite_halves(uint32_t x)
{
    constexpr uint32_t EXPONENT = NONFINITE_BITS<T>;
    return ((x & EXPONENT) == EXPONENT ? 0xffffu : 0u) |
           ((x >> 16 & EXPONENT) == EXPONENT ? 0xffff0000u : 0u);
}

/* ---- tiles of mma.cuh, each thread its own chunks ---- */

template <typename T, int ROWS, int THREADS, int CHUNKS>
__device__ __forceinline__ bool any_nonfinite(const char *tile)
{
    constexpr uint32_t LOW = NONFINITE_BITS<T>, HIGH = LOW << 16;
    bool found = false;
#pragma unroll
    for (int r = 0; r < ROWS; r += THREADS / CHUNKS) {
        const uint4 x =
            *(const uint4 *)(tile + tile_at<ROWS>(r + threadIdx.x / CHUNKS, threadIdx.x % CHUNKS));
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) found = found || (words[i] & LOW) == LOW || (words[i] & HIGH) == HIGH;
    }
    return found;
}

template <typename T, int ROWS, int THREADS, int CHUNKS>
__device__ __forceinline__ void clear_nonfinite(char *tile)
{
    for (int r = threadIdx.x / CHUNKS; r < ROWS; r += THREADS / CHUNKS) {
        T *x = (T *)(tile + tile_at<ROWS>(r, threadIdx.x % CHUNKS));
        for (int c = 0; c < 8; c++)
            if (!isfinite(to_float<T>(x[c]))) x[c] = from_float<T>(0.0f);
    }
}

/* ---- to the rows that see them ---- */

/* Of rows [from, from + count) of a tile. seen(row, h): whether this thread's accumulator row h sees it;
 * `poison`: as NaN, where the factor is 0 or NaN itself. */
template <typename T, int ROWS, int OT, typename F>
__device__ __forceinline__ void spread_nonfinite(float (&acc)[OT][4], const char *tile, int from, int count,
                                                 bool poison, F seen)
{
    for (int j = from; j < from + count; j++) {
        const bool s0 = seen(j, 0), s1 = seen(j, 1);
        if (!s0 && !s1) continue;
#pragma unroll
        for (int n = 0; n < OT; n++) {
            const T *p = (const T *)(tile + tile_at<ROWS>(j, n)) + (threadIdx.x & 3) * 2;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float x = to_float<T>(p[c]), add = isfinite(x) ? 0.0f : poison ? NAN : x;
                acc[n][c] += s0 ? add : 0.0f;
                acc[n][2 + c] += s1 ? add : 0.0f;
            }
        }
    }
}

/* Of a row in memory of `dim` elements, for a thread's two rows (s0, s1: whether they see it). `row`: at this
 * thread's first two columns. `dim` is the kernel's parameter, read at each use: held in a register it takes
 * the one that the products of a 192/128 forward need. */
template <typename T, int OT>
__device__ __forceinline__ void add_row_nonfinite(float (&o)[OT][4], const int32_t &dim, const T *row,
                                                  bool s0, bool s1)
{
#pragma unroll
    for (int i = 0; i < OT; i++)
        if (i * 8 < dim)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float x = to_float<T>(row[i * 8 + c]), add = isfinite(x) ? 0.0f : x;
                o[i][c] += s0 ? add : 0.0f;
                o[i][2 + c] += s1 ? add : 0.0f;
            }
}

#endif
