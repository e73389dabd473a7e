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
    bool save, ok;
} walk;

static void piece(walk *w, const quern_tensor *t, int64_t row, int64_t count)
{
    const size_t each =
        t->ndim == 3 ? tensor_bytes(t) / (size_t)(t->shape[0] * PAGE) : tensor_bytes(t) / (size_t)t->shape[0];
    char *place = (char *)t->data + (size_t)row * each, *at = w->at + w->bytes;
    const size_t bytes = (size_t)count * each;
    if (w->at != NULL)
        w->ok = w->ok && device_copy(w->device, w->save ? at : place, w->save ? place : at, bytes);
    w->bytes += bytes;
}

/* Rows first ... end - 1 of a pool, page by page. */
static void rows(walk *w, const quern_tensor *pool, const quern_tensor *table, int64_t first, int64_t end)
{
    for (int64_t r = first, n; r < end; r += n) {
        n = PAGE - r % PAGE < end - r ? PAGE - r % PAGE : end - r;
        piece(w, pool, ((const int32_t *)table->data)[r / PAGE % table->shape[1]] * (int64_t)PAGE + r % PAGE,
              n);
    }
}

static bool go_through(v4_model *m, int64_t count, walk *w)
{
    const v4_config *c = &m->config;
    const int32_t sequence = 0;
    const int64_t none = 0, first = count > c->window - 1 ? count - c->window + 1 : 0;
    quern_step books = QUERN_STEP_INIT;
    if (!done(
            quern_ledger_newest(m->cache.ledger, &sequence, &none, 1, m->cache.host, m->cache.books_bytes)) ||
        !done(quern_ledger_step(m->cache.ledger, 1, m->cache.host, QUERN_CPU, 0, &books)))
        return false;
    const int64_t slot = *(const int32_t *)books.slots.data;
    *w = (walk){&m->device, w->at, 0, w->save, true};
    for (int64_t l = 0; l < c->layers; l++) {
        const v4_rows *r = &m->cache.layer[l];
        const v4_state *states[] = {&r->main, &r->index};
        rows(w, &r->raw, &books.tables[0], first, count);
        if (c->ratio[l] == 0) continue;
        const quern_tensor *table = &books.tables[1 + cache_ratio(c, c->ratio[l])];
        rows(w, &r->entries, table, 0, count / c->ratio[l]);
        if (c->ratio[l] == CSA) rows(w, &r->keys, table, 0, count / CSA);
        for (int i = 0; i < (c->ratio[l] == CSA ? 2 : 1); i++) {
            piece(w, &states[i]->sums, slot, 1);
            piece(w, &states[i]->merged, slot, 1);
        }
    }
    return w->ok;
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

bool session_save(v4_model *m, const char *path, const int32_t *tokens, int64_t count, const float *logits)
{
    walk w = {.save = true};
    if (!go_through(m, count, &w)) return false;
    const int64_t sizes[] = {count, m->config.vocab, (int64_t)w.bytes};
    w.at = malloc(w.bytes + 1);
    const void *data[] = {tokens, logits, w.at};
    quern_tensor parts[3];
    quern_safetensors_item items[3];
    char sum[32];
    bool ok = (w.at != NULL || fail("no memory for a session")) && go_through(m, count, &w);
    for (int i = 0; i < 3; i++) {
        parts[i] = quern_tensor_contiguous((void *)data[i], dtypes[i], 1, &sizes[i]);
        items[i] = (quern_safetensors_item){names[i], &parts[i]};
    }
    if (ok) sum_of(m, parts, sum);
    ok = ok && done(quern_safetensors_save(path, items, 3, &(quern_safetensors_pair){"v4-session", sum}, 1));
    free(w.at);
    return ok;
}

/* The ledger's sequence gets its tokens, as steps of at most a chunk; then the walk takes rows and states. */
static bool take(v4_model *m, const quern_tensor *parts, int64_t count)
{
    const int32_t sequence = 0;
    const int64_t chunk = m->cache.params.step;
    v4_step step;
    for (int64_t at = 0; at < count; at += chunk)
        if (!cache_begin(m, &sequence, 1, count - at < chunk ? count - at : chunk, &step) ||
            !done(quern_ledger_commit(m->cache.ledger)))
            return false;
    walk w = {0};
    if (!go_through(m, count, &w)) return false;
    if ((size_t)parts[2].shape[0] != w.bytes)
        return fail("the session is damaged: its state has another size");
    w.at = parts[2].data;
    return go_through(m, count, &w);
}

static bool load(v4_model *m, const quern_safetensors *file, const char *path, const int32_t *tokens,
                 int64_t most, int64_t *count, float *logits)
{
    const char *given = quern_safetensors_metadata(file, "v4-session");
    quern_tensor parts[3];
    char sum[32];
    for (int i = 0; i < 3; i++)
        if (given == NULL || quern_safetensors_get(file, names[i], &parts[i]) != QUERN_OK ||
            parts[i].dtype != dtypes[i] || parts[i].ndim != 1)
            return fail("%s is no session of this program", path);
    sum_of(m, parts, sum);
    if (strcmp(given, sum) != 0 || parts[1].shape[0] != m->config.vocab || parts[0].shape[0] < 1)
        return fail("%s is damaged, or of another model or other activations", path);
    *count = parts[0].shape[0];
    for (int64_t i = 0; i < *count; i++)
        if (i >= most || ((const int32_t *)parts[0].data)[i] != tokens[i])
            return fail(
                "%s: the prompt goes its own way at token %lld of the session's %lld: a prompt that begins "
                "with all of them is accepted, or another file",
                path, (long long)i, (long long)*count);
    memcpy(logits, parts[1].data, tensor_bytes(&parts[1]));
    return take(m, parts, *count);
}

bool session_load(v4_model *m, const char *path, const int32_t *tokens, int64_t most, int64_t *count,
                  float *logits)
{
    quern_safetensors *file = NULL;
    *count = 0;
    if (access(path, F_OK) != 0) return true;
    const bool ok =
        done(quern_safetensors_open(path, &file)) && load(m, file, path, tokens, most, count, logits);
    quern_safetensors_close(file);
    return ok;
}
