/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "oracle/moe.h"

#include <math.h>

void oracle_route_scores(oracle_score score, const double *logits, int64_t experts, double *scores)
{
    double most = -INFINITY, sum = 0;
    for (int64_t e = 0; e < experts; e++) most = fmax(most, logits[e]);
    for (int64_t e = 0; e < experts; e++) {
        const double x = logits[e];
        if (score == ORACLE_SOFTMAX) scores[e] = exp(x - most);
        else if (score == ORACLE_SIGMOID) scores[e] = 1 / (1 + exp(-x));
        else scores[e] = sqrt(fmax(x, 0) + log1p(exp(-fabs(x))));
        sum += scores[e];
    }
    for (int64_t e = 0; score == ORACLE_SOFTMAX && e < experts; e++) scores[e] /= sum;
}

void oracle_route_weights(const double *scores, const int32_t *chosen, int64_t k, bool renormalize,
                          double scale, double *weights)
{
    double sum = 1e-20;
    for (int64_t j = 0; j < k; j++) sum += scores[chosen[j]];
    for (int64_t j = 0; j < k; j++) weights[j] = scores[chosen[j]] * scale / (renormalize ? sum : 1);
}

double oracle_route_loss(oracle_score score, const double *logits, int64_t experts, const int32_t *chosen,
                         int64_t k, bool renormalize, double scale, const double *d_weights)
{
    double scores[512], weights[512], loss = 0;
    oracle_route_scores(score, logits, experts, scores);
    oracle_route_weights(scores, chosen, k, renormalize, scale, weights);
    for (int64_t j = 0; j < k; j++) loss += d_weights[j] * weights[j];
    return loss;
}
