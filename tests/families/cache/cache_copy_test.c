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

static void fork_one(world *w, int64_t from, int64_t to)
{
    if (quern_cache_fork(w->cache.cache, from, to) != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
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
    p.pages = 0;
    p.capacity = w->length[from] + test_random_int(random, 1, 90);
    cache_case_make(&other, &p);
    if (quern_cache_restore(w->ctx, other.cache, 1, data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
    const quern_status status = quern_cache_restore(w->ctx, w->cache.cache, to, data, bytes);
    if (status == QUERN_OK) world_copied(w, from, to);
    else if (strstr(quern_last_error(w->ctx), " pages: ") == NULL) fail_msg("%s", quern_last_error(w->ctx));
    memset(data, 0xff, bytes);
    world_check(w, other.cache, 1, w->token[from], w->length[from]);
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
            case 1: fork_one(&w, s, other); break;
            case 2: restore_one(&w, s, other, &random); break;
            case 3:
            case 4: take_back(&w, s, &random); break;
            default: world_grow(&w, s, &random); break;
            }
            world_check(&w, w.cache.cache, (int32_t)s, w.token[s], w.length[s]);
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
        size_t bytes;
        char *data = world_save(&w, 0, &bytes), *bad = malloc(bytes + 64);
        for (int i = 0; i < 400; i++) {
            size_t n = bytes;
            memcpy(bad, data, bytes);
            memset(bad + bytes, 0, 64);
            const int kind = (int)test_random_int(&random, 0, 3);
            const size_t at = (size_t)test_random_int(&random, 0, kind == 1 ? 151 : (int64_t)bytes - 1);
            if (kind == 2) n = at;
            else if (kind == 3) n += (size_t)test_random_int(&random, 1, 64);
            else bad[at] = (char)(bad[at] ^ (char)(1 << test_random_int(&random, 0, 7)));
            void *before = cache_case_copy(&w.cache);
            refused(&w, quern_cache_restore(w.ctx, w.cache.cache, 1 + i % 2, bad, n), QUERN_ERR_FORMAT,
                    before, "from ");
        }
        quern_cache_params p = w.cache.params;
        cache_case other;
        if (trial % 4 == 0) p.dim = 48;
        if (trial % 4 == 1) p.kv_heads = 4;
        if (trial % 4 == 2) p.dtype = p.dtype == QUERN_F32 ? QUERN_BF16 : QUERN_F32;
        if (trial % 4 == 3) p.capacity = w.length[0] - 1;
        cache_case_make(&other, &p);
        void *before = cache_case_copy(&other);
        assert_int_equal(quern_cache_restore(w.ctx, other.cache, 0, data, bytes), QUERN_ERR_FORMAT);
        cache_case_check_same(&other, before);
        cache_case_free(&other);
        free(data), free(bad);
        world_check_all(&w);
        world_free(&w);
    }
}

static void copies_are_checked(void **state)
{
    (void)state;
    test_random random = {77};
    world w;
    do w = world_make(&random);
    while ((w.cache.params.pages == 0 || w.cache.params.block_size > 0) && (world_free(&w), true));
    for (int i = 0; i < 3; i++) world_grow(&w, 0, &random), world_grow(&w, 1, &random);
    size_t bytes, room = 1;
    char *data = world_save(&w, 0, &bytes);
    quern_cache *c = w.cache.cache;
#define REFUSED(call, status, sentence)                                                                      \
    do {                                                                                                     \
        void *before_ = cache_case_copy(&w.cache);                                                           \
        refused(&w, call, status, before_, sentence);                                                        \
    } while (0)
#define INVALID QUERN_ERR_INVALID_ARGUMENT
    REFUSED(quern_cache_fork(c, 0, 5), INVALID, "to is 5: 0 to 4");
    REFUSED(quern_cache_fork(c, -1, 2), INVALID, "from is -1: 0 to 4");
    REFUSED(quern_cache_fork(c, 2, 2), INVALID, "from and to are both 2");
    REFUSED(quern_cache_save(w.ctx, c, 9, NULL, &room), INVALID, "sequence is 9");
    REFUSED(quern_cache_save(w.ctx, c, 0, data, NULL), INVALID, "bytes is NULL");
    REFUSED(quern_cache_save(w.ctx, c, 0, data, &room), QUERN_ERR_WORKSPACE, "bytes is 1: at least");
    assert_int_equal(room, 1);
    REFUSED(quern_cache_restore(w.ctx, c, 2, NULL, bytes), INVALID, "from is NULL");
    REFUSED(quern_cache_restore(NULL, c, 2, data, bytes), INVALID, "ctx is NULL");
    free(data);
    world_free(&w);
}

/* A pool without pages for an append or a restored sequence says how many are missing; forks need none until
 * they write, and a page that two hold is copied by the one that writes. */
static void missing_pages_are_counted(void **state)
{
    (void)state;
    test_random random = {79};
    world w;
    do w = world_make(&random);
    while ((w.cache.params.page == 0 || w.cache.params.block_size > 0) && (world_free(&w), true));
    quern_cache_params p = w.cache.params;
    uint8_t token[130] = {1, 2, 3};
    p.pages = 5;
    cache_case_free(&w.cache);
    cache_case_make(&w.cache, &p);
    quern_cache *c = w.cache.cache;
    assert_int_equal(world_append(&w, c, 0, token, 130), QUERN_OK); /* three pages */
    assert_int_equal(quern_cache_fork(c, 0, 1), QUERN_OK);
    assert_int_equal(quern_cache_fork(c, 0, 2), QUERN_OK);
    for (int i = 0; i < 3; i++) w.length[i] = 130, memcpy(w.token[i], token, sizeof token);
    assert_int_equal(quern_cache_rollback(c, 1, 4), QUERN_OK); /* into the page before */
    assert_int_equal(quern_cache_rollback(c, 2, 3), QUERN_OK);
    w.length[1] = 126, w.length[2] = 127;
    REFUSED(world_append(&w, c, 1, token + 3, 70), INVALID,
            "pool 0 lacks 1 pages: 2 are free, the step needs 3");
    for (int i = 1; i < 3; i++) {
        assert_int_equal(world_append(&w, c, i, token + 5, 1), QUERN_OK);
        w.token[i][w.length[i]++] = token[5];
    }
    world_check_all(&w);
    size_t bytes;
    char *data = world_save(&w, 0, &bytes);
    REFUSED(quern_cache_restore(w.ctx, c, 3, data, bytes), INVALID, "pool 0 lacks 3 pages");
    world_empty(&w, 1), world_empty(&w, 2);
    REFUSED(quern_cache_restore(w.ctx, c, 3, data, bytes), INVALID, "pool 0 lacks 1 pages");
    assert_int_equal(quern_cache_restore(w.ctx, c, 0, data, bytes), QUERN_OK); /* its own pages serve */
    world_check_all(&w);
    free(data);
    world_free(&w);
}

/* A fork is taken back into a page that it shares, and its next append is refused for want of a page. Once
 * there is one, the column names that page, which must hold the rows of the shared one before the new. */
static void a_page_taken_after_a_refused_append_holds_the_shared_rows(void **state)
{
    (void)state;
    test_random random = {80};
    for (int trial = 0; trial < 8; trial++) {
        world w;
        do w = world_make(&random);
        while ((w.cache.params.page == 0 || w.cache.params.separate_win) && (world_free(&w), true));
        quern_cache_params p = w.cache.params;
        uint8_t token[130];
        for (int i = 0; i < 130; i++) token[i] = (uint8_t)test_random_int(&random, 0, BANK - 1);
        p.pages = 4;
        cache_case_free(&w.cache);
        cache_case_make(&w.cache, &p);
        quern_cache *c = w.cache.cache;
        for (int at = 0; at < 130; at += 26) /* three pages */
            assert_int_equal(world_append(&w, c, 0, token + at, 26), QUERN_OK);
        assert_int_equal(world_append(&w, c, 2, token, 1), QUERN_OK); /* the fourth */
        assert_int_equal(quern_cache_fork(c, 0, 1), QUERN_OK);
        assert_int_equal(quern_cache_rollback(c, 1, 4), QUERN_OK);
        w.length[0] = 130, w.length[1] = 126, w.length[2] = 1;
        for (int i = 0; i < 3; i++) memcpy(w.token[i], token, sizeof token);
        REFUSED(world_append(&w, c, 1, token, 1), INVALID, "pool 0 lacks 1 pages");
        world_check_all(&w);
        world_empty(&w, 2);
        assert_int_equal(world_append(&w, c, 1, token, 1), QUERN_OK);
        w.token[1][w.length[1]++] = token[0];
        world_check_all(&w);
        world_free(&w);
    }
}

/* *bytes goes in as the room, whatever it is where there is none, and comes out as the length. */
static void save_takes_bytes_as_its_room_and_gives_the_length(void **state)
{
    (void)state;
    test_random random = {81};
    world w = world_make(&random);
    for (int i = 0; i < 3; i++) world_grow(&w, 0, &random);
    size_t bytes = 1, room;
    assert_int_equal(quern_cache_save(w.ctx, w.cache.cache, 0, NULL, &bytes), QUERN_OK);
    char *to = calloc(bytes + 1, 1);
    room = bytes - 1;
    assert_int_equal(quern_cache_save(w.ctx, w.cache.cache, 0, to, &room), QUERN_ERR_WORKSPACE);
    assert_int_equal(room, bytes - 1);
    for (size_t i = 0; i < bytes; i++) assert_int_equal(to[i], 0);
    room = bytes + 1;
    assert_int_equal(quern_cache_save(w.ctx, w.cache.cache, 0, to, &room), QUERN_OK);
    assert_int_equal(room, bytes);
    assert_int_equal(to[bytes], 0);
    free(to);
    world_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_are_independent),
        cmocka_unit_test(damaged_bytes_are_refused),
        cmocka_unit_test(copies_are_checked),
        cmocka_unit_test(missing_pages_are_counted),
        cmocka_unit_test(a_page_taken_after_a_refused_append_holds_the_shared_rows),
        cmocka_unit_test(save_takes_bytes_as_its_room_and_gives_the_length)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
