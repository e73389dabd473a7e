/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_parts.c - the parts of a layer that its forward pass, its backward pass and decoding share. */
#include "core/view.h"
#include "dsv4/layer.h"
#include "dsv4/weights.h"

#include <math.h>

static const quern_tensor *view_of(const layer_pass *p, dsv4_layer_tensor tensor)
{
    return &p->call->view[tensor];
}

static bool has_series_b(const layer_pass *p)
{
    return p->call->params.kind == QUERN_DSV4_LAYER_CSA;
}

/* x by a weight [n, Dm], in f32. */
static quern_tensor f32_product(layer_pass *p, const quern_tensor *x, dsv4_layer_tensor weight)
{
    const quern_tensor *w = view_of(p, weight), c = layer_room(p, QUERN_F32, x->shape[0], w->shape[0]);
    layer_product(p, x, w, &c);
    return c;
}

/* The same by a weight in FP8 or NVFP4. Where w is not NULL: *w becomes the weight in floats, which the
 * backward pass always has, or absent. */
static quern_tensor project_packed(layer_pass *p, const quern_tensor *x, const dsv4_weight_given *given,
                                   quern_tensor *w)
{
    const bool floats = w != NULL && p->call->head.operation == DSV4_LAYER_BACKWARD;
    const dsv4_weight weight = dsv4_weight_of(x, given, floats, &p->a);
#define RUN(stage, step, output)                                                                             \
    if (weight.step.output.ndim > 0) layer_##stage(p, &weight.step);
    DSV4_WEIGHT_STEPS(RUN)
#undef RUN
    if (w != NULL) *w = weight.w;
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj = layer_room(p, QUERN_F32, x->shape[0], weight.w.shape[1]);
    layer_gemm(p, &(gemm_args){.a = *x, .b = weight.w, .c = proj});
    return proj;
}

/* A compressor's projections [values a, logits a, values b, logits b]; `packed` is w of the above, or
 * NULL. */
static quern_tensor project_series(layer_pass *p, const quern_tensor *x, dsv4_layer_tensor first,
                                   dsv4_layer_tensor fp8, int64_t width, quern_tensor *packed)
{
    const int series = has_series_b(p) ? 2 : 1;
    const quern_tensor *v = view_of(p, fp8);
    const dsv4_weight_given given = {
        .w_fp8 = v[0], .w_fp8_scales = v[1], .w_codes = v[2], .w_scales = v[3], .w_global = v[4]};
    if (given.w_fp8.ndim > 0 || given.w_codes.ndim > 0) return project_packed(p, x, &given, packed);
    const quern_tensor proj = layer_room(p, QUERN_F32, x->shape[0], 2 * series * width);
    for (int i = 0; i < 2 * series; i++) {
        const quern_tensor *w = view_of(p, (dsv4_layer_tensor)(first + 1 + i % 2));
        const quern_tensor part = layer_rows(w, (series - 1 - i / 2) * width, width),
                           to = layer_columns(&proj, i * width, width);
        layer_product(p, x, &part, &to);
    }
    return proj;
}

/* The sinks in f32: the caller's, or a copy. */
static quern_tensor f32_sinks(layer_pass *p)
{
    const quern_tensor *given = view_of(p, DL_SINKS);
    if (given->ndim == 0 || given->dtype == QUERN_F32) return *given;
    const int64_t heads = given->shape[0], shape[] = {heads}, row[] = {1, heads};
    const quern_tensor from = view_on(given, given->data, given->dtype, 2, row),
                       to = layer_room(p, QUERN_F32, 1, heads);
    const quern_tensor in = layer_heads(&from, 1, 1), out = layer_heads(&to, 1, 1);
    layer_change(p, &in, &out);
    return view_on(&to, to.data, QUERN_F32, 1, shape);
}

layer_parts layer_project(layer_pass *p)
{
    const int64_t *s = p->symbol;
    const quern_dsv4_layer_kind kind = p->call->params.kind;
    layer_parts parts = {.x = layer_matrix(p, DL_X), .sinks = f32_sinks(p)};
    parts.residual_in = f32_product(p, &parts.x, DL_Q_A);
    parts.residual = layer_room(p, parts.x.dtype, parts.x.shape[0], s[LS_Q_LORA]);
    layer_norm_rope_forward(p, &(norm_rope_args){.norm = true,
                                                 .eps = p->call->params.eps,
                                                 .x = layer_heads(&parts.residual_in, 1, 1),
                                                 .weight = *view_of(p, DL_Q_A_NORM),
                                                 .out = layer_heads(&parts.residual, 1, 1)});
    parts.q_in = f32_product(p, &parts.residual, DL_Q_B);
    parts.kv_in = f32_product(p, &parts.x, DL_KV);
    if (kind != QUERN_DSV4_LAYER_SWA)
        parts.main = project_series(p, &parts.x, DL_COMPRESSOR, DL_COMPRESSOR_FP8, s[LS_D], &parts.main_w);
    if (kind != QUERN_DSV4_LAYER_CSA) return parts;
    parts.index = project_series(p, &parts.x, DL_INDEXER, DL_INDEXER_FP8, s[LS_CI], NULL);
    parts.index_q_in = f32_product(p, &parts.residual, DL_INDEXER_Q_B);
    parts.heads = f32_product(p, &parts.x, DL_INDEXER_HEADS);
    return parts;
}

void layer_make_q(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                  int64_t position)
{
    layer_norm_rope_forward(p, &(norm_rope_args){.position = position,
                                                 .norm = true,
                                                 .eps = p->call->params.eps,
                                                 .x = layer_heads(in, batch, p->symbol[LS_H]),
                                                 .cos_sin = *view_of(p, DL_COS_SIN),
                                                 .out = layer_heads(out, batch, p->symbol[LS_H])});
}

void layer_make_kv(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                   int64_t position)
{
    layer_norm_rope_forward(p, &(norm_rope_args){.position = position,
                                                 .norm = true,
                                                 .eps = p->call->params.eps,
                                                 .x = layer_heads(in, batch, 1),
                                                 .weight = *view_of(p, DL_KV_NORM),
                                                 .cos_sin = *view_of(p, DL_COS_SIN),
                                                 .out = layer_heads(out, batch, 1)});
}

void layer_make_index_q(layer_pass *p, const quern_tensor *in, const quern_tensor *out, int64_t batch,
                        int64_t position)
{
    layer_norm_rope_forward(p, &(norm_rope_args){.position = position,
                                                 .x = layer_heads(in, batch, p->symbol[LS_HI]),
                                                 .cos_sin = *view_of(p, DL_COS_SIN),
                                                 .out = layer_heads(out, batch, p->symbol[LS_HI])});
}

void layer_biases(const quern_tensor *bias, int64_t width, quern_tensor *a, quern_tensor *b)
{
    const bool two = bias->ndim > 0 && bias->shape[1] > width;
    *a = *b = (quern_tensor){0};
    if (bias->ndim == 0) return;
    *a = layer_columns(bias, two ? width : 0, width);
    if (two) *b = layer_columns(bias, 0, width);
}

entry_args layer_entry(const layer_pass *p, dsv4_layer_tensor first)
{
    return (entry_args){.eps = p->call->params.eps,
                        .norm_weight = *view_of(p, (dsv4_layer_tensor)(first + 3)),
                        .cos_sin = *view_of(p, DL_COS_SIN)};
}

pool_args layer_pool(const layer_pass *p, const quern_tensor *proj, const quern_tensor *out,
                     dsv4_layer_tensor first, int64_t batch)
{
    pool_args args = {.ratio = p->symbol[LS_R],
                      .width = out->shape[1],
                      .overlap = has_series_b(p),
                      .batch = batch,
                      .proj = layer_batches(proj, batch),
                      .entry = layer_entry(p, first),
                      .out = layer_batches(out, batch)};
    layer_biases(view_of(p, first), args.width, &args.bias_a, &args.bias_b);
    return args;
}

void layer_choose(layer_pass *p, const quern_tensor *q, const layer_keys *keys, const quern_tensor *heads,
                  int64_t batch, int64_t position, const quern_tensor *idx, const quern_tensor *count,
                  const quern_tensor *scores)
{
    const double channels = (double)p->symbol[LS_CI], count_of_heads = (double)p->symbol[LS_HI];
    const quern_tensor counts = layer_batches(count, batch);
    indexer_args args = {.ratio = p->symbol[LS_R],
                         .position = position,
                         .scale = (float)(1.0 / sqrt(channels * count_of_heads)),
                         .q = layer_heads(q, batch, p->symbol[LS_HI]),
                         .page = keys->page,
                         .format = keys->format,
                         .table = keys->table,
                         .keys = keys->rows,
                         .w = layer_batches(heads, batch),
                         .idx = layer_batches(idx, batch),
                         .count = counts,
                         .scores = *scores};
    args.count.ndim = 2;
    layer_indexer(p, &args);
}

attend_mqa_args layer_core(const layer_pass *p, const quern_tensor *sinks, const quern_tensor *q,
                           const quern_tensor *kv, const quern_tensor *entries, const quern_tensor *idx,
                           const quern_tensor *count, int64_t position)
{
    const int64_t batch = kv->shape[0];
    attend_mqa_args args = {.window = p->call->params.window,
                            .ratio = entries->ndim > 0 ? p->symbol[LS_R] : 1,
                            .position = position,
                            .scale = 1.0f / sqrtf((float)p->symbol[LS_D]),
                            .q = layer_heads(q, batch, p->symbol[LS_H]),
                            .kv = *kv,
                            .entries = *entries,
                            .sink = *sinks,
                            .cos_sin = *view_of(p, DL_COS_SIN),
                            .status = op_status_view(&p->call->head)};
    args.seqs = (stage_seqs){.batch = batch, .n_q = args.q.shape[1], .n_kv = kv->shape[1]};
    args.list = layer_batches(idx, batch);
    args.count = layer_batches(count, batch);
    if (args.count.ndim > 0) args.count.ndim = 2;
    return args;
}

void layer_attend(layer_pass *p, const attend_mqa_args *args, const quern_tensor *core,
                  const quern_tensor *unrotated)
{
    const int64_t batch = args->q.shape[0], heads = p->symbol[LS_H];
    attend_mqa_args now = *args;
    now.o = layer_heads(core, batch, heads);
    if (unrotated->ndim == 0) {
        layer_attend_mqa_forward(p, &now);
        return;
    }
    const quern_tensor rows = layer_room(p, QUERN_F32, core->shape[0], core->shape[1]);
    const quern_tensor to = now.o, from = layer_heads(&rows, batch, heads);
    now.o = from;
    now.cos_sin = (quern_tensor){0};
    layer_attend_mqa_forward(p, &now);
    layer_change(p, &from, unrotated);
    layer_norm_rope_forward(
        p, &(norm_rope_args){
               .position = args->position, .inverse = true, .x = from, .cos_sin = args->cos_sin, .out = to});
}

quern_tensor layer_project_groups(layer_pass *p, const quern_tensor *core)
{
    const int64_t in = p->symbol[LS_GROUP], channels = p->symbol[LS_O_LORA];
    const quern_tensor *w = view_of(p, DL_O_A),
                       all = layer_room(p, core->dtype, core->shape[0], p->symbol[LS_GO]);
    for (int64_t g = 0; g < p->symbol[LS_G]; g++) {
        const quern_tensor heads = layer_columns(core, g * in, in),
                           part = layer_rows(w, g * channels, channels),
                           to = layer_columns(&all, g * channels, channels);
        layer_product(p, &heads, &part, &to);
    }
    return all;
}

void layer_project_out(layer_pass *p, const quern_tensor *o_a_out)
{
    const quern_tensor *out = view_of(p, DL_OUT);
    quern_tensor flat;
    const bool direct = view_flatten(out, &flat);
    if (!direct) flat = layer_room(p, out->dtype, o_a_out->shape[0], p->symbol[LS_IN]);
    layer_product(p, o_a_out, view_of(p, DL_O_B), &flat);
    if (!direct) layer_copy(p, &flat, out);
}
