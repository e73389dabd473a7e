/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper_kernels.h - the tile kernels of hyper-connections. They get pointers and sizes; they never validate,
 * allocate or start threads. */
#ifndef QUERN_CPU_HYPER_KERNELS_H
#define QUERN_CPU_HYPER_KERNELS_H

#include <quern/quern.h>

#include <stdbool.h>

enum { HYPER_COPIES = 8, HYPER_INPUTS = HYPER_COPIES + 1, HYPER_ITERATIONS = 64 };

/* Rows of n channels that become sums of them: out[k] = sum of m[k][i] in[i] + add[k]. */
typedef struct hyper_rows {
    const void *in[HYPER_INPUTS];
    quern_dtype from;
    int32_t ins; /* at most HYPER_INPUTS */
    const float *m;
    int64_t ldm;
    void *out[HYPER_COPIES];
    quern_dtype to; /* f32, or as the inputs */
    int32_t outs;
    const float *add[HYPER_COPIES]; /* where the first is NULL, none is added */
    /* Where `shared` is given: out[k] += shared_m[k] shared + own_m own[k], own of the inputs' dtype. */
    const float *shared, *shared_m;
    const void *own[HYPER_COPIES];
    float own_m;
    int64_t n;
    bool stream; /* every out[k] is on a multiple of 64 bytes and fills lines: past the caches */
} hyper_rows;

/* What is read after the rows of a product, which requests it for L2 on its way: as many rows, `stride` bytes
 * apart, `element` bytes for each of a row's channels. */
typedef struct hyper_ahead {
    const char *rows[2]; /* each may be NULL */
    int64_t stride[2], element;
} hyper_ahead;

/* Weights of tokens: of the copies on the way in, on the way out, and of the copies among themselves. A
 * token's are n pre, n post and n x n comb, in this order; with `head` n pre alone. J counts them. */
typedef struct hyper_weights {
    int64_t tokens;
    int32_t copies, iterations; /* n <= HYPER_COPIES, 1 to HYPER_ITERATIONS */
    bool head;
    int64_t width; /* channels of all copies */
    float eps, rms_eps;
    const float *sums; /* [tokens][ld]: fn times the copies, J of them, then the sum of the squares */
    int64_t ld;        /* at least J + 1 */
    const float *base, *scale;
    float *weights; /* [tokens][ld] */
    /* The backward reads `weights` no more. */
    const float *d_weights;   /* [tokens][ld] */
    float *d_sums;            /* [tokens][ld]: the gradient of the sums, then the factor of the copies */
    float *trace;             /* hyper_trace_floats() */
    double *d_base, *d_scale; /* [J], [3] or [1]: take their shares */
} hyper_weights;

/* Floats that a backward keeps of the iterations. */
static inline int64_t hyper_trace_floats(int64_t copies, int64_t iterations)
{
    return 2 * iterations * copies * (copies + 1) * 16;
}

typedef struct hyper_kernels {
    quern_cpu_level level;
    int64_t dot_rows; /* rows of a block of dots(): a multiple of them is best */
    /* c[i][j] += a[i] . b[j] over n channels. ahead may be NULL. */
    void (*dots)(int64_t rows, int64_t columns, int64_t n, const float *a, int64_t lda, const float *b,
                 int64_t ldb, float *c, int64_t ldc, const hyper_ahead *ahead);
    /* The sum of the squares. */
    float (*squares)(const float *x, int64_t n);
    void (*combine)(const hyper_rows *r);
    void (*weights)(const hyper_weights *w);
    void (*weights_backward)(const hyper_weights *w);
} hyper_kernels;

#endif
