/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* row_cache.h - rows of raw tokens, entries or keys as a cache stores them, for `quern run` and `quern bench`
 * of v4-attention and v4-index. */
#ifndef QUERN_TOOLS_ROW_CACHE_H
#define QUERN_TOOLS_ROW_CACHE_H

#include <quern/dsv4.h>

/* Of an option: input is the rows' own dtype. The first of them are v4-attention's, all but row584 are
 * v4-index's. */
extern const char *const row_cache_choices[], *const row_cache_all[];
enum {
    ROW_CACHE_INPUT,
    ROW_CACHE_F32,
    ROW_CACHE_BF16,
    ROW_CACHE_ROW584,
    ROW_CACHE_FP8,
    ROW_CACHE_FP8_POWER,
    ROW_CACHE_FP4
};
quern_dsv4_format row_cache_format(int format);

/* Tensors of the call that reads the cache, and their memory. */
typedef struct row_cache {
    quern_tensor rows, table; /* the table with pages alone */
    int device; /* of the rows that it is made of, and its own */
    void *memory, *named, *slots, *workspace;
} row_cache;

/* Makes a cache of contiguous rows [B, n, D]; row i of a sequence has position first + i. exec may be NULL.
 * *c is zero before. */
int row_cache_make(quern_context *ctx, const quern_exec *exec, const quern_tensor *from, int64_t first,
                   int format, int64_t page, row_cache *c);
void row_cache_free(row_cache *c);

#endif
