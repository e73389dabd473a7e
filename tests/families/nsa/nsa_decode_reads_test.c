/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_decode_reads_test.c - which rows of a cache a decoding call of native sparse attention reads: the
 * compressed entries, k blocks of l' rows and W rows of the window for a query and key head; with the block
 * indexer k blocks of l' rows alone.
 */
#include "cache_case.h"
#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LONG = 700, NEWEST = 3, KV_HEADS = 2, HEADS = 4, DIM = 16, BLOCK = 16, TOP = 5, WINDOW = 40 };

/* Fills the cache's keys and values of a token of a key head with NaN. */
static void spoil_row(const cache_case *cache, int64_t head, int64_t token)
{
    const size_t row = DIM * quern_dtype_size(cache->params.dtype);
    const int64_t page = token / QUERN_CACHE_PAGE; /* a ledger takes the first free one */
    char *block = cache->rows_at + (size_t)((page * KV_HEADS + head) * 2 * QUERN_CACHE_PAGE) * row;
    for (int part = 0; part < 2; part++)
        memset(block + (size_t)(part * QUERN_CACHE_PAGE + token % QUERN_CACHE_PAGE) * row, 0xff, row);
}

/* The queries' first heads are those of the indexer, where it chooses. */
static void decode_newest(quern_context *ctx, const cache_case *cache, const quern_nsa_params *p,
                          const test_tensor *q, const test_tensor *o, const test_tensor *lists)
{
    quern_tensor q_index = q->view;
    q_index.shape[1] = lists->view.shape[0];
    const int32_t id = 0;
    const int64_t count = q->view.shape[0];
    const quern_cache_batch batch = {sizeof batch, 1, &id, &count};
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q->view;
    t.o = &o->view;
    t.block_idx = &lists->view;
    if (p->selection == QUERN_NSA_LIST_INDEXED) t.q_index = &q_index;
    size_t bytes;
    assert_int_equal(quern_nsa_decode_workspace(ctx, p, cache->cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_nsa_decode(ctx, NULL, p, cache->cache, &batch, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
}

/* Whether one of the newest tokens' windows, or of the lists of the key head's queries, holds a token. */
static bool needed(const int32_t *lists, int64_t list_heads, int64_t newest, int64_t window, int64_t head,
                   int64_t token)
{
    const int64_t shared = list_heads / KV_HEADS;
    bool found = token > LONG - newest - window;
    for (int64_t i = head * shared * newest * TOP; i < (head + 1) * shared * newest * TOP; i++)
        found = found || (lists[i] >= 0 && token / BLOCK == lists[i]);
    return found;
}

static void check_reads(quern_cpu_level level, quern_dtype dtype, quern_nsa_scope scope, bool indexed,
                        int64_t newest)
{
    test_random random = {5};
    const int64_t list_heads = scope == QUERN_NSA_SCOPE_HEAD ? HEADS : KV_HEADS,
                  rows[] = {LONG, KV_HEADS, DIM}, queries[] = {newest, HEADS, DIM},
                  idx[] = {list_heads, newest, TOP}, length = LONG;
    const int32_t id = 0;
    const quern_cache_params params = {.size = sizeof params,
                                       .dtype = dtype,
                                       .sequences = 1,
                                       .kv_heads = KV_HEADS,
                                       .dim = DIM,
                                       .dim_v = DIM,
                                       .capacity = LONG + 9,
                                       .block_size = indexed ? 0 : BLOCK,
                                       .index_heads = indexed ? KV_HEADS : 0,
                                       .index_dim = DIM};
    const quern_cache_batch batch = {sizeof batch, 1, &id, &length};
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    p.block_size = BLOCK;
    p.num_selected = TOP;
    p.window = WINDOW;
    p.scope = scope;
    p.gate = QUERN_NSA_GATE_NONE;
    if (indexed) {
        assert_int_equal(quern_nsa_params_preset(&p, "msa"), QUERN_OK);
        p.selection = QUERN_NSA_LIST_INDEXED;
        p.select_block = BLOCK;
        p.num_selected = TOP;
    }
    cache_case cache;
    cache_case_make(&cache, &params);
    quern_context *ctx = test_context(level, 1);
    test_tensor kv = test_tensor_make(&random, dtype, 3, rows, TEST_CONTIGUOUS),
                q = test_tensor_make(&random, dtype, 3, queries, TEST_CONTIGUOUS),
                o[2] = {test_tensor_make(&random, dtype, 3, queries, TEST_CONTIGUOUS),
                        test_tensor_make(&random, dtype, 3, queries, TEST_CONTIGUOUS)},
                lists = test_tensor_make(&random, QUERN_I32, 3, idx, TEST_CONTIGUOUS);
    test_tensor_normal(&kv, &random, 1.0);
    test_tensor_normal(&q, &random, 1.0);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = t.v = &kv.view;
    if (indexed) t.k_index = &kv.view;
    size_t bytes;
    assert_int_equal(quern_cache_append_workspace(ctx, cache.cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_cache_append(ctx, NULL, cache.cache, &batch, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
    decode_newest(ctx, &cache, &p, &q, &o[0], &lists);
    int32_t *chosen = test_tensor_get_i32(&lists);
    int64_t spoilt = 0;
    for (int64_t head = 0; head < KV_HEADS; head++)
        for (int64_t token = 0; token < LONG; token++)
            if (!needed(chosen, list_heads, newest, indexed ? 0 : WINDOW, head, token)) {
                spoil_row(&cache, head, token);
                spoilt++;
            }
    assert_true(spoilt > LONG / 2);
    decode_newest(ctx, &cache, &p, &q, &o[1], &lists);
    assert_true(test_tensor_same_bits(&o[0], &o[1]));
    for (int64_t head = 0; head < KV_HEADS; head++) spoil_row(&cache, head, LONG - 1); /* which all see */
    decode_newest(ctx, &cache, &p, &q, &o[1], &lists);
    double *out = test_tensor_get(&o[1]);
    for (int64_t i = 0; i < HEADS * DIM; i++) assert_true(isnan(out[(newest - 1) * HEADS * DIM + i]));
    free(out), free(chosen);
    test_tensor_free(&kv), test_tensor_free(&q), test_tensor_free(&lists);
    for (int i = 0; i < 2; i++) test_tensor_free(&o[i]);
    quern_context_destroy(ctx);
    cache_case_free(&cache);
}

/* A query and key head read the entries, the selected blocks and the window alone: NaN in all other rows
 * changes no bit. */
static void rows_that_no_query_needs_are_not_read(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < 6; i++)
            for (int64_t newest = 1; newest <= NEWEST; newest += 2)
                check_reads(level, dtypes[i % 2], i / 2 == 1 ? QUERN_NSA_SCOPE_HEAD : QUERN_NSA_SCOPE_GROUP,
                            i >= 4, newest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rows_that_no_query_needs_are_not_read)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
