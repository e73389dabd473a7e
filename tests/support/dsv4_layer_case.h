/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_case.h - calls of DeepSeek-V4's whole layer, in one shot or through a cache, and what the
 * float64 oracle makes of them. */
#ifndef QUERN_TEST_DSV4_LAYER_CASE_H
#define QUERN_TEST_DSV4_LAYER_CASE_H

#include "dsv4_weights.h"
#include "oracle/dsv4_layer.h"
#include "tensor.h"

#include <quern/dsv4_layer.h>

/* In the order of quern_dsv4_layer_tensors. */
enum {
    LAYER_X,
    LAYER_COS_SIN,
    LAYER_WEIGHTS, /* ORACLE_LAYER_WEIGHTS of them */
    LAYER_OUT = LAYER_WEIGHTS + ORACLE_LAYER_WEIGHTS,
    LAYER_Q_RESIDUAL,
    LAYER_Q,
    LAYER_KV,
    LAYER_COMPRESSED,
    LAYER_IDX_K,
    LAYER_IDX_Q,
    LAYER_IDX_SCORE,
    LAYER_IDX_TOPK,
    LAYER_CORE,
    LAYER_CORE_IROPE,
    LAYER_O_A,
    LAYER_D_OUT,
    LAYER_D_X,
    LAYER_D_WEIGHTS, /* up to the compressor's norm */
    LAYER_TENSORS = LAYER_D_WEIGHTS + OW_CMP_NORM + 1
};

/* A small layer, without tokens and index_dim. */
enum { LAYER_SMALL_WIDTH = 24 };
#define LAYER_CASE_SMALL                                                                                     \
    .width = LAYER_SMALL_WIDTH, .q_lora = 12, .heads = 4, .dim = 16, .groups = 2, .o_lora = 6,               \
    .rope_dim = 4, .window = 5, .ratio = 3, .index_heads = 4, .top_k = 3, .eps = 1e-6

/* Sums of both signs may cancel: in bf16 and f16 no fewer are compared. */
enum { LAYER_FEW = 16 };

typedef struct layer_case {
    oracle_layer shape; /* of one sequence */
    int64_t batch, positions;
    quern_dtype dtype, weight_dtype;
    weight
        packed[2]; /* of the compressor and the indexer's, which calls then take for the tensors that mean the
                       * same; without a buffer: absent */
    test_tensor t[LAYER_TENSORS]; /* without a buffer: absent */
} layer_case;

extern const char *const layer_case_names[LAYER_TENSORS];

layer_case layer_case_make(test_random *random, const oracle_layer *shape, int64_t batch, quern_dtype dtype,
                           quern_dtype weight_dtype);
/* A case of random extents, small enough for differences of the oracle. */
layer_case layer_case_random(test_random *random, bool small);
/* Gives compressor `which` (1: the indexer's) a weight in FP8 or NVFP4. The case's weights are f32. */
void layer_case_pack(layer_case *c, test_random *random, int which, weight_kind kind);
/* Layer i (csa, hca, swa) of the golden vectors. `expected` gets the arrays of the outputs, NULL where there
 * is none. */
layer_case layer_case_golden(const char *directory, int i, double *expected[LAYER_TENSORS]);
void layer_case_free(layer_case *c);

quern_dsv4_layer_params layer_case_params(const layer_case *c);
quern_dsv4_layer_tensors layer_case_tensors(const layer_case *c);
void layer_case_forward(const layer_case *c, quern_context *ctx);
void layer_case_backward(const layer_case *c, quern_context *ctx);

/* A cache for the case's sequences, all of them empty. */
typedef struct layer_store {
    quern_dsv4_layer_cache *cache;
    quern_dsv4_layer_cache_params params;
    test_workspace memory, rows;
} layer_store;
/* Rows in the case's dtype. */
quern_dsv4_layer_cache_params layer_store_params(const layer_case *c, int64_t sequences, int64_t ring);
layer_store layer_store_open(const quern_dsv4_layer_cache_params *params);
layer_store layer_store_make(const layer_case *c, int64_t sequences, int64_t ring);
void layer_store_close(layer_store *s);
/* Rows [first, first + count) of sequence b of the case into sequence `id` of the cache, and to the case's
 * results. */
void layer_case_append(const layer_case *c, quern_context *ctx, const layer_store *s, int64_t id, int64_t b,
                       int64_t first, int64_t count);

/* Compares the outputs with the oracle's, given the choice that was made. Checks that this choice is the best
 * of the case's own scores. */
void layer_case_check(const layer_case *c);
/* The loss sum(out d_out) of one sequence by the oracle, choice frozen; w and x are its own. */
double layer_case_loss(const layer_case *c, int64_t b, const double *x, double *const w[ORACLE_LAYER_WEIGHTS],
                       const double *cos_sin, const int32_t *chosen, const double *d_out);

#endif
