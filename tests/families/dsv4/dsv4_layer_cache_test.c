/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_cache_test.c - the layer's cache in other dtypes and in bytes: what it stores and what queries
 * read of it, by the float64 oracle; parameters that are refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_layer_storage.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT_MOST = 6 };

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
    float f32[STORED_DIM];
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

/* Takes in the values of the last `count` raw rows and of the entries from `entry` on, from saved bytes.
 * Where the case's results are f32, these are what was stored. */
static void read_stored(const layer_case *c, quern_context *ctx, const layer_store *s, int64_t first,
                        int64_t count, int64_t entry, stored *to)
{
    enum { HEADER = 152 };
    static const int results[] = {LAYER_KV, LAYER_COMPRESSED, LAYER_IDX_K};
    const int64_t tokens = first + count, size = (int64_t)quern_dtype_size(s->params.dtype),
                  kept = c->shape.window - 1 + s->params.ring,
                  entries = c->shape.kind != ORACLE_SWA ? tokens / c->shape.ratio : 0;
    double *const places[] = {to->raw, to->entries, to->keys};
    size_t bytes;
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, 0, NULL, &bytes), QUERN_OK);
    test_workspace space = test_workspace_make(bytes);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, 0, space.data, &bytes), QUERN_OK);
    const char *at = (const char *)space.data + HEADER;
    for (int k = 0; k < 3; k++) {
        const quern_dsv4_format format = k == 2 ? s->params.key_format : s->params.format;
        const int64_t width = k == 2 ? c->shape.index_dim : c->shape.dim,
                      n = k > 0           ? entries
                          : tokens < kept ? tokens
                                          : kept,
                      from = k == 0 ? n - count : entry, value = k == 0 ? first : entry,
                      row = format == QUERN_DSV4_ROWS     ? width * size
                            : format == QUERN_DSV4_ROW584 ? 584
                            : format == QUERN_DSV4_FP4    ? width / 2 + width / 32
                                                          : width + 4;
        if (c->t[results[k]].buffer == NULL) continue;
        double *values = test_tensor_get(&c->t[results[k]]);
        for (int64_t i = from; i < n; i++) {
            widen(format, s->params.dtype, width, at + i * row, places[k] + (value + i - from) * width);
            if (c->dtype == QUERN_F32)
                check_stored(format, s->params.dtype, values + (value + i - from) * width, width,
                             at + i * row, layer_case_names[results[k]]);
        }
        free(values);
        at += n * row;
    }
    test_workspace_close(&space);
}

/* The head weights of the indexer, x indexer_heads^T. */
static double *head_weights(const layer_case *c)
{
    const int64_t heads = c->shape.index_heads, width = c->shape.width;
    double *x = test_tensor_get(&c->t[LAYER_X]), *w = test_tensor_get(&c->t[LAYER_WEIGHTS + OW_INDEX_HEADS]),
           *to = test_doubles(STORED_TOKENS * heads);
    for (int64_t t = 0; t < STORED_TOKENS; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < width; i++) to[t * heads + h] += x[t * width + i] * w[h * width + i];
    free(x), free(w);
    return to;
}

/* Scores and choice by what is stored. */
static void check_choice(const layer_case *c, const stored *rows)
{
    const int64_t S = STORED_TOKENS / c->shape.ratio, k = c->shape.top_k;
    const oracle_indexer shape = {.queries = STORED_TOKENS,
                                  .heads = c->shape.index_heads,
                                  .width = c->shape.index_dim,
                                  .entries = S,
                                  .ratio = c->shape.ratio};
    double *q = test_tensor_get(&c->t[LAYER_IDX_Q]), *w = head_weights(c),
           *expected = test_doubles(STORED_TOKENS * S), *scores = test_tensor_get(&c->t[LAYER_IDX_SCORE]);
    int32_t *idx = test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]), best[8];
    oracle_dsv4_scores(&shape, q, rows->keys, w, expected);
    for (int64_t t = 0; t < STORED_TOKENS; t++) {
        const int64_t seen = oracle_dsv4_visible(S, c->shape.ratio, t);
        for (int64_t s = seen; s < S; s++) expected[t * S + s] = scores[t * S + s] = 0;
        oracle_dsv4_best(scores + t * S, seen, k, best);
        assert_memory_equal(best, idx + t * k, (size_t)k * sizeof *best);
    }
    /* A score is a sum of both signs over its heads. */
    test_check("idx_score", scores, expected, STORED_TOKENS * S, 4 * test_forward_bound(c->dtype));
    free(q), free(w), free(expected), free(scores), free(idx);
}

/* The core by what is stored, its queries and its choice. */
static void check_core(const layer_case *c, const stored *rows)
{
    const int64_t heads = c->shape.heads, n = STORED_TOKENS * heads * STORED_DIM;
    const bool csa = c->shape.kind == ORACLE_CSA, entries = c->shape.kind != ORACLE_SWA;
    const oracle_core shape = {.queries = STORED_TOKENS,
                               .raw = STORED_TOKENS,
                               .entries = entries ? STORED_TOKENS / c->shape.ratio : 0,
                               .heads = heads,
                               .dim = STORED_DIM,
                               .window = STORED_WINDOW,
                               .ratio = entries ? c->shape.ratio : 1,
                               .chosen = csa ? c->shape.top_k : -1};
    double *by_head = test_tensor_get(&c->t[LAYER_Q]), *q = test_doubles(n), *o = test_doubles(n),
           *lse = test_doubles(STORED_TOKENS * heads), *core = test_tensor_get(&c->t[LAYER_CORE]),
           *sink = test_tensor_get(&c->t[LAYER_WEIGHTS + OW_SINKS]);
    int32_t *idx = csa ? test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]) : NULL;
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < STORED_TOKENS; t++)
            memcpy(q + (t * heads + h) * STORED_DIM, by_head + (h * STORED_TOKENS + t) * STORED_DIM,
                   STORED_DIM * sizeof *q);
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
    for (int n = 0; n < 3 * LAYER_STORAGES * 2; n++) {
        const layer_storage *how = &layer_storages[n / 3 % LAYER_STORAGES];
        test_random random = {(uint64_t)n + 50};
        layer_case c = layer_storage_case(&random, (oracle_layer_kind)(n % 3),
                                          n / 3 / LAYER_STORAGES ? QUERN_BF16 : QUERN_F32);
        quern_context *ctx = test_context(test_level(n), 2);
        const quern_dsv4_layer_cache_params p = layer_storage_params(&c, how, 1);
        layer_store s = layer_store_open(&p);
        stored rows = {test_doubles(STORED_TOKENS * STORED_DIM), test_doubles(STORED_TOKENS * STORED_DIM),
                       test_doubles(STORED_TOKENS * STORED_INDEX)};
        for (int64_t at = 0; at < STORED_TOKENS;) {
            const int64_t left = STORED_TOKENS - at, most = left < KEPT_MOST ? left : KEPT_MOST,
                          count = test_random_int(&random, 1, most);
            layer_case_append(&c, ctx, &s, 0, 0, at, count);
            read_stored(&c, ctx, &s, at, count, at / c.shape.ratio, &rows);
            at += count;
            if (at < STORED_TOKENS && test_random_one_in(&random, 3)) {
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
                 {512, 128, 16, -1, QUERN_DSV4_LAYER_CSA, 0, 0, "pages is -1: 0 to"},
                 {512, 0, 0, 1, QUERN_DSV4_LAYER_SWA, 0, 0, "pages is 1: 0 to 0"}};
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
        layer_expect_error(quern_dsv4_layer_cache_size(&p, &memory, &rows), QUERN_ERR_INVALID_ARGUMENT,
                           cases[i].sentence);
        assert_int_equal(memory, 7), assert_int_equal(rows, 8);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_rows_and_what_queries_read),
        cmocka_unit_test(bad_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
