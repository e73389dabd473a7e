/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_decode.c - the layer on new tokens of sequences that a cache holds.
 *
 * Projections are products over the tokens of all sequences, so that weights are read once. Between them each
 * sequence goes alone, from its own position on:
 *
 *   norm_rope, store_rows    raw rows, behind a copy of those of the cache
 *   pool_append, store_rows  entries and keys, which go to the cache behind those that it has
 *   indexer, attend_mqa
 *
 * Formats of bytes may refuse a row. All sequences are therefore taken in first, by copies of their states,
 * and what the cache knows of them changes last: rows behind a sequence's entries mean nothing until then.
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <string.h>

/* Where a call stands in its batch, and the sequence that it comes to. */
typedef struct turn {
    int64_t b, id, row, count;    /* rows of the call's tokens */
    int64_t position, raw;        /* tokens and raw rows that the cache has */
    int64_t raw_row;              /* where its raw rows stand among those of all */
    int64_t entries, made, entry; /* whole before, made now, the first of them in the call's results */
} turn;

/* What the call makes, of all sequences. */
typedef struct taken {
    quern_tensor kv, entries, keys; /* f32 [rows, D], [n, D], [n, C_I]: new rows */
    quern_tensor raw;               /* as the cache stores them, old rows before new ones of each sequence */
    char *states;                   /* copies of a sequence's states; NULL: no row can be refused */
} taken;

static const quern_dsv4_layer_cache *cache_of(const op_build *b)
{
    return layer_batch_of(b->call)->cache;
}

/* Sets the turn to the next sequence that has tokens; from {.b = -1}. False: there is none. */
static bool next_turn(const op_build *b, turn *t)
{
    const layer_batch *d = layer_batch_of(b->call);
    if (t->b >= 0) {
        t->row += t->count;
        t->raw_row += t->raw + t->count;
        t->entry += t->made;
    }
    do {
        if (++t->b >= d->batch) return false;
    } while (d->counts[t->b] == 0);
    const layer_sequence *s = &d->cache->sequence[d->sequences[t->b]];
    t->id = d->sequences[t->b];
    t->count = d->counts[t->b];
    t->position = s->tokens;
    t->raw = s->raw;
    t->entries = layer_entries_at(d->cache, t->position);
    t->made = layer_entries_at(d->cache, t->position + t->count) - t->entries;
    return true;
}

/* Rows [first, first + rows) of an area without pages, [rows, columns]. */
static quern_tensor cached(const op_build *b, int64_t id, layer_area area, int64_t first, int64_t rows)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t shape[] = {rows, c->plane[area].columns};
    return view_on(&b->call->like, op_address(layer_row_at(c, id, area, first).data), c->plane[area].dtype, 2,
                   shape);
}

/* The pool of an area with pages, and the sequence's table for so many rows. */
static quern_tensor pool_of(const op_build *b, layer_area area)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const layer_plane *plane = &c->plane[area];
    const bool bytes = plane->format != QUERN_DSV4_ROWS;
    const int64_t page = c->params.page, rows[] = {c->params.pages, page, plane->columns},
                  packed[] = {c->params.pages, page * plane->columns};
    return view_on(&b->call->like, op_address(plane->base), plane->dtype, bytes ? 2 : 3,
                   bytes ? packed : rows);
}

static quern_tensor table_of(const op_build *b, int64_t id, int64_t rows)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t shape[] = {1, (rows + c->params.page - 1) / c->params.page};
    return view_on(&b->call->like, op_address(c->table + id * c->columns), QUERN_I32, 2, shape);
}

/* Rows [first, first + count) of a result [T, ..] of the call; absent where it is not wanted. */
static quern_tensor result_rows(const op_build *b, int32_t tensor, int64_t first, int64_t count)
{
    const quern_tensor all = layer_view(b, tensor);
    return layer_rows(&all, first, count);
}

/* Says of which sequence a row was refused. */
static void name_sequence(op_build *b, const turn *t)
{
    char why[STAGE_WHY_BYTES];
    strncpy(why, quern_last_error(NULL), sizeof why - 1);
    why[sizeof why - 1] = '\0';
    b->status = error_set(b->status, "sequence %lld: %s", (long long)t->id, why);
}

/* Stores f32 rows in `to`, contiguous rows in the format of an area. */
static void store(op_build *b, layer_area area, const char *name, const quern_tensor *rows,
                  const quern_tensor *to)
{
    *OP_ADD(b, store_rows) = (store_rows_args){
        .format = dsv4_entry_format(cache_of(b)->plane[area].format), .x = *rows, .name = name, .cache = *to};
}

/* Stores a turn's new rows in an area of the cache, behind those that it has: with pages, page by page. */
static void store_made(op_build *b, const turn *t, layer_area area, const char *name,
                       const quern_tensor *rows)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t page = c->params.page;
    if (page == 0) {
        const quern_tensor to = cached(b, t->id, area, t->entries, t->made);
        store(b, area, name, rows, &to);
    }
    for (int64_t done = 0; page > 0 && done < t->made;) {
        const int64_t at = t->entries + done, left = page - at % page,
                      n = left < t->made - done ? left : t->made - done;
        *OP_ADD(b, store_rows) =
            (store_rows_args){.format = dsv4_entry_format(c->plane[area].format),
                              .page = page,
                              .x = layer_rows(rows, done, n),
                              .first = c->table[t->id * c->columns + at / page] * page + at % page,
                              .name = name,
                              .cache = pool_of(b, area)};
        done += n;
    }
}

/* Whether the call changes copies of states, and runs. */
static bool has_copies(const op_build *b, const taken *all)
{
    return all->states != NULL && b->frame != NULL;
}

/* The memory of a copy of the turn's compressor's (0) or indexer's (1) state. */
static char *copy_memory(const op_build *b, const turn *t, const taken *all, int which)
{
    const size_t *bytes = cache_of(b)->state_bytes;
    return (char *)op_placed(all->states, b->frame) + (size_t)t->b * (bytes[0] + bytes[1]) +
           (which == 1 ? bytes[0] : 0);
}

/* The turn's state of a compressor, or the copy of it that the call changes. */
static pool_state *state_of(const op_build *b, const turn *t, const taken *all, int which)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const layer_sequence *s = &c->sequence[t->id];
    quern_dsv4_state *state = which == 1 ? s->index : s->main;
    if (has_copies(b, all)) /* it has the room */
        (void)quern_dsv4_state_fork(state, copy_memory(b, t, all, which), c->state_bytes[which], &state);
    return (pool_state *)state;
}

/* Appends the turn's tokens to a compressor's state; `made` gets the new entries. */
static void append(op_build *b, const turn *t, const taken *all, const quern_tensor *proj, int32_t first,
                   layer_area area, const quern_tensor *made)
{
    pool_state *state = state_of(b, t, all, area == LAYER_KEYS);
    const int64_t cu[] = {0, t->count};
    const quern_tensor bias = layer_view(b, first), out = layer_rows(made, t->entry, t->made);
    pool_append_args *args = OP_ADD(b, pool_append);
    args->batch = 1;
    args->states = &state;
    args->cu = cu;
    args->proj = layer_rows(proj, t->row, t->count);
    args->entry = layer_entry(b, first);
    args->out = out;
    layer_biases(&bias, out.shape[1], &args->bias_a, &args->bias_b);
    op_flush(b); /* while `state` and `cu` are here */
    store_made(b, t, area, area == LAYER_KEYS ? "idx_k" : "compressed", &out);
}

/* Takes the turn's tokens in: raw rows, entries, keys. */
static void take_in(op_build *b, const turn *t, const layer_parts *parts, const taken *all)
{
    if (b->status != QUERN_OK) return; /* an earlier sequence's, which the sentence names */
    const quern_tensor now = layer_rows(&all->kv, t->row, t->count),
                       in = layer_rows(&parts->kv_in, t->row, t->count),
                       had = cached(b, t->id, LAYER_RAW, 0, t->raw),
                       before = layer_rows(&all->raw, t->raw_row, t->raw),
                       behind = layer_rows(&all->raw, t->raw_row + t->raw, t->count);
    layer_make_kv(b, &in, &now, 1, t->position);
    op_copy(b, &had, &before);
    store(b, LAYER_RAW, "kv_rows", &now, &behind);
    if (parts->main.ndim > 0)
        append(b, t, all, &parts->main, DL(compressor_bias), LAYER_ENTRIES, &all->entries);
    if (parts->index.ndim > 0) append(b, t, all, &parts->index, DL(indexer_bias), LAYER_KEYS, &all->keys);
    op_flush(b);
    if (b->status != QUERN_OK) name_sequence(b, t);
}

/* Entries or keys of a sequence as stages read them. */
static layer_keys seen_by(const op_build *b, const turn *t, layer_area area)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t seen = t->entries + t->made;
    layer_keys k = {.format = dsv4_entry_format(c->plane[area].format), .page = c->params.page};
    if (k.page > 0) {
        k.rows = pool_of(b, area);
        k.table = table_of(b, t->id, seen);
    } else {
        const quern_tensor rows = cached(b, t->id, area, 0, seen);
        k.rows = view_with_batch(&rows);
    }
    return k;
}

/* The turn's choice of entries, idx [count, k] and count [count, 1]. */
static void choose(op_build *b, const turn *t, const layer_parts *parts, const quern_tensor *idx,
                   const quern_tensor *count)
{
    const quern_tensor in = layer_rows(&parts->index_q_in, t->row, t->count),
                       q = op_matrix(b, parts->x.dtype, t->count, b->call->symbol[LS_HICI]),
                       heads = layer_rows(&parts->heads, t->row, t->count),
                       q_by_head = layer_heads(&q, 1, b->call->symbol[LS_HI]);
    const layer_keys keys = seen_by(b, t, LAYER_KEYS);
    quern_tensor scores = result_rows(b, DL(idx_score), t->row, t->count);
    view_narrow(&scores, 1, 0, t->entries + t->made);
    if (scores.ndim > 0) scores = view_with_batch(&scores);
    layer_make_index_q(b, &in, &q, 1, t->position);
    layer_choose(b, &q, &keys, &heads, 1, t->position, idx, count, &scores);
    const quern_tensor to_q = result_rows(b, DL(idx_q), t->row, t->count),
                       to_idx = result_rows(b, DL(idx_topk), t->row, t->count);
    if (to_q.ndim > 0) op_copy(b, &q_by_head, &to_q);
    if (to_idx.ndim > 0) op_copy(b, idx, &to_idx);
}

/* The turn's queries; [H, T, D] of the call's result are those of all tokens. */
static quern_tensor make_q(op_build *b, const turn *t, const layer_parts *parts)
{
    const quern_tensor q = op_matrix(b, parts->x.dtype, t->count, b->call->symbol[LS_HD]),
                       in = layer_rows(&parts->q_in, t->row, t->count);
    layer_make_q(b, &in, &q, 1, t->position);
    quern_tensor to = layer_view(b, DL(q));
    if (to.ndim == 0) return q;
    quern_tensor by_head = layer_heads(&q, b->call->symbol[LS_H], 1);
    by_head.ndim = 3;
    by_head.shape[1] = t->count;
    by_head.shape[2] = by_head.shape[3] = b->call->symbol[LS_D];
    by_head.strides[0] = b->call->symbol[LS_D];
    by_head.strides[1] = b->call->symbol[LS_HD];
    by_head.strides[2] = 1;
    view_narrow(&to, 1, t->row, t->count);
    op_copy(b, &by_head, &to);
    return q;
}

static void attend(op_build *b, const turn *t, const layer_parts *parts, const taken *all,
                   const quern_tensor *core)
{
    quern_tensor idx = {0}, count = {0};
    const quern_tensor q = make_q(b, t, parts), raw = layer_rows(&all->raw, t->raw_row, t->raw + t->count),
                       kv = view_with_batch(&raw), o = layer_rows(core, t->row, t->count);
    const layer_keys entries = parts->main.ndim > 0 ? seen_by(b, t, LAYER_ENTRIES) : (layer_keys){.page = 0};
    if (parts->index.ndim > 0) {
        idx = op_matrix(b, QUERN_I32, t->count, b->call->symbol[LS_K]);
        count = op_matrix(b, QUERN_I32, t->count, 1);
        choose(b, t, parts, &idx, &count);
    }
    quern_tensor unrotated = result_rows(b, DL(core), t->row, t->count);
    if (unrotated.ndim > 0) unrotated = view_with_batch(&unrotated);
    attend_mqa_args args = layer_core(b, &parts->sinks, &q, &kv, &entries.rows, &idx, &count, t->position);
    args.format = dsv4_entry_format(cache_of(b)->params.format);
    args.page = entries.page;
    args.entries_table = entries.table;
    layer_attend(b, &args, &o, &unrotated);
}

/* Converts f32 rows to a result of the call, if it has that result. */
static void give_rows(op_build *b, int32_t tensor, const quern_tensor *rows)
{
    const quern_tensor to = layer_view(b, tensor), in = layer_heads(rows, 1, 1), out = layer_heads(&to, 1, 1);
    if (to.ndim > 0) layer_change(b, &in, &out);
}

/* Keeps the last raw rows of the turn's sequence, and its states where the call has changed copies. */
static void keep(op_build *b, const turn *t, const taken *all)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t have = t->raw + t->count, kept = have < c->kept ? have : c->kept;
    const quern_tensor last = layer_rows(&all->raw, t->raw_row + have - kept, kept),
                       to = cached(b, t->id, LAYER_RAW, 0, kept);
    op_copy(b, &last, &to);
    op_flush(b);
    quern_dsv4_state *own[] = {c->sequence[t->id].main, c->sequence[t->id].index};
    for (int i = 0; i < 2 && has_copies(b, all) && b->status == QUERN_OK; i++) {
        const char *copy = arena_on(copy_memory(b, t, all, i)).base; /* states are aligned as arenas are */
        if (own[i] != NULL)
            b->status = quern_dsv4_state_fork((const quern_dsv4_state *)(const void *)copy,
                                              layer_state_memory(c, t->id, i), c->state_bytes[i], &own[i]);
    }
}

/* The memory of what the call makes. */
static taken rooms_of(op_build *b, const layer_parts *parts)
{
    const layer_batch *d = layer_batch_of(b->call);
    const quern_dsv4_layer_cache *c = d->cache;
    const layer_plane *raw = &c->plane[LAYER_RAW];
    const int64_t *s = b->call->symbol;
    int64_t rows = 0;
    for (turn t = {.b = -1}; next_turn(b, &t);) rows += t.raw + t.count;
    taken all = {.kv = op_matrix(b, QUERN_F32, s[LS_T], s[LS_D]),
                 .raw = op_matrix(b, raw->dtype, rows, raw->columns)};
    if (parts->main.ndim > 0) all.entries = op_matrix(b, QUERN_F32, s[LS_S], s[LS_D]);
    if (parts->index.ndim > 0) all.keys = op_matrix(b, QUERN_F32, s[LS_S], s[LS_CI]);
    if (c->params.format != QUERN_DSV4_ROWS || c->params.key_format != QUERN_DSV4_ROWS)
        all.states = arena_take(&b->a, (size_t)d->batch * (c->state_bytes[0] + c->state_bytes[1]));
    return all;
}

void layer_build_decode(op_build *b)
{
    const layer_parts parts = layer_project(b);
    const taken all = rooms_of(b, &parts);
    const quern_tensor core = op_matrix(b, parts.x.dtype, parts.x.shape[0], b->call->symbol[LS_HD]);
    for (turn t = {.b = -1}; next_turn(b, &t);) take_in(b, &t, &parts, &all);
    for (turn t = {.b = -1}; next_turn(b, &t);) attend(b, &t, &parts, &all, &core);
    const quern_tensor o_a_out = layer_project_groups(b, &core);
    layer_project_out(b, &o_a_out);
    const quern_tensor by_head = layer_heads(&core, 1, b->call->symbol[LS_H]),
                       groups = layer_heads(&o_a_out, 1, b->call->symbol[LS_G]);
    op_give(b, DL(q_residual), &parts.residual);
    give_rows(b, DL(kv_rows), &all.kv);
    if (parts.main.ndim > 0) give_rows(b, DL(compressed), &all.entries);
    if (parts.index.ndim > 0) give_rows(b, DL(idx_k), &all.keys);
    op_give(b, DL(core_irope), &by_head);
    op_give(b, DL(o_a_out), &groups);
    for (turn t = {.b = -1}; next_turn(b, &t);) keep(b, &t, &all);
}

static void commit(const layer_batch *d)
{
    for (int64_t b = 0; b < d->batch; b++) {
        layer_sequence *s = &d->cache->sequence[d->sequences[b]];
        const int64_t count = d->counts[b], ring = d->cache->params.ring, kept = d->cache->kept;
        s->tokens += count;
        s->held = s->held + count < ring ? s->held + count : ring;
        s->raw = s->raw + count < kept ? s->raw + count : kept;
    }
}

quern_status quern_dsv4_layer_decode_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                               const quern_dsv4_layer_cache *cache, const int32_t *sequences,
                                               const int64_t *counts, int64_t batch,
                                               const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    layer_decode_call call;
    const quern_status status = layer_check_cache(cache);
    if (status != QUERN_OK) return status;
    /* A query writes nothing to the cache. */
    call.batch = (layer_batch){(quern_dsv4_layer_cache *)(uintptr_t)cache, sequences, counts, batch};
    return op_workspace_of(&call.call.head, &dsv4_layer_decode_family, 0, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_layer_decode(quern_context *ctx, const quern_exec *exec,
                                     const quern_dsv4_layer_params *params, quern_dsv4_layer_cache *cache,
                                     const int32_t *sequences, const int64_t *counts, int64_t batch,
                                     const quern_dsv4_layer_tensors *tensors, void *workspace,
                                     size_t workspace_bytes)
{
    layer_decode_call call;
    quern_status status = layer_check_cache(cache);
    if (status != QUERN_OK) return status;
    call.batch = (layer_batch){cache, sequences, counts, batch};
    status = op_run(&call.call.head, &dsv4_layer_decode_family, 0, ctx, exec, params, tensors, workspace,
                    workspace_bytes);
    if (status == QUERN_OK) commit(&call.batch);
    return status;
}
