/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa_rows_test.c - the row kernels of attention whose heads share their keys, at every level against double.
 * Bounds are those of src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/attend_mqa/mqa_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { KEYS_MOST = 67, HEADS_MOST = 48, SCORES = KEYS_MOST * HEADS_MOST };

static double half_at(const uint16_t *p, int64_t i)
{
    const uint32_t bits = (uint32_t)p[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

static void expect(const mqa_kernels *kernels, const char *what, int64_t key, int64_t head, double out,
                   double exact, double bound)
{
    if (isnan(exact) ? isnan(out) : out == exact || fabs(out - exact) <= bound) return;
    fail_msg("%s %s: key %lld, head %lld is %.9g, expected %.9g within %.3g",
             quern_cpu_level_name(kernels->level), what, (long long)key, (long long)head, out, exact, bound);
}

/* Scores with a column that is -inf throughout, one that is in part, one with NaN. */
static void fill_scores(float *s, int64_t keys, int64_t heads, test_random *random)
{
    for (int64_t i = 0; i < keys * heads; i++) {
        const int64_t h = i % heads;
        s[i] = (float)(4 * test_random_normal(random));
        if (h == 3 || (h == 4 && i / heads % 2 == 0)) s[i] = -INFINITY;
        if (h == 5 && i / heads == keys / 2) s[i] = NAN;
    }
}

static void check_softmax(const mqa_kernels *kernels, bool narrow, int64_t keys, int64_t heads, bool fresh,
                          test_random *random)
{
    static float s[SCORES + HEADS_MOST + 1], before[SCORES];
    float max[HEADS_MOST], sum[HEADS_MOST], shrink[HEADS_MOST], old_max[HEADS_MOST], old_sum[HEADS_MOST];
    const char *name = narrow ? "mqa_softmax_bf16" : "mqa_softmax_f32";
    const double scale2 = 0.37;
    fill_scores(s, keys, heads, random);
    memcpy(before, s, sizeof before);
    s[keys * heads] = 77;
    for (int64_t h = 0; h < heads; h++) {
        max[h] = old_max[h] = fresh ? -INFINITY : (float)(3 * test_random_normal(random));
        sum[h] = old_sum[h] = fresh ? 0 : (float)(1 + test_random_uniform(random));
    }
    const mqa_softmax t = {s, (int32_t)keys, (int32_t)heads, (float)scale2, max, sum, shrink};
    (narrow ? kernels->mqa_softmax_bf16 : kernels->mqa_softmax_f32)(&t);
    assert_true(s[keys * heads] == 77);
    for (int64_t h = 0; h < heads; h++) {
        double most = (double)old_max[h], total = 0, size = 0;
        for (int64_t k = 0; k < keys; k++)
            if ((double)before[k * heads + h] > most) most = (double)before[k * heads + h];
        assert_true((double)max[h] == most);
        const double fall =
            most > (double)old_max[h] ? exp2(((double)old_max[h] - most) * (double)(float)scale2) : 1;
        const double x = 60 * scale2; /* at most that far from the maximum */
        const double unit = test_kernel_bound("mqa", name, kernels->level, 1, x);
        expect(kernels, "shrink", 0, h, (double)shrink[h], fall, unit * fall);
        for (int64_t k = 0; k < keys; k++) {
            const double score = (double)before[k * heads + h];
            const double p = isnan(score)        ? score
                             : most == -INFINITY ? 0
                                                 : exp2((score - most) * (double)(float)scale2);
            double out = (double)s[k * heads + h];
            if (narrow) out = half_at((const uint16_t *)(const void *)s, (k / 2 * heads + h) * 2 + k % 2);
            expect(kernels, name, k, h, out, p,
                   unit * p + (narrow ? test_kernel_rounding(QUERN_BF16, p) : 0));
            total += p;
            size += p;
        }
        if (narrow && keys % 2 == 1)
            assert_true(half_at((const uint16_t *)(const void *)s, (keys / 2 * heads + h) * 2 + 1) == 0);
        total += (double)old_sum[h] * fall;
        size += (double)old_sum[h] * fall;
        expect(kernels, "sum", 0, h, (double)sum[h], total, (unit + (double)(keys + 2) * 0x1p-24) * size);
    }
    for (int64_t i = 0; i < SCORES; i++) s[i] = 0.5f;
    TEST_TIME("mqa", name, kernels->level, keys * heads,
              (narrow ? kernels->mqa_softmax_bf16 : kernels->mqa_softmax_f32)(&t));
}

static void softmaxes(void **state)
{
    static const int64_t keys[] = {1, 2, 3, 16, 33, 67}, heads[] = {16, 48};
    (void)state;
    test_random random = {test_seed("softmaxes", 8)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const mqa_kernels *kernels = cpu_kernels_for(level)->mqa;
        for (int i = 0; i < 24; i++) {
            check_softmax(kernels, false, keys[i % 6], heads[i / 6 % 2], i >= 12, &random);
            if (kernels->mqa_softmax_bf16 != NULL)
                check_softmax(kernels, true, keys[i % 6], heads[i / 6 % 2], i >= 12, &random);
        }
    }
}

static void check_gradient(const mqa_kernels *kernels, bool narrow, int64_t keys, int64_t heads,
                           test_random *random)
{
    static float s[SCORES + 1], dp[SCORES + 1], s0[SCORES], dp0[SCORES];
    static uint16_t p[SCORES + 1], ds[SCORES + 1];
    static uint32_t pairs[SCORES + 1];
    float top[HEADS_MOST], factor[HEADS_MOST], delta[HEADS_MOST];
    const char *name = narrow ? "mqa_gradient_bf16" : "mqa_gradient_f32";
    const float scale2 = 0.37f, scale = 0.25f;
    fill_scores(s, keys, heads, random);
    for (int64_t i = 0; i < keys * heads; i++) dp[i] = (float)test_random_normal(random);
    for (int64_t h = 0; h < heads; h++) {
        top[h] = h == 5 || h == 9 ? INFINITY : (float)(3 + test_random_uniform(random));
        factor[h] = (float)(0.5 + test_random_uniform(random));
        delta[h] = (float)test_random_normal(random);
    }
    dp[9 + heads * (keys - 1)] = NAN; /* of a head that sees nothing */
    memcpy(s0, s, sizeof s0), memcpy(dp0, dp, sizeof dp0);
    s[keys * heads] = dp[keys * heads] = 77;
    p[keys * heads] = ds[keys * heads] = 77;
    pairs[(keys + 1) / 2 * heads] = 77;
    const mqa_gradient t = {s, dp, (int32_t)keys, (int32_t)heads, scale2, scale, top, factor, delta,
                            p, ds, pairs};
    (narrow ? kernels->mqa_gradient_bf16 : kernels->mqa_gradient_f32)(&t);
    assert_true(s[keys * heads] == 77 && dp[keys * heads] == 77);
    assert_true(p[keys * heads] == 77 && ds[keys * heads] == 77 && pairs[(keys + 1) / 2 * heads] == 77);
    for (int64_t i = 0; i < keys * heads; i++) {
        const int64_t k = i / heads, h = i % heads;
        const double x = ((double)s0[i] - (double)top[h]) * (double)scale2,
                     exact_p = top[h] == INFINITY ? 0 : exp2(x) * (double)factor[h];
        const double unit =
            test_kernel_bound("mqa", name, kernels->level, 1, fabs(x) < 100 ? fabs(x) + 2 : 2);
        const double size = exact_p * (fabs((double)dp0[i]) + fabs((double)delta[h])) * (double)scale;
        const double exact_ds =
            top[h] == INFINITY ? 0 : exact_p * ((double)dp0[i] - (double)delta[h]) * (double)scale;
        const double round_p = narrow ? test_kernel_rounding(QUERN_BF16, exact_p) : 0,
                     round_ds = narrow ? test_kernel_rounding(QUERN_BF16, exact_ds) : 0;
        expect(kernels, "P", k, h, narrow ? half_at(p, i) : (double)s[i], exact_p, unit * exact_p + round_p);
        expect(kernels, "dS", k, h, narrow ? half_at(ds, i) : (double)dp[i], exact_ds,
               2 * unit * size + round_ds);
        if (narrow)
            assert_true(half_at((const uint16_t *)(const void *)pairs, (k / 2 * heads + h) * 2 + k % 2) ==
                        half_at(ds, i));
        if (narrow && k == keys - 1 && k % 2 == 0)
            assert_true(half_at((const uint16_t *)(const void *)pairs, (k / 2 * heads + h) * 2 + 1) == 0);
    }
    for (int64_t i = 0; i < SCORES; i++) s[i] = dp[i] = 0.5f;
    TEST_TIME("mqa", name, kernels->level, keys * heads,
              (narrow ? kernels->mqa_gradient_bf16 : kernels->mqa_gradient_f32)(&t));
}

static void gradients(void **state)
{
    static const int64_t keys[] = {1, 2, 3, 16, 33, 67};
    (void)state;
    test_random random = {test_seed("gradients", 9)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const mqa_kernels *kernels = cpu_kernels_for(level)->mqa;
        for (int i = 0; i < 12; i++) {
            check_gradient(kernels, false, keys[i % 6], i < 6 ? 16 : 48, &random);
            if (kernels->mqa_gradient_bf16 != NULL)
                check_gradient(kernels, true, keys[i % 6], i < 6 ? 16 : 48, &random);
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(softmaxes), cmocka_unit_test(gradients),
                                       cmocka_unit_test_prestate(test_every_kernel, (char *)"mqa_rows_test")};
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
