/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_store_pages_test.c - rows that are stored in pages of bytes, by the oracle's quantisers; which rows go
 * to which slots. */
#include "cmocka_c11.h"
#include "levels.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(byte_pages_hold_codes_then_scales),
                                       cmocka_unit_test(slots_of_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
