/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * caches.c - caches of keys and values (quern/cache.h), by their address. Python keeps the memory.
 *
 *   cache_size(fields) -> bytes of two int64: of the bookkeeping, of the rows
 *   cache_columns(fields, tokens) -> bytes of five int64: where the runs of a page table start; with tokens
 *                                    >= 0 the pages of each
 *   cache_create(fields, memory, rows) -> int
 *   cache_length(cache, sequence) -> bytes of two int64, tokens and entries
 *   cache_held(cache) -> int
 *   cache_rollback(cache, sequence, n); cache_reset(cache, sequence)
 *   cache_fork(cache, from, to, table)
 *   cache_save(cache, sequence, table) -> bytes
 *   cache_restore(cache, sequence, table, saved)
 *   cache_append(cache, sequences, counts, table, k, v, k_slc, v_slc, k_win, v_win, w_k, w_v, pe_k, pe_v)
 *   cache_decode(cache, sparse, params, sequences, counts, table, q, o, lse, w_gate, gates, block_idx,
 *                block_count, sink)
 *
 * fields: "name=number" lines of quern_cache_params. sequences: bytes of int32; counts: bytes of as many
 * int64. table: a tensor or None. params: of the operation nsa or attention.
 */
#include "ffi.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>

#define FIELD(field) NAMED_FIELD(quern_cache_params, field)
static const named_field fields[] = {
    FIELD(dtype),    FIELD(sequences),    FIELD(kv_heads),     FIELD(dim),    FIELD(dim_v),
    FIELD(capacity), FIELD(page),         FIELD(pages),        FIELD(stride), FIELD(block_size),
    FIELD(compress), FIELD(separate_slc), FIELD(separate_win), FIELD(window), FIELD(step),
};
#undef FIELD

static bool read_params_of(const TVMFFIAny *a, quern_cache_params *p)
{
    *p = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    return read_fields(a, fields, sizeof fields / sizeof *fields, p);
}

static int refuse(void)
{
    return fail("TypeError", "a cache and what this function takes are accepted");
}

static quern_cache *cache_of(const TVMFFIAny *args, int32_t count, int32_t accepted)
{
    if (count == accepted && is_int(&args[0]) && args[0].v_int64 != 0)
        return (quern_cache *)(intptr_t)args[0].v_int64;
    (void)refuse();
    return NULL;
}

FUNCTION(cache_size)
{
    (void)self;
    quern_cache_params p;
    size_t memory, rows;
    if (count != 1 || !read_params_of(&args[0], &p)) return refuse();
    const quern_status status = quern_cache_size(&p, &memory, &rows);
    const int64_t sizes[] = {(int64_t)memory, (int64_t)rows};
    return status == QUERN_OK ? give_bytes(sizes, sizeof sizes, result) : fail_as(status);
}

FUNCTION(cache_columns)
{
    (void)self;
    quern_cache_params p;
    quern_cache_columns c = QUERN_CACHE_COLUMNS_INIT;
    if (count != 2 || !read_params_of(&args[0], &p) || !is_int(&args[1])) return refuse();
    const int64_t tokens = args[1].v_int64;
    const quern_status status =
        tokens < 0 ? quern_cache_columns_of(&p, &c) : quern_cache_pages_of(&p, tokens, &c);
    const int64_t runs[] = {c.tokens, c.entries, c.slc, c.win, c.columns};
    return status == QUERN_OK ? give_bytes(runs, sizeof runs, result) : fail_as(status);
}

FUNCTION(cache_create)
{
    (void)self;
    quern_cache_params p;
    quern_cache *cache = NULL;
    void *memory, *rows;
    size_t memory_bytes, row_bytes;
    if (count != 3 || !read_params_of(&args[0], &p)) return refuse();
    if (read_memory(&args[1], &memory, &memory_bytes) != 0 || read_memory(&args[2], &rows, &row_bytes) != 0)
        return -1;
    const quern_status status = quern_cache_create(&p, memory, memory_bytes, rows, row_bytes, &cache);
    return status == QUERN_OK ? give_int((intptr_t)cache, result) : fail_as(status);
}

FUNCTION(cache_length)
{
    (void)self;
    int64_t length[2];
    const quern_cache *cache = cache_of(args, count, 2);
    if (cache == NULL || !is_int(&args[1])) return cache == NULL ? -1 : refuse();
    const quern_status status = quern_cache_length(cache, args[1].v_int64, &length[0], &length[1]);
    return status == QUERN_OK ? give_bytes(length, sizeof length, result) : fail_as(status);
}

FUNCTION(cache_held)
{
    (void)self;
    int64_t bytes = 0;
    const quern_cache *cache = cache_of(args, count, 1);
    if (cache == NULL) return -1;
    const quern_status status = quern_cache_held(cache, &bytes);
    return status == QUERN_OK ? give_int(bytes, result) : fail_as(status);
}

FUNCTION(cache_rollback)
{
    (void)self;
    quern_cache *cache = cache_of(args, count, 3);
    if (cache == NULL || !is_int(&args[1]) || !is_int(&args[2])) return cache == NULL ? -1 : refuse();
    const quern_status status = quern_cache_rollback(cache, args[1].v_int64, args[2].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(cache_reset)
{
    (void)self;
    quern_cache *cache = cache_of(args, count, 2);
    if (cache == NULL || !is_int(&args[1])) return cache == NULL ? -1 : refuse();
    const quern_status status = quern_cache_reset(cache, args[1].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

/* ---- calls ---- */

typedef struct cache_call {
    quern_cache *cache;
    quern_cache_batch batch;
    tensor_list list;
    params_room params;
    bool decodes, sparse;
} cache_call;

/* A page table: i32, whole, on the host; the library knows its columns. None: *table is NULL. */
static int read_table(const TVMFFIAny *a, const int32_t **table)
{
    tensor_list list;
    if (take_tensors(a, 1, &list) != 0) return -1;
    const quern_tensor *t = list.first;
    if (t != NULL && (t->dtype != QUERN_I32 || t->ndim != 2 || t->device != QUERN_CPU ||
                      t->strides[0] != t->shape[1] || t->strides[1] != 1))
        return fail("ValueError", "table: a contiguous int32 [sequences, columns] on the host is accepted");
    *table = t != NULL ? t->data : NULL;
    return 0;
}

/* sequences, counts, table. */
static int read_batch(const TVMFFIAny *args, quern_cache_batch *batch)
{
    batch_lists lists;
    const int32_t *table = NULL;
    if (!read_lists(args, &lists)) return refuse();
    if (read_table(&args[2], &table) != 0) return -1;
    *batch = (quern_cache_batch){.size = sizeof *batch,
                                 .batch = lists.batch,
                                 .sequences = lists.sequences,
                                 .counts = lists.counts,
                                 .table = table};
    return 0;
}

FUNCTION(cache_fork)
{
    (void)self;
    const int32_t *table = NULL;
    quern_cache *cache = cache_of(args, count, 4);
    if (cache == NULL || !is_int(&args[1]) || !is_int(&args[2])) return cache == NULL ? -1 : refuse();
    if (read_table(&args[3], &table) != 0) return -1;
    const quern_status status = quern_cache_fork(cache, args[1].v_int64, args[2].v_int64, table);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(cache_save)
{
    (void)self;
    const int32_t *table = NULL;
    size_t bytes = 0;
    const quern_cache *cache = cache_of(args, count, 3);
    if (cache == NULL || !is_int(&args[1])) return cache == NULL ? -1 : refuse();
    if (read_table(&args[2], &table) != 0) return -1;
    quern_status status = quern_cache_save(cache, args[1].v_int64, table, NULL, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    void *to = malloc(bytes);
    if (to == NULL) return fail("MemoryError", "no memory for the saved sequence");
    status = quern_cache_save(cache, args[1].v_int64, table, to, &bytes);
    const int code = status == QUERN_OK ? give_bytes(to, bytes, result) : fail_as(status);
    free(to);
    return code;
}

FUNCTION(cache_restore)
{
    (void)self;
    const int32_t *table = NULL;
    TVMFFIByteArray saved;
    quern_cache *cache = cache_of(args, count, 4);
    if (cache == NULL || !is_int(&args[1]) || !text_of(&args[3], &saved))
        return cache == NULL ? -1 : refuse();
    if (read_table(&args[2], &table) != 0) return -1;
    const quern_status status = quern_cache_restore(cache, args[1].v_int64, table, saved.data, saved.size);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

static quern_status workspace_of(const cache_call *c, quern_context *context, size_t *bytes)
{
    const void *tensors = &c->list.tensors, *params = &c->params;
    if (!c->decodes) return quern_cache_append_workspace(context, c->cache, &c->batch, tensors, bytes);
    return c->sparse ? quern_nsa_decode_workspace(context, params, c->cache, &c->batch, tensors, bytes)
                     : quern_attention_decode_workspace(context, params, c->cache, &c->batch, tensors, bytes);
}

static quern_status compute(const void *what, const quern_exec *exec, void *workspace, size_t bytes)
{
    const cache_call *c = what;
    quern_context *context = need_context();
    const void *tensors = &c->list.tensors, *params = &c->params;
    if (!c->decodes) return quern_cache_append(context, exec, c->cache, &c->batch, tensors, workspace, bytes);
    return c->sparse ? quern_nsa_decode(context, exec, params, c->cache, &c->batch, tensors, workspace, bytes)
                     : quern_attention_decode(context, exec, params, c->cache, &c->batch, tensors, workspace,
                                              bytes);
}

static int call(cache_call *c, TVMFFIAny *result)
{
    size_t bytes = 0;
    quern_context *context = need_context();
    if (context == NULL) return -1;
    const quern_status status = workspace_of(c, context, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    (void)give_nothing(result);
    return with_memory(NULL, bytes, compute, c);
}

FUNCTION(cache_append)
{
    (void)self;
    cache_call c = {.cache = cache_of(args, count, 14)};
    if (c.cache == NULL || read_batch(&args[1], &c.batch) != 0 || take_tensors(&args[4], 10, &c.list) != 0)
        return -1;
    return call(&c, result);
}

FUNCTION(cache_decode)
{
    (void)self;
    cache_call c = {.cache = cache_of(args, count, 14), .decodes = true};
    if (c.cache == NULL) return -1;
    if (!is_int(&args[1]) || !read_params(&args[2], &c.params)) return refuse();
    c.sparse = args[1].v_int64 != 0;
    if (read_batch(&args[3], &c.batch) != 0 || take_tensors(&args[6], 8, &c.list) != 0) return -1;
    return call(&c, result);
}
