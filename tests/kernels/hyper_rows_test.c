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

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
enum { DTYPES = 3 };

/* ---- fn's order ---- */

/* Columns of n channels, packed; the values come back as they were. */
static test_tensor packed_of(const hyper_kernels *kernels, test_random *random, const test_tensor *fn,
                             int64_t columns, int64_t n, quern_dtype order)
{
    const int64_t floats = hyper_packed_floats(kernels, n, columns);
    test_tensor to = test_tensor_make(random, QUERN_F32, 1, &floats, TEST_UNALIGNED),
                back = matrix(random, QUERN_F32, columns, n + 3);
    (void)test_kernel_bound("hyper", "pack", kernels->level, 0, 0);
    (void)test_kernel_bound("hyper", "unpack", kernels->level, 0, 0);
    kernels->pack(fn->view.data, n, columns, n, order, to.view.data);
    kernels->unpack(to.view.data, columns, n, order, back.view.data, n + 3);
    for (int64_t j = 0; j < columns; j++)
        assert_memory_equal((float *)back.view.data + j * (n + 3), (float *)fn->view.data + j * n,
                            (size_t)n * sizeof(float));
    test_tensor_check_guards(&to, "packed");
    test_tensor_check_guards(&back, "unpacked");
    TEST_TIME("hyper", "pack", kernels->level, 4 * floats,
              kernels->pack(fn->view.data, n, columns, n, order, to.view.data));
    TEST_TIME("hyper", "unpack", kernels->level, 4 * floats,
              kernels->unpack(to.view.data, columns, n, order, back.view.data, n + 3));
    test_tensor_free(&back);
    return to;
}

/* ---- products and squares ---- */

static void check_products(const hyper_kernels *kernels, test_random *random, quern_dtype dtype, int64_t rows,
                           int64_t columns, int64_t n)
{
    const int64_t floats = rows * (columns + 1) * kernels->lanes;
    test_tensor a = matrix(random, dtype, rows, n), b = matrix(random, QUERN_F32, columns, n),
                lanes = test_tensor_make(random, QUERN_F32, 1, &floats, TEST_UNALIGNED),
                sums = matrix(random, QUERN_F32, rows, columns + 1);
    double *x = test_tensor_get(&a), *y = test_tensor_get(&b);
    spoil(random, &a, x), spoil(random, &b, y);
    test_tensor packed = packed_of(kernels, random, &b, columns, n, dtype);
    const bool in_place = test_random_one_in(random, 2), twice = test_random_one_in(random, 2);
    hyper_products p = {.x = a.view.data,
                        .from = dtype,
                        .rows = rows,
                        .ld_x = n,
                        .n = n,
                        .fn = in_place ? b.view.data : packed.view.data,
                        .ld_fn = in_place ? n : 0,
                        .columns = columns,
                        .lanes = lanes.view.data};
    if (test_random_one_in(random, 2)) p.ahead = (hyper_ahead){{a.view.data, b.view.data}, {4 * n, 0}};
    memset(lanes.view.data, 0, (size_t)floats * sizeof(float));
    for (int i = 0; i <= (n > 0 && twice); i++) kernels->add_products(&p);
    kernels->fold(lanes.view.data, rows, columns, sums.view.data, columns + 1);
    double *out = test_tensor_get(&sums);
    const double bound = test_kernel_bound("hyper", "add_products", kernels->level, 2 * (double)n, 0) +
                         test_kernel_bound("hyper", "fold", kernels->level, (double)kernels->lanes, 0);
    for (int64_t i = 0; i < rows * (columns + 1); i++) {
        const double *left = x + i / (columns + 1) * n;
        const int64_t column = i % (columns + 1);
        const double *right = column < columns ? y + column * n : left;
        double sum = 0, size = 0;
        for (int64_t k = 0; k < n; k++) {
            const double term = (twice ? 2 : 1) * left[k] * right[k];
            sum += term;
            size += fabs(term);
        }
        expect(kernels, "add_products", i, out[i], sum, bound * size);
    }
    test_tensor_check_guards(&lanes, "lanes"), test_tensor_check_guards(&sums, "sums");
    test_tensor_check_unchanged(&a, "a"), test_tensor_check_unchanged(&b, "b");
    TEST_TIME("hyper", "add_products", kernels->level, rows * (columns + 1) * n, kernels->add_products(&p));
    TEST_TIME("hyper", "fold", kernels->level, floats,
              kernels->fold(lanes.view.data, rows, columns, sums.view.data, columns + 1));
    free(x), free(y), free(out);
    test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&packed);
    test_tensor_free(&lanes), test_tensor_free(&sums);
}

static void products(void **state)
{
    const uint64_t seed = test_seed("hyper products", 1);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (int d = 0; d < DTYPES; d++) {
            for (int i = 0; i < LENGTHS; i++)
                for (int64_t rows = 1; rows <= 9; rows++)
                    for (int64_t columns = 1; columns <= 13; columns += 3)
                        check_products(kernels, &random, dtypes[d], rows, columns, lengths[i]);
            check_products(kernels, &random, dtypes[d], 12, 24, 1024);
        }
    }
}

/* ---- products of gradients ---- */

/* c [rows][n] of channels in the order of packed ones, as double in memory's order. */
static double *in_order(const hyper_kernels *kernels, const float *c, int64_t rows, int64_t n, int64_t ld,
                        quern_dtype order)
{
    double *to = malloc((size_t)(rows * n + 1) * sizeof *to);
    float *row = malloc((size_t)(n + 1) * sizeof *row);
    for (int64_t i = 0; i < rows; i++) {
        kernels->unpack(c + i * ld, 1, n, order, row, n);
        for (int64_t k = 0; k < n; k++) to[i * n + k] = (double)row[k];
    }
    free(row);
    return to;
}

static void check_outer(const hyper_kernels *kernels, test_random *random, quern_dtype dtype, int64_t rows,
                        int64_t columns, int64_t n)
{
    const int64_t first = 32 * test_random_int(random, 0, 2),
                  piece = first + n + (n % 32 == 0 ? 32 * test_random_int(random, 0, 1) : 0),
                  ld_out = hyper_packed_floats(kernels, n, 1) + 4;
    test_tensor a = matrix(random, QUERN_F32, rows, columns), x = matrix(random, dtype, rows, n),
                fn = matrix(random, QUERN_F32, columns, piece), d = matrix(random, QUERN_F32, columns, piece),
                out = matrix(random, QUERN_F32, rows, ld_out);
    double *av = test_tensor_get(&a), *xv = test_tensor_get(&x), *f = test_tensor_get(&fn),
           *old = test_tensor_get(&d);
    spoil(random, &x, xv), spoil(random, &a, av);
    test_tensor packed = packed_of(kernels, random, &fn, columns, piece, dtype),
                d_packed = packed_of(kernels, random, &d, columns, piece, dtype);
    const hyper_outer o = {.a = a.view.data,
                           .rows = rows,
                           .columns = columns,
                           .lda = columns,
                           .piece = piece,
                           .first = first,
                           .n = n,
                           .fn = packed.view.data,
                           .out = out.view.data,
                           .ld_out = ld_out,
                           .x = x.view.data,
                           .from = dtype,
                           .ld_x = n,
                           .d_fn = d_packed.view.data};
    const double times = test_kernel_bound("hyper", "times_fn", kernels->level, (double)columns, 0),
                 outer = test_kernel_bound("hyper", "add_outer", kernels->level, (double)rows, 0);
    kernels->times_fn(&o);
    kernels->add_outer(&o);
    kernels->unpack(d_packed.view.data, columns, piece, dtype, d.view.data, piece);
    double *made = in_order(kernels, out.view.data, rows, n, ld_out, dtype), *grown = test_tensor_get(&d);
    for (int64_t e = 0; e < rows * n; e++) {
        double sum = 0, size = 0;
        for (int64_t j = 0; j < columns; j++) {
            const double term = av[e / n * columns + j] * f[j * piece + first + e % n];
            sum += term;
            size += fabs(term);
        }
        expect(kernels, "times_fn", e, made[e], sum, times * size);
    }
    for (int64_t e = 0; e < columns * piece; e++) {
        const int64_t channel = e % piece - first;
        double sum = old[e], size = fabs(old[e]);
        for (int64_t i = 0; i < rows && channel >= 0 && channel < n; i++) {
            const double term = av[i * columns + e / piece] * xv[i * n + channel];
            sum += term;
            size += fabs(term);
        }
        expect(kernels, "add_outer", e, grown[e], sum, outer * size);
    }
    test_tensor_check_guards(&out, "out"), test_tensor_check_guards(&d_packed, "d_fn");
    test_tensor_check_unchanged(&a, "a"), test_tensor_check_unchanged(&x, "x");
    TEST_TIME("hyper", "times_fn", kernels->level, rows * columns * n, kernels->times_fn(&o));
    TEST_TIME("hyper", "add_outer", kernels->level, rows * columns * n, kernels->add_outer(&o));
    free(av), free(xv), free(f), free(old), free(made), free(grown);
    test_tensor_free(&a), test_tensor_free(&x), test_tensor_free(&fn), test_tensor_free(&d);
    test_tensor_free(&out), test_tensor_free(&packed), test_tensor_free(&d_packed);
}

static void products_of_gradients(void **state)
{
    const uint64_t seed = test_seed("hyper outer", 4);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (int d = 0; d < DTYPES; d++) {
            for (int i = 0; i < LENGTHS; i++)
                for (int64_t rows = 1; rows <= 13; rows += 3)
                    for (int64_t columns = 1; columns <= 13; columns += 4)
                        check_outer(kernels, &random, dtypes[d], rows, columns, lengths[i]);
            check_outer(kernels, &random, dtypes[d], 48, 24, 256);
        }
    }
}

/* ---- a token ---- */

/* Rows of a token with n copies: x, d_out, f in dtype, and f32. */
typedef struct token_rows {
    int64_t copies, n;
    quern_dtype dtype;
    test_tensor x, d_out, f, collapsed, factors, sums, out; /* [copies][n]; [n]; [copies][16] */
    double *xv, *dv, *fv, *cv, *mv, *sv;
} token_rows;

static token_rows token_make(test_random *random, quern_dtype dtype, int64_t copies, int64_t n, bool aligned)
{
    token_rows t = {.copies = copies, .n = n, .dtype = dtype};
    t.x = matrix(random, dtype, copies, n), t.d_out = matrix(random, dtype, copies, n);
    t.f = matrix(random, dtype, 1, n), t.collapsed = matrix(random, QUERN_F32, 1, n);
    t.factors = matrix(random, QUERN_F32, 20, 16), t.sums = matrix(random, QUERN_F32, copies, n);
    t.out = test_tensor_make(random, dtype, 2, (int64_t[]){copies, n},
                             aligned ? TEST_CONTIGUOUS : TEST_UNALIGNED);
    t.xv = test_tensor_get(&t.x), t.dv = test_tensor_get(&t.d_out), t.fv = test_tensor_get(&t.f);
    spoil(random, &t.x, t.xv);
    t.cv = test_tensor_get(&t.collapsed), t.mv = test_tensor_get(&t.factors), t.sv = test_tensor_get(&t.sums);
    return t;
}

static void *row_of(const test_tensor *t, int64_t row, int64_t n)
{
    return (char *)t->view.data + (size_t)(row * n) * quern_dtype_size(t->view.dtype);
}

static void token_free(token_rows *t)
{
    test_tensor *const all[] = {&t->x, &t->d_out, &t->f, &t->factors, &t->sums, &t->collapsed, &t->out};
    for (int i = 0; i < 5; i++) test_tensor_check_unchanged(all[i], "rows");
    for (int i = 5; i < 7; i++) test_tensor_check_guards(all[i], "results");
    for (int i = 0; i < 7; i++) test_tensor_free(all[i]);
    free(t->xv), free(t->dv), free(t->fv), free(t->cv), free(t->mv), free(t->sv);
}

/* A sum of terms, and of their sizes. */
typedef struct exact {
    double sum, size;
} exact;

static void add(exact *e, double term)
{
    e->sum += term;
    e->size += fabs(term);
}

static void check_mix(const hyper_kernels *kernels, token_rows *t, bool takes_f, bool stream)
{
    const int64_t copies = t->copies, n = t->n;
    const double *pre = t->mv, *m = t->mv + 16;
    hyper_mix r = {.copies = (int32_t)copies,
                   .dtype = t->dtype,
                   .n = n,
                   .f = takes_f ? t->f.view.data : NULL,
                   .pre = t->factors.view.data,
                   .m = (float *)t->factors.view.data + 16,
                   .collapsed = t->collapsed.view.data,
                   .stream = stream};
    for (int64_t i = 0; i < copies; i++) {
        r.x[i] = row_of(&t->x, i, n);
        r.out[i] = row_of(&t->out, i, n);
    }
    const double bound = test_kernel_bound("hyper", "mix", kernels->level, (double)copies + 1, 0),
                 all = test_kernel_bound("hyper", "mix", kernels->level, (double)(2 * copies + n), 0);
    const float squares = kernels->mix(&r);
    double *out = test_tensor_get(&t->out), *collapsed = test_tensor_get(&t->collapsed);
    exact square = {0, 0};
    for (int64_t c = 0; c < n; c++) {
        exact e = {0, 0};
        for (int64_t i = 0; i < copies; i++) add(&e, pre[i] * t->xv[i * n + c]);
        expect(kernels, "mix", c, collapsed[c], e.sum, bound * e.size);
        square.sum += e.sum * e.sum;
        square.size += e.size * e.size;
        for (int64_t k = 0; takes_f && k < copies; k++) {
            e = (exact){0, 0};
            for (int64_t i = 0; i < copies; i++) add(&e, m[k * HYPER_INPUTS + i] * t->xv[i * n + c]);
            add(&e, m[k * HYPER_INPUTS + copies] * t->fv[c]);
            expect(kernels, "mix", k * n + c, out[k * n + c], e.sum,
                   bound * e.size + test_kernel_rounding(t->dtype, e.sum));
        }
    }
    expect(kernels, "mix's squares", 0, (double)squares, square.sum, all * square.size);
    TEST_TIME("hyper", "mix", kernels->level, n * copies * 8, (void)kernels->mix(&r));
    free(out), free(collapsed);
}

static void check_mix_backward(const hyper_kernels *kernels, test_random *random, token_rows *t, bool outs,
                               bool stream)
{
    const int64_t copies = t->copies, n = t->n, ld = hyper_packed_floats(kernels, n, 1);
    const double *pre = t->mv, *comb = t->mv + 16;
    test_tensor sums = matrix(random, QUERN_F32, copies, ld);
    for (int64_t i = 0; i < copies; i++)
        kernels->pack(row_of(&t->sums, i, n), n, 1, n, t->dtype, (float *)sums.view.data + i * ld);
    hyper_gradient r = {.copies = (int32_t)copies,
                        .dtype = t->dtype,
                        .n = n,
                        .pre = t->factors.view.data,
                        .comb = (float *)t->factors.view.data + 16,
                        .d_collapsed = t->collapsed.view.data,
                        .square = 0.7f,
                        .d_sums = test_random_one_in(random, 4) ? NULL : sums.view.data,
                        .ld_sums = ld,
                        .stream = stream};
    for (int64_t i = 0; i < copies; i++) {
        r.x[i] = row_of(&t->x, i, n);
        r.d_out[i] = outs ? row_of(&t->d_out, i, n) : NULL;
        r.d_x[i] = row_of(&t->out, i, n);
    }
    double *c = test_tensor_get(&t->collapsed);
    const double bound = test_kernel_bound("hyper", "mix_backward", kernels->level, (double)copies + 3, 0);
    kernels->mix_backward(&r);
    double *out = test_tensor_get(&t->out);
    for (int64_t i = 0; i < copies; i++)
        for (int64_t at = i * n; at < (i + 1) * n; at++) {
            exact e = {0, 0};
            if (r.d_sums != NULL) add(&e, t->sv[at]);
            add(&e, pre[i] * c[at - i * n]);
            add(&e, (double)0.7f * t->xv[at]);
            for (int64_t k = 0; outs && k < copies; k++)
                add(&e, comb[i * copies + k] * t->dv[k * n + at - i * n]);
            expect(kernels, "mix_backward", at, out[at], e.sum,
                   bound * e.size + test_kernel_rounding(t->dtype, e.sum));
        }
    TEST_TIME("hyper", "mix_backward", kernels->level, n * copies * 12, kernels->mix_backward(&r));
    free(out), free(c);
    test_tensor_free(&sums);
}

static void check_dots(const hyper_kernels *kernels, token_rows *t, bool outs, bool h)
{
    const int64_t copies = t->copies, n = t->n;
    float d[HYPER_COPIES * (HYPER_COPIES + 2)];
    for (int i = 0; i < HYPER_COPIES * (HYPER_COPIES + 2); i++) d[i] = 0.5f;
    double *c = test_tensor_get(&t->collapsed);
    hyper_token r = {.copies = (int32_t)copies,
                     .from = t->dtype,
                     .n = n,
                     .f = outs ? t->f.view.data : NULL,
                     .d_collapsed = h ? t->collapsed.view.data : NULL,
                     .post = t->factors.view.data,
                     .d = d,
                     .d_f = outs ? t->out.view.data : NULL};
    for (int64_t i = 0; i < copies; i++) {
        r.x[i] = row_of(&t->x, i, n);
        r.d_out[i] = outs ? row_of(&t->d_out, i, n) : NULL;
    }
    const double bound = test_kernel_bound("hyper", "dots", kernels->level, (double)n + 1, 0),
                 few = test_kernel_bound("hyper", "dots", kernels->level, (double)copies, 0);
    kernels->dots(&r);
    for (int64_t j = 0; j < copies * (copies + 2); j++) {
        const int64_t i = j < copies ? j : j < 2 * copies ? j - copies : (j - 2 * copies) / copies;
        exact e = {0.5, 0.5};
        for (int64_t at = 0; at < n && (j < copies ? h : outs); at++) {
            const double left = j >= copies && j < 2 * copies ? t->fv[at] : t->xv[i * n + at],
                         right = j < copies ? c[at] : t->dv[j % copies * n + at];
            add(&e, left * right);
        }
        expect(kernels, "dots", j, (double)d[j], e.sum, bound * e.size);
    }
    double *out = test_tensor_get(&t->out);
    for (int64_t at = 0; outs && at < n; at++) {
        exact e = {0, 0};
        for (int64_t k = 0; k < copies; k++) add(&e, t->mv[k] * t->dv[k * n + at]);
        expect(kernels, "d_f", at, out[at], e.sum, few * e.size + test_kernel_rounding(t->dtype, e.sum));
    }
    TEST_TIME("hyper", "dots", kernels->level, n * copies * (copies + 3), kernels->dots(&r));
    free(c), free(out);
}

static void check_scale_row(const hyper_kernels *kernels, token_rows *t, bool stream)
{
    double *c = test_tensor_get(&t->collapsed);
    const double bound = test_kernel_bound("hyper", "scale_row", kernels->level, 0, 0);
    kernels->scale_row(t->collapsed.view.data, t->sums.view.data, 0.3f, t->n, t->out.view.data, t->dtype,
                       stream);
    double *out = test_tensor_get(&t->out);
    for (int64_t at = 0; at < t->n; at++) {
        const double product = c[at] * (double)0.3f * t->sv[at];
        expect(kernels, "scale_row", at, out[at], product,
               bound * fabs(product) + test_kernel_rounding(t->dtype, product));
    }
    TEST_TIME("hyper", "scale_row", kernels->level, t->n * 8,
              kernels->scale_row(t->collapsed.view.data, t->sums.view.data, 0.3f, t->n, t->out.view.data,
                                 t->dtype, stream));
    free(c), free(out);
}

static void rows_of_tokens(void **state)
{
    const uint64_t seed = test_seed("hyper tokens", 2);
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const hyper_kernels *kernels = cpu_kernels_for(level)->hyper;
        test_random random = {seed};
        for (int d = 0; d < DTYPES; d++)
            for (int i = 0; i < LENGTHS; i++)
                for (int64_t copies = 1; copies <= HYPER_COPIES; copies++)
                    for (int kind = 0; kind < 4; kind++) {
                        const bool lines = lengths[i] * (int64_t)quern_dtype_size(dtypes[d]) % 64 == 0;
                        token_rows t = token_make(&random, dtypes[d], copies, lengths[i], lines);
                        check_scale_row(kernels, &t, lines);
                        check_mix(kernels, &t, kind % 2 == 1, lines && kind < 2);
                        check_mix_backward(kernels, &random, &t, kind % 2 == 1, lines && kind < 2);
                        check_dots(kernels, &t, kind % 2 == 1, kind != 1);
                        token_free(&t);
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
        cmocka_unit_test(products_of_gradients),
        cmocka_unit_test(rows_of_tokens),
        cmocka_unit_test(weights_of_tokens),
        cmocka_unit_test_prestate(test_every_kernel, program),
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
