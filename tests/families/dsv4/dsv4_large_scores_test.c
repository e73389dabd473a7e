/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_large_scores_test.c - the attention core where scores are large, and exact in f32 (up to 2^28, since
 * the oracle's lse is a double): an lse in f32 does not tell the weights of such a row, and the gradients
 * stay in their bounds all the same. */
#include "cmocka_c11.h"
#include "dsv4_core.h"

#include <math.h>
#include <stdlib.h>

/* Entries of -size, 0 and size. */
static void fill(const test_tensor *t, double size, test_random *random)
{
    if (t->buffer == NULL) return;
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++) x[i] = size * (double)test_random_int(random, -1, 1);
    test_tensor_set((test_tensor *)t, x);
    free(x);
}

static void exact_scores_of_any_size_lose_nothing(void **state)
{
    const uint64_t seed = test_seed("dsv4_large_scores", 1);
    (void)state;
    for (int trial = 0; trial < 40; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const oracle_core x = {.queries = 40,
                               .raw = 50,
                               .entries = 300,
                               .heads = trial % 3 == 0 ? 5 : 16,
                               .dim = trial % 2 ? 64 : 16,
                               .window = 20,
                               .ratio = 4,
                               .start = 1200,
                               .chosen = trial % 4 == 0 ? 30 : -1};
        const bool entries = trial % 5 > 0;
        const core_parts parts = {.entries = entries, .list = entries && x.chosen > 0, .sink = trial % 3 > 0};
        core_case c = core_case_make(&random, &x, 2, NULL, QUERN_F32, &parts);
        fill(&c.t[CORE_Q], ldexp(1, trial % 25), &random);
        fill(&c.t[CORE_KV], 1, &random);
        fill(&c.t[CORE_KV_CMP], 1, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            core_case_forward(&c, ctx);
            core_case_backward(&c, ctx);
            core_case_check(&c, true);
            quern_context_destroy(ctx);
        }
        core_case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(exact_scores_of_any_size_lose_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
