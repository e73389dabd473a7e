/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * swiglu.h - h [R, 2 I], gate and up side by side, to act [R, I]:
 *     act = g sigmoid(alpha g) (u + beta), g = min(gate, limit), u = clamp(up, +-limit); limit 0: no clamp
 * and its gradient. Beyond the limit the gradient is 0; at the limit it passes.
 */
#ifndef QUERN_STAGES_SWIGLU_H
#define QUERN_STAGES_SWIGLU_H

#include "stages/stage.h"

typedef struct swiglu_rule {
    int64_t granularity; /* gate and up alternate by runs of so many columns; I: they are two halves */
    float limit, alpha, beta;
} swiglu_rule;
#define SWIGLU_RULE_VALUES(F) F(rule.granularity) F(rule.limit) F(rule.alpha) F(rule.beta)

typedef struct swiglu_args {
    swiglu_rule rule;
    quern_tensor h;   /* f32 [R, 2 I] */
    quern_tensor act; /* f32, f16, bf16 [R, I]; written, or read by the backward for d_weights */
    /* Backward: d_h = gradient of h where act's is weight * d_act, and d_weights[slot] = d_act . act, of row
     * r the slot permutation[r]. Without permutation weights are 1. */
    quern_tensor d_act;                /* f32, f16, bf16 [R, I] */
    quern_tensor permutation, weights; /* i32 [R], f32 [T, R / T]; or absent */
    quern_tensor d_h;                  /* f32 or bf16 [R, 2 I] */
    quern_tensor d_weights;            /* f32, as weights; or absent */
} swiglu_args;
STAGE_DECLARE(swiglu);
#define SWIGLU_TENSORS(IN, OUT, GRAD)                                                                        \
    IN(h) OUT(act) IN(d_act) IN(permutation) IN(weights) GRAD(d_h) GRAD(d_weights)
#define SWIGLU_VALUES(F) SWIGLU_RULE_VALUES(F)

#endif
