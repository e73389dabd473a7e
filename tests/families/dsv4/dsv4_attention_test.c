/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_attention_test.c - the attention core on random calls against the float64 oracle, on the golden
 * layers; the same bits for any number of threads and any order of a list; one key alone; NaN where it
 * belongs; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_core.h"
#include "dsv4_golden.h"
#include "dsv4_layer.h"

#include <quern/cuda.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Both passes against the oracle. */
static void check_and_free(core_case *c, quern_context *ctx)
{
    core_case_forward(c, ctx);
    core_case_backward(c, ctx);
    core_case_check(c, true);
    quern_context_destroy(ctx);
    core_case_free(c);
}

static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 51);
    for (int trial = 0; trial < test_trials(300); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        core_case c = core_case_random(&random);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        check_and_free(&c, ctx);
    }
}

/* The released models' heads, by two queries at every level, and some that share a tensor core's tile in
 * part. */
static void released_shapes(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        for (int i = 0; i < 4; i++) {
            test_random random = {(uint64_t)i + 61};
            const quern_dtype dtype = i == 0 ? QUERN_F32 : i == 3 ? QUERN_F16 : QUERN_BF16;
            const oracle_core x = {.queries = 2,
                                   .raw = 130,
                                   .entries = i == 2 ? 40 : 700,
                                   .heads = i == 1   ? 128
                                            : i == 3 ? 5
                                                     : 64,
                                   .dim = 512,
                                   .window = i == 3 ? 70 : 128,
                                   .ratio = i == 2 ? 128 : 4,
                                   .start = 5200,
                                   .rope_dim = 64,
                                   .chosen = i >= 2 ? -1 : 512};
            const core_parts parts = {.entries = i != 3, .list = i < 2, .sink = true, .rope = true};
            core_case c = core_case_make(&random, &x, 1, NULL, dtype, &parts);
            quern_context *ctx = test_context(level, 2);
            check_and_free(&c, ctx);
        }
    }
}

/* Few heads, whose tokens share a GPU's tile: tokens that see different keys, the last ones of a sequence,
 * lists far apart, and no lists. */
static void few_heads(void **state)
{
    static const int64_t heads[] = {1, 8, 9, 16, 32, 3};
    (void)state;
    for (int i = 0; i < 6; i++) {
        test_random random = {(uint64_t)i + 31};
        const bool list = i % 3 != 2;
        const oracle_core x = {.queries = 37,
                               .raw = 100,
                               .entries = list ? 9000 : 70,
                               .heads = heads[i],
                               .dim = 512,
                               .window = i < 3 ? 30 : 90,
                               .ratio = 4,
                               .start = list ? 36000 : 240,
                               .rope_dim = 64,
                               .chosen = list ? 50 : -1};
        const core_parts parts = {
            .entries = true, .list = list, .count = i == 1, .sink = i % 2 == 0, .rope = i != 3};
        core_case c = core_case_make(&random, &x, 2, NULL, i == 4 ? QUERN_F16 : QUERN_BF16, &parts);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        check_and_free(&c, ctx);
    }
}

/* So many queries that a GPU's backward goes through its workspace in slices: what raw rows and entries get
 * from queries of two slices is added up. Every query chose entry 0; sequences that are cut, sequences of
 * which a slice has several, and varlen ones. */
static void long_calls(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        test_random random = {(uint64_t)i + 41};
        const int32_t cu[] = {0, 30, 4130, 4500};
        const oracle_core x = {.queries = i == 1 ? 1500 : 4500,
                               .raw = i == 0   ? 4700
                                      : i == 1 ? 1500
                                               : 4500,
                               .entries = i == 0   ? 300
                                          : i == 1 ? 93
                                                   : 281,
                               .heads = 1,
                               .dim = i == 2 ? 512 : 16,
                               .window = i == 3 ? 5000 : 40,
                               .ratio = 16,
                               .start = i == 0 ? 300 : 0,
                               .rope_dim = 8,
                               .chosen = i == 3 ? -1 : 6};
        const core_parts parts = {.entries = i != 3, .list = i != 3, .sink = true, .rope = true};
        core_case c = core_case_make(&random, &x, i < 3 ? 3 : 1, i == 2 ? cu : NULL, QUERN_BF16, &parts);
        if (parts.list) {
            int32_t *idx = test_tensor_get_i32(&c.t[CORE_IDX]);
            for (int64_t row = 0; row < x.queries * (i == 2 ? 1 : 3); row++) idx[row * 6 + row % 6] = 0;
            test_tensor_set_i32(&c.t[CORE_IDX], idx);
            free(idx);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        check_and_free(&c, ctx);
    }
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 24; trial++) {
        test_random random = {(uint64_t)trial + 900};
        core_case c = core_case_random(&random);
        test_tensor first[CORE_TENSORS] = {{.buffer = NULL}};
        for (int32_t threads = 1; threads <= 5; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            core_case_forward(&c, ctx);
            core_case_backward(&c, ctx);
            for (int i = CORE_O; i < CORE_TENSORS; i++) {
                if (c.t[i].buffer == NULL || i == CORE_D_O) continue;
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        for (int i = 0; i < CORE_TENSORS; i++)
            if (first[i].buffer != NULL) test_tensor_free(&first[i]);
        core_case_free(&c);
    }
}

/* A long context is cut into spans that run as tasks. Token by token it gives the bits of one call, at any
 * number of threads. */
static void cuts_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 4; trial++) {
        test_random random = {(uint64_t)trial + 77};
        const oracle_core x = {.queries = 9,
                               .raw = 1600,
                               .entries = 3000,
                               .heads = 5,
                               .dim = 24,
                               .window = trial % 2 ? 1300 : 50,
                               .ratio = 2,
                               .start = 5995,
                               .rope_dim = 8,
                               .chosen = -1};
        const core_parts parts = {.entries = true, .sink = true, .rope = true};
        core_case c = core_case_make(&random, &x, 1, NULL, trial < 2 ? QUERN_BF16 : QUERN_F32, &parts);
        quern_context *one = test_context(QUERN_CPU_LEVEL_AUTO, 1),
                      *many = test_context(QUERN_CPU_LEVEL_AUTO, 4);
        core_case_forward(&c, one);
        core_case_check(&c, false);
        test_tensor first[3];
        for (int i = 0; i < 3; i++) {
            first[i] = test_tensor_copy(&c.t[CORE_O + i]);
            test_tensor_reset(&c.t[CORE_O + i]);
        }
        for (int64_t t = 0; t < x.queries; t++) {
            core_case piece = c; /* the same memory, without the raw rows of later tokens */
            piece.shape.queries = 1;
            piece.shape.start = x.start + t;
            piece.t[CORE_KV].view.shape[1] = x.raw - x.queries + t + 1;
            for (int i = CORE_Q; i <= CORE_LSE_WIN; i++) {
                quern_tensor *view = &piece.t[i].view;
                const int dim = i >= CORE_LSE ? 2 : 1;
                if (i != CORE_Q && i < CORE_O) continue;
                view->shape[dim] = 1;
                view->data =
                    (char *)view->data + t * view->strides[dim] * (int64_t)quern_dtype_size(view->dtype);
            }
            core_case_forward(&piece, many);
        }
        for (int i = 0; i < 3; i++) {
            assert_true(test_tensor_same_bits(&first[i], &c.t[CORE_O + i]));
            test_tensor_free(&first[i]);
        }
        quern_context_destroy(one), quern_context_destroy(many);
        core_case_free(&c);
    }
}

static void golden_layers(void **state)
{
    (void)state;
    if (CORE_ON_GPU) {
        print_message("the golden layers are f32\n");
        skip();
    }
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        for (int i = 0; i < DSV4_LAYERS; i++) {
            dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, i);
            test_random random = {4};
            const core_parts parts = {
                .entries = l.kv_cmp != NULL, .list = l.idx != NULL, .sink = true, .rope = true};
            core_case c = core_case_make(&random, &l.core, DSV4_LAYER_BATCH, NULL, QUERN_F32, &parts);
            test_tensor_set(&c.t[CORE_Q], l.q), test_tensor_set(&c.t[CORE_KV], l.kv);
            if (l.kv_cmp != NULL) test_tensor_set(&c.t[CORE_KV_CMP], l.kv_cmp);
            if (l.idx != NULL) test_tensor_set_i32(&c.t[CORE_IDX], l.idx);
            test_tensor_set(&c.t[CORE_SINK], l.sink), test_tensor_set(&c.t[CORE_COS_SIN], l.cos_sin);
            quern_context *ctx = test_context(level, 2);
            core_case_forward(&c, ctx);
            double *o = test_tensor_get(&c.t[CORE_O]);
            test_check_golden(l.name, o, l.o, test_tensor_count(&c.t[CORE_O]), DSV4_TINY_BOUND);
            free(o);
            quern_context_destroy(ctx);
            core_case_free(&c);
            dsv4_layer_free(&l);
        }
    }
}

/* The order of a list, padding in it and entries that stand twice change no bit; a bad entry sets the status
 * bit. */
static void lists_in_any_order(void **state)
{
    static const int32_t lists[][6] = {{1, 3, 4, -1, -1, -1},
                                       {4, 1, 3, -1, -1, -1},
                                       {-1, 3, 1, 1, 4, 3},
                                       {1, 3, 4, 6, 5, 4},
                                       {9, 4, -5, 3, 1, 4}};
    (void)state;
    test_random random = {5};
    const oracle_core x = {.queries = 1,
                           .raw = 4,
                           .entries = 7,
                           .heads = 3,
                           .dim = 16,
                           .window = 4,
                           .ratio = 4,
                           .start = 19,
                           .chosen = 6};
    const core_parts parts = {.entries = true, .list = true};
    core_case c = core_case_make(&random, &x, 1, NULL, QUERN_F32, &parts);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    test_tensor first[CORE_TENSORS] = {{.buffer = NULL}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        test_tensor_set_i32(&c.t[CORE_IDX], lists[i]);
        core_case_forward(&c, ctx);
        core_case_backward(&c, ctx);
        core_case_check(&c, true);
        for (int k = CORE_O; k < CORE_TENSORS; k++) {
            if (c.t[k].buffer == NULL || k == CORE_D_O) continue;
            if (i == 0) first[k] = test_tensor_copy(&c.t[k]);
            else assert_true(test_tensor_same_bits(&first[k], &c.t[k]));
        }
        const int64_t one = 1;
        int32_t word = 64;
        size_t bytes;
        const quern_tensor status = quern_tensor_contiguous(&word, QUERN_I32, 1, &one);
        quern_exec exec = QUERN_EXEC_INIT;
        exec.status = &status;
        const quern_dsv4_attention_params p = core_case_params(&c);
        const quern_dsv4_attention_tensors t = core_case_tensors(&c);
        assert_int_equal(quern_dsv4_attention_workspace(ctx, &p, &t, &bytes), QUERN_OK);
        test_workspace w = test_workspace_make(bytes);
        assert_int_equal(quern_dsv4_attention(ctx, &exec, &p, &t, w.data, bytes), QUERN_OK);
        test_workspace_close(&w);
        assert_int_equal(word, i == 4 ? 64 | QUERN_STATUS_BAD_INDEX : 64);
    }
    for (int k = 0; k < CORE_TENSORS; k++)
        if (first[k].buffer != NULL) test_tensor_free(&first[k]);
    quern_context_destroy(ctx);
    core_case_free(&c);
}

/* A nonfinite row reaches exactly the queries that see it. */
static void nonfinite_values(void **state)
{
    (void)state;
    for (int trial = 0; trial < 16; trial++) {
        const int64_t dim = trial < 8 ? 16 : 512;
        test_random random = {(uint64_t)trial + 15};
        const oracle_core x = {.queries = 12,
                               .raw = 12,
                               .entries = 3,
                               .heads = 2,
                               .dim = dim,
                               .window = 3,
                               .ratio = 4,
                               .rope_dim = 4,
                               .chosen = -1};
        const core_parts parts = {.entries = true, .sink = true, .rope = true};
        core_case c = core_case_make(&random, &x, 1, NULL, trial % 2 ? QUERN_BF16 : QUERN_F32, &parts);
        quern_context *ctx = test_context(test_random_level(&random), 2);
        core_case_forward(&c, ctx);
        double *before = test_tensor_get(&c.t[CORE_O]), *kv = test_tensor_get(&c.t[CORE_KV]),
               *cmp = test_tensor_get(&c.t[CORE_KV_CMP]);
        kv[5 * dim + 3] = trial % 4 < 2 ? NAN : INFINITY; /* seen by queries 5, 6, 7 */
        if (trial % 8 >= 4) cmp[dim] = NAN;               /* seen by queries from 7 on */
        test_tensor_set(&c.t[CORE_KV], kv), test_tensor_set(&c.t[CORE_KV_CMP], cmp);
        core_case_forward(&c, ctx);
        core_case_backward(&c, ctx);
        double *after = test_tensor_get(&c.t[CORE_O]), *d_q = test_tensor_get(&c.t[CORE_D_Q]);
        for (int64_t t = 0; t < 12; t++) {
            const bool sees = (t >= 5 && t <= 7) || (trial % 8 >= 4 && t >= 7);
            bool finite = true;
            for (int64_t i = t * 2 * dim; i < (t + 1) * 2 * dim; i++) {
                finite = finite && isfinite(after[i]);
                assert_true(sees || (after[i] == before[i] && isfinite(d_q[i])));
            }
            assert_true(finite != sees);
        }
        free(before), free(after), free(kv), free(cmp), free(d_q);
        quern_context_destroy(ctx);
        core_case_free(&c);
    }
}

static void expect_refusal(core_case *c, quern_context *ctx, const quern_dsv4_attention_params *p,
                           const quern_dsv4_attention_tensors *t, bool backward, const char *sentence)
{
    char memory[64];
    const quern_status status = backward
                                    ? quern_dsv4_attention_backward(ctx, NULL, p, t, memory, sizeof memory)
                                    : quern_dsv4_attention(ctx, NULL, p, t, memory, sizeof memory);
    assert_true(status != QUERN_OK);
    if (strstr(quern_last_error(ctx), sentence) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentence);
    for (int i = 0; i < CORE_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], "a tensor of a refused call");
}

static void a_query_with_heads_before_tokens_is_named(void **state)
{
    (void)state;
    test_random random = {13};
    const oracle_core x = {
        .queries = 4, .raw = 9, .heads = 2, .dim = 16, .window = 5, .ratio = 4, .start = 10};
    const core_parts parts = {.sink = true};
    core_case c = core_case_make(&random, &x, 2, NULL, QUERN_F32, &parts);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_attention_params p = core_case_params(&c);
    quern_dsv4_attention_tensors t = core_case_tensors(&c);
    quern_tensor q = c.t[CORE_Q].view;
    q.shape[1] = x.heads;
    q.shape[2] = x.queries;
    t.q = &q;
    expect_refusal(&c, ctx, &p, &t, false, "q has 2 x 4 tokens and heads, o 4 x 2");
    quern_context_destroy(ctx);
    core_case_free(&c);
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {13};
    const oracle_core x = {.queries = 4,
                           .raw = 9,
                           .entries = 3,
                           .heads = 2,
                           .dim = 16,
                           .window = 5,
                           .ratio = 4,
                           .start = 10,
                           .rope_dim = 8,
                           .chosen = 2};
    const core_parts parts = {true, true, true, true, true};
    core_case c = core_case_make(&random, &x, 2, NULL, QUERN_F32, &parts);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_attention_params good = core_case_params(&c);
    const quern_dsv4_attention_tensors whole = core_case_tensors(&c);
    quern_dsv4_attention_params p = good;
    quern_dsv4_attention_tensors t = whole;
    expect_refusal(&c, ctx, &good, &whole, false, "workspace");
    p.window = -1;
    expect_refusal(&c, ctx, &p, &t, false, "window is -1");
    p = good;
    p.ratio = -2;
    expect_refusal(&c, ctx, &p, &t, false, "ratio is -2");
    p = good;
    p.start_abs_pos = 4;
    expect_refusal(&c, ctx, &p, &t, false,
                   "query 0 stands at position 4 and raw row 0 at -1: 0 or more is accepted");
    p = good;
    p.start_abs_pos = 11;
    expect_refusal(&c, ctx, &p, &t, false,
                   "the last query stands at position 14: cos_sin has positions 0 to 13");
    p = good;
    t.kv = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "kv is NULL");
    t = whole;
    t.kv_cmp = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "idx is given: it stands beside kv_cmp");
    t = whole;
    t.idx = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "count is given: it stands beside idx");
    t = whole;
    t.o = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "o is NULL");
    t = whole;
    t.lse = NULL;
    expect_refusal(&c, ctx, &p, &t, true, "lse is NULL");
    t = whole;
    t.sink = NULL;
    expect_refusal(&c, ctx, &p, &t, true, "d_sink is given and sink is NULL");
    quern_tensor view = c.t[CORE_COS_SIN].view;
    view.shape[1] = 7;
    t = whole;
    t.cos_sin = &view;
    expect_refusal(&c, ctx, &p, &t, false, "cos_sin has 7 columns: an even number up to the 16 channels");
    view = c.t[CORE_Q].view;
    view.shape[3] = 12;
    t = whole;
    t.q = &view;
    expect_refusal(&c, ctx, &p, &t, false, "q: head dim 12");
    view = c.t[CORE_KV].view;
    view.shape[2] = 8;
    t = whole;
    t.kv = &view;
    expect_refusal(&c, ctx, &p, &t, false, "kv.shape[2] is 8: 16 is accepted");
    t = whole;
    t.o = t.q;
    expect_refusal(&c, ctx, &p, &t, false, "shares memory");
    const int32_t cu[] = {0, 3, 2};
    const int64_t three = 3;
    const quern_tensor falling = quern_tensor_contiguous((void *)(uintptr_t)cu, QUERN_I32, 1, &three);
    core_case varlen = core_case_make(&random,
                                      &(oracle_core){.queries = 4,
                                                     .raw = 4,
                                                     .entries = 1,
                                                     .heads = 2,
                                                     .dim = 16,
                                                     .window = 5,
                                                     .ratio = 4,
                                                     .rope_dim = 2,
                                                     .chosen = -1},
                                      2, (const int32_t[]){0, 1, 4}, QUERN_F32,
                                      &(core_parts){.entries = true, .rope = true});
    t = core_case_tensors(&varlen);
    p = core_case_params(&varlen);
    t.cu_seqlens = &falling;
    static char memory[1 << 20]; /* enough for any number of threads */
    assert_true(quern_dsv4_attention(ctx, NULL, &p, &t, memory, sizeof memory) != QUERN_OK);
    assert_non_null(strstr(quern_last_error(ctx), "cu_seqlens[2] is 2 after 3"));
    t = core_case_tensors(&varlen);
    p.start_abs_pos = 3;
    expect_refusal(&varlen, ctx, &p, &t, false, "start_abs_pos is 3 with cu_seqlens");
    core_case_free(&varlen);
    quern_context_destroy(ctx);
    core_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls),
                                       cmocka_unit_test(released_shapes),
                                       cmocka_unit_test(few_heads),
                                       cmocka_unit_test(long_calls),
                                       cmocka_unit_test(threads_change_no_bit),
                                       cmocka_unit_test(cuts_change_no_bit),
                                       cmocka_unit_test(golden_layers),
                                       cmocka_unit_test(lists_in_any_order),
                                       cmocka_unit_test(nonfinite_values),
                                       cmocka_unit_test(a_query_with_heads_before_tokens_is_named),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
