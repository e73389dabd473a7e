/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* wide_heads_test.c - head dims beyond 256, which the CPU takes up to 512: dense attention and the whole of
 * NSA against the float64 oracle at every level. */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "nsa_reference.h"

#include <stdio.h>

static void dense_attention(void **state)
{
    static const oracle_dense cases[] = {
        {1, 33, 33, 4, 1, 512, 512, true, 0, -1, 0, NULL, NULL},
        {2, 70, 130, 2, 2, 264, 512, true, 19, -1, 0, NULL, NULL},
        {1, 65, 65, 3, 1, 512, 8, false, 0, -1, 0, NULL, NULL},
        {1, 97, 97, 2, 1, 40, 488, true, 0, -1, 0, NULL, NULL},
    };
    test_random random = {test_seed("wide_heads", 1)};
    uint64_t index = 0;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        attention_case exact;
        attention_case_make_exact(&exact, &cases[i], TEST_CONTIGUOUS, &random);
        attention_reference reference = attention_case_reference(&exact);
        for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
            attention_case c;
            attention_case_make_like(&c, &exact, (quern_dtype)dtype,
                                     (test_layout)((i + (size_t)dtype) % TEST_LAYOUTS), &random);
            for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
                if (!test_in_share(index++)) continue;
                quern_context *ctx = test_context(level, 2);
                char label[100];
                snprintf(label, sizeof label, "case %zu, %s, %s", i, quern_dtype_name(c.dtype),
                         quern_cpu_level_name(level));
                attention_case_reset(&c);
                attention_case_forward(&c, ctx);
                attention_case_check_forward(&c, &reference, label);
                attention_case_backward(&c, ctx);
                attention_case_check_backward(&c, &reference, label);
                quern_context_destroy(ctx);
            }
            attention_case_free(&c);
        }
        attention_reference_free(&reference);
        attention_case_free(&exact);
    }
}

static void whole_nsa(void **state)
{
    test_random random = {test_seed("wide_heads", 2)};
    uint64_t index = 0;
    (void)state;
    for (int i = 0; i < 6; i++) {
        nsa_config config = nsa_config_small();
        config.n = 40;
        config.d = i % 2 ? 16 : 264;
        config.dv = i % 3 ? 512 : 272;
        config.dtype = (quern_dtype)(i % 3);
        config.params.gate = QUERN_NSA_GATE_WEIGHTS;
        config.params.compress = i % 4 < 2 ? QUERN_NSA_COMPRESS_MEAN : QUERN_NSA_COMPRESS_LINEAR;
        config.project_k = config.project_v = i % 4 == 0;
        config.pe_k = config.pe_v = i % 4 > 1;
        config.params.metric = i % 2 ? QUERN_NSA_METRIC_SOFTMAX : QUERN_NSA_METRIC_MEAN_LOGIT;
        nsa_case *c = nsa_case_new(&config, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            if (!test_in_share(index++)) continue;
            quern_context *ctx = test_context(level, 2);
            nsa_check_whole(c, ctx);
            quern_context_destroy(ctx);
        }
        nsa_case_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(dense_attention), cmocka_unit_test(whole_nsa)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
