/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_layer_pages_test.c - the layer's cache in pages and as saved bytes: the bits of a contiguous one;
 * pages and bytes that are refused; rows that cannot be stored. */
#include "cmocka_c11.h"
#include "dsv4_layer_storage.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void keep_outputs(layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (int i = LAYER_OUT; i < LAYER_D_OUT; i++) {
        if (c->t[i].buffer == NULL) continue;
        first[i] = test_tensor_copy(&c->t[i]);
        test_tensor_reset(&c->t[i]);
    }
}

static void check_kept(const layer_case *c, test_tensor first[LAYER_TENSORS])
{
    for (int i = LAYER_OUT; i < LAYER_D_OUT; i++) {
        if (c->t[i].buffer == NULL) continue;
        /* Scores of entries that no query sees are not written. */
        if (i != LAYER_IDX_SCORE && !test_tensor_same_bits(&first[i], &c->t[i]))
            fail_msg("%s differs", layer_case_names[i]);
        test_tensor_free(&first[i]);
    }
}

/* A sequence that stands in pages, moves to another cache as bytes and back, has the bits of one that stays
 * in a contiguous cache. */
static void pages_and_saved_sequences_change_no_bit(void **state)
{
    static const int64_t pieces[] = {3, 9, 1, 1, 6, 2, 11};
    (void)state;
    for (int n = 0; n < 3 * LAYER_STORAGES * 2; n++) {
        layer_storage how = layer_storages[n / 3 % LAYER_STORAGES];
        test_random random = {(uint64_t)n + 9};
        layer_case c =
            layer_storage_case(&random, (oracle_layer_kind)(n % 3), n % 2 ? QUERN_BF16 : QUERN_F32);
        quern_context *ctx = test_context(test_level(n), 2);
        quern_dsv4_layer_cache_params p = layer_storage_params(&c, &how, 1);
        layer_store plain = layer_store_open(&p);
        how.page = 1 + n % 5;
        p = layer_storage_params(&c, &how, 3);
        layer_store paged[2] = {layer_store_open(&p)};
        how.page = 7;
        p = layer_storage_params(&c, &how, 2);
        p.capacity += 20;
        paged[1] = layer_store_open(&p);
        test_tensor first[LAYER_TENSORS];
        for (int64_t i = 0, at = 0; i < 7; at += pieces[i++])
            layer_case_append(&c, ctx, &plain, 0, 0, at, pieces[i]);
        keep_outputs(&c, first);
        for (int64_t i = 0, at = 0; i < 7; at += pieces[i++]) {
            const layer_store *from = &paged[i % 2], *to = &paged[(i + 1) % 2];
            const int64_t id = i % 2 ? 0 : 2, other = i % 2 ? 2 : 0;
            layer_case_append(&c, ctx, from, id, 0, at, pieces[i]);
            size_t bytes;
            assert_int_equal(quern_dsv4_layer_cache_save(ctx, from->cache, id, NULL, &bytes), QUERN_OK);
            test_workspace space = test_workspace_make(bytes);
            assert_int_equal(quern_dsv4_layer_cache_save(ctx, from->cache, id, space.data, &bytes), QUERN_OK);
            if (quern_dsv4_layer_cache_restore(ctx, to->cache, other, space.data, bytes) != QUERN_OK)
                fail_msg("%s", quern_last_error(NULL));
            test_workspace_close(&space);
            assert_int_equal(quern_dsv4_layer_cache_reset(from->cache, id), QUERN_OK);
        }
        check_kept(&c, first);
        layer_store_close(&plain), layer_store_close(&paged[0]), layer_store_close(&paged[1]);
        layer_case_free(&c);
        quern_context_destroy(ctx);
    }
}

/* A sequence's saved bytes. */
static test_workspace saved(quern_context *ctx, const layer_store *s, int64_t sequence, size_t *bytes)
{
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, sequence, NULL, bytes), QUERN_OK);
    test_workspace space = test_workspace_make(*bytes);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s->cache, sequence, space.data, bytes), QUERN_OK);
    return space;
}

static void check_is_still(quern_context *ctx, const layer_store *s, int64_t sequence,
                           const test_workspace *before, size_t bytes)
{
    size_t now;
    test_workspace space = saved(ctx, s, sequence, &now);
    assert_int_equal(now, bytes);
    assert_memory_equal(space.data, before->data, bytes);
    test_workspace_close(&space);
}

/* A saved sequence whose header has `value` at a byte, with the checksum of the bytes in chains of words, its
 * own place read as 0. */
static void forge(unsigned char *bytes, size_t count, size_t at, int64_t value)
{
    enum { CHECKSUM = 16, CHAINS = 8 };
    uint64_t chain[CHAINS], sum = count;
    memcpy(bytes + at, &value, sizeof value);
    for (uint64_t i = 0; i < CHAINS; i++) chain[i] = 0xcbf29ce484222325u + i;
    for (size_t i = 0; 8 * i < count; i++) {
        uint64_t word = 0;
        memcpy(&word, bytes + 8 * i, count - 8 * i < 8 ? count - 8 * i : 8);
        if (8 * i == CHECKSUM) word = 0;
        chain[i % CHAINS] = (chain[i % CHAINS] ^ word) * 0x9e3779b97f4a7c15u;
        chain[i % CHAINS] ^= chain[i % CHAINS] >> 32;
    }
    for (int i = 0; i < CHAINS; i++) sum = (sum ^ chain[i]) * 0x9e3779b97f4a7c15u + (sum >> 29);
    memcpy(bytes + CHECKSUM, &sum, sizeof sum);
}

/* Lengths that no sequence has, though the checksum is right: of 4 tokens, after 2 were taken back. */
static void forged_bytes(void **state)
{
    enum { TOKENS = 24, HELD = 32 };
    static const struct {
        size_t at;
        int64_t value;
    } forged[] = {{TOKENS, 5}, {TOKENS, 3}, {TOKENS, -1},     {TOKENS, INT64_MAX},
                  {HELD, -1},  {HELD, 3},   {HELD, INT64_MAX}};
    (void)state;
    test_random random = {6};
    const layer_storage how = layer_storages[2];
    layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const quern_dsv4_layer_cache_params p = layer_storage_params(&c, &how, 2);
    layer_store s = layer_store_open(&p);
    layer_case_append(&c, ctx, &s, 0, 0, 0, 6);
    layer_case_append(&c, ctx, &s, 1, 0, 0, 5);
    assert_int_equal(quern_dsv4_layer_cache_rollback(s.cache, 0, 2), QUERN_OK);
    size_t bytes, other_bytes;
    test_workspace good = saved(ctx, &s, 0, &bytes), other = saved(ctx, &s, 1, &other_bytes);
    unsigned char *bad = malloc(bytes);
    memcpy(bad, good.data, bytes);
    forge(bad, bytes, HELD, 0);
    assert_memory_equal(bad, good.data, bytes); /* the checksum here is the library's */
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        memcpy(bad, good.data, bytes);
        forge(bad, bytes, forged[i].at, forged[i].value);
        if (quern_dsv4_layer_cache_restore(ctx, s.cache, 1, bad, bytes) != QUERN_ERR_FORMAT)
            fail_msg("%lld at byte %zu is accepted", (long long)forged[i].value, forged[i].at);
    }
    check_is_still(ctx, &s, 1, &other, other_bytes);
    free(bad);
    test_workspace_close(&good), test_workspace_close(&other);
    layer_store_close(&s);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

/* Bytes with any bit turned, cut off or of another cache are refused, and the sequence is as it was. */
static void damaged_bytes(void **state)
{
    (void)state;
    test_random random = {4};
    layer_storage how = layer_storages[2];
    layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    quern_dsv4_layer_cache_params p = layer_storage_params(&c, &how, 2);
    layer_store s = layer_store_open(&p);
    layer_case_append(&c, ctx, &s, 0, 0, 0, 17);
    layer_case_append(&c, ctx, &s, 1, 0, 0, 6);
    size_t bytes, other_bytes;
    test_workspace good = saved(ctx, &s, 0, &bytes), other = saved(ctx, &s, 1, &other_bytes);
    unsigned char *bad = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i += i < 130 ? 1 : 97) {
        memcpy(bad, good.data, bytes);
        bad[i] ^= (unsigned char)(1u << (i % 8));
        if (quern_dsv4_layer_cache_restore(ctx, s.cache, 1, bad, bytes) != QUERN_ERR_FORMAT)
            fail_msg("byte %zu of %zu may be any", i, bytes);
    }
    memcpy(bad, good.data, bytes);
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 1, bad, bytes - 1), QUERN_ERR_FORMAT,
                       "are accepted");
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 1, bad, bytes + 1), QUERN_ERR_FORMAT,
                       "are accepted");
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 1, bad, 40), QUERN_ERR_FORMAT,
                       "from has 40 bytes: a saved sequence has at least");
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 1, NULL, bytes),
                       QUERN_ERR_INVALID_ARGUMENT, "from is NULL");
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 2, bad, bytes),
                       QUERN_ERR_INVALID_ARGUMENT, "sequence is 2: 0 to 1 is accepted");
    size_t few = bytes - 1;
    layer_expect_error(quern_dsv4_layer_cache_save(ctx, s.cache, 0, bad, &few), QUERN_ERR_WORKSPACE,
                       "at least");
    check_is_still(ctx, &s, 1, &other, other_bytes);
    how.key_format = QUERN_DSV4_FP8;
    p = layer_storage_params(&c, &how, 1);
    layer_store unlike = layer_store_open(&p);
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, unlike.cache, 0, good.data, bytes),
                       QUERN_ERR_FORMAT, "from has key_format 2: that of the cache, 1, is accepted");
    how = layer_storages[2];
    how.page = 2;
    p = layer_storage_params(&c, &how, 1);
    p.capacity = 16;
    p.pages = 1;
    layer_store small = layer_store_open(&p);
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, small.cache, 0, good.data, bytes),
                       QUERN_ERR_FORMAT, "from has 17 tokens: 0 to the capacity 16 is accepted");
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, small.cache, 0, other.data, other_bytes),
                       QUERN_ERR_INVALID_ARGUMENT, "pool 1 lacks 1 pages: 1 are free, 2 are needed");
    free(bad);
    test_workspace_close(&good), test_workspace_close(&other);
    layer_store_close(&s), layer_store_close(&unlike), layer_store_close(&small);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

/* A step, a fork and a restore take pages of one pool; what it lacks is refused and changes nothing. */
static void few_pages(void **state)
{
    (void)state;
    test_random random = {5};
    layer_storage how = layer_storages[2];
    how.page = 4;
    layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    quern_dsv4_layer_cache_params p = layer_storage_params(&c, &how, 2);
    p.pages = 3;
    layer_store s = layer_store_open(&p);
    int64_t needed, left;
    assert_int_equal(quern_dsv4_layer_cache_pages(s.cache, 33, &needed, &left), QUERN_OK);
    assert_int_equal(needed, 4), assert_int_equal(left, 3);
    layer_case_append(&c, ctx, &s, 0, 0, 0, 18);
    assert_int_equal(quern_dsv4_layer_cache_pages(s.cache, 18, &needed, &left), QUERN_OK);
    assert_int_equal(needed, 3), assert_int_equal(left, 0);
    size_t bytes;
    test_workspace before = saved(ctx, &s, 0, &bytes);
    layer_expect_error(quern_dsv4_layer_cache_restore(ctx, s.cache, 1, before.data, bytes),
                       QUERN_ERR_INVALID_ARGUMENT, "pool 1 lacks 3 pages: 0 are free, 3 are needed");
    assert_int_equal(quern_dsv4_layer_cache_restore(ctx, s.cache, 0, before.data, bytes), QUERN_OK);
    assert_int_equal(quern_dsv4_layer_cache_fork(s.cache, 0, 1), QUERN_OK); /* takes none */
    layer_expect_error(quern_dsv4_layer_cache_pages(s.cache, 34, &needed, &left), QUERN_ERR_INVALID_ARGUMENT,
                       "tokens is 34: 0 to 33 is accepted");
    check_is_still(ctx, &s, 1, &before, bytes);
    check_is_still(ctx, &s, 0, &before, bytes);
    assert_int_equal(quern_dsv4_layer_cache_reset(s.cache, 0), QUERN_OK);
    layer_case_append(&c, ctx, &s, 1, 0, 18, 6); /* alone it has no page to copy */
    assert_int_equal(quern_dsv4_layer_cache_fork(s.cache, 1, 0), QUERN_OK);
    test_workspace_close(&before);
    before = saved(ctx, &s, 0, &bytes);
    test_workspace_close(&before);
    layer_store_close(&s);
    quern_context_destroy(ctx);
    layer_case_free(&c);
}

/* ---- rows that cannot be stored ---- */

/* One call of two sequences, tokens [first, first + counts[i]) of the case each. */
static quern_status step(const layer_case *c, quern_context *ctx, const layer_store *s, const float *x,
                         const int64_t counts[2], float *out)
{
    static const int32_t ids[] = {0, 1};
    const quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    const quern_tensor *given[LAYER_TENSORS];
    const int64_t shape[] = {counts[0] + counts[1], c->shape.width};
    const quern_tensor x_view = quern_tensor_contiguous((float *)(uintptr_t)x, QUERN_F32, 2, shape),
                       out_view = quern_tensor_contiguous(out, QUERN_F32, 2, shape);
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) given[i] = NULL;
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    t.x = &x_view;
    t.out = &out_view;
    size_t bytes;
    quern_status status = quern_dsv4_layer_decode_workspace(ctx, &p, s->cache, ids, counts, 2, &t, &bytes);
    if (status != QUERN_OK) return status;
    test_workspace w = test_workspace_make(bytes);
    status = quern_dsv4_layer_decode(ctx, NULL, &p, s->cache, ids, counts, 2, &t, w.data, bytes);
    test_workspace_close(&w);
    return status;
}

static int count_of(const char *text, const char *part)
{
    int count = 0;
    while ((text = strstr(text, part)) != NULL) count++, text++;
    return count;
}

/* The sentence is about the first row that is refused, by its number in the call. */
static void a_refusal_names_one_row(void **state)
{
    static const int64_t counts[] = {2, 3};
    (void)state;
    for (int bad = 0; bad < 2; bad++) {
        test_random random = {50};
        layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        const quern_dsv4_layer_cache_params p = layer_storage_params(&c, &layer_storages[2], 2);
        layer_store s = layer_store_open(&p);
        float x[5 * 40], out[5 * 40];
        for (int i = 0; i < 5 * 40; i++) x[i] = (float)test_random_normal(&random);
        x[bad * 2 * 40] = NAN;
        layer_expect_error(step(&c, ctx, &s, x, counts, out), QUERN_ERR_INVALID_ARGUMENT,
                           bad == 0 ? "kv_rows[0] (row 0, column 0) is" : "(row 2, column 0) is");
        assert_int_equal(count_of(quern_last_error(ctx), "kv_rows"), 1);
        layer_store_close(&s);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* A NaN in the second sequence's raw row, entry or key: neither sequence nor any output has changed, and both
 * go on to the bits that they have without the refused call. */
static void rows_that_cannot_be_stored(void **state)
{
    static const struct {
        int tensor;
        const char *sentence;
    } cases[] = {{LAYER_X, "(row 3, column 0) is nan: finite numbers are accepted"},
                 {LAYER_WEIGHTS + OW_BIAS, "compressed["},
                 {LAYER_WEIGHTS + OW_INDEX_BIAS, "idx_k["}};
    (void)state;
    for (int n = 0; n < 6; n++) {
        const int which = cases[n % 3].tensor;
        layer_storage how = layer_storages[2];
        how.page = n < 3 ? 0 : 3;
        test_random random = {(uint64_t)n + 30};
        layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
        quern_context *ctx = test_context(test_level(n), 2);
        const quern_dsv4_layer_cache_params p = layer_storage_params(&c, &how, 2);
        layer_store s[2] = {layer_store_open(&p), layer_store_open(&p)};
        static const int64_t first[] = {5, 3}, second[] = {2, 3};
        float x[8 * 40], out[2][5 * 40], refused[5 * 40];
        for (int i = 0; i < 8 * 40; i++) x[i] = (float)test_random_normal(&random);
        for (int k = 0; k < 2; k++) {
            float unused[8 * 40];
            assert_int_equal(step(&c, ctx, &s[k], x, first, unused), QUERN_OK);
        }
        size_t bytes[2];
        test_workspace before[2] = {saved(ctx, &s[0], 0, &bytes[0]), saved(ctx, &s[0], 1, &bytes[1])};
        memset(refused, 0x6b, sizeof refused);
        float *bad = which == LAYER_X ? &x[3 * 40 + 7] : (float *)c.t[which].view.data, good = *bad;
        *bad = NAN;
        layer_expect_error(step(&c, ctx, &s[0], x, second, refused), QUERN_ERR_INVALID_ARGUMENT,
                           cases[n % 3].sentence);
        *bad = good;
        for (size_t i = 0; i < sizeof refused; i++) assert_int_equal(((unsigned char *)refused)[i], 0x6b);
        for (int k = 0; k < 2; k++) {
            check_is_still(ctx, &s[0], k, &before[k], bytes[k]);
            test_workspace_close(&before[k]);
        }
        for (int k = 0; k < 2; k++) assert_int_equal(step(&c, ctx, &s[k], x, second, out[k]), QUERN_OK);
        assert_memory_equal(out[0], out[1], sizeof out[0]);
        layer_store_close(&s[0]), layer_store_close(&s[1]);
        quern_context_destroy(ctx);
        layer_case_free(&c);
    }
}

/* *bytes goes in as the room, whatever it is where there is none, and comes out as the length. */
static void save_takes_bytes_as_its_room_and_gives_the_length(void **state)
{
    (void)state;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    test_random random = {4};
    layer_case c = layer_storage_case(&random, ORACLE_CSA, QUERN_F32);
    const quern_dsv4_layer_cache_params p = layer_storage_params(&c, &layer_storages[0], 2);
    layer_store s = layer_store_open(&p);
    for (int64_t at = 0; at < 9; at++) layer_case_append(&c, ctx, &s, 0, 0, at, 1);
    size_t bytes = 1, room;
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s.cache, 0, NULL, &bytes), QUERN_OK);
    char *to = calloc(bytes + 1, 1);
    room = bytes - 1;
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s.cache, 0, to, &room), QUERN_ERR_WORKSPACE);
    assert_int_equal(room, bytes - 1);
    for (size_t i = 0; i < bytes; i++) assert_int_equal(to[i], 0);
    room = bytes + 1;
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, s.cache, 0, to, &room), QUERN_OK);
    assert_int_equal(room, bytes);
    assert_int_equal(to[bytes], 0);
    free(to);
    layer_store_close(&s);
    layer_case_free(&c);
    quern_context_destroy(ctx);
}

/* What a decoding call of one token needs, of the layer's output alone. */
static size_t workspace_of_one(const layer_case *c, quern_context *ctx, const layer_store *s)
{
    const quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    const quern_tensor *given[LAYER_TENSORS];
    const int64_t shape[] = {1, c->shape.width}, one = 1;
    const int32_t id = 0;
    const quern_tensor row = quern_tensor_contiguous(NULL, c->dtype, 2, shape);
    size_t bytes = 0;
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) given[i] = NULL;
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    t.x = t.out = &row;
    if (quern_dsv4_layer_decode_workspace(ctx, &p, s->cache, &id, &one, 1, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    return bytes;
}

/* The workspace of a decoding call depends on the cache's capacity, not on what its sequences hold. */
static void the_decode_workspace_does_not_grow_with_a_sequence(void **state)
{
    (void)state;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int kind = ORACLE_CSA; kind <= ORACLE_SWA; kind++)
        for (int i = 0; i < 2 * LAYER_STORAGES; i++) {
            test_random random = {(uint64_t)i + 3};
            layer_case c = layer_storage_case(&random, (oracle_layer_kind)kind, QUERN_F32);
            quern_dsv4_layer_cache_params p = layer_storage_params(&c, &layer_storages[i / 2], 2);
            p.page = kind == ORACLE_SWA ? 0 : i % 2 * 3;
            layer_store s = layer_store_open(&p);
            const size_t first = workspace_of_one(&c, ctx, &s);
            for (int64_t at = 0; at + 1 < STORED_TOKENS; at++) {
                layer_case_append(&c, ctx, &s, 0, 0, at, 1);
                assert_int_equal(workspace_of_one(&c, ctx, &s), first);
            }
            layer_store_close(&s);
            layer_case_free(&c);
        }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_decode_workspace_does_not_grow_with_a_sequence),
                                       cmocka_unit_test(save_takes_bytes_as_its_room_and_gives_the_length),
                                       cmocka_unit_test(pages_and_saved_sequences_change_no_bit),
                                       cmocka_unit_test(damaged_bytes),
                                       cmocka_unit_test(forged_bytes),
                                       cmocka_unit_test(few_pages),
                                       cmocka_unit_test(rows_that_cannot_be_stored),
                                       cmocka_unit_test(a_refusal_names_one_row)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
