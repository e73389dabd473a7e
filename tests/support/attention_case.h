/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_case.h - one call of dense attention under test: its guarded tensors, the library's two calls on
 * them, and the oracle's answer.
 */
#ifndef QUERN_TEST_ATTENTION_CASE_H
#define QUERN_TEST_ATTENTION_CASE_H

#include "oracle/attention.h"
#include "tensor.h"

#include <quern/attention.h>

enum { ATTENTION_TENSORS = 15 };

/* A call. Points into itself: made in place, never copied. */
typedef struct attention_case {
    oracle_dense dense;
    quern_dtype dtype;
    quern_attention_params params;
    quern_attention_tensors tensors;
    union { /* in the order of quern_attention_tensors */
        struct {
            test_tensor q, k, v, cu_q, cu_kv, o, lse, d_o, d_q, d_k, d_v, sink, kv_first, kv_count, d_sink;
        };
        test_tensor t[ATTENTION_TENSORS];
    };
    double *sinks;              /* of the sink, as f32 holds it; NULL: none */
    oracle_dense_extras extras; /* its kv_first, kv_count; sinks are the reference's */
} attention_case;

typedef struct attention_reference {
    double *o, *lse, *d_q, *d_k, *d_v;
    double *d_sink, *d_sink_size; /* the roots of the sums of the terms' squares */
    bool cancels; /* every query sees at most one key: d_q and d_k are exactly 0 but for rounding */
    double lse_terms; /* then each lse is one dot product: the root of the sum of all their terms' squares */
} attention_reference;

/* Inputs N(0, 1), outputs full of sentinels. */
void attention_case_make(attention_case *c, const oracle_dense *dense, quern_dtype dtype, test_layout layout,
                         test_random *random);
/* The case that attention_case_make gives in bf16, of values that every activation dtype holds exactly: with
 * these inputs one answer of the oracle serves all of them. */
void attention_case_make_exact(attention_case *c, const oracle_dense *dense, test_layout layout,
                               test_random *random);
/* The same problem in another dtype and layout, with the inputs of an exact case. */
void attention_case_make_like(attention_case *c, const attention_case *exact, quern_dtype dtype,
                              test_layout layout, test_random *random);
/* Gives a case that was made a sink [H], kv_first and kv_count [B]; each may be NULL. */
void attention_case_give(attention_case *c, const double *sink, const int32_t *kv_first,
                         const int32_t *kv_count, test_layout layout, test_random *random);
void attention_case_free(attention_case *c);
/* Sets the outputs (forward's; backward's) back to sentinels. */
void attention_case_reset(attention_case *c);

/* Runs the call with a workspace of just the size asked for, at an odd address between guards; fails the
 * test on an error, on a write outside an output's elements, or on a changed input. */
void attention_case_forward(attention_case *c, quern_context *ctx);
void attention_case_backward(attention_case *c, quern_context *ctx);

attention_reference attention_case_reference(const attention_case *c);
/* Corrects d_q and d_k for the o that the case holds: backward is given o rounded to the dtype, which in rows
 * of few keys moves delta = d_o . o by more than the gradient's bound. */
void attention_reference_given_o(attention_reference *r, const attention_case *c);
void attention_reference_free(attention_reference *r);
/* Fails the test unless the outputs are within the bounds. `label` goes into the message. */
void attention_case_check_forward(const attention_case *c, const attention_reference *r, const char *label);
void attention_case_check_backward(const attention_case *c, const attention_reference *r, const char *label);

#endif
