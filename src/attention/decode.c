/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - dense attention of a step's tokens over their sequences' pages. */
#include "attention/attention.h"
#include "cache/cache.h"
#include "cache/step.h"

#include "core/error.h"

#include <math.h>

static quern_status check_params(op_call *call)
{
    const quern_attention_params *p = op_params(call);
    if (!p->causal) return error_argument("causal is false: a decoding call accepts true");
    if (p->query_offset != -1)
        return error_argument("query_offset is %lld: -1 is accepted, queries are the newest tokens",
                              (long long)p->query_offset);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    op_allow_all(call, 0, STEP_DECODE_TENSORS - 1, false, OP_UNUSED, ": dense attention accepts NULL");
    for (int i = DD(slots); i <= DD(tokens_table); i++) call->role[i] = OP_NEEDED;
    call->role[DD(q)] = OP_NEEDED;
    call->role[DD(o)] = OP_RESULT;
    call->role[DD(lse)] = OP_OPTIONAL_RESULT;
    call->role[DD(sink)] = OP_OPTIONAL;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_attention_params *p = op_params(call);
    const int64_t *s = call->symbol;
    if (s[ST_T] == 0 || s[ST_H] == 0) return;
    decode_args *args = OP_ADD(b, decode);
    args->tokens = step_plane(b, DD(tokens), DD(tokens_table), false);
    args->step = step_of(b, DD(slots));
    args->capacity = step_capacity(call);
    args->window = p->window;
    args->scale = p->scale > 0.0f ? p->scale : 1.0f / sqrtf((float)s[ST_D]);
    args->q = op_view(call, DD(q), true);
    args->o = op_view(call, DD(o), true);
    args->lse = op_view(call, DD(lse), true);
    args->sink = op_view(call, DD(sink), false);
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const decode_args *args = OP_FIND(call, decode);
    if (args == NULL) return QUERN_OK;
    const step_data s = {call, data, DD(slots), &args->step, 0, 0};
    const quern_status status = step_check(&s);
    return status == QUERN_OK ? step_check_table(&s, &args->tokens, DD(tokens_table), false) : status;
}

static const char *const operations[] = {"attention_decode_step"};
static const op_entry ops[] = {
    {.name = "attention-decode-step",
     .help = "dense attention of a step's tokens over their sequences' pages"},
};

const op_family attention_decode_family = {
    OP_TABLES(operations, attention_param_rows, step_symbols, ops),
    OP_ROWS(step_decode_tensors, quern_decode_tensors, QUERN_DECODE_TENSORS_INIT),
    OP_CALL(quern_attention_params, QUERN_ATTENTION_PARAMS_INIT, OP_STEP_BYTES(decode)),
    .first = QUERN_OP_ATTENTION_DECODE_STEP,
    .check_params = check_params,
    .roles = roles,
    .derive = step_derive_decode,
    .check_data = check_data,
    .build = build,
};

quern_status quern_attention_decode_step_workspace(quern_context *ctx, const quern_attention_params *params,
                                                   const quern_decode_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&attention_decode_family, 0, ctx, params, tensors, bytes);
}

quern_status quern_attention_decode_step(quern_context *ctx, const quern_exec *exec,
                                         const quern_attention_params *params,
                                         const quern_decode_tensors *tensors, void *workspace,
                                         size_t workspace_bytes)
{
    return op_run(&attention_decode_family, 0, ctx, exec, params, tensors, workspace, workspace_bytes);
}

/* The caller's tensors with those of the newest tokens, without entries. */
static quern_status bind(const quern_cache *cache, const quern_cache_batch *batch, bool now,
                         const quern_decode_tensors *given, cache_views *v, quern_decode_tensors *own)
{
    const quern_status status = cache_bind_decode(cache, batch, now, given, v, own);
    own->slc = own->entries = own->entries_table = own->win = own->win_table = own->index = NULL;
    return status;
}

quern_status quern_attention_decode_workspace(quern_context *ctx, const quern_attention_params *params,
                                              const quern_cache *cache, const quern_cache_batch *batch,
                                              const quern_decode_tensors *tensors, size_t *bytes)
{
    cache_views v;
    quern_decode_tensors t;
    const quern_status status = bind(cache, batch, false, tensors, &v, &t);
    return status == QUERN_OK ? quern_attention_decode_step_workspace(ctx, params, &t, bytes) : status;
}

quern_status quern_attention_decode(quern_context *ctx, const quern_exec *exec,
                                    const quern_attention_params *params, const quern_cache *cache,
                                    const quern_cache_batch *batch, const quern_decode_tensors *tensors,
                                    void *workspace, size_t workspace_bytes)
{
    cache_views v;
    quern_decode_tensors t;
    const quern_status status = bind(cache, batch, true, tensors, &v, &t);
    if (status != QUERN_OK) return status;
    return quern_attention_decode_step(ctx, exec, params, &t, workspace, workspace_bytes);
}
