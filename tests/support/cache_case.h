/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_case.h - a cache under test: guarded memory that reads as NaN where nothing was written, and rows of
 * a varlen batch as the tensors of a call. */
#ifndef QUERN_TEST_CACHE_CASE_H
#define QUERN_TEST_CACHE_CASE_H

#include "tensor.h"

#include <quern/cache.h>

typedef struct cache_case {
    quern_cache_params params;
    quern_cache *cache;
    test_workspace memory, rows;
    char *rows_at;
    size_t rows_bytes;
} cache_case;

/* With a page, params.pages 0 becomes what all sequences need together. */
void cache_case_make(cache_case *c, const quern_cache_params *params);
/* Checks the guards and frees. */
void cache_case_free(cache_case *c);
/* What a cache holds, to compare. */
void *cache_case_copy(const cache_case *c);
void cache_case_check_same(const cache_case *c, void *copy);

/* A tensor [n, b, c] of rows `rows` of values [.., b, c]. */
test_tensor cache_rows(test_random *random, quern_dtype dtype, const double *values, const int64_t *rows,
                       int64_t n, int64_t b, int64_t c);

#endif
