/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ledger_step.c - steps of a ledger: what a batch's tokens need of the pools, and where they go.
 *
 * A step that would write a page with a count above 1 takes a free one in its place and lists the copy.
 * begin() first counts what it needs, then changes; until commit() a replaced page keeps its count, so that
 * abort() can give it back.
 */
#include "cache/ledger.h"

#include "core/error.h"

#include <string.h>

/* Everything here fits 32 bits, whose division is the faster one: begin() does little else. */
static uint32_t rows_at(const quern_ledger_pool *p, uint32_t tokens)
{
    const uint32_t block = (uint32_t)p->block, stride = (uint32_t)p->stride;
    if (stride == 1) return tokens < block ? 0 : tokens - block + 1;
    return tokens < block ? 0 : (tokens - block) / stride + 1;
}

static ledger_need need_of(const ledger_pool *pool, int64_t tokens, int64_t count)
{
    const quern_ledger_pool *p = &pool->params;
    const uint32_t from = rows_at(p, (uint32_t)tokens), to = rows_at(p, (uint32_t)(tokens + count)),
                   page = (uint32_t)p->page, columns = (uint32_t)pool->columns, first = from / page,
                   had = first + (from > first * page), behind = to > from ? (to - 1) / page + 1 : had;
    ledger_need n = {.had = (int32_t)had, .end = (int32_t)behind};
    if (p->ring == 0) {
        n.first = (int32_t)first;
        n.writes = to > from && had > first;
        return n;
    }
    if (n.had > (int32_t)columns) n.had = (int32_t)columns;
    if (n.end > (int32_t)columns) n.end = (int32_t)columns;
    if (to == from) return n;
    n.first = (int32_t)(first % columns);
    n.writes = (int32_t)(behind - first < columns ? behind - first : columns);
    return n;
}

/* How many pages that a step writes are held by other sequences, too. */
static int64_t shared_pages(const quern_ledger *l, int64_t sequence, int i, const ledger_need *need)
{
    const ledger_pool *pool = &l->pool[i];
    const int32_t *row = ledger_row(l, sequence, i);
    int64_t copies = 0, c = need->first;
    for (int32_t k = 0; k < need->writes; k++) {
        copies += c < need->had && pool->holders[row[c]] > 1;
        if (++c == pool->columns) c = 0;
    }
    return copies;
}

/* Takes a page in place of each of them. */
static void copy_shared(quern_ledger *l, int64_t sequence, int i, const ledger_need *need)
{
    ledger_pool *pool = &l->pool[i];
    int32_t *row = ledger_row(l, sequence, i);
    int64_t c = need->first;
    for (int32_t k = 0; k < need->writes; k++) {
        if (c < need->had && pool->holders[row[c]] > 1) {
            const int32_t from = row[c];
            row[c] = ledger_take(pool);
            l->copied[l->copies++] = (ledger_copy){(int32_t)sequence, i, from, row[c], c};
        }
        if (++c == pool->columns) c = 0;
    }
}

/* Where the tensors of a block stand, in numbers of i32. */
typedef struct block_layout {
    int64_t positions, cu, tables[QUERN_LEDGER_POOLS], copies, copies_most, end;
} block_layout;

static block_layout block_of(const quern_ledger *l, int64_t batch)
{
    block_layout b = {.positions = batch, .cu = 2 * batch, .end = 3 * batch + 1};
    for (int i = 0; i < QUERN_LEDGER_POOLS; i++) {
        b.tables[i] = b.end;
        b.end += batch * l->pool[i].columns;
    }
    b.copies = b.end;
    b.copies_most = batch * l->copies_most;
    b.end += 3 * b.copies_most;
    return b;
}

size_t ledger_block_bytes(const quern_ledger *ledger, int64_t batch)
{
    return (size_t)block_of(ledger, batch).end * sizeof(int32_t);
}

static quern_status check_batch(const quern_ledger *l, int64_t batch)
{
    const quern_status status = ledger_check(l);
    if (status != QUERN_OK) return status;
    if (batch < 0 || batch > l->params.sequences)
        return error_argument("batch is %lld: 0 to the %lld sequences are accepted", (long long)batch,
                              (long long)l->params.sequences);
    return QUERN_OK;
}

quern_status quern_ledger_block_bytes(const quern_ledger *ledger, int64_t batch, size_t *bytes)
{
    const quern_status status = check_batch(ledger, batch);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_argument("bytes is NULL: a place for the size is needed");
    *bytes = ledger_block_bytes(ledger, batch);
    return QUERN_OK;
}

quern_status quern_ledger_step(const quern_ledger *ledger, int64_t batch, const void *block,
                               quern_device device, int32_t device_id, quern_step *step)
{
    quern_step known = QUERN_STEP_INIT;
    quern_status status = check_batch(ledger, batch);
    if (status == QUERN_OK) status = op_struct(&known, step, "step", "QUERN_STEP_INIT");
    if (status != QUERN_OK) return status;
    if (block == NULL) return error_argument("block is NULL: a block is needed");
    const block_layout b = block_of(ledger, batch);
    int32_t *at = (int32_t *)(uintptr_t)block;
    const int64_t rows[] = {batch}, more[] = {batch + 1}, copies[] = {b.copies_most, 3};
    known = (quern_step)QUERN_STEP_INIT;
    known.slots = quern_tensor_contiguous(at, QUERN_I32, 1, rows);
    known.positions = quern_tensor_contiguous(at + b.positions, QUERN_I32, 1, rows);
    known.cu = quern_tensor_contiguous(at + b.cu, QUERN_I32, 1, more);
    known.copies = quern_tensor_contiguous(at + b.copies, QUERN_I32, 2, copies);
    quern_tensor *views[] = {&known.slots, &known.positions, &known.cu, &known.copies};
    for (int i = 0; i < 4; i++) views[i]->device = device, views[i]->device_id = device_id;
    for (int i = 0; i < QUERN_LEDGER_POOLS; i++) {
        const int64_t table[] = {batch, ledger->pool[i].columns};
        if (ledger->pool[i].params.page == 0) continue;
        known.tables[i] = quern_tensor_contiguous(at + b.tables[i], QUERN_I32, 2, table);
        known.tables[i].device = device;
        known.tables[i].device_id = device_id;
    }
    op_struct_give(step, &known);
    return QUERN_OK;
}

/* The first of n numbers that is `id`; n: none is. */
static int64_t first_of(const int32_t *sequences, int64_t n, int32_t id)
{
    int32_t found = 0, i = 0;
    for (int64_t k = 0; k < n; k++) found |= sequences[k] == id; /* without an end before the last: vectors */
    if (!found) return n;
    while (sequences[i] != id) i++;
    return i;
}

quern_status ledger_check_members(const quern_ledger *l, const int32_t *sequences, const int64_t *counts,
                                  int64_t batch, bool newest)
{
    int64_t all = 0;
    const quern_status status = check_batch(l, batch);
    if (status != QUERN_OK) return status;
    if (batch > 0 && (sequences == NULL || counts == NULL))
        return error_argument("%s is NULL: an array of batch entries is needed",
                              sequences == NULL ? "sequences" : "counts");
    for (int64_t b = 0; b < batch; b++) {
        const int64_t id = sequences[b];
        if (id < -1 || id >= l->params.sequences)
            return error_argument("sequences[%lld] is %lld: -1 to %lld is accepted", (long long)b,
                                  (long long)id, (long long)l->params.sequences - 1);
        const int64_t before = id >= 0 ? first_of(sequences, b, sequences[b]) : b;
        if (before < b)
            return error_argument(
                "sequences[%lld] and sequences[%lld] are %lld: each sequence is accepted once",
                (long long)before, (long long)b, (long long)id);
        int64_t most = 0;
        if (id >= 0) {
            most = newest ? l->sequences[id].tokens : l->params.capacity - l->sequences[id].tokens;
            if (l->params.step > 0 && most > l->params.step) most = l->params.step;
        }
        if (counts[b] < 0 || counts[b] > most)
            return error_argument("counts[%lld] is %lld: 0 to %lld tokens of sequence %lld are accepted",
                                  (long long)b, (long long)counts[b], (long long)most, (long long)id);
        if (counts[b] > INT32_MAX - all)
            return error_argument("counts[%lld] is %lld: %d tokens in all are accepted", (long long)b,
                                  (long long)counts[b], INT32_MAX);
        all += counts[b];
    }
    return QUERN_OK;
}

static quern_status check_block(const quern_ledger *l, int64_t batch, const void *block, size_t bytes)
{
    const size_t needed = ledger_block_bytes(l, batch);
    if (block == NULL || (uintptr_t)block % sizeof(int32_t) != 0)
        return error_argument("block is %p: memory of %zu bytes, aligned to 4, is needed", block, needed);
    if (bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "block has %zu bytes: at least %zu are accepted", bytes,
                         needed);
    return QUERN_OK;
}

/* Finds what the members need of the pools, and whether these have it. */
static quern_status find_needs(quern_ledger *l, const int32_t *sequences, const int64_t *counts,
                               int64_t batch)
{
    for (int i = 0; i < LEDGER_POOLS; i++) {
        ledger_pool *pool = &l->pool[i];
        int64_t needed = 0;
        if (pool->params.page == 0) continue;
        for (int64_t b = 0; b < batch; b++) {
            ledger_need *need = &l->needs[b * LEDGER_POOLS + i];
            *need = (ledger_need){0, 0, 0, 0};
            if (sequences[b] < 0) continue;
            *need = need_of(pool, l->sequences[sequences[b]].tokens, counts[b]);
            needed += need->end - need->had + shared_pages(l, sequences[b], i, need);
        }
        if (needed > pool->left)
            return error_argument("pool %d lacks %lld pages: %lld are free, the step needs %lld", i,
                                  (long long)(needed - pool->left), (long long)pool->left, (long long)needed);
    }
    return QUERN_OK;
}

/* Fills a block. `newest`: the counts are of tokens that the sequences have. */
static void fill(const quern_ledger *l, const int32_t *sequences, const int64_t *counts, int64_t batch,
                 bool newest, int32_t *at)
{
    const block_layout layout = block_of(l, batch);
    int32_t *positions = at + layout.positions, *cu = at + layout.cu, *copies = at + layout.copies;
    cu[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int32_t id = sequences[b];
        const int64_t tokens = id >= 0 ? l->sequences[id].tokens : 0,
                      end = newest ? tokens : tokens + counts[b];
        const bool empty = id < 0 || (end == 0 && l->params.states);
        at[b] = empty ? -1 : l->params.states ? *ledger_row(l, id, LEDGER_STATES) : id;
        positions[b] = (int32_t)(newest ? tokens - counts[b] : tokens);
        cu[b + 1] = cu[b] + (int32_t)counts[b];
        for (int i = 0; i < QUERN_LEDGER_POOLS && id >= 0; i++) {
            if (l->pool[i].params.page == 0) continue;
            const int64_t pages =
                newest ? ledger_pages(&l->pool[i], end) : l->needs[b * LEDGER_POOLS + i].end;
            if (pages > 0)
                memcpy(at + layout.tables[i] + b * l->pool[i].columns, ledger_row(l, id, i),
                       (size_t)pages * sizeof *at);
        }
    }
    const int64_t made = newest ? 0 : l->copies;
    for (int64_t i = 0; i < made; i++, copies += 3) {
        copies[0] = l->copied[i].pool;
        copies[1] = l->copied[i].from;
        copies[2] = l->copied[i].to;
    }
    memset(copies, 0xff, (size_t)(3 * (layout.copies_most - made)) * sizeof *copies);
}

static void clear_needs(quern_ledger *l, int64_t batch)
{
    memset(l->needs, 0, (size_t)batch * LEDGER_POOLS * sizeof *l->needs);
}

quern_status quern_ledger_begin(quern_ledger *ledger, const int32_t *sequences, const int64_t *counts,
                                int64_t batch, void *block, size_t bytes)
{
    quern_status status = ledger_check_members(ledger, sequences, counts, batch, false);
    if (status == QUERN_OK) status = check_block(ledger, batch, block, bytes);
    if (status == QUERN_OK && ledger->batch >= 0)
        status = error_argument("a step has begun: commit or abort comes first");
    if (status != QUERN_OK) return status;
    if ((status = find_needs(ledger, sequences, counts, batch)) != QUERN_OK) {
        clear_needs(ledger, batch);
        return status;
    }
    ledger->batch = batch;
    ledger->copies = 0;
    for (int64_t b = 0; b < batch; b++) {
        ledger->members[b] = sequences[b];
        if (sequences[b] < 0) continue;
        ledger->sequences[sequences[b]].count = counts[b];
        if (counts[b] == 0) continue;
        for (int i = 0; i < LEDGER_POOLS; i++) {
            const ledger_need *need = &ledger->needs[b * LEDGER_POOLS + i];
            if (ledger->pool[i].params.page == 0) continue;
            copy_shared(ledger, sequences[b], i, need);
            ledger_grow(ledger, sequences[b], i, need->had, need->end);
        }
    }
    fill(ledger, sequences, counts, batch, false, block);
    clear_needs(ledger, batch);
    return QUERN_OK;
}

quern_status quern_ledger_newest(const quern_ledger *ledger, const int32_t *sequences, const int64_t *counts,
                                 int64_t batch, void *block, size_t bytes)
{
    quern_status status = ledger_check_members(ledger, sequences, counts, batch, true);
    if (status == QUERN_OK) status = check_block(ledger, batch, block, bytes);
    if (status == QUERN_OK) fill(ledger, sequences, counts, batch, true, block);
    return status;
}

static quern_status need_step(const quern_ledger *ledger)
{
    const quern_status status = ledger_check(ledger);
    if (status != QUERN_OK || ledger->batch >= 0) return status;
    return error_argument("no step has begun: quern_ledger_begin() comes first");
}

quern_status quern_ledger_commit(quern_ledger *ledger)
{
    const quern_status status = need_step(ledger);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < ledger->copies; i++)
        ledger_release(&ledger->pool[ledger->copied[i].pool], ledger->copied[i].from);
    for (int64_t b = 0; b < ledger->batch; b++) {
        if (ledger->members[b] < 0) continue;
        ledger_sequence *s = &ledger->sequences[ledger->members[b]];
        s->tokens += s->count;
        s->held = s->held + s->count < ledger->params.rollback ? s->held + s->count : ledger->params.rollback;
        s->count = -1;
    }
    ledger->batch = -1;
    return QUERN_OK;
}

quern_status quern_ledger_abort(quern_ledger *ledger)
{
    const quern_status status = need_step(ledger);
    if (status != QUERN_OK) return status;
    for (int64_t b = ledger->batch - 1; b >= 0; b--) { /* as they were taken, the last first */
        if (ledger->members[b] < 0) continue;
        ledger_sequence *s = &ledger->sequences[ledger->members[b]];
        ledger_shrink(ledger, ledger->members[b], s->tokens + s->count, s->tokens);
        s->count = -1;
        for (; ledger->copies > 0; ledger->copies--) {
            const ledger_copy *c = &ledger->copied[ledger->copies - 1];
            if (c->sequence != ledger->members[b]) break;
            ledger_release(&ledger->pool[c->pool], c->to);
            ledger_row(ledger, c->sequence, c->pool)[c->column] = c->from;
        }
    }
    ledger->batch = -1;
    return QUERN_OK;
}
