/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_case.h - random mixture-of-experts layers: weights in every form, calls, and the exact result. */
#ifndef QUERN_TEST_MOE_CASE_H
#define QUERN_TEST_MOE_CASE_H

#include "moe/call.h"
#include "oracle/moe_layer.h"
#include "tensor.h"

#include <quern/moe.h>

typedef enum moe_weights { MOE_NONE, MOE_FLOATS, MOE_NVFP4, MOE_REPACKED } moe_weights;

typedef struct moe_case {
    quern_moe_params params;
    int64_t tokens, dim, experts, width, shared_width;
    quern_dtype dtype;
    moe_weights routed, shared;
    test_tensor t[MOE_TENSORS];  /* by enum int32_t; absent: no buffer */
    double *values[MOE_TENSORS]; /* what the oracle takes, by the tensor in floats that it is */
    int32_t *chosen;             /* after a forward */
    bool routed_by_hand;
} moe_case;

/* What is fixed of a case; the rest is random. */
typedef struct moe_wish {
    int64_t tokens;
    quern_dtype dtype;
    moe_weights routed, shared;
    bool a4, logits, table, bias, routed_by_hand; /* the last: experts and weights are inputs */
} moe_wish;

moe_case moe_make(test_random *random, const moe_wish *wish);
void moe_free(moe_case *c);
/* The case with only the tokens of `kept`. Its weights are the same memory, to be freed once. */
moe_case moe_subset(const moe_case *c, test_random *random, const bool *kept, int64_t count);
void moe_subset_free(moe_case *c);

/* Every tensor that a call of the case has; results that are wanted. */
quern_moe_tensors moe_bind(const moe_case *c, bool backward);
/* Calls; fails the test on an error. */
void moe_call_forward(moe_case *c, quern_context *ctx);
void moe_call_backward(moe_case *c, quern_context *ctx);
/* Checks what the calls wrote. */
void moe_check_forward(const moe_case *c, const char *what);
void moe_check_backward(const moe_case *c, const char *what);
bool moe_is_result(const moe_case *c, int tensor);
/* The oracle alone: out, and the new gradient of hidden, gate_up or down (the last two in floats). */
void moe_oracle_forward(const moe_case *c, double *out);
double *moe_oracle_gradient(const moe_case *c, int of, const double *d_out);

#endif
