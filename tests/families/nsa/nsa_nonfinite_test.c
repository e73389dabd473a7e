/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_nonfinite_test.c - NaN goes exactly where the equations carry it; empty and short sequences; ties and
 * NaN in the scores of a selection. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Calls `body` with a context of every level. */
static void for_levels(void (*body)(quern_context *ctx))
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        body(ctx);
        quern_context_destroy(ctx);
    }
}

/* One token of one input becomes NaN; every output has NaN where the oracle has, and nowhere else. `shape` 1:
 * lists of a token of four heads; 2: lists of 64 tokens of eight heads. */
static void nan_in(quern_context *ctx, int shape)
{
    static const struct {
        nsa_slot slot;
        int64_t token;
    } poisons[] = {{NSA_Q, 40}, {NSA_K, 37}, {NSA_V, 37}, {NSA_K, 74}, {NSA_V, 0}, {NSA_D_O, 12}};
    for (size_t i = 0; i < sizeof poisons / sizeof *poisons; i++) {
        for (int dtype = shape > 0 ? QUERN_F16 : QUERN_F32; dtype <= QUERN_BF16; dtype++) {
            nsa_config config = nsa_config_small();
            test_random random = {71 + i};
            if (!test_in_share((uint64_t)(shape * 100 + dtype * 10) + i)) continue;
            config.dtype = (quern_dtype)dtype;
            config.batch = 1;
            config.params.gate = QUERN_NSA_GATE_WEIGHTS;
            config.params.tile = i % 2 == 0 ? 1 : 4;
            if (shape > 0) {
                config.params.tile = shape == 1 ? 1 : 64;
                config.params.block_size = 16;
                config.params.stride = 0;
                config.params.select_block = shape == 1 ? 64 : 16;
                config.params.num_selected = shape == 1 ? 4 : 9;
                config.n = 230;
                config.d = config.dv = 64;
                config.hkv = 1;
                config.h = shape == 1 ? 4 : 8;
            }
            nsa_case *c = nsa_case_new(&config, &random);
            test_tensor *t = &c->tensor[poisons[i].slot];
            const int64_t width = test_tensor_count(t) / config.n;
            double *values = test_tensor_get(t);
            values[poisons[i].token * width + 3] = NAN;
            test_tensor_set(t, values);
            free(values);
            nsa_check_whole(c, ctx);
            nsa_case_free(c);
        }
    }
}

static void nan_on(quern_context *ctx)
{
    for (int shape = 0; shape < 3; shape++) nan_in(ctx, shape);
}

static void nan_goes_where_the_equations_carry_it(void **state)
{
    (void)state;
    for_levels(nan_on);
}

/* Lengths from nothing to a little over a block, alone: no key, no entry, one entry. */
static void short_on(quern_context *ctx)
{
    for (int64_t n = 0; n <= 18; n++) {
        for (int mode = 0; mode < 4; mode++) {
            nsa_config config = nsa_config_small();
            test_random random = {72};
            config.n = n;
            config.batch = mode == 3 ? 0 : 2;
            config.params.tile = mode & 1 ? 5 : 1;
            config.params.num_selected = 6;
            config.params.gate = mode & 2 ? QUERN_NSA_GATE_GIVEN : QUERN_NSA_GATE_WEIGHTS;
            config.params.compress = mode & 1 ? QUERN_NSA_COMPRESS_LINEAR : QUERN_NSA_COMPRESS_MEAN;
            nsa_case *c = nsa_case_new(&config, &random);
            nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
            nsa_reference *r = nsa_reference_new(c, true);
            nsa_check_lists(r, true);
            nsa_reference_take_lists(r);
            nsa_reference_forward(r);
            nsa_check(r, nsa_forward_outputs(c));
            nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
            nsa_reference_backward(r);
            /* With one key in sight the gradients of q and k cancel exactly; from 3 tokens on, not all do. */
            const nsa_set cancelling = n < 3 ? NSA_BIT(NSA_D_Q) | NSA_BIT(NSA_D_K) : 0;
            nsa_set compared = nsa_backward_outputs(c) & ~cancelling & ~NSA_BIT(NSA_D_PE_K);
            if (n < 9 + 8) compared &= ~NSA_BIT(NSA_D_W_K); /* one entry: the same cancellation */
            nsa_check(r, compared);
            nsa_reference_free(r);
            nsa_case_free(c);
        }
    }
}

static void empty_and_short_sequences(void **state)
{
    (void)state;
    for_levels(short_on);
}

/* Scores that are equal, NaN or -inf, in k_cmp handed in: ties to the lowest index, NaN last. */
static void order_on(quern_context *ctx)
{
    for (int metric = 0; metric < 2; metric++) {
        for (int kind = 0; kind < 4; kind++) {
            nsa_config config = nsa_config_small();
            test_random random = {73};
            config.batch = 1;
            config.params.compress = QUERN_NSA_COMPRESS_GIVEN;
            config.params.metric = (quern_nsa_metric)metric;
            config.params.tile = kind & 1 ? 16 : 1;
            config.params.num_selected = 6;
            nsa_case *c = nsa_case_new(&config, &random);
            double *k_cmp = test_tensor_get(&c->tensor[NSA_K_CMP]);
            const int64_t width = config.hkv * config.d;
            for (int64_t i = 0; i < c->entries * width; i++) {
                if (kind < 2) k_cmp[i] = i / width % 3 == 0 ? 1 : 0.5; /* many exact ties */
                if (kind == 2 && i / width == 4) k_cmp[i] = NAN;
                if (kind == 3 && i / width == 4 && i % width == 0) k_cmp[i] = INFINITY;
            }
            test_tensor_set(&c->tensor[NSA_K_CMP], k_cmp);
            free(k_cmp);
            nsa_run(c, ctx, nsa_call_select, NSA_BIT(NSA_Q) | NSA_BIT(NSA_K_CMP),
                    NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT));
            nsa_reference *r = nsa_reference_new(c, true);
            nsa_check_lists(r, false);
            nsa_reference_free(r);
            nsa_case_free(c);
        }
    }
}

static void ties_and_nan_in_scores(void **state)
{
    (void)state;
    for_levels(order_on);
}

/* Exact ties: scores that are equal in any precision must resolve to the lowest index, not merely within
 * the test rule's tolerance. */
static void exact_ties_take_the_lowest_index(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {74};
    (void)state;
    config.batch = 1;
    config.n = 80;
    config.params.compress = QUERN_NSA_COMPRESS_GIVEN;
    config.params.num_selected = 5;
    for (int metric = 0; metric < 2; metric++) {
        config.params.metric = (quern_nsa_metric)metric;
        nsa_case *c = nsa_case_new(&config, &random);
        double *k_cmp = test_doubles(c->entries * config.hkv * config.d);
        test_tensor_set(&c->tensor[NSA_K_CMP], k_cmp);
        free(k_cmp);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            nsa_run(c, ctx, nsa_call_select, NSA_BIT(NSA_Q) | NSA_BIT(NSA_K_CMP),
                    NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT));
            int32_t *idx = test_tensor_get_i32(&c->tensor[NSA_BLOCK_IDX]);
            /* Token 79: forced 0, 8, 9; then 1 and 2, as all complete blocks score the same. */
            assert_memory_equal(idx + 79 * 5, ((int32_t[]){0, 1, 2, 8, 9}), 20);
            free(idx);
            quern_context_destroy(ctx);
        }
        nsa_case_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nan_goes_where_the_equations_carry_it),
        cmocka_unit_test(empty_and_short_sequences),
        cmocka_unit_test(ties_and_nan_in_scores),
        cmocka_unit_test(exact_ties_take_the_lowest_index),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
