/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.c - one layer's attention through Quern's public API. */
#include "layer.h"

#include <stdlib.h>

/* With unit-RMS queries and keys a score is at most head_dim * SCALE. */
static const float SCALE = 0.25f;

static int64_t entries(const lm_config *c, int64_t n)
{
    return n >= c->block ? n / c->block : 0;
}

bool attention_allocate(const lm_config *c, lm_attention *a)
{
    const size_t n = (size_t)c->context, dim = (size_t)(c->width / c->heads), q = n * (size_t)c->width,
                 kv = n * (size_t)c->kv_heads * dim;
    const size_t cmp = ((size_t)entries(c, c->context) + 1) * (size_t)c->kv_heads * dim;
    *a = (lm_attention){.q = malloc(q * 4),
                        .k = malloc(kv * 4),
                        .v = malloc(kv * 4),
                        .o = malloc(q * 4),
                        .gates = malloc(n * (size_t)c->heads * 3 * 4),
                        .k_cmp = malloc(cmp * 4),
                        .v_cmp = malloc(cmp * 4),
                        .block_idx = malloc(n * (size_t)(c->kv_heads * c->selected) * sizeof(int32_t))};
    bool ok = a->q && a->k && a->v && a->o && a->gates && a->k_cmp && a->v_cmp && a->block_idx;
    for (int i = 0; i < 3; i++) {
        a->lse[i] = malloc(n * (size_t)c->heads * 4);
        a->o_b[i] = malloc(q * 4);
        ok = ok && a->lse[i] && a->o_b[i];
    }
    return ok;
}

void attention_free(lm_attention *a)
{
    void *const all[] = {a->q,         a->k,      a->v,      a->o,      a->gates,  a->k_cmp,  a->v_cmp,
                         a->block_idx, a->lse[0], a->lse[1], a->lse[2], a->o_b[0], a->o_b[1], a->o_b[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static bool dense(lm_model *m, lm_attention *a, int32_t n, const float *d_o, float *d_q, float *d_k,
                  float *d_v)
{
    const lm_config *c = &m->config;
    const int64_t dim = c->width / c->heads;
    const quern_tensor q = view(a->q, QUERN_F32, 4, 1, n, c->heads, dim),
                       k = view(a->k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       v = view(a->v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       o = view(a->o, QUERN_F32, 4, 1, n, c->heads, dim),
                       lse = view(a->lse[0], QUERN_F32, 3, 1, c->heads, n, 0);
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    p.scale = SCALE;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &o;
    t.lse = &lse;
    size_t bytes;
    if (d_o == NULL)
        return done(quern_attention_forward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_attention_forward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    const quern_tensor go = view(d_o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gq = view(d_q, QUERN_F32, 4, 1, n, c->heads, dim),
                       gk = view(d_k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gv = view(d_v, QUERN_F32, 4, 1, n, c->kv_heads, dim);
    t.d_o = &go;
    t.d_q = &gq;
    t.d_k = &gk;
    t.d_v = &gv;
    return done(quern_attention_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_attention_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

static bool sparse(lm_model *m, lm_attention *a, const lm_param *w_gate, int32_t n, const float *d_o,
                   float *d_q, float *d_k, float *d_v)
{
    const lm_config *c = &m->config;
    const int64_t dim = c->width / c->heads, nc = entries(c, n);
    const quern_tensor q = view(a->q, QUERN_F32, 4, 1, n, c->heads, dim),
                       k = view(a->k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       v = view(a->v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       o = view(a->o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gate = view(w_gate->value, QUERN_F32, 3, c->heads, 3, dim, 0),
                       gates = view(a->gates, QUERN_F32, 4, 1, n, c->heads, 3),
                       k_cmp = view(a->k_cmp, QUERN_F32, 4, 1, nc, c->kv_heads, dim),
                       v_cmp = view(a->v_cmp, QUERN_F32, 4, 1, nc, c->kv_heads, dim),
                       idx = view(a->block_idx, QUERN_I32, 4, 1, c->kv_heads, n, c->selected);
    quern_tensor lse[3], o_b[3];
    for (int i = 0; i < 3; i++) {
        lse[i] = view(a->lse[i], QUERN_F32, 3, 1, c->heads, n, 0);
        o_b[i] = view(a->o_b[i], QUERN_F32, 4, 1, n, c->heads, dim);
    }
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    p.block_size = c->block;
    p.num_selected = c->selected;
    p.window = c->window;
    p.gate = QUERN_NSA_GATE_WEIGHTS;
    p.scale = SCALE;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &o;
    t.w_gate = &gate;
    t.gates = &gates;
    t.k_cmp = &k_cmp;
    t.v_cmp = &v_cmp;
    t.block_idx = &idx;
    t.lse_cmp = &lse[0];
    t.lse_slc = &lse[1];
    t.lse_win = &lse[2];
    t.o_cmp = &o_b[0];
    t.o_slc = &o_b[1];
    t.o_win = &o_b[2];
    size_t bytes;
    if (d_o == NULL)
        return done(quern_nsa_forward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_nsa_forward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    const quern_tensor go = view(d_o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gq = view(d_q, QUERN_F32, 4, 1, n, c->heads, dim),
                       gk = view(d_k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gv = view(d_v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gg = view(w_gate->grad, QUERN_F32, 3, c->heads, 3, dim, 0);
    t.d_o = &go;
    t.d_q = &gq;
    t.d_k = &gk;
    t.d_v = &gv;
    t.d_w_gate = &gg;
    return done(quern_nsa_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_nsa_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

bool attention_forward(lm_model *m, int32_t layer, int32_t n)
{
    lm_attention *a = &m->layer[layer].attention;
    return config_kind(&m->config, layer) == KIND_NSA
               ? sparse(m, a, layer_param(m, layer, L_GATE), n, NULL, NULL, NULL, NULL)
               : dense(m, a, n, NULL, NULL, NULL, NULL);
}

bool attention_backward(lm_model *m, int32_t layer, const float *d_o, float *d_q, float *d_k, float *d_v,
                        int32_t n)
{
    lm_attention *a = &m->layer[layer].attention;
    return config_kind(&m->config, layer) == KIND_NSA
               ? sparse(m, a, layer_param(m, layer, L_GATE), n, d_o, d_q, d_k, d_v)
               : dense(m, a, n, d_o, d_q, d_k, d_v);
}
