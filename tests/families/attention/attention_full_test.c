/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_full_test.c - the long tests of dense attention: every head dim, random shapes and masks at every
 * level, and the error of long rows. */
#include "attention_case.h"
#include "cmocka_c11.h"

#include <stdio.h>
#include <stdlib.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};

/* `given`: the o that backward is handed, which the reference's gradients belong to. */
static void check_levels(attention_case *c, const attention_reference *reference, const double *given,
                         const char *layout, int32_t threads)
{
    const oracle_dense *a = &c->dense;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, threads);
        char label[250];
        snprintf(label, sizeof label,
                 "B %lld Nq %lld Nkv %lld H %lld/%lld D %lld/%lld %s window %lld offset %lld%s, %s, %s, %s",
                 (long long)a->batch, (long long)a->nq, (long long)a->nkv, (long long)a->h, (long long)a->hkv,
                 (long long)a->d, (long long)a->dv, a->causal ? "causal" : "full", (long long)a->window,
                 (long long)a->query_offset, a->cu_q != NULL ? " varlen" : "", quern_dtype_name(c->dtype),
                 layout, quern_cpu_level_name(level));
        attention_case_reset(c);
        attention_case_forward(c, ctx);
        attention_case_check_forward(c, reference, label);
        test_tensor_set(&c->o, given);
        attention_case_backward(c, ctx);
        attention_case_check_backward(c, reference, label);
        quern_context_destroy(ctx);
    }
}

/* The reference of a case whose backward is handed o rounded to the case's dtype; *given is that o. */
static attention_reference reference_and_o(attention_case *c, double **given)
{
    attention_reference reference = attention_case_reference(c);
    test_tensor_set(&c->o, reference.o);
    *given = test_tensor_get(&c->o);
    attention_reference_given_o(&reference, c);
    return reference;
}

static void check_case(const oracle_dense *dense, quern_dtype dtype, test_layout layout, int32_t threads,
                       test_random *random)
{
    attention_case c;
    double *given;
    attention_case_make(&c, dense, dtype, layout, random);
    attention_reference reference = reference_and_o(&c, &given);
    check_levels(&c, &reference, given, test_layout_name(layout), threads);
    free(given);
    attention_reference_free(&reference);
    attention_case_free(&c);
}

/* Inputs that every dtype holds exactly, and o rounded to bf16 for all of them, so that the oracle answers
 * once. */
static void every_head_dim(void **state)
{
    test_random random = {test_seed("every_head_dim", 1)};
    (void)state;
    for (int64_t d = 8; d <= 256; d += 8) { /* wide_heads_test.c covers larger ones */
        const oracle_dense dense = {1, 75, 75, 2, 1, d, 264 - d, true, 0, -1, 0, NULL, NULL};
        const test_layout layout = (test_layout)(d / 8 % TEST_LAYOUTS);
        attention_case exact;
        double *given;
        attention_case_make_exact(&exact, &dense, TEST_CONTIGUOUS, &random);
        attention_reference reference = reference_and_o(&exact, &given);
        for (int i = 0; i < 3; i++) {
            attention_case c;
            attention_case_make_like(&c, &exact, dtypes[i], layout, &random);
            check_levels(&c, &reference, given, test_layout_name(layout), 1);
            attention_case_free(&c);
        }
        free(given);
        attention_reference_free(&reference);
        attention_case_free(&exact);
    }
}

/* cu_seqlens of a varlen batch of `batch` sequences: of length 0, 1, short, or long. Returns their end. */
static int32_t random_offsets(int32_t *cu, int64_t batch, test_random *random)
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
        oracle_dense a = {.batch = test_random_int(&random, 1, 3),
                          .causal = !test_random_one_in(&random, 3),
                          .query_offset = -1};
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
            a.nq = random_offsets(cu_q, a.batch, &random) + test_random_int(&random, 0, 2) * 7;
            a.nkv = a.nq;
            if (test_random_one_in(&random, 2)) {
                a.cu_kv = cu_kv;
                a.nkv = random_offsets(cu_kv, a.batch, &random) + test_random_int(&random, 0, 9);
            }
        }
        a.scale = (float)a.scale;
        check_case(&a, dtypes[test_random_int(&random, 0, 2)],
                   (test_layout)test_random_int(&random, 0, TEST_LAYOUTS - 1),
                   (int32_t)test_random_int(&random, 1, 3), &random);
    }
}

/* More blocks of few keys each than any GPU runs at once. */
static void many_sequences(void **state)
{
    enum { SEQUENCES = 200 };
    test_random random = {test_seed("many_sequences", 1)};
    int32_t cu[SEQUENCES + 1] = {0};
    (void)state;
    for (int b = 0; b < SEQUENCES; b++) cu[b + 1] = cu[b] + (int32_t)test_random_int(&random, 0, 30);
    for (int64_t d = 64; d <= 128; d += 64) {
        const oracle_dense dense = {SEQUENCES, cu[SEQUENCES], cu[SEQUENCES], 9, 9, d, d, true, 9, -1, 0,
                                    cu,        NULL};
        for (int i = 1; i < 3; i++) check_case(&dense, dtypes[i], TEST_CONTIGUOUS, 2, &random);
    }
}

/* A few rows over many keys: the error must not grow with the length. */
static void long_rows(void **state)
{
    enum { ROWS = 40, KEYS = 65536, DIM = 128 };
    const oracle_dense dense = {1, ROWS, KEYS, 1, 1, DIM, DIM, true, 0, -1, 0, NULL, NULL};
    test_random random = {test_seed("long_rows", 1)};
    attention_case exact;
    (void)state;
    attention_case_make_exact(&exact, &dense, TEST_CONTIGUOUS, &random);
    double *q = test_tensor_get(&exact.q), *k = test_tensor_get(&exact.k), *v = test_tensor_get(&exact.v);
    double expected[ROWS * DIM], expected_lse[ROWS];
    oracle_dense_forward(&dense, q, k, v, expected, expected_lse);
    const attention_reference reference = {.o = expected, .lse = expected_lse};
    for (int d = 0; d < 3; d++) {
        attention_case c;
        attention_case_make_like(&c, &exact, dtypes[d], TEST_CONTIGUOUS, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            char label[100];
            snprintf(label, sizeof label, "%s, %s", quern_dtype_name(dtypes[d]), quern_cpu_level_name(level));
            attention_case_reset(&c);
            attention_case_forward(&c, ctx);
            attention_case_check_forward(&c, &reference, label);
            quern_context_destroy(ctx);
        }
        attention_case_free(&c);
    }
    free(q);
    free(k);
    free(v);
    attention_case_free(&exact);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_head_dim),
        cmocka_unit_test(random_cases),
        cmocka_unit_test(many_sequences),
        cmocka_unit_test(long_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
