/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_property_test.c - the whole of NSA, forward and backward, against the float64 oracle over random
 * shapes, parameters, dtypes, layouts, levels and numbers of threads. QUERN_TEST_TRIALS=n runs more of them.
 */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <stdio.h>

/* Fewer results asked for: o alone, and gradients without o_b, which are then recomputed. */
static void check_optional_results(nsa_case *c, quern_context *ctx)
{
    const nsa_set o_b = NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN);
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    nsa_reference_backward(r);
    nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c) & ~o_b, nsa_backward_outputs(c));
    nsa_check(r, nsa_backward_outputs(c) & ~NSA_BIT(NSA_D_PE_K));
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), NSA_BIT(NSA_O));
    nsa_check(r, NSA_BIT(NSA_O));
    nsa_reference_free(r);
}

static void whole_agrees_with_the_oracle(void **state)
{
    const uint64_t seed = test_seed("whole_agrees_with_the_oracle", 20261);
    (void)state;
    for (int trial = 0; trial < test_trials(40); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = nsa_config_random(&random, 90);
        const quern_cpu_level level = test_random_level(&random);
        const int32_t threads = (int32_t)test_random_int(&random, 1, 3);
        quern_context *ctx = test_context(level, threads);
        char text[600];
        printf("QUERN_TEST_TRIAL=%d: %s, %d threads: %s\n", trial, quern_cpu_level_name(level), threads,
               nsa_config_describe(&config, text));
        fflush(stdout);
        nsa_case *c = nsa_case_random(&config, &random);
        nsa_check_whole(c, ctx);
        check_optional_results(c, ctx);
        nsa_case_free(c);
        quern_context_destroy(ctx);
    }
}

/* Tiles with fewer rows than a block of Hopper's kernels, whose warps beyond them have no rows. */
static void small_tiles_agree_with_the_oracle(void **state)
{
    static const int64_t sizes[][3] = {{8, 64, 16}, {8, 128, 16}, {4, 64, 48}, {16, 40, 16}};
    test_random random = {test_seed("small_tiles_agree_with_the_oracle", 46)};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        nsa_config config = nsa_config_small();
        config.dtype = i % 2 == 0 ? QUERN_F16 : QUERN_BF16;
        config.weight_dtype = config.dtype;
        config.n = 150;
        config.h = sizes[i][0];
        config.d = config.dv = sizes[i][1];
        config.params.tile = sizes[i][2];
        config.params.block_size = 16;
        config.params.num_selected = 8;
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        nsa_case *c = nsa_case_new(&config, &random);
        nsa_check_whole(c, ctx);
        nsa_case_free(c);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_agrees_with_the_oracle),
        cmocka_unit_test(small_tiles_agree_with_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
