/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_layer.c - `quern bench v4-layer`: new tokens of a batch of sequences through a whole attention layer
 * of DeepSeek-V4, from a cache of random rows. Calls and ceiling take turns; the fraction is the median of
 * the rounds'. */
#include "bench_layer.h"

#include "bench.h"
#include "command.h"
#include "machine.h"
#include "output.h"
#include "values.h"

#include <quern/dsv4_layer.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUNDS = 9,
    LENGTHS_MAX = 16,
    ROPE = 64,
    RING = 8,
    FEW_TOKENS = 64,
    WEIGHTS = 18,
    VIEWS = 36,
    BUFFERS = VIEWS + 10
};

typedef struct layer_bench {
    const char *n, *threads, *json;
    int64_t batch, queries, hidden, heads, width, q_lora, groups, o_lora, index_heads, index_width, top_k,
        ratio, window, page, rounds;
    int kind, dtype, format, key_format;
} layer_bench;

static const char *const dtype_choices[] = {"f32", "f16", "bf16", NULL}, *const kinds[] = {"csa", "hca",
                                                                                           "swa", NULL};
static const char *const formats[] = {"rows", "row584", NULL}, *const key_formats[] = {
                                                                   "rows", "fp8", "fp8-power", "fp4", NULL};
#define AT(member) offsetof(layer_bench, member)
static const option_row rows[] = {
    {"kind", OPTION_CHOICE, AT(kind), kinds, "of the layer"},
    {"n", OPTION_TEXT, AT(n), NULL, "tokens of the context, the new ones among them, such as 32k,1M"},
    {"batch", OPTION_INT, AT(batch), NULL, "sequences"},
    {"queries", OPTION_INT, AT(queries), NULL, "new tokens of each"},
    {"hidden", OPTION_INT, AT(hidden), NULL, "Dm"},
    {"heads", OPTION_INT, AT(heads), NULL, "H"},
    {"width", OPTION_INT, AT(width), NULL, "D"},
    {"q-lora", OPTION_INT, AT(q_lora), NULL, "channels of the queries' latent"},
    {"groups", OPTION_INT, AT(groups), NULL, "G"},
    {"o-lora", OPTION_INT, AT(o_lora), NULL, "channels of a group's output"},
    {"index-heads", OPTION_INT, AT(index_heads), NULL, "Hi"},
    {"index-width", OPTION_INT, AT(index_width), NULL, "C_I"},
    {"top-k", OPTION_INT, AT(top_k), NULL, "csa: entries chosen"},
    {"ratio", OPTION_INT, AT(ratio), NULL, "tokens of an entry; 0: 4 (csa), 128 (hca)"},
    {"window", OPTION_INT, AT(window), NULL, "raw keys of a query"},
    {"dtype", OPTION_CHOICE, AT(dtype), dtype_choices, "of hidden states, weights and rows"},
    {"format", OPTION_CHOICE, AT(format), formats, "of the cache's raw rows and entries"},
    {"key-format", OPTION_CHOICE, AT(key_format), key_formats, "of the indexer's keys in the cache"},
    {"page", OPTION_INT, AT(page), NULL, "slots of a page of entries and keys; 0: they are contiguous"},
    {"rounds", OPTION_INT, AT(rounds), NULL, "in which calls and ceiling take turns, at most 101"},
    {"threads", OPTION_TEXT, AT(threads), NULL,
     "thread counts, such as 1,2; 0: OMP_NUM_THREADS, else all CPUs"},
    {"json", OPTION_TEXT, AT(json), NULL, "write the results to this file"},
};
#undef AT

/* A layer, a cache that holds all but the new tokens, and a call. */
typedef struct layer_data {
    const layer_bench *o;
    int64_t n, ratio, tokens; /* tokens: of a call */
    quern_dsv4_layer_params params;
    quern_dsv4_layer_tensors t;
    quern_dsv4_layer_cache *cache;
    quern_dsv4_layer_rows content; /* of every sequence */
    quern_tensor view[VIEWS];
    void *memory[BUFFERS];
    int used, owned;
    double weight_bytes, weight_count;
    int32_t *ids;
    int64_t *counts;
    void *workspace;
    size_t bytes;
} layer_data;

static void *own(layer_data *d, size_t bytes)
{
    void *p = bench_allocate(bytes + 1);
    return d->memory[d->owned++] = p;
}

/* The next tensor, random with the variance of 1 / columns where it is a matrix of weights. */
static const quern_tensor *make(layer_data *d, quern_dtype dtype, int64_t first, int64_t columns, bool weight)
{
    const int64_t shape[] = {first, columns};
    quern_tensor *t = &d->view[d->used++];
    const size_t bytes = (size_t)(first * (columns > 0 ? columns : 1)) * quern_dtype_size(dtype);
    void *p = own(d, bytes);
    *t = quern_tensor_contiguous(p, dtype, columns > 0 ? 2 : 1, shape);
    if (p == NULL) return NULL;
    fill_normal(t, (uint64_t)d->used);
    if (weight) {
        d->weight_bytes += (double)bytes;
        d->weight_count += (double)first * (double)(columns > 0 ? columns : 1);
    }
    return t;
}

static bool make_weights(layer_data *d)
{
    const layer_bench *o = d->o;
    const quern_dtype f = (quern_dtype)o->dtype;
    const int64_t hd = o->heads * o->width, m = o->kind == QUERN_DSV4_LAYER_CSA ? 2 : 1, c = o->index_width;
    quern_dsv4_layer_tensors *t = &d->t;
    t->sinks = make(d, QUERN_F32, o->heads, 0, true);
    t->q_a = make(d, f, o->q_lora, o->hidden, true);
    t->q_a_norm = make(d, f, o->q_lora, 0, true);
    t->q_b = make(d, f, hd, o->q_lora, true);
    t->kv = make(d, f, o->width, o->hidden, true);
    t->kv_norm = make(d, f, o->width, 0, true);
    t->o_a = make(d, f, o->groups * o->o_lora, hd / o->groups, true);
    t->o_b = make(d, f, o->hidden, o->groups * o->o_lora, true);
    bool whole = t->sinks && t->q_a && t->q_a_norm && t->q_b && t->kv && t->kv_norm && t->o_a && t->o_b;
    if (o->kind == QUERN_DSV4_LAYER_SWA) return whole;
    t->compressor_bias = make(d, f, d->ratio, m * o->width, true);
    t->compressor_kv = make(d, f, m * o->width, o->hidden, true);
    t->compressor_gate = make(d, f, m * o->width, o->hidden, true);
    t->compressor_norm = make(d, f, o->width, 0, true);
    whole = whole && t->compressor_bias && t->compressor_kv && t->compressor_gate && t->compressor_norm;
    if (o->kind == QUERN_DSV4_LAYER_HCA) return whole;
    t->indexer_bias = make(d, f, d->ratio, 2 * c, true);
    t->indexer_kv = make(d, f, 2 * c, o->hidden, true);
    t->indexer_gate = make(d, f, 2 * c, o->hidden, true);
    t->indexer_norm = make(d, f, c, 0, true);
    t->indexer_q_b = make(d, f, o->index_heads * c, o->q_lora, true);
    t->indexer_heads = make(d, f, o->index_heads, o->hidden, true);
    return whole && t->indexer_bias && t->indexer_kv && t->indexer_gate && t->indexer_norm &&
           t->indexer_q_b && t->indexer_heads;
}

/* Appends `tokens` tokens to a compressor's state: the same random ones again and again. */
static quern_status feed_state(layer_data *d, quern_context *ctx, const quern_dsv4_compress_params *p,
                               int64_t width, int64_t tokens, quern_dsv4_state *state)
{
    enum { CALL = 1024 };
    const bool csa = p->kind == QUERN_DSV4_CSA;
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    const quern_tensor *proj = make(d, QUERN_F32, CALL, (csa ? 4 : 2) * width, false),
                       *bias = make(d, QUERN_F32, p->ratio, width, false),
                       *out = make(d, QUERN_F32, CALL / p->ratio + 1, width, false);
    if (proj == NULL || bias == NULL || out == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    quern_tensor piece = *proj, entries = *out;
    t.proj = &piece;
    t.b_a = bias;
    t.b_b = csa ? bias : NULL;
    t.out = &entries;
    size_t most = 0;
    quern_status status = quern_dsv4_append_entries(&state, &piece.shape[0], 1, &entries.shape[0]);
    if (status == QUERN_OK)
        status = quern_dsv4_append_workspace(ctx, p, &state, &piece.shape[0], 1, &t, &most);
    void *workspace = status == QUERN_OK ? malloc(most + 1) : NULL;
    if (status == QUERN_OK && workspace == NULL) status = QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t left = tokens; left > 0 && status == QUERN_OK; left -= piece.shape[0]) {
        piece.shape[0] = left < CALL ? left : CALL;
        status = quern_dsv4_append_entries(&state, &piece.shape[0], 1, &entries.shape[0]);
        if (status == QUERN_OK)
            status = quern_dsv4_append(ctx, NULL, p, &state, &piece.shape[0], 1, &t, workspace, most);
    }
    free(workspace);
    return status;
}

/* A compressor's state after `tokens` tokens. */
static quern_status make_state(layer_data *d, quern_context *ctx, int64_t tokens, int64_t width,
                               const quern_dsv4_state **state)
{
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    quern_dsv4_state *made = NULL;
    size_t bytes;
    p.kind = d->o->kind == QUERN_DSV4_LAYER_CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    p.ratio = d->ratio;
    quern_status status = quern_dsv4_state_size(&p, width, RING, &bytes);
    if (status != QUERN_OK) return status;
    void *memory = own(d, bytes);
    if (memory == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    status = quern_dsv4_state_create(&p, width, RING, memory, bytes, &made);
    if (status == QUERN_OK) status = feed_state(d, ctx, &p, width, tokens, made);
    *state = made;
    return status;
}

/* Random rows as a cache of this format stores them. */
static quern_status make_rows(layer_data *d, quern_context *ctx, quern_dsv4_format format, int64_t n,
                              int64_t width, int64_t row_bytes, quern_tensor *to)
{
    const quern_tensor *made = make(d, (quern_dtype)d->o->dtype, n, width, false);
    if (made == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    *to = *made;
    if (format == QUERN_DSV4_ROWS) return QUERN_OK;
    const int64_t shape[] = {n, row_bytes};
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    int32_t *slots = malloc((size_t)(n + 1) * sizeof *slots);
    void *workspace = NULL;
    size_t bytes = 0;
    *to = quern_tensor_contiguous(own(d, (size_t)(n * row_bytes)), QUERN_U8, 2, shape);
    for (int64_t i = 0; slots != NULL && i < n; i++) slots[i] = (int32_t)i;
    const quern_tensor places = quern_tensor_contiguous(slots, QUERN_I32, 1, &n);
    p.format = format;
    t.x = made;
    t.slots = &places;
    t.cache = to;
    quern_status status = quern_dsv4_store_workspace(ctx, &p, &t, &bytes);
    if (status == QUERN_OK && (slots == NULL || to->data == NULL || (workspace = malloc(bytes + 1)) == NULL))
        status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK) status = quern_dsv4_store(ctx, NULL, &p, &t, workspace, bytes);
    free(slots), free(workspace);
    return status;
}

static quern_dsv4_format row_format(const layer_bench *o)
{
    return o->format != 0 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
}

/* Bytes of a raw row or entry, and of a key. */
static int64_t row_bytes(const layer_bench *o)
{
    return o->format != 0 ? 584 : o->width * (int64_t)quern_dtype_size((quern_dtype)o->dtype);
}

static int64_t key_bytes(const layer_bench *o)
{
    const int64_t c = o->index_width;
    return o->key_format == QUERN_DSV4_ROWS  ? c * (int64_t)quern_dtype_size((quern_dtype)o->dtype)
           : o->key_format == QUERN_DSV4_FP4 ? c / 2 + c / 32
                                             : c + 4;
}

/* Random rows of a sequence of d->n less a call's tokens, cut to whole blocks. */
static quern_status make_content(layer_data *d, quern_context *ctx)
{
    const layer_bench *o = d->o;
    const int64_t had = (d->n - o->queries) / d->ratio * d->ratio,
                  raw = had < o->window - 1 + RING ? had : o->window - 1 + RING;
    const bool entries = o->kind != QUERN_DSV4_LAYER_SWA, csa = o->kind == QUERN_DSV4_LAYER_CSA;
    d->content = (quern_dsv4_layer_rows)QUERN_DSV4_LAYER_ROWS_INIT;
    d->content.tokens = had;
    const int64_t whole = entries ? had / d->ratio : 0;
    quern_status status = make_rows(d, ctx, row_format(o), raw, o->width, row_bytes(o), &d->content.raw);
    if (status == QUERN_OK)
        status = make_rows(d, ctx, row_format(o), whole, o->width, row_bytes(o), &d->content.entries);
    if (status == QUERN_OK)
        status = make_rows(d, ctx, csa ? (quern_dsv4_format)o->key_format : QUERN_DSV4_ROWS, csa ? whole : 0,
                           o->index_width, key_bytes(o), &d->content.keys);
    if (status != QUERN_OK) return status;
    if (entries) status = make_state(d, ctx, had, o->width, &d->content.main);
    if (csa && status == QUERN_OK) status = make_state(d, ctx, had, o->index_width, &d->content.index);
    return status;
}

static quern_status fill_sequences(layer_data *d)
{
    quern_status status = QUERN_OK;
    for (int64_t b = 0; b < d->o->batch && status == QUERN_OK; b++)
        status = quern_dsv4_layer_cache_set(d->cache, b, &d->content);
    return status;
}

static quern_status make_cache(layer_data *d, quern_context *ctx)
{
    const layer_bench *o = d->o;
    quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    size_t memory, bytes;
    p.kind = (quern_dsv4_layer_kind)o->kind;
    p.dtype = (quern_dtype)o->dtype;
    p.sequences = o->batch;
    p.capacity = d->n;
    p.dim = o->width;
    p.window = o->window;
    p.ratio = d->ratio;
    p.index_dim = o->index_width;
    p.ring = RING;
    p.format = row_format(o);
    p.key_format = o->kind == QUERN_DSV4_LAYER_CSA ? (quern_dsv4_format)o->key_format : QUERN_DSV4_ROWS;
    p.page = o->page;
    if (p.page > 0) p.pages = o->batch * (d->n / d->ratio / p.page + 1);
    quern_status status = quern_dsv4_layer_cache_size(&p, &memory, &bytes);
    if (status != QUERN_OK) return status;
    void *at[] = {own(d, memory), own(d, bytes)};
    if (at[0] == NULL || at[1] == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    status = quern_dsv4_layer_cache_create(&p, at[0], memory, at[1], bytes, &d->cache);
    int64_t needed = 0;
    if (status == QUERN_OK) status = quern_dsv4_layer_cache_pages(d->cache, 0, d->n, NULL, &needed);
    for (int64_t i = 0; i < o->batch * needed && status == QUERN_OK; i++) {
        const int32_t page = (int32_t)(p.pages - 1 - i);
        status = quern_dsv4_layer_cache_add_pages(d->cache, i / needed, &page, 1);
    }
    if (status == QUERN_OK) status = make_content(d, ctx);
    return status == QUERN_OK ? fill_sequences(d) : status;
}

static quern_status open_data(layer_data *d, quern_context *ctx)
{
    const layer_bench *o = d->o;
    const quern_dtype f = (quern_dtype)o->dtype;
    d->params = (quern_dsv4_layer_params)QUERN_DSV4_LAYER_PARAMS_INIT;
    d->params.kind = (quern_dsv4_layer_kind)o->kind;
    d->params.window = o->window;
    d->params.top_k = o->top_k;
    d->t = (quern_dsv4_layer_tensors)QUERN_DSV4_LAYER_TENSORS_INIT;
    d->t.x = make(d, f, d->tokens, o->hidden, false);
    d->t.out = make(d, f, d->tokens, o->hidden, false);
    d->t.cos_sin = make(d, QUERN_F32, d->n, ROPE < o->index_width ? ROPE : o->index_width / 2 * 2, false);
    d->ids = own(d, (size_t)o->batch * sizeof *d->ids);
    d->counts = own(d, (size_t)o->batch * sizeof *d->counts);
    if (d->t.x == NULL || d->t.out == NULL || d->t.cos_sin == NULL || d->ids == NULL || d->counts == NULL ||
        !make_weights(d))
        return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t b = 0; b < o->batch; b++) {
        d->ids[b] = (int32_t)b;
        d->counts[b] = o->queries;
    }
    quern_status status = make_cache(d, ctx);
    if (status == QUERN_OK)
        status = quern_dsv4_layer_decode_workspace(ctx, &d->params, d->cache, d->ids, d->counts, o->batch,
                                                   &d->t, &d->bytes);
    if (status == QUERN_OK && (d->workspace = bench_allocate(d->bytes + 1)) == NULL)
        status = QUERN_ERR_OUT_OF_MEMORY;
    return status;
}

static void close_data(layer_data *d)
{
    for (int i = 0; i < d->owned; i++) free(d->memory[i]);
    free(d->workspace);
}

/* A call, timed, after which the sequences are what they were. */
static quern_status call(layer_data *d, quern_context *ctx, double *ms)
{
    const layer_bench *o = d->o;
    const double start = now_ms();
    quern_status status = quern_dsv4_layer_decode(ctx, NULL, &d->params, d->cache, d->ids, d->counts,
                                                  o->batch, &d->t, d->workspace, d->bytes);
    *ms += now_ms() - start;
    if (status == QUERN_OK && o->queries > RING) return fill_sequences(d);
    for (int64_t b = 0; b < o->batch && status == QUERN_OK; b++)
        status = quern_dsv4_layer_cache_rollback(d->cache, b, o->queries);
    return status;
}

/* The least work of a call: weights once, and what its queries must see; products with both. */
static work work_of(const layer_data *d, quern_cpu_level level)
{
    const layer_bench *o = d->o;
    const int64_t whole = d->content.tokens / d->ratio;
    const double seen = (double)whole, chosen = o->top_k < seen ? (double)o->top_k : seen;
    const bool csa = o->kind == QUERN_DSV4_LAYER_CSA, few = d->tokens <= FEW_TOKENS;
    const double entries = o->kind == QUERN_DSV4_LAYER_SWA ? 0
                           : csa                           ? chosen
                                                           : seen,
                 window = (double)(o->window < d->n ? o->window : d->n);
    work w = {.formula =
                  few ? "weights, and the rows that the queries must see"
                      : "2 for a token and a weight, 4 H D for a query and its keys, 2 Hi C_I for a query "
                        "and an entry that it scores"};
    w.bytes = d->weight_bytes +
              (double)o->batch * ((entries * (csa ? (double)o->queries : 1) + window) * (double)row_bytes(o) +
                                  (csa ? seen * (double)key_bytes(o) : 0));
    w.flops =
        (double)d->tokens * (2 * d->weight_count + 4 * (entries + window) * (double)(o->heads * o->width) +
                             (csa ? 2 * seen * (double)(o->index_heads * o->index_width) : 0));
    w.limit = few                                                             ? CEILING_READ
              : level == QUERN_CPU_LEVEL_AVX512BF16 && o->dtype == QUERN_BF16 ? CEILING_BF16
              : level >= QUERN_CPU_LEVEL_AVX512                               ? CEILING_FMA512
                                                                              : CEILING_FMA256;
    return w;
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

/* Calls of about a tenth of a second, in turns with the ceiling. */
static int measure(layer_data *d, const work *w, int rounds, quern_context *ctx, measurement *out)
{
    double ms[BENCH_REPS_MAX], fraction[BENCH_REPS_MAX], rate[BENCH_REPS_MAX];
    const double least = w->limit == CEILING_READ ? w->bytes : w->flops;
    for (int i = -1; i < rounds; i++) {
        int runs = 0;
        double sum = 0;
        progress("v4-layer n %" PRId64 ": round %d of %d", d->n, i + 1, rounds);
        for (; sum < 100; runs++) {
            const quern_status status = call(d, ctx, &sum);
            if (status != QUERN_OK) return fail_status(status);
        }
        if (i < 0) continue;
        ms[i] = sum / runs;
        rate[i] = ceiling_measure(w->limit, quern_context_threads(ctx));
        fraction[i] = rate[i] > 0 ? least / ms[i] * 1e-6 / rate[i] : 0;
    }
    progress_clear();
    *out = (measurement){
        .time = timing_of(ms, rounds), .fraction = median(fraction, rounds), .ceiling = median(rate, rounds)};
    return EXIT_DONE;
}

static void report(const layer_data *d, const work *w, const measurement *m, int threads, json_t *list)
{
    const layer_bench *o = d->o;
    const bool few = w->limit == CEILING_READ;
    const double rate = (few ? w->bytes : w->flops) / m->time.median * 1e-6;
    printf("%-8s %-4s n %8" PRId64 "  %3" PRId64 " x %5" PRId64
           " tokens  threads %2d  %9.3f ms (p10 %.3f, p90 %.3f)  %7.1f %s  %5.3f of %s %.1f\n",
           "v4-layer", kinds[o->kind], d->n, o->batch, o->queries, threads, m->time.median, m->time.p10,
           m->time.p90, rate, few ? "GB/s" : "GFLOP/s", m->fraction, ceiling_name(w->limit), m->ceiling);
    json_t *shape = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "kind", kinds[o->kind],
                              "format", formats[o->format], "key_format", key_formats[o->key_format], "page",
                              (json_int_t)o->page, "n", (json_int_t)d->n, "batch", (json_int_t)o->batch,
                              "queries", (json_int_t)o->queries, "hidden", (json_int_t)o->hidden, "heads",
                              (json_int_t)o->heads, "width", (json_int_t)o->width);
    json_array_append_new(list, json_pack("{s:s, s:o, s:s, s:i, s:i, s:f, s:f, s:f, s:f, s:s, s:f, s:s}",
                                          "op", "v4-layer", "shape", shape, "dtype", dtype_choices[o->dtype],
                                          "threads", threads, "reps", m->time.reps, "ms_median",
                                          m->time.median, "ms_p10", m->time.p10, "ms_p90", m->time.p90,
                                          few ? "gbps" : "gflops", rate, "ceiling", ceiling_name(w->limit),
                                          "fraction", m->fraction, "formula", w->formula));
}

static int bench_one(const layer_bench *o, int64_t n, quern_context *ctx, json_t *list)
{
    layer_data d;
    measurement m = {.fraction = 0};
    memset(&d, 0, sizeof d);
    d.o = o;
    d.n = n;
    d.ratio = o->kind == QUERN_DSV4_LAYER_SWA   ? 1
              : o->ratio > 0                    ? o->ratio
              : o->kind == QUERN_DSV4_LAYER_CSA ? 4
                                                : 128;
    d.tokens = o->batch * o->queries;
    if (n < o->queries)
        return fail(EXIT_USAGE,
                    "--n %" PRId64 " --queries %" PRId64 ": a context of the queries or more is accepted", n,
                    o->queries);
    const quern_status status = open_data(&d, ctx);
    int code = status == QUERN_OK                  ? EXIT_DONE
               : status == QUERN_ERR_OUT_OF_MEMORY ? fail(EXIT_MACHINE, "no memory for %" PRId64 " tokens", n)
                                                   : fail_status(status);
    if (code == EXIT_DONE) {
        const work w = work_of(&d, quern_context_cpu_level(ctx));
        code = measure(&d, &w, (int)o->rounds, ctx, &m);
        if (code == EXIT_DONE) report(&d, &w, &m, quern_context_threads(ctx), list);
    }
    close_data(&d);
    return code;
}

static int bench(const layer_bench *o)
{
    int64_t lengths[LENGTHS_MAX], threads[4];
    const int length_count = parse_integers(o->n, 1, INT32_MAX, lengths, LENGTHS_MAX),
              thread_count = parse_integers(o->threads, 0, 1024, threads, 4);
    if (length_count < 0 || thread_count < 0 || o->batch < 1 || o->queries < 1 || o->page < 0 ||
        o->groups < 1 || o->rounds < 1 || o->rounds > BENCH_REPS_MAX)
        return fail(
            EXIT_USAGE,
            "--n '%s' --threads '%s' --batch %" PRId64 " --queries %" PRId64 " --groups %" PRId64
            " --rounds %" PRId64
            ": lists such as 32k,1M and 1,2, a batch, queries and groups from 1 on, and 1 to %d rounds are "
            "accepted",
            o->n, o->threads, o->batch, o->queries, o->groups, o->rounds, BENCH_REPS_MAX);
    json_t *list = json_array();
    quern_context *ctx = NULL;
    int code = output_check(o->json);
    for (int i = 0; i < thread_count * length_count && code == EXIT_DONE; i++) {
        quern_context_destroy(ctx);
        ctx = NULL;
        code = open_context(&(machine_options){.threads = threads[i / length_count]}, &ctx);
        if (code == EXIT_DONE) code = bench_one(o, lengths[i % length_count], ctx, list);
    }
    if (code == EXIT_DONE && o->json != NULL) code = report_results(o->json, ctx, list);
    json_decref(list);
    quern_context_destroy(ctx);
    return code;
}

int bench_layer(int argc, char **argv, const char *subject)
{
    layer_bench o = {.n = "32k",
                     .threads = "0",
                     .batch = 1,
                     .queries = 1,
                     .hidden = 4096,
                     .heads = 64,
                     .width = 512,
                     .q_lora = 1024,
                     .groups = 8,
                     .o_lora = 1024,
                     .index_heads = 64,
                     .index_width = 128,
                     .top_k = 512,
                     .window = 128,
                     .rounds = ROUNDS,
                     .dtype = QUERN_BF16};
    const option_group groups[] = {{rows, sizeof rows / sizeof *rows, &o}};
    bool help;
    (void)subject;
    const int code = scenario_options(
        argc, argv, groups,
        "usage: quern bench v4-layer [--key value ...]\n\n"
        "New tokens of a batch of sequences through a whole attention layer, from a cache, with the dims of "
        "DeepSeek-V4-Flash:\n"
        "as a fraction of the read bandwidth (beyond 64 tokens: of the arithmetic peak) that is measured in "
        "turns "
        "with it.\n\noptions:\n",
        &help);
    if (code != EXIT_DONE || help) return code;
    return bench(&o);
}
