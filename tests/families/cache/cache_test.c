/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_test.c - caches of keys and values: dense attention from them is that of the whole sequence whatever
 * the pieces, subsets, roll-backs, pages and threads.
 */
#include "attention_case.h"
#include "cache_case.h"
#include "cmocka_c11.h"
#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH_MOST = 4, STEP_MOST = 60 };

/* Sequences of one kind, and a cache that is being filled with them. */
typedef struct player {
    int64_t batch, h, hkv, d, dv, window, row0[BATCH_MOST + 1], length[BATCH_MOST], tokens[BATCH_MOST], rows;
    quern_dtype dtype;
    float scale;
    double *q, *k, *v, *o, *lse; /* [rows][..]; o, lse [rows][h]: what the calls gave */
    cache_case cache;
    quern_context *ctx[2];
    bool sinks;
    double *sink; /* [h] */
} player;

static double *values(test_random *random, quern_dtype dtype, int64_t count)
{
    double *x = test_doubles(count);
    for (int64_t i = 0; i < count; i++) x[i] = test_round(dtype, test_random_normal(random));
    return x;
}

static void player_open(player *p, test_random *random)
{
    memset(p, 0, sizeof *p);
    p->dtype = (quern_dtype)test_random_int(random, 0, 2);
    p->batch = test_random_int(random, 1, BATCH_MOST);
    p->hkv = test_random_int(random, 1, 3);
    const bool many = test_random_one_in(random, 10); /* heads: also more than a task has rows */
    p->h = p->hkv * (many ? 32 * test_random_int(random, 1, 4) + 1 : test_random_int(random, 1, 5));
    p->d = 8 * test_random_int(random, 1, 6);
    if (test_random_one_in(random, 4)) /* the widths of models, and any up to the most */
        p->d = test_random_one_in(random, 2) ? 64 * test_random_int(random, 1, 2)
                                             : 8 * test_random_int(random, 33, 64);
    p->dv = test_random_one_in(random, 2)   ? p->d
            : test_random_one_in(random, 4) ? 64 * test_random_int(random, 1, 8)
                                            : 8 * test_random_int(random, 1, 6);
    p->window = test_random_one_in(random, 2) ? 0 : test_random_int(random, 1, 200);
    p->scale = test_random_one_in(random, 3) ? 0.3f : 0.0f;
#ifdef QUERN_TEST_GPU /* where the bridge carries the pools in every stage; decode_step_test has long ones */
    const bool long_one = false;
#else
    const bool long_one = !many && test_random_one_in(random, 6);
#endif
    quern_cache_params cache = QUERN_CACHE_PARAMS_INIT;
    for (int64_t b = 0; b < p->batch; b++) {
        p->length[b] = test_random_one_in(random, 4) ? test_random_int(random, 0, 2)
                                                     : test_random_int(random, 1, many ? 70 : 230);
        if (long_one && b == 0)
            p->length[b] = 2000 + test_random_int(random, 0, 300); /* several shares of keys */
        p->row0[b + 1] = p->row0[b] + p->length[b];
        if (p->length[b] > cache.capacity) cache.capacity = p->length[b];
    }
    p->sinks = test_random_one_in(random, 2);
    p->sink = values(random, QUERN_F32, p->h);
    if (p->h > 2) p->sink[0] = INFINITY, p->sink[1] = -INFINITY;
    p->rows = p->row0[p->batch];
    cache.capacity += 1 + test_random_int(random, 0, 70);
    cache.dtype = p->dtype;
    cache.sequences = p->batch + 1;
    cache.kv_heads = p->hkv;
    cache.dim = p->d;
    cache.dim_v = p->dv;
    cache.page = test_random_one_in(random, 2) ? QUERN_CACHE_PAGE : 0;
    cache_case_make(&p->cache, &cache);
    p->q = values(random, p->dtype, p->rows * p->h * p->d);
    p->k = values(random, p->dtype, p->rows * p->hkv * p->d);
    p->v = values(random, p->dtype, p->rows * p->hkv * p->dv);
    p->o = test_doubles(p->rows * p->h * p->dv);
    p->lse = test_doubles(p->rows * p->h);
    const quern_cpu_level level = test_random_level(random);
    for (int i = 0; i < 2; i++) p->ctx[i] = test_context(level, 1 + 2 * i);
}

static void player_close(player *p)
{
    free(p->q), free(p->k), free(p->v), free(p->o), free(p->lse), free(p->sink);
    cache_case_free(&p->cache);
    for (int i = 0; i < 2; i++) quern_context_destroy(p->ctx[i]);
}

/* The rows of a call. */
typedef struct piece {
    int32_t ids[BATCH_MOST];
    int64_t counts[BATCH_MOST], *rows, n;
    quern_cache_batch batch;
} piece;

static void append(const player *p, const piece *x, test_random *random)
{
    test_tensor k = cache_rows(random, p->dtype, p->k, x->rows, x->n, p->hkv, p->d);
    test_tensor v = cache_rows(random, p->dtype, p->v, x->rows, x->n, p->hkv, p->dv);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k.view;
    t.v = &v.view;
    size_t bytes;
    quern_context *ctx = p->ctx[x->n % 2];
    if (quern_cache_append_workspace(ctx, p->cache.cache, &x->batch, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_cache_append(ctx, NULL, p->cache.cache, &x->batch, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    test_tensor_free(&k), test_tensor_free(&v);
}

static void attend(player *p, const piece *x, test_random *random)
{
    const int64_t o_shape[] = {x->n, p->h, p->dv}, lse_shape[] = {p->h, x->n};
    test_tensor q = cache_rows(random, p->dtype, p->q, x->rows, x->n, p->h, p->d), o[2], lse[2];
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    params.window = p->window;
    params.scale = p->scale;
    test_tensor sink = test_tensor_make(random, QUERN_F32, 1, &p->h, TEST_CONTIGUOUS);
    test_tensor_set(&sink, p->sink);
    for (int i = 0; i < 2; i++) {
        o[i] = test_tensor_make(random, p->dtype, 3, o_shape,
                                (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
        lse[i] = test_tensor_make(random, QUERN_F32, 2, lse_shape, TEST_CONTIGUOUS);
        quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
        t.q = &q.view;
        t.o = &o[i].view;
        t.lse = &lse[i].view;
        if (p->sinks) t.sink = &sink.view;
        size_t bytes;
        if (quern_attention_decode_workspace(p->ctx[i], &params, p->cache.cache, &x->batch, &t, &bytes) !=
            QUERN_OK)
            fail_msg("%s", quern_last_error(p->ctx[i]));
        test_workspace w = test_workspace_make(bytes);
        if (quern_attention_decode(p->ctx[i], NULL, &params, p->cache.cache, &x->batch, &t, w.data, bytes) !=
            QUERN_OK)
            fail_msg("%s", quern_last_error(p->ctx[i]));
        test_workspace_close(&w);
        test_tensor_check_guards(&o[i], "o"), test_tensor_check_guards(&lse[i], "lse"),
            test_tensor_check_unchanged(&q, "q");
    }
    assert_true(test_tensor_same_bits(&o[0], &o[1]) && test_tensor_same_bits(&lse[0], &lse[1]));
    double *got = test_tensor_get(&o[0]), *got_lse = test_tensor_get(&lse[0]);
    for (int64_t i = 0; i < x->n; i++) {
        memcpy(p->o + x->rows[i] * p->h * p->dv, got + i * p->h * p->dv,
               (size_t)(p->h * p->dv) * sizeof *got);
        for (int64_t h = 0; h < p->h; h++) p->lse[x->rows[i] * p->h + h] = got_lse[h * x->n + i];
    }
    free(got), free(got_lse);
    for (int i = 0; i < 2; i++) test_tensor_free(&o[i]), test_tensor_free(&lse[i]);
    test_tensor_free(&q), test_tensor_free(&sink);
}

static void play(player *p, test_random *random)
{
    int64_t *rows = malloc((size_t)(p->rows + BATCH_MOST) * sizeof *rows);
    for (bool more = true; more;) {
        piece x = {.batch = QUERN_CACHE_BATCH_INIT, .rows = rows};
        more = false;
        for (int64_t b = 0; b < p->batch; b++) {
            if (p->tokens[b] > 0 && p->tokens[b] < p->length[b] && test_random_one_in(random, 4)) {
                const int64_t n = test_random_int(random, 0, p->tokens[b] < 8 ? p->tokens[b] : 8);
                assert_int_equal(quern_cache_rollback(p->cache.cache, b + 1, n), QUERN_OK);
                p->tokens[b] -= n;
            }
            if (test_random_one_in(random, 40)) { /* from the start again */
                assert_int_equal(quern_cache_reset(p->cache.cache, b + 1), QUERN_OK);
                p->tokens[b] = 0;
            }
            more = more || p->tokens[b] < p->length[b];
            if (p->batch > 1 && test_random_one_in(random, 3)) continue;
            const int64_t left = p->length[b] - p->tokens[b],
                          most = p->length[b] > 1000 && p->tokens[b] == 0 ? 1900
                                 : test_random_one_in(random, 3)          ? STEP_MOST
                                                                          : 4;
            const int64_t n = test_random_int(random, 0, left < most ? left : most);
            x.ids[x.batch.batch] = (int32_t)b + 1;
            x.counts[x.batch.batch++] = n;
            for (int64_t i = 0; i < n; i++) x.rows[x.n++] = p->row0[b] + p->tokens[b] + i;
            p->tokens[b] += n;
        }
        x.batch.sequences = x.ids;
        x.batch.counts = x.counts;
        append(p, &x, random);
        attend(p, &x, random);
    }
    free(rows);
}

static void check(const player *p, int trial)
{
    double *o = test_doubles(p->rows * p->h * p->dv), *lse = test_doubles(p->rows * p->h),
           *turned = test_doubles(p->rows * p->h);
    for (int64_t b = 0; b < p->batch; b++) {
        const int64_t n = p->length[b], row = p->row0[b];
        const oracle_dense dense = {.batch = 1,
                                    .nq = n,
                                    .nkv = n,
                                    .h = p->h,
                                    .hkv = p->hkv,
                                    .d = p->d,
                                    .dv = p->dv,
                                    .causal = true,
                                    .window = p->window,
                                    .query_offset = -1,
                                    .scale = (double)p->scale};
        const oracle_sinks sinks = {p->sink, NULL, NULL};
        const oracle_dense_extras extras = {p->sinks ? &sinks : NULL, NULL, NULL};
        oracle_dense_forward_with(&dense, &extras, p->q + row * p->h * p->d, p->k + row * p->hkv * p->d,
                                  p->v + row * p->hkv * p->dv, o + row * p->h * p->dv, lse);
        for (int64_t t = 0; t < n; t++)
            for (int64_t h = 0; h < p->h; h++) turned[(row + t) * p->h + h] = lse[h * n + t];
    }
    char name[200];
    snprintf(name, sizeof name, "o [trial %d, %s, H %d/%d D %d/%d W %d page %d]", trial,
             quern_dtype_name(p->dtype), (int)p->h, (int)p->hkv, (int)p->d, (int)p->dv, (int)p->window,
             (int)p->cache.params.page);
    test_check(name, p->o, o, p->rows * p->h * p->dv, test_forward_bound(p->dtype));
    test_check("lse", p->lse, turned, p->rows * p->h, test_forward_bound(QUERN_F32));
    free(o), free(lse), free(turned);
}

static void any_pieces_give_the_whole(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("any_pieces_give_the_whole", 92);
    for (int trial = 0; trial < test_trials(30); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        player p;
        player_open(&p, &random);
        play(&p, &random);
        check(&p, trial);
        player_close(&p);
    }
}

/* A query reads only what it sees: NaN in rows that were rolled back, or that belong to other sequences,
 * reaches no result. */
static void rolled_back_rows_reach_no_result(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int64_t page = 0; page <= 64; page += 64) {
            quern_cache_params params = {sizeof params, QUERN_BF16, 2, 1, 16, 16, 100, page, 0, 0, 0, 0,
                                         false,         false,      0, 0, 0,  0};
            cache_case cache;
            cache_case_make(&cache, &params);
            quern_context *ctx = test_context(level, 1);
            uint16_t rows[70 * 16], q[16] = {0x3f80}, o[16];
            for (int i = 0; i < 70 * 16; i++) rows[i] = i >= 65 * 16 ? 0x7fc0 : (uint16_t)(0x3f80 + i % 16);
            const int32_t id = 1;
            int64_t count = 70;
            const int64_t shape[] = {70, 1, 16}, one[] = {1, 1, 16};
            const quern_tensor kv = quern_tensor_contiguous(rows, QUERN_BF16, 3, shape);
            const quern_tensor query = quern_tensor_contiguous(q, QUERN_BF16, 3, one),
                               out = quern_tensor_contiguous(o, QUERN_BF16, 3, one);
            quern_cache_batch batch = {sizeof batch, 1, &id, &count};
            quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
            quern_decode_tensors d = QUERN_DECODE_TENSORS_INIT;
            quern_attention_params attention = QUERN_ATTENTION_PARAMS_INIT;
            t.k = t.v = &kv;
            d.q = &query;
            d.o = &out;
            static char workspace[1 << 20];
            assert_int_equal(
                quern_cache_append(ctx, NULL, cache.cache, &batch, &t, workspace, sizeof workspace),
                QUERN_OK);
            assert_int_equal(quern_cache_rollback(cache.cache, 1, 5), QUERN_OK);
            count = 1;
            assert_int_equal(quern_attention_decode(ctx, NULL, &attention, cache.cache, &batch, &d, workspace,
                                                    sizeof workspace),
                             QUERN_OK);
            for (int i = 0; i < 16; i++) assert_int_equal(o[i], 0x3f80 + i);
            quern_context_destroy(ctx);
            cache_case_free(&cache);
        }
}

static void a_query_with_heads_before_tokens_is_named(void **state)
{
    (void)state;
    quern_cache_params params = {sizeof params, QUERN_F32, 1, 1, 16, 16, 100, 0, 0, 0, 0, 0,
                                 false,         false,     0, 0, 0,  0};
    cache_case cache;
    cache_case_make(&cache, &params);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    float rows[4 * 2 * 16] = {0}, out[4 * 2 * 16] = {0};
    const int32_t id = 0;
    const int64_t count = 2, of_kv[] = {2, 1, 16}, of_q[] = {4, 2, 16}, of_o[] = {2, 4, 16};
    const quern_tensor kv = quern_tensor_contiguous(rows, QUERN_F32, 3, of_kv),
                       q = quern_tensor_contiguous(rows, QUERN_F32, 3, of_q),
                       o = quern_tensor_contiguous(out, QUERN_F32, 3, of_o);
    const quern_cache_batch batch = {sizeof batch, 1, &id, &count};
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    quern_decode_tensors d = QUERN_DECODE_TENSORS_INIT;
    const quern_attention_params attention = QUERN_ATTENTION_PARAMS_INIT;
    static char workspace[1 << 20];
    t.k = t.v = &kv, d.q = &q, d.o = &o;
    assert_int_equal(quern_cache_append(ctx, NULL, cache.cache, &batch, &t, workspace, sizeof workspace),
                     QUERN_OK);
    assert_int_equal(
        quern_attention_decode(ctx, NULL, &attention, cache.cache, &batch, &d, workspace, sizeof workspace),
        QUERN_ERR_INVALID_ARGUMENT);
    const char *sentence = "q has 4 x 2 tokens and heads, o 2 x 4: the order [T, H, D] is accepted";
    assert_non_null(strstr(quern_last_error(ctx), sentence));
    quern_context_destroy(ctx);
    cache_case_free(&cache);
}

static void sizes_and_bytes_held(void **state)
{
    (void)state;
    quern_cache_params p = {sizeof p, QUERN_BF16, 3,   2, 16, 24, 1000, 0, 0, 32, 16, QUERN_NSA_COMPRESS_MEAN,
                            false,    true,       100, 4, 0,  0};
    size_t memory, rows;
    const int64_t row = 2 * (16 + 24) * 2, ring = (100 + 8 + 4 + 63) / 64 * 64;
    assert_int_equal(quern_cache_size(&p, &memory, &rows), QUERN_OK);
    /* 61 entries; a page of each and a ring beside what two sequences hold */
    assert_int_equal(rows, ((1024 + 64 + ring) * 3 + 64 + 64 + ring) * row);
    quern_ledger_params l = QUERN_LEDGER_PARAMS_INIT;
    int64_t pages, whole;
    assert_int_equal(quern_cache_ledger_params(&p, &l), QUERN_OK);
    static const int64_t most[] = {16, 1, 2}, of_65[] = {2, 1, 2};
    for (int i = QUERN_CACHE_TOKENS; i <= QUERN_CACHE_WIN; i++) {
        assert_int_equal(quern_ledger_pages(&l, i, 1000, &pages, &whole), QUERN_OK);
        assert_int_equal(pages, most[i]);
        assert_int_equal(whole, 3 * most[i] + (i == QUERN_CACHE_WIN ? 2 : 1));
        assert_int_equal(quern_ledger_pages(&l, i, 65, &pages, NULL), QUERN_OK);
        assert_int_equal(pages, of_65[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_pieces_give_the_whole),
        cmocka_unit_test(rolled_back_rows_reach_no_result),
        cmocka_unit_test(a_query_with_heads_before_tokens_is_named),
        cmocka_unit_test(sizes_and_bytes_held),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
