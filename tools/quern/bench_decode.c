/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_decode.c - `quern bench nsa-decode` and `attention-decode`: a step of a batch of sequences from a
 * cache that is larger than the machine's own. Calls and the read ceiling take turns; the fraction is the
 * median of the rounds'. */
#include "bench_decode.h"

#include "bench.h"
#include "command.h"
#include "machine.h"
#include "output.h"
#include "values.h"

#include <quern/cache.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, LENGTHS_MAX = 16, PIECE = 1024, QUERIES = 16 };

typedef struct decode_bench {
    const char *n, *threads, *heads, *json;
    int64_t dim, sequences, queries, page, window, block_size, stride, num_selected, rounds;
    int dtype;
    bool sparse;
} decode_bench;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL};
#define AT(member) offsetof(decode_bench, member)
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "tokens of a sequence, such as 4k,32k"},
    {"heads", OPTION_TEXT, AT(heads), NULL, "H/Hkv"},
    {"dim", OPTION_INT, AT(dim), NULL, "D and Dv"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of the rows"},
    {"sequences", OPTION_INT, AT(sequences), NULL, "sequences of a step"},
    {"queries", OPTION_INT, AT(queries), NULL, "newest tokens of each that are attended, 1 to 16"},
    {"page", OPTION_INT, AT(page), NULL, "tokens of a page: 64; 0: a contiguous cache"},
    {"window", OPTION_INT, AT(window), NULL, "W; attention-decode: 0 is none"},
    {"block-size", OPTION_INT, AT(block_size), NULL, "nsa-decode: l, and l'"},
    {"stride", OPTION_INT, AT(stride), NULL, "nsa-decode: d; 0: l"},
    {"num-selected", OPTION_INT, AT(num_selected), NULL, "nsa-decode: k"},
    {"rounds", OPTION_INT, AT(rounds), NULL, "in which calls and ceiling take turns, at most 101"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
};
#undef AT

/* A filled cache and calls on it. Each call has different queries, so that the selected branch reads
 * different blocks. */
typedef struct decode_data {
    const decode_bench *o;
    int64_t n, heads, kv_heads;
    quern_cache_params params;
    quern_cache *cache;
    quern_nsa_params nsa;
    quern_attention_params attention;
    void *memory, *rows, *workspace, *q_data, *o_data;
    int32_t *ids, *table;
    int64_t *counts;
    quern_cache_batch batch;
    size_t bytes;
    int64_t call;
} decode_data;

/* Appends random tokens, the same to each sequence. */
static int fill(decode_data *d, quern_context *ctx)
{
    const int64_t shape[] = {PIECE, d->kv_heads, d->o->dim};
    const size_t row = (size_t)(d->kv_heads * d->o->dim) * quern_dtype_size(d->params.dtype);
    quern_tensor kv[2];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    quern_cache_batch one = {sizeof one, 1, NULL, NULL, d->table};
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
        for (int32_t s = 0; s < d->o->sequences && code == EXIT_DONE; s++) {
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
    const decode_bench *o = d->o;
    const int64_t tokens = o->sequences * o->queries, shape[] = {tokens, d->heads, o->dim};
    const int64_t first =
        d->call++ % QUERIES * tokens * d->heads * o->dim * (int64_t)quern_dtype_size(d->params.dtype);
    const quern_tensor q = quern_tensor_contiguous((char *)d->q_data + first, d->params.dtype, 3, shape);
    const quern_tensor out = quern_tensor_contiguous(d->o_data, d->params.dtype, 3, shape);
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &out;
    if (size)
        return o->sparse
                   ? quern_nsa_decode_workspace(ctx, &d->nsa, d->cache, &d->batch, &t, &d->bytes)
                   : quern_attention_decode_workspace(ctx, &d->attention, d->cache, &d->batch, &t, &d->bytes);
    return o->sparse ? quern_nsa_decode(ctx, NULL, &d->nsa, d->cache, &d->batch, &t, d->workspace, d->bytes)
                     : quern_attention_decode(ctx, NULL, &d->attention, d->cache, &d->batch, &t, d->workspace,
                                              d->bytes);
}

static void set_params(decode_data *d)
{
    const decode_bench *o = d->o;
    d->params = (quern_cache_params)QUERN_CACHE_PARAMS_INIT;
    d->params.dtype = (quern_dtype)o->dtype;
    d->params.sequences = o->sequences;
    d->params.kv_heads = d->kv_heads;
    d->params.dim = d->params.dim_v = o->dim;
    d->params.capacity = d->n;
    d->params.page = o->page;
    d->params.pages = 1;
    d->params.block_size = o->sparse ? o->block_size : 0;
    d->params.stride = o->stride;
    d->attention = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    d->attention.window = o->window;
    d->nsa = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    d->nsa.block_size = d->nsa.select_block = o->block_size;
    d->nsa.stride = o->stride;
    d->nsa.num_selected = o->num_selected;
    d->nsa.window = o->window;
}

static int open_data(decode_data *d, const decode_bench *o, int64_t n, quern_context *ctx)
{
    memset(d, 0, sizeof *d);
    d->o = o;
    d->n = n;
    if (!parse_pair(o->heads, &d->heads, &d->kv_heads))
        return fail(EXIT_USAGE, "--heads '%s': H/Hkv is accepted", o->heads);
    set_params(d);
    quern_cache_columns columns = QUERN_CACHE_COLUMNS_INIT;
    size_t memory, bytes;
    quern_status status = quern_cache_columns_of(&d->params, &columns);
    if (status != QUERN_OK) return fail_status(status);
    const int64_t cells = o->sequences * columns.columns, tokens = o->sequences * o->queries * QUERIES;
    if (o->page != 0) d->params.pages = cells;
    if ((status = quern_cache_size(&d->params, &memory, &bytes)) != QUERN_OK) return fail_status(status);
    const int64_t shape[] = {tokens, d->heads, o->dim};
    d->memory = malloc(memory);
    d->rows = bench_allocate(bytes);
    d->q_data = malloc((size_t)(tokens * d->heads * o->dim) * quern_dtype_size(d->params.dtype));
    d->o_data = malloc((size_t)(tokens * d->heads * o->dim) * quern_dtype_size(d->params.dtype));
    d->ids = malloc((size_t)o->sequences * sizeof *d->ids);
    d->counts = malloc((size_t)o->sequences * sizeof *d->counts);
    d->table = o->page != 0 ? malloc((size_t)cells * sizeof *d->table) : NULL;
    if (d->memory == NULL || d->rows == NULL || d->q_data == NULL || d->o_data == NULL || d->ids == NULL ||
        d->counts == NULL || (o->page != 0 && d->table == NULL))
        return fail(EXIT_MACHINE, "no memory for a cache of %zu bytes", bytes);
    for (int64_t i = 0; i < cells && o->page != 0; i++)
        d->table[i] = (int32_t)(i * 7919 % cells); /* pages as a busy server has them */
    for (int64_t i = 0; i < o->sequences; i++) {
        d->ids[i] = (int32_t)i;
        d->counts[i] = o->queries;
    }
    d->batch = (quern_cache_batch){sizeof d->batch, o->sequences, d->ids, d->counts, d->table};
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

static void close_data(decode_data *d)
{
    void *const all[] = {d->memory, d->rows, d->workspace, d->q_data, d->o_data, d->ids, d->counts, d->table};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

/* Bytes of keys and values that a step must read: the last query's, as its neighbours see nearly the same. */
static double bytes_of(const decode_data *d)
{
    const decode_bench *o = d->o;
    const int64_t window = o->window > 0 && o->window < d->n ? o->window : d->n;
    int64_t read = window;
    if (o->sparse) {
        const int64_t chosen = o->num_selected * o->block_size;
        read += quern_nsa_entries(&d->nsa, d->n) + o->queries * (chosen < d->n ? chosen : d->n);
    }
    return (double)(read * o->sequences * d->kv_heads * 2 * o->dim) *
           (double)quern_dtype_size(d->params.dtype);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* Calls for about a tenth of a second, in turns with the ceiling. */
static int measure(decode_data *d, int rounds, quern_context *ctx, measurement *out)
{
    double ms[BENCH_REPS_MAX], fraction[BENCH_REPS_MAX], rate[BENCH_REPS_MAX];
    for (int i = -1; i < rounds; i++) {
        int runs = 0;
        const double start = now_ms();
        do {
            const quern_status status = call(d, ctx, false);
            if (status != QUERN_OK) return fail_status(status);
            runs++;
        } while (now_ms() - start < 100);
        if (i < 0) continue;
        ms[i] = (now_ms() - start) / runs;
        rate[i] = ceiling_measure(CEILING_READ, quern_context_threads(ctx));
        fraction[i] = bytes_of(d) / ms[i] * 1e-6 / rate[i];
    }
    *out = (measurement){
        .time = timing_of(ms, rounds), .fraction = median(fraction, rounds), .ceiling = median(rate, rounds)};
    return EXIT_DONE;
}

static void report(const decode_data *d, const char *op, const measurement *m, int threads, json_t *list)
{
    const decode_bench *o = d->o;
    const double rate = bytes_of(d) / m->time.median * 1e-6;
    printf("%-16s N %8" PRId64 " x %3" PRId64
           "  threads %2d  %9.3f ms (p10 %.3f, p90 %.3f)  %7.1f GB/s  %5.3f of %s %.1f\n",
           op, d->n, o->sequences, threads, m->time.median, m->time.p10, m->time.p90, rate, m->fraction,
           ceiling_name(CEILING_READ), m->ceiling);
    json_t *shape =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "n", (json_int_t)d->n, "sequences",
                  (json_int_t)o->sequences, "queries", (json_int_t)o->queries, "heads", (json_int_t)d->heads,
                  "kv_heads", (json_int_t)d->kv_heads, "dim", (json_int_t)o->dim, "page", (json_int_t)o->page,
                  "window", (json_int_t)o->window);
    json_array_append_new(
        list, json_pack("{s:s, s:o, s:s, s:i, s:i, s:f, s:f, s:f, s:f, s:s, s:f, s:s}", "op", op, "shape",
                        shape, "dtype", dtype_choices[o->dtype], "threads", threads, "reps", m->time.reps,
                        "ms_median", m->time.median, "ms_p10", m->time.p10, "ms_p90", m->time.p90, "gbps",
                        rate, "ceiling", ceiling_name(CEILING_READ), "fraction", m->fraction, "formula",
                        "keys and values that the queries must see"));
}

static int bench(const decode_bench *o, const char *subject)
{
    int64_t lengths[LENGTHS_MAX], threads[4];
    const int length_count = parse_integers(o->n, 1, INT32_MAX, lengths, LENGTHS_MAX),
              thread_count = parse_integers(o->threads, 0, 1024, threads, 4);
    if (length_count < 0 || thread_count < 0 || o->sequences < 1 || o->queries < 1 || o->queries > QUERIES ||
        o->rounds < 1 || o->rounds > BENCH_REPS_MAX)
        return fail(EXIT_USAGE,
                    "--n '%s' --threads '%s' --sequences %" PRId64 " --queries %" PRId64 " --rounds %" PRId64
                    ": lists such as 4k,32k and 1,2, 1 or more sequences, 1 to %d queries and 1 to %d rounds "
                    "are accepted",
                    o->n, o->threads, o->sequences, o->queries, o->rounds, QUERIES, BENCH_REPS_MAX);
    json_t *list = json_array();
    quern_context *ctx = NULL;
    int code = output_check(o->json);
    for (int i = 0; i < thread_count * length_count && code == EXIT_DONE; i++) {
        decode_data d;
        measurement m = {.fraction = 0};
        quern_context_destroy(ctx);
        ctx = NULL;
        if ((code = open_context(&(machine_options){.threads = threads[i / length_count]}, &ctx)) !=
            EXIT_DONE)
            break;
        code = open_data(&d, o, lengths[i % length_count], ctx);
        if (code == EXIT_DONE) code = measure(&d, (int)o->rounds, ctx, &m);
        if (code == EXIT_DONE) report(&d, subject, &m, quern_context_threads(ctx), list);
        close_data(&d);
    }
    if (code == EXIT_DONE && o->json != NULL) code = report_results(o->json, ctx, list);
    json_decref(list);
    quern_context_destroy(ctx);
    return code;
}

static decode_bench defaults_of(bool sparse)
{
    decode_bench o = {.n = "32k",
                      .threads = "0",
                      .heads = "32/8",
                      .dim = 128,
                      .dtype = QUERN_BF16,
                      .sequences = 8,
                      .queries = 1,
                      .rounds = ROUNDS};
    o.block_size = 64;
    o.num_selected = 16;
    o.window = sparse ? 512 : 0;
    o.sparse = sparse;
    return o;
}

int bench_decode(int argc, char **argv, const char *subject)
{
    decode_bench o = defaults_of(strcmp(subject, "nsa-decode") == 0);
    const option_group groups[] = {{rows, sizeof rows / sizeof *rows, &o}};
    bool help;
    const int code = scenario_options(
        argc, argv, groups,
        "usage: quern bench nsa-decode|attention-decode [--key value ...]\n\n"
        "A step of a batch of sequences from a cache, as a fraction of the read bandwidth that is "
        "measured in turns with it:\n"
        "of the keys and values that the queries must see.\n\noptions:\n",
        &help);
    if (code != EXIT_DONE || help) return code;
    return bench(&o, subject);
}
