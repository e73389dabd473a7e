/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper_kernels.h - the tile kernels of hyper-connections. They get pointers and sizes; they never validate,
 * allocate or start threads. */
#ifndef QUERN_CPU_HYPER_KERNELS_H
#define QUERN_CPU_HYPER_KERNELS_H

#include <quern/quern.h>

#include <stdbool.h>

enum { HYPER_COPIES = 8, HYPER_INPUTS = HYPER_COPIES + 1, HYPER_ITERATIONS = 64 };

/* A token's copies: collapsed = sum of pre[i] x_i, and with f out_k = sum of m[k][i] x_i + m[k][copies] f. */
typedef struct hyper_mix {
    int32_t copies;
    quern_dtype dtype;
    int64_t n;
    const void *x[HYPER_COPIES], *f; /* f may be NULL */
    const float *pre, *m;            /* [copies][HYPER_INPUTS] */
    void *out[HYPER_COPIES];
    float *collapsed;
    bool stream; /* rows of out are on multiples of 64 bytes and fill lines: they may go past the caches */
} hyper_mix;

/* d_x_i = d_sums_i + pre[i] d_collapsed + square x_i + sum of comb[i][k] d_out_k. */
typedef struct hyper_gradient {
    int32_t copies;
    quern_dtype dtype;
    int64_t n;
    const void *x[HYPER_COPIES], *d_out[HYPER_COPIES]; /* where the first d_out is NULL, there are none */
    const float *pre, *comb, *d_collapsed;
    float square;
    const float *d_sums; /* [copies][ld_sums], in the order of packed channels, or NULL */
    int64_t ld_sums;
    void *d_x[HYPER_COPIES];
    bool stream;
} hyper_gradient;

/* What is read after the rows of a product, which requests it for L2 on its way: as many rows, `stride` bytes
 * apart. */
typedef struct hyper_ahead {
    const char *rows[2]; /* each may be NULL */
    int64_t stride[2];
} hyper_ahead;

/* Rows of n channels times columns of fn, and their squares, along the channels. */
typedef struct hyper_products {
    const void *x;
    quern_dtype from;
    int64_t rows, ld_x, n;
    const float *fn;
    int64_t ld_fn; /* from a column to the next; 0: fn is packed */
    int64_t columns;
    float *lanes; /* [rows][columns + 1][lanes]: are added to; the squares are last */
    hyper_ahead ahead;
} hyper_products;

/* Rows of a, one a token, times fn, and their transpose times x; fn and its gradient are packed. */
typedef struct hyper_outer {
    const float *a; /* [rows][columns] */
    int64_t rows, columns, lda;
    int64_t piece, first, n; /* channels of the packed piece; of them, n from `first` on, a multiple of 32 */
    const float *fn;
    float *out; /* [rows][n up to a whole pair of vectors], in the order of packed channels */
    int64_t ld_out;
    const void *x;
    quern_dtype from;
    int64_t ld_x;
    float *d_fn; /* is added to */
} hyper_outer;

/* A token whose weights' gradients are wanted. */
typedef struct hyper_token {
    int32_t copies;
    quern_dtype from;
    int64_t n;
    const void *x[HYPER_COPIES], *f;
    const void *d_out[HYPER_COPIES]; /* where the first is NULL, there are none, and no f and d_f either */
    const float *d_collapsed;        /* NULL: none */
    const float *post;
    float *d;  /* pre, post, comb: are added to */
    void *d_f; /* = sum of post[k] d_out[k]; may be NULL */
} hyper_token;

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
    int64_t lanes, dot_rows; /* of a sum; rows that products take at once: a multiple of them is best */
    /* Columns of n channels, ld apart, for products with rows of dtype `order`. */
    void (*pack)(const float *from, int64_t ld, int64_t columns, int64_t n, quern_dtype order, float *to);
    void (*add_products)(const hyper_products *p);
    /* sums[i][j] = the lanes' sum of [rows][columns][lanes]. */
    void (*fold)(const float *lanes, int64_t rows, int64_t columns, float *sums, int64_t ld);
    /* out = a fn. */
    void (*times_fn)(const hyper_outer *o);
    /* d_fn += a^T x. */
    void (*add_outer)(const hyper_outer *o);
    /* The inverse of pack(). */
    void (*unpack)(const float *from, int64_t columns, int64_t n, quern_dtype order, float *to, int64_t ld);
    /* d pre[i] += x_i . d_collapsed, post[k] += f . d_out_k, comb[i, k] += x_i . d_out_k. */
    void (*dots)(const hyper_token *t);
    /* Returns the sum of the squares of `collapsed`. */
    float (*mix)(const hyper_mix *t);
    void (*mix_backward)(const hyper_gradient *t);
    /* out = x scale weight. */
    void (*scale_row)(const float *x, const float *weight, float scale, int64_t n, void *out, quern_dtype to,
                      bool stream);
    void (*weights)(const hyper_weights *w);
    void (*weights_backward)(const hyper_weights *w);
} hyper_kernels;

/* Floats of n channels of `columns` columns once packed: whole pairs of vectors. */
static inline int64_t hyper_packed_floats(const hyper_kernels *k, int64_t n, int64_t columns)
{
    return (n + 2 * k->lanes - 1) / (2 * k->lanes) * 2 * k->lanes * columns;
}

#endif
