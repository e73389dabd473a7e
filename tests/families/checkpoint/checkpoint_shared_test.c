/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_shared_test.c - the shared expert beside the routed ones: in a format of its own, under every
 * name, and left out where the layer has no place for what it is. */
#include "cmocka_c11.h"
#include "context.h"
#include "experts_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WIDE = 96 /* Is */ };

/* The number is 0, and not printed. */
#define QWEN_SHARED "model.layers.2.mlp.shared_expert.%.0d%s_proj%s"
#define DEEPSEEK_SHARED "layers.2.ffn.shared_experts.%.0d%s%s"

static const char *form, *const *names;

static const char *shared_name(int part, const char *suffix)
{
    return tensor_of(form, 0, names[part], suffix);
}

static int64_t shared_columns(int part)
{
    return part == DOWN ? WIDE : D;
}

static int64_t shared_rows(int part)
{
    return part == DOWN ? D : WIDE;
}

/* ---- what the bytes mean ---- */

typedef float shared_value(int part, int64_t r, int64_t k);

static float plain_value(int part, int64_t r, int64_t k)
{
    return bf16(made_data(&m, shared_name(part, ".weight")), r * shared_columns(part) + k);
}

static float nvfp4_value(int part, int64_t r, int64_t k)
{
    const int64_t columns = shared_columns(part);
    const uint8_t *codes = made_data(&m, shared_name(part, ".weight"));
    const uint8_t *scales = made_data(&m, shared_name(part, ".weight_scale"));
    const float *global = made_data(&m, shared_name(part, ".weight_scale_2"));
    return e2m1[nibble(codes + r * columns / 2, k)] * e4m3(scales[r * columns / 16 + k / 16]) * *global;
}

static float mxfp4_value(int part, int64_t r, int64_t k)
{
    const int64_t columns = shared_columns(part);
    const uint8_t *codes = made_data(&m, shared_name(part, ".weight"));
    const uint8_t *scales = made_data(&m, shared_name(part, ".scale"));
    return e2m1[nibble(codes + r * columns / 2, k)] * ldexpf(1, scales[r * columns / 32 + k / 32] - 127);
}

/* Products with a power of two are exact in bf16. */
static float fp8_value(int part, int64_t r, int64_t k)
{
    const int64_t columns = shared_columns(part);
    const uint8_t byte = ((const uint8_t *)made_data(&m, shared_name(part, ".weight")))[r * columns + k];
    const uint8_t *scales = made_data(&m, shared_name(part, ".scale"));
    return e4m3(byte & 0x7f) * (byte & 0x80 ? -1.0f : 1.0f) *
           ldexpf(1, scales[r / 32 * (columns / 32) + k / 32] - 127);
}

/* ---- what comes out ---- */

static quern_tensor with_expert(const quern_tensor *t)
{
    return quern_tensor_contiguous(t->data, t->dtype, 3, (const int64_t[]){1, t->shape[0], t->shape[1]});
}

static float result_value(const quern_moe_tensors *t, int part, int64_t r, int64_t k)
{
    const quern_tensor *plain[] = {t->shared_gate, t->shared_up, t->shared_down};
    if (t->shared_gate != NULL) return bf16(plain[part]->data, r * shared_columns(part) + k);
    const quern_tensor codes = with_expert(part == DOWN ? t->shared_down_codes : t->shared_gate_up_codes),
                       scales = with_expert(part == DOWN ? t->shared_down_scales : t->shared_gate_up_scales);
    if (part == DOWN) return laid_out(&codes, &scales, t->shared_down_global, 0, r, k, 0);
    return laid_out(&codes, &scales, t->shared_gate_up_global, 0, r / 8 * 16 + r % 8 + part * 8, k, part);
}

static void check_repacked(const quern_checkpoint_moe *repacked, const quern_checkpoint_moe *e)
{
    const quern_moe_tensors *r = &repacked->tensors, *t = &e->tensors;
    const quern_tensor up_codes = with_expert(t->shared_gate_up_codes),
                       up_scales = with_expert(t->shared_gate_up_scales),
                       down_codes = with_expert(t->shared_down_codes),
                       down_scales = with_expert(t->shared_down_scales);
    const quern_tensor *up = r->shared_gate_up_repacked, *down = r->shared_down_repacked;
    const quern_tensor one_up =
                           quern_tensor_contiguous(up->data, QUERN_U8, 2, (const int64_t[]){1, up->shape[0]}),
                       one_down = quern_tensor_contiguous(down->data, QUERN_U8, 2,
                                                          (const int64_t[]){1, down->shape[0]});
    assert_null(r->shared_gate_up_codes);
    compare_repacked(&one_up, &up_codes, &up_scales);
    compare_repacked(&one_down, &down_codes, &down_scales);
}

static void check_shared(shared_value *expected)
{
    quern_checkpoint *c = open_made();
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT, r = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e), *other = fill_experts(c, true, &r);
    assert_int_equal(e.shared_intermediate, WIDE);
    for (int part = 0; part < 3; part++)
        for (int64_t row = 0; row < shared_rows(part); row++)
            for (int64_t k = 0; k < shared_columns(part); k++) {
                const float want = expected(part, row, k), got = result_value(&e.tensors, part, row, k);
                if (want != got)
                    fail_msg("part %d [%d, %d]: %g instead of %g", part, (int)row, (int)k, (double)got,
                             (double)want);
            }
    if (e.tensors.shared_gate == NULL) check_repacked(&r, &e);
    run_layer(&e, false);
    run_layer(&r, true);
    free(memory);
    free(other);
    quern_checkpoint_close(c);
}

/* ---- the tests ---- */

/* Routed experts alone, under the names of one of the models. */
static void begin(bool is_deepseek)
{
    form = is_deepseek ? DEEPSEEK_SHARED : QWEN_SHARED;
    names = is_deepseek ? deepseek : qwen;
    add_each(is_deepseek ? DEEPSEEK : QWEN, names, made_modelopt);
}

static void plain_shared_expert_is_viewed(void **state)
{
    (void)state;
    begin(false);
    for (int part = 0; part < 3; part++)
        made_add(&m, QUERN_BF16, shared_name(part, ".weight"), 2,
                 (const int64_t[]){shared_rows(part), shared_columns(part)});
    check_shared(plain_value);
    /* all in the file: nothing but the routed experts is laid out */
    quern_checkpoint *c = open_made();
    size_t with, without;
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &with), QUERN_OK);
    quern_checkpoint_close(c);
    for (int part = 0; part < 3; part++) made_remove(&m, shared_name(part, ".weight"));
    c = open_made();
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &without), QUERN_OK);
    quern_checkpoint_close(c);
    assert_int_equal(with, without);
}

static void coded_shared_expert_is_laid_out(void **state)
{
    (void)state;
    begin(false);
    for (int part = 0; part < 3; part++)
        made_modelopt(&m, shared_name(part, ""), shared_rows(part), shared_columns(part),
                      1e-3f * (float)(1 + part));
    check_shared(nvfp4_value);
    begin(true);
    for (int part = 0; part < 3; part++)
        made_mxfp4(&m, shared_name(part, ""), shared_rows(part), shared_columns(part));
    check_shared(mxfp4_value);
}

static void fp8_shared_expert_is_widened(void **state)
{
    (void)state;
    begin(true);
    for (int part = 0; part < 3; part++)
        made_fp8(&m, shared_name(part, ""), shared_rows(part), shared_columns(part), 32);
    check_shared(fp8_value);
}

static void expect_none(void)
{
    quern_checkpoint *c = open_made();
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e);
    assert_int_equal(e.shared_intermediate, 0);
    assert_null(e.tensors.shared_gate);
    assert_null(e.tensors.shared_gate_up_codes);
    run_layer(&e, false);
    free(memory);
    quern_checkpoint_close(c);
}

static void expect_refused(const char *part_of_sentence)
{
    quern_checkpoint *c = open_made();
    size_t bytes = 77;
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &bytes), QUERN_ERR_FORMAT);
    if (strstr(quern_last_error(ctx), part_of_sentence) == NULL) fail_msg("%s", quern_last_error(ctx));
    assert_int_equal(bytes, 77);
    quern_checkpoint_close(c);
}

static void what_has_no_place_is_left_out_and_what_does_not_fit_refused(void **state)
{
    (void)state;
    begin(false);
    for (int part = 0; part < 3; part++)
        made_modelopt(&m, shared_name(part, ""), shared_rows(part), shared_columns(part), 1e-3f);
    made_add(&m, QUERN_BF16, "model.layers.2.mlp.shared_expert_gate.weight", 2, (const int64_t[]){1, D});
    expect_none();
    made_remove(&m, "model.layers.2.mlp.shared_expert_gate.weight");
    made_add(&m, QUERN_BF16, shared_name(DOWN, ".bias"), 1, (const int64_t[]){D});
    expect_none();
    made_remove(&m, shared_name(DOWN, ".bias"));
    made_remove(&m, shared_name(UP, ".weight"));
    expect_refused("no up projection of the shared expert there");
    begin(false);
    for (int part = 0; part < 3; part++)
        made_add(&m, QUERN_BF16, shared_name(part, ".weight"), 2, (const int64_t[]){D / 2, D / 2});
    expect_refused("shared_expert.down_proj.weight': its shape does not go");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_shared_expert_is_viewed),
        cmocka_unit_test(coded_shared_expert_is_laid_out),
        cmocka_unit_test(fp8_shared_expert_is_widened),
        cmocka_unit_test(what_has_no_place_is_left_out_and_what_does_not_fit_refused),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
