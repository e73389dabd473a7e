/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_layer.h - a mixture-of-experts layer and its gradient in float64, for given experts a token. */
#ifndef QUERN_ORACLE_MOE_LAYER_H
#define QUERN_ORACLE_MOE_LAYER_H

#include "oracle/moe.h"

typedef struct oracle_layer {
    int64_t tokens, dim, experts, top_k, width, shared_width;
    oracle_score score;
    bool renormalize;
    double scale, limit, alpha, beta;
    const double *x, *logits, *router;      /* [T, D], [T, E] or NULL, [E, D] or NULL */
    const int32_t *chosen;                  /* [T, k] */
    const double *weights;                  /* [T, k]: routing weights instead of the router's, or NULL */
    const double *gate_up, *down;           /* [E, 2 I, D] in halves, [E, D, I] */
    const double *gate_up_bias, *down_bias; /* [E, 2 I] in halves, [E, D]; or NULL */
    const double *shared_gate, *shared_up, *shared_down; /* [Is, D], [Is, D], [D, Is]; or NULL */
    /* Rounds an operand of the experts' products: a token's row, or the activation; NULL: not. Gradients
     * pass. */
    void (*quantise)(const void *arg, bool activation, int64_t expert, double *row, int64_t n);
    const void *arg;
} oracle_layer;

void oracle_layer_forward(const oracle_layer *m, double *out);

/* All are written; [T, D], [T, E], [E, D], [T, k], [E, 2 I], [E, D]. A routing weight's gradient is a sum of
 * products that may cancel, and the router's gradients are sums of these that may cancel again. So
 * weights_terms [T, k] is each weight's gradient, taken as no smaller than a sum of D products of random
 * sign, logits_terms [T, E] what these add to d logits as absolute values, and router_terms [E, D] the root
 * of the sum over tokens of (logits_terms x)^2. */
typedef struct oracle_layer_gradients {
    double *x, *logits, *router, *weights, *gate_up_bias, *down_bias, *weights_terms, *logits_terms,
        *router_terms;
    double *gate_up, *down; /* [E, 2 I, D] in halves, [E, D, I]; or NULL */
} oracle_layer_gradients;
void oracle_layer_backward(const oracle_layer *m, const double *d_out, const oracle_layer_gradients *g);

#endif
