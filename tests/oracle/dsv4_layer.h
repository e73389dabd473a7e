/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_layer.h - a whole attention layer of DeepSeek-V4 in double, straight from the equations, for one
 * sequence from position 0 on. Projection weights are [out, in].
 */
#ifndef QUERN_ORACLE_DSV4_LAYER_H
#define QUERN_ORACLE_DSV4_LAYER_H

#include "dsv4.h"

typedef enum oracle_layer_kind { ORACLE_CSA, ORACLE_HCA, ORACLE_SWA } oracle_layer_kind;

/* Weights by the order of the golden vectors' names. */
typedef enum oracle_layer_weight {
    OW_SINKS,       /* [H] */
    OW_Q_A,         /* [q_lora, Dm] */
    OW_Q_A_NORM,    /* [q_lora] */
    OW_Q_B,         /* [H D, q_lora] */
    OW_KV,          /* [D, Dm] */
    OW_KV_NORM,     /* [D] */
    OW_O_A,         /* [G o_lora, H/G D] */
    OW_O_B,         /* [Dm, G o_lora] */
    OW_BIAS,        /* [r, S D], S = 2 in CSA (series b first), 1 in HCA */
    OW_CMP_KV,      /* [S D, Dm] */
    OW_CMP_GATE,    /* [S D, Dm] */
    OW_CMP_NORM,    /* [D] */
    OW_INDEX_BIAS,  /* [r, 2 C_I] */
    OW_INDEX_KV,    /* [2 C_I, Dm] */
    OW_INDEX_GATE,  /* [2 C_I, Dm] */
    OW_INDEX_NORM,  /* [C_I] */
    OW_INDEX_Q_B,   /* [Hi C_I, q_lora] */
    OW_INDEX_HEADS, /* [Hi, Dm] */
    ORACLE_LAYER_WEIGHTS
} oracle_layer_weight;

typedef struct oracle_layer {
    oracle_layer_kind kind;
    int64_t tokens, width; /* T, Dm */
    int64_t q_lora, heads, dim, groups, o_lora, rope_dim, window;
    int64_t ratio, index_heads, index_dim, top_k;
    double eps;
} oracle_layer;

/* What a forward pass goes through; each may be NULL where it is not wanted. */
typedef struct oracle_layer_results {
    double *q_residual, *q, *kv, *compressed; /* [T, q_lora] [T, H, D] [T, D] [S, D] */
    double *idx_k, *idx_q, *idx_score;        /* [S, C_I] [T, Hi, C_I] [T, S] */
    int32_t *idx_topk;                        /* [T, k], ascending, then -1 */
    double *core, *core_irope, *o_a, *out;    /* [T, H, D] twice, [T, G, o_lora], [T, Dm] */
} oracle_layer_results;

/* Elements of a weight; 0 where the kind has no such weight. */
int64_t oracle_layer_count(const oracle_layer *l, oracle_layer_weight weight);
/* x [T, Dm]; cos_sin [T, rope_dim]. `chosen` [T, top_k] replaces the indexer's choice; NULL: its own. */
void oracle_dsv4_layer(const oracle_layer *l, const double *x, double *const w[ORACLE_LAYER_WEIGHTS],
                       const double *cos_sin, const int32_t *chosen, const oracle_layer_results *to);

#endif
