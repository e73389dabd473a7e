/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4.c - the table of products with NVFP4 weights for AVX-512 with BF16 and VNNI.
 *
 * A word of a line is two nibbles of a column, neighbours along K. code * scale has at most 6 significant
 * bits and is exact in bf16. Its bits come from a table of the 64 products of a magnitude and a scale's 1 + m
 * / 8 at the largest exponent. A subtraction then lowers the exponent to the scale's; it saturates, so zero
 * stays zero. A rotation moves the magnitude into the table's index and the sign to the top. That takes 5
 * instructions for 32 values (a rotation, an index, a look-up, a subtraction and a sign) and 5 for each block
 * of 16 columns. Up to eight rows take the values from registers. Limit: reading the weights of one row, and
 * the dot products of eight.
 */
#include "cpu/gemm4/gemm4_rows.h"

#include <immintrin.h>

/* bf16 bits of 2^e (1 + m / 8) and of 1.5 times that, at a scale's largest exponent, 8. */
#define POWER(e, m) ((135 + (e)) * 128 + (m) * 16)
#define HALF_MORE(e, m)                                                                                      \
    (3 * (8 + (m)) < 32 ? (135 + (e)) * 128 + (3 * (8 + (m)) - 16) * 8                                       \
                        : (136 + (e)) * 128 + (3 * (8 + (m)) - 32) * 4)
#define MAGNITUDES(m)                                                                                        \
    0, POWER(-1, m), POWER(0, m), HALF_MORE(0, m), POWER(1, m), HALF_MORE(1, m), POWER(2, m), HALF_MORE(2, m)

static const uint16_t products[64] = {MAGNITUDES(0), MAGNITUDES(1), MAGNITUDES(2), MAGNITUDES(3),
                                      MAGNITUDES(4), MAGNITUDES(5), MAGNITUDES(6), MAGNITUDES(7)};

/* By the five high bits of a scale's byte: the largest exponent minus the scale's, in bf16 bits. The last
 * entry is that of 0. */
#define LACKS(e) ((17 - (e)) * 128)
static const uint16_t lacking[32] = {LACKS(0),  LACKS(1),  LACKS(2),  LACKS(3),     LACKS(4),
                                     LACKS(5),  LACKS(6),  LACKS(7),  LACKS(8),     LACKS(9),
                                     LACKS(10), LACKS(11), LACKS(12), LACKS(13),    LACKS(14),
                                     LACKS(15), LACKS(16), LACKS(17), [31] = 0xffff};

typedef struct decoder {
    __m512i low, high, lacking, copies, magnitude, sign;
} decoder;

INLINE decoder make_decoder(void)
{
    return (decoder){
        _mm512_loadu_si512(products),
        _mm512_loadu_si512(products + 32),
        _mm512_loadu_si512(lacking),
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 0, -1, 4, -1, 4, -1, 8, -1, 8, -1, 12, -1, 12, -1)),
        _mm512_set1_epi16(7),
        _mm512_set1_epi16((short)0x8000)};
}

/* The scales of 16 columns, in both halves of a column's word: m in the place of the table's index, and what
 * to subtract. */
typedef struct column_scales {
    __m512i m, lacks;
} column_scales;

INLINE column_scales scales_of(const decoder *d, const uint8_t *bytes)
{
    const __m512i each = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)bytes));
    const __m512i both = _mm512_shuffle_epi8(each, d->copies);
    return (column_scales){_mm512_slli_epi16(both, 3),
                           _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 3), d->lacking)};
}

/* code * scale of pair p of a line. */
INLINE __m512i scaled_pair(const decoder *d, __m512i line, const int p, column_scales scales)
{
    enum { SELECT = 0xca, AND_OR = 0xea }; /* a ? b : c; (a & b) | c */
    const int turn = 4 * p + 1;
    const __m512i turned = (__m512i)((vuint)line >> turn | (vuint)line << (32 - turn));
    const __m512i index = _mm512_ternarylogic_epi32(d->magnitude, turned, scales.m, SELECT);
    const __m512i largest = _mm512_permutex2var_epi16(d->low, index, d->high);
    return _mm512_ternarylogic_epi32(d->sign, turned, _mm512_subs_epu16(largest, scales.lacks), AND_OR);
}

static void decode_bf16(const uint8_t *panel, int64_t units, uint32_t *out)
{
    const decoder d = make_decoder();
    for (int64_t u = 0; u < units; u++, out += GEMM4_UNIT / 2 * GEMM4_PANEL)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++, panel += GEMM4_STRIP_BYTES)
            for (int block = 0; block < GEMM4_BLOCKS; block++) {
                const column_scales scales = scales_of(&d, panel + block * GEMM4_STRIP);
                /* Prefetches the next call's units while this call's product runs. */
                _mm_prefetch((const char *)panel + ROW_AHEAD + 128 * block, _MM_HINT_T1);
                _mm_prefetch((const char *)panel + ROW_AHEAD + 128 * block + 64, _MM_HINT_T1);
                uint32_t *to = out + 8 * block * GEMM4_PANEL + strip * GEMM4_STRIP;
#pragma GCC unroll 8
                for (int p = 0; p < 8; p++) {
                    const __m512i line = _mm512_loadu_si512(panel + 64 + 64 * (2 * block + p / 4));
                    _mm512_storeu_si512(to + p * GEMM4_PANEL, scaled_pair(&d, line, p % 4, scales));
                }
            }
}

/* Interleaves 16 words of even K with 16 of odd K: 32 words in order at out. */
static inline void store_zipped(uint32_t *out, __m512i even, __m512i odd)
{
    const vint low = __builtin_shufflevector((vint)even, (vint)odd, ZIP_LOW),
               high = __builtin_shufflevector((vint)even, (vint)odd, ZIP_HIGH);
    memcpy(out, &low, sizeof low);
    memcpy(out + LANES, &high, sizeof high);
}

/* 16 words of K by 16 columns at a time: transposed, a vector holds one column's words of K. */
static void turn_bf16(const uint32_t *decoded, uint32_t *out)
{
    const __m512i low = _mm512_set1_epi32(0xffff);
    for (int64_t p = 0; p < GEMM4_UNIT / 2; p += LANES)
        for (int64_t n = 0; n < GEMM4_PANEL; n += LANES) {
            vfloat v[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                v[i] = v_load((const float *)(const void *)(decoded + (p + i) * GEMM4_PANEL + n));
            v_transpose(v);
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i += 2) {
                const __m512i a = (__m512i)v[i], b = (__m512i)v[i + 1];
                const __m512i even = _mm512_or_si512(_mm512_and_si512(a, low), _mm512_slli_epi32(b, 16));
                const __m512i odd = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_andnot_si512(low, b));
                store_zipped(out + (n + i) / 2 * GEMM4_UNIT + 2 * p, even, odd);
            }
        }
}

/* A block of K of some rows and strips: each pair of K is decoded once for all rows. */
INLINE void few_rows_block(const int rows, const int strips, const decoder *d, const uint8_t *unit, int block,
                           const uint32_t *const a[], __m512 acc[][GEMM4_STRIPS])
{
    column_scales scales[GEMM4_STRIPS];
#pragma GCC unroll 4
    for (int strip = 0; strip < strips; strip++) {
        const uint8_t *from = unit + strip * GEMM4_STRIP_BYTES;
        scales[strip] = scales_of(d, from + block * GEMM4_STRIP);
        _mm_prefetch((const char *)from + ROW_AHEAD + 128 * block, _MM_HINT_T0);
        _mm_prefetch((const char *)from + ROW_AHEAD + 128 * block + 64, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m512i b[GEMM4_STRIPS];
#pragma GCC unroll 4
        for (int strip = 0; strip < strips; strip++) {
            const uint8_t *line = unit + strip * GEMM4_STRIP_BYTES + 64 + 64 * (2 * block + p / 4);
            b[strip] = scaled_pair(d, _mm512_loadu_si512(line), p % 4, scales[strip]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512i pair = _mm512_set1_epi32((int)a[r][p]);
#pragma GCC unroll 4
            for (int strip = 0; strip < strips; strip++)
                acc[r][strip] = _mm512_dpbf16_ps(acc[r][strip], (__m512bh)pair, (__m512bh)b[strip]);
        }
    }
}

/* Some rows and strips with their sums in registers. */
INLINE void few_rows(const int rows, const int strips, const uint8_t *panel, int64_t units, const uint32_t *a,
                     int64_t lda, float *c, bool accumulate)
{
    const decoder d = make_decoder();
    __m512 acc[GEMM4_FEW_ROWS][GEMM4_STRIPS];
    const uint32_t *row[GEMM4_FEW_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        row[r] = a + r * lda;
#pragma GCC unroll 4
        for (int strip = 0; strip < strips; strip++) acc[r][strip] = _mm512_setzero_ps();
    }
    for (int64_t u = 0; u < units; u++, panel += GEMM4_UNIT_BYTES)
        for (int block = 0; block < GEMM4_BLOCKS; block++) {
            few_rows_block(rows, strips, &d, panel, block, row, acc);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                row[r] += 8;
                __asm__("" : "+r"(row[r])); /* forces a register per row */
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

/* Takes as many strips at once as registers can hold sums of, so that several strips use a value of A. */
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
    case 2: all_strips(2, 4, panel, units, a, lda, c, accumulate); break;
    case 3: all_strips(3, 4, panel, units, a, lda, c, accumulate); break;
    case 4: all_strips(4, 4, panel, units, a, lda, c, accumulate); break;
    case 5: all_strips(5, 2, panel, units, a, lda, c, accumulate); break;
    case 6: all_strips(6, 2, panel, units, a, lda, c, accumulate); break;
    case 7: all_strips(7, 2, panel, units, a, lda, c, accumulate); break;
    case 8: all_strips(8, 2, panel, units, a, lda, c, accumulate); break;
    default: break;
    }
}

const gemm4_kernels gemm4_kernels_avx512bf16 = {.level = QUERN_CPU_LEVEL_AVX512BF16,
                                                GEMM4_ROW_KERNELS,
                                                .decode_bf16 = decode_bf16,
                                                .turn_bf16 = turn_bf16,
                                                .rows_bf16 = rows_bf16};
