/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.c - the kinds of attention: what each computes in one shot and from a cache, and the arrays that it
 * needs. */
#include "layer.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    bool (*run)(lm_model *, int32_t, int32_t, const lm_gradients *);
    bool (*open)(lm_model *, int32_t, int64_t, int64_t, lm_cache *);
    bool (*extend)(lm_model *, int32_t, lm_cache *, int64_t, int64_t, float *);
    int64_t (*bytes)(const lm_cache *);
} kinds[KINDS] = {
    [KIND_DENSE] = {dense_run, rows_open, rows_extend, rows_bytes},
    [KIND_NSA] = {nsa_run, rows_open, rows_extend, rows_bytes},
    [KIND_WINDOW] = {v4_run, v4_open, v4_extend, v4_bytes},
    [KIND_CSA] = {v4_run, v4_open, v4_extend, v4_bytes},
    [KIND_HCA] = {v4_run, v4_open, v4_extend, v4_bytes},
};

bool attention_allocate(const lm_config *c, lm_kind kind, lm_attention *a)
{
    const bool nsa = kind == KIND_NSA, csa = kind == KIND_CSA, v4 = kind >= KIND_WINDOW;
    const int64_t n = c->context, w = c->width, h = c->heads, kv = c->kv_heads * (w / h),
                  length = nsa ? c->block : config_ratio(c, kind), /* tokens of a compressed key */
        entries = length > 0 ? n / length + 1 : 0;
    *a = (lm_attention){0};
    const struct {
        void *array; /* of floats or integers, both of 4 bytes */
        int64_t size;
    } list[] = {
        {&a->q_raw, n * w},
        {&a->k_raw, n * kv},
        {&a->inv_q, n * h},
        {&a->inv_k, n * c->kv_heads},
        {&a->q, n * w},
        {&a->k, n * kv},
        {&a->v, v4 ? 0 : n * kv},
        {&a->o, n * w},
        {&a->lse[0], n * h},
        {&a->lse[1], nsa || csa ? n * h : 0},
        {&a->lse[2], nsa ? n * h : 0},
        {&a->o_b[0], nsa ? n * w : 0},
        {&a->o_b[1], nsa ? n * w : 0},
        {&a->o_b[2], nsa ? n * w : 0},
        {&a->gates, nsa ? n * h * 3 : 0},
        {&a->k_cmp, entries * kv},
        {&a->v_cmp, nsa ? entries * kv : 0},
        {&a->d_k_cmp, v4 ? entries * kv : 0},
        {&a->chosen, nsa   ? n * c->kv_heads * c->selected
                     : csa ? n * c->index_top
                           : 0},
        {&a->count, csa ? n : 0},
        {&a->index_q, csa ? n * w : 0},
        {&a->index_k, csa ? entries * (w / h) : 0},
        {&a->d_index_k, csa ? entries * (w / h) : 0},
        {&a->d_index_w, csa ? n * h : 0},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        if (list[i].size == 0) continue;
        void *memory = malloc((size_t)list[i].size * 4);
        if (memory == NULL) return false;
        memcpy(list[i].array, &memory, sizeof memory);
    }
    return true;
}

void attention_free(lm_attention *a)
{
    void *const all[] = {a->q_raw,  a->k_raw,  a->inv_q,   a->inv_k,   a->q,         a->k,
                         a->v,      a->o,      a->lse[0],  a->lse[1],  a->lse[2],    a->o_b[0],
                         a->o_b[1], a->o_b[2], a->gates,   a->k_cmp,   a->v_cmp,     a->d_k_cmp,
                         a->chosen, a->count,  a->index_q, a->index_k, a->d_index_k, a->d_index_w};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

bool attend_run(lm_model *m, int32_t layer, int32_t n, const lm_gradients *g)
{
    return kinds[config_kind(&m->config, layer)].run(m, layer, n, g);
}

bool cache_open(lm_model *m, int32_t layer, int64_t capacity, int64_t step, lm_cache *cache)
{
    *cache = (lm_cache){.kind = config_kind(&m->config, layer)};
    return model_positions(m, capacity) && kinds[cache->kind].open(m, layer, capacity, step, cache);
}

void cache_close(lm_cache *cache)
{
    free(cache->memory[0]), free(cache->memory[1]), free(cache->chosen), free(cache->count);
    free(cache->kv), free(cache->kv_cmp), free(cache->index_k);
    *cache = (lm_cache){0};
}

bool cache_extend(lm_model *m, int32_t layer, lm_cache *cache, int64_t first, int64_t n, float *o)
{
    const bool ok = kinds[cache->kind].extend(m, layer, cache, first, n, o);
    cache->position += n;
    return ok;
}

int64_t cache_bytes(const lm_cache *cache)
{
    return kinds[cache->kind].bytes(cache);
}
