/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "row_cache.h"

#include "command.h"

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
    free(c->memory), free(c->named), free(c->slots), free(c->workspace);
}

enum { PAGE_MOST = 65536 }; /* what the calls accept */

/* Makes a cache for rows of [B, n, D]; row i of a sequence has position first + i, below 2^32. The table
 * names pages in falling order. */
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
    const int64_t table[] = {batch, columns}, count = batch * (page > 0 ? columns * page : n);
    c->memory = calloc((size_t)(count * width + 1), quern_dtype_size(dtype));
    c->named = malloc((size_t)(batch * columns + 1) * sizeof(int32_t));
    c->slots = malloc((size_t)(batch * n + 1) * sizeof(int32_t));
    if (c->memory == NULL || c->named == NULL || c->slots == NULL)
        return fail(EXIT_MACHINE, "no memory for a cache");
    c->rows = page == 0 ? quern_tensor_contiguous(c->memory, dtype, 3, contiguous)
              : bytes   ? quern_tensor_contiguous(c->memory, dtype, 2, paged)
                        : quern_tensor_contiguous(c->memory, dtype, 3, pool);
    c->table = quern_tensor_contiguous(c->named, QUERN_I32, 2, table);
    for (int64_t i = 0; i < batch * columns; i++)
        ((int32_t *)c->named)[i] = (int32_t)(batch * columns - 1 - i);
    for (int64_t i = 0; i < batch * n; i++) {
        const int64_t row = first + i % n, at = i / n * columns + (page > 0 ? row / page : 0);
        ((int32_t *)c->slots)[i] = (int32_t)(page > 0 ? (batch * columns - 1 - at) * page + row % page : i);
    }
    return EXIT_DONE;
}

static int fill(quern_context *ctx, const quern_tensor *from, int format, int64_t page, row_cache *c)
{
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    const int64_t n = from->shape[0] * from->shape[1];
    quern_tensor x = *from, cache = c->rows;
    const quern_tensor slots = quern_tensor_contiguous(c->slots, QUERN_I32, 1, &n);
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
    c->workspace = malloc(bytes + 1);
    if (c->workspace == NULL) return fail(EXIT_MACHINE, "no memory for the workspace");
    status = quern_dsv4_store(ctx, NULL, &p, &t, c->workspace, bytes);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

int row_cache_make(quern_context *ctx, const quern_tensor *from, int64_t first, int format, int64_t page,
                   row_cache *c)
{
    const int code = make_empty(from, first, format, page, c);
    return code == EXIT_DONE ? fill(ctx, from, format, page, c) : code;
}
