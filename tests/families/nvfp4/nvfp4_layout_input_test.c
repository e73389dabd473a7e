/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_layout_input_test.c - conversions between layouts by their description: the extents of results,
 * plans, several tensors at once, and what swizzle, interleave and prepack refuse. */
#include "cmocka_c11.h"
#include "context.h"
#include "levels.h"
#include "nvfp4_case.h"

#include <quern/moe.h>
#include <quern/op.h>

#include <stdio.h>
#include <string.h>

enum { ROOM = 4096, SENTINEL = 0x77 };

/* What a call reads, and what it writes: SENTINEL before each call. */
static uint8_t in[ROOM] __attribute__((aligned(64))), out[ROOM] __attribute__((aligned(64)));

static quern_tensor bytes_of(void *data, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};
    return quern_tensor_contiguous(data, QUERN_U8, ndim, shape);
}

static quern_tensor ints_of(int32_t *data, int64_t count)
{
    return quern_tensor_contiguous(data, QUERN_I32, 1, &count);
}

/* The call was refused by a sentence with `words`; nothing was written. */
static void refused(quern_status status, quern_status code, const char *words)
{
    if (status != code) fail_msg("\"%s\": status %d: %s", words, (int)status, quern_last_error(ctx));
    if (strstr(quern_last_error(ctx), words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words);
    for (int i = 0; i < ROOM; i++) assert_int_equal(out[i], SENTINEL);
}

static void fill(void)
{
    for (int i = 0; i < ROOM; i++) in[i] = (uint8_t)(i * 31 % 127);
    memset(out, SENTINEL, sizeof out);
}

/* ---- swizzle ---- */

typedef struct swizzle_case {
    quern_nvfp4_swizzle_params params;
    quern_tensor linear, swizzled, tokens, pads;
    quern_nvfp4_swizzle_tensors tensors;
    int32_t counts[3], starts[4];
} swizzle_case;

/* Scales [6, 5] of experts with 1, 0 and 4 rows; a row is left over. */
static void make_swizzle(swizzle_case *c, bool experts)
{
    *c = (swizzle_case){.params = QUERN_NVFP4_SWIZZLE_PARAMS_INIT,
                        .linear = bytes_of(in, 2, 6, 5, 0),
                        .swizzled = bytes_of(out, 1, experts ? 2048 : 1024, 0, 0),
                        .tensors = QUERN_NVFP4_SWIZZLE_TENSORS_INIT,
                        .counts = {1, 0, 4}};
    c->tokens = ints_of(c->counts, 3);
    c->pads = ints_of(c->starts, 4);
    c->params.experts = experts;
    c->tensors.linear = &c->linear;
    c->tensors.swizzled = &c->swizzled;
    if (experts) {
        c->tensors.tokens_per_expert = &c->tokens;
        c->tensors.pad_row_offsets = &c->pads;
    }
    fill();
}

static quern_status swizzle(const swizzle_case *c)
{
    return quern_nvfp4_swizzle(ctx, NULL, &c->params, &c->tensors, NULL, 0);
}

static void swizzle_refuses(void **state)
{
    const quern_status bad = QUERN_ERR_INVALID_ARGUMENT;
    static const struct {
        bool experts;
        const char *words;
    } cases[] = {{false, "linear is NULL: a tensor is needed"},
                 {false, "swizzled is NULL: a tensor is needed"},
                 {false, "linear: dtype f32: u8 or e4m3 is accepted"},
                 {false, "linear has 1 dimensions: 2 are accepted"},
                 {false, "swizzled.shape[0] is 1023: 1024 is accepted"},
                 {false, "swizzled has 2 dimensions: 1 are accepted"},
                 {false, "pad_row_offsets is given without experts"},
                 {false, "swizzled shares memory with linear"},
                 {false, "linear.strides[1] is 2: 1 is accepted"},
                 {false, "scales of 2305843009213693952 rows: tiles of at most 2^63 - 1 bytes"},
                 {true, "tokens_per_expert is NULL: a tensor is needed with experts"},
                 {true, "tokens_per_expert[1] is -1: 0 to the 5 rows that are left is accepted"},
                 {true, "tokens_per_expert[2] is 6: 0 to the 5 rows that are left is accepted"},
                 {true, "swizzled.shape[0] is 2047: at least the 2048 bytes of the experts' tiles"},
                 {true, "pad_row_offsets.shape[0] is 3: 4 is accepted"},
                 {true, "experts is true with weight"},
                 {true, "tokens_per_expert: dtype u8: i32 is accepted"},
                 {true, "pad_row_offsets is given with inverse"}};
    swizzle_case c;
    (void)state;
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        make_swizzle(&c, cases[i].experts);
        switch (i) {
        case 0: c.tensors.linear = NULL; break;
        case 1: c.tensors.swizzled = NULL; break;
        case 2: c.linear.dtype = QUERN_F32; break;
        case 3: c.linear.ndim = 1; break;
        case 4: c.swizzled.shape[0] = 1023; break;
        case 5: c.swizzled = bytes_of(out, 2, 2, 512, 0); break;
        case 6: c.tensors.pad_row_offsets = &c.pads; break;
        case 7: c.linear.data = out + 1000; break;
        case 8: c.linear.strides[1] = 2; break;
        case 9: /* rows that share their bytes */
            c.linear.shape[0] = (int64_t)1 << 61;
            c.linear.shape[1] = 1;
            c.linear.strides[0] = 0;
            break;
        case 10: c.tensors.tokens_per_expert = NULL; break;
        case 11: c.counts[1] = -1; break;
        case 12: c.counts[2] = 6; break;
        case 13: c.swizzled.shape[0] = 2047; break;
        case 14: c.pads.shape[0] = 3; break;
        case 15: c.params.weight = true; break;
        case 16: c.tokens.dtype = QUERN_U8; break;
        default: c.params.inverse = true; break;
        }
        refused(swizzle(&c), bad, cases[i].words);
    }
    make_swizzle(&c, false);
    refused(quern_nvfp4_swizzle(NULL, NULL, &c.params, &c.tensors, NULL, 0), bad, "ctx is NULL");
    refused(quern_nvfp4_swizzle(ctx, NULL, NULL, &c.tensors, NULL, 0), bad, "params is NULL");
    refused(quern_nvfp4_swizzle_workspace(ctx, &c.params, &c.tensors, NULL), bad, "bytes is NULL");
}

/* Experts' rows against the oracle's places, and back. */
static void swizzled_rows_of_experts(void **state)
{
    swizzle_case c;
    uint8_t back[30];
    (void)state;
    make_swizzle(&c, true);
    assert_int_equal(swizzle(&c), QUERN_OK);
    for (int e = 0, row = 0; e < 3; e++)
        for (int r = 0; r < c.counts[e]; r++, row++)
            for (int k = 0; k < 5; k++)
                assert_int_equal(out[(e == 2 ? 1024 : 0) + oracle_swizzled_at(r, k, 5)], in[5 * row + k]);
    const int32_t starts[] = {0, 128, 128, 256};
    assert_memory_equal(c.starts, starts, sizeof starts);
    c.params.inverse = true;
    c.linear.data = back;
    c.tensors.pad_row_offsets = NULL;
    assert_int_equal(swizzle(&c), QUERN_OK);
    assert_memory_equal(back, in, 25);
    for (int i = 25; i < 30; i++) assert_int_equal(back[i], 0);
}

/* ---- interleave ---- */

typedef struct interleave_case {
    quern_nvfp4_interleave_params params;
    quern_tensor x, out;
    quern_nvfp4_interleave_tensors tensors;
} interleave_case;

/* x [2, 20] in runs of 4: gate and up of 10 columns become 12 each. */
static void make_interleave(interleave_case *c)
{
    *c = (interleave_case){.params = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT,
                           .x = bytes_of(in, 2, 2, 20, 0),
                           .out = bytes_of(out, 2, 2, 24, 0),
                           .tensors = QUERN_NVFP4_INTERLEAVE_TENSORS_INIT};
    c->params.granularity = 4;
    c->tensors.x = &c->x;
    c->tensors.out = &c->out;
    fill();
}

static quern_status interleave(const interleave_case *c)
{
    return quern_nvfp4_interleave(ctx, NULL, &c->params, &c->tensors, NULL, 0);
}

static void interleave_refuses(void **state)
{
    const quern_status bad = QUERN_ERR_INVALID_ARGUMENT;
    static const char *const words[] = {"x, codes, scales and bias are NULL: at least one is needed",
                                        "out is NULL: a tensor is needed",
                                        "out is given without x: both or neither are accepted",
                                        "granularity is 0: 1 to 2147483647 is accepted",
                                        "x.shape[1] is 19: gate and up side by side, an even extent",
                                        "out.shape[1] is 20: 24 is accepted",
                                        "out: dtype e4m3: u8 is accepted",
                                        "x: dtype i32:",
                                        "x has 0 dimensions: 1 to 6 are accepted",
                                        "out.shape[0] is 3: 2 is accepted",
                                        "x.shape[1] is 20: whole runs of 4, here 24 columns, are accepted",
                                        "out shares memory with x",
                                        "codes_out is NULL",
                                        "codes.shape[0] is 19",
                                        "bias_out is given without bias"};
    (void)state;
    for (int i = 0; i < (int)(sizeof words / sizeof *words); i++) {
        interleave_case c;
        quern_tensor odd = bytes_of(in, 1, 19, 0, 0);
        make_interleave(&c);
        switch (i) {
        case 0: c.tensors.x = c.tensors.out = NULL; break;
        case 1: c.tensors.out = NULL; break;
        case 2:
            c.tensors.x = NULL;
            c.tensors.codes = c.tensors.codes_out = &odd;
            break;
        case 3: c.params.granularity = 0; break;
        case 4: c.x.shape[1] = 19; break;
        case 5: c.out.shape[1] = 20; break;
        case 6: c.out.dtype = QUERN_E4M3; break;
        case 7: c.x.dtype = QUERN_I32; break;
        case 8: c.x.ndim = 0; break;
        case 9: c.out.shape[0] = 3; break;
        case 10: c.params.inverse = true; break; /* runs of 24 make halves of 20 */
        case 11: c.x.data = out + 8; break;
        case 12: c.tensors.codes = &c.x; break;
        case 13: c.tensors.codes = c.tensors.codes_out = &odd; break;
        default: c.tensors.bias_out = &c.out; break;
        }
        refused(interleave(&c), bad, words[i]);
    }
}

/* Codes, scales and a bias of three dtypes and ranks in one call, against the oracle's places. */
static void a_call_takes_a_whole_weight(void **state)
{
    enum { I = 10, RUNS = 12, Q = 4 };
    static const struct {
        quern_dtype dtype;
        int32_t ndim;
        int64_t rows;
    } parts[] = {{QUERN_U8, 3, 6}, {QUERN_E4M3, 3, 2}, {QUERN_BF16, 2, 1}, {QUERN_F32, 1, 1}};
    quern_nvfp4_interleave_params p = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
    quern_nvfp4_interleave_tensors t = QUERN_NVFP4_INTERLEAVE_TENSORS_INIT;
    quern_tensor from[4], to[4];
    (void)state;
    fill();
    p.granularity = Q;
    for (int i = 0; i < 4; i++) {
        const int64_t rows = parts[i].rows, shapes[][3] = {{2 * I}, {1, 2 * I}, {1, rows, 2 * I}};
        from[i] =
            quern_tensor_contiguous(in + 512 * i, parts[i].dtype, parts[i].ndim, shapes[parts[i].ndim - 1]);
        to[i] =
            quern_tensor_contiguous(out + 512 * i, parts[i].dtype, parts[i].ndim, shapes[parts[i].ndim - 1]);
        to[i].shape[parts[i].ndim - 1] = 2 * RUNS;
        for (int32_t k = 0; k + 1 < parts[i].ndim; k++)
            to[i].strides[k] = to[i].strides[k] / (2 * I) * (2 * RUNS);
    }
    t.codes = &from[0];
    t.codes_out = &to[0];
    t.scales = &from[1];
    t.scales_out = &to[1];
    t.bias = &from[2];
    t.bias_out = &to[2];
    t.x = &from[3];
    t.out = &to[3];
    assert_int_equal(quern_nvfp4_interleave(ctx, NULL, &p, &t, NULL, 0), QUERN_OK);
    for (int i = 0; i < 4; i++) {
        const size_t size = quern_dtype_size(parts[i].dtype);
        static const uint8_t zero[4];
        for (int64_t r = 0; r < parts[i].rows; r++)
            for (int part = 0; part < 2; part++)
                for (int64_t column = 0; column < RUNS; column++) {
                    const int64_t at = 2 * RUNS * r + oracle_interleaved_at(column, part, Q);
                    const uint8_t *expected =
                        column < I ? in + 512 * i + (size_t)(2 * I * r + I * part + column) * size : zero;
                    assert_memory_equal(out + 512 * i + (size_t)at * size, expected, size);
                }
        assert_int_equal(out[512 * i + (size_t)(2 * RUNS * parts[i].rows) * size], SENTINEL);
    }
}

/* ---- prepack ---- */

typedef struct prepack_case {
    quern_moe_prepack_params params;
    quern_tensor codes, scales, repacked;
    quern_moe_prepack_tensors tensors;
} prepack_case;

/* One weight [32, 10]. */
static void make_prepack(prepack_case *c)
{
    *c = (prepack_case){.params = QUERN_MOE_PREPACK_PARAMS_INIT,
                        .codes = bytes_of(in, 3, 1, 16, 10),
                        .scales = bytes_of(in + 1024, 3, 1, 2, 10),
                        .repacked = bytes_of(out, 2, 1, test_repacked_bytes(10, 32), 0),
                        .tensors = QUERN_MOE_PREPACK_TENSORS_INIT};
    c->tensors.b_codes = &c->codes;
    c->tensors.b_scales = &c->scales;
    c->tensors.b_repacked = &c->repacked;
    fill();
}

static quern_status prepack(const prepack_case *c)
{
    return quern_moe_prepack(ctx, NULL, &c->params, &c->tensors, NULL, 0);
}

static void prepack_refuses(void **state)
{
    const quern_status bad = QUERN_ERR_INVALID_ARGUMENT;
    static const char *const words[] = {"b_codes is NULL",
                                        "b_scales is NULL",
                                        "b_repacked is NULL",
                                        "b_codes has 2 dimensions: 3 are accepted",
                                        "b_codes: dtype e4m3: u8 or e2m1x2 is accepted",
                                        "b_codes hold K = 2 x 12, N = 10: K a multiple of 16",
                                        "b_scales.shape[1] is 3: 2 is accepted",
                                        "b_repacked.shape[1] is 2303: 2304 is accepted",
                                        "b_codes is 2: 0 to 1 is accepted",
                                        "b_scales is 3: 0 to 2 is accepted",
                                        "b_scales is 2 with inverse: 0 (linear) or 1 (k_major)",
                                        "b_scales[11] is the scale byte 0x7F",
                                        "b_scales.shape[1] is 2: 10 is accepted",
                                        "b_scales has 3 dimensions: 2 are accepted"};
    (void)state;
    for (int i = 0; i < (int)(sizeof words / sizeof *words); i++) {
        prepack_case c;
        make_prepack(&c);
        switch (i) {
        case 0: c.tensors.b_codes = NULL; break;
        case 1: c.tensors.b_scales = NULL; break;
        case 2: c.tensors.b_repacked = NULL; break;
        case 3: c.codes.ndim = 2; break;
        case 4: c.codes.dtype = QUERN_E4M3; break;
        case 5: c.codes.shape[1] = 12; break;
        case 6: c.scales.shape[1] = 3; break;
        case 7: c.repacked.shape[1]--; break;
        case 8: c.params.b_codes = (quern_nvfp4_codes_layout)2; break;
        case 9: c.params.b_scales = (quern_nvfp4_scales_layout)3; break;
        case 10:
            c.params.inverse = true;
            c.params.b_scales = QUERN_NVFP4_LAYOUT_SWIZZLED;
            break;
        case 11: in[1024 + 11] = 0x7F; break;
        case 12: c.params.b_scales = QUERN_NVFP4_LAYOUT_K_MAJOR; break;
        default: c.params.b_scales = QUERN_NVFP4_LAYOUT_SWIZZLED; break;
        }
        refused(prepack(&c), bad, words[i]);
    }
}

/* ---- by description ---- */

/* The shape that a result is to have: "2 2048" */
static void expect_shape(const char *name, const void *params, const void *tensors, const int64_t *asked,
                         int32_t tensor, const char *shape)
{
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    char text[80] = "";
    const quern_op *op = quern_op_named(name);
    assert_non_null(op);
    if (quern_op_expect(op, QUERN_OP_FORWARD, params, tensors, asked, expected) != QUERN_OK)
        fail_msg("%s: %s", name, quern_last_error(ctx));
    for (int32_t i = 0; i < expected[tensor].ndim; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i > 0 ? " " : "",
                 (long long)expected[tensor].shape[i]);
    assert_string_equal(text, shape);
}

static void results_have_the_extents_that_follow(void **state)
{
    swizzle_case s;
    interleave_case i;
    prepack_case p;
    const int64_t rows_columns[4] = {6, 5}, n_k[4] = {10, 32};
    (void)state;
    make_swizzle(&s, false);
    s.tensors.swizzled = NULL;
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, NULL, 1, "1024");
    s.linear = bytes_of(in, 3, 2, 5, 130);
    s.params.weight = true;
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, NULL, 1, "2 2048");
    make_swizzle(&s, true);
    s.tensors.swizzled = s.tensors.pad_row_offsets = NULL;
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, NULL, 1, "2048"); /* two tiles of rows */
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, NULL, 3, "4");
    s.tokens.data = NULL; /* what 6 rows of 3 experts may need */
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, NULL, 1, "3072");
    make_swizzle(&s, false);
    s.params.inverse = true;
    s.tensors.linear = NULL;
    expect_shape("nvfp4-swizzle", &s.params, &s.tensors, rows_columns, 0, "6 5");
    refused(swizzle(&s), QUERN_ERR_INVALID_ARGUMENT, "the extents of the scales are needed");
    make_interleave(&i);
    i.tensors.out = NULL;
    expect_shape("nvfp4-interleave", &i.params, &i.tensors, NULL, 1, "2 24");
    i.x.shape[1] = 24;
    i.params.inverse = true;
    expect_shape("nvfp4-interleave", &i.params, &i.tensors, NULL, 1, "2 24");
    make_prepack(&p);
    p.tensors.b_repacked = NULL;
    expect_shape("moe-prepack", &p.params, &p.tensors, NULL, 2, "1 2304");
    make_prepack(&p);
    p.tensors.b_codes = p.tensors.b_scales = NULL;
    p.params.inverse = true;
    expect_shape("moe-prepack", &p.params, &p.tensors, n_k, 0, "1 16 10");
    p.params.b_scales = QUERN_NVFP4_LAYOUT_K_MAJOR;
    expect_shape("moe-prepack", &p.params, &p.tensors, n_k, 1, "1 10 2");
}

/* A plan on other memory writes the bits of the call. */
static void check_plan(quern_operation operation, const void *params, const void *tensors, int32_t count,
                       int32_t source, int32_t result, void *others[8])
{
    static uint8_t made[ROOM], read[ROOM] __attribute__((aligned(64)));
    void *data[8] = {NULL};
    quern_plan *plan = NULL;
    size_t bytes = 1;
    memcpy(made, out, sizeof made);
    memcpy(read, in, sizeof read);
    memset(out, SENTINEL, sizeof out);
    if (quern_plan_create(ctx, operation, params, tensors, &plan) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    assert_int_equal(bytes, 0);
    for (int32_t i = 0; i < count; i++) data[i] = others[i];
    data[source] = read;
    data[result] = out;
    if (quern_plan_run(plan, NULL, data, NULL, 0) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    assert_memory_equal(out, made, sizeof made);
    quern_plan_destroy(plan);
}

static void plans_write_the_bits_of_the_call(void **state)
{
    swizzle_case s;
    interleave_case i;
    prepack_case p;
    (void)state;
    make_swizzle(&s, true);
    assert_int_equal(swizzle(&s), QUERN_OK);
    check_plan(QUERN_OP_NVFP4_SWIZZLE, &s.params, &s.tensors, 4, 0, 1,
               (void *[8]){NULL, NULL, s.counts, s.starts});
    s.counts[0] = 7; /* a run checks the contents again */
    quern_plan *plan = NULL;
    assert_int_equal(quern_plan_create(ctx, QUERN_OP_NVFP4_SWIZZLE, &s.params, &s.tensors, &plan), QUERN_OK);
    memset(out, SENTINEL, sizeof out);
    refused(quern_plan_run(plan, NULL, (void *[]){in, out, s.counts, s.starts}, NULL, 0),
            QUERN_ERR_INVALID_ARGUMENT, "tokens_per_expert[0] is 7");
    quern_plan_destroy(plan);
    make_interleave(&i);
    assert_int_equal(interleave(&i), QUERN_OK);
    check_plan(QUERN_OP_NVFP4_INTERLEAVE, &i.params, &i.tensors, 8, 0, 1, (void *[8]){NULL});
    make_prepack(&p);
    assert_int_equal(prepack(&p), QUERN_OK);
    check_plan(QUERN_OP_MOE_PREPACK, &p.params, &p.tensors, 3, 0, 2, (void *[8]){NULL, in + 1024});
}

/* An older caller's struct ends after `out`. */
static void an_older_caller_interleaves_x_alone(void **state)
{
    interleave_case c;
    uint8_t made[48];
    (void)state;
    make_interleave(&c);
    assert_int_equal(interleave(&c), QUERN_OK);
    memcpy(made, out, sizeof made);
    memset(out, SENTINEL, sizeof out);
    c.tensors.size = 3 * sizeof(void *);
    c.tensors.codes = (const quern_tensor *)in; /* not a tensor of this caller's */
    assert_int_equal(interleave(&c), QUERN_OK);
    assert_memory_equal(out, made, sizeof made);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swizzle_refuses),
        cmocka_unit_test(swizzled_rows_of_experts),
        cmocka_unit_test(interleave_refuses),
        cmocka_unit_test(a_call_takes_a_whole_weight),
        cmocka_unit_test(prepack_refuses),
        cmocka_unit_test(results_have_the_extents_that_follow),
        cmocka_unit_test(plans_write_the_bits_of_the_call),
        cmocka_unit_test(an_older_caller_interleaves_x_alone),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
