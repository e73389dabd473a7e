/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_nvfp4_test.c - the NVFP4 oracle against the golden vectors, and its properties. */
#include "cmocka_c11.h"
#include "oracle/nvfp4.h"
#include "nvfp4_golden.h"
#include "random.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void formats_round_to_nearest_even(void **state)
{
    static const struct {
        float y;
        int code;
    } codes[] = {{0.25f, 0}, {0.75f, 2}, {1.25f, 2},  {1.75f, 4},   {2.5f, 4},
                 {3.5f, 6},  {5, 6},     {5.001f, 7}, {0.2501f, 1}, {1e9f, 7}};
    (void)state;
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        assert_int_equal(oracle_e2m1_nearest(codes[i].y), codes[i].code);
    for (int byte = 0; byte < 127; byte++) assert_int_equal(oracle_e4m3_nearest(oracle_e4m3(byte)), byte);
    assert_int_equal(oracle_e4m3_nearest(0x1p-10f), 0); /* a tie of 0 and 2^-9 */
    assert_int_equal(oracle_e4m3_nearest(1e30f), 126);
    assert_true(oracle_e4m3(126) == 448 && oracle_e4m3(8) == 0x1p-6f && oracle_e4m3(1) == 0x1p-9f);
}

/* Rows of an activation: blocks along the last axis. */
static void check_rows(const nvfp4_golden *g)
{
    for (int64_t b = 0; b < g->count / 16; b++) {
        uint8_t codes[16];
        const int scale = oracle_nvfp4_block(g->profile, ORACLE_SCALES_RNE, g->global, g->x + 16 * b, codes);
        if (scale != g->scales[b])
            fail_msg("%s block %lld: scale %d, expected %d", g->name, (long long)b, scale, g->scales[b]);
        for (int i = 0; i < 8; i++)
            if ((codes[2 * i] | codes[2 * i + 1] << 4) != g->codes[8 * b + i])
                fail_msg("%s block %lld: byte %d differs", g->name, (long long)b, i);
    }
}

static void check_columns(const nvfp4_golden *g)
{
    for (int64_t b = 0; b < g->rows / 16; b++)
        for (int64_t n = 0; n < g->columns; n++) {
            float x[16];
            uint8_t codes[16];
            for (int i = 0; i < 16; i++) x[i] = g->x[(16 * b + i) * g->columns + n];
            assert_int_equal(oracle_nvfp4_block(g->profile, ORACLE_SCALES_RNE, g->global, x, codes),
                             g->scales[b * g->columns + n]);
            for (int i = 0; i < 8; i++)
                assert_int_equal(codes[2 * i] | codes[2 * i + 1] << 4,
                                 g->codes[(8 * b + i) * g->columns + n]);
        }
}

static void profiles_match_the_vectors(void **state)
{
    int cases = 0;
    (void)state;
    for (int file = 0; file < 2; file++) {
        const bool weights = file == 1;
        nvfp4_golden_file f =
            nvfp4_golden_open(QUERN_TEST_VECTORS, weights ? "nvfp4_weights_scales" : "nvfp4_quant");
        for (nvfp4_golden g; nvfp4_golden_next(&f, &g); nvfp4_golden_free(&g), cases++) {
            float amax = 0;
            for (int64_t i = 0; i < g.count; i++) amax = fmaxf(amax, fabsf(g.x[i]));
            assert_memory_equal(&g.global, &(float){oracle_nvfp4_global(g.profile, amax)}, 4);
            (weights ? check_columns : check_rows)(&g);
        }
        nvfp4_golden_close(&f);
    }
    assert_int_equal(cases, 4 * 16 - 2 + 8);
}

static void swizzle_matches_the_vectors(void **state)
{
    (void)state;
    nvfp4_golden_file f = nvfp4_golden_open(QUERN_TEST_VECTORS, "nvfp4_quant");
    for (nvfp4_golden g; nvfp4_golden_next(&f, &g); nvfp4_golden_free(&g)) {
        if (g.profile != ORACLE_HALFSTEP) continue;
        int64_t bytes;
        const uint8_t *swizzled = nvfp4_golden_bytes(&f, "seed.scales_swizzled.", g.name, &bytes);
        const int64_t columns = g.columns / 16;
        assert_int_equal(bytes, (g.rows + 127) / 128 * 128 * ((columns + 3) / 4 * 4));
        for (int64_t r = 0; r < g.rows; r++)
            for (int64_t c = 0; c < columns; c++)
                assert_int_equal(swizzled[oracle_swizzled_at(r, c, columns)], g.scales[r * columns + c]);
    }
    nvfp4_golden_close(&f);
}

/* Relative RMSE on N(0, 1) as the spec of the scale choices states it. */
static void scale_choices_reach_their_error(void **state)
{
    enum { COUNT = 1 << 18 };
    static const double expected[ORACLE_SCALES] = {0.0951, 0.0870, 0.0815};
    test_random random = {test_seed("scale choices", 14)};
    float *x = malloc(COUNT * sizeof *x), amax = 0;
    (void)state;
    assert_non_null(x);
    for (int i = 0; i < COUNT; i++) {
        x[i] = (float)test_random_normal(&random);
        amax = fmaxf(amax, fabsf(x[i]));
    }
    const float global = oracle_nvfp4_global(ORACLE_RNE, amax);
    for (int s = 0; s < ORACLE_SCALES; s++) {
        double error = 0, norm = 0;
        for (int b = 0; b < COUNT / 16; b++) {
            uint8_t codes[16];
            const int scale = oracle_nvfp4_block(ORACLE_RNE, (oracle_scales)s, global, x + 16 * b, codes);
            for (int i = 0; i < 16; i++) {
                const double difference =
                    (double)oracle_nvfp4_value(ORACLE_RNE, global, scale, codes[i]) - (double)x[16 * b + i];
                error += difference * difference;
                norm += (double)x[16 * b + i] * (double)x[16 * b + i];
            }
        }
        const double rmse = sqrt(error / norm);
        if (s < ORACLE_SCALES_SEARCH ? fabs(rmse - expected[s]) > 3e-4 : rmse > expected[s])
            fail_msg("choice %d: relative RMSE %.5f, expected %.4f", s, rmse, expected[s]);
    }
    free(x);
}

static void mxfp4_is_exact_within_its_range(void **state)
{
    uint8_t codes[3 * 32], before[sizeof codes], scales[6];
    const uint8_t exponents[3] = {127, 127 - 17, 127 - 18};
    float global;
    (void)state;
    for (int i = 0; i < 96; i++) codes[i] = (uint8_t)(i * 7 % 16);
    memcpy(before, codes, sizeof codes);
    assert_int_equal(oracle_nvfp4_from_mxfp4(codes, exponents, 3, scales, &global), 1);
    assert_true(global == 0x1p-8f);
    for (int i = 0; i < 64; i++)
        assert_true(oracle_nvfp4_value(ORACLE_RNE, global, scales[i / 16], codes[i]) ==
                    ldexpf(oracle_e2m1(before[i]), exponents[i / 32] - 127));
    assert_int_equal(scales[4], 1);
    for (int i = 64; i < 96; i++) assert_int_equal(codes[i] & 8, before[i] & 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_round_to_nearest_even),   cmocka_unit_test(profiles_match_the_vectors),
        cmocka_unit_test(swizzle_matches_the_vectors),     cmocka_unit_test(scale_choices_reach_their_error),
        cmocka_unit_test(mxfp4_is_exact_within_its_range),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
