/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.c - experts' weights to the backend's own layout and back: the operation's schema and its one
 * stage. */
#include <quern/moe.h>

#include "core/error.h"
#include "nvfp4/call.h"

#include <stddef.h>

/* The number of a tensor. */
#define T(field) OP_TENSOR(quern_moe_prepack_tensors, field)
enum { TENSORS = OP_TENSOR_COUNT(quern_moe_prepack_tensors) };
enum { S_E = 1, S_CODES_0, S_CODES_1, S_BYTES };
enum { L_SCALES = OP_LEAD };
enum { ASKED_N, ASKED_K };

typedef struct prepack_call {
    op_call head;
    quern_moe_prepack_params params;
    quern_tensor turned; /* b_codes as [E, N, K/2], if the caller's view is that in memory */
    bool k_major;
    int64_t n, k;
    _Alignas(op_step) char program[OP_STEP_BYTES(prepack)];
} prepack_call;

static const op_tensor tensors[] = {
    {"b_codes", "B_codes", OP_CODES, OP_NONE, {S_E, S_CODES_0, S_CODES_1}, {0}},
    {"b_scales", "B_scales", OP_SCALE, OP_NONE, {L_SCALES}, {0}},
    {"b_repacked", "B_repacked", OP_U8, OP_NONE, {S_E, S_BYTES}, {0}},
};

#define FIELD(member) OP_FIELD(quern_moe_prepack_params, member)
static const op_param params[] = {
    {FIELD(inverse), OP_FLAG, 0, 1, NULL, "from B_repacked to B_codes and B_scales"},
    {FIELD(b_codes), OP_CHOICE, 0, 1, nvfp4_codes_words, "layout of B's codes: [E, K/2, N] or [E, N, K/2]"},
    {FIELD(b_scales), OP_CHOICE, 0, 2, nvfp4_scales_words, "layout of B's scales; swizzled not with inverse"},
};
static const int8_t like[] = {T(b_codes), T(b_repacked), OP_NONE};
static const char *const operations[] = {"moe_prepack"};
static const char symbols[] = "E K/2|N N|K/2 bytes";
static const char *const leads[] = {"E K/16 N|E N K/16|E bytes...", NULL};
static const op_entry ops[] = {
    {.name = "moe-prepack",
     .help = "experts' NVFP4 weights to the layout that products read fastest, and exactly back",
     .asked = {[ASKED_N] = "n", [ASKED_K] = "k"}},
};

#define PARAMS(call) ((quern_moe_prepack_params *)op_params(call))

static quern_status check_params(op_call *call)
{
    if (!PARAMS(call)->inverse || PARAMS(call)->b_scales != QUERN_NVFP4_LAYOUT_SWIZZLED) return QUERN_OK;
    return error_argument("b_scales is %d with inverse: 0 (linear) or 1 (k_major) is accepted",
                          (int)QUERN_NVFP4_LAYOUT_SWIZZLED);
}

static void adapt(op_call *call, const quern_tensor **given)
{
    prepack_call *c = (prepack_call *)call;
    c->k_major = c->params.b_codes == QUERN_NVFP4_CODES_K_MAJOR;
    if (c->k_major || !nvfp4_is_k_major(given[T(b_codes)], &c->turned)) return;
    c->k_major = true;
    given[T(b_codes)] = &c->turned;
}

static void roles(op_call *call)
{
    const bool inverse = PARAMS(call)->inverse;
    call->role[T(b_codes)] = call->role[T(b_scales)] = inverse ? OP_RESULT : OP_NEEDED;
    call->role[T(b_repacked)] = inverse ? OP_NEEDED : OP_RESULT;
}

/* E, N and K: as given, else as asked for. */
static quern_status find_extents(op_call *call)
{
    prepack_call *c = (prepack_call *)call;
    const quern_tensor *codes = call->given[T(b_codes)], *repacked = call->given[T(b_repacked)];
    const int32_t first = codes != NULL ? T(b_codes) : T(b_repacked);
    int64_t pairs = call->asked[ASKED_K] / 2;
    const quern_status status = op_check_ndim(call, first, codes != NULL ? 3 : 2);
    if (status != QUERN_OK) return status;
    c->n = call->asked[ASKED_N];
    if (codes != NULL) {
        c->n = codes->shape[c->k_major ? 1 : 2];
        pairs = codes->shape[c->k_major ? 2 : 1];
    } else if (c->n <= 0 || call->asked[ASKED_K] <= 0) {
        return error_argument("b_codes is NULL, n is %lld and k is %lld: the extents of B are needed",
                              (long long)c->n, (long long)call->asked[ASKED_K]);
    }
    if (pairs % (QUERN_NVFP4_BLOCK / 2) != 0 || (codes == NULL && call->asked[ASKED_K] % 2 != 0) ||
        pairs > INT32_MAX / 2 || c->n > INT32_MAX)
        return error_argument(
            "b_codes hold K = 2 x %lld, N = %lld: K a multiple of 16, both below 2^31, is accepted",
            (long long)pairs, (long long)c->n);
    c->k = 2 * pairs;
    call->symbol[S_E] = (codes != NULL ? codes : repacked)->shape[0];
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    prepack_call *c = (prepack_call *)call;
    const quern_status status = find_extents(call);
    if (status != QUERN_OK) return status;
    call->symbol[S_CODES_0] = c->k_major ? c->n : c->k / 2;
    call->symbol[S_CODES_1] = c->k_major ? c->k / 2 : c->n;
    call->lead[L_SCALES - OP_LEAD] =
        nvfp4_scales_extents(c->params.b_scales, call->symbol[S_E], c->k / QUERN_NVFP4_BLOCK, c->n);
    return op_repacked_bytes(call, c->n, c->k, &call->symbol[S_BYTES]);
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const prepack_call *c = (const prepack_call *)call;
    *OP_ADD(b, prepack) = (prepack_args){.inverse = c->params.inverse,
                                         .k_major = c->k_major,
                                         .order = (scale_order)c->params.b_scales,
                                         .n = c->n,
                                         .k = c->k,
                                         .codes = op_view(call, T(b_codes), false),
                                         .scales = op_view(call, T(b_scales), false),
                                         .repacked = op_view(call, T(b_repacked), false)};
}

const op_family moe_prepack_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_moe_prepack_tensors, QUERN_MOE_PREPACK_TENSORS_INIT),
    OP_OWN_CALL(prepack_call, QUERN_MOE_PREPACK_PARAMS_INIT),
    .first = QUERN_OP_MOE_PREPACK,
    .leads = leads,
    .like = like,
    .check_params = check_params,
    .adapt = adapt,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_repacked_bytes(quern_context *ctx, quern_device device, int32_t device_id, int64_t n,
                                        int64_t k, int64_t *bytes)
{
    if (ctx == NULL || bytes == NULL)
        return error_argument("%s is NULL: a pointer is needed", ctx == NULL ? "ctx" : "bytes");
    if (device != QUERN_CPU && device != QUERN_CUDA)
        return error_argument("device %d: 0 (cpu) or 1 (cuda) is accepted", (int)device);
    if (n < 0 || k < 0 || n > INT32_MAX || k > INT32_MAX)
        return error_argument("n is %lld and k %lld: 0 to %d each is accepted", (long long)n, (long long)k,
                              INT32_MAX);
    const op_call call = {.like = {.device = device, .device_id = device_id}};
    return op_repacked_bytes(&call, n, k, bytes);
}

quern_status quern_moe_prepack_workspace(quern_context *ctx, const quern_moe_prepack_params *given,
                                         const quern_moe_prepack_tensors *views, size_t *bytes)
{
    return op_workspace_of(&moe_prepack_family, 0, ctx, given, views, bytes);
}

quern_status quern_moe_prepack(quern_context *ctx, const quern_exec *exec,
                               const quern_moe_prepack_params *given, const quern_moe_prepack_tensors *views,
                               void *workspace, size_t workspace_bytes)
{
    return op_run(&moe_prepack_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
