/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * replays.c - a small hash table without locks.
 *
 * The key of a slot finds a call quickly. What decides is the whole call, strides included, of which a replay
 * keeps a copy: a call with another's key and other stages gets no replay. A call that was seen once gives
 * its slot to the next one; a slot with a replay keeps it.
 */
#include "runtime/replays.h"

#include "core/op.h"

#include <stdlib.h>
#include <string.h>

enum { TRIES = 4 };

struct kept_replay {
    const quern_backend *backend;
    void *replay;
    const void *stream; /* launches of one graph run one after the other, those of two streams need not */
    size_t bytes;
    char call[]; /* with the family's part */
};

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

static uint64_t key_of(const op_call *call, const void *stream)
{
    uint64_t hash = mix((uintptr_t)call->family, (uint64_t)call->operation);
    hash = mix(hash, (uintptr_t)stream);
    hash = mix(hash, (uint64_t)call->like.device_id << 32 | (uint64_t)call->like.dtype);
    for (int32_t i = 0; i < OP_SYMBOLS_MAX; i++) hash = mix(hash, (uint64_t)call->symbol[i]);
    return hash != 0 ? hash : 1;
}

static void close_kept(struct kept_replay *kept)
{
    if (kept->replay != NULL) kept->backend->replay_close(kept->replay);
    free(kept);
}

static struct kept_replay *keep(const op_call *call, const void *stream)
{
    const size_t bytes = op_call_bytes(call);
    struct kept_replay *kept = malloc(sizeof *kept + bytes);
    if (kept == NULL) return NULL;
    kept->backend = call->backend;
    kept->stream = stream;
    kept->bytes = bytes;
    memcpy(kept->call, call, bytes);
    kept->replay = call->backend->replay_open(&call->exec, OP_ADDRESSES_BYTES);
    if (kept->replay != NULL) return kept;
    close_kept(kept);
    return NULL;
}

static bool is_of(const struct kept_replay *kept, const op_call *call, const void *stream)
{
    return kept->stream == stream && kept->bytes == op_call_bytes(call) &&
           memcmp(kept->call, call, kept->bytes) == 0;
}

void *replays_find(replays *all, const op_call *call, const void *stream)
{
    if (call->backend->replay == NULL) return NULL;
    const uint64_t key = key_of(call, stream);
    for (size_t i = 0; i < TRIES; i++) {
        const size_t at = ((size_t)(key >> 32) + i) % REPLAYS_MAX;
        uint_fast64_t there = atomic_load_explicit(&all->slot[at].key, memory_order_relaxed);
        struct kept_replay *kept = atomic_load_explicit(&all->slot[at].kept, memory_order_acquire);
        if (kept != NULL) {
            if (is_of(kept, call, stream)) return kept->replay;
        } else if (there == key) {
            struct kept_replay *own = keep(call, stream);
            if (own == NULL) return NULL;
            if (atomic_compare_exchange_strong(&all->slot[at].kept, &kept, own)) return own->replay;
            close_kept(own);
            return NULL;
        } else if (atomic_compare_exchange_strong(&all->slot[at].key, &there, key)) {
            return NULL;
        }
    }
    return NULL;
}

void replays_close(replays *all)
{
    for (size_t i = 0; i < REPLAYS_MAX; i++) {
        struct kept_replay *kept = atomic_load_explicit(&all->slot[i].kept, memory_order_acquire);
        if (kept != NULL) close_kept(kept);
    }
}
