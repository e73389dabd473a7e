/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_attention_test.c - the attention core on random calls against the float64 oracle, on the golden layers; the same bits
 * for any number of threads and any order of a list; one key alone; NaN where it belongs; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_core.h"
#include "dsv4_golden.h"
#include "dsv4_layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void random_calls(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_calls", 51);
    for (int trial = 0; trial < test_trials(300); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        core_case c = core_case_random(&random);
        quern_context *ctx = test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()), (int32_t)test_random_int(&random, 1, 3));
        core_case_forward(&c, ctx);
        core_case_backward(&c, ctx);
        core_case_check(&c, true);
        quern_context_destroy(ctx);
        core_case_free(&c);
    }
}

/* The released models' heads, by one query at every level. */
static void released_shapes(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        for (int i = 0; i < 3; i++) {
            test_random random = {(uint64_t)i + 61};
            const quern_dtype dtype = i == 0 ? QUERN_F32 : QUERN_BF16;
            const oracle_core x = {.queries = 2, .raw = 130, .entries = i == 2 ? 40 : 700, .heads = i == 1 ? 128 : 64, .dim = 512, .window = 128,
                                   .ratio = i == 2 ? 128 : 4, .start = 5200, .rope_dim = 64, .chosen = i == 2 ? -1 : 512};
            const core_parts parts = {.entries = true, .list = i < 2, .sink = true, .rope = true};
            core_case c = core_case_make(&random, &x, 1, NULL, dtype, &parts);
            quern_context *ctx = test_context(level, 2);
            core_case_forward(&c, ctx);
            core_case_backward(&c, ctx);
            core_case_check(&c, true);
            quern_context_destroy(ctx);
            core_case_free(&c);
        }
    }
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 24; trial++) {
        test_random random = {(uint64_t)trial + 900};
        core_case c = core_case_random(&random);
        test_tensor first[CORE_TENSORS] = {{.buffer = NULL}};
        for (int32_t threads = 1; threads <= 5; threads++) {
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
            core_case_forward(&c, ctx);
            core_case_backward(&c, ctx);
            for (int i = CORE_O; i < CORE_TENSORS; i++) {
                if (c.t[i].buffer == NULL || i == CORE_D_O) continue;
                if (threads == 1) first[i] = test_tensor_copy(&c.t[i]);
                else assert_true(test_tensor_same_bits(&first[i], &c.t[i]));
            }
            quern_context_destroy(ctx);
        }
        for (int i = 0; i < CORE_TENSORS; i++)
            if (first[i].buffer != NULL) test_tensor_free(&first[i]);
        core_case_free(&c);
    }
}

/* A long context whose spans are tasks, token by token: the bits of all tokens in one call, and of any threads. */
static void cuts_change_no_bit(void **state)
{
    (void)state;
    for (int trial = 0; trial < 4; trial++) {
        test_random random = {(uint64_t)trial + 77};
        const oracle_core x = {.queries = 9, .raw = 1600, .entries = 3000, .heads = 5, .dim = 24, .window = trial % 2 ? 1300 : 50, .ratio = 2, .start = 5995,
                               .rope_dim = 8, .chosen = -1};
        const core_parts parts = {.entries = true, .sink = true, .rope = true};
        core_case c = core_case_make(&random, &x, 1, NULL, trial < 2 ? QUERN_BF16 : QUERN_F32, &parts);
        quern_context *one = test_context(QUERN_CPU_LEVEL_AUTO, 1), *many = test_context(QUERN_CPU_LEVEL_AUTO, 4);
        core_case_forward(&c, one);
        core_case_check(&c, false);
        test_tensor first[3];
        for (int i = 0; i < 3; i++) first[i] = test_tensor_copy(&c.t[CORE_O + i]), test_tensor_reset(&c.t[CORE_O + i]);
        for (int64_t t = 0; t < x.queries; t++) {
            core_case piece = c; /* raw rows stay where they are: later ones are not there yet */
            piece.shape.queries = 1, piece.shape.start = x.start + t;
            piece.t[CORE_KV].view.shape[1] = x.raw - x.queries + t + 1;
            for (int i = CORE_Q; i <= CORE_LSE_WIN; i++) {
                quern_tensor *view = &piece.t[i].view;
                const int dim = i >= CORE_LSE ? 2 : 1;
                if (i != CORE_Q && i < CORE_O) continue;
                view->shape[dim] = 1;
                view->data = (char *)view->data + t * view->strides[dim] * (int64_t)quern_dtype_size(view->dtype);
            }
            core_case_forward(&piece, many);
        }
        for (int i = 0; i < 3; i++) {
            assert_true(test_tensor_same_bits(&first[i], &c.t[CORE_O + i]));
            test_tensor_free(&first[i]);
        }
        quern_context_destroy(one), quern_context_destroy(many);
        core_case_free(&c);
    }
}

static void golden_layers(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        for (int i = 0; i < DSV4_LAYERS; i++) {
            dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, i);
            test_random random = {4};
            const core_parts parts = {.entries = l.kv_cmp != NULL, .list = l.idx != NULL, .sink = true, .rope = true};
            core_case c = core_case_make(&random, &l.core, DSV4_LAYER_BATCH, NULL, QUERN_F32, &parts);
            test_tensor_set(&c.t[CORE_Q], l.q), test_tensor_set(&c.t[CORE_KV], l.kv);
            if (l.kv_cmp != NULL) test_tensor_set(&c.t[CORE_KV_CMP], l.kv_cmp);
            if (l.idx != NULL) test_tensor_set_i32(&c.t[CORE_IDX], l.idx);
            test_tensor_set(&c.t[CORE_SINK], l.sink), test_tensor_set(&c.t[CORE_COS_SIN], l.cos_sin);
            quern_context *ctx = test_context(level, 2);
            core_case_forward(&c, ctx);
            double *o = test_tensor_get(&c.t[CORE_O]);
            test_check_golden(l.name, o, l.o, test_tensor_count(&c.t[CORE_O]), DSV4_TINY_BOUND);
            free(o);
            quern_context_destroy(ctx);
            core_case_free(&c);
            dsv4_layer_free(&l);
        }
    }
}

/* The order of a list, padding in it and entries that stand twice change no bit; a bad entry sets the status bit. */
static void lists_in_any_order(void **state)
{
    static const int32_t lists[][6] = {{1, 3, 4, -1, -1, -1}, {4, 1, 3, -1, -1, -1}, {-1, 3, 1, 1, 4, 3}, {1, 3, 4, 6, 5, 4}, {9, 4, -5, 3, 1, 4}};
    (void)state;
    test_random random = {5};
    const oracle_core x = {.queries = 1, .raw = 4, .entries = 7, .heads = 3, .dim = 16, .window = 4, .ratio = 4, .start = 19, .chosen = 6};
    const core_parts parts = {.entries = true, .list = true};
    core_case c = core_case_make(&random, &x, 1, NULL, QUERN_F32, &parts);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    test_tensor first[CORE_TENSORS] = {{.buffer = NULL}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        test_tensor_set_i32(&c.t[CORE_IDX], lists[i]);
        core_case_forward(&c, ctx);
        core_case_backward(&c, ctx);
        core_case_check(&c, true);
        for (int k = CORE_O; k < CORE_TENSORS; k++) {
            if (c.t[k].buffer == NULL || k == CORE_D_O) continue;
            if (i == 0) first[k] = test_tensor_copy(&c.t[k]);
            else assert_true(test_tensor_same_bits(&first[k], &c.t[k]));
        }
        const int64_t one = 1;
        int32_t word = 64;
        size_t bytes;
        const quern_tensor status = quern_tensor_contiguous(&word, QUERN_I32, 1, &one);
        quern_exec exec = QUERN_EXEC_INIT;
        exec.status = &status;
        const quern_dsv4_attention_params p = core_case_params(&c);
        const quern_dsv4_attention_tensors t = core_case_tensors(&c);
        assert_int_equal(quern_dsv4_attention_workspace(ctx, &p, &t, &bytes), QUERN_OK);
        test_workspace w = test_workspace_make(bytes);
        assert_int_equal(quern_dsv4_attention(ctx, &exec, &p, &t, w.data, bytes), QUERN_OK);
        test_workspace_close(&w);
        assert_int_equal(word, i == 4 ? 64 | QUERN_STATUS_BAD_INDEX : 64);
    }
    for (int k = 0; k < CORE_TENSORS; k++)
        if (first[k].buffer != NULL) test_tensor_free(&first[k]);
    quern_context_destroy(ctx);
    core_case_free(&c);
}

/* What is not finite reaches those that see it and nobody else. */
static void special_values(void **state)
{
    (void)state;
    for (int trial = 0; trial < 8; trial++) {
        test_random random = {(uint64_t)trial + 15};
        const oracle_core x = {.queries = 12, .raw = 12, .entries = 3, .heads = 2, .dim = 16, .window = 3, .ratio = 4, .rope_dim = 4, .chosen = -1};
        const core_parts parts = {.entries = true, .sink = true, .rope = true};
        core_case c = core_case_make(&random, &x, 1, NULL, trial % 2 ? QUERN_BF16 : QUERN_F32, &parts);
        quern_context *ctx = test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()), 2);
        core_case_forward(&c, ctx);
        double *before = test_tensor_get(&c.t[CORE_O]), *kv = test_tensor_get(&c.t[CORE_KV]), *cmp = test_tensor_get(&c.t[CORE_KV_CMP]);
        kv[5 * 16 + 3] = trial % 4 < 2 ? NAN : INFINITY; /* seen by queries 5, 6, 7 */
        if (trial >= 4) cmp[1 * 16] = NAN;               /* by queries from 7 on */
        test_tensor_set(&c.t[CORE_KV], kv), test_tensor_set(&c.t[CORE_KV_CMP], cmp);
        core_case_forward(&c, ctx);
        core_case_backward(&c, ctx);
        double *after = test_tensor_get(&c.t[CORE_O]), *d_q = test_tensor_get(&c.t[CORE_D_Q]);
        for (int64_t t = 0; t < 12; t++) {
            const bool sees = (t >= 5 && t <= 7) || (trial >= 4 && t >= 7);
            bool finite = true;
            for (int64_t i = t * 32; i < (t + 1) * 32; i++) {
                finite = finite && isfinite(after[i]);
                assert_true(sees || (after[i] == before[i] && isfinite(d_q[i])));
            }
            assert_true(finite != sees);
        }
        free(before), free(after), free(kv), free(cmp), free(d_q);
        quern_context_destroy(ctx);
        core_case_free(&c);
    }
}

static void expect_refusal(core_case *c, quern_context *ctx, const quern_dsv4_attention_params *p, const quern_dsv4_attention_tensors *t, bool backward,
                           const char *sentence)
{
    char memory[64];
    const quern_status status = backward ? quern_dsv4_attention_backward(ctx, NULL, p, t, memory, sizeof memory)
                                         : quern_dsv4_attention(ctx, NULL, p, t, memory, sizeof memory);
    assert_true(status != QUERN_OK);
    if (strstr(quern_last_error(ctx), sentence) == NULL) fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentence);
    for (int i = 0; i < CORE_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], "a tensor of a refused call");
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {13};
    const oracle_core x = {.queries = 4, .raw = 9, .entries = 3, .heads = 2, .dim = 16, .window = 5, .ratio = 4, .start = 10, .rope_dim = 8, .chosen = 2};
    const core_parts parts = {true, true, true, true, true};
    core_case c = core_case_make(&random, &x, 2, NULL, QUERN_F32, &parts);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_attention_params good = core_case_params(&c);
    const quern_dsv4_attention_tensors whole = core_case_tensors(&c);
    quern_dsv4_attention_params p = good;
    quern_dsv4_attention_tensors t = whole;
    expect_refusal(&c, ctx, &good, &whole, false, "workspace");
    p.window = -1;
    expect_refusal(&c, ctx, &p, &t, false, "window is -1");
    p = good, p.ratio = -2;
    expect_refusal(&c, ctx, &p, &t, false, "ratio is -2");
    p = good, p.start_abs_pos = 4;
    expect_refusal(&c, ctx, &p, &t, false, "query 0 stands at position 4 and raw row 0 at -1: 0 or more is accepted");
    p = good, p.start_abs_pos = 11;
    expect_refusal(&c, ctx, &p, &t, false, "the last query stands at position 14: cos_sin has positions 0 to 13");
    p = good, t.kv = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "kv is NULL");
    t = whole, t.kv_cmp = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "idx is given: it stands beside kv_cmp");
    t = whole, t.idx = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "count is given: it stands beside idx");
    t = whole, t.o = NULL;
    expect_refusal(&c, ctx, &p, &t, false, "o is NULL");
    t = whole, t.lse = NULL;
    expect_refusal(&c, ctx, &p, &t, true, "lse is NULL");
    t = whole, t.sink = NULL;
    expect_refusal(&c, ctx, &p, &t, true, "d_sink is given and sink is NULL");
    quern_tensor view = c.t[CORE_COS_SIN].view;
    view.shape[1] = 7;
    t = whole, t.cos_sin = &view;
    expect_refusal(&c, ctx, &p, &t, false, "cos_sin has 7 columns: an even number up to the 16 channels");
    view = c.t[CORE_Q].view, view.shape[3] = 12;
    t = whole, t.q = &view;
    expect_refusal(&c, ctx, &p, &t, false, "q: head dim 12");
    view = c.t[CORE_KV].view, view.shape[2] = 8;
    t = whole, t.kv = &view;
    expect_refusal(&c, ctx, &p, &t, false, "kv.shape[2] is 8: 16 is accepted");
    t = whole, t.o = t.q;
    expect_refusal(&c, ctx, &p, &t, false, "shares memory");
    const int32_t cu[] = {0, 3, 2};
    const int64_t three = 3;
    const quern_tensor falling = quern_tensor_contiguous((void *)(uintptr_t)cu, QUERN_I32, 1, &three);
    core_case packed = core_case_make(&random, &(oracle_core){.queries = 4, .raw = 4, .entries = 1, .heads = 2, .dim = 16, .window = 5, .ratio = 4,
                                                              .rope_dim = 2, .chosen = -1}, 2, (const int32_t[]){0, 1, 4}, QUERN_F32, &(core_parts){.entries = true, .rope = true});
    t = core_case_tensors(&packed), p = core_case_params(&packed);
    t.cu_seqlens = &falling;
    char memory[65536];
    assert_true(quern_dsv4_attention(ctx, NULL, &p, &t, memory, sizeof memory) != QUERN_OK);
    assert_non_null(strstr(quern_last_error(ctx), "cu_seqlens[2] is 2 after 3"));
    t = core_case_tensors(&packed);
    p.start_abs_pos = 3;
    expect_refusal(&packed, ctx, &p, &t, false, "start_abs_pos is 3 with cu_seqlens");
    core_case_free(&packed);
    quern_context_destroy(ctx);
    core_case_free(&c);
}

/* ---- caches ---- */

enum { CACHED = 3, CACHE_QUERIES = 2, CACHE_HEADS = 3, CACHE_MOST = 150, CACHE_K = 6 };

/* Rows of sequences of different lengths as values, and the same in a cache. */
typedef struct cache_case {
    quern_dtype dtype;
    bool bytes, list;
    int64_t dim, page, ratio, window, row; /* row: elements of a stored row */
    int32_t start[CACHED];
    double *raw[CACHED], *entries[CACHED];
    test_tensor q, idx, o, lse, pool[2], table[2];
} cache_case;

static int64_t cached_rows(const cache_case *c, int64_t b, int kind)
{
    return kind == 0 ? c->start[b] + CACHE_QUERIES : (c->start[b] + CACHE_QUERIES) / c->ratio;
}

/* Random values that the cache's format holds exactly; their bytes where it has bytes. */
static double *exact_rows(const cache_case *c, int64_t rows, unsigned char *bytes, test_random *random)
{
    double *values = test_doubles(rows * c->dim + 1);
    for (int64_t i = 0; i < rows * c->dim; i++) values[i] = test_round(c->dtype, test_random_normal(random) * (i / 64 % 3 == 0 ? 8 : 1));
    for (int64_t r = 0; c->bytes && r < rows; r++) {
        float row[512];
        for (int i = 0; i < 512; i++) row[i] = (float)values[r * 512 + i];
        assert_true(oracle_dsv4_quantise_row584(row, bytes + r * 584));
        oracle_dsv4_widen_row584(bytes + r * 584, values + r * 512);
    }
    return values;
}

/* Element i of row `row` of a sequence in a pool or, without pages, in [B, N, ..]. */
static unsigned char *cache_element(const cache_case *c, int kind, int64_t b, int64_t row, int64_t i)
{
    const quern_tensor *t = &c->pool[kind].view;
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    if (c->page == 0) return (unsigned char *)t->data + (b * t->strides[0] + row * t->strides[1] + i) * size;
    const quern_tensor *table = &c->table[kind].view;
    const int64_t page = ((const int32_t *)table->data)[b * table->strides[0] + row / c->page], slot = row % c->page;
    unsigned char *base = (unsigned char *)t->data + page * t->strides[0] * size;
    if (!c->bytes) return base + (slot * t->strides[1] + i) * size;
    return base + (i < 576 ? slot * 576 + i : c->page * 576 + slot * 8 + i - 576);
}

static void store_cached(const cache_case *c, int kind, int64_t b, const double *values, const unsigned char *bytes)
{
    for (int64_t r = 0; r < cached_rows(c, b, kind); r++) {
        for (int64_t i = 0; i < c->row; i++) {
            unsigned char *to = cache_element(c, kind, b, r, i);
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

/* Pages of all sequences in an order of their own; unused columns name no page. */
static void make_pool(cache_case *c, int kind, test_random *random)
{
    const quern_dtype dtype = c->bytes ? QUERN_U8 : c->dtype;
    const int64_t columns = c->page > 0 ? CACHE_MOST / c->page + 1 : 0, pages = CACHED * columns + 2;
    if (c->page == 0) {
        c->pool[kind] = test_tensor_make(random, dtype, 3, (const int64_t[]){CACHED, cached_rows(c, 0, kind), c->row}, TEST_UNALIGNED);
        return;
    }
    c->table[kind] = test_tensor_make(random, QUERN_I32, 2, (const int64_t[]){CACHED, columns}, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    int32_t *table = malloc((size_t)(CACHED * columns) * sizeof *table);
    for (int64_t i = 0; i < CACHED * columns; i++) {
        const int64_t rows = cached_rows(c, i / columns, kind), oldest = c->start[i / columns] - c->window + 1;
        const bool used = i % columns < (rows + c->page - 1) / c->page;
        table[i] = used ? (int32_t)((i * 7 + 3) % (CACHED * columns) + 1) : -9;
        if (kind == 0 && (i % columns + 1) * c->page <= oldest) table[i] = used ? table[i] : -9;
    }
    test_tensor_set_i32(&c->table[kind], table);
    free(table);
    const int64_t whole[] = {pages, c->page, c->row}, bytes[] = {pages, c->page * 584};
    c->pool[kind] = test_tensor_make(random, dtype, c->bytes ? 2 : 3, c->bytes ? bytes : whole, TEST_UNALIGNED);
}

/* Each sequence alone, from rows of values: what all of them must give from the cache, to the bit. */
static void check_cached(const cache_case *c, quern_context *ctx)
{
    double *q = test_tensor_get(&c->q), *o = test_tensor_get(&c->o), *lse = test_tensor_get(&c->lse);
    int32_t *idx = c->list ? test_tensor_get_i32(&c->idx) : NULL;
    for (int64_t b = 0; b < CACHED; b++) {
        test_random random = {1};
        const int64_t n = CACHE_QUERIES * CACHE_HEADS * c->dim;
        const oracle_core x = {.queries = CACHE_QUERIES, .raw = cached_rows(c, b, 0), .entries = cached_rows(c, b, 1), .heads = CACHE_HEADS, .dim = c->dim,
                               .window = c->window, .ratio = c->ratio, .start = c->start[b], .chosen = c->list ? CACHE_K : -1};
        core_case one = core_case_make(&random, &x, 1, NULL, c->dtype, &(core_parts){.entries = true, .list = c->list});
        test_tensor_set(&one.t[CORE_Q], q + b * n), test_tensor_set(&one.t[CORE_KV], c->raw[b]), test_tensor_set(&one.t[CORE_KV_CMP], c->entries[b]);
        if (c->list) test_tensor_set_i32(&one.t[CORE_IDX], idx + b * CACHE_QUERIES * CACHE_K);
        core_case_forward(&one, ctx);
        core_case_check(&one, false);
        double *expected = test_tensor_get(&one.t[CORE_O]), *expected_lse = test_tensor_get(&one.t[CORE_LSE]);
        assert_memory_equal(expected, o + b * n, (size_t)n * sizeof *o);
        assert_memory_equal(expected_lse, lse + b * CACHE_QUERIES * CACHE_HEADS, CACHE_QUERIES * CACHE_HEADS * sizeof *lse);
        free(expected), free(expected_lse);
        core_case_free(&one);
    }
    free(q), free(o), free(lse), free(idx);
}

static quern_dsv4_attention_params cache_params(const cache_case *c)
{
    quern_dsv4_attention_params p = QUERN_DSV4_ATTENTION_PARAMS_INIT;
    p.ratio = c->ratio, p.window = c->window, p.page = c->page, p.start_abs_pos = c->page == 0 ? -1 : c->start[0];
    p.format = c->bytes ? QUERN_DSV4_ROW584 : QUERN_DSV4_ROWS;
    return p;
}

static cache_case cache_make(test_random *random, int trial)
{
    static const int64_t pages[] = {0, 1, 16, 64, 5};
    cache_case c = {.dtype = trial % 2 ? QUERN_BF16 : QUERN_F32, .bytes = trial / 2 % 2, .list = trial / 4 % 2, .page = pages[trial % 5], .ratio = 3, .window = 7};
    c.dim = c.bytes ? 512 : 24, c.row = c.bytes ? 584 : c.dim;
    for (int64_t b = 0; b < CACHED; b++) c.start[b] = c.page == 0 ? 40 : (int32_t)test_random_int(random, 0, CACHE_MOST - CACHE_QUERIES);
    const int64_t q[] = {CACHED, CACHE_QUERIES, CACHE_HEADS, c.dim}, idx[] = {CACHED, CACHE_QUERIES, CACHE_K}, lse[] = {CACHED, CACHE_HEADS, CACHE_QUERIES};
    c.q = test_tensor_make(random, c.dtype, 4, q, TEST_STRIDED);
    c.o = test_tensor_make(random, c.dtype, 4, q, TEST_STRIDED);
    c.lse = test_tensor_make(random, QUERN_F32, 3, lse, TEST_CONTIGUOUS);
    c.idx = test_tensor_make(random, QUERN_I32, 3, idx, TEST_CONTIGUOUS);
    test_tensor_normal(&c.q, random, 1);
    int32_t list[CACHED * CACHE_QUERIES * CACHE_K];
    for (int i = 0; i < CACHED * CACHE_QUERIES * CACHE_K; i++) list[i] = (int32_t)test_random_int(random, -1, 12);
    test_tensor_set_i32(&c.idx, list);
    for (int kind = 0; kind < 2; kind++) {
        make_pool(&c, kind, random);
        for (int64_t b = 0; b < CACHED; b++) {
            unsigned char *bytes = malloc((size_t)(cached_rows(&c, b, kind) * 584 + 1));
            double *values = exact_rows(&c, cached_rows(&c, b, kind), bytes, random);
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
    for (int64_t b = 0; b < CACHED; b++) free(c->raw[b]), free(c->entries[b]);
    test_tensor_free(&c->q), test_tensor_free(&c->o), test_tensor_free(&c->lse), test_tensor_free(&c->idx);
}

static quern_dsv4_attention_tensors cache_tensors(const cache_case *c, const quern_tensor *starts)
{
    quern_dsv4_attention_tensors t = QUERN_DSV4_ATTENTION_TENSORS_INIT;
    t.q = &c->q.view, t.kv = &c->pool[0].view, t.kv_cmp = &c->pool[1].view, t.o = &c->o.view, t.lse = &c->lse.view;
    t.idx = c->list ? &c->idx.view : NULL;
    if (c->page == 0) return t;
    t.start_positions = starts, t.kv_table = &c->table[0].view, t.kv_cmp_table = &c->table[1].view;
    return t;
}

static void caches_change_no_bit(void **state)
{
    static const int64_t batch = CACHED;
    (void)state;
    for (int trial = 0; trial < 40; trial++) {
        test_random random = {(uint64_t)trial + 333};
        cache_case c = cache_make(&random, trial);
        quern_context *ctx = test_context((quern_cpu_level)test_random_int(&random, 1, quern_cpu_level_detect()), 2);
        const quern_dsv4_attention_params p = cache_params(&c);
        const quern_tensor starts = quern_tensor_contiguous(c.start, QUERN_I32, 1, &batch);
        const quern_dsv4_attention_tensors t = cache_tensors(&c, &starts);
        size_t bytes;
        if (quern_dsv4_attention_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        test_workspace w = test_workspace_make(bytes);
        if (quern_dsv4_attention(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK) fail_msg("trial %d: %s", trial, quern_last_error(ctx));
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
    } cases[] = {{"kv_table has 10 columns: sequence 1 needs", 0}, {"kv_cmp_table[", 1},  {"start_abs_pos is -1 with pages", 2},
                 {"kv_table is NULL", 3},                          {"kv has 3 dimensions: 2", 4}, {"kv: dtype f32: u8 is accepted", 5},
                 {"the backward takes rows and 0", 6},             {"format is fp8: rows and row584", 7}, {"query 0 stands at position -4", 8},
                 {"kv_table is given: it stands beside a page", 9}, {"takes 512", 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quern_dsv4_attention_params p = good;
        quern_dsv4_attention_tensors t = whole;
        const int32_t start = c.start[1];
        quern_tensor view = c.pool[0].view, q = c.q.view, o = c.o.view;
        int32_t *page = &((int32_t *)c.table[1].view.data)[1 * c.table[1].view.strides[0]];
        const int32_t named = *page;
        if (cases[i].kind == 0) c.start[1] = 5000;
        if (cases[i].kind == 1) c.start[1] = 60, *page = 1000;
        if (cases[i].kind == 2) t.start_positions = NULL, p.start_abs_pos = -1;
        if (cases[i].kind == 3) t.kv_table = NULL;
        if (cases[i].kind == 4) view.ndim = 3, view.shape[2] = 1, view.strides[2] = 1, t.kv = &view;
        if (cases[i].kind == 5) view.dtype = QUERN_F32, t.kv = &view;
        if (cases[i].kind == 7) p.format = QUERN_DSV4_FP8;
        if (cases[i].kind == 8) c.start[1] = -4;
        if (cases[i].kind == 9) p.page = 0, p.format = QUERN_DSV4_ROWS, t.kv = t.q;
        if (cases[i].kind == 10) q.shape[3] = o.shape[3] = 256, t.q = &q, t.o = &o;
        if (cases[i].kind == 9) view.ndim = 3, view.dtype = QUERN_F32, view.shape[0] = CACHED, view.shape[1] = 4, view.shape[2] = 512, view.strides[2] = 1, t.kv = &view;
        if (cases[i].kind == 9) t.kv_cmp = NULL, t.idx = NULL, t.kv_cmp_table = NULL;
        const quern_status status = cases[i].kind == 6 ? quern_dsv4_attention_backward(ctx, NULL, &p, &t, memory, bytes)
                                                       : quern_dsv4_attention(ctx, NULL, &p, &t, memory, bytes);
        assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), cases[i].sentence) == NULL) fail_msg("'%s' does not say '%s'", quern_last_error(ctx), cases[i].sentence);
        test_tensor_check_unchanged(&c.o, "o of a refused call");
        c.start[1] = start, *page = named;
    }
    free(memory);
    quern_context_destroy(ctx);
    cache_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls),  cmocka_unit_test(released_shapes),    cmocka_unit_test(threads_change_no_bit),
                                       cmocka_unit_test(cuts_change_no_bit), cmocka_unit_test(golden_layers), cmocka_unit_test(lists_in_any_order),
                                       cmocka_unit_test(special_values), cmocka_unit_test(refusals),
                                       cmocka_unit_test(caches_change_no_bit), cmocka_unit_test(bad_caches_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
