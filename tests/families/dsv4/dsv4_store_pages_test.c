/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_store_pages_test.c - rows that are stored in pages of bytes, by the oracle's quantisers; rows of any
 * size, from zeros and subnormals to the largest numbers; which rows go to which slots. */
#include "cmocka_c11.h"
#include "levels.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Pages of byte formats: slot i's codes stand at i * codes, its scales behind the codes of all slots. */
static void byte_pages_hold_codes_then_scales(void **state)
{
    enum { WIDTH = 64, ROWS = 9, PAGE = 4, PAGES = 4 };
    static const struct {
        quern_dsv4_format format;
        int64_t codes, scales;
    } formats[] = {
        {QUERN_DSV4_FP8, WIDTH, 4}, {QUERN_DSV4_FP8_POWER, WIDTH, 4}, {QUERN_DSV4_FP4, WIDTH / 2, 2}};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
            const int64_t codes = formats[f].codes, row = codes + formats[f].scales;
            test_random random = {70 + f};
            test_tensor x = test_tensor_make(&random, QUERN_F32, 2, (const int64_t[]){ROWS, WIDTH},
                                             TEST_STRIDED),
                        cache = test_tensor_make(&random, QUERN_U8, 2, (const int64_t[]){PAGES, PAGE * row},
                                                 TEST_UNALIGNED);
            test_tensor_normal(&x, &random, 3);
            double *values = test_tensor_get(&x);
            test_tensor expected = test_tensor_copy(&cache);
            int32_t slots[ROWS];
            for (int64_t i = 0; i < ROWS; i++) {
                float one[WIDTH];
                unsigned char bytes[WIDTH + 4];
                slots[i] = i == 3 ? -1 : (int32_t)((i * 5 + 2) % (PAGE * PAGES));
                if (slots[i] < 0) continue;
                for (int j = 0; j < WIDTH; j++) one[j] = (float)values[i * WIDTH + j];
                if (formats[f].format == QUERN_DSV4_FP4)
                    assert_true(oracle_dsv4_quantise_fp4(one, WIDTH, bytes));
                else
                    assert_true(oracle_dsv4_quantise_fp8(one, WIDTH,
                                                         formats[f].format == QUERN_DSV4_FP8_POWER, bytes));
                unsigned char *page =
                    (unsigned char *)expected.view.data + slots[i] / PAGE * expected.view.strides[0];
                memcpy(page + slots[i] % PAGE * codes, bytes, (size_t)codes);
                memcpy(page + PAGE * codes + slots[i] % PAGE * (row - codes), bytes + codes,
                       (size_t)(row - codes));
            }
            quern_context *ctx = test_context(level, 1);
            const int64_t rows = ROWS;
            const quern_tensor list = quern_tensor_contiguous(slots, QUERN_I32, 1, &rows);
            quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
            quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
            p.format = formats[f].format;
            p.page = PAGE;
            t.x = &x.view;
            t.slots = &list;
            t.cache = &cache.view;
            size_t bytes;
            if (quern_dsv4_store_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace w = test_workspace_make(bytes);
            if (quern_dsv4_store(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(ctx));
            test_workspace_close(&w);
            assert_true(test_tensor_same_bits(&expected, &cache));
            test_tensor_check_guards(&cache, "cache");
            free(values);
            test_tensor_free(&x), test_tensor_free(&cache), test_tensor_free(&expected);
            quern_context_destroy(ctx);
        }
}

/* Of two rows for one slot the later stays. A row with slot -1 may hold anything and is not stored. Slots
 * below -1 and past the cache are refused. Contiguous rows and pages of each format. */
static void slots_of_rows(void **state)
{
    enum { WIDTH = 64, ROWS = 3, PAGE = 4, SLOT = 6 };
    static const struct {
        quern_dsv4_format format;
        quern_dtype dtype;
        int64_t row;
    } formats[] = {{QUERN_DSV4_ROWS, QUERN_F32, WIDTH},
                   {QUERN_DSV4_ROWS, QUERN_BF16, WIDTH},
                   {QUERN_DSV4_FP8, QUERN_U8, WIDTH + 4},
                   {QUERN_DSV4_FP8_POWER, QUERN_U8, WIDTH + 4},
                   {QUERN_DSV4_FP4, QUERN_U8, WIDTH / 2 + 2}};
    (void)state;
    for (int i = 0; i < 2 * (int)(sizeof formats / sizeof *formats); i++) {
        const int64_t page = i % 2 ? PAGE : 0, row = formats[i / 2].row;
        const bool bytes = formats[i / 2].format != QUERN_DSV4_ROWS;
        const int64_t plain[] = {2 * PAGE, row}, pages[] = {2, PAGE, row}, byte_pages[] = {2, PAGE * row};
        test_random random = {90 + (uint64_t)i};
        test_tensor x = test_tensor_make(&random, QUERN_F32, 2, (const int64_t[]){ROWS, WIDTH},
                                         TEST_CONTIGUOUS),
                    cache = test_tensor_make(&random, formats[i / 2].dtype, page > 0 && !bytes ? 3 : 2,
                                             page == 0 ? plain
                                             : bytes   ? byte_pages
                                                       : pages,
                                             TEST_UNALIGNED);
        test_tensor_normal(&x, &random, 3);
        ((float *)x.view.data)[2 * WIDTH + 1] = NAN;
        memcpy(x.snapshot, x.buffer, x.bytes);
        test_tensor alone = test_tensor_copy(&cache), before = test_tensor_copy(&cache);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        quern_tensor second = x.view, list;
        int32_t slots[ROWS] = {SLOT, SLOT, -1};
        const int64_t three = ROWS, one = 1;
        quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
        quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
        p.format = formats[i / 2].format;
        p.page = page;
        t.slots = &list;
        t.x = &x.view;
        t.cache = &cache.view;
        list = quern_tensor_contiguous(slots, QUERN_I32, 1, &three);
        unsigned char workspace[4096];
        for (int bad = 0; bad < 2; bad++) {
            slots[2] = bad == 0 ? -2 : 2 * PAGE;
            assert_int_equal(quern_dsv4_store(ctx, NULL, &p, &t, workspace, sizeof workspace),
                             QUERN_ERR_INVALID_ARGUMENT);
            assert_non_null(strstr(quern_last_error(ctx), "slots[2] is"));
            assert_true(test_tensor_same_bits(&before, &cache));
        }
        slots[2] = -1;
        if (quern_dsv4_store(ctx, NULL, &p, &t, workspace, sizeof workspace) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        second.data = (float *)second.data + WIDTH;
        second.shape[0] = 1;
        list = quern_tensor_contiguous(slots, QUERN_I32, 1, &one);
        t.x = &second;
        t.cache = &alone.view;
        assert_int_equal(quern_dsv4_store(ctx, NULL, &p, &t, workspace, sizeof workspace), QUERN_OK);
        assert_true(test_tensor_same_bits(&alone, &cache));
        assert_false(test_tensor_same_bits(&before, &cache));
        test_tensor_check_guards(&cache, "cache");
        test_tensor_free(&x), test_tensor_free(&cache), test_tensor_free(&alone), test_tensor_free(&before);
        quern_context_destroy(ctx);
    }
}

/* Stores one row without pages. */
static void store_row(quern_context *ctx, quern_dsv4_format format, const float *row, int64_t width,
                      unsigned char *bytes, int64_t count)
{
    int32_t slot = 0;
    const int64_t x[] = {1, width}, one = 1, cache[] = {1, count};
    const quern_tensor from = quern_tensor_contiguous((float *)(uintptr_t)row, QUERN_F32, 2, x),
                       slots = quern_tensor_contiguous(&slot, QUERN_I32, 1, &one),
                       to = quern_tensor_contiguous(bytes, QUERN_U8, 2, cache);
    quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    unsigned char workspace[4096];
    p.format = format;
    t.x = &from;
    t.slots = &slots;
    t.cache = &to;
    if (quern_dsv4_store(ctx, NULL, &p, &t, workspace, sizeof workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
}

enum { SIZES = 24, LONGEST = 512 };

/* Rows whose scale is a floor, a power of two or next to one, or the largest there is. */
static void make_row(test_random *random, int size, float *row)
{
    const float most[] = {0.0f,
                          -0.0f,
                          0x1p-149f,
                          0x3p-149f,
                          0x1p-126f,
                          6 * 0x1p-126f,
                          0x1p-125f,
                          1e-4f,
                          nextafterf(1e-4f, 0),
                          nextafterf(1e-4f, 1),
                          448.0f,
                          6.0f,
                          nextafterf(448, 0),
                          nextafterf(448, 1e9f),
                          nextafterf(6, 0),
                          nextafterf(6, 1e9f),
                          1e30f,
                          FLT_MAX};
    const int fixed = sizeof most / sizeof *most;
    for (int i = 0; i < LONGEST; i++) {
        const float x = (float)(2 * test_random_uniform(random) - 1);
        row[i] = size >= fixed ? ldexpf(x, (int)test_random_int(random, -149, size % 2 ? 100 : -120))
                               : x * most[size];
    }
    if (size >= fixed) return;
    for (int i = 0; i < 448; i += 32) row[i + (int)test_random_int(random, 0, 31)] = most[size];
    for (int i = 448; i < LONGEST && fabsf(most[size]) > 1e38f; i++)
        row[i] *= 0.5f; /* bf16's largest is less */
}

/* Bytes are the oracle's whatever the size of a row: floors stand before the division, and subnormal numbers
 * count. */
static void rows_of_any_size(void **state)
{
    static const struct {
        quern_dsv4_format format;
        int64_t width, bytes;
    } formats[] = {{QUERN_DSV4_FP8, 96, 100},
                   {QUERN_DSV4_FP8_POWER, 96, 100},
                   {QUERN_DSV4_FP4, 96, 51},
                   {QUERN_DSV4_ROW584, LONGEST, 584}};
    const float least = 1e-4f / 448.0f;
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 1);
        test_random random = {11};
        for (int size = 0; size < SIZES; size++)
            for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
                float row[LONGEST];
                unsigned char bytes[584], expected[584];
                const quern_dsv4_format format = formats[f].format;
                bool ok;
                make_row(&random, size, row);
                if (format == QUERN_DSV4_FP4) ok = oracle_dsv4_quantise_fp4(row, formats[f].width, expected);
                else if (format == QUERN_DSV4_ROW584) ok = oracle_dsv4_quantise_row584(row, expected);
                else
                    ok = oracle_dsv4_quantise_fp8(row, formats[f].width, format == QUERN_DSV4_FP8_POWER,
                                                  expected);
                assert_true(ok);
                store_row(ctx, format, row, formats[f].width, bytes, formats[f].bytes);
                for (int64_t i = 0; i < formats[f].bytes; i++)
                    if (bytes[i] != expected[i])
                        fail_msg("%s, format %d, size %d: byte %d is %d, expected %d",
                                 quern_cpu_level_name(level), (int)format, size, (int)i, bytes[i],
                                 expected[i]);
                if (size < 2 && format == QUERN_DSV4_FP8)
                    assert_memory_equal(bytes + 96, &least, sizeof least);
            }
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(byte_pages_hold_codes_then_scales),
                                       cmocka_unit_test(rows_of_any_size), cmocka_unit_test(slots_of_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
