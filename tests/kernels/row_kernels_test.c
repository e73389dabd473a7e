/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* row_kernels_test.c - the row kernels that all families share, at every level, element by element against
 * double. nsa_rows_test checks fence(), after streaming stores. */
#include "cmocka_c11.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const quern_dtype activations[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
static const int64_t lengths[] = {0, 1, 3, 7, 8, 15, 16, 17, 24, 40, 63, 128, 250, 256, 301, 512, 1000};
static const double edges[] = {0.0,     -0.0,    INFINITY, -INFINITY, NAN,        65519,      65520, 1e30,
                               0x1p-24, 0x1p-25, 0x3p-25,  1e-40,     1 + 0x1p-8, 1 + 0x3p-8, -65504};
enum { LENGTHS = sizeof lengths / sizeof *lengths, EDGES = sizeof edges / sizeof *edges };

static test_tensor row_of(test_random *random, quern_dtype dtype, int64_t n)
{
    test_tensor t = test_tensor_make(random, dtype, 1, &n, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1);
    return t;
}

static double bound_of(const row_kernels *kernels, const char *name)
{
    return test_kernel_bound("row", name, kernels->level, 0, 0);
}

static void convert(const row_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 9 * LENGTHS; i++) {
        const quern_dtype from = activations[i % 3], to = activations[i / 3 % 3];
        const int64_t n = lengths[i / 9];
        test_tensor in = row_of(random, from, n), out = row_of(random, to, n);
        double *x = test_tensor_get(&in);
        for (int64_t j = 0; j < n; j += 2) x[j] = edges[j / 2 % EDGES];
        test_tensor_set(&in, x);
        free(x);
        x = test_tensor_get(&in);
        kernels->convert(in.view.data, from, out.view.data, to, n);
        test_tensor_check_guards(&out, "convert");
        test_tensor_check_unchanged(&in, "convert's source");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < n; j++) {
            const double expected = test_round(to, x[j]);
            assert_true(bound_of(kernels, "convert") == 0);
            if (isnan(expected) ? !isnan(got[j]) : got[j] != expected || signbit(got[j]) != signbit(expected))
                fail_msg("%s convert %s -> %s: %.9g became %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->level), quern_dtype_name(from), quern_dtype_name(to),
                         x[j], got[j], expected);
        }
        if (from != to)
            TEST_TIME("row", "convert", kernels->level,
                      n * (int64_t)(quern_dtype_size(from) + quern_dtype_size(to)),
                      kernels->convert(in.view.data, from, out.view.data, to, n));
        free(x);
        free(got);
        test_tensor_free(&in);
        test_tensor_free(&out);
    }
}

static void add_scaled(const row_kernels *kernels, test_random *random)
{
    for (int i = 0; i < LENGTHS; i++) {
        const int64_t n = lengths[i];
        test_tensor source = row_of(random, QUERN_F32, n), sum = row_of(random, QUERN_F32, n);
        double *x = test_tensor_get(&source), *old = test_tensor_get(&sum);
        if (n > 7) x[n - 3] = NAN;
        if (n > 9) {
            x[n - 9] = -0.0;
            old[n - 9] = -0.0;
        } /* an unseen key's zero leaves + 0 */
        test_tensor_set(&source, x);
        test_tensor_set(&sum, old);
        kernels->add_scaled(sum.view.data, source.view.data, 0.7f, n);
        test_tensor_check_guards(&sum, "add_scaled");
        test_tensor_check_unchanged(&source, "add_scaled's source");
        double *got = test_tensor_get(&sum);
        for (int64_t c = 0; c < n; c++) {
            const double term = (double)0.7f * x[c],
                         bound = bound_of(kernels, "add_scaled") * (fabs(old[c]) + fabs(term));
            if (isnan(term) ? !isnan(got[c])
                            : !(fabs(got[c] - (old[c] + term)) <= bound) || (got[c] == 0 && signbit(got[c])))
                fail_msg("%s add_scaled, n %lld: [%lld] is %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->level), (long long)n, (long long)c, got[c],
                         old[c] + term);
        }
        TEST_TIME("row", "add_scaled", kernels->level, 12 * n,
                  kernels->add_scaled(sum.view.data, source.view.data, 0.7f, n));
        free(x);
        free(old);
        free(got);
        test_tensor_free(&source);
        test_tensor_free(&sum);
    }
}

static void magnitude(const row_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 3 * LENGTHS; i++) {
        const int64_t n = lengths[i / 3];
        test_tensor t = row_of(random, activations[i % 3], n);
        double *x = test_tensor_get(&t);
        float most = 0;
        for (int64_t j = 0; j < n; j++) most = fmaxf(most, fabsf((float)x[j]));
        uint32_t bits;
        memcpy(&bits, &most, sizeof bits);
        assert_true(bound_of(kernels, "magnitude") == 0);
        assert_int_equal(kernels->magnitude(t.view.data, t.view.dtype, n), bits);
        test_tensor_check_unchanged(&t, "magnitude's source");
        for (int64_t j = 0; j < n; j += 1 + n / 5) {
            const double before = x[j];
            x[j] = j % 2 ? (double)NAN : -(double)INFINITY;
            test_tensor_set(&t, x);
            assert_true(kernels->magnitude(t.view.data, t.view.dtype, n) >= 0x7f800000u);
            x[j] = before;
        }
        TEST_TIME("row", "magnitude", kernels->level, n * (int64_t)quern_dtype_size(t.view.dtype),
                  kernels->magnitude(t.view.data, t.view.dtype, n));
        free(x);
        test_tensor_free(&t);
    }
}

typedef struct kernel_test {
    void (*run)(const row_kernels *kernels, test_random *random);
} kernel_test;

static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("row_kernels", 1);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        test->run(cpu_kernels_for(level)->rows, &random);
    }
}

#define KERNEL_TEST(name)                                                                                    \
    {                                                                                                        \
#name, at_every_level, NULL, NULL, &(kernel_test)                                                    \
        {                                                                                                    \
            name                                                                                             \
        }                                                                                                    \
    }

int main(int argc, char **argv)
{
    char program[] = "row_kernels_test";
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(convert),
        KERNEL_TEST(add_scaled),
        KERNEL_TEST(magnitude),
        {"every_kernel", test_every_kernel, NULL, NULL, program},
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
