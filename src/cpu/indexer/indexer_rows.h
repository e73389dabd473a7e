/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * indexer_rows.h - the indexer's kernels, written once over the level's vectors and compiled by each level's
 * file under its own flags.
 *
 * A query's heads are rows, keys are columns, so a score is a sum down the rows: no sum across lanes. The
 * tile is that of attention's products (kernels/attention_mm.h): INDEX_ROWS heads by INDEX_VECTORS vectors of
 * keys in registers, the keys of a panel (16 KB of 64 in bf16, C 128) in L1, the query's words broadcast.
 * ReLU and weight take two operations a vector where the product takes 64 dot products (C 128, bf16). Limit:
 * the product's.
 */
#ifndef QUERN_CPU_INDEXER_ROWS_H
#define QUERN_CPU_INDEXER_ROWS_H

#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/vector_dtype.h"

#if defined(__AVX512F__)
enum { INDEX_ROWS = 6, INDEX_VECTORS = 4 };
#elif defined(__FMA__)
enum { INDEX_ROWS = 6, INDEX_VECTORS = 2 };
#else
enum { INDEX_ROWS = 4, INDEX_VECTORS = 4 };
#endif
enum { INDEX_PANEL = INDEX_VECTORS * LANES };

INLINE vfloat index_step(const bool pairs, vfloat sum, vfloat a, vfloat b)
{
#if defined(__AVX512BF16__)
    if (pairs) return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)pairs;
    return v_fma(a, b, sum);
}

/* NaN stays NaN. */
INLINE vfloat v_relu(vfloat v)
{
    return v_max((vfloat){0}, v);
}

INLINE void index_heads(const bool pairs, const int heads, const indexer_tile *t, const float *q,
                        const float *w)
{
    vfloat acc[INDEX_ROWS][INDEX_VECTORS];
    const float *keys = t->keys, *low = heads > 3 ? q + 3 * t->words : q;
#pragma GCC unroll 8
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 4
        for (int j = 0; j < INDEX_VECTORS; j++) acc[i][j] = (vfloat){0};
    for (int64_t p = 0; p < t->words; p++, q++, low++, keys += INDEX_PANEL) {
        vfloat key[INDEX_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < INDEX_VECTORS; j++) key[j] = v_load(keys + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < heads; i++) {
            const vfloat a = v_splat(i < 3 ? q[i * t->words] : low[(i - 3) * t->words]);
#pragma GCC unroll 4
            for (int j = 0; j < INDEX_VECTORS; j++) acc[i][j] = index_step(pairs, acc[i][j], a, key[j]);
        }
    }
#pragma GCC unroll 4
    for (int j = 0; j < INDEX_VECTORS; j++) {
        vfloat sum = v_load(t->sum + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < heads; i++) sum = v_fma(v_splat(w[i]), v_relu(acc[i][j]), sum);
        v_store(t->sum + j * LANES, sum);
    }
}

/* Prefetches the share of `ahead` that falls to heads [h, h + n). All of it at once would be more lines than
 * can be on their way, and the products would wait. */
INLINE void index_prefetch(const indexer_tile *t, int64_t h, int64_t n)
{
    const int64_t lines = (t->ahead_bytes + 63) / 64, end = lines * (h + n) / t->heads;
    for (int64_t i = lines * h / t->heads; i < end; i++) __builtin_prefetch(t->ahead + 64 * i, 0, 2);
}

INLINE void index_group(const bool pairs, const int heads, const indexer_tile *t, int64_t h)
{
    index_prefetch(t, h, heads);
    index_heads(pairs, heads, t, (const float *)t->q + h * t->words, t->w + h);
}

INLINE void index_score(const bool pairs, const indexer_tile *t)
{
    int64_t h = 0;
    for (int j = 0; j < INDEX_PANEL; j++) t->sum[j] = 0.0f;
    for (; h + INDEX_ROWS <= t->heads; h += INDEX_ROWS) index_group(pairs, INDEX_ROWS, t, h);
    for (; h + 4 <= t->heads; h += 4) index_group(pairs, 4, t, h);
    for (; h + 2 <= t->heads; h += 2) index_group(pairs, 2, t, h);
    if (h < t->heads) index_group(pairs, 1, t, h);
}

static void score_f32(const indexer_tile *t)
{
    index_score(false, t);
}

static void score_bf16(const indexer_tile *t)
{
    index_score(true, t);
}

static void scale_scores(float *x, const float *key_scale, float scale, int64_t n)
{
    if (key_scale != NULL)
        for (int64_t i = 0; i < n; i++) x[i] *= key_scale[i];
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * scale + 0.0f;
}

/* Bits of the lanes whose mask is set. */
INLINE uint32_t mask_bits(vint mask)
{
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__FMA__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

INLINE vint rank_of(vfloat v)
{
    const vint bits = (vint)(v + 0.0f), rank = bits ^ ((bits >> 31) & 0x7fffffff), nan = v_is_nan(v);
    return (rank & ~nan) | (((vint){0} + RANK_NAN) & nan);
}

static void collect(const float *score, int64_t n, int32_t first, indexer_best *best)
{
    for (int64_t at = 0; at < n; at += LANES) {
        const int32_t left = (int32_t)(n - at < LANES ? n - at : LANES);
        const vint rank = rank_of(v_load_first(score + at, left, (vfloat){0}));
        uint32_t bits = mask_bits((rank > best->least) & lanes_in(0, 0, left));
        int32_t ranks[LANES];
        if (bits == 0) continue;
        memcpy(ranks, &rank, sizeof ranks);
        for (; bits != 0; bits &= bits - 1) {
            const int lane = __builtin_ctz(bits);
            best->rank[best->n] = ranks[lane];
            best->index[best->n++] = first + (int32_t)at + lane;
        }
    }
}

/* How many of n ranks are at least `rank`. */
INLINE int64_t count_from(const int32_t *ranks, int64_t n, int32_t rank)
{
    vint count[2] = {{0}};
    int64_t i = 0, sum = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int j = 0; j < 2; j++) {
            vint v;
            memcpy(&v, ranks + i + j * LANES, sizeof v);
            count[j] -= v >= rank;
        }
    for (; i < n; i++) sum += ranks[i] >= rank;
    count[0] += count[1];
    for (int j = 0; j < LANES; j++) sum += count[0][j];
    return sum;
}

/* Finds the rank of the k-th best bit by bit, the highest first: a bit is set where k ranks still reach the
 * number. Where exactly k do, the lower bits do not matter. */
static void cut(indexer_best *best, int64_t k)
{
    if (best->n <= k) return;
    const uint32_t sign = 0x80000000u; /* added, so that numbers without a sign have the ranks' order */
    uint32_t last = 0;
    int64_t count = best->n, n = 0;
    for (uint32_t bit = sign; bit != 0 && count != k; bit >>= 1) {
        const int64_t reach = count_from(best->rank, best->n, (int32_t)((last | bit) ^ sign));
        if (reach < k) continue;
        last |= bit;
        count = reach;
    }
    best->least = (int32_t)(last ^ sign);
    int64_t equal = k - count_from(best->rank, best->n, best->least + 1);
    for (int64_t i = 0; i < best->n; i++) {
        const int32_t rank = best->rank[i];
        const bool same = rank == best->least;
        best->rank[n] = rank;
        best->index[n] = best->index[i];
        n += (rank > best->least) | (same & (equal > 0));
        equal -= same;
    }
    best->n = n;
}

/* z where it is above 0 or NaN, else 0. */
INLINE vfloat relu(vfloat z)
{
    return v_select(z <= 0.0f, (vfloat){0}, z);
}

static void relu_sum(const float *z, int64_t ldz, int64_t heads, const float *w, float scale, int64_t n,
                     float *sum)
{
    for (int64_t at = 0; at < n; at += LANES) {
        const int32_t count = n - at < LANES ? (int32_t)(n - at) : LANES;
        vfloat total = {0};
        for (int64_t h = 0; h < heads; h++)
            total = v_fma(v_splat(w[h]), relu(v_load_first(z + h * ldz + at, count, (vfloat){0})), total);
        v_store_first(sum + at, count, total * scale);
    }
}

static void relu_backward(float *z, int64_t ldz, int64_t heads, const float *w, float scale, const float *d,
                          int64_t n, float *d_w)
{
    for (int64_t h = 0; h < heads; h++, z += ldz) {
        vfloat total = {0};
        for (int64_t at = 0; at < n; at += LANES) {
            const int32_t count = n - at < LANES ? (int32_t)(n - at) : LANES;
            const vfloat x = v_load_first(z + at, count, (vfloat){0}),
                         g = v_load_first(d + at, count, (vfloat){0}) * scale;
            total = v_fma(g, relu(x), total);
            v_store_first(z + at, count, v_select(x <= 0.0f, (vfloat){0}, g * w[h]));
        }
        d_w[h] += sum_of(total);
    }
}

#define INDEXER_ROW_KERNELS                                                                                  \
    .panel = INDEX_PANEL, .score_f32 = score_f32, .scale_scores = scale_scores, .collect = collect,          \
    .cut = cut, .relu_sum = relu_sum, .relu_backward = relu_backward
#define INDEXER_ROW_KERNELS_BF16 .panel = INDEX_PANEL, .score_bf16 = score_bf16

#endif
