/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * steps_test.c - a step that is recorded once and replayed: appends and decodes of three sequences, dense,
 * sparse, and sparse by the block indexer, for 300 tokens. Before each replay the host does no more than keep
 * the ledger's books and copy the step's block and rows. The sequences begin apart, so that their blocks
 * commit at different tokens; rows of the batch are now and then of no sequence; a fork makes steps copy
 * pages. Results and pools have the bits of calls on the host's memory that are made anew for every step.
 */
#include "device.h"

#include "cmocka_c11.h"
#include "random.h"
#include "tensor.h"

#include <quern/cache.h>
#include <quern/cuda.h>
#include <quern/ledger.h>

#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

enum {
    SEQUENCES = 4,
    BATCH = 3,
    TOKENS = 300,
    CAPACITY = 512,
    HKV = 2,
    HEADS = 4,
    D = 16,
    BLOCK = 16,
    STRIDE = 8,
    WINDOW = 40,
    PREFILL = 64, /* rows of the calls before the steps */
    POOLS = 4,    /* of the ledger, and the index keys that share the tokens' pages */
    INDEX = POOLS - 1
};

/* A layer's tensors and calls in the memory of one device. */
typedef struct side {
    quern_device device;
    quern_context *ctx;
    quern_tensor k, v, q, dense, lse, sparse, chosen, indexed, by_index, pool[POOLS];
    void *block, *workspace;
    size_t bytes;
} side;

typedef struct world {
    quern_ledger *ledger;
    void *memory, *block;
    size_t block_bytes;
    int64_t rows; /* of the calls */
    side side[2];
} world;

static size_t bytes_of(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

static void *memory_of(quern_device device, size_t bytes)
{
    void *p = calloc(1, bytes + 1);
    assert_non_null(p);
    if (device == QUERN_CPU) return p;
    void *own;
    OK(quern_cuda_allocate(0, bytes, &own));
    OK(quern_cuda_copy(0, own, p, bytes, NULL));
    free(p);
    return own;
}

static void release(quern_device device, void *p)
{
    if (device == QUERN_CUDA) OK(quern_cuda_free(0, p));
    else free(p);
}

static quern_tensor made(quern_device device, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    t.data = memory_of(device, bytes_of(&t));
    t.device = device;
    return t;
}

static side side_make(quern_device device, int64_t rows, const int64_t *pages, size_t block_bytes)
{
    side s = {.device = device, .ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2)};
    const int64_t kv[] = {rows, HKV, D}, q[] = {rows, HEADS, D}, lse[] = {HEADS, rows},
                  list[] = {HKV, rows, 4};
    s.k = made(device, QUERN_F32, 3, kv);
    s.v = made(device, QUERN_F32, 3, kv);
    s.q = made(device, QUERN_F32, 3, q);
    s.dense = made(device, QUERN_F32, 3, q);
    s.sparse = made(device, QUERN_F32, 3, q);
    s.lse = made(device, QUERN_F32, 2, lse);
    s.chosen = made(device, QUERN_I32, 3, list);
    s.indexed = made(device, QUERN_F32, 3, q);
    s.by_index = made(device, QUERN_I32, 3, list);
    for (int i = 0; i < POOLS; i++) {
        const int64_t shape[] = {pages[i], HKV, (int64_t)QUERN_CACHE_PAGE * (i == INDEX ? 1 : 2) * D};
        s.pool[i] = made(device, QUERN_F32, 3, shape);
    }
    s.block = memory_of(device, block_bytes);
    s.bytes = (size_t)1 << 22;
    s.workspace = memory_of(device, s.bytes);
    return s;
}

static void side_free(side *s)
{
    quern_tensor *const all[] = {&s->k,       &s->v,       &s->q,          &s->dense,    &s->sparse,
                                 &s->lse,     &s->chosen,  &s->indexed,    &s->by_index, &s->pool[0],
                                 &s->pool[1], &s->pool[2], &s->pool[INDEX]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) release(s->device, all[i]->data);
    release(s->device, s->block);
    release(s->device, s->workspace);
    quern_context_destroy(s->ctx);
}

/* A step's calls, of all its rows. */
static void run(const world *w, const side *s)
{
    quern_step step = QUERN_STEP_INIT;
    quern_cache_step_params append = QUERN_CACHE_STEP_PARAMS_INIT;
    quern_cache_tensors a = QUERN_CACHE_TENSORS_INIT;
    quern_attention_params dense = QUERN_ATTENTION_PARAMS_INIT;
    quern_nsa_params sparse = QUERN_NSA_PARAMS_INIT;
    quern_decode_tensors d = QUERN_DECODE_TENSORS_INIT;
    OK(quern_ledger_step(w->ledger, BATCH, s->block, s->device, 0, &step));
    append.block_size = sparse.block_size = BLOCK;
    append.stride = sparse.stride = STRIDE;
    sparse.num_selected = 4;
    sparse.window = WINDOW;
    a.k = a.k_win = &s->k, a.v = a.v_win = &s->v;
    a.slots = &step.slots, a.positions = &step.positions, a.cu = &step.cu, a.copies = &step.copies;
    a.tokens = &s->pool[QUERN_CACHE_TOKENS], a.tokens_table = &step.tables[QUERN_CACHE_TOKENS];
    a.entries = &s->pool[QUERN_CACHE_ENTRIES], a.entries_table = &step.tables[QUERN_CACHE_ENTRIES];
    a.win = &s->pool[QUERN_CACHE_WIN], a.win_table = &step.tables[QUERN_CACHE_WIN];
    a.k_index = &s->k, a.index = &s->pool[INDEX];
    OK(quern_cache_append_step(s->ctx, NULL, &append, &a, s->workspace, s->bytes));
    d.q = &s->q, d.o = &s->dense, d.lse = &s->lse;
    d.slots = a.slots, d.positions = a.positions, d.cu = a.cu;
    d.tokens = a.tokens, d.tokens_table = a.tokens_table;
    OK(quern_attention_decode_step(s->ctx, NULL, &dense, &d, s->workspace, s->bytes));
    d.o = &s->sparse, d.lse = NULL, d.block_idx = &s->chosen;
    d.entries = a.entries, d.entries_table = a.entries_table, d.win = a.win, d.win_table = a.win_table;
    OK(quern_nsa_decode_step(s->ctx, NULL, &sparse, &d, s->workspace, s->bytes));
    quern_nsa_params msa = QUERN_NSA_PARAMS_INIT;
    OK(quern_nsa_params_preset(&msa, "msa"));
    msa.selection = QUERN_NSA_LIST_INDEXED;
    msa.select_block = BLOCK;
    msa.num_selected = 4;
    d.o = &s->indexed, d.block_idx = &s->by_index;
    d.entries = d.entries_table = d.win = d.win_table = NULL;
    d.q_index = &s->k, d.index = a.index;
    OK(quern_nsa_decode_step(s->ctx, NULL, &msa, &d, s->workspace, s->bytes));
}

static void copy(const side *s, void *to, const void *from, size_t bytes)
{
    if (s->device == QUERN_CUDA) OK(quern_cuda_copy(0, to, from, bytes, NULL));
    else memcpy(to, from, bytes);
}

/* New rows and the step's block on both sides. */
static void feed(world *w, test_random *random)
{
    for (int i = 0; i < 3; i++) {
        const side *host = &w->side[0];
        const quern_tensor *of_host = i == 0 ? &host->k : i == 1 ? &host->v : &host->q;
        const size_t bytes = bytes_of(of_host);
        for (size_t k = 0; k < bytes / sizeof(float); k++)
            ((float *)of_host->data)[k] = (float)test_random_normal(random);
        const side *device = &w->side[1];
        copy(device, (i == 0 ? &device->k : i == 1 ? &device->v : &device->q)->data, of_host->data, bytes);
    }
    for (int i = 0; i < 2; i++) copy(&w->side[i], w->side[i].block, w->block, w->block_bytes);
}

static void same(const world *w, const quern_tensor *host, const quern_tensor *device, const char *name,
                 int step)
{
    const size_t bytes = bytes_of(host);
    char *got = malloc(bytes);
    assert_non_null(got);
    copy(&w->side[1], got, device->data, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != ((const char *)host->data)[i])
            fail_msg("step %d: byte %zu of %s differs", step, i, name);
    free(got);
}

static void all_same(const world *w, int step, bool pools)
{
    const side *h = &w->side[0], *d = &w->side[1];
    same(w, &h->dense, &d->dense, "dense", step);
    same(w, &h->lse, &d->lse, "lse", step);
    same(w, &h->sparse, &d->sparse, "sparse", step);
    same(w, &h->chosen, &d->chosen, "block_idx", step);
    same(w, &h->indexed, &d->indexed, "O by the indexer", step);
    same(w, &h->by_index, &d->by_index, "the indexer's block_idx", step);
    for (int i = 0; i < POOLS && pools; i++) same(w, &h->pool[i], &d->pool[i], "a pool", step);
}

static void begin(world *w, const int32_t *ids, const int64_t *counts)
{
    OK(quern_ledger_begin(w->ledger, ids, counts, BATCH, w->block, w->block_bytes));
}

static world world_make(int64_t rows)
{
    world w = {.rows = rows};
    quern_ledger_params p = QUERN_LEDGER_PARAMS_INIT;
    int64_t pages[POOLS];
    size_t bytes;
    p.sequences = SEQUENCES;
    p.capacity = CAPACITY;
    p.step = PREFILL;
    p.pools[QUERN_CACHE_TOKENS] = (quern_ledger_pool){.page = QUERN_CACHE_PAGE};
    p.pools[QUERN_CACHE_ENTRIES] =
        (quern_ledger_pool){.page = QUERN_CACHE_PAGE, .block = BLOCK, .stride = STRIDE};
    p.pools[QUERN_CACHE_WIN] = (quern_ledger_pool){.page = QUERN_CACHE_PAGE, .ring = 3 * QUERN_CACHE_PAGE};
    OK(quern_ledger_size(&p, &bytes));
    w.memory = malloc(bytes);
    OK(quern_ledger_create(&p, w.memory, bytes, &w.ledger));
    OK(quern_ledger_block_bytes(w.ledger, BATCH, &w.block_bytes));
    w.block = malloc(w.block_bytes);
    for (int i = 0; i < INDEX; i++) OK(quern_ledger_pages(&p, i, CAPACITY, NULL, &pages[i]));
    pages[INDEX] = pages[QUERN_CACHE_TOKENS];
    for (int i = 0; i < 2; i++)
        w.side[i] = side_make(i == 0 ? QUERN_CPU : QUERN_CUDA, rows, pages, w.block_bytes);
    return w;
}

static void world_free(world *w)
{
    for (int i = 0; i < 2; i++) side_free(&w->side[i]);
    free(w->memory);
    free(w->block);
}

/* Steps of up to `most` tokens a sequence by one recording. Sequences 0 ... 2 begin with first[b] tokens. */
static void replay_steps(int steps, int64_t most, const int64_t *first)
{
    int32_t ids[BATCH] = {0, 1, 2};
    int64_t lengths[SEQUENCES];
    test_random random = {(uint64_t)most};
    world w = world_make(BATCH * PREFILL);
    begin(&w, ids, first);
    feed(&w, &random);
    run(&w, &w.side[0]);
    mock_record();
    run(&w, &w.side[1]);
    mock_recording *recording = mock_recorded();
    mock_replay(recording);
    all_same(&w, -1, true);
    OK(quern_ledger_commit(w.ledger));
    for (int step = 0; step < steps; step++) {
        int64_t counts[BATCH];
        for (int b = 0; b < BATCH; b++) {
            ids[b] = test_random_one_in(&random, 11) ? -1 : b == 2 && step > steps / 2 ? 3 : b;
            counts[b] = ids[b] < 0 ? 0 : most == 1 ? 1 : test_random_int(&random, 0, most);
        }
        if (step == steps / 2) OK(quern_ledger_fork(w.ledger, 0, 3));
        begin(&w, ids, counts);
        feed(&w, &random);
        run(&w, &w.side[0]);
        mock_replay(recording);
        all_same(&w, step, step % 50 == 49 || step == steps / 2 + 1);
        OK(quern_ledger_commit(w.ledger));
    }
    for (int64_t i = 0; i < SEQUENCES; i++) OK(quern_ledger_length(w.ledger, i, &lengths[i], NULL));
    assert_true(lengths[0] > first[0] + steps / 2 && lengths[3] > lengths[0] / 2);
    mock_forget(recording);
    world_free(&w);
}

static void one_recording_serves_300_tokens(void **state)
{
    static const int64_t first[] = {5, 30, 61};
    (void)state;
    replay_steps(TOKENS, 1, first);
}

/* Several tokens a step, of sequences that begin with none. */
static void counts_may_change(void **state)
{
    static const int64_t first[] = {0, 64, 3};
    (void)state;
    replay_steps(60, 9, first);
}

/* Numbers of a step that no ledger writes set their bits; the calls end without an error. */
static void bad_steps_set_bits(void **state)
{
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, 1 << 20};
    static const int64_t first[] = {5, 30, 61};
    const int32_t ids[] = {0, 1, 2};
    test_random random = {9};
    world w = world_make(BATCH * PREFILL);
    (void)state;
    begin(&w, ids, first);
    feed(&w, &random);
    side *d = &w.side[1];
    run(&w, d);
    assert_int_equal(mock_take_faults(), 0);
    quern_step step = QUERN_STEP_INIT;
    OK(quern_ledger_step(w.ledger, BATCH, w.block, QUERN_CPU, 0, &step));
    const struct {
        const quern_tensor *t;
        int64_t index;
        int32_t bits;
    } places[] = {{&step.positions, 1, QUERN_STATUS_BAD_POSITION},
                  {&step.cu, 2, QUERN_STATUS_BAD_OFFSETS},
                  {&step.tables[QUERN_CACHE_TOKENS], 0, QUERN_STATUS_BAD_PAGE},
                  {&step.tables[QUERN_CACHE_WIN], 0, QUERN_STATUS_BAD_PAGE}};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            int32_t *at = (int32_t *)places[p].t->data + places[p].index, good = *at;
            *at = bad[i];
            copy(d, d->block, w.block, w.block_bytes);
            *at = good;
            run(&w, d);
            assert_true(mock_take_faults() & places[p].bits);
        }
    OK(quern_ledger_abort(w.ledger));
    world_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_recording_serves_300_tokens),
                                       cmocka_unit_test(counts_may_change),
                                       cmocka_unit_test(bad_steps_set_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
