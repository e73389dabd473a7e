/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* from_mxfp4.c - MXFP4 to NVFP4: the operation's schema and its one stage. */
#include "core/error.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nvfp4_from_mxfp4_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_from_mxfp4_tensors) };
enum { S_K = 1, S_MX_BLOCKS };
enum { L_ROWS = OP_LEAD };
enum { MX_BLOCK = 32 };

static const op_tensor tensors[] = {
    {"mx_codes", "codes", OP_CODES, OP_NONE, {L_ROWS, OP_HALF + S_K}, {0}},
    {"exponents", "exponents", OP_EXPONENT, OP_NONE, {L_ROWS, S_MX_BLOCKS}, {0}},
    {"codes", "codes", OP_CODES, OP_NONE, {L_ROWS, OP_HALF + S_K}, {0}},
    {"scales", "scales", OP_SCALE, OP_NONE, {L_ROWS, OP_SIXTEENTH + S_K}, {0}},
    {"global", "global", OP_GLOBAL, OP_NONE, {0}, {0}},
    {"rounded_blocks", "rounded_blocks", OP_I64, OP_NONE, {0}, {0}},
};

static const char *const operations[] = {"nvfp4_from_mxfp4"};
static const char symbols[] = "K K/32";
static const op_entry ops[] = {
    {.name = "nvfp4-from-mxfp4",
     .help = "MXFP4 to NVFP4: exact where block exponents span at most 17 binades"},
};

static void roles(op_call *call)
{
    for (int i = 0; i < TENSORS; i++)
        call->role[i] = i <= T(exponents)        ? OP_NEEDED
                        : i == T(rounded_blocks) ? OP_OPTIONAL_RESULT
                                                 : OP_RESULT;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *codes = call->given[T(mx_codes)];
    op_extents *rows = &call->lead[L_ROWS - OP_LEAD];
    if (codes->ndim < 1 || codes->ndim > QUERN_MAX_DIMS)
        return error_argument("mx_codes has %d dimensions: at least 1 is accepted", codes->ndim);
    rows->count = codes->ndim - 1;
    for (int32_t i = 0; i < rows->count; i++) rows->extent[i] = codes->shape[i];
    const int64_t bytes = codes->shape[codes->ndim - 1];
    if (bytes % (MX_BLOCK / 2) != 0)
        return error_argument(
            "mx_codes.shape[%d] is %lld: whole blocks of 32, a multiple of 16 bytes, are accepted",
            codes->ndim - 1, (long long)bytes);
    call->symbol[S_K] = 2 * bytes;
    call->symbol[S_MX_BLOCKS] = bytes / (MX_BLOCK / 2);
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_tensor global = op_view(call, T(global), false),
                       rounded = op_view(call, T(rounded_blocks), false);
    *OP_ADD(b, from_mxfp4) = (from_mxfp4_args){
        op_view(call, T(mx_codes), false), op_view(call, T(exponents), false), op_view(call, T(codes), false),
        op_view(call, T(scales), false),   nvfp4_tail_view(&global),           nvfp4_tail_view(&rounded)};
}

const op_family nvfp4_from_mxfp4_family = {
    OP_CALL(quern_nvfp4_from_mxfp4_params, QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT, OP_STEP_BYTES(from_mxfp4)),
    OP_TABLES_WITH(operations, NULL, 0, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_from_mxfp4_tensors, QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT),
    .first = QUERN_OP_NVFP4_FROM_MXFP4,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_from_mxfp4_workspace(quern_context *ctx, const quern_nvfp4_from_mxfp4_params *given,
                                              const quern_nvfp4_from_mxfp4_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nvfp4_from_mxfp4_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_from_mxfp4(quern_context *ctx, const quern_exec *exec,
                                    const quern_nvfp4_from_mxfp4_params *given,
                                    const quern_nvfp4_from_mxfp4_tensors *views, void *workspace,
                                    size_t workspace_bytes)
{
    return op_run(&nvfp4_from_mxfp4_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
