/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* batch.c - checks a call's sequences. */
#include "cache/cache.h"

#include "core/error.h"
#include "core/op.h"

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
