/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_attend.c - the attention core in double: for every query a set of rows that are keys and values at
 * once. */
#include "dot.h"
#include "dsv4.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The rows of a query: raw ones, then entries. */
typedef struct key_set {
    int64_t n, raw;
    int64_t *row; /* of kv for the first `raw`, of kv_cmp for the others */
} key_set;

static bool is_chosen(const oracle_core *c, const oracle_core_arrays *x, int64_t t, int64_t s)
{
    if (x->idx == NULL) return true;
    const int64_t n = x->count != NULL ? x->count[t] : c->chosen;
    for (int64_t i = 0; i < n && i < c->chosen; i++)
        if (x->idx[t * c->chosen + i] == s) return true;
    return false;
}

static key_set keys_of(const oracle_core *c, const oracle_core_arrays *x, int64_t t)
{
    key_set k = {0, 0, malloc((size_t)(c->raw + c->entries + 1) * sizeof *k.row)};
    const int64_t position = c->start + t, first = c->start + c->queries - c->raw;
    for (int64_t j = 0; j < c->raw; j++)
        if (first + j <= position && first + j > position - c->window) k.row[k.n++] = j;
    k.raw = k.n;
    for (int64_t s = 0; s < oracle_dsv4_visible(x->kv_cmp != NULL ? c->entries : 0, c->ratio, position); s++)
        if (is_chosen(c, x, t, s)) k.row[k.n++] = s;
    return k;
}

static const double *key_row(const oracle_core *c, const oracle_core_arrays *x, const key_set *k, int64_t i)
{
    return i < k->raw ? x->kv + k->row[i] * c->dim : x->kv_cmp + k->row[i] * c->dim;
}

/* log(sum of e^x) of n numbers. */
static double log_sum(const double *x, int64_t n)
{
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, x[i]);
    if (most == -INFINITY) return -INFINITY;
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - most);
    return most + log(sum);
}

static double sink_of(const oracle_core_arrays *x, int64_t h)
{
    return x->sink != NULL ? x->sink[h] : -INFINITY;
}

/* Scores of a head's keys; returns the logarithm of the denominator, the sink in it: infinite where the sink
 * leaves nothing to the keys. */
static double scores_of(const oracle_core *c, const oracle_core_arrays *x, const key_set *k, const double *q,
                        double sink, double *score)
{
    for (int64_t i = 0; i < k->n; i++)
        score[i] = oracle_dot(q, key_row(c, x, k, i), c->dim) / sqrt((double)c->dim);
    const double lse = log_sum(score, k->n);
    const double both[] = {lse, sink};
    if (sink == INFINITY) return INFINITY;
    return lse == -INFINITY ? -INFINITY : log_sum(both, 2);
}

void oracle_dsv4_attend(const oracle_core *c, const oracle_core_arrays *x)
{
    double *score = malloc((size_t)(c->raw + c->entries + 1) * sizeof *score);
    for (int64_t t = 0; t < c->queries; t++) {
        const key_set k = keys_of(c, x, t);
        for (int64_t h = 0; h < c->heads; h++) {
            double *o = x->o + (t * c->heads + h) * c->dim;
            const double all = scores_of(c, x, &k, x->q + (t * c->heads + h) * c->dim, sink_of(x, h), score);
            memset(o, 0, (size_t)c->dim * sizeof *o);
            for (int64_t i = 0; i < k.n && all != -INFINITY; i++) {
                const double p = exp(score[i] - all), *key = key_row(c, x, &k, i);
                for (int64_t d = 0; d < c->dim; d++) o[d] += p * key[d];
            }
            if (x->cos_sin != NULL)
                oracle_dsv4_rotate(o, c->dim, x->cos_sin, c->rope_dim, c->start + t, true);
            x->lse[h * c->queries + t] = log_sum(score, k.n);
            if (x->lse_win != NULL) x->lse_win[h * c->queries + t] = log_sum(score, k.raw);
        }
        free(k.row);
    }
    free(score);
}

/* One head of one query: p_i = e^(s_i - all), ds_i = p_i (dO . v_i - delta), delta = dO . o, which is sum_i
 * p_i dO . v_i where o is exact. The softmax of one key without a sink is constant: ds is 0 whatever o was
 * rounded to. */
static void head_backward(const oracle_core *c, const oracle_core_arrays *x, const key_set *k, int64_t t,
                          int64_t h, double *score)
{
    const int64_t at = (t * c->heads + h) * c->dim;
    const double all = scores_of(c, x, k, x->q + at, sink_of(x, h), score), scale = 1 / sqrt((double)c->dim);
    if (isinf(all)) return;
    double *d_o = malloc((size_t)c->dim * sizeof *d_o);
    const double delta = oracle_dot(x->d_o + at, x->o + at, c->dim);
    memcpy(d_o, x->d_o + at, (size_t)c->dim * sizeof *d_o);
    if (x->cos_sin != NULL) oracle_dsv4_rotate(d_o, c->dim, x->cos_sin, c->rope_dim, c->start + t, false);
    for (int64_t i = 0; i < k->n; i++) {
        const double p = exp(score[i] - all), *key = key_row(c, x, k, i);
        const double ds =
            k->n == 1 && sink_of(x, h) == -INFINITY ? 0 : p * (oracle_dot(d_o, key, c->dim) - delta) * scale;
        double *d_key = i < k->raw ? x->d_kv : x->d_kv_cmp;
        for (int64_t d = 0; x->d_q != NULL && d < c->dim; d++) x->d_q[at + d] += ds * key[d];
        if (d_key == NULL) continue;
        d_key += k->row[i] * c->dim;
        for (int64_t d = 0; d < c->dim; d++) d_key[d] += ds * x->q[at + d] + p * d_o[d];
    }
    if (x->d_sink != NULL && x->sink != NULL) x->d_sink[h] -= exp(x->sink[h] - all) * delta;
    free(d_o);
}

void oracle_dsv4_attend_backward(const oracle_core *c, const oracle_core_arrays *x)
{
    double *score = malloc((size_t)(c->raw + c->entries + 1) * sizeof *score);
    for (int64_t t = 0; t < c->queries; t++) {
        const key_set k = keys_of(c, x, t);
        for (int64_t h = 0; h < c->heads; h++) head_backward(c, x, &k, t, h, score);
        free(k.row);
    }
    free(score);
}
