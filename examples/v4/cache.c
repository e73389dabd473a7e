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

/* The layer's pools and states. */
static bool make_rows(v4_model *m, v4_layer *l)
{
    const v4_config *c = &m->config;
    const quern_ledger_params *p = &m->cache.params;
    for (int i = 0; i <= l->compressors; i++) {
        const int pool = i == 0 ? 0 : l->pool;
        int64_t pages;
        if (!done(quern_ledger_pages(p, pool, 0, NULL, &pages)) ||
            !make(&m->device, m->act, SHAPE(pages, PAGE, i == 2 ? c->index_dim : c->dim), &l->rows[i]))
            return false;
    }
    for (int i = 0; i < l->compressors; i++) {
        const int64_t floats = (l->ratio == CSA ? 6 : 3) * (i == 1 ? c->index_dim : c->dim);
        int64_t slots;
        if (!done(quern_ledger_pages(p, QUERN_LEDGER_STATES, 0, NULL, &slots)) ||
            !make(&m->device, QUERN_F32, SHAPE(slots, floats), &l->sums[i]) ||
            !make(&m->device, QUERN_I32, SHAPE(slots), &l->merged[i]))
            return false;
    }
    return true;
}

bool cache_open(v4_model *m, int64_t sequences, int64_t capacity, int64_t chunk)
{
    const v4_config *c = &m->config;
    v4_cache *k = &m->cache;
    quern_ledger_params *p = &k->params;
    size_t bytes;
    *p = (quern_ledger_params){.size = sizeof *p, .sequences = sequences, .step = chunk, .states = true};
    p->pools[0] = (quern_ledger_pool){.page = PAGE, .ring = c->window - 1 + chunk};
    for (int i = 0; i < RATIOS && c->ratios[i] > 0; i++) {
        p->pools[1 + i] = (quern_ledger_pool){.page = PAGE, .block = c->ratios[i]};
        capacity = capacity > c->ratios[i] ? capacity : c->ratios[i]; /* of one entry: pools have pages */
    }
    p->capacity = capacity;
    if (!done(quern_ledger_size(p, &bytes))) return false;
    k->books = malloc(bytes);
    k->counts = calloc((size_t)sequences, sizeof *k->counts);
    k->ids = calloc((size_t)sequences, sizeof *k->ids);
    if (k->books == NULL || k->counts == NULL || k->ids == NULL)
        return fail("no memory for the books of %lld sequences", (long long)sequences);
    for (int32_t i = 0; i < sequences; i++) k->ids[i] = i;
    if (!done(quern_ledger_create(p, k->books, bytes, &k->ledger)) ||
        !done(quern_ledger_block_bytes(k->ledger, sequences, &k->books_bytes)))
        return false;
    const int64_t rows = chunk > sequences ? chunk : sequences, columns = (capacity + PAGE - 1) / PAGE;
    k->host_bytes = k->books_bytes + 4 * (size_t)(2 * rows + sequences * columns);
    k->host = calloc(1, k->host_bytes);
    if (k->host == NULL) return fail("no memory for a step of %lld tokens", (long long)chunk);
    k->block = m->device.cuda ? device_take(&m->device, k->host_bytes) : k->host;
    bool ok = k->block != NULL;
    for (int64_t i = 0; ok && i < c->layers; i++) ok = make_rows(m, &m->layer[i]);
    return ok;
}

/* A page that the step writes and that sequences share, in all layers: copy [pool, from, to]. */
static bool copy_page(v4_model *m, const int32_t *copy)
{
    for (const v4_layer *l = m->layer; l < m->layer + m->config.layers; l++)
        for (int i = 0; i <= l->compressors; i++) {
            const size_t page = tensor_bytes(&l->rows[i]) / (size_t)l->rows[i].shape[0];
            char *data = l->rows[i].data;
            if (copy[0] == (i == 0 ? 0 : l->pool) &&
                !device_copy(&m->device, data + (size_t)copy[2] * page, data + (size_t)copy[1] * page, page))
                return false;
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

bool cache_begin(v4_model *m, int64_t first, int64_t batch, int64_t tokens, v4_step *step)
{
    v4_cache *k = &m->cache;
    const v4_device *d = &m->device;
    const int64_t rows = batch * tokens, columns = (k->params.capacity + PAGE - 1) / PAGE;
    const int32_t *at = k->block + k->books_bytes / 4;
    quern_step books = QUERN_STEP_INIT;
    for (int64_t b = 0; b < batch; b++) k->counts[b] = tokens;
    if (!done(quern_ledger_begin(k->ledger, k->ids + first, k->counts, batch, k->host, k->books_bytes)) ||
        !done(quern_ledger_step(k->ledger, batch, k->host, QUERN_CPU, 0, &books)))
        return false;
    fill(m, &books, rows, columns, k->host + k->books_bytes / 4);
    *step = (v4_step){.batch = batch, .books = QUERN_STEP_INIT};
    step->position = view(d, at, QUERN_I32, SHAPE(rows));
    step->raw_slot = view(d, at + rows, QUERN_I32, SHAPE(rows));
    step->raw_table = view(d, at + 2 * rows, QUERN_I32, SHAPE(batch, columns));
    bool ok = done(quern_ledger_step(k->ledger, batch, k->block, d->cuda ? QUERN_CUDA : QUERN_CPU, 0,
                                     &step->books)) &&
              (!d->cuda || device_copy(d, k->block, k->host, k->host_bytes));
    const int32_t *copy =
        books.copies.data; /* those of states, and -1, are no pool's: the append copies states */
    for (int64_t i = 0; ok && i < books.copies.shape[0]; i++) ok = copy_page(m, copy + 3 * i);
    return ok;
}
