/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_cache.c - what a layer keeps of its sequences, in the caller's memory.
 *
 * `memory` holds the header, a record a sequence, the compressors' states, then the page tables. `rows` holds
 * for each sequence its last window - 1 + ring raw rows, which rollbacks of `ring` tokens leave enough of,
 * then its entries, then the indexer's keys; with pages the raw rows of all sequences, a pool for entries and
 * one for keys, page i of both being the same sequence's. Raw rows are moved to the front by every call:
 * these are 128 rows, and a contiguous window needs no pages.
 */
#include "core/arena.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <string.h>

enum { DIM_MOST = 512, PAGE_MOST = 65536, FP4_BLOCK = 32 };
static const uint64_t cache_magic = 0x3472657961c4a510;

typedef struct cache_layout {
    quern_dsv4_layer_cache header;
    size_t memory, rows; /* bytes that the caller hands over */
    size_t states_at, table_at, owner_at;
    size_t area_at[LAYER_AREAS];
} cache_layout;

quern_status layer_in_range(const char *name, int64_t value, int64_t least, int64_t most)
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
                  {"ring", p->ring, 0, DSV4_RING_MOST},
                  {"format", p->format, 0, QUERN_DSV4_ROW584},
                  {"key_format", p->key_format, 0, csa ? QUERN_DSV4_FP4 : 0},
                  {"page", p->page, 0, swa ? 0 : PAGE_MOST},
                  {"pages", p->pages, p->page > 0, p->page > 0 ? INT32_MAX : 0}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const quern_status status =
            layer_in_range(ranges[i].name, ranges[i].value, ranges[i].least, ranges[i].most);
        if (status != QUERN_OK) return status;
    }
    if ((VIEW_ACTIVATION & view_dtype_bit(p->dtype)) == 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "dtype is %s: f32, f16 and bf16 are accepted",
                         quern_dtype_name(p->dtype));
    if (p->format != QUERN_DSV4_ROWS && (p->format != QUERN_DSV4_ROW584 || p->dim != DIM_MOST))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "format is %d with dim %lld: 0 (rows), or %d (row584) with dim %d, is accepted",
                         (int)p->format, (long long)p->dim, QUERN_DSV4_ROW584, DIM_MOST);
    if (p->key_format == QUERN_DSV4_FP4 && p->index_dim % FP4_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "index_dim is %lld: key_format fp4 takes multiples of %d", (long long)p->index_dim,
                         FP4_BLOCK);
    if (swa) p->ratio = 0;
    return QUERN_OK;
}

quern_dsv4_compress_params layer_state_params(const quern_dsv4_layer_cache_params *p)
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

static layer_plane plane_of(quern_dsv4_format format, quern_dtype dtype, int64_t width)
{
    const bool bytes = format != QUERN_DSV4_ROWS;
    layer_plane p = {.format = format, .dtype = bytes ? QUERN_U8 : dtype, .width = width};
    p.columns = bytes ? dsv4_row_bytes(format, width) : width;
    p.row = (size_t)p.columns * quern_dtype_size(p.dtype);
    p.data = bytes ? (size_t)dsv4_row_data_bytes(format, width) : p.row;
    return p;
}

/* Adds memory that begins at a multiple of 64 bytes; *at is its place. */
static bool add_aligned(size_t *bytes, size_t *at, int64_t count, size_t each)
{
    if (!add(bytes, 1, ARENA_ALIGN - 1)) return false;
    *bytes &= ~(size_t)(ARENA_ALIGN - 1);
    *at = *bytes;
    return add(bytes, count, each);
}

/* The areas of rows, one after the other. */
static bool lay_out_rows(cache_layout *l)
{
    const quern_dsv4_layer_cache_params *p = &l->header.params;
    layer_plane *plane = l->header.plane;
    const int64_t counts[LAYER_AREAS] = {l->header.kept, l->header.entries, l->header.entries};
    plane[LAYER_RAW] = plane_of(p->format, p->dtype, p->dim);
    if (p->ratio > 0) plane[LAYER_ENTRIES] = plane[LAYER_RAW];
    if (p->index_dim > 0) plane[LAYER_KEYS] = plane_of(p->key_format, p->dtype, p->index_dim);
    bool fits = true;
    for (int i = 0; i < LAYER_AREAS; i++) {
        plane[i].paged = p->page > 0 && i != LAYER_RAW;
        plane[i].sequence = (size_t)counts[i] * plane[i].row;
        fits = fits && (plane[i].paged
                            ? add_aligned(&l->rows, &l->area_at[i], p->pages, (size_t)p->page * plane[i].row)
                            : add_aligned(&l->rows, &l->area_at[i], p->sequences, plane[i].sequence));
    }
    return fits && add(&l->rows, 1, ARENA_ALIGN - 1);
}

static bool lay_out_memory(cache_layout *l)
{
    const quern_dsv4_layer_cache *h = &l->header;
    const quern_dsv4_layer_cache_params *p = &h->params;
    l->memory = sizeof *h;
    return add(&l->memory, p->sequences, sizeof(layer_sequence)) &&
           add_aligned(&l->memory, &l->states_at, p->sequences, h->state_bytes[0] + h->state_bytes[1]) &&
           add_aligned(&l->memory, &l->table_at, p->sequences, (size_t)h->columns * sizeof(int32_t)) &&
           add_aligned(&l->memory, &l->owner_at, p->pages, sizeof(int32_t)) &&
           add(&l->memory, 1, ARENA_ALIGN - 1);
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
    const quern_dsv4_compress_params c = layer_state_params(p);
    h->magic = cache_magic;
    h->kept = p->window - 1 + p->ring < p->capacity ? p->window - 1 + p->ring : p->capacity;
    h->entries = p->ratio > 0 ? p->capacity / p->ratio : 0;
    h->columns = p->page > 0 ? (h->entries + p->page - 1) / p->page : 0;
    if (p->ratio > 0) status = quern_dsv4_state_size(&c, p->dim, p->ring, &h->state_bytes[0]);
    if (status == QUERN_OK && p->index_dim > 0)
        status = quern_dsv4_state_size(&c, p->index_dim, p->ring, &h->state_bytes[1]);
    if (status != QUERN_OK) return status;
    for (int i = 0; i < 2; i++) /* states are rows of a matrix */
        h->state_bytes[i] = (h->state_bytes[i] + ARENA_ALIGN - 1) & ~(size_t)(ARENA_ALIGN - 1);
    if (!lay_out_rows(l) || !lay_out_memory(l) || l->memory > PTRDIFF_MAX || l->rows > PTRDIFF_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%lld sequences of %lld tokens, %lld pages: caches below 2^63 bytes are accepted",
                         (long long)p->sequences, (long long)p->capacity, (long long)p->pages);
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

char *layer_state_memory(const quern_dsv4_layer_cache *c, int64_t sequence, int which)
{
    return c->states + (size_t)sequence * (c->state_bytes[0] + c->state_bytes[1]) +
           (which == 1 ? c->state_bytes[0] : 0);
}

static quern_status empty(quern_dsv4_layer_cache *c, int64_t sequence)
{
    const quern_dsv4_compress_params p = layer_state_params(&c->params);
    const int64_t widths[] = {c->params.dim, c->params.index_dim};
    layer_sequence *s = &c->sequence[sequence];
    s->tokens = s->held = s->raw = 0;
    quern_status status = QUERN_OK;
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        if (c->state_bytes[i] > 0)
            status =
                quern_dsv4_state_create(&p, widths[i], c->params.ring, layer_state_memory(c, sequence, i),
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
    c->table = (int32_t *)(void *)(base + l.table_at);
    c->owner = (int32_t *)(void *)(base + l.owner_at);
    for (int64_t i = 0; i < c->params.pages; i++) c->owner[i] = -1;
    for (int i = 0; i < LAYER_AREAS; i++) c->plane[i].base = arena_on(rows).base + l.area_at[i];
    for (int64_t i = 0; i < c->params.sequences && status == QUERN_OK; i++) {
        c->sequence[i] = (layer_sequence){.tokens = 0};
        status = empty(c, i);
    }
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

quern_status layer_check_sequence(const quern_dsv4_layer_cache *cache, const char *name, int64_t sequence)
{
    const quern_status status = layer_check_cache(cache);
    return status == QUERN_OK ? layer_in_range(name, sequence, 0, cache->params.sequences - 1) : status;
}

quern_status quern_dsv4_layer_cache_length(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                           int64_t *tokens, int64_t *held)
{
    const quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status != QUERN_OK) return status;
    if (tokens != NULL) *tokens = cache->sequence[sequence].tokens;
    if (held != NULL) *held = cache->sequence[sequence].held;
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_rollback(quern_dsv4_layer_cache *cache, int64_t sequence, int64_t n)
{
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = layer_in_range("n", n, 0, cache->sequence[sequence].held);
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
    const quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    for (int64_t i = 0; i < s->pages; i++) cache->owner[cache->table[sequence * cache->columns + i]] = -1;
    s->pages = 0;
    return empty(cache, sequence);
}

quern_status quern_dsv4_layer_cache_pages(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                          int64_t tokens, int64_t *held, int64_t *needed)
{
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = layer_in_range("tokens", tokens, 0, cache->params.capacity);
    if (status != QUERN_OK) return status;
    const int64_t page = cache->params.page;
    if (held != NULL) *held = cache->sequence[sequence].pages;
    if (needed != NULL) *needed = page > 0 ? (layer_entries_at(cache, tokens) + page - 1) / page : 0;
    return QUERN_OK;
}

/* Checks pages[i], given that those before it have been marked as the sequence's. */
static quern_status check_page(const quern_dsv4_layer_cache *cache, const int32_t *pages, int64_t i)
{
    if (pages[i] < 0 || pages[i] >= cache->params.pages)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "pages[%lld] is %d: 0 to %lld are accepted",
                         (long long)i, pages[i], (long long)cache->params.pages - 1);
    if (cache->owner[pages[i]] >= 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "pages[%lld] is %d, which sequence %d writes: pages of no sequence are accepted",
                         (long long)i, pages[i], cache->owner[pages[i]]);
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_add_pages(quern_dsv4_layer_cache *cache, int64_t sequence,
                                              const int32_t *pages, int64_t count)
{
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    status = layer_in_range("count", count, 0, cache->columns - s->pages);
    if (status != QUERN_OK || count == 0) return status;
    if (pages == NULL) return error_set(QUERN_ERR_INVALID_ARGUMENT, "pages is NULL: an array is needed");
    int64_t taken = 0;
    while (taken < count && (status = check_page(cache, pages, taken)) == QUERN_OK)
        cache->owner[pages[taken++]] = (int32_t)sequence;
    if (status != QUERN_OK) {
        for (int64_t i = 0; i < taken; i++) cache->owner[pages[i]] = -1;
        return status;
    }
    memcpy(cache->table + sequence * cache->columns + s->pages, pages, (size_t)count * sizeof *pages);
    s->pages += count;
    return QUERN_OK;
}

quern_status layer_check_pages(const quern_dsv4_layer_cache *cache, int64_t sequence, int64_t entries)
{
    const int64_t page = cache->params.page, pages = cache->sequence[sequence].pages;
    if (page == 0 || entries <= pages * page) return QUERN_OK;
    return error_set(
        QUERN_ERR_INVALID_ARGUMENT,
        "sequence %lld comes to %lld entries and has %lld pages of %lld: pages for all its entries "
        "are accepted",
        (long long)sequence, (long long)entries, (long long)pages, (long long)page);
}

int64_t layer_entries_at(const quern_dsv4_layer_cache *cache, int64_t position)
{
    return cache->params.ratio > 0 ? position / cache->params.ratio : 0;
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
        const quern_status status = layer_check_pages(cache, id, whole);
        if (status != QUERN_OK) return status;
        *tokens += count;
        *entries += whole - layer_entries_at(cache, had);
        if (whole > *most) *most = whole;
        if (count > 0 && had + count > *last) *last = had + count;
    }
    return QUERN_OK;
}
