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

static stage_seqs sequences_of(const op_call *call)
{
    const int64_t *s = call->symbol;
    const bool any = call->varlen || s[ATTENTION_NQ] > 0 ||
                     s[ATTENTION_NKV] > 0; /* no loop goes over sequences without tokens */
    return (stage_seqs){any ? s[ATTENTION_B] : 0, s[ATTENTION_NQ], s[ATTENTION_NKV],
                        op_view(call, A(cu_seqlens_q), false), op_view(call, A(cu_seqlens_kv), false)};
}

/* Fills the attention stage's arguments. */
static void fill(const op_call *h, attend_args *a)
{
    const quern_attention_params *p = op_params(h);
    a->mask = ATTEND_RANGE;
    a->seqs = sequences_of(h);
    a->causal = p->causal;
    a->scale = p->scale > 0.0f ? p->scale : 1.0f / sqrtf((float)h->symbol[ATTENTION_D]);
    a->window = p->window;
    a->query_offset = p->query_offset;
    a->tile = 1;
    a->q = op_view(h, A(q), true);
    a->k = op_view(h, A(k), true);
    a->v = op_view(h, A(v), true);
    a->o = op_view(h, A(o), true);
    a->lse = op_view(h, A(lse), true);
    a->sink = op_view(h, A(sink), false);
    a->kv_first = op_view(h, A(kv_first), false);
    a->kv_count = op_view(h, A(kv_count), false);
}

static void add_backward(op_build *b)
{
    const op_call *h = b->call;
    const quern_tensor o = op_view(h, A(o), true), d_o = op_view(h, A(d_o), true);
    const int64_t shape[] = {o.shape[0], o.shape[2], o.shape[1]};
    const quern_tensor delta = op_room(b, QUERN_F32, 3, shape);
    *OP_ADD(b, rowdot) = (rowdot_args){sequences_of(h), d_o, o, delta};
    attend_args *attend = OP_ADD(b, attend_backward);
    fill(h, attend);
    attend->d_o = d_o;
    attend->delta = delta;
    attend->d_q = op_view(h, A(d_q), true);
    attend->d_k = op_view(h, A(d_k), true);
    attend->d_v = op_view(h, A(d_v), true);
    attend->d_sink = op_view(h, A(d_sink), false);
}

void attention_build(op_build *b)
{
    validate_lists_args *lists = OP_ADD(b, validate_lists);
    lists->seqs = sequences_of(b->call);
    op_when_asked(b);
    if (b->call->operation == ATTENTION_BACKWARD) add_backward(b);
    else fill(b->call, OP_ADD(b, attend_forward));
}

quern_status quern_attention_forward_workspace(quern_context *ctx, const quern_attention_params *params,
                                               const quern_attention_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&attention_family, ATTENTION_FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_attention_forward(quern_context *ctx, const quern_exec *exec,
                                     const quern_attention_params *params,
                                     const quern_attention_tensors *tensors, void *workspace,
                                     size_t workspace_bytes)
{
    return op_run(&attention_family, ATTENTION_FORWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_attention_backward_workspace(quern_context *ctx, const quern_attention_params *params,
                                                const quern_attention_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&attention_family, ATTENTION_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_attention_backward(quern_context *ctx, const quern_exec *exec,
                                      const quern_attention_params *params,
                                      const quern_attention_tensors *tensors, void *workspace,
                                      size_t workspace_bytes)
{
    return op_run(&attention_family, ATTENTION_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
