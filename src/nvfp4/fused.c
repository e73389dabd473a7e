/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fused.c - a product's interleaved output to NVFP4: the operation's schema and its one stage. */
#include "core/error.h"
#include "core/view.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_nvfp4_fused_quantize_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_fused_quantize_tensors) };
enum { S_M = 1, S_2I, S_BYTES, S_BLOCKS };

static const op_tensor tensors[] = {
    {"x", "X", OP_FLOAT, OP_NONE, {S_M, S_2I}, {0}},
    {"gate_global", "gate_global", OP_GLOBAL, OP_NONE, {0}, {0}},
    {"up_global", "up_global", OP_GLOBAL, OP_NONE, {0}, {0}},
    {"gate_codes", "gate_codes", OP_CODES, OP_NONE, {S_M, S_BYTES}, {0}},
    {"gate_scales", "gate_scales", OP_SCALE, OP_NONE, {S_M, S_BLOCKS}, {0}},
    {"up_codes", "up_codes", OP_CODES, OP_NONE, {S_M, S_BYTES}, {0}},
    {"up_scales", "up_scales", OP_SCALE, OP_NONE, {S_M, S_BLOCKS}, {0}},
};

static const char *const activations[] = {"none", "swiglu", NULL};
#define FIELD(member) OP_FIELD(quern_nvfp4_fused_quantize_params, member)
static const op_param params[] = {
    {FIELD(profile), OP_CHOICE, 0, QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS, nvfp4_profile_words,
     "of the quantiser"},
    {FIELD(swiglu), OP_FLAG, 0, 1, activations, "quantise gate and up, or what SwiGLU makes of them"},
    {FIELD(limit), OP_LIMIT, 0, 0, NULL, "of gate and up; 0: none"},
    {FIELD(alpha), OP_NUMBER, 0, 0, NULL, "of the gate's sigmoid"},
    {FIELD(beta), OP_NUMBER, 0, 0, NULL, "added to up"},
    {FIELD(granularity), OP_INTEGER, 1, INT32_MAX, NULL, "runs of gate and up in X's columns"},
};
static const char *const operations[] = {"nvfp4_fused_quantize"};
static const char symbols[] = "M 2I 8*ceil(I/16) ceil(I/16)";
static const op_rename renames[] = {{"swiglu", "activation", NULL},
                                    {"gate_global", "global", "swiglu"},
                                    {"gate_codes", "codes", "swiglu"},
                                    {"gate_scales", "scales", "swiglu"},
                                    {NULL, NULL, NULL}};
static const op_entry ops[] = {
    {.name = "nvfp4-fused-quantize",
     .help = "interleaved gate and up of a product to NVFP4, each or both by its global; or their SwiGLU",
     .renames = renames},
};

#define PARAMS(call) ((quern_nvfp4_fused_quantize_params *)op_params(call))

/* A part is written if the call has its codes; a call without any codes asks by its globals. */
static void part_roles(op_call *call, int32_t global, int32_t codes, bool refused)
{
    const bool given = call->given[codes] != NULL, asked = given || call->given[global] != NULL;
    call->role[global] = refused ? OP_UNUSED : given ? OP_NEEDED : OP_OPTIONAL;
    op_allow(call, codes, !refused, asked ? OP_OPTIONAL_RESULT : OP_UNUSED,
             " with swiglu: the result goes to gate_codes alone");
    call->role[codes + 1] = refused ? OP_UNUSED : given ? OP_RESULT : asked ? OP_OPTIONAL_RESULT : OP_UNUSED;
}

static void roles(op_call *call)
{
    const bool swiglu = PARAMS(call)->swiglu;
    call->role[T(x)] = OP_NEEDED;
    part_roles(call, T(gate_global), T(gate_codes), false);
    part_roles(call, T(up_global), T(up_codes), swiglu);
    if (!swiglu) return;
    call->role[T(gate_global)] = OP_NEEDED;
    call->role[T(gate_codes)] = call->role[T(gate_scales)] = OP_RESULT;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *const *t = call->given, *x = t[T(x)];
    const int64_t q = PARAMS(call)->granularity;
    if (x->shape[1] % 2 != 0 || x->shape[1] / 2 % q != 0)
        return error_argument(
            "x.shape[1] is %lld: gate and up in runs of %lld, a multiple of %lld, is accepted",
            (long long)x->shape[1], (long long)q, 2 * (long long)q);
    if (!PARAMS(call)->swiglu && t[T(gate_codes)] == NULL && t[T(up_codes)] == NULL &&
        t[T(gate_global)] == NULL && t[T(up_global)] == NULL)
        return error_argument("gate_codes and up_codes are NULL: at least one is needed");
    call->symbol[S_BLOCKS] = nvfp4_blocks(x->shape[1] / 2);
    call->symbol[S_BYTES] = call->symbol[S_BLOCKS] * QUERN_NVFP4_BLOCK / 2;
    return QUERN_OK;
}

static void build(op_build *b)
{
    static const int32_t codes[] = {T(gate_codes), T(up_codes)}, globals[] = {T(gate_global), T(up_global)};
    const op_call *call = b->call;
    const quern_nvfp4_fused_quantize_params *p = op_params(call);
    fused_quantise_args *args = OP_ADD(b, fused_quantise);
    if (!op_uses(call, T(gate_codes)) && !op_uses(call, T(up_codes)))
        b->status = error_argument("gate_codes and up_codes are NULL: at least one is needed");
    *args = (fused_quantise_args){.profile = (quantise_profile)p->profile,
                                  .swiglu = p->swiglu,
                                  .rule = {p->granularity, p->limit, p->alpha, p->beta},
                                  .x = op_view(call, T(x), false)};
    for (int part = 0; part < 2; part++) {
        if (!op_uses(call, codes[part])) continue;
        const quern_tensor global = op_view(call, globals[part], false);
        args->codes[part] = op_view(call, codes[part], false);
        args->scales[part] = op_view(call, codes[part] + 1, false);
        args->global[part] = nvfp4_tail_view(&global);
    }
}

const op_family nvfp4_fused_quantize_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_fused_quantize_tensors, QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT),
    OP_CALL(quern_nvfp4_fused_quantize_params, QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT,
            OP_STEP_BYTES(fused_quantise)),
    .first = QUERN_OP_NVFP4_FUSED_QUANTIZE,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_fused_quantize_workspace(quern_context *ctx,
                                                  const quern_nvfp4_fused_quantize_params *given,
                                                  const quern_nvfp4_fused_quantize_tensors *views,
                                                  size_t *bytes)
{
    return op_workspace_of(&nvfp4_fused_quantize_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_fused_quantize(quern_context *ctx, const quern_exec *exec,
                                        const quern_nvfp4_fused_quantize_params *given,
                                        const quern_nvfp4_fused_quantize_tensors *views, void *workspace,
                                        size_t workspace_bytes)
{
    return op_run(&nvfp4_fused_quantize_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
