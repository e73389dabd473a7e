/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - the attention core's public functions, and the stage that each runs.
 *
 *   forward:  attend_mqa_forward
 *   backward: attend_mqa_backward
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

#include <math.h>

static bool is_backward(const op_call *call)
{
    return call->operation == DSV4_ATTENTION_BACKWARD;
}

static attend_mqa_args attend_of(const dsv4_attention_call *c)
{
    const op_call *h = &c->head;
    const int64_t *s = h->symbol;
    attend_mqa_args a = {
        .window = c->params.window, .ratio = c->params.ratio, .position = c->params.start_abs_pos};
    a.format = dsv4_entry_format(c->params.format);
    a.page = c->params.page;
    a.positions = op_view(h, DA_START_POSITIONS, false);
    a.kv_table = op_view(h, DA_KV_TABLE, false);
    a.entries_table = op_view(h, DA_KV_CMP_TABLE, false);
    a.scale = 1.0f / sqrtf((float)s[AS_D]);
    a.seqs = (stage_seqs){.batch = dsv4_attention_sequences(h),
                          .n_q = s[AS_T],
                          .n_kv = s[AS_N],
                          .cu_q = op_view(h, DA_CU_SEQLENS, false)};
    a.q = op_view(h, DA_Q, true);
    a.kv = op_view(h, DA_KV, true);
    a.entries = op_view(h, DA_KV_CMP, true);
    a.list = op_view(h, DA_IDX, true);
    a.count = op_view(h, DA_COUNT, true);
    a.sink = op_view(h, DA_SINK, false);
    a.cos_sin = op_view(h, DA_COS_SIN, false);
    a.o = op_view(h, DA_O, true);
    a.lse = op_view(h, DA_LSE, true);
    a.lse_win = op_view(h, DA_LSE_WIN, true);
    a.status = op_status_view(h);
    a.d_o = op_view(h, DA_D_O, true);
    a.d_q = op_view(h, DA_D_Q, true);
    a.d_kv = op_view(h, DA_D_KV, true);
    a.d_entries = op_view(h, DA_D_KV_CMP, true);
    a.d_sink = op_view(h, DA_D_SINK, false);
    return a;
}

quern_status dsv4_attention_plan(op_call *call)
{
    dsv4_attention_call *c = (dsv4_attention_call *)call;
    const attend_mqa_stage *stage =
        is_backward(call) ? &call->backend->attend_mqa_backward : &call->backend->attend_mqa_forward;
    arena a = op_workspace();
    char why[STAGE_WHY_BYTES] = "";
    if (stage->run == NULL)
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "the %s backend has no attention over compressed entries: the cpu has",
                         call->backend->name);
    c->attend = attend_of(c);
    if (!STAGE_TAKES(*stage, &call->exec, &c->attend, why))
        return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    c->scratch = arena_take(&a, STAGE_WORKSPACE(*stage, &call->exec, &c->attend));
    op_workspace_end(call, &a);
    return QUERN_OK;
}

quern_status dsv4_attention_run(const op_call *call, const op_frame *frame)
{
    const dsv4_attention_call *c = (const dsv4_attention_call *)call;
    return is_backward(call) ? op_attend_mqa_backward(call, frame, &c->attend, c->scratch)
                             : op_attend_mqa_forward(call, frame, &c->attend, c->scratch);
}

quern_status quern_dsv4_attention_workspace(quern_context *ctx, const quern_dsv4_attention_params *params,
                                            const quern_dsv4_attention_tensors *tensors, size_t *bytes)
{
    dsv4_attention_call call;
    return op_workspace_of(&call.head, &dsv4_attention_family, DSV4_ATTENTION, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_attention(quern_context *ctx, const quern_exec *exec,
                                  const quern_dsv4_attention_params *params,
                                  const quern_dsv4_attention_tensors *tensors, void *workspace,
                                  size_t workspace_bytes)
{
    dsv4_attention_call call;
    return op_run(&call.head, &dsv4_attention_family, DSV4_ATTENTION, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_attention_backward_workspace(quern_context *ctx,
                                                     const quern_dsv4_attention_params *params,
                                                     const quern_dsv4_attention_tensors *tensors,
                                                     size_t *bytes)
{
    dsv4_attention_call call;
    return op_workspace_of(&call.head, &dsv4_attention_family, DSV4_ATTENTION_BACKWARD, ctx, params, tensors,
                           bytes);
}

quern_status quern_dsv4_attention_backward(quern_context *ctx, const quern_exec *exec,
                                           const quern_dsv4_attention_params *params,
                                           const quern_dsv4_attention_tensors *tensors, void *workspace,
                                           size_t workspace_bytes)
{
    dsv4_attention_call call;
    return op_run(&call.head, &dsv4_attention_family, DSV4_ATTENTION_BACKWARD, ctx, exec, params, tensors,
                  workspace, workspace_bytes);
}
