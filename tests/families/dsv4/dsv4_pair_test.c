/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_pair_test.c - the main and the indexer's compressor in one call: the bits of two calls, the sum of
 * both gradients of x against the float64 oracle, formats that refuse an entry, what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_case.h"
#include "op_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static quern_dsv4_compress_params params_of(const dsv4_case *c, const dsv4_case *index)
{
    quern_dsv4_compress_params p = dsv4_case_params(c);
    p.index_hadamard = index->shape.hadamard;
    return p;
}

static const quern_tensor *view_of(const dsv4_case *c, dsv4_tensor which)
{
    return c->t[which].buffer != NULL ? &c->t[which].view : NULL;
}

static quern_dsv4_compress_tensors tensors_of(const dsv4_case *c, const dsv4_case *index)
{
    quern_dsv4_compress_tensors t = dsv4_case_tensors(c);
    t.index_proj = view_of(index, DSV4_PROJ);
    t.index_w = view_of(index, DSV4_W);
    t.index_b_a = view_of(index, DSV4_BIAS_A);
    t.index_b_b = view_of(index, DSV4_BIAS_B);
    t.index_prev_b = view_of(index, DSV4_PREV_B);
    t.index_norm_weight = view_of(index, DSV4_NORM_WEIGHT);
    t.index_pooled = view_of(index, DSV4_POOLED);
    t.index_out = view_of(index, DSV4_OUT);
    t.index_d_out = view_of(index, DSV4_D_OUT);
    t.index_d_proj = view_of(index, DSV4_D_PROJ);
    t.index_d_prev_b = view_of(index, DSV4_D_PREV_B);
    t.index_d_w = view_of(index, DSV4_D_W);
    t.index_d_b_a = view_of(index, DSV4_D_BIAS_A);
    t.index_d_b_b = view_of(index, DSV4_D_BIAS_B);
    t.index_d_norm_weight = view_of(index, DSV4_D_NORM_WEIGHT);
    return t;
}

/* A random pair of overlapping compressors. */
static dsv4_case random_pair(test_random *random, dsv4_case *index)
{
    dsv4_case c = dsv4_case_random_of(random, (dsv4_wish){.overlap = true});
    *index = dsv4_case_beside(&c, random);
    return c;
}

static void keep(const dsv4_case *c, test_tensor first[DSV4_TENSORS])
{
    for (int i = 0; i < DSV4_TENSORS; i++) {
        const bool result = i >= DSV4_CU_SEQLENS_CMP && i != DSV4_D_OUT && c->t[i].buffer != NULL;
        first[i] = result ? test_tensor_copy(&c->t[i]) : (test_tensor){.buffer = NULL};
    }
}

static void check_same(const dsv4_case *c, test_tensor first[DSV4_TENSORS], const char *whose)
{
    for (int i = 0; i < DSV4_TENSORS; i++) {
        if (first[i].buffer == NULL) continue;
        if (i != DSV4_D_X && !test_tensor_same_bits(&first[i], &c->t[i]))
            fail_msg("%s differs from a call of its own: %s", whose, op_case_field("csa-compress", i));
        test_tensor_free(&first[i]);
    }
}

/* Every output has the bits of two calls but the gradient of x, which is the oracle's sum. */
static void pairs_have_the_bits_of_two_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("pairs", 5);
    for (int trial = 0; trial < test_trials(200); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        dsv4_case index, c = random_pair(&random, &index);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        test_tensor first[2][DSV4_TENSORS];
        dsv4_case_run(&c, ctx), dsv4_case_run(&index, ctx);
        keep(&c, first[0]), keep(&index, first[1]);
        double *pooled[2] = {test_tensor_get(&c.t[DSV4_POOLED]), test_tensor_get(&index.t[DSV4_POOLED])};
        dsv4_case_reference(&c, pooled[0]), dsv4_case_reference(&index, pooled[1]);
        for (int i = DSV4_CU_SEQLENS_CMP; i < DSV4_TENSORS; i++) {
            if (i == DSV4_D_OUT) continue;
            if (c.t[i].buffer != NULL) test_tensor_reset(&c.t[i]);
            if (index.t[i].buffer != NULL) test_tensor_reset(&index.t[i]);
        }
        const quern_dsv4_compress_params p = params_of(&c, &index);
        const quern_dsv4_compress_tensors t = tensors_of(&c, &index);
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &t);
        op_case_call(ctx, "csa-compress", QUERN_OP_BACKWARD, &p, &t);
        if (c.in > 0) {
            const int64_t n = test_tensor_count(&c.t[DSV4_D_X]);
            for (int64_t i = 0; i < n; i++) c.reference[DSV4_D_X][i] += index.reference[DSV4_D_X][i];
            test_tensor_check_unchanged(&index.t[DSV4_D_X], "d_x of the indexer's own call");
            test_tensor_free(&index.t[DSV4_D_X]);
            index.t[DSV4_D_X].buffer = NULL;
        }
        dsv4_case_check(&c), dsv4_case_check(&index);
        check_same(&c, first[0], "main"), check_same(&index, first[1], "index");
        free(pooled[0]), free(pooled[1]);
        dsv4_case_free_beside(&index);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

enum { TOKENS = 27, R = 4, C = 512, C_I = 128, ENTRIES = TOKENS / R, TABLE = 64 };

/* A call in bytes, from projections. */
typedef struct byte_call {
    test_tensor proj, index_proj, b_a, b_b, index_b_a, index_b_b, out, pooled, index_out, index_pooled;
} byte_call;

static test_tensor normal(test_random *random, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t = test_tensor_make(random, QUERN_F32, 2, shape, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1);
    return t;
}

static test_tensor result(test_random *random, quern_dtype dtype, int64_t columns)
{
    const int64_t shape[] = {ENTRIES, columns};
    return test_tensor_make(random, dtype, 2, shape, TEST_STRIDED);
}

static byte_call make_bytes(test_random *random, bool main_bytes, bool index_bytes)
{
    return (byte_call){.proj = normal(random, TOKENS, 4 * C),
                       .index_proj = normal(random, TOKENS, 4 * C_I),
                       .b_a = normal(random, R, C),
                       .b_b = normal(random, R, C),
                       .index_b_a = normal(random, R, C_I),
                       .index_b_b = normal(random, R, C_I),
                       .out = result(random, main_bytes ? QUERN_U8 : QUERN_F32, main_bytes ? 584 : C),
                       .pooled = result(random, QUERN_F32, C),
                       .index_out =
                           result(random, index_bytes ? QUERN_U8 : QUERN_F32, index_bytes ? 68 : C_I),
                       .index_pooled = result(random, QUERN_F32, C_I)};
}

static quern_dsv4_compress_tensors byte_tensors(const byte_call *b)
{
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    t.proj = &b->proj.view;
    t.b_a = &b->b_a.view;
    t.b_b = &b->b_b.view;
    t.out = &b->out.view;
    t.pooled = &b->pooled.view;
    t.index_proj = &b->index_proj.view;
    t.index_b_a = &b->index_b_a.view;
    t.index_b_b = &b->index_b_b.view;
    t.index_out = &b->index_out.view;
    t.index_pooled = &b->index_pooled.view;
    return t;
}

static void free_bytes(byte_call *b)
{
    test_tensor *all[] = {&b->proj,      &b->index_proj, &b->b_a,    &b->b_b,       &b->index_b_a,
                          &b->index_b_b, &b->out,        &b->pooled, &b->index_out, &b->index_pooled};
    for (int i = 0; i < 10; i++) test_tensor_free(all[i]);
}

/* Bytes are those of two calls. With a NaN in either of the projections nothing is written. */
static void formats(void **state)
{
    (void)state;
    for (int trial = 0; trial < 12; trial++) {
        const bool main_bytes = trial % 2 == 1, index_bytes = trial / 2 % 2 == 1;
        test_random random = {(uint64_t)trial + 3};
        quern_context *ctx = test_context(test_level(trial), 2);
        byte_call b = make_bytes(&random, main_bytes, index_bytes);
        quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT, own = p;
        p.format = main_bytes ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
        p.index_format = index_bytes ? QUERN_DSV4_FP4 : QUERN_DSV4_ROWS;
        p.index_hadamard = true;
        own.format = p.index_format;
        own.hadamard = true;
        const quern_dsv4_compress_tensors t = byte_tensors(&b);
        quern_dsv4_compress_tensors single = QUERN_DSV4_COMPRESS_TENSORS_INIT;
        single.proj = t.index_proj;
        single.b_a = t.index_b_a;
        single.b_b = t.index_b_b;
        single.out = t.index_out;
        single.pooled = t.index_pooled;
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &own, &single);
        single = t;
        single.index_proj = single.index_b_a = single.index_b_b = single.index_out = single.index_pooled =
            NULL;
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &single);
        test_tensor *results[] = {&b.out, &b.pooled, &b.index_out, &b.index_pooled}, first[4];
        for (int i = 0; i < 4; i++) {
            first[i] = test_tensor_copy(results[i]);
            test_tensor_reset(results[i]);
        }
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &t);
        for (int i = 0; i < 4; i++) {
            assert_true(test_tensor_same_bits(&first[i], results[i]));
            test_tensor_check_guards(results[i], "result");
            test_tensor_free(&first[i]);
        }
#ifndef QUERN_TEST_GPU /* which reads no contents on the host */
        for (int which = 0; which < 2; which++) {
            if (!(which == 0 ? main_bytes : index_bytes)) continue;
            float *bad = (float *)(which == 0 ? b.proj : b.index_proj).view.data + 5, good = *bad;
            *bad = NAN;
            for (int i = 0; i < 4; i++) test_tensor_reset(results[i]);
            size_t need;
            assert_int_equal(quern_dsv4_compress_workspace(ctx, &p, &t, &need), QUERN_OK);
            test_workspace space = test_workspace_make(need);
            assert_int_equal(quern_dsv4_compress(ctx, NULL, &p, &t, space.data, need),
                             QUERN_ERR_INVALID_ARGUMENT);
            assert_non_null(strstr(quern_last_error(ctx), "(row 0, column"));
            for (int i = 0; i < 4; i++) test_tensor_check_unchanged(results[i], "result");
            test_workspace_close(&space);
            *bad = good;
        }
#endif
        free_bytes(&b);
        quern_context_destroy(ctx);
    }
}

static void expect_refusal(quern_context *ctx, const quern_dsv4_compress_params *p,
                           const quern_dsv4_compress_tensors *t, const char *sentence)
{
    size_t bytes;
    assert_int_equal(quern_dsv4_compress_workspace(ctx, p, t, &bytes), QUERN_ERR_INVALID_ARGUMENT);
    assert_string_equal(quern_last_error(ctx), sentence);
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {1};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    byte_call b = make_bytes(&random, false, false);
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    quern_dsv4_compress_tensors t = byte_tensors(&b);
    t.index_b_a = NULL;
    expect_refusal(ctx, &p, &t, "index_proj is given: it stands beside index_b_a");
    t = byte_tensors(&b);
    t.index_b_b = NULL;
    expect_refusal(ctx, &p, &t, "index_b_b is NULL: a tensor is needed");
    t = byte_tensors(&b);
    t.index_w = t.b_a;
    expect_refusal(ctx, &p, &t, "index_w is given: it stands beside x");
    t = byte_tensors(&b);
    t.index_prev_b = t.b_a;
    expect_refusal(ctx, &p, &t, "index_prev_b is given: it stands beside prev_b");
    t = byte_tensors(&b);
    t.index_proj = t.proj;
    expect_refusal(ctx, &p, &t, "index_proj.shape[1] is 2048: 512 is accepted");
    p.index_format = QUERN_DSV4_ROW584;
    t = byte_tensors(&b);
    expect_refusal(ctx, &p, &t, "index_format is 4: 0 to 3 is accepted");
    p.index_format = QUERN_DSV4_FP8;
    expect_refusal(ctx, &p, &t, "index_out has dtype f32: u8, the format's bytes, is accepted");
    p.index_format = QUERN_DSV4_ROWS;
    b.index_b_a.view.shape[1] = C_I - 1;
    p.index_hadamard = true;
    expect_refusal(ctx, &p, &t, "entries have 127 channels: hadamard takes powers of two");
    b.index_b_a.view.shape[1] = C_I;
    p.kind = QUERN_DSV4_HCA;
    p.ratio = R;
    t.b_b = NULL;
    expect_refusal(ctx, &p, &t, "index_proj is given: HCA has no indexer");
    free_bytes(&b);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pairs_have_the_bits_of_two_calls),
                                       cmocka_unit_test(formats), cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
