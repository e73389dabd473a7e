/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index_pages_test.c - the indexer on keys in pages and at positions of sequences' own: the bits of each
 * sequence alone from contiguous keys; tables,
 * positions and scales that are refused. */
#include "cmocka_c11.h"
#include "dsv4_index_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGED = 3 };

/* A pool with the keys of a case, pages out of order, and the table of it. Columns that no query needs name
 * no page. */
typedef struct key_pool {
    test_tensor pool, table;
    int32_t start[PAGED];
} key_pool;

static key_pool make_pool(const index_case *c, int64_t page, test_layout layout, test_random *random)
{
    const quern_tensor *k = &c->t[INDEX_K].view;
    const int64_t size = (int64_t)quern_dtype_size(k->dtype), row = k->shape[2] * size,
                  data = c->format == QUERN_DSV4_ROWS  ? row
                         : c->format == QUERN_DSV4_FP4 ? c->shape.width / 2
                                                       : c->shape.width;
    const int64_t columns = (c->shape.entries + page - 1) / page + 2, pages = PAGED * columns + 1;
    const int64_t plain[] = {pages, page, k->shape[2]}, bytes[] = {pages, page * k->shape[2]};
    const bool rows = c->format == QUERN_DSV4_ROWS;
    key_pool p = {.pool = test_tensor_make(random, k->dtype, rows ? 3 : 2, rows ? plain : bytes, layout),
                  .table = test_tensor_make(random, QUERN_I32, 2, (const int64_t[]){PAGED, columns},
                                            (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1))};
    int32_t *table = malloc((size_t)(PAGED * columns) * sizeof *table);
    for (int64_t b = 0; b < PAGED; b++) {
        p.start[b] =
            (int32_t)test_random_int(random, 0, c->shape.entries * c->shape.ratio - c->shape.queries);
        const int64_t entries = (p.start[b] + c->shape.queries) / c->shape.ratio;
        for (int64_t i = 0; i < columns; i++)
            table[b * columns + i] = i * page < entries ? (int32_t)(PAGED * columns - b - i * PAGED) : -9;
        for (int64_t e = 0; e < entries; e++) {
            const quern_tensor *t = &p.pool.view;
            const int64_t slot = e % page;
            const char *from = (const char *)k->data + (b * k->strides[0] + e * k->strides[1]) * size;
            char *base = (char *)t->data + table[b * columns + e / page] * t->strides[0] * size;
            if (rows) base += slot * t->strides[1] * size;
            memcpy(rows ? base : base + slot * data, from, (size_t)data);
            if (!rows) memcpy(base + page * data + slot * (row - data), from + data, (size_t)(row - data));
        }
    }
    test_tensor_set_i32(&p.table, table);
    memcpy(p.pool.snapshot, p.pool.buffer, p.pool.bytes);
    free(table);
    return p;
}

static void pool_free(key_pool *p)
{
    test_tensor_free(&p->pool), test_tensor_free(&p->table);
}

/* Runs each sequence alone, from its rows of k, and compares lists, counts and the scores of the entries that
 * it sees. `scores` [PAGED, queries, any number]. */
static void check_alone(const index_case *c, const int32_t *start, const test_tensor *scores,
                        quern_context *ctx)
{
    int32_t *idx = test_tensor_get_i32(&c->t[INDEX_IDX]), *count = test_tensor_get_i32(&c->t[INDEX_COUNT]);
    double *got = test_tensor_get(scores);
    const int64_t T = c->shape.queries, S = c->shape.entries, width = scores->view.shape[2];
    for (int64_t b = 0; b < PAGED; b++) {
        index_case one = *c;
        one.shape.start = start[b];
        test_random random = {5};
        for (int i = 0; i < INDEX_TENSORS; i++) {
            quern_tensor *v = &one.t[i].view;
            if (i >= INDEX_IDX) {
                const int64_t shape[] = {1, v->shape[1], v->shape[2]};
                one.t[i] = test_tensor_make(&random, v->dtype, v->ndim, shape, TEST_CONTIGUOUS);
                continue;
            }
            v->data = (char *)v->data + b * v->strides[0] * (int64_t)quern_dtype_size(v->dtype);
            v->shape[0] = 1;
        }
        index_case_run(&one, ctx);
        int32_t *idx1 = test_tensor_get_i32(&one.t[INDEX_IDX]),
                *count1 = test_tensor_get_i32(&one.t[INDEX_COUNT]);
        double *scores1 = test_tensor_get(&one.t[INDEX_SCORES]);
        assert_memory_equal(idx1, idx + b * T * c->top_k, (size_t)(T * c->top_k) * sizeof *idx);
        assert_memory_equal(count1, count + b * T, (size_t)T * sizeof *count);
        for (int64_t t = 0; t < T; t++)
            for (int64_t e = 0; e < width; e++)
                assert_true(got[(b * T + t) * width + e] == (e < S ? scores1[t * S + e] : -INFINITY));
        free(idx1), free(count1), free(scores1);
        for (int i = INDEX_IDX; i < INDEX_TENSORS; i++) test_tensor_free(&one.t[i]);
    }
    free(idx), free(count), free(got);
}

/* The lists and scores of sequences at positions of their own, from pages, are those of each alone. */
static void pages_and_positions_change_no_bit(void **state)
{
    static const int64_t any_pages[] = {1, 16, 64, 5, 128}, whole_pages[] = {8, 16, 64, 128, 256},
                         batch = PAGED;
    (void)state;
    for (int trial = 0; trial < 60; trial++) {
        test_random random = {(uint64_t)trial + 900};
        const bool released = trial % 7 > 4; /* one kernel for both, if copies of 16 bytes can read both */
        const int64_t *pages = released ? whole_pages : any_pages;
        const quern_dtype dtype = trial % 3 ? QUERN_BF16 : QUERN_F32;
        const oracle_indexer x = {.queries = 1 + trial % 4,
                                  .heads = released ? 64 : 5,
                                  .width = released ? 128 : 32 + 32 * (trial % 2),
                                  .entries = released ? 1352 : 350,
                                  .ratio = 3};
        index_case c =
            index_case_make(&random, &x, PAGED, 40, (quern_dsv4_format)(trial % 4), dtype, dtype, true);
        if (released) index_case_align_keys(&c, &random);
        key_pool pool = make_pool(&c, pages[trial % 5], released ? TEST_CONTIGUOUS : TEST_UNALIGNED, &random);
        quern_context *ctx =
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        const quern_tensor starts = quern_tensor_contiguous(pool.start, QUERN_I32, 1, &batch);
        const int64_t S = pool.table.view.shape[1] * pages[trial % 5];
        test_tensor scores =
            test_tensor_make(&random, QUERN_F32, 3, (const int64_t[]){PAGED, x.queries, S}, TEST_CONTIGUOUS);
        for (int paged = 0; paged < 2; paged++) {
            quern_dsv4_index_params p = index_case_params(&c);
            quern_dsv4_index_tensors t = index_case_tensors(&c);
            size_t bytes;
            t.start_positions = &starts;
            if (paged) {
                p.page = pages[trial % 5];
                t.k = &pool.pool.view;
                t.k_table = &pool.table.view;
                t.scores = &scores.view;
            }
            for (int i = INDEX_IDX; i < INDEX_TENSORS; i++) test_tensor_reset(&c.t[i]);
            if (quern_dsv4_index_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace w = test_workspace_make(bytes);
            if (quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace_close(&w);
            test_tensor_check_guards(&c.t[INDEX_IDX], "idx"), test_tensor_check_guards(&scores, "scores");
            test_tensor_check_unchanged(&pool.pool, "k");
            check_alone(&c, pool.start, paged ? &scores : &c.t[INDEX_SCORES], ctx);
        }
        test_tensor_free(&scores);
        quern_context_destroy(ctx);
        pool_free(&pool);
        index_case_free(&c);
    }
}

static void bad_pages_and_positions_are_refused(void **state)
{
    static const int64_t batch = PAGED;
    (void)state;
    test_random random = {13};
    const oracle_indexer x = {.queries = 4, .heads = 3, .width = 32, .entries = 90, .ratio = 4};
    index_case c = index_case_make(&random, &x, PAGED, 5, QUERN_DSV4_FP8, QUERN_BF16, QUERN_BF16, false);
    key_pool pool = make_pool(&c, 16, TEST_UNALIGNED, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_tensor starts = quern_tensor_contiguous(pool.start, QUERN_I32, 1, &batch);
    quern_dsv4_index_params good = index_case_params(&c), p;
    quern_dsv4_index_tensors whole = index_case_tensors(&c), t;
    good.page = 16;
    whole.k = &pool.pool.view;
    whole.k_table = &pool.table.view;
    whole.start_positions = &starts;
    size_t bytes;
    assert_int_equal(quern_dsv4_index_workspace(ctx, &good, &whole, &bytes), QUERN_OK);
    void *memory = malloc(bytes + 1);
    const struct {
        const char *sentence;
        int32_t start, page;
    } cases[] = {{"start_positions[1] is -1: 0 or more", -1, 3},
                 {"k_table has 8 columns: sequence 1 needs", 32 * 16, 3},
                 {"k_table[1, 0] is 25: pages 0 to 24", 40, 25},
                 {"k_table[1, 0] is -1", 40, -1}};
    int32_t *first = (int32_t *)pool.table.view.data + pool.table.view.strides[0];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t start = pool.start[1], page = *first;
        pool.start[1] = cases[i].start;
        *first = cases[i].page;
        assert_int_equal(quern_dsv4_index(ctx, NULL, &good, &whole, memory, bytes),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), cases[i].sentence) == NULL)
            fail_msg("'%s' does not say '%s'", quern_last_error(ctx), cases[i].sentence);
        test_tensor_check_unchanged(&c.t[INDEX_IDX], "idx of a refused call");
        pool.start[1] = start;
        *first = page;
    }
    free(memory);
    t = whole;
    t.k_table = NULL;
    index_case_refused(&c, ctx, &good, &t, "k_table is NULL");
    t = whole;
    t.k = &c.t[INDEX_K].view;
    index_case_refused(&c, ctx, &good, &t, "k has 3 dimensions: 2 are accepted");
    p = good;
    p.page = -1;
    index_case_refused(&c, ctx, &p, &whole, "page is -1");
    p.page = 8;
    index_case_refused(&c, ctx, &p, &whole, "k.shape[1] is 576: 288 is accepted");
    quern_context_destroy(ctx);
    pool_free(&pool);
    index_case_free(&c);
}

/* A scale byte of FP4 keys that is NaN, in a contiguous row or a page: the first one is named. Those of
 * entries that no query sees are not looked at. */
static void bad_scales_are_refused(void **state)
{
    enum { WIDTH = 64, DATA = WIDTH / 2, PAGE = 4, SEEN = 9 };
    (void)state;
    if (INDEX_ON_GPU) {
        print_message("a GPU does not look before it runs: such an entry is chosen last\n");
        skip();
    }
    for (int pages = 0; pages < 2; pages++) {
        test_random random = {(uint64_t)pages + 21};
        const oracle_indexer x = {
            .queries = 4, .heads = 3, .width = WIDTH, .entries = 40, .ratio = 4, .start = 4 * SEEN - 4};
        index_case c = index_case_make(&random, &x, PAGED, 5, QUERN_DSV4_FP4, QUERN_BF16, QUERN_BF16, false);
        key_pool pool = make_pool(&c, PAGE, TEST_UNALIGNED, &random);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 3);
        quern_dsv4_index_params p = index_case_params(&c);
        quern_dsv4_index_tensors t = index_case_tensors(&c);
        int32_t columns[PAGED * 10];
        for (int i = 0; i < PAGED * 10; i++) columns[i] = i;
        const int64_t table_shape[] = {PAGED, 10};
        const quern_tensor table = quern_tensor_contiguous(columns, QUERN_I32, 2, table_shape);
        test_tensor *keys = pages ? &pool.pool : &c.t[INDEX_K];
        if (pages) {
            p.page = PAGE;
            t.k = &pool.pool.view;
            t.k_table = &table;
        }
        /* entry 8 of sequence 1 is the last that is seen, 9 the first that is not; entry 2 of sequence 2 */
        const quern_tensor *k = &keys->view;
        const struct {
            int b, entry, scale;
        } at[] = {{1, SEEN, 0}, {2, 2, 0}, {1, SEEN - 1, 1}};
        size_t bytes;
        assert_int_equal(quern_dsv4_index_workspace(ctx, &p, &t, &bytes), QUERN_OK);
        test_workspace w = test_workspace_make(bytes);
        for (int i = 0; i < 3; i++) {
            const int64_t page = at[i].b * 10 + at[i].entry / PAGE,
                          within = pages ? PAGE * DATA + at[i].entry % PAGE * (WIDTH / 32) + at[i].scale
                                         : DATA + at[i].scale,
                          row = pages ? page * k->strides[0]
                                      : at[i].b * k->strides[0] + at[i].entry * k->strides[1],
                          flat = pages ? page * k->shape[1] + within
                                       : (at[i].b * k->shape[1] + at[i].entry) * k->shape[2] + within;
            ((unsigned char *)k->data)[row + within] = 0xff;
            char sentence[80];
            (void)snprintf(sentence, sizeof sentence, "k[%lld] is the scale byte 0xFF", (long long)flat);
            memcpy(keys->snapshot, keys->buffer, keys->bytes);
            test_tensor_reset(&c.t[INDEX_IDX]);
            const quern_status status = quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes);
            if (i == 0) {
                if (status != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
                continue;
            }
            assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
            if (strstr(quern_last_error(ctx), sentence) == NULL)
                fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentence);
            test_tensor_check_unchanged(&c.t[INDEX_IDX], "idx of a refused call");
        }
        test_workspace_close(&w);
        quern_context_destroy(ctx);
        pool_free(&pool);
        index_case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pages_and_positions_change_no_bit),
                                       cmocka_unit_test(bad_pages_and_positions_are_refused),
                                       cmocka_unit_test(bad_scales_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
