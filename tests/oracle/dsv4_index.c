/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index.c - the indexer's scores and choice in double. */
#include "dot.h"
#include "dsv4.h"

#include <math.h>
#include <stdlib.h>

int64_t oracle_dsv4_visible(int64_t entries, int64_t ratio, int64_t position)
{
    const int64_t whole = (position + 1) / ratio;
    return whole < entries ? whole : entries;
}

void oracle_dsv4_scores(const oracle_indexer *x, const double *q, const double *k, const double *w,
                        double *scores)
{
    const double c = 1 / sqrt((double)x->width) / sqrt((double)x->heads);
    for (int64_t t = 0; t < x->queries; t++) {
        const int64_t seen = oracle_dsv4_visible(x->entries, x->ratio, x->start + t);
        for (int64_t s = 0; s < seen; s++) {
            double sum = 0;
            for (int64_t h = 0; h < x->heads; h++) {
                const double dot = oracle_dot(q + (t * x->heads + h) * x->width, k + s * x->width, x->width);
                sum += w[t * x->heads + h] * (dot <= 0 ? 0 : dot);
            }
            scores[t * x->entries + s] = c * sum;
        }
    }
}

/* Whether score a of index i goes before score b of index j. */
static bool before(double a, int64_t i, double b, int64_t j)
{
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b) ? i < j : isnan(b);
    return a != b ? a > b : i < j;
}

int64_t oracle_dsv4_best(const double *scores, int64_t n, int64_t k, int32_t *idx)
{
    int64_t count = 0;
    for (int64_t s = 0; s < n; s++) {
        int64_t rank = 0;
        for (int64_t other = 0; other < n && rank < k; other++)
            rank += before(scores[other], other, scores[s], s);
        if (rank < k) idx[count++] = (int32_t)s;
    }
    for (int64_t i = count; i < k; i++) idx[i] = -1;
    return count;
}
