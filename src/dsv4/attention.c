/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.c - the attention core's public functions, and the step that each takes.
 *
 *   forward:  attend_mqa_forward
 *   backward: attend_mqa_backward
 */
#include "dsv4/call.h"

#include <math.h>

void dsv4_attention_build(op_build *b)
{
    const op_call *h = b->call;
    const quern_dsv4_attention_params *p = op_params(h);
    const int64_t *s = h->symbol;
    attend_mqa_args *a = h->operation == DSV4_ATTENTION_BACKWARD ? OP_ADD(b, attend_mqa_backward)
                                                                 : OP_ADD(b, attend_mqa_forward);
    a->window = p->window;
    a->ratio = p->ratio;
    a->position = p->start_abs_pos;
    a->format = dsv4_entry_format(p->format);
    a->page = p->page;
    a->positions = op_view(h, DA(start_positions), false);
    a->kv_table = op_view(h, DA(kv_table), false);
    a->entries_table = op_view(h, DA(kv_cmp_table), false);
    a->scale = 1.0f / sqrtf((float)s[AS_D]);
    a->seqs = (stage_seqs){.batch = dsv4_attention_sequences(h),
                           .n_q = s[AS_T],
                           .n_kv = s[AS_N],
                           .cu_q = op_view(h, DA(cu_seqlens), false)};
    a->q = op_view(h, DA(q), true);
    a->kv = op_view(h, DA(kv), true);
    a->entries = op_view(h, DA(kv_cmp), true);
    a->list = op_view(h, DA(idx), true);
    a->count = op_view(h, DA(count), true);
    a->sink = op_view(h, DA(sink), false);
    a->cos_sin = op_view(h, DA(cos_sin), false);
    a->o = op_view(h, DA(o), true);
    a->lse = op_view(h, DA(lse), true);
    a->lse_win = op_view(h, DA(lse_win), true);
    a->d_o = op_view(h, DA(d_o), true);
    a->d_q = op_view(h, DA(d_q), true);
    a->d_kv = op_view(h, DA(d_kv), true);
    a->d_entries = op_view(h, DA(d_kv_cmp), true);
    a->d_sink = op_view(h, DA(d_sink), false);
}

quern_status quern_dsv4_attention_workspace(quern_context *ctx, const quern_dsv4_attention_params *params,
                                            const quern_dsv4_attention_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&dsv4_attention_family, DSV4_ATTENTION, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_attention(quern_context *ctx, const quern_exec *exec,
                                  const quern_dsv4_attention_params *params,
                                  const quern_dsv4_attention_tensors *tensors, void *workspace,
                                  size_t workspace_bytes)
{
    return op_run(&dsv4_attention_family, DSV4_ATTENTION, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_attention_backward_workspace(quern_context *ctx,
                                                     const quern_dsv4_attention_params *params,
                                                     const quern_dsv4_attention_tensors *tensors,
                                                     size_t *bytes)
{
    return op_workspace_of(&dsv4_attention_family, DSV4_ATTENTION_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_attention_backward(quern_context *ctx, const quern_exec *exec,
                                           const quern_dsv4_attention_params *params,
                                           const quern_dsv4_attention_tensors *tensors, void *workspace,
                                           size_t workspace_bytes)
{
    return op_run(&dsv4_attention_family, DSV4_ATTENTION_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
