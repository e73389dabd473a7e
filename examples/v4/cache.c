/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache.c - what later tokens read of earlier ones, the books of where it stands, and a sequence in a file.
 *
 * Each layer has pools of pages of 64 rows: the raw rows of the last tokens, as a ring; the compressed
 * entries; in CSA layers the indexer's keys, which stand where the entries stand. Compressors keep states in
 * slots between two entries. One ledger serves all layers: pool 0 is the raw rows', pool 1 + i that of
 * entries of config.ratios[i] tokens.
 */
#include "v4.h"

#include <quern/safetensors.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int64_t pages_of(const v4_model *m, int64_t pool)
{
    int64_t pages;
    check(quern_ledger_pages(&m->cache.params, pool, 0, NULL, &pages));
    return pages;
}

void cache_open(v4_model *m, int64_t sequences, int64_t capacity, int64_t chunk)
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
    check(quern_ledger_size(p, &bytes));
    k->counts = host_take((size_t)sequences * sizeof *k->counts);
    k->ids = host_take((size_t)sequences * sizeof *k->ids);
    for (int32_t i = 0; i < sequences; i++) k->ids[i] = i;
    check(quern_ledger_create(p, host_take(bytes), bytes, &k->ledger));
    check(quern_ledger_block_bytes(k->ledger, sequences, &k->books_bytes));
    const int64_t rows = chunk > sequences ? chunk : sequences, columns = (capacity + PAGE - 1) / PAGE;
    k->host_bytes = k->books_bytes + 4 * (size_t)(2 * rows + sequences * columns);
    k->host = host_take(k->host_bytes);
    k->block = m->cuda ? device_take(m, k->host_bytes) : k->host;
    for (v4_layer *l = m->layer; l < m->layer + c->layers; l++) {
        const int64_t slots = pages_of(m, QUERN_LEDGER_STATES);
        l->rows[0] = make(m, m->act, SHAPE(pages_of(m, 0), PAGE, c->dim));
        for (int i = 0; i < l->compressors; i++) {
            const int64_t dim = i == 1 ? c->index_dim : c->dim;
            l->rows[1 + i] = make(m, m->act, SHAPE(pages_of(m, l->pool), PAGE, dim));
            l->sums[i] = make(m, QUERN_F32, SHAPE(slots, (l->ratio == CSA ? 6 : 3) * dim));
            l->merged[i] = make(m, QUERN_I32, SHAPE(slots));
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
                device_copy(m, data + (size_t)copy[2] * page, data + (size_t)copy[1] * page, page);
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
    const int64_t rows = batch * tokens, columns = (k->params.capacity + PAGE - 1) / PAGE;
    const int32_t *at = k->block + k->books_bytes / 4;
    quern_step books = QUERN_STEP_INIT;
    for (int64_t b = 0; b < batch; b++) k->counts[b] = tokens;
    check(quern_ledger_begin(k->ledger, k->ids + first, k->counts, batch, k->host, k->books_bytes));
    check(quern_ledger_step(k->ledger, batch, k->host, QUERN_CPU, 0, &books));
    fill(m, &books, rows, columns, k->host + k->books_bytes / 4);
    if (m->cuda) device_copy(m, k->block, k->host, k->host_bytes);
    *step = (v4_step){.batch = batch, .books = QUERN_STEP_INIT};
    step->position = view(m, at, QUERN_I32, SHAPE(rows));
    step->raw_slot = view(m, at + rows, QUERN_I32, SHAPE(rows));
    step->raw_table = view(m, at + 2 * rows, QUERN_I32, SHAPE(batch, columns));
    check(quern_ledger_step(k->ledger, batch, k->block, step->position.device, 0, &step->books));
    /* Those of states, which the append copies, and -1 are no pool's. */
    for (int64_t i = 0; i < books.copies.shape[0]; i++) copy_page(m, (int32_t *)books.copies.data + 3 * i);
}

/* ---- a sequence as a file, so that a later run begins behind it ---- */

/* Logits, and the rows and states of sequence 0, in one order: copied to or from `at`, or counted. */
typedef struct walk {
    v4_model *m;
    char *at; /* NULL: only `bytes` is wanted */
    size_t bytes;
    bool save;
} walk;

static void piece(walk *w, void *place, size_t bytes)
{
    if (w->at != NULL && w->save) device_read(w->m, w->at + w->bytes, place, bytes);
    else if (w->at != NULL) device_copy(w->m, place, w->at + w->bytes, bytes);
    w->bytes += bytes;
}

static void piece_of(walk *w, const quern_tensor *pool, const quern_tensor *table, int64_t first, int64_t end)
{
    const size_t each = tensor_bytes(pool) / (size_t)(pool->shape[0] * PAGE);
    for (int64_t r = first, n; r < end; r += n) {
        const int64_t page = ((const int32_t *)table->data)[r / PAGE % table->shape[1]];
        n = PAGE - r % PAGE < end - r ? PAGE - r % PAGE : end - r;
        piece(w, (char *)pool->data + (size_t)(page * PAGE + r % PAGE) * each, (size_t)n * each);
    }
}

static void go_through(walk *w, int64_t count, const float *logits)
{
    const v4_model *m = w->m;
    const v4_cache *k = &m->cache;
    const int64_t none = 0, first = count - m->config.window + 1;
    quern_step books = QUERN_STEP_INIT;
    check(quern_ledger_newest(k->ledger, k->ids, &none, 1, k->host, k->books_bytes));
    check(quern_ledger_step(k->ledger, 1, k->host, QUERN_CPU, 0, &books));
    const size_t slot = (size_t) * (const int32_t *)books.slots.data;
    w->bytes = 0;
    piece(w, (void *)logits, (size_t)m->config.vocab * sizeof *logits);
    for (const v4_layer *l = m->layer; l < m->layer + m->config.layers; l++) {
        piece_of(w, &l->rows[0], &books.tables[0], first > 0 ? first : 0, count);
        for (int i = 0; i < l->compressors; i++) {
            const size_t floats = (size_t)l->sums[i].shape[1];
            piece_of(w, &l->rows[1 + i], &books.tables[l->pool], 0, count / l->ratio);
            piece(w, (float *)l->sums[i].data + slot * floats, floats * sizeof(float));
            piece(w, (int32_t *)l->merged[i].data + slot, sizeof(int32_t));
        }
    }
}

static void sum_of(const v4_model *m, const quern_tensor *tokens, const quern_tensor *state, char text[32])
{
    const size_t bytes = tensor_bytes(&m->embed);
    uint64_t sum = checksum(m->act, &m->config, sizeof m->config);
    sum = checksum(sum, m->embed.data, bytes < 4096 ? bytes : 4096);
    sum = checksum(sum, tokens->data, tensor_bytes(tokens));
    snprintf(text, 32, "%016" PRIx64, checksum(sum, state->data, tensor_bytes(state)));
}

void session_save(v4_model *m, const char *path, const int32_t *tokens, int64_t count, const float *logits)
{
    walk w = {.m = m, .save = true};
    char sum[32];
    go_through(&w, count, logits);
    w.at = host_take(w.bytes);
    go_through(&w, count, logits);
    const quern_tensor all = quern_tensor_contiguous((void *)tokens, QUERN_I32, 1, &count),
                       state = quern_tensor_contiguous(w.at, QUERN_U8, 1, &(int64_t){(int64_t)w.bytes});
    const quern_safetensors_item items[] = {{"tokens", &all}, {"state", &state}};
    sum_of(m, &all, &state, sum);
    check(quern_safetensors_save(path, items, 2, &(quern_safetensors_pair){"v4-session", sum}, 1));
    free(w.at);
}

int64_t session_load(v4_model *m, const char *path, const int32_t *tokens, int64_t most, float *logits)
{
    quern_safetensors *file;
    quern_tensor all, state;
    v4_step step;
    walk w = {.m = m};
    char sum[32];
    if (access(path, F_OK) != 0) return 0;
    check(quern_safetensors_open(path, &file));
    const char *given = quern_safetensors_metadata(file, "v4-session");
    if (given == NULL || quern_safetensors_get(file, "tokens", &all) != QUERN_OK ||
        quern_safetensors_get(file, "state", &state) != QUERN_OK || all.dtype != QUERN_I32 || all.ndim != 1)
        fail("%s is no session of this program", path);
    const int64_t count = all.shape[0];
    sum_of(m, &all, &state, sum);
    if (strcmp(given, sum) != 0 || count < 1)
        fail("%s is damaged, or of another model or other activations", path);
    for (int64_t i = 0; i < count; i++)
        if (i >= most || ((const int32_t *)all.data)[i] != tokens[i])
            fail("%s: the prompt goes its own way at token %lld of the session's %lld", path, (long long)i,
                 (long long)count);
    /* The ledger gets the tokens, as steps of at most a chunk; then the walk takes rows and states. */
    for (int64_t at = 0, n; at < count; at += n) {
        n = count - at < m->cache.params.step ? count - at : m->cache.params.step;
        cache_begin(m, 0, 1, n, &step);
        check(quern_ledger_commit(m->cache.ledger));
    }
    go_through(&w, count, logits);
    if (tensor_bytes(&state) != w.bytes) fail("%s is damaged: its state has another size", path);
    w.at = state.data;
    go_through(&w, count, logits);
    quern_safetensors_close(file);
    return count;
}
