/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kept_calls.c - which call is the same as an earlier one. */
#include "runtime/kept_calls.h"

#include "core/op.h"

#include <string.h>

enum { TRIES = 4, ALIGNMENT = 16 };

/* The bytes that a struct of the caller says it has. */
static size_t size_of(const void *given)
{
    size_t size = 0;
    if (given != NULL) memcpy(&size, given, sizeof size);
    return size;
}

static const quern_tensor *const *tensors_of(const call_request *request)
{
    return (const quern_tensor *const *)((const char *)request->tensors + sizeof(size_t));
}

static int32_t count_of(const call_request *request)
{
    return (int32_t)(size_of(request->tensors) / sizeof(void *)) - 1;
}

static uint64_t mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 32;
}

static uint64_t key_of(const call_request *request)
{
    const quern_tensor *const *given = tensors_of(request);
    const char *params = request->params;
    const size_t bytes = size_of(params);
    const int32_t count = count_of(request);
    uint64_t hash = mix((uintptr_t)request->family, (uint64_t)request->operation), word;
    for (size_t at = sizeof word; at + sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, params + at, sizeof word);
        hash = mix(hash, word);
    }
    for (int32_t i = 0; i < count; i++) {
        const quern_tensor *t = given[i];
        if (t == NULL) continue;
        word = (uint64_t)i << 32 ^ (uint64_t)t->dtype << 40;
        if (t->ndim > 0) word ^= (uint64_t)t->shape[0];
        if (t->ndim > 1) word ^= (uint64_t)t->shape[1] << 20;
        hash = mix(hash, word);
    }
    return hash != 0 ? hash : 1;
}

static const op_call *call_in(const kept_call *slot)
{
    return (const op_call *)(const void *)slot->bytes;
}

/* Whether a tensor is of the kind of one that was kept; `alignment` of its address is of weight (0: it has no
 * elements, or the call does not use it). */
static bool is_alike(const quern_tensor *t, const quern_tensor *kept, uint8_t alignment)
{
    if (t->dtype != kept->dtype || t->device != kept->device || t->device_id != kept->device_id ||
        t->ndim != kept->ndim || (alignment > 0 && op_alignment_of(t) != alignment))
        return false;
    for (int32_t d = 0; d < kept->ndim; d++)
        if (t->shape[d] != kept->shape[d] || t->strides[d] != kept->strides[d]) return false;
    return true;
}

static bool holds(const kept_call *slot, const call_request *request)
{
    const op_call *call = call_in(slot);
    if (slot->params_at == 0 || call->family != request->family || call->operation != request->operation ||
        slot->tensor_count != count_of(request) || slot->params_bytes != size_of(request->params) ||
        memcmp(slot->bytes + slot->params_at, request->params, slot->params_bytes) != 0)
        return false;
    const quern_tensor *const *given = tensors_of(request);
    const quern_tensor *kept = (const quern_tensor *)(const void *)(slot->bytes + slot->tensors_at);
    for (int32_t i = 0; i < slot->tensor_count; i++)
        if (given[i] == NULL ? kept[i].ndim >= 0 : !is_alike(given[i], &kept[i], call->alignment[i]))
            return false;
    return true;
}

/* The slot of a key, or the first of those that it may have. */
static kept_call *slot_of(kept_calls *all, uint64_t key, bool *seen)
{
    const size_t first = (size_t)(key >> 32) % KEPT_CALLS;
    for (size_t i = 0; i < TRIES; i++) {
        kept_call *slot = &all->slot[(first + i) % KEPT_CALLS];
        const uint64_t there = atomic_load_explicit(&slot->key, memory_order_relaxed);
        *seen = there == key;
        if (*seen || there == 0) return slot;
    }
    return &all->slot[first];
}

kept_call *kept_calls_take(kept_calls *all, const call_request *request, const op_call **call,
                           const op_used **used)
{
    bool seen;
    *call = NULL;
    *used = NULL;
    if (request->params == NULL || request->tensors == NULL || request->family->adapt != NULL ||
        size_of(request->params) > QUERN_OP_PARAMS_BYTES || count_of(request) < 0 ||
        count_of(request) > request->family->tensor_count)
        return NULL;
    const uint64_t key = key_of(request);
    kept_call *slot = slot_of(all, key, &seen);
    if (!seen) {
        atomic_store_explicit(&slot->key, key, memory_order_relaxed);
        return NULL;
    }
    if (atomic_exchange_explicit(&slot->taken, true, memory_order_acquire)) return NULL;
    if (!holds(slot, request)) return slot;
    *call = call_in(slot);
    *used = (const op_used *)(const void *)(slot->bytes + slot->used_at);
    return slot;
}

static size_t round_up(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

void kept_call_fill(kept_call *slot, const call_request *request, const op_call *call, const op_used *used)
{
    const size_t params_at = round_up(op_call_bytes(call)), params_bytes = size_of(request->params),
                 tensors_at = round_up(params_at + params_bytes);
    const int32_t count = count_of(request);
    const size_t used_at = round_up(tensors_at + (size_t)count * sizeof(quern_tensor));
    const quern_tensor *const *given = tensors_of(request);
    slot->params_at = 0;
    if (call->like.device != QUERN_CPU || used_at + sizeof *used > KEPT_BYTES) return;
    memcpy(slot->bytes, call, op_call_bytes(call));
    memcpy(slot->bytes + params_at, request->params, params_bytes);
    quern_tensor *kept = (quern_tensor *)(void *)(slot->bytes + tensors_at);
    for (int32_t i = 0; i < count; i++) {
        if (given[i] != NULL) kept[i] = *given[i];
        else kept[i].ndim = -1;
    }
    memcpy(slot->bytes + used_at, used, sizeof *used);
    slot->params_bytes = params_bytes;
    slot->tensors_at = tensors_at;
    slot->used_at = used_at;
    slot->tensor_count = count;
    slot->params_at = params_at;
}

void kept_call_release(kept_call *slot)
{
    if (slot != NULL) atomic_store_explicit(&slot->taken, false, memory_order_release);
}
