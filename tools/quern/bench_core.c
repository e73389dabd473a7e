/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_core.c - `quern bench v4-index` and `v4-attention`: DeepSeek-V4's indexer and attention core on the
 * last queries of a sequence. Kernel and ceiling take turns; the fraction is the median of the rounds'. */
#include "bench_core.h"

#include "bench.h"
#include "command.h"
#include "machine.h"
#include "output.h"
#include "row_cache.h"
#include "values.h"

#include <quern/dsv4.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS = 9, LENGTHS_MAX = 16, MEMORY = 16, WINDOW_ROPE = 64 };

typedef struct core_bench {
    const char *n, *threads, *json;
    int64_t batch, queries, heads, width, top_k, ratio, window, rounds, page;
    int dtype, format;
    bool attention, backward;
} core_bench;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL};
#define AT(member) offsetof(core_bench, member)
static const option_row rows[] = {
    {"n", OPTION_TEXT, AT(n), NULL, "tokens of the context, such as 16k,64k"},
    {"batch", OPTION_INT, AT(batch), NULL, "sequences"},
    {"queries", OPTION_INT, AT(queries), NULL, "its last tokens, which ask; 0: all"},
    {"heads", OPTION_INT, AT(heads), NULL, "query heads"},
    {"width", OPTION_INT, AT(width), NULL, "channels of a head"},
    {"top-k", OPTION_INT, AT(top_k), NULL, "entries selected; v4-attention: 0 attends all"},
    {"ratio", OPTION_INT, AT(ratio), NULL, "tokens of an entry"},
    {"window", OPTION_INT, AT(window), NULL, "v4-attention: raw keys of a query"},
    {"backward", OPTION_FLAG, AT(backward), NULL, "v4-attention: the backward pass as well"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of queries and keys"},
    {"format", OPTION_CHOICE, AT(format), row_cache_all,
     "of a cache that holds raw rows and entries (f32, bf16, row584) or the indexer's keys (all but row584); "
     "input: their own"},
    {"page", OPTION_INT, AT(page), NULL, "slots of the cache's pages; 0: contiguous"},
    {"rounds", OPTION_INT, AT(rounds), NULL, "in which kernel and ceiling take turns, at most 101"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
};
#undef AT

/* A pass: its operation and its least work. */
typedef struct core_pass {
    const char *op, *formula;
    bool backward;
    double flops;
} core_pass;

/* A call on random data. */
typedef struct core_data {
    const core_bench *o;
    int64_t n, queries, entries;
    quern_dsv4_index_params index;
    quern_dsv4_index_tensors index_tensors;
    quern_dsv4_attention_params core;
    quern_dsv4_attention_tensors core_tensors;
    quern_tensor t[MEMORY];
    row_cache cache[2];
    void *memory[MEMORY], *workspace;
    int used;
    size_t bytes;
} core_data;

/* Makes the next tensor of the data, contiguous; NULL without memory. */
static const quern_tensor *make(core_data *d, quern_dtype dtype, int32_t ndim, const int64_t *shape,
                                bool random)
{
    int64_t count = 1;
    for (int32_t k = 0; k < ndim; k++) count *= shape[k];
    quern_tensor *t = &d->t[d->used];
    void *memory = bench_allocate((size_t)count * quern_dtype_size(dtype) + 1);
    *t = quern_tensor_contiguous(memory, dtype, ndim, shape);
    if (memory != NULL && random) fill_normal(t, (uint64_t)d->used + 1);
    d->memory[d->used++] = memory;
    return memory != NULL ? t : NULL;
}

static void close_data(core_data *d)
{
    for (int i = 0; i < d->used; i++) free(d->memory[i]);
    for (int i = 0; i < 2; i++) row_cache_free(&d->cache[i]);
    free(d->workspace);
}

static quern_status open_index(core_data *d)
{
    const core_bench *o = d->o;
    const quern_dtype dtype = (quern_dtype)o->dtype;
    d->index = (quern_dsv4_index_params)QUERN_DSV4_INDEX_PARAMS_INIT;
    d->index.ratio = o->ratio;
    d->index.top_k = o->top_k;
    d->index.start_abs_pos = d->n - d->queries;
    quern_dsv4_index_tensors *t = &d->index_tensors;
    *t = (quern_dsv4_index_tensors)QUERN_DSV4_INDEX_TENSORS_INIT;
    const int64_t q[] = {o->batch, d->queries, o->heads, o->width}, k[] = {o->batch, d->entries, o->width},
                  idx[] = {o->batch, d->queries, o->top_k};
    t->q = make(d, dtype, 4, q, true);
    t->k = make(d, dtype, 3, k, true);
    t->w = make(d, QUERN_F32, 3, q, true);
    t->idx = make(d, QUERN_I32, 3, idx, false);
    t->count = make(d, QUERN_I32, 2, idx, false);
    return t->q != NULL && t->k != NULL && t->w != NULL && t->idx != NULL && t->count != NULL
               ? QUERN_OK
               : QUERN_ERR_OUT_OF_MEMORY;
}

/* Chooses random entries, spread over all that a query sees. */
static void fill_lists(const core_data *d, const quern_tensor *idx)
{
    uint64_t state = 1;
    for (int64_t row = 0; row < d->o->batch * d->queries; row++) {
        const int64_t seen = (d->n - d->queries + row % d->queries + 1) / d->o->ratio, k = d->o->top_k;
        for (int64_t i = 0; i < k; i++) {
            const int64_t low = i * seen / k, end = (i + 1) * seen / k;
            state = state * 6364136223846793005u + 1442695040888963407u;
            ((int32_t *)idx->data)[row * k + i] = seen <= k
                                                      ? (int32_t)(i < seen ? i : -1)
                                                      : (int32_t)(low + (int64_t)(state >> 33) % (end - low));
        }
    }
}

/* The indexer's keys go through a cache. */
static int use_key_cache(core_data *d, quern_context *ctx)
{
    const core_bench *o = d->o;
    const int code = row_cache_make(ctx, d->index_tensors.k, 0, o->format, o->page, &d->cache[0]);
    if (code != EXIT_DONE) return code;
    d->index.key_format = row_cache_format(o->format);
    d->index.page = o->page;
    d->index_tensors.k = &d->cache[0].rows;
    if (o->page > 0) d->index_tensors.k_table = &d->cache[0].table;
    return EXIT_DONE;
}

/* Raw rows and entries go through caches. */
static int use_caches(core_data *d, quern_context *ctx)
{
    const core_bench *o = d->o;
    if (!o->attention) return use_key_cache(d, ctx);
    quern_dsv4_attention_tensors *t = &d->core_tensors;
    const quern_tensor **from[] = {&t->kv, &t->kv_cmp}, **tables[] = {&t->kv_table, &t->kv_cmp_table};
    d->core.format = row_cache_format(o->format);
    d->core.page = o->page;
    for (int i = 0; i < 2; i++) {
        const int64_t first = i == 0 ? d->n - t->kv->shape[1] : 0;
        const int code = row_cache_make(ctx, *from[i], first, o->format, o->page, &d->cache[i]);
        if (code != EXIT_DONE) return code;
        *from[i] = &d->cache[i].rows;
        if (o->page > 0) *tables[i] = &d->cache[i].table;
    }
    return EXIT_DONE;
}

static bool has_caches(const core_bench *o)
{
    return o->page != 0 || o->format != ROW_CACHE_INPUT;
}

static quern_status open_attention(core_data *d)
{
    const core_bench *o = d->o;
    const quern_dtype dtype = (quern_dtype)o->dtype;
    const int64_t raw = d->queries + o->window - 1 < d->n ? d->queries + o->window - 1 : d->n;
    const int64_t q[] = {o->batch, d->queries, o->heads, o->width}, kv[] = {o->batch, raw, o->width},
                  cmp[] = {o->batch, d->entries, o->width};
    const int64_t lse[] = {o->batch, o->heads, d->queries}, idx[] = {o->batch, d->queries, o->top_k},
                  table[] = {d->n, WINDOW_ROPE < o->width ? WINDOW_ROPE : o->width};
    d->core = (quern_dsv4_attention_params)QUERN_DSV4_ATTENTION_PARAMS_INIT;
    d->core.ratio = o->ratio;
    d->core.window = o->window;
    d->core.start_abs_pos = d->n - d->queries;
    quern_dsv4_attention_tensors *t = &d->core_tensors;
    *t = (quern_dsv4_attention_tensors)QUERN_DSV4_ATTENTION_TENSORS_INIT;
    t->q = make(d, dtype, 4, q, true);
    t->kv = make(d, dtype, 3, kv, true);
    t->kv_cmp = make(d, dtype, 3, cmp, true);
    t->idx = o->top_k > 0 ? make(d, QUERN_I32, 3, idx, false) : NULL;
    t->sink = make(d, QUERN_F32, 1, &o->heads, true);
    t->cos_sin = make(d, QUERN_F32, 2, table, true);
    t->o = make(d, dtype, 4, q, false);
    t->lse = make(d, QUERN_F32, 3, lse, false);
    bool whole = t->q != NULL && t->kv != NULL && t->kv_cmp != NULL && (t->idx != NULL || o->top_k == 0) &&
                 t->sink != NULL && t->cos_sin != NULL && t->o != NULL && t->lse != NULL;
    if (o->backward) {
        t->d_o = make(d, dtype, 4, q, true);
        t->d_q = make(d, dtype, 4, q, false);
        t->d_kv = make(d, dtype, 3, kv, false);
        t->d_kv_cmp = make(d, dtype, 3, cmp, false);
        t->d_sink = make(d, QUERN_F32, 1, &o->heads, false);
        whole = whole && t->d_o != NULL && t->d_q != NULL && t->d_kv != NULL && t->d_kv_cmp != NULL &&
                t->d_sink != NULL;
    }
    if (!whole) return QUERN_ERR_OUT_OF_MEMORY;
    if (t->idx != NULL) fill_lists(d, t->idx);
    return QUERN_OK;
}

static quern_status size_attention(core_data *d, quern_context *ctx)
{
    const core_bench *o = d->o;
    const quern_dsv4_attention_tensors *t = &d->core_tensors;
    size_t backward = 0;
    quern_status status = quern_dsv4_attention_workspace(ctx, &d->core, t, &d->bytes);
    if (status == QUERN_OK && o->backward)
        status = quern_dsv4_attention_backward_workspace(ctx, &d->core, t, &backward);
    if (backward > d->bytes) d->bytes = backward;
    return status;
}

static int open_data(core_data *d, const core_bench *o, int64_t n, quern_context *ctx)
{
    *d = (core_data){.o = o,
                     .n = n,
                     .queries = o->queries > 0 && o->queries < n ? o->queries : n,
                     .entries = n / o->ratio};
    quern_status status = o->attention ? open_attention(d) : open_index(d);
    if (status == QUERN_ERR_OUT_OF_MEMORY) return fail(EXIT_MACHINE, "no memory for %" PRId64 " tokens", n);
    if (has_caches(o)) {
        const int code = use_caches(d, ctx);
        if (code != EXIT_DONE) return code;
    }
    status = o->attention ? size_attention(d, ctx)
                          : quern_dsv4_index_workspace(ctx, &d->index, &d->index_tensors, &d->bytes);
    if (status != QUERN_OK) return fail_status(status);
    d->workspace = bench_allocate(d->bytes + 1);
    return d->workspace != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the workspace");
}

static core_pass pass_of(const core_data *d, bool backward)
{
    const core_bench *o = d->o;
    double pairs = 0; /* of a query and a key or entry */
    for (int64_t t = d->n - d->queries; t < d->n; t++) {
        const int64_t seen = (t + 1) / o->ratio, chosen = o->top_k > 0 && o->top_k < seen ? o->top_k : seen;
        pairs += (double)(o->attention ? chosen + (t + 1 < o->window ? t + 1 : o->window) : seen);
    }
    pairs *= (double)(o->batch * o->heads * o->width);
    if (!o->attention)
        return (core_pass){"v4-index", "2 Hi C for a query and an entry that it sees", false, 2 * pairs};
    if (backward)
        return (core_pass){"v4-attention", "10 H D for a query and a key that it sees", true, 10 * pairs};
    return (core_pass){"v4-attention", "4 H D for a query and a key that it sees", false, 4 * pairs};
}

static quern_status run_pass(core_data *d, bool backward, quern_context *ctx)
{
    if (!d->o->attention)
        return quern_dsv4_index(ctx, NULL, &d->index, &d->index_tensors, d->workspace, d->bytes);
    return backward
               ? quern_dsv4_attention_backward(ctx, NULL, &d->core, &d->core_tensors, d->workspace, d->bytes)
               : quern_dsv4_attention(ctx, NULL, &d->core, &d->core_tensors, d->workspace, d->bytes);
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

/* The pass, for about a tenth of a second, in turns with its ceiling. */
static int measure(core_data *d, const core_pass *what, int rounds, quern_context *ctx, measurement *out,
                   ceiling *limit)
{
    double ms[BENCH_REPS_MAX], fraction[BENCH_REPS_MAX], rate[BENCH_REPS_MAX];
    const quern_cpu_level level = quern_context_cpu_level(ctx);
    const bool halves = d->o->dtype == QUERN_BF16 && (d->o->attention || d->o->format != ROW_CACHE_F32);
    *limit = level == QUERN_CPU_LEVEL_AVX512BF16 && halves ? CEILING_BF16
             : level >= QUERN_CPU_LEVEL_AVX512             ? CEILING_FMA512
                                                           : CEILING_FMA256;
    for (int i = -1; i < rounds; i++) {
        int runs = 0;
        progress("%s n %" PRId64 ": round %d of %d", what->op, d->n, i + 1, rounds);
        const double start = now_ms();
        do {
            const quern_status status = run_pass(d, what->backward, ctx);
            if (status != QUERN_OK) return fail_status(status);
            runs++;
        } while (now_ms() - start < 100);
        if (i < 0) continue;
        ms[i] = (now_ms() - start) / runs;
        rate[i] = ceiling_measure(*limit, quern_context_threads(ctx));
        fraction[i] = rate[i] > 0 ? what->flops / ms[i] * 1e-6 / rate[i] : 0;
    }
    progress_clear();
    *out = (measurement){
        .time = timing_of(ms, rounds), .fraction = median(fraction, rounds), .ceiling = median(rate, rounds)};
    return EXIT_DONE;
}

static void report(const core_data *d, const core_pass *what, const measurement *m, ceiling limit,
                   int threads, json_t *list)
{
    const double rate = what->flops / m->time.median * 1e-6;
    printf("%-12s %-8s n %8" PRId64 "  queries %6" PRId64
           "  threads %2d  %10.3f ms (p10 %.3f, p90 %.3f)  %7.1f GFLOP/s  %5.3f of %s %.1f\n",
           what->op, what->backward ? "backward" : "", d->n, d->queries, threads, m->time.median, m->time.p10,
           m->time.p90, rate, m->fraction, ceiling_name(limit), m->ceiling);
    const core_bench *o = d->o;
    json_t *shape =
        json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:b}", "format",
                  row_cache_all[o->format], "page", (json_int_t)o->page, "batch", (json_int_t)o->batch,
                  "window", (json_int_t)o->window, "n", (json_int_t)d->n, "queries", (json_int_t)d->queries,
                  "heads", (json_int_t)o->heads, "width", (json_int_t)o->width, "top_k", (json_int_t)o->top_k,
                  "ratio", (json_int_t)o->ratio, "backward", (int)what->backward);
    json_array_append_new(list,
                          json_pack("{s:s, s:o, s:s, s:i, s:i, s:f, s:f, s:f, s:f, s:s, s:f, s:s}", "op",
                                    what->op, "shape", shape, "dtype", dtype_choices[o->dtype], "threads",
                                    threads, "reps", m->time.reps, "ms_median", m->time.median, "ms_p10",
                                    m->time.p10, "ms_p90", m->time.p90, "gflops", rate, "ceiling",
                                    ceiling_name(limit), "fraction", m->fraction, "formula", what->formula));
}

static int bench(const core_bench *o)
{
    int64_t lengths[LENGTHS_MAX], threads[4];
    const int length_count = parse_integers(o->n, 1, INT32_MAX, lengths, LENGTHS_MAX),
              thread_count = parse_integers(o->threads, 0, 1024, threads, 4);
    if (length_count < 0 || thread_count < 0 || o->batch < 1 || o->queries < 0 || o->window < 1 ||
        o->ratio < 1 || o->heads < 1 || o->rounds < 1 || o->rounds > BENCH_REPS_MAX)
        return fail(EXIT_USAGE,
                    "--n '%s' --threads '%s' --batch %" PRId64 " --queries %" PRId64 " --window %" PRId64
                    " --ratio %" PRId64 " --heads %" PRId64 " --rounds %" PRId64
                    ": lists such as 16k,64k and 1,2, 0 or more queries, a batch, window, ratio and heads "
                    "from 1 on, and 1 to %d rounds are accepted",
                    o->n, o->threads, o->batch, o->queries, o->window, o->ratio, o->heads, o->rounds,
                    BENCH_REPS_MAX);
    const bool known = o->attention ? o->format <= ROW_CACHE_ROW584 : o->format != ROW_CACHE_ROW584;
    if (has_caches(o) && (!known || o->backward || o->page < 0))
        return fail(EXIT_USAGE,
                    "--format %s, --page %" PRId64
                    ": %s, without --backward, and pages of 0 or more slots are "
                    "accepted",
                    row_cache_all[o->format], o->page,
                    o->attention ? "f32, bf16 and row584" : "f32, bf16, fp8, fp8-power and fp4");
    json_t *list = json_array();
    quern_context *ctx = NULL;
    int code = output_check(o->json);
    for (int i = 0; i < thread_count * length_count && code == EXIT_DONE; i++) {
        core_data d;
        quern_context_destroy(ctx);
        ctx = NULL;
        if ((code = open_context(&(machine_options){.threads = threads[i / length_count]}, &ctx)) !=
            EXIT_DONE)
            break;
        code = open_data(&d, o, lengths[i % length_count], ctx);
        for (int backward = 0; backward <= (o->attention && o->backward) && code == EXIT_DONE; backward++) {
            const core_pass what = pass_of(&d, backward == 1);
            measurement m = {.fraction = 0};
            ceiling limit;
            code = measure(&d, &what, (int)o->rounds, ctx, &m, &limit);
            if (code == EXIT_DONE) report(&d, &what, &m, limit, quern_context_threads(ctx), list);
        }
        close_data(&d);
    }
    if (code == EXIT_DONE && o->json != NULL) code = report_results(o->json, ctx, list);
    json_decref(list);
    quern_context_destroy(ctx);
    return code;
}

static core_bench defaults_of(bool attention)
{
    core_bench o = {.n = "64k",
                    .threads = "0",
                    .batch = 1,
                    .queries = 64,
                    .heads = 64,
                    .width = 128,
                    .top_k = 512,
                    .ratio = 4,
                    .window = 128,
                    .rounds = ROUNDS,
                    .dtype = QUERN_BF16,
                    .attention = attention};
    if (attention) {
        o.n = "16k";
        o.width = 512;
        o.queries = 512;
    }
    return o;
}

int bench_core(int argc, char **argv, const char *subject)
{
    core_bench o = defaults_of(strcmp(subject, "v4-attention") == 0);
    const option_group groups[] = {{rows, sizeof rows / sizeof *rows, &o}};
    bool help;
    const int code = scenario_options(
        argc, argv, groups,
        "usage: quern bench v4-index|v4-attention [--key value ...]\n\n"
        "The last queries of a context of n tokens, as a fraction of the arithmetic peak that is "
        "measured in turns with them.\n\noptions:\n",
        &help);
    if (code != EXIT_DONE || help) return code;
    return bench(&o);
}
