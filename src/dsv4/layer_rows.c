/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_rows.c - the rows of a layer's cache: where they stand, and copies of a sequence's rows. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <string.h>

layer_place layer_row_at(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t row)
{
    const layer_plane *p = &cache->plane[area];
    if (!p->paged) {
        char *data = p->base + (size_t)sequence * p->sequence + (size_t)row * p->row;
        return (layer_place){data, data + p->data};
    }
    const int64_t page = cache->params.page;
    const size_t slot = (size_t)(row % page), slots = (size_t)page;
    const int32_t number = cache->table[sequence * cache->columns + row / page];
    char *base = p->base + (size_t)number * slots * p->row;
    return (layer_place){base + slot * p->data, base + slots * p->data + slot * (p->row - p->data)};
}

int64_t layer_rows_of(const quern_dsv4_layer_cache *cache, const layer_sequence *s, layer_area area)
{
    if (cache->plane[area].width == 0) return 0;
    return area == LAYER_RAW ? s->raw : layer_entries_at(cache, s->tokens);
}

void layer_move_rows(const quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area, int64_t count,
                     char *rows, int64_t step, bool in)
{
    const layer_plane *p = &cache->plane[area];
    for (int64_t i = 0; i < count; i++, rows += step) {
        const layer_place at = layer_row_at(cache, sequence, area, i);
        memmove(in ? at.data : rows, in ? rows : at.data, p->data);
        memmove(in ? at.scales : rows + p->data, in ? rows + p->data : at.scales, p->row - p->data);
    }
}

/* Copies rows of a sequence to another one. */
static void copy_rows(const quern_dsv4_layer_cache *cache, int64_t from, int64_t to, layer_area area,
                      int64_t count)
{
    const layer_plane *p = &cache->plane[area];
    for (int64_t i = 0; i < count; i++) {
        const layer_place in = layer_row_at(cache, from, area, i), out = layer_row_at(cache, to, area, i);
        memcpy(out.data, in.data, p->data);
        memcpy(out.scales, in.scales, p->row - p->data);
    }
}

quern_status quern_dsv4_layer_cache_fork(quern_dsv4_layer_cache *cache, int64_t from, int64_t to)
{
    quern_status status = layer_check_sequence(cache, "from", from);
    if (status == QUERN_OK) status = layer_check_sequence(cache, "to", to);
    if (status != QUERN_OK || from == to) return status;
    const layer_sequence *s = &cache->sequence[from];
    layer_sequence copy = *s;
    if ((status = layer_check_pages(cache, to, layer_entries_at(cache, s->tokens))) != QUERN_OK)
        return status;
    if (s->main != NULL)
        status = quern_dsv4_state_fork(s->main, layer_state_memory(cache, to, 0), cache->state_bytes[0],
                                       &copy.main);
    if (s->index != NULL && status == QUERN_OK)
        status = quern_dsv4_state_fork(s->index, layer_state_memory(cache, to, 1), cache->state_bytes[1],
                                       &copy.index);
    if (status != QUERN_OK) return status;
    copy.pages = cache->sequence[to].pages;
    cache->sequence[to] = copy;
    for (int i = 0; i < LAYER_AREAS; i++)
        copy_rows(cache, from, to, (layer_area)i, layer_rows_of(cache, s, (layer_area)i));
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_get(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                        quern_dsv4_layer_rows *rows)
{
    quern_dsv4_layer_rows known = QUERN_DSV4_LAYER_ROWS_INIT;
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = op_struct(&known, rows, "rows", "QUERN_DSV4_LAYER_ROWS_INIT");
    if (status == QUERN_OK && cache->params.page > 0)
        status = error_set(QUERN_ERR_UNSUPPORTED,
                           "the cache has pages of %lld: a contiguous cache has views of its rows; "
                           "quern_dsv4_layer_cache_save() takes any",
                           (long long)cache->params.page);
    if (status != QUERN_OK) return status;
    const layer_sequence *s = &cache->sequence[sequence];
    quern_tensor *views[] = {&known.raw, &known.entries, &known.keys};
    for (int i = 0; i < LAYER_AREAS; i++) {
        const layer_plane *p = &cache->plane[i];
        const int64_t shape[] = {layer_rows_of(cache, s, (layer_area)i), p->columns};
        *views[i] =
            quern_tensor_contiguous(layer_row_at(cache, sequence, (layer_area)i, 0).data, p->dtype, 2, shape);
    }
    known.tokens = s->tokens;
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
        g->origin != 0 || g->position != tokens)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%s is of ratio %d, width %lld, ring %lld, from position %lld to %lld: ratio %d, "
                         "width %lld, ring %lld, from position 0 to %lld is accepted",
                         name, g->ratio, (long long)g->width, (long long)g->ring, (long long)g->origin,
                         (long long)g->position, o->ratio, (long long)o->width, (long long)o->ring,
                         (long long)tokens);
    return QUERN_OK;
}

static quern_status check_rows(const quern_dsv4_layer_cache *cache, int64_t sequence,
                               const quern_dsv4_layer_rows *r)
{
    const quern_dsv4_layer_cache_params *p = &cache->params;
    const layer_plane *plane = cache->plane;
    const int64_t entries = layer_entries_at(cache, r->tokens),
                  least = r->tokens < p->window - 1 ? r->tokens : p->window - 1;
    const bool has = p->ratio > 0, keys = p->index_dim > 0;
    const view_rule rules[] = {
        {"raw", &r->raw, 1u << plane[0].dtype, 2, {VIEW_ANY, plane[0].columns}, false, false},
        {"entries",
         has ? &r->entries : NULL,
         1u << plane[1].dtype,
         2,
         {entries, plane[1].columns},
         !has,
         false},
        {"keys", keys ? &r->keys : NULL, 1u << plane[2].dtype, 2, {entries, plane[2].columns}, !keys, false}};
    /* One by one: each is like itself, as rows and keys may have different dtypes. */
    quern_status status = QUERN_OK;
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        if (rules[i].tensor != NULL) status = view_check_all(&rules[i], 1, rules[i].tensor, true);
    if (status != QUERN_OK) return status;
    if (r->raw.device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "raw is on device %d: the cpu keeps layers' caches",
                         (int)r->raw.device);
    status = layer_in_range("raw.shape[0]", r->raw.shape[0], least, r->tokens);
    return status == QUERN_OK ? layer_check_pages(cache, sequence, entries) : status;
}

static void write_view(quern_dsv4_layer_cache *cache, int64_t sequence, layer_area area,
                       const quern_tensor *from, int64_t first, int64_t count)
{
    const int64_t step = from->strides[0] * (int64_t)quern_dtype_size(from->dtype);
    layer_move_rows(cache, sequence, area, count, (char *)from->data + first * step, step, true);
}

quern_status quern_dsv4_layer_cache_set(quern_dsv4_layer_cache *cache, int64_t sequence,
                                        const quern_dsv4_layer_rows *rows)
{
    quern_dsv4_layer_rows r = QUERN_DSV4_LAYER_ROWS_INIT;
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = op_struct(&r, rows, "rows", "QUERN_DSV4_LAYER_ROWS_INIT");
    if (status == QUERN_OK) status = layer_in_range("tokens", r.tokens, 0, cache->params.capacity);
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    if ((status = check_rows(cache, sequence, &r)) != QUERN_OK ||
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
        status = quern_dsv4_state_fork(states[i], layer_state_memory(cache, sequence, i),
                                       cache->state_bytes[i], i == 0 ? &s->main : &s->index);
    }
    if (status != QUERN_OK) return status;
    s->tokens = r.tokens;
    s->raw = n < cache->kept ? n : cache->kept;
    const int64_t spare = s->raw == s->tokens ? s->tokens : s->raw - window;
    s->held = spare < held ? spare : held;
    write_view(cache, sequence, LAYER_RAW, &r.raw, n - s->raw, s->raw);
    if (cache->params.ratio > 0) write_view(cache, sequence, LAYER_ENTRIES, &r.entries, 0, entries);
    if (cache->params.index_dim > 0) write_view(cache, sequence, LAYER_KEYS, &r.keys, 0, entries);
    return QUERN_OK;
}
