/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_cache.c - what a layer keeps of its sequences, in the caller's memory.
 *
 * `memory` holds the header, a record a sequence, then the compressors' states. `rows` holds for each
 * sequence its last window - 1 + ring raw rows, which rollbacks of `ring` tokens leave enough of, then its
 * entries, then the indexer's keys. Raw rows are moved to the front by every call: these are 128 rows, and a
 * contiguous window needs no pages.
 */
#include "core/arena.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <string.h>

enum { DIM_MOST = 512 };
static const uint64_t cache_magic = 0x3472657961c4a510;

typedef struct cache_layout {
    quern_dsv4_layer_cache header;
    size_t memory, rows; /* bytes that the caller hands over */
    size_t states_at;
} cache_layout;

static quern_status in_range(const char *name, int64_t value, int64_t least, int64_t most)
{
    if (value >= least && value <= most) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is %lld: %lld to %lld are accepted", name,
                     (long long)value, (long long)least, (long long)most);
}

static quern_status check_params(quern_dsv4_layer_cache_params *p)
{
    const bool csa = p->kind == QUERN_DSV4_LAYER_CSA, swa = p->kind == QUERN_DSV4_LAYER_SWA;
    if (p->window == 0) p->window = DSV4_WINDOW;
    if (p->ratio == 0) p->ratio = csa ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    if (!csa) p->index_dim = 0;
    const struct {
        const char *name;
        int64_t value, least, most;
    } ranges[] = {{"kind", p->kind, 0, QUERN_DSV4_LAYER_SWA},
                  {"sequences", p->sequences, 1, INT32_MAX},
                  {"capacity", p->capacity, 1, INT32_MAX},
                  {"dim", p->dim, 8, DIM_MOST},
                  {"window", p->window, 1, INT32_MAX},
                  {"ratio", p->ratio, 1, DSV4_RATIO_MOST},
                  {"index_dim", p->index_dim, csa ? 8 : 0, DSV4_INDEX_WIDTH_MOST},
                  {"ring", p->ring, 0, DSV4_RING_MOST}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const quern_status status =
            in_range(ranges[i].name, ranges[i].value, ranges[i].least, ranges[i].most);
        if (status != QUERN_OK) return status;
    }
    if ((unsigned)p->dtype > QUERN_BF16 || (VIEW_ACTIVATION & 1u << p->dtype) == 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "dtype is %s: f32, f16 and bf16 are accepted",
                         quern_dtype_name(p->dtype));
    if (swa) p->ratio = 0;
    return QUERN_OK;
}

static quern_dsv4_compress_params state_params(const quern_dsv4_layer_cache_params *p)
{
    quern_dsv4_compress_params c = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    c.kind = p->kind == QUERN_DSV4_LAYER_CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    c.ratio = p->ratio;
    return c;
}

/* Adds a product to *bytes. False if that is too much. */
static bool add(size_t *bytes, int64_t count, size_t each)
{
    size_t product;
    return !__builtin_mul_overflow((size_t)count, each, &product) &&
           !__builtin_add_overflow(*bytes, product, bytes);
}

static quern_status lay_out(const quern_dsv4_layer_cache_params *given, cache_layout *l)
{
    memset(l, 0, sizeof *l);
    quern_dsv4_layer_cache *h = &l->header;
    h->params = (quern_dsv4_layer_cache_params)QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_status status = op_struct(&h->params, given, "params", "QUERN_DSV4_LAYER_CACHE_PARAMS_INIT");
    if (status == QUERN_OK) status = check_params(&h->params);
    if (status != QUERN_OK) return status;
    const quern_dsv4_layer_cache_params *p = &h->params;
    const quern_dsv4_compress_params c = state_params(p);
    h->magic = cache_magic;
    h->kept = p->window - 1 + p->ring < p->capacity ? p->window - 1 + p->ring : p->capacity;
    h->entries = p->ratio > 0 ? p->capacity / p->ratio : 0;
    if (p->ratio > 0) status = quern_dsv4_state_size(&c, p->dim, p->ring, &h->state_bytes[0]);
    if (status == QUERN_OK && p->index_dim > 0)
        status = quern_dsv4_state_size(&c, p->index_dim, p->ring, &h->state_bytes[1]);
    if (status != QUERN_OK) return status;
    const size_t element = quern_dtype_size(p->dtype);
    bool fits = add(&h->sequence_bytes, (h->kept + h->entries) * p->dim, element) &&
                add(&h->sequence_bytes, h->entries * p->index_dim, element) &&
                add(&l->rows, p->sequences, h->sequence_bytes);
    l->memory = sizeof *h;
    fits = fits && add(&l->memory, p->sequences, sizeof(layer_sequence));
    l->states_at = l->memory;
    fits = fits && add(&l->memory, p->sequences, h->state_bytes[0] + h->state_bytes[1]) &&
           add(&l->memory, 1, ARENA_ALIGN - 1) && add(&l->rows, 1, ARENA_ALIGN - 1) &&
           l->memory <= PTRDIFF_MAX && l->rows <= PTRDIFF_MAX;
    if (!fits)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld sequences of %lld tokens: caches below 2^63 bytes are accepted",
                         (long long)p->sequences, (long long)p->capacity);
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_size(const quern_dsv4_layer_cache_params *params, size_t *memory_bytes,
                                         size_t *rows_bytes)
{
    cache_layout l;
    const quern_status status = lay_out(params, &l);
    if (status != QUERN_OK) return status;
    if (memory_bytes == NULL || rows_bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a place for the size is needed",
                         memory_bytes == NULL ? "memory_bytes" : "rows_bytes");
    *memory_bytes = l.memory;
    *rows_bytes = l.rows;
    return QUERN_OK;
}

static quern_status check_memory(const char *name, const void *memory, size_t given, size_t needed)
{
    if (memory == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: %zu bytes are needed", name, needed);
    if (given < needed)
        return error_set(QUERN_ERR_WORKSPACE, "%s has %zu bytes: at least %zu are accepted", name, given,
                         needed);
    return QUERN_OK;
}

static char *state_memory(const quern_dsv4_layer_cache *c, int64_t sequence, int which)
{
    return c->states + (size_t)sequence * (c->state_bytes[0] + c->state_bytes[1]) +
           (which == 1 ? c->state_bytes[0] : 0);
}

static quern_status empty(quern_dsv4_layer_cache *c, int64_t sequence)
{
    const quern_dsv4_compress_params p = state_params(&c->params);
    const int64_t widths[] = {c->params.dim, c->params.index_dim};
    layer_sequence *s = &c->sequence[sequence];
    *s = (layer_sequence){.tokens = 0};
    quern_status status = QUERN_OK;
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        if (c->state_bytes[i] > 0)
            status = quern_dsv4_state_create(&p, widths[i], c->params.ring, state_memory(c, sequence, i),
                                             c->state_bytes[i], i == 0 ? &s->main : &s->index);
    return status;
}

quern_status quern_dsv4_layer_cache_create(const quern_dsv4_layer_cache_params *params, void *memory,
                                           size_t memory_bytes, void *rows, size_t rows_bytes,
                                           quern_dsv4_layer_cache **cache)
{
    cache_layout l;
    quern_status status = lay_out(params, &l);
    if (status == QUERN_OK) status = check_memory("memory", memory, memory_bytes, l.memory);
    if (status == QUERN_OK) status = check_memory("rows", rows, rows_bytes, l.rows);
    if (status == QUERN_OK && cache == NULL)
        status = error_set(QUERN_ERR_INVALID_ARGUMENT, "cache is NULL: a place for the cache is needed");
    if (status != QUERN_OK) return status;
    char *base = arena_on(memory).base;
    quern_dsv4_layer_cache *c = (quern_dsv4_layer_cache *)(void *)base;
    *c = l.header;
    c->states = base + l.states_at;
    c->rows = arena_on(rows).base;
    for (int64_t i = 0; i < c->params.sequences && status == QUERN_OK; i++) status = empty(c, i);
    if (status == QUERN_OK) *cache = c;
    return status;
}

quern_status layer_check_cache(const quern_dsv4_layer_cache *cache)
{
    if (cache == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "cache is NULL: a cache is needed");
    if (cache->magic != cache_magic)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "cache is no cache: one of quern_dsv4_layer_cache_create() is accepted");
    return QUERN_OK;
}

static quern_status check_sequence(const quern_dsv4_layer_cache *cache, const char *name, int64_t sequence)
{
    const quern_status status = layer_check_cache(cache);
    return status == QUERN_OK ? in_range(name, sequence, 0, cache->params.sequences - 1) : status;
}

quern_status quern_dsv4_layer_cache_length(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                           int64_t *tokens, int64_t *held)
{
    const quern_status status = check_sequence(cache, "sequence", sequence);
    if (status != QUERN_OK) return status;
    if (tokens != NULL) *tokens = cache->sequence[sequence].tokens;
    if (held != NULL) *held = cache->sequence[sequence].held;
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_rollback(quern_dsv4_layer_cache *cache, int64_t sequence, int64_t n)
{
    quern_status status = check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = in_range("n", n, 0, cache->sequence[sequence].held);
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    if (s->main != NULL) status = quern_dsv4_state_rollback(s->main, n);
    if (s->index != NULL && status == QUERN_OK) status = quern_dsv4_state_rollback(s->index, n);
    if (status != QUERN_OK) return status;
    s->tokens -= n;
    s->held -= n;
    s->raw -= n;
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_reset(quern_dsv4_layer_cache *cache, int64_t sequence)
{
    const quern_status status = check_sequence(cache, "sequence", sequence);
    return status == QUERN_OK ? empty(cache, sequence) : status;
}

quern_status quern_dsv4_layer_cache_fork(quern_dsv4_layer_cache *cache, int64_t from, int64_t to)
{
    quern_status status = check_sequence(cache, "from", from);
    if (status == QUERN_OK) status = check_sequence(cache, "to", to);
    if (status != QUERN_OK || from == to) return status;
    const layer_sequence *s = &cache->sequence[from];
    layer_sequence copy = *s;
    if (s->main != NULL)
        status =
            quern_dsv4_state_fork(s->main, state_memory(cache, to, 0), cache->state_bytes[0], &copy.main);
    if (s->index != NULL && status == QUERN_OK)
        status =
            quern_dsv4_state_fork(s->index, state_memory(cache, to, 1), cache->state_bytes[1], &copy.index);
    if (status != QUERN_OK) return status;
    cache->sequence[to] = copy;
    const size_t element = quern_dtype_size(cache->params.dtype),
                 entries = (size_t)layer_entries_at(cache, s->tokens);
    const size_t sizes[] = {(size_t)(s->raw * cache->params.dim) * element,
                            entries * (size_t)cache->params.dim * element,
                            entries * (size_t)cache->params.index_dim * element};
    for (int i = 0; i < 3; i++)
        memcpy(layer_area_of(cache, to, (layer_area)i), layer_area_of(cache, from, (layer_area)i), sizes[i]);
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_get(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                        quern_dsv4_layer_rows *rows)
{
    quern_dsv4_layer_rows known = QUERN_DSV4_LAYER_ROWS_INIT;
    quern_status status = check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = op_struct(&known, rows, "rows", "QUERN_DSV4_LAYER_ROWS_INIT");
    if (status != QUERN_OK) return status;
    const quern_dsv4_layer_cache_params *p = &cache->params;
    const layer_sequence *s = &cache->sequence[sequence];
    const int64_t entries = layer_entries_at(cache, s->tokens), raw_shape[] = {s->raw, p->dim},
                  entry_shape[] = {entries, p->dim}, key_shape[] = {entries, p->index_dim};
    known.tokens = s->tokens;
    known.raw = quern_tensor_contiguous(layer_area_of(cache, sequence, LAYER_RAW), p->dtype, 2, raw_shape);
    known.entries =
        quern_tensor_contiguous(layer_area_of(cache, sequence, LAYER_ENTRIES), p->dtype, 2, entry_shape);
    known.keys = quern_tensor_contiguous(layer_area_of(cache, sequence, LAYER_KEYS), p->dtype, 2, key_shape);
    known.main = s->main;
    known.index = s->index;
    op_struct_give(rows, &known);
    return QUERN_OK;
}

/* A state that is handed in is of the dims of the cache's own, at position `tokens`. */
static quern_status check_state(const char *name, const quern_dsv4_state *given, const quern_dsv4_state *own,
                                int64_t tokens)
{
    if ((given != NULL) != (own != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is %s: a cache of this kind %s", name,
                         given != NULL ? "given" : "NULL", own != NULL ? "needs it" : "has none");
    if (own == NULL) return QUERN_OK;
    const quern_status status = dsv4_state_check(given, name);
    if (status != QUERN_OK) return status;
    const pool_state *g = (const pool_state *)given, *o = (const pool_state *)own;
    if (g->ratio != o->ratio || g->overlap != o->overlap || g->width != o->width || g->ring != o->ring ||
        g->position != tokens)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "%s is of ratio %d, width %lld, ring %lld at position %lld: ratio %d, width %lld, ring "
            "%lld at position %lld is accepted",
            name, g->ratio, (long long)g->width, (long long)g->ring, (long long)g->position, o->ratio,
            (long long)o->width, (long long)o->ring, (long long)tokens);
    return QUERN_OK;
}

static quern_status check_rows(const quern_dsv4_layer_cache *cache, const quern_dsv4_layer_rows *r)
{
    const quern_dsv4_layer_cache_params *p = &cache->params;
    const int64_t entries = layer_entries_at(cache, r->tokens),
                  least = r->tokens < p->window - 1 ? r->tokens : p->window - 1;
    const uint32_t dtype = 1u << p->dtype;
    const bool keys = p->index_dim > 0;
    const view_rule rules[] = {
        {"raw", &r->raw, dtype, 2, {VIEW_ANY, p->dim}, false, false},
        {"entries", p->ratio > 0 ? &r->entries : NULL, dtype, 2, {entries, p->dim}, p->ratio == 0, false},
        {"keys", keys ? &r->keys : NULL, dtype, 2, {entries, p->index_dim}, !keys, false}};
    const quern_status status = view_check_all(rules, 3, &r->raw, true);
    if (status != QUERN_OK) return status;
    if (r->raw.device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "raw is on device %d: the cpu keeps layers' caches",
                         (int)r->raw.device);
    return in_range("raw.shape[0]", r->raw.shape[0], least, r->tokens);
}

static void copy_rows(char *to, const quern_tensor *from, int64_t first, int64_t count)
{
    const size_t element = quern_dtype_size(from->dtype), bytes = (size_t)from->shape[1] * element;
    for (int64_t i = 0; i < count; i++)
        memmove(to + (size_t)i * bytes,
                (const char *)from->data + (first + i) * from->strides[0] * (int64_t)element, bytes);
}

quern_status quern_dsv4_layer_cache_set(quern_dsv4_layer_cache *cache, int64_t sequence,
                                        const quern_dsv4_layer_rows *rows)
{
    quern_dsv4_layer_rows r = QUERN_DSV4_LAYER_ROWS_INIT;
    quern_status status = check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = op_struct(&r, rows, "rows", "QUERN_DSV4_LAYER_ROWS_INIT");
    if (status == QUERN_OK) status = in_range("tokens", r.tokens, 0, cache->params.capacity);
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    if ((status = check_rows(cache, &r)) != QUERN_OK ||
        (status = check_state("main", r.main, s->main, r.tokens)) != QUERN_OK ||
        (status = check_state("index", r.index, s->index, r.tokens)) != QUERN_OK)
        return status;
    const int64_t window = cache->params.window - 1, n = r.raw.shape[0],
                  entries = layer_entries_at(cache, r.tokens);
    const quern_dsv4_state *states[] = {r.main, r.index};
    int64_t held = cache->params.ring;
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        if (states[i] == NULL) continue;
        const int64_t ring = ((const pool_state *)states[i])->held;
        if (ring < held) held = ring;
        status = quern_dsv4_state_fork(states[i], state_memory(cache, sequence, i), cache->state_bytes[i],
                                       i == 0 ? &s->main : &s->index);
    }
    if (status != QUERN_OK) return status;
    s->tokens = r.tokens;
    s->raw = n < cache->kept ? n : cache->kept;
    const int64_t spare = s->raw == s->tokens ? s->tokens : s->raw - window;
    s->held = spare < held ? spare : held;
    copy_rows(layer_area_of(cache, sequence, LAYER_RAW), &r.raw, n - s->raw, s->raw);
    if (cache->params.ratio > 0)
        copy_rows(layer_area_of(cache, sequence, LAYER_ENTRIES), &r.entries, 0, entries);
    if (cache->params.index_dim > 0)
        copy_rows(layer_area_of(cache, sequence, LAYER_KEYS), &r.keys, 0, entries);
    return QUERN_OK;
}

int64_t layer_entries_at(const quern_dsv4_layer_cache *cache, int64_t position)
{
    return cache->params.ratio > 0 ? position / cache->params.ratio : 0;
}

char *layer_area_of(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area)
{
    const int64_t before = area == LAYER_RAW       ? 0
                           : area == LAYER_ENTRIES ? cache->kept
                                                   : cache->kept + cache->entries;
    return cache->rows + (size_t)sequence * cache->sequence_bytes +
           (size_t)(before * cache->params.dim) * quern_dtype_size(cache->params.dtype);
}

quern_status layer_check_batch(const layer_batch *d, int64_t *tokens, int64_t *entries, int64_t *most,
                               int64_t *last)
{
    const quern_dsv4_layer_cache *cache = d->cache;
    *tokens = *entries = *most = *last = 0;
    if (d->batch < 0 || (d->batch > 0 && (d->sequences == NULL || d->counts == NULL)))
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "batch is %lld with sequences %s and counts %s: 0 or more, and arrays of as many, are "
            "accepted",
            (long long)d->batch, d->sequences != NULL ? "given" : "NULL",
            d->counts != NULL ? "given" : "NULL");
    for (int64_t b = 0; b < d->batch; b++) {
        const int64_t id = d->sequences[b], count = d->counts[b];
        if (id < 0 || id >= cache->params.sequences)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "sequences[%lld] is %lld: 0 to %lld are accepted",
                             (long long)b, (long long)id, (long long)cache->params.sequences - 1);
        for (int64_t i = 0; i < b; i++)
            if (d->sequences[i] == id)
                return error_set(
                    QUERN_ERR_INVALID_ARGUMENT,
                    "sequences[%lld] and sequences[%lld] are %lld: each sequence is accepted once",
                    (long long)i, (long long)b, (long long)id);
        const int64_t had = cache->sequence[id].tokens;
        if (count < 0 || count > cache->params.capacity - had || count > INT32_MAX - *tokens)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "counts[%lld] is %lld and sequence %lld has %lld tokens: 0 or more, up to the "
                             "capacity of %lld, are accepted",
                             (long long)b, (long long)count, (long long)id, (long long)had,
                             (long long)cache->params.capacity);
        const int64_t whole = layer_entries_at(cache, had + count);
        *tokens += count;
        *entries += whole - layer_entries_at(cache, had);
        if (whole > *most) *most = whole;
        if (count > 0 && had + count > *last) *last = had + count;
    }
    return QUERN_OK;
}
