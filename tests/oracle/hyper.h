/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.h - hyper-connections in double, token by token from the equations, and their gradient. */
#ifndef QUERN_ORACLE_HYPER_H
#define QUERN_ORACLE_HYPER_H

#include <stdint.h>

enum { ORACLE_COPIES = 8, ORACLE_WEIGHTS = ORACLE_COPIES * (ORACLE_COPIES + 2) };

/* Shapes as dsv4_hyper.h has them; f, pre_in, fn with its base and scale may be NULL. */
typedef struct oracle_hyper {
    int64_t tokens, copies, width;
    int head, iters;
    double eps, rms_eps;
    const double *x, *fn, *base, *scale, *norm_weight, *f, *pre_in;
} oracle_hyper;

/* The weights of a token from its J sums over fn and its mean square: n pre, n post, n x n comb. */
void oracle_hyper_weights(const oracle_hyper *o, const double *sums, double mean_square, double *weights);
/* From d_weights: of the sums, which are added to d_sums, and of the mean square; adds to d_base, d_scale. */
double oracle_hyper_weights_backward(const oracle_hyper *o, const double *sums, double mean_square,
                                     const double *d_weights, double *d_sums, double *d_base,
                                     double *d_scale);

typedef struct oracle_hyper_out {
    double *h, *pre, *post, *comb, *x_new; /* each may be NULL */
} oracle_hyper_out;
void oracle_hyper_forward(const oracle_hyper *o, const oracle_hyper_out *out);

typedef struct oracle_hyper_grad {
    const double *d_h, *d_pre, *d_post, *d_comb, *d_new; /* each may be NULL */
    double *d_x, *d_fn, *d_base, *d_scale, *d_norm_weight, *d_f, *d_pre_in;
    double *base_squares, *scale_squares; /* of the terms of d_base, d_scale */
} oracle_hyper_grad;
/* All that it writes is given. */
void oracle_hyper_backward(const oracle_hyper *o, const oracle_hyper_grad *g);

#endif
