/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index_test.c - the indexer on random calls against the float64 oracle, on the golden layer, in every
 * key format; NaN and ties; the same bits for any cut and any number of threads; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { Q, K, W, IDX, COUNT, SCORES, TENSORS };

typedef struct index_case {
    oracle_indexer shape;
    int64_t batch, top_k;
    quern_dsv4_format format;
    test_tensor t[TENSORS];
    double *keys; /* what k means */
} index_case;

static quern_dsv4_index_params params_of(const index_case *c)
{
    quern_dsv4_index_params p = QUERN_DSV4_INDEX_PARAMS_INIT;
    p.ratio = c->shape.ratio;
    p.top_k = c->top_k;
    p.start_abs_pos = c->shape.start;
    p.key_format = c->format;
    return p;
}

static quern_dsv4_index_tensors tensors_of(const index_case *c)
{
    quern_dsv4_index_tensors t = QUERN_DSV4_INDEX_TENSORS_INIT;
    t.q = &c->t[Q].view;
    t.k = &c->t[K].view;
    t.w = &c->t[W].view;
    t.idx = &c->t[IDX].view;
    t.count = &c->t[COUNT].view;
    t.scores = c->t[SCORES].buffer != NULL ? &c->t[SCORES].view : NULL;
    return t;
}

/* Stores random values as rows of bytes; c->keys gets the values of these bytes. */
static void fill_bytes(index_case *c, test_random *random)
{
    const int64_t width = c->shape.width, entries = c->batch * c->shape.entries,
                  bytes = c->t[K].view.shape[2];
    double *values = test_doubles(entries * bytes);
    for (int64_t e = 0; e < entries; e++) {
        float row[256];
        unsigned char codes[256 + 4];
        const double size = exp2((double)test_random_int(random, -6, 6));
        for (int64_t i = 0; i < width; i++)
            row[i] = (float)(size * test_random_normal(random) * (i / 32 % 2 ? 8 : 1));
        if (c->format == QUERN_DSV4_FP4) assert_true(oracle_dsv4_quantise_fp4(row, width, codes));
        else assert_true(oracle_dsv4_quantise_fp8(row, width, c->format == QUERN_DSV4_FP8_POWER, codes));
        for (int64_t i = 0; i < bytes; i++) values[e * bytes + i] = codes[i];
        if (c->format == QUERN_DSV4_FP4) oracle_dsv4_widen_fp4(codes, width, c->keys + e * width);
        else oracle_dsv4_widen_fp8(codes, width, c->keys + e * width);
    }
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t e = 0; e < c->shape.entries; e++) {
            const quern_tensor *k = &c->t[K].view;
            unsigned char *to = (unsigned char *)k->data + b * k->strides[0] + e * k->strides[1];
            for (int64_t i = 0; i < bytes; i++)
                to[i] = (unsigned char)values[(b * c->shape.entries + e) * bytes + i];
        }
    memcpy(c->t[K].snapshot, c->t[K].buffer, c->t[K].bytes);
    free(values);
}

static index_case make_case(test_random *random, const oracle_indexer *shape, int64_t batch, int64_t top_k,
                            quern_dsv4_format format, quern_dtype dtype, quern_dtype keys, bool scores)
{
    index_case c = {*shape,
                    batch,
                    top_k,
                    format,
                    {{.buffer = NULL}},
                    test_doubles(batch * shape->entries * shape->width)};
    const int64_t bytes = format == QUERN_DSV4_FP4 ? shape->width / 2 + shape->width / 32 : shape->width + 4;
    const int64_t shapes[TENSORS][4] = {
        {batch, shape->queries, shape->heads, shape->width},
        {batch, shape->entries, format == QUERN_DSV4_ROWS ? shape->width : bytes},
        {batch, shape->queries, shape->heads},
        {batch, shape->queries, top_k},
        {batch, shape->queries},
        {batch, shape->queries, shape->entries}};
    const quern_dtype dtypes[TENSORS] = {dtype,
                                         format == QUERN_DSV4_ROWS ? keys : QUERN_U8,
                                         test_random_one_in(random, 2) ? dtype : QUERN_F32,
                                         QUERN_I32,
                                         QUERN_I32,
                                         QUERN_F32};
    for (int i = 0; i < (scores ? TENSORS : SCORES); i++) {
        c.t[i] = test_tensor_make(random, dtypes[i],
                                  i == Q       ? 4
                                  : i == COUNT ? 2
                                               : 3,
                                  shapes[i], (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
        if (i <= W && !(i == K && format != QUERN_DSV4_ROWS)) test_tensor_normal(&c.t[i], random, 1);
    }
    if (format == QUERN_DSV4_ROWS) {
        free(c.keys);
        c.keys = test_tensor_get(&c.t[K]);
    } else {
        fill_bytes(&c, random);
    }
    return c;
}

static index_case random_case(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16, QUERN_BF16};
    const quern_dsv4_format format =
        test_random_one_in(random, 2) ? QUERN_DSV4_ROWS : (quern_dsv4_format)test_random_int(random, 1, 3);
    const quern_dtype dtype = dtypes[test_random_int(random, 0, 3)];
    const quern_dtype keys = test_random_one_in(random, 4) ? dtypes[test_random_int(random, 0, 3)] : dtype;
    oracle_indexer x = {.queries = test_random_int(random, 0, 21),
                        .heads = test_random_int(random, 1, test_random_one_in(random, 4) ? 70 : 9),
                        .width = format == QUERN_DSV4_FP4 ? 32 * test_random_int(random, 1, 4)
                                                          : 8 * test_random_int(random, 1, 17),
                        .entries = test_random_int(random, 0, test_random_one_in(random, 4) ? 1500 : 90),
                        .ratio = test_random_int(random, 1, 5)};
    if (test_random_one_in(random, 20)) x.width = 256;
    x.start = test_random_one_in(random, 3) ? 0 : test_random_int(random, 0, x.entries * x.ratio);
    return make_case(random, &x, test_random_int(random, 0, 3),
                     test_random_one_in(random, 5) ? 512 : test_random_int(random, 1, 20), format, dtype,
                     keys, !test_random_one_in(random, 3));
}

static void free_case(index_case *c)
{
    for (int i = 0; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
    free(c->keys);
}

static void run(const index_case *c, quern_context *ctx)
{
    const quern_dsv4_index_params p = params_of(c);
    const quern_dsv4_index_tensors t = tensors_of(c);
    size_t bytes;
    if (quern_dsv4_index_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

/* The rule of nsa.md: a list is right if it equals the oracle's, or if the scores at its end are too close to
 * tell. */
static void check_list(const double *scores, int64_t seen, int64_t k, const int32_t *idx, int64_t count)
{
    int32_t *best = malloc((size_t)(k + 1) * sizeof *best);
    const int64_t n = oracle_dsv4_best(scores, seen, k, best);
    double most = 0, last = INFINITY;
    assert_int_equal(count, n);
    for (int64_t s = 0; s < seen; s++)
        if (isfinite(scores[s])) most = fmax(most, fabs(scores[s]));
    for (int64_t i = 0; i < n; i++)
        if (isfinite(scores[best[i]])) last = fmin(last, scores[best[i]]);
    for (int64_t i = 0; i < k; i++) {
        assert_true(i < n ? idx[i] >= 0 && idx[i] < seen && (i == 0 || idx[i] > idx[i - 1]) : idx[i] == -1);
        if (i >= n) continue;
        bool found = false;
        for (int64_t j = 0; j < n; j++) found = found || best[j] == idx[i];
        if (!found && !(fabs(scores[idx[i]] - last) <= 1e-5 * most))
            fail_msg(
                "entry %d with score %.9g was chosen; the last of the best has %.9g, the largest is %.9g",
                idx[i], scores[idx[i]], last, most);
    }
    for (int64_t j = 0; j < n; j++) { /* and no clearly better one was left out */
        bool found = false;
        for (int64_t i = 0; i < n; i++) found = found || best[j] == idx[i];
        if (!found && !(fabs(scores[best[j]] - last) <= 1e-5 * most))
            fail_msg("entry %d with score %.9g was left", best[j], scores[best[j]]);
    }
    free(best);
}

static void check_case(const index_case *c)
{
    static const char *const names[] = {"q", "k", "w", "idx", "count", "scores"};
    const oracle_indexer *x = &c->shape;
    double *q = test_tensor_get(&c->t[Q]), *w = test_tensor_get(&c->t[W]),
           *out = c->t[SCORES].buffer != NULL ? test_tensor_get(&c->t[SCORES]) : NULL;
    int32_t *idx = test_tensor_get_i32(&c->t[IDX]), *count = test_tensor_get_i32(&c->t[COUNT]);
    const int64_t n = x->queries * x->entries;
    double *scores = test_doubles(c->batch * n);
    for (int64_t i = 0; i < c->batch * n; i++) scores[i] = -INFINITY;
    for (int64_t b = 0; b < c->batch; b++) {
        oracle_dsv4_scores(x, q + b * x->queries * x->heads * x->width, c->keys + b * x->entries * x->width,
                           w + b * x->queries * x->heads, scores + b * n);
        for (int64_t t = 0; t < x->queries; t++) {
            const int64_t row = b * x->queries + t;
            check_list(scores + b * n + t * x->entries,
                       oracle_dsv4_visible(x->entries, x->ratio, x->start + t), c->top_k,
                       idx + row * c->top_k, count[row]);
        }
    }
    if (out != NULL) test_check("scores", out, scores, c->batch * n, test_forward_bound(QUERN_F32));
    for (int i = 0; i < TENSORS; i++) {
        if (c->t[i].buffer == NULL) continue;
        if (i <= W) test_tensor_check_unchanged(&c->t[i], names[i]);
        else test_tensor_check_guards(&c->t[i], names[i]);
    }
    free(q), free(w), free(out), free(idx), free(count), free(scores);
}

static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 41);
    for (int trial = 0; trial < test_trials(300); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        index_case c = random_case(&random);
        quern_context *ctx =
            test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()),
                         (int32_t)test_random_int(&random, 1, 3));
        run(&c, ctx);
        check_case(&c);
        quern_context_destroy(ctx);
        free_case(&c);
    }
}

/* Any number of threads, and tokens one by one, give the bits of one call. */
static void threads_and_cuts_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 24; trial++) {
        test_random random = {(uint64_t)trial + 700};
        const oracle_indexer x = {.queries = 13,
                                  .heads = 5,
                                  .width = 32,
                                  .entries = trial % 2 ? 2500 : 60,
                                  .ratio = 2,
                                  .start = trial % 2 ? 5000 : 90};
        index_case c = make_case(
            &random, &x, 2, trial % 4 < 2 ? 7 : 400, (quern_dsv4_format)(trial % 3 == 0 ? 0 : trial % 4),
            trial % 5 ? QUERN_BF16 : QUERN_F32, trial % 5 ? QUERN_BF16 : QUERN_F32, true);
        test_tensor first[TENSORS];
        for (int32_t threads = 1; threads <= 4; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            run(&c, ctx);
            for (int i = IDX; i < TENSORS; i++) {
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 3);
        index_case piece = c;
        for (int i = IDX; i < TENSORS; i++) test_tensor_reset(&c.t[i]);
        for (int64_t t = 0, n; t < x.queries; t += n) {
            n = test_random_int(&random, 1, 4) < x.queries - t ? 1 : x.queries - t;
            piece.shape.start = x.start + t;
            for (int i = Q; i < TENSORS; i++) {
                quern_tensor *view = &piece.t[i].view;
                if (i == K) continue;
                *view = c.t[i].view;
                view->shape[1] = n;
                view->data =
                    (char *)view->data + t * view->strides[1] * (int64_t)quern_dtype_size(view->dtype);
            }
            run(&piece, ctx);
        }
        for (int i = IDX; i < TENSORS; i++) {
            assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            test_tensor_free(&first[i]);
        }
        quern_context_destroy(ctx);
        free_case(&c);
    }
}

enum { PAGED = 3 };

/* A pool with the keys of a case, pages out of order, and the table of it. Columns that no query needs name
 * no page. */
typedef struct key_pool {
    test_tensor pool, table;
    int32_t start[PAGED];
} key_pool;

static key_pool make_pool(const index_case *c, int64_t page, test_random *random)
{
    const quern_tensor *k = &c->t[K].view;
    const int64_t size = (int64_t)quern_dtype_size(k->dtype), row = k->shape[2] * size,
                  data = c->format == QUERN_DSV4_ROWS  ? row
                         : c->format == QUERN_DSV4_FP4 ? c->shape.width / 2
                                                       : c->shape.width;
    const int64_t columns = (c->shape.entries + page - 1) / page + 2, pages = PAGED * columns + 1;
    const int64_t plain[] = {pages, page, k->shape[2]}, bytes[] = {pages, page * k->shape[2]};
    const bool rows = c->format == QUERN_DSV4_ROWS;
    key_pool p = {.pool =
                      test_tensor_make(random, k->dtype, rows ? 3 : 2, rows ? plain : bytes, TEST_UNALIGNED),
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
    int32_t *idx = test_tensor_get_i32(&c->t[IDX]), *count = test_tensor_get_i32(&c->t[COUNT]);
    double *got = test_tensor_get(scores);
    const int64_t T = c->shape.queries, S = c->shape.entries, width = scores->view.shape[2];
    for (int64_t b = 0; b < PAGED; b++) {
        index_case one = *c;
        one.shape.start = start[b];
        test_random random = {5};
        for (int i = 0; i < TENSORS; i++) {
            quern_tensor *v = &one.t[i].view;
            if (i >= IDX) {
                const int64_t shape[] = {1, v->shape[1], v->shape[2]};
                one.t[i] = test_tensor_make(&random, v->dtype, v->ndim, shape, TEST_CONTIGUOUS);
                continue;
            }
            v->data = (char *)v->data + b * v->strides[0] * (int64_t)quern_dtype_size(v->dtype);
            v->shape[0] = 1;
        }
        run(&one, ctx);
        int32_t *idx1 = test_tensor_get_i32(&one.t[IDX]), *count1 = test_tensor_get_i32(&one.t[COUNT]);
        double *scores1 = test_tensor_get(&one.t[SCORES]);
        assert_memory_equal(idx1, idx + b * T * c->top_k, (size_t)(T * c->top_k) * sizeof *idx);
        assert_memory_equal(count1, count + b * T, (size_t)T * sizeof *count);
        for (int64_t t = 0; t < T; t++)
            for (int64_t e = 0; e < width; e++)
                assert_true(got[(b * T + t) * width + e] == (e < S ? scores1[t * S + e] : -INFINITY));
        free(idx1), free(count1), free(scores1);
        for (int i = IDX; i < TENSORS; i++) test_tensor_free(&one.t[i]);
    }
    free(idx), free(count), free(got);
}

/* The lists and scores of sequences at positions of their own, from pages, are those of each alone. */
static void pages_and_positions_change_no_bit(void **state)
{
    static const int64_t pages[] = {1, 16, 64, 5, 128}, batch = PAGED;
    (void)state;
    for (int trial = 0; trial < 60; trial++) {
        test_random random = {(uint64_t)trial + 900};
        const quern_dtype dtype = trial % 3 ? QUERN_BF16 : QUERN_F32;
        const oracle_indexer x = {
            .queries = 1 + trial % 4, .heads = 5, .width = 32 + 32 * (trial % 2), .entries = 350, .ratio = 3};
        index_case c = make_case(&random, &x, PAGED, 40, (quern_dsv4_format)(trial % 4), dtype, dtype, true);
        key_pool pool = make_pool(&c, pages[trial % 5], &random);
        quern_context *ctx =
            test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()),
                         (int32_t)test_random_int(&random, 1, 3));
        const quern_tensor starts = quern_tensor_contiguous(pool.start, QUERN_I32, 1, &batch);
        const int64_t S = pool.table.view.shape[1] * pages[trial % 5];
        test_tensor scores =
            test_tensor_make(&random, QUERN_F32, 3, (const int64_t[]){PAGED, x.queries, S}, TEST_CONTIGUOUS);
        for (int paged = 0; paged < 2; paged++) {
            quern_dsv4_index_params p = params_of(&c);
            quern_dsv4_index_tensors t = tensors_of(&c);
            size_t bytes;
            t.start_positions = &starts;
            if (paged) {
                p.page = pages[trial % 5];
                t.k = &pool.pool.view;
                t.k_table = &pool.table.view;
                t.scores = &scores.view;
            }
            for (int i = IDX; i < TENSORS; i++) test_tensor_reset(&c.t[i]);
            if (quern_dsv4_index_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace w = test_workspace_make(bytes);
            if (quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace_close(&w);
            test_tensor_check_guards(&c.t[IDX], "idx"), test_tensor_check_guards(&scores, "scores");
            test_tensor_check_unchanged(&pool.pool, "k");
            check_alone(&c, pool.start, paged ? &scores : &c.t[SCORES], ctx);
        }
        test_tensor_free(&scores);
        quern_context_destroy(ctx);
        pool_free(&pool);
        free_case(&c);
    }
}

static void golden_layer(void **state)
{
    (void)state;
    dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, 0);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {3};
        index_case c = make_case(&random, &l.indexer, DSV4_LAYER_BATCH, l.core.chosen, QUERN_DSV4_ROWS,
                                 QUERN_F32, QUERN_F32, true);
        test_tensor_free(&c.t[W]);
        const int64_t w[] = {DSV4_LAYER_BATCH, l.indexer.queries, l.indexer.heads};
        c.t[W] = test_tensor_make(&random, QUERN_F32, 3, w, TEST_CONTIGUOUS);
        test_tensor_set(&c.t[Q], l.idx_q), test_tensor_set(&c.t[K], l.idx_k),
            test_tensor_set(&c.t[W], l.idx_w);
        quern_context *ctx = test_context(level, 2);
        run(&c, ctx);
        double *scores = test_tensor_get(&c.t[SCORES]);
        int32_t *idx = test_tensor_get_i32(&c.t[IDX]);
        const int64_t rows = DSV4_LAYER_BATCH * l.indexer.queries, entries = l.indexer.entries,
                      k = l.core.chosen;
        for (int64_t i = 0; i < rows * entries; i++)
            if (scores[i] == -INFINITY) l.idx_score[i] = -INFINITY;
        test_check_golden("idx.score", scores, l.idx_score, rows * entries, DSV4_TINY_BOUND);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < k; i++) {
                bool found = false;
                for (int64_t j = 0; j < k; j++) found = found || l.idx[row * k + i] == idx[row * k + j];
                assert_true(found);
            }
        free(scores), free(idx);
        quern_context_destroy(ctx);
        free_case(&c);
    }
    dsv4_layer_free(&l);
}

/* One head and one nonzero channel: the score of a key is its value. */
static void ties_and_nonfinite_scores(void **state)
{
    static const struct {
        float key[6];
        int64_t k;
        int32_t idx[4];
    } cases[] = {
        {{1, 1, 1, 1, 1, 1}, 3, {0, 1, 2}},           /* ties: the lowest */
        {{NAN, 1, NAN, 2, 0, -1}, 3, {1, 3, 4}},      /* ReLU makes -1 a 0 and the tie goes to 4 */
        {{NAN, NAN, 3, NAN, NAN, NAN}, 3, {0, 1, 2}}, /* NaN fills last, lowest first */
        {{INFINITY, 5, INFINITY, 7, NAN, INFINITY}, 4, {0, 2, 3, 5}},
        {{-0.0f, 0, -3, 2, -0.0f, 0}, 3, {0, 1, 3}}, /* -0 equals 0 */
    };
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 1);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            for (int dtype = 0; dtype < 2; dtype++) {
                test_random random = {9};
                const oracle_indexer x = {
                    .queries = 1, .heads = 1, .width = 8, .entries = 6, .ratio = 1, .start = 5};
                index_case c =
                    make_case(&random, &x, 1, cases[i].k, QUERN_DSV4_ROWS, dtype ? QUERN_BF16 : QUERN_F32,
                              dtype ? QUERN_BF16 : QUERN_F32, false);
                const double q[8] = {1}, w[] = {1};
                double keys[6 * 8] = {0};
                for (int e = 0; e < 6; e++) keys[8 * e] = (double)cases[i].key[e];
                test_tensor_set(&c.t[Q], q), test_tensor_set(&c.t[K], keys), test_tensor_set(&c.t[W], w);
                run(&c, ctx);
                int32_t *idx = test_tensor_get_i32(&c.t[IDX]);
                assert_memory_equal(idx, cases[i].idx, (size_t)cases[i].k * sizeof *idx);
                free(idx);
                free_case(&c);
            }
        }
        quern_context_destroy(ctx);
    }
}

static void expect_refusal(index_case *c, quern_context *ctx, const quern_dsv4_index_params *p,
                           const quern_dsv4_index_tensors *t, const char *sentence)
{
    char memory[64];
    size_t bytes;
    assert_true(quern_dsv4_index(ctx, NULL, p, t, memory, sizeof memory) != QUERN_OK);
    if (strstr(quern_last_error(ctx), sentence) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentence);
    for (int i = 0; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], "a tensor of a refused call");
    (void)quern_dsv4_index_workspace(ctx, p, t, &bytes);
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {12};
    const oracle_indexer x = {.queries = 4, .heads = 3, .width = 32, .entries = 9, .ratio = 4, .start = 30};
    index_case c = make_case(&random, &x, 1, 5, QUERN_DSV4_ROWS, QUERN_BF16, QUERN_BF16, true);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_index_params good = params_of(&c);
    const quern_dsv4_index_tensors whole = tensors_of(&c);
    quern_dsv4_index_params p = good;
    quern_dsv4_index_tensors t = whole;
    expect_refusal(&c, ctx, &good, &whole, "workspace");
    p.top_k = 2049;
    expect_refusal(&c, ctx, &p, &t, "top_k is 2049: 0 to 2048");
    p = good;
    p.ratio = -1;
    expect_refusal(&c, ctx, &p, &t, "ratio is -1");
    p = good;
    p.start_abs_pos = -4;
    expect_refusal(&c, ctx, &p, &t, "start_abs_pos is -4");
    p = good;
    p.key_format = QUERN_DSV4_ROW584;
    expect_refusal(&c, ctx, &p, &t, "key_format is 4");
    p = good;
    p.key_format = QUERN_DSV4_FP8;
    expect_refusal(&c, ctx, &p, &t, "k has dtype bf16: u8");
    p = good;
    p.top_k = 6;
    expect_refusal(&c, ctx, &p, &t, "idx.shape[2] is 5: 6 is accepted");
    p = good;
    t.q = NULL;
    expect_refusal(&c, ctx, &p, &t, "q is NULL");
    t = whole;
    t.k = NULL;
    expect_refusal(&c, ctx, &p, &t, "k is NULL");
    t = whole;
    t.count = NULL;
    expect_refusal(&c, ctx, &p, &t, "count is NULL");
    quern_tensor view = c.t[Q].view;
    view.shape[3] = 12;
    t = whole;
    t.q = &view;
    expect_refusal(&c, ctx, &p, &t, "q has 12 channels: a multiple of 8 up to 256");
    view = c.t[Q].view;
    view.shape[2] = 0;
    expect_refusal(&c, ctx, &p, &t, "0 heads");
    view = c.t[K].view;
    view.shape[2] = 24;
    t = whole;
    t.k = &view;
    expect_refusal(&c, ctx, &p, &t, "k.shape[2] is 24: 32 is accepted");
    t = whole;
    t.k_table = &c.t[IDX].view;
    expect_refusal(&c, ctx, &p, &t, "k_table is given: it stands beside a page");
    t = whole;
    t.scores = t.q;
    expect_refusal(&c, ctx, &p, &t, "scores");
    t = whole;
    t.count = t.idx;
    expect_refusal(&c, ctx, &p, &t, "count");
    quern_context_destroy(ctx);
    free_case(&c);
}

static void bad_pages_and_positions_are_refused(void **state)
{
    static const int64_t batch = PAGED;
    (void)state;
    test_random random = {13};
    const oracle_indexer x = {.queries = 4, .heads = 3, .width = 32, .entries = 90, .ratio = 4};
    index_case c = make_case(&random, &x, PAGED, 5, QUERN_DSV4_FP8, QUERN_BF16, QUERN_BF16, false);
    key_pool pool = make_pool(&c, 16, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_tensor starts = quern_tensor_contiguous(pool.start, QUERN_I32, 1, &batch);
    quern_dsv4_index_params good = params_of(&c), p;
    quern_dsv4_index_tensors whole = tensors_of(&c), t;
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
        test_tensor_check_unchanged(&c.t[IDX], "idx of a refused call");
        pool.start[1] = start;
        *first = page;
    }
    free(memory);
    t = whole;
    t.k_table = NULL;
    expect_refusal(&c, ctx, &good, &t, "k_table is NULL");
    t = whole;
    t.k = &c.t[K].view;
    expect_refusal(&c, ctx, &good, &t, "k has 3 dimensions: 2 are accepted");
    p = good;
    p.page = -1;
    expect_refusal(&c, ctx, &p, &whole, "page is -1");
    p.page = 8;
    expect_refusal(&c, ctx, &p, &whole, "k.shape[1] is 576: 288 is accepted");
    quern_context_destroy(ctx);
    pool_free(&pool);
    free_case(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls),
                                       cmocka_unit_test(threads_and_cuts_change_no_bit),
                                       cmocka_unit_test(pages_and_positions_change_no_bit),
                                       cmocka_unit_test(bad_pages_and_positions_are_refused),
                                       cmocka_unit_test(golden_layer),
                                       cmocka_unit_test(ties_and_nonfinite_scores),
                                       cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
