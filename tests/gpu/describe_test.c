/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* describe_test.c - the line that quern_plan_describe() writes about plans on a GPU: each stage with the
 * variant chosen. */
#include "cmocka_c11.h"

#include <stdio.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/moe.h>
#include <quern/nsa.h>
#include <quern/nvfp4.h>
#include <quern/plan.h>

enum { N = 2048, SHORT = 256, LONG = 1 << 15, H = 32, HKV = 2, D = 128, TILE = 128 };

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

static quern_context *ctx;
static const char *fast; /* the variant of Hopper, or any */

static int open_context(void **state)
{
    (void)state;
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    quern_cuda_device device = QUERN_CUDA_DEVICE_INIT;
    if (quern_context_create(&params, &ctx) != QUERN_OK || quern_cuda_device_get(0, &device) != QUERN_OK)
        return 1;
    fast = device.compute_major == 9 && device.compute_minor == 0 ? "sm90" : "any";
    return 0;
}

static int close_context(void **state)
{
    (void)state;
    quern_context_destroy(ctx);
    return 0;
}

/* A view of aligned memory that no plan reads. */
static quern_tensor view(quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous((void *)(uintptr_t)4096, dtype, ndim,
                                             shape); // NOLINT(performance-no-int-to-ptr)
    t.device = QUERN_CUDA;
    return t;
}

static void expect_line(quern_operation op, const void *params, const void *tensors, const char *line)
{
    char text[500], expected[500];
    size_t bytes = 0;
    quern_plan *plan = NULL;
    OK(quern_plan_create(ctx, op, params, tensors, &plan));
    OK(quern_plan_workspace(plan, &bytes));
    snprintf(expected, sizeof expected, "%s; %zu bytes of workspace", line, bytes);
    OK(quern_plan_describe(plan, text, sizeof text));
    assert_string_equal(text, expected);
    quern_plan_destroy(plan);
}

static void attention(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D};
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    quern_tensor q = view(QUERN_BF16, 4, q_shape), k = view(QUERN_BF16, 4, k_shape),
                 f = view(QUERN_F32, 4, q_shape), fk = view(QUERN_F32, 4, k_shape);
    char line[200];
    t.q = t.o = &q;
    t.k = t.v = &k;
    snprintf(line, sizeof line, "attention_forward on cuda: attend_forward by attend_forward_%s", fast);
    expect_line(QUERN_OP_ATTENTION_FORWARD, &params, &t, line);
    q.data = (char *)q.data + 2;
    expect_line(QUERN_OP_ATTENTION_FORWARD, &params, &t,
                "attention_forward on cuda: attend_forward by attend_forward_any");
    t.q = t.o = &f;
    t.k = t.v = &fk;
    expect_line(QUERN_OP_ATTENTION_FORWARD, &params, &t,
                "attention_forward on cuda: attend_forward by attend_forward_f32");
}

/* To ask a framework for memory takes longer than to launch a small call. */
static void a_small_call_asks_for_no_workspace(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, 64, 8, D}, k_shape[] = {1, 64, HKV, D};
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    quern_tensor q = view(QUERN_BF16, 4, q_shape), k = view(QUERN_BF16, 4, k_shape);
    size_t bytes = 1;
    t.q = t.o = &q;
    t.k = t.v = &k;
    OK(quern_attention_forward_workspace(ctx, &params, &t, &bytes));
    assert_int_equal(bytes, 0);
}

static void nsa(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D}, gate_shape[] = {H, 3, D};
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    quern_tensor q = view(QUERN_BF16, 4, q_shape), k = view(QUERN_BF16, 4, k_shape),
                 gate = view(QUERN_BF16, 3, gate_shape);
    char line[400];
    params.gate = QUERN_NSA_GATE_WEIGHTS;
    params.tile = TILE;
    params.metric = QUERN_NSA_METRIC_SOFTMAX;
    t.q = t.o = &q;
    t.k = t.v = &k;
    t.w_gate = &gate;
    snprintf(line, sizeof line,
             "nsa_forward on cuda: compress_forward by compress_forward_any, attend_forward by "
             "attend_forward_%s (3 times), "
             "select by select_any, gate_forward by gate_forward_any",
             fast);
    expect_line(QUERN_OP_NSA_FORWARD, &params, &t, line);
    q.shape[1] = k.shape[1] = SHORT; /* every block is chosen, and the window is as long */
    snprintf(line, sizeof line,
             "nsa_forward on cuda: compress_forward by compress_forward_any, attend_forward by "
             "attend_forward_%s (2 times), gate_forward by gate_forward_any",
             fast);
    expect_line(QUERN_OP_NSA_FORWARD, &params, &t, line);
}

static void nsa_index(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, N, HKV, D}, k_shape[] = {1, N, D}, list_shape[] = {1, HKV, N, 16},
                  score_shape[] = {1, HKV, N, (N + 127) / 128};
    const quern_nsa_index_params params = QUERN_NSA_INDEX_PARAMS_INIT;
    quern_nsa_index_tensors t = QUERN_NSA_INDEX_TENSORS_INIT;
    quern_tensor q = view(QUERN_BF16, 4, q_shape), k = view(QUERN_BF16, 3, k_shape),
                 lists = view(QUERN_I32, 4, list_shape), scores = view(QUERN_F32, 4, score_shape);
    char line[200];
    t.q_index = &q;
    t.k_index = &k;
    t.block_idx = &lists;
    snprintf(line, sizeof line, "nsa_index on cuda: block_index by block_index_%s", fast);
    expect_line(QUERN_OP_NSA_INDEX, &params, &t, line);
    t.block_score = &scores;
    expect_line(QUERN_OP_NSA_INDEX, &params, &t, "nsa_index on cuda: block_index by block_index_any");
}

static void nsa_index_loss(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, N, H, D}, kv_shape[] = {1, N, HKV, D}, k_shape[] = {1, N, D},
                  list_shape[] = {1, HKV, N, 16};
    const quern_nsa_index_loss_params params = QUERN_NSA_INDEX_LOSS_PARAMS_INIT;
    quern_nsa_index_loss_tensors t = QUERN_NSA_INDEX_LOSS_TENSORS_INIT;
    quern_tensor q = view(QUERN_BF16, 4, q_shape), kv = view(QUERN_BF16, 4, kv_shape),
                 k = view(QUERN_BF16, 3, k_shape), lists = view(QUERN_I32, 4, list_shape);
    t.q = &q;
    t.k = t.q_index = t.d_q_index = &kv;
    t.k_index = t.d_k_index = &k;
    t.block_idx = &lists;
    expect_line(QUERN_OP_NSA_INDEX_LOSS, &params, &t, "nsa_index_loss on cuda: index_loss by index_loss_any");
    q.data = (char *)q.data + 2;
    expect_line(QUERN_OP_NSA_INDEX_LOSS, &params, &t,
                "nsa_index_loss on cuda: index_loss by index_loss_plain");
}

/* Lists of up to 64 blocks of 64 and of 128 tokens: Hopper's indexer chooses them, and attention is by the
 * kernels that share keys between tokens. */
static void msa(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, LONG, H, D}, kv_shape[] = {1, LONG, HKV, D}, k_shape[] = {1, LONG, D};
    const quern_tensor q = view(QUERN_BF16, 4, q_shape), kv = view(QUERN_BF16, 4, kv_shape),
                       k_index = view(QUERN_BF16, 3, k_shape);
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    quern_nsa_index_params rule = QUERN_NSA_INDEX_PARAMS_INIT;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    quern_nsa_index_tensors index = QUERN_NSA_INDEX_TENSORS_INIT;
    char line[200];
    OK(quern_nsa_params_preset(&params, "msa"));
    params.selection = QUERN_NSA_LIST_INDEXED;
    t.q = t.o = &q;
    t.k = t.v = t.q_index = index.q_index = &kv;
    t.k_index = index.k_index = &k_index;
    for (int64_t size = 64; size <= 128; size *= 2)
        for (int64_t k = 16; k <= 64; k *= 2) {
            const int64_t list_shape[] = {1, HKV, LONG, k};
            const quern_tensor lists = view(QUERN_I32, 4, list_shape);
            index.block_idx = &lists;
            rule.select_block = params.select_block = size;
            rule.num_selected = params.num_selected = k;
            snprintf(line, sizeof line, "nsa_index on cuda: block_index by block_index_%s", fast);
            expect_line(QUERN_OP_NSA_INDEX, &rule, &index, line);
            snprintf(line, sizeof line,
                     "nsa_forward on cuda: block_index by block_index_%s, attend_forward by "
                     "attend_forward_%s",
                     fast,
                     strcmp(fast, "sm90") != 0 ? fast
                     : size == 64 || k > 32    ? "sm90_tokens"
                                               : "sm90_by_block");
            expect_line(QUERN_OP_NSA_FORWARD, &params, &t, line);
        }
}

/* The same, so far from others that none meet. */
static quern_tensor view_number(int32_t number, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = view(dtype, ndim, shape);
    t.data = (char *)t.data + ((size_t)number << 24);
    return t;
}

/* The router writes its results where the caller wants them: no step copies them. */
static void moe(void **state)
{
    (void)state;
    enum { EXPERTS = 8, DM = 256, INNER = 128, K = 2 };
    int64_t up_bytes = 0, down_bytes = 0;
    OK(quern_nvfp4_repacked_bytes(ctx, QUERN_CUDA, 0, 2 * INNER, DM, &up_bytes));
    OK(quern_nvfp4_repacked_bytes(ctx, QUERN_CUDA, 0, DM, INNER, &down_bytes));
    const int64_t x_shape[] = {1, DM}, logits_shape[] = {1, EXPERTS}, up_shape[] = {EXPERTS, up_bytes},
                  down_shape[] = {EXPERTS, down_bytes}, chosen_shape[] = {1, K}, slots = K, ends = EXPERTS;
    const quern_tensor x = view_number(0, QUERN_BF16, 2, x_shape),
                       logits = view_number(1, QUERN_BF16, 2, logits_shape),
                       up = view_number(2, QUERN_U8, 2, up_shape),
                       down = view_number(3, QUERN_U8, 2, down_shape),
                       out = view_number(4, QUERN_BF16, 2, x_shape),
                       experts = view_number(5, QUERN_I32, 2, chosen_shape),
                       weights = view_number(6, QUERN_F32, 2, chosen_shape),
                       offsets = view_number(7, QUERN_I32, 1, &ends),
                       permutation = view_number(8, QUERN_I32, 1, &slots);
    quern_moe_params params = QUERN_MOE_PARAMS_INIT;
    quern_moe_tensors t = QUERN_MOE_TENSORS_INIT;
    char line[200];
    params.top_k = K;
    params.intermediate = INNER;
    t.hidden = &x;
    t.logits = &logits;
    t.gate_up_repacked = &up;
    t.down_repacked = &down;
    t.out = &out;
    t.experts = &experts;
    t.weights = &weights;
    t.offsets = &offsets;
    t.permutation = &permutation;
    snprintf(line, sizeof line,
             "moe_forward on cuda: route_forward by route_forward_any, grouped_gemm by grouped_gemm_%s (2 "
             "times), combine by combine_any",
             fast);
    expect_line(QUERN_OP_MOE_FORWARD, &params, &t, line);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(attention),
                                       cmocka_unit_test(a_small_call_asks_for_no_workspace),
                                       cmocka_unit_test(nsa),
                                       cmocka_unit_test(nsa_index),
                                       cmocka_unit_test(nsa_index_loss),
                                       cmocka_unit_test(msa),
                                       cmocka_unit_test(moe)};
    return cmocka_run_group_tests(tests, open_context, close_context);
}
