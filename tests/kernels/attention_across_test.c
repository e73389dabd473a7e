/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_across_test.c - products of a few rows with weights in place: against sums in double, and with
 * the bits of the same product over packed panels. The bound is that of src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static row_source source_of(const test_tensor *t)
{
    return (row_source){t->view.data, t->view.dtype, t->view.strides[0], t->view.shape[0], t->view.shape[1]};
}

/* The packed product of one panel, piece by piece. */
static void packed(const attention_kernels *kernels, bool weights, const test_tensor *a, const row_source *b,
                   int64_t first, float *c, int64_t ldc)
{
    const int64_t panel = kernels->panel, m = a->view.shape[0], left = b->rows - first;
    uint32_t *words = malloc((size_t)(panel * ACROSS_DEPTH) * sizeof *words);
    uint16_t *rows = malloc((size_t)(m * ACROSS_DEPTH) * sizeof *rows);
    for (int64_t p = 0; p < b->dim; p += ACROSS_DEPTH) {
        const int64_t depth = b->dim - p < ACROSS_DEPTH ? b->dim - p : ACROSS_DEPTH;
        const row_source piece = {(const uint16_t *)b->data + first * b->stride + p, b->dtype, b->stride,
                                  left < panel ? left : panel, depth};
        for (int64_t i = 0; i < m; i++)
            memcpy(rows + i * ACROSS_DEPTH, (const uint16_t *)a->view.data + i * a->view.strides[0] + p,
                   (size_t)depth * sizeof *rows);
        kernels->pack_keys_bf16(&piece, (int32_t)panel, words);
        (weights ? kernels->mm_weights_bf16 : kernels->mm_bf16)(m, panel, depth / 2, rows, ACROSS_DEPTH / 2,
                                                                1, words, panel, c + first, ldc, p > 0);
    }
    free(words), free(rows);
}

static void multiply(const attention_kernels *kernels, bool weights, const test_tensor *a,
                     const row_source *b, const test_tensor *c)
{
    (weights ? kernels->across_weights_bf16 : kernels->mm_across_bf16)(
        a->view.shape[0], a->view.data, a->view.strides[0], b, c->view.data, c->view.strides[0]);
}

static void check(const attention_kernels *kernels, bool weights, test_random *random, int64_t m, int64_t n,
                  int64_t k, test_layout layout)
{
    const char *name = weights ? "across_weights_bf16" : "mm_across_bf16";
    const int64_t panel = kernels->panel, ldc = (n + panel - 1) / panel * panel;
    const int64_t shapes[3][2] = {{m, k}, {n, k}, {m, n}};
    test_tensor a = test_tensor_make(random, QUERN_BF16, 2, shapes[0], layout),
                b = test_tensor_make(random, QUERN_BF16, 2, shapes[1], layout),
                c = test_tensor_make(random, QUERN_F32, 2, shapes[2], layout);
    test_tensor_normal(&a, random, 1), test_tensor_normal(&b, random, 1);
    const row_source src = source_of(&b);
    double *x = test_tensor_get(&a), *y = test_tensor_get(&b);
    float *expected = malloc((size_t)(m * ldc) * sizeof *expected);
    multiply(kernels, weights, &a, &src, &c);
    test_tensor_check_unchanged(&a, "a"), test_tensor_check_unchanged(&b, "b"),
        test_tensor_check_guards(&c, "c");
    for (int64_t first = 0; first < n; first += panel)
        packed(kernels, weights, &a, &src, first, expected, ldc);
    for (int64_t i = 0; i < m; i++) {
        const float *row = (const float *)c.view.data + i * c.view.strides[0];
        assert_memory_equal(row, expected + i * ldc, (size_t)n * sizeof *row);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (int64_t p = 0; p < k; p++) {
                sum += x[i * k + p] * y[j * k + p];
                size += fabs(x[i * k + p] * y[j * k + p]);
            }
            const double bound = test_kernel_bound("attention", name, kernels->level, (double)k, 0) * size;
            if (!(fabs((double)row[j] - sum) <= bound))
                fail_msg("m %lld n %lld k %lld: c[%lld][%lld] is %.9g, expected %.9g", (long long)m,
                         (long long)n, (long long)k, (long long)i, (long long)j, (double)row[j], sum);
        }
    }
    TEST_TIME("attention", name, kernels->level, m * n * k, multiply(kernels, weights, &a, &src, &c));
    free(x), free(y), free(expected);
    test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&c);
}

static void every_size_sums_right(void **state)
{
    static const int64_t depths[] = {2, 6, 30, 32, 34, 128, 130, 254, 256, 390},
                         columns[] = {1, 2, 15, 16, 17, 33, 64, 70};
    const uint64_t seed = test_seed("attention_across", 1);
    test_random random = {seed};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const attention_kernels *kernels = cpu_kernels_for(level)->attention;
        if (kernels->mm_across_bf16 == NULL) continue;
        for (int64_t m = 1; m <= ACROSS_ROWS; m++)
            for (size_t i = 0; i < sizeof depths / sizeof *depths; i++)
                for (size_t j = 0; j < 2 * (sizeof columns / sizeof *columns); j++)
                    check(kernels, j % 2, &random, m, columns[j / 2], depths[i],
                          (test_layout)test_random_int(&random, 0, TEST_LAYOUTS - 1));
    }
}

/* Numbers whose products are about 2^-126, some of them subnormal or negative zeros; or infinities and NaN
 * among ordinary ones. */
static void set_special(test_tensor *t, test_random *random, bool small)
{
    static const double tiny[] = {0x1p-133, -0x1p-127, 0x1p-126, -0x1p-126, -0.0},
                        huge[] = {NAN, INFINITY, -INFINITY, 0x1.fep127, -0x1.fep127};
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++) {
        x[i] = small ? 0x1p-63 * test_random_normal(random) : test_random_normal(random);
        if (test_random_one_in(random, small ? 8 : 97))
            x[i] = (small ? tiny : huge)[test_random_int(random, 0, 4)];
    }
    test_tensor_set(t, x);
    free(x);
}

/* Whatever the numbers, few rows in place have the bits of many rows and packed panels: a level may compute
 * the two by different instructions. */
static void special_numbers_have_packed_bits(void **state)
{
    enum { N = 40, K = 102 };
    const uint64_t seed = test_seed("attention_across special", 1);
    test_random random = {seed};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const attention_kernels *kernels = cpu_kernels_for(level)->attention;
        if (kernels->mm_across_bf16 == NULL) continue;
        for (int64_t trial = 0; trial < 8 * ACROSS_ROWS; trial++) {
            const int64_t m = trial / 8 + 1, panel = kernels->panel;
            const int64_t shapes[3][2] = {{m, K}, {N, K}, {m, panel}};
            test_tensor a = test_tensor_make(&random, QUERN_BF16, 2, shapes[0], TEST_UNALIGNED),
                        b = test_tensor_make(&random, QUERN_BF16, 2, shapes[1], TEST_UNALIGNED),
                        c = test_tensor_make(&random, QUERN_F32, 2, shapes[2], TEST_CONTIGUOUS),
                        expected = test_tensor_make(&random, QUERN_F32, 2, shapes[2], TEST_CONTIGUOUS);
            set_special(&a, &random, trial & 1), set_special(&b, &random, trial & 1);
            const row_source src = source_of(&b);
            multiply(kernels, trial & 2, &a, &src, &c);
            packed(kernels, trial & 2, &a, &src, 0, expected.view.data, panel);
            for (int64_t i = 0; i < m; i++)
                for (int64_t j = 0; j < N; j++) {
                    const float *x = (const float *)c.view.data + i * panel + j,
                                *y = (const float *)expected.view.data + i * panel + j;
                    if (memcmp(x, y, sizeof *x) != 0 && !(isnan(*x) && isnan(*y)))
                        fail_msg("%s: c[%lld][%lld] of %lld rows is %a, packed %a",
                                 quern_cpu_level_name(level), (long long)i, (long long)j, (long long)m,
                                 (double)*x, (double)*y);
                }
            test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&c), test_tensor_free(&expected);
        }
    }
}

int main(int argc, char **argv)
{
    char program[] = "attention_across_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_sums_right),
        cmocka_unit_test(special_numbers_have_packed_bits),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
