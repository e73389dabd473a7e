/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool_rows_test.c - the compressors' row kernels at every level, entry by entry against double, formats bit
 * by bit.
 *
 * Bounds are those of src/cpu/kernels.inc.
 */
#include "cmocka_c11.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/pool/pool_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const quern_dtype activations[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
static const int64_t lengths[] = {0, 1, 3, 7, 8, 15, 16, 17, 24, 40, 63, 64, 128, 250, 301, 512};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static test_tensor rows_of(test_random *random, quern_dtype dtype, int64_t rows, int64_t n,
                           test_layout layout)
{
    const int64_t shape[] = {rows, n};
    test_tensor t = test_tensor_make(random, dtype, 2, shape, layout);
    test_tensor_normal(&t, random, 2);
    return t;
}

static test_tensor row_of(test_random *random, int64_t n)
{
    const int64_t shape[] = {n};
    test_tensor t = test_tensor_make(random, QUERN_F32, 1, shape, TEST_UNALIGNED);
    test_tensor_normal(&t, random, 1);
    return t;
}

static void expect(const cpu_kernels *kernels, const char *what, int64_t n, int64_t at, double out,
                   double expected, double bound)
{
    if (isnan(expected) ? isnan(out)
                        : out == expected || (isfinite(expected) && fabs(out - expected) <= bound))
        return;
    fail_msg("%s %s, n %lld: [%lld] is %.9g, expected %.9g within %.3g",
             quern_cpu_level_name(kernels->rows->level), what, (long long)n, (long long)at, out, expected,
             bound);
}

/* Rows of values and logits with -inf, +inf and NaN in places, and what they give in double. */
typedef struct pooling {
    int64_t n, rows;
    test_tensor value, logit, bias, max, sum, weighted;
    double *c, *z; /* z: logit + bias in f32 */
    pool_rows source;
    pool_sums sums;
} pooling;

static pooling pooling_make(test_random *random, quern_dtype dtype, int64_t n, int64_t rows)
{
    const test_layout layout = test_random_one_in(random, 2) ? TEST_UNALIGNED : TEST_CONTIGUOUS;
    pooling p = {.n = n,
                 .rows = rows,
                 .value = rows_of(random, dtype, rows, n, layout),
                 .logit = rows_of(random, dtype, rows, n, layout),
                 .bias = rows_of(random, QUERN_F32, rows, n, layout),
                 .max = row_of(random, n),
                 .sum = row_of(random, n),
                 .weighted = row_of(random, n)};
    double *z = test_tensor_get(&p.logit), *c = test_tensor_get(&p.value), *zeros = test_doubles(n + 1),
           *none = test_doubles(n + 1);
    for (int64_t i = 0; i < n; i++) none[i] = -INFINITY;
    for (int64_t r = 0; r < rows && n > 0; r++) {
        if (test_random_one_in(random, 3)) {
            const int64_t at = test_random_int(random, 0, n - 1);
            z[r * n + at] = -INFINITY;
            c[r * n + at] = test_random_one_in(random, 2) ? NAN : INFINITY;
        }
        if (test_random_one_in(random, 9))
            z[r * n + test_random_int(random, 0, n - 1)] = test_random_one_in(random, 2) ? NAN : INFINITY;
        if (n > 2) z[r * n + n / 3] = -INFINITY; /* a channel that takes in nothing */
    }
    test_tensor_set(&p.logit, z), test_tensor_set(&p.value, c);
    test_tensor_set(&p.max, none), test_tensor_set(&p.sum, zeros), test_tensor_set(&p.weighted, zeros);
    double *bias = test_tensor_get(&p.bias);
    for (int64_t i = 0; i < rows * n; i++) z[i] = (double)((float)z[i] + (float)bias[i]);
    free(bias), free(zeros), free(none);
    p.c = c;
    p.z = z;
    p.source = (pool_rows){p.value.view.data,
                           p.logit.view.data,
                           dtype,
                           n,
                           rows,
                           p.bias.view.data,
                           n,
                           test_random_one_in(random, 2) ? 1 << 12 : 0,
                           test_random_one_in(random, 2)};
    p.sums = (pool_sums){p.max.view.data, p.sum.view.data, p.weighted.view.data};
    return p;
}

static void pooling_free(pooling *p)
{
    test_tensor *all[] = {&p->value, &p->logit, &p->bias, &p->max, &p->sum, &p->weighted};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (i < 3) test_tensor_check_unchanged(all[i], "source");
        else test_tensor_check_guards(all[i], "sums");
        test_tensor_free(all[i]);
    }
    free(p->c), free(p->z);
}

/* The largest logit of a channel, -inf where there is none. */
static double largest_logit(const pooling *p, int64_t i, double *size)
{
    double most = -INFINITY;
    *size = 0;
    for (int64_t r = 0; r < p->rows; r++) {
        const double z = p->z[r * p->n + i];
        if (z > most) most = z;
        if (isfinite(z) && fabs(z) > *size) *size = fabs(z);
    }
    return most;
}

static void check_sums(const cpu_kernels *kernels, const pooling *p)
{
    for (int64_t i = 0; i < p->n; i++) {
        double sum = 0, weighted = 0, terms = 0, size;
        const double most = largest_logit(p, i, &size);
        for (int64_t r = 0; r < p->rows; r++) {
            const double z = p->z[r * p->n + i], e = z == -INFINITY ? 0 : exp(z - most);
            if (z == -INFINITY) continue;
            sum += e;
            weighted += e * p->c[r * p->n + i];
            terms += fabs(e * p->c[r * p->n + i]);
        }
        const double bound =
            test_kernel_bound("pool", "merge", kernels->pool->level, (double)p->rows, 2 * size);
        expect(kernels, "merge: sum", p->n, i, (double)p->sums.sum[i], sum, bound * sum);
        expect(kernels, "merge: weighted", p->n, i, (double)p->sums.weighted[i], weighted, bound * terms);
        if (!isnan(sum)) expect(kernels, "merge: max", p->n, i, (double)p->sums.max[i], most, 0);
    }
}

/* The same bits; NaN is NaN. */
static void expect_same(const cpu_kernels *kernels, const float *a, const float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0 && !(isnan(a[i]) && isnan(b[i])))
            fail_msg("%s merge in pieces: [%lld] is %.9g, in one call %.9g",
                     quern_cpu_level_name(kernels->rows->level), (long long)i, (double)a[i], (double)b[i]);
}

/* In one call, and row by row over every number of channels at once: the same bits. */
static void merge(const cpu_kernels *kernels, test_random *random)
{
    for (int k = 0; k < 3 * LENGTHS; k++) {
        pooling p = pooling_make(random, activations[k % 3], lengths[k / 3], test_random_int(random, 0, 12));
        const size_t bytes = (size_t)p.n * sizeof(float);
        float *kept = malloc(3 * bytes + 1);
        assert_non_null(kept);
        memcpy(kept, p.sums.max, bytes), memcpy(kept + p.n, p.sums.sum, bytes),
            memcpy(kept + 2 * p.n, p.sums.weighted, bytes);
        kernels->pool->merge(&p.source, p.n, &p.sums);
        check_sums(kernels, &p);
        const pool_sums steps = {kept, kept + p.n, kept + 2 * p.n};
        for (int64_t r = 0; r < p.rows; r++) {
            const int64_t cut = test_random_int(random, 0, p.n); /* channels in two parts, too */
            for (int part = 0; part < 2; part++) {
                const int64_t from = part == 0 ? 0 : cut, count = part == 0 ? cut : p.n - cut;
                const int64_t at = (r * p.n + from) * (int64_t)quern_dtype_size(p.source.dtype);
                const pool_rows one = {(const char *)p.source.value + at,
                                       (const char *)p.source.logit + at,
                                       p.source.dtype,
                                       p.n,
                                       1,
                                       p.source.bias + r * p.n + from,
                                       p.n,
                                       0,
                                       false};
                const pool_sums place = {steps.max + from, steps.sum + from, steps.weighted + from};
                kernels->pool->merge(&one, count, &place);
            }
        }
        expect_same(kernels, kept, p.sums.max, p.n);
        expect_same(kernels, kept + p.n, p.sums.sum, p.n);
        expect_same(kernels, kept + 2 * p.n, p.sums.weighted, p.n);
        TEST_TIME("pool", "merge", kernels->pool->level,
                  p.rows * p.n * (4 + 2 * (int64_t)quern_dtype_size(p.source.dtype)),
                  kernels->pool->merge(&p.source, p.n, &p.sums));
        free(kept);
        pooling_free(&p);
    }
}

static void pooled_row(const cpu_kernels *kernels, test_random *random)
{
    for (int k = 0; k < LENGTHS; k++) {
        const int64_t n = lengths[k];
        test_tensor max = row_of(random, n), sum = row_of(random, n), weighted = row_of(random, n),
                    out = row_of(random, n), inverse = row_of(random, n);
        const pool_sums sums = {max.view.data, sum.view.data, weighted.view.data};
        for (int64_t i = 0; i < n; i += 3) sums.sum[i] = sums.weighted[i] = 0;
        for (int64_t i = 1; i < n; i += 7) sums.sum[i] = NAN;
        kernels->pool->pooled_row(&sums, n, out.view.data, k % 2 ? inverse.view.data : NULL);
        test_tensor_check_guards(&out, "pooled_row");
        test_tensor_check_guards(&inverse, "pooled_row");
        for (int64_t i = 0; i < n; i++) {
            const double s = (double)sums.sum[i], expected = s == 0 ? 0 : (double)sums.weighted[i] / s;
            const double bound = test_kernel_bound("pool", "pooled_row", kernels->pool->level, 0, 0);
            expect(kernels, "pooled_row", n, i, (double)((float *)out.view.data)[i], expected,
                   bound * fabs(expected));
            if (k % 2)
                expect(kernels, "pooled_row: inverse", n, i, (double)((float *)inverse.view.data)[i],
                       s == 0 ? 0 : 1 / s, bound * fabs(1 / s));
        }
        TEST_TIME("pool", "pooled_row", kernels->pool->level, 12 * n,
                  kernels->pool->pooled_row(&sums, n, out.view.data, NULL));
        test_tensor *all[] = {&max, &sum, &weighted, &out, &inverse};
        for (int t = 0; t < 5; t++) test_tensor_free(all[t]);
    }
}

static void check_gradient(const cpu_kernels *kernels, const pooling *p, const pool_gradient *g,
                           const test_tensor *d_value, const test_tensor *d_logit, const test_tensor *d_bias,
                           const double *bias_before)
{
    double *dv = test_tensor_get(d_value), *dl = test_tensor_get(d_logit), *db = test_tensor_get(d_bias);
    for (int64_t r = 0; r < p->rows; r++) {
        for (int64_t i = 0; i < p->n; i++) {
            const int64_t at = r * p->n + i;
            const double z = p->z[at], inverse = (double)g->inverse_sum[i], pooled = (double)g->pooled[i];
            const double weight =
                z == -INFINITY || inverse == 0 ? 0 : exp(z - (double)g->max[i]) * inverse * (double)g->d[i];
            const double logit = z == -INFINITY || inverse == 0 ? 0 : weight * (p->c[at] - pooled);
            const double bound = test_kernel_bound("pool", "pool_backward", kernels->pool->level, 0,
                                                   isfinite(z) ? fabs(z) + fabs((double)g->max[i]) : 0);
            const double size = z == -INFINITY ? 0 : fabs(weight) * (fabs(p->c[at]) + fabs(pooled));
            expect(kernels, "pool_backward: value", p->n, at, dv[at], weight,
                   bound * fabs(weight) + test_kernel_rounding(g->d_dtype, weight));
            expect(kernels, "pool_backward: logit", p->n, at, dl[at], logit,
                   bound * size + test_kernel_rounding(g->d_dtype, logit));
            if (g->d_bias != NULL)
                expect(kernels, "pool_backward: bias", p->n, at, db[at], bias_before[at] + logit,
                       bound * (size + fabs(bias_before[at])));
        }
    }
    free(dv), free(dl), free(db);
}

/* The gradients of all rows, row by row. */
static void backward_of_rows(const cpu_kernels *kernels, const pooling *p, int64_t n, const pool_gradient *g)
{
    const int64_t step = p->source.stride * (int64_t)quern_dtype_size(p->source.dtype),
                  d_step = n * (int64_t)quern_dtype_size(g->d_dtype);
    for (int64_t r = 0; r < p->source.rows; r++) {
        pool_rows row = p->source;
        pool_gradient of_row = *g;
        row.rows = 1;
        row.value = (const char *)row.value + r * step;
        row.logit = (const char *)row.logit + r * step;
        row.bias += r * row.bias_stride;
        of_row.d_value = (char *)g->d_value + r * d_step;
        of_row.d_logit = (char *)g->d_logit + r * d_step;
        if (g->d_bias != NULL) of_row.d_bias = g->d_bias + r * n;
        kernels->pool->pool_backward(&row, n, &of_row);
    }
}

static void pool_backward(const cpu_kernels *kernels, test_random *random)
{
    for (int k = 0; k < 6 * LENGTHS; k++) {
        const quern_dtype dtype = activations[k % 3], d_dtype = k % 2 ? dtype : QUERN_F32;
        const int64_t n = lengths[k / 6], rows = test_random_int(random, 1, 9);
        const bool stream = n * (int64_t)quern_dtype_size(d_dtype) % 64 == 0 && k % 4 < 2;
        pooling p = pooling_make(random, dtype, n, rows);
        kernels->pool->merge(&p.source, n, &p.sums);
        test_tensor pooled = row_of(random, n), inverse = row_of(random, n), d = row_of(random, n);
        test_tensor d_value = rows_of(random, d_dtype, rows, n, stream ? TEST_CONTIGUOUS : TEST_UNALIGNED);
        test_tensor d_logit = rows_of(random, d_dtype, rows, n, stream ? TEST_CONTIGUOUS : TEST_UNALIGNED);
        test_tensor d_bias = rows_of(random, QUERN_F32, rows, n, TEST_UNALIGNED);
        kernels->pool->pooled_row(&p.sums, n, pooled.view.data, inverse.view.data);
        double *before = test_tensor_get(&d_bias);
        const pool_gradient g = {p.sums.max,
                                 inverse.view.data,
                                 pooled.view.data,
                                 d.view.data,
                                 d_value.view.data,
                                 d_logit.view.data,
                                 d_dtype,
                                 k % 5 ? d_bias.view.data : NULL,
                                 stream};
        backward_of_rows(kernels, &p, n, &g);
        kernels->rows->fence();
        check_gradient(kernels, &p, &g, &d_value, &d_logit, &d_bias, before);
        TEST_TIME("pool", "pool_backward", kernels->pool->level,
                  rows * n * (2 * (int64_t)(quern_dtype_size(dtype) + quern_dtype_size(d_dtype)) + 4),
                  backward_of_rows(kernels, &p, n, &g));
        test_tensor *out[] = {&d_value, &d_logit, &d_bias, &pooled, &inverse, &d};
        for (int t = 0; t < 6; t++)
            test_tensor_check_guards(out[t], "pool_backward"), test_tensor_free(out[t]);
        free(before);
        pooling_free(&p);
    }
}

static void norms(const cpu_kernels *kernels, test_random *random)
{
    for (int k = 0; k < LENGTHS; k++) {
        const int64_t n = lengths[k];
        test_tensor x = row_of(random, n), weight = row_of(random, n), out = row_of(random, n),
                    d = row_of(random, n), d_weight = row_of(random, n);
        double *xv = test_tensor_get(&x), *w = test_tensor_get(&weight), *dv = test_tensor_get(&d),
               *before = test_tensor_get(&d_weight);
        double squares = 0, dot = 0, dot_size = 0;
        for (int64_t i = 0; i < n; i++) {
            squares += xv[i] * xv[i];
            dot += dv[i] * w[i] * xv[i];
            dot_size += fabs(dv[i] * w[i] * xv[i]);
        }
        const double scale = 1 / sqrt(squares / (double)n + (double)1e-3f);
        kernels->rows->norm_row(x.view.data, weight.view.data, 1e-3f, n, out.view.data);
        kernels->rows->norm_backward(x.view.data, weight.view.data, 1e-3f, n, d.view.data,
                                     k % 3 ? d_weight.view.data : NULL);
        for (int64_t i = 0; i < n; i++) {
            const double y = xv[i] * scale * w[i],
                         dx = scale * (dv[i] * w[i] - xv[i] * scale * scale * dot / (double)n);
            const double size = scale *
                                (fabs(dv[i] * w[i]) + fabs(xv[i]) * scale * scale * dot_size / (double)n),
                         dw = dv[i] * xv[i] * scale;
            expect(kernels, "norm_row", n, i, (double)((float *)out.view.data)[i], y,
                   test_kernel_bound("row", "norm_row", kernels->rows->level, (double)n, 0) * fabs(y));
            expect(kernels, "norm_backward", n, i, (double)((float *)d.view.data)[i], dx,
                   test_kernel_bound("row", "norm_backward", kernels->rows->level, (double)n, 0) * size);
            if (k % 3)
                expect(kernels, "norm_backward: weight", n, i, (double)((float *)d_weight.view.data)[i],
                       before[i] + dw,
                       test_kernel_bound("row", "norm_backward", kernels->rows->level, (double)n, 0) *
                           (fabs(dw) + fabs(before[i])));
        }
        TEST_TIME("row", "norm_row", kernels->rows->level, 12 * n,
                  kernels->rows->norm_row(x.view.data, weight.view.data, 1e-3f, n, out.view.data));
        float *again = out.view.data; /* a gradient that does not shrink from call to call */
        TEST_TIME("row", "norm_backward", kernels->rows->level, 20 * n,
                  (memcpy(again, d.view.data, (size_t)n * sizeof *again),
                   kernels->rows->norm_backward(x.view.data, weight.view.data, 1e-3f, n, again,
                                                d_weight.view.data)));
        free(xv), free(w), free(dv), free(before);
        test_tensor *all[] = {&x, &weight, &out, &d, &d_weight};
        for (int t = 0; t < 5; t++) {
            if (t < 2) test_tensor_check_unchanged(all[t], "norm");
            else test_tensor_check_guards(all[t], "norm");
            test_tensor_free(all[t]);
        }
    }
}

static void rotations(const cpu_kernels *kernels, test_random *random)
{
    for (int64_t n = 0; n <= 66; n += 2) {
        test_tensor row = row_of(random, n), table = row_of(random, n);
        double *x = test_tensor_get(&row), *angles = test_tensor_get(&table);
        const float *cosines = table.view.data;
        const bool inverse = n % 4 == 0;
        kernels->rows->rotate_row(row.view.data, cosines, cosines + n / 2, n, inverse);
        test_tensor_check_guards(&row, "rotate_row");
        for (int64_t i = 0; i < n; i++) {
            const double c = angles[i / 2], s = (inverse ? -1 : 1) * angles[n / 2 + i / 2],
                         other = i % 2 ? x[i - 1] * s : -x[i + 1] * s;
            expect(kernels, "rotate_row", n, i, (double)((float *)row.view.data)[i], x[i] * c + other,
                   test_kernel_bound("row", "rotate_row", kernels->rows->level, 0, 0) *
                       (fabs(x[i] * c) + fabs(other)));
        }
        TEST_TIME("row", "rotate_row", kernels->rows->level, 12 * n,
                  (memset(row.view.data, 0, (size_t)n * sizeof(float)),
                   kernels->rows->rotate_row(row.view.data, cosines, cosines + n / 2, n, inverse)));
        free(x), free(angles);
        test_tensor_free(&row), test_tensor_free(&table);
    }
}

static void transforms(const cpu_kernels *kernels, test_random *random)
{
    for (int64_t n = 1; n <= 512; n *= 2) {
        test_tensor row = row_of(random, n);
        double *x = test_tensor_get(&row);
        kernels->rows->hadamard_row(row.view.data, n);
        test_tensor_check_guards(&row, "hadamard_row");
        for (int64_t i = 0; i < n; i++) {
            double sum = 0, size = 0;
            for (int64_t j = 0; j < n; j++) {
                sum += (__builtin_parityll((unsigned long long)(i & j)) ? -1 : 1) * x[j];
                size += fabs(x[j]);
            }
            expect(kernels, "hadamard_row", n, i, (double)((float *)row.view.data)[i], sum / sqrt((double)n),
                   test_kernel_bound("row", "hadamard_row", kernels->rows->level, (double)n, 0) * size /
                       sqrt((double)n));
        }
        TEST_TIME("row", "hadamard_row", kernels->rows->level, 8 * n,
                  kernels->rows->hadamard_row(row.view.data, n));
        free(x);
        test_tensor_free(&row);
    }
}

/* Values around every rounding of a format: multiples of its steps and of half of them, one place more or
 * less. */
static void fill_formats(test_random *random, float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = ldexpf((float)test_random_int(random, 0, 36), (int)test_random_int(random, -14, 6));
        const int64_t move = test_random_int(random, -1, 1);
        if (move != 0) x = nextafterf(x, move > 0 ? INFINITY : -INFINITY);
        row[i] = test_random_one_in(random, 2) ? -x : x;
    }
}

static void formats(const cpu_kernels *kernels, test_random *random)
{
    unsigned char codes[600], expected[600];
    float row[512];
    test_kernel_bound("format", "quantise_e4m3", kernels->formats->level, 0, 0),
        test_kernel_bound("format", "quantise_e2m1", kernels->formats->level, 0, 0);
    for (int k = 0; k < 2000; k++) {
        const int64_t n = 32 * test_random_int(random, 1, 4);
        fill_formats(random, row, n);
        row[0] = 448; /* scale 1 */
        if (k % 4 == 0) row[1] = 5000;
        assert_true(oracle_dsv4_quantise_fp8(row, n, k % 2 == 0, expected));
        float scale;
        memcpy(&scale, expected + n, 4);
        memset(codes, 0x5a, sizeof codes);
        kernels->formats->quantise_e4m3(row, scale, n, codes);
        assert_memory_equal(codes, expected, n);
        assert_int_equal(codes[n], 0x5a);
        row[0] = k % 3 ? 6 : 0;
        for (int64_t i = 1; i < n; i++)
            if (fabsf(row[i]) > 6) row[i] = copysignf(k % 3 ? 6 : 0.5f, row[i]);
        assert_true(oracle_dsv4_quantise_fp4(row, n, expected));
        for (int64_t i = 0; i < n; i += 32)
            kernels->formats->quantise_e2m1(row + i, ldexpf(1, expected[n / 2 + i / 32] - 127), 32,
                                            codes + i / 2);
        assert_memory_equal(codes, expected, n / 2);
        TEST_TIME("format", "quantise_e4m3", kernels->formats->level, 5 * n,
                  kernels->formats->quantise_e4m3(row, scale, n, codes));
        TEST_TIME("format", "quantise_e2m1", kernels->formats->level, 4 * n + n / 2,
                  kernels->formats->quantise_e2m1(row, scale, n, codes));
    }
    for (int64_t n = 0; n < 70; n++) { /* tails */
        fill_formats(random, row, n);
        memset(codes, 0x5a, sizeof codes);
        kernels->formats->quantise_e4m3(row, 1.0f, n, codes);
        assert_int_equal(codes[n], 0x5a);
        kernels->formats->quantise_e2m1(row, 1.0f, n / 2 * 2, codes);
    }
    row[0] = 500;
    row[1] = -470;
    kernels->formats->quantise_e4m3(row, 1.0f, 2, codes); /* saturates */
    assert_int_equal(codes[0], 126);
    assert_int_equal(codes[1], 254);
}

typedef void kernel_test(const cpu_kernels *kernels, test_random *random);

static void at_every_level(const char *name, kernel_test *run)
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const cpu_kernels *kernels = cpu_kernels_for(level);
        test_random random = {test_seed(name, 5)};
        run(kernels, &random);
    }
}

#define TEST(name)                                                                                           \
    static void name##_test(void **state)                                                                    \
    {                                                                                                        \
        (void)state;                                                                                         \
        at_every_level(#name, name);                                                                         \
    }
TEST(merge)
TEST(pooled_row)
TEST(pool_backward)
TEST(norms)
TEST(rotations)
TEST(transforms)
TEST(formats)
#undef TEST

int main(int argc, char **argv)
{
    char program[] = "pool_rows_test";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge_test),         cmocka_unit_test(pooled_row_test),
        cmocka_unit_test(pool_backward_test), cmocka_unit_test(norms_test),
        cmocka_unit_test(rotations_test),     cmocka_unit_test(transforms_test),
        cmocka_unit_test(formats_test),       cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
