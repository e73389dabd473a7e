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
 *   layer_cache_fork(cache, from, to)
 *   layer_cache_part(cache, sequence, part) -> bytes of a sequence's raw rows, entries, keys, of the
 *                                  saved states of the main compressor and of the indexer's: parts 0 to 4
 *   layer_cache_set(cache, fields, sequence, tokens, parts...)     gives it those of five parts
 *   layer_decode(cache, params, sequences, counts, tensors)
 *
 * fields: int64 in the order of quern_dsv4_layer_cache_params. params and tensors: of the operation v4-layer.
 * sequences: bytes of int32; counts: bytes of as many int64.
 */
#include "ffi.h"

#include <quern/dsv4_layer.h>

#include <stdlib.h>
#include <string.h>

enum { LAYER_FIELDS = 9 };

static int refuse(void)
{
    return fail("TypeError", "a layer's cache and what this function takes are accepted");
}

static bool read_fields(const TVMFFIAny *a, quern_dsv4_layer_cache_params *p)
{
    TVMFFIByteArray bytes;
    int64_t f[LAYER_FIELDS];
    if (!text_of(a, &bytes) || bytes.size != sizeof f) return false;
    memcpy(f, bytes.data, sizeof f);
    *p = (quern_dsv4_layer_cache_params){.size = sizeof *p,
                                         .kind = (quern_dsv4_layer_kind)f[0],
                                         .dtype = (quern_dtype)f[1],
                                         .sequences = f[2],
                                         .capacity = f[3],
                                         .dim = f[4],
                                         .window = f[5],
                                         .ratio = f[6],
                                         .index_dim = f[7],
                                         .ring = f[8]};
    return true;
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
    if (count != 1 || !read_fields(&args[0], &p)) return refuse();
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
    if (count != 3 || !read_fields(&args[0], &p)) return refuse();
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

FUNCTION(layer_cache_fork)
{
    (void)self;
    quern_dsv4_layer_cache *cache = cache_of(args, count, 3);
    if (cache == NULL) return -1;
    const quern_status status = quern_dsv4_layer_cache_fork(cache, args[1].v_int64, args[2].v_int64);
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

/* ---- copies of a sequence ---- */

enum { RAW, ENTRIES, KEYS, MAIN, INDEX, PARTS };

static int give_rows(const quern_tensor *t, TVMFFIAny *result)
{
    const size_t row = t->ndim == 2 ? (size_t)t->shape[1] * quern_dtype_size(t->dtype) : 0;
    const size_t rows = row > 0 ? (size_t)t->shape[0] : 0;
    char *copy = malloc(rows * row + 1);
    if (copy == NULL) return fail("MemoryError", "no memory for the saved sequence");
    for (size_t i = 0; i < rows; i++)
        memcpy(copy + i * row,
               (const char *)t->data + (int64_t)i * t->strides[0] * (int64_t)quern_dtype_size(t->dtype), row);
    const int code = give_bytes(copy, rows * row, result);
    free(copy);
    return code;
}

static int give_saved(const quern_dsv4_state *state, TVMFFIAny *result)
{
    size_t bytes = 0;
    if (state == NULL) return give_bytes("", 0, result);
    quern_status status = quern_dsv4_state_save(state, NULL, &bytes);
    if (status != QUERN_OK) return fail_as(status);
    void *to = malloc(bytes);
    if (to == NULL) return fail("MemoryError", "no memory for the saved sequence");
    status = quern_dsv4_state_save(state, to, &bytes);
    const int code = status == QUERN_OK ? give_bytes(to, bytes, result) : fail_as(status);
    free(to);
    return code;
}

FUNCTION(layer_cache_part)
{
    (void)self;
    quern_dsv4_layer_rows rows = QUERN_DSV4_LAYER_ROWS_INIT;
    const quern_dsv4_layer_cache *cache = cache_of(args, count, 3);
    if (cache == NULL) return -1;
    const int64_t part = args[2].v_int64;
    if (part < 0 || part >= PARTS) return refuse();
    const quern_status status = quern_dsv4_layer_cache_get(cache, args[1].v_int64, &rows);
    if (status != QUERN_OK) return fail_as(status);
    const quern_tensor *const views[] = {&rows.raw, &rows.entries, &rows.keys};
    if (part <= KEYS) return give_rows(views[part], result);
    return give_saved(part == MAIN ? rows.main : rows.index, result);
}

/* Rows [n, columns] in bytes; *whole: no bytes are left over. */
static quern_tensor rows_in(TVMFFIByteArray bytes, quern_dtype dtype, int64_t columns, bool *whole)
{
    const int64_t row = columns * (int64_t)quern_dtype_size(dtype);
    const int64_t shape[] = {row > 0 ? (int64_t)bytes.size / row : 0, columns};
    *whole = *whole && shape[0] * row == (int64_t)bytes.size;
    return quern_tensor_contiguous((void *)(uintptr_t)bytes.data, dtype, 2, shape);
}

/* A state in memory that the caller frees; none where nothing is saved. */
static quern_status state_in(TVMFFIByteArray saved, const quern_dsv4_layer_cache_params *p, int64_t width,
                             void **memory, quern_dsv4_state **state)
{
    size_t bytes = 0;
    quern_dsv4_compress_params made_by = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    if (saved.size == 0) return QUERN_OK;
    made_by.kind = p->kind == QUERN_DSV4_LAYER_CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    made_by.ratio = p->ratio;
    quern_status status = quern_dsv4_state_size(&made_by, width, p->ring, &bytes);
    if (status != QUERN_OK) return status;
    *memory = malloc(bytes);
    return quern_dsv4_state_restore(&made_by, width, p->ring, saved.data, saved.size, *memory, bytes, state);
}

FUNCTION(layer_cache_set)
{
    (void)self;
    quern_dsv4_layer_cache_params p;
    TVMFFIByteArray part[PARTS];
    void *memory[2] = {NULL, NULL};
    quern_dsv4_state *states[2] = {NULL, NULL};
    bool whole = true;
    if (count != 4 + PARTS || !read_fields(&args[1], &p) || !is_int(&args[2]) || !is_int(&args[3]))
        return refuse();
    quern_dsv4_layer_cache *cache = cache_of(args, 1, 1);
    if (cache == NULL) return -1;
    for (int i = 0; i < PARTS; i++)
        if (!text_of(&args[4 + i], &part[i])) return refuse();
    quern_dsv4_layer_rows rows = QUERN_DSV4_LAYER_ROWS_INIT;
    rows.tokens = args[3].v_int64;
    rows.raw = rows_in(part[RAW], p.dtype, p.dim, &whole);
    rows.entries = rows_in(part[ENTRIES], p.dtype, p.dim, &whole);
    rows.keys = rows_in(part[KEYS], p.dtype, p.index_dim, &whole);
    if (!whole) return fail("ValueError", "a part of the saved sequence is cut off: whole rows are accepted");
    quern_status status = state_in(part[MAIN], &p, p.dim, &memory[0], &states[0]);
    if (status == QUERN_OK) status = state_in(part[INDEX], &p, p.index_dim, &memory[1], &states[1]);
    rows.main = states[0];
    rows.index = states[1];
    if (status == QUERN_OK) status = quern_dsv4_layer_cache_set(cache, args[2].v_int64, &rows);
    const int code = status == QUERN_OK ? give_nothing(result) : fail_as(status);
    free(memory[0]);
    free(memory[1]);
    return code;
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
