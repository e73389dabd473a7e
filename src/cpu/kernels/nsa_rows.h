/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_rows.h - the row kernels of NSA's table, written once over the level's vectors and compiled by each
 * level's file under its own flags.
 *
 * All but add_probabilities, row_maxima and best_of stream: they touch each element of a [tokens][heads][dim]
 * tensor once, with one to three multiplications. Memory is the limit, so the code must keep enough loads in
 * flight. sum_rows walks 256 columns (16 registers of AVX-512) down the rows of a block, or 8 rows at a time
 * where rows are longer, which reads whole token rows in order where heads are neighbours. Outputs that
 * nobody reads soon use non-temporal stores, which run at twice the bandwidth because a cached store reads
 * the line first.
 *
 * add_probabilities costs an exp2 (six FMAs) a score beside the 2 D of the product before it, row_maxima a
 * load, a maximum and a compare a vector of scores. best_of keeps the `want` best keys sorted. That costs
 * mispredicted branches, so a bound first drops most scores: the want-th greatest of 16 columns' maxima,
 * below which no score is among the best. For 13 of 256 scores in random order about 25 pass it (16 (1/16 +
 * 1/15 + ... + 1/4)); the rest cost two compares a vector.
 */
#ifndef QUERN_CPU_NSA_ROWS_H
#define QUERN_CPU_NSA_ROWS_H

#include "cpu/kernels/nsa_kernels.h"
#include "cpu/kernels/vector_dtype.h"

enum { SUM_VECTORS = LANES == 16 ? 16 : 8, SPREAD_BYTES = 4096, COLUMNS = 16, SUM_ROWS = 8 };

/* Adds rows [first, end) to what the rows before left in out. */
INLINE void sum_columns(const row_source *s, const quern_dtype dtype, const int vectors, int64_t first,
                        int64_t end, int64_t column, float *out)
{
    vfloat acc[SUM_VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) acc[v] = first > 0 ? v_load(out + column + v * LANES) : (vfloat){0};
    const char *row = (const char *)s->data + (first * s->stride + column) * dtype_bytes(dtype);
    for (int64_t r = first; r < end; r++, row += s->stride * dtype_bytes(dtype))
#pragma GCC unroll 16
        for (int v = 0; v < vectors; v++) acc[v] += load_as(row, dtype, v * LANES);
#pragma GCC unroll 16
    for (int v = 0; v < vectors; v++) v_store(out + column + v * LANES, acc[v]);
}

INLINE void sum_rows_of(const row_source *s, const quern_dtype dtype, float *out)
{
    const int64_t whole = s->dim / LANES * LANES,
                  step = s->dim <= SUM_VECTORS * LANES || s->rows == 0 ? s->rows + 1 : SUM_ROWS;
    for (int64_t first = 0; first < s->rows || first == 0; first += step) {
        const int64_t end = first + step < s->rows ? first + step : s->rows;
        int64_t at = 0;
        for (; at + SUM_VECTORS * LANES <= s->dim; at += SUM_VECTORS * LANES)
            sum_columns(s, dtype, SUM_VECTORS, first, end, at, out);
        for (; at + 4 * LANES <= s->dim; at += 4 * LANES) sum_columns(s, dtype, 4, first, end, at, out);
        for (; at < whole; at += LANES) sum_columns(s, dtype, 1, first, end, at, out);
    }
    const int64_t c = whole;
    if (c == s->dim) return;
    vfloat acc = {0};
    for (int64_t r = 0; r < s->rows; r++)
        acc += load_tail((const char *)s->data + r * s->stride * dtype_bytes(dtype), dtype, c, s->dim);
    store_tail(out, QUERN_F32, c, s->dim, acc);
}

static void sum_rows(const row_source *s, float *out)
{
#define CALL(t) sum_rows_of(s, t, out)
    BY_DTYPE(s->dtype, CALL);
#undef CALL
}

INLINE void spread_row_of(const float *row, float scale, int64_t n, const quern_dtype dtype, char *dst,
                          int64_t stride, int64_t rows, bool stream)
{
    _Alignas(64) char piece[SPREAD_BYTES];
    const int64_t step = SPREAD_BYTES / dtype_bytes(dtype);
    for (int64_t first = 0; first < n; first += step) {
        const int64_t count = n - first < step ? n - first : step, bytes = count * dtype_bytes(dtype);
        for (int64_t c = 0; c < count; c += LANES)
            store_some(piece, dtype, c, count, load_some(row + first, QUERN_F32, c, count) * scale);
        char *to = dst + first * dtype_bytes(dtype);
        for (int64_t r = 0; r < rows; r++, to += stride * dtype_bytes(dtype)) {
            if (!stream) memcpy(to, piece, (size_t)bytes);
            else
                for (int64_t i = 0; i < bytes; i += 4 * LANES)
                    stream_as(to + i, QUERN_F32, 0, v_load((const float *)(const void *)(piece + i)));
        }
    }
}

static void spread_row(const float *row, float scale, int64_t n, quern_dtype dtype, void *dst, int64_t stride,
                       int64_t rows, bool stream)
{
#define CALL(t) spread_row_of(row, scale, n, t, dst, stride, rows, stream)
    BY_DTYPE(dtype, CALL);
#undef CALL
}

INLINE const void *row_after(const void *p, const quern_dtype dtype, int64_t elements)
{
    return (const char *)p + elements * dtype_bytes(dtype);
}

#include "cpu/kernels/gate_rows.h"

static void add_probabilities(const float *s, int64_t lds, int32_t rows, const int32_t *seen, int32_t columns,
                              float scale2, const float *lse2, float *acc)
{
    const vfloat scale = v_splat(scale2);
    for (int32_t c = 0; c < columns; c += LANES) {
        vfloat sum = v_load(acc + c);
        for (int32_t r = 0; r < rows; r++) {
            if (seen[r] <= c) continue;
            const vfloat p = v_exp2(v_fma(v_load(s + r * lds + c), scale, v_splat(-lse2[r])));
            sum += seen[r] >= c + LANES ? p : v_select(lanes_in(c, 0, seen[r]), p, (vfloat){0});
        }
        v_store(acc + c, sum);
    }
}

/* Whether a lane is NaN, which v_max() passes over. */
INLINE bool any_nan(vfloat v)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0;
#else
    return v_any(v_is_nan(v));
#endif
}

/* The maxima of a row's lanes; returns whether a score is NaN. */
INLINE bool lanes_of_row(const float *s, int32_t n, vfloat *maxima)
{
    vfloat most = v_splat(-INFINITY);
    bool nan = false;
    int32_t c = 0;
    for (; c + LANES <= n; c += LANES) {
        const vfloat v = v_load(s + c);
        nan |= any_nan(v);
        most = v_max(v, most);
    }
    if (c < n) {
        const vfloat v = v_load_first(s + c, n - c, v_splat(-INFINITY));
        nan |= any_nan(v);
        most = v_max(v, most);
    }
    *maxima = most;
    return nan;
}

static void row_maxima(const float *s, int64_t lds, int32_t rows, const int32_t *seen, int32_t columns,
                       float *best, int64_t ldb)
{
    for (int32_t first = 0; first < rows; first += LANES) {
        const int32_t n = rows - first < LANES ? rows - first : LANES;
        vfloat lanes[LANES];
        float maxima[LANES];
        uint32_t nan = 0;
        for (int32_t i = 0; i < n; i++) {
            const int32_t r = first + i, end = seen[r] < columns ? seen[r] : columns;
            nan |= (uint32_t)lanes_of_row(s + r * lds, end, &lanes[i]) << i;
        }
        v_store(maxima, lane_maxima(lanes, n));
        for (int32_t i = 0; i < n; i++) {
            float *most = best + (first + i) * ldb;
            if (nan >> i & 1) *most = NAN;
            else if (maxima[i] > *most) *most = maxima[i]; /* not where that is NaN */
        }
    }
}

/* ln x of positive normal numbers, within 2e-7 of max(|ln x|, |x - 1|); NaN where x is. x = m 2^e with m from
 * sqrt(1/2) to sqrt(2); ln m = 2 artanh((m - 1) / (m + 1)), whose series' fifth term is below 2e-9 there. */
INLINE vfloat v_log(vfloat x)
{
    const vint bits = (vint)x, e = (bits - 0x3f3504f3) >> 23;
    const vfloat m = (vfloat)(bits - (e << 23)), s = (m - 1.0f) / (m + 1.0f), z = s * s;
    vfloat p = v_fma(z, v_splat(1.0f / 9.0f), v_splat(1.0f / 7.0f));
    p = v_fma(p, z, v_splat(0.2f));
    p = v_fma(p, z, v_splat(1.0f / 3.0f));
    p = v_fma(p * z, s + s, s + s);
    const vfloat y = v_fma(__builtin_convertvector(e, vfloat), v_splat(0x1.62e43p-1f), p);
    return v_select(v_is_nan(x), x, y);
}

static void divergence(float *s, const float *teacher, int32_t lo, int32_t hi, int32_t columns, float scale,
                       float lse, float weight, float sums[2])
{
    const vfloat log2_e = v_splat(0x1.715476p+0f), none = {0};
    vfloat sum = none, total = none;
    for (int32_t c = 0; c < columns; c += LANES) {
        if (c + LANES <= lo || c >= hi) {
            v_store(s + c, none);
            continue;
        }
        const vint seen = lanes_in(c, lo, hi);
        const vfloat t = v_select(seen, v_load(teacher + c) * weight, none),
                     log_p = v_select(seen, v_fma(v_load(s + c), v_splat(scale), v_splat(-lse)), none),
                     log_t = v_log(v_select(t < 1e-10f, v_splat(1e-10f), t));
        sum += t * (log_t - log_p);
        total += t;
        v_store(s + c, v_select(seen, v_exp2(log_p * log2_e) - t, none));
    }
    sums[0] = sum_of(sum);
    sums[1] = sum_of(total);
}

/* A score's place in the order: greater is better; -0 equals 0; NaN last. */
INLINE uint32_t order_of(float score)
{
    uint32_t u;
    score += 0.0f;
    memcpy(&u, &score, sizeof u);
    if (score != score) return 0;
    return u >> 31 ? ~u : u | 0x80000000u;
}

INLINE void insert_best(uint64_t *best, int64_t *count, int64_t want, float score, int64_t index)
{
    const uint64_t key = (uint64_t)order_of(score) << 32 | (uint32_t) ~(uint32_t)index;
    int64_t i = *count;
    if (i == want) {
        if (key <= best[want - 1]) return;
        i--;
    } else {
        ++*count;
    }
    for (; i > 0 && best[i - 1] < key; i--) best[i] = best[i - 1];
    best[i] = key;
}

/* A bit for each lane whose score is at least `least`; 0 for NaN. */
INLINE uint32_t lanes_from(vfloat v, float least)
{
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(v, _mm512_set1_ps(least), _CMP_GE_OQ);
#elif defined(__FMA__)
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(least), _CMP_GE_OQ));
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(v[i] >= least) << i;
    return bits;
#endif
}

/* A score that at least `want` <= COLUMNS of scores[0 .. n) reach, or -inf. The scores are dealt to COLUMNS
 * columns; `want` columns reach the want-th greatest of the columns' maxima. NaN counts as absent. */
INLINE float reached_by(const float *scores, int64_t n, int64_t want)
{
    vfloat most[COLUMNS / LANES];
    float columns[COLUMNS], least = -INFINITY;
#pragma GCC unroll 4
    for (int k = 0; k < COLUMNS / LANES; k++) most[k] = v_splat(-INFINITY);
    for (int64_t i = 0; i + COLUMNS <= n; i += COLUMNS)
#pragma GCC unroll 4
        for (int k = 0; k < COLUMNS / LANES; k++) most[k] = v_max(v_load(scores + i + k * LANES), most[k]);
#pragma GCC unroll 4
    for (int k = 0; k < COLUMNS / LANES; k++) v_store(columns + k * LANES, most[k]);
    for (int i = 0; i < COLUMNS; i++) {
        int32_t reach = 0;
        for (int j = 0; j < COLUMNS; j++) reach += columns[j] >= columns[i];
        if (reach >= want && columns[i] > least) least = columns[i];
    }
    return least;
}

static int64_t best_of(const float *scores, int64_t from, int64_t to, int64_t want, uint64_t *best)
{
    int64_t count = 0, i = from;
    if (want <= 0) return 0;
    float least = want <= COLUMNS ? reached_by(scores + from, to - from, want) : -INFINITY;
    if (least == -INFINITY) /* any score may be among the best */
        for (; i < to && count < want; i++) insert_best(best, &count, want, scores[i], i);
    for (; i + LANES <= to; i += LANES) {
        if (count == want) {
            const float worst = scores[rank_index(best[want - 1])];
            if (worst != worst) break;
            if (worst > least) least = worst;
        }
        for (uint32_t lanes = lanes_from(v_load(scores + i), least); lanes != 0; lanes &= lanes - 1) {
            const int64_t index = i + __builtin_ctz(lanes);
            insert_best(best, &count, want, scores[index], index);
        }
    }
    for (; i < to; i++) insert_best(best, &count, want, scores[i], i);
    return count;
}

#define NSA_ROW_KERNELS                                                                                      \
    .sum_rows = sum_rows, .spread_row = spread_row, .gate_rows = gate_rows, .gate_backward = gate_backward,  \
    .gate_weight = gate_weight, .add_probabilities = add_probabilities, .row_maxima = row_maxima,            \
    .divergence = divergence, .best_of = best_of

#endif
