/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_ledger.c - the bookkeeping of a step of one token of each sequence, between whose begin and commit an
 * engine runs its layers. The ledger is that of DeepSeek-V4's layers: a window's ring, entries and states. */
#include "bench.h"

#include "command.h"

#include <quern/ledger.h>

#include <stdlib.h>

enum { STEPS = 2001, WINDOW = 127 + QUERN_LEDGER_ROLLBACK_MOST, RATIO = 4, PAGE = 64 };

typedef struct books {
    void *memory, *block;
    int32_t *ids;
    int64_t *counts;
    double *ms;
} books;

static quern_status run_steps(books *k, const bench_case *c, int64_t batch)
{
    quern_ledger_params params = QUERN_LEDGER_PARAMS_INIT;
    quern_ledger *ledger;
    size_t bytes, block;
    params.sequences = batch;
    params.capacity = c->n + STEPS;
    params.rollback = QUERN_LEDGER_ROLLBACK_MOST;
    params.states = true;
    params.pools[0] = (quern_ledger_pool){.page = WINDOW + 1, .ring = WINDOW + 1};
    params.pools[1] = (quern_ledger_pool){.page = PAGE, .block = RATIO};
    quern_status status = quern_ledger_size(&params, &bytes);
    if (status != QUERN_OK) return status;
    k->memory = bench_allocate(bytes);
    if (k->memory == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    if ((status = quern_ledger_create(&params, k->memory, bytes, &ledger)) != QUERN_OK ||
        (status = quern_ledger_block_bytes(ledger, batch, &block)) != QUERN_OK)
        return status;
    k->block = bench_allocate(block);
    k->ids = malloc((size_t)batch * sizeof *k->ids);
    k->counts = malloc((size_t)batch * sizeof *k->counts);
    k->ms = malloc(STEPS * sizeof *k->ms);
    if (k->block == NULL || k->ids == NULL || k->counts == NULL || k->ms == NULL)
        return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t b = 0; b < batch; b++) {
        k->ids[b] = (int32_t)b;
        k->counts[b] = c->n;
    }
    for (int i = -1; i < STEPS && status == QUERN_OK; i++) { /* the first makes the context */
        const double start = now_ms();
        status = quern_ledger_begin(ledger, k->ids, k->counts, batch, k->block, block);
        if (status == QUERN_OK) status = quern_ledger_commit(ledger);
        if (i >= 0) k->ms[i] = now_ms() - start;
        for (int64_t b = 0; b < batch && i < 0; b++) k->counts[b] = 1;
    }
    return status;
}

int bench_ledger(const bench_case *c, quern_context *ctx, bench_results *to)
{
    books k = {NULL, NULL, NULL, NULL, NULL};
    const quern_status status = run_steps(&k, c, bench_extent_of(c, "batch"));
    if (status == QUERN_OK) {
        bench_result *row = bench_add(to, c, ctx, "begin+commit");
        row->measured.time = timing_of(k.ms, STEPS);
        report_row(to, row);
    }
    free(k.memory);
    free(k.block);
    free(k.ids);
    free(k.counts);
    free(k.ms);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
