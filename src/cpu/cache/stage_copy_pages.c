/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_copy_pages.c - the copy_pages and pack_rows stages. A task is a copy of a page, or a packed row.
 * Limit: the copy bandwidth. */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/stages.h"

#include <string.h>

static char *page_at(const quern_tensor *pages, int64_t page)
{
    return (char *)pages->data + page * pages->strides[0] * (int64_t)quern_dtype_size(pages->dtype);
}

static void copy_page(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const copy_pages_args *args = arg;
    const int32_t *copy = (const int32_t *)args->copies.data + index * args->copies.strides[0];
    const int64_t column = args->copies.strides[1], size = (int64_t)quern_dtype_size(args->pages.dtype);
    if (copy[0] != args->pool) return;
    const char *from = page_at(&args->pages, copy[column]);
    char *to = page_at(&args->pages, copy[2 * column]);
    for (int64_t i = 0; i < args->pages.shape[1]; i++)
        memcpy(to + i * args->pages.strides[1] * size, from + i * args->pages.strides[1] * size,
               (size_t)(args->pages.shape[2] * size));
}

/* What is copied of the pool comes from its pages and goes to them. */
static quern_status check_copies(const stage_exec *exec, const copy_pages_args *args)
{
    const quern_tensor *t = &args->copies;
    for (int64_t i = 0; i < t->shape[0]; i++) {
        const int32_t *copy = (const int32_t *)t->data + i * t->strides[0];
        for (int64_t k = 1; copy[0] == args->pool && k < 3; k++) {
            const int32_t page = copy[k * t->strides[1]];
            if (page < 0 || page >= args->pages.shape[0])
                return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_PAGE,
                                                        .tensor = t,
                                                        .index = 3 * i + k,
                                                        .most = args->pages.shape[0] - 1});
        }
    }
    return QUERN_OK;
}

quern_status cpu_copy_pages(const stage_exec *exec, const copy_pages_args *args, void *workspace)
{
    (void)workspace;
    bool any = false;
    const quern_status status = check_copies(exec, args);
    if (status != QUERN_OK) return status;
    for (int64_t i = 0; i < args->copies.shape[0] && !any; i++)
        any = ((const int32_t *)args->copies.data)[i * args->copies.strides[0]] == args->pool;
    if (any) parallel_for(exec, args->copies.shape[0], copy_page, (void *)(uintptr_t)args);
    return QUERN_OK;
}

static void pack_row(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const pack_rows_args *args = arg;
    const int64_t row = args->first + index, slot = row % args->page, parts = args->parts,
                  block = row / args->page, column = args->ring > 0 ? block % args->ring : block,
                  bytes[] = {args->data, args->scales}, starts[] = {0, args->page * args->data},
                  apart = args->pages.strides[1] * (int64_t)quern_dtype_size(args->pages.dtype);
    const int32_t page = ((const int32_t *)args->table.data)[column * args->table.strides[0]];
    char *packed = (char *)args->packed.data + index * parts * (args->data + args->scales);
    for (int64_t part = 0; part < 2 * parts; part++) {
        const int64_t n = bytes[part % 2];
        char *at = page_at(&args->pages, page) + part / 2 * apart + starts[part % 2] + slot * n;
        memcpy(args->unpack ? at : packed, args->unpack ? packed : at, (size_t)n);
        packed += n;
    }
}

/* The rows' pages are the pool's. */
static quern_status check_table(const stage_exec *exec, const pack_rows_args *args)
{
    const int64_t rows = args->first + args->count, blocks = rows / args->page + (rows % args->page != 0),
                  needed = args->ring > 0 && blocks > args->ring ? args->ring : blocks;
    return check_each(exec, QUERN_STATUS_BAD_PAGE, &args->table, needed, 0, args->pages.shape[0] - 1);
}

quern_status cpu_pack_rows(const stage_exec *exec, const pack_rows_args *args, void *workspace)
{
    (void)workspace;
    const quern_status status = check_table(exec, args);
    if (status != QUERN_OK) return status;
    parallel_for(exec, args->count, pack_row, (void *)(uintptr_t)args);
    return QUERN_OK;
}
