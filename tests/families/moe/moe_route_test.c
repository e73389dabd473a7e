/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_route_test.c - the router: DeepSeek-V4's golden vectors, random logits and hidden states against
 * float64, ties and NaN, gradients by differences, and what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"
#include "oracle/moe.h"
#include "tensor.h"

#include <quern/moe.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXPERTS_MOST = 512 };

static quern_status route(quern_context *ctx, const quern_moe_route_params *p,
                          const quern_moe_route_tensors *t)
{
    size_t bytes = 0;
    quern_status status = quern_moe_route_workspace(ctx, p, t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_moe_route(ctx, NULL, p, t, w.data, w.bytes);
    test_workspace_close(&w);
    return status;
}

static quern_status route_backward(quern_context *ctx, const quern_moe_route_params *p,
                                   const quern_moe_route_tensors *t)
{
    size_t bytes = 0;
    quern_status status = quern_moe_route_backward_workspace(ctx, p, t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_moe_route_backward(ctx, NULL, p, t, w.data, w.bytes);
    test_workspace_close(&w);
    return status;
}

/* What a routing gives. */
typedef struct routing {
    test_tensor experts, weights, offsets, permutation;
} routing;

static routing make_routing(test_random *random, int64_t tokens, int64_t experts, int64_t k)
{
    const int64_t slots[] = {tokens, k}, flat = tokens * k;
    return (routing){test_tensor_make(random, QUERN_I32, 2, slots, TEST_STRIDED),
                     test_tensor_make(random, QUERN_F32, 2, slots, TEST_STRIDED),
                     test_tensor_make(random, QUERN_I32, 1, &experts, TEST_UNALIGNED),
                     test_tensor_make(random, QUERN_I32, 1, &flat, TEST_UNALIGNED)};
}

static void into(quern_moe_route_tensors *t, const routing *r)
{
    t->experts = &r->experts.view;
    t->weights = &r->weights.view;
    t->offsets = &r->offsets.view;
    t->permutation = &r->permutation.view;
}

static void free_routing(routing *r)
{
    test_tensor_check_guards(&r->experts, "experts"), test_tensor_check_guards(&r->weights, "weights");
    test_tensor_check_guards(&r->offsets, "offsets"),
        test_tensor_check_guards(&r->permutation, "permutation");
    test_tensor_free(&r->experts), test_tensor_free(&r->weights), test_tensor_free(&r->offsets),
        test_tensor_free(&r->permutation);
}

/* Offsets and permutation are what the experts say. */
static void check_order(const routing *r, int64_t experts)
{
    int32_t *chosen = test_tensor_get_i32(&r->experts), *ends = test_tensor_get_i32(&r->offsets),
            *order = test_tensor_get_i32(&r->permutation);
    const int64_t slots = test_tensor_count(&r->permutation);
    int64_t row = 0;
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t s = 0; s < slots; s++)
            if (chosen[s] == e && order[row++] != s)
                fail_msg("row %lld holds slot %d, expected %lld", (long long)row - 1, order[row - 1],
                         (long long)s);
        assert_int_equal(ends[e], row);
    }
    assert_int_equal(row, slots);
    free(chosen), free(ends), free(order);
}

static void golden_router(quern_context *ctx, const quern_safetensors *file, bool hash, bool from_hidden)
{
    enum { T = 24, E = 8, K = 3, D = 64 };
    const char *prefix = hash ? "hash." : "topk.";
    test_random random = {1};
    const int64_t logits_shape[] = {T, E}, hidden_shape[] = {T, D}, tokens = T;
    quern_tensor logits, hidden, weight, bias, ids, table;
    char name[80];
    snprintf(name, sizeof name, "%slogits", prefix),
        assert_int_equal(quern_safetensors_get(file, name, &logits), QUERN_OK);
    snprintf(name, sizeof name, "%sw.gate.weight", prefix),
        assert_int_equal(quern_safetensors_get(file, name, &weight), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "hidden", &hidden), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "topk.w.gate.e_score_correction_bias", &bias), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "input_ids", &ids), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "hash.w.gate.tid2eid", &table), QUERN_OK);
    logits = quern_tensor_contiguous(logits.data, QUERN_F32, 2, logits_shape);
    hidden = quern_tensor_contiguous(hidden.data, QUERN_F32, 2, hidden_shape);
    ids = quern_tensor_contiguous(ids.data, QUERN_I32, 1, &tokens);
    quern_moe_route_params p = {sizeof p, QUERN_MOE_SCORE_SQRT_SOFTPLUS, K, true, 1.5f};
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    routing r = make_routing(&random, T, E, K);
    into(&t, &r);
    if (from_hidden) {
        t.hidden = &hidden;
        t.weight = &weight;
    } else t.logits = &logits;
    if (hash) {
        t.input_ids = &ids;
        t.tid2eid = &table;
    } else t.bias = &bias;
    if (route(ctx, &p, &t) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    int32_t *expected = golden_get_i32(file, prefix, hash ? "indices" : "indices_sorted", T * K),
            *chosen = test_tensor_get_i32(&r.experts);
    double *weights = golden_get(file, prefix, hash ? "weights" : "weights_sorted", T * K),
           *got = test_tensor_get(&r.weights);
    assert_memory_equal(chosen, expected, sizeof *chosen * T * K);
    test_check_golden("weights", got, weights, T * K, 5e-6);
    check_order(&r, E);
    free(expected), free(chosen), free(weights), free(got);
    free_routing(&r);
}

static void golden_vectors(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < 4; i++) {
            quern_context *ctx = test_context(level, 2);
            quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "v4_moe");
            golden_router(ctx, file, i % 2, i / 2);
            quern_safetensors_close(file);
            quern_context_destroy(ctx);
        }
}

/* A random routing: logits, or hidden states and a weight whose product they are. */
typedef struct route_case {
    quern_moe_route_params p;
    int64_t tokens, experts, dim;
    test_tensor logits, hidden, weight, bias;
    double *exact, *slack; /* logits in double [T, E], and the error that f32 may have */
    double *bias_values;
} route_case;

static route_case make_case(test_random *random, bool from_hidden)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    route_case c = {.p = QUERN_MOE_ROUTE_PARAMS_INIT,
                    .tokens = test_random_int(random, 0, 90),
                    .experts = test_random_int(random, 1, 70)};
    if (test_random_one_in(random, 12)) {
        c.experts = EXPERTS_MOST;
        c.tokens %= 9;
    }
    c.p.score = (quern_moe_score)test_random_int(random, 0, 2);
    c.p.top_k = test_random_int(random, 1, c.experts < 8 ? c.experts : 8);
    c.p.renormalize = test_random_one_in(random, 2);
    c.p.route_scale = 2.5f;
    c.dim = from_hidden ? test_random_int(random, 1, 300) : 0;
    const int64_t logits[] = {c.tokens, c.experts}, hidden[] = {c.tokens, c.dim},
                  weight[] = {c.experts, c.dim};
    const test_layout layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
    c.exact = test_doubles(c.tokens * c.experts);
    c.slack = test_doubles(c.tokens * c.experts);
    if (from_hidden) {
        c.hidden = test_tensor_make(random, dtypes[test_random_int(random, 0, 2)], 2, hidden, layout);
        c.weight = test_tensor_make(random, dtypes[test_random_int(random, 0, 2)], 2, weight, layout);
        test_tensor_normal(&c.hidden, random, 1), test_tensor_normal(&c.weight, random, 0.1);
        double *h = test_tensor_get(&c.hidden), *w = test_tensor_get(&c.weight);
        for (int64_t i = 0; i < c.tokens * c.experts; i++)
            for (int64_t d = 0; d < c.dim; d++) {
                const double term = h[i / c.experts * c.dim + d] * w[i % c.experts * c.dim + d];
                c.exact[i] += term;
                c.slack[i] += fabs(term) * (double)(c.dim + 2) * 0x1p-24;
            }
        free(h), free(w);
    } else {
        c.logits = test_tensor_make(random, QUERN_F32, 2, logits, layout);
        test_tensor_normal(&c.logits, random, 3);
        free(c.exact);
        c.exact = test_tensor_get(&c.logits);
    }
    c.bias = test_tensor_make(random, QUERN_F32, 1, &c.experts, TEST_UNALIGNED);
    test_tensor_normal(&c.bias, random, test_random_one_in(random, 2) ? 0.3 : 0);
    c.bias_values = test_tensor_get(&c.bias);
    return c;
}

static quern_moe_route_tensors tensors_of(const route_case *c)
{
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    if (c->logits.buffer != NULL) t.logits = &c->logits.view;
    else {
        t.hidden = &c->hidden.view;
        t.weight = &c->weight.view;
    }
    t.bias = &c->bias.view;
    return t;
}

static void free_case(route_case *c)
{
    test_tensor *const all[] = {&c->logits, &c->hidden, &c->weight, &c->bias};
    for (int i = 0; i < 4; i++)
        if (all[i]->buffer != NULL) test_tensor_free(all[i]);
    free(c->exact), free(c->slack), free(c->bias_values);
}

/* No expert that was left out is better than one that was taken, beyond f32's error; weights are the
 * oracle's. */
static void check_token(const route_case *c, int64_t t, const int32_t *chosen, const double *weights,
                        const char *what)
{
    double scores[EXPERTS_MOST], expected[EXPERTS_MOST], worst = INFINITY, slack = 0;
    bool taken[EXPERTS_MOST] = {false};
    oracle_route_scores((oracle_score)c->p.score, c->exact + t * c->experts, c->experts, scores);
    for (int64_t j = 0; j < c->p.top_k; j++) {
        assert_true(chosen[j] >= 0 && chosen[j] < c->experts && (j == 0 || chosen[j] > chosen[j - 1]));
        taken[chosen[j]] = true;
        worst = fmin(worst, scores[chosen[j]] + c->bias_values[chosen[j]]);
    }
    for (int64_t e = 0; e < c->experts; e++) slack = fmax(slack, c->slack[t * c->experts + e]);
    for (int64_t e = 0; e < c->experts; e++)
        if (!taken[e] && scores[e] + c->bias_values[e] > worst + 1e-6 + 2 * slack)
            fail_msg("%s: token %lld left out expert %lld", what, (long long)t, (long long)e);
    oracle_route_weights(scores, chosen, c->p.top_k, c->p.renormalize, (double)c->p.route_scale, expected);
    for (int64_t j = 0; j < c->p.top_k; j++)
        if (fabs(weights[j] - expected[j]) > (2e-6 + 4 * slack) * fabs(expected[j]) + 1e-12)
            fail_msg("%s: token %lld slot %lld: weight %.9g, expected %.9g", what, (long long)t, (long long)j,
                     weights[j], expected[j]);
}

static void against_float64(void **state)
{
    const uint64_t seed = test_seed("route", 30);
    (void)state;
    for (int trial = 0; trial < test_trials(120); trial++) {
        char what[30];
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = test_context(test_random_level(&random), trial % 2 ? 1 : 3);
        route_case c = make_case(&random, trial % 2);
        routing r = make_routing(&random, c.tokens, c.experts, c.p.top_k);
        quern_moe_route_tensors t = tensors_of(&c);
        into(&t, &r);
        snprintf(what, sizeof what, "trial %d", trial);
        if (route(ctx, &c.p, &t) != QUERN_OK) fail_msg("%s: %s", what, quern_last_error(ctx));
        int32_t *chosen = test_tensor_get_i32(&r.experts);
        double *weights = test_tensor_get(&r.weights);
        for (int64_t token = 0; token < c.tokens; token++)
            check_token(&c, token, chosen + token * c.p.top_k, weights + token * c.p.top_k, what);
        check_order(&r, c.experts);
        free(chosen), free(weights);
        free_routing(&r);
        free_case(&c);
        quern_context_destroy(ctx);
    }
}

static void ties_and_nan(void **state)
{
    enum { E = 9, K = 3 };
    float logits[3][E] = {{0}, {1, 5, 5, 5, 5, 0, 0, 0, 0}, {NAN, 1, NAN, 0, -1, NAN, NAN, NAN, NAN}};
    static const int32_t expected[3][K] = {{0, 1, 2}, {1, 2, 3}, {1, 3, 4}};
    const int64_t shape[] = {3, E};
    const quern_tensor view = quern_tensor_contiguous(logits, QUERN_F32, 2, shape);
    test_random random = {1};
    (void)state;
    for (int score = QUERN_MOE_SCORE_SQRT_SOFTPLUS; score <= QUERN_MOE_SCORE_SIGMOID; score++) {
        quern_context *ctx = test_context(quern_cpu_level_detect(), 1);
        quern_moe_route_params p = {sizeof p, (quern_moe_score)score, K, false, 1};
        quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
        routing r = make_routing(&random, 3, E, K);
        into(&t, &r);
        t.logits = &view;
        assert_int_equal(route(ctx, &p, &t), QUERN_OK);
        int32_t *chosen = test_tensor_get_i32(&r.experts);
        assert_memory_equal(chosen, expected, sizeof expected);
        free(chosen);
        free_routing(&r);
        quern_context_destroy(ctx);
    }
}

/* d_logits by central differences, d_hidden and d_weight from those. */
static void check_gradients(const route_case *c, const int32_t *chosen, const double *d_weights,
                            const test_tensor *d_logits, const test_tensor *d_hidden,
                            const test_tensor *d_weight)
{
    const double step = 1e-5;
    const int64_t k = c->p.top_k;
    double *d = test_doubles(c->tokens * c->experts), *got = test_tensor_get(d_logits);
    for (int64_t i = 0; i < c->tokens * c->experts; i++) {
        const int64_t t = i / c->experts;
        double loss[2], logits[EXPERTS_MOST];
        for (int side = 0; side < 2; side++) {
            memcpy(logits, c->exact + t * c->experts, sizeof(double) * (size_t)c->experts);
            logits[i % c->experts] += side ? step : -step;
            loss[side] = oracle_route_loss((oracle_score)c->p.score, logits, c->experts, chosen + t * k, k,
                                           c->p.renormalize, (double)c->p.route_scale, d_weights + t * k);
        }
        d[i] = (loss[1] - loss[0]) / (2 * step);
        /* Weights that are renormalised over one expert are constant: what is left is the losses' rounding.
         */
        if (fabs(loss[1] - loss[0]) <= 4 * 0x1p-52 * (fabs(loss[0]) + fabs(loss[1]))) d[i] = 0;
    }
    test_check("d_logits", got, d, c->tokens * c->experts, 1e-5);
    if (c->dim > 0) {
        double *h = test_tensor_get(&c->hidden), *w = test_tensor_get(&c->weight),
               *got_h = test_tensor_get(d_hidden), *got_w = test_tensor_get(d_weight);
        double *d_h = test_doubles(c->tokens * c->dim), *d_w = test_doubles(c->experts * c->dim);
        for (int64_t i = 0; i < c->tokens * c->experts; i++)
            for (int64_t j = 0; j < c->dim; j++) {
                d_h[i / c->experts * c->dim + j] += d[i] * w[i % c->experts * c->dim + j];
                d_w[i % c->experts * c->dim + j] += d[i] * h[i / c->experts * c->dim + j];
            }
        test_check("d_hidden", got_h, d_h, c->tokens * c->dim, test_gradient_bound(c->hidden.view.dtype));
        test_check("d_weight", got_w, d_w, c->experts * c->dim, 1e-5);
        free(h), free(w), free(got_h), free(got_w), free(d_h), free(d_w);
    }
    free(d), free(got);
}

static void gradients(void **state)
{
    const uint64_t seed = test_seed("route gradients", 31);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = test_context(test_random_level(&random), trial % 2 ? 1 : 3);
        route_case c = make_case(&random, trial % 2);
        const int64_t slots[] = {c.tokens, c.p.top_k}, matrix[] = {c.tokens, c.experts},
                      hidden[] = {c.tokens, c.dim}, weight[] = {c.experts, c.dim};
        routing r = make_routing(&random, c.tokens, c.experts, c.p.top_k);
        quern_moe_route_tensors t = tensors_of(&c);
        into(&t, &r);
        if (route(ctx, &c.p, &t) != QUERN_OK) fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        test_tensor d_weights = test_tensor_make(&random, QUERN_F32, 2, slots, TEST_STRIDED),
                    d_logits = test_tensor_make(&random, QUERN_F32, 2, matrix, TEST_STRIDED);
        test_tensor d_hidden = {.buffer = NULL}, d_weight = {.buffer = NULL};
        test_tensor_normal(&d_weights, &random, 1);
        t.d_weights = &d_weights.view;
        t.d_logits = &d_logits.view;
        if (c.dim > 0) {
            d_hidden = test_tensor_make(&random, c.hidden.view.dtype, 2, hidden, TEST_STRIDED);
            d_weight = test_tensor_make(&random, QUERN_F32, 2, weight, TEST_STRIDED);
            t.d_hidden = &d_hidden.view;
            t.d_weight = &d_weight.view;
        }
        if (route_backward(ctx, &c.p, &t) != QUERN_OK) fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        int32_t *chosen = test_tensor_get_i32(&r.experts);
        double *dw = test_tensor_get(&d_weights);
        check_gradients(&c, chosen, dw, &d_logits, &d_hidden, &d_weight);
        test_tensor_check_guards(&d_logits, "d_logits");
        if (c.dim > 0)
            test_tensor_check_guards(&d_hidden, "d_hidden"), test_tensor_check_guards(&d_weight, "d_weight");
        free(chosen), free(dw);
        test_tensor_free(&d_weights), test_tensor_free(&d_logits);
        if (c.dim > 0) test_tensor_free(&d_hidden), test_tensor_free(&d_weight);
        free_routing(&r);
        free_case(&c);
        quern_context_destroy(ctx);
    }
}

#ifndef QUERN_TEST_GPU /* which reads no contents on the host */
static void expect_error(quern_context *ctx, quern_status status, const char *says)
{
    if (status != QUERN_ERR_INVALID_ARGUMENT) fail_msg("%s: status %d", says, (int)status);
    if (strstr(quern_last_error(ctx), says) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), says);
}

static void bad_calls(void **state)
{
    float logits[2 * 4] = {0}, weights[4] = {7, 7, 7, 7}, d_weights[4] = {0}, bias[4] = {0};
    int32_t experts[4] = {7, 7, 7, 7}, offsets[4], permutation[4], ids[2] = {0, 3},
            table[3 * 2] = {0, 1, 2, 3, 0, 1};
    const int64_t matrix[] = {2, 4}, slots[] = {2, 2}, table_shape[] = {3, 2}, four = 4, two = 2;
    const quern_tensor logits_view = quern_tensor_contiguous(logits, QUERN_F32, 2, matrix),
                       bias_view = quern_tensor_contiguous(bias, QUERN_F32, 1, &four);
    const quern_tensor experts_view = quern_tensor_contiguous(experts, QUERN_I32, 2, slots),
                       weights_view = quern_tensor_contiguous(weights, QUERN_F32, 2, slots);
    const quern_tensor d_weights_view = quern_tensor_contiguous(d_weights, QUERN_F32, 2, slots),
                       offsets_view = quern_tensor_contiguous(offsets, QUERN_I32, 1, &four);
    const quern_tensor permutation_view = quern_tensor_contiguous(permutation, QUERN_I32, 1, &four),
                       ids_view = quern_tensor_contiguous(ids, QUERN_I32, 1, &two);
    const quern_tensor table_view = quern_tensor_contiguous(table, QUERN_I32, 2, table_shape);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_PORTABLE, 1);
    quern_moe_route_params p = {sizeof p, QUERN_MOE_SCORE_SIGMOID, 2, false, 1};
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    (void)state;
    expect_error(ctx, route(ctx, &p, &t), "logits, or hidden and weight");
    t.logits = &logits_view;
    expect_error(ctx, route(ctx, &p, &t), "experts is NULL");
    t.experts = &experts_view;
    t.weights = &weights_view;
    t.offsets = &offsets_view;
    t.permutation = &permutation_view;
    p.top_k = 5;
    expect_error(ctx, route(ctx, &p, &t), "top_k is 5: 1 to the 4 experts");
    p.top_k = 0;
    expect_error(ctx, route(ctx, &p, &t), "top_k is 0");
    p.top_k = 2;
    p.score = (quern_moe_score)3;
    expect_error(ctx, route(ctx, &p, &t), "score is 3");
    p.score = QUERN_MOE_SCORE_SIGMOID;
    p.route_scale = NAN;
    expect_error(ctx, route(ctx, &p, &t), "route_scale is nan");
    p.route_scale = 1;
    t.input_ids = &ids_view;
    expect_error(ctx, route(ctx, &p, &t), "input_ids is given without tid2eid");
    t.tid2eid = &table_view;
    expect_error(ctx, route(ctx, &p, &t), "input_ids[1] is 3: 0 to 2");
    ids[1] = 1;
    table[3] = 4;
    expect_error(ctx, route(ctx, &p, &t), "tid2eid[1, 1] is 4: 0 to 3 is accepted");
    t.bias = &bias_view;
    expect_error(ctx, route(ctx, &p, &t), "bias is given with tid2eid");
    for (int i = 0; i < 4; i++) assert_true(experts[i] == 7 && weights[i] == 7);
    t.d_weights = &d_weights_view;
    expect_error(ctx, route_backward(ctx, &p, &t), "experts[0, 0] is 7");
    t.d_hidden = &logits_view;
    expect_error(ctx, route_backward(ctx, &p, &t), "d_hidden is given and hidden is NULL");
    quern_context_destroy(ctx);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_vectors), cmocka_unit_test(against_float64),
        cmocka_unit_test(ties_and_nan),   cmocka_unit_test(gradients),
#ifndef QUERN_TEST_GPU
        cmocka_unit_test(bad_calls),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
