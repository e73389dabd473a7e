/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm4.c - the table of products with NVFP4 weights for AVX-512 with BF16 and VNNI.
 *
 * A word of a line is two nibbles of a column, neighbours along K. code * scale has at most 6 significant
 * bits and is exact in bf16. Bits of bf16 numbers add like logarithms: the bits of code * 2^e (1 + m / 8) are
 * those of the code plus 128 e + 16 m, and less than 32 more where the code is 1.5 times a power of two and m
 * is not 0. So a table of codes at more than the largest scale holds ones in the five lowest bits of such
 * codes; an AND with the scale's correction keeps what must be added there, and a subtraction of 16 times the
 * scale's byte brings the product down to the scale. The subtraction is of signed words and saturates: a code
 * of 0 is the least word, -0, and stays that. A scale of 0 ANDs all bits away and subtracts nothing.
 *
 * That takes 4 instructions for 32 values (a shift, a look-up by the five lowest bits, of which the highest
 * does not matter, an AND and a subtraction) and 4 for each block of 16 columns: 1.7 cycles with the dot
 * product of one row, in L2, and 4.3 for eight rows, whose dot products take 4 (Zen 4: 3.0 and 9.5). Limit:
 * reading the weights of one row, and the dot products of eight.
 */
#include "cpu/gemm4/gemm4_integers.h"

#include <immintrin.h>

/* bf16 bits of 512 times a code; those of 1.5 times a power of two with ones below. 0 is the least signed
 * word. */
#define POWER(e) ((136 + (e)) * 128)
#define HALF_MORE(e) (POWER(e) + 64 + 31)
#define MAGNITUDES POWER(-1), POWER(0), HALF_MORE(0), POWER(1), HALF_MORE(1), POWER(2), HALF_MORE(2)
#define NEGATIVE(e) (int16_t)(POWER(e) - 32768)
#define NEGATIVE_HALF_MORE(e) (int16_t)(HALF_MORE(e) - 32768)
#define NEGATIVES                                                                                            \
    NEGATIVE(-1), NEGATIVE(0), NEGATIVE_HALF_MORE(0), NEGATIVE(1), NEGATIVE_HALF_MORE(1), NEGATIVE(2),       \
        NEGATIVE_HALF_MORE(2)
#define CODES INT16_MIN, MAGNITUDES, INT16_MIN, NEGATIVES

static const int16_t codes[32] = {CODES, CODES};

/* By m, from 0 down: the bits of 1.5 (1 + m / 8) minus those of 1.5 and 16 m. */
#define KEPT(correction) (int16_t)(-32 + (correction))
#define CORRECTIONS KEPT(0), KEPT(4), KEPT(8), KEPT(12), KEPT(16), KEPT(20), KEPT(16), KEPT(8)

static const int16_t corrections[32] = {CORRECTIONS, CORRECTIONS, CORRECTIONS, CORRECTIONS};

/* Byte c of a lane of 16 at the bottom of both halves of a word. */
#define SPREAD(c) (int32_t)(0x80008000u | (uint32_t)(c) << 16 | (uint32_t)(c))

typedef struct decoder {
    __m512i codes, corrections, spread;
} decoder;

INLINE decoder make_decoder(void)
{
    return (decoder){_mm512_loadu_si512(codes), _mm512_loadu_si512(corrections),
                     _mm512_setr_epi32(SPREAD(0), SPREAD(1), SPREAD(2), SPREAD(3), SPREAD(4), SPREAD(5),
                                       SPREAD(6), SPREAD(7), SPREAD(8), SPREAD(9), SPREAD(10), SPREAD(11),
                                       SPREAD(12), SPREAD(13), SPREAD(14), SPREAD(15))};
}

/* The scales of 16 columns, in both halves of a column's word: which bits of a code to keep, and what to
 * subtract. */
typedef struct column_scales {
    __m512i kept, lacks;
} column_scales;

/* zeros: whether one of the scales may be 0. */
INLINE column_scales scales_of(const decoder *d, const uint8_t *bytes, const bool zeros)
{
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)bytes));
    const __m512i both = _mm512_shuffle_epi8(all, d->spread);
    const __mmask32 some = zeros ? _mm512_test_epi16_mask(both, both) : UINT32_MAX;
    return (column_scales){_mm512_maskz_permutexvar_epi16(some, both, d->corrections),
                           _mm512_slli_epi16(both, 4)};
}

/* Pair p of a line, unscaled. */
INLINE __m512i pair_codes(const decoder *d, __m512i line, const int p)
{
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * p), d->codes);
}

static void decode_bf16(const uint8_t *panel, int64_t units, uint32_t *out)
{
    const decoder d = make_decoder();
    for (int64_t u = 0; u < units; u++, out += GEMM4_UNIT / 2 * GEMM4_PANEL)
        for (int strip = 0; strip < GEMM4_STRIPS; strip++, panel += GEMM4_STRIP_BYTES)
            for (int block = 0; block < GEMM4_BLOCKS; block++) {
                const column_scales scales = scales_of(&d, panel + block * GEMM4_STRIP, true);
                uint32_t *to = out + 8 * block * GEMM4_PANEL + strip * GEMM4_STRIP;
#pragma GCC unroll 8
                for (int p = 0; p < 8; p++) {
                    const __m512i line = _mm512_loadu_si512(panel + 64 + 64 * (2 * block + p / 4));
                    const __m512i code = _mm512_and_si512(pair_codes(&d, line, p % 4), scales.kept);
                    _mm512_storeu_si512(to + p * GEMM4_PANEL, _mm512_subs_epi16(code, scales.lacks));
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

/* Keeps the same step of several strips together, as written: chains of dependent steps one after another
 * fill the schedulers, and take a tenth longer for one row. */
#define IN_ORDER(v) __asm__ volatile("" : "+v"(v))

/* code * scale of pair p of several strips' lines. */
INLINE void scaled_pairs(const int strips, const decoder *d, const uint8_t *line, const int p,
                         const column_scales scales[], __m512i b[])
{
#pragma GCC unroll 4
    for (int strip = 0; strip < strips; strip++) {
        b[strip] = pair_codes(d, _mm512_loadu_si512(line + strip * GEMM4_STRIP_BYTES), p);
        IN_ORDER(b[strip]);
    }
#pragma GCC unroll 4
    for (int strip = 0; strip < strips; strip++) {
        b[strip] = _mm512_and_si512(b[strip], scales[strip].kept);
        IN_ORDER(b[strip]);
    }
#pragma GCC unroll 4
    for (int strip = 0; strip < strips; strip++) {
        b[strip] = _mm512_subs_epi16(b[strip], scales[strip].lacks);
        IN_ORDER(b[strip]);
    }
}

/* A block of K of some rows and strips: each pair of K is decoded once for all rows. */
INLINE void few_rows_block(const int rows, const int strips, const bool zeros, const decoder *d,
                           const uint8_t *unit, int block, const uint32_t *const a[],
                           __m512 acc[][GEMM4_STRIPS])
{
    column_scales scales[GEMM4_STRIPS];
    request_ahead(unit, block, strips);
#pragma GCC unroll 4
    for (int strip = 0; strip < strips; strip++)
        scales[strip] = scales_of(d, unit + strip * GEMM4_STRIP_BYTES + block * GEMM4_STRIP, zeros);
#pragma GCC unroll 8
    for (int p = 0; p < 8; p++) {
        __m512i b[GEMM4_STRIPS];
        scaled_pairs(strips, d, unit + 64 + 64 * (2 * block + p / 4), p % 4, scales, b);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512i pair = _mm512_set1_epi32((int)a[r][p]);
#pragma GCC unroll 4
            for (int strip = 0; strip < strips; strip++) {
                acc[r][strip] = _mm512_dpbf16_ps(acc[r][strip], (__m512bh)pair, (__m512bh)b[strip]);
                if (rows == 1) IN_ORDER(acc[r][strip]);
            }
        }
    }
}

/* Whether a scale of a unit's strips is 0. */
INLINE bool any_zero(const int strips, const uint8_t *unit)
{
    __m512i least = _mm512_loadu_si512(unit);
#pragma GCC unroll 4
    for (int strip = 1; strip < strips; strip++)
        least = _mm512_min_epu8(least, _mm512_loadu_si512(unit + strip * GEMM4_STRIP_BYTES));
    return _mm512_test_epi8_mask(least, least) != UINT64_MAX;
}

/* A unit of K. */
INLINE void few_rows_unit(const int rows, const int strips, const bool zeros, const decoder *d,
                          const uint8_t *unit, const uint32_t *row[], __m512 acc[][GEMM4_STRIPS])
{
    for (int block = 0; block < GEMM4_BLOCKS; block++) {
        few_rows_block(rows, strips, zeros, d, unit, block, row, acc);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            row[r] += 8;
            __asm__("" : "+r"(row[r])); /* forces a register per row */
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
        if (rows > 1 || any_zero(strips, panel)) few_rows_unit(rows, strips, true, &d, panel, row, acc);
        else few_rows_unit(rows, strips, false, &d, panel, row, acc);
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
                                                .decode_bf16 = decode_bf16,
                                                .turn_bf16 = turn_bf16,
                                                .rows_bf16 = rows_bf16,
                                                .mm_i8 = mm_i8};
