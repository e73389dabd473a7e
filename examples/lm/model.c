/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model.c - the model's parameters, forward and hand-written backward. */
#include "lm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct lm_layer {
    float *x, *mid;       /* input of the attention half and of the MLP half */
    float *h1, *h2;       /* their norms */
    float *inv1, *inv2;   /* 1 / rms */
    float *q_raw, *k_raw; /* before norm and rope */
    float *inv_q, *inv_k;
    float *gate, *up, *act; /* [n][inner] */
    lm_attention attention;
};

static lm_param *layer_param(lm_model *m, int32_t layer, int which)
{
    return &m->params[P_LAYERS + layer * L_COUNT + which];
}

/* Declares parameter `index`, filled with N(0, spread), or with ones where spread < 0. */
static bool declare(lm_model *m, int32_t index, const char *name, int64_t rows, int64_t cols, bool muon,
                    float rate, float spread, uint64_t *seed)
{
    lm_param *p = &m->params[index];
    snprintf(p->name, sizeof p->name, "%s", name);
    p->rows = rows;
    p->cols = cols;
    p->muon = muon;
    p->rate = rate;
    const size_t n = (size_t)(rows * cols);
    p->value = malloc(n * 4);
    p->grad = calloc(n, 4);
    p->first = calloc(n, 4);
    p->second = muon ? NULL : calloc(n, 4);
    if (!p->value || !p->grad || !p->first || (!muon && !p->second)) return false;
    for (size_t i = 0; i < n; i++)
        p->value[i] = spread < 0.0f ? 1.0f : spread > 0.0f ? spread * random_normal(seed) : 0.0f;
    return true;
}

bool model_create(lm_model *m, const lm_config *config, uint64_t seed)
{
    *m = (lm_model){.config = *config};
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim, inner = c->inner, n = c->context;
    const float in_w = 1.0f / sqrtf((float)w), in_inner = 1.0f / sqrtf((float)inner);
    m->param_count = P_LAYERS + c->layers * L_COUNT;
    m->params = calloc((size_t)m->param_count, sizeof *m->params);
    m->layer = calloc((size_t)c->layers, sizeof *m->layer);
    if (!m->params || !m->layer) return false;
    bool ok = declare(m, P_BYTE, "embed.byte", BYTES, w, false, 1.0f, 0.5f, &seed) &&
              declare(m, P_PAIR, "embed.pair", HASH_ROWS, w, false, 1.0f, 0.1f, &seed) &&
              declare(m, P_TRIPLE, "embed.triple", HASH_ROWS, w, false, 1.0f, 0.1f, &seed) &&
              declare(m, P_NORM, "norm", 1, w, false, 0.3f, -1.0f, &seed) &&
              declare(m, P_HEAD, "head", w, BYTES, false, 0.3f, 0.02f, &seed);
    for (int32_t l = 0; l < c->layers && ok; l++) {
        const struct {
            const char *name;
            int64_t rows, cols;
            bool muon;
            float spread;
        } list[L_COUNT] = {
            [L_NORM1] = {"norm1", 1, w, false, -1.0f}, [L_Q] = {"q", w, w, true, in_w},
            [L_K] = {"k", w, kv, true, in_w},          [L_V] = {"v", w, kv, true, in_w},
            [L_O] = {"o", w, w, true, 0.0f},           [L_GATE] = {"gate", c->heads * 3, dim, false, 0.0f},
            [L_NORM2] = {"norm2", 1, w, false, -1.0f}, [L_W1] = {"w1", w, inner, true, in_w},
            [L_W3] = {"w3", w, inner, true, in_w},     [L_W2] = {"w2", inner, w, true, 0.1f * in_inner}};
        for (int i = 0; i < L_COUNT && ok; i++) {
            char name[48];
            snprintf(name, sizeof name, "layers.%d.%s", l, list[i].name);
            ok = declare(m, P_LAYERS + l * L_COUNT + i, name, list[i].rows, list[i].cols, list[i].muon, 0.3f,
                         list[i].spread, &seed);
        }
        lm_layer *a = &m->layer[l];
        float **const arrays[] = {&a->x,     &a->mid,   &a->h1,    &a->h2,   &a->inv1, &a->inv2, &a->q_raw,
                                  &a->k_raw, &a->inv_q, &a->inv_k, &a->gate, &a->up,   &a->act};
        const int64_t columns[] = {w, w, w, w, 1, 1, w, kv, c->heads, c->kv_heads, inner, inner, inner};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
            ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
        ok = ok && attention_allocate(c, &a->attention);
    }
    float **const arrays[] = {&m->x,          &m->normed,     &m->logits,    &m->d_x,
                              &m->d_normed,   &m->inverse,    &m->rope,      &m->scratch[0],
                              &m->scratch[1], &m->scratch[2], &m->scratch[3]};
    const int64_t widest = inner > w ? inner : w; /* the scratch serves both halves of a layer */
    const int64_t columns[] = {w, w, BYTES, w, w, 1, dim, widest, widest, widest, widest};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
        ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
    if (!ok) return failure("no memory for the model") == 0;
    rope_table(m->rope, n, dim);
    return quern_context_create(NULL, &m->ctx) == QUERN_OK || failure("%s", quern_last_error(NULL)) == 0;
}

void model_destroy(lm_model *m)
{
    for (int32_t i = 0; m->params != NULL && i < m->param_count; i++) {
        lm_param *p = &m->params[i];
        free(p->value), free(p->grad), free(p->first), free(p->second);
    }
    for (int32_t l = 0; m->layer != NULL && l < m->config.layers; l++) {
        lm_layer *a = &m->layer[l];
        float *const arrays[] = {a->x,     a->mid,   a->h1,    a->h2,   a->inv1, a->inv2, a->q_raw,
                                 a->k_raw, a->inv_q, a->inv_k, a->gate, a->up,   a->act};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
        attention_free(&a->attention);
    }
    float *const arrays[] = {m->x,    m->normed,     m->logits,     m->d_x,        m->d_normed,  m->inverse,
                             m->rope, m->scratch[0], m->scratch[1], m->scratch[2], m->scratch[3]};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) free(arrays[i]);
    free(m->params);
    free(m->layer);
    free(m->workspace);
    quern_context_destroy(m->ctx);
    *m = (lm_model){0};
}

static bool forward(lm_model *m, const uint8_t *text, int32_t n)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim, inner = c->inner;
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
        if (!attention_forward(m, t, layer_param(m, l, L_GATE)->value, n)) return false;
        gemm(false, false, n, w, w, t->o, layer_param(m, l, L_O)->value, m->x, true);
        memcpy(a->mid, m->x, (size_t)(n * w) * 4);
        norm_forward(a->mid, layer_param(m, l, L_NORM2)->value, a->h2, a->inv2, n, w);
        gemm(false, false, n, inner, w, a->h2, layer_param(m, l, L_W1)->value, a->gate, false);
        gemm(false, false, n, inner, w, a->h2, layer_param(m, l, L_W3)->value, a->up, false);
        swiglu_forward(a->gate, a->up, a->act, n * inner);
        gemm(false, false, n, w, inner, a->act, layer_param(m, l, L_W2)->value, m->x, true);
    }
    norm_forward(m->x, m->params[P_NORM].value, m->normed, m->inverse, n, w);
    return true;
}

static bool backward(lm_model *m, const uint8_t *text, int32_t n)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width, dim = w / c->heads, kv = c->kv_heads * dim, inner = c->inner;
    float *d_gate = m->scratch[0], *d_up = m->scratch[1], *d_act = m->scratch[2], *d_h = m->d_normed;
    float *d_o = m->scratch[0], *d_q = m->scratch[1], *d_k = m->scratch[2], *d_v = m->scratch[3],
          *d_raw = m->scratch[0];
    gemm(true, false, w, BYTES, n, m->normed, m->logits, m->params[P_HEAD].grad, false);
    gemm(false, true, n, w, BYTES, m->logits, m->params[P_HEAD].value, m->d_normed, false);
    memset(m->d_x, 0, (size_t)(n * w) * 4);
    if (!norm_backward(m->x, m->params[P_NORM].value, m->inverse, m->d_normed, m->d_x, m->params[P_NORM].grad,
                       n, w))
        return false;
    for (int32_t l = c->layers - 1; l >= 0; l--) {
        lm_layer *a = &m->layer[l];
        lm_attention *t = &a->attention;
        /* x = mid + act W2 */
        gemm(true, false, inner, w, n, a->act, m->d_x, layer_param(m, l, L_W2)->grad, false);
        gemm(false, true, n, inner, w, m->d_x, layer_param(m, l, L_W2)->value, d_act, false);
        swiglu_backward(a->gate, a->up, d_act, d_gate, d_up, n * inner);
        gemm(true, false, w, inner, n, a->h2, d_gate, layer_param(m, l, L_W1)->grad, false);
        gemm(true, false, w, inner, n, a->h2, d_up, layer_param(m, l, L_W3)->grad, false);
        gemm(false, true, n, w, inner, d_gate, layer_param(m, l, L_W1)->value, d_h, false);
        gemm(false, true, n, w, inner, d_up, layer_param(m, l, L_W3)->value, d_h, true);
        if (!norm_backward(a->mid, layer_param(m, l, L_NORM2)->value, a->inv2, d_h, m->d_x,
                           layer_param(m, l, L_NORM2)->grad, n, w))
            return false;
        /* mid = x + o Wo */
        gemm(true, false, w, w, n, t->o, m->d_x, layer_param(m, l, L_O)->grad, false);
        gemm(false, true, n, w, w, m->d_x, layer_param(m, l, L_O)->value, d_o, false);
        if (!attention_backward(m, t, layer_param(m, l, L_GATE)->value, d_o, d_q, d_k, d_v,
                                layer_param(m, l, L_GATE)->grad, n))
            return false;
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
