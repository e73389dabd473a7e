/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* project.c - from a layer's normed input to what its attention takes, forward and backward: queries and keys
 * are normalised by head and rotated; the one key of a window, csa or hca layer has a weighted norm. */
#include "layer.h"

#include <string.h>

/* x = rope(norm(h1 W) w) by head; raw and inverse NULL: without norm, in x alone. */
static void head_forward(lm_model *m, int32_t layer, int64_t position, int32_t n, int which, float *raw,
                         const float *norm, float *inverse, float *x)
{
    const lm_config *c = &m->config;
    const lm_param *p = layer_param(m, layer, which);
    const int64_t dim = c->width / c->heads, heads = p->cols / dim, rotated = config_rotated(c);
    gemm(false, false, n, p->cols, c->width, m->layer[layer].h1, p->value, raw != NULL ? raw : x, false);
    if (raw != NULL) norm_forward(raw, norm, x, inverse, n * heads, dim);
    rope_apply(x, m->rope + position * rotated, n, heads, dim, rotated, 1.0f);
}

void project_forward(lm_model *m, int32_t layer, int64_t position, int32_t n)
{
    const lm_attention *a = &m->layer[layer].attention;
    const lm_param *v = layer_param(m, layer, L_V);
    head_forward(m, layer, position, n, L_Q, a->q_raw, NULL, a->inv_q, a->q);
    head_forward(m, layer, position, n, L_K, a->k_raw, layer_param(m, layer, L_KV_NORM)->value, a->inv_k,
                 a->k);
    if (a->v != NULL)
        gemm(false, false, n, v->cols, m->config.width, m->layer[layer].h1, v->value, a->v, false);
    if (a->index_q != NULL) head_forward(m, layer, position, n, L_INDEX_Q, NULL, NULL, NULL, a->index_q);
}

/* d of a rotated x -> the gradients of its matrix and its norm's weight; d_h += */
static bool head_backward(lm_model *m, int32_t layer, int32_t n, int which, const float *raw,
                          const lm_param *norm, const float *inverse, float *d, float *d_h)
{
    const lm_config *c = &m->config;
    const lm_param *p = layer_param(m, layer, which);
    const int64_t w = c->width, dim = w / c->heads, heads = p->cols / dim;
    float *d_raw = m->scratch[0];
    rope_apply(d, m->rope, n, heads, dim, config_rotated(c), -1.0f);
    memset(d_raw, 0, (size_t)(n * p->cols) * 4);
    if (!norm_backward(raw, norm != NULL ? norm->value : NULL, inverse, d, d_raw,
                       norm != NULL ? norm->grad : NULL, n * heads, dim))
        return false;
    gemm(true, false, w, p->cols, n, m->layer[layer].h1, d_raw, p->grad, false);
    gemm(false, true, n, w, p->cols, d_raw, p->value, d_h, true);
    return true;
}

bool project_backward(lm_model *m, int32_t layer, int32_t n, const lm_gradients *g)
{
    const lm_attention *a = &m->layer[layer].attention;
    const lm_param *v = layer_param(m, layer, L_V), *norm = layer_param(m, layer, L_KV_NORM);
    const int64_t w = m->config.width;
    if (a->v != NULL) {
        gemm(true, false, w, v->cols, n, m->layer[layer].h1, g->d_v, v->grad, false);
        gemm(false, true, n, w, v->cols, g->d_v, v->value, g->d_h, true);
    }
    return head_backward(m, layer, n, L_Q, a->q_raw, NULL, a->inv_q, g->d_q, g->d_h) &&
           head_backward(m, layer, n, L_K, a->k_raw, norm, a->inv_k, g->d_k, g->d_h);
}
