/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_steps_test.c - a step of V4's layer that is captured once and replayed for every token of sequences
 * that end their blocks at different tokens; rows of the batch are now and then of no sequence, a fork makes
 * steps copy pages and states. The graph's results have the bits of calls that are made anew for every step,
 * and are the CPU's but for roundings while all entries are chosen. Bad numbers of one sequence set its bit,
 * give it rows of 0 and change no other's bits.
 */
#include "cmocka_c11.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/cuda.h>
#include <quern/dsv4_layer.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)
#define CUDA(call) assert_int_equal(call, cudaSuccess)
#define FIELD(name) ((int)(offsetof(quern_dsv4_layer_step_tensors, name) / sizeof(void *)) - 1)

enum {
    SEQUENCES = 4,
    BATCH = 3,
    ROWS = 12, /* of the calls */
    CAPACITY = 200,
    TOKENS = 60,
    RING = 2,
    FIELDS = sizeof(quern_dsv4_layer_step_tensors) / sizeof(void *) - 1,
    SIDES = 3 /* the CPU, calls that are made anew, the graph */
};

typedef struct dims {
    quern_dsv4_layer_kind kind;
    int64_t width, lora, heads, dim, groups, o_lora, rope, window, ratio, index_heads, index_dim, top_k, page;
    quern_dsv4_format format, key_format;
} dims;

/* The call's tensors in the memory of one device, by their fields; the others stand in the block. */
typedef struct side {
    quern_device device;
    quern_tensor t[FIELDS];
    bool own[FIELDS];
    void *block, *workspace;
    size_t bytes;
} side;

typedef struct world {
    dims d;
    quern_dsv4_layer_step_params params;
    quern_ledger *ledger;
    void *memory, *block;
    size_t block_bytes;
    side side[SIDES];
    int64_t pages[2], slots, raw;
    uint32_t seed;
} world;

static quern_context *ctx;
static void *stream;

static double random_of(world *w) /* sums of uniform numbers, of variance 1 */
{
    double sum = 0;
    for (int i = 0; i < 3; i++) {
        w->seed = w->seed * 1664525u + 1013904223u;
        sum += (double)(w->seed >> 8) / 8388608.0 - 1.0;
    }
    return sum;
}

static uint16_t bf16_of(double x)
{
    const float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float value_of(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static size_t bytes_of(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

static void copy(const side *s, void *to, const void *from, size_t bytes)
{
    if (s->device != QUERN_CUDA) {
        memcpy(to, from, bytes);
        return;
    }
    OK(quern_cuda_copy(0, to, from, bytes, stream));
    OK(quern_cuda_synchronize(0, stream));
}

static void *memory_of(const side *s, size_t bytes)
{
    void *p = NULL;
    if (s->device == QUERN_CUDA) OK(quern_cuda_allocate(0, bytes, &p));
    else p = malloc(bytes + 1);
    assert_non_null(p);
    return p;
}

/* A field on all sides, of these bytes. */
static void put(world *w, int f, quern_dtype dtype, int64_t a, int64_t b, int64_t c, const void *bytes)
{
    const int64_t extents[] = {a, b, c};
    for (int i = 0; i < SIDES; i++) {
        side *s = &w->side[i];
        s->t[f] = quern_tensor_contiguous(NULL, dtype, b == 0 ? 1 : c == 0 ? 2 : 3, extents);
        s->t[f].data = memory_of(s, bytes_of(&s->t[f]));
        s->t[f].device = s->device;
        s->own[f] = true;
        copy(s, s->t[f].data, bytes, bytes_of(&s->t[f]));
    }
}

static void put_filled(world *w, int f, quern_dtype dtype, int64_t a, int64_t b, int64_t c, int byte)
{
    const size_t n = (size_t)(a * (b > 0 ? b : 1) * (c > 0 ? c : 1)) * quern_dtype_size(dtype);
    void *filled = malloc(n + 1);
    memset(filled, byte, n + 1);
    put(w, f, dtype, a, b, c, filled);
    free(filled);
}

/* A weight [a, b] in bf16, of variance 1 / b; a vector is one row of variance 1. */
static void put_weight(world *w, int f, int64_t a, int64_t b)
{
    const int64_t n = a * (b > 0 ? b : 1);
    uint16_t *x = malloc((size_t)n * sizeof *x + 1);
    for (int64_t i = 0; i < n; i++) x[i] = bf16_of(random_of(w) / (b > 0 ? sqrt((double)b) : 1));
    put(w, f, QUERN_BF16, a, b, 0, x);
    free(x);
}

static void put_weights(world *w)
{
    const dims *d = &w->d;
    const int64_t hd = d->heads * d->dim, go = d->groups * d->o_lora;
    const bool csa = d->kind == QUERN_DSV4_LAYER_CSA;
    float *table = malloc((size_t)(CAPACITY * d->rope) * sizeof *table);
    for (int64_t i = 0; i < CAPACITY * d->rope / 2; i++) {
        const int64_t t = i / (d->rope / 2), m = i % (d->rope / 2);
        const double angle = (double)t * pow(1000, -2.0 * (double)m / (double)d->rope);
        table[t * d->rope + m] = (float)cos(angle);
        table[t * d->rope + d->rope / 2 + m] = (float)sin(angle);
    }
    put(w, FIELD(cos_sin), QUERN_F32, CAPACITY, d->rope, 0, table);
    free(table);
    put_weight(w, FIELD(sinks), d->heads, 0);
    put_weight(w, FIELD(q_a), d->lora, d->width), put_weight(w, FIELD(q_a_norm), d->lora, 0);
    put_weight(w, FIELD(q_b), hd, d->lora);
    put_weight(w, FIELD(kv), d->dim, d->width), put_weight(w, FIELD(kv_norm), d->dim, 0);
    put_weight(w, FIELD(o_a), go, hd / d->groups), put_weight(w, FIELD(o_b), d->width, go);
    if (d->kind == QUERN_DSV4_LAYER_SWA) return;
    const int64_t series = csa ? 2 : 1;
    put_weight(w, FIELD(compressor_bias), d->ratio, series * d->dim);
    put_weight(w, FIELD(compressor_kv), series * d->dim, d->width);
    put_weight(w, FIELD(compressor_gate), series * d->dim, d->width);
    put_weight(w, FIELD(compressor_norm), d->dim, 0);
    if (!csa) return;
    put_weight(w, FIELD(indexer_bias), d->ratio, 2 * d->index_dim);
    put_weight(w, FIELD(indexer_kv), 2 * d->index_dim, d->width);
    put_weight(w, FIELD(indexer_gate), 2 * d->index_dim, d->width);
    put_weight(w, FIELD(indexer_norm), d->index_dim, 0);
    put_weight(w, FIELD(indexer_q_b), d->index_heads * d->index_dim, d->lora);
    put_weight(w, FIELD(indexer_heads), d->index_heads, d->width);
}

/* Pools, states and results; what nothing has been written to is NaN. */
static void put_state(world *w)
{
    const dims *d = &w->d;
    const bool csa = d->kind == QUERN_DSV4_LAYER_CSA, bytes = d->format == QUERN_DSV4_ROW584;
    const int64_t floats = (csa ? 6 : 3) + RING * (csa ? 4 : 2), row = bytes ? 584 : d->dim;
    const quern_dtype dtype = bytes ? QUERN_U8 : QUERN_BF16;
    put_filled(w, FIELD(x), QUERN_BF16, ROWS, d->width, 0, 0);
    put_filled(w, FIELD(out), QUERN_BF16, ROWS, d->width, 0, 0xff);
    put_filled(w, FIELD(kv_rows), QUERN_BF16, ROWS, d->dim, 0, 0xff);
    put_filled(w, FIELD(raw), dtype, w->pages[0], w->raw, row, 0xff);
    put_filled(w, FIELD(fault), QUERN_I32, w->slots > 0 ? w->slots : SEQUENCES, 0, 0, 0);
    if (w->slots == 0) return;
    if (bytes) put_filled(w, FIELD(entries), dtype, w->pages[1], d->page * row, 0, 0xff);
    else put_filled(w, FIELD(entries), dtype, w->pages[1], d->page, row, 0xff);
    put_filled(w, FIELD(states), QUERN_F32, w->slots, floats * d->dim, 0, 0xff);
    put_filled(w, FIELD(merged), QUERN_I32, w->slots, 0, 0, 0xff);
    if (!csa) return;
    if (d->key_format == QUERN_DSV4_FP8)
        put_filled(w, FIELD(keys), QUERN_U8, w->pages[1], d->page * (d->index_dim + 4), 0, 0xff);
    else put_filled(w, FIELD(keys), QUERN_BF16, w->pages[1], d->page, d->index_dim, 0xff);
    put_filled(w, FIELD(idx_topk), QUERN_I32, ROWS, d->top_k, 0, 0xff);
    put_filled(w, FIELD(indexer_states), QUERN_F32, w->slots, floats * d->index_dim, 0, 0xff);
    put_filled(w, FIELD(indexer_merged), QUERN_I32, w->slots, 0, 0, 0xff);
}

static quern_status run(const world *w, const side *s, bool workspace, size_t *bytes)
{
    const quern_exec exec = {sizeof exec, s->device == QUERN_CUDA ? stream : NULL, NULL};
    quern_dsv4_layer_step_tensors t = QUERN_DSV4_LAYER_STEP_TENSORS_INIT;
    const quern_tensor *fields[FIELDS];
    quern_step step = QUERN_STEP_INIT;
    OK(quern_ledger_step(w->ledger, BATCH, s->block, s->device, 0, &step));
    for (int f = 0; f < FIELDS; f++) fields[f] = s->own[f] ? &s->t[f] : NULL;
    memcpy((char *)&t + sizeof t.size, fields, sizeof fields);
    t.slots = &step.slots, t.positions = &step.positions, t.cu = &step.cu, t.copies = &step.copies;
    t.raw_table = &step.tables[QUERN_DSV4_RAW];
    if (s->own[FIELD(entries)]) t.entries_table = &step.tables[QUERN_DSV4_ENTRIES];
    return workspace ? quern_dsv4_layer_step_workspace(ctx, &w->params, &t, bytes)
                     : quern_dsv4_layer_step(ctx, &exec, &w->params, &t, s->workspace, s->bytes);
}

static world world_make(const dims *d, uint32_t seed)
{
    world w = {.d = *d, .params = QUERN_DSV4_LAYER_STEP_PARAMS_INIT, .seed = seed};
    quern_dsv4_layer_cache_params sizes = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_ledger_params p = QUERN_LEDGER_PARAMS_INIT;
    size_t bytes;
    w.params.kind = sizes.kind = d->kind;
    w.params.window = sizes.window = d->window;
    w.params.top_k = d->top_k;
    w.params.format = sizes.format = d->format;
    w.params.key_format = sizes.key_format = d->key_format;
    sizes.dtype = QUERN_BF16;
    sizes.sequences = SEQUENCES, sizes.capacity = CAPACITY, sizes.dim = d->dim, sizes.ratio = d->ratio;
    sizes.index_dim = d->index_dim, sizes.ring = RING;
    sizes.page = d->kind != QUERN_DSV4_LAYER_SWA ? d->page : 0;
    OK(quern_dsv4_layer_ledger_params(&sizes, &p));
    OK(quern_ledger_size(&p, &bytes));
    w.memory = malloc(bytes);
    OK(quern_ledger_create(&p, w.memory, bytes, &w.ledger));
    OK(quern_ledger_block_bytes(w.ledger, BATCH, &w.block_bytes));
    w.block = malloc(w.block_bytes);
    w.raw = p.pools[QUERN_DSV4_RAW].page;
    for (int i = 0; i < 2; i++) OK(quern_ledger_pages(&p, i, 0, NULL, &w.pages[i]));
    OK(quern_ledger_pages(&p, QUERN_LEDGER_STATES, 0, NULL, &w.slots));
    for (int i = 0; i < SIDES; i++) w.side[i].device = i > 0 ? QUERN_CUDA : QUERN_CPU;
    put_weights(&w);
    put_state(&w);
    for (int i = 0; i < SIDES; i++) {
        side *s = &w.side[i];
        s->block = memory_of(s, w.block_bytes);
        OK(run(&w, s, true, &s->bytes));
        s->workspace = memory_of(s, s->bytes);
        if (s->device == QUERN_CUDA) OK(quern_cuda_fill(0, s->workspace, 0xff, s->bytes, stream));
    }
    return w;
}

static void world_free(world *w)
{
    for (int i = 0; i < SIDES; i++) {
        side *s = &w->side[i];
        for (int f = 0; f < FIELDS; f++) {
            if (!s->own[f]) continue;
            if (s->device == QUERN_CUDA) OK(quern_cuda_free(0, s->t[f].data));
            else free(s->t[f].data);
        }
        if (s->device == QUERN_CUDA) {
            OK(quern_cuda_free(0, s->block));
            OK(quern_cuda_free(0, s->workspace));
        } else free(s->block), free(s->workspace);
    }
    free(w->memory), free(w->block);
}

/* New rows and the step's block on all sides. */
static void feed(world *w)
{
    const size_t n = (size_t)(ROWS * w->d.width);
    uint16_t *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = bf16_of(random_of(w));
    for (int i = 0; i < SIDES; i++) {
        copy(&w->side[i], w->side[i].t[FIELD(x)].data, x, n * sizeof *x);
        copy(&w->side[i], w->side[i].block, w->block, w->block_bytes);
    }
    free(x);
}

static void *fetch(const side *s, int f)
{
    void *bytes = malloc(bytes_of(&s->t[f]));
    copy(s, bytes, s->t[f].data, bytes_of(&s->t[f]));
    return bytes;
}

static void same(const world *w, int f, int step)
{
    if (!w->side[1].own[f]) return;
    void *a = fetch(&w->side[1], f), *b = fetch(&w->side[2], f);
    if (memcmp(a, b, bytes_of(&w->side[1].t[f])) != 0) fail_msg("step %d: field %d differs", step, f);
    free(a), free(b);
}

/* Rows of the device beside the CPU's. */
static void close_rows(const world *w, int f, int step, double bound)
{
    const size_t n = bytes_of(&w->side[0].t[f]) / sizeof(uint16_t);
    uint16_t *got = fetch(&w->side[2], f);
    const uint16_t *want = w->side[0].t[f].data;
    double error = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        const double x = value_of(want[i]), off = value_of(got[i]) - x;
        error += off * off, size += x * x;
    }
    if (!(error <= bound * bound * size)) /* NaN, too */
        fail_msg("step %d: field %d differs from the CPU's by %g of its size", step, f, sqrt(error / size));
    free(got);
}

static cudaGraphExec_t capture(const world *w)
{
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    size_t nodes;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(run(w, &w->side[2], false, NULL));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphGetNodes(graph, NULL, &nodes));
    printf("%d nodes a step\n", (int)nodes);
    CUDA(cudaGraphInstantiate(&replay, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return replay;
}

#define WIDE_LAYER .width = 128, .lora = 64, .heads = 16, .dim = 512, .groups = 2, .o_lora = 32, .rope = 64
static const dims layers[] = {
    {QUERN_DSV4_LAYER_CSA, 24, 16, 4, 16, 2, 8, 4, 5, 3, 4, 32, 70, 4, QUERN_DSV4_ROWS, QUERN_DSV4_FP8},
    {QUERN_DSV4_LAYER_HCA, 24, 16, 4, 16, 2, 8, 4, 5, 3, 0, 0, 0, 4, QUERN_DSV4_ROWS, QUERN_DSV4_ROWS},
    {QUERN_DSV4_LAYER_SWA, 24, 16, 4, 16, 2, 8, 4, 5, 1, 0, 0, 0, 4, QUERN_DSV4_ROWS, QUERN_DSV4_ROWS},
    {.kind = QUERN_DSV4_LAYER_CSA,
     WIDE_LAYER,
     .window = 9,
     .ratio = 4,
     .index_heads = 64,
     .index_dim = 128,
     .top_k = 64,
     .page = 4,
     .format = QUERN_DSV4_ROW584,
     .key_format = QUERN_DSV4_FP8},
    {.kind = QUERN_DSV4_LAYER_CSA,
     WIDE_LAYER,
     .window = 9,
     .ratio = 4,
     .index_heads = 64,
     .index_dim = 128,
     .top_k = 8,
     .page = 64},
    {.kind = QUERN_DSV4_LAYER_HCA,
     WIDE_LAYER,
     .window = 20,
     .ratio = 16,
     .page = 4,
     .format = QUERN_DSV4_ROW584}};
enum { LAYERS = sizeof layers / sizeof *layers };

static void one_graph_serves_all_tokens(void **state)
{
    static const int results[] = {FIELD(out), FIELD(kv_rows), FIELD(idx_topk), FIELD(fault)},
                     kept[] = {FIELD(raw),    FIELD(entries),        FIELD(keys),          FIELD(states),
                               FIELD(merged), FIELD(indexer_states), FIELD(indexer_merged)};
    (void)state;
    for (int n = 0; n < LAYERS; n++) {
        world w = world_make(&layers[n], 5u + (uint32_t)n);
        int32_t ids[BATCH] = {0, 1, 2};
        int64_t counts[BATCH] = {2, 3, 4};
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        feed(&w);
        cudaGraphExec_t replay = capture(&w);
        for (int step = 0; step < TOKENS; step++) {
            feed(&w);
            OK(run(&w, &w.side[0], false, NULL));
            OK(run(&w, &w.side[1], false, NULL));
            CUDA(cudaGraphLaunch(replay, stream));
            OK(quern_cuda_synchronize(0, stream));
            for (size_t i = 0; i < sizeof results / sizeof *results; i++) same(&w, results[i], step);
            for (size_t i = 0; i < sizeof kept / sizeof *kept && step % 20 == 19; i++)
                same(&w, kept[i], step);
            /* Both choose all entries; rows of bytes may be rounded to other codes. */
            close_rows(&w, FIELD(kv_rows), step, 0.01);
            if (w.d.kind != QUERN_DSV4_LAYER_CSA || w.d.top_k > TOKENS / w.d.ratio)
                close_rows(&w, FIELD(out), step, w.d.format == QUERN_DSV4_ROWS ? 0.02 : 0.05);
            OK(quern_ledger_commit(w.ledger));
            if (step == TOKENS / 2) OK(quern_ledger_fork(w.ledger, 0, 3));
            for (int b = 0; b < BATCH; b++) {
                const bool none = (step * 7 + b * 5) % 11 == 0;
                ids[b] = none ? -1 : b == 2 && step >= TOKENS / 2 ? 3 : b;
                counts[b] = none ? 0 : step % 9 == 4 ? 3 : 1;
            }
            OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        }
        OK(quern_ledger_abort(w.ledger));
        CUDA(cudaGraphExecDestroy(replay));
        world_free(&w);
    }
}

/* Side 2 gets numbers that no ledger writes; side 1 does not. */
static void bad_numbers_stop_one_sequence(void **state)
{
    static const int32_t bad[] = {INT32_MIN, -1, INT32_MAX, 1 << 20};
    (void)state;
    for (int n = 0; n < 4 * 4 * 4; n++) {
        world w = world_make(&layers[n % 4], 50u + (uint32_t)n);
        const int32_t ids[] = {0, 1, 2};
        const int64_t counts[] = {4, 5, 3};
        quern_step step = QUERN_STEP_INIT;
        OK(quern_ledger_step(w.ledger, BATCH, w.block, QUERN_CPU, 0, &step));
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        feed(&w);
        for (int i = 1; i < SIDES; i++) OK(run(&w, &w.side[i], false, NULL));
        OK(quern_ledger_commit(w.ledger));
        OK(quern_ledger_begin(w.ledger, ids, counts, BATCH, w.block, w.block_bytes));
        const bool entries = w.d.kind != QUERN_DSV4_LAYER_SWA;
        int32_t *const numbers[] = {(int32_t *)step.positions.data + 1,
                                    (int32_t *)step.tables[QUERN_DSV4_RAW].data + 1,
                                    entries ? (int32_t *)step.tables[QUERN_DSV4_ENTRIES].data +
                                                  step.tables[QUERN_DSV4_ENTRIES].shape[1]
                                            : (int32_t *)step.positions.data + 1};
        feed(&w);
        const bool infinite = n / 4 % 4 == 3; /* a row that the format refuses, in place of a number */
        if (infinite && w.d.format == QUERN_DSV4_ROWS) {
            world_free(&w);
            continue;
        }
        if (!infinite) *numbers[n / 4 % 4] = bad[n / 16];
        copy(&w.side[2], w.side[2].block, w.block, w.block_bytes);
        if (infinite) {
            uint16_t inf = bf16_of(INFINITY);
            copy(&w.side[2], (uint16_t *)w.side[2].t[FIELD(x)].data + (4 + n / 16) * w.d.width, &inf,
                 sizeof inf);
        }
        for (int i = 1; i < SIDES; i++) OK(run(&w, &w.side[i], false, NULL));
        uint16_t *good = fetch(&w.side[1], FIELD(out)), *got = fetch(&w.side[2], FIELD(out));
        int32_t *fault = fetch(&w.side[2], FIELD(fault));
        for (int64_t i = 0; i < ROWS * w.d.width; i++) {
            const bool own = i >= counts[0] * w.d.width && i < (counts[0] + counts[1]) * w.d.width;
            if (own ? got[i] != 0 : good[i] != got[i])
                fail_msg("case %d: element %lld is %g and %g", n, (long long)i, (double)value_of(good[i]),
                         (double)value_of(got[i]));
        }
        const int32_t slot = ((const int32_t *)step.slots.data)[1];
        for (int64_t i = 0; i < w.side[2].t[FIELD(fault)].shape[0]; i++)
            assert_int_equal(fault[i] != 0, i == slot);
        free(good), free(got), free(fault);
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_graph_serves_all_tokens),
                                       cmocka_unit_test(bad_numbers_stop_one_sequence)};
    if (quern_context_create(NULL, &ctx) != QUERN_OK || quern_cuda_stream_create(0, &stream) != QUERN_OK)
        return 1;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    quern_context_destroy(ctx);
    return failed;
}
