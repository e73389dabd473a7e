/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index_case.h - calls of the block indexer. */
#ifndef QUERN_TEST_NSA_INDEX_CASE_H
#define QUERN_TEST_NSA_INDEX_CASE_H

#include "tensor.h"

#include <quern/nsa.h>

/* In the order of quern_nsa_index_tensors. */
enum {
    BLOCK_INDEX_Q,
    BLOCK_INDEX_K,
    BLOCK_INDEX_CU_Q,
    BLOCK_INDEX_CU_KV,
    BLOCK_INDEX_IDX,
    BLOCK_INDEX_COUNT,
    BLOCK_INDEX_SCORE,
    BLOCK_INDEX_TENSORS
};
enum { BLOCK_INDEX_BATCH = 5 };

typedef struct block_index_shape {
    quern_nsa_index_params params;
    quern_dtype dtype;
    test_layout layout;
    bool varlen, shared, scores; /* shared: one key for all lists; scores: fixed lengths only */
    int64_t batch, lists, d;
    int64_t n[BLOCK_INDEX_BATCH], s[BLOCK_INDEX_BATCH]; /* fixed length: the first of each */
    int64_t spare;                                      /* varlen: rows past the last sequence */
} block_index_shape;

typedef struct block_index_case {
    block_index_shape shape;
    int64_t list_rows; /* of a list head */
    test_tensor t[BLOCK_INDEX_TENSORS];
} block_index_case;

block_index_case block_index_case_make(const block_index_shape *shape, test_random *random);
void block_index_case_free(block_index_case *c);
void block_index_case_run(block_index_case *c, quern_context *ctx);
/* Where sequence b's queries and keys begin in the tensors, in tokens. */
int64_t block_index_query0(const block_index_shape *shape, int64_t b);
int64_t block_index_key0(const block_index_shape *shape, int64_t b);
/* Compares lists, counts and scores with the oracle's by the specification's test rule. */
void block_index_case_check(const block_index_case *c, const char *what);

#endif
