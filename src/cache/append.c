/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append.c - tokens into a cache:
 *
 *   cache_copy of each pair
 *   -> where blocks become whole: cache_copy of their tokens, compress, cache_copy of the entries
 *
 * An entry has the bits that a prefill gives it. The compress stage gets the block's tokens alone. Where it
 * sums overlapping blocks by runs of d tokens (by a run's number modulo l/d), it starts from an entry whose
 * number is a multiple of l/d.
 */
#include "cache/cache.h"

#include "core/arena.h"
#include "runtime/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"

typedef struct append_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_cache_tensors t;
    cache_call call;
    cache_run *runs, *spans, *news; /* [batch]: tokens; tokens of blocks that become whole; their entries */
    int32_t *cu_tokens, *cu_entries;
    int64_t span_tokens, span_entries;
    quern_tensor k, v; /* the spans' tokens, [1, T, Hkv, D] */
    compress_args compress;
    void *scratch;
} append_call;

static quern_status check_tensors(const quern_cache *cache, const append_call *c, bool run)
{
    const quern_cache_params *p = &cache->layout.params;
    const quern_cache_tensors *t = &c->t;
    const uint32_t act = 1u << (unsigned)p->dtype, weight = act | VIEW_F32;
    const bool linear = p->block_size > 0 && p->compress == QUERN_NSA_COMPRESS_LINEAR;
    int64_t in_k = p->dim, in_v = p->dim_v;
    if (linear && (__builtin_mul_overflow(p->block_size, p->dim, &in_k) ||
                   __builtin_mul_overflow(p->block_size, p->dim_v, &in_v)))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "block_size %lld: its weights have more than 2^63 rows",
                         (long long)p->block_size);
    const struct {
        const char *name;
        const quern_tensor *given;
        bool accepted;
    } extra[] = {{"k_slc", t->k_slc, p->separate_slc},
                 {"v_slc", t->v_slc, p->separate_slc},
                 {"k_win", t->k_win, p->separate_win},
                 {"v_win", t->v_win, p->separate_win},
                 {"w_k", t->w_k, p->block_size > 0},
                 {"w_v", t->w_v, p->block_size > 0},
                 {"pe_k", t->pe_k, linear},
                 {"pe_v", t->pe_v, linear}};
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++)
        if (extra[i].given != NULL && !extra[i].accepted)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: the cache's parameters accept NULL",
                             extra[i].name);
    const view_rule rules[] = {
        {"k", t->k, act, 3, {c->call.tokens, p->kv_heads, p->dim}, false, false},
        {"v", t->v, act, 3, {c->call.tokens, p->kv_heads, p->dim_v}, false, false},
        {"k_slc", t->k_slc, act, 3, {c->call.tokens, p->kv_heads, p->dim}, !p->separate_slc, false},
        {"v_slc", t->v_slc, act, 3, {c->call.tokens, p->kv_heads, p->dim_v}, !p->separate_slc, false},
        {"k_win", t->k_win, act, 3, {c->call.tokens, p->kv_heads, p->dim}, !p->separate_win, false},
        {"v_win", t->v_win, act, 3, {c->call.tokens, p->kv_heads, p->dim_v}, !p->separate_win, false},
        {"w_k", t->w_k, weight, 3, {p->kv_heads, in_k, p->dim}, !linear, false},
        {"w_v", t->w_v, weight, 3, {p->kv_heads, in_v, p->dim_v}, !linear, false},
        {"pe_k", t->pe_k, weight, 3, {p->kv_heads, p->block_size, p->dim}, true, false},
        {"pe_v", t->pe_v, weight, 3, {p->kv_heads, p->block_size, p->dim_v}, true, false},
    };
    return view_check_all(rules, sizeof rules / sizeof *rules, t->k, run);
}

/* The entries that the compress stage computes, from a run's first to its last, and their tokens. `most`:
 * the upper bound for so many tokens, at any position. */
static void span_of(const quern_cache *cache, const cache_run *run, bool most, cache_run *span,
                    cache_run *new)
{
    const quern_cache_params *p = &cache->layout.params;
    const int64_t first = cache_entries(&cache->layout, run->first),
                  end = cache_entries(&cache->layout, run->first + run->count);
    const int64_t parts =
        p->compress == QUERN_NSA_COMPRESS_MEAN && p->stride > 0 ? p->block_size / p->stride : 1;
    *span = *new = (cache_run){run->sequence, 0, 0, 0};
    if (most && p->block_size > 0 && run->count > 0) {
        new->count = (run->count + p->stride - 1) / p->stride;
        span->count = (new->count + parts - 2) * p->stride + p->block_size;
        new->count += parts - 1;
        return;
    }
    if (first == end) return;
    const int64_t from = first - first % parts;
    *new = (cache_run){run->sequence, first, 0, end - first};
    *span = (cache_run){run->sequence, from * p->stride, 0, (end - 1 - from) * p->stride + p->block_size};
}

/* Lays out the workspace; `most`: for the most that the call's counts can need. */
static void carve(const quern_cache *cache, append_call *c, bool most, arena *a)
{
    const quern_cache_params *p = &cache->layout.params;
    const int64_t batch = c->call.batch.batch;
    c->runs = arena_take(a, (size_t)batch * sizeof(cache_run));
    c->spans = arena_take(a, (size_t)batch * sizeof(cache_run));
    c->news = arena_take(a, (size_t)batch * sizeof(cache_run));
    c->cu_tokens = arena_take(a, (size_t)(batch + 1) * sizeof(int32_t));
    c->cu_entries = arena_take(a, (size_t)(batch + 1) * sizeof(int32_t));
    c->span_tokens = c->span_entries = 0;
    for (int64_t i = 0, row = 0; i < batch; row += c->call.batch.counts[i++]) {
        const int64_t tokens = cache->sequences[c->call.batch.sequences[i]].tokens;
        const cache_run run = {c->call.batch.sequences[i], tokens, row, c->call.batch.counts[i]};
        cache_run span, new;
        span_of(cache, &run, most, &span, &new);
        span.row = c->span_tokens;
        c->span_tokens += span.count;
        const int64_t entries = most ? new.count : cache_entries(&cache->layout, span.count);
        new.row = c->span_entries + entries - new.count;
        if (a->base != NULL) {
            c->runs[i] = run;
            c->spans[i] = span;
            c->news[i] = new;
            c->cu_tokens[i] = (int32_t)span.row;
        }
        c->span_entries += entries;
    }
    if (a->base != NULL) c->cu_tokens[batch] = (int32_t)c->span_tokens;
    if (c->span_tokens == 0) return;
    const size_t size = quern_dtype_size(p->dtype);
    const int64_t rows[] = {c->span_tokens, c->span_tokens, c->span_entries, c->span_entries},
                  dims[] = {p->dim, p->dim_v, p->dim, p->dim_v};
    quern_tensor views[4];
    for (int i = 0; i < 4; i++) {
        const int64_t shape[] = {1, rows[i], p->kv_heads, dims[i]};
        views[i] = quern_tensor_contiguous(arena_take(a, (size_t)(shape[1] * shape[2] * shape[3]) * size),
                                           p->dtype, 4, shape);
    }
    const int64_t cu[] = {batch + 1};
    c->k = views[0];
    c->v = views[1];
    c->compress = (compress_args){.seqs = {.batch = batch, .n_q = c->span_tokens, .n_kv = c->span_entries},
                                  .kind = (compress_kind)p->compress,
                                  .block_size = p->block_size,
                                  .stride = p->stride,
                                  .k = c->k,
                                  .v = c->v,
                                  .k_cmp = views[2],
                                  .v_cmp = views[3]};
    c->compress.seqs.cu_q = quern_tensor_contiguous(c->cu_tokens, QUERN_I32, 1, cu);
    c->compress.seqs.cu_kv = quern_tensor_contiguous(c->cu_entries, QUERN_I32, 1, cu);
    const quern_tensor *weights[] = {c->t.w_k, c->t.w_v, c->t.pe_k, c->t.pe_v};
    quern_tensor *places[] = {&c->compress.w_k, &c->compress.w_v, &c->compress.pe_k, &c->compress.pe_v};
    for (int i = 0; i < 4; i++)
        if (weights[i] != NULL) *places[i] = view_canonical(weights[i]);
    c->scratch = arena_take(a, STAGE_WORKSPACE(c->backend->compress_forward, &c->exec, &c->compress));
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_cache *cache,
                         const quern_cache_batch *batch, const quern_cache_tensors *tensors, bool run,
                         append_call *c)
{
    quern_exec how;
    quern_status status;
    *c = (append_call){.t = QUERN_CACHE_TENSORS_INIT};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = cache_check_batch(cache, batch, true, &c->call)) != QUERN_OK ||
        (status = op_exec(exec, &how)) != QUERN_OK ||
        (status = op_struct(&c->t, tensors, "tensors", "QUERN_CACHE_TENSORS_INIT")) != QUERN_OK ||
        (status = check_tensors(cache, c, run)) != QUERN_OK)
        return status;
    if (c->t.k->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "k is on device %d: the cpu keeps caches",
                         (int)c->t.k->device);
    c->backend = context_backend(ctx, QUERN_CPU, 0, how.stream, &c->exec);
    return c->backend != NULL ? QUERN_OK : error_status();
}

quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                          size_t *bytes)
{
    append_call c;
    const quern_status status = plan(ctx, NULL, cache, batch, tensors, false, &c);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    arena a = {NULL, 0};
    carve(cache, &c, true, &a);
    *bytes = arena_size(&a);
    return QUERN_OK;
}

/* Copies the rows of one pair into their plane. */
static quern_status append_pair(const quern_cache *cache, const append_call *c, cache_kind kind,
                                const quern_tensor *k, const quern_tensor *v)
{
    const quern_tensor flat[] = {view_canonical(k), view_canonical(v)};
    const cache_copy_args copy = {.plane = cache_plane_of(cache, kind, c->call.batch.table),
                                  .runs = c->runs,
                                  .count = c->call.batch.batch,
                                  .k = view_with_batch(&flat[0]),
                                  .v = view_with_batch(&flat[1])};
    return c->backend->cache_copy.run(&c->exec, &copy, NULL);
}

/* Computes the entries of blocks that became whole. */
static quern_status append_entries(const quern_cache *cache, const append_call *c)
{
    const int32_t *table = c->call.batch.table;
    const cache_copy_args gather = {.plane = cache_plane_of(cache, CACHE_TOKENS, table),
                                    .runs = c->spans,
                                    .count = c->call.batch.batch,
                                    .k = c->k,
                                    .v = c->v,
                                    .from_cache = true};
    const cache_copy_args scatter = {.plane = cache_plane_of(cache, CACHE_ENTRIES, table),
                                     .runs = c->news,
                                     .count = c->call.batch.batch,
                                     .k = c->compress.k_cmp,
                                     .v = c->compress.v_cmp};
    quern_status status = c->backend->cache_copy.run(&c->exec, &gather, NULL);
    if (status == QUERN_OK) status = c->backend->compress_forward.run(&c->exec, &c->compress, c->scratch);
    return status == QUERN_OK ? c->backend->cache_copy.run(&c->exec, &scatter, NULL) : status;
}

quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    append_call c;
    quern_status status = plan(ctx, exec, cache, batch, tensors, true, &c);
    if (status != QUERN_OK) return status;
    arena size = {NULL, 0}, a = arena_on(workspace);
    carve(cache, &c, false, &size);
    if (c.span_tokens > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "counts come to %lld tokens with those of their blocks: %d are accepted",
                         (long long)c.span_tokens, INT32_MAX);
    if ((status = view_check_workspace(workspace, workspace_bytes, arena_size(&size), c.t.k)) != QUERN_OK ||
        (status = cache_check_pages(cache, &c.call, true)) != QUERN_OK ||
        (status = cache_claim_pages(cache, &c.call)) != QUERN_OK || c.call.tokens == 0)
        return status;
    carve(cache, &c, false, &a);
    status = append_pair(cache, &c, CACHE_TOKENS, c.t.k, c.t.v);
    if (status == QUERN_OK && c.t.k_slc != NULL)
        status = append_pair(cache, &c, CACHE_SLC, c.t.k_slc, c.t.v_slc);
    if (status == QUERN_OK && c.t.k_win != NULL)
        status = append_pair(cache, &c, CACHE_WIN, c.t.k_win, c.t.v_win);
    if (status == QUERN_OK && c.span_tokens > 0) status = append_entries(cache, &c);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < c.call.batch.batch; i++) {
        cache_length *s = &cache->sequences[c.call.batch.sequences[i]];
        s->tokens += c.call.batch.counts[i];
        if (s->tokens > s->most) s->most = s->tokens;
    }
    return QUERN_OK;
}
