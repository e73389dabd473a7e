/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_world.h - sequences in a cache under test, and the tokens of which each is made. */
#ifndef QUERN_TEST_CACHE_WORLD_H
#define QUERN_TEST_CACHE_WORLD_H

#include "cache_case.h"

enum { SEQUENCES = 5, CAPACITY = 300, BANK = 64, STEP = 40, HEADS = 4, QUERIES = 3, ROWS = 7 };

/* Rows of which all sequences are made: q, then k and v of the cache's three pairs. */
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
quern_status world_append(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                          const uint8_t *token, int64_t n);
/* Compares a sequence of a cache with one that has seen nothing else. */
void world_check(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                 const uint8_t *token, int64_t length);
void world_check_all(const world *w);
/* A sequence's row of the page table. */
int32_t *world_row(const world *w, int64_t sequence);
/* A page that no row names. */
int32_t world_free_page(const world *w);
/* Gives a sequence pages of its own for so many tokens. From `origin` (-1: none) it may take full ones. */
void world_deal(world *w, int64_t sequence, int64_t tokens, int64_t origin, test_random *random);
void world_empty(world *w, int64_t s);
/* Appends random tokens. Where that would write a shared page, it is refused, and the sequence is emptied. */
void world_grow(world *w, int64_t s, test_random *random);
/* Notes that sequence `to` now has the tokens of `from`. */
void world_copied(world *w, int64_t from, int64_t to);
/* Saved bytes, and their number. */
char *world_save(const world *w, int64_t s, size_t *bytes);

#endif
