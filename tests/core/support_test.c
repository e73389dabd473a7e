/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* support_test.c - the tests' own instruments: rounding, strided views, comparisons. */
#include "cmocka_c11.h"
#include "compare.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void rounding_is_to_nearest_even(void **state)
{
    (void)state;
    assert_true(test_round(QUERN_BF16, 1 + 0x1p-8) == 1);
    assert_true(test_round(QUERN_BF16, 1 + 0x3p-8) == 1 + 0x1p-6);
    assert_true(test_round(QUERN_BF16, 1 + 0x1p-8 + 0x1p-30) == 1 + 0x1p-7);
    assert_true(test_round(QUERN_F16, 1 + 0x1p-11) == 1);
    assert_true(test_round(QUERN_F16, 1 + 0x3p-11) == 1 + 0x1p-9);
    assert_true(test_round(QUERN_F16, 65519) == 65504 && isinf(test_round(QUERN_F16, 65520)));
    assert_true(test_round(QUERN_F16, 0x1p-24) == 0x1p-24 && test_round(QUERN_F16, 0x1p-25) == 0);
    assert_true(test_round(QUERN_F16, 0x3p-25) == 0x1p-23);
}

/* Every finite f16 and bf16 pattern survives a round trip through a tensor. */
static void half_patterns_round_trip(void **state)
{
    const quern_dtype dtypes[] = {QUERN_F16, QUERN_BF16};
    const int64_t shape[] = {65536};
    test_random random = {1};
    (void)state;
    for (int i = 0; i < 2; i++) {
        test_tensor a = test_tensor_make(&random, dtypes[i], 1, shape, TEST_CONTIGUOUS);
        test_tensor b = test_tensor_make(&random, dtypes[i], 1, shape, TEST_CONTIGUOUS);
        uint16_t *bits = a.view.data;
        for (int32_t j = 0; j < 65536; j++) {
            const uint16_t exponent = dtypes[i] == QUERN_F16 ? 0x7c00 : 0x7f80;
            bits[j] = (uint16_t)((j & exponent) == exponent ? 0 : j);
        }
        double *values = test_tensor_get(&a);
        test_tensor_set(&b, values);
        assert_true(test_tensor_same_bits(&a, &b));
        free(values);
        test_tensor_free(&a);
        test_tensor_free(&b);
    }
}

static void strided_views_keep_their_values(void **state)
{
    test_random random = {test_seed("strided_views_keep_their_values", 3)};
    (void)state;
    for (int trial = 0; trial < 60; trial++) {
        const int64_t shape[] = {test_random_int(&random, 0, 3), test_random_int(&random, 1, 4),
                                 test_random_int(&random, 1, 3), test_random_int(&random, 1, 5)};
        test_tensor t = test_tensor_make(&random, QUERN_F32, 4, shape, (test_layout)(trial % TEST_LAYOUTS));
        const int64_t count = test_tensor_count(&t);
        double *in = malloc(sizeof *in * (size_t)(count + 1));
        for (int64_t i = 0; i < count; i++) in[i] = (double)i + 0.5;
        test_tensor_set(&t, in);
        double *out = test_tensor_get(&t);
        assert_memory_equal(in, out, sizeof *in * (size_t)count);
        assert_true(t.view.strides[3] == 1);
        test_tensor_check_guards(&t, "t");
        free(in);
        free(out);
        test_tensor_free(&t);
    }
}

static void a_written_byte_of_a_workspace_is_seen(void **state)
{
    static const size_t sizes[] = {1, 2, 1000};
    (void)state;
    for (int i = 0; i < 3; i++) {
        test_workspace w = test_workspace_make(sizes[i]);
        unsigned char *data = w.data;
        assert_true(test_workspace_is_new(&w));
        for (size_t at = 0; at < sizes[i]; at += sizes[i] / 2 + 1) {
            data[at] ^= 1;
            assert_false(test_workspace_is_new(&w));
            data[at] ^= 1;
        }
        data[sizes[i] - 1] = 0;
        assert_false(test_workspace_is_new(&w));
        test_workspace_close(&w);
    }
    test_workspace none = test_workspace_make(0);
    assert_true(test_workspace_is_new(&none));
    test_workspace_close(&none);
}

static void relative_l2_compares_nonfinite_values(void **state)
{
    const double reference[] = {3, -INFINITY, 4, NAN}, same[] = {3, -INFINITY, 4.0005, NAN};
    const double finite[] = {3, -1e30, 4, NAN}, hidden[] = {3, -INFINITY, 4, 0};
    const double made[] = {NAN, -INFINITY, 4, NAN}, zero[] = {0, 0, 0, 0}, tiny[] = {0, 0, 1e-300, 0};
    char why[200];
    (void)state;
    assert_true(fabs(test_relative_l2(same, reference, 4, why) - 1e-4) < 1e-9);
    assert_true(isinf(test_relative_l2(finite, reference, 4, why)));
    assert_true(isinf(test_relative_l2(hidden, reference, 4, why)));
    assert_true(isinf(test_relative_l2(made, reference, 4, why)));
    assert_true(test_relative_l2(zero, zero, 4, why) == 0);
    assert_true(isinf(test_relative_l2((const double[]){1e-100, 0, 0, 0}, zero, 4, why)));
    assert_true(isinf(test_relative_l2(tiny, zero, 4, why)));
}

/* How many of a grid's first `count` cases are tried. */
static int in_share(uint64_t count)
{
    int tried = 0;
    for (uint64_t i = 0; i < count; i++) tried += test_in_share(i);
    return tried;
}

static void trials_are_a_number_or_a_share(void **state)
{
    (void)state;
    const char *given = getenv("QUERN_TEST_TRIALS");
    char *before = given != NULL ? strdup(given) : NULL;
    unsetenv("QUERN_TEST_TRIALS");
    assert_int_equal(test_trials(40), 40);
    assert_int_equal(in_share(4000), 4000);
    setenv("QUERN_TEST_TRIALS", "7", 1);
    assert_int_equal(test_trials(40), 7);
    assert_int_equal(in_share(4000), 4000);
    setenv("QUERN_TEST_TRIALS", "1/8", 1);
    assert_int_equal(test_trials(40), 5);
    assert_int_equal(test_trials(3), 1);
    assert_in_range(in_share(4000), 450, 550);
    assert_true(test_in_share(0));
    if (before != NULL) setenv("QUERN_TEST_TRIALS", before, 1);
    else unsetenv("QUERN_TEST_TRIALS");
    free(before);
}

static void every_level_comes_once_in_order(void **state)
{
    quern_cpu_level level = QUERN_CPU_LEVEL_AUTO, last = QUERN_CPU_LEVEL_AUTO;
    int64_t n = 0;
    (void)state;
    for (; test_next_level(&level); n++) {
        assert_int_equal(level, test_level(n));
        assert_string_not_equal(quern_cpu_level_name(level), quern_cpu_level_name(last));
        last = level;
    }
    assert_int_equal(test_level(0), QUERN_CPU_LEVEL_PORTABLE);
    assert_int_equal(test_level(n), QUERN_CPU_LEVEL_PORTABLE);
    assert_int_equal(last, quern_cpu_level_detect());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(half_patterns_round_trip),
        cmocka_unit_test(strided_views_keep_their_values),
        cmocka_unit_test(a_written_byte_of_a_workspace_is_seen),
        cmocka_unit_test(relative_l2_compares_nonfinite_values),
        cmocka_unit_test(trials_are_a_number_or_a_share),
        cmocka_unit_test(every_level_comes_once_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
