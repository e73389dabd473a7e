/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_save.c - a sequence of a layer's cache as bytes, and back.
 *
 * The bytes are a header, the raw rows, the entries, the indexer's keys, each row's data before its scales,
 * then the states as quern_dsv4_state_save() writes them. They say nothing of pages. Restoring checks all
 * before it changes the sequence.
 */
#include "core/error.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <stddef.h>
#include <string.h>

static const uint64_t saved_magic = 0x34726579616c5651; /* "QVlayer4" */
static const uint32_t saved_version = 1;

typedef struct saved_header {
    uint64_t magic, checksum;
    uint32_t version;
    int32_t kind, dtype, format, key_format, zero;
    int64_t dim, window, ratio, index_dim, ring;
    int64_t tokens, raw, held;
} saved_header;

static saved_header header_of(const quern_dsv4_layer_cache *cache, const layer_sequence *s)
{
    const quern_dsv4_layer_cache_params *p = &cache->params;
    return (saved_header){.magic = saved_magic,
                          .version = saved_version,
                          .kind = (int32_t)p->kind,
                          .dtype = (int32_t)p->dtype,
                          .format = (int32_t)p->format,
                          .key_format = (int32_t)p->key_format,
                          .dim = p->dim,
                          .window = p->window,
                          .ratio = p->ratio,
                          .index_dim = p->index_dim,
                          .ring = p->ring,
                          .tokens = s->tokens,
                          .raw = s->raw,
                          .held = s->held};
}

/* Bytes of a saved state: 0 where the kind has none. */
static size_t state_bytes(const quern_dsv4_state *state)
{
    size_t bytes = 0;
    if (state != NULL) (void)quern_dsv4_state_save(state, NULL, &bytes); /* it is one, and has a size */
    return bytes;
}

static size_t area_bytes(const quern_dsv4_layer_cache *cache, const layer_sequence *s, layer_area area)
{
    return (size_t)layer_rows_of(cache, s, area) * cache->plane[area].row;
}

/* Bytes of a sequence of these lengths; `own` has the cache's states, all of which are as long. */
static size_t saved_bytes(const quern_dsv4_layer_cache *cache, const layer_sequence *own,
                          const layer_sequence *lengths)
{
    size_t bytes = sizeof(saved_header) + state_bytes(own->main) + state_bytes(own->index);
    for (int i = 0; i < LAYER_AREAS; i++) bytes += area_bytes(cache, lengths, (layer_area)i);
    return bytes;
}

quern_status quern_dsv4_layer_cache_save(const quern_dsv4_layer_cache *cache, int64_t sequence, void *to,
                                         size_t *bytes)
{
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "bytes is NULL: the size of `to`, or a place for it, is needed");
    const layer_sequence *s = &cache->sequence[sequence];
    const size_t needed = saved_bytes(cache, s, s);
    if (to != NULL && *bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "bytes is %zu: at least %zu are accepted", *bytes, needed);
    *bytes = needed;
    if (to == NULL) return QUERN_OK;
    saved_header header = header_of(cache, s);
    memcpy(to, &header, sizeof header);
    char *at = (char *)to + sizeof header;
    for (int i = 0; i < LAYER_AREAS; i++) {
        layer_move_rows(cache, sequence, (layer_area)i, layer_rows_of(cache, s, (layer_area)i), at,
                        (int64_t)cache->plane[i].row, false);
        at += area_bytes(cache, s, (layer_area)i);
    }
    const quern_dsv4_state *const states[] = {s->main, s->index};
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        size_t own = state_bytes(states[i]);
        if (own > 0) status = quern_dsv4_state_save(states[i], at, &own);
        at += own;
    }
    header.checksum = dsv4_checksum(to, needed, offsetof(saved_header, checksum));
    memcpy((char *)to + offsetof(saved_header, checksum), &header.checksum, sizeof header.checksum);
    return status;
}

/* Whether lengths are those of a sequence that the cache can hold. */
static bool is_sound(const quern_dsv4_layer_cache *cache, const saved_header *h)
{
    const int64_t window = cache->params.window - 1, least = h->tokens < window ? h->tokens : window;
    if (h->tokens < 0 || h->raw < least || h->raw > h->tokens || h->raw > window + cache->params.ring)
        return false;
    const int64_t spare = h->raw == h->tokens ? h->tokens : h->raw - window;
    return h->held >= 0 && h->held <= cache->params.ring && h->held <= spare;
}

static quern_status check_header(const quern_dsv4_layer_cache *cache, const saved_header *h)
{
    const layer_sequence none = {.tokens = 0};
    saved_header own = header_of(cache, &none);
    if (h->magic != own.magic)
        return error_set(QUERN_ERR_FORMAT, "from starts with %016llx: a saved sequence starts with %016llx",
                         (unsigned long long)h->magic, (unsigned long long)own.magic);
    if (h->version != own.version)
        return error_set(QUERN_ERR_FORMAT, "from has version %u: version %u is accepted", h->version,
                         own.version);
    own.tokens = h->tokens;
    own.raw = h->raw;
    own.held = h->held;
    own.checksum = h->checksum;
    if (memcmp(&own, h, sizeof own) != 0)
        return error_set(
            QUERN_ERR_FORMAT,
            "from is of kind %d, dtype %d, formats %d and %d, dim %lld, window %lld, ratio %lld, "
            "index_dim %lld, ring %lld: kind %d, dtype %d, formats %d and %d, dim %lld, window "
            "%lld, ratio %lld, index_dim %lld, ring %lld are accepted",
            h->kind, h->dtype, h->format, h->key_format, (long long)h->dim, (long long)h->window,
            (long long)h->ratio, (long long)h->index_dim, (long long)h->ring, own.kind, own.dtype, own.format,
            own.key_format, (long long)own.dim, (long long)own.window, (long long)own.ratio,
            (long long)own.index_dim, (long long)own.ring);
    if (!is_sound(cache, h))
        return error_set(QUERN_ERR_FORMAT,
                         "from is damaged: %lld tokens, %lld raw rows and %lld to take back",
                         (long long)h->tokens, (long long)h->raw, (long long)h->held);
    if (h->tokens > cache->params.capacity)
        return error_set(QUERN_ERR_FORMAT, "from has %lld tokens: 0 to the capacity of %lld are accepted",
                         (long long)h->tokens, (long long)cache->params.capacity);
    return QUERN_OK;
}

/* Checks all of `from` but that the cache has pages for it. */
static quern_status check_saved(const quern_dsv4_layer_cache *cache, int64_t sequence, const char *from,
                                size_t from_bytes, saved_header *h, layer_sequence *lengths)
{
    const layer_sequence *s = &cache->sequence[sequence];
    if (from == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "from is NULL: a saved sequence is needed");
    if (from_bytes < sizeof *h)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: a saved sequence has at least %zu",
                         from_bytes, sizeof *h);
    memcpy(h, from, sizeof *h);
    quern_status status = check_header(cache, h);
    if (status != QUERN_OK) return status;
    *lengths = (layer_sequence){.tokens = h->tokens, .raw = h->raw, .held = h->held};
    const size_t needed = saved_bytes(cache, s, lengths), main = state_bytes(s->main),
                 index = state_bytes(s->index);
    if (from_bytes != needed)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: %zu are accepted", from_bytes, needed);
    if (dsv4_checksum((const unsigned char *)from, from_bytes, offsetof(saved_header, checksum)) !=
        h->checksum)
        return error_set(QUERN_ERR_FORMAT, "from is damaged: its checksum is not that of its %zu bytes",
                         from_bytes);
    const quern_dsv4_compress_params p = layer_state_params(&cache->params);
    const int64_t ring = cache->params.ring;
    if (main > 0)
        status = dsv4_state_check_saved(&p, cache->params.dim, ring, from + needed - index - main, main,
                                        h->tokens, h->held);
    if (index > 0 && status == QUERN_OK)
        status = dsv4_state_check_saved(&p, cache->params.index_dim, ring, from + needed - index, index,
                                        h->tokens, h->held);
    return status;
}

quern_status quern_dsv4_layer_cache_restore(quern_dsv4_layer_cache *cache, int64_t sequence, const void *from,
                                            size_t from_bytes)
{
    saved_header h;
    layer_sequence lengths = {.tokens = 0};
    quern_status status = layer_check_sequence(cache, "sequence", sequence);
    if (status == QUERN_OK) status = check_saved(cache, sequence, from, from_bytes, &h, &lengths);
    if (status == QUERN_OK)
        status = layer_check_pages(cache, sequence, layer_entries_at(cache, lengths.tokens));
    if (status != QUERN_OK) return status;
    layer_sequence *s = &cache->sequence[sequence];
    const char *at = (const char *)from + sizeof h;
    for (int i = 0; i < LAYER_AREAS; i++) {
        layer_move_rows(cache, sequence, (layer_area)i, layer_rows_of(cache, &lengths, (layer_area)i),
                        (char *)(uintptr_t)at, (int64_t)cache->plane[i].row, true);
        at += area_bytes(cache, &lengths, (layer_area)i);
    }
    const quern_dsv4_compress_params p = layer_state_params(&cache->params);
    const int64_t widths[] = {cache->params.dim, cache->params.index_dim};
    quern_dsv4_state **states[] = {&s->main, &s->index};
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        const size_t own = state_bytes(*states[i]);
        if (own == 0) continue;
        status = quern_dsv4_state_restore(&p, widths[i], cache->params.ring, at, own,
                                          layer_state_memory(cache, sequence, i), cache->state_bytes[i],
                                          states[i]);
        at += own;
    }
    s->tokens = lengths.tokens;
    s->raw = lengths.raw;
    s->held = lengths.held;
    return status;
}
