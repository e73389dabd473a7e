/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * moe_float_state_test.c - NVFP4's operations and the layer under every floating-point state that a caller
 * may have set: the bits are those of the default one, which comes back as it was.
 */
#include "cmocka_c11.h"
#include "float_states.h"
#include "moe_case.h"
#include "op_case.h"

#include <quern/nvfp4.h>

enum { ROWS = 37, WIDTH = 304, EXPERTS = 3, COLUMNS = 48 };

typedef struct called_op {
    const char *op;
    const void *params, *tensors;
    const void *backward; /* tensors of the backward call that follows, or NULL */
} called_op;

static void call_op(void *arg, quern_context *ctx)
{
    const called_op *c = arg;
    op_case_call(ctx, c->op, QUERN_OP_FORWARD, c->params, c->tensors);
    if (c->backward != NULL) op_case_call(ctx, c->op, QUERN_OP_BACKWARD, c->params, c->backward);
}

static test_tensor made(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    return test_tensor_make(random, dtype, 2, (const int64_t[]){rows, columns}, TEST_CONTIGUOUS);
}

static test_tensor values(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    test_tensor t = made(random, dtype, rows, columns);
    test_tensor_normal(&t, random, 1);
    test_float_scale(&t);
    return t;
}

static void quantise_and_back(test_random *random, quern_dtype dtype)
{
    test_tensor x = values(random, dtype, ROWS, WIDTH), codes = made(random, QUERN_U8, ROWS, WIDTH / 2),
                scales = made(random, QUERN_U8, ROWS, WIDTH / 16), back = made(random, dtype, ROWS, WIDTH),
                global = test_tensor_make(random, QUERN_F32, 0, NULL, TEST_CONTIGUOUS);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    t.x = &x.view;
    t.codes = &codes.view;
    t.scales = &scales.view;
    t.global = &global.view;
    called_op quantise = {"nvfp4-quantize", &p, &t, NULL};
    test_float_case_check(
        &(test_float_case){quantise.op, call_op, &quantise, {&x, &codes, &scales, &global}});
    quern_nvfp4_dequantize_params dp = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors dt = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    dt.codes = &codes.view;
    dt.scales = &scales.view;
    dt.global = &global.view;
    dt.x = &back.view;
    called_op dequantise = {"nvfp4-dequantize", &dp, &dt, NULL};
    test_float_case_check(&(test_float_case){dequantise.op, call_op, &dequantise, {&back}});
    test_tensor_free(&x), test_tensor_free(&codes), test_tensor_free(&scales), test_tensor_free(&back);
    test_tensor_free(&global);
}

static void quantise_swiglu(test_random *random, quern_dtype dtype)
{
    test_tensor x = values(random, dtype, ROWS, 2 * WIDTH), codes = made(random, QUERN_U8, ROWS, WIDTH / 2),
                scales = made(random, QUERN_U8, ROWS, WIDTH / 16);
    float global = 0.003f;
    const quern_tensor g = quern_tensor_contiguous(&global, QUERN_F32, 0, NULL);
    quern_nvfp4_fused_quantize_params p = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_tensors t = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    p.swiglu = true;
    t.x = &x.view;
    t.gate_global = &g;
    t.gate_codes = &codes.view;
    t.gate_scales = &scales.view;
    called_op call = {"nvfp4-fused-quantize", &p, &t, NULL};
    test_float_case_check(&(test_float_case){call.op, call_op, &call, {&x, &codes, &scales}});
    test_tensor_free(&x), test_tensor_free(&codes), test_tensor_free(&scales);
}

static void the_quantisers(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    test_random random = {test_seed("quantisers' floating-point state", 5)};
    (void)state;
    for (int i = 0; i < 3; i++) {
        quantise_and_back(&random, dtypes[i]);
        quantise_swiglu(&random, dtypes[i]);
    }
}

static void fill(test_tensor *t, test_random *random, int least, int most)
{
    for (int64_t i = 0; i < test_tensor_count(t); i++)
        ((uint8_t *)t->view.data)[i] = (uint8_t)test_random_int(random, least, most);
}

static void product(test_random *random, quern_dtype dtype)
{
    const int64_t experts = EXPERTS, codes_shape[] = {EXPERTS, WIDTH / 2, COLUMNS},
                  scales_shape[] = {EXPERTS, WIDTH / 16, COLUMNS};
    int32_t ends[EXPERTS] = {5, 5, ROWS};
    test_tensor a = values(random, dtype, ROWS, WIDTH), c = made(random, dtype, ROWS, COLUMNS),
                codes = test_tensor_make(random, QUERN_U8, 3, codes_shape, TEST_CONTIGUOUS),
                scales = test_tensor_make(random, QUERN_U8, 3, scales_shape, TEST_CONTIGUOUS);
    const quern_tensor offsets = quern_tensor_contiguous(ends, QUERN_I32, 1, &experts);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    fill(&codes, random, 0, 255), fill(&scales, random, 0x20, 0x48);
    t.a = &a.view;
    t.b_codes = &codes.view;
    t.b_scales = &scales.view;
    t.offsets = &offsets;
    t.c = &c.view;
    called_op call = {"nvfp4-gemm", &p, &t, NULL};
    test_float_case_check(&(test_float_case){call.op, call_op, &call, {&a, &c}});
    test_tensor_free(&a), test_tensor_free(&c), test_tensor_free(&codes), test_tensor_free(&scales);
}

static void the_product(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    test_random random = {test_seed("product's floating-point state", 6)};
    (void)state;
    for (int i = 0; i < 3; i++) product(&random, dtypes[i]);
}

static void the_layer(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    test_random random = {test_seed("layer's floating-point state", 7)};
    (void)state;
    for (int i = 0; i < 12; i++) {
        const moe_wish w = {.tokens = 19,
                            .dtype = dtypes[i % 3],
                            .routed = i / 3 % 2 ? MOE_FLOATS : MOE_NVFP4,
                            .shared = i % 2 ? MOE_FLOATS : MOE_NVFP4,
                            .a4 = i >= 6 && i / 3 % 2 == 0,
                            .bias = i % 2};
        moe_case c = moe_make(&random, &w);
        const quern_moe_tensors forward = moe_bind(&c, false), backward = moe_bind(&c, true);
        called_op call = {"moe", &c.params, &forward, &backward};
        test_float_case layer = {call.op, call_op, &call, {NULL}};
        for (int t = 0; t < MOE_TENSORS; t++) layer.t[t] = &c.t[t];
        test_float_case_check(&layer);
        moe_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_quantisers),
        cmocka_unit_test(the_product),
        cmocka_unit_test(the_layer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
