/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.c - RMS norm and rotation of rows: their schemas, their public functions, and the stage that each
 * runs. */
#include "core/error.h"
#include "core/view.h"
#include "linear/linear.h"

#include <stddef.h>
#include <stdio.h>

enum { FORWARD, BACKWARD, OPS };
enum { S_T = 1, S_H, S_D, S_P, S_R };

/* [T, D] or [T, H, D] as [1, T, H, D]. */
static quern_tensor as_heads(const op_call *call, int32_t tensor)
{
    quern_tensor t = op_view(call, tensor, false);
    if (t.ndim == 0) return t;
    if (t.ndim == 2) {
        t.shape[2] = t.shape[1];
        t.strides[2] = 1;
        t.shape[1] = 1;
        t.strides[1] = t.shape[2];
        t.ndim = 3;
    }
    return view_with_batch(&t);
}

/* ---- RMS norm ---- */

#define N(field) OP_TENSOR(quern_rms_norm_tensors, field)
static const op_tensor norm_tensors[] = {
    {"x", "x", OP_ACTIVATION, OP_NONE, {S_T, S_D}, {0}},
    {"weight", "weight", OP_WEIGHT, OP_NONE, {S_D}, {0}},
    {"y", "y", OP_ACTIVATION, OP_NONE, {S_T, S_D}, {0}},
    {"d_y", "d_out", OP_ACTIVATION, N(y), {S_T, S_D}, {0}},
    {"d_x", "dx", OP_ACTIVATION, N(x), {S_T, S_D}, {0}},
    {"d_weight", "dweight", OP_F32, N(weight), {S_D}, {0}},
};
static const op_param norm_params[] = {
    {"eps", offsetof(quern_rms_norm_params, eps), OP_POSITIVE, 0, 0, NULL,
     "added to the mean square; 0: 1e-6"},
};
static const char *const norm_operations[] = {"rms_norm_forward", "rms_norm_backward"};
static const char symbols[] = "T H D P R";
static const op_entry norm_ops[] = {
    {.name = "rms-norm",
     .help = "RMS norm of rows; with d_out also its backward",
     .forward = FORWARD,
     .backward = BACKWARD},
};

static quern_status norm_check_params(op_call *call)
{
    quern_rms_norm_params *p = op_params(call);
    if (p->eps == 0.0f) p->eps = 1e-6f;
    return QUERN_OK;
}

static void norm_roles(op_call *call)
{
    const bool backward = call->operation == BACKWARD;
    uint8_t *r = call->role;
    r[N(x)] = OP_NEEDED;
    r[N(weight)] = OP_OPTIONAL;
    r[N(y)] = backward ? OP_UNUSED : OP_RESULT;
    r[N(d_y)] = backward ? OP_NEEDED : OP_UNUSED;
    r[N(d_x)] = backward ? OP_RESULT : OP_UNUSED;
    op_gradient_roles(call, N(d_weight), N(d_weight), backward);
}

static void norm_build(op_build *b)
{
    const op_call *call = b->call;
    norm_rope_args *args =
        call->operation == FORWARD ? OP_ADD(b, norm_rope_forward) : OP_ADD(b, norm_rope_backward);
    *args = (norm_rope_args){.norm = true,
                             .eps = ((const quern_rms_norm_params *)op_params(call))->eps,
                             .x = as_heads(call, N(x)),
                             .weight = op_view(call, N(weight), false),
                             .out = as_heads(call, N(y)),
                             .d_out = as_heads(call, N(d_y)),
                             .d_x = as_heads(call, N(d_x)),
                             .d_weight = op_view(call, N(d_weight), false)};
}

const op_family rms_norm_family = {
    OP_TABLES(norm_operations, norm_params, symbols, norm_ops),
    OP_ROWS(norm_tensors, quern_rms_norm_tensors, QUERN_RMS_NORM_TENSORS_INIT),
    OP_CALL(quern_rms_norm_params, QUERN_RMS_NORM_PARAMS_INIT, OP_STEP_BYTES(norm_rope)),
    .first = QUERN_OP_RMS_NORM_FORWARD,
    .check_params = norm_check_params,
    .roles = norm_roles,
    .build = norm_build,
};

quern_status quern_rms_norm_forward_workspace(quern_context *ctx, const quern_rms_norm_params *params,
                                              const quern_rms_norm_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&rms_norm_family, FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_rms_norm_forward(quern_context *ctx, const quern_exec *exec,
                                    const quern_rms_norm_params *params,
                                    const quern_rms_norm_tensors *tensors, void *workspace,
                                    size_t workspace_bytes)
{
    return op_run(&rms_norm_family, FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_rms_norm_backward_workspace(quern_context *ctx, const quern_rms_norm_params *params,
                                               const quern_rms_norm_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&rms_norm_family, BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_rms_norm_backward(quern_context *ctx, const quern_exec *exec,
                                     const quern_rms_norm_params *params,
                                     const quern_rms_norm_tensors *tensors, void *workspace,
                                     size_t workspace_bytes)
{
    return op_run(&rms_norm_family, BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

/* ---- rotation ---- */

#define R(field) OP_TENSOR(quern_rope_tensors, field)
static const op_tensor rope_tensors[] = {
    {"x", "x", OP_ACTIVATION, OP_NONE, {S_T, S_H, S_D}, {0}},
    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {S_P, S_R}, {0}},
    {"positions", "positions", OP_I32, OP_NONE, {S_T}, {0}},
    {"y", "y", OP_ACTIVATION, OP_NONE, {S_T, S_H, S_D}, {0}},
    {"d_y", "d_out", OP_ACTIVATION, R(y), {S_T, S_H, S_D}, {0}},
    {"d_x", "dx", OP_ACTIVATION, R(x), {S_T, S_H, S_D}, {0}},
};
static const op_param rope_params[] = {
    {"start_abs_pos", offsetof(quern_rope_params, start_abs_pos), OP_INTEGER, 0, INT32_MAX, NULL,
     "position of token 0"},
    {"inverse", offsetof(quern_rope_params, inverse), OP_FLAG, 0, 1, NULL, "turn back"},
};
static const char *const rope_operations[] = {"rope_forward", "rope_backward"};
static const op_entry rope_ops[] = {
    {.name = "rope",
     .help = "rotation of heads' last channels by position; with d_out also its backward",
     .forward = FORWARD,
     .backward = BACKWARD},
};

static void rope_roles(op_call *call)
{
    const quern_rope_params *p = op_params(call);
    const bool backward = call->operation == BACKWARD;
    uint8_t *r = call->role;
    r[R(x)] = OP_NEEDED;
    r[R(cos_sin)] = OP_NEEDED;
    r[R(positions)] = p->start_abs_pos > 0 ? OP_REFUSED : OP_OPTIONAL;
    r[R(y)] = backward ? OP_UNUSED : OP_RESULT;
    r[R(d_y)] = backward ? OP_NEEDED : OP_UNUSED;
    r[R(d_x)] = backward ? OP_RESULT : OP_UNUSED;
}

static const char *rope_refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const quern_rope_params *p = op_params(call);
    (void)tensor;
    snprintf(text, OP_REASON, " with start_abs_pos %lld: one or the other is accepted",
             (long long)p->start_abs_pos);
    return text;
}

static quern_status rope_derive(op_call *call)
{
    const quern_rope_params *p = op_params(call);
    const int64_t *s = call->symbol, end = p->start_abs_pos + s[S_T];
    if (s[S_R] % 2 != 0 || s[S_R] > s[S_D])
        return error_argument(
            "cos_sin.shape[1] is %lld: an even number of up to the %lld channels is accepted",
            (long long)s[S_R], (long long)s[S_D]);
    if (call->given[R(positions)] == NULL && s[S_T] > 0 && end > s[S_P])
        return error_argument(
            "cos_sin.shape[0] is %lld: at least %lld, the position past the last token, is accepted",
            (long long)s[S_P], (long long)end);
    return QUERN_OK;
}

static quern_status rope_check_data(const op_call *call, void *const *data)
{
    const int32_t *positions = call->alignment[R(positions)] > 0 ? data[R(positions)] : NULL;
    const int64_t rows = call->symbol[S_P];
    for (int64_t t = 0; positions != NULL && t < call->symbol[S_T]; t++)
        if (positions[t] < 0 || positions[t] >= rows)
            return error_argument("positions[%lld] is %d: 0 to %lld, the table's last row, is accepted",
                                  (long long)t, (int)positions[t], (long long)rows - 1);
    return QUERN_OK;
}

static void rope_build(op_build *b)
{
    const op_call *call = b->call;
    const quern_rope_params *p = op_params(call);
    quern_tensor table = op_view(call, R(cos_sin), false);
    if (call->symbol[S_T] > 0) view_narrow(&table, 0, p->start_abs_pos, table.shape[0] - p->start_abs_pos);
    norm_rope_args *args =
        call->operation == FORWARD ? OP_ADD(b, norm_rope_forward) : OP_ADD(b, norm_rope_backward);
    *args = (norm_rope_args){.inverse = p->inverse,
                             .positions = op_view(call, R(positions), false),
                             .x = as_heads(call, R(x)),
                             .cos_sin = table,
                             .out = as_heads(call, R(y)),
                             .d_out = as_heads(call, R(d_y)),
                             .d_x = as_heads(call, R(d_x))};
}

const op_family rope_family = {
    OP_TABLES(rope_operations, rope_params, symbols, rope_ops),
    OP_ROWS(rope_tensors, quern_rope_tensors, QUERN_ROPE_TENSORS_INIT),
    OP_CALL(quern_rope_params, QUERN_ROPE_PARAMS_INIT, OP_STEP_BYTES(norm_rope)),
    .first = QUERN_OP_ROPE_FORWARD,
    .roles = rope_roles,
    .refuse = rope_refuse,
    .derive = rope_derive,
    .check_data = rope_check_data,
    .build = rope_build,
};

quern_status quern_rope_forward_workspace(quern_context *ctx, const quern_rope_params *params,
                                          const quern_rope_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&rope_family, FORWARD, ctx, params, tensors, bytes);
}

quern_status quern_rope_forward(quern_context *ctx, const quern_exec *exec, const quern_rope_params *params,
                                const quern_rope_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&rope_family, FORWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}

quern_status quern_rope_backward_workspace(quern_context *ctx, const quern_rope_params *params,
                                           const quern_rope_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&rope_family, BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_rope_backward(quern_context *ctx, const quern_exec *exec, const quern_rope_params *params,
                                 const quern_rope_tensors *tensors, void *workspace, size_t workspace_bytes)
{
    return op_run(&rope_family, BACKWARD, ctx, exec, params, tensors, workspace, workspace_bytes);
}
