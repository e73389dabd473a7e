/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention.c - softmax attention and its gradient, one row at a time. */
#include "attention.h"

#include <math.h>
#include <stdlib.h>

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static double scale_of(const oracle_shape *s)
{
    return s->scale != 0 ? s->scale : 1 / sqrt((double)s->d);
}

/* Fills p[j] with the softmax weight of every key (0 for those not seen) and returns lse. */
static double softmax_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                          const double *k, int64_t head, int64_t t, double *p)
{
    const int64_t kv_head = head / (s->h / s->hkv);
    const double *row = q + (t * s->h + head) * s->d, scale = scale_of(s);
    double max = -INFINITY, sum = 0;
    bool any = false;
    for (int64_t j = 0; j < s->nkv; j++) {
        p[j] = -INFINITY;
        if (!sees(mask, head, t, j)) continue;
        p[j] = scale * dot(row, k + (j * s->hkv + kv_head) * s->d, s->d);
        if (!any || p[j] > max || isnan(p[j])) max = p[j];
        any = true;
    }
    if (!any) {
        for (int64_t j = 0; j < s->nkv; j++) p[j] = 0;
        return -INFINITY;
    }
    /* A key that is not seen has weight 0 even where the row's maximum is NaN. */
    for (int64_t j = 0; j < s->nkv; j++) {
        p[j] = sees(mask, head, t, j) ? exp(p[j] - max) : 0;
        sum += p[j];
    }
    for (int64_t j = 0; j < s->nkv; j++) p[j] /= sees(mask, head, t, j) ? sum : 1;
    return max + log(sum);
}

static double *row_buffer(int64_t n)
{
    double *p = malloc(sizeof *p * (size_t)(n > 0 ? n : 1));
    if (p == NULL) abort();
    return p;
}

static double weighted_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                           const double *k, const double *v, int64_t head, int64_t t, double *p, double *o)
{
    const int64_t kv_head = head / (s->h / s->hkv);
    const double lse = softmax_row(s, sees, mask, q, k, head, t, p);
    for (int64_t c = 0; o != NULL && c < s->dv; c++) o[c] = 0;
    for (int64_t j = 0; o != NULL && j < s->nkv; j++) {
        if (!sees(mask, head, t, j)) continue;
        for (int64_t c = 0; c < s->dv; c++) o[c] += p[j] * v[(j * s->hkv + kv_head) * s->dv + c];
    }
    return lse;
}

double oracle_attend_row(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                         const double *k, const double *v, int64_t head, int64_t t, double *o)
{
    double *p = row_buffer(s->nkv);
    const double lse = weighted_row(s, sees, mask, q, k, v, head, t, p, o);
    free(p);
    return lse;
}

void oracle_attend(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                   const double *k, const double *v, double *o, double *lse)
{
    double *p = row_buffer(s->nkv);
    for (int64_t t = 0; t < s->nq; t++) {
        for (int64_t head = 0; head < s->h; head++) {
            double *out = o != NULL ? o + (t * s->h + head) * s->dv : NULL;
            const double row_lse = weighted_row(s, sees, mask, q, k, v, head, t, p, out);
            if (lse != NULL) lse[head * (s->lse_stride > 0 ? s->lse_stride : s->nq) + t] = row_lse;
        }
    }
    free(p);
}

/* dv_j += p_j do;  dp_j = do . v_j;  ds_j = p_j (dp_j - sum_i p_i dp_i);  dq += scale ds_j k_j, dk_j alike. */
void oracle_attend_backward(const oracle_shape *s, oracle_sees sees, const void *mask, const double *q,
                            const double *k, const double *v, const double *d_o, double *d_q, double *d_k,
                            double *d_v)
{
    double *p = row_buffer(s->nkv), *dp = row_buffer(s->nkv);
    const double scale = scale_of(s);
    for (int64_t t = 0; t < s->nq; t++) {
        for (int64_t head = 0; head < s->h; head++) {
            const int64_t kv_head = head / (s->h / s->hkv);
            const double *d_out = d_o + (t * s->h + head) * s->dv, *q_row = q + (t * s->h + head) * s->d;
            double *dq_row = d_q + (t * s->h + head) * s->d, mean = 0;
            softmax_row(s, sees, mask, q, k, head, t, p);
            for (int64_t j = 0; j < s->nkv; j++) {
                if (!sees(mask, head, t, j)) continue;
                dp[j] = dot(d_out, v + (j * s->hkv + kv_head) * s->dv, s->dv);
                mean += p[j] * dp[j];
            }
            for (int64_t j = 0; j < s->nkv; j++) {
                if (!sees(mask, head, t, j)) continue;
                const double ds = p[j] * (dp[j] - mean) * scale;
                const int64_t kv_row = j * s->hkv + kv_head;
                for (int64_t c = 0; c < s->dv; c++) d_v[kv_row * s->dv + c] += p[j] * d_out[c];
                for (int64_t c = 0; c < s->d; c++) {
                    dq_row[c] += ds * k[kv_row * s->d + c];
                    d_k[kv_row * s->d + c] += ds * q_row[c];
                }
            }
        }
    }
    free(p);
    free(dp);
}

bool oracle_range_sees(const void *range, int64_t head, int64_t t, int64_t j)
{
    const oracle_range *r = range;
    const int64_t position = (r->query_offset >= 0 ? r->query_offset : r->nkv - r->nq) + t;
    (void)head;
    if (r->causal) return j <= position && (r->window == 0 || j > position - r->window);
    return r->window == 0 || llabs(position - j) <= r->window / 2;
}
