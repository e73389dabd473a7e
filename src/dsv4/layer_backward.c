/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_backward.c - the layer's backward pass. It computes the layer again, keeping what gradients need,
 * then goes back from d_out:
 *
 *   output projections -> the core (queries, raw rows, entries, sinks) -> norms and rotations, the compressor
 *   -> projections
 *
 * A projection c = a w^T gives d_a = d_c w and d_w = d_c^T a. The gradient of x is a sum over projections, in
 * f32 and in a fixed order.
 */
#include "core/view.h"
#include "dsv4/layer.h"

static const quern_tensor *view_of(const layer_pass *p, dsv4_layer_tensor tensor)
{
    return &p->call->view[tensor];
}

/* d_a (+)= d_c w. */
static void input_gradient(layer_pass *p, const quern_tensor *d_c, const quern_tensor *w,
                           const quern_tensor *d_a, bool accumulate)
{
    layer_gemm(p, &(gemm_args){.a = *d_c, .b = *w, .c = *d_a, .accumulate = accumulate});
}

/* d_w = d_c^T a, where it is wanted. */
static void weight_gradient(layer_pass *p, const quern_tensor *d_c, const quern_tensor *a,
                            const quern_tensor *d_w)
{
    if (d_w->ndim > 0) layer_gemm(p, &(gemm_args){.a = *d_c, .b = *a, .c = *d_w, .a_transposed = true});
}

/* The gradients of rows before norm and rotation, for products: bf16 for the bf16 dot product; f16 would
 * leave its range. */
static quern_dtype gradient_dtype(const layer_pass *p)
{
    return p->call->head.like.dtype == QUERN_BF16 ? QUERN_BF16 : QUERN_F32;
}

/* Back through the output projections: the gradient of the core's rows. */
static quern_tensor output_backward(layer_pass *p, const layer_states *states)
{
    const int64_t *s = p->symbol, in = s[LS_GROUP], channels = s[LS_O_LORA];
    const quern_tensor d_out = layer_matrix(p, DL_D_OUT), o_a_out = layer_project_groups(p, &states->core),
                       d_o_a = layer_room(p, gradient_dtype(p), d_out.shape[0], s[LS_GO]),
                       d_core = layer_room(p, d_out.dtype, d_out.shape[0], s[LS_HD]);
    weight_gradient(p, &d_out, &o_a_out, view_of(p, DL_D_O_B));
    input_gradient(p, &d_out, view_of(p, DL_O_B), &d_o_a, false);
    for (int64_t g = 0; g < s[LS_G]; g++) {
        const quern_tensor d = layer_columns(&d_o_a, g * channels, channels),
                           heads = layer_columns(&states->core, g * in, in),
                           d_heads = layer_columns(&d_core, g * in, in),
                           w = layer_rows(view_of(p, DL_O_A), g * channels, channels),
                           d_w = layer_rows(view_of(p, DL_D_O_A), g * channels, channels);
        weight_gradient(p, &d, &heads, &d_w);
        input_gradient(p, &d, &w, &d_heads, false);
    }
    return d_core;
}

/* From d_out, the gradient of normed and rotated rows of `heads` heads, to that of the rows before. */
static quern_tensor rows_backward(layer_pass *p, const quern_tensor *in, const quern_tensor *d_out,
                                  int64_t batch, int64_t heads, const quern_tensor *weight,
                                  const quern_tensor *d_weight, bool rotated)
{
    const quern_tensor d = layer_room(p, gradient_dtype(p), in->shape[0], in->shape[1]);
    norm_rope_args args = {.norm = true,
                           .eps = p->call->params.eps,
                           .x = layer_heads(in, batch, heads),
                           .weight = *weight,
                           .d_out = layer_heads(d_out, batch, heads),
                           .d_x = layer_heads(&d, batch, heads),
                           .d_weight = *d_weight};
    if (rotated) args.cos_sin = *view_of(p, DL_COS_SIN);
    layer_norm_rope_backward(p, &args);
    return d;
}

/* Back through the compressor; adds to d_x. */
static void compressor_backward(layer_pass *p, const layer_parts *parts, const layer_states *states,
                                const quern_tensor *d_entries, const quern_tensor *d_x)
{
    const int64_t width = p->symbol[LS_D];
    const quern_tensor d_proj = layer_room(p, QUERN_F32, parts->main.shape[0], parts->main.shape[1]);
    pool_args pool = layer_pool(p, &parts->main, &states->entries, DL_COMPRESSOR, states->batch);
    pool.out = (quern_tensor){0};
    pool.d_out = layer_batches(d_entries, states->batch);
    pool.d_proj = layer_batches(&d_proj, states->batch);
    pool.d_norm_weight = *view_of(p, DL_D_COMPRESSOR_NORM);
    layer_biases(view_of(p, DL_D_COMPRESSOR), width, &pool.d_bias_a, &pool.d_bias_b);
    layer_pool_backward(p, &pool);
    if (parts->main_w.ndim > 0) {
        layer_gemm(p,
                   &(gemm_args){
                       .a = d_proj, .b = parts->main_w, .c = *d_x, .b_transposed = true, .accumulate = true});
        return;
    }
    const int64_t series = parts->main.shape[1] / (2 * width);
    for (int64_t i = 0; i < 2 * series; i++) {
        const int64_t first = (series - 1 - i / 2) * width;
        const quern_tensor d = layer_columns(&d_proj, i * width, width),
                           w = layer_rows(view_of(p, DL_COMPRESSOR_KV + i % 2), first, width),
                           d_w = layer_rows(view_of(p, DL_D_COMPRESSOR_KV + i % 2), first, width);
        weight_gradient(p, &d, &parts->x, &d_w);
        input_gradient(p, &d, &w, d_x, true);
    }
}

/* Rows [batch T, columns] to a result [batch, T, columns] in its dtype. */
static void give_rows(layer_pass *p, const quern_tensor *from, int64_t batch, const quern_tensor *to)
{
    if (batch == 0) return; /* of no rows no T follows */
    const quern_tensor in = layer_heads(from, batch, 1);
    quern_tensor out = *to;
    out.ndim = 4;
    out.shape[2] = 1;
    out.strides[2] = to->shape[2];
    out.shape[3] = to->shape[2];
    out.strides[3] = 1;
    layer_change(p, &in, &out);
}

void layer_backward(layer_pass *p)
{
    const int64_t *s = p->symbol;
    const quern_tensor none = {0}, *result = view_of(p, DL_D_X);
    const layer_parts parts = layer_project(p);
    const layer_states states = layer_compute(p, &parts, true);
    const int64_t rows = parts.x.shape[0], batch = states.batch;
    const quern_tensor d_core = output_backward(p, &states), d_q = layer_room(p, QUERN_F32, rows, s[LS_HD]),
                       d_kv = layer_room(p, QUERN_F32, rows, s[LS_D]);
    quern_tensor d_entries = none;
    if (states.entries.ndim > 0) d_entries = layer_room(p, QUERN_F32, states.entries.shape[0], s[LS_D]);
    attend_mqa_args core = layer_states_core(p, &states);
    core.d_o = layer_heads(&d_core, batch, s[LS_H]);
    core.d_q = layer_heads(&d_q, batch, s[LS_H]);
    core.d_kv = layer_batches(&d_kv, batch);
    core.d_entries = layer_batches(&d_entries, batch);
    core.d_sink = *view_of(p, DL_D_SINKS);
    layer_attend_mqa_backward(p, &core);

    const quern_tensor d_q_in = rows_backward(p, &parts.q_in, &d_q, batch, s[LS_H], &none, &none, true),
                       d_residual = layer_room(p, QUERN_F32, rows, s[LS_Q_LORA]);
    weight_gradient(p, &d_q_in, &parts.residual, view_of(p, DL_D_Q_B));
    input_gradient(p, &d_q_in, view_of(p, DL_Q_B), &d_residual, false);
    const quern_tensor d_kv_in = rows_backward(p, &parts.kv_in, &d_kv, batch, 1, view_of(p, DL_KV_NORM),
                                               view_of(p, DL_D_KV_NORM), true),
                       d_residual_in =
                           rows_backward(p, &parts.residual_in, &d_residual, 1, 1, view_of(p, DL_Q_A_NORM),
                                         view_of(p, DL_D_Q_A_NORM), false);
    weight_gradient(p, &d_kv_in, &parts.x, view_of(p, DL_D_KV));
    weight_gradient(p, &d_residual_in, &parts.x, view_of(p, DL_D_Q_A));
    const quern_tensor d_x = layer_room(p, QUERN_F32, rows, s[LS_IN]);
    input_gradient(p, &d_residual_in, view_of(p, DL_Q_A), &d_x, false);
    input_gradient(p, &d_kv_in, view_of(p, DL_KV), &d_x, true);
    if (d_entries.ndim > 0) compressor_backward(p, &parts, &states, &d_entries, &d_x);
    if (result->ndim > 0) give_rows(p, &d_x, batch, result);
}
