/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "oracle/nvfp4_gemm.h"

#include <math.h>
#include <stdbool.h>

static void element(const oracle_product *p, int64_t e, int64_t t, int64_t n)
{
    double sum = 0, size = 0, squares = 0;
    for (int64_t k = 0; k < p->k; k++) {
        const double term = p->a[t * p->k + k] * p->b[(e * p->k + k) * p->n + n];
        sum += term;
        size += fabs(term);
        squares += term * term;
    }
    const float global = (float)p->a_global[t] * (float)p->b_global[e * p->n + n];
    const double bias = p->bias != 0 ? p->bias[e * p->n + n] : 0,
                 old = p->old != 0 ? p->old[t * p->n + n] : 0;
    p->c[t * p->n + n] = sum * (double)global + bias + old;
    if (p->root != 0) p->root[t * p->n + n] = sqrt(squares) * (double)global;
    p->size[t * p->n + n] = size * (double)global + fabs(bias) + fabs(old);
}

void oracle_grouped_product(const oracle_product *p)
{
    for (int64_t e = 0; e < p->experts; e++)
        for (int64_t t = e > 0 ? p->ends[e - 1] : 0; t < p->ends[e]; t++)
            for (int64_t n = 0; n < p->n; n++) element(p, e, t, n);
}

double oracle_swiglu(double gate, double up, double limit, double alpha, double beta)
{
    if (limit > 0 && gate > limit) gate = limit;
    if (limit > 0 && up > limit) up = limit;
    if (limit > 0 && up < -limit) up = -limit;
    return gate / (1 + exp(-alpha * gate)) * (up + beta);
}

void oracle_swiglu_gradient(double gate, double up, double limit, double alpha, double beta, double d[2])
{
    const bool gate_out = limit > 0 && gate > limit, up_out = limit > 0 && fabs(up) > limit;
    const double g = gate_out ? limit : gate, u = up_out ? copysign(limit, up) : up,
                 s = 1 / (1 + exp(-alpha * g));
    d[0] = gate_out ? 0 : (u + beta) * (s + alpha * g * s * (1 - s));
    d[1] = up_out ? 0 : g * s;
}
