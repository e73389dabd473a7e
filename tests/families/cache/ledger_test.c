/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ledger_test.c - the books of a step against arrays of rows without pages: whatever begins, ends, is
 * aborted, taken back, forked or emptied, every row that a step's tables name is the sequence's own, copies
 * come before writes, no page is lost, and a refused call changes nothing.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "random.h"

#include <quern/ledger.h>

#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 5, CAPACITY = 70, STEP = 13, PAGES_MOST = 400, RING = 9 + 8 + STEP };

/* As dsv4.h's: a hash of the first `merged` tokens, and those behind them, which can be taken back. */
typedef struct sums {
    uint32_t hash;
    int64_t merged;
    int32_t ring[QUERN_LEDGER_ROLLBACK_MOST];
} sums;

/* A layer: the pools' rows as numbers, and states. */
typedef struct pools {
    int32_t *rows[QUERN_LEDGER_POOLS];
    sums state[2 * SEQUENCES];
} pools;

enum { LAYERS = 2 };
typedef struct books {
    quern_ledger_params params;
    quern_ledger *ledger;
    void *memory;
    size_t memory_bytes;
    int64_t columns[QUERN_LEDGER_POOLS + 1], pages[QUERN_LEDGER_POOLS + 1];
    pools layer[LAYERS];
    int32_t token[SEQUENCES][CAPACITY]; /* the model */
    int64_t length[SEQUENCES], held[SEQUENCES];
    bool limited;
    int32_t *block, next;
} books;

static books books_make(test_random *random)
{
    books b = {.params = QUERN_LEDGER_PARAMS_INIT, .next = 1};
    quern_ledger_params *p = &b.params;
    p->sequences = SEQUENCES;
    p->capacity = CAPACITY;
    p->rollback = test_random_int(random, 0, 8);
    p->states = test_random_one_in(random, 2);
    p->pools[0] = (quern_ledger_pool){.page = test_random_int(random, 1, 9)};
    if (test_random_one_in(random, 2)) p->pools[0].page = CAPACITY; /* contiguous */
    if (test_random_one_in(random, 2))
        p->pools[1] = (quern_ledger_pool){.page = test_random_int(random, 1, 5),
                                          .block = 4,
                                          .stride = test_random_one_in(random, 2) ? 2 : 4};
    if (test_random_one_in(random, 2)) {
        p->pools[3] = (quern_ledger_pool){.page = test_random_int(random, 1, RING), .ring = RING};
        p->step = STEP;
    }
    for (int i = 0; i < QUERN_LEDGER_POOLS; i++)
        if (p->pools[i].page > 0 && test_random_one_in(random, 3)) p->pools[i].pages = 90;
    b.limited = p->states || p->step > 0;
    assert_int_equal(quern_ledger_size(p, &b.memory_bytes), QUERN_OK);
    b.memory = malloc(b.memory_bytes);
    assert_int_equal(quern_ledger_create(p, b.memory, b.memory_bytes, &b.ledger), QUERN_OK);
    for (int i = 0; i <= QUERN_LEDGER_POOLS; i++) {
        assert_int_equal(quern_ledger_pages(p, i, CAPACITY, &b.columns[i], &b.pages[i]), QUERN_OK);
        for (int l = 0; l < LAYERS && i < QUERN_LEDGER_POOLS; l++)
            b.layer[l].rows[i] = calloc((size_t)(b.pages[i] * p->pools[i].page) + 1, sizeof(int32_t));
    }
    size_t bytes;
    assert_int_equal(quern_ledger_block_bytes(b.ledger, SEQUENCES, &bytes), QUERN_OK);
    b.block = malloc(bytes);
    return b;
}

static void books_free(books *b)
{
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < QUERN_LEDGER_POOLS; i++) free(b->layer[l].rows[i]);
    free(b->memory);
    free(b->block);
}

static quern_step step_of(const books *b, int64_t batch)
{
    quern_step s = QUERN_STEP_INIT;
    assert_int_equal(quern_ledger_step(b->ledger, batch, b->block, QUERN_CPU, 0, &s), QUERN_OK);
    return s;
}

static int64_t rows_of(const quern_ledger_pool *p, int64_t tokens)
{
    const int64_t block = p->block > 0 ? p->block : 1, stride = p->stride > 0 ? p->stride : block;
    return tokens < block ? 0 : (tokens - block) / stride + 1;
}

/* Row i of a pool in layer l, as the model has it. */
static int32_t row_value(const books *b, int pool, const int32_t *token, int64_t i, int l)
{
    const quern_ledger_pool *p = &b->params.pools[pool];
    const int64_t block = p->block > 0 ? p->block : 1, stride = p->stride > 0 ? p->stride : block;
    int32_t sum = 7 * l + pool;
    for (int64_t j = 0; j < block; j++) sum = sum * 31 + token[i * stride + j];
    return sum;
}

static uint32_t merge(uint32_t hash, int32_t token)
{
    return hash * 16777619u + (uint32_t)token;
}

/* That a state says the first n tokens. */
static void check_state(const books *b, const sums *state, const int32_t *token, int64_t n, int l)
{
    const int64_t m = b->params.rollback;
    uint32_t hash = 5 + (uint32_t)l, expected = hash;
    assert_true(state->merged <= n && n <= state->merged + m);
    for (int64_t i = 0; i < n; i++) expected = merge(expected, token[i]);
    hash = state->hash;
    for (int64_t i = state->merged; i < n; i++) hash = merge(hash, state->ring[i % m]);
    assert_int_equal(hash, expected);
}

/* Appends tokens n ... n + count - 1 to a state, which may have been done before. */
static void append_state(const books *b, sums *state, const int32_t *token, int64_t n, int64_t count, int l)
{
    const int64_t m = b->params.rollback;
    if (n == 0) *state = (sums){.hash = 5 + (uint32_t)l};
    else check_state(b, state, token, n, l);
    for (; state->merged < n + count - m; state->merged++)
        state->hash =
            merge(state->hash, state->merged < n ? state->ring[state->merged % m] : token[state->merged]);
    for (int64_t i = state->merged > n ? state->merged : n; i < n + count; i++) state->ring[i % m] = token[i];
}

static int32_t *place(const books *b, const quern_step *s, int64_t row, int pool, int64_t i, int l)
{
    const int64_t page = b->params.pools[pool].page,
                  column = b->params.pools[pool].ring > 0 ? i / page % b->columns[pool] : i / page;
    assert_in_range(column, 0, b->columns[pool] - 1);
    const int32_t at = ((const int32_t *)s->tables[pool].data)[row * b->columns[pool] + column];
    assert_in_range(at, 0, b->pages[pool] - 1);
    return &b->layer[l].rows[pool][at * page + i % page];
}

/* That the first n tokens' rows of a sequence are there in layer l, those that a ring keeps. */
static void check_rows(const books *b, const quern_step *s, int64_t row, const int32_t *token, int64_t n,
                       int l)
{
    for (int pool = 0; pool < QUERN_LEDGER_POOLS; pool++) {
        const quern_ledger_pool *p = &b->params.pools[pool];
        if (p->page == 0) continue;
        const int64_t end = rows_of(p, n), first = p->ring > 0 && end > 9 ? end - 9 : 0;
        for (int64_t i = first; i < end; i++)
            assert_int_equal(*place(b, s, row, pool, i, l), row_value(b, pool, token, i, l));
    }
}

static void check_all(books *b)
{
    for (int32_t id = 0; id < SEQUENCES; id++) {
        int64_t tokens, held;
        assert_int_equal(quern_ledger_length(b->ledger, id, &tokens, &held), QUERN_OK);
        assert_int_equal(tokens, b->length[id]);
        assert_int_equal(held, b->held[id]);
        const int64_t count = tokens < 3 ? tokens : 3;
        size_t bytes;
        assert_int_equal(quern_ledger_block_bytes(b->ledger, 1, &bytes), QUERN_OK);
        assert_int_equal(quern_ledger_newest(b->ledger, &id, &count, 1, b->block, bytes), QUERN_OK);
        const quern_step s = step_of(b, 1);
        assert_int_equal(((int32_t *)s.positions.data)[0], tokens - count);
        const int32_t slot = ((int32_t *)s.slots.data)[0];
        for (int l = 0; l < LAYERS; l++) {
            check_rows(b, &s, 0, b->token[id], tokens, l);
            if (b->params.states && tokens > 0)
                check_state(b, &b->layer[l].state[slot], b->token[id], tokens, l);
        }
    }
}

/* Pages that are free, and that no sequence has too many of. */
static void check_pages(const books *b)
{
    for (int pool = 0; pool < QUERN_LEDGER_POOLS; pool++) {
        int64_t left, most = 0, sum = 0;
        assert_int_equal(quern_ledger_free_pages(b->ledger, pool, &left), QUERN_OK);
        for (int64_t s = 0; s < SEQUENCES; s++) {
            int64_t pages;
            assert_int_equal(quern_ledger_pages(&b->params, pool, b->length[s], &pages, NULL), QUERN_OK);
            sum += pages;
            if (pages > most) most = pages;
        }
        assert_in_range(b->pages[pool] - left, most, sum);
    }
}

/* What the operations of a layer do: copies, then rows and states. */
static void run_layer(books *b, const quern_step *s, int64_t batch, const int32_t *ids, const int64_t *counts,
                      int32_t fresh[SEQUENCES][STEP], int l)
{
    const int32_t *copies = s->copies.data;
    for (int64_t i = 0; i < s->copies.shape[0]; i++, copies += 3) {
        if (copies[0] < 0) continue;
        if (copies[0] == QUERN_LEDGER_STATES) {
            b->layer[l].state[copies[2]] = b->layer[l].state[copies[1]];
            continue;
        }
        const int64_t page = b->params.pools[copies[0]].page;
        int32_t *rows = b->layer[l].rows[copies[0]];
        memcpy(rows + copies[2] * page, rows + copies[1] * page, (size_t)page * sizeof *rows);
    }
    for (int64_t r = 0; r < batch; r++) {
        if (ids[r] < 0) {
            assert_int_equal(((int32_t *)s->slots.data)[r], -1);
            continue;
        }
        int32_t token[CAPACITY];
        const int64_t n = b->length[ids[r]];
        memcpy(token, b->token[ids[r]], (size_t)n * sizeof *token);
        memcpy(token + n, fresh[r], (size_t)counts[r] * sizeof *token);
        assert_int_equal(((int32_t *)s->positions.data)[r], n);
        check_rows(b, s, r, token, n, l);
        for (int pool = 0; pool < QUERN_LEDGER_POOLS; pool++) {
            const quern_ledger_pool *p = &b->params.pools[pool];
            for (int64_t i = rows_of(p, n); p->page > 0 && i < rows_of(p, n + counts[r]); i++)
                *place(b, s, r, pool, i, l) = row_value(b, pool, token, i, l);
        }
        const int32_t slot = ((int32_t *)s->slots.data)[r];
        if (b->params.states && counts[r] > 0) {
            assert_in_range(slot, 0, b->pages[QUERN_LEDGER_STATES] - 1);
            append_state(b, &b->layer[l].state[slot], token, n, counts[r], l);
        }
    }
}

static void take_step(books *b, test_random *random)
{
    int32_t ids[SEQUENCES], fresh[SEQUENCES][STEP];
    int64_t counts[SEQUENCES];
    const int64_t batch = test_random_int(random, 0, SEQUENCES);
    for (int64_t i = 0; i < SEQUENCES; i++) {
        const int64_t j = test_random_int(random, 0, i);
        ids[i] = ids[j];
        ids[j] = (int32_t)i;
    }
    for (int64_t i = 0; i < batch; i++) {
        if (test_random_one_in(random, 6)) ids[i] = -1;
        const int64_t room = ids[i] < 0 ? 0 : CAPACITY - b->length[ids[i]];
        counts[i] = test_random_int(random, 0, room < STEP ? room : STEP);
        for (int64_t t = 0; t < counts[i]; t++) fresh[i][t] = b->next++;
    }
    size_t bytes;
    assert_int_equal(quern_ledger_block_bytes(b->ledger, batch, &bytes), QUERN_OK);
    memset(b->block, 0x7f, bytes);
    char *before = malloc(b->memory_bytes);
    memcpy(before, b->memory, b->memory_bytes);
    if (quern_ledger_begin(b->ledger, ids, counts, batch, b->block, bytes) != QUERN_OK) {
        assert_non_null(strstr(quern_last_error(NULL), "pages:"));
        assert_memory_equal(before, b->memory, b->memory_bytes);
        free(before);
        return;
    }
    free(before);
    const quern_step s = step_of(b, batch);
    if (test_random_one_in(random, 5)) {
        assert_int_equal(quern_ledger_abort(b->ledger), QUERN_OK);
        return;
    }
    /* A step of up to m tokens may run twice. */
    bool few = true;
    for (int64_t i = 0; i < batch; i++) few = few && counts[i] <= b->params.rollback;
    const int runs = few && test_random_one_in(random, 2) ? 2 : 1;
    for (int run = 0; run < runs; run++)
        for (int l = 0; l < LAYERS; l++) run_layer(b, &s, batch, ids, counts, fresh, l);
    assert_int_equal(quern_ledger_commit(b->ledger), QUERN_OK);
    for (int64_t i = 0; i < batch; i++) {
        if (ids[i] < 0) continue;
        memcpy(b->token[ids[i]] + b->length[ids[i]], fresh[i], (size_t)counts[i] * sizeof(int32_t));
        b->length[ids[i]] += counts[i];
        const int64_t held = b->held[ids[i]] + counts[i];
        b->held[ids[i]] = held < b->params.rollback ? held : b->params.rollback;
    }
}

static void take_back(books *b, int64_t s, test_random *random)
{
    const int64_t n = test_random_int(random, 0, 9);
    const quern_status status = quern_ledger_rollback(b->ledger, s, n);
    assert_int_equal(status, n <= b->held[s] ? QUERN_OK : QUERN_ERR_INVALID_ARGUMENT);
    if (status != QUERN_OK) return;
    b->length[s] -= n;
    if (b->limited) b->held[s] -= n;
    else if (b->held[s] > b->length[s]) b->held[s] = b->length[s];
}

static void any_order_of_calls_keeps_every_row(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("any_order_of_calls_keeps_every_row", 38);
    for (int trial = 0; trial < test_trials(200); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        books b = books_make(&random);
        for (int call = 0; call < 60; call++) {
            const int64_t s = test_random_int(&random, 0, SEQUENCES - 1),
                          other = (s + test_random_int(&random, 1, SEQUENCES - 1)) % SEQUENCES;
            switch (test_random_int(&random, 0, 9)) {
            case 0:
                assert_int_equal(quern_ledger_reset(b.ledger, s), QUERN_OK);
                b.length[s] = b.held[s] = 0;
                break;
            case 1:
            case 2:
                assert_int_equal(quern_ledger_fork(b.ledger, s, other), QUERN_OK);
                memcpy(b.token[other], b.token[s], sizeof b.token[s]);
                b.length[other] = b.length[s];
                b.held[other] = b.held[s];
                break;
            case 3: take_back(&b, s, &random); break;
            default: take_step(&b, &random); break;
            }
            check_all(&b);
            check_pages(&b);
        }
        for (int64_t s = 0; s < SEQUENCES; s++) {
            assert_int_equal(quern_ledger_reset(b.ledger, s), QUERN_OK);
            b.length[s] = 0;
        }
        check_pages(&b); /* all are free */
        books_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(any_order_of_calls_keeps_every_row)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
