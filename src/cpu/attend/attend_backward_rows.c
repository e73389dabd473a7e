/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_rows.c - the query rows of the attention backward. f32 products read one copy of a row as
 * both A and B. bf16 products read words of two dimensions as A and words of two rows as B.
 *
 * delta = rowsum(d_o o) uses an o that was rounded to its dtype. The error shifts every dS = P (dP - delta)
 * of a row by the same share of P. Where a row sees few compressed entries, whose values are means and often
 * overlap, dP - delta is small beside delta: in 16 bits the shift reaches a tenth of d_k_cmp. These rows, the
 * first 3 l or 4 l of a sequence, take delta as the mean of dP weighted by P.
 */
#include "cpu/attend/attend_backward.h"
#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/rows_at.h"

#include <float.h>
#include <math.h>
#include <string.h>

static int64_t words_ld(const backward_plan *p, int64_t words, int64_t ld)
{
    return p->attend.bf16 ? words : ld;
}

void backward_rows_carve(const backward_plan *p, int64_t capacity, arena *a, backward_rows *rows)
{
    const size_t n = (size_t)capacity;
    rows->q = arena_take(a, n * (size_t)words_ld(p, p->attend.key_words, p->key_ld) * 4);
    rows->d_o = arena_take(a, n * (size_t)words_ld(p, p->value_words, p->value_ld) * 4);
    rows->q_pairs = p->attend.bf16 ? arena_take(a, n * (size_t)p->key_ld * 2) : rows->q;
    rows->d_o_pairs = p->attend.bf16 ? arena_take(a, n * (size_t)p->value_ld * 2) : rows->d_o;
    rows->d_q = arena_take(a, n * (size_t)p->key_ld * 4);
    float **floats[] = {&rows->top, &rows->factor,      &rows->delta, &rows->row_scale, &rows->dp_scale,
                        &rows->lse, &rows->sink_weight, &rows->max,   &rows->sum,       &rows->mean};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) *floats[i] = arena_take(a, n * 4);
    rows->lo = arena_take(a, n * 4);
    rows->hi = arena_take(a, n * 4);
    rows->nonfinite = arena_take(a, n);
}

backward_rows backward_rows_from(const backward_plan *p, const backward_rows *rows, int64_t first)
{
    const int64_t q_ld = words_ld(p, p->attend.key_words, p->key_ld),
                  o_ld = words_ld(p, p->value_words, p->value_ld);
    const int64_t pair = p->attend.bf16 ? first / 2 : first;
    return (backward_rows){(uint32_t *)rows->q + first * q_ld,
                           (uint32_t *)rows->d_o + first * o_ld,
                           (uint32_t *)rows->q_pairs + pair * p->key_ld,
                           (uint32_t *)rows->d_o_pairs + pair * p->value_ld,
                           rows->d_q + first * p->key_ld,
                           rows->lo + first,
                           rows->hi + first,
                           rows->top + first,
                           rows->factor + first,
                           rows->delta + first,
                           rows->row_scale + first,
                           rows->dp_scale + first,
                           rows->lse + first,
                           rows->sink_weight + first,
                           rows->max + first,
                           rows->sum + first,
                           rows->mean + first,
                           rows->nonfinite + first};
}

void backward_rows_copy(const backward_plan *p, const backward_rows *src, int64_t from,
                        const backward_rows *dst, int64_t to)
{
    const int64_t q_ld = words_ld(p, p->attend.key_words, p->key_ld),
                  o_ld = words_ld(p, p->value_words, p->value_ld);
    memcpy((uint32_t *)dst->q + to * q_ld, (const uint32_t *)src->q + from * q_ld, (size_t)q_ld * 4);
    memcpy((uint32_t *)dst->d_o + to * o_ld, (const uint32_t *)src->d_o + from * o_ld, (size_t)o_ld * 4);
    dst->lo[to] = src->lo[from];
    dst->hi[to] = src->hi[from];
    dst->top[to] = src->top[from];
    dst->factor[to] = src->factor[from];
    dst->delta[to] = src->delta[from];
    dst->row_scale[to] = src->row_scale[from];
    dst->dp_scale[to] = src->dp_scale[from];
    dst->lse[to] = src->lse[from];
    dst->sink_weight[to] = src->sink_weight[from];
    dst->max[to] = src->max[from];
    dst->sum[to] = src->sum[from];
    dst->mean[to] = src->mean[from];
    dst->nonfinite[to] = src->nonfinite[from];
}

void backward_rows_prefetch(const backward_plan *p, const backward_rows *rows, int64_t row)
{
    const int64_t q_ld = words_ld(p, p->attend.key_words, p->key_ld),
                  o_ld = words_ld(p, p->value_words, p->value_ld);
    for (int64_t i = 0; i < q_ld; i += 16) __builtin_prefetch((const uint32_t *)rows->q + row * q_ld + i);
    for (int64_t i = 0; i < o_ld; i += 16) __builtin_prefetch((const uint32_t *)rows->d_o + row * o_ld + i);
}

void backward_rows_pair(const backward_plan *p, const backward_rows *rows, int64_t n)
{
    if (n % 2 != 0) {
        rows->lo[n] = rows->hi[n] = 0;
        rows->top[n] = rows->factor[n] = rows->delta[n] = rows->row_scale[n] = rows->dp_scale[n] = 0.0f;
        rows->lse[n] = rows->sink_weight[n] = rows->max[n] = rows->sum[n] = rows->mean[n] = 0.0f;
        rows->nonfinite[n] = 0;
    }
    if (!p->attend.bf16) return;
    const row_source q = {rows->q, QUERN_BF16, 2 * p->attend.key_words, n, p->attend.dim_k};
    const row_source d_o = {rows->d_o, QUERN_BF16, 2 * p->value_words, n, p->attend.dim_v};
    p->attend.kernels->pack_values_bf16(&q, (int32_t)p->key_ld, rows->q_pairs, 0);
    p->attend.kernels->pack_values_bf16(&d_o, (int32_t)p->value_ld, rows->d_o_pairs, 0);
}

/* The address of query `query` of a unit in a 4-D activation; its heads follow at strides[2]. */
static row_source query_rows(const quern_tensor *t, const attend_sequence *seq, int64_t query, int64_t head,
                             int64_t n)
{
    const int64_t at = seq->view_b * t->strides[0] + (seq->q0 + query) * t->strides[1] + head * t->strides[2];
    return (row_source){(const char *)t->data + at * (int64_t)quern_dtype_size(t->dtype), t->dtype,
                        t->strides[2], n, t->shape[3]};
}

static float statistic(const quern_tensor *t, const attend_sequence *seq, int64_t query, int64_t head)
{
    return (
        (const float *)
            t->data)[seq->view_b * t->strides[0] + head * t->strides[1] + (seq->q0 + query) * t->strides[2]];
}

static void pack(const backward_plan *p, const row_source *src, void *dst, int64_t ld)
{
    if (p->attend.bf16) p->attend.kernels->pack_rows_bf16(src, dst, 2 * ld);
    else p->attend.kernels->pack_rows_f32(src, 1.0f, dst, ld);
}

/* The mean of dP weighted by P, over keys [lo, hi) of one query and head. */
static float mean_of_dp(const backward_plan *p, const attend_sequence *seq, int64_t query, int64_t head,
                        int64_t lo, int64_t hi, float top)
{
    const attend_args *args = p->attend.args;
    const attention_kernels *kernels = p->attend.kernels;
    const int64_t dim_k = p->attend.dim_k, dim_v = p->attend.dim_v, kv_head = head / p->attend.group;
    float q[MAX_DIM], d_o[MAX_DIM], x[MAX_DIM], sum = 0.0f, weight = 0.0f;
    const row_source q_row = query_rows(&args->q, seq, query, head, 1),
                     o_row = query_rows(&args->d_o, seq, query, head, 1);
    kernels->pack_rows_f32(&q_row, 1.0f, q, dim_k);
    kernels->pack_rows_f32(&o_row, 1.0f, d_o, dim_v);
    for (int64_t key = lo; key < hi; key++) {
        const row_source k = rows_at(&args->k, seq->view_b, seq->k0 + key, kv_head, 1),
                         v = rows_at(&args->v, seq->view_b, seq->k0 + key, kv_head, 1);
        kernels->pack_rows_f32(&k, 1.0f, x, dim_k);
        const float weight_of_key = exp2f((backward_dot(q, x, dim_k) - top) * p->attend.scale2);
        kernels->pack_rows_f32(&v, 1.0f, x, dim_v);
        sum += weight_of_key * backward_dot(d_o, x, dim_v);
        weight += weight_of_key;
    }
    return sum / weight;
}

static const double log2_e_exact = 1.4426950408889634074;

/* top and factor of a row whose lse is `lse2` in powers of two. */
static void take_lse2(const backward_plan *p, const backward_rows *rows, int64_t r, double lse2)
{
    const double top = lse2 / (double)p->attend.scale2;
    rows->top[r] = fabs(top) > FLT_MAX && isfinite(lse2) ? copysignf(FLT_MAX, (float)lse2) : (float)top;
    rows->factor[r] =
        isfinite(rows->top[r]) ? (float)exp2((double)rows->top[r] * (double)p->attend.scale2 - lse2) : 1.0f;
}

/* Takes the sink out of the keys' weights: the row's P becomes the keys' share of it. Returns this share. */
static float take_sink(const backward_rows *rows, int64_t r, double lse, float sink)
{
    const double share = attend_keys_share(lse, sink);
    rows->sink_weight[r] = (float)(1.0 / (1.0 + exp(lse - (double)sink)));
    rows->factor[r] = (float)((double)rows->factor[r] * share);
    return (float)share;
}

void backward_rows_settle(const backward_plan *p, int32_t unit, int64_t row0, int64_t n,
                          const backward_rows *rows)
{
    const int64_t hs = p->attend.hs;
    for (int64_t r = 0; r < n; r++) {
        if (!lse_is_coarse(rows->lse[r], p->attend.args->q.dtype)) continue;
        const float sink = attend_sink(p->attend.args, (int64_t)unit * hs + (row0 + r) % hs);
        rows->top[r] = rows->max[r];
        rows->factor[r] = 1.0f / rows->sum[r];
        if (rows->dp_scale[r] != 0.0f) rows->delta[r] = rows->row_scale[r] * (rows->mean[r] / rows->sum[r]);
        if (sink == -INFINITY) continue;
        const double lse2 = (double)rows->max[r] * (double)p->attend.scale2 + log2((double)rows->sum[r]);
        rows->delta[r] *= take_sink(rows, r, lse2 / log2_e_exact, sink);
    }
}

bool backward_rows_load(const backward_plan *p, const attend_sequence *seq, int32_t unit, int64_t row0,
                        int64_t n, const backward_rows *rows)
{
    bool coarse = false;
    const attend_args *args = p->attend.args;
    const int64_t hs = p->attend.hs, head0 = (int64_t)unit * hs;
    const quern_dtype packed = p->attend.bf16 ? QUERN_BF16 : QUERN_F32;
    const int64_t q_ld = words_ld(p, p->attend.key_words, p->key_ld),
                  o_ld = words_ld(p, p->value_words, p->value_ld);
    const int64_t few = attend_few_keys(args);
    for (int64_t r = 0; r < n;) { /* the heads of one query at a time */
        const int64_t query = (row0 + r) / hs, h = (row0 + r) % hs, m = hs - h < n - r ? hs - h : n - r;
        const row_source q = query_rows(&args->q, seq, query, head0 + h, m),
                         d_o = query_rows(&args->d_o, seq, query, head0 + h, m);
        uint32_t *q_to = (uint32_t *)rows->q + r * q_ld, *o_to = (uint32_t *)rows->d_o + r * o_ld;
        pack(p, &q, q_to, q_ld);
        pack(p, &d_o, o_to, o_ld);
        int64_t lo, hi;
        attend_interval(args, seq, query, &lo, &hi);
        for (int64_t i = 0; i < m; i++) {
            const float sink = attend_sink(args, head0 + h + i),
                        lse = sink == INFINITY ? -INFINITY : statistic(&args->lse, seq, query, head0 + h + i);
            const bool none = lse == -INFINITY;
            rows->lo[r + i] = (int32_t)lo;
            rows->hi[r + i] = (int32_t)(none ? lo : hi);
            rows->lse[r + i] = lse;
            rows->sink_weight[r + i] = 0.0f;
            take_lse2(p, rows, r + i, (double)lse * log2_e_exact);
            if (sink != -INFINITY && !none) take_sink(rows, r + i, (double)lse, sink);
            /* P is 1 and dS exactly 0, whatever delta's rounding */
            const bool one = hi - lo == 1 && sink == -INFINITY;
            rows->row_scale[r + i] =
                args->row_scale.ndim > 0 ? statistic(&args->row_scale, seq, query, head0 + h + i) : 1.0f;
            rows->delta[r + i] = one ? 0.0f : statistic(&args->delta, seq, query, head0 + h + i);
            if (!one && !none && hi - lo <= few)
                rows->delta[r + i] = rows->row_scale[r + i] *
                                     mean_of_dp(p, seq, query, head0 + h + i, lo, hi, rows->top[r + i]);
            rows->dp_scale[r + i] = one ? 0.0f : rows->row_scale[r + i];
            rows->max[r + i] = -INFINITY;
            rows->sum[r + i] = rows->mean[r + i] = 0.0f;
            coarse |= lse_is_coarse(lse, p->attend.args->q.dtype);
            rows->nonfinite[r + i] = any_nonfinite(q_to + i * q_ld, packed, p->attend.dim_k) ||
                                     any_nonfinite(o_to + i * o_ld, packed, p->attend.dim_v);
        }
        r += m;
    }
    backward_rows_pair(p, rows, n);
    memset(rows->d_q, 0, (size_t)(n * p->key_ld) * sizeof(float));
    return coarse;
}

void backward_rows_store(const backward_plan *p, const attend_sequence *seq, int32_t unit, int64_t row0,
                         int64_t n, const backward_rows *rows)
{
    const attend_args *args = p->attend.args;
    const attention_kernels *k = p->attend.kernels;
    const quern_tensor *t = &args->d_q;
    for (int64_t r = 0; r < n && is_present(&args->d_sink); r++) {
        const int64_t query = (row0 + r) / p->attend.hs,
                      head = (int64_t)unit * p->attend.hs + (row0 + r) % p->attend.hs;
        const float share = rows->lse[r] == -INFINITY ? 0.0f : rows->sink_weight[r] * rows->delta[r];
        *(float *)row_at(&args->delta, seq->view_b, head, seq->q0 + query) = share;
    }
    if (t->ndim == 0) return;
    for (int64_t r = 0; r < n; r++) {
        float *d_q = rows->d_q + r * p->key_ld;
        const int64_t query = (row0 + r) / p->attend.hs,
                      head = (int64_t)unit * p->attend.hs + (row0 + r) % p->attend.hs;
        void *to = row_at(t, seq->view_b, seq->q0 + query, head);
        if (args->accumulate_q) {
            k->rows->add_scaled(to, d_q, args->scale, p->attend.dim_k);
        } else {
            k->scale_row(d_q, args->scale, p->attend.dim_k);
            k->rows->convert(d_q, QUERN_F32, to, t->dtype, p->attend.dim_k);
        }
    }
}
