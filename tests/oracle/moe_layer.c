/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "oracle/moe_layer.h"

#include "oracle/dot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double *doubles(int64_t n)
{
    double *p = calloc((size_t)n + 1, sizeof *p);
    if (p == NULL) abort();
    return p;
}

/* An expert, the shared one too, and what a row becomes in it. */
typedef struct expert {
    int64_t dim, width;
    const double *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
} expert;

static expert expert_at(const oracle_layer *m, int64_t e)
{
    const int64_t i = m->width, d = m->dim;
    const double *rows = m->gate_up + e * 2 * i * d,
                 *bias = m->gate_up_bias != NULL ? m->gate_up_bias + e * 2 * i : NULL;
    return (expert){d,
                    i,
                    rows,
                    rows + i * d,
                    m->down + e * d * i,
                    bias,
                    bias != NULL ? bias + i : NULL,
                    m->down_bias != NULL ? m->down_bias + e * d : NULL};
}

static expert shared_expert(const oracle_layer *m)
{
    return (expert){m->dim, m->shared_width, m->shared_gate, m->shared_up, m->shared_down, NULL, NULL, NULL};
}

/* gate and up, [2][width]. */
static void project(const expert *x, const double *row, double *h)
{
    for (int64_t i = 0; i < x->width; i++) {
        h[i] = oracle_dot(x->gate + i * x->dim, row, x->dim) + (x->gate_bias != NULL ? x->gate_bias[i] : 0);
        h[x->width + i] =
            oracle_dot(x->up + i * x->dim, row, x->dim) + (x->up_bias != NULL ? x->up_bias[i] : 0);
    }
}

static double clamped(const oracle_layer *m, double x, bool below)
{
    if (m->limit > 0 && x > m->limit) return m->limit;
    return m->limit > 0 && below && x < -m->limit ? -m->limit : x;
}

static void activate(const oracle_layer *m, const double *h, int64_t width, double *act)
{
    for (int64_t i = 0; i < width; i++) {
        const double g = clamped(m, h[i], false), u = clamped(m, h[width + i], true);
        act[i] = g / (1 + exp(-m->alpha * g)) * (u + m->beta);
    }
}

/* d of act to d of h. */
static void activate_backward(const oracle_layer *m, const double *h, int64_t width, const double *d,
                              double *d_h)
{
    for (int64_t i = 0; i < width; i++) {
        const double gate = h[i], up = h[width + i], g = clamped(m, gate, false), u = clamped(m, up, true);
        const double s = 1 / (1 + exp(-m->alpha * g));
        d_h[i] =
            clamped(m, gate, false) == gate ? d[i] * (u + m->beta) * (s + m->alpha * g * s * (1 - s)) : 0;
        d_h[width + i] = clamped(m, up, true) == up ? d[i] * g * s : 0;
    }
}

/* A routed expert's steps for a token: the row that it takes, h, the activation that it takes, y. */
typedef struct steps {
    double *row, *h, *act, *y;
} steps;

static steps make_steps(const expert *x)
{
    return (steps){doubles(x->dim), doubles(2 * x->width), doubles(x->width), doubles(x->dim)};
}

static void free_steps(steps *s)
{
    free(s->row), free(s->h), free(s->act), free(s->y);
}

/* e: the expert's number, or -1 for the shared one, which is not quantised. */
static void run(const oracle_layer *m, const expert *x, int64_t e, int64_t t, steps *s)
{
    memcpy(s->row, m->x + t * m->dim, sizeof *s->row * (size_t)m->dim);
    if (m->quantise != NULL && e >= 0) m->quantise(m->arg, false, e, s->row, m->dim);
    project(x, s->row, s->h);
    activate(m, s->h, x->width, s->act);
    if (m->quantise != NULL && e >= 0) m->quantise(m->arg, true, e, s->act, x->width);
    for (int64_t d = 0; d < m->dim; d++)
        s->y[d] = oracle_dot(x->down + d * x->width, s->act, x->width) +
                  (x->down_bias != NULL ? x->down_bias[d] : 0);
}

/* The logits of a token. */
static void logits_of(const oracle_layer *m, int64_t t, double *logits)
{
    for (int64_t e = 0; e < m->experts; e++)
        logits[e] = m->logits != NULL ? m->logits[t * m->experts + e]
                                      : oracle_dot(m->x + t * m->dim, m->router + e * m->dim, m->dim);
}

static void weights_of(const oracle_layer *m, int64_t t, double *weights)
{
    if (m->weights != NULL) {
        memcpy(weights, m->weights + t * m->top_k, sizeof *weights * (size_t)m->top_k);
        return;
    }
    double *logits = doubles(m->experts), *scores = doubles(m->experts);
    logits_of(m, t, logits);
    oracle_route_scores(m->score, logits, m->experts, scores);
    oracle_route_weights(scores, m->chosen + t * m->top_k, m->top_k, m->renormalize, m->scale, weights);
    free(logits), free(scores);
}

void oracle_layer_forward(const oracle_layer *m, double *out)
{
    double *weights = doubles(m->top_k);
    memset(out, 0, sizeof *out * (size_t)(m->tokens * m->dim));
    for (int64_t t = 0; t < m->tokens; t++) {
        double *o = out + t * m->dim;
        weights_of(m, t, weights);
        for (int64_t j = 0; j < m->top_k; j++) {
            const int64_t e = m->chosen[t * m->top_k + j];
            const expert x = expert_at(m, e);
            steps s = make_steps(&x);
            run(m, &x, e, t, &s);
            for (int64_t d = 0; d < m->dim; d++) o[d] += weights[j] * s.y[d];
            free_steps(&s);
        }
        if (m->shared_gate == NULL) continue;
        const expert x = shared_expert(m);
        steps s = make_steps(&x);
        run(m, &x, -1, t, &s);
        for (int64_t d = 0; d < m->dim; d++) o[d] += s.y[d];
        free_steps(&s);
    }
    free(weights);
}

/* Where an expert's gradients stand; NULL: it has none. */
typedef struct expert_gradients {
    double *up_bias, *down_bias, *gate_up, *down;
} expert_gradients;

/* Adds an expert's gradients for d of its y. */
static void expert_backward(const oracle_layer *m, const expert *x, const steps *s, const double *d_y,
                            double *d_x, expert_gradients to)
{
    double *d_act = doubles(x->width), *d_h = doubles(2 * x->width);
    for (int64_t d = 0; d < m->dim; d++) {
        for (int64_t i = 0; i < x->width; i++) d_act[i] += d_y[d] * x->down[d * x->width + i];
        for (int64_t i = 0; to.down != NULL && i < x->width; i++)
            to.down[d * x->width + i] += d_y[d] * s->act[i];
        if (to.down_bias != NULL) to.down_bias[d] += d_y[d];
    }
    activate_backward(m, s->h, x->width, d_act, d_h);
    for (int64_t i = 0; i < x->width; i++)
        for (int64_t d = 0; d < m->dim; d++)
            d_x[d] += d_h[i] * x->gate[i * m->dim + d] + d_h[x->width + i] * x->up[i * m->dim + d];
    for (int64_t i = 0; i < 2 * x->width; i++) {
        if (to.up_bias != NULL) to.up_bias[i] += d_h[i];
        for (int64_t d = 0; to.gate_up != NULL && d < m->dim; d++)
            to.gate_up[i * m->dim + d] += d_h[i] * s->row[d];
    }
    free(d_act), free(d_h);
}

/* d of slot j's weight by logit e, by central differences. */
static double slot_gradient(const oracle_layer *m, int64_t t, double *logits, int64_t e, int64_t j)
{
    const double step = 1e-5, at = logits[e];
    double *d = doubles(m->top_k), loss[2];
    d[j] = 1;
    for (int side = 0; side < 2; side++) {
        logits[e] = at + (side ? step : -step);
        loss[side] = oracle_route_loss(m->score, logits, m->experts, m->chosen + t * m->top_k, m->top_k,
                                       m->renormalize, m->scale, d);
    }
    logits[e] = at;
    free(d);
    return (loss[1] - loss[0]) / (2 * step);
}

static void router_backward(const oracle_layer *m, int64_t t, const oracle_layer_gradients *g)
{
    double *logits = doubles(m->experts);
    logits_of(m, t, logits);
    for (int64_t e = 0; e < m->experts; e++) {
        double d = 0, terms = 0;
        for (int64_t j = 0; j < m->top_k; j++) {
            const double by_slot = slot_gradient(m, t, logits, e, j);
            d += by_slot * g->weights[t * m->top_k + j];
            terms += fabs(by_slot) * g->weights_terms[t * m->top_k + j];
        }
        g->logits[t * m->experts + e] = d;
        g->logits_terms[t * m->experts + e] = terms;
        for (int64_t i = 0; m->logits == NULL && i < m->dim; i++) {
            const double x = m->x[t * m->dim + i];
            g->x[t * m->dim + i] += d * m->router[e * m->dim + i];
            g->router[e * m->dim + i] += d * x;
            g->router_terms[e * m->dim + i] = hypot(g->router_terms[e * m->dim + i], terms * x);
        }
    }
    free(logits);
}

void oracle_layer_backward(const oracle_layer *m, const double *d_out, const oracle_layer_gradients *g)
{
    double *weights = doubles(m->top_k), *d_y = doubles(m->dim);
    memset(g->x, 0, sizeof *g->x * (size_t)(m->tokens * m->dim));
    memset(g->router, 0, sizeof *g->router * (size_t)(m->experts * m->dim));
    memset(g->router_terms, 0, sizeof *g->router_terms * (size_t)(m->experts * m->dim));
    memset(g->gate_up_bias, 0, sizeof *g->gate_up_bias * (size_t)(m->experts * 2 * m->width));
    memset(g->down_bias, 0, sizeof *g->down_bias * (size_t)(m->experts * m->dim));
    const size_t matrix = (size_t)(m->experts * m->width * m->dim);
    if (g->gate_up != NULL) memset(g->gate_up, 0, sizeof *g->gate_up * 2 * matrix);
    if (g->down != NULL) memset(g->down, 0, sizeof *g->down * matrix);
    for (int64_t t = 0; t < m->tokens; t++) {
        const double *d = d_out + t * m->dim;
        weights_of(m, t, weights);
        for (int64_t j = 0; j < m->top_k; j++) {
            const int64_t e = m->chosen[t * m->top_k + j];
            const expert x = expert_at(m, e);
            steps s = make_steps(&x);
            run(m, &x, e, t, &s);
            g->weights[t * m->top_k + j] = oracle_dot(d, s.y, m->dim);
            const double size =
                sqrt(oracle_dot(d, d, m->dim) * oracle_dot(s.y, s.y, m->dim) / (double)m->dim);
            g->weights_terms[t * m->top_k + j] = fmax(size, fabs(g->weights[t * m->top_k + j]));
            for (int64_t i = 0; i < m->dim; i++) d_y[i] = weights[j] * d[i];
            const expert_gradients to = {g->gate_up_bias + e * 2 * m->width, g->down_bias + e * m->dim,
                                         g->gate_up != NULL ? g->gate_up + e * 2 * m->width * m->dim : NULL,
                                         g->down != NULL ? g->down + e * m->dim * m->width : NULL};
            expert_backward(m, &x, &s, d_y, g->x + t * m->dim, to);
            free_steps(&s);
        }
        if (m->weights == NULL) router_backward(m, t, g);
        if (m->shared_gate == NULL) continue;
        const expert x = shared_expert(m);
        steps s = make_steps(&x);
        run(m, &x, -1, t, &s);
        expert_backward(m, &x, &s, d, g->x + t * m->dim, (expert_gradients){0});
        free_steps(&s);
    }
    free(weights), free(d_y);
}
