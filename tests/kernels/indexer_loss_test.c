/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_loss_test.c - the tile kernels of the indexer's loss at every level against double: tails, NaN,
 * guards. Bounds are those of src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>

static test_tensor matrix(test_random *random, int64_t rows, int64_t columns)
{
    test_tensor t = test_tensor_make(random, QUERN_F32, 2, (int64_t[]){rows, columns}, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1);
    return t;
}

static void expect(const char *what, double out, double expected, double bound)
{
    if (isnan(expected) ? !isnan(out) : !(fabs(out - expected) <= bound))
        fail_msg("%s is %.9g, expected %.9g within %.3g", what, out, expected, bound);
}

static void check(const indexer_kernels *kernels, test_random *random, int64_t heads, int64_t n)
{
    const float scale = 0.3f;
    test_tensor z = matrix(random, heads, n), w = matrix(random, 1, heads), d = matrix(random, 1, n),
                sum = matrix(random, 1, n), d_w = matrix(random, 1, heads);
    double *zs = test_tensor_get(&z), *ws = test_tensor_get(&w), *ds = test_tensor_get(&d),
           *before = test_tensor_get(&d_w);
    if (n > 0 && test_random_one_in(random, 4)) zs[test_random_int(random, 0, heads * n - 1)] = (double)NAN;
    test_tensor_set(&z, zs);
    const double b1 = test_kernel_bound("indexer", "relu_sum", kernels->level, (double)heads, 0),
                 b2 = test_kernel_bound("indexer", "relu_backward", kernels->level, (double)n, 0);
    kernels->relu_sum(z.view.data, n, heads, w.view.data, scale, n, sum.view.data);
    TEST_TIME("indexer", "relu_sum", kernels->level, 4 * heads * n,
              kernels->relu_sum(z.view.data, n, heads, w.view.data, scale, n, sum.view.data));
    kernels->relu_backward(z.view.data, n, heads, w.view.data, scale, d.view.data, n, d_w.view.data);
    double *sums = test_tensor_get(&sum), *dz = test_tensor_get(&z), *dw = test_tensor_get(&d_w);
    for (int64_t i = 0; i < n; i++) {
        double total = 0, size = 0;
        for (int64_t h = 0; h < heads; h++) {
            const double x = zs[h * n + i] <= 0 ? 0 : zs[h * n + i];
            total += ws[h] * x * (double)scale;
            size += fabs(ws[h] * x * (double)scale);
        }
        expect("sum", sums[i], total, b1 * size);
    }
    for (int64_t h = 0; h < heads; h++) {
        double total = before[h], size = fabs(total);
        for (int64_t i = 0; i < n; i++) {
            const bool off = zs[h * n + i] <= 0;
            const double g = (double)scale * ds[i], x = off ? 0 : zs[h * n + i];
            total += g * x;
            size += fabs(g * x);
            expect("dz", dz[h * n + i], off ? 0 : g * ws[h], b2 * fabs(g * ws[h]));
        }
        expect("dw", dw[h], total, b2 * size);
    }
    test_tensor_check_guards(&z, "z"), test_tensor_check_guards(&sum, "sum"),
        test_tensor_check_guards(&d_w, "dw");
    test_tensor_check_unchanged(&w, "w"), test_tensor_check_unchanged(&d, "d");
    TEST_TIME(
        "indexer", "relu_backward", kernels->level, 8 * heads * n,
        kernels->relu_backward(z.view.data, n, heads, w.view.data, scale, d.view.data, n, d_w.view.data));
    free(zs), free(ws), free(ds), free(before), free(sums), free(dz), free(dw);
    test_tensor_free(&z), test_tensor_free(&w), test_tensor_free(&d), test_tensor_free(&sum);
    test_tensor_free(&d_w);
}

static void every_length(void **state)
{
    const uint64_t seed = test_seed("the indexer's loss' kernels", 1);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        for (int64_t n = 0; n <= 70; n++)
            for (int64_t heads = 1; heads <= 5; heads++)
                check(cpu_kernels_for(level)->indexer, &random, heads, n);
        check(cpu_kernels_for(level)->indexer, &random, 64, 128);
    }
}

int main(int argc, char **argv)
{
    char program[] = "indexer_loss_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_length),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
