/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * command_kinds_test.c - what the forms of small tensors decide through `quern run`: a global's shape says
 * what shares it, one number is [] or [1], indices are i32 or i64, logits are floats of any size.
 */
#include "command.h"
#include "tensor.h"

#include "core/half.h"

#include <quern/safetensors.h>

#include <math.h>
#include <stdint.h>

enum { T = 6, D = 32, E = 4, N = 16, ITEMS = 8 };

/* A file of named tensors. */
typedef struct contents {
    quern_safetensors_item items[ITEMS];
    quern_tensor views[ITEMS];
    size_t count;
} contents;

static void put(contents *c, const char *name, const void *data, quern_dtype dtype, int32_t ndim,
                const int64_t *shape)
{
    assert_true(c->count < ITEMS);
    c->views[c->count] = quern_tensor_contiguous((void *)(uintptr_t)data, dtype, ndim, shape);
    c->items[c->count] = (quern_safetensors_item){name, &c->views[c->count]};
    c->count++;
}

/* f32 of this shape. */
#define PUT_F32(c, name, data, ...)                                                                          \
    put(c, name, data, QUERN_F32, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),             \
        (int64_t[]){__VA_ARGS__})

static void save(const contents *c, const char *name)
{
    quern_safetensors_item items[ITEMS];
    for (size_t i = 0; i < c->count; i++) items[i] = (quern_safetensors_item){c->items[i].name, &c->views[i]};
    if (quern_safetensors_save(path_of(name), items, c->count, NULL, 0) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
}

static void run_op(const char *op, const contents *in, const char *out, const char *options)
{
    char arguments[300];
    save(in, "in");
    snprintf(arguments, sizeof arguments, "run %s $DIR/in $DIR/%s %s", op, out, options);
    expect(0, arguments, "");
}

static void refuse(const char *op, const contents *in, const char *options, const char *words)
{
    char arguments[300];
    save(in, "in");
    snprintf(arguments, sizeof arguments, "run %s $DIR/in $DIR/none %s", op, options);
    expect(3, arguments, words);
    assert_false(exists("none"));
}

static size_t bytes_of(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

static quern_safetensors *opened(const char *name)
{
    quern_safetensors *file = NULL;
    if (quern_safetensors_open(path_of(name), &file) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return file;
}

/* The bytes of a tensor in two files are the same. */
static void same(const char *a, const char *b, const char *name)
{
    quern_safetensors *first = opened(a), *second = opened(b);
    quern_tensor x, y;
    assert_int_equal(quern_safetensors_get(first, name, &x), QUERN_OK);
    assert_int_equal(quern_safetensors_get(second, name, &y), QUERN_OK);
    assert_int_equal(x.dtype, y.dtype);
    assert_int_equal(bytes_of(&x), bytes_of(&y));
    assert_memory_equal(x.data, y.data, bytes_of(&x));
    quern_safetensors_close(first);
    quern_safetensors_close(second);
}

/* Copies a result into memory. */
static void get(const char *file_name, const char *name, void *to, size_t bytes)
{
    quern_safetensors *file = opened(file_name);
    quern_tensor t;
    assert_int_equal(quern_safetensors_get(file, name, &t), QUERN_OK);
    assert_int_equal(bytes_of(&t), bytes);
    memcpy(to, t.data, bytes);
    quern_safetensors_close(file);
}

static float x[3 * 4 * D]; /* [T, D], or [3, 4, D] */

static void fill(void)
{
    test_random random = {5};
    for (int i = 0; i < 3 * 4 * D; i++) x[i] = (float)(test_random_normal(&random) * pow(2.0, i / D));
}

static void put_codes(contents *c, int64_t rows, const uint8_t *codes, const uint8_t *scales)
{
    put(c, "codes", codes, QUERN_U8, 2, (int64_t[]){rows, D / 2});
    put(c, "scales", scales, QUERN_U8, 2, (int64_t[]){rows, D / 16});
}

/* What was quantised with a global a row is read without an option, in both forms. */
static void globals_of_rows(void **state)
{
    uint8_t codes[T * D / 2], scales[T * D / 16];
    float global[T];
    (void)state;
    fill();
    contents in = {.count = 0}, coded = {.count = 0};
    PUT_F32(&in, "X", x, T, D);
    run_op("nvfp4-quantize", &in, "q", "--global-per row");
    get("q", "codes", codes, sizeof codes);
    get("q", "scales", scales, sizeof scales);
    get("q", "global", global, sizeof global);
    put_codes(&coded, T, codes, scales);
    PUT_F32(&coded, "global", global, T);
    run_op("nvfp4-dequantize", &coded, "told", "--global-per row --dtype f32");
    run_op("nvfp4-dequantize", &coded, "untold", "--dtype f32");
    same("told", "untold", "X");
    PUT_F32(&in, "global", global, T);
    run_op("nvfp4-quantize", &in, "again", "");
    same("q", "again", "codes");
    coded.count = in.count = 2;
    in.count = 1;
    PUT_F32(&coded, "global", global, T, 1);
    PUT_F32(&in, "global", global, T, 1);
    run_op("nvfp4-dequantize", &coded, "column", "--dtype f32");
    same("told", "column", "X");
    run_op("nvfp4-quantize", &in, "again", "");
    same("q", "again", "codes");
    coded.count = 2;
    PUT_F32(&coded, "global", global, T - 1);
    refuse("nvfp4-dequantize", &coded, "", "does not say what shares each number");
}

static void globals_of_experts(void **state)
{
    static const int64_t wide[E] = {2, 2, 5, T};
    static const int32_t narrow[E] = {2, 2, 5, T}, stack[3] = {4, 8, 12};
    uint8_t codes[3 * 4 * D / 2], scales[3 * 4 * D / 16];
    float global[E];
    (void)state;
    fill();
    contents in = {.count = 0}, coded = {.count = 0};
    PUT_F32(&in, "X", x, T, D);
    put(&in, "offsets", narrow, QUERN_I32, 1, (int64_t[]){E});
    run_op("nvfp4-quantize", &in, "q", "--global-per expert");
    get("q", "codes", codes, sizeof codes / 2);
    get("q", "scales", scales, sizeof scales / 2);
    get("q", "global", global, sizeof global);
    put_codes(&coded, T, codes, scales);
    PUT_F32(&coded, "global", global, E);
    put(&coded, "offsets", wide, QUERN_I64, 1, (int64_t[]){E});
    run_op("nvfp4-dequantize", &coded, "told", "--global-per expert --dtype f32");
    run_op("nvfp4-dequantize", &coded, "untold", "--dtype f32");
    same("told", "untold", "X");
    PUT_F32(&in, "global", global, E);
    run_op("nvfp4-quantize", &in, "again", "");
    same("q", "again", "codes");
    same("q", "again", "scales");
    /* a stack of experts of as many rows each */
    in.count = 0;
    PUT_F32(&in, "X", x, 12, D);
    put(&in, "offsets", stack, QUERN_I32, 1, (int64_t[]){3});
    run_op("nvfp4-quantize", &in, "flat", "--global-per expert");
    in.count = 0;
    PUT_F32(&in, "X", x, 3, 4, D);
    run_op("nvfp4-quantize", &in, "stacked", "--global-per expert");
    same("flat", "stacked", "codes");
    same("flat", "stacked", "scales");
    same("flat", "stacked", "global");
    get("stacked", "codes", codes, sizeof codes);
    get("stacked", "scales", scales, sizeof scales);
    get("stacked", "global", global, 3 * sizeof *global);
    coded.count = 0;
    put(&coded, "codes", codes, QUERN_U8, 3, (int64_t[]){3, 4, D / 2});
    put(&coded, "scales", scales, QUERN_U8, 3, (int64_t[]){3, 4, D / 16});
    PUT_F32(&coded, "global", global, 3);
    run_op("nvfp4-dequantize", &coded, "stack", "--dtype f32");
    coded.count = 0;
    put_codes(&coded, 12, codes, scales);
    PUT_F32(&coded, "global", global, 3);
    put(&coded, "offsets", stack, QUERN_I32, 1, (int64_t[]){3});
    run_op("nvfp4-dequantize", &coded, "rows", "--dtype f32");
    same("stack", "rows", "X");
}

static void one_number_has_two_forms(void **state)
{
    static const float one[] = {0.75f, 0.5f};
    (void)state;
    fill();
    for (int form = 0; form < 2; form++) {
        const char *const to[] = {"scalar", "vector"};
        contents in = {.count = 0};
        PUT_F32(&in, "X", x, T, D);
        put(&in, "global", one, QUERN_F32, form, (int64_t[]){1});
        run_op("nvfp4-quantize", &in, to[form], "");
        in.count = 1;
        put(&in, "gate_global", one, QUERN_F32, form, (int64_t[]){1});
        run_op("nvfp4-fused-quantize", &in, form == 0 ? "fused" : "fused1", "");
    }
    same("scalar", "vector", "codes");
    same("fused", "fused1", "gate_codes");
    contents in = {.count = 0};
    PUT_F32(&in, "X", x, T, D);
    PUT_F32(&in, "gate_global", one, 2);
    refuse("nvfp4-fused-quantize", &in, "",
           "gate_global has 1 dimensions: one number, [] or [1], is accepted");
}

typedef struct product {
    uint8_t a_codes[T * D / 2], a_scales[T * D / 16], b_codes[E * D / 2 * N], b_scales[E * D / 16 * N];
    int32_t offsets[E];
    float global[T];
} product;

static void fill_product(product *p)
{
    test_random random = {11};
    for (size_t i = 0; i < sizeof p->a_codes; i++) p->a_codes[i] = (uint8_t)test_random_int(&random, 0, 255);
    for (size_t i = 0; i < sizeof p->b_codes; i++) p->b_codes[i] = (uint8_t)test_random_int(&random, 0, 255);
    for (size_t i = 0; i < sizeof p->a_scales; i++)
        p->a_scales[i] = (uint8_t)test_random_int(&random, 0x30, 0x40);
    for (size_t i = 0; i < sizeof p->b_scales; i++)
        p->b_scales[i] = (uint8_t)test_random_int(&random, 0x30, 0x40);
    const int32_t ends[E] = {2, 2, 5, T};
    memcpy(p->offsets, ends, sizeof ends);
    for (int i = 0; i < T; i++) p->global[i] = 0.25f * (float)(i + 1);
}

static contents product_of(const product *p, int64_t rows)
{
    contents c = {.count = 0};
    put(&c, "A_codes", p->a_codes, QUERN_U8, 2, (int64_t[]){rows, D / 2});
    put(&c, "A_scales", p->a_scales, QUERN_U8, 2, (int64_t[]){rows, D / 16});
    put(&c, "B_codes", p->b_codes, QUERN_U8, 3, (int64_t[]){E, D / 2, N});
    put(&c, "B_scales", p->b_scales, QUERN_U8, 3, (int64_t[]){E, D / 16, N});
    put(&c, "offsets", p->offsets, QUERN_I32, 1, (int64_t[]){E});
    return c;
}

static void globals_of_products(void **state)
{
    product p;
    (void)state;
    fill_product(&p);
    contents in = product_of(&p, T);
    const size_t own = in.count;
    PUT_F32(&in, "A_global", p.global, E);
    run_op("nvfp4-gemm", &in, "told", "--a-global-per expert");
    run_op("nvfp4-gemm", &in, "untold", "");
    same("told", "untold", "C");
    in.count = own;
    PUT_F32(&in, "A_global", p.global, T);
    run_op("nvfp4-gemm", &in, "told", "--a-global-per row");
    run_op("nvfp4-gemm", &in, "untold", "");
    same("told", "untold", "C");
    in.count = own;
    PUT_F32(&in, "A_global", p.global, T, 1);
    run_op("nvfp4-gemm", &in, "untold", "");
    same("told", "untold", "C");
    in.count = own;
    PUT_F32(&in, "B_global", p.global, 1);
    PUT_F32(&in, "A_global", p.global, 1);
    run_op("nvfp4-gemm", &in, "vector", "");
    in.count = own;
    put(&in, "B_global", p.global, QUERN_F32, 0, NULL);
    put(&in, "A_global", p.global, QUERN_F32, 0, NULL);
    run_op("nvfp4-gemm", &in, "scalar", "");
    same("scalar", "vector", "C");
    /* as many rows as experts: the option decides, nothing guesses */
    p.offsets[2] = p.offsets[3] = 4;
    in = product_of(&p, E);
    PUT_F32(&in, "A_global", p.global, E);
    refuse("nvfp4-gemm", &in, "", "A_global has 1 dimensions and its shape does not say");
    run_op("nvfp4-gemm", &in, "row", "--a-global-per row");
    run_op("nvfp4-gemm", &in, "expert", "--a-global-per expert");
}

/* Each expert's rows under its global are those of a product whose one global that is. */
static void globals_of_outputs(void **state)
{
    product p;
    uint8_t codes[T * N / 2], one[T * N / 2];
    (void)state;
    fill_product(&p);
    for (int i = 0; i < E; i++) p.global[i] = 0.01f * (float)(i + 1);
    contents in = product_of(&p, T);
    const size_t own = in.count;
    PUT_F32(&in, "C_global", p.global, E);
    run_op("nvfp4-gemm", &in, "experts", "--output nvfp4");
    get("experts", "C_codes", codes, sizeof codes);
    for (int e = 0; e < E; e++) {
        const size_t first = (size_t)(e > 0 ? p.offsets[e - 1] : 0) * N / 2,
                     end = (size_t)p.offsets[e] * N / 2;
        in.count = own;
        put(&in, "C_global", &p.global[e], QUERN_F32, e % 2, (int64_t[]){1});
        run_op("nvfp4-gemm", &in, "one", "--output nvfp4");
        get("one", "C_codes", one, sizeof one);
        assert_memory_equal(codes + first, one + first, end - first);
    }
    in.count = own;
    PUT_F32(&in, "C_global", p.global, 2, 2);
    refuse("nvfp4-gemm", &in, "--output nvfp4", "C_global has 2 dimensions");
    assert_null(strstr(output, ":  "));
}

/* Routing by a table, and of logits. */
static void routers_take_what_checkpoints_have(void **state)
{
    enum { V = 5, K = 2 };
    static const int32_t ids[T] = {0, 4, 2, 2, 1, 3}, table[V * K] = {1, 0, 2, 3, 0, 3, 3, 1, 2, 1};
    int64_t wide_ids[T], wide_table[V * K];
    float logits[T * E], d_weights[T * K], d[T * E];
    uint16_t small[T * E], d_small[T * E];
    test_random random = {3};
    (void)state;
    for (int i = 0; i < T; i++) wide_ids[i] = ids[i];
    for (int i = 0; i < V * K; i++) wide_table[i] = table[i];
    for (int i = 0; i < T * K; i++) d_weights[i] = (float)test_random_normal(&random);
    for (int i = 0; i < T * E; i++) {
        small[i] = bf16_from_float((float)test_random_normal(&random));
        logits[i] = float_from_bf16(small[i]);
    }
    for (int form = 0; form < 4; form++) {
        contents in = {.count = 0};
        PUT_F32(&in, "logits", logits, T, E);
        put(&in, "input_ids", form % 2 ? (const void *)wide_ids : ids, form % 2 ? QUERN_I64 : QUERN_I32, 1,
            (int64_t[]){T});
        put(&in, "tid2eid", form / 2 ? (const void *)wide_table : table, form / 2 ? QUERN_I64 : QUERN_I32, 2,
            (int64_t[]){V, K});
        run_op("moe-route", &in, form == 0 ? "narrow" : "wide", "--top-k 2");
        if (form > 0) same("narrow", "wide", "experts");
        if (form > 0) same("narrow", "wide", "permutation");
        wide_table[3] = ((int64_t)1 << 32) + 1;
        if (form / 2) refuse("moe-route", &in, "--top-k 2", "tid2eid[1, 1] is 4294967297");
        wide_table[3] = table[3];
    }
    contents in = {.count = 0};
    PUT_F32(&in, "d_weights", d_weights, T, K);
    PUT_F32(&in, "logits", logits, T, E);
    run_op("moe-route", &in, "f32", "--top-k 2");
    in.count = 1;
    put(&in, "logits", small, QUERN_BF16, 2, (int64_t[]){T, E});
    run_op("moe-route", &in, "bf16", "--top-k 2");
    same("f32", "bf16", "experts");
    same("f32", "bf16", "weights");
    get("f32", "d_logits", d, sizeof d);
    get("bf16", "d_logits", d_small, sizeof d_small);
    for (int i = 0; i < T * E; i++) assert_int_equal(d_small[i], bf16_from_float(d[i]));
    for (int i = 0; i < T * E; i++) small[i] = f16_from_float(logits[i]);
    in.views[1].dtype = QUERN_F16;
    for (int i = 0; i < T * E; i++) logits[i] = float_from_f16(small[i]);
    run_op("moe-route", &in, "f16", "--top-k 2");
    in.count = 1;
    PUT_F32(&in, "logits", logits, T, E);
    run_op("moe-route", &in, "f32", "--top-k 2");
    same("f32", "f16", "weights");
}

static void offsets_of_64_bits(void **state)
{
    enum { TOKENS = 8 };
    static float values[TOKENS * D];
    static const int32_t narrow[] = {0, 3, TOKENS};
    int64_t wide[] = {0, 3, TOKENS};
    test_random random = {4};
    (void)state;
    for (int i = 0; i < TOKENS * D; i++) values[i] = (float)test_random_normal(&random);
    contents in = {.count = 0};
    PUT_F32(&in, "Q", values, TOKENS, 1, D);
    PUT_F32(&in, "K", values, TOKENS, 1, D);
    PUT_F32(&in, "V", values, TOKENS, 1, D);
    put(&in, "cu_seqlens_q", narrow, QUERN_I32, 1, (int64_t[]){3});
    run_op("attention", &in, "narrow", "");
    in.count = 3;
    put(&in, "cu_seqlens_q", wide, QUERN_I64, 1, (int64_t[]){3});
    run_op("attention", &in, "wide", "");
    same("narrow", "wide", "O");
    wide[1] = ((int64_t)1 << 32) + 3;
    refuse("attention", &in, "", "tensor cu_seqlens_q: number 1 is 4294967299: numbers of 32 bits");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(globals_of_rows),          cmocka_unit_test(globals_of_experts),
        cmocka_unit_test(one_number_has_two_forms), cmocka_unit_test(globals_of_products),
        cmocka_unit_test(globals_of_outputs),       cmocka_unit_test(routers_take_what_checkpoints_have),
        cmocka_unit_test(offsets_of_64_bits),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
