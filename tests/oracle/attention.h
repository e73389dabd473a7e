/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention.h - softmax attention in double, straight from the equations, over any mask.
 *
 * Everything is a plain contiguous array of one sequence: q [nq,h,d], k [nkv,hkv,d], v [nkv,hkv,dv],
 * o [nq,h,dv], lse [h,nq] (rows of lse_stride). Gradients are added to what is there: the caller sets
 * them to zero first. A query that sees no key has o = 0, lse = -inf and gives no gradient. A head's sink is
 * one more logit, whose value is 0; lse is without it.
 */
#ifndef QUERN_ORACLE_ATTENTION_H
#define QUERN_ORACLE_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

/* True if query t of query head `head` sees key j. */
typedef bool (*oracle_sees)(const void *mask, int64_t head, int64_t t, int64_t j);

typedef struct oracle_sinks {
    const double *logit;     /* [h] */
    double *gradient, *size; /* [h]: added to by the backward, and the root of the terms' squares; or NULL */
} oracle_sinks;

typedef struct oracle_shape {
    int64_t nq, nkv, h, hkv, d, dv;
    double scale;              /* 0: 1 / sqrt(d) */
    int64_t lse_stride;        /* 0: nq */
    const oracle_sinks *sinks; /* or NULL */
} oracle_shape;

/* o and lse may each be NULL. */
void oracle_attend(const oracle_shape *shape, oracle_sees sees, const void *mask, const double *q,
                   const double *k, const double *v, double *o, double *lse);
/* One row: query t of one head -> o [dv]; returns lse. */
double oracle_attend_row(const oracle_shape *shape, oracle_sees sees, const void *mask, const double *q,
                         const double *k, const double *v, int64_t head, int64_t t, double *o);
void oracle_attend_backward(const oracle_shape *shape, oracle_sees sees, const void *mask, const double *q,
                            const double *k, const double *v, const double *d_o, double *d_q, double *d_k,
                            double *d_v);

/* The mask of dense attention: causal or not, window (0: none), position of query 0 (-1: nkv - nq). */
typedef struct oracle_range {
    int64_t nq, nkv;
    bool causal;
    int64_t window, query_offset;
} oracle_range;
bool oracle_range_sees(const void *range, int64_t head, int64_t t, int64_t j);

/* A batch of dense attention. Fixed length: cu_q NULL, nq and nkv tokens per sequence, q [B,nq,h,d],
 * lse [B,h,nq]. Varlen: cu_q, cu_kv [B+1] (cu_kv NULL: cu_q), nq and nkv the rows of the tensors,
 * q [nq,h,d], lse [h,nq]; rows past the last sequence get o = 0 and lse = -inf. All outputs are
 * overwritten; o and lse may each be NULL. */
typedef struct oracle_dense {
    int64_t batch, nq, nkv, h, hkv, d, dv;
    bool causal;
    int64_t window, query_offset; /* 0: none; -1: at the end */
    double scale;                 /* 0: 1 / sqrt(d) */
    const int32_t *cu_q, *cu_kv;
} oracle_dense;
/* What a call may have beside: sinks, and which keys of a sequence of a fixed length exist ([B], or NULL:
 * from 0, to nkv). */
typedef struct oracle_dense_extras {
    const oracle_sinks *sinks;
    const int32_t *kv_first, *kv_count;
} oracle_dense_extras;
void oracle_dense_forward_with(const oracle_dense *dense, const oracle_dense_extras *extras, const double *q,
                               const double *k, const double *v, double *o, double *lse);
void oracle_dense_backward_with(const oracle_dense *dense, const oracle_dense_extras *extras, const double *q,
                                const double *k, const double *v, const double *d_o, double *d_q, double *d_k,
                                double *d_v);
/* The mask of sequence b. */
oracle_range oracle_dense_range(const oracle_dense *dense, const oracle_dense_extras *extras, int64_t b);
void oracle_dense_forward(const oracle_dense *dense, const double *q, const double *k, const double *v,
                          double *o, double *lse);
void oracle_dense_backward(const oracle_dense *dense, const double *q, const double *k, const double *v,
                           const double *d_o, double *d_q, double *d_k, double *d_v);

#endif
