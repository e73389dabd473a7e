/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_direct.h - products of a few query rows with bf16 keys and values in place, row by row. Decoding
 * uses them: so few queries read a key that packing it would take longer than its products.
 *
 * Scores: 4 queries by 4 keys, 16 accumulators over the dimension, then one tree that turns them into 16
 * sums. At D = 128 a key takes 16 dot products, 8 loads and 12 instructions of the tree. Values: two
 * neighbouring rows interleaved in registers, so that a dot product takes a pair of weights; 4 queries by 64
 * columns, 16 accumulators, and the interleaved order of columns is undone once per call. Both prefetch what
 * is read 8 KB later; past their last row that is `ahead`. The hardware's prefetchers fail where keys turn to
 * values and where blocks end. Limit: the read bandwidth; in L1 some 28 cycles for a key and value of 128.
 */
#ifndef QUERN_CPU_ATTENTION_DIRECT_H
#define QUERN_CPU_ATTENTION_DIRECT_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

enum { DIRECT_ROWS = 4, DIRECT_KEYS = 4, HALVES = 2 * LANES, DIRECT_AHEAD = 8192 };

INLINE __m512bh load_halves(const uint16_t *p, __mmask32 kept)
{
    return (__m512bh)_mm512_maskz_loadu_epi16(kept, p);
}

/* Prefetches what is read DIRECT_AHEAD bytes after rows [row, row + n): first rows of the source, then
 * `ahead`. */
INLINE void prefetch_after(const row_source *src, int64_t row, int64_t n, const char *ahead)
{
    const int64_t bytes = 2 * src->stride, at = row * bytes + DIRECT_AHEAD, end = src->rows * bytes;
    const char *from = at < end ? (const char *)src->data + at : ahead + (at - end);
    for (int64_t i = 0; i < n * bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

/* acc[r][i] += the products of 32 elements, or of those in the mask `kept`. */
INLINE void score_step(const int rows, const uint16_t *q, int64_t ldq, const uint16_t *const k[DIRECT_KEYS],
                       int64_t d, const bool whole, __mmask32 kept, __m512 acc[DIRECT_ROWS][DIRECT_KEYS])
{
    __m512bh kv[DIRECT_KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < DIRECT_KEYS; i++)
        kv[i] = whole ? (__m512bh)_mm512_loadu_si512(k[i] + d) : load_halves(k[i] + d, kept);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const __m512bh qv =
            whole ? (__m512bh)_mm512_loadu_si512(q + r * ldq + d) : load_halves(q + r * ldq + d, kept);
#pragma GCC unroll 4
        for (int i = 0; i < DIRECT_KEYS; i++) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], qv, kv[i]);
    }
}

/* s[r][0 .. 4) of up to 4 queries and 4 keys. */
INLINE void score_block(const int rows, const uint16_t *q, int64_t ldq, const row_source *src, int64_t key,
                        float *s, int64_t lds)
{
    __m512 acc[DIRECT_ROWS][DIRECT_KEYS];
    const uint16_t *k[DIRECT_KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < DIRECT_KEYS;
         i++) { /* past the last key, the last one again: nobody reads its scores */
        k[i] = (const uint16_t *)src->data + (key + i < src->rows ? key + i : src->rows - 1) * src->stride;
#pragma GCC unroll 4
        for (int r = 0; r < DIRECT_ROWS; r++) acc[r][i] = _mm512_setzero_ps();
    }
    const int64_t end = src->dim / HALVES * HALVES;
    for (int64_t d = 0; d < end; d += HALVES) score_step(rows, q, ldq, k, d, true, 0, acc);
    if (end < src->dim) score_step(rows, q, ldq, k, end, false, (1u << (src->dim - end)) - 1u, acc);
    vfloat flat[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) flat[i] = (vfloat)acc[i / DIRECT_KEYS][i % DIRECT_KEYS];
    const __m512 sums = (__m512)lane_sums(flat);
    _mm_storeu_ps(s, _mm512_castps512_ps128(sums));
    if (rows > 1) _mm_storeu_ps(s + lds, _mm512_extractf32x4_ps(sums, 1));
    if (rows > 2) _mm_storeu_ps(s + 2 * lds, _mm512_extractf32x4_ps(sums, 2));
    if (rows > 3) _mm_storeu_ps(s + 3 * lds, _mm512_extractf32x4_ps(sums, 3));
}

static void score_rows_bf16(int64_t m, const void *q, int64_t ldq, const row_source *keys, const void *ahead,
                            float *s, int64_t lds)
{
    for (int64_t key = 0; key < keys->rows; key += DIRECT_KEYS) {
        prefetch_after(keys, key, DIRECT_KEYS, ahead);
        for (int64_t r = 0; r < m; r += DIRECT_ROWS) {
            const uint16_t *rows = (const uint16_t *)q + r * ldq;
            float *to = s + r * lds + key;
            switch (m - r) {
            case 1: score_block(1, rows, ldq, keys, key, to, lds); break;
            case 2: score_block(2, rows, ldq, keys, key, to, lds); break;
            case 3: score_block(3, rows, ldq, keys, key, to, lds); break;
            default: score_block(4, rows, ldq, keys, key, to, lds); break;
            }
        }
    }
}

/* Columns [c, c + 32 groups) of up to 4 rows of o. */
INLINE void value_block(const int rows, const int groups, const uint32_t *p, int64_t ldp,
                        const row_source *src, int64_t c, const char *ahead, bool asks, float *o, int64_t ldo,
                        int64_t width, bool accumulate)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    __m512 acc[DIRECT_ROWS][2][2];
    __mmask32 kept[2];
#pragma GCC unroll 2
    for (int g = 0; g < groups; g++) {
        const int64_t left = src->dim - c - g * HALVES;
        kept[g] = left >= HALVES ? 0xffffffffu : (1u << left) - 1u;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) acc[r][g][0] = acc[r][g][1] = _mm512_setzero_ps();
    }
    const uint16_t *even = (const uint16_t *)src->data + c;
    for (int64_t i = 0; i < src->rows; i += 2, even += 2 * src->stride) {
        const bool both = i + 1 < src->rows;
        if (asks) prefetch_after(src, i, 2, ahead);
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
                acc[r][g][0] = _mm512_dpbf16_ps(acc[r][g][0], weights, low[g]);
                acc[r][g][1] = _mm512_dpbf16_ps(acc[r][g][1], weights, high[g]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            float *to = o + r * ldo + c + g * HALVES;
            __m512 columns[] = {_mm512_permutex2var_ps(acc[r][g][0], first, acc[r][g][1]),
                                _mm512_permutex2var_ps(acc[r][g][0], second, acc[r][g][1])};
            for (int h = 0; h < 2 && c + g * HALVES + h * LANES < width; h++, to += LANES) {
                if (accumulate) columns[h] = _mm512_add_ps(columns[h], _mm512_loadu_ps(to));
                _mm512_storeu_ps(to, columns[h]);
            }
        }
}

INLINE void value_rows(const int rows, const uint32_t *p, int64_t ldp, const row_source *src,
                       const char *ahead, bool asks, float *o, int64_t ldo, int64_t width, bool accumulate)
{
    for (int64_t c = 0; c < src->dim; c += 2 * HALVES) {
        if (src->dim - c > HALVES)
            value_block(rows, 2, p, ldp, src, c, ahead, asks && c == 0, o, ldo, width, accumulate);
        else value_block(rows, 1, p, ldp, src, c, ahead, asks && c == 0, o, ldo, width, accumulate);
    }
}

static void add_values_bf16(int64_t m, const void *p, int64_t ldp, const row_source *values,
                            const void *ahead, float *o, int64_t ldo, bool accumulate)
{
    const int64_t width = (values->dim + LANES - 1) / LANES * LANES;
    for (int64_t r = 0; r < m; r += DIRECT_ROWS) {
        const uint32_t *weights = (const uint32_t *)p + r * ldp;
        float *to = o + r * ldo;
        switch (m - r) {
        case 1: value_rows(1, weights, ldp, values, ahead, r == 0, to, ldo, width, accumulate); break;
        case 2: value_rows(2, weights, ldp, values, ahead, r == 0, to, ldo, width, accumulate); break;
        case 3: value_rows(3, weights, ldp, values, ahead, r == 0, to, ldo, width, accumulate); break;
        default: value_rows(4, weights, ldp, values, ahead, r == 0, to, ldo, width, accumulate); break;
        }
    }
}

#endif
