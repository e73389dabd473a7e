/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_copy_pages.c - the copy_pages and pack_rows stages. A task is a copy of a page, or a packed row.
 * Limit: the copy bandwidth. */
#include "core/parallel.h"
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

quern_status cpu_copy_pages(const stage_exec *exec, const copy_pages_args *args, void *workspace)
{
    (void)workspace;
    bool any = false;
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

quern_status cpu_pack_rows(const stage_exec *exec, const pack_rows_args *args, void *workspace)
{
    (void)workspace;
    parallel_for(exec, args->count, pack_row, (void *)(uintptr_t)args);
    return QUERN_OK;
}
