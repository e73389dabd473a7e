/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - dense attention of the newest tokens over a cache. */
#include "attention/attention.h"
#include "cache/cache.h"

#include "core/error.h"

#include <math.h>

static quern_status check_params(op_call *call)
{
    const quern_attention_params *p = &cache_call_of(call)->params.dense;
    if (!p->causal)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "causal is false: a decoding call accepts true");
    if (p->query_offset != -1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "query_offset is %lld: -1 is accepted, queries are the newest tokens",
                         (long long)p->query_offset);
    return QUERN_OK;
}

static void roles(op_call *call)
{
    for (int i = 0; i < DECODE_TENSORS; i++) call->role[i] = OP_REFUSED;
    call->role[DD(q)] = OP_NEEDED;
    call->role[DD(o)] = OP_RESULT;
    call->role[DD(lse)] = OP_OPTIONAL_RESULT;
    call->role[DD(sink)] = OP_OPTIONAL;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: dense attention accepts NULL",
                     call->family->tensors[tensor].field);
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const cache_call *c = cache_call_of(call);
    const quern_cache_params *has = cache_params_of(call);
    const quern_attention_params *p = &c->params.dense;
    const stage_step step = cache_step(b);
    if (c->tokens == 0 || call->symbol[DECODE_H] == 0) return;
    decode_args *args = OP_ADD(b, decode);
    args->tokens = cache_steps_plane(c, CACHE_TOKENS);
    args->step = step;
    args->capacity = has->capacity;
    args->window = p->window;
    args->scale = p->scale > 0.0f ? p->scale : 1.0f / sqrtf((float)has->dim);
    args->q = op_view(call, DD(q), true);
    args->o = op_view(call, DD(o), true);
    args->lse = op_view(call, DD(lse), true);
    args->sink = op_view(call, DD(sink), false);
}

static const char *const operations[] = {"attention_decode"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .tensors = cache_decode_tensors,
    .tensor_count = DECODE_TENSORS,
    .varlen_by = OP_NONE,
    .params = attention_param_rows,
    .param_count = ATTENTION_PARAMS,
    .defaults = &attention_defaults,
    .params_init = "QUERN_ATTENTION_PARAMS_INIT",
    .tensors_init = "QUERN_DECODE_TENSORS_INIT",
    .call_size = offsetof(cache_call, cache),
    .params_at = offsetof(cache_call, params),
    .program_at = offsetof(cache_call, program),
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = cache_derive_decode,
    .check_data = cache_check_data,
    .build = build,
    .begin = cache_write_step,
};

quern_status quern_attention_decode_workspace(quern_context *ctx, const quern_attention_params *params,
                                              const quern_cache *cache, const quern_cache_batch *batch,
                                              const quern_decode_tensors *tensors, size_t *bytes)
{
    cache_call c;
    const quern_status status = cache_take_batch(&c, cache, batch, false);
    return status == QUERN_OK ? op_workspace_of(&c.head, &family, 0, ctx, params, tensors, bytes) : status;
}

quern_status quern_attention_decode(quern_context *ctx, const quern_exec *exec,
                                    const quern_attention_params *params, const quern_cache *cache,
                                    const quern_cache_batch *batch, const quern_decode_tensors *tensors,
                                    void *workspace, size_t workspace_bytes)
{
    cache_call c;
    const quern_status status = cache_take_batch(&c, cache, batch, false);
    if (status != QUERN_OK) return status;
    return op_run(&c.head, &family, 0, ctx, exec, params, tensors, workspace, workspace_bytes);
}
