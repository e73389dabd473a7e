/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_layer.c - v4-layer: a step of a batch of sequences through a whole attention layer of DeepSeek-V4,
 * from pages of random rows. */
#include "bench.h"

#include "command.h"
#include "device.h"
#include "values.h"

#include <quern/dsv4_layer.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { ROPE = 64, RING = 8, FEW_TOKENS = 64, PAGE = 64, VIEWS = 42, BUFFERS = VIEWS + 10 };

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

/* A layer, what it keeps of all but the new tokens, and a call. */
typedef struct layer_data {
    layer_sizes sizes;
    int64_t n, ratio, tokens, had; /* tokens: of a call; had: of a sequence before it */
    quern_dsv4_layer_step_params params;
    quern_dsv4_layer_step_tensors t;
    quern_ledger *ledger;
    quern_step step;
    quern_tensor view[VIEWS];
    void *memory[BUFFERS];
    int used, owned;
    double weight_bytes, weight_count;
    int32_t *ids;
    int64_t *counts;
    void *block, *workspace;
    size_t block_bytes, bytes;
    int device;
    void *moved[VIEWS], *device_block; /* of a GPU's */
    device_clock clock;
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
    quern_dsv4_layer_step_tensors *t = &d->t;
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

/* A pool of random rows, as the layer stores them: raw rows in one page a sequence, others in pages. */
static quern_status make_pool(layer_data *d, quern_context *ctx, quern_dsv4_format format, bool raw,
                              const int64_t shape[3], int64_t row, const quern_tensor **to)
{
    const bool bytes = format != QUERN_DSV4_ROWS;
    const int64_t flat[] = {shape[0], shape[1] * row}, whole[] = {shape[0], shape[1], bytes ? row : shape[2]};
    const quern_dtype dtype = bytes ? QUERN_U8 : (quern_dtype)d->sizes.dtype;
    const quern_tensor *made = make(d, (quern_dtype)d->sizes.dtype, shape[1], shape[2], false);
    quern_tensor *pool = &d->view[d->used++];
    *pool = quern_tensor_contiguous(NULL, dtype, bytes && !raw ? 2 : 3, bytes && !raw ? flat : whole);
    const size_t page = (size_t)whole[1] * (size_t)whole[2] * quern_dtype_size(dtype);
    pool->data = own(d, (size_t)shape[0] * page);
    *to = pool;
    if (made == NULL || pool->data == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t i = 0; i < shape[0] && !bytes; i++)
        memcpy((char *)pool->data + (size_t)i * page, made->data, page);
    if (!bytes || shape[0] == 0) return QUERN_OK;
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    int32_t *slots = own(d, (size_t)shape[1] * sizeof *slots);
    if (slots == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t i = 0; i < shape[1]; i++) slots[i] = (int32_t)i;
    const int64_t rows[] = {shape[1], row}, one[] = {1, shape[1] * row};
    const quern_tensor places = quern_tensor_contiguous(slots, QUERN_I32, 1, &shape[1]),
                       first = quern_tensor_contiguous(pool->data, QUERN_U8, 2, raw ? rows : one);
    size_t need;
    p.format = format;
    p.page = raw ? 0 : shape[1];
    t.x = made, t.slots = &places, t.cache = &first;
    quern_status status = quern_dsv4_store_workspace(ctx, &p, &t, &need);
    void *workspace = status == QUERN_OK ? own(d, need) : NULL;
    if (status == QUERN_OK && workspace == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK) status = quern_dsv4_store(ctx, NULL, &p, &t, workspace, need);
    for (int64_t i = 1; i < shape[0]; i++) memcpy((char *)pool->data + (size_t)i * page, pool->data, page);
    return status;
}

/* States whose numbers are all finite. */
static bool make_states(layer_data *d, int64_t slots, int64_t width, const quern_tensor **states,
                        const quern_tensor **merged)
{
    const bool csa = d->sizes.kind == QUERN_DSV4_LAYER_CSA;
    const int64_t floats = ((csa ? 6 : 3) + RING * (csa ? 4 : 2)) * width, shape[] = {slots, floats};
    float *data = own(d, (size_t)(slots * floats) * sizeof *data);
    int32_t *numbers = own(d, (size_t)slots * sizeof *numbers);
    quern_tensor *at = &d->view[d->used];
    d->used += 2;
    at[0] = quern_tensor_contiguous(data, QUERN_F32, 2, shape);
    at[1] = quern_tensor_contiguous(numbers, QUERN_I32, 1, shape);
    *states = &at[0], *merged = &at[1];
    for (int64_t i = 0; data != NULL && i < slots * floats; i++) data[i] = 0.5f;
    return data != NULL && numbers != NULL;
}

/* The states have taken in all tokens but those that can be taken back. */
static quern_status set_merged(const layer_data *d)
{
    const quern_tensor *const all[] = {d->t.merged, d->t.indexer_merged};
    const int32_t merged = (int32_t)(d->had > RING ? d->had - RING : 0);
    quern_status status = QUERN_OK;
    for (int i = 0; i < 2 && all[i] != NULL; i++) {
        const size_t bytes = (size_t)all[i]->shape[0] * sizeof merged;
        int32_t *host = need_memory(bytes + 1);
        for (int64_t s = 0; s < all[i]->shape[0]; s++) host[s] = merged;
        if (status == QUERN_OK) status = device_copy((int)all[i]->device, all[i]->data, host, bytes);
        free(host);
    }
    return status;
}

/* The books of sequences of d->had tokens. */
static quern_status make_ledger(layer_data *d, const quern_ledger_params *p)
{
    size_t bytes = 0;
    int64_t *had = own(d, (size_t)d->sizes.batch * sizeof *had);
    quern_status status = quern_ledger_size(p, &bytes);
    if (status != QUERN_OK) return status;
    void *memory = own(d, bytes);
    if (memory == NULL || had == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t b = 0; b < d->sizes.batch; b++) had[b] = d->had;
    status = quern_ledger_create(p, memory, bytes, &d->ledger);
    if (status == QUERN_OK) status = quern_ledger_block_bytes(d->ledger, d->sizes.batch, &d->block_bytes);
    if (status == QUERN_OK && (d->block = own(d, d->block_bytes)) == NULL) status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK)
        status = quern_ledger_begin(d->ledger, d->ids, had, d->sizes.batch, d->block, d->block_bytes);
    if (status == QUERN_OK) status = quern_ledger_commit(d->ledger);
    d->step = (quern_step)QUERN_STEP_INIT;
    if (status == QUERN_OK)
        status = quern_ledger_step(d->ledger, d->sizes.batch, d->block, QUERN_CPU, 0, &d->step);
    return status;
}

static quern_status make_pools(layer_data *d, quern_context *ctx)
{
    const layer_sizes *o = &d->sizes;
    const bool csa = o->kind == QUERN_DSV4_LAYER_CSA;
    quern_dsv4_layer_cache_params c = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_ledger_params p = QUERN_LEDGER_PARAMS_INIT;
    c.kind = (quern_dsv4_layer_kind)o->kind;
    c.dtype = (quern_dtype)o->dtype;
    c.sequences = o->batch, c.capacity = d->n, c.dim = o->width, c.window = o->window, c.ratio = d->ratio;
    c.index_dim = o->index_width, c.ring = RING, c.format = d->params.format, c.page = o->page;
    c.key_format = d->params.key_format;
    int64_t raw = 0, pages = 0, slots = 0;
    quern_status status = quern_dsv4_layer_ledger_params(&c, &p);
    if (status == QUERN_OK) status = quern_ledger_pages(&p, QUERN_DSV4_RAW, 0, NULL, &raw);
    if (status == QUERN_OK) status = quern_ledger_pages(&p, QUERN_DSV4_ENTRIES, 0, NULL, &pages);
    if (status == QUERN_OK) status = quern_ledger_pages(&p, QUERN_LEDGER_STATES, 0, NULL, &slots);
    if (status == QUERN_OK) status = make_ledger(d, &p);
    const int64_t rings[] = {raw, p.pools[QUERN_DSV4_RAW].page, o->width},
                  page = o->page > 0 ? o->page : PAGE, entries[] = {pages, page, o->width},
                  keys[] = {pages, page, o->index_width};
    if (status == QUERN_OK)
        status = make_pool(d, ctx, d->params.format, true, rings, row_bytes(o), &d->t.raw);
    d->t.slots = &d->step.slots, d->t.positions = &d->step.positions, d->t.cu = &d->step.cu;
    d->t.raw_table = &d->step.tables[QUERN_DSV4_RAW], d->t.copies = &d->step.copies;
    if (status != QUERN_OK || o->kind == QUERN_DSV4_LAYER_SWA) return status;
    d->t.entries_table = &d->step.tables[QUERN_DSV4_ENTRIES];
    status = make_pool(d, ctx, d->params.format, false, entries, row_bytes(o), &d->t.entries);
    if (status == QUERN_OK && !make_states(d, slots, o->width, &d->t.states, &d->t.merged))
        status = QUERN_ERR_OUT_OF_MEMORY;
    if (status == QUERN_OK && csa)
        status = make_pool(d, ctx, d->params.key_format, false, keys, key_bytes(o), &d->t.keys);
    if (status == QUERN_OK && csa &&
        !make_states(d, slots, o->index_width, &d->t.indexer_states, &d->t.indexer_merged))
        status = QUERN_ERR_OUT_OF_MEMORY;
    return status == QUERN_OK ? set_merged(d) : status;
}

/* Everything that the call reads and writes goes to the GPU. */
static quern_status move(layer_data *d)
{
    for (int i = 0; i < d->used; i++) {
        if (d->view[i].data == NULL) continue;
        d->view[i] = device_tensor_of(d->device, &d->view[i]);
        d->moved[i] = d->view[i].data;
        if (d->moved[i] == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    }
    d->device_block = device_take(d->device, d->block_bytes);
    if (d->device_block == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_ledger_step(d->ledger, d->sizes.batch, d->device_block, (quern_device)d->device, 0,
                             &d->step);
}

static quern_status open_data(layer_data *d, quern_context *ctx)
{
    const layer_sizes *o = &d->sizes;
    const quern_dtype f = (quern_dtype)o->dtype;
    d->params = (quern_dsv4_layer_step_params)QUERN_DSV4_LAYER_STEP_PARAMS_INIT;
    d->params.kind = (quern_dsv4_layer_kind)o->kind;
    d->params.window = o->window;
    d->params.top_k = o->top_k;
    d->params.format = row_format(o);
    if (o->kind == QUERN_DSV4_LAYER_CSA) d->params.key_format = (quern_dsv4_format)o->key_format;
    d->had = (d->n - o->queries) / d->ratio * d->ratio;
    d->t = (quern_dsv4_layer_step_tensors)QUERN_DSV4_LAYER_STEP_TENSORS_INIT;
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
    quern_status status = make_pools(d, ctx);
    if (status == QUERN_OK && d->device != QUERN_CPU) status = move(d);
    if (status == QUERN_OK) status = quern_dsv4_layer_step_workspace(ctx, &d->params, &d->t, &d->bytes);
    if (status == QUERN_OK && (d->workspace = device_take(d->device, d->bytes + 1)) == NULL)
        status = QUERN_ERR_OUT_OF_MEMORY;
    return status == QUERN_OK ? device_clock_open(&d->clock, d->device) : status;
}

static void close_data(bench_run *r)
{
    layer_data *d = r->data;
    for (int i = 0; i < d->owned; i++) free(d->memory[i]);
    for (int i = 0; i < VIEWS; i++) device_free(d->device, d->moved[i]);
    device_free(d->device, d->device_block);
    device_free(d->device, d->workspace);
    device_clock_close(&d->clock);
    free(d);
}

/* A step, after which the sequences are what they were. */
static int run_call(bench_run *r, quern_context *ctx, double ms[2])
{
    layer_data *d = r->data;
    quern_status status = set_merged(d);
    const double start = now_ms();
    if (status == QUERN_OK)
        status = quern_ledger_begin(d->ledger, d->ids, d->counts, d->sizes.batch, d->block, d->block_bytes);
    if (status == QUERN_OK && d->device != QUERN_CPU)
        status = device_copy(d->device, d->device_block, d->block, d->block_bytes);
    if (status == QUERN_OK && d->device != QUERN_CPU) status = device_clock_start(&d->clock);
    if (status == QUERN_OK)
        status = quern_dsv4_layer_step(ctx, NULL, &d->params, &d->t, d->workspace, d->bytes);
    if (status == QUERN_OK && d->device != QUERN_CPU) status = device_clock_stop(&d->clock, ms);
    if (status == QUERN_OK) status = quern_ledger_abort(d->ledger); /* as commit, in the other direction */
    if (d->device == QUERN_CPU) ms[0] = now_ms() - start;
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* ---- work ---- */

/* What a call must read and multiply: weights once, and what its queries must see. */
static void count_work(const layer_data *d, formula_symbols *to)
{
    const layer_sizes *o = &d->sizes;
    const bool csa = o->kind == QUERN_DSV4_LAYER_CSA;
    const int64_t whole = d->had / d->ratio;
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
    d->device = r->what->device;
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
