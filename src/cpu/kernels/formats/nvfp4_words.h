/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nvfp4_words.h - rows of bf16 to NVFP4 at AVX-512, 16 blocks at a time, without a division a value and
 * with the bits of nvfp4_blocks.h.
 *
 * A code is decided by where |x| / D lies among the midpoints of e2m1, D the block's scale times the global.
 * All midpoints are quarters, so a look-up by floor(4 x / D) decides. An FMA that rounds towards 0 and adds
 * a power of two plus 32 leaves that integer, plus 32, in low bits: of even columns in the low half of a
 * word, of odd columns in the high half, so one merge makes the indices of 32 values.
 *
 * The profile's own steps round twice and the product with D's inverse a few times, each by at most 2^-24. So
 * both decide alike for every bf16 number that is not within a few f32 units of D times a midpoint. For each
 * of the four mantissas of midpoints there is at most one such number in a block, the bf16 number nearest to
 * the product. (A global computed from bf16 values is a bf16 number over 21, so there often is one: 14 / 21
 * of 1.5 is 1.) The inverse is a little too large, so such a number counts as above. Where the profile's own
 * division, done for that number alone, says below, the block's inverse is a little too small instead; only a
 * group in which a block has such numbers on either side sets their codes one midpoint after another.
 *
 * The maxima of 16 blocks come from three rounds of unpacking on 16-bit words. In L1, 16 values take 8
 * cycles of Zen 4, and two divisions a value 15.
 */
#ifndef QUERN_CPU_NVFP4_WORDS_H
#define QUERN_CPU_NVFP4_WORDS_H

#include "cpu/kernels/formats/nvfp4_blocks.h"

enum {
    WORD_VECTORS = 8, /* of a group, 32 values each */
    WORD_GROUP = 16 * QUANTISE_BLOCK,
    WORD_GROUPS = 8,  /* whose scales are computed before their codes */
    FAR_AHEAD = 2048, /* numbers */
    NEAR = 16,        /* f32 units in the last place, a power of two */
    MIDPOINTS = 7
};

/* 16 blocks between the steps of their quantisation. In the profile's own rounding a number |x| has a code
 * below a midpoint where |x| / divisor < unit * midpoint, or equals it and the tie goes down. */
typedef struct word_group {
    vfloat largest, d, divisor, unit;
    __m512 quarter; /* 4 / D */
    __m512i number[MIDPOINTS];
    unsigned found; /* of `number` */
    __mmask16 kept; /* blocks whose codes are not all 0 */
    bool within_table;
} word_group;

/* Largest magnitudes of the group's blocks, as f32. */
INLINE vfloat word_maxima(const __m512i x[WORD_VECTORS])
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i m[WORD_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < WORD_VECTORS; i++) m[i] = _mm512_and_si512(x[i], magnitude);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        m[i] = _mm512_max_epu16(_mm512_unpacklo_epi16(m[2 * i], m[2 * i + 1]),
                                _mm512_unpackhi_epi16(m[2 * i], m[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        m[i] = _mm512_max_epu16(_mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]),
                                _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]));
    /* Word i of a 128-bit lane is now the maximum of that lane of x[i]; a block is two lanes. */
    const __m512i lanes =
        _mm512_max_epu16(_mm512_unpacklo_epi64(m[0], m[1]), _mm512_unpackhi_epi64(m[0], m[1]));
    const __m512i blocks = _mm512_max_epu16(lanes, _mm512_shuffle_i64x2(lanes, lanes, 0xb1));
    const __m512i order = _mm512_set_epi16(23, 0, 7, 0, 22, 0, 6, 0, 21, 0, 5, 0, 20, 0, 4, 0, 19, 0, 3, 0,
                                           18, 0, 2, 0, 17, 0, 1, 0, 16, 0, 0, 0);
    return (vfloat)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, order, blocks);
}

/* a / 6, rounded to nearest: one correction does for every f32 number that is not subnormal. */
INLINE vfloat sixth_of(vfloat a)
{
    const vfloat sixth = v_splat(1.0f / 6.0f), q = a * sixth;
    return v_fma(v_fma(q, v_splat(-6.0f), a), sixth, q);
}

/* Returns the bytes of the scales. */
INLINE vint word_scales(const quantise_rule *rule, word_group *g)
{
    vint bytes;
    if (rule->profile == QUANTISE_PROFILE_RNE) {
        const vfloat a = g->largest / rule->global;
        g->kept = _mm512_cmp_ps_mask(a, _mm512_set1_ps(6 * 0x1p-9f), _CMP_GE_OQ);
        bytes = (vint)_mm512_maskz_mov_epi32(g->kept, (__m512i)saturated_e4m3(sixth_of(a)));
        g->unit = e4m3_value(bytes);
        g->d = g->unit * rule->global;
        g->divisor = v_splat(rule->global);
        return bytes;
    }
    const bool modelopt = rule->profile == QUANTISE_PROFILE_MODELOPT;
    bytes = modelopt ? modelopt_scale(rule, g->largest) : compressed_scale(rule, g->largest);
    g->d = modelopt ? e4m3_value(bytes) * rule->global : e4m3_value(bytes) / rule->global;
    g->kept = modelopt ? _mm512_cmp_ps_mask(g->d, _mm512_setzero_ps(), _CMP_NEQ_UQ) : 0xffff;
    g->unit = v_splat(1.0f);
    g->divisor = g->d;
    return bytes;
}

/* 4 / D, by up to 2^-20 too large, or too small in the blocks of `small`; 0 where all codes are 0. One step
 * of Newton's doubles the 14 bits. */
INLINE __m512 quarter_of(const word_group *g, __mmask16 small)
{
    const __m512 four = _mm512_mask_mov_ps(_mm512_set1_ps(4 + 0x1p-19f), small, _mm512_set1_ps(4 - 0x1p-19f));
    const __m512 first = _mm512_maskz_rcp14_ps(g->kept, g->d);
    const __m512 rest = _mm512_fnmadd_ps(first, g->d, _mm512_set1_ps(2));
    return _mm512_mul_ps(_mm512_mul_ps(first, four), rest);
}

enum { QUARTERS = 31 /* the largest |4 x / D| that the table of codes surely holds */ };

/* Whether the look-up holds for all blocks: no inverse is subnormal, no quotient of a bf16 number is 0, and
 * none reaches the end of the table. */
INLINE bool within_table(const word_group *g)
{
    __mmask16 within = _mm512_cmp_ps_mask(g->d, _mm512_set1_ps(0x1p-100f), _CMP_GT_OQ);
    within &= _mm512_cmp_ps_mask(g->d, _mm512_set1_ps(0x1p15f), _CMP_LT_OQ);
    within &= _mm512_cmp_ps_mask(_mm512_mul_ps(g->largest, g->quarter), _mm512_set1_ps(QUARTERS), _CMP_LT_OQ);
    return (within | (__mmask16)~g->kept) == 0xffff;
}

/* The four mantissas of midpoints; whether a tie goes to the code below; how many midpoints have it, two
 * codes and an exponent apart; of the lowest, the code below and the exponent in bf16 bits. */
static const struct {
    float mantissa;
    bool tie_below;
    int count, code, exponent;
} mantissas[4] = {
    {1, true, 1, 0, -256}, {1.5f, false, 1, 1, -128}, {1.25f, true, 3, 2, 0}, {1.75f, false, 2, 3, 0}};

/* By mantissa: the bf16 number near the midpoints, the blocks that may hold it, and those of them where it
 * has the code below. */
typedef struct near_numbers {
    __m512i word[4];
    __mmask16 near[4], below[4];
} near_numbers;

/* Where a number's quotient by the divisor, rounded to nearest, is at most the limit, or below it, by the
 * mantissa's rule: more than half a unit off it, because the limit has few bits and ties go to it. The
 * distance is exact, as the number is near. */
INLINE __mmask16 quotient_below(const word_group *g, __mmask16 among, __m512 number, const int mantissa)
{
    const __m512 limit = g->unit * mantissas[mantissa].mantissa,
                 distance = _mm512_fnmadd_ps(limit, g->divisor, number);
    const __m512 power =
        _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(limit), _mm512_set1_epi32(0x7f800000)));
    const __m512 half_unit = (power * 0x1p-24f) * g->divisor; /* normal within the table */
    return mantissas[mantissa].tie_below ? _mm512_mask_cmp_ps_mask(among, distance, half_unit, _CMP_LE_OQ)
                                         : _mm512_mask_cmp_ps_mask(among, distance, -half_unit, _CMP_LT_OQ);
}

INLINE void find_near(const word_group *g, near_numbers *n)
{
    __m512i middle[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        middle[i] = (__m512i)(g->d * mantissas[i].mantissa);
        n->near[i] =
            _mm512_mask_testn_epi32_mask(g->kept, _mm512_add_epi32(middle[i], _mm512_set1_epi32(NEAR)),
                                         _mm512_set1_epi32(0x10000 - 2 * NEAR));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        n->below[i] = 0;
        n->word[i] = _mm512_setzero_si512();
        if (n->near[i] == 0) continue;
        n->word[i] = _mm512_and_si512(_mm512_add_epi32(middle[i], _mm512_set1_epi32(0x8000)),
                                      _mm512_set1_epi32((int)0xffff0000));
        n->below[i] = quotient_below(g, n->near[i], _mm512_castsi512_ps(n->word[i]), i);
    }
}

/* For each midpoint, by index: the bf16 number, twice in a word, that is near it and has the code below it;
 * all bits set where a block has none. Returns the set of midpoints of which some block has one. */
INLINE unsigned numbers_below(word_group *g, const near_numbers *n)
{
    const __m512i none = _mm512_set1_epi32(-1);
    unsigned found = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i twice = _mm512_or_si512(n->word[i], _mm512_srli_epi32(n->word[i], 16));
#pragma GCC unroll 3
        for (int m = 0; m < mantissas[i].count; m++) {
            const int midpoint = mantissas[i].code + 2 * m;
            const __m512i exponent = _mm512_set1_epi16((short)(mantissas[i].exponent + 128 * m));
            g->number[midpoint] = _mm512_mask_mov_epi32(none, n->below[i], _mm512_add_epi16(twice, exponent));
            found |= (unsigned)(n->below[i] != 0) << midpoint;
        }
    }
    return found;
}

/* Sets what brings the numbers near midpoints to their side: an inverse that is a little too small where a
 * block's are all below, and `number` where some block has one on either side. */
INLINE void place_near(word_group *g)
{
    near_numbers n;
    __mmask16 below = 0, above = 0;
    find_near(g, &n);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        below |= n.below[i];
        above |= n.near[i] & (__mmask16)~n.below[i];
    }
    g->found = 0;
    if ((below & above) != 0) {
        g->found = numbers_below(g, &n);
        below = 0;
    }
    g->quarter = quarter_of(g, below);
}

/* Codes with their signs by floor(4 x / D) + 32. */
#define MINUS                                                                                                \
    15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 14, 14, 14, 14, 14, 14, 13, 13, 13, 13, 12, 12, 12, 11,  \
        11, 10, 10, 9, 9, 8
#define PLUS 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7
static const int16_t quarters[64] = {MINUS, PLUS};
/* Codes in 16-bit words: of `low` in the low ones, of `high` in the high ones. low_quarter, high_quarter: 4 /
 * D of each. The sums round towards 0, which is down. */
INLINE __m512i word_codes(__m512 low, __m512 low_quarter, __m512 high, __m512 high_quarter)
{
    enum { TO_ZERO = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC, SELECT = 0xca /* a ? b : c */ };
    const __m512 low_sum = _mm512_fmadd_round_ps(low, low_quarter, _mm512_set1_ps(0x1p23f + 32), TO_ZERO),
                 high_sum = _mm512_fmadd_round_ps(high, high_quarter, _mm512_set1_ps(0x1p7f + 32), TO_ZERO);
    const __m512i index =
        _mm512_ternarylogic_epi32(_mm512_set1_epi32((int)0xffff0000), _mm512_castps_si512(high_sum),
                                  _mm512_castps_si512(low_sum), SELECT);
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(quarters), index, _mm512_loadu_si512(quarters + 32));
}

/* The bytes of 128 codes, two a byte. */
INLINE void store_words(const __m512i code[4], uint8_t *to)
{
    const __m512i weights = _mm512_set1_epi16(0x1001);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i low = _mm512_maddubs_epi16(_mm512_packus_epi16(code[0], code[1]), weights),
                  high = _mm512_maddubs_epi16(_mm512_packus_epi16(code[2], code[3]), weights);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
}

/* By vector, the lane of the block of each pair of columns. */
#define EIGHT(n) n, n, n, n, n, n, n, n
static const int32_t block_lanes[WORD_VECTORS][16] = {
    {EIGHT(0), EIGHT(1)}, {EIGHT(2), EIGHT(3)},   {EIGHT(4), EIGHT(5)},   {EIGHT(6), EIGHT(7)},
    {EIGHT(8), EIGHT(9)}, {EIGHT(10), EIGHT(11)}, {EIGHT(12), EIGHT(13)}, {EIGHT(14), EIGHT(15)}};

/* Each of the three steps is a long chain of instructions, so it runs for several groups, which overlap. */
INLINE void scale_group(const quantise_rule *rule, const uint16_t *from, word_group *g, uint8_t *scales)
{
    __m512i x[WORD_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < WORD_VECTORS; i++) x[i] = _mm512_loadu_si512(from + 32 * i);
    g->largest = word_maxima(x);
    v_store_bytes(scales, word_scales(rule, g));
}

INLINE void invert_group(word_group *g)
{
    place_near(g);
    g->within_table = within_table(g);
}

/* Requests lines that are to be read: codes are made from L1, and memory would wait for them. Those far ahead
 * go to L2, because L1 waits for too few lines at once to keep memory busy. */
INLINE void request_words(const uint16_t *from, const int count)
{
#pragma GCC unroll 16
    for (int i = 0; i < count; i += 32) {
        __builtin_prefetch(from + i);
        __builtin_prefetch(from + FAR_AHEAD + i, 0, 2);
    }
}

INLINE __m512i magnitudes_of(const uint16_t *from)
{
    return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi16(0x7fff));
}

/* Codes of 32 values of two blocks. */
INLINE __m512i vector_codes(const word_group *g, const uint16_t *from, const int i)
{
    const __m512i x = _mm512_loadu_si512(from + 32 * i);
    const __m512 quarter = _mm512_permutexvar_ps(_mm512_loadu_si512(block_lanes[i]), g->quarter),
                 even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                 odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
    return word_codes(even, quarter, odd, quarter);
}

INLINE void code_group(const word_group *g, const uint16_t *from, uint8_t *codes)
{
    enum { AND_OR = 0xea /* (a & b) | c */ };
    __m512i code[WORD_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < WORD_VECTORS; i++) code[i] = vector_codes(g, from, i);
    for (unsigned found = g->found; found != 0; found &= found - 1) {
        const int midpoint = __builtin_ctz(found);
        const __m512i numbers = g->number[midpoint], sign = _mm512_set1_epi16(8);
        __m512i below = _mm512_set1_epi16((short)midpoint);
        __asm__("" : "+v"(below)); /* else the compiler broadcasts it for each vector */
#pragma GCC unroll 8
        for (int i = 0; i < WORD_VECTORS; i++) {
            const __m512i number = _mm512_permutexvar_epi32(_mm512_loadu_si512(block_lanes[i]), numbers);
            const __mmask32 same = _mm512_cmpeq_epi16_mask(magnitudes_of(from + 32 * i), number);
            const __m512i lower = _mm512_ternarylogic_epi32(code[i], sign, below, AND_OR);
            code[i] = _mm512_mask_mov_epi16(code[i], same, lower);
        }
    }
    store_words(code, codes);
    store_words(code + 4, codes + 64);
    for (unsigned none = (uint16_t)~g->kept; none != 0; none &= none - 1)
        memset(codes + 8 * __builtin_ctz(none), 0, 8);
}

/* The rules that this file has: codes to nearest, scales by the profile. */
INLINE bool has_words(const quantise_rule *rule)
{
    return rule->scales == QUANTISE_SCALES_RNE && rule->profile != QUANTISE_PROFILE_HALFSTEP;
}

#endif
