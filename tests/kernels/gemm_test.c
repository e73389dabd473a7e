/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm_test.c - dense products at every level, by oneDNN and by the own micro-kernel, against sums in double.
 *
 * Bound, entry by entry: a sum of n products in f32 in any order is within (n + 1) 2^-24 of the sum of the
 * products' absolute values; adding it to C rounds once more.
 */
#include "cmocka_c11.h"
#include "core/half.h"
#include "core/parallel.h"
#include "cpu/gemm.h"
#include "cpu/levels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef struct product {
    gemm_shape shape;
    bool panels;
    float *a_values, *b_values; /* [m][k], [k][n], as the dtype rounds them */
    void *a, *b;                /* as gemm_run wants them */
    float *old, *c;             /* [m][ldc], GUARD floats more on both sides */
    void *scratch;
    gemm plan;
} product;

enum { GUARD = 16 };
static gemm_cache cache;

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static void *cleared(size_t bytes)
{
    void *p = calloc(bytes + 64, 1);
    assert_non_null(p);
    return p;
}

/* Panels hold k rows; b is the matrix whose columns they are. */
static void pack_b(product *x, int64_t panel)
{
    const gemm_shape *s = &x->shape;
    const bool pairs = s->dtype == QUERN_BF16;
    for (int64_t p = 0; p < s->k; p++)
        for (int64_t j = 0; j < s->n; j++) {
            const float value = x->b_values[p * s->n + j];
            const int64_t at = j / panel * s->panel_stride + (pairs ? p / 2 : p) * s->ldb + j % panel;
            if (!pairs) ((float *)x->b)[at] = value;
            else ((uint16_t *)x->b)[at * 2 + p % 2] = bf16_from_float(value);
        }
}

static product make_product(const stage_exec *exec, quern_dtype dtype, int64_t m, int64_t n, int64_t k,
                            bool transposed, bool panels, bool gaps, uint64_t seed)
{
    const int64_t panel = cpu_kernels_for(exec->cpu_level)->attention->panel,
                  pairs = dtype == QUERN_BF16 ? 2 : 1;
    test_random random = {seed};
    product x = {.panels = panels};
    x.shape = (gemm_shape){.dtype = dtype,
                           .m = m,
                           .n = n,
                           .k = k,
                           .lda = (transposed ? m : k) + (gaps ? 2 : 0),
                           .a_transposed = transposed,
                           .ldb = panels ? panel : round_up(n, 16) + (gaps ? 4 : 0),
                           .panel_stride = panels ? k / pairs * panel : panel,
                           .ldc = round_up(n, 16) + (gaps ? 3 : 0)};
    const gemm_shape *s = &x.shape;
    x.a_values = cleared((size_t)(m * k) * sizeof(float));
    x.b_values = cleared((size_t)(k * n) * sizeof(float));
    x.a = cleared((size_t)((transposed ? k : m) * s->lda) * 4);
    x.b = cleared((size_t)(panels ? round_up(n, panel) * (k + 2) : (k + 1) * s->ldb) * 4);
    x.old = cleared((size_t)(m * s->ldc + 2 * GUARD) * sizeof(float));
    x.c = cleared((size_t)(m * s->ldc + 2 * GUARD) * sizeof(float));
    for (int64_t i = 0; i < m * k; i++) {
        const float value = x.a_values[i] = (float)test_round(dtype, test_random_normal(&random));
        const int64_t row = i / k, p = i % k, at = transposed ? p * s->lda + row : row * s->lda + p;
        if (dtype == QUERN_BF16) ((uint16_t *)x.a)[at] = bf16_from_float(value);
        else ((float *)x.a)[at] = value;
    }
    for (int64_t i = 0; i < k * n; i++) x.b_values[i] = (float)test_round(dtype, test_random_normal(&random));
    pack_b(&x, panel);
    for (int64_t i = 0; i < m * s->ldc + 2 * GUARD; i++) x.old[i] = (float)test_random_normal(&random);
    x.plan = gemm_plan(exec, s);
    x.scratch = cleared(x.plan.scratch_bytes);
    return x;
}

static void free_product(product *x)
{
    free(x->a_values), free(x->b_values), free(x->a), free(x->b), free(x->old), free(x->c), free(x->scratch);
}

/* Runs the first m rows, n columns, k terms and compares. */
static void check(product *x, int64_t m, int64_t n, int64_t k, bool accumulate)
{
    const gemm_shape *s = &x->shape;
    const int64_t ldc = s->ldc, all = s->m * ldc + 2 * GUARD;
    memcpy(x->c, x->old, (size_t)all * sizeof(float));
    gemm_run(&x->plan, m, n, k, x->a, x->b, x->c + GUARD, accumulate, x->scratch);
    for (int64_t i = 0; i < all; i++) {
        const int64_t row = (i - GUARD) / ldc, column = (i - GUARD) % ldc;
        if (i >= GUARD && row < m && column < round_up(n, 16)) continue;
        if (memcmp(&x->c[i], &x->old[i], sizeof(float)) != 0)
            fail_msg("element %lld beside C was written", (long long)i);
    }
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            const double before = accumulate ? (double)x->old[GUARD + i * ldc + j] : 0;
            double sum = before, size = fabs(before);
            for (int64_t p = 0; p < k; p++) {
                const double term = (double)x->a_values[i * s->k + p] * (double)x->b_values[p * s->n + j];
                sum += term;
                size += fabs(term);
            }
            const double got = (double)x->c[GUARD + i * ldc + j];
            if (!(fabs(got - sum) <= (double)(k + 2) * 0x1p-24 * size))
                fail_msg("%s m %lld n %lld k %lld%s%s%s: C[%lld][%lld] is %.9g, expected %.9g",
                         s->dtype == QUERN_BF16 ? "bf16" : "f32", (long long)m, (long long)n, (long long)k,
                         s->a_transposed ? " transposed" : "", x->panels ? " panels" : "",
                         accumulate ? " accumulate" : "", (long long)i, (long long)j, got, sum);
        }
}

static void each_level(void (*body)(const stage_exec *exec, quern_dtype dtype))
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const stage_exec exec = {.device = QUERN_CPU, .threads = 1, .cpu_level = level, .gemm = &cache};
        body(&exec, QUERN_F32);
        if (cpu_kernels_for(exec.cpu_level)->attention->mm_bf16 != NULL) body(&exec, QUERN_BF16);
    }
}

/* Full tiles, then every kind of end of them. */
static void all_shapes(const stage_exec *exec, quern_dtype dtype)
{
    static const int64_t shapes[][3] = {{1, 8, 8},      {7, 24, 40},   {32, 128, 128}, {96, 64, 256},
                                        {96, 128, 512}, {64, 192, 96}, {128, 128, 128}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = 0; kind < 8; kind++) {
            const bool transposed = kind & 1, panels = kind & 2, gaps = kind & 4;
            const int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
            if (dtype == QUERN_BF16 && (transposed || !panels)) continue;
            product x = make_product(exec, dtype, m, n, k, transposed, panels, gaps, 100 * i + (size_t)kind);
            for (int accumulate = 0; accumulate < 2; accumulate++) {
                check(&x, m, n, k, accumulate);
                check(&x, m - m / 3, n, k, accumulate);
                check(&x, m, n, k / 16 * 8, accumulate);
                check(&x, m, n - n / 16 * 8, k, accumulate);
                check(&x, m, n, 0, accumulate);
            }
            free_product(&x);
        }
}

static void every_level_sums_right(void **state)
{
    (void)state;
    each_level(all_shapes);
}

/* Every path cuts sums at GEMM_DEPTH, so one call gives the bits of one call per part. */
static void long_sums(const stage_exec *exec, quern_dtype dtype)
{
    enum { M = 96, N = 128, K = 2 * GEMM_DEPTH + 256 };
    const bool panels = dtype == QUERN_BF16;
    product x = make_product(exec, dtype, M, N, K, false, panels, false, 7);
    const int64_t pairs = panels ? 2 : 1, bytes = (int64_t)quern_dtype_size(dtype);
    check(&x, M, N, K, false);
    float *whole = cleared(M * (size_t)x.shape.ldc * sizeof(float));
    memcpy(whole, x.c + GUARD, M * (size_t)x.shape.ldc * sizeof(float));
    for (int64_t p = 0; p < K; p += GEMM_DEPTH)
        gemm_run(&x.plan, M, N, K - p < GEMM_DEPTH ? K - p : GEMM_DEPTH, (const char *)x.a + p * bytes,
                 (const float *)x.b + p / pairs * x.shape.ldb, x.c + GUARD, p > 0, x.scratch);
    for (int64_t i = 0; i < M; i++)
        assert_memory_equal(whole + i * x.shape.ldc, x.c + GUARD + i * x.shape.ldc, N * sizeof(float));
    free(whole);
    free_product(&x);
}

static void long_sums_are_cut(void **state)
{
    (void)state;
    each_level(long_sums);
}

enum { TILES = 7 };
typedef struct team_job {
    const product *x;
    float *c;
    char *scratch;
} team_job;

static void tile(void *arg, int64_t index, int32_t thread)
{
    const team_job *job = arg;
    const gemm_shape *s = &job->x->shape;
    const int64_t rows = index == TILES - 1 ? s->m / 2 : s->m;
    gemm_run(&job->x->plan, rows, s->n, s->k, job->x->a, job->x->b, job->c + index * s->m * s->ldc, index % 2,
             job->scratch + (size_t)thread * (job->x->plan.scratch_bytes + 64));
}

/* Tiles give the same bits on 1, 2 and 3 threads, and the caller's number of threads is as it was. */
static void teams(const stage_exec *exec, quern_dtype dtype)
{
    product x = make_product(exec, dtype, 96, 128, 512, false, true, false, 9);
    const size_t floats = TILES * (size_t)(x.shape.m * x.shape.ldc) + 16;
    float *c[3];
    for (int t = 0; t < 3; t++) {
        c[t] = cleared(floats * sizeof(float));
        team_job job = {&x, c[t], cleared(3 * (x.plan.scratch_bytes + 64))};
#ifdef _OPENMP
        omp_set_num_threads(5);
#endif
        parallel_for(&(stage_exec){.threads = t + 1}, TILES, tile, &job);
#ifdef _OPENMP
        assert_int_equal(omp_get_max_threads(), 5);
#endif
        free(job.scratch);
        assert_memory_equal(c[0], c[t], floats * sizeof(float));
    }
    for (int t = 0; t < 3; t++) free(c[t]);
    free_product(&x);
}

static void bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    each_level(teams);
}

/* oneDNN serves the machine's best level only, by a kernel that uses no scratch but the caller's. */
static void picks(const stage_exec *exec, quern_dtype dtype)
{
    product x = make_product(exec, dtype, 96, 128, 512, false, true, false, 11),
            small = make_product(exec, dtype, 96, 24, 40, false, true, false, 12);
    bool wanted = false;
#ifdef QUERN_ONEDNN
    wanted = exec->cpu_level == quern_cpu_level_detect() &&
             cpu_kernels_for(exec->cpu_level)->attention->panel == 64 && getenv("ONEDNN_MAX_CPU_ISA") == NULL;
#endif
    assert_int_equal(x.plan.store != NULL, wanted);
    assert_int_equal(x.plan.add != NULL, wanted);
    const gemm again = gemm_plan(exec, &x.shape);
    assert_ptr_equal(again.store, x.plan.store);
    assert_null(small.plan.store);
    stage_exec alone = *exec;
    alone.gemm = NULL;
    assert_null(gemm_plan(&alone, &x.shape).store);
    free_product(&x);
    free_product(&small);
}

static void the_right_kernel_is_picked(void **state)
{
    (void)state;
    each_level(picks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_level_sums_right),
        cmocka_unit_test(long_sums_are_cut),
        cmocka_unit_test(bits_do_not_depend_on_threads),
        cmocka_unit_test(the_right_kernel_is_picked),
    };
    gemm_cache_open(&cache);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gemm_cache_close(&cache);
    return failed;
}
