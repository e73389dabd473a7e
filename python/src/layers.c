/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layers.c - what a layer of DeepSeek-V4 keeps of its sequences (quern/dsv4_layer.h), by its address. Python
 * keeps the memory.
 *
 *   layer_cache_size(fields) -> bytes of two int64: of the bookkeeping, of the rows
 *   layer_cache_create(fields, memory, rows) -> int
 *   layer_cache_length(cache, sequence) -> bytes of two int64: tokens, those that can be taken back
 *   layer_cache_rollback(cache, sequence, n); layer_cache_reset(cache, sequence)
 *   layer_cache_pages(cache, tokens) -> bytes of two int64: pages that so many need, those that are free
 *   layer_cache_fork(cache, from, to)
 *   layer_cache_save(cache, sequence) -> bytes
 *   layer_cache_restore(cache, sequence, saved)
 *   layer_decode(cache, params, sequences, counts, tensors)
 *
 * fields: "name=number" lines of quern_dsv4_layer_cache_params. params and tensors: of the operation
 * v4-layer. sequences: bytes of int32; counts: bytes of as many int64.
 */
#include "ffi.h"

#include <quern/dsv4_layer.h>

#include <stdlib.h>
#include <string.h>

static int refuse(void)
{
    return fail("TypeError", "a layer's cache and what this function takes are accepted");
}

#define FIELD(field) NAMED_FIELD(quern_dsv4_layer_cache_params, field)
static const named_field fields[] = {
    FIELD(kind),       FIELD(dtype), FIELD(sequences), FIELD(capacity), FIELD(dim),
    FIELD(window),     FIELD(ratio), FIELD(index_dim), FIELD(ring),     FIELD(format),
    FIELD(key_format), FIELD(page),  FIELD(pages),
};
#undef FIELD

bool read_layer_fields(const TVMFFIAny *a, quern_dsv4_layer_cache_params *p)
{
    *p = (quern_dsv4_layer_cache_params)QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    return read_fields(a, fields, sizeof fields / sizeof *fields, p);
}

/* The cache, and the numbers that follow it. */
static quern_dsv4_layer_cache *cache_of(const TVMFFIAny *args, int32_t count, int32_t accepted)
{
    bool numbers = count == accepted;
    for (int32_t i = 0; i < count; i++) numbers = numbers && is_int(&args[i]);
    if (numbers && args[0].v_int64 != 0) return (quern_dsv4_layer_cache *)(intptr_t)args[0].v_int64;
    (void)refuse();
    return NULL;
}

FUNCTION(layer_cache_size)
{
    (void)self;
    quern_dsv4_layer_cache_params p;
    size_t memory, rows;
    if (count != 1 || !read_layer_fields(&args[0], &p)) return refuse();
    const quern_status status = quern_dsv4_layer_cache_size(&p, &memory, &rows);
    const int64_t sizes[] = {(int64_t)memory, (int64_t)rows};
    return status == QUERN_OK ? give_bytes(sizes, sizeof sizes, result) : fail_as(status);
}

FUNCTION(layer_cache_create)
{
    (void)self;
    quern_dsv4_layer_cache_params p;
    quern_dsv4_layer_cache *cache = NULL;
    void *memory, *rows;
    size_t memory_bytes, row_bytes;
    if (count != 3 || !read_layer_fields(&args[0], &p)) return refuse();
    if (read_memory(&args[1], &memory, &memory_bytes) != 0 || read_memory(&args[2], &rows, &row_bytes) != 0)
        return -1;
    const quern_status status =
        quern_dsv4_layer_cache_create(&p, memory, memory_bytes, rows, row_bytes, &cache);
    return status == QUERN_OK ? give_int((intptr_t)cache, result) : fail_as(status);
}

FUNCTION(layer_cache_length)
{
    (void)self;
    int64_t length[2];
    const quern_dsv4_layer_cache *cache = cache_of(args, count, 2);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_length(cache, args[1].v_int64, &length[0], &length[1]);
    return status == QUERN_OK ? give_bytes(length, sizeof length, result) : fail_as(status);
}

FUNCTION(layer_cache_rollback)
{
    (void)self;
    quern_dsv4_layer_cache *cache = cache_of(args, count, 3);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_rollback(cache, args[1].v_int64, args[2].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(layer_cache_reset)
{
    (void)self;
    quern_dsv4_layer_cache *cache = cache_of(args, count, 2);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_reset(cache, args[1].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

/* ---- pages ---- */

FUNCTION(layer_cache_pages)
{
    (void)self;
    int64_t pages[2];
    const quern_dsv4_layer_cache *cache = cache_of(args, count, 2);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_pages(cache, args[1].v_int64, &pages[0], &pages[1]);
    return status == QUERN_OK ? give_bytes(pages, sizeof pages, result) : fail_as(status);
}

/* ---- copies of a sequence ---- */

FUNCTION(layer_cache_fork)
{
    (void)self;
    quern_dsv4_layer_cache *cache = cache_of(args, count, 3);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_fork(cache, args[1].v_int64, args[2].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

FUNCTION(layer_cache_save)
{
    (void)self;
    size_t bytes = 0;
    quern_context *context = need_context();
    const quern_dsv4_layer_cache *cache = cache_of(args, count, 2);
    if (cache == NULL || context == NULL) return -1;
    const int64_t sequence = args[1].v_int64;
    quern_status status = quern_dsv4_layer_cache_save(context, cache, sequence, NULL, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    void *to = malloc(bytes);
    if (to == NULL) return fail("MemoryError", "no memory for the saved sequence");
    status = quern_dsv4_layer_cache_save(context, cache, sequence, to, &bytes);
    const int code = status == QUERN_OK ? give_bytes(to, bytes, result) : fail_as(status);
    free(to);
    return code;
}

FUNCTION(layer_cache_restore)
{
    (void)self;
    TVMFFIByteArray saved;
    if (count != 3 || !text_of(&args[2], &saved)) return refuse();
    quern_context *context = need_context();
    quern_dsv4_layer_cache *cache = cache_of(args, 2, 2);
    if (cache == NULL || context == NULL) return -1;
    const quern_status status =
        quern_dsv4_layer_cache_restore(context, cache, args[1].v_int64, saved.data, saved.size);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

/* ---- calls ---- */

typedef struct decode_call {
    quern_dsv4_layer_cache *cache;
    params_room params;
    batch_lists batch;
    tensor_list list;
} decode_call;

static quern_status compute(const void *what, const quern_exec *exec, void *workspace, size_t bytes)
{
    const decode_call *c = what;
    return quern_dsv4_layer_decode(need_context(), exec, (const void *)&c->params, c->cache,
                                   c->batch.sequences, c->batch.counts, c->batch.batch,
                                   (const void *)&c->list.tensors, workspace, bytes);
}

FUNCTION(layer_decode)
{
    (void)self;
    decode_call c = {.cache = cache_of(args, count < 1 ? count : 1, 1)};
    size_t bytes = 0;
    quern_context *context = need_context();
    if (c.cache == NULL || context == NULL) return -1;
    if (count < 5 || !read_params(&args[1], &c.params) || !read_lists(&args[2], &c.batch)) return refuse();
    if (take_tensors(&args[4], count - 4, &c.list) != 0) return -1;
    const quern_status status = quern_dsv4_layer_decode_workspace(
        context, (const void *)&c.params, c.cache, c.batch.sequences, c.batch.counts, c.batch.batch,
        (const void *)&c.list.tensors, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    (void)give_nothing(result);
    return with_memory(NULL, bytes, compute, &c);
}
