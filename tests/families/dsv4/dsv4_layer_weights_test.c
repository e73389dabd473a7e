/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_weights_test.c - layers whose compressors have weights in FP8 or NVFP4: outputs by the float64
 * oracle on what the codes mean, gradients beside those of weights in floats, pieces with the bits of one
 * shot. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_layer_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const weight absent = {.kind = FP8_POWERS};

/* A CSA or HCA case; each compressor has floats or one of the formats, one at least a format. */
static layer_case random_case(test_random *random)
{
    layer_case c = layer_case_random(random, false);
    oracle_layer l = c.shape;
    layer_case_free(&c);
    l.kind = test_random_one_in(random, 2) ? ORACLE_CSA : ORACLE_HCA;
    l.width = 16 * test_random_int(random, 1, 9);
    c = layer_case_make(random, &l, c.batch, c.dtype, QUERN_F32);
    const int count = l.kind == ORACLE_CSA ? 2 : 1, one = (int)test_random_int(random, 0, count - 1);
    for (int i = 0; i < count; i++) {
        const int kind = (int)test_random_int(random, 0, i == one ? WEIGHT_KINDS - 1 : WEIGHT_KINDS);
        if (kind < WEIGHT_KINDS) layer_case_pack(&c, random, i, (weight_kind)kind);
    }
    return c;
}

/* Copies results [first, last] and clears them; scores that no call writes are of entries that are not
 * seen. */
static void take(layer_case *c, int first, int last, test_tensor to[LAYER_TENSORS])
{
    for (int k = first; k <= last; k++) {
        to[k].buffer = NULL;
        if (c->t[k].buffer == NULL) continue;
        to[k] = test_tensor_copy(&c->t[k]);
        test_tensor_reset(&c->t[k]);
        if (k != LAYER_IDX_SCORE) continue;
        const int64_t n = test_tensor_count(&c->t[k]);
        double *scores = test_doubles(n);
        for (int64_t e = 0; e < n; e++) scores[e] = -INFINITY;
        test_tensor_set(&c->t[k], scores);
        free(scores);
    }
}

static void drop(test_tensor of[LAYER_TENSORS], int first, int last)
{
    for (int k = first; k <= last; k++)
        if (of[k].buffer != NULL) test_tensor_free(&of[k]);
}

/* All sequences through a cache in random pieces, of which tokens are taken back now and then. */
static void append_all(const layer_case *c, quern_context *ctx, test_random *random)
{
    layer_store s = layer_store_make(c, c->batch, 3);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t at = 0; at < c->shape.tokens;) {
            const int64_t left = c->shape.tokens - at,
                          most = test_random_one_in(random, 3) || left < 4 ? left : 4,
                          count = test_random_int(random, 1, most);
            int64_t held;
            layer_case_append(c, ctx, &s, b, b, at, count);
            at += count;
            assert_int_equal(quern_dsv4_layer_cache_length(s.cache, b, NULL, &held), QUERN_OK);
            if (!test_random_one_in(random, 4)) continue;
            assert_int_equal(quern_dsv4_layer_cache_rollback(s.cache, b, held), QUERN_OK);
            at -= held;
        }
    layer_store_close(&s);
}

static void outputs_and_pieces(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("outputs_and_pieces", 81);
    for (int trial = 0; trial < test_trials(150); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        layer_case c = random_case(&random);
        test_tensor first[LAYER_TENSORS];
        const quern_cpu_level level = test_random_level(&random);
        quern_context *one = test_context(level, 1), *many = test_context(level, 3);
        layer_case_forward(&c, one);
        layer_case_check(&c);
        take(&c, LAYER_OUT, LAYER_O_A, first);
        append_all(&c, many, &random);
        for (int k = LAYER_OUT; k <= LAYER_O_A; k++)
            if (first[k].buffer != NULL && !test_tensor_same_bits(&first[k], &c.t[k]))
                fail_msg("%s differs from one shot", layer_case_names[k]);
        drop(first, LAYER_OUT, LAYER_O_A);
        layer_case_free(&c);
        quern_context_destroy(one), quern_context_destroy(many);
    }
}

/* The gradients of a case whose weights are floats, which mean the same; false where the indexer has chosen
 * otherwise. */
static bool run_in_floats(layer_case *c, quern_context *ctx)
{
    weight packed[2];
    int32_t *chosen = c->shape.kind == ORACLE_CSA ? test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]) : NULL,
            *now = NULL;
    memcpy(packed, c->packed, sizeof packed);
    c->packed[0] = c->packed[1] = absent;
    layer_case_forward(c, ctx);
    layer_case_backward(c, ctx);
    memcpy(c->packed, packed, sizeof packed);
    if (chosen != NULL) now = test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]);
    const size_t bytes =
        chosen != NULL ? (size_t)test_tensor_count(&c->t[LAYER_IDX_TOPK]) * sizeof *chosen : 0;
    const bool same = bytes == 0 || memcmp(chosen, now, bytes) == 0;
    free(chosen), free(now);
    return same;
}

static void gradients(void **state)
{
    (void)state;
    int compared = 0, trials = 0;
    const uint64_t seed = test_seed("gradients", 83);
    for (int trial = 0; trial < test_trials(100); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        layer_case c = random_case(&random);
        test_tensor first[LAYER_TENSORS];
        quern_context *ctx = test_context(test_random_level(&random), 2);
        layer_case_forward(&c, ctx);
        layer_case_backward(&c, ctx);
        for (int k = LAYER_D_WEIGHTS + OW_CMP_KV; k <= LAYER_D_WEIGHTS + OW_CMP_GATE; k++)
            if (c.packed[0].codes.buffer != NULL) test_tensor_check_unchanged(&c.t[k], layer_case_names[k]);
        take(&c, LAYER_D_X, LAYER_TENSORS - 1, first);
        const bool same = run_in_floats(&c, ctx);
        trials++, compared += same;
        for (int k = LAYER_D_X; k < LAYER_TENSORS && same; k++) {
            const bool weights = k == LAYER_D_WEIGHTS + OW_CMP_KV || k == LAYER_D_WEIGHTS + OW_CMP_GATE;
            if (first[k].buffer == NULL || (weights && c.packed[0].codes.buffer != NULL)) continue;
            double *expected = test_tensor_get(&c.t[k]), *out = test_tensor_get(&first[k]);
            test_check(layer_case_names[k], out, expected, test_tensor_count(&c.t[k]),
                       2 * test_gradient_bound(c.dtype));
            free(expected), free(out);
        }
        drop(first, LAYER_D_X, LAYER_TENSORS - 1);
        layer_case_free(&c);
        quern_context_destroy(ctx);
    }
    assert_true(compared * 10 >= trials * 8);
}

/* A call that is refused leaves its result. */
static void refused(const layer_case *c, quern_context *ctx, const quern_dsv4_layer_tensors *t, bool backward,
                    const char *sentence)
{
    enum { BYTES = 1 << 24 };
    const quern_dsv4_layer_params p = layer_case_params(c);
    void *w = malloc(BYTES);
    const quern_status status = backward ? quern_dsv4_layer_backward(ctx, NULL, &p, t, w, BYTES)
                                         : quern_dsv4_layer(ctx, NULL, &p, t, w, BYTES);
    assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(ctx), sentence) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(ctx), sentence);
    for (int k = LAYER_OUT; k < LAYER_TENSORS; k++)
        if (c->t[k].buffer != NULL) test_tensor_check_unchanged(&c->t[k], layer_case_names[k]);
    free(w);
}

static layer_case fixed_case(test_random *random, oracle_layer_kind kind, int64_t width)
{
    const oracle_layer l = {.kind = kind,
                            .tokens = 9,
                            .width = width,
                            .q_lora = 8,
                            .heads = 2,
                            .groups = 1,
                            .dim = 16,
                            .o_lora = 4,
                            .rope_dim = 8,
                            .window = 4,
                            .ratio = 2,
                            .index_heads = 2,
                            .index_dim = 8,
                            .top_k = 2,
                            .eps = 1e-6};
    return layer_case_make(random, &l, 1, QUERN_F32, QUERN_F32);
}

static void bad_weights_are_refused(void **state)
{
    (void)state;
    test_random random = {5};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    layer_case c = fixed_case(&random, ORACLE_CSA, 40), hca = fixed_case(&random, ORACLE_HCA, 40),
               swa = fixed_case(&random, ORACLE_SWA, 40);
    const quern_dsv4_layer_tensors floats = layer_case_tensors(&c);
    layer_case_pack(&c, &random, 0, FP8_SCALES);
    layer_case_pack(&c, &random, 1, FP8_POWERS);
    weight codes = dsv4_weight_random(&random, NVFP4, 48, 4 * 8);
    quern_dsv4_layer_tensors t = layer_case_tensors(&c);
    t.compressor_gate = floats.compressor_gate;
    refused(&c, ctx, &t, false, "compressor_fp8 is given beside compressor_gate: one weight is accepted");
    t = layer_case_tensors(&c);
    t.indexer_kv = floats.indexer_kv;
    refused(&c, ctx, &t, false, "indexer_fp8 is given beside indexer_kv: one weight is accepted");
    t = layer_case_tensors(&c);
    t.indexer_fp8_scales = NULL;
    refused(&c, ctx, &t, false, "indexer_fp8_scales is NULL");
    t = layer_case_tensors(&c);
    t.compressor_scales = &codes.scales.view;
    refused(&c, ctx, &t, false, "compressor_scales is given: it stands beside compressor_codes");
    t = layer_case_tensors(&c);
    t.compressor_fp8_scales = &c.t[LAYER_WEIGHTS + OW_KV].view;
    refused(&c, ctx, &t, false, "compressor_fp8_scales.shape[0] is 16: 1 is accepted");
    t = layer_case_tensors(&c);
    t.d_compressor_kv = floats.d_compressor_kv;
    refused(&c, ctx, &t, true, "d_compressor_kv is given and compressor_kv is NULL");
    t = layer_case_tensors(&c);
    t.indexer_fp8 = t.indexer_fp8_scales = NULL;
    t.indexer_codes = &codes.codes.view;
    t.indexer_scales = &codes.scales.view;
    t.indexer_global = &codes.global.view;
    refused(&c, ctx, &t, false, "x has 40 channels and indexer_codes is given: multiples of 16 are accepted");
    t = layer_case_tensors(&hca);
    t.indexer_fp8 = &c.packed[1].codes.view;
    refused(&hca, ctx, &t, false, "indexer_fp8 is given: a layer of kind hca has no indexer");
    t = layer_case_tensors(&swa);
    t.compressor_fp8 = &c.packed[0].codes.view;
    refused(&swa, ctx, &t, false, "compressor_fp8 is given: a layer of kind swa has no compressor");
    dsv4_weight_free(&codes);
    layer_case_free(&c), layer_case_free(&hca), layer_case_free(&swa);
    quern_context_destroy(ctx);
}

/* Of both compressors: data that is looked at while the call runs, before any output is written. */
static void bad_data_is_refused(void **state)
{
    (void)state;
    for (int which = 0; which < 2; which++)
        for (int bad = 0; bad < 3; bad++) {
            test_random random = {(uint64_t)(20 + bad)};
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
            layer_case c = fixed_case(&random, ORACLE_CSA, 48);
            layer_case_pack(&c, &random, which, bad == 2 ? FP8_POWERS : NVFP4);
            weight *w = &c.packed[which];
            if (bad == 2) dsv4_weight_bytes(&w->scales, 0)[0] = 0xff;
            else if (bad == 0) dsv4_weight_bytes(&w->scales, 2)[5] = 0xff;
            else *(float *)w->global.view.data = -1.0f;
            memcpy(w->scales.snapshot, w->scales.buffer, w->scales.bytes);
            if (bad < 2) memcpy(w->global.snapshot, w->global.buffer, w->global.bytes);
            const quern_dsv4_layer_tensors t = layer_case_tensors(&c);
            refused(&c, ctx, &t, false,
                    bad == 0   ? "scale"
                    : bad == 1 ? "_global[0] is -1"
                               : "_fp8_scales[0, 0] is the scale byte 0xFF");
            layer_case_free(&c);
            quern_context_destroy(ctx);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(outputs_and_pieces), cmocka_unit_test(gradients),
                                       cmocka_unit_test(bad_weights_are_refused),
                                       cmocka_unit_test(bad_data_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
