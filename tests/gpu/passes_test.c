/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * passes_test.c - a forward and a backward so long that they go through the workspace a few heads at a time,
 * against the same call that is handed every branch's output: the same bits in less memory.
 */
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>

enum { H = 8, HKV = 4, D = 128, PERIOD = 4099 };
static const int64_t N = 700001;

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

static uint32_t seed = 1;

/* A tensor on the device: random values of a long period, or poison. */
static quern_tensor make(quern_dtype dtype, int32_t ndim, const int64_t *shape, bool random)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    const size_t bytes = (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype),
                 block = (size_t)PERIOD * D * 2;
    t.device = QUERN_CUDA;
    OK(quern_cuda_allocate(0, bytes, &t.data));
    if (!random) {
        OK(quern_cuda_fill(0, t.data, 0xfe, bytes, NULL));
        return t;
    }
    uint16_t *values = malloc(block);
    assert_non_null(values);
    for (size_t i = 0; i < block / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (uint16_t)(0x3e00 + (seed >> 31 << 15) + (seed >> 16 & 0x1ff)); /* bf16, 1/8 <= |x| < 2 */
    }
    for (size_t at = 0; at < bytes; at += block)
        OK(quern_cuda_copy(0, (char *)t.data + at, values, bytes - at < block ? bytes - at : block, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    free(values);
    return t;
}

static size_t forward(quern_context *ctx, const quern_nsa_params *params, const quern_nsa_tensors *t)
{
    size_t bytes;
    void *workspace;
    OK(quern_nsa_forward_workspace(ctx, params, t, &bytes));
    OK(quern_cuda_allocate(0, bytes, &workspace));
    OK(quern_nsa_forward(ctx, NULL, params, t, workspace, bytes));
    OK(quern_cuda_synchronize(0, NULL));
    OK(quern_cuda_free(0, workspace));
    return bytes;
}

static size_t backward(quern_context *ctx, const quern_nsa_params *params, const quern_nsa_tensors *t)
{
    size_t bytes;
    void *workspace;
    OK(quern_nsa_backward_workspace(ctx, params, t, &bytes));
    OK(quern_cuda_allocate(0, bytes, &workspace));
    OK(quern_nsa_backward(ctx, NULL, params, t, workspace, bytes));
    OK(quern_cuda_synchronize(0, NULL));
    OK(quern_cuda_free(0, workspace));
    return bytes;
}

static void agree(const quern_tensor *a, const quern_tensor *b)
{
    const size_t bytes = (size_t)(a->strides[0] * a->shape[0]) * quern_dtype_size(a->dtype),
                 piece = (size_t)64 << 20;
    char *x = malloc(piece), *y = malloc(piece);
    assert_true(x != NULL && y != NULL);
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t n = bytes - at < piece ? bytes - at : piece;
        OK(quern_cuda_copy(0, x, (char *)a->data + at, n, NULL));
        OK(quern_cuda_copy(0, y, (char *)b->data + at, n, NULL));
        OK(quern_cuda_synchronize(0, NULL));
        if (memcmp(x, y, n) != 0) fail_msg("the results differ near byte %zu", at);
    }
    free(x);
    free(y);
}

static void check(quern_nsa_metric metric, quern_nsa_scope scope, int64_t tile, bool varlen)
{
    const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D}, w_shape[] = {H, 3, D},
                  gate_shape[] = {1, N, H, 3}, cu_shape[] = {4};
    const int32_t cu[] = {0, 1000, 1000, (int32_t)N - 5};
    const int32_t skip = varlen ? 1 : 0; /* varlen tensors have no batch */
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.gate = QUERN_NSA_GATE_WEIGHTS;
    params.metric = metric;
    params.scope = scope;
    params.tile = tile;
    if (tile > 64) params.forced_local = 0;
    const quern_tensor q = make(QUERN_BF16, 4 - skip, q_shape + skip, true),
                       k = make(QUERN_BF16, 4 - skip, k_shape + skip, true);
    const quern_tensor v = make(QUERN_BF16, 4 - skip, k_shape + skip, true),
                       w = make(QUERN_BF16, 3, w_shape, true);
    quern_tensor o[2], gates[2], branch[3], cu_seqlens = make(QUERN_I32, 1, cu_shape, false);
    OK(quern_cuda_copy(0, cu_seqlens.data, cu, sizeof cu, NULL));
    for (int i = 0; i < 2; i++) {
        o[i] = make(QUERN_BF16, 4 - skip, q_shape + skip, false);
        gates[i] = make(QUERN_F32, 4 - skip, gate_shape + skip, false);
    }
    for (int i = 0; i < 3; i++) branch[i] = make(QUERN_BF16, 4 - skip, q_shape + skip, false);
    quern_context *ctx;
    OK(quern_context_create(NULL, &ctx));
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.w_gate = &w;
    t.o = &o[0];
    t.gates = &gates[0];
    if (varlen) t.cu_seqlens = &cu_seqlens;
    const size_t shared = forward(ctx, &params, &t);
    t.o = &o[1];
    t.gates = &gates[1];
    t.o_cmp = &branch[0];
    t.o_slc = &branch[1];
    t.o_win = &branch[2];
    const size_t given = forward(ctx, &params, &t);
    agree(&o[0], &o[1]);
    agree(&gates[0], &gates[1]);
    /* Two of the three go through the workspace, at most half of their heads at a time. */
    assert_true(shared < given + (size_t)N * H * D * 2 + ((size_t)64 << 20));
    quern_context_destroy(ctx);
    const quern_tensor *const all[] = {&q,    &k,        &v,        &w,         &cu_seqlens, &o[0],
                                       &o[1], &gates[0], &gates[1], &branch[0], &branch[1],  &branch[2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) OK(quern_cuda_free(0, all[i]->data));
}

/* Without the compressed branch, and with lists of many rows: the sums of dK and dV of others are cut by how
 * many heads a call has. One pass has room for dQ's f32 sum where the outputs are given; there are two where
 * they are computed again. */
static void gradients(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D}, w_shape[] = {H, 3, D},
                  gate_shape[] = {1, N, H, 3}, lse_shape[] = {1, H, N}, entry_shape[] = {1, N / 64, HKV, D},
                  list_shape[] = {1, HKV, (N + 255) / 256, 16};
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.gate = QUERN_NSA_GATE_WEIGHTS;
    params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    params.tile = 256;
    params.forced_local = 0;
    const quern_tensor q = make(QUERN_BF16, 4, q_shape, true), k = make(QUERN_BF16, 4, k_shape, true),
                       v = make(QUERN_BF16, 4, k_shape, true), w = make(QUERN_BF16, 3, w_shape, true),
                       d_o = make(QUERN_BF16, 4, q_shape, true), o = make(QUERN_BF16, 4, q_shape, false),
                       gates = make(QUERN_F32, 4, gate_shape, false),
                       lists = make(QUERN_I32, 4, list_shape, false),
                       k_cmp = make(QUERN_BF16, 4, entry_shape, false),
                       v_cmp = make(QUERN_BF16, 4, entry_shape, false),
                       lse_slc = make(QUERN_F32, 3, lse_shape, false),
                       lse_win = make(QUERN_F32, 3, lse_shape, false),
                       o_slc = make(QUERN_BF16, 4, q_shape, false),
                       o_win = make(QUERN_BF16, 4, q_shape, false);
    quern_tensor d_q[2], d_k[2], d_v[2], d_w[2];
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    size_t bytes[2];
    quern_context *ctx;
    OK(quern_context_create(NULL, &ctx));
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.w_gate = &w;
    t.k_cmp = &k_cmp;
    t.v_cmp = &v_cmp;
    t.o = &o;
    t.gates = &gates;
    t.block_idx = &lists;
    t.lse_slc = &lse_slc;
    t.lse_win = &lse_win;
    t.o_slc = &o_slc;
    t.o_win = &o_win;
    params.branches = QUERN_NSA_BRANCH_SLC | QUERN_NSA_BRANCH_WIN;
    forward(ctx, &params, &t);
    t.d_o = &d_o;
    for (int i = 0; i < 2; i++) {
        d_q[i] = make(QUERN_BF16, 4, q_shape, false);
        d_k[i] = make(QUERN_BF16, 4, k_shape, false);
        d_v[i] = make(QUERN_BF16, 4, k_shape, false);
        d_w[i] = make(QUERN_F32, 3, w_shape, false);
        t.d_q = &d_q[i];
        t.d_k = &d_k[i];
        t.d_v = &d_v[i];
        t.d_w_gate = &d_w[i];
        bytes[i] = backward(ctx, &params, &t);
        t.o_slc = t.o_win = NULL;
    }
    agree(&d_q[0], &d_q[1]);
    agree(&d_k[0], &d_k[1]);
    agree(&d_v[0], &d_v[1]);
    agree(&d_w[0], &d_w[1]);
    assert_true(bytes[1] < bytes[0] + (size_t)N * H * D * 2);
    quern_context_destroy(ctx);
    const quern_tensor *const all[] = {
        &q,       &k,     &v,     &w,      &d_o,    &o,      &gates,  &lists,  &k_cmp,  &v_cmp,  &lse_slc,
        &lse_win, &o_slc, &o_win, &d_q[0], &d_q[1], &d_k[0], &d_k[1], &d_v[0], &d_v[1], &d_w[0], &d_w[1]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) OK(quern_cuda_free(0, all[i]->data));
}

static void lists_of_a_group(void **state)
{
    (void)state;
    check(QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 1, false);
}

static void lists_of_a_head(void **state)
{
    (void)state;
    check(QUERN_NSA_METRIC_MEAN_LOGIT, QUERN_NSA_SCOPE_HEAD, 128, false);
}

static void varlen_sequences(void **state)
{
    (void)state;
    check(QUERN_NSA_METRIC_MEAN_LOGIT, QUERN_NSA_SCOPE_GROUP, 64, true);
}

/* Hopper's backward keeps dQ's sums by tiles of 64 queries: of sequences of one token they would take 128 GiB
 * for a key/value head. */
static void short_sequences(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1 << 18, 1, 64, D}, k_shape[] = {1 << 18, 1, 4, D},
                  lse_shape[] = {1 << 18, 64, 1};
    quern_tensor q = quern_tensor_contiguous(NULL, QUERN_BF16, 4, q_shape),
                 k = quern_tensor_contiguous(NULL, QUERN_BF16, 4, k_shape),
                 lse = quern_tensor_contiguous(NULL, QUERN_F32, 3, lse_shape);
    q.device = k.device = lse.device = QUERN_CUDA;
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = t.o = t.d_o = t.d_q = &q;
    t.k = t.v = t.d_k = t.d_v = &k;
    t.lse = &lse;
    quern_context *ctx;
    OK(quern_context_create(NULL, &ctx));
    size_t bytes;
    OK(quern_attention_backward_workspace(ctx, &params, &t, &bytes));
    quern_context_destroy(ctx);
    assert_true(bytes < ((size_t)1 << 18) * 64 * D * 2 * sizeof(float)); /* twice dQ in f32 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_of_a_group), cmocka_unit_test(lists_of_a_head),
        cmocka_unit_test(varlen_sequences), cmocka_unit_test(gradients),
        cmocka_unit_test(short_sequences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
