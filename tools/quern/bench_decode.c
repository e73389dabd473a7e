/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_decode.c - nsa-decode and attention-decode: a step of a batch of sequences from a cache. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>

enum { PIECE = 1024, CALLS = 16 };

/* A filled cache and calls on it. Each call has different queries, so that the selected branch reads
 * different blocks. */
typedef struct decode_data {
    int64_t n, heads, kv_heads, dim, sequences, queries;
    bool sparse;
    quern_cache_params params;
    quern_cache *cache;
    quern_nsa_params nsa;
    quern_attention_params attention;
    void *memory, *rows, *workspace, *q_data, *o_data;
    int32_t *ids;
    int64_t *counts;
    quern_cache_batch batch;
    size_t bytes;
    int64_t call;
} decode_data;

/* Appends random tokens, the same to each sequence. */
static int fill(decode_data *d, quern_context *ctx)
{
    const int64_t shape[] = {PIECE, d->kv_heads, d->dim};
    const size_t row = (size_t)(d->kv_heads * d->dim) * quern_dtype_size(d->params.dtype);
    quern_tensor kv[2];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    quern_cache_batch one = {sizeof one, 1, NULL, NULL};
    size_t bytes = 0, needed;
    void *workspace = NULL, *data[] = {malloc(PIECE * row), malloc(PIECE * row)};
    int code =
        data[0] != NULL && data[1] != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for %d tokens", PIECE);
    t.k = &kv[0];
    t.v = &kv[1];
    for (int64_t at = 0; at < d->n && code == EXIT_DONE; at += PIECE) {
        const int64_t count = d->n - at < PIECE ? d->n - at : PIECE;
        for (int i = 0; i < 2; i++) {
            kv[i] = quern_tensor_contiguous(data[i], d->params.dtype, 3, shape);
            kv[i].shape[0] = count;
            fill_normal(&kv[i], (uint64_t)(2 * at + i + 1));
        }
        for (int32_t s = 0; s < d->sequences && code == EXIT_DONE; s++) {
            one.sequences = &s;
            one.counts = &count;
            quern_status status = quern_cache_append_workspace(ctx, d->cache, &one, &t, &needed);
            if (status == QUERN_OK && needed >= bytes) {
                free(workspace);
                workspace = malloc(bytes = needed + 1);
            }
            if (status == QUERN_OK)
                status = quern_cache_append(ctx, NULL, d->cache, &one, &t, workspace, bytes);
            if (status != QUERN_OK) code = fail_status(status);
        }
    }
    free(workspace), free(data[0]), free(data[1]);
    return code;
}

static quern_status call(decode_data *d, quern_context *ctx, bool size)
{
    const int64_t tokens = d->sequences * d->queries, shape[] = {tokens, d->heads, d->dim};
    const int64_t first =
        d->call++ % CALLS * tokens * d->heads * d->dim * (int64_t)quern_dtype_size(d->params.dtype);
    const quern_tensor q = quern_tensor_contiguous((char *)d->q_data + first, d->params.dtype, 3, shape);
    const quern_tensor out = quern_tensor_contiguous(d->o_data, d->params.dtype, 3, shape);
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &out;
    if (size)
        return d->sparse
                   ? quern_nsa_decode_workspace(ctx, &d->nsa, d->cache, &d->batch, &t, &d->bytes)
                   : quern_attention_decode_workspace(ctx, &d->attention, d->cache, &d->batch, &t, &d->bytes);
    return d->sparse ? quern_nsa_decode(ctx, NULL, &d->nsa, d->cache, &d->batch, &t, d->workspace, d->bytes)
                     : quern_attention_decode(ctx, NULL, &d->attention, d->cache, &d->batch, &t, d->workspace,
                                              d->bytes);
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

static int open_data(decode_data *d, quern_context *ctx)
{
    size_t memory, bytes;
    const int64_t tokens = d->sequences * d->queries * CALLS, page = d->params.page;
    if (page != 0) d->params.pages = d->sequences * ((d->params.capacity + page - 1) / page);
    quern_status status = quern_cache_size(&d->params, &memory, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    const int64_t shape[] = {tokens, d->heads, d->dim};
    const size_t row_bytes = (size_t)(tokens * d->heads * d->dim) * quern_dtype_size(d->params.dtype);
    d->memory = malloc(memory);
    d->rows = bench_allocate(bytes);
    d->q_data = malloc(row_bytes);
    d->o_data = malloc(row_bytes);
    d->ids = malloc((size_t)d->sequences * sizeof *d->ids);
    d->counts = malloc((size_t)d->sequences * sizeof *d->counts);
    if (d->memory == NULL || d->rows == NULL || d->q_data == NULL || d->o_data == NULL || d->ids == NULL ||
        d->counts == NULL)
        return fail(EXIT_MACHINE, "no memory for a cache of %zu bytes", bytes);
    for (int64_t i = 0; i < d->sequences; i++) {
        d->ids[i] = (int32_t)i;
        d->counts[i] = d->queries;
    }
    d->batch = (quern_cache_batch){sizeof d->batch, d->sequences, d->ids, d->counts};
    const quern_tensor q = quern_tensor_contiguous(d->q_data, d->params.dtype, 3, shape);
    fill_normal(&q, 99);
    if ((status = quern_cache_create(&d->params, d->memory, memory, d->rows, bytes, &d->cache)) != QUERN_OK)
        return fail_status(status);
    const int code = fill(d, ctx);
    if (code != EXIT_DONE) return code;
    if ((status = call(d, ctx, true)) != QUERN_OK) return fail_status(status);
    d->workspace = bench_allocate(d->bytes + 1);
    return d->workspace != NULL ? EXIT_DONE
                                : fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", d->bytes);
}

static void close_data(bench_run *r)
{
    decode_data *d = r->data;
    void *const all[] = {d->memory, d->rows, d->workspace, d->q_data, d->o_data, d->ids, d->counts};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(d);
}

static int run_step(bench_run *r, quern_context *ctx, double ms[2])
{
    const double start = now_ms();
    const quern_status status = call(r->data, ctx, false);
    ms[0] = now_ms() - start;
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
    formula_set(&r->symbols, "read", (double)keys_read(d));
    return open_data(d, ctx);
}
