/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* batch.c - checks a call's sequences and pages, and puts them into the form that stages take. */
#include "cache/cache.h"

#include "core/error.h"
#include "core/op.h"

#include <inttypes.h>

/* Or-ed into the owner of a page that this call claims, until all pages are checked. */
static const int64_t claimed = (int64_t)1 << 62;

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

quern_status cache_check_batch(const quern_cache *cache, const quern_cache_batch *given, bool appends,
                               cache_call *call)
{
    *call = (cache_call){.batch = QUERN_CACHE_BATCH_INIT};
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
    if (b->batch > 0 && (b->table != NULL) != (p->page != 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "table is %s: %s", b->table != NULL ? "given" : "NULL",
                         p->page != 0 ? "a paged cache needs one" : "a contiguous cache takes none");
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

quern_status cache_check_pages(const quern_cache *cache, const cache_call *call, bool appends)
{
    const cache_layout *l = &cache->layout;
    for (int64_t i = 0; l->params.page != 0 && i < call->batch.batch; i++) {
        const int64_t sequence = call->batch.sequences[i];
        const int64_t tokens = cache->sequences[sequence].tokens + (appends ? call->batch.counts[i] : 0);
        const int32_t *row = call->batch.table + sequence * l->columns;
        for (int kind = 0; kind < CACHE_KINDS; kind++) {
            const int64_t blocks = cache_blocks(l, (cache_kind)kind, tokens), first = l->column[kind];
            for (int64_t c = first; c < first + blocks; c++)
                if (row[c] < 0 || row[c] >= l->params.pages)
                    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                     "table[%" PRId64 "][%" PRId64
                                     "] is %d: a page of the pool, 0 to %" PRId64 ", is accepted",
                                     sequence, c, row[c], l->params.pages - 1);
        }
    }
    return QUERN_OK;
}

/* Claims one page for a column of a sequence. */
static quern_status claim(quern_cache *cache, const int32_t *table, int64_t sequence, int64_t column)
{
    const cache_layout *l = &cache->layout;
    const int64_t page = table[sequence * l->columns + column], mine = sequence * l->columns + column;
    const int64_t owner = cache->owner[page];
    if (owner == mine || owner == (mine | claimed)) return QUERN_OK;
    bool taken = owner >= 0 && (owner & claimed) != 0;
    const int64_t other = owner & ~claimed;
    if (owner >= 0 && !taken && table[other] == page) {
        const int64_t tokens = cache->sequences[other / l->columns].tokens, at = other % l->columns;
        for (int kind = 0; kind < CACHE_KINDS && !taken; kind++)
            taken = at >= l->column[kind] && at < l->column[kind] + cache_blocks(l, (cache_kind)kind, tokens);
    }
    if (taken)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "table[%" PRId64 "][%" PRId64 "] is page %" PRId64 ", which table[%" PRId64
                         "][%" PRId64 "] writes: each page is written in one place",
                         sequence, column, page, other / l->columns, other % l->columns);
    cache->owner[page] = mine | claimed;
    return QUERN_OK;
}

/* Settles the claims of a call: keeps them, or takes them back. */
static void settle(quern_cache *cache, const int32_t *table, int64_t sequence, int64_t column, bool keep)
{
    int64_t *owner = &cache->owner[table[sequence * cache->layout.columns + column]];
    if (*owner >= 0 && (*owner & claimed) != 0) *owner = keep ? *owner & ~claimed : -1;
}

/* The pages that an append writes, one by one. */
static quern_status each_written(quern_cache *cache, const cache_call *call, bool settles, bool keep)
{
    const cache_layout *l = &cache->layout;
    for (int64_t i = 0; i < call->batch.batch; i++) {
        const int64_t sequence = call->batch.sequences[i], from = cache->sequences[sequence].tokens,
                      to = from + call->batch.counts[i];
        for (int kind = 0; kind < CACHE_KINDS; kind++) {
            const bool entries = kind == CACHE_ENTRIES;
            const int64_t first = entries ? cache_entries(l, from) : from,
                          end = entries ? cache_entries(l, to) : to;
            if (l->blocks[kind] == 0 || first == end) continue;
            for (int64_t block = first / CACHE_BLOCK; block <= (end - 1) / CACHE_BLOCK; block++) {
                const int64_t column = l->column[kind] + (kind == CACHE_WIN ? block % l->ring : block);
                if (settles) {
                    settle(cache, call->batch.table, sequence, column, keep);
                    continue;
                }
                const quern_status status = claim(cache, call->batch.table, sequence, column);
                if (status != QUERN_OK) return status;
            }
        }
    }
    return QUERN_OK;
}

quern_status cache_claim_pages(quern_cache *cache, const cache_call *call)
{
    if (cache->layout.params.page == 0) return QUERN_OK;
    const quern_status status = each_written(cache, call, false, false);
    each_written(cache, call, true, status == QUERN_OK);
    return status;
}

cache_queries cache_queries_of(const quern_cache *cache, const cache_call *call)
{
    return (cache_queries){call->batch.batch, call->batch.sequences, call->batch.counts, cache->sequences};
}
