/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_float_state_test.c - compressors, states, indexer, core, rows and layers under every floating-point
 * state that a caller may have set: the bits are those of the default one, which comes back as it was.
 */
#include "cmocka_c11.h"
#include "dsv4_case.h"
#include "dsv4_core.h"
#include "dsv4_index_case.h"
#include "dsv4_layer_case.h"
#include "dsv4_states.h"
#include "float_states.h"
#include "op_case.h"

#include <stdlib.h>

enum { CASES = 6 };

/* A call, bound before the state changes. */
typedef struct bound {
    const char *op;
    quern_dsv4_compress_params params;
    quern_dsv4_compress_tensors tensors;
} bound;

static void compress(void *arg, quern_context *ctx)
{
    const bound *b = arg;
    op_case_call(ctx, b->op, QUERN_OP_FORWARD, &b->params, &b->tensors);
    op_case_call(ctx, b->op, QUERN_OP_BACKWARD, &b->params, &b->tensors);
}

static void compressors_keep_the_callers_state(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < CASES; seed++) {
        test_random random = {300 + seed};
        dsv4_case c = dsv4_case_random(&random);
        bound b = {c.shape.overlap ? "csa-compress" : "hca-compress", dsv4_case_params(&c),
                   dsv4_case_tensors(&c)};
        test_float_case f = {.name = "compress", .call = compress, .arg = &b};
        for (int i = 0; i < DSV4_TENSORS; i++) f.t[i] = &c.t[i];
        test_float_scale(&c.t[c.in > 0 ? DSV4_X : DSV4_PROJ]);
        test_float_case_check(&f);
        dsv4_case_free(&c);
    }
}

/* Tokens that go to a new state, piece by piece. */
typedef struct stream {
    quern_dsv4_compress_params params;
    test_tensor x, w, b_a, b_b, norm_weight, cos_sin, out;
} stream;
enum { WIDTH = 32, HIDDEN = 24, TOKENS = 21, RATIO = 4, RING = 3 };

static void run_stream(void *arg, quern_context *ctx)
{
    stream *s = arg;
    const int32_t slot = 0;
    dsv4_states states = dsv4_states_make(&s->params, WIDTH, RING, 1);
    int64_t done = 0;
    for (int64_t n = 1; done < TOKENS; n += 2) {
        const int64_t count = n < TOKENS - done ? n : TOKENS - done;
        quern_tensor x = s->x.view, out = s->out.view;
        x.data = (char *)x.data + done * x.strides[0] * (int64_t)quern_dtype_size(x.dtype);
        x.shape[0] = count;
        out.data = (char *)out.data + done / RATIO * out.strides[0] * (int64_t)sizeof(float);
        out.shape[0] = count / RATIO + 1;
        quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
        t.x = &x;
        t.w = &s->w.view;
        t.b_a = &s->b_a.view;
        t.b_b = &s->b_b.view;
        t.norm_weight = &s->norm_weight.view;
        t.cos_sin = &s->cos_sin.view;
        t.out = &out;
        assert_int_equal(dsv4_states_append(&states, ctx, &slot, &count, 1, &t), QUERN_OK);
        done += count;
    }
    dsv4_states_free(&states);
}

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t =
        test_tensor_make(random, dtype, rows > 0 ? 2 : 1, rows > 0 ? shape : shape + 1, TEST_CONTIGUOUS);
    test_tensor_normal(&t, random, 1);
    return t;
}

static void appends_keep_the_callers_state(void **state)
{
    (void)state;
    test_random random = {41};
    stream s = {.params = QUERN_DSV4_COMPRESS_PARAMS_INIT,
                .x = matrix(&random, QUERN_BF16, TOKENS, HIDDEN),
                .w = matrix(&random, QUERN_F32, HIDDEN, 4 * WIDTH),
                .b_a = matrix(&random, QUERN_F32, RATIO, WIDTH),
                .b_b = matrix(&random, QUERN_F32, RATIO, WIDTH),
                .norm_weight = matrix(&random, QUERN_F32, 0, WIDTH),
                .cos_sin = matrix(&random, QUERN_F32, TOKENS, 8),
                .out = matrix(&random, QUERN_F32, TOKENS / RATIO + 1, WIDTH)};
    test_float_scale(&s.x);
    test_float_scale(&s.norm_weight);
    test_float_case f = {.name = "append",
                         .call = run_stream,
                         .arg = &s,
                         .t = {&s.x, &s.w, &s.b_a, &s.b_b, &s.norm_weight, &s.cos_sin, &s.out}};
    test_float_case_check(&f);
    for (int i = 0; f.t[i] != NULL; i++) test_tensor_free(f.t[i]);
}

static void index_keys(void *arg, quern_context *ctx)
{
    index_case_run(arg, ctx);
}

static void the_indexer_keeps_the_callers_state(void **state)
{
    static const quern_dsv4_format formats[] = {QUERN_DSV4_ROWS, QUERN_DSV4_FP8, QUERN_DSV4_FP4};
    const oracle_indexer shape = {
        .ratio = 2, .heads = 5, .width = 32, .queries = 9, .entries = 11, .start = 13};
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int d = 0; d < 2; d++) {
            test_random random = {(uint64_t)(50 + i)};
            const quern_dtype dtype = d == 0 ? QUERN_F32 : QUERN_BF16;
            index_case c = index_case_make(&random, &shape, 2, 4, formats[i], dtype, dtype, true);
            test_float_case f = {.name = "index", .call = index_keys, .arg = &c};
            for (int t = 0; t < INDEX_TENSORS; t++) f.t[t] = &c.t[t];
            test_float_scale(&c.t[INDEX_Q]);
            test_float_case_check(&f);
            index_case_free(&c);
        }
}

static void attend(void *arg, quern_context *ctx)
{
    core_case_forward(arg, ctx);
    core_case_backward(arg, ctx);
}

static void the_core_keeps_the_callers_state(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < CASES; seed++) {
        test_random random = {400 + seed};
        core_case c = core_case_random(&random);
        test_float_case f = {.name = "attention", .call = attend, .arg = &c};
        for (int i = 0; i < CORE_TENSORS; i++) f.t[i] = &c.t[i];
        test_float_scale(&c.t[CORE_KV]);
        test_float_case_check(&f);
        core_case_free(&c);
    }
}

/* Rows that go to a cache. */
typedef struct rows {
    quern_dsv4_format format;
    test_tensor x, slots, cache;
} rows;

static void store(void *arg, quern_context *ctx)
{
    const rows *r = arg;
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    size_t bytes;
    p.format = r->format;
    t.x = &r->x.view;
    t.slots = &r->slots.view;
    t.cache = &r->cache.view;
    assert_int_equal(quern_dsv4_store_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(quern_dsv4_store(ctx, NULL, &p, &t, w.data, bytes), QUERN_OK);
    test_workspace_close(&w);
}

static void stored_rows_keep_the_callers_state(void **state)
{
    enum { ROWS = 5 };
    static const struct {
        quern_dsv4_format format;
        quern_dtype dtype;
        int64_t width, columns;
    } kinds[] = {{QUERN_DSV4_ROWS, QUERN_BF16, 24, 24},
                 {QUERN_DSV4_FP8, QUERN_U8, 64, 68},
                 {QUERN_DSV4_FP4, QUERN_U8, 64, 34},
                 {QUERN_DSV4_ROW584, QUERN_U8, 512, 584}};
    const int64_t count = ROWS;
    const int32_t slots[ROWS] = {4, 0, 3, 1, 2};
    (void)state;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        test_random random = {60 + i};
        const int64_t shape[] = {ROWS, kinds[i].columns};
        rows r = {.format = kinds[i].format,
                  .x = matrix(&random, QUERN_F32, ROWS, kinds[i].width),
                  .slots = test_tensor_make(&random, QUERN_I32, 1, &count, TEST_CONTIGUOUS),
                  .cache = test_tensor_make(&random, kinds[i].dtype, 2, shape, TEST_CONTIGUOUS)};
        test_tensor_set_i32(&r.slots, slots);
        test_float_scale(&r.x);
        test_float_case f = {.name = "store", .call = store, .arg = &r, .t = {&r.x, &r.slots, &r.cache}};
        test_float_case_check(&f);
        test_tensor_free(&r.x), test_tensor_free(&r.slots), test_tensor_free(&r.cache);
    }
}

static void whole_layer(void *arg, quern_context *ctx)
{
    layer_case_forward(arg, ctx);
    layer_case_backward(arg, ctx);
}

/* Every sequence through a cache, some tokens a call. */
static void decode_layer(void *arg, quern_context *ctx)
{
    const layer_case *c = arg;
    layer_store s = layer_store_make(c, c->batch, 2);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t at = 0, n = 1; at < c->shape.tokens; at += n, n = n % 4 + 1) {
            if (n > c->shape.tokens - at) n = c->shape.tokens - at;
            layer_case_append(c, ctx, &s, b, b, at, n);
        }
    layer_store_close(&s);
}

static void layers_keep_the_callers_state(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < CASES; seed++) {
        test_random random = {500 + seed};
        layer_case c = layer_case_random(&random, false);
        test_float_case f = {.name = "layer", .call = whole_layer, .arg = &c};
        for (int i = 0; i < LAYER_TENSORS; i++) f.t[i] = &c.t[i];
        test_float_scale(&c.t[LAYER_X]);
        test_float_scale(&c.t[LAYER_WEIGHTS + OW_KV_NORM]);
        test_float_case_check(&f);
        f.name = "layer decode";
        f.call = decode_layer;
        for (int i = 0; i < LAYER_TENSORS; i++)
            if (c.t[i].buffer != NULL && i >= LAYER_OUT) test_tensor_reset(&c.t[i]);
        test_float_case_check(&f);
        layer_case_free(&c);
    }
}

/* A table, and a weight from its parts. */
typedef struct tables {
    test_tensor table, part, bias, w, b_a;
} tables;

static void make_tables(void *arg, quern_context *ctx)
{
    const tables *t = arg;
    quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
    (void)ctx;
    p.base = 160000;
    p.factor = 16;
    p.original_length = 65536;
    p.beta_fast = 32;
    p.beta_slow = 1;
    assert_int_equal(quern_dsv4_rope_table(&p, &t->table.view), QUERN_OK);
    assert_int_equal(quern_dsv4_pack_checkpoint(QUERN_DSV4_HCA, &t->part.view, &t->part.view, &t->bias.view,
                                                &t->w.view, &t->b_a.view, NULL),
                     QUERN_OK);
}

static void tables_keep_the_callers_state(void **state)
{
    (void)state;
    test_random random = {71};
    tables t = {.table = matrix(&random, QUERN_F32, 300, 64),
                .part = matrix(&random, QUERN_F32, WIDTH, HIDDEN),
                .bias = matrix(&random, QUERN_F32, RATIO, WIDTH),
                .w = matrix(&random, QUERN_BF16, HIDDEN, 2 * WIDTH),
                .b_a = matrix(&random, QUERN_BF16, RATIO, WIDTH)};
    test_float_scale(&t.part);
    test_float_case f = {
        .name = "tables", .call = make_tables, .arg = &t, .t = {&t.table, &t.part, &t.bias, &t.w, &t.b_a}};
    test_float_case_check(&f);
    for (int i = 0; f.t[i] != NULL; i++) test_tensor_free(f.t[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compressors_keep_the_callers_state),
        cmocka_unit_test(appends_keep_the_callers_state),
        cmocka_unit_test(the_indexer_keeps_the_callers_state),
        cmocka_unit_test(the_core_keeps_the_callers_state),
        cmocka_unit_test(stored_rows_keep_the_callers_state),
        cmocka_unit_test(layers_keep_the_callers_state),
        cmocka_unit_test(tables_keep_the_callers_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
