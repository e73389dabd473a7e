/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_decode_test.c - Hopper's kernels of attention's decode: steps of few tokens at D 512, whose keys are
 * cut into shares by their number alone. A sequence's bits do not depend on the batch it stands in. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_core.h"

#include <stdlib.h>
#include <string.h>

enum { RESULTS = CORE_LSE_WIN - CORE_O + 1 };

/* Sequence b of a case, in the same memory. */
static core_case alone(const core_case *c, int64_t b)
{
    core_case one = *c;
    one.batch = 1;
    for (int i = 0; i <= CORE_LSE_WIN; i++) {
        quern_tensor *view = &one.t[i].view;
        if (one.t[i].buffer == NULL || i == CORE_SINK || i == CORE_COS_SIN) continue;
        view->shape[0] = 1;
        view->data = (char *)view->data + b * view->strides[0] * (int64_t)quern_dtype_size(view->dtype);
    }
    return one;
}

static void check(const oracle_core *x, int64_t batch, quern_dtype dtype, const core_parts *parts,
                  uint64_t seed)
{
    test_random random = {seed};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    core_case c = core_case_make(&random, x, batch, NULL, dtype, parts);
    test_tensor first[RESULTS];
    core_case_forward(&c, ctx);
    core_case_check(&c, false);
    for (int i = 0; i < RESULTS; i++) {
        first[i] = test_tensor_copy(&c.t[CORE_O + i]);
        if (batch > 1) test_tensor_reset(&c.t[CORE_O + i]);
    }
    for (int64_t b = 0; batch > 1 && b < batch; b++) {
        const core_case one = alone(&c, b);
        core_case_forward(&one, ctx);
    }
    for (int i = 0; i < RESULTS; i++) {
        assert_true(test_tensor_same_bits(&first[i], &c.t[CORE_O + i]));
        test_tensor_free(&first[i]);
    }
    core_case_free(&c);
    quern_context_destroy(ctx);
}

/* Chosen entries, of lists in any order; heads that fill no group of 64, or several. */
static void chosen_entries(void **state)
{
    static const int64_t heads[] = {64, 8, 1, 65, 128, 17};
    (void)state;
    for (int trial = 0; trial < 12; trial++) {
        const oracle_core x = {.queries = 1 + trial % 4,
                               .raw = 40 + trial * 20,
                               .entries = 300,
                               .heads = heads[trial % 6],
                               .dim = 512,
                               .window = trial % 3 == 0 ? 1 : 128,
                               .ratio = 4,
                               .start = trial == 7 ? 3 : 1196,
                               .rope_dim = 64,
                               .chosen = trial % 2 ? 150 : 7};
        const core_parts parts = {
            .entries = true, .list = true, .count = trial % 4 == 1, .sink = trial % 2, .rope = trial % 3 > 0};
        if (x.raw > x.start + x.queries) continue;
        check(&x, 1 + trial % 3, trial % 5 == 4 ? QUERN_F16 : QUERN_BF16, &parts, (uint64_t)trial + 50);
    }
}

/* So many sequences that a block takes all keys of each; and the same one by one, where blocks share them. */
static void batches_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 4; trial++) {
        const oracle_core x = {.queries = 1 + trial % 2,
                               .raw = 130 + trial,
                               .entries = trial < 2 ? 500 : 2500,
                               .heads = trial == 3 ? 8 : 128,
                               .dim = 512,
                               .window = 128,
                               .ratio = 2,
                               .start = trial < 2 ? 998 : 4996,
                               .rope_dim = 64,
                               .chosen = trial == 0 ? 300 : -1};
        const core_parts parts = {.entries = true, .list = trial == 0, .sink = true, .rope = true};
        check(&x, trial == 3 ? 25 : 13, QUERN_BF16, &parts, (uint64_t)trial + 5);
    }
}

/* Raw rows alone, of more tiles than there are shares; queries that see nothing but themselves. */
static void raw_rows_alone(void **state)
{
    (void)state;
    for (int trial = 0; trial < 3; trial++) {
        const oracle_core x = {.queries = 2,
                               .raw = trial == 2 ? 2 : 2300,
                               .heads = 16,
                               .dim = 512,
                               .window = trial == 0 ? 2200 : 700,
                               .ratio = 4,
                               .start = trial == 2 ? 0 : 2298,
                               .rope_dim = 64,
                               .chosen = -1};
        check(&x, trial == 0 ? 1 : 2, QUERN_BF16, &(core_parts){.rope = true}, (uint64_t)trial + 90);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(chosen_entries),
                                       cmocka_unit_test(batches_change_no_bit),
                                       cmocka_unit_test(raw_rows_alone)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
