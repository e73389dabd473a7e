/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_test.c - dense attention, forward and backward, against the float64 oracle at every CPU level
 * that this machine has: masks, heads, head dims, lengths, varlen batches, dtypes and layouts. */
#include "attention_case.h"
#include "cmocka_c11.h"

#include <stdio.h>

static const int32_t ragged[] = {0, 0, 1, 60, 61, 61, 190, 197},
                     ragged_kv[] = {0, 3, 70, 70, 90, 100, 231, 233};
static const int32_t nothing[] = {0, 0, 0};

static const oracle_dense cases[] = {
    /* B, Nq, Nkv, H, Hkv, D, Dv, causal, window, query_offset, scale, cu_q, cu_kv */
    {1, 1, 1, 1, 1, 8, 8, true, 0, -1, 0, NULL, NULL},
    {2, 97, 97, 4, 4, 64, 64, true, 0, -1, 0, NULL, NULL},
    {1, 130, 130, 6, 2, 40, 72, true, 17, -1, 0, NULL, NULL}, /* g = 3 */
    {2, 65, 200, 4, 1, 128, 128, true, 0, -1, 0, NULL, NULL},
    {1, 200, 65, 4, 2, 32, 16, true, 0, -1, 0, NULL, NULL}, /* the first rows see no key */
    {1, 33, 33, 16, 1, 256, 256, true, 0, -1, 0, NULL, NULL},
    {1, 257, 257, 2, 1, 24, 8, false, 0, -1, 0, NULL, NULL},
    {1, 150, 150, 3, 3, 16, 248, false, 31, -1, 0, NULL, NULL},
    {1, 150, 140, 3, 3, 16, 104, false, 30, -1, 0, NULL, NULL},
    {1, 90, 90, 2, 1, 8, 136, false, 1, -1, 0, NULL, NULL}, /* |p - j| <= 0: itself */
    {1, 70, 70, 2, 1, 8, 8, true, 1, -1, 0, NULL, NULL},
    {2, 40, 300, 2, 1, 192, 128, true, 0, 100, 0, NULL, NULL},
    {1, 40, 300, 2, 2, 48, 48, true, 64, 0, 0.3, NULL, NULL},
    {1, 50, 30, 4, 2, 16, 16, true, 9, 25, 0, NULL, NULL},   /* the last rows' windows are past the keys */
    {1, 20, 30, 4, 2, 16, 16, true, 9, 1000, 0, NULL, NULL}, /* no row sees a key */
    {1, 20, 30, 2, 1, 16, 24, true, INT64_MAX, -1, 0, NULL, NULL},
    {1, 20, 30, 2, 1, 16, 24, false, INT64_MAX, -1, 0, NULL, NULL},
    {7, 197, 197, 4, 1, 64, 32, true, 0, -1, 0, ragged, NULL},
    {7, 210, 210, 4, 2, 32, 80, true, 20, -1, 0, ragged, NULL}, /* 13 rows past the last sequence */
    {7, 200, 240, 3, 1, 32, 32, true, 0, -1, 0, ragged, ragged_kv},
    {7, 200, 233, 2, 2, 56, 56, false, 0, -1, 0, ragged, ragged_kv},
    {7, 197, 240, 2, 1, 16, 16, true, 40, 30, 0, ragged, ragged_kv},
    /* wide heads, over several of a GPU's tiles */
    {1, 330, 330, 3, 1, 192, 128, true, 70, -1, 0, NULL, NULL},
    {2, 200, 130, 4, 2, 192, 128, true, 0, -1, 0, NULL, NULL}, /* the first rows see no key */
    {7, 197, 240, 6, 2, 160, 104, true, 0, -1, 0, ragged, ragged_kv},
    {1, 260, 300, 2, 1, 192, 128, false, 50, -1, 0, NULL, NULL},
    {1, 330, 330, 3, 1, 256, 256, true, 70, -1, 0, NULL, NULL},
    {2, 200, 130, 4, 2, 256, 192, true, 0, -1, 0, NULL, NULL},
    {7, 200, 233, 4, 2, 256, 256, false, 0, -1, 0, ragged, ragged_kv},
    {7, 210, 210, 10, 2, 200, 256, true, 20, -1, 0, ragged, NULL},
    /* groups whose queries leave rows of a GPU's tile empty */
    {1, 37, 37, 48, 1, 128, 128, true, 0, -1, 0, NULL, NULL},
    {2, 21, 21, 80, 1, 64, 64, true, 0, -1, 0, NULL, NULL},
    {2, 5, 3, 2, 1, 8, 16, true, 0, -1, 0, nothing, NULL},
    /* nothing to do, or no key to see */
    {0, 5, 5, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL},
    {2, 0, 5, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL},
    {2, 5, 0, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL},
    {2, 5, 0, 2, 1, 8, 8, false, 0, -1, 0, NULL, NULL},
    {2, 5, 5, 0, 0, 8, 8, true, 0, -1, 0, NULL, NULL},
    {0, 0, 0, 2, 1, 8, 8, true, 0, -1, 0, nothing, NULL},
};

/* `index`: of the next call among those of the test. */
static void check_case(size_t number, attention_case *c, const attention_reference *reference,
                       const char *layout, uint64_t *index)
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        if (!test_in_share((*index)++)) continue;
        quern_context *ctx = test_context(level, 2);
        char label[100];
        snprintf(label, sizeof label, "case %zu, %s, %s, %s", number, quern_dtype_name(c->dtype), layout,
                 quern_cpu_level_name(level));
        attention_case_reset(c);
        attention_case_forward(c, ctx);
        attention_case_check_forward(c, reference, label);
        attention_case_backward(c, ctx);
        attention_case_check_backward(c, reference, label);
        quern_context_destroy(ctx);
    }
}

/* Inputs that every dtype holds exactly; attention_full_test draws f32 inputs of full precision. */
static void every_dtype_matches_the_oracle(void **state)
{
    test_random random = {test_seed("attention", 1)};
    uint64_t index = 0;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        attention_case exact;
        attention_case_make_exact(&exact, &cases[i], TEST_CONTIGUOUS, &random);
        attention_reference reference = attention_case_reference(&exact);
        for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
            const test_layout layout = (test_layout)((i + (size_t)dtype) % TEST_LAYOUTS);
            attention_case c;
            attention_case_make_like(&c, &exact, (quern_dtype)dtype, layout, &random);
            check_case(i, &c, &reference, test_layout_name(layout), &index);
            attention_case_free(&c);
        }
        attention_reference_free(&reference);
        attention_case_free(&exact);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dtype_matches_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
