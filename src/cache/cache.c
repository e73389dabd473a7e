/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.c - a cache of one layer in the caller's memory: a ledger, pools, and the tensors of their steps. */
#include "cache/cache.h"
#include "cache/save.h"
#include "cache/step.h"

#include "core/arena.h"
#include "core/error.h"

#include <string.h>

static const uint64_t cache_magic = 0x65686361436e5551; /* "QUnCache" */
static const uint64_t saved_magic = 0x717553636e657551; /* "QuencSuq" */

/* The compression's fields; resolves the stride. */
static quern_status check_compression(quern_cache_params *p)
{
    quern_status status = error_in_range("params.block_size", p->block_size, 1, INT32_MAX);
    if (status == QUERN_OK) status = cache_check_stride("params.", p->block_size, &p->stride);
    if (status != QUERN_OK) return status;
    if (p->compress == QUERN_NSA_COMPRESS_MEAN || p->compress == QUERN_NSA_COMPRESS_LINEAR) return QUERN_OK;
    return error_argument("params.compress is %d: 0 (mean) or 1 (linear) is accepted", (int)p->compress);
}

/* What sparse attention keeps beside tokens. */
static quern_status check_sparse(quern_cache_params *p)
{
    quern_status status = QUERN_OK;
    if (p->index_heads == 0) p->index_dim = 0;
    else if ((status = error_in_range("params.index_heads", p->index_heads, 1, INT32_MAX)) == QUERN_OK)
        status = view_check_head_dim("params.index_dim", p->index_dim);
    if (status == QUERN_OK && p->block_size != 0) status = check_compression(p);
    if (p->block_size == 0) p->stride = 0;
    if (p->block_size == 0 && p->index_heads == 0) p->separate_slc = p->separate_win = false;
    if (!p->separate_win) p->window = p->step = 0;
    if (status != QUERN_OK || !p->separate_win) return status;
    status = error_in_range("params.window", p->window, 1, INT32_MAX);
    return status == QUERN_OK ? error_in_range("params.step", p->step, 1, INT32_MAX) : status;
}

static quern_status check_params(const quern_cache_params *given, quern_cache_params *p)
{
    *p = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    quern_status status = op_struct(p, given, "params", "QUERN_CACHE_PARAMS_INIT");
    if (status != QUERN_OK) return status;
    if ((VIEW_ACTIVATION & view_dtype_bit(p->dtype)) == 0)
        return error_argument("params.dtype is %s: f32, f16 or bf16 is accepted", quern_dtype_name(p->dtype));
    status = error_in_range("params.sequences", p->sequences, 1, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.kv_heads", p->kv_heads, 1, INT32_MAX);
    if (status == QUERN_OK) status = error_in_range("params.capacity", p->capacity, 1, INT32_MAX);
    if (status == QUERN_OK) status = view_check_head_dim("params.dim", p->dim);
    if (status == QUERN_OK) status = view_check_head_dim("params.dim_v", p->dim_v);
    if (status == QUERN_OK && p->page != 0 && p->page != QUERN_CACHE_PAGE)
        status = error_argument("params.page is %lld: 0 (contiguous) or 64 is accepted", (long long)p->page);
    if (status == QUERN_OK && p->page != 0) status = error_in_range("params.pages", p->pages, 1, INT32_MAX);
    return status == QUERN_OK ? check_sparse(p) : status;
}

/* What follows from the parameters. */
typedef struct cache_layout {
    quern_cache_params params; /* resolved */
    quern_ledger_params ledger;
    size_t ledger_bytes, block_bytes, memory_bytes, rows_bytes;
    int64_t shape[CACHE_POOLS][3]; /* 0 pages: there are no such rows */
} cache_layout;

/* Pages of entries that the pages of `tokens` tokens can need, and copies of them. */
static int64_t entry_pages(const quern_cache_params *p)
{
    const int64_t pages = p->pages / p->stride + 1 + p->sequences + p->sequences / 2;
    return pages < INT32_MAX ? pages : INT32_MAX;
}

static void set_ledger(const quern_cache_params *p, quern_ledger_params *l)
{
    *l = (quern_ledger_params)QUERN_LEDGER_PARAMS_INIT;
    l->sequences = p->sequences;
    l->capacity = p->capacity;
    l->rollback = QUERN_CACHE_ROLLBACK_MOST;
    l->step = p->separate_win ? p->step : 0;
    l->pools[QUERN_CACHE_TOKENS] =
        (quern_ledger_pool){QUERN_CACHE_PAGE, p->page != 0 ? p->pages : 0, 1, 1, 0};
    if (p->block_size > 0)
        l->pools[QUERN_CACHE_ENTRIES] = (quern_ledger_pool){
            QUERN_CACHE_PAGE, p->page != 0 ? entry_pages(p) : 0, p->block_size, p->stride, 0};
    /* The last tokens stay while a step's are written, which may be taken back. */
    if (p->separate_win)
        l->pools[QUERN_CACHE_WIN] =
            (quern_ledger_pool){QUERN_CACHE_PAGE, 0, 1, 1, p->window + QUERN_CACHE_ROLLBACK_MOST + p->step};
}

/* Adds a product to *sum. False if that is too much. */
static bool add(size_t *sum, int64_t a, int64_t b)
{
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(*sum, (size_t)product, sum) &&
           *sum <= PTRDIFF_MAX;
}

static quern_status layout_of(const quern_cache_params *given, cache_layout *l)
{
    quern_ledger ledger;
    *l = (cache_layout){.params = QUERN_CACHE_PARAMS_INIT};
    quern_status status = check_params(given, &l->params);
    if (status != QUERN_OK) return status;
    const quern_cache_params *p = &l->params;
    set_ledger(p, &l->ledger);
    if ((status = ledger_layout(&l->ledger, &ledger, &l->ledger_bytes)) != QUERN_OK) return status;
    const ledger_pool *pools = ledger.pool;
    const int64_t tokens = pools[QUERN_CACHE_TOKENS].params.pages, size = (int64_t)quern_dtype_size(p->dtype),
                  pages[] = {tokens, p->separate_slc ? tokens : 0, pools[QUERN_CACHE_ENTRIES].params.pages,
                             pools[QUERN_CACHE_WIN].params.pages, p->index_heads > 0 ? tokens : 0};
    bool fits = true;
    for (int i = 0; i < CACHE_POOLS; i++) {
        const bool index = i == CACHE_INDEX;
        int64_t *shape = l->shape[i];
        shape[0] = pages[i];
        shape[1] = index ? p->index_heads : p->kv_heads;
        shape[2] = CACHE_BLOCK * (index ? p->index_dim : p->dim + p->dim_v);
        fits = fits && (shape[0] == 0 || (shape[1] <= INT64_MAX / (shape[2] * size) &&
                                          add(&l->rows_bytes, shape[0], shape[1] * shape[2] * size)));
    }
    l->block_bytes = ledger_block_bytes(&ledger, p->sequences);
    l->memory_bytes = sizeof(quern_cache) + 3 * ARENA_ALIGN;
    fits = fits && add(&l->memory_bytes, 1, (int64_t)l->ledger_bytes) &&
           add(&l->memory_bytes, 1, (int64_t)l->block_bytes);
    if (!fits)
        return error_argument(
            "params: %lld sequences of %lld tokens, %lld heads: fewer than 2^63 bytes are accepted",
            (long long)p->sequences, (long long)p->capacity, (long long)p->kv_heads);
    return QUERN_OK;
}

static bool has_rows(const quern_cache_params *p, cache_pool pool)
{
    if (pool == CACHE_SLC) return p->separate_slc;
    if (pool == CACHE_ENTRIES) return p->block_size > 0;
    if (pool == CACHE_WIN) return p->separate_win;
    return pool == CACHE_TOKENS || p->index_heads > 0;
}

quern_status cache_check(const quern_cache *cache)
{
    if (cache == NULL) return error_argument("cache is NULL: one of quern_cache_create() is needed");
    if (cache->magic != cache_magic)
        return error_argument("cache is no cache: one of quern_cache_create() is accepted");
    return QUERN_OK;
}

quern_status quern_cache_ledger_params(const quern_cache_params *params, quern_ledger_params *ledger)
{
    cache_layout l;
    quern_ledger_params known = QUERN_LEDGER_PARAMS_INIT;
    quern_status status = layout_of(params, &l);
    if (status == QUERN_OK) status = op_struct(&known, ledger, "ledger", "QUERN_LEDGER_PARAMS_INIT");
    if (status == QUERN_OK) op_struct_give(ledger, &l.ledger);
    return status;
}

quern_status quern_cache_size(const quern_cache_params *params, size_t *memory_bytes, size_t *rows_bytes)
{
    cache_layout layout;
    const quern_status status = layout_of(params, &layout);
    if (status != QUERN_OK) return status;
    if (memory_bytes == NULL || rows_bytes == NULL)
        return error_argument("%s is NULL: a place for the size is needed",
                              memory_bytes == NULL ? "memory_bytes" : "rows_bytes");
    *memory_bytes = layout.memory_bytes;
    *rows_bytes = layout.rows_bytes;
    return QUERN_OK;
}

quern_status quern_cache_create(const quern_cache_params *params, void *memory, size_t memory_bytes,
                                void *rows, size_t rows_bytes, quern_cache **cache)
{
    cache_layout layout;
    const quern_status status = layout_of(params, &layout);
    if (status != QUERN_OK) return status;
    if (cache == NULL) return error_argument("cache is NULL: a place for the cache is needed");
    const struct {
        const char *name;
        const void *at;
        size_t given, needed;
    } places[] = {{"memory", memory, memory_bytes, layout.memory_bytes},
                  {"rows", rows, rows_bytes, layout.rows_bytes}};
    for (int i = 0; i < 2; i++) {
        if (places[i].at == NULL && places[i].needed > 0)
            return error_argument("%s is NULL: %zu bytes are needed", places[i].name, places[i].needed);
        if (places[i].given < places[i].needed)
            return error_set(QUERN_ERR_WORKSPACE, "%s has %zu bytes: at least %zu are accepted",
                             places[i].name, places[i].given, places[i].needed);
    }
    if ((uintptr_t)rows % quern_dtype_size(layout.params.dtype) != 0)
        return error_argument("rows is %p: a multiple of the element's %zu bytes is accepted", rows,
                              quern_dtype_size(layout.params.dtype));
    arena a = arena_on(memory);
    quern_cache *c = arena_take(&a, sizeof *c);
    void *books = arena_take(&a, layout.ledger_bytes);
    *c = (quern_cache){.magic = cache_magic, .params = layout.params, .block_bytes = layout.block_bytes};
    c->block = arena_take(&a, layout.block_bytes);
    char *at = rows;
    for (int i = 0; i < CACHE_POOLS; i++) {
        if (!has_rows(&layout.params, (cache_pool)i)) continue;
        c->pool[i] = quern_tensor_contiguous(at, layout.params.dtype, 3, layout.shape[i]);
        at += (size_t)view_elements(&c->pool[i]) * quern_dtype_size(layout.params.dtype);
    }
    *cache = c;
    return ledger_create_at(&layout.ledger, books, &c->ledger);
}

quern_status quern_cache_length(const quern_cache *cache, int64_t sequence, int64_t *tokens, int64_t *entries)
{
    int64_t n = 0;
    quern_status status = cache_check(cache);
    if (status == QUERN_OK) status = quern_ledger_length(cache->ledger, sequence, &n, NULL);
    if (status != QUERN_OK) return status;
    const quern_cache_params *p = &cache->params;
    if (tokens != NULL) *tokens = n;
    if (entries != NULL) *entries = p->block_size > 0 ? mask_entries(n, p->block_size, p->stride) : 0;
    return QUERN_OK;
}

quern_status quern_cache_held(const quern_cache *cache, int64_t *bytes)
{
    const quern_status status = cache_check(cache);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_argument("bytes is NULL: a place for the size is needed");
    const quern_cache_params *p = &cache->params;
    int64_t rows = 0, index_rows = 0;
    for (int64_t s = 0; s < p->sequences; s++)
        for (int i = 0; i <= QUERN_CACHE_WIN; i++) {
            const ledger_pool *pool = &cache->ledger->pool[i];
            const int64_t pages = ledger_pages(pool, cache->ledger->sequences[s].tokens) * QUERN_CACHE_PAGE,
                          all = ledger_rows(pool, cache->ledger->sequences[s].tokens),
                          held = p->page != 0 || pages < all ? pages : all;
            if (pool->params.page > 0) rows += i == QUERN_CACHE_TOKENS && p->separate_slc ? 2 * held : held;
            if (i == QUERN_CACHE_TOKENS) index_rows += held;
        }
    *bytes = (rows * p->kv_heads * (p->dim + p->dim_v) + index_rows * p->index_heads * p->index_dim) *
             (int64_t)quern_dtype_size(p->dtype);
    return QUERN_OK;
}

quern_status quern_cache_rollback(quern_cache *cache, int64_t sequence, int64_t n)
{
    const quern_status status = cache_check(cache);
    return status == QUERN_OK ? quern_ledger_rollback(cache->ledger, sequence, n) : status;
}

quern_status quern_cache_reset(quern_cache *cache, int64_t sequence)
{
    const quern_status status = cache_check(cache);
    return status == QUERN_OK ? quern_ledger_reset(cache->ledger, sequence) : status;
}

quern_status quern_cache_fork(quern_cache *cache, int64_t from, int64_t to)
{
    const quern_status status = cache_check(cache);
    return status == QUERN_OK ? quern_ledger_fork(cache->ledger, from, to) : status;
}

/* ---- the tensors of a call ---- */

quern_status cache_look(const quern_cache *cache, const quern_cache_batch *given, bool appends, bool now,
                        cache_views *v)
{
    v->batch = (quern_cache_batch)QUERN_CACHE_BATCH_INIT;
    v->step = (quern_step)QUERN_STEP_INIT;
    v->tokens = 0;
    const quern_cache_batch *b = &v->batch;
    quern_status status = cache_check(cache);
    if (status == QUERN_OK) status = op_struct(&v->batch, given, "batch", "QUERN_CACHE_BATCH_INIT");
    if (status == QUERN_OK)
        status = quern_ledger_step(cache->ledger, b->batch, cache->block, QUERN_CPU, 0, &v->step);
    if (status != QUERN_OK) return status;
    if (!now) status = ledger_check_members(cache->ledger, b->sequences, b->counts, b->batch, !appends);
    else if (appends)
        status = quern_ledger_begin(cache->ledger, b->sequences, b->counts, b->batch, cache->block,
                                    cache->block_bytes);
    else
        status = quern_ledger_newest(cache->ledger, b->sequences, b->counts, b->batch, cache->block,
                                     cache->block_bytes);
    for (int64_t i = 0; status == QUERN_OK && i < b->batch; i++) v->tokens += b->counts[i];
    return status;
}

void cache_bind(const quern_cache *cache, const cache_views *v, const quern_tensor **slots)
{
    const bool entries = cache->params.block_size > 0, win = cache->params.separate_win;
    slots[STEP_SLOTS] = &v->step.slots;
    slots[STEP_POSITIONS] = &v->step.positions;
    slots[STEP_CU] = &v->step.cu;
    slots[STEP_TOKENS] = &cache->pool[CACHE_TOKENS];
    slots[STEP_TOKENS_TABLE] = &v->step.tables[QUERN_CACHE_TOKENS];
    slots[STEP_SLC] = cache->params.separate_slc ? &cache->pool[CACHE_SLC] : NULL;
    slots[STEP_ENTRIES] = entries ? &cache->pool[CACHE_ENTRIES] : NULL;
    slots[STEP_ENTRIES_TABLE] = entries ? &v->step.tables[QUERN_CACHE_ENTRIES] : NULL;
    slots[STEP_WIN] = win ? &cache->pool[CACHE_WIN] : NULL;
    slots[STEP_WIN_TABLE] = win ? &v->step.tables[QUERN_CACHE_WIN] : NULL;
}

const quern_tensor *cache_index(const quern_cache *cache)
{
    return cache->params.index_heads > 0 ? &cache->pool[CACHE_INDEX] : NULL;
}

quern_status cache_check_rows(const quern_cache *cache, const cache_views *v, const quern_tensor *rows,
                              const char *name)
{
    const quern_cache_params *p = &cache->params;
    if (rows == NULL) return QUERN_OK; /* the operation says so */
    if (rows->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s is on device %d: the cpu keeps caches", name,
                         (int)rows->device);
    const quern_tensor like = {.dtype = p->dtype};
    const int64_t shape[] = {v->tokens, name[0] == 'k' ? p->kv_heads : rows->shape[1], p->dim};
    const view_want want = {name, view_dtype_bit(like.dtype), 3, shape, false, false};
    view_span span;
    return view_check_one(&want, rows, &like, &span);
}

quern_status cache_bind_decode(const quern_cache *cache, const quern_cache_batch *batch, bool now,
                               const quern_decode_tensors *given, cache_views *v, quern_decode_tensors *own)
{
    *own = (quern_decode_tensors)QUERN_DECODE_TENSORS_INIT;
    quern_status status = cache_look(cache, batch, false, now, v);
    if (status == QUERN_OK) status = op_struct(own, given, "tensors", "QUERN_DECODE_TENSORS_INIT");
    if (status == QUERN_OK) status = view_check_order(own->q, own->o);
    if (status == QUERN_OK) status = cache_check_rows(cache, v, own->q, "q");
    if (status != QUERN_OK) return status;
    cache_bind(cache, v, &own->slots);
    own->index = cache_index(cache);
    return QUERN_OK;
}

/* ---- saved sequences ---- */

static saved_kind kind_of(const quern_cache *cache)
{
    static const char *const names[] = {
        "dtype",        "kv_heads",     "dim",    "dim_v", "block_size",  "stride",    "compress",
        "separate_slc", "separate_win", "window", "step",  "index_heads", "index_dim", NULL};
    const quern_cache_params *p = &cache->params;
    return (saved_kind){.magic = saved_magic,
                        .capacity = p->capacity,
                        .rollback = QUERN_CACHE_ROLLBACK_MOST,
                        .names = names,
                        .field = {p->dtype, p->kv_heads, p->dim, p->dim_v, p->block_size, p->stride,
                                  p->compress, p->separate_slc, p->separate_win,
                                  p->separate_win ? p->window : 0, p->separate_win ? p->step : 0,
                                  p->index_heads, p->index_dim}};
}

/* The call that packs a sequence of so many tokens. */
typedef struct pack {
    quern_cache_pack_params params;
    quern_tensor tables[QUERN_CACHE_WIN + 1], packed;
    quern_cache_pack_tensors tensors;
    size_t bytes; /* with the header */
} pack;

static void set_pack(const quern_cache *cache, int64_t sequence, int64_t tokens, void *at, pack *p)
{
    const quern_cache_params *has = &cache->params;
    int64_t rows = 0;
    *p = (pack){.params = QUERN_CACHE_PACK_PARAMS_INIT, .tensors = QUERN_CACHE_PACK_TENSORS_INIT};
    p->params.tokens = tokens;
    p->params.dim = has->dim;
    p->params.block_size = has->block_size;
    p->params.stride = has->stride;
    for (int i = 0; i <= QUERN_CACHE_WIN; i++) {
        const ledger_pool *pool = &cache->ledger->pool[i];
        const int64_t all = ledger_rows(pool, tokens), room = pool->columns * QUERN_CACHE_PAGE;
        p->tables[i] =
            quern_tensor_contiguous(ledger_row(cache->ledger, sequence, i), QUERN_I32, 1, &pool->columns);
        rows += (all < room ? all : room) * (i == QUERN_CACHE_TOKENS && has->separate_slc ? 2 : 1);
    }
    const int64_t bytes =
        (rows * has->kv_heads * (has->dim + has->dim_v) + tokens * has->index_heads * has->index_dim) *
        (int64_t)quern_dtype_size(has->dtype);
    p->bytes = sizeof(saved_header) + (size_t)bytes;
    p->packed = quern_tensor_contiguous(at, QUERN_U8, 1, &bytes);
    p->tensors.tokens = &cache->pool[CACHE_TOKENS];
    p->tensors.tokens_table = &p->tables[QUERN_CACHE_TOKENS];
    if (has->separate_slc) p->tensors.slc = &cache->pool[CACHE_SLC];
    if (has->block_size > 0) {
        p->tensors.entries = &cache->pool[CACHE_ENTRIES];
        p->tensors.entries_table = &p->tables[QUERN_CACHE_ENTRIES];
    }
    if (has->separate_win) {
        p->tensors.win = &cache->pool[CACHE_WIN];
        p->tensors.win_table = &p->tables[QUERN_CACHE_WIN];
    }
    p->tensors.packed = &p->packed;
    p->tensors.index = cache_index(cache);
}

quern_status quern_cache_save(quern_context *ctx, const quern_cache *cache, int64_t sequence, void *to,
                              size_t *bytes)
{
    pack p;
    int64_t tokens, held;
    quern_status status = cache_check(cache);
    if (status == QUERN_OK) status = quern_ledger_length(cache->ledger, sequence, &tokens, &held);
    if (status != QUERN_OK) return status;
    set_pack(cache, sequence, tokens, to != NULL ? (char *)to + sizeof(saved_header) : NULL, &p);
    if ((status = saved_room(to, bytes, p.bytes)) != QUERN_OK) return status;
    if (to != NULL) {
        if ((status = quern_cache_pack(ctx, NULL, &p.params, &p.tensors, NULL, 0)) != QUERN_OK) return status;
        const saved_kind kind = kind_of(cache);
        saved_write(&kind, tokens, held, to, p.bytes);
    }
    *bytes = p.bytes;
    return QUERN_OK;
}

quern_status quern_cache_restore(quern_context *ctx, quern_cache *cache, int64_t sequence, const void *from,
                                 size_t from_bytes)
{
    pack p;
    saved_header h;
    quern_status status = cache_check(cache);
    if (status == QUERN_OK) status = quern_ledger_length(cache->ledger, sequence, NULL, NULL);
    if (status != QUERN_OK) return status;
    const saved_kind kind = kind_of(cache);
    if ((status = saved_read(&kind, from, from_bytes, &h)) != QUERN_OK) return status;
    set_pack(cache, sequence, h.tokens, (char *)(uintptr_t)from + sizeof h, &p);
    if ((status = saved_check(&h, from, from_bytes, p.bytes)) != QUERN_OK) return status;
    if (ctx == NULL) return error_argument("ctx is NULL: create one with quern_context_create()");
    if ((status = ledger_assign(cache->ledger, sequence, h.tokens, h.held)) != QUERN_OK) return status;
    return quern_cache_unpack(ctx, NULL, &p.params, &p.tensors, NULL, 0);
}
