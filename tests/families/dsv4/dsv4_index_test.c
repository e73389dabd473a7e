/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index_test.c - the indexer on random calls against the float64 oracle, on the golden layer, in every
 * key format; NaN and ties; the same bits for any cut and any number of threads; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_index_case.h"
#include "dsv4_layer.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_fp8(quern_dsv4_format format)
{
    return format == QUERN_DSV4_FP8 || format == QUERN_DSV4_FP8_POWER;
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
    index_case c = index_case_make(random, &x, test_random_int(random, 0, 3),
                                   test_random_one_in(random, 5) ? 512 : test_random_int(random, 1, 20),
                                   format, dtype, keys, !test_random_one_in(random, 3));
    if (is_fp8(format) && test_random_one_in(random, 2)) c.products = QUERN_DSV4_INDEX_FP8;
    return c;
}

/* The error of a score, over the scores, and of the largest that lets two be taken for each other. Hopper's
 * FP8 products drop bits of a term below 2^-13 of the largest that is added with it, in each of four steps of
 * 32 channels: 2^-11 of a dot product whose terms do not cancel, and as much again of one whose do. */
static double tolerance(const index_case *c, double exact)
{
    return INDEX_ON_GPU && c->products == QUERN_DSV4_INDEX_FP8 ? 1e-3 : exact;
}

/* The heads as the values of their codes. */
static void round_heads(const index_case *c, double *q)
{
    const int64_t width = c->shape.width, heads = c->batch * c->shape.queries * c->shape.heads;
    for (int64_t h = 0; h < heads; h++) {
        float row[256];
        unsigned char codes[256 + 4];
        for (int64_t i = 0; i < width; i++) row[i] = (float)q[h * width + i];
        assert_true(oracle_dsv4_quantise_fp8(row, width, false, codes));
        oracle_dsv4_widen_fp8(codes, width, q + h * width);
    }
}

/* The rule of nsa.md: a list is right if it equals the oracle's, or if the scores at its end are too close to
 * tell. */
static void check_list(const double *scores, int64_t seen, int64_t k, const int32_t *idx, int64_t count,
                       double close)
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
        if (!found && !(fabs(scores[idx[i]] - last) <= close * most))
            fail_msg(
                "entry %d with score %.9g was chosen; the last of the best has %.9g, the largest is %.9g",
                idx[i], scores[idx[i]], last, most);
    }
    for (int64_t j = 0; j < n; j++) { /* and no clearly better one was left out */
        bool found = false;
        for (int64_t i = 0; i < n; i++) found = found || best[j] == idx[i];
        if (!found && !(fabs(scores[best[j]] - last) <= close * most))
            fail_msg("entry %d with score %.9g was left", best[j], scores[best[j]]);
    }
    free(best);
}

static void check_case(const index_case *c)
{
    static const char *const names[] = {"q", "k", "w", "idx", "count", "scores"};
    const oracle_indexer *x = &c->shape;
    double *q = test_tensor_get(&c->t[INDEX_Q]), *w = test_tensor_get(&c->t[INDEX_W]),
           *out = c->t[INDEX_SCORES].buffer != NULL ? test_tensor_get(&c->t[INDEX_SCORES]) : NULL;
    int32_t *idx = test_tensor_get_i32(&c->t[INDEX_IDX]), *count = test_tensor_get_i32(&c->t[INDEX_COUNT]);
    const int64_t n = x->queries * x->entries;
    double *scores = test_doubles(c->batch * n);
    if (c->products == QUERN_DSV4_INDEX_FP8) round_heads(c, q);
    for (int64_t i = 0; i < c->batch * n; i++) scores[i] = -INFINITY;
    for (int64_t b = 0; b < c->batch; b++) {
        oracle_dsv4_scores(x, q + b * x->queries * x->heads * x->width, c->keys + b * x->entries * x->width,
                           w + b * x->queries * x->heads, scores + b * n);
        for (int64_t t = 0; t < x->queries; t++) {
            const int64_t row = b * x->queries + t;
            check_list(scores + b * n + t * x->entries,
                       oracle_dsv4_visible(x->entries, x->ratio, x->start + t), c->top_k,
                       idx + row * c->top_k, count[row], tolerance(c, 1e-5));
        }
    }
    if (out != NULL) test_check("scores", out, scores, c->batch * n,
                                tolerance(c, test_forward_bound(QUERN_F32)));
    for (int i = 0; i < INDEX_TENSORS; i++) {
        if (c->t[i].buffer == NULL) continue;
        if (i <= INDEX_W) test_tensor_check_unchanged(&c->t[i], names[i]);
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
            test_context(test_random_level(&random), (int32_t)test_random_int(&random, 1, 3));
        index_case_run(&c, ctx);
        check_case(&c);
        quern_context_destroy(ctx);
        index_case_free(&c);
    }
}

/* Any number of threads, and tokens one by one, give the bits of one call. */
static void threads_and_cuts_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 24; trial++) {
        test_random random = {(uint64_t)trial + 700};
        const bool released = trial % 6 == 5;
        const oracle_indexer x = {.queries = 13,
                                  .heads = released ? 64 : 5,
                                  .width = released ? 128 : 32,
                                  .entries = trial % 2 ? 2500 : 60,
                                  .ratio = 2,
                                  .start = trial % 2 ? 5000 : 90};
        index_case c = index_case_make(
            &random, &x, 2, trial % 4 < 2 ? 7 : 400, (quern_dsv4_format)(trial % 3 == 0 ? 0 : trial % 4),
            trial % 5 ? QUERN_BF16 : QUERN_F32, trial % 5 ? QUERN_BF16 : QUERN_F32, true);
        if (is_fp8(c.format) && trial > 6) c.products = QUERN_DSV4_INDEX_FP8;
        if (released) index_case_align_keys(&c, &random); /* one kernel for any cut of the queries */
        test_tensor first[INDEX_TENSORS];
        for (int32_t threads = 1; threads <= 4; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            index_case_run(&c, ctx);
            for (int i = INDEX_IDX; i < INDEX_TENSORS; i++) {
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 3);
        index_case piece = c;
        for (int i = INDEX_IDX; i < INDEX_TENSORS; i++) test_tensor_reset(&c.t[i]);
        for (int64_t t = 0, n; t < x.queries; t += n) {
            n = test_random_int(&random, 1, 4) < x.queries - t ? 1 : x.queries - t;
            piece.shape.start = x.start + t;
            for (int i = INDEX_Q; i < INDEX_TENSORS; i++) {
                quern_tensor *view = &piece.t[i].view;
                if (i == INDEX_K) continue;
                *view = c.t[i].view;
                view->shape[1] = n;
                view->data =
                    (char *)view->data + t * view->strides[1] * (int64_t)quern_dtype_size(view->dtype);
            }
            index_case_run(&piece, ctx);
        }
        for (int i = INDEX_IDX; i < INDEX_TENSORS; i++) {
            assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            test_tensor_free(&first[i]);
        }
        quern_context_destroy(ctx);
        index_case_free(&c);
    }
}

/* The released models' heads; lists that are longer and shorter than what is seen, in every format; one query
 * and several; keys that copies of 16 bytes can read, whose last rows fill no such copy, and others. */
static void released_shapes(void **state)
{
    static const int64_t top_k[] = {512, 1024, 2048, 100}, queries[] = {3, 1, 4, 5, 1, 9},
                         entries[] = {700, 2300, 129, 1037, 2048};
    (void)state;
    for (int i = 0; i < 40; i++) {
        test_random random = {(uint64_t)i + 83};
        const quern_dtype dtype = i % 8 == 4 ? QUERN_F16 : QUERN_BF16;
        const oracle_indexer x = {.queries = queries[i % 6],
                                  .heads = 64,
                                  .width = 128,
                                  .entries = entries[i % 5],
                                  .ratio = 4,
                                  .start = i % 2 ? 2600 : 9300};
        index_case c = index_case_make(&random, &x, i < 8 ? 1 : 1 + i % 2, top_k[i / 2 % 4],
                                       (quern_dsv4_format)(i % 4), dtype, dtype, i % 3 != 0);
        if (i % 5 != 4) index_case_align_keys(&c, &random);
        if (is_fp8(c.format) && i % 8 > 3) c.products = QUERN_DSV4_INDEX_FP8;
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        index_case_run(&c, ctx);
        check_case(&c);
        quern_context_destroy(ctx);
        index_case_free(&c);
    }
}

/* Single queries of long sequences: a GPU finds the k-th best in registers, among the best of groups, or
 * among all where groups are few for the list or all scores are the same, of which the first are chosen. */
static void long_rows(void **state)
{
    static const struct {
        int64_t entries, unseen, top_k;
        quern_dsv4_format format;
        bool by_codes, same;
    } cases[] = {{300, 0, 7, QUERN_DSV4_FP8, true, false},
                 {6001, 3, 2048, QUERN_DSV4_FP8, false, false},
                 {8197, 0, 513, QUERN_DSV4_ROWS, false, false},
                 {16384, 0, 1, QUERN_DSV4_FP8, true, false},
                 {16385, 0, 7, QUERN_DSV4_ROWS, false, false},
                 {16391, 1, 512, QUERN_DSV4_FP4, false, false},
                 {17001, 130, 512, QUERN_DSV4_FP8, false, false},
                 {20003, 0, 1024, QUERN_DSV4_FP8_POWER, true, false},
                 {33003, 2, 1000, QUERN_DSV4_FP8, false, false},
                 {18002, 1, 300, QUERN_DSV4_FP8, false, true},
                 {16400, 0, 2048, QUERN_DSV4_FP8, true, true}};
    (void)state;
    for (size_t i = 0; i < (INDEX_ON_GPU ? sizeof cases / sizeof *cases : 1); i++) {
        test_random random = {(uint64_t)i + 211};
        const int64_t n = cases[i].entries;
        const oracle_indexer x = {.queries = 1,
                                  .heads = 64,
                                  .width = 128,
                                  .entries = n,
                                  .ratio = 1,
                                  .start = n - cases[i].unseen - 1};
        index_case c = index_case_make(&random, &x, 1 + (int64_t)i % 2, cases[i].top_k, cases[i].format,
                                       QUERN_BF16, QUERN_BF16, i % 2 == 0);
        if (cases[i].by_codes) c.products = QUERN_DSV4_INDEX_FP8;
        index_case_align_keys(&c, &random);
        const quern_tensor *k = &c.t[INDEX_K].view;
        for (int64_t e = 1; cases[i].same && e < c.batch * n; e++) {
            memcpy((char *)k->data + e * k->strides[1], k->data, (size_t)k->shape[2]);
            memcpy(c.keys + e * x.width, c.keys, (size_t)x.width * sizeof *c.keys);
        }
        memcpy(c.t[INDEX_K].snapshot, c.t[INDEX_K].buffer, c.t[INDEX_K].bytes);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        index_case_run(&c, ctx);
        check_case(&c);
        int32_t *idx = test_tensor_get_i32(&c.t[INDEX_IDX]);
        for (int64_t j = 0; cases[i].same && j < c.batch * c.top_k; j++)
            assert_int_equal(idx[j], j % c.top_k);
        free(idx);
        quern_context_destroy(ctx);
        index_case_free(&c);
    }
}

/* NaN of a key's codes or scale and negative scales, at the released models' heads: NaN comes last, and a
 * negative scale turns the products' signs. */
static void special_rows_of_bytes(void **state)
{
    (void)state;
    for (int n = 0; n < (INDEX_ON_GPU ? 10 : 8); n++) { /* a CPU refuses NaN as a scale of FP4 */
        const int i = n % 4 + n / 8 * 4;
        test_random random = {(uint64_t)i + 31};
        const oracle_indexer x = {
            .queries = i % 2 ? 1 : 5, .heads = 64, .width = 128, .entries = 300, .ratio = 1, .start = 299};
        const quern_dsv4_format format = i / 2 == 2 ? QUERN_DSV4_FP4 : QUERN_DSV4_FP8;
        index_case c = index_case_make(&random, &x, 1, 299, format, QUERN_BF16, QUERN_BF16, true);
        if (n >= 4 && n < 8) c.products = QUERN_DSV4_INDEX_FP8;
        index_case_align_keys(&c, &random);
        const quern_tensor *k = &c.t[INDEX_K].view;
        unsigned char *row = (unsigned char *)k->data + 77 * k->strides[1];
        if (format == QUERN_DSV4_FP4) row[66] = 255;
        else if (i / 2 == 0) row[101] = 0x7f;
        else
            for (int e = 0; e < 300; e += 3) {
                row = (unsigned char *)k->data + e * k->strides[1];
                row[131] |= 0x80;
                for (int64_t j = 0; j < x.width; j++) c.keys[e * x.width + j] = -c.keys[e * x.width + j];
            }
        if (i / 2 != 1)
            for (int64_t j = 0; j < x.width; j++) c.keys[77 * x.width + j] = NAN;
        memcpy(c.t[INDEX_K].snapshot, c.t[INDEX_K].buffer, c.t[INDEX_K].bytes);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        index_case_run(&c, ctx);
        if (i / 2 == 1) {
            check_case(&c);
        } else {
            int32_t *idx = test_tensor_get_i32(&c.t[INDEX_IDX]);
            for (int64_t j = 0; j < x.queries * c.top_k; j++)
                assert_true(idx[j] == (j % 299 < 77 ? j % 299 : j % 299 + 1));
            free(idx);
        }
        quern_context_destroy(ctx);
        index_case_free(&c);
    }
}

/* Queries that cannot be rounded, and keys that products in FP8 do not take, are refused. */
static void what_is_rounded(void **state)
{
    (void)state;
    test_random random = {77};
    const oracle_indexer x = {.queries = 3, .heads = 2, .width = 32, .entries = 9, .ratio = 1, .start = 8};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int format = QUERN_DSV4_ROWS; format <= QUERN_DSV4_FP4; format++) {
        index_case c = index_case_make(&random, &x, 1, 4, (quern_dsv4_format)format, QUERN_BF16, QUERN_BF16,
                                       true);
        c.products = QUERN_DSV4_INDEX_FP8;
        const quern_dsv4_index_params p = index_case_params(&c);
        const quern_dsv4_index_tensors t = index_case_tensors(&c);
        if (!is_fp8(c.format)) {
            index_case_refused(&c, ctx, &p, &t, "products is fp8: beside key_format fp8");
        } else if (!INDEX_ON_GPU) { /* there it is a bit of the status word */
            double *q = test_tensor_get(&c.t[INDEX_Q]);
            q[4 * 32 + 7] = INFINITY;
            test_tensor_set(&c.t[INDEX_Q], q);
            memcpy(c.t[INDEX_Q].snapshot, c.t[INDEX_Q].buffer, c.t[INDEX_Q].bytes);
            size_t bytes;
            assert_int_equal(quern_dsv4_index_workspace(ctx, &p, &t, &bytes), QUERN_OK);
            test_workspace w = test_workspace_make(bytes);
            assert_int_equal(quern_dsv4_index(ctx, NULL, &p, &t, w.data, bytes), QUERN_ERR_INVALID_ARGUMENT);
            if (strstr(quern_last_error(ctx), "q") == NULL || strstr(quern_last_error(ctx), "135") == NULL)
                fail_msg("%s", quern_last_error(ctx));
            for (int i = 0; i < INDEX_TENSORS; i++)
                test_tensor_check_unchanged(&c.t[i], "a tensor of a refused call");
            test_workspace_close(&w);
            free(q);
        }
        index_case_free(&c);
    }
    quern_context_destroy(ctx);
}

static void golden_layer(void **state)
{
    (void)state;
    if (INDEX_ON_GPU) {
        print_message("the golden layer is f32\n");
        skip();
    }
    dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, 0);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {3};
        index_case c = index_case_make(&random, &l.indexer, DSV4_LAYER_BATCH, l.core.chosen, QUERN_DSV4_ROWS,
                                       QUERN_F32, QUERN_F32, true);
        test_tensor_free(&c.t[INDEX_W]);
        const int64_t w[] = {DSV4_LAYER_BATCH, l.indexer.queries, l.indexer.heads};
        c.t[INDEX_W] = test_tensor_make(&random, QUERN_F32, 3, w, TEST_CONTIGUOUS);
        test_tensor_set(&c.t[INDEX_Q], l.idx_q), test_tensor_set(&c.t[INDEX_K], l.idx_k),
            test_tensor_set(&c.t[INDEX_W], l.idx_w);
        quern_context *ctx = test_context(level, 2);
        index_case_run(&c, ctx);
        double *scores = test_tensor_get(&c.t[INDEX_SCORES]);
        int32_t *idx = test_tensor_get_i32(&c.t[INDEX_IDX]);
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
        index_case_free(&c);
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
                    index_case_make(&random, &x, 1, cases[i].k, QUERN_DSV4_ROWS,
                                    dtype ? QUERN_BF16 : QUERN_F32, dtype ? QUERN_BF16 : QUERN_F32, false);
                const double q[8] = {1}, w[] = {1};
                double keys[6 * 8] = {0};
                for (int e = 0; e < 6; e++) keys[8 * e] = (double)cases[i].key[e];
                test_tensor_set(&c.t[INDEX_Q], q), test_tensor_set(&c.t[INDEX_K], keys),
                    test_tensor_set(&c.t[INDEX_W], w);
                index_case_run(&c, ctx);
                int32_t *idx = test_tensor_get_i32(&c.t[INDEX_IDX]);
                assert_memory_equal(idx, cases[i].idx, (size_t)cases[i].k * sizeof *idx);
                free(idx);
                index_case_free(&c);
            }
        }
        quern_context_destroy(ctx);
    }
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {12};
    const oracle_indexer x = {.queries = 4, .heads = 3, .width = 32, .entries = 9, .ratio = 4, .start = 30};
    index_case c = index_case_make(&random, &x, 1, 5, QUERN_DSV4_ROWS, QUERN_BF16, QUERN_BF16, true);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_index_params good = index_case_params(&c);
    const quern_dsv4_index_tensors whole = index_case_tensors(&c);
    quern_dsv4_index_params p = good;
    quern_dsv4_index_tensors t = whole;
    if (!INDEX_ON_GPU) index_case_refused(&c, ctx, &good, &whole, "workspace"); /* there it takes none */
    p.top_k = 2049;
    index_case_refused(&c, ctx, &p, &t, "top_k is 2049: 0 to 2048");
    p = good;
    p.ratio = -1;
    index_case_refused(&c, ctx, &p, &t, "ratio is -1");
    p = good;
    p.start_abs_pos = -4;
    index_case_refused(&c, ctx, &p, &t, "start_abs_pos is -4");
    p = good;
    p.key_format = QUERN_DSV4_ROW584;
    index_case_refused(&c, ctx, &p, &t, "key_format is 4");
    p = good;
    p.key_format = QUERN_DSV4_FP8;
    index_case_refused(&c, ctx, &p, &t, "k has dtype bf16: u8");
    p = good;
    p.top_k = 6;
    index_case_refused(&c, ctx, &p, &t, "idx.shape[2] is 5: 6 is accepted");
    p = good;
    t.q = NULL;
    index_case_refused(&c, ctx, &p, &t, "q is NULL");
    t = whole;
    t.k = NULL;
    index_case_refused(&c, ctx, &p, &t, "k is NULL");
    t = whole;
    t.count = NULL;
    index_case_refused(&c, ctx, &p, &t, "count is NULL");
    quern_tensor view = c.t[INDEX_Q].view;
    view.shape[3] = 12;
    t = whole;
    t.q = &view;
    index_case_refused(&c, ctx, &p, &t, "q has 12 channels: a multiple of 8 up to 256");
    view = c.t[INDEX_Q].view;
    view.shape[2] = 0;
    index_case_refused(&c, ctx, &p, &t, "0 heads");
    view = c.t[INDEX_K].view;
    view.shape[2] = 24;
    t = whole;
    t.k = &view;
    index_case_refused(&c, ctx, &p, &t, "k.shape[2] is 24: 32 is accepted");
    t = whole;
    t.k_table = &c.t[INDEX_IDX].view;
    index_case_refused(&c, ctx, &p, &t, "k_table is given: it stands beside a page");
    t = whole;
    t.scores = t.q;
    index_case_refused(&c, ctx, &p, &t, "scores");
    t = whole;
    t.count = t.idx;
    index_case_refused(&c, ctx, &p, &t, "count");
    quern_context_destroy(ctx);
    index_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls),    cmocka_unit_test(threads_and_cuts_change_no_bit),
        cmocka_unit_test(released_shapes), cmocka_unit_test(special_rows_of_bytes),
        cmocka_unit_test(what_is_rounded), cmocka_unit_test(long_rows),
        cmocka_unit_test(golden_layer),    cmocka_unit_test(ties_and_nonfinite_scores),
        cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
