/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * error.c - f32 error of dense attention and NSA at N = 16384 against the float64 oracle, on sampled rows.
 *
 * The oracle uses the library's compressed keys and values and its selection, as docs/numerics.md says; gates
 * are 1/3 each. Prints a line per figure; exit code 1 if one misses.
 */
#include "oracle/attention.h"
#include "values.h"

#include <quern/attention.h>
#include <quern/nsa.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 16384, H = 4, HKV = 2, D = 128, L = 64, K = 16, W = 512, SAMPLES = 48 };
static const double bound = 2e-6;

/* The keys that a query sees in a branch of NSA. */
typedef struct branch_mask {
    enum { COMPRESSED, SELECTED, WINDOW } kind;
    int64_t tile;
    const int32_t *block_idx; /* [HKV, tiles, K] */
} branch_mask;

static bool branch_sees(const void *arg, int64_t head, int64_t t, int64_t j)
{
    const branch_mask *m = arg;
    if (m->kind == COMPRESSED) return j * L + L - 1 <= t;
    if (m->kind == WINDOW) return j <= t && j > t - W;
    const int64_t tiles = (N + m->tile - 1) / m->tile;
    const int32_t *list = m->block_idx + (head / (H / HKV) * tiles + t / m->tile) * K;
    for (int i = 0; i < K; i++)
        if (list[i] == j / L) return j <= t;
    return false;
}

static void *need(void *p)
{
    if (p == NULL) {
        fprintf(stderr, "no memory\n");
        exit(4);
    }
    return p;
}

static void check(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(5);
}

static quern_tensor make(quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    int64_t n = 1;
    for (int32_t i = 0; i < ndim; i++) n *= shape[i];
    return quern_tensor_contiguous(need(calloc((size_t)n + 1, quern_dtype_size(dtype))), dtype, ndim, shape);
}

static double *widen(const quern_tensor *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    double *out = need(malloc((size_t)(n + 1) * sizeof *out));
    for (int64_t i = 0; i < n; i++) out[i] = value_at(t, i);
    return out;
}

/* Query row s of the sample: the first, the last, and rows at uneven distances between them. */
static int64_t sampled_row(int s)
{
    return s == SAMPLES - 1 ? N - 1 : (int64_t)s * 349 % N;
}

static int report(const char *what, double difference, double norm)
{
    const double error = sqrt(difference / norm);
    printf("%-74s target <= %-8.3g measured %-8.3g %-8s %s\n", what, bound, error, "",
           error <= bound ? "PASS" : "FAIL");
    return error <= bound ? 0 : 1;
}

typedef struct inputs {
    quern_context *ctx;
    quern_tensor q, k, v, o;
    double *q64, *k64, *v64;
} inputs;

static int dense_error(inputs *in)
{
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    size_t bytes;
    t.q = &in->q;
    t.k = &in->k;
    t.v = &in->v;
    t.o = &in->o;
    check(quern_attention_forward_workspace(in->ctx, &params, &t, &bytes));
    void *workspace = need(malloc(bytes + 1));
    check(quern_attention_forward(in->ctx, NULL, &params, &t, workspace, bytes));
    free(workspace);
    const oracle_shape shape = {N, N, H, HKV, D, D, 0, 0, NULL};
    const oracle_range range = {N, N, true, 0, -1};
    double difference = 0, norm = 0, row[D];
    for (int s = 0; s < SAMPLES; s++) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t at = sampled_row(s);
            oracle_attend_row(&shape, oracle_range_sees, &range, in->q64, in->k64, in->v64, h, at, row);
            for (int64_t c = 0; c < D; c++) {
                const double e = value_at(&in->o, (at * H + h) * D + c) - row[c];
                difference += e * e;
                norm += row[c] * row[c];
            }
        }
    }
    return report("dense f32 forward, N 16384: relative L2 error against float64", difference, norm);
}

static int nsa_error(inputs *in, int64_t tile, quern_nsa_metric metric, const char *what)
{
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    const int64_t tiles = (N + tile - 1) / tile, compressed[] = {1, N / L, HKV, D},
                  lists[] = {1, HKV, tiles, K};
    quern_tensor k_cmp = make(QUERN_F32, 4, compressed), v_cmp = make(QUERN_F32, 4, compressed),
                 idx = make(QUERN_I32, 4, lists);
    size_t bytes;
    params.tile = tile;
    params.metric = metric;
    t.q = &in->q;
    t.k = &in->k;
    t.v = &in->v;
    t.o = &in->o;
    t.k_cmp = &k_cmp;
    t.v_cmp = &v_cmp;
    t.block_idx = &idx;
    check(quern_nsa_forward_workspace(in->ctx, &params, &t, &bytes));
    void *workspace = need(malloc(bytes + 1));
    check(quern_nsa_forward(in->ctx, NULL, &params, &t, workspace, bytes));
    free(workspace);
    double *kc = widen(&k_cmp), *vc = widen(&v_cmp), difference = 0, norm = 0, row[D], sum[D];
    for (int s = 0; s < SAMPLES; s++) {
        for (int64_t h = 0; h < H; h++) {
            const int64_t at = sampled_row(s);
            for (int b = 0; b < 3; b++) {
                const branch_mask mask = {b == 0 ? COMPRESSED : b == 1 ? SELECTED : WINDOW, tile, idx.data};
                const oracle_shape shape = {N, b == 0 ? N / L : N, H, HKV, D, D, 0, 0, NULL};
                oracle_attend_row(&shape, branch_sees, &mask, in->q64, b == 0 ? kc : in->k64,
                                  b == 0 ? vc : in->v64, h, at, row);
                for (int64_t c = 0; c < D; c++) sum[c] = (b == 0 ? 0 : sum[c]) + row[c] / 3;
            }
            for (int64_t c = 0; c < D; c++) {
                const double e = value_at(&in->o, (at * H + h) * D + c) - sum[c];
                difference += e * e;
                norm += sum[c] * sum[c];
            }
        }
    }
    free(kc);
    free(vc);
    free(k_cmp.data);
    free(v_cmp.data);
    free(idx.data);
    return report(what, difference, norm);
}

int main(void)
{
    const int64_t queries[] = {1, N, H, D}, keys[] = {1, N, HKV, D};
    inputs in = {NULL,
                 make(QUERN_F32, 4, queries),
                 make(QUERN_F32, 4, keys),
                 make(QUERN_F32, 4, keys),
                 make(QUERN_F32, 4, queries),
                 NULL,
                 NULL,
                 NULL};
    check(quern_context_create(NULL, &in.ctx));
    fill_normal(&in.q, 1);
    fill_normal(&in.k, 2);
    fill_normal(&in.v, 3);
    in.q64 = widen(&in.q);
    in.k64 = widen(&in.k);
    in.v64 = widen(&in.v);
    int failed = dense_error(&in);
    failed += nsa_error(&in, 64, QUERN_NSA_METRIC_MEAN_LOGIT,
                        "NSA f32 forward, tile 64, mean_logit, N 16384: relative L2 error");
    failed += nsa_error(&in, 1, QUERN_NSA_METRIC_SOFTMAX,
                        "NSA f32 forward, T 1, softmax, N 16384: relative L2 error");
    quern_context_destroy(in.ctx);
    free(in.q.data), free(in.k.data), free(in.v.data), free(in.o.data);
    free(in.q64), free(in.k64), free(in.v64);
    return failed > 0;
}
