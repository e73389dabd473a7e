/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* large_scores_test.c - dense attention whose scores are large: an lse in f32 does not tell the weights of
 * such a row, and the gradients stay in their bounds all the same. */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const int32_t ragged[] = {0, 0, 1, 160, 161, 390};
static const oracle_dense cases[] = {
    {1, 65, 65, 2, 2, 64, 64, true, 0, -1, 0, NULL, NULL},
    {1, 230, 500, 4, 2, 64, 40, true, 70, -1, 0, NULL, NULL},
    {2, 97, 97, 3, 1, 128, 128, false, 0, -1, 0.125, NULL, NULL},
    {5, 400, 400, 4, 1, 32, 16, true, 0, -1, 0.25, ragged, NULL},
    {1, 70, 130, 2, 1, 256, 192, true, 50, -1, 0, NULL, NULL},
    {2, 90, 60, 2, 1, 16, 16, true, 0, -1, 0, NULL, NULL}, /* 30 rows see no key */
};

/* Gives q entries of -size, 0 and size, and k of -1, 0 and 1. With a scale that is a power of two f32 then
 * holds every score exactly, ties of the largest are frequent, and no gradient has an excuse. */
static void make_exact_scores(attention_case *c, double size, test_random *random)
{
    const double sizes[] = {size, 1};
    test_tensor *const inputs[] = {&c->q, &c->k};
    for (int i = 0; i < 2; i++) {
        double *x = test_tensor_get(inputs[i]);
        for (int64_t j = 0; j < test_tensor_count(inputs[i]); j++)
            x[j] = sizes[i] * (double)test_random_int(random, -1, 1);
        test_tensor_set(inputs[i], x);
        free(x);
    }
}

static void check(const char *label, const char *name, const test_tensor *t, const double *right,
                  double bound)
{
    char text[120];
    double *values = test_tensor_get(t);
    snprintf(text, sizeof text, "%s: %s", label, name);
    test_check(text, values, right, test_tensor_count(t), bound);
    free(values);
}

/* `slack`: what the rounding of the scores adds to the bounds of d_v, and of d_q and d_k. */
static void check_levels(attention_case *c, const char *name, double d_v_slack, double slack)
{
    const double bound = test_gradient_bound(c->dtype);
    attention_reference r = attention_case_reference(c);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        char label[100];
        snprintf(label, sizeof label, "%s, %s, %s", name, quern_dtype_name(c->dtype),
                 quern_cpu_level_name(level));
        quern_context *ctx = test_context(level, 2);
        attention_case_reset(c);
        attention_case_forward(c, ctx);
        attention_case_backward(c, ctx);
        check(label, "o", &c->o, r.o, test_forward_bound(c->dtype) + d_v_slack);
        check(label, "d_v", &c->d_v, r.d_v, bound + d_v_slack);
        check(label, "d_q", &c->d_q, r.d_q, bound + slack);
        check(label, "d_k", &c->d_k, r.d_k, bound + slack);
        quern_context_destroy(ctx);
    }
    attention_reference_free(&r);
}

static void exact_scores_of_any_size_lose_nothing(void **state)
{
    test_random random = {test_seed("large_scores", 1)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int power = 0; power <= 96; power += power < 16 ? 2 : 16) {
            attention_case c;
            char name[60];
            snprintf(name, sizeof name, "case %zu, scores times 2^%d", i, power);
            attention_case_make(&c, &cases[i], QUERN_F32, TEST_CONTIGUOUS, &random);
            make_exact_scores(&c, ldexp(1, power), &random);
            check_levels(&c, name, 0, 0);
            attention_case_free(&c);
        }
}

/* A score of f32 is off by some u sigma times the square root of D. That moves its weight, and d_q and d_k,
 * which are differences where one key has nearly all the weight, by several times as much as d_v: in a
 * float64 computation from rounded scores up to 12 u sigma and u sigma / 2. */
static void random_scores_lose_their_rounding(void **state)
{
    static const double sigmas[] = {10, 30, 100, 300, 1000};
    test_random random = {test_seed("large_scores", 2)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (size_t s = 0; s < sizeof sigmas / sizeof *sigmas; s++) {
            attention_case c;
            char name[60];
            snprintf(name, sizeof name, "case %zu, scores of %g", i, sigmas[s]);
            attention_case_make(&c, &cases[i], QUERN_F32, TEST_CONTIGUOUS, &random);
            double *q = test_tensor_get(&c.q);
            for (int64_t j = 0; j < test_tensor_count(&c.q); j++) q[j] *= sigmas[s];
            test_tensor_set(&c.q, q);
            free(q);
            check_levels(&c, name, sigmas[s] * 0x1p-25, sigmas[s] * 0x1p-20);
            attention_case_free(&c);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_scores_of_any_size_lose_nothing),
        cmocka_unit_test(random_scores_lose_their_rounding),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
