/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_weights_checks_test.c - quantised projection weights that the compressors refuse, in one shot and in
 * appends, which leave outputs and states as they were. */
#include "cmocka_c11.h"
#include "dsv4_states.h"
#include "dsv4_weights.h"
#include "op_case.h"

#include <stdlib.h>
#include <string.h>

enum { IN = 272, WIDTH = 40, R = 4 };

typedef struct fixture {
    quern_context *ctx;
    quern_dsv4_compress_params p;
    quern_dsv4_compress_tensors t;
    weight fp8, fp4;
    test_tensor x, w, b_a, b_b, out, d_out, d_x, d_w;
} fixture;

static fixture open_fixture(void)
{
    test_random random = {3};
    fixture f = {.ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1),
                 .p = QUERN_DSV4_COMPRESS_PARAMS_INIT,
                 .t = QUERN_DSV4_COMPRESS_TENSORS_INIT,
                 .fp8 = dsv4_weight_random(&random, FP8_POWERS, IN, 4 * WIDTH),
                 .fp4 = dsv4_weight_random(&random, NVFP4, IN, 4 * WIDTH),
                 .x = dsv4_weight_rows(&random, QUERN_F32, 9, IN),
                 .w = dsv4_weight_rows(&random, QUERN_F32, IN, 4 * WIDTH),
                 .b_a = dsv4_weight_rows(&random, QUERN_F32, R, WIDTH),
                 .b_b = dsv4_weight_rows(&random, QUERN_F32, R, WIDTH),
                 .out = dsv4_weight_rows(&random, QUERN_F32, 2, WIDTH),
                 .d_out = dsv4_weight_rows(&random, QUERN_F32, 2, WIDTH),
                 .d_x = dsv4_weight_rows(&random, QUERN_F32, 9, IN),
                 .d_w = dsv4_weight_rows(&random, QUERN_F32, IN, 4 * WIDTH)};
    test_tensor_reset(&f.out);
    return f;
}

static void close_fixture(fixture *f)
{
    test_tensor *all[] = {&f->x, &f->w, &f->b_a, &f->b_b, &f->out, &f->d_out, &f->d_x, &f->d_w};
    for (int i = 0; i < 8; i++) test_tensor_free(all[i]);
    dsv4_weight_free(&f->fp8), dsv4_weight_free(&f->fp4);
    quern_context_destroy(f->ctx);
}

static void right_call(fixture *f, const weight *w)
{
    f->t = (quern_dsv4_compress_tensors)QUERN_DSV4_COMPRESS_TENSORS_INIT;
    dsv4_weight_give(w, &f->t);
    f->t.x = &f->x.view;
    f->t.b_a = &f->b_a.view;
    f->t.b_b = &f->b_b.view;
    f->t.out = &f->out.view;
}

static void expect_refusal(fixture *f, const char *sentence)
{
    static unsigned char workspace[1 << 23];
    assert_int_equal(quern_dsv4_compress(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(f->ctx), sentence) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(f->ctx), sentence);
    test_tensor_check_unchanged(&f->out, "out");
}

static void refusals(void **state)
{
    (void)state;
    fixture f = open_fixture();
    right_call(&f, &f.fp8);
    f.t.w = &f.w.view;
    expect_refusal(&f, "w_fp8 is given beside w: one weight is accepted");
    right_call(&f, &f.fp8);
    f.t.w_codes = &f.fp4.codes.view;
    f.t.w_scales = &f.fp4.scales.view;
    f.t.w_global = &f.fp4.global.view;
    expect_refusal(&f, "w_fp8 is given beside w_codes: one weight is accepted");
    right_call(&f, &f.fp8);
    f.t.w_fp8_scales = NULL;
    expect_refusal(&f, "w_fp8_scales is NULL");
    right_call(&f, &f.fp8);
    f.t.w_global = &f.fp4.global.view;
    expect_refusal(&f, "w_global is given: it stands beside w_codes");
    right_call(&f, &f.fp8);
    f.t.x = NULL;
    f.t.proj = &f.w.view;
    expect_refusal(&f, "w_fp8 is given: it stands beside x");
    right_call(&f, &f.fp4);
    f.t.w_global = NULL;
    expect_refusal(&f, "w_global is NULL");
    right_call(&f, &f.fp8);
    f.fp8.codes.view.shape[1]--;
    expect_refusal(&f, "w_fp8.shape[1] is 271: 272 is accepted");
    f.fp8.codes.view.shape[1]++;
    f.fp8.scales.view.shape[1]--;
    expect_refusal(&f, "w_fp8_scales.shape[1] is 2: 3 is accepted");
    f.fp8.scales.view.shape[1]++;
    right_call(&f, &f.fp4);
    f.x.view.shape[1] = 264;
    expect_refusal(&f, "x has 264 channels and w_codes is given: multiples of 16 are accepted");
    f.x.view.shape[1] = IN;
    float *global = f.fp4.global.view.data, good = *global;
    *global = -1;
    expect_refusal(&f, "w_global[0] is -1: a global above 0 and finite is accepted");
    *global = good;
    unsigned char *scale = dsv4_weight_bytes(&f.fp4.scales, 3) + 5, byte = *scale;
    *scale = 0x7f;
    expect_refusal(&f, "scale");
    *scale = byte;
    right_call(&f, &f.fp8);
    scale = dsv4_weight_bytes(&f.fp8.scales, 1) + 2;
    byte = *scale;
    *scale = 0xff;
    expect_refusal(&f, "w_fp8_scales[1, 2] is the scale byte 0xFF: 0x00 to 0xFE are accepted");
    *scale = byte;
    right_call(&f, &f.fp4);
    size_t bytes;
    f.t.d_out = &f.d_out.view;
    f.t.d_x = &f.d_x.view;
    f.t.d_w = &f.d_w.view;
    assert_int_equal(quern_dsv4_compress_backward_workspace(f.ctx, &f.p, &f.t, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f.ctx), "d_w is given and w is NULL"));
    close_fixture(&f);
}

/* The same of an append; the state stays as it was. */
static void refused_appends(void **state)
{
    (void)state;
    fixture f = open_fixture();
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    enum { COUNT = 7 }; /* of whose entries, and one row more, `out` has room */
    const int64_t count = COUNT;
    const int32_t slot = 0;
    dsv4_states states = dsv4_states_make(&f.p, WIDTH, 3, 1);
    const size_t bytes = (size_t)states.floats * sizeof *states.rows;
    unsigned char *before = malloc(bytes);
    memcpy(before, states.rows, bytes);
    quern_tensor x = f.x.view;
    x.shape[0] = COUNT;
    t.x = &x;
    t.b_a = &f.b_a.view;
    t.b_b = &f.b_b.view;
    t.out = &f.out.view;
    t.w_fp8 = &f.fp8.codes.view;
    for (int i = 0; i < 5; i++) {
        static const char *const sentences[] = {"w_fp8_scales is NULL", "w_fp8 is given beside w",
                                                "w_global[0] is 0", "scale",
                                                "w_fp8_scales[0, 1] is the scale byte 0xFF"};
        float *global = f.fp4.global.view.data, good = *global;
        unsigned char *scale = i < 4 ? dsv4_weight_bytes(&f.fp4.scales, 16) + 159
                                     : dsv4_weight_bytes(&f.fp8.scales, 0) + 1,
                      byte = *scale;
        if (i == 1) {
            t.w_fp8_scales = &f.fp8.scales.view;
            t.w = &f.w.view;
        }
        if (i == 2) {
            t.w = t.w_fp8 = t.w_fp8_scales = NULL;
            t.w_codes = &f.fp4.codes.view;
            t.w_scales = &f.fp4.scales.view;
            t.w_global = &f.fp4.global.view;
            *global = 0;
        }
        if (i == 4) {
            t.w_codes = t.w_scales = t.w_global = NULL;
            t.w_fp8 = &f.fp8.codes.view;
            t.w_fp8_scales = &f.fp8.scales.view;
        }
        if (i >= 3) *scale = 0xff;
        assert_int_equal(dsv4_states_append(&states, f.ctx, &slot, &count, 1, &t),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(f.ctx), sentences[i]) == NULL)
            fail_msg("'%s' lacks '%s'", quern_last_error(f.ctx), sentences[i]);
        assert_memory_equal(states.rows, before, bytes);
        assert_int_equal(states.merged[0], 0);
        test_tensor_check_unchanged(&f.out, "out");
        *global = good;
        *scale = byte;
    }
    free(before);
    dsv4_states_free(&states);
    close_fixture(&f);
}

/* Hidden states of no channels: projections of 0, of which entries are 0. */
static void no_channels(void **state)
{
    (void)state;
    for (int kind = 0; kind < WEIGHT_KINDS; kind++) {
        test_random random = {(uint64_t)kind + 1};
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        weight w = dsv4_weight_random(&random, (weight_kind)kind, 0, 4 * WIDTH);
        test_tensor x = dsv4_weight_rows(&random, QUERN_F32, 9, 0),
                    bias = dsv4_weight_rows(&random, QUERN_F32, R, WIDTH),
                    out = dsv4_weight_rows(&random, QUERN_F32, 2, WIDTH);
        const quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
        quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
        dsv4_weight_give(&w, &t);
        t.x = &x.view;
        t.b_a = t.b_b = &bias.view;
        t.out = &out.view;
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &t);
        double *values = test_tensor_get(&out);
        for (int i = 0; i < 2 * WIDTH; i++) assert_true(values[i] == 0);
        test_tensor_check_guards(&out, "out");
        free(values);
        test_tensor_free(&x), test_tensor_free(&bias), test_tensor_free(&out);
        dsv4_weight_free(&w);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_channels), cmocka_unit_test(refusals),
                                       cmocka_unit_test(refused_appends)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
