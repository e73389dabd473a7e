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
#include "core/float_state.h"
#include "core/view.h"

/* Rows of a sequence from number `first` on, which are rows of the call's tensors from `row` on. */
typedef struct row_run {
    int64_t first, row, count;
} row_run;

typedef struct append_call {
    cache_call call;
    quern_cache_tensors t;
    bool most; /* the program is laid out for the most that the counts can need, wherever sequences stand */
    int64_t span_tokens, span_entries;
    /* i32: of the tokens of blocks that become whole, then of their entries, as in stage_step */
    quern_tensor cu_tokens, cu_entries, span_positions, new_positions, new_rows;
    _Alignas(op_step) char program[5 * OP_STEP_BYTES(cache_copy) + OP_STEP_BYTES(compress)];
} append_call;

static quern_status check_tensors(const append_call *c, bool run)
{
    const quern_cache_params *p = &c->call.cache->layout.params;
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
static bool next_span(const append_call *c, span_place *s)
{
    const cache_layout *l = &c->call.cache->layout;
    const quern_cache_batch *b = &c->call.batch;
    if (s->i >= 0) {
        s->tokens += s->span.count;
        s->entries += c->most ? s->new.count : cache_entries(l, s->span.count);
    }
    if (++s->i >= b->batch) return false;
    span_of(l, c->call.cache->sequences[b->sequences[s->i]].tokens, b->counts[s->i], c->most, &s->span,
            &s->new);
    s->new.row = s->entries + cache_entries(l, s->span.count) - s->new.count;
    return true;
}

static void begin(const op_call *call, const op_frame *frame)
{
    const append_call *c = (const append_call *)call;
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

static void add_pair(op_build *b, cache_kind kind, const stage_step *step, const quern_tensor *k,
                     const quern_tensor *v)
{
    const quern_tensor all_k = op_known_view(k, true), all_v = op_known_view(v, true);
    if (k != NULL) add_copy(b, kind, step, &all_k, &all_v, false);
}

/* Computes the entries of blocks that become whole. */
static void add_entries(op_build *b, const stage_step *step)
{
    append_call *c = (append_call *)b->call;
    const quern_cache_params *p = &c->call.cache->layout.params;
    const int64_t batch = c->call.batch.batch, more = batch + 1, pairs[] = {batch, 2};
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
                                                   .w_k = op_known_view(c->t.w_k, false),
                                                   .w_v = op_known_view(c->t.w_v, false),
                                                   .pe_k = op_known_view(c->t.pe_k, false),
                                                   .pe_v = op_known_view(c->t.pe_v, false),
                                                   .k_cmp = rows[2],
                                                   .v_cmp = rows[3]};
    add_copy(b, CACHE_ENTRIES, &news, &rows[2], &rows[3], false);
}

static void build(op_build *b)
{
    append_call *c = (append_call *)b->call;
    const stage_step step = cache_step(b);
    span_place s = {.i = -1};
    while (next_span(c, &s)) continue;
    c->span_tokens = s.tokens;
    c->span_entries = s.entries;
    add_pair(b, CACHE_TOKENS, &step, c->t.k, c->t.v);
    add_pair(b, CACHE_SLC, &step, c->t.k_slc, c->t.v_slc);
    add_pair(b, CACHE_WIN, &step, c->t.k_win, c->t.v_win);
    if (s.tokens > 0) add_entries(b, &step);
}

static const char *const operations[] = {"cache_append"};
static const op_family family = {
    .operations = operations,
    .operation_count = 1,
    .call_size = sizeof(append_call),
    .program_at = offsetof(append_call, program),
    .build = build,
    .begin = begin,
};

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_cache *cache,
                         const quern_cache_batch *batch, const quern_cache_tensors *tensors, bool run,
                         append_call *c)
{
    c->t = (quern_cache_tensors)QUERN_CACHE_TENSORS_INIT;
    c->most = !run;
    quern_status status = cache_begin(&c->call, ctx, exec, cache, batch, true);
    if (status == QUERN_OK) status = op_struct(&c->t, tensors, "tensors", "QUERN_CACHE_TENSORS_INIT");
    if (status == QUERN_OK) status = check_tensors(c, run);
    return status == QUERN_OK ? cache_build(&c->call, ctx, &family, "k", c->t.k) : status;
}

quern_status quern_cache_append_workspace(quern_context *ctx, const quern_cache *cache,
                                          const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                          size_t *bytes)
{
    append_call c;
    const quern_status status = plan(ctx, NULL, cache, batch, tensors, false, &c);
    return status == QUERN_OK ? cache_workspace(&c.call, bytes) : status;
}

quern_status quern_cache_append(quern_context *ctx, const quern_exec *exec, quern_cache *cache,
                                const quern_cache_batch *batch, const quern_cache_tensors *tensors,
                                void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    append_call c;
    quern_status status = plan(ctx, exec, cache, batch, tensors, true, &c);
    if (status == QUERN_OK && c.span_tokens > INT32_MAX)
        status = error_set(QUERN_ERR_INVALID_ARGUMENT,
                           "counts come to %lld tokens with those of their blocks: %d are accepted",
                           (long long)c.span_tokens, INT32_MAX);
    if (status == QUERN_OK) status = cache_check_run(&c.call, workspace, workspace_bytes);
    if (status == QUERN_OK) status = cache_claim_pages(cache, &c.call);
    if (status == QUERN_OK) status = cache_run(&c.call, workspace);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < c.call.batch.batch; i++) {
        cache_length *s = &cache->sequences[c.call.batch.sequences[i]];
        s->tokens += c.call.batch.counts[i];
        if (s->tokens > s->most) s->most = s->tokens;
    }
    return QUERN_OK;
}
