/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_dense.c - dense attention through quern_attention_*(). */
#include "layer.h"

quern_attention_params dense_params(void)
{
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    p.scale = SCALE;
    return p;
}

bool dense_run(lm_model *m, int32_t layer, int32_t n, const lm_gradients *g)
{
    const lm_config *c = &m->config;
    const lm_attention *a = &m->layer[layer].attention;
    const int64_t dim = c->width / c->heads;
    const quern_tensor q = view(a->q, QUERN_F32, 4, 1, n, c->heads, dim),
                       k = view(a->k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       v = view(a->v, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       o = view(a->o, QUERN_F32, 4, 1, n, c->heads, dim),
                       lse = view(a->lse[0], QUERN_F32, 3, 1, c->heads, n, 0);
    const quern_attention_params p = dense_params();
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &o;
    t.lse = &lse;
    size_t bytes;
    if (g == NULL)
        return done(quern_attention_forward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_attention_forward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    const quern_tensor go = view(g->d_o, QUERN_F32, 4, 1, n, c->heads, dim),
                       gq = view(g->d_q, QUERN_F32, 4, 1, n, c->heads, dim),
                       gk = view(g->d_k, QUERN_F32, 4, 1, n, c->kv_heads, dim),
                       gv = view(g->d_v, QUERN_F32, 4, 1, n, c->kv_heads, dim);
    t.d_o = &go;
    t.d_q = &gq;
    t.d_k = &gk;
    t.d_v = &gv;
    return done(quern_attention_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_attention_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}
