/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_large_scores_test.c - the branches of NSA where scores are large, and exact in f32: an lse in f32 does
 * not tell the weights of such a row, and the gradients stay in their bounds all the same. */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>

/* Entries of -size, 0 and size. */
static void fill(nsa_case *c, nsa_slot slot, double size, test_random *random)
{
    test_tensor *t = &c->tensor[slot];
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++) x[i] = size * (double)test_random_int(random, -1, 1);
    test_tensor_set(t, x);
    free(x);
}

static void check_branches(nsa_case *c)
{
    const nsa_set inputs = nsa_attend_inputs(c), outputs = nsa_attend_outputs(c);
    const nsa_set gradients = nsa_attend_gradients(c);
    const nsa_set d_outputs = NSA_BIT(NSA_D_O_CMP) | NSA_BIT(NSA_D_O_SLC) | NSA_BIT(NSA_D_O_WIN);
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    nsa_reference_attend_backward(r);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        nsa_run(c, ctx, nsa_call_attend, inputs, outputs);
        nsa_check(r, outputs);
        nsa_run(c, ctx, nsa_call_attend_backward, inputs | outputs | d_outputs, gradients);
        nsa_check(r, gradients);
        quern_context_destroy(ctx);
    }
    nsa_reference_free(r);
}

/* The same with the gates, which scale what reaches a branch. */
static void check_whole(nsa_case *c)
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        nsa_check_whole(c, ctx);
        quern_context_destroy(ctx);
    }
}

static void exact_scores_of_any_size_lose_nothing(void **state)
{
    static const nsa_slot keys[] = {NSA_K, NSA_K_CMP};
    const uint64_t seed = test_seed("nsa_large_scores", 1);
    (void)state;
    for (int trial = 0; trial < 24; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        nsa_config config = nsa_config_small();
        config.params.compress = QUERN_NSA_COMPRESS_GIVEN;
        config.params.selection = QUERN_NSA_LIST_GIVEN;
        config.params.tile = trial % 2 ? 1 : 8; /* rows that share a list: few are gathered */
        config.params.stride = 4;
        config.params.scope = trial / 2 % 2 ? QUERN_NSA_SCOPE_HEAD : QUERN_NSA_SCOPE_GROUP;
        config.params.gate = QUERN_NSA_GATE_GIVEN;
        config.n = 150;
        config.d = trial % 3 ? 64 : 16;
        nsa_case *c = nsa_case_random(&config, &random);
        fill(c, NSA_Q, ldexp(1, trial < 16 ? trial : 16 * (trial - 16)), &random);
        for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) fill(c, keys[i], 1, &random);
        check_branches(c);
        check_whole(c);
        nsa_case_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(exact_scores_of_any_size_lose_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
