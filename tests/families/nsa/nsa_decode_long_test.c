/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_decode_long_test.c - native sparse attention from a cache of more entries than a step of the compressed
 * branch takes in (384), for any number of heads a key head: the lists are the prefill's to the bit, also of
 * the paper's configuration; so are the block indexer's of more keys than a share has (8192).
 */
#include "cache_case.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PLACES = 5, NEWEST = 8 };

typedef struct shape {
    int64_t block, stride, select, selected, window, h, hkv, d, dv, n;
    quern_nsa_metric metric;
    quern_nsa_scope scope;
    uint32_t branches; /* 0: all */
    int64_t index;     /* D_I of preset msa; 0: entries choose */
} shape;

enum { SLC_WIN = QUERN_NSA_BRANCH_SLC | QUERN_NSA_BRANCH_WIN };

static const shape shapes[] = {
    {4, 0, 0, 6, 50, 4, 2, 64, 64, 1700, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {4, 0, 0, 6, 50, 4, 2, 64, 64, 1700, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_HEAD, SLC_WIN, 0},
    {4, 0, 0, 6, 50, 4, 2, 64, 64, 1700, QUERN_NSA_METRIC_MEAN_LOGIT, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {4, 0, 0, 6, 50, 4, 2, 40, 64, 1700, QUERN_NSA_METRIC_MEAN_LOGIT, QUERN_NSA_SCOPE_HEAD, SLC_WIN, 0},
    {8, 2, 16, 6, 50, 8, 1, 128, 64, 1000, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {8, 2, 16, 6, 50, 9, 1, 128, 128, 1000, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, SLC_WIN, 0},
    {4, 2, 4, 6, 50, 13, 1, 72, 32, 1000, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_HEAD, 0, 0},
    {2, 0, 2, 6, 50, 41, 1, 32, 32, 900, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {2, 1, 2, 6, 50, 3, 1, 256, 128, 500, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, SLC_WIN, 0},
    {2, 1, 2, 6, 50, 2, 1, 512, 512, 500, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {32, 16, 64, 8, 100, 16, 1, 192, 128, 700, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 0},
    {100, 0, 100, 6, 50, 4, 2, 16, 16, 16700, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_GROUP, 0, 16},
    {9000, 0, 9000, 2, 50, 2, 1, 16, 16, 28000, QUERN_NSA_METRIC_SOFTMAX, QUERN_NSA_SCOPE_HEAD, 0, 8},
};

static nsa_case *prefill(const shape *s, quern_dtype dtype, quern_context *ctx)
{
    test_random random = {7};
    nsa_config c = {.params = QUERN_NSA_PARAMS_INIT,
                    .dtype = dtype,
                    .weight_dtype = dtype,
                    .batch = 1,
                    .lens = {s->n},
                    .varlen = true,
                    .h = s->h,
                    .hkv = s->hkv,
                    .d = s->d,
                    .dv = s->dv,
                    .forward_only = true};
    c.params.block_size = s->block;
    c.params.stride = s->stride;
    c.params.select_block = s->select;
    c.params.num_selected = s->selected;
    c.params.window = s->window;
    c.params.metric = s->metric;
    c.params.scope = s->scope;
    c.params.gate = QUERN_NSA_GATE_NONE;
    if (s->branches != 0) c.params.branches = s->branches;
    if (s->index > 0) {
        c.d_index = s->index;
        c.params.selection = QUERN_NSA_LIST_INDEXED;
        c.params.branches = QUERN_NSA_BRANCH_SLC;
        c.params.ungated = true;
        c.params.forced_local = 1;
    }
    nsa_case *whole = nsa_case_new(&c, &random);
    nsa_run(whole, ctx, nsa_call_forward, nsa_forward_inputs(whole), nsa_forward_outputs(whole));
    return whole;
}

/* Rows [first, first + count) of a tensor. */
static quern_tensor rows_of(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    v.data = (char *)t->data + first * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    v.shape[0] = count;
    return v;
}

static void append(const nsa_case *whole, const cache_case *cache, quern_context *ctx, int64_t first,
                   int64_t count)
{
    const int32_t id = 0;
    const quern_cache_batch batch = {sizeof batch, 1, &id, &count};
    const quern_tensor k = rows_of(&whole->tensor[NSA_K].view, first, count),
                       v = rows_of(&whole->tensor[NSA_V].view, first, count);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k;
    t.v = &v;
    quern_tensor index;
    if (whole->config.d_index > 0) {
        const int64_t extents[] = {count, 1, whole->config.d_index};
        index = rows_of(&whole->tensor[NSA_K_INDEX].view, first, count);
        const int64_t strides[] = {index.strides[0], 0, 1};
        index.ndim = 3;
        memcpy(index.shape, extents, sizeof extents);
        memcpy(index.strides, strides, sizeof strides);
        t.k_index = &index;
    }
    size_t bytes;
    assert_int_equal(quern_cache_append_workspace(ctx, cache->cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_cache_append(ctx, NULL, cache->cache, &batch, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
}

/* The lists and outputs of the newest tokens, the last of which is the one before `end`. */
static void check_newest(const char *name, const nsa_case *whole, const cache_case *cache, quern_context *ctx,
                         int64_t end)
{
    const nsa_config *f = &whole->config;
    const int64_t first = end - NEWEST, count = NEWEST, k = f->params.num_selected,
                  lists = f->params.scope == QUERN_NSA_SCOPE_HEAD ? f->h : f->hkv;
    const int64_t o_shape[] = {NEWEST, f->h, f->dv}, idx_shape[] = {lists, NEWEST, k};
    const int32_t id = 0;
    const quern_cache_batch batch = {sizeof batch, 1, &id, &count};
    const quern_tensor q = rows_of(&whole->tensor[NSA_Q].view, first, count),
                       expected = rows_of(&whole->tensor[NSA_O].view, first, count),
                       *all = &whole->tensor[NSA_BLOCK_IDX].view;
    test_random random = {1};
    test_tensor o = test_tensor_make(&random, f->dtype, 3, o_shape, TEST_CONTIGUOUS),
                idx = test_tensor_make(&random, QUERN_I32, 3, idx_shape, TEST_CONTIGUOUS);
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &o.view;
    t.block_idx = &idx.view;
    quern_tensor q_index;
    if (f->d_index > 0) {
        q_index = rows_of(&whole->tensor[NSA_Q_INDEX].view, first, count);
        t.q_index = &q_index;
    }
    size_t bytes;
    if (quern_nsa_decode_workspace(ctx, &f->params, cache->cache, &batch, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_nsa_decode(ctx, NULL, &f->params, cache->cache, &batch, &t, w.data, bytes),
                     QUERN_OK);
    test_workspace_close(&w);
    for (int64_t i = 0; i < lists * NEWEST; i++) {
        const int32_t *wanted = (const int32_t *)all->data + i / NEWEST * all->strides[0] +
                                (first + i % NEWEST) * all->strides[1];
        if (memcmp((const int32_t *)idx.view.data + i * k, wanted, (size_t)k * sizeof *wanted) != 0)
            fail_msg("%s: the list of head %d at token %d is not the prefill's", name, (int)(i / NEWEST),
                     (int)(first + i % NEWEST));
    }
    const test_tensor of = {.view = expected};
    double *got = test_tensor_get(&o), *rows = test_tensor_get(&of);
    /* Both are within the bound of exact arithmetic. */
    test_check(name, got, rows, NEWEST * f->h * f->dv, 2 * test_forward_bound(f->dtype));
    free(got), free(rows);
    test_tensor_free(&o), test_tensor_free(&idx);
}

static void check_shape(const shape *s, quern_dtype dtype, quern_cpu_level level, int64_t page)
{
    char name[200];
    quern_context *ctx = test_context(level, 2);
    nsa_case *whole = prefill(s, dtype, ctx);
    const quern_cache_params params = {.size = sizeof params,
                                       .dtype = dtype,
                                       .sequences = 1,
                                       .kv_heads = s->hkv,
                                       .dim = s->d,
                                       .dim_v = s->dv,
                                       .capacity = s->n,
                                       .page = page,
                                       .block_size = s->index > 0 ? 0 : s->block,
                                       .stride = s->stride,
                                       .index_heads = s->index > 0,
                                       .index_dim = s->index};
    cache_case cache;
    cache_case_make(&cache, &params);
    snprintf(name, sizeof name, "l %d d %d H %d/%d D %d, %s, %s", (int)s->block, (int)s->stride, (int)s->h,
             (int)s->hkv, (int)s->d, quern_dtype_name(dtype), quern_cpu_level_name(level));
    for (int64_t i = 0, held = 0; i < PLACES; i++) {
        const int64_t end = s->n * (i + 1) / PLACES;
        append(whole, &cache, ctx, held, end - held);
        check_newest(name, whole, &cache, ctx, end);
        held = end;
    }
    cache_case_free(&cache);
    nsa_case_free(whole);
    quern_context_destroy(ctx);
}

static void long_lists_are_the_prefills(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_BF16, QUERN_F32, QUERN_F16};
    uint64_t index = 0;
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++, index++)
            if (test_in_share(index))
                check_shape(&shapes[i], dtypes[(i + (size_t)level) % 3], level,
                            (int64_t)(i + (size_t)level) % 2 * QUERN_CACHE_PAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(long_lists_are_the_prefills)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
