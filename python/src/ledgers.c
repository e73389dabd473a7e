/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ledgers.c - the books of a layer of DeepSeek-V4 whose rows are on a GPU (quern/ledger.h), by their address.
 * Python keeps the memory, and the rows.
 *
 *   layer_ledger_size(fields) -> bytes of int64: of the books; pages of raw rows and rows of one; pages of
 *                                entries and entries of one; slots of states
 *   layer_ledger_create(fields, memory) -> int
 *   layer_ledger_block(ledger, batch) -> int, the bytes of a step's tensors
 *   layer_ledger_begin(ledger, sequences, counts, block), layer_ledger_newest(the same) -> bytes of int64:
 *                                where slots, positions, cu, the two tables and copies stand in the block,
 *                                and their two extents
 *   layer_ledger_commit(ledger); layer_ledger_abort(ledger)
 *   layer_ledger_length(ledger, sequence) -> bytes of two int64: tokens, those that can be taken back
 *   layer_ledger_rollback(ledger, sequence, n); layer_ledger_reset(ledger, sequence)
 *   layer_ledger_fork(ledger, from, to)
 *   layer_ledger_free(ledger) -> int, free pages of entries
 *
 * fields: as of layer_cache_create(). sequences: bytes of int32; counts: bytes of as many int64.
 */
#include "ffi.h"

#include <quern/dsv4_layer.h>
#include <quern/ledger.h>

static int refuse(void)
{
    return fail("TypeError", "a ledger and what this function takes are accepted");
}

static quern_ledger *ledger_of(const TVMFFIAny *args, int32_t count, int32_t numbers)
{
    bool taken = count >= numbers;
    for (int32_t i = 0; taken && i < numbers; i++) taken = is_int(&args[i]);
    if (taken && args[0].v_int64 != 0) return (quern_ledger *)(intptr_t)args[0].v_int64;
    (void)refuse();
    return NULL;
}

static int give_status(quern_status status, TVMFFIAny *result)
{
    return status == QUERN_OK ? give_nothing(result) : fail_as(status);
}

static quern_status params_of(const TVMFFIAny *a, quern_ledger_params *ledger, bool *read)
{
    quern_dsv4_layer_cache_params p;
    *ledger = (quern_ledger_params)QUERN_LEDGER_PARAMS_INIT;
    *read = read_layer_fields(a, &p);
    return *read ? quern_dsv4_layer_ledger_params(&p, ledger) : QUERN_OK;
}

FUNCTION(layer_ledger_size)
{
    (void)self;
    quern_ledger_params p;
    size_t bytes = 0;
    bool read = false;
    int64_t pages[3] = {0};
    static const int64_t pools[] = {QUERN_DSV4_RAW, QUERN_DSV4_ENTRIES, QUERN_LEDGER_STATES};
    quern_status status = count == 1 ? params_of(&args[0], &p, &read) : QUERN_OK;
    if (!read) return refuse();
    if (status == QUERN_OK) status = quern_ledger_size(&p, &bytes);
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        if (i == 0 || p.pools[QUERN_DSV4_ENTRIES].page > 0)
            status = quern_ledger_pages(&p, pools[i], 0, NULL, &pages[i]);
    if (status != QUERN_OK) return fail_as(status);
    const int64_t sizes[] = {
        (int64_t)bytes, pages[0], p.pools[QUERN_DSV4_RAW].page, pages[1], p.pools[QUERN_DSV4_ENTRIES].page,
        pages[2]};
    return give_bytes(sizes, sizeof sizes, result);
}

FUNCTION(layer_ledger_create)
{
    (void)self;
    quern_ledger_params p;
    quern_ledger *ledger = NULL;
    void *memory;
    size_t bytes;
    bool read = false;
    quern_status status = count == 2 ? params_of(&args[0], &p, &read) : QUERN_OK;
    if (!read) return refuse();
    if (status != QUERN_OK) return fail_as(status);
    if (read_memory(&args[1], &memory, &bytes) != 0) return -1;
    status = quern_ledger_create(&p, memory, bytes, &ledger);
    return status == QUERN_OK ? give_int((intptr_t)ledger, result) : fail_as(status);
}

FUNCTION(layer_ledger_block)
{
    (void)self;
    size_t bytes = 0;
    const quern_ledger *ledger = ledger_of(args, count, 2);
    if (ledger == NULL) return -1;
    const quern_status status = quern_ledger_block_bytes(ledger, args[1].v_int64, &bytes);
    return status == QUERN_OK ? give_int((int64_t)bytes, result) : fail_as(status);
}

/* ---- steps ---- */

typedef quern_status fill_block(const quern_ledger *ledger, const batch_lists *lists, void *block,
                                size_t bytes);

static quern_status begin_step(const quern_ledger *ledger, const batch_lists *lists, void *block,
                               size_t bytes)
{
    return quern_ledger_begin((quern_ledger *)(uintptr_t)ledger, lists->sequences, lists->counts,
                              lists->batch, block, bytes);
}

static quern_status look_again(const quern_ledger *ledger, const batch_lists *lists, void *block,
                               size_t bytes)
{
    return quern_ledger_newest(ledger, lists->sequences, lists->counts, lists->batch, block, bytes);
}

enum { STEP_TENSORS = 6 };

static int give_block(const TVMFFIAny *args, int32_t count, fill_block *fill_it, TVMFFIAny *result)
{
    quern_ledger *ledger = ledger_of(args, count, 1);
    batch_lists lists;
    void *block;
    size_t bytes;
    quern_step step = QUERN_STEP_INIT;
    if (ledger == NULL) return -1;
    if (count != 4 || !read_lists(&args[1], &lists)) return refuse();
    if (read_memory(&args[3], &block, &bytes) != 0) return -1;
    quern_status status = fill_it(ledger, &lists, block, bytes);
    if (status != QUERN_OK) return fail_as(status);
    status = quern_ledger_step(ledger, lists.batch, block, QUERN_CPU, 0, &step);
    if (status != QUERN_OK) return fail_as(status);
    const quern_tensor *const all[STEP_TENSORS] = {
        &step.slots,
        &step.positions,
        &step.cu,
        &step.tables[QUERN_DSV4_RAW],
        &step.tables[QUERN_DSV4_ENTRIES],
        &step.copies,
    };
    int64_t rows[STEP_TENSORS][3] = {{0}};
    for (int i = 0; i < STEP_TENSORS; i++) {
        if (all[i]->ndim == 0) continue;
        rows[i][0] = (const char *)all[i]->data - (const char *)block;
        rows[i][1] = all[i]->shape[0];
        rows[i][2] = all[i]->ndim > 1 ? all[i]->shape[1] : 1;
    }
    return give_bytes(rows, sizeof rows, result);
}

FUNCTION(layer_ledger_begin)
{
    (void)self;
    return give_block(args, count, begin_step, result);
}

FUNCTION(layer_ledger_newest)
{
    (void)self;
    return give_block(args, count, look_again, result);
}

FUNCTION(layer_ledger_commit)
{
    (void)self;
    quern_ledger *ledger = ledger_of(args, count, 1);
    return ledger == NULL ? -1 : give_status(quern_ledger_commit(ledger), result);
}

FUNCTION(layer_ledger_abort)
{
    (void)self;
    quern_ledger *ledger = ledger_of(args, count, 1);
    return ledger == NULL ? -1 : give_status(quern_ledger_abort(ledger), result);
}

/* ---- sequences ---- */

FUNCTION(layer_ledger_length)
{
    (void)self;
    int64_t length[2];
    const quern_ledger *ledger = ledger_of(args, count, 2);
    if (ledger == NULL) return -1;
    const quern_status status = quern_ledger_length(ledger, args[1].v_int64, &length[0], &length[1]);
    return status == QUERN_OK ? give_bytes(length, sizeof length, result) : fail_as(status);
}

FUNCTION(layer_ledger_rollback)
{
    (void)self;
    quern_ledger *ledger = ledger_of(args, count, 3);
    return ledger == NULL
               ? -1
               : give_status(quern_ledger_rollback(ledger, args[1].v_int64, args[2].v_int64), result);
}

FUNCTION(layer_ledger_reset)
{
    (void)self;
    quern_ledger *ledger = ledger_of(args, count, 2);
    return ledger == NULL ? -1 : give_status(quern_ledger_reset(ledger, args[1].v_int64), result);
}

FUNCTION(layer_ledger_fork)
{
    (void)self;
    quern_ledger *ledger = ledger_of(args, count, 3);
    return ledger == NULL ? -1
                          : give_status(quern_ledger_fork(ledger, args[1].v_int64, args[2].v_int64), result);
}

FUNCTION(layer_ledger_free)
{
    (void)self;
    int64_t pages = 0;
    const quern_ledger *ledger = ledger_of(args, count, 1);
    if (ledger == NULL) return -1;
    const quern_status status = quern_ledger_free_pages(ledger, QUERN_DSV4_ENTRIES, &pages);
    return status == QUERN_OK ? give_int(pages, result) : fail_as(status);
}
