/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_sink_test.c - dense attention with a sink, and with keys of which only some exist: against the
 * float64 oracle, against the same call on a copy of the keys that exist, and whatever the other rows
 * hold. */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef QUERN_TEST_GPU /* whose backward takes all keys */
enum { ON_GPU = true };
#else
enum { ON_GPU = false };
#endif

static const int32_t ragged[] = {0, 0, 1, 60, 61, 61, 190, 197},
                     ragged_kv[] = {0, 3, 70, 70, 90, 100, 231, 233};
static const double sinks[] = {0.5, -1, 3, 40, -INFINITY, INFINITY};

typedef struct sink_case {
    oracle_dense dense;
    bool sink;
    const int32_t *first, *count;
} sink_case;

static const sink_case cases[] = {
    /* B, Nq, Nkv, H, Hkv, D, Dv, causal, window, query_offset, scale, cu_q, cu_kv */
    {{2, 97, 97, 4, 2, 64, 64, true, 0, -1, 0, NULL, NULL}, true, NULL, NULL},
    {{1, 230, 230, 6, 1, 40, 72, true, 17, -1, 0, NULL, NULL}, true, NULL, NULL},
    {{1, 200, 65, 4, 2, 32, 16, true, 0, -1, 0, NULL, NULL}, true, NULL, NULL}, /* rows without a key */
    {{1, 70, 70, 6, 2, 8, 8, true, 1, -1, 0, NULL, NULL}, true, NULL, NULL},    /* one key each */
    {{7, 210, 240, 4, 1, 64, 32, false, 30, -1, 0, ragged, ragged_kv}, true, NULL, NULL},
    {{1, 60, 450, 2, 1, 128, 128, true, 0, -1, 2, NULL, NULL}, true, NULL, NULL}, /* lse beyond 20 */
    {{3, 97, 150, 4, 2, 64, 64, true, 0, -1, 0, NULL, NULL}, false, (const int32_t[]){0, 53, 10}, NULL},
    {{3, 40, 450, 4, 2, 32, 32, true, 0, -1, 0, NULL, NULL}, false, NULL, (const int32_t[]){450, 0, 40}},
    {{4, 97, 150, 4, 4, 24, 40, true, 20, -1, 0, NULL, NULL},
     true,
     (const int32_t[]){0, 40, 150, 100},
     (const int32_t[]){150, 137, 150, 101}},
    {{2, 30, 150, 2, 1, 16, 16, false, 0, -1, 0, NULL, NULL},
     true,
     (const int32_t[]){3, 64},
     (const int32_t[]){120, 129}},
    {{2, 30, 150, 2, 1, 16, 16, true, 25, 41, 0, NULL, NULL},
     false,
     (const int32_t[]){3, 64},
     (const int32_t[]){120, 140}},
    {{2, 0, 5, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL}, true, (const int32_t[]){1, 5}, NULL},
    {{2, 5, 0, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL}, true, (const int32_t[]){0, 0}, NULL},
    {{0, 5, 5, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL}, true, NULL, NULL},
};

/* Whether the backward takes the case. */
static bool has_backward(const sink_case *x)
{
    return !ON_GPU || (x->first == NULL && x->count == NULL);
}

static void give(attention_case *c, const sink_case *x, test_layout layout, test_random *random)
{
    attention_case_give(c, x->sink ? sinks : NULL, x->first, x->count, layout, random);
}

static void every_dtype_matches_the_oracle(void **state)
{
    test_random random = {test_seed("attention_sink", 1)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
            const test_layout layout = (test_layout)((i + (size_t)dtype) % TEST_LAYOUTS);
            attention_case exact, c;
            attention_case_make_exact(&exact, &cases[i].dense, TEST_CONTIGUOUS, &random);
            attention_case_make_like(&c, &exact, (quern_dtype)dtype, layout, &random);
            give(&c, &cases[i], layout, &random);
            attention_reference r = attention_case_reference(&c);
            for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
                quern_context *ctx = test_context(level, 2);
                char label[100];
                snprintf(label, sizeof label, "case %zu, %s, %s", i, quern_dtype_name(c.dtype),
                         quern_cpu_level_name(level));
                attention_case_reset(&c);
                attention_case_forward(&c, ctx);
                attention_case_check_forward(&c, &r, label);
                if (has_backward(&cases[i])) {
                    attention_case_backward(&c, ctx);
                    attention_case_check_backward(&c, &r, label);
                }
                quern_context_destroy(ctx);
            }
            attention_reference_free(&r);
            attention_case_free(&c);
            attention_case_free(&exact);
        }
}

/* One sink moves d_q, d_k, d_v and itself by what the loss's difference says. */
static void d_sink_is_the_loss_s_slope(void **state)
{
    const oracle_dense dense = {1, 9, 9, 2, 1, 8, 8, true, 0, -1, 0, NULL, NULL};
    const double step = 1e-4, at[] = {0.3, -0.7};
    test_random random = {test_seed("attention_sink", 2)};
    attention_case c;
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    attention_case_give(&c, at, NULL, NULL, TEST_CONTIGUOUS, &random);
    attention_reference r = attention_case_reference(&c);
    double *d_o = test_tensor_get(&c.d_o);
    for (int head = 0; head < 2; head++) {
        double loss[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            c.sinks[head] = (double)(float)at[head] + (side ? step : -step);
            attention_reference moved = attention_case_reference(&c);
            for (int64_t i = 0; i < test_tensor_count(&c.o); i++) loss[side] += d_o[i] * moved.o[i];
            attention_reference_free(&moved);
        }
        c.sinks[head] = (double)(float)at[head];
        const double slope = (loss[1] - loss[0]) / (2 * step);
        if (fabs(slope - r.d_sink[head]) > 1e-6 * fmax(1, fabs(slope)))
            fail_msg("d_sink[%d] of the oracle is %g, the loss's slope %g", head, r.d_sink[head], slope);
    }
    free(d_o);
    attention_reference_free(&r);
    attention_case_free(&c);
}

/* Sets the rows of k and v that do not exist. */
static void fill_missing(attention_case *c, double value)
{
    test_tensor *const both[] = {&c->k, &c->v};
    for (int i = 0; i < 2; i++) {
        const quern_tensor *t = &both[i]->view;
        const int64_t row = t->shape[2] * t->shape[3], keys = t->shape[1];
        double *x = test_tensor_get(both[i]);
        for (int64_t b = 0; b < t->shape[0]; b++)
            for (int64_t j = 0; j < keys; j++) {
                const int64_t first = c->extras.kv_first != NULL ? c->extras.kv_first[b] : 0,
                              end = c->extras.kv_count != NULL ? c->extras.kv_count[b] : keys;
                for (int64_t e = 0; (j < first || j >= end) && e < row; e++)
                    x[(b * keys + j) * row + e] = value;
            }
        test_tensor_set(both[i], x);
        free(x);
    }
}

static void keys_that_do_not_exist_change_no_bit(void **state)
{
    static const double values[] = {0, NAN, INFINITY, 3e38};
    test_random random = {test_seed("attention_sink", 3)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (cases[i].first == NULL && cases[i].count == NULL) continue;
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
            for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
                attention_case c;
                test_tensor before[5];
                attention_case_make(&c, &cases[i].dense, (quern_dtype)dtype, TEST_STRIDED, &random);
                give(&c, &cases[i], TEST_STRIDED, &random);
                test_tensor *const results[] = {&c.o, &c.lse, &c.d_q, &c.d_k, &c.d_v};
                const int count = has_backward(&cases[i]) ? 5 : 2;
                quern_context *ctx = test_context(level, 2);
                for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
                    fill_missing(&c, values[v]);
                    attention_case_reset(&c);
                    attention_case_forward(&c, ctx);
                    if (has_backward(&cases[i])) attention_case_backward(&c, ctx);
                    for (int t = 0; t < count; t++) {
                        if (v == 0) before[t] = test_tensor_copy(results[t]);
                        else if (!test_tensor_same_bits(&before[t], results[t]))
                            fail_msg("case %zu, %s: %g in missing keys changes result %d", i,
                                     quern_cpu_level_name(level), values[v], t);
                    }
                }
                for (int t = 0; t < count; t++) test_tensor_free(&before[t]);
                quern_context_destroy(ctx);
                attention_case_free(&c);
            }
    }
}

/* A sequence among others, padded on the left and with room behind, has the bits that it has alone. */
static void a_padded_sequence_has_the_bits_of_its_own_call(void **state)
{
    enum { FIRST = 37, END = 181, QUERIES = 77 };
    const oracle_dense wide = {2, QUERIES, 200, 4, 2, 32, 32, true, 50, -1, 0, NULL, NULL},
                       alone = {1, QUERIES, END - FIRST, 4, 2, 32, 32, true, 50, -1, 0, NULL, NULL};
    const int32_t first[] = {0, FIRST}, count[] = {200, END};
    test_random random = {test_seed("attention_sink", 4)};
    (void)state;
    if (ON_GPU) {
        print_message("a GPU has other kernels for sequences of which all keys exist\n");
        return;
    }
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
            attention_case c, own;
            quern_context *ctx = test_context(level, 2);
            attention_case_make(&c, &wide, (quern_dtype)dtype, TEST_CONTIGUOUS, &random);
            attention_case_give(&c, sinks, first, count, TEST_CONTIGUOUS, &random);
            attention_case_make(&own, &alone, (quern_dtype)dtype, TEST_CONTIGUOUS, &random);
            attention_case_give(&own, sinks, NULL, NULL, TEST_CONTIGUOUS, &random);
            const int64_t row = 2 * 32, at = (200 + FIRST) * row, queries = QUERIES * 4 * 32;
            double *k = test_tensor_get(&c.k), *v = test_tensor_get(&c.v), *q = test_tensor_get(&c.q);
            test_tensor_set(&own.k, k + at);
            test_tensor_set(&own.v, v + at);
            test_tensor_set(&own.q, q + queries);
            attention_case_forward(&c, ctx);
            attention_case_forward(&own, ctx);
            double *o = test_tensor_get(&c.o), *o_own = test_tensor_get(&own.o),
                   *lse = test_tensor_get(&c.lse), *lse_own = test_tensor_get(&own.lse);
            assert_memory_equal(o + queries, o_own, queries * sizeof *o);
            assert_memory_equal(lse + 4 * QUERIES, lse_own, 4 * QUERIES * sizeof *lse);
            double *const all[] = {k, v, q, o, o_own, lse, lse_own};
            for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
            attention_case_free(&own);
            attention_case_free(&c);
            quern_context_destroy(ctx);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_dtype_matches_the_oracle),
        cmocka_unit_test(d_sink_is_the_loss_s_slope),
        cmocka_unit_test(keys_that_do_not_exist_change_no_bit),
        cmocka_unit_test(a_padded_sequence_has_the_bits_of_its_own_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
