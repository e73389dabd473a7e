/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer.c - the layer's public functions on whole sequences, and its forward pass:
 *
 *   gemm, norm_rope  projections of x; queries and raw rows
 *   pool_forward     entries, and the indexer's keys
 *   indexer          the choice
 *   attend_mqa       the core, rotated back
 *   gemm             output projections, group by group
 */
#include "core/view.h"
#include "dsv4/layer.h"

/* The choice of entries of whole sequences: idx [rows, k] and count [rows, 1]. */
static void choose(layer_pass *p, const layer_parts *parts, int64_t batch, quern_tensor *idx,
                   quern_tensor *count)
{
    const int64_t *s = p->symbol, rows = parts->x.shape[0];
    const quern_tensor keys = layer_room(p, parts->x.dtype, batch * s[LS_S], s[LS_CI]),
                       q = layer_room(p, parts->x.dtype, rows, s[LS_HICI]);
    const layer_keys by_batch = {.format = ENTRY_ROWS, .rows = layer_batches(&keys, batch)};
    *idx = layer_room(p, QUERN_I32, rows, s[LS_K]);
    *count = layer_room(p, QUERN_I32, rows, 1);
    const pool_args pool = layer_pool(p, &parts->index, &keys, DL_INDEXER, batch);
    layer_pool_forward(p, &pool);
    layer_make_index_q(p, &parts->index_q_in, &q, batch, 0);
    layer_choose(p, &q, &by_batch, &parts->heads, batch, 0, idx, count, &p->call->view[DL_IDX_SCORE]);
    const quern_tensor q_by_head = layer_heads(&q, batch, s[LS_HI]);
    layer_give(p, DL_IDX_K, &keys);
    layer_give(p, DL_IDX_Q, &q_by_head);
    layer_give(p, DL_IDX_TOPK, idx);
}

/* Queries [B, T, H, D] to a result [B, H, T, D]. */
static void give_q(layer_pass *p, const quern_tensor *q, int64_t batch)
{
    quern_tensor v = layer_heads(q, batch, p->symbol[LS_H]);
    const int64_t tokens = v.shape[1], stride = v.strides[1];
    v.shape[1] = v.shape[2];
    v.strides[1] = v.strides[2];
    v.shape[2] = tokens;
    v.strides[2] = stride;
    layer_give(p, DL_Q, &v);
}

layer_states layer_compute(layer_pass *p, const layer_parts *parts, bool lse)
{
    const int64_t *s = p->symbol, rows = parts->x.shape[0], batch = p->call->view[DL_X].shape[0];
    const quern_dtype dtype = parts->x.dtype;
    layer_states states = {.batch = batch, .sinks = parts->sinks};
    states.q = layer_room(p, dtype, rows, s[LS_HD]);
    states.kv = layer_room(p, dtype, rows, s[LS_D]);
    layer_make_q(p, &parts->q_in, &states.q, batch, 0);
    layer_make_kv(p, &parts->kv_in, &states.kv, batch, 0);
    if (parts->main.ndim > 0) {
        states.entries = layer_room(p, dtype, batch * s[LS_S], s[LS_D]);
        const pool_args pool = layer_pool(p, &parts->main, &states.entries, DL_COMPRESSOR, batch);
        layer_pool_forward(p, &pool);
    }
    if (parts->index.ndim > 0) choose(p, parts, batch, &states.idx, &states.count);
    states.core = layer_room(p, dtype, rows, s[LS_HD]);
    if (lse) {
        const int64_t shape[] = {batch, s[LS_H], s[LS_T]};
        states.lse = layer_room(p, QUERN_F32, batch * s[LS_H], s[LS_T]);
        states.lse = view_on(&states.lse, states.lse.data, QUERN_F32, 3, shape);
    }
    const attend_mqa_args core = layer_states_core(p, &states);
    layer_attend(p, &core, &states.core, &p->call->view[DL_CORE]);
    return states;
}

attend_mqa_args layer_states_core(const layer_pass *p, const layer_states *states)
{
    const quern_tensor kv = layer_batches(&states->kv, states->batch),
                       entries = layer_batches(&states->entries, states->batch);
    attend_mqa_args core =
        layer_core(p, &states->sinks, &states->q, &kv, &entries, &states->idx, &states->count, 0);
    core.o = layer_heads(&states->core, states->batch, p->symbol[LS_H]);
    core.lse = states->lse;
    return core;
}

void layer_forward(layer_pass *p)
{
    const layer_parts parts = layer_project(p);
    const layer_states states = layer_compute(p, &parts, false);
    const quern_tensor o_a_out = layer_project_groups(p, &states.core);
    layer_project_out(p, &o_a_out);
    layer_give(p, DL_Q_RESIDUAL, &parts.residual);
    give_q(p, &states.q, states.batch);
    layer_give(p, DL_KV_ROWS, &states.kv);
    layer_give(p, DL_COMPRESSED, &states.entries);
    const quern_tensor core = layer_heads(&states.core, states.batch, p->symbol[LS_H]),
                       groups = layer_heads(&o_a_out, states.batch, p->symbol[LS_G]);
    layer_give(p, DL_CORE_IROPE, &core);
    layer_give(p, DL_O_A_OUT, &groups);
}

static void compose(layer_pass *p)
{
    if (p->call->head.family == &dsv4_layer_decode_family) layer_decode(p);
    else if (p->call->head.operation == DSV4_LAYER_BACKWARD) layer_backward(p);
    else layer_forward(p);
}

quern_status dsv4_layer_plan(op_call *call)
{
    dsv4_layer_call *c = (dsv4_layer_call *)call;
    for (int i = 0; i < DSV4_LAYER_TENSORS; i++) c->view[i] = op_view(call, i, false);
    layer_pass p = {.call = c, .symbol = call->symbol, .a = op_workspace()};
    compose(&p);
    c->scratch = arena_take(&p.a, p.scratch_bytes);
    op_workspace_end(call, &p.a);
    return p.status;
}

quern_status dsv4_layer_run(const op_call *call, const op_frame *frame)
{
    const dsv4_layer_call *c = (const dsv4_layer_call *)call;
    layer_pass p = {.call = c, .symbol = call->symbol, .frame = frame, .a = op_workspace()};
    compose(&p);
    return p.status;
}

quern_status quern_dsv4_layer_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                        const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    dsv4_layer_call call;
    return op_workspace_of(&call.head, &dsv4_layer_family, DSV4_LAYER, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_layer(quern_context *ctx, const quern_exec *exec,
                              const quern_dsv4_layer_params *params, const quern_dsv4_layer_tensors *tensors,
                              void *workspace, size_t workspace_bytes)
{
    dsv4_layer_call call;
    return op_run(&call.head, &dsv4_layer_family, DSV4_LAYER, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_layer_backward_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                                 const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    dsv4_layer_call call;
    return op_workspace_of(&call.head, &dsv4_layer_family, DSV4_LAYER_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_layer_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_dsv4_layer_params *params,
                                       const quern_dsv4_layer_tensors *tensors, void *workspace,
                                       size_t workspace_bytes)
{
    dsv4_layer_call call;
    return op_run(&call.head, &dsv4_layer_family, DSV4_LAYER_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
