/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_layer.h"

#include "cmocka_c11.h"
#include "golden.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

enum {
    B = DSV4_LAYER_BATCH,
    T = 45,
    H = 4,
    D = 32,
    ROPE = 8,
    HI = 8,
    CI = 16,
    HIDDEN = 64,
    K = 4,
    WINDOW = 8
};

/* The indexer's inputs; the weights of its heads are a projection of the hidden states. */
static void read_indexer(quern_safetensors *file, dsv4_layer *l)
{
    const int64_t entries = l->core.entries;
    l->indexer =
        (oracle_indexer){.queries = T, .heads = HI, .width = CI, .entries = entries, .ratio = l->core.ratio};
    l->idx_q = golden_get(file, "idx.", "q", (int64_t)B * T * HI * CI);
    l->idx_k = golden_get(file, "idx.", "k", B * entries * CI);
    l->idx_score = golden_get(file, "idx.", "score", B * T * entries);
    double *hidden = golden_get(file, "", "hidden", (int64_t)B * T * HIDDEN);
    double *weights =
        golden_get(file, "w.compressor.indexer.", "scorer.weights_proj.weight", (int64_t)HI * HIDDEN);
    l->idx_w = test_doubles((int64_t)B * T * HI);
    for (int64_t row = 0; row < B * T; row++)
        for (int64_t h = 0; h < HI; h++)
            for (int64_t i = 0; i < HIDDEN; i++)
                l->idx_w[row * HI + h] += hidden[row * HIDDEN + i] * weights[h * HIDDEN + i];
    free(hidden), free(weights);
    l->core.chosen = K;
    l->idx = golden_get_i32(file, "idx.", "topk", (int64_t)B * T * K);
}

dsv4_layer dsv4_layer_read(const char *directory, int i)
{
    static const char *const names[] = {"v4_tiny_csa", "v4_tiny_hca", "v4_tiny_swa"};
    static const int64_t ratios[] = {4, 8, 1};
    const int64_t entries = i == 2 ? 0 : T / ratios[i];
    const char *rope = i == 2 ? "rope.main." : "rope.compress.";
    quern_safetensors *file = golden_open(directory, names[i]);
    dsv4_layer l = {.name = names[i],
                    .core = {.queries = T,
                             .raw = T,
                             .entries = entries,
                             .heads = H,
                             .dim = D,
                             .window = WINDOW,
                             .ratio = ratios[i],
                             .rope_dim = ROPE,
                             .chosen = -1}};
    if (i == 0) read_indexer(file, &l);
    double *by_head = golden_get(file, "", "q", (int64_t)B * H * T * D);
    l.q = test_doubles((int64_t)B * T * H * D);
    for (int64_t b = 0; b < B; b++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t t = 0; t < T; t++)
                memcpy(l.q + ((b * T + t) * H + h) * D, by_head + ((b * H + h) * T + t) * D, D * sizeof *l.q);
    double *cosines = golden_get(file, rope, "cos", T * ROPE / 2),
           *sines = golden_get(file, rope, "sin", T * ROPE / 2);
    l.cos_sin = test_doubles((int64_t)T * ROPE);
    for (int64_t t = 0; t < T; t++) {
        memcpy(l.cos_sin + t * ROPE, cosines + t * ROPE / 2, ROPE / 2 * sizeof *cosines);
        memcpy(l.cos_sin + t * ROPE + ROPE / 2, sines + t * ROPE / 2, ROPE / 2 * sizeof *sines);
    }
    l.kv = golden_get(file, "", "kv", (int64_t)B * T * D);
    l.kv_cmp = entries > 0 ? golden_get(file, "", "compressed", B * entries * D) : NULL;
    l.sink = golden_get(file, "w.", "sinks", H);
    l.o = golden_get(file, "", "core_irope", (int64_t)B * T * H * D);
    free(by_head), free(cosines), free(sines);
    quern_safetensors_close(file);
    return l;
}

void dsv4_layer_free(dsv4_layer *l)
{
    free(l->idx_q), free(l->idx_k), free(l->idx_w), free(l->idx_score), free(l->idx);
    free(l->q), free(l->kv), free(l->kv_cmp), free(l->sink), free(l->cos_sin), free(l->o);
}
