/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_nsa.c - native sparse attention through quern_nsa_*(). */
#include "layer.h"

quern_nsa_params nsa_params(const lm_config *c)
{
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    p.block_size = c->block;
    p.num_selected = c->selected;
    p.window = c->window;
    p.gate = QUERN_NSA_GATE_WEIGHTS;
    p.scale = SCALE;
    return p;
}

bool nsa_run(lm_model *m, int32_t layer, int32_t n, const lm_gradients *g)
{
    const lm_attention *a = &m->layer[layer].attention;
    const lm_param *w_gate = layer_param(m, layer, L_GATE);
    const lm_config *c = &m->config;
    const int64_t dim = c->width / c->heads, nc = n / c->block;
    const quern_tensor q = view(a->q, QUERN_F32, 4, 1, n, c->heads, dim),
                       k = view(a->k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       v = view(a->v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       o = view(a->o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gate = view(w_gate->value, QUERN_F32, 3, c->heads, 3, dim, 0),
                       gates = view(a->gates, QUERN_F32, 4, 1, n, c->heads, 3),
                       k_cmp = view(a->k_cmp, QUERN_F32, 4, 1, nc, c->kv_heads, dim),
                       v_cmp = view(a->v_cmp, QUERN_F32, 4, 1, nc, c->kv_heads, dim),
                       idx = view(a->chosen, QUERN_I32, 4, 1, c->kv_heads, n, c->selected);
    quern_tensor lse[3], o_b[3];
    for (int i = 0; i < 3; i++) {
        lse[i] = view(a->lse[i], QUERN_F32, 3, 1, c->heads, n, 0);
        o_b[i] = view(a->o_b[i], QUERN_F32, 4, 1, n, c->heads, dim);
    }
    const quern_nsa_params p = nsa_params(c);
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
    if (g == NULL)
        return done(quern_nsa_forward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_nsa_forward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    const quern_tensor go = view(g->d_o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gq = view(g->d_q, QUERN_F32, 4, 1, n, c->heads, dim),
                       gk = view(g->d_k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gv = view(g->d_v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gg = view(w_gate->grad, QUERN_F32, 3, c->heads, 3, dim, 0);
    t.d_o = &go;
    t.d_q = &gq;
    t.d_k = &gk;
    t.d_v = &gv;
    t.d_w_gate = &gg;
    return done(quern_nsa_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_nsa_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}
