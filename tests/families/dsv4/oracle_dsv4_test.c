/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_dsv4_test.c - the float64 oracle of DeepSeek-V4's attention against golden vectors, against central
 * differences, and formats worked by hand. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void golden_entries(void **state)
{
    (void)state;
    for (int n = 0; n < DSV4_GOLDEN_CASES; n++) {
        dsv4_golden g = dsv4_golden_case(QUERN_TEST_VECTORS, n);
        const int64_t width = g.shape.width, count = g.shape.blocks * width;
        const oracle_compress_arrays x = {.proj = g.proj,
                                          .b_a = g.b_a,
                                          .b_b = g.b_b,
                                          .prev_b = g.prev_b,
                                          .norm_weight = g.norm_weight,
                                          .cos_sin = g.cos_sin,
                                          .pooled = test_doubles(count),
                                          .out = test_doubles(count)};
        oracle_dsv4_pool(&g.shape, &x);
        oracle_dsv4_finish(&g.shape, &x);
        test_check_golden(g.name, x.out, g.out, count, g.bound);
        for (int64_t i = 0; g.pooled_tail != NULL && i < g.shape.blocks; i++)
            test_check_golden(g.name, x.pooled + (i + 1) * width - 64, g.pooled_tail + i * 64, 64, g.bound);
        free(x.pooled), free(x.out);
        dsv4_golden_free(&g);
    }
}

enum { INPUTS = 5 }; /* proj, b_a, b_b, prev_b, norm_weight */

typedef struct problem {
    oracle_compressor c;
    int64_t counts[INPUTS];
    double *x[INPUTS], *grad[INPUTS], *cos_sin, *d_out;
} problem;

static oracle_compress_arrays arrays_of(const problem *p, double *pooled, double *out)
{
    return (oracle_compress_arrays){.proj = p->x[0],
                                    .b_a = p->x[1],
                                    .b_b = p->x[2],
                                    .prev_b = p->x[3],
                                    .norm_weight = p->x[4],
                                    .cos_sin = p->cos_sin,
                                    .pooled = pooled,
                                    .out = out,
                                    .d_out = p->d_out,
                                    .d_proj = p->grad[0],
                                    .d_b_a = p->grad[1],
                                    .d_b_b = p->grad[2],
                                    .d_prev_b = p->grad[3],
                                    .d_norm_weight = p->grad[4]};
}

static double loss(const problem *p)
{
    const int64_t count = p->c.blocks * p->c.width;
    double *pooled = test_doubles(count), *out = test_doubles(count), sum = 0;
    const oracle_compress_arrays x = arrays_of(p, pooled, out);
    oracle_dsv4_pool(&p->c, &x);
    oracle_dsv4_finish(&p->c, &x);
    for (int64_t i = 0; i < count; i++) sum += out[i] * p->d_out[i];
    free(pooled), free(out);
    return sum;
}

static void differences(const problem *p)
{
    const double step = 1e-5;
    for (int i = 0; i < INPUTS; i++) {
        for (int64_t k = 0; k < p->counts[i]; k++) {
            const double kept = p->x[i][k];
            p->x[i][k] = kept + step;
            const double above = loss(p);
            p->x[i][k] = kept - step;
            const double slope = (above - loss(p)) / (2 * step);
            p->x[i][k] = kept;
            if (fabs(slope - p->grad[i][k]) > 1e-7 * (1 + fabs(slope)))
                fail_msg("input %d [%lld]: %.12g, by differences %.12g", i, (long long)k, p->grad[i][k],
                         slope);
        }
    }
}

static void gradients(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("gradients", 11);
    for (int trial = 0; trial < 16; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        problem p = {.c = {.ratio = trial % 2 ? 4 : 3,
                           .width = 8,
                           .overlap = trial % 4 < 2,
                           .start_token = trial % 3,
                           .blocks = 3,
                           .start_abs_pos = 12,
                           .rope_dim = trial % 8 < 4 ? 4 : 0,
                           .rope_last = trial % 2 == 1,
                           .hadamard = trial >= 8,
                           .eps = 1e-3}};
        const bool prev = p.c.overlap && trial % 3 > 0, norm = trial % 5 > 0;
        const int64_t series = p.c.overlap ? 2 : 1, bias = p.c.ratio * p.c.width;
        const int64_t counts[INPUTS] = {(p.c.start_token + 3 * p.c.ratio + 1) * 2 * series * p.c.width, bias,
                                        p.c.overlap ? bias : 0, prev ? 2 * bias : 0, norm ? p.c.width : 0};
        memcpy(p.counts, counts, sizeof counts);
        for (int i = 0; i < INPUTS; i++) {
            p.x[i] = counts[i] > 0 ? test_doubles(counts[i]) : NULL;
            p.grad[i] = counts[i] > 0 ? test_doubles(counts[i]) : NULL;
            for (int64_t k = 0; k < counts[i]; k++) p.x[i][k] = test_random_normal(&random);
        }
        p.cos_sin = test_doubles(32 * 4);
        oracle_dsv4_rope_table(32, 4, 100, 0, 0, 0, 0, p.cos_sin);
        p.d_out = test_doubles(3 * p.c.width);
        for (int64_t k = 0; k < 3 * p.c.width; k++) p.d_out[k] = test_random_normal(&random);
        double *pooled = test_doubles(3 * p.c.width), *out = test_doubles(3 * p.c.width);
        const oracle_compress_arrays x = arrays_of(&p, pooled, out);
        oracle_dsv4_pool(&p.c, &x);
        oracle_dsv4_compress_backward(&p.c, &x);
        differences(&p);
        for (int i = 0; i < INPUTS; i++) free(p.x[i]), free(p.grad[i]);
        free(p.cos_sin), free(p.d_out), free(pooled), free(out);
    }
}

/* A logit of -inf weighs nothing, not even infinity; all of them give 0. */
static void absent_rows(void **state)
{
    (void)state;
    const oracle_compressor c = {.ratio = 2, .width = 1, .blocks = 2};
    const double proj[] = {INFINITY, -INFINITY, 3, 0, 5, -INFINITY, 7, -INFINITY}, bias[] = {0, 0};
    double pooled[2];
    const oracle_compress_arrays x = {.proj = proj, .b_a = bias, .pooled = pooled};
    oracle_dsv4_pool(&c, &x);
    assert_true(pooled[0] == 3 && pooled[1] == 0);
}

/* lo 15 and hi 25 are the released models'; the frequencies between them mix both. */
static void yarn_table(void **state)
{
    (void)state;
    double *plain = test_doubles(2 * 64), *yarn = test_doubles(2 * 64);
    oracle_dsv4_rope_table(2, 64, 160000, 0, 0, 0, 0, plain);
    oracle_dsv4_rope_table(2, 64, 160000, 16, 65536, 32, 1, yarn);
    for (int m = 0; m < 32; m++) {
        const double slow = asin(plain[64 + 32 + m]), ratio = asin(yarn[64 + 32 + m]) / slow;
        const double ramp = m <= 15 ? 0 : m >= 25 ? 1 : (m - 15) / 10.0;
        if (m > 0 && fabs(ratio - (ramp / 16 + 1 - ramp)) > 1e-5)
            fail_msg("frequency %d is %.6g of the plain one", m, ratio);
    }
    free(plain), free(yarn);
}

static void formats_by_hand(void **state)
{
    (void)state;
    unsigned char bytes[584];
    double back[512];
    float row[512] = {0};
    row[0] = 448;
    row[1] = -448;
    row[2] = 1.0625f;
    row[3] = 0x1p-10f;
    row[4] = -0.0f;
    row[5] = 0x3p-10f;
    assert_true(oracle_dsv4_quantise_fp8(row, 32, false, bytes)); /* scale 1 */
    oracle_dsv4_widen_fp8(bytes, 32, back);
    assert_int_equal(bytes[0], 126);
    assert_int_equal(bytes[1], 254);
    assert_int_equal(bytes[3], 0); /* half of the least: to even */
    assert_int_equal(bytes[4], 128);
    assert_int_equal(bytes[5], 2); /* one and a half */
    assert_true(back[2] == 1 && back[0] == 448);
    memset(row, 0, sizeof row);
    row[0] = 6;
    row[1] = -2.5f;
    row[2] = 0.25f;
    row[3] = 0.75f;
    row[4] = -0.01f;
    row[5] = 5;
    row[6] = -0.0f;
    row[31] = 3.5f;
    assert_true(oracle_dsv4_quantise_fp4(row, 32, bytes)); /* scale 1 */
    assert_int_equal(bytes[0], 7 | 12 << 4);
    assert_int_equal(bytes[1], 0 | 2 << 4);
    assert_int_equal(bytes[2], 8 | 6 << 4);
    assert_int_equal(bytes[3], 0);
    assert_int_equal(bytes[15], 6 << 4);
    assert_int_equal(bytes[16], 127);
    row[0] = 6.5f; /* the scale is the next power of two */
    assert_true(oracle_dsv4_quantise_fp4(row, 32, bytes));
    assert_int_equal(bytes[16], 128);
    row[0] = 0x1p-130f;
    row[1] = row[5] = row[31] = row[2] = row[3] = row[4] = 0;
    assert_true(oracle_dsv4_quantise_fp4(row, 32, bytes));
    assert_int_equal(bytes[16], 1);
    row[500] = 1.00390625f; /* half way between two bf16: to even */
    assert_true(oracle_dsv4_quantise_row584(row, bytes));
    oracle_dsv4_widen_row584(bytes, back);
    assert_true(back[500] == 1);
    assert_int_equal(bytes[583], 0);
    row[100] = NAN;
    assert_false(oracle_dsv4_quantise_row584(row, bytes) ||
                 oracle_dsv4_quantise_fp8(row, 128, false, bytes) ||
                 oracle_dsv4_quantise_fp4(row, 128, bytes));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_entries), cmocka_unit_test(gradients),
                                       cmocka_unit_test(absent_rows), cmocka_unit_test(yarn_table),
                                       cmocka_unit_test(formats_by_hand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
