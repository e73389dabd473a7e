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
#include "dsv4/layer.h"

/* d_a (+)= d_c w. */
static void input_gradient(op_build *b, const quern_tensor *d_c, const quern_tensor *w,
                           const quern_tensor *d_a, bool accumulate)
{
    *OP_ADD(b, gemm) = (gemm_args){.a = *d_c, .b = *w, .c = *d_a, .accumulate = accumulate};
}

/* d_w = d_c^T a, where it is wanted. */
static void weight_gradient(op_build *b, const quern_tensor *d_c, const quern_tensor *a,
                            const quern_tensor *d_w)
{
    if (d_w->ndim > 0) *OP_ADD(b, gemm) = (gemm_args){.a = *d_c, .b = *a, .c = *d_w, .a_transposed = true};
}

/* Both gradients of a projection by a weight of the call. */
static void both_gradients(op_build *b, const quern_tensor *d_c, const quern_tensor *a, int32_t weight,
                           int32_t d_weight, const quern_tensor *d_a, bool accumulate)
{
    const quern_tensor w = layer_view(b, weight), d_w = layer_view(b, d_weight);
    weight_gradient(b, d_c, a, &d_w);
    input_gradient(b, d_c, &w, d_a, accumulate);
}

/* Back through the output projections: the gradient of the core's rows. */
static quern_tensor output_backward(op_build *b, const layer_states *states)
{
    const int64_t *s = b->call->symbol;
    const quern_tensor d_out = op_rows(b, DL(d_out)), o_a_out = layer_project_groups(b, &states->core),
                       d_o_a = op_matrix(b, op_between_dtype(b->call->like.dtype), d_out.shape[0], s[LS_GO]),
                       d_core = op_matrix(b, d_out.dtype, d_out.shape[0], s[LS_HD]),
                       w = layer_view(b, DL(o_a)), d_w = layer_view(b, DL(d_o_a));
    both_gradients(b, &d_out, &o_a_out, DL(o_b), DL(d_o_b), &d_o_a, false);
    op_loop_begin(b, 1, &s[LS_G]);
    if (d_w.ndim > 0) {
        gemm_args *args = OP_ADD(b, gemm);
        *args = (gemm_args){.a = d_o_a, .b = states->core, .c = d_w, .a_transposed = true};
        op_cut(b, &args->a, 1);
        op_cut(b, &args->b, 1);
        op_cut(b, &args->c, 0);
    }
    gemm_args *args = OP_ADD(b, gemm);
    *args = (gemm_args){.a = d_o_a, .b = w, .c = d_core};
    op_cut(b, &args->a, 1);
    op_cut(b, &args->b, 0);
    op_cut(b, &args->c, 1);
    op_loop_end(b);
    return d_core;
}

/* From d_out, the gradient of normed rows of `heads` heads, to that of the rows before. The norm has a weight
 * or OP_NONE. */
static quern_tensor rows_backward(op_build *b, const quern_tensor *in, const quern_tensor *d_out,
                                  int64_t batch, int64_t heads, int32_t weight, int32_t d_weight,
                                  bool rotated)
{
    const quern_tensor d = op_matrix(b, op_between_dtype(b->call->like.dtype), in->shape[0], in->shape[1]);
    norm_rope_args *args = OP_ADD(b, norm_rope_backward);
    *args = (norm_rope_args){.norm = true,
                             .eps = layer_params(b)->eps,
                             .x = layer_heads(in, batch, heads),
                             .d_out = layer_heads(d_out, batch, heads),
                             .d_x = layer_heads(&d, batch, heads)};
    if (weight != OP_NONE) {
        args->weight = layer_view(b, weight);
        args->d_weight = layer_view(b, d_weight);
    }
    if (rotated) args->cos_sin = layer_view(b, DL(cos_sin));
    return d;
}

/* Back through the compressor; adds to d_x. */
static void compressor_backward(op_build *b, const layer_parts *parts, const layer_states *states,
                                const quern_tensor *d_entries, const quern_tensor *d_x)
{
    const int64_t width = b->call->symbol[LS_D];
    const quern_tensor d_proj = op_matrix(b, QUERN_F32, parts->main.shape[0], parts->main.shape[1]),
                       d_bias = layer_view(b, DL(d_compressor_bias));
    pool_args *pool = OP_ADD(b, pool_backward);
    layer_pool(b, pool, &parts->main, &states->entries, DL(compressor_bias), states->batch);
    pool->out = (quern_tensor){0};
    pool->d_out = layer_batches(d_entries, states->batch);
    pool->d_proj = layer_batches(&d_proj, states->batch);
    pool->d_norm_weight = layer_view(b, DL(d_compressor_norm));
    layer_biases(&d_bias, width, &pool->d_bias_a, &pool->d_bias_b);
    if (parts->main_w.ndim > 0) {
        *OP_ADD(b, gemm) =
            (gemm_args){.a = d_proj, .b = parts->main_w, .c = *d_x, .b_transposed = true, .accumulate = true};
        return;
    }
    const int64_t series = parts->main.shape[1] / (2 * width);
    for (int32_t i = 0; i < 2 * series; i++) {
        const int64_t first = (series - 1 - i / 2) * width;
        const quern_tensor all = layer_view(b, DL(compressor_kv) + i % 2),
                           d_all = layer_view(b, DL(d_compressor_kv) + i % 2),
                           d = layer_columns(&d_proj, i * width, width), w = layer_rows(&all, first, width),
                           d_w = layer_rows(&d_all, first, width);
        weight_gradient(b, &d, &parts->x, &d_w);
        input_gradient(b, &d, &w, d_x, true);
    }
}

/* The gradient of x, of rows [batch T, columns], in its dtype. */
static void give_d_x(op_build *b, const quern_tensor *d_x, int64_t batch)
{
    const quern_tensor to = layer_view(b, DL(d_x)), in = layer_heads(d_x, batch, 1);
    if (to.ndim == 0 || batch == 0) return; /* of no rows no T follows */
    quern_tensor out = to;
    out.ndim = 4;
    out.shape[2] = 1;
    out.strides[2] = to.shape[2];
    out.shape[3] = to.shape[2];
    out.strides[3] = 1;
    layer_change(b, &in, &out);
}

void layer_build_backward(op_build *b)
{
    const int64_t *s = b->call->symbol;
    layer_parts parts = layer_project(b);
    layer_project_index(b, &parts);
    layer_project_q(b, &parts);
    const layer_states states = layer_compute(b, &parts, true);
    const int64_t rows = parts.x.shape[0], batch = states.batch;
    const quern_tensor d_core = output_backward(b, &states), d_q = op_matrix(b, QUERN_F32, rows, s[LS_HD]),
                       d_kv = op_matrix(b, QUERN_F32, rows, s[LS_D]);
    quern_tensor d_entries = {0};
    if (states.entries.ndim > 0) d_entries = op_matrix(b, QUERN_F32, states.entries.shape[0], s[LS_D]);
    attend_mqa_args *core = OP_ADD(b, attend_mqa_backward);
    *core = layer_states_core(b, &states);
    core->d_o = layer_heads(&d_core, batch, s[LS_H]);
    core->d_q = layer_heads(&d_q, batch, s[LS_H]);
    core->d_kv = layer_batches(&d_kv, batch);
    core->d_entries = layer_batches(&d_entries, batch);
    core->d_sink = layer_view(b, DL(d_sinks));

    const quern_tensor d_residual = op_matrix(b, QUERN_F32, rows, s[LS_Q_LORA]),
                       d_x = op_matrix(b, QUERN_F32, rows, s[LS_IN]),
                       d_q_in = rows_backward(b, &parts.q_in, &d_q, batch, s[LS_H], OP_NONE, OP_NONE, true);
    both_gradients(b, &d_q_in, &parts.residual, DL(q_b), DL(d_q_b), &d_residual, false);
    const quern_tensor d_kv_in =
                           rows_backward(b, &parts.kv_in, &d_kv, batch, 1, DL(kv_norm), DL(d_kv_norm), true),
                       d_residual_in = rows_backward(b, &parts.residual_in, &d_residual, 1, 1, DL(q_a_norm),
                                                     DL(d_q_a_norm), false);
    both_gradients(b, &d_residual_in, &parts.x, DL(q_a), DL(d_q_a), &d_x, false);
    both_gradients(b, &d_kv_in, &parts.x, DL(kv), DL(d_kv), &d_x, true);
    if (d_entries.ndim > 0) compressor_backward(b, &parts, &states, &d_entries, &d_x);
    give_d_x(b, &d_x, batch);
}
