/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_gemm_test.c - the grouped product: random operands against float64, equal bits whatever the layout,
 * the threads and the other rows, repacking and back, many experts, gradients. */
#include "cmocka_c11.h"
#include "nvfp4_product.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void against_float64(void **state)
{
    const uint64_t seed = test_seed("gemm", 20);
    (void)state;
    for (int trial = 0; trial < test_trials(200); trial++) {
        char what[40];
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS), trial % 7 == 3);
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
        const quern_cpu_level level = test_random_level(&random);
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS), false);
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
        quern_context *ctx = test_context(test_random_level(&random), 2);
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS), false);
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

/* Weights in one layout: codes linear, k-major, or a transposed view; scales linear, k-major, or swizzled. */
typedef struct weight {
    uint8_t codes[2 * 40 * 70], scales[2 * 5 * 70], tiles[2 * 1024];
    quern_tensor codes_view, scales_view;
} weight;

enum { W_E = 2, W_K = 80, W_N = 70 };

static uint8_t *code_at(weight *w, bool k_major, int e, int pair, int n)
{
    return &w->codes[k_major ? (e * W_N + n) * W_K / 2 + pair : (e * W_K / 2 + pair) * W_N + n];
}

static uint8_t *scale_at(weight *w, int layout, int e, int block, int n)
{
    if (layout == QUERN_NVFP4_LAYOUT_SWIZZLED)
        return &w->tiles[1024 * e + oracle_swizzled_at(n, block, W_K / 16)];
    return &w->scales[layout == QUERN_NVFP4_LAYOUT_K_MAJOR ? (e * W_N + n) * W_K / 16 + block
                                                           : (e * W_K / 16 + block) * W_N + n];
}

/* Random weights, or room for them; `view`: k-major codes as [E, K/2, N]. */
static void make_weight(weight *w, bool k_major, bool view, int layout, uint64_t seed)
{
    const int64_t codes[] = {W_E, k_major ? W_N : W_K / 2, k_major ? W_K / 2 : W_N}, tiles[] = {W_E, 1024};
    const bool turned = layout == QUERN_NVFP4_LAYOUT_K_MAJOR;
    const int64_t scales[] = {W_E, turned ? W_N : W_K / 16, turned ? W_K / 16 : W_N};
    test_random random = {seed};
    memset(w, 0, sizeof *w);
    for (int e = 0; e < W_E && seed > 0; e++)
        for (int n = 0; n < W_N; n++)
            for (int pair = 0; pair < W_K / 2; pair++) {
                *code_at(w, k_major, e, pair, n) = (uint8_t)test_random_int(&random, 0, 255);
                if (pair % 8 == 0)
                    *scale_at(w, layout, e, pair / 8, n) = (uint8_t)test_random_int(&random, 0, 126);
            }
    w->codes_view = quern_tensor_contiguous(w->codes, QUERN_U8, 3, codes);
    w->scales_view = layout == QUERN_NVFP4_LAYOUT_SWIZZLED
                         ? quern_tensor_contiguous(w->tiles, QUERN_U8, 2, tiles)
                         : quern_tensor_contiguous(w->scales, QUERN_U8, 3, scales);
    if (!view) return;
    const int64_t pairs = w->codes_view.shape[2];
    w->codes_view.shape[2] = w->codes_view.shape[1];
    w->codes_view.strides[2] = pairs;
    w->codes_view.shape[1] = pairs;
    w->codes_view.strides[1] = 1;
}

/* From every layout to the same bytes, and back to every layout that is written. */
static void repacked_weights_come_back(void **state)
{
    static weight from, to, expected;
    static uint8_t first[W_E * 2 * 2 * 2304], bytes[sizeof first];
    const int64_t shape[] = {W_E, test_repacked_bytes(W_N, W_K)};
    const quern_tensor repacked = quern_tensor_contiguous(bytes, QUERN_U8, 2, shape);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    for (int i = 0; i < 3 * 3; i++) {
        quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
        quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
        const bool k_major = i / 3 > 0, view = i / 3 == 2;
        make_weight(&from, k_major, view, i % 3, 9);
        p.b_codes = k_major && !view ? QUERN_NVFP4_CODES_K_MAJOR : QUERN_NVFP4_CODES_LINEAR;
        p.b_scales = (quern_nvfp4_scales_layout)(i % 3);
        t.b_codes = &from.codes_view;
        t.b_scales = &from.scales_view;
        t.b_repacked = &repacked;
        memset(bytes, 0xA5, sizeof bytes);
        if (quern_moe_prepack(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        if (i == 0) memcpy(first, bytes, sizeof first);
        assert_memory_equal(bytes, first, sizeof first);
        if (i % 3 == QUERN_NVFP4_LAYOUT_SWIZZLED) continue;
        make_weight(&to, k_major, view, i % 3, 0), make_weight(&expected, k_major, view, i % 3, 9);
        p.inverse = true;
        t.b_codes = &to.codes_view;
        t.b_scales = &to.scales_view;
        if (quern_moe_prepack(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        assert_memory_equal(to.codes, expected.codes, sizeof to.codes);
        assert_memory_equal(to.scales, expected.scales, sizeof to.scales);
    }
    quern_context_destroy(ctx);
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
        product_case c = product_make(&random, (product_a)(trial % PRODUCT_A_KINDS), false);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_float64),
        cmocka_unit_test(equal_bits_in_every_layout),
        cmocka_unit_test(rows_do_not_depend_on_others),
        cmocka_unit_test(many_experts),
        cmocka_unit_test(repacked_weights_come_back),
        cmocka_unit_test(gradients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
