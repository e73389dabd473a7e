/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model.c - the model's forward pass and its hand-written backward. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

bool model_create(lm_model *m, const lm_config *config, uint64_t seed)
{
    *m = (lm_model){.config = *config};
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim, inner = c->inner, n = c->context;
    m->layer = calloc((size_t)c->layers, sizeof *m->layer);
    bool ok = m->layer != NULL && params_create(m, seed);
    for (int32_t l = 0; l < c->layers && ok; l++) {
        lm_layer *a = &m->layer[l];
        float **const arrays[] = {&a->x,    &a->mid,   &a->h1,    &a->h2,    &a->inv1,
                                  &a->inv2, &a->q_raw, &a->k_raw, &a->inv_q, &a->inv_k};
        const int64_t columns[] = {w, w, w, w, 1, 1, w, kv, c->heads, c->kv_heads};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
            ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
        ok = ok && attention_allocate(c, &a->attention) && mlp_allocate(c, &a->mlp);
    }
    float **const arrays[] = {&m->x,          &m->normed,     &m->logits,    &m->d_x,
                              &m->d_normed,   &m->inverse,    &m->rope,      &m->scratch[0],
                              &m->scratch[1], &m->scratch[2], &m->scratch[3]};
    /* The scratch serves both halves of a layer; its last array also the slots of a mixture. */
    const int64_t widest = inner > w ? inner : w, slots = w * c->top;
    const int64_t columns[] = {
        w, w, BYTES, w, w, 1, dim, widest, widest, widest, widest > slots ? widest : slots};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
        ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
    if (!ok) return failure("no memory for the model") == 0;
    rope_table(m->rope, n, dim);
    return quern_context_create(NULL, &m->ctx) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}

void model_destroy(lm_model *m)
{
    for (int32_t l = 0; m->layer != NULL && l < m->config.layers; l++) {
        lm_layer *a = &m->layer[l];
        float *const arrays[] = {a->x,    a->mid,   a->h1,    a->h2,    a->inv1,
                                 a->inv2, a->q_raw, a->k_raw, a->inv_q, a->inv_k};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
        attention_free(&a->attention);
        mlp_free(&a->mlp);
    }
    float *const arrays[] = {m->x,    m->normed,     m->logits,     m->d_x,        m->d_normed,  m->inverse,
                             m->rope, m->scratch[0], m->scratch[1], m->scratch[2], m->scratch[3]};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    params_free(m);
    free(m->layer);
    served_free(m->served, m->config.layers);
    free(m->workspace);
    quern_context_destroy(m->ctx);
    *m = (lm_model){0};
}

static bool forward(lm_model *m, const uint8_t *text, int32_t n)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim;
    embed_forward(m->params, text, m->x, n, w);
    for (int32_t l = 0; l < c->layers; l++) {
        lm_layer *a = &m->layer[l];
        lm_attention *t = &a->attention;
        memcpy(a->x, m->x, (size_t)(n * w) * 4);
        norm_forward(a->x, layer_param(m, l, L_NORM1)->value, a->h1, a->inv1, n, w);
        gemm(false, false, n, w, w, a->h1, layer_param(m, l, L_Q)->value, a->q_raw, false);
        gemm(false, false, n, kv, w, a->h1, layer_param(m, l, L_K)->value, a->k_raw, false);
        gemm(false, false, n, kv, w, a->h1, layer_param(m, l, L_V)->value, t->v, false);
        norm_forward(a->q_raw, NULL, t->q, a->inv_q, (int64_t)n * c->heads, dim);
        norm_forward(a->k_raw, NULL, t->k, a->inv_k, (int64_t)n * c->kv_heads, dim);
        rope_apply(t->q, m->rope, n, c->heads, dim, 1.0f);
        rope_apply(t->k, m->rope, n, c->kv_heads, dim, 1.0f);
        if (!attention_forward(m, l, n)) return false;
        gemm(false, false, n, w, w, t->o, layer_param(m, l, L_O)->value, m->x, true);
        memcpy(a->mid, m->x, (size_t)(n * w) * 4);
        norm_forward(a->mid, layer_param(m, l, L_NORM2)->value, a->h2, a->inv2, n, w);
        if (!mlp_forward(m, l, a->h2, m->x, n)) return false;
    }
    norm_forward(m->x, m->params[P_NORM].value, m->normed, m->inverse, n, w);
    return true;
}

static bool backward(lm_model *m, const uint8_t *text, int32_t n)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim;
    float *d_h = m->d_normed, *d_o = m->scratch[0], *d_q = m->scratch[1], *d_k = m->scratch[2],
          *d_v = m->scratch[3], *d_raw = m->scratch[0];
    gemm(true, false, w, BYTES, n, m->normed, m->logits, m->params[P_HEAD].grad, false);
    gemm(false, true, n, w, BYTES, m->logits, m->params[P_HEAD].value, m->d_normed, false);
    memset(m->d_x, 0, (size_t)(n * w) * 4);
    if (!norm_backward(m->x, m->params[P_NORM].value, m->inverse, m->d_normed, m->d_x, m->params[P_NORM].grad,
                       n, w))
        return false;
    for (int32_t l = c->layers - 1; l >= 0; l--) {
        lm_layer *a = &m->layer[l];
        lm_attention *t = &a->attention;
        if (!mlp_backward(m, l, a->h2, m->d_x, d_h, n)) return false;
        if (!norm_backward(a->mid, layer_param(m, l, L_NORM2)->value, a->inv2, d_h, m->d_x,
                           layer_param(m, l, L_NORM2)->grad, n, w))
            return false;
        /* mid = x + o Wo */
        gemm(true, false, w, w, n, t->o, m->d_x, layer_param(m, l, L_O)->grad, false);
        gemm(false, true, n, w, w, m->d_x, layer_param(m, l, L_O)->value, d_o, false);
        if (!attention_backward(m, l, d_o, d_q, d_k, d_v, n)) return false;
        rope_apply(d_q, m->rope, n, c->heads, dim, -1.0f);
        rope_apply(d_k, m->rope, n, c->kv_heads, dim, -1.0f);
        gemm(true, false, w, kv, n, a->h1, d_v, layer_param(m, l, L_V)->grad, false);
        gemm(false, true, n, w, kv, d_v, layer_param(m, l, L_V)->value, d_h, false);
        memset(d_raw, 0, (size_t)(n * w) * 4);
        norm_backward(a->q_raw, NULL, a->inv_q, d_q, d_raw, NULL, (int64_t)n * c->heads, dim);
        gemm(true, false, w, w, n, a->h1, d_raw, layer_param(m, l, L_Q)->grad, false);
        gemm(false, true, n, w, w, d_raw, layer_param(m, l, L_Q)->value, d_h, true);
        memset(d_raw, 0, (size_t)(n * kv) * 4);
        norm_backward(a->k_raw, NULL, a->inv_k, d_k, d_raw, NULL, (int64_t)n * c->kv_heads, dim);
        gemm(true, false, w, kv, n, a->h1, d_raw, layer_param(m, l, L_K)->grad, false);
        gemm(false, true, n, w, kv, d_raw, layer_param(m, l, L_K)->value, d_h, true);
        if (!norm_backward(a->x, layer_param(m, l, L_NORM1)->value, a->inv1, d_h, m->d_x,
                           layer_param(m, l, L_NORM1)->grad, n, w))
            return false;
    }
    embed_backward(m->params, text, m->d_x, n, w);
    return true;
}

double model_loss(lm_model *m, const uint8_t *text, int32_t n, bool train)
{
    if (!forward(m, text, n)) return -1.0;
    gemm(false, false, n, BYTES, m->config.width, m->normed, m->params[P_HEAD].value, m->logits, false);
    const double loss = cross_entropy(m->logits, text + 1, n, train);
    return !train || backward(m, text, n) ? loss : -1.0;
}

const float *model_next(lm_model *m, const uint8_t *text, int32_t n)
{
    if (!forward(m, text, n)) return NULL;
    gemm(false, false, 1, BYTES, m->config.width, m->normed + (int64_t)(n - 1) * m->config.width,
         m->params[P_HEAD].value, m->logits, false);
    return m->logits;
}
