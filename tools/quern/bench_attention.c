/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_attention.c - attention and NSA: what their formulas count, NSA's workspace, and dense attention
 * beside it. */
#include "bench.h"

#include "command.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The number of (query, key) pairs of a causal sequence whose queries see at most `most` keys. */
static double causal_pairs(double n, double most)
{
    return most <= 0 || most >= n ? n * n / 2 : most * (most + 1) / 2 + (n - most) * most;
}

/* The pairs of one sequence. Documents of a varlen batch are equally long. */
static double attended_pairs(const bench_case *c, double n)
{
    if (strcmp(c->op->name, "attention") == 0) {
        const quern_attention_params *p = &c->params.attention;
        if (p->causal) return causal_pairs(n, (double)p->window);
        return p->window > 0 && (double)p->window < n ? n * (double)(p->window | 1) : n * n;
    }
    const quern_nsa_params *p = &c->params.nsa;
    const double l = (double)p->block_size, d = p->stride > 0 ? (double)p->stride : l,
                 select = p->select_block > 0 ? (double)p->select_block : l;
    const double groups = (double)p->max_compressed_groups * 128, entries = n >= l ? (n - l) / d + 1 : 0;
    const double half = p->causal ? 0.5 : 1;
    double pairs = 0;
    if (p->branches & QUERN_NSA_BRANCH_CMP)
        pairs += groups > 0 && groups < entries ? groups * n - (p->causal ? groups * groups * d / 2 : 0)
                                                : half * entries * n;
    const double chosen = (double)p->num_selected * select, wide = (double)(p->window | 1);
    if (p->branches & QUERN_NSA_BRANCH_SLC)
        pairs += p->causal ? causal_pairs(n, chosen) : n * fmin(n, chosen);
    if (p->branches & QUERN_NSA_BRANCH_WIN)
        pairs += p->causal ? causal_pairs(n, (double)p->window) : n * fmin(n, wide);
    return pairs;
}

/* (query, key) pairs that a score of selection takes: softmax per head, a mean logit per tile and list. */
static double scored_pairs(const bench_case *c, double n)
{
    const quern_nsa_params *p = &c->params.nsa;
    return n * n / (double)(p->stride > 0 ? p->stride : p->block_size) * (p->causal ? 0.5 : 1);
}

void bench_count_attention(const bench_case *c, const job *ran, formula_symbols *to)
{
    const double sequences = (double)(c->documents > 0 ? c->documents : c->batch),
                 n = c->documents > 0 ? (double)c->n / sequences : (double)c->n;
    const bool nsa = strcmp(c->op->info.group, "nsa") == 0;
    (void)ran;
    formula_set(to, "B", sequences);
    formula_set(to, "N", n);
    formula_set(to, "w", c->gate == GATE_WEIGHTS);
    formula_set(to, "given", c->gate == GATE_GIVEN);
    formula_set(to, "pairs",
                strcmp(c->op->name, "nsa-select") == 0 ? scored_pairs(c, n) : attended_pairs(c, n));
    if (!nsa) return;
    const quern_nsa_params *p = &c->params.nsa;
    const double l = (double)p->block_size, d = p->stride > 0 ? (double)p->stride : l;
    formula_set(to, "l", l);
    formula_set(to, "d", d);
    formula_set(to, "Nc", n >= l ? (n - l) / d + 1 : 0);
    formula_set(to, "Tq", (double)p->tile);
    formula_set(to, "Hs", (double)(p->scope == QUERN_NSA_SCOPE_HEAD ? c->heads : c->kv_heads));
}

const work_row *bench_variant_nsa(const bench_case *c, int pass)
{
    static const work_row mean = {LIMIT_PRODUCTS, "2 D B Hs pairs/Tq", NULL},
                          linear[] = {{LIMIT_F32, "2 l (D D + Dv Dv) B Hkv Nc", NULL},
                                      {LIMIT_F32, "4 l (D D + Dv Dv) B Hkv Nc", NULL}},
                          linear_input = {LIMIT_PRODUCTS, "2 l (D D + Dv Dv) B Hkv Nc", NULL};
    const quern_nsa_params *p = &c->params.nsa;
    if (strcmp(c->op->name, "nsa-select") == 0)
        return p->metric == QUERN_NSA_METRIC_MEAN_LOGIT ? &mean : NULL;
    if (p->compress != QUERN_NSA_COMPRESS_LINEAR) return NULL;
    return c->weights == WEIGHTS_INPUT && pass == 0 ? &linear_input : &linear[pass];
}

/* Of NSA's forward pass with O as the only result: the workspace over its bound, one copy
 * of K and V in panels in the compute dtype, compressed K and V, indices, statistics (LSE of three branches,
 * gates), 4 MiB a thread. */
json_t *bench_workspace(const bench_run *r, const bench_case *c, quern_context *ctx)
{
    const job *j = &r->job;
    any_tensors t = j->tensors;
    size_t bytes = 0;
    for (int32_t i = 0; i < c->op->info.tensor_count; i++)
        if (!j->input[i] && strcmp(c->op->tensors[i].name, "O") != 0) t.t[i] = NULL;
    if (quern_op_workspace(ctx, c->op->op, QUERN_OP_FORWARD, &j->params, &t, &bytes) != QUERN_OK) return NULL;
    const quern_nsa_params *p = &c->params.nsa;
    const double n = (double)c->n, h = (double)c->heads, kv = (double)c->kv_heads,
                 width = (double)(c->dim + c->dim_v);
    const double element = (double)quern_dtype_size((quern_dtype)c->dtype),
                 tiles = (n + (double)p->tile - 1) / (double)p->tile;
    const double computed =
        bench_compute_limit(c->dtype, quern_context_cpu_level(ctx)) == CEILING_BF16 ? 2 : 4;
    const double lists = p->scope == QUERN_NSA_SCOPE_HEAD ? h : kv;
    const double panels = n * kv * width * computed,
                 compressed = n / (double)(p->stride > 0 ? p->stride : p->block_size) * kv * width * element;
    const double indices = lists * tiles * (double)(p->num_selected + 1 + p->max_compressed_groups) * 4;
    const double statistics = n * h * 6 * 4, threads = (double)quern_context_threads(ctx) * 4 * 0x1p20;
    return json_pack("{s:f}", "workspace_fraction",
                     (double)bytes / (panels + compressed + indices + statistics + threads));
}

/* ---- dense attention beside NSA ---- */

static void close_dense(void *arg)
{
    job_free(arg);
    free(arg);
}

static void *open_dense(const bench_case *c, const job *j, quern_context *ctx)
{
    job *dense = malloc(sizeof *dense);
    bench_case attention = *c;
    (void)j;
    attention.op = operation_named("attention");
    attention.params = params_init(attention.op);
    attention.params.attention.causal = c->params.nsa.causal;
    attention.params.attention.scale = c->params.nsa.scale;
    if (dense == NULL || bench_open(dense, &attention, ctx, false) == EXIT_DONE) return dense;
    close_dense(dense);
    return NULL;
}

static bool run_dense(void *arg, quern_context *ctx, double ms[2])
{
    job *j = arg;
    if (job_flush(j) != EXIT_DONE || job_run(j, ctx) != EXIT_DONE) return false;
    ms[0] = j->forward_ms;
    ms[1] = j->backward ? j->backward_ms : 0;
    return true;
}

const bench_peer peer_dense = {"dense", open_dense, run_dense, close_dense};
