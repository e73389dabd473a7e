/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_float_state_test.c - appends to caches and decoding from them under every floating-point state that a
 * caller may have set: the bits are those of the default one, which comes back as it was.
 */
#include "cache_case.h"
#include "cmocka_c11.h"
#include "float_states.h"

#include <string.h>

enum { SEQUENCES = 2, TOKENS = 90, HEADS = 4, KV_HEADS = 2, DIM = 24, PIECE = 45, SELECTED = 3 };

/* Tokens of two sequences, and what queries at the last of them get. */
typedef struct decoding {
    cache_case cache;
    quern_nsa_params nsa;
    test_tensor k, v, w_k, w_v, q, w_gate, gates, o, lse, block_idx, block_count,
        raw; /* raw: rows of a cache */
} decoding;

static test_tensor normal(test_random *random, quern_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[] = {a, b, c};
    test_tensor t = test_tensor_make(random, dtype, c > 0 ? 3 : 2, shape, TEST_CONTIGUOUS);
    if (dtype != QUERN_I32 && dtype != QUERN_U8) test_tensor_normal(&t, random, 1);
    return t;
}

static quern_tensor rows_of(const test_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = t->view;
    v.data = (char *)v.data + first * v.strides[0] * (int64_t)quern_dtype_size(v.dtype);
    v.shape[0] = count;
    return v;
}

/* Fills the cache, piece by piece. */
static void append(const decoding *d, quern_context *ctx)
{
    static const int32_t ids[SEQUENCES] = {1, 0};
    static const int64_t counts[SEQUENCES] = {PIECE, PIECE};
    for (int64_t at = 0; at < TOKENS; at += PIECE) {
        const quern_tensor k = rows_of(&d->k, SEQUENCES * at, SEQUENCES * PIECE),
                           v = rows_of(&d->v, SEQUENCES * at, SEQUENCES * PIECE);
        quern_cache_batch batch = QUERN_CACHE_BATCH_INIT;
        quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
        size_t bytes;
        batch.batch = SEQUENCES;
        batch.sequences = ids;
        batch.counts = counts;
        t.k = &k;
        t.v = &v;
        if (d->cache.params.compress == QUERN_NSA_COMPRESS_LINEAR && d->cache.params.block_size > 0) {
            t.w_k = &d->w_k.view;
            t.w_v = &d->w_v.view;
        }
        assert_int_equal(quern_cache_append_workspace(ctx, d->cache.cache, &batch, &t, &bytes), QUERN_OK);
        test_workspace w = test_workspace_make(bytes);
        assert_int_equal(quern_cache_append(ctx, NULL, d->cache.cache, &batch, &t, w.data, bytes), QUERN_OK);
        test_workspace_close(&w);
    }
    memcpy(d->raw.view.data, d->cache.rows_at, d->cache.rows_bytes);
}

static void run(void *arg, quern_context *ctx)
{
    static const int32_t ids[SEQUENCES] = {1, 0};
    static const int64_t counts[SEQUENCES] = {3, 2};
    const decoding *d = arg;
    const bool dense = d->cache.params.block_size == 0;
    quern_cache_batch batch = QUERN_CACHE_BATCH_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    size_t bytes;
    quern_cache *cache; /* a new one takes the same pages */
    assert_int_equal(quern_cache_create(&d->cache.params, d->cache.memory.data, d->cache.memory.bytes,
                                        d->cache.rows_at, d->cache.rows_bytes, &cache),
                     QUERN_OK);
    assert_ptr_equal(cache, d->cache.cache);
    append(d, ctx);
    batch.batch = SEQUENCES;
    batch.sequences = ids;
    batch.counts = counts;
    t.q = &d->q.view;
    t.o = &d->o.view;
    if (dense) {
        t.lse = &d->lse.view;
        assert_int_equal(quern_attention_decode_workspace(ctx, &params, d->cache.cache, &batch, &t, &bytes),
                         QUERN_OK);
    } else {
        t.w_gate = &d->w_gate.view;
        t.gates = &d->gates.view;
        t.block_idx = &d->block_idx.view;
        t.block_count = &d->block_count.view;
        assert_int_equal(quern_nsa_decode_workspace(ctx, &d->nsa, d->cache.cache, &batch, &t, &bytes),
                         QUERN_OK);
    }
    test_workspace w = test_workspace_make(bytes);
    assert_int_equal(
        dense ? quern_attention_decode(ctx, NULL, &params, d->cache.cache, &batch, &t, w.data, bytes)
              : quern_nsa_decode(ctx, NULL, &d->nsa, d->cache.cache, &batch, &t, w.data, bytes),
        QUERN_OK);
    test_workspace_close(&w);
}

static void check(const char *name, quern_dtype dtype, int64_t block, quern_nsa_compress_kind compress)
{
    enum { QUERIES = 5 };
    test_random random = {(uint64_t)dtype + 90};
    decoding d = {.nsa = QUERN_NSA_PARAMS_INIT};
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    p.dtype = dtype;
    p.sequences = SEQUENCES;
    p.kv_heads = KV_HEADS;
    p.dim = p.dim_v = DIM;
    p.capacity = TOKENS;
    p.block_size = block;
    p.stride = block / 2;
    p.compress = compress;
    cache_case_make(&d.cache, &p);
    memset(d.cache.rows_at, 0, d.cache.rows_bytes);
    d.nsa.compress = compress;
    d.nsa.gate = QUERN_NSA_GATE_WEIGHTS;
    d.nsa.block_size = block;
    d.nsa.stride = block / 2;
    d.nsa.select_block = block;
    d.nsa.num_selected = SELECTED;
    d.nsa.window = 20;
    const int64_t raw = (int64_t)d.cache.rows_bytes;
    d.k = normal(&random, dtype, SEQUENCES * TOKENS, KV_HEADS, DIM);
    d.v = normal(&random, dtype, SEQUENCES * TOKENS, KV_HEADS, DIM);
    d.w_k = normal(&random, dtype, KV_HEADS, block > 0 ? block * DIM : 1, DIM);
    d.w_v = normal(&random, dtype, KV_HEADS, block > 0 ? block * DIM : 1, DIM);
    d.q = normal(&random, dtype, QUERIES, HEADS, DIM);
    d.w_gate = normal(&random, dtype, HEADS, 3, DIM);
    d.gates = normal(&random, QUERN_F32, QUERIES, HEADS, 3);
    d.o = normal(&random, dtype, QUERIES, HEADS, DIM);
    d.lse = normal(&random, QUERN_F32, HEADS, QUERIES, 0);
    d.block_idx = normal(&random, QUERN_I32, KV_HEADS, QUERIES, SELECTED);
    d.block_count = normal(&random, QUERN_I32, KV_HEADS, QUERIES, 0);
    d.raw = test_tensor_make(&random, QUERN_U8, 1, &raw, TEST_CONTIGUOUS);
    test_float_scale(&d.v);
    test_float_case f = {.name = name,
                         .call = run,
                         .arg = &d,
                         .t = {&d.k, &d.v, &d.w_k, &d.w_v, &d.q, &d.w_gate, &d.gates, &d.o, &d.lse,
                               &d.block_idx, &d.block_count, &d.raw}};
    test_float_case_check(&f);
    for (int i = 0; f.t[i] != NULL; i++) test_tensor_free(f.t[i]);
    cache_case_free(&d.cache);
}

static void dense_decoding_keeps_the_callers_state(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    (void)state;
    for (int i = 0; i < 3; i++) check("attention decode", dtypes[i], 0, QUERN_NSA_COMPRESS_MEAN);
}

static void sparse_decoding_keeps_the_callers_state(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    (void)state;
    for (int i = 0; i < 3; i++) {
        check("nsa decode, means", dtypes[i], 16, QUERN_NSA_COMPRESS_MEAN);
        check("nsa decode, linear", dtypes[i], 16, QUERN_NSA_COMPRESS_LINEAR);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_decoding_keeps_the_callers_state),
        cmocka_unit_test(sparse_decoding_keeps_the_callers_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
