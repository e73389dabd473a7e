/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_refused_test.c - experts that do not fit each other, or no layer, are one sentence. */
#include "cmocka_c11.h"
#include "context.h"
#include "experts_case.h"

#include <math.h>
#include <string.h>

#define GPT_OSS "model.layers.2.mlp.experts."

static void expect_refused(int64_t layer, quern_status status, const char *part)
{
    quern_checkpoint *c = open_made();
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    static uint8_t memory[1 << 20];
    size_t bytes = 77;
    quern_status got = quern_checkpoint_experts_bytes(ctx, c, layer, QUERN_CPU, false, &bytes);
    if (got == QUERN_OK)
        got = quern_checkpoint_experts(ctx, c, layer, QUERN_CPU, false, memory, sizeof memory, &e);
    if (got != status || strstr(quern_last_error(ctx), part) == NULL)
        fail_msg("status %d: %s", (int)got, quern_last_error(ctx));
    assert_int_equal(e.experts, 0);
    quern_checkpoint_close(c);
}

static void what_does_not_fit_is_refused(void **state)
{
    (void)state;
    add_each(QWEN, qwen, made_modelopt);
    expect_refused(1, QUERN_ERR_INVALID_ARGUMENT, "layer 1: the checkpoint has no gate projection");
    made_remove(&m, tensor_of(QWEN, 1, "up", ".weight_scale"));
    expect_refused(2, QUERN_ERR_FORMAT, "1.up_proj.weight_scale' is missing");
    add_each(QWEN, qwen, made_modelopt);
    made_remove(&m, tensor_of(QWEN, 1, "down", ".weight_scale_2"));
    expect_refused(2, QUERN_ERR_FORMAT, "1.down_proj.weight_scale_2' is missing");
    add_each(QWEN, qwen, made_modelopt);
    made_remove(&m, tensor_of(QWEN, 1, "down", ".weight"));
    expect_refused(2, QUERN_ERR_FORMAT, "the down projection of expert 1 is missing: there are 3 experts");
    add_each(QWEN, qwen, made_modelopt);
    *(float *)made_data(&m, tensor_of(QWEN, 2, "up", ".weight_scale_2")) = NAN;
    expect_refused(2, QUERN_ERR_FORMAT, "2.up_proj.weight_scale_2': a global of nan");
    add_each(QWEN, qwen, made_modelopt);
    made_remove(&m, tensor_of(QWEN, 1, "up", ".weight"));
    made_add(&m, QUERN_U8, tensor_of(QWEN, 1, "up", ".weight"), 2, (const int64_t[]){I, D / 4});
    expect_refused(2, QUERN_ERR_FORMAT, "1.up_proj.weight': its shape does not go");
    add_each(QWEN, qwen, made_modelopt);
    for (int expert = 0; expert < E; expert++) {
        made_remove(&m, tensor_of(QWEN, expert, "down", ".weight"));
        made_add(&m, QUERN_BF16, tensor_of(QWEN, expert, "down", ".weight"), 2, (const int64_t[]){D, I});
    }
    expect_refused(2, QUERN_ERR_UNSUPPORTED, "experts of one format are accepted");
    add_each(QWEN, qwen, made_modelopt);
    made_modelopt(&m, "model.layers.2.mlp.experts.999999999.up_proj", I, D, 1e-3f);
    expect_refused(2, QUERN_ERR_FORMAT, "expert 999999999 of widths 64 and 32: as many experts as there are");
    made_free(&m);
    made_add(&m, QUERN_BF16, GPT_OSS "gate_up_proj", 3, (const int64_t[]){E, 0, 1ll << 40});
    made_add(&m, QUERN_BF16, GPT_OSS "down_proj", 3, (const int64_t[]){E, 1ll << 40, 0});
    expect_refused(2, QUERN_ERR_FORMAT, "gate_up_proj': its shape does not go");
    add_each(QWEN, qwen, made_modelopt);
    quern_checkpoint *c = open_made();
    size_t bytes = 77;
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CUDA, false, &bytes),
                     QUERN_ERR_UNSUPPORTED);
    assert_non_null(strstr(quern_last_error(ctx), "experts are laid out in the host's memory"));
    assert_int_equal(quern_checkpoint_experts_bytes(NULL, c, 2, QUERN_CPU, false, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, NULL, 2, QUERN_CPU, false, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, NULL),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, false, NULL, 0, NULL),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(bytes, 77);
    quern_checkpoint_close(c);
}

static void add_fp8(made_model *model, const char *name, int64_t rows, int64_t columns, float unused)
{
    (void)unused;
    made_fp8(model, name, rows, columns, 32);
}

static void fp8_that_is_no_number_is_refused(void **state)
{
    const char *weight = "layers.2.ffn.experts.1.w3.weight", *scale = "layers.2.ffn.experts.1.w3.scale";
    (void)state;
    add_each(DEEPSEEK, deepseek, add_fp8);
    ((uint8_t *)made_data(&m, weight))[70] = 0xff;
    expect_refused(2, QUERN_ERR_FORMAT, "a weight is beyond bf16 or no number");
    add_each(DEEPSEEK, deepseek, add_fp8);
    ((uint8_t *)made_data(&m, scale))[1] = 0xff;
    expect_refused(2, QUERN_ERR_FORMAT, "expert 1 of 'layers.2.ffn.experts.");
    add_each(DEEPSEEK, deepseek, add_fp8);
    made_remove(&m, scale);
    *(float *)made_add(&m, QUERN_F32, scale, 1, (const int64_t[]){1}) = -1.0f;
    expect_refused(2, QUERN_ERR_FORMAT, "a scale is not above 0");
    *(float *)made_data(&m, scale) = 3e38f;
    expect_refused(2, QUERN_ERR_FORMAT, "a weight is beyond bf16");
    made_remove(&m, scale);
    made_add(&m, QUERN_F32, scale, 2, (const int64_t[]){2, 2});
    expect_refused(2, QUERN_ERR_FORMAT, "w3.scale' is F32 of 16 bytes: F32 or F8_E8M0 is accepted");
    made_remove(&m, scale);
    made_add(&m, QUERN_BF16, scale, 2, (const int64_t[]){1, 2});
    expect_refused(2, QUERN_ERR_FORMAT, "w3.scale' is BF16");
    made_remove(&m, scale);
    expect_refused(2, QUERN_ERR_FORMAT, "w3.weight': its shape does not go");
    made_free(&m);
    made_add(&m, QUERN_E4M3, GPT_OSS "gate_up_proj", 3, (const int64_t[]){E, 2 * I, D});
    made_add(&m, QUERN_E4M3, GPT_OSS "down_proj", 3, (const int64_t[]){E, D, I});
    expect_refused(2, QUERN_ERR_UNSUPPORTED, "is plain of dtype F8_E4M3");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(fp8_that_is_no_number_is_refused),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
