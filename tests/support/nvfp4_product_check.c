/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_product_check.c - results of grouped products, and gradients, against float64. */
#include "nvfp4_product.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "oracle/linear.h"

#include <math.h>
#include <stdlib.h>

static double half_ulp(quern_dtype dtype, double x)
{
    return dtype == QUERN_F32    ? fabs(x) * 0x1p-24
           : dtype == QUERN_BF16 ? fabs(x) * 0x1p-8
                                 : fabs(x) * 0x1p-11 + 0x1p-25;
}

/* Codes of a block whose exact values are h within err: the scale and each code must be what some value in
 * reach gives. */
static void check_quantised(const product_case *c, float global, const double *h, const double *err,
                            int64_t n, const uint8_t *codes, int scale, const char *what)
{
    double low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        low = fmax(low, fabs(h[i]) - err[i]);
        high = fmax(high, fabs(h[i]) + err[i]);
    }
    const double g = (double)global, down = low / g * (1 - 1e-5), up = high / g * (1 + 1e-5);
    uint8_t unused[16];
    const float least[16] = {(float)(down * g)}, most[16] = {(float)(up * g)};
    const int lowest =
        oracle_nvfp4_block((oracle_profile)c->params.profile, ORACLE_SCALES_RNE, global, least, unused);
    const int highest =
        oracle_nvfp4_block((oracle_profile)c->params.profile, ORACLE_SCALES_RNE, global, most, unused);
    const bool zeros = down <= 0; /* ModelOpt: a block of zeros has scale 1 */
    if (scale > highest && !(zeros && scale == 0x38))
        fail_msg("%s: scale %d, at most %d expected", what, scale, highest);
    if (scale < lowest && !zeros) fail_msg("%s: scale %d, at least %d expected", what, scale, lowest);
    const double s = (double)oracle_e4m3(scale) * g;
    for (int64_t i = 0; i < 16; i++) {
        const double x = i < n ? h[i] : 0, e = i < n ? err[i] : 0;
        if (s == 0) {
            assert_int_equal(codes[i], 0);
            continue;
        }
        const int at_least = oracle_e2m1_nearest((float)(fmax(0, fabs(x) - e) / s * (1 - 1e-5))),
                  at_most = oracle_e2m1_nearest((float)((fabs(x) + e) / s * (1 + 1e-5)));
        const bool sign_known = fabs(x) > e && x != 0;
        if (codes[i] % 8 < at_least || codes[i] % 8 > at_most || (sign_known && (codes[i] >= 8) != (x < 0)))
            fail_msg("%s: %g within %g became code %d under scale %d", what, x, e, codes[i], scale);
    }
}

static void check_row(const product_case *c, const product_result *r, const oracle_product *p, int64_t t,
                      const char *what)
{
    const bool integers = c->kind == PRODUCT_A_NVFP4 || c->kind == PRODUCT_A_INT8,
               fp8 = c->kind == PRODUCT_A_FP8, swiglu = c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
    const double widest = (4 + (double)c->k / 16) * 0x1p-23,
                 factor = fp8        ? 0x1p-6 + (double)((c->k + 127) / 128) * 0x1p-23
                          : integers ? widest
                                     : ((double)c->k + 8) * 0x1p-24;
    const int64_t out = product_out_columns(c), blocks = (out + 15) / 16;
    double *h = test_doubles(16 * blocks), *err = test_doubles(16 * blocks);
    for (int64_t i = 0; i < out; i++) {
        const int64_t g = swiglu ? oracle_interleaved_at(i, false, c->params.granularity) : i,
                      u = oracle_interleaved_at(i, true, c->params.granularity);
        h[i] = p->c[t * c->n + g];
        err[i] = factor * p->size[t * c->n + g];
        if (!swiglu) continue;
        const double up = p->c[t * c->n + u], gate_error = err[i], up_error = factor * p->size[t * c->n + u],
                     gate = h[i];
        const double silu = oracle_swiglu(gate, 1, c->params.limit > 0 ? (double)c->params.limit : 0,
                                          (double)c->params.alpha, 0);
        h[i] =
            oracle_swiglu(gate, up, (double)c->params.limit, (double)c->params.alpha, (double)c->params.beta);
        err[i] = 1.2 * gate_error * (fabs(up) + up_error + fabs((double)c->params.beta)) +
                 (fabs(silu) + 1.2 * gate_error) * up_error + (4 + fabs(gate)) * 0x1p-22 * fabs(h[i]) + 1e-30;
    }
    for (int64_t i = 0; i < out && !c->quantised; i++) {
        /* The operands are random, so the error stays below a third of the wider bound. */
        const double third = swiglu || fp8 ? INFINITY : widest / 3 * p->size[t * c->n + i];
        const double got = r->c[t * out + i], reach = fmin(err[i], third),
                     bound = reach + half_ulp(c->c_dtype, fabs(h[i]) + reach);
        if (c->c_dtype == QUERN_F16 && fabs(h[i]) > 60000) continue; /* may be infinite */
        if (!(fabs(got - h[i]) <= bound))
            fail_msg("%s: row %lld column %lld is %.9g, expected %.9g within %.3g", what, (long long)t,
                     (long long)i, got, h[i], bound);
    }
    for (int64_t b = 0; b < blocks && c->quantised; b++)
        check_quantised(c, c->c_global[c->c_global_by_expert ? product_expert_of(c, t) : 0], h + 16 * b,
                        err + 16 * b, out - 16 * b < 16 ? out - 16 * b : 16, r->codes + (t * blocks + b) * 16,
                        r->scales[t * blocks + b], what);
    free(h), free(err);
}

/* Rows without an expert: zeros, or what was there. */
static void check_unused_row(const product_case *c, const product_result *r, int64_t t)
{
    const int64_t out = product_out_columns(c), blocks = (out + 15) / 16;
    for (int64_t i = 0; i < out && !c->quantised; i++)
        assert_true(r->c[t * out + i] == (c->old != NULL ? c->old[t * out + i] : 0));
    for (int64_t i = 0; i < 16 * blocks && c->quantised; i++)
        assert_int_equal(r->codes[t * 16 * blocks + i], 0);
    for (int64_t i = 0; i < blocks && c->quantised; i++) assert_int_equal(r->scales[t * blocks + i], 0);
}

/* Weights [E, K, N] without their globals, as stored, or as the product of e4m3 operands takes them. */
static double *weights_of(const product_case *c, bool stored)
{
    double *b = test_doubles(c->experts * c->k * c->n), *column = test_doubles(c->k);
    for (int64_t i = 0; i < c->experts * c->n; i++) {
        const int64_t e = i / c->n, n = i % c->n;
        double largest = 0;
        for (int64_t k = 0; k < c->k; k++) {
            const double scale = (double)oracle_e4m3(c->b_scales[(e * (c->k / 16) + k / 16) * c->n + n]);
            column[k] = (double)oracle_e2m1(c->b_codes[(e * c->k + k) * c->n + n]) * scale;
            largest = fmax(largest, scale);
        }
        if (c->kind == PRODUCT_A_FP8 && !stored) oracle_linear_round_weights(column, c->k, largest);
        for (int64_t k = 0; k < c->k; k++) b[(e * c->k + k) * c->n + n] = column[k];
    }
    free(column);
    return b;
}

/* What the oracle takes of a case, and room for its result. */
static oracle_product exact_of(const product_case *c)
{
    double *b = weights_of(c, false), *a_global = test_doubles(c->tokens),
           *b_global = test_doubles(c->experts * c->n);
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t e = product_expert_of(c, t), index[] = {0, e < c->experts ? e : 0, t};
        const float given = c->a_global != NULL ? (float)c->a_global[index[c->params.a_global_per]] : 1;
        a_global[t] = (double)((float)c->a_row_scale[t] * given);
    }
    for (int64_t i = 0; i < c->experts * c->n; i++) {
        const int64_t e = i / c->n, part = i % c->n / c->params.granularity % 2;
        b_global[i] = c->b_global == NULL ? 1
                                          : c->b_global[c->b_parts == 0   ? 0
                                                        : c->b_parts == 1 ? e
                                                                          : 2 * e + part];
    }
    return (oracle_product){.tokens = c->tokens,
                            .n = c->n,
                            .k = c->k,
                            .experts = c->experts,
                            .ends = c->ends,
                            .a = c->a_values,
                            .b = b,
                            .a_global = a_global,
                            .b_global = b_global,
                            .bias = c->bias,
                            .old = c->old,
                            .c = test_doubles(c->tokens * c->n),
                            .size = test_doubles(c->tokens * c->n)};
}

static void free_exact(oracle_product *p)
{
    free((void *)(uintptr_t)p->b), free((void *)(uintptr_t)p->a_global), free((void *)(uintptr_t)p->b_global);
    free(p->c), free(p->size);
}

/* FP8 products of normal numbers: relative L2 5e-4, and the rounding to the output's type, against the
 * roots of the sums' squares where these are larger. */
static void check_length(const product_case *c, const product_result *r, const oracle_product *p,
                         const char *what)
{
    double error = 0, length = 0, rounding = 0;
    for (int64_t i = 0; i < (int64_t)c->ends[c->experts - 1] * c->n; i++) {
        if (c->c_dtype == QUERN_F16 && fabs(p->c[i]) > 60000) continue;
        error = hypot(error, r->c[i] - p->c[i]);
        length = hypot(length, fmax(fabs(p->c[i]), p->root[i]));
        rounding = hypot(rounding, half_ulp(c->c_dtype, p->c[i]));
    }
    if (!(error <= 5e-4 * length + rounding)) fail_msg("%s: error %g of %g", what, error, length);
}

void product_check(const product_case *c, const product_result *r, const char *what)
{
    const bool length = c->kind == PRODUCT_A_FP8 && !c->wide && !c->quantised &&
                        c->params.activation == QUERN_NVFP4_ACTIVATION_NONE;
    oracle_product p = exact_of(c);
    p.root = length ? test_doubles(c->tokens * c->n) : NULL;
    oracle_grouped_product(&p);
    if (length) check_length(c, r, &p, what);
    free(p.root);
    p.root = NULL;
    for (int64_t t = 0; t < c->tokens; t++) {
        if (product_expert_of(c, t) < c->experts) check_row(c, r, &p, t, what);
        else check_unused_row(c, r, t);
    }
    free_exact(&p);
}

/* d by the columns of the product, of a row. */
static void product_gradient(const product_case *c, const oracle_product *p, int64_t t, const double *d_c,
                             double *d)
{
    const int64_t out = product_out_columns(c);
    for (int64_t i = 0; i < out; i++) {
        const bool swiglu = c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU;
        if (!swiglu) d[i] = d_c[t * out + i];
        if (!swiglu) continue;
        const int64_t g = oracle_interleaved_at(i, false, c->params.granularity),
                      u = oracle_interleaved_at(i, true, c->params.granularity);
        double of[2];
        oracle_swiglu_gradient(p->c[t * c->n + g], p->c[t * c->n + u], (double)c->params.limit,
                               (double)c->params.alpha, (double)c->params.beta, of);
        d[g] = d_c[t * out + i] * of[0];
        d[u] = d_c[t * out + i] * of[1];
    }
}

void product_check_backward(const product_case *c, const test_tensor *d_c, const double *d_a,
                            quern_dtype dtype, const char *what)
{
    oracle_product p = exact_of(c);
    double *expected = test_doubles(c->tokens * c->k), *d = test_doubles(c->n), *given = test_tensor_get(d_c),
           *b = weights_of(c, true);
    p.old = NULL;
    oracle_grouped_product(&p);
    for (int64_t t = 0; t < c->tokens; t++) {
        const int64_t e = product_expert_of(c, t), index[] = {0, e, t};
        if (e == c->experts) continue;
        const bool floats = c->kind != PRODUCT_A_NVFP4;
        const double global = floats && c->a_global != NULL ? c->a_global[index[c->params.a_global_per]] : 1;
        product_gradient(c, &p, t, given, d);
        for (int64_t k = 0; k < c->k; k++)
            for (int64_t n = 0; n < c->n; n++)
                expected[t * c->k + k] +=
                    d[n] * global * p.b_global[e * c->n + n] * b[(e * c->k + k) * c->n + n];
    }
    const double wide = test_gradient_bound(d_c->view.dtype), own = test_gradient_bound(dtype);
    double largest = 0;
    for (int64_t i = 0; i < c->tokens * c->k; i++) largest = fmax(largest, fabs(expected[i]));
    const bool within =
        dtype != QUERN_F16 || largest == 0 || (largest > 0x1p-8 && largest < 60000); /* its range */
    if (within) test_check(what, d_a, expected, c->tokens * c->k, wide > own ? wide : own);
    free(expected), free(d), free(given), free(b);
    free_exact(&p);
}
