/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - dense attention's public functions, and the stages that they run.
 *
 *   forward:  attend_forward
 *   backward: rowdot (delta = d_o . o)  ->  attend_backward
 */
#include "attention/attention.h"

#include <math.h>

/* The attention stage's arguments. */
static attend_args attend_of(const attention_call *c)
{
    const op_call *h = &c->head;
    const int64_t *s = h->symbol;
    attend_args a = {.mask = ATTEND_RANGE,
                     .causal = c->params.causal,
                     .window = c->params.window,
                     .query_offset = c->params.query_offset,
                     .tile = 1};
    a.q = op_view(h, ATTENTION_Q, true);
    a.k = op_view(h, ATTENTION_K, true);
    a.v = op_view(h, ATTENTION_V, true);
    a.o = op_view(h, ATTENTION_O, true);
    a.lse = op_view(h, ATTENTION_LSE, true);
    a.d_o = op_view(h, ATTENTION_D_O, true);
    a.d_q = op_view(h, ATTENTION_D_Q, true);
    a.d_k = op_view(h, ATTENTION_D_K, true);
    a.d_v = op_view(h, ATTENTION_D_V, true);
    const bool any = h->varlen || s[ATTENTION_NQ] > 0 ||
                     s[ATTENTION_NKV] > 0; /* no loop goes over sequences without tokens */
    a.seqs = (stage_seqs){any ? s[ATTENTION_B] : 0, s[ATTENTION_NQ], s[ATTENTION_NKV],
                          op_view(h, ATTENTION_CU_Q, false), op_view(h, ATTENTION_CU_KV, false)};
    a.scale = c->params.scale > 0.0f ? c->params.scale : 1.0f / sqrtf((float)s[ATTENTION_D]);
    return a;
}

void attention_build(op_build *b)
{
    attend_args attend = attend_of((const attention_call *)b->call);
    validate_lists_args *lists = OP_ADD(b, validate_lists);
    lists->seqs = attend.seqs;
    lists->status = op_status_view(b->call);
    op_when_asked(b);
    if (b->call->operation == ATTENTION_FORWARD) {
        *OP_ADD(b, attend_forward) = attend;
        return;
    }
    const int64_t shape[] = {attend.q.shape[0], attend.q.shape[2], attend.q.shape[1]};
    attend.delta = op_room(b, QUERN_F32, 3, shape);
    *OP_ADD(b, rowdot) = (rowdot_args){attend.seqs, attend.d_o, attend.o, attend.delta};
    *OP_ADD(b, attend_backward) = attend;
}

quern_status quern_attention_forward_workspace(quern_context *ctx, const quern_attention_params *params,
                                               const quern_attention_tensors *tensors, size_t *bytes)
{
    attention_call call;
    return op_workspace_of(&call.head, &attention_family, ATTENTION_FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_attention_forward(quern_context *ctx, const quern_exec *exec,
                                     const quern_attention_params *params,
                                     const quern_attention_tensors *tensors, void *workspace,
                                     size_t workspace_bytes)
{
    attention_call call;
    return op_run(&call.head, &attention_family, ATTENTION_FORWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_attention_backward_workspace(quern_context *ctx, const quern_attention_params *params,
                                                const quern_attention_tensors *tensors, size_t *bytes)
{
    attention_call call;
    return op_workspace_of(&call.head, &attention_family, ATTENTION_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_attention_backward(quern_context *ctx, const quern_exec *exec,
                                      const quern_attention_params *params,
                                      const quern_attention_tensors *tensors, void *workspace,
                                      size_t workspace_bytes)
{
    attention_call call;
    return op_run(&call.head, &attention_family, ATTENTION_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
