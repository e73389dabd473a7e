/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.c - the layer's public functions on whole sequences, and the steps of its forward pass:
 *
 *   gemm, norm_rope  projections of x; queries and raw rows
 *   pool_forward     entries, and the indexer's keys
 *   indexer          the choice
 *   attend_mqa       the core, rotated back
 *   gemm             output projections, group by group
 */
#include "dsv4/layer.h"

/* The choice of entries of whole sequences: idx [rows, k] and count [rows, 1]. */
static void choose(op_build *b, const layer_parts *parts, int64_t batch, quern_tensor *idx,
                   quern_tensor *count)
{
    const int64_t *s = b->call->symbol, rows = parts->x.shape[0];
    const quern_tensor keys = op_matrix(b, parts->x.dtype, batch * s[LS_S], s[LS_CI]),
                       q = op_matrix(b, parts->x.dtype, rows, s[LS_HICI]);
    const quern_tensor scores = layer_view(b, DL(idx_score));
    const quern_tensor by_batch = layer_batches(&keys, batch);
    *idx = op_matrix(b, QUERN_I32, rows, s[LS_K]);
    *count = op_matrix(b, QUERN_I32, rows, 1);
    layer_pool(b, OP_ADD(b, pool_forward), &parts->index, &keys, DL(indexer_bias), batch);
    layer_rotate(b, &parts->index_q_in, &q, batch, s[LS_HI], NULL, false, OP_NONE);
    layer_choose(b, &q, &by_batch, &parts->heads, idx, count, batch)->scores = scores;
    const quern_tensor q_by_head = layer_heads(&q, batch, s[LS_HI]);
    op_give(b, DL(idx_k), &keys);
    op_give(b, DL(idx_q), &q_by_head);
    op_give(b, DL(idx_topk), idx);
}

layer_states layer_compute(op_build *b, const layer_parts *parts, bool lse)
{
    const int64_t *s = b->call->symbol, rows = parts->x.shape[0], batch = b->call->lead[1].extent[0];
    const quern_dtype dtype = parts->x.dtype;
    layer_states states = {.batch = batch, .sinks = parts->sinks};
    states.q = op_matrix(b, dtype, rows, s[LS_HD]);
    states.kv = op_matrix(b, dtype, rows, s[LS_D]);
    layer_rotate(b, &parts->q_in, &states.q, batch, s[LS_H], NULL, true, OP_NONE);
    layer_rotate(b, &parts->kv_in, &states.kv, batch, 1, NULL, true, DL(kv_norm));
    if (parts->main.ndim > 0) {
        states.entries = op_matrix(b, dtype, batch * s[LS_S], s[LS_D]);
        layer_pool(b, OP_ADD(b, pool_forward), &parts->main, &states.entries, DL(compressor_bias), batch);
    }
    if (parts->index.ndim > 0) choose(b, parts, batch, &states.idx, &states.count);
    states.core = op_matrix(b, dtype, rows, s[LS_HD]);
    if (lse) {
        const int64_t shape[] = {batch, s[LS_H], s[LS_T]};
        states.lse = op_room(b, QUERN_F32, 3, shape);
    }
    const attend_mqa_args core = layer_states_core(b, &states);
    const quern_tensor unrotated = layer_view(b, DL(core));
    layer_attend(b, &core, NULL, &unrotated);
    return states;
}

attend_mqa_args layer_states_core(const op_build *b, const layer_states *states)
{
    const quern_tensor kv = layer_batches(&states->kv, states->batch),
                       entries = layer_batches(&states->entries, states->batch);
    return layer_core(b, states, &kv, &entries);
}

static void build_forward(op_build *b)
{
    layer_parts parts = layer_project(b);
    layer_project_index(b, &parts);
    layer_project_q(b, &parts);
    const layer_states states = layer_compute(b, &parts, false);
    const quern_tensor o_a_out = layer_project_groups(b, &states.core);
    (void)layer_project_out(b, &o_a_out, &(quern_tensor){0});
    op_give(b, DL(q_residual), &parts.residual);
    layer_give_q(b, &states.q, states.batch);
    op_give(b, DL(kv_rows), &states.kv);
    op_give(b, DL(compressed), &states.entries);
    const quern_tensor core = layer_heads(&states.core, states.batch, b->call->symbol[LS_H]),
                       groups = layer_heads(&o_a_out, states.batch, b->call->symbol[LS_G]);
    op_give(b, DL(core_irope), &core);
    op_give(b, DL(o_a_out), &groups);
}

void layer_build(op_build *b)
{
    if (b->call->operation == DSV4_LAYER_BACKWARD) layer_build_backward(b);
    else build_forward(b);
}

quern_status quern_dsv4_layer_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                        const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&dsv4_layer_family, DSV4_LAYER, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_layer(quern_context *ctx, const quern_exec *exec,
                              const quern_dsv4_layer_params *params, const quern_dsv4_layer_tensors *tensors,
                              void *workspace, size_t workspace_bytes)
{
    return op_run(&dsv4_layer_family, DSV4_LAYER, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_dsv4_layer_backward_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                                 const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&dsv4_layer_family, DSV4_LAYER_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_layer_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_dsv4_layer_params *params,
                                       const quern_dsv4_layer_tensors *tensors, void *workspace,
                                       size_t workspace_bytes)
{
    return op_run(&dsv4_layer_family, DSV4_LAYER_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
