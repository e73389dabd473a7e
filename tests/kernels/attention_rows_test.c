/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_rows_test.c - the row kernels of attention (packing, softmax and its backward, storing)
 * at every level, entry by entry against double; bounds are those of src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static test_tensor matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                          test_layout layout)
{
    const int64_t shape[] = {rows, columns};
    return test_tensor_make(random, dtype, 2, shape, layout);
}

static row_source source_of(const test_tensor *t)
{
    return (row_source){t->view.data, t->view.dtype, t->view.strides[0], t->view.shape[0], t->view.shape[1]};
}

static void expect(const attention_kernels *kernels, const char *what, int64_t row, int64_t column,
                   double out, double expected, double bound)
{
    if (isnan(expected) ? isnan(out)
                        : out == expected || (isfinite(expected) && fabs(out - expected) <= bound))
        return;
    fail_msg("%s %s: [%lld][%lld] is %.9g, expected %.9g within %.3g", quern_cpu_level_name(kernels->level),
             what, (long long)row, (long long)column, out, expected, bound);
}

static double bound_of(const attention_kernels *kernels, const char *name, double argument)
{
    return test_kernel_bound("attention", name, kernels->level, 0, argument);
}

static double bf16_value(uint32_t bits)
{
    float f;
    bits <<= 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Low or high half of a word that a bf16 tensor element pair becomes. */
static double half_of(uint32_t word, int64_t half)
{
    return bf16_value(half ? word >> 16 : word & 0xffff);
}

static const quern_dtype activations[] = {QUERN_F32, QUERN_F16, QUERN_BF16};

static void pack_rows(const attention_kernels *kernels, test_random *random)
{
    static const int64_t dims[] = {8, 24, 40, 256, 512};
    for (int i = 0; i < 3 * 5 * TEST_LAYOUTS; i++) {
        const int64_t dim = dims[i / 3 % 5], rows = test_random_int(random, 0, 7),
                      ldd = dim + (i % 2 ? 8 : 0);
        test_tensor in = matrix(random, activations[i % 3], rows, dim, (test_layout)(i / 15));
        test_tensor out = matrix(random, QUERN_F32, rows, ldd, TEST_UNALIGNED);
        const row_source src = source_of(&in);
        test_tensor_normal(&in, random, 1);
        double *values = test_tensor_get(&in);
        kernels->pack_rows_f32(&src, 0.7f, out.view.data, ldd);
        test_tensor_check_guards(&out, "pack_rows_f32");
        const float *f = out.view.data;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < ldd; c++)
                expect(kernels, "pack_rows_f32", r, c, f[r * ldd + c],
                       c < dim ? (float)values[r * dim + c] * 0.7f : 0,
                       bound_of(kernels, "pack_rows_f32", 0));
        if (kernels->pack_rows_bf16 != NULL && src.dtype == QUERN_BF16) {
            test_tensor narrow = matrix(random, QUERN_BF16, rows, ldd, TEST_UNALIGNED);
            kernels->pack_rows_bf16(&src, narrow.view.data, ldd);
            test_tensor_check_guards(&narrow, "pack_rows_bf16");
            double *got = test_tensor_get(&narrow);
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < ldd; c++)
                    expect(kernels, "pack_rows_bf16", r, c, got[r * ldd + c],
                           c < dim ? values[r * dim + c] : 0, bound_of(kernels, "pack_rows_bf16", 0));
            TEST_TIME("attention", "pack_rows_bf16", kernels->level, 4 * rows * dim,
                      kernels->pack_rows_bf16(&src, narrow.view.data, ldd));
            free(got);
            test_tensor_free(&narrow);
        }
        test_tensor_check_unchanged(&in, "source");
        TEST_TIME("attention", "pack_rows_f32", kernels->level,
                  rows * dim * (4 + (int64_t)quern_dtype_size(src.dtype)),
                  kernels->pack_rows_f32(&src, 0.7f, out.view.data, ldd));
        free(values);
        test_tensor_free(&in);
        test_tensor_free(&out);
    }
}

static void pack_keys(const attention_kernels *kernels, test_random *random)
{
    static const int64_t dims[] = {8, 24, 40, 256, 512};
    const int32_t panel = kernels->panel;
    for (int i = 0; i < 3 * 5 * TEST_LAYOUTS; i++) {
        const int64_t dim = dims[i / 3 % 5], rows = i % 7 == 0 ? 0 : test_random_int(random, 1, panel);
        test_tensor in = matrix(random, activations[i % 3], rows, dim, (test_layout)(i / 15));
        test_tensor out = matrix(random, QUERN_F32, dim, panel, TEST_UNALIGNED);
        const row_source src = source_of(&in);
        test_tensor_normal(&in, random, 1);
        double *values = test_tensor_get(&in);
        kernels->pack_keys_f32(&src, panel, out.view.data);
        test_tensor_check_guards(&out, "pack_keys_f32");
        const float *f = out.view.data;
        for (int64_t d = 0; d < dim; d++)
            for (int64_t r = 0; r < panel; r++)
                expect(kernels, "pack_keys_f32", d, r, f[d * panel + r], r < rows ? values[r * dim + d] : 0,
                       bound_of(kernels, "pack_keys_f32", 0));
        if (kernels->pack_keys_bf16 != NULL && src.dtype == QUERN_BF16) {
            test_tensor words = matrix(random, QUERN_I32, dim / 2, panel, TEST_UNALIGNED);
            kernels->pack_keys_bf16(&src, panel, words.view.data);
            test_tensor_check_guards(&words, "pack_keys_bf16");
            const uint32_t *w = words.view.data;
            for (int64_t d = 0; d < dim; d++)
                for (int64_t r = 0; r < panel; r++)
                    expect(kernels, "pack_keys_bf16", d, r, half_of(w[d / 2 * panel + r], d % 2),
                           r < rows ? values[r * dim + d] : 0, bound_of(kernels, "pack_keys_bf16", 0));
            TEST_TIME("attention", "pack_keys_bf16", kernels->level, 4 * rows * dim,
                      kernels->pack_keys_bf16(&src, panel, words.view.data));
            test_tensor_free(&words);
        }
        test_tensor_check_unchanged(&in, "source");
        TEST_TIME("attention", "pack_keys_f32", kernels->level,
                  rows * dim * (4 + (int64_t)quern_dtype_size(src.dtype)),
                  kernels->pack_keys_f32(&src, panel, out.view.data));
        free(values);
        test_tensor_free(&in);
        test_tensor_free(&out);
    }
}

static void pack_values(const attention_kernels *kernels, test_random *random)
{
    static const int64_t dims[] = {8, 24, 72, 256, 512};
    for (int i = 0; i < 3 * 5 * TEST_LAYOUTS; i++) {
        const int64_t dim = dims[i / 3 % 5], rows = i % 7 == 0 ? 0 : test_random_int(random, 1, 64),
                      width = (dim + 15) / 16 * 16;
        const int32_t panel = width < kernels->panel ? (int32_t)width : kernels->panel;
        const int64_t panels = (dim + panel - 1) / panel;
        test_tensor in = matrix(random, activations[i % 3], rows, dim, (test_layout)(i / 15));
        const row_source src = source_of(&in);
        test_tensor_normal(&in, random, 1);
        double *values = test_tensor_get(&in);
        test_tensor out = matrix(random, QUERN_F32, panels, rows * panel, TEST_STRIDED);
        kernels->pack_values_f32(&src, panel, out.view.data, out.view.strides[0]);
        test_tensor_check_guards(&out, "pack_values_f32");
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < panels * panel; c++)
                expect(
                    kernels, "pack_values_f32", r, c,
                    ((const float *)out.view.data)[c / panel * out.view.strides[0] + r * panel + c % panel],
                    c < dim ? values[r * dim + c] : 0, bound_of(kernels, "pack_values_f32", 0));
        if (kernels->pack_values_bf16 != NULL && src.dtype == QUERN_BF16) {
            test_tensor words = matrix(random, QUERN_I32, panels, (rows + 1) / 2 * panel, TEST_STRIDED);
            kernels->pack_values_bf16(&src, panel, words.view.data, words.view.strides[0]);
            test_tensor_check_guards(&words, "pack_values_bf16");
            for (int64_t r = 0; r < (rows + 1) / 2 * 2; r++)
                for (int64_t c = 0; c < panels * panel; c++) {
                    const uint32_t word =
                        ((const uint32_t *)
                             words.view.data)[c / panel * words.view.strides[0] + r / 2 * panel + c % panel];
                    expect(kernels, "pack_values_bf16", r, c, half_of(word, r % 2),
                           r < rows && c < dim ? values[r * dim + c] : 0,
                           bound_of(kernels, "pack_values_bf16", 0));
                }
            TEST_TIME("attention", "pack_values_bf16", kernels->level, 4 * rows * dim,
                      kernels->pack_values_bf16(&src, panel, words.view.data, words.view.strides[0]));
            test_tensor_free(&words);
        }
        test_tensor_check_unchanged(&in, "source");
        TEST_TIME("attention", "pack_values_f32", kernels->level,
                  rows * dim * (4 + (int64_t)quern_dtype_size(src.dtype)),
                  kernels->pack_values_f32(&src, panel, out.view.data, out.view.strides[0]));
        free(values);
        test_tensor_free(&in);
        test_tensor_free(&out);
    }
}

/* Rows in any order, some of them twice. */
static void gather_pairs(const attention_kernels *kernels, test_random *random)
{
    static const int64_t dims[] = {8, 24, 72, 256, 512};
    const int32_t panel = kernels->panel;
    for (int i = 0; i < 5 * TEST_LAYOUTS && kernels->gather_pairs_bf16 != NULL; i++) {
        const int64_t dim = dims[i % 5], rows = i % 7 == 0 ? 0 : test_random_int(random, 1, 64),
                      panels = (dim + panel - 1) / panel;
        const void *row[64];
        int64_t from[64];
        test_tensor in = matrix(random, QUERN_BF16, 64, dim, (test_layout)(i / 5));
        test_tensor copy = matrix(random, QUERN_BF16, rows, dim, TEST_STRIDED),
                    words = matrix(random, QUERN_I32, panels, (rows + 1) / 2 * panel, TEST_STRIDED);
        test_tensor_normal(&in, random, 1);
        for (int64_t r = 0; r < rows; r++) {
            from[r] = test_random_int(random, 0, 63);
            row[r] = (const uint16_t *)in.view.data + from[r] * in.view.strides[0];
        }
        kernels->gather_pairs_bf16(row, rows, dim, copy.view.data, copy.view.strides[0], panel,
                                   words.view.data, words.view.strides[0]);
        test_tensor_check_guards(&copy, "copies"), test_tensor_check_guards(&words, "pairs");
        test_tensor_check_unchanged(&in, "source");
        double *values = test_tensor_get(&in), *copied = test_tensor_get(&copy);
        const double bound = bound_of(kernels, "gather_pairs_bf16", 0);
        for (int64_t r = 0; r < (rows + 1) / 2 * 2; r++)
            for (int64_t c = 0; c < panels * panel; c++) {
                const double value = r < rows && c < dim ? values[from[r] * dim + c] : 0;
                const uint32_t word =
                    ((const uint32_t *)
                         words.view.data)[c / panel * words.view.strides[0] + r / 2 * panel + c % panel];
                expect(kernels, "gather_pairs_bf16", r, c, half_of(word, r % 2), value, bound);
                if (r < rows && c < dim)
                    expect(kernels, "gather_pairs_bf16", r, c, copied[r * dim + c], value, bound);
            }
        TEST_TIME("attention", "gather_pairs_bf16", kernels->level, 6 * rows * dim,
                  kernels->gather_pairs_bf16(row, rows, dim, copy.view.data, copy.view.strides[0], panel,
                                             words.view.data, words.view.strides[0]));
        free(values), free(copied);
        test_tensor_free(&in), test_tensor_free(&copy), test_tensor_free(&words);
    }
}

enum { ROWS = 10, MOST_COLUMNS = 384 };

/* An interval of each kind: whole, none, head, tail, inside one group of lanes, any. */
static void interval(test_random *random, int32_t kind, int32_t columns, int32_t *lo, int32_t *hi)
{
    *lo = 0;
    *hi = columns;
    if (kind == 1) *hi = 0;
    if (kind == 2) *hi = (int32_t)test_random_int(random, 1, columns);
    if (kind == 3) *lo = (int32_t)test_random_int(random, 0, columns - 1);
    if (kind == 4) {
        *lo = 5;
        *hi = 6;
    }
    if (kind == 5) {
        *lo = (int32_t)test_random_int(random, 0, columns / 2);
        *hi = (int32_t)test_random_int(random, *lo, columns);
    }
}

/* What rounding to bf16 adds. A row's sum of 384 columns is 96 additions one after
 * another at worst (4 lanes); their roundings differ in sign, and 50 of one sign are not reached. */
static const double bf16 = 0x1p-8, sum_bound = 50 * 0x1p-24;

/* The bound of p = exp2(scaled - max), whose argument is rounded by 2^-24 of both; below 2^-126 exp2 is 0. */
static double exp2_bound(const attention_kernels *kernels, const char *name, double p, double scaled,
                         double max)
{
    return p * bound_of(kernels, name, fabs(scaled) + fabs(max)) + 0x1p-125;
}

static void softmax(const attention_kernels *kernels, bool narrow, test_random *random)
{
    const char *name = narrow ? "softmax_bf16" : "softmax_f32";
    for (int round = 0; round < 40; round++) {
        const int32_t columns = 16 * (int32_t)test_random_int(random, 1, MOST_COLUMNS / 16);
        const float scale2 = round % 2 ? 0.21f : 1.0f;
        test_tensor s = matrix(random, QUERN_F32, ROWS, columns, round % 3 ? TEST_STRIDED : TEST_UNALIGNED);
        int32_t lo[ROWS], hi[ROWS];
        float max[ROWS], sum[ROWS], shrink[ROWS], max0[ROWS], sum0[ROWS];
        test_tensor_normal(&s, random, 6);
        for (int32_t r = 0; r < ROWS; r++) {
            interval(random, round < 6 ? round : (int32_t)test_random_int(random, 0, 5), columns, &lo[r],
                     &hi[r]);
            const bool first = r % 3 == 0;
            max0[r] = max[r] = first ? -INFINITY : (float)(r % 3 == 1 ? 100 : 3 * test_random_normal(random));
            sum0[r] = sum[r] = first ? 0 : (float)(1 + test_random_uniform(random));
        }
        float *scores = s.view.data;
        const int64_t lds = s.view.strides[0];
        if (round == 20) scores[4 * lds + columns / 2] = NAN;
        if (round == 21)
            for (int32_t c = 0; c < columns; c++) scores[3 * lds + c] = -INFINITY;
        double *in = test_tensor_get(&s);
        const softmax_tile tile = {scores, lds, ROWS, columns, lo, hi, scale2, max, sum, shrink};
        (narrow ? kernels->softmax_bf16 : kernels->softmax_f32)(&tile);
        test_tensor_check_guards(&s, "softmax");
        for (int32_t r = 0; r < ROWS; r++) {
            const double *x = in + r * columns;
            double top = max0[r], total = 0, bound = 0;
            bool nan = false;
            for (int32_t c = lo[r]; c < hi[r]; c++) {
                top = x[c] > top ? x[c] : top;
                nan = nan || isnan(x[c]);
            }
            const double factor = top > max0[r] ? exp2((max0[r] - top) * scale2) : 1;
            for (int32_t c = 0; c < columns; c++) {
                const bool seen = c >= lo[r] && c < hi[r];
                const double scaled = x[c] * scale2, p = !seen               ? 0
                                                         : x[c] == -INFINITY ? 0
                                                                             : exp2((x[c] - top) * scale2);
                const double most = seen && p > 0 ? exp2_bound(kernels, name, p, scaled, top * scale2) : 0;
                uint16_t bits;
                memcpy(&bits, (const uint16_t *)(scores + r * lds) + c, sizeof bits);
                const double got = narrow ? bf16_value(bits) : scores[r * lds + c];
                expect(kernels, name, r, c, got, p, narrow ? most * 1.01 + p * bf16 : most);
                if (!seen) continue;
                total += p;
                bound += most;
            }
            expect(kernels, "max", r, 0, max[r], top, 0);
            if (!isinf(max0[r]))
                expect(kernels, "shrink", r, 0, shrink[r], factor,
                       factor < 1 ? exp2_bound(kernels, name, factor, 0, (top - max0[r]) * scale2) : 0);
            expect(kernels, "sum", r, 0, sum[r], nan ? NAN : sum0[r] * factor + total,
                   bound + (total + sum0[r]) * sum_bound);
        }
        TEST_TIME("attention", name, kernels->level, 8 * ROWS * columns,
                  (narrow ? kernels->softmax_bf16 : kernels->softmax_f32)(&tile));
        free(in);
        test_tensor_free(&s);
    }
}

static void softmax_of_tiles(const attention_kernels *kernels, test_random *random)
{
    softmax(kernels, false, random);
    if (kernels->softmax_bf16 != NULL) softmax(kernels, true, random);
}

static void softmax_backward(const attention_kernels *kernels, bool narrow, test_random *random)
{
    const char *name = narrow ? "softmax_backward_bf16" : "softmax_backward_f32";
    for (int round = 0; round < 40; round++) {
        const int32_t columns = 16 * (int32_t)test_random_int(random, 1, MOST_COLUMNS / 16),
                      lds = columns + 16 * (round % 2);
        const float scale2 = round % 2 ? 0.21f : 1.0f;
        const int64_t shape[] = {2, ROWS, lds}; /* s and dp, of one stride */
        test_tensor t = test_tensor_make(random, QUERN_F32, 3, shape, TEST_UNALIGNED);
        test_tensor p_pairs = matrix(random, QUERN_I32, ROWS / 2, lds, TEST_UNALIGNED),
                    ds_pairs = matrix(random, QUERN_I32, ROWS / 2, lds, TEST_UNALIGNED);
        test_tensor ds_words = matrix(random, QUERN_I32, ROWS, lds / 2, TEST_UNALIGNED);
        int32_t lo[ROWS], hi[ROWS];
        float top[ROWS], factor[ROWS], delta[ROWS], row_scale[ROWS], dp_scale[ROWS];
        test_tensor_normal(&t, random, 3);
        for (int32_t r = 0; r < ROWS; r++) {
            interval(random, round < 6 ? round : (int32_t)test_random_int(random, 0, 5), columns, &lo[r],
                     &hi[r]);
            top[r] = r == 4 ? INFINITY : (float)(9 + test_random_normal(random));
            factor[r] = (float)(0.5 + test_random_uniform(random));
            delta[r] = r == 5 ? 0 : (float)test_random_normal(random);
            row_scale[r] = r % 2 ? 1.0f : (float)test_random_uniform(random);
            dp_scale[r] = r == 5 ? 0 : row_scale[r]; /* a row with one key: dS is 0 */
        }
        float *s = t.view.data, *dp = s + (int64_t)ROWS * lds;
        if (round == 20) dp[lds] = NAN;
        double *in = test_tensor_get(&t);
        const softmax_backward_tile tile = {s,
                                            dp,
                                            lds,
                                            ROWS,
                                            columns,
                                            lo,
                                            hi,
                                            scale2,
                                            top,
                                            factor,
                                            delta,
                                            row_scale,
                                            dp_scale,
                                            p_pairs.view.data,
                                            ds_pairs.view.data,
                                            ds_words.view.data};
        if (narrow) kernels->softmax_backward_bf16(&tile);
        else kernels->softmax_backward_f32(&tile);
        test_tensor_check_guards(&t, "softmax_backward");
        test_tensor_check_guards(&p_pairs, "softmax_backward's P by row pairs");
        test_tensor_check_guards(&ds_pairs, "softmax_backward's dS by row pairs");
        test_tensor_check_guards(&ds_words, "softmax_backward's dS by column pairs");
        const uint32_t *pp = p_pairs.view.data, *dd = ds_pairs.view.data, *dw = ds_words.view.data;
        for (int32_t r = 0; r < ROWS; r++)
            for (int32_t c = 0; c < columns; c++) {
                const double x = in[r * lds + c], g = in[(ROWS + r) * lds + c];
                const bool seen = c >= lo[r] && c < hi[r] && r != 4;
                const double p = seen ? exp2((x - top[r]) * scale2) * factor[r] : 0,
                             bound = seen ? exp2_bound(kernels, name, p, x * scale2, top[r] * scale2) : 0;
                const double size = fabs(g * dp_scale[r]) + fabs(delta[r]),
                             most = bound * size + p * size * 0x1p-23;
                const double expected_p = row_scale[r] * p,
                             expected_ds = seen ? p * (g * dp_scale[r] - delta[r]) : 0;
                if (!narrow) {
                    expect(kernels, "row_scale P", r, c, s[r * lds + c], expected_p, bound);
                    expect(kernels, "dS", r, c, dp[r * lds + c], expected_ds, most);
                    continue;
                }
                const double rounding = fabs(expected_ds) * bf16 + most * 1.01;
                expect(kernels, "row_scale P by row pairs", r, c, half_of(pp[r / 2 * lds + c], r % 2),
                       expected_p, bound * 1.01 + p * bf16);
                expect(kernels, "dS by row pairs", r, c, half_of(dd[r / 2 * lds + c], r % 2), expected_ds,
                       rounding);
                expect(kernels, "dS by column pairs", r, c, half_of(dw[r * lds / 2 + c / 2], c % 2),
                       expected_ds, rounding);
            }
        TEST_TIME("attention", name, kernels->level, 16 * ROWS * columns,
                  (narrow ? kernels->softmax_backward_bf16 : kernels->softmax_backward_f32)(&tile));
        free(in);
        test_tensor_free(&t);
        test_tensor_free(&p_pairs);
        test_tensor_free(&ds_pairs);
        test_tensor_free(&ds_words);
    }
}

static void backward_of_tiles(const attention_kernels *kernels, test_random *random)
{
    softmax_backward(kernels, false, random);
    if (kernels->softmax_backward_bf16 != NULL) softmax_backward(kernels, true, random);
}

static void rows_of_output(const attention_kernels *kernels, test_random *random)
{
    for (int64_t n = 8; n <= 256; n += 8) {
        test_tensor o = matrix(random, QUERN_F32, 1, n, TEST_UNALIGNED),
                    t = matrix(random, QUERN_F32, 1, n, TEST_UNALIGNED);
        test_tensor_normal(&o, random, 1);
        test_tensor_normal(&t, random, 1);
        if (n == 24) ((float *)o.view.data)[17] = NAN;
        double *x = test_tensor_get(&o), *y = test_tensor_get(&t);
        kernels->scale_row(o.view.data, 0.3f, n);
        test_tensor_check_guards(&o, "scale_row");
        for (int64_t c = 0; c < n; c++)
            expect(kernels, "scale_row", 0, c, ((float *)o.view.data)[c], (float)x[c] * 0.3f,
                   bound_of(kernels, "scale_row", 0));
        test_tensor_set(&o, x);
        kernels->scale_add_row(o.view.data, 0.3f, t.view.data, n);
        test_tensor_check_guards(&o, "scale_add_row");
        for (int64_t c = 0; c < n; c++)
            expect(kernels, "scale_add_row", 0, c, ((float *)o.view.data)[c], x[c] * 0.3f + y[c],
                   bound_of(kernels, "scale_add_row", 0) * (fabs(x[c] * 0.3f) + fabs(y[c])));
        TEST_TIME("attention", "scale_add_row", kernels->level, 12 * n,
                  kernels->scale_add_row(o.view.data, 0.3f, t.view.data, n));
        TEST_TIME("attention", "scale_row", kernels->level, 8 * n, kernels->scale_row(o.view.data, 1.0f, n));
        free(x);
        free(y);
        test_tensor_free(&o);
        test_tensor_free(&t);
    }
}

typedef struct kernel_test {
    void (*run)(const attention_kernels *, test_random *);
} kernel_test;

static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("attention_rows", 1);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        test->run(cpu_kernels_for(level)->attention, &random);
    }
}

int main(int argc, char **argv)
{
    char program[] = "attention_rows_test";
    kernel_test rows = {pack_rows}, keys = {pack_keys}, values = {pack_values}, pairs = {gather_pairs},
                forward = {softmax_of_tiles}, backward = {backward_of_tiles}, output = {rows_of_output};
    const struct CMUnitTest tests[] = {
        {"pack_rows", at_every_level, NULL, NULL, &rows},
        {"pack_keys", at_every_level, NULL, NULL, &keys},
        {"pack_values", at_every_level, NULL, NULL, &values},
        {"gather_pairs", at_every_level, NULL, NULL, &pairs},
        {"softmax", at_every_level, NULL, NULL, &forward},
        {"softmax_backward", at_every_level, NULL, NULL, &backward},
        {"rows_of_output", at_every_level, NULL, NULL, &output},
        {"every_kernel", test_every_kernel, NULL, NULL, program},
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
