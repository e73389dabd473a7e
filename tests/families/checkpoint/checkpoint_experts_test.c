/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checkpoint_experts_test.c - a layer's experts come out of any format with the values that the file's bytes
 * mean. */
#include "cmocka_c11.h"
#include "context.h"
#include "experts_case.h"
#include "gguf_bytes.h"

#include "io/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what the file's bytes mean ---- */

static float modelopt_value(int expert, int part, int64_t r, int64_t k)
{
    const int64_t columns = columns_of(part);
    const uint8_t *codes = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight")),
                  *scales = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight_scale"));
    const float *global = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight_scale_2"));
    return e2m1[nibble(codes + r * columns / 2, k)] * e4m3(scales[r * columns / 16 + k / 16]) * *global;
}

static float compressed_value(int expert, int part, int64_t r, int64_t k)
{
    const int64_t columns = columns_of(part);
    const uint8_t *codes = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight_packed")),
                  *scales = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight_scale"));
    const float *r_global = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight_global_scale"));
    return e2m1[nibble(codes + r * columns / 2, k)] * e4m3(scales[r * columns / 16 + k / 16]) *
           (1.0f / *r_global);
}

static float mxfp4_value(int expert, int part, int64_t r, int64_t k)
{
    const int64_t columns = columns_of(part);
    const uint8_t *codes = made_data(&m, tensor_of(DEEPSEEK, expert, deepseek[part], ".weight")),
                  *scales = made_data(&m, tensor_of(DEEPSEEK, expert, deepseek[part], ".scale"));
    return e2m1[nibble(codes + r * columns / 2, k)] * ldexpf(1, scales[r * columns / 32 + k / 32] - 127);
}

#define GPT_OSS "model.layers.2.mlp.experts."
#define STACK "model.layers.2.mlp.experts.%.0d%s%s" /* the number is 0, and not printed */

/* gate is the even rows of the stack, up the odd. */
static float blocks_value(int expert, int part, int64_t r, int64_t k)
{
    const int64_t columns = columns_of(part);
    const int64_t row = part == DOWN ? expert * D + r : expert * 2 * I + 2 * r + part;
    const char *module = part == DOWN ? "down" : "gate_up";
    const uint8_t *codes = made_data(&m, tensor_of(STACK, 0, module, "_proj_blocks"));
    const uint8_t *scales = made_data(&m, tensor_of(STACK, 0, module, "_proj_scales"));
    return e2m1[nibble(codes + row * columns / 2, k)] * ldexpf(1, scales[row * columns / 32 + k / 32] - 127);
}

/* bf16 [E, K, 2I], columns that alternate. */
static float turned_value(int expert, int part, int64_t r, int64_t k)
{
    if (part == DOWN) return bf16(made_data(&m, GPT_OSS "down_proj"), (expert * I + k) * D + r);
    return bf16(made_data(&m, GPT_OSS "gate_up_proj"), (expert * D + k) * 2 * I + 2 * r + part);
}

static float halves_value(int expert, int part, int64_t r, int64_t k)
{
    if (part == DOWN) return bf16(made_data(&m, GPT_OSS "down_proj"), (expert * D + r) * I + k);
    return bf16(made_data(&m, GPT_OSS "gate_up_proj"), (expert * 2 * I + part * I + r) * D + k);
}

static float single_value(int expert, int part, int64_t r, int64_t k)
{
    return bf16(made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight")), r * columns_of(part) + k);
}

static void modelopt_experts(void **state)
{
    (void)state;
    add_each(QWEN, qwen, made_modelopt);
    quern_checkpoint *c = open_made();
    check_experts(c, modelopt_value, true);
    quern_checkpoint_close(c);
    /* with activations' scales: gate and up take the larger */
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            made_number(&m, tensor_of(QWEN, expert, qwen[part], ".input_scale"), 0,
                        0.25f * (float)(1 + part));
    made_add(&m, QUERN_BF16, "model.layers.2.mlp.gate.weight", 2, (const int64_t[]){E, D});
    made_add(&m, QUERN_F32, "model.layers.2.mlp.gate.e_score_correction_bias", 1, (const int64_t[]){E});
    c = open_made();
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e);
    for (int expert = 0; expert < E; expert++) {
        assert_true(((const float *)e.gate_up_input_global->data)[expert] == 0.5f);
        assert_true(((const float *)e.down_input_global->data)[expert] == 0.75f);
    }
    assert_memory_equal(e.tensors.weight->data, made_data(&m, "model.layers.2.mlp.gate.weight"), E * D * 2);
    assert_memory_equal(e.tensors.bias->data,
                        made_data(&m, "model.layers.2.mlp.gate.e_score_correction_bias"), E * 4);
    run_layer(&e, false);
    free(memory);
    quern_checkpoint_close(c);
}

static void compressed_tensors_experts(void **state)
{
    (void)state;
    add_each(QWEN, qwen, made_compressed_tensors);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            made_number(&m, tensor_of(QWEN, expert, qwen[part], ".input_global_scale"), 1,
                        (float)(4 << part));
    quern_checkpoint *c = open_made();
    check_experts(c, compressed_value, true);
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, true, &e);
    assert_true(((const float *)e.gate_up_input_global->data)[0] == 0.25f);
    assert_true(((const float *)e.down_input_global->data)[0] == 0.0625f);
    free(memory);
    quern_checkpoint_close(c);
}

static void add_mxfp4(made_model *model, const char *name, int64_t rows, int64_t columns, float unused)
{
    (void)unused;
    made_mxfp4(model, name, rows, columns);
}

static void deepseek_experts(void **state)
{
    (void)state;
    add_each(DEEPSEEK, deepseek, add_mxfp4);
    quern_checkpoint *c = open_made();
    check_experts(c, mxfp4_value, true);
    quern_checkpoint_close(c);
    made_add(&m, QUERN_I64, "layers.2.ffn.gate.tid2eid", 2, (const int64_t[]){10, 2});
    made_add(&m, QUERN_I64, "layers.1.ffn.gate.tid2eid", 2, (const int64_t[]){10, 2});
    c = open_made();
    quern_checkpoint_moe hashed = QUERN_CHECKPOINT_MOE_INIT;
    free(fill_experts(c, false, &hashed));
    assert_true(hashed.tensors.tid2eid->dtype == QUERN_I64 && hashed.tensors.tid2eid->shape[0] == 10);
    assert_memory_equal(hashed.tensors.tid2eid->data, made_data(&m, "layers.2.ffn.gate.tid2eid"), 160);
    quern_checkpoint_close(c);
    ((uint8_t *)made_data(&m, "layers.2.ffn.experts.1.w3.scale"))[3] = 0xff;
    c = open_made();
    size_t bytes;
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &bytes), QUERN_OK);
    void *memory = malloc(bytes);
    assert_int_equal(quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, false, memory, bytes, &e),
                     QUERN_ERR_FORMAT);
    if (strstr(quern_last_error(ctx), "expert 1 of 'layers.2.ffn.experts.") == NULL)
        fail_msg("%s", quern_last_error(ctx));
    assert_null(e.tensors.gate_up_codes);
    free(memory);
    quern_checkpoint_close(c);
}

/* Biases of gate in the even columns, of up in the odd. */
static void add_biases(void)
{
    made_add(&m, QUERN_BF16, GPT_OSS "gate_up_proj_bias", 2, (const int64_t[]){E, 2 * I});
    made_add(&m, QUERN_BF16, GPT_OSS "down_proj_bias", 2, (const int64_t[]){E, D});
}

static void gpt_oss_experts(void **state)
{
    (void)state;
    made_free(&m);
    made_add(&m, QUERN_U8, GPT_OSS "gate_up_proj_blocks", 4, (const int64_t[]){E, 2 * I, D / 32, 16});
    made_add(&m, QUERN_U8, GPT_OSS "gate_up_proj_scales", 3, (const int64_t[]){E, 2 * I, D / 32});
    made_add(&m, QUERN_U8, GPT_OSS "down_proj_blocks", 4, (const int64_t[]){E, D, I / 32, 16});
    made_add(&m, QUERN_U8, GPT_OSS "down_proj_scales", 3, (const int64_t[]){E, D, I / 32});
    for (int i = 1; i <= 3; i += 2)
        for (int j = 0; j < E * 2 * I * D / 32 / (i == 1 ? 1 : 2); j++)
            ((uint8_t *)m.tensors[i].tensor.data)[j] =
                (uint8_t)(118 + ((uint8_t *)m.tensors[i].tensor.data)[j] % 8);
    add_biases();
    quern_checkpoint *c = open_made();
    check_experts(c, blocks_value, true);
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e);
    const uint16_t *bias = made_data(&m, GPT_OSS "gate_up_proj_bias"), *got = e.tensors.gate_up_bias->data;
    for (int expert = 0; expert < E; expert++)
        for (int r = 0; r < I; r++)
            for (int part = 0; part < 2; part++)
                assert_int_equal(got[expert * 2 * I + r / 8 * 16 + r % 8 + part * 8],
                                 bias[expert * 2 * I + 2 * r + part]);
    assert_memory_equal(e.tensors.down_bias->data, made_data(&m, GPT_OSS "down_proj_bias"), E * D * 2);
    free(memory);
    quern_checkpoint_close(c);
}

static void float_experts(void **state)
{
    (void)state;
    made_free(&m);
    made_add(&m, QUERN_BF16, GPT_OSS "gate_up_proj", 3, (const int64_t[]){E, 2 * I, D});
    made_add(&m, QUERN_BF16, GPT_OSS "down_proj", 3, (const int64_t[]){E, D, I});
    quern_checkpoint *c = open_made();
    size_t bytes = 77;
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    check_experts(c, halves_value, false);
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &bytes), QUERN_OK);
    assert_int_equal(bytes, 0); /* views of the file */
    assert_int_equal(quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, false, NULL, 0, &e), QUERN_OK);
    check_values(&e, halves_value);
    quern_checkpoint_close(c);

    made_free(&m);
    made_add(&m, QUERN_BF16, GPT_OSS "gate_up_proj", 3, (const int64_t[]){E, D, 2 * I});
    made_add(&m, QUERN_BF16, GPT_OSS "down_proj", 3, (const int64_t[]){E, I, D});
    add_biases();
    c = open_made();
    check_experts(c, turned_value, true);
    e = (quern_checkpoint_moe)QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e);
    const uint16_t *bias = made_data(&m, GPT_OSS "gate_up_proj_bias"), *got = e.tensors.gate_up_bias->data;
    for (int r = 0; r < I; r++) assert_int_equal(got[2 * I + I + r], bias[2 * I + 2 * r + 1]); /* halves */
    free(memory);
    quern_checkpoint_close(c);

    made_free(&m);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            made_add(&m, QUERN_BF16, tensor_of(QWEN, expert, qwen[part], ".weight"), 2,
                     (const int64_t[]){part == DOWN ? D : I, columns_of(part)});
    c = open_made();
    check_experts(c, single_value, false);
    quern_checkpoint_close(c);
}

/* ---- FP8 ---- */

static int64_t fp8_rows, fp8_columns; /* that share a scale */
static const char *fp8_scale;         /* its suffix */
static quern_dtype fp8_dtype;

/* The nearest bf16, ties to even, of a product rounded to f32. */
static float fp8_value(int expert, int part, int64_t r, int64_t k)
{
    const int64_t columns = columns_of(part), across = (columns + fp8_columns - 1) / fp8_columns;
    const int64_t which = r / fp8_rows * across + k / fp8_columns;
    const uint8_t *weight = made_data(&m, tensor_of(QWEN, expert, qwen[part], ".weight"));
    const uint8_t byte = weight[r * columns + k];
    const void *scales = made_data(&m, tensor_of(QWEN, expert, qwen[part], fp8_scale));
    const float scale = fp8_dtype == QUERN_F32 ? ((const float *)scales)[which]
                                               : ldexpf(1, ((const uint8_t *)scales)[which] - 127);
    const float product = e4m3(byte & 0x7f) * scale * (byte & 0x80 ? -1.0f : 1.0f);
    int exponent;
    const float fraction = frexpf(product, &exponent);
    return ldexpf(rintf(ldexpf(fraction, 8)), exponent - 8);
}

/* Scales of every kind: [N / rows, K / columns], or [N], or []. */
static void check_fp8(int64_t rows, int64_t columns, int ndim, const char *suffix, quern_dtype dtype)
{
    fp8_rows = rows, fp8_columns = columns, fp8_scale = suffix, fp8_dtype = dtype;
    made_free(&m);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++) {
            const int64_t n = part == DOWN ? D : I, k = columns_of(part);
            const int64_t shape[] = {(n + rows - 1) / rows, (k + columns - 1) / columns};
            uint8_t *weight = made_add(&m, QUERN_E4M3, tensor_of(QWEN, expert, qwen[part], ".weight"), 2,
                                       (const int64_t[]){n, k});
            for (int64_t i = 0; i < n * k; i++) weight[i] = (uint8_t)(weight[i] & 0xf7); /* no NaN */
            void *scales = made_add(&m, dtype, tensor_of(QWEN, expert, qwen[part], suffix), ndim, shape);
            const int64_t count = ndim == 0 ? 1 : shape[0] * (ndim == 2 ? shape[1] : 1);
            for (int64_t i = 0; i < count; i++)
                if (dtype == QUERN_F32) ((float *)scales)[i] = 1e-3f * (float)(3 + 7 * i + part + expert);
                else ((uint8_t *)scales)[i] = (uint8_t)(120 + i + part + expert);
        }
    quern_checkpoint *c = open_made();
    check_experts(c, fp8_value, true);
    quern_checkpoint_close(c);
}

static void fp8_experts(void **state)
{
    (void)state;
    check_fp8(32, 32, 2, ".scale", QUERN_E8M0);
    check_fp8(32, 32, 2, ".weight_scale_inv", QUERN_F32);
    check_fp8(1, 1 << 20, 1, ".weight_scale", QUERN_F32);
    check_fp8(1, 1 << 20, 2, ".weight_scale", QUERN_F32);
    check_fp8(1 << 20, 1 << 20, 0, ".weight_scale", QUERN_F32);
    check_fp8(128, 128, 2, ".weight_scale_inv", QUERN_F32);
}

/* ---- GGUF ---- */

enum { BLOCK_D = D, BLOCK_I = 64 }; /* rows of NVFP4 are multiples of 64 */
static gguf_bytes g;

/* Element k of a row of NVFP4's blocks. */
static float gguf_nvfp4(const uint8_t *row, int64_t k, float global)
{
    const uint8_t *block = row + k / 64 * 36;
    const int part = (int)(k % 64 / 16), j = (int)(k % 16);
    const uint8_t pair = block[4 + 8 * part + j % 8];
    return e2m1[j < 8 ? pair & 15 : pair >> 4] * e4m3(block[part]) * global;
}

static void gguf_experts(void **state)
{
    static const char *const names[] = {"blk.2.ffn_gate_exps", "blk.2.ffn_up_exps", "blk.2.ffn_down_exps"};
    size_t at[3];
    uint64_t offset = 0;
    char name[64];
    (void)state;
    gguf_begin(&g, 3, 6, 0);
    for (int part = 0; part < 3; part++) {
        const int64_t shape[] = {E, part == DOWN ? BLOCK_D : BLOCK_I, part == DOWN ? BLOCK_I : BLOCK_D};
        snprintf(name, sizeof name, "%s.weight", names[part]);
        gguf_put_tensor(&g, name, GGML_NVFP4, 3, shape, offset);
        offset += E * 64 * 36 + (32 - E * 64 * 36 % 32) % 32;
        snprintf(name, sizeof name, "%s.scale", names[part]);
        gguf_put_tensor(&g, name, 0, 1, (const int64_t[]){E}, offset);
        offset += 32;
    }
    gguf_align(&g, 32);
    for (int part = 0; part < 3; part++) {
        at[part] = g.size;
        for (int i = 0; i < E * 64 * 36; i++)
            gguf_put(&g, (uint64_t)(i % 36 < 4 ? 0x38 + (i / 36 + part) % 16 : (i * 37 + part * 11) % 256),
                     1);
        gguf_align(&g, 32);
        for (int expert = 0; expert < E; expert++) {
            const float global = 0.25f * (float)(1 + expert + part);
            uint32_t word;
            memcpy(&word, &global, sizeof word);
            gguf_put(&g, word, 4);
        }
        gguf_align(&g, 32);
    }
    FILE *f = fopen(made_path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(g.bytes, 1, g.size, f), g.size);
    assert_int_equal(fclose(f), 0);
    quern_checkpoint *c = NULL;
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    size_t bytes;
    if (quern_checkpoint_open(made_path, &c) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, false, &bytes), QUERN_OK);
    void *memory = malloc(bytes);
    if (quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, false, memory, bytes, &e) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            for (int64_t r = 0; r < 64; r++)
                for (int64_t k = 0; k < 64; k++) {
                    const float want = gguf_nvfp4(g.bytes + at[part] + (expert * 64 + r) * 36, k,
                                                  0.25f * (float)(1 + expert + part));
                    const quern_moe_tensors *t = &e.tensors;
                    const float got =
                        part == DOWN
                            ? laid_out(t->down_codes, t->down_scales, t->down_global, expert, r, k, expert)
                            : laid_out(t->gate_up_codes, t->gate_up_scales, t->gate_up_global, expert,
                                       r / 8 * 16 + r % 8 + part * 8, k, 2 * expert + part);
                    assert_true(want == got);
                }
    free(memory);
    quern_checkpoint_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(modelopt_experts), cmocka_unit_test(compressed_tensors_experts),
        cmocka_unit_test(deepseek_experts), cmocka_unit_test(gpt_oss_experts),
        cmocka_unit_test(float_experts),    cmocka_unit_test(fp8_experts),
        cmocka_unit_test(gguf_experts),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
