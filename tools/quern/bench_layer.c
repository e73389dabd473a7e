/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_layer.c - v4-layer: new tokens of a batch of sequences through a whole attention layer of
 * DeepSeek-V4, from a cache of random rows. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/dsv4_layer.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { ROPE = 64, RING = 8, FEW_TOKENS = 64, VIEWS = 36, BUFFERS = VIEWS + 10 };

/* The subject's options. */
typedef struct layer_sizes {
    int64_t batch, queries, hidden, heads, width, q_lora, groups, o_lora, index_heads, index_width, top_k,
        ratio, window, page;
    int kind, dtype, format, key_format;
} layer_sizes;

static layer_sizes sizes_of(const bench_case *c)
{
    layer_sizes o = {.dtype = c->dtype};
    const struct {
        const char *option;
        int64_t *to;
    } rows[] = {{"batch", &o.batch},
                {"queries", &o.queries},
                {"hidden", &o.hidden},
                {"heads", &o.heads},
                {"width", &o.width},
                {"q-lora", &o.q_lora},
                {"groups", &o.groups},
                {"o-lora", &o.o_lora},
                {"index-heads", &o.index_heads},
                {"index-width", &o.index_width},
                {"top-k", &o.top_k},
                {"ratio", &o.ratio},
                {"window", &o.window},
                {"page", &o.page}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i].to = bench_extent_of(c, rows[i].option);
    o.kind = bench_choice_of(c, "kind");
    o.format = bench_choice_of(c, "format");
    o.key_format = bench_choice_of(c, "key-format");
    return o;
}

/* A layer, a cache that holds all but the new tokens, and a call. */
typedef struct layer_data {
    layer_sizes sizes;
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
    const layer_sizes *o = &d->sizes;
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
    p.kind = d->sizes.kind == QUERN_DSV4_LAYER_CSA ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
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
    const quern_tensor *made = make(d, (quern_dtype)d->sizes.dtype, n, width, false);
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

static quern_dsv4_format row_format(const layer_sizes *o)
{
    return o->format != 0 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
}

/* Bytes of a raw row or entry, and of a key. */
static int64_t row_bytes(const layer_sizes *o)
{
    return o->format != 0 ? 584 : o->width * (int64_t)quern_dtype_size((quern_dtype)o->dtype);
}

static int64_t key_bytes(const layer_sizes *o)
{
    const int64_t c = o->index_width;
    return o->key_format == QUERN_DSV4_ROWS  ? c * (int64_t)quern_dtype_size((quern_dtype)o->dtype)
           : o->key_format == QUERN_DSV4_FP4 ? c / 2 + c / 32
                                             : c + 4;
}

/* Random rows of a sequence of d->n less a call's tokens, cut to whole blocks. */
static quern_status make_content(layer_data *d, quern_context *ctx)
{
    const layer_sizes *o = &d->sizes;
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
    for (int64_t b = 0; b < d->sizes.batch && status == QUERN_OK; b++)
        status = quern_dsv4_layer_cache_set(d->cache, b, &d->content);
    return status;
}

static quern_status make_cache(layer_data *d, quern_context *ctx)
{
    const layer_sizes *o = &d->sizes;
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
    const layer_sizes *o = &d->sizes;
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

static void close_data(bench_run *r)
{
    layer_data *d = r->data;
    for (int i = 0; i < d->owned; i++) free(d->memory[i]);
    free(d->workspace);
    free(d);
}

/* A call, after which the sequences are what they were. */
static int run_call(bench_run *r, quern_context *ctx, double ms[2])
{
    layer_data *d = r->data;
    const layer_sizes *o = &d->sizes;
    const double start = now_ms();
    quern_status status = quern_dsv4_layer_decode(ctx, NULL, &d->params, d->cache, d->ids, d->counts,
                                                  o->batch, &d->t, d->workspace, d->bytes);
    ms[0] = now_ms() - start;
    if (status == QUERN_OK && o->queries > RING) status = fill_sequences(d);
    else
        for (int64_t b = 0; b < o->batch && status == QUERN_OK; b++)
            status = quern_dsv4_layer_cache_rollback(d->cache, b, o->queries);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* ---- work ---- */

/* What a call must read and multiply: weights once, and what its queries must see. */
static void count_work(const layer_data *d, formula_symbols *to)
{
    const layer_sizes *o = &d->sizes;
    const bool csa = o->kind == QUERN_DSV4_LAYER_CSA;
    const int64_t whole = d->content.tokens / d->ratio;
    const double seen = (double)whole, chosen = (double)o->top_k < seen ? (double)o->top_k : seen,
                 entries = o->kind == QUERN_DSV4_LAYER_SWA ? 0
                           : csa                           ? chosen
                                                           : seen,
                 window = (double)(o->window < d->n ? o->window : d->n);
    formula_set(to, "weights", d->weight_bytes);
    formula_set(to, "params", d->weight_count);
    formula_set(to, "rows",
                (double)o->batch *
                    ((entries * (csa ? (double)o->queries : 1) + window) * (double)row_bytes(o) +
                     (csa ? seen * (double)key_bytes(o) : 0)));
    formula_set(to, "keys", entries + window);
    formula_set(to, "scored", csa ? seen : 0);
}

/* Beyond a few tokens the products are the limit. */
const work_row *bench_variant_layer(const bench_case *c, int pass)
{
    static const work_row products = {LIMIT_PRODUCTS, "B T (2 params + 4 H D keys + 2 Hi CI scored)", NULL};
    (void)pass;
    return bench_extent_of(c, "batch") * bench_extent_of(c, "queries") > FEW_TOKENS ? &products : NULL;
}

int bench_check_layer(const bench_case *c)
{
    const int64_t queries = bench_extent_of(c, "queries");
    if (c->n >= queries) return EXIT_DONE;
    return fail(EXIT_USAGE,
                "--n %" PRId64 " --queries %" PRId64 ": a context of the queries or more is accepted", c->n,
                queries);
}

int bench_open_layer(bench_run *r, quern_context *ctx)
{
    layer_data *d = need_memory(sizeof *d);
    memset(d, 0, sizeof *d);
    r->data = d;
    r->once = run_call;
    r->close = close_data;
    d->sizes = sizes_of(r->what);
    d->n = r->what->n;
    d->ratio = d->sizes.kind == QUERN_DSV4_LAYER_SWA   ? 1
               : d->sizes.ratio > 0                    ? d->sizes.ratio
               : d->sizes.kind == QUERN_DSV4_LAYER_CSA ? 4
                                                       : 128;
    d->tokens = d->sizes.batch * d->sizes.queries;
    const quern_status status = open_data(d, ctx);
    if (status == QUERN_ERR_OUT_OF_MEMORY)
        return fail(EXIT_MACHINE, "no memory for %" PRId64 " tokens", d->n);
    if (status != QUERN_OK) return fail_status(status);
    count_work(d, &r->symbols);
    return EXIT_DONE;
}
