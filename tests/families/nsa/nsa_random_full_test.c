/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_random_full_test.c - the sweep of nsa_property_test.c and nsa_determinism_test.c over many more and
 * larger problems, from a seed of its own. */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <stdio.h>

static void sweep(const char *name, uint64_t fallback, int trials, int64_t tokens)
{
    const uint64_t seed = test_seed(name, fallback);
    for (int trial = 0; trial < test_trials(trials); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = nsa_config_random(&random, tokens);
        const quern_cpu_level level = test_random_level(&random);
        char text[600];
        printf("QUERN_TEST_TRIAL=%d: %s: %s\n", trial, quern_cpu_level_name(level),
               nsa_config_describe(&config, text));
        fflush(stdout);
        nsa_case *c = nsa_case_random(&config, &random);
        const nsa_set results = nsa_forward_outputs(c) | nsa_backward_outputs(c);
        test_tensor first[NSA_SLOTS];
        quern_context *one = test_context(level, 1), *three = test_context(level, 3);
        nsa_check_whole(c, one);
        nsa_copy(c, results, first);
        nsa_run(c, three, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        nsa_run(c, three, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
        nsa_check_same_bits(c, results, first, "3 threads after 1");
        nsa_free_copies(first);
        quern_context_destroy(one);
        quern_context_destroy(three);
        nsa_case_free(c);
    }
}

static void many_small_problems(void **state)
{
    (void)state;
    sweep("many_small_problems", 91, 400, 60);
}

static void some_larger_problems(void **state)
{
    (void)state;
    sweep("some_larger_problems", 92, 60, 400);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(many_small_problems),
                                       cmocka_unit_test(some_larger_problems)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
