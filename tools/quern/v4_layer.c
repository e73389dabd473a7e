/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_layer.c - `quern run v4-layer`: whole sequences in one call, or in pieces from a cache. */
#include "command.h"
#include "scenario.h"

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

static quern_status make_cache(const job *j, void *memory[2], quern_dsv4_layer_cache **cache)
{
    const quern_dsv4_layer_params p = params_of(j);
    const quern_dsv4_layer_tensors t = tensors_of(j);
    quern_dsv4_layer_cache_params c = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    size_t bytes[2];
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
    c.format = options.format == FORMAT_ROW584 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    c.key_format = (quern_dsv4_format)options.key_format; /* in the order of the choices */
    c.page = options.page;
    quern_status status = quern_dsv4_layer_cache_size(&c, &bytes[0], &bytes[1]);
    if (status != QUERN_OK) return status;
    for (int i = 0; i < 2; i++)
        if ((memory[i] = malloc(bytes[i])) == NULL) return QUERN_ERR_OUT_OF_MEMORY;
    return quern_dsv4_layer_cache_create(&c, memory[0], bytes[0], memory[1], bytes[1], cache);
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

static int run_piece(const job *j, quern_context *ctx, quern_dsv4_layer_cache *cache, int64_t b,
                     int64_t first, int64_t count)
{
    const quern_dsv4_layer_params p = params_of(j);
    quern_tensor views[QUERN_OP_TENSORS_MAX];
    const quern_dsv4_layer_tensors t = pieces_of(j, b, first, count, views);
    const int32_t id = (int32_t)b;
    size_t bytes;
    quern_status status = quern_dsv4_layer_decode_workspace(ctx, &p, cache, &id, &count, 1, &t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    void *workspace = malloc(bytes + 1);
    if (workspace == NULL) return fail(EXIT_MACHINE, "no memory for a workspace of %zu bytes", bytes);
    status = quern_dsv4_layer_decode(ctx, NULL, &p, cache, &id, &count, 1, &t, workspace, bytes);
    free(workspace);
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
static void clear_scores(const job *j)
{
    const quern_tensor *t = tensors_of(j).idx_score;
    if (t == NULL) return;
    for (int64_t i = 0; i < t->shape[0] * t->shape[1] * t->shape[2]; i++) ((float *)t->data)[i] = -INFINITY;
}

static int in_pieces(const job *j, quern_context *ctx)
{
    int64_t *pieces = malloc(CHUNKS_MAX * sizeof *pieces);
    void *memory[2] = {NULL, NULL};
    quern_dsv4_layer_cache *cache = NULL;
    int count;
    if (pieces == NULL) return fail(EXIT_MACHINE, "no memory for the list of chunks");
    int code = read_pieces(j, pieces, &count);
    if (code == EXIT_DONE) {
        const quern_status status = make_cache(j, memory, &cache);
        if (status == QUERN_ERR_OUT_OF_MEMORY) code = fail(EXIT_MACHINE, "no memory for a cache");
        else if (status != QUERN_OK) code = fail_status(status);
    }
    clear_scores(j);
    for (int64_t b = 0; code == EXIT_DONE && b < tensors_of(j).x->shape[0]; b++)
        for (int64_t i = 0, at = 0; i < count && code == EXIT_DONE; at += pieces[i++])
            code = run_piece(j, ctx, cache, b, at, pieces[i]);
    free(memory[0]), free(memory[1]);
    free(pieces);
    return code;
}

static int compute(job *j, quern_context *ctx)
{
    int code = job_prepare(j, ctx);
    if (code != EXIT_DONE || options.chunks == NULL) return code == EXIT_DONE ? job_run(j, ctx) : code;
    code = in_pieces(j, ctx);
    if (code != EXIT_DONE || !j->backward) return code;
    const quern_status status = job_pass(j, ctx, QUERN_OP_BACKWARD);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

const scenario scenario_v4_layer = {.name = "v4-layer",
                                    .op = "v4-layer",
                                    .rows = rows,
                                    .row_count = sizeof rows / sizeof *rows,
                                    .options = &options,
                                    .cpu_only = true,
                                    .compute = compute};
