/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * row_loops.h - the table of rows, written once over the level's vectors and compiled by each level's file
 * under its own flags. Each element is touched once, with at most one multiplication, so the limit is the
 * memory or cache that holds the row. magnitude() keeps four maxima, so that a compare need not wait for the
 * one before.
 */
#ifndef QUERN_CPU_ROW_LOOPS_H
#define QUERN_CPU_ROW_LOOPS_H

#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/vector_dtype.h"

static void convert(const void *src, quern_dtype from, void *dst, quern_dtype to, int64_t n)
{
    if (from == to) {
        memcpy(dst, src, (size_t)(n * dtype_bytes(from)));
        return;
    }
    for (int64_t c = 0; c < n; c += LANES) {
        vfloat v;
#define CALL(t) v = load_some(src, t, c, n)
        BY_DTYPE(from, CALL);
#undef CALL
#define CALL(t) store_some(dst, t, c, n, v)
        BY_DTYPE(to, CALL);
#undef CALL
    }
}

static void add_scaled(float *sum, const float *x, float scale, int64_t n)
{
    for (int64_t c = 0; c < n; c += LANES) {
        const vfloat term = load_some(x, QUERN_F32, c, n) + 0.0f;
        store_some(sum, QUERN_F32, c, n, v_fma(term, v_splat(scale), load_some(sum, QUERN_F32, c, n)));
    }
}

INLINE vint larger(vint a, vint b)
{
    const vint more = a > b;
    return (a & more) | (b & ~more);
}

INLINE uint32_t magnitude_as(const void *x, const quern_dtype dtype, int64_t n)
{
    vint most[4] = {{0}};
    int64_t c = 0;
    for (; c + 4 * LANES <= n; c += 4 * LANES)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
            most[v] = larger(most[v], (vint)load_as(x, dtype, c + v * LANES) & 0x7fffffff);
    for (; c < n; c += LANES) most[0] = larger(most[0], (vint)load_some(x, dtype, c, n) & 0x7fffffff);
    int32_t lanes[4 * LANES];
    uint32_t all = 0;
    memcpy(lanes, most, sizeof lanes);
    for (int i = 0; i < 4 * LANES; i++)
        if ((uint32_t)lanes[i] > all) all = (uint32_t)lanes[i];
    return all;
}

#if defined(__AVX512BW__)
/* Magnitudes of bf16 compare as 16-bit words: two instructions for 32 values. Lines are requested 4 KB ahead,
 * past where the prefetchers stop, into L2: from memory Zen 4 reads a tenth faster. */
INLINE uint32_t magnitude_bf16(const uint16_t *x, int64_t n)
{
    const __m512i mask = _mm512_set1_epi16(0x7fff);
    __m512i most[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                       _mm512_setzero_si512()};
    int64_t c = 0;
    for (; c + 128 <= n; c += 128)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __builtin_prefetch(x + c + 32 * v + 2048, 0, 2);
            most[v] = _mm512_max_epu16(most[v], _mm512_and_si512(_mm512_loadu_si512(x + c + 32 * v), mask));
        }
    for (; c < n; c += 32) {
        const __mmask32 kept = n - c >= 32 ? UINT32_MAX : (1u << (n - c)) - 1;
        most[0] = _mm512_max_epu16(most[0], _mm512_and_si512(_mm512_maskz_loadu_epi16(kept, x + c), mask));
    }
    const __m512i all =
        _mm512_max_epu16(_mm512_max_epu16(most[0], most[1]), _mm512_max_epu16(most[2], most[3]));
    return _mm512_reduce_max_epu32(_mm512_max_epu32(
        _mm512_slli_epi32(all, 16), _mm512_and_si512(all, _mm512_set1_epi32((int)0xffff0000))));
}
#endif

static uint32_t magnitude(const void *x, quern_dtype dtype, int64_t n)
{
#if defined(__AVX512BW__)
    if (dtype == QUERN_BF16) return magnitude_bf16(x, n);
#endif
    if (dtype == QUERN_F32) return magnitude_as(x, QUERN_F32, n);
    return dtype == QUERN_BF16 ? magnitude_as(x, QUERN_BF16, n) : magnitude_as(x, QUERN_F16, n);
}

static void fence(void)
{
#if defined(__FMA__)
    _mm_sfence();
#endif
}

#define ROW_KERNELS .convert = convert, .add_scaled = add_scaled, .magnitude = magnitude, .fence = fence

#endif
