/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_attention.c - `quern run v4-attention`: one call on the file's rows, or on a cache that holds them. */
#include "command.h"
#include "scenario.h"

#include <quern/dsv4.h>

#include <stdlib.h>
#include <string.h>

typedef struct attention_options {
    int64_t page;
    int format;
} attention_options;

static const char *const format_choices[] = {"input", "f32", "bf16", "row584", NULL};
enum { FORMAT_INPUT, FORMAT_F32, FORMAT_BF16, FORMAT_ROW584 };

#define AT(member) offsetof(attention_options, member)
static const option_row rows[] = {
    {"format", OPTION_CHOICE, AT(format), format_choices,
     "of a cache that KV and KV_cmp are written into; input: their own"},
    {"page", OPTION_INT, AT(page), NULL, "slots of its pages; 0: contiguous"},
};
#undef AT
static attention_options options;

/* A cache of one of the two tensors, and its memory. */
typedef struct row_cache {
    quern_tensor rows, table;
    void *memory, *named, *slots, *workspace;
} row_cache;

static void free_cache(row_cache *c)
{
    free(c->memory), free(c->named), free(c->slots), free(c->workspace);
}

static quern_dsv4_attention_params params_of(const job *j)
{
    quern_dsv4_attention_params p;
    memcpy(&p, &j->params, sizeof p);
    return p;
}

/* Makes a cache for rows of [B, n, D]; row i of a sequence has position first + i. The table names pages in
 * falling order. */
static int make_cache(const quern_tensor *from, int64_t first, row_cache *c)
{
    const bool bytes = options.format == FORMAT_ROW584;
    const int64_t batch = from->shape[0], n = from->shape[1], dim = from->shape[2], page = options.page;
    const int64_t columns = page > 0 ? (first + n + page - 1) / page : 0, width = bytes ? 584 : dim;
    const quern_dtype dtype = bytes                           ? QUERN_U8
                              : options.format == FORMAT_F32  ? QUERN_F32
                              : options.format == FORMAT_BF16 ? QUERN_BF16
                                                              : from->dtype;
    const int64_t contiguous[] = {batch, n, width}, pool[] = {batch * columns, page, width},
                  paged[] = {batch * columns, page * width};
    const int64_t table[] = {batch, columns}, count = batch * (page > 0 ? columns * page : n);
    c->memory = calloc((size_t)(count * width + 1), quern_dtype_size(dtype));
    c->named = malloc((size_t)(batch * columns + 1) * sizeof(int32_t));
    c->slots = malloc((size_t)(batch * n + 1) * sizeof(int32_t));
    if (c->memory == NULL || c->named == NULL || c->slots == NULL)
        return fail(EXIT_MACHINE, "no memory for a cache");
    c->rows = page == 0 ? quern_tensor_contiguous(c->memory, dtype, 3, contiguous)
              : bytes   ? quern_tensor_contiguous(c->memory, dtype, 2, paged)
                        : quern_tensor_contiguous(c->memory, dtype, 3, pool);
    c->table = quern_tensor_contiguous(c->named, QUERN_I32, 2, table);
    for (int64_t i = 0; i < batch * columns; i++)
        ((int32_t *)c->named)[i] = (int32_t)(batch * columns - 1 - i);
    for (int64_t i = 0; i < batch * n; i++) {
        const int64_t row = first + i % n, at = i / n * columns + (page > 0 ? row / page : 0);
        ((int32_t *)c->slots)[i] = (int32_t)(page > 0 ? (batch * columns - 1 - at) * page + row % page : i);
    }
    return EXIT_DONE;
}

static int fill_cache(quern_context *ctx, const quern_tensor *from, row_cache *c)
{
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    const int64_t n = from->shape[0] * from->shape[1];
    quern_tensor x = *from, cache = c->rows;
    const quern_tensor slots = quern_tensor_contiguous(c->slots, QUERN_I32, 1, &n);
    x.ndim = 2;
    x.shape[0] = n;
    x.shape[1] = from->shape[2];
    x.strides[0] = from->shape[2];
    x.strides[1] = 1;
    if (options.page == 0) {
        cache.ndim = 2;
        cache.shape[0] = n;
        cache.shape[1] = c->rows.shape[2];
        cache.strides[0] = c->rows.shape[2];
        cache.strides[1] = 1;
    }
    p.format = options.format == FORMAT_ROW584 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    p.page = options.page;
    t.x = &x;
    t.slots = &slots;
    t.cache = &cache;
    size_t bytes;
    quern_status status = quern_dsv4_store_workspace(ctx, &p, &t, &bytes);
    if (status != QUERN_OK) return fail_status(status);
    c->workspace = malloc(bytes + 1);
    if (c->workspace == NULL) return fail(EXIT_MACHINE, "no memory for the workspace");
    status = quern_dsv4_store(ctx, NULL, &p, &t, c->workspace, bytes);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* Checks that the file has every row that a query sees, as a cache of pages requires. */
static int check_rows(const job *j, const quern_tensor *q, const quern_tensor *kv, const quern_tensor *cmp,
                      int64_t *start)
{
    const quern_dsv4_attention_params p = params_of(j);
    const int64_t queries = q->shape[1], window = p.window > 0 ? p.window : 128,
                  chosen = tensor_named(j->op, "idx");
    const int64_t ratio = p.ratio > 0 ? p.ratio : j->tensors.t[chosen] != NULL ? 4 : 128;
    *start = p.start_abs_pos >= 0 ? p.start_abs_pos : kv->shape[1] - queries;
    const int64_t first = *start + queries - kv->shape[1],
                  oldest = *start >= window ? *start - window + 1 : 0;
    if (*start < 0 || first < 0 || first > oldest)
        return fail(EXIT_INPUT,
                    "--page: KV has the rows from position %lld on, query 0 stands at %lld: rows from 0 to "
                    "%lld on are accepted",
                    (long long)first, (long long)*start, (long long)oldest);
    if (cmp != NULL && cmp->shape[1] < (*start + queries) / ratio)
        return fail(EXIT_INPUT,
                    "--page: KV_cmp has %lld entries: the %lld that the last query sees are accepted",
                    (long long)cmp->shape[1], (long long)((*start + queries) / ratio));
    return EXIT_DONE;
}

static int from_cache(job *j, quern_context *ctx)
{
    const int kv_at = tensor_named(j->op, "KV"), cmp_at = tensor_named(j->op, "KV_cmp");
    const quern_tensor *q = j->tensors.t[tensor_named(j->op, "Q")], *kv = j->tensors.t[kv_at],
                       *cmp = j->tensors.t[cmp_at];
    row_cache cache[2];
    memset(cache, 0, sizeof cache);
    if (q == NULL || kv == NULL || q->ndim != 4 || kv->ndim != 3 || (cmp != NULL && cmp->ndim != 3) ||
        options.page < 0)
        return fail(EXIT_INPUT, "--format, --page: Q [B,T,H,D], KV [B,N,D], KV_cmp [B,S,D] and pages of 0 or "
                                "more slots are accepted");
    int64_t start = params_of(j).start_abs_pos, first = 0;
    int code = options.page > 0 ? check_rows(j, q, kv, cmp, &start) : EXIT_DONE;
    if (code == EXIT_DONE && options.page > 0) first = start + q->shape[1] - kv->shape[1];
    if (code == EXIT_DONE) code = make_cache(kv, first, &cache[0]);
    if (code == EXIT_DONE) code = fill_cache(ctx, kv, &cache[0]);
    if (code == EXIT_DONE && cmp != NULL) code = make_cache(cmp, 0, &cache[1]);
    if (code == EXIT_DONE && cmp != NULL) code = fill_cache(ctx, cmp, &cache[1]);
    if (code == EXIT_DONE) {
        quern_dsv4_attention_params p = params_of(j);
        p.format = options.format == FORMAT_ROW584 ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
        p.page = options.page;
        p.start_abs_pos = start;
        memcpy(&j->params, &p, sizeof p);
        job_bind(j, kv_at, &cache[0].rows);
        if (cmp != NULL) job_bind(j, cmp_at, &cache[1].rows);
        if (options.page > 0) job_bind(j, tensor_named(j->op, "kv_table"), &cache[0].table);
        if (options.page > 0 && cmp != NULL)
            job_bind(j, tensor_named(j->op, "kv_cmp_table"), &cache[1].table);
        code = job_prepare(j, ctx);
    }
    if (code == EXIT_DONE) code = job_run(j, ctx);
    for (int i = 0; i < 2; i++) free_cache(&cache[i]);
    return code;
}

static int compute(job *j, quern_context *ctx)
{
    if (options.format != FORMAT_INPUT || options.page != 0) return from_cache(j, ctx);
    const int code = job_prepare(j, ctx);
    return code == EXIT_DONE ? job_run(j, ctx) : code;
}

const scenario scenario_v4_attention = {.name = "v4-attention",
                                        .op = "v4-attention",
                                        .rows = rows,
                                        .row_count = sizeof rows / sizeof *rows,
                                        .options = &options,
                                        .cpu_only = true,
                                        .compute = compute};
