/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_offsets_test.c - caches of more than 2^32 elements, over a mapping that reserves no memory: the last
 * sequence of a contiguous cache, and the last pages of a pool, decode what a small cache does.
 */
#include "cmocka_c11.h"
#include "compare.h"
#include "tensor.h"

#include <quern/cache.h>

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { TOKENS = 200, QUERIES = 2, HEADS = 4, KV_HEADS = 2, DIM = 64, BLOCK = 16 };

typedef struct rows {
    float q[QUERIES * HEADS * DIM], k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM];
} rows;

static quern_cache_params params_of(bool large, bool sparse, int64_t page)
{
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    p.dtype = QUERN_F32;
    p.sequences = large ? 3 : 1;
    p.kv_heads = KV_HEADS;
    p.dim = p.dim_v = DIM;
    p.capacity = large && page == 0 ? 1 << 23 : TOKENS;
    p.page = page;
    p.pages = page == 0 ? 0 : large ? 1 << 19 : 16;
    p.block_size = sparse ? BLOCK : 0;
    return p;
}

/* Appends all tokens to the cache's last sequence and attends from the newest; o [QUERIES, HEADS, DIM]. */
static void decode(quern_context *ctx, const quern_cache_params *p, quern_cache *cache, const int32_t *table,
                   rows *r, float *o)
{
    const int32_t id = (int32_t)p->sequences - 1;
    const int64_t all = TOKENS, newest = QUERIES, kv[] = {TOKENS, KV_HEADS, DIM}, q[] = {QUERIES, HEADS, DIM};
    const quern_tensor k = quern_tensor_contiguous(r->k, QUERN_F32, 3, kv),
                       v = quern_tensor_contiguous(r->v, QUERN_F32, 3, kv),
                       query = quern_tensor_contiguous(r->q, QUERN_F32, 3, q),
                       out = quern_tensor_contiguous(o, QUERN_F32, 3, q);
    quern_cache_batch batch = {sizeof batch, 1, &id, &all, table};
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    quern_decode_tensors d = QUERN_DECODE_TENSORS_INIT;
    quern_nsa_params nsa = QUERN_NSA_PARAMS_INIT;
    const quern_attention_params dense = QUERN_ATTENTION_PARAMS_INIT;
    size_t bytes;
    t.k = &k;
    t.v = &v;
    d.q = &query;
    d.o = &out;
    nsa.block_size = BLOCK;
    nsa.num_selected = 5;
    nsa.window = 30;
    assert_int_equal(quern_cache_append_workspace(ctx, cache, &batch, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    if (quern_cache_append(ctx, NULL, cache, &batch, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    batch.counts = &newest;
    const bool sparse = p->block_size > 0;
    assert_int_equal(sparse ? quern_nsa_decode_workspace(ctx, &nsa, cache, &batch, &d, &bytes)
                            : quern_attention_decode_workspace(ctx, &dense, cache, &batch, &d, &bytes),
                     QUERN_OK);
    w = test_workspace_make(bytes);
    assert_int_equal(sparse ? quern_nsa_decode(ctx, NULL, &nsa, cache, &batch, &d, w.data, bytes)
                            : quern_attention_decode(ctx, NULL, &dense, cache, &batch, &d, w.data, bytes),
                     QUERN_OK);
    test_workspace_close(&w);
}

/* In a cache of these parameters; pages are the pool's last. */
static void decode_in(quern_context *ctx, const quern_cache_params *p, rows *r, float *o)
{
    size_t memory, bytes;
    quern_cache *cache;
    quern_cache_columns columns = QUERN_CACHE_COLUMNS_INIT;
    assert_int_equal(quern_cache_size(p, &memory, &bytes), QUERN_OK);
    assert_int_equal(quern_cache_columns_of(p, &columns), QUERN_OK);
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        print_message("this machine refuses mappings without reserve\n");
        skip();
    }
    const int64_t cells = p->sequences * columns.columns;
    int32_t *table = p->page > 0 ? malloc((size_t)cells * sizeof *table) : NULL;
    for (int64_t i = 0; i < cells && table != NULL; i++) table[i] = (int32_t)(p->pages - 1 - i);
    test_workspace w = test_workspace_make(memory);
    assert_int_equal(quern_cache_create(p, w.data, memory, at, bytes, &cache), QUERN_OK);
    decode(ctx, p, cache, table, r, o);
    test_workspace_close(&w);
    munmap(at, bytes);
    free(table);
}

static void offsets_beyond_32_bits(void **state)
{
    static rows r;
    float near[QUERIES * HEADS * DIM], far[QUERIES * HEADS * DIM];
    double expected[QUERIES * HEADS * DIM], out[QUERIES * HEADS * DIM];
    test_random random = {4};
    (void)state;
    for (int i = 0; i < TOKENS * KV_HEADS * DIM; i++) {
        r.k[i] = (float)test_random_normal(&random);
        r.v[i] = (float)test_random_normal(&random);
    }
    for (int i = 0; i < QUERIES * HEADS * DIM; i++) r.q[i] = (float)test_random_normal(&random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int way = 0; way < 4; way++) {
        const quern_cache_params small = params_of(false, way % 2, 0),
                                 large = params_of(true, way % 2, way / 2 * QUERN_CACHE_PAGE);
        decode_in(ctx, &small, &r, near);
        decode_in(ctx, &large, &r, far);
        for (int i = 0; i < QUERIES * HEADS * DIM; i++) {
            expected[i] = (double)near[i];
            out[i] = (double)far[i];
        }
        /* Longer capacities cut keys into shares, whose sums round apart. */
        test_check("o", out, expected, QUERIES * HEADS * DIM, 2 * test_forward_bound(QUERN_F32));
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(offsets_beyond_32_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
