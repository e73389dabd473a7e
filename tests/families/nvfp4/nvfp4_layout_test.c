/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_layout_test.c - the fused quantisers, MXFP4, swizzled scales and interleaving, and what they refuse.
 */
#include "cmocka_c11.h"
#include "nvfp4_case.h"
#include "nvfp4_golden.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                          test_layout layout)
{
    const int64_t shape[] = {rows, columns};
    return test_tensor_make(random, dtype, 2, shape, layout);
}

static void fill_bytes(test_tensor *t, test_random *random, int most)
{
    double *x = test_doubles(test_tensor_count(t));
    for (int64_t i = 0; i < test_tensor_count(t); i++) x[i] = (double)test_random_int(random, 0, most);
    for (int64_t i = 0; i < test_tensor_count(t); i++) { /* rows may be strided */
        int64_t at = 0, rest = i;
        for (int32_t d = t->view.ndim - 1; d >= 0; rest /= t->view.shape[d], d--)
            at += rest % t->view.shape[d] * t->view.strides[d];
        ((uint8_t *)t->view.data)[at] = (uint8_t)x[i];
    }
    free(x);
}

static uint8_t byte_at(const test_tensor *t, int64_t row, int64_t column)
{
    return ((const uint8_t *)t->view.data)[row * t->view.strides[0] + column];
}

static quern_context *any_context(test_random *random)
{
    return test_context(test_random_level(random), (int32_t)test_random_int(random, 1, 3));
}

typedef struct fused_case {
    quern_nvfp4_fused_quantize_params params;
    int64_t rows, width;
    bool part[2];
    float global[2];
    test_tensor x, codes[2], scales[2];
} fused_case;

static quern_status fused(quern_context *ctx, const fused_case *c)
{
    size_t bytes = 0;
    const quern_tensor global[2] = {
        quern_tensor_contiguous((void *)(uintptr_t)&c->global[0], QUERN_F32, 0, NULL),
        quern_tensor_contiguous((void *)(uintptr_t)&c->global[1], QUERN_F32, 0, NULL)};
    quern_nvfp4_fused_quantize_tensors t = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    t.x = &c->x.view;
    if (c->part[0]) {
        t.gate_codes = &c->codes[0].view;
        t.gate_scales = &c->scales[0].view;
        t.gate_global = &global[0];
    }
    if (c->part[1]) {
        t.up_codes = &c->codes[1].view;
        t.up_scales = &c->scales[1].view;
        t.up_global = &global[1];
    }
    quern_status status = quern_nvfp4_fused_quantize_workspace(ctx, &c->params, &t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_nvfp4_fused_quantize(ctx, NULL, &c->params, &t, w.data, w.bytes);
    test_workspace_close(&w);
    return status;
}

static fused_case make_fused(test_random *random, int trial)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    static const int64_t runs[] = {8, 8, 1, 16, 5};
    fused_case c = {.params = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT,
                    .rows = test_random_int(random, 0, 9),
                    .global = {0.01f, 0.02f}};
    c.params.profile = (quern_nvfp4_profile)(trial % 4);
    c.params.swiglu = test_random_one_in(random, 2);
    c.params.granularity = runs[test_random_int(random, 0, 4)];
    if (test_random_one_in(random, 2)) c.params.limit = 1;
    c.width = c.params.granularity *
              test_random_int(random, 1, test_random_one_in(random, 4) ? 3000 / c.params.granularity : 20);
    c.part[1] = !c.params.swiglu && !test_random_one_in(random, 3);
    c.part[0] = !c.part[1] || test_random_one_in(random, 2);
    c.x = matrix(random, dtypes[test_random_int(random, 0, 2)], c.rows, 2 * c.width,
                 (test_layout)(trial % TEST_LAYOUTS));
    if (trial % 3 == 2) nvfp4_case_fill(&c.x, random, true);
    else test_tensor_normal(&c.x, random, 4);
    for (int p = 0; p < 2; p++) {
        c.codes[p] = matrix(random, QUERN_U8, c.rows, (c.width + 15) / 16 * 8, TEST_STRIDED);
        c.scales[p] = matrix(random, QUERN_U8, c.rows, (c.width + 15) / 16, TEST_UNALIGNED);
    }
    return c;
}

static void free_fused(fused_case *c)
{
    test_tensor_free(&c->x);
    for (int p = 0; p < 2; p++) test_tensor_free(&c->codes[p]), test_tensor_free(&c->scales[p]);
}

/* What part p of row r quantises, in double. */
static double fused_value(const fused_case *c, const double *x, int64_t r, int64_t i, int p)
{
    const double g = x[2 * r * c->width + oracle_interleaved_at(i, false, c->params.granularity)];
    const double u = x[2 * r * c->width + oracle_interleaved_at(i, true, c->params.granularity)];
    if (!c->params.swiglu) return p == 0 ? g : u;
    const double limit = c->params.limit > 0 ? (double)c->params.limit : INFINITY, gate = fmin(g, limit);
    return gate / (1 + exp(-gate)) * fmax(-limit, fmin(limit, u));
}

/* The nearest codes of h under the scale that was written: another one only at a midpoint. */
static void check_fused_block(const fused_case *c, const double *h, int64_t n, int64_t r, int64_t b, int p)
{
    const float global =
        c->params.profile == QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS ? 1 / c->global[p] : c->global[p];
    const int scale = byte_at(&c->scales[p], r, b);
    float rounded[16] = {0};
    uint8_t exact[16];
    bool lost = c->params.swiglu; /* below what SwiGLU in f32 keeps: ModelOpt's scale may be that of zeros */
    for (int64_t i = 0; i < n; i++) {
        rounded[i] = (float)h[i];
        lost = lost && fabs(h[i]) < 0x1p-120;
    }
    const int expected = oracle_nvfp4_block((oracle_profile)c->params.profile, ORACLE_SCALES_RNE,
                                            c->global[p], rounded, exact);
    if (abs(scale - expected) > (c->params.swiglu ? 1 : 0) && !lost)
        fail_msg("row %lld block %lld: scale %d, expected %d", (long long)r, (long long)b, scale, expected);
    for (int64_t i = 0; i < 16; i++) {
        const int code = byte_at(&c->codes[p], r, 8 * b + i / 2) >> 4 * (i % 2) & 15;
        if (scale == expected && code == exact[i]) continue;
        const double y = fabs((double)rounded[i]) / ((double)oracle_e4m3(scale) * (double)global);
        const int low = code % 8 > 0 ? oracle_e2m1_nearest((float)(y * (1 - 1e-5))) : 0,
                  high = oracle_e2m1_nearest((float)(y * (1 + 1e-5)));
        if (!c->params.swiglu || code % 8 < low || code % 8 > high)
            fail_msg("row %lld: %g became %d under scale %d", (long long)r, h[i], code, scale);
    }
}

#ifndef QUERN_TEST_GPU /* which reads no contents on the host */
/* Two nonfinite values among those that are read: the error names the first, and nothing is written. */
static void refuse_nonfinite(quern_context *ctx, test_random *random, fused_case *c, double *x)
{
    int64_t first = INT64_MAX;
    char text[80];
    if (c->rows == 0 || c->width == 0) return;
    for (int i = 0; i < 2; i++) {
        const bool any = c->params.swiglu || c->part[0] == c->part[1];
        const int part = any ? (int)test_random_int(random, 0, 1) : c->part[1];
        const int64_t at =
            2 * c->width * test_random_int(random, 0, c->rows - 1) +
            oracle_interleaved_at(test_random_int(random, 0, c->width - 1), part, c->params.granularity);
        x[at] = test_random_one_in(random, 2) ? (double)NAN : -(double)INFINITY;
        first = at < first ? at : first;
    }
    test_tensor_set(&c->x, x);
    for (int p = 0; p < 2; p++) test_tensor_reset(&c->codes[p]), test_tensor_reset(&c->scales[p]);
    assert_int_equal(fused(ctx, c), QUERN_ERR_INVALID_ARGUMENT);
    snprintf(text, sizeof text, "x[%lld] (row %lld, column %lld) is ", (long long)first,
             (long long)(first / (2 * c->width)), (long long)(first % (2 * c->width)));
    if (strstr(quern_last_error(ctx), text) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), text);
    for (int p = 0; p < 2; p++)
        test_tensor_check_unchanged(&c->codes[p], "codes"),
            test_tensor_check_unchanged(&c->scales[p], "scales");
}

#endif

static void fused_quantisers(void **state)
{
    const uint64_t seed = test_seed("fused", 9);
    (void)state;
    for (int trial = 0; trial < test_trials(160); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = any_context(&random);
        fused_case c = make_fused(&random, trial);
        if (c.params.swiglu && c.params.profile == QUERN_NVFP4_PROFILE_HALFSTEP)
            c.params.profile = QUERN_NVFP4_PROFILE_RNE;
        double *x = test_tensor_get(&c.x);
        for (int64_t i = 0; i < c.rows * c.width && c.part[0] != c.part[1] && !c.params.swiglu;
             i++) /* the other part is not read */
            x[i / c.width * 2 * c.width +
              oracle_interleaved_at(i % c.width, c.part[0], c.params.granularity)] = (double)NAN;
        test_tensor_set(&c.x, x);
        if (fused(ctx, &c) != QUERN_OK) fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        for (int p = 0; p < 2; p++) {
            if (c.part[p])
                test_tensor_check_guards(&c.codes[p], "codes"),
                    test_tensor_check_guards(&c.scales[p], "scales");
            else
                test_tensor_check_unchanged(&c.codes[p], "codes"),
                    test_tensor_check_unchanged(&c.scales[p], "scales");
            for (int64_t r = 0; c.part[p] && r < c.rows; r++)
                for (int64_t b = 0; 16 * b < c.width; b++) {
                    double h[16] = {0};
                    const int64_t n = c.width - 16 * b < 16 ? c.width - 16 * b : 16;
                    for (int64_t i = 0; i < n; i++) h[i] = fused_value(&c, x, r, 16 * b + i, p);
                    check_fused_block(&c, h, n, r, b, p);
                }
        }
#ifndef QUERN_TEST_GPU
        refuse_nonfinite(ctx, &random, &c, x);
#endif
        free(x);
        free_fused(&c);
        quern_context_destroy(ctx);
    }
}

static void from_mxfp4(void **state)
{
    const uint64_t seed = test_seed("mxfp4", 10);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        quern_context *ctx = any_context(&random);
        const int64_t rows = test_random_int(&random, 0, 20), blocks = test_random_int(&random, 0, 12),
                      span = test_random_int(&random, 0, 30);
        const int base = (int)test_random_int(&random, 0, 252 - span);
        test_tensor mx = matrix(&random, QUERN_U8, rows, 16 * blocks, TEST_STRIDED),
                    exponents = matrix(&random, QUERN_U8, rows, blocks, TEST_STRIDED);
        test_tensor codes = matrix(&random, QUERN_U8, rows, 16 * blocks, TEST_STRIDED),
                    scales = matrix(&random, QUERN_U8, rows, 2 * blocks, TEST_UNALIGNED);
        uint8_t *expected = malloc((size_t)(rows * blocks * 32 + 1)),
                *powers = malloc((size_t)(rows * blocks + 1));
        uint8_t *expected_scales = malloc((size_t)(rows * blocks * 2 + 1));
        assert_true(expected != NULL && powers != NULL && expected_scales != NULL);
        fill_bytes(&mx, &random, trial % 5 == 0 ? 0 : 255);
        for (int64_t i = 0; i < rows * blocks; i++) {
            uint8_t *power =
                (uint8_t *)exponents.view.data + i / blocks * exponents.view.strides[0] + i % blocks;
            *power = powers[i] = (uint8_t)(base + test_random_int(&random, 0, span));
            for (int j = 0; j < 32; j++) {
                if (i % 7 == 3)
                    ((uint8_t *)mx.view.data)[i / blocks * mx.view.strides[0] + i % blocks * 16 + j / 2] =
                        0x80; /* zeros, one sign set */
                expected[32 * i + j] = byte_at(&mx, i / blocks, i % blocks * 16 + j / 2) >> 4 * (j % 2) & 15;
            }
        }
        float global, expected_global;
        int64_t rounded;
        const quern_tensor global_view = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL),
                           rounded_view = quern_tensor_contiguous(&rounded, QUERN_I64, 0, NULL);
        quern_nvfp4_from_mxfp4_params p = QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT;
        quern_nvfp4_from_mxfp4_tensors t = QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT;
        t.mx_codes = &mx.view;
        t.exponents = &exponents.view;
        t.codes = &codes.view;
        t.scales = &scales.view;
        t.global = &global_view;
        t.rounded_blocks = &rounded_view;
        if (quern_nvfp4_from_mxfp4(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK)
            fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        assert_int_equal(rounded, oracle_nvfp4_from_mxfp4(expected, powers, rows * blocks, expected_scales,
                                                          &expected_global));
        assert_memory_equal(&global, &expected_global, 4);
        test_tensor_check_guards(&codes, "codes"), test_tensor_check_guards(&scales, "scales");
        for (int64_t i = 0; i < rows * blocks * 32; i++)
            assert_int_equal(byte_at(&codes, i / (32 * blocks), i % (32 * blocks) / 2) >> 4 * (i % 2) & 15,
                             expected[i]);
        for (int64_t i = 0; i < rows * blocks * 2; i++)
            assert_int_equal(byte_at(&scales, i / (2 * blocks), i % (2 * blocks)), expected_scales[i]);
#ifndef QUERN_TEST_GPU
        if (rows * blocks > 0) {
            test_tensor_reset(&codes);
            *(uint8_t *)exponents.view.data = trial % 2 ? 0xFF : 0xFE;
            *(uint8_t *)mx.view.data = 0x7E;
            assert_int_equal(quern_nvfp4_from_mxfp4(ctx, NULL, &p, &t, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
            const char *says = trial % 2 ? "exponents[0] is the scale byte 0xFF: 0x00 to 0xFC"
                                         : "exponents[0] is the scale byte 0xFE: 0x00 to 0xFC";
            assert_non_null(strstr(quern_last_error(ctx), says));
            test_tensor_check_unchanged(&codes, "codes");
        }
#endif
        free(expected), free(powers), free(expected_scales);
        test_tensor_free(&mx), test_tensor_free(&exponents), test_tensor_free(&codes),
            test_tensor_free(&scales);
        quern_context_destroy(ctx);
    }
}

#ifndef QUERN_TEST_GPU
/* Every exponent with every magnitude, in the second block beside zeros: the value comes back exactly, or it
 * is no finite f32 and the call is refused. */
static void mxfp4_values_are_exact_or_refused(void **state)
{
    enum { CODES = 32, SCALES = 4 };
    quern_context *ctx = test_context(quern_cpu_level_detect(), 1);
    const int64_t bytes = CODES, blocks = 2, pairs = SCALES;
    uint8_t mx[CODES], powers[2], codes[CODES], scales[SCALES];
    float global;
    const quern_tensor mx_view = quern_tensor_contiguous(mx, QUERN_U8, 1, &bytes),
                       powers_view = quern_tensor_contiguous(powers, QUERN_U8, 1, &blocks),
                       codes_view = quern_tensor_contiguous(codes, QUERN_U8, 1, &bytes),
                       scales_view = quern_tensor_contiguous(scales, QUERN_U8, 1, &pairs),
                       global_view = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
    const quern_nvfp4_from_mxfp4_params p = QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT;
    quern_nvfp4_from_mxfp4_tensors t = QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT;
    t.mx_codes = &mx_view, t.exponents = &powers_view;
    t.codes = &codes_view, t.scales = &scales_view, t.global = &global_view;
    (void)state;
    for (int exponent = 0; exponent < 256; exponent++)
        for (int code = 0; code < 16; code++)
            for (int nibble = 0; nibble < 2; nibble++) {
                const int at = 16 + (code + exponent) % 16;
                const double value = ldexp(oracle_e2m1(code), exponent - 127);
                const bool accepted = exponent < 255 && fabs(value) <= FLT_MAX;
                memset(mx, 0, sizeof mx), memset(codes, 0x5a, sizeof codes);
                mx[at] = (uint8_t)(code << 4 * nibble);
                powers[0] = 0, powers[1] = (uint8_t)exponent;
                const quern_status status = quern_nvfp4_from_mxfp4(ctx, NULL, &p, &t, NULL, 0);
                if (status != (accepted ? QUERN_OK : QUERN_ERR_INVALID_ARGUMENT))
                    fail_msg("exponent 0x%02X, code %d: status %d", exponent, code, (int)status);
                if (accepted) {
                    const float back = oracle_e2m1(codes[at] >> 4 * nibble & 15) *
                                       oracle_e4m3(scales[2 + (at - 16) / 8]) * global;
                    if ((double)back != value)
                        fail_msg("exponent 0x%02X, code %d: %g is %g", exponent, code, (double)back, value);
                } else {
                    assert_non_null(strstr(quern_last_error(ctx), "exponents[1] is the scale byte 0xF"));
                    for (int i = 0; i < CODES; i++) assert_int_equal(codes[i], 0x5a);
                }
            }
    quern_context_destroy(ctx);
}

#endif

static quern_status swizzle(quern_context *ctx, bool inverse, bool weight, const quern_tensor *linear,
                            const quern_tensor *swizzled, const quern_tensor *tokens,
                            const quern_tensor *offsets)
{
    quern_nvfp4_swizzle_params p = QUERN_NVFP4_SWIZZLE_PARAMS_INIT;
    quern_nvfp4_swizzle_tensors t = QUERN_NVFP4_SWIZZLE_TENSORS_INIT;
    p.inverse = inverse;
    p.weight = weight;
    p.experts = tokens != NULL;
    t.linear = linear;
    t.swizzled = swizzled;
    t.tokens_per_expert = tokens;
    t.pad_row_offsets = offsets;
    return quern_nvfp4_swizzle(ctx, NULL, &p, &t, NULL, 0);
}

static void swizzle_there_and_back(void **state)
{
    test_random random = {test_seed("swizzle", 11)};
    (void)state;
    for (int trial = 0; trial < 60; trial++) {
        quern_context *ctx = any_context(&random);
        const int64_t rows = test_random_int(&random, 0, 300), columns = test_random_int(&random, 0, 21),
                      tiles = (columns + 3) / 4;
        const int64_t bytes = (rows + 127) / 128 * 512 * tiles;
        test_tensor linear = matrix(&random, QUERN_U8, rows, columns, TEST_STRIDED),
                    back = matrix(&random, QUERN_U8, rows, columns, TEST_STRIDED);
        test_tensor swizzled = test_tensor_make(&random, QUERN_U8, 1, &bytes, TEST_UNALIGNED);
        fill_bytes(&linear, &random, 255);
        assert_int_equal(swizzle(ctx, false, false, &linear.view, &swizzled.view, NULL, NULL), QUERN_OK);
        assert_int_equal(swizzle(ctx, true, false, &back.view, &swizzled.view, NULL, NULL), QUERN_OK);
        test_tensor_check_guards(&swizzled, "swizzled"), test_tensor_check_guards(&back, "linear");
        assert_true(test_tensor_same_bits(&linear, &back));
        int64_t sum = 0, sum_swizzled = 0;
        for (int64_t i = 0; i < rows * columns; i++) {
            const uint8_t byte = byte_at(&linear, i / columns, i % columns);
            assert_int_equal(
                ((uint8_t *)swizzled.view.data)[oracle_swizzled_at(i / columns, i % columns, columns)], byte);
            sum += byte;
        }
        for (int64_t i = 0; i < bytes; i++) sum_swizzled += ((uint8_t *)swizzled.view.data)[i];
        assert_int_equal(sum, sum_swizzled); /* padding is 0 */
        test_tensor_free(&linear), test_tensor_free(&back), test_tensor_free(&swizzled);
        quern_context_destroy(ctx);
    }
}

static void assembled_scales_match_the_vectors(void **state)
{
    quern_context *ctx = test_context(quern_cpu_level_detect(), 2);
    nvfp4_golden_file f = nvfp4_golden_open(QUERN_TEST_VECTORS, "nvfp4_weights_scales");
    quern_tensor raw, tokens, expected_offsets, raw3, assembled3;
    int64_t bytes;
    (void)state;
    assert_int_equal(quern_safetensors_get(f.file, "asm.raw2d", &raw), QUERN_OK);
    assert_int_equal(quern_safetensors_get(f.file, "asm.tokens_per_expert", &tokens), QUERN_OK);
    assert_int_equal(quern_safetensors_get(f.file, "asm.pad_row_offsets", &expected_offsets), QUERN_OK);
    const uint8_t *expected = nvfp4_golden_bytes(&f, "asm.", "assembled2d", &bytes);
    const int64_t experts = tokens.shape[0], entries = experts + 1, more = bytes + 700;
    uint8_t *out = malloc((size_t)more), *back = malloc((size_t)(raw.shape[0] * raw.shape[1]));
    int32_t offsets[8];
    assert_true(out != NULL && back != NULL);
    const quern_tensor offsets_view = quern_tensor_contiguous(offsets, QUERN_I32, 1, &entries),
                       back_view = quern_tensor_contiguous(back, QUERN_U8, 2, raw.shape);
    quern_tensor out_view = quern_tensor_contiguous(out, QUERN_U8, 1, &more);
    assert_int_equal(swizzle(ctx, false, false, &raw, &out_view, &tokens, &offsets_view), QUERN_OK);
    assert_memory_equal(out, expected, (size_t)bytes);
    for (int64_t i = bytes; i < more; i++) assert_int_equal(out[i], 0);
    assert_memory_equal(offsets, expected_offsets.data, (size_t)entries * 4);
    assert_int_equal(swizzle(ctx, true, false, &back_view, &out_view, &tokens, NULL), QUERN_OK);
    assert_memory_equal(back, raw.data, (size_t)(raw.shape[0] * raw.shape[1]));
    out_view.shape[0] = bytes - 1;
    assert_int_equal(swizzle(ctx, false, false, &raw, &out_view, &tokens, &offsets_view),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_safetensors_get(f.file, "asm.raw3d", &raw3), QUERN_OK);
    assert_int_equal(quern_safetensors_get(f.file, "asm.assembled3d", &assembled3), QUERN_OK);
    const quern_tensor weight_view = quern_tensor_contiguous(out, QUERN_U8, 2, assembled3.shape);
    assert_int_equal(swizzle(ctx, false, true, &raw3, &weight_view, NULL, NULL), QUERN_OK);
    assert_memory_equal(out, assembled3.data, (size_t)(assembled3.shape[0] * assembled3.shape[1]));
    free(out), free(back);
    nvfp4_golden_close(&f);
    quern_context_destroy(ctx);
}

static quern_status interleave(quern_context *ctx, bool inverse, int64_t q, const test_tensor *x,
                               const test_tensor *out)
{
    quern_nvfp4_interleave_params p = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
    quern_nvfp4_interleave_tensors t = QUERN_NVFP4_INTERLEAVE_TENSORS_INIT;
    p.inverse = inverse;
    p.granularity = q;
    t.x = &x->view;
    t.out = &out->view;
    return quern_nvfp4_interleave(ctx, NULL, &p, &t, NULL, 0);
}

static void interleave_there_and_back(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_U8, QUERN_F32, QUERN_BF16};
    test_random random = {test_seed("interleave", 12)};
    (void)state;
    for (int trial = 0; trial < 60; trial++) {
        quern_context *ctx = any_context(&random);
        const int64_t rows = test_random_int(&random, 0, 6), width = test_random_int(&random, 0, 70),
                      q = trial % 3 ? 8 : test_random_int(&random, 1, 20);
        const int64_t runs = 2 * q * ((width + q - 1) / q);
        test_tensor x = matrix(&random, dtypes[trial % 3], rows, 2 * width, TEST_STRIDED),
                    out = matrix(&random, dtypes[trial % 3], rows, runs, TEST_STRIDED);
        test_tensor back = matrix(&random, dtypes[trial % 3], rows, 2 * width, TEST_STRIDED);
        if (trial % 3 == 0) fill_bytes(&x, &random, 255);
        else test_tensor_normal(&x, &random, 1);
        assert_int_equal(interleave(ctx, false, q, &x, &out), QUERN_OK);
        assert_int_equal(interleave(ctx, true, q, &out, &back), QUERN_OK);
        test_tensor_check_guards(&out, "out"), test_tensor_check_guards(&back, "back");
        assert_true(test_tensor_same_bits(&x, &back));
        double *in = test_tensor_get(&x), *got = test_tensor_get(&out);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < runs / 2; i++)
                for (int part = 0; part < 2; part++)
                    assert_true(got[r * runs + oracle_interleaved_at(i, part, q)] ==
                                (i < width ? in[2 * r * width + part * width + i] : 0));
        free(in), free(got);
        test_tensor_free(&x), test_tensor_free(&out), test_tensor_free(&back);
        quern_context_destroy(ctx);
    }
}

/* A sentence that names the argument. */
static void expect_error(quern_context *ctx, quern_status status, const char *says)
{
    if (status != QUERN_ERR_INVALID_ARGUMENT) fail_msg("%s: status %d", says, (int)status);
    if (strstr(quern_last_error(ctx), says) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), says);
}

static void bad_calls(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_PORTABLE, 1);
    float x[64] = {1};
    size_t bytes;
    const int64_t shape[] = {2, 32};
    const quern_tensor x_view = quern_tensor_contiguous(x, QUERN_F32, 2, shape);
    (void)state;
    quern_nvfp4_fused_quantize_params fp = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_tensors ft = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    ft.x = &x_view;
    expect_error(ctx, quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, &bytes), "at least one is needed");
    fp.limit = -1;
    expect_error(ctx, quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, &bytes), "limit is -1");
    fp.limit = 0;
    fp.granularity = 3;
    expect_error(ctx, quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, &bytes), "x.shape[1] is 32");
    fp.granularity = 0;
    expect_error(ctx, quern_nvfp4_fused_quantize_workspace(ctx, &fp, &ft, &bytes), "granularity is 0");
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fused_quantisers),
        cmocka_unit_test(from_mxfp4),
#ifndef QUERN_TEST_GPU
        cmocka_unit_test(mxfp4_values_are_exact_or_refused),
#endif
        cmocka_unit_test(swizzle_there_and_back),
        cmocka_unit_test(assembled_scales_match_the_vectors),
        cmocka_unit_test(interleave_there_and_back),
        cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
