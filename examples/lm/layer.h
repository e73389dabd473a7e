/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer.h - what a layer keeps of its forward pass, and its two halves. */
#ifndef LM_LAYER_H
#define LM_LAYER_H

#include "lm.h"

#include <quern/attention.h>
#include <quern/nsa.h>

/* attend.c: attention of one layer through Quern, forward and backward. */
typedef struct lm_attention {
    float *q, *k, *v, *o, *lse[3], *o_b[3], *gates, *k_cmp, *v_cmp;
    int32_t *block_idx;
} lm_attention;
bool attention_allocate(const lm_config *config, lm_attention *a);
void attention_free(lm_attention *a);
bool attention_forward(lm_model *model, int32_t layer, int32_t n);
/* d_o -> d_q, d_k, d_v, and the gradient of the gate (sparse). */
bool attention_backward(lm_model *model, int32_t layer, const float *d_o, float *d_q, float *d_k, float *d_v,
                        int32_t n);

/* mlp.c: rows of one network or of many, [rows][inner]. */
typedef struct lm_rows {
    float *gate, *up, *act;
} lm_rows;

typedef struct lm_mlp {
    lm_rows shared; /* of every byte */
    /* A mixture: the bytes' slots in the order of their experts. */
    lm_rows routed;             /* [context top][inner] */
    float *in, *out;            /* [context top][width] */
    int32_t *experts, *order;   /* [context][top]; the slot of each row */
    int32_t *offsets;           /* [experts]: where each expert's rows end */
    float *weights, *d_weights; /* [context][top] */
} lm_mlp;
bool mlp_allocate(const lm_config *config, lm_mlp *mlp);
void mlp_free(lm_mlp *mlp);
/* x += mlp(h) */
bool mlp_forward(lm_model *model, int32_t layer, const float *h, float *x, int32_t n);
/* d_x of mlp's result -> d_h, and the gradients of its weights. */
bool mlp_backward(lm_model *model, int32_t layer, const float *h, const float *d_x, float *d_h, int32_t n);

struct lm_layer {
    float *x, *mid;       /* input of the attention half and of the MLP half */
    float *h1, *h2;       /* their norms */
    float *inv1, *inv2;   /* 1 / rms */
    float *q_raw, *k_raw; /* before norm and rope */
    float *inv_q, *inv_k;
    lm_attention attention;
    lm_mlp mlp;
};

#endif
