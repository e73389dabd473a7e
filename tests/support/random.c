/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* random.c - SplitMix64 (Steele, Lea, Flood 2014) and Box-Muller. */
#include "random.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t test_seed(const char *name, uint64_t fallback)
{
    const char *text = getenv("QUERN_TEST_SEED");
    const uint64_t seed = text != NULL ? strtoull(text, NULL, 0) : fallback;
    printf("%s: QUERN_TEST_SEED=%" PRIu64 "\n", name, seed);
    return seed;
}

int test_trials(int usual)
{
    const char *text = getenv("QUERN_TEST_TRIALS"), *slash = text != NULL ? strchr(text, '/') : NULL;
    if (text == NULL) return usual;
    if (slash == NULL) return atoi(text);
    const int share = (int)((int64_t)usual * atoi(text) / atoi(slash + 1));
    return share > 1 ? share : 1;
}

bool test_in_share(uint64_t index)
{
    const char *text = getenv("QUERN_TEST_TRIALS"), *slash = text != NULL ? strchr(text, '/') : NULL;
    const uint64_t place = index * 0x9e3779b97f4a7c15u >> 32;
    return slash == NULL || place % strtoull(slash + 1, NULL, 10) < strtoull(text, NULL, 10);
}

bool test_trial(uint64_t seed, int trial, test_random *random)
{
    const char *only = getenv("QUERN_TEST_TRIAL");
    *random = (test_random){seed + (uint64_t)trial * 1000003u};
    return only == NULL || atoi(only) == trial;
}

static uint64_t random_bits(test_random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t test_random_int(test_random *random, int64_t low, int64_t high)
{
    return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

bool test_random_one_in(test_random *random, int64_t n)
{
    return test_random_int(random, 1, n) == 1;
}

double test_random_uniform(test_random *random)
{
    return (double)(random_bits(random) >> 11) * 0x1p-53;
}

double test_random_normal(test_random *random)
{
    const double u = 1 - test_random_uniform(random), v = test_random_uniform(random);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}
