/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_layer_storage.h"

#include "cmocka_c11.h"

#include <string.h>

const layer_storage layer_storages[LAYER_STORAGES] = {
    {QUERN_BF16, QUERN_DSV4_ROWS, QUERN_DSV4_ROWS, 0},
    {QUERN_F32, QUERN_DSV4_ROWS, QUERN_DSV4_FP8, 0},
    {QUERN_BF16, QUERN_DSV4_ROW584, QUERN_DSV4_FP8_POWER, 0},
    {QUERN_F16, QUERN_DSV4_ROW584, QUERN_DSV4_FP4, 0}};

layer_case layer_storage_case(test_random *random, oracle_layer_kind kind, quern_dtype dtype)
{
    const oracle_layer l = {.kind = kind,
                            .tokens = STORED_TOKENS,
                            .width = STORED_WIDTH,
                            .q_lora = 24,
                            .heads = test_random_int(random, 1, 3),
                            .dim = STORED_DIM,
                            .groups = 1,
                            .o_lora = 8,
                            .rope_dim = STORED_ROPE,
                            .window = STORED_WINDOW,
                            .ratio = kind == ORACLE_CSA ? 2 : 4,
                            .index_heads = 16,
                            .index_dim = STORED_INDEX,
                            .top_k = 5,
                            .eps = 1e-6};
    return layer_case_make(random, &l, 1, dtype, QUERN_F32);
}

quern_dsv4_layer_cache_params layer_storage_params(const layer_case *c, const layer_storage *how,
                                                   int64_t sequences)
{
    quern_dsv4_layer_cache_params p = layer_store_params(c, sequences, 2);
    p.dtype = how->dtype;
    p.format = how->format;
    p.key_format = c->shape.kind == ORACLE_CSA ? how->key_format : QUERN_DSV4_ROWS;
    p.page = c->shape.kind == ORACLE_SWA ? 0 : how->page;
    return p;
}

void layer_expect_error(quern_status status, quern_status expected, const char *sentence)
{
    assert_int_equal(status, expected);
    if (strstr(quern_last_error(NULL), sentence) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(NULL), sentence);
}
