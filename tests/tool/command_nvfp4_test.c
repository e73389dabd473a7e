/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_nvfp4_test.c - conversions between NVFP4's layouts through `quern run`: the golden vectors, and the
 * oracle's places. */
#include "command.h"
#include "golden.h"
#include "oracle/nvfp4.h"

#include <stdint.h>
#include <stdlib.h>

/* A tensor under another name, of a golden file or of the test's directory. */
typedef struct source {
    const char *from, *to;
} source;

static void copy_renamed(const char *path, const source *names, size_t count, const char *name)
{
    quern_safetensors *file = NULL;
    quern_safetensors_item items[4];
    quern_tensor views[4];
    if (quern_safetensors_open(path, &file) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    for (size_t i = 0; i < count; i++) {
        if (quern_safetensors_get(file, names[i].from, &views[i]) != QUERN_OK)
            fail_msg("%s", quern_last_error(NULL));
        items[i] = (quern_safetensors_item){names[i].to, &views[i]};
    }
    assert_int_equal(quern_safetensors_save(path_of(name), items, count, NULL, 0), QUERN_OK);
    quern_safetensors_close(file);
}

static const char *golden(const char *name)
{
    static char path[400];
    snprintf(path, sizeof path, "%s/%s.safetensors", QUERN_TEST_VECTORS, name);
    return path;
}

static size_t bytes_of(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

/* The tensor that the command wrote has the shape and the bytes of the golden one. */
static void check_golden(const char *written, const char *tensor, const char *vectors, const char *expected)
{
    quern_safetensors *got = NULL, *file = NULL;
    quern_tensor a, b;
    assert_int_equal(quern_safetensors_open(path_of(written), &got), QUERN_OK);
    assert_int_equal(quern_safetensors_open(golden(vectors), &file), QUERN_OK);
    if (quern_safetensors_get(got, tensor, &a) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    if (quern_safetensors_get(file, expected, &b) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    assert_int_equal(bytes_of(&a), bytes_of(&b));
    assert_memory_equal(a.data, b.data, bytes_of(&b));
    quern_safetensors_close(got);
    quern_safetensors_close(file);
}

/* The file holds no other tensor: an input is no output. */
static void check_only(const char *written, const char *tensor)
{
    quern_safetensors *got = NULL;
    assert_int_equal(quern_safetensors_open(path_of(written), &got), QUERN_OK);
    assert_string_equal(quern_safetensors_name(got, 0), tensor);
    assert_null(quern_safetensors_name(got, 1));
    quern_safetensors_close(got);
}

static int run_op(const char *op, const char *in, const char *to, const char *options)
{
    char arguments[900], from[300];
    snprintf(from, sizeof from, "%s", path_of(in));
    snprintf(arguments, sizeof arguments, "run %s %s %s %s", op, from, path_of(to), options);
    return run(arguments);
}

/* A refusal: exit code 3, one sentence with `words`, no output file. */
static void refuse(const char *op, const char *in, const char *options, const char *words)
{
    char arguments[900], from[300];
    snprintf(from, sizeof from, "%s", path_of(in));
    snprintf(arguments, sizeof arguments, "run %s %s %s %s", op, from, path_of("none"), options);
    expect(3, arguments, words);
    assert_false(exists("none"));
}

static void swizzled_scales(void **state)
{
    static const source plain[] = {{"seed.scales.gauss_bf16_s2", "scales"}},
                        experts[] = {{"asm.raw2d", "scales"}, {"asm.tokens_per_expert", "tokens_per_expert"}},
                        weight[] = {{"asm.raw3d", "scales"}},
                        assembled[] = {{"asm.assembled2d", "swizzled"},
                                       {"asm.tokens_per_expert", "tokens_per_expert"}};
    (void)state;
    copy_renamed(golden("nvfp4_quant"), plain, 1, "in");
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", ""), 0);
    check_golden("out", "swizzled", "nvfp4_quant", "seed.scales_swizzled.gauss_bf16_s2");
    check_only("out", "swizzled");
    copy_renamed(golden("nvfp4_weights_scales"), experts, 2, "in");
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", "--experts true"), 0);
    check_golden("out", "swizzled", "nvfp4_weights_scales", "asm.assembled2d");
    check_golden("out", "pad_row_offsets", "nvfp4_weights_scales", "asm.pad_row_offsets");
    /* without the option they are rows of one matrix, whatever else the file holds */
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", "--json"), 0);
    assert_null(strstr(output, "pad_row_offsets"));
    copy_renamed(golden("nvfp4_weights_scales"), weight, 1, "in");
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", "--layout weight"), 0);
    check_golden("out", "swizzled", "nvfp4_weights_scales", "asm.assembled3d");
    copy_renamed(golden("nvfp4_weights_scales"), assembled, 2, "in");
    quern_safetensors *file = NULL;
    quern_tensor raw;
    char options[120];
    assert_int_equal(quern_safetensors_open(golden("nvfp4_weights_scales"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "asm.raw2d", &raw), QUERN_OK);
    snprintf(options, sizeof options, "--inverse true --experts true --rows %lld --columns %lld",
             (long long)raw.shape[0], (long long)raw.shape[1]);
    quern_safetensors_close(file);
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", options), 0);
    check_golden("out", "scales", "nvfp4_weights_scales", "asm.raw2d");
}

static void scales_back_to_rows(void **state)
{
    static const source plain[] = {{"seed.scales_swizzled.gauss_bf16_s2", "swizzled"}},
                        weight[] = {{"asm.assembled3d", "swizzled"}};
    quern_safetensors *file = NULL;
    quern_tensor scales, raw;
    char options[120];
    (void)state;
    assert_int_equal(quern_safetensors_open(golden("nvfp4_quant"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "seed.scales.gauss_bf16_s2", &scales), QUERN_OK);
    snprintf(options, sizeof options, "--inverse true --rows %lld --columns %lld", (long long)scales.shape[0],
             (long long)scales.shape[1]);
    quern_safetensors_close(file);
    copy_renamed(golden("nvfp4_quant"), plain, 1, "in");
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", options), 0);
    check_golden("out", "scales", "nvfp4_quant", "seed.scales.gauss_bf16_s2");
    check_only("out", "scales");
    refuse("nvfp4-swizzle", "in", "--inverse true", "the extents of the scales are needed");
    refuse("nvfp4-swizzle", "in", "--inverse true --rows -1 --columns 2", "rows is -1");
    refuse("nvfp4-swizzle", "in", "--inverse true --rows 999 --columns 2", "swizzled.shape[0] is");
    refuse("nvfp4-swizzle", "in", "", "scales is missing");
    assert_int_equal(quern_safetensors_open(golden("nvfp4_weights_scales"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "asm.raw3d", &raw), QUERN_OK);
    snprintf(options, sizeof options, "--inverse true --layout weight --rows %lld --columns %lld",
             (long long)raw.shape[2], (long long)raw.shape[1]);
    quern_safetensors_close(file);
    copy_renamed(golden("nvfp4_weights_scales"), weight, 1, "in");
    assert_int_equal(run_op("nvfp4-swizzle", "in", "out", options), 0);
    check_golden("out", "scales", "nvfp4_weights_scales", "asm.raw3d");
}

static void bad_counts_of_tokens(void **state)
{
    static const struct {
        int32_t tokens[2];
        const char *words;
    } cases[] = {{{-1, 2}, "tokens_per_expert[0] is -1"}, {{3, 2}, "tokens_per_expert[1] is 2: 0 to the 1"}};
    uint8_t scales[12] = {0};
    const int64_t shape[] = {4, 3}, two = 2;
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        const quern_tensor a = quern_tensor_contiguous(scales, QUERN_U8, 2, shape),
                           b = quern_tensor_contiguous((void *)(uintptr_t)cases[i].tokens, QUERN_I32, 1,
                                                       &two);
        const quern_safetensors_item items[] = {{"scales", &a}, {"tokens_per_expert", &b}};
        assert_int_equal(quern_safetensors_save(path_of("in"), items, 2, NULL, 0), QUERN_OK);
        refuse("nvfp4-swizzle", "in", "--experts true", cases[i].words);
        refuse("nvfp4-swizzle", "in", "--experts true --layout weight", "");
    }
    const quern_tensor a = quern_tensor_contiguous(scales, QUERN_U8, 2, shape);
    const quern_safetensors_item alone[] = {{"scales", &a}};
    assert_int_equal(quern_safetensors_save(path_of("in"), alone, 1, NULL, 0), QUERN_OK);
    refuse("nvfp4-swizzle", "in", "--experts true", "tokens_per_expert");
}

/* ---- interleave ---- */

enum { I = 10, Q = 4, RUNS = 12, ROWS = 3 };

typedef struct weight {
    uint8_t codes[ROWS * 2 * I], scales[2 * I];
    float bias[2 * I];
    uint16_t x[ROWS * 2 * I];
} weight;

static void save_weight(weight *w, const char *name)
{
    static const int64_t rows[] = {ROWS, 2 * I}, one[] = {1, 2 * I};
    const quern_tensor views[] = {quern_tensor_contiguous(w->codes, QUERN_U8, 2, rows),
                                  quern_tensor_contiguous(w->scales, QUERN_E4M3, 2, one),
                                  quern_tensor_contiguous(w->bias, QUERN_F32, 1, one + 1),
                                  quern_tensor_contiguous(w->x, QUERN_BF16, 2, rows)};
    const quern_safetensors_item items[] = {
        {"codes", &views[0]}, {"scales", &views[1]}, {"bias", &views[2]}, {"X", &views[3]}};
    for (int i = 0; i < ROWS * 2 * I; i++) {
        w->codes[i] = (uint8_t)(i * 7 + 1);
        w->x[i] = (uint16_t)(0x3f00 + i);
        if (i >= 2 * I) continue;
        w->scales[i] = (uint8_t)(i + 1);
        w->bias[i] = (float)(i + 1);
    }
    assert_int_equal(quern_safetensors_save(path_of(name), items, 4, NULL, 0), QUERN_OK);
}

/* The tensor has the dtype, and `halves` in alternating runs, padded with zeros. */
static void check_runs(const quern_safetensors *file, const char *name, quern_dtype dtype, const void *halves,
                       int64_t rows)
{
    const size_t element = quern_dtype_size(dtype);
    static const uint8_t zero[4];
    quern_tensor t;
    if (quern_safetensors_get(file, name, &t) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    assert_int_equal(t.dtype, dtype);
    assert_int_equal(bytes_of(&t), (size_t)(rows * 2 * RUNS) * element);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < RUNS; i++)
            for (int part = 0; part < 2; part++) {
                const int64_t at = 2 * RUNS * r + oracle_interleaved_at(i, part, Q);
                const uint8_t *expected =
                    i < I ? (const uint8_t *)halves + (size_t)(2 * I * r + I * part + i) * element : zero;
                assert_memory_equal((const uint8_t *)t.data + (size_t)at * element, expected, element);
            }
}

static void interleaved_weights(void **state)
{
    static const source codes[] = {{"codes", "codes"}};
    weight w;
    quern_safetensors *file = NULL;
    quern_tensor t, again;
    (void)state;
    save_weight(&w, "in");
    assert_int_equal(run_op("nvfp4-interleave", "in", "out", "--granularity 4"), 0);
    assert_int_equal(quern_safetensors_open(path_of("out"), &file), QUERN_OK);
    check_runs(file, "codes", QUERN_U8, w.codes, ROWS);
    check_runs(file, "scales", QUERN_E4M3, w.scales, 1);
    check_runs(file, "bias", QUERN_F32, w.bias, 1);
    check_runs(file, "X", QUERN_BF16, w.x, ROWS);
    quern_safetensors_close(file);
    copy_renamed(path_of("out"), codes, 1, "runs");
    assert_int_equal(run_op("nvfp4-interleave", "runs", "back", "--granularity 4 --inverse true"), 0);
    assert_int_equal(run_op("nvfp4-interleave", "back", "again", "--granularity 4"), 0);
    assert_int_equal(quern_safetensors_open(path_of("back"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "codes", &t), QUERN_OK);
    for (int64_t r = 0; r < ROWS; r++) /* the padding is part of the halves */
        for (int64_t i = 0; i < 2 * RUNS; i++)
            assert_int_equal(((const uint8_t *)t.data)[2 * RUNS * r + i],
                             i % RUNS < I ? w.codes[2 * I * r + i / RUNS * I + i % RUNS] : 0);
    quern_safetensors_close(file);
    assert_int_equal(quern_safetensors_open(path_of("again"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "codes", &again), QUERN_OK);
    check_runs(file, "codes", QUERN_U8, w.codes, ROWS);
    quern_safetensors_close(file);
}

static void what_interleave_refuses(void **state)
{
    static const source other[] = {{"codes", "Codes"}};
    weight w;
    (void)state;
    save_weight(&w, "in");
    refuse("nvfp4-interleave", "in", "--granularity 0", "granularity is 0");
    refuse("nvfp4-interleave", "in", "--granularity 4 --inverse true", "whole runs of 4");
    copy_renamed(path_of("in"), other, 1, "other");
    refuse("nvfp4-interleave", "other", "", "at least one is needed");
}

/* ---- prepack ---- */

static void repacked_weights_come_back(void **state)
{
    enum { K = 48, N = 70 };
    static uint8_t codes[2 * K / 2 * N], scales[2 * K / 16 * N];
    static const int64_t codes_shape[] = {2, K / 2, N}, scales_shape[] = {2, K / 16, N};
    const quern_tensor a = quern_tensor_contiguous(codes, QUERN_U8, 3, codes_shape),
                       b = quern_tensor_contiguous(scales, QUERN_U8, 3, scales_shape);
    const quern_safetensors_item items[] = {{"B_codes", &a}, {"B_scales", &b}};
    quern_safetensors *file = NULL;
    quern_tensor t;
    (void)state;
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 11);
    for (size_t i = 0; i < sizeof scales; i++) scales[i] = (uint8_t)(i % 127);
    assert_int_equal(quern_safetensors_save(path_of("in"), items, 2, NULL, 0), QUERN_OK);
    assert_int_equal(run_op("moe-prepack", "in", "packed", ""), 0);
    assert_int_equal(run_op("moe-prepack", "packed", "back", "--inverse true --n 70 --k 48"), 0);
    assert_int_equal(quern_safetensors_open(path_of("back"), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "B_codes", &t), QUERN_OK);
    assert_memory_equal(t.data, codes, sizeof codes);
    assert_int_equal(quern_safetensors_get(file, "B_scales", &t), QUERN_OK);
    assert_memory_equal(t.data, scales, sizeof scales);
    quern_safetensors_close(file);
    refuse("moe-prepack", "packed", "--inverse true", "the extents of B are needed");
    scales[5] = 0x80;
    assert_int_equal(quern_safetensors_save(path_of("in"), items, 2, NULL, 0), QUERN_OK);
    refuse("moe-prepack", "in", "", "B_scales[5] is the scale byte 0x80");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swizzled_scales),         cmocka_unit_test(scales_back_to_rows),
        cmocka_unit_test(bad_counts_of_tokens),    cmocka_unit_test(interleaved_weights),
        cmocka_unit_test(what_interleave_refuses), cmocka_unit_test(repacked_weights_come_back),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
