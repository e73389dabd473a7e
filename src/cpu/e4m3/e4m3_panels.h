/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * e4m3_panels.h - rows of e4m3 codes as panels: decoded, and turned so that rows become columns.
 *
 * With AVX-512, 16 rows by 64 codes are turned as words of four codes (64 shuffles), each word vector is
 * decoded to words of two bf16 values, and floats are their halves. With VBMI a look-up among 128 bytes
 * gives each byte of 64 values. Without it they are computed: of eeee mmm the value 2^(eeee - 7) (1 + m /
 * 8) has the bf16 bytes 0x3c + (eeee >> 1) and (eeee & 1) << 7 | mmm << 4; the eight magnitudes below
 * 2^-6, which the format has without the leading 1, come from a table. A line of 64 codes is loaded once,
 * whole: rows are often 4096 bytes apart, and an L1 set has no room for 16 such lines. Limit: with VBMI a
 * shuffle a cycle, 9 for 64 codes, of one row's product 6; else 20 instructions for 64 codes, 5 of them
 * shuffles.
 *
 * With AVX2, 16 rows by 32 codes are turned as bytes (64 shuffles). A code in the high byte of a word,
 * shifted by one, is an f16 but for its bias, so the instruction that widens f16 decodes it. Limit:
 * 0.85 instructions a code. A portable compiler does as it can.
 */
#ifndef QUERN_CPU_E4M3_PANELS_H
#define QUERN_CPU_E4M3_PANELS_H

#include "cpu/e4m3/e4m3_kernels.h"
#include "core/half.h"
#include "cpu/kernels/formats/lanes.h"

#if !defined(__AVX512F__)
/* Any code, NaN too. */
INLINE float value_of(uint8_t code)
{
    const float size = float_from_bits((uint32_t)(code & 127) << 20) * 0x1p120f,
                value = (code & 127) == 127 ? NAN : size;
    return code & 128 ? -value : value;
}
#endif

#if defined(__AVX512F__)
enum { PANEL_CODES = 64 };

/* Codes k ... k + 63 of rows first ... first + 15, turned: vector i holds codes k + 4 i ... + 3 of each. */
INLINE void load_turned(const e4m3_rows *r, int64_t first, int64_t k, vfloat words[LANES])
{
    const int64_t left = r->depth - k;
    const __mmask64 kept = left < PANEL_CODES ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const uint8_t *at = r->codes + (first + i) * r->stride + k;
        const bool exists = first + i < r->rows;
        if (r->ahead != 0 && exists) __builtin_prefetch(at + r->ahead, 0, 2);
        words[i] = (vfloat)_mm512_maskz_loadu_epi8(exists ? kept : 0, at);
    }
    v_transpose(words);
}

#if !defined(__AVX512BF16__)
/* Words of four codes as words of two bf16 values: codes 0 and 1 in *low, 2 and 3 in *high. */
INLINE void bf16_of_words(__m512i words, __m512i *low, __m512i *high)
{
    const __m512i order = _mm512_broadcast_i32x4(
                      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)),
                  small_lower = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20,
                                                                     0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0)),
                  small_upper = _mm512_broadcast_i32x4(
                      _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i code = _mm512_shuffle_epi8(words, order),
                  size = _mm512_and_si512(code, _mm512_set1_epi8(0x7f));
    __m512i lower = _mm512_and_si512(_mm512_slli_epi16(size, 4), _mm512_set1_epi8((char)0xf0)),
            upper = _mm512_add_epi8(_mm512_and_si512(_mm512_srli_epi16(size, 4), _mm512_set1_epi8(0x07)),
                                    _mm512_set1_epi8(0x3c));
    const __mmask64 small = _mm512_testn_epi8_mask(size, _mm512_set1_epi8(0x78)),
                    nan = _mm512_cmpeq_epi8_mask(size, _mm512_set1_epi8(0x7f));
    lower = _mm512_mask_shuffle_epi8(lower, small, small_lower, size);
    upper = _mm512_mask_shuffle_epi8(upper, small, small_upper, size);
    if (__builtin_expect(nan != 0, 0)) {
        lower = _mm512_mask_mov_epi8(lower, nan, _mm512_set1_epi8((char)0xc0));
        upper = _mm512_mask_mov_epi8(upper, nan, _mm512_set1_epi8(0x7f));
    }
    upper = _mm512_ternarylogic_epi32(upper, code, _mm512_set1_epi8((char)0x80), 0xf8); /* a | (b & c) */
    *low = _mm512_unpacklo_epi8(lower, upper);
    *high = _mm512_unpackhi_epi8(lower, upper);
}

static void panel_f32(const e4m3_rows *r, int32_t panel, float *to)
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    for (int64_t k = 0; k < r->depth; k += PANEL_CODES)
        for (int64_t first = 0; first < panel; first += LANES) {
            vfloat words[LANES];
            load_turned(r, first, k, words);
            float *at = to + k * panel + first;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++, at += 4 * panel) {
                if (k + 4 * i >= r->depth) break;
                __m512i pair[2];
                bf16_of_words((__m512i)words[i], &pair[0], &pair[1]);
                for (int64_t c = 0; c < 4 && k + 4 * i + c < r->depth; c++)
                    _mm512_storeu_si512(at + c * panel, c % 2 == 0 ? _mm512_slli_epi32(pair[c / 2], 16)
                                                                   : _mm512_and_si512(pair[c / 2], odd));
            }
        }
}

#else
/* The bytes of the bf16 values of codes 0 ... 63 and 64 ... 127. */
typedef struct bf16_bytes {
    __m512i lower[2], upper[2];
} bf16_bytes;

INLINE bf16_bytes bytes_of_codes(void)
{
    const __m512i mantissas = _mm512_broadcast_i32x4(
                      _mm_setr_epi8(0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, (char)0x80, (char)0x90,
                                    (char)0xa0, (char)0xb0, (char)0xc0, (char)0xd0, (char)0xe0, (char)0xf0)),
                  exponents = _mm512_setr_epi64(0x3c3c3c3c3c3c3c3c, 0x3c3c3c3c3c3c3c3c, 0x3d3d3d3d3d3d3d3d,
                                                0x3d3d3d3d3d3d3d3d, 0x3e3e3e3e3e3e3e3e, 0x3e3e3e3e3e3e3e3e,
                                                0x3f3f3f3f3f3f3f3f, 0x3f3f3f3f3f3f3f3f),
                  small_lower = _mm512_zextsi128_si512(_mm_setr_epi8(0, 0, (char)0x80, (char)0xc0, 0, 0x20,
                                                                     0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0)),
                  small_upper = _mm512_zextsi128_si512(
                      _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
    const __mmask64 small = 0xff, nan = (__mmask64)1 << 63;
    return (bf16_bytes){
        {_mm512_mask_mov_epi8(mantissas, small, small_lower),
         _mm512_mask_mov_epi8(mantissas, nan, _mm512_set1_epi8((char)0xc0))},
        {_mm512_mask_mov_epi8(exponents, small, small_upper),
         _mm512_mask_mov_epi8(_mm512_add_epi8(exponents, _mm512_set1_epi8(4)), nan, _mm512_set1_epi8(0x7f))}};
}

/* Words of four codes as words of two bf16 values: codes 0 and 1 in *low, 2 and 3 in *high. The look-ups
 * ignore the sign. */
INLINE void bf16_of_words(const bf16_bytes *bytes, __m512i words, __m512i *low, __m512i *high)
{
    const __m512i order = _mm512_broadcast_i32x4(
                      _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)),
                  code = _mm512_shuffle_epi8(words, order),
                  lower = _mm512_permutex2var_epi8(bytes->lower[0], code, bytes->lower[1]),
                  size = _mm512_permutex2var_epi8(bytes->upper[0], code, bytes->upper[1]),
                  upper = _mm512_ternarylogic_epi32(size, code, _mm512_set1_epi8((char)0x80),
                                                    0xf8); /* a | (b & c) */
    *low = _mm512_unpacklo_epi8(lower, upper);
    *high = _mm512_unpackhi_epi8(lower, upper);
}

static void panel_bf16(const e4m3_rows *r, int32_t panel, uint32_t *to)
{
    const bf16_bytes bytes = bytes_of_codes();
    for (int64_t k = 0; k < r->depth; k += PANEL_CODES)
        for (int64_t first = 0; first < panel; first += LANES) {
            vfloat words[LANES];
            load_turned(r, first, k, words);
            uint32_t *at = to + k / 2 * panel + first;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++, at += 2 * panel) {
                if (k + 4 * i >= r->depth) break;
                __m512i low, high;
                bf16_of_words(&bytes, (__m512i)words[i], &low, &high);
                _mm512_storeu_si512(at, low);
                if (k + 4 * i + 2 < r->depth) _mm512_storeu_si512(at + panel, high);
            }
        }
}
#endif
#elif defined(__FMA__)
enum { PANEL_COLUMNS = 16, PANEL_CODES = 32 };

/* 16 rows of 32 codes, turned: a lane of 16 bytes of vector i holds code i, or i + 16, of the rows. */
INLINE void turn_codes(__m256i v[PANEL_COLUMNS])
{
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        __m256i half[PANEL_COLUMNS];
        memcpy(half, v, sizeof half);
#pragma GCC unroll 8
        for (int i = 0; i < PANEL_COLUMNS / 2; i++) {
            v[2 * i] = _mm256_unpacklo_epi8(half[i], half[i + PANEL_COLUMNS / 2]);
            v[2 * i + 1] = _mm256_unpackhi_epi8(half[i], half[i + PANEL_COLUMNS / 2]);
        }
    }
}

/* Eight codes of each lane, in the high bytes of words. A code is an f16 whose exponent has another bias. */
INLINE void store_values(__m256i words, float *low, float *high)
{
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16((short)0xbf80));
    const __m256 bias = _mm256_set1_ps(256.0f);
    _mm256_storeu_ps(low, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), bias));
    if (high != NULL)
        _mm256_storeu_ps(high, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), bias));
}

/* The values of n <= 32 codes of 16 rows; `to` has rows of `panel` floats. */
INLINE void decode_turned(__m256i v[PANEL_COLUMNS], float *to, int32_t panel, int64_t n)
{
    const __m256i zero = _mm256_setzero_si256(), nan = _mm256_set1_epi8(0x7f);
    __m256i bad = zero;
    for (int i = 0; i < PANEL_COLUMNS; i++)
        bad = _mm256_or_si256(bad, _mm256_cmpeq_epi8(_mm256_and_si256(v[i], nan), nan));
    turn_codes(v);
#pragma GCC unroll 16
    for (int i = 0; i < PANEL_COLUMNS; i++) {
        if (i >= n) break;
        float *low = to + i * panel, *high = i + 16 < n ? low + 16 * panel : NULL;
        store_values(_mm256_unpacklo_epi8(zero, v[i]), low, high);
        store_values(_mm256_unpackhi_epi8(zero, v[i]), low + 8, high != NULL ? high + 8 : NULL);
    }
    if (__builtin_expect(_mm256_testz_si256(bad, bad), 1)) return;
    for (int64_t k = 0; k < n; k++)
        for (int j = 0; j < PANEL_COLUMNS; j++) {
            uint8_t codes[32];
            memcpy(codes, &v[k % 16], sizeof codes);
            if ((codes[k / 16 * 16 + j] & 127) == 127) to[k * panel + j] = NAN;
        }
}

static void panel_f32(const e4m3_rows *r, int32_t panel, float *to)
{
    for (int64_t k = 0; k < r->depth; k += PANEL_CODES)
        for (int64_t first = 0; first < panel; first += PANEL_COLUMNS) {
            const int64_t n = r->depth - k < PANEL_CODES ? r->depth - k : PANEL_CODES;
            __m256i v[PANEL_COLUMNS];
#pragma GCC unroll 16
            for (int i = 0; i < PANEL_COLUMNS; i++) {
                const uint8_t *at = r->codes + (first + i) * r->stride + k;
                uint8_t tail[PANEL_CODES] = {0};
                v[i] = _mm256_setzero_si256();
                if (first + i >= r->rows) continue;
                if (r->ahead != 0 && k % 64 == 0) __builtin_prefetch(at + r->ahead, 0, 2);
                if (n < PANEL_CODES) at = memcpy(tail, at, (size_t)n);
                v[i] = _mm256_loadu_si256((const __m256i *)at);
            }
            decode_turned(v, to + k * panel + first, panel, n);
        }
}
#else
static void panel_f32(const e4m3_rows *r, int32_t panel, float *to)
{
    for (int64_t k = 0; k < r->depth; k++)
        for (int64_t j = 0; j < panel; j++)
            to[k * panel + j] = value_of(j < r->rows ? r->codes[j * r->stride + k] : 0);
}
#endif

#endif
