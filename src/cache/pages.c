/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pages.c - the pages of a pool that calls read and write.
 *
 * A page has one writer, a column of a sequence. It stays the writer while the sequence has rows there and
 * its table names the page there. A fork may read pages of the sequence that it came from; these are marked,
 * and nobody writes such a page while another sequence reads it. A call claims all its pages first and owns
 * them only if every claim succeeds, so that a refused call changes nothing.
 */
#include "cache/cache.h"

#include "core/error.h"

#include <inttypes.h>

/* Or-ed into the owner of a page that forks read. */
static const int64_t read_by_forks = (int64_t)1 << 62;

quern_status cache_check_table(const quern_cache *cache, int64_t sequence, int64_t tokens,
                               const int32_t *table)
{
    const cache_layout *l = &cache->layout;
    const int32_t *row = table + sequence * l->columns;
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        const int64_t first = l->column[kind], end = first + cache_blocks(l, (cache_kind)kind, tokens);
        for (int64_t c = first; c < end; c++)
            if (row[c] < 0 || row[c] >= l->params.pages)
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "table[%" PRId64 "][%" PRId64 "] is %d: a page of the pool, 0 to %" PRId64
                                 ", is accepted",
                                 sequence, c, row[c], l->params.pages - 1);
    }
    return QUERN_OK;
}

quern_status cache_check_pages(const cache_call *call)
{
    const quern_cache *cache = call->cache;
    quern_status status = QUERN_OK;
    for (int64_t i = 0; cache->layout.params.page != 0 && i < call->batch.batch && status == QUERN_OK; i++) {
        const int64_t sequence = call->batch.sequences[i], more = call->appends ? call->batch.counts[i] : 0;
        status =
            cache_check_table(cache, sequence, cache->sequences[sequence].tokens + more, call->batch.table);
    }
    return status;
}

/* Whether a sequence has rows in a column. */
static bool uses_column(const quern_cache *cache, int64_t sequence, int64_t column)
{
    const cache_layout *l = &cache->layout;
    const int64_t tokens = cache->sequences[sequence].tokens;
    for (int kind = 0; kind < CACHE_KINDS; kind++)
        if (column >= l->column[kind] && column < l->column[kind] + cache_blocks(l, (cache_kind)kind, tokens))
            return true;
    return false;
}

/* Another sequence that reads a page in this column, or -1. */
static int64_t reader_of(const quern_cache *cache, const int32_t *table, int64_t page, int64_t column,
                         int64_t sequence)
{
    const int64_t columns = cache->layout.columns;
    for (int64_t s = 0; s < cache->layout.params.sequences; s++)
        if (s != sequence && uses_column(cache, s, column) && table[s * columns + column] == page) return s;
    return -1;
}

static quern_status taken(const quern_cache *cache, int64_t page, int64_t mine, int64_t other,
                          const char *does)
{
    const int64_t columns = cache->layout.columns;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "table[%" PRId64 "][%" PRId64 "] is page %" PRId64 ", which table[%" PRId64 "][%" PRId64
                     "] %s: each page is written in one place",
                     mine / columns, mine % columns, page, other / columns, other % columns, does);
}

/* Claims one page for a column of a sequence. */
static quern_status claim(quern_cache *cache, const int32_t *table, int64_t sequence, int64_t column)
{
    const int64_t columns = cache->layout.columns, mine = sequence * columns + column, page = table[mine];
    const int64_t marked = cache->owner[page], owner = marked >= 0 ? marked & ~read_by_forks : marked;
    if (cache->claim[page] == mine) return QUERN_OK;
    if (cache->claim[page] >= 0) return taken(cache, page, mine, cache->claim[page], "writes");
    if (owner >= 0 && owner != mine && table[owner] == page &&
        uses_column(cache, owner / columns, owner % columns))
        return taken(cache, page, mine, owner, "writes");
    const int64_t reader = marked != owner ? reader_of(cache, table, page, owner % columns, sequence) : -1;
    if (reader >= 0) return taken(cache, page, mine, reader * columns + owner % columns, "reads");
    cache->claim[page] = mine;
    return QUERN_OK;
}

bool cache_is_shared(const quern_cache *cache, const cache_written *w, const int32_t *table, cache_kind kind,
                     int64_t block)
{
    const cache_layout *l = &cache->layout;
    if (w->origin < 0 || table == NULL || kind == CACHE_WIN) return false;
    const int64_t column = l->column[kind] + block,
                  rows = kind == CACHE_ENTRIES ? cache_entries(l, w->to) : w->to;
    return table[w->sequence * l->columns + column] == table[w->origin * l->columns + column] &&
           (block + 1) * CACHE_BLOCK <= rows;
}

/* What a pass over the pages does. */
typedef enum page_pass { PASS_CLAIM, PASS_KEEP, PASS_DROP } page_pass;

static quern_status visit(quern_cache *cache, const cache_written *w, const int32_t *table, cache_kind kind,
                          int64_t block, page_pass pass)
{
    const cache_layout *l = &cache->layout;
    const int64_t column = l->column[kind] + (kind == CACHE_WIN ? block % l->ring : block);
    const int64_t page = table[w->sequence * l->columns + column];
    if (cache_is_shared(cache, w, table, kind, block)) {
        if (pass == PASS_KEEP) cache->owner[page] |= read_by_forks;
        return QUERN_OK;
    }
    if (pass == PASS_CLAIM) return claim(cache, table, w->sequence, column);
    if (pass == PASS_KEEP && cache->claim[page] >= 0) cache->owner[page] = cache->claim[page];
    cache->claim[page] = -1;
    return QUERN_OK;
}

/* All pages that are written, one by one. */
static quern_status each_page(quern_cache *cache, const cache_written *w, const int32_t *table,
                              page_pass pass)
{
    const cache_layout *l = &cache->layout;
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        const bool entries = kind == CACHE_ENTRIES;
        const int64_t first = entries ? cache_entries(l, w->from) : w->from,
                      end = entries ? cache_entries(l, w->to) : w->to;
        if (l->blocks[kind] == 0 || first == end) continue;
        for (int64_t block = first / CACHE_BLOCK; block <= (end - 1) / CACHE_BLOCK; block++) {
            const quern_status status = visit(cache, w, table, (cache_kind)kind, block, pass);
            if (status != QUERN_OK) return status;
        }
    }
    return QUERN_OK;
}

quern_status cache_claim(quern_cache *cache, const cache_written *w, const int32_t *table)
{
    if (cache->layout.params.page == 0) return QUERN_OK;
    const quern_status status = each_page(cache, w, table, PASS_CLAIM);
    each_page(cache, w, table, status == QUERN_OK ? PASS_KEEP : PASS_DROP);
    return status;
}

static quern_status each_sequence(quern_cache *cache, const cache_call *call, page_pass pass)
{
    quern_status status = QUERN_OK;
    for (int64_t i = 0; i < call->batch.batch && status == QUERN_OK; i++) {
        const int64_t sequence = call->batch.sequences[i], tokens = cache->sequences[sequence].tokens;
        const cache_written w = {sequence, tokens, tokens + call->batch.counts[i], -1};
        status = each_page(cache, &w, call->batch.table, pass);
    }
    return status;
}

quern_status cache_claim_pages(quern_cache *cache, const cache_call *call)
{
    if (cache->layout.params.page == 0) return QUERN_OK;
    const quern_status status = each_sequence(cache, call, PASS_CLAIM);
    each_sequence(cache, call, status == QUERN_OK ? PASS_KEEP : PASS_DROP);
    return status;
}
