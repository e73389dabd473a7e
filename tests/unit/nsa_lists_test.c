/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_lists_test.c - lists of blocks: converted between block sizes, handed in, and out of range. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_reference.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static quern_context *ctx;

static int open_context(void **state)
{
    (void)state;
    ctx = nsa_context(QUERN_CPU_LEVEL_AUTO, 2);
    return 0;
}

static int close_context(void **state)
{
    (void)state;
    quern_context_destroy(ctx);
    return 0;
}

static int32_t any_entry(test_random *random, int64_t blocks)
{
    switch (test_random_int(random, 0, 9)) {
    case 0: return -1;
    case 1: return (int32_t)(test_random_one_in(random, 2) ? INT32_MIN : INT32_MAX);
    case 2: return (int32_t)(blocks + test_random_int(random, 0, 2));
    default: return (int32_t)test_random_int(random, 0, blocks - 1);
    }
}

static void conversion_agrees_with_the_oracle(void **state)
{
    test_random random = {test_seed("conversion_agrees_with_the_oracle", 61)};
    (void)state;
    for (int trial = 0; trial < 300; trial++) {
        const int64_t small = test_random_int(&random, 1, 40), ratio = test_random_int(&random, 1, 5);
        const bool expand = trial % 2 == 0;
        const int64_t from = expand ? small * ratio : small, to = expand ? small : small * ratio;
        const int64_t n = test_random_int(&random, 1, 400), k_in = test_random_int(&random, 1, 9);
        const int64_t k_out = from > to ? k_in * (from / to) : k_in;
        const int64_t in_shape[] = {2, 3, k_in}, out_shape[] = {2, 3, k_out};
        const test_layout layout = trial % 3 == 0 ? TEST_UNALIGNED : TEST_CONTIGUOUS;
        test_tensor in = test_tensor_make(&random, QUERN_I32, 3, in_shape, layout);
        test_tensor out = test_tensor_make(&random, QUERN_I32, 3, out_shape, layout);
        test_tensor count = test_tensor_make(&random, QUERN_I32, 2, in_shape, layout);
        int32_t list[6 * 9], expected[64];
        for (int64_t i = 0; i < 6 * k_in; i++) list[i] = any_entry(&random, (n + from - 1) / from);
        test_tensor_set_i32(&in, list);
        const bool with_count = trial % 5 != 0;
        if (quern_nsa_list_convert(ctx, &in.view, from, &out.view, with_count ? &count.view : NULL, to, n, NULL) !=
            QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        int32_t *got = test_tensor_get_i32(&out), *counts = test_tensor_get_i32(&count);
        for (int64_t row = 0; row < 6; row++) {
            const int32_t taken =
                oracle_nsa_list_convert(list + row * k_in, k_in, from, expected, k_out, to, n);
            if (memcmp(got + row * k_out, expected, sizeof *got * (size_t)k_out) != 0 ||
                (with_count && counts[row] != taken))
                fail_msg("trial %d: row %" PRId64 " from %" PRId64 " to %" PRId64 " n %" PRId64, trial, row, from,
                         to, n);
        }
        test_tensor_check_unchanged(&in, "in");
        test_tensor_check_guards(&out, "out");
        test_tensor_check_guards(&count, "count");
        free(got);
        free(counts);
        test_tensor_free(&in);
        test_tensor_free(&out);
        test_tensor_free(&count);
    }
}

static void conversion_refuses_block_sizes_that_do_not_divide(void **state)
{
    static const int64_t bad[][3] = {{6, 4, 10}, {0, 4, 10}, {4, 0, 10}, {-4, 4, 10}, {4, 4, -1}};
    int32_t in[4] = {0, 1, 2, 3}, out[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    const quern_tensor in_view = quern_tensor_contiguous(in, QUERN_I32, 1, (int64_t[]){4});
    const quern_tensor out_view = quern_tensor_contiguous(out, QUERN_I32, 1, (int64_t[]){4});
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(quern_nsa_list_convert(ctx, &in_view, bad[i][0], &out_view, NULL, bad[i][1], bad[i][2], NULL),
                         QUERN_ERR_INVALID_ARGUMENT);
        for (int j = 0; j < 8; j++) assert_int_equal(out[j], 7);
    }
}

/* Lists with entries of every wrong kind are as good as clean ones: the same bits. */
static void bad_entries_are_skipped(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {test_seed("bad_entries_are_skipped", 62)};
    (void)state;
    config.params.selection = QUERN_NSA_LIST_GIVEN;
    config.params.num_selected = 8;
    config.params.tile = 4;
    nsa_case *c = nsa_case_new(&config, &random);
    const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
    const int64_t count = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]), blocks = (config.n + 7) / 8;
    int32_t *dirty = malloc(sizeof *dirty * (size_t)count), *clean = malloc(sizeof *clean * (size_t)count);
    for (int64_t i = 0; i < count; i++) dirty[i] = any_entry(&random, blocks);
    for (int64_t row = 0; row < count / 8; row++)
        oracle_nsa_list_convert(dirty + row * 8, 8, 8, clean + row * 8, 8, 8, config.n);
    unsigned char *first[NSA_SLOTS] = {NULL};
    for (int run = 0; run < 2; run++) {
        test_tensor_set_i32(&c->tensor[NSA_BLOCK_IDX], run == 0 ? clean : dirty);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
        for (int i = 0; i < NSA_SLOTS; i++) {
            if (((forward | backward) & NSA_BIT(i)) == 0) continue;
            if (run == 0) {
                first[i] = malloc(c->tensor[i].bytes);
                memcpy(first[i], c->tensor[i].buffer, c->tensor[i].bytes);
            } else {
                if (memcmp(first[i], c->tensor[i].buffer, c->tensor[i].bytes) != 0)
                    fail_msg("%s changed with entries that should be skipped", nsa_slot_names[i]);
                free(first[i]);
            }
        }
    }
    free(dirty);
    free(clean);
    nsa_case_free(c);
}

/* A list that the library computed, handed back in, gives the same result as computing it. */
static void lists_handed_back_reproduce_the_call(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {63};
    (void)state;
    config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    config.params.block_size = 2;
    config.n = 600;
    config.batch = 1;
    config.h = config.hkv = 1;
    config.params.max_compressed_groups = 2;
    nsa_case *c = nsa_case_new(&config, &random);
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    double *before = test_tensor_get(&c->tensor[NSA_O]);
    c->config.params.selection = c->config.params.groups = QUERN_NSA_LIST_GIVEN;
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), NSA_BIT(NSA_O));
    double *after = test_tensor_get(&c->tensor[NSA_O]);
    test_check("o", after, before, test_tensor_count(&c->tensor[NSA_O]), test_forward_bound(QUERN_F32));
    free(before);
    free(after);
    nsa_case_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversion_agrees_with_the_oracle),
        cmocka_unit_test(conversion_refuses_block_sizes_that_do_not_divide),
        cmocka_unit_test(bad_entries_are_skipped),
        cmocka_unit_test(lists_handed_back_reproduce_the_call),
    };
    return cmocka_run_group_tests(tests, open_context, close_context);
}
