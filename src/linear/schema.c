/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.c - the description of projections: their tensors, parameters, and what follows from them. */
#include "core/error.h"
#include "linear/linear.h"

#include <stddef.h>

static const op_tensor tensors[] = {
    {"x", "x", OP_ACTIVATION, OP_NONE, {LIN_T, LIN_GK}, {0}},
    {"w", "W", OP_ANY, OP_NONE, {LIN_GN, LIN_K}, {0}},
    {"w_scale", "W_scale", OP_ANY, OP_NONE, {LIN_SCALE}, {0}},
    {"w_codes", "W_codes", OP_CODES, OP_NONE, {LIN_GN, OP_HALF + LIN_K}, {0}},
    {"w_scales", "W_scales", OP_SCALE, OP_NONE, {LIN_GN, OP_SIXTEENTH + LIN_K}, {0}},
    {"w_global", "W_global", OP_GLOBAL, OP_NONE, {0}, {0}},
    {"bias", "bias", OP_WEIGHT, OP_NONE, {LIN_GN}, {0}},
    {"y", "y", OP_STORED, OP_NONE, {LIN_T, LIN_GN}, {0}},
    {"d_y", "d_out", OP_ACTIVATION, L(y), {LIN_T, LIN_GN}, {0}},
    {"d_x", "dx", OP_ACTIVATION, L(x), {LIN_T, LIN_GK}, {0}},
    {"d_w", "dW", OP_F32, L(w), {LIN_GN, LIN_K}, {0}},
    {"d_bias", "dbias", OP_F32, L(bias), {LIN_GN}, {0}},
};

static const char *const a8_words[] = {"none", "fp8", NULL};
#define FIELD(member) OP_FIELD(quern_linear_params, member)
static const op_param params[] = {
    {FIELD(block), OP_INTEGER, 32, 128, NULL, "rows and columns of W that share a scale: 128 or 32"},
    {FIELD(groups), OP_INTEGER, 1, INT32_MAX, NULL, "parts of x's columns, each with rows of W"},
    {FIELD(a8), OP_CHOICE, 0, QUERN_LINEAR_A8_FP8, a8_words, "x is rounded to FP8, by row and 128 columns"},
};
static const char *const operations[] = {"linear_forward", "linear_backward"};
static const char symbols[] = "T N K GN GK";
static const char *const leads[] = {"|ceil(GN/b) ceil(K/b)"};
static const op_entry ops[] = {
    {.name = "linear",
     .help = "y = x W^T + bias, W in floats, FP8 with W_scale, or NVFP4; with d_out also the backward",
     .forward = LINEAR_FORWARD,
     .backward = LINEAR_BACKWARD},
};

#define PARAMS(call) ((quern_linear_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    const int64_t block = PARAMS(call)->block;
    if (block == 128 || block == 32) return QUERN_OK;
    return error_argument("block is %lld: 128 or 32 is accepted", (long long)block);
}

static void roles(op_call *call)
{
    const bool backward = call->operation == LINEAR_BACKWARD, codes = call->given[L(w_codes)] != NULL,
               scaled = call->given[L(w_scale)] != NULL;
    uint8_t *r = call->role;
    r[L(x)] = OP_NEEDED;
    op_allow(call, L(w), !codes, OP_NEEDED, " with w_codes: one or the other is accepted");
    if (!codes) op_reason(call, L(w), ": w or w_codes is needed");
    op_allow(call, L(w_scale), !codes, OP_OPTIONAL, " with w_codes: one or the other is accepted");
    r[L(w_codes)] = OP_OPTIONAL;
    op_allow_all(call, L(w_scales), L(w_global), codes, OP_NEEDED,
                 " without w_codes: all of NVFP4 or none of it is accepted");
    r[L(bias)] = backward ? OP_UNUSED : OP_OPTIONAL;
    r[L(y)] = backward ? OP_UNUSED : OP_RESULT;
    r[L(d_y)] = backward ? OP_NEEDED : OP_UNUSED;
    r[L(d_x)] = backward ? OP_OPTIONAL_RESULT : OP_UNUSED;
    op_allow(call, L(d_w), !backward || !(codes || scaled), backward ? OP_OPTIONAL_RESULT : OP_UNUSED,
             " with a quantised weight: it is accepted with w in floats");
    op_gradient_roles(call, L(d_bias), L(d_bias), backward);
}

static bool is_float(quern_dtype dtype)
{
    return dtype == QUERN_F32 || dtype == QUERN_F16 || dtype == QUERN_BF16;
}

/* Which kind of weight it is, by dtypes. */
static quern_status find_kind(linear_call *c)
{
    const quern_tensor *const *t = c->head.given, *w = t[L(w)], *scale = t[L(w_scale)];
    if (t[L(w_codes)] != NULL) {
        c->kind = LINEAR_NVFP4;
        return QUERN_OK;
    }
    c->kind = scale != NULL ? LINEAR_FP8 : LINEAR_FLOAT;
    if (scale == NULL && !is_float(w->dtype))
        return error_argument(
            "w: dtype %s without w_scale: f32, f16 and bf16 are accepted, e4m3 and u8 with it",
            quern_dtype_name(w->dtype));
    if (scale != NULL && w->dtype != QUERN_U8 && w->dtype != QUERN_E4M3)
        return error_argument("w: dtype %s with w_scale: e4m3 and u8 are accepted",
                              quern_dtype_name(w->dtype));
    if (scale != NULL && scale->dtype != QUERN_F32 && scale->dtype != QUERN_U8 && scale->dtype != QUERN_E8M0)
        return error_argument("w_scale: dtype %s: f32, e8m0 and u8 are accepted",
                              quern_dtype_name(scale->dtype));
    if (scale == NULL && c->params.a8 != QUERN_LINEAR_A8_NONE)
        return error_argument("a8 is fp8 with w in floats: none is accepted, or a weight in FP8 or NVFP4");
    return QUERN_OK;
}

/* y has x's dtype, or f32 where W is in floats. */
static quern_status check_result(const linear_call *c)
{
    const quern_tensor *x = c->head.given[L(x)], *y = c->head.given[L(y)];
    if (c->head.operation == LINEAR_BACKWARD || y == NULL || y->dtype == x->dtype ||
        (c->kind == LINEAR_FLOAT && y->dtype == QUERN_F32))
        return QUERN_OK;
    return error_argument("y: dtype %s: %s is accepted, and f32 with w in floats", quern_dtype_name(y->dtype),
                          quern_dtype_name(x->dtype));
}

static quern_status check_groups(const char *name, int64_t extent, int64_t groups)
{
    if (extent % groups == 0) return QUERN_OK;
    return error_argument(
        "%s.shape is %lld where groups divide it: a multiple of the %lld groups is accepted", name,
        (long long)extent, (long long)groups);
}

/* Rows in f32 and widened weights must have sizes in 64 bits. (Rows may share their memory.) */
static quern_status check_sizes(const int64_t *s)
{
    const int64_t most = (int64_t)1 << 56, widest = s[LIN_GK] > s[LIN_GN] ? s[LIN_GK] : s[LIN_GN];
    if ((widest > 0 && s[LIN_T] > most / widest) || (s[LIN_K] > 0 && s[LIN_GN] > most / s[LIN_K]))
        return error_argument(
            "T is %lld, GK %lld and GN %lld: up to 2^56 numbers are accepted, above it sizes overflow",
            (long long)s[LIN_T], (long long)s[LIN_GK], (long long)s[LIN_GN]);
    if (s[LIN_T] > INT32_MAX)
        return error_argument("x has %lld rows: up to %d are accepted", (long long)s[LIN_T], INT32_MAX);
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    linear_call *c = (linear_call *)call;
    const quern_tensor *const *t = call->given;
    const int32_t weight = t[L(w_codes)] != NULL ? L(w_codes) : L(w);
    const int64_t groups = c->params.groups, block = c->params.block;
    int64_t *s = call->symbol;
    quern_status status;
    call->stored = t[L(x)]->dtype;
    if ((status = find_kind(c)) != QUERN_OK || (status = check_result(c)) != QUERN_OK) return status;
    s[LIN_K] = s[LIN_GK] / groups;
    s[LIN_N] = s[LIN_GN] / groups;
    if ((status = check_groups("x", s[LIN_GK], groups)) != QUERN_OK ||
        (status = check_groups(tensors[weight].field, s[LIN_GN], groups)) != QUERN_OK ||
        (status = check_sizes(s)) != QUERN_OK)
        return status;
    if (c->kind == LINEAR_NVFP4 && (s[LIN_K] % 16 != 0 || s[LIN_K] > INT32_MAX || s[LIN_N] > INT32_MAX))
        return error_argument(
            "K is %lld and N %lld with w_codes: K a multiple of 16, both below 2^31, is accepted",
            (long long)s[LIN_K], (long long)s[LIN_N]);
    const bool one = op_is_one(t[L(w_scale)]);
    call->lead[LIN_SCALE - OP_LEAD] =
        (op_extents){2, {(s[LIN_GN] + block - 1) / block, (s[LIN_K] + block - 1) / block}};
    if (one) call->lead[LIN_SCALE - OP_LEAD] = (op_extents){t[L(w_scale)]->ndim, {1}};
    return QUERN_OK;
}

const op_family linear_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_linear_tensors, QUERN_LINEAR_TENSORS_INIT),
    OP_OWN_CALL(linear_call, QUERN_LINEAR_PARAMS_INIT),
    .first = QUERN_OP_LINEAR_FORWARD,
    .leads = leads,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .build = linear_build,
};
