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

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(permutations), cmocka_unit_test(codes),
                                       cmocka_unit_test(values)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
