/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - softmax attention and its gradient, one row at a time. */
#include "attention.h"

#include "dot.h"

#include <math.h>
#include <stdlib.h>

static double scale_of(const oracle_shape *s)
{
    return s->scale != 0 ? s->scale : 1 / sqrt((double)s->d);
}

/* The work of one row: the keys that it sees, and one or two numbers for each. */
typedef struct row {
    int64_t *key, count;
    double *p, *dp;
} row;

static row row_make(int64_t keys)
{
    const size_t n = (size_t)(keys > 0 ? keys : 1);
    const row r = {malloc(sizeof(int64_t) * n), 0, malloc(sizeof(double) * n), malloc(sizeof(double) * n)};
    if (r.key == NULL || r.p == NULL || r.dp == NULL) abort();
    return r;
}

static void row_free(row *r)
{
    free(r->key);
    free(r->p);
    free(r->dp);
}

static double sink_of(const oracle_shape *s, int64_t head)
{
    return s->sinks != NULL ? s->sinks->logit[head] : -INFINITY;
}

/* Finds the keys, fills p with their softmax weights, of which the sink has taken its part, and returns
 * lse. */
static double softmax_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                          const double *k, int64_t head, int64_t t, row *r)
{
    const int64_t kv_head = head / (s->h / s->hkv);
    const double *q_row = q + (t * s->h + head) * s->d, scale = scale_of(s);
    double max = -INFINITY, sum = 0;
    r->count = 0;
    for (int64_t j = 0; j < s->nkv; j++) {
        if (!sees(mask, head, t, j)) continue;
        const double score = scale * oracle_dot(q_row, k + (j * s->hkv + kv_head) * s->d, s->d);
        if (r->count == 0 || score > max || isnan(score)) max = score;
        r->key[r->count] = j;
        r->p[r->count++] = score;
    }
    for (int64_t i = 0; i < r->count; i++) {
        r->p[i] = exp(r->p[i] - max);
        sum += r->p[i];
    }
    const double lse = r->count > 0 ? max + log(sum) : -INFINITY, sink = sink_of(s, head);
    for (int64_t i = 0; i < r->count; i++)
        r->p[i] = sink == INFINITY ? 0 : r->p[i] / sum / (1 + exp(sink - lse));
    return lse;
}

static double attend_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                         const double *k, const double *v, int64_t head, int64_t t, row *r, double *o)
{
    const int64_t kv_head = head / (s->h / s->hkv);
    const double lse = softmax_row(s, sees, mask, q, k, head, t, r);
    if (o == NULL) return lse;
    for (int64_t c = 0; c < s->dv; c++) o[c] = 0;
    for (int64_t i = 0; i < r->count; i++) {
        const double *value = v + (r->key[i] * s->hkv + kv_head) * s->dv, p = r->p[i];
        for (int64_t c = 0; c < s->dv; c++) o[c] += p * value[c];
    }
    return lse;
}

double oracle_attend_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                         const double *k, const double *v, int64_t head, int64_t t, double *o)
{
    row r = row_make(s->nkv);
    const double lse = attend_row(s, sees, mask, q, k, v, head, t, &r, o);
    row_free(&r);
    return lse;
}

void oracle_attend(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                   const double *k, const double *v, double *o, double *lse)
{
    row r = row_make(s->nkv);
    for (int64_t t = 0; t < s->nq; t++) {
        for (int64_t head = 0; head < s->h; head++) {
            double *out = o != NULL ? o + (t * s->h + head) * s->dv : NULL;
            const double row_lse = attend_row(s, sees, mask, q, k, v, head, t, &r, out);
            if (lse != NULL) lse[head * (s->lse_stride > 0 ? s->lse_stride : s->nq) + t] = row_lse;
        }
    }
    row_free(&r);
}

/* dsink -= e^(sink - lse') sum_i p_i dp_i, lse' the logarithm of the denominator with the sink. */
static void add_sink(const oracle_shape *s, int64_t head, double lse, double mean)
{
    const double sink = sink_of(s, head);
    if (s->sinks == NULL || s->sinks->gradient == NULL || isinf(sink)) return;
    const double term = mean / (1 + exp(lse - sink));
    s->sinks->gradient[head] -= term;
    s->sinks->size[head] = hypot(s->sinks->size[head], term);
}

/* dv_j += p_j do;  dp_j = do . v_j;  ds_j = p_j (dp_j - sum_i p_i dp_i);  dq += scale ds_j k_j, dk_j alike.
 */
void oracle_attend_backward(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                            const double *k, const double *v, const double *d_o, double *d_q, double *d_k,
                            double *d_v)
{
    row r = row_make(s->nkv);
    const double scale = scale_of(s);
    for (int64_t t = 0; t < s->nq; t++) {
        for (int64_t head = 0; head < s->h; head++) {
            const int64_t kv_head = head / (s->h / s->hkv);
            const double *d_out = d_o + (t * s->h + head) * s->dv, *q_row = q + (t * s->h + head) * s->d;
            double *dq_row = d_q + (t * s->h + head) * s->d, mean = 0;
            const double lse = softmax_row(s, sees, mask, q, k, head, t, &r);
            for (int64_t i = 0; i < r.count; i++) {
                r.dp[i] = oracle_dot(d_out, v + (r.key[i] * s->hkv + kv_head) * s->dv, s->dv);
                mean += r.p[i] * r.dp[i];
            }
            if (r.count > 0) add_sink(s, head, lse, mean);
            for (int64_t i = 0; i < r.count; i++) {
                const double p = r.p[i], ds = p * (r.dp[i] - mean) * scale;
                const int64_t kv_row = r.key[i] * s->hkv + kv_head;
                const double *key = k + kv_row * s->d;
                double *d_key = d_k + kv_row * s->d, *d_value = d_v + kv_row * s->dv;
                for (int64_t c = 0; c < s->dv; c++) d_value[c] += p * d_out[c];
                for (int64_t c = 0; c < s->d; c++) dq_row[c] += ds * key[c];
                for (int64_t c = 0; c < s->d; c++) d_key[c] += ds * q_row[c];
            }
        }
    }
    row_free(&r);
}

bool oracle_range_sees(const void *range, int64_t head, int64_t t, int64_t j)
{
    const oracle_range *r = range;
    const int64_t position = (r->query_offset >= 0 ? r->query_offset : r->nkv - r->nq) + t;
    (void)head;
    if (position < 0) return false;
    if (r->causal) return j <= position && (r->window == 0 || j > position - r->window);
    return r->window == 0 || llabs(position - j) <= r->window / 2;
}
