/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dequantize.c - NVFP4 back to values: the operation's schema and its one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nvfp4_dequantize_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_dequantize_tensors) };
enum { S_E = 1 };
/* Shapes of any number of dimensions; blocks lie along the last one, or along a weight's K. */
enum { L_X = OP_LEAD, L_CODES, L_SCALES, L_GLOBAL };
enum { ASKED_COLUMNS };

static const op_tensor tensors[] = {
    {"codes", "codes", OP_CODES, OP_NONE, {L_CODES}, {0}},
    {"scales", "scales", OP_SCALE, OP_NONE, {L_SCALES}, {0}},
    {"global", "global", OP_GLOBAL, OP_NONE, {L_GLOBAL}, {0}},
    {"offsets", "offsets", OP_I32, OP_NONE, {S_E}, {0}},
    {"x", "X", OP_FLOAT, OP_NONE, {L_X}, {0}},
};

#define FIELD(member) OP_FIELD(quern_nvfp4_dequantize_params, member)
static const op_param params[] = {
    {FIELD(profile), OP_CHOICE, 0, QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS, nvfp4_profile_words,
     "of the quantiser; with compressed-tensors the global is a reciprocal"},
    {FIELD(global_per), OP_CHOICE, 0, QUERN_NVFP4_GLOBAL_ROW, nvfp4_global_words,
     "what shares a global: all, an expert, a row of an activation"},
    {FIELD(weight), OP_FLAG, 0, 1, nvfp4_layout_words,
     "blocks along the last dimension, or along K of [K, N] or [E, K, N]"},
};
static const int8_t like[] = {T(x), T(codes), OP_NONE};
static const char *const operations[] = {"nvfp4_dequantize"};
static const char symbols[] = "E";
static const char *const leads[] = {"... D|... K N", "... 8*ceil(D/16)|... K/2 N",
                                    "... ceil(D/16)|... K/16 N", "|E|..."};
static const op_rename renames[] = {{"weight", "layout", NULL}, {"x", "W", "weight"}, {NULL, NULL, NULL}};
static const op_entry ops[] = {
    {.name = "nvfp4-dequantize",
     .help = "NVFP4 back to values; columns: D of an activation, 0: that of whole blocks",
     .renames = renames,
     .asked = {[ASKED_COLUMNS] = "columns"}},
};

#define PARAMS(call) ((quern_nvfp4_dequantize_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    return nvfp4_check_global_per(PARAMS(call)->global_per, PARAMS(call)->weight);
}

/* A global's shape says what shares it. */
static void adapt(op_call *call, const quern_tensor **given)
{
    quern_nvfp4_dequantize_params *p = op_params(call);
    const nvfp4_kinds kinds = nvfp4_kinds_of(given[T(codes)], given[T(offsets)], p->weight);
    p->global_per = nvfp4_global_kind(given[T(global)], p->global_per, &kinds);
}

static void roles(op_call *call)
{
    const quern_tensor *x = call->given[T(codes)];
    const bool rows = nvfp4_needs_offsets(PARAMS(call)->global_per, PARAMS(call)->weight, x);
    call->role[T(codes)] = call->role[T(scales)] = call->role[T(global)] = OP_NEEDED;
    op_allow(call, T(offsets), rows, OP_NEEDED, nvfp4_beside_offsets);
    call->role[T(x)] = OP_RESULT;
}

/* x's shape; without x, the one that follows from the codes. */
static quern_status find_shape(op_call *call, op_extents *shape)
{
    const quern_tensor *codes = call->given[T(codes)], *x = call->given[T(x)], *of = x != NULL ? x : codes;
    const bool weight = PARAMS(call)->weight;
    const char *name = tensors[x != NULL ? T(x) : T(codes)].field;
    const quern_status status = nvfp4_check_dims(of, name, weight);
    if (status != QUERN_OK) return status;
    const int32_t along = weight ? of->ndim - 2 : of->ndim - 1;
    shape->count = of->ndim;
    for (int32_t i = 0; i < of->ndim; i++) shape->extent[i] = of->shape[i];
    if (x == NULL) shape->extent[along] *= 2;
    if (x == NULL && !weight && call->asked[ASKED_COLUMNS] != 0)
        shape->extent[along] = call->asked[ASKED_COLUMNS];
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_nvfp4_dequantize_params *p = op_params(call);
    quern_status status = find_shape(call, &call->lead[L_X - OP_LEAD]);
    if (status == QUERN_OK) status = nvfp4_check_kind(call->given[T(global)], p->global_per, "global");
    if (status != QUERN_OK) return status;
    return nvfp4_derive_coded(call, p->weight, p->global_per, call->symbol[S_E]);
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_nvfp4_dequantize_params *p = op_params(call);
    const quern_tensor global = op_view(call, T(global), false);
    *OP_ADD(b, dequantise) = (dequantise_args){.profile = (quantise_profile)p->profile,
                                               .per = (quantise_global)p->global_per,
                                               .columns = p->weight,
                                               .codes = nvfp4_matrices(call, T(codes), p->weight),
                                               .scales = nvfp4_matrices(call, T(scales), p->weight),
                                               .global = nvfp4_tail_view(&global),
                                               .offsets = op_view(call, T(offsets), false),
                                               .out = nvfp4_matrices(call, T(x), p->weight)};
}

const op_family nvfp4_dequantize_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_dequantize_tensors, QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT),
    OP_CALL(quern_nvfp4_dequantize_params, QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT, OP_STEP_BYTES(dequantise)),
    .first = QUERN_OP_NVFP4_DEQUANTIZE,
    .leads = leads,
    .like = like,
    .check_params = check_params,
    .adapt = adapt,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_dequantize_workspace(quern_context *ctx, const quern_nvfp4_dequantize_params *given,
                                              const quern_nvfp4_dequantize_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nvfp4_dequantize_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_dequantize(quern_context *ctx, const quern_exec *exec,
                                    const quern_nvfp4_dequantize_params *given,
                                    const quern_nvfp4_dequantize_tensors *views, void *workspace,
                                    size_t workspace_bytes)
{
    return op_run(&nvfp4_dequantize_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
