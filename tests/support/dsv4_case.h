/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_case.h - random calls of DeepSeek-V4's compressors and what the float64 oracle makes of them. */
#ifndef QUERN_TEST_DSV4_CASE_H
#define QUERN_TEST_DSV4_CASE_H

#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

enum { DSV4_SEQUENCES = 5 };

typedef enum dsv4_batch { DSV4_ONE, DSV4_FIXED, DSV4_VARLEN } dsv4_batch;

/* In the order of quern_dsv4_compress_tensors. */
typedef enum dsv4_tensor {
    DSV4_PROJ, /* or X and W */
    DSV4_X,
    DSV4_W,
    DSV4_BIAS_A,
    DSV4_BIAS_B,
    DSV4_PREV_B,
    DSV4_NORM_WEIGHT,
    DSV4_COS_SIN,
    DSV4_CU_SEQLENS,
    DSV4_START_TOKENS,
    DSV4_START_POSITIONS,
    DSV4_BLOCK_COUNTS,
    DSV4_HAS_PREV,
    DSV4_CU_SEQLENS_CMP,
    DSV4_POOLED,
    DSV4_OUT,
    DSV4_D_OUT,
    DSV4_D_PROJ,
    DSV4_D_X,
    DSV4_D_PREV_B,
    DSV4_D_W,
    DSV4_D_BIAS_A,
    DSV4_D_BIAS_B,
    DSV4_D_NORM_WEIGHT,
    DSV4_TENSORS
} dsv4_tensor;

/* Tensors of a call; a tensor without a buffer is absent. One sequence: proj [T, columns]; fixed: [B, T,
 * columns]; varlen: [T, columns]. */
typedef struct dsv4_case {
    oracle_compressor
        shape; /* start_token, start_abs_pos: of every sequence without a tensor that says otherwise */
    dsv4_batch kind;
    quern_dtype dtype;
    bool round_bf16;
    bool spaced; /* tensors' rows stand on multiples of 16 bytes */
    int64_t batch, tokens, max_pos, in, limit; /* in: Dm, 0 without X; limit: n_blocks */
    test_tensor t[DSV4_TENSORS];
    const double *w_values; /* what a weight in another format means; NULL: there is W */
    double *reference[DSV4_TENSORS]; /* of outputs, by dsv4_case_reference() */
} dsv4_case;

/* Sequence b's part of a call. */
typedef struct dsv4_sequence {
    int64_t row0, rows, token0, blocks, entry0, entries, position;
    bool prev;
} dsv4_sequence;

/* What a random case must have. */
typedef struct dsv4_wish {
    int64_t in_of; /* hidden states of a multiple of so many channels; 0: with or without any */
    bool overlap;
    bool wide; /* projections of 16 bits and 512 channels, most on multiples of 16 bytes, no block before */
} dsv4_wish;

dsv4_case dsv4_case_random(test_random *random);
dsv4_case dsv4_case_random_of(test_random *random, dsv4_wish wish);
dsv4_sequence dsv4_sequence_of(const dsv4_case *c, int64_t b);
/* The indexer's compressor beside `c`, an overlapping one: of another width, on the same tokens, table and
 * sequences, whose tensors it borrows. */
dsv4_case dsv4_case_beside(const dsv4_case *c, test_random *random);
/* Frees what the case does not borrow. */
void dsv4_case_free_beside(dsv4_case *c);
/* Pools and finishes every sequence and takes all gradients. `pooled`: the rows that were pooled, which a
 * rounding to bf16 takes as they are; NULL: the oracle's own. */
void dsv4_case_reference(dsv4_case *c, const double *pooled);
/* Compares the outputs and gradients that are there, and the guards of all. */
void dsv4_case_check(const dsv4_case *c);
void dsv4_case_free(dsv4_case *c);
int64_t dsv4_columns(const dsv4_case *c);
/* What a call of the library takes. */
quern_dsv4_compress_params dsv4_case_params(const dsv4_case *c);
quern_dsv4_compress_tensors dsv4_case_tensors(const dsv4_case *c);
/* Runs both passes. */
void dsv4_case_run(const dsv4_case *c, quern_context *ctx);

#endif
