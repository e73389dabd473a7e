/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index_case.h - calls of DeepSeek-V4's indexer. */
#ifndef QUERN_TEST_DSV4_INDEX_CASE_H
#define QUERN_TEST_DSV4_INDEX_CASE_H

#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

enum { INDEX_Q, INDEX_K, INDEX_W, INDEX_IDX, INDEX_COUNT, INDEX_SCORES, INDEX_TENSORS };

typedef struct index_case {
    oracle_indexer shape;
    int64_t batch, top_k;
    quern_dsv4_format format;
    test_tensor t[INDEX_TENSORS];
    double *keys; /* what k means */
    quern_dsv4_index_products products;
} index_case;

/* On the GPU (tests/gpu), whose kernels have 16-bit products only, dtypes are made to fit: bf16 for f32 and
 * beside keys of bytes, and keys of q's dtype. */
#ifdef QUERN_TEST_GPU
enum { INDEX_ON_GPU = true };
#else
enum { INDEX_ON_GPU = false };
#endif
index_case index_case_make(test_random *random, const oracle_indexer *shape, int64_t batch, int64_t top_k,
                           quern_dsv4_format format, quern_dtype dtype, quern_dtype keys, bool scores);
/* Puts the keys into row-major memory that copies of 16 bytes can read. */
void index_case_align_keys(index_case *c, test_random *random);
void index_case_free(index_case *c);
quern_dsv4_index_params index_case_params(const index_case *c);
quern_dsv4_index_tensors index_case_tensors(const index_case *c);
void index_case_run(const index_case *c, quern_context *ctx);
/* The call is refused with a sentence that holds this one, and no tensor of the case has changed. */
void index_case_refused(const index_case *c, quern_context *ctx, const quern_dsv4_index_params *p,
                        const quern_dsv4_index_tensors *t, const char *sentence);

#endif
