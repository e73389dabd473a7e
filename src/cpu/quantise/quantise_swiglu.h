/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * quantise_swiglu.h - a row of gates and ups in bf16, interleaved by runs of 8, to quantised SwiGLU at
 * AVX-512, 16 blocks of 16 at a time.
 *
 * A vector of the row holds the 16 gates and 16 ups of a block. Shifted, its even values are f32; masked, its
 * odd ones; one permutation of 128-bit lanes of both makes the gates, another the ups: h 0, 2 ... 14, then 1,
 * 3 ... 15. In h = g / (1 + 2^y) u the power is a look-up of sixteenths times a polynomial of degree 2 (4e-7)
 * with the integer part added to the exponent. So the work spreads over all pipes; four blocks in step hide
 * the latencies.
 *
 * Codes come from quantise_words.h's look-up by floor(4 h / D), D the block's scale times the global. h and
 * the quotient are within 2e-6 of exact, so a code can differ only that close to a midpoint.
 */
#ifndef QUERN_CPU_QUANTISE_SWIGLU_H
#define QUERN_CPU_QUANTISE_SWIGLU_H

#include "cpu/quantise/quantise_words.h"

enum {
    SWIGLU_GROUPS = 4,
    IN_STEP = 4,
    AHEAD_OF_CODES = SWIGLU_GROUPS * 2 * WORD_GROUP,
    SWIGLU_RUN = 8 /* of the interleaved values */
};

/* Of quantise_rows.h: takes the groups that the look-up cannot. */
static void quantise_row(const quantise_rule *rule, const void *x, quern_dtype dtype, int64_t n,
                         uint8_t *codes, uint8_t *scales);

typedef struct swiglu_group {
    __m512 h[16]; /* a block each */
    word_group words;
} swiglu_group;

#define EXP2_SIXTEENTHS                                                                                      \
    0x1p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fep+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f,  \
        0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f, 0x1.ae89fap+0f,      \
        0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f

#define EACH _Pragma("GCC unroll 4") for (int k = 0; k < IN_STEP; k++)

/* 1 + 2^(y / 16) for |y| <= 16 * 126. */
INLINE void one_plus_power(__m512 y[IN_STEP])
{
    static const float sixteenths[16] = {EXP2_SIXTEENTHS};
    const __m512 table = _mm512_loadu_ps(sixteenths), magic = _mm512_set1_ps(0x1.8p23f);
    __m512 whole[IN_STEP], power[IN_STEP];
    EACH whole[k] = _mm512_add_ps(y[k], magic);
    EACH y[k] = _mm512_sub_ps(y[k], _mm512_sub_ps(whole[k], magic));
    EACH power[k] = _mm512_permutexvar_ps(_mm512_castps_si512(whole[k]), table);
    EACH
    {
        const __m512i octave = _mm512_andnot_si512(_mm512_set1_epi32(15), _mm512_castps_si512(whole[k]));
        power[k] = _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_castps_si512(power[k]), _mm512_slli_epi32(octave, 19)));
    }
    EACH whole[k] = _mm512_fmadd_ps(y[k], _mm512_set1_ps(9.38384e-4f), _mm512_set1_ps(4.33242397e-2f));
    EACH y[k] = _mm512_mul_ps(y[k], power[k]);
    EACH y[k] = _mm512_fmadd_ps(y[k], whole[k], power[k]);
    EACH y[k] = _mm512_add_ps(y[k], _mm512_set1_ps(1));
}

/* SwiGLU of four blocks at x. `plain`: without a limit, alpha 1, beta 0. */
INLINE void swiglu_blocks(const swiglu_rule *rule, const bool plain, const uint16_t *x, __m512 h[IN_STEP])
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    const __m512 most = _mm512_set1_ps(16 * 126), least = _mm512_set1_ps(-16 * 126);
    const __m512 limit = _mm512_set1_ps(rule->limit > 0.0f ? rule->limit : INFINITY);
    const __m512 rate = _mm512_set1_ps((plain ? 1.0f : rule->alpha) * -23.0831206542234145f);
    __m512 g[IN_STEP], u[IN_STEP], y[IN_STEP];
    EACH
    {
        const __m512i pairs = _mm512_loadu_si512(x + 32 * k);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
                     odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
        g[k] = _mm512_shuffle_f32x4(even, odd, 0x88);
        u[k] = _mm512_shuffle_f32x4(even, odd, 0xdd);
    }
    if (!plain) {
        EACH g[k] = _mm512_min_ps(g[k], limit);
        EACH u[k] = _mm512_max_ps(_mm512_min_ps(u[k], limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
        EACH u[k] = _mm512_add_ps(u[k], _mm512_set1_ps(rule->beta));
    }
    EACH y[k] = _mm512_max_ps(_mm512_min_ps(_mm512_mul_ps(g[k], rate), most), least);
    one_plus_power(y);
    EACH h[k] = _mm512_mul_ps(_mm512_div_ps(g[k], y[k]), u[k]);
}

/* The larger of each lane's bits: NaN is larger than every number. */
INLINE __m512i larger_bits(__m512i a, __m512i b)
{
    return _mm512_max_epu32(a, b);
}

/* The largest magnitude of each vector's lanes. */
INLINE vfloat block_maxima(const __m512 h[16])
{
    __m512i m[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        m[i] = _mm512_and_si512(_mm512_castps_si512(h[i]), _mm512_set1_epi32(0x7fffffff));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        m[i] = larger_bits(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]),
                           _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        m[i] = larger_bits(_mm512_unpacklo_epi64(m[2 * i], m[2 * i + 1]),
                           _mm512_unpackhi_epi64(m[2 * i], m[2 * i + 1]));
        /* Each lane of 128 bits now holds that lane's maxima of four vectors. */
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        m[i] = larger_bits(_mm512_shuffle_i32x4(m[2 * i], m[2 * i + 1], 0x88),
                           _mm512_shuffle_i32x4(m[2 * i], m[2 * i + 1], 0xdd));
    return (vfloat)larger_bits(_mm512_shuffle_i32x4(m[0], m[1], 0x88),
                               _mm512_shuffle_i32x4(m[0], m[1], 0xdd));
}

/* Codes of two blocks: the first in the low words, the second in the high ones. */
INLINE __m512i two_codes(const __m512 h[2], const float quarter[2])
{
    return word_codes(h[0], _mm512_set1_ps(quarter[0]), h[1], _mm512_set1_ps(quarter[1]));
}

/* Bytes of codes from the vectors of two pairs of blocks: a byte a word. */
INLINE __m512i code_bytes(__m512i a, __m512i b)
{
    const __m512i even = _mm512_shuffle_i64x2(a, b, 0x44), odd = _mm512_shuffle_i64x2(a, b, 0xee);
    return _mm512_or_si512(even, _mm512_slli_epi16(odd, 4));
}

/* The codes of eight blocks. */
INLINE void code_blocks(const __m512 h[8], const float quarter[8], uint8_t *codes)
{
    const __m512i apart =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15);
    const __m512i low = code_bytes(two_codes(h, quarter), two_codes(h + 2, quarter + 2)),
                  high = code_bytes(two_codes(h + 4, quarter + 4), two_codes(h + 6, quarter + 6));
    const __m512i bytes = _mm512_shuffle_epi8(_mm512_packus_epi16(low, high), apart);
    _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, bytes));
}

/* The group's values in order. */
INLINE void ordered_values(const swiglu_group *g, float out[WORD_GROUP])
{
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(out + 16 * i, _mm512_permutexvar_ps(order, g->h[i]));
}

INLINE void code_swiglu_group(const swiglu_group *g, uint8_t *codes)
{
    float quarter[16];
    _mm512_storeu_ps(quarter, g->words.quarter);
    code_blocks(g->h, quarter, codes);
    code_blocks(g->h + 8, quarter + 8, codes + 64);
    for (unsigned none = (uint16_t)~g->words.kept; none != 0; none &= none - 1)
        memset(codes + 8 * __builtin_ctz(none), 0, 8);
}

/* The larger of the bits that stand for a group's values: of h, which is nonfinite where g or u is; with a
 * limit, which hides them, of g and u themselves. */
INLINE __m512i larger_of_group(__m512i most, const bool plain, const uint16_t *x, const swiglu_group *g)
{
    if (plain) return larger_bits(most, (__m512i)g->words.largest);
    __m512i words = _mm512_setzero_si512();
    for (int i = 0; i < 16; i++) words = _mm512_max_epu16(words, magnitudes_of(x + 32 * i));
    const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000));
    return larger_bits(most, larger_bits(odd, _mm512_slli_epi32(words, 16)));
}

/* Some groups, each step for all of them. Returns the bits of larger_of_group. */
INLINE uint32_t swiglu_groups(const swiglu_rule *rule, const quantise_rule *to, const bool plain,
                              const uint16_t *x, const int groups, uint8_t *codes, uint8_t *scales)
{
    swiglu_group group[SWIGLU_GROUPS];
    __m512i most = _mm512_setzero_si512();
    for (int g = 0; g < groups; g++, x += 2 * WORD_GROUP) {
        for (int i = 0; i < 16; i += IN_STEP) swiglu_blocks(rule, plain, x + 32 * i, group[g].h + i);
        group[g].words.largest = block_maxima(group[g].h);
        most = larger_of_group(most, plain, x, &group[g]);
    }
    for (int g = 0; g < groups; g++) {
        word_group *w = &group[g].words;
        v_store_bytes(scales + 16 * g, word_scales(to, w));
        w->quarter = quarter_of(w);
        w->within_table = within_table(w);
    }
    for (int g = 0; g < groups; g++, codes += WORD_GROUP / 2, scales += 16) {
        if (groups == SWIGLU_GROUPS) request_words(x + AHEAD_OF_CODES + g * 2 * WORD_GROUP, 2 * WORD_GROUP);
        if (group[g].words.within_table) {
            code_swiglu_group(&group[g], codes);
        } else {
            float h[WORD_GROUP];
            ordered_values(&group[g], h);
            quantise_row(to, h, QUERN_F32, WORD_GROUP, codes, scales);
        }
    }
    return _mm512_reduce_max_epu32(most);
}

/* n columns of SwiGLU; the last group comes from a copy that zeros pad. Returns bits below 0x7f800000 only if
 * all values are finite. */
INLINE uint32_t swiglu_words(const swiglu_rule *rule, const quantise_rule *to, const bool plain,
                             const uint16_t *x, int64_t n, uint8_t *codes, uint8_t *scales)
{
    uint16_t copy[2 * WORD_GROUP];
    uint8_t last[WORD_GROUP / 2], last_scales[WORD_GROUP / BLOCK];
    uint32_t most = 0;
    while (n >= WORD_GROUP) {
        const int64_t whole = n / WORD_GROUP, groups = whole < SWIGLU_GROUPS ? whole : SWIGLU_GROUPS;
        const uint32_t bits = swiglu_groups(rule, to, plain, x, (int)groups, codes, scales);
        if (bits > most) most = bits;
        n -= groups * WORD_GROUP;
        x += groups * 2 * WORD_GROUP;
        codes += groups * WORD_GROUP / 2;
        scales += groups * WORD_GROUP / BLOCK;
    }
    if (n == 0) return most;
    const size_t blocks = (size_t)(n + BLOCK - 1) / BLOCK;
    memset(copy, 0, sizeof copy);
    memcpy(copy, x, (size_t)(2 * n) * sizeof *copy);
    const uint32_t bits = swiglu_groups(rule, to, plain, copy, 1, last, last_scales);
    memcpy(codes, last, 8 * blocks);
    memcpy(scales, last_scales, blocks);
    return bits > most ? bits : most;
}

#endif
