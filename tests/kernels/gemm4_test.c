/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm4_test.c - the tile kernels of products with NVFP4 weights at every level: decoding and integer sums
 * are exact. */
#include "cmocka_c11.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/gemm4/gemm4_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "oracle/nvfp4.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { UNITS_MOST = 4, DEPTH_MOST = UNITS_MOST * GEMM4_UNIT };

typedef struct kernel_test {
    void (*run)(const gemm4_kernels *kernels, test_random *random);
} kernel_test;

static test_tensor bytes_of(test_random *random, int64_t bytes, test_layout layout)
{
    return test_tensor_make(random, QUERN_U8, 1, &bytes, layout);
}

static test_tensor floats_of(test_random *random, int64_t count)
{
    return test_tensor_make(random, QUERN_F32, 1, &count, TEST_UNALIGNED);
}

/* Units of random codes and scales, all bytes that a scale may be. */
static test_tensor random_units(test_random *random, int64_t units)
{
    test_tensor t = bytes_of(random, units * GEMM4_UNIT_BYTES, TEST_UNALIGNED);
    uint8_t *p = t.view.data;
    for (int64_t i = 0; i < units * GEMM4_UNIT_BYTES; i++)
        p[i] =
            (uint8_t)(i % GEMM4_STRIP_BYTES < 64 ? gemm4_scale_byte((uint8_t)test_random_int(random, 0, 126))
                                                 : test_random_int(random, 0, 255));
    return t;
}

/* The code and the scale byte of (k, column), by the layout that gemm4_kernels.h describes. */
static int code_at(const test_tensor *units, int64_t k, int64_t column)
{
    static const int nibble_of_k[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    const uint8_t *strip =
        (const uint8_t *)units->view.data + k / 64 * GEMM4_UNIT_BYTES + column / 16 * GEMM4_STRIP_BYTES;
    const int nibble = nibble_of_k[k % 8];
    const uint8_t *word = strip + 64 + k % 64 / 8 * 64 + column % 16 * 4;
    return word[nibble / 2] >> 4 * (nibble % 2) & 15;
}

static int scale_at(const test_tensor *units, int64_t k, int64_t column)
{
    const uint8_t *strip =
        (const uint8_t *)units->view.data + k / 64 * GEMM4_UNIT_BYTES + column / 16 * GEMM4_STRIP_BYTES;
    return gemm4_e4m3_byte(strip[k % 64 / 16 * 16 + column % 16]);
}

static double weight_at(const test_tensor *units, int64_t k, int64_t column)
{
    return (double)oracle_e2m1(code_at(units, k, column)) * (double)oracle_e4m3(scale_at(units, k, column));
}

static void expect(const gemm4_kernels *kernels, const char *what, int64_t k, int64_t column, double got,
                   double expected, double bound)
{
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s %s at (%lld, %lld): %.9g, expected %.9g within %.3g",
                 quern_cpu_level_name(kernels->level), what, (long long)k, (long long)column, got, expected,
                 bound);
}

/* The bound of a kernel's row, for sums of n terms. */
static double bound_of(const gemm4_kernels *kernels, const char *name, double terms)
{
    return test_kernel_bound("gemm4", name, kernels->level, terms, 0);
}

static void decode(const gemm4_kernels *kernels, test_random *random)
{
    for (int64_t units = 0; units <= UNITS_MOST; units++) {
        test_tensor panel = random_units(random, units),
                    out = floats_of(random, units * GEMM4_UNIT * GEMM4_PANEL);
        test_tensor words = floats_of(random, units * GEMM4_UNIT / 2 * GEMM4_PANEL);
        kernels->decode_f32(panel.view.data, units, out.view.data);
        if (kernels->decode_bf16 != NULL) kernels->decode_bf16(panel.view.data, units, words.view.data);
        test_tensor_check_guards(&out, "decode_f32"), test_tensor_check_guards(&words, "decode_bf16");
        for (int64_t k = 0; k < units * GEMM4_UNIT; k++)
            for (int64_t c = 0; c < GEMM4_PANEL; c++) {
                float got;
                uint16_t half;
                memcpy(&got, (const char *)out.view.data + 4 * (k * GEMM4_PANEL + c), 4);
                expect(kernels, "decode_f32", k, c, (double)got, weight_at(&panel, k, c),
                       bound_of(kernels, "decode_f32", 0));
                if (kernels->decode_bf16 == NULL) continue;
                memcpy(&half, (const char *)words.view.data + 4 * (k / 2 * GEMM4_PANEL + c) + 2 * (k % 2), 2);
                const uint32_t bits = (uint32_t)half << 16;
                memcpy(&got, &bits, 4);
                expect(kernels, "decode_bf16", k, c, (double)got, weight_at(&panel, k, c),
                       bound_of(kernels, "decode_bf16", 0));
            }
        TEST_TIME("gemm4", "decode_f32", kernels->level,
                  units * (GEMM4_UNIT_BYTES + 4 * GEMM4_UNIT * GEMM4_PANEL),
                  kernels->decode_f32(panel.view.data, units, out.view.data));
        if (kernels->decode_bf16 != NULL)
            TEST_TIME("gemm4", "decode_bf16", kernels->level,
                      units * (GEMM4_UNIT_BYTES + 2 * GEMM4_UNIT * GEMM4_PANEL),
                      kernels->decode_bf16(panel.view.data, units, words.view.data));
        test_tensor_free(&panel), test_tensor_free(&out), test_tensor_free(&words);
    }
}

/* Word [n / 2][k] of a turned unit is columns n and n + 1 at k. */
static void turn_bf16(const gemm4_kernels *kernels, test_random *random)
{
    static uint32_t decoded[GEMM4_UNIT / 2 * GEMM4_PANEL];
    if (kernels->turn_bf16 == NULL) return;
    for (int64_t i = 0; i < 8; i++) {
        test_tensor panel = random_units(random, 1), turned = floats_of(random, GEMM4_UNIT / 2 * GEMM4_PANEL);
        kernels->decode_bf16(panel.view.data, 1, decoded);
        kernels->turn_bf16(decoded, turned.view.data);
        test_tensor_check_guards(&turned, "turn_bf16");
        for (int64_t k = 0; k < GEMM4_UNIT; k++)
            for (int64_t n = 0; n < GEMM4_PANEL; n++) {
                uint16_t got, expected;
                memcpy(&got, (const char *)turned.view.data + 4 * (n / 2 * GEMM4_UNIT + k) + 2 * (n % 2), 2);
                memcpy(&expected, (const char *)decoded + 4 * (k / 2 * GEMM4_PANEL + n) + 2 * (k % 2), 2);
                if (got != expected || bound_of(kernels, "turn_bf16", 0) > 0)
                    fail_msg("turn_bf16: k %lld column %lld", (long long)k, (long long)n);
            }
        TEST_TIME("gemm4", "turn_bf16", kernels->level, 16 * GEMM4_UNIT / 2 * GEMM4_PANEL / 2,
                  kernels->turn_bf16(decoded, turned.view.data));
        test_tensor_free(&panel), test_tensor_free(&turned);
    }
}

/* Few rows decoded on the way have the bits of the same rows through decode_bf16 and the dense product. */
static void rows_bf16(const gemm4_kernels *kernels, test_random *random)
{
    if (kernels->rows_bf16 == NULL) return;
    const attention_kernels *dense = cpu_kernels_for(kernels->level)->attention;
    static uint32_t decoded[DEPTH_MOST / 2 * GEMM4_PANEL];
    for (int64_t i = 0; i < 2 * UNITS_MOST * GEMM4_FEW_ROWS; i++) {
        const int64_t rows = i / 2 % GEMM4_FEW_ROWS + 1, units = i / 2 / GEMM4_FEW_ROWS + 1,
                      depth = units * GEMM4_UNIT, count = rows * (depth + 6);
        test_tensor panel = random_units(random, units),
                    a = test_tensor_make(random, QUERN_BF16, 1, &count, TEST_CONTIGUOUS);
        test_tensor c = floats_of(random, rows * GEMM4_PANEL);
        test_tensor_normal(&a, random, 1), test_tensor_normal(&c, random, 1);
        float expected[GEMM4_FEW_ROWS * GEMM4_PANEL];
        memcpy(expected, c.view.data, (size_t)(rows * GEMM4_PANEL) * 4);
        kernels->decode_bf16(panel.view.data, units, decoded);
        dense->mm_bf16(rows, GEMM4_PANEL, depth / 2, a.view.data, depth / 2 + 3, 1, decoded, GEMM4_PANEL,
                       expected, GEMM4_PANEL, i % 2);
        kernels->rows_bf16(panel.view.data, units, rows, a.view.data, depth / 2 + 3, c.view.data, i % 2);
        test_tensor_check_guards(&c, "rows_bf16");
        assert_true(bound_of(kernels, "rows_bf16", 0) == 0);
        assert_memory_equal(c.view.data, expected, (size_t)(rows * GEMM4_PANEL) * 4);
        TEST_TIME(
            "gemm4", "rows_bf16", kernels->level, rows * depth * GEMM4_PANEL,
            kernels->rows_bf16(panel.view.data, units, rows, a.view.data, depth / 2 + 3, c.view.data, false));
        test_tensor_free(&panel), test_tensor_free(&a), test_tensor_free(&c);
    }
}

/* k of each byte of a block's words. */
static int64_t k_of_byte(int64_t i)
{
    static const uint8_t k[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
    return i / 16 * 16 + k[i % 16];
}

static float bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits &= 0xffff0000;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Fills a block with bf16 values whose exponents span so many binades, 7 from kind 12 on; then some kinds are
 * zeros, signed zeros, a largest value that two bytes just hold or just do not, one that is not finite, a
 * tiny one among others, and blocks next to the least and the largest values that occur. Returns whether
 * two bytes hold it: 1 yes, 0 no, -1 either. */
static int fill_block(test_random *random, int kind, float x[16])
{
    const int place = (int)test_random_int(random, 0, 14), binades = kind < 12 ? kind : 7;
    for (int i = 0; i < 16; i++) {
        const float odd = (float)(2 * test_random_int(random, 64, 126) + 1) / 128;
        x[i] = ldexpf(test_random_int(random, 0, 1) ? odd : -odd, -(int)test_random_int(random, 0, binades));
        if (kind == 12) x[i] = 0;
        if (kind == 13) x[i] = test_random_int(random, 0, 1) ? 0.0f : -0.0f;
        if (kind == 19) x[i] = ldexpf(x[i], -120);
        if (kind == 20) x[i] = ldexpf(x[i], 62);
    }
    if (kind < 12) {
        x[place] = -1.0f - 1.0f / 128;
        x[place + 1] = ldexpf(x[place], -kind);
    }
    if (kind == 14) x[place] = 254.0f / 128;
    if (kind == 14) x[place + 1] = -255.0f / 128;
    if (kind == 15) x[place] = 255.0f / 128;
    if (kind == 16) x[place] = test_random_int(random, 0, 1) ? INFINITY : -INFINITY;
    for (int i = 0; kind == 16 && i < 16 && place < 8; i++) x[i] = i == place ? x[i] : 0; /* alone */
    if (kind == 17) x[place] = -NAN;
    if (kind == 18) x[place] = 0x1p-133f;
    return kind < 8 || (kind >= 12 && kind <= 14) ? 1 : kind < 19 ? 0 : -1;
}

/* A row's blocks as integers are its values, where they are integers at all; and the row's product has the
 * bits of the product in floats. */
static void blocks_of_integers(const gemm4_kernels *kernels, test_random *random)
{
    enum { KINDS = 21, BLOCKS_MOST = DEPTH_MOST / 16 };
    for (int64_t i = 0; i < 60; i++) {
        const int64_t units = i % UNITS_MOST + 1, blocks = units * GEMM4_BLOCKS;
        const bool finite = i % 3 > 0;
        test_tensor panel = random_units(random, units), a = floats_of(random, 16 * blocks),
                    c = floats_of(random, GEMM4_PANEL), row = floats_of(random, GEMM4_PANEL),
                    made = bytes_of(random, blocks * (int64_t)sizeof(gemm4_a_block), TEST_CONTIGUOUS);
        gemm4_a_block *block = made.view.data;
        int expected[BLOCKS_MOST];
        for (int64_t b = 0; b < blocks; b++) {
            float x[16];
            int kind = (int)test_random_int(random, 0, KINDS - 1);
            if (finite && (kind == 16 || kind == 17)) kind = 10;
            expected[b] = fill_block(random, kind, x);
            for (int k = 0; k < 16; k++) x[k] = bf16_of(x[k]);
            memcpy((char *)a.view.data + 64 * b, x, sizeof x);
        }
        test_tensor_normal(&c, random, 1);
        memcpy(row.view.data, c.view.data, GEMM4_PANEL * 4);
        kernels->integer_blocks(a.view.data, blocks, block);
        test_tensor_check_guards(&made, "integer_blocks");
        for (int64_t b = 0; b < blocks; b++) {
            const bool integers = block[b].power != GEMM4_NOT_INTEGERS;
            int32_t sum = 0;
            if (expected[b] >= 0 && integers != (expected[b] == 1))
                fail_msg("%s: block %lld: integers %d, expected %d", quern_cpu_level_name(kernels->level),
                         (long long)b, integers, expected[b]);
            if (!integers) continue;
            for (int64_t j = 0; j < 16; j++) {
                float x;
                const int32_t q = 256 * block[b].high[j] + block[b].low[j];
                memcpy(&x, (const char *)a.view.data + 64 * b + 4 * k_of_byte(j), sizeof x);
                expect(kernels, "integer_blocks", 16 * b + k_of_byte(j), 0, ldexp(q, block[b].power + 1),
                       (double)x, bound_of(kernels, "integer_blocks", 0));
                sum += q;
            }
            assert_int_equal(block[b].start, -12 * sum);
        }
        kernels->row_f32(panel.view.data, units, a.view.data, c.view.data, i % 2);
        kernels->row_blocks(panel.view.data, units, a.view.data, block, row.view.data, i % 2);
        test_tensor_check_guards(&row, "row_blocks");
        assert_true(bound_of(kernels, "row_blocks", 0) == 0);
        assert_memory_equal(row.view.data, c.view.data, GEMM4_PANEL * 4);
        TEST_TIME("gemm4", "integer_blocks", kernels->level, 16 * blocks,
                  kernels->integer_blocks(a.view.data, blocks, block));
        TEST_TIME("gemm4", "row_blocks", kernels->level, 16 * blocks * GEMM4_PANEL,
                  kernels->row_blocks(panel.view.data, units, a.view.data, block, row.view.data, false));
        test_tensor_free(&panel), test_tensor_free(&a), test_tensor_free(&c), test_tensor_free(&row);
        test_tensor_free(&made);
    }
}

/* Codes and scales, then sums of blocks, against double; one row decoded on the way has the same bits. */
static void blocks_f32(const gemm4_kernels *kernels, test_random *random)
{
    static float codes[DEPTH_MOST * GEMM4_PANEL], scales[DEPTH_MOST / 16 * GEMM4_PANEL];
    for (int64_t i = 0; i < 40; i++) {
        const int64_t rows = i % 14, units = i % UNITS_MOST + 1, depth = units * GEMM4_UNIT, lda = depth + 5;
        test_tensor panel = random_units(random, units), a = floats_of(random, rows * lda),
                    c = floats_of(random, rows * GEMM4_PANEL), row = floats_of(random, GEMM4_PANEL);
        test_tensor_normal(&a, random, 1), test_tensor_normal(&c, random, 1);
        double *x = test_tensor_get(&a), *old = test_tensor_get(&c);
        if (rows > 0) memcpy(row.view.data, c.view.data, GEMM4_PANEL * 4);
        kernels->decode_blocks(panel.view.data, units, codes, scales);
        for (int64_t k = 0; k < depth; k++)
            for (int64_t n = 0; n < GEMM4_PANEL; n++)
                expect(kernels, "decode_blocks", k, n,
                       (double)codes[k * GEMM4_PANEL + n] * (double)scales[k / 16 * GEMM4_PANEL + n],
                       weight_at(&panel, k, n), bound_of(kernels, "decode_blocks", 0));
        const gemm4_f32_tile t = {rows, depth / 16, a.view.data, lda, codes, scales, c.view.data, i % 2};
        kernels->mm_blocks(&t);
        test_tensor_check_guards(&c, "mm_blocks");
        double *got = test_tensor_get(&c);
        for (int64_t j = 0; j < rows * GEMM4_PANEL; j++) {
            double sum = i % 2 ? old[j] : 0, size = fabs(sum);
            for (int64_t k = 0; k < depth; k++) {
                const double term = x[j / GEMM4_PANEL * lda + k] * weight_at(&panel, k, j % GEMM4_PANEL);
                sum += term;
                size += fabs(term);
            }
            expect(kernels, "mm_blocks", j / GEMM4_PANEL, j % GEMM4_PANEL, got[j], sum,
                   bound_of(kernels, "mm_blocks", (double)depth) * size);
        }
        assert_true(bound_of(kernels, "row_f32", 0) == 0);
        if (rows > 0) {
            kernels->row_f32(panel.view.data, units, a.view.data, row.view.data, i % 2);
            test_tensor_check_guards(&row, "row_f32");
            assert_memory_equal(row.view.data, c.view.data, GEMM4_PANEL * 4);
            TEST_TIME("gemm4", "row_f32", kernels->level, depth * GEMM4_PANEL,
                      kernels->row_f32(panel.view.data, units, a.view.data, row.view.data, false));
        }
        TEST_TIME("gemm4", "decode_blocks", kernels->level,
                  units * (GEMM4_UNIT_BYTES + 4 * (GEMM4_UNIT + GEMM4_BLOCKS) * GEMM4_PANEL),
                  kernels->decode_blocks(panel.view.data, units, codes, scales));
        TEST_TIME("gemm4", "mm_blocks", kernels->level, rows * depth * GEMM4_PANEL, kernels->mm_blocks(&t));
        free(x), free(old), free(got);
        test_tensor_free(&panel), test_tensor_free(&a), test_tensor_free(&c), test_tensor_free(&row);
    }
}

static void integers(const gemm4_kernels *kernels, test_random *random)
{
    static uint32_t codes[DEPTH_MOST / 4 * GEMM4_PANEL];
    static float scales[DEPTH_MOST / 16 * GEMM4_PANEL];
    for (int64_t rows = 0; rows <= 15; rows++) {
        const int64_t units = test_random_int(random, 1, UNITS_MOST), depth = units * GEMM4_UNIT,
                      blocks = depth / 16;
        test_tensor panel = random_units(random, units), c = floats_of(random, rows * GEMM4_PANEL),
                    a = bytes_of(random, rows * depth, TEST_CONTIGUOUS);
        float *a_scale = malloc((size_t)(rows * blocks + 1) * sizeof *a_scale);
        int32_t *start = malloc((size_t)(rows * blocks + 1) * sizeof *start);
        assert_true(a_scale != NULL && start != NULL);
        int8_t *values = a.view.data;
        for (int64_t i = 0; i < rows * blocks; i++) {
            start[i] = 0;
            a_scale[i] = oracle_e4m3((int)test_random_int(random, 0, 126));
            for (int64_t j = 0; j < 16; j++)
                start[i] -= 12 * (values[16 * i + j] = (int8_t)test_random_int(random, -127, 127));
        }
        test_tensor_normal(&c, random, 1);
        double *old = test_tensor_get(&c);
        kernels->decode_i8(panel.view.data, units, codes, scales);
        const gemm4_i8_tile t = {
            rows,        blocks,  (const uint32_t *)a.view.data, a_scale, start, blocks, codes, scales,
            c.view.data, rows % 2};
        kernels->mm_i8(&t);
        assert_true(bound_of(kernels, "decode_i8", 0) == 0); /* what it decodes goes into exact sums */
        test_tensor_check_guards(&c, "mm_i8");
        double *got = test_tensor_get(&c);
        for (int64_t i = 0; i < rows * GEMM4_PANEL; i++) {
            const int64_t r = i / GEMM4_PANEL, n = i % GEMM4_PANEL;
            double sum = rows % 2 ? old[i] : 0, size = fabs(sum);
            for (int64_t b = 0; b < blocks; b++) {
                double block = 0; /* exact */
                for (int64_t j = 16 * b; j < 16 * b + 16; j++)
                    block +=
                        values[r * depth + j] * 2 * (double)oracle_e2m1(code_at(&panel, k_of_byte(j), n));
                const double term = block * (double)a_scale[r * blocks + b] *
                                    (double)oracle_e4m3(scale_at(&panel, 16 * b, n));
                sum += term;
                size += fabs(term);
            }
            expect(kernels, "mm_i8", r, n, got[i], sum, bound_of(kernels, "mm_i8", (double)blocks) * size);
        }
        TEST_TIME("gemm4", "decode_i8", kernels->level,
                  units * (GEMM4_UNIT_BYTES + (GEMM4_UNIT + 16) * GEMM4_PANEL),
                  kernels->decode_i8(panel.view.data, units, codes, scales));
        TEST_TIME("gemm4", "mm_i8", kernels->level, rows * depth * GEMM4_PANEL, kernels->mm_i8(&t));
        free(a_scale), free(start), free(old), free(got);
        test_tensor_free(&panel), test_tensor_free(&c), test_tensor_free(&a);
    }
}

static void scale_row(const gemm4_kernels *kernels, test_random *random)
{
    for (int64_t n = 0; n <= GEMM4_PANEL; n++) {
        test_tensor acc = floats_of(random, n), g = floats_of(random, n), bias = floats_of(random, n),
                    out = floats_of(random, n);
        test_tensor_normal(&acc, random, 1), test_tensor_normal(&g, random, 1),
            test_tensor_normal(&bias, random, 1);
        double *x = test_tensor_get(&acc), *y = test_tensor_get(&g), *z = test_tensor_get(&bias);
        kernels->scale_row(acc.view.data, 0.3f, g.view.data, n % 2 ? bias.view.data : NULL, n, out.view.data);
        test_tensor_check_guards(&out, "scale_row");
        double *got = test_tensor_get(&out);
        for (int64_t i = 0; i < n; i++) {
            const float global = 0.3f * (float)y[i], product = (float)x[i] * global,
                        sum = n % 2 ? product + (float)z[i] : product;
            expect(kernels, "scale_row", 0, i, got[i], (double)sum, bound_of(kernels, "scale_row", 0));
        }
        TEST_TIME("gemm4", "scale_row", kernels->level, 16 * n,
                  kernels->scale_row(acc.view.data, 0.3f, g.view.data, bias.view.data, n, out.view.data));
        free(x), free(y), free(z), free(got);
        test_tensor_free(&acc), test_tensor_free(&g), test_tensor_free(&bias), test_tensor_free(&out);
    }
}

/* Runs a test at every level that this machine has. */
static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("gemm4", 78);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        test->run(cpu_kernels_for(level)->gemm4, &random);
    }
}

#define KERNEL_TEST(name)                                                                                    \
    {                                                                                                        \
#name, at_every_level, NULL, NULL, &(kernel_test)                                                    \
        {                                                                                                    \
            name                                                                                             \
        }                                                                                                    \
    }

int main(int argc, char **argv)
{
    char program[] = "gemm4_test";
    const struct CMUnitTest tests[] = {KERNEL_TEST(decode),
                                       KERNEL_TEST(turn_bf16),
                                       KERNEL_TEST(rows_bf16),
                                       KERNEL_TEST(blocks_f32),
                                       KERNEL_TEST(blocks_of_integers),
                                       KERNEL_TEST(integers),
                                       KERNEL_TEST(scale_row),
                                       {"every_kernel", test_every_kernel, NULL, NULL, program}};
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
