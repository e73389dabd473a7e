/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* model.c - the model's forward pass and its hand-written backward. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

#include <quern/dsv4.h>

bool model_positions(lm_model *m, int64_t positions)
{
    const int64_t rotated = config_rotated(&m->config);
    if (positions <= m->positions) return true;
    free(m->rope);
    m->rope = malloc((size_t)(positions * rotated) * 4);
    m->positions = m->rope != NULL ? positions : 0;
    if (m->rope == NULL) return failure("no memory for %lld positions", (long long)positions) == 0;
    quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
    p.base = 10000.0f;
    const quern_tensor table = view(m->rope, QUERN_F32, 2, positions, rotated, 0, 0);
    return done(quern_dsv4_rope_table(&p, &table));
}

bool model_create(lm_model *m, const lm_config *config, uint64_t seed)
{
    *m = (lm_model){.config = *config};
    const lm_config *c = &m->config;
    const int64_t w = c->width, inner = c->inner, n = c->context;
    m->layer = calloc((size_t)c->layers, sizeof *m->layer);
    bool ok = m->layer != NULL && params_create(m, seed);
    for (int32_t l = 0; l < c->layers && ok; l++) {
        lm_layer *a = &m->layer[l];
        float **const arrays[] = {&a->x, &a->mid, &a->h1, &a->h2, &a->inv1, &a->inv2};
        const int64_t columns[] = {w, w, w, w, 1, 1};
        for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
            ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
        ok = ok && attention_allocate(c, config_kind(c, l), &a->attention) && mlp_allocate(c, &a->mlp);
    }
    float **const arrays[] = {&m->x,       &m->normed,     &m->logits,     &m->d_x,        &m->d_normed,
                              &m->inverse, &m->scratch[0], &m->scratch[1], &m->scratch[2], &m->scratch[3]};
    /* The scratch serves both halves of a layer; its last array also the slots of a mixture. */
    const int64_t widest = inner > w ? inner : w, slots = w * c->top;
    const int64_t columns[] = {w, w, BYTES, w, w, 1, widest, widest, widest, widest > slots ? widest : slots};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays && ok; i++)
        ok = (*arrays[i] = malloc((size_t)(n * columns[i]) * 4)) != NULL;
    if (!ok) return failure("no memory for the model") == 0;
    const quern_context_params params = threads_params();
    return model_positions(m, n) && done(quern_context_create(&params, &m->ctx));
}

void model_destroy(lm_model *m)
{
    for (int32_t l = 0; m->layer != NULL && l < m->config.layers; l++) {
        lm_layer *a = &m->layer[l];
        free(a->x), free(a->mid), free(a->h1), free(a->h2), free(a->inv1), free(a->inv2);
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

bool model_forward(lm_model *m, const uint8_t *text, int64_t position, int32_t n, lm_cache *caches)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width;
    embed_forward(m->params, text, position, m->x, n, w);
    for (int32_t l = 0; l < c->layers; l++) {
        lm_layer *a = &m->layer[l];
        memcpy(a->x, m->x, (size_t)(n * w) * 4);
        norm_forward(a->x, layer_param(m, l, L_NORM1)->value, a->h1, a->inv1, n, w);
        project_forward(m, l, position, n);
        if (!(caches != NULL ? cache_extend(m, l, &caches[l], 0, n, a->attention.o)
                             : attend_run(m, l, n, NULL)))
            return false;
        gemm(false, false, n, w, w, a->attention.o, layer_param(m, l, L_O)->value, m->x, true);
        memcpy(a->mid, m->x, (size_t)(n * w) * 4);
        norm_forward(a->mid, layer_param(m, l, L_NORM2)->value, a->h2, a->inv2, n, w);
        if (!mlp_forward(m, l, a->h2, m->x, n)) return false;
    }
    norm_forward(m->x, m->params[P_NORM].value, m->normed, m->inverse, n, w);
    gemm(false, false, n, BYTES, w, m->normed, m->params[P_HEAD].value, m->logits, false);
    return true;
}

static bool backward(lm_model *m, const uint8_t *text, int32_t n)
{
    const lm_config *c = &m->config;
    const int64_t w = c->width;
    float *d_h = m->d_normed, *d_o = m->scratch[0];
    const lm_gradients g = {d_o, m->scratch[1], m->scratch[2], m->scratch[3], d_h};
    m->index_loss = 0.0;
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
        memset(d_h, 0, (size_t)(n * w) * 4);
        if (!attend_run(m, l, n, &g) || !project_backward(m, l, n, &g)) return false;
        if (!norm_backward(a->x, layer_param(m, l, L_NORM1)->value, a->inv1, d_h, m->d_x,
                           layer_param(m, l, L_NORM1)->grad, n, w))
            return false;
    }
    embed_backward(m->params, text, m->d_x, n, w);
    return true;
}

double model_loss(lm_model *m, const uint8_t *text, int32_t n, bool train)
{
    if (!model_forward(m, text, 0, n, NULL)) return -1.0;
    const double loss = cross_entropy(m->logits, text + 1, n, train);
    return !train || backward(m, text, n) ? loss : -1.0;
}
