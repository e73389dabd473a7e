/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache.h - a cache of one layer inside the library: its ledger, its pools, and the tensors of its steps. */
#ifndef QUERN_CACHE_CACHE_H
#define QUERN_CACHE_CACHE_H

#include "cache/ledger.h"
#include "core/view.h"

#include <quern/cache.h>

typedef enum cache_pool {
    CACHE_TOKENS,
    CACHE_SLC,
    CACHE_ENTRIES,
    CACHE_WIN,
    CACHE_INDEX,
    CACHE_POOLS
} cache_pool;

struct quern_cache {
    uint64_t magic;
    quern_cache_params params; /* defaults resolved; without compression its fields are 0 */
    quern_ledger *ledger;
    quern_tensor pool[CACHE_POOLS]; /* [pages, Hkv, 64 (D + Dv)], the index [pages, Hi, 64 D_I]; ndim 0:
                                     * there are no such rows */
    void *block;
    size_t block_bytes;
};

/* What a call over a cache hands to an operation. */
typedef struct cache_views {
    quern_cache_batch batch;
    int64_t tokens; /* of its counts */
    quern_step step;
} cache_views;

quern_status cache_check(const quern_cache *cache);
/* Checks a batch: of new tokens to append, or of the newest ones. With `now` an append's step begins, and the
 * step's numbers are written. */
quern_status cache_look(const quern_cache *cache, const quern_cache_batch *given, bool appends, bool now,
                        cache_views *v);
/* Sets the pointers slots ... win_table, which begin at *slots. */
void cache_bind(const quern_cache *cache, const cache_views *v, const quern_tensor **slots);
/* The pool of index keys, or NULL. */
const quern_tensor *cache_index(const quern_cache *cache);
/* That k or q, if it is there, has the call's tokens and the cache's dtype and dim, and is on the CPU. */
quern_status cache_check_rows(const quern_cache *cache, const cache_views *v, const quern_tensor *rows,
                              const char *name);

/* For attention of the newest tokens: *own becomes the caller's tensors with those of the step. */
quern_status cache_bind_decode(const quern_cache *cache, const quern_cache_batch *batch, bool now,
                               const quern_decode_tensors *given, cache_views *v, quern_decode_tensors *own);

/* In append.c: l and d of a compression; 0 becomes l. */
quern_status cache_check_stride(const char *prefix, int64_t block_size, int64_t *stride);
extern const op_family cache_append_family, cache_pack_family;

#endif
