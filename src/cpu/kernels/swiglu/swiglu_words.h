/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * swiglu_words.h - a row of gates and ups in bf16, interleaved by runs of 8, to quantised SwiGLU at
 * AVX-512, 16 blocks of 16 at a time.
 *
 * Two vectors of the row hold two blocks. Shuffled, one has their gates and one their ups; shifted, the even
 * columns of a vector are f32, and masked, its odd ones. So a vector of h holds 8 columns of each block, a
 * maximum takes one step less, and codes come out in order.
 *
 * In h = g / (1 + e^-x) u, x = alpha g, the power is 2^t e^r with t a multiple of 1/32. e^r is (k + r)^2 plus
 * a constant, times a factor that the table of 2^t's fraction holds. k is a multiple of ln 2 / 32, so another
 * t gives k + r: it, the polynomial and the sum take an FMA each (2e-7). The quotient is a product by the
 * reciprocal's estimate after a step of Newton's, because a division keeps Zen 4's multipliers for 8 cycles.
 * Where x is below -88 or a step overflows, h is NaN, and the group takes the path of other formats.
 *
 * Codes come from nvfp4_words.h's look-up by floor(4 h / D), D the block's scale times the global. h, the
 * quotient and the largest value over 6 G are within 2e-6 of exact, so a code can differ only that close to a
 * midpoint.
 *
 * A vector of h takes 17 half cycles of Zen 4: 9 of the multipliers, 5 of the adders (a shift is theirs), 2
 * shuffles and a mask. 16 values take 16 cycles in L1, 10 of them for h, and 17 from memory if their lines
 * are requested evenly, far ahead into L2 and a little ahead. Requested in bursts 8 KB ahead, they take 26.
 */
#ifndef QUERN_CPU_SWIGLU_WORDS_H
#define QUERN_CPU_SWIGLU_WORDS_H

#include "cpu/kernels/formats/nvfp4_words.h"

enum {
    SWIGLU_GROUPS = 8,
    PAIRS = WORD_VECTORS,   /* of blocks, in a group */
    IN_STEP = 4,            /* vectors of h */
    AHEAD_OF_VALUES = 1024, /* numbers of the row */
    SWIGLU_RUN = 8          /* of the interleaved values */
};

typedef struct swiglu_group {
    __m512 h[PAIRS][2]; /* even columns and odd ones of two blocks */
    vfloat largest;     /* of each block */
    __m512 quarter;     /* 4 / D */
    __mmask16 kept;     /* blocks whose codes are not all 0 */
    bool within_table;
} swiglu_group;

/* Of swiglu_rows.h: takes the groups that the look-up cannot. */
static uint32_t swiglu_strips(const swiglu_rule *rule, const quantise_rule *to, const void *x,
                              quern_dtype dtype, int64_t q, int64_t n, uint8_t *codes, uint8_t *scales);

#define EACH _Pragma("GCC unroll 4") for (int k = 0; k < IN_STEP; k++)

#define K_STEPS 46 /* k = 46 / 32 ln 2 */
/* By i: 2^((i - 46) / 32 modulo 1) times 2^(46 / 32) / 2 k. */
static const float powers[32] = {
    0x1.00ecd8p+1f, 0x1.068d14p+1f, 0x1.0c4cdcp+1f, 0x1.122cdcp+1f, 0x1.182dccp+1f, 0x1.1e5062p+1f,
    0x1.24955ep+1f, 0x1.2afd7ep+1f, 0x1.318988p+1f, 0x1.383a46p+1f, 0x1.3f1084p+1f, 0x1.460d16p+1f,
    0x1.4d30d4p+1f, 0x1.547c94p+1f, 0x1.5bf13cp+0f, 0x1.638fbp+0f,  0x1.6b58d8p+0f, 0x1.734da6p+0f,
    0x1.7b6f0ep+0f, 0x1.83be0ap+0f, 0x1.8c3b98p+0f, 0x1.94e8bep+0f, 0x1.9dc688p+0f, 0x1.a6d604p+0f,
    0x1.b0184cp+0f, 0x1.b98e7ap+0f, 0x1.c339b2p+0f, 0x1.cd1b1ep+0f, 0x1.d733eep+0f, 0x1.e18556p+0f,
    0x1.ec1094p+0f, 0x1.f6d6fp+0f};

/* 1 + e^-x; NaN or infinite where x < -88. */
INLINE void one_plus_exp(const __m512 x[IN_STEP], __m512 d[IN_STEP])
{
    const __m512 magic = _mm512_set1_ps(0x1.8p18f), rate = _mm512_set1_ps(-1.44269504088896340736f),
                 shifted = _mm512_set1_ps(0x1.8p18f + K_STEPS / 32.0f),
                 ln2 = _mm512_set1_ps(0.693147180559945309417f);
    const __m512 low = _mm512_loadu_ps(powers), high = _mm512_loadu_ps(powers + 16);
    __m512 t[IN_STEP], power[IN_STEP];
    EACH t[k] = _mm512_fmadd_ps(x[k], rate, magic);
    EACH power[k] = _mm512_permutex2var_ps(low, _mm512_castps_si512(t[k]), high);
    EACH t[k] = _mm512_sub_ps(t[k], shifted);
    EACH d[k] = _mm512_fnmsub_ps(t[k], ln2, x[k]);
    EACH power[k] = _mm512_scalef_ps(power[k], t[k]);
    EACH d[k] = _mm512_fmadd_ps(d[k], d[k], _mm512_set1_ps(0x1.fffe4cp-1f)); /* 2 k - k^2 */
    EACH d[k] = _mm512_fmadd_ps(d[k], power[k], _mm512_set1_ps(1));
}

/* SwiGLU of four blocks at x. `plain`: without a limit, alpha 1, beta 0. */
INLINE void swiglu_blocks(const swiglu_rule *rule, const bool plain, const uint16_t *x, __m512 h[IN_STEP])
{
    const __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    const __m512 limit = _mm512_set1_ps(rule->limit > 0.0f ? rule->limit : INFINITY);
    __m512 g[IN_STEP], u[IN_STEP], d[IN_STEP], inverse[IN_STEP];
#pragma GCC unroll 2
    for (int k = 0; k < IN_STEP; k += 2) {
        const __m512i first = _mm512_loadu_si512(x + 32 * k), second = _mm512_loadu_si512(x + 32 * k + 32);
        const __m512i gates = _mm512_shuffle_i64x2(first, second, 0x88),
                      ups = _mm512_shuffle_i64x2(first, second, 0xdd);
        g[k] = _mm512_castsi512_ps(_mm512_slli_epi32(gates, 16));
        g[k + 1] = _mm512_castsi512_ps(_mm512_and_si512(gates, odd));
        u[k] = _mm512_castsi512_ps(_mm512_slli_epi32(ups, 16));
        u[k + 1] = _mm512_castsi512_ps(_mm512_and_si512(ups, odd));
    }
    if (plain) {
        one_plus_exp(g, d);
    } else {
        enum { SMALLER_MAGNITUDE = 2 /* with the first one's sign */ };
        __m512 product[IN_STEP];
        EACH g[k] = _mm512_min_ps(g[k], limit);
        EACH u[k] = _mm512_range_ps(u[k], limit, SMALLER_MAGNITUDE);
        EACH u[k] = _mm512_add_ps(u[k], _mm512_set1_ps(rule->beta));
        EACH product[k] = _mm512_mul_ps(g[k], _mm512_set1_ps(rule->alpha));
        one_plus_exp(product, d);
    }
    EACH inverse[k] = _mm512_rcp14_ps(d[k]);
    EACH h[k] = _mm512_mul_ps(_mm512_mul_ps(g[k], u[k]), inverse[k]);
    EACH h[k] = _mm512_mul_ps(h[k], _mm512_fnmadd_ps(d[k], inverse[k], _mm512_set1_ps(2)));
}

/* The larger of each lane's bits: NaN is larger than every number. */
INLINE __m512i larger_bits(__m512i a, __m512i b)
{
    return _mm512_max_epu32(a, b);
}

/* The largest magnitude of each block. */
INLINE vfloat block_maxima(const __m512 h[PAIRS][2])
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    __m512i m[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++)
        m[i] = larger_bits(_mm512_and_si512(_mm512_castps_si512(h[i][0]), magnitude),
                           _mm512_and_si512(_mm512_castps_si512(h[i][1]), magnitude));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        m[i] = larger_bits(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]),
                           _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        m[i] = larger_bits(_mm512_unpacklo_epi64(m[2 * i], m[2 * i + 1]),
                           _mm512_unpackhi_epi64(m[2 * i], m[2 * i + 1]));
    /* Each lane of 128 bits now holds that lane's maxima of four pairs; a block is two lanes. */
    const __m512i blocks =
        larger_bits(_mm512_shuffle_i32x4(m[0], m[1], 0x88), _mm512_shuffle_i32x4(m[0], m[1], 0xdd));
    return (vfloat)_mm512_permutexvar_epi32(order, blocks);
}

/* The largest of the bits of gates and ups. */
INLINE uint32_t magnitude_bits(const uint16_t *x, const int groups)
{
    __m512i words = _mm512_setzero_si512();
    for (int i = 0; i < 16 * groups; i++) words = _mm512_max_epu16(words, magnitudes_of(x + 32 * i));
    const __m512i odd = _mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000));
    return _mm512_reduce_max_epu32(larger_bits(odd, _mm512_slli_epi32(words, 16)));
}

INLINE void swiglu_values(const swiglu_rule *rule, const bool plain, const uint16_t *x, const int groups,
                          swiglu_group *group)
{
    for (int g = 0; g < groups; g++, x += 2 * WORD_GROUP) {
        for (int i = 0; i < PAIRS; i += IN_STEP / 2) {
            request_words(x + 64 * i + AHEAD_OF_VALUES, 32 * IN_STEP);
            swiglu_blocks(rule, plain, x + 64 * i, group[g].h[i]);
        }
        group[g].largest = block_maxima(group[g].h);
    }
}

/* Kept apart, each has the registers for its constants. */
#define APART static __attribute__((noinline)) void
APART plain_values(const swiglu_rule *rule, const uint16_t *x, int groups, swiglu_group *group)
{
    swiglu_values(rule, true, x, groups, group);
}

APART limited_values(const swiglu_rule *rule, const uint16_t *x, int groups, swiglu_group *group)
{
    swiglu_values(rule, false, x, groups, group);
}

/* Scales of the profile `rne` without a division. */
INLINE vint near_scales(const float global, word_group *w)
{
    const vfloat sixth = w->largest * v_splat(1.0f / (6.0f * global));
    w->kept = _mm512_cmp_ps_mask((__m512)sixth, _mm512_set1_ps(0x1p-9f), _CMP_GE_OQ);
    const vint bytes = (vint)_mm512_maskz_mov_epi32(w->kept, (__m512i)saturated_e4m3(sixth));
    w->d = e4m3_value(bytes) * global;
    return bytes;
}

APART swiglu_scales(const quantise_rule *to, const int groups, swiglu_group *group, uint8_t *scales)
{
    const bool near = to->profile == QUANTISE_PROFILE_RNE && to->global > 0x1p-100f && to->global < 0x1p100f;
    for (int g = 0; g < groups; g++) {
        word_group w;
        w.largest = group[g].largest;
        v_store_bytes(scales + 16 * g, near ? near_scales(to->global, &w) : word_scales(to, &w));
        group[g].kept = w.kept;
        group[g].quarter = w.quarter = quarter_of(&w, 0);
        const __mmask16 finite = _mm512_cmp_ps_mask((__m512)w.largest, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        group[g].within_table = within_table(&w) && finite == 0xffff;
    }
}

INLINE void code_swiglu_group(const swiglu_group *g, uint8_t *codes)
{
    __m512i code[PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS; i++) {
        const __m512 quarter = _mm512_permutexvar_ps(_mm512_loadu_si512(block_lanes[i]), g->quarter);
        code[i] = word_codes(g->h[i][0], quarter, g->h[i][1], quarter);
    }
    store_words(code, codes);
    store_words(code + 4, codes + 64);
    for (unsigned none = (uint16_t)~g->kept; none != 0; none &= none - 1)
        memset(codes + 8 * __builtin_ctz(none), 0, 8);
}

/* Some groups, each step for all of them. Returns bits below 0x7f800000 only if all gates and ups are finite:
 * with a limit, which hides them, their own; without one, h within the table is finite only if they are. */
static uint32_t swiglu_groups(const swiglu_rule *rule, const quantise_rule *to, const bool plain,
                              const uint16_t *x, const int groups, uint8_t *codes, uint8_t *scales)
{
    swiglu_group group[SWIGLU_GROUPS];
    uint32_t most = plain ? 0 : magnitude_bits(x, groups);
    if (plain) plain_values(rule, x, groups, group);
    else limited_values(rule, x, groups, group);
    swiglu_scales(to, groups, group, scales);
    for (int g = 0; g < groups; g++, x += 2 * WORD_GROUP, codes += WORD_GROUP / 2, scales += 16) {
        if (group[g].within_table) {
            code_swiglu_group(&group[g], codes);
        } else {
            const uint32_t bits =
                swiglu_strips(rule, to, x, QUERN_BF16, SWIGLU_RUN, WORD_GROUP, codes, scales);
            if (bits > most) most = bits;
        }
    }
    return most;
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
