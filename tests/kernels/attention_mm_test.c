/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_mm_test.c - the products of attention's tile kernels at every level, against sums in double.
 * Bounds are those of src/cpu/kernels.inc.
 */
#include "cmocka_c11.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct product {
    int64_t m, n, k;
    bool transposed, accumulate; /* transposed: A stands k-major */
    bool scaled;                 /* each column of the product by a factor of its own */
    bool weights;                /* of bf16: the product with weights, whose A is not transposed */
    test_layout layout;          /* TEST_STRIDED: gaps between the rows of A, B and C */
} product;

/* A value of A or B: `half` 0 or 1 of word (i, p) for bf16, the float itself otherwise. */
static double value_at(const test_tensor *t, bool pairs, int64_t row, int64_t column, int half)
{
    const int64_t at = row * t->view.strides[0] + column;
    if (!pairs) return ((const float *)t->view.data)[at];
    const uint32_t word = ((const uint32_t *)t->view.data)[at], bits = half ? word & 0xffff0000u : word << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Fills a matrix of floats, or of words of two bf16 values. */
static void fill(test_tensor *t, bool pairs, test_random *random)
{
    if (!pairs) {
        test_tensor_normal(t, random, 1);
        return;
    }
    const int64_t count = test_tensor_count(t);
    int32_t *words = malloc(sizeof *words * (size_t)(count + 1));
    for (int64_t i = 0; i < count; i++) {
        uint32_t word = 0;
        for (int half = 0; half < 2; half++) {
            const float f = (float)test_round(QUERN_BF16, test_random_normal(random));
            uint32_t bits;
            memcpy(&bits, &f, sizeof bits);
            word |= half ? bits : bits >> 16;
        }
        memcpy(&words[i], &word, sizeof word);
    }
    test_tensor_set_i32(t, words);
    free(words);
}

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                          test_layout layout)
{
    const int64_t shape[] = {rows, columns};
    return test_tensor_make(random, dtype, 2, shape, layout);
}

/* The product that x names: A, B and, of a scaled one, the columns' factors. */
static void multiply(const attention_kernels *kernels, bool pairs, const product *x, const test_tensor *a,
                     const test_tensor *b, const float *scale, const test_tensor *c, bool accumulate)
{
    const int64_t a_s = a->view.strides[0], row = x->transposed ? 1 : a_s, k = x->transposed ? a_s : 1;
    if (x->scaled)
        (pairs ? kernels->mm_scaled_bf16 : kernels->mm_scaled_f32)(
            x->m, x->n, x->k, a->view.data, row, k, b->view.data, b->view.strides[0], scale, c->view.data,
            c->view.strides[0], accumulate);
    else
        (x->weights ? kernels->mm_weights_bf16
         : pairs    ? kernels->mm_bf16
                 : kernels->mm_f32)(x->m, x->n, x->k, a->view.data, row, k, b->view.data, b->view.strides[0],
                                    c->view.data, c->view.strides[0], accumulate);
}

static void check_product(const attention_kernels *kernels, bool pairs, const product *x, test_random *random)
{
    const char *name = x->scaled    ? (pairs ? "mm_scaled_bf16" : "mm_scaled_f32")
                       : x->weights ? "mm_weights_bf16"
                       : pairs      ? "mm_bf16"
                                    : "mm_f32";
    const quern_dtype words = pairs ? QUERN_I32 : QUERN_F32;
    test_tensor a = x->transposed ? matrix(random, words, x->k, x->m, x->layout)
                                  : matrix(random, words, x->m, x->k, x->layout);
    test_tensor b = matrix(random, words, x->k, x->n, x->layout);
    test_tensor c = matrix(random, QUERN_F32, x->m, x->n, x->layout);
    fill(&a, pairs, random);
    fill(&b, pairs, random);
    if (x->accumulate) test_tensor_normal(&c, random, 1);
    double *old = test_tensor_get(&c);
    float *scale = malloc((size_t)(x->n + 1) * sizeof *scale);
    for (int64_t j = 0; j < x->n; j++) scale[j + 1] = x->scaled ? (float)test_random_normal(random) : 1.0f;
    multiply(kernels, pairs, x, &a, &b, scale + 1, &c, x->accumulate);
    test_tensor_check_unchanged(&a, "A");
    test_tensor_check_unchanged(&b, "B");
    test_tensor_check_guards(&c, "C");
    double *out = test_tensor_get(&c);
    for (int64_t i = 0; i < x->m; i++) {
        for (int64_t j = 0; j < x->n; j++) {
            const double before = x->accumulate ? old[i * x->n + j] : 0;
            double sum = before, size = fabs(before);
            for (int64_t p = 0; p < x->k; p++) {
                for (int half = 0; half <= pairs; half++) {
                    const double term =
                        (x->transposed ? value_at(&a, pairs, p, i, half) : value_at(&a, pairs, i, p, half)) *
                        value_at(&b, pairs, p, j, half) * (double)scale[j + 1];
                    sum += term;
                    size += fabs(term);
                }
            }
            const double bound =
                test_kernel_bound("attention", name, kernels->level, (double)(x->k * (1 + pairs)), 0) * size;
            if (!(fabs(out[i * x->n + j] - sum) <= bound))
                fail_msg("%s %s: m %lld n %lld k %lld%s%s %s: C[%lld][%lld] is %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->level), name, (long long)x->m, (long long)x->n,
                         (long long)x->k, x->transposed ? " transposed" : "",
                         x->accumulate ? " accumulate" : "", test_layout_name(x->layout), (long long)i,
                         (long long)j, out[i * x->n + j], sum);
        }
    }
    TEST_TIME("attention", name, kernels->level, x->m * x->n * x->k * (1 + pairs),
              multiply(kernels, pairs, x, &a, &b, scale + 1, &c, false));
    free(scale);
    free(old);
    free(out);
    test_tensor_free(&a);
    test_tensor_free(&b);
    test_tensor_free(&c);
}

static void each_level(void (*body)(const attention_kernels *, bool pairs, test_random *))
{
    const uint64_t seed = test_seed("attention_mm", 1);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const attention_kernels *kernels = cpu_kernels_for(level)->attention;
        test_random random = {seed};
        assert_int_equal(kernels->level, level);
        assert_true(kernels->panel % 16 == 0);
        body(kernels, false, &random);
        if (kernels->mm_bf16 != NULL) body(kernels, true, &random);
    }
}

static void all_sizes(const attention_kernels *kernels, bool pairs, test_random *random)
{
    static const int64_t depths[] = {0, 1, 2, 3, 8, 64, 97};
    for (int64_t m = 0; m <= 18; m++) {
        for (int64_t n = 16; n <= kernels->panel; n += 16) {
            for (size_t d = 0; d < sizeof depths / sizeof *depths; d++) {
                product x = {m,
                             n,
                             depths[d],
                             test_random_one_in(random, 2),
                             test_random_one_in(random, 2),
                             test_random_one_in(random, 2),
                             .layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1)};
                check_product(kernels, pairs, &x, random);
                if (!pairs) continue;
                x.transposed = x.scaled = false;
                x.weights = true;
                check_product(kernels, pairs, &x, random);
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        product whole = {96, kernels->panel, 128, i & 1, i & 2, i & 4, .layout = TEST_CONTIGUOUS};
        whole.weights = pairs && !whole.transposed && !whole.scaled;
        check_product(kernels, pairs, &whole, random);
        whole.weights = false;
        check_product(kernels, pairs, &whole, random);
    }
}

static void every_size_sums_right(void **state)
{
    (void)state;
    each_level(all_sizes);
}

/* NaN and infinity reach just the row of A or the column of B that they stand in. */
static void check_nonfinite(const attention_kernels *kernels, bool pairs, mm_kernel *mm, test_random *random)
{
    enum { M = 13, K = 20, BAD_ROW = 7, BAD_COLUMN = 3 };
    const int64_t n = kernels->panel;
    test_tensor a = matrix(random, pairs ? QUERN_I32 : QUERN_F32, M, K, TEST_UNALIGNED);
    test_tensor b = matrix(random, pairs ? QUERN_I32 : QUERN_F32, K, n, TEST_UNALIGNED);
    test_tensor c = matrix(random, QUERN_F32, M, n, TEST_UNALIGNED);
    fill(&a, pairs, random);
    fill(&b, pairs, random);
    const uint32_t nan = pairs ? 0x7fc03f80u : 0x7fc00000u, infinite = pairs ? 0x3f80ff80u : 0xff800000u;
    memcpy((uint32_t *)a.view.data + BAD_ROW * K + 5, &nan, sizeof nan);
    memcpy((uint32_t *)b.view.data + 9 * n + BAD_COLUMN, &infinite, sizeof infinite);
    mm(M, n, K, a.view.data, K, 1, b.view.data, n, c.view.data, n, false);
    double *out = test_tensor_get(&c);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < n; j++) {
            const double x = out[i * n + j];
            if (i == BAD_ROW ? !isnan(x) : j == BAD_COLUMN ? !isinf(x) : !isfinite(x))
                fail_msg("%s: C[%lld][%lld] is %g", quern_cpu_level_name(kernels->level), (long long)i,
                         (long long)j, x);
        }
    free(out);
    test_tensor_free(&a);
    test_tensor_free(&b);
    test_tensor_free(&c);
}

static void nonfinite_values(const attention_kernels *kernels, bool pairs, test_random *random)
{
    check_nonfinite(kernels, pairs, pairs ? kernels->mm_bf16 : kernels->mm_f32, random);
    if (pairs) check_nonfinite(kernels, pairs, kernels->mm_weights_bf16, random);
}

static void nonfinite_values_stay_in_their_row_and_column(void **state)
{
    (void)state;
    each_level(nonfinite_values);
}

int main(int argc, char **argv)
{
    char program[] = "attention_mm_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_sums_right),
        cmocka_unit_test(nonfinite_values_stay_in_their_row_and_column),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
