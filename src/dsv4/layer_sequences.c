/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_sequences.c - a cache of one layer in the caller's memory: a ledger, a layer's pools and states, and
 * their steps. */
#include "cache/ledger.h"
#include "cache/save.h"
#include "core/arena.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"

#include <string.h>

enum { DIM_MOST = 512, PAGE_MOST = 65536, PAGE = 64 };
static const uint64_t cache_magic = 0x3472657961654c51; /* "QLeaYer4" */
static const uint64_t saved_magic = 0x34726579616c5651; /* "QVlayer4" */

/* What a layer keeps, in the order of the step's fields. */
enum { RAW, ENTRIES, KEYS, STATES, MERGED, INDEX_STATES, INDEX_MERGED, AREAS };
static const int32_t step_fields[AREAS] = {DLS(raw),    DLS(entries),        DLS(keys),          DLS(states),
                                           DLS(merged), DLS(indexer_states), DLS(indexer_merged)},
                     pack_fields[AREAS] = {DLP(raw),    DLP(entries),        DLP(keys),          DLP(states),
                                           DLP(merged), DLP(indexer_states), DLP(indexer_merged)};

struct quern_dsv4_layer_cache {
    uint64_t magic;
    quern_dsv4_layer_cache_params params; /* resolved */
    quern_ledger *ledger;
    quern_tensor area[AREAS]; /* ndim 0: there is none */
    void *block;
    size_t block_bytes;
};

static quern_status check_params(quern_dsv4_layer_cache_params *p)
{
    const bool csa = p->kind == QUERN_DSV4_LAYER_CSA, swa = p->kind == QUERN_DSV4_LAYER_SWA;
    if (p->window == 0) p->window = DSV4_WINDOW;
    if (p->ratio == 0) p->ratio = csa ? DSV4_CSA_RATIO : DSV4_HCA_RATIO;
    if (p->page == 0 && !swa) p->page = PAGE;
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
                  {"pages", p->pages, 0, swa ? 0 : INT32_MAX}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const quern_status status =
            error_in_range(ranges[i].name, ranges[i].value, ranges[i].least, ranges[i].most);
        if (status != QUERN_OK) return status;
    }
    if ((VIEW_ACTIVATION & view_dtype_bit(p->dtype)) == 0)
        return error_argument("dtype is %s: f32, f16 and bf16 are accepted", quern_dtype_name(p->dtype));
    if (p->format != QUERN_DSV4_ROWS && (p->format != QUERN_DSV4_ROW584 || p->dim != DIM_MOST))
        return error_argument("format is %d with dim %lld: 0 (rows), or %d (row584) with dim %d, is accepted",
                              (int)p->format, (long long)p->dim, QUERN_DSV4_ROW584, DIM_MOST);
    const row_format *keys = row_format_of(dsv4_entry_format(p->key_format));
    if (keys->group > 0 && p->index_dim % keys->group != 0)
        return error_argument("index_dim is %lld: key_format %s takes multiples of %d",
                              (long long)p->index_dim, keys->name, keys->group);
    if (swa) p->ratio = 0;
    return QUERN_OK;
}

static void set_ledger(const quern_dsv4_layer_cache_params *p, quern_ledger_params *l)
{
    /* Those of a query's window, and what is taken back. */
    const int64_t rows = p->window - 1 + p->ring, kept = rows < 1             ? 1
                                                         : rows < p->capacity ? rows
                                                                              : p->capacity;
    *l = (quern_ledger_params)QUERN_LEDGER_PARAMS_INIT;
    l->sequences = p->sequences;
    l->capacity = p->capacity;
    l->rollback = p->ring;
    l->states = p->ratio > 0;
    l->pools[QUERN_DSV4_RAW] = (quern_ledger_pool){.page = kept, .ring = kept};
    if (p->ratio > 0)
        l->pools[QUERN_DSV4_ENTRIES] =
            (quern_ledger_pool){.page = p->page, .pages = p->pages, .block = p->ratio, .stride = p->ratio};
}

/* What follows from the parameters. */
typedef struct cache_layout {
    quern_dsv4_layer_cache_params params;
    quern_ledger_params ledger;
    size_t ledger_bytes, block_bytes, memory_bytes, rows_bytes;
    quern_tensor area[AREAS]; /* without addresses */
} cache_layout;

static quern_tensor area_of(quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};
    return quern_tensor_contiguous(NULL, dtype, ndim, shape);
}

/* A pool of pages of rows. */
static quern_tensor pool_of(const quern_dsv4_layer_cache_params *p, quern_dsv4_format format, int64_t pages,
                            int64_t page, int64_t width)
{
    if (format == QUERN_DSV4_ROWS) return area_of(p->dtype, 3, pages, page, width);
    return area_of(QUERN_U8, 2, pages, page * dsv4_row_elements(format, width), 0);
}

static void set_areas(cache_layout *l, const quern_ledger *ledger)
{
    const quern_dsv4_layer_cache_params *p = &l->params;
    const ledger_pool *pools = ledger->pool;
    const int64_t kept = pools[QUERN_DSV4_RAW].params.page, pages = pools[QUERN_DSV4_ENTRIES].params.pages,
                  slots = pools[LEDGER_STATES].params.pages;
    const bool csa = p->kind == QUERN_DSV4_LAYER_CSA, bytes = p->format != QUERN_DSV4_ROWS;
    l->area[RAW] = area_of(bytes ? QUERN_U8 : p->dtype, 3, pools[QUERN_DSV4_RAW].params.pages, kept,
                           dsv4_row_elements(p->format, p->dim));
    if (p->ratio == 0) return;
    l->area[ENTRIES] = pool_of(p, p->format, pages, p->page, p->dim);
    l->area[STATES] = area_of(QUERN_F32, 2, slots, pool_state_floats(csa, p->dim, p->ring), 0);
    l->area[MERGED] = area_of(QUERN_I32, 1, slots, 0, 0);
    if (!csa) return;
    l->area[KEYS] = pool_of(p, p->key_format, pages, p->page, p->index_dim);
    l->area[INDEX_STATES] = area_of(QUERN_F32, 2, slots, pool_state_floats(true, p->index_dim, p->ring), 0);
    l->area[INDEX_MERGED] = area_of(QUERN_I32, 1, slots, 0, 0);
}

/* Adds a product to *sum. False if that is too much. */
static bool add(size_t *sum, int64_t a, int64_t b, int64_t c)
{
    int64_t product;
    return !__builtin_mul_overflow(a, b, &product) && !__builtin_mul_overflow(product, c, &product) &&
           !__builtin_add_overflow(*sum, (size_t)product, sum) && *sum <= PTRDIFF_MAX;
}

static bool add_area(size_t *sum, const quern_tensor *t)
{
    if (t->ndim == 0) return true;
    return add(sum, t->shape[0], t->ndim > 1 ? t->shape[1] : 1,
               (t->ndim > 2 ? t->shape[2] : 1) * (int64_t)quern_dtype_size(t->dtype)) &&
           add(sum, 1, 1, ARENA_ALIGN);
}

static quern_status layout_of(const quern_dsv4_layer_cache_params *given, cache_layout *l)
{
    quern_ledger ledger;
    *l = (cache_layout){.params = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT};
    quern_status status = op_struct(&l->params, given, "params", "QUERN_DSV4_LAYER_CACHE_PARAMS_INIT");
    if (status == QUERN_OK) status = check_params(&l->params);
    if (status != QUERN_OK) return status;
    const quern_dsv4_layer_cache_params *p = &l->params;
    set_ledger(p, &l->ledger);
    if ((status = ledger_layout(&l->ledger, &ledger, &l->ledger_bytes)) != QUERN_OK) return status;
    set_areas(l, &ledger);
    l->block_bytes = ledger_block_bytes(&ledger, p->sequences);
    l->memory_bytes = sizeof(quern_dsv4_layer_cache) + 3 * ARENA_ALIGN;
    l->rows_bytes = ARENA_ALIGN;
    bool fits = add(&l->memory_bytes, 1, 1, (int64_t)l->ledger_bytes) &&
                add(&l->memory_bytes, 1, 1, (int64_t)l->block_bytes);
    for (int i = 0; i < AREAS; i++) fits = fits && add_area(&l->rows_bytes, &l->area[i]);
    if (fits) return QUERN_OK;
    return error_argument("%lld sequences of %lld tokens, %lld pages: caches below 2^63 bytes are accepted",
                          (long long)p->sequences, (long long)p->capacity, (long long)p->pages);
}

quern_status quern_dsv4_layer_ledger_params(const quern_dsv4_layer_cache_params *params,
                                            quern_ledger_params *ledger)
{
    cache_layout l;
    quern_ledger_params known = QUERN_LEDGER_PARAMS_INIT;
    quern_status status = layout_of(params, &l);
    if (status == QUERN_OK) status = op_struct(&known, ledger, "ledger", "QUERN_LEDGER_PARAMS_INIT");
    if (status == QUERN_OK) op_struct_give(ledger, &l.ledger);
    return status;
}

quern_status quern_dsv4_layer_cache_size(const quern_dsv4_layer_cache_params *params, size_t *memory_bytes,
                                         size_t *rows_bytes)
{
    cache_layout l;
    const quern_status status = layout_of(params, &l);
    if (status != QUERN_OK) return status;
    if (memory_bytes == NULL || rows_bytes == NULL)
        return error_argument("%s is NULL: a place for the size is needed",
                              memory_bytes == NULL ? "memory_bytes" : "rows_bytes");
    *memory_bytes = l.memory_bytes;
    *rows_bytes = l.rows_bytes;
    return QUERN_OK;
}

static quern_status check_memory(const char *name, const void *memory, size_t given, size_t needed)
{
    if (memory == NULL) return error_argument("%s is NULL: %zu bytes are needed", name, needed);
    if (given < needed)
        return error_set(QUERN_ERR_WORKSPACE, "%s has %zu bytes: at least %zu are accepted", name, given,
                         needed);
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_create(const quern_dsv4_layer_cache_params *params, void *memory,
                                           size_t memory_bytes, void *rows, size_t rows_bytes,
                                           quern_dsv4_layer_cache **cache)
{
    cache_layout l;
    quern_status status = layout_of(params, &l);
    if (status == QUERN_OK) status = check_memory("memory", memory, memory_bytes, l.memory_bytes);
    if (status == QUERN_OK) status = check_memory("rows", rows, rows_bytes, l.rows_bytes);
    if (status == QUERN_OK && cache == NULL)
        status = error_argument("cache is NULL: a place for the cache is needed");
    if (status != QUERN_OK) return status;
    arena a = arena_on(memory), r = arena_on(rows);
    quern_dsv4_layer_cache *c = arena_take(&a, sizeof *c);
    void *books = arena_take(&a, l.ledger_bytes);
    *c = (quern_dsv4_layer_cache){.magic = cache_magic, .params = l.params, .block_bytes = l.block_bytes};
    c->block = arena_take(&a, l.block_bytes);
    for (int i = 0; i < AREAS; i++) {
        c->area[i] = l.area[i];
        if (l.area[i].ndim > 0)
            c->area[i].data =
                arena_take(&r, (size_t)view_elements(&l.area[i]) * quern_dtype_size(l.area[i].dtype));
    }
    *cache = c;
    return ledger_create_at(&l.ledger, books, &c->ledger);
}

static quern_status check_cache(const quern_dsv4_layer_cache *cache)
{
    if (cache == NULL) return error_argument("cache is NULL: a cache is needed");
    if (cache->magic == cache_magic) return QUERN_OK;
    return error_argument("cache is no cache: one of quern_dsv4_layer_cache_create() is accepted");
}

quern_status quern_dsv4_layer_cache_length(const quern_dsv4_layer_cache *cache, int64_t sequence,
                                           int64_t *tokens, int64_t *held)
{
    const quern_status status = check_cache(cache);
    return status == QUERN_OK ? quern_ledger_length(cache->ledger, sequence, tokens, held) : status;
}

quern_status quern_dsv4_layer_cache_rollback(quern_dsv4_layer_cache *cache, int64_t sequence, int64_t n)
{
    const quern_status status = check_cache(cache);
    return status == QUERN_OK ? quern_ledger_rollback(cache->ledger, sequence, n) : status;
}

quern_status quern_dsv4_layer_cache_reset(quern_dsv4_layer_cache *cache, int64_t sequence)
{
    const quern_status status = check_cache(cache);
    return status == QUERN_OK ? quern_ledger_reset(cache->ledger, sequence) : status;
}

quern_status quern_dsv4_layer_cache_fork(quern_dsv4_layer_cache *cache, int64_t from, int64_t to)
{
    const quern_status status = check_cache(cache);
    return status == QUERN_OK ? quern_ledger_fork(cache->ledger, from, to) : status;
}

quern_status quern_dsv4_layer_cache_pages(const quern_dsv4_layer_cache *cache, int64_t tokens,
                                          int64_t *needed, int64_t *free)
{
    quern_status status = check_cache(cache);
    if (status == QUERN_OK) status = error_in_range("tokens", tokens, 0, cache->params.capacity);
    if (status != QUERN_OK) return status;
    const ledger_pool *pool = &cache->ledger->pool[QUERN_DSV4_ENTRIES];
    if (needed != NULL) *needed = ledger_pages(pool, tokens);
    if (free != NULL) *free = pool->left;
    return QUERN_OK;
}

/* ---- steps ---- */

/* A pointer of a tensors struct by its number. */
static const quern_tensor **field_of(void *tensors, int32_t number)
{
    return (const quern_tensor **)((char *)tensors + sizeof(size_t)) + number;
}

/* A layer is of its cache's kind, window and dims. */
static quern_status check_layer(const quern_dsv4_layer_cache *cache, const quern_dsv4_layer_params *p,
                                const quern_dsv4_layer_tensors *t)
{
    const quern_dsv4_layer_cache_params *have = &cache->params;
    const int64_t window = p->window > 0 ? p->window : DSV4_WINDOW;
    const struct {
        const char *name;
        int64_t have;
        const quern_tensor *of;
        int64_t wanted;
    } same[] = {
        {"kind", have->kind, NULL, p->kind},
        {"window", have->window, NULL, window},
        {"dim", have->dim, t->kv, 0},
        {"ratio", have->ratio, have->ratio > 0 ? t->compressor_bias : NULL, have->ratio},
        {"index_dim", have->index_dim, have->index_dim > 0 ? t->indexer_norm : NULL, have->index_dim}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        const bool has =
            same[i].of != NULL && same[i].of->ndim > 0; /* the operation says else what is wrong */
        const int64_t wanted = has ? same[i].of->shape[0] : same[i].wanted;
        if (same[i].have != wanted && (has || i < 2))
            return error_argument("the cache has %s %lld: the layer's, %lld, is accepted", same[i].name,
                                  (long long)same[i].have, (long long)wanted);
    }
    return QUERN_OK;
}

/* The step's call. */
typedef struct layer_call {
    quern_dsv4_layer_step_params params;
    quern_dsv4_layer_step_tensors tensors;
    quern_step step;
} layer_call;

static quern_status bind(const quern_dsv4_layer_cache *cache, const quern_dsv4_layer_params *given,
                         const quern_dsv4_layer_tensors *of, int64_t batch, layer_call *c)
{
    quern_dsv4_layer_params p = QUERN_DSV4_LAYER_PARAMS_INIT;
    quern_dsv4_layer_tensors t = QUERN_DSV4_LAYER_TENSORS_INIT;
    *c = (layer_call){QUERN_DSV4_LAYER_STEP_PARAMS_INIT, QUERN_DSV4_LAYER_STEP_TENSORS_INIT, QUERN_STEP_INIT};
    quern_status status = op_struct(&p, given, "params", "QUERN_DSV4_LAYER_PARAMS_INIT");
    if (status == QUERN_OK) status = op_struct(&t, of, "tensors", "QUERN_DSV4_LAYER_TENSORS_INIT");
    if (status == QUERN_OK) status = check_layer(cache, &p, &t);
    if (status == QUERN_OK)
        status = quern_ledger_step(cache->ledger, batch, cache->block, QUERN_CPU, 0, &c->step);
    if (status != QUERN_OK) return status;
    c->params.kind = p.kind;
    c->params.window = p.window;
    c->params.top_k = p.top_k;
    c->params.eps = p.eps;
    c->params.format = cache->params.format;
    c->params.key_format = cache->params.key_format;
    for (int32_t i = 0; i <= DL(o_a_out); i++) *field_of(&c->tensors, i) = *field_of(&t, i);
    for (int32_t i = DL(compressor_fp8); i <= DL(indexer_global); i++)
        *field_of(&c->tensors, DLS(compressor_fp8) + i - DL(compressor_fp8)) = *field_of(&t, i);
    for (int i = 0; i < AREAS; i++)
        if (cache->area[i].ndim > 0) *field_of(&c->tensors, step_fields[i]) = &cache->area[i];
    c->tensors.slots = &c->step.slots;
    c->tensors.positions = &c->step.positions;
    c->tensors.cu = &c->step.cu;
    c->tensors.copies = &c->step.copies;
    c->tensors.raw_table = &c->step.tables[QUERN_DSV4_RAW];
    if (cache->params.ratio > 0) c->tensors.entries_table = &c->step.tables[QUERN_DSV4_ENTRIES];
    return QUERN_OK;
}

/* That x has the tokens of the counts. */
static quern_status check_tokens(const layer_call *c, const int64_t *counts, int64_t batch)
{
    const quern_tensor *x = c->tensors.x;
    int64_t tokens = 0;
    if (x == NULL || x->ndim != 2) return QUERN_OK; /* the operation says so */
    for (int64_t b = 0; b < batch; b++) tokens += counts[b];
    if (x->device != QUERN_CPU)
        return error_set(QUERN_ERR_UNSUPPORTED, "x is on device %d: the cpu keeps caches", (int)x->device);
    if (x->shape[0] >= tokens) return QUERN_OK;
    return error_argument("x has %lld tokens: the %lld of the counts are accepted", (long long)x->shape[0],
                          (long long)tokens);
}

quern_status quern_dsv4_layer_decode_workspace(quern_context *ctx, const quern_dsv4_layer_params *params,
                                               const quern_dsv4_layer_cache *cache, const int32_t *sequences,
                                               const int64_t *counts, int64_t batch,
                                               const quern_dsv4_layer_tensors *tensors, size_t *bytes)
{
    layer_call c;
    quern_status status = check_cache(cache);
    if (status == QUERN_OK) status = ledger_check_members(cache->ledger, sequences, counts, batch, false);
    if (status == QUERN_OK) status = bind(cache, params, tensors, batch, &c);
    if (status == QUERN_OK) status = check_tokens(&c, counts, batch);
    return status == QUERN_OK ? quern_dsv4_layer_step_workspace(ctx, &c.params, &c.tensors, bytes) : status;
}

quern_status quern_dsv4_layer_decode(quern_context *ctx, const quern_exec *exec,
                                     const quern_dsv4_layer_params *params, quern_dsv4_layer_cache *cache,
                                     const int32_t *sequences, const int64_t *counts, int64_t batch,
                                     const quern_dsv4_layer_tensors *tensors, void *workspace,
                                     size_t workspace_bytes)
{
    layer_call c;
    quern_status status = check_cache(cache);
    if (status == QUERN_OK)
        status =
            quern_ledger_begin(cache->ledger, sequences, counts, batch, cache->block, cache->block_bytes);
    if (status != QUERN_OK) return status;
    status = bind(cache, params, tensors, batch, &c);
    if (status == QUERN_OK) status = check_tokens(&c, counts, batch);
    if (status == QUERN_OK)
        status = quern_dsv4_layer_step(ctx, exec, &c.params, &c.tensors, workspace, workspace_bytes);
    (void)(status == QUERN_OK ? quern_ledger_commit : quern_ledger_abort)(cache->ledger);
    return status;
}

/* ---- saved sequences ---- */

static saved_kind kind_of(const quern_dsv4_layer_cache *cache)
{
    static const char *const names[] = {"kind",   "dtype", "format",    "key_format", "dim",
                                        "window", "ratio", "index_dim", "ring",       NULL};
    const quern_dsv4_layer_cache_params *p = &cache->params;
    return (saved_kind){.magic = saved_magic,
                        .capacity = p->capacity,
                        .rollback = p->ring,
                        .names = names,
                        .field = {p->kind, p->dtype, p->format, p->key_format, p->dim, p->window, p->ratio,
                                  p->index_dim, p->ring}};
}

/* The call that packs a sequence of so many tokens. */
typedef struct pack {
    quern_dsv4_layer_pack_params params;
    quern_tensor raw_table, entries_table, slot, packed;
    quern_dsv4_layer_pack_tensors tensors;
    size_t bytes; /* with the header */
} pack;

/* Bytes of a sequence of so many tokens, without the header. */
static int64_t packed_bytes(const quern_dsv4_layer_cache *cache, int64_t tokens)
{
    const quern_dsv4_layer_cache_params *p = &cache->params;
    const int64_t ring = cache->area[RAW].shape[1], raw = tokens < ring ? tokens : ring,
                  entries = p->ratio > 0 ? tokens / p->ratio : 0;
    int64_t bytes = (raw + entries) * row_bytes(dsv4_entry_format(p->format), p->dim, p->dtype);
    if (p->index_dim > 0)
        bytes += entries * row_bytes(dsv4_entry_format(p->key_format), p->index_dim, p->dtype);
    for (int i = STATES; i < AREAS && tokens > 0; i++)
        if (cache->area[i].ndim > 0)
            bytes += (cache->area[i].ndim == 2 ? cache->area[i].shape[1] : 1) * (int64_t)sizeof(float);
    return bytes;
}

static void set_pack(const quern_dsv4_layer_cache *cache, int64_t sequence, int64_t tokens, void *at, pack *p)
{
    const quern_ledger *l = cache->ledger;
    const int64_t one = 1, bytes = packed_bytes(cache, tokens);
    *p = (pack){.params = QUERN_DSV4_LAYER_PACK_PARAMS_INIT, .tensors = QUERN_DSV4_LAYER_PACK_TENSORS_INIT};
    p->params.tokens = tokens;
    p->params.ratio = cache->params.ratio;
    p->params.format = cache->params.format;
    p->params.key_format = cache->params.key_format;
    p->raw_table = quern_tensor_contiguous(ledger_row(l, sequence, QUERN_DSV4_RAW), QUERN_I32, 1, &one);
    p->slot = quern_tensor_contiguous(ledger_row(l, sequence, LEDGER_STATES), QUERN_I32, 1, &one);
    p->entries_table = quern_tensor_contiguous(ledger_row(l, sequence, QUERN_DSV4_ENTRIES), QUERN_I32, 1,
                                               &l->pool[QUERN_DSV4_ENTRIES].columns);
    p->packed = quern_tensor_contiguous(at, QUERN_U8, 1, &bytes);
    p->bytes = sizeof(saved_header) + (size_t)bytes;
    for (int i = 0; i < AREAS; i++)
        if (cache->area[i].ndim > 0) *field_of(&p->tensors, pack_fields[i]) = &cache->area[i];
    p->tensors.raw_table = &p->raw_table;
    p->tensors.packed = &p->packed;
    if (cache->params.ratio == 0) return;
    p->tensors.entries_table = &p->entries_table;
    p->tensors.slot = &p->slot;
}

quern_status quern_dsv4_layer_cache_save(quern_context *ctx, const quern_dsv4_layer_cache *cache,
                                         int64_t sequence, void *to, size_t *bytes)
{
    pack p;
    int64_t tokens, held;
    quern_status status = check_cache(cache);
    if (status == QUERN_OK) status = quern_ledger_length(cache->ledger, sequence, &tokens, &held);
    if (status != QUERN_OK) return status;
    set_pack(cache, sequence, tokens, to != NULL ? (char *)to + sizeof(saved_header) : NULL, &p);
    if ((status = saved_room(to, bytes, p.bytes)) != QUERN_OK) return status;
    if (to != NULL) {
        if ((status = quern_dsv4_layer_pack(ctx, NULL, &p.params, &p.tensors, NULL, 0)) != QUERN_OK)
            return status;
        const saved_kind kind = kind_of(cache);
        saved_write(&kind, tokens, held, to, p.bytes);
    }
    *bytes = p.bytes;
    return QUERN_OK;
}

quern_status quern_dsv4_layer_cache_restore(quern_context *ctx, quern_dsv4_layer_cache *cache,
                                            int64_t sequence, const void *from, size_t from_bytes)
{
    pack p;
    saved_header h;
    quern_status status = check_cache(cache);
    if (status == QUERN_OK) status = quern_ledger_length(cache->ledger, sequence, NULL, NULL);
    if (status != QUERN_OK) return status;
    const saved_kind kind = kind_of(cache);
    if ((status = saved_read(&kind, from, from_bytes, &h)) != QUERN_OK) return status;
    set_pack(cache, sequence, h.tokens, (char *)(uintptr_t)from + sizeof h, &p);
    if ((status = saved_check(&h, from, from_bytes, p.bytes)) != QUERN_OK) return status;
    if (ctx == NULL) return error_argument("ctx is NULL: create one with quern_context_create()");
    if ((status = ledger_assign(cache->ledger, sequence, h.tokens, h.held)) != QUERN_OK) return status;
    return quern_dsv4_layer_unpack(ctx, NULL, &p.params, &p.tensors, NULL, 0);
}
