/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_weights_test.c - projection weights of the compressors in FP8 and NVFP4, by the float64 oracle on what
 * the codes mean; pieces give the bits of one shot. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_case.h"
#include "dsv4_states.h"
#include "dsv4_weights.h"
#include "op_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void drop(dsv4_case *c, dsv4_tensor which)
{
    if (c->t[which].buffer != NULL) test_tensor_free(&c->t[which]);
    c->t[which].buffer = NULL;
}

/* A random case from hidden states, whose weight the other one replaces. */
static dsv4_case random_case(test_random *random, weight_kind kind, bool overlap)
{
    return dsv4_case_random_of(random, (dsv4_wish){.in_of = kind == NVFP4 ? 16 : 1, .overlap = overlap});
}

static void exchange(dsv4_case *c, weight *w, test_random *random, weight_kind kind)
{
    *w = dsv4_weight_random(random, kind, c->in, dsv4_columns(c));
    drop(c, DSV4_W), drop(c, DSV4_D_W);
    c->w_values = w->values;
}

/* The weight in floats: what FP8 is widened to, and NVFP4 in the backward pass. */
static test_tensor in_floats(const dsv4_case *c, const weight *w, test_random *random)
{
    const int64_t shape[] = {c->in, dsv4_columns(c)};
    const bool exact = w->kind == FP8_POWERS && c->dtype == QUERN_BF16;
    test_tensor t = test_tensor_make(random, exact ? QUERN_BF16 : QUERN_F32, 2, shape, TEST_STRIDED);
    test_tensor_set(&t, w->values); /* one rounding, as every value has */
    return t;
}

/* Entries by the oracle, from what the codes mean. */
static void check_entries(dsv4_case *c)
{
    static const dsv4_tensor entries[] = {DSV4_POOLED, DSV4_OUT};
    double *pooled = test_tensor_get(&c->t[DSV4_POOLED]);
    dsv4_case_reference(c, pooled);
    for (int i = 0; i < 2; i++) {
        const test_tensor *t = &c->t[entries[i]];
        double *out = test_tensor_get(t);
        test_check(op_case_field("csa-compress", entries[i]), out, c->reference[entries[i]],
                   test_tensor_count(t), test_forward_bound(t->view.dtype));
        test_tensor_check_guards(t, "entries");
        free(out);
    }
    free(pooled);
}

/* Copies the results and clears them. */
static void keep(dsv4_case *c, test_tensor first[DSV4_TENSORS])
{
    for (int i = DSV4_POOLED; i < DSV4_TENSORS; i++) {
        first[i].buffer = NULL;
        if (c->t[i].buffer == NULL || i == DSV4_D_OUT) continue;
        first[i] = test_tensor_copy(&c->t[i]);
        test_tensor_reset(&c->t[i]);
    }
}

/* Whether the results have the bits of those that were kept, from gradients on or all of them. */
static void check_same(const dsv4_case *c, test_tensor first[DSV4_TENSORS], bool gradients_alone)
{
    for (int i = DSV4_POOLED; i < DSV4_TENSORS; i++) {
        if (first[i].buffer == NULL) continue;
        if ((i > DSV4_D_OUT || !gradients_alone) && !test_tensor_same_bits(&first[i], &c->t[i]))
            fail_msg("%s differs from that of a weight in floats", op_case_field("csa-compress", i));
        test_tensor_free(&first[i]);
    }
}

/* Entries by the oracle. Of FP8 these, and of both the gradients, have the bits of a weight in floats. */
static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 61);
    for (int trial = 0; trial < test_trials(240); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const weight_kind kind = (weight_kind)(trial % WEIGHT_KINDS);
        dsv4_case c = random_case(&random, kind, false);
        weight w;
        exchange(&c, &w, &random, kind);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        const quern_dsv4_compress_params p = dsv4_case_params(&c);
        quern_dsv4_compress_tensors t = dsv4_case_tensors(&c);
        const char *op = c.shape.overlap ? "csa-compress" : "hca-compress";
        test_tensor first[DSV4_TENSORS], floats = in_floats(&c, &w, &random);
        dsv4_weight_give(&w, &t);
        op_case_call(ctx, op, QUERN_OP_FORWARD, &p, &t);
        op_case_call(ctx, op, QUERN_OP_BACKWARD, &p, &t);
        check_entries(&c);
        keep(&c, first);
        t = dsv4_case_tensors(&c);
        t.w = &floats.view;
        op_case_call(ctx, op, QUERN_OP_FORWARD, &p, &t);
        op_case_call(ctx, op, QUERN_OP_BACKWARD, &p, &t);
        check_same(&c, first, kind == NVFP4);
        test_tensor_free(&floats);
        dsv4_weight_free(&w);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

/* The tensors of the indexer's compressor from its own call's. */
static void give_index(const quern_dsv4_compress_tensors *own, quern_dsv4_compress_tensors *t)
{
    t->index_w = own->w;
    t->index_w_fp8 = own->w_fp8;
    t->index_w_fp8_scales = own->w_fp8_scales;
    t->index_w_codes = own->w_codes;
    t->index_w_scales = own->w_scales;
    t->index_w_global = own->w_global;
    t->index_b_a = own->b_a;
    t->index_b_b = own->b_b;
    t->index_prev_b = own->prev_b;
    t->index_norm_weight = own->norm_weight;
    t->index_pooled = own->pooled;
    t->index_out = own->out;
    t->index_d_out = own->d_out;
    t->index_d_prev_b = own->d_prev_b;
    t->index_d_b_a = own->d_b_a;
    t->index_d_b_b = own->d_b_b;
    t->index_d_norm_weight = own->d_norm_weight;
}

/* Both compressors, each with a weight of its own format. */
static void pairs(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("pairs", 62);
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const weight_kind kinds[] = {(weight_kind)(trial % WEIGHT_KINDS),
                                     (weight_kind)(trial / WEIGHT_KINDS % WEIGHT_KINDS)};
        dsv4_case c = random_case(&random, NVFP4, true);
        dsv4_case index = dsv4_case_beside(&c, &random);
        weight w[2];
        test_tensor first[2][DSV4_TENSORS];
        exchange(&c, &w[0], &random, kinds[0]), exchange(&index, &w[1], &random, kinds[1]);
        drop(&index, DSV4_D_X);
        test_tensor floats[] = {in_floats(&c, &w[0], &random), in_floats(&index, &w[1], &random)};
        quern_context *ctx = test_context(test_random_level(&random), 2);
        quern_dsv4_compress_params p = dsv4_case_params(&c);
        p.index_hadamard = index.shape.hadamard;
        for (int k = 0; k < 2; k++) {
            quern_dsv4_compress_tensors t = dsv4_case_tensors(&c), own = dsv4_case_tensors(&index);
            if (k == 0) dsv4_weight_give(&w[0], &t), dsv4_weight_give(&w[1], &own);
            else t.w = &floats[0].view, own.w = &floats[1].view;
            give_index(&own, &t);
            op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &t);
            op_case_call(ctx, "csa-compress", QUERN_OP_BACKWARD, &p, &t);
            if (k > 0) continue;
            check_entries(&c), check_entries(&index);
            keep(&c, first[0]), keep(&index, first[1]);
        }
        check_same(&c, first[0], kinds[0] == NVFP4), check_same(&index, first[1], kinds[1] == NVFP4);
        for (int k = 0; k < 2; k++) test_tensor_free(&floats[k]), dsv4_weight_free(&w[k]);
        dsv4_case_free_beside(&index);
        dsv4_case_free(&c);
        quern_context_destroy(ctx);
    }
}

enum { TOKENS = 211, IN = 272, WIDTH = 40, R = 4, ENTRIES = TOKENS / R };

static quern_tensor rows_of(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    v.data = (char *)t->data + first * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    v.shape[0] = count;
    return v;
}

/* Appends all tokens in random pieces; out [ENTRIES + 1, WIDTH]. */
static void append_all(const quern_dsv4_compress_tensors *all, quern_context *ctx, test_random *random,
                       const quern_tensor *out)
{
    const quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    const int32_t slot = 0;
    dsv4_states states = dsv4_states_make(&p, WIDTH, 3, 1);
    t.w = all->w;
    t.w_fp8 = all->w_fp8;
    t.w_fp8_scales = all->w_fp8_scales;
    t.w_codes = all->w_codes;
    t.w_scales = all->w_scales;
    t.w_global = all->w_global;
    t.b_a = all->b_a;
    t.b_b = all->b_b;
    while (states.position[0] < TOKENS) {
        const int64_t at = states.position[0], left = TOKENS - at,
                      count = test_random_int(random, 1,
                                              test_random_one_in(random, 3) ? left
                                              : left < 3                    ? left
                                                                            : 3);
        const quern_tensor x = rows_of(all->x, at, count), entries = rows_of(out, at / R, count / R + 1);
        t.x = &x;
        t.out = &entries;
        if (dsv4_states_append(&states, ctx, &slot, &count, 1, &t) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        if (test_random_one_in(random, 3)) states.position[0] = states.merged[0];
    }
    dsv4_states_free(&states);
}

/* Weights in FP8, in NVFP4, in f32, and in the dtype of x. */
static void pieces_give_the_bits_of_one_shot(void **state)
{
    enum { KINDS = WEIGHT_KINDS + 2 };
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    (void)state;
    for (int n = 0; n < 3 * KINDS * 4; n++) {
        const int kind = n / 12;
        test_random random = {(uint64_t)n + 2};
        const quern_dtype dtype = dtypes[n / 4 % 3];
        quern_context *ctx = test_context(test_level(n % 4), 2);
        weight w = dsv4_weight_random(&random, (weight_kind)(kind % WEIGHT_KINDS), IN, 4 * WIDTH);
        test_tensor x = dsv4_weight_rows(&random, dtype, TOKENS, IN),
                    b_a = dsv4_weight_rows(&random, QUERN_F32, R, WIDTH),
                    b_b = dsv4_weight_rows(&random, QUERN_F32, R, WIDTH),
                    out = dsv4_weight_rows(&random, QUERN_F32, ENTRIES, WIDTH),
                    pieces = dsv4_weight_rows(&random, QUERN_F32, ENTRIES + 1, WIDTH),
                    floats =
                        dsv4_weight_rows(&random, kind == WEIGHT_KINDS ? QUERN_F32 : dtype, IN, 4 * WIDTH);
        const quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
        quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
        if (kind < WEIGHT_KINDS) dsv4_weight_give(&w, &t);
        else t.w = &floats.view;
        t.x = &x.view;
        t.b_a = &b_a.view;
        t.b_b = &b_b.view;
        t.out = &out.view;
        op_case_call(ctx, "csa-compress", QUERN_OP_FORWARD, &p, &t);
        append_all(&t, ctx, &random, &pieces.view);
        pieces.view.shape[0] = ENTRIES;
        assert_true(test_tensor_same_bits(&out, &pieces));
        pieces.view.shape[0] = ENTRIES + 1;
        test_tensor *all[] = {&x, &b_a, &b_b, &out, &pieces, &floats};
        for (int i = 0; i < 6; i++) test_tensor_free(all[i]);
        dsv4_weight_free(&w);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls), cmocka_unit_test(pairs),
                                       cmocka_unit_test(pieces_give_the_bits_of_one_shot)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
