/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_decode.c - the layer on new tokens of sequences that a cache holds.
 *
 * Projections are products over the tokens of all sequences, so that weights are read once. Between them each
 * sequence goes alone, from its own position on:
 *
 *   norm_rope    queries; raw rows, behind those of the cache
 *   pool_append  into the compressors' states; new entries and keys go straight to the cache
 *   indexer, attend_mqa
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/layer.h"

/* Rows of a sequence's area as [1, rows, columns]. */
static quern_tensor cached(const layer_pass *p, int64_t id, layer_area area, int64_t first, int64_t rows)
{
    const quern_dsv4_layer_cache *c = layer_batch_of(&p->call->head)->cache;
    const int64_t columns = area == LAYER_KEYS ? c->params.index_dim : c->params.dim,
                  shape[] = {1, rows, columns};
    const char *at =
        layer_area_of(c, id, area) + (size_t)(first * columns) * quern_dtype_size(c->params.dtype);
    return view_on(&p->call->head.like, op_address(at), c->params.dtype, 3, shape);
}

/* Rows [first, first + count) of a result [T, ..] of the call; absent where it is not wanted. */
static quern_tensor result_rows(const layer_pass *p, dsv4_layer_tensor tensor, int64_t first, int64_t count)
{
    return layer_rows(&p->call->view[tensor], first, count);
}

/* Where a call stands in its batch, and the sequence that it comes to. */
typedef struct turn {
    int64_t id, row, count;       /* rows of the call's tokens */
    int64_t position, raw;        /* tokens and raw rows that the cache has */
    int64_t entries, made, entry; /* whole before, made now, the first of them in the call's results */
} turn;

/* Appends the turn's tokens to a compressor's state. The new entries go to the cache. */
static void append(layer_pass *p, const turn *t, const quern_tensor *proj, dsv4_layer_tensor first,
                   layer_area area)
{
    const quern_dsv4_layer_cache *c = layer_batch_of(&p->call->head)->cache;
    const layer_sequence *s = &c->sequence[t->id];
    pool_state *state = (pool_state *)(area == LAYER_KEYS ? s->index : s->main);
    const int64_t cu[] = {0, t->count};
    const quern_tensor rows = cached(p, t->id, area, t->entries, t->made);
    pool_append_args args = {.batch = 1,
                             .states = &state,
                             .cu = cu,
                             .proj = layer_rows(proj, t->row, t->count),
                             .entry = layer_entry(p, first)};
    (void)view_flatten(&rows, &args.out); /* it is contiguous */
    layer_biases(&p->call->view[first], args.out.shape[1], &args.bias_a, &args.bias_b);
    layer_pool_append(p, &args);
    const quern_tensor to = result_rows(p, area == LAYER_KEYS ? DL_IDX_K : DL_COMPRESSED, t->entry, t->made);
    if (to.ndim > 0) layer_copy(p, &rows, &to);
}

/* The turn's choice of entries, idx [count, k] and count [count, 1]. */
static void choose(layer_pass *p, const turn *t, const layer_parts *parts, const quern_tensor *idx,
                   const quern_tensor *count)
{
    const int64_t seen = t->entries + t->made;
    const quern_tensor keys = cached(p, t->id, LAYER_KEYS, 0, seen),
                       in = layer_rows(&parts->index_q_in, t->row, t->count),
                       q = layer_room(p, parts->x.dtype, t->count, p->symbol[LS_HICI]),
                       heads = layer_rows(&parts->heads, t->row, t->count),
                       q_by_head = layer_heads(&q, 1, p->symbol[LS_HI]);
    quern_tensor scores = result_rows(p, DL_IDX_SCORE, t->row, t->count);
    view_narrow(&scores, 1, 0, seen);
    if (scores.ndim > 0) scores = view_with_batch(&scores);
    layer_make_index_q(p, &in, &q, 1, t->position);
    layer_choose(p, &q, &keys, &heads, t->position, idx, count, &scores);
    const quern_tensor to_q = result_rows(p, DL_IDX_Q, t->row, t->count),
                       to_idx = result_rows(p, DL_IDX_TOPK, t->row, t->count);
    if (to_q.ndim > 0) layer_copy(p, &q_by_head, &to_q);
    if (to_idx.ndim > 0) layer_copy(p, idx, &to_idx);
}

/* The turn's raw rows, [raw + count, D]: those of the cache, then the new ones. */
static quern_tensor extend_raw(layer_pass *p, const turn *t, const layer_parts *parts)
{
    const quern_tensor all = layer_room(p, parts->x.dtype, t->raw + t->count, p->symbol[LS_D]),
                       before = layer_rows(&all, 0, t->raw), now = layer_rows(&all, t->raw, t->count),
                       in = layer_rows(&parts->kv_in, t->row, t->count),
                       had = cached(p, t->id, LAYER_RAW, 0, t->raw),
                       to = result_rows(p, DL_KV_ROWS, t->row, t->count);
    layer_copy(p, &had, &before);
    layer_make_kv(p, &in, &now, 1, t->position);
    if (to.ndim > 0) layer_copy(p, &now, &to);
    return all;
}

/* The turn's queries; [H, T, D] of the call's result are those of all tokens. */
static quern_tensor make_q(layer_pass *p, const turn *t, const layer_parts *parts)
{
    const quern_tensor q = layer_room(p, parts->x.dtype, t->count, p->symbol[LS_HD]),
                       in = layer_rows(&parts->q_in, t->row, t->count);
    layer_make_q(p, &in, &q, 1, t->position);
    quern_tensor to = p->call->view[DL_Q];
    if (to.ndim == 0) return q;
    quern_tensor by_head = layer_heads(&q, p->symbol[LS_H], 1);
    by_head.ndim = 3;
    by_head.shape[1] = t->count;
    by_head.shape[2] = by_head.shape[3] = p->symbol[LS_D];
    by_head.strides[0] = p->symbol[LS_D];
    by_head.strides[1] = p->symbol[LS_HD];
    by_head.strides[2] = 1;
    view_narrow(&to, 1, t->row, t->count);
    layer_copy(p, &by_head, &to);
    return q;
}

static void attend(layer_pass *p, const turn *t, const layer_parts *parts, const quern_tensor *core)
{
    const quern_dsv4_layer_cache *c = layer_batch_of(&p->call->head)->cache;
    const bool csa = parts->index.ndim > 0;
    quern_tensor idx = {0}, count = {0}, entries = {0};
    const quern_tensor q = make_q(p, t, parts), raw = extend_raw(p, t, parts), kv = view_with_batch(&raw),
                       o = layer_rows(core, t->row, t->count);
    if (parts->main.ndim > 0) {
        append(p, t, &parts->main, DL_COMPRESSOR, LAYER_ENTRIES);
        entries = cached(p, t->id, LAYER_ENTRIES, 0, t->entries + t->made);
    }
    if (csa) {
        idx = layer_room(p, QUERN_I32, t->count, p->symbol[LS_K]);
        count = layer_room(p, QUERN_I32, t->count, 1);
        append(p, t, &parts->index, DL_INDEXER, LAYER_KEYS);
        choose(p, t, parts, &idx, &count);
    }
    quern_tensor unrotated = result_rows(p, DL_CORE, t->row, t->count);
    if (unrotated.ndim > 0) unrotated = view_with_batch(&unrotated);
    const attend_mqa_args args = layer_core(p, &parts->sinks, &q, &kv, &entries, &idx, &count, t->position);
    layer_attend(p, &args, &o, &unrotated);
    const int64_t have = t->raw + t->count, kept = have < c->kept ? have : c->kept;
    const quern_tensor last = layer_rows(&raw, have - kept, kept), to = cached(p, t->id, LAYER_RAW, 0, kept);
    layer_copy(p, &last, &to);
}

void layer_decode(layer_pass *p)
{
    const layer_batch *d = layer_batch_of(&p->call->head);
    const layer_parts parts = layer_project(p);
    const quern_tensor core = layer_room(p, parts.x.dtype, parts.x.shape[0], p->symbol[LS_HD]);
    turn t = {.row = 0};
    for (int64_t b = 0; b < d->batch; b++) {
        const layer_sequence *s = &d->cache->sequence[d->sequences[b]];
        t.id = d->sequences[b];
        t.count = d->counts[b];
        t.position = s->tokens;
        t.raw = s->raw;
        t.entries = layer_entries_at(d->cache, t.position);
        t.made = layer_entries_at(d->cache, t.position + t.count) - t.entries;
        if (t.count > 0) attend(p, &t, &parts, &core);
        t.row += t.count;
        t.entry += t.made;
    }
    const quern_tensor o_a_out = layer_project_groups(p, &core);
    layer_project_out(p, &o_a_out);
    const quern_tensor by_head = layer_heads(&core, 1, p->symbol[LS_H]),
                       groups = layer_heads(&o_a_out, 1, p->symbol[LS_G]);
    layer_give(p, DL_Q_RESIDUAL, &parts.residual);
    layer_give(p, DL_CORE_IROPE, &by_head);
    layer_give(p, DL_O_A_OUT, &groups);
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
