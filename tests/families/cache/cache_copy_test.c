/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_copy_test.c - forks, saved and restored sequences: whatever happens to the others afterwards, a
 * sequence decodes to the bits of a cache that has seen its tokens alone. Damaged bytes and bad pages are
 * refused and change nothing.
 */
#include "cache_case.h"
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 5, CAPACITY = 300, BANK = 64, STEP = 40, HEADS = 4, QUERIES = 3, ROWS = 7 };

/* Rows of which all sequences are made: q, then k and v of the cache's three pairs. */
typedef struct world {
    cache_case cache;
    quern_context *ctx;
    test_tensor bank[ROWS];
    quern_nsa_params nsa;
    int64_t length[SEQUENCES];
    uint8_t token[SEQUENCES][CAPACITY];
} world;

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

static world world_make(test_random *random)
{
    world w = {.nsa = QUERN_NSA_PARAMS_INIT};
    const quern_cache_params p = random_params(random);
    cache_case_make(&w.cache, &p, random);
    w.ctx = test_context((quern_cpu_level)test_random_int(random, 1, quern_cpu_level_detect()), 2);
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

static void world_free(world *w)
{
    for (int i = 0; i < ROWS; i++) test_tensor_free(&w->bank[i]);
    quern_context_destroy(w->ctx);
    cache_case_free(&w->cache);
}

/* Rows of a bank for tokens, in memory of the caller's. */
static quern_tensor rows_of(const world *w, int bank, const uint8_t *token, int64_t n)
{
    const quern_tensor *b = &w->bank[bank].view;
    const size_t bytes = (size_t)b->strides[0] * quern_dtype_size(b->dtype);
    char *data = malloc((size_t)n * bytes + 1);
    for (int64_t i = 0; i < n; i++)
        memcpy(data + (size_t)i * bytes, (const char *)b->data + token[i] * bytes, bytes);
    const int64_t shape[] = {n, b->shape[1], b->shape[2]};
    return quern_tensor_contiguous(data, b->dtype, 3, shape);
}

static quern_status append(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                           const uint8_t *token, int64_t n)
{
    const quern_cache_params *p = &w->cache.params;
    quern_tensor rows[ROWS];
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    const quern_cache_batch batch = {sizeof batch, 1, &sequence, &n, table};
    for (int i = 1; i < ROWS; i++) rows[i] = rows_of(w, i, token, n);
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
    const quern_tensor q = rows_of(w, 0, token + length - n, n),
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

/* Compares a sequence of a cache with one that has seen nothing else. */
static void check(const world *w, quern_cache *cache, int32_t sequence, const int32_t *table,
                  const uint8_t *token, int64_t length)
{
    test_random random = {1};
    cache_case alone;
    quern_cache_params p = w->cache.params;
    int64_t held;
    assert_int_equal(quern_cache_length(cache, sequence, &held, NULL), QUERN_OK);
    assert_int_equal(held, length);
    if (length == 0) return;
    p.sequences = 1;
    p.page = 0;
    cache_case_make(&alone, &p, &random);
    for (int64_t at = 0; at < length; at += STEP)
        assert_int_equal(append(w, alone.cache, 0, NULL, token + at, length - at < STEP ? length - at : STEP),
                         QUERN_OK);
    const quern_tensor expected = decode(w, alone.cache, 0, NULL, token, length),
                       got = decode(w, cache, sequence, table, token, length);
    assert_memory_equal(expected.data, got.data,
                        (size_t)(expected.shape[0] * HEADS * p.dim_v) * quern_dtype_size(p.dtype));
    free(expected.data), free(got.data);
    cache_case_free(&alone);
}

static void check_all(const world *w)
{
    for (int32_t s = 0; s < SEQUENCES; s++)
        check(w, w->cache.cache, s, w->cache.table, w->token[s], w->length[s]);
}

/* ---- pages ---- */

static int32_t *row_of(const world *w, int64_t sequence)
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
            if (row_of(w, s)[c] == page) return true;
    return false;
}

static int32_t free_page(const world *w)
{
    for (int32_t page = 0;; page++) {
        bool used = named_elsewhere(w, page, -1);
        if (!used) return page;
    }
}

/* Gives a sequence pages of its own for so many tokens. From `origin` (-1: none) it may take full ones. */
static void deal(world *w, int64_t sequence, int64_t tokens, int64_t origin, test_random *random)
{
    for (int i = 0; i < 4 && w->cache.table != NULL; i++) {
        int64_t first;
        const int64_t rows = run_rows(w, i, tokens, &first), pages = run_pages(w, i, tokens);
        for (int64_t k = 0; k < pages; k++) {
            int32_t *cell = &row_of(w, sequence)[first + k];
            const bool full = i < 3 && (k + 1) * QUERN_CACHE_PAGE <= rows;
            if (origin >= 0 && full && !test_random_one_in(random, 3)) *cell = row_of(w, origin)[first + k];
            else if (*cell < 0 || *cell >= w->cache.params.pages ||
                     (origin >= 0 && named_elsewhere(w, *cell, sequence)))
                *cell = -1, *cell = free_page(w);
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
                    row_of(w, s)[first + k] == row_of(w, sequence)[first + k])
                    return true;
    }
    return false;
}

/* ---- what can happen to sequences ---- */

static void empty(world *w, int64_t s)
{
    assert_int_equal(quern_cache_reset(w->cache.cache, s), QUERN_OK);
    for (int64_t c = 0; c < w->cache.columns.columns && w->cache.table != NULL; c++) row_of(w, s)[c] = -1;
    w->length[s] = 0;
}

static void grow(world *w, int64_t s, test_random *random)
{
    const int64_t room = CAPACITY - w->length[s], n = test_random_int(random, 0, room < STEP ? room : STEP);
    uint8_t token[STEP];
    for (int64_t i = 0; i < n; i++) token[i] = (uint8_t)test_random_int(random, 0, BANK - 1);
    deal(w, s, w->length[s] + n, -1, random);
    if (writes_shared(w, s, w->length[s], w->length[s] + n)) {
        void *before = cache_case_copy(&w->cache);
        assert_int_equal(append(w, w->cache.cache, (int32_t)s, w->cache.table, token, n),
                         QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(w->ctx), "each page is written in one place"));
        cache_case_check_same(&w->cache, before);
        empty(w, s);
        return;
    }
    if (append(w, w->cache.cache, (int32_t)s, w->cache.table, token, n) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    memcpy(w->token[s] + w->length[s], token, (size_t)n);
    w->length[s] += n;
}

static void take_back(world *w, int64_t s, test_random *random)
{
    const int64_t n = test_random_int(random, 0, w->length[s] < 8 ? w->length[s] : 8);
    if (quern_cache_rollback(w->cache.cache, s, n) == QUERN_OK) w->length[s] -= n;
    else assert_true(w->cache.params.separate_win);
}

static void copied(world *w, int64_t from, int64_t to)
{
    w->length[to] = w->length[from];
    memcpy(w->token[to], w->token[from], (size_t)w->length[from]);
}

static void fork_one(world *w, int64_t from, int64_t to, test_random *random)
{
    if (test_random_one_in(random, 2) || w->cache.table != NULL) empty(w, to);
    deal(w, to, w->length[from], from, random);
    if (quern_cache_fork(w->cache.cache, from, to, w->cache.table) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    copied(w, from, to);
}

/* Saved bytes, and their number. */
static char *save(const world *w, int64_t s, size_t *bytes)
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

/* Moves a sequence's bytes to another, and into a cache with other pages and capacity. */
static void restore_one(world *w, int64_t from, int64_t to, test_random *random)
{
    size_t bytes;
    char *data = save(w, from, &bytes);
    quern_cache_params p = w->cache.params;
    cache_case other;
    p.sequences = 2;
    p.page = test_random_one_in(random, 2) ? QUERN_CACHE_PAGE : 0;
    p.capacity = w->length[from] + test_random_int(random, 1, 90);
    cache_case_make(&other, &p, random);
    cache_case_assign(&other, 1, w->length[from]);
    if (quern_cache_restore(other.cache, 1, other.table, data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    empty(w, to);
    deal(w, to, w->length[from], -1, random);
    if (quern_cache_restore(w->cache.cache, to, w->cache.table, data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    memset(data, 0xff, bytes);
    copied(w, from, to);
    check(w, other.cache, 1, other.table, w->token[from], w->length[from]);
    free(data);
    cache_case_free(&other);
}

static void copies_are_independent(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("copies_are_independent", 94);
    for (int trial = 0; trial < test_trials(40); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        world w = world_make(&random);
        for (int step = 0; step < 60; step++) {
            const int64_t s = test_random_int(&random, 0, SEQUENCES - 1),
                          other = (s + test_random_int(&random, 1, SEQUENCES - 1)) % SEQUENCES;
            switch (test_random_int(&random, 0, 12)) {
            case 0: empty(&w, s); break;
            case 1: fork_one(&w, s, other, &random); break;
            case 2: restore_one(&w, s, other, &random); break;
            case 3:
            case 4: take_back(&w, s, &random); break;
            default: grow(&w, s, &random); break;
            }
            check(&w, w.cache.cache, (int32_t)s, w.cache.table, w.token[s], w.length[s]);
        }
        check_all(&w);
        world_free(&w);
    }
}

/* ---- refusals ---- */

static void refused(const world *w, quern_status status, quern_status expected, void *before,
                    const char *sentence)
{
    assert_int_equal(status, expected);
    if (strstr(quern_last_error(w->ctx), sentence) == NULL)
        fail_msg("'%s' is not in '%s'", sentence, quern_last_error(w->ctx));
    cache_case_check_same(&w->cache, before);
}

/* Every byte that changes and every length but the right one is refused; so is any other cache. */
static void damaged_bytes_are_refused(void **state)
{
    (void)state;
    for (int trial = 0; trial < 12; trial++) {
        test_random random = {(uint64_t)trial + 5};
        world w = world_make(&random);
        for (int i = 0; i < 4; i++) grow(&w, 0, &random);
        for (int i = 0; i < 2; i++) grow(&w, 1, &random);
        deal(&w, 2, CAPACITY, -1, &random);
        size_t bytes;
        char *data = save(&w, 0, &bytes), *bad = malloc(bytes + 64);
        for (int i = 0; i < 400; i++) {
            size_t n = bytes;
            memcpy(bad, data, bytes);
            memset(bad + bytes, 0, 64);
            const int kind = (int)test_random_int(&random, 0, 3);
            const size_t at = (size_t)test_random_int(&random, 0, kind == 1 ? 127 : (int64_t)bytes - 1);
            if (kind == 2) n = at;
            else if (kind == 3) n += (size_t)test_random_int(&random, 1, 64);
            else bad[at] = (char)(bad[at] ^ (char)(1 << test_random_int(&random, 0, 7)));
            void *before = cache_case_copy(&w.cache);
            refused(&w, quern_cache_restore(w.cache.cache, 1 + i % 2, w.cache.table, bad, n),
                    QUERN_ERR_FORMAT, before, "from ");
        }
        quern_cache_params p = w.cache.params;
        cache_case other;
        if (trial % 4 == 0) p.dim = 48;
        if (trial % 4 == 1) p.kv_heads = 4;
        if (trial % 4 == 2) p.dtype = p.dtype == QUERN_F32 ? QUERN_BF16 : QUERN_F32;
        if (trial % 4 == 3) p.capacity = w.length[0] - 1;
        cache_case_make(&other, &p, &random);
        cache_case_assign(&other, 0, p.capacity);
        void *before = cache_case_copy(&other);
        assert_int_equal(quern_cache_restore(other.cache, 0, other.table, data, bytes), QUERN_ERR_FORMAT);
        cache_case_check_same(&other, before);
        cache_case_free(&other);
        free(data), free(bad);
        check_all(&w);
        world_free(&w);
    }
}

static world paged_world(test_random *random)
{
    world w;
    do {
        w = world_make(random);
        if (w.cache.table != NULL && w.cache.params.block_size == 0) return w;
        world_free(&w);
    } while (true);
}

static void copies_are_checked(void **state)
{
    (void)state;
    test_random random = {77};
    world w = paged_world(&random);
    for (int i = 0; i < 9; i++) grow(&w, 0, &random), grow(&w, 1, &random);
    size_t bytes, room = 1;
    char *data = save(&w, 0, &bytes);
    quern_cache *c = w.cache.cache;
    int32_t *table = w.cache.table;
#define REFUSED(call, status, sentence) refused(&w, call, status, cache_case_copy(&w.cache), sentence)
#define INVALID QUERN_ERR_INVALID_ARGUMENT
    deal(&w, 2, w.length[0], -1, &random);
    REFUSED(quern_cache_fork(c, 0, 5, table), INVALID, "to is 5: 0 to 4");
    REFUSED(quern_cache_fork(c, -1, 2, table), INVALID, "from is -1: 0 to 4");
    REFUSED(quern_cache_fork(c, 2, 2, table), INVALID, "from and to are both 2");
    REFUSED(quern_cache_fork(c, 0, 2, NULL), INVALID, "table is NULL");
    REFUSED(quern_cache_save(c, 9, table, NULL, &room), INVALID, "sequence is 9");
    REFUSED(quern_cache_save(c, 0, NULL, NULL, &room), INVALID, "table is NULL");
    REFUSED(quern_cache_save(c, 0, table, data, NULL), INVALID, "bytes is NULL");
    REFUSED(quern_cache_save(c, 0, table, data, &room), QUERN_ERR_WORKSPACE, "bytes is 1: at least");
    assert_int_equal(room, 1);
    REFUSED(quern_cache_restore(c, 2, table, NULL, bytes), INVALID, "from is NULL");
    REFUSED(quern_cache_restore(c, 2, NULL, data, bytes), INVALID, "table is NULL");
    const int32_t page = row_of(&w, 2)[0];
    row_of(&w, 2)[0] = (int32_t)w.cache.params.pages;
    REFUSED(quern_cache_fork(c, 0, 2, table), INVALID, "table[2][0] is");
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "table[2][0] is");
    row_of(&w, 2)[0] = row_of(&w, 1)[0];
    REFUSED(quern_cache_fork(c, 0, 2, table), INVALID, "which table[1][0] writes");
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[1][0] writes");
    row_of(&w, 2)[0] = row_of(&w, 2)[1];
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[2][0] writes");
    row_of(&w, 2)[0] = row_of(&w, 0)[0]; /* a fork may read this page, a restore would write it */
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[0][0] writes");
    assert_int_equal(quern_cache_fork(c, 0, 2, table), QUERN_OK);
    copied(&w, 0, 2);
    check_all(&w);
    empty(&w, 0); /* its page stays readable, and nobody takes it */
    row_of(&w, 3)[0] = row_of(&w, 2)[0];
    REFUSED(append(&w, c, 3, table, w.token[1], 4), INVALID, "which table[2][0] reads");
    row_of(&w, 3)[0] = page;
    assert_int_equal(append(&w, c, 3, table, w.token[1], 4), QUERN_OK);
    check(&w, c, 2, table, w.token[2], w.length[2]);
    free(data);
    world_free(&w);
}

/* A page that is not full, or of a ring, is written again: two sequences may not share it. */
static void a_fork_shares_full_pages_alone(void **state)
{
    (void)state;
    test_random random = {79};
    world w;
    do w = world_make(&random);
    while ((w.cache.table == NULL || !w.cache.params.separate_win) && (world_free(&w), true));
    while (w.length[0] < 70) grow(&w, 0, &random);
    const int64_t first[] = {w.cache.columns.tokens + w.length[0] / QUERN_CACHE_PAGE, w.cache.columns.win,
                             w.cache.columns.tokens};
    for (int i = 0; i < 3; i++) {
        empty(&w, 1);
        deal(&w, 1, w.length[0], -1, &random);
        row_of(&w, 1)[first[i]] = row_of(&w, 0)[first[i]];
        if (i < 2)
            REFUSED(quern_cache_fork(w.cache.cache, 0, 1, w.cache.table), INVALID,
                    "each page is written in one place");
        else assert_int_equal(quern_cache_fork(w.cache.cache, 0, 1, w.cache.table), QUERN_OK);
    }
    copied(&w, 0, 1);
    check_all(&w);
    world_free(&w);
}

/* A call that is refused for one page leaves the owners of its other pages as they were. */
static void a_refused_call_forgets_no_owner(void **state)
{
    (void)state;
    test_random random = {78};
    world w = paged_world(&random);
    uint8_t token[8] = {0};
    for (int64_t s = 0; s < 3; s++) deal(&w, s, 8, -1, &random);
    assert_int_equal(append(&w, w.cache.cache, 0, w.cache.table, token, 8), QUERN_OK);
    assert_int_equal(append(&w, w.cache.cache, 1, w.cache.table, token, 8), QUERN_OK);
    /* A table that is wrong about sequence 0: its page looks free. The call fails for another page. */
    const int32_t its = row_of(&w, 0)[0], ids[] = {2, 3};
    const int64_t counts[] = {4, 4};
    row_of(&w, 0)[0] = free_page(&w);
    row_of(&w, 2)[0] = its;
    row_of(&w, 3)[0] = row_of(&w, 1)[0];
    const quern_cache_batch batch = {sizeof batch, 2, ids, counts, w.cache.table};
    quern_tensor k = rows_of(&w, 1, token, 8), v = rows_of(&w, 2, token, 8);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k;
    t.v = &v;
    static char space[4096];
    REFUSED(quern_cache_append(w.ctx, NULL, w.cache.cache, &batch, &t, space, sizeof space), INVALID,
            "which table[1][0] writes");
    row_of(&w, 0)[0] = its;
    REFUSED(append(&w, w.cache.cache, 2, w.cache.table, token, 4), INVALID, "which table[0][0] writes");
    free(k.data), free(v.data);
    world_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_independent), cmocka_unit_test(damaged_bytes_are_refused),
        cmocka_unit_test(copies_are_checked), cmocka_unit_test(a_fork_shares_full_pages_alone),
        cmocka_unit_test(a_refused_call_forgets_no_owner)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
