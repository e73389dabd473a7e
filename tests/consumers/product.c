/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * product.c - dense products, the part of the library that oneDNN does where it is linked: NSA's compression
 * with a weight, of keys whose every block has the same rows, so that each output is the product of one row.
 */
#include <quern/nsa.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 16384, BLOCK = 32, D = 128 };

static float keys[N * D], values[N * D], compressed[N / BLOCK * D], unused[N / BLOCK * D], weight[D * D];

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

int main(void)
{
    for (int i = 0; i < N * D; i++) keys[i] = (float)(i / D / BLOCK * 7 % 13 - 6) + (float)(i % D % 5);
    for (int i = 0; i < D * D; i++) weight[i] = (float)(i * 11 % 17 - 8);
    const int64_t rows[] = {1, N, 1, D}, blocks[] = {1, N / BLOCK, 1, D}, square[] = {1, D, D};
    quern_tensor k = quern_tensor_contiguous(keys, QUERN_F32, 4, rows),
                 v = quern_tensor_contiguous(values, QUERN_F32, 4, rows);
    quern_tensor k_cmp = quern_tensor_contiguous(compressed, QUERN_F32, 4, blocks);
    quern_tensor v_cmp = quern_tensor_contiguous(unused, QUERN_F32, 4, blocks);
    quern_tensor w = quern_tensor_contiguous(weight, QUERN_F32, 3, square);
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = BLOCK;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.k = &k;
    t.v = &v;
    t.k_cmp = &k_cmp;
    t.v_cmp = &v_cmp;
    t.w_k = &w;
    quern_context *ctx;
    size_t bytes;
    need(quern_context_create(NULL, &ctx));
    need(quern_nsa_compress_workspace(ctx, &params, &t, &bytes));
    void *workspace = malloc(bytes);
    need(quern_nsa_compress(ctx, NULL, &params, &t, workspace, bytes));
    free(workspace);
    quern_context_destroy(ctx);
    for (int block = 0; block < N / BLOCK; block++)
        for (int e = 0; e < D; e++) {
            float expected = 0; /* sums of small integers are exact */
            for (int c = 0; c < D; c++) expected += keys[block * BLOCK * D + c] * weight[c * D + e];
            const float got = compressed[block * D + e];
            if (!(fabsf(got - expected) <= 0.0f)) {
                printf("block %d, channel %d: %g, not %g\n", block, e, (double)got, (double)expected);
                return 1;
            }
        }
    return 0;
}
