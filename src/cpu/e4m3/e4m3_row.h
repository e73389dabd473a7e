/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * e4m3_row.h - one row times rows of e4m3 codes, whose values are neither stored nor read again. The sums are
 * those of a panel (e4m3_panels.h), in its order.
 */
#ifndef QUERN_CPU_E4M3_ROW_H
#define QUERN_CPU_E4M3_ROW_H

#include "cpu/e4m3/e4m3_panels.h"

enum { ROW_AHEAD = 1024, ROW_LINE = 64 };

/* What is read later, row after row, as memory likes it: two lines a call. */
typedef struct row_requests {
    const uint8_t *row;
    int64_t at, bytes, stride;
} row_requests;

INLINE void request_lines(row_requests *r)
{
    __builtin_prefetch(r->row + r->at, 0, 2);
    __builtin_prefetch(r->row + r->at + ROW_LINE, 0, 2);
    r->at += 2 * ROW_LINE;
    if (r->at < r->bytes) return;
    r->at = 0;
    r->row += r->stride;
}

#if defined(__AVX512BF16__)
enum {
    ROW_STRIPS = 4,
    ROW_COLUMNS = ROW_STRIPS * LANES,
    ROW_CODES = 2 * PANEL_CODES, /* two lines, which lie in two sets of L1 where rows are 4096 bytes apart */
    PIECE = 16
};

/* ROW_CODES of each row in pieces, of which four rows' make a vector. */
typedef __m128i row_pieces[ROW_CODES / PIECE][ROW_COLUMNS];

/* The pieces of a row, of which `left` codes exist; 0 past them. They are all there with `whole`. */
INLINE void copy_row(const bool whole, const uint8_t *at, int64_t left, int64_t row, row_pieces to)
{
#pragma GCC unroll 8
    for (int p = 0; p < ROW_CODES / PIECE; p++, at += PIECE) {
        const int64_t n = left - p * PIECE;
        const __mmask16 kept = (__mmask16)(n >= PIECE ? 0xffff : n > 0 ? (1 << n) - 1 : 0);
        to[p][row] =
            whole ? _mm_loadu_si128((const __m128i *)(const void *)at) : _mm_maskz_loadu_epi8(kept, at);
    }
}

/* How the pieces of 16 rows become words: half[h] takes codes 8 h ... 8 h + 7 of eight rows, pairs[x] pairs
 * 2 x of 16 rows' eight, and in the upper half of a lane of 16 bytes pairs 2 x + 1. */
typedef struct row_decoder {
    bf16_bytes bytes;
    __m512i half[2], pairs[2], sign;
} row_decoder;

INLINE row_decoder make_row_decoder(void)
{
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14),
                  eight = _mm512_broadcast_i64x4(
                      _mm256_setr_epi16(0, 4, 8, 12, 1, 5, 9, 13, 16, 20, 24, 28, 17, 21, 25, 29)),
                  all = _mm512_mask_add_epi16(eight, 0xffff0000, eight, _mm512_set1_epi16(32));
    return (row_decoder){bytes_of_codes(),
                         {even, _mm512_add_epi64(even, _mm512_set1_epi64(1))},
                         {all, _mm512_add_epi16(all, _mm512_set1_epi16(2))},
                         _mm512_set1_epi8((char)0x80)};
}

/* Half h of a piece of 16 rows, as two vectors of eight rows. */
INLINE void load_half(const row_decoder *d, const __m128i *rows, int h, __m512i to[2])
{
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, rows += 8)
        to[i] = _mm512_permutex2var_epi64(_mm512_load_si512(rows), d->half[h], _mm512_load_si512(rows + 4));
}

/* Four codes of 16 columns times theirs of a, the last two of which may not exist. */
INLINE __m512 multiply_codes(const row_decoder *d, const __m512i rows[2], int x, const uint32_t *a, bool both,
                             __m512 sum)
{
    const bf16_bytes *bytes = &d->bytes;
    const __m512i code = _mm512_permutex2var_epi16(rows[0], d->pairs[x], rows[1]),
                  lower = _mm512_permutex2var_epi8(bytes->lower[0], code, bytes->lower[1]),
                  size = _mm512_permutex2var_epi8(bytes->upper[0], code, bytes->upper[1]),
                  upper = _mm512_ternarylogic_epi32(size, code, d->sign, 0xf8); /* a | (b & c) */
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a[0]),
                           (__m512bh)_mm512_unpacklo_epi8(lower, upper));
    return !both ? sum
                 : _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a[1]),
                                    (__m512bh)_mm512_unpackhi_epi8(lower, upper));
}

/* The end of a run. */
INLINE void add_scaled(const float *scale, float *c, bool accumulate, __m512 sum[ROW_STRIPS])
{
#pragma GCC unroll 4
    for (int s = 0; s < ROW_STRIPS; s++) {
        const __m512 by = _mm512_loadu_ps(scale + s * LANES);
        float *to = c + s * LANES;
        _mm512_storeu_ps(to, accumulate ? _mm512_fmadd_ps(sum[s], by, _mm512_loadu_ps(to))
                                        : _mm512_mul_ps(sum[s], by));
        sum[s] = _mm512_setzero_ps();
    }
}

/* One row of a times 64 columns. A sum waits for its last product, so four strips of columns take turns.
 * Codes are neither stored as values nor read again. While ROW_CODES of each row are multiplied the next are
 * copied, a row after the other: 64 loads at once, all of one set of L1, would leave the products waiting.
 * `whole`: rows, pieces and runs are. */
INLINE void row_product(const e4m3_rows r, const bool whole, int64_t run, const uint32_t *a,
                        const float *scales, float *c, bool accumulate)
{
    const row_decoder d = make_row_decoder();
    __m512 sum[ROW_STRIPS] = {{0}};
    row_pieces pieces[2];
    row_requests later = {r.codes + r.ahead, 0, r.depth, r.stride};
    int64_t left = run;
    for (int64_t row = 0; row < ROW_COLUMNS; row++)
        copy_row(whole, r.codes + row * r.stride, row < r.rows ? r.depth : 0, row, pieces[0]);
    for (int64_t k = 0; k < r.depth; k += ROW_CODES) {
        const int64_t next = k + ROW_CODES;
        const uint8_t *from = r.codes + next;
        int64_t row = 0;
        for (int i = 0; i < 2 * ROW_CODES / PIECE && (whole || k + PIECE / 2 * i < r.depth); i++) {
            __m512i rows[ROW_STRIPS][2];
#pragma GCC unroll 4
            for (int s = 0; s < ROW_STRIPS; s++)
                load_half(&d, &pieces[k / ROW_CODES % 2][i / 2][s * LANES], i % 2, rows[s]);
#pragma GCC unroll 2
            for (int x = 0; x < 2; x++) {
                const int64_t at = k + PIECE / 2 * i + 4 * x;
                if (!whole && at >= r.depth) break;
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++, row++, from += r.stride) {
                    request_lines(&later);
                    if (r.cold) {
                        __builtin_prefetch(from + ROW_AHEAD, 0, 2);
                        __builtin_prefetch(from + ROW_AHEAD + PANEL_CODES, 0, 2);
                    }
                    if (next < r.depth)
                        copy_row(whole, from, row < r.rows ? r.depth - next : 0, row,
                                 pieces[next / ROW_CODES % 2]);
                }
#pragma GCC unroll 4
                for (int s = 0; s < ROW_STRIPS; s++)
                    sum[s] = multiply_codes(&d, rows[s], x, a + at / 2, whole || at + 2 < r.depth, sum[s]);
                left -= 4;
                if (whole ? x == 0 || left > 0 : left > 0 && at + 4 < r.depth) continue;
                add_scaled(scales, c, accumulate, sum);
                scales += ROW_COLUMNS;
                accumulate = true;
                left = run;
            }
        }
    }
}

static void row_bf16(const e4m3_rows *r, int64_t run, const uint32_t *a, const float *scales, float *c,
                     bool accumulate)
{
    const bool whole = r->rows == ROW_COLUMNS && r->depth % ROW_CODES == 0 && run % PIECE == 0;
    if (whole) row_product(*r, true, run, a, scales, c, accumulate);
    else row_product(*r, false, run, a, scales, c, accumulate);
}

#elif defined(__FMA__) && !defined(__AVX512F__)
enum { PIECE = 16, PIECES = ROW_LINE / PIECE };

/* A line of codes of each of ROW_F32_COLUMNS rows. */
typedef uint8_t row_lines[ROW_F32_COLUMNS][ROW_LINE] __attribute__((aligned(ROW_LINE)));

/* Copies the lines at code k of `count` rows from `first` on; 0 for what does not exist. They all exist with
 * `whole`. */
INLINE void copy_lines(const e4m3_rows *r, const bool whole, int64_t k, int64_t first, int64_t count,
                       row_lines to)
{
    const int64_t left = r->depth - k < ROW_LINE ? r->depth - k : ROW_LINE;
    const uint8_t *at = r->codes + first * r->stride + k;
    for (int64_t row = first; row < first + count; row++, at += r->stride) {
        if (whole) {
            memcpy(to[row], at, ROW_LINE);
        } else {
            memset(to[row], 0, ROW_LINE);
            if (row < r->rows && left > 0) memcpy(to[row], at, (size_t)left);
        }
    }
}

/* Piece p of the lines, turned: vector i holds code i of rows 0 ... 15 in its low lane, and of the others in
 * its high lane. Returns whether one of them is NaN. */
INLINE bool turn_piece(const row_lines lines, int64_t p, __m256i v[PANEL_COLUMNS])
{
    const __m256i size = _mm256_set1_epi8(0x7f);
    __m256i most = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int i = 0; i < PANEL_COLUMNS; i++) {
        v[i] = _mm256_loadu2_m128i((const __m128i *)(lines[i + PANEL_COLUMNS] + p * PIECE),
                                   (const __m128i *)(lines[i] + p * PIECE));
        most = _mm256_max_epu8(most, _mm256_and_si256(v[i], size));
    }
    turn_codes(v);
    const __m256i nan = _mm256_cmpeq_epi8(most, size);
    return !_mm256_testz_si256(nan, nan);
}

enum { ROW_STRIPS = ROW_F32_COLUMNS / LANES };

/* sum += a code of each column, in the high bytes of words, times a. */
INLINE void multiply_words(__m256i words, __m256 a, vfloat *low, vfloat *high)
{
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16((short)0xbf80));
    const __m256 bias = _mm256_set1_ps(256.0f);
    *low = v_fma(a, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), bias), *low);
    *high = v_fma(a, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), bias), *high);
}

/* Up to 16 codes of each column times theirs of a. */
INLINE void multiply_piece(const __m256i v[PANEL_COLUMNS], const float *a, int64_t n, vfloat sum[ROW_STRIPS])
{
#pragma GCC unroll 16
    for (int i = 0; i < PANEL_COLUMNS; i++) {
        if (i >= n) break;
        const __m256 by = _mm256_broadcast_ss(a + i);
        multiply_words(_mm256_unpacklo_epi8(_mm256_setzero_si256(), v[i]), by, &sum[0], &sum[2]);
        multiply_words(_mm256_unpackhi_epi8(_mm256_setzero_si256(), v[i]), by, &sum[1], &sum[3]);
    }
}

/* The same where a code is NaN. */
static __attribute__((noinline)) void multiply_any(const __m256i v[PANEL_COLUMNS], const float *a, int64_t n,
                                                   float sum[ROW_F32_COLUMNS])
{
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < ROW_F32_COLUMNS; j++)
            sum[j] = fmaf(a[i], value_of(((const uint8_t *)&v[i])[j]), sum[j]);
}

/* The end of a run. */
INLINE void add_scaled(const float *scale, float *c, bool accumulate, vfloat sum[ROW_STRIPS])
{
#pragma GCC unroll 4
    for (int s = 0; s < ROW_STRIPS; s++, scale += LANES, c += LANES) {
        v_store(c, accumulate ? v_fma(sum[s], v_load(scale), v_load(c)) : sum[s] * v_load(scale));
        sum[s] = (vfloat){0};
    }
}

/* Codes are neither stored as values nor read again. Lines are copied while those before are multiplied,
 * because 32 lines 4096 bytes apart share a set of L1, which holds fewer. */
INLINE void row_product(const e4m3_rows *r, const bool whole, int64_t run, const float *a,
                        const float *scales, float *c, bool accumulate)
{
    enum { SHARE = ROW_F32_COLUMNS / PIECES }; /* rows copied, and lines requested, a piece */
    vfloat sum[ROW_STRIPS] = {{0}};
    row_lines lines[2];
    row_requests later = {r->codes + r->ahead, 0, r->depth, r->stride};
    int64_t left = run;
    copy_lines(r, whole, 0, 0, ROW_F32_COLUMNS, lines[0]);
    for (int64_t k = 0; k < r->depth; k += PIECE) {
        const int64_t n = whole || r->depth - k > PIECE ? PIECE : r->depth - k, line = k / ROW_LINE,
                      next = (line + 1) * ROW_LINE, p = k / PIECE % PIECES;
        __m256i v[PANEL_COLUMNS];
        for (int i = 0; i < SHARE / 2 && r->ahead != 0; i++) request_lines(&later);
        for (int64_t row = p * SHARE; r->cold && row < (p + 1) * SHARE && row < r->rows; row++)
            __builtin_prefetch(r->codes + row * r->stride + line * ROW_LINE + ROW_AHEAD, 0, 2);
        if (next < r->depth) copy_lines(r, whole, next, p * SHARE, SHARE, lines[(line + 1) % 2]);
        if (__builtin_expect(turn_piece(lines[line % 2], p, v), 0)) {
            float sums[ROW_F32_COLUMNS]; /* so that `sum` stays in registers */
            memcpy(sums, sum, sizeof sums);
            multiply_any(v, a + k, n, sums);
            memcpy(sum, sums, sizeof sums);
        } else if (n == PIECE) {
            multiply_piece(v, a + k, PIECE, sum);
        } else {
            multiply_piece(v, a + k, n, sum);
        }
        left -= n;
        if (left > 0 && k + n < r->depth) continue;
        add_scaled(scales, c, accumulate, sum);
        scales += ROW_F32_COLUMNS;
        accumulate = true;
        left = run;
    }
}

static void row_f32(const e4m3_rows *r, int64_t run, const float *a, const float *scales, float *c,
                    bool accumulate)
{
    if (r->rows == ROW_F32_COLUMNS && r->depth % ROW_LINE == 0)
        row_product(r, true, run, a, scales, c, accumulate);
    else row_product(r, false, run, a, scales, c, accumulate);
}

#elif !defined(__FMA__)
static void row_f32(const e4m3_rows *r, int64_t run, const float *a, const float *scales, float *c,
                    bool accumulate)
{
    for (int64_t k = 0; k < r->depth; k += run, scales += ROW_F32_COLUMNS, accumulate = true) {
        float sum[ROW_F32_COLUMNS] = {0};
        for (int64_t i = k; i < k + run && i < r->depth; i++) {
            float values[ROW_F32_COLUMNS];
            for (int64_t j = 0; j < ROW_F32_COLUMNS; j++)
                values[j] = value_of(j < r->rows ? r->codes[j * r->stride + i] : 0);
            for (int64_t j = 0; j < ROW_F32_COLUMNS; j++) sum[j] += a[i] * values[j];
        }
        for (int64_t j = 0; j < ROW_F32_COLUMNS; j++)
            c[j] = accumulate ? c[j] + sum[j] * scales[j] : sum[j] * scales[j];
    }
}
#endif

#endif
