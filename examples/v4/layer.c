/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.c - a layer: attention and experts, each between hyper-connections. First the calls of Quern, a
 * function each: its parameters, its tensors, as much workspace as it asks for. Then what a layer makes of
 * them.
 */
#include "v4.h"

/* The two functions of an operation: how many bytes it needs, and the call itself. */
#define RUN(m, need, call, p, t)                                                                             \
    (done(need((m)->device.ctx, p, t, &(m)->workspace)) &&                                                   \
     device_room(&(m)->device, WORKSPACE, (m)->workspace) != NULL &&                                         \
     done(call((m)->device.ctx, NULL, p, t, (m)->device.room[WORKSPACE], (m)->workspace)))

bool op_linear(v4_model *m, const quern_tensor *x, const v4_matrix *w, int64_t groups, const quern_tensor *y)
{
    quern_linear_params p = QUERN_LINEAR_PARAMS_INIT;
    quern_linear_tensors t = {.size = sizeof t, .x = x, .y = y};
    p.groups = groups;
    p.block = w->block;
    t.w = &w->w;
    t.w_scale = w->scale.data != NULL ? &w->scale : NULL;
    return RUN(m, quern_linear_forward_workspace, quern_linear_forward, &p, &t);
}

static bool op_norm(v4_model *m, const quern_tensor *x, const quern_tensor *weight, const quern_tensor *y)
{
    const quern_rms_norm_params p = {.size = sizeof p, .eps = (float)m->config.rms_eps};
    const quern_rms_norm_tensors t = {.size = sizeof t, .x = x, .weight = weight, .y = y};
    return RUN(m, quern_rms_norm_forward_workspace, quern_rms_norm_forward, &p, &t);
}

static bool op_rope(v4_model *m, const quern_tensor *x, const quern_tensor *cos_sin, const v4_step *step,
                    const quern_tensor *y)
{
    const quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
    const quern_rope_tensors t = {
        .size = sizeof t, .x = x, .cos_sin = cos_sin, .positions = &step->position, .y = y};
    return RUN(m, quern_rope_forward_workspace, quern_rope_forward, &p, &t);
}

static bool op_store(v4_model *m, const quern_tensor *x, const quern_tensor *slots, const quern_tensor *pool)
{
    const quern_dsv4_store_params p = {.size = sizeof p, .page = PAGE};
    const quern_dsv4_store_tensors t = {.size = sizeof t, .x = x, .slots = slots, .cache = pool};
    return RUN(m, quern_dsv4_store_workspace, quern_dsv4_store, &p, &t);
}

/* Columns first ... first + n - 1 of a bias [r, columns]. */
static quern_tensor columns_of(const quern_tensor *bias, int64_t first, int64_t n)
{
    quern_tensor part = *bias;
    part.data = (float *)bias->data + first;
    part.shape[1] = n;
    return part;
}

/* Appends to the layer's compressors: projections in, entries that become whole into their pages. */
static bool op_append(v4_model *m, int64_t ratio, const v4_step *step, const v4_layer *l, const v4_rows *rows,
                      const quern_tensor *proj, const quern_tensor *index_proj)
{
    const bool csa = ratio == CSA;
    const int64_t dim = m->config.dim, index_dim = m->config.index_dim;
    const quern_tensor a = columns_of(&l->main.bias, csa ? dim : 0, dim),
                       b = columns_of(&l->main.bias, 0, dim),
                       *table = &step->books.tables[1 + cache_ratio(&m->config, ratio)];
    const quern_dsv4_compress_params p = {.size = sizeof p,
                                          .kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA,
                                          .ratio = ratio,
                                          .eps = (float)m->config.rms_eps};
    quern_dsv4_append_tensors t = {.size = sizeof t,
                                   .proj = proj,
                                   .b_a = &a,
                                   .norm_weight = &l->main.norm,
                                   .cos_sin = &m->cos_sin[1],
                                   .out = &rows->entries,
                                   .table = table,
                                   .states = &rows->main.sums,
                                   .merged = &rows->main.merged,
                                   .slots = &step->books.slots,
                                   .positions = &step->books.positions,
                                   .cu = &step->books.cu,
                                   .copies = &step->books.copies};
    if (!csa) return RUN(m, quern_dsv4_append_step_workspace, quern_dsv4_append_step, &p, &t);
    const quern_tensor ia = columns_of(&l->index.bias, index_dim, index_dim),
                       ib = columns_of(&l->index.bias, 0, index_dim);
    t.b_b = &b;
    t.index_proj = index_proj;
    t.index_b_a = &ia;
    t.index_b_b = &ib;
    t.index_norm_weight = &l->index.norm;
    t.index_out = &rows->keys;
    t.index_table = table;
    t.index_states = &rows->index.sums;
    t.index_merged = &rows->index.merged;
    return RUN(m, quern_dsv4_append_step_workspace, quern_dsv4_append_step, &p, &t);
}

static bool op_index(v4_model *m, const v4_step *step, const quern_tensor *q, const quern_tensor *weights,
                     const quern_tensor *keys, const quern_tensor *idx, const quern_tensor *count)
{
    const quern_dsv4_index_params p = {
        .size = sizeof p, .ratio = CSA, .top_k = m->config.index_top, .page = PAGE};
    const quern_dsv4_index_tensors t = {.size = sizeof t,
                                        .q = q,
                                        .w = weights,
                                        .k = keys,
                                        .k_table = &step->books.tables[1 + cache_ratio(&m->config, CSA)],
                                        .start_positions = &step->books.positions,
                                        .idx = idx,
                                        .count = count};
    return RUN(m, quern_dsv4_index_workspace, quern_dsv4_index, &p, &t);
}

static bool op_attend(v4_model *m, const v4_step *step, int64_t ratio, const quern_tensor *sink,
                      const v4_rows *rows, const quern_tensor *q, const quern_tensor *idx,
                      const quern_tensor *count, const quern_tensor *o)
{
    const quern_dsv4_attention_params p = {
        .size = sizeof p, .ratio = ratio, .window = m->config.window, .start_abs_pos = -1, .page = PAGE};
    quern_dsv4_attention_tensors t = {.size = sizeof t,
                                      .q = q,
                                      .o = o,
                                      .kv = &rows->raw,
                                      .kv_table = &step->raw_table,
                                      .start_positions = &step->books.positions,
                                      .sink = sink,
                                      .cos_sin = &m->cos_sin[ratio > 0]};
    if (ratio > 0) t.kv_cmp_table = &step->books.tables[1 + cache_ratio(&m->config, ratio)];
    t.kv_cmp = ratio > 0 ? &rows->entries : NULL;
    t.idx = ratio == CSA ? idx : NULL;
    t.count = ratio == CSA ? count : NULL;
    return RUN(m, quern_dsv4_attention_workspace, quern_dsv4_attention, &p, &t);
}

bool op_hyper(v4_model *m, const v4_hyper *w, const quern_tensor *x, const quern_tensor *f,
              const quern_tensor *h, const quern_tensor *x_new)
{
    const quern_dsv4_hyper_params p = {.size = sizeof p,
                                       .iters = m->config.iters,
                                       .eps = (float)m->config.hc_eps,
                                       .rms_eps = (float)m->config.rms_eps,
                                       .head = w == &m->head_hyper};
    const quern_dsv4_hyper_tensors t = {.size = sizeof t,
                                        .x = x,
                                        .fn = &w->fn,
                                        .base = &w->base,
                                        .scale = &w->scale,
                                        .norm_weight = &w->norm,
                                        .f = f,
                                        .h = h,
                                        .x_new = x_new};
    return RUN(m, quern_dsv4_hyper_workspace, quern_dsv4_hyper, &p, &t);
}

static bool op_experts(v4_model *m, const v4_layer *layer, const quern_tensor *ids, const quern_tensor *x,
                       const quern_tensor *out)
{
    const v4_config *c = &m->config;
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = layer->experts.tensors;
    p.score = c->score;
    p.top_k = c->top;
    p.renormalize = c->renormalize;
    p.route_scale = (float)c->route_scale;
    p.limit = (float)c->limit;
    if (t.gate_up_repacked != NULL) p.intermediate = c->inner;
    if (t.shared_gate_up_repacked != NULL) p.shared_intermediate = c->shared * c->inner;
    t.hidden = x;
    t.out = out;
    t.input_ids = t.tid2eid != NULL ? ids : NULL;
    return RUN(m, quern_moe_forward_workspace, quern_moe_forward, &p, &t);
}

bool op_prepack(v4_model *m, const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *to)
{
    const quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    const quern_moe_prepack_tensors t = {
        .size = sizeof t, .b_codes = codes, .b_scales = scales, .b_repacked = to};
    return RUN(m, quern_moe_prepack_workspace, quern_moe_prepack, &p, &t);
}

/* ---- the layer ---- */

/* Values and logits of a compressor: [R, C_a Z_a C_b Z_b], in HCA [R, C Z]. The checkpoint's rows begin with
 * series b. */
static bool project(v4_model *m, int64_t ratio, const v4_compressor *c, const quern_tensor *h,
                    const quern_tensor *proj)
{
    const int64_t width = c->norm.shape[0], series = ratio == CSA ? 2 : 1;
    for (int64_t i = 0; i < 2 * series; i++) {
        v4_matrix w = {.w = i % 2 == 0 ? c->kv : c->gate, .block = 128};
        quern_tensor y = *proj;
        w.w.shape[0] = y.shape[1] = width;
        w.w.data = (char *)w.w.data + (size_t)(series - 1 - i / 2) * tensor_bytes(&w.w);
        y.data = (char *)proj->data + (size_t)(i * width) * quern_dtype_size(m->act);
        if (!op_linear(m, h, &w, 1, &y)) return false;
    }
    return true;
}

/* The entries that the step completes, and the indexer's keys of them, into their pools. */
static bool compress(v4_model *m, int64_t ratio, const v4_step *step, const v4_layer *l, const v4_rows *rows,
                     const quern_tensor *h)
{
    const int64_t n = h->shape[0], columns = ratio == CSA ? 4 : 2;
    const quern_tensor proj = room(m, PROJ, 2, n, columns * m->config.dim, 1, 1),
                       keys = room(m, INDEX_PROJ, 2, n, columns * m->config.index_dim, 1, 1);
    return project(m, ratio, &l->main, h, &proj) &&
           (ratio != CSA || project(m, ratio, &l->index, h, &keys)) &&
           op_append(m, ratio, step, l, rows, &proj, &keys);
}

/* The entries that CSA's queries attend, chosen by the indexer. */
static bool choose(v4_model *m, const v4_layer *l, const v4_rows *rows, const v4_step *step,
                   const quern_tensor *h, const quern_tensor *qr, const quern_tensor *idx,
                   const quern_tensor *count)
{
    const int64_t n = h->shape[0], b = step->batch, heads = m->config.index_heads, dim = m->config.index_dim;
    const quern_tensor flat = room(m, IQ, 2, n, heads * dim, 1, 1), q = room(m, IQ, 3, n, heads, dim, 1),
                       turned = room(m, IQ_NEXT, 3, n, heads, dim, 1), w = room(m, IW, 2, n, heads, 1, 1),
                       queries = room(m, IQ_NEXT, 4, b, n / b, heads, dim),
                       weights = room(m, IW, 3, b, n / b, heads, 1);
    return op_linear(m, qr, &l->index_q_b, 1, &flat) && op_rope(m, &q, &m->cos_sin[1], step, &turned) &&
           op_linear(m, h, &l->index_heads, 1, &w) &&
           op_index(m, step, &queries, &weights, &rows->keys, idx, count);
}

/* The step's raw rows, into their ring. */
static bool keep(v4_model *m, const v4_layer *l, const v4_rows *rows, const v4_step *step,
                 const quern_tensor *cos_sin, const quern_tensor *h)
{
    const int64_t n = h->shape[0], dim = m->config.dim;
    const quern_tensor kv = room(m, KV, 2, n, dim, 1, 1), normed = room(m, KV_NEXT, 2, n, dim, 1, 1),
                       head = room(m, KV_NEXT, 3, n, 1, dim, 1), turned = room(m, KV, 3, n, 1, dim, 1);
    return op_linear(m, h, &l->kv, 1, &kv) && op_norm(m, &kv, &l->kv_norm, &normed) &&
           op_rope(m, &head, cos_sin, step, &turned) && op_store(m, &kv, &step->raw_slot, &rows->raw);
}

static bool attention(v4_model *m, int64_t number, const v4_step *step, const quern_tensor *h,
                      const quern_tensor *f)
{
    const v4_config *c = &m->config;
    const v4_layer *l = &m->layer[number];
    const v4_rows *rows = &m->cache.layer[number];
    const int64_t n = h->shape[0], b = step->batch, ratio = c->ratio[number], heads = c->heads, dim = c->dim;
    const quern_tensor *cos_sin = &m->cos_sin[ratio > 0];
    const quern_tensor low = room(m, QR_RAW, 2, n, c->q_lora, 1, 1), qr = room(m, QR, 2, n, c->q_lora, 1, 1),
                       flat = room(m, Q, 2, n, heads * dim, 1, 1), each = room(m, Q, 2, n * heads, dim, 1, 1),
                       normed = room(m, Q_NEXT, 2, n * heads, dim, 1, 1),
                       turn = room(m, Q_NEXT, 3, n, heads, dim, 1), turned = room(m, Q, 3, n, heads, dim, 1),
                       q = room(m, Q, 4, b, n / b, heads, dim), o = room(m, Q_NEXT, 4, b, n / b, heads, dim),
                       out = room(m, Q_NEXT, 2, n, heads * dim, 1, 1),
                       groups = room(m, GROUPS, 2, n, c->groups * c->o_lora, 1, 1),
                       idx = room(m, IDX, 3, b, n / b, c->index_top, 1),
                       count = room(m, COUNT, 2, b, n / b, 1, 1);
    return op_linear(m, h, &l->q_a, 1, &low) && op_norm(m, &low, &l->q_norm, &qr) &&
           op_linear(m, &qr, &l->q_b, 1, &flat) && op_norm(m, &each, NULL, &normed) &&
           op_rope(m, &turn, cos_sin, step, &turned) && keep(m, l, rows, step, cos_sin, h) &&
           (ratio == 0 || compress(m, ratio, step, l, rows, h)) &&
           (ratio != CSA || choose(m, l, rows, step, h, &qr, &idx, &count)) &&
           op_attend(m, step, ratio, &l->sink, rows, &q, &idx, &count, &o) &&
           op_linear(m, &out, &l->o_a, c->groups, &groups) && op_linear(m, &groups, &l->o_b, 1, f);
}

bool layer_run(v4_model *m, int64_t number, const v4_step *step, const quern_tensor *ids,
               const quern_tensor *x, const quern_tensor *x_new)
{
    const v4_layer *l = &m->layer[number];
    const int64_t n = x->shape[0], width = m->config.width;
    const quern_tensor h = room(m, H, 2, n, width, 1, 1), f = room(m, F, 2, n, width, 1, 1),
                       middle = room(m, X_MIDDLE, 3, n, m->config.copies, width, 1);
    return op_hyper(m, &l->hyper[0], x, NULL, &h, NULL) && attention(m, number, step, &h, &f) &&
           op_hyper(m, &l->hyper[0], x, &f, &h, &middle) &&
           op_hyper(m, &l->hyper[1], &middle, NULL, &h, NULL) && op_experts(m, l, ids, &h, &f) &&
           op_hyper(m, &l->hyper[1], &middle, &f, &h, x_new);
}
