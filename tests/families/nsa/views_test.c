/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * views_test.c - views at the edge of what is accepted: an operation does not look at what it does not use;
 * tensors without elements may have any other extents; where an extent is 1 its stride may be any number.
 * Meant to run under the sanitizers, too.
 */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "context.h"
#include "nsa_case.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const nsa_call *const calls[] = {
    &nsa_call_forward, &nsa_call_backward, &nsa_call_compress,        &nsa_call_compress_backward,
    &nsa_call_select,  &nsa_call_attend,   &nsa_call_attend_backward, &nsa_call_gates,
    &nsa_call_combine, &nsa_call_gate,     &nsa_call_gate_backward};
enum { OPS = sizeof calls / sizeof *calls };

enum { MOST_BYTES = 1 << 30 }; /* no call can run with such a workspace */

static int open_in_time(void **state)
{
    alarm(120); /* a spin ends the test */
    return test_open_context(state);
}

static const quern_tensor **member(quern_nsa_tensors *t, int slot)
{
    return (const quern_tensor **)(void *)((char *)t + offsetof(quern_nsa_tensors, q) +
                                           (size_t)slot * sizeof(quern_tensor *));
}

static quern_status call_it(const nsa_call *call, const quern_nsa_params *params, const quern_nsa_tensors *t)
{
    size_t bytes = 0;
    quern_status status = call->workspace(ctx, params, t, &bytes);
    if (status != QUERN_OK || bytes > MOST_BYTES) return status;
    test_workspace workspace = test_workspace_make(bytes);
    status = call->run(ctx, NULL, params, t, workspace.data, bytes);
    test_workspace_close(&workspace);
    return status;
}

/* ---- what is not used ---- */

/* Backward, or the gate's backward, of the window branch alone with `o_slc`: the bits of every gradient. */
static void window_alone(nsa_case *c, const nsa_call *call, nsa_set in, nsa_set out,
                         const quern_tensor *o_slc, test_tensor copies[NSA_SLOTS])
{
    quern_nsa_tensors t = nsa_bind(c, nsa_present(c, in | out));
    t.o_slc = o_slc;
    for (int i = 0; i < NSA_SLOTS; i++)
        if (out & NSA_BIT(i)) test_tensor_reset(&c->tensor[i]);
    if (call_it(call, &c->config.params, &t) != QUERN_OK)
        fail_msg("%s: %s", call->name, quern_last_error(ctx));
    nsa_copy(c, out, copies);
}

/* The gradient of the gate, and of its weights, does not see a branch that is off. */
static void a_branch_that_is_off_is_not_read(void **state)
{
    (void)state;
    for (int weights = 0; weights < 2; weights++) {
        test_random random = {7};
        nsa_config config = nsa_config_small();
        config.params.gate = weights ? QUERN_NSA_GATE_WEIGHTS : QUERN_NSA_GATE_GIVEN;
        config.params.branches = QUERN_NSA_BRANCH_WIN;
        nsa_case *c = nsa_case_new(&config, &random);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        test_tensor filled = test_tensor_copy(&c->tensor[NSA_O]);
        quern_tensor none = filled.view, deep = filled.view;
        none.data = NULL;
        deep.ndim = 100000;
        const quern_tensor *const given[] = {NULL, &filled.view, &none, &deep};
        const nsa_set gate_in = NSA_BIT(NSA_O_WIN) | NSA_BIT(NSA_D_O) | NSA_BIT(NSA_GATES) |
                                (weights ? NSA_BIT(NSA_Q) | NSA_BIT(NSA_W_GATE) : 0);
        const nsa_set gate_out = NSA_BIT(NSA_D_O_WIN) |
                                 (weights ? NSA_BIT(NSA_D_Q) | NSA_BIT(NSA_D_W_GATE) : NSA_BIT(NSA_D_GATES));
        const nsa_set combine_in = NSA_BIT(NSA_O_WIN) | NSA_BIT(NSA_GATES);
        const struct {
            const nsa_call *call;
            nsa_set in, out;
        } all[] = {{&nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c)},
                   {&nsa_call_gate_backward, gate_in, gate_out},
                   {&nsa_call_combine, combine_in, NSA_BIT(NSA_O)}};
        for (size_t op = 0; op < sizeof all / sizeof *all; op++) {
            test_tensor alone[NSA_SLOTS], beside[NSA_SLOTS];
            const nsa_set out = nsa_present(c, all[op].out);
            window_alone(c, all[op].call, all[op].in, out, NULL, alone);
            for (int i = 1; i < 4; i++) {
                window_alone(c, all[op].call, all[op].in, out, given[i], beside);
                nsa_check_same_bits(c, out, alone, all[op].call->name);
                nsa_free_copies(beside);
            }
            nsa_free_copies(alone);
        }
        test_tensor_free(&filled);
        nsa_case_free(c);
    }
}

/* Gives an operation nonsense for every tensor that it does not use: the call succeeds and no bit changes. */
static void what_is_not_used_is_not_looked_at(void **state)
{
    (void)state;
    const quern_tensor nonsense = {(void *)8, (quern_dtype)77, (quern_device)9,       -3,
                                   100000,    {-1, INT64_MIN}, {INT64_MIN, INT64_MAX}};
    int left_alone = 0;
    for (uint32_t branches = 1; branches <= QUERN_NSA_BRANCH_ALL; branches++) {
        test_random random = {11};
        nsa_config config = nsa_config_small();
        config.params.branches = branches;
        config.params.gate = QUERN_NSA_GATE_WEIGHTS;
        nsa_case *c = nsa_case_new(&config, &random);
        const nsa_call *const whole[] = {&nsa_call_forward, &nsa_call_backward, &nsa_call_attend};
        const nsa_set in[] = {nsa_forward_inputs(c), nsa_backward_inputs(c), nsa_attend_inputs(c)};
        const nsa_set out[] = {nsa_forward_outputs(c), nsa_backward_outputs(c), nsa_attend_outputs(c)};
        for (int op = 0; op < 3; op++) {
            test_tensor expected[NSA_SLOTS];
            nsa_run(c, ctx, *whole[op], in[op], out[op]);
            nsa_copy(c, nsa_present(c, out[op]), expected);
            const nsa_set used = nsa_present(c, in[op] | out[op]);
            quern_nsa_tensors t = nsa_bind(c, used);
            for (int slot = 0; slot < NSA_SLOTS; slot++) {
                size_t bytes;
                if (used & NSA_BIT(slot)) continue;
                *member(&t, slot) = &nonsense;
                const quern_status status = whole[op]->workspace(ctx, &config.params, &t, &bytes);
                if (status == QUERN_OK) {
                    left_alone++;
                    continue;
                }
                *member(&t, slot) = NULL; /* refused: a valid one would be used, or none is accepted here */
            }
            if (call_it(whole[op], &c->config.params, &t) != QUERN_OK)
                fail_msg("%s: %s", whole[op]->name, quern_last_error(ctx));
            nsa_check_same_bits(c, nsa_present(c, out[op]), expected, whole[op]->name);
            nsa_free_copies(expected);
        }
        nsa_case_free(c);
    }
    assert_true(left_alone > 200);
}

/* ---- no elements ---- */

static quern_tensor empty_of(quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    return quern_tensor_contiguous(NULL, dtype, ndim, shape);
}

/* Every operation on no tokens: of 2^40 heads, or of 2^40 sequences. */
static void no_tokens_take_no_time(void **state)
{
    (void)state;
    const int64_t many = (int64_t)1 << 40;
    for (int side = 0; side < 2; side++) {
        const int64_t b = side == 0 ? 1 : many, h = side == 0 ? many : 2;
        const quern_tensor q = empty_of(QUERN_F32, 4, b, 0, h, 8), lse = empty_of(QUERN_F32, 3, b, h, 0, 0),
                           gates = empty_of(QUERN_F32, 4, b, 0, h, 3);
        const quern_tensor
            idx = empty_of(QUERN_I32, 4, b, h, 0, 16),
            bare = {NULL, QUERN_F32, QUERN_CPU, 0, 4, {b, 0, h, 8}, {INT64_MIN, INT64_MAX, INT64_MIN, 1}};
        quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
        quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
        t.q = t.k = t.v = t.k_cmp = t.v_cmp = t.o = t.o_cmp = t.o_slc = t.o_win = t.d_o = t.d_o_cmp =
            t.d_o_slc = t.d_o_win = &q;
        t.d_q = t.d_k = t.d_v = &bare;
        t.lse_cmp = t.lse_slc = t.lse_win = &lse;
        t.gates = &gates;
        t.block_idx = &idx;
        for (int op = 0; op < OPS; op++) {
            quern_nsa_tensors now = t;
            if (calls[op] == &nsa_call_gates) continue; /* weights of 2^40 heads are no empty tensor */
            if (calls[op] == &nsa_call_compress_backward || calls[op] == &nsa_call_attend_backward)
                now.d_k_cmp = now.d_v_cmp = &q;
            const quern_status status = call_it(calls[op], &params, &now);
            if (status != QUERN_OK && status != QUERN_ERR_INVALID_ARGUMENT)
                fail_msg("%s: %s", calls[op]->name, quern_last_error(ctx));
            if (status != QUERN_OK && strstr(quern_last_error(ctx), "overflow") == NULL)
                fail_msg("%s: %s", calls[op]->name, quern_last_error(ctx));
        }
        quern_attention_params attention = QUERN_ATTENTION_PARAMS_INIT;
        quern_attention_tensors a = QUERN_ATTENTION_TENSORS_INIT;
        a.q = a.k = a.v = a.o = a.d_o = &q;
        a.d_q = a.d_k = a.d_v = &bare;
        a.lse = &lse;
        size_t bytes;
        for (int backward = 0; backward < 2; backward++) {
            assert_int_equal((backward ? quern_attention_backward_workspace
                                       : quern_attention_forward_workspace)(ctx, &attention, &a, &bytes),
                             QUERN_OK);
            test_workspace w = test_workspace_make(bytes);
            assert_int_equal((backward ? quern_attention_backward
                                       : quern_attention_forward)(ctx, NULL, &attention, &a, w.data, bytes),
                             QUERN_OK);
            test_workspace_close(&w);
        }
    }
}

/* ---- no heads, no sequences ---- */

/* Tokens without heads: every operation succeeds, lists of blocks (which have no rows) included. */
static void no_heads_compute_nothing(void **state)
{
    (void)state;
    enum { N = 70, D = 8 };
    float weights[1] = {0};
    const quern_tensor q = empty_of(QUERN_F32, 4, 1, N, 0, D), lse = empty_of(QUERN_F32, 3, 1, 0, N, 0),
                       gates = empty_of(QUERN_F32, 4, 1, N, 0, 3),
                       entries = empty_of(QUERN_F32, 4, 1, 1, 0, D),
                       idx = empty_of(QUERN_I32, 4, 1, 0, N, 16);
    quern_tensor w_gate = empty_of(QUERN_F32, 3, 0, 3, D, 0);
    w_gate.data = weights;
    for (int scope = 0; scope < 2; scope++) {
        quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
        quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
        params.scope = (quern_nsa_scope)scope;
        t.q = t.k = t.v = t.o = t.o_cmp = t.o_slc = t.o_win = &q;
        t.d_o = t.d_o_cmp = t.d_o_slc = t.d_o_win = t.d_q = t.d_k = t.d_v = &q;
        t.k_cmp = t.v_cmp = &entries;
        t.lse_cmp = t.lse_slc = t.lse_win = &lse;
        t.gates = &gates;
        t.w_gate = NULL;
        t.block_idx = &idx;
        for (int op = 0; op < OPS; op++) {
            quern_nsa_tensors now = t;
            quern_nsa_params own = params;
            if (calls[op] == &nsa_call_gates) {
                own.gate = QUERN_NSA_GATE_WEIGHTS;
                now.w_gate = &w_gate;
            }
            if (calls[op] == &nsa_call_compress_backward || calls[op] == &nsa_call_attend_backward)
                now.d_k_cmp = now.d_v_cmp = &entries;
            if (call_it(calls[op], &own, &now) != QUERN_OK)
                fail_msg("%s: %s", calls[op]->name, quern_last_error(ctx));
        }
    }
}

/* cu_seqlens of no sequence: every row is past the last one, so every result is 0. */
static void no_sequences_make_zeros(void **state)
{
    (void)state;
    enum { T = 16384, H = 2, D = 8 };
    int32_t *cu = calloc(1, sizeof *cu); /* of its own, so that a sanitizer sees a read past it */
    static float rows[T * H * D], results[3][T * H * D], lse[H * T];
    for (int i = 0; i < T * H * D; i++) rows[i] = 1;
    memset(results, 0x55, sizeof results);
    const quern_tensor offsets = quern_tensor_contiguous(cu, QUERN_I32, 1, (const int64_t[]){1}),
                       q = quern_tensor_contiguous(rows, QUERN_F32, 3, (const int64_t[]){T, H, D}),
                       statistics = quern_tensor_contiguous(lse, QUERN_F32, 2, (const int64_t[]){H, T});
    quern_tensor out[3] = {q, q, q};
    for (int i = 0; i < 3; i++) out[i].data = results[i];
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = t.k = t.v = t.o = t.d_o = &q;
    t.cu_seqlens_q = t.cu_seqlens_kv = &offsets;
    t.lse = &statistics;
    t.d_q = &out[0];
    t.d_k = &out[1];
    t.d_v = &out[2];
    size_t bytes;
    assert_int_equal(quern_attention_backward_workspace(ctx, &params, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_attention_backward(ctx, NULL, &params, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < T * H * D; k++) assert_true(results[i][k] == 0);
    free(cu);
}

/* More heads than 31 bits count, in a view whose heads share memory, are refused where there are queries. */
static void too_many_heads_are_refused(void **state)
{
    (void)state;
    for (int dense = 0; dense < 2; dense++) {
        quern_tensor q = empty_of(QUERN_F32, 4, 1, 4, (int64_t)1 << 31, 8),
                     k = empty_of(QUERN_F32, 4, 1, 4, 2, 8);
        quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
        quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
        quern_nsa_params nsa = QUERN_NSA_PARAMS_INIT;
        quern_nsa_tensors n = QUERN_NSA_TENSORS_INIT;
        size_t bytes;
        nsa.branches = QUERN_NSA_BRANCH_WIN;
        q.strides[2] = 0;
        t.q = t.o = n.q = n.o_win = &q;
        t.k = t.v = n.k = n.v = &k;
        const quern_status status = dense ? quern_attention_forward_workspace(ctx, &params, &t, &bytes)
                                          : quern_nsa_attend_workspace(ctx, &nsa, &n, &bytes);
        assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(ctx), "q has 2147483648 heads: at most 2147483647"));
    }
}

/* Where there is no query, the keys' head dim is checked as the queries' would be. */
static void a_head_dim_is_checked_without_queries(void **state)
{
    (void)state;
    static const int64_t wrong[] = {0, 4, 12, 520};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const quern_tensor k = empty_of(QUERN_F32, 4, 1, 64, 2, wrong[i]),
                           v = empty_of(QUERN_F32, 4, 1, 64, 2, 8),
                           k_cmp = empty_of(QUERN_F32, 4, 1, 1, 2, wrong[i]),
                           v_cmp = empty_of(QUERN_F32, 4, 1, 1, 2, 8);
        quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
        quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
        size_t bytes;
        t.k = &k;
        t.v = &v;
        t.k_cmp = &k_cmp;
        t.v_cmp = &v_cmp;
        assert_int_equal(quern_nsa_compress_workspace(ctx, &params, &t, &bytes), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(ctx), "k: head dim "));
    }
}

/* ---- strides of extents of 1 ---- */

static void strides_of_single_extents_are_any_number(void **state)
{
    (void)state;
    static const int64_t wild[] = {INT64_MIN, INT64_MAX, INT64_MIN + 1, 0, 3};
    for (int varlen = 0; varlen < 2; varlen++)
        for (size_t w = 0; w < sizeof wild / sizeof *wild; w++) {
            test_random random = {5};
            nsa_config config = nsa_config_small();
            config.batch = 1;
            config.h = config.hkv = 1;
            config.params.gate = QUERN_NSA_GATE_WEIGHTS;
            config.project_k = config.project_v = true;
            if (varlen) {
                config.varlen = true;
                config.lens[0] = config.n;
            }
            nsa_case *c = nsa_case_new(&config, &random);
            const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
            test_tensor first[NSA_SLOTS], second[NSA_SLOTS];
            nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
            nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
            nsa_copy(c, forward, first);
            nsa_copy(c, backward, second);
            for (int i = 0; i < NSA_SLOTS; i++)
                for (int32_t d = 0; d < c->tensor[i].view.ndim; d++)
                    if (c->tensor[i].view.shape[d] == 1) c->tensor[i].view.strides[d] = wild[w];
            if (nsa_try(c, ctx, nsa_call_forward, nsa_forward_inputs(c) | forward) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            for (int i = 0; i < NSA_SLOTS; i++)
                if ((forward & NSA_BIT(i)) &&
                    memcmp(first[i].buffer, c->tensor[i].buffer, c->tensor[i].bytes) != 0)
                    fail_msg("%s", nsa_slot_name(i));
            if (nsa_try(c, ctx, nsa_call_backward, nsa_backward_inputs(c) | backward) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            for (int i = 0; i < NSA_SLOTS; i++)
                if ((backward & NSA_BIT(i)) &&
                    memcmp(second[i].buffer, c->tensor[i].buffer, c->tensor[i].bytes) != 0)
                    fail_msg("%s", nsa_slot_name(i));
            nsa_free_copies(first);
            nsa_free_copies(second);
            nsa_case_free(c);
        }
}

/* Strides that carry the tensor out of the address space are refused. */
static void strides_past_the_address_space_are_refused(void **state)
{
    (void)state;
    const oracle_dense dense = {2, 6, 6, 2, 2, 8, 8, true, 0, -1, 0, NULL, NULL};
    test_random random = {1};
    attention_case c;
    char workspace[64];
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    c.v.view.strides[0] = (INT64_MAX / 4) / 4 * 4 - 1024;
    assert_int_equal(quern_attention_forward(ctx, NULL, &c.params, &c.tensors, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "address space"));
    attention_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_branch_that_is_off_is_not_read),
        cmocka_unit_test(what_is_not_used_is_not_looked_at),
        cmocka_unit_test(no_tokens_take_no_time),
        cmocka_unit_test(no_heads_compute_nothing),
        cmocka_unit_test(no_sequences_make_zeros),
        cmocka_unit_test(too_many_heads_are_refused),
        cmocka_unit_test(a_head_dim_is_checked_without_queries),
        cmocka_unit_test(strides_of_single_extents_are_any_number),
        cmocka_unit_test(strides_past_the_address_space_are_refused),
    };
    return cmocka_run_group_tests(tests, open_in_time, test_close_context);
}
