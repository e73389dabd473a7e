/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hello.c - a complete program on the installed library: dense attention, then native sparse attention of the
 * same tokens. NSA's window branch, as wide as the sequence, must give what dense attention gives.
 *
 *   cc hello.c $(pkg-config --cflags --libs quern) -lm -o hello
 */
#include <quern/attention.h>
#include <quern/nsa.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1000, H = 4, HKV = 2, D = 64 };

/* Prints why the last call failed, and ends the program. */
static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

/* A new f32 tensor [1, N, heads, D] of numbers in -1 ... 1. */
static quern_tensor make(int64_t heads)
{
    const int64_t shape[] = {1, N, heads, D};
    float *data = malloc(sizeof *data * N * (size_t)heads * D);
    if (data == NULL) exit(1);
    for (int64_t i = 0; i < N * heads * D; i++) data[i] = 2 * (float)rand() / (float)RAND_MAX - 1;
    return quern_tensor_contiguous(data, QUERN_F32, 4, shape);
}

int main(void)
{
    quern_context *ctx;
    size_t bytes;
    need(quern_context_create(NULL, &ctx)); /* NULL: all processors, the best instructions that they have */
    quern_tensor q = make(H), k = make(HKV), v = make(HKV), dense = make(H), sparse = make(H),
                 window = make(H);

    quern_attention_params causal = QUERN_ATTENTION_PARAMS_INIT; /* the defaults: causal, 1 / sqrt(D) */
    quern_attention_tensors a = QUERN_ATTENTION_TENSORS_INIT;
    a.q = &q;
    a.k = &k;
    a.v = &v;
    a.o = &dense;
    need(quern_attention_forward_workspace(ctx, &causal, &a,
                                           &bytes)); /* from shapes alone: ask once, run often */
    void *workspace = malloc(bytes);
    need(quern_attention_forward(ctx, NULL, &causal, &a, workspace, bytes));
    free(workspace);

    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = 32;
    params.num_selected = 8;
    params.window = N;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &sparse;
    t.o_win = &window;
    need(quern_nsa_forward_workspace(ctx, &params, &t, &bytes));
    workspace = malloc(bytes);
    need(quern_nsa_forward(ctx, NULL, &params, &t, workspace, bytes));
    free(workspace);

    const float *x = dense.data, *y = window.data, *z = sparse.data;
    float most = 0, norm = 0;
    for (int64_t i = 0; i < N * H * D; i++) {
        most = fmaxf(most, fabsf(x[i] - y[i]));
        norm += z[i] * z[i];
    }
    printf("quern %s, %s, %d threads: |sparse| = %.3f, |window - dense| <= %.1e\n", quern_version(),
           quern_cpu_level_name(quern_context_cpu_level(ctx)), (int)quern_context_threads(ctx), sqrtf(norm),
           most);
    quern_context_destroy(ctx);
    free(q.data), free(k.data), free(v.data), free(dense.data), free(sparse.data), free(window.data);
    return most <= 1e-5f && norm > 0 ? 0 : 1;
}
