/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compare.c - relative L2 and golden-vector comparisons. */
#include "compare.h"

#include "cmocka_c11.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>

/* bf16's bounds stand in docs/numerics.md; f16 has three more bits and gets a quarter of them. */
double test_forward_bound(quern_dtype dtype)
{
    return dtype == QUERN_F32 ? 2e-6 : dtype == QUERN_BF16 ? 4e-3 : 1e-3;
}

double test_gradient_bound(quern_dtype dtype)
{
    return dtype == QUERN_F32 ? 1e-5 : dtype == QUERN_BF16 ? 1e-2 : 2.5e-3;
}

/* True, and `why` filled, if the nonfinite values of the entry differ. */
static bool nonfinite_differs(double out, double reference, int64_t index, char why[200])
{
    const bool same = isnan(reference) ? isnan(out) : isinf(reference) ? out == reference : isfinite(out);
    if (!same) snprintf(why, 200, "entry %" PRId64 " is %g, the reference %g", index, out, reference);
    return !same;
}

double test_relative_l2(const double *out, const double *reference, int64_t count, char why[200])
{
    double error = 0, norm = 0;
    bool zero = true, out_zero = true;
    for (int64_t i = 0; i < count; i++) {
        if (nonfinite_differs(out[i], reference[i], i, why)) return INFINITY;
        if (!isfinite(reference[i])) continue;
        error += (out[i] - reference[i]) * (out[i] - reference[i]);
        norm += reference[i] * reference[i];
        zero &= reference[i] == 0;
        out_zero &= out[i] == 0;
    }
    if (zero && !out_zero) {
        snprintf(why, 200, "the reference is all zero, the output is not");
        return INFINITY;
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

void test_check(const char *name, const double *out, const double *reference, int64_t count, double bound)
{
    char why[200] = "";
    const double error = test_relative_l2(out, reference, count, why);
    if (!(error <= bound))
        fail_msg("%s: relative L2 error %.3g over %" PRId64 " entries, bound %.3g %s", name, error, count,
                 bound, why);
}

void test_check_golden(const char *name, const double *out, const double *reference, int64_t count,
                       double bound)
{
    char why[200];
    double error = 0, largest = 0;
    int64_t worst = 0;
    for (int64_t i = 0; i < count; i++) {
        if (nonfinite_differs(out[i], reference[i], i, why)) fail_msg("%s: %s", name, why);
        if (!isfinite(reference[i])) continue;
        largest = fmax(largest, fabs(reference[i]));
        if (fabs(out[i] - reference[i]) > error) {
            error = fabs(out[i] - reference[i]);
            worst = i;
        }
    }
    if (!(error <= bound * largest))
        fail_msg("%s: entry %" PRId64 " is %.9g, expected %.9g: off by %.3g of the largest, bound %.3g", name,
                 worst, out[worst], reference[worst], error / largest, bound);
}
