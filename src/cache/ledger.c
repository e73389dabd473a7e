/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ledger.c - lengths of sequences and the pages that they hold.
 *
 * A page has a count of the sequences that hold it. A fork raises counts and copies nothing. A sequence holds
 * the pages that its tokens need, and during a step (ledger_step.c) those of the step's.
 */
#include "cache/ledger.h"

#include "core/arena.h"
#include "core/error.h"

#include <string.h>

static const uint64_t ledger_magic = 0x72656467656c7551; /* "Quledger" */

int64_t ledger_rows(const ledger_pool *pool, int64_t tokens)
{
    const quern_ledger_pool *p = &pool->params;
    return p->page == 0 || tokens < p->block ? 0 : (tokens - p->block) / p->stride + 1;
}

int64_t ledger_pages(const ledger_pool *pool, int64_t tokens)
{
    if (pool->params.page == 0) return 0;
    const int64_t rows = ledger_rows(pool, tokens),
                  pages = rows / pool->params.page + (rows % pool->params.page != 0);
    return pool->params.ring > 0 && pages > pool->columns ? pool->columns : pages;
}

static quern_status check_pool(quern_ledger_pool *pool)
{
    if (pool->page == 0) {
        *pool = (quern_ledger_pool){0};
        return QUERN_OK;
    }
    if (pool->block == 0) pool->block = 1;
    if (pool->stride == 0) pool->stride = pool->block;
    quern_status status = error_in_range("params.pools[].page", pool->page, 1, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.pools[].pages", pool->pages, 0, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.pools[].block", pool->block, 1, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.pools[].stride", pool->stride, 1, INT32_MAX);
    return status == QUERN_OK ? error_in_range("params.pools[].ring", pool->ring, 0, INT32_MAX) : status;
}

/* A pool's columns and pages. */
static quern_status lay_out_pool(quern_ledger *l, int i)
{
    ledger_pool *pool = &l->pool[i];
    quern_ledger_pool *p = &pool->params;
    pool->column = l->columns;
    if (p->page == 0) return QUERN_OK;
    const int64_t rows = ledger_rows(pool, l->params.capacity),
                  kept = p->ring > 0 && p->ring < rows ? p->ring : rows;
    pool->columns = kept / p->page + (kept % p->page != 0);
    l->columns += pool->columns;
    const int64_t sequences = l->params.sequences, copies = p->ring > 0 ? pool->columns : 1;
    l->copies_most += copies;
    if (p->pages > 0) return QUERN_OK;
    if (pool->columns > INT32_MAX / sequences)
        return error_argument(
            "params: %lld sequences of %lld pages are too many: up to %d pages are accepted",
            (long long)sequences, (long long)pool->columns, INT32_MAX);
    /* Until a step is committed, its copies stand beside pages that two or more sequences hold. */
    p->pages = sequences * pool->columns + sequences / 2 * copies;
    return QUERN_OK;
}

/* Takes an array from memory of which *bytes are taken; `memory` may be NULL. */
static void *take(char *memory, size_t *bytes, int64_t count, size_t each, bool *fits)
{
    size_t product;
    void *at = memory != NULL ? memory + *bytes : NULL;
    *fits = *fits && !__builtin_mul_overflow((size_t)count, each, &product) &&
            !__builtin_add_overflow(*bytes, product + product % sizeof(int64_t), bytes);
    return at;
}

/* The arrays of a ledger at `memory`, which may be NULL. */
static bool place(quern_ledger *l, char *memory, size_t *bytes)
{
    const int64_t sequences = l->params.sequences;
    bool fits = true;
    *bytes = sizeof *l;
    l->sequences = take(memory, bytes, sequences, sizeof *l->sequences, &fits);
    l->copied = take(memory, bytes, sequences, (size_t)l->copies_most * sizeof *l->copied, &fits);
    l->members = take(memory, bytes, sequences, sizeof *l->members, &fits);
    l->pages = take(memory, bytes, sequences, (size_t)l->columns * sizeof *l->pages, &fits);
    l->needs = take(memory, bytes, sequences, LEDGER_POOLS * sizeof *l->needs, &fits);
    for (int i = 0; i < LEDGER_POOLS; i++) {
        ledger_pool *pool = &l->pool[i];
        pool->holders = take(memory, bytes, pool->params.pages, sizeof *pool->holders, &fits);
        pool->free = take(memory, bytes, pool->params.pages, sizeof *pool->free, &fits);
    }
    return fits && *bytes <= PTRDIFF_MAX;
}

quern_status ledger_layout(const quern_ledger_params *given, quern_ledger *l, size_t *bytes)
{
    *l = (quern_ledger){.magic = ledger_magic, .params = QUERN_LEDGER_PARAMS_INIT, .batch = -1};
    quern_ledger_params *p = &l->params;
    quern_status status = op_struct(p, given, "params", "QUERN_LEDGER_PARAMS_INIT");
    if (status == QUERN_OK) status = error_in_range("params.sequences", p->sequences, 1, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.capacity", p->capacity, 1, INT32_MAX);
    if (status == QUERN_OK)
        status = error_in_range("params.rollback", p->rollback, 0, QUERN_LEDGER_ROLLBACK_MOST);
    if (status == QUERN_OK) status = error_in_range("params.step", p->step, 0, INT32_MAX);
    for (int i = 0; i < QUERN_LEDGER_POOLS && status == QUERN_OK; i++) {
        status = check_pool(&p->pools[i]);
        l->pool[i].params = p->pools[i];
    }
    /* A state is a page of one row, which every step writes. */
    if (p->states) l->pool[LEDGER_STATES].params = (quern_ledger_pool){1, 0, 1, 1, 1};
    for (int i = 0; i < LEDGER_POOLS && status == QUERN_OK; i++) status = lay_out_pool(l, i);
    if (status != QUERN_OK) return status;
    if (!place(l, NULL, bytes))
        return error_argument("params: %lld sequences of %lld tokens: fewer than 2^63 bytes are accepted",
                              (long long)p->sequences, (long long)p->capacity);
    return QUERN_OK;
}

quern_status quern_ledger_size(const quern_ledger_params *params, size_t *bytes)
{
    quern_ledger l;
    size_t needed;
    const quern_status status = ledger_layout(params, &l, &needed);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_argument("bytes is NULL: a place for the size is needed");
    *bytes = needed + ARENA_ALIGN - 1;
    return QUERN_OK;
}

quern_status ledger_create_at(const quern_ledger_params *params, void *memory, quern_ledger **ledger)
{
    quern_ledger l;
    size_t bytes;
    const quern_status status = ledger_layout(params, &l, &bytes);
    if (status != QUERN_OK) return status;
    (void)place(&l, memory, &bytes);
    for (int64_t s = 0; s < l.params.sequences; s++) l.sequences[s] = (ledger_sequence){0, 0, -1};
    for (int i = 0; i < LEDGER_POOLS; i++) {
        ledger_pool *pool = &l.pool[i];
        pool->left = pool->params.pages;
        for (int64_t n = 0; n < pool->left; n++) { /* pages are taken from the first on */
            pool->holders[n] = 0;
            pool->free[n] = (int32_t)(pool->left - 1 - n);
        }
    }
    memset(l.needs, 0, (size_t)l.params.sequences * LEDGER_POOLS * sizeof *l.needs);
    memcpy(memory, &l, sizeof l);
    *ledger = memory;
    return QUERN_OK;
}

quern_status quern_ledger_create(const quern_ledger_params *params, void *memory, size_t bytes,
                                 quern_ledger **ledger)
{
    size_t needed;
    const quern_status status = quern_ledger_size(params, &needed);
    if (status != QUERN_OK) return status;
    if (memory == NULL || ledger == NULL)
        return error_argument("%s is NULL: %s is needed", memory == NULL ? "memory" : "ledger",
                              memory == NULL ? "what quern_ledger_size() says" : "a place for the ledger");
    if (bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "memory has %zu bytes: at least %zu are accepted", bytes,
                         needed);
    return ledger_create_at(params, arena_on(memory).base, ledger);
}

quern_status ledger_check(const quern_ledger *ledger)
{
    if (ledger != NULL && ledger->magic == ledger_magic) return QUERN_OK;
    return error_argument("ledger is %s: one of quern_ledger_create() is accepted",
                          ledger == NULL ? "NULL" : "none");
}

quern_status ledger_check_sequence(const quern_ledger *ledger, int64_t sequence, const char *name)
{
    const quern_status status = ledger_check(ledger);
    if (status != QUERN_OK) return status;
    return error_in_range(name, sequence, 0, ledger->params.sequences - 1);
}

/* The same, for a call that changes the sequence, which no step may have. */
static quern_status check_change(const quern_ledger *ledger, int64_t sequence, const char *name)
{
    const quern_status status = ledger_check_sequence(ledger, sequence, name);
    if (status != QUERN_OK || ledger->sequences[sequence].count < 0) return status;
    return error_argument("%s is %lld, of which a step has begun: commit or abort comes first", name,
                          (long long)sequence);
}

quern_status quern_ledger_pages(const quern_ledger_params *params, int64_t pool, int64_t tokens,
                                int64_t *pages, int64_t *whole)
{
    quern_ledger l;
    size_t bytes;
    quern_status status = ledger_layout(params, &l, &bytes);
    if (status == QUERN_OK) status = error_in_range("pool", pool, 0, LEDGER_STATES);
    if (status != QUERN_OK) return status;
    if (tokens < 0 || tokens > l.params.capacity)
        return error_argument("tokens is %lld: 0 to the capacity %lld is accepted", (long long)tokens,
                              (long long)l.params.capacity);
    if (pages != NULL) *pages = ledger_pages(&l.pool[pool], tokens);
    if (whole != NULL) *whole = l.pool[pool].params.pages;
    return QUERN_OK;
}

quern_status quern_ledger_free_pages(const quern_ledger *ledger, int64_t pool, int64_t *pages)
{
    quern_status status = ledger_check(ledger);
    if (status == QUERN_OK) status = error_in_range("pool", pool, 0, LEDGER_STATES);
    if (status != QUERN_OK) return status;
    if (pages == NULL) return error_argument("pages is NULL: a place for the count is needed");
    *pages = ledger->pool[pool].left;
    return QUERN_OK;
}

quern_status quern_ledger_length(const quern_ledger *ledger, int64_t sequence, int64_t *tokens, int64_t *held)
{
    const quern_status status = ledger_check_sequence(ledger, sequence, "sequence");
    if (status != QUERN_OK) return status;
    if (tokens != NULL) *tokens = ledger->sequences[sequence].tokens;
    if (held != NULL) *held = ledger->sequences[sequence].held;
    return QUERN_OK;
}

/* ---- pages ---- */

void ledger_shrink(quern_ledger *l, int64_t sequence, int64_t had, int64_t tokens)
{
    for (int i = 0; i < LEDGER_POOLS; i++) {
        const int32_t *row = ledger_row(l, sequence, i);
        for (int64_t c = ledger_pages(&l->pool[i], had); c > ledger_pages(&l->pool[i], tokens); c--)
            ledger_release(&l->pool[i], row[c - 1]);
    }
}

void ledger_grow(quern_ledger *l, int64_t sequence, int i, int64_t had, int64_t end)
{
    int32_t *row = ledger_row(l, sequence, i);
    for (int64_t c = had; c < end; c++) row[c] = ledger_take(&l->pool[i]);
}

quern_status ledger_assign(quern_ledger *l, int64_t sequence, int64_t tokens, int64_t held)
{
    ledger_sequence *s = &l->sequences[sequence];
    for (int i = 0; i < LEDGER_POOLS; i++) {
        int64_t own = 0; /* pages that come back when the sequence is emptied */
        const int64_t needed = ledger_pages(&l->pool[i], tokens);
        for (int64_t c = 0; c < ledger_pages(&l->pool[i], s->tokens); c++)
            own += l->pool[i].holders[ledger_row(l, sequence, i)[c]] == 1;
        if (needed - own > l->pool[i].left)
            return error_argument("pool %d lacks %lld pages: %lld are free, %lld are needed", i,
                                  (long long)(needed - own - l->pool[i].left), (long long)l->pool[i].left,
                                  (long long)(needed - own));
    }
    ledger_shrink(l, sequence, s->tokens, 0);
    for (int i = 0; i < LEDGER_POOLS; i++) ledger_grow(l, sequence, i, 0, ledger_pages(&l->pool[i], tokens));
    *s = (ledger_sequence){tokens, held, -1};
    return QUERN_OK;
}

/* ---- what happens to one sequence ---- */

quern_status quern_ledger_rollback(quern_ledger *ledger, int64_t sequence, int64_t n)
{
    const quern_status status = check_change(ledger, sequence, "sequence");
    if (status != QUERN_OK) return status;
    ledger_sequence *s = &ledger->sequences[sequence];
    if (n < 0 || n > s->held)
        return error_argument("n is %lld: 0 to %lld of sequence %lld's %lld tokens are accepted",
                              (long long)n, (long long)s->held, (long long)sequence, (long long)s->tokens);
    bool limited = ledger->params.states;
    for (int i = 0; i < QUERN_LEDGER_POOLS; i++) limited = limited || ledger->pool[i].params.ring > 0;
    ledger_shrink(ledger, sequence, s->tokens, s->tokens - n);
    s->tokens -= n;
    if (limited) s->held -= n;
    else if (s->held > s->tokens) s->held = s->tokens;
    return QUERN_OK;
}

quern_status quern_ledger_reset(quern_ledger *ledger, int64_t sequence)
{
    const quern_status status = check_change(ledger, sequence, "sequence");
    return status == QUERN_OK ? ledger_assign(ledger, sequence, 0, 0) : status;
}

quern_status quern_ledger_fork(quern_ledger *ledger, int64_t from, int64_t to)
{
    quern_status status = check_change(ledger, from, "from");
    if (status == QUERN_OK) status = check_change(ledger, to, "to");
    if (status != QUERN_OK) return status;
    if (from == to)
        return error_argument("from and to are both %lld: two sequences are accepted", (long long)from);
    ledger_sequence *s = &ledger->sequences[from];
    ledger_shrink(ledger, to, ledger->sequences[to].tokens, 0);
    for (int i = 0; i < LEDGER_POOLS; i++) {
        const int32_t *row = ledger_row(ledger, from, i);
        const int64_t pages = ledger_pages(&ledger->pool[i], s->tokens);
        for (int64_t c = 0; c < pages; c++) ledger->pool[i].holders[row[c]]++;
        if (pages > 0) memcpy(ledger_row(ledger, to, i), row, (size_t)pages * sizeof *row);
    }
    ledger->sequences[to] = *s;
    return QUERN_OK;
}
