/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_gemm_test.c - the grouped product: random operands against float64, equal bits whatever the layout,
 * the threads and the other rows, repacking and back, and what is refused. */
#include "cmocka_c11.h"
#include "nvfp4_product.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static quern_cpu_level any_level(test_random *random)
{
    return (quern_cpu_level)test_random_int(random, QUERN_CPU_LEVEL_PORTABLE, quern_cpu_level_detect());
}

static void against_float64(void **state)
{
    const uint64_t seed = test_seed("gemm", 20);
    (void)state;
    for (int trial = 0; trial < test_trials(200); trial++) {
        char what[40];
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = test_context(any_level(&random), (int32_t)test_random_int(&random, 1, 3));
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS));
        product_result r =
            product_run(&c, ctx, &random, (product_layout)(trial / PRODUCT_A_KINDS % PRODUCT_LAYOUTS));
        snprintf(what, sizeof what, "trial %d", trial);
        product_check(&c, &r, what);
        product_result_free(&r);
        product_free(&c);
        quern_context_destroy(ctx);
    }
}

static bool same_rows(const product_case *c, const product_result *a, int64_t row_a, const product_result *b,
                      int64_t row_b)
{
    const int64_t out = product_out_columns(c), blocks = (out + 15) / 16;
    if (!c->quantised)
        return memcmp(a->c + row_a * out, b->c + row_b * out, sizeof(double) * (size_t)out) == 0;
    return memcmp(a->codes + row_a * 16 * blocks, b->codes + row_b * 16 * blocks, (size_t)(16 * blocks)) ==
               0 &&
           memcmp(a->scales + row_a * blocks, b->scales + row_b * blocks, (size_t)blocks) == 0;
}

static void equal_bits_in_every_layout(void **state)
{
    const uint64_t seed = test_seed("layouts", 21);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const quern_cpu_level level = any_level(&random);
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS));
        quern_context *one = test_context(level, 1), *three = test_context(level, 3);
        product_result first = product_run(&c, one, &random, PRODUCT_LINEAR);
        for (int layout = 0; layout < PRODUCT_LAYOUTS; layout++) {
            product_result r = product_run(&c, three, &random, (product_layout)layout);
            for (int64_t t = 0; t < c.tokens; t++)
                if (!same_rows(&c, &first, t, &r, t))
                    fail_msg("trial %d: row %lld differs in layout %d", trial, (long long)t, layout);
            product_result_free(&r);
        }
        product_result_free(&first);
        product_free(&c);
        quern_context_destroy(one), quern_context_destroy(three);
    }
}

/* A row keeps its bits when other rows go and change places: with all of its expert's, alone, in between. */
static void rows_do_not_depend_on_others(void **state)
{
    const uint64_t seed = test_seed("rows", 22);
    (void)state;
    for (int trial = 0; trial < test_trials(100); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = test_context(any_level(&random), 2);
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS));
        product_result all = product_run(&c, ctx, &random, PRODUCT_LINEAR);
        int64_t *rows = calloc((size_t)c.tokens + 1, sizeof *rows);
        assert_non_null(rows);
        const int64_t count = product_choose_rows(&c, &random, (int[]){8, 2, 1}[trial % 3], rows);
        product_case some = product_subset(&c, &random, rows, count);
        product_result r = product_run(&some, ctx, &random, PRODUCT_REPACKED);
        for (int64_t to = 0; to < count; to++)
            if (!same_rows(&c, &all, rows[to], &r, to))
                fail_msg("trial %d: row %lld differs among others", trial, (long long)rows[to]);
        free(rows);
        product_result_free(&all), product_result_free(&r);
        product_free(&c), product_free(&some);
        quern_context_destroy(ctx);
    }
}

/* 512 experts, most of them empty. */
static void many_experts(void **state)
{
    enum { EXPERTS = 512, K = 32, N = 24, TOKENS = 40 };
    static uint8_t codes[EXPERTS * K / 2 * N], scales[EXPERTS * K / 16 * N];
    static float a[TOKENS * K], c[TOKENS * N];
    int32_t ends[EXPERTS];
    (void)state;
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 37 >> 3);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(i % 127);
    for (int i = 0; i < TOKENS * K; i++) a[i] = (float)(i % 13 - 6);
    for (int e = 0; e < EXPERTS; e++) ends[e] = e * TOKENS / (EXPERTS - 1);
    const int64_t codes_shape[] = {EXPERTS, K / 2, N}, scales_shape[] = {EXPERTS, K / 16, N},
                  a_shape[] = {TOKENS, K}, c_shape[] = {TOKENS, N}, experts = EXPERTS;
    const quern_tensor codes_view = quern_tensor_contiguous(codes, QUERN_U8, 3, codes_shape),
                       scales_view = quern_tensor_contiguous(scales, QUERN_U8, 3, scales_shape);
    const quern_tensor a_view = quern_tensor_contiguous(a, QUERN_F32, 2, a_shape),
                       c_view = quern_tensor_contiguous(c, QUERN_F32, 2, c_shape);
    const quern_tensor offsets = quern_tensor_contiguous(ends, QUERN_I32, 1, &experts);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    t.a = &a_view;
    t.b_codes = &codes_view;
    t.b_scales = &scales_view;
    t.offsets = &offsets;
    t.c = &c_view;
    quern_context *ctx = test_context(quern_cpu_level_detect(), 2);
    size_t bytes;
    assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_nvfp4_gemm(ctx, NULL, &p, &t, w.data, w.bytes), QUERN_OK);
    test_workspace_close(&w);
    for (int e = 0, row = 0; e < EXPERTS; e++)
        for (; row < ends[e]; row++)
            for (int n = 0; n < N; n++) {
                double sum = 0, size = 0;
                for (int k = 0; k < K; k++) {
                    const double term =
                        (double)a[row * K + k] *
                        (double)oracle_e2m1(codes[(e * K / 2 + k / 2) * N + n] >> 4 * (k % 2) & 15) *
                        (double)oracle_e4m3(scales[(e * K / 16 + k / 16) * N + n]);
                    sum += term;
                    size += fabs(term);
                }
                assert_true(fabs((double)c[row * N + n] - sum) <= (K + 8) * 0x1p-24 * size);
            }
    quern_context_destroy(ctx);
}

/* A product of one expert, two rows, K 32, N 16, whose parts can be spoiled. */
typedef struct small_call {
    uint8_t codes[16 * 16], scales[2 * 16], a_codes[2 * 16], a_scales[2 * 2], repacked[2304], c_codes[2 * 8],
        c_scales[2];
    float a[2 * 32], c[2 * 16], global;
    int32_t ends[2];
    quern_tensor codes_view, scales_view, a_view, a_codes_view, a_scales_view, c_view, offsets, one,
        repacked_view, c_codes_view, c_scales_view;
    quern_nvfp4_gemm_params p;
    quern_nvfp4_gemm_tensors t;
} small_call;

static void make_small(small_call *s)
{
    const int64_t codes[] = {1, 16, 16}, scales[] = {1, 2, 16}, a[] = {2, 32}, a_codes[] = {2, 16},
                  a_scales[] = {2, 2}, c[] = {2, 16}, one = 1;
    const int64_t repacked[] = {1, 2304}, c_codes[] = {2, 8}, c_scales[] = {2, 1};
    memset(s, 0, sizeof *s);
    s->codes_view = quern_tensor_contiguous(s->codes, QUERN_U8, 3, codes);
    s->scales_view = quern_tensor_contiguous(s->scales, QUERN_U8, 3, scales);
    s->a_view = quern_tensor_contiguous(s->a, QUERN_F32, 2, a);
    s->a_codes_view = quern_tensor_contiguous(s->a_codes, QUERN_U8, 2, a_codes);
    s->a_scales_view = quern_tensor_contiguous(s->a_scales, QUERN_U8, 2, a_scales);
    s->c_view = quern_tensor_contiguous(s->c, QUERN_F32, 2, c);
    s->offsets = quern_tensor_contiguous(s->ends, QUERN_I32, 1, &one);
    s->one = quern_tensor_contiguous(&s->global, QUERN_F32, 0, NULL);
    s->repacked_view = quern_tensor_contiguous(s->repacked, QUERN_U8, 2, repacked);
    s->c_codes_view = quern_tensor_contiguous(s->c_codes, QUERN_U8, 2, c_codes);
    s->c_scales_view = quern_tensor_contiguous(s->c_scales, QUERN_U8, 2, c_scales);
    s->p = (quern_nvfp4_gemm_params)QUERN_NVFP4_GEMM_PARAMS_INIT;
    s->t = (quern_nvfp4_gemm_tensors)QUERN_NVFP4_GEMM_TENSORS_INIT;
    s->t.a = &s->a_view;
    s->t.b_codes = &s->codes_view;
    s->t.b_scales = &s->scales_view;
    s->t.offsets = &s->offsets;
    s->t.c = &s->c_view;
    s->ends[0] = 2;
    s->global = 1;
    for (int i = 0; i < 32; i++) s->c[i] = 7;
}

/* The call fails with a sentence that holds `says`, and C does not change. */
static void refused(small_call *s, const char *says)
{
    quern_context *ctx = test_context(quern_cpu_level_detect(), 1);
    size_t bytes = 0;
    quern_status status = quern_nvfp4_gemm_workspace(ctx, &s->p, &s->t, &bytes);
    if (status == QUERN_OK) {
        test_workspace w = test_workspace_make(bytes);
        status = quern_nvfp4_gemm(ctx, NULL, &s->p, &s->t, w.data, w.bytes);
        test_workspace_close(&w);
    }
    if (status != QUERN_ERR_INVALID_ARGUMENT) fail_msg("%s: status %d", says, (int)status);
    if (strstr(quern_last_error(ctx), says) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), says);
    for (int i = 0; i < 32; i++) assert_true(s->c[i] == 7);
    for (int i = 0; i < 16; i++) assert_int_equal(s->c_codes[i], 0);
    quern_context_destroy(ctx);
    make_small(s);
}

/* The gradient of A: every form of A and of B, of the output's gradient, levels and threads. */
static void gradients(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    const uint64_t seed = test_seed("nvfp4 gradients", 52);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        char what[80];
        if (!test_trial(seed, trial, &random)) continue;
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS));
        const quern_dtype dtype = dtypes[test_random_int(&random, 0, 2)],
                          own = dtypes[test_random_int(&random, 0, 2)];
        const int64_t shape[] = {c.tokens, product_out_columns(&c)};
        test_tensor d_c = test_tensor_make(&random, dtype, 2, shape,
                                           (test_layout)test_random_int(&random, 0, TEST_LAYOUTS - 1));
        test_tensor_normal(&d_c, &random, 1);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            double *first = NULL;
            for (int32_t threads = 1; threads <= 3; threads++) {
                quern_context *ctx = test_context(level, threads);
                const product_layout layout =
                    (product_layout)test_random_int(&random, 0, PRODUCT_LAYOUTS - 1);
                double *d_a = product_run_backward(&c, ctx, &random, layout, &d_c, own);
                snprintf(what, sizeof what, "trial %d, %s", trial, quern_cpu_level_name(level));
                if (first == NULL) {
                    product_check_backward(&c, &d_c, d_a, own, what);
                    first = d_a;
                } else assert_memory_equal(first, d_a, sizeof *d_a * (size_t)(c.tokens * c.k)), free(d_a);
                quern_context_destroy(ctx);
            }
            free(first);
        }
        test_tensor_free(&d_c);
        product_free(&c);
    }
}

static void bad_calls(void **state)
{
    static small_call s;
    (void)state;
    make_small(&s);
    s.scales[17] = 0x7F;
    refused(&s, "b_scales[17] is the scale byte 0x7F");
    s.t.a = NULL;
    refused(&s, "a and a_codes");
    s.t.a_codes = &s.a_codes_view;
    refused(&s, "a and a_codes");
    s.t.a = NULL;
    s.t.a_codes = &s.a_codes_view;
    refused(&s, "a_scales is NULL");
    s.t.a = NULL;
    s.t.a_codes = &s.a_codes_view;
    s.t.a_scales = &s.a_scales_view;
    s.a_scales[3] = 0x80;
    refused(&s, "a_scales[3] is the scale byte 0x80");
    s.t.b_codes = NULL;
    refused(&s, "b_codes and b_repacked are NULL");
    s.t.b_codes = s.t.b_scales = NULL;
    s.t.b_repacked = &s.repacked_view;
    refused(&s, "n is 0 with b_repacked");
    s.t.c = NULL;
    refused(&s, "c is NULL");
    s.t.offsets = NULL;
    refused(&s, "offsets is NULL");
    s.ends[0] = 3;
    refused(&s, "offsets[0] is 3");
    s.ends[0] = -1;
    refused(&s, "offsets[0] is -1");
    s.t.b_global = &s.one;
    s.global = -2;
    refused(&s, "b_global[0] is -2");
    s.t.a_global = &s.one;
    s.global = INFINITY;
    refused(&s, "a_global[0] is inf");
    s.p.limit = -1;
    refused(&s, "limit is -1");
    s.p.granularity = 0;
    refused(&s, "granularity is 0");
    s.p.activation = QUERN_NVFP4_ACTIVATION_SWIGLU;
    s.p.granularity = 3;
    refused(&s, "granularity is 3");
    s.p.activation = QUERN_NVFP4_ACTIVATION_SWIGLU;
    s.p.granularity = 16;
    refused(&s, "N is 16");
    s.p.activation = QUERN_NVFP4_ACTIVATION_SWIGLU;
    s.p.accumulate = true;
    refused(&s, "accumulate is true with an activation");
    s.p.activation = QUERN_NVFP4_ACTIVATION_SWIGLU;
    refused(&s, "c.shape[1] is 16: 8 is accepted");
    s.p.activation = (quern_nvfp4_activation)2;
    refused(&s, "activation is 2");
    s.p.b_codes = (quern_nvfp4_codes_layout)2;
    refused(&s, "b_codes is 2");
    s.p.b_scales = (quern_nvfp4_scales_layout)3;
    refused(&s, "b_scales is 3");
    s.p.b_scales = QUERN_NVFP4_LAYOUT_SWIZZLED;
    refused(&s, "b_scales has 3 dimensions");
    s.a_view.shape[1] = 16;
    refused(&s, "a has K = 16");
    s.codes_view.shape[1] = 15;
    refused(&s, "b_codes hold K = 2 x 15");
    s.p.a_global_per = (quern_nvfp4_global)3;
    refused(&s, "global_per is 3");
    s.p.a8 = true;
    s.a[5] = NAN;
    refused(&s, "a[5]");
    s.t.c = NULL;
    s.t.c_codes = &s.c_codes_view;
    s.t.c_scales = &s.c_scales_view;
    refused(&s, "c_global is NULL");
    s.t.c = NULL;
    s.t.c_codes = &s.c_codes_view;
    s.t.c_scales = &s.c_scales_view;
    s.t.c_global = &s.one;
    s.a[33] = INFINITY;
    refused(&s, "a[33]");
    s.t.c = NULL;
    s.t.c_codes = &s.c_codes_view;
    s.t.c_scales = &s.c_scales_view;
    s.t.c_global = &s.one;
    s.p.accumulate = true;
    refused(&s, "accumulate is true without c");
    s.p.n = 15;
    refused(&s, "n is 15");
    s.p.profile = (quern_nvfp4_profile)9;
    refused(&s, "profile is 9");
}

/* The call with A as codes. */
static void with_codes(small_call *s)
{
    s->t.a = NULL;
    s->t.a_codes = &s->a_codes_view;
    s->t.a_scales = &s->a_scales_view;
}

/* The same weights for two experts, whose rows end where `ends` says. */
static void with_two_experts(small_call *s, int32_t first, int32_t second)
{
    s->codes_view.shape[0] = s->scales_view.shape[0] = s->offsets.shape[0] = 2;
    s->codes_view.strides[0] = s->scales_view.strides[0] = 0;
    s->ends[0] = first;
    s->ends[1] = second;
}

/* Extents, and contents, that a call of one expert and of whole views does not meet. */
static void bad_operands(void **state)
{
    static const int64_t wide[] = {1, 2}, per_row[] = {3, 1}, per_expert = 2, bias[] = {1, 15}, tiles = 512,
                         two[] = {1, 512};
    static uint8_t swizzled[512];
    static float values[16] = {1, 1, 1};
    static int32_t pads[2];
    static small_call s;
    quern_tensor tensor;
    (void)state;
    make_small(&s);
    with_two_experts(&s, 2, 1);
    refused(&s, "offsets[1] is 1 after 2: it may not fall");
    with_two_experts(&s, 0, 3);
    refused(&s, "offsets[1] is 3: at most the 2 rows are accepted");
    with_two_experts(&s, 1, 2);
    s.codes_view.shape[0] = 1;
    refused(&s, "offsets.shape[0] is 2: b_codes' 1 experts");
    s.scales_view.shape[1] = 1;
    refused(&s, "b_scales.shape[1] is 1: 2 is accepted");
    s.codes_view.dtype = QUERN_I32;
    refused(&s, "b_codes: dtype i32");
    s.c_view.shape[1] = 15;
    refused(&s, "c.shape[1] is 15: 16 is accepted");
    tensor = quern_tensor_contiguous(values, QUERN_F32, 2, bias);
    s.t.bias = &tensor;
    refused(&s, "bias.shape[1] is 15: 16 is accepted");
    tensor = quern_tensor_contiguous(values, QUERN_F32, 2, wide);
    s.t.b_global = &tensor;
    s.p.granularity = 12;
    refused(&s, "N is 16: gate and up in runs of 12");
    s.t.b_global = &tensor;
    values[1] = 0;
    refused(&s, "b_global[1] is 0");
    values[1] = 1;
    tensor = quern_tensor_contiguous(values, QUERN_F32, 2, per_row);
    s.t.a_global = &tensor;
    s.p.a_global_per = QUERN_NVFP4_GLOBAL_ROW;
    refused(&s, "a_global.shape[0] is 3: 2 is accepted");
    tensor = quern_tensor_contiguous(values, QUERN_F32, 1, &per_expert);
    s.t.a_global = &tensor;
    s.p.a_global_per = QUERN_NVFP4_GLOBAL_EXPERT;
    refused(&s, "a_global.shape[0] is 2: 1 is accepted");
    with_codes(&s);
    s.p.a_swizzled = true;
    refused(&s, "pad_row_offsets is NULL");
    const int64_t pad_count = 2;
    const quern_tensor pad_view = quern_tensor_contiguous(pads, QUERN_I32, 1, &pad_count),
                       a_tiles = quern_tensor_contiguous(swizzled, QUERN_U8, 1, &tiles),
                       b_tiles = quern_tensor_contiguous(swizzled, QUERN_U8, 2, two);
    for (int i = 0; i < 4; i++) {
        with_codes(&s);
        s.t.a_scales = &a_tiles;
        s.t.pad_row_offsets = &pad_view;
        pads[0] = i == 0 ? -128 : i == 1 ? 64 : i == 2 ? 128 : 0;
        swizzled[511] = i < 3 ? 0 : 0xFF;
        refused(&s, i == 0   ? "pad_row_offsets[0] is -128 for 2 rows"
                    : i == 1 ? "pad_row_offsets[0] is 64 for 2 rows"
                    : i == 2 ? "pad_row_offsets[0] is 128 for 2 rows"
                             : "a_scales[511] is the scale byte 0xFF");
    }
    s.t.b_scales = &b_tiles;
    s.p.b_scales = QUERN_NVFP4_LAYOUT_SWIZZLED;
    refused(&s, "b_scales[511] is the scale byte 0xFF");
    s.t.c_old = &s.c_view;
    s.p.accumulate = true;
    refused(&s, "c_old is given with accumulate");
}

/* NaN in a row of A stays in that row, whatever the codes it meets. */
static void nan_stays_in_its_row(void **state)
{
    (void)state;
    for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
        static small_call s;
        size_t bytes = 0;
        make_small(&s);
        s.a[3] = NAN;
        quern_context *ctx = test_context((quern_cpu_level)level, 1);
        assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &s.p, &s.t, &bytes), QUERN_OK);
        test_workspace w = test_workspace_make(bytes);
        assert_int_equal(quern_nvfp4_gemm(ctx, NULL, &s.p, &s.t, w.data, w.bytes), QUERN_OK);
        for (int i = 0; i < 32; i++) assert_true(i < 16 ? isnan(s.c[i]) : s.c[i] == 0);
        test_workspace_close(&w);
        quern_context_destroy(ctx);
    }
}

/* Powers of two in a row of A come out as powers of two, also where sums of a block could overflow. */
static void rows_of_any_magnitude(void **state)
{
    static const int powers[] = {0, 112, 64, 60, -100};
    (void)state;
    for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
        float first[16];
        for (int power = 0; power < 5; power++) {
            static small_call s;
            size_t bytes = 0;
            make_small(&s);
            for (int i = 0; i < 16; i++)
                s.a[i] = ldexpf((float)(i % 7 - 3) + 0.37f * (float)i, powers[power]);
            for (int i = 0; i < 256; i++) s.codes[i] = (uint8_t)(37 * i + 11);
            for (int i = 0; i < 32; i++) s.scales[i] = (uint8_t)(0x36 + i % 5);
            quern_context *ctx = test_context((quern_cpu_level)level, 1);
            assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &s.p, &s.t, &bytes), QUERN_OK);
            test_workspace w = test_workspace_make(bytes);
            assert_int_equal(quern_nvfp4_gemm(ctx, NULL, &s.p, &s.t, w.data, w.bytes), QUERN_OK);
            for (int i = 0; i < 16; i++) {
                if (power == 0) first[i] = s.c[i];
                assert_true(s.c[i] != 0 && s.c[i] == ldexpf(first[i], powers[power]));
            }
            test_workspace_close(&w);
            quern_context_destroy(ctx);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_float64),
        cmocka_unit_test(equal_bits_in_every_layout),
        cmocka_unit_test(rows_do_not_depend_on_others),
        cmocka_unit_test(many_experts),
        cmocka_unit_test(gradients),
        cmocka_unit_test(bad_calls),
        cmocka_unit_test(bad_operands),
        cmocka_unit_test(nan_stays_in_its_row),
        cmocka_unit_test(rows_of_any_magnitude),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
