/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool_kernels.h - the row kernels of DeepSeek-V4's compressors: softmax pooling along tokens, channel by
 * channel. They get pointers and sizes; they never validate, allocate or start threads. n is any number
 * >= 0.
 *
 * An accumulator holds a channel's softmax so far: the largest logit (-inf: nothing yet), the sum of
 * exp(logit - largest), and the same sum weighted by the values. merge() takes in one row after the other in
 * order, so that the bits depend on the order alone, not on how the rows were cut into calls.
 */
#ifndef QUERN_CPU_POOL_KERNELS_H
#define QUERN_CPU_POOL_KERNELS_H

#include "cpu/kernels/rows/row_kernels.h"

/* Rows of values and logits; row j of each stands j * stride elements after its first. */
typedef struct pool_rows {
    const void *value, *logit;
    quern_dtype dtype;
    int64_t stride, rows;
    const float *bias; /* added to the logits; row j at j * bias_stride */
    int64_t bias_stride;
    int64_t ahead; /* merge: distance of its prefetches in bytes; 0: none */
    bool l2;       /* they go into L2, not L1 */
} pool_rows;

/* n channels; each array has n floats. */
typedef struct pool_sums {
    float *max, *sum, *weighted;
} pool_sums;

/* The gradient of one of the pooled rows. p = exp(logit - max) / sum; d_value = p d,
 * d_logit = p (value - pooled) d, and d_bias gets d_logit added. */
typedef struct pool_gradient {
    const float *max, *inverse_sum, *pooled, *d; /* inverse_sum 0: nothing was pooled */
    void *d_value, *d_logit;                     /* in d_dtype */
    quern_dtype d_dtype;
    float *d_bias; /* may be NULL */
    bool stream;   /* non-temporal stores of d_value and d_logit, which are whole lines of 64 bytes */
} pool_gradient;

typedef struct pool_kernels {
    quern_cpu_level level;
    const row_kernels *rows;
    void (*merge)(const pool_rows *rows, int64_t n, const pool_sums *sums);
    /* pooled = weighted / sum, inverse_sum = 1 / sum; 0 where nothing was merged. inverse_sum may be NULL. */
    void (*pooled_row)(const pool_sums *sums, int64_t n, float *pooled, float *inverse_sum);
    /* Of the first row. */
    void (*pool_backward)(const pool_rows *row, int64_t n, const pool_gradient *gradient);
} pool_kernels;

#endif
