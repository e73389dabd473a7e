/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - dense attention's public functions, and the stages that they run.
 *
 *   forward:  attend_forward
 *   backward: rowdot (delta = d_o . o)  ->  attend_backward
 */
#include "attention/attention.h"

#include "core/error.h"
#include "core/view.h"

#include <math.h>

static bool is_backward(const op_call *call)
{
    return call->operation == ATTENTION_BACKWARD;
}

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

/* The backward's workspace: delta, then what the stages need, one after the other in the same place. */
quern_status attention_plan(op_call *call)
{
    attention_call *c = (attention_call *)call;
    const quern_backend *b = call->backend;
    arena a = op_workspace();
    char why[STAGE_WHY_BYTES] = "";
    c->attend = attend_of(c);
    c->lists = (validate_lists_args){.seqs = c->attend.seqs, .status = op_status_view(call)};
    const attend_stage *stage = is_backward(call) ? &b->attend_backward : &b->attend_forward;
    size_t bytes = 0;
    if (is_backward(call)) {
        const attend_args *attend = &c->attend;
        const int64_t shape[] = {attend->q.shape[0], attend->q.shape[2], attend->q.shape[1]};
        void *delta = arena_take(&a, (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float));
        c->attend.delta = view_on(&call->like, delta, QUERN_F32, 3, shape);
        c->rowdot = (rowdot_args){attend->seqs, attend->d_o, attend->o, attend->delta};
        bytes = STAGE_WORKSPACE(b->rowdot, &call->exec, &c->rowdot);
    }
    if (!STAGE_TAKES(*stage, &call->exec, &c->attend, why))
        return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    const size_t most = STAGE_WORKSPACE(*stage, &call->exec, &c->attend);
    c->scratch = arena_take(&a, most > bytes ? most : bytes);
    op_workspace_end(call, &a);
    return QUERN_OK;
}

quern_status attention_run(const op_call *call, const op_frame *frame)
{
    const attention_call *c = (const attention_call *)call;
    quern_status status = QUERN_OK;
    if (frame->asked) status = op_validate_lists(call, frame, &c->lists, NULL);
    if (status == QUERN_OK && !is_backward(call))
        return op_attend_forward(call, frame, &c->attend, c->scratch);
    if (status == QUERN_OK) status = op_rowdot(call, frame, &c->rowdot, c->scratch);
    return status == QUERN_OK ? op_attend_backward(call, frame, &c->attend, c->scratch) : status;
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
