/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_cache_test.c - the layer's cache in other dtypes and in bytes: what it stores and what queries
 * read of it, by the float64 oracle; pages; saved sequences; rows that cannot be stored. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_layer_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 33, WINDOW = 12, DIM = 512, ROPE = 64, INDEX = 64, KEPT_MOST = 6 };

/* A cache's storage. */
typedef struct storage {
    quern_dtype dtype;
    quern_dsv4_format format, key_format;
    int64_t page;
} storage;
static const storage storages[] = {{QUERN_BF16, QUERN_DSV4_ROWS, QUERN_DSV4_ROWS, 0},
                                   {QUERN_F32, QUERN_DSV4_ROWS, QUERN_DSV4_FP8, 0},
                                   {QUERN_BF16, QUERN_DSV4_ROW584, QUERN_DSV4_FP8_POWER, 0},
                                   {QUERN_F16, QUERN_DSV4_ROW584, QUERN_DSV4_FP4, 0}};
enum { STORAGES = sizeof storages / sizeof *storages };

static layer_case make_case(test_random *random, oracle_layer_kind kind, quern_dtype dtype)
{
    const oracle_layer l = {.kind = kind,
                            .tokens = TOKENS,
                            .width = 40,
                            .q_lora = 24,
                            .heads = test_random_int(random, 1, 3),
                            .dim = DIM,
                            .groups = 1,
                            .o_lora = 8,
                            .rope_dim = ROPE,
                            .window = WINDOW,
                            .ratio = kind == ORACLE_CSA ? 2 : 4,
                            .index_heads = 16,
                            .index_dim = INDEX,
                            .top_k = 5,
                            .eps = 1e-6};
    return layer_case_make(random, &l, 1, dtype, QUERN_F32);
}

static quern_dsv4_layer_cache_params cache_params(const layer_case *c, const storage *how, int64_t sequences)
{
    quern_dsv4_layer_cache_params p = layer_store_params(c, sequences, 2);
    p.dtype = how->dtype;
    p.format = how->format;
    p.key_format = c->shape.kind == ORACLE_CSA ? how->key_format : QUERN_DSV4_ROWS;
    p.page = c->shape.kind == ORACLE_SWA ? 0 : how->page;
    return p;
}

/* ---- what is stored ---- */

static double half_value(quern_dtype dtype, const void *data, int64_t i)
{
    const int64_t one[] = {1};
    const quern_tensor in = quern_tensor_contiguous((char *)(uintptr_t)data + i * 2, dtype, 1, one);
    test_tensor t = {.view = in};
    double *value = test_tensor_get(&t), result = value[0];
    free(value);
    return result;
}

/* A stored row as values. */
static void widen(quern_dsv4_format format, quern_dtype dtype, int64_t width, const void *row, double *to)
{
    if (format == QUERN_DSV4_ROW584) oracle_dsv4_widen_row584(row, to);
    else if (format == QUERN_DSV4_FP4) oracle_dsv4_widen_fp4(row, width, to);
    else if (format != QUERN_DSV4_ROWS) oracle_dsv4_widen_fp8(row, width, to);
    else
        for (int64_t i = 0; i < width; i++)
            to[i] = dtype == QUERN_F32 ? (double)((const float *)row)[i] : half_value(dtype, row, i);
}

/* Whether a stored row is what the oracle makes of f32 values. */
static void check_stored(quern_dsv4_format format, quern_dtype dtype, const double *values, int64_t width,
                         const void *row, const char *name)
{
    float f32[DIM];
    unsigned char bytes[600];
    bool ok = true, same = true;
    for (int64_t i = 0; i < width; i++) f32[i] = (float)values[i];
    if (format == QUERN_DSV4_ROWS) {
        double *stored = test_doubles(width);
        widen(format, dtype, width, row, stored);
        for (int64_t i = 0; i < width; i++) same = same && stored[i] == test_round(dtype, values[i]);
        free(stored);
    } else if (format == QUERN_DSV4_ROW584) {
        ok = oracle_dsv4_quantise_row584(f32, bytes);
        same = memcmp(row, bytes, 584) == 0;
    } else if (format == QUERN_DSV4_FP4) {
        ok = oracle_dsv4_quantise_fp4(f32, width, bytes);
        same = memcmp(row, bytes, (size_t)(width / 2 + width / 32)) == 0;
    } else {
        ok = oracle_dsv4_quantise_fp8(f32, width, format == QUERN_DSV4_FP8_POWER, bytes);
        same = memcmp(row, bytes, (size_t)width + 4) == 0;
    }
    assert_true(ok);
    if (!same) fail_msg("a row of %s is stored as another", name);
}

/* What a cache has stored of a sequence, as values. */
typedef struct stored {
    double *raw, *entries, *keys; /* [T, D] [S, D] [S, C_I] */
} stored;

/* Takes in the values of the last `count` raw rows and of the entries from `entry` on. Where the case's results
 * are f32, these are what was stored. */
static void read_stored(const layer_case *c, const layer_store *s, int64_t first, int64_t count,
                        int64_t entry, stored *to)
{
    quern_dsv4_layer_rows rows = QUERN_DSV4_LAYER_ROWS_INIT;
    assert_int_equal(quern_dsv4_layer_cache_get(s->cache, 0, &rows), QUERN_OK);
    const quern_tensor *views[] = {&rows.raw, &rows.entries, &rows.keys};
    double *const places[] = {to->raw, to->entries, to->keys};
    static const int results[] = {LAYER_KV, LAYER_COMPRESSED, LAYER_IDX_K};
    for (int k = 0; k < 3; k++) {
        const quern_dsv4_format format = k == 2 ? s->params.key_format : s->params.format;
        const int64_t width = k == 2 ? c->shape.index_dim : c->shape.dim, n = views[k]->shape[0],
                      from = k == 0 ? n - count : entry, at = k == 0 ? first : entry;
        if (c->t[results[k]].buffer == NULL) continue;
        double *values = test_tensor_get(&c->t[results[k]]);
        for (int64_t i = from; i < n; i++) {
            const char *row = (const char *)views[k]->data +
                              i * views[k]->strides[0] * (int64_t)quern_dtype_size(views[k]->dtype);
            widen(format, s->params.dtype, width, row, places[k] + (at + i - from) * width);
            if (c->dtype == QUERN_F32)
                check_stored(format, s->params.dtype, values + (at + i - from) * width, width, row,
                             layer_case_names[results[k]]);
        }
        free(values);
    }
}

/* The head weights of the indexer, x indexer_heads^T. */
static double *head_weights(const layer_case *c)
{
    const int64_t heads = c->shape.index_heads, width = c->shape.width;
    double *x = test_tensor_get(&c->t[LAYER_X]), *w = test_tensor_get(&c->t[LAYER_WEIGHTS + OW_INDEX_HEADS]),
           *to = test_doubles(TOKENS * heads);
    for (int64_t t = 0; t < TOKENS; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < width; i++) to[t * heads + h] += x[t * width + i] * w[h * width + i];
    free(x), free(w);
    return to;
}

/* Scores and choice by what is stored. */
static void check_choice(const layer_case *c, const stored *rows)
{
    const int64_t S = TOKENS / c->shape.ratio, k = c->shape.top_k;
    const oracle_indexer shape = {.queries = TOKENS,
                                  .heads = c->shape.index_heads,
                                  .width = c->shape.index_dim,
                                  .entries = S,
                                  .ratio = c->shape.ratio};
    double *q = test_tensor_get(&c->t[LAYER_IDX_Q]), *w = head_weights(c),
           *expected = test_doubles(TOKENS * S), *scores = test_tensor_get(&c->t[LAYER_IDX_SCORE]);
    int32_t *idx = test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]), best[8];
    oracle_dsv4_scores(&shape, q, rows->keys, w, expected);
    for (int64_t t = 0; t < TOKENS; t++) {
        const int64_t seen = oracle_dsv4_visible(S, c->shape.ratio, t);
        for (int64_t s = seen; s < S; s++) expected[t * S + s] = scores[t * S + s] = 0;
        oracle_dsv4_best(scores + t * S, seen, k, best);
        assert_memory_equal(best, idx + t * k, (size_t)k * sizeof *best);
    }
    /* A score is a sum of both signs over its heads. */
    test_check("idx_score", scores, expected, TOKENS * S, 4 * test_forward_bound(c->dtype));
    free(q), free(w), free(expected), free(scores), free(idx);
}

/* The core by what is stored, its queries and its choice. */
static void check_core(const layer_case *c, const stored *rows)
{
    const int64_t heads = c->shape.heads, n = TOKENS * heads * DIM;
    const bool csa = c->shape.kind == ORACLE_CSA, entries = c->shape.kind != ORACLE_SWA;
    const oracle_core shape = {.queries = TOKENS,
                               .raw = TOKENS,
                               .entries = entries ? TOKENS / c->shape.ratio : 0,
                               .heads = heads,
                               .dim = DIM,
                               .window = WINDOW,
                               .ratio = entries ? c->shape.ratio : 1,
                               .chosen = csa ? c->shape.top_k : -1};
    double *by_head = test_tensor_get(&c->t[LAYER_Q]), *q = test_doubles(n), *o = test_doubles(n),
           *lse = test_doubles(TOKENS * heads), *core = test_tensor_get(&c->t[LAYER_CORE]),
           *sink = test_tensor_get(&c->t[LAYER_WEIGHTS + OW_SINKS]);
    int32_t *idx = csa ? test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]) : NULL;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < TOKENS; t++)
            memcpy(q + (t * heads + h) * DIM, by_head + (h * TOKENS + t) * DIM, DIM * sizeof *q);
    oracle_dsv4_attend(&shape, &(oracle_core_arrays){.q = q,
                                                     .kv = rows->raw,
                                                     .kv_cmp = entries ? rows->entries : NULL,
                                                     .sink = sink,
                                                     .idx = idx,
                                                     .o = o,
                                                     .lse = lse});
    test_check("core", core, o, n, test_forward_bound(c->dtype));
    free(by_head), free(q), free(o), free(lse), free(core), free(sink), free(idx);
}

static void stored_rows_and_what_queries_read(void **state)
{
    (void)state;
    for (int n = 0; n < 3 * STORAGES * 2; n++) {
        const storage *how = &storages[n / 3 % STORAGES];
        test_random random = {(uint64_t)n + 50};
        layer_case c =
            make_case(&random, (oracle_layer_kind)(n % 3), n / 3 / STORAGES ? QUERN_BF16 : QUERN_F32);
        quern_context *ctx = test_context((quern_cpu_level)(1 + n % (int)quern_cpu_level_detect()), 2);
        const quern_dsv4_layer_cache_params p = cache_params(&c, how, 1);
        layer_store s = layer_store_open(&p);
        stored rows = {test_doubles(TOKENS * DIM), test_doubles(TOKENS * DIM), test_doubles(TOKENS * INDEX)};
        for (int64_t at = 0; at < TOKENS;) {
            const int64_t left = TOKENS - at, most = left < KEPT_MOST ? left : KEPT_MOST,
                          count = test_random_int(&random, 1, most);
            layer_case_append(&c, ctx, &s, 0, 0, at, count);
            read_stored(&c, &s, at, count, at / c.shape.ratio, &rows);
            at += count;
            if (at < TOKENS && test_random_one_in(&random, 3)) {
                assert_int_equal(quern_dsv4_layer_cache_rollback(s.cache, 0, 1), QUERN_OK);
                at--;
            }
        }
        if (c.shape.kind == ORACLE_CSA) check_choice(&c, &rows);
        check_core(&c, &rows);
        free(rows.raw), free(rows.entries), free(rows.keys);
        layer_store_close(&s);
        layer_case_free(&c);
        quern_context_destroy(ctx);
    }
}

/* ---- pages, saved sequences ---- */

static void keep_outputs(layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (int i = LAYER_OUT; i < LAYER_D_OUT; i++) {
        if (c->t[i].buffer == NULL) continue;
        first[i] = test_tensor_copy(&c->t[i]);
        test_tensor_reset(&c->t[i]);
    }
}

static void check_kept(const layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (int i = LAYER_OUT; i < LAYER_D_OUT; i++) {
        if (c->t[i].buffer == NULL) continue;
        /* Scores of entries that no query sees are not written. */
        if (i != LAYER_IDX_SCORE && !test_tensor_same_bits(&first[i], &c->t[i]))
            fail_msg("%s differs", layer_case_names[i]);
        test_tensor_free(&first[i]);
    }
}

/* A sequence that stands in pages, moves to another cache as bytes and back, has the bits of one that stays in
 * a contiguous cache. */
static void pages_and_saved_sequences_change_no_bit(void **state)
{
    static const int64_t pieces[] = {3, 9, 1, 1, 6, 2, 11};
    (void)state;
    for (int n = 0; n < 3 * STORAGES * 2; n++) {
        storage how = storages[n / 3 % STORAGES];
        test_random random = {(uint64_t)n + 9};
        layer_case c = make_case(&random, (oracle_layer_kind)(n % 3), n % 2 ? QUERN_BF16 : QUERN_F32);
        quern_context *ctx = test_context((quern_cpu_level)(1 + n % (int)quern_cpu_level_detect()), 2);
        quern_dsv4_layer_cache_params p = cache_params(&c, &how, 1);
        layer_store plain = layer_store_open(&p);
        how.page = 1 + n % 5;
        p = cache_params(&c, &how, 3);
        layer_store paged[2] = {layer_store_open(&p)};
        how.page = 7;
        p = cache_params(&c, &how, 2);
        p.capacity += 20;
        paged[1] = layer_store_open(&p);
        test_tensor first[LAYER_TENSORS];
        for (int64_t i = 0, at = 0; i < 7; at += pieces[i++])
            layer_case_append(&c, ctx, &plain, 0, 0, at, pieces[i]);
        keep_outputs(&c, first);
        for (int64_t i = 0, at = 0; i < 7; at += pieces[i++]) {
            const layer_store *from = &paged[i % 2], *to = &paged[(i + 1) % 2];
            const int64_t id = i % 2 ? 0 : 2, other = i % 2 ? 2 : 0;
            layer_case_append(&c, ctx, from, id, 0, at, pieces[i]);
            size_t bytes;
            assert_int_equal(quern_dsv4_layer_cache_save(from->cache, id, NULL, &bytes), QUERN_OK);
            test_workspace space = test_workspace_make(bytes);
            assert_int_equal(quern_dsv4_layer_cache_save(from->cache, id, space.data, &bytes), QUERN_OK);
            layer_store_grow(to, other, at + pieces[i]);
            if (quern_dsv4_layer_cache_restore(to->cache, other, space.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(NULL));
            test_workspace_close(&space);
            layer_store_reset(from, id);
        }
        check_kept(&c, first);
        layer_store_close(&plain), layer_store_close(&paged[0]), layer_store_close(&paged[1]);
        layer_case_free(&c);
        quern_context_destroy(ctx);
    }
}

/* A sequence's saved bytes. */
static test_workspace saved(const layer_store *s, int64_t sequence, size_t *bytes)
{
    assert_int_equal(quern_dsv4_layer_cache_save(s->cache, sequence, NULL, bytes), QUERN_OK);
    test_workspace space = test_workspace_make(*bytes);
    assert_int_equal(quern_dsv4_layer_cache_save(s->cache, sequence, space.data, bytes), QUERN_OK);
    return space;
}

static void check_is_still(const layer_store *s, int64_t sequence, const test_workspace *before, size_t bytes)
{
    size_t now;
    test_workspace space = saved(s, sequence, &now);
    assert_int_equal(now, bytes);
    assert_memory_equal(space.data, before->data, bytes);
    test_workspace_close(&space);
}

static void expect_error(quern_status status, quern_status expected, const char *sentence)
{
    assert_int_equal(status, expected);
    if (strstr(quern_last_error(NULL), sentence) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(NULL), sentence);
}

/* Bytes with any bit turned, cut off or of another cache are refused, and the sequence is as it was. */
static void damaged_bytes(void **state)
{
    (void)state;
    test_random random = {4};
    storage how = storages[2];
    layer_case c = make_case(&random, ORACLE_CSA, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    quern_dsv4_layer_cache_params p = cache_params(&c, &how, 2);
    layer_store s = layer_store_open(&p);
    layer_case_append(&c, ctx, &s, 0, 0, 0, 17);
    layer_case_append(&c, ctx, &s, 1, 0, 0, 6);
    size_t bytes, other_bytes;
    test_workspace good = saved(&s, 0, &bytes), other = saved(&s, 1, &other_bytes);
    unsigned char *bad = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i += i < 130 ? 1 : 97) {
        memcpy(bad, good.data, bytes);
        bad[i] ^= (unsigned char)(1u << (i % 8));
        if (quern_dsv4_layer_cache_restore(s.cache, 1, bad, bytes) != QUERN_ERR_FORMAT)
            fail_msg("byte %zu of %zu may be any", i, bytes);
    }
    memcpy(bad, good.data, bytes);
    expect_error(quern_dsv4_layer_cache_restore(s.cache, 1, bad, bytes - 1), QUERN_ERR_FORMAT,
                 "are accepted");
    expect_error(quern_dsv4_layer_cache_restore(s.cache, 1, bad, bytes + 1), QUERN_ERR_FORMAT,
                 "are accepted");
    expect_error(quern_dsv4_layer_cache_restore(s.cache, 1, bad, 40), QUERN_ERR_FORMAT,
                 "from has 40 bytes: a saved sequence has at least");
    expect_error(quern_dsv4_layer_cache_restore(s.cache, 1, NULL, bytes), QUERN_ERR_INVALID_ARGUMENT,
                 "from is NULL");
    expect_error(quern_dsv4_layer_cache_restore(s.cache, 2, bad, bytes), QUERN_ERR_INVALID_ARGUMENT,
                 "sequence is 2: 0 to 1 are accepted");
    size_t few = bytes - 1;
    expect_error(quern_dsv4_layer_cache_save(s.cache, 0, bad, &few), QUERN_ERR_WORKSPACE, "at least");
    check_is_still(&s, 1, &other, other_bytes);
    how.key_format = QUERN_DSV4_FP8;
    p = cache_params(&c, &how, 1);
    layer_store unlike = layer_store_open(&p);
    expect_error(quern_dsv4_layer_cache_restore(unlike.cache, 0, good.data, bytes), QUERN_ERR_FORMAT,
                 "formats 4 and 2");
    how = storages[2];
    how.page = 2;
    p = cache_params(&c, &how, 1);
    p.capacity = 16;
    layer_store small = layer_store_open(&p);
    expect_error(quern_dsv4_layer_cache_restore(small.cache, 0, good.data, bytes), QUERN_ERR_FORMAT,
                 "from has 17 tokens: 0 to the capacity of 16 are accepted");
    expect_error(quern_dsv4_layer_cache_restore(small.cache, 0, other.data, other_bytes),
                 QUERN_ERR_INVALID_ARGUMENT, "sequence 0 comes to 3 entries and has 0 pages of 2");
    free(bad);
    test_workspace_close(&good), test_workspace_close(&other);
    layer_store_close(&s), layer_store_close(&unlike), layer_store_close(&small);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

/* Pages outside the pool, of another sequence, twice, too many or too few are refused. */
static void bad_pages(void **state)
{
    (void)state;
    test_random random = {5};
    storage how = storages[2];
    how.page = 4;
    layer_case c = make_case(&random, ORACLE_CSA, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    quern_dsv4_layer_cache_params p = cache_params(&c, &how, 2);
    p.pages = 6;
    layer_store s = layer_store_open(&p);
    const int32_t two[] = {5, 1}, twice[] = {2, 2}, far[] = {3, 6}, below[] = {-1}, taken[] = {0, 1},
                  rest[] = {0, 2, 3, 4};
    int64_t held, needed;
    quern_dsv4_layer_cache *cache = s.cache;
    assert_int_equal(quern_dsv4_layer_cache_add_pages(cache, 0, two, 2), QUERN_OK);
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 1, far, 2), QUERN_ERR_INVALID_ARGUMENT,
                 "pages[1] is 6: 0 to 5 are accepted");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 1, below, 1), QUERN_ERR_INVALID_ARGUMENT,
                 "pages[0] is -1: 0 to 5 are accepted");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 1, taken, 2), QUERN_ERR_INVALID_ARGUMENT,
                 "pages[1] is 1, which sequence 0 writes: pages of no sequence are accepted");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 1, twice, 2), QUERN_ERR_INVALID_ARGUMENT,
                 "pages[1] is 2, which sequence 1 writes");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 1, NULL, 1), QUERN_ERR_INVALID_ARGUMENT,
                 "pages is NULL");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 0, rest, 4), QUERN_ERR_INVALID_ARGUMENT,
                 "count is 4: 0 to 2 are accepted");
    expect_error(quern_dsv4_layer_cache_add_pages(cache, 2, rest, 1), QUERN_ERR_INVALID_ARGUMENT,
                 "sequence is 2: 0 to 1 are accepted");
    /* None of the refused ones has taken a page. */
    assert_int_equal(quern_dsv4_layer_cache_pages(cache, 1, 33, &held, &needed), QUERN_OK);
    assert_int_equal(held, 0), assert_int_equal(needed, 4);
    assert_int_equal(quern_dsv4_layer_cache_add_pages(cache, 1, rest, 4), QUERN_OK);
    assert_int_equal(quern_dsv4_layer_cache_reset(cache, 1), QUERN_OK);
    for (int i = 0; i < 2; i++) s.owner[two[i]] = 0;
    layer_case_append(&c, ctx, &s, 0, 0, 0, 16);
    const quern_dsv4_layer_params params = layer_case_params(&c);
    quern_dsv4_layer_tensors t = layer_case_tensors(&c);
    const quern_tensor *given[LAYER_TENSORS];
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) given[i] = NULL;
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    const int32_t id = 0;
    const int64_t count = 2, shape[] = {2, 40};
    float x[80] = {0}, out[80];
    const quern_tensor x_view = quern_tensor_contiguous(x, QUERN_F32, 2, shape),
                       out_view = quern_tensor_contiguous(out, QUERN_F32, 2, shape);
    t.x = &x_view;
    t.out = &out_view;
    size_t bytes, before_bytes;
    test_workspace before = saved(&s, 0, &before_bytes);
    expect_error(
        quern_dsv4_layer_decode_workspace(ctx, &params, cache, &id, &count, 1, &t, &bytes),
        QUERN_ERR_INVALID_ARGUMENT,
        "sequence 0 comes to 9 entries and has 2 pages of 4: pages for all its entries are accepted");
    expect_error(quern_dsv4_layer_cache_fork(cache, 0, 1), QUERN_ERR_INVALID_ARGUMENT,
                 "sequence 1 comes to 8 entries and has 0 pages of 4");
    quern_dsv4_layer_rows rows = QUERN_DSV4_LAYER_ROWS_INIT;
    expect_error(quern_dsv4_layer_cache_get(cache, 0, &rows), QUERN_ERR_UNSUPPORTED,
                 "the cache has pages of 4");
    check_is_still(&s, 0, &before, before_bytes);
    test_workspace_close(&before);
    layer_store_close(&s);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

/* ---- rows that cannot be stored ---- */

/* One call of two sequences, tokens [first, first + counts[i]) of the case each. */
static quern_status step(const layer_case *c, quern_context *ctx, const layer_store *s, const float *x,
                         const int64_t counts[2], float *out)
{
    static const int32_t ids[] = {0, 1};
    const quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    const quern_tensor *given[LAYER_TENSORS];
    const int64_t shape[] = {counts[0] + counts[1], c->shape.width};
    const quern_tensor x_view = quern_tensor_contiguous((float *)(uintptr_t)x, QUERN_F32, 2, shape),
                       out_view = quern_tensor_contiguous(out, QUERN_F32, 2, shape);
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) given[i] = NULL;
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    t.x = &x_view;
    t.out = &out_view;
    size_t bytes;
    quern_status status = quern_dsv4_layer_decode_workspace(ctx, &p, s->cache, ids, counts, 2, &t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_dsv4_layer_decode(ctx, NULL, &p, s->cache, ids, counts, 2, &t, w.data, bytes);
    test_workspace_close(&w);
    return status;
}

/* A NaN in the second sequence's raw row, entry or key: neither sequence nor any output has changed, and both
 * go on to the bits that they have without the refused call. */
static void rows_that_cannot_be_stored(void **state)
{
    static const struct {
        int tensor;
        const char *sentence;
    } cases[] = {{LAYER_X, "sequence 1: kv_rows[1, 0] is nan before it is quantised"},
                 {LAYER_WEIGHTS + OW_BIAS, "compressed["},
                 {LAYER_WEIGHTS + OW_INDEX_BIAS, "idx_k["}};
    (void)state;
    for (int n = 0; n < 6; n++) {
        const int which = cases[n % 3].tensor;
        storage how = storages[2];
        how.page = n < 3 ? 0 : 3;
        test_random random = {(uint64_t)n + 30};
        layer_case c = make_case(&random, ORACLE_CSA, QUERN_F32);
        quern_context *ctx = test_context((quern_cpu_level)(1 + n % (int)quern_cpu_level_detect()), 2);
        const quern_dsv4_layer_cache_params p = cache_params(&c, &how, 2);
        layer_store s[2] = {layer_store_open(&p), layer_store_open(&p)};
        static const int64_t first[] = {5, 3}, second[] = {2, 3};
        float x[8 * 40], out[2][5 * 40], refused[5 * 40];
        for (int i = 0; i < 8 * 40; i++) x[i] = (float)test_random_normal(&random);
        for (int k = 0; k < 2; k++) {
            float unused[8 * 40];
            for (int64_t id = 0; id < 2; id++) layer_store_grow(&s[k], id, TOKENS);
            assert_int_equal(step(&c, ctx, &s[k], x, first, unused), QUERN_OK);
        }
        size_t bytes[2];
        test_workspace before[2] = {saved(&s[0], 0, &bytes[0]), saved(&s[0], 1, &bytes[1])};
        memset(refused, 0x6b, sizeof refused);
        float *bad = which == LAYER_X ? &x[3 * 40 + 7] : (float *)c.t[which].view.data, good = *bad;
        *bad = NAN;
        expect_error(step(&c, ctx, &s[0], x, second, refused), QUERN_ERR_INVALID_ARGUMENT,
                     cases[n % 3].sentence);
        *bad = good;
        for (size_t i = 0; i < sizeof refused; i++) assert_int_equal(((unsigned char *)refused)[i], 0x6b);
        for (int k = 0; k < 2; k++) {
            check_is_still(&s[0], k, &before[k], bytes[k]);
            test_workspace_close(&before[k]);
        }
        for (int k = 0; k < 2; k++) assert_int_equal(step(&c, ctx, &s[k], x, second, out[k]), QUERN_OK);
        assert_memory_equal(out[0], out[1], sizeof out[0]);
        layer_store_close(&s[0]), layer_store_close(&s[1]);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

static void bad_parameters(void **state)
{
    (void)state;
    static const struct {
        int64_t dim, index_dim, page, pages;
        quern_dsv4_layer_kind kind;
        quern_dsv4_format format, key_format;
        const char *sentence;
    } cases[] = {{512, 128, 0, 0, QUERN_DSV4_LAYER_CSA, QUERN_DSV4_FP8, 0, "format is 1 with dim 512"},
                 {256, 128, 0, 0, QUERN_DSV4_LAYER_CSA, QUERN_DSV4_ROW584, 0, "format is 4 with dim 256"},
                 {512, 40, 0, 0, QUERN_DSV4_LAYER_CSA, 0, QUERN_DSV4_FP4, "index_dim is 40: key_format fp4"},
                 {512, 128, 0, 0, QUERN_DSV4_LAYER_CSA, 0, QUERN_DSV4_ROW584, "key_format is 4: 0 to 3"},
                 {512, 0, 0, 0, QUERN_DSV4_LAYER_HCA, 0, QUERN_DSV4_FP8, "key_format is 1: 0 to 0"},
                 {512, 0, 16, 4, QUERN_DSV4_LAYER_SWA, 0, 0, "page is 16: 0 to 0"},
                 {512, 128, 65537, 4, QUERN_DSV4_LAYER_CSA, 0, 0, "page is 65537: 0 to 65536"},
                 {512, 128, 16, 0, QUERN_DSV4_LAYER_CSA, 0, 0, "pages is 0: 1 to"},
                 {512, 128, 0, 1, QUERN_DSV4_LAYER_CSA, 0, 0, "pages is 1: 0 to 0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
        size_t memory = 7, rows = 8;
        p.kind = cases[i].kind;
        p.dtype = QUERN_BF16;
        p.sequences = 2;
        p.capacity = 100;
        p.dim = cases[i].dim;
        p.index_dim = cases[i].index_dim;
        p.format = cases[i].format;
        p.key_format = cases[i].key_format;
        p.page = cases[i].page;
        p.pages = cases[i].pages;
        expect_error(quern_dsv4_layer_cache_size(&p, &memory, &rows), QUERN_ERR_INVALID_ARGUMENT,
                     cases[i].sentence);
        assert_int_equal(memory, 7), assert_int_equal(rows, 8);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_rows_and_what_queries_read),
        cmocka_unit_test(pages_and_saved_sequences_change_no_bit),
        cmocka_unit_test(damaged_bytes),
        cmocka_unit_test(bad_pages),
        cmocka_unit_test(rows_that_cannot_be_stored),
        cmocka_unit_test(bad_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
