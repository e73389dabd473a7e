/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* interleave.c - gate and up between halves and alternating runs: the operation's schema, and its one stage
 * for each of up to four tensors. */
#include "core/error.h"
#include "nvfp4/call.h"

#include <stddef.h>
#include <stdio.h>

/* In the order of quern_nvfp4_interleave_tensors: pairs of a tensor and what is made of it. */
enum { TENSORS = OP_TENSOR_COUNT(quern_nvfp4_interleave_tensors), PAIRS = TENSORS / 2 };
/* A pair's last extents; its leading ones are the list OP_LEAD + pair. */
#define S_IN(pair) (1 + 2 * (pair))
#define S_OUT(pair) (2 + 2 * (pair))
#define L_ROWS(pair) (OP_LEAD + (pair))
_Static_assert(PAIRS <= (int)OP_LEADS && 2 * PAIRS < (int)OP_SYMBOLS_MAX, "a list and two symbols a pair");

static const op_tensor tensors[] = {
    {"x", "X", OP_ANY, OP_NONE, {L_ROWS(0), S_IN(0)}, {0}},
    {"out", "X", OP_LIKE, OP_NONE, {L_ROWS(0), S_OUT(0)}, {0}},
    {"codes", "codes", OP_ANY, OP_NONE, {L_ROWS(1), S_IN(1)}, {0}},
    {"codes_out", "codes", OP_LIKE, OP_NONE, {L_ROWS(1), S_OUT(1)}, {0}},
    {"scales", "scales", OP_ANY, OP_NONE, {L_ROWS(2), S_IN(2)}, {0}},
    {"scales_out", "scales", OP_LIKE, OP_NONE, {L_ROWS(2), S_OUT(2)}, {0}},
    {"bias", "bias", OP_ANY, OP_NONE, {L_ROWS(3), S_IN(3)}, {0}},
    {"bias_out", "bias", OP_LIKE, OP_NONE, {L_ROWS(3), S_OUT(3)}, {0}},
};

#define FIELD(member) OP_FIELD(quern_nvfp4_interleave_params, member)
static const op_param params[] = {
    {FIELD(inverse), OP_FLAG, 0, 1, NULL, "from runs to halves"},
    {FIELD(granularity), OP_INTEGER, 1, INT32_MAX, NULL, "q, the columns of a run"},
};
static const char *const operations[] = {"nvfp4_interleave"};
#define RUNS "2q*ceil(I/q)"
#define PAIR "2I|" RUNS " " RUNS "|2I"
static const char symbols[] = PAIR " " PAIR " " PAIR " " PAIR;
static const int8_t like[] = {0, 2, 4, 6, OP_NONE};
static const op_entry ops[] = {
    {.name = "nvfp4-interleave",
     .help = "gate and up of the last dimension from two halves to alternating runs, padded with zeros, and "
             "back: a weight's codes, scales and bias alike, or any X"},
};

#define PARAMS(call) ((quern_nvfp4_interleave_params *)op_params(call))

static void roles(op_call *call)
{
    for (int32_t t = 0; t < TENSORS; t += 2) {
        call->role[t] = OP_OPTIONAL;
        call->role[t + 1] = call->given[t] != NULL ? OP_RESULT : OP_REFUSED;
    }
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    (void)call;
    snprintf(text, OP_REASON, " without %s: both or neither are accepted", tensors[tensor - 1].field);
    return text;
}

/* The last extents of a pair: 2I, two halves of any width, and what whole runs make of it. */
static quern_status derive_columns(op_call *call, int32_t pair)
{
    const quern_tensor *from = call->given[2 * pair], *to = call->given[2 * pair + 1];
    const bool inverse = PARAMS(call)->inverse;
    const int32_t last = from->ndim - 1, whole = inverse && to != NULL ? 2 * pair + 1 : 2 * pair;
    const int64_t q = PARAMS(call)->granularity;
    int64_t halves = from->shape[last], runs;
    if (whole != 2 * pair) {
        const quern_status status = op_check_ndim(call, whole, from->ndim);
        if (status != QUERN_OK) return status;
        halves = to->shape[last];
    }
    if (halves % 2 != 0)
        return error_argument("%s.shape[%d] is %lld: gate and up side by side, an even extent, is accepted",
                              tensors[whole].field, last, (long long)halves);
    if (__builtin_mul_overflow(halves / 2 / q + (halves / 2 % q != 0), 2 * q, &runs))
        return error_argument("%s.shape[%d] is %lld: less than 2^63 columns of whole runs are accepted",
                              tensors[whole].field, last, (long long)halves);
    if (inverse && from->shape[last] != runs)
        return error_argument("%s.shape[%d] is %lld: whole runs of %lld, here %lld columns, are accepted",
                              tensors[2 * pair].field, last, (long long)from->shape[last], (long long)q,
                              (long long)runs);
    call->symbol[S_IN(pair)] = from->shape[last];
    call->symbol[S_OUT(pair)] = inverse ? halves : runs;
    return QUERN_OK;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *first = NULL;
    for (int32_t t = 0; t < TENSORS && first == NULL; t += 2) first = call->given[t];
    if (first == NULL) return error_argument("x, codes, scales and bias are NULL: at least one is needed");
    for (int32_t pair = 0; pair < PAIRS; pair++) {
        const quern_tensor *from = call->given[2 * pair];
        op_extents *rows = &call->lead[L_ROWS(pair) - OP_LEAD];
        if (from == NULL) continue;
        if (from->ndim < 1 || from->ndim > QUERN_MAX_DIMS)
            return error_argument("%s has %d dimensions: 1 to %d are accepted", tensors[2 * pair].field,
                                  from->ndim, QUERN_MAX_DIMS);
        const quern_status status = derive_columns(call, pair);
        if (status != QUERN_OK) return status;
        rows->count = from->ndim - 1;
        for (int32_t i = 0; i < rows->count; i++) rows->extent[i] = from->shape[i];
    }
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_nvfp4_interleave_params *p = op_params(call);
    for (int32_t t = 0; t < TENSORS; t += 2)
        if (op_uses(call, t))
            *OP_ADD(b, interleave) = (interleave_args){p->inverse, p->granularity, op_view(call, t, false),
                                                       op_view(call, t + 1, false)};
}

const op_family nvfp4_interleave_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_nvfp4_interleave_tensors, QUERN_NVFP4_INTERLEAVE_TENSORS_INIT),
    OP_CALL(quern_nvfp4_interleave_params, QUERN_NVFP4_INTERLEAVE_PARAMS_INIT,
            PAIRS *OP_STEP_BYTES(interleave)),
    .first = QUERN_OP_NVFP4_INTERLEAVE,
    .like = like,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .build = build,
};

quern_status quern_nvfp4_interleave_workspace(quern_context *ctx, const quern_nvfp4_interleave_params *given,
                                              const quern_nvfp4_interleave_tensors *views, size_t *bytes)
{
    return op_workspace_of(&nvfp4_interleave_family, 0, ctx, given, views, bytes);
}

quern_status quern_nvfp4_interleave(quern_context *ctx, const quern_exec *exec,
                                    const quern_nvfp4_interleave_params *given,
                                    const quern_nvfp4_interleave_tensors *views, void *workspace,
                                    size_t workspace_bytes)
{
    return op_run(&nvfp4_interleave_family, 0, ctx, exec, given, views, workspace, workspace_bytes);
}
