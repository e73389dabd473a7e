/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4_product.h"

#include "cmocka_c11.h"
#include "op_case.h"
#include "oracle/linear.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *allocate(int64_t bytes)
{
    void *p = calloc((size_t)bytes + 1, 1);
    if (p == NULL) fail_msg("the test is out of memory");
    return p;
}

static uint8_t *random_bytes(test_random *random, int64_t count, int low, int high)
{
    uint8_t *bytes = allocate(count);
    for (int64_t i = 0; i < count; i++) bytes[i] = (uint8_t)test_random_int(random, low, high);
    return bytes;
}

static double *random_globals(test_random *random, int64_t count)
{
    double *values = test_doubles(count);
    for (int64_t i = 0; i < count; i++)
        values[i] =
            (double)(float)ldexp(1 + test_random_uniform(random), (int)test_random_int(random, -9, -4));
    return values;
}

/* Values of any magnitude that sums of them leave within the dtype. */
static void fill_wide(test_tensor *t, test_random *random)
{
    const int64_t count = test_tensor_count(t);
    const int most = t->view.dtype == QUERN_F16 ? 8 : 50;
    double *x = test_doubles(count);
    for (int64_t i = 0; i < count; i++)
        x[i] = ldexp(test_random_normal(random), (int)test_random_int(random, -most, most));
    test_tensor_set(t, x);
    free(x);
}

static void make_a(product_case *c, test_random *random, bool wide)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    const int64_t shape[] = {c->tokens, c->k};
    const quern_dtype dtype = dtypes[c->kind >= PRODUCT_A_FP8 ? test_random_int(random, 0, 2) : c->kind % 3];
    c->a_row_scale = test_doubles(c->tokens);
    for (int64_t t = 0; t < c->tokens; t++) c->a_row_scale[t] = 1;
    if (c->kind == PRODUCT_A_NVFP4) {
        c->a_codes = random_bytes(random, c->tokens * c->k, 0, 15);
        c->a_scales = random_bytes(random, c->tokens * c->k / 16, 0, 126);
        c->a_values = test_doubles(c->tokens * c->k);
        for (int64_t i = 0; i < c->tokens * c->k; i++)
            c->a_values[i] = (double)oracle_e2m1(c->a_codes[i]) * (double)oracle_e4m3(c->a_scales[i / 16]);
        return;
    }
    c->a =
        test_tensor_make(random, dtype, 2, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    if (wide) fill_wide(&c->a, random);
    else test_tensor_normal(&c->a, random, 1);
    c->a_values = test_tensor_get(&c->a);
    for (int64_t i = 0; c->kind == PRODUCT_A_FP8 && i < c->tokens * c->k;) {
        const int64_t left = c->k - i % c->k, n = left < 128 ? left : 128;
        oracle_linear_round(c->a_values + i, n);
        i += n;
    }
    for (int64_t t = 0; c->kind == PRODUCT_A_INT8 && t < c->tokens; t++) {
        float amax = 0;
        for (int64_t k = 0; k < c->k; k++) amax = fmaxf(amax, fabsf((float)c->a_values[t * c->k + k]));
        const float scale = amax > 0 ? amax / 127 : 1;
        for (int64_t k = 0; k < c->k; k++)
            c->a_values[t * c->k + k] = (double)rintf((float)c->a_values[t * c->k + k] / scale);
        c->a_row_scale[t] = (double)scale;
    }
}

static void make_epilogue(product_case *c, test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    c->c_dtype = dtypes[test_random_int(random, 0, 2)];
    c->quantised = test_random_one_in(random, 4);
    for (int e = 0; e < 5; e++) c->c_global[e] = 0.3f - 0.05f * (float)e;
    c->c_global_by_expert = c->experts % 2 == 0;
    c->params.profile =
        test_random_one_in(random, 2) ? QUERN_NVFP4_PROFILE_RNE : QUERN_NVFP4_PROFILE_MODELOPT;
    if (test_random_one_in(random, 2)) c->bias = random_globals(random, c->experts * c->n);
    if (c->params.activation == QUERN_NVFP4_ACTIVATION_NONE && !c->quantised &&
        test_random_one_in(random, 2)) {
        c->params.accumulate = true;
        c->old = test_doubles(c->tokens * c->n);
        for (int64_t i = 0; i < c->tokens * c->n; i++)
            c->old[i] = test_round(c->c_dtype, test_random_normal(random));
    }
}

product_case product_make(test_random *random, product_a kind, bool wide)
{
    static const int64_t runs[] = {8, 8, 1, 16, 32};
    product_case c = {.kind = kind,
                      .wide = wide,
                      .params = QUERN_NVFP4_GEMM_PARAMS_INIT,
                      .experts = test_random_int(random, 1, 5)};
    const bool paired = test_random_one_in(random, 2);
    c.params.a8 = kind == PRODUCT_A_INT8  ? QUERN_NVFP4_A8_INT8
                  : kind == PRODUCT_A_FP8 ? QUERN_NVFP4_A8_FP8
                                          : QUERN_NVFP4_A8_NONE;
    c.params.a_global_per = (quern_nvfp4_global)test_random_int(random, 0, 2);
    c.params.granularity = runs[test_random_int(random, 0, 4)];
    c.n = paired ? 2 * c.params.granularity * test_random_int(random, 1, 1 + 80 / c.params.granularity)
                 : test_random_int(random, 1, 150);
    c.k =
        16 * (test_random_one_in(random, 4) ? test_random_int(random, 0, 3) : test_random_int(random, 1, 40));
    c.tokens =
        test_random_one_in(random, 12) ? test_random_int(random, 380, 800) : test_random_int(random, 0, 24);
    if (paired && test_random_one_in(random, 2)) {
        c.params.activation = QUERN_NVFP4_ACTIVATION_SWIGLU;
        if (test_random_one_in(random, 2)) {
            c.params.limit = 2;
            c.params.alpha = 1.702f;
            c.params.beta = 1;
        }
    }
    c.ends = allocate(c.experts * (int64_t)sizeof *c.ends);
    for (int64_t e = 0, at = 0; e < c.experts; e++) {
        if (!test_random_one_in(random, 3))
            at = test_random_one_in(random, 2) ? c.tokens : test_random_int(random, at, c.tokens);
        c.ends[e] = (int32_t)at;
    }
    c.b_codes = random_bytes(random, c.experts * c.k * c.n, 0, 15);
    c.b_scales = random_bytes(random, c.experts * c.k / 16 * c.n, test_random_one_in(random, 2) ? 0 : 30,
                              test_random_one_in(random, 2) ? 126 : 60);
    make_a(&c, random, wide);
    if (!test_random_one_in(random, 4)) {
        const int64_t counts[] = {1, c.experts, c.tokens};
        c.a_global = random_globals(random, counts[c.params.a_global_per]);
    }
    c.b_parts = (int)test_random_int(random, 0, paired ? 2 : 1);
    if (!test_random_one_in(random, 4))
        c.b_global = random_globals(random, c.b_parts == 0 ? 1 : c.experts * c.b_parts);
    make_epilogue(&c, random);
    return c;
}

void product_free(product_case *c)
{
    if (c->a.buffer != NULL) test_tensor_free(&c->a);
    free(c->ends), free(c->b_codes), free(c->b_scales), free(c->a_codes), free(c->a_scales),
        free(c->a_values), free(c->a_row_scale);
    free(c->a_global), free(c->b_global), free(c->bias), free(c->old);
}

int64_t product_out_columns(const product_case *c)
{
    return c->params.activation == QUERN_NVFP4_ACTIVATION_SWIGLU ? c->n / 2 : c->n;
}

/* A call's tensors. */
enum {
    A_CODES,
    A_SCALES,
    PAD,
    A_GLOBAL,
    B_CODES,
    B_SCALES,
    REPACKED,
    B_GLOBAL,
    OFFSETS,
    BIAS,
    C,
    C_CODES,
    C_SCALES,
    TENSORS
};

static test_layout any_layout(test_random *random)
{
    return (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
}

static uint8_t *byte_at(const test_tensor *t, int64_t i)
{
    int64_t at = 0;
    for (int32_t d = t->view.ndim - 1; d >= 0; i /= t->view.shape[d], d--)
        at += i % t->view.shape[d] * t->view.strides[d];
    return (uint8_t *)t->view.data + at;
}

static void make_a_codes(const product_case *c, test_random *random, test_tensor t[TENSORS], bool swizzled)
{
    const int64_t codes[] = {c->tokens, c->k / 2}, scales[] = {c->tokens, c->k / 16},
                  entries = c->experts + 1, row = (c->k / 16 + 3) / 4 * 4;
    const int64_t bytes = (c->tokens + 128 * c->experts) / 128 * 128 * row;
    t[A_CODES] = test_tensor_make(random, QUERN_U8, 2, codes, any_layout(random));
    for (int64_t i = 0; i < c->tokens * c->k / 2; i++)
        *byte_at(&t[A_CODES], i) = (uint8_t)(c->a_codes[2 * i] | c->a_codes[2 * i + 1] << 4);
    t[A_SCALES] =
        test_tensor_make(random, QUERN_U8, swizzled ? 1 : 2, swizzled ? &bytes : scales, any_layout(random));
    for (int64_t i = 0; !swizzled && i < c->tokens * c->k / 16; i++)
        *byte_at(&t[A_SCALES], i) = c->a_scales[i];
    if (!swizzled) return;
    memset(t[A_SCALES].view.data, 0, (size_t)bytes);
    int32_t *pad = allocate(entries * 4), at = 0;
    for (int64_t e = 0, first = 0; e < c->experts; first = c->ends[e++]) {
        pad[e] = at;
        for (int64_t r = first; r < c->ends[e]; r++)
            for (int64_t b = 0; b < c->k / 16; b++)
                ((uint8_t *)t[A_SCALES].view.data)[at * row + oracle_swizzled_at(r - first, b, c->k / 16)] =
                    c->a_scales[r * c->k / 16 + b];
        at += (int32_t)((c->ends[e] - first + 127) / 128 * 128);
    }
    pad[c->experts] = at;
    t[PAD] = test_tensor_make(random, QUERN_I32, 1, &entries, TEST_UNALIGNED);
    test_tensor_set_i32(&t[PAD], pad);
    free(pad);
}

/* Where scale (b, n) of an expert stands in a tensor of the layout. */
static uint8_t *b_scale_at(const product_case *c, const test_tensor *t, quern_nvfp4_scales_layout layout,
                           int64_t e, int64_t b, int64_t n)
{
    const int64_t blocks = c->k / 16;
    if (layout == QUERN_NVFP4_LAYOUT_SWIZZLED)
        return (uint8_t *)t->view.data + e * t->view.strides[0] + oracle_swizzled_at(n, b, blocks);
    if (layout == QUERN_NVFP4_LAYOUT_K_MAJOR) return byte_at(t, (e * c->n + n) * blocks + b);
    return byte_at(t, (e * blocks + b) * c->n + n);
}

static void make_b_scales(const product_case *c, test_random *random, test_tensor t[TENSORS],
                          quern_nvfp4_scales_layout layout)
{
    const bool swizzled = layout == QUERN_NVFP4_LAYOUT_SWIZZLED,
               k_major = layout == QUERN_NVFP4_LAYOUT_K_MAJOR;
    const int64_t blocks = c->k / 16,
                  scales[] = {c->experts, k_major ? c->n : blocks, k_major ? blocks : c->n},
                  tiles[] = {c->experts, (c->n + 127) / 128 * 128 * ((blocks + 3) / 4 * 4)};
    t[B_SCALES] =
        test_tensor_make(random, QUERN_U8, swizzled ? 2 : 3, swizzled ? tiles : scales, any_layout(random));
    for (int64_t i = 0; swizzled && i < test_tensor_count(&t[B_SCALES]); i++) *byte_at(&t[B_SCALES], i) = 0;
    for (int64_t e = 0; e < c->experts; e++)
        for (int64_t n = 0; n < c->n; n++)
            for (int64_t b = 0; b < blocks; b++)
                *b_scale_at(c, &t[B_SCALES], layout, e, b, n) = c->b_scales[(e * blocks + b) * c->n + n];
}

static void make_b_codes(const product_case *c, test_random *random, test_tensor t[TENSORS],
                         product_layout layout)
{
    const bool k_major = layout == PRODUCT_K_MAJOR || layout == PRODUCT_TRANSPOSED;
    const int64_t codes[] = {c->experts, k_major ? c->n : c->k / 2, k_major ? c->k / 2 : c->n};
    const bool contiguous = layout == PRODUCT_TRANSPOSED;
    t[B_CODES] =
        test_tensor_make(random, QUERN_U8, 3, codes, contiguous ? TEST_CONTIGUOUS : any_layout(random));
    for (int64_t e = 0; e < c->experts; e++)
        for (int64_t n = 0; n < c->n; n++)
            for (int64_t p = 0; p < c->k / 2; p++) {
                const uint8_t *pair = c->b_codes + (e * c->k + 2 * p) * c->n + n;
                *byte_at(&t[B_CODES],
                         k_major ? (e * c->n + n) * c->k / 2 + p : (e * c->k / 2 + p) * c->n + n) =
                    (uint8_t)(pair[0] | pair[c->n] << 4);
            }
    if (layout != PRODUCT_TRANSPOSED) return;
    quern_tensor *view = &t[B_CODES].view; /* [E, K/2, N] of [E, N, K/2] */
    view->shape[1] = c->k / 2;
    view->strides[1] = 1;
    view->shape[2] = c->n;
    view->strides[2] = c->k / 2;
}

/* Scales as the layout of the codes has them, or in any order. */
static quern_nvfp4_scales_layout scales_of(test_random *random, product_layout layout)
{
    if (layout == PRODUCT_REPACKED) return QUERN_NVFP4_LAYOUT_LINEAR;
    if (test_random_one_in(random, 2)) return (quern_nvfp4_scales_layout)test_random_int(random, 0, 2);
    return layout == PRODUCT_LINEAR     ? QUERN_NVFP4_LAYOUT_LINEAR
           : layout == PRODUCT_SWIZZLED ? QUERN_NVFP4_LAYOUT_SWIZZLED
                                        : QUERN_NVFP4_LAYOUT_K_MAJOR;
}

static void repack(const product_case *c, quern_context *ctx, test_random *random, test_tensor t[TENSORS])
{
    const int64_t shape[] = {c->experts, test_repacked_bytes(c->n, c->k)};
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors all = QUERN_MOE_PREPACK_TENSORS_INIT;
    t[REPACKED] = test_tensor_make(random, QUERN_U8, 2, shape, any_layout(random));
    all.b_codes = &t[B_CODES].view;
    all.b_scales = &t[B_SCALES].view;
    all.b_repacked = &t[REPACKED].view;
    if (quern_moe_prepack(ctx, NULL, &p, &all, NULL, 0) != QUERN_OK)
        fail_msg("prepack: %s", quern_last_error(ctx));
    test_tensor_check_guards(&t[REPACKED], "b_repacked");
    test_tensor codes = test_tensor_copy(&t[B_CODES]), scales = test_tensor_copy(&t[B_SCALES]);
    test_tensor_reset(&t[B_CODES]), test_tensor_reset(&t[B_SCALES]);
    p.inverse = true;
    if (quern_moe_prepack(ctx, NULL, &p, &all, NULL, 0) != QUERN_OK)
        fail_msg("unpack: %s", quern_last_error(ctx));
    assert_true(test_tensor_same_bits(&codes, &t[B_CODES]) && test_tensor_same_bits(&scales, &t[B_SCALES]));
    test_tensor_free(&codes), test_tensor_free(&scales);
}

static test_tensor f32_tensor(test_random *random, quern_dtype dtype, int32_t ndim, int64_t first,
                              int64_t second, const double *values)
{
    const int64_t shape[] = {first, second};
    test_tensor t = test_tensor_make(random, dtype, ndim, shape, any_layout(random));
    test_tensor_set(&t, values);
    return t;
}

static void make_rest(const product_case *c, test_random *random, test_tensor t[TENSORS])
{
    const int64_t out = product_out_columns(c), blocks = (out + 15) / 16,
                  counts[] = {1, c->experts, c->tokens};
    const int64_t c_shape[] = {c->tokens, out}, codes[] = {c->tokens, 8 * blocks},
                  scales[] = {c->tokens, blocks};
    const bool by_row = c->params.a_global_per == QUERN_NVFP4_GLOBAL_ROW;
    const int32_t column = by_row && test_random_one_in(random, 2); /* [T, 1] */
    if (c->a_global != NULL)
        t[A_GLOBAL] =
            f32_tensor(random, QUERN_F32, column + (c->params.a_global_per != QUERN_NVFP4_GLOBAL_TENSOR),
                       counts[c->params.a_global_per], 1, c->a_global);
    if (c->b_global != NULL)
        t[B_GLOBAL] = f32_tensor(random, QUERN_F32, c->b_parts, c->experts, 2, c->b_global);
    if (c->bias != NULL) t[BIAS] = f32_tensor(random, QUERN_F32, 2, c->experts, c->n, c->bias);
    t[OFFSETS] = test_tensor_make(random, QUERN_I32, 1, &c->experts, TEST_UNALIGNED);
    test_tensor_set_i32(&t[OFFSETS], c->ends);
    if (c->quantised) {
        t[C_CODES] = test_tensor_make(random, QUERN_U8, 2, codes, any_layout(random));
        t[C_SCALES] = test_tensor_make(random, QUERN_U8, 2, scales, any_layout(random));
    } else {
        t[C] = test_tensor_make(random, c->c_dtype, 2, c_shape, any_layout(random));
        if (c->old != NULL) test_tensor_set(&t[C], c->old);
    }
}

static product_result read_result(const product_case *c, const test_tensor t[TENSORS])
{
    const int64_t out = product_out_columns(c), blocks = (out + 15) / 16;
    product_result r = {0};
    if (!c->quantised) {
        test_tensor_check_guards(&t[C], "c");
        r.c = test_tensor_get(&t[C]);
        return r;
    }
    test_tensor_check_guards(&t[C_CODES], "c_codes"), test_tensor_check_guards(&t[C_SCALES], "c_scales");
    r.codes = allocate(c->tokens * 16 * blocks);
    r.scales = allocate(c->tokens * blocks);
    for (int64_t i = 0; i < c->tokens * 16 * blocks; i++)
        r.codes[i] = *byte_at(&t[C_CODES], i / 2) >> 4 * (i % 2) & 15;
    for (int64_t i = 0; i < c->tokens * blocks; i++) r.scales[i] = *byte_at(&t[C_SCALES], i);
    return r;
}

static const quern_tensor *view(const test_tensor *t)
{
    return t->buffer != NULL ? &t->view : NULL;
}

/* The case's operands in one layout; `all` views them. */
static quern_nvfp4_gemm_params bind(const product_case *c, quern_context *ctx, test_random *random,
                                    product_layout layout, test_tensor t[TENSORS],
                                    quern_nvfp4_gemm_tensors *all)
{
    quern_nvfp4_gemm_params p = c->params;
    *all = (quern_nvfp4_gemm_tensors)QUERN_NVFP4_GEMM_TENSORS_INIT;
    if (c->kind == PRODUCT_A_NVFP4) make_a_codes(c, random, t, layout == PRODUCT_SWIZZLED);
    make_b_codes(c, random, t, layout);
    p.b_scales = scales_of(random, layout);
    make_b_scales(c, random, t, p.b_scales);
    make_rest(c, random, t);
    if (layout == PRODUCT_REPACKED) {
        repack(c, ctx, random, t);
        p.n = c->n;
    }
    if (layout == PRODUCT_K_MAJOR) p.b_codes = QUERN_NVFP4_CODES_K_MAJOR;
    all->a = view(&c->a);
    all->a_codes = view(&t[A_CODES]);
    all->a_scales = view(&t[A_SCALES]);
    all->pad_row_offsets = view(&t[PAD]);
    all->a_global = view(&t[A_GLOBAL]);
    all->b_global = view(&t[B_GLOBAL]);
    all->offsets = view(&t[OFFSETS]);
    all->bias = view(&t[BIAS]);
    all->b_repacked = view(&t[REPACKED]);
    if (layout != PRODUCT_REPACKED) {
        all->b_codes = view(&t[B_CODES]);
        all->b_scales = view(&t[B_SCALES]);
    }
    p.prepack = layout != PRODUCT_REPACKED && test_random_one_in(random, 3);
    return p;
}

static void free_all(test_tensor t[TENSORS])
{
    for (int i = 0; i < TENSORS; i++)
        if (t[i].buffer != NULL) test_tensor_free(&t[i]);
}

product_result product_run(const product_case *c, quern_context *ctx, test_random *random,
                           product_layout layout)
{
    test_tensor t[TENSORS] = {{.buffer = NULL}}, old = {.buffer = NULL};
    quern_nvfp4_gemm_tensors all;
    const quern_tensor c_global = quern_tensor_contiguous((void *)(uintptr_t)c->c_global, QUERN_F32,
                                                          c->c_global_by_expert, &c->experts);
    quern_nvfp4_gemm_params p = bind(c, ctx, random, layout, t, &all);
    all.c = view(&t[C]);
    all.c_codes = view(&t[C_CODES]);
    all.c_scales = view(&t[C_SCALES]);
    if (c->quantised) all.c_global = &c_global;
    if (c->old != NULL && test_random_one_in(random, 2)) { /* not in place */
        old = test_tensor_make(random, c->c_dtype, 2, t[C].view.shape, any_layout(random));
        test_tensor_set(&old, c->old), test_tensor_reset(&t[C]);
        all.c_old = &old.view;
        p.accumulate = false;
    }
    op_case_call(ctx, "nvfp4-gemm", QUERN_OP_FORWARD, &p, &all);
    if (c->a.buffer != NULL) test_tensor_check_unchanged(&c->a, "a");
    if (old.buffer != NULL) test_tensor_check_unchanged(&old, "c_old"), test_tensor_free(&old);
    const product_result r = read_result(c, t);
    free_all(t);
    return r;
}

double *product_run_backward(const product_case *c, quern_context *ctx, test_random *random,
                             product_layout layout, const test_tensor *d_c, quern_dtype dtype)
{
    test_tensor t[TENSORS] = {{.buffer = NULL}};
    const int64_t shape[] = {c->tokens, c->k};
    test_tensor d_a = test_tensor_make(random, dtype, 2, shape, any_layout(random));
    quern_nvfp4_gemm_tensors all;
    const quern_nvfp4_gemm_params p = bind(c, ctx, random, layout, t, &all);
    all.d_c = &d_c->view;
    all.d_a = &d_a.view;
    op_case_call(ctx, "nvfp4-gemm", QUERN_OP_BACKWARD, &p, &all);
    test_tensor_check_guards(&d_a, "d_a"), test_tensor_check_unchanged(d_c, "d_c");
    double *values = test_tensor_get(&d_a);
    test_tensor_free(&d_a);
    free_all(t);
    return values;
}

void product_result_free(product_result *r)
{
    free(r->c), free(r->codes), free(r->scales);
}

int64_t product_expert_of(const product_case *c, int64_t row)
{
    int64_t e = 0;
    while (e < c->experts && row >= c->ends[e]) e++;
    return e;
}

int64_t product_choose_rows(const product_case *c, test_random *random, int one_in, int64_t *rows)
{
    int64_t count = 0, first = 0;
    for (int64_t t = 0; t < c->tokens; t++) {
        if (t > 0 && product_expert_of(c, t) != product_expert_of(c, t - 1)) first = count;
        if (!test_random_one_in(random, one_in)) continue;
        const int64_t at = test_random_int(random, first, count);
        rows[count++] = rows[at];
        rows[at] = t;
    }
    return count;
}

/* `width` values of each row, where the case has them. */
static double *taken_rows(const double *values, int64_t width, const int64_t *rows, int64_t count)
{
    double *out = test_doubles(count * width);
    for (int64_t r = 0; r < count; r++)
        memcpy(out + width * r, values + width * rows[r], sizeof *out * (size_t)width);
    return out;
}

product_case product_subset(const product_case *c, test_random *random, const int64_t *rows, int64_t count)
{
    product_case s = *c;
    s.tokens = count;
    s.ends = allocate(c->experts * 4);
    for (int64_t e = 0, to = 0; e < c->experts; e++) {
        while (to < count && product_expert_of(c, rows[to]) <= e) to++;
        s.ends[e] = (int32_t)to;
    }
    s.b_codes = allocate(c->experts * c->k * c->n);
    s.b_scales = allocate(c->experts * c->k / 16 * c->n);
    memcpy(s.b_codes, c->b_codes, (size_t)(c->experts * c->k * c->n)),
        memcpy(s.b_scales, c->b_scales, (size_t)(c->experts * c->k / 16 * c->n));
    s.a_values = taken_rows(c->a_values, c->k, rows, count);
    s.a_row_scale = taken_rows(c->a_row_scale, 1, rows, count);
    if (c->a_codes != NULL) {
        s.a_codes = allocate(s.tokens * c->k);
        s.a_scales = allocate(s.tokens * c->k / 16);
        for (int64_t r = 0; r < count; r++) {
            memcpy(s.a_codes + r * c->k, c->a_codes + rows[r] * c->k, (size_t)c->k);
            memcpy(s.a_scales + r * (c->k / 16), c->a_scales + rows[r] * (c->k / 16), (size_t)(c->k / 16));
        }
    } else {
        const int64_t shape[] = {s.tokens, c->k};
        double *all = test_tensor_get(&c->a), *some = taken_rows(all, c->k, rows, count);
        s.a = test_tensor_make(random, c->a.view.dtype, 2, shape, any_layout(random));
        test_tensor_set(&s.a, some);
        free(all), free(some);
    }
    if (c->a_global != NULL) {
        const int64_t counts[] = {1, c->experts, 0};
        s.a_global = c->params.a_global_per == QUERN_NVFP4_GLOBAL_ROW
                         ? taken_rows(c->a_global, 1, rows, count)
                         : test_doubles(counts[c->params.a_global_per]);
        if (c->params.a_global_per != QUERN_NVFP4_GLOBAL_ROW)
            memcpy(s.a_global, c->a_global, sizeof(double) * (size_t)counts[c->params.a_global_per]);
    }
    const int64_t b_count = c->b_parts == 0 ? 1 : c->experts * c->b_parts;
    if (c->b_global != NULL)
        s.b_global = memcpy(test_doubles(b_count), c->b_global, sizeof(double) * (size_t)b_count);
    if (c->bias != NULL)
        s.bias =
            memcpy(test_doubles(c->experts * c->n), c->bias, sizeof(double) * (size_t)(c->experts * c->n));
    if (c->old != NULL) s.old = taken_rows(c->old, c->n, rows, count);
    return s;
}
