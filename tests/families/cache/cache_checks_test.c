/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cache_checks_test.c - what calls on caches refuse: the cache and the outputs are then as they were.
 */
#include "cache_case.h"
#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CACHE_PAGE_FLOATS = QUERN_CACHE_PAGE * (16 + 16) };

/* A paged cache of two sequences with a few tokens each, and a call that is right. */
typedef struct fixture {
    quern_context *ctx;
    cache_case cache;
    float rows[80 * 16], out[80 * 16];
    char workspace[1 << 20];
    int32_t ids[2];
    int64_t counts[2];
    quern_tensor kv, q, o;
    quern_cache_batch batch;
    quern_cache_tensors t;
    quern_decode_tensors d;
    quern_attention_params params;
} fixture;

static void set_tokens(fixture *f, int64_t first, int64_t second)
{
    const int64_t shape[] = {first + second, 1, 16};
    f->counts[0] = first;
    f->counts[1] = second;
    f->kv = quern_tensor_contiguous(f->rows, QUERN_F32, 3, shape);
    f->q = f->kv;
    f->o = quern_tensor_contiguous(f->out, QUERN_F32, 3, shape);
}

static void fixture_open(fixture *f, int64_t page)
{
    memset(f, 0, sizeof *f);
    const quern_cache_params params = {sizeof params, QUERN_F32, 3, 1, 16, 16, 300, page, 0, 0, 0, 0,
                                       false,         false,     0, 0, 0,  0};
    cache_case_make(&f->cache, &params);
    f->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    for (int i = 0; i < 80 * 16; i++) f->rows[i] = (float)i;
    f->ids[0] = 2;
    f->ids[1] = 0;
    f->batch = (quern_cache_batch){sizeof f->batch, 2, f->ids, f->counts};
    f->t = (quern_cache_tensors)QUERN_CACHE_TENSORS_INIT;
    f->d = (quern_decode_tensors)QUERN_DECODE_TENSORS_INIT;
    f->params = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    f->t.k = f->t.v = &f->kv;
    f->d.q = &f->q;
    f->d.o = &f->o;
    set_tokens(f, 63, 10);
    assert_int_equal(
        quern_cache_append(f->ctx, NULL, f->cache.cache, &f->batch, &f->t, f->workspace, sizeof f->workspace),
        QUERN_OK);
}

static void fixture_close(fixture *f)
{
    cache_case_free(&f->cache);
    quern_context_destroy(f->ctx);
}

static void refused(fixture *f, quern_status status, quern_status expected, void *before,
                    const char *sentence)
{
    assert_int_equal(status, expected);
    if (strstr(quern_last_error(f->ctx), sentence) == NULL)
        fail_msg("'%s' is not in '%s'", sentence, quern_last_error(f->ctx));
    cache_case_check_same(&f->cache, before);
    for (int i = 0; i < 80 * 16; i++) assert_true(f->out[i] == 0.0f);
}

static void refuse_append(fixture *f, quern_status expected, const char *sentence)
{
    void *before = cache_case_copy(&f->cache);
    refused(
        f,
        quern_cache_append(f->ctx, NULL, f->cache.cache, &f->batch, &f->t, f->workspace, sizeof f->workspace),
        expected, before, sentence);
}

static void refuse_decode(fixture *f, quern_status expected, const char *sentence)
{
    void *before = cache_case_copy(&f->cache);
    refused(f,
            quern_attention_decode(f->ctx, NULL, &f->params, f->cache.cache, &f->batch, &f->d, f->workspace,
                                   sizeof f->workspace),
            expected, before, sentence);
}

static void refuse_rollback(fixture *f, int64_t sequence, int64_t n, const char *sentence)
{
    void *before = cache_case_copy(&f->cache);
    refused(f, quern_cache_rollback(f->cache.cache, sequence, n), QUERN_ERR_INVALID_ARGUMENT, before,
            sentence);
}

static void sequences_and_counts_are_checked(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 0);
    set_tokens(&f, 1, 1);
    f.ids[1] = 2;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "sequences[0] and sequences[1] are 2");
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "sequences[0] and sequences[1] are 2");
    f.ids[1] = 3;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "sequences[1] is 3: -1 to 2");
    f.ids[1] = -1;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "counts[1] is 1: 0 to 0 tokens of sequence -1");
    f.ids[1] = -2;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "sequences[1] is -2");
    f.ids[1] = 0;
    f.counts[1] = 291;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "counts[1] is 291: 0 to 290 tokens of sequence 0");
    f.counts[1] = 11;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "counts[1] is 11: 0 to 10 tokens of sequence 0");
    f.counts[1] = -1;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "counts[1] is -1");
    set_tokens(&f, 1, 1);
    f.batch.batch = 4;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "batch is 4");
    f.batch.batch = 2;
    f.batch.sequences = NULL;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "sequences is NULL");
    f.batch.sequences = f.ids;
    refuse_rollback(&f, 2, 9, "n is 9: 0 to 8 of sequence 2's 63 tokens");
    refuse_rollback(&f, 1, 1, "n is 1: 0 to 0 of sequence 1's 0 tokens");
    refuse_rollback(&f, 0, -1, "n is -1");
    refuse_rollback(&f, 3, 1, "sequence is 3");
    fixture_close(&f);
}

static void tensors_are_checked(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 0);
    set_tokens(&f, 1, 1);
    const quern_tensor good = f.kv, out = f.o;
    f.kv.shape[0] = 3;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "k.shape[0] is 3: 2 is accepted");
    f.kv = good;
    f.kv.dtype = QUERN_BF16;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "k: dtype bf16: f32");
    f.kv = good;
    f.t.v = NULL;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "v is NULL");
    f.t.v = &f.kv;
    f.t.w_k = &f.kv;
    refuse_append(&f, QUERN_ERR_INVALID_ARGUMENT, "w_k is given");
    f.o.data = f.rows;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "o shares memory with q");
    f.o = out;
    f.d.gates = &f.kv;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "gates is given");
    f.d.gates = NULL;
    f.params.causal = false;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "causal is false");
    f.params.causal = true;
    f.params.query_offset = 0;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "query_offset is 0");
    f.params.query_offset = -1;
    f.params.scale = NAN;
    refuse_decode(&f, QUERN_ERR_INVALID_ARGUMENT, "scale is nan");
    f.params.scale = 0;
    void *before = cache_case_copy(&f.cache);
    refused(&f,
            quern_attention_decode(f.ctx, NULL, &f.params, f.cache.cache, &f.batch, &f.d, f.workspace, 100),
            QUERN_ERR_WORKSPACE, before, "workspace_bytes is 100");
    fixture_close(&f);
}

/* An engine's own tables and numbers. */
static void steps_are_checked(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, 0);
    static float pool[4 * CACHE_PAGE_FLOATS], before[4 * CACHE_PAGE_FLOATS];
    int32_t slots[] = {0, 1}, positions[] = {63, 10}, cu[] = {0, 2, 3}, pages[] = {3, 0, 1, 2},
            copies[] = {0, 1, 2};
    const int64_t batch[] = {2}, more[] = {3}, of_table[] = {2, 2}, of_copies[] = {1, 3},
                  of_pool[] = {4, 1, CACHE_PAGE_FLOATS};
    quern_tensor tslots = quern_tensor_contiguous(slots, QUERN_I32, 1, batch),
                 tpositions = quern_tensor_contiguous(positions, QUERN_I32, 1, batch),
                 tcu = quern_tensor_contiguous(cu, QUERN_I32, 1, more),
                 table = quern_tensor_contiguous(pages, QUERN_I32, 2, of_table),
                 tcopies = quern_tensor_contiguous(copies, QUERN_I32, 2, of_copies),
                 tokens = quern_tensor_contiguous(pool, QUERN_F32, 3, of_pool);
    quern_cache_step_params params = QUERN_CACHE_STEP_PARAMS_INIT;
    set_tokens(&f, 2, 1);
    f.t.slots = &tslots, f.t.positions = &tpositions, f.t.cu = &tcu;
    f.t.tokens = &tokens, f.t.tokens_table = &table, f.t.copies = &tcopies;
    for (int i = 0; i < 4 * CACHE_PAGE_FLOATS; i++) pool[i] = before[i] = (float)i;
    struct {
        int32_t *at, value;
        const char *sentence;
    } cases[] = {{&positions[1], -1, "positions[1] is -1"},
                 {&positions[0], 127, "tokens_table has 2 columns"},
                 {&cu[0], 1, "cu[0] is 1"},
                 {&cu[1], 4, "cu[1] is 4"},
                 {&cu[2], 1, "cu[2] is 1"},
                 {&pages[1], 4, "tokens_table[0][1] is 4: a page of the pool, 0 to 3"},
                 {&pages[0], -1, "tokens_table[0][0] is -1"},
                 {&copies[2], 4, "copies[0][2] is 4"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int32_t good = *cases[i].at;
        *cases[i].at = cases[i].value;
        assert_int_equal(quern_cache_append_step(f.ctx, NULL, &params, &f.t, f.workspace, sizeof f.workspace),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(f.ctx), cases[i].sentence) == NULL)
            fail_msg("'%s' is not in '%s'", cases[i].sentence, quern_last_error(f.ctx));
        *cases[i].at = good;
    }
    assert_memory_equal(pool, before, sizeof pool);
    slots[1] = -1; /* none: its numbers are not looked at */
    pages[2] = 99;
    assert_int_equal(quern_cache_append_step(f.ctx, NULL, &params, &f.t, f.workspace, sizeof f.workspace),
                     QUERN_OK);
    assert_memory_equal(pool + 2 * CACHE_PAGE_FLOATS, before + CACHE_PAGE_FLOATS,
                        sizeof pool / 4); /* copied */
    assert_memory_equal(pool + 3 * CACHE_PAGE_FLOATS + 63 * 16, f.rows, 16 * sizeof(float));
    assert_memory_equal(pool, f.rows + 16, 16 * sizeof(float));
    assert_memory_equal(pool + 16, before + 16, 16 * sizeof(float));
    fixture_close(&f);
}

static void parameters_are_checked(void **state)
{
    (void)state;
    const quern_cache_params good = {sizeof good, QUERN_F32, 3, 1,     16,   16, 300, 64, 9,
                                     32,          16,        0, false, true, 10, 1,   1,  16};
    struct {
        quern_cache_params p;
        const char *sentence;
    } cases[] = {{good, "params.dtype is i32"},
                 {good, "params.sequences is 0"},
                 {good, "params.kv_heads is -1"},
                 {good, "params.dim: head dim 12"},
                 {good, "params.dim_v: head dim 520"},
                 {good, "params.capacity is 0"},
                 {good, "params.page is 32"},
                 {good, "params.pages is 0"},
                 {good, "params.block_size is -1"},
                 {good, "params.stride is 5"},
                 {good, "params.compress is 2"},
                 {good, "params.window is 0"},
                 {good, "params.step is 0"},
                 {good, "params.size is 0"},
                 {good, "are too many"},
                 {good, "params.index_heads is -1"},
                 {good, "params.index_dim: head dim 0"}};
    cases[0].p.dtype = QUERN_I32;
    cases[1].p.sequences = 0;
    cases[2].p.kv_heads = -1;
    cases[3].p.dim = 12;
    cases[4].p.dim_v = 520;
    cases[5].p.capacity = 0;
    cases[6].p.page = 32;
    cases[7].p.pages = 0;
    cases[8].p.block_size = -1;
    cases[9].p.stride = 5;
    cases[10].p.compress = QUERN_NSA_COMPRESS_GIVEN;
    cases[11].p.window = 0;
    cases[12].p.step = 0;
    cases[13].p.size = 0;
    cases[15].p.index_heads = -1;
    cases[16].p.index_dim = 0;
    cases[14].p.page = 0;
    cases[14].p.sequences = cases[14].p.capacity = cases[14].p.kv_heads = INT32_MAX;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t memory = 1, rows = 2;
        assert_int_equal(quern_cache_size(&cases[i].p, &memory, &rows), QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(NULL), cases[i].sentence) == NULL)
            fail_msg("'%s' is not in '%s'", cases[i].sentence, quern_last_error(NULL));
        assert_true(memory == 1 && rows == 2);
    }
    size_t memory, rows;
    quern_cache *cache = NULL;
    char place[4096];
    assert_int_equal(quern_cache_size(&good, &memory, &rows), QUERN_OK);
    assert_int_equal(quern_cache_create(&good, place, memory - 1, place, rows, &cache), QUERN_ERR_WORKSPACE);
    assert_int_equal(quern_cache_create(&good, place, memory, place, rows - 1, &cache), QUERN_ERR_WORKSPACE);
    assert_int_equal(quern_cache_create(&good, NULL, memory, place, rows, &cache),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cache_create(&good, place, memory, place + 1, rows, &cache),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_null(cache);
    memset(place, 0, sizeof place);
    assert_int_equal(quern_cache_rollback((quern_cache *)(void *)place, 0, 0), QUERN_ERR_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_and_counts_are_checked),
        cmocka_unit_test(tensors_are_checked),
        cmocka_unit_test(steps_are_checked),
        cmocka_unit_test(parameters_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
