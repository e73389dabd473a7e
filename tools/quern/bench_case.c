/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_case.c - the least work of an operation. */
#include "bench.h"

#include <math.h>
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

ceiling bench_compute_limit(int dtype, quern_cpu_level level)
{
    if (level < QUERN_CPU_LEVEL_AVX2) return CEILINGS;
    if (level == QUERN_CPU_LEVEL_AVX2) return CEILING_FMA256;
    return dtype == QUERN_BF16 && level == QUERN_CPU_LEVEL_AVX512BF16 ? CEILING_BF16 : CEILING_FMA512;
}

work bench_work(const bench_case *c, bool backward, quern_cpu_level level)
{
    const double element = (double)quern_dtype_size((quern_dtype)c->dtype),
                 rows = (double)c->batch * (double)c->n;
    const double d = (double)c->dim, dv = (double)c->dim_v, h = (double)c->heads, kv = (double)c->kv_heads;
    const double sequences = c->documents > 0 ? (double)c->documents : (double)c->batch,
                 length = rows / sequences;
    work w = {0, 0, CEILINGS, ""};
    if (strcmp(c->op->name, "attention") == 0 || strcmp(c->op->name, "nsa") == 0) {
        const double heads = sequences * h * attended_pairs(c, length);
        w.flops = heads * (backward ? 2 * (3 * d + 2 * dv) : 2 * (d + dv));
        w.limit = bench_compute_limit(c->dtype, level);
        w.formula = backward ? "2 (3 D + 2 Dv) B H pairs" : "2 (D + Dv) B H pairs";
    } else if (strcmp(c->op->name, "nsa-select") == 0) {
        const quern_nsa_params *p = &c->params.nsa;
        const double l = (double)p->block_size, stride = p->stride > 0 ? (double)p->stride : l;
        const bool mean = p->metric == QUERN_NSA_METRIC_MEAN_LOGIT;
        const double lists = p->scope == QUERN_NSA_SCOPE_HEAD ? h : kv,
                     scorers = mean ? lists / (double)p->tile : 2 * h;
        w.flops = 2 * d * scorers * rows * length / stride * (p->causal ? 0.5 : 1);
        w.limit = bench_compute_limit(c->dtype, level);
        w.formula = mean ? "2 D B (N / Tq) Hs Nc / 2" : "2 passes of 2 D B N H Nc / 2";
    } else if (strcmp(c->op->name, "nsa-compress") == 0) {
        const double l = (double)c->params.nsa.block_size,
                     stride = c->params.nsa.stride > 0 ? (double)c->params.nsa.stride : l;
        if (c->params.nsa.compress == QUERN_NSA_COMPRESS_LINEAR) {
            w.flops = (backward ? 4 : 2) * sequences * (length >= l ? (length - l) / stride + 1 : 0) * l *
                      kv * (d * d + dv * dv);
            w.limit =
                bench_compute_limit(c->weights == WEIGHTS_INPUT && !backward ? c->dtype : QUERN_F32, level);
            w.formula = backward ? "4 l (D D + Dv Dv) B Hkv Nc" : "2 l (D D + Dv Dv) B Hkv Nc";
            return w;
        }
        const double tokens = rows * kv * (d + dv) * element;
        w.bytes = tokens * (1 + 1 / stride);
        w.limit = backward ? CEILING_WRITE : CEILING_READ;
        w.formula = backward ? "dK, dV written, dK_cmp, dV_cmp read" : "K, V read, K_cmp, V_cmp written";
    } else {
        const double query = rows * h * d * element, value = rows * h * dv * element,
                     gates = rows * h * 3 * 4;
        const bool weights = c->gate == GATE_WEIGHTS;
        w.bytes = backward ? 7 * value + (weights ? 2 * query : 0) + (c->gate == GATE_GIVEN ? 2 : 1) * gates
                           : 4 * value + (weights ? query : 0) + gates;
        w.limit = CEILING_COPY;
        w.formula = backward ? "Q, dO, O_b, gates read, dO_b, dQ written" : "Q, O_b read, O, gates written";
    }
    return w;
}

double bench_workspace(const job *j, const bench_case *c, quern_context *ctx)
{
    any_tensors t = j->tensors;
    size_t bytes = 0;
    if (strcmp(c->op->name, "nsa") != 0) return 0;
    for (int32_t i = 0; i < c->op->info.tensor_count; i++)
        if (!j->input[i] && strcmp(c->op->tensors[i].name, "O") != 0) t.t[i] = NULL;
    if (quern_op_workspace(ctx, c->op->op, QUERN_OP_FORWARD, &j->params, &t, &bytes) != QUERN_OK) return 0;
    const quern_nsa_params *p = &c->params.nsa;
    const double n = (double)c->n, h = (double)c->heads, kv = (double)c->kv_heads,
                 width = (double)(c->dim + c->dim_v);
    const double element = (double)quern_dtype_size((quern_dtype)c->dtype),
                 tiles = (n + (double)p->tile - 1) / (double)p->tile;
    const double computed =
        c->dtype == QUERN_BF16 && quern_context_cpu_level(ctx) == QUERN_CPU_LEVEL_AVX512BF16 ? 2 : 4;
    const double lists = p->scope == QUERN_NSA_SCOPE_HEAD ? h : kv;
    const double panels = n * kv * width * computed,
                 compressed = n / (double)(p->stride > 0 ? p->stride : p->block_size) * kv * width * element;
    const double indices = lists * tiles * (double)(p->num_selected + 1 + p->max_compressed_groups) * 4;
    const double statistics = n * h * 6 * 4, threads = (double)quern_context_threads(ctx) * 4 * 0x1p20;
    return (double)bytes / (panels + compressed + indices + statistics + threads);
}

double row_rate(const bench_row *row)
{
    return (row->work.flops > 0 ? row->work.flops : row->work.bytes) / row->measured.time.median * 1e-6;
}
