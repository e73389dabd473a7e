/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_world.h - sequences in a cache under test, and the tokens of which each is made. */
#ifndef QUERN_TEST_CACHE_WORLD_H
#define QUERN_TEST_CACHE_WORLD_H

#include "cache_case.h"

enum { SEQUENCES = 5, CAPACITY = 300, BANK = 64, STEP = 40, HEADS = 4, QUERIES = 3, ROWS = 9 };

/* Rows of which all sequences are made: q, k and v of three pairs, the indexer's queries and keys. */
typedef struct world {
    cache_case cache;
    quern_context *ctx;
    test_tensor bank[ROWS];
    quern_nsa_params nsa;
    int64_t length[SEQUENCES];
    uint8_t token[SEQUENCES][CAPACITY];
} world;

world world_make(test_random *random);
void world_free(world *w);
/* Rows of a bank for tokens, in memory of the caller's. */
quern_tensor world_rows(const world *w, int bank, const uint8_t *token, int64_t n);
quern_status world_append(const world *w, quern_cache *cache, int32_t sequence, const uint8_t *token,
                          int64_t n);
/* Compares a sequence of a cache with one that has seen nothing else. */
void world_check(const world *w, quern_cache *cache, int32_t sequence, const uint8_t *token, int64_t length);
void world_check_all(const world *w);
void world_empty(world *w, int64_t s);
/* Appends random tokens. Where pages lack, the sequence is emptied. */
void world_grow(world *w, int64_t s, test_random *random);
/* Notes that sequence `to` now has the tokens of `from`. */
void world_copied(world *w, int64_t from, int64_t to);
/* Saved bytes, and their number. */
char *world_save(const world *w, int64_t s, size_t *bytes);

#endif
