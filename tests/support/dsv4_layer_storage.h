/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_storage.h - layers whose caches store rows in other dtypes, in bytes, in pages. */
#ifndef QUERN_TEST_DSV4_LAYER_STORAGE_H
#define QUERN_TEST_DSV4_LAYER_STORAGE_H

#include "dsv4_layer_case.h"

enum { STORED_TOKENS = 33, STORED_WINDOW = 12, STORED_DIM = 512, STORED_ROPE = 64, STORED_INDEX = 64 };
enum { STORED_WIDTH = 40 };

typedef struct layer_storage {
    quern_dtype dtype;
    quern_dsv4_format format, key_format;
    int64_t page;
} layer_storage;
enum { LAYER_STORAGES = 4 };
extern const layer_storage layer_storages[LAYER_STORAGES];

/* One sequence, weights in f32. */
layer_case layer_storage_case(test_random *random, oracle_layer_kind kind, quern_dtype dtype);
quern_dsv4_layer_cache_params layer_storage_params(const layer_case *c, const layer_storage *how,
                                                   int64_t sequences);
void layer_expect_error(quern_status status, quern_status expected, const char *sentence);

#endif
