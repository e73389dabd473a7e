/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_determinism_test.c - the same bits from 1, 2 and 3 threads, and from the same call twice, at every
 * CPU level. */
#include "cmocka_c11.h"
#include "nsa_random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TRIALS = 12 };

/* Copies of the tensors of `set` as they stand. */
static void copy_results(const nsa_case *c, nsa_set set, unsigned char *copies[NSA_SLOTS])
{
    for (int i = 0; i < NSA_SLOTS; i++) {
        if ((set & NSA_BIT(i)) == 0) continue;
        copies[i] = malloc(c->tensor[i].bytes);
        if (copies[i] == NULL) fail_msg("the test is out of memory");
        memcpy(copies[i], c->tensor[i].buffer, c->tensor[i].bytes);
    }
}

static void same_bits_on_level(const nsa_config *config, test_random random, quern_cpu_level level, const char *what)
{
    nsa_case *c = nsa_case_random(config, &random);
    const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
    unsigned char *copies[NSA_SLOTS] = {NULL};
    for (int run = 0; run < 4; run++) { /* 1, 2, 3 threads, and 3 once more */
        const int32_t threads = run < 3 ? run + 1 : 3;
        quern_context *ctx = nsa_context(level, threads);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
        if (run == 0) copy_results(c, forward | backward, copies);
        for (int i = 0; i < NSA_SLOTS; i++) {
            if (copies[i] != NULL && memcmp(copies[i], c->tensor[i].buffer, c->tensor[i].bytes) != 0)
                fail_msg("%s differs between 1 thread and %d (run %d) [%s]", nsa_slot_names[i], threads, run, what);
        }
        quern_context_destroy(ctx);
    }
    for (int i = 0; i < NSA_SLOTS; i++) free(copies[i]);
    nsa_case_free(c);
}

static void same_bits_from_any_number_of_threads(void **state)
{
    const uint64_t seed = test_seed("same_bits_from_any_number_of_threads", 51);
    (void)state;
    for (int trial = 0; trial < TRIALS; trial++) {
        test_random random = {seed + (uint64_t)trial * 1000003u};
        const nsa_config config = nsa_config_random(&random, 150);
        for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
            char text[600], what[700];
            snprintf(what, sizeof what, "trial %d, %s: %s", trial, quern_cpu_level_name((quern_cpu_level)level),
                     nsa_config_describe(&config, text));
            same_bits_on_level(&config, random, (quern_cpu_level)level, what);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits_from_any_number_of_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
