/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_decode.c - nsa-decode and attention-decode: a step of a batch of sequences from pools of random
 * rows. */
#include "bench.h"

#include "books.h"
#include "command.h"
#include "device.h"
#include "values.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>

enum { RANDOM_MOST = 1 << 22, CALLS = 16, TOKENS = 0, ENTRIES, POOLS };

/* Filled pools and calls on them. Each call has different queries, so that the selected branch reads
 * different blocks. */
typedef struct decode_data {
    int64_t n, heads, kv_heads, dim, sequences, queries;
    bool sparse;
    int device;
    quern_cache_params params;
    quern_nsa_params nsa;
    quern_attention_params attention;
    books books; /* of the newest tokens */
    quern_tensor pool[POOLS], q, o;
    void *workspace;
    int32_t *ids;
    int64_t *counts;
    size_t bytes;
    int64_t call;
    device_clock clock;
} decode_data;

/* A tensor of random values, of which a large one repeats those before. */
static quern_status make(const decode_data *d, quern_tensor *to, int32_t ndim, const int64_t *shape)
{
    size_t bytes;
    if (!job_bytes(d->params.dtype, ndim, shape, &bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    const size_t size = quern_dtype_size(d->params.dtype),
                 most = bytes < RANDOM_MOST * size ? bytes : RANDOM_MOST * size;
    const int64_t count = (int64_t)(most / size);
    void *host = malloc(most + 1);
    *to = device_tensor(d->device, device_take(d->device, bytes + 1), d->params.dtype, ndim, shape);
    quern_status status = host != NULL && to->data != NULL ? QUERN_OK : QUERN_ERR_OUT_OF_MEMORY;
    const quern_tensor part = quern_tensor_contiguous(host, d->params.dtype, 1, &count);
    if (status == QUERN_OK) fill_normal(&part, 99 + (uint64_t)bytes);
    for (size_t at = 0; at < bytes && status == QUERN_OK; at += most)
        status =
            device_copy(d->device, (char *)to->data + at, host, bytes - at < most ? bytes - at : most);
    free(host);
    return status;
}

/* Sequences of n tokens, whose newest ones are the queries. */
static quern_status make_books(decode_data *d)
{
    quern_ledger_params ledger = QUERN_LEDGER_PARAMS_INIT;
    quern_status status = quern_cache_ledger_params(&d->params, &ledger);
    if (status == QUERN_OK) status = books_open(&d->books, &ledger, d->sequences, d->device);
    for (int64_t i = 0; i < d->sequences; i++) {
        d->ids[i] = (int32_t)i;
        d->counts[i] = d->n;
    }
    if (status == QUERN_OK) status = books_begin(&d->books, d->ids, d->counts, d->sequences);
    if (status == QUERN_OK) status = quern_ledger_commit(d->books.ledger);
    for (int64_t i = 0; i < d->sequences; i++) d->counts[i] = d->queries;
    return status == QUERN_OK ? books_newest(&d->books, d->ids, d->counts, d->sequences) : status;
}

static quern_status call(decode_data *d, quern_context *ctx, bool size)
{
    const int64_t tokens = d->sequences * d->queries, shape[] = {tokens, d->heads, d->dim};
    const int64_t first =
        d->call++ % CALLS * tokens * d->heads * d->dim * (int64_t)quern_dtype_size(d->params.dtype);
    const quern_tensor q = device_tensor(d->device, (char *)d->q.data + first, d->params.dtype, 3, shape);
    const quern_step *step = &d->books.step;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &d->o;
    t.slots = &step->slots;
    t.positions = &step->positions;
    t.cu = &step->cu;
    t.tokens = &d->pool[TOKENS];
    t.tokens_table = &step->tables[QUERN_CACHE_TOKENS];
    if (d->sparse) t.entries = &d->pool[ENTRIES], t.entries_table = &step->tables[QUERN_CACHE_ENTRIES];
    if (size)
        return d->sparse ? quern_nsa_decode_step_workspace(ctx, &d->nsa, &t, &d->bytes)
                         : quern_attention_decode_step_workspace(ctx, &d->attention, &t, &d->bytes);
    return d->sparse ? quern_nsa_decode_step(ctx, NULL, &d->nsa, &t, d->workspace, d->bytes)
                     : quern_attention_decode_step(ctx, NULL, &d->attention, &t, d->workspace, d->bytes);
}

static void set_params(decode_data *d, const bench_case *c)
{
    d->n = c->n;
    d->sparse = strcmp(c->subject->name, "nsa-decode") == 0;
    d->heads = c->heads;
    d->kv_heads = c->kv_heads;
    d->dim = bench_extent_of(c, "dim");
    d->sequences = bench_extent_of(c, "sequences");
    d->queries = bench_extent_of(c, "queries");
    d->params = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    d->params.dtype = (quern_dtype)c->dtype;
    d->params.sequences = d->sequences;
    d->params.kv_heads = d->kv_heads;
    d->params.dim = d->params.dim_v = d->dim;
    d->params.capacity = d->n;
    d->params.page = bench_extent_of(c, "page");
    d->params.pages = 1;
    d->params.block_size = d->sparse ? bench_extent_of(c, "block-size") : 0;
    d->params.stride = bench_extent_of(c, "stride");
    d->attention = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    d->attention.window = bench_extent_of(c, "window");
    d->nsa = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    d->nsa.block_size = d->nsa.select_block = bench_extent_of(c, "block-size");
    d->nsa.stride = d->params.stride;
    d->nsa.num_selected = bench_extent_of(c, "num-selected");
    d->nsa.window = d->attention.window;
}

/* Keys of a sequence that a step must read: the last query's window, as its neighbours see nearly the same,
 * and each query's blocks. */
static int64_t keys_read(const decode_data *d)
{
    const int64_t window = d->nsa.window > 0 && d->nsa.window < d->n ? d->nsa.window : d->n,
                  chosen = d->nsa.num_selected * d->nsa.block_size;
    if (!d->sparse) return window;
    return window + quern_nsa_entries(&d->nsa, d->n) + d->queries * (chosen < d->n ? chosen : d->n);
}

static quern_status open_data(decode_data *d, quern_context *ctx)
{
    const int64_t tokens = d->sequences * d->queries, page = d->params.page,
                  width = QUERN_CACHE_PAGE * 2 * d->dim;
    if (page != 0) d->params.pages = d->sequences * ((d->params.capacity + page - 1) / page);
    d->ids = malloc((size_t)d->sequences * sizeof *d->ids);
    d->counts = malloc((size_t)d->sequences * sizeof *d->counts);
    if (d->ids == NULL || d->counts == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    quern_status status = make_books(d);
    for (int i = 0; i < (d->sparse ? POOLS : 1) && status == QUERN_OK; i++) {
        const int64_t shape[] = {books_pages(&d->books, i), d->kv_heads, width};
        status = make(d, &d->pool[i], 3, shape);
    }
    const int64_t all[] = {tokens * CALLS, d->heads, d->dim}, one[] = {tokens, d->heads, d->dim};
    if (status == QUERN_OK) status = make(d, &d->q, 3, all);
    if (status == QUERN_OK) status = make(d, &d->o, 3, one);
    if (status == QUERN_OK) status = call(d, ctx, true);
    if (status == QUERN_OK && (d->workspace = device_take(d->device, d->bytes + 1)) == NULL)
        status = QUERN_ERR_OUT_OF_MEMORY;
    return status == QUERN_OK ? device_clock_open(&d->clock, d->device) : status;
}

static void close_data(bench_run *r)
{
    decode_data *d = r->data;
    void *const all[] = {d->pool[TOKENS].data, d->pool[ENTRIES].data, d->q.data, d->o.data, d->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) device_free(d->device, all[i]);
    books_close(&d->books);
    device_clock_close(&d->clock);
    free(d->ids), free(d->counts);
    free(d);
}

static int run_step(bench_run *r, quern_context *ctx, double ms[2])
{
    decode_data *d = r->data;
    quern_status status = device_clock_start(&d->clock);
    if (status == QUERN_OK) status = call(d, ctx, false);
    if (status == QUERN_OK) status = device_clock_stop(&d->clock, &ms[0]);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

int bench_open_decode(bench_run *r, quern_context *ctx)
{
    decode_data *d = need_memory(sizeof *d);
    memset(d, 0, sizeof *d);
    r->data = d;
    r->once = run_step;
    r->close = close_data;
    set_params(d, r->what);
    d->device = r->what->device;
    formula_set(&r->symbols, "read", (double)keys_read(d));
    const quern_status status = open_data(d, ctx);
    if (status == QUERN_ERR_OUT_OF_MEMORY) return fail(EXIT_MACHINE, "no memory for the caches");
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
