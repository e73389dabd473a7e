/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_parts.c - the parts of a layer that its forward pass, its backward pass and decoding share. */
#include "core/view.h"
#include "dsv4/layer.h"
#include "dsv4/weights.h"

#include <math.h>

quern_tensor layer_batches(const quern_tensor *t, int64_t batch)
{
    quern_tensor v = *t;
    if (t->ndim == 0) return v;
    v.ndim = 3;
    v.shape[0] = batch;
    v.shape[1] = batch > 0 ? t->shape[0] / batch : 0;
    v.shape[2] = t->shape[1];
    v.strides[0] = v.shape[1] * t->strides[0];
    v.strides[1] = t->strides[0];
    v.strides[2] = 1;
    return v;
}

quern_tensor layer_heads(const quern_tensor *t, int64_t batch, int64_t heads)
{
    quern_tensor v = layer_batches(t, batch);
    if (t->ndim == 0) return v;
    v.ndim = 4;
    v.shape[3] = v.shape[2] / heads;
    v.shape[2] = heads;
    v.strides[2] = v.shape[3];
    v.strides[3] = 1;
    return v;
}

quern_tensor layer_rows(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    view_narrow(&v, 0, first, count);
    return v;
}

quern_tensor layer_columns(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    view_narrow(&v, 1, first, count);
    return v;
}

void layer_change(op_build *b, const quern_tensor *from, const quern_tensor *to)
{
    const int64_t rows = to->shape[1];
    *OP_ADD(b, convert) =
        (convert_args){.seqs = {.batch = to->shape[0], .n_q = rows, .n_kv = rows}, .in = *from, .out = *to};
}

/* c = a w^T. */
static void product(op_build *b, const quern_tensor *a, const quern_tensor *w, const quern_tensor *c)
{
    *OP_ADD(b, gemm) = (gemm_args){.a = *a, .b = *w, .c = *c, .b_transposed = true};
}

static bool has_series_b(const op_build *b)
{
    return layer_params(b)->kind == QUERN_DSV4_LAYER_CSA;
}

/* x by a weight [n, Dm], in f32. */
static quern_tensor f32_product(op_build *b, const quern_tensor *x, int32_t weight)
{
    const quern_tensor w = layer_view(b, weight), c = op_matrix(b, QUERN_F32, x->shape[0], w.shape[0]);
    product(b, x, &w, &c);
    return c;
}

/* The same by a weight in FP8 or NVFP4. Where w is not NULL: *w becomes the weight in floats, which the
 * backward pass always has, or absent. */
static quern_tensor project_packed(op_build *b, const quern_tensor *x, const dsv4_weight_given *given,
                                   quern_tensor *w)
{
    const bool floats =
        w != NULL && b->call->family == &dsv4_layer_family && b->call->operation == DSV4_LAYER_BACKWARD;
    const dsv4_weight weight = dsv4_weight_add(b, x, given, floats);
    if (w != NULL) *w = weight.w;
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj = op_matrix(b, QUERN_F32, x->shape[0], weight.w.shape[1]);
    *OP_ADD(b, gemm) = (gemm_args){.a = *x, .b = weight.w, .c = proj};
    return proj;
}

/* A compressor's projections [values a, logits a, values b, logits b]; `packed` is w of the above, or
 * NULL. */
static quern_tensor project_series(op_build *b, const quern_tensor *x, int32_t first,
                                   const dsv4_weight_given *given, int64_t width, quern_tensor *packed)
{
    const int series = has_series_b(b) ? 2 : 1;
    if (given->w_fp8.ndim > 0 || given->w_codes.ndim > 0) return project_packed(b, x, given, packed);
    const quern_tensor proj = op_matrix(b, QUERN_F32, x->shape[0], 2 * series * width);
    for (int i = 0; i < 2 * series; i++) {
        const quern_tensor w = layer_view(b, first + 1 + i % 2),
                           part = layer_rows(&w, (series - 1 - i / 2) * width, width),
                           to = layer_columns(&proj, i * width, width);
        product(b, x, &part, &to);
    }
    return proj;
}

/* The sinks in f32: the caller's, or a copy. */
static quern_tensor f32_sinks(op_build *b)
{
    const quern_tensor given = layer_view(b, DL(sinks));
    if (given.ndim == 0 || given.dtype == QUERN_F32) return given;
    const int64_t heads = given.shape[0], row[] = {1, heads};
    const quern_tensor from = view_on(&given, given.data, given.dtype, 2, row),
                       to = op_matrix(b, QUERN_F32, 1, heads);
    const quern_tensor in = layer_heads(&from, 1, 1), out = layer_heads(&to, 1, 1);
    layer_change(b, &in, &out);
    return view_on(&to, to.data, QUERN_F32, 1, &heads);
}

void layer_rotate(op_build *b, const quern_tensor *in, const quern_tensor *out, int64_t batch, int64_t heads,
                  const quern_tensor *at, bool norm, int32_t weight)
{
    norm_rope_args *args = OP_ADD(b, norm_rope_forward);
    if (at != NULL) args->positions = *at;
    args->norm = norm;
    args->eps = layer_params(b)->eps;
    args->x = layer_heads(in, batch, heads);
    if (weight != OP_NONE) args->weight = layer_view(b, weight);
    args->cos_sin = layer_view(b, DL(cos_sin));
    args->out = layer_heads(out, batch, heads);
}

void layer_give_q(op_build *b, const quern_tensor *q, int64_t batch)
{
    quern_tensor v = layer_heads(q, batch, b->call->symbol[LS_H]);
    const int64_t tokens = v.shape[1], stride = v.strides[1];
    v.shape[1] = v.shape[2];
    v.strides[1] = v.strides[2];
    v.shape[2] = tokens;
    v.strides[2] = stride;
    op_give(b, DL(q), &v);
}

layer_parts layer_project(op_build *b)
{
    dsv4_layer_call *c = (dsv4_layer_call *)b->call;
    const int64_t *s = b->call->symbol;
    const quern_dsv4_layer_kind kind = c->params.kind;
    layer_parts parts = {.x = op_rows(b, DL(x)), .sinks = f32_sinks(b)};
    /* Products of x stand together: a backend may make one launch of them. */
    parts.residual_in = f32_product(b, &parts.x, DL(q_a));
    parts.kv_in = f32_product(b, &parts.x, DL(kv));
    for (int i = 0; i < 2; i++) c->weights[i] = dsv4_weight_views(b->call, &layer_weights(b->call)[i]);
    if (kind != QUERN_DSV4_LAYER_SWA)
        parts.main = project_series(b, &parts.x, DL(compressor_bias), &c->weights[0], s[LS_D], &parts.main_w);
    if (kind == QUERN_DSV4_LAYER_CSA) {
        parts.index = project_series(b, &parts.x, DL(indexer_bias), &c->weights[1], s[LS_CI], NULL);
        parts.heads = f32_product(b, &parts.x, DL(indexer_heads));
    }
    parts.residual = op_matrix(b, parts.x.dtype, parts.x.shape[0], s[LS_Q_LORA]);
    *OP_ADD(b, norm_rope_forward) = (norm_rope_args){.norm = true,
                                                     .eps = c->params.eps,
                                                     .x = layer_heads(&parts.residual_in, 1, 1),
                                                     .weight = layer_view(b, DL(q_a_norm)),
                                                     .out = layer_heads(&parts.residual, 1, 1)};
    return parts;
}

void layer_project_index(op_build *b, layer_parts *parts)
{
    if (layer_params(b)->kind == QUERN_DSV4_LAYER_CSA)
        parts->index_q_in = f32_product(b, &parts->residual, DL(indexer_q_b));
}

void layer_project_q(op_build *b, layer_parts *parts)
{
    parts->q_in = f32_product(b, &parts->residual, DL(q_b));
}

void layer_biases(const quern_tensor *bias, int64_t width, quern_tensor *a, quern_tensor *second)
{
    const bool two = bias->ndim > 0 && bias->shape[1] > width;
    if (bias->ndim == 0) return;
    *a = layer_columns(bias, two ? width : 0, width);
    if (two) *second = layer_columns(bias, 0, width);
}

entry_args layer_entry(const op_build *b, int32_t first)
{
    return (entry_args){.eps = layer_params(b)->eps,
                        .norm_weight = layer_view(b, first + 3),
                        .cos_sin = layer_view(b, DL(cos_sin))};
}

void layer_pool(const op_build *b, pool_args *args, const quern_tensor *proj, const quern_tensor *out,
                int32_t first, int64_t batch)
{
    const quern_tensor bias = layer_view(b, first);
    args->ratio = b->call->symbol[LS_R];
    args->width = out->shape[1];
    args->overlap = has_series_b(b);
    args->batch = batch;
    args->proj = layer_batches(proj, batch);
    args->entry = layer_entry(b, first);
    args->out = layer_batches(out, batch);
    layer_biases(&bias, args->width, &args->bias_a, &args->bias_b);
}

indexer_args *layer_choose(op_build *b, const quern_tensor *q, const quern_tensor *keys,
                           const quern_tensor *heads, const quern_tensor *idx, const quern_tensor *count,
                           int64_t batch)
{
    const int64_t *s = b->call->symbol;
    indexer_args *args = OP_ADD(b, indexer);
    *args = (indexer_args){.ratio = s[LS_R],
                           .scale = (float)(1.0 / sqrt((double)s[LS_CI] * (double)s[LS_HI])),
                           .q = layer_heads(q, batch, s[LS_HI]),
                           .keys = *keys,
                           .w = layer_batches(heads, batch),
                           .idx = layer_batches(idx, batch),
                           .count = layer_batches(count, batch)};
    args->count.ndim = 2;
    return args;
}

attend_mqa_args layer_core(const op_build *b, const layer_states *states, const quern_tensor *kv,
                           const quern_tensor *entries)
{
    const int64_t *s = b->call->symbol, batch = states->batch;
    attend_mqa_args args = {.window = layer_params(b)->window,
                            .ratio = entries->ndim > 0 ? s[LS_R] : 1,
                            .scale = 1.0f / sqrtf((float)s[LS_D]),
                            .q = layer_heads(&states->q, batch, s[LS_H]),
                            .kv = *kv,
                            .entries = *entries,
                            .list = layer_batches(&states->idx, batch),
                            .count = layer_batches(&states->count, batch),
                            .sink = states->sinks,
                            .cos_sin = layer_view(b, DL(cos_sin)),
                            .o = layer_heads(&states->core, batch, s[LS_H]),
                            .lse = states->lse};
    args.seqs = (stage_seqs){.batch = batch, .n_q = args.q.shape[1], .n_kv = kv->shape[1]};
    if (args.count.ndim > 0) args.count.ndim = 2;
    return args;
}

void layer_attend(op_build *b, const attend_mqa_args *args, const quern_tensor *at,
                  const quern_tensor *unrotated)
{
    attend_mqa_args *now = OP_ADD(b, attend_mqa_forward);
    *now = *args;
    if (unrotated->ndim == 0) return;
    const quern_tensor from = op_room(b, QUERN_F32, 4, args->o.shape);
    now->o = from;
    now->cos_sin = (quern_tensor){0};
    layer_change(b, &from, unrotated);
    norm_rope_args *rotate = OP_ADD(b, norm_rope_forward);
    *rotate = (norm_rope_args){.inverse = true, .x = from, .cos_sin = args->cos_sin, .out = args->o};
    if (at != NULL) rotate->positions = *at;
}

quern_tensor layer_project_groups(op_build *b, const quern_tensor *core)
{
    const int64_t *s = b->call->symbol;
    const quern_tensor all = op_matrix(b, core->dtype, core->shape[0], s[LS_GO]), w = layer_view(b, DL(o_a));
    if (b->program->beside && s[LS_G] <= LAYER_GROUPS_BESIDE) {
        for (int64_t g = 0; g < s[LS_G]; g++) {
            const quern_tensor x = layer_columns(core, g * s[LS_GROUP], s[LS_GROUP]),
                               part = layer_rows(&w, g * s[LS_O_LORA], s[LS_O_LORA]),
                               c = layer_columns(&all, g * s[LS_O_LORA], s[LS_O_LORA]);
            product(b, &x, &part, &c);
        }
        return all;
    }
    op_loop_begin(b, 1, &s[LS_G]);
    gemm_args *args = OP_ADD(b, gemm);
    *args = (gemm_args){.a = *core, .b = w, .c = all, .b_transposed = true};
    op_cut(b, &args->a, 1);
    op_cut(b, &args->b, 0);
    op_cut(b, &args->c, 1);
    op_loop_end(b);
    return all;
}

bool layer_project_out(op_build *b, const quern_tensor *o_a_out, const quern_tensor *live)
{
    const quern_tensor out = layer_view(b, DL(out)), w = layer_view(b, DL(o_b));
    quern_tensor flat;
    const bool direct = view_flatten(&out, &flat);
    if (!direct) flat = op_matrix(b, out.dtype, o_a_out->shape[0], b->call->symbol[LS_IN]);
    gemm_args args = {.a = *o_a_out, .b = w, .c = flat, .b_transposed = true, .live = *live};
    const bool clears = op_takes(b, OP_gemm, &args);
    if (!clears) args.live = (quern_tensor){0};
    *OP_ADD(b, gemm) = args;
    if (!direct) op_copy(b, &flat, &out);
    return clears;
}
