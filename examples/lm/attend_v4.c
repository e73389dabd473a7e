/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_v4.c - window, csa and hca layers through quern_dsv4_*(): one key of all heads, which is value too.
 *
 * Every query sees the last `window` keys. A csa layer also compresses each 4 tokens of its input to an
 * entry. A query sees the `index_top` entries that the indexer scores highest. No gradient passes through
 * that choice: the indexer learns by a loss of its own, to weigh these entries as attention does. An hca
 * layer compresses `ratio` tokens to an entry, and a query sees all that have passed.
 */
#include "layer.h"

quern_dsv4_compress_params v4_compress_params(const lm_config *c, lm_kind kind)
{
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    p.kind = kind == KIND_CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    p.ratio = config_ratio(c, kind);
    return p;
}

/* h1 -> entries; with d_entries: -> d_h and the gradients of the compressor's weights. */
static bool compress(lm_model *m, int32_t layer, int32_t n, int weights, const float *entries,
                     const float *d_entries, float *d_h)
{
    const lm_param *w = layer_param(m, layer, weights), *b_a = w + 1, *b_b = w + 2, *norm = w + 3;
    const quern_dsv4_compress_params p = v4_compress_params(&m->config, config_kind(&m->config, layer));
    const int64_t width = norm->cols, in = m->config.width, r = p.ratio;
    const quern_tensor x = view(m->layer[layer].h1, QUERN_F32, 2, n, in, 0, 0),
                       weight = view(w->value, QUERN_F32, 2, in, w->cols, 0, 0),
                       bias_a = view(b_a->value, QUERN_F32, 2, r, width, 0, 0),
                       bias_b = view(b_b->value, QUERN_F32, 2, r, width, 0, 0),
                       norm_weight = view(norm->value, QUERN_F32, 1, width, 0, 0, 0),
                       cos_sin = view(m->rope, QUERN_F32, 2, m->positions, config_rotated(&m->config), 0, 0),
                       out = view(entries, QUERN_F32, 2, n / r, width, 0, 0),
                       d_out = view(d_entries, QUERN_F32, 2, n / r, width, 0, 0),
                       d_x = view(d_h, QUERN_F32, 2, n, in, 0, 0),
                       d_w = view(w->grad, QUERN_F32, 2, in, w->cols, 0, 0),
                       d_b_a = view(b_a->grad, QUERN_F32, 2, r, width, 0, 0),
                       d_b_b = view(b_b->grad, QUERN_F32, 2, r, width, 0, 0),
                       d_norm = view(norm->grad, QUERN_F32, 1, width, 0, 0, 0);
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    t.x = &x;
    t.w = &weight;
    t.b_a = &bias_a;
    t.b_b = p.kind == QUERN_DSV4_CSA ? &bias_b : NULL;
    t.norm_weight = &norm_weight;
    t.cos_sin = &cos_sin;
    size_t bytes;
    if (d_entries == NULL) {
        t.out = &out;
        return done(quern_dsv4_compress_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_dsv4_compress(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    }
    t.d_out = &d_out;
    t.d_x = &d_x;
    t.d_w = &d_w;
    t.d_b_a = &d_b_a;
    t.d_b_b = t.b_b != NULL ? &d_b_b : NULL;
    t.d_norm_weight = &d_norm;
    return done(quern_dsv4_compress_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_dsv4_compress_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

bool v4_index(lm_model *m, int32_t layer, const v4_rows *rows)
{
    const lm_config *c = &m->config;
    const int64_t heads = c->heads, dim = c->width / heads, top = c->index_top, n = rows->n;
    const quern_tensor q = view(rows->index_q, QUERN_F32, 4, 1, n, heads, dim),
                       k = view(rows->index_k, QUERN_F32, 3, 1, rows->entries, dim, 0),
                       idx = view(rows->chosen, QUERN_I32, 3, 1, n, top, 0),
                       count = view(rows->count, QUERN_I32, 2, 1, n, 0, 0);
    quern_tensor w = view(layer_param(m, layer, L_INDEX_HEADS)->value, QUERN_F32, 3, 1, n, heads, 0);
    w.strides[1] = 0; /* every token's heads weigh the same */
    quern_dsv4_index_params p = QUERN_DSV4_INDEX_PARAMS_INIT;
    p.ratio = config_ratio(c, KIND_CSA);
    p.top_k = top;
    p.start_abs_pos = rows->position;
    quern_dsv4_index_tensors t = QUERN_DSV4_INDEX_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.w = &w;
    t.idx = &idx;
    t.count = &count;
    size_t bytes;
    return done(quern_dsv4_index_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_dsv4_index(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

bool v4_core(lm_model *m, int32_t layer, const v4_rows *rows, const lm_gradients *g)
{
    const lm_config *c = &m->config;
    const lm_kind kind = config_kind(c, layer);
    const lm_param *sinks = layer_param(m, layer, L_SINK);
    const int64_t heads = c->heads, dim = c->width / heads, n = rows->n, s = rows->entries;
    const quern_tensor q = view(rows->q, QUERN_F32, 4, 1, n, heads, dim),
                       kv = view(rows->kv, QUERN_F32, 3, 1, rows->held, dim, 0),
                       kv_cmp = view(rows->kv_cmp, QUERN_F32, 3, 1, s, dim, 0),
                       idx = view(rows->chosen, QUERN_I32, 3, 1, n, c->index_top, 0),
                       count = view(rows->count, QUERN_I32, 2, 1, n, 0, 0),
                       sink = view(sinks->value, QUERN_F32, 1, heads, 0, 0, 0),
                       cos_sin = view(m->rope, QUERN_F32, 2, m->positions, config_rotated(c), 0, 0),
                       o = view(rows->o, QUERN_F32, 4, 1, n, heads, dim),
                       lse = view(rows->lse, QUERN_F32, 3, 1, heads, n, 0),
                       lse_win = view(rows->lse_win, QUERN_F32, 3, 1, heads, n, 0);
    quern_dsv4_attention_params p = QUERN_DSV4_ATTENTION_PARAMS_INIT;
    p.ratio = config_ratio(c, kind);
    p.window = c->window;
    p.start_abs_pos = rows->position;
    quern_dsv4_attention_tensors t = QUERN_DSV4_ATTENTION_TENSORS_INIT;
    t.q = &q;
    t.kv = &kv;
    t.kv_cmp = s > 0 ? &kv_cmp : NULL;
    t.idx = s > 0 && kind == KIND_CSA ? &idx : NULL;
    t.count = t.idx != NULL ? &count : NULL;
    t.sink = &sink;
    t.cos_sin = &cos_sin;
    t.o = &o;
    t.lse = rows->lse != NULL ? &lse : NULL;
    t.lse_win = rows->lse_win != NULL && g == NULL ? &lse_win : NULL;
    size_t bytes;
    if (g == NULL)
        return done(quern_dsv4_attention_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
               done(quern_dsv4_attention(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
    const quern_tensor d_o = view(g->d_o, QUERN_F32, 4, 1, n, heads, dim),
                       d_q = view(g->d_q, QUERN_F32, 4, 1, n, heads, dim),
                       d_kv = view(g->d_k, QUERN_F32, 3, 1, n, dim, 0),
                       d_kv_cmp = view(m->layer[layer].attention.d_k_cmp, QUERN_F32, 3, 1, s, dim, 0),
                       d_sink = view(sinks->grad, QUERN_F32, 1, heads, 0, 0, 0);
    t.d_o = &d_o;
    t.d_q = &d_q;
    t.d_kv = &d_kv;
    t.d_kv_cmp = t.kv_cmp != NULL ? &d_kv_cmp : NULL;
    t.d_sink = &d_sink;
    return done(quern_dsv4_attention_backward_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_dsv4_attention_backward(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

/* The indexer's loss over the chosen entries -> the gradients of the indexer's arrays. */
static bool teach(lm_model *m, int32_t layer, const v4_rows *rows)
{
    const lm_config *c = &m->config;
    const lm_attention *a = &m->layer[layer].attention;
    const lm_param *queries = layer_param(m, layer, L_INDEX_Q),
                   *weights = layer_param(m, layer, L_INDEX_HEADS);
    const int64_t heads = c->heads, w = c->width, dim = w / heads, n = rows->n, s = rows->entries;
    float loss = 0.0f, *d_index_q = m->scratch[3];
    const quern_tensor q_index = view(rows->index_q, QUERN_F32, 4, 1, n, heads, dim),
                       k_index = view(rows->index_k, QUERN_F32, 3, 1, s, dim, 0),
                       q = view(rows->q, QUERN_F32, 4, 1, n, heads, dim),
                       kv_cmp = view(rows->kv_cmp, QUERN_F32, 3, 1, s, dim, 0),
                       lse_win = view(rows->lse_win, QUERN_F32, 3, 1, heads, n, 0),
                       sink = view(layer_param(m, layer, L_SINK)->value, QUERN_F32, 1, heads, 0, 0, 0),
                       idx = view(rows->chosen, QUERN_I32, 3, 1, n, c->index_top, 0),
                       out = view(&loss, QUERN_F32, 0, 0, 0, 0, 0),
                       d_q = view(d_index_q, QUERN_F32, 4, 1, n, heads, dim),
                       d_k = view(a->d_index_k, QUERN_F32, 3, 1, s, dim, 0),
                       d_w = view(a->d_index_w, QUERN_F32, 3, 1, n, heads, 0);
    quern_tensor w_index = view(weights->value, QUERN_F32, 3, 1, n, heads, 0);
    w_index.strides[1] = 0; /* every token's heads weigh the same */
    quern_dsv4_index_loss_params p = QUERN_DSV4_INDEX_LOSS_PARAMS_INIT;
    p.ratio = config_ratio(c, KIND_CSA);
    quern_dsv4_index_loss_tensors t = QUERN_DSV4_INDEX_LOSS_TENSORS_INIT;
    t.q_index = &q_index;
    t.k_index = &k_index;
    t.w = &w_index;
    t.q = &q;
    t.kv_cmp = &kv_cmp;
    t.lse_win = &lse_win;
    t.sink = &sink;
    t.idx = &idx;
    t.loss = &out;
    t.d_q_index = &d_q;
    t.d_k_index = &d_k;
    t.d_w = &d_w;
    size_t bytes;
    if (!done(quern_dsv4_index_loss_workspace(m->ctx, &p, &t, &bytes)) || !reserve(m, bytes) ||
        !done(quern_dsv4_index_loss(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes)))
        return false;
    m->index_loss += (double)loss;
    for (int64_t h = 0; h < heads; h++) {
        weights->grad[h] = 0.0f;
        for (int64_t i = 0; i < n; i++) weights->grad[h] += a->d_index_w[i * heads + h];
    }
    rope_apply(d_index_q, m->rope, n, heads, dim, config_rotated(c), -1.0f);
    gemm(true, false, w, w, n, m->layer[layer].h1, d_index_q, queries->grad, false);
    /* what it says of h1 stays unused */
    return compress(m, layer, (int32_t)n, L_INDEX_CMP, rows->index_k, a->d_index_k, m->scratch[3]);
}

bool v4_run(lm_model *m, int32_t layer, int32_t n, const lm_gradients *g)
{
    const lm_attention *a = &m->layer[layer].attention;
    const lm_kind kind = config_kind(&m->config, layer);
    const int64_t ratio = config_ratio(&m->config, kind), entries = ratio > 0 ? n / ratio : 0;
    const v4_rows rows = {.n = n,
                          .held = n,
                          .entries = entries,
                          .q = a->q,
                          .kv = a->k,
                          .kv_cmp = a->k_cmp,
                          .index_q = a->index_q,
                          .index_k = a->index_k,
                          .chosen = a->chosen,
                          .count = a->count,
                          .o = a->o,
                          .lse = a->lse[0],
                          .lse_win = a->lse[1]};
    if (g != NULL)
        return v4_core(m, layer, &rows, g) &&
               (entries == 0 || compress(m, layer, n, L_CMP, a->k_cmp, a->d_k_cmp, g->d_h)) &&
               (entries == 0 || kind != KIND_CSA || teach(m, layer, &rows));
    if (entries > 0 && !compress(m, layer, n, L_CMP, a->k_cmp, NULL, NULL)) return false;
    if (entries > 0 && kind == KIND_CSA &&
        !(compress(m, layer, n, L_INDEX_CMP, a->index_k, NULL, NULL) && v4_index(m, layer, &rows)))
        return false;
    return v4_core(m, layer, &rows, NULL);
}
