/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernels.h - src/cpu/kernels.inc for tests: the rows, their bounds, and which of them a program has checked.
 */
#ifndef QUERN_TEST_KERNELS_H
#define QUERN_TEST_KERNELS_H

#include "levels.h"

#include <quern/quern.h>

#include <stddef.h>

typedef struct test_kernel {
    const char *table, *name;
    size_t offset;                     /* of the field in struct <table>_kernels */
    bool bf16_dot;                     /* only levels with a bf16 dot product have it */
    double terms, roundings, argument; /* the bound */
    const char *test, *bench;
} test_kernel;

enum { TEST_LEVEL_NUMBERS = 32 };

const test_kernel *test_kernels(size_t *count);
/* The table that a level uses. It begins with the level that last overrode one of its entries. */
const void *test_kernel_table(const char *table, quern_cpu_level level);
/* Whether a level has the kernel. */
bool test_kernel_is_at(const test_kernel *row, quern_cpu_level level);

/* The bound of a kernel, to be multiplied by the sum of its terms' absolute values; `level` is the table's
 * own. Notes that the program checks the kernel there. Fails the test where kernels.inc has no such row. */
double test_kernel_bound(const char *table, const char *name, quern_cpu_level level, double terms,
                         double argument);
/* Half a unit of the last place of an output in dtype; 0 for f32, whose roundings the bound counts. */
double test_kernel_rounding(quern_dtype dtype, double x);
/* A test, the last of its program: every row that names the program (*state, a string) was checked at every
 * level of this machine. */
void test_every_kernel(void **state);

#endif
