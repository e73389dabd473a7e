/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* route.c - the router and its gradient: their schema, their public functions, and the stage that each
 * runs. */
#include "core/error.h"
#include "moe/call.h"

#include <stddef.h>

typedef enum route_op { ROUTE, ROUTE_BACKWARD, ROUTE_OPS } route_op;

/* The number of a tensor. */
#define R(field) OP_TENSOR(quern_moe_route_tensors, field)
enum { ROUTE_TENSORS = OP_TENSOR_COUNT(quern_moe_route_tensors) };
enum { RS_T = 1, RS_E, RS_D, RS_K, RS_TK, RS_V };

static const op_tensor tensors[] = {
    {"logits", "logits", OP_FLOAT, OP_NONE, {RS_T, RS_E}, {0}},
    {"hidden", "hidden", OP_FLOAT, OP_NONE, {RS_T, RS_D}, {0}},
    {"weight", "weight", OP_FLOAT, OP_NONE, {RS_E, RS_D}, {0}},
    {"bias", "bias", OP_F32, OP_NONE, {RS_E}, {0}},
    {"input_ids", "input_ids", OP_INDEX, OP_NONE, {RS_T}, {0}},
    {"tid2eid", "tid2eid", OP_INDEX, OP_NONE, {RS_V, RS_K}, {0}},
    {"experts", "experts", OP_I32, OP_NONE, {RS_T, RS_K}, {0}},
    {"weights", "weights", OP_F32, OP_NONE, {RS_T, RS_K}, {0}},
    {"offsets", "offsets", OP_I32, OP_NONE, {RS_E}, {0}},
    {"permutation", "permutation", OP_I32, OP_NONE, {RS_TK}, {0}},
    {"d_weights", "d_weights", OP_F32, R(weights), {RS_T, RS_K}, {0}},
    {"d_logits", "d_logits", OP_SOURCE, R(logits), {RS_T, RS_E}, {0}},
    {"d_hidden", "d_hidden", OP_SOURCE, R(hidden), {RS_T, RS_D}, {0}},
    {"d_weight", "d_weight", OP_F32, R(weight), {RS_E, RS_D}, {0}},
};

static const char *const scores[] = {"softmax", "sqrtsoftplus", "sigmoid", NULL};
#define FIELD(member) OP_FIELD(quern_moe_route_params, member)
static const op_param params[] = {
    {FIELD(score), OP_CHOICE, 0, 2, scores, "what becomes of logits"},
    {FIELD(top_k), OP_INTEGER, 1, INT32_MAX, NULL, "experts of a token"},
    {FIELD(renormalize), OP_FLAG, 0, 1, NULL, "divide the chosen experts' scores by their sum"},
    {FIELD(route_scale), OP_NUMBER, 0, 0, NULL, "multiplies the weights"},
};
static const int8_t like[] = {R(hidden), R(logits), OP_NONE};
static const char *const operations[] = {"moe_route", "moe_route_backward"};
static const char symbols[] = "T E D k Tk V";
static const op_entry ops[] = {
    {.name = "moe-route",
     .help = "the experts of each token, their weights, and the order of the experts' rows; with d_weights "
             "also the backward",
     .forward = ROUTE,
     .backward = ROUTE_BACKWARD},
};

static void roles(op_call *call)
{
    const bool backward = call->operation == ROUTE_BACKWARD,
               products = call->given[R(hidden)] != NULL || call->given[R(weight)] != NULL;
    const bool table = call->given[R(tid2eid)] != NULL;
    uint8_t *r = call->role;
    op_allow(call, R(logits), !products, OP_NEEDED, " with hidden or weight: one or the others are accepted");
    r[R(hidden)] = r[R(weight)] = products ? OP_NEEDED : OP_OPTIONAL;
    for (int i = products ? R(hidden) : R(logits); i <= R(weight); i++)
        op_reason(call, i, ": logits, or hidden and weight, are needed");
    op_allow(call, R(bias), backward || !table, backward ? OP_UNUSED : OP_OPTIONAL,
             " with tid2eid: one or the other is accepted");
    op_allow(call, R(input_ids), backward || table, backward ? OP_UNUSED : OP_NEEDED,
             " without tid2eid: both or neither are accepted");
    r[R(tid2eid)] = backward ? OP_UNUSED : OP_OPTIONAL;
    r[R(experts)] = backward ? OP_NEEDED : OP_RESULT;
    r[R(weights)] = r[R(offsets)] = r[R(permutation)] = backward ? OP_UNUSED : OP_RESULT;
    r[R(d_weights)] = backward ? OP_NEEDED : OP_UNUSED;
    r[R(d_logits)] = backward ? OP_OPTIONAL_RESULT : OP_UNUSED;
    r[R(d_hidden)] = r[R(d_weight)] = !backward  ? OP_UNUSED
                                      : products ? OP_OPTIONAL_RESULT
                                                 : OP_SOURCE_MISSING;
}

static quern_status derive(op_call *call)
{
    const quern_moe_route_params *p = op_params(call);
    int64_t *s = call->symbol;
    s[RS_K] = p->top_k;
    if (p->top_k > s[RS_E])
        return error_argument("top_k is %lld: 1 to the %lld experts is accepted", (long long)p->top_k,
                              (long long)s[RS_E]);
    if (s[RS_E] > INT32_MAX || s[RS_T] > INT32_MAX / p->top_k)
        return error_argument("%lld tokens of %lld experts each: at most %d slots are accepted",
                              (long long)s[RS_T], (long long)p->top_k, INT32_MAX);
    s[RS_TK] = s[RS_T] * s[RS_K];
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_moe_route_params *p = op_params(call);
    route_args *args = call->operation == ROUTE ? OP_ADD(b, route_forward) : OP_ADD(b, route_backward);
    *args = (route_args){.score = (route_score)p->score,
                         .top_k = p->top_k,
                         .renormalize = p->renormalize,
                         .scale = p->route_scale,
                         .logits = op_view(call, R(logits), false),
                         .hidden = op_view(call, R(hidden), false),
                         .weight = op_view(call, R(weight), false),
                         .bias = op_view(call, R(bias), false),
                         .input_ids = op_view(call, R(input_ids), false),
                         .tid2eid = op_view(call, R(tid2eid), false),
                         .experts = op_view(call, R(experts), false),
                         .weights = op_view(call, R(weights), false),
                         .offsets = op_view(call, R(offsets), false),
                         .permutation = op_view(call, R(permutation), false),
                         .d_weights = op_view(call, R(d_weights), false),
                         .d_logits = op_view(call, R(d_logits), false),
                         .d_hidden = op_view(call, R(d_hidden), false),
                         .d_weight = op_view(call, R(d_weight), false)};
}

const op_family moe_route_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_moe_route_tensors, QUERN_MOE_ROUTE_TENSORS_INIT),
    OP_CALL(quern_moe_route_params, QUERN_MOE_ROUTE_PARAMS_INIT, OP_STEP_BYTES(route)),
    .first = QUERN_OP_MOE_ROUTE,
    .group = "routing",
    .like = like,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_moe_route_workspace(quern_context *ctx, const quern_moe_route_params *given,
                                       const quern_moe_route_tensors *of, size_t *bytes)
{
    return op_workspace_of(&moe_route_family, ROUTE, ctx, given, of, bytes);
}

quern_status quern_moe_route(quern_context *ctx, const quern_exec *exec, const quern_moe_route_params *given,
                             const quern_moe_route_tensors *of, void *workspace, size_t workspace_bytes)
{
    return op_run(&moe_route_family, ROUTE, ctx, exec, given, of, workspace, workspace_bytes);
}

quern_status quern_moe_route_backward_workspace(quern_context *ctx, const quern_moe_route_params *given,
                                                const quern_moe_route_tensors *of, size_t *bytes)
{
    return op_workspace_of(&moe_route_family, ROUTE_BACKWARD, ctx, given, of, bytes);
}

quern_status quern_moe_route_backward(quern_context *ctx, const quern_exec *exec,
                                      const quern_moe_route_params *given, const quern_moe_route_tensors *of,
                                      void *workspace, size_t workspace_bytes)
{
    return op_run(&moe_route_family, ROUTE_BACKWARD, ctx, exec, given, of, workspace, workspace_bytes);
}
