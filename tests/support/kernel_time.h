/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel_time.h - a kernel's check is its micro-benchmark: after it has checked a call, it names the call
 * once more as TEST_TIME's. A test program run with `--bench [PATTERN]` then times those calls and prints a
 * table; run as a test it times nothing, but test_every_kernel() fails where a row of src/cpu/kernels.inc has
 * no call to time at a level.
 */
#ifndef QUERN_TEST_KERNEL_TIME_H
#define QUERN_TEST_KERNEL_TIME_H

#include <quern/quern.h>

/* What is being timed, and how far it is. */
typedef struct test_timer {
    double *best;        /* where the least time of a call goes; NULL: nothing is timed */
    int64_t calls, made; /* of a batch */
    int batches;         /* still to come */
    double started;
} test_timer;

/* Times `call`, a statement that may run any number of times: kernels.inc's row (table, name) at the table's
 * own level. `work`: bytes that one call reads and writes, or multiply-adds of a product. Of several calls
 * for one row and level the one with the most work counts. */
#define TEST_TIME(table, name, level, work, call)                                                            \
    for (test_timer timer_ = test_timer_of(table, name, level, work); test_timer_goes_on(&timer_);) call

test_timer test_timer_of(const char *table, const char *name, quern_cpu_level level, int64_t work);
bool test_timer_goes_on(test_timer *timer);

/* The rest of a kernel test's main(): runs the tests; `--bench [PATTERN]` also times the rows whose
 * table.name holds the pattern, and prints them. */
#define TEST_KERNELS_MAIN(argc, argv, tests)                                                                 \
    (test_kernels_time(argc, argv), test_kernels_report(cmocka_run_group_tests(tests, NULL, NULL)))

void test_kernels_time(int argc, char **argv);
int test_kernels_report(int failed);

#endif
