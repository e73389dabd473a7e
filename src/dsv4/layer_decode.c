/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_decode.c - the layer on new tokens of sequences that a cache holds:
 *
 *   gemm, norm_rope          projections of x; queries and raw rows
 *   copy_rows, store_rows    raw rows, each sequence's behind a copy of those of the cache
 *   pool_append, store_rows  entries and keys, which go to the cache behind those that it has
 *   indexer, attend_mqa      the choice, the core
 *   gemm                     output projections
 *   copy_rows                the last raw rows to the cache
 *
 * Each step takes all sequences. Formats of bytes may refuse a row: then copies of the states are changed,
 * which replace them last. What the cache's books say changes last of all: rows behind a sequence's entries
 * mean nothing until then.
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

/* Where a call stands in its batch, and the sequence that it comes to. */
typedef struct turn {
    int64_t b, id, row, count;    /* rows of the call's tokens */
    int64_t position, raw;        /* tokens, and raw rows that the call copies from the cache */
    int64_t raw_row;              /* where its raw rows stand among those of all */
    int64_t entries, made, entry; /* whole before, made now, the first of them in the call's results */
} turn;

/* Sets the turn to the next sequence; from {.b = -1}. False: there is none, and the sums are the call's. */
static bool next_turn(const op_call *call, turn *t)
{
    const layer_batch *d = layer_batch_of(call);
    if (t->b >= 0) {
        t->row += t->count;
        t->raw_row += t->raw + t->count;
        t->entry += t->made;
    }
    t->raw = t->count = t->made = 0;
    if (++t->b >= d->batch) return false;
    t->id = d->sequences[t->b];
    const layer_sequence *s = &d->cache->sequence[t->id];
    t->count = d->counts[t->b];
    t->position = s->tokens;
    t->raw = t->count > 0 ? s->raw : 0;
    t->entries = layer_entries_at(d->cache, t->position);
    t->made = layer_entries_at(d->cache, t->position + t->count) - t->entries;
    return true;
}

static const quern_dsv4_layer_cache *cache_of(const op_build *b)
{
    return layer_batch_of(b->call)->cache;
}

/* Slots of a page of entries and keys; without pages a sequence's are one. */
static int64_t page_of(const quern_dsv4_layer_cache *c)
{
    return c->params.page > 0 ? c->params.page : c->entries > 0 ? c->entries : 1;
}

/* The memory of an area: [sequences, rows, columns]; a pool [pages, page, columns], or as bytes [pages,
 * page columns]. */
static quern_tensor area_of(const op_build *b, layer_area area)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const layer_plane *plane = &c->plane[area];
    const bool bytes = plane->format != QUERN_DSV4_ROWS;
    const int64_t page = c->params.page,
                  rows[] = {c->params.sequences, area == LAYER_RAW ? c->kept : c->entries, plane->columns},
                  pool[] = {c->params.pages, page, plane->columns},
                  packed[] = {c->params.pages, page * plane->columns};
    if (!plane->paged) return view_on(&b->call->like, op_address(plane->base), plane->dtype, 3, rows);
    return view_on(&b->call->like, op_address(plane->base), plane->dtype, bytes ? 2 : 3,
                   bytes ? packed : pool);
}

/* The floats of all sequences' states of the compressor (0) or the indexer (1), a row a sequence. */
static quern_tensor states_of(const op_build *b, int which)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const pool_state *first = (const pool_state *)(which == 1 ? c->sequence[0].index : c->sequence[0].main);
    if (first == NULL) return (quern_tensor){0};
    const int64_t shape[] = {c->params.sequences, pool_floats_of(first)};
    quern_tensor t = view_on(&b->call->like, op_address(pool_state_data(first)), QUERN_F32, 2, shape);
    t.strides[0] = (int64_t)((c->state_bytes[0] + c->state_bytes[1]) / sizeof(float));
    return t;
}

/* Entries that so many tokens of the call's sequences complete, at most, wherever these stand. */
static int64_t entries_most(const op_build *b)
{
    const int64_t ratio = cache_of(b)->params.ratio;
    return ratio > 0 ? b->call->symbol[LS_T] / ratio + layer_batch_of(b->call)->batch : 0;
}

/* The memory of what the books say, which does not depend on what these hold. */
static layer_step *take_step(op_build *b)
{
    const layer_batch *d = layer_batch_of(b->call);
    layer_step *s = &((layer_decode_call *)b->call)->step;
    const int64_t batch = d->batch, more = batch + 1, runs[] = {batch, 3}, tokens = b->call->symbol[LS_T],
                  entries = entries_most(b),
                  columns[] = {batch, d->cache->columns > 1 ? d->cache->columns : 1};
    quern_tensor *const longs[] = {&s->slots, &s->copies},
                        *const ints[] = {&s->positions, &s->merged[0], &s->merged[1]},
                        *const ends[] = {&s->cu, &s->cu_raw},
                        *const copies[] = {&s->old, &s->kept, &s->copied, &s->returned};
    for (int i = 0; i < 2; i++) *longs[i] = op_room(b, QUERN_I64, 1, &batch);
    for (int i = 0; i < 3; i++) *ints[i] = op_room(b, QUERN_I32, 1, &batch);
    for (int i = 0; i < 2; i++) *ends[i] = op_room(b, QUERN_I32, 1, &more);
    for (int i = 0; i < 4; i++) *copies[i] = op_room(b, QUERN_I64, 2, runs);
    s->at = op_room(b, QUERN_I32, 1, &tokens);
    s->raw_slots = op_room(b, QUERN_I64, 1, &tokens);
    s->entry_slots = op_room(b, QUERN_I64, 1, &entries);
    s->table = op_room(b, QUERN_I32, 2, columns);
    return s;
}

static void write_run(int64_t *runs, int64_t b, int64_t from, int64_t to, int64_t count)
{
    runs[3 * b] = from;
    runs[3 * b + 1] = to;
    runs[3 * b + 2] = count;
}

/* Where the turn's new rows stand: raw ones among those of the call, entries and keys in the cache. */
static void write_rows(const layer_step *s, const turn *t, const quern_dsv4_layer_cache *c,
                       const op_frame *frame)
{
    int32_t *at = op_placed(s->at.data, frame), *table = op_placed(s->table.data, frame);
    int64_t *raw = op_placed(s->raw_slots.data, frame), *entry = op_placed(s->entry_slots.data, frame);
    const int64_t page = page_of(c), columns = s->table.shape[1], pages = c->sequence[t->id].pages;
    if (c->params.page == 0) table[t->b] = (int32_t)t->id;
    for (int64_t i = 0; i < pages; i++) table[t->b * columns + i] = c->table[t->id * c->columns + i];
    for (int64_t i = 0; i < t->count; i++) {
        at[t->row + i] = (int32_t)(t->position + i);
        raw[t->row + i] = t->raw_row + t->raw + i;
    }
    for (int64_t i = t->entries; i < t->entries + t->made; i++)
        entry[t->entry + i - t->entries] = table[t->b * columns + i / page] * page + i % page;
}

void layer_begin_decode(const op_call *call, const op_frame *frame)
{
    const quern_dsv4_layer_cache *c = layer_batch_of(call)->cache;
    const layer_step *s = &((const layer_decode_call *)call)->step;
    int64_t *slots = op_placed(s->slots.data, frame), *copies = op_placed(s->copies.data, frame),
            *old = op_placed(s->old.data, frame), *kept = op_placed(s->kept.data, frame),
            *copied = op_placed(s->copied.data, frame), *returned = op_placed(s->returned.data, frame);
    int32_t *positions = op_placed(s->positions.data, frame), *cu = op_placed(s->cu.data, frame),
            *cu_raw = op_placed(s->cu_raw.data, frame);
    turn t = {.b = -1};
    while (next_turn(call, &t)) {
        const quern_dsv4_state *const states[] = {c->sequence[t.id].main, c->sequence[t.id].index};
        const int64_t have = t.raw + t.count, last = have < c->kept ? have : c->kept;
        slots[t.b] = t.id;
        copies[t.b] = t.b;
        positions[t.b] = (int32_t)t.position;
        cu[t.b] = (int32_t)t.row;
        cu_raw[t.b] = (int32_t)t.raw_row;
        for (int i = 0; i < 2; i++)
            ((int32_t *)op_placed(s->merged[i].data, frame))[t.b] =
                states[i] != NULL ? (int32_t)(t.position - ((const pool_state *)states[i])->held) : 0;
        write_run(old, t.b, t.id * c->kept, t.raw_row, t.raw);
        write_run(kept, t.b, t.raw_row + have - last, t.id * c->kept, last);
        write_run(copied, t.b, t.id, t.b, 1);
        write_run(returned, t.b, t.b, t.id, 1);
        write_rows(s, &t, c, frame);
    }
    cu[t.b] = (int32_t)t.row;
    cu_raw[t.b] = (int32_t)t.raw_row;
    int64_t *entry = op_placed(s->entry_slots.data, frame);
    for (int64_t i = t.entry; i < s->entry_slots.shape[0]; i++) entry[i] = -1;
}

static void copy_runs(op_build *b, const quern_tensor *runs, const quern_tensor *x, const quern_tensor *out)
{
    *OP_ADD(b, copy_rows) = (copy_rows_args){.runs = *runs, .x = *x, .out = *out};
}

/* Stores f32 rows, made for a tensor of the call, in the format of an area. page 0: `to` has no pages. */
static void store(op_build *b, layer_area area, int32_t made_for, const quern_tensor *rows,
                  const quern_tensor *slots, int64_t page, const quern_tensor *to)
{
    *OP_ADD(b, store_rows) = (store_rows_args){.format = dsv4_entry_format(cache_of(b)->plane[area].format),
                                               .page = page,
                                               .x = *rows,
                                               .slots = *slots,
                                               .cache = *to};
    op_made_for(b, made_for);
}

/* A compressor's states, and the memory of what the call makes by them. */
typedef struct compressor {
    int which;
    quern_tensor states, copies; /* copies: absent where no row can be refused */
    quern_tensor made;           /* f32 [S, width] */
} compressor;

/* Appends the tokens to a compressor's states, and stores the new entries. */
static compressor append(op_build *b, const layer_step *s, const quern_tensor *proj, int which)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const layer_area area = which == 1 ? LAYER_KEYS : LAYER_ENTRIES;
    const int32_t first = which == 1 ? DL(indexer_bias) : DL(compressor_bias);
    const quern_tensor bias = layer_view(b, first), cache = area_of(b, area);
    compressor x = {.which = which, .states = states_of(b, which)};
    if (proj->ndim == 0) return x;
    x.made = op_matrix(b, QUERN_F32, entries_most(b), c->plane[area].width);
    if (c->params.format != QUERN_DSV4_ROWS || c->params.key_format != QUERN_DSV4_ROWS) {
        x.copies = op_matrix(b, QUERN_F32, layer_batch_of(b->call)->batch, x.states.shape[1]);
        copy_runs(b, &s->copied, &x.states, &x.copies);
    }
    const bool copies = x.copies.ndim > 0;
    pool_append_args *args = OP_ADD(b, pool_append);
    pool_append_part *part = &args->part[0];
    args->ratio = b->call->symbol[LS_R];
    args->ring = c->params.ring;
    args->overlap = c->params.kind == QUERN_DSV4_LAYER_CSA;
    args->step = (stage_step){copies ? s->copies : s->slots, s->positions, view_ranges(&s->cu)};
    part->width = c->plane[area].width;
    part->merged = s->merged[which];
    part->state = copies ? x.copies : x.states;
    part->proj = *proj;
    part->entry = layer_entry(b, first);
    part->out = x.made;
    layer_biases(&bias, part->width, &part->bias_a, &part->bias_b);
    store(b, area, which == 1 ? DL(idx_k) : DL(compressed), &x.made, &s->entry_slots, page_of(c), &cache);
    return x;
}

/* The choice of entries, idx [T, k] and count [T, 1]. */
static void choose(op_build *b, const layer_step *s, const layer_parts *parts, quern_tensor *idx,
                   quern_tensor *count)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const int64_t tokens = parts->x.shape[0];
    const quern_tensor q = op_matrix(b, parts->x.dtype, tokens, b->call->symbol[LS_HICI]),
                       q_by_head = layer_heads(&q, 1, b->call->symbol[LS_HI]), keys = area_of(b, LAYER_KEYS),
                       scores = layer_view(b, DL(idx_score));
    *idx = op_matrix(b, QUERN_I32, tokens, b->call->symbol[LS_K]);
    *count = op_matrix(b, QUERN_I32, tokens, 1);
    layer_rotate(b, &parts->index_q_in, &q, 1, b->call->symbol[LS_HI], &s->at, false, OP_NONE);
    indexer_args *args = layer_choose(b, &q, &keys, &parts->heads, idx, count, 1);
    args->format = dsv4_entry_format(c->plane[LAYER_KEYS].format);
    args->page = page_of(c);
    args->table = s->table;
    args->cu = s->cu;
    args->positions = s->positions;
    if (scores.ndim > 0) args->scores = view_with_batch(&scores);
    op_give(b, DL(idx_q), &q_by_head);
    op_give(b, DL(idx_topk), idx);
}

/* The core to [T, H D]. */
static quern_tensor attend(op_build *b, const layer_step *s, const layer_parts *parts,
                           const quern_tensor *raw)
{
    const quern_dsv4_layer_cache *c = cache_of(b);
    const quern_tensor kv = view_with_batch(raw), unrotated = layer_view(b, DL(core));
    const int64_t tokens = parts->x.shape[0];
    layer_states states = {.batch = 1, .sinks = parts->sinks};
    quern_tensor entries = {0}, to = {0};
    states.q = op_matrix(b, parts->x.dtype, tokens, b->call->symbol[LS_HD]);
    states.core = op_matrix(b, parts->x.dtype, tokens, b->call->symbol[LS_HD]);
    layer_rotate(b, &parts->q_in, &states.q, 1, b->call->symbol[LS_H], &s->at, true, OP_NONE);
    layer_give_q(b, &states.q, 1);
    if (parts->index.ndim > 0) choose(b, s, parts, &states.idx, &states.count);
    if (parts->main.ndim > 0) entries = area_of(b, LAYER_ENTRIES);
    if (unrotated.ndim > 0) to = view_with_batch(&unrotated);
    attend_mqa_args args = layer_core(b, &states, &kv, &entries);
    args.format = dsv4_entry_format(c->params.format);
    args.positions = s->positions;
    args.seqs.batch = layer_batch_of(b->call)->batch;
    args.seqs.cu_q = s->cu;
    args.seqs.cu_kv = s->cu_raw;
    if (entries.ndim > 0) {
        args.page = page_of(c);
        args.entries_table = s->table;
    }
    layer_attend(b, &args, &s->at, &to);
    return states.core;
}

/* Converts f32 rows to a result of the call, if it has that result. */
static void give_rows(op_build *b, int32_t tensor, const quern_tensor *rows)
{
    const quern_tensor to = layer_view(b, tensor), in = layer_heads(rows, 1, 1), out = layer_heads(&to, 1, 1);
    if (to.ndim > 0 && rows->ndim > 0) layer_change(b, &in, &out);
}

void layer_build_decode(op_build *b)
{
    const layer_parts parts = layer_project(b);
    const layer_step *s = take_step(b);
    const layer_plane *plane = &cache_of(b)->plane[LAYER_RAW];
    const int64_t *symbol = b->call->symbol;
    const int64_t rows = symbol[LS_T] + layer_batch_of(b->call)->batch * cache_of(b)->kept;
    const quern_tensor area = area_of(b, LAYER_RAW), kv = op_matrix(b, QUERN_F32, symbol[LS_T], symbol[LS_D]),
                       raw = op_matrix(b, plane->dtype, rows, plane->columns);
    quern_tensor cached;
    (void)view_flatten(&area, &cached); /* it is contiguous */
    layer_rotate(b, &parts.kv_in, &kv, 1, 1, &s->at, true, DL(kv_norm));
    copy_runs(b, &s->old, &cached, &raw);
    store(b, LAYER_RAW, DL(kv_rows), &kv, &s->raw_slots, 0, &raw);
    const compressor main = append(b, s, &parts.main, 0), index = append(b, s, &parts.index, 1);
    const quern_tensor core = attend(b, s, &parts, &raw), o_a_out = layer_project_groups(b, &core);
    layer_project_out(b, &o_a_out);
    const quern_tensor by_head = layer_heads(&core, 1, symbol[LS_H]),
                       groups = layer_heads(&o_a_out, 1, symbol[LS_G]);
    op_give(b, DL(q_residual), &parts.residual);
    give_rows(b, DL(kv_rows), &kv);
    const quern_tensor entries = layer_rows(&main.made, 0, symbol[LS_S]),
                       keys = layer_rows(&index.made, 0, symbol[LS_S]);
    give_rows(b, DL(compressed), &entries);
    give_rows(b, DL(idx_k), &keys);
    op_give(b, DL(core_irope), &by_head);
    op_give(b, DL(o_a_out), &groups);
    copy_runs(b, &s->kept, &raw, &cached);
    if (main.copies.ndim > 0) copy_runs(b, &s->returned, &main.copies, &main.states);
    if (index.copies.ndim > 0) copy_runs(b, &s->returned, &index.copies, &index.states);
}

static void commit(const layer_batch *d)
{
    for (int64_t b = 0; b < d->batch; b++) {
        layer_sequence *s = &d->cache->sequence[d->sequences[b]];
        const int64_t count = d->counts[b], ring = d->cache->params.ring, kept = d->cache->kept;
        s->tokens += count;
        s->held = s->held + count < ring ? s->held + count : ring;
        s->raw = s->raw + count < kept ? s->raw + count : kept;
        if (s->main != NULL) dsv4_state_advance((pool_state *)s->main, count, false);
        if (s->index != NULL) dsv4_state_advance((pool_state *)s->index, count, false);
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
