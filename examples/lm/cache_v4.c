/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_v4.c - what a window, csa or hca layer keeps of a sequence: the keys of the last `window` tokens, the
 * compressed entries, and the states of the compressors between two entries. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

/* Floats of a compressor's state: sums of one series or of two, without a ring. */
static int64_t state_floats(const lm_config *c, lm_kind kind)
{
    return (kind == KIND_CSA ? 6 : 3) * (int64_t)(c->width / c->heads);
}

bool v4_open(lm_model *m, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache)
{
    const lm_config *c = &m->config;
    const bool csa = config_kind(c, layer) == KIND_CSA;
    const int64_t dim = c->width / c->heads, ratio = config_ratio(c, cache->kind),
                  entries = ratio > 0 ? capacity / ratio + 1 : 1, room = 2 * (int64_t)c->window + step;
    cache->room = room < capacity ? room : capacity;
    cache->kv = malloc((size_t)(cache->room * dim) * 4);
    cache->kv_cmp = ratio > 0 ? malloc((size_t)(entries * dim) * 4) : NULL;
    cache->index_k = csa ? malloc((size_t)(entries * dim) * 4) : NULL;
    cache->chosen = csa ? malloc((size_t)(step * c->index_top) * 4) : NULL;
    cache->count = csa ? malloc((size_t)step * 4) : NULL;
    for (int i = 0; i < (csa ? 2 : ratio > 0 ? 1 : 0); i++)
        cache->memory[i] = malloc((size_t)state_floats(c, cache->kind) * 4);
    if (cache->kv == NULL || (ratio > 0 && (cache->kv_cmp == NULL || cache->memory[0] == NULL)) ||
        (csa && (cache->memory[1] == NULL || cache->index_k == NULL || cache->chosen == NULL ||
                 cache->count == NULL)))
        return failure("no memory for a cache of %lld tokens", (long long)capacity) == 0;
    return true;
}

int64_t v4_bytes(const lm_cache *cache)
{
    return cache->used;
}

/* A compressor, whose weights begin at `weights`, takes n rows h; what becomes whole follows the entries, and
 * a row of 0. */
static bool append(lm_model *m, int32_t layer, lm_cache *cache, int which, int weights, const float *h,
                   int64_t n, float *entries)
{
    const lm_config *c = &m->config;
    const lm_param *w = layer_param(m, layer, weights), *b_a = w + 1, *b_b = w + 2, *norm = w + 3;
    const quern_dsv4_compress_params p = v4_compress_params(c, config_kind(c, layer));
    const int64_t width = norm->cols, r = p.ratio;
    const int32_t slot = 0, position = (int32_t)cache->position, cu[] = {0, (int32_t)n};
    const quern_tensor x = view(h, QUERN_F32, 2, n, c->width, 0, 0),
                       weight = view(w->value, QUERN_F32, 2, c->width, w->cols, 0, 0),
                       bias_a = view(b_a->value, QUERN_F32, 2, r, width, 0, 0),
                       bias_b = view(b_b->value, QUERN_F32, 2, r, width, 0, 0),
                       norm_weight = view(norm->value, QUERN_F32, 1, width, 0, 0, 0),
                       cos_sin = view(m->rope, QUERN_F32, 2, m->positions, config_rotated(c), 0, 0),
                       out = view(entries, QUERN_F32, 2, n / r + 1, width, 0, 0),
                       slots = view(&slot, QUERN_I32, 1, 1, 0, 0, 0),
                       positions = view(&position, QUERN_I32, 1, 1, 0, 0, 0),
                       offsets = view(cu, QUERN_I32, 1, 2, 0, 0, 0),
                       states =
                           view(cache->memory[which], QUERN_F32, 2, 1, state_floats(c, cache->kind), 0, 0),
                       merged = view(&cache->merged[which], QUERN_I32, 1, 1, 0, 0, 0);
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    t.x = &x;
    t.w = &weight;
    t.b_a = &bias_a;
    t.b_b = p.kind == QUERN_DSV4_CSA ? &bias_b : NULL;
    t.norm_weight = &norm_weight;
    t.cos_sin = &cos_sin;
    t.out = &out;
    t.slots = &slots;
    t.positions = &positions;
    t.cu = &offsets;
    t.states = &states;
    t.merged = &merged;
    size_t bytes;
    return done(quern_dsv4_append_step_workspace(m->ctx, &p, &t, &bytes)) && reserve(m, bytes) &&
           done(quern_dsv4_append_step(m->ctx, NULL, &p, &t, m->workspace, m->workspace_bytes));
}

/* Appends n keys to those held; without room, those that no query will see go first. */
static void hold(const lm_config *c, lm_cache *cache, const float *keys, int64_t n)
{
    const int64_t dim = c->width / c->heads, before = c->window - 1;
    if (cache->held + n > cache->room) {
        const int64_t kept = cache->held < before ? cache->held : before;
        memmove(cache->kv, cache->kv + (cache->held - kept) * dim, (size_t)(kept * dim) * 4);
        cache->held = kept;
    }
    memcpy(cache->kv + cache->held * dim, keys, (size_t)(n * dim) * 4);
    cache->held += n;
}

bool v4_extend(lm_model *m, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *o)
{
    const lm_config *c = &m->config;
    const lm_layer *l = &m->layer[layer];
    const lm_attention *a = &l->attention;
    const int64_t dim = c->width / c->heads, ratio = config_ratio(c, cache->kind), end = cache->position + n,
                  old = ratio > 0 ? cache->position / ratio : 0, entries = ratio > 0 ? end / ratio : 0,
                  seen = n + c->window - 1;
    const float *h = l->h1 + first * c->width;
    const bool csa = cache->kind == KIND_CSA;
    if (ratio > 0 && !append(m, layer, cache, 0, L_CMP, h, n, cache->kv_cmp + old * dim)) return false;
    if (csa && !append(m, layer, cache, 1, L_INDEX_CMP, h, n, cache->index_k + old * dim)) return false;
    hold(c, cache, a->k + first * dim, n);
    const int64_t keys = cache->held < seen ? cache->held : seen;
    const v4_rows rows = {.n = n,
                          .position = cache->position,
                          .held = keys,
                          .entries = entries,
                          .q = a->q + first * c->width,
                          .kv = cache->kv + (cache->held - keys) * dim,
                          .kv_cmp = cache->kv_cmp,
                          .index_q = a->index_q != NULL ? a->index_q + first * c->width : NULL,
                          .index_k = cache->index_k,
                          .chosen = cache->chosen,
                          .count = cache->count,
                          .o = o};
    const int parts = csa ? 2 : ratio > 0 ? 1 : 0;
    cache->used = ((end < c->window ? end : c->window) + entries * parts) * dim * 4 +
                  parts * state_floats(c, cache->kind) * 4;
    if (csa && entries > 0 && !v4_index(m, layer, &rows)) return false;
    return v4_core(m, layer, &rows, NULL);
}
