/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compare.h - the project's bounds (docs/numerics.md) and the comparisons that they are stated for.
 *
 * Relative L2: |out - ref| / |ref| over the finite entries. -inf and NaN of the reference must stand at
 * the same places in the output and are left out; an all-zero reference needs an all-zero output.
 */
#ifndef QUERN_TEST_COMPARE_H
#define QUERN_TEST_COMPARE_H

#include <quern/quern.h>

#include <stdint.h>

/* Relative L2 bound of a tensor of an operation whose activations are of this dtype. */
double test_forward_bound(quern_dtype dtype);
double test_gradient_bound(quern_dtype dtype);

/* Relative L2 error, +inf where the nonfinite values differ; writes what is wrong into why[200] then. */
double test_relative_l2(const double *out, const double *reference, int64_t count, char why[200]);
/* Fails the test, naming the tensor, unless the relative L2 error is <= bound. */
void test_check(const char *name, const double *out, const double *reference, int64_t count, double bound);
/* Golden vectors: max |out - ref| / max |ref| <= bound; nonfinite values as above. */
void test_check_golden(const char *name, const double *out, const double *reference, int64_t count,
                       double bound);

#endif
