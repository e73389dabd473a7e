/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer.h - the indexer and the attention core of the golden vectors v4_tiny_*. */
#ifndef QUERN_TEST_DSV4_LAYER_H
#define QUERN_TEST_DSV4_LAYER_H

#include "oracle/dsv4.h"

enum { DSV4_LAYERS = 3, DSV4_LAYER_BATCH = 2 };

/* A layer's tensors, both sequences one after the other; NULL where the kind lacks them. */
typedef struct dsv4_layer {
    const char *name;
    oracle_indexer indexer; /* csa alone */
    oracle_core core;
    double *idx_q, *idx_k, *idx_w, *idx_score;    /* [B,T,Hi,C_I] [B,S,C_I] [B,T,Hi] [B,T,S] */
    double *q, *kv, *kv_cmp, *sink, *cos_sin, *o; /* [B,T,H,D] ... o after the inverse rotation */
    int32_t *idx;                                 /* [B,T,k], in no order, -1 padded */
} dsv4_layer;

/* Layer i: csa, hca, swa. `directory` is QUERN_TEST_VECTORS. */
dsv4_layer dsv4_layer_read(const char *directory, int i);
void dsv4_layer_free(dsv4_layer *layer);

#endif
