/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mqa_kernels.h - the row kernels of attention whose heads share their keys. Scores
 * have a row per key and a column per head, so a softmax goes down the columns and no sum crosses lanes. They
 * never validate, allocate or start threads.
 */
#ifndef QUERN_CPU_MQA_KERNELS_H
#define QUERN_CPU_MQA_KERNELS_H

#include <quern/quern.h>

/* One step of a running softmax over a tile of scores. */
typedef struct mqa_softmax {
    float *
        s; /* [keys][heads]; P on return: floats, or words of two keys' bf16 values [(keys + 1) / 2][heads] */
    int32_t keys, heads; /* heads: a multiple of 16 */
    float scale2;        /* scores are multiplied by this before exp2 */
    float *max, *sum;    /* running; max of unscaled scores, -inf at first */
    float *shrink;       /* out: the factor for what the head has summed so far */
} mqa_softmax;

/* P = exp2((s - top) scale2) factor, dS = P (dp - delta) scale; 0 in heads whose top is +inf. */
typedef struct mqa_gradient {
    float *s, *dp; /* [keys][heads]; f32: P and dS on return */
    int32_t keys, heads;
    float scale2, scale;
    const float *top, *factor, *delta;
    uint16_t *p, *ds;   /* bf16 results: [keys][heads] */
    uint32_t *ds_pairs; /* bf16 results, dS in pairs of keys: [(keys + 1) / 2][heads] */
} mqa_gradient;

typedef struct mqa_kernels {
    quern_cpu_level level;
    void (*mqa_softmax_f32)(const mqa_softmax *t);
    void (*mqa_softmax_bf16)(const mqa_softmax *t); /* the bf16 kernels are NULL without a bf16 dot product */
    void (*mqa_gradient_f32)(const mqa_gradient *t);
    void (*mqa_gradient_bf16)(const mqa_gradient *t);
} mqa_kernels;

#endif
