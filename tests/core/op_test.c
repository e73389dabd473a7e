/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_test.c - quern/op.h: the library describes its operations as their functions behave. */
#include "cmocka_c11.h"

#include <quern/attention.h>
#include <quern/dsv4.h>
#include <quern/nsa.h>
#include <quern/op.h>

#include <stdlib.h>
#include <string.h>

typedef struct any_tensors {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} any_tensors;

static quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
static quern_op_param params[QUERN_OP_PARAMS_MAX];
static quern_op_info info;

static const quern_op *read_op(const char *name)
{
    const quern_op *op = quern_op_named(name);
    if (op == NULL) fail_msg("there is no operation %s", name);
    assert_int_equal(quern_op_get(op, &info), QUERN_OK);
    assert_true(info.tensor_count <= QUERN_OP_TENSORS_MAX && info.param_count <= QUERN_OP_PARAMS_MAX);
    assert_true(info.params_size <= QUERN_OP_PARAMS_BYTES);
    assert_int_equal(quern_op_get_tensors(op, tensors), QUERN_OK);
    assert_int_equal(quern_op_get_params(op, params), QUERN_OK);
    return op;
}

static int tensor_named(const char *name)
{
    for (int i = 0; i < info.tensor_count; i++)
        if (strcmp(tensors[i].name, name) == 0) return i;
    fail_msg("%s has no tensor %s", info.name, name);
    return -1;
}

static int param_named(const char *name)
{
    for (int i = 0; i < info.param_count; i++)
        if (strcmp(params[i].name, name) == 0) return i;
    fail_msg("%s has no parameter %s", info.name, name);
    return -1;
}

/* Inputs have distinct names, and so have outputs. Every operation reads and writes a tensor. */
static void the_list_is_whole(void **state)
{
    const quern_op *op;
    size_t count = 0;
    (void)state;
    for (; (op = quern_op_at(count)) != NULL; count++) {
        assert_int_equal(quern_op_get(op, &info), QUERN_OK);
        assert_ptr_equal(quern_op_named(info.name), op);
        read_op(info.name);
        int reads = 0, writes = 0;
        for (int i = 0; i < info.tensor_count; i++) {
            for (int k = 0; k < i; k++)
                if (tensors[i].input == tensors[k].input || tensors[i].updated || tensors[k].updated)
                    assert_string_not_equal(tensors[i].name, tensors[k].name);
            reads += tensors[i].input;
            writes += tensors[i].result[QUERN_OP_FORWARD];
            assert_false(tensors[i].trigger && tensors[i].input);
            assert_true(!tensors[i].updated || (tensors[i].input && tensors[i].result[QUERN_OP_FORWARD]));
            assert_true(tensors[i].gradient_of < i);
            if (tensors[i].result[QUERN_OP_BACKWARD]) assert_true(info.backward != 0);
        }
        assert_true(reads > 0 && writes > 0);
    }
    assert_true(count >= 11);
    assert_null(quern_op_named("nsa-"));
    assert_null(quern_op_named(NULL));
    assert_int_equal(quern_op_get((const quern_op *)&info, &info), QUERN_ERR_INVALID_ARGUMENT);
}

static void expect_tensor(const char *name, bool needed, bool input, bool trigger, bool forward,
                          bool backward)
{
    const quern_op_tensor *t = &tensors[tensor_named(name)];
    if (t->needed != needed || t->input != input || t->trigger != trigger || t->result[0] != forward ||
        t->result[1] != backward)
        fail_msg("%s of %s: needed %d, input %d, trigger %d, result %d, of the backward %d", name, info.name,
                 t->needed, t->input, t->trigger, t->result[0], t->result[1]);
}

static void tensors_have_the_roles_of_the_passes(void **state)
{
    (void)state;
    read_op("attention");
    assert_int_equal(info.tensors_size, sizeof(quern_attention_tensors));
    assert_int_equal(info.params_size, sizeof(quern_attention_params));
    assert_int_equal(info.forward, QUERN_OP_ATTENTION_FORWARD);
    assert_int_equal(info.backward, QUERN_OP_ATTENTION_BACKWARD);
    expect_tensor("Q", true, true, false, false, false);
    expect_tensor("cu_seqlens_kv", false, true, false, false, false);
    expect_tensor("lse", false, false, false, true, false);
    expect_tensor("dO", false, false, true, false, false);
    expect_tensor("dV", false, false, false, false, true);
    assert_string_equal(tensors[tensor_named("lse")].fixed, "B H Nq");
    assert_string_equal(tensors[tensor_named("lse")].varlen, "H Tq");
    read_op("nsa");
    expect_tensor("gates", false, true, false, true, false);     /* handed in, or computed */
    expect_tensor("group_idx", false, true, false, true, false); /* with max_compressed_groups alone */
    expect_tensor("K_cmp", false, true, false, true, false);
    expect_tensor("dK_cmp", false, false, false, false, true);
    expect_tensor("pe_k", false, true, false, false, false);
    assert_true(tensors[tensor_named("O_win")].aside);
    assert_string_equal(tensors[tensor_named("gate")].field, "w_gate");
    assert_string_equal(info.aside, "save-branches");
    read_op("hca-compress");
    expect_tensor("B", true, true, false, false, false);
    expect_tensor("B_b", false, false, false, false, false); /* the kind is fixed */
    expect_tensor("proj", false, true, false, false, false); /* x and w may replace it */
    assert_false(params[param_named("kind")].option);
    assert_string_equal(params[param_named("rope-at")].value, "first|last");
}

static void parameters_are_set_from_text(void **state)
{
    static const char *const values[][2] = {{"block-size", "48"},
                                            {"compress", "linear"},
                                            {"metric", "mean-logit"},
                                            {"causal", "false"},
                                            {"scale", "0.5"},
                                            {"branches", "slc,win"},
                                            {"compressed_visibility", "started"},
                                            {"branches", "all"},
                                            {"forced-first", "-3"}};
    static const char *const wrong[][2] = {
        {"block-size", "4x"},    {"block-size", ""},   {"block-size", "99999999999999999999"},
        {"compress", "mea"},     {"causal", "maybe"},  {"scale", "nan"},
        {"branches", "cmp,all"}, {"branches", "cmp,"}, {"no-such", "1"},
        {"branches", ""}};
    quern_nsa_params p;
    char text[64];
    (void)state;
    const quern_op *op = read_op("nsa");
    assert_int_equal(quern_op_defaults(op, &p), QUERN_OK);
    const quern_nsa_params initial = QUERN_NSA_PARAMS_INIT;
    assert_memory_equal(&p, &initial, sizeof p);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (quern_op_set(op, &p, values[i][0], values[i][1]) != QUERN_OK)
            fail_msg("%s %s: %s", values[i][0], values[i][1], quern_last_error(NULL));
    assert_int_equal(p.block_size, 48);
    assert_int_equal(p.compress, QUERN_NSA_COMPRESS_LINEAR);
    assert_int_equal(p.metric, QUERN_NSA_METRIC_MEAN_LOGIT);
    assert_false(p.causal);
    assert_true(p.scale == 0.5f);
    assert_int_equal(p.branches, QUERN_NSA_BRANCH_ALL);
    assert_int_equal(p.forced_first, -3); /* the call refuses it */
    const quern_nsa_params before = p;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (quern_op_set(op, &p, wrong[i][0], wrong[i][1]) == QUERN_OK)
            fail_msg("%s takes '%s'", wrong[i][0], wrong[i][1]);
    assert_memory_equal(&p, &before, sizeof p);
    for (int i = 0; i < info.param_count; i++) { /* quern_op_set() reads what quern_op_text() writes */
        quern_nsa_params again = p;
        assert_int_equal(quern_op_text(op, &p, i, text, sizeof text), QUERN_OK);
        assert_int_equal(quern_op_set(op, &again, params[i].field, text), QUERN_OK);
        assert_memory_equal(&again, &p, sizeof p);
    }
    assert_int_equal(quern_op_preset(op, &p, "tile256"), QUERN_OK);
    assert_int_equal(p.tile, 256);
    assert_int_equal(quern_op_preset(op, &p, "none-such"), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_op_preset(quern_op_named("attention"), &p, "tile256"), QUERN_ERR_INVALID_ARGUMENT);
}

static void modes_follow_from_the_tensors(void **state)
{
    static const quern_tensor something;
    quern_nsa_params p;
    any_tensors t = {0};
    (void)state;
    const quern_op *op = read_op("nsa");
    t.size = info.tensors_size;
    assert_int_equal(quern_op_preset(op, &p, "tile256"), QUERN_OK); /* gate is weights */
    assert_int_equal(quern_op_follow(op, &p, &t), QUERN_OK);
    assert_int_equal(p.gate, QUERN_NSA_GATE_NONE);
    t.t[tensor_named("gates")] = t.t[tensor_named("block_idx")] = &something;
    assert_int_equal(quern_op_follow(op, &p, &t), QUERN_OK);
    assert_int_equal(p.gate, QUERN_NSA_GATE_GIVEN);
    assert_int_equal(p.selection, QUERN_NSA_LIST_GIVEN);
    assert_int_equal(p.groups, QUERN_NSA_LIST_COMPUTED);
    t.t[tensor_named("gate")] = &something;
    assert_int_equal(quern_op_follow(op, &p, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "both gate and gates"));
}

/* From inputs alone: every result at the shape said, then the passes by name, then by their own functions. */
static void calls_by_name_are_the_calls(void **state)
{
    enum { N = 70, H = 4, HKV = 2, D = 16, RESULTS = 3 };
    static float q[N * H * D], k[N * HKV * D], v[N * HKV * D];
    static const char *const names[RESULTS] = {"O", "block_idx", "lse_win"};
    const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D};
    quern_tensor inputs[3] = {quern_tensor_contiguous(q, QUERN_F32, 4, q_shape),
                              quern_tensor_contiguous(k, QUERN_F32, 4, k_shape),
                              quern_tensor_contiguous(v, QUERN_F32, 4, k_shape)},
                 expected[QUERN_OP_TENSORS_MAX], results[2][RESULTS];
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    any_tensors t = {0};
    quern_nsa_tensors direct = QUERN_NSA_TENSORS_INIT;
    quern_nsa_params p;
    quern_context *ctx;
    size_t bytes, same;
    int64_t extent;
    (void)state;
    for (int i = 0; i < N * H * D; i++) q[i] = (float)(i * 37 % 101) / 50 - 1;
    for (int i = 0; i < N * HKV * D; i++) {
        k[i] = (float)(i * 53 % 97) / 48 - 1;
        v[i] = (float)(i * 29 % 89) / 44 - 1;
    }
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    const quern_op *op = read_op("nsa");
    assert_int_equal(quern_op_defaults(op, &p), QUERN_OK);
    p.block_size = 8;
    p.num_selected = 4;
    p.window = 16;
    p.tile = 16;
    t.size = info.tensors_size;
    for (int i = 0; i < 3; i++) t.t[i] = &inputs[i];
    assert_int_equal(quern_op_roles(op, QUERN_OP_FORWARD, &p, &t, roles), QUERN_OK);
    assert_int_equal(roles[tensor_named("O")], QUERN_OP_RESULT);
    assert_int_equal(roles[tensor_named("gates")], QUERN_OP_OPTIONAL_RESULT);
    assert_int_equal(roles[tensor_named("pe_k")], QUERN_OP_REFUSED);
    assert_int_equal(roles[tensor_named("group_idx")], QUERN_OP_UNUSED);
    assert_int_equal(quern_op_expect(op, QUERN_OP_FORWARD, &p, &t, NULL, expected), QUERN_OK);
    const quern_tensor *lists = &expected[tensor_named("block_idx")];
    assert_int_equal(lists->dtype, QUERN_I32);
    assert_true(lists->ndim == 4 && lists->shape[1] == HKV && lists->shape[2] == (N + 15) / 16 &&
                lists->shape[3] == 4);
    assert_int_equal(quern_op_extent(op, &p, &t, "Nc", &extent), QUERN_OK);
    assert_int_equal(extent, (N - 8) / 8 + 1);
    assert_int_equal(quern_op_extent(op, &p, &t, "none", &extent), QUERN_ERR_INVALID_ARGUMENT);
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < RESULTS; i++) {
            const int at = tensor_named(names[i]);
            int64_t count = 1;
            results[way][i] = expected[at];
            for (int d = 0; d < expected[at].ndim; d++) count *= expected[at].shape[d];
            assert_non_null(results[way][i].data = calloc((size_t)count, sizeof(float)));
            if (way == 0) t.t[at] = &results[0][i];
        }
    direct.q = &inputs[0];
    direct.k = &inputs[1];
    direct.v = &inputs[2];
    direct.o = &results[1][0];
    direct.block_idx = &results[1][1];
    direct.lse_win = &results[1][2];
    assert_int_equal(quern_op_workspace(ctx, op, QUERN_OP_FORWARD, &p, &t, &bytes), QUERN_OK);
    assert_int_equal(quern_nsa_forward_workspace(ctx, &p, &direct, &same), QUERN_OK);
    assert_int_equal(bytes, same);
    void *workspace = malloc(bytes + 1);
    assert_non_null(workspace);
    assert_int_equal(quern_op_run(ctx, NULL, op, QUERN_OP_FORWARD, &p, &t, workspace, bytes), QUERN_OK);
    assert_int_equal(quern_nsa_forward(ctx, NULL, &p, &direct, workspace, bytes), QUERN_OK);
    for (int i = 0; i < RESULTS; i++) {
        int64_t count = 1;
        for (int d = 0; d < results[0][i].ndim; d++) count *= results[0][i].shape[d];
        assert_memory_equal(results[0][i].data, results[1][i].data, (size_t)count * sizeof(float));
    }
    assert_int_equal(quern_op_run(ctx, NULL, op, QUERN_OP_FORWARD, &p, &t, workspace, bytes - 1),
                     QUERN_ERR_WORKSPACE);
    const quern_op *no_backward = quern_op_named("nsa-select");
    assert_int_equal(quern_op_workspace(ctx, no_backward, QUERN_OP_BACKWARD, &p, &t, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    t.t[tensor_named("pe_k")] = &inputs[0];
    assert_int_equal(quern_op_expect(op, QUERN_OP_FORWARD, &p, &t, NULL, expected),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "pe_k is given with compress mean"));
    for (int way = 0; way < 2; way++)
        for (int i = 0; i < RESULTS; i++) free(results[way][i].data);
    free(workspace);
    quern_context_destroy(ctx);
}

/* An updated tensor is an input that is needed and a result at once. */
static void updated_tensors_are_read_and_written(void **state)
{
    enum { N = 2, ROWS = 4, D = 8 };
    static float x[N * D], cache[ROWS * D];
    static const int32_t slots[N] = {3, 1};
    static char workspace[4096];
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    any_tensors t = {0};
    quern_dsv4_store_params p;
    quern_context *ctx;
    (void)state;
    const quern_op *op = read_op("v4-store");
    expect_tensor("cache", true, true, false, true, false);
    assert_true(tensors[tensor_named("cache")].updated && !tensors[tensor_named("x")].updated);
    const quern_tensor views[] = {
        quern_tensor_contiguous(x, QUERN_F32, 2, (const int64_t[]){N, D}),
        quern_tensor_contiguous((void *)(uintptr_t)slots, QUERN_I32, 1, (const int64_t[]){N}),
        quern_tensor_contiguous(cache, QUERN_F32, 2, (const int64_t[]){ROWS, D})};
    t.size = info.tensors_size;
    for (int i = 0; i < 3; i++) t.t[i] = &views[i];
    for (int i = 0; i < N * D; i++) x[i] = (float)i + 1;
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    assert_int_equal(quern_op_defaults(op, &p), QUERN_OK);
    assert_int_equal(quern_op_roles(op, QUERN_OP_FORWARD, &p, &t, roles), QUERN_OK);
    assert_int_equal(roles[tensor_named("cache")], QUERN_OP_UPDATED);
    assert_int_equal(quern_op_run(ctx, NULL, op, QUERN_OP_FORWARD, &p, &t, workspace, sizeof workspace),
                     QUERN_OK);
    assert_memory_equal(cache + 3 * D, x, D * sizeof *x);
    assert_memory_equal(cache + 1 * D, x + D, D * sizeof *x);
    t.t[tensor_named("cache")] = &views[0]; /* of x's memory: what is written shares none */
    assert_int_equal(quern_op_run(ctx, NULL, op, QUERN_OP_FORWARD, &p, &t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    t.t[tensor_named("cache")] = NULL;
    assert_int_equal(quern_op_run(ctx, NULL, op, QUERN_OP_FORWARD, &p, &t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "cache is NULL"));
    quern_context_destroy(ctx);
}

static void entries_follow_from_where_sequences_start(void **state)
{
    enum { T = 30 };
    int32_t starts[] = {0, 5, 5, 30}, made[4] = {-1, -1, -1, -1};
    const int64_t shape[] = {4};
    const quern_tensor cu = quern_tensor_contiguous(starts, QUERN_I32, 1, shape);
    quern_nsa_params p;
    any_tensors t = {0};
    (void)state;
    const quern_op *op = read_op("nsa");
    t.size = info.tensors_size;
    t.t[tensor_named("cu_seqlens")] = &cu;
    assert_int_equal(quern_op_defaults(op, &p), QUERN_OK);
    p.block_size = 8;
    p.stride = 4;
    p.select_block = 8;
    assert_int_equal(quern_op_complete(op, &p, &t, tensor_named("cu_seqlens_cmp"), made), QUERN_OK);
    assert_int_equal(made[0], 0);
    assert_int_equal(made[1], 0);
    assert_int_equal(made[2], 0);
    assert_int_equal(made[3], (25 - 8) / 4 + 1);
    assert_int_equal(quern_op_complete(op, &p, &t, tensor_named("block_idx"), made), QUERN_ERR_UNSUPPORTED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_list_is_whole),
        cmocka_unit_test(tensors_have_the_roles_of_the_passes),
        cmocka_unit_test(parameters_are_set_from_text),
        cmocka_unit_test(modes_follow_from_the_tensors),
        cmocka_unit_test(calls_by_name_are_the_calls),
        cmocka_unit_test(updated_tensors_are_read_and_written),
        cmocka_unit_test(entries_follow_from_where_sequences_start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
