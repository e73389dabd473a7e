/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_offsets_test.c - pools of more than 2^32 elements, over a mapping that reserves no memory: a step
 * whose tables name the last pages decodes what a small cache does.
 */
#include "cmocka_c11.h"
#include "tensor.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { TOKENS = 200, QUERIES = 2, HEADS = 4, KV_HEADS = 2, DIM = 64, BLOCK = 16 };

typedef struct rows {
    float q[QUERIES * HEADS * DIM], k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM];
} rows;

/* A pool, of which a table names the last pages. */
typedef struct pool {
    quern_tensor pages, table;
    int32_t columns[TOKENS / 64 + 1];
    size_t bytes;
} pool;

static void pool_open(pool *p, int64_t pages, int64_t columns)
{
    const int64_t shape[] = {pages, KV_HEADS, 64 * 2 * DIM}, of_table[] = {1, columns};
    p->bytes = (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float);
    void *at =
        mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        print_message("this machine refuses mappings without reserve\n");
        skip();
    }
    for (int64_t i = 0; i < columns; i++) p->columns[i] = (int32_t)(pages - 1 - i);
    p->pages = quern_tensor_contiguous(at, QUERN_F32, 3, shape);
    p->table = quern_tensor_contiguous(p->columns, QUERN_I32, 2, of_table);
}

/* Appends all tokens and attends from the newest; o [QUERIES, HEADS, DIM]. */
static void decode_in(quern_context *ctx, int64_t pages, bool sparse, rows *r, float *o)
{
    static char space[1 << 24];
    const int64_t kv[] = {TOKENS, KV_HEADS, DIM}, q[] = {QUERIES, HEADS, DIM}, one[] = {1}, two[] = {2};
    int32_t slots[] = {0}, from[] = {0}, newest[] = {TOKENS - QUERIES}, cu[] = {0, TOKENS},
            cu_q[] = {0, QUERIES};
    const quern_tensor k = quern_tensor_contiguous(r->k, QUERN_F32, 3, kv),
                       v = quern_tensor_contiguous(r->v, QUERN_F32, 3, kv),
                       query = quern_tensor_contiguous(r->q, QUERN_F32, 3, q),
                       out = quern_tensor_contiguous(o, QUERN_F32, 3, q),
                       slot = quern_tensor_contiguous(slots, QUERN_I32, 1, one),
                       at = quern_tensor_contiguous(from, QUERN_I32, 1, one),
                       at_q = quern_tensor_contiguous(newest, QUERN_I32, 1, one),
                       of = quern_tensor_contiguous(cu, QUERN_I32, 1, two),
                       of_q = quern_tensor_contiguous(cu_q, QUERN_I32, 1, two);
    pool tokens, entries;
    pool_open(&tokens, pages, TOKENS / 64 + 1);
    pool_open(&entries, pages, 1);
    quern_cache_tensors t = {.size = sizeof t, .k = &k, .v = &v, .slots = &slot, .positions = &at, .cu = &of};
    quern_decode_tensors d = {
        .size = sizeof d, .q = &query, .o = &out, .slots = &slot, .positions = &at_q, .cu = &of_q};
    t.tokens = d.tokens = &tokens.pages, t.tokens_table = d.tokens_table = &tokens.table;
    if (sparse) t.entries = d.entries = &entries.pages, t.entries_table = d.entries_table = &entries.table;
    quern_cache_step_params append = QUERN_CACHE_STEP_PARAMS_INIT;
    quern_nsa_params nsa = QUERN_NSA_PARAMS_INIT;
    const quern_attention_params dense = QUERN_ATTENTION_PARAMS_INIT;
    append.block_size = sparse ? BLOCK : 0;
    nsa.block_size = BLOCK;
    nsa.num_selected = 5;
    nsa.window = 30;
    if (quern_cache_append_step(ctx, NULL, &append, &t, space, sizeof space) != QUERN_OK ||
        (sparse ? quern_nsa_decode_step(ctx, NULL, &nsa, &d, space, sizeof space)
                : quern_attention_decode_step(ctx, NULL, &dense, &d, space, sizeof space)) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    munmap(tokens.pages.data, tokens.bytes);
    munmap(entries.pages.data, entries.bytes);
}

static void offsets_beyond_32_bits(void **state)
{
    static rows r;
    float near[QUERIES * HEADS * DIM], far[QUERIES * HEADS * DIM];
    test_random random = {4};
    (void)state;
    for (int i = 0; i < TOKENS * KV_HEADS * DIM; i++) {
        r.k[i] = (float)test_random_normal(&random);
        r.v[i] = (float)test_random_normal(&random);
    }
    for (int i = 0; i < QUERIES * HEADS * DIM; i++) r.q[i] = (float)test_random_normal(&random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int sparse = 0; sparse < 2; sparse++) {
        decode_in(ctx, 4, sparse, &r, near);
        decode_in(ctx, 1 << 19, sparse, &r, far);
        assert_memory_equal(near, far, sizeof near);
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(offsets_beyond_32_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
