/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults4_test.c - faults in the data of NVFP4's and the router's calls on device memory: each sets its bit
 * of the status word and has the result that cuda.h says; calls without a fault set none. */
#include "cmocka_c11.h"
#include "faults_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/cuda.h>
#include <quern/moe.h>
#include <quern/nvfp4.h>

enum { ROWS = 3, D = 40, BLOCKS = 3 };
typedef struct quantised {
    uint8_t codes[ROWS * BLOCKS * 8], scales[ROWS * BLOCKS];
    float global;
} quantised;

static quantised quantise(const float *x, const float *given)
{
    static const int64_t shape[] = {ROWS, D}, codes_shape[] = {ROWS, BLOCKS * 8},
                         scales_shape[] = {ROWS, BLOCKS};
    quantised q;
    memset(&q, 0xA5, sizeof q);
    const quern_tensor x_view = on_device(x, QUERN_F32, 2, shape),
                       codes = on_device(q.codes, QUERN_U8, 2, codes_shape),
                       scales = on_device(q.scales, QUERN_U8, 2, scales_shape),
                       global = on_device(given != NULL ? given : &q.global, QUERN_F32, 0, NULL);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    t.x = &x_view;
    t.codes = &codes;
    t.scales = &scales;
    if (given != NULL) t.given_global = &global;
    else t.global = &global;
    OK(quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes));
    OK(quern_nvfp4_quantize(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(q.codes, &codes, sizeof q.codes);
    to_host(q.scales, &scales, sizeof q.scales);
    to_host(&q.global, &global, sizeof q.global);
    return q;
}

static void what_is_not_finite_counts_as_zero(void **unused)
{
    float x[ROWS * D];
    (void)unused;
    for (int i = 0; i < ROWS * D; i++) x[i] = (float)(i % 17 - 8) / 4;
    x[3] = x[D + 39] = 0;
    const quantised expected = quantise(x, NULL);
    assert_int_equal(faults(), 0);
    x[3] = NAN;
    x[D + 39] = -INFINITY;
    const quantised got = quantise(x, NULL);
    assert_int_equal(faults(), QUERN_STATUS_NOT_FINITE);
    assert_memory_equal(&got, &expected, sizeof got);
}

static void a_global_that_is_none_counts_as_zero(void **unused)
{
    static const float bad[] = {0.0f, -1.0f, INFINITY, NAN};
    float x[ROWS * D];
    (void)unused;
    for (int i = 0; i < ROWS * D; i++) x[i] = (float)(i % 7);
    for (int i = 0; i < 4; i++) {
        const quantised got = quantise(x, &bad[i]);
        assert_int_equal(faults(), QUERN_STATUS_BAD_GLOBAL);
        for (size_t c = 0; c < sizeof got.codes; c++) assert_int_equal(got.codes[c], 0);
        for (size_t c = 0; c < sizeof got.scales; c++) assert_int_equal(got.scales[c], 0);
    }
}

static void a_scale_or_global_that_is_none_makes_zeros(void **unused)
{
    static const int64_t codes_shape[] = {1, 16}, scales_shape[] = {1, 2}, shape[] = {1, 32};
    const uint8_t codes[16] = {0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x22, 0x22},
                  scales[2] = {0x7F, 0x38};
    const float one = 1;
    float x[32];
    const quern_tensor codes_view = on_device(codes, QUERN_U8, 2, codes_shape),
                       scales_view = on_device(scales, QUERN_U8, 2, scales_shape),
                       global = on_device(&one, QUERN_F32, 0, NULL), out = on_device(x, QUERN_F32, 2, shape);
    quern_nvfp4_dequantize_params p = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors t = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    const quern_exec exec = with_status();
    (void)unused;
    t.codes = &codes_view;
    t.scales = &scales_view;
    t.global = &global;
    t.x = &out;
    OK(quern_nvfp4_dequantize(ctx, &exec, &p, &t, NULL, 0));
    to_host(x, &out, sizeof x);
    assert_int_equal(faults(), QUERN_STATUS_BAD_SCALE);
    for (int i = 0; i < 16; i++) assert_true(x[i] == 0);
    assert_true(x[16] == 1 && x[17] == 1 && x[18] == 0);
    const uint8_t good[2] = {0x38, 0x38};
    const float none = -1;
    OK(quern_cuda_copy(0, scales_view.data, good, sizeof good, NULL));
    OK(quern_cuda_copy(0, global.data, &none, sizeof none, NULL));
    OK(quern_nvfp4_dequantize(ctx, &exec, &p, &t, NULL, 0));
    to_host(x, &out, sizeof x);
    assert_int_equal(faults(), QUERN_STATUS_BAD_GLOBAL);
    for (int i = 0; i < 32; i++) assert_true(x[i] == 0);
}

static void a_token_without_a_row_in_the_table_weighs_nothing(void **unused)
{
    enum { T = 2, E = 4, K = 2 };
    static const int64_t matrix[] = {T, E}, slots[] = {T, K}, tokens[] = {T}, table_shape[] = {3, K},
                         experts_shape[] = {E}, all[] = {T * K};
    const float logits[T * E] = {1, 2, 3, 4, 4, 3, 2, 1};
    const int32_t ids[T] = {1, 3}, table[3 * K] = {0, 1, 2, 3, 0, 1};
    float weights[T * K] = {7, 7, 7, 7};
    int32_t chosen[T * K] = {7, 7, 7, 7}, ends[E] = {7, 7, 7, 7};
    const quern_tensor views[] = {
        on_device(logits, QUERN_F32, 2, matrix),     on_device(ids, QUERN_I32, 1, tokens),
        on_device(table, QUERN_I32, 2, table_shape), on_device(chosen, QUERN_I32, 2, slots),
        on_device(weights, QUERN_F32, 2, slots),     on_device(ends, QUERN_I32, 1, experts_shape),
        on_device(chosen, QUERN_I32, 1, all)};
    const quern_moe_route_params p = {sizeof p, QUERN_MOE_SCORE_SIGMOID, K, false, 1};
    quern_moe_route_tensors t = QUERN_MOE_ROUTE_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    (void)unused;
    t.logits = &views[0], t.input_ids = &views[1], t.tid2eid = &views[2];
    t.experts = &views[3], t.weights = &views[4], t.offsets = &views[5], t.permutation = &views[6];
    OK(quern_moe_route_workspace(ctx, &p, &t, &bytes));
    OK(quern_moe_route(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(weights, &views[4], sizeof weights);
    to_host(chosen, &views[3], sizeof chosen);
    assert_int_equal(faults(), QUERN_STATUS_BAD_ID);
    assert_true(chosen[0] == 2 && chosen[1] == 3 && weights[0] > 0.9f && weights[1] > 0.9f);
    assert_true(weights[2] == 0 && weights[3] == 0);
    for (int j = 0; j < T * K; j++) assert_true(chosen[j] >= 0 && chosen[j] < E);
}

/* The layer by routing that is handed in: an id that is no expert gives its slot nothing. */
static void an_expert_that_is_none_gives_nothing(void **unused)
{
    enum { T = 2, E = 2, D = 4, I = 2 };
    static const int64_t rows[] = {T, D}, slots[] = {T, 1}, up_shape[] = {E, 2 * I, D},
                         down_shape[] = {E, D, I};
    const int32_t chosen[T] = {1, E};
    float ones[E * 2 * I * D], out[T * D];
    for (size_t i = 0; i < sizeof ones / sizeof *ones; i++) ones[i] = 1;
    const quern_tensor views[] = {
        on_device(ones, QUERN_F32, 2, rows),       on_device(chosen, QUERN_I32, 2, slots),
        on_device(ones, QUERN_F32, 2, slots),      on_device(ones, QUERN_F32, 3, up_shape),
        on_device(ones, QUERN_F32, 3, down_shape), on_device(ones, QUERN_F32, 2, rows)};
    const quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    (void)unused;
    t.hidden = &views[0], t.experts = &views[1], t.weights = &views[2];
    t.gate_up = &views[3], t.down = &views[4], t.out = &views[5];
    OK(quern_moe_forward_workspace(ctx, &p, &t, &bytes));
    OK(quern_moe_forward(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(out, &views[5], sizeof out);
    assert_int_equal(faults(), QUERN_STATUS_BAD_ID);
    for (int d = 0; d < D; d++) assert_true(out[d] > 31 && out[D + d] == 0);
}

/* Offsets that fall, and that lie beyond the rows. */
static void bad_offsets_stay_within_the_tensors(void **unused)
{
    enum { T = 4, N = 16, DEPTH = 32 };
    static const int64_t a_shape[] = {T, DEPTH}, codes_shape[] = {2, DEPTH / 2, N},
                         scales_shape[] = {2, DEPTH / 16, N}, ends_shape[] = {2}, c_shape[] = {T, N};
    const int32_t ends[2][2] = {{3, 1}, {2, 9}};
    float a[T * DEPTH], c[T * N];
    uint8_t codes[2 * DEPTH / 2 * N], scales[2 * DEPTH / 16 * N];
    (void)unused;
    for (int i = 0; i < T * DEPTH; i++) a[i] = 1;
    memset(codes, 0x22, sizeof codes), memset(scales, 0x38, sizeof scales);
    for (int i = 0; i < 2; i++) {
        const quern_tensor views[] = {
            on_device(a, QUERN_F32, 2, a_shape), on_device(codes, QUERN_U8, 3, codes_shape),
            on_device(scales, QUERN_U8, 3, scales_shape), on_device(ends[i], QUERN_I32, 1, ends_shape),
            on_device(c, QUERN_F32, 2, c_shape)};
        quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
        quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
        const quern_exec exec = with_status();
        size_t bytes;
        t.a = &views[0], t.b_codes = &views[1], t.b_scales = &views[2], t.offsets = &views[3],
        t.c = &views[4];
        OK(quern_nvfp4_gemm_workspace(ctx, &p, &t, &bytes));
        OK(quern_nvfp4_gemm(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
        to_host(c, &views[4], sizeof c);
        assert_int_equal(faults(), QUERN_STATUS_BAD_OFFSETS);
        assert_true(i == 0 || (c[0] == DEPTH && c[T * N - 1] == DEPTH));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_not_finite_counts_as_zero),
        cmocka_unit_test(a_global_that_is_none_counts_as_zero),
        cmocka_unit_test(a_scale_or_global_that_is_none_makes_zeros),
        cmocka_unit_test(a_token_without_a_row_in_the_table_weighs_nothing),
        cmocka_unit_test(an_expert_that_is_none_gives_nothing),
        cmocka_unit_test(bad_offsets_stay_within_the_tensors),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
