/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ledger.h - the books of sequences that are decoded: how long each is, and where its rows and states stand.
 *
 * Rows stand in pools of pages, states in slots; both are tensors of the caller, on any device, one set a
 * layer. A ledger is on the host and holds numbers alone: one serves all layers of a kind. A step goes
 *
 *     quern_ledger_begin(ledger, ids, counts, B, block, bytes);  the step's i32 tensors, in one block
 *     copy the block to the device
 *     operations on the step's tensors, for each layer
 *     quern_ledger_commit(ledger);
 *
 * The operations of a step (quern_cache_append_step() and the like) read the block's tensors and change no
 * number of the ledger. An engine that has page tables of its own needs no ledger.
 *
 * A page that several sequences hold, after a fork, is never written: the step that would write it gets a
 * copy. Rows from a sequence's length on mean nothing, so that a step's rows may be written at once.
 *
 * One call at a time may use a ledger. On an error it is as it was. begin, commit, abort and rollback take
 * no memory, start no thread and wait for nothing.
 */
#ifndef QUERN_LEDGER_H
#define QUERN_LEDGER_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QUERN_LEDGER_POOLS = 4, QUERN_LEDGER_STATES = QUERN_LEDGER_POOLS, QUERN_LEDGER_ROLLBACK_MOST = 8 };

/* Rows of one kind. Row i of a sequence exists once it has i * stride + block tokens, and stands in slot
 * i % page of page table[sequence, i / page]; in a ring, of page table[sequence, i / page % columns]. */
typedef struct quern_ledger_pool {
    int64_t page;   /* rows of a page, 1 ... 2^31 - 1; 0: the ledger has no such pool */
    int64_t pages;  /* of the pool, up to 2^31 - 1; 0: as many as all sequences can need */
    int64_t block;  /* tokens of a row; 0: 1 */
    int64_t stride; /* tokens from a row to the next; 0: block */
    int64_t ring;   /* 0: rows stay; else at least so many of the last ones, whole pages */
} quern_ledger_pool;

typedef struct quern_ledger_params {
    size_t size;
    int64_t sequences; /* S, 1 ... 2^31 - 1 */
    int64_t capacity;  /* most tokens of a sequence, 1 ... 2^31 - 1 */
    int64_t rollback;  /* m: most tokens that can be taken back, 0 to 8 */
    int64_t step;      /* most tokens of a sequence in a step; 0: any number */
    /* The sequences have states, which hold the last m tokens apart (dsv4.h): no more than the tokens that
     * came since the last roll-back, up to m, can be taken back. So it is with a ring, too. */
    bool states;
    quern_ledger_pool pools[QUERN_LEDGER_POOLS];
} quern_ledger_params;
#define QUERN_LEDGER_PARAMS_INIT QUERN_SIZED(quern_ledger_params)

typedef struct quern_ledger quern_ledger;

QUERN_API quern_status quern_ledger_size(const quern_ledger_params *params, size_t *bytes);
/* Makes a ledger of empty sequences in memory of any alignment, which may not move. */
QUERN_API quern_status quern_ledger_create(const quern_ledger_params *params, void *memory, size_t bytes,
                                           quern_ledger **ledger);
/* Pages of a pool: those that a sequence of so many tokens needs, and those of the whole pool. Either may be
 * NULL. At the capacity the former are the columns of the pool's table. Pool QUERN_LEDGER_STATES: slots of
 * states, half as many again as sequences, because a step's copies stand beside what they are copies of. */
QUERN_API quern_status quern_ledger_pages(const quern_ledger_params *params, int64_t pool, int64_t tokens,
                                          int64_t *pages, int64_t *whole);
/* Pages of a pool that no sequence holds. */
QUERN_API quern_status quern_ledger_free_pages(const quern_ledger *ledger, int64_t pool, int64_t *pages);

/*
 * What the operations of a step read. A row b without a sequence has slot -1 and no tokens.
 */
typedef struct quern_step {
    size_t size;
    quern_tensor slots;     /* i32 [B]: where the sequence's state stands; without states its number */
    quern_tensor positions; /* i32 [B]: tokens before the step */
    quern_tensor cu;        /* i32 [B+1]: sequence b's tokens are rows cu[b] ... cu[b+1] - 1 of the call's */
    quern_tensor tables[QUERN_LEDGER_POOLS]; /* i32 [B, columns]; a column that the sequence's rows do not
                                              * need may hold any number. ndim 0: there is no such pool */
    /* i32 [C, 3]: pool, from, to: a page that is copied before the step writes; pool QUERN_LEDGER_STATES: the
     * state of a slot. Filled up with -1. The step writes no page that it copies from. */
    quern_tensor copies;
} quern_step;
#define QUERN_STEP_INIT QUERN_SIZED(quern_step)

/* Bytes of the block of a step of B sequences, 0 <= B <= S. */
QUERN_API quern_status quern_ledger_block_bytes(const quern_ledger *ledger, int64_t batch, size_t *bytes);
/* The tensors in a block, or in a device's copy of it. */
QUERN_API quern_status quern_ledger_step(const quern_ledger *ledger, int64_t batch, const void *block,
                                         quern_device device, int32_t device_id, quern_step *step);

/*
 * Begins a step of counts[b] >= 0 new tokens of each of B sequences, and fills `block` (i32, aligned).
 * sequences[b] is one of 0 ... S - 1, each at most once, or -1: none, and no tokens. Pages that the step
 * needs are taken from the pools. Refused, with QUERN_ERR_INVALID_ARGUMENT: ids and counts outside these;
 * more tokens than capacity or step, or than 2^31 - 1 in all; a pool with too few free pages, of which the
 * sentence says how many are missing; a step that has begun and not ended.
 */
QUERN_API quern_status quern_ledger_begin(quern_ledger *ledger, const int32_t *sequences,
                                          const int64_t *counts, int64_t batch, void *block, size_t bytes);
/* The sequences have the step's tokens. */
QUERN_API quern_status quern_ledger_commit(quern_ledger *ledger);
/* Ends a step whose operations have not run: the ledger is as before it. */
QUERN_API quern_status quern_ledger_abort(quern_ledger *ledger);
/* Fills `block` for calls that look again at the newest counts[b] tokens, which the sequences have already.
 * Begins no step. */
QUERN_API quern_status quern_ledger_newest(const quern_ledger *ledger, const int32_t *sequences,
                                           const int64_t *counts, int64_t batch, void *block, size_t bytes);

/* Tokens of a sequence, and how many of the last ones can be taken back. Either may be NULL. */
QUERN_API quern_status quern_ledger_length(const quern_ledger *ledger, int64_t sequence, int64_t *tokens,
                                           int64_t *held);
/* Takes back the last n tokens of a sequence. Pages that it then does not need are free. */
QUERN_API quern_status quern_ledger_rollback(quern_ledger *ledger, int64_t sequence, int64_t n);
/* Empties a sequence; its pages are free. */
QUERN_API quern_status quern_ledger_reset(quern_ledger *ledger, int64_t sequence);
/* Gives sequence `to`, whatever it held, the tokens of `from`. Both then hold the same pages and state. */
QUERN_API quern_status quern_ledger_fork(quern_ledger *ledger, int64_t from, int64_t to);

#ifdef __cplusplus
}
#endif
#endif
