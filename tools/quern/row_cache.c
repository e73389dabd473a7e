/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "row_cache.h"

#include "command.h"
#include "device.h"

#include <quern/cuda.h>

#include <stdlib.h>

const char *const row_cache_choices[] = {"input", "f32", "bf16", "row584", NULL}, *const row_cache_all[] = {
                                                                                      "input", "f32",
                                                                                      "bf16",  "row584",
                                                                                      "fp8",   "fp8-power",
                                                                                      "fp4",   NULL};

quern_dsv4_format row_cache_format(int format)
{
    static const quern_dsv4_format formats[] = {
        [ROW_CACHE_ROW584] = QUERN_DSV4_ROW584,
        [ROW_CACHE_FP8] = QUERN_DSV4_FP8,
        [ROW_CACHE_FP8_POWER] = QUERN_DSV4_FP8_POWER,
        [ROW_CACHE_FP4] = QUERN_DSV4_FP4,
    };
    return formats[format];
}

/* Columns of a stored row. */
static int64_t columns_of(quern_dsv4_format format, int64_t dim)
{
    switch (format) {
    case QUERN_DSV4_FP8:
    case QUERN_DSV4_FP8_POWER: return dim + 4;
    case QUERN_DSV4_FP4: return dim / 2 + dim / 32;
    case QUERN_DSV4_ROW584: return 584;
    case QUERN_DSV4_ROWS: break;
    }
    return dim;
}

void row_cache_free(row_cache *c)
{
    void *const all[] = {c->memory, c->named, c->slots, c->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(c->device, all[i]);
}

enum { PAGE_MOST = 65536 }; /* what the calls accept */

/* Numbers of a table or of slots as i32 on the cache's device; NULL without memory. */
static void *numbers_of(const row_cache *c, const int32_t *host, int64_t count)
{
    void *p = device_take(c->device, (size_t)(count + 1) * sizeof *host);
    if (p == NULL || device_copy(c->device, p, host, (size_t)count * sizeof *host) == QUERN_OK) return p;
    device_free(c->device, p);
    return NULL;
}

/* The table names pages in falling order. `host` has room for either. */
static bool make_numbers(row_cache *c, int64_t batch, int64_t n, int64_t columns, int64_t page, int64_t first,
                         int32_t *host)
{
    const int64_t pages = batch * columns;
    for (int64_t i = 0; i < pages; i++) host[i] = (int32_t)(pages - 1 - i);
    c->named = numbers_of(c, host, pages);
    for (int64_t i = 0; i < batch * n; i++) {
        const int64_t row = first + i % n, at = i / n * columns + (page > 0 ? row / page : 0);
        host[i] = (int32_t)(page > 0 ? (pages - 1 - at) * page + row % page : i);
    }
    c->slots = numbers_of(c, host, batch * n);
    return c->named != NULL && c->slots != NULL;
}

/* Makes a cache for rows of [B, n, D]; row i of a sequence has position first + i, below 2^32. */
static int make_empty(const quern_tensor *from, int64_t first, int format, int64_t page, row_cache *c)
{
    if (page < 0 || page > PAGE_MOST)
        return fail(EXIT_INPUT, "--page %lld: 0 to %d slots are accepted", (long long)page, PAGE_MOST);
    const bool bytes = row_cache_format(format) != QUERN_DSV4_ROWS;
    const int64_t batch = from->shape[0], n = from->shape[1], dim = from->shape[2];
    const int64_t columns = page > 0 ? (first + n + page - 1) / page : 0,
                  width = columns_of(row_cache_format(format), dim);
    const quern_dtype dtype = bytes                      ? QUERN_U8
                              : format == ROW_CACHE_F32  ? QUERN_F32
                              : format == ROW_CACHE_BF16 ? QUERN_BF16
                                                         : from->dtype;
    const int64_t contiguous[] = {batch, n, width}, pool[] = {batch * columns, page, width},
                  paged[] = {batch * columns, page * width};
    const int64_t table[] = {batch, columns}, count = batch * (page > 0 ? columns * page : n),
                  numbers = batch * (columns > n ? columns : n);
    c->device = (int)from->device;
    c->memory = device_take(c->device, (size_t)(count * width + 1) * quern_dtype_size(dtype));
    int32_t *host = malloc((size_t)(numbers + 1) * sizeof *host);
    const bool made =
        c->memory != NULL && host != NULL && make_numbers(c, batch, n, columns, page, first, host);
    free(host);
    if (!made) return fail(EXIT_MACHINE, "no memory for a cache");
    c->rows = device_tensor(c->device, c->memory, dtype, page > 0 && bytes ? 2 : 3,
                            page == 0 ? contiguous
                            : bytes   ? paged
                                      : pool);
    c->table = device_tensor(c->device, c->named, QUERN_I32, 2, table);
    return EXIT_DONE;
}

static int fill(quern_context *ctx, const quern_exec *exec, const quern_tensor *from, int format,
                int64_t page, row_cache *c)
{
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    const int64_t n = from->shape[0] * from->shape[1];
    quern_tensor x = *from, cache = c->rows;
    const quern_tensor slots = device_tensor(c->device, c->slots, QUERN_I32, 1, &n);
    x.ndim = 2;
    x.shape[0] = n;
    x.shape[1] = from->shape[2];
    x.strides[0] = from->shape[2];
    x.strides[1] = 1;
    if (page == 0) {
        cache.ndim = 2;
        cache.shape[0] = n;
        cache.shape[1] = c->rows.shape[2];
        cache.strides[0] = c->rows.shape[2];
        cache.strides[1] = 1;
    }
    p.format = row_cache_format(format);
    p.page = page;
    t.x = &x;
    t.slots = &slots;
    t.cache = &cache;
    size_t bytes;
    quern_status status = quern_dsv4_store_workspace(ctx, &p, &t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    c->workspace = device_take(c->device, bytes + 1);
    if (c->workspace == NULL) return fail(EXIT_MACHINE, "no memory for the workspace");
    status = quern_dsv4_store(ctx, exec, &p, &t, c->workspace, bytes);
    if (status == QUERN_OK && c->device == QUERN_CUDA) status = quern_cuda_synchronize(0, NULL);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

int row_cache_make(quern_context *ctx, const quern_exec *exec, const quern_tensor *from, int64_t first,
                   int format, int64_t page, row_cache *c)
{
    const int code = make_empty(from, first, format, page, c);
    return code == EXIT_DONE ? fill(ctx, exec, from, format, page, c) : code;
}
