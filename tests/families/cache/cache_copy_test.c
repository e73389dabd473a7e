/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_copy_test.c - forks, saved and restored sequences: whatever happens to the others afterwards, a
 * sequence decodes to the bits of a cache that has seen its tokens alone. Damaged bytes and bad pages are
 * refused and change nothing.
 */
#include "cache_world.h"
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

static void take_back(world *w, int64_t s, test_random *random)
{
    const int64_t n = test_random_int(random, 0, w->length[s] < 8 ? w->length[s] : 8);
    if (quern_cache_rollback(w->cache.cache, s, n) == QUERN_OK) w->length[s] -= n;
    else assert_true(w->cache.params.separate_win);
}

static void fork_one(world *w, int64_t from, int64_t to, test_random *random)
{
    if (test_random_one_in(random, 2) || w->cache.table != NULL) world_empty(w, to);
    world_deal(w, to, w->length[from], from, random);
    if (quern_cache_fork(w->cache.cache, from, to, w->cache.table) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    world_copied(w, from, to);
}

/* Moves a sequence's bytes to another, and into a cache with other pages and capacity. */
static void restore_one(world *w, int64_t from, int64_t to, test_random *random)
{
    size_t bytes;
    char *data = world_save(w, from, &bytes);
    quern_cache_params p = w->cache.params;
    cache_case other;
    p.sequences = 2;
    p.page = test_random_one_in(random, 2) ? QUERN_CACHE_PAGE : 0;
    p.capacity = w->length[from] + test_random_int(random, 1, 90);
    cache_case_make(&other, &p, random);
    cache_case_assign(&other, 1, w->length[from]);
    if (quern_cache_restore(other.cache, 1, other.table, data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    world_empty(w, to);
    world_deal(w, to, w->length[from], -1, random);
    if (quern_cache_restore(w->cache.cache, to, w->cache.table, data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    memset(data, 0xff, bytes);
    world_copied(w, from, to);
    world_check(w, other.cache, 1, other.table, w->token[from], w->length[from]);
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
            case 0: world_empty(&w, s); break;
            case 1: fork_one(&w, s, other, &random); break;
            case 2: restore_one(&w, s, other, &random); break;
            case 3:
            case 4: take_back(&w, s, &random); break;
            default: world_grow(&w, s, &random); break;
            }
            world_check(&w, w.cache.cache, (int32_t)s, w.cache.table, w.token[s], w.length[s]);
        }
        world_check_all(&w);
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
        for (int i = 0; i < 4; i++) world_grow(&w, 0, &random);
        for (int i = 0; i < 2; i++) world_grow(&w, 1, &random);
        world_deal(&w, 2, CAPACITY, -1, &random);
        size_t bytes;
        char *data = world_save(&w, 0, &bytes), *bad = malloc(bytes + 64);
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
        world_check_all(&w);
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
    for (int i = 0; i < 9; i++) world_grow(&w, 0, &random), world_grow(&w, 1, &random);
    size_t bytes, room = 1;
    char *data = world_save(&w, 0, &bytes);
    quern_cache *c = w.cache.cache;
    int32_t *table = w.cache.table;
#define REFUSED(call, status, sentence) refused(&w, call, status, cache_case_copy(&w.cache), sentence)
#define INVALID QUERN_ERR_INVALID_ARGUMENT
    world_deal(&w, 2, w.length[0], -1, &random);
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
    const int32_t page = world_row(&w, 2)[0];
    world_row(&w, 2)[0] = (int32_t)w.cache.params.pages;
    REFUSED(quern_cache_fork(c, 0, 2, table), INVALID, "table[2][0] is");
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "table[2][0] is");
    world_row(&w, 2)[0] = world_row(&w, 1)[0];
    REFUSED(quern_cache_fork(c, 0, 2, table), INVALID, "which table[1][0] writes");
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[1][0] writes");
    world_row(&w, 2)[0] = world_row(&w, 2)[1];
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[2][0] writes");
    world_row(&w, 2)[0] = world_row(&w, 0)[0]; /* a fork may read this page, a restore would write it */
    REFUSED(quern_cache_restore(c, 2, table, data, bytes), INVALID, "which table[0][0] writes");
    assert_int_equal(quern_cache_fork(c, 0, 2, table), QUERN_OK);
    world_copied(&w, 0, 2);
    world_check_all(&w);
    world_empty(&w, 0); /* its page stays readable, and nobody takes it */
    world_row(&w, 3)[0] = world_row(&w, 2)[0];
    REFUSED(world_append(&w, c, 3, table, w.token[1], 4), INVALID, "which table[2][0] reads");
    world_row(&w, 3)[0] = page;
    assert_int_equal(world_append(&w, c, 3, table, w.token[1], 4), QUERN_OK);
    world_check(&w, c, 2, table, w.token[2], w.length[2]);
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
    while (w.length[0] < 70) world_grow(&w, 0, &random);
    const int64_t first[] = {w.cache.columns.tokens + w.length[0] / QUERN_CACHE_PAGE, w.cache.columns.win,
                             w.cache.columns.tokens};
    for (int i = 0; i < 3; i++) {
        world_empty(&w, 1);
        world_deal(&w, 1, w.length[0], -1, &random);
        world_row(&w, 1)[first[i]] = world_row(&w, 0)[first[i]];
        if (i < 2)
            REFUSED(quern_cache_fork(w.cache.cache, 0, 1, w.cache.table), INVALID,
                    "each page is written in one place");
        else assert_int_equal(quern_cache_fork(w.cache.cache, 0, 1, w.cache.table), QUERN_OK);
    }
    world_copied(&w, 0, 1);
    world_check_all(&w);
    world_free(&w);
}

/* A call that is refused for one page leaves the owners of its other pages as they were. */
static void a_refused_call_forgets_no_owner(void **state)
{
    (void)state;
    test_random random = {78};
    world w = paged_world(&random);
    uint8_t token[8] = {0};
    for (int64_t s = 0; s < 3; s++) world_deal(&w, s, 8, -1, &random);
    assert_int_equal(world_append(&w, w.cache.cache, 0, w.cache.table, token, 8), QUERN_OK);
    assert_int_equal(world_append(&w, w.cache.cache, 1, w.cache.table, token, 8), QUERN_OK);
    /* A table that is wrong about sequence 0: its page looks free. The call fails for another page. */
    const int32_t its = world_row(&w, 0)[0], ids[] = {2, 3};
    const int64_t counts[] = {4, 4};
    world_row(&w, 0)[0] = world_free_page(&w);
    world_row(&w, 2)[0] = its;
    world_row(&w, 3)[0] = world_row(&w, 1)[0];
    const quern_cache_batch batch = {sizeof batch, 2, ids, counts, w.cache.table};
    quern_tensor k = world_rows(&w, 1, token, 8), v = world_rows(&w, 2, token, 8);
    quern_cache_tensors t = QUERN_CACHE_TENSORS_INIT;
    t.k = &k;
    t.v = &v;
    static char space[4096];
    REFUSED(quern_cache_append(w.ctx, NULL, w.cache.cache, &batch, &t, space, sizeof space), INVALID,
            "which table[1][0] writes");
    world_row(&w, 0)[0] = its;
    REFUSED(world_append(&w, w.cache.cache, 2, w.cache.table, token, 4), INVALID, "which table[0][0] writes");
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
