/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm.c - the grouped product's public functions, and the stages that each runs.
 *
 *   forward:  (prepack,) grouped_gemm
 *   backward: (prepack,) under SwiGLU grouped_gemm without it, swiglu_backward; grouped_gemm_backward
 */
#include "nvfp4/gemm.h"

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

static swiglu_rule rule_of(const quern_nvfp4_gemm_params *p)
{
    return (swiglu_rule){p->granularity, p->limit, p->alpha, p->beta};
}

/* Fills the operands that both passes have. */
static grouped_gemm_args operands(const gemm_call *c)
{
    const int64_t *s = c->head.symbol;
    const quern_nvfp4_gemm_params *p = &c->params;
    return (grouped_gemm_args){.tokens = s[GS_T],
                               .n = s[GS_N],
                               .k = s[GS_K],
                               .int8 = p->a8 == QUERN_NVFP4_A8_INT8,
                               .fp8 = p->a8 == QUERN_NVFP4_A8_FP8,
                               .a = view(c, G(a)),
                               .a_codes = view(c, G(a_codes)),
                               .a_scales = view(c, G(a_scales)),
                               .pad_row_offsets = view(c, G(pad_row_offsets)),
                               .a_per = (quantise_global)p->a_global_per,
                               .a_global = c->a_global,
                               .k_major = c->k_major,
                               .order = (scale_order)p->b_scales,
                               .b_codes = view(c, G(b_codes)),
                               .b_scales = view(c, G(b_scales)),
                               .b_repacked = view(c, G(b_repacked)),
                               .b_global = c->b_global,
                               .offsets = view(c, G(offsets)),
                               .bias = view(c, G(bias)),
                               .rule = rule_of(p),
                               .profile = (quantise_profile)p->profile};
}

/* Repacks B into the workspace. */
static void add_prepack(op_build *b, grouped_gemm_args *product)
{
    const gemm_call *c = (const gemm_call *)b->call;
    const int64_t *s = c->head.symbol;
    const quern_tensor repacked = op_matrix(b, QUERN_U8, s[GS_E], s[GS_BYTES]);
    *OP_ADD(b, prepack) = (prepack_args){.k_major = c->k_major,
                                         .order = (scale_order)c->params.b_scales,
                                         .n = s[GS_N],
                                         .k = s[GS_K],
                                         .codes = product->b_codes,
                                         .scales = product->b_scales,
                                         .repacked = repacked};
    product->b_codes = product->b_scales = (quern_tensor){0};
    product->b_repacked = repacked;
}

static void add_forward(op_build *b, const grouped_gemm_args *product)
{
    const gemm_call *c = (const gemm_call *)b->call;
    grouped_gemm_args *args = OP_ADD(b, grouped_gemm);
    *args = *product;
    args->swiglu = c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
    args->c = view(c, G(c));
    args->c_old = c->params.accumulate ? args->c : view(c, G(c_old));
    args->c_codes = view(c, G(c_codes));
    args->c_scales = view(c, G(c_scales));
    args->c_global = c->c_global;
}

/* Computes the product again and takes d_c back through SwiGLU. */
static quern_tensor add_swiglu(op_build *b, const grouped_gemm_args *product, const quern_tensor *d_c)
{
    const gemm_call *c = (const gemm_call *)b->call;
    const int64_t *s = c->head.symbol;
    const quern_tensor h = op_matrix(b, QUERN_F32, s[GS_T], s[GS_N]),
                       d_h = op_matrix(b, op_between_dtype(d_c->dtype), s[GS_T], s[GS_N]);
    grouped_gemm_args *again = OP_ADD(b, grouped_gemm);
    *again = *product;
    again->c = h;
    *OP_ADD(b, swiglu_backward) =
        (swiglu_args){.rule = rule_of(&c->params), .h = h, .d_act = *d_c, .d_h = d_h};
    return d_h;
}

static void add_backward(op_build *b, const grouped_gemm_args *product)
{
    const gemm_call *c = (const gemm_call *)b->call;
    quern_tensor d_c = view(c, G(d_c));
    if (c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU) d_c = add_swiglu(b, product, &d_c);
    grouped_gemm_args *args = OP_ADD(b, grouped_gemm_backward);
    *args = *product;
    args->d_c = d_c;
    args->d_a = view(c, G(d_a));
    if (!op_uses(&c->head, G(a))) args->a_global = (quern_tensor){0};
}

void nvfp4_gemm_build(op_build *b)
{
    gemm_call *c = (gemm_call *)b->call;
    c->a_global = global_view(c, G(a_global));
    c->b_global = global_view(c, G(b_global));
    c->c_global = global_view(c, G(c_global));
    grouped_gemm_args product = operands(c);
    if (c->params.prepack && op_uses(b->call, G(b_codes))) add_prepack(b, &product);
    if (b->call->operation == GEMM) add_forward(b, &product);
    else add_backward(b, &product);
}

quern_status quern_nvfp4_gemm_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                        const quern_nvfp4_gemm_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nvfp4_gemm_family, GEMM, ctx, params, tensors, bytes);
}

quern_status quern_nvfp4_gemm(quern_context *ctx, const quern_exec *exec,
                              const quern_nvfp4_gemm_params *params, const quern_nvfp4_gemm_tensors *tensors,
                              void *workspace, size_t workspace_bytes)
{
    return op_run(&nvfp4_gemm_family, GEMM, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_nvfp4_gemm_backward_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                                 const quern_nvfp4_gemm_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&nvfp4_gemm_family, GEMM_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_nvfp4_gemm_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_nvfp4_gemm_params *params,
                                       const quern_nvfp4_gemm_tensors *tensors, void *workspace,
                                       size_t workspace_bytes)
{
    return op_run(&nvfp4_gemm_family, GEMM_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
