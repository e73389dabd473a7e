/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress_cut_test.c - compression by weights over so many rows, positions, covering entries and tokens of a
 * block that the GPU cuts each of them, against sums in double at sampled places: all that stand near a cut
 * of 4096 rows, and every 61st.
 *
 * Bound: relative L2 error 1e-5 of f32 outputs (16-bit ones add their rounding: bf16 4e-3, f16 6e-4).
 */
#include "cmocka_c11.h"
#include "runtime/context.h"
#include "core/half.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD = 1, ROW_CUT = 4096 }; /* the head that is checked */

typedef struct cut_case {
    compress_kind kind;
    quern_dtype dtype, weights;
    int64_t l, d, n, heads, dim;
    int64_t positions, entries, line;
    float *x, *w, *pe, *g; /* rounded; [n][heads][dim], [heads][positions dim][dim], [heads][l][dim],
                              [entries][heads][dim] */
    float *d_x, *d_w, *d_pe;
    void *y;
} cut_case;

static void *cleared(int64_t bytes)
{
    void *p = calloc((size_t)bytes, 1);
    assert_non_null(p);
    return p;
}

static float *normal(int64_t count, quern_dtype dtype, double scale, test_random *random)
{
    float *values = cleared(count * 4);
    for (int64_t i = 0; i < count; i++)
        values[i] = (float)test_round(dtype, scale * test_random_normal(random));
    return values;
}

static void *as_dtype(const float *values, int64_t count, quern_dtype dtype)
{
    uint16_t *data = cleared(count * 2);
    for (int64_t i = 0; i < count; i++)
        data[i] = dtype == QUERN_BF16 ? bf16_from_float(values[i]) : f16_from_float(values[i]);
    return data;
}

static void run(cut_case *c)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx;
    stage_exec exec;
    assert_int_equal(quern_context_create(&params, &ctx), QUERN_OK);
    const quern_backend *backend = context_backend(ctx, QUERN_CPU, 0, NULL, &exec);
    const int64_t x[] = {1, c->n, c->heads, c->dim}, y[] = {1, c->entries, c->heads, c->dim},
                  w[] = {c->heads, c->positions * c->dim, c->dim}, pe[] = {c->heads, c->l, c->dim};
    void *x_data = as_dtype(c->x, c->n * c->line, c->dtype);
    void *w_data =
        c->weights == QUERN_F32 ? NULL : as_dtype(c->w, c->line * c->positions * c->dim, c->weights);
    compress_args args = {.kind = c->kind,
                          .block_size = c->l,
                          .stride = c->d,
                          .seqs = {.batch = 1, .n_q = c->n, .n_kv = c->entries}};
    args.k = quern_tensor_contiguous(x_data, c->dtype, 4, x);
    args.w_k = quern_tensor_contiguous(w_data != NULL ? w_data : c->w, c->weights, 3, w);
    if (c->pe != NULL) args.pe_k = quern_tensor_contiguous(c->pe, QUERN_F32, 3, pe);
    args.k_cmp = quern_tensor_contiguous(c->y, c->dtype, 4, y);
    assert_int_equal(backend->compress_forward.run(&exec, &args, NULL), QUERN_OK);
    args.k_cmp = (quern_tensor){0};
    args.d_k_cmp = quern_tensor_contiguous(c->g, QUERN_F32, 4, y);
    args.d_k = quern_tensor_contiguous(c->d_x, QUERN_F32, 4, x);
    args.d_w_k = quern_tensor_contiguous(c->d_w, QUERN_F32, 3, w);
    if (c->pe != NULL) args.d_pe_k = quern_tensor_contiguous(c->d_pe, QUERN_F32, 3, pe);
    assert_int_equal(backend->compress_backward.run(&exec, &args, NULL), QUERN_OK);
    quern_context_destroy(ctx);
    free(x_data), free(w_data);
}

/* ---- the same in double, for one head ---- */

typedef struct sums {
    double error, size;
} sums;

static void compare(sums *s, double got, double wanted)
{
    s->error += (got - wanted) * (got - wanted);
    s->size += wanted * wanted;
}

static void check_sums(const char *what, const cut_case *c, const sums *s, double bound)
{
    const double error = sqrt(s->error / s->size);
    print_message("%s, weights %s, %s: relative error %.2g\n", quern_dtype_name(c->dtype),
                  quern_dtype_name(c->weights), what, error);
    if (!(error <= bound)) fail_msg("%s: relative error %.3g, bound %.3g", what, error, bound);
}

static bool looked_at(int64_t i)
{
    const int64_t from_cut = i % ROW_CUT;
    return i % 61 == 0 || (i > 100 && (from_cut < 2 || from_cut >= ROW_CUT - 2));
}

/* Row i of X at position p: tokens with encodings, or the mean. */
static double x_at(const cut_case *c, int64_t i, int64_t p, int64_t e)
{
    const float *x = c->x + i * c->d * c->line + HEAD * c->dim + e;
    if (c->kind == COMPRESS_LINEAR)
        return (double)x[p * c->line] + (c->pe != NULL ? (double)c->pe[(HEAD * c->l + p) * c->dim + e] : 0.0);
    double sum = 0;
    for (int64_t t = 0; t < c->l; t++) sum += (double)x[t * c->line];
    return sum / (double)c->l;
}

static const float *w_at(const cut_case *c, int64_t p, int64_t e)
{
    return c->w + ((HEAD * c->positions + p) * c->dim + e) * c->dim;
}

static void check_y(const cut_case *c)
{
    sums s = {0};
    double *y = test_doubles(c->dim);
    for (int64_t i = 0; i < c->entries; i++) {
        if (!looked_at(i)) continue;
        memset(y, 0, (size_t)c->dim * sizeof *y);
        for (int64_t p = 0; p < c->positions; p++)
            for (int64_t e = 0; e < c->dim; e++) {
                const double x = x_at(c, i, p, e);
                for (int64_t f = 0; f < c->dim; f++) y[f] += x * (double)w_at(c, p, e)[f];
            }
        const uint16_t *got = (const uint16_t *)c->y + i * c->line + HEAD * c->dim;
        for (int64_t f = 0; f < c->dim; f++)
            compare(&s, (double)(c->dtype == QUERN_BF16 ? float_from_bf16(got[f]) : float_from_f16(got[f])),
                    y[f]);
    }
    check_sums("y", c, &s, c->dtype == QUERN_BF16 ? 4e-3 : 6e-4);
    free(y);
}

static void check_d_x(const cut_case *c)
{
    sums s = {0};
    for (int64_t t = 0; t < c->n; t++) {
        if (!looked_at(t / c->d) || t / c->d % 3 == 1) continue;
        for (int64_t e = 0; e < c->dim; e += 5) {
            double sum = 0;
            for (int64_t m = 0; m < c->l / c->d; m++) {
                const int64_t i = t / c->d - m, p = c->positions > 1 ? t % c->d + m * c->d : 0;
                if (i < 0 || i >= c->entries) continue;
                const float *g = c->g + i * c->line + HEAD * c->dim, *w = w_at(c, p, e);
                for (int64_t f = 0; f < c->dim; f++) sum += (double)g[f] * (double)w[f];
            }
            compare(&s, (double)c->d_x[t * c->line + HEAD * c->dim + e],
                    c->positions > 1 ? sum : sum / (double)c->l);
        }
    }
    check_sums("d_x", c, &s, 1e-5);
}

static void check_weights(const cut_case *c)
{
    sums d_w = {0}, d_pe = {0};
    double *sum = test_doubles(c->dim);
    for (int64_t p = 0; p < c->positions; p++) {
        for (int64_t e = p % 2 * 9; e < c->dim; e += 47) {
            memset(sum, 0, (size_t)c->dim * sizeof *sum);
            for (int64_t i = 0; i < c->entries; i++) {
                const double x = x_at(c, i, p, e);
                for (int64_t f = 0; f < c->dim; f++)
                    sum[f] += x * (double)c->g[i * c->line + HEAD * c->dim + f];
            }
            for (int64_t f = 0; f < c->dim; f++)
                compare(&d_w, (double)c->d_w[((HEAD * c->positions + p) * c->dim + e) * c->dim + f], sum[f]);
        }
        if (c->pe == NULL) continue;
        memset(sum, 0, (size_t)c->dim * sizeof *sum);
        for (int64_t i = 0; i < c->entries; i++)
            for (int64_t f = 0; f < c->dim; f++) sum[f] += (double)c->g[i * c->line + HEAD * c->dim + f];
        for (int64_t e = 0; e < c->dim; e++) {
            double wanted = 0;
            for (int64_t f = 0; f < c->dim; f++) wanted += sum[f] * (double)w_at(c, p, e)[f];
            compare(&d_pe, (double)c->d_pe[(HEAD * c->l + p) * c->dim + e], wanted);
        }
    }
    check_sums("d_w", c, &d_w, 1e-5);
    if (c->pe != NULL) check_sums("d_pe", c, &d_pe, 1e-5);
    free(sum);
}

static void check(cut_case c)
{
    test_random random = {(uint64_t)(c.l * 100 + c.d)};
    const bool linear = c.kind == COMPRESS_LINEAR;
    c.positions = linear ? c.l : 1;
    c.entries = (c.n - c.l) / c.d + 1;
    c.line = c.heads * c.dim;
    c.x = normal(c.n * c.line, c.dtype, 1, &random);
    c.w = normal(c.line * c.positions * c.dim, c.weights, 0.1, &random);
    c.pe = linear ? normal(c.l * c.line, QUERN_F32, 1, &random) : NULL;
    c.g = normal(c.entries * c.line, QUERN_F32, 1, &random);
    c.y = cleared(c.entries * c.line * 2);
    c.d_x = cleared(c.n * c.line * 4);
    c.d_w = cleared(c.line * c.positions * c.dim * 4);
    c.d_pe = cleared(c.l * c.line * 4);
    run(&c);
    check_y(&c);
    check_d_x(&c);
    check_weights(&c);
    free(c.x), free(c.w), free(c.pe), free(c.g), free(c.y), free(c.d_x), free(c.d_w), free(c.d_pe);
}

static void check_shape(compress_kind kind, int64_t l, int64_t d, int64_t n, int64_t heads, int64_t dim)
{
    static const quern_dtype dtypes[][2] = {
        {QUERN_BF16, QUERN_BF16}, {QUERN_F16, QUERN_F16}, {QUERN_BF16, QUERN_F32}, {QUERN_F16, QUERN_F32}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        check((cut_case){.kind = kind,
                         .dtype = dtypes[i][0],
                         .weights = dtypes[i][1],
                         .l = l,
                         .d = d,
                         .n = n,
                         .heads = heads,
                         .dim = dim});
}

/* Rows 4096 + 85; positions by 16, 10 or 8; covers by 8 or 5. */
static void many_covers(void **state)
{
    (void)state;
    check_shape(COMPRESS_LINEAR, 40, 2, 8400, 2, 128);
}

/* Tokens of a block by 4. */
static void long_blocks(void **state)
{
    (void)state;
    check_shape(COMPRESS_LINEAR, 24, 12, 24000, 4, 256);
}

static void means(void **state)
{
    (void)state;
    check_shape(COMPRESS_MEAN, 4, 2, 8400, 2, 128);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_covers),
        cmocka_unit_test(long_blocks),
        cmocka_unit_test(means),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
