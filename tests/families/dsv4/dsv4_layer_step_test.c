/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_layer_step_test.c - a step of the layer over a ledger's tensors. Whatever steps, forks, roll-backs,
 * aborts, saves and restores the sequences of two layers go through, a step's outputs are, to the bit, those
 * of a model that keeps each sequence's rows of x alone and computes the layer over all of them; shapes are
 * upper bounds, behind which rows are 0; a step of up to m tokens may run twice. Faults stop one sequence
 * and change no bit of the others.
 */
#include "cmocka_c11.h"
#include "dsv4_layer_case.h"

#include <quern/cuda.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 3, CAPACITY = 40, WIDTH = LAYER_SMALL_WIDTH, LAYERS = 2, AREAS = 7 };
enum { MOST = 12, ROOM = SEQUENCES * MOST + 3 };

#ifdef QUERN_TEST_GPU /* whose core and indexer have 16 bits */
typedef uint16_t element;
static const quern_dtype DTYPE = QUERN_BF16;
static element element_of(double x)
{
    const float rounded = (float)test_round(QUERN_BF16, x);
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return (element)(bits >> 16);
}
static float value_of(element x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#else
typedef float element;
static const quern_dtype DTYPE = QUERN_F32;
static element element_of(double x)
{
    return (float)x;
}
static float value_of(element x)
{
    return x;
}
#endif

static const oracle_layer shape = {LAYER_CASE_SMALL, .tokens = CAPACITY, .index_dim = 8};

/* A layer: its weights, and what it keeps. */
typedef struct layer {
    layer_case weights;
    quern_tensor area[AREAS]; /* raw, entries, keys, states, merged, those of the indexer; ndim 0: none */
} layer;

typedef struct world {
    quern_dsv4_layer_step_params params;
    quern_dsv4_layer_cache_params sizes;
    quern_ledger *ledger;
    layer layer[LAYERS];
    element x[SEQUENCES][CAPACITY][WIDTH];      /* the model: each sequence's tokens */
    int64_t length[SEQUENCES], held[SEQUENCES]; /* held: of a restored one, less than the ledger knows */
    int32_t fault[8];
    bool faults;
    void *memory, *block;
    size_t block_bytes;
    quern_context *ctx;
} world;

static quern_tensor area_of(quern_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t extents[] = {a, b, c};
    const size_t bytes =
        (size_t)a * (size_t)(ndim > 1 ? b : 1) * (size_t)(ndim > 2 ? c : 1) * quern_dtype_size(dtype);
    void *data = malloc(bytes + 1);
    memset(data, 0xff, bytes + 1); /* NaN: nothing needs clearing */
    return quern_tensor_contiguous(data, dtype, ndim, extents);
}

static world world_make(test_random *random, oracle_layer_kind kind, int64_t ring, bool bytes)
{
    world w = {.params = QUERN_DSV4_LAYER_STEP_PARAMS_INIT, .sizes = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT};
    const bool csa = kind == ORACLE_CSA, entries = kind != ORACLE_SWA;
    quern_ledger_params p = QUERN_LEDGER_PARAMS_INIT;
    oracle_layer dims = shape;
    dims.kind = kind;
    int64_t raw, pages = 0, slots = 0;
    size_t need;
    w.params.kind = w.sizes.kind = (quern_dsv4_layer_kind)kind;
    w.params.window = w.sizes.window = dims.window;
    w.params.top_k = dims.top_k;
    w.params.key_format = w.sizes.key_format = csa && bytes ? QUERN_DSV4_FP8 : QUERN_DSV4_ROWS;
    w.sizes.sequences = SEQUENCES, w.sizes.capacity = CAPACITY, w.sizes.dim = dims.dim;
    w.sizes.ratio = dims.ratio, w.sizes.index_dim = dims.index_dim, w.sizes.ring = ring;
    w.sizes.page = entries ? test_random_int(random, 1, 4) : 0;
    assert_int_equal(quern_dsv4_layer_ledger_params(&w.sizes, &p), QUERN_OK);
    assert_int_equal(quern_ledger_size(&p, &need), QUERN_OK);
    w.memory = malloc(need);
    assert_int_equal(quern_ledger_create(&p, w.memory, need, &w.ledger), QUERN_OK);
    assert_int_equal(quern_ledger_block_bytes(w.ledger, SEQUENCES, &w.block_bytes), QUERN_OK);
    w.block = malloc(w.block_bytes);
    assert_int_equal(quern_ledger_pages(&p, QUERN_DSV4_RAW, 0, NULL, &raw), QUERN_OK);
    assert_int_equal(quern_ledger_pages(&p, QUERN_DSV4_ENTRIES, 0, NULL, &pages), QUERN_OK);
    assert_int_equal(quern_ledger_pages(&p, QUERN_LEDGER_STATES, 0, NULL, &slots), QUERN_OK);
    for (int i = 0; i < LAYERS; i++) {
        layer *l = &w.layer[i];
        const int64_t row = csa && bytes ? dims.index_dim + 4 : dims.index_dim,
                      floats = (csa ? 6 : 3) + ring * (csa ? 4 : 2);
        l->weights = layer_case_make(random, &dims, 1, DTYPE, QUERN_F32);
        l->area[0] = area_of(DTYPE, 3, raw, p.pools[QUERN_DSV4_RAW].page, dims.dim);
        if (!entries) continue;
        l->area[1] = area_of(DTYPE, 3, pages, w.sizes.page, dims.dim);
        l->area[3] = area_of(QUERN_F32, 2, slots, floats * dims.dim, 0);
        l->area[4] = area_of(QUERN_I32, 1, slots, 0, 0);
        if (!csa) continue;
        l->area[2] = bytes ? area_of(QUERN_U8, 2, pages, w.sizes.page * row, 0)
                           : area_of(DTYPE, 3, pages, w.sizes.page, row);
        l->area[5] = area_of(QUERN_F32, 2, slots, floats * dims.index_dim, 0);
        l->area[6] = area_of(QUERN_I32, 1, slots, 0, 0);
    }
    w.ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    return w;
}

static void world_free(world *w)
{
    for (int i = 0; i < LAYERS; i++) {
        layer_case_free(&w->layer[i].weights);
        for (int k = 0; k < AREAS; k++) free(w->layer[i].area[k].data);
    }
    free(w->memory), free(w->block);
    quern_context_destroy(w->ctx);
}

/* The rows that a layer gives over the whole of a sequence's x. */
static void expect(const world *w, int which, element x[CAPACITY][WIDTH], int64_t n, element *out)
{
    const layer_case *c = &w->layer[which].weights;
    quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    const quern_tensor *given[LAYER_TENSORS];
    const int64_t extents[] = {1, n, WIDTH};
    const quern_tensor in = quern_tensor_contiguous(x, DTYPE, 3, extents),
                       to = quern_tensor_contiguous(out, DTYPE, 3, extents);
    size_t bytes;
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = LAYER_Q_RESIDUAL; i < LAYER_TENSORS; i++) given[i] = NULL;
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    t.x = &in;
    t.out = &to;
    assert_int_equal(quern_dsv4_layer_workspace(w->ctx, &p, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    assert_int_equal(quern_dsv4_layer(w->ctx, NULL, &p, &t, workspace, bytes), QUERN_OK);
    free(workspace);
}

/* One operation of a layer on the step in the block; x and out [ROOM, WIDTH]. */
static quern_status run(const world *w, int which, int64_t batch, element *x, element *out, element *kv_rows)
{
    const layer *l = &w->layer[which];
    const quern_dsv4_layer_tensors all = layer_case_tensors(&l->weights);
    quern_dsv4_layer_step_tensors t = QUERN_DSV4_LAYER_STEP_TENSORS_INIT;
    quern_step step = QUERN_STEP_INIT;
    const int64_t rows[] = {ROOM, WIDTH}, kv[] = {ROOM, shape.dim}, slots[] = {8};
    const quern_tensor in = quern_tensor_contiguous(x, DTYPE, 2, rows),
                       to = quern_tensor_contiguous(out, DTYPE, 2, rows),
                       kv_view = quern_tensor_contiguous(kv_rows, DTYPE, 2, kv);
    quern_tensor fault = quern_tensor_contiguous((void *)(uintptr_t)w->fault, QUERN_I32, 1, slots);
    const quern_tensor *const area[AREAS] = {&l->area[0], &l->area[1], &l->area[2], &l->area[3],
                                             &l->area[4], &l->area[5], &l->area[6]};
    const quern_tensor **const fields[AREAS] = {&t.raw,    &t.entries,        &t.keys,          &t.states,
                                                &t.merged, &t.indexer_states, &t.indexer_merged};
    size_t bytes;
    assert_int_equal(quern_ledger_step(w->ledger, batch, w->block, QUERN_CPU, 0, &step), QUERN_OK);
    memcpy((char *)&t + sizeof t.size, (const char *)&all + sizeof all.size, /* x ... indexer_heads */
           offsetof(quern_dsv4_layer_step_tensors, out) - sizeof t.size);
    t.x = &in, t.out = &to, t.kv_rows = &kv_view;
    t.slots = &step.slots, t.positions = &step.positions, t.cu = &step.cu, t.copies = &step.copies;
    t.raw_table = &step.tables[QUERN_DSV4_RAW];
    for (int i = 0; i < AREAS; i++)
        if (l->area[i].ndim > 0) *fields[i] = area[i];
    if (l->area[1].ndim > 0) t.entries_table = &step.tables[QUERN_DSV4_ENTRIES];
    if (l->area[4].ndim > 0) fault.shape[0] = l->area[4].shape[0];
    if (w->faults) t.fault = &fault;
    quern_status status = quern_dsv4_layer_step_workspace(w->ctx, &w->params, &t, &bytes);
    if (status != QUERN_OK) return status;
    void *workspace = malloc(bytes + 1);
    memset(workspace, 0xa5, bytes + 1);
    status = quern_dsv4_layer_step(w->ctx, NULL, &w->params, &t, workspace, bytes);
    free(workspace);
    return status;
}

typedef struct batch {
    int64_t size, tokens, counts[SEQUENCES];
    int32_t ids[SEQUENCES];
    element x[ROOM * WIDTH];
} batch;

static void batch_fill(batch *b, test_random *random)
{
    for (int64_t i = 0; i < ROOM * WIDTH; i++) b->x[i] = element_of(test_random_normal(random));
}

static void batch_make(const world *w, test_random *random, batch *b)
{
    const int32_t first = (int32_t)test_random_int(random, 0, SEQUENCES - 1);
    b->size = test_random_int(random, 1, SEQUENCES);
    b->tokens = 0;
    for (int64_t i = 0; i < b->size; i++) {
        b->ids[i] = test_random_one_in(random, 6) ? -1 : (first + (int32_t)i) % SEQUENCES;
        const int64_t left = b->ids[i] < 0 ? 0 : CAPACITY - w->length[b->ids[i]],
                      most = test_random_one_in(random, 3) ? MOST : 2;
        b->counts[i] = test_random_int(random, 0, left < most ? left : most);
        b->tokens += b->counts[i];
    }
    batch_fill(b, random);
}

/* Compares a layer's step with the model's; sequence `stopped` has rows of 0. */
static void check(const world *w, int which, const batch *b, const element *out, int stopped)
{
    static element x[CAPACITY][WIDTH], want[CAPACITY * WIDTH];
    static const element zeros[ROOM * WIDTH];
    int64_t at = 0;
    for (int64_t i = 0; i < b->size; i++) {
        if (b->ids[i] < 0 || b->counts[i] == 0) continue;
        const int64_t had = w->length[b->ids[i]], n = b->counts[i];
        memcpy(x, w->x[b->ids[i]], sizeof x);
        memcpy(x[had], b->x + at * WIDTH, (size_t)(n * WIDTH) * sizeof **x);
        expect(w, which, x, had + n, want);
        const element *rows = b->ids[i] == stopped ? zeros : want + had * WIDTH;
        if (memcmp(out + at * WIDTH, rows, (size_t)(n * WIDTH) * sizeof *want) != 0)
            fail_msg("layer %d, sequence %d of %lld tokens differs", which, b->ids[i], (long long)(had + n));
        at += n;
    }
    assert_memory_equal(out + at * WIDTH, zeros, (size_t)((ROOM - at) * WIDTH) * sizeof *out);
}

static void take(world *w, const batch *b)
{
    int64_t at = 0;
    for (int64_t i = 0; i < b->size; at += b->counts[i++]) {
        if (b->ids[i] < 0) continue;
        memcpy(w->x[b->ids[i]][w->length[b->ids[i]]], b->x + at * WIDTH,
               (size_t)(b->counts[i] * WIDTH) * sizeof *b->x);
        w->length[b->ids[i]] += b->counts[i];
        const int64_t held = w->held[b->ids[i]] + b->counts[i];
        w->held[b->ids[i]] = held < w->sizes.ring ? held : w->sizes.ring;
    }
}

static void begin(world *w, const batch *b)
{
    if (quern_ledger_begin(w->ledger, b->ids, b->counts, b->size, w->block, w->block_bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(w->ctx));
}

static void run_all(world *w, batch *b, int stopped)
{
    static element out[ROOM * WIDTH], kv[ROOM * 16];
    for (int i = 0; i < LAYERS; i++) {
        memset(out, 0x77, sizeof out), memset(kv, 0x77, sizeof kv);
        if (run(w, i, b->size, b->x, out, kv) != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
        check(w, i, b, out, stopped);
        for (int64_t k = b->tokens * 16; k < ROOM * 16; k++) assert_true(kv[k] == 0);
    }
}

static void take_step(world *w, test_random *random)
{
    static batch b;
    int64_t most = 0;
    batch_make(w, random, &b);
    for (int64_t i = 0; i < b.size; i++) most = b.counts[i] > most ? b.counts[i] : most;
    begin(w, &b);
    if (test_random_one_in(random, 8)) { /* before it has run */
        assert_int_equal(quern_ledger_abort(w->ledger), QUERN_OK);
        return;
    }
    run_all(w, &b, -1);
    if (most <= w->sizes.ring) run_all(w, &b, -1);
    take(w, &b);
    assert_int_equal(quern_ledger_commit(w->ledger), QUERN_OK);
}

/* What a layer keeps of the only sequence of the step in the block, to bytes at `packed` or back. */
static size_t pack(const world *w, int which, int64_t tokens, void *packed, bool back)
{
    const layer *l = &w->layer[which];
    quern_dsv4_layer_pack_params p = QUERN_DSV4_LAYER_PACK_PARAMS_INIT;
    quern_dsv4_layer_pack_tensors t = QUERN_DSV4_LAYER_PACK_TENSORS_INIT;
    quern_step step = QUERN_STEP_INIT;
    const quern_tensor **const fields[AREAS] = {&t.raw,    &t.entries,        &t.keys,          &t.states,
                                                &t.merged, &t.indexer_states, &t.indexer_merged};
    assert_int_equal(quern_ledger_step(w->ledger, 1, w->block, QUERN_CPU, 0, &step), QUERN_OK);
    const int64_t one = 1, columns = step.tables[QUERN_DSV4_ENTRIES].shape[1], ring = l->area[0].shape[1],
                  rows = tokens < ring ? tokens : ring, entries = tokens / shape.ratio;
    int64_t bytes = rows * shape.dim * (int64_t)sizeof(element);
    for (int i = 0; i < AREAS; i++) {
        if (l->area[i].ndim == 0) continue;
        *fields[i] = &l->area[i];
        if (i == 1 || i == 2) bytes += entries * l->area[i].shape[2] * (int64_t)sizeof(element);
        if (i > 2) bytes += 4 * (l->area[i].ndim == 2 ? l->area[i].shape[1] : 1);
    }
    const quern_tensor raw_table = quern_tensor_contiguous(step.tables[0].data, QUERN_I32, 1, &one),
                       table = quern_tensor_contiguous(step.tables[1].data, QUERN_I32, 1, &columns),
                       slot = quern_tensor_contiguous(step.slots.data, QUERN_I32, 1, &one),
                       to = quern_tensor_contiguous(packed, QUERN_U8, 1, &bytes);
    p.tokens = tokens, p.ratio = shape.ratio;
    t.raw_table = &raw_table, t.packed = &to;
    if (l->area[1].ndim > 0) t.entries_table = &table, t.slot = &slot;
    const quern_status status =
        (back ? quern_dsv4_layer_unpack : quern_dsv4_layer_pack)(w->ctx, NULL, &p, &t, NULL, 0);
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(w->ctx));
    return (size_t)bytes;
}

/* Saves a sequence and restores it as another. */
static void move(world *w, int32_t from, int32_t to)
{
    static char packed[LAYERS][1 << 16];
    const int64_t none = 0, tokens = w->length[from];
    if (tokens == 0) return;
    assert_int_equal(quern_ledger_newest(w->ledger, &from, &none, 1, w->block, w->block_bytes), QUERN_OK);
    for (int i = 0; i < LAYERS; i++) assert_true(pack(w, i, tokens, packed[i], false) <= sizeof packed[i]);
    assert_int_equal(quern_ledger_reset(w->ledger, to), QUERN_OK);
    assert_int_equal(quern_ledger_begin(w->ledger, &to, &tokens, 1, w->block, w->block_bytes), QUERN_OK);
    for (int i = 0; i < LAYERS; i++) (void)pack(w, i, tokens, packed[i], true);
    assert_int_equal(quern_ledger_commit(w->ledger), QUERN_OK);
    memcpy(w->x[to], w->x[from], sizeof w->x[from]);
    w->length[to] = tokens;
    w->held[to] = w->held[from];
}

static void steps_are_whole_sequences(void **state)
{
    const uint64_t seed = test_seed("steps_are_whole_sequences", 44);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        world w = world_make(&random, (oracle_layer_kind)(trial % 3), test_random_int(&random, 0, 8), false);
        for (int i = 0; i < 24; i++) {
            const int64_t s = test_random_int(&random, 0, SEQUENCES - 1), to = (s + 1) % SEQUENCES;
            int64_t held;
            assert_int_equal(quern_ledger_length(w.ledger, s, NULL, &held), QUERN_OK);
            switch (test_random_int(&random, 0, 7)) {
            case 0:
                assert_int_equal(quern_ledger_fork(w.ledger, s, to), QUERN_OK);
                memcpy(w.x[to], w.x[s], sizeof w.x[s]);
                w.length[to] = w.length[s];
                w.held[to] = w.held[s];
                break;
            case 1: {
                const int64_t n = test_random_int(&random, 0, held < w.held[s] ? held : w.held[s]);
                assert_int_equal(quern_ledger_rollback(w.ledger, s, n), QUERN_OK);
                w.length[s] -= n;
                w.held[s] -= n;
                break;
            }
            case 3: move(&w, (int32_t)s, (int32_t)to); break;
            case 2:
                if (!test_random_one_in(&random, 4)) break;
                assert_int_equal(quern_ledger_reset(w.ledger, s), QUERN_OK);
                w.length[s] = w.held[s] = 0;
                break;
            default: take_step(&w, &random);
            }
        }
        world_free(&w);
    }
}

/* The middle one of three sequences is at fault: the others are whole sequences' rows to the bit. It takes
 * the bit, its rows are 0, here and in the next step, until it begins anew. */
static void faults_stop_one_sequence(void **state)
{
    static const char *const faults[] = {"a position behind the ring", "a page", "a NaN"};
    static batch b;
    (void)state;
    for (int trial = 0; trial < 27; trial++) {
        const oracle_layer_kind kind = (oracle_layer_kind)(trial % 3);
        const int fault = trial / 3 % 3;
        test_random random = {(uint64_t)trial + 1};
        if (kind != ORACLE_CSA && fault == 2) continue; /* rows of a format alone are refused */
        world w = world_make(&random, kind, 2, fault == 2);
        const int32_t bit = fault == 0   ? QUERN_STATUS_BAD_POSITION
                            : fault == 1 ? QUERN_STATUS_BAD_PAGE
                                         : QUERN_STATUS_NOT_FINITE;
        w.faults = true;
        for (int pass = 0; pass < 4; pass++) { /* good; the fault; passed over; anew */
            quern_step step = QUERN_STEP_INIT;
            const bool stopped = pass == 1 || pass == 2;
            b.size = SEQUENCES, b.tokens = 0;
            if (pass == 3) assert_int_equal(quern_ledger_reset(w.ledger, 1), QUERN_OK), w.length[1] = 0;
            for (int i = 0; i < SEQUENCES; i++) {
                b.ids[i] = i;
                b.tokens += b.counts[i] = pass == 0 ? 7 + i : 4;
            }
            batch_fill(&b, &random);
            if (pass == 1 && fault == 2) b.x[(4 + 1) * WIDTH] = element_of(NAN);
            begin(&w, &b);
            assert_int_equal(quern_ledger_step(w.ledger, SEQUENCES, w.block, QUERN_CPU, 0, &step), QUERN_OK);
            int32_t *numbers[] = {(int32_t *)step.positions.data + 1,
                                  (int32_t *)step.tables[QUERN_DSV4_RAW].data + 1};
            const int32_t slot = ((const int32_t *)step.slots.data)[1];
            if (pass == 1 && fault < 2) *numbers[fault] = 1000;
            static element out[ROOM * WIDTH], kv[ROOM * 16];
            for (int i = 0; i < LAYERS; i++) {
                memset(w.fault, 0, sizeof w.fault); /* each layer has words of its own */
                if (pass == 2) w.fault[slot] = bit;
                if (run(&w, i, b.size, b.x, out, kv) != QUERN_OK)
                    fail_msg("%s: %s", faults[fault], quern_last_error(w.ctx));
                for (int s = 0; s < 8; s++) assert_int_equal(w.fault[s], s == slot && stopped ? bit : 0);
                if (fault == 2) { /* keys are rounded: the model is another */
                    for (int64_t k = 4 * WIDTH; stopped && k < 8 * WIDTH; k++) assert_true(out[k] == 0);
                    for (int64_t k = 0; k < b.tokens * WIDTH; k++) assert_true(isfinite(value_of(out[k])));
                    continue;
                }
                check(&w, i, &b, out, stopped ? 1 : -1);
            }
            take(&w, &b);
            assert_int_equal(quern_ledger_commit(w.ledger), QUERN_OK);
        }
        world_free(&w);
    }
}

/* With bytes the others have the bits that they have beside a sequence without a fault. */
static void a_row_that_is_refused_stops_its_sequence(void **state)
{
    static batch b;
    static element out[2][ROOM * WIDTH], kv[ROOM * 16];
    (void)state;
    test_random random = {8};
    world w[2];
    for (int k = 0; k < 2; k++) {
        test_random same = {3};
        w[k] = world_make(&same, ORACLE_CSA, 2, true);
        w[k].faults = true;
    }
    for (int pass = 0; pass < 3; pass++) {
        b.size = SEQUENCES, b.tokens = 0;
        for (int i = 0; i < SEQUENCES; i++) b.ids[i] = i, b.tokens += b.counts[i] = 4 + i + pass;
        batch_fill(&b, &random);
        for (int k = 0; k < 2; k++) {
            begin(&w[k], &b);
            const element was = b.x[(b.counts[0] + 2) * WIDTH];
            if (k == 1 && pass == 1) b.x[(b.counts[0] + 2) * WIDTH] = element_of(INFINITY);
            assert_int_equal(run(&w[k], 0, b.size, b.x, out[k], kv), QUERN_OK);
            b.x[(b.counts[0] + 2) * WIDTH] = was;
            assert_int_equal(quern_ledger_commit(w[k].ledger), QUERN_OK);
        }
        const int64_t from = b.counts[0] * WIDTH, to = from + b.counts[1] * WIDTH;
        for (int64_t k = 0; k < ROOM * WIDTH; k++)
            assert_true(pass > 0 && k >= from && k < to ? out[1][k] == 0 : out[0][k] == out[1][k]);
    }
    world_free(&w[0]), world_free(&w[1]);
}

#ifndef QUERN_TEST_GPU /* where they are bits */
static void wrong_numbers_are_refused(void **state)
{
    static batch b;
    static element out[ROOM * WIDTH], kv[ROOM * 16];
    (void)state;
    test_random random = {8};
    world w = world_make(&random, ORACLE_CSA, 2, false);
    b.size = 2, b.ids[0] = 1, b.ids[1] = 2, b.counts[0] = 7, b.counts[1] = 5, b.tokens = 12;
    batch_fill(&b, &random);
    begin(&w, &b);
    run_all(&w, &b, -1);
    take(&w, &b);
    assert_int_equal(quern_ledger_commit(w.ledger), QUERN_OK);
    begin(&w, &b);
    quern_step step = QUERN_STEP_INIT;
    assert_int_equal(quern_ledger_step(w.ledger, 2, w.block, QUERN_CPU, 0, &step), QUERN_OK);
    int32_t *slots = step.slots.data, *positions = step.positions.data, *cu = step.cu.data,
            *raw = step.tables[QUERN_DSV4_RAW].data, *entries = step.tables[QUERN_DSV4_ENTRIES].data;
    const struct {
        int32_t *number, value;
        const char *sentence;
    } wrong[] = {{&slots[0], -2, "slots[0] is -2: -1 to"},
                 {&slots[1], 8, "slots[1] is 8: -1 to"},
                 {&slots[1], slots[0], "slots[1] is"},
                 {&positions[0], -1, "positions[0] is -1: 0 to"},
                 {&positions[0], 4, "positions[0] is 4: 5 to 7 is accepted"},
                 {&positions[0], 8, "positions[0] is 8: 5 to 7 is accepted"},
                 {&positions[1], CAPACITY, "positions[1] is 40: 0 to 3"},
                 {&cu[1], 40, "cu[1] is 40: at most the 39 rows are accepted"},
                 {&cu[2], 3, "cu[2] is 3 after 7: it may not fall"},
                 {&raw[1], -1, "raw_table[1, 0] is -1: 0 to"},
                 {&entries[0], 100, "entries_table[0, 0] is 100: 0 to"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int32_t was = *wrong[i].number;
        *wrong[i].number = wrong[i].value;
        memset(out, 0x77, sizeof out);
        assert_int_equal(run(&w, 0, b.size, b.x, out, kv), QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(w.ctx), wrong[i].sentence) == NULL)
            fail_msg("\"%s\" lacks \"%s\"", quern_last_error(w.ctx), wrong[i].sentence);
        *wrong[i].number = was;
        for (size_t k = 0; k < sizeof out; k++) assert_int_equal(((unsigned char *)out)[k], 0x77);
    }
    run_all(&w, &b, -1); /* as if nothing had been refused */
    assert_int_equal(quern_ledger_commit(w.ledger), QUERN_OK);
    world_free(&w);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_are_whole_sequences),
#ifndef QUERN_TEST_GPU
                                       cmocka_unit_test(wrong_numbers_are_refused),
#endif
                                       cmocka_unit_test(faults_stop_one_sequence),
                                       cmocka_unit_test(a_row_that_is_refused_stops_its_sequence)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
