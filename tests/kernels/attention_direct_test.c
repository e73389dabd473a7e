/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_direct_test.c - products of a few query rows with keys and values as they stand, against sums in
 * double. Bounds are those of src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                          test_layout layout)
{
    const int64_t shape[] = {rows, columns};
    return test_tensor_make(random, dtype, 2, shape, layout);
}

static row_source source_of(const test_tensor *t)
{
    return (row_source){t->view.data, t->view.dtype, t->view.strides[0], t->view.shape[0], t->view.shape[1]};
}

static void expect(const char *name, quern_cpu_level level, int64_t n, int64_t row, int64_t column,
                   double out, double sum, double size)
{
    const double bound = test_kernel_bound("attention", name, level, (double)n, 0) * size;
    if (!(fabs(out - sum) <= bound))
        fail_msg("%s %s: %lld terms: [%lld][%lld] is %.9g, expected %.9g", quern_cpu_level_name(level), name,
                 (long long)n, (long long)row, (long long)column, out, sum);
}

/* Products of bf16, or in f32 with keys and values of `dtype`. */
typedef struct products {
    const attention_kernels *kernels;
    bool bf16;
    quern_dtype dtype;
} products;

static void run_scores(const products *p, const test_tensor *q, const row_source *keys, test_tensor *s)
{
    const read_ahead ahead = {keys->data, keys->rows % 2 == 0};
    const int64_t m = q->view.shape[0], ldq = q->view.strides[0], lds = s->view.strides[0];
    if (p->bf16) p->kernels->score_rows_bf16(m, q->view.data, ldq, keys, ahead, s->view.data, lds);
    else p->kernels->score_rows_f32(m, q->view.data, ldq, keys, ahead, s->view.data, lds);
}

/* m queries, n keys of `dim`. */
static void scores(const products *p, test_random *random, int64_t m, int64_t n, int64_t dim,
                   test_layout layout)
{
    const char *name = p->bf16 ? "score_rows_bf16" : "score_rows_f32";
    test_tensor q = matrix(random, p->bf16 ? QUERN_BF16 : QUERN_F32, m, dim, layout),
                keys = matrix(random, p->dtype, n, dim, layout);
    test_tensor s = matrix(random, QUERN_F32, m, (n + 3) / 4 * 4, layout);
    test_tensor_normal(&q, random, 1), test_tensor_normal(&keys, random, 1);
    double *x = test_tensor_get(&q), *y = test_tensor_get(&keys);
    const row_source src = source_of(&keys);
    run_scores(p, &q, &src, &s);
    test_tensor_check_unchanged(&q, "q"), test_tensor_check_unchanged(&keys, "keys"),
        test_tensor_check_guards(&s, "s");
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (int64_t d = 0; d < dim; d++) {
                sum += x[i * dim + d] * y[j * dim + d];
                size += fabs(x[i * dim + d] * y[j * dim + d]);
            }
            expect(name, p->kernels->level, dim, i, j,
                   (double)((const float *)s.view.data)[i * s.view.strides[0] + j], sum, size);
        }
    TEST_TIME("attention", name, p->kernels->level, m * n * dim, run_scores(p, &q, &src, &s));
    free(x), free(y);
    test_tensor_free(&q), test_tensor_free(&keys), test_tensor_free(&s);
}

/* m rows of n weights in f32, or in bf16, two a word. */
static test_tensor weights_of(test_random *random, bool bf16, int64_t m, int64_t n, test_layout layout,
                              double *values)
{
    if (!bf16) {
        test_tensor p = matrix(random, QUERN_F32, m, n, layout);
        test_tensor_normal(&p, random, 1);
        double *x = test_tensor_get(&p);
        memcpy(values, x, (size_t)(m * n) * sizeof *x);
        free(x);
        return p;
    }
    test_tensor p = matrix(random, QUERN_I32, m, (n + 1) / 2, layout);
    int32_t *words = calloc((size_t)(m * ((n + 1) / 2)) + 1, sizeof *words);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const float f = (float)test_round(QUERN_BF16, test_random_uniform(random));
            uint32_t bits;
            memcpy(&bits, &f, sizeof bits);
            values[i * n + j] = (double)f;
            words[i * ((n + 1) / 2) + j / 2] |= (int32_t)(j % 2 ? bits & 0xffff0000u : bits >> 16);
        }
    test_tensor_set_i32(&p, words);
    free(words);
    return p;
}

static void run_sums(const products *p, const test_tensor *weights, const row_source *values, test_tensor *o,
                     bool add)
{
    const read_ahead ahead = {values->data, values->rows % 2 == 0};
    const int64_t m = o->view.shape[0], ldp = weights->view.strides[0], ldo = o->view.strides[0];
    if (p->bf16)
        p->kernels->add_values_bf16(m, weights->view.data, ldp, values, ahead, o->view.data, ldo, add);
    else p->kernels->add_values_f32(m, weights->view.data, ldp, values, ahead, o->view.data, ldo, add);
}

static void sums(const products *by, test_random *random, int64_t m, int64_t n, int64_t dim,
                 test_layout layout, bool accumulate)
{
    const char *name = by->bf16 ? "add_values_bf16" : "add_values_f32";
    double *weights = test_doubles(m * n + 1);
    const int64_t width = (dim + 15) / 16 * 16;
    test_tensor p = weights_of(random, by->bf16, m, n, layout, weights),
                values = matrix(random, by->dtype, n, dim, layout);
    test_tensor o = matrix(random, QUERN_F32, m, width, layout);
    test_tensor_normal(&values, random, 1), test_tensor_normal(&o, random, 1);
    double *x = test_tensor_get(&values), *before = test_tensor_get(&o);
    const row_source src = source_of(&values);
    run_sums(by, &p, &src, &o, accumulate);
    test_tensor_check_unchanged(&p, "p"), test_tensor_check_unchanged(&values, "values"),
        test_tensor_check_guards(&o, "o");
    double *out = test_tensor_get(&o);
    for (int64_t i = 0; i < m; i++)
        for (int64_t c = 0; c < width; c++) {
            double sum = accumulate ? before[i * width + c] : 0, size = fabs(sum);
            for (int64_t j = 0; j < n && c < dim; j++) {
                sum += weights[i * n + j] * x[j * dim + c];
                size += fabs(weights[i * n + j] * x[j * dim + c]);
            }
            expect(name, by->kernels->level, n + 1, i, c, out[i * width + c], sum, size);
        }
    TEST_TIME("attention", name, by->kernels->level, m * n * dim, run_sums(by, &p, &src, &o, false));
    free(weights), free(x), free(before), free(out);
    test_tensor_free(&p), test_tensor_free(&values), test_tensor_free(&o);
}

static void every_size(const products *p, test_random *random)
{
    static const int64_t dims[] = {8, 24, 32, 40, 64, 72, 96, 128, 136, 192, 256, 488, 512};
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
        for (int64_t m = 1; m <= 9; m++)
            for (int trial = 0; trial < 6; trial++) {
                const int64_t n = trial == 0 ? 64 : test_random_int(random, 1, 64),
                              dim = dims[d] - (p->bf16 || trial < 3 ? 0 : test_random_int(random, 0, 7));
                const test_layout layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
                scores(p, random, m, n, dim, layout);
                sums(p, random, m, n, dim, layout, trial % 2 == 1);
            }
    sums(p, random, 3, 0, 40, TEST_UNALIGNED, true);
    sums(p, random, 3, 0, 40, TEST_UNALIGNED, false);
    scores(p, random, 3, 0, 40, TEST_UNALIGNED);
}

static void every_size_sums_right(void **state)
{
    const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    const uint64_t seed = test_seed("attention_direct", 1);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const attention_kernels *kernels = cpu_kernels_for(level)->attention;
        test_random random = {seed};
        if (kernels->mm_bf16 != NULL) every_size(&(products){kernels, true, QUERN_BF16}, &random);
        for (int i = 0; i < 3; i++) every_size(&(products){kernels, false, dtypes[i]}, &random);
    }
}

int main(int argc, char **argv)
{
    char program[] = "attention_direct_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_sums_right),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
