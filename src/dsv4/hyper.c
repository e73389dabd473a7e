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

typedef struct hyper_call {
    op_call head;
    quern_dsv4_hyper_params params;
    _Alignas(op_step) char program[OP_STEP_BYTES(hyper)];
} hyper_call;

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
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_dsv4_hyper_tensors),
               "a row a tensor");

#define AT(member) offsetof(quern_dsv4_hyper_params, member)
static const op_param params[] = {
    {"iters", AT(iters), OP_INTEGER, 0, ITERS_MOST, NULL, "normalisations of comb's columns; 0: 20"},
    {"eps", AT(eps), OP_POSITIVE, 0, 0, NULL, "of the weights, hc_eps; 0: 1e-6"},
    {"rms_eps", AT(rms_eps), OP_POSITIVE, 0, 0, NULL, "added to the mean squares; 0: 1e-6"},
    {"head", AT(head), OP_FLAG, 0, 1, NULL, "the end of a model: h alone"},
};
#undef AT
static const quern_dsv4_hyper_params defaults = QUERN_DSV4_HYPER_PARAMS_INIT;
static const char *const operations[] = {"dsv4_hyper", "dsv4_hyper_backward"};
static const char *const symbols[] = {"",
                                      [HS_T] = "T",
                                      [HS_N] = "n",
                                      [HS_D] = "Dm",
                                      [HS_J] = "n*(n+2)|n",
                                      [HS_ND] = "n*Dm",
                                      [HS_PARTS] = "3|1",
                                      NULL};
static const op_entry ops[] = {
    {.name = "v4-hyper",
     .help = "DeepSeek-V4's hyper-connections: a sub-layer's input of n copies, with f also the copies after "
             "it; with a gradient of a result also the backward",
     .forward = FORWARD,
     .backward = BACKWARD},
};

static quern_dsv4_hyper_params *params_of(const op_call *call)
{
    return &((hyper_call *)(uintptr_t)call)->params;
}

static quern_status check_params(op_call *call)
{
    quern_dsv4_hyper_params *p = params_of(call);
    if (p->iters == 0) p->iters = ITERS;
    if (p->eps == 0.0f) p->eps = 1e-6f;
    if (p->rms_eps == 0.0f) p->rms_eps = 1e-6f;
    return QUERN_OK;
}

static void roles(op_call *call)
{
    const bool backward = call->operation == BACKWARD, head = params_of(call)->head;
    const quern_tensor *const *t = call->given;
    const bool handed = t[H(pre_in)] != NULL, with_f = !head && t[H(f)] != NULL;
    const uint8_t mix = head && handed ? OP_REFUSED : OP_NEEDED;
    uint8_t *r = call->role;
    r[H(x)] = r[H(norm_weight)] = OP_NEEDED;
    r[H(fn)] = r[H(base)] = r[H(scale)] = mix;
    r[H(f)] = head ? OP_REFUSED : OP_OPTIONAL;
    r[H(pre_in)] = OP_OPTIONAL;
    r[H(h)] = backward ? OP_UNUSED : OP_RESULT;
    r[H(pre)] = backward ? OP_UNUSED : head || !handed ? OP_REFUSED : OP_OPTIONAL_RESULT;
    r[H(post)] = r[H(comb)] = backward ? OP_UNUSED : head ? OP_REFUSED : OP_OPTIONAL_RESULT;
    r[H(x_new)] = backward ? OP_UNUSED : with_f ? OP_RESULT : OP_REFUSED;
    r[H(d_h)] = backward ? OP_OPTIONAL : OP_UNUSED;
    r[H(d_pre)] = !backward ? OP_UNUSED : head || !handed ? OP_REFUSED : OP_OPTIONAL;
    r[H(d_post)] = r[H(d_comb)] = !backward ? OP_UNUSED : head ? OP_REFUSED : OP_OPTIONAL;
    r[H(d_new)] = !backward ? OP_UNUSED : with_f ? OP_OPTIONAL : OP_REFUSED;
    r[H(d_x)] = backward ? OP_RESULT : OP_UNUSED;
    for (int i = H(d_fn); i <= H(d_pre_in); i++)
        r[i] = !backward                           ? OP_UNUSED
               : t[tensors[i].gradient_of] == NULL ? OP_SOURCE_MISSING
                                                   : OP_OPTIONAL_RESULT;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    (void)text;
    if (tensor >= H(fn) && tensor <= H(scale)) return ": head with pre_in takes no weights";
    if (params_of(call)->head) return ": head makes h alone";
    return tensor == H(pre) || tensor == H(d_pre) ? ": it stands beside pre_in" : ": it stands beside f";
}

static quern_status derive(op_call *call)
{
    static const int32_t of_results[] = {H(d_h), H(d_pre), H(d_post), H(d_comb), H(d_new)};
    const quern_tensor *x = call->given[H(x)];
    const bool head = params_of(call)->head;
    int64_t *s = call->symbol;
    if (x == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "x is NULL: a tensor is needed");
    call->like = *x;
    const quern_status status = op_check_activation(call, H(x), 3);
    if (status != QUERN_OK) return status;
    s[HS_T] = x->shape[0];
    s[HS_N] = x->shape[1];
    s[HS_D] = x->shape[2];
    if (s[HS_N] < 1 || s[HS_N] > COPIES_MOST || s[HS_D] < 1 || s[HS_D] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x has %lld copies of %lld channels: 1 to %d copies of 1 to %d are accepted",
                         (long long)s[HS_N], (long long)s[HS_D], COPIES_MOST, INT32_MAX);
    if (s[HS_T] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "x has %lld tokens: at most %d are accepted",
                         (long long)s[HS_T], INT32_MAX);
    s[HS_J] = head ? s[HS_N] : s[HS_N] * (s[HS_N] + 2);
    s[HS_ND] = s[HS_N] * s[HS_D];
    s[HS_PARTS] = head ? 1 : 3;
    if (call->operation == BACKWARD &&
        op_first_used(call, of_results, sizeof of_results / sizeof *of_results) == OP_NONE)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "d_h, d_pre, d_post, d_comb and d_new are NULL: at least one of them is accepted");
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_hyper_params *p = params_of(call);
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
    OP_TABLES(hyper_call, operations, tensors, params, symbols, ops),
    .first = QUERN_OP_DSV4_HYPER,
    .defaults = &defaults,
    .params_init = "QUERN_DSV4_HYPER_PARAMS_INIT",
    .tensors_init = "QUERN_DSV4_HYPER_TENSORS_INIT",
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
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
