/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_full_test.c - the long tests of dense attention: every head dim, random shapes and masks at every
 * level, and the error of long rows. */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};

static void check_case(const oracle_dense *dense, quern_dtype dtype, test_layout layout, int32_t threads, test_random *random)
{
    attention_case c;
    attention_case_make(&c, dense, dtype, layout, random);
    attention_reference reference = attention_case_reference(&c);
    test_tensor_set(&c.o, reference.o);
    attention_reference_given_o(&reference, &c);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, threads);
        char label[250];
        snprintf(label, sizeof label, "B %lld Nq %lld Nkv %lld H %lld/%lld D %lld/%lld %s window %lld offset %lld%s, %s, %s, %s",
                 (long long)dense->batch, (long long)dense->nq, (long long)dense->nkv, (long long)dense->h, (long long)dense->hkv,
                 (long long)dense->d, (long long)dense->dv, dense->causal ? "causal" : "full", (long long)dense->window,
                 (long long)dense->query_offset, dense->cu_q != NULL ? " packed" : "", quern_dtype_name(dtype), test_layout_name(layout),
                 quern_cpu_level_name(level));
        attention_case_reset(&c);
        attention_case_forward(&c, ctx);
        attention_case_check_forward(&c, &reference, label);
        test_tensor_set(&c.o, reference.o);
        attention_case_backward(&c, ctx);
        attention_case_check_backward(&c, &reference, label);
        quern_context_destroy(ctx);
    }
    attention_reference_free(&reference);
    attention_case_free(&c);
}

static void every_head_dim(void **state)
{
    test_random random = {test_seed("every_head_dim", 1)};
    (void)state;
    for (int64_t d = 8; d <= 256; d += 8) {
        const oracle_dense dense = {1, 75, 75, 2, 1, d, 264 - d, true, 0, -1, 0, NULL, NULL};
        for (int i = 0; i < 3; i++) check_case(&dense, dtypes[i], (test_layout)(d / 8 % TEST_LAYOUTS), 1, &random);
    }
}

/* Borders of a packed batch of `batch` sequences: of length 0, 1, short, or long. Returns their end. */
static int32_t random_borders(int32_t *cu, int64_t batch, test_random *random)
{
    cu[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t kind = test_random_int(random, 0, 3);
        cu[b + 1] = cu[b] + (int32_t)(kind < 2 ? kind : test_random_int(random, 0, kind == 2 ? 10 : 200));
    }
    return cu[batch];
}

static void random_cases(void **state)
{
    enum { MOST_SEQUENCES = 6 };
    test_random random = {test_seed("random_cases", 1)};
    (void)state;
    for (int i = 0; i < test_trials(150); i++) {
        int32_t cu_q[MOST_SEQUENCES + 1], cu_kv[MOST_SEQUENCES + 1];
        oracle_dense a = {.batch = test_random_int(&random, 1, 3), .causal = !test_random_one_in(&random, 3), .query_offset = -1};
        a.hkv = test_random_int(&random, 1, 3);
        a.h = a.hkv * test_random_int(&random, 1, test_random_one_in(&random, 5) ? 16 : 4);
        a.d = 8 * test_random_int(&random, 1, test_random_one_in(&random, 5) ? 32 : 10);
        a.dv = 8 * test_random_int(&random, 1, test_random_one_in(&random, 5) ? 32 : 10);
        a.nq = test_random_int(&random, 0, test_random_one_in(&random, 4) ? 400 : 120);
        a.nkv = test_random_one_in(&random, 2) ? a.nq : test_random_int(&random, 0, 300);
        if (test_random_one_in(&random, 2)) a.window = test_random_int(&random, 1, 100);
        if (test_random_one_in(&random, 4)) a.query_offset = test_random_int(&random, 0, 300);
        if (test_random_one_in(&random, 4)) a.scale = 0.05 + 0.3 * test_random_uniform(&random);
        if (test_random_one_in(&random, 3)) {
            a.batch = test_random_int(&random, 0, MOST_SEQUENCES);
            a.cu_q = cu_q;
            a.nq = random_borders(cu_q, a.batch, &random) + test_random_int(&random, 0, 2) * 7;
            a.nkv = a.nq;
            if (test_random_one_in(&random, 2)) {
                a.cu_kv = cu_kv;
                a.nkv = random_borders(cu_kv, a.batch, &random) + test_random_int(&random, 0, 9);
            }
        }
        a.scale = (float)a.scale;
        check_case(&a, dtypes[test_random_int(&random, 0, 2)], (test_layout)test_random_int(&random, 0, TEST_LAYOUTS - 1),
                   (int32_t)test_random_int(&random, 1, 3), &random);
    }
}

/* A few rows over many keys: the error must not grow with the length. */
static void long_rows(void **state)
{
    enum { ROWS = 40, KEYS = 65536, DIM = 128 };
    const oracle_dense dense = {1, ROWS, KEYS, 1, 1, DIM, DIM, true, 0, -1, 0, NULL, NULL};
    (void)state;
    for (int d = 0; d < 3; d++) {
        test_random random = {test_seed("long_rows", 1)};
        attention_case c;
        attention_case_make(&c, &dense, dtypes[d], TEST_CONTIGUOUS, &random);
        double *q = test_tensor_get(&c.q), *k = test_tensor_get(&c.k), *v = test_tensor_get(&c.v);
        double expected[ROWS * DIM], expected_lse[ROWS];
        oracle_dense_forward(&dense, q, k, v, expected, expected_lse);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            char label[100];
            attention_case_reset(&c);
            attention_case_forward(&c, ctx);
            double *o = test_tensor_get(&c.o), *lse = test_tensor_get(&c.lse);
            snprintf(label, sizeof label, "%s, %s", quern_dtype_name(dtypes[d]), quern_cpu_level_name(level));
            test_check(label, o, expected, ROWS * DIM, test_forward_bound(dtypes[d]));
            test_check(label, lse, expected_lse, ROWS, test_forward_bound(QUERN_F32));
            free(o);
            free(lse);
            quern_context_destroy(ctx);
        }
        free(q);
        free(k);
        free(v);
        attention_case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim),
        cmocka_unit_test(random_cases),
        cmocka_unit_test(long_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
