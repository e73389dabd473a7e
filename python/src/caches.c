/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * caches.c - caches of keys and values (quern/cache.h), by their address. Python keeps the memory.
 *
 *   cache_size(fields) -> bytes of two int64: of the bookkeeping, of the rows
 *   cache_create(fields, memory, rows) -> int
 *   cache_length(cache, sequence) -> bytes of two int64, tokens and entries
 *   cache_held(cache) -> int
 *   cache_rollback(cache, sequence, n); cache_reset(cache, sequence)
 *   cache_fork(cache, from, to)
 *   cache_save(cache, sequence) -> bytes
 *   cache_restore(cache, sequence, saved)
 *   cache_append(cache, sequences, counts, k, v, k_slc, v_slc, k_win, v_win, w_k, w_v, pe_k, pe_v, k_index)
 *   cache_decode(cache, sparse, params, sequences, counts, q, o, lse, w_gate, gates, block_idx,
 *                block_count, sink, q_index)
 *
 * fields: "name=number" lines of quern_cache_params. sequences: bytes of int32; counts: bytes of as many
 * int64. params: of the operation nsa or attention.
 */
#include "ffi.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>

#define FIELD(field) NAMED_FIELD(quern_cache_params, field)
static const named_field fields[] = {
    FIELD(dtype),       FIELD(sequences),    FIELD(kv_heads),     FIELD(dim),    FIELD(dim_v),
    FIELD(capacity),    FIELD(page),         FIELD(pages),        FIELD(stride), FIELD(block_size),
    FIELD(compress),    FIELD(separate_slc), FIELD(separate_win), FIELD(window), FIELD(step),
    FIELD(index_heads), FIELD(index_dim),
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

static bool read_batch(const TVMFFIAny *args, quern_cache_batch *batch)
{
    batch_lists lists;
    if (!read_lists(args, &lists)) return false;
    *batch = (quern_cache_batch){
        .size = sizeof *batch, .batch = lists.batch, .sequences = lists.sequences, .counts = lists.counts};
    return true;
}

FUNCTION(cache_fork)
{
    (void)self;
    quern_cache *cache = cache_of(args, count, 3);
    if (cache == NULL || !is_int(&args[1]) || !is_int(&args[2])) return cache == NULL ? -1 : refuse();
    const quern_status status = quern_cache_fork(cache, args[1].v_int64, args[2].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(cache_save)
{
    (void)self;
    size_t bytes = 0;
    const quern_cache *cache = cache_of(args, count, 2);
    quern_context *context = need_context();
    if (cache == NULL || !is_int(&args[1])) return cache == NULL ? -1 : refuse();
    if (context == NULL) return -1;
    quern_status status = quern_cache_save(context, cache, args[1].v_int64, NULL, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    void *to = malloc(bytes);
    if (to == NULL) return fail("MemoryError", "no memory for the saved sequence");
    status = quern_cache_save(context, cache, args[1].v_int64, to, &bytes);
    const int code = status == QUERN_OK ? give_bytes(to, bytes, result) : fail_as(status);
    free(to);
    return code;
}

FUNCTION(cache_restore)
{
    (void)self;
    TVMFFIByteArray saved;
    quern_cache *cache = cache_of(args, count, 3);
    quern_context *context = need_context();
    if (cache == NULL || !is_int(&args[1]) || !text_of(&args[2], &saved))
        return cache == NULL ? -1 : refuse();
    if (context == NULL) return -1;
    const quern_status status = quern_cache_restore(context, cache, args[1].v_int64, saved.data, saved.size);
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

/* Puts the last of `count` tensors, which stand in the order of the struct's fields, into its field. */
static void place_last(tensor_list *list, int32_t count, size_t offset)
{
    const size_t field = offset / sizeof(void *) - 1;
    const quern_tensor *last = list->tensors.t[count - 1];
    list->tensors.t[count - 1] = NULL;
    list->tensors.t[field] = last;
    list->tensors.size = sizeof list->tensors.size + (field + 1) * sizeof(void *);
}

FUNCTION(cache_append)
{
    (void)self;
    cache_call c = {.cache = cache_of(args, count, 14)};
    if (c.cache == NULL) return -1;
    if (!read_batch(&args[1], &c.batch)) return refuse();
    if (take_tensors(&args[3], 11, &c.list) != 0) return -1;
    place_last(&c.list, 11, offsetof(quern_cache_tensors, k_index));
    return call(&c, result);
}

FUNCTION(cache_decode)
{
    (void)self;
    cache_call c = {.cache = cache_of(args, count, 14), .decodes = true};
    if (c.cache == NULL) return -1;
    if (!is_int(&args[1]) || !read_params(&args[2], &c.params) || !read_batch(&args[3], &c.batch))
        return refuse();
    c.sparse = args[1].v_int64 != 0;
    if (take_tensors(&args[5], 9, &c.list) != 0) return -1;
    place_last(&c.list, 9, offsetof(quern_decode_tensors, q_index));
    return call(&c, result);
}
