/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_cached_test.c - the attention core over caches: rows or bytes, contiguous or in pages, sequences of
 * different lengths; bad tables, positions and formats. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CACHED = 3, CACHE_QUERIES_MOST = 8, CACHE_MOST = 150, CACHE_K = 6 };

/* Rows of sequences of different lengths, as values and in a cache. */
typedef struct cache_case {
    quern_dtype dtype;
    bool bytes, list;
    int64_t queries, heads, dim, page, ratio, window, row; /* row: elements of a stored row */
    int32_t start[CACHED];
    double *raw[CACHED], *entries[CACHED]; /* what the cache holds */
    double *source[2][CACHED];             /* the values before rounding */
    test_tensor q, idx, o, lse, pool[2], table[2];
} cache_case;

static int64_t cached_rows(const cache_case *c, int64_t b, int kind)
{
    return kind == 0 ? c->start[b] + c->queries : (c->start[b] + c->queries) / c->ratio;
}

/* Random values as the cache's format holds them. *source gets them before rounding, `bytes` the stored rows
 * of a format of bytes. */
static double *exact_rows(const cache_case *c, int64_t rows, unsigned char *bytes, test_random *random,
                          double **source)
{
    double *values = test_doubles(rows * c->dim + 1);
    *source = test_doubles(rows * c->dim + 1);
    for (int64_t i = 0; i < rows * c->dim; i++)
        values[i] = test_round(c->dtype, test_random_normal(random) * (i / 64 % 3 == 0 ? 8 : 1));
    memcpy(*source, values, (size_t)(rows * c->dim) * sizeof *values);
    for (int64_t r = 0; c->bytes && r < rows; r++) {
        float row[512];
        for (int i = 0; i < 512; i++) row[i] = (float)values[r * 512 + i];
        assert_true(oracle_dsv4_quantise_row584(row, bytes + r * 584));
        oracle_dsv4_widen_row584(bytes + r * 584, values + r * 512);
    }
    return values;
}

/* Element i of row `row` of a sequence in a pool (NULL: in no page) or, without pages, in [B, N, ..]. */
static unsigned char *cache_element(const cache_case *c, int kind, int64_t b, int64_t row, int64_t i)
{
    const quern_tensor *t = &c->pool[kind].view;
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    if (c->page == 0) return (unsigned char *)t->data + (b * t->strides[0] + row * t->strides[1] + i) * size;
    const quern_tensor *table = &c->table[kind].view;
    const int64_t page = ((const int32_t *)table->data)[b * table->strides[0] + row / c->page],
                  slot = row % c->page;
    unsigned char *base = (unsigned char *)t->data + page * t->strides[0] * size;
    if (page < 0) return NULL;
    if (!c->bytes) return base + (slot * t->strides[1] + i) * size;
    return base + (i < 576 ? slot * 576 + i : c->page * 576 + slot * 8 + i - 576);
}

static void store_cached(const cache_case *c, int kind, int64_t b, const double *values,
                         const unsigned char *bytes)
{
    for (int64_t r = 0; r < cached_rows(c, b, kind); r++) {
        for (int64_t i = 0; i < c->row; i++) {
            unsigned char *to = cache_element(c, kind, b, r, i);
            if (to == NULL) continue;
            const float x = c->bytes ? 0 : (float)values[r * c->dim + i];
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            const uint16_t half = (uint16_t)(bits >> 16);
            if (c->bytes) *to = bytes[r * 584 + i];
            else if (c->dtype == QUERN_BF16) memcpy(to, &half, sizeof half);
            else memcpy(to, &x, sizeof x);
        }
    }
}

/* Pages of all sequences, out of order. Columns that no query needs hold an invalid page. */
static void make_pool(cache_case *c, int kind, test_random *random)
{
    const quern_dtype dtype = c->bytes ? QUERN_U8 : c->dtype;
    const int64_t columns = c->page > 0 ? CACHE_MOST / c->page + 1 : 0, pages = CACHED * columns + 2;
    if (c->page == 0) {
        c->pool[kind] = test_tensor_make(
            random, dtype, 3, (const int64_t[]){CACHED, cached_rows(c, 0, kind), c->row}, TEST_UNALIGNED);
        return;
    }
    c->table[kind] = test_tensor_make(random, QUERN_I32, 2, (const int64_t[]){CACHED, columns},
                                      (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    int32_t *table = malloc((size_t)(CACHED * columns) * sizeof *table);
    for (int64_t i = 0; i < CACHED * columns; i++) {
        const int64_t rows = cached_rows(c, i / columns, kind),
                      oldest = kind == 0 ? c->start[i / columns] - c->window + 1 : 0;
        const bool used =
            i % columns < (rows + c->page - 1) / c->page && (i % columns + 1) * c->page > oldest;
        table[i] = used ? (int32_t)((i * 7 + 3) % (CACHED * columns) + 1) : -9;
    }
    test_tensor_set_i32(&c->table[kind], table);
    free(table);
    const int64_t whole[] = {pages, c->page, c->row}, bytes[] = {pages, c->page * 584};
    c->pool[kind] =
        test_tensor_make(random, dtype, c->bytes ? 2 : 3, c->bytes ? bytes : whole, TEST_UNALIGNED);
}

/* Computes each sequence alone from rows of values; the results from the cache must have the same bits. */
static void check_cached(const cache_case *c, quern_context *ctx)
{
    double *q = test_tensor_get(&c->q), *o = test_tensor_get(&c->o), *lse = test_tensor_get(&c->lse);
    int32_t *idx = c->list ? test_tensor_get_i32(&c->idx) : NULL;
    for (int64_t b = 0; b < CACHED; b++) {
        test_random random = {1};
        const int64_t n = c->queries * c->heads * c->dim;
        const oracle_core x = {.queries = c->queries,
                               .raw = cached_rows(c, b, 0),
                               .entries = cached_rows(c, b, 1),
                               .heads = c->heads,
                               .dim = c->dim,
                               .window = c->window,
                               .ratio = c->ratio,
                               .start = c->start[b],
                               .chosen = c->list ? CACHE_K : -1};
        core_case one =
            core_case_make(&random, &x, 1, NULL, c->dtype, &(core_parts){.entries = true, .list = c->list});
        test_tensor_set(&one.t[CORE_Q], q + b * n), test_tensor_set(&one.t[CORE_KV], c->raw[b]),
            test_tensor_set(&one.t[CORE_KV_CMP], c->entries[b]);
        if (c->list) test_tensor_set_i32(&one.t[CORE_IDX], idx + b * c->queries * CACHE_K);
        core_case_forward(&one, ctx);
        core_case_check(&one, false);
        double *expected = test_tensor_get(&one.t[CORE_O]), *expected_lse = test_tensor_get(&one.t[CORE_LSE]);
        assert_memory_equal(expected, o + b * n, (size_t)n * sizeof *o);
        assert_memory_equal(expected_lse, lse + b * c->queries * c->heads,
                            (size_t)(c->queries * c->heads) * sizeof *lse);
        free(expected), free(expected_lse);
        core_case_free(&one);
    }
    free(q), free(o), free(lse), free(idx);
}

static quern_dsv4_attention_params cache_params(const cache_case *c)
{
    quern_dsv4_attention_params p = QUERN_DSV4_ATTENTION_PARAMS_INIT;
    p.ratio = c->ratio;
    p.window = c->window;
    p.page = c->page;
    p.start_abs_pos = c->page == 0 ? -1 : c->start[0];
    p.format = c->bytes ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    return p;
}

static cache_case cache_make(test_random *random, int trial)
{
    static const int64_t pages[] = {0, 1, 16, 64, 5}, heads[] = {3, 1, 17, 64, 128};
    cache_case c = {.dtype = core_dtype(trial % 2 ? QUERN_BF16 : QUERN_F32),
                    .bytes = trial / 2 % 2,
                    .list = trial / 4 % 2,
                    .queries = 1 + trial % CACHE_QUERIES_MOST,
                    .heads = heads[trial / 5 % 5],
                    .page = pages[trial % 5],
                    .ratio = 3,
                    .window = 7};
    c.dim = c.bytes ? 512 : 24;
    c.row = c.bytes ? 584 : c.dim;
    for (int64_t b = 0; b < CACHED; b++)
        c.start[b] = c.page == 0 ? 40 : (int32_t)test_random_int(random, 0, CACHE_MOST - c.queries);
    const int64_t q[] = {CACHED, c.queries, c.heads, c.dim}, idx[] = {CACHED, c.queries, CACHE_K},
                  lse[] = {CACHED, c.heads, c.queries};
    c.q = test_tensor_make(random, c.dtype, 4, q, TEST_STRIDED);
    c.o = test_tensor_make(random, c.dtype, 4, q, TEST_STRIDED);
    c.lse = test_tensor_make(random, QUERN_F32, 3, lse, TEST_CONTIGUOUS);
    c.idx = test_tensor_make(random, QUERN_I32, 3, idx, TEST_CONTIGUOUS);
    test_tensor_normal(&c.q, random, 1);
    int32_t list[CACHED * CACHE_QUERIES_MOST * CACHE_K];
    for (int i = 0; i < CACHED * c.queries * CACHE_K; i++) list[i] = (int32_t)test_random_int(random, -1, 12);
    test_tensor_set_i32(&c.idx, list);
    for (int kind = 0; kind < 2; kind++) {
        make_pool(&c, kind, random);
        for (int64_t b = 0; b < CACHED; b++) {
            unsigned char *bytes = malloc((size_t)(cached_rows(&c, b, kind) * 584 + 1));
            double *values = exact_rows(&c, cached_rows(&c, b, kind), bytes, random, &c.source[kind][b]);
            store_cached(&c, kind, b, values, bytes);
            *(kind == 0 ? &c.raw[b] : &c.entries[b]) = values;
            free(bytes);
        }
    }
    return c;
}

static void cache_free(cache_case *c)
{
    for (int kind = 0; kind < 2; kind++) {
        test_tensor_free(&c->pool[kind]);
        if (c->page > 0) test_tensor_free(&c->table[kind]);
    }
    for (int64_t b = 0; b < CACHED; b++)
        free(c->raw[b]), free(c->entries[b]), free(c->source[0][b]), free(c->source[1][b]);
    test_tensor_free(&c->q), test_tensor_free(&c->o), test_tensor_free(&c->lse), test_tensor_free(&c->idx);
}

static quern_dsv4_attention_tensors cache_tensors(const cache_case *c, const quern_tensor *starts)
{
    quern_dsv4_attention_tensors t = QUERN_DSV4_ATTENTION_TENSORS_INIT;
    t.q = &c->q.view;
    t.kv = &c->pool[0].view;
    t.kv_cmp = &c->pool[1].view;
    t.o = &c->o.view;
    t.lse = &c->lse.view;
    t.idx = c->list ? &c->idx.view : NULL;
    if (c->page == 0) return t;
    t.start_positions = starts;
    t.kv_table = &c->table[0].view;
    t.kv_cmp_table = &c->table[1].view;
    return t;
}

static void caches_change_no_bit(void **state)
{
    static const int64_t batch = CACHED;
    (void)state;
    for (int trial = 0; trial < 40; trial++) {
        test_random random = {(uint64_t)trial + 333};
        cache_case c = cache_make(&random, trial);
        quern_context *ctx = test_context(test_random_level(&random), 2);
        const quern_dsv4_attention_params p = cache_params(&c);
        const quern_tensor starts = quern_tensor_contiguous(c.start, QUERN_I32, 1, &batch);
        const quern_dsv4_attention_tensors t = cache_tensors(&c, &starts);
        size_t bytes;
        if (quern_dsv4_attention_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        test_workspace w = test_workspace_make(bytes);
        if (quern_dsv4_attention(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
            fail_msg("trial %d: %s", trial, quern_last_error(ctx));
        test_workspace_close(&w);
        test_tensor_check_guards(&c.o, "o");
        check_cached(&c, ctx);
        quern_context_destroy(ctx);
        cache_free(&c);
    }
}

static void bad_caches_are_refused(void **state)
{
    static const int64_t batch = CACHED;
    (void)state;
    test_random random = {35};
    cache_case c = cache_make(&random, 2); /* f32 queries, bytes, pages of 16 */
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    int32_t *starts_data = c.start;
    const quern_tensor starts = quern_tensor_contiguous(starts_data, QUERN_I32, 1, &batch);
    const quern_dsv4_attention_params good = cache_params(&c);
    const quern_dsv4_attention_tensors whole = cache_tensors(&c, &starts);
    size_t bytes;
    assert_int_equal(quern_dsv4_attention_workspace(ctx, &good, &whole, &bytes), QUERN_OK);
    void *memory = malloc(bytes + 1);
    const struct {
        const char *sentence;
        int kind;
    } cases[] = {{"kv_table has 10 columns: sequence 1 needs", 0},
                 {"kv_cmp_table[", 1},
                 {"start_abs_pos is -1 with pages", 2},
                 {"kv_table is NULL", 3},
                 {"kv has 3 dimensions: 2", 4},
                 {"kv: dtype f32: u8 is accepted", 5},
                 {"the backward takes rows and 0", 6},
                 {"format is fp8: rows and row584", 7},
                 {"query 0 stands at position -4", 8},
                 {"kv_table is given: it stands beside a page", 9},
                 {"takes 512", 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quern_dsv4_attention_params p = good;
        quern_dsv4_attention_tensors t = whole;
        const int32_t start = c.start[1];
        quern_tensor view = c.pool[0].view, q = c.q.view, o = c.o.view;
        int32_t *page = &((int32_t *)c.table[1].view.data)[1 * c.table[1].view.strides[0]];
        const int32_t named = *page;
        if (cases[i].kind == 0) c.start[1] = 5000;
        if (cases[i].kind == 1) *page = 1000;
        if (cases[i].kind == 2) {
            t.start_positions = NULL;
            p.start_abs_pos = -1;
        }
        if (cases[i].kind == 3) t.kv_table = NULL;
        if (cases[i].kind == 4) {
            view.ndim = 3;
            view.shape[2] = 1;
            view.strides[2] = 1;
            t.kv = &view;
        }
        if (cases[i].kind == 5) {
            view.dtype = QUERN_F32;
            t.kv = &view;
        }
        if (cases[i].kind == 7) p.format = QUERN_DSV4_FP8;
        if (cases[i].kind == 8) c.start[1] = -4;
        if (cases[i].kind == 9) {
            p.page = 0;
            p.format = QUERN_DSV4_ROWS;
            t.kv = t.q;
        }
        if (cases[i].kind == 10) {
            q.shape[3] = o.shape[3] = 256;
            t.q = &q;
            t.o = &o;
        }
        if (cases[i].kind == 9) {
            view.ndim = 3;
            view.dtype = QUERN_F32;
            view.shape[0] = CACHED;
            view.shape[1] = 4;
            view.shape[2] = 512;
            view.strides[2] = 1;
            t.kv = &view;
        }
        if (cases[i].kind == 9) {
            t.kv_cmp = NULL;
            t.idx = NULL;
            t.kv_cmp_table = NULL;
        }
        const quern_status status = cases[i].kind == 6
                                        ? quern_dsv4_attention_backward(ctx, NULL, &p, &t, memory, bytes)
                                        : quern_dsv4_attention(ctx, NULL, &p, &t, memory, bytes);
        assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), cases[i].sentence) == NULL)
            fail_msg("'%s' does not say '%s'", quern_last_error(ctx), cases[i].sentence);
        test_tensor_check_unchanged(&c.o, "o of a refused call");
        c.start[1] = start;
        *page = named;
    }
    free(memory);
    quern_context_destroy(ctx);
    cache_free(&c);
}

/* Stores all rows of a sequence, out of order. */
static quern_status store_rows(quern_context *ctx, const cache_case *c, int kind, int64_t b,
                               const double *values, int32_t shift, test_random *random)
{
    const int64_t rows = cached_rows(c, b, kind), shape[] = {rows, c->dim};
    test_tensor x = test_tensor_make(random, c->dtype, 2, shape,
                                     (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    double *turned = test_doubles(rows * c->dim + 1);
    int32_t *slots = malloc((size_t)(rows + 1) * sizeof *slots);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = rows - 1 - i;
        memcpy(turned + i * c->dim, values + row * c->dim, (size_t)c->dim * sizeof *turned);
        slots[i] = (int32_t)row;
        if (c->page > 0) {
            const quern_tensor *table = &c->table[kind].view;
            const int32_t page = ((const int32_t *)table->data)[b * table->strides[0] + row / c->page];
            slots[i] = page < 0 ? -1 : (int32_t)(page * c->page + row % c->page) + shift;
        }
    }
    test_tensor_set(&x, turned);
    const quern_tensor list = quern_tensor_contiguous(slots, QUERN_I32, 1, &rows);
    quern_tensor cache = c->pool[kind].view;
    if (c->page == 0) { /* one sequence of [B, N, ..] */
        cache.data = (char *)cache.data + b * cache.strides[0] * (int64_t)quern_dtype_size(cache.dtype);
        for (int i = 0; i < 2; i++) {
            cache.shape[i] = cache.shape[i + 1];
            cache.strides[i] = cache.strides[i + 1];
        }
        cache.ndim = 2;
    }
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    p.format = c->bytes ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    p.page = c->page;
    t.x = &x.view;
    t.slots = &list;
    t.cache = &cache;
    size_t bytes;
    if (quern_dsv4_store_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    const quern_status status = quern_dsv4_store(ctx, NULL, &p, &t, w.data, bytes);
    test_workspace_close(&w);
    test_tensor_check_unchanged(&x, "x");
    free(turned), free(slots);
    test_tensor_free(&x);
    return status;
}

/* quern_dsv4_store() writes the bytes that the test wrote by hand, and only into the named slots. */
static void stored_rows_are_the_bytes(void **state)
{
    (void)state;
    if (CORE_ON_GPU) {
        print_message("the GPU stores no rows yet\n");
        skip();
    }
    for (int trial = 0; trial < 40; trial++) {
        test_random random = {(uint64_t)trial + 333};
        cache_case c = cache_make(&random, trial);
        quern_context *ctx = test_context(test_random_level(&random), 1);
        for (int kind = 0; kind < 2; kind++) {
            test_tensor by_hand = test_tensor_copy(&c.pool[kind]);
            test_tensor_reset(&c.pool[kind]);
            for (int64_t b = 0; b < CACHED; b++)
                if (store_rows(ctx, &c, kind, b, c.source[kind][b], 0, &random) != QUERN_OK)
                    fail_msg("%s", quern_last_error(ctx));
            assert_true(test_tensor_same_bits(&by_hand, &c.pool[kind]));
            test_tensor_check_guards(&c.pool[kind], "cache");
            test_tensor_free(&by_hand);
        }
        quern_context_destroy(ctx);
        cache_free(&c);
    }
}

static void bad_rows_are_not_stored(void **state)
{
    (void)state;
    if (CORE_ON_GPU) {
        print_message("the GPU stores no rows yet\n");
        skip();
    }
    for (int trial = 0; trial < 20; trial++) {
        test_random random = {(uint64_t)trial + 400};
        cache_case c = cache_make(&random, trial);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        const int64_t at = (cached_rows(&c, 1, 0) - 1) * c.dim + 5;
        double *rows = test_doubles(cached_rows(&c, 1, 0) * c.dim);
        memcpy(rows, c.raw[1], (size_t)(cached_rows(&c, 1, 0) * c.dim) * sizeof *rows);
        test_tensor_reset(&c.pool[0]);
        test_tensor before = test_tensor_copy(&c.pool[0]);
        if (c.page > 0) {
            assert_int_equal(store_rows(ctx, &c, 0, 1, rows, 1 << 20, &random), QUERN_ERR_INVALID_ARGUMENT);
            assert_non_null(strstr(quern_last_error(ctx), "slots["));
        }
        rows[at] = trial % 2 ? NAN : -INFINITY;
        if (c.bytes) {
            assert_int_equal(store_rows(ctx, &c, 0, 1, rows, 0, &random), QUERN_ERR_INVALID_ARGUMENT);
            assert_non_null(strstr(quern_last_error(ctx), "(row 0, column 5) is"));
        }
        assert_true(test_tensor_same_bits(&before, &c.pool[0]));
        test_tensor_free(&before);
        free(rows);
        quern_context_destroy(ctx);
        cache_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(caches_change_no_bit), cmocka_unit_test(bad_caches_are_refused),
        cmocka_unit_test(stored_rows_are_the_bytes), cmocka_unit_test(bad_rows_are_not_stored)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
