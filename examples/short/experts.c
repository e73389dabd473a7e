/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * experts.c - one mixture-of-experts layer of a checkpoint: NVFP4, MXFP4, FP8 or floats, safetensors or GGUF.
 * Its experts are repacked once, then the layer runs on a few tokens.
 *
 *   cc experts.c $(pkg-config --cflags --libs quern) -lm -o experts
 *   experts MODEL [LAYER [TOP_K]]
 */
#include <quern/checkpoint.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 16 };

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

static void *memory(size_t bytes)
{
    void *p = malloc(bytes > 0 ? bytes : 1);
    if (p != NULL) return p;
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(1);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: experts MODEL [LAYER [TOP_K]]\n");
        return 2;
    }
    const int64_t layer = argc > 2 ? atoll(argv[2]) : 0;
    quern_context *ctx;
    quern_checkpoint *model;
    size_t bytes;
    need(quern_context_create(NULL, &ctx));
    need(quern_checkpoint_open(argv[1], &model));

    /* The weights: views of the files where these are as the layer reads them, else made in our memory. */
    quern_checkpoint_moe experts = QUERN_CHECKPOINT_MOE_INIT;
    need(quern_checkpoint_experts_bytes(ctx, model, layer, QUERN_CPU, true, &bytes));
    void *weights = memory(bytes);
    need(quern_checkpoint_experts(ctx, model, layer, QUERN_CPU, true, weights, bytes, &experts));
    printf("layer %lld: %lld experts, hidden %lld, intermediate %lld, %.1f MB repacked\n", (long long)layer,
           (long long)experts.experts, (long long)experts.hidden, (long long)experts.intermediate,
           (double)bytes / 1e6);

    quern_moe_params params = QUERN_MOE_PARAMS_INIT;
    params.top_k = argc > 3 ? atoll(argv[3]) : 2;
    params.renormalize = true;
    params.intermediate = experts.intermediate;
    params.shared_intermediate = experts.shared_intermediate;
    quern_moe_tensors t = experts.tensors; /* the router's weight is among them, where the layer has one */
    const int64_t shape[] = {TOKENS, experts.hidden}, count = TOKENS * experts.hidden;
    const int64_t score_shape[] = {TOKENS, experts.experts};
    float *x = memory((size_t)count * sizeof *x), *y = memory((size_t)count * sizeof *y);
    float *scores = memory((size_t)(TOKENS * experts.experts) * sizeof *scores);
    for (int64_t i = 0; i < count; i++) x[i] = 2 * (float)rand() / (float)RAND_MAX - 1;
    for (int64_t i = 0; i < TOKENS * experts.experts; i++) scores[i] = (float)rand() / (float)RAND_MAX;
    const quern_tensor hidden = quern_tensor_contiguous(x, QUERN_F32, 2, shape),
                       out = quern_tensor_contiguous(y, QUERN_F32, 2, shape),
                       logits = quern_tensor_contiguous(scores, QUERN_F32, 2, score_shape);
    t.hidden = &hidden;
    t.out = &out;
    t.weight = NULL; /* whose dtype need not be the tokens': this example routes at random */
    t.bias = t.tid2eid = NULL;
    t.logits = &logits;
    need(quern_moe_forward_workspace(ctx, &params, &t, &bytes));
    void *workspace = memory(bytes);
    need(quern_moe_forward(ctx, NULL, &params, &t, workspace, bytes));

    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (double)y[i] * y[i];
    printf("%d tokens, %lld experts each: rms of the output %.4g\n", TOKENS, (long long)params.top_k,
           sqrt(sum / (double)count));
    free(workspace);
    free(weights);
    free(x);
    free(y);
    free(scores);
    quern_checkpoint_close(model);
    quern_context_destroy(ctx);
    return isfinite(sum) && sum > 0 ? 0 : 1;
}
