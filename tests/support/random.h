/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* random.h - seeded random numbers. A test that draws prints its seed; QUERN_TEST_SEED=number repeats it.
 * Where it runs trials, a message names the trial, and QUERN_TEST_TRIAL=number repeats that one alone. */
#ifndef QUERN_TEST_RANDOM_H
#define QUERN_TEST_RANDOM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct test_random {
    uint64_t state;
} test_random;

/* The seed of this run: QUERN_TEST_SEED, else `fallback`; printed with the test's name. */
uint64_t test_seed(const char *name, uint64_t fallback);
/* The trials that a test runs: QUERN_TEST_TRIALS, a number or a share such as 1/8 of `usual` (at least one),
 * else `usual`. */
int test_trials(int usual);
/* Whether a test that goes through a grid tries its case `index`: yes, but where QUERN_TEST_TRIALS is a share
 * such as 1/8. Then that share of cases is tried, spread over the grid, the first among them. */
bool test_in_share(uint64_t index);
/* The random numbers of a trial, which depend on seed and trial alone. False where QUERN_TEST_TRIAL names
 * another one. */
bool test_trial(uint64_t seed, int trial, test_random *random);
/* Uniform in low ... high, both included. */
int64_t test_random_int(test_random *random, int64_t low, int64_t high);
/* True once in n times. */
bool test_random_one_in(test_random *random, int64_t n);
/* Uniform in [0, 1). */
double test_random_uniform(test_random *random);
/* N(0, 1). */
double test_random_normal(test_random *random);

#endif
