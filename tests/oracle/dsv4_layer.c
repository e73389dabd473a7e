/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_layer.h"

#include "dot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t entries_of(const oracle_layer *l)
{
    return l->kind == ORACLE_SWA ? 0 : l->tokens / l->ratio;
}

int64_t oracle_layer_count(const oracle_layer *l, oracle_layer_weight weight)
{
    const int64_t series = l->kind == ORACLE_CSA   ? 2
                           : l->kind == ORACLE_HCA ? 1
                                                   : 0,
                  index = l->kind == ORACLE_CSA ? l->index_dim : 0;
    switch (weight) {
    case OW_SINKS: return l->heads;
    case OW_Q_A: return l->q_lora * l->width;
    case OW_Q_A_NORM: return l->q_lora;
    case OW_Q_B: return l->heads * l->dim * l->q_lora;
    case OW_KV: return l->dim * l->width;
    case OW_KV_NORM: return l->dim;
    case OW_O_A: return l->o_lora * l->heads * l->dim;
    case OW_O_B: return l->width * l->groups * l->o_lora;
    case OW_BIAS: return l->ratio * series * l->dim;
    case OW_CMP_KV:
    case OW_CMP_GATE: return series * l->dim * l->width;
    case OW_CMP_NORM: return series > 0 ? l->dim : 0;
    case OW_INDEX_BIAS: return l->ratio * 2 * index;
    case OW_INDEX_KV:
    case OW_INDEX_GATE: return 2 * index * l->width;
    case OW_INDEX_NORM: return index;
    case OW_INDEX_Q_B: return l->index_heads * index * l->q_lora;
    case OW_INDEX_HEADS: return index > 0 ? l->index_heads * l->width : 0;
    case ORACLE_LAYER_WEIGHTS: break;
    }
    return 0;
}

static double *zeros(int64_t count)
{
    double *x = calloc((size_t)count + 1, sizeof *x);
    if (x == NULL) abort();
    return x;
}

/* x w^T: [rows, in] by [out, in]. */
static double *linear(const double *x, const double *w, int64_t rows, int64_t in, int64_t out)
{
    double *y = zeros(rows * out);
    for (int64_t t = 0; t < rows; t++)
        for (int64_t n = 0; n < out; n++) y[t * out + n] = oracle_dot(x + t * in, w + n * in, in);
    return y;
}

/* Divides rows by their root mean square, and multiplies by a weight (NULL: 1). */
static void norm(double *x, const double *weight, int64_t rows, int64_t width, double eps)
{
    for (int64_t t = 0; t < rows; t++) {
        double *row = x + t * width, sum = 0;
        for (int64_t c = 0; c < width; c++) sum += row[c] * row[c];
        const double scale = 1 / sqrt(sum / (double)width + eps);
        for (int64_t c = 0; c < width; c++) row[c] *= scale * (weight != NULL ? weight[c] : 1);
    }
}

/* Rotates `heads` rows a token. */
static void rotate(const oracle_layer *l, double *x, const double *cos_sin, int64_t heads, int64_t width,
                   bool inverse)
{
    for (int64_t i = 0; i < l->tokens * heads; i++)
        oracle_dsv4_rotate(x + i * width, width, cos_sin, l->rope_dim, i / heads, inverse);
}

/* Copies columns [from, from + count) of `rows` rows to columns [to, ..) of others. */
static void put(double *y, int64_t y_columns, int64_t to, const double *x, int64_t x_columns, int64_t from,
                int64_t rows, int64_t count)
{
    for (int64_t t = 0; t < rows; t++)
        memcpy(y + t * y_columns + to, x + t * x_columns + from, (size_t)count * sizeof *y);
}

/* The entries of a compressor whose weights start at `first`, of `width` channels. */
static double *compress(const oracle_layer *l, const double *x, double *const w[], int first, int64_t width,
                        const double *cos_sin)
{
    const bool csa = l->kind == ORACLE_CSA;
    const int64_t series = csa ? 2 : 1, n = entries_of(l), columns = 2 * series * width, T = l->tokens;
    double *value = linear(x, w[first + 1], T, l->width, series * width),
           *gate = linear(x, w[first + 2], T, l->width, series * width);
    double *proj = zeros(T * columns), *b_a = zeros(l->ratio * width), *b_b = zeros(l->ratio * width);
    const int64_t a = (series - 1) * width; /* where series a stands in the weights */
    put(proj, columns, 0, value, series * width, a, T, width);
    put(proj, columns, width, gate, series * width, a, T, width);
    put(b_a, width, 0, w[first], series * width, a, l->ratio, width);
    if (csa) {
        put(proj, columns, 2 * width, value, series * width, 0, T, width);
        put(proj, columns, 3 * width, gate, series * width, 0, T, width);
        put(b_b, width, 0, w[first], series * width, 0, l->ratio, width);
    }
    const oracle_compressor c = {.ratio = l->ratio,
                                 .width = width,
                                 .overlap = csa,
                                 .blocks = n,
                                 .rope_dim = l->rope_dim,
                                 .eps = l->eps};
    const oracle_compress_arrays arrays = {.proj = proj,
                                           .b_a = b_a,
                                           .b_b = b_b,
                                           .norm_weight = w[first + 3],
                                           .cos_sin = cos_sin,
                                           .pooled = zeros(n * width),
                                           .out = zeros(n * width)};
    oracle_dsv4_pool(&c, &arrays);
    oracle_dsv4_finish(&c, &arrays);
    free(value), free(gate), free(proj), free(b_a), free(b_b), free(arrays.pooled);
    return arrays.out;
}

/* Hands an array over, or a copy of it. */
static void give(double *to, const double *from, int64_t count)
{
    if (to != NULL) memcpy(to, from, (size_t)count * sizeof *to);
}

static int32_t *choose(const oracle_layer *l, const double *x, double *const w[], const double *cos_sin,
                       const double *residual, const oracle_layer_results *to)
{
    const int64_t T = l->tokens, n = entries_of(l), width = l->index_dim, heads = l->index_heads;
    double *k = compress(l, x, w, OW_INDEX_BIAS, width, cos_sin),
           *q = linear(residual, w[OW_INDEX_Q_B], T, l->q_lora, heads * width),
           *weights = linear(x, w[OW_INDEX_HEADS], T, l->width, heads), *scores = zeros(T * n);
    int32_t *idx = calloc((size_t)(T * l->top_k) + 1, sizeof *idx);
    if (idx == NULL) abort();
    rotate(l, q, cos_sin, heads, width, false);
    for (int64_t i = 0; i < T * n; i++) scores[i] = -INFINITY;
    const oracle_indexer x_i = {
        .queries = T, .heads = heads, .width = width, .entries = n, .ratio = l->ratio};
    oracle_dsv4_scores(&x_i, q, k, weights, scores);
    for (int64_t t = 0; t < T; t++)
        oracle_dsv4_best(scores + t * n, oracle_dsv4_visible(n, l->ratio, t), l->top_k, idx + t * l->top_k);
    give(to->idx_k, k, n * width), give(to->idx_q, q, T * heads * width), give(to->idx_score, scores, T * n);
    free(k), free(q), free(weights), free(scores);
    return idx;
}

/* The grouped projection: heads of a group, head after head, to o_lora channels. */
static double *project_groups(const oracle_layer *l, const double *o, const double *w)
{
    const int64_t in = l->heads / l->groups * l->dim, all = l->groups * l->o_lora;
    double *y = zeros(l->tokens * all);
    for (int64_t t = 0; t < l->tokens; t++)
        for (int64_t n = 0; n < all; n++) {
            const double *from = o + t * l->heads * l->dim + n / l->o_lora * in;
            y[t * all + n] = oracle_dot(from, w + n * in, in);
        }
    return y;
}

void oracle_dsv4_layer(const oracle_layer *l, const double *x, double *const w[ORACLE_LAYER_WEIGHTS],
                       const double *cos_sin, const int32_t *chosen, const oracle_layer_results *to)
{
    const int64_t T = l->tokens, hd = l->heads * l->dim, n = entries_of(l);
    double *residual = linear(x, w[OW_Q_A], T, l->width, l->q_lora);
    norm(residual, w[OW_Q_A_NORM], T, l->q_lora, l->eps);
    double *q = linear(residual, w[OW_Q_B], T, l->q_lora, hd), *kv = linear(x, w[OW_KV], T, l->width, l->dim);
    norm(q, NULL, T * l->heads, l->dim, l->eps), rotate(l, q, cos_sin, l->heads, l->dim, false);
    norm(kv, w[OW_KV_NORM], T, l->dim, l->eps), rotate(l, kv, cos_sin, 1, l->dim, false);
    double *entries = l->kind != ORACLE_SWA ? compress(l, x, w, OW_BIAS, l->dim, cos_sin) : NULL;
    int32_t *idx = l->kind == ORACLE_CSA ? choose(l, x, w, cos_sin, residual, to) : NULL;
    double *core = zeros(T * hd), *lse = zeros(T * l->heads);
    const oracle_core c = {.queries = T,
                           .raw = T,
                           .entries = n,
                           .heads = l->heads,
                           .dim = l->dim,
                           .window = l->window,
                           .ratio = l->kind == ORACLE_SWA ? 1 : l->ratio,
                           .chosen = idx != NULL ? l->top_k : -1};
    const oracle_core_arrays arrays = {.q = q,
                                       .kv = kv,
                                       .kv_cmp = entries,
                                       .sink = w[OW_SINKS],
                                       .idx = chosen != NULL ? chosen : idx,
                                       .o = core,
                                       .lse = lse};
    oracle_dsv4_attend(&c, &arrays);
    give(to->core, core, T * hd);
    rotate(l, core, cos_sin, l->heads, l->dim, true);
    double *o_a = project_groups(l, core, w[OW_O_A]),
           *out = linear(o_a, w[OW_O_B], T, l->groups * l->o_lora, l->width);
    give(to->q_residual, residual, T * l->q_lora), give(to->q, q, T * hd), give(to->kv, kv, T * l->dim);
    if (entries != NULL) give(to->compressed, entries, n * l->dim);
    if (to->idx_topk != NULL && idx != NULL) memcpy(to->idx_topk, idx, (size_t)(T * l->top_k) * sizeof *idx);
    give(to->core_irope, core, T * hd), give(to->o_a, o_a, T * l->groups * l->o_lora);
    give(to->out, out, T * l->width);
    free(residual), free(q), free(kv), free(entries), free(idx), free(core), free(lse), free(o_a), free(out);
}
