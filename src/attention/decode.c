/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - dense attention of the newest tokens over a cache. */
#include "cache/cache.h"

#include "core/error.h"
#include "core/float_state.h"
#include "core/view.h"

#include <math.h>

typedef struct decode_call {
    cache_call call;
    quern_attention_params params;
    quern_decode_tensors t;
    _Alignas(op_step) char program[OP_STEP_BYTES(decode)];
} decode_call;

static quern_status check_params(const quern_attention_params *given, quern_attention_params *p)
{
    *p = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    const quern_status status = op_struct(p, given, "params", "QUERN_ATTENTION_PARAMS_INIT");
    if (status != QUERN_OK) return status;
    if (!p->causal)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "causal is false: a decoding call accepts true");
    if (p->query_offset != -1)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "query_offset is %lld: -1 is accepted, queries are the newest tokens",
                         (long long)p->query_offset);
    if (p->window < 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "window is %lld: 0 (none) or more is accepted",
                         (long long)p->window);
    if (!(p->scale >= 0.0f) || isinf(p->scale))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "scale is %g: 0 (1 / sqrt(D)), or finite and above 0 is accepted", (double)p->scale);
    return QUERN_OK;
}

static quern_status check_tensors(const decode_call *c, bool run)
{
    const quern_cache_params *p = &c->call.cache->layout.params;
    const quern_decode_tensors *t = &c->t;
    const uint32_t act = 1u << (unsigned)p->dtype;
    const quern_tensor *sparse[] = {t->w_gate, t->gates, t->block_idx, t->block_count};
    static const char *const names[] = {"w_gate", "gates", "block_idx", "block_count"};
    for (int i = 0; i < 4; i++)
        if (sparse[i] != NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: dense attention accepts NULL",
                             names[i]);
    const int64_t heads = t->q != NULL && t->q->ndim == 3 ? t->q->shape[1] : VIEW_ANY;
    const view_rule rules[] = {
        {"q", t->q, act, 3, {c->call.tokens, VIEW_ANY, p->dim}, false, false},
        {"o", t->o, act, 3, {c->call.tokens, heads, p->dim_v}, false, true},
        {"lse", t->lse, VIEW_F32, 2, {heads, c->call.tokens}, true, true},
    };
    quern_status status = view_check_order(t->q, t->o);
    if (status == QUERN_OK) status = view_check_all(rules, sizeof rules / sizeof *rules, t->q, run);
    return status == QUERN_OK ? view_check_heads(heads, p->kv_heads, c->call.tokens) : status;
}

static void build(op_build *b)
{
    const decode_call *c = (const decode_call *)b->call;
    const quern_cache_params *p = &c->call.cache->layout.params;
    const stage_step step = cache_step(b);
    if (c->call.tokens == 0 || c->t.q->shape[1] == 0) return;
    *OP_ADD(b, decode) =
        (decode_args){.tokens = cache_steps_plane(&c->call, CACHE_TOKENS),
                      .step = step,
                      .capacity = p->capacity,
                      .window = c->params.window,
                      .scale = c->params.scale > 0.0f ? c->params.scale : 1.0f / sqrtf((float)p->dim),
                      .q = op_known_view(c->t.q, true),
                      .o = op_known_view(c->t.o, true),
                      .lse = op_known_view(c->t.lse, true)};
}

static const char *const operations[] = {"attention_decode"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .call_size = sizeof(decode_call),
    .program_at = offsetof(decode_call, program),
    .build = build,
    .begin = cache_write_step,
};

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_attention_params *params,
                         const quern_cache *cache, const quern_cache_batch *batch,
                         const quern_decode_tensors *tensors, bool run, decode_call *c)
{
    c->t = (quern_decode_tensors)QUERN_DECODE_TENSORS_INIT;
    quern_status status = cache_begin(&c->call, ctx, exec, cache, batch, false);
    if (status == QUERN_OK) status = check_params(params, &c->params);
    if (status == QUERN_OK) status = op_struct(&c->t, tensors, "tensors", "QUERN_DECODE_TENSORS_INIT");
    if (status == QUERN_OK) status = check_tensors(c, run);
    return status == QUERN_OK ? cache_build(&c->call, ctx, &family, "q", c->t.q) : status;
}

quern_status quern_attention_decode_workspace(quern_context *ctx, const quern_attention_params *params,
                                              const quern_cache *cache, const quern_cache_batch *batch,
                                              const quern_decode_tensors *tensors, size_t *bytes)
{
    DEFAULT_FLOAT_STATE; /* a plan resolves the scale */
    decode_call c;
    const quern_status status = plan(ctx, NULL, params, cache, batch, tensors, false, &c);
    return status == QUERN_OK ? cache_workspace(&c.call, bytes) : status;
}

quern_status quern_attention_decode(quern_context *ctx, const quern_exec *exec,
                                    const quern_attention_params *params, const quern_cache *cache,
                                    const quern_cache_batch *batch, const quern_decode_tensors *tensors,
                                    void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    decode_call c;
    quern_status status = plan(ctx, exec, params, cache, batch, tensors, true, &c);
    if (status == QUERN_OK) status = cache_check_run(&c.call, workspace, workspace_bytes);
    return status == QUERN_OK ? cache_run(&c.call, workspace) : status;
}
