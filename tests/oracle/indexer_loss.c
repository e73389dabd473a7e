/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_loss.c - the loss of DeepSeek-V4's indexer in double, a query at a time from the definition. */
#include "oracle/indexer_loss.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* Marks the entries of a query; returns how many. */
static int64_t mark(const oracle_indexer_loss *o, int64_t row, char *in)
{
    const int64_t t = row % o->queries, seen = (o->start + t + 1) / o->ratio;
    int64_t count = 0;
    for (int64_t s = 0; s < o->entries; s++) in[s] = o->idx == NULL && s < seen;
    for (int64_t i = 0; o->idx != NULL && i < o->listed; i++) {
        const int32_t s = o->idx[row * o->listed + i];
        if (s >= 0 && s < o->entries && s < seen) in[s] = 1;
    }
    for (int64_t s = 0; s < o->entries; s++) count += in[s];
    return count;
}

/* T of the entries of a row. */
static void teach(const oracle_indexer_loss *o, int64_t row, const char *in, double *teacher)
{
    const int64_t b = row / o->queries, t = row % o->queries;
    const double *keys = o->kv_cmp + b * o->entries * o->dim;
    double mass = 0;
    for (int64_t s = 0; s < o->entries; s++) teacher[s] = 0;
    for (int64_t h = 0; h < o->heads; h++) {
        const double *q = o->q + (row * o->heads + h) * o->dim,
                     window = o->lse_win[(b * o->heads + h) * o->queries + t],
                     sink = o->sink != NULL ? o->sink[h] : -INFINITY;
        double most = fmax(window, sink), sum = 0;
        for (int64_t s = 0; s < o->entries; s++)
            if (in[s]) most = fmax(most, dot(q, keys + s * o->dim, o->dim) / sqrt((double)o->dim));
        for (int64_t s = 0; s < o->entries; s++)
            if (in[s]) sum += exp(dot(q, keys + s * o->dim, o->dim) / sqrt((double)o->dim) - most);
        sum += exp(window - most) + exp(sink - most);
        for (int64_t s = 0; s < o->entries; s++)
            if (in[s])
                teacher[s] += exp(dot(q, keys + s * o->dim, o->dim) / sqrt((double)o->dim) - most) / sum;
    }
    for (int64_t s = 0; s < o->entries; s++) mass += teacher[s];
    for (int64_t s = 0; s < o->entries; s++) teacher[s] /= fmax(mass, 0x1p-126);
}

static double size_of(const oracle_indexer_loss *o, double x)
{
    return o->sizes ? fabs(x) : x;
}

static double factor_of(const oracle_indexer_loss *o)
{
    return 1 / sqrt((double)o->width * (double)o->index_heads);
}

static double score_of(const oracle_indexer_loss *o, int64_t row, int64_t s)
{
    const double *k = o->k_index + (row / o->queries * o->entries + s) * o->width;
    double sum = 0;
    for (int64_t h = 0; h < o->index_heads; h++) {
        const int64_t at = row * o->index_heads + h;
        const double z = dot(o->q_index + at * o->width, k, o->width);
        sum += o->w[at] * (z > 0 ? z : 0);
    }
    return factor_of(o) * sum;
}

/* Adds an entry's gradient g to those of the operands. */
static void spread(const oracle_indexer_loss *o, int64_t row, int64_t s, double g, double *d_q, double *d_k,
                   double *d_w)
{
    const int64_t key = (row / o->queries * o->entries + s) * o->width;
    for (int64_t h = 0; h < o->index_heads; h++) {
        const int64_t at = row * o->index_heads + h;
        const double *q = o->q_index + at * o->width, z = dot(q, o->k_index + key, o->width);
        if (!(z > 0)) continue;
        if (d_w != NULL) d_w[at] += g * factor_of(o) * z;
        for (int64_t c = 0; c < o->width; c++) {
            if (d_q != NULL)
                d_q[at * o->width + c] += size_of(o, g * factor_of(o) * o->w[at] * o->k_index[key + c]);
            if (d_k != NULL) d_k[key + c] += size_of(o, g * factor_of(o) * o->w[at] * q[c]);
        }
    }
}

double oracle_indexer_loss_of(const oracle_indexer_loss *o, double *row_loss, double *d_q, double *d_k,
                              double *d_w)
{
    const int64_t all = o->batch * o->queries;
    char *in = malloc((size_t)o->entries + 1);
    double *teacher = malloc((size_t)(o->entries + 1) * sizeof *teacher), loss = 0;
    int64_t rows = 0;
    if (d_q != NULL) memset(d_q, 0, sizeof *d_q * (size_t)(all * o->index_heads * o->width));
    if (d_k != NULL) memset(d_k, 0, sizeof *d_k * (size_t)(o->batch * o->entries * o->width));
    if (d_w != NULL) memset(d_w, 0, sizeof *d_w * (size_t)(all * o->index_heads));
    for (int64_t row = 0; row < all; row++) rows += mark(o, row, in) > 0;
    for (int64_t row = 0; row < all; row++) {
        double most = -INFINITY, sum = 0, own = 0, total = 0;
        if (row_loss != NULL) row_loss[row] = 0;
        if (mark(o, row, in) == 0) continue;
        teach(o, row, in, teacher);
        for (int64_t s = 0; s < o->entries; s++)
            if (in[s]) most = fmax(most, score_of(o, row, s)), total += teacher[s];
        for (int64_t s = 0; s < o->entries; s++)
            if (in[s]) sum += exp(score_of(o, row, s) - most);
        for (int64_t s = 0; s < o->entries; s++) {
            if (!in[s]) continue;
            const double log_p = score_of(o, row, s) - most - log(sum), log_t = log(fmax(teacher[s], 1e-10)),
                         p = exp(log_p) * total;
            own += teacher[s] * (o->sizes ? 1 + fabs(log_t) + fabs(log_p) : log_t - log_p);
            spread(o, row, s,
                   o->lambda * (o->sizes ? p + teacher[s] : p - teacher[s]) / (double)(rows > 1 ? rows : 1),
                   d_q, d_k, d_w);
        }
        if (row_loss != NULL) row_loss[row] = own;
        loss += own;
    }
    free(in), free(teacher);
    return o->lambda * loss / (double)(rows > 1 ? rows : 1);
}
