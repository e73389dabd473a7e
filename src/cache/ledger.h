/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ledger.h - the books of sequences inside the library. */
#ifndef QUERN_CACHE_LEDGER_H
#define QUERN_CACHE_LEDGER_H

#include "core/op.h"

#include <quern/ledger.h>

/* Pools of pages, and the states' slots as one more, of one page a sequence. */
enum { LEDGER_STATES = QUERN_LEDGER_POOLS, LEDGER_POOLS };

typedef struct ledger_pool {
    quern_ledger_pool params; /* resolved; page 0: there is no such pool */
    int64_t columns, column;  /* of a sequence's pages; where they stand in its row of `pages` */
    int32_t *holders;         /* [pages]: how many sequences hold a page */
    int32_t *free;            /* the first `left` of [pages]: those that none holds */
    int64_t left;
} ledger_pool;

typedef struct ledger_sequence {
    int64_t tokens, held; /* held: how many of the last ones can be taken back */
    int64_t count;        /* the step's new tokens, or -1: it is not in the step */
} ledger_sequence;

/* What a step needs of a pool for one sequence: its pages before and after, and the columns, of those before,
 * that it writes: `writes` of them from `first` on, modulo a ring's columns. */
typedef struct ledger_need {
    int32_t had, end, first, writes;
} ledger_need;

/* A page that the step has replaced by a copy. */
typedef struct ledger_copy {
    int32_t sequence, pool, from, to;
    int64_t column;
} ledger_copy;

struct quern_ledger {
    uint64_t magic;
    quern_ledger_params params;
    ledger_pool pool[LEDGER_POOLS];
    int64_t columns, copies_most; /* of all pools; copies of one sequence's step */
    ledger_sequence *sequences;
    int32_t *pages;        /* [S, columns] */
    ledger_need *needs;    /* [S, LEDGER_POOLS]: of the batch's sequences while begin() runs, else 0 */
    int32_t *members;      /* [S]: those of the step that has begun */
    int64_t batch, copies; /* of it; batch -1: none has */
    ledger_copy *copied;
};

/* What follows from the parameters, without memory; the bytes that it takes. */
quern_status ledger_layout(const quern_ledger_params *given, quern_ledger *l, size_t *bytes);
quern_status ledger_check(const quern_ledger *ledger);
quern_status ledger_check_sequence(const quern_ledger *ledger, int64_t sequence, const char *name);
/* Makes a ledger at aligned memory of so many bytes. */
quern_status ledger_create_at(const quern_ledger_params *params, void *memory, quern_ledger **ledger);
size_t ledger_block_bytes(const quern_ledger *ledger, int64_t batch);
/* Checks a batch's ids and counts: of tokens to come, or that the sequences have (`newest`). */
quern_status ledger_check_members(const quern_ledger *ledger, const int32_t *sequences, const int64_t *counts,
                                  int64_t batch, bool newest);
/* Rows of a pool of a sequence of so many tokens, and its pages. */
int64_t ledger_rows(const ledger_pool *pool, int64_t tokens);
int64_t ledger_pages(const ledger_pool *pool, int64_t tokens);
/* The pages of a sequence in a pool. */
static inline int32_t *ledger_row(const quern_ledger *l, int64_t sequence, int pool)
{
    return l->pages + sequence * l->columns + l->pool[pool].column;
}
/* A sequence holds a page no longer; takes one that none holds. */
static inline void ledger_release(ledger_pool *pool, int32_t page)
{
    if (--pool->holders[page] == 0) pool->free[pool->left++] = page;
}
static inline int32_t ledger_take(ledger_pool *pool)
{
    const int32_t page = pool->free[--pool->left];
    pool->holders[page] = 1;
    return page;
}
/* The sequence no longer holds what it needs for `had` tokens and not for `tokens`. */
void ledger_shrink(quern_ledger *l, int64_t sequence, int64_t had, int64_t tokens);
/* The sequence takes pages for columns had ... end - 1. */
void ledger_grow(quern_ledger *l, int64_t sequence, int pool, int64_t had, int64_t end);
/* Gives an empty sequence pages for so many tokens, which a restored one has, or refuses. */
quern_status ledger_assign(quern_ledger *l, int64_t sequence, int64_t tokens, int64_t held);

#endif
