/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_large_full_test.c - the configurations that models use, at their real sizes: whole where the oracle can
 * follow, else sampled rows and lists against it. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void whole(nsa_config config, quern_dtype dtype)
{
    test_random random = {101};
    config.dtype = dtype;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    nsa_case *c = nsa_case_new(&config, &random);
    nsa_check_whole(c, ctx);
    nsa_case_free(c);
    quern_context_destroy(ctx);
}

static void papers_configuration(void **state)
{
    nsa_config config = {
        .params = QUERN_NSA_PARAMS_INIT, .batch = 1, .n = 170, .h = 64, .hkv = 4, .d = 192, .dv = 128};
    (void)state;
    config.params.block_size = 32;
    config.params.stride = 16;
    config.params.select_block = 64;
    config.params.window = 64;
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    whole(config, QUERN_F32);
    config.params.compress = QUERN_NSA_COMPRESS_LINEAR;
    config.pe_k = config.pe_v = true;
    config.h = 16;
    config.hkv = 1;
    config.n = 130;
    whole(config, QUERN_BF16);
}

static void every_default(void **state)
{
    const nsa_config config = {
        .params = QUERN_NSA_PARAMS_INIT, .batch = 1, .n = 1700, .h = 4, .hkv = 2, .d = 64, .dv = 64};
    (void)state;
    whole(config, QUERN_F32);
    whole(config, QUERN_BF16);
    whole(config, QUERN_F16);
}

static void preset_tile256(void **state)
{
    nsa_config config = {.params = QUERN_NSA_PARAMS_INIT,
                         .batch = 1,
                         .n = 1100,
                         .h = 4,
                         .hkv = 1,
                         .d = 64,
                         .dv = 64,
                         .project_k = true,
                         .project_v = true};
    (void)state;
    assert_int_equal(quern_nsa_params_preset(&config.params, "tile256"), QUERN_OK);
    whole(config, QUERN_F32);
    whole(config, QUERN_BF16);
}

/* Compares `samples` rows of every branch and head, and the lists of their tiles, with the oracle. */
static void check_samples(const nsa_case *c, test_random *random, int samples)
{
    static const char *const names[] = {"o_cmp", "o_slc", "o_win"};
    const nsa_sequence s = nsa_sequence_of(c, 0);
    const oracle_nsa *a = &s.a;
    const int64_t k = a->params.num_selected, tiles = oracle_nsa_tiles(a), lists = oracle_nsa_lists(a);
    oracle_nsa_arrays x = {0};
    double *q = test_tensor_get(&c->tensor[NSA_Q]), *keys = test_tensor_get(&c->tensor[NSA_K]);
    double *values = test_tensor_get(&c->tensor[NSA_V]);
    double *k_cmp = test_tensor_get(&c->tensor[NSA_K_CMP]), *v_cmp = test_tensor_get(&c->tensor[NSA_V_CMP]);
    int32_t *idx = test_tensor_get_i32(&c->tensor[NSA_BLOCK_IDX]);
    int32_t *groups =
        c->tensor[NSA_GROUP_IDX].buffer != NULL ? test_tensor_get_i32(&c->tensor[NSA_GROUP_IDX]) : NULL;
    x.q = q;
    x.k = keys;
    x.v = values;
    x.k_cmp = k_cmp;
    x.v_cmp = v_cmp;
    x.block_idx = idx;
    x.group_idx = groups;
    oracle_choice *choices = malloc(sizeof *choices * (size_t)(oracle_nsa_blocks(a) + 1));
    double *rows = test_doubles(samples * a->dv), *expected = test_doubles(samples * a->dv);
    for (int b = 0; b < 3; b++) {
        double *o = test_tensor_get(&c->tensor[NSA_O_CMP + b]),
               *lse = test_tensor_get(&c->tensor[NSA_LSE_CMP + b]);
        for (int64_t head = 0; head < a->h; head++) {
            for (int i = 0; i < samples; i++) {
                const int64_t t = i == 0 ? a->n - 1 : test_random_int(random, 0, a->n - 1);
                double row_lse;
                oracle_nsa_branch_rows(a, &x, b, head, t, 1, expected + i * a->dv, &row_lse);
                memcpy(rows + i * a->dv, o + (t * a->h + head) * a->dv, sizeof *rows * (size_t)a->dv);
                const double got = lse[head * a->n + t];
                assert_true(isinf(row_lse) ? got == row_lse
                                           : fabs(got - row_lse) <= 2e-6 * (1 + fabs(row_lse)));
            }
            test_check(names[b], rows, expected, samples * a->dv, test_forward_bound(c->config.dtype));
        }
        free(o);
        free(lse);
    }
    for (int i = 0; i < samples; i++) {
        const int64_t list = test_random_int(random, 0, lists - 1);
        const int64_t tile = i == 0 ? tiles - 1 : test_random_int(random, 0, tiles - 1);
        char why[200];
        oracle_nsa_block_choices(a, q, k_cmp, list, tile, choices);
        if (!oracle_nsa_accepts(choices, oracle_nsa_blocks(a), k, idx + (list * tiles + tile) * k, why))
            fail_msg("list %lld tile %lld: %s", (long long)list, (long long)tile, why);
    }
    free(q);
    free(keys);
    free(values);
    free(k_cmp);
    free(v_cmp);
    free(idx);
    free(groups);
    free(choices);
    free(rows);
    free(expected);
}

static void forward_and_sample(const nsa_config *config, int samples)
{
    test_random random = {102};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    nsa_case *c = nsa_case_new(config, &random);
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    check_samples(c, &random, samples);
    nsa_case_free(c);
    quern_context_destroy(ctx);
}

static void sampled_rows_at_16384_tokens(void **state)
{
    nsa_config config = {
        .params = QUERN_NSA_PARAMS_INIT, .batch = 1, .n = 16384, .h = 4, .hkv = 2, .d = 128, .dv = 128};
    (void)state;
    config.forward_only = true;
    forward_and_sample(&config, 12);
    config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    config.params.tile = 64;
    config.params.max_compressed_groups = 2;
    forward_and_sample(&config, 12);
    config.dtype = QUERN_BF16;
    forward_and_sample(&config, 12);
}

/* More than 2^21 tokens; with 2 heads of 8 and 3 branches no tensor exceeds 2^31 elements, but 32-bit
 * products of lengths would. */
static void two_million_tokens(void **state)
{
    nsa_config config = {
        .params = QUERN_NSA_PARAMS_INIT, .batch = 1, .n = (1 << 21) + 77, .h = 1, .hkv = 1, .d = 8, .dv = 8};
    (void)state;
    config.forward_only = true;
    config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    config.params.tile = 256;
    config.params.num_selected = 8;
    config.params.max_compressed_groups = 4;
    config.params.window = 64;
    forward_and_sample(&config, 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(papers_configuration), cmocka_unit_test(every_default),
        cmocka_unit_test(preset_tile256),       cmocka_unit_test(sampled_rows_at_16384_tokens),
        cmocka_unit_test(two_million_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
