/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "v4_model.h"

#include "cmocka_c11.h"
#include "oracle/moe_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double *part(const made_model *m, int layer, const char *suffix)
{
    char name[160];
    snprintf(name, sizeof name, "layers.%d.ffn.%s", layer, suffix);
    return v4_values(m, name);
}

/* The experts' gate and up [E, 2 I, D] in halves, or down [E, D, I]. */
static double *stack(const made_model *m, int layer, bool down)
{
    static const char *const ups[] = {"w1", "w3"}, *const downs[] = {"w2"};
    const int parts = down ? 1 : 2;
    const size_t each = (size_t)V4_WIDTH * V4_INNER;
    double *all = malloc((size_t)(V4_EXPERTS * parts) * each * sizeof *all);
    assert_non_null(all);
    for (int i = 0; i < V4_EXPERTS * parts; i++) {
        char suffix[64];
        snprintf(suffix, sizeof suffix, "experts.%d.%s.weight", i / parts, (down ? downs : ups)[i % parts]);
        double *one = part(m, layer, suffix);
        memcpy(all + (size_t)i * each, one, each * sizeof *all);
        free(one);
    }
    return all;
}

/* The best V4_TOP of score + bias, in rising order. */
static void choose(const double *scores, const double *bias, int32_t *chosen)
{
    bool taken[V4_EXPERTS] = {false};
    for (int k = 0; k < V4_TOP; k++) {
        int best = -1;
        for (int e = 0; e < V4_EXPERTS; e++)
            if (!taken[e] && (best < 0 || scores[e] + bias[e] > scores[best] + bias[best])) best = e;
        taken[best] = true;
    }
    for (int e = 0, k = 0; e < V4_EXPERTS; e++)
        if (taken[e]) chosen[k++] = e;
}

void v4_walk_experts(const made_model *m, int layer, const int32_t *tokens, int64_t count, const double *x,
                     double *out)
{
    const bool hash = layer < V4_HASH_LAYERS;
    char name[64];
    snprintf(name, sizeof name, "layers.%d.ffn.gate.tid2eid", layer);
    const int64_t *table = hash ? made_data(m, name) : NULL;
    double *router = part(m, layer, "gate.weight"), *bias = hash ? NULL : part(m, layer, "gate.bias"),
           *gate_up = stack(m, layer, false), *down = stack(m, layer, true),
           *shared[] = {part(m, layer, "shared_experts.w1.weight"),
                        part(m, layer, "shared_experts.w3.weight"),
                        part(m, layer, "shared_experts.w2.weight")};
    int32_t *chosen = malloc((size_t)(count * V4_TOP) * sizeof *chosen);
    for (int64_t t = 0; t < count; t++) {
        double logits[V4_EXPERTS] = {0}, scores[V4_EXPERTS];
        for (int e = 0; e < V4_EXPERTS; e++)
            for (int i = 0; i < V4_WIDTH; i++) logits[e] += x[t * V4_WIDTH + i] * router[e * V4_WIDTH + i];
        oracle_route_scores(ORACLE_SQRT_SOFTPLUS, logits, V4_EXPERTS, scores);
        if (!hash) choose(scores, bias, chosen + t * V4_TOP);
        for (int k = 0; hash && k < V4_TOP; k++)
            chosen[t * V4_TOP + k] = (int32_t)table[tokens[t] * V4_TOP + k];
    }
    const oracle_layer l = {.tokens = count,
                            .dim = V4_WIDTH,
                            .experts = V4_EXPERTS,
                            .top_k = V4_TOP,
                            .width = V4_INNER,
                            .shared_width = V4_INNER,
                            .score = ORACLE_SQRT_SOFTPLUS,
                            .renormalize = true,
                            .scale = 1.5,
                            .limit = 2.0,
                            .alpha = 1.0,
                            .x = x,
                            .router = router,
                            .chosen = chosen,
                            .gate_up = gate_up,
                            .down = down,
                            .shared_gate = shared[0],
                            .shared_up = shared[1],
                            .shared_down = shared[2]};
    oracle_layer_forward(&l, out);
    double *const all[] = {router, bias, gate_up, down, shared[0], shared[1], shared[2]};
    for (int i = 0; i < 7; i++) free(all[i]);
    free(chosen);
}
