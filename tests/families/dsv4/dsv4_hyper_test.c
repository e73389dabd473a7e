/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_hyper_test.c - hyper-connections: random calls against float64 at every CPU level, the oracle's
 * gradients against differences, the same bits on any number of threads, NaN, empty calls, and what is
 * refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/hyper.h"

#include <quern/dsv4_hyper.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* In the order of the struct. */
enum {
    X,
    FN,
    BASE,
    SCALE,
    NORM,
    F,
    PRE_IN,
    OUT_H,
    PRE,
    POST,
    COMB,
    NEW,
    D_H,
    D_PRE,
    D_POST,
    D_COMB,
    D_NEW,
    D_X,
    D_FN,
    D_BASE,
    D_SCALE,
    D_NORM,
    D_F,
    D_PRE_IN,
    TENSORS
};
#define BIT(t) ((uint64_t)1 << (t))

/* A call: its tensors, and what the oracle makes of them. `set`: the tensors that there are. */
typedef struct hyper_case {
    quern_dsv4_hyper_params params;
    int64_t tokens, copies, width, weights;
    quern_dtype dtype;
    uint64_t set;
    test_tensor t[TENSORS];
    double *value[TENSORS]; /* inputs as they were stored; results */
    double *squares[2];
    oracle_hyper oracle;
} hyper_case;

static bool has(const hyper_case *c, int tensor)
{
    return (c->set & BIT(tensor)) != 0;
}

static int32_t shape_of(const hyper_case *c, int tensor, int64_t shape[3])
{
    const int64_t n = c->copies, all = n * c->width;
    const int64_t shapes[][3] = {{c->tokens, n, c->width}, {c->weights, all}, {c->weights},
                                 {c->params.head ? 1 : 3}, {c->width},        {c->tokens, c->width},
                                 {c->tokens, n},           {c->tokens, n, n}};
    static const int32_t dims[] = {3, 2, 1, 1, 1, 2, 2, 3};
    static const int kind[TENSORS] = {
        [X] = 0,      [FN] = 1,     [BASE] = 2,    [SCALE] = 3,  [NORM] = 4,  [F] = 5,
        [PRE_IN] = 6, [OUT_H] = 5,  [PRE] = 6,     [POST] = 6,   [COMB] = 7,  [NEW] = 0,
        [D_H] = 5,    [D_PRE] = 6,  [D_POST] = 6,  [D_COMB] = 7, [D_NEW] = 0, [D_X] = 0,
        [D_FN] = 1,   [D_BASE] = 2, [D_SCALE] = 3, [D_NORM] = 4, [D_F] = 5,   [D_PRE_IN] = 6};
    memcpy(shape, shapes[kind[tensor]], sizeof shapes[0]);
    return dims[kind[tensor]];
}

static bool is_activation(int tensor)
{
    return tensor == X || tensor == F || tensor == OUT_H || tensor == NEW || tensor == D_H ||
           tensor == D_NEW || tensor == D_X || tensor == D_F;
}

/* The tensors that a call with these may have: results of what is not there are left out. */
static uint64_t allowed(const hyper_case *c)
{
    uint64_t set = c->set;
    const bool head = c->params.head, handed = has(c, PRE_IN), mixes = has(c, FN);
    if (head) set &= ~(BIT(F) | BIT(POST) | BIT(COMB) | BIT(D_POST) | BIT(D_COMB));
    if (head || !handed) set &= ~(BIT(PRE) | BIT(D_PRE));
    if (!handed) set &= ~BIT(D_PRE_IN);
    if ((set & BIT(F)) == 0) set &= ~(BIT(NEW) | BIT(D_NEW) | BIT(D_F));
    if (head && handed) set &= ~(BIT(FN) | BIT(BASE) | BIT(SCALE));
    if (!mixes || (head && handed)) set &= ~(BIT(D_FN) | BIT(D_BASE) | BIT(D_SCALE));
    if ((set & (BIT(D_H) | BIT(D_PRE) | BIT(D_POST) | BIT(D_COMB) | BIT(D_NEW))) == 0) set |= BIT(D_H);
    return set;
}

/* A case of c's extents, dtype and set. */
static void make(hyper_case *c, test_random *random, bool strided)
{
    c->weights = c->params.head ? c->copies : c->copies * (c->copies + 2);
    c->set = allowed(c);
    for (int i = 0; i < TENSORS; i++) {
        int64_t shape[3], count = 1;
        const int32_t ndim = shape_of(c, i, shape);
        for (int d = 0; d < ndim; d++) count *= shape[d];
        const double sigma = i == FN ? 2 / sqrt((double)(c->copies * c->width)) : 1;
        c->value[i] = test_doubles(count);
        if (!has(c, i)) continue;
        const test_layout layout =
            strided ? (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1) : TEST_CONTIGUOUS;
        const bool narrow = is_activation(i) || (i == NORM && test_random_one_in(random, 2));
        c->t[i] = test_tensor_make(random, narrow ? c->dtype : QUERN_F32, ndim, shape, layout);
        if (i > PRE_IN && !(i >= D_H && i <= D_NEW)) continue;
        test_tensor_normal(&c->t[i], random, sigma);
        free(c->value[i]);
        c->value[i] = test_tensor_get(&c->t[i]);
    }
    c->squares[0] = test_doubles(c->weights), c->squares[1] = test_doubles(3);
    const quern_dsv4_hyper_params *p = &c->params;
    c->oracle = (oracle_hyper){.tokens = c->tokens,
                               .copies = c->copies,
                               .width = c->width,
                               .head = p->head,
                               .iters = p->iters > 0 ? (int)p->iters : 20,
                               .eps = p->eps > 0 ? (double)p->eps : (double)1e-6f,
                               .rms_eps = p->rms_eps > 0 ? (double)p->rms_eps : (double)1e-6f,
                               .x = c->value[X],
                               .fn = has(c, FN) ? c->value[FN] : NULL,
                               .base = c->value[BASE],
                               .scale = c->value[SCALE],
                               .norm_weight = c->value[NORM],
                               .f = has(c, F) ? c->value[F] : NULL,
                               .pre_in = has(c, PRE_IN) ? c->value[PRE_IN] : NULL};
}

static void release(hyper_case *c)
{
    for (int i = 0; i < TENSORS; i++) {
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
        free(c->value[i]);
    }
    free(c->squares[0]), free(c->squares[1]);
}

static void solve(hyper_case *c)
{
    double *const *v = c->value;
    const oracle_hyper_out out = {v[OUT_H], v[PRE], v[POST], v[COMB], v[NEW]};
    const oracle_hyper_grad grad = {.d_h = has(c, D_H) ? v[D_H] : NULL,
                                    .d_pre = has(c, D_PRE) ? v[D_PRE] : NULL,
                                    .d_post = has(c, D_POST) ? v[D_POST] : NULL,
                                    .d_comb = has(c, D_COMB) ? v[D_COMB] : NULL,
                                    .d_new = has(c, D_NEW) ? v[D_NEW] : NULL,
                                    .d_x = v[D_X],
                                    .d_fn = v[D_FN],
                                    .d_base = v[D_BASE],
                                    .d_scale = v[D_SCALE],
                                    .d_norm_weight = v[D_NORM],
                                    .d_f = v[D_F],
                                    .d_pre_in = v[D_PRE_IN],
                                    .base_squares = c->squares[0],
                                    .scale_squares = c->squares[1]};
    oracle_hyper_forward(&c->oracle, &out);
    oracle_hyper_backward(&c->oracle, &grad);
}

/* Of sums over tokens that may cancel: against the root of the terms' squares where that is larger. */
static void check_sums(const char *name, const double *out, const double *expected, const double *squares,
                       int64_t n, double bound)
{
    double error = 0, size = 0, terms = 0;
    for (int64_t i = 0; i < n; i++) {
        error += pow(out[i] - expected[i], 2);
        size += expected[i] * expected[i];
        terms += squares[i];
    }
    if (!(error <= bound * bound * fmax(size, terms)))
        fail_msg("%s: error %.3g of %.3g", name, sqrt(error), sqrt(fmax(size, terms)));
}

static void check(hyper_case *c, quern_context *ctx)
{
    quern_dsv4_hyper_tensors views = QUERN_DSV4_HYPER_TENSORS_INIT;
    for (int i = OUT_H; i < TENSORS; i++)
        if (has(c, i) && !(i >= D_H && i <= D_NEW)) test_tensor_reset(&c->t[i]);
    op_case_bind("v4-hyper", c->t, TENSORS, c->set, &views);
    op_case_run(ctx, "v4-hyper", QUERN_OP_FORWARD, &c->params, &views, c->t, TENSORS);
    op_case_run(ctx, "v4-hyper", QUERN_OP_BACKWARD, &c->params, &views, c->t, TENSORS);
    for (int i = OUT_H; i < TENSORS; i++) {
        if (!has(c, i) || (i >= D_H && i <= D_NEW)) continue;
        double *out = test_tensor_get(&c->t[i]);
        const char *name = op_case_field("v4-hyper", i);
        const double bound = i <= NEW ? test_forward_bound(c->dtype) : test_gradient_bound(c->dtype);
        if (i == D_BASE || i == D_SCALE)
            check_sums(name, out, c->value[i], c->squares[i - D_BASE], test_tensor_count(&c->t[i]), bound);
        else test_check(name, out, c->value[i], test_tensor_count(&c->t[i]), bound);
        free(out);
    }
}

static hyper_case random_case(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT};
    const bool long_rows = test_random_one_in(random, 6), many = !long_rows && test_random_one_in(random, 5);
    c.dtype = dtypes[test_random_int(random, 0, 2)];
    c.copies = test_random_one_in(random, 2) ? 4 : test_random_int(random, 1, 8);
    c.width = long_rows ? test_random_int(random, 1000, 2300) : test_random_int(random, 1, many ? 20 : 300);
    c.tokens = many ? test_random_int(random, 180, 900) : test_random_int(random, 0, long_rows ? 30 : 60);
    c.params.head = test_random_one_in(random, 4);
    c.params.iters = test_random_one_in(random, 2) ? 0 : test_random_int(random, 1, 64);
    if (test_random_one_in(random, 2)) c.params.eps = 1e-3f, c.params.rms_eps = 1e-2f;
    /* The norm of one copy hardly depends on its factor, whose gradient would be rounding alone; few channels
     * may all cancel in the sum of the copies. */
    if (c.copies == 1) c.params.rms_eps = 10;
    else if (c.width < 64) c.params.rms_eps = 0.3f;
    c.set = ~(uint64_t)0;
    for (int i = F; i < TENSORS; i++)
        if (i != OUT_H && i != NEW && i != D_X && test_random_one_in(random, i == PRE_IN ? 2 : 4))
            c.set &= ~BIT(i);
    return c;
}

static void calls_against_float64(void **state)
{
    const uint64_t seed = test_seed("hyper-connections", 41);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        hyper_case c = random_case(&random);
        make(&c, &random, true);
        solve(&c);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, (int32_t)test_random_int(&random, 1, 3));
            check(&c, ctx);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

/* Many tokens of four copies in bf16 have kernels of their own on GPUs: several panels of channels and tiles
 * of tokens, the last of both not full, each with some of the tensors. */
static void many_tokens_of_four_copies(void **state)
{
    static const struct {
        int64_t tokens, width;
        uint64_t without;
    } cases[] = {
        {530, 640, BIT(PRE_IN)},
        {521, 128, 0},
        {768, 1152, BIT(PRE_IN) | BIT(F) | BIT(D_SCALE)},
        {512, 384, BIT(D_H) | BIT(D_POST) | BIT(D_FN)},
        {541, 512, BIT(PRE_IN)},
        {1030, 1024, BIT(F) | BIT(D_POST)},
        {1100, 1280, BIT(PRE_IN)},
        {517, 1536, BIT(PRE_IN) | BIT(F) | BIT(COMB) | BIT(D_H)},
        {515, 4096, BIT(POST)},
        {515, 256, BIT(PRE_IN) | BIT(D_H) | BIT(D_COMB) | BIT(D_F) | BIT(D_NORM)},
    };
    test_random random = {test_seed("hyper-connections of many tokens", 45)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT, .copies = 4, .dtype = QUERN_BF16};
        c.tokens = cases[i].tokens, c.width = cases[i].width;
        c.set = ~(cases[i].without);
        c.params.iters = i == 1 ? 1 : 0;
        make(&c, &random, false);
        solve(&c);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            check(&c, ctx);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

/* The sum of all results times their gradients. */
static double loss_of(const hyper_case *c)
{
    double *const *v = c->value, loss = 0;
    const int results[] = {OUT_H, PRE, POST, COMB, NEW}, gradients[] = {D_H, D_PRE, D_POST, D_COMB, D_NEW};
    const oracle_hyper_out out = {v[OUT_H], v[PRE], v[POST], v[COMB], v[NEW]};
    oracle_hyper_forward(&c->oracle, &out);
    for (int i = 0; i < 5; i++)
        for (int64_t k = 0; has(c, gradients[i]) && k < test_tensor_count(&c->t[gradients[i]]); k++)
            loss += v[results[i]][k] * v[gradients[i]][k];
    return loss;
}

static void check_differences(hyper_case *c)
{
    static const int inputs[] = {X, FN, BASE, SCALE, NORM, F, PRE_IN},
                     gradients[] = {D_X, D_FN, D_BASE, D_SCALE, D_NORM, D_F, D_PRE_IN};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        for (int64_t k = 0; has(c, inputs[i]) && k < test_tensor_count(&c->t[inputs[i]]); k++) {
            double *at = &c->value[inputs[i]][k], loss[2];
            const double saved = *at;
            for (int side = 0; side < 2; side++) {
                *at = saved + (side == 0 ? -1e-5 : 1e-5);
                loss[side] = loss_of(c);
            }
            *at = saved;
            const double found = (loss[1] - loss[0]) / 2e-5, expected = c->value[gradients[i]][k];
            if (!(fabs(found - expected) <= 1e-7 * (1 + fabs(expected))))
                fail_msg("%s[%lld] is %.9g, the difference %.9g", op_case_field("v4-hyper", gradients[i]),
                         (long long)k, expected, found);
        }
}

static void gradients_are_differences(void **state)
{
    test_random random = {test_seed("hyper-connections' differences", 42)};
    (void)state;
    for (int i = 0; i < 12; i++) {
        hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT, .tokens = 2, .copies = 1 + i % 4, .width = 5};
        c.params.head = i % 3 == 2;
        c.params.iters = i % 2 == 0 ? 3 : 20;
        c.params.eps = 1e-2f;
        c.params.rms_eps = 0.3f;
        c.set = i % 4 < 2 ? ~(uint64_t)0 : ~(BIT(PRE_IN) | (i % 4 == 3 ? BIT(F) : 0));
        make(&c, &random, false);
        solve(&c);
        check_differences(&c);
        release(&c);
    }
}

static void same_bits_of(test_random *random, int64_t tokens, int64_t width)
{
    hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT, .tokens = tokens, .copies = 4, .width = width};
    c.dtype = QUERN_BF16;
    c.set = ~(uint64_t)0;
    make(&c, random, false);
    solve(&c);
    test_tensor kept[TENSORS] = {{.buffer = NULL}};
    for (int32_t threads = 1; threads <= 3; threads++) {
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
        check(&c, ctx);
        for (int i = OUT_H; i < TENSORS; i++) {
            if (i >= D_H && i <= D_NEW) continue;
            if (threads == 1) kept[i] = test_tensor_copy(&c.t[i]);
            else if (!test_tensor_same_bits(&kept[i], &c.t[i]))
                fail_msg("%s has other bits on %d threads", op_case_field("v4-hyper", i), threads);
        }
        quern_context_destroy(ctx);
    }
    for (int i = 0; i < TENSORS; i++)
        if (kept[i].buffer != NULL) test_tensor_free(&kept[i]);
    release(&c);
}

/* Many tokens, and so few that all threads share fn's pieces. */
static void threads_give_the_same_bits(void **state)
{
    test_random random = {test_seed("hyper-connections' threads", 43)};
    (void)state;
    same_bits_of(&random, 700, 70);
    same_bits_of(&random, 1, 1100);
    same_bits_of(&random, 23, 1100);
}

/* A NaN or Inf of one token reaches its own results alone, and the sums over tokens. */
static void nonfinite_tokens_stay_apart(void **state)
{
    test_random random = {test_seed("hyper-connections' NaN", 44)};
    (void)state;
    for (int i = 0; i < 4; i++) {
        hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT, .tokens = 5, .copies = 4, .width = 33};
        c.set = BIT(X) | BIT(FN) | BIT(BASE) | BIT(SCALE) | BIT(NORM) | BIT(F) | BIT(OUT_H) | BIT(POST) |
                BIT(NEW) | BIT(D_H) | BIT(D_NEW) | BIT(D_X) | BIT(D_F);
        make(&c, &random, false);
        const int where[] = {X, F, D_H, D_NEW};
        double *at = &c.value[where[i]][2 * (where[i] == X || where[i] == D_NEW ? 4 : 1) * c.width + 7];
        *at = i % 2 == 0 ? (double)NAN : (double)INFINITY;
        test_tensor_set(&c.t[where[i]], c.value[where[i]]);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            quern_dsv4_hyper_tensors views = QUERN_DSV4_HYPER_TENSORS_INIT;
            op_case_bind("v4-hyper", c.t, TENSORS, c.set, &views);
            op_case_run(ctx, "v4-hyper", QUERN_OP_FORWARD, &c.params, &views, c.t, TENSORS);
            op_case_run(ctx, "v4-hyper", QUERN_OP_BACKWARD, &c.params, &views, c.t, TENSORS);
            bool seen = false;
            for (int r = OUT_H; r < TENSORS; r++) {
                if (!has(&c, r) || (r >= D_H && r <= D_NEW)) continue;
                double *out = test_tensor_get(&c.t[r]);
                const int64_t each = test_tensor_count(&c.t[r]) / c.tokens;
                for (int64_t k = 0; k < c.tokens * each; k++) {
                    seen = seen || !isfinite(out[k]);
                    if (k / each != 2 && !isfinite(out[k]))
                        fail_msg("%s[%lld] is %g", op_case_field("v4-hyper", r), (long long)k, out[k]);
                }
                free(out);
            }
            assert_true(seen);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

static void refused(quern_context *ctx, hyper_case *c, quern_op_pass pass, uint64_t set, const char *words)
{
    static char room[1 << 20];
    quern_dsv4_hyper_tensors views = QUERN_DSV4_HYPER_TENSORS_INIT;
    op_case_bind("v4-hyper", c->t, TENSORS, set, &views);
    if (quern_op_run(ctx, NULL, quern_op_named("v4-hyper"), pass, &c->params, &views, room, sizeof room) !=
        QUERN_ERR_INVALID_ARGUMENT)
        fail_msg("\"%s\" is not refused", words);
    if (strstr(quern_last_error(ctx), words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words);
    for (int i = 0; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], words);
}

static void bad_calls(void **state)
{
    test_random random = {7};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    hyper_case c = {.params = QUERN_DSV4_HYPER_PARAMS_INIT, .tokens = 3, .copies = 4, .width = 8};
    c.set = ~(uint64_t)0;
    make(&c, &random, false);
    const uint64_t all = c.set;
    const quern_op_pass forward = QUERN_OP_FORWARD, backward = QUERN_OP_BACKWARD;
    refused(ctx, &c, forward, all & ~BIT(X), "x is NULL: a tensor is needed");
    refused(ctx, &c, forward, all & ~BIT(FN), "fn is NULL: a tensor is needed");
    refused(ctx, &c, forward, all & ~BIT(F), "x_new is given: it stands beside f");
    refused(ctx, &c, forward, all & ~BIT(PRE_IN), "pre is given: it stands beside pre_in");
    refused(ctx, &c, backward, all & ~BIT(F), "d_new is given: it stands beside f");
    refused(ctx, &c, backward, all & ~(BIT(PRE_IN) | BIT(D_PRE_IN)),
            "d_pre is given: it stands beside pre_in");
    refused(ctx, &c, backward, all & ~(BIT(D_H) | BIT(D_PRE) | BIT(D_POST) | BIT(D_COMB) | BIT(D_NEW)),
            "d_h, d_pre, d_post, d_comb and d_new are NULL: at least one of them is accepted");
    c.params.head = true;
    refused(ctx, &c, forward, all, "fn is given: head with pre_in takes no weights");
    refused(ctx, &c, forward, all & ~BIT(PRE_IN), "f is given: head makes h alone");
    c.params.head = false;
    c.params.iters = 65;
    refused(ctx, &c, forward, all, "iters is 65");
    c.params.iters = 20;
    c.params.eps = -1;
    refused(ctx, &c, forward, all, "eps is -1");
    c.params.eps = 1e-6f;
    c.t[SCALE].view.shape[0] = 1;
    refused(ctx, &c, forward, all, "scale.shape[0] is 1: 3 is accepted");
    c.t[SCALE].view.shape[0] = 3;
    c.t[X].view.shape[1] = 9;
    refused(ctx, &c, forward, all, "x has 9 copies of 8 channels: 1 to 8 copies");
    c.t[X].view.shape[1] = 4;
    release(&c);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_differences),   cmocka_unit_test(calls_against_float64),
        cmocka_unit_test(many_tokens_of_four_copies),  cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(nonfinite_tokens_stay_apart), cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
