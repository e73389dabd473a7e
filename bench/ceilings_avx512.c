/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ceilings_avx512.c - 512-bit ceilings. Twenty-four accumulators as in the micro-kernels; the empty asm keeps
 * the compiler from folding steps together, and the unrolled loops keep the arrays in registers. */
#include "ceilings.h"

#include <immintrin.h>

enum { CHAINS = 24, EXP_CHAINS = 16 };

double ceiling_fma_avx512(int64_t rounds)
{
    __m512 a[CHAINS], m = _mm512_set1_ps(0.999f), c = _mm512_set1_ps(1e-3f);
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_ps((float)i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) {
            a[i] = _mm512_fmadd_ps(a[i], m, c);
            __asm__ volatile("" : "+v"(a[i]));
        }
    }
    return (double)rounds * CHAINS * 16 * 2;
}

/* 2^x as the softmax does it: round, a polynomial of degree 5 on the rest, the integer part added to the
 * exponent. Each value feeds the next round, so that the inputs keep moving. */
double ceiling_exp2_avx512(int64_t rounds)
{
    const __m512 magic = _mm512_set1_ps(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    const __m512 c0 = _mm512_set1_ps(1.0f), c1 = _mm512_set1_ps(0.69314718f),
                 c2 = _mm512_set1_ps(0.24022651f);
    const __m512 c3 = _mm512_set1_ps(0.05550411f), c4 = _mm512_set1_ps(0.0096181f),
                 c5 = _mm512_set1_ps(0.0013333f);
    __m512 x[EXP_CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < EXP_CHAINS; i++) x[i] = _mm512_set1_ps(-0.1f * (float)i);
    rounds /= 4;
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 16
        for (int i = 0; i < EXP_CHAINS; i++) {
            const __m512 shifted = _mm512_add_ps(x[i], magic);
            const __m512 f = _mm512_sub_ps(x[i], _mm512_sub_ps(shifted, magic));
            __m512 p = _mm512_fmadd_ps(c5, f, c4);
            p = _mm512_fmadd_ps(p, f, c3);
            p = _mm512_fmadd_ps(p, f, c2);
            p = _mm512_fmadd_ps(p, f, c1);
            p = _mm512_fmadd_ps(p, f, c0);
            const __m512i e = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
            x[i] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), e));
            __asm__ volatile("" : "+v"(x[i]));
        }
    }
    return (double)rounds * EXP_CHAINS * 16;
}

void ceiling_read_avx512(void *to, const void *from, size_t bytes)
{
    const __m512i *p = from;
    __m512i s[4];
    (void)to;
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) s[k] = _mm512_setzero_si512();
    for (size_t i = 0; i < bytes / 64; i += 4)
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++) s[k] = _mm512_xor_si512(s[k], _mm512_load_si512(p + i + k));
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) __asm__ volatile("" : : "v"(s[k]));
}

void ceiling_copy_avx512(void *to, const void *from, size_t bytes)
{
    const __m512i *p = from;
    __m512i *q = to;
    for (size_t i = 0; i < bytes / 64; i += 4)
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++) _mm512_stream_si512(q + i + k, _mm512_load_si512(p + i + k));
    _mm_sfence();
}

void ceiling_write_avx512(void *to, const void *from, size_t bytes)
{
    __m512i *q = to;
    (void)from;
    for (size_t i = 0; i < bytes / 64; i += 4)
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++) _mm512_stream_si512(q + i + k, _mm512_set1_epi32(1));
    _mm_sfence();
}
