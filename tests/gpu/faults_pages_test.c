/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults_pages_test.c - faults in a step's numbers and page tables on device memory: each sets its bit of the
 * status word, the sequence concerned sees nothing or loses the keys of a page, and the others keep their
 * bits. */
#include "cmocka_c11.h"
#include "faults_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/cache.h>

enum {
    BATCH = 3,
    COLUMNS = 3,
    PAGES = 10,
    HKV = 2,
    H = 4,
    D = 16,
    PAGE = QUERN_CACHE_PAGE,
    ENTRY_PAGES = 3,
    K = 5
};
enum { OF_POOL = PAGES * HKV * PAGE * 2 * D, OF_ENTRIES = ENTRY_PAGES * HKV * PAGE * 2 * D };

/* A token of each sequence, and all that the calls read. */
typedef struct step {
    int32_t slots[BATCH], positions[BATCH], cu[BATCH + 1], table[BATCH * COLUMNS], entry_table[BATCH];
    float pool[OF_POOL], entries[OF_ENTRIES], q[BATCH * H * D], kv[BATCH * HKV * D];
} step;

typedef struct results {
    float dense[BATCH][H * D], lse[H][BATCH], sparse[BATCH][H * D], pool[OF_POOL];
    int32_t lists[HKV][BATCH][K], counts[HKV][BATCH];
    int32_t faults[3]; /* of the dense call, the sparse one, the append */
} results;

static step *good_step(void)
{
    step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    for (int b = 0; b < BATCH; b++) {
        s->slots[b] = b;
        s->positions[b] = 100 + 30 * b;
        s->cu[b + 1] = b + 1;
        s->entry_table[b] = b;
    }
    for (int i = 0; i < BATCH * COLUMNS; i++) s->table[i] = PAGES - 1 - i;
    for (int i = 0; i < OF_POOL; i++) s->pool[i] = (float)(i * 37 % 101 - 50) * 0.03f;
    for (int i = 0; i < OF_ENTRIES; i++) s->entries[i] = (float)(i * 41 % 103 - 50) * 0.03f;
    for (int i = 0; i < BATCH * H * D; i++) s->q[i] = (float)(i * 29 % 31 - 15) * 0.1f;
    for (int i = 0; i < BATCH * HKV * D; i++) s->kv[i] = (float)i;
    return s;
}

static results *run(const step *s)
{
    static const int64_t each = BATCH, more = BATCH + 1, table[] = {BATCH, COLUMNS},
                         entry_table[] = {BATCH, 1}, pool[] = {PAGES, HKV, PAGE * 2 * D},
                         entries[] = {ENTRY_PAGES, HKV, PAGE * 2 * D}, q[] = {BATCH, H, D},
                         kv[] = {BATCH, HKV, D}, lse[] = {H, BATCH}, lists[] = {HKV, BATCH, K};
    results *r = malloc(sizeof *r);
    assert_non_null(r);
    memset(r, 0xa5, sizeof *r);
    const quern_tensor slots = on_device(s->slots, QUERN_I32, 1, &each),
                       positions = on_device(s->positions, QUERN_I32, 1, &each),
                       cu = on_device(s->cu, QUERN_I32, 1, &more),
                       pages = on_device(s->table, QUERN_I32, 2, table),
                       entry_pages = on_device(s->entry_table, QUERN_I32, 2, entry_table),
                       tokens = on_device(s->pool, QUERN_F32, 3, pool),
                       of_entries = on_device(s->entries, QUERN_F32, 3, entries),
                       queries = on_device(s->q, QUERN_F32, 3, q), rows = on_device(s->kv, QUERN_F32, 3, kv),
                       dense = on_device(r->dense, QUERN_F32, 3, q),
                       dense_lse = on_device(r->lse, QUERN_F32, 2, lse),
                       sparse = on_device(r->sparse, QUERN_F32, 3, q),
                       chosen = on_device(r->lists, QUERN_I32, 3, lists),
                       counts = on_device(r->counts, QUERN_I32, 2, lists);
    const quern_exec exec = with_status();
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    quern_nsa_params n = QUERN_NSA_PARAMS_INIT;
    quern_cache_step_params c = QUERN_CACHE_STEP_PARAMS_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    quern_cache_tensors a = QUERN_CACHE_TENSORS_INIT;
    size_t bytes;
    n.block_size = n.stride = n.select_block = 16;
    n.num_selected = K;
    n.window = 40;
    n.gate = QUERN_NSA_GATE_NONE;
    t.q = &queries;
    t.slots = a.slots = &slots;
    t.positions = a.positions = &positions;
    t.cu = a.cu = &cu;
    t.tokens = a.tokens = &tokens;
    t.tokens_table = a.tokens_table = &pages;
    t.o = &dense;
    t.lse = &dense_lse;
    OK(quern_attention_decode_step_workspace(ctx, &p, &t, &bytes));
    OK(quern_attention_decode_step(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    r->faults[0] = faults();
    t.o = &sparse;
    t.lse = NULL;
    t.entries = &of_entries;
    t.entries_table = &entry_pages;
    t.block_idx = &chosen;
    t.block_count = &counts;
    OK(quern_nsa_decode_step_workspace(ctx, &n, &t, &bytes));
    OK(quern_nsa_decode_step(ctx, &exec, &n, &t, workspace_of(bytes), bytes));
    r->faults[1] = faults();
    a.k = a.v = &rows;
    OK(quern_cache_append_step_workspace(ctx, &c, &a, &bytes));
    OK(quern_cache_append_step(ctx, &exec, &c, &a, workspace_of(bytes), bytes));
    r->faults[2] = faults();
    to_host(r->dense, &dense, sizeof r->dense);
    to_host(r->lse, &dense_lse, sizeof r->lse);
    to_host(r->sparse, &sparse, sizeof r->sparse);
    to_host(r->lists, &chosen, sizeof r->lists);
    to_host(r->counts, &counts, sizeof r->counts);
    to_host(r->pool, &tokens, sizeof r->pool);
    return r;
}

/* Sequence b has the same results. */
static void check_same(const results *x, const results *y, int b)
{
    assert_memory_equal(x->dense[b], y->dense[b], sizeof x->dense[b]);
    assert_memory_equal(x->sparse[b], y->sparse[b], sizeof x->sparse[b]);
    for (int h = 0; h < H; h++) assert_true(x->lse[h][b] == y->lse[h][b]);
    for (int h = 0; h < HKV; h++) {
        assert_memory_equal(x->lists[h][b], y->lists[h][b], sizeof x->lists[h][b]);
        assert_int_equal(x->counts[h][b], y->counts[h][b]);
    }
}

/* Sequence b saw nothing. */
static void check_nothing(const results *x, int b)
{
    for (int i = 0; i < H * D; i++) assert_true(x->dense[b][i] == 0.0f && x->sparse[b][i] == 0.0f);
    for (int h = 0; h < H; h++) assert_true(x->lse[h][b] == -INFINITY);
    for (int h = 0; h < HKV; h++) {
        assert_int_equal(x->counts[h][b], 0);
        for (int i = 0; i < K; i++) assert_int_equal(x->lists[h][b][i], -1);
    }
}

static void check_faults(const results *r, int32_t bit)
{
    for (int i = 0; i < 3; i++) assert_int_equal(r->faults[i], bit);
}

static void a_good_step_has_no_fault(void **state)
{
    (void)state;
    step *s = good_step();
    results *r = run(s);
    check_faults(r, 0);
    for (int b = 0; b < BATCH; b++)
        for (int h = 0; h < HKV; h++) {
            const int32_t at = s->positions[b], page = s->table[b * COLUMNS + at / PAGE];
            const float *key = r->pool + ((int64_t)page * HKV + h) * PAGE * 2 * D + at % PAGE * D;
            assert_memory_equal(key, s->kv + (b * HKV + h) * D, D * sizeof *key);
            assert_memory_equal(key + PAGE * D, s->kv + (b * HKV + h) * D, D * sizeof *key);
        }
    free(r), free(s);
}

static void positions_out_of_range_see_nothing(void **state)
{
    (void)state;
    step *s = good_step();
    results *good = run(s);
    static const int32_t bad[] = {-1, COLUMNS * PAGE};
    for (int i = 0; i < 2; i++) {
        s->positions[1] = bad[i];
        results *r = run(s);
        check_faults(r, QUERN_STATUS_BAD_POSITION);
        check_same(good, r, 0);
        check_nothing(r, 1);
        check_same(good, r, 2);
        free(r);
    }
    free(good), free(s);
}

static void pages_out_of_range_are_absent(void **state)
{
    (void)state;
    step *s = good_step();
    results *good = run(s);
    static const int32_t bad[] = {-1, PAGES};
    for (int i = 0; i < 2; i++) {
        s->table[2 * COLUMNS + 2] = bad[i]; /* the newest tokens' */
        results *r = run(s);
        check_faults(r, QUERN_STATUS_BAD_PAGE);
        check_same(good, r, 0);
        check_same(good, r, 1);
        for (int e = 0; e < H * D; e++) assert_true(isfinite(r->dense[2][e]) && isfinite(r->sparse[2][e]));
        assert_true(memcmp(good->dense[2], r->dense[2], sizeof r->dense[2]) != 0);
        free(r);
    }
    free(good), free(s);
}

static void offsets_that_fall_are_clamped(void **state)
{
    (void)state;
    step *s = good_step();
    results *good = run(s);
    s->cu[BATCH] = BATCH + 7;
    results *r = run(s);
    check_faults(r, QUERN_STATUS_BAD_OFFSETS);
    for (int b = 0; b < BATCH; b++) check_same(good, r, b);
    free(r);
    s->cu[BATCH] = 0; /* the last sequence ends before it starts */
    r = run(s);
    check_faults(r, QUERN_STATUS_BAD_OFFSETS);
    check_same(good, r, 0);
    check_same(good, r, 1);
    free(r), free(good), free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_good_step_has_no_fault), cmocka_unit_test(positions_out_of_range_see_nothing),
        cmocka_unit_test(pages_out_of_range_are_absent), cmocka_unit_test(offsets_that_fall_are_clamped)};
    return cmocka_run_group_tests(tests, start, NULL);
}
