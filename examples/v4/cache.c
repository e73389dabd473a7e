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

static int64_t pages_of(const v4_model *m, int64_t pool)
{
    int64_t pages;
    check(quern_ledger_pages(&m->cache.params, pool, 0, NULL, &pages));
    return pages;
}

void cache_open(v4_model *m, int64_t sequences, int64_t capacity, int64_t chunk)
{
    const v4_config *c = &m->config;
    const v4_device *d = &m->device;
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
    check(quern_ledger_size(p, &bytes));
    k->books = host_take(bytes);
    k->counts = host_take((size_t)sequences * sizeof *k->counts);
    k->ids = host_take((size_t)sequences * sizeof *k->ids);
    for (int32_t i = 0; i < sequences; i++) k->ids[i] = i;
    check(quern_ledger_create(p, k->books, bytes, &k->ledger));
    check(quern_ledger_block_bytes(k->ledger, sequences, &k->books_bytes));
    const int64_t rows = chunk > sequences ? chunk : sequences, columns = (capacity + PAGE - 1) / PAGE;
    k->host_bytes = k->books_bytes + 4 * (size_t)(2 * rows + sequences * columns);
    k->host = host_take(k->host_bytes);
    k->block = d->cuda ? device_take(d, k->host_bytes) : k->host;
    for (v4_layer *l = m->layer; l < m->layer + c->layers; l++) {
        const int64_t dims[] = {c->dim, c->index_dim}, slots = pages_of(m, QUERN_LEDGER_STATES);
        l->rows[0] = make(d, m->act, SHAPE(pages_of(m, 0), PAGE, c->dim));
        for (int i = 0; i < l->compressors; i++) {
            l->rows[1 + i] = make(d, m->act, SHAPE(pages_of(m, l->pool), PAGE, dims[i]));
            l->sums[i] = make(d, QUERN_F32, SHAPE(slots, (l->ratio == CSA ? 6 : 3) * dims[i]));
            l->merged[i] = make(d, QUERN_I32, SHAPE(slots));
        }
    }
}

/* A page that the step writes and that sequences share, in all layers: copy [pool, from, to]. */
static void copy_page(v4_model *m, const int32_t *copy)
{
    for (const v4_layer *l = m->layer; l < m->layer + m->config.layers; l++)
        for (int i = 0; i <= l->compressors; i++) {
            const size_t page = tensor_bytes(&l->rows[i]) / (size_t)l->rows[i].shape[0];
            char *data = l->rows[i].data;
            if (copy[0] == (i == 0 ? 0 : l->pool))
                device_copy(&m->device, data + (size_t)copy[2] * page, data + (size_t)copy[1] * page, page);
        }
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

void cache_begin(v4_model *m, int64_t first, int64_t batch, int64_t tokens, v4_step *step)
{
    v4_cache *k = &m->cache;
    const v4_device *d = &m->device;
    const int64_t rows = batch * tokens, columns = (k->params.capacity + PAGE - 1) / PAGE;
    const int32_t *at = k->block + k->books_bytes / 4;
    quern_step books = QUERN_STEP_INIT;
    for (int64_t b = 0; b < batch; b++) k->counts[b] = tokens;
    check(quern_ledger_begin(k->ledger, k->ids + first, k->counts, batch, k->host, k->books_bytes));
    check(quern_ledger_step(k->ledger, batch, k->host, QUERN_CPU, 0, &books));
    fill(m, &books, rows, columns, k->host + k->books_bytes / 4);
    if (d->cuda) device_copy(d, k->block, k->host, k->host_bytes);
    *step = (v4_step){.batch = batch, .books = QUERN_STEP_INIT};
    step->position = view(d, at, QUERN_I32, SHAPE(rows));
    step->raw_slot = view(d, at + rows, QUERN_I32, SHAPE(rows));
    step->raw_table = view(d, at + 2 * rows, QUERN_I32, SHAPE(batch, columns));
    check(quern_ledger_step(k->ledger, batch, k->block, step->position.device, 0, &step->books));
    /* Those of states, which the append copies, and -1 are no pool's. */
    for (int64_t i = 0; i < books.copies.shape[0]; i++) copy_page(m, (int32_t *)books.copies.data + 3 * i);
}
