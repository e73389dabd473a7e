/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_attention_test.c - the float64 attention oracle: cases worked by hand, and its gradients against
 * central differences. */
#include "cmocka_c11.h"
#include "oracle/attention.h"
#include "random.h"

#include <math.h>
#include <string.h>

static void two_keys_by_hand(void **state)
{
    /* One head, d = 1, scale 1: scores of query 1 are 1*0 and 1*ln 3, so its weights are 1/4 and 3/4. */
    const oracle_dense dense = {1, 2, 2, 1, 1, 1, 1, true, 0, -1, 1, NULL, NULL};
    const double q[] = {5, 1}, k[] = {0, log(3)}, v[] = {2, 10};
    double o[2], lse[2];
    (void)state;
    oracle_dense_forward(&dense, q, k, v, o, lse);
    assert_true(fabs(o[0] - 2) < 1e-15 && fabs(lse[0]) < 1e-15);
    assert_true(fabs(o[1] - 8) < 1e-14 && fabs(lse[1] - log(4)) < 1e-15);
}

static void masks_count_keys(void **state)
{
    /* With q = 0 every key weighs the same: lse = ln(keys seen). */
    static const struct {
        int64_t nq, nkv, window, offset;
        bool causal;
        int64_t query, keys;
    } cases[] = {
        {5, 5, 0, -1, true, 3, 4},  {5, 5, 2, -1, true, 3, 2},  {5, 5, 2, -1, true, 0, 1},
        {5, 5, 0, -1, false, 3, 5}, {5, 5, 3, -1, false, 2, 3}, {5, 5, 2, -1, false, 2, 3},
        {5, 5, 2, -1, false, 0, 2}, {2, 5, 0, -1, true, 0, 4},  {5, 2, 0, -1, true, 2, 0},
        {5, 2, 0, -1, true, 3, 1},  {2, 9, 0, 3, true, 1, 5},   {2, 9, 3, 3, true, 1, 3},
        {5, 2, 1, -1, false, 0, 0}, {2, 4, 2, 8, true, 0, 0},   {5, 2, 0, -1, false, 2, 0},
        {5, 2, 0, -1, false, 3, 2}, {5, 2, 2, -1, false, 2, 0}, {5, 2, 2, -1, false, 3, 2},
    };
    double q[8] = {0}, k[16] = {0}, v[16], o[8], lse[8];
    (void)state;
    for (int i = 0; i < 16; i++) v[i] = 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const oracle_dense dense = {
            1, cases[i].nq, cases[i].nkv, 1, 1, 1, 1, cases[i].causal, cases[i].window, cases[i].offset,
            0, NULL,        NULL};
        oracle_dense_forward(&dense, q, k, v, o, lse);
        const double expected = cases[i].keys > 0 ? log((double)cases[i].keys) : -INFINITY;
        if (!(lse[cases[i].query] == expected || fabs(lse[cases[i].query] - expected) < 1e-14))
            fail_msg("case %zu: lse %g, expected %g", i, lse[cases[i].query], expected);
        assert_true(fabs(o[cases[i].query] - (cases[i].keys > 0)) < 1e-14);
    }
}

static void heads_share_by_division(void **state)
{
    /* g = 3: heads 0, 1, 2 read key/value head 0 and heads 3, 4, 5 head 1. */
    const oracle_dense dense = {1, 1, 1, 6, 2, 1, 1, true, 0, -1, 0, NULL, NULL};
    const double q[6] = {0}, k[2] = {0}, v[2] = {1, 2};
    double o[6];
    (void)state;
    oracle_dense_forward(&dense, q, k, v, o, NULL);
    for (int h = 0; h < 6; h++) assert_true(o[h] == 1 + h / 3);
}

static void varlen_is_a_loop_over_sequences(void **state)
{
    const int32_t cu[] = {0, 3, 3, 7};
    const oracle_dense varlen = {3, 8, 8, 2, 1, 2, 3, true, 2, -1, 0, cu, NULL};
    const oracle_dense first = {1, 3, 3, 2, 1, 2, 3, true, 2, -1, 0, NULL, NULL};
    const oracle_dense last = {1, 4, 4, 2, 1, 2, 3, true, 2, -1, 0, NULL, NULL};
    test_random random = {test_seed("varlen_is_a_loop_over_sequences", 1)};
    double q[32], k[16], v[24], o[48], lse[16], o_one[24], lse_one[8];
    (void)state;
    for (int i = 0; i < 32; i++) q[i] = test_random_normal(&random);
    for (int i = 0; i < 16; i++) k[i] = test_random_normal(&random);
    for (int i = 0; i < 24; i++) v[i] = test_random_normal(&random);
    oracle_dense_forward(&varlen, q, k, v, o, lse);
    oracle_dense_forward(&first, q, k, v, o_one, lse_one);
    assert_memory_equal(o, o_one, sizeof(double) * 18);
    assert_memory_equal(lse + 8, lse_one + 3, sizeof(double) * 3);
    oracle_dense_forward(&last, q + 3 * 4, k + 3 * 2, v + 3 * 3, o_one, lse_one);
    assert_memory_equal(o + 18, o_one, sizeof(double) * 24);
    assert_memory_equal(lse + 3, lse_one, sizeof(double) * 4);
    for (int i = 42; i < 48; i++) assert_true(o[i] == 0);
    assert_true(isinf(lse[7]) && isinf(lse[15]));
}

enum { LARGEST = 512 };

static double loss(const oracle_dense *dense, const double *x[3], const double *d_o, int64_t count)
{
    double o[LARGEST], sum = 0;
    oracle_dense_forward(dense, x[0], x[1], x[2], o, NULL);
    for (int64_t i = 0; i < count; i++) sum += o[i] * d_o[i];
    return sum;
}

static void gradients_match_central_differences(void **state)
{
    static const int32_t cu_q[] = {0, 4, 4, 9}, cu_kv[] = {0, 6, 7, 10};
    const oracle_dense cases[] = {
        {1, 7, 7, 4, 2, 3, 2, true, 0, -1, 0, NULL, NULL},
        {2, 5, 7, 3, 1, 2, 3, true, 3, -1, 0.7, NULL, NULL},
        {2, 7, 5, 3, 3, 2, 3, true, 0, -1, 0, NULL, NULL},
        {1, 6, 9, 2, 2, 2, 2, false, 4, -1, 0, NULL, NULL},
        {1, 4, 9, 2, 1, 2, 2, true, 0, 2, 0, NULL, NULL},
        {3, 10, 11, 4, 2, 2, 3, true, 0, -1, 0, cu_q, cu_kv},
    };
    test_random random = {test_seed("gradients_match_central_differences", 2)};
    (void)state;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const oracle_dense *a = &cases[c];
        const int64_t sequences = a->cu_q != NULL ? 1 : a->batch;
        const int64_t counts[] = {sequences * a->nq * a->h * a->d, sequences * a->nkv * a->hkv * a->d,
                                  sequences * a->nkv * a->hkv * a->dv};
        const int64_t out = sequences * a->nq * a->h * a->dv;
        double x[3][LARGEST], grad[3][LARGEST], d_o[LARGEST];
        const double *inputs[] = {x[0], x[1], x[2]};
        for (int i = 0; i < 3; i++)
            for (int64_t j = 0; j < counts[i]; j++) x[i][j] = test_random_normal(&random);
        for (int64_t j = 0; j < out; j++) d_o[j] = test_random_normal(&random);
        oracle_dense_backward(a, x[0], x[1], x[2], d_o, grad[0], grad[1], grad[2]);
        for (int i = 0; i < 3; i++) {
            for (int64_t j = 0; j < counts[i]; j++) {
                const double step = 1e-5, value = x[i][j];
                x[i][j] = value + step;
                const double above = loss(a, inputs, d_o, out);
                x[i][j] = value - step;
                const double below = loss(a, inputs, d_o, out);
                x[i][j] = value;
                const double difference = (above - below) / (2 * step);
                if (!(fabs(difference - grad[i][j]) <= 1e-8 * (1 + fabs(difference))))
                    fail_msg("case %zu, input %d, entry %lld: gradient %.12g, difference %.12g", c, i,
                             (long long)j, grad[i][j], difference);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_keys_by_hand),
        cmocka_unit_test(masks_count_keys),
        cmocka_unit_test(heads_share_by_division),
        cmocka_unit_test(varlen_is_a_loop_over_sequences),
        cmocka_unit_test(gradients_match_central_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
