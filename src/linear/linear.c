/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * linear.c - projections' public functions, and the stages that each runs.
 *
 *   forward:  FP8    (e4m3_round,) e4m3_gemm, which rounds where the backend has no e4m3_round
 *             NVFP4  by group grouped_gemm; with a8 e4m3_round, e4m3_weights, e4m3_gemm, or the same
 *             floats by group gemm, or grouped_dense, which has a bias
 *   backward: the same kinds of product by W as it is stored; by group gemm for d_w; expert_sums for d_bias
 */
#include "linear/linear.h"

#include "core/view.h"

static quern_tensor view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}

static const linear_call *call_of(const op_build *b)
{
    return (const linear_call *)b->call;
}

static void groups_begin(op_build *b)
{
    const int64_t groups = call_of(b)->params.groups;
    if (groups > 1) op_loop_begin(b, 1, &groups);
}

/* A weight [N, K] or a bias [N] as the only expert's. */
static quern_tensor as_expert(quern_tensor t)
{
    return t.ndim > 0 ? view_with_batch(&t) : t;
}

static quern_tensor matrix_of(quern_tensor t)
{
    if (t.ndim == 0 || t.ndim == 2) return t;
    t.ndim = 2;
    t.shape[0] = t.shape[1] = t.strides[0] = t.strides[1] = 1;
    return t;
}

/* x W^T, or with `rows` d_y W, by the weight as it is stored. */
static void add_fp8(op_build *b, bool rows, quern_tensor a, quern_tensor c)
{
    const linear_call *l = call_of(b);
    const bool one = op_is_one(b->call->given[L(w_scale)]);
    const int64_t *s = b->call->symbol, block = l->params.block;
    e4m3_gemm_args *args = OP_ADD(b, e4m3_gemm);
    args->rows = rows;
    args->round = !rows && l->params.a8 == QUERN_LINEAR_A8_FP8 && !op_has(b, OP_e4m3_round);
    args->groups = l->params.groups;
    args->block_rows = one ? s[LIN_GN] + (s[LIN_GN] == 0) : block;
    args->block_columns = one ? s[LIN_K] + (s[LIN_K] == 0) : block;
    args->a = a;
    args->codes = view(b, L(w));
    args->scales = matrix_of(view(b, L(w_scale)));
    args->bias = view(b, L(bias));
    args->c = c;
}

/* x times an NVFP4 weight rounded to e4m3. */
static void add_rounded(op_build *b, quern_tensor a)
{
    const int64_t *s = b->call->symbol, groups = call_of(b)->params.groups;
    const quern_tensor codes = op_matrix(b, QUERN_U8, s[LIN_GN], s[LIN_K]),
                       powers = op_matrix(b, QUERN_F32, s[LIN_GN], 1);
    *OP_ADD(b, e4m3_weights) = (e4m3_weights_args){view(b, L(w_codes)), view(b, L(w_scales)), codes, powers};
    *OP_ADD(b, e4m3_gemm) = (e4m3_gemm_args){.groups = groups,
                                             .block_rows = 1,
                                             .block_columns = s[LIN_K] + (s[LIN_K] == 0),
                                             .a = a,
                                             .codes = codes,
                                             .scales = powers,
                                             .global = view(b, L(w_global)),
                                             .bias = view(b, L(bias)),
                                             .c = view(b, L(y))};
}

static void add_nvfp4(op_build *b, bool backward)
{
    const int64_t *s = b->call->symbol;
    groups_begin(b);
    grouped_gemm_args *args = backward ? OP_ADD(b, grouped_gemm_backward) : OP_ADD(b, grouped_gemm);
    args->tokens = s[LIN_T];
    args->n = s[LIN_N];
    args->k = s[LIN_K];
    args->k_major = true;
    args->order = SCALES_K_MAJOR;
    args->b_codes = as_expert(view(b, L(w_codes)));
    args->b_scales = as_expert(view(b, L(w_scales)));
    args->b_global = matrix_of(view(b, L(w_global)));
    if (backward) {
        args->d_c = view(b, L(d_y));
        args->d_a = view(b, L(d_x));
    } else {
        args->a = view(b, L(x));
        args->fp8 = call_of(b)->params.a8 == QUERN_LINEAR_A8_FP8;
        args->bias = as_expert(view(b, L(bias)));
        args->c = view(b, L(y));
    }
    op_cut(b, &args->b_codes, 1);
    op_cut(b, &args->b_scales, 1);
    op_cut(b, &args->a, 1);
    op_cut(b, &args->bias, 1);
    op_cut(b, &args->c, 1);
    op_cut(b, &args->d_c, 1);
    op_cut(b, &args->d_a, 1);
    op_loop_end(b);
}

/* c = a W^T + bias, or with `rows` c = a W. */
static void add_float(op_build *b, bool rows, quern_tensor a, quern_tensor c)
{
    const quern_tensor w = view(b, L(w)), bias = view(b, L(bias));
    groups_begin(b);
    if (bias.ndim == 0 && op_has(b, OP_gemm)) {
        gemm_args *args = OP_ADD(b, gemm);
        *args = (gemm_args){.a = a, .b = w, .c = c, .b_transposed = !rows};
        op_cut(b, &args->a, 1);
        op_cut(b, &args->b, 0);
        op_cut(b, &args->c, 1);
    } else {
        grouped_dense_args *args = OP_ADD(b, grouped_dense);
        *args = (grouped_dense_args){
            .a = a, .b = as_expert(w), .bias = as_expert(bias), .c = c, .b_transposed = !rows};
        op_cut(b, &args->a, 1);
        op_cut(b, &args->b, 1);
        op_cut(b, &args->bias, 1);
        op_cut(b, &args->c, 1);
    }
    op_loop_end(b);
}

static void add_forward(op_build *b)
{
    const linear_call *l = call_of(b);
    const bool rounds = l->params.a8 == QUERN_LINEAR_A8_FP8 && op_has(b, OP_e4m3_round);
    quern_tensor x = view(b, L(x));
    if (rounds) {
        const quern_tensor rounded = op_matrix(b, QUERN_F32, x.shape[0], x.shape[1]);
        *OP_ADD(b, e4m3_round) = (e4m3_round_args){l->params.groups, x, rounded};
        x = rounded;
    }
    if (l->kind == LINEAR_FP8) add_fp8(b, false, x, view(b, L(y)));
    else if (l->kind == LINEAR_FLOAT) add_float(b, false, x, view(b, L(y)));
    else if (rounds) add_rounded(b, x);
    else add_nvfp4(b, false);
}

static void add_weight_gradient(op_build *b)
{
    groups_begin(b);
    gemm_args *args = OP_ADD(b, gemm);
    *args = (gemm_args){.a = view(b, L(d_y)), .b = view(b, L(x)), .c = view(b, L(d_w)), .a_transposed = true};
    op_cut(b, &args->a, 1);
    op_cut(b, &args->b, 1);
    op_cut(b, &args->c, 0);
    op_loop_end(b);
}

static void add_backward(op_build *b)
{
    const linear_kind kind = call_of(b)->kind;
    const quern_tensor d_y = view(b, L(d_y)), d_x = view(b, L(d_x)), d_bias = view(b, L(d_bias));
    if (d_x.ndim > 0 && kind == LINEAR_FP8) add_fp8(b, true, d_y, d_x);
    else if (d_x.ndim > 0 && kind == LINEAR_NVFP4) add_nvfp4(b, true);
    else if (d_x.ndim > 0) add_float(b, true, d_y, d_x);
    if (op_uses(b->call, L(d_w))) add_weight_gradient(b);
    if (d_bias.ndim > 0)
        *OP_ADD(b, expert_sums) = (expert_sums_args){.x = d_y, .sums = view_with_batch(&d_bias)};
}

void linear_build(op_build *b)
{
    if (b->call->operation == LINEAR_FORWARD) add_forward(b);
    else add_backward(b);
}

quern_status quern_linear_forward_workspace(quern_context *ctx, const quern_linear_params *params,
                                            const quern_linear_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&linear_family, LINEAR_FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_linear_forward(quern_context *ctx, const quern_exec *exec,
                                  const quern_linear_params *params, const quern_linear_tensors *tensors,
                                  void *workspace, size_t workspace_bytes)
{
    return op_run(&linear_family, LINEAR_FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_linear_backward_workspace(quern_context *ctx, const quern_linear_params *params,
                                             const quern_linear_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&linear_family, LINEAR_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_linear_backward(quern_context *ctx, const quern_exec *exec,
                                   const quern_linear_params *params, const quern_linear_tensors *tensors,
                                   void *workspace, size_t workspace_bytes)
{
    return op_run(&linear_family, LINEAR_BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
