/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.c - dense attention of the newest tokens over a cache: checks, then the decode stage. */
#include "cache/cache.h"

#include "runtime/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"

#include <math.h>

typedef struct decode_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_attention_params params;
    quern_decode_tensors t;
    cache_call call;
    decode_args decode;
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

static quern_status check_tensors(const quern_cache *cache, const decode_call *c, bool run)
{
    const quern_cache_params *p = &cache->layout.params;
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

static void fill(const quern_cache *cache, decode_call *c)
{
    const quern_cache_params *p = &cache->layout.params;
    const quern_tensor q = view_canonical(c->t.q), o = view_canonical(c->t.o);
    c->decode = (decode_args){.tokens = cache_plane_of(cache, CACHE_TOKENS, c->call.batch.table),
                              .queries = cache_queries_of(cache, &c->call),
                              .capacity = p->capacity,
                              .window = c->params.window,
                              .q = view_with_batch(&q),
                              .o = view_with_batch(&o)};
    c->decode.scale = c->params.scale > 0.0f ? c->params.scale : 1.0f / sqrtf((float)p->dim);
    if (c->t.lse == NULL) return;
    const quern_tensor lse = view_canonical(c->t.lse);
    c->decode.lse = view_with_batch(&lse);
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_attention_params *params,
                         const quern_cache *cache, const quern_cache_batch *batch,
                         const quern_decode_tensors *tensors, bool run, decode_call *c)
{
    quern_exec how;
    quern_status status;
    *c = (decode_call){.t = QUERN_DECODE_TENSORS_INIT};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = check_params(params, &c->params)) != QUERN_OK ||
        (status = cache_check_batch(cache, batch, false, &c->call)) != QUERN_OK ||
        (status = op_exec(exec, &how)) != QUERN_OK ||
        (status = op_struct(&c->t, tensors, "tensors", "QUERN_DECODE_TENSORS_INIT")) != QUERN_OK ||
        (status = check_tensors(cache, c, run)) != QUERN_OK)
        return status;
    if (c->t.q->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "q is on device %d: the cpu keeps caches",
                         (int)c->t.q->device);
    c->backend = context_backend(ctx, QUERN_CPU, 0, how.stream, &c->exec);
    if (c->backend == NULL) return error_status();
    fill(cache, c);
    return QUERN_OK;
}

quern_status quern_attention_decode_workspace(quern_context *ctx, const quern_attention_params *params,
                                              const quern_cache *cache, const quern_cache_batch *batch,
                                              const quern_decode_tensors *tensors, size_t *bytes)
{
    DEFAULT_FLOAT_STATE; /* a plan resolves the scale */
    decode_call c;
    const quern_status status = plan(ctx, NULL, params, cache, batch, tensors, false, &c);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = STAGE_WORKSPACE(c.backend->decode, &c.exec, &c.decode);
    return QUERN_OK;
}

quern_status quern_attention_decode(quern_context *ctx, const quern_exec *exec,
                                    const quern_attention_params *params, const quern_cache *cache,
                                    const quern_cache_batch *batch, const quern_decode_tensors *tensors,
                                    void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    decode_call c;
    quern_status status = plan(ctx, exec, params, cache, batch, tensors, true, &c);
    if (status != QUERN_OK) return status;
    const size_t needed = STAGE_WORKSPACE(c.backend->decode, &c.exec, &c.decode);
    if ((status = view_check_workspace(workspace, workspace_bytes, needed, c.t.q)) != QUERN_OK ||
        (status = cache_check_pages(cache, &c.call, false)) != QUERN_OK || c.call.tokens == 0 ||
        c.t.q->shape[1] == 0)
        return status;
    return c.backend->decode.run(&c.exec, &c.decode, workspace);
}
