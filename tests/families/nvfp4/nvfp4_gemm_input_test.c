/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_gemm_input_test.c - what the grouped product refuses, and what it makes of rows that are not finite,
 * subnormal or huge. */
#include "cmocka_c11.h"
#include "levels.h"
#include "tensor.h"

#include <quern/moe.h>

#include <math.h>
#include <string.h>

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

static void bad_calls(void **state)
{
    static small_call s;
    (void)state;
    make_small(&s);
    s.scales[17] = 0x7F;
    refused(&s, "b_scales[17] is the scale byte 0x7F");
    s.t.a = NULL;
    refused(&s, "a is NULL, and so is a_codes");
    s.t.a_codes = &s.a_codes_view;
    refused(&s, "a_codes is given with a:");
    s.t.a = NULL;
    s.t.a_codes = &s.a_codes_view;
    refused(&s, "a_scales is NULL");
    s.t.a = NULL;
    s.t.a_codes = &s.a_codes_view;
    s.t.a_scales = &s.a_scales_view;
    s.a_scales[3] = 0x80;
    refused(&s, "a_scales[3] is the scale byte 0x80");
    s.t.b_codes = NULL;
    refused(&s, "b_codes is NULL, and so is b_repacked");
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
    for (int i = 1; i < 3; i++) {
        s.p.a8 = (quern_nvfp4_a8)i;
        s.a[5] = NAN;
        refused(&s, "a[5]");
    }
    s.p.a8 = (quern_nvfp4_a8)3;
    refused(&s, "a8 is 3");
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
    static const int64_t wide[] = {1, 2}, per_row[] = {3, 1}, per_expert = 3, bias[] = {1, 16}, tiles = 512,
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
    tensor.shape[1] = 15;
    s.t.bias = &tensor;
    refused(&s, "bias.shape[1] is 15: 16 is accepted");
    for (int i = 0; i < 2; i++) { /* by codes, too, what becomes of it would be a number */
        tensor.shape[1] = 16;
        values[7] = -INFINITY;
        s.t.bias = &tensor;
        s.t.c = NULL;
        s.t.c_codes = &s.c_codes_view;
        s.t.c_scales = &s.c_scales_view;
        s.t.c_global = &s.one;
        if (i > 0) with_codes(&s);
        refused(&s, "bias[7] (row 0, column 7) is -inf");
    }
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
    refused(&s, "a_global.shape[0] is 3: 1 is accepted");
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
        refused(&s, i == 0   ? "pad_row_offsets[0] is -128: a multiple of 128 from 0 to"
                    : i == 1 ? "pad_row_offsets[0] is 64: a multiple of 128 from 0 to"
                    : i == 2 ? "pad_row_offsets[0] is 128: a multiple of 128 from 0 to"
                             : "a_scales[511] is the scale byte 0xFF");
    }
    s.t.b_scales = &b_tiles;
    s.p.b_scales = QUERN_NVFP4_LAYOUT_SWIZZLED;
    refused(&s, "b_scales[511] is the scale byte 0xFF");
    s.t.c_old = &s.c_view;
    s.p.accumulate = true;
    refused(&s, "c_old is given with accumulate");
    s.t.c = NULL;
    s.t.c_old = &s.c_view;
    s.p.output = QUERN_NVFP4_OUTPUT_BF16;
    refused(&s, "c_old: dtype f32: output's bf16 is accepted");
}

/* Views whose rows share their memory: the sizes that follow from them overflow. */
static void sizes_beyond_64_bits(void **state)
{
    static small_call s;
    (void)state;
    make_small(&s);
    s.a_view.shape[1] = (int64_t)1 << 31;
    s.t.b_codes = s.t.b_scales = NULL;
    s.t.b_repacked = &s.repacked_view;
    s.p.n = 16;
    refused(&s, "a is [2, 2147483648]: below 2^31 rows, and K a multiple of 16 below 2^31");
    with_codes(&s);
    s.a_codes_view.shape[1] = (int64_t)1 << 40;
    refused(&s, "a_codes is [2, 1099511627776]");
    s.a_view.shape[0] = INT32_MAX;
    s.a_view.shape[1] = (int64_t)1 << 27;
    s.a_view.strides[0] = s.codes_view.strides[1] = 0;
    s.codes_view.shape[1] = (int64_t)1 << 26;
    refused(&s, "T is 2147483647, K 134217728 and N 16: up to 2^56 numbers");
    with_two_experts(&s, 1, 2);
    s.codes_view.shape[0] = s.offsets.shape[0] = (int64_t)1 << 50;
    refused(&s, "E is 1125899906842624, K 32 and N 16: up to 2^56 bytes of weights");
}

static void repacked_bytes_are_the_devices(void **state)
{
    static const int64_t bad[][2] = {{(int64_t)1 << 31, 1}, {1, INT64_MAX}, {-1, 1}};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    int64_t bytes = 7;
    (void)state;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(quern_nvfp4_repacked_bytes(ctx, QUERN_CPU, 0, bad[i][0], bad[i][1], &bytes),
                         QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(ctx), "0 to 2147483647 each is accepted"));
    }
    assert_int_equal(quern_nvfp4_repacked_bytes(ctx, (quern_device)9, 0, 1, 1, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_nvfp4_repacked_bytes(ctx, QUERN_CUDA, 0, 1, 1, &bytes) == QUERN_OK, false);
    assert_int_equal(quern_nvfp4_repacked_bytes(NULL, QUERN_CPU, 0, 1, 1, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(bytes, 7);
    assert_int_equal(test_repacked_bytes(65, 65), 4 * 2304);
    quern_context_destroy(ctx);
}

/* Runs the product at a level; with two experts each row is the only one of its own. */
static void multiply(small_call *s, quern_cpu_level level)
{
    size_t bytes = 0;
    quern_context *ctx = test_context(level, 1);
    if (quern_nvfp4_gemm_workspace(ctx, &s->p, &s->t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_nvfp4_gemm(ctx, NULL, &s->p, &s->t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    quern_context_destroy(ctx);
}

static void fill_weights(small_call *s, uint8_t codes, uint8_t scale)
{
    memset(s->codes, codes, sizeof s->codes);
    memset(s->scales, scale, sizeof s->scales);
}

/* NaN or an infinity in a row of A reaches all of that row, and no other, whatever the codes it meets, among
 * other rows and alone. */
static void what_is_not_finite_stays_in_its_row(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    const double values[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    const int64_t shape[] = {2, 32};
    test_random random = {1};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < 3 * 3 * 2 * 2 * 2; i++) {
            static small_call s;
            const double value = values[i % 3], rest = i / 36; /* of the row: 0 or 1 */
            const bool zeros = i / 18 % 2;
            double a[64];
            test_tensor t = test_tensor_make(&random, dtypes[i / 3 % 3], 2, shape, TEST_UNALIGNED);
            for (int k = 0; k < 64; k++) a[k] = k == 3 ? value : rest;
            test_tensor_set(&t, a);
            make_small(&s);
            if (i / 9 % 2) with_two_experts(&s, 1, 2);
            fill_weights(&s, zeros ? 0 : 0x22, zeros ? 0 : 0x38); /* zeros, or ones */
            s.t.a = &t.view;
            multiply(&s, level);
            for (int n = 0; n < 32; n++) {
                const bool whole = n >= 16                 ? (double)s.c[n] == (zeros ? 0 : 32 * rest)
                                   : zeros || isnan(value) ? isnan(s.c[n])
                                                           : (double)s.c[n] == value;
                if (!whole)
                    fail_msg("%s, %s: %g beside %g is %g in row %d", quern_cpu_level_name(level),
                             quern_dtype_name(t.view.dtype), value, rest, (double)s.c[n], n / 16);
            }
            test_tensor_free(&t);
        }
}

/* int8 rows so small that their scale, a 127th of the largest magnitude, is coarse or 0. */
static void int8_rows_of_subnormal_numbers(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        static small_call s;
        make_small(&s);
        fill_weights(&s, 0x22, 0x38); /* ones */
        s.p.a8 = QUERN_NVFP4_A8_INT8;
        s.t.a_global = &s.one;
        s.global = 0x1p120f;
        for (int k = 0; k < 64; k++) s.a[k] = -0x1p-149f;
        s.a[0] = 190 * 0x1p-149f; /* of a scale of 2^-149: 127 at most */
        multiply(&s, level);
        for (int n = 0; n < 32; n++) assert_true(s.c[n] == (n < 16 ? (127 - 31) * 0x1p-29f : 0));
    }
}

/* Numbers below 2^-126 are numbers in a row of A, which a global may bring up again. */
static void rows_of_subnormal_numbers(void **state)
{
    const int64_t shape[] = {2, 32};
    test_random random = {1};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < 4; i++) {
            float first[32];
            for (int small = 0; small < 2; small++) {
                static small_call s;
                double a[64];
                test_tensor t =
                    test_tensor_make(&random, i % 2 ? QUERN_BF16 : QUERN_F32, 2, shape, TEST_UNALIGNED);
                for (int k = 0; k < 64; k++) a[k] = ldexp(k % 7 - 3, small ? -131 : 0);
                test_tensor_set(&t, a);
                make_small(&s);
                if (i / 2) with_two_experts(&s, 1, 2);
                for (int k = 0; k < 256; k++) s.codes[k] = (uint8_t)(37 * k + 11);
                for (int k = 0; k < 32; k++) s.scales[k] = (uint8_t)(0x36 + k % 5);
                s.t.a = &t.view;
                s.t.a_global = &s.one;
                s.global = small ? 0x1p100f : 1;
                multiply(&s, level);
                for (int n = 0; n < 32; n++) {
                    if (small == 0) first[n] = s.c[n];
                    assert_true(s.c[n] != 0 && s.c[n] == ldexpf(first[n], small ? -31 : 0));
                }
                test_tensor_free(&t);
            }
        }
}

/* Powers of two in a row of A come out as powers of two, also where sums of a block could overflow: of f32
 * among other rows, of bf16 alone. */
static void rows_of_any_magnitude(void **state)
{
    static const int powers[] = {0, 112, 64, 60, -100};
    const int64_t shape[] = {2, 32};
    test_random random = {1};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            float first[16];
            for (int power = 0; power < 5; power++) {
                static small_call s;
                double a[64] = {0};
                test_tensor t =
                    test_tensor_make(&random, bf16 ? QUERN_BF16 : QUERN_F32, 2, shape, TEST_UNALIGNED);
                for (int i = 0; i < 16; i++) a[i] = ldexp(i % 7 - 3 + 0.37 * i, powers[power]);
                test_tensor_set(&t, a);
                make_small(&s);
                if (bf16) with_two_experts(&s, 1, 2);
                for (int i = 0; i < 256; i++) s.codes[i] = (uint8_t)(37 * i + 11);
                for (int i = 0; i < 32; i++) s.scales[i] = (uint8_t)(0x36 + i % 5);
                s.t.a = &t.view;
                multiply(&s, level);
                for (int i = 0; i < 16; i++) {
                    if (power == 0) first[i] = s.c[i];
                    assert_true(s.c[i] != 0 && s.c[i] == ldexpf(first[i], powers[power]));
                }
                test_tensor_free(&t);
            }
        }
}

/* One of the two products of a call, whose rows are `a`: forward of A, backward of d_out. Whole rows of 16 or
 * 32 are filled. */
static void multiply_by_global(const test_tensor *a, bool backward, bool alone, float global,
                               quern_cpu_level level, float out[32])
{
    static small_call s;
    quern_tensor d_a;
    const int64_t shape[] = {2, 32};
    float gradient[64];
    size_t bytes = 0;
    make_small(&s);
    if (alone) with_two_experts(&s, 1, 2);
    for (int i = 0; i < 256; i++) s.codes[i] = (uint8_t)(37 * i + 11);
    for (int i = 0; i < 32; i++) s.scales[i] = (uint8_t)(0x76 + i % 5);
    s.t.a_global = &s.one;
    s.global = global;
    if (!backward) {
        s.t.a = &a->view;
        multiply(&s, level);
        memcpy(out, s.c, 32 * sizeof *out);
        return;
    }
    d_a = quern_tensor_contiguous(gradient, QUERN_F32, 2, shape);
    s.t.a = &s.a_view, s.t.c = NULL;
    s.t.d_c = &a->view, s.t.d_a = &d_a;
    quern_context *ctx = test_context(level, 1);
    if (quern_nvfp4_gemm_backward_workspace(ctx, &s.p, &s.t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_nvfp4_gemm_backward(ctx, NULL, &s.p, &s.t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    quern_context_destroy(ctx);
    for (int i = 0; i < 32; i++) out[i] = gradient[2 * i];
}

/* A global may bring back sums that f32 does not hold. All is scaled by powers of two, so the bits tell. */
static void a_small_global_brings_huge_sums_back(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16};
    static const int powers[] = {0, 60, 100, 112, 118, 122, 124};
    test_random random = {1};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < 8; i++) {
            const bool backward = i / 2 % 2, alone = i / 4;
            const int64_t columns = backward ? 16 : 32, shape[] = {2, columns};
            float first[32], out[32];
            for (int power = 0; power < 7; power++) {
                double a[64];
                test_tensor t = test_tensor_make(&random, dtypes[i % 2], 2, shape, TEST_UNALIGNED);
                for (int k = 0; k < 2 * columns; k++) a[k] = ldexp(k % 7 - 3 + 0.2 * (k % 16), powers[power]);
                test_tensor_set(&t, a);
                multiply_by_global(&t, backward, alone, 0x1p-60f, level, out);
                if (power == 0) memcpy(first, out, sizeof first);
                for (int n = 0; n < 32; n++)
                    if (out[n] == 0 || out[n] != ldexpf(first[n], powers[power]))
                        fail_msg("%s, %s%s%s, times 2^%d: %g, %g times it is right",
                                 quern_cpu_level_name(level), quern_dtype_name(dtypes[i % 2]),
                                 backward ? ", backward" : "", alone ? ", alone" : "", powers[power],
                                 (double)out[n], (double)first[n]);
                test_tensor_free(&t);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_calls),
        cmocka_unit_test(bad_operands),
        cmocka_unit_test(sizes_beyond_64_bits),
        cmocka_unit_test(repacked_bytes_are_the_devices),
        cmocka_unit_test(what_is_not_finite_stays_in_its_row),
        cmocka_unit_test(int8_rows_of_subnormal_numbers),
        cmocka_unit_test(rows_of_subnormal_numbers),
        cmocka_unit_test(rows_of_any_magnitude),
        cmocka_unit_test(a_small_global_brings_huge_sums_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
