/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_determinism_test.c - the same bits from 1, 2 and 3 threads, and from the same call twice, at every
 * CPU level. */
#include "cmocka_c11.h"
#include "nsa_random.h"

#include <stdio.h>

static void same_bits_on_level(const nsa_config *config, test_random random, quern_cpu_level level,
                               const char *what)
{
    nsa_case *c = nsa_case_random(config, &random);
    const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
    test_tensor copies[NSA_SLOTS];
    for (int run = 0; run < 4; run++) { /* 1, 2, 3 threads, and 3 once more */
        const int32_t threads = run < 3 ? run + 1 : 3;
        quern_context *ctx = test_context(level, threads);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
        if (run == 0) nsa_copy(c, forward | backward, copies);
        nsa_check_same_bits(c, forward | backward, copies, what);
        quern_context_destroy(ctx);
    }
    nsa_free_copies(copies);
    nsa_case_free(c);
}

static void same_bits_from_any_number_of_threads(void **state)
{
    const uint64_t seed = test_seed("same_bits_from_any_number_of_threads", 51);
    (void)state;
    for (int trial = 0; trial < test_trials(12); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = nsa_config_random(&random, 150);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            char what[80];
            snprintf(what, sizeof what, "QUERN_TEST_TRIAL=%d, %s, not the first run", trial,
                     quern_cpu_level_name(level));
            same_bits_on_level(&config, random, level, what);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits_from_any_number_of_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
