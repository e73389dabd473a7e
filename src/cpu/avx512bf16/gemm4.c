/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4.c - the table of products with NVFP4 weights for AVX-512 with BF16 and VNNI.
 *
 * A word of a line is two codes of a column, neighbours along K. One look-up (vpermw: the index is the low five bits, so
 * the table stands twice and nothing is masked) turns it into two bf16 values. code * scale has at most 6 significant bits
 * and is exact in bf16: the values are widened, multiplied and joined again. That is 8 instructions for 32 values. One
 * row: a stream of 2304 bytes a unit against 32 dot products a strip, four strips side by side so that their sums do not
 * wait for each other; limit, reading the weights.
 */
#include "cpu/gemm4/gemm4_rows.h"

#include <immintrin.h>

/* bf16 of each code, twice. */
static inline __m512i code_table(void)
{
    const __m256i once = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00, (short)0xbf80,
                                           (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0);
    return _mm512_broadcast_i64x4(once);
}

/* code * scale of pair p of a line. */
INLINE __m512i scaled_pair(__m512i line, const int p, __m512i table, __m512 scale)
{
    const __m512i codes = _mm512_permutexvar_epi16(p > 0 ? _mm512_srli_epi16(line, 4 * p) : line, table);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(codes, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(codes, _mm512_set1_epi32((int)0xffff0000)));
    const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
    return _mm512_or_si512(high, _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, scale)), 16));
}

static void decode_bf16(const uint8_t *panel, int64_t units, uint32_t *out)
{
    const __m512i table = code_table();
    for (int64_t u = 0; u < units; u++, out += GEMM4_UNIT / 2 * GEMM4_PANEL)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++, panel += GEMM4_STRIP_BYTES)
            for (int block = 0; block < GEMM4_BLOCKS; block++) {
                const __m512 scale = (__m512)load_scales(panel + block * GEMM4_STRIP);
                uint32_t *to = out + 8 * block * GEMM4_PANEL + strip * GEMM4_STRIP;
#pragma GCC unroll 8
                for (int p = 0; p < 8; p++) {
                    const __m512i line = _mm512_loadu_si512(panel + 64 + 64 * (2 * block + p / 4));
                    _mm512_storeu_si512(to + p * GEMM4_PANEL, scaled_pair(line, p % 4, table, scale));
                }
            }
}

static void row_bf16(const uint8_t *panel, int64_t units, const uint32_t *a, float *c, bool accumulate)
{
    const __m512i table = code_table();
    __m512 acc[GEMM4_STRIPS] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int64_t u = 0; u < units; u++, panel += GEMM4_UNIT_BYTES, a += GEMM4_UNIT / 2)
        for (int block = 0; block < GEMM4_BLOCKS; block++)
#pragma GCC unroll 4
            for (int strip = 0; strip < GEMM4_STRIPS; strip++) {
                const uint8_t *from = panel + strip * GEMM4_STRIP_BYTES;
                const __m512 scale = (__m512)load_scales(from + block * GEMM4_STRIP);
#pragma GCC unroll 8
                for (int p = 0; p < 8; p++)
                    acc[strip] = _mm512_dpbf16_ps(acc[strip], (__m512bh)_mm512_set1_epi32((int)a[8 * block + p]),
                                                  (__m512bh)scaled_pair(_mm512_loadu_si512(from + 64 + 64 * (2 * block + p / 4)), p % 4, table, scale));
            }
    for (int strip = 0; strip < GEMM4_STRIPS; strip++) {
        if (accumulate) acc[strip] += _mm512_loadu_ps(c + strip * GEMM4_STRIP);
        _mm512_storeu_ps(c + strip * GEMM4_STRIP, acc[strip]);
    }
}

const gemm4_kernels gemm4_kernels_avx512bf16 = {
    .level = QUERN_CPU_LEVEL_AVX512BF16, GEMM4_ROW_KERNELS, .decode_bf16 = decode_bf16, .row_bf16 = row_bf16};
