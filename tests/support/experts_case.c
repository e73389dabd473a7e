/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "experts_case.h"

#include "cmocka_c11.h"
#include "context.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

made_model m;
char made_path[] = "checkpoint_test.XXXXXX";

int make_path(void **state)
{
    const int fd = mkstemp(made_path);
    return fd < 0 || close(fd) != 0 ? -1 : test_open_context(state);
}

int remove_path(void **state)
{
    made_free(&m);
    return unlink(made_path) != 0 ? -1 : test_close_context(state);
}

quern_checkpoint *open_made(void)
{
    quern_checkpoint *c = NULL;
    made_write(&m, made_path, 0, m.count);
    if (quern_checkpoint_open(made_path, &c) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return c;
}

/* ---- what the bytes mean ---- */

const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

float e4m3(uint8_t byte)
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent == 0 ? ldexpf((float)mantissa, -9) : ldexpf((float)(8 + mantissa), exponent - 10);
}

int nibble(const uint8_t *row, int64_t k)
{
    return row[k / 2] >> (k % 2 * 4) & 15;
}

float bf16(const uint16_t *values, int64_t i)
{
    const uint32_t word = (uint32_t)values[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

const char *tensor_of(const char *form, int expert, const char *part, const char *suffix)
{
    static char name[2][128];
    static int next;
    next = 1 - next;
    snprintf(name[next], sizeof name[next], form, expert, part, suffix);
    return name[next];
}

const char *const qwen[3] = {"gate", "up", "down"}, *const deepseek[3] = {"w1", "w3", "w2"};

int64_t columns_of(int part)
{
    return part == DOWN ? I : D;
}

void add_each(const char *form, const char *const *parts,
              void (*linear)(made_model *, const char *, int64_t, int64_t, float))
{
    made_free(&m);
    for (int expert = 0; expert < E; expert++)
        for (int part = 0; part < 3; part++)
            linear(&m, tensor_of(form, expert, parts[part], ""), part == DOWN ? D : I, columns_of(part),
                   1e-3f * (float)(1 + expert + part));
}

/* ---- what comes out ---- */

float laid_out(const quern_tensor *codes, const quern_tensor *scales, const quern_tensor *global, int expert,
               int64_t column, int64_t k, int64_t which)
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

/* Memory that is filled already is described as by the call that filled it, and stays as it is. */
static void check_filled(const quern_checkpoint *c, bool repacked, uint8_t *memory, size_t bytes,
                         const quern_checkpoint_moe *e)
{
    quern_checkpoint_moe again = QUERN_CHECKPOINT_MOE_INIT;
    uint8_t *copy = malloc(bytes + 1);
    assert_non_null(copy);
    if (bytes > 0) {
        memcpy(copy, memory, bytes);
        assert_int_equal(
            quern_checkpoint_experts_filled(ctx, c, 2, QUERN_CPU, repacked, memory, bytes - 1, &again),
            QUERN_ERR_WORKSPACE);
    }
    assert_int_equal(quern_checkpoint_experts_filled(ctx, c, 2, QUERN_CPU, repacked, memory, bytes, &again),
                     QUERN_OK);
    assert_memory_equal(copy, memory, bytes);
    assert_memory_equal(again.views, e->views, sizeof e->views);
    assert_int_equal(again.rounded_blocks, 0);
    free(copy);
}

void *fill_experts(const quern_checkpoint *c, bool repacked, quern_checkpoint_moe *e)
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
    check_filled(c, repacked, memory, bytes, e);
    return memory;
}

void compare_repacked(const quern_tensor *repacked, const quern_tensor *codes, const quern_tensor *scales)
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

void check_values(const quern_checkpoint_moe *e, expected_value *expected)
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

void run_layer(quern_checkpoint_moe *e, bool repacked)
{
    float hidden[2 * D], router[E * D], out[2 * D];
    for (int i = 0; i < 2 * D; i++) hidden[i] = (float)(i % 5) / 4;
    for (int i = 0; i < E * D; i++) router[i] = (float)(i % 3) / 8;
    const quern_tensor x = quern_tensor_contiguous(hidden, QUERN_F32, 2, (const int64_t[]){2, D}),
                       w = quern_tensor_contiguous(router, QUERN_F32, 2, (const int64_t[]){E, D}),
                       y = quern_tensor_contiguous(out, QUERN_F32, 2, (const int64_t[]){2, D});
    quern_moe_params p = QUERN_MOE_PARAMS_INIT;
    p.top_k = 2;
    if (repacked) {
        p.intermediate = e->intermediate;
        p.shared_intermediate = e->shared_intermediate;
    }
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

void check_experts(quern_checkpoint *c, expected_value *expected, bool run)
{
    quern_checkpoint_moe e = QUERN_CHECKPOINT_MOE_INIT, r = QUERN_CHECKPOINT_MOE_INIT;
    void *memory = fill_experts(c, false, &e), *other = fill_experts(c, true, &r);
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
