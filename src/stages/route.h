/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* route.h - which experts take which tokens, with which weights, and the order of the experts' rows; and its
 * gradient. */
#ifndef QUERN_STAGES_ROUTE_H
#define QUERN_STAGES_ROUTE_H

#include "stages/stage.h"

typedef enum route_score { ROUTE_SOFTMAX = 0, ROUTE_SQRT_SOFTPLUS = 1, ROUTE_SIGMOID = 2 } route_score;

typedef struct route_args {
    route_score score;
    int64_t top_k;
    bool renormalize;
    float scale;
    quern_tensor logits;         /* f32, f16 or bf16 [T, E]; or the next two */
    quern_tensor hidden, weight; /* [T, D], [E, D]; f32, f16 or bf16 each */
    quern_tensor bias;           /* f32 [E], of the choice only; may be absent */
    quern_tensor input_ids,
        tid2eid; /* i32 or i64 [T], [V, k]: experts by token instead of by score; may be absent */
    /* i32, f32 [T, k]: routing that is handed in instead of all above, is copied, and has its slots sorted;
     * may be absent */
    quern_tensor given_experts, given_weights;
    quern_tensor experts;              /* i32 [T, k]; written, or read by the backward */
    quern_tensor weights;              /* f32 [T, k] */
    quern_tensor offsets, permutation; /* i32 [E], [T k] */
    /* Backward. d_logits in logits' dtype, or f32; d_hidden in hidden's dtype, d_weight f32; absent: not
     * wanted. */
    quern_tensor d_weights, d_logits, d_hidden, d_weight;
} route_args;
STAGE_DECLARE(route);
#define ROUTE_TENSORS(IN, OUT, GRAD)                                                                         \
    IN(logits)                                                                                               \
    IN(hidden)                                                                                               \
    IN(weight)                                                                                               \
    IN(bias)                                                                                                 \
    IN(input_ids)                                                                                            \
    IN(tid2eid)                                                                                              \
    IN(given_experts)                                                                                        \
    IN(given_weights)                                                                                        \
    OUT(experts)                                                                                             \
    OUT(weights) OUT(offsets) OUT(permutation) IN(d_weights) GRAD(d_logits) GRAD(d_hidden) GRAD(d_weight)
#define ROUTE_VALUES(F) F(score) F(top_k) F(renormalize) F(scale)

#endif
