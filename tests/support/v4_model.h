/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * v4_model.h - a small random model in DeepSeek-V4's released layout, with every kind of layer and router,
 * and its logits in double: a walk through the oracle from the bytes that the tensors hold.
 */
#ifndef QUERN_TEST_V4_MODEL_H
#define QUERN_TEST_V4_MODEL_H

#include "made_model.h"

#include <stdbool.h>

enum {
    V4_LAYERS = 5,
    V4_WIDTH = 64,
    V4_VOCABULARY = 48,
    V4_HEADS = 4,
    V4_DIM = 32,
    V4_ROPE = 8,
    V4_Q_LORA = 48
};
enum {
    V4_GROUPS = 2,
    V4_O_LORA = 16,
    V4_WINDOW = 8,
    V4_INDEX_HEADS = 8,
    V4_INDEX_DIM = 16,
    V4_INDEX_TOP = 4
};
enum { V4_EXPERTS = 4, V4_TOP = 2, V4_INNER = 64, V4_HASH_LAYERS = 2, V4_COPIES = 4, V4_ITERS = 20 };
extern const int v4_ratios[V4_LAYERS];

/* Fills an empty model. fp8_experts: experts as FP8 linears instead of FP4. */
void v4_make(made_model *m, uint64_t seed, bool fp8_experts);
/* Writes it as a folder, in shards, with its config.json, in which `from` (NULL: nothing) becomes `to`. */
void v4_write(const made_model *m, const char *folder, const char *from, const char *to);

/* logits [count, V4_VOCABULARY] after each token. */
void v4_walk(const made_model *m, const int32_t *tokens, int64_t count, double *logits);

/* A tensor's values in double, which the caller frees: floats, FP8 and FP4 with their scales. */
double *v4_values(const made_model *m, const char *name);
/* out [count, V4_WIDTH] = the experts of a layer, on rows x. */
void v4_walk_experts(const made_model *m, int layer, const int32_t *tokens, int64_t count, const double *x,
                     double *out);

#endif
