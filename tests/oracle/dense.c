/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dense.c - dense attention over a batch: a loop over its sequences. */
#include "attention.h"

#include <math.h>
#include <stddef.h>

/* One sequence of the batch: its mask and sizes, and where its first rows stand. */
typedef struct sequence {
    oracle_range range;
    oracle_shape shape;
    int64_t q_row, kv_row, lse_start;
} sequence;

static int64_t first_key(const oracle_dense_extras *x, int64_t b)
{
    return x->kv_first != NULL ? x->kv_first[b] : 0;
}

oracle_range oracle_dense_range(const oracle_dense *a, const oracle_dense_extras *x, int64_t b)
{
    const int32_t *cu_kv = a->cu_kv != NULL ? a->cu_kv : a->cu_q;
    oracle_range range = {a->nq, a->nkv, a->causal, a->window, a->query_offset};
    if (a->cu_q != NULL) {
        range.nq = a->cu_q[b + 1] - a->cu_q[b];
        range.nkv = cu_kv[b + 1] - cu_kv[b];
    } else {
        range.nkv = (x->kv_count != NULL ? x->kv_count[b] : a->nkv) - first_key(x, b);
    }
    return range;
}

static sequence sequence_of(const oracle_dense *a, const oracle_dense_extras *x, int64_t b)
{
    const int32_t *cu_kv = a->cu_kv != NULL ? a->cu_kv : a->cu_q;
    const bool varlen = a->cu_q != NULL;
    const oracle_range range = oracle_dense_range(a, x, b);
    sequence s = {range,
                  {range.nq, range.nkv, a->h, a->hkv, a->d, a->dv, a->scale, a->nq, x->sinks},
                  varlen ? a->cu_q[b] : b * a->nq,
                  varlen ? cu_kv[b] : b * a->nkv + first_key(x, b),
                  varlen ? a->cu_q[b] : b * a->h * a->nq};
    return s;
}

void oracle_dense_forward(const oracle_dense *a, const double *q, const double *k, const double *v, double *o,
                          double *lse)
{
    oracle_dense_forward_with(a, &(oracle_dense_extras){NULL, NULL, NULL}, q, k, v, o, lse);
}

void oracle_dense_backward(const oracle_dense *a, const double *q, const double *k, const double *v,
                           const double *d_o, double *d_q, double *d_k, double *d_v)
{
    oracle_dense_backward_with(a, &(oracle_dense_extras){NULL, NULL, NULL}, q, k, v, d_o, d_q, d_k, d_v);
}

void oracle_dense_forward_with(const oracle_dense *a, const oracle_dense_extras *x, const double *q,
                               const double *k, const double *v, double *o, double *lse)
{
    const int64_t rows = (a->cu_q != NULL ? 1 : a->batch) * a->nq * a->h;
    for (int64_t i = 0; o != NULL && i < rows * a->dv; i++) o[i] = 0;
    for (int64_t i = 0; lse != NULL && i < rows; i++) lse[i] = -INFINITY;
    for (int64_t b = 0; b < a->batch; b++) {
        const sequence s = sequence_of(a, x, b);
        oracle_attend(&s.shape, oracle_range_sees, &s.range, q + s.q_row * a->h * a->d,
                      k + s.kv_row * a->hkv * a->d, v + s.kv_row * a->hkv * a->dv,
                      o != NULL ? o + s.q_row * a->h * a->dv : NULL, lse != NULL ? lse + s.lse_start : NULL);
    }
}

void oracle_dense_backward_with(const oracle_dense *a, const oracle_dense_extras *x, const double *q,
                                const double *k, const double *v, const double *d_o, double *d_q, double *d_k,
                                double *d_v)
{
    const int64_t sequences = a->cu_q != NULL ? 1 : a->batch;
    for (int64_t i = 0; i < sequences * a->nq * a->h * a->d; i++) d_q[i] = 0;
    for (int64_t i = 0; i < sequences * a->nkv * a->hkv * a->d; i++) d_k[i] = 0;
    for (int64_t i = 0; i < sequences * a->nkv * a->hkv * a->dv; i++) d_v[i] = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        const sequence s = sequence_of(a, x, b);
        const int64_t q_at = s.q_row * a->h * a->d, k_at = s.kv_row * a->hkv * a->d;
        const int64_t v_at = s.kv_row * a->hkv * a->dv;
        oracle_attend_backward(&s.shape, oracle_range_sees, &s.range, q + q_at, k + k_at, v + v_at,
                               d_o + s.q_row * a->h * a->dv, d_q + q_at, d_k + k_at, d_v + v_at);
    }
}
