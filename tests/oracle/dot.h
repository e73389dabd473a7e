/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dot.h - the oracle's inner product, with eight sums that do not wait for each other. */
#ifndef QUERN_ORACLE_DOT_H
#define QUERN_ORACLE_DOT_H

#include <stdint.h>

static inline double oracle_dot(const double *a, const double *b, int64_t n)
{
    double sum[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum[0] += a[i] * b[i];
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

#endif
