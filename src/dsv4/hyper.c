/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - hyper-connections: their schema, their public functions, and their step. */
#include "core/error.h"
#include "core/op.h"
#include "dsv4/hyper.h"

#include <quern/dsv4_hyper.h>

#include <stddef.h>

enum { FORWARD, BACKWARD, OPS };
enum { HS_T = 1, HS_N, HS_D, HS_J, HS_ND, HS_PARTS };
enum { COPIES_MOST = 8, ITERS = 20, ITERS_MOST = 64 };

#define H(field) OP_TENSOR(quern_dsv4_hyper_tensors, field)
static const op_tensor tensors[] = {
    {"x", "x", OP_ACTIVATION, OP_NONE, {HS_T, HS_N, HS_D}, {0}},
    {"fn", "fn", OP_F32, OP_NONE, {HS_J, HS_ND}, {0}},
    {"base", "base", OP_F32, OP_NONE, {HS_J}, {0}},
    {"scale", "scale", OP_F32, OP_NONE, {HS_PARTS}, {0}},
    {"norm_weight", "norm_weight", OP_WEIGHT, OP_NONE, {HS_D}, {0}},
    {"f", "f", OP_ACTIVATION, OP_NONE, {HS_T, HS_D}, {0}},
    {"pre_in", "pre_in", OP_F32, OP_NONE, {HS_T, HS_N}, {0}},
    {"h", "h", OP_ACTIVATION, OP_NONE, {HS_T, HS_D}, {0}},
    {"pre", "pre", OP_F32, OP_NONE, {HS_T, HS_N}, {0}},
    {"post", "post", OP_F32, OP_NONE, {HS_T, HS_N}, {0}},
    {"comb", "comb", OP_F32, OP_NONE, {HS_T, HS_N, HS_N}, {0}},
    {"x_new", "new", OP_ACTIVATION, OP_NONE, {HS_T, HS_N, HS_D}, {0}},
    {"d_h", "d_h", OP_ACTIVATION, H(h), {HS_T, HS_D}, {0}},
    {"d_pre", "d_pre", OP_F32, H(pre), {HS_T, HS_N}, {0}},
    {"d_post", "d_post", OP_F32, H(post), {HS_T, HS_N}, {0}},
    {"d_comb", "d_comb", OP_F32, H(comb), {HS_T, HS_N, HS_N}, {0}},
    {"d_new", "d_new", OP_ACTIVATION, H(x_new), {HS_T, HS_N, HS_D}, {0}},
    {"d_x", "dx", OP_ACTIVATION, H(x), {HS_T, HS_N, HS_D}, {0}},
    {"d_fn", "dfn", OP_F32, H(fn), {HS_J, HS_ND}, {0}},
    {"d_base", "dbase", OP_F32, H(base), {HS_J}, {0}},
    {"d_scale", "dscale", OP_F32, H(scale), {HS_PARTS}, {0}},
    {"d_norm_weight", "dnorm_weight", OP_F32, H(norm_weight), {HS_D}, {0}},
    {"d_f", "df", OP_ACTIVATION, H(f), {HS_T, HS_D}, {0}},
    {"d_pre_in", "dpre_in", OP_F32, H(pre_in), {HS_T, HS_N}, {0}},
};

#define FIELD(member) OP_FIELD(quern_dsv4_hyper_params, member)
static const op_param params[] = {
    {FIELD(iters), OP_INTEGER, 0, ITERS_MOST, NULL, "normalisations of comb's columns; 0: 20"},
    {FIELD(eps), OP_POSITIVE, 0, 0, NULL, "of the weights, hc_eps; 0: 1e-6"},
    {FIELD(rms_eps), OP_POSITIVE, 0, 0, NULL, "added to the mean squares; 0: 1e-6"},
    {FIELD(head), OP_FLAG, 0, 1, NULL, "the end of a model: h alone"},
};
static const char *const operations[] = {"dsv4_hyper", "dsv4_hyper_backward"};
static const char symbols[] = "T n Dm n*(n+2)|n n*Dm 3|1";
static const op_entry ops[] = {
    {.name = "v4-hyper",
     .help = "DeepSeek-V4's hyper-connections: a sub-layer's input of n copies, with f also the copies after "
             "it; with a gradient of a result also the backward",
     .forward = FORWARD,
     .backward = BACKWARD},
};

#define PARAMS(call) ((quern_dsv4_hyper_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    quern_dsv4_hyper_params *p = op_params(call);
    if (p->iters == 0) p->iters = ITERS;
    if (p->eps == 0.0f) p->eps = 1e-6f;
    if (p->rms_eps == 0.0f) p->rms_eps = 1e-6f;
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const bool backward = call->operation == BACKWARD, head = PARAMS(call)->head;
    const quern_tensor *const *t = call->given;
    const bool handed = t[H(pre_in)] != NULL, with_f = !head && t[H(f)] != NULL;
    /* Of results, and of their gradients: what the other pass does with them. */
    const op_role result = backward ? OP_UNUSED : OP_OPTIONAL_RESULT,
                  given = backward ? OP_OPTIONAL : OP_UNUSED;
    const char *beside_f = head ? ": head makes h alone" : ": it stands beside f",
               *beside_pre = head ? ": head makes h alone" : ": it stands beside pre_in";
    uint8_t *r = call->role;
    r[H(x)] = r[H(norm_weight)] = OP_NEEDED;
    op_allow_all(call, H(fn), H(scale), !head || !handed, OP_NEEDED, ": head with pre_in takes no weights");
    op_allow(call, H(f), !head, OP_OPTIONAL, beside_f);
    r[H(pre_in)] = OP_OPTIONAL;
    r[H(h)] = backward ? OP_UNUSED : OP_RESULT;
    op_allow(call, H(pre), backward || (!head && handed), result, beside_pre);
    op_allow_all(call, H(post), H(comb), backward || !head, result, beside_f);
    op_allow(call, H(x_new), backward || with_f, backward ? OP_UNUSED : OP_RESULT, beside_f);
    r[H(d_h)] = (uint8_t)given;
    op_allow(call, H(d_pre), !backward || (!head && handed), given, beside_pre);
    op_allow_all(call, H(d_post), H(d_comb), !backward || !head, given, beside_f);
    op_allow(call, H(d_new), !backward || with_f, given, beside_f);
    r[H(d_x)] = backward ? OP_RESULT : OP_UNUSED;
    op_gradient_roles(call, H(d_fn), H(d_pre_in), backward);
}

static quern_status derive(op_call *call)
{
    static const int32_t of_results[] = {H(d_h), H(d_pre), H(d_post), H(d_comb), H(d_new)};
    const bool head = PARAMS(call)->head;
    int64_t *s = call->symbol;
    if (s[HS_N] < 1 || s[HS_N] > COPIES_MOST || s[HS_D] < 1 || s[HS_D] > INT32_MAX)
        return error_argument("x has %lld copies of %lld channels: 1 to %d copies of 1 to %d are accepted",
                              (long long)s[HS_N], (long long)s[HS_D], COPIES_MOST, INT32_MAX);
    if (s[HS_T] > INT32_MAX)
        return error_argument("x has %lld tokens: at most %d are accepted", (long long)s[HS_T], INT32_MAX);
    s[HS_J] = head ? s[HS_N] : s[HS_N] * (s[HS_N] + 2);
    s[HS_ND] = s[HS_N] * s[HS_D];
    s[HS_PARTS] = head ? 1 : 3;
    if (call->operation == BACKWARD &&
        op_first_used(call, of_results, sizeof of_results / sizeof *of_results) == OP_NONE)
        return error_argument(
            "d_h, d_pre, d_post, d_comb and d_new are NULL: at least one of them is accepted");
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_hyper_params *p = op_params(call);
    hyper_args *args = call->operation == FORWARD ? OP_ADD(b, hyper_forward) : OP_ADD(b, hyper_backward);
    *args = (hyper_args){.head = p->head,
                         .iterations = p->iters,
                         .eps = p->eps,
                         .rms_eps = p->rms_eps,
                         .x = op_view(call, H(x), false),
                         .fn = op_view(call, H(fn), false),
                         .base = op_view(call, H(base), false),
                         .scale = op_view(call, H(scale), false),
                         .weight = op_view(call, H(norm_weight), false),
                         .f = op_view(call, H(f), false),
                         .pre_in = op_view(call, H(pre_in), false),
                         .h = op_view(call, H(h), false),
                         .pre = op_view(call, H(pre), false),
                         .post = op_view(call, H(post), false),
                         .comb = op_view(call, H(comb), false),
                         .out = op_view(call, H(x_new), false),
                         .d_h = op_view(call, H(d_h), false),
                         .d_out = op_view(call, H(d_new), false),
                         .d_pre = op_view(call, H(d_pre), false),
                         .d_post = op_view(call, H(d_post), false),
                         .d_comb = op_view(call, H(d_comb), false),
                         .d_x = op_view(call, H(d_x), false),
                         .d_f = op_view(call, H(d_f), false),
                         .d_fn = op_view(call, H(d_fn), false),
                         .d_base = op_view(call, H(d_base), false),
                         .d_scale = op_view(call, H(d_scale), false),
                         .d_weight = op_view(call, H(d_norm_weight), false),
                         .d_pre_in = op_view(call, H(d_pre_in), false)};
}

const op_family dsv4_hyper_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_hyper_tensors, QUERN_DSV4_HYPER_TENSORS_INIT),
    OP_CALL(quern_dsv4_hyper_params, QUERN_DSV4_HYPER_PARAMS_INIT, OP_STEP_BYTES(hyper)),
    .first = QUERN_OP_DSV4_HYPER,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_dsv4_hyper_workspace(quern_context *ctx, const quern_dsv4_hyper_params *given,
                                        const quern_dsv4_hyper_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_hyper_family, FORWARD, ctx, given, of, bytes);
}

quern_status quern_dsv4_hyper(quern_context *ctx, const quern_exec *exec,
                              const quern_dsv4_hyper_params *given, const quern_dsv4_hyper_tensors *of,
                              void *workspace, size_t workspace_bytes)
{
    return op_run(&dsv4_hyper_family, FORWARD, ctx, exec, given, of, workspace, workspace_bytes);
}

quern_status quern_dsv4_hyper_backward_workspace(quern_context *ctx, const quern_dsv4_hyper_params *given,
                                                 const quern_dsv4_hyper_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_hyper_family, BACKWARD, ctx, given, of, bytes);
}

quern_status quern_dsv4_hyper_backward(quern_context *ctx, const quern_exec *exec,
                                       const quern_dsv4_hyper_params *given,
                                       const quern_dsv4_hyper_tensors *of, void *workspace,
                                       size_t workspace_bytes)
{
    return op_run(&dsv4_hyper_family, BACKWARD, ctx, exec, given, of, workspace, workspace_bytes);
}
