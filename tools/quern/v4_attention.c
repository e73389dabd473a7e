/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_attention.c - `quern run v4-attention`: one call on the file's rows, or on a cache that holds them. */
#include "command.h"
#include "row_cache.h"
#include "scenario.h"

#include <quern/dsv4.h>

#include <string.h>

typedef struct attention_options {
    int64_t page;
    int format;
} attention_options;

#define AT(member) offsetof(attention_options, member)
static const option_row rows[] = {
    {"format", OPTION_CHOICE, AT(format), row_cache_choices,
     "of a cache that KV and KV_cmp are written into; input: their own"},
    {"page", OPTION_INT, AT(page), NULL, "slots of its pages; 0: contiguous"},
};
#undef AT
static attention_options options;

static quern_dsv4_attention_params params_of(const job *j)
{
    quern_dsv4_attention_params p;
    memcpy(&p, &j->params, sizeof p);
    return p;
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
    if (*start > INT32_MAX)
        return fail(EXIT_INPUT, "start_abs_pos is %lld: -1 to %d is accepted", (long long)*start, INT32_MAX);
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
    if (code == EXIT_DONE) code = job_watch(j);
    const quern_exec exec = job_exec(j);
    if (code == EXIT_DONE)
        code = row_cache_make(ctx, &exec, kv, first, options.format, options.page, &cache[0]);
    if (code == EXIT_DONE && cmp != NULL)
        code = row_cache_make(ctx, &exec, cmp, 0, options.format, options.page, &cache[1]);
    code = job_faults(j, code);
    if (code == EXIT_DONE) {
        quern_dsv4_attention_params p = params_of(j);
        p.format = row_cache_format(options.format);
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
    for (int i = 0; i < 2; i++) row_cache_free(&cache[i]);
    return code;
}

static int compute(job *j, quern_context *ctx)
{
    const bool cached = options.format != ROW_CACHE_INPUT || options.page != 0;
    if (cached) return from_cache(j, ctx);
    const int code = job_prepare(j, ctx);
    return code == EXIT_DONE ? job_run(j, ctx) : code;
}

const scenario scenario_v4_attention = {.name = "v4-attention",
                                        .op = "v4-attention",
                                        .rows = rows,
                                        .row_count = sizeof rows / sizeof *rows,
                                        .options = &options,
                                        .compute = compute};
