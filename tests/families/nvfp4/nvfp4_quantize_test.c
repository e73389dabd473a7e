/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_quantize_test.c - quantise and dequantise through the public functions: the golden vectors, and
 * random shapes, strides and globals against the oracle, at every level and on one thread and three. */
#include "cmocka_c11.h"
#include "nvfp4_case.h"
#include "nvfp4_golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static quern_status quantize(quern_context *ctx, const quern_nvfp4_quantize_params *p,
                             const quern_nvfp4_quantize_tensors *t)
{
    size_t bytes = 0;
    quern_status status = quern_nvfp4_quantize_workspace(ctx, p, t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_nvfp4_quantize(ctx, NULL, p, t, w.data, w.bytes);
    test_workspace_close(&w);
    return status;
}

static void golden_case(quern_context *ctx, const nvfp4_golden *g, bool weight)
{
    const int64_t along = weight ? g->in.ndim - 2 : g->in.ndim - 1;
    int64_t codes_shape[QUERN_MAX_DIMS], scales_shape[QUERN_MAX_DIMS];
    for (int32_t i = 0; i < g->in.ndim; i++) {
        codes_shape[i] = i == along ? g->in.shape[i] / 2 : g->in.shape[i];
        scales_shape[i] = i == along ? g->in.shape[i] / 16 : g->in.shape[i];
    }
    test_random random = {1};
    test_tensor codes = test_tensor_make(&random, QUERN_U8, g->in.ndim, codes_shape, TEST_CONTIGUOUS);
    test_tensor scales = test_tensor_make(&random, QUERN_U8, g->in.ndim, scales_shape, TEST_CONTIGUOUS);
    float global = 0;
    const quern_tensor global_view = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    p.profile = (quern_nvfp4_profile)g->profile;
    p.weight = weight;
    t.x = &g->in;
    t.codes = &codes.view;
    t.scales = &scales.view;
    t.global = &global_view;
    if (quantize(ctx, &p, &t) != QUERN_OK) fail_msg("%s: %s", g->name, quern_last_error(ctx));
    assert_memory_equal(&global, &g->global, 4);
    assert_memory_equal(codes.view.data, g->codes, (size_t)g->count / 2);
    assert_memory_equal(scales.view.data, g->scales, (size_t)g->count / 16);
    test_tensor_check_guards(&codes, "codes"), test_tensor_check_guards(&scales, "scales");
    test_tensor_free(&codes), test_tensor_free(&scales);
}

static void golden_vectors(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int weight = 0; weight < 2; weight++) {
            quern_context *ctx = test_context(level, 2);
            nvfp4_golden_file f =
                nvfp4_golden_open(QUERN_TEST_VECTORS, weight ? "nvfp4_weights_scales" : "nvfp4_quant");
            for (nvfp4_golden g; nvfp4_golden_next(&f, &g); nvfp4_golden_free(&g))
                golden_case(ctx, &g, weight);
            nvfp4_golden_close(&f);
            quern_context_destroy(ctx);
        }
}

/* A tensor, how it is quantised, and what comes out. Weights are [E, K, N], activations [T, D], [D], or
 * [2, T / 2, D]. */
typedef struct quantize_case {
    quern_nvfp4_quantize_params params;
    bool given;
    int64_t experts, rows, columns; /* rows of all experts together */
    int32_t leads;                  /* of an activation */
    test_tensor x, offsets, given_global, codes, scales, global;
    double *values;
} quantize_case;

static int64_t expert_end(const quantize_case *c, int64_t e)
{
    if (c->params.weight) return (e + 1) * (c->rows / c->experts);
    return ((const int32_t *)c->offsets.view.data)[e];
}

static int64_t used_rows(const quantize_case *c)
{
    return c->offsets.buffer == NULL ? c->rows : c->experts > 0 ? expert_end(c, c->experts - 1) : 0;
}

static test_layout any_layout(test_random *random)
{
    return (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
}

static void make_offsets(quantize_case *c, test_random *random)
{
    int32_t ends[8], at = 0;
    for (int64_t e = 0; e < c->experts; e++) {
        if (!test_random_one_in(random, 3)) at = (int32_t)test_random_int(random, at, c->rows);
        ends[e] = at;
    }
    c->offsets = test_tensor_make(random, QUERN_I32, 1, &c->experts, TEST_UNALIGNED);
    test_tensor_set_i32(&c->offsets, ends);
}

/* The shape of an activation's rows, which end in `last`; returns how many extents it has. */
static int32_t row_shape(const quantize_case *c, int64_t last, int64_t shape[3])
{
    shape[0] = c->leads == 2 ? 2 : c->rows;
    shape[1] = c->rows / 2;
    shape[c->leads] = last;
    return c->leads + 1;
}

static test_tensor make_globals(const quantize_case *c, test_random *random)
{
    const quern_nvfp4_global per = c->params.global_per;
    int64_t shape[3] = {c->experts};
    int32_t ndim = per == QUERN_NVFP4_GLOBAL_EXPERT;
    if (per == QUERN_NVFP4_GLOBAL_ROW) ndim = row_shape(c, 0, shape) - 1;
    test_tensor t = test_tensor_make(random, QUERN_F32, ndim, shape, TEST_UNALIGNED);
    double *values = test_doubles(test_tensor_count(&t));
    for (int64_t i = 0; i < test_tensor_count(&t); i++)
        values[i] = ldexp(1 + test_random_uniform(random), (int)test_random_int(random, -14, 2));
    test_tensor_set(&t, values);
    free(values);
    return t;
}

static quantize_case make_case(test_random *random, int index)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    quantize_case c = {.params = QUERN_NVFP4_QUANTIZE_PARAMS_INIT, .given = test_random_one_in(random, 2)};
    c.params.profile = (quern_nvfp4_profile)nvfp4_case_profile(index);
    c.params.scales = (quern_nvfp4_scales)nvfp4_case_scales(index);
    c.params.weight = test_random_one_in(random, 2);
    c.params.global_per = (quern_nvfp4_global)test_random_int(random, 0, c.params.weight ? 1 : 2);
    c.experts = test_random_int(random, 1, 4);
    c.columns =
        test_random_one_in(random, 3) ? test_random_int(random, 0, 20) : test_random_int(random, 1, 400);
    if (test_random_one_in(random, 20)) c.columns = 16384 + test_random_int(random, 1, 40);
    const int64_t k = 16 * test_random_int(random, 0, 4);
    c.leads = c.params.global_per == QUERN_NVFP4_GLOBAL_EXPERT ? 1 : (int32_t)test_random_int(random, 0, 2);
    c.rows = c.params.weight ? c.experts * k
             : c.leads == 0  ? 1
             : c.leads == 2  ? 2 * test_random_int(random, 0, 30)
                             : test_random_int(random, 0, 60);
    const int64_t blocks = (c.columns + 15) / 16;
    const int64_t weight_shape[] = {c.experts, k, c.columns};
    const int64_t weight_codes[] = {c.experts, k / 2, c.columns},
                  weight_scales[] = {c.experts, k / 16, c.columns};
    int64_t rows_shape[3], rows_codes[3], rows_scales[3];
    row_shape(&c, 8 * blocks, rows_codes), row_shape(&c, blocks, rows_scales);
    const int32_t leads = row_shape(&c, c.columns, rows_shape), ndim = c.params.weight ? 3 : leads;
    c.x = test_tensor_make(random, dtypes[test_random_int(random, 0, 2)], ndim,
                           c.params.weight ? weight_shape : rows_shape, any_layout(random));
    c.codes = test_tensor_make(random, QUERN_U8, ndim, c.params.weight ? weight_codes : rows_codes,
                               any_layout(random));
    c.scales = test_tensor_make(random, QUERN_U8, ndim, c.params.weight ? weight_scales : rows_scales,
                                any_layout(random));
    if (c.params.global_per == QUERN_NVFP4_GLOBAL_EXPERT && !c.params.weight) make_offsets(&c, random);
    if (c.given) c.given_global = make_globals(&c, random);
    c.global = make_globals(&c, random);
    test_tensor_reset(&c.global);
    nvfp4_case_fill(&c.x, random, test_random_one_in(random, 3));
    c.values = test_tensor_get(&c.x);
    return c;
}

static void free_case(quantize_case *c)
{
    test_tensor *const all[] = {&c->x, &c->offsets, &c->given_global, &c->codes, &c->scales, &c->global};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->buffer != NULL) test_tensor_free(all[i]);
    free(c->values);
}

static int64_t expert_of(const quantize_case *c, int64_t row)
{
    int64_t e = 0;
    if (c->params.global_per != QUERN_NVFP4_GLOBAL_EXPERT) return 0;
    while (row >= expert_end(c, e)) e++;
    return e;
}

/* What the global at `index` must be. */
static float expected_global(const quantize_case *c, int64_t index)
{
    const quern_nvfp4_global per = c->params.global_per;
    int64_t first = 0, end = used_rows(c);
    if (per == QUERN_NVFP4_GLOBAL_ROW) {
        first = index;
        end = index + 1;
    }
    if (per == QUERN_NVFP4_GLOBAL_EXPERT) {
        first = index > 0 ? expert_end(c, index - 1) : 0;
        end = expert_end(c, index);
    }
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && first == end) return 1;
    return oracle_nvfp4_global((oracle_profile)c->params.profile,
                               nvfp4_case_amax(c->values + first * c->columns, (end - first) * c->columns));
}

static void check_globals(const quantize_case *c, const double *globals)
{
    double *given = c->given ? test_tensor_get(&c->given_global) : NULL;
    for (int64_t i = 0; i < test_tensor_count(&c->global); i++) {
        const double expected = c->given ? given[i] : (double)expected_global(c, i);
        if (globals[i] != expected)
            fail_msg("global %lld is %a, expected %a", (long long)i, globals[i], expected);
    }
    free(given);
}

/* Value (row, column) of block b: of a row, or of a column of a matrix. */
static void check_blocks(const quantize_case *c, const double *codes, const double *scales,
                         const double *globals)
{
    const bool weight = c->params.weight;
    const int64_t blocks = (c->columns + 15) / 16, wide = weight ? c->columns : blocks,
                  down = weight ? c->rows / 16 : c->rows;
    for (int64_t r = 0; r < down; r++)
        for (int64_t b = 0; b < wide; b++) {
            float x[16] = {0};
            uint8_t expected[16] = {0};
            int scale = 0;
            for (int64_t i = 0; i < 16; i++)
                if (weight || 16 * b + i < c->columns)
                    x[i] =
                        (float)
                            c->values[weight ? (16 * r + i) * c->columns + b : r * c->columns + 16 * b + i];
            const int64_t e =
                weight ? (c->params.global_per == QUERN_NVFP4_GLOBAL_EXPERT ? 16 * r / (c->rows / c->experts)
                                                                            : 0)
                : r < used_rows(c) ? expert_of(c, r)
                                   : 0;
            const float g = (float)globals[c->params.global_per == QUERN_NVFP4_GLOBAL_ROW ? r : e];
            if (weight || r < used_rows(c))
                scale = oracle_nvfp4_block((oracle_profile)c->params.profile, (oracle_scales)c->params.scales,
                                           g, x, expected);
            if (scales[r * wide + b] != scale)
                fail_msg("row %lld block %lld: scale %g, expected %d", (long long)r, (long long)b,
                         scales[r * wide + b], scale);
            for (int64_t i = 0; i < 8; i++) {
                const double got = codes[weight ? (8 * r + i) * c->columns + b : (r * blocks + b) * 8 + i];
                if (got != (expected[2 * i] | expected[2 * i + 1] << 4))
                    fail_msg("row %lld block %lld: byte %lld is %g", (long long)r, (long long)b, (long long)i,
                             got);
            }
        }
}

static quern_nvfp4_quantize_tensors tensors_of(const quantize_case *c)
{
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    t.x = &c->x.view;
    t.codes = &c->codes.view;
    t.scales = &c->scales.view;
    t.global = &c->global.view;
    if (c->offsets.buffer != NULL) t.offsets = &c->offsets.view;
    if (c->given) t.given_global = &c->given_global.view;
    return t;
}

static void random_cases(void **state)
{
    const uint64_t seed = test_seed("quantize", 4);
    (void)state;
    for (int trial = 0; trial < test_trials(300); trial++) {
        test_random random;
        const int index = trial % NVFP4_CASES;
        if (!test_trial(seed, trial, &random) || !nvfp4_case_accepted(index)) continue;
        quern_context *ctx = test_context(test_random_level(&random), trial % 2 ? 1 : 3);
        quantize_case c = make_case(&random, index);
        const quern_nvfp4_quantize_tensors t = tensors_of(&c);
        if (quantize(ctx, &c.params, &t) != QUERN_OK) fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        double *codes = test_tensor_get(&c.codes), *scales = test_tensor_get(&c.scales),
               *globals = test_tensor_get(&c.global);
        check_globals(&c, globals);
        check_blocks(&c, codes, scales, globals);
        test_tensor_check_guards(&c.codes, "codes"), test_tensor_check_guards(&c.scales, "scales"),
            test_tensor_check_guards(&c.global, "global");
        test_tensor_check_unchanged(&c.x, "x");
        free(codes), free(scales), free(globals);
        free_case(&c);
        quern_context_destroy(ctx);
    }
}

/* Back again: every value is the oracle's, in x's dtype. */
static void dequantized_values(void **state)
{
    const uint64_t seed = test_seed("dequantize", 5);
    (void)state;
    for (int trial = 0; trial < test_trials(120); trial++) {
        test_random random;
        const int index = trial % ORACLE_PROFILES;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = test_context(test_random_level(&random), 2);
        quantize_case c = make_case(&random, index);
        const quern_nvfp4_quantize_tensors t = tensors_of(&c);
        assert_int_equal(quantize(ctx, &c.params, &t), QUERN_OK);
        double *codes = test_tensor_get(&c.codes), *scales = test_tensor_get(&c.scales),
               *globals = test_tensor_get(&c.global);
        quern_nvfp4_dequantize_params p = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
        quern_nvfp4_dequantize_tensors d = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
        p.profile = c.params.profile;
        p.global_per = c.params.global_per;
        p.weight = c.params.weight;
        d.codes = t.codes;
        d.scales = t.scales;
        d.global = t.global;
        d.offsets = t.offsets;
        d.x = &c.x.view;
        test_tensor_reset(&c.x);
        if (quern_nvfp4_dequantize(ctx, NULL, &p, &d, NULL, 0) != QUERN_OK)
            fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        test_tensor_check_guards(&c.x, "x");
        double *got = test_tensor_get(&c.x);
        const int64_t wide = (c.columns + 15) / 16;
        for (int64_t i = 0; i < c.rows * c.columns; i++) {
            const int64_t r = i / c.columns, n = i % c.columns,
                          per_expert = c.params.weight ? c.rows / c.experts : 1;
            const int64_t e = c.params.global_per == QUERN_NVFP4_GLOBAL_ROW      ? r
                              : c.params.global_per == QUERN_NVFP4_GLOBAL_TENSOR ? 0
                              : c.params.weight                                  ? r / per_expert
                              : r < used_rows(&c)                                ? expert_of(&c, r)
                                                                                 : 0;
            const int byte = (int)codes[c.params.weight ? r / 2 * c.columns + n : r * wide * 8 + n / 2];
            const int scale = (int)scales[c.params.weight ? r / 16 * c.columns + n : r * wide + n / 16];
            const int code = byte >> 4 * ((c.params.weight ? r : n) % 2) & 15;
            const double expected =
                test_round(c.x.view.dtype, (double)oracle_nvfp4_value((oracle_profile)p.profile,
                                                                      (float)globals[e], scale, code));
            if (got[i] != expected && !(isnan(expected) && isnan(got[i])))
                fail_msg("trial %d: [%lld] is %a, expected %a", trial, (long long)i, got[i], expected);
        }
        free(codes), free(scales), free(globals), free(got);
        free_case(&c);
        quern_context_destroy(ctx);
    }
}

#ifndef QUERN_TEST_GPU /* which reads no contents on the host */
/* A nonfinite value: the error names it, and the call writes nothing. */
static void nonfinite_values_are_refused(void **state)
{
    test_random random = {test_seed("nonfinite_values", 6)};
    (void)state;
    for (int trial = 0; trial < 40; trial++) {
        quern_context *ctx = test_context(quern_cpu_level_detect(), 2);
        quantize_case c = make_case(&random, trial % 2);
        c.params.profile = QUERN_NVFP4_PROFILE_RNE;
        const int64_t count = used_rows(&c) * c.columns;
        if (count > 0) {
            char text[60];
            const int64_t at = test_random_int(&random, 0, count - 1),
                          later = test_random_int(&random, at, count - 1);
            c.values[at] = trial % 2 ? (double)NAN : -(double)INFINITY;
            c.values[later] = c.values[at];
            test_tensor_set(&c.x, c.values);
            test_tensor_reset(&c.codes), test_tensor_reset(&c.scales), test_tensor_reset(&c.global);
            test_tensor codes = test_tensor_copy(&c.codes), scales = test_tensor_copy(&c.scales),
                        global = test_tensor_copy(&c.global);
            const quern_nvfp4_quantize_tensors t = tensors_of(&c);
            assert_int_equal(quantize(ctx, &c.params, &t), QUERN_ERR_INVALID_ARGUMENT);
            snprintf(text, sizeof text, "x[%lld] (row %lld, column %lld) is ", (long long)at,
                     (long long)(at / c.columns), (long long)(at % c.columns));
            if (strstr(quern_last_error(ctx), text) == NULL)
                fail_msg("'%s' does not say '%s'", quern_last_error(ctx), text);
            assert_true(test_tensor_same_bits(&codes, &c.codes) &&
                        test_tensor_same_bits(&scales, &c.scales) &&
                        test_tensor_same_bits(&global, &c.global));
            test_tensor_free(&codes), test_tensor_free(&scales), test_tensor_free(&global);
        }
        free_case(&c);
        quern_context_destroy(ctx);
    }
}

#endif

/* Globals for which many numbers of 8 bits are the middle of two codes, and the f32 numbers beside them; rows
 * from those whose scales are the least to those beyond the largest. */
static void values_between_codes(void **state)
{
    enum { T = 48, D = 512 };
    static const int64_t shape[] = {T, D}, codes_shape[] = {T, D / 2}, scales_shape[] = {T, D / 16};
    static const float globals[] = {0.01f, 0x1p-8f, 4.5f / 2688, 5.25f / 2688, 4.875f / 2688};
    static const quern_nvfp4_profile profiles[] = {QUERN_NVFP4_PROFILE_RNE, QUERN_NVFP4_PROFILE_MODELOPT,
                                                   QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS};
    test_random random = {test_seed("values_between_codes", 8)};
    (void)state;
    for (int trial = 0; trial < 30; trial++) {
        quern_context *ctx = test_context(quern_cpu_level_detect(), 2);
        test_tensor x = test_tensor_make(&random, trial % 2 ? QUERN_F16 : QUERN_BF16, 2, shape,
                                         TEST_CONTIGUOUS),
                    codes = test_tensor_make(&random, QUERN_U8, 2, codes_shape, TEST_CONTIGUOUS),
                    scales = test_tensor_make(&random, QUERN_U8, 2, scales_shape, TEST_CONTIGUOUS);
        quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
        quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
        float global = globals[trial % 5];
        if (trial / 5 % 3 > 0) global = nextafterf(global, trial / 5 % 3 == 1 ? 0.0f : 1.0f);
        p.profile = profiles[trial % 3];
        if (p.profile == QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS) global = 1 / global;
        const quern_tensor given = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
        test_tensor_normal(&x, &random, 1);
        double *values = test_tensor_get(&x);
        for (int i = 0; i < T * D; i++) /* of 8 bits in f16, too */
            values[i] = ldexp(rint(values[i] * 64) / 64, i / D % 24 - 13);
        test_tensor_set(&x, values);
        t.x = &x.view;
        t.given_global = &given;
        t.codes = &codes.view;
        t.scales = &scales.view;
        if (quantize(ctx, &p, &t) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        double *stored = test_tensor_get(&x);
        const uint8_t *got = codes.view.data, *bytes = scales.view.data;
        for (int b = 0; b < T * D / 16; b++) {
            float block[16];
            uint8_t expected[16];
            for (int i = 0; i < 16; i++) block[i] = (float)stored[16 * b + i];
            const int scale =
                oracle_nvfp4_block((oracle_profile)p.profile, ORACLE_SCALES_RNE, global, block, expected);
            if (bytes[b] != scale)
                fail_msg("trial %d block %d: scale %d, expected %d", trial, b, bytes[b], scale);
            for (int i = 0; i < 8; i++)
                if (got[8 * b + i] != (expected[2 * i] | expected[2 * i + 1] << 4))
                    fail_msg("trial %d block %d: byte %d is %d", trial, b, i, got[8 * b + i]);
        }
        free(values), free(stored);
        test_tensor_free(&x), test_tensor_free(&codes), test_tensor_free(&scales);
        quern_context_destroy(ctx);
    }
}

/* Rows past the last expert's are left out, so fewer rows are cut into pieces than the workspace is for. */
static void wide_rows_of_few(void **state)
{
    enum { T = 8, USED = 7, D = 16 << 14 };
    static const int64_t shape[] = {T, D}, codes_shape[] = {T, D / 2}, scales_shape[] = {T, D / 16}, one = 1;
    test_random random = {test_seed("wide_rows_of_few", 7)};
    quern_context *ctx = test_context(quern_cpu_level_detect(), 2);
    test_tensor x = test_tensor_make(&random, QUERN_BF16, 2, shape, TEST_CONTIGUOUS),
                codes = test_tensor_make(&random, QUERN_U8, 2, codes_shape, TEST_CONTIGUOUS),
                scales = test_tensor_make(&random, QUERN_U8, 2, scales_shape, TEST_CONTIGUOUS);
    int32_t end = USED;
    float global = 0;
    const quern_tensor offsets = quern_tensor_contiguous(&end, QUERN_I32, 1, &one),
                       global_view = quern_tensor_contiguous(&global, QUERN_F32, 1, &one);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    (void)state;
    test_tensor_normal(&x, &random, 1);
    double *values = test_tensor_get(&x);
    p.global_per = QUERN_NVFP4_GLOBAL_EXPERT;
    t.x = &x.view;
    t.offsets = &offsets;
    t.codes = &codes.view;
    t.scales = &scales.view;
    t.global = &global_view;
    if (quantize(ctx, &p, &t) != QUERN_OK) fail_msg("%s", quern_last_error(ctx)); /* checks the workspace */
    assert_true(global == oracle_nvfp4_global(ORACLE_RNE, nvfp4_case_amax(values, (int64_t)USED * D)));
    const uint8_t *bytes = scales.view.data;
    for (int64_t i = 0; i < T * D / 16; i++) assert_true((bytes[i] == 0) == (i >= USED * D / 16));
    free(values);
    test_tensor_free(&x), test_tensor_free(&codes), test_tensor_free(&scales);
    quern_context_destroy(ctx);
}

#ifndef QUERN_TEST_GPU
static void expect_error(quern_context *ctx, quern_status status, const char *says)
{
    if (status != QUERN_ERR_INVALID_ARGUMENT) fail_msg("%s: status %d", says, (int)status);
    if (strstr(quern_last_error(ctx), says) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), says);
}

static void bad_calls(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_PORTABLE, 1);
    float x[64] = {1}, globals[2] = {7, 7}, global = 1, bad_global = -1;
    uint8_t codes[64] = {7}, scales[64] = {7};
    int32_t ends[2] = {3, 2};
    size_t bytes;
    const int64_t shape[] = {2, 32}, codes_shape[] = {2, 16}, scales_shape[] = {2, 2}, two = 2,
                  odd[] = {2, 30};
    const quern_tensor x_view = quern_tensor_contiguous(x, QUERN_F32, 2, shape),
                       codes_view = quern_tensor_contiguous(codes, QUERN_U8, 2, codes_shape);
    const quern_tensor scales_view = quern_tensor_contiguous(scales, QUERN_U8, 2, scales_shape),
                       one = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
    const quern_tensor bad = quern_tensor_contiguous(&bad_global, QUERN_F32, 0, NULL),
                       offsets = quern_tensor_contiguous(ends, QUERN_I32, 1, &two);
    const quern_tensor pair = quern_tensor_contiguous(globals, QUERN_F32, 1, &two),
                       odd_view = quern_tensor_contiguous(x, QUERN_F32, 2, odd);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    (void)state;
    t.x = &x_view;
    t.codes = &codes_view;
    t.scales = &scales_view;
    t.global = &one;
    expect_error(ctx, quern_nvfp4_quantize_workspace(NULL, &p, &t, &bytes), "ctx");
    expect_error(ctx, quern_nvfp4_quantize_workspace(ctx, NULL, &t, &bytes), "params");
    expect_error(ctx, quern_nvfp4_quantize_workspace(ctx, &p, &t, NULL), "bytes");
    p.profile = (quern_nvfp4_profile)4;
    expect_error(ctx, quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes), "profile is 4");
    p.profile = QUERN_NVFP4_PROFILE_HALFSTEP;
    p.scales = QUERN_NVFP4_SCALES_SEARCH;
    expect_error(ctx, quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes),
                 "scales is 2 with profile halfstep");
    p.profile = QUERN_NVFP4_PROFILE_RNE;
    p.global_per = QUERN_NVFP4_GLOBAL_EXPERT;
    expect_error(ctx, quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes), "offsets is NULL");
    t.offsets = &offsets;
    t.global = &pair;
    assert_int_equal(quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes);
    expect_error(ctx, quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes), "offsets[0] is 3");
    ends[0] = 2;
    ends[1] = 1;
    expect_error(ctx, quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes), "offsets[1] is 1 after 2");
    t.offsets = NULL;
    p.global_per = QUERN_NVFP4_GLOBAL_TENSOR;
    t.global = NULL;
    expect_error(ctx, quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes), "global is NULL");
    t.given_global = &bad;
    expect_error(ctx, quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes), "given_global[0] is -1");
    t.given_global = NULL;
    t.global = &one;
    t.x = &odd_view;
    p.weight = true;
    expect_error(ctx, quern_nvfp4_quantize(ctx, NULL, &p, &t, workspace, bytes), "a multiple of 16");
    free(workspace);
    assert_true(codes[0] == 7 && codes[1] == 0 && scales[0] == 7 && globals[0] == 7 && globals[1] == 7 &&
                global == 1);

    quern_nvfp4_dequantize_params dp = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors dt = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    memset(codes, 0, sizeof codes), memset(scales, 0, sizeof scales);
    dt.codes = &codes_view;
    dt.scales = &scales_view;
    dt.global = &one;
    dt.x = &x_view;
    scales[3] = 0x7F;
    expect_error(ctx, quern_nvfp4_dequantize(ctx, NULL, &dp, &dt, NULL, 0),
                 "scales[3] is the scale byte 0x7F");
    assert_true(x[0] == 1);
    scales[3] = 0;
    global = NAN;
    expect_error(ctx, quern_nvfp4_dequantize(ctx, NULL, &dp, &dt, NULL, 0), "global[0] is nan");
    quern_context_destroy(ctx);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_vectors),
        cmocka_unit_test(random_cases),
        cmocka_unit_test(dequantized_values),
        cmocka_unit_test(values_between_codes),
        cmocka_unit_test(wide_rows_of_few),
#ifndef QUERN_TEST_GPU
        cmocka_unit_test(nonfinite_values_are_refused),
        cmocka_unit_test(bad_calls),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
