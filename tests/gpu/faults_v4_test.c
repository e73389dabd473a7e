/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults_v4_test.c - faults in the data of DeepSeek-V4's compressors, indexer and stores on device memory:
 * each sets its bit of the status word and has the result that cuda.h says; other sequences keep their bits.
 * Of many rows for one slot the last stays. */
#include "cmocka_c11.h"
#include "faults_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/cuda.h>
#include <quern/dsv4.h>

enum { SEQUENCES = 3, TOKENS = 48, C = 64, R = 4, ENTRIES = TOKENS / R, POSITIONS = 64, BYTES = C + 4 };

/* A varlen call of CSA, in rows of floats or in FP8. */
typedef struct compress_call {
    int32_t cu[SEQUENCES + 1], starts[SEQUENCES], positions[SEQUENCES], counts[SEQUENCES];
    float proj[TOKENS * 4 * C];
    bool bytes;
} compress_call;

static compress_call good_call(bool bytes)
{
    compress_call c = {.cu = {0, 16, 32, TOKENS}, .counts = {4, 4, 4}, .bytes = bytes};
    for (int i = 0; i < TOKENS * 4 * C; i++) c.proj[i] = (float)(i * 37 % 101 - 50) * 0.03f;
    return c;
}

typedef union compressed {
    float rows[ENTRIES * C];
    unsigned char bytes[ENTRIES * BYTES];
} compressed;

static compressed compress(const compress_call *c)
{
    static const int64_t proj_shape[] = {TOKENS, 4 * C}, bias_shape[] = {R, C},
                         table_shape[] = {POSITIONS, 2}, out_shape[] = {ENTRIES, C},
                         bytes_shape[] = {ENTRIES, BYTES}, cu_shape = SEQUENCES + 1, each = SEQUENCES;
    compressed out;
    float bias[R * C] = {0}, table[POSITIONS * 2];
    memset(&out, 0xA5, sizeof out);
    for (int i = 0; i < POSITIONS * 2; i++) table[i] = i % 2 ? 0.6f : 0.8f;
    const quern_tensor proj = on_device(c->proj, QUERN_F32, 2, proj_shape),
                       b = on_device(bias, QUERN_F32, 2, bias_shape),
                       cos_sin = on_device(table, QUERN_F32, 2, table_shape),
                       cu = on_device(c->cu, QUERN_I32, 1, &cu_shape),
                       starts = on_device(c->starts, QUERN_I32, 1, &each),
                       positions = on_device(c->positions, QUERN_I32, 1, &each),
                       counts = on_device(c->counts, QUERN_I32, 1, &each),
                       to = c->bytes ? on_device(out.bytes, QUERN_U8, 2, bytes_shape)
                                     : on_device(out.rows, QUERN_F32, 2, out_shape);
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    p.format = c->bytes ? QUERN_DSV4_FP8 : QUERN_DSV4_ROWS;
    t.proj = &proj;
    t.b_a = t.b_b = &b;
    t.cos_sin = &cos_sin;
    t.cu_seqlens = &cu;
    t.start_tokens = &starts;
    t.start_positions = &positions;
    t.block_counts = &counts;
    t.out = &to;
    OK(quern_dsv4_compress_workspace(ctx, &p, &t, &bytes));
    OK(quern_dsv4_compress(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(&out, &to, c->bytes ? sizeof out.bytes : sizeof out.rows);
    return out;
}

static bool same_entries(const compressed *a, const compressed *b, int first, int end)
{
    return memcmp(a->rows + first * C, b->rows + first * C, (size_t)((end - first) * C) * sizeof(float)) == 0;
}

static void check_zero(const compressed *a, int first, int end)
{
    for (int i = first * C; i < end * C; i++) assert_true(a->rows[i] == 0.0f);
}

/* The second of three sequences is at fault: its entries are 0, the others' are what they were. */
static void starts_counts_and_positions(void **unused)
{
    (void)unused;
    const compress_call good = good_call(false);
    const compressed expected = compress(&good);
    assert_int_equal(faults(), 0);
    for (int which = 0; which < 7; which++) {
        compress_call c = good;
        if (which == 0) c.starts[1] = -1;
        if (which == 1) c.starts[1] = 17;
        if (which == 2) c.counts[1] = 5;
        if (which == 3) c.counts[1] = -1;
        if (which == 4) c.positions[1] = -R;
        if (which == 5) c.positions[1] = R + 1;
        if (which == 6) c.positions[1] = POSITIONS;
        const compressed out = compress(&c);
        assert_int_equal(faults(), QUERN_STATUS_BAD_POSITION);
        assert_true(same_entries(&out, &expected, 0, 4) && same_entries(&out, &expected, 8, ENTRIES));
        check_zero(&out, 4, 8);
    }
    compress_call c = good; /* the last two entries are past the table */
    c.positions[1] = POSITIONS - 2 * R;
    const compressed out = compress(&c);
    assert_int_equal(faults(), QUERN_STATUS_BAD_POSITION);
    assert_true(same_entries(&out, &expected, 0, 4) && same_entries(&out, &expected, 8, ENTRIES));
    check_zero(&out, 6, 8);
}

static void offsets(void **unused)
{
    (void)unused;
    static const int32_t bad[][SEQUENCES + 1] = {
        {4, 16, 32, TOKENS}, {0, 16, 32, TOKENS + 1}, {0, 32, 16, TOKENS}, {0, -5, 32, TOKENS}};
    for (int i = 0; i < 4; i++) {
        compress_call c = good_call(false);
        memcpy(c.cu, bad[i], sizeof c.cu);
        memset(c.counts, 0, sizeof c.counts);
        (void)compress(&c);
        assert_true((faults() & QUERN_STATUS_BAD_OFFSETS) != 0);
    }
}

/* A NaN in the rows of an entry: its channel counts as 0, other entries keep their bytes. */
static void not_finite_entries(void **unused)
{
    (void)unused;
    const compress_call good = good_call(true);
    const compressed expected = compress(&good);
    assert_int_equal(faults(), 0);
    compress_call c = good;
    c.proj[(5 * R + 1) * 4 * C + 7] = NAN; /* value of series a, block 1 of the second sequence */
    const compressed out = compress(&c);
    assert_int_equal(faults(), QUERN_STATUS_NOT_FINITE);
    for (int e = 0; e < ENTRIES; e++)
        assert_int_equal(memcmp(out.bytes + e * BYTES, expected.bytes + e * BYTES, BYTES) == 0, e != 5);
    assert_int_equal(out.bytes[5 * BYTES + 7], 0);
}

enum { WIDTH = 32, SLOTS = 50, MANY = 3000 };

static void store(const float *x, const int32_t *slots, int64_t rows, float *cache)
{
    const int64_t x_shape[] = {rows, WIDTH}, cache_shape[] = {SLOTS, WIDTH};
    const quern_tensor from = on_device(x, QUERN_F32, 2, x_shape),
                       list = on_device(slots, QUERN_I32, 1, &rows),
                       to = on_device(cache, QUERN_F32, 2, cache_shape);
    const quern_dsv4_store_params p = QUERN_DSV4_STORE_PARAMS_INIT;
    quern_dsv4_store_tensors t = QUERN_DSV4_STORE_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    t.x = &from;
    t.slots = &list;
    t.cache = &to;
    OK(quern_dsv4_store_workspace(ctx, &p, &t, &bytes));
    OK(quern_dsv4_store(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(cache, &to, SLOTS * WIDTH * sizeof(float));
}

/* By a scan and by a table of slots. */
static void last_row_of_a_slot(void **unused)
{
    (void)unused;
    static const int64_t counts[] = {1000, MANY};
    float *x = malloc(sizeof(float) * MANY * WIDTH);
    static float cache[SLOTS * WIDTH], expected[SLOTS * WIDTH];
    static int32_t slots[MANY];
    for (int which = 0; which < 2; which++) {
        const int64_t rows = counts[which];
        for (int i = 0; i < SLOTS * WIDTH; i++) cache[i] = expected[i] = -1.0f;
        for (int i = 0; i < rows; i++) {
            slots[i] = i == 7 ? SLOTS : i == 9 ? -2 : i % 11 == 3 ? -1 : (i * 29 + i / 50) % (SLOTS - 1);
            for (int c = 0; c < WIDTH; c++) x[i * WIDTH + c] = (float)(i * WIDTH + c);
            if (slots[i] >= 0 && slots[i] < SLOTS)
                memcpy(expected + slots[i] * WIDTH, x + i * WIDTH, WIDTH * sizeof(float));
        }
        store(x, slots, rows, cache);
        assert_int_equal(faults(), QUERN_STATUS_BAD_POSITION);
        assert_memory_equal(cache, expected, sizeof cache);
    }
    free(x);
}

enum { CHOSEN = 8, PAGE = 16, COLUMNS = 4, PAGES = 14, STORED = COLUMNS * PAGE, RATIO = 4, QUERIES = 3 };

/* The indexer on three sequences in pages, of FP4 keys or of bf16. */
typedef struct index_call {
    int32_t starts[SEQUENCES], table[SEQUENCES * COLUMNS];
    int64_t heads, width;
    int32_t bad_scale; /* the slot of the pool of which a scale byte is 0xFF; -1: none */
    bool fp4;
} index_call;

static index_call good_index(int64_t heads, int64_t width, bool fp4)
{
    index_call c = {.starts = {200, 100, 250}, .heads = heads, .width = width, .bad_scale = -1, .fp4 = fp4};
    for (int i = 0; i < SEQUENCES * COLUMNS; i++) c.table[i] = (i * 5 + 1) % PAGES;
    return c;
}

typedef struct index_result {
    int32_t idx[SEQUENCES * QUERIES * CHOSEN], count[SEQUENCES * QUERIES];
} index_result;

/* Pages of codes, then of scales, all of them 1. */
static void fill_fp4(unsigned char *keys, const index_call *c)
{
    const int64_t data = c->width / 2, scales = c->width / 32, row = data + scales;
    for (int64_t page = 0; page < PAGES; page++) {
        unsigned char *at = keys + page * PAGE * row;
        for (int64_t i = 0; i < PAGE * data; i++) at[i] = (unsigned char)((page * 31 + i * 73) % 251);
        memset(at + PAGE * data, 127, (size_t)(PAGE * scales));
        if (c->bad_scale / PAGE == page) at[PAGE * data + c->bad_scale % PAGE * scales + scales - 1] = 0xFF;
    }
}

static index_result choose(const index_call *c)
{
    const int64_t row = c->fp4 ? c->width / 2 + c->width / 32 : c->width, tokens = SEQUENCES * QUERIES,
                  q_shape[] = {SEQUENCES, QUERIES, c->heads, c->width},
                  w_shape[] = {SEQUENCES, QUERIES, c->heads}, rows_shape[] = {PAGES, PAGE, row},
                  bytes_shape[] = {PAGES, PAGE * row}, table_shape[] = {SEQUENCES, COLUMNS}, each = SEQUENCES,
                  idx_shape[] = {SEQUENCES, QUERIES, CHOSEN}, count_shape[] = {SEQUENCES, QUERIES};
    uint16_t *q = malloc(sizeof *q * (size_t)(tokens * c->heads * c->width)),
             *keys = malloc(sizeof *keys * (size_t)(PAGES * PAGE * row));
    float *w = malloc(sizeof *w * (size_t)(tokens * c->heads));
    index_result out;
    memset(&out, 0xA5, sizeof out);
    for (int64_t i = 0; i < tokens * c->heads * c->width; i++) q[i] = (uint16_t)(0x3F00 + i * 37 % 128);
    for (int64_t i = 0; i < PAGES * PAGE * row; i++) keys[i] = (uint16_t)(0x3F00 + i * 53 % 128);
    for (int64_t i = 0; i < tokens * c->heads; i++) w[i] = 1.0f + (float)(i % 5);
    if (c->fp4) fill_fp4((unsigned char *)keys, c);
    const quern_tensor queries = on_device(q, QUERN_BF16, 4, q_shape),
                       weights = on_device(w, QUERN_F32, 3, w_shape),
                       k = c->fp4 ? on_device(keys, QUERN_U8, 2, bytes_shape)
                                  : on_device(keys, QUERN_BF16, 3, rows_shape),
                       starts = on_device(c->starts, QUERN_I32, 1, &each),
                       table = on_device(c->table, QUERN_I32, 2, table_shape),
                       idx = on_device(out.idx, QUERN_I32, 3, idx_shape),
                       count = on_device(out.count, QUERN_I32, 2, count_shape);
    quern_dsv4_index_params p = QUERN_DSV4_INDEX_PARAMS_INIT;
    quern_dsv4_index_tensors t = QUERN_DSV4_INDEX_TENSORS_INIT;
    const quern_exec exec = with_status();
    size_t bytes;
    p.ratio = RATIO;
    p.top_k = CHOSEN;
    p.page = PAGE;
    p.key_format = c->fp4 ? QUERN_DSV4_FP4 : QUERN_DSV4_ROWS;
    t.q = &queries;
    t.k = &k;
    t.w = &weights;
    t.start_positions = &starts;
    t.k_table = &table;
    t.idx = &idx;
    t.count = &count;
    OK(quern_dsv4_index_workspace(ctx, &p, &t, &bytes));
    OK(quern_dsv4_index(ctx, &exec, &p, &t, workspace_of(bytes), bytes));
    to_host(out.idx, &idx, sizeof out.idx);
    to_host(out.count, &count, sizeof out.count);
    free(q);
    free(keys);
    free(w);
    return out;
}

static bool same_lists(const index_result *a, const index_result *b, int sequence)
{
    const int lists = sequence * QUERIES;
    return memcmp(a->idx + lists * CHOSEN, b->idx + lists * CHOSEN, sizeof(int32_t) * QUERIES * CHOSEN) ==
               0 &&
           memcmp(a->count + lists, b->count + lists, sizeof(int32_t) * QUERIES) == 0;
}

/* The second of three sequences is at fault; the others' lists are what they were. No list has an entry of a
 * page that is none. */
static void indexer_of(int64_t heads, int64_t width, bool fp4)
{
    const index_call good = good_index(heads, width, fp4);
    const index_result expected = choose(&good);
    assert_int_equal(faults(), 0);
    for (int which = 0; which < 4; which++) {
        index_call c = good;
        if (which == 0) c.starts[1] = -1;
        if (which == 1) c.table[COLUMNS + 1] = PAGES;
        if (which == 2) c.table[COLUMNS + 1] = -7;
        if (which == 3) c.starts[1] = (STORED + 1) * RATIO; /* past the table's columns */
        const index_result out = choose(&c);
        assert_int_equal(faults(), which == 0 ? QUERN_STATUS_BAD_POSITION : QUERN_STATUS_BAD_PAGE);
        assert_true(same_lists(&out, &expected, 0) && same_lists(&out, &expected, 2));
        for (int i = QUERIES; i < 2 * QUERIES; i++) {
            assert_true(out.count[i] == (which == 0 ? 0 : CHOSEN));
            for (int j = 0; which != 3 && j < CHOSEN; j++) {
                const int32_t entry = out.idx[i * CHOSEN + j];
                if (which == 0) assert_int_equal(entry, -1);
                else assert_true(entry >= 0 && entry / PAGE != 1);
            }
        }
    }
    index_call c = good; /* a page that no query needs */
    c.table[COLUMNS + 3] = PAGES;
    const index_result out = choose(&c);
    assert_int_equal(faults(), 0);
    assert_memory_equal(&out, &expected, sizeof out);
}

static void indexer_bad_scales(int64_t heads, int64_t width)
{
    index_call c = good_index(heads, width, true);
    const index_result expected = choose(&c);
    c.bad_scale = c.table[COLUMNS] * PAGE + 3; /* entry 3 of the second sequence: the last of all scores */
    const index_result out = choose(&c);
    assert_int_equal(faults(), QUERN_STATUS_BAD_SCALE);
    assert_true(same_lists(&out, &expected, 0) && same_lists(&out, &expected, 2));
    for (int i = QUERIES * CHOSEN; i < 2 * QUERIES * CHOSEN; i++) assert_true(out.idx[i] != 3);
}

/* By any GPU's kernel and by Hopper's. */
static void indexer(void **unused)
{
    (void)unused;
    for (int fp4 = 0; fp4 < 2; fp4++) {
        indexer_of(16, 64, fp4 != 0);
        indexer_of(64, 128, fp4 != 0);
    }
    indexer_bad_scales(16, 64);
    indexer_bad_scales(64, 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(starts_counts_and_positions),
        cmocka_unit_test(offsets),
        cmocka_unit_test(not_finite_entries),
        cmocka_unit_test(last_row_of_a_slot),
        cmocka_unit_test(indexer),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
