/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * experts_case.h - a made checkpoint in a file of its own, whose layer 2 has three experts, and what is laid
 * out of it: each value is compared with what the file's bytes mean.
 */
#ifndef QUERN_TEST_EXPERTS_CASE_H
#define QUERN_TEST_EXPERTS_CASE_H

#include "made_model.h"

#include <quern/checkpoint.h>

enum { E = 3, D = 64, I = 32 };
enum { GATE, UP, DOWN };

/* Names of layer 2's experts: expert, part, suffix. */
#define QWEN "model.layers.2.mlp.experts.%d.%s_proj%s"
#define DEEPSEEK "layers.2.ffn.experts.%d.%s%s"
extern const char *const qwen[3], *const deepseek[3];

extern made_model m;
extern char made_path[];

/* cmocka's set-up and tear-down of the group: the file and the context. */
int make_path(void **state);
int remove_path(void **state);
/* Writes the model and opens it. */
quern_checkpoint *open_made(void);

/* What bytes mean. */
extern const float e2m1[16];
float e4m3(uint8_t byte);
int nibble(const uint8_t *row, int64_t k);
float bf16(const uint16_t *values, int64_t i);

/* A name of one of the forms; valid until the next but one. */
const char *tensor_of(const char *form, int expert, const char *part, const char *suffix);
int64_t columns_of(int part);
/* The model is then a linear for each part of each expert. */
void add_each(const char *form, const char *const *parts,
              void (*linear)(made_model *, const char *, int64_t, int64_t, float));

/* A value of a product's weight [K, N] of the expert, codes and scales linear; `which` is the global. */
float laid_out(const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *global, int expert,
               int64_t column, int64_t k, int64_t which);
/* Fills layer 2 into memory that the caller frees. */
void *fill_experts(const quern_checkpoint *c, bool repacked, quern_checkpoint_moe *e);
/* Every value of every expert is the expected one. */
typedef float expected_value(int expert, int part, int64_t row, int64_t k);
void check_values(const quern_checkpoint_moe *e, expected_value *expected);
/* Repacked experts hold the bytes of those that are not. */
void compare_repacked(const quern_tensor *repacked, const quern_tensor *codes, const quern_tensor *scales);
/* The layer takes the tensors as they are. */
void run_layer(quern_checkpoint_moe *e, bool repacked);
/* Values, repacked bytes, and with `run` the layer of both. */
void check_experts(quern_checkpoint *c, expected_value *expected, bool run);

#endif
