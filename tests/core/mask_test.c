/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mask_test.c - stages/mask.h against the definition of each mask, key by key. */
#include "cmocka_c11.h"
#include "stages/mask.h"

enum { KEYS_MOST = 20 };

/* Whether `query` of nq sees `key` of nk, by the definitions of the masks. */
static bool sees(const key_mask *m, int64_t nq, int64_t nk, int64_t query, int64_t key)
{
    if (m->kind == ATTEND_COMPRESSED) {
        const int64_t first = key * m->stride, last = first + m->block_size - 1;
        return !m->causal || (m->visibility == ENTRY_STARTED ? first <= query : last <= query);
    }
    if (m->kind == ATTEND_BLOCKS) return !m->causal || key <= query;
    const int64_t position = query + (m->query_offset >= 0 ? m->query_offset : nk - nq),
                  behind = position - key;
    if (position < 0) return false;
    if (m->causal) return behind >= 0 && (m->window == 0 || behind < m->window);
    return m->window == 0 || (behind <= m->window / 2 && -behind <= m->window / 2);
}

static void expect_definition(const key_mask *m, int64_t nq, int64_t nk)
{
    int64_t lo_before = 0, hi_before = 0;
    for (int64_t query = 0; query < nq; query++) {
        const key_range range = mask_keys(m, nq, nk, query);
        assert_true(range.lo >= lo_before && range.hi >= hi_before && range.lo <= range.hi && range.hi <= nk);
        for (int64_t key = 0; key < nk; key++) {
            const bool in = key >= range.lo && key < range.hi;
            if (in != sees(m, nq, nk, query, key))
                fail_msg("kind %d, causal %d, window %lld, offset %lld, %lld queries: query %lld, key %lld "
                         "of %lld: %d",
                         m->kind, m->causal, (long long)m->window, (long long)m->query_offset, (long long)nq,
                         (long long)query, (long long)key, (long long)nk, in);
        }
        lo_before = range.lo;
        hi_before = range.hi;
    }
    for (int64_t key = 0; key <= nk; key++) {
        const key_range range = mask_queries(m, nq, nk, key);
        assert_true(range.lo >= 0 && range.lo <= range.hi && range.hi <= nq);
        for (int64_t query = 0; query < nq; query++) {
            const bool in = query >= range.lo && query < range.hi;
            if (in != (key < nk && sees(m, nq, nk, query, key)))
                fail_msg(
                    "kind %d, causal %d, window %lld, offset %lld: key %lld of %lld, query %lld of %lld: %d",
                    m->kind, m->causal, (long long)m->window, (long long)m->query_offset, (long long)key,
                    (long long)nk, (long long)query, (long long)nq, in);
        }
    }
}

static void ranges(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++)
        for (int64_t window = 0; window < 2 * KEYS_MOST; window++)
            for (int64_t offset = -1; offset < KEYS_MOST + 5; offset += 3)
                for (int64_t nk = 0; nk <= KEYS_MOST; nk += 4)
                    for (int64_t nq = 1; nq <= KEYS_MOST + 8; nq += 9)
                        expect_definition(&(key_mask){.kind = ATTEND_RANGE,
                                                      .causal = causal,
                                                      .window = window,
                                                      .query_offset = offset},
                                          nq, nk);
}

static void entries_and_blocks(void **state)
{
    (void)state;
    for (int causal = 0; causal < 2; causal++)
        for (int64_t nq = 1; nq <= 40; nq += 13) {
            expect_definition(&(key_mask){.kind = ATTEND_BLOCKS, .causal = causal}, nq, nq);
            for (int visibility = ENTRY_COMPLETE; visibility <= ENTRY_STARTED; visibility++)
                for (int64_t stride = 1; stride <= 4; stride++)
                    for (int64_t block_size = stride; block_size <= 3 * stride; block_size += stride) {
                        const key_mask m = {.kind = ATTEND_COMPRESSED,
                                            .causal = causal,
                                            .visibility = visibility,
                                            .block_size = block_size,
                                            .stride = stride};
                        expect_definition(&m, nq, mask_entries(nq, block_size, stride));
                        expect_definition(&m, nq,
                                          nq / stride + 2); /* a longer view than the sequence fills */
                    }
        }
}

static void counts(void **state)
{
    (void)state;
    for (int64_t tokens = 0; tokens < 30; tokens++)
        for (int64_t stride = 1; stride < 5; stride++)
            for (int64_t block_size = 1; block_size < 9; block_size++) {
                int64_t entries = 0, blocks = 0;
                while (entries * stride + block_size <= tokens) entries++;
                while (blocks * block_size < tokens) blocks++;
                assert_int_equal(mask_entries(tokens, block_size, stride), entries);
                assert_int_equal(mask_blocks(tokens, block_size), blocks);
            }
}

static void blocks_seen(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 30; n++)
        for (int64_t query = 0; query < n; query++)
            for (int64_t size = 1; size < 9; size++)
                for (int causal = 0; causal < 2; causal++) {
                    int64_t seen = 0;
                    while (seen * size <= (causal ? query : n - 1)) seen++;
                    assert_int_equal(mask_blocks_seen(causal, n, query, size), seen);
                }
}

static void windows(void **state)
{
    (void)state;
    for (int64_t position = 0; position < 30; position++)
        for (int64_t window = 0; window < 35; window++) {
            int64_t first = position;
            while (first > 0 && (window == 0 || position - first + 1 < window)) first--;
            assert_int_equal(mask_window_first(position, window), first);
        }
}

/* Positions are 64-bit. */
static void far_positions(void **state)
{
    const int64_t n = (int64_t)1 << 40;
    (void)state;
    const key_range window = mask_keys(
        &(key_mask){.kind = ATTEND_RANGE, .causal = true, .window = 512, .query_offset = -1}, 8, n, 7);
    assert_true(window.lo == n - 512 && window.hi == n);
    const key_range entries =
        mask_keys(&(key_mask){.kind = ATTEND_COMPRESSED, .causal = true, .block_size = 32, .stride = 16}, n,
                  n / 16, n - 1);
    assert_true(entries.lo == 0 && entries.hi == n / 16 - 1);
    const key_range queries = mask_queries(
        &(key_mask){.kind = ATTEND_RANGE, .causal = true, .window = INT64_MAX, .query_offset = -1}, n, n, 7);
    assert_true(queries.lo == 7 && queries.hi == n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges),  cmocka_unit_test(entries_and_blocks),
        cmocka_unit_test(counts),  cmocka_unit_test(blocks_seen),
        cmocka_unit_test(windows), cmocka_unit_test(far_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
