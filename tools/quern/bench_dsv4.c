/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_dsv4.c - DeepSeek-V4's compressors, indexer and attention core: what their formulas count, the caches
 * that they read from, and tokens that are appended one by one. */
#include "bench.h"

#include "command.h"
#include "device.h"
#include "values.h"

#include <quern/dsv4.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROPE = 64, BLOCK = 128, WEIGHTS_FLOATS = 0, WEIGHTS_FP8, WEIGHTS_NVFP4 };

/* ---- compressors ---- */

/* Channels that turn. */
static int64_t rope_of(int64_t width)
{
    return width < ROPE ? width / 2 * 2 : ROPE;
}

static bool is_csa(const bench_case *c)
{
    return strcmp(c->subject->name, "hca-compress") != 0;
}

int bench_check_compressor(const bench_case *c)
{
    const int64_t index = bench_extent_of(c, "index-width");
    if (bench_extent_of(c, "hidden") == 0 && bench_choice_of(c, "weights") != WEIGHTS_FLOATS)
        return fail(EXIT_USAGE, "--weights: fp8 and nvfp4 are accepted with --hidden");
    if (index > 0 && !is_csa(c))
        return fail(EXIT_USAGE, "--index-width %" PRId64 ": 0 is accepted by hca-compress", index);
    return EXIT_DONE;
}

void bench_count_compressor(const bench_case *c, const job *ran, formula_symbols *to)
{
    const int64_t width = bench_extent_of(c, "width"), hidden = bench_extent_of(c, "hidden"),
                  index = bench_extent_of(c, "index-width"), parts = is_csa(c) ? 4 : 2,
                  ratio = is_csa(c) ? 4 : 128, entries = c->n / ratio,
                  blocks_c = (parts * width + BLOCK - 1) / BLOCK, blocks_dm = (hidden + BLOCK - 1) / BLOCK;
    const int weights = bench_choice_of(c, "weights");
    (void)ran;
    formula_set(to, "r", (double)ratio);
    formula_set(to, "m", (double)parts);
    formula_set(to, "csa", is_csa(c));
    formula_set(to, "S", (double)entries);
    formula_set(to, "R", (double)rope_of(index > 0 && index < width ? index : width));
    formula_set(to, "cols", (double)(parts * width + 4 * index));
    formula_set(to, "proj", hidden == 0);
    formula_set(to, "floats", weights == WEIGHTS_FLOATS);
    formula_set(to, "fp8", weights == WEIGHTS_FP8);
    formula_set(to, "nvfp4", weights == WEIGHTS_NVFP4);
    formula_set(to, "blocks_C", (double)blocks_c);
    formula_set(to, "blocks_Dm", (double)blocks_dm);
}

const work_row *bench_variant_compressor(const bench_case *c, int pass)
{
    static const work_row products[] = {{LIMIT_PRODUCTS, "2 n cols Dm", NULL},
                                        {LIMIT_F32, "6 n cols Dm", NULL}};
    return bench_extent_of(c, "hidden") > 0 ? &products[pass] : NULL;
}

/* ---- indexer and core ---- */

static bool is_core(const bench_case *c)
{
    return strcmp(c->subject->name, "v4-attention") == 0;
}

/* The format of the cache, of row_cache_all. */
static int format_of(const bench_case *c)
{
    const char *word = c->subject->choices[0].words[c->choice[0]];
    int format = 0;
    while (strcmp(row_cache_all[format], word) != 0) format++;
    return format;
}

static bool has_caches(const bench_case *c)
{
    return c->choice[0] != 0 || bench_extent_of(c, "page") > 0;
}

int bench_check_caches(const bench_case *c)
{
    if (has_caches(c) && c->backward)
        return fail(EXIT_USAGE, "--format, --page: a cache is accepted without --backward");
    if (!is_core(c) && bench_extent_of(c, "top-k") == 0)
        return fail(EXIT_USAGE, "--top-k 0: 1 or more is accepted by v4-index");
    return EXIT_DONE;
}

void bench_count_v4(const bench_case *c, const job *ran, formula_symbols *to)
{
    const int64_t asked = bench_extent_of(c, "queries"), queries = asked > 0 && asked < c->n ? asked : c->n,
                  ratio = bench_extent_of(c, "ratio"), window = bench_extent_of(c, "window"),
                  k = bench_extent_of(c, "top-k"), width = bench_extent_of(c, "width"),
                  entries = c->n / ratio;
    double pairs = 0;
    (void)ran;
    for (int64_t t = c->n - queries; t < c->n; t++) {
        const int64_t seen = (t + 1) / ratio, chosen = k > 0 && k < seen ? k : seen;
        pairs += (double)(is_core(c) ? chosen + (t + 1 < window ? t + 1 : window) : seen);
    }
    formula_set(to, "pairs", pairs);
    formula_set(to, "T", (double)queries);
    formula_set(to, "start", (double)(c->n - queries));
    formula_set(to, "S", (double)entries);
    formula_set(to, "N", (double)(queries + window - 1 < c->n ? queries + window - 1 : c->n));
    formula_set(to, "R", (double)rope_of(width));
}

void bench_count_index_loss(const bench_case *c, const job *ran, formula_symbols *to)
{
    const int64_t asked = bench_extent_of(c, "queries"), queries = asked > 0 && asked < c->n ? asked : c->n,
                  ratio = bench_extent_of(c, "ratio"), k = bench_extent_of(c, "top-k"),
                  entries = c->n / ratio;
    double pairs = 0;
    (void)ran;
    for (int64_t t = c->n - queries; t < c->n; t++) {
        const int64_t seen = (t + 1) / ratio;
        pairs += (double)(k > 0 && k < seen ? k : seen);
    }
    formula_set(to, "pairs", pairs);
    formula_set(to, "T", (double)queries);
    formula_set(to, "start", (double)(c->n - queries));
    formula_set(to, "S", (double)entries);
}

/* Keys in f32 are multiplied in f32. */
const work_row *bench_variant_index(const bench_case *c, int pass)
{
    static const work_row floats = {LIMIT_F32, "2 B H D pairs", NULL};
    (void)pass;
    return format_of(c) == ROW_CACHE_F32 ? &floats : NULL;
}

/* A tensor of the job goes through a cache: row 0 stands at position `first`. */
static int use_cache(bench_run *r, int i, const char *rows, const char *table, int64_t first,
                     quern_context *ctx)
{
    job *j = &r->job;
    const int at = tensor_named(j->op, rows);
    const int64_t page = bench_extent_of(r->what, "page");
    const int code =
        row_cache_make(ctx, NULL, j->tensors.t[at], first, format_of(r->what), page, &r->cache[i]);
    if (code != EXIT_DONE) return code;
    job_bind(j, at, &r->cache[i].rows);
    if (page > 0) job_bind(j, tensor_named(j->op, table), &r->cache[i].table);
    return EXIT_DONE;
}

int bench_prepare_caches(bench_run *r, quern_context *ctx)
{
    const bench_case *c = r->what;
    job *j = &r->job;
    char page[24];
    if (!has_caches(c)) return EXIT_DONE;
    const char *format =
        row_cache_format(format_of(c)) == QUERN_DSV4_ROWS ? "rows" : row_cache_all[format_of(c)];
    snprintf(page, sizeof page, "%" PRId64, bench_extent_of(c, "page"));
    if (quern_op_set(j->op->op, &j->params, is_core(c) ? "format" : "key-format", format) != QUERN_OK ||
        quern_op_set(j->op->op, &j->params, "page", page) != QUERN_OK)
        return fail(EXIT_INPUT, "%s", quern_last_error(NULL));
    if (!is_core(c)) return use_cache(r, 0, "k_I", "k_table", 0, ctx);
    const int64_t first = c->n - j->tensors.t[tensor_named(j->op, "KV")]->shape[1];
    const int code = use_cache(r, 0, "KV", "kv_table", first, ctx);
    return code == EXIT_DONE ? use_cache(r, 1, "KV_cmp", "kv_cmp_table", 0, ctx) : code;
}

/* ---- appending ---- */

enum { RATIO = 4, TOKENS = 4096, STATE = 0, WORKSPACE, PROJ, B_A, B_B, NORM, TABLE, OUT, BOOKS, MEMORIES };

/* Times of appends, and what they use. */
typedef struct appends {
    int device;
    void *memory[MEMORIES];
    size_t bytes; /* of the workspace */
    double ms[2][TOKENS];
    int counts[2]; /* without an entry, with one */
    quern_tensor t[MEMORIES];
    device_clock clock;
} appends;

static bool make(appends *a, int i, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    void *values = bench_allocate((size_t)(rows * (columns > 0 ? columns : 1)) * quern_dtype_size(dtype) + 1);
    const quern_tensor host = quern_tensor_contiguous(values, dtype, columns > 0 ? 2 : 1, shape);
    if (values == NULL) return false;
    if (i != OUT) fill_normal(&host, (uint64_t)i);
    a->t[i] = device_tensor_of(a->device, &host);
    a->memory[i] = a->t[i].data;
    free(values);
    return a->memory[i] != NULL;
}

/* Appends tokens one by one to a state; times those that complete a block separately. */
static quern_status run_appends(appends *a, const bench_case *c, quern_context *ctx)
{
    const int64_t width = bench_extent_of(c, "width"), ring = bench_extent_of(c, "ring"),
                  n = c->n < TOKENS ? c->n : TOKENS, one = 1;
    quern_dsv4_compress_params params = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    size_t most = (size_t)1 << 20;
    int32_t books[] = {0, 0, 0, 0, 1}; /* slot, position, merged, cu */
    int32_t *const at = a->memory[BOOKS] = device_take(a->device, sizeof books);
    const quern_tensor slots = device_tensor(a->device, at, QUERN_I32, 1, &one),
                       positions = device_tensor(a->device, at + 1, QUERN_I32, 1, &one),
                       merged = device_tensor(a->device, at + 2, QUERN_I32, 1, &one),
                       offsets = device_tensor(a->device, at + 3, QUERN_I32, 1, (const int64_t[]){2});
    params.kind = QUERN_DSV4_CSA;
    params.ratio = RATIO;
    a->memory[WORKSPACE] = device_take(a->device, most);
    if (at == NULL || a->memory[WORKSPACE] == NULL || !make(a, STATE, QUERN_F32, 1, (6 + 4 * ring) * width) ||
        !make(a, PROJ, (quern_dtype)c->dtype, n, 4 * width) || !make(a, B_A, QUERN_F32, RATIO, width) ||
        !make(a, B_B, QUERN_F32, RATIO, width) || !make(a, NORM, QUERN_F32, width, 0) ||
        !make(a, TABLE, QUERN_F32, n, rope_of(width)) || !make(a, OUT, (quern_dtype)c->dtype, 1, width))
        return QUERN_ERR_OUT_OF_MEMORY;
    quern_tensor proj = a->t[PROJ];
    proj.shape[0] = 1;
    t = (quern_dsv4_append_tensors){.size = sizeof t, .proj = &proj, .out = &a->t[OUT], .b_a = &a->t[B_A]};
    t.b_b = &a->t[B_B];
    t.norm_weight = &a->t[NORM];
    t.cos_sin = &a->t[TABLE];
    t.slots = &slots;
    t.positions = &positions;
    t.cu = &offsets;
    t.states = &a->t[STATE];
    t.merged = &merged;
    size_t bytes = 0;
    quern_status status = quern_dsv4_append_step_workspace(ctx, &params, &t, &bytes);
    if (status == QUERN_OK && bytes > most) status = QUERN_ERR_WORKSPACE;
    if (status == QUERN_OK) status = device_copy(a->device, at, books, sizeof books);
    for (int64_t i = 0; i < n && status == QUERN_OK; i++) {
        const bool commit = (i + 1) % RATIO == 0;
        const int32_t position = (int32_t)i;
        status = device_copy(a->device, at + 1, &position, sizeof position);
        proj.data = (char *)a->memory[PROJ] + i * 4 * width * (int64_t)quern_dtype_size(proj.dtype);
        if (status == QUERN_OK) status = device_clock_start(&a->clock);
        if (status == QUERN_OK)
            status = quern_dsv4_append_step(ctx, NULL, &params, &t, a->memory[WORKSPACE], most);
        if (status == QUERN_OK)
            status = device_clock_stop(&a->clock, &a->ms[commit][a->counts[commit]++]);
    }
    return status;
}

int bench_append(const bench_case *c, quern_context *ctx, bench_results *to)
{
    appends *a = need_memory(sizeof *a);
    memset(a, 0, sizeof *a);
    a->device = c->device;
    quern_status status = device_clock_open(&a->clock, a->device);
    if (status == QUERN_OK) status = run_appends(a, c, ctx);
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        bench_result *row = bench_add(to, c, ctx, i == 0 ? "csa-append" : "csa-append+commit");
        row->measured.time = timing_of(a->ms[i], a->counts[i]);
        report_row(to, row);
    }
    for (int i = 0; i < MEMORIES; i++) device_free(a->device, a->memory[i]);
    device_clock_close(&a->clock);
    free(a);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}
