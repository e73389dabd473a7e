/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ceilings_dot.c - 512-bit dot-product ceilings: bf16 pairs and int8 quadruples. */
#include "ceilings.h"

#include <immintrin.h>

enum { CHAINS = 24 };

double ceiling_bf16_avx512(int64_t rounds)
{
    __m512 a[CHAINS];
    __m512bh m = (__m512bh)_mm512_set1_epi32(0x3c003c00), c = (__m512bh)_mm512_set1_epi32(0x3d003d00);
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_ps((float)i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) {
            a[i] = _mm512_dpbf16_ps(a[i], m, c);
            __asm__ volatile("" : "+v"(a[i]));
        }
    }
    return (double)rounds * CHAINS * 32 * 2;
}

double ceiling_vnni_avx512(int64_t rounds)
{
    __m512i a[CHAINS], m = _mm512_set1_epi8(3), c = _mm512_set1_epi8(-2);
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) a[i] = _mm512_set1_epi32(i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) {
            a[i] = _mm512_dpbusd_epi32(a[i], m, c);
            __asm__ volatile("" : "+v"(a[i]));
        }
    }
    return (double)rounds * CHAINS * 64 * 2;
}
