/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* consumer.c - an outside program: dense attention over one key is that key's value. With an argument it asks for a GPU
 * instead and prints what the library says. */
#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    (void)argv;
    if (argc > 1) {
        const quern_status status = quern_cuda_check(0);
        printf("%s: %s\n", quern_status_name(status), status != QUERN_OK ? quern_last_error(NULL) : "");
        return 0;
    }
    float q[8] = {1}, k[8] = {1}, v[8] = {0, 1, 2, 3, 4, 5, 6, 7}, o[8];
    const int64_t shape[] = {1, 1, 1, 8};
    const quern_tensor tq = quern_tensor_contiguous(q, QUERN_F32, 4, shape), tk = quern_tensor_contiguous(k, QUERN_F32, 4, shape),
                       tv = quern_tensor_contiguous(v, QUERN_F32, 4, shape), to = quern_tensor_contiguous(o, QUERN_F32, 4, shape);
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors tensors = QUERN_ATTENTION_TENSORS_INIT;
    tensors.q = &tq, tensors.k = &tk, tensors.v = &tv, tensors.o = &to;
    quern_context *ctx = NULL;
    size_t bytes = 0;
    if (quern_context_create(NULL, &ctx) != QUERN_OK || quern_attention_forward_workspace(ctx, &params, &tensors, &bytes) != QUERN_OK) {
        fprintf(stderr, "%s\n", quern_last_error(ctx));
        return 1;
    }
    void *workspace = malloc(bytes);
    const quern_status status = quern_attention_forward(ctx, NULL, &params, &tensors, workspace, bytes);
    free(workspace);
    quern_context_destroy(ctx);
    if (status != QUERN_OK) return 1;
    for (int i = 0; i < 8; i++)
        if (o[i] != v[i]) return 1;
    printf("quern %s\n", quern_version());
    return 0;
}
