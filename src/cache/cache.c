/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.c - caches in the caller's memory: layout, creation, sizes, rollback, reset. */
#include "cache/cache.h"

#include "core/arena.h"
#include "core/error.h"
#include "core/op.h"
#include "core/view.h"

#include <string.h>

static const uint64_t cache_magic = 0x65686361436e5551; /* "QUnCache" */

static quern_status check_range(const char *name, int64_t given, int64_t least, int64_t most)
{
    if (given >= least && given <= most) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "params.%s is %lld: %lld to %lld is accepted", name,
                     (long long)given, (long long)least, (long long)most);
}

/* The compression's fields; resolves the stride. */
static quern_status check_compression(quern_cache_params *p)
{
    quern_status status = check_range("block_size", p->block_size, 1, INT32_MAX);
    if (status != QUERN_OK) return status;
    if (p->stride == 0) p->stride = p->block_size;
    if (p->stride < 1 || p->block_size % p->stride != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "params.stride is %lld: a divisor of block_size %lld is accepted",
                         (long long)p->stride, (long long)p->block_size);
    if (p->compress != QUERN_NSA_COMPRESS_MEAN && p->compress != QUERN_NSA_COMPRESS_LINEAR)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "params.compress is %d: 0 (mean) or 1 (linear) is accepted", (int)p->compress);
    if (!p->separate_win) return QUERN_OK;
    status = check_range("window", p->window, 1, INT32_MAX);
    return status == QUERN_OK ? check_range("step", p->step, 1, INT32_MAX) : status;
}

static quern_status check_params(const quern_cache_params *given, quern_cache_params *p)
{
    *p = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    quern_status status = op_struct(p, given, "params", "QUERN_CACHE_PARAMS_INIT");
    if (status != QUERN_OK) return status;
    if ((VIEW_ACTIVATION & view_dtype_bit(p->dtype)) == 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "params.dtype is %s: f32, f16 or bf16 is accepted",
                         quern_dtype_name(p->dtype));
    const struct {
        const char *name;
        int64_t given, least, most;
    } ranges[] = {{"sequences", p->sequences, 1, INT32_MAX},
                  {"kv_heads", p->kv_heads, 1, INT32_MAX},
                  {"capacity", p->capacity, 1, INT32_MAX}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if ((status = check_range(ranges[i].name, ranges[i].given, ranges[i].least, ranges[i].most)) !=
            QUERN_OK)
            return status;
    if ((status = view_check_head_dim("params.dim", p->dim)) != QUERN_OK ||
        (status = view_check_head_dim("params.dim_v", p->dim_v)) != QUERN_OK)
        return status;
    if (p->page != 0 && p->page != QUERN_CACHE_PAGE)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "params.page is %lld: 0 (contiguous) or 64 is accepted",
                         (long long)p->page);
    if (p->page != 0 && (status = check_range("pages", p->pages, 1, INT32_MAX)) != QUERN_OK) return status;
    if (p->block_size != 0) return check_compression(p);
    p->stride = p->window = p->step = 0;
    p->separate_slc = p->separate_win = false;
    return QUERN_OK;
}

int64_t cache_entries(const cache_layout *layout, int64_t n)
{
    const quern_cache_params *p = &layout->params;
    return p->block_size > 0 ? mask_entries(n, p->block_size, p->stride) : 0;
}

int64_t cache_blocks(const cache_layout *layout, cache_kind kind, int64_t n)
{
    const quern_cache_params *p = &layout->params;
    if ((kind == CACHE_SLC && !p->separate_slc) || (kind == CACHE_WIN && !p->separate_win)) return 0;
    const int64_t rows = kind == CACHE_ENTRIES ? cache_entries(layout, n) : n;
    const int64_t blocks = rows / CACHE_BLOCK + (rows % CACHE_BLOCK != 0);
    return kind == CACHE_WIN && blocks > layout->ring ? layout->ring : blocks;
}

quern_status cache_layout_of(const quern_cache_params *params, cache_layout *layout)
{
    cache_layout l = {.params = QUERN_CACHE_PARAMS_INIT};
    const quern_status status = check_params(params, &l.params);
    if (status != QUERN_OK) return status;
    const quern_cache_params *p = &l.params;
    if (p->separate_win)
        l.ring = (p->window + QUERN_CACHE_ROLLBACK_MOST + p->step + CACHE_BLOCK - 1) / CACHE_BLOCK;
    for (int i = 0; i < CACHE_KINDS; i++) {
        l.blocks[i] = cache_blocks(&l, (cache_kind)i, p->capacity);
        l.column[i] = l.columns;
        l.columns += l.blocks[i];
    }
    l.block_bytes = CACHE_BLOCK * (p->dim + p->dim_v) * (int64_t)quern_dtype_size(p->dtype);
    int64_t blocks = p->pages, bytes, owners, numbers;
    bool fits = p->page != 0 || !__builtin_mul_overflow(p->sequences, l.columns, &blocks);
    fits = fits && !__builtin_mul_overflow(blocks, p->kv_heads, &bytes) &&
           !__builtin_mul_overflow(bytes, l.block_bytes, &bytes);
    fits = fits && !__builtin_mul_overflow(p->sequences, l.columns, &owners);
    fits = fits && !__builtin_mul_overflow(p->sequences, (int64_t)sizeof(cache_length), &numbers);
    if (!fits)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "params: %lld sequences of %lld tokens, %lld heads: fewer than 2^63 bytes are accepted",
            (long long)p->sequences, (long long)p->capacity, (long long)p->kv_heads);
    l.rows_bytes = (size_t)bytes;
    l.memory_bytes = sizeof(quern_cache) + (size_t)numbers +
                     (p->page != 0 ? 2 * (size_t)p->pages * sizeof(int64_t) : 0) + ARENA_ALIGN - 1;
    *layout = l;
    return QUERN_OK;
}

quern_status cache_check(const quern_cache *cache)
{
    if (cache == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "cache is NULL: one of quern_cache_create() is needed");
    if (cache->magic != cache_magic)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "cache is no cache: one of quern_cache_create() is accepted");
    return QUERN_OK;
}

quern_status quern_cache_size(const quern_cache_params *params, size_t *memory_bytes, size_t *rows_bytes)
{
    cache_layout layout;
    const quern_status status = cache_layout_of(params, &layout);
    if (status != QUERN_OK) return status;
    if (memory_bytes == NULL || rows_bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a place for the size is needed",
                         memory_bytes == NULL ? "memory_bytes" : "rows_bytes");
    *memory_bytes = layout.memory_bytes;
    *rows_bytes = layout.rows_bytes;
    return QUERN_OK;
}

quern_status quern_cache_create(const quern_cache_params *params, void *memory, size_t memory_bytes,
                                void *rows, size_t rows_bytes, quern_cache **cache)
{
    cache_layout layout;
    const quern_status status = cache_layout_of(params, &layout);
    if (status != QUERN_OK) return status;
    if (cache == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "cache is NULL: a place for the cache is needed");
    const struct {
        const char *name;
        const void *at;
        size_t given, needed;
    } places[] = {{"memory", memory, memory_bytes, layout.memory_bytes},
                  {"rows", rows, rows_bytes, layout.rows_bytes}};
    for (int i = 0; i < 2; i++) {
        if (places[i].at == NULL && places[i].needed > 0)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: %zu bytes are needed", places[i].name,
                             places[i].needed);
        if (places[i].given < places[i].needed)
            return error_set(QUERN_ERR_WORKSPACE, "%s has %zu bytes: at least %zu are accepted",
                             places[i].name, places[i].given, places[i].needed);
    }
    if ((uintptr_t)rows % quern_dtype_size(layout.params.dtype) != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "rows is %p: a multiple of the element's %zu bytes is accepted", rows,
                         quern_dtype_size(layout.params.dtype));
    quern_cache *c = (quern_cache *)(void *)arena_on(memory).base;
    *c = (quern_cache){.magic = cache_magic, .layout = layout, .rows = rows};
    c->sequences = (cache_length *)(c + 1);
    c->owner = (int64_t *)(c->sequences + layout.params.sequences);
    memset(c->sequences, 0, (size_t)layout.params.sequences * sizeof *c->sequences);
    if (layout.params.page != 0) c->claim = c->owner + layout.params.pages;
    for (int64_t i = 0; layout.params.page != 0 && i < layout.params.pages; i++)
        c->owner[i] = c->claim[i] = -1;
    *cache = c;
    return QUERN_OK;
}

quern_status cache_check_sequence(const quern_cache *cache, int64_t sequence, const char *name)
{
    const quern_status status = cache_check(cache);
    if (status != QUERN_OK) return status;
    if (sequence >= 0 && sequence < cache->layout.params.sequences) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is %lld: 0 to %lld is accepted", name,
                     (long long)sequence, (long long)cache->layout.params.sequences - 1);
}

quern_status cache_check_table_given(const quern_cache *cache, const int32_t *table)
{
    const bool paged = cache->layout.params.page != 0;
    if ((table != NULL) == paged) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "table is %s: %s", table != NULL ? "given" : "NULL",
                     paged ? "a paged cache needs one" : "a contiguous cache takes none");
}

quern_status quern_cache_length(const quern_cache *cache, int64_t sequence, int64_t *tokens, int64_t *entries)
{
    const quern_status status = cache_check_sequence(cache, sequence, "sequence");
    if (status != QUERN_OK) return status;
    if (tokens != NULL) *tokens = cache->sequences[sequence].tokens;
    if (entries != NULL) *entries = cache_entries(&cache->layout, cache->sequences[sequence].tokens);
    return QUERN_OK;
}

quern_status quern_cache_held(const quern_cache *cache, int64_t *bytes)
{
    const quern_status status = cache_check(cache);
    if (status != QUERN_OK) return status;
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    const cache_layout *l = &cache->layout;
    int64_t rows = 0;
    for (int64_t s = 0; s < l->params.sequences; s++) {
        const int64_t n = cache->sequences[s].tokens, entries = cache_entries(l, n),
                      ring = l->ring * CACHE_BLOCK;
        const int64_t held[CACHE_KINDS] = {n, entries, l->params.separate_slc ? n : 0,
                                           l->params.separate_win ? (n < ring ? n : ring) : 0};
        for (int i = 0; i < CACHE_KINDS; i++)
            rows += l->params.page != 0 ? cache_blocks(l, (cache_kind)i, n) * CACHE_BLOCK : held[i];
    }
    *bytes = rows * l->params.kv_heads * (l->block_bytes / CACHE_BLOCK);
    return QUERN_OK;
}

quern_status quern_cache_rollback(quern_cache *cache, int64_t sequence, int64_t n)
{
    const quern_status status = cache_check_sequence(cache, sequence, "sequence");
    if (status != QUERN_OK) return status;
    const cache_layout *l = &cache->layout;
    cache_length *s = &cache->sequences[sequence];
    int64_t most = s->tokens < QUERN_CACHE_ROLLBACK_MOST ? s->tokens : QUERN_CACHE_ROLLBACK_MOST;
    const int64_t room = s->tokens - (s->most - QUERN_CACHE_ROLLBACK_MOST);
    if (l->params.separate_win && room < most) most = room;
    if (n < 0 || n > most)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "n is %lld: 0 to %lld of sequence %lld's %lld tokens are accepted", (long long)n,
                         (long long)most, (long long)sequence, (long long)s->tokens);
    s->tokens -= n;
    return QUERN_OK;
}

quern_status quern_cache_reset(quern_cache *cache, int64_t sequence)
{
    const quern_status status = cache_check_sequence(cache, sequence, "sequence");
    if (status != QUERN_OK) return status;
    cache->sequences[sequence] = (cache_length){0, 0};
    return QUERN_OK;
}

cache_plane cache_plane_of(const quern_cache *cache, cache_kind kind, const int32_t *table)
{
    const cache_layout *l = &cache->layout;
    const quern_cache_params *p = &l->params;
    const int64_t block = CACHE_BLOCK * (p->dim + p->dim_v), size = (int64_t)quern_dtype_size(p->dtype),
                  pool[] = {p->pages, p->kv_heads, block},
                  rows[] = {p->sequences, p->kv_heads, l->blocks[kind], block},
                  columns[] = {p->sequences, l->blocks[kind]};
    cache_plane plane = {.dim = p->dim, .dim_v = p->dim_v, .ring = kind == CACHE_WIN ? l->ring : 0};
    if (p->page != 0) {
        plane.blocks = quern_tensor_contiguous(cache->rows, p->dtype, 3, pool);
        plane.table =
            quern_tensor_contiguous((int32_t *)(uintptr_t)(table + l->column[kind]), QUERN_I32, 2, columns);
        plane.table.strides[0] = l->columns;
        return plane;
    }
    plane.blocks = quern_tensor_contiguous(cache->rows + l->column[kind] * p->kv_heads * block * size,
                                           p->dtype, 4, rows);
    plane.blocks.strides[0] = l->columns * p->kv_heads * block;
    return plane;
}

quern_status quern_cache_columns_of(const quern_cache_params *params, quern_cache_columns *columns)
{
    cache_layout l;
    quern_cache_columns c = QUERN_CACHE_COLUMNS_INIT;
    quern_status status = cache_layout_of(params, &l);
    if (status == QUERN_OK) status = op_struct(&c, columns, "columns", "QUERN_CACHE_COLUMNS_INIT");
    if (status != QUERN_OK) return status;
    c.tokens = l.column[CACHE_TOKENS];
    c.entries = l.column[CACHE_ENTRIES];
    c.slc = l.column[CACHE_SLC];
    c.win = l.column[CACHE_WIN];
    c.columns = l.columns;
    op_struct_give(columns, &c);
    return QUERN_OK;
}

quern_status quern_cache_pages_of(const quern_cache_params *params, int64_t tokens,
                                  quern_cache_columns *pages)
{
    cache_layout l;
    quern_cache_columns c = QUERN_CACHE_COLUMNS_INIT;
    quern_status status = cache_layout_of(params, &l);
    if (status == QUERN_OK) status = op_struct(&c, pages, "pages", "QUERN_CACHE_COLUMNS_INIT");
    if (status != QUERN_OK) return status;
    if (tokens < 0 || tokens > l.params.capacity)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "tokens is %lld: 0 to the capacity %lld is accepted",
                         (long long)tokens, (long long)l.params.capacity);
    c.tokens = cache_blocks(&l, CACHE_TOKENS, tokens);
    c.entries = cache_blocks(&l, CACHE_ENTRIES, tokens);
    c.slc = cache_blocks(&l, CACHE_SLC, tokens);
    c.win = cache_blocks(&l, CACHE_WIN, tokens);
    c.columns = c.tokens + c.entries + c.slc + c.win;
    op_struct_give(pages, &c);
    return QUERN_OK;
}
