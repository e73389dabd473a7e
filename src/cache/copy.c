/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* copy.c - a sequence's rows to another sequence, to bytes, and from bytes: fork, save, restore. */
#include "cache/cache.h"

#include "core/error.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

/* What saved bytes start with; the rows follow, kind by kind and block by block, the keys and then the values
 * of every head. Blocks hold what the sequence holds: saved bytes do not depend on pages or capacity. */
typedef struct saved_sequence {
    uint64_t magic, version, checksum;
    int64_t dtype, kv_heads, dim, dim_v, block_size, stride, compress, separate_slc, separate_win, window,
        step;
    int64_t tokens, most;
} saved_sequence;

static const uint64_t saved_magic = 0x717553636e657551; /* "QuencSuq" */
static const uint64_t saved_version = 1;

/* Rows of a kind that a sequence holds. */
typedef struct held_rows {
    int64_t from, to;
} held_rows;

static held_rows held_of(const cache_layout *l, cache_kind kind, const cache_length *s)
{
    if (l->blocks[kind] == 0) return (held_rows){0, 0};
    if (kind == CACHE_ENTRIES) return (held_rows){0, cache_entries(l, s->tokens)};
    const int64_t lost = kind == CACHE_WIN ? s->most - l->ring * CACHE_BLOCK : 0;
    return (held_rows){lost > 0 ? lost : 0, s->tokens};
}

static size_t saved_bytes(const cache_layout *l, const cache_length *s)
{
    int64_t rows = 0;
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        const held_rows held = held_of(l, (cache_kind)kind, s);
        rows += held.to - held.from;
    }
    return sizeof(saved_sequence) + (size_t)(rows * l->params.kv_heads * (l->block_bytes / CACHE_BLOCK));
}

/* Copies all rows in order: from the cache to bytes `to`, or, where that is NULL, from bytes `from`. */
static void copy_held(const quern_cache *cache, int64_t sequence, const cache_length *s, const int32_t *table,
                      const char *from, char *to)
{
    const cache_layout *l = &cache->layout;
    const size_t element = quern_dtype_size(l->params.dtype);
    const size_t width[] = {(size_t)l->params.dim * element, (size_t)l->params.dim_v * element};
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        const held_rows held = held_of(l, (cache_kind)kind, s);
        const cache_plane plane = cache_plane_of(cache, (cache_kind)kind, table);
        for (int64_t row = held.from, next; row < held.to; row = next) {
            next = (row / CACHE_BLOCK + 1) * CACHE_BLOCK < held.to ? (row / CACHE_BLOCK + 1) * CACHE_BLOCK
                                                                   : held.to;
            for (int64_t h = 0; h < 2 * l->params.kv_heads; h++) {
                const size_t bytes = (size_t)(next - row) * width[h % 2];
                char *at = cache_block(&plane, sequence, h / 2, row / CACHE_BLOCK) +
                           (h % 2 != 0 ? CACHE_BLOCK * width[0] : 0) +
                           (size_t)(row % CACHE_BLOCK) * width[h % 2];
                memcpy(to != NULL ? to : at, to != NULL ? at : from, bytes);
                if (to != NULL) to += bytes;
                else from += bytes;
            }
        }
    }
}

static saved_sequence header_of(const quern_cache *cache, const cache_length *s)
{
    const quern_cache_params *p = &cache->layout.params;
    return (saved_sequence){.magic = saved_magic,
                            .version = saved_version,
                            .dtype = p->dtype,
                            .kv_heads = p->kv_heads,
                            .dim = p->dim,
                            .dim_v = p->dim_v,
                            .block_size = p->block_size,
                            .stride = p->stride,
                            .compress = p->compress,
                            .separate_slc = p->separate_slc,
                            .separate_win = p->separate_win,
                            .window = p->separate_win ? p->window : 0,
                            .step = p->separate_win ? p->step : 0,
                            .tokens = s->tokens,
                            .most = p->separate_win ? s->most : s->tokens};
}

/* Of the bytes, with zeros in the checksum's place. Eight chains, because one would wait for every
 * multiplication. A change of one word always changes it. */
static uint64_t checksum_of(const char *bytes, size_t count)
{
    enum { CHAINS = 8, WORD = sizeof(uint64_t) };
    const size_t skipped = offsetof(saved_sequence, checksum) / WORD;
    uint64_t chain[CHAINS], sum = count;
    for (uint64_t i = 0; i < CHAINS; i++) chain[i] = 0xcbf29ce484222325u + i;
    for (size_t i = 0; i * WORD < count; i++) {
        const size_t left = count - i * WORD;
        uint64_t word = 0;
        memcpy(&word, bytes + i * WORD, left < WORD ? left : WORD);
        uint64_t *c = &chain[i % CHAINS];
        *c = (*c ^ (i == skipped ? 0 : word)) * 0x9e3779b97f4a7c15u;
        *c ^= *c >> 32;
    }
    for (int i = 0; i < CHAINS; i++) sum = (sum ^ chain[i]) * 0x9e3779b97f4a7c15u + (sum >> 29);
    return sum;
}

quern_status quern_cache_save(const quern_cache *cache, int64_t sequence, const int32_t *table, void *to,
                              size_t *bytes)
{
    quern_status status = cache_check_sequence(cache, sequence, "sequence");
    if (status == QUERN_OK) status = cache_check_table_given(cache, table);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "bytes is NULL: the size of `to`, or a place for it, is needed");
    const cache_length *s = &cache->sequences[sequence];
    const size_t needed = saved_bytes(&cache->layout, s);
    if (to != NULL && *bytes < needed)
        return error_set(QUERN_ERR_WORKSPACE, "bytes is %zu: at least %zu are accepted", *bytes, needed);
    if (table != NULL && (status = cache_check_table(cache, sequence, s->tokens, table)) != QUERN_OK)
        return status;
    *bytes = needed;
    if (to == NULL) return QUERN_OK;
    saved_sequence header = header_of(cache, s);
    memcpy(to, &header, sizeof header);
    copy_held(cache, sequence, s, table, NULL, (char *)to + sizeof header);
    header.checksum = checksum_of(to, needed);
    memcpy(to, &header, sizeof header);
    return QUERN_OK;
}

/* Checks a saved header against the cache; the bytes may hold any numbers. */
static quern_status check_header(const quern_cache *cache, const saved_sequence *saved)
{
    const saved_sequence wanted = header_of(cache, &(cache_length){saved->tokens, saved->most});
    const int64_t capacity = cache->layout.params.capacity,
                  back = cache->layout.params.separate_win ? QUERN_CACHE_ROLLBACK_MOST : 0;
    const struct {
        const char *name;
        int64_t saved, wanted;
    } fields[] = {{"dtype", saved->dtype, wanted.dtype},
                  {"kv_heads", saved->kv_heads, wanted.kv_heads},
                  {"dim", saved->dim, wanted.dim},
                  {"dim_v", saved->dim_v, wanted.dim_v},
                  {"block_size", saved->block_size, wanted.block_size},
                  {"stride", saved->stride, wanted.stride},
                  {"compress", saved->compress, wanted.compress},
                  {"separate_slc", saved->separate_slc, wanted.separate_slc},
                  {"separate_win", saved->separate_win, wanted.separate_win},
                  {"window", saved->window, wanted.window},
                  {"step", saved->step, wanted.step}};
    if (saved->magic != saved_magic || saved->version != saved_version)
        return error_set(QUERN_ERR_FORMAT,
                         "from starts with %016" PRIx64 ", version %" PRIu64
                         ": a saved sequence starts with %016" PRIx64 ", version %" PRIu64,
                         saved->magic, saved->version, saved_magic, saved_version);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].saved != fields[i].wanted)
            return error_set(QUERN_ERR_FORMAT,
                             "from has %s %" PRId64 ": that of the cache, %" PRId64 ", is accepted",
                             fields[i].name, fields[i].saved, fields[i].wanted);
    if (saved->tokens < 0 || saved->tokens > capacity)
        return error_set(QUERN_ERR_FORMAT,
                         "from has %" PRId64 " tokens: 0 to the capacity %" PRId64 " is accepted",
                         saved->tokens, capacity);
    if (saved->most < saved->tokens || saved->most - back > saved->tokens)
        return error_set(QUERN_ERR_FORMAT, "from is damaged: %" PRId64 " tokens, and once %" PRId64,
                         saved->tokens, saved->most);
    return QUERN_OK;
}

quern_status quern_cache_restore(quern_cache *cache, int64_t sequence, const int32_t *table, const void *from,
                                 size_t from_bytes)
{
    saved_sequence saved;
    quern_status status = cache_check_sequence(cache, sequence, "sequence");
    if (status == QUERN_OK) status = cache_check_table_given(cache, table);
    if (status != QUERN_OK) return status;
    if (from == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "from is NULL: a saved sequence is needed");
    if (from_bytes < sizeof saved)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: a saved sequence has at least %zu",
                         from_bytes, sizeof saved);
    memcpy(&saved, from, sizeof saved);
    if ((status = check_header(cache, &saved)) != QUERN_OK) return status;
    const cache_length length = {saved.tokens, saved.most};
    const size_t needed = saved_bytes(&cache->layout, &length);
    if (from_bytes != needed)
        return error_set(QUERN_ERR_FORMAT, "from has %zu bytes: %zu are accepted", from_bytes, needed);
    if (checksum_of(from, from_bytes) != saved.checksum)
        return error_set(QUERN_ERR_FORMAT, "from is damaged: its checksum is not that of its %zu bytes",
                         from_bytes);
    const cache_written w = {sequence, 0, length.tokens, -1};
    if (table != NULL && ((status = cache_check_table(cache, sequence, length.tokens, table)) != QUERN_OK ||
                          (status = cache_claim(cache, &w, table)) != QUERN_OK))
        return status;
    copy_held(cache, sequence, &length, table, (const char *)from + sizeof saved, NULL);
    cache->sequences[sequence] = length;
    return QUERN_OK;
}

quern_status quern_cache_fork(quern_cache *cache, int64_t from, int64_t to, const int32_t *table)
{
    quern_status status = cache_check_sequence(cache, from, "from");
    if (status == QUERN_OK) status = cache_check_sequence(cache, to, "to");
    if (status == QUERN_OK) status = cache_check_table_given(cache, table);
    if (status != QUERN_OK) return status;
    if (from == to)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "from and to are both %" PRId64 ": two sequences are accepted", from);
    const cache_layout *l = &cache->layout;
    const cache_length length = cache->sequences[from];
    const cache_written w = {to, 0, length.tokens, from};
    if (table != NULL && ((status = cache_check_table(cache, from, length.tokens, table)) != QUERN_OK ||
                          (status = cache_check_table(cache, to, length.tokens, table)) != QUERN_OK ||
                          (status = cache_claim(cache, &w, table)) != QUERN_OK))
        return status;
    for (int kind = 0; kind < CACHE_KINDS; kind++) {
        const cache_plane plane = cache_plane_of(cache, (cache_kind)kind, table);
        for (int64_t b = 0; b < cache_blocks(l, (cache_kind)kind, length.tokens); b++)
            for (int64_t h = 0;
                 h < l->params.kv_heads && !cache_is_shared(cache, &w, table, (cache_kind)kind, b); h++)
                memcpy(cache_block(&plane, to, h, b), cache_block(&plane, from, h, b),
                       (size_t)l->block_bytes);
    }
    cache->sequences[to] = length;
    return QUERN_OK;
}
