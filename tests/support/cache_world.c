/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "cache_world.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

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
    if (test_random_one_in(random, 3)) return p;
    p.block_size = 4;
    p.stride = test_random_one_in(random, 2) ? 4 : 2;
    p.separate_slc = test_random_one_in(random, 2);
    p.separate_win = test_random_one_in(random, 2);
    p.window = 30;
    p.step = STEP;
    return p;
}

world world_make(test_random *random)
{
    world w = {.nsa = QUERN_NSA_PARAMS_INIT};
    const quern_cache_params p = random_params(random);
    cache_case_make(&w.cache, &p, random);
    w.ctx = test_context(test_random_level(random), 2);
    for (int i = 0; i < ROWS; i++) {
        const int64_t shape[] = {BANK, i == 0 ? HEADS : p.kv_heads, i == 0 || i % 2 == 1 ? p.dim : p.dim_v};
        w.bank[i] = test_tensor_make(random, p.dtype, 3, shape, TEST_CONTIGUOUS);
        test_tensor_normal(&w.bank[i], random, 1);
    }
    w.nsa.block_size = 4;
    w.nsa.stride = p.stride;
    w.nsa.num_selected = 6;
    w.nsa.window = 30;
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

quern_status world_append(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                          const uint8_t *token, int64_t n)
{
    const quern_cache_params *p = &w->cache.params;
    quern_tensor rows[ROWS];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    const quern_cache_batch batch = {sizeof batch, 1, &sequence, &n, table};
    for (int i = 1; i < ROWS; i++) rows[i] = world_rows(w, i, token, n);
    t.k = &rows[1], t.v = &rows[2];
    if (p->separate_slc) t.k_slc = &rows[3], t.v_slc = &rows[4];
    if (p->separate_win) t.k_win = &rows[5], t.v_win = &rows[6];
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
static quern_tensor decode(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                           const uint8_t *token, int64_t length)
{
    const quern_cache_params *p = &w->cache.params;
    const int64_t n = length < QUERIES ? length : QUERIES, shape[] = {n, HEADS, p->dim_v};
    const quern_cache_batch batch = {sizeof batch, 1, &sequence, &n, table};
    const quern_tensor q = world_rows(w, 0, token + length - n, n),
                       o = quern_tensor_contiguous(calloc((size_t)(n * HEADS * p->dim_v) + 1, 4), p->dtype, 3,
                                                   shape);
    const quern_attention_params dense = QUERN_ATTENTION_PARAMS_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    t.q = &q;
    t.o = &o;
    size_t bytes;
    quern_status status = p->block_size > 0
                              ? quern_nsa_decode_workspace(w->ctx, &w->nsa, cache, &batch, &t, &bytes)
                              : quern_attention_decode_workspace(w->ctx, &dense, cache, &batch, &t, &bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
    test_workspace space = test_workspace_make(bytes);
    status = p->block_size > 0
                 ? quern_nsa_decode(w->ctx, NULL, &w->nsa, cache, &batch, &t, space.data, bytes)
                 : quern_attention_decode(w->ctx, NULL, &dense, cache, &batch, &t, space.data, bytes);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
    test_workspace_close(&space);
    free(q.data);
    return o;
}

void world_check(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                 const uint8_t *token, int64_t length)
{
    test_random random = {1};
    cache_case alone;
    quern_cache_params p = w->cache.params;
    int64_t held, entries;
    assert_int_equal(quern_cache_length(cache, sequence, &held, &entries), QUERN_OK);
    assert_int_equal(held, length);
    assert_int_equal(entries,
                     p.block_size > 0 && length >= p.block_size ? (length - p.block_size) / p.stride + 1 : 0);
    if (length == 0) return;
    p.sequences = 1;
    p.page = 0;
    cache_case_make(&alone, &p, &random);
    for (int64_t at = 0; at < length; at += STEP)
        assert_int_equal(
            world_append(w, alone.cache, 0, NULL, token + at, length - at < STEP ? length - at : STEP),
            QUERN_OK);
    const quern_tensor expected = decode(w, alone.cache, 0, NULL, token, length),
                       got = decode(w, cache, sequence, table, token, length);
    assert_memory_equal(expected.data, got.data,
                        (size_t)(expected.shape[0] * HEADS * p.dim_v) * quern_dtype_size(p.dtype));
    free(expected.data), free(got.data);
    cache_case_free(&alone);
}

void world_check_all(const world *w)
{
    for (int32_t s = 0; s < SEQUENCES; s++)
        world_check(w, w->cache.cache, s, w->cache.table, w->token[s], w->length[s]);
}

/* ---- pages ---- */

int32_t *world_row(const world *w, int64_t sequence)
{
    return w->cache.table + sequence * w->cache.columns.columns;
}

/* Rows of run i (tokens, entries, selected branch, ring) of so many tokens; its first column. */
static int64_t run_rows(const world *w, int i, int64_t tokens, int64_t *first)
{
    const quern_cache_columns *c = &w->cache.columns;
    const quern_cache_params *p = &w->cache.params;
    const int64_t firsts[] = {c->tokens, c->entries, c->slc, c->win};
    *first = firsts[i];
    if (i == 1)
        return p->block_size == 0 || tokens < p->block_size ? 0 : (tokens - p->block_size) / p->stride + 1;
    return i == 0 || (i == 2 && p->separate_slc) || (i == 3 && p->separate_win) ? tokens : 0;
}

static int64_t run_pages(const world *w, int i, int64_t tokens)
{
    quern_cache_columns pages = QUERN_CACHE_COLUMNS_INIT;
    assert_int_equal(quern_cache_pages_of(&w->cache.params, tokens, &pages), QUERN_OK);
    const int64_t counts[] = {pages.tokens, pages.entries, pages.slc, pages.win};
    return counts[i];
}

/* Whether another row of the table names a page. */
static bool named_elsewhere(const world *w, int32_t page, int64_t sequence)
{
    for (int64_t s = 0; s < SEQUENCES; s++)
        for (int64_t c = 0; c < w->cache.columns.columns && s != sequence; c++)
            if (world_row(w, s)[c] == page) return true;
    return false;
}

int32_t world_free_page(const world *w)
{
    for (int32_t page = 0;; page++) {
        bool used = named_elsewhere(w, page, -1);
        if (!used) return page;
    }
}

void world_deal(world *w, int64_t sequence, int64_t tokens, int64_t origin, test_random *random)
{
    for (int i = 0; i < 4 && w->cache.table != NULL; i++) {
        int64_t first;
        const int64_t rows = run_rows(w, i, tokens, &first), pages = run_pages(w, i, tokens);
        for (int64_t k = 0; k < pages; k++) {
            int32_t *cell = &world_row(w, sequence)[first + k];
            const bool full = i < 3 && (k + 1) * QUERN_CACHE_PAGE <= rows;
            if (origin >= 0 && full && !test_random_one_in(random, 3))
                *cell = world_row(w, origin)[first + k];
            else if (*cell < 0 || *cell >= w->cache.params.pages ||
                     (origin >= 0 && named_elsewhere(w, *cell, sequence)))
                *cell = -1, *cell = world_free_page(w);
        }
    }
}

/* Whether tokens [from, to) go into a page that another sequence reads. */
static bool writes_shared(const world *w, int64_t sequence, int64_t from, int64_t to)
{
    for (int i = 0; i < 3 && w->cache.table != NULL; i++) {
        int64_t first;
        const int64_t begin = run_rows(w, i, from, &first), end = run_rows(w, i, to, &first);
        for (int64_t k = begin / QUERN_CACHE_PAGE; k * QUERN_CACHE_PAGE < end && begin < end; k++)
            for (int64_t s = 0; s < SEQUENCES; s++)
                if (s != sequence && k < run_pages(w, i, w->length[s]) &&
                    world_row(w, s)[first + k] == world_row(w, sequence)[first + k])
                    return true;
    }
    return false;
}

/* ---- what can happen to sequences ---- */

void world_empty(world *w, int64_t s)
{
    assert_int_equal(quern_cache_reset(w->cache.cache, s), QUERN_OK);
    for (int64_t c = 0; c < w->cache.columns.columns && w->cache.table != NULL; c++) world_row(w, s)[c] = -1;
    w->length[s] = 0;
}

void world_grow(world *w, int64_t s, test_random *random)
{
    const int64_t room = CAPACITY - w->length[s], n = test_random_int(random, 0, room < STEP ? room : STEP);
    uint8_t token[STEP];
    for (int64_t i = 0; i < n; i++) token[i] = (uint8_t)test_random_int(random, 0, BANK - 1);
    world_deal(w, s, w->length[s] + n, -1, random);
    if (writes_shared(w, s, w->length[s], w->length[s] + n)) {
        void *before = cache_case_copy(&w->cache);
        assert_int_equal(world_append(w, w->cache.cache, (int32_t)s, w->cache.table, token, n),
                         QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(w->ctx), "each page is written in one place"));
        cache_case_check_same(&w->cache, before);
        world_empty(w, s);
        return;
    }
    if (world_append(w, w->cache.cache, (int32_t)s, w->cache.table, token, n) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
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
    assert_int_equal(quern_cache_save(w->cache.cache, s, w->cache.table, NULL, &room), QUERN_OK);
    char *data = malloc(room + 5);
    memset(data, 0x5a, room + 5);
    *bytes = room + 3;
    assert_int_equal(quern_cache_save(w->cache.cache, s, w->cache.table, data, bytes), QUERN_OK);
    assert_int_equal(*bytes, room);
    for (int i = 0; i < 5; i++) assert_int_equal(data[room + (size_t)i], 0x5a);
    return data;
}
