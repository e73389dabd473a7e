/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_stream_test.c - the whole layer from a cache: entries, keys and choices have the bits of one
 * shot, however sequences are cut, rolled back, forked and batched; bad input leaves the cache as it was. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_layer_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Results that have the bits of one shot. */
static const int exact[] = {LAYER_Q_RESIDUAL, LAYER_Q,     LAYER_KV,        LAYER_COMPRESSED,
                            LAYER_IDX_K,      LAYER_IDX_Q, LAYER_IDX_SCORE, LAYER_IDX_TOPK};

/* Clears the results; scores that no call writes are of entries that are not seen. */
static void clear(layer_case *c)
{
    for (int k = LAYER_OUT; k <= LAYER_O_A; k++) {
        if (c->t[k].buffer == NULL) continue;
        const int64_t n = test_tensor_count(&c->t[k]);
        test_tensor_reset(&c->t[k]);
        if (k != LAYER_IDX_SCORE) continue;
        double *scores = test_doubles(n);
        for (int64_t e = 0; e < n; e++) scores[e] = -INFINITY;
        test_tensor_set(&c->t[k], scores);
        free(scores);
    }
}

static void keep(const layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (int k = 0; k < LAYER_TENSORS; k++)
        first[k] = k >= LAYER_OUT && k <= LAYER_O_A && c->t[k].buffer != NULL ? test_tensor_copy(&c->t[k])
                                                                              : (test_tensor){.buffer = NULL};
}

static void check_exact(const layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++)
        if (c->t[exact[i]].buffer != NULL && !test_tensor_same_bits(&first[exact[i]], &c->t[exact[i]]))
            fail_msg("%s differs from one shot", layer_case_names[exact[i]]);
}

static void free_kept(test_tensor first[LAYER_TENSORS])
{
    for (int k = 0; k < LAYER_TENSORS; k++)
        if (first[k].buffer != NULL) test_tensor_free(&first[k]);
}

/* Makes a sequence of another's saved bytes. */
static void move(quern_context *ctx, const layer_store *s, int64_t from, int64_t to)
{
    int64_t held, left;
    size_t bytes;
    assert_int_equal(quern_dsv4_layer_cache_length(s->cache, from, NULL, &held), QUERN_OK);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, from, NULL, &bytes), QUERN_OK);
    test_workspace space = test_workspace_make(bytes);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, from, space.data, &bytes), QUERN_OK);
    if (quern_dsv4_layer_cache_restore(ctx, s->cache, to, space.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    test_workspace_close(&space);
    assert_int_equal(quern_dsv4_layer_cache_length(s->cache, to, NULL, &left), QUERN_OK);
    assert_int_equal(left, held);
}

/* Random pieces; before some of them tokens are taken back, or the sequence goes on in a fork. */
static void append_all(const layer_case *c, quern_context *ctx, test_random *random, const layer_store *s,
                       int64_t b)
{
    int64_t at = 0, id = b, held, tokens;
    while (at < c->shape.tokens) {
        const int64_t left = c->shape.tokens - at,
                      count = test_random_int(random, 0,
                                              test_random_one_in(random, 3) ? left
                                              : left < 4                    ? left
                                                                            : 4);
        layer_case_append(c, ctx, s, id, b, at, count);
        at += count;
        assert_int_equal(quern_dsv4_layer_cache_length(s->cache, id, &tokens, &held), QUERN_OK);
        assert_int_equal(tokens, at);
        if (test_random_one_in(random, 3)) {
            const int64_t n = test_random_int(random, 0, held);
            assert_int_equal(quern_dsv4_layer_cache_rollback(s->cache, id, n), QUERN_OK);
            at -= n;
        }
        if (test_random_one_in(random, 5)) { /* the one that was left behind is emptied */
            const int64_t other = id == b ? c->batch + b : b;
            if (test_random_one_in(random, 2)) move(ctx, s, id, other);
            else assert_int_equal(quern_dsv4_layer_cache_fork(s->cache, id, other), QUERN_OK);
            assert_int_equal(quern_dsv4_layer_cache_reset(s->cache, id), QUERN_OK);
            id = other;
        }
    }
}

static void streams(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("streams", 17);
    for (int trial = 0; trial < test_trials(150); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        layer_case c = layer_case_random(&random, false);
        test_tensor first[LAYER_TENSORS];
        const quern_cpu_level level = test_random_level(&random);
        quern_context *one = test_context(level, 1), *many = test_context(level, 3);
        layer_case_forward(&c, one);
        keep(&c, first);
        clear(&c);
        quern_dsv4_layer_cache_params p = layer_store_params(&c, 2 * c.batch, test_random_int(&random, 0, 8));
        if (c.shape.kind != ORACLE_SWA && test_random_one_in(&random, 2))
            p.page = test_random_int(&random, 1, 6);
        layer_store s = layer_store_open(&p);
        for (int64_t b = 0; b < c.batch; b++) append_all(&c, many, &random, &s, b);
        check_exact(&c, first);
        layer_case_check(&c);
        layer_store_close(&s);
        free_kept(first);
        quern_context_destroy(one), quern_context_destroy(many);
        layer_case_free(&c);
    }
}

enum { BATCH = 3, WIDTH = LAYER_SMALL_WIDTH };
static const oracle_layer batch_shape = {LAYER_CASE_SMALL, .tokens = 30, .index_dim = 8};

/* One call over counts[] tokens of each sequence, from x and to out, both [sum of counts, WIDTH]. */
static quern_status step(const layer_case *c, quern_context *ctx, const layer_store *s, const int32_t *ids,
                         const int64_t *counts, int64_t batch, float *x, float *out)
{
    const quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    int64_t shape[] = {0, WIDTH};
    for (int64_t b = 0; b < batch; b++) shape[0] += counts[b] > 0 ? counts[b] : 0;
    const quern_tensor x_view = quern_tensor_contiguous(x, QUERN_F32, 2, shape),
                       out_view = quern_tensor_contiguous(out, QUERN_F32, 2, shape);
    const quern_tensor *views[LAYER_TENSORS];
    memcpy(views, (const char *)&t + sizeof t.size, sizeof views);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) views[i] = NULL;
    views[LAYER_X] = &x_view;
    views[LAYER_OUT] = &out_view;
    memcpy((char *)&t + sizeof t.size, views, sizeof views);
    size_t bytes;
    quern_status status =
        quern_dsv4_layer_decode_workspace(ctx, &p, s->cache, ids, counts, batch, &t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_dsv4_layer_decode(ctx, NULL, &p, s->cache, ids, counts, batch, &t, w.data, bytes);
    test_workspace_close(&w);
    return status;
}

/* Sequences of different lengths in one call give the bits of a call each. */
static void batches_change_no_bit(void **state)
{
    static const int64_t counts[][BATCH] = {{7, 0, 2}, {1, 4, 1}, {1, 1, 1}, {0, 9, 1}, {3, 1, 0}, {1, 1, 1}};
    static const int32_t ids[] = {2, 0, 1};
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        test_random random = {(uint64_t)kind + 1};
        oracle_layer shape = batch_shape;
        shape.kind = (oracle_layer_kind)kind;
        layer_case c = layer_case_make(&random, &shape, 1, QUERN_F32, QUERN_F32);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        layer_store together = layer_store_make(&c, BATCH, 2), apart = layer_store_make(&c, BATCH, 2);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            float x[32 * WIDTH], out[32 * WIDTH], each[32 * WIDTH];
            int64_t row = 0;
            for (int k = 0; k < 32 * WIDTH; k++) x[k] = (float)test_random_normal(&random);
            assert_int_equal(step(&c, ctx, &together, ids, counts[i], BATCH, x, out), QUERN_OK);
            for (int b = 0; b < BATCH; b++) {
                assert_int_equal(
                    step(&c, ctx, &apart, ids + b, counts[i] + b, 1, x + row * WIDTH, each + row * WIDTH),
                    QUERN_OK);
                row += counts[i][b];
            }
            assert_memory_equal(out, each, (size_t)(row * WIDTH) * sizeof *out);
        }
        layer_store_close(&together), layer_store_close(&apart);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

static void expect_error(quern_status status, const char *sentence)
{
    assert_int_not_equal(status, QUERN_OK);
    assert_string_equal(quern_last_error(NULL), sentence);
}

/* A refused call leaves the cache as it was: the sequence goes on to the bits that it has without it. */
static void bad_input(void **state)
{
    (void)state;
    test_random random = {9};
    oracle_layer shape = batch_shape;
    layer_case c = layer_case_make(&random, &shape, 1, QUERN_F32, QUERN_F32), other = c;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    layer_store s = layer_store_make(&c, 2, 2);
    float x[40 * WIDTH], out[40 * WIDTH];
    for (int k = 0; k < 40 * WIDTH; k++) x[k] = (float)test_random_normal(&random);
    const int32_t ids[] = {0, 1}, twice[] = {1, 1}, far[] = {2};
    const int64_t counts[] = {5, 3}, many[] = {26}, negative[] = {-1};
    assert_int_equal(step(&c, ctx, &s, ids, counts, 2, x, out), QUERN_OK);
    unsigned char *before = malloc(s.rows.bytes);
    memcpy(before, s.rows.data, s.rows.bytes);
    memset(out, 0x77, sizeof out);
    expect_error(step(&c, ctx, &s, twice, counts, 2, x, out),
                 "sequences[0] and sequences[1] are 1: each sequence is accepted once");
    expect_error(step(&c, ctx, &s, far, counts, 1, x, out), "sequences[0] is 2: -1 to 1 is accepted");
    expect_error(step(&c, ctx, &s, ids, many, 1, x, out),
                 "counts[0] is 26: 0 to 25 tokens of sequence 0 are accepted");
    expect_error(step(&c, ctx, &s, ids, negative, 1, x, out),
                 "counts[0] is -1: 0 to 25 tokens of sequence 0 are accepted");
    other.shape.window = 6;
    expect_error(step(&other, ctx, &s, ids, counts, 2, x, out),
                 "the cache has window 5: the layer's, 6, is accepted");
    other = c;
    other.t[LAYER_COS_SIN].view.shape[0] = 9;
    expect_error(step(&other, ctx, &s, ids, counts, 2, x, out), "positions[0] is 5: 0 to 4 is accepted");
    expect_error(quern_dsv4_layer_cache_rollback(s.cache, 0, 3),
                 "n is 3: 0 to 2 of sequence 0's 5 tokens are accepted");
    expect_error(quern_dsv4_layer_cache_rollback(s.cache, 2, 0), "sequence is 2: 0 to 1 is accepted");
    expect_error(quern_dsv4_layer_cache_fork(s.cache, 0, 9), "to is 9: 0 to 1 is accepted");
    assert_memory_equal(before, s.rows.data, s.rows.bytes);
    for (int64_t i = 0; i < 2; i++) {
        int64_t tokens;
        assert_int_equal(quern_dsv4_layer_cache_length(s.cache, i, &tokens, NULL), QUERN_OK);
        assert_int_equal(tokens, counts[i]);
    }
    for (size_t i = 0; i < sizeof out; i++) assert_int_equal(((unsigned char *)out)[i], 0x77);
    free(before);
    quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    size_t memory, bytes;
    p.dim = 16;
    p.sequences = p.capacity = 4;
    expect_error(quern_dsv4_layer_cache_size(&p, &memory, &bytes), "index_dim is 0: 8 to 256 is accepted");
    p.index_dim = 8;
    p.ring = 9;
    expect_error(quern_dsv4_layer_cache_size(&p, &memory, &bytes), "ring is 9: 0 to 8 is accepted");
    layer_store_close(&s);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(streams), cmocka_unit_test(batches_change_no_bit),
                                       cmocka_unit_test(bad_input)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
