/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_large_test.c - the whole of NSA against the float64 oracle at the head dims, groups and tiles that the
 * GPU's kernels are specialised for; the random tests stay below D 48 to be fast. */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <stdio.h>

typedef struct shape {
    int64_t n, h, hkv, d, dv, block, stride, select, tile, k;
    quern_nsa_metric metric;
    quern_nsa_scope scope;
    bool varlen;
} shape;

#define SOFT QUERN_NSA_METRIC_SOFTMAX
#define MEAN QUERN_NSA_METRIC_MEAN_LOGIT
#define GROUP QUERN_NSA_SCOPE_GROUP
#define HEAD QUERN_NSA_SCOPE_HEAD

static const shape shapes[] = {
    {330, 16, 1, 128, 128, 64, 64, 64, 1, 4, SOFT, GROUP, false},
    {300, 16, 1, 192, 128, 32, 16, 64, 1, 4, SOFT, GROUP, true},
    {400, 4, 2, 64, 64, 32, 32, 32, 64, 6, MEAN, HEAD, false},
    {400, 8, 2, 128, 128, 64, 64, 64, 128, 6, MEAN, GROUP, false},
    {520, 4, 2, 128, 128, 64, 64, 64, 256, 8, MEAN, HEAD, true},
    {260, 2, 2, 256, 256, 64, 64, 64, 1, 4, MEAN, GROUP, false},
    {260, 3, 1, 256, 64, 128, 128, 128, 16, 3, SOFT, HEAD, false},
    {300, 6, 2, 96, 160, 32, 32, 64, 5, 4, SOFT, GROUP, true},
    {200, 4, 4, 40, 232, 16, 8, 48, 100, 7, SOFT, GROUP, false},
    {320, 32, 2, 72, 72, 16, 16, 16, 3, 9, MEAN, GROUP, false},
    {320, 20, 1, 128, 128, 16, 16, 16, 1, 9, SOFT, GROUP, true},
    {300, 2, 1, 128, 128, 256, 256, 256, 2, 3, SOFT, GROUP, false},
};

static void check(quern_dtype dtype)
{
    test_random random = {test_seed("nsa_large", 91)};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const shape *s = &shapes[i];
        nsa_config c = {.params = QUERN_NSA_PARAMS_INIT,
                        .dtype = dtype,
                        .weight_dtype = dtype,
                        .layout = (test_layout)(i % TEST_LAYOUTS),
                        .batch = s->varlen ? 3 : 1,
                        .n = s->n,
                        .lens = {s->n - 70, 0, 70},
                        .varlen = s->varlen,
                        .spare = s->varlen ? 5 : 0,
                        .h = s->h,
                        .hkv = s->hkv,
                        .d = s->d,
                        .dv = s->dv,
                        .project_k = i % 3 == 0,
                        .project_v = i % 2 == 0,
                        .separate_slc = i % 4 == 1,
                        .separate_win = i % 4 == 2};
        char text[600];
        c.params.block_size = s->block;
        c.params.stride = s->stride;
        c.params.select_block = s->select;
        c.params.tile = s->tile;
        c.params.num_selected = s->k;
        c.params.metric = s->metric;
        c.params.scope = s->scope;
        c.params.forced_local = s->tile > s->block ? 0 : 2;
        c.params.window = 100;
        c.params.gate = (quern_nsa_gate_kind)(i % 3);
        const int64_t least = nsa_least_selected(&c.params);
        if (c.params.num_selected < least) c.params.num_selected = least;
        printf("%s\n", nsa_config_describe(&c, text));
        fflush(stdout);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        nsa_case *x = nsa_case_random(&c, &random);
        nsa_check_whole(x, ctx);
        nsa_case_free(x);
        quern_context_destroy(ctx);
    }
}

static void f32_matches_the_oracle(void **state)
{
    (void)state;
    check(QUERN_F32);
}

static void f16_matches_the_oracle(void **state)
{
    (void)state;
    check(QUERN_F16);
}

static void bf16_matches_the_oracle(void **state)
{
    (void)state;
    check(QUERN_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_matches_the_oracle),
        cmocka_unit_test(f16_matches_the_oracle),
        cmocka_unit_test(f32_matches_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
