/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scores.c - a token's scores from its logits, in f32. */
#include "cpu/route/route.h"

#include <math.h>

static void softmax(const float *logits, int64_t experts, float *out)
{
    float most = -INFINITY, sum = 0.0f;
    for (int64_t e = 0; e < experts; e++) most = logits[e] > most ? logits[e] : most;
    for (int64_t e = 0; e < experts; e++) {
        out[e] = expf(logits[e] - most);
        sum += out[e];
    }
    for (int64_t e = 0; e < experts; e++) out[e] /= sum;
}

/* log(1 + e^x) without overflow. */
static float softplus(float x)
{
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) + (isnan(x) ? x : 0.0f);
}

float route_sigmoid(float x)
{
    const float small = expf(-fabsf(x));
    return x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

void route_scores(route_score score, const float *logits, int64_t experts, float *out)
{
    if (score == ROUTE_SOFTMAX) {
        softmax(logits, experts, out);
        return;
    }
    for (int64_t e = 0; e < experts; e++)
        out[e] = score == ROUTE_SIGMOID ? route_sigmoid(logits[e]) : sqrtf(softplus(logits[e]));
}
