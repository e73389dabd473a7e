/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * hyper_rows_test.c - hyper-connections' tile kernels at every level against double: all tails, unaligned
 * rows, NaN and infinities, guards.
 *
 * Bounds are those of src/cpu/kernels.inc.
 */
#include "cmocka_c11.h"
#include "cpu/hyper/hyper_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "oracle/hyper.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int64_t lengths[] = {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 40, 64, 65, 130, 1024};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static void expect(const hyper_kernels *kernels, const char *what, int64_t at, double out, double expected,
                   double bound)
{
    if (isnan(expected) ? isnan(out)
                        : out == expected || (isfinite(expected) && fabs(out - expected) <= bound))
        return;
    fail_msg("%s %s: [%lld] is %.9g, expected %.9g within %.3g", quern_cpu_level_name(kernels->level), what,
             (long long)at, out, expected, bound);
}

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    test_tensor t = test_tensor_make(random, dtype, 2, (int64_t[]){rows, columns}, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1);
    return t;
}

/* Puts a NaN or an infinity somewhere, now and then. */
static void spoil(test_random *random, test_tensor *t, double *values)
{
    const int64_t n = test_tensor_count(t);
    if (n == 0 || !test_random_one_in(random, 4)) return;
    values[test_random_int(random, 0, n - 1)] =
        test_random_one_in(random, 2) ? (double)NAN : (double)INFINITY;
    test_tensor_set(t, values);
}

/* ---- products and squares ---- */

static void check_dots(const hyper_kernels *kernels, test_random *random, int64_t rows, int64_t columns,
                       int64_t n)
{
    test_tensor a = matrix(random, QUERN_F32, rows, n), b = matrix(random, QUERN_F32, columns, n),
                c = matrix(random, QUERN_F32, rows, columns);
    double *x = test_tensor_get(&a), *y = test_tensor_get(&b), *old = test_tensor_get(&c);
    spoil(random, &a, x), spoil(random, &b, y);
    const double bound = test_kernel_bound("hyper", "dots", kernels->level, (double)n + 1, 0);
    const hyper_ahead ahead = {{a.view.data, b.view.data}, {4 * n, 0}, 4};
    kernels->dots(rows, columns, n, a.view.data, n, b.view.data, n, c.view.data, columns,
                  test_random_one_in(random, 2) ? &ahead : NULL);
    double *out = test_tensor_get(&c);
    for (int64_t i = 0; i < rows * columns; i++) {
        double sum = old[i], size = fabs(old[i]);
        for (int64_t k = 0; k < n; k++) {
            const double term = x[i / columns * n + k] * y[i % columns * n + k];
            sum += term;
            size += fabs(term);
        }
        expect(kernels, "dots", i, out[i], sum, bound * size);
    }
    test_tensor_check_guards(&c, "c");
    test_tensor_check_unchanged(&a, "a"), test_tensor_check_unchanged(&b, "b");
    TEST_TIME("hyper", "dots", kernels->level, rows * columns * n,
              kernels->dots(rows, columns, n, a.view.data, n, b.view.data, n, c.view.data, columns, NULL));
    free(x), free(y), free(old), free(out);
    test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&c);
}

static void check_squares(const hyper_kernels *kernels, test_random *random, int64_t n)
{
    test_tensor a = matrix(random, QUERN_F32, 1, n);
    double *x = test_tensor_get(&a), sum = 0;
    spoil(random, &a, x);
    for (int64_t k = 0; k < n; k++) sum += x[k] * x[k];
    const double bound = test_kernel_bound("hyper", "squares", kernels->level, (double)n, 0);
    expect(kernels, "squares", 0, (double)kernels->squares(a.view.data, n), sum, bound * sum);
    TEST_TIME("hyper", "squares", kernels->level, 4 * n, (void)kernels->squares(a.view.data, n));
    free(x);
    test_tensor_free(&a);
}

static void products(void **state)
{
    const uint64_t seed = test_seed("hyper dots", 1);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (int i = 0; i < LENGTHS; i++) {
            check_squares(kernels, &random, lengths[i]);
            for (int64_t rows = 1; rows <= 9; rows++)
                for (int64_t columns = 1; columns <= 13; columns++)
                    check_dots(kernels, &random, rows, columns, lengths[i]);
        }
        check_dots(kernels, &random, 12, 24, 1024);
    }
}

/* ---- sums of rows ---- */

static void check_combine(const hyper_kernels *kernels, test_random *random, quern_dtype from, quern_dtype to,
                          int32_t ins, int32_t outs, int64_t n, bool stream)
{
    test_tensor in = test_tensor_make(random, from, 2, (int64_t[]){ins, n}, TEST_UNALIGNED),
                out = test_tensor_make(random, to, 2, (int64_t[]){outs, n},
                                       stream ? TEST_CONTIGUOUS : TEST_UNALIGNED),
                add = matrix(random, QUERN_F32, outs, n),
                m = matrix(random, QUERN_F32, outs + ins, ins + outs);
    test_tensor_normal(&in, random, 1);
    double *x = test_tensor_get(&in), *more = test_tensor_get(&add), *factor = test_tensor_get(&m);
    spoil(random, &in, x);
    const bool adds = test_random_one_in(random, 2), shares = test_random_one_in(random, 2);
    test_tensor shared = matrix(random, QUERN_F32, 1, n);
    double *common = test_tensor_get(&shared);
    hyper_rows r = {.from = from,
                    .ins = ins,
                    .m = m.view.data,
                    .ldm = ins,
                    .to = to,
                    .outs = outs,
                    .n = n,
                    .stream = stream};
    for (int32_t i = 0; i < ins; i++)
        r.in[i] = (char *)in.view.data + (size_t)(i * n) * quern_dtype_size(from);
    for (int32_t k = 0; k < outs; k++) {
        r.out[k] = (char *)out.view.data + (size_t)(k * n) * quern_dtype_size(to);
        if (adds) r.add[k] = (float *)add.view.data + k * n;
        r.own[k] = r.in[k % ins];
    }
    if (shares) r.shared = shared.view.data;
    r.shared_m = m.view.data;
    r.own_m = 0.7f;
    const double bound = test_kernel_bound("hyper", "combine", kernels->level, ins + 3, 0);
    kernels->combine(&r);
    double *y = test_tensor_get(&out);
    for (int64_t e = 0; e < outs * n; e++) {
        double sum = adds ? more[e] : 0, size = fabs(sum);
        for (int32_t i = 0; i < ins; i++) {
            const double term = factor[e / n * ins + i] * x[i * n + e % n];
            sum += term;
            size += fabs(term);
        }
        if (shares) {
            const double both[] = {factor[e / n] * common[e % n], (double)0.7f * x[e / n % ins * n + e % n]};
            sum += both[0] + both[1];
            size += fabs(both[0]) + fabs(both[1]);
        }
        expect(kernels, "combine", e, y[e], sum, bound * size + test_kernel_rounding(to, sum));
    }
    test_tensor_check_guards(&out, "out");
    test_tensor_check_unchanged(&in, "in"), test_tensor_check_unchanged(&add, "add");
    TEST_TIME("hyper", "combine", kernels->level, n * (ins + outs) * 4, kernels->combine(&r));
    test_tensor_free(&shared);
    free(x), free(more), free(factor), free(y), free(common);
    test_tensor_free(&in), test_tensor_free(&out), test_tensor_free(&add), test_tensor_free(&m);
}

static void sums_of_rows(void **state)
{
    static const quern_dtype pairs[][2] = {{QUERN_F32, QUERN_F32},
                                           {QUERN_BF16, QUERN_BF16},
                                           {QUERN_F16, QUERN_F16},
                                           {QUERN_BF16, QUERN_F32},
                                           {QUERN_F16, QUERN_F32}};
    const uint64_t seed = test_seed("hyper combine", 2);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (int p = 0; p < 5; p++)
            for (int i = 0; i < LENGTHS; i++)
                for (int32_t ins = 1; ins <= HYPER_INPUTS; ins++) {
                    const int32_t outs = (int32_t)test_random_int(&random, 1, HYPER_COPIES);
                    check_combine(kernels, &random, pairs[p][0], pairs[p][1], ins, outs, lengths[i], false);
                    if (lengths[i] * (int64_t)quern_dtype_size(pairs[p][1]) % 64 == 0)
                        check_combine(kernels, &random, pairs[p][0], pairs[p][1], ins, outs, lengths[i],
                                      true);
                }
    }
}

/* ---- weights ---- */

typedef struct weighing {
    oracle_hyper oracle;
    int64_t weights, ld;
    test_tensor sums, base, scale, out, d_weights, d_sums;
    double *s, *b, *f, *d;
    hyper_weights w;
} weighing;

static weighing weighing_make(test_random *random, int64_t tokens, int32_t copies, int32_t iterations,
                              bool head)
{
    weighing g = {.weights = head ? copies : copies * (copies + 2)};
    g.ld = g.weights + test_random_int(random, 1, 5);
    g.sums = matrix(random, QUERN_F32, tokens, g.ld);
    g.base = matrix(random, QUERN_F32, 1, g.weights);
    g.scale = matrix(random, QUERN_F32, 1, 3);
    g.d_weights = matrix(random, QUERN_F32, tokens, g.ld);
    g.out = test_tensor_make(random, QUERN_F32, 2, (int64_t[]){tokens, g.ld}, TEST_UNALIGNED);
    g.d_sums = test_tensor_make(random, QUERN_F32, 2, (int64_t[]){tokens, g.ld}, TEST_UNALIGNED);
    g.s = test_tensor_get(&g.sums), g.b = test_tensor_get(&g.base), g.f = test_tensor_get(&g.scale);
    g.d = test_tensor_get(&g.d_weights);
    for (int64_t t = 0; t < tokens; t++) {
        double *square = &g.s[t * g.ld + g.weights];
        *square = 100 * fabs(*square);
        if (test_random_one_in(random, 9)) g.s[t * g.ld + test_random_int(random, 0, g.weights - 1)] *= 1000;
        if (test_random_one_in(random, 30))
            g.s[t * g.ld + test_random_int(random, 0, g.weights - 1)] = (double)NAN;
    }
    test_tensor_set(&g.sums, g.s);
    free(g.s);
    g.s = test_tensor_get(&g.sums);
    g.w = (hyper_weights){.tokens = tokens,
                          .copies = copies,
                          .iterations = iterations,
                          .head = head,
                          .width = 100,
                          .eps = 1e-3f,
                          .rms_eps = 1e-2f,
                          .sums = g.sums.view.data,
                          .ld = g.ld,
                          .base = g.base.view.data,
                          .scale = g.scale.view.data,
                          .weights = g.out.view.data,
                          .d_weights = g.d_weights.view.data,
                          .d_sums = g.d_sums.view.data};
    g.oracle = (oracle_hyper){.copies = copies,
                              .head = head,
                              .iters = iterations,
                              .eps = (double)1e-3f,
                              .rms_eps = (double)1e-2f,
                              .base = g.b,
                              .scale = g.f};
    return g;
}

static void weighing_free(weighing *g)
{
    test_tensor *const all[] = {&g->sums, &g->base, &g->scale, &g->out, &g->d_weights, &g->d_sums};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (i == 3 || i == 5) test_tensor_check_guards(all[i], "results");
        else test_tensor_check_unchanged(all[i], "inputs");
        test_tensor_free(all[i]);
    }
    free(g->s), free(g->b), free(g->f), free(g->d);
}

/* The largest logit of a token. */
static double largest_logit(const weighing *g, int64_t t)
{
    const double root = sqrt(g->s[t * g->ld + g->weights] / 100 + (double)1e-2f);
    double most = 0;
    for (int64_t j = 0; j < g->weights; j++) {
        const double scale = g->f[j < g->w.copies       ? 0
                                  : j < 2 * g->w.copies ? 1
                                                        : 2],
                     size = fabs(g->s[t * g->ld + j] / root * scale) + fabs(g->b[j]);
        if (size > most) most = size;
    }
    return most;
}

static void check_weights(const hyper_kernels *kernels, weighing *g)
{
    kernels->weights(&g->w);
    double *out = test_tensor_get(&g->out);
    for (int64_t t = 0; t < g->w.tokens; t++) {
        double expected[ORACLE_WEIGHTS];
        const double bound =
            test_kernel_bound("hyper", "weights", kernels->level, g->w.iterations, largest_logit(g, t));
        oracle_hyper_weights(&g->oracle, g->s + t * g->ld, g->s[t * g->ld + g->weights] / 100, expected);
        for (int64_t j = 0; j < g->weights; j++)
            expect(kernels, "weights", t * g->weights + j, out[t * g->ld + j], expected[j], bound * 2);
    }
    TEST_TIME("hyper", "weights", kernels->level, g->w.tokens * g->weights, kernels->weights(&g->w));
    free(out);
}

static void check_weights_backward(const hyper_kernels *kernels, weighing *g)
{
    double base[ORACLE_WEIGHTS] = {0}, scale[3] = {0}, d_base[ORACLE_WEIGHTS] = {0}, d_scale[3] = {0},
           size = 0, moved = 0;
    float *trace = malloc((size_t)hyper_trace_floats(g->w.copies, g->w.iterations) * sizeof *trace);
    g->w.trace = trace;
    g->w.d_base = base;
    g->w.d_scale = scale;
    kernels->weights_backward(&g->w);
    double *out = test_tensor_get(&g->d_sums);
    for (int64_t t = 0; t < g->w.tokens; t++) {
        const double *s = g->s + t * g->ld, *d = g->d + t * g->ld, logit = largest_logit(g, t),
                     root = sqrt(s[g->weights] / 100 + (double)1e-2f);
        double d_sums[ORACLE_WEIGHTS] = {0}, terms = 0, factor = 1, sum = 1;
        const double bound =
            test_kernel_bound("hyper", "weights_backward", kernels->level, g->w.iterations, logit);
        const double d_square =
            oracle_hyper_weights_backward(&g->oracle, s, s[g->weights] / 100, d, d_sums, d_base, d_scale);
        for (int64_t j = 0; j < g->weights; j++) terms += fabs(d[j]), sum = fmax(sum, fabs(s[j]));
        for (int i = 0; i < 3; i++) factor = fmax(factor, fabs(g->f[i]));
        for (int64_t j = 0; j < g->weights; j++)
            expect(kernels, "d_sums", t * g->weights + j, out[t * g->ld + j], d_sums[j],
                   bound * terms * factor / root);
        expect(kernels, "d_square", t, out[t * g->ld + g->weights], 2 * d_square / 100,
               bound * terms * factor * (double)g->weights * sum / (root * root * root) / 100);
        size += bound * terms;
        moved += bound * terms * sum / root;
    }
    for (int64_t j = 0; j < g->weights; j++) expect(kernels, "d_base", j, base[j], d_base[j], size);
    for (int i = 0; i < (g->w.head ? 1 : 3); i++)
        expect(kernels, "d_scale", i, scale[i], d_scale[i], moved * (double)g->weights);
    TEST_TIME("hyper", "weights_backward", kernels->level, g->w.tokens * g->weights,
              kernels->weights_backward(&g->w));
    free(trace), free(out);
}

static void weights_of_tokens(void **state)
{
    static const int64_t tokens[] = {0, 1, 3, 4, 7, 8, 9, 16, 17, 24};
    const uint64_t seed = test_seed("hyper weights", 3);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
            for (int32_t copies = 1; copies <= HYPER_COPIES; copies++)
                for (int head = 0; head < 2; head++) {
                    const int32_t iterations =
                        test_random_one_in(&random, 3) ? 1 : (int32_t)test_random_int(&random, 1, 64);
                    weighing g = weighing_make(&random, tokens[i], copies, iterations, head);
                    check_weights(kernels, &g);
                    check_weights_backward(kernels, &g);
                    weighing_free(&g);
                }
    }
}

int main(int argc, char **argv)
{
    char program[] = "hyper_rows_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(sums_of_rows),
        cmocka_unit_test(weights_of_tokens),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
