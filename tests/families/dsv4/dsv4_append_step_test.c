/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_append_step_test.c - states in slots of a tensor. Whatever steps, forks, roll-backs and aborts a
 * ledger's sequences go through, their entries are those of one call over the whole sequence, to the bit;
 * rows behind the entries are 0; a step of up to m tokens may run twice. Numbers that are wrong are refused
 * and change nothing.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "random.h"

#include <quern/cuda.h>
#include <quern/dsv4.h>
#include <quern/ledger.h>

#include <math.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 4, CAPACITY = 60, BANK = 40, WIDTH = 32, ROPE = 8, MOST = 24, OUT_BYTES = 4 * WIDTH };

typedef struct world {
    quern_dsv4_compress_params params;
    quern_ledger_params books;
    quern_ledger *ledger;
    int64_t columns, ring, slots, floats, row_bytes; /* row: of out */
    quern_tensor bias[2], norm, cos_sin;
    float *bank, *states; /* [BANK, columns], [slots, floats] */
    int32_t *merged;
    int32_t fault[8]; /* [slots] */
    bool faults;      /* the call has them */
    int32_t token[SEQUENCES][CAPACITY];
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

static world world_make(test_random *random)
{
    world w = {.params = QUERN_DSV4_COMPRESS_PARAMS_INIT, .books = QUERN_LEDGER_PARAMS_INIT};
    const bool csa = test_random_one_in(random, 2);
    const quern_dsv4_format formats[] = {QUERN_DSV4_ROWS, QUERN_DSV4_FP8_POWER, QUERN_DSV4_FP4};
    const int64_t row_bytes[] = {OUT_BYTES, WIDTH + 4, WIDTH / 2 + WIDTH / 32};
    const int f = (int)test_random_int(random, 0, 2);
    size_t bytes;
    w.params.kind = csa ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    w.params.ratio = test_random_int(random, 1, 7);
    w.params.rope_last = test_random_one_in(random, 2);
    w.params.format = formats[f];
    w.row_bytes = row_bytes[f];
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
    w.bank = normal(random, BANK, w.columns).data;
    assert_true(w.slots <= (int64_t)(sizeof w.fault / sizeof *w.fault));
    w.states = malloc((size_t)(w.slots * w.floats) * sizeof *w.states);
    memset(w.states, 0xff, (size_t)(w.slots * w.floats) * sizeof *w.states); /* NaN: nothing needs clearing */
    w.merged = malloc((size_t)w.slots * sizeof *w.merged);
    memset(w.merged, 0x5a, (size_t)w.slots * sizeof *w.merged);
    for (int i = 0; i < 2; i++) w.bias[i] = normal(random, w.params.ratio, WIDTH);
    w.norm = normal(random, 0, WIDTH);
    w.cos_sin = normal(random, CAPACITY + 8, ROPE);
    return w;
}

static void world_free(world *w)
{
    void *const all[] = {w->memory,       w->block,        w->bank,      w->states,      w->merged,
                         w->bias[0].data, w->bias[1].data, w->norm.data, w->cos_sin.data};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static quern_tensor rows_of(const world *w, int64_t n, void *data)
{
    const bool bytes = w->params.format != QUERN_DSV4_ROWS;
    const int64_t shape[] = {n, bytes ? w->row_bytes : WIDTH};
    return quern_tensor_contiguous(data, bytes ? QUERN_U8 : QUERN_F32, 2, shape);
}

static quern_tensor projections(const world *w, const int32_t *token, int64_t n)
{
    const int64_t shape[] = {n, w->columns};
    float *data = malloc((size_t)(n * w->columns + 1) * sizeof *data);
    for (int64_t i = 0; i < n; i++)
        memcpy(data + i * w->columns, w->bank + token[i] * w->columns, (size_t)w->columns * sizeof *data);
    return quern_tensor_contiguous(data, QUERN_F32, 2, shape);
}

/* Entries of a whole sequence of n tokens. */
static void expect(const world *w, const int32_t *token, int64_t n, unsigned char *rows)
{
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    const quern_tensor proj = projections(w, token, n), out = rows_of(w, n / w->params.ratio, rows);
    size_t bytes;
    t.proj = &proj;
    t.b_a = &w->bias[0];
    if (w->params.kind == QUERN_DSV4_CSA) t.b_b = &w->bias[1];
    t.norm_weight = &w->norm;
    t.cos_sin = &w->cos_sin;
    t.out = &out;
    assert_int_equal(quern_dsv4_compress_workspace(ctx, &w->params, &t, &bytes), QUERN_OK);
    void *workspace = malloc(bytes + 1);
    assert_int_equal(quern_dsv4_compress(ctx, NULL, &w->params, &t, workspace, bytes), QUERN_OK);
    free(workspace);
    free(proj.data);
}

/* One operation on the step in the block. out: [T / r + B] rows. */
static quern_status append(const world *w, const quern_step *step, const quern_tensor *proj, void *rows,
                           const quern_tensor *prev_b)
{
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    const int64_t shape[] = {w->slots, w->floats};
    const quern_tensor out = rows_of(w, proj->shape[0] / w->params.ratio + step->slots.shape[0], rows),
                       states = quern_tensor_contiguous(w->states, QUERN_F32, 2, shape),
                       merged = quern_tensor_contiguous(w->merged, QUERN_I32, 1, shape);
    size_t bytes;
    t.proj = proj;
    t.b_a = &w->bias[0];
    if (w->params.kind == QUERN_DSV4_CSA) t.b_b = &w->bias[1];
    t.norm_weight = &w->norm;
    t.cos_sin = &w->cos_sin;
    t.out = &out;
    t.slots = &step->slots;
    t.positions = &step->positions;
    t.cu = &step->cu;
    t.states = &states;
    t.merged = &merged;
    t.copies = &step->copies;
    t.prev_b = prev_b;
    const quern_tensor fault = quern_tensor_contiguous((void *)(uintptr_t)w->fault, QUERN_I32, 1, shape);
    if (w->faults) t.fault = &fault;
    quern_status status = quern_dsv4_append_step_workspace(ctx, &w->params, &t, &bytes);
    if (status != QUERN_OK) return status;
    void *workspace = malloc(bytes + 1);
    status = quern_dsv4_append_step(ctx, NULL, &w->params, &t, workspace, bytes);
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

/* Compares what a step made with whole sequences, and takes its tokens into the model where `keep`. */
static void check_step(world *w, const batch *b, const unsigned char *rows, bool keep)
{
    static unsigned char want[CAPACITY * OUT_BYTES];
    const size_t row = (size_t)w->row_bytes;
    int64_t at = 0, entry = 0;
    for (int64_t i = 0; i < b->size; i++) {
        int32_t token[CAPACITY];
        if (b->ids[i] < 0) continue;
        const int64_t had = w->length[b->ids[i]], n = had + b->counts[i], r = w->params.ratio;
        memcpy(token, w->token[b->ids[i]], sizeof token);
        memcpy(token + had, b->token + at, (size_t)b->counts[i] * sizeof *token);
        at += b->counts[i];
        expect(w, token, n, want);
        const int64_t made = n / r - had / r;
        assert_memory_equal(rows + (size_t)entry * row, want + (size_t)(had / r) * row, (size_t)made * row);
        entry += made;
        if (!keep) continue;
        memcpy(w->token[b->ids[i]], token, sizeof token);
        w->length[b->ids[i]] = n;
    }
    const size_t end = (size_t)(b->tokens / w->params.ratio + b->size) * row;
    for (size_t i = (size_t)entry * row; i < end; i++) assert_int_equal(rows[i], 0);
}

static void take_step(world *w, test_random *random)
{
    const batch b = batch_make(w, random);
    quern_step step = QUERN_STEP_INIT;
    unsigned char rows[(SEQUENCES * MOST + SEQUENCES) * OUT_BYTES], again[sizeof rows];
    int64_t most = 0;
    for (int64_t i = 0; i < b.size; i++) most = b.counts[i] > most ? b.counts[i] : most;
    assert_int_equal(quern_ledger_begin(w->ledger, b.ids, b.counts, b.size, w->block, w->block_bytes),
                     QUERN_OK);
    assert_int_equal(quern_ledger_step(w->ledger, b.size, w->block, QUERN_CPU, 0, &step), QUERN_OK);
    if (test_random_one_in(random, 8)) { /* before it has run */
        assert_int_equal(quern_ledger_abort(w->ledger), QUERN_OK);
        return;
    }
    const quern_tensor proj = projections(w, b.token, b.tokens);
    memset(rows, 0x77, sizeof rows);
    if (append(w, &step, &proj, rows, NULL) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    check_step(w, &b, rows, false);
    if (most <= w->ring) {
        memset(again, 0x55, sizeof again);
        assert_int_equal(append(w, &step, &proj, again, NULL), QUERN_OK);
        check_step(w, &b, again, false);
    }
    check_step(w, &b, rows, true);
    assert_int_equal(quern_ledger_commit(w->ledger), QUERN_OK);
    free(proj.data);
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
    test_random random = {5};
    (void)state;
    world w;
    do w = world_make(&random);
    while ((w.ring != 4 || w.params.kind != QUERN_DSV4_CSA || w.params.ratio != 5) && (world_free(&w), true));
    int32_t slots[] = {2, 0}, positions[] = {9, 0}, cu[] = {0, 2, 5}, copies[] = {QUERN_LEDGER_STATES, 1, 3};
    const int64_t two[] = {2}, three[] = {3}, one[] = {1, 3}, n = w.slots * w.floats;
    const int32_t token[] = {1, 2, 3, 4, 5};
    const quern_tensor proj = projections(&w, token, 5);
    quern_step step = {.size = sizeof step,
                       .slots = quern_tensor_contiguous(slots, QUERN_I32, 1, two),
                       .positions = quern_tensor_contiguous(positions, QUERN_I32, 1, two),
                       .cu = quern_tensor_contiguous(cu, QUERN_I32, 1, three),
                       .copies = quern_tensor_contiguous(copies, QUERN_I32, 2, one)};
    unsigned char rows[16 * OUT_BYTES];
    for (int64_t i = 0; i < n; i++) w.states[i] = 0;
    for (int64_t i = 0; i < w.slots; i++) w.merged[i] = 6;
    const struct {
        int32_t *number, value;
        const char *sentence;
    } wrong[] = {{&slots[0], -2, "slots[0] is -2"},
                 {&slots[0], (int32_t)w.slots, "slots[0] is"},
                 {&slots[0], 0, "slots[0] and slots[1] are 0: a slot is accepted once"},
                 {&positions[0], -1, "positions[0] is -1"},
                 {&positions[0], 5, "positions[0] is 5 and the state's sums have 6 rows"},
                 {&positions[0], 11, "positions[0] is 11 and the state's sums have 6 rows"},
                 {&w.merged[2], -3, "the state's sums have -3 rows"},
                 {&positions[1], INT32_MAX - 1, "comes to 2147483649 tokens"},
                 {&cu[1], 6, "cu[1] is 6"},
                 {&cu[0], 1, "cu[0] is 1"},
                 {&cu[1], -1, "cu[1] is -1"},
                 {&copies[1], -1, "copies[0][1] is -1"},
                 {&copies[2], (int32_t)w.slots, "copies[0][2] is"}};
    float *before = malloc((size_t)n * sizeof *before);
    memcpy(before, w.states, (size_t)n * sizeof *before);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const int32_t was = *wrong[i].number;
        *wrong[i].number = wrong[i].value;
        memset(rows, 0x77, sizeof rows);
        assert_int_equal(append(&w, &step, &proj, rows, NULL), QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), wrong[i].sentence) == NULL)
            fail_msg("\"%s\" lacks \"%s\"", quern_last_error(ctx), wrong[i].sentence);
        *wrong[i].number = was;
        for (size_t k = 0; k < sizeof rows; k++) assert_int_equal(rows[k], 0x77);
        assert_memory_equal(before, w.states, (size_t)n * sizeof *before);
    }
    assert_int_equal(append(&w, &step, &proj, rows, &w.norm), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "prev_b is given: a step's sequences begin at position 0"));
    assert_int_equal(append(&w, &step, &proj, rows, NULL), QUERN_OK);
    assert_int_equal(w.merged[3], 6); /* copied */
    w.cos_sin.shape[0] = 5;
    assert_int_equal(append(&w, &step, &proj, rows, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), ": cos_sin has positions 0 to 4"));
    w.floats++;
    assert_int_equal(append(&w, &step, &proj, rows, NULL), QUERN_ERR_INVALID_ARGUMENT);
    free(before);
    free(proj.data);
    world_free(&w);
}

/* Three sequences of a step, of which the middle one is at fault: the others have the entries of whole
 * sequences, its own are 0 and its state stays, here and in later steps, until it begins anew. */
static void faults_stop_one_sequence(void **state)
{
    enum { BATCH = 3, FIRST = 9, MORE = 7, ROWS = BATCH * (FIRST + MORE) };
    static const struct {
        const char *what;
        int32_t bit;
    } kinds[] = {{"a position behind the ring", QUERN_STATUS_BAD_POSITION},
                 {"a negative position", QUERN_STATUS_BAD_POSITION},
                 {"a NaN", QUERN_STATUS_NOT_FINITE}};
    (void)state;
    for (int trial = 0; trial < 30; trial++) {
        test_random random = {(uint64_t)trial};
        world w;
        do w = world_make(&random);
        while ((w.params.ratio > 5 || w.params.format == QUERN_DSV4_ROWS) && (world_free(&w), true));
        const int kind = trial % 3;
        const int32_t ids[] = {0, 1, 2};
        const int64_t first[] = {FIRST, FIRST + 1, FIRST + 2}, more[] = {MORE, MORE, MORE};
        quern_step step = QUERN_STEP_INIT;
        batch b = {.size = BATCH};
        static unsigned char rows[ROWS * OUT_BYTES], want[ROWS * OUT_BYTES];
        w.faults = true;
        memset(w.fault, 0, sizeof w.fault);
        memcpy(b.ids, ids, sizeof ids);
        for (int pass = 0; pass < 4; pass++) { /* good; the fault; passed over; anew */
            if (pass == 3) assert_int_equal(quern_ledger_reset(w.ledger, 1), QUERN_OK), w.length[1] = 0;
            b.tokens = 0;
            for (int i = 0; i < BATCH; i++) {
                b.counts[i] = pass == 0 ? first[i] : more[i];
                for (int64_t k = 0; k < b.counts[i]; k++)
                    b.token[b.tokens++] = (int32_t)test_random_int(&random, 0, BANK - 1);
            }
            assert_int_equal(quern_ledger_begin(w.ledger, ids, b.counts, BATCH, w.block, w.block_bytes),
                             QUERN_OK);
            assert_int_equal(quern_ledger_step(w.ledger, BATCH, w.block, QUERN_CPU, 0, &step), QUERN_OK);
            const quern_tensor proj = projections(&w, b.token, b.tokens);
            const int32_t slot = ((const int32_t *)step.slots.data)[1];
            int32_t *position = (int32_t *)step.positions.data + 1;
            float *own = w.states + slot * w.floats, before[8 * 8 * WIDTH];
            memcpy(before, own, (size_t)w.floats * sizeof *before);
            if (pass == 1 && kind == 0) *position += (int32_t)w.ring + 1;
            if (pass == 1 && kind == 1) *position = -3;
            if (pass == 1 && kind == 2)
                for (int64_t i = 0; i < w.columns; i++) ((float *)proj.data)[MORE * w.columns + i] = NAN;
            memset(rows, 0x77, sizeof rows);
            if (append(&w, &step, &proj, rows, NULL) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
            const bool stopped = pass == 1 || pass == 2;
            assert_int_equal(w.fault[slot], stopped ? kinds[kind].bit : 0);
            for (int64_t i = 0; i < w.slots; i++)
                if (i != slot) assert_int_equal(w.fault[i], 0);
            if (!stopped) {
                check_step(&w, &b, rows, true);
            } else { /* its rows are 0: with them put in, all is as if it had no fault */
                const int64_t r = w.params.ratio, at = (w.length[0] + MORE) / r - w.length[0] / r,
                              had = pass == 1 && kind == 0   ? *position
                                    : pass == 1 && kind == 1 ? 0
                                                             : w.length[1],
                              made = (had + MORE) / r - had / r,
                              usual = (w.length[1] + MORE) / r - w.length[1] / r;
                const size_t row = (size_t)w.row_bytes, start = (size_t)at * row;
                for (size_t i = start; i < start + (size_t)made * row; i++) assert_int_equal(rows[i], 0);
                assert_memory_equal(before, own, (size_t)w.floats * sizeof *before);
                int32_t token[CAPACITY];
                memcpy(token, w.token[1], sizeof token);
                memcpy(token + w.length[1], b.token + MORE, MORE * sizeof *token);
                expect(&w, token, w.length[1] + MORE, want);
                memmove(rows + start + (size_t)usual * row, rows + start + (size_t)made * row,
                        sizeof rows - start - (size_t)(made > usual ? made : usual) * row);
                memcpy(rows + start, want + (size_t)(w.length[1] / r) * row, (size_t)usual * row);
                memset(rows + (size_t)(b.tokens / r + BATCH) * row - row, 0, row); /* may have moved */
                check_step(&w, &b, rows, true);
            }
            free(proj.data);
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
