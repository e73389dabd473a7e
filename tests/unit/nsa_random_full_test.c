/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_random_full_test.c - the sweep of nsa_property_test.c and nsa_determinism_test.c over many more and
 * larger problems, from a seed of its own. */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void sweep(const char *name, uint64_t fallback, int trials, int64_t tokens)
{
    const uint64_t seed = test_seed(name, fallback);
    const char *only = getenv("QUERN_TEST_TRIAL");
    for (int trial = 0; trial < trials; trial++) {
        if (only != NULL && atoi(only) != trial) continue;
        test_random random = {seed + (uint64_t)trial * 1000003u};
        const nsa_config config = nsa_config_random(&random, tokens);
        const quern_cpu_level level = nsa_random_level(&random);
        char text[600];
        printf("QUERN_TEST_TRIAL=%d: %s: %s\n", trial, quern_cpu_level_name(level), nsa_config_describe(&config, text));
        fflush(stdout);
        nsa_case *c = nsa_case_random(&config, &random);
        const nsa_set results = nsa_forward_outputs(c) | nsa_backward_outputs(c);
        unsigned char *first[NSA_SLOTS] = {NULL};
        for (int32_t threads = 1; threads <= 3; threads += 2) {
            quern_context *ctx = nsa_context(level, threads);
            if (threads == 1) {
                nsa_check_whole(c, ctx);
            } else {
                nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
                nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
            }
            for (int i = 0; i < NSA_SLOTS; i++) {
                if ((results & NSA_BIT(i)) == 0) continue;
                if (threads == 1) {
                    first[i] = malloc(c->tensor[i].bytes);
                    if (first[i] == NULL) fail_msg("the test is out of memory");
                    memcpy(first[i], c->tensor[i].buffer, c->tensor[i].bytes);
                } else if (memcmp(first[i], c->tensor[i].buffer, c->tensor[i].bytes) != 0) {
                    fail_msg("%s differs between 1 thread and %d", nsa_slot_names[i], threads);
                }
            }
            quern_context_destroy(ctx);
        }
        for (int i = 0; i < NSA_SLOTS; i++) free(first[i]);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(many_small_problems), cmocka_unit_test(some_larger_problems)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
