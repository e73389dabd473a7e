/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantize.c - values to NVFP4: the operation's schema and its one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nvfp4_quantize_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_quantize_tensors) };
enum { S_E = 1 };
/* Shapes of any number of dimensions; blocks lie along the last one, or along a weight's K. */
enum { L_X = OP_LEAD, L_CODES, L_SCALES, L_GLOBAL };

static const op_tensor tensors[] = {
    {"x", "X", OP_FLOAT, OP_NONE, {L_X}, {0}},
    {"offsets", "offsets", OP_I32, OP_NONE, {S_E}, {0}},
    {"given_global", "global", OP_GLOBAL, OP_NONE, {L_GLOBAL}, {0}},
    {"codes", "codes", OP_CODES, OP_NONE, {L_CODES}, {0}},
    {"scales", "scales", OP_SCALE, OP_NONE, {L_SCALES}, {0}},
    {"global", "global", OP_GLOBAL, OP_NONE, {L_GLOBAL}, {0}},
};

static const char *const choices[] = {"rne", "four-over-six", "search", NULL};
#define FIELD(member) OP_FIELD(quern_nvfp4_quantize_params, member)
static const op_param params[] = {
    {FIELD(profile), OP_CHOICE, 0, QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS, nvfp4_profile_words,
     "of the quantiser"},
    {FIELD(scales), OP_CHOICE, 0, QUERN_NVFP4_SCALES_SEARCH, choices, "which scale a block gets"},
    {FIELD(global_per), OP_CHOICE, 0, QUERN_NVFP4_GLOBAL_ROW, nvfp4_global_words,
     "what shares a global: all, an expert, a row of an activation"},
    {FIELD(weight), OP_FLAG, 0, 1, nvfp4_layout_words,
     "blocks along the last dimension, or along K of [K, N] or [E, K, N]"},
};
static const char *const operations[] = {"nvfp4_quantize"};
static const char symbols[] = "E";
static const char *const leads[] = {"... D|... K N", "... 8*ceil(D/16)|... K/2 N",
                                    "... ceil(D/16)|... K/16 N", "|E|..."};
static const op_rename renames[] = {{"weight", "layout", NULL}, {"x", "W", "weight"}, {NULL, NULL, NULL}};
static const op_entry ops[] = {
    {.name = "nvfp4-quantize",
     .help = "values to NVFP4: codes, scales, and a global, computed or given",
     .renames = renames},
};

#define PARAMS(call) ((quern_nvfp4_quantize_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    const quern_nvfp4_quantize_params *p = op_params(call);
    if (p->profile == QUERN_NVFP4_PROFILE_HALFSTEP && p->scales != QUERN_NVFP4_SCALES_RNE)
        return error_argument("scales is %d with profile halfstep: 0 (rne) is accepted", (int)p->scales);
    return nvfp4_check_global_per(p->global_per, p->weight);
}

/* A global's shape says what shares it. */
static void adapt(op_call *call, const quern_tensor **given)
{
    quern_nvfp4_quantize_params *p = op_params(call);
    const nvfp4_kinds kinds = nvfp4_kinds_of(given[T(x)], given[T(offsets)], p->weight);
    p->global_per = nvfp4_global_kind(given[T(given_global)], p->global_per, &kinds);
}

static void roles(op_call *call)
{
    const quern_tensor *x = call->given[T(x)];
    const bool rows = nvfp4_needs_offsets(PARAMS(call)->global_per, PARAMS(call)->weight, x);
    call->role[T(x)] = OP_NEEDED;
    op_allow(call, T(offsets), rows, OP_NEEDED, nvfp4_beside_offsets);
    if (rows) op_reason(call, T(offsets), ": an activation with a global an expert needs them");
    call->role[T(given_global)] = OP_OPTIONAL;
    call->role[T(codes)] = call->role[T(scales)] = OP_RESULT;
    call->role[T(global)] = call->given[T(given_global)] != NULL ? OP_OPTIONAL_RESULT : OP_RESULT;
}

static quern_status derive(op_call *call)
{
    const quern_nvfp4_quantize_params *p = op_params(call);
    const quern_tensor *x = call->given[T(x)];
    op_extents *shape = &call->lead[L_X - OP_LEAD];
    quern_status status;
    if ((status = nvfp4_check_dims(x, "x", p->weight)) != QUERN_OK ||
        (status = nvfp4_check_kind(call->given[T(given_global)], p->global_per, "given_global")) != QUERN_OK)
        return status;
    shape->count = x->ndim;
    for (int32_t i = 0; i < x->ndim; i++) shape->extent[i] = x->shape[i];
    return nvfp4_derive_coded(call, p->weight, p->global_per, call->symbol[S_E]);
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_nvfp4_quantize_params *p = op_params(call);
    const quern_tensor global = op_view(call, T(global), false),
                       given = op_view(call, T(given_global), false);
    *OP_ADD(b, quantise) = (quantise_args){.profile = (quantise_profile)p->profile,
                                           .choice = (quantise_scales)p->scales,
                                           .per = (quantise_global)p->global_per,
                                           .columns = p->weight,
                                           .x = nvfp4_matrices(call, T(x), p->weight),
                                           .offsets = op_view(call, T(offsets), false),
                                           .codes = nvfp4_matrices(call, T(codes), p->weight),
                                           .scales = nvfp4_matrices(call, T(scales), p->weight),
                                           .global = nvfp4_tail_view(&global),
                                           .given = nvfp4_tail_view(&given)};
}

const op_family nvfp4_quantize_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_quantize_tensors, QUERN_NVFP4_QUANTIZE_TENSORS_INIT),
    OP_CALL(quern_nvfp4_quantize_params, QUERN_NVFP4_QUANTIZE_PARAMS_INIT, OP_STEP_BYTES(quantise)),
    .first = QUERN_OP_NVFP4_QUANTIZE,
    .leads = leads,
    .check_params = check_params,
    .adapt = adapt,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_quantize_workspace(quern_context *ctx, const quern_nvfp4_quantize_params *given,
                                            const quern_nvfp4_quantize_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nvfp4_quantize_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_quantize(quern_context *ctx, const quern_exec *exec,
                                  const quern_nvfp4_quantize_params *given,
                                  const quern_nvfp4_quantize_tensors *views, void *workspace,
                                  size_t workspace_bytes)
{
    return op_run(&nvfp4_quantize_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
