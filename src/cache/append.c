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

#include "core/error.h"
#include "core/view.h"

/* A tensor by its field, and the extents. */
#define P(field) OP_TENSOR(quern_cache_tensors, field)
enum { A_T = 1, A_HKV, A_D, A_DV, A_IN, A_IN_V, A_L };

static const op_tensor tensors[] = {
    {"k", "K", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_D}, {0}},
    {"v", "V", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_DV}, {0}},
    {"k_slc", "K_slc", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_D}, {0}},
    {"v_slc", "V_slc", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_DV}, {0}},
    {"k_win", "K_win", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_D}, {0}},
    {"v_win", "V_win", OP_ACTIVATION, OP_NONE, {A_T, A_HKV, A_DV}, {0}},
    {"w_k", "w_k", OP_WEIGHT, OP_NONE, {A_HKV, A_IN, A_D}, {0}},
    {"w_v", "w_v", OP_WEIGHT, OP_NONE, {A_HKV, A_IN_V, A_DV}, {0}},
    {"pe_k", "pe_k", OP_WEIGHT, OP_NONE, {A_HKV, A_L, A_D}, {0}},
    {"pe_v", "pe_v", OP_WEIGHT, OP_NONE, {A_HKV, A_L, A_DV}, {0}},
};
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_cache_tensors), "a row a tensor");

static bool is_linear(const quern_cache_params *p)
{
    return p->block_size > 0 && p->compress == QUERN_NSA_COMPRESS_LINEAR;
}

static void roles(op_call *call)
{
    const quern_cache_params *p = cache_params_of(call);
    const bool linear = is_linear(p);
    uint8_t *r = call->role;
    r[P(k)] = r[P(v)] = OP_NEEDED;
    r[P(k_slc)] = r[P(v_slc)] = p->separate_slc ? OP_NEEDED : OP_REFUSED;
    r[P(k_win)] = r[P(v_win)] = p->separate_win ? OP_NEEDED : OP_REFUSED;
    r[P(w_k)] = r[P(w_v)] = linear ? OP_NEEDED : p->block_size > 0 ? OP_OPTIONAL : OP_REFUSED;
    r[P(pe_k)] = r[P(pe_v)] = linear ? OP_OPTIONAL : OP_REFUSED;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    (void)call;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: the cache's parameters accept NULL",
                     tensors[tensor].field);
}

static quern_status derive(op_call *call)
{
    const quern_cache_params *p = cache_params_of(call);
    const int64_t rows = is_linear(p) ? p->block_size : 1;
    int64_t *s = call->symbol;
    s[A_T] = cache_call_of(call)->tokens;
    s[A_HKV] = p->kv_heads;
    s[A_D] = p->dim;
    s[A_DV] = p->dim_v;
    s[A_IN] = rows * p->dim; /* of at most 2^31 rows */
    s[A_IN_V] = rows * p->dim_v;
    s[A_L] = p->block_size;
    return cache_find_like(call, P(k));
}

/* Rows of a sequence from number `first` on, which are rows of the call's tensors from `row` on. */
typedef struct row_run {
    int64_t first, row, count;
} row_run;

/* The entries that the compress stage computes, from the first to the last that become whole, and their
 * tokens. `most`: the upper bound for so many tokens, at any position. */
static void span_of(const cache_layout *layout, int64_t tokens, int64_t count, bool most, row_run *span,
                    row_run *new)
{
    const quern_cache_params *p = &layout->params;
    const int64_t first = cache_entries(layout, tokens), end = cache_entries(layout, tokens + count);
    const int64_t parts =
        p->compress == QUERN_NSA_COMPRESS_MEAN && p->stride > 0 ? p->block_size / p->stride : 1;
    *span = *new = (row_run){0, 0, 0};
    if (most && p->block_size > 0 && count > 0) {
        new->count = (count + p->stride - 1) / p->stride;
        span->count = (new->count + parts - 2) * p->stride + p->block_size;
        new->count += parts - 1;
        return;
    }
    if (first == end) return;
    const int64_t from = first - first % parts;
    *new = (row_run){first, 0, end - first};
    *span = (row_run){from * p->stride, 0, (end - 1 - from) * p->stride + p->block_size};
}

/* Where the spans stand that the compress stage gets. */
typedef struct span_place {
    row_run span, new;
    int64_t i, tokens, entries; /* of the spans before */
} span_place;

/* From {.i = -1} on, the next sequence of the batch; false past the last, where the sums are the call's. */
static bool next_span(const cache_call *c, span_place *s)
{
    const cache_layout *l = &c->cache->layout;
    const quern_cache_batch *b = &c->batch;
    if (s->i >= 0) {
        s->tokens += s->span.count;
        s->entries += c->most ? s->new.count : cache_entries(l, s->span.count);
    }
    if (++s->i >= b->batch) return false;
    span_of(l, c->cache->sequences[b->sequences[s->i]].tokens, b->counts[s->i], c->most, &s->span, &s->new);
    s->new.row = s->entries + cache_entries(l, s->span.count) - s->new.count;
    return true;
}

static void begin(const op_call *call, const op_frame *frame)
{
    const cache_call *c = (const cache_call *)call;
    span_place s = {.i = -1};
    cache_write_step(call, frame);
    if (c->span_tokens == 0) return;
    int32_t *cu_tokens = op_placed(c->cu_tokens.data, frame),
            *cu_entries = op_placed(c->cu_entries.data, frame),
            *from = op_placed(c->span_positions.data, frame), *to = op_placed(c->new_positions.data, frame),
            *rows = op_placed(c->new_rows.data, frame);
    while (next_span(c, &s)) {
        cu_tokens[s.i] = (int32_t)s.tokens;
        cu_entries[s.i] = (int32_t)s.entries;
        from[s.i] = (int32_t)s.span.first;
        to[s.i] = (int32_t)s.new.first;
        rows[2 * s.i] = (int32_t)s.new.row;
        rows[2 * s.i + 1] = (int32_t)(s.new.row + s.new.count);
    }
    cu_tokens[s.i] = (int32_t)s.tokens;
    cu_entries[s.i] = (int32_t)s.entries;
}

/* Copies rows of a step between a kind of the cache and k, v [T, heads, dim]. */
static void add_copy(op_build *b, cache_kind kind, const stage_step *step, const quern_tensor *k,
                     const quern_tensor *v, bool from_cache)
{
    const cache_call *c = (const cache_call *)b->call;
    *OP_ADD(b, cache_copy) = (cache_copy_args){
        .plane = cache_steps_plane(c, kind), .step = *step, .k = *k, .v = *v, .from_cache = from_cache};
}

/* The pair whose keys are tensor k. */
static void add_pair(op_build *b, cache_kind kind, const stage_step *step, int32_t k)
{
    const quern_tensor keys = op_view(b->call, k, true), values = op_view(b->call, k + 1, true);
    if (keys.ndim > 0) add_copy(b, kind, step, &keys, &values, false);
}

/* Computes the entries of blocks that become whole. */
static void add_entries(op_build *b, const stage_step *step)
{
    cache_call *c = (cache_call *)b->call;
    const quern_cache_params *p = &c->cache->layout.params;
    const int64_t batch = c->batch.batch, more = batch + 1, pairs[] = {batch, 2};
    const int64_t shapes[][4] = {{1, c->span_tokens, p->kv_heads, p->dim},
                                 {1, c->span_tokens, p->kv_heads, p->dim_v},
                                 {1, c->span_entries, p->kv_heads, p->dim},
                                 {1, c->span_entries, p->kv_heads, p->dim_v}};
    c->cu_tokens = op_room(b, QUERN_I32, 1, &more);
    c->cu_entries = op_room(b, QUERN_I32, 1, &more);
    c->span_positions = op_room(b, QUERN_I32, 1, &batch);
    c->new_positions = op_room(b, QUERN_I32, 1, &batch);
    c->new_rows = op_room(b, QUERN_I32, 2, pairs);
    quern_tensor rows[4];
    for (int i = 0; i < 4; i++) rows[i] = op_room(b, p->dtype, 4, shapes[i]);
    const stage_step spans = {step->slots, c->span_positions, view_ranges(&c->cu_tokens)},
                     news = {step->slots, c->new_positions, c->new_rows};
    add_copy(b, CACHE_TOKENS, &spans, &rows[0], &rows[1], true);
    *OP_ADD(b, compress_forward) = (compress_args){.seqs = {.batch = batch,
                                                            .n_q = c->span_tokens,
                                                            .n_kv = c->span_entries,
                                                            .cu_q = c->cu_tokens,
                                                            .cu_kv = c->cu_entries},
                                                   .kind = (compress_kind)p->compress,
                                                   .block_size = p->block_size,
                                                   .stride = p->stride,
                                                   .k = rows[0],
                                                   .v = rows[1],
                                                   .w_k = op_view(b->call, P(w_k), false),
                                                   .w_v = op_view(b->call, P(w_v), false),
                                                   .pe_k = op_view(b->call, P(pe_k), false),
                                                   .pe_v = op_view(b->call, P(pe_v), false),
                                                   .k_cmp = rows[2],
                                                   .v_cmp = rows[3]};
    add_copy(b, CACHE_ENTRIES, &news, &rows[2], &rows[3], false);
}

static void build(op_build *b)
{
    cache_call *c = (cache_call *)b->call;
    const stage_step step = cache_step(b);
    span_place s = {.i = -1};
    while (next_span(c, &s)) continue;
    c->span_tokens = s.tokens;
    c->span_entries = s.entries;
    add_pair(b, CACHE_TOKENS, &step, P(k));
    add_pair(b, CACHE_SLC, &step, P(k_slc));
    add_pair(b, CACHE_WIN, &step, P(k_win));
    if (s.tokens > 0) add_entries(b, &step);
}

/* The last check of an append makes the sequences own the pages that it writes. */
static quern_status check_data(const op_call *call, void *const *data)
{
    const cache_call *c = cache_call_of(call);
    if (c->span_tokens > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "counts come to %lld tokens with those of their blocks: %d are accepted",
                         (long long)c->span_tokens, INT32_MAX);
    const quern_status status = cache_check_data(call, data);
    return status == QUERN_OK ? cache_claim_pages((quern_cache *)(uintptr_t)c->cache, c) : status;
}

static const size_t no_params = sizeof no_params;
static const char *const operations[] = {"cache_append"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .tensors = tensors,
    .tensor_count = OP_TENSOR_COUNT(quern_cache_tensors),
    .varlen_by = OP_NONE,
    .defaults = &no_params,
    .tensors_init = "QUERN_CACHE_TENSORS_INIT",
    .call_size = offsetof(cache_call, cache),
    .params_at = offsetof(cache_call, params),
    .program_at = offsetof(cache_call, program),
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .build = build,
    .begin = begin,
};

quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *of,
                                          size_t *bytes)
{
    cache_call c;
    const quern_status status = cache_take_batch(&c, cache, batch, true);
    c.most = true;
    return status == QUERN_OK ? op_workspace_of(&c.head, &family, 0, ctx, &no_params, of, bytes) : status;
}

quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                const quern_cache_batch *batch, const quern_cache_tensors *of,
                                void *workspace, size_t workspace_bytes)
{
    cache_call c;
    quern_status status = cache_take_batch(&c, cache, batch, true);
    c.most = false;
    if (status == QUERN_OK)
        status = op_run(&c.head, &family, 0, ctx, exec, &no_params, of, workspace, workspace_bytes);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < c.batch.batch; i++) {
        cache_length *s = &cache->sequences[c.batch.sequences[i]];
        s->tokens += c.batch.counts[i];
        if (s->tokens > s->most) s->most = s->tokens;
    }
    return QUERN_OK;
}
