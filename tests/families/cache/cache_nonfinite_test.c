/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_nonfinite_test.c - NaN in dense decoding: it reaches the rows that see it, in caches of one share of
 * keys and of several, and changes no bit of a row that does not.
 */
#include "attention_case.h"
#include "cache_case.h"
#include "cmocka_c11.h"
#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 4, KV_HEADS = 2, DIM = 16, QUERIES = 3, MOST = 1500 };

typedef struct setting {
    quern_cpu_level level;
    quern_dtype dtype;
    int64_t page, tokens, capacity, window;
} setting;

/* q of the newest tokens, k and v of all, and what the newest get. */
typedef struct rows {
    double q[QUERIES * HEADS * DIM], k[MOST * KV_HEADS * DIM], v[MOST * KV_HEADS * DIM];
    double o[QUERIES * HEADS * DIM], lse[HEADS * QUERIES];
} rows;

static test_tensor tensor(test_random *random, quern_dtype dtype, const double *values, int64_t n,
                          int64_t heads)
{
    const int64_t shape[] = {n, heads, DIM};
    test_tensor t = test_tensor_make(random, dtype, 3, shape, TEST_CONTIGUOUS);
    test_tensor_set(&t, values);
    return t;
}

static void append(const setting *s, quern_context *ctx, const cache_case *cache, const rows *r)
{
    test_random random = {1};
    const int32_t id = 1;
    const quern_cache_batch batch = {sizeof batch, 1, &id, &s->tokens};
    test_tensor k = tensor(&random, s->dtype, r->k, s->tokens, KV_HEADS),
                v = tensor(&random, s->dtype, r->v, s->tokens, KV_HEADS);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k.view;
    t.v = &v.view;
    size_t bytes;
    assert_int_equal(quern_cache_append_workspace(ctx, cache->cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_cache_append(ctx, NULL, cache->cache, &batch, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
    test_tensor_free(&k), test_tensor_free(&v);
}

static void decode(const setting *s, quern_context *ctx, const cache_case *cache, rows *r)
{
    test_random random = {2};
    const int32_t id = 1;
    const int64_t count = QUERIES, o_shape[] = {QUERIES, HEADS, DIM}, lse_shape[] = {HEADS, QUERIES};
    const quern_cache_batch batch = {sizeof batch, 1, &id, &count};
    test_tensor q = tensor(&random, s->dtype, r->q, QUERIES, HEADS),
                o = test_tensor_make(&random, s->dtype, 3, o_shape, TEST_CONTIGUOUS),
                lse = test_tensor_make(&random, QUERN_F32, 2, lse_shape, TEST_CONTIGUOUS);
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    p.window = s->window;
    t.q = &q.view;
    t.o = &o.view;
    t.lse = &lse.view;
    size_t bytes;
    assert_int_equal(quern_attention_decode_workspace(ctx, &p, cache->cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_attention_decode(ctx, NULL, &p, cache->cache, &batch, &t, w.data, bytes),
                     QUERN_OK);
    test_workspace_close(&w);
    double *got = test_tensor_get(&o), *got_lse = test_tensor_get(&lse);
    memcpy(r->o, got, sizeof r->o), memcpy(r->lse, got_lse, sizeof r->lse);
    free(got), free(got_lse);
    test_tensor_free(&q), test_tensor_free(&o), test_tensor_free(&lse);
}

static void run(const setting *s, rows *r)
{
    const quern_cache_params params = {.size = sizeof params,
                                       .dtype = s->dtype,
                                       .sequences = 2,
                                       .kv_heads = KV_HEADS,
                                       .dim = DIM,
                                       .dim_v = DIM,
                                       .capacity = s->capacity,
                                       .page = s->page};
    cache_case cache;
    cache_case_make(&cache, &params);
    quern_context *ctx = test_context(s->level, 2);
    append(s, ctx, &cache, r);
    decode(s, ctx, &cache, r);
    quern_context_destroy(ctx);
    cache_case_free(&cache);
}

static void check(const setting *s, const rows *before, const rows *after, const char *where)
{
    static rows expected;
    char name[200];
    const oracle_dense dense = {.batch = 1,
                                .nq = QUERIES,
                                .nkv = s->tokens,
                                .h = HEADS,
                                .hkv = KV_HEADS,
                                .d = DIM,
                                .dv = DIM,
                                .causal = true,
                                .window = s->window,
                                .query_offset = -1};
    oracle_dense_forward(&dense, after->q, after->k, after->v, expected.o, expected.lse);
    snprintf(name, sizeof name, "%s, %s, %s, page %d, %d of %d tokens, window %d", where,
             quern_cpu_level_name(s->level), quern_dtype_name(s->dtype), (int)s->page, (int)s->tokens,
             (int)s->capacity, (int)s->window);
    test_check(name, after->o, expected.o, QUERIES * HEADS * DIM, test_forward_bound(s->dtype));
    test_check(name, after->lse, expected.lse, HEADS * QUERIES, test_forward_bound(QUERN_F32));
    for (int i = 0; i < QUERIES * HEADS * DIM; i++)
        if (!isnan(expected.o[i]) && memcmp(&before->o[i], &after->o[i], sizeof after->o[i]) != 0)
            fail_msg("%s: o[%d] does not see the NaN and was %.9g, now is %.9g", name, i, before->o[i],
                     after->o[i]);
}

/* NaN in a query, and in keys and values of which all queries, the last one or (with a window) none see
 * some. */
static void poison(const setting *s, test_random *random)
{
    static const char *const names[] = {"q", "k", "v"};
    static rows before, after;
    const int64_t tokens[] = {s->tokens - 1, s->tokens - 2, s->tokens / 2 + 1, 0};
    for (int64_t i = 0; i < QUERIES * HEADS * DIM; i++)
        before.q[i] = test_round(s->dtype, test_random_normal(random));
    for (int64_t i = 0; i < s->tokens * KV_HEADS * DIM; i++) {
        before.k[i] = test_round(s->dtype, test_random_normal(random));
        before.v[i] = test_round(s->dtype, test_random_normal(random));
    }
    run(s, &before);
    for (int which = 0; which < 3; which++)
        for (int64_t i = 0; i < (which == 0 ? QUERIES : 4); i++) {
            after = before;
            if (which == 0) after.q[i * HEADS * DIM + DIM + 3] = NAN; /* of one head */
            else (which == 1 ? after.k : after.v)[tokens[i] * KV_HEADS * DIM + 5] = NAN;
            run(s, &after);
            check(s, &before, &after, names[which]);
        }
}

static void nan_reaches_the_rows_that_see_it(void **state)
{
    static const int64_t sizes[][2] = {{70, 90}, {70, 5000}, {MOST, MOST}};
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    test_random random = {test_seed("nan_reaches_the_rows_that_see_it", 6)};
    uint64_t index = 0;
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int d = 0; d < 3; d++)
            for (int size = 0; size < 3; size++)
                for (int window = 0; window <= 40; window += 40, index++) {
                    const setting s = {
                        level,          dtypes[d],      (int64_t)((index + index / 2) % 2) * QUERN_CACHE_PAGE,
                        sizes[size][0], sizes[size][1], window};
                    if (test_in_share(index)) poison(&s, &random);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(nan_reaches_the_rows_that_see_it)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
