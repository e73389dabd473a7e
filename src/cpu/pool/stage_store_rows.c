/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_store_rows.c - the store_rows stage. Stores rows in order: of two rows for one slot the later one
 * wins. One thread is enough, as a row takes less than a microsecond and a call has the new tokens of a step.
 * Byte formats accept finite rows only; all rows are checked before one is written.
 */
#include "cpu/check_data.h"
#include "cpu/pool/pool.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <quern/cuda.h>

/* A row as floats and, for pages of bytes, as bytes. */
typedef struct store_space {
    float *row;
    char *bytes; /* NULL: no such pages */
} store_space;

static store_space carve(const store_rows_args *args, arena *a)
{
    store_space s = {.row = arena_take(a, (size_t)args->x.shape[1] * sizeof(float))};
    if (args->page > 0 && args->cache.ndim == 2)
        s.bytes = arena_take(a, (size_t)(args->cache.shape[1] / args->page));
    return s;
}

size_t cpu_store_rows_workspace(const stage_exec *exec, const store_rows_args *args)
{
    arena a = {NULL, 0};
    (void)exec;
    carve(args, &a);
    return arena_size(&a);
}

/* Row i of x as floats. */
static void widen(const store_rows_args *args, const row_kernels *kernels, int64_t i, float *row)
{
    const quern_tensor *x = &args->x;
    const char *from = (const char *)x->data + i * x->strides[0] * (int64_t)quern_dtype_size(x->dtype);
    kernels->convert(from, x->dtype, row, QUERN_F32, x->shape[1]);
}

static void store(const store_rows_args *args, const cpu_kernels *kernels, const store_space *s, int64_t slot)
{
    const quern_tensor *cache = &args->cache;
    if (args->page > 0) {
        store_in_page(kernels, args->format, s->row, args->x.shape[1], cache, args->page, slot, s->bytes);
        return;
    }
    char *to = (char *)cache->data + slot * cache->strides[0] * (int64_t)quern_dtype_size(cache->dtype);
    encode_row(kernels, args->format, s->row, args->x.shape[1], to, cache->dtype);
}

quern_status cpu_store_rows(const stage_exec *exec, const store_rows_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    const store_space space = carve(args, &a);
    float *row = space.row;
    const cpu_kernels *kernels = cpu_kernels_for(exec->cpu_level);
    const int64_t rows = args->x.shape[0], slots = args->cache.shape[0] * (args->page > 0 ? args->page : 1);
    const quern_status status =
        check_each(exec, QUERN_STATUS_BAD_POSITION, &args->slots, rows, -1, slots - 1);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < rows && args->format != ENTRY_ROWS; i++) {
        widen(args, kernels->rows, i, row);
        if (index_at(&args->slots, i) < 0 || row_is_encodable(kernels, args->format, row, args->x.shape[1]))
            continue;
        int64_t column = 0;
        while ((row[column] - row[column]) == 0.0f) column++;
        const stage_fault fault = {
            .kind = QUERN_STATUS_NOT_FINITE, .tensor = &args->x, .index = i * args->x.shape[1] + column};
        return stage_report(exec, fault);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t slot = index_at(&args->slots, i);
        if (slot < 0) continue;
        widen(args, kernels->rows, i, row);
        store(args, kernels, &space, slot);
    }
    return QUERN_OK;
}
