/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache.c - what later tokens read of earlier ones, and the books of where it stands.
 *
 * Each layer has pools of pages of 64 rows: the raw rows of the last tokens, as a ring; the compressed
 * entries; in CSA layers the indexer's keys, which stand where the entries stand. Compressors keep states in
 * slots between two entries. One ledger serves all layers: pool 0 is the raw rows', pool 1 + i that of
 * entries of config.ratios[i] tokens.
 */
#include "v4.h"

#include <stdlib.h>
#include <string.h>

static bool make_pool(v4_model *m, int pool, int64_t channels, quern_tensor *t)
{
    int64_t pages;
    return done(quern_ledger_pages(&m->cache.params, pool, 0, NULL, &pages)) &&
           make(&m->device, m->act, 3, pages, PAGE, channels, t);
}

static bool make_state(v4_model *m, int64_t floats, v4_state *state)
{
    int64_t slots;
    return done(quern_ledger_pages(&m->cache.params, QUERN_LEDGER_STATES, 0, NULL, &slots)) &&
           make(&m->device, QUERN_F32, 2, slots, floats, 1, &state->sums) &&
           make(&m->device, QUERN_I32, 1, slots, 1, 1, &state->merged);
}

bool cache_open(v4_model *m, int64_t sequences, int64_t capacity, int64_t chunk)
{
    const v4_config *c = &m->config;
    v4_cache *k = &m->cache;
    quern_ledger_params *p = &k->params;
    size_t bytes;
    *p = (quern_ledger_params){.size = sizeof *p, .sequences = sequences, .step = chunk, .states = true};
    p->pools[0] = (quern_ledger_pool){.page = PAGE, .ring = c->window - 1 + chunk};
    for (int i = 0; i < RATIOS && c->ratios[i] > 0;
         i++) { /* a capacity for one entry, so that pools have pages */
        p->pools[1 + i] = (quern_ledger_pool){.page = PAGE, .block = c->ratios[i]};
        capacity = capacity > c->ratios[i] ? capacity : c->ratios[i];
    }
    p->capacity = capacity;
    if (!done(quern_ledger_size(p, &bytes))) return false;
    k->books = malloc(bytes);
    k->layer = calloc((size_t)c->layers, sizeof *k->layer);
    if (k->books == NULL || k->layer == NULL)
        return fail("no memory for the books of %lld sequences", (long long)sequences);
    if (!done(quern_ledger_create(p, k->books, bytes, &k->ledger)) ||
        !done(quern_ledger_block_bytes(k->ledger, sequences, &k->books_bytes)))
        return false;
    const int64_t rows = chunk > sequences ? chunk : sequences, columns = (capacity + PAGE - 1) / PAGE;
    k->host_bytes = k->books_bytes + 4 * (size_t)(2 * rows + sequences * columns);
    k->host = calloc(1, k->host_bytes);
    if (k->host == NULL) return fail("no memory for a step of %lld tokens", (long long)chunk);
    k->block = m->device.cuda ? device_take(&m->device, k->host_bytes) : k->host;
    bool ok = k->block != NULL;
    for (int64_t i = 0; ok && i < c->layers; i++) {
        const bool csa = c->ratio[i] == CSA;
        const int pool = 1 + cache_ratio(c, c->ratio[i]);
        v4_rows *r = &k->layer[i];
        ok = make_pool(m, 0, c->dim, &r->raw);
        if (c->ratio[i] > 0)
            ok = ok && make_pool(m, pool, c->dim, &r->entries) &&
                 make_state(m, (csa ? 6 : 3) * c->dim, &r->main);
        if (csa)
            ok = ok && make_pool(m, pool, c->index_dim, &r->keys) &&
                 make_state(m, 6 * c->index_dim, &r->index);
    }
    return ok;
}

/* A page that the step writes and that sequences share, in all layers: row 1's to row 2's. */
static bool copy_page(v4_model *m, const int32_t *row)
{
    for (int64_t l = 0; l < m->config.layers; l++) {
        const v4_rows *r = &m->cache.layer[l];
        const quern_tensor *pools[] = {row[0] == 0 ? &r->raw : &r->entries, &r->keys};
        if (row[0] > 0 && row[0] != 1 + cache_ratio(&m->config, m->config.ratio[l])) continue;
        for (int p = 0; p < (row[0] > 0 ? 2 : 1); p++) {
            if (pools[p]->data == NULL) continue;
            const size_t page = tensor_bytes(pools[p]) / (size_t)pools[p]->shape[0];
            char *data = pools[p]->data;
            if (!device_copy(&m->device, data + (size_t)row[2] * page, data + (size_t)row[1] * page, page))
                return false;
        }
    }
    return true;
}

/* Behind the ledger's block: positions [rows], slots of raw rows [rows], pages of raw rows [B, columns]. */
static void fill(const v4_model *m, const quern_step *books, int64_t rows, int64_t columns, int32_t *to)
{
    const int32_t *starts = books->positions.data;
    const quern_tensor *ring = &books->tables[0];
    const int64_t batch = ring->shape[0], tokens = rows / batch;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t start = starts[b], before = start - m->config.window + 1;
        const int32_t *pages = (const int32_t *)ring->data + b * ring->shape[1];
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t at = start + t;
            to[b * tokens + t] = (int32_t)at;
            to[rows + b * tokens + t] = pages[at / PAGE % ring->shape[1]] * PAGE + (int32_t)(at % PAGE);
        }
        for (int64_t i = (before > 0 ? before : 0) / PAGE; i <= (start + tokens - 1) / PAGE; i++)
            to[2 * rows + b * columns + i] = pages[i % ring->shape[1]];
    }
}

bool cache_begin(v4_model *m, const int32_t *sequences, int64_t batch, int64_t tokens, v4_step *step)
{
    v4_cache *k = &m->cache;
    const v4_device *d = &m->device;
    const int64_t rows = batch * tokens, columns = (k->params.capacity + PAGE - 1) / PAGE;
    const int32_t *at = k->block + k->books_bytes / 4;
    quern_step books = QUERN_STEP_INIT;
    int64_t *counts = malloc((size_t)batch * sizeof *counts);
    if (counts == NULL) return fail("no memory for a step of %lld sequences", (long long)batch);
    for (int64_t b = 0; b < batch; b++) counts[b] = tokens;
    const bool begun = done(quern_ledger_begin(k->ledger, sequences, counts, batch, k->host, k->books_bytes));
    free(counts);
    if (!begun || !done(quern_ledger_step(k->ledger, batch, k->host, QUERN_CPU, 0, &books))) return false;
    fill(m, &books, rows, columns, k->host + k->books_bytes / 4);
    *step = (v4_step){.batch = batch, .books = QUERN_STEP_INIT};
    step->position = view(d, at, QUERN_I32, 1, rows, 1, 1, 1);
    step->raw_slot = view(d, at + rows, QUERN_I32, 1, rows, 1, 1, 1);
    step->raw_table = view(d, at + 2 * rows, QUERN_I32, 2, batch, columns, 1, 1);
    bool ok = done(quern_ledger_step(k->ledger, batch, k->block, d->cuda ? QUERN_CUDA : QUERN_CPU, 0,
                                     &step->books)) &&
              (!d->cuda || device_copy(d, k->block, k->host, k->host_bytes));
    const int32_t *copy = books.copies.data; /* the append copies states */
    for (int64_t i = 0; ok && i < books.copies.shape[0]; i++, copy += 3)
        ok = copy[0] < 0 || copy[0] == QUERN_LEDGER_STATES || copy_page(m, copy);
    return ok;
}
