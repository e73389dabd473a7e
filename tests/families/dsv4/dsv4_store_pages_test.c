/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_store_pages_test.c - rows that are stored in pages of bytes, by the oracle's quantisers. */
#include "cmocka_c11.h"
#include "levels.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(byte_pages_hold_codes_then_scales)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
