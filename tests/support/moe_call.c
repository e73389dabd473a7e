/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_call.c - calls of random layers, and what they must give. */
#include "moe_case.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/nvfp4.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static bool takes(const moe_case *c, int tensor, bool backward)
{
    if (c->routed_by_hand && (tensor == M(experts) || tensor == M(weights))) return true;
    return tensor < M(out) || (backward ? tensor >= M(d_out) : tensor < M(d_out));
}

quern_moe_tensors moe_bind(const moe_case *c, bool backward)
{
    quern_moe_tensors t;
    uint64_t set = 0;
    for (int i = 0; i < MOE_TENSORS; i++) set |= (uint64_t)takes(c, i, backward) << i;
    op_case_bind("moe", c->t, MOE_TENSORS, set, &t);
    return t;
}

static void call(moe_case *c, quern_context *ctx, quern_op_pass pass)
{
    const quern_moe_tensors t = moe_bind(c, pass == QUERN_OP_BACKWARD);
    op_case_run(ctx, "moe", pass, &c->params, &t, c->t, MOE_TENSORS);
}

void moe_call_forward(moe_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_FORWARD);
    free(c->chosen);
    c->chosen = test_tensor_get_i32(&c->t[M(experts)]);
}

void moe_call_backward(moe_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_BACKWARD);
}

/* Rounds a row as a4 does. */
static void quantise(const void *arg, bool activation, int64_t expert, double *row, int64_t n)
{
    const moe_case *c = arg;
    const double *given = c->values[activation ? M(down_input_global) : M(gate_up_input_global)];
    float amax = 0;
    for (int64_t i = 0; i < n; i++) amax = fmaxf(amax, fabsf((float)row[i]));
    const float global = given != NULL ? (float)given[expert] : oracle_nvfp4_global(ORACLE_RNE, amax);
    for (int64_t b = 0; b < n; b += 16) {
        float x[16];
        uint8_t codes[16];
        for (int i = 0; i < 16; i++) x[i] = (float)row[b + i];
        const int scale = oracle_nvfp4_block(ORACLE_RNE, ORACLE_SCALES_RNE, global, x, codes);
        for (int i = 0; i < 16; i++)
            row[b + i] = (double)oracle_nvfp4_value(ORACLE_RNE, global, scale, codes[i]);
    }
}

static oracle_layer oracle_of(const moe_case *c)
{
    double *const *v = c->values;
    return (oracle_layer){.tokens = c->tokens,
                          .dim = c->dim,
                          .experts = c->experts,
                          .top_k = c->params.top_k,
                          .width = c->width,
                          .shared_width = c->shared_width,
                          .score = (oracle_score)c->params.score,
                          .renormalize = c->params.renormalize,
                          .scale = (double)c->params.route_scale,
                          .limit = (double)c->params.limit,
                          .alpha = (double)c->params.alpha,
                          .beta = (double)c->params.beta,
                          .x = v[M(hidden)],
                          .logits = v[M(logits)],
                          .router = v[M(weight)],
                          .chosen = c->chosen,
                          .weights = v[M(weights)],
                          .gate_up = v[M(gate_up)],
                          .down = v[M(down)],
                          .gate_up_bias = v[M(gate_up_bias)],
                          .down_bias = v[M(down_bias)],
                          .shared_gate = v[M(shared_gate)],
                          .shared_up = v[M(shared_up)],
                          .shared_down = v[M(shared_down)],
                          .quantise = c->params.a4 ? quantise : NULL,
                          .arg = c};
}

/* Under a4 an activation at a midpoint may take either code, since its f32 differs from the exact value; one
 * such code moves its row by up to half a step of the format, as much as rounding to bf16 does with all of
 * them. */
static quern_dtype bound_dtype(const moe_case *c)
{
    return c->params.a4 ? QUERN_BF16 : c->dtype;
}

static void check_one(const moe_case *c, int tensor, const double *expected, double bound, const char *what)
{
    char name[120];
    if (c->t[tensor].buffer == NULL) return;
    double *got = test_tensor_get(&c->t[tensor]);
    snprintf(name, sizeof name, "%s, %s", what, op_case_field("moe", tensor));
    test_check(name, got, expected, test_tensor_count(&c->t[tensor]), bound);
    free(got);
}

/* Sums whose terms may cancel: not the sum, but what is added, is the measure of the error. */
static void check_terms(const moe_case *c, int tensor, const double *expected, const double *terms,
                        double bound, const char *what)
{
    double error = 0, size = 0;
    if (c->t[tensor].buffer == NULL) return;
    double *got = test_tensor_get(&c->t[tensor]);
    for (int64_t i = 0; i < test_tensor_count(&c->t[tensor]); i++) {
        error = hypot(error, got[i] - expected[i]);
        size = hypot(size, terms[i]);
    }
    if (!(error <= bound * size + 1e-9))
        fail_msg("%s, %s: error %g of terms %g, bound %g", what, op_case_field("moe", tensor), error, size,
                 bound);
    free(got);
}

void moe_oracle_forward(const moe_case *c, double *out)
{
    const oracle_layer m = oracle_of(c);
    oracle_layer_forward(&m, out);
}

void moe_check_forward(const moe_case *c, const char *what)
{
    double *out = test_doubles(c->tokens * c->dim);
    moe_oracle_forward(c, out);
    check_one(c, M(out), out, test_forward_bound(bound_dtype(c)), what);
    free(out);
}

/* Columns in halves to the order of the tensor. */
static double *as_given(const moe_case *c, const double *halves)
{
    double *out = test_doubles(c->experts * 2 * c->width);
    for (int64_t e = 0; e < c->experts; e++)
        for (int64_t i = 0; i < 2 * c->width; i++) {
            const bool up = i >= c->width;
            const int64_t at =
                c->routed == MOE_FLOATS ? i : oracle_interleaved_at(i % c->width, up, c->params.granularity);
            out[e * 2 * c->width + at] = halves[e * 2 * c->width + i];
        }
    return out;
}

static oracle_layer_gradients gradients_of(const moe_case *c, const double *d_out)
{
    const oracle_layer m = oracle_of(c);
    const int64_t t = c->tokens, e = c->experts, k = c->params.top_k;
    const oracle_layer_gradients g = {test_doubles(t * c->dim),
                                      test_doubles(t * e),
                                      test_doubles(e * c->dim),
                                      test_doubles(t * k),
                                      test_doubles(e * 2 * c->width),
                                      test_doubles(e * c->dim),
                                      test_doubles(t * k),
                                      test_doubles(t * e),
                                      test_doubles(e * c->dim),
                                      test_doubles(e * 2 * c->width * c->dim),
                                      test_doubles(e * c->dim * c->width)};
    oracle_layer_backward(&m, d_out, &g);
    return g;
}

static void free_gradients(const oracle_layer_gradients *g)
{
    free(g->logits), free(g->router), free(g->weights), free(g->gate_up_bias), free(g->down_bias);
    free(g->weights_terms), free(g->logits_terms), free(g->router_terms);
    free(g->x), free(g->gate_up), free(g->down);
}

double *moe_oracle_gradient(const moe_case *c, int of, const double *d_out)
{
    oracle_layer_gradients g = gradients_of(c, d_out);
    double **wanted = of == M(hidden) ? &g.x : of == M(gate_up) ? &g.gate_up : &g.down, *found = *wanted;
    *wanted = NULL;
    free_gradients(&g);
    return found;
}

void moe_check_backward(const moe_case *c, const char *what)
{
    const double bound = test_gradient_bound(bound_dtype(c));
    double *d_out = test_tensor_get(&c->t[M(d_out)]);
    const oracle_layer_gradients g = gradients_of(c, d_out);
    double *up_bias = as_given(c, g.gate_up_bias);
    check_one(c, M(d_hidden), g.x, bound, what);
    check_terms(c, M(d_logits), g.logits, g.logits_terms, bound, what);
    check_terms(c, M(d_weight), g.router, g.router_terms, bound, what);
    check_terms(c, M(d_weights), g.weights, g.weights_terms, bound, what);
    check_one(c, M(d_gate_up_bias), up_bias, bound, what);
    check_one(c, M(d_down_bias), g.down_bias, bound, what);
    check_one(c, M(d_gate_up), g.gate_up, bound, what);
    check_one(c, M(d_down), g.down, bound, what);
    free(up_bias), free(d_out);
    free_gradients(&g);
}
