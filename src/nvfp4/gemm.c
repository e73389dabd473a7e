/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm.c - the grouped product's public functions, and the stages that each runs.
 *
 *   forward:  (prepack,) grouped_gemm
 *   backward: (prepack,) under SwiGLU grouped_gemm without it, swiglu_backward; grouped_gemm_backward
 */
#include "nvfp4/gemm.h"

#include "core/error.h"
#include "core/view.h"

static quern_tensor view(const gemm_call *c, int32_t tensor)
{
    return op_view(&c->head, tensor, false);
}

/* Appends an extent of 1 to a global; [E, 2] and [T, 1] stay as they are. */
static quern_tensor global_view(const gemm_call *c, int32_t tensor)
{
    quern_tensor g = view(c, tensor);
    if (g.ndim != 1) return g;
    g.shape[1] = 1;
    g.strides[1] = 1;
    g.ndim = 2;
    return g;
}

static quern_tensor room(const gemm_call *c, arena *a, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    return view_on(&c->head.like, arena_take(a, (size_t)(rows * columns) * quern_dtype_size(dtype)), dtype, 2,
                   shape);
}

/* Fills the operands that both passes have. */
static grouped_gemm_args operands(const gemm_call *c)
{
    const int64_t *s = c->head.symbol;
    const quern_nvfp4_gemm_params *p = &c->params;
    return (grouped_gemm_args){.tokens = s[GS_T],
                               .n = s[GS_N],
                               .k = s[GS_K],
                               .int8 = p->a8,
                               .a = view(c, G_A),
                               .a_codes = view(c, G_A_CODES),
                               .a_scales = view(c, G_A_SCALES),
                               .pad_row_offsets = view(c, G_PAD),
                               .a_per = (quantise_global)p->a_global_per,
                               .a_global = c->a_global,
                               .k_major = c->k_major,
                               .order = (scale_order)p->b_scales,
                               .b_codes = view(c, G_B_CODES),
                               .b_scales = view(c, G_B_SCALES),
                               .b_repacked = view(c, G_B_REPACKED),
                               .b_global = c->b_global,
                               .offsets = view(c, G_OFFSETS),
                               .bias = view(c, G_BIAS),
                               .limit = p->limit,
                               .alpha = p->alpha,
                               .beta = p->beta,
                               .granularity = p->granularity,
                               .profile = (quantise_profile)p->profile};
}

/* Repacks B into the workspace. */
static void plan_prepack(gemm_call *c, arena *a)
{
    const int64_t *s = c->head.symbol;
    c->prepack = (prepack_args){.k_major = c->k_major,
                                .order = (scale_order)c->params.b_scales,
                                .n = s[GS_N],
                                .k = s[GS_K],
                                .codes = c->gemm.b_codes,
                                .scales = c->gemm.b_scales,
                                .repacked = room(c, a, QUERN_U8, s[GS_E], s[GS_BYTES])};
    c->gemm.b_codes = c->gemm.b_scales = (quern_tensor){0};
    c->gemm.b_repacked = c->prepack.repacked;
}

static void plan_forward(gemm_call *c)
{
    c->gemm.swiglu = c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
    c->gemm.c = view(c, G_C);
    c->gemm.c_old = c->params.accumulate ? c->gemm.c : view(c, G_C_OLD);
    c->gemm.c_codes = view(c, G_C_CODES);
    c->gemm.c_scales = view(c, G_C_SCALES);
    c->gemm.c_global = c->c_global;
}

static void plan_backward(gemm_call *c, arena *a)
{
    const int64_t *s = c->head.symbol;
    c->backward = c->gemm;
    c->backward.d_c = view(c, G_D_C);
    c->backward.d_a = view(c, G_D_A);
    if (!op_uses(&c->head, G_A)) c->backward.a_global = (quern_tensor){0};
    if (c->params.activation != QUERN_NVFP4_ACTIVATION_SWIGLU) return;
    c->gemm.c = room(c, a, QUERN_F32, s[GS_T], s[GS_N]);
    c->swiglu = (swiglu_args){.granularity = c->params.granularity,
                              .limit = c->params.limit,
                              .alpha = c->params.alpha,
                              .beta = c->params.beta,
                              .h = c->gemm.c,
                              .d_act = c->backward.d_c};
    c->swiglu.d_h =
        room(c, a, c->backward.d_c.dtype == QUERN_BF16 ? QUERN_BF16 : QUERN_F32, s[GS_T], s[GS_N]);
    c->backward.d_c = c->swiglu.d_h;
}

static bool recomputes(const gemm_call *c)
{
    return c->head.operation == GEMM || c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
}

quern_status nvfp4_gemm_plan(op_call *call)
{
    gemm_call *c = (gemm_call *)call;
    const quern_backend *b = call->backend;
    arena a = op_workspace();
    size_t most = 0;
    if (b->grouped_gemm.run == NULL || b->grouped_gemm_backward.run == NULL || b->prepack.run == NULL)
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "the %s backend has no products with NVFP4 weights: the cpu has", b->name);
    c->a_global = global_view(c, G_A_GLOBAL);
    c->b_global = global_view(c, G_B_GLOBAL);
    c->c_global = global_view(c, G_C_GLOBAL);
    c->gemm = operands(c);
    c->prepack = (prepack_args){0};
    if (c->params.prepack && op_uses(call, G_B_CODES)) plan_prepack(c, &a);
    if (call->operation == GEMM) plan_forward(c);
    else plan_backward(c, &a);
    if (recomputes(c)) most = STAGE_WORKSPACE(b->grouped_gemm, &call->exec, &c->gemm);
    if (call->operation == GEMM_BACKWARD) {
        const size_t bytes = STAGE_WORKSPACE(b->grouped_gemm_backward, &call->exec, &c->backward);
        if (bytes > most) most = bytes;
    }
    c->scratch = arena_take(&a, most);
    op_workspace_end(call, &a);
    return QUERN_OK;
}

quern_status nvfp4_gemm_run(const op_call *call, const op_frame *frame)
{
    const gemm_call *c = (const gemm_call *)call;
    quern_status status = QUERN_OK;
    if (c->prepack.repacked.ndim > 0) status = op_prepack(call, frame, &c->prepack, NULL);
    if (status == QUERN_OK && recomputes(c)) status = op_grouped_gemm(call, frame, &c->gemm, c->scratch);
    if (status != QUERN_OK || call->operation == GEMM) return status;
    if (recomputes(c)) status = op_swiglu_backward(call, frame, &c->swiglu, NULL);
    return status == QUERN_OK ? op_grouped_gemm_backward(call, frame, &c->backward, c->scratch) : status;
}

quern_status quern_nvfp4_gemm_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                        const quern_nvfp4_gemm_tensors *tensors, size_t *bytes)
{
    gemm_call call;
    return op_workspace_of(&call.head, &nvfp4_gemm_family, GEMM, ctx, params, tensors, bytes);
}

quern_status quern_nvfp4_gemm(quern_context *ctx, const quern_exec *exec,
                              const quern_nvfp4_gemm_params *params, const quern_nvfp4_gemm_tensors *tensors,
                              void *workspace, size_t workspace_bytes)
{
    gemm_call call;
    return op_run(&call.head, &nvfp4_gemm_family, GEMM, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_nvfp4_gemm_backward_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                                 const quern_nvfp4_gemm_tensors *tensors, size_t *bytes)
{
    gemm_call call;
    return op_workspace_of(&call.head, &nvfp4_gemm_family, GEMM_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nvfp4_gemm_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_nvfp4_gemm_params *params,
                                       const quern_nvfp4_gemm_tensors *tensors, void *workspace,
                                       size_t workspace_bytes)
{
    gemm_call call;
    return op_run(&call.head, &nvfp4_gemm_family, GEMM_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
