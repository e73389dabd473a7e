/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plans.c - plans of the calls that a thread repeats. A call costs the host more than its plan's run: it is
 * checked and laid out twice, for its workspace and for its run.
 *
 * A key says all that a plan fixes. A thread keeps one plan for each of SLOTS values of the key's hash, from
 * the second call in turn that has this key on: a length that comes once makes none. A plan's run does not
 * see that tensors share memory, so calls whose tensors do take no plan.
 *
 *   keep_plans()      from now on threads that end leave their plans: Python ends, and what a GPU's plans
 *                     hold may be gone before the last threads of a framework are
 */
#include "ffi.h"

#include <quern/plan.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    SLOTS = 64,
    WORDS_MAX = 3 + QUERN_OP_PARAMS_BYTES / 8 + QUERN_OP_TENSORS_MAX * (2 + 2 * QUERN_MAX_DIMS)
};

typedef struct call_key {
    uint64_t hash;
    size_t words;
    uint64_t word[WORDS_MAX];
} call_key;

typedef struct kept_plan {
    uint64_t hash; /* of the last call here */
    size_t words;
    uint64_t *word; /* the plan's key */
    quern_plan *plan;
} kept_plan;

static pthread_key_t slots_key;
static bool slots_exist;
static atomic_bool kept_for_good;
static pthread_once_t slots_once = PTHREAD_ONCE_INIT;

static void drop(kept_plan *kept)
{
    quern_plan_destroy(kept->plan);
    free(kept->word);
    kept->plan = NULL;
    kept->word = NULL;
}

static void drop_all(void *p)
{
    kept_plan *slots = p;
    if (atomic_load(&kept_for_good)) return;
    for (int i = 0; i < SLOTS; i++) drop(&slots[i]);
    free(slots);
}

static void create_slots_key(void)
{
    slots_exist = pthread_key_create(&slots_key, drop_all) == 0;
}

/* This thread's; NULL: there is no memory for them. */
static kept_plan *slots_of_thread(void)
{
    (void)pthread_once(&slots_once, create_slots_key);
    kept_plan *slots = slots_exist ? pthread_getspecific(slots_key) : NULL;
    if (slots != NULL || !slots_exist) return slots;
    slots = calloc(SLOTS, sizeof *slots);
    if (slots == NULL || pthread_setspecific(slots_key, slots) == 0) return slots;
    free(slots);
    return NULL;
}

/* ---- keys ---- */

/* The greatest power of two, at most 64, that divides the address; 64 for NULL. */
static uint64_t alignment_of(const void *data)
{
    const uint64_t address = (uintptr_t)data | 64;
    return address & -address;
}

static void add_tensor(call_key *key, int32_t place, const quern_tensor *t)
{
    uint64_t *word = &key->word[key->words];
    *word++ = (uint64_t)place | (uint64_t)t->dtype << 8 | (uint64_t)t->ndim << 16 |
              alignment_of(t->data) << 24 | (uint64_t)(t->data == NULL) << 32;
    *word++ = (uint64_t)t->device | (uint64_t)t->device_id << 32;
    for (int32_t d = 0; d < t->ndim; d++) *word++ = (uint64_t)t->shape[d];
    for (int32_t d = 0; d < t->ndim; d++) *word++ = (uint64_t)t->strides[d];
    key->words = (size_t)(word - key->word);
}

static void make_key(const plan_request *r, call_key *key)
{
    key->word[0] = (uint64_t)r->operation;
    key->word[1] = (uintptr_t)r->stream;
    key->words = 2;
    key->word[key->words + r->params_bytes / sizeof *key->word] = 0; /* a last word that is not whole */
    memcpy(&key->word[key->words], r->params, r->params_bytes);
    key->words += (r->params_bytes + sizeof *key->word - 1) / sizeof *key->word;
    for (int32_t i = 0; i < r->tensor_count; i++)
        if (r->list->tensors.t[i] != NULL) add_tensor(key, i, r->list->tensors.t[i]);
    key->hash = 0;
    for (size_t i = 0; i < key->words; i++) {
        key->hash = (key->hash ^ key->word[i]) * 0x9e3779b97f4a7c15u;
        key->hash ^= key->hash >> 32;
    }
}

/* ---- shared memory ---- */

typedef struct span {
    uint64_t first, past;
} span;

/* The addresses of a tensor's first byte and of that past its last. */
static span span_of(const quern_tensor *t)
{
    uint64_t low = 0, high = 0; /* wraps, for extents that every plan refuses */
    for (int32_t d = 0; d < t->ndim; d++) {
        const uint64_t reach = t->shape[d] > 0 ? (uint64_t)(t->shape[d] - 1) * (uint64_t)t->strides[d] : 0;
        if ((int64_t)reach < 0) low += reach;
        else high += reach;
    }
    const uint64_t bytes = quern_dtype_size(t->dtype), data = (uintptr_t)t->data;
    return (span){data + low * bytes, data + (high + 1) * bytes};
}

static bool share_memory(const plan_request *r)
{
    span spans[QUERN_OP_TENSORS_MAX];
    int count = 0;
    for (int32_t i = 0; i < r->tensor_count; i++) {
        if (r->list->tensors.t[i] == NULL) continue;
        const span s = span_of(r->list->tensors.t[i]);
        for (int j = 0; j < count; j++)
            if (s.first < spans[j].past && spans[j].first < s.past) return true;
        spans[count++] = s;
    }
    return false;
}

/* ---- plans ---- */

static quern_plan *make_plan(kept_plan *kept, const call_key *key, const plan_request *r)
{
    const size_t bytes = key->words * sizeof *key->word;
    drop(kept);
    kept->word = malloc(bytes);
    if (kept->word == NULL) return NULL;
    memcpy(kept->word, key->word, bytes);
    kept->words = key->words;
    if (quern_plan_create(r->context, r->operation, r->params, &r->list->tensors, &kept->plan) != QUERN_OK)
        drop(kept); /* the call says why */
    return kept->plan;
}

const quern_plan *plan_of(const plan_request *r)
{
    call_key key;
    kept_plan *slots = slots_of_thread();
    if (slots == NULL || r->params_bytes > QUERN_OP_PARAMS_BYTES) return NULL;
    make_key(r, &key);
    kept_plan *kept = &slots[key.hash >> 58];
    const bool again = kept->hash == key.hash;
    kept->hash = key.hash;
    if (share_memory(r)) return NULL;
    if (kept->plan != NULL && kept->words == key.words &&
        memcmp(kept->word, key.word, key.words * sizeof *key.word) == 0)
        return kept->plan;
    return again ? make_plan(kept, &key, r) : NULL;
}

FUNCTION(keep_plans)
{
    (void)self, (void)args, (void)count;
    atomic_store(&kept_for_good, true);
    return give_nothing(result);
}
