/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* linear.h - projections in double, and the roundings to e4m3 that they may have, one value at a time. */
#ifndef QUERN_ORACLE_LINEAR_H
#define QUERN_ORACLE_LINEAR_H

#include <stdint.h>

/* x [rows][groups k], w [groups n][k], bias [groups n] or NULL. */
typedef struct oracle_linear {
    int64_t rows, groups, n, k;
    const double *x, *w, *bias;
} oracle_linear;

/* y [rows][groups n]; size, the sum of the terms' magnitudes, may be NULL. */
void oracle_linear_forward(const oracle_linear *o, double *y, double *size);
/* Each gradient may be NULL. */
void oracle_linear_backward(const oracle_linear *o, const double *d_y, double *d_x, double *d_w,
                            double *d_bias);

/* The value of any byte of e4m3, with its sign; NaN of 0x7f and 0xff. */
double oracle_e4m3_of_byte(int byte);
/* The nearest value of e4m3, ties to even, saturating. */
double oracle_e4m3_round(double x);
/* Rounds n values that share a scale: s e4m3(x / s), s = amax / 448. Each step is one f32 operation. */
void oracle_linear_round(double *x, int64_t n);
/* Rounds a row of NVFP4 weights without their global, of which the largest scale is given. */
void oracle_linear_round_weights(double *w, int64_t n, double largest_scale);
/* RMS norm of rows [rows][width], weight may be NULL; its gradients, d_weight may be NULL. */
void oracle_rms_norm(const double *x, const double *weight, double eps, int64_t rows, int64_t width,
                     double *y);
void oracle_rms_norm_backward(const double *x, const double *weight, double eps, int64_t rows, int64_t width,
                              const double *d_y, double *d_x, double *d_weight);
/* Turns the last `turned` of a head's `width` channels by a row of cosines and sines. */
void oracle_rope(double *head, const double *cos_sin, int64_t width, int64_t turned, int inverse);

#endif
