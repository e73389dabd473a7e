/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.c - what the calls over a cache share: checks of their batch and tensors, and what the cache's books
 * say of their sequences, which is written into the workspace, where the program's steps read it. */
#include "cache/cache.h"

#include "core/error.h"
#include "core/view.h"

#include <inttypes.h>

/* Whether a sequence stands earlier in the batch. */
static bool stands_before(const quern_cache_batch *b, int64_t i)
{
    for (int64_t j = 0; j < i; j++)
        if (b->sequences[j] == b->sequences[i]) return true;
    return false;
}

static quern_status check_count(const quern_cache *cache, const quern_cache_batch *b, int64_t i, bool appends,
                                int64_t tokens)
{
    const quern_cache_params *p = &cache->layout.params;
    const int64_t has = cache->sequences[b->sequences[i]].tokens;
    int64_t most = appends ? p->capacity - has : has;
    if (p->separate_win && p->step < most) most = p->step;
    if (b->counts[i] < 0 || b->counts[i] > most)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "counts[%" PRId64 "] is %" PRId64 ": 0 to %" PRId64
                         " tokens of sequence %d are accepted",
                         i, b->counts[i], most, b->sequences[i]);
    if (b->counts[i] > INT32_MAX - tokens)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "counts[%" PRId64 "] is %" PRId64 ": %d tokens in all are accepted", i, b->counts[i],
                         INT32_MAX);
    return QUERN_OK;
}

quern_status cache_take_batch(cache_call *call, const quern_cache *cache, const quern_cache_batch *given,
                              bool appends)
{
    call->cache = cache;
    call->appends = appends;
    call->batch = (quern_cache_batch)QUERN_CACHE_BATCH_INIT;
    call->tokens = 0;
    quern_cache_batch *b = &call->batch;
    quern_status status = cache_check(cache);
    if (status == QUERN_OK) status = op_struct(b, given, "batch", "QUERN_CACHE_BATCH_INIT");
    if (status != QUERN_OK) return status;
    const quern_cache_params *p = &cache->layout.params;
    if (b->batch < 0 || b->batch > p->sequences)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "batch is %" PRId64 ": 0 to the cache's %" PRId64 " sequences are accepted",
                         b->batch, p->sequences);
    if (b->batch > 0 && (b->sequences == NULL || b->counts == NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: an array of batch entries is needed",
                         b->sequences == NULL ? "sequences" : "counts");
    if (b->batch > 0 && (status = cache_check_table_given(cache, b->table)) != QUERN_OK) return status;
    for (int64_t i = 0; i < b->batch; i++) {
        if (b->sequences[i] < 0 || b->sequences[i] >= p->sequences)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "sequences[%" PRId64 "] is %d: 0 to %" PRId64 " is accepted", i, b->sequences[i],
                             p->sequences - 1);
        if (stands_before(b, i))
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "sequences[%" PRId64 "] is %d again: each is accepted once", i, b->sequences[i]);
        if ((status = check_count(cache, b, i, appends, call->tokens)) != QUERN_OK) return status;
        call->tokens += b->counts[i];
    }
    return QUERN_OK;
}

const op_tensor cache_decode_tensors[DECODE_TENSORS] = {
    {"q", "Q", OP_ACTIVATION, OP_NONE, {DECODE_T, DECODE_H, DECODE_D}, {0}},
    {"o", "O", OP_ACTIVATION, OP_NONE, {DECODE_T, DECODE_H, DECODE_DV}, {0}},
    {"lse", "lse", OP_F32, OP_NONE, {DECODE_H, DECODE_T}, {0}},
    {"w_gate", "w_gate", OP_WEIGHT, OP_NONE, {DECODE_H, DECODE_3, DECODE_D}, {0}},
    {"gates", "gates", OP_F32, OP_NONE, {DECODE_T, DECODE_H, DECODE_3}, {0}},
    {"block_idx", "block_idx", OP_I32, OP_NONE, {DECODE_HS, DECODE_T, DECODE_K}, {0}},
    {"block_count", "block_count", OP_I32, OP_NONE, {DECODE_HS, DECODE_T}, {0}},
    {"sink", "sink", OP_F32, OP_NONE, {DECODE_H}, {0}},
};

quern_status cache_find_like(op_call *call, int32_t first)
{
    const quern_tensor *t = call->given[first];
    const char *name = call->family->tensors[first].field;
    if (t == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", name);
    call->varlen = true; /* views of tokens get a leading extent of 1 */
    call->like = *t;
    call->like.dtype = cache_params_of(call)->dtype;
    if (t->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s is on device %d: the cpu keeps caches", name,
                         (int)t->device);
    return op_check_activation(call, first, 3);
}

quern_status cache_derive_decode(op_call *call)
{
    const quern_cache_params *p = cache_params_of(call);
    const quern_tensor *q = call->given[DD(q)];
    int64_t *s = call->symbol;
    quern_status status = view_check_order(q, call->given[DD(o)]);
    if (status == QUERN_OK) status = cache_find_like(call, DD(q));
    if (status != QUERN_OK) return status;
    s[DECODE_T] = cache_call_of(call)->tokens;
    s[DECODE_H] = q->shape[1];
    s[DECODE_D] = p->dim;
    s[DECODE_DV] = p->dim_v;
    s[DECODE_3] = 3;
    return view_check_heads(s[DECODE_H], p->kv_heads, s[DECODE_T]);
}

quern_status cache_check_data(const op_call *call, void *const *data)
{
    (void)data;
    return cache_check_pages(cache_call_of(call));
}

stage_step cache_step(op_build *b)
{
    cache_call *c = (cache_call *)b->call;
    const int64_t batch = c->batch.batch, more = batch + 1;
    c->slots = op_room(b, QUERN_I32, 1, &batch);
    c->positions = op_room(b, QUERN_I32, 1, &batch);
    c->cu = op_room(b, QUERN_I32, 1, &more);
    return (stage_step){c->slots, c->positions, view_ranges(&c->cu)};
}

void cache_write_step(const op_call *call, const op_frame *frame)
{
    const cache_call *c = (const cache_call *)call;
    int32_t *slots = op_placed(c->slots.data, frame), *positions = op_placed(c->positions.data, frame),
            *cu = op_placed(c->cu.data, frame);
    cu[0] = 0;
    for (int64_t i = 0; i < c->batch.batch; i++) {
        const int64_t count = c->batch.counts[i], tokens = c->cache->sequences[c->batch.sequences[i]].tokens;
        slots[i] = c->batch.sequences[i];
        positions[i] = (int32_t)(c->appends ? tokens : tokens - count);
        cu[i + 1] = (int32_t)(cu[i] + count);
    }
}

cache_plane cache_steps_plane(const cache_call *call, cache_kind kind)
{
    cache_plane plane = cache_plane_of(call->cache, kind, call->batch.table);
    plane.blocks.data = op_address(plane.blocks.data);
    if (plane.table.ndim > 0) plane.table.data = op_address(plane.table.data);
    return plane;
}
