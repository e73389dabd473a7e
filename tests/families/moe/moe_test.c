/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_test.c - the whole layer against float64, DeepSeek-V4's golden vectors, its own parts, and itself:
 * threads, levels, dropped tokens, plans. */
#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"
#include "moe_case.h"

#include <quern/plan.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static moe_wish random_wish(test_random *random, int trial)
{
    static const int64_t tokens[] = {0, 1, 2, 7, 24, 40};
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    moe_wish w = {.tokens = tokens[test_random_int(random, 0, 5)],
                  .dtype = dtypes[trial % 3],
                  .routed = (moe_weights)test_random_int(random, MOE_FLOATS, MOE_REPACKED),
                  .shared = (moe_weights)test_random_int(random, MOE_NONE, MOE_REPACKED),
                  .logits = test_random_one_in(random, 3),
                  .table = test_random_one_in(random, 3),
                  .bias = test_random_one_in(random, 2)};
    w.routed_by_hand = trial % 4 == 3;
    w.a4 = w.routed != MOE_FLOATS && test_random_one_in(random, 3);
    return w;
}

/* Whether two cases' results of a call are the same bits. */
static void check_same(const moe_case *c, const test_tensor kept[MOE_TENSORS], const char *what)
{
    for (int i = 0; i < MOE_TENSORS; i++)
        if (kept[i].buffer != NULL && !test_tensor_same_bits(&c->t[i], &kept[i]))
            fail_msg("%s: tensor %d differs", what, i);
}

static void keep(const moe_case *c, test_tensor kept[MOE_TENSORS])
{
    for (int i = 0; i < MOE_TENSORS; i++)
        kept[i] =
            moe_is_result(c, i) && c->t[i].buffer != NULL ? test_tensor_copy(&c->t[i]) : (test_tensor){0};
}

static void drop(test_tensor kept[MOE_TENSORS])
{
    for (int i = 0; i < MOE_TENSORS; i++)
        if (kept[i].buffer != NULL) test_tensor_free(&kept[i]);
}

static void against_float64(void **state)
{
    const uint64_t seed = test_seed("moe", 41);
    (void)state;
    for (int trial = 0; trial < test_trials(120); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const moe_wish w = random_wish(&random, trial);
        moe_case c = moe_make(&random, &w);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            test_tensor kept[MOE_TENSORS];
            for (int32_t threads = 1; threads <= 3; threads++) {
                char what[100];
                quern_context *ctx = test_context(level, threads);
                snprintf(what, sizeof what, "trial %d, %s, %d threads, routed %d, shared %d, a4 %d", trial,
                         quern_cpu_level_name(level), threads, (int)w.routed, (int)w.shared, w.a4);
                moe_call_forward(&c, ctx);
                moe_call_backward(&c, ctx);
                if (threads == 1) moe_check_forward(&c, what), moe_check_backward(&c, what), keep(&c, kept);
                else check_same(&c, kept, what);
                quern_context_destroy(ctx);
            }
            drop(kept);
        }
        moe_free(&c);
    }
}

/* A token's rows of out and of the gradients do not depend on the others. */
static void tokens_stand_alone(void **state)
{
    static const int by_token[] = {M(out), M(d_hidden), M(d_weights), M(d_logits)};
    const uint64_t seed = test_seed("moe rows", 43);
    (void)state;
    for (int trial = 0; trial < test_trials(40); trial++) {
        test_random random;
        bool kept[60];
        int64_t count = 0;
        if (!test_trial(seed, trial, &random)) continue;
        moe_wish w = random_wish(&random, trial);
        w.tokens = 60;
        moe_case c = moe_make(&random, &w);
        for (int t = 0; t < 60; t++) count += kept[t] = test_random_one_in(&random, 1 + trial % 7);
        moe_case s = moe_subset(&c, &random, kept, count);
        quern_context *ctx = test_context(test_random_level(&random), 2);
        moe_call_forward(&c, ctx), moe_call_backward(&c, ctx);
        moe_call_forward(&s, ctx), moe_call_backward(&s, ctx);
        for (int i = 0; i < 4; i++) {
            if (c.t[by_token[i]].buffer == NULL) continue;
            const int64_t width = test_tensor_count(&c.t[by_token[i]]) / 60;
            double *all = test_tensor_get(&c.t[by_token[i]]), *some = test_tensor_get(&s.t[by_token[i]]);
            for (int64_t t = 0, to = 0; t < 60; t++) {
                if (!kept[t]) continue;
                if (memcmp(all + t * width, some + to * width, sizeof *all * (size_t)width) != 0)
                    fail_msg("trial %d: token %lld of tensor %d depends on others", trial, (long long)t,
                             by_token[i]);
                to++;
            }
            free(all), free(some);
        }
        quern_context_destroy(ctx);
        moe_subset_free(&s);
        moe_free(&c);
    }
}

/* ---- beyond f16 ---- */

/* One expert, and a shared one of its size: a token of eighths. SwiGLU makes 147456 of it, which down brings
 * back into f16's range. */
typedef struct large_layer {
    test_tensor hidden, logits, up, up_scales, down, down_scales, shared[3], out, d_out, d_hidden;
} large_layer;

static test_tensor filled(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns, double value)
{
    const int64_t shape[] = {1, rows, columns};
    const int32_t matrix = rows > 0; /* else [1, columns] */
    const int64_t flat[] = {1, columns};
    test_tensor t = test_tensor_make(random, dtype, matrix ? 3 : 2, matrix ? shape : flat, TEST_CONTIGUOUS);
    if (dtype == QUERN_U8) {
        memset(t.view.data, (int)value, (size_t)test_tensor_count(&t));
        return t;
    }
    double *x = test_doubles(test_tensor_count(&t));
    for (int64_t k = 0; k < test_tensor_count(&t); k++) x[k] = value;
    test_tensor_set(&t, x);
    free(x);
    return t;
}

/* As filled(), [rows, columns]. */
static test_tensor filled_matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                                 double value)
{
    test_tensor t = filled(random, dtype, rows, columns, value);
    t.view.ndim = 2;
    memmove(t.view.shape, t.view.shape + 1, 2 * sizeof *t.view.shape);
    memmove(t.view.strides, t.view.strides + 1, 2 * sizeof *t.view.strides);
    return t;
}

/* out and d_hidden, [2][32], of the layer in `dtype`. */
static void run_large(quern_context *ctx, quern_dtype dtype, bool packed, bool with_shared, double out[2][32])
{
    enum { D = 32, I = 32 };
    test_random random = {1};
    large_layer x = {.hidden = filled(&random, dtype, 0, D, 0.125),
                     .logits = filled(&random, QUERN_F32, 0, 1, 0),
                     .out = filled(&random, dtype, 0, D, 0),
                     .d_out = filled(&random, dtype, 0, D, 0.125),
                     .d_hidden = filled(&random, dtype, 0, D, 0)};
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    size_t bytes = 0;
    x.up = packed ? filled(&random, QUERN_U8, D / 2, 2 * I, 0x77) : filled(&random, dtype, 2 * I, D, 96);
    x.up_scales = filled(&random, QUERN_U8, D / 16, 2 * I, 0x58); /* 16: weights of 96 */
    x.down = packed ? filled(&random, QUERN_U8, I / 2, D, 0x11) : filled(&random, dtype, D, I, 0x1p-10);
    x.down_scales = filled(&random, QUERN_U8, I / 16, D, 0x01); /* 2^-9: weights of 2^-10 */
    for (int i = 0; i < 3; i++) x.shared[i] = filled_matrix(&random, dtype, 32, 32, i < 2 ? 96 : 0x1p-10);
    t.hidden = &x.hidden.view, t.logits = &x.logits.view, t.out = &x.out.view;
    if (packed) t.gate_up_codes = &x.up.view, t.gate_up_scales = &x.up_scales.view;
    if (packed) t.down_codes = &x.down.view, t.down_scales = &x.down_scales.view;
    if (!packed) t.gate_up = &x.up.view, t.down = &x.down.view;
    if (with_shared) t.shared_gate = &x.shared[0].view, t.shared_up = &x.shared[1].view;
    if (with_shared) t.shared_down = &x.shared[2].view;
    for (int backward = 0; backward < 2; backward++) {
        if (backward) t.out = NULL, t.d_out = &x.d_out.view, t.d_hidden = &x.d_hidden.view;
        if ((backward ? quern_moe_backward_workspace : quern_moe_forward_workspace)(ctx, &p, &t, &bytes) !=
            QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        test_workspace w = test_workspace_make(bytes);
        if ((backward ? quern_moe_backward : quern_moe_forward)(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        test_workspace_close(&w);
        double *values = test_tensor_get(backward ? &x.d_hidden : &x.out);
        memcpy(out[backward], values, sizeof out[backward]);
        free(values);
    }
    test_tensor *const all[] = {&x.hidden,    &x.logits,      &x.up,        &x.up_scales,
                                &x.down,      &x.down_scales, &x.shared[0], &x.shared[1],
                                &x.shared[2], &x.out,         &x.d_out,     &x.d_hidden};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) test_tensor_free(all[i]);
}

static void what_stands_between_products_may_exceed_f16(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int form = 0; form < 4; form++) {
            quern_context *ctx = test_context(level, 1);
            double right[2][32], got[2][32];
            run_large(ctx, QUERN_F32, form % 2, form / 2, right);
            run_large(ctx, QUERN_F16, form % 2, form / 2, got);
            test_check("out", got[0], right[0], 32, test_forward_bound(QUERN_F16));
            test_check("d_hidden", got[1], right[1], 32, test_gradient_bound(QUERN_F16));
            assert_true(right[0][0] > 4000 && right[0][0] < 60000 && right[1][0] < 60000);
            quern_context_destroy(ctx);
        }
}

/* ---- DeepSeek-V4's golden vectors ---- */

static quern_tensor golden_tensor(const quern_safetensors *file, const char *prefix, const char *name)
{
    char full[80];
    quern_tensor t;
    snprintf(full, sizeof full, "%s%s", prefix, name);
    assert_int_equal(quern_safetensors_get(file, full, &t), QUERN_OK);
    return t;
}

static void check_golden(quern_context *ctx, const quern_safetensors *file, bool hash, const char *expected,
                         float limit, bool shared)
{
    enum { COUNT = 2 * 12 * 64 };
    const char *prefix = hash ? "hash." : "topk.";
    const quern_tensor hidden = golden_tensor(file, "", "hidden"), ids = golden_tensor(file, "", "input_ids"),
                       table = golden_tensor(file, "hash.", "w.gate.tid2eid"),
                       bias = golden_tensor(file, "topk.", "w.gate.e_score_correction_bias"),
                       weight = golden_tensor(file, prefix, "w.gate.weight"),
                       gate_up = golden_tensor(file, prefix, "w.experts.gate_up_proj"),
                       down = golden_tensor(file, prefix, "w.experts.down_proj"),
                       shared_gate = golden_tensor(file, prefix, "w.shared_experts.gate_proj.weight"),
                       shared_up = golden_tensor(file, prefix, "w.shared_experts.up_proj.weight"),
                       shared_down = golden_tensor(file, prefix, "w.shared_experts.down_proj.weight");
    float out[COUNT];
    const quern_tensor to = quern_tensor_contiguous(out, QUERN_F32, 3, hidden.shape);
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    size_t bytes = 0;
    p.score = QUERN_MOE_SCORE_SQRT_SOFTPLUS;
    p.top_k = 3;
    p.renormalize = true;
    p.route_scale = 1.5f;
    p.limit = limit;
    t.hidden = &hidden;
    t.weight = &weight;
    t.gate_up = &gate_up;
    t.down = &down;
    t.out = &to;
    if (hash) {
        t.input_ids = &ids;
        t.tid2eid = &table;
    } else t.bias = &bias;
    if (shared) {
        t.shared_gate = &shared_gate;
        t.shared_up = &shared_up;
        t.shared_down = &shared_down;
    }
    assert_int_equal(quern_moe_forward_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    if (quern_moe_forward(ctx, NULL, &p, &t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    double *reference = golden_get(file, prefix, expected, COUNT), got[COUNT];
    for (int i = 0; i < COUNT; i++) got[i] = (double)out[i];
    test_check_golden(expected, got, reference, COUNT, 5e-6);
    free(reference);
}

static void golden_vectors(void **state)
{
    (void)state;
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "v4_moe");
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        for (int hash = 0; hash < 2; hash++) {
            check_golden(ctx, file, hash, "out", 10, true);
            check_golden(ctx, file, hash, "routed", 10, false);
        }
        check_golden(ctx, file, false, "routed_limit0.75", 0.75f, false);
        quern_context_destroy(ctx);
    }
    quern_safetensors_close(file);
}

/* ---- the oracle ---- */

/* Along a random direction, the oracle's gradient of the hidden states, or of experts' matrices, equals the
 * central difference of its forward. */
static void the_oracle_differentiates(void **state)
{
    test_random random = {test_seed("the_oracle_differentiates", 44)};
    (void)state;
    for (int trial = 0; trial < test_trials(12); trial++) {
        const moe_wish w = {
            .tokens = 5, .dtype = QUERN_F32, .routed = MOE_FLOATS, .shared = MOE_FLOATS, .bias = true};
        static const int inputs[] = {M(hidden), M(gate_up), M(down)};
        const int of = inputs[trial % 3];
        const double step = 1e-6;
        moe_case c = moe_make(&random, &w);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        moe_call_forward(&c, ctx);
        const int64_t n = c.tokens * c.dim, count = test_tensor_count(&c.t[of]);
        double *d_out = test_tensor_get(&c.t[M(d_out)]), *out = test_doubles(n), *at = c.values[of],
               *moved = test_doubles(count), *along = test_doubles(count), loss = 0, expected = 0,
               *d_x = moe_oracle_gradient(&c, of, d_out);
        for (int64_t i = 0; i < count; i++) along[i] = test_random_normal(&random);
        for (int side = -1; side <= 1; side += 2) {
            for (int64_t i = 0; i < count; i++) moved[i] = at[i] + side * step * along[i];
            c.values[of] = moved;
            moe_oracle_forward(&c, out);
            for (int64_t i = 0; i < n; i++) loss += side * d_out[i] * out[i] / (2 * step);
        }
        c.values[of] = at;
        for (int64_t i = 0; i < count; i++) expected += d_x[i] * along[i];
        if (fabs(loss - expected) > 1e-5 * (fabs(expected) + 1))
            fail_msg("trial %d: difference %.9g, gradient %.9g", trial, loss, expected);
        free(d_out), free(out), free(moved), free(along), free(d_x);
        quern_context_destroy(ctx);
        moe_free(&c);
    }
}

/* ---- plans ---- */

static void a_plan_gives_the_bits_of_the_call(void **state)
{
    const uint64_t seed = test_seed("moe plans", 45);
    (void)state;
    for (int trial = 0; trial < test_trials(20); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const moe_wish w = random_wish(&random, trial);
        moe_case c = moe_make(&random, &w);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        for (int backward = 0; backward < 2; backward++) {
            test_tensor kept[MOE_TENSORS];
            void *data[MOE_TENSORS] = {NULL};
            const quern_moe_tensors t = moe_bind(&c, backward);
            size_t bytes = 0;
            quern_plan *plan = NULL;
            if (backward) moe_call_backward(&c, ctx);
            else moe_call_forward(&c, ctx);
            keep(&c, kept);
            for (int i = 0; i < MOE_TENSORS; i++) {
                data[i] = (&t.hidden)[i] != NULL ? c.t[i].view.data : NULL;
                if (moe_is_result(&c, i) && data[i] != NULL) test_tensor_reset(&c.t[i]);
            }
            if (quern_plan_create(ctx, backward ? QUERN_OP_MOE_BACKWARD : QUERN_OP_MOE_FORWARD, &c.params, &t,
                                  &plan) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
            test_workspace space = test_workspace_make(bytes);
            if (quern_plan_run(plan, NULL, data, space.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace_close(&space);
            check_same(&c, kept, "plan");
            drop(kept);
            quern_plan_destroy(plan);
        }
        quern_context_destroy(ctx);
        moe_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_float64),
        cmocka_unit_test(what_stands_between_products_may_exceed_f16),
        cmocka_unit_test(tokens_stand_alone),
        cmocka_unit_test(golden_vectors),
        cmocka_unit_test(the_oracle_differentiates),
        cmocka_unit_test(a_plan_gives_the_bits_of_the_call),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
