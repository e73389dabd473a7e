/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mlp.c - the second half of a layer, forward and backward: a network for every byte and, in a mixture, `top`
 * of `experts` networks for each.
 *
 *   network(h) = (silu(h W1) * (h W3)) W2
 *   mlp(h) = network_0(h) + sum over the chosen e of weight_e network_e(h)
 *
 * Quern's router chooses the experts, weighs them (square root of softplus, renormalised) and orders the
 * bytes' slots by expert. Each expert then multiplies its own rows. A bias, which moves the choice alone,
 * follows the sign of each expert's load less the mean load, so that no expert starves.
 */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include <quern/moe.h>

static bool rows_allocate(lm_rows *r, int64_t rows, int64_t inner)
{
    const size_t n = (size_t)(rows * inner) * 4;
    *r = (lm_rows){malloc(n), malloc(n), malloc(n), malloc(n)};
    return r->gate != NULL && r->up != NULL && r->divisor != NULL && r->act != NULL;
}

static void rows_free(lm_rows *r)
{
    free(r->gate), free(r->up), free(r->divisor), free(r->act);
}

bool mlp_allocate(const lm_config *c, lm_mlp *a)
{
    const int64_t inner = config_expert_inner(c), slots = (int64_t)c->context * c->top;
    *a = (lm_mlp){0};
    if (!rows_allocate(&a->shared, c->context, inner)) return false;
    if (c->experts == 0) return true;
    a->in = malloc((size_t)(slots * c->width) * 4);
    a->out = malloc((size_t)(slots * c->width) * 4);
    a->experts = malloc((size_t)slots * 4);
    a->order = malloc((size_t)slots * 4);
    a->offsets = malloc((size_t)c->experts * 4);
    a->weights = malloc((size_t)slots * 4);
    a->d_weights = malloc((size_t)slots * 4);
    return rows_allocate(&a->routed, slots, inner) && a->in && a->out && a->experts && a->order &&
           a->offsets && a->weights && a->d_weights;
}

void mlp_free(lm_mlp *a)
{
    rows_free(&a->shared);
    rows_free(&a->routed);
    free(a->in), free(a->out), free(a->experts), free(a->order), free(a->offsets);
    free(a->weights), free(a->d_weights);
}

/* One network's rows, first ... first + n - 1 of `rows`. */
typedef struct network {
    lm_model *model;
    int32_t layer, index; /* of the stacks W1, W3, W2 */
    lm_rows rows;
    int64_t first, n;
} network;

static int64_t inner_of(const network *e)
{
    return config_expert_inner(&e->model->config);
}

/* The network's matrix in a stack, or its gradient. */
static float *matrix(const network *e, int which, bool gradient)
{
    const lm_param *p = layer_param(e->model, e->layer, which);
    return (gradient ? p->grad : p->value) + e->index * (p->rows / p->stack) * p->cols;
}

static void network_forward(const network *e, const float *h, float *y, bool accumulate)
{
    const int64_t w = e->model->config.width, inner = inner_of(e), at = e->first * inner;
    if (e->n == 0) return;
    gemm(false, false, e->n, inner, w, h, matrix(e, L_W1, false), e->rows.gate + at, false);
    gemm(false, false, e->n, inner, w, h, matrix(e, L_W3, false), e->rows.up + at, false);
    swiglu_forward(e->rows.gate + at, e->rows.up + at, e->rows.divisor + at, e->rows.act + at, e->n, inner);
    gemm(false, false, e->n, w, inner, e->rows.act + at, matrix(e, L_W2, false), y, accumulate);
}

/* d_y -> d_h, which may be the same memory, and the gradients of the matrices. */
static void network_backward(const network *e, const float *h, const float *d_y, float *d_h)
{
    lm_model *m = e->model;
    const int64_t w = m->config.width, inner = inner_of(e), at = e->first * inner;
    float *d_gate = m->scratch[0], *d_up = m->scratch[1], *d_act = m->scratch[2];
    if (e->n == 0) {
        memset(matrix(e, L_W1, true), 0, (size_t)(w * inner) * 4);
        memset(matrix(e, L_W3, true), 0, (size_t)(w * inner) * 4);
        memset(matrix(e, L_W2, true), 0, (size_t)(w * inner) * 4);
        return;
    }
    gemm(true, false, inner, w, e->n, e->rows.act + at, d_y, matrix(e, L_W2, true), false);
    gemm(false, true, e->n, inner, w, d_y, matrix(e, L_W2, false), d_act, false);
    swiglu_backward(e->rows.gate + at, e->rows.up + at, e->rows.divisor + at, d_act, d_gate, d_up,
                    e->n * inner);
    gemm(true, false, w, inner, e->n, h, d_gate, matrix(e, L_W1, true), false);
    gemm(true, false, w, inner, e->n, h, d_up, matrix(e, L_W3, true), false);
    gemm(false, true, e->n, w, inner, d_gate, matrix(e, L_W1, false), d_h, false);
    gemm(false, true, e->n, w, inner, d_up, matrix(e, L_W3, false), d_h, true);
}

/* The router's call: forward, or with d_h backward, which writes d_h and the router's gradient. */
static bool route(lm_model *m, int32_t layer, const float *h, float *d_h, int32_t n)
{
    const lm_config *c = &m->config;
    const lm_mlp *a = &m->layer[layer].mlp;
    const lm_param *router = layer_param(m, layer, L_ROUTER), *balance = layer_param(m, layer, L_BALANCE);
    const int64_t e = c->experts, w = c->width;
    const quern_tensor hidden = view(h, QUERN_F32, 2, n, w, 0, 0),
                       weight = view(router->value, QUERN_F32, 2, e, w, 0, 0),
                       bias = view(balance->value, QUERN_F32, 1, e, 0, 0, 0),
                       experts = view(a->experts, QUERN_I32, 2, n, c->top, 0, 0),
                       weights = view(a->weights, QUERN_F32, 2, n, c->top, 0, 0),
                       offsets = view(a->offsets, QUERN_I32, 1, e, 0, 0, 0),
                       order = view(a->order, QUERN_I32, 1, (int64_t)n * c->top, 0, 0, 0),
                       d_weights = view(a->d_weights, QUERN_F32, 2, n, c->top, 0, 0),
                       d_hidden = view(d_h, QUERN_F32, 2, n, w, 0, 0),
                       d_weight = view(router->grad, QUERN_F32, 2, e, w, 0, 0);
    quern_moe_route_params p = QUERN_MOE_ROUTE_PARAMS_INIT;
    p.score = QUERN_MOE_SCORE_SQRT_SOFTPLUS;
    p.top_k = c->top;
    p.renormalize = true;
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    t.hidden = &hidden;
    t.weight = &weight;
    t.bias = &bias;
    t.experts = &experts;
    t.weights = &weights;
    t.offsets = &offsets;
    t.permutation = &order;
    size_t bytes;
    if (d_h == NULL)
        return done(quern_moe_route_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_moe_route(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    t.d_weights = &d_weights;
    t.d_hidden = &d_hidden;
    t.d_weight = &d_weight;
    return done(quern_moe_route_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_moe_route_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

/* The rows of expert e, counted from 0. */
static network expert(lm_model *m, int32_t layer, int32_t e)
{
    const lm_mlp *a = &m->layer[layer].mlp;
    const int32_t first = e > 0 ? a->offsets[e - 1] : 0;
    return (network){m, layer, 1 + e, a->routed, first, a->offsets[e] - first};
}

bool mlp_forward(lm_model *m, int32_t layer, const float *h, float *x, int32_t n)
{
    const lm_config *c = &m->config;
    const lm_mlp *a = &m->layer[layer].mlp;
    const int64_t w = c->width, top = c->top;
    if (m->served != NULL) return served_forward(m, layer, h, x, n);
    const network all = {m, layer, 0, a->shared, 0, n};
    network_forward(&all, h, x, true);
    if (c->experts == 0) return true;
    if (!route(m, layer, h, NULL, n)) return false;
#pragma omp parallel for if (n > FEW_ROWS)
    for (int64_t r = 0; r < n * top; r++) memcpy(a->in + r * w, h + a->order[r] / top * w, (size_t)w * 4);
    for (int32_t e = 0; e < c->experts; e++) {
        const network one = expert(m, layer, e);
        network_forward(&one, a->in + one.first * w, a->out + one.first * w, false);
    }
    for (int64_t r = 0; r < n * top; r++) {
        float *to = x + a->order[r] / top * w;
        for (int64_t j = 0; j < w; j++) to[j] += a->weights[a->order[r]] * a->out[r * w + j];
    }
    return true;
}

/* Each expert's load less the mean load, whose sign its bias follows. */
static void balance(lm_model *m, int32_t layer, int32_t n)
{
    const lm_config *c = &m->config;
    float *grad = layer_param(m, layer, L_BALANCE)->grad;
    for (int32_t e = 0; e < c->experts; e++)
        grad[e] = (float)(expert(m, layer, e).n * c->experts - (int64_t)n * c->top);
}

bool mlp_backward(lm_model *m, int32_t layer, const float *h, const float *d_x, float *d_h, int32_t n)
{
    const lm_config *c = &m->config;
    const lm_mlp *a = &m->layer[layer].mlp;
    const int64_t w = c->width, top = c->top;
    float *d_router = m->scratch[0], *d_rows = m->scratch[3];
    const network all = {m, layer, 0, a->shared, 0, n};
    network_backward(&all, h, d_x, d_h);
    if (c->experts == 0) return true;
    balance(m, layer, n);
#pragma omp parallel for
    for (int64_t r = 0; r < n * top; r++) {
        const int32_t slot = a->order[r];
        const float *d = d_x + slot / top * w, *y = a->out + r * w;
        float dot = 0.0f;
        for (int64_t j = 0; j < w; j++) {
            dot += d[j] * y[j];
            d_rows[r * w + j] = a->weights[slot] * d[j];
        }
        a->d_weights[slot] = dot;
    }
    for (int32_t e = 0; e < c->experts; e++) {
        const network one = expert(m, layer, e);
        float *rows = d_rows + one.first * w;
        network_backward(&one, a->in + one.first * w, rows, rows);
    }
    if (!route(m, layer, h, d_router, n)) return false;
    for (int64_t i = 0; i < n * w; i++) d_h[i] += d_router[i];
    for (int64_t r = 0; r < n * top; r++) {
        float *to = d_h + a->order[r] / top * w;
        for (int64_t j = 0; j < w; j++) to[j] += d_rows[r * w + j];
    }
    return true;
}
