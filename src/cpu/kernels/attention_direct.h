/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_direct.h - products of a few query rows with bf16 keys and values in place, row by row. Decoding
 * uses them: so few queries read a key that packing it would take longer than its products.
 *
 * Scores: 4 queries by 4 keys. Where a query row is 64 or 128 values, four rows stay in 8 or 16 registers.
 * A key then takes 4 loads and 16 dot products at D = 128, and a tree within and across 128-bit lanes takes 7
 * shuffles and 4 additions. Values: two neighbouring rows interleaved in registers, so that a dot product
 * takes a pair of weights; 4 queries by 64 columns, 16 accumulators, and the interleaved order of columns is
 * undone once per call.
 *
 * Both prefetch at an even pace (line_walk.h). Values are taken in blocks of 16 rows, because a pass over all
 * rows for 64 columns would need every line of them in half the time and leave memory idle in the other half.
 * Lines are asked for in the order of their addresses: any other order reads a fifth slower. The hardware's
 * prefetchers fail where keys turn to values and where blocks end. Limit: the read bandwidth.
 */
#ifndef QUERN_CPU_ATTENTION_DIRECT_H
#define QUERN_CPU_ATTENTION_DIRECT_H

#include "cpu/kernels/line_walk.h"

enum {
    DIRECT_ROWS = 4,
    DIRECT_KEYS = 4,
    DIRECT_BLOCK = 16, /* keys that a group of rows takes in one go */
    HALVES = 2 * LANES,
    VALUE_BLOCK = 16 /* rows that one pass over 64 columns takes */
};

INLINE __m512bh load_halves(const uint16_t *p, __mmask32 kept)
{
    return (__m512bh)_mm512_maskz_loadu_epi16(kept, p);
}

/* The sums of four vectors within each 128-bit lane: lane l holds a's, b's, c's and d's of its four
 * values. */
INLINE __m512 lane_quads(__m512 a, __m512 b, __m512 c, __m512 d)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

/* The sums of the 128-bit lanes: lane l of the result is the sum of x[l]'s. */
INLINE __m512 sum_lanes(const __m512 x[DIRECT_KEYS])
{
    const __m512 a =
        _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    const __m512 b =
        _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Stores s[r][0 .. 4) from sums of [key][row]. */
INLINE void store_scores(const int rows, const __m512 quads[DIRECT_KEYS], float *s, int64_t lds)
{
    const __m512i turned = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 sums = _mm512_permutexvar_ps(turned, sum_lanes(quads));
    _mm_storeu_ps(s, _mm512_castps512_ps128(sums));
    if (rows > 1) _mm_storeu_ps(s + lds, _mm512_extractf32x4_ps(sums, 1));
    if (rows > 2) _mm_storeu_ps(s + 2 * lds, _mm512_extractf32x4_ps(sums, 2));
    if (rows > 3) _mm_storeu_ps(s + 3 * lds, _mm512_extractf32x4_ps(sums, 3));
}

/* Key i of a group. Past the last one it is the last one again: nobody reads its scores. */
INLINE const uint16_t *key_at(const row_source *src, int64_t key)
{
    return (const uint16_t *)src->data + (key < src->rows ? key : src->rows - 1) * src->stride;
}

/* A group of query rows and the keys [first, end) that it takes. */
typedef struct score_block {
    const uint16_t *q;
    int64_t ldq, first, end;
    float *s;
    int64_t lds;
} score_block;

/* Rows of `vectors` whole vectors. */
INLINE void score_whole(const int rows, const int vectors, const score_block *b, const row_source *src,
                        line_walk *walk)
{
    __m512bh q[DIRECT_ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            q[r][v] = (__m512bh)_mm512_loadu_si512(b->q + r * b->ldq + v * HALVES);
    for (int64_t key = b->first; key < b->end; key += DIRECT_KEYS) {
        __m512 quads[DIRECT_KEYS];
#pragma GCC unroll 4
        for (int i = 0; i < DIRECT_KEYS; i++) {
            const uint16_t *k = key_at(src, key + i);
            __m512 acc[DIRECT_ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < DIRECT_ROWS; r++) acc[r] = _mm512_setzero_ps();
            if (walk != NULL && i < vectors) prefetch_unit(walk);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                const __m512bh kv = (__m512bh)_mm512_loadu_si512(k + v * HALVES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) acc[r] = _mm512_dpbf16_ps(acc[r], q[r][v], kv);
            }
            quads[i] = lane_quads(acc[0], acc[1], acc[2], acc[3]);
        }
        store_scores(rows, quads, b->s + key, b->lds);
    }
}

/* acc[i][r] += the products of 32 elements, or of those in the mask `kept`. */
INLINE void score_step(const int rows, const uint16_t *q, int64_t ldq, const uint16_t *const k[DIRECT_KEYS],
                       int64_t d, __mmask32 kept, __m512 acc[DIRECT_KEYS][DIRECT_ROWS])
{
    __m512bh kv[DIRECT_KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < DIRECT_KEYS; i++) kv[i] = load_halves(k[i] + d, kept);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const __m512bh qv = load_halves(q + r * ldq + d, kept);
#pragma GCC unroll 4
        for (int i = 0; i < DIRECT_KEYS; i++) acc[i][r] = _mm512_dpbf16_ps(acc[i][r], qv, kv[i]);
    }
}

/* Rows of any length. */
INLINE void score_any(const int rows, const score_block *b, const row_source *src, line_walk *walk)
{
    for (int64_t key = b->first; key < b->end; key += DIRECT_KEYS) {
        __m512 acc[DIRECT_KEYS][DIRECT_ROWS], quads[DIRECT_KEYS];
        const uint16_t *k[DIRECT_KEYS];
#pragma GCC unroll 4
        for (int i = 0; i < DIRECT_KEYS; i++) {
            k[i] = key_at(src, key + i);
#pragma GCC unroll 4
            for (int r = 0; r < DIRECT_ROWS; r++) acc[i][r] = _mm512_setzero_ps();
        }
        for (int64_t d = 0; d < src->dim; d += HALVES) {
            const int64_t left = src->dim - d;
            if (walk != NULL) prefetch_unit(walk);
            score_step(rows, b->q, b->ldq, k, d, left >= HALVES ? 0xffffffffu : (1u << left) - 1u, acc);
        }
#pragma GCC unroll 4
        for (int i = 0; i < DIRECT_KEYS; i++)
            quads[i] = lane_quads(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
        store_scores(rows, quads, b->s + key, b->lds);
    }
}

INLINE void score_group(const int rows, const score_block *b, const row_source *src, line_walk *walk)
{
    if (src->dim == 4 * HALVES) score_whole(rows, 4, b, src, walk);
    else if (src->dim == 2 * HALVES) score_whole(rows, 2, b, src, walk);
    else score_any(rows, b, src, walk);
}

static void score_rows_bf16(int64_t m, const void *q, int64_t ldq, const row_source *keys, read_ahead ahead,
                            float *s, int64_t lds)
{
    line_walk walk = walk_over(keys, sizeof(uint16_t), ahead);
    for (int64_t first = 0; first < keys->rows; first += DIRECT_BLOCK) {
        const int64_t end = first + DIRECT_BLOCK < keys->rows ? first + DIRECT_BLOCK : keys->rows;
        for (int64_t r = 0; r < m; r += DIRECT_ROWS) {
            const score_block b = {(const uint16_t *)q + r * ldq, ldq, first, end, s + r * lds, lds};
            line_walk *asks = r == 0 ? &walk : NULL;
            switch (m - r) {
            case 1: score_group(1, &b, keys, asks); break;
            case 2: score_group(2, &b, keys, asks); break;
            case 3: score_group(3, &b, keys, asks); break;
            default: score_group(4, &b, keys, asks); break;
            }
        }
    }
}

/* Accumulators of up to 4 rows by 64 columns, in the interleaved order. */
typedef struct value_sums {
    __m512 v[DIRECT_ROWS][2][2];
} value_sums;

/* Adds rows [first, end) times their weights, columns [c, c + 32 groups). */
INLINE void value_pass(const int rows, const int groups, const uint32_t *p, int64_t ldp,
                       const row_source *src, int64_t c, int64_t first, int64_t end, line_walk *walk,
                       value_sums *sums)
{
    __mmask32 kept[2];
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
        const int64_t left = src->dim - c - g * HALVES;
        kept[g] = left >= HALVES ? 0xffffffffu : (1u << left) - 1u;
    }
    const uint16_t *even = (const uint16_t *)src->data + first * src->stride + c;
    for (int64_t i = first; i < end; i += 2, even += 2 * src->stride) {
        const bool both = i + 1 < end;
        if (walk != NULL) prefetch_unit(walk);
        __m512bh low[2], high[2];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            const __m512i a = (__m512i)load_halves(even + g * HALVES, kept[g]);
            const __m512i b = both ? (__m512i)load_halves(even + src->stride + g * HALVES, kept[g])
                                   : _mm512_setzero_si512();
            low[g] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            high[g] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const __m512bh weights = (__m512bh)_mm512_set1_epi32((int32_t)p[r * ldp + i / 2]);
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) {
                sums->v[r][g][0] = _mm512_dpbf16_ps(sums->v[r][g][0], weights, low[g]);
                sums->v[r][g][1] = _mm512_dpbf16_ps(sums->v[r][g][1], weights, high[g]);
            }
        }
    }
}

/* What a call of up to 4 rows adds. */
typedef struct value_call {
    const uint32_t *p;
    int64_t ldp;
    const row_source *src;
    float *o;
    int64_t ldo, width;
    bool accumulate;
} value_call;

/* Stores or adds columns [c, c + 32 groups) in their own order. */
INLINE void store_values(const int rows, const int groups, const value_call *v, int64_t c,
                         const value_sums *sums)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            float *to = v->o + r * v->ldo + c + g * HALVES;
            __m512 columns[] = {_mm512_permutex2var_ps(sums->v[r][g][0], first, sums->v[r][g][1]),
                                _mm512_permutex2var_ps(sums->v[r][g][0], second, sums->v[r][g][1])};
            for (int h = 0; h < 2 && c + g * HALVES + h * LANES < v->width; h++, to += LANES) {
                if (v->accumulate) columns[h] = _mm512_add_ps(columns[h], _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, columns[h]);
            }
        }
}

/* One pass: its sums begin with the first block, wait in `kept` between blocks, and are stored by the
 * last. */
INLINE void value_columns(const int rows, const int groups, const value_call *v, int64_t c, int64_t first,
                          line_walk *walk, value_sums *kept)
{
    const int64_t end = first + VALUE_BLOCK < v->src->rows ? first + VALUE_BLOCK : v->src->rows;
    value_sums sums;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sums.v[r][g][h] = first > 0 ? kept->v[r][g][h] : _mm512_setzero_ps();
    value_pass(rows, groups, v->p, v->ldp, v->src, c, first, end, walk, &sums);
    if (end == v->src->rows) {
        store_values(rows, groups, v, c, &sums);
        return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) kept->v[r][g][h] = sums.v[r][g][h];
}

INLINE void value_rows(const int rows, const value_call *v, line_walk *walk)
{
    value_sums kept[MAX_DIM / (2 * HALVES)];
    for (int64_t first = 0; first == 0 || first < v->src->rows; first += VALUE_BLOCK)
        for (int64_t c = 0; c < v->src->dim; c += 2 * HALVES) {
            if (v->src->dim - c > HALVES) value_columns(rows, 2, v, c, first, walk, &kept[c / (2 * HALVES)]);
            else value_columns(rows, 1, v, c, first, walk, &kept[c / (2 * HALVES)]);
        }
}

static void add_values_bf16(int64_t m, const void *p, int64_t ldp, const row_source *values, read_ahead ahead,
                            float *o, int64_t ldo, bool accumulate)
{
    const int64_t width = (values->dim + LANES - 1) / LANES * LANES;
    line_walk walk = walk_over(values, sizeof(uint16_t), ahead);
    for (int64_t r = 0; r < m; r += DIRECT_ROWS) {
        const value_call v = {
            (const uint32_t *)p + r * ldp, ldp, values, o + r * ldo, ldo, width, accumulate};
        line_walk *asks = r == 0 ? &walk : NULL;
        switch (m - r) {
        case 1: value_rows(1, &v, asks); break;
        case 2: value_rows(2, &v, asks); break;
        case 3: value_rows(3, &v, asks); break;
        default: value_rows(4, &v, asks); break;
        }
    }
}

#endif
