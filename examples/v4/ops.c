/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ops.c - one function a call of Quern: its parameters, its tensors, as much workspace as it asks for. */
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
    if (w->codes) t.w_codes = &w->w, t.w_scales = &w->scale, t.w_global = &w->global;
    else t.w = &w->w, t.w_scale = w->scale.data != NULL ? &w->scale : NULL;
    return RUN(m, quern_linear_forward_workspace, quern_linear_forward, &p, &t);
}

bool op_norm(v4_model *m, const quern_tensor *x, const quern_tensor *weight, const quern_tensor *y)
{
    const quern_rms_norm_params p = {.size = sizeof p, .eps = (float)m->config.rms_eps};
    const quern_rms_norm_tensors t = {.size = sizeof t, .x = x, .weight = weight, .y = y};
    return RUN(m, quern_rms_norm_forward_workspace, quern_rms_norm_forward, &p, &t);
}

bool op_rope(v4_model *m, const quern_tensor *x, const quern_tensor *cos_sin, const v4_step *step,
             const quern_tensor *y)
{
    const quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
    const quern_rope_tensors t = {
        .size = sizeof t, .x = x, .cos_sin = cos_sin, .positions = &step->position, .y = y};
    return RUN(m, quern_rope_forward_workspace, quern_rope_forward, &p, &t);
}

bool op_store(v4_model *m, const quern_tensor *x, const quern_tensor *slots, const quern_tensor *pool)
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

bool op_append(v4_model *m, int64_t ratio, const v4_step *step, const v4_compressor *c,
               const quern_tensor *proj, const v4_state *state, const quern_tensor *out)
{
    const bool csa = ratio == CSA;
    const int64_t width = c->norm.shape[0];
    const quern_tensor a = columns_of(&c->bias, csa ? width : 0, width), b = columns_of(&c->bias, 0, width);
    const quern_dsv4_compress_params p = {.size = sizeof p,
                                          .kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA,
                                          .ratio = ratio,
                                          .eps = (float)m->config.rms_eps};
    const quern_dsv4_append_tensors t = {.size = sizeof t,
                                         .proj = proj,
                                         .b_a = &a,
                                         .b_b = csa ? &b : NULL,
                                         .norm_weight = &c->norm,
                                         .cos_sin = &m->cos_sin[1],
                                         .out = out,
                                         .slots = &step->books.slots,
                                         .positions = &step->books.positions,
                                         .cu = &step->books.cu,
                                         .copies = &step->books.copies,
                                         .states = &state->sums,
                                         .merged = &state->merged};
    return RUN(m, quern_dsv4_append_step_workspace, quern_dsv4_append_step, &p, &t);
}

bool op_index(v4_model *m, const v4_step *step, const quern_tensor *q, const quern_tensor *weights,
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

bool op_attend(v4_model *m, const v4_step *step, int64_t ratio, const quern_tensor *sink, const v4_rows *rows,
               const quern_tensor *q, const quern_tensor *idx, const quern_tensor *count,
               const quern_tensor *o)
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
    if (ratio > 0)
        t.kv_cmp = &rows->entries, t.kv_cmp_table = &step->books.tables[1 + cache_ratio(&m->config, ratio)];
    if (ratio == CSA) t.idx = idx, t.count = count;
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

bool op_experts(v4_model *m, const v4_layer *layer, const quern_tensor *ids, const quern_tensor *x,
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
