/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool_rows.h - softmax pooling and its gradient, written once over the level's vectors.
 *
 * Merging a logit z and a value c into (m, s, w): with e = exp(-|z - m|), where z > m the sums shrink by e
 * and the new weight is 1, else they stay and it is e. So one exp2 is enough: the other factor is exactly 1.
 * A logit of -inf leaves all three as they are; NaN and +inf make the sums NaN.
 *
 * Four vectors of channels stay in registers (12 of AVX-512's 32) while the rows of a call pass: the
 * additions depend on each other from row to row, so it takes several vectors to keep the units busy. A merge
 * is an exp2 (10 instructions) and some 16 more; at C 512 both series of a CSA token take 64 of them, about
 * 0.3 us, and its 8 KiB take 0.2 us of read bandwidth. The gradient has an exp2 and 8 more a logit and reads
 * and writes as much, so memory limits it.
 *
 * All code paths must give the same bits, so the build (CMakeLists.txt) allows explicit FMAs only.
 */
#ifndef QUERN_CPU_POOL_ROWS_H
#define QUERN_CPU_POOL_ROWS_H

#include "cpu/pool/pool_kernels.h"
#include "cpu/kernels/vector_dtype.h"

enum { POOL_VECTORS = 4 };

/* A condition for each lane: a mask register, or a vector of all ones and zeros. */
#if defined(__AVX512F__)
typedef __mmask16 vmask;
#define V_COMPARE(a, op, b, code) _mm512_cmp_ps_mask(a, b, code)
#else
typedef vint vmask;
#define V_COMPARE(a, op, b, code) ((a)op(b))
#endif

INLINE vfloat v_pick(vmask mask, vfloat yes, vfloat no)
{
#if defined(__AVX512F__)
    return _mm512_mask_blend_ps(mask, no, yes);
#else
    return v_select(mask, yes, no);
#endif
}

INLINE vfloat kept_where(vmask mask, vfloat v)
{
#if defined(__AVX512F__)
    return _mm512_maskz_mov_ps(mask, v);
#else
    return (vfloat)((vint)v & mask);
#endif
}

INLINE vmask is_greater(vfloat a, vfloat b)
{
    return V_COMPARE(a, >, b, _CMP_GT_OQ);
}

/* NaN is. */
INLINE vmask differs(vfloat a, vfloat b)
{
    return V_COMPARE(a, !=, b, _CMP_NEQ_UQ);
}

static const float log2_e = 0x1.715476p+0f;

INLINE void merge_one(vfloat *max, vfloat *sum, vfloat *weighted, vfloat z, vfloat c)
{
    const vmask up = is_greater(z, *max), some = differs(z, v_splat(-INFINITY));
    const vfloat e = v_exp2((vfloat)((vint)(z - *max) | INT32_MIN) * log2_e);
    const vfloat one = v_fma(z, (vfloat){0}, v_splat(1.0f)); /* NaN where z is infinite */
    const vfloat weight = kept_where(some, v_pick(up, one, e)), shrink = v_pick(up, e, v_splat(1.0f));
    *sum = v_fma(*sum, shrink, weight);
    *weighted = v_fma(*weighted, shrink, weight * kept_where(some, c));
    *max = v_pick(up, z, *max);
}

INLINE void merge_columns(const pool_rows *s, const quern_dtype dtype, const int vectors, int64_t at,
                          const pool_sums *a)
{
    vfloat max[POOL_VECTORS], sum[POOL_VECTORS], weighted[POOL_VECTORS];
    const char *value = s->value, *logit = s->logit;
    const float *bias = s->bias + at;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        max[v] = v_load(a->max + at + v * LANES);
        sum[v] = v_load(a->sum + at + v * LANES);
        weighted[v] = v_load(a->weighted + at + v * LANES);
    }
    for (int64_t r = 0; r < s->rows; r++) {
        for (int line = 0; s->ahead != 0 && line < vectors * LANES * dtype_bytes(dtype); line += 64) {
            const char *v = value + at * dtype_bytes(dtype) + s->ahead + line,
                       *z = logit + at * dtype_bytes(dtype) + s->ahead + line;
            if (s->l2) {
                __builtin_prefetch(v, 0, 2);
                __builtin_prefetch(z, 0, 2);
            } else {
                __builtin_prefetch(v, 0, 3);
                __builtin_prefetch(z, 0, 3);
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            const vfloat z = load_as(logit, dtype, at + v * LANES) + v_load(bias + v * LANES);
            merge_one(&max[v], &sum[v], &weighted[v], z, load_as(value, dtype, at + v * LANES));
        }
        value += s->stride * dtype_bytes(dtype);
        logit += s->stride * dtype_bytes(dtype);
        bias += s->bias_stride;
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        v_store(a->max + at + v * LANES, max[v]);
        v_store(a->sum + at + v * LANES, sum[v]);
        v_store(a->weighted + at + v * LANES, weighted[v]);
    }
}

/* The last n - at < LANES channels. */
INLINE void merge_tail(const pool_rows *s, const quern_dtype dtype, int64_t at, int64_t n, const pool_sums *a)
{
    const char *value = s->value, *logit = s->logit;
    vfloat max = load_tail(a->max, QUERN_F32, at, n), sum = load_tail(a->sum, QUERN_F32, at, n);
    vfloat weighted = load_tail(a->weighted, QUERN_F32, at, n);
    for (int64_t r = 0; r < s->rows; r++) {
        const vfloat z =
            load_tail(logit, dtype, at, n) + load_tail(s->bias + r * s->bias_stride, QUERN_F32, at, n);
        merge_one(&max, &sum, &weighted, z, load_tail(value, dtype, at, n));
        value += s->stride * dtype_bytes(dtype);
        logit += s->stride * dtype_bytes(dtype);
    }
    store_tail(a->max, QUERN_F32, at, n, max);
    store_tail(a->sum, QUERN_F32, at, n, sum);
    store_tail(a->weighted, QUERN_F32, at, n, weighted);
}

INLINE void merge_of(const pool_rows *s, const quern_dtype dtype, int64_t n, const pool_sums *a)
{
    int64_t at = 0;
    for (; at + POOL_VECTORS * LANES <= n; at += POOL_VECTORS * LANES)
        merge_columns(s, dtype, POOL_VECTORS, at, a);
    for (; at + LANES <= n; at += LANES) merge_columns(s, dtype, 1, at, a);
    if (at < n) merge_tail(s, dtype, at, n, a);
}

static void merge(const pool_rows *s, int64_t n, const pool_sums *a)
{
#define CALL(t) merge_of(s, t, n, a)
    BY_DTYPE(s->dtype, CALL);
#undef CALL
}

static void pooled_row(const pool_sums *a, int64_t n, float *pooled, float *inverse_sum)
{
    for (int64_t at = 0; at < n; at += LANES) {
        const vfloat sum = load_some(a->sum, QUERN_F32, at, n);
        const vmask some = differs(sum, (vfloat){0});
        store_some(pooled, QUERN_F32, at, n,
                   kept_where(some, load_some(a->weighted, QUERN_F32, at, n) / sum));
        if (inverse_sum != NULL) store_some(inverse_sum, QUERN_F32, at, n, kept_where(some, 1.0f / sum));
    }
}

/* Values at some channels that all rows of a gradient share. */
typedef struct pooled_columns {
    vfloat shift, pooled, scale; /* -max log2(e); d over the sum */
} pooled_columns;

INLINE pooled_columns pooled_of(vfloat max, vfloat pooled, vfloat inverse, vfloat d)
{
    return (pooled_columns){max * -log2_e, pooled, kept_where(differs(inverse, (vfloat){0}), inverse * d)};
}

INLINE void gradient_of(const pooled_columns *c, vfloat z, vfloat value, vfloat *d_value, vfloat *d_logit)
{
    const vmask some = differs(z, v_splat(-INFINITY));
    *d_value = kept_where(some, v_exp2(v_fma(z, v_splat(log2_e), c->shift)) * c->scale);
    *d_logit = *d_value * kept_where(some, value - c->pooled);
}

INLINE void put(void *row, const quern_dtype dtype, int64_t at, vfloat v, const bool stream)
{
    if (stream) stream_as(row, dtype, at, v);
    else store_as(row, dtype, at, v);
}

/* A row at `vectors` vectors of channels: a line of 16-bit gradients is written at once. */
INLINE void backward_columns(const pool_rows *s, const quern_dtype dtype, const quern_dtype d_dtype,
                             const int vectors, int64_t at, const pool_gradient *g, const bool stream)
{
    vfloat dv[2], dl[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        const int64_t i = at + v * LANES;
        const pooled_columns c = pooled_of(v_load(g->max + i), v_load(g->pooled + i),
                                           v_load(g->inverse_sum + i), v_load(g->d + i));
        gradient_of(&c, load_as(s->logit, dtype, i) + v_load(s->bias + i), load_as(s->value, dtype, i),
                    &dv[v], &dl[v]);
        if (g->d_bias != NULL) v_store(g->d_bias + i, v_load(g->d_bias + i) + dl[v]);
    }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) put(g->d_value, d_dtype, at + v * LANES, dv[v], stream);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) put(g->d_logit, d_dtype, at + v * LANES, dl[v], stream);
}

/* The last n - at < LANES channels. */
INLINE void backward_tail(const pool_rows *s, const quern_dtype dtype, const quern_dtype d_dtype, int64_t at,
                          int64_t n, const pool_gradient *g)
{
    const pooled_columns c =
        pooled_of(load_tail(g->max, QUERN_F32, at, n), load_tail(g->pooled, QUERN_F32, at, n),
                  load_tail(g->inverse_sum, QUERN_F32, at, n), load_tail(g->d, QUERN_F32, at, n));
    vfloat dv, dl;
    gradient_of(&c, load_tail(s->logit, dtype, at, n) + load_tail(s->bias, QUERN_F32, at, n),
                load_tail(s->value, dtype, at, n), &dv, &dl);
    store_tail(g->d_value, d_dtype, at, n, dv);
    store_tail(g->d_logit, d_dtype, at, n, dl);
    if (g->d_bias != NULL)
        store_tail(g->d_bias, QUERN_F32, at, n, load_tail(g->d_bias, QUERN_F32, at, n) + dl);
}

INLINE void backward_row(const pool_rows *s, const quern_dtype dtype, const quern_dtype d_dtype, int64_t n,
                         const pool_gradient *g, const bool stream)
{
    int64_t at = 0;
    for (; at + 2 * LANES <= n; at += 2 * LANES) backward_columns(s, dtype, d_dtype, 2, at, g, stream);
    for (; at + LANES <= n; at += LANES) backward_columns(s, dtype, d_dtype, 1, at, g, stream);
    if (at < n) backward_tail(s, dtype, d_dtype, at, n, g);
}

/* The gradient's dtype is the rows', or f32. */
INLINE void backward_of(const pool_rows *s, const quern_dtype dtype, int64_t n, const pool_gradient *g)
{
    if (g->d_dtype == QUERN_F32) {
        if (g->stream) backward_row(s, dtype, QUERN_F32, n, g, true);
        else backward_row(s, dtype, QUERN_F32, n, g, false);
    } else {
        if (g->stream) backward_row(s, dtype, dtype, n, g, true);
        else backward_row(s, dtype, dtype, n, g, false);
    }
}

static void pool_backward(const pool_rows *s, int64_t n, const pool_gradient *g)
{
#define CALL(t) backward_of(s, t, n, g)
    BY_DTYPE(s->dtype, CALL);
#undef CALL
}

#define POOL_ROW_KERNELS .merge = merge, .pooled_row = pooled_row, .pool_backward = pool_backward

#endif
