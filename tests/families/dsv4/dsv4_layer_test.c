/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_test.c - the whole layer on the golden vectors and on random calls against the float64 oracle;
 * gradients by the oracle's differences; the same bits for any number of threads. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer_case.h"

#include <quern/plan.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef QUERN_TEST_GPU /* which has no layer in f32 */
static void check_golden(const layer_case *c, double *const expected[LAYER_TENSORS])
{
    for (int k = LAYER_OUT; k <= LAYER_O_A; k++) {
        if (expected[k] == NULL) continue;
        const int64_t n = test_tensor_count(&c->t[k]);
        double *out = test_tensor_get(&c->t[k]), *wanted = test_doubles(n);
        memcpy(wanted, expected[k], (size_t)n * sizeof *wanted);
        for (int64_t e = 0; e < n; e++) /* the vectors' scores are not masked */
            if (out[e] == -INFINITY) wanted[e] = -INFINITY;
        test_check_golden(layer_case_names[k], out, wanted, n, DSV4_TINY_BOUND);
        free(out), free(wanted);
    }
}

/* In one shot, in chunks, and token by token. */
static void golden_layers(void **state)
{
    static const int64_t chunks[][6] = {{13, 1, 19, 12}, {1, 2, 3, 39}, {45}};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        for (int i = 0; i < 3; i++) {
            double *expected[LAYER_TENSORS];
            layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i, expected);
            quern_context *ctx = test_context(level, 2);
            layer_case_forward(&c, ctx);
            check_golden(&c, expected);
            layer_case_check(&c);
            for (int way = 0; way < 4; way++) {
                layer_store s = layer_store_make(&c, c.batch, 0);
                for (int k = LAYER_OUT; k <= LAYER_O_A; k++)
                    if (c.t[k].buffer != NULL) test_tensor_reset(&c.t[k]);
                double *scores = NULL;
                if (i == 0) { /* what no call writes is not seen */
                    const int64_t n = test_tensor_count(&c.t[LAYER_IDX_SCORE]);
                    scores = test_doubles(n);
                    for (int64_t e = 0; e < n; e++) scores[e] = -INFINITY;
                    test_tensor_set(&c.t[LAYER_IDX_SCORE], scores);
                }
                for (int64_t b = 0; b < c.batch; b++)
                    for (int64_t at = 0, piece = 0; at < c.shape.tokens;
                         at += way < 3 ? chunks[way][piece++] : 1)
                        layer_case_append(&c, ctx, &s, b, b, at, way < 3 ? chunks[way][piece] : 1);
                check_golden(&c, expected);
                layer_case_check(&c);
                free(scores);
                layer_store_close(&s);
            }
            for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
            quern_context_destroy(ctx);
            layer_case_free(&c);
        }
    }
}
#endif

static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 15);
    for (int trial = 0; trial < test_trials(200); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        layer_case c = layer_case_random(&random, false);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        layer_case_forward(&c, ctx);
        layer_case_check(&c);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* The gradient of the loss by `values` [count], which are among the oracle's inputs. */
static double *slopes(const layer_case *c, double *values, int64_t count, const double *x, double *const *w,
                      const double *cos_sin, const int32_t *chosen, const double *d_out)
{
    double *d = test_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        const double kept = values[i], step = 1e-5;
        for (int64_t b = 0; b < c->batch; b++) {
            values[i] = kept + step;
            d[i] += layer_case_loss(c, b, x, w, cos_sin, chosen, d_out);
            values[i] = kept - step;
            d[i] -= layer_case_loss(c, b, x, w, cos_sin, chosen, d_out);
        }
        values[i] = kept;
        d[i] /= 2 * step;
    }
    return d;
}

/* A bound is for one operation. In bf16 and f16 a layer's gradients go through some ten roundings one behind
 * the other, forward and back, whose errors add in squares: sqrt(10) times that of one, where an operation's
 * bound leaves 2; and those of norms, biases and sinks are sums of both signs over all tokens. Hence 3
 * bounds, for cases with more than a few keys: with one or two the scores' gradients are differences of
 * nearly equal numbers; and for tensors of more than a few elements. f32 has no such allowance. */
static double gradient_bound(const layer_case *c)
{
    return (c->dtype == QUERN_F32 ? 1 : 3) * test_gradient_bound(c->dtype);
}

static void check_gradients(const layer_case *c)
{
    double *w[ORACLE_LAYER_WEIGHTS] = {NULL}, *x = test_tensor_get(&c->t[LAYER_X]),
           *table = test_tensor_get(&c->t[LAYER_COS_SIN]), *d_out = test_tensor_get(&c->t[LAYER_D_OUT]);
    int32_t *chosen = c->shape.kind == ORACLE_CSA ? test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]) : NULL;
    for (int k = 0; k < ORACLE_LAYER_WEIGHTS; k++)
        if (c->t[LAYER_WEIGHTS + k].buffer != NULL) w[k] = test_tensor_get(&c->t[LAYER_WEIGHTS + k]);
    for (int k = LAYER_D_X; k < LAYER_TENSORS; k++) {
        if (c->t[k].buffer == NULL) continue;
        const int64_t n = test_tensor_count(&c->t[k]);
        test_tensor_check_guards(&c->t[k], layer_case_names[k]);
        if (c->dtype != QUERN_F32 && n < LAYER_FEW) continue;
        double *d = test_tensor_get(&c->t[k]),
               *slope = slopes(c, k == LAYER_D_X ? x : w[k - LAYER_D_WEIGHTS], n, x, w, table, chosen, d_out);
        test_check(layer_case_names[k], d, slope, n, gradient_bound(c));
        free(d), free(slope);
    }
    for (int k = 0; k < ORACLE_LAYER_WEIGHTS; k++) free(w[k]);
    free(x), free(table), free(d_out), free(chosen);
}

static void gradients(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("gradients", 16);
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        layer_case c = layer_case_random(&random, true);
        if (c.dtype != QUERN_F32 && (c.shape.window < 5 || c.shape.tokens < 6)) {
            layer_case_free(&c);
            continue;
        }
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        layer_case_forward(&c, ctx);
        layer_case_backward(&c, ctx);
        check_gradients(&c);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 20; trial++) {
        test_random random = {(uint64_t)trial + 400};
        layer_case c = layer_case_random(&random, false);
        test_tensor first[LAYER_TENSORS] = {{.buffer = NULL}};
        for (int32_t threads = 1; threads <= 4; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            layer_case_forward(&c, ctx);
            layer_case_backward(&c, ctx);
            for (int i = LAYER_OUT; i < LAYER_TENSORS; i++) {
                if (c.t[i].buffer == NULL || i == LAYER_D_OUT) continue;
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        for (int i = 0; i < LAYER_TENSORS; i++)
            if (first[i].buffer != NULL) test_tensor_free(&first[i]);
        layer_case_free(&c);
    }
}

/* What a call is asked to write besides changes no bit of its output. */
static void results_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 20; trial++) {
        test_random random = {(uint64_t)trial + 700};
        layer_case c = layer_case_random(&random, false), less;
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        layer_case_forward(&c, ctx);
        test_tensor first = test_tensor_copy(&c.t[LAYER_OUT]);
        test_tensor_reset(&c.t[LAYER_OUT]);
        less = c;
        for (int i = LAYER_Q_RESIDUAL; i <= LAYER_O_A; i++) less.t[i].buffer = NULL;
        layer_case_forward(&less, ctx);
        assert_true(test_tensor_same_bits(&first, &c.t[LAYER_OUT]));
        test_tensor_free(&first);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* A plan gives the bits of the call, and lists its stages. */
static void plans(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        test_random random = {(uint64_t)kind + 30};
        layer_case c = layer_case_random(&random, false);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        const quern_dsv4_layer_params p = layer_case_params(&c);
        const quern_dsv4_layer_tensors t = layer_case_tensors(&c);
        for (int pass = 0; pass < 2; pass++) {
            static const quern_operation operations[] = {QUERN_OP_DSV4_LAYER, QUERN_OP_DSV4_LAYER_BACKWARD};
            void *data[LAYER_TENSORS];
            char text[2000];
            quern_plan *plan;
            size_t bytes;
            test_tensor first[LAYER_TENSORS];
            if (pass == 0) layer_case_forward(&c, ctx);
            else layer_case_backward(&c, ctx);
            for (int i = LAYER_OUT; i < LAYER_TENSORS; i++) {
                const bool written = i != LAYER_D_OUT && (i > LAYER_D_OUT) == (pass == 1);
                first[i] = (test_tensor){.buffer = NULL};
                if (c.t[i].buffer == NULL || !written) continue;
                first[i] = test_tensor_copy(&c.t[i]);
                test_tensor_reset(&c.t[i]);
            }
            for (int i = 0; i < LAYER_TENSORS; i++) data[i] = c.t[i].buffer != NULL ? c.t[i].view.data : NULL;
            assert_int_equal(quern_plan_create(ctx, operations[pass], &p, &t, &plan), QUERN_OK);
            assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
            test_workspace w = test_workspace_make(bytes);
            assert_int_equal(quern_plan_run(plan, NULL, data, w.data, bytes), QUERN_OK);
            test_workspace_close(&w);
            assert_int_equal(quern_plan_describe(plan, text, sizeof text), QUERN_OK);
            assert_non_null(strstr(text, pass == 0 ? "attend_mqa_forward" : "attend_mqa_backward"));
            quern_plan_destroy(plan);
            for (int i = LAYER_OUT; i < LAYER_TENSORS; i++) {
                if (first[i].buffer == NULL) continue;
                assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
                test_tensor_free(&first[i]);
            }
        }
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* No sequences, or none with tokens: gradients of weights are 0. A list may be longer than there are
 * entries. */
static void empty_and_short(void **state)
{
    (void)state;
    for (int trial = 0; trial < 15; trial++) {
        test_random random = {(uint64_t)trial + 60};
        oracle_layer shape = {.kind = (oracle_layer_kind)(trial % 3),
                              .tokens = trial < 6 ? 0 : 5,
                              .width = 12,
                              .q_lora = 6,
                              .heads = 4,
                              .dim = 8,
                              .groups = 2,
                              .o_lora = 3,
                              .rope_dim = 4,
                              .window = 9,
                              .ratio = 2,
                              .index_heads = 4,
                              .index_dim = 8,
                              .top_k = 40,
                              .eps = 1e-6};
        const int64_t batch = trial >= 12 ? 0 : trial % 6 < 3 ? 2 : trial < 6 ? 0 : 1;
        const bool empty = batch * shape.tokens == 0;
        layer_case c = layer_case_make(&random, &shape, batch, trial % 2 ? QUERN_BF16 : QUERN_F32, QUERN_F32);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        layer_case_forward(&c, ctx);
        layer_case_backward(&c, ctx);
        if (!empty) layer_case_check(&c);
        for (int i = LAYER_D_WEIGHTS; i < LAYER_TENSORS && empty; i++) {
            if (c.t[i].buffer == NULL) continue;
            double *d = test_tensor_get(&c.t[i]);
            for (int64_t k = 0; k < test_tensor_count(&c.t[i]); k++) assert_true(d[k] == 0);
            free(d);
        }
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* Refusals name the argument, what was given and what is accepted; nothing is written. */
static void bad_input(void **state)
{
    (void)state;
    test_random random = {3};
    const oracle_layer shape = {.kind = ORACLE_CSA,
                                .tokens = 9,
                                .width = 10,
                                .q_lora = 6,
                                .heads = 4,
                                .dim = 16,
                                .groups = 2,
                                .o_lora = 3,
                                .rope_dim = 4,
                                .window = 4,
                                .ratio = 3,
                                .index_heads = 3,
                                .index_dim = 8,
                                .top_k = 2,
                                .eps = 1e-6};
    layer_case c = layer_case_make(&random, &shape, 2, QUERN_F32, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const struct {
        int tensor, dim; /* extent to change; -1: the tensor is absent */
        int64_t extent;
        const char *sentence;
    } cases[] = {
        {LAYER_X, -1, 0, "x is NULL: a tensor is needed"},
        {LAYER_X, 2, 9, "q_a.shape[1] is 10: 9 is accepted"},
        {LAYER_COS_SIN, 0, 8, "x has 9 tokens: cos_sin has positions 0 to 7"},
        {LAYER_COS_SIN, 1, 3, "cos_sin has 3 columns: an even number up to the 16 channels is accepted"},
        {LAYER_WEIGHTS + OW_Q_B, 0, 63, "q_b has 63 rows: 1 to 65536 heads of kv's 16 channels are accepted"},
        {LAYER_WEIGHTS + OW_KV, 0, 12, "kv: head dim 12: a multiple of 8 from 8 to 512 is accepted"},
        {LAYER_WEIGHTS + OW_O_A, 1, 24,
         "o_a has 24 columns: the channels of equal groups of q_b's 4 heads of 16 are accepted"},
        {LAYER_WEIGHTS + OW_O_A, 0, 5, "o_a has 5 rows: a multiple of its 2 groups is accepted"},
        {LAYER_WEIGHTS + OW_KV_NORM, -1, 0, "kv_norm is NULL: a tensor is needed"},
        {LAYER_WEIGHTS + OW_CMP_GATE, 0, 16, "compressor_gate.shape[0] is 16: 32 is accepted"},
        {LAYER_WEIGHTS + OW_INDEX_NORM, 0, 4,
         "indexer_norm has 4 channels: a multiple of 8 up to 256, and at least the 4 that are rotated, is "
         "accepted"},
        {LAYER_WEIGHTS + OW_INDEX_HEADS, 0, 0, "indexer_heads has 0 rows: 1 to 65536 are accepted"},
        {LAYER_OUT, -1, 0, "out is NULL: a tensor is needed"},
        {LAYER_Q, 1, 3, "q.shape[1] is 3: 4 is accepted"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        layer_case bad = c;
        if (cases[i].dim < 0) bad.t[cases[i].tensor].buffer = NULL;
        else bad.t[cases[i].tensor].view.shape[cases[i].dim] = cases[i].extent;
        const quern_dsv4_layer_params p = layer_case_params(&bad);
        const quern_dsv4_layer_tensors t = layer_case_tensors(&bad);
        assert_int_equal(quern_dsv4_layer(ctx, NULL, &p, &t, &bad, 1 << 30), QUERN_ERR_INVALID_ARGUMENT);
        assert_string_equal(quern_last_error(ctx), cases[i].sentence);
    }
    quern_dsv4_layer_params p = layer_case_params(&c);
    const quern_dsv4_layer_tensors t = layer_case_tensors(&c);
    p.kind = QUERN_DSV4_LAYER_HCA;
    assert_int_equal(quern_dsv4_layer(ctx, NULL, &p, &t, &c, 1 << 30), QUERN_ERR_INVALID_ARGUMENT);
    assert_string_equal(quern_last_error(ctx), "indexer_bias is given: a layer of kind hca has no indexer");
    p.kind = QUERN_DSV4_LAYER_SWA;
    assert_int_equal(quern_dsv4_layer(ctx, NULL, &p, &t, &c, 1 << 30), QUERN_ERR_INVALID_ARGUMENT);
    assert_string_equal(quern_last_error(ctx),
                        "compressor_bias is given: a layer of kind swa has no compressor");
    p.kind = QUERN_DSV4_LAYER_CSA;
    char small[64];
    assert_int_equal(quern_dsv4_layer(ctx, NULL, &p, &t, small, sizeof small), QUERN_ERR_WORKSPACE);
    for (int i = 0; i < LAYER_TENSORS; i++)
        if (c.t[i].buffer != NULL) test_tensor_check_unchanged(&c.t[i], layer_case_names[i]);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifndef QUERN_TEST_GPU
        cmocka_unit_test(golden_layers),
#endif
        cmocka_unit_test(random_calls),
        cmocka_unit_test(gradients),
        cmocka_unit_test(threads_change_no_bit),
        cmocka_unit_test(results_change_no_bit),
        cmocka_unit_test(plans),
        cmocka_unit_test(empty_and_short),
        cmocka_unit_test(bad_input)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
