/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_steps_test.c - a step of V4's layer that is recorded once and replayed for 300 tokens of three
 * sequences. Before each replay the host keeps the ledger's books and copies the step's block and x, no more.
 * The sequences begin apart, so that their blocks commit at different tokens; rows of the batch are now and
 * then of no sequence; a fork makes steps copy pages and states. Results have the bits of calls on the host's
 * memory that are made anew for every step. Bad numbers of one sequence set its bit and change no other's.
 */
#include "device.h"

#include "cmocka_c11.h"
#include "dsv4_layer_case.h"

#include <quern/cuda.h>

#include <math.h>
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
    CAPACITY = 400,
    WIDTH = LAYER_SMALL_WIDTH,
    ROWS = 24, /* of the calls */
    PAGE = 4,
    FIELDS = sizeof(quern_dsv4_layer_step_tensors) / sizeof(void *) - 1
};

static const oracle_layer shape = {LAYER_CASE_SMALL, .tokens = CAPACITY, .index_dim = 32};

/* The call's tensors in the memory of one device, by their fields. */
typedef struct side {
    quern_device device;
    quern_context *ctx;
    quern_tensor t[FIELDS];
    bool own[FIELDS]; /* the others stand in the block */
    void *block, *workspace;
    size_t bytes;
} side;

typedef struct world {
    quern_dsv4_layer_step_params params;
    quern_ledger *ledger;
    void *memory, *block;
    size_t block_bytes;
    layer_case weights;
    side side[2];
} world;
#define FIELD(name) ((int)(offsetof(quern_dsv4_layer_step_tensors, name) / sizeof(void *)) - 1)

static size_t bytes_of(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

static void copy(const side *s, void *to, const void *from, size_t bytes)
{
    if (s->device == QUERN_CUDA) OK(quern_cuda_copy(0, to, from, bytes, NULL));
    else memcpy(to, from, bytes);
}

static void *memory_of(const side *s, size_t bytes, const void *from)
{
    void *p = NULL;
    if (s->device == QUERN_CUDA) OK(quern_cuda_allocate(0, bytes, &p));
    else p = malloc(bytes + 1);
    assert_non_null(p);
    if (from != NULL) copy(s, p, from, bytes);
    return p;
}

static void release(const side *s, void *p)
{
    if (s->device == QUERN_CUDA) OK(quern_cuda_free(0, p));
    else free(p);
}

/* Field f, of numbers that `from` has, or of bytes that are NaN. */
static void put(side *s, int f, quern_dtype dtype, int32_t ndim, const int64_t *extents, const void *from)
{
    quern_tensor *t = &s->t[f];
    *t = quern_tensor_contiguous(NULL, dtype, ndim, extents);
    void *filled = malloc(bytes_of(t) + 1);
    memset(filled, f == FIELD(fault) ? 0 : 0xff, bytes_of(t) + 1);
    t->data = memory_of(s, bytes_of(t), from != NULL ? from : filled);
    t->device = s->device;
    s->own[f] = true;
    free(filled);
}

static void put3(side *s, int f, quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t extents[] = {a, b, c};
    put(s, f, dtype, ndim, extents, NULL);
}

/* Pools, states, results and weights; kind csa has keys in bytes. */
static void side_make(world *w, side *s, quern_device device, const quern_ledger_params *p)
{
    const quern_dsv4_layer_tensors all = layer_case_tensors(&w->weights);
    const quern_tensor *given[FIELDS];
    const bool csa = w->params.kind == QUERN_DSV4_LAYER_CSA;
    const int64_t ring = p->rollback, floats = (csa ? 6 : 3) + ring * (csa ? 4 : 2);
    int64_t pages[2] = {0}, slots = 0;
    s->device = device;
    s->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    for (int i = 0; i < 2; i++) OK(quern_ledger_pages(p, i, 0, NULL, &pages[i]));
    OK(quern_ledger_pages(p, QUERN_LEDGER_STATES, 0, NULL, &slots));
    memcpy(given, (const char *)&all + sizeof all.size, FIELD(out) * sizeof *given);
    for (int f = FIELD(cos_sin); f < FIELD(out); f++) {
        if (given[f] == NULL) continue;
        double *values = test_tensor_get(&w->weights.t[f]); /* its strides may have gaps */
        float *numbers = malloc((size_t)test_tensor_count(&w->weights.t[f]) * sizeof *numbers);
        for (int64_t i = 0; i < test_tensor_count(&w->weights.t[f]); i++) numbers[i] = (float)values[i];
        put(s, f, QUERN_F32, given[f]->ndim, given[f]->shape, numbers);
        free(values), free(numbers);
    }
    put3(s, FIELD(x), QUERN_F32, 2, ROWS, WIDTH, 0);
    put3(s, FIELD(out), QUERN_F32, 2, ROWS, WIDTH, 0);
    put3(s, FIELD(raw), QUERN_F32, 3, pages[0], p->pools[0].page, shape.dim);
    put3(s, FIELD(fault), QUERN_I32, 1, slots > 0 ? slots : SEQUENCES, 0, 0);
    if (slots > 0) {
        put3(s, FIELD(entries), QUERN_F32, 3, pages[1], PAGE, shape.dim);
        put3(s, FIELD(states), QUERN_F32, 2, slots, floats * shape.dim, 0);
        put3(s, FIELD(merged), QUERN_I32, 1, slots, 0, 0);
    }
    if (csa) {
        put3(s, FIELD(idx_topk), QUERN_I32, 2, ROWS, shape.top_k, 0);
        put3(s, FIELD(keys), QUERN_U8, 2, pages[1], PAGE * (shape.index_dim / 2 + shape.index_dim / 32), 0);
        put3(s, FIELD(indexer_states), QUERN_F32, 2, slots, floats * shape.index_dim, 0);
        put3(s, FIELD(indexer_merged), QUERN_I32, 1, slots, 0, 0);
    }
    s->block = memory_of(s, w->block_bytes, NULL);
    s->bytes = (size_t)1 << 24;
    s->workspace = memory_of(s, s->bytes, NULL);
}

static world world_make(oracle_layer_kind kind)
{
    world w = {.params = QUERN_DSV4_LAYER_STEP_PARAMS_INIT};
    quern_dsv4_layer_cache_params sizes = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_ledger_params p = QUERN_LEDGER_PARAMS_INIT;
    test_random random = {(uint64_t)kind + 5};
    oracle_layer dims = shape;
    size_t bytes;
    dims.kind = kind;
    w.weights = layer_case_make(&random, &dims, 1, QUERN_F32, QUERN_F32);
    w.params.kind = sizes.kind = (quern_dsv4_layer_kind)kind;
    w.params.window = sizes.window = dims.window;
    w.params.top_k = dims.top_k;
    w.params.key_format = sizes.key_format = kind == ORACLE_CSA ? QUERN_DSV4_FP4 : QUERN_DSV4_ROWS;
    sizes.sequences = SEQUENCES, sizes.capacity = CAPACITY, sizes.dim = dims.dim, sizes.ratio = dims.ratio;
    sizes.index_dim = dims.index_dim, sizes.ring = 2, sizes.page = kind != ORACLE_SWA ? PAGE : 0;
    OK(quern_dsv4_layer_ledger_params(&sizes, &p));
    OK(quern_ledger_size(&p, &bytes));
    w.memory = malloc(bytes);
    OK(quern_ledger_create(&p, w.memory, bytes, &w.ledger));
    OK(quern_ledger_block_bytes(w.ledger, BATCH, &w.block_bytes));
    w.block = malloc(w.block_bytes);
    side_make(&w, &w.side[0], QUERN_CPU, &p);
    side_make(&w, &w.side[1], QUERN_CUDA, &p);
    return w;
}

static void world_free(world *w)
{
    for (int i = 0; i < 2; i++) {
        side *s = &w->side[i];
        for (int f = 0; f < FIELDS; f++)
            if (s->own[f]) release(s, s->t[f].data);
        release(s, s->block);
        release(s, s->workspace);
        quern_context_destroy(s->ctx);
    }
    layer_case_free(&w->weights);
    free(w->memory), free(w->block);
}

static void run(const world *w, const side *s)
{
    quern_dsv4_layer_step_tensors t = QUERN_DSV4_LAYER_STEP_TENSORS_INIT;
    const quern_tensor *fields[FIELDS];
    quern_step step = QUERN_STEP_INIT;
    OK(quern_ledger_step(w->ledger, BATCH, s->block, s->device, 0, &step));
    for (int f = 0; f < FIELDS; f++) fields[f] = s->own[f] ? &s->t[f] : NULL;
    memcpy((char *)&t + sizeof t.size, fields, sizeof fields);
    t.slots = &step.slots, t.positions = &step.positions, t.cu = &step.cu, t.copies = &step.copies;
    t.raw_table = &step.tables[QUERN_DSV4_RAW];
    if (s->own[FIELD(entries)]) t.entries_table = &step.tables[QUERN_DSV4_ENTRIES];
    OK(quern_dsv4_layer_step(s->ctx, NULL, &w->params, &t, s->workspace, s->bytes));
}

/* New rows and the step's block on both sides. */
static void feed(world *w, test_random *random)
{
    float x[ROWS * WIDTH];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)test_random_normal(random);
    for (int i = 0; i < 2; i++) {
        copy(&w->side[i], w->side[i].t[FIELD(x)].data, x, sizeof x);
        copy(&w->side[i], w->side[i].block, w->block, w->block_bytes);
    }
}

static void same(const world *w, int f, int step)
{
    const quern_tensor *host = &w->side[0].t[f], *device = &w->side[1].t[f];
    if (!w->side[0].own[f]) return;
    char *got = malloc(bytes_of(host));
    copy(&w->side[1], got, device->data, bytes_of(host));
    if (memcmp(got, host->data, bytes_of(host)) != 0) fail_msg("step %d: field %d differs", step, f);
    for (int64_t i = 0; f == FIELD(out) && i < ROWS * WIDTH; i++) assert_true(isfinite(((float *)got)[i]));
    free(got);
}

static void all_same(const world *w, int step, bool pools)
{
    static const int results[] = {FIELD(out), FIELD(idx_topk), FIELD(fault), FIELD(merged)},
                     kept[] = {FIELD(raw), FIELD(entries), FIELD(keys), FIELD(states), FIELD(indexer_states)};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) same(w, results[i], step);
    for (size_t i = 0; i < sizeof kept / sizeof *kept && pools; i++) same(w, kept[i], step);
}

static void one_recording_serves_300_tokens(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        world w = world_make((oracle_layer_kind)kind);
        test_random random = {7};
        int32_t ids[BATCH] = {0, 1, 2};
        int64_t counts[BATCH] = {5, 9, 10}, length;
        mock_record();
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        run(&w, &w.side[1]);
        mock_recording *recording = mock_recorded();
        for (int step = 0; step < TOKENS; step++) {
            feed(&w, &random);
            run(&w, &w.side[0]);
            mock_replay(recording);
            all_same(&w, step, step % 50 == 49 || step == TOKENS / 2);
            OK(quern_ledger_commit(w.ledger));
            if (step == TOKENS / 2 - 1) OK(quern_ledger_fork(w.ledger, 0, 3));
            for (int b = 0; b < BATCH; b++) {
                ids[b] = test_random_one_in(&random, 11) ? -1 : b == 2 && step >= TOKENS / 2 ? 3 : b;
                counts[b] = ids[b] < 0 ? 0 : 1;
            }
            OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        }
        OK(quern_ledger_abort(w.ledger));
        for (int64_t i = 0; i < SEQUENCES; i++) {
            OK(quern_ledger_length(w.ledger, i, &length, NULL));
            assert_true(length > TOKENS / 3);
        }
        assert_int_equal(mock_take_faults(), 0);
        mock_forget(recording);
        world_free(&w);
    }
}

/* A number that no ledger writes: its sequence's rows are 0 and its word has a bit, the others have the bits
 * of a call without it; the call ends without an error. */
static void bad_numbers_stop_one_sequence(void **state)
{
    static const int32_t bad[] = {INT32_MIN, -1, INT32_MAX, 1 << 20};
    (void)state;
    for (int n = 0; n < 3 * 3 * 4; n++) {
        const oracle_layer_kind kind = (oracle_layer_kind)(n % 3);
        world w = world_make(kind);
        test_random random = {(uint64_t)n + 2};
        const int32_t ids[] = {0, 1, 2};
        const int64_t counts[] = {7, 8, 6};
        float out[2][ROWS * WIDTH];
        quern_step step = QUERN_STEP_INIT;
        OK(quern_ledger_step(w.ledger, BATCH, w.block, QUERN_CPU, 0, &step));
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        feed(&w, &random);
        for (int i = 0; i < 2; i++) run(&w, &w.side[i]);
        OK(quern_ledger_commit(w.ledger));
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        int32_t *const numbers[] = {(int32_t *)step.positions.data + 1,
                                    (int32_t *)step.tables[QUERN_DSV4_RAW].data + 1,
                                    kind == ORACLE_SWA ? (int32_t *)step.positions.data + 1
                                                       : (int32_t *)step.tables[QUERN_DSV4_ENTRIES].data +
                                                             step.tables[QUERN_DSV4_ENTRIES].shape[1]};
        feed(&w, &random);
        run(&w, &w.side[0]);
        *numbers[n / 3 % 3] = bad[n / 9];
        copy(&w.side[1], w.side[1].block, w.block, w.block_bytes);
        run(&w, &w.side[1]);
        for (int i = 0; i < 2; i++) copy(&w.side[1], out[i], w.side[i].t[FIELD(out)].data, sizeof out[i]);
        for (int64_t i = 0; i < ROWS * WIDTH; i++) {
            const bool own = i >= counts[0] * WIDTH && i < (counts[0] + counts[1]) * WIDTH;
            if (own ? out[1][i] != 0 : out[0][i] != out[1][i])
                fail_msg("case %d: element %lld is %g and %g", n, (long long)i, (double)out[0][i],
                         (double)out[1][i]);
        }
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_recording_serves_300_tokens),
                                       cmocka_unit_test(bad_numbers_stop_one_sequence)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
