/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cache_world.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

enum { Q_INDEX = 7, K_INDEX };

#ifdef QUERN_TEST_GPU
enum { INDEXER = false };
#else
enum { INDEXER = true };
#endif

static quern_cache_params random_params(test_random *random)
{
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    p.dtype = (quern_dtype)test_random_int(random, 0, 2);
    p.sequences = SEQUENCES;
    p.kv_heads = test_random_int(random, 1, 2);
    p.dim = 8 * test_random_int(random, 1, 4);
    p.dim_v = 8 * test_random_int(random, 1, 4);
    p.capacity = CAPACITY;
    p.page = test_random_one_in(random, 3) ? 0 : QUERN_CACHE_PAGE;
    if (p.page != 0 && test_random_one_in(random, 2)) p.pages = test_random_int(random, 8, 20);
    if (INDEXER && test_random_one_in(random, 2)) {
        p.index_heads = test_random_one_in(random, 2) ? 1 : p.kv_heads;
        p.index_dim = 8 * test_random_int(random, 1, 4);
    }
    if (test_random_one_in(random, 3)) return p;
    p.block_size = 4;
    p.stride = test_random_one_in(random, 2) ? 4 : 2;
    p.separate_slc = test_random_one_in(random, 2);
    p.separate_win = test_random_one_in(random, 2);
    p.window = 30;
    p.step = STEP;
    return p;
}

/* Heads and channels of a row of the bank. */
static void bank_shape(const quern_cache_params *p, int bank, int64_t shape[2])
{
    shape[0] = bank == 0 ? HEADS : bank == K_INDEX ? p->index_heads : p->kv_heads;
    shape[1] = bank >= Q_INDEX ? p->index_dim : bank == 0 || bank % 2 == 1 ? p->dim : p->dim_v;
}

/* Sparse attention by entries, by the indexer with entries, or by the indexer alone (preset msa). */
static void set_nsa(const quern_cache_params *p, quern_nsa_params *n)
{
    n->block_size = 4;
    n->stride = p->stride;
    n->num_selected = 6;
    n->window = 30;
    if (p->index_heads == 0) return;
    if (p->block_size == 0) assert_int_equal(quern_nsa_params_preset(n, "msa"), QUERN_OK);
    n->selection = QUERN_NSA_LIST_INDEXED;
    n->select_block = 8;
    n->num_selected = 6;
}

world world_make(test_random *random)
{
    world w = {.nsa = QUERN_NSA_PARAMS_INIT};
    const quern_cache_params p = random_params(random);
    cache_case_make(&w.cache, &p);
    w.ctx = test_context(test_random_level(random), 2);
    for (int i = 0; i < ROWS; i++) {
        int64_t shape[3] = {BANK};
        bank_shape(&p, i, shape + 1);
        w.bank[i] = test_tensor_make(random, p.dtype, 3, shape, TEST_CONTIGUOUS);
        test_tensor_normal(&w.bank[i], random, 1);
    }
    set_nsa(&p, &w.nsa);
    return w;
}

void world_free(world *w)
{
    for (int i = 0; i < ROWS; i++) test_tensor_free(&w->bank[i]);
    quern_context_destroy(w->ctx);
    cache_case_free(&w->cache);
}

quern_tensor world_rows(const world *w, int bank, const uint8_t *token, int64_t n)
{
    const quern_tensor *b = &w->bank[bank].view;
    const size_t bytes = (size_t)b->strides[0] * quern_dtype_size(b->dtype);
    char *data = malloc((size_t)n * bytes + 1);
    for (int64_t i = 0; i < n; i++)
        memcpy(data + (size_t)i * bytes, (const char *)b->data + token[i] * bytes, bytes);
    const int64_t shape[] = {n, b->shape[1], b->shape[2]};
    return quern_tensor_contiguous(data, b->dtype, 3, shape);
}

quern_status world_append(const world *w, quern_cache *cache, int32_t sequence, const uint8_t *token,
                          int64_t n)
{
    const quern_cache_params *p = &w->cache.params;
    quern_tensor rows[ROWS];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    const quern_cache_batch batch = {sizeof batch, 1, &sequence, &n};
    for (int i = 1; i < ROWS; i++) rows[i] = world_rows(w, i, token, n);
    t.k = &rows[1], t.v = &rows[2];
    if (p->separate_slc) t.k_slc = &rows[3], t.v_slc = &rows[4];
    if (p->separate_win) t.k_win = &rows[5], t.v_win = &rows[6];
    if (p->index_heads > 0) t.k_index = &rows[K_INDEX];
    size_t bytes;
    if (quern_cache_append_workspace(w->ctx, cache, &batch, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    test_workspace space = test_workspace_make(bytes);
    const quern_status status = quern_cache_append(w->ctx, NULL, cache, &batch, &t, space.data, bytes);
    test_workspace_close(&space);
    for (int i = 1; i < ROWS; i++) free(rows[i].data);
    return status;
}

/* The results of the newest queries of a sequence. */
static quern_tensor decode(const world *w, quern_cache *cache, int32_t sequence, const uint8_t *token,
                           int64_t length)
{
    const quern_cache_params *p = &w->cache.params;
    const int64_t n = length < QUERIES ? length : QUERIES, shape[] = {n, HEADS, p->dim_v};
    const quern_cache_batch batch = {sizeof batch, 1, &sequence, &n};
    const bool sparse = p->block_size > 0 || p->index_heads > 0;
    const quern_tensor q = world_rows(w, 0, token + length - n, n),
                       q_index = world_rows(w, Q_INDEX, token + length - n, n),
                       o = quern_tensor_contiguous(calloc((size_t)(n * HEADS * p->dim_v) + 1, 4), p->dtype, 3,
                                                   shape);
    const quern_attention_params dense = QUERN_ATTENTION_PARAMS_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &o;
    if (p->index_heads > 0) t.q_index = &q_index;
    size_t bytes;
    quern_status status = sparse
                              ? quern_nsa_decode_workspace(w->ctx, &w->nsa, cache, &batch, &t, &bytes)
                              : quern_attention_decode_workspace(w->ctx, &dense, cache, &batch, &t, &bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
    test_workspace space = test_workspace_make(bytes);
    status = sparse ? quern_nsa_decode(w->ctx, NULL, &w->nsa, cache, &batch, &t, space.data, bytes)
                    : quern_attention_decode(w->ctx, NULL, &dense, cache, &batch, &t, space.data, bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
    test_workspace_close(&space);
    free(q.data), free(q_index.data);
    return o;
}

void world_check(const world *w, quern_cache *cache, int32_t sequence, const uint8_t *token, int64_t length)
{
    cache_case alone;
    quern_cache_params p = w->cache.params;
    int64_t held, entries;
    assert_int_equal(quern_cache_length(cache, sequence, &held, &entries), QUERN_OK);
    assert_int_equal(held, length);
    assert_int_equal(entries,
                     p.block_size > 0 && length >= p.block_size ? (length - p.block_size) / p.stride + 1 : 0);
    if (length == 0) return;
    p.sequences = 1;
    p.page = p.pages = 0;
    cache_case_make(&alone, &p);
    for (int64_t at = 0; at < length; at += STEP)
        assert_int_equal(world_append(w, alone.cache, 0, token + at, length - at < STEP ? length - at : STEP),
                         QUERN_OK);
    const quern_tensor expected = decode(w, alone.cache, 0, token, length),
                       got = decode(w, cache, sequence, token, length);
    assert_memory_equal(expected.data, got.data,
                        (size_t)(expected.shape[0] * HEADS * p.dim_v) * quern_dtype_size(p.dtype));
    free(expected.data), free(got.data);
    cache_case_free(&alone);
}

void world_check_all(const world *w)
{
    for (int32_t s = 0; s < SEQUENCES; s++) world_check(w, w->cache.cache, s, w->token[s], w->length[s]);
}

/* ---- what can happen to sequences ---- */

void world_empty(world *w, int64_t s)
{
    assert_int_equal(quern_cache_reset(w->cache.cache, s), QUERN_OK);
    w->length[s] = 0;
}

void world_grow(world *w, int64_t s, test_random *random)
{
    const int64_t room = CAPACITY - w->length[s], n = test_random_int(random, 0, room < STEP ? room : STEP);
    uint8_t token[STEP];
    for (int64_t i = 0; i < n; i++) token[i] = (uint8_t)test_random_int(random, 0, BANK - 1);
    void *before = cache_case_copy(&w->cache);
    if (world_append(w, w->cache.cache, (int32_t)s, token, n) != QUERN_OK) {
        if (strstr(quern_last_error(w->ctx), " pages: ") == NULL) fail_msg("%s", quern_last_error(w->ctx));
        cache_case_check_same(&w->cache, before);
        world_empty(w, s);
        return;
    }
    free(before);
    memcpy(w->token[s] + w->length[s], token, (size_t)n);
    w->length[s] += n;
}

void world_copied(world *w, int64_t from, int64_t to)
{
    w->length[to] = w->length[from];
    memcpy(w->token[to], w->token[from], (size_t)w->length[from]);
}

char *world_save(const world *w, int64_t s, size_t *bytes)
{
    size_t room;
    assert_int_equal(quern_cache_save(w->ctx, w->cache.cache, s, NULL, &room), QUERN_OK);
    char *data = malloc(room + 5);
    memset(data, 0x5a, room + 5);
    *bytes = room + 3;
    assert_int_equal(quern_cache_save(w->ctx, w->cache.cache, s, data, bytes), QUERN_OK);
    assert_int_equal(*bytes, room);
    for (int i = 0; i < 5; i++) assert_int_equal(data[room + (size_t)i], 0x5a);
    return data;
}
