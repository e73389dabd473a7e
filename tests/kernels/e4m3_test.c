/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* e4m3_test.c - panels of e4m3 weights at every level: every code at every place, all tails, unaligned rows,
 * guards. The values are exact. */
#include "cmocka_c11.h"
#include "cpu/e4m3/e4m3_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "oracle/linear.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PANEL_WIDEST = 64, ROWS = 64, DEPTH = 200, STRIDE = DEPTH + 13, GUARD = 3 };
static const uint32_t sentinel = 0x5a5a5a5a;

static float value_at(bool pairs, const uint32_t *panel, int64_t width, int64_t k, int64_t column)
{
    const uint32_t word = panel[(pairs ? k / 2 : k) * width + column];
    const uint32_t bits = !pairs ? word : k % 2 == 0 ? word << 16 : word & 0xffff0000u;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void fill(const e4m3_kernels *kernels, bool pairs, const e4m3_rows *rows, int32_t width, uint32_t *to)
{
    if (pairs) kernels->panel_bf16(rows, width, to);
    else kernels->panel_f32(rows, width, (float *)(void *)to);
}

static void check(const e4m3_kernels *kernels, bool pairs, int32_t width, int64_t count, int64_t depth,
                  test_random *random)
{
    static uint8_t codes[ROWS * STRIDE + 1];
    static uint32_t room[ROWS * DEPTH + 2 * GUARD];
    const char *name = pairs ? "panel_bf16" : "panel_f32";
    const int64_t words = (pairs ? (depth + 1) / 2 : depth) * width;
    uint32_t *panel = room + GUARD;
    for (int64_t i = 0; i < (int64_t)sizeof codes; i++)
        codes[i] = (uint8_t)test_random_int(random, 0, test_random_one_in(random, 2) ? 255 : 15);
    for (int64_t i = 0; i < words + 2 * GUARD; i++) room[i] = sentinel;
    const e4m3_rows rows = {codes + 1, STRIDE, count, depth, test_random_one_in(random, 2) ? 64 : 0, false};
    fill(kernels, pairs, &rows, width, panel);
    (void)test_kernel_bound("e4m3", name, kernels->level, 0, 0);
    for (int i = 0; i < GUARD; i++) assert_true(room[i] == sentinel && panel[words + i] == sentinel);
    for (int64_t k = 0; k < (pairs ? (depth + 1) / 2 * 2 : depth); k++)
        for (int64_t j = 0; j < width; j++) {
            const double expected =
                j < count && k < depth ? oracle_e4m3_of_byte(codes[1 + j * STRIDE + k]) : 0;
            const double x = (double)value_at(pairs, panel, width, k, j);
            if (isnan(expected) ? !isnan(x) : x != expected)
                fail_msg("%s.%s, rows %lld, depth %lld: [%lld][%lld] is %g, expected %g",
                         quern_cpu_level_name(kernels->level), name, (long long)count, (long long)depth,
                         (long long)k, (long long)j, x, expected);
        }
    TEST_TIME("e4m3", name, kernels->level, width * depth, fill(kernels, pairs, &rows, width, panel));
}

static void every_panel(void **state)
{
    static const int64_t depths[] = {0, 1, 2, 3, 4, 5, 31, 32, 63, 64, 65, 127, 128, 130, DEPTH};
    const uint64_t seed = test_seed("e4m3", 1);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const e4m3_kernels *kernels = cpu_kernels_for(level)->e4m3;
        const int32_t width = cpu_kernels_for(level)->attention->panel;
        test_random random = {seed};
        for (int pairs = 0; pairs <= (kernels->panel_bf16 != NULL); pairs++)
            for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
                for (int64_t count = 0; count <= width; count++)
                    check(kernels, pairs, width, count, depths[d], &random);
    }
}

/* One row's product has the bits of its panel's. */
static void row_has_the_panels_bits(void **state)
{
    enum { PANEL = 64, LONGEST = 1024, APART = LONGEST + 13, RUNS = LONGEST / 32 };
    test_random random = {test_seed("e4m3 row", 2)};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const e4m3_kernels *kernels = cpu_kernels_for(level)->e4m3;
        const attention_kernels *dense = cpu_kernels_for(level)->attention;
        if (kernels->row_bf16 == NULL) continue;
        (void)test_kernel_bound("e4m3", "row_bf16", kernels->level, 0, 0);
        assert_int_equal(dense->panel, PANEL);
        for (int trial = 0; trial < 200; trial++) {
            static uint8_t codes[ROWS * APART];
            static uint32_t panel[PANEL * 128 / 2];
            static float scales[RUNS * PANEL];
            const bool whole = trial % 7 == 0; /* rows and lines */
            const int64_t depth = trial == 0 ? LONGEST
                                  : whole    ? 128 * test_random_int(&random, 1, LONGEST / 128)
                                             : 2 * test_random_int(&random, 1, LONGEST / 2),
                          count = whole ? PANEL : test_random_int(&random, 1, PANEL),
                          run = trial % 4 == 1                   ? 32
                                : trial % 4 == 3 && depth <= 128 ? depth
                                                                 : 128;
            uint32_t *a = malloc((size_t)(depth + 1) * 2);
            float expected[PANEL], c[PANEL];
            for (int64_t i = 0; i < (int64_t)sizeof codes; i++)
                codes[i] = (uint8_t)test_random_int(&random, 0, trial % 2 == 0 ? 126 : 254);
            for (int64_t i = 0; i < depth / 2; i++)
                a[i] = (uint32_t)test_random_int(&random, 0x3f80, 0x40ff) << 16 |
                       (uint32_t)test_random_int(&random, 0xbf00, 0xbfff);
            for (int i = 0; i < RUNS * PANEL; i++) scales[i] = (float)test_random_normal(&random);
            for (int j = 0; j < PANEL; j++) c[j] = expected[j] = (float)test_random_normal(&random);
            const e4m3_rows rows = {codes,         APART, count, depth, trial % 2 == 0 ? 0 : APART * count,
                                    trial % 3 == 0};
            const bool accumulate = trial % 3 != 0;
            for (int64_t k = 0; k < depth; k += run) {
                const int64_t n = depth - k < run ? depth - k : run;
                const e4m3_rows part = {codes + k, APART, count, n, 0, false};
                kernels->panel_bf16(&part, PANEL, panel);
                dense->mm_scaled_bf16(1, PANEL, n / 2, a + k / 2, n / 2, 1, (const float *)(void *)panel,
                                      PANEL, scales + k / run * PANEL, expected, PANEL, accumulate || k > 0);
            }
            kernels->row_bf16(&rows, run, a, scales, c, accumulate);
            for (int j = 0; j < PANEL; j++)
                if (memcmp(&c[j], &expected[j], sizeof *c) != 0 && !(isnan(c[j]) && isnan(expected[j])))
                    fail_msg("depth %lld: [%d] is %g, expected %g", (long long)depth, j, (double)c[j],
                             (double)expected[j]);
            TEST_TIME("e4m3", "row_bf16", kernels->level, PANEL * depth,
                      kernels->row_bf16(&rows, run, a, scales, c, accumulate));
            free(a);
        }
    }
}

/* The same in f32. */
static void row_has_the_panels_bits_f32(void **state)
{
    enum { WIDE = ROW_F32_COLUMNS, LONGEST = 512, APART = LONGEST + 13, RUNS = LONGEST / 32 };
    test_random random = {test_seed("e4m3 row f32", 3)};
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const e4m3_kernels *kernels = cpu_kernels_for(level)->e4m3;
        const attention_kernels *dense = cpu_kernels_for(level)->attention;
        const int32_t panel = dense->panel;
        (void)test_kernel_bound("e4m3", "row_f32", kernels->level, 0, 0);
        for (int trial = 0; trial < 300; trial++) {
            static uint8_t codes[WIDE * APART];
            static float values[128 * PANEL_WIDEST], scales[RUNS * WIDE], a[LONGEST];
            const bool whole = trial % 5 == 0;
            const int64_t depth = trial == 0 ? LONGEST
                                  : whole    ? 64 * test_random_int(&random, 1, LONGEST / 64)
                                             : test_random_int(&random, 1, LONGEST),
                          count = whole ? WIDE : test_random_int(&random, 1, WIDE),
                          run = trial % 4 == 1                   ? 32
                                : trial % 4 == 3 && depth <= 128 ? depth
                                                                 : 128;
            float expected[WIDE], c[WIDE];
            for (int64_t i = 0; i < (int64_t)sizeof codes; i++)
                codes[i] = (uint8_t)test_random_int(&random, 0, trial % 3 == 2 ? 255 : 126);
            for (int64_t i = 0; i < LONGEST; i++) a[i] = (float)test_random_normal(&random);
            for (int i = 0; i < RUNS * WIDE; i++) scales[i] = (float)test_random_normal(&random);
            for (int j = 0; j < WIDE; j++) c[j] = expected[j] = (float)test_random_normal(&random);
            const bool accumulate = trial % 3 != 1;
            for (int64_t k = 0; k < depth; k += run)
                for (int64_t j = 0; j < WIDE; j += panel < WIDE ? panel : WIDE) {
                    const int64_t n = depth - k < run ? depth - k : run, left = count > j ? count - j : 0,
                                  columns = panel < WIDE ? panel : WIDE;
                    const e4m3_rows part = {
                        codes + j * APART + k, APART, left < columns ? left : columns, n, 0, false};
                    kernels->panel_f32(&part, panel, values);
                    dense->mm_scaled_f32(1, columns, n, a + k, n, 1, values, panel,
                                         scales + k / run * WIDE + j, expected + j, WIDE,
                                         accumulate || k > 0);
                }
            const e4m3_rows rows = {codes, APART, count, depth, trial % 2 == 0 ? 0 : -64, trial % 3 == 0};
            kernels->row_f32(&rows, run, a, scales, c, accumulate);
            for (int j = 0; j < WIDE; j++)
                if (memcmp(&c[j], &expected[j], sizeof *c) != 0 && !(isnan(c[j]) && isnan(expected[j])))
                    fail_msg("depth %lld: [%d] is %g, expected %g", (long long)depth, j, (double)c[j],
                             (double)expected[j]);
            TEST_TIME("e4m3", "row_f32", kernels->level, WIDE * depth,
                      kernels->row_f32(&rows, run, a, scales, c, accumulate));
        }
    }
}

int main(int argc, char **argv)
{
    char program[] = "e4m3_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_panel),
        cmocka_unit_test(row_has_the_panels_bits),
        cmocka_unit_test(row_has_the_panels_bits_f32),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
