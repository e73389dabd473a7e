/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_faults_test.c - stages report faults of data by kind, tensor and flat index, and write nothing. */
#include "cmocka_c11.h"

#include "cpu/cpu.h"

#include <math.h>
#include <string.h>

enum { ROWS = 3, COLUMNS = 32, BLOCKS = COLUMNS / 16 };

static stage_fault fault;
static const stage_exec exec = {.threads = 2, .cpu_level = QUERN_CPU_LEVEL_PORTABLE, .fault = &fault};

static quern_tensor view(void *data, quern_dtype dtype, int64_t rows, int64_t columns)
{
    return quern_tensor_contiguous(data, dtype, 2, (const int64_t[]){rows, columns});
}

static quern_tensor list(int32_t *data, int64_t count)
{
    return quern_tensor_contiguous(data, QUERN_I32, 1, &count);
}

static void expect(quern_status status, int32_t kind, const quern_tensor *tensor, int64_t index)
{
    assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(fault.kind, kind);
    assert_ptr_equal(fault.tensor, tensor);
    assert_int_equal(fault.index, index);
    fault = (stage_fault){0};
}

static void permutations(void **state)
{
    static float x[ROWS][COLUMNS], out[2 * ROWS][COLUMNS];
    static const int32_t bad[] = {-1, 2 * ROWS};
    (void)state;
    for (int i = 0; i < 2; i++) {
        int32_t slots[2 * ROWS] = {5, 0, 3, 1, 2, 4};
        slots[4] = bad[i];
        const permute_args args = {.per = 2,
                                   .x = view(x, QUERN_F32, ROWS, COLUMNS),
                                   .permutation = list(slots, 2 * ROWS),
                                   .out = view(out, QUERN_F32, 2 * ROWS, COLUMNS)};
        memset(out, 0x5a, sizeof out);
        expect(quern_backend_cpu.permute.run(&exec, &args, NULL), QUERN_STATUS_BAD_ID, &args.permutation, 4);
        for (size_t b = 0; b < sizeof out; b++) assert_int_equal(((const char *)out)[b], 0x5a);
    }
}

static void codes(void **state)
{
    static uint8_t packed[ROWS][COLUMNS / 2], scales[ROWS][BLOCKS];
    static float global[1], out[ROWS][COLUMNS];
    int32_t ends[] = {1, ROWS};
    dequantise_args args = {.codes = view(packed, QUERN_U8, ROWS, COLUMNS / 2),
                            .scales = view(scales, QUERN_U8, ROWS, BLOCKS),
                            .global = view(global, QUERN_F32, 1, 1),
                            .offsets = list(ends, 2),
                            .out = view(out, QUERN_F32, ROWS, COLUMNS)};
    (void)state;
    memset(out, 0x5a, sizeof out);
    scales[2][1] = 0x7f;
    global[0] = 1;
    expect(quern_backend_cpu.dequantise.run(&exec, &args, NULL), QUERN_STATUS_BAD_SCALE, &args.scales, 5);
    static const float bad[] = {0, -1, INFINITY, NAN};
    for (int i = 0; i < 4; i++) {
        global[0] = bad[i];
        expect(quern_backend_cpu.dequantise.run(&exec, &args, NULL), QUERN_STATUS_BAD_GLOBAL, &args.global,
               0);
    }
    for (int i = 0; i < 2; i++) {
        ends[1] = i == 0 ? 0 : ROWS + 1;
        expect(quern_backend_cpu.dequantise.run(&exec, &args, NULL), QUERN_STATUS_BAD_OFFSETS, &args.offsets,
               1);
    }
    for (size_t b = 0; b < sizeof out; b++) assert_int_equal(((const char *)out)[b], 0x5a);
}

static void values(void **state)
{
    static float x[ROWS][COLUMNS], global[1];
    static uint8_t packed[ROWS][COLUMNS / 2], scales[ROWS][BLOCKS], workspace[1 << 12];
    const quantise_args args = {.x = view(x, QUERN_F32, ROWS, COLUMNS),
                                .codes = view(packed, QUERN_U8, ROWS, COLUMNS / 2),
                                .scales = view(scales, QUERN_U8, ROWS, BLOCKS),
                                .global = view(global, QUERN_F32, 1, 1)};
    (void)state;
    assert_true(quern_backend_cpu.quantise.workspace(&exec, &args) <= sizeof workspace);
    memset(packed, 0x5a, sizeof packed);
    x[2][30] = NAN;
    x[1][7] = INFINITY;
    expect(quern_backend_cpu.quantise.run(&exec, &args, workspace), QUERN_STATUS_NOT_FINITE, &args.x,
           COLUMNS + 7);
    for (size_t b = 0; b < sizeof packed; b++) assert_int_equal(((const uint8_t *)packed)[b], 0x5a);
}

/* ---- integers by which a stage finds its rows ---- */

typedef quern_status stage_run(const void *args);

/* Sets element `index` of `tensor`, one of the stage's views, to each value in turn: the stage reports it. It
 * takes the value that was there. */
static void spoil(stage_run *run, const void *args, const quern_tensor *tensor, int32_t kind, int64_t index,
                  const int32_t *values, int count)
{
    int32_t *at = (int32_t *)tensor->data + index, good = *at;
    if (run(args) != QUERN_OK) fail_msg("a stage refuses good data: kind %d", fault.kind);
    for (int i = 0; i < count; i++) {
        *at = values[i];
        expect(run(args), kind, tensor, index);
    }
    *at = good;
}
#define SPOIL(stage, args, tensor, kind, index, ...)                                                         \
    spoil(run_##stage, args, tensor, kind, index, (const int32_t[]){__VA_ARGS__},                            \
          (int)(sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t)))

enum { T = 6, D = 16, MANY = 1 << 16 };
static float memory[MANY], results[MANY];
static char space[1 << 22] __attribute__((aligned(64)));

#define RUN(stage)                                                                                           \
    static quern_status run_##stage(const void *args)                                                        \
    {                                                                                                        \
        if (quern_backend_cpu.stage.workspace != NULL)                                                       \
            assert_true(quern_backend_cpu.stage.workspace(&exec, args) <= sizeof space);                     \
        return quern_backend_cpu.stage.run(&exec, args, space);                                              \
    }
RUN(attend_forward)
RUN(compress_forward)
RUN(gate_forward)
RUN(convert)
RUN(validate_lists)
RUN(block_index)
RUN(attend_mqa_forward)
RUN(indexer)
RUN(pool_forward)
RUN(store_rows)
RUN(norm_rope_forward)
RUN(swizzle)
RUN(combine)
RUN(expert_sums)
RUN(grouped_dense)
RUN(copy_pages)
RUN(pack_rows)
RUN(cache_copy)
RUN(decode)
RUN(widen_blocks)

/* [1, rows, heads, D] */
static quern_tensor rows4(int64_t rows, int64_t heads)
{
    return quern_tensor_contiguous(memory, QUERN_F32, 4, (const int64_t[]){1, rows, heads, D});
}

static quern_tensor out4(int64_t rows, int64_t heads)
{
    quern_tensor t = rows4(rows, heads);
    t.data = results;
    return t;
}

static quern_tensor view3(void *data, quern_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    return quern_tensor_contiguous(data, dtype, 3, (const int64_t[]){a, b, c});
}

static void offsets_of_sequences(void **state)
{
    int32_t cu[] = {0, 2, T}, keys[] = {0, 4, T};
    (void)state;
    attend_args a = {.seqs = {2, T, T, list(cu, 3), list(keys, 3)},
                     .mask = ATTEND_RANGE,
                     .scale = 1,
                     .tile = 1,
                     .q = rows4(T, 2),
                     .k = rows4(T, 1),
                     .v = rows4(T, 1),
                     .o = out4(T, 2)};
    SPOIL(attend_forward, &a, &a.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 0, -1, 1, INT32_MAX);
    SPOIL(attend_forward, &a, &a.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1, -1, INT32_MIN, INT32_MAX);
    SPOIL(attend_forward, &a, &a.seqs.cu_kv, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 3, INT32_MAX);
    const gate_args g = {.seqs = {2, T, T, list(cu, 3), {0}}, .o_b = {rows4(T, 2)}, .o = out4(T, 2)};
    SPOIL(gate_forward, &g, &g.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1);
    const convert_args c = {.seqs = {2, T, T, list(cu, 3), {0}}, .in = rows4(T, 2), .out = out4(T, 2)};
    SPOIL(convert, &c, &c.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1);
    int32_t made[3];
    const compress_args m = {.seqs = {2, T, T, list(cu, 3), list(made, 3)},
                             .block_size = 2,
                             .stride = 2,
                             .k = rows4(T, 1),
                             .v = rows4(T, 1),
                             .k_cmp = out4(3, 1),
                             .v_cmp = out4(3, 1)};
    SPOIL(compress_forward, &m, &m.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1);
    int32_t blocks[2 * T];
    const block_index_args b = {
        .seqs = {2, T, T, list(cu, 3), list(keys, 3)},
        .rule = {.block_size = 2, .k = 1},
        .q = rows4(T, 1),
        .keys = rows4(T, 1),
        .blocks = quern_tensor_contiguous(blocks, QUERN_I32, 4, (const int64_t[]){1, 1, T, 1})};
    SPOIL(block_index, &b, &b.seqs.cu_kv, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 3);
    int32_t entries[] = {0, 1, 3};
    const validate_lists_args v = {
        .seqs = {2, T, 3, list(cu, 3), list(entries, 3)}, .tile = 1, .block_size = 2, .stride = 2};
    SPOIL(validate_lists, &v, &v.seqs.cu_q, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1);
    SPOIL(validate_lists, &v, &v.seqs.cu_kv, QUERN_STATUS_BAD_OFFSETS, 2, 4, 2);
}

static void key_ranges(void **state)
{
    int32_t first[] = {0, 1}, end[] = {T, 4};
    const int64_t batch[] = {2, T, 1, D};
    const quern_tensor x = quern_tensor_contiguous(memory, QUERN_F32, 4, batch);
    quern_tensor o = x;
    (void)state;
    o.data = results;
    const attend_args a = {.seqs = {2, T, T, {0}, {0}},
                           .mask = ATTEND_RANGE,
                           .scale = 1,
                           .tile = 1,
                           .kv_first = list(first, 2),
                           .kv_count = list(end, 2),
                           .q = x,
                           .k = x,
                           .v = x,
                           .o = o};
    SPOIL(attend_forward, &a, &a.kv_first, QUERN_STATUS_BAD_POSITION, 1, -1, 5, INT32_MIN, INT32_MAX);
    SPOIL(attend_forward, &a, &a.kv_count, QUERN_STATUS_BAD_POSITION, 1, -1, T + 1, INT32_MAX);
}

static void positions_and_pages(void **state)
{
    enum { PAGES = 3, PAGE = 4 };
    int32_t start[] = {5}, table[] = {2, 0, 1}, found[4], count[1];
    (void)state;
    const attend_mqa_args a = {.seqs = {1, 1, 0, {0}, {0}},
                               .window = 4,
                               .ratio = 2,
                               .scale = 1,
                               .page = PAGE,
                               .positions = list(start, 1),
                               .kv_table =
                                   quern_tensor_contiguous(table, QUERN_I32, 2, (const int64_t[]){1, 3}),
                               .q = rows4(1, 2),
                               .kv = view3(memory, QUERN_F32, PAGES, PAGE, D),
                               .o = out4(1, 2),
                               .lse = view3(results + MANY / 2, QUERN_F32, 1, 2, 1)};
    SPOIL(attend_mqa_forward, &a, &a.positions, QUERN_STATUS_BAD_POSITION, 0, -1, INT32_MIN);
    SPOIL(attend_mqa_forward, &a, &a.kv_table, QUERN_STATUS_BAD_PAGE, 1, -1, PAGES, INT32_MAX);
    const indexer_args i = {.ratio = 2,
                            .page = PAGE,
                            .scale = 1,
                            .positions = list(start, 1),
                            .table = quern_tensor_contiguous(table, QUERN_I32, 2, (const int64_t[]){1, 1}),
                            .q = rows4(1, 2),
                            .keys = view3(memory, QUERN_F32, PAGES, PAGE, D),
                            .w = view3(memory, QUERN_F32, 1, 1, 2),
                            .idx = view3(found, QUERN_I32, 1, 1, 4),
                            .count = view(count, QUERN_I32, 1, 1)};
    SPOIL(indexer, &i, &i.positions, QUERN_STATUS_BAD_POSITION, 0, -1, INT32_MIN);
    SPOIL(indexer, &i, &i.table, QUERN_STATUS_BAD_PAGE, 0, -1, PAGES);
    int32_t slots[] = {-1, 7};
    const store_rows_args s = {
        .x = view(memory, QUERN_F32, 2, D), .slots = list(slots, 2), .cache = view(results, QUERN_F32, 8, D)};
    SPOIL(store_rows, &s, &s.slots, QUERN_STATUS_BAD_POSITION, 1, -2, 8, INT32_MAX, INT32_MIN);
    int32_t at[] = {0, 1, 2, 3, 0, 1};
    const norm_rope_args n = {.positions = list(at, T),
                              .x = rows4(T, 1),
                              .cos_sin = view(memory, QUERN_F32, 4, 8),
                              .out = out4(T, 1)};
    SPOIL(norm_rope_forward, &n, &n.positions, QUERN_STATUS_BAD_POSITION, 3, -1, 4, INT32_MAX);
}

static void pooled_sequences(void **state)
{
    int32_t cu[] = {0, 2, T}, starts[] = {0, 0}, positions[] = {0, 2}, blocks[] = {1, 2};
    (void)state;
    const pool_args p = {.ratio = 2,
                         .width = D,
                         .batch = 2,
                         .cu_seqlens = list(cu, 3),
                         .start_tokens = list(starts, 2),
                         .start_positions = list(positions, 2),
                         .block_counts = list(blocks, 2),
                         .proj = view3(memory, QUERN_F32, 1, T, 2 * D),
                         .bias_a = view(memory, QUERN_F32, 2, D),
                         .entry = {.cos_sin = view(memory, QUERN_F32, 8, 8)},
                         .out = view3(results, QUERN_F32, 1, 3, D)};
    SPOIL(pool_forward, &p, &p.cu_seqlens, QUERN_STATUS_BAD_OFFSETS, 2, T + 1, 1);
    SPOIL(pool_forward, &p, &p.start_tokens, QUERN_STATUS_BAD_POSITION, 1, -1, 5, INT32_MIN);
    SPOIL(pool_forward, &p, &p.block_counts, QUERN_STATUS_BAD_POSITION, 1, -1, 3, INT32_MAX);
    SPOIL(pool_forward, &p, &p.start_positions, QUERN_STATUS_BAD_POSITION, 1, -2, 3, 6, INT32_MAX);
}

static void rows_of_experts(void **state)
{
    int32_t tokens[] = {3, 2}, ends[] = {2, T}, slots[] = {2, 0, 1, 5, 4, 3};
    static uint8_t linear[T * 4], tiles[2 * 512];
    (void)state;
    const swizzle_args s = {.linear = view(linear, QUERN_U8, T, 4),
                            .swizzled = quern_tensor_contiguous(tiles, QUERN_U8, 1, (const int64_t[]){1024}),
                            .tokens = list(tokens, 2)};
    SPOIL(swizzle, &s, &s.tokens, QUERN_STATUS_BAD_OFFSETS, 1, -1, 4, INT32_MAX, INT32_MIN);
    const grouped_dense_args g = {.a = view(memory, QUERN_F32, T, D),
                                  .b = view3(memory, QUERN_F32, 2, D, D),
                                  .offsets = list(ends, 2),
                                  .c = view(results, QUERN_F32, T, D)};
    SPOIL(grouped_dense, &g, &g.offsets, QUERN_STATUS_BAD_OFFSETS, 1, 1, T + 1, -1, INT32_MAX);
    const combine_args c = {.per = 2,
                            .y = view(memory, QUERN_F32, T, D),
                            .permutation = list(slots, T),
                            .out = view(results, QUERN_F32, T / 2, D)};
    SPOIL(combine, &c, &c.permutation, QUERN_STATUS_BAD_ID, 5, -1, T, 0, INT32_MAX);
    const expert_sums_args e = {.x = view(memory, QUERN_F32, T, D),
                                .offsets = list(ends, 2),
                                .permutation = list(slots, T),
                                .weights = view(memory, QUERN_F32, T / 2, 2),
                                .sums = view(results, QUERN_F32, 2, D)};
    SPOIL(expert_sums, &e, &e.offsets, QUERN_STATUS_BAD_OFFSETS, 1, 1, T + 1, INT32_MIN);
    SPOIL(expert_sums, &e, &e.permutation, QUERN_STATUS_BAD_ID, 2, -1, T, INT32_MAX);
}

static void scales_of_blocks(void **state)
{
    static uint8_t e4m3[4 * 8], scale[1] = {127};
    const widen_blocks_args w = {.codes = view(e4m3, QUERN_U8, 4, 8),
                                 .scales = view(scale, QUERN_U8, 1, 1),
                                 .out = view(results, QUERN_F32, 8, 4)};
    (void)state;
    assert_int_equal(run_widen_blocks(&w), QUERN_OK);
    scale[0] = 0xFF;
    expect(run_widen_blocks(&w), QUERN_STATUS_BAD_SCALE, &w.scales, 0);
}

static void steps_and_their_pages(void **state)
{
    enum { PAGES = 3, COLUMNS_ = 2 };
    int32_t slots[] = {0, 1}, positions[] = {70, 3}, cu[] = {0, 1, 3}, table[] = {2, 0, 1, 1},
            copies[] = {0, 1, 2};
    static float pages[PAGES * CACHE_BLOCK * 2 * D];
    const stage_step step = {list(slots, 2),
                             list(positions, 2),
                             {.data = cu, .dtype = QUERN_I32, .ndim = 2, .shape = {2, 2}, .strides = {1, 1}}};
    const cache_plane plane = {.blocks = view3(pages, QUERN_F32, PAGES, 1, CACHE_BLOCK * 2 * D),
                               .table = view(table, QUERN_I32, 2, COLUMNS_),
                               .dim = D,
                               .dim_v = D};
    const cache_copy_args c = {.plane = plane, .step = step, .k = rows4(3, 1), .v = rows4(3, 1)};
    const decode_args d = {.tokens = plane,
                           .step = step,
                           .capacity = COLUMNS_ * CACHE_BLOCK,
                           .scale = 1,
                           .q = rows4(3, 1),
                           .o = out4(3, 1)};
    (void)state;
    SPOIL(cache_copy, &c, &c.plane.table, QUERN_STATUS_BAD_PAGE, 1, -1, PAGES, INT32_MAX);
    SPOIL(cache_copy, &c, &c.step.positions, QUERN_STATUS_BAD_POSITION, 0, -1, INT32_MIN, 128, INT32_MAX);
    SPOIL(decode, &d, &d.tokens.table, QUERN_STATUS_BAD_PAGE, 2, -1, PAGES, INT32_MIN);
    SPOIL(decode, &d, &d.step.positions, QUERN_STATUS_BAD_POSITION, 1, -1, INT32_MAX);
    SPOIL(decode, &d, &d.step.rows, QUERN_STATUS_BAD_OFFSETS, 0, 1, -1);
    cu[2] = 4;
    expect(run_decode(&d), QUERN_STATUS_BAD_OFFSETS, &d.step.rows, 3);
    cu[2] = 3;
    const copy_pages_args p = {.copies = view(copies, QUERN_I32, 1, 3), .pages = plane.blocks};
    SPOIL(copy_pages, &p, &p.copies, QUERN_STATUS_BAD_PAGE, 1, -1, PAGES);
    SPOIL(copy_pages, &p, &p.copies, QUERN_STATUS_BAD_PAGE, 2, -1, PAGES, INT32_MAX);
    const pack_rows_args r = {.page = CACHE_BLOCK,
                              .parts = 1,
                              .data = D * sizeof(float),
                              .scales = D * sizeof(float),
                              .count = 70,
                              .table = list(table, 4),
                              .pages = plane.blocks,
                              .packed = list((int32_t *)(void *)results, sizeof results / 4)};
    SPOIL(pack_rows, &r, &r.table, QUERN_STATUS_BAD_PAGE, 1, -1, PAGES, INT32_MIN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(permutations),     cmocka_unit_test(codes),
        cmocka_unit_test(values),           cmocka_unit_test(offsets_of_sequences),
        cmocka_unit_test(key_ranges),       cmocka_unit_test(positions_and_pages),
        cmocka_unit_test(pooled_sequences), cmocka_unit_test(rows_of_experts),
        cmocka_unit_test(scales_of_blocks), cmocka_unit_test(steps_and_their_pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
