/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_route_gradient_test.c - the router's gradient where it is a small difference of large numbers, and
 * where scores are 0. */
#include "cmocka_c11.h"
#include "compare.h"
#include "context.h"
#include "oracle/moe.h"
#include "tensor.h"

#include <quern/moe.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { T = 7, E = 5, K_MOST = 3 };

/* A routing of T tokens, contiguous. */
typedef struct routing {
    float logits[T * E], weights[T * K_MOST], d_weights[T * K_MOST], d_logits[T * E];
    int32_t experts[T * K_MOST], offsets[E], permutation[T * K_MOST];
} routing;

static quern_tensor matrix(void *data, quern_dtype dtype, int64_t columns)
{
    const int64_t shape[] = {T, columns};
    return quern_tensor_contiguous(data, dtype, 2, shape);
}

static quern_tensor list(void *data, int64_t count)
{
    return quern_tensor_contiguous(data, QUERN_I32, 1, &count);
}

/* Forward, then backward. */
static void route(routing *r, const quern_moe_route_params *p)
{
    const int64_t k = p->top_k;
    const quern_tensor logits = matrix(r->logits, QUERN_F32, E), d_logits = matrix(r->d_logits, QUERN_F32, E),
                       weights = matrix(r->weights, QUERN_F32, k),
                       d_weights = matrix(r->d_weights, QUERN_F32, k),
                       experts = matrix(r->experts, QUERN_I32, k), offsets = list(r->offsets, E),
                       permutation = list(r->permutation, T * k);
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    size_t bytes = 0;
    t.logits = &logits;
    t.weights = &weights;
    t.experts = &experts;
    t.offsets = &offsets;
    t.permutation = &permutation;
    t.d_weights = &d_weights;
    t.d_logits = &d_logits;
    for (int backward = 0; backward < 2; backward++) {
        quern_status status = backward ? quern_moe_route_backward_workspace(ctx, p, &t, &bytes)
                                       : quern_moe_route_workspace(ctx, p, &t, &bytes);
        if (status != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        test_workspace w = test_workspace_make(bytes);
        status = backward ? quern_moe_route_backward(ctx, NULL, p, &t, w.data, w.bytes)
                          : quern_moe_route(ctx, NULL, p, &t, w.data, w.bytes);
        if (status != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        test_workspace_close(&w);
    }
}

/* The gradient of a token's logits by the formulas, in double. */
static void exact_gradient(const quern_moe_route_params *p, const float *logits, const int32_t *chosen,
                           const float *d_weights, double d[E])
{
    double wide[E], scores[E], by[E] = {0}, sum = 1e-20;
    for (int e = 0; e < E; e++) wide[e] = (double)logits[e];
    oracle_route_scores((oracle_score)p->score, wide, E, scores);
    for (int64_t j = 0; j < p->top_k; j++) sum += scores[chosen[j]];
    const double least = (float)sum + 1e-20f != (float)sum ? 1e-20 : 0; /* what S holds of it */
    for (int64_t j = 0; j < p->top_k; j++) {
        double differences = least * (double)d_weights[j];
        for (int64_t i = 0; i < p->top_k; i++)
            differences += scores[chosen[i]] * ((double)d_weights[j] - (double)d_weights[i]);
        by[chosen[j]] =
            (double)p->route_scale * (p->renormalize ? differences / sum / sum : (double)d_weights[j]);
    }
    for (int e = 0; e < E; e++) {
        d[e] = by[e] / (1 + exp(-wide[e])) / (2 * scores[e]);
        if (p->score == QUERN_MOE_SCORE_SIGMOID) d[e] = by[e] * scores[e] / (1 + exp(wide[e]));
        if (p->score != QUERN_MOE_SCORE_SOFTMAX) continue;
        d[e] = 0;
        for (int f = 0; f < E; f++) d[e] += scores[e] * scores[f] * (by[e] - by[f]);
    }
}

/* Of a score near 1, of one that outweighs the others, of a sum that is one weight: each token alone is
 * within the bound. */
static void gradients_keep_their_digits(void **state)
{
    static const float logits[T][E] = {{12, -3, 0, 1, 2},         {25, 24, 0, 3, 9}, {9, 8.5f, 8, 7, 6},
                                       {-40, -41, -39, -45, -60}, {0, 0, 0, 0, -30}, {30, 1, 2, 3, 4},
                                       {-70, -75, -72, -80, -71}};
    test_random random = {test_seed("gradients_keep_their_digits", 32)};
    (void)state;
    for (int i = 0; i < 3 * 2 * K_MOST; i++) {
        const quern_moe_route_params p = {sizeof p, (quern_moe_score)(i % 3), 1 + i / 6, i / 3 % 2, 1.5f};
        static routing r;
        memcpy(r.logits, logits, sizeof logits);
        for (int k = 0; k < T * K_MOST; k++) r.d_weights[k] = (float)test_random_normal(&random);
        route(&r, &p);
        for (int64_t token = 0; token < T; token++) {
            char what[60];
            double d[E], got[E];
            exact_gradient(&p, r.logits + token * E, r.experts + token * p.top_k,
                           r.d_weights + token * p.top_k, d);
            for (int e = 0; e < E; e++) got[e] = (double)r.d_logits[token * E + e];
            snprintf(what, sizeof what, "score %d, top %d, renormalize %d, token %d", (int)p.score,
                     (int)p.top_k, p.renormalize, (int)token);
            test_check(what, got, d, E, 1e-5);
        }
    }
}

/* sqrt(softplus) of very small logits is 0 in f32: such weights are 0, and so are their gradients. */
static void a_score_of_zero_has_no_gradient(void **state)
{
    static routing r;
    (void)state;
    for (int renormalize = 0; renormalize < 2; renormalize++) {
        const quern_moe_route_params p = {sizeof p, QUERN_MOE_SCORE_SQRT_SOFTPLUS, 2, renormalize, 1};
        for (int i = 0; i < T * E; i++) r.logits[i] = i % 3 == 0 ? -200 : i % 3 == 1 ? -1e30f : -INFINITY;
        for (int i = 0; i < T * 2; i++) r.d_weights[i] = (float)(i + 1);
        r.logits[1] = 1;
        route(&r, &p);
        for (int i = 0; i < T * 2; i++) assert_true((r.weights[i] > 0) == (i == 1));
        for (int i = 0; i < T * E; i++) {
            if (i != 1) assert_true(r.d_logits[i] == 0);
            else assert_true(renormalize ? fabsf(r.d_logits[i]) < 1e-6f : r.d_logits[i] > 0);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_keep_their_digits),
        cmocka_unit_test(a_score_of_zero_has_no_gradient),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
