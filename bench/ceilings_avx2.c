/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ceilings_avx2.c - 256-bit ceilings. Twelve accumulators hide the FMA's latency of 4 at 2 a cycle and leave
 * registers for the operands; the empty asm keeps the compiler from folding steps together, and the unrolled
 * loops keep the arrays in registers. */
#include "ceilings.h"

#include <immintrin.h>

enum { CHAINS = 12 };

double ceiling_fma_avx2(int64_t rounds)
{
    __m256 a[CHAINS], m = _mm256_set1_ps(0.999f), c = _mm256_set1_ps(1e-3f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) a[i] = _mm256_set1_ps((float)i);
    for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) {
            a[i] = _mm256_fmadd_ps(a[i], m, c);
            __asm__ volatile("" : "+x"(a[i]));
        }
    }
    return (double)rounds * CHAINS * 8 * 2;
}

void ceiling_read_avx2(void *to, const void *from, size_t bytes)
{
    const __m256i *p = from;
    __m256i s[8];
    (void)to;
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) s[k] = _mm256_setzero_si256();
    for (size_t i = 0; i < bytes / 32; i += 8)
#pragma GCC unroll 8
        for (size_t k = 0; k < 8; k++) s[k] = _mm256_xor_si256(s[k], _mm256_load_si256(p + i + k));
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) __asm__ volatile("" : : "x"(s[k]));
}

void ceiling_copy_avx2(void *to, const void *from, size_t bytes)
{
    const __m256i *p = from;
    __m256i *q = to;
    for (size_t i = 0; i < bytes / 32; i += 8)
#pragma GCC unroll 8
        for (size_t k = 0; k < 8; k++) _mm256_stream_si256(q + i + k, _mm256_load_si256(p + i + k));
    _mm_sfence();
}

void ceiling_write_avx2(void *to, const void *from, size_t bytes)
{
    __m256i *q = to;
    (void)from;
    for (size_t i = 0; i < bytes / 32; i += 8)
#pragma GCC unroll 8
        for (size_t k = 0; k < 8; k++) _mm256_stream_si256(q + i + k, _mm256_set1_epi32(1));
    _mm_sfence();
}
