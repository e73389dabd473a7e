/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_append_step_test.c - states in slots of a tensor, of the main compressor and of the indexer's.
 * Whatever steps, forks, roll-backs and aborts a ledger's sequences go through, their entries are those of
 * one call over the whole sequence, to the bit, in rows or in pages; rows behind the entries are 0, and no
 * other byte of pages changes; a step of up to m tokens may run twice. Numbers that are wrong are refused
 * and change nothing.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "random.h"

#include <quern/cuda.h>
#include <quern/dsv4.h>
#include <quern/ledger.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEQUENCES = 4,
    CAPACITY = 60,
    BANK = 40,
    WIDTH = 32,
    ROPE = 8,
    MOST = 24,
    OUT_BYTES = 4 * WIDTH,
    COLUMNS = 61, /* of a table: pages of one slot hold the entries of CAPACITY tokens */
    GAP = 24,     /* elements between pages */
    PARTS = 2
};

/* A compressor: its weights, projections, states and, in pages, its entries. */
typedef struct part {
    quern_dsv4_format format;
    quern_tensor bias[2], norm;
    float *bank, *states; /* [BANK, columns], [slots, floats] */
    int32_t *merged;
    int64_t row_bytes, data_bytes; /* of a stored row */
    int64_t page;                  /* slots; 0: rows */
    quern_tensor pool, table;      /* table: of all sequences */
    unsigned char *pages;          /* what the pool is to hold */
    size_t pool_bytes;
} part;

typedef struct world {
    quern_dsv4_compress_params params;
    quern_ledger_params books;
    quern_ledger *ledger;
    int64_t columns, ring, slots, floats;
    int parts;
    part part[PARTS];
    quern_tensor cos_sin;
    int32_t token[SEQUENCES][CAPACITY];
    int32_t fault[8]; /* [slots] */
    bool faults;      /* the call has them */
    int64_t length[SEQUENCES];
    void *memory, *block;
    size_t block_bytes;
} world;

static quern_tensor normal(test_random *random, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns}, n = rows > 0 ? rows * columns : columns;
    float *data = malloc((size_t)n * sizeof *data);
    for (int64_t i = 0; i < n; i++) data[i] = (float)test_random_normal(random);
    return quern_tensor_contiguous(data, QUERN_F32, rows > 0 ? 2 : 1, rows > 0 ? shape : shape + 1);
}

/* Pages of any slots and a stride of its own; the sequences' pages are mixed. */
static void part_take_pages(part *p, test_random *random)
{
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    const int64_t pages = SEQUENCES * COLUMNS, columns[] = {SEQUENCES, COLUMNS};
    p->page = test_random_int(random, 1, 5);
    const int64_t of_bytes[] = {pages, p->page * p->row_bytes}, of_rows[] = {pages, p->page, WIDTH};
    p->pool = quern_tensor_contiguous(NULL, bytes ? QUERN_U8 : QUERN_F32, bytes ? 2 : 3,
                                      bytes ? of_bytes : of_rows);
    p->pool.strides[0] += GAP;
    p->pool_bytes = (size_t)(pages * p->pool.strides[0]) * quern_dtype_size(p->pool.dtype);
    p->pool.data = malloc(p->pool_bytes);
    p->pages = malloc(p->pool_bytes);
    memset(p->pool.data, 0x3c, p->pool_bytes);
    memset(p->pages, 0x3c, p->pool_bytes);
    int32_t *table = malloc((size_t)pages * sizeof *table);
    for (int32_t i = 0; i < pages; i++) table[i] = (int32_t)((i * 7 + 3) % pages);
    p->table = quern_tensor_contiguous(table, QUERN_I32, 2, columns);
}

static part part_make(const world *w, test_random *random)
{
    static const quern_dsv4_format formats[] = {QUERN_DSV4_ROWS, QUERN_DSV4_FP8_POWER, QUERN_DSV4_FP4};
    static const int64_t row_bytes[] = {OUT_BYTES, WIDTH + 4, WIDTH / 2 + WIDTH / 32},
                         data_bytes[] = {OUT_BYTES, WIDTH, WIDTH / 2};
    const int f = (int)test_random_int(random, 0, 2);
    part p = {.format = formats[f], .row_bytes = row_bytes[f], .data_bytes = data_bytes[f]};
    p.bank = normal(random, BANK, w->columns).data;
    p.states = malloc((size_t)(w->slots * w->floats) * sizeof *p.states);
    memset(p.states, 0xff,
           (size_t)(w->slots * w->floats) * sizeof *p.states); /* NaN: nothing needs clearing */
    p.merged = malloc((size_t)w->slots * sizeof *p.merged);
    memset(p.merged, 0x5a, (size_t)w->slots * sizeof *p.merged);
    for (int i = 0; i < 2; i++) p.bias[i] = normal(random, w->params.ratio, WIDTH);
    p.norm = normal(random, 0, WIDTH);
    if (test_random_one_in(random, 2)) part_take_pages(&p, random);
    return p;
}

static world world_make(test_random *random)
{
    world w = {.params = QUERN_DSV4_COMPRESS_PARAMS_INIT, .books = QUERN_LEDGER_PARAMS_INIT};
    const bool csa = test_random_one_in(random, 2);
    size_t bytes;
    w.params.kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    w.params.ratio = test_random_int(random, 1, 7);
    w.params.rope_last = test_random_one_in(random, 2);
    w.params.index_hadamard = test_random_one_in(random, 2);
    w.ring = test_random_int(random, 0, 8);
    w.columns = (csa ? 4 : 2) * WIDTH;
    w.floats = (csa ? 6 : 3) * WIDTH + w.ring * w.columns;
    w.books.sequences = SEQUENCES;
    w.books.capacity = CAPACITY;
    w.books.rollback = w.ring;
    w.books.states = true;
    assert_int_equal(quern_ledger_size(&w.books, &bytes), QUERN_OK);
    w.memory = malloc(bytes);
    assert_int_equal(quern_ledger_create(&w.books, w.memory, bytes, &w.ledger), QUERN_OK);
    assert_int_equal(quern_ledger_pages(&w.books, QUERN_LEDGER_STATES, 0, NULL, &w.slots), QUERN_OK);
    assert_int_equal(quern_ledger_block_bytes(w.ledger, SEQUENCES, &w.block_bytes), QUERN_OK);
    w.block = malloc(w.block_bytes);
    assert_true(w.slots <= (int64_t)(sizeof w.fault / sizeof *w.fault));
    w.parts = csa && test_random_one_in(random, 2) ? 2 : 1;
    for (int i = 0; i < w.parts; i++) w.part[i] = part_make(&w, random);
    w.params.format = w.part[0].format;
    if (w.parts > 1) w.params.index_format = w.part[1].format;
    w.cos_sin = normal(random, CAPACITY + 8, ROPE);
    return w;
}

static void world_free(world *w)
{
    void *const all[] = {w->memory, w->block, w->cos_sin.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    for (int i = 0; i < w->parts; i++) {
        const part *p = &w->part[i];
        void *const own[] = {p->bank,      p->states,    p->merged,     p->bias[0].data, p->bias[1].data,
                             p->norm.data, p->pool.data, p->table.data, p->pages};
        for (size_t k = 0; k < sizeof own / sizeof *own; k++) free(own[k]);
    }
}

static quern_tensor rows_of(const part *p, int64_t n, void *data)
{
    const bool bytes = p->format != QUERN_DSV4_ROWS;
    const int64_t shape[] = {n, bytes ? p->row_bytes : WIDTH};
    return quern_tensor_contiguous(data, bytes ? QUERN_U8 : QUERN_F32, 2, shape);
}

static quern_tensor projections(const world *w, const part *p, const int32_t *token, int64_t n)
{
    const int64_t shape[] = {n, w->columns};
    float *data = malloc((size_t)(n * w->columns + 1) * sizeof *data);
    for (int64_t i = 0; i < n; i++)
        memcpy(data + i * w->columns, p->bank + token[i] * w->columns, (size_t)w->columns * sizeof *data);
    return quern_tensor_contiguous(data, QUERN_F32, 2, shape);
}

/* Entries of a whole sequence of n tokens. */
static void expect(const world *w, int i, const int32_t *token, int64_t n, unsigned char *rows)
{
    const part *p = &w->part[i];
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    quern_dsv4_compress_params params = w->params;
    const quern_tensor proj = projections(w, p, token, n), out = rows_of(p, n / params.ratio, rows);
    size_t bytes;
    params.format = p->format;
    params.hadamard = i > 0 && w->params.index_hadamard;
    t.proj = &proj;
    t.b_a = &p->bias[0];
    if (params.kind == QUERN_DSV4_CSA) t.b_b = &p->bias[1];
    t.norm_weight = &p->norm;
    t.cos_sin = &w->cos_sin;
    t.out = &out;
    assert_int_equal(quern_dsv4_compress_workspace(ctx, &params, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    assert_int_equal(quern_dsv4_compress(ctx, NULL, &params, &t, workspace, bytes), QUERN_OK);
    free(workspace);
    free(proj.data);
}

/* The rows of the table that a batch's sequences have. */
static quern_tensor table_of(const part *p, const int32_t *ids, int64_t batch)
{
    const int64_t shape[] = {batch, COLUMNS};
    int32_t *rows = malloc(sizeof(int32_t) * SEQUENCES * COLUMNS);
    for (int64_t b = 0; b < batch; b++)
        memcpy(rows + b * COLUMNS, (int32_t *)p->table.data + (ids[b] < 0 ? 0 : ids[b]) * COLUMNS,
               COLUMNS * sizeof *rows);
    return quern_tensor_contiguous(rows, QUERN_I32, 2, shape);
}

/* One operation on the step in the block. rows: of a compressor without pages [T / r + B]. */
static quern_status append(const world *w, const quern_step *step, const int32_t *ids,
                           const quern_tensor *proj, unsigned char *const *rows)
{
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    const int64_t shape[] = {w->slots, w->floats}, batch = step->slots.shape[0];
    const quern_tensor fault = quern_tensor_contiguous((void *)(uintptr_t)w->fault, QUERN_I32, 1, shape);
    quern_tensor out[PARTS], states[PARTS], merged[PARTS], table[PARTS];
    size_t bytes;
    for (int i = 0; i < w->parts; i++) {
        const part *p = &w->part[i];
        out[i] = p->page > 0 ? p->pool : rows_of(p, proj->shape[0] / w->params.ratio + batch, rows[i]);
        states[i] = quern_tensor_contiguous(p->states, QUERN_F32, 2, shape);
        merged[i] = quern_tensor_contiguous(p->merged, QUERN_I32, 1, shape);
        if (p->page > 0) table[i] = table_of(p, ids, batch);
    }
    t.proj = proj;
    t.b_a = &w->part[0].bias[0];
    if (w->params.kind == QUERN_DSV4_CSA) t.b_b = &w->part[0].bias[1];
    t.norm_weight = &w->part[0].norm;
    t.cos_sin = &w->cos_sin;
    t.out = &out[0];
    t.slots = &step->slots;
    t.positions = &step->positions;
    t.cu = &step->cu;
    t.states = &states[0];
    t.merged = &merged[0];
    t.copies = &step->copies;
    if (w->part[0].page > 0) t.table = &table[0];
    if (w->faults) t.fault = &fault;
    if (w->parts > 1) {
        t.index_proj = proj + 1;
        t.index_b_a = &w->part[1].bias[0];
        t.index_b_b = &w->part[1].bias[1];
        t.index_norm_weight = &w->part[1].norm;
        t.index_out = &out[1];
        t.index_states = &states[1];
        t.index_merged = &merged[1];
        if (w->part[1].page > 0) t.index_table = &table[1];
    }
    quern_status status = quern_dsv4_append_step_workspace(ctx, &w->params, &t, &bytes);
    void *workspace = status == QUERN_OK ? malloc(bytes + 1) : NULL;
    if (status == QUERN_OK) status = quern_dsv4_append_step(ctx, NULL, &w->params, &t, workspace, bytes);
    for (int i = 0; i < w->parts; i++)
        if (w->part[i].page > 0) free(table[i].data);
    free(workspace);
    return status;
}

/* A batch of ids, some of them none, their counts and tokens. */
typedef struct batch {
    int64_t size, tokens, counts[SEQUENCES];
    int32_t ids[SEQUENCES], token[SEQUENCES * MOST];
} batch;

static batch batch_make(const world *w, test_random *random)
{
    batch b = {.size = test_random_int(random, 1, SEQUENCES)};
    const int32_t first = (int32_t)test_random_int(random, 0, SEQUENCES - 1);
    for (int64_t i = 0; i < b.size; i++) {
        b.ids[i] = test_random_one_in(random, 6) ? -1 : (first + (int32_t)i) % SEQUENCES;
        const int64_t left = b.ids[i] < 0 ? 0 : CAPACITY - w->length[b.ids[i]],
                      most = test_random_one_in(random, 3) ? MOST : 2;
        b.counts[i] = test_random_int(random, 0, left < most ? left : most);
        for (int64_t k = 0; k < b.counts[i]; k++)
            b.token[b.tokens++] = (int32_t)test_random_int(random, 0, BANK - 1);
    }
    return b;
}

/* Puts an entry into the pages that the pool is to have. */
static void put_in_pages(part *p, int32_t id, int64_t entry, const unsigned char *row)
{
    const int64_t page = ((const int32_t *)p->table.data)[id * COLUMNS + entry / p->page],
                  at = entry % p->page, data = p->data_bytes, scales = p->row_bytes - data;
    unsigned char *to = p->pages + (size_t)(page * p->pool.strides[0]) * quern_dtype_size(p->pool.dtype);
    memcpy(to + at * data, row, (size_t)data);
    memcpy(to + p->page * data + at * scales, row + data, (size_t)scales);
}

/* Puts the entry that the pages are to have into the pool. */
static void copy_entry(const part *p, int32_t id, int64_t entry)
{
    const int64_t page = ((const int32_t *)p->table.data)[id * COLUMNS + entry / p->page],
                  at = entry % p->page, data = p->data_bytes, scales = p->row_bytes - data;
    const size_t first = (size_t)(page * p->pool.strides[0]) * quern_dtype_size(p->pool.dtype),
                 of_data = first + (size_t)(at * data),
                 of_scales = first + (size_t)(p->page * data + at * scales);
    memcpy((unsigned char *)p->pool.data + of_data, p->pages + of_data, (size_t)data);
    memcpy((unsigned char *)p->pool.data + of_scales, p->pages + of_scales, (size_t)scales);
}

/* Compares what a step made of a compressor with whole sequences. */
static void check_part(world *w, int i, const batch *b, const unsigned char *rows)
{
    static unsigned char want[CAPACITY * OUT_BYTES];
    part *p = &w->part[i];
    const size_t row = (size_t)p->row_bytes;
    int64_t at = 0, entry = 0;
    for (int64_t k = 0; k < b->size; k++) {
        int32_t token[CAPACITY];
        if (b->ids[k] < 0) continue;
        const int64_t had = w->length[b->ids[k]], n = had + b->counts[k], r = w->params.ratio;
        memcpy(token, w->token[b->ids[k]], sizeof token);
        memcpy(token + had, b->token + at, (size_t)b->counts[k] * sizeof *token);
        at += b->counts[k];
        expect(w, i, token, n, want);
        const int64_t made = n / r - had / r;
        for (int64_t e = 0; e < made && p->page > 0; e++)
            put_in_pages(p, b->ids[k], had / r + e, want + (size_t)(had / r + e) * row);
        if (p->page == 0)
            assert_memory_equal(rows + (size_t)entry * row, want + (size_t)(had / r) * row,
                                (size_t)made * row);
        entry += made;
    }
    if (p->page > 0) assert_memory_equal(p->pool.data, p->pages, p->pool_bytes);
    const size_t end = (size_t)(b->tokens / w->params.ratio + b->size) * row;
    for (size_t k = (size_t)entry * row; k < end && p->page == 0; k++) assert_int_equal(rows[k], 0);
}

static void check_step(world *w, const batch *b, unsigned char *const *rows)
{
    for (int i = 0; i < w->parts; i++) check_part(w, i, b, rows[i]);
}

/* Takes a step's tokens into the model. */
static void keep_step(world *w, const batch *b)
{
    const int32_t *from = b->token;
    for (int64_t k = 0; k < b->size; k++) {
        if (b->ids[k] < 0) continue;
        memcpy(w->token[b->ids[k]] + w->length[b->ids[k]], from, (size_t)b->counts[k] * sizeof *from);
        w->length[b->ids[k]] += b->counts[k];
        from += b->counts[k];
    }
}

static void take_step(world *w, test_random *random)
{
    static unsigned char memory[PARTS][(SEQUENCES * MOST + SEQUENCES) * OUT_BYTES];
    unsigned char *const rows[PARTS] = {memory[0], memory[1]};
    const batch b = batch_make(w, random);
    quern_step step = QUERN_STEP_INIT;
    quern_tensor proj[PARTS];
    int64_t most = 0;
    for (int64_t i = 0; i < b.size; i++) most = b.counts[i] > most ? b.counts[i] : most;
    assert_int_equal(quern_ledger_begin(w->ledger, b.ids, b.counts, b.size, w->block, w->block_bytes),
                     QUERN_OK);
    assert_int_equal(quern_ledger_step(w->ledger, b.size, w->block, QUERN_CPU, 0, &step), QUERN_OK);
    if (test_random_one_in(random, 8)) { /* before it has run */
        assert_int_equal(quern_ledger_abort(w->ledger), QUERN_OK);
        return;
    }
    for (int i = 0; i < w->parts; i++) proj[i] = projections(w, &w->part[i], b.token, b.tokens);
    for (int run = 0; run < (most <= w->ring ? 2 : 1); run++) {
        memset(memory, 0x77, sizeof memory);
        if (append(w, &step, b.ids, proj, rows) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
        check_step(w, &b, rows);
    }
    keep_step(w, &b);
    assert_int_equal(quern_ledger_commit(w->ledger), QUERN_OK);
    for (int i = 0; i < w->parts; i++) free(proj[i].data);
}

static void entries_are_those_of_whole_sequences(void **state)
{
    const uint64_t seed = test_seed("entries_are_those_of_whole_sequences", 61);
    (void)state;
    for (int trial = 0; trial < test_trials(120); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        world w = world_make(&random);
        for (int i = 0; i < 30; i++) {
            const int64_t s = test_random_int(&random, 0, SEQUENCES - 1), to = (s + 1) % SEQUENCES;
            int64_t held;
            assert_int_equal(quern_ledger_length(w.ledger, s, NULL, &held), QUERN_OK);
            switch (test_random_int(&random, 0, 7)) {
            case 0:
                assert_int_equal(quern_ledger_fork(w.ledger, s, to), QUERN_OK);
                memcpy(w.token[to], w.token[s], sizeof w.token[s]);
                w.length[to] = w.length[s];
                break;
            case 1: {
                const int64_t n = test_random_int(&random, 0, held);
                assert_int_equal(quern_ledger_rollback(w.ledger, s, n), QUERN_OK);
                w.length[s] -= n;
                break;
            }
            case 2:
                if (!test_random_one_in(&random, 4)) break;
                assert_int_equal(quern_ledger_reset(w.ledger, s), QUERN_OK);
                w.length[s] = 0;
                break;
            default: take_step(&w, &random);
            }
        }
        world_free(&w);
    }
}

static void wrong_numbers_are_refused(void **state)
{
    static unsigned char memory[PARTS][16 * OUT_BYTES], pool[1 << 17];
    unsigned char *const rows[PARTS] = {memory[0], memory[1]};
    test_random random = {5};
    (void)state;
    world w;
    do w = world_make(&random);
    while ((w.ring != 4 || w.params.kind != QUERN_DSV4_CSA || w.params.ratio != 5 || w.parts != 2 ||
            w.part[0].page != 0 || w.part[1].page != 2 || w.part[1].format == QUERN_DSV4_ROWS) &&
           (world_free(&w), true));
    part *main = &w.part[0], *index = &w.part[1];
    int32_t slots[] = {2, 0}, positions[] = {9, 0}, cu[] = {0, 2, 5}, copies[] = {QUERN_LEDGER_STATES, 1, 3};
    const int64_t two[] = {2}, three[] = {3}, one[] = {1, 3}, n = w.slots * w.floats;
    const int32_t token[] = {1, 2, 3, 4, 5}, ids[] = {0, 1};
    const quern_tensor proj[] = {projections(&w, main, token, 5), projections(&w, index, token, 5)};
    quern_step step = {.size = sizeof step,
                       .slots = quern_tensor_contiguous(slots, QUERN_I32, 1, two),
                       .positions = quern_tensor_contiguous(positions, QUERN_I32, 1, two),
                       .cu = quern_tensor_contiguous(cu, QUERN_I32, 1, three),
                       .copies = quern_tensor_contiguous(copies, QUERN_I32, 2, one)};
    for (int i = 0; i < w.parts; i++) {
        for (int64_t k = 0; k < n; k++) w.part[i].states[k] = 0;
        for (int64_t k = 0; k < w.slots; k++) w.part[i].merged[k] = 6;
    }
    const struct {
        int32_t *number, value;
        const char *sentence;
    } wrong[] = {{&slots[0], -2, "slots[0] is -2"},
                 {&slots[0], (int32_t)w.slots, "slots[0] is"},
                 {&slots[0], 0, "slots[0] and slots[1] are 0: a slot is accepted once"},
                 {&positions[0], -1, "positions[0] is -1"},
                 {&positions[0], 5, "positions[0] is 5 and the state's sums have 6 rows"},
                 {&positions[0], 11, "positions[0] is 11 and the state's sums have 6 rows"},
                 {&main->merged[2], -3, "the state's sums have -3 rows"},
                 {&index->merged[2], 10, "the state's sums have 10 rows"},
                 {&positions[1], INT32_MAX - 1, "comes to 2147483649 tokens"},
                 {&cu[1], 6, "cu[1] is 6"},
                 {&cu[0], 1, "cu[0] is 1"},
                 {&cu[1], -1, "cu[1] is -1"},
                 {&copies[1], -1, "copies[0][1] is -1"},
                 {&copies[2], (int32_t)w.slots, "copies[0][2] is"},
                 {(int32_t *)index->table.data, -1, "index_table[0, 0] is -1"},
                 {(int32_t *)index->table.data, SEQUENCES * COLUMNS, "index_table[0, 0] is"}};
    float *before = malloc((size_t)(2 * n) * sizeof *before);
    assert_true(index->pool_bytes <= sizeof pool);
    memcpy(pool, index->pool.data, index->pool_bytes);
    for (int i = 0; i < w.parts; i++) memcpy(before + i * n, w.part[i].states, (size_t)n * sizeof *before);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int32_t was = *wrong[i].number;
        *wrong[i].number = wrong[i].value;
        memset(memory, 0x77, sizeof memory);
        assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), wrong[i].sentence) == NULL)
            fail_msg("\"%s\" lacks \"%s\"", quern_last_error(ctx), wrong[i].sentence);
        *wrong[i].number = was;
        for (size_t k = 0; k < sizeof memory; k++)
            assert_int_equal(memory[k / sizeof *memory][k % sizeof *memory], 0x77);
        assert_memory_equal(pool, index->pool.data, index->pool_bytes);
        for (int k = 0; k < w.parts; k++)
            assert_memory_equal(before + k * n, w.part[k].states, (size_t)n * sizeof *before);
    }
#ifndef QUERN_TEST_GPU /* where it is no error */
    /* An indexer's entry that is not finite leaves the main compressor's states alone, too. */
    float *value = proj[1].data;
    const float was = *value;
    *value = INFINITY;
    assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_ERR_INVALID_ARGUMENT);
    for (int k = 0; k < w.parts; k++)
        for (int64_t i = 0; i < n; i++) assert_true(w.part[k].states[i] == before[k * n + i]);
    *value = was;
#endif
    assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_OK);
    assert_int_equal(main->merged[3], 6); /* copied */
    index->pool.shape[1]--;
    assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "index_out has pages of "));
    index->pool.shape[1]++;
    w.cos_sin.shape[0] = 5;
    assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), ": cos_sin has positions 0 to 4"));
    w.floats++;
    assert_int_equal(append(&w, &step, ids, proj, rows), QUERN_ERR_INVALID_ARGUMENT);
    free(before);
    free(proj[0].data);
    free(proj[1].data);
    world_free(&w);
}

/* What stops the middle one of three sequences. */
enum { BEHIND, NEGATIVE, NOT_A_NUMBER, NOT_A_PAGE, KINDS };
static const int32_t bits[KINDS] = {QUERN_STATUS_BAD_POSITION, QUERN_STATUS_BAD_POSITION,
                                    QUERN_STATUS_NOT_FINITE, QUERN_STATUS_BAD_PAGE};

static bool allows(const world *w, int kind)
{
    const part *last = &w->part[w->parts - 1];
    return w->params.ratio <= 5 && (kind != NOT_A_NUMBER || last->format != QUERN_DSV4_ROWS) &&
           (kind != NOT_A_PAGE || last->page > 0);
}

/* The entries of a compressor where the second of three sequences has stopped, `made` of which would have
 * become whole: those are 0, and with the usual ones put in their place all is as if it had not. */
static void check_stopped(world *w, int i, const batch *b, unsigned char *rows, int64_t made)
{
    static unsigned char want[CAPACITY * OUT_BYTES];
    part *p = &w->part[i];
    const int64_t r = w->params.ratio, at = (w->length[0] + b->counts[0]) / r - w->length[0] / r,
                  old = w->length[1] / r, usual = (w->length[1] + b->counts[1]) / r - old;
    const size_t row = (size_t)p->row_bytes, start = (size_t)at * row,
                 all = (size_t)(b->tokens / r + b->size) * row;
    int32_t token[CAPACITY];
    memcpy(token, w->token[1], sizeof token);
    memcpy(token + w->length[1], b->token + b->counts[0], (size_t)b->counts[1] * sizeof *token);
    expect(w, i, token, w->length[1] + b->counts[1], want);
    if (p->page > 0) {
        for (int64_t e = 0; e < usual; e++) { /* whatever stands there */
            put_in_pages(p, 1, old + e, want + (size_t)(old + e) * row);
            copy_entry(p, 1, old + e);
        }
    } else {
        for (size_t k = start; k < start + (size_t)made * row; k++) assert_int_equal(rows[k], 0);
        memmove(rows + start + (size_t)usual * row, rows + start + (size_t)made * row,
                all - start - (size_t)(made > usual ? made : usual) * row);
        memcpy(rows + start, want + (size_t)old * row, (size_t)usual * row);
        if (made > usual) memset(rows + all - (size_t)(made - usual) * row, 0, (size_t)(made - usual) * row);
    }
    check_part(w, i, b, rows);
}

/* The middle one is at fault: the others have the entries of whole sequences, its own are 0 and its states
 * stay, here and in later steps, until it begins anew. */
static void faults_stop_one_sequence(void **state)
{
    enum { BATCH = 3, FIRST = 9, MORE = 12, ROWS = BATCH * (FIRST + MORE) };
    static unsigned char memory[PARTS][ROWS * OUT_BYTES];
    static float before[PARTS][16 * 8 * WIDTH];
    unsigned char *const rows[PARTS] = {memory[0], memory[1]};
    (void)state;
    for (int trial = 0; trial < 40; trial++) {
        test_random random = {(uint64_t)trial};
        const int kind = trial % KINDS, nan = trial / KINDS % 2 * 4; /* the row that is none */
        world w;
        do w = world_make(&random);
        while (!allows(&w, kind) && (world_free(&w), true));
        const int last = w.parts - 1;
        const int32_t ids[] = {0, 1, 2};
        quern_step step = QUERN_STEP_INIT;
        batch b = {.size = BATCH};
        w.faults = true;
        memcpy(b.ids, ids, sizeof ids);
        for (int pass = 0; pass < 4; pass++) { /* good; the fault; passed over; anew */
            quern_tensor proj[PARTS];
            if (pass == 3) assert_int_equal(quern_ledger_reset(w.ledger, 1), QUERN_OK), w.length[1] = 0;
            b.tokens = 0;
            for (int i = 0; i < BATCH; i++) {
                b.counts[i] = pass == 0 ? FIRST + i : MORE;
                for (int64_t k = 0; k < b.counts[i]; k++)
                    b.token[b.tokens++] = (int32_t)test_random_int(&random, 0, BANK - 1);
            }
            assert_int_equal(quern_ledger_begin(w.ledger, ids, b.counts, BATCH, w.block, w.block_bytes),
                             QUERN_OK);
            assert_int_equal(quern_ledger_step(w.ledger, BATCH, w.block, QUERN_CPU, 0, &step), QUERN_OK);
            const int32_t slot = ((const int32_t *)step.slots.data)[1];
            for (int i = 0; i < w.parts; i++) {
                proj[i] = projections(&w, &w.part[i], b.token, b.tokens);
                memcpy(before[i], w.part[i].states + slot * w.floats, (size_t)w.floats * sizeof **before);
            }
            int32_t *position = (int32_t *)step.positions.data + 1;
            const bool now = pass == 1, stopped = pass == 1 || pass == 2;
            if (now && kind == BEHIND) *position += (int32_t)w.ring + 1;
            if (now && kind == NEGATIVE) *position = -3;
            for (int64_t i = 0; i < w.columns && now && kind == NOT_A_NUMBER; i++)
                ((float *)proj[last].data)[(MORE + nan) * w.columns + i] = NAN;
            int32_t *page = w.part[last].page > 0 ? (int32_t *)w.part[last].table.data + COLUMNS : NULL,
                    good = 0;
            if (page != NULL) page += (w.length[1] / w.params.ratio) / w.part[last].page, good = *page;
            if (now && kind == NOT_A_PAGE) *page = SEQUENCES * COLUMNS;
            memset(memory, 0x77, sizeof memory);
            if (append(&w, &step, ids, proj, rows) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
            if (page != NULL) *page = good;
            for (int64_t i = 0; i < w.slots; i++)
                assert_int_equal(w.fault[i], i == slot && stopped ? bits[kind] : 0);
            const int64_t r = w.params.ratio, had = now && kind == BEHIND     ? *position
                                                    : now && kind == NEGATIVE ? 0
                                                                              : w.length[1];
            for (int i = 0; i < w.parts; i++) {
                if (!stopped) check_part(&w, i, &b, rows[i]);
                else {
                    check_stopped(&w, i, &b, rows[i], (had + MORE) / r - had / r);
                    assert_memory_equal(before[i], w.part[i].states + slot * w.floats,
                                        (size_t)w.floats * sizeof **before);
                }
                free(proj[i].data);
            }
            keep_step(&w, &b);
            assert_int_equal(quern_ledger_commit(w.ledger), QUERN_OK);
        }
        world_free(&w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(entries_are_those_of_whole_sequences),
                                       cmocka_unit_test(wrong_numbers_are_refused),
                                       cmocka_unit_test(faults_stop_one_sequence)};
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
