/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.cu - rows and entries into a cache's pages, copies of pages, packed rows. */
#include "variants.cuh"

extern const variant<cache_copy_args> cache_copy_any;
extern const variant<cache_compress_args> cache_compress_any;
extern const variant<copy_pages_args> copy_pages_any;
extern const variant<pack_rows_args> pack_rows_any;

static const variant<cache_copy_args> *const copy_list[] = {&cache_copy_any};
static const variants<cache_copy_args> copy(copy_list);
static const variant<cache_compress_args> *const compress_list[] = {&cache_compress_any};
static const variants<cache_compress_args> compress(compress_list);
static const variant<copy_pages_args> *const pages_list[] = {&copy_pages_any};
static const variants<copy_pages_args> pages(pages_list);
static const variant<pack_rows_args> *const pack_list[] = {&pack_rows_any};
static const variants<pack_rows_args> pack(pack_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<cache_copy_args, copy>(backend.cache_copy);
    offer<cache_compress_args, compress>(backend.cache_compress);
    offer<copy_pages_args, pages>(backend.copy_pages);
    offer<pack_rows_args, pack>(backend.pack_rows);
});
