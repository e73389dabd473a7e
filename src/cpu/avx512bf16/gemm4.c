/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4.c - the table of products with NVFP4 weights for AVX-512 with BF16 and VNNI.
 *
 * A word of a line is two codes of a column, neighbours along K. One look-up (vpermw: the index is the low
 * five bits, so the table stands twice and nothing is masked) turns it into two bf16 values. code * scale has
 * at most 6 significant bits and is exact in bf16: the values are widened, multiplied and joined again. That
 * is 8 instructions for 32 values. Up to eight rows take the values from registers; limit, reading the
 * weights of one row, and the dot products of eight.
 */
#include "cpu/gemm4/gemm4_rows.h"

#include <immintrin.h>

/* bf16 of each code, twice. */
static inline __m512i code_table(void)
{
    const __m256i once = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           (short)0x8000, (short)0xbf00, (short)0xbf80, (short)0xbfc0,
                                           (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0);
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

/* Some rows and strips with their sums in registers: each pair of K is decoded once for all rows. */
INLINE void few_rows(const int rows, const int strips, const uint8_t *panel, int64_t units, const uint32_t *a,
                     int64_t lda, float *c, bool accumulate)
{
    const __m512i table = code_table();
    __m512 acc[GEMM4_FEW_ROWS][GEMM4_STRIPS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int strip = 0; strip < strips; strip++) acc[r][strip] = _mm512_setzero_ps();
    for (int64_t block = 0; block < units * GEMM4_BLOCKS; block++) {
        const uint8_t *unit = panel + block / GEMM4_BLOCKS * GEMM4_UNIT_BYTES;
        const int64_t in_unit = block % GEMM4_BLOCKS;
#pragma GCC unroll 4
        for (int strip = 0; strip < strips; strip++) {
            const uint8_t *from = unit + strip * GEMM4_STRIP_BYTES;
            const __m512 scale = (__m512)load_scales(from + in_unit * GEMM4_STRIP);
            _mm_prefetch((const char *)from + ROW_AHEAD + 128 * in_unit, _MM_HINT_T0);
            _mm_prefetch((const char *)from + ROW_AHEAD + 128 * in_unit + 64, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int p = 0; p < 8; p++) {
                const __m512i b = scaled_pair(_mm512_loadu_si512(from + 64 + 64 * (2 * in_unit + p / 4)),
                                              p % 4, table, scale);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    acc[r][strip] = _mm512_dpbf16_ps(
                        acc[r][strip], (__m512bh)_mm512_set1_epi32((int)a[r * lda + 8 * block + p]),
                        (__m512bh)b);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int strip = 0; strip < strips; strip++) {
            float *to = c + r * GEMM4_PANEL + strip * GEMM4_STRIP;
            _mm512_storeu_ps(to,
                             accumulate ? _mm512_add_ps(acc[r][strip], _mm512_loadu_ps(to)) : acc[r][strip]);
        }
}

/* As many strips at once as their sums need not to wait for each other: four of one row, two of two to four,
 * else one. */
INLINE void all_strips(const int rows, const int strips, const uint8_t *panel, int64_t units,
                       const uint32_t *a, int64_t lda, float *c, bool accumulate)
{
    for (int strip = 0; strip < GEMM4_STRIPS; strip += strips)
        few_rows(rows, strips, panel + strip * GEMM4_STRIP_BYTES, units, a, lda, c + strip * GEMM4_STRIP,
                 accumulate);
}

static void rows_bf16(const uint8_t *panel, int64_t units, int64_t rows, const uint32_t *a, int64_t lda,
                      float *c, bool accumulate)
{
    switch (rows) {
    case 1: all_strips(1, 4, panel, units, a, lda, c, accumulate); break;
    case 2: all_strips(2, 2, panel, units, a, lda, c, accumulate); break;
    case 3: all_strips(3, 2, panel, units, a, lda, c, accumulate); break;
    case 4: all_strips(4, 2, panel, units, a, lda, c, accumulate); break;
    case 5: all_strips(5, 1, panel, units, a, lda, c, accumulate); break;
    case 6: all_strips(6, 1, panel, units, a, lda, c, accumulate); break;
    case 7: all_strips(7, 1, panel, units, a, lda, c, accumulate); break;
    case 8: all_strips(8, 1, panel, units, a, lda, c, accumulate); break;
    default: break;
    }
}

const gemm4_kernels gemm4_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16,
                                                GEMM4_ROW_KERNELS,
                                                .decode_bf16 = decode_bf16,
                                                .rows_bf16 = rows_bf16};
