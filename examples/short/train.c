/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * train.c - one layer of native sparse attention trained in C: tokens are projected to queries, keys and
 * values, NSA attends, and its backward gives the gradients for plain descent. The targets are the outputs of
 * a layer of the same kind with other weights, the loss must fall to a fifth.
 *
 *   cc train.c $(pkg-config --cflags --libs quern) -lm -o train
 */
#include <quern/nsa.h>

#include <stdio.h>
#include <stdlib.h>

enum { N = 512, DM = 32, H = 4, HKV = 1, D = 16, STEPS = 100 };

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

/* A new tensor [1, extents...] of zeros. */
static quern_tensor make(quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {1, a, b, c};
    void *data = calloc((size_t)(a * b * c), quern_dtype_size(dtype));
    if (data == NULL) exit(1);
    return quern_tensor_contiguous(data, dtype, ndim, shape);
}

static quern_tensor random_weight(int64_t columns)
{
    quern_tensor w = make(QUERN_F32, 3, DM, columns, 1);
    for (int64_t i = 0; i < DM * columns; i++) ((float *)w.data)[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return w;
}

/* y [N, columns] = x [N, DM] w [DM, columns]. */
static void project(const float *x, const quern_tensor *w, quern_tensor *y)
{
    const int64_t columns = w->shape[2];
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < columns; c++) {
            float sum = 0;
            for (int64_t i = 0; i < DM; i++) sum += x[n * DM + i] * ((float *)w->data)[i * columns + c];
            ((float *)y->data)[n * columns + c] = sum;
        }
}

/* w -= rate x^T dy. */
static void descend(const float *x, const quern_tensor *dy, quern_tensor *w, float rate)
{
    const int64_t columns = w->shape[2];
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < DM; i++)
            for (int64_t c = 0; c < columns; c++)
                ((float *)w->data)[i * columns + c] -=
                    rate * x[n * DM + i] * ((float *)dy->data)[n * columns + c];
}

int main(void)
{
    static float x[N * DM], target[N * H * D];
    quern_tensor teacher[] = {random_weight(H * D), random_weight(HKV * D), random_weight(HKV * D)};
    quern_tensor student[] = {random_weight(H * D), random_weight(HKV * D), random_weight(HKV * D)};
    for (int i = 0; i < N * DM; i++) x[i] = 2 * (float)rand() / (float)RAND_MAX - 1;

    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = 16;
    params.num_selected = 4;
    params.window = 32;
    const int64_t entries = quern_nsa_entries(&params, N), tiles = quern_nsa_tiles(&params, N);
    /* q, k, v, their gradients, the result and its gradient; */
    quern_tensor in[] = {make(QUERN_F32, 4, N, H, D), make(QUERN_F32, 4, N, HKV, D),
                         make(QUERN_F32, 4, N, HKV, D)};
    quern_tensor d_in[] = {make(QUERN_F32, 4, N, H, D), make(QUERN_F32, 4, N, HKV, D),
                           make(QUERN_F32, 4, N, HKV, D)};
    quern_tensor o = make(QUERN_F32, 4, N, H, D), d_o = make(QUERN_F32, 4, N, H, D);
    /* and what the forward keeps for the backward: compressed entries, chosen blocks, LSE of each branch. */
    quern_tensor k_cmp = make(QUERN_F32, 4, entries, HKV, D), v_cmp = make(QUERN_F32, 4, entries, HKV, D),
                 blocks = make(QUERN_I32, 4, HKV, tiles, params.num_selected), lse[3];
    for (int b = 0; b < 3; b++) lse[b] = make(QUERN_F32, 3, H, N, 1);
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &in[0], t.k = &in[1], t.v = &in[2], t.o = &o;
    t.d_q = &d_in[0], t.d_k = &d_in[1], t.d_v = &d_in[2], t.d_o = &d_o;
    t.k_cmp = &k_cmp, t.v_cmp = &v_cmp, t.block_idx = &blocks;
    t.lse_cmp = &lse[0], t.lse_slc = &lse[1], t.lse_win = &lse[2];

    quern_context *ctx;
    size_t forward, backward;
    need(quern_context_create(NULL, &ctx));
    need(quern_nsa_forward_workspace(ctx, &params, &t, &forward));
    need(quern_nsa_backward_workspace(ctx, &params, &t, &backward));
    const size_t bytes = forward > backward ? forward : backward;
    void *workspace = malloc(bytes);
    float first = 0, loss = 0;
    for (int step = 0; step <= STEPS; step++) { /* step 0 is the teacher's, and makes the targets */
        for (int i = 0; i < 3; i++) project(x, step == 0 ? &teacher[i] : &student[i], &in[i]);
        need(quern_nsa_forward(ctx, NULL, &params, &t, workspace, bytes));
        loss = 0;
        for (int i = 0; i < N * H * D; i++) {
            if (step == 0) target[i] = ((float *)o.data)[i];
            const float miss = ((float *)o.data)[i] - target[i];
            ((float *)d_o.data)[i] = 2 * miss / N;
            loss += miss * miss / N;
        }
        if (step == 0) continue;
        if (step == 1) first = loss;
        if (step == 1 || step % 50 == 0) printf("step %3d: loss %.4f\n", step, loss);
        need(quern_nsa_backward(ctx, NULL, &params, &t, workspace, bytes));
        for (int i = 0; i < 3; i++) descend(x, &d_in[i], &student[i], 2.0f);
    }
    free(workspace);
    quern_context_destroy(ctx);
    return loss < first / 5 ? 0 : 1;
}
