/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * checkpoint_test.c - a checkpoint of any kind is one list of tensors, and a layer's experts come out of any
 * format with the values that the file's bytes mean.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "gguf_bytes.h"
#include "made_model.h"

#include "io/gguf.h"

#include <quern/checkpoint.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { E = 3, D = 64, I = 32 };

static made_model m;
static char path[] = "checkpoint_test.XXXXXX";

static int make_path(void **state)
{
    const int fd = mkstemp(path);
    return fd < 0 || close(fd) != 0 ? -1 : test_open_context(state);
}

static int remove_path(void **state)
{
    made_free(&m);
    return unlink(path) != 0 ? -1 : test_close_context(state);
}

static quern_checkpoint *open_made(void)
{
    quern_checkpoint *c = NULL;
    made_write(&m, path, 0, m.count);
    if (quern_checkpoint_open(path, &c) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return c;
}

/* ---- the list ---- */

static void tensors_are_listed_and_viewed(void **state)
{
    (void)state;
    made_free(&m);
    made_modelopt(&m, "a", 16, 32, 0.5f);
    made_add(&m, QUERN_BF16, "b.weight", 2, (const int64_t[]){3, 5});
    quern_checkpoint *c = open_made();
    quern_checkpoint_tensor t = QUERN_CHECKPOINT_TENSOR_INIT;
    quern_tensor view = {.ndim = -77};
    assert_int_equal(quern_checkpoint_count(c), 4);
    const int64_t weight = quern_checkpoint_find(c, "a.weight"), b = quern_checkpoint_find(c, "b.weight");
    assert_true(weight >= 0 && b >= 0);
    assert_int_equal(quern_checkpoint_find(c, "a"), -1);
    assert_int_equal(quern_checkpoint_find(c, NULL), -1);
    assert_int_equal(quern_checkpoint_info(c, (size_t)weight, &t), QUERN_OK);
    assert_string_equal(t.name, "a.weight");
    assert_string_equal(t.dtype, "U8");
    assert_string_equal(t.shard, path);
    assert_true(t.format == QUERN_FORMAT_NVFP4_MODELOPT && t.ndim == 2 && t.shape[1] == 16 && t.bytes == 256);
    assert_memory_equal(t.data, made_data(&m, "a.weight"), 256);
    assert_int_equal(quern_checkpoint_view(c, (size_t)b, &view), QUERN_OK);
    assert_true(view.dtype == QUERN_BF16 && view.ndim == 2 && view.shape[0] == 3 && view.shape[1] == 5);
    assert_memory_equal(view.data, made_data(&m, "b.weight"), 30);
    assert_int_equal(quern_checkpoint_info(c, 4, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_view(c, 4, &view), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_view(c, 0, NULL), QUERN_ERR_INVALID_ARGUMENT);
    t.size = 0;
    assert_int_equal(quern_checkpoint_info(c, 0, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_true(t.bytes == 256 && view.shape[1] == 5);
    assert_int_equal(quern_checkpoint_metadata_count(c), 0);
    assert_null(quern_checkpoint_metadata_key(c, 0));
    quern_checkpoint_close(c);
    quern_checkpoint_close(NULL);
    assert_int_equal(quern_checkpoint_open("no/such/model", &c), QUERN_ERR_IO);
    assert_non_null(strstr(quern_last_error(NULL), "no/such/model"));
    assert_int_equal(quern_checkpoint_open(NULL, &c), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_checkpoint_open(path, NULL), QUERN_ERR_INVALID_ARGUMENT);
}

/* Codes of the format's 4-bit dtype go into a product as the reader hands them out. */
static void four_bit_views_are_multiplied_as_they_are(void **state)
{
    enum { K = 32, N = 16 };
    (void)state;
    made_free(&m);
    made_add(&m, QUERN_E2M1X2, "w.weight", 3, (const int64_t[]){1, N, K / 2});
    uint8_t *scales = made_add(&m, QUERN_E4M3, "w.weight_scale", 3, (const int64_t[]){1, N, K / 16});
    for (int i = 0; i < N * K / 16; i++) scales[i] = (uint8_t)(0x30 + scales[i] % 16);
    quern_checkpoint *c = open_made();
    quern_tensor codes, scale, bytes;
    assert_int_equal(quern_checkpoint_view(c, (size_t)quern_checkpoint_find(c, "w.weight"), &codes),
                     QUERN_OK);
    assert_int_equal(quern_checkpoint_view(c, (size_t)quern_checkpoint_find(c, "w.weight_scale"), &scale),
                     QUERN_OK);
    assert_int_equal(codes.dtype, QUERN_E2M1X2);
    bytes = codes;
    bytes.dtype = QUERN_U8;
    float a[2 * K], out[2][2 * N];
    int32_t end = 2;
    for (int i = 0; i < 2 * K; i++) a[i] = (float)(i % 7 - 3);
    const quern_tensor x = quern_tensor_contiguous(a, QUERN_F32, 2, (const int64_t[]){2, K}),
                       offsets = quern_tensor_contiguous(&end, QUERN_I32, 1, (const int64_t[]){1});
    for (int i = 0; i < 2; i++) {
        const quern_tensor y = quern_tensor_contiguous(out[i], QUERN_F32, 2, (const int64_t[]){2, N});
        quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
        quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
        p.b_codes = QUERN_NVFP4_CODES_K_MAJOR;
        p.b_scales = QUERN_NVFP4_LAYOUT_K_MAJOR;
        t.a = &x, t.b_codes = i == 0 ? &codes : &bytes, t.b_scales = &scale, t.offsets = &offsets, t.c = &y;
        size_t room;
        assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &p, &t, &room), QUERN_OK);
        void *workspace = malloc(room + 1);
        if (quern_nvfp4_gemm(ctx, NULL, &p, &t, workspace, room) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        free(workspace);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_true(out[0][0] != 0 || out[0][1] != 0);
    quern_checkpoint_close(c);
}

/* ---- experts: what the file's bytes mean ---- */

static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

static float e4m3(uint8_t byte)
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
}

static int nibble(const uint8_t *row, int64_t k)
{
    return row[k / 2] >> (k % 2 * 4) & 15;
}

static float bf16(const uint16_t *values, int64_t i)
{
    const uint32_t word = (uint32_t)values[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

typedef float expected_value(int expert, int part, int64_t row, int64_t k);
enum { GATE, UP, DOWN };

static const char *tensor_of(const char *form, int expert, const char *part, const char *suffix)
{
    static char name[2][128];
    static int next;
    next = 1 - next;
    snprintf(name[next], sizeof name[next], form, expert, part, suffix);
    return name[next];
}

#define QWEN "model.layers.2.mlp.experts.%d.%s_proj%s"
#define DEEPSEEK "layers.2.ffn.experts.%d.%s%s"
static const char *const qwen[] = {"gate", "up", "down"}, *const deepseek[] = {"w1", "w3", "w2"};

static int64_t columns_of(int part)
{
    return part == DOWN ? I : D;
}

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

/* ---- experts: what comes out ---- */

/* A value of a product's weight [K, N], codes and scales linear. */
static float laid_out(const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *global,
                      int expert, int64_t column, int64_t k, int64_t which)
{
    const int64_t n = codes->shape[2], half = codes->shape[1];
    const uint8_t code = ((const uint8_t *)codes->data)[(expert * half + k / 2) * n + column];
    const uint8_t scale = ((const uint8_t *)scales->data)[(expert * half / 8 + k / 16) * n + column];
    return e2m1[code >> (k % 2 * 4) & 15] * e4m3(scale) * ((const float *)global->data)[which];
}

static float result_value(const quern_checkpoint_moe *e, int expert, int part, int64_t r, int64_t k)
{
    const quern_moe_tensors *t = &e->tensors;
    if (t->gate_up != NULL && part == DOWN) return bf16(t->down->data, (expert * D + r) * I + k);
    if (t->gate_up != NULL) return bf16(t->gate_up->data, (expert * 2 * I + part * I + r) * D + k);
    if (part == DOWN) return laid_out(t->down_codes, t->down_scales, t->down_global, expert, r, k, expert);
    const int64_t column = r / 8 * 16 + r % 8 + part * 8;
    return laid_out(t->gate_up_codes, t->gate_up_scales, t->gate_up_global, expert, column, k,
                    2 * expert + part);
}

/* Fills layer 2 into memory that the caller frees. */
static void *fill(const quern_checkpoint *c, bool repacked, quern_checkpoint_moe *e)
{
    size_t bytes;
    if (quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CPU, repacked, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    uint8_t *memory = malloc(bytes + 1);
    assert_non_null(memory);
    if (bytes > 0) { /* a byte less is refused */
        assert_int_equal(quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, repacked, memory, bytes - 1, e),
                         QUERN_ERR_WORKSPACE);
        assert_int_equal(e->experts, 0);
    }
    if (quern_checkpoint_experts(ctx, c, 2, QUERN_CPU, repacked, memory, bytes, e) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    assert_true(e->experts == E && e->hidden == D && e->intermediate == I);
    return memory;
}

/* Repacked experts hold the bytes of those that are not. */
static void compare_repacked(const quern_tensor *repacked, const quern_tensor *codes,
                             const quern_tensor *scales)
{
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
    const size_t code_bytes = (size_t)(codes->shape[0] * codes->shape[1] * codes->shape[2]);
    uint8_t *back = malloc(code_bytes + code_bytes / 8);
    assert_non_null(back);
    quern_tensor codes_back = *codes, scales_back = *scales;
    codes_back.data = back;
    scales_back.data = back + code_bytes;
    p.inverse = true;
    t.b_codes = &codes_back, t.b_scales = &scales_back, t.b_repacked = repacked;
    size_t bytes;
    assert_int_equal(quern_moe_prepack_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    if (quern_moe_prepack(ctx, NULL, &p, &t, workspace, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    assert_memory_equal(back, codes->data, code_bytes);
    assert_memory_equal(back + code_bytes, scales->data, code_bytes / 8);
    free(workspace);
    free(back);
}

static void check_values(const quern_checkpoint_moe *e, expected_value *expected)
{
    for (int expert = 0; expert < E; expert++) {
        for (int part = 0; part < 3; part++) {
            for (int64_t r = 0; r < (part == DOWN ? D : I); r++) {
                for (int64_t k = 0; k < columns_of(part); k++) {
                    const float want = expected(expert, part, r, k),
                                got = result_value(e, expert, part, r, k);
                    if (want != got)
                        fail_msg("expert %d part %d [%d, %d]: %g instead of %g", expert, part, (int)r, (int)k,
                                 (double)got, (double)want);
                }
            }
        }
    }
}

/* The layer takes the tensors as they are. */
static void run_layer(quern_checkpoint_moe *e, bool repacked)
{
    float hidden[2 * D], router[E * D], out[2 * D];
    for (int i = 0; i < 2 * D; i++) hidden[i] = (float)(i % 5) / 4;
    for (int i = 0; i < E * D; i++) router[i] = (float)(i % 3) / 8;
    const quern_tensor x = quern_tensor_contiguous(hidden, QUERN_F32, 2, (const int64_t[]){2, D}),
                       w = quern_tensor_contiguous(router, QUERN_F32, 2, (const int64_t[]){E, D}),
                       y = quern_tensor_contiguous(out, QUERN_F32, 2, (const int64_t[]){2, D});
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    p.top_k = 2;
    if (repacked) p.intermediate = e->intermediate;
    if (e->gate_up_input_global != NULL) {
        p.a4 = true;
        e->tensors.gate_up_input_global = e->gate_up_input_global;
        e->tensors.down_input_global = e->down_input_global;
    }
    e->tensors.hidden = &x, e->tensors.weight = &w, e->tensors.out = &y;
    size_t bytes;
    if (quern_moe_forward_workspace(ctx, &p, &e->tensors, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    void *workspace = malloc(bytes + 1);
    if (quern_moe_forward(ctx, NULL, &p, &e->tensors, workspace, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    free(workspace);
    for (int i = 0; i < 2 * D; i++) assert_true(isfinite(out[i]));
}

static void check_experts(quern_checkpoint *c, expected_value *expected, bool run)
{
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT, r = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill(c, false, &e), *other = fill(c, true, &r);
    check_values(&e, expected);
    if (e.tensors.gate_up == NULL) {
        compare_repacked(r.tensors.gate_up_repacked, e.tensors.gate_up_codes, e.tensors.gate_up_scales);
        compare_repacked(r.tensors.down_repacked, e.tensors.down_codes, e.tensors.down_scales);
        assert_memory_equal(r.tensors.gate_up_global->data, e.tensors.gate_up_global->data,
                            E * 2 * sizeof(float));
    } else {
        check_values(&r, expected);
    }
    if (run) {
        run_layer(&e, false);
        run_layer(&r, true);
    }
    free(memory);
    free(other);
}

static void add_each(const char *form, const char *const *parts,
                     void (*linear)(made_model *, const char *, int64_t, int64_t, float))
{
    made_free(&m);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            linear(&m, tensor_of(form, expert, parts[part], ""), part == DOWN ? D : I, columns_of(part),
                   1e-3f * (float)(1 + expert + part));
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
    void *memory = fill(c, false, &e);
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
    void *memory = fill(c, true, &e);
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
    free(fill(c, false, &hashed));
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
    void *memory = fill(c, false, &e);
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
    void *memory = fill(c, false, &e);
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
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(g.bytes, 1, g.size, f), g.size);
    assert_int_equal(fclose(f), 0);
    quern_checkpoint *c = NULL;
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT;
    size_t bytes;
    if (quern_checkpoint_open(path, &c) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
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

/* ---- what is refused ---- */

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
    made_free(&m);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            made_fp8(&m, tensor_of(DEEPSEEK, expert, deepseek[part], ""), 64, 64, 32);
    expect_refused(2, QUERN_ERR_UNSUPPORTED, "is fp8 blocks of dtype F8_E4M3");

    add_each(QWEN, qwen, made_modelopt);
    quern_checkpoint *c = open_made();
    size_t bytes = 77;
    assert_int_equal(quern_checkpoint_experts_bytes(ctx, c, 2, QUERN_CUDA, false, &bytes),
                     QUERN_ERR_UNSUPPORTED);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tensors_are_listed_and_viewed),
        cmocka_unit_test(four_bit_views_are_multiplied_as_they_are),
        cmocka_unit_test(modelopt_experts),
        cmocka_unit_test(compressed_tensors_experts),
        cmocka_unit_test(deepseek_experts),
        cmocka_unit_test(gpt_oss_experts),
        cmocka_unit_test(float_experts),
        cmocka_unit_test(gguf_experts),
        cmocka_unit_test(what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
