/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.c - the compressors' public functions, and the stage that each runs.
 *
 *   forward:  pool_forward
 *   backward: pool_backward
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

static bool is_backward(const op_call *call)
{
    return call->operation == DSV4_COMPRESS_BACKWARD;
}

/* The tensor as [B, rows, columns]; `own`: the caller's tensor has the batch extent. */
static quern_tensor rows_view(const op_call *call, int32_t tensor, bool own)
{
    const quern_tensor t = op_view(call, tensor, false);
    return t.ndim == 0 || own ? t : view_with_batch(&t);
}

static pool_args pool_of(const dsv4_compress_call *c)
{
    const op_call *h = &c->head;
    const bool lead = h->lead[0].count > 0, own = lead || h->varlen;
    pool_args p = {.ratio = c->params.ratio,
                   .width = h->symbol[DS_C],
                   .overlap = c->params.kind == QUERN_DSV4_CSA,
                   .batch = h->symbol[DS_B],
                   .start_token = c->params.start_token,
                   .start_position = c->params.start_abs_pos,
                   .blocks = c->params.n_blocks};
    p.cu_seqlens = op_view(h, DC_CU_SEQLENS, false);
    p.start_tokens = op_view(h, DC_START_TOKENS, false);
    p.start_positions = op_view(h, DC_START_POSITIONS, false);
    p.block_counts = op_view(h, DC_BLOCK_COUNTS, false);
    p.has_prev = op_view(h, DC_HAS_PREV, false);
    p.proj = rows_view(h, DC_PROJ, lead);
    p.x = rows_view(h, DC_X, lead);
    p.w = op_view(h, DC_W, false);
    p.bias_a = op_view(h, DC_B_A, false);
    p.bias_b = op_view(h, DC_B_B, false);
    p.prev_b = rows_view(h, DC_PREV_B, own);
    const quern_tensor norm = op_view(h, DC_NORM_WEIGHT, false), table = op_view(h, DC_COS_SIN, false);
    p.entry = dsv4_entry(&c->params, &norm, &table);
    p.cu_entries = op_view(h, DC_CU_SEQLENS_CMP, false);
    p.pooled = rows_view(h, DC_POOLED, lead);
    p.out = rows_view(h, DC_OUT, lead);
    p.d_out = rows_view(h, DC_D_OUT, lead);
    p.d_proj = rows_view(h, DC_D_PROJ, lead);
    p.d_x = rows_view(h, DC_D_X, lead);
    p.d_w = op_view(h, DC_D_W, false);
    p.d_prev_b = rows_view(h, DC_D_PREV_B, own);
    p.d_bias_a = op_view(h, DC_D_B_A, false);
    p.d_bias_b = op_view(h, DC_D_B_B, false);
    p.d_norm_weight = op_view(h, DC_D_NORM_WEIGHT, false);
    return p;
}

quern_status dsv4_compress_plan(op_call *call)
{
    dsv4_compress_call *c = (dsv4_compress_call *)call;
    const pool_stage *stage =
        is_backward(call) ? &call->backend->pool_backward : &call->backend->pool_forward;
    arena a = op_workspace();
    char why[STAGE_WHY_BYTES] = "";
    if (stage->run == NULL)
        return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no compressors: the cpu has",
                         call->backend->name);
    c->pool = pool_of(c);
    if (!STAGE_TAKES(*stage, &call->exec, &c->pool, why)) return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    c->scratch = arena_take(&a, stage->workspace(&call->exec, &c->pool));
    op_workspace_end(call, &a);
    return QUERN_OK;
}

quern_status dsv4_compress_run(const op_call *call, const op_frame *frame)
{
    const dsv4_compress_call *c = (const dsv4_compress_call *)call;
    return is_backward(call) ? op_pool_backward(call, frame, &c->pool, c->scratch)
                             : op_pool_forward(call, frame, &c->pool, c->scratch);
}

quern_status quern_dsv4_compress_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                           const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    dsv4_compress_call call;
    return op_workspace_of(&call.head, &dsv4_compress_family, DSV4_COMPRESS, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_compress(quern_context *ctx, const quern_exec *exec,
                                 const quern_dsv4_compress_params *params,
                                 const quern_dsv4_compress_tensors *tensors, void *workspace,
                                 size_t workspace_bytes)
{
    dsv4_compress_call call;
    return op_run(&call.head, &dsv4_compress_family, DSV4_COMPRESS, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_compress_backward_workspace(quern_context *ctx,
                                                    const quern_dsv4_compress_params *params,
                                                    const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    dsv4_compress_call call;
    return op_workspace_of(&call.head, &dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, params, tensors,
                           bytes);
}

quern_status quern_dsv4_compress_backward(quern_context *ctx, const quern_exec *exec,
                                          const quern_dsv4_compress_params *params,
                                          const quern_dsv4_compress_tensors *tensors, void *workspace,
                                          size_t workspace_bytes)
{
    dsv4_compress_call call;
    return op_run(&call.head, &dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, exec, params, tensors,
                  workspace, workspace_bytes);
}
