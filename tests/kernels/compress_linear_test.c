/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress_linear_test.c - linear compression over more entries than a tile holds, so that full tiles
 * (oneDNN's) and ends of them (the micro-kernel's) meet: forward and backward against sums in double, equal
 * bits on 1, 2, 3 threads.
 *
 * Bound of an output: relative L2 error 2e-6 forward and 1e-5 backward in f32; bf16 outputs 4e-3.
 */
#include "cmocka_c11.h"
#include "runtime/context.h"
#include "core/half.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N = 1203, HEADS = 2, D = 128, OUTPUTS = 4 };

typedef struct linear_case {
    quern_dtype dtype;
    int64_t l, d, entries;
    float *x, *w, *pe, *g; /* [N][HEADS][D], [HEADS][l D][D], [HEADS][l][D], [entries][HEADS][D], rounded */
    void *x_data, *w_data, *y;
    float *d_x, *d_w, *d_pe;
} linear_case;

static void *cleared(size_t bytes)
{
    void *p = calloc(bytes, 1);
    assert_non_null(p);
    return p;
}

static float *normal(int64_t count, quern_dtype dtype, double scale, test_random *random)
{
    float *values = cleared((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)test_round(dtype, scale * test_random_normal(random));
    return values;
}

static void *as_dtype(const float *values, int64_t count, quern_dtype dtype)
{
    void *data = cleared((size_t)count * quern_dtype_size(dtype));
    if (dtype == QUERN_F32) memcpy(data, values, (size_t)count * sizeof *values);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data)[i] = bf16_from_float(values[i]);
    return data;
}

static linear_case make_case(quern_dtype dtype, int64_t l, int64_t d)
{
    test_random random = {(uint64_t)(l * 100 + d)};
    linear_case c = {.dtype = dtype, .l = l, .d = d, .entries = (N - l) / d + 1};
    const int64_t weights = HEADS * l * D * D;
    c.x = normal(N * HEADS * D, dtype, 1, &random);
    c.w = normal(weights, dtype, 0.1, &random);
    c.pe = normal(HEADS * l * D, QUERN_F32, 1, &random);
    c.g = normal(c.entries * HEADS * D, QUERN_F32, 1, &random);
    c.x_data = as_dtype(c.x, N * HEADS * D, dtype);
    c.w_data = as_dtype(c.w, weights, dtype);
    c.y = cleared((size_t)(c.entries * HEADS * D) * 4);
    c.d_x = cleared(N * HEADS * D * sizeof(float));
    c.d_w = cleared((size_t)weights * sizeof(float));
    c.d_pe = cleared((size_t)(HEADS * l * D) * sizeof(float));
    return c;
}

static void free_case(linear_case *c)
{
    free(c->x), free(c->w), free(c->pe), free(c->g), free(c->x_data), free(c->w_data), free(c->y),
        free(c->d_x), free(c->d_w), free(c->d_pe);
}

static void run(linear_case *c, quern_cpu_level level, int32_t threads)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx;
    stage_exec exec;
    params.threads = threads;
    params.cpu_level = level;
    assert_int_equal(quern_context_create(&params, &ctx), QUERN_OK);
    const quern_backend *backend = context_backend(ctx, QUERN_CPU, 0, NULL, &exec);
    const int64_t x[] = {1, N, HEADS, D}, y[] = {1, c->entries, HEADS, D}, w[] = {HEADS, c->l * D, D},
                  pe[] = {HEADS, c->l, D};
    compress_args args = {.kind = COMPRESS_LINEAR, .block_size = c->l, .stride = c->d};
    args.seqs.batch = 1;
    args.seqs.n_q = N;
    args.seqs.n_kv = c->entries;
    args.k = quern_tensor_contiguous(c->x_data, c->dtype, 4, x);
    args.w_k = quern_tensor_contiguous(c->w_data, c->dtype, 3, w);
    args.pe_k = quern_tensor_contiguous(c->pe, QUERN_F32, 3, pe);
    args.k_cmp = quern_tensor_contiguous(c->y, c->dtype, 4, y);
    test_workspace forward = test_workspace_make(backend->compress_forward.workspace(&exec, &args));
    assert_int_equal(backend->compress_forward.run(&exec, &args, forward.data), QUERN_OK);
    test_workspace_close(&forward);
    args.k_cmp = (quern_tensor){0};
    args.d_k_cmp = quern_tensor_contiguous(c->g, QUERN_F32, 4, y);
    args.d_k = quern_tensor_contiguous(c->d_x, QUERN_F32, 4, x);
    args.d_w_k = quern_tensor_contiguous(c->d_w, QUERN_F32, 3, w);
    args.d_pe_k = quern_tensor_contiguous(c->d_pe, QUERN_F32, 3, pe);
    test_workspace backward = test_workspace_make(backend->compress_backward.workspace(&exec, &args));
    assert_int_equal(backend->compress_backward.run(&exec, &args, backward.data), QUERN_OK);
    test_workspace_close(&backward);
    quern_context_destroy(ctx);
}

/* ---- the same in double, for one head ---- */

static void add_error(double got, double wanted, double error[2])
{
    error[0] += (got - wanted) * (got - wanted);
    error[1] += wanted * wanted;
}

static void check_error(const char *what, const double error[2], double bound, quern_cpu_level level)
{
    if (!(sqrt(error[0]) <= bound * sqrt(error[1])))
        fail_msg("%s, %s: relative error %.3g, bound %.3g", what, quern_cpu_level_name(level),
                 sqrt(error[0] / error[1]), bound);
}

static void check(const linear_case *c, quern_cpu_level level)
{
    double errors[OUTPUTS][2] = {{0}};
    double *d_x = cleared(N * D * sizeof *d_x);
    const int64_t h = 1, row = HEADS * D;
    const float *w = c->w + h * c->l * D * D, *pe = c->pe + h * c->l * D;
    for (int64_t i = 0; i < c->entries; i++) {
        double y[D] = {0};
        const float *g = c->g + i * row + h * D;
        for (int64_t p = 0; p < c->l; p++)
            for (int64_t e = 0; e < D; e++) {
                const double value = (double)c->x[(i * c->d + p) * row + h * D + e] + (double)pe[p * D + e];
                double back = 0;
                for (int64_t f = 0; f < D; f++) {
                    const double weight = (double)w[(p * D + e) * D + f];
                    y[f] += value * weight;
                    back += (double)g[f] * weight;
                }
                d_x[(i * c->d + p) * D + e] += back;
            }
        for (int64_t f = 0; f < D; f++) {
            const int64_t at = i * row + h * D + f;
            const double got = c->dtype == QUERN_BF16 ? (double)float_from_bf16(((uint16_t *)c->y)[at])
                                                      : (double)((float *)c->y)[at];
            add_error(got, y[f], errors[0]);
        }
    }
    for (int64_t t = 0; t < N; t++)
        for (int64_t e = 0; e < D; e++)
            add_error((double)c->d_x[t * row + h * D + e], d_x[t * D + e], errors[1]);
    for (int64_t p = 0; p < c->l; p++) { /* a third of dW's rows, all of dpe */
        for (int64_t e = p % 3; e < D; e += 3)
            for (int64_t f = 0; f < D; f++) {
                double sum = 0;
                for (int64_t i = 0; i < c->entries; i++)
                    sum += ((double)c->x[(i * c->d + p) * row + h * D + e] + (double)pe[p * D + e]) *
                           (double)c->g[i * row + h * D + f];
                add_error((double)c->d_w[((h * c->l + p) * D + e) * D + f], sum, errors[2]);
            }
        for (int64_t e = 0; e < D; e++) {
            double sum = 0;
            for (int64_t i = 0; i < c->entries; i++)
                for (int64_t f = 0; f < D; f++)
                    sum += (double)c->g[i * row + h * D + f] * (double)w[(p * D + e) * D + f];
            add_error((double)c->d_pe[(h * c->l + p) * D + e], sum, errors[3]);
        }
    }
    check_error("K_cmp", errors[0], c->dtype == QUERN_BF16 ? 4e-3 : 2e-6, level);
    check_error("dK", errors[1], 1e-5, level);
    check_error("dW_k", errors[2], 1e-5, level);
    check_error("dpe_k", errors[3], 1e-5, level);
    free(d_x);
}

static void check_case(quern_dtype dtype, int64_t l, int64_t d)
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        linear_case one = make_case(dtype, l, d);
        run(&one, level, 1);
        check(&one, level);
        for (int32_t threads = 2; threads <= 3; threads++) {
            linear_case more = make_case(dtype, l, d);
            run(&more, level, threads);
            assert_memory_equal(one.y, more.y, (size_t)(one.entries * HEADS * D) * quern_dtype_size(dtype));
            assert_memory_equal(one.d_x, more.d_x, N * HEADS * D * sizeof(float));
            assert_memory_equal(one.d_w, more.d_w, (size_t)(HEADS * l * D * D) * sizeof(float));
            assert_memory_equal(one.d_pe, more.d_pe, (size_t)(HEADS * l * D) * sizeof(float));
            free_case(&more);
        }
        free_case(&one);
    }
}

static void blocks_side_by_side(void **state)
{
    (void)state;
    check_case(QUERN_F32, 4, 4);
    check_case(QUERN_BF16, 4, 4);
}

static void blocks_that_overlap(void **state)
{
    (void)state;
    check_case(QUERN_F32, 6, 2);
    check_case(QUERN_BF16, 6, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_side_by_side),
        cmocka_unit_test(blocks_that_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
