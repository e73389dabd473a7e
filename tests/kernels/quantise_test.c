/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantise_test.c - the quantisers' tile kernels at every level, bit for bit against the oracle. */
#include "cmocka_c11.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "nvfp4_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct kernel_test {
    void (*run)(const cpu_kernels *kernels, test_random *random);
} kernel_test;

static const quern_dtype activations[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
static const int64_t lengths[] = {0,   1,   3,   15,  16,  17,  31,  48,  64,
                                  100, 127, 128, 250, 256, 272, 301, 512, 1000};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static test_tensor tensor_of(test_random *random, quern_dtype dtype, int64_t rows, int64_t n,
                             test_layout layout)
{
    const int64_t shape[] = {rows, n};
    return test_tensor_make(random, dtype, 2, shape, layout);
}

/* A global that the data asks for, or a stale one: much too small or much too large. */
static float global_for(test_random *random, oracle_profile profile, float amax)
{
    static const float stale[] = {1e-30f, 1e30f, 0x1p-140f, 1, 3e38f};
    return test_random_one_in(random, 3) ? stale[test_random_int(random, 0, 4)]
                                         : oracle_nvfp4_global(profile, amax);
}

static quantise_rule rule_of(int index, float global)
{
    return (quantise_rule){(quantise_profile)nvfp4_case_profile(index),
                           (quantise_scales)nvfp4_case_scales(index), global};
}

static int nibble(const uint8_t *codes, int64_t i)
{
    return codes[i / 2] >> 4 * (i % 2) & 15;
}

static void expect_block(const cpu_kernels *kernels, const quantise_rule *rule, const float x[16],
                         const int got[16], int scale, int64_t n)
{
    uint8_t codes[16];
    const int expected = oracle_nvfp4_block((oracle_profile)rule->profile, (oracle_scales)rule->scales,
                                            rule->global, x, codes);
    if (scale != expected)
        fail_msg("%s profile %d scales %d global %a n %lld: scale %d, expected %d",
                 quern_cpu_level_name(kernels->formats->level), (int)rule->profile, (int)rule->scales,
                 (double)rule->global, (long long)n, scale, expected);
    for (int i = 0; i < 16; i++)
        if (got[i] != codes[i])
            fail_msg("%s profile %d scales %d global %a n %lld: %a became %d, expected %d under scale %d",
                     quern_cpu_level_name(kernels->formats->level), (int)rule->profile, (int)rule->scales,
                     (double)rule->global, (long long)n, (double)x[i], got[i], codes[i], scale);
}

static void quantise_row(const cpu_kernels *kernels, test_random *random)
{
    for (int i = 0; i < NVFP4_CASES * 3 * LENGTHS; i++) {
        const int index = i / (3 * LENGTHS);
        const int64_t n = lengths[i / 3 % LENGTHS], blocks = (n + 15) / 16;
        if (!nvfp4_case_accepted(index)) continue;
        test_tensor t = tensor_of(random, activations[i % 3], 1, n, TEST_UNALIGNED);
        test_tensor codes = tensor_of(random, QUERN_U8, 1, 8 * blocks, TEST_UNALIGNED),
                    scales = tensor_of(random, QUERN_U8, 1, blocks, TEST_UNALIGNED);
        nvfp4_case_fill(&t, random, test_random_one_in(random, 2));
        double *x = test_tensor_get(&t);
        const quantise_rule rule =
            rule_of(index, global_for(random, nvfp4_case_profile(index), nvfp4_case_amax(x, n)));
        kernels->formats->quantise_row(&rule, t.view.data, t.view.dtype, n, codes.view.data,
                                       scales.view.data);
        assert_true(test_kernel_bound("format", "quantise_row", kernels->formats->level, 0, 0) == 0);
        test_tensor_check_guards(&codes, "codes"), test_tensor_check_guards(&scales, "scales");
        test_tensor_check_unchanged(&t, "x");
        for (int64_t b = 0; b < blocks; b++) {
            float block[16] = {0};
            int got[16];
            for (int64_t c = 0; c < 16; c++) {
                if (16 * b + c < n) block[c] = (float)x[16 * b + c];
                got[c] = nibble((const uint8_t *)codes.view.data + 8 * b, c);
            }
            expect_block(kernels, &rule, block, got, ((const uint8_t *)scales.view.data)[b], n);
        }
        if (rule.scales == QUANTISE_SCALES_RNE)
            TEST_TIME("format", "quantise_row", kernels->formats->level,
                      n * (int64_t)quern_dtype_size(t.view.dtype) + 9 * blocks,
                      kernels->formats->quantise_row(&rule, t.view.data, t.view.dtype, n, codes.view.data,
                                                     scales.view.data));
        free(x);
        test_tensor_free(&t), test_tensor_free(&codes), test_tensor_free(&scales);
    }
}

/* bf16 values within a few units of a midpoint between two codes, or on it, for scales of every mantissa: the
 * two roundings of a profile decide. */
static void midpoints(const cpu_kernels *kernels, test_random *random)
{
    static const double middles[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5};
    const int64_t n = 272, blocks = n / 16;
    for (int i = 0; i < 8000; i++) {
        const int index = (int)test_random_int(random, 0, NVFP4_CASES - 1);
        if (!nvfp4_case_accepted(index) || nvfp4_case_scales(index) != ORACLE_SCALES_RNE) continue;
        test_tensor t = tensor_of(random, QUERN_BF16, 1, n, TEST_UNALIGNED),
                    codes = tensor_of(random, QUERN_U8, 1, n / 2, TEST_UNALIGNED),
                    scales = tensor_of(random, QUERN_U8, 1, blocks, TEST_UNALIGNED);
        double values[272];
        const double number = test_round(QUERN_BF16, ldexp(1 + test_random_uniform(random), -3)),
                     scale = (double)oracle_e4m3((int)test_random_int(random, 40, 70));
        float global = (float)(number / middles[test_random_int(random, 0, 6)] / scale);
        for (int64_t step = test_random_int(random, 0, 3); step > 0; step--) global = nextafterf(global, 1);
        for (int64_t step = test_random_int(random, 0, 3); step > 0; step--) global = nextafterf(global, 0);
        for (int64_t b = 0; b < n; b++)
            values[b] = b % 16 == 3 ? 6 * scale * (double)global
                                    : ldexp(number, (int)test_random_int(random, -3, 3)) *
                                          (test_random_one_in(random, 2) ? -1 : 1);
        test_tensor_set(&t, values);
        double *x = test_tensor_get(&t);
        const quantise_rule rule =
            rule_of(index, nvfp4_case_profile(index) == ORACLE_COMPRESSED ? 1 / global : global);
        kernels->formats->quantise_row(&rule, t.view.data, QUERN_BF16, n, codes.view.data, scales.view.data);
        for (int64_t b = 0; b < blocks; b++) {
            float block[16];
            int got[16];
            for (int64_t c = 0; c < 16; c++) {
                block[c] = (float)x[16 * b + c];
                got[c] = nibble((const uint8_t *)codes.view.data + 8 * b, c);
            }
            expect_block(kernels, &rule, block, got, ((const uint8_t *)scales.view.data)[b], n);
        }
        free(x);
        test_tensor_free(&t), test_tensor_free(&codes), test_tensor_free(&scales);
    }
}

static void quantise_columns(const cpu_kernels *kernels, test_random *random)
{
    for (int i = 0; i < NVFP4_CASES * 3 * LENGTHS; i++) {
        const int index = i / (3 * LENGTHS);
        const int64_t n = lengths[i / 3 % LENGTHS];
        if (!nvfp4_case_accepted(index)) continue;
        test_tensor t = tensor_of(random, activations[i % 3], 16, n, TEST_STRIDED);
        test_tensor codes = tensor_of(random, QUERN_U8, 8, n, TEST_STRIDED),
                    scales = tensor_of(random, QUERN_U8, 1, n, TEST_UNALIGNED);
        nvfp4_case_fill(&t, random, test_random_one_in(random, 2));
        double *x = test_tensor_get(&t);
        const quantise_rule rule =
            rule_of(index, global_for(random, nvfp4_case_profile(index), nvfp4_case_amax(x, 16 * n)));
        kernels->formats->quantise_columns(&rule, t.view.data, t.view.dtype, t.view.strides[0], n,
                                           codes.view.data, codes.view.strides[0], scales.view.data);
        assert_true(test_kernel_bound("format", "quantise_columns", kernels->formats->level, 0, 0) == 0);
        test_tensor_check_guards(&codes, "codes"), test_tensor_check_guards(&scales, "scales");
        for (int64_t c = 0; c < n; c++) {
            float block[16];
            int got[16];
            for (int r = 0; r < 16; r++) {
                block[r] = (float)x[r * n + c];
                got[r] =
                    ((const uint8_t *)codes.view.data)[r / 2 * codes.view.strides[0] + c] >> 4 * (r % 2) & 15;
            }
            expect_block(kernels, &rule, block, got, ((const uint8_t *)scales.view.data)[c], n);
        }
        if (rule.scales == QUANTISE_SCALES_RNE)
            TEST_TIME("format", "quantise_columns", kernels->formats->level,
                      n * (16 * (int64_t)quern_dtype_size(t.view.dtype) + 9),
                      kernels->formats->quantise_columns(&rule, t.view.data, t.view.dtype, t.view.strides[0],
                                                         n, codes.view.data, codes.view.strides[0],
                                                         scales.view.data));
        free(x);
        test_tensor_free(&t), test_tensor_free(&codes), test_tensor_free(&scales);
    }
}

static void fill_bytes(test_tensor *t, test_random *random, int most)
{
    const int64_t rows = t->view.shape[0], n = t->view.shape[1];
    for (int64_t i = 0; i < rows * n; i++)
        ((uint8_t *)t->view.data)[i / n * t->view.strides[0] + i % n] =
            (uint8_t)test_random_int(random, 0, most);
}

static void expect_meaning(const cpu_kernels *kernels, const quantise_rule *rule, quern_dtype dtype,
                           int scale, int code, double got)
{
    const double expected = test_round(
        dtype, (double)oracle_nvfp4_value((oracle_profile)rule->profile, rule->global, scale, code));
    if (got != expected || signbit(got) != signbit(expected))
        fail_msg("%s profile %d: code %d, scale %d, global %a as %s is %a, expected %a",
                 quern_cpu_level_name(kernels->formats->level), (int)rule->profile, code, scale,
                 (double)rule->global, quern_dtype_name(dtype), got, expected);
}

static void dequantise_row(const cpu_kernels *kernels, test_random *random)
{
    static const float globals[] = {1, 0.1f, 3e34f, 1e-36f, 0x1p-149f};
    for (int i = 0; i < 2 * 3 * LENGTHS; i++) {
        const int64_t n = lengths[i / 6], blocks = (n + 15) / 16;
        const bool reciprocal = i / 3 % 2;
        const quantise_rule rule = {reciprocal ? QUANTISE_PROFILE_COMPRESSED_TENSORS : QUANTISE_PROFILE_RNE,
                                    QUANTISE_SCALES_RNE,
                                    globals[test_random_int(random, 0, reciprocal ? 2 : 4)]};
        test_tensor codes = tensor_of(random, QUERN_U8, 1, 8 * blocks, TEST_UNALIGNED),
                    scales = tensor_of(random, QUERN_U8, 1, blocks, TEST_UNALIGNED);
        test_tensor out = tensor_of(random, activations[i % 3], 1, n, TEST_UNALIGNED);
        fill_bytes(&codes, random, 255), fill_bytes(&scales, random, 126);
        kernels->formats->dequantise_row(&rule, codes.view.data, scales.view.data, n, out.view.data,
                                         out.view.dtype);
        assert_true(test_kernel_bound("format", "dequantise_row", kernels->formats->level, 0, 0) == 0);
        test_tensor_check_guards(&out, "out");
        double *got = test_tensor_get(&out);
        for (int64_t c = 0; c < n; c++)
            expect_meaning(kernels, &rule, out.view.dtype, ((const uint8_t *)scales.view.data)[c / 16],
                           nibble(codes.view.data, c), got[c]);
        TEST_TIME("format", "dequantise_row", kernels->formats->level,
                  n * (int64_t)quern_dtype_size(out.view.dtype) + 9 * blocks,
                  kernels->formats->dequantise_row(&rule, codes.view.data, scales.view.data, n, out.view.data,
                                                   out.view.dtype));
        free(got);
        test_tensor_free(&codes), test_tensor_free(&scales), test_tensor_free(&out);
    }
}

static void dequantise_columns(const cpu_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 2 * 3 * LENGTHS; i++) {
        const int64_t n = lengths[i / 6];
        const quantise_rule rule = {i / 3 % 2 ? QUANTISE_PROFILE_COMPRESSED_TENSORS
                                              : QUANTISE_PROFILE_MODELOPT,
                                    QUANTISE_SCALES_RNE, 0.3f};
        test_tensor codes = tensor_of(random, QUERN_U8, 8, n, TEST_STRIDED),
                    scales = tensor_of(random, QUERN_U8, 1, n, TEST_UNALIGNED);
        test_tensor out = tensor_of(random, activations[i % 3], 16, n, TEST_STRIDED);
        fill_bytes(&codes, random, 255), fill_bytes(&scales, random, 126);
        kernels->formats->dequantise_columns(&rule, codes.view.data, codes.view.strides[0], scales.view.data,
                                             n, out.view.data, out.view.dtype, out.view.strides[0]);
        assert_true(test_kernel_bound("format", "dequantise_columns", kernels->formats->level, 0, 0) == 0);
        test_tensor_check_guards(&out, "out");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < 16 * n; j++) {
            const int byte = ((const uint8_t *)codes.view.data)[j / n / 2 * codes.view.strides[0] + j % n];
            expect_meaning(kernels, &rule, out.view.dtype, ((const uint8_t *)scales.view.data)[j % n],
                           byte >> 4 * (j / n % 2) & 15, got[j]);
        }
        TEST_TIME("format", "dequantise_columns", kernels->formats->level,
                  n * (16 * (int64_t)quern_dtype_size(out.view.dtype) + 9),
                  kernels->formats->dequantise_columns(&rule, codes.view.data, codes.view.strides[0],
                                                       scales.view.data, n, out.view.data, out.view.dtype,
                                                       out.view.strides[0]));
        free(got);
        test_tensor_free(&codes), test_tensor_free(&scales), test_tensor_free(&out);
    }
}

static void part_row(const cpu_kernels *kernels, test_random *random)
{
    static const int64_t runs[] = {1, 3, 8, 16, 64};
    for (int i = 0; i < 5 * 3 * 2 * 6; i++) {
        const int64_t q = runs[i % 5], width = q * test_random_int(random, 1, 1 + 200 / q),
                      first = test_random_int(random, 0, width);
        const int64_t n = test_random_int(random, 0, width - first);
        test_tensor t = tensor_of(random, activations[i / 5 % 3], 1, 2 * width, TEST_UNALIGNED),
                    out = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED);
        test_tensor_normal(&t, random, 1);
        kernels->swiglu->part_row(t.view.data, t.view.dtype, first, i / 15 % 2, q, n, out.view.data);
        assert_true(test_kernel_bound("swiglu", "part_row", kernels->swiglu->level, 0, 0) == 0);
        test_tensor_check_guards(&out, "part");
        double *x = test_tensor_get(&t), *got = test_tensor_get(&out);
        for (int64_t c = 0; c < n; c++)
            assert_true(got[c] == x[oracle_interleaved_at(first + c, i / 15 % 2, q)]);
        TEST_TIME(
            "swiglu", "part_row", kernels->swiglu->level, n * (4 + (int64_t)quern_dtype_size(t.view.dtype)),
            kernels->swiglu->part_row(t.view.data, t.view.dtype, first, i / 15 % 2, q, n, out.view.data));
        free(x), free(got);
        test_tensor_free(&t), test_tensor_free(&out);
    }
}

static double clamp(double x, double low, double high)
{
    return x < low ? low : x > high ? high : x;
}

/* A gate whose sigmoid leaves the range of f32, with an up value that may make up for it. */
static void spread(test_random *random, double *gate, double *up)
{
    static const double gates[] = {-86.5, -87.5, -88.5, -91, -100, -140, -1e6, -0x1.fep127, 0x1p100};
    *gate = gates[test_random_int(random, 0, 8)];
    *up = copysign(
        ldexp(1 + test_random_uniform(random), (int)test_random_int(random, -20, *gate < 0 ? 120 : -6)), *up);
}

static void swiglu_row(const cpu_kernels *kernels, test_random *random)
{
    static const swiglu_rule rules[] = {
        {1, 0, 1, 0}, {1, 10, 1, 0}, {1, 0.75f, 1, 0}, {1, 7, 1.702f, 1}, {1, 0, 1.702f, 1}};
    for (int i = 0; i < 5 * LENGTHS; i++) {
        const swiglu_rule rule = rules[i % 5];
        const int64_t n = lengths[i / 5];
        test_tensor gate = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED),
                    up = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED);
        test_tensor out = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED);
        test_tensor_normal(&gate, random, 6), test_tensor_normal(&up, random, 6);
        double *g = test_tensor_get(&gate), *u = test_tensor_get(&up);
        if (n > 2) {
            g[0] = -300;
            g[1] = NAN;
            u[2] = NAN;
        }
        for (int64_t c = 3; c < n && c < 12; c++) spread(random, &g[c], &u[c]);
        test_tensor_set(&gate, g);
        test_tensor_set(&up, u);
        free(g), free(u);
        g = test_tensor_get(&gate);
        u = test_tensor_get(&up);
        kernels->swiglu->swiglu_row(&rule, gate.view.data, up.view.data, n, out.view.data);
        test_tensor_check_guards(&out, "swiglu");
        double *got = test_tensor_get(&out);
        for (int64_t c = 0; c < n; c++) {
            const double limit = rule.limit > 0 ? (double)rule.limit : INFINITY, alpha = (double)rule.alpha;
            const double x = g[c] > limit ? limit : g[c],
                         y = isnan(u[c]) ? u[c] : clamp(u[c], -limit, limit) + (double)rule.beta;
            const double expected = x / (1 + exp(-alpha * x)) * y;
            const double bound =
                test_kernel_bound("swiglu", "swiglu_row", kernels->swiglu->level, 0, alpha * x) *
                    fabs(expected) +
                fabs(x * y) * 0x1p-250 + 0x1p-148;
            if (isnan(expected) ? !isnan(got[c]) : !(fabs(got[c] - expected) <= bound))
                fail_msg("%s swiglu(%g, %g) is %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->formats->level), g[c], u[c], got[c], expected);
        }
        TEST_TIME("swiglu", "swiglu_row", kernels->swiglu->level, 12 * n,
                  kernels->swiglu->swiglu_row(&rule, gate.view.data, up.view.data, n, out.view.data));
        free(g), free(u), free(got);
        test_tensor_free(&gate), test_tensor_free(&up), test_tensor_free(&out);
    }
}

/* Each value within a few roundings of the formula's terms; at the limit the gradient passes, beyond it the
 * gradient is 0. */
static void swiglu_backward_row(const cpu_kernels *kernels, test_random *random)
{
    static const swiglu_rule rules[] = {
        {1, 0, 1, 0}, {1, 10, 1, 0}, {1, 0.75f, 1, 0}, {1, 7, 1.702f, 1}, {1, 0, 1.702f, 1}};
    for (int i = 0; i < 5 * LENGTHS; i++) {
        const swiglu_rule rule = rules[i % 5];
        const int64_t n = lengths[i / 5];
        test_tensor gate = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED),
                    up = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED),
                    d = tensor_of(random, QUERN_F32, 1, n, TEST_UNALIGNED);
        test_tensor_normal(&gate, random, 6), test_tensor_normal(&up, random, 6),
            test_tensor_normal(&d, random, 1);
        double *g = test_tensor_get(&gate), *u = test_tensor_get(&up), *by = test_tensor_get(&d);
        const double limit = rule.limit > 0 ? (double)rule.limit : INFINITY, alpha = (double)rule.alpha,
                     beta = (double)rule.beta;
        if (n > 4) {
            g[0] = fmin(limit, 50);
            u[1] = fmin(limit, 50);
            u[2] = -fmin(limit, 50);
            g[3] = -300;
            g[4] = NAN;
        }
        for (int64_t c = 5; c < n && c < 12; c++) spread(random, &g[c], &u[c]);
        if (n > 12) {
            g[12] = 0x1.fep127;
            by[12] = 0.125;
        }
        test_tensor_set(&d, by);
        test_tensor_set(&gate, g), test_tensor_set(&up, u);
        free(g), free(u);
        g = test_tensor_get(&gate);
        u = test_tensor_get(&up);
        kernels->swiglu->swiglu_backward_row(&rule, d.view.data, n, gate.view.data, up.view.data);
        test_tensor_check_guards(&gate, "gate"), test_tensor_check_guards(&up, "up");
        double *d_gate = test_tensor_get(&gate), *d_up = test_tensor_get(&up);
        for (int64_t c = 0; c < n; c++) {
            const double x = g[c] > limit ? limit : g[c], y = clamp(u[c], -limit, limit) + beta,
                         s = 1 / (1 + exp(-alpha * x));
            const double slope = s * (1 + alpha * x * (1 - s)), terms = s * (1 + fabs(alpha * x) * (1 - s));
            const double gate_bound = test_kernel_bound("swiglu", "swiglu_backward_row",
                                                        kernels->swiglu->level, 0, alpha * x) *
                                          fabs(by[c] * y) * terms +
                                      fabs(by[c] * y * alpha * x) * 0x1p-250 + 0x1p-140,
                         up_bound = test_kernel_bound("swiglu", "swiglu_backward_row", kernels->swiglu->level,
                                                      0, alpha * x) *
                                        fabs(by[c] * x * s) +
                                    fabs(by[c] * x) * 0x1p-250 + 0x1p-140;
            const double expected = g[c] > limit ? 0 : by[c] * y * slope,
                         expected_up = fabs(u[c]) > limit ? 0 : by[c] * x * s;
            if (isnan(expected) ? !isnan(d_gate[c])
                                : d_gate[c] != expected && !(fabs(d_gate[c] - expected) <= gate_bound))
                fail_msg("%s d gate(%g, %g) is %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->formats->level), g[c], u[c], d_gate[c], expected);
            if (isnan(expected_up) ? !isnan(d_up[c])
                                   : d_up[c] != expected_up && !(fabs(d_up[c] - expected_up) <= up_bound))
                fail_msg("%s d up(%g, %g) is %.9g, expected %.9g",
                         quern_cpu_level_name(kernels->formats->level), g[c], u[c], d_up[c], expected_up);
        }
        TEST_TIME("swiglu", "swiglu_backward_row", kernels->swiglu->level, 20 * n,
                  kernels->swiglu->swiglu_backward_row(&rule, d.view.data, n, gate.view.data, up.view.data));
        free(g), free(u), free(by), free(d_gate), free(d_up);
        test_tensor_free(&gate), test_tensor_free(&up), test_tensor_free(&d);
    }
}

/* The codes and the scale of some h within the bound. */
static void expect_swiglu(const cpu_kernels *kernels, const quantise_rule *to, const double h[16],
                          const uint8_t *codes, int scale)
{
    const float global = to->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS ? 1 / to->global : to->global;
    const double bound = test_kernel_bound("swiglu", "swiglu_quantise", kernels->swiglu->level, 0, 0);
    uint8_t exact[16];
    float low[16], high[16];
    for (int i = 0; i < 16; i++) {
        low[i] = (float)(h[i] * (1 - bound));
        high[i] = (float)(h[i] * (1 + bound));
    }
    const oracle_profile profile = (oracle_profile)to->profile;
    const int least = oracle_nvfp4_block(profile, ORACLE_SCALES_RNE, to->global, low, exact),
              most = oracle_nvfp4_block(profile, ORACLE_SCALES_RNE, to->global, high, exact);
    if (scale != least && scale != most)
        fail_msg("%s profile %d: scale %d, expected %d or %d", quern_cpu_level_name(kernels->formats->level),
                 (int)profile, scale, least, most);
    for (int i = 0; i < 16; i++) {
        const int code = nibble(codes, i);
        const double y = scale > 0 ? h[i] / ((double)oracle_e4m3(scale) * (double)global) : 0;
        const int near = oracle_e2m1_nearest((float)fmin(fabs(y) * (1 - bound), 6)),
                  far = oracle_e2m1_nearest((float)fmin(fabs(y) * (1 + bound), 6));
        /* What underflows in f32 may lose its sign. */
        const bool tiny = fmin(fabs(h[i]), fabs(h[i] / (double)global)) < 0x1p-126;
        if (code % 8 < near || code % 8 > far || (code / 8 != (y < 0) && !tiny))
            fail_msg("%s profile %d: h %.9g became %d under scale %d and global %a",
                     quern_cpu_level_name(kernels->formats->level), (int)profile, h[i], code, scale,
                     (double)global);
    }
}

static double swiglu_value(const swiglu_rule *rule, double g, double u)
{
    const double limit = rule->limit > 0 ? (double)rule->limit : INFINITY, x = fmin(g, limit);
    return x / (1 + exp(-(double)rule->alpha * x)) * (clamp(u, -limit, limit) + (double)rule->beta);
}

static void swiglu_quantise(const cpu_kernels *kernels, test_random *random)
{
    static const swiglu_rule rules[] = {{1, 0, 1, 0}, {1, 3, 1, 0}, {1, 7, 1.702f, 1}};
    static const int64_t runs[] = {8, 8, 8, 16, 1};
    for (int i = 0; i < 600; i++) {
        const swiglu_rule rule = rules[i % 3];
        const int64_t q = runs[i % 5], n = q * test_random_int(random, 0, 1100 / q), blocks = (n + 15) / 16;
        const double scale = ldexp(1, (int)test_random_int(random, -3, 3));
        test_tensor t = tensor_of(random, activations[2 - i / 5 % 3], 1, 2 * n, TEST_UNALIGNED);
        test_tensor codes = tensor_of(random, QUERN_U8, 1, 8 * blocks, TEST_UNALIGNED),
                    scales = tensor_of(random, QUERN_U8, 1, blocks, TEST_UNALIGNED);
        test_tensor_normal(&t, random, scale);
        double *x = test_tensor_get(&t);
        for (int64_t c = 0; c < 2 * n; c++) {
            if (test_random_one_in(random, 9)) x[c] = test_random_one_in(random, 2) ? 0.0 : -0.0;
            if (test_random_one_in(random, 50)) x[c] *= 12;
            const bool large = i % 9 == 0 && t.view.dtype != QUERN_F16 && c / q % 2 == 0; /* gates */
            if (large && test_random_one_in(random, 200))
                x[c] = ldexp(x[c], 61 + 30 * (int)test_random_int(random, 0, 1));
        }
        const bool far = (i % 9 == 3 || i % 9 == 4) && t.view.dtype != QUERN_F16;
        for (int64_t c = test_random_int(random, 0, 99); far && c < n; c += test_random_int(random, 1, 99))
            spread(random, &x[oracle_interleaved_at(c, false, q)], &x[oracle_interleaved_at(c, true, q)]);
        test_tensor_set(&t, x);
        free(x);
        x = test_tensor_get(&t);
        const oracle_profile profile =
            (oracle_profile[]){ORACLE_RNE, ORACLE_MODELOPT, ORACLE_COMPRESSED, ORACLE_RNE}[i / 15 % 4];
        double *h = calloc((size_t)blocks * 16 + 1, sizeof *h);
        assert_true(h != NULL);
        for (int64_t c = 0; c < n; c++)
            h[c] = swiglu_value(&rule, x[oracle_interleaved_at(c, false, q)],
                                x[oracle_interleaved_at(c, true, q)]);
        /* Some are a 64th of what the data asks for: scales saturate. */
        const float amax = nvfp4_case_amax(h, n) * (i % 7 == 3 ? 0x1p-6f : 1);
        const quantise_rule to = {(quantise_profile)profile, QUANTISE_SCALES_RNE,
                                  oracle_nvfp4_global(profile, amax > 0 ? amax : 1)};
        const uint32_t bits = kernels->swiglu->swiglu_quantise(&rule, &to, t.view.data, t.view.dtype, q, n,
                                                               codes.view.data, scales.view.data);
        assert_true(bits < 0x7f800000u);
        test_tensor_check_guards(&codes, "codes"), test_tensor_check_guards(&scales, "scales");
        for (int64_t b = 0; b < blocks; b++)
            expect_swiglu(kernels, &to, h + 16 * b, (const uint8_t *)codes.view.data + 8 * b,
                          ((const uint8_t *)scales.view.data)[b]);
        if (n > 0) { /* one that is not finite */
            x[test_random_int(random, 0, 2 * n - 1)] =
                (double[]){(double)NAN, (double)INFINITY, -(double)INFINITY}[i % 4 % 3];
            test_tensor_set(&t, x);
            assert_true(kernels->swiglu->swiglu_quantise(&rule, &to, t.view.data, t.view.dtype, q, n,
                                                         codes.view.data, scales.view.data) >= 0x7f800000u);
        }
        TEST_TIME("swiglu", "swiglu_quantise", kernels->swiglu->level,
                  2 * n * (int64_t)quern_dtype_size(t.view.dtype) + 9 * blocks,
                  kernels->swiglu->swiglu_quantise(&rule, &to, t.view.data, t.view.dtype, q, n,
                                                   codes.view.data, scales.view.data));
        free(x), free(h);
        test_tensor_free(&t), test_tensor_free(&codes), test_tensor_free(&scales);
    }
}

/* Runs a test at every level that this machine has. */
static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("quantise", 77);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        test->run(cpu_kernels_for(level), &random);
    }
}

#define KERNEL_TEST(name)                                                                                    \
    {                                                                                                        \
#name, at_every_level, NULL, NULL, &(kernel_test)                                                    \
        {                                                                                                    \
            name                                                                                             \
        }                                                                                                    \
    }

int main(int argc, char **argv)
{
    char program[] = "quantise_test";
    const struct CMUnitTest tests[] = {
        KERNEL_TEST(quantise_row),        KERNEL_TEST(midpoints),
        KERNEL_TEST(quantise_columns),    KERNEL_TEST(dequantise_row),
        KERNEL_TEST(dequantise_columns),  KERNEL_TEST(part_row),
        KERNEL_TEST(swiglu_row),          KERNEL_TEST(swiglu_quantise),
        KERNEL_TEST(swiglu_backward_row), {"every_kernel", test_every_kernel, NULL, NULL, program},
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
