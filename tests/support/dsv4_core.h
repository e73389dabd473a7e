/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_core.h - calls of DeepSeek-V4's attention core and what the float64 oracle makes of them. */
#ifndef QUERN_TEST_DSV4_CORE_H
#define QUERN_TEST_DSV4_CORE_H

#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

enum { CORE_SEQUENCES = 5 };

/* In the order of quern_dsv4_attention_tensors. */
typedef enum core_tensor {
    CORE_Q,
    CORE_KV,
    CORE_KV_CMP,
    CORE_IDX,
    CORE_COUNT,
    CORE_SINK,
    CORE_COS_SIN,
    CORE_CU,
    CORE_O,
    CORE_LSE,
    CORE_LSE_WIN,
    CORE_D_O,
    CORE_D_Q,
    CORE_D_KV,
    CORE_D_KV_CMP,
    CORE_D_SINK,
    CORE_TENSORS
} core_tensor;

/* A tensor without a buffer is absent. Varlen: queries and raw count the rows of all sequences, and cu says
 * where each begins. */
typedef struct core_case {
    oracle_core shape;
    bool varlen;
    int64_t batch;
    int32_t cu[CORE_SEQUENCES + 1];
    quern_dtype dtype;
    test_tensor t[CORE_TENSORS];
} core_case;

/* The GPU (tests/gpu) has no f32 yet: cases are bf16 there. */
#ifdef QUERN_TEST_GPU
enum { CORE_ON_GPU = true };
#else
enum { CORE_ON_GPU = false };
#endif
static inline quern_dtype core_dtype(quern_dtype wanted)
{
    return CORE_ON_GPU && wanted == QUERN_F32 ? QUERN_BF16 : wanted;
}

/* What a case has. */
typedef struct core_parts {
    bool entries, list, count, sink, rope;
} core_parts;

core_case core_case_make(test_random *random, const oracle_core *shape, int64_t batch, const int32_t *cu,
                         quern_dtype dtype, const core_parts *parts);
core_case core_case_random(test_random *random);
void core_case_free(core_case *c);
quern_dsv4_attention_params core_case_params(const core_case *c);
quern_dsv4_attention_tensors core_case_tensors(const core_case *c);
void core_case_forward(const core_case *c, quern_context *ctx);
void core_case_backward(const core_case *c, quern_context *ctx);
/* Compares outputs (gradients too, with `backward`) with the oracle's, and the guards of all. */
void core_case_check(const core_case *c, bool backward);

#endif
