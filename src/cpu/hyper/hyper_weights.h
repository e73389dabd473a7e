/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_weights.h - a token's weights from its sums, and the gradient: sigmoids, a softmax, and
 * normalisations of rows and columns in turn (Sinkhorn and Knopp 1967).
 *
 * A lane is a token, so a step of a 4 x 4 matrix is 16 vectors and the divisions of LANES tokens take as long
 * as one. The backward runs the forward again and keeps the matrix after every normalisation, with the
 * factors of its rows or columns, 2 iterations (n n + n) vectors: Y = X / (sum X + eps) has dX = (dY - sum dY
 * Y) / (sum X + eps). Bound by the chain of dependent steps; 20 iterations of 4 copies take 3% of the pass.
 */
#ifndef QUERN_CPU_HYPER_WEIGHTS_H
#define QUERN_CPU_HYPER_WEIGHTS_H

#include "cpu/hyper/hyper_kernels.h"
#include "cpu/kernels/vector.h"

enum { WEIGHTS_MOST = HYPER_COPIES * (HYPER_COPIES + 2) };

/* LANES tokens. */
typedef struct token_lanes {
    const hyper_weights *w;
    int64_t token;
    int32_t count, weights;                          /* tokens that are there; J */
    vfloat root;                                     /* 1 / sqrt(mean square + rms_eps) */
    vfloat mean[WEIGHTS_MOST], weight[WEIGHTS_MOST]; /* sums times root; pre, post, comb */
    vfloat soft[HYPER_COPIES * HYPER_COPIES];        /* the softmax of comb */
    float *trace;                                    /* NULL: nothing is kept */
} token_lanes;

INLINE vfloat gather(const token_lanes *l, const float *from, int64_t at)
{
    float lanes[LANES] = {0};
    for (int32_t i = 0; i < l->count; i++) lanes[i] = from[(l->token + i) * l->w->ld + at];
    return v_load(lanes);
}

INLINE void scatter(const token_lanes *l, float *to, int64_t at, vfloat v)
{
    float lanes[LANES];
    v_store(lanes, v);
    for (int32_t i = 0; i < l->count; i++) to[(l->token + i) * l->w->ld + at] = lanes[i];
}

INLINE vfloat exponential(vfloat x)
{
    const vfloat y = x * 1.44269504f;
    return v_exp2(v_select(y > 126.0f, v_splat(126.0f), y)); /* NaN stays */
}

INLINE vfloat sigmoid(vfloat x)
{
    return 1.0f / (1.0f + exponential(-x));
}

INLINE vfloat square_root(vfloat v)
{
    float lanes[LANES];
    v_store(lanes, v);
    for (int i = 0; i < LANES; i++) lanes[i] = sqrtf(lanes[i]);
    return v_load(lanes);
}

/* Which of the scales weight j has. */
INLINE int32_t part_of(int32_t copies, int32_t j)
{
    return j < copies ? 0 : j < 2 * copies ? 1 : 2;
}

/* Normalises the rows, or the columns, of n x n; the factors go to `factor`. */
INLINE void normalise(vfloat *c, int32_t n, bool rows, float eps, vfloat *factor)
{
    const int32_t along = rows ? 1 : n, across = rows ? n : 1;
    for (int32_t g = 0; g < n; g++) {
        vfloat sum = c[g * across];
        for (int32_t i = 1; i < n; i++) sum += c[g * across + i * along];
        factor[g] = 1.0f / (sum + eps);
        for (int32_t i = 0; i < n; i++) c[g * across + i * along] *= factor[g];
    }
}

INLINE void normalise_backward(vfloat *d, const float *kept, int32_t n, bool rows)
{
    const int32_t along = rows ? 1 : n, across = rows ? n : 1;
    for (int32_t g = 0; g < n; g++) {
        vfloat sum = {0};
        for (int32_t i = 0; i < n; i++) {
            const int32_t at = g * across + i * along;
            sum = v_fma(d[at], v_load(kept + at * LANES), sum);
        }
        const vfloat factor = v_load(kept + (n * n + g) * LANES);
        for (int32_t i = 0; i < n; i++) {
            const int32_t at = g * across + i * along;
            d[at] = (d[at] - sum) * factor;
        }
    }
}

/* The softmax of each row of n, plus eps. */
INLINE void soften(token_lanes *l, vfloat *c, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        vfloat most = c[i * n], sum = {0};
        for (int32_t k = 1; k < n; k++) most = v_max(c[i * n + k], most);
        for (int32_t k = 0; k < n; k++) {
            c[i * n + k] = exponential(c[i * n + k] - most);
            sum += c[i * n + k];
        }
        const vfloat factor = 1.0f / sum;
        for (int32_t k = 0; k < n; k++) {
            l->soft[i * n + k] = c[i * n + k] * factor;
            c[i * n + k] = l->soft[i * n + k] + l->w->eps;
        }
    }
}

/* Step 0 is of columns, then rows and columns in turn. */
INLINE void iterate(token_lanes *l, vfloat *c, int32_t n)
{
    vfloat factor[HYPER_COPIES];
    for (int32_t step = 0; step < 2 * l->w->iterations - 1; step++) {
        normalise(c, n, step % 2 == 1, l->w->eps, factor);
        if (l->trace == NULL) continue;
        float *kept = l->trace + (int64_t)step * n * (n + 1) * LANES;
        for (int32_t i = 0; i < n * n; i++) v_store(kept + i * LANES, c[i]);
        for (int32_t g = 0; g < n; g++) v_store(kept + (n * n + g) * LANES, factor[g]);
    }
}

INLINE void forward_lanes(token_lanes *l)
{
    const hyper_weights *w = l->w;
    const int32_t n = w->copies;
    const vfloat square = gather(l, w->sums, l->weights) / (float)w->width;
    l->root = 1.0f / square_root(square + w->rms_eps);
    for (int32_t j = 0; j < l->weights; j++) {
        l->mean[j] = gather(l, w->sums, j) * l->root;
        l->weight[j] = v_fma(l->mean[j], v_splat(w->scale[part_of(n, j)]), v_splat(w->base[j]));
    }
    for (int32_t i = 0; i < n; i++) l->weight[i] = sigmoid(l->weight[i]) + w->eps;
    if (w->head) return;
    for (int32_t i = n; i < 2 * n; i++) l->weight[i] = 2.0f * sigmoid(l->weight[i]);
    soften(l, l->weight + 2 * n, n);
    iterate(l, l->weight + 2 * n, n);
}

INLINE token_lanes lanes_at(const hyper_weights *w, int64_t token, float *trace)
{
    token_lanes l;
    l.w = w;
    l.token = token;
    l.count = w->tokens - token < LANES ? (int32_t)(w->tokens - token) : LANES;
    l.weights = w->head ? w->copies : w->copies * (w->copies + 2);
    l.trace = trace;
    return l;
}

static void weights(const hyper_weights *w)
{
    for (int64_t token = 0; token < w->tokens; token += LANES) {
        token_lanes l = lanes_at(w, token, NULL);
        forward_lanes(&l);
        for (int32_t j = 0; j < l.weights; j++) scatter(&l, w->weights, j, l.weight[j]);
    }
}

/* d becomes the gradient of the logits. */
INLINE void backward_lanes(const token_lanes *l, vfloat *d)
{
    const int32_t n = l->w->copies;
    for (int32_t i = 0; i < n; i++) {
        const vfloat s = l->weight[i] - l->w->eps;
        d[i] *= s * (1.0f - s);
    }
    if (l->w->head) return;
    for (int32_t i = n; i < 2 * n; i++) {
        const vfloat s = 0.5f * l->weight[i];
        d[i] *= 2.0f * s * (1.0f - s);
    }
    vfloat *c = d + 2 * n;
    for (int32_t step = 2 * l->w->iterations - 2; step >= 0; step--)
        normalise_backward(c, l->trace + (int64_t)step * n * (n + 1) * LANES, n, step % 2 == 1);
    for (int32_t i = 0; i < n; i++) {
        vfloat sum = {0};
        for (int32_t k = 0; k < n; k++) sum = v_fma(c[i * n + k], l->soft[i * n + k], sum);
        for (int32_t k = 0; k < n; k++) c[i * n + k] = l->soft[i * n + k] * (c[i * n + k] - sum);
    }
}

INLINE double lanes_total(const token_lanes *l, vfloat v)
{
    float lanes[LANES];
    double sum = 0;
    v_store(lanes, v);
    for (int32_t i = 0; i < l->count; i++) sum += (double)lanes[i];
    return sum;
}

static void weights_backward(const hyper_weights *w)
{
    for (int64_t token = 0; token < w->tokens; token += LANES) {
        token_lanes l = lanes_at(w, token, w->trace);
        vfloat d[WEIGHTS_MOST], along = {0};
        forward_lanes(&l);
        for (int32_t j = 0; j < l.weights; j++) d[j] = gather(&l, w->d_weights, j);
        backward_lanes(&l, d);
        for (int32_t j = 0; j < l.weights; j++) {
            const int32_t part = part_of(w->copies, j);
            w->d_base[j] += lanes_total(&l, d[j]);
            w->d_scale[part] += lanes_total(&l, d[j] * l.mean[j]);
            const vfloat d_mean = d[j] * w->scale[part];
            along = v_fma(d_mean, l.mean[j], along);
            scatter(&l, w->d_sums, j, d_mean * l.root);
        }
        scatter(&l, w->d_sums, l.weights, -along * l.root * l.root / (float)w->width);
    }
}

#define HYPER_WEIGHTS .weights = weights, .weights_backward = weights_backward

#endif
