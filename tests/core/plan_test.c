/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan_test.c - plans: the bits of the ordinary call, on any memory, from any thread; what a run checks. */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "context.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/levels.h"
#include "levels.h"
#include "nsa_random.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <quern/plan.h>

static quern_plan *plan_or_fail(quern_operation op, const void *params, const void *tensors)
{
    quern_plan *plan = NULL;
    if (quern_plan_create(ctx, op, params, tensors, &plan) != QUERN_OK)
        fail_msg("operation %d: %s", (int)op, quern_last_error(ctx));
    return plan;
}

static void run_or_fail(const quern_plan *plan, void *const *data)
{
    size_t bytes = 0;
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    test_workspace workspace = test_workspace_make(bytes);
    if (quern_plan_run(plan, NULL, data, workspace.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&workspace);
}

/* A plan made for one set of memory runs on another, aligned alike: the bits of the ordinary call. */
static void check_elsewhere(nsa_case *c, quern_operation op, const nsa_call *call, nsa_set in, nsa_set out)
{
    unsigned char *moved[NSA_SLOTS] = {NULL};
    void *data[NSA_SLOTS];
    in = nsa_present(c, in);
    out = nsa_present(c, out) & ~in;
    nsa_run(c, ctx, *call, in, out);
    const quern_nsa_tensors tensors = nsa_bind(c, in | out);
    quern_plan *plan = plan_or_fail(op, &c->config.params, &tensors);
    for (int i = 0; i < NSA_SLOTS; i++) {
        const test_tensor *t = &c->tensor[i];
        data[i] = (void *)1; /* not looked at */
        if (!((in | out) & NSA_BIT(i))) continue;
        const size_t shift = 64 * (1 + (size_t)i % 3);
        moved[i] = aligned_alloc(64, (t->bytes + shift + 63) / 64 * 64);
        assert_non_null(moved[i]);
        memcpy(moved[i] + shift, t->buffer, t->bytes);
        if (out & NSA_BIT(i)) memset(moved[i] + shift, 0x77, t->bytes);
        data[i] = moved[i] + shift + ((unsigned char *)t->view.data - t->buffer);
    }
    run_or_fail(plan, data);
    for (int i = 0; i < NSA_SLOTS; i++) {
        test_tensor there = c->tensor[i];
        there.view.data = data[i];
        if ((out & NSA_BIT(i)) && !test_tensor_same_bits(&c->tensor[i], &there))
            fail_msg("%s: %s differs by plan", call->name, nsa_slot_name(i));
        free(moved[i]);
    }
    quern_plan_destroy(plan);
}

static void a_plan_gives_the_bits_of_the_call(void **state)
{
    test_random random = {test_seed("a_plan_gives_the_bits_of_the_call", 71)};
    (void)state;
    for (int trial = 0; trial < test_trials(24); trial++) {
        nsa_config config = nsa_config_random(&random, 90);
        nsa_case *c = nsa_case_random(&config, &random);
        check_elsewhere(c, QUERN_OP_NSA_FORWARD, &nsa_call_forward, nsa_forward_inputs(c),
                        nsa_forward_outputs(c));
        check_elsewhere(c, QUERN_OP_NSA_BACKWARD, &nsa_call_backward, nsa_backward_inputs(c),
                        nsa_backward_outputs(c));
        check_elsewhere(c, QUERN_OP_NSA_ATTEND, &nsa_call_attend, nsa_attend_inputs(c),
                        nsa_attend_outputs(c));
        nsa_case_free(c);
    }
}

/* ---- dense attention, whose data is q k v cu_q cu_kv o lse d_o d_q d_k d_v ---- */

enum { Q, K, V, CU_Q, CU_KV, O, LSE, D_O, D_Q, D_K, D_V, TENSORS };
static const int32_t cu_q[] = {0, 3, 5}, cu_kv[] = {0, 4, 9};
static const oracle_dense dense = {2, 7, 9, 4, 2, 16, 16, true, 0, -1, 0, cu_q, cu_kv};

static void attention_data(const attention_case *c, void *data[TENSORS])
{
    const test_tensor *const all[] = {&c->q,   &c->k,   &c->v,   &c->cu_q, &c->cu_kv, &c->o,
                                      &c->lse, &c->d_o, &c->d_q, &c->d_k,  &c->d_v};
    for (int i = 0; i < TENSORS; i++) data[i] = all[i]->view.data;
}

static void check_forward(const attention_case *c)
{
    attention_reference r = attention_case_reference(c);
    attention_case_check_forward(c, &r, "plan");
    attention_reference_free(&r);
}

static void expect(const quern_plan *plan, const quern_exec *exec, void *const *data, void *workspace,
                   size_t bytes, quern_status status, const char *words)
{
    assert_int_equal(quern_plan_run(plan, exec, data, workspace, bytes), status);
    if (strstr(quern_last_error(ctx), words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words);
}

static void a_run_checks_what_guards_memory(void **state)
{
    test_random random = {1};
    attention_case c;
    size_t bytes = 0;
    void *data[TENSORS], *right;
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors);
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    void *workspace = malloc(bytes);
    attention_data(&c, data);
    const quern_status bad = QUERN_ERR_INVALID_ARGUMENT;
    expect(NULL, NULL, data, workspace, bytes, bad, "plan is NULL");
    expect(plan, NULL, NULL, workspace, bytes, bad, "data is NULL");
    expect(plan, NULL, data, workspace, bytes - 1, QUERN_ERR_WORKSPACE, "workspace_bytes");
    expect(plan, NULL, data, NULL, bytes, bad, "workspace is NULL");
    const int used[] = {Q, K, V, CU_Q, CU_KV, O, LSE};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
        right = data[used[i]];
        data[used[i]] = NULL;
        expect(plan, NULL, data, workspace, bytes, bad, "is NULL: the plan was made with");
        data[used[i]] = (char *)right + 4;
        expect(plan, NULL, data, workspace, bytes, bad, "the plan was made for a multiple of");
        data[used[i]] = right;
    }
    int32_t *offsets = data[CU_KV];
    offsets[2] = 10;
    expect(plan, NULL, data, workspace, bytes, bad, "cu_seqlens_kv ends at 10");
    offsets[2] = 9;
    quern_exec exec = QUERN_EXEC_INIT;
    exec.size = 3;
    expect(plan, &exec, data, workspace, bytes, bad, "exec.size is 3");
    exec.size = sizeof exec;
    exec.status = &c.q.view;
    expect(plan, &exec, data, workspace, bytes, bad, "exec.status");
    test_tensor_check_unchanged(&c.o, "o");
    test_tensor_check_unchanged(&c.lse, "lse");
    run_or_fail(plan, data);
    check_forward(&c);
    free(workspace);
    quern_plan_destroy(plan);
    attention_case_free(&c);
}

/* Without addresses a plan promises no alignment, and takes any. */
static void a_plan_without_addresses_takes_any(void **state)
{
    test_random random = {2};
    attention_case c;
    void *data[TENSORS];
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_UNALIGNED, &random);
    attention_data(&c, data);
    quern_tensor views[3] = {c.q.view, c.k.view, c.v.view};
    quern_attention_tensors tensors = c.tensors;
    for (int i = 0; i < 3; i++) views[i].data = NULL;
    tensors.q = &views[0];
    tensors.k = &views[1];
    tensors.v = &views[2];
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &tensors);
    run_or_fail(plan, data);
    check_forward(&c);
    quern_plan_destroy(plan);
    attention_case_free(&c);
}

/* Made with addresses that happen to be multiples of 64, it takes those that malloc() gives. */
static void a_plan_takes_what_malloc_gives(void **state)
{
    test_random random = {7};
    attention_case c;
    void *data[TENSORS];
    size_t bytes = 0;
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    test_tensor *const used[] = {&c.q, &c.k, &c.v, &c.cu_q, &c.cu_kv, &c.o, &c.lse};
    void *kept[7], *there[7];
    attention_data(&c, data);
    for (int i = 0; i < 7; i++) {
        kept[i] = used[i]->view.data;
        there[i] = aligned_alloc(64, (used[i]->bytes + 127) / 64 * 64);
        assert_non_null(there[i]);
        memcpy((char *)there[i] + 16, kept[i],
               (size_t)((char *)used[i]->buffer + used[i]->bytes - (char *)kept[i]));
        used[i]->view.data = (char *)there[i]; /* only the alignment is looked at */
    }
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors);
    for (int i = 0; i < 7; i++) used[i]->view.data = (char *)there[i] + 16;
    attention_data(&c, data);
    run_or_fail(plan, data);
    check_forward(&c);
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    void *workspace = malloc(bytes);
    data[Q] = (char *)data[Q] + 8;
    expect(plan, NULL, data, workspace, bytes, QUERN_ERR_INVALID_ARGUMENT, "a multiple of 16");
    free(workspace);
    quern_plan_destroy(plan);
    for (int i = 0; i < 7; i++) {
        used[i]->view.data = kept[i];
        free(there[i]);
    }
    attention_case_free(&c);
}

/* An older caller's tensors end before the gradients, and so does the data of its plan. */
static void an_older_caller_has_fewer_addresses(void **state)
{
    test_random random = {3};
    attention_case c;
    void *all[TENSORS], *data = NULL;
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    attention_data(&c, all);
    c.tensors.size = (1 + LSE + 1) * sizeof(void *);
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors);
    data = malloc((LSE + 1) * sizeof(void *));
    assert_non_null(data);
    memcpy(data, all, (LSE + 1) * sizeof(void *));
    run_or_fail(plan, data);
    free(data);
    c.tensors.size = sizeof c.tensors;
    check_forward(&c);
    quern_plan_destroy(plan);
    attention_case_free(&c);
}

typedef struct runner {
    const quern_plan *plan;
    void *data[TENSORS];
    float o[7 * 4 * 16];
    quern_status status;
} runner;

static void *run_often(void *arg)
{
    runner *r = arg;
    size_t bytes = 0;
    (void)quern_plan_workspace(r->plan, &bytes);
    void *workspace = malloc(bytes);
    for (int i = 0; i < 50 && r->status == QUERN_OK; i++)
        r->status = quern_plan_run(r->plan, NULL, r->data, workspace, bytes);
    free(workspace);
    return NULL;
}

static void threads_share_a_plan(void **state)
{
    test_random random = {4};
    attention_case c;
    runner runners[3];
    pthread_t threads[3];
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    c.tensors.lse = NULL;
    c.o.view = quern_tensor_contiguous(NULL, QUERN_F32, 3, (int64_t[]){7, 4, 16});
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors);
    for (int i = 0; i < 3; i++) {
        runners[i] = (runner){.plan = plan, .status = QUERN_OK};
        attention_data(&c, runners[i].data);
        runners[i].data[O] = runners[i].o;
        assert_int_equal(pthread_create(&threads[i], NULL, run_often, &runners[i]), 0);
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(runners[i].status, QUERN_OK);
        assert_memory_equal(runners[i].o, runners[0].o, sizeof runners[0].o);
    }
    quern_plan_destroy(plan);
    attention_case_free(&c);
}

/* The plan's description is `line` and the bytes of its workspace. */
static void expect_line(quern_context *at, quern_operation op, const void *params, const void *tensors,
                        const char *line)
{
    char text[400], expected[400];
    size_t bytes = 0;
    quern_plan *plan = NULL;
    if (quern_plan_create(at, op, params, tensors, &plan) != QUERN_OK) fail_msg("%s", quern_last_error(at));
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    snprintf(expected, sizeof expected, "%s; %zu bytes of workspace", line, bytes);
    assert_int_equal(quern_plan_describe(plan, text, sizeof text), QUERN_OK);
    assert_string_equal(text, expected);
    quern_plan_destroy(plan);
}

static void a_plan_names_its_kernels_at_every_level(void **state)
{
    test_random random = {5};
    nsa_config config = nsa_config_small(), half = config;
    char line[400];
    (void)state;
    half.dtype = QUERN_BF16;
    half.params.metric = QUERN_NSA_METRIC_SOFTMAX;
    nsa_case *c = nsa_case_new(&config, &random), *h = nsa_case_new(&half, &random);
    const quern_nsa_tensors forward = nsa_bind(c, nsa_forward_inputs(c) | nsa_forward_outputs(c));
    const quern_nsa_tensors backward = nsa_bind(c, nsa_backward_inputs(c) | nsa_backward_outputs(c));
    const quern_nsa_tensors half_backward = nsa_bind(h, nsa_backward_inputs(h) | nsa_backward_outputs(h));
    const quern_nsa_tensors select =
        nsa_bind(h, NSA_BIT(NSA_Q) | NSA_BIT(NSA_K_CMP) | NSA_BIT(NSA_BLOCK_IDX));
    attention_case dense_case;
    attention_case_make(&dense_case, &dense, QUERN_BF16, TEST_CONTIGUOUS, &random);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *at = test_context(level, 2);
        const char *const name = quern_cpu_level_name(level);
        const char *const rows = quern_cpu_level_name(cpu_kernels_for(level)->nsa->level);
        const char *const dot = cpu_kernels_for(level)->attention->mm_bf16 != NULL ? "bf16" : "f32";
        snprintf(line, sizeof line,
                 "nsa_forward on cpu %s: compress_forward by compress_f32_%s, attend_gate_forward by "
                 "attend_f32_%s",
                 name, rows, name);
        expect_line(at, QUERN_OP_NSA_FORWARD, &config.params, &forward, line);
        snprintf(line, sizeof line,
                 "nsa_backward on cpu %s: gate_backward by gate_f32_%s, attend_backward by attend_f32_%s (3 "
                 "times), "
                 "compress_backward by compress_f32_%s",
                 name, rows, name, rows);
        expect_line(at, QUERN_OP_NSA_BACKWARD, &config.params, &backward, line);
        snprintf(line, sizeof line,
                 "nsa_backward on cpu %s: gate_backward by gate_f32_%s, attend_backward by attend_%s_%s (3 "
                 "times), "
                 "convert by convert_f32_%s (3 times), compress_backward by compress_f32_%s",
                 name, rows, dot, name, rows, rows);
        expect_line(at, QUERN_OP_NSA_BACKWARD, &half.params, &half_backward, line);
        snprintf(line, sizeof line, "nsa_select on cpu %s: select by select_%s_%s", name, dot, name);
        expect_line(at, QUERN_OP_NSA_SELECT, &half.params, &select, line);
        snprintf(line, sizeof line, "attention_forward on cpu %s: attend_forward by attend_%s_%s", name, dot,
                 name);
        expect_line(at, QUERN_OP_ATTENTION_FORWARD, &dense_case.params, &dense_case.tensors, line);
        snprintf(line, sizeof line,
                 "attention_backward on cpu %s: rowdot by rowdot_f32_%s, attend_backward by attend_%s_%s",
                 name, name, dot, name);
        expect_line(at, QUERN_OP_ATTENTION_BACKWARD, &dense_case.params, &dense_case.tensors, line);
        quern_context_destroy(at);
    }
    attention_case_free(&dense_case);
    nsa_case_free(c);
    nsa_case_free(h);
}

static void a_line_is_cut_to_its_room(void **state)
{
    test_random random = {5};
    attention_case c;
    char text[300], cut[10];
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    quern_plan *plan = plan_or_fail(QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors);
    assert_int_equal(quern_plan_describe(plan, text, sizeof text), QUERN_OK);
    assert_int_equal(quern_plan_describe(plan, cut, sizeof cut), QUERN_OK);
    assert_memory_equal(cut, text, sizeof cut - 1);
    assert_int_equal(cut[9], '\0');
    assert_int_equal(quern_plan_describe(plan, NULL, 3), QUERN_ERR_INVALID_ARGUMENT);
    quern_plan_destroy(plan);
    attention_case_free(&c);
}

/* Lists and entries must have exactly the extents that nsa.h's helpers return. */
static void extents_are_those_of_the_helpers(void **state)
{
    (void)state;
    static const int64_t lengths[] = {0, 1, 7, 8, 9, 31, 130};
    for (int i = 0; i < 2 * 2 * 7; i++) {
        const bool varlen = i % 2;
        const int64_t n = lengths[i / 4];
        quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
        p.block_size = 8;
        p.stride = i / 2 % 2 ? 2 : 0;
        p.tile = 3;
        p.scope = i / 2 % 2 ? QUERN_NSA_SCOPE_HEAD : QUERN_NSA_SCOPE_GROUP;
        const int64_t entries = varlen ? quern_nsa_entry_rows(&p, n) : quern_nsa_entries(&p, n);
        const int64_t rows = varlen ? quern_nsa_list_rows(&p, n, 2) : quern_nsa_tiles(&p, n),
                      hs = quern_nsa_list_heads(&p, 4, 2);
        for (int off = -1; off <= 1; off++) {
            quern_tensor q = quern_tensor_contiguous(NULL, QUERN_F32, 4, (int64_t[]){1, n, 4, 8}), k = q,
                         cmp = q, idx = q, cu;
            k.shape[2] = cmp.shape[2] = 2;
            cmp.shape[1] = entries + (off > 0);
            idx = quern_tensor_contiguous(NULL, QUERN_I32, 4,
                                          (int64_t[]){1, hs, rows + (off < 0), p.num_selected});
            cu = quern_tensor_contiguous(NULL, QUERN_I32, 1, (int64_t[]){3});
            quern_tensor *const all[] = {&q, &k, &cmp, &idx};
            for (int t = 0; t < 4; t++)
                *all[t] = quern_tensor_contiguous(NULL, all[t]->dtype, 4 - varlen, all[t]->shape + varlen);
            quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
            t.q = t.o = &q;
            t.k = t.v = &k;
            t.k_cmp = t.v_cmp = &cmp;
            t.block_idx = &idx;
            if (varlen) t.cu_seqlens = &cu;
            size_t bytes;
            const quern_status status = quern_nsa_forward_workspace(ctx, &p, &t, &bytes);
            assert_int_equal(status, off == 0 ? QUERN_OK : QUERN_ERR_INVALID_ARGUMENT);
        }
        assert_int_equal(quern_nsa_blocks(&p, n), (n + 7) / 8);
        assert_int_equal(quern_nsa_groups(&p, n), (quern_nsa_entries(&p, n) + 127) / 128);
    }
    const quern_nsa_params none = {.size = sizeof none};
    assert_true(quern_nsa_entries(&none, 9) == 0 && quern_nsa_blocks(&none, 9) == 0 &&
                quern_nsa_tiles(&none, 9) == 0);
}

static void what_makes_no_plan_is_named(void **state)
{
    test_random random = {6};
    attention_case c;
    quern_plan *plan = (quern_plan *)&random;
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    assert_int_equal(quern_plan_create(ctx, (quern_operation)0, &c.params, &c.tensors, &plan),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "operation 0"));
    assert_int_equal(quern_plan_create(ctx, (quern_operation)3, &c.params, &c.tensors, &plan),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_plan_create(NULL, QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors, &plan),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_plan_create(ctx, QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors, NULL),
                     QUERN_ERR_INVALID_ARGUMENT);
    c.k.view.ndim = 9;
    assert_int_equal(quern_plan_create(ctx, QUERN_OP_ATTENTION_FORWARD, &c.params, &c.tensors, &plan),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "k has 9 dimensions"));
    assert_ptr_equal(plan, &random);
    quern_plan_destroy(NULL);
    attention_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_gives_the_bits_of_the_call),
        cmocka_unit_test(a_run_checks_what_guards_memory),
        cmocka_unit_test(a_plan_without_addresses_takes_any),
        cmocka_unit_test(a_plan_takes_what_malloc_gives),
        cmocka_unit_test(an_older_caller_has_fewer_addresses),
        cmocka_unit_test(threads_share_a_plan),
        cmocka_unit_test(a_plan_names_its_kernels_at_every_level),
        cmocka_unit_test(a_line_is_cut_to_its_room),
        cmocka_unit_test(extents_are_those_of_the_helpers),
        cmocka_unit_test(what_makes_no_plan_is_named),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
