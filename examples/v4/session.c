/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * session.c - sequence 0's tokens, rows and states in a safetensors file, so that a later run begins behind
 * them. Rows and states stand in one array, layer after layer; the metadata hold a checksum of all.
 */
#include "v4.h"

#include <quern/safetensors.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The places of the sequence on the device, gone through in one order: copied to or from `at`, or counted. */
typedef struct walk {
    const v4_device *device;
    char *at; /* NULL: only `bytes` is wanted */
    size_t bytes;
    bool save;
} walk;

/* Rows [.., channels], or numbers [..]. */
static void piece(walk *w, const quern_tensor *t, int64_t row, int64_t count)
{
    const size_t each = quern_dtype_size(t->dtype) * (size_t)(t->ndim > 1 ? t->shape[t->ndim - 1] : 1),
                 bytes = (size_t)count * each;
    char *place = (char *)t->data + (size_t)row * each, *at = w->at + w->bytes;
    if (w->at != NULL) device_copy(w->device, w->save ? at : place, w->save ? place : at, bytes);
    w->bytes += bytes;
}

/* Rows first ... end - 1 of a pool, page by page. */
static void pages(walk *w, const quern_tensor *pool, const quern_tensor *table, int64_t first, int64_t end)
{
    const int32_t *page = table->data;
    for (int64_t r = first, n; r < end; r += n) {
        n = PAGE - r % PAGE < end - r ? PAGE - r % PAGE : end - r;
        piece(w, pool, page[r / PAGE % table->shape[1]] * (int64_t)PAGE + r % PAGE, n);
    }
}

static void go_through(v4_model *m, int64_t count, walk *w)
{
    v4_cache *k = &m->cache;
    const int64_t none = 0, first = count - m->config.window + 1;
    quern_step books = QUERN_STEP_INIT;
    check(quern_ledger_newest(k->ledger, k->ids, &none, 1, k->host, k->books_bytes));
    check(quern_ledger_step(k->ledger, 1, k->host, QUERN_CPU, 0, &books));
    const int64_t slot = *(const int32_t *)books.slots.data;
    *w = (walk){&m->device, w->at, 0, w->save};
    for (const v4_layer *l = m->layer; l < m->layer + m->config.layers; l++) {
        pages(w, &l->rows[0], &books.tables[0], first > 0 ? first : 0, count);
        for (int i = 0; i < l->compressors; i++) {
            pages(w, &l->rows[1 + i], &books.tables[l->pool], 0, count / l->ratio);
            piece(w, &l->sums[i], slot, 1);
            piece(w, &l->merged[i], slot, 1);
        }
    }
}

/* Of the model's numbers and first embeddings, the activations' type, and all that the file holds. */
static void sum_of(const v4_model *m, const quern_tensor *parts, char *text)
{
    const size_t bytes = tensor_bytes(&m->embed);
    uint64_t sum = checksum(m->act, &m->config, sizeof m->config);
    sum = checksum(sum, m->embed.data, bytes < 4096 ? bytes : 4096);
    for (int i = 0; i < 3; i++) sum = checksum(sum, parts[i].data, tensor_bytes(&parts[i]));
    snprintf(text, 32, "%016" PRIx64, sum);
}

static const char *const names[] = {"tokens", "logits", "state"};
static const quern_dtype dtypes[] = {QUERN_I32, QUERN_F32, QUERN_U8};

void session_save(v4_model *m, const char *path, const int32_t *tokens, int64_t count, const float *logits)
{
    walk w = {.save = true};
    go_through(m, count, &w);
    w.at = host_take(w.bytes);
    go_through(m, count, &w);
    const int64_t sizes[] = {count, m->config.vocab, (int64_t)w.bytes};
    const void *data[] = {tokens, logits, w.at};
    quern_tensor parts[3];
    quern_safetensors_item items[3];
    char sum[32];
    for (int i = 0; i < 3; i++) {
        parts[i] = quern_tensor_contiguous((void *)data[i], dtypes[i], 1, &sizes[i]);
        items[i] = (quern_safetensors_item){names[i], &parts[i]};
    }
    sum_of(m, parts, sum);
    check(quern_safetensors_save(path, items, 3, &(quern_safetensors_pair){"v4-session", sum}, 1));
    free(w.at);
}

int64_t session_load(v4_model *m, const char *path, const int32_t *tokens, int64_t most, float *logits)
{
    quern_safetensors *file;
    quern_tensor parts[3];
    v4_step step;
    walk w = {0};
    char sum[32];
    if (access(path, F_OK) != 0) return 0;
    check(quern_safetensors_open(path, &file));
    const char *given = quern_safetensors_metadata(file, "v4-session");
    for (int i = 0; i < 3; i++)
        if (given == NULL || quern_safetensors_get(file, names[i], &parts[i]) != QUERN_OK ||
            parts[i].dtype != dtypes[i] || parts[i].ndim != 1)
            fail("%s is no session of this program", path);
    sum_of(m, parts, sum);
    const int64_t count = parts[0].shape[0];
    if (strcmp(given, sum) != 0 || parts[1].shape[0] != m->config.vocab || count < 1)
        fail("%s is damaged, or of another model or other activations", path);
    for (int64_t i = 0; i < count; i++)
        if (i >= most || ((const int32_t *)parts[0].data)[i] != tokens[i])
            fail("%s: the prompt goes its own way at token %lld of the session's %lld: one that begins with "
                 "all of them is accepted, or another file",
                 path, (long long)i, (long long)count);
    memcpy(logits, parts[1].data, tensor_bytes(&parts[1]));
    /* The ledger's sequence gets its tokens, as steps of at most a chunk; then the walk takes rows and states. */
    for (int64_t at = 0, n; at < count; at += n) {
        n = count - at < m->cache.params.step ? count - at : m->cache.params.step;
        cache_begin(m, 0, 1, n, &step);
        check(quern_ledger_commit(m->cache.ledger));
    }
    go_through(m, count, &w);
    if ((size_t)parts[2].shape[0] != w.bytes) fail("%s is damaged: its state has another size", path);
    w.at = parts[2].data;
    go_through(m, count, &w);
    quern_safetensors_close(file);
    return count;
}
