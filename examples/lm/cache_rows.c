/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_rows.c - keys and values of dense attention and nsa in a quern_cache, and decoding from it. */
#include "layer.h"

#include <stdlib.h>

bool rows_open(lm_model *m, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache)
{
    const lm_config *c = &m->config;
    const bool nsa = config_kind(c, layer) == KIND_NSA;
    size_t bytes[2];
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    p.dtype = QUERN_F32;
    p.sequences = 1;
    p.kv_heads = c->kv_heads;
    p.dim = p.dim_v = c->width / c->heads;
    p.capacity = capacity;
    p.block_size = nsa ? c->block : 0;
    if (!done(quern_cache_size(&p, &bytes[0], &bytes[1]))) return false;
    for (int i = 0; i < 2; i++) cache->memory[i] = malloc(bytes[i]);
    cache->chosen = nsa ? malloc((size_t)(c->kv_heads * step * c->selected) * 4) : NULL;
    if (cache->memory[0] == NULL || cache->memory[1] == NULL || (nsa && cache->chosen == NULL))
        return failure("no memory for a cache of %lld tokens", (long long)capacity) == 0;
    return done(quern_cache_create(&p, cache->memory[0], bytes[0], cache->memory[1], bytes[1], &cache->rows));
}

int64_t rows_bytes(const lm_cache *cache)
{
    int64_t bytes = 0;
    (void)quern_cache_held(cache->rows, &bytes); /* the cache is there */
    return bytes;
}

static bool append(lm_model *m, lm_cache *cache, const quern_cache_batch *batch, const float *keys,
                   const float *values)
{
    const lm_config *c = &m->config;
    const int64_t n = batch->counts[0], dim = c->width / c->heads;
    const quern_tensor k = view(keys, QUERN_F32, 3, n, c->kv_heads, dim, 0),
                       v = view(values, QUERN_F32, 3, n, c->kv_heads, dim, 0);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k;
    t.v = &v;
    size_t bytes;
    return done(quern_cache_append_workspace(m->ctx, cache->rows, batch, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_cache_append(m->ctx, NULL, cache->rows, batch, &t, m->workspace, m->workspace_bytes));
}

bool rows_extend(lm_model *m, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *to)
{
    const lm_config *c = &m->config;
    const lm_attention *a = &m->layer[layer].attention;
    const int64_t dim = c->width / c->heads, kv = c->kv_heads * dim;
    const int32_t sequence = 0;
    quern_cache_batch batch = QUERN_CACHE_BATCH_INIT;
    batch.batch = 1;
    batch.sequences = &sequence;
    batch.counts = &n;
    if (!append(m, cache, &batch, a->k + first * kv, a->v + first * kv)) return false;
    const quern_tensor q = view(a->q + first * c->width, QUERN_F32, 3, n, c->heads, dim, 0),
                       o = view(to, QUERN_F32, 3, n, c->heads, dim, 0),
                       gate = view(layer_param(m, layer, L_GATE)->value, QUERN_F32, 3, c->heads, 3, dim, 0),
                       idx = view(cache->chosen, QUERN_I32, 3, c->kv_heads, n, c->selected, 0);
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &o;
    size_t bytes;
    if (cache->kind == KIND_DENSE) {
        const quern_attention_params p = dense_params();
        return done(quern_attention_decode_workspace(m->ctx, &p, cache->rows, &batch, &t, &bytes)) &&
               reserve(m, bytes) &&
               done(quern_attention_decode(m->ctx, NULL, &p, cache->rows, &batch, &t, m->workspace,
                                           m->workspace_bytes));
    }
    t.w_gate = &gate;
    t.block_idx = &idx;
    const quern_nsa_params p = nsa_params(c);
    return done(quern_nsa_decode_workspace(m->ctx, &p, cache->rows, &batch, &t, &bytes)) &&
           reserve(m, bytes) &&
           done(
               quern_nsa_decode(m->ctx, NULL, &p, cache->rows, &batch, &t, m->workspace, m->workspace_bytes));
}
