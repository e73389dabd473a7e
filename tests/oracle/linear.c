/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* linear.c - projections, RMS norm and rotation in double. */
#include "oracle/linear.h"

#include "oracle/nvfp4.h"

#include <math.h>
#include <stddef.h>

void oracle_linear_forward(const oracle_linear *o, double *y, double *size)
{
    for (int64_t t = 0; t < o->rows; t++)
        for (int64_t j = 0; j < o->groups * o->n; j++) {
            const double *x = o->x + (t * o->groups + j / o->n) * o->k;
            double sum = o->bias != NULL ? o->bias[j] : 0, all = fabs(sum);
            for (int64_t i = 0; i < o->k; i++) {
                sum += x[i] * o->w[j * o->k + i];
                all += fabs(x[i] * o->w[j * o->k + i]);
            }
            y[t * o->groups * o->n + j] = sum;
            if (size != NULL) size[t * o->groups * o->n + j] = all;
        }
}

void oracle_linear_backward(const oracle_linear *o, const double *d_y, double *d_x, double *d_w,
                            double *d_bias)
{
    const int64_t outputs = o->groups * o->n;
    for (int64_t i = 0; d_x != NULL && i < o->rows * o->groups * o->k; i++) d_x[i] = 0;
    for (int64_t i = 0; d_w != NULL && i < outputs * o->k; i++) d_w[i] = 0;
    for (int64_t j = 0; d_bias != NULL && j < outputs; j++) d_bias[j] = 0;
    for (int64_t t = 0; t < o->rows; t++)
        for (int64_t j = 0; j < outputs; j++) {
            const int64_t at = (t * o->groups + j / o->n) * o->k;
            const double d = d_y[t * outputs + j];
            if (d_bias != NULL) d_bias[j] += d;
            for (int64_t i = 0; i < o->k; i++) {
                if (d_x != NULL) d_x[at + i] += d * o->w[j * o->k + i];
                if (d_w != NULL) d_w[j * o->k + i] += d * o->x[at + i];
            }
        }
}

double oracle_e4m3_of_byte(int byte)
{
    const int size = byte & 127;
    if (size == 127) return NAN;
    return byte & 128 ? -(double)oracle_e4m3(size) : (double)oracle_e4m3(size);
}

double oracle_e4m3_round(double x)
{
    const double size = (double)oracle_e4m3(oracle_e4m3_nearest((float)fabs(x)));
    return x < 0 ? -size : size;
}

void oracle_linear_round(double *x, int64_t n)
{
    float amax = 0;
    for (int64_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf((float)x[i]));
    const float scale = amax / 448.0f == 0 ? 1.0f : amax / 448.0f;
    for (int64_t i = 0; i < n; i++) x[i] = (double)scale * oracle_e4m3_round((double)((float)x[i] / scale));
}

void oracle_linear_round_weights(double *w, int64_t n, double largest_scale)
{
    int e = -30;
    while (6 * largest_scale > ldexp(448, e)) e++;
    if (largest_scale == 0) e = 0;
    for (int64_t i = 0; i < n; i++) w[i] = ldexp(oracle_e4m3_round(ldexp(w[i], -e)), e);
}

void oracle_rms_norm(const double *x, const double *weight, double eps, int64_t rows, int64_t width,
                     double *y)
{
    for (int64_t r = 0; r < rows; r++, x += width, y += width) {
        double square = 0;
        for (int64_t i = 0; i < width; i++) square += x[i] * x[i];
        const double root = sqrt(square / (double)width + eps);
        for (int64_t i = 0; i < width; i++) y[i] = x[i] / root * (weight != NULL ? weight[i] : 1);
    }
}

void oracle_rms_norm_backward(const double *x, const double *weight, double eps, int64_t rows, int64_t width,
                              const double *d_y, double *d_x, double *d_weight)
{
    for (int64_t i = 0; d_weight != NULL && i < width; i++) d_weight[i] = 0;
    for (int64_t r = 0; r < rows; r++, x += width, d_y += width, d_x += width) {
        double square = 0, along = 0;
        for (int64_t i = 0; i < width; i++) {
            square += x[i] * x[i];
            along += d_y[i] * (weight != NULL ? weight[i] : 1) * x[i];
        }
        const double root = sqrt(square / (double)width + eps);
        for (int64_t i = 0; i < width; i++) {
            const double d = d_y[i] * (weight != NULL ? weight[i] : 1);
            d_x[i] = d / root - x[i] * along / ((double)width * root * root * root);
            if (d_weight != NULL) d_weight[i] += d_y[i] * x[i] / root;
        }
    }
}

void oracle_rope(double *head, const double *cos_sin, int64_t width, int64_t turned, int inverse)
{
    double *x = head + width - turned;
    for (int64_t m = 0; m < turned / 2; m++) {
        const double c = cos_sin[m], s = inverse ? -cos_sin[turned / 2 + m] : cos_sin[turned / 2 + m],
                     even = x[2 * m], odd = x[2 * m + 1];
        x[2 * m] = even * c - odd * s;
        x[2 * m + 1] = even * s + odd * c;
    }
}
