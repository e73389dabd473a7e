/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults_linear_test.c - faults in the data of projections and of the indexer's loss on device memory: each
 * sets its bit of the status word and counts as cuda.h says; what does not depend on it keeps its bits. */
#include "cmocka_c11.h"
#include "faults_case.h"

#include <quern/dsv4.h>
#include <quern/linear.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, N = 40, K = 256, BLOCK = 128, BAD = 5 };

/* Rows in bf16, whose bits are the upper half of a float's. */
typedef struct projection {
    uint16_t x[ROWS * K];
    unsigned char codes[N * K], scale[K / BLOCK];
    bool a8, wide; /* wide: x as f32 */
} projection;

static projection good_projection(bool a8, bool wide)
{
    projection c = {.scale = {127, 126}, .a8 = a8, .wide = wide};
    for (int i = 0; i < ROWS * K; i++) c.x[i] = (uint16_t)(0x3F00 + i * 37 % 128 + (i % 3 == 0 ? 0x8000 : 0));
    for (int i = 0; i < N * K; i++) c.codes[i] = (unsigned char)(i * 29 % 120 + (i % 5 == 0 ? 128 : 0));
    return c;
}

typedef struct outputs {
    float y[ROWS * N]; /* of bf16 the first half */
} outputs;

static outputs project(const projection *c)
{
    static const int64_t x_shape[] = {ROWS, K}, w_shape[] = {N, K}, scale_shape[] = {1, K / BLOCK},
                         y_shape[] = {ROWS, N};
    const quern_dtype dtype = c->wide ? QUERN_F32 : QUERN_BF16;
    uint32_t wide[ROWS * K];
    outputs out;
    memset(&out, 0xA5, sizeof out);
    for (int i = 0; i < ROWS * K; i++) wide[i] = (uint32_t)c->x[i] << 16;
    const quern_tensor x = on_device(c->wide ? (const void *)wide : c->x, dtype, 2, x_shape),
                       w = on_device(c->codes, QUERN_U8, 2, w_shape),
                       scale = on_device(c->scale, QUERN_U8, 2, scale_shape),
                       y = on_device(out.y, dtype, 2, y_shape);
    quern_linear_params p = QUERN_LINEAR_PARAMS_INIT;
    quern_linear_tensors t = QUERN_LINEAR_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    p.a8 = c->a8 ? QUERN_LINEAR_A8_FP8 : QUERN_LINEAR_A8_NONE;
    t.x = &x;
    t.w = &w;
    t.w_scale = &scale;
    t.y = &y;
    OK(quern_linear_forward_workspace(ctx, &p, &t, &bytes));
    OK(quern_linear_forward(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(out.y, &y, c->wide ? sizeof out.y : sizeof out.y / 2);
    return out;
}

/* A scale that is no number: its weights count as 0. By Hopper's kernels, and by any GPU's of f32. */
static void scales(void **unused)
{
    (void)unused;
    for (int which = 0; which < 4; which++) {
        projection c = good_projection(which / 2 != 0, which % 2 != 0), without = c;
        for (int i = 0; i < N * K; i++)
            if (i % K >= BLOCK) without.codes[i] = 0;
        c.scale[1] = 0xFF;
        const outputs expected = project(&without);
        assert_int_equal(faults(), 0);
        const outputs out = project(&c);
        assert_int_equal(faults(), QUERN_STATUS_BAD_SCALE);
        assert_memory_equal(&out, &expected, sizeof out);
    }
}

/* What is rounded and not finite counts as 0. */
static void not_finite_rows(void **unused)
{
    (void)unused;
    for (int which = 0; which < 4; which++) {
        projection c = good_projection(true, which % 2 != 0), without = c;
        without.x[K + BAD] = 0;
        c.x[K + BAD] = which < 2 ? 0x7FC0 : 0xFF80; /* NaN, -inf */
        const outputs expected = project(&without);
        assert_int_equal(faults(), 0);
        const outputs out = project(&c);
        assert_int_equal(faults(), QUERN_STATUS_NOT_FINITE);
        assert_memory_equal(&out, &expected, sizeof out);
    }
}

enum { QUERIES = 4, HEADS = 2, WIDTH = 16, ENTRIES = 9, LISTED = 5 };

typedef struct loss_result {
    float loss, d_k[ENTRIES * WIDTH];
} loss_result;

static loss_result loss_of(const int32_t *idx)
{
    static const int64_t q_shape[] = {1, QUERIES, HEADS, WIDTH}, k_shape[] = {1, ENTRIES, WIDTH},
                         w_shape[] = {1, QUERIES, HEADS}, lse_shape[] = {1, HEADS, QUERIES},
                         idx_shape[] = {1, QUERIES, LISTED};
    float q[QUERIES * HEADS * WIDTH], k[ENTRIES * WIDTH], w[QUERIES * HEADS];
    loss_result out;
    memset(&out, 0xA5, sizeof out);
    for (int i = 0; i < QUERIES * HEADS * WIDTH; i++) q[i] = (float)(i * 37 % 101 - 50) * 0.03f;
    for (int i = 0; i < ENTRIES * WIDTH; i++) k[i] = (float)(i * 53 % 97 - 48) * 0.03f;
    for (int i = 0; i < QUERIES * HEADS; i++) w[i] = 1.0f - 0.1f * (float)i;
    const quern_tensor queries = on_device(q, QUERN_F32, 4, q_shape),
                       keys = on_device(k, QUERN_F32, 3, k_shape),
                       weights = on_device(w, QUERN_F32, 3, w_shape),
                       lse = on_device(w, QUERN_F32, 3, lse_shape),
                       lists = on_device(idx, QUERN_I32, 3, idx_shape),
                       loss = on_device(&out.loss, QUERN_F32, 0, NULL),
                       d_k = on_device(out.d_k, QUERN_F32, 3, k_shape);
    quern_dsv4_index_loss_params p = QUERN_DSV4_INDEX_LOSS_PARAMS_INIT;
    quern_dsv4_index_loss_tensors t = QUERN_DSV4_INDEX_LOSS_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    p.ratio = 1;
    p.start_abs_pos = ENTRIES;
    t.q_index = t.q = &queries;
    t.k_index = t.kv_cmp = &keys;
    t.w = &weights;
    t.lse_win = &lse;
    t.idx = &lists;
    t.loss = &loss;
    t.d_k_index = &d_k;
    OK(quern_dsv4_index_loss_workspace(ctx, &p, &t, &bytes));
    OK(quern_dsv4_index_loss(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(&out.loss, &loss, sizeof out.loss);
    to_host(out.d_k, &d_k, sizeof out.d_k);
    return out;
}

/* Entries out of range are skipped. */
static void lists(void **unused)
{
    (void)unused;
    int32_t idx[QUERIES * LISTED];
    for (int i = 0; i < QUERIES * LISTED; i++) idx[i] = i * 7 % ENTRIES;
    idx[LISTED + 1] = idx[3 * LISTED] = -1;
    const loss_result expected = loss_of(idx);
    assert_int_equal(faults(), 0);
    idx[LISTED + 1] = ENTRIES;
    idx[3 * LISTED] = -2;
    const loss_result out = loss_of(idx);
    assert_int_equal(faults(), QUERN_STATUS_BAD_INDEX);
    assert_memory_equal(&out, &expected, sizeof out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scales),
        cmocka_unit_test(not_finite_rows),
        cmocka_unit_test(lists),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
