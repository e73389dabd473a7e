/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_layer.c - `quern run v4-layer`: whole sequences in one call, or in pieces from a cache. */
#include "books.h"
#include "command.h"
#include "device.h"
#include "scenario.h"

#include <quern/cuda.h>
#include <quern/dsv4_layer.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct layer_options {
    const char *chunks;
    int format, key_format;
    int64_t page;
} layer_options;

static const char *const format_choices[] = {"input", "f32", "bf16", "row584", NULL}, *const key_choices[] = {
                                                                                          "input", "fp8",
                                                                                          "fp8-power", "fp4",
                                                                                          NULL};
enum { FORMAT_INPUT, FORMAT_F32, FORMAT_BF16, FORMAT_ROW584 };

#define AT(member) offsetof(layer_options, member)
static const option_row rows[] = {
    {"chunks", OPTION_TEXT, AT(chunks), NULL,
     "3,1,7,...: pieces of so many tokens of every sequence, T in all, from a cache instead of one shot"},
    {"format", OPTION_CHOICE, AT(format), format_choices,
     "with --chunks: of the cache's raw rows and entries; input: in X's dtype"},
    {"key-format", OPTION_CHOICE, AT(key_format), key_choices,
     "with --chunks: of the indexer's keys; input: in the rows' dtype"},
    {"page", OPTION_INT, AT(page), NULL, "with --chunks: slots of a page of entries and keys; 0: 64"},
};
#undef AT
enum { CHUNKS_MAX = 65536 };
static layer_options options;

static quern_dsv4_layer_params params_of(const job *j)
{
    quern_dsv4_layer_params p;
    memcpy(&p, &j->params, sizeof p);
    return p;
}

static quern_dsv4_layer_tensors tensors_of(const job *j)
{
    quern_dsv4_layer_tensors t;
    memcpy(&t, &j->tensors, sizeof t);
    return t;
}

/* What a layer keeps of its sequences, on the device of the job. */
enum { RAW, ENTRIES, KEYS, STATES, MERGED, INDEX_STATES, INDEX_MERGED, POOLS };
typedef struct layer_pools {
    job *j;
    quern_dsv4_format format, key_format;
    books books;
    quern_tensor pool[POOLS]; /* ndim 0: the kind has none */
} layer_pools;

/* Bytes of a stored key or entry. */
static int64_t row_bytes(quern_dsv4_format format, int64_t dim)
{
    return format == QUERN_DSV4_ROW584 ? 584 : format == QUERN_DSV4_FP4 ? dim / 2 + dim / 32 : dim + 4;
}

static quern_status take_pool(layer_pools *l, int which, quern_dtype dtype, int32_t ndim, int64_t a,
                              int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};
    size_t bytes;
    if (!job_bytes(dtype, ndim, shape, &bytes)) return QUERN_ERR_OUT_OF_MEMORY;
    void *data = device_take(l->j->device, bytes + 1);
    l->pool[which] = device_tensor(l->j->device, data, dtype, ndim, shape);
    return data != NULL ? QUERN_OK : QUERN_ERR_OUT_OF_MEMORY;
}

/* A pool of pages of entries or keys. */
static quern_status take_pages(layer_pools *l, int which, quern_dsv4_format format, quern_dtype dtype,
                               int64_t dim)
{
    const int64_t pages = books_pages(&l->books, QUERN_DSV4_ENTRIES),
                  page = l->books.params.pools[QUERN_DSV4_ENTRIES].page;
    if (format == QUERN_DSV4_ROWS) return take_pool(l, which, dtype, 3, pages, page, dim);
    return take_pool(l, which, QUERN_U8, 2, pages, page * row_bytes(format, dim), 0);
}

/* The states of a compressor, without a ring: a file's tokens are not taken back. */
static quern_status take_states(layer_pools *l, int which, bool csa, int64_t dim)
{
    const int64_t slots = books_pages(&l->books, QUERN_LEDGER_STATES);
    const quern_status status = take_pool(l, which, QUERN_F32, 2, slots, (csa ? 6 : 3) * dim, 0);
    return status == QUERN_OK ? take_pool(l, which + 1, QUERN_I32, 1, slots, 0, 0) : status;
}

static quern_status make_pools(layer_pools *l)
{
    const quern_dsv4_layer_params p = params_of(l->j);
    const quern_dsv4_layer_tensors t = tensors_of(l->j);
    const bool csa = p.kind == QUERN_DSV4_LAYER_CSA;
    quern_dsv4_layer_cache_params c = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_ledger_params ledger = QUERN_LEDGER_PARAMS_INIT;
    c.kind = p.kind;
    c.dtype = t.x->dtype;
    c.sequences = t.x->shape[0] > 0 ? t.x->shape[0] : 1;
    c.capacity = t.x->shape[1] > 0 ? t.x->shape[1] : 1;
    c.dim = t.kv->shape[0];
    c.window = p.window;
    c.ratio = t.compressor_bias != NULL ? t.compressor_bias->shape[0] : 0;
    c.index_dim = t.indexer_norm != NULL ? t.indexer_norm->shape[0] : 0;
    if (options.format == FORMAT_F32) c.dtype = QUERN_F32;
    if (options.format == FORMAT_BF16) c.dtype = QUERN_BF16;
    c.format = l->format = options.format == FORMAT_ROW584 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    c.key_format = l->key_format = (quern_dsv4_format)options.key_format; /* in the order of the choices */
    c.page = options.page;
    quern_status status = quern_dsv4_layer_ledger_params(&c, &ledger);
    if (status == QUERN_OK) status = books_open(&l->books, &ledger, 1, l->j->device);
    if (status != QUERN_OK) return status;
    const bool bytes = l->format != QUERN_DSV4_ROWS;
    status = take_pool(l, RAW, bytes ? QUERN_U8 : c.dtype, 3, books_pages(&l->books, QUERN_DSV4_RAW),
                       ledger.pools[QUERN_DSV4_RAW].page, bytes ? row_bytes(l->format, c.dim) : c.dim);
    if (status != QUERN_OK || p.kind == QUERN_DSV4_LAYER_SWA) return status;
    status = take_pages(l, ENTRIES, l->format, c.dtype, c.dim);
    if (status == QUERN_OK) status = take_states(l, STATES, csa, c.dim);
    if (status == QUERN_OK && csa) status = take_pages(l, KEYS, l->key_format, c.dtype, c.index_dim);
    return status == QUERN_OK && csa ? take_states(l, INDEX_STATES, true, c.index_dim) : status;
}

static void free_pools(layer_pools *l)
{
    for (int i = 0; i < POOLS; i++) device_free(l->j->device, l->pool[i].data);
    books_close(&l->books);
}

/* The dimension of a shape such as "B H T D" that counts tokens, or entries where none does. */
static int32_t counted(const char *shape, bool *entries)
{
    int32_t dim = 0, of_entries = -1;
    *entries = false;
    for (const char *c = shape; *c != '\0'; c++) {
        const bool word = (c == shape || c[-1] == ' ') && (c[1] == ' ' || c[1] == '\0');
        if (word && *c == 'T') return dim;
        if (word && *c == 'S') of_entries = dim;
        dim += *c == ' ';
    }
    *entries = true;
    return of_entries;
}

/* Sequence b of a tensor [B, ..], and of its dimension dim the extents first ... first + count - 1. */
static quern_tensor piece_of(const quern_tensor *t, int64_t b, int32_t dim, int64_t first, int64_t count)
{
    const int64_t at = b * t->strides[0] + first * t->strides[dim];
    quern_tensor v = *t;
    v.data = (char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
    v.ndim = t->ndim - 1;
    for (int32_t i = 0; i < v.ndim; i++) {
        v.shape[i] = i + 1 == dim ? count : t->shape[i + 1];
        v.strides[i] = t->strides[i + 1];
    }
    return v;
}

/* The tensors of a call on tokens first ... first + count - 1 of sequence b. */
static quern_dsv4_layer_tensors pieces_of(const job *j, int64_t b, int64_t first, int64_t count,
                                          quern_tensor views[QUERN_OP_TENSORS_MAX])
{
    any_tensors all = j->tensors;
    quern_dsv4_layer_tensors t = tensors_of(j);
    const int64_t ratio = t.compressor_bias != NULL ? t.compressor_bias->shape[0] : 1;
    for (int32_t i = 0; i < j->op->info.tensor_count; i++) {
        bool entries;
        const int32_t dim = counted(j->op->tensors[i].fixed, &entries);
        if (all.t[i] == NULL || strncmp(j->op->tensors[i].fixed, "B ", 2) != 0) continue;
        const int64_t from = entries ? first / ratio : first, end = (first + count) / (entries ? ratio : 1);
        views[i] = piece_of(all.t[i], b, dim, from, end - from);
        all.t[i] = &views[i];
    }
    memcpy(&t, &all, sizeof t);
    return t;
}

/* The step's call of a whole layer's tensors: x, weights and results have the same names and order. */
static quern_dsv4_layer_step_tensors step_of(const layer_pools *l, const quern_dsv4_layer_tensors *of)
{
    enum { X = offsetof(quern_dsv4_layer_tensors, x), TO = offsetof(quern_dsv4_layer_tensors, d_out) };
    _Static_assert((int)TO - (int)offsetof(quern_dsv4_layer_tensors, o_a_out) == (int)sizeof(void *) &&
                       offsetof(quern_dsv4_layer_tensors, o_a_out) ==
                           offsetof(quern_dsv4_layer_step_tensors, o_a_out),
                   "x to o_a_out are the same");
    quern_dsv4_layer_step_tensors t = QUERN_DSV4_LAYER_STEP_TENSORS_INIT;
    const quern_tensor **const places[POOLS] = {
        &t.raw, &t.entries, &t.keys, &t.states, &t.merged, &t.indexer_states, &t.indexer_merged};
    memcpy((char *)&t + X, (const char *)of + X, TO - X);
    t.compressor_fp8 = of->compressor_fp8, t.compressor_fp8_scales = of->compressor_fp8_scales;
    t.compressor_codes = of->compressor_codes, t.compressor_scales = of->compressor_scales;
    t.compressor_global = of->compressor_global;
    t.indexer_fp8 = of->indexer_fp8, t.indexer_fp8_scales = of->indexer_fp8_scales;
    t.indexer_codes = of->indexer_codes, t.indexer_scales = of->indexer_scales;
    t.indexer_global = of->indexer_global;
    for (int i = 0; i < POOLS; i++) *places[i] = l->pool[i].ndim > 0 ? &l->pool[i] : NULL;
    t.slots = &l->books.step.slots;
    t.positions = &l->books.step.positions;
    t.cu = &l->books.step.cu;
    t.copies = &l->books.step.copies;
    t.raw_table = &l->books.step.tables[QUERN_DSV4_RAW];
    if (t.entries != NULL) t.entries_table = &l->books.step.tables[QUERN_DSV4_ENTRIES];
    return t;
}

static quern_status run_step(const layer_pools *l, quern_context *ctx, const quern_dsv4_layer_tensors *of)
{
    const quern_dsv4_layer_params p = params_of(l->j);
    const quern_dsv4_layer_step_tensors t = step_of(l, of);
    const quern_exec exec = job_exec(l->j);
    quern_dsv4_layer_step_params step = QUERN_DSV4_LAYER_STEP_PARAMS_INIT;
    size_t bytes;
    step.kind = p.kind, step.window = p.window, step.top_k = p.top_k, step.eps = p.eps;
    step.format = l->format, step.key_format = l->key_format;
    quern_status status = quern_dsv4_layer_step_workspace(ctx, &step, &t, &bytes);
    if (status != QUERN_OK) return status;
    void *workspace = device_take(l->j->device, bytes + 1);
    if (workspace == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    status = quern_dsv4_layer_step(ctx, &exec, &step, &t, workspace, bytes);
    if (status == QUERN_OK && l->j->device == QUERN_CUDA) status = quern_cuda_synchronize(0, NULL);
    device_free(l->j->device, workspace);
    return status;
}

static int run_piece(layer_pools *l, quern_context *ctx, int64_t b, int64_t first, int64_t count)
{
    quern_tensor views[QUERN_OP_TENSORS_MAX];
    const quern_dsv4_layer_tensors t = pieces_of(l->j, b, first, count, views);
    const int32_t id = (int32_t)b;
    quern_status status = books_begin(&l->books, &id, &count, 1);
    if (status != QUERN_OK) return fail_status(status);
    status = run_step(l, ctx, &t);
    if (status == QUERN_OK) status = quern_ledger_commit(l->books.ledger);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* The list of --chunks, checked against the tokens. */
static int read_pieces(const job *j, int64_t *pieces, int *count)
{
    const int64_t tokens = tensors_of(j).x->shape[1];
    int64_t sum = 0;
    *count = parse_integers(options.chunks, 0, INT32_MAX, pieces, CHUNKS_MAX);
    for (int i = 0; i < *count; i++) sum += pieces[i];
    if (*count >= 1 && sum == tokens) return EXIT_DONE;
    return fail(EXIT_USAGE, "--chunks '%s': a list of sizes that sum to the %lld tokens is accepted",
                options.chunks, (long long)tokens);
}

/* Scores that no piece writes are of entries that are not seen. */
static quern_status clear_scores(const job *j)
{
    const quern_tensor *t = tensors_of(j).idx_score;
    if (t == NULL) return QUERN_OK;
    const int64_t count = t->shape[0] * t->shape[1] * t->shape[2];
    float *host = malloc((size_t)(count + 1) * sizeof *host);
    if (host == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    for (int64_t i = 0; i < count; i++) host[i] = -INFINITY;
    const quern_status status = device_copy(j->device, t->data, host, (size_t)count * sizeof *host);
    free(host);
    return status;
}

static int in_pieces(job *j, quern_context *ctx)
{
    int64_t *pieces = malloc(CHUNKS_MAX * sizeof *pieces);
    layer_pools l = {.j = j};
    int count;
    if (pieces == NULL) return fail(EXIT_MACHINE, "no memory for the list of chunks");
    int code = read_pieces(j, pieces, &count);
    if (code == EXIT_DONE) {
        quern_status status = make_pools(&l);
        if (status == QUERN_OK) status = clear_scores(j);
        if (status == QUERN_ERR_OUT_OF_MEMORY) code = fail(EXIT_MACHINE, "no memory for a cache");
        else if (status != QUERN_OK) code = fail_status(status);
    }
    if (code == EXIT_DONE) code = job_watch(j);
    for (int64_t b = 0; code == EXIT_DONE && b < tensors_of(j).x->shape[0]; b++)
        for (int64_t i = 0, at = 0; i < count && code == EXIT_DONE; at += pieces[i++])
            code = run_piece(&l, ctx, b, at, pieces[i]);
    free_pools(&l);
    free(pieces);
    return job_faults(j, code);
}

/* A GPU does not hand out the core before it is rotated back. */
static int leave_out(job *j)
{
    if (j->device == QUERN_CUDA) j->without = "core";
    return EXIT_DONE;
}

static int compute(job *j, quern_context *ctx)
{
    int code = job_prepare(j, ctx);
    if (code != EXIT_DONE || options.chunks == NULL) return code == EXIT_DONE ? job_run(j, ctx) : code;
    code = in_pieces(j, ctx);
    if (code != EXIT_DONE || !j->backward) return code;
    code = job_watch(j);
    if (code != EXIT_DONE) return code;
    const quern_status status = job_pass(j, ctx, QUERN_OP_BACKWARD);
    return job_faults(j, status == QUERN_OK ? EXIT_DONE : fail_status(status));
}

const scenario scenario_v4_layer = {.name = "v4-layer",
                                    .op = "v4-layer",
                                    .rows = rows,
                                    .row_count = sizeof rows / sizeof *rows,
                                    .options = &options,
                                    .inputs = leave_out,
                                    .compute = compute};
