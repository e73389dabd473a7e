/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_rows_test.c - the row kernels of NSA's own stages at every level, entry by entry against double.
 *
 * Bounds are those of src/cpu/kernels.inc.
 */
#include "cmocka_c11.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>

typedef struct kernel_test {
    void (*run)(const nsa_kernels *kernels, test_random *random);
} kernel_test;

static const quern_dtype activations[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
static const int64_t lengths[] = {0, 1, 3, 7, 8, 15, 16, 17, 24, 40, 63, 128, 250, 256, 301};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static test_tensor row_of(test_random *random, quern_dtype dtype, int64_t n, test_layout layout)
{
    const int64_t shape[] = {n};
    test_tensor t = test_tensor_make(random, dtype, 1, shape, layout);
    test_tensor_normal(&t, random, 1);
    return t;
}

static test_tensor rows_of(test_random *random, quern_dtype dtype, int64_t rows, int64_t n,
                           test_layout layout)
{
    const int64_t shape[] = {rows, n};
    test_tensor t = test_tensor_make(random, dtype, 2, shape, layout);
    test_tensor_normal(&t, random, 1);
    return t;
}

static void expect(const nsa_kernels *kernels, const char *what, quern_dtype dtype, int64_t n, int64_t at,
                   double out, double expected, double bound)
{
    bound += test_kernel_rounding(dtype, expected);
    if (isnan(expected) ? isnan(out)
                        : out == expected || (isfinite(expected) && fabs(out - expected) <= bound))
        return;
    fail_msg("%s %s %s, n %lld: [%lld] is %.9g, expected %.9g within %.3g",
             quern_cpu_level_name(kernels->level), what, quern_dtype_name(dtype), (long long)n, (long long)at,
             out, expected, bound);
}

static double bound_of(const nsa_kernels *kernels, const char *name, double terms, double argument)
{
    return test_kernel_bound("nsa", name, kernels->level, terms, argument);
}

static void sum_rows(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 3 * LENGTHS; i++) {
        const int64_t n = lengths[i / 3], rows = test_random_int(random, 0, 70);
        test_tensor in = rows_of(random, activations[i % 3], rows, n, i % 2 ? TEST_STRIDED : TEST_UNALIGNED);
        test_tensor out = row_of(random, QUERN_F32, n, TEST_UNALIGNED);
        if (rows > 3 && n > 0) { /* a NaN stays in its column */
            double *values = test_tensor_get(&in);
            values[2 * n + n / 2] = NAN;
            test_tensor_set(&in, values);
            free(values);
        }
        double *x = test_tensor_get(&in);
        const row_source src = {in.view.data, in.view.dtype, in.view.strides[0], rows, n};
        kernels->sum_rows(&src, out.view.data);
        test_tensor_check_guards(&out, "sum_rows");
        test_tensor_check_unchanged(&in, "source");
        double *got = test_tensor_get(&out);
        for (int64_t c = 0; c < n; c++) {
            double sum = 0, size = 0;
            for (int64_t r = 0; r < rows; r++) {
                sum += x[r * n + c];
                size += fabs(x[r * n + c]);
            }
            expect(kernels, "sum_rows", QUERN_F32, n, c, got[c], sum,
                   bound_of(kernels, "sum_rows", (double)rows, 0) * size);
        }
        TEST_TIME("nsa", "sum_rows", kernels->level, rows * n * (int64_t)quern_dtype_size(in.view.dtype),
                  kernels->sum_rows(&src, out.view.data));
        free(x), free(got);
        test_tensor_free(&in), test_tensor_free(&out);
    }
}

static void spread_row(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        const bool stream = i % 2;
        const quern_dtype dtype = activations[i / 2 % 3];
        const int64_t n = stream ? (lengths[i / 6] + 31) / 32 * 32 : lengths[i / 6],
                      rows = test_random_int(random, 0, 9);
        test_tensor row = row_of(random, QUERN_F32, n, TEST_UNALIGNED);
        test_tensor out = rows_of(random, dtype, rows, n, stream ? TEST_CONTIGUOUS : TEST_STRIDED);
        double *x = test_tensor_get(&row);
        kernels->spread_row(row.view.data, 0.125f, n, dtype, out.view.data, out.view.strides[0], rows,
                            stream);
        kernels->rows->fence();
        test_tensor_check_guards(&out, "spread_row");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < rows * n; j++)
            expect(kernels, "spread_row", QUERN_F32, n, j, got[j], test_round(dtype, x[j % n] * 0.125),
                   bound_of(kernels, "spread_row", 0, 0) +
                       (stream ? test_kernel_bound("row", "fence", kernels->rows->level, 0, 0) : 0));
        TEST_TIME("nsa", "spread_row", kernels->level, rows * n * (int64_t)quern_dtype_size(dtype),
                  kernels->spread_row(row.view.data, 0.125f, n, dtype, out.view.data, out.view.strides[0],
                                      rows, stream));
        TEST_TIME("row", "fence", kernels->rows->level, 64, kernels->rows->fence());
        free(x), free(got);
        test_tensor_free(&row), test_tensor_free(&out);
    }
}

/* Rows of a few tokens and heads in one dtype; some branches may be absent. */
typedef struct gate_case {
    quern_dtype dtype, w_dtype;
    int64_t tokens, heads, n;
    bool stream, absent[3];
    test_tensor q, w, o[3];
    double *q_values, *w_values, *o_values[3];
} gate_case;

static test_tensor grid_of(test_random *random, const gate_case *c, quern_dtype dtype, int64_t n, bool stream)
{
    const int64_t shape[] = {c->tokens, c->heads, n};
    test_tensor t = test_tensor_make(random, dtype, 3, shape, stream ? TEST_CONTIGUOUS : TEST_STRIDED);
    test_tensor_normal(&t, random, 1);
    return t;
}

static row_grid grid_from(const test_tensor *t)
{
    return (row_grid){t->view.data, t->view.strides[0], t->view.strides[1]};
}

static gate_weights weights_from(const gate_case *c)
{
    return (gate_weights){c->w.view.data, c->w_dtype, c->w.view.strides[0], c->w.view.strides[1]};
}

static gate_case gate_make_case(test_random *random, int i)
{
    gate_case c = {.dtype = activations[i % 3], .stream = i % 2, .n = lengths[i / 6]};
    c.w_dtype = i / 3 % 2 ? QUERN_F32 : c.dtype;
    c.tokens = test_random_int(random, 0, 6);
    c.heads = test_random_int(random, 0, 5);
    if (c.stream) c.n = (c.n + 31) / 32 * 32;
    const int64_t shape[] = {c.heads, 3, c.n};
    c.q = grid_of(random, &c, c.dtype, c.n, false);
    c.w = test_tensor_make(random, c.w_dtype, 3, shape, TEST_STRIDED);
    test_tensor_normal(&c.w, random, 0.2);
    const int absent = (int)test_random_int(random, 0, 3); /* 3: none */
    for (int b = 0; b < 3; b++) {
        c.absent[b] = b == absent;
        c.o[b] = grid_of(random, &c, c.dtype, c.n, false);
        double *o = test_tensor_get(&c.o[b]);
        if (i % 5 == 1 && b < 2 && c.n * c.tokens * c.heads > 0)
            o[c.n / 2] = b == 0 ? NAN : -INFINITY; /* stays in its row */
        test_tensor_set(&c.o[b], o);
        free(o);
        c.o_values[b] = test_tensor_get(&c.o[b]);
    }
    c.q_values = test_tensor_get(&c.q);
    c.w_values = test_tensor_get(&c.w);
    return c;
}

static void gate_free(gate_case *c)
{
    test_tensor_check_unchanged(&c->q, "q");
    test_tensor_check_unchanged(&c->w, "w");
    for (int b = 0; b < 3; b++) {
        test_tensor_check_unchanged(&c->o[b], "o");
        free(c->o_values[b]);
        test_tensor_free(&c->o[b]);
    }
    free(c->q_values), free(c->w_values);
    test_tensor_free(&c->q), test_tensor_free(&c->w);
}

static double dot(const double *x, const double *y, int64_t n, double *size)
{
    double sum = 0;
    *size = 0;
    for (int64_t j = 0; j < n; j++) {
        sum += x[j] * y[j];
        *size += fabs(x[j] * y[j]);
    }
    return sum;
}

static void gate_rows(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        gate_case c = gate_make_case(random, i);
        const bool given = i % 4 == 0, combines = i % 4 != 1;
        test_tensor gates = grid_of(random, &c, QUERN_F32, 3, false),
                    out = grid_of(random, &c, c.dtype, c.n, c.stream);
        gate_block t = {.dtype = c.dtype,
                        .tokens = c.tokens,
                        .heads = c.heads,
                        .dim = c.n,
                        .dim_v = c.n,
                        .q = grid_from(&c.q),
                        .gates = grid_from(&gates),
                        .stream = c.stream,
                        .prefetch_l2 = i % 2};
        for (int b = 0; b < 3; b++)
            if (!c.absent[b]) t.o[b] = grid_from(&c.o[b]);
        if (!given) t.w = weights_from(&c);
        if (combines) t.out = grid_from(&out);
        double *old = test_tensor_get(&gates);
        kernels->gate_rows(&t);
        kernels->rows->fence();
        test_tensor_check_guards(&gates, "gates");
        if (combines) test_tensor_check_guards(&out, "gate_rows");
        else test_tensor_check_unchanged(&out, "gate_rows");
        double *g = test_tensor_get(&gates), *got = test_tensor_get(&out);
        for (int64_t r = 0; r < c.tokens * c.heads; r++) {
            double exact[3], error[3], size;
            for (int64_t b = 0; b < 3; b++) {
                const double x =
                    dot(c.q_values + r * c.n, c.w_values + (r % c.heads * 3 + b) * c.n, c.n, &size);
                exact[b] = given ? old[3 * r + b] : 1 / (1 + exp(-x));
                error[b] = given ? 0
                                 : exact[b] * (bound_of(kernels, "gate_rows", 0, fabs(x)) +
                                               bound_of(kernels, "gate_rows", (double)c.n, 0) * size);
                expect(kernels, "gates", QUERN_F32, c.n, 3 * r + b, g[3 * r + b], exact[b], error[b]);
            }
            for (int64_t j = 0; combines && j < c.n; j++) {
                double sum = 0, bound = 0;
                for (int b = 0; b < 3; b++) {
                    if (c.absent[b]) continue;
                    const double o = c.o_values[b][r * c.n + j];
                    sum += exact[b] * o;
                    bound += (bound_of(kernels, "gate_rows", 3, 0) * fabs(exact[b]) + error[b]) * fabs(o);
                }
                expect(kernels, "gate_rows", c.dtype, c.n, r * c.n + j, got[r * c.n + j], sum, bound);
            }
        }
        TEST_TIME("nsa", "gate_rows", kernels->level,
                  5 * c.tokens * c.heads * c.n * (int64_t)quern_dtype_size(c.dtype), kernels->gate_rows(&t));
        free(old), free(g), free(got);
        test_tensor_free(&gates), test_tensor_free(&out);
        gate_free(&c);
    }
}

static void gate_backward(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        gate_case c = gate_make_case(random, i);
        const bool accumulate = i % 4 == 2;
        const quern_dtype q_dtype = accumulate || i % 3 == 1 ? QUERN_F32 : c.dtype;
        test_tensor gates = grid_of(random, &c, QUERN_F32, 3, false),
                    delta = grid_of(random, &c, QUERN_F32, 1, false);
        test_tensor d_gates = grid_of(random, &c, QUERN_F32, 3, false),
                    d_o_b = grid_of(random, &c, c.dtype, c.n, c.stream);
        test_tensor d_q = grid_of(random, &c, q_dtype, c.n, c.stream);
        float dl[6 * 5 * 3];
        gate_backward_block t = {.dtype = c.dtype,
                                 .d_q_dtype = q_dtype,
                                 .tokens = c.tokens,
                                 .heads = c.heads,
                                 .dim = c.n,
                                 .dim_v = c.n,
                                 .d_o = grid_from(&c.q),
                                 .gates = grid_from(&gates),
                                 .d_gates = grid_from(&d_gates),
                                 .d_q = grid_from(&d_q),
                                 .w = weights_from(&c),
                                 .dl = dl,
                                 .accumulate = accumulate,
                                 .stream = {0, c.stream, 0, c.stream && !accumulate},
                                 .prefetch_l2 = i % 2};
        for (int b = 0; b < 3; b++)
            if (!c.absent[b]) t.o[b] = grid_from(&c.o[b]);
        t.delta[2] = grid_from(&delta);
        t.d_o_b[1] = grid_from(&d_o_b);
        double *g = test_tensor_get(&gates), *old = test_tensor_get(&d_q);
        kernels->gate_backward(&t);
        kernels->rows->fence();
        test_tensor_check_unchanged(&gates, "gates");
        test_tensor *outputs[] = {&delta, &d_gates, &d_o_b, &d_q};
        double *got[4];
        for (int k = 0; k < 4; k++) {
            test_tensor_check_guards(outputs[k], "gate_backward");
            got[k] = test_tensor_get(outputs[k]);
        }
        for (int64_t r = 0; r < c.tokens * c.heads; r++) {
            double s[3], error[3];
            for (int64_t b = 0; b < 3; b++) {
                double size = 0, exact = c.absent[b]
                                             ? 0
                                             : dot(c.q_values + r * c.n, c.o_values[b] + r * c.n, c.n, &size);
                const double gate = g[3 * r + b],
                             bound = bound_of(kernels, "gate_backward", (double)c.n, 0) * size,
                             slope = gate * (1 - gate);
                expect(kernels, "dots", QUERN_F32, c.n, r, got[1][3 * r + b], exact, bound);
                if (b == 2)
                    expect(kernels, "delta", QUERN_F32, c.n, r, got[0][r], gate * exact,
                           bound * (fabs(gate) + 1));
                s[b] = exact * slope;
                error[b] = bound * 2 * (fabs(gate) + gate * gate);
                expect(kernels, "dl", QUERN_F32, c.n, r, dl[3 * r + b], s[b], error[b]);
            }
            for (int64_t j = 0; j < c.n; j++) {
                const int64_t at = r * c.n + j;
                const double scaled = g[3 * r + 1] * c.q_values[at];
                expect(kernels, "d_o_b", c.dtype, c.n, at, got[2][at], scaled,
                       bound_of(kernels, "gate_backward", 0, 0) * fabs(scaled));
                double sum = accumulate ? old[at] : 0,
                       bound = bound_of(kernels, "gate_backward", 1, 0) * fabs(sum);
                for (int64_t b = 0; b < 3; b++) {
                    const double w = c.w_values[(r % c.heads * 3 + b) * c.n + j];
                    sum += s[b] * w;
                    bound += (bound_of(kernels, "gate_backward", 4, 0) * fabs(s[b]) + error[b]) * fabs(w);
                }
                expect(kernels, "d_q", q_dtype, c.n, at, got[3][at], sum, bound);
            }
        }
        TEST_TIME("nsa", "gate_backward", kernels->level,
                  6 * c.tokens * c.heads * c.n * (int64_t)quern_dtype_size(c.dtype),
                  kernels->gate_backward(&t));
        for (int k = 0; k < 4; k++) free(got[k]), test_tensor_free(outputs[k]);
        free(g), free(old);
        test_tensor_free(&gates);
        gate_free(&c);
    }
}

static void gate_weight(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        gate_case c = gate_make_case(random, i);
        test_tensor d_w = row_of(random, QUERN_F32, c.heads * 3 * c.n, TEST_UNALIGNED),
                    s = row_of(random, QUERN_F32, c.tokens * c.heads * 3, TEST_UNALIGNED);
        const row_grid q = grid_from(&c.q);
        double *old = test_tensor_get(&d_w), *factors = test_tensor_get(&s);
        kernels->gate_weight(s.view.data, &q, c.dtype, c.tokens, c.heads, c.n, d_w.view.data, i % 2);
        test_tensor_check_guards(&d_w, "gate_weight");
        double *got = test_tensor_get(&d_w);
        for (int64_t at = 0; at < c.heads * 3 * c.n; at++) {
            const int64_t row = at / c.n, j = at % c.n;
            double sum = old[at], size = fabs(sum);
            for (int64_t token = 0; token < c.tokens; token++) {
                const double term =
                    factors[token * c.heads * 3 + row] * c.q_values[(token * c.heads + row / 3) * c.n + j];
                sum += term;
                size += fabs(term);
            }
            expect(kernels, "gate_weight", QUERN_F32, c.n, at, got[at], sum,
                   bound_of(kernels, "gate_weight", (double)c.tokens, 0) * size);
        }
        TEST_TIME(
            "nsa", "gate_weight", kernels->level,
            c.tokens * c.heads * c.n * (int64_t)quern_dtype_size(c.dtype) + 24 * c.heads * c.n,
            kernels->gate_weight(s.view.data, &q, c.dtype, c.tokens, c.heads, c.n, d_w.view.data, i % 2));
        free(old), free(factors), free(got);
        test_tensor_free(&d_w), test_tensor_free(&s);
        gate_free(&c);
    }
}

static void add_probabilities(const nsa_kernels *kernels, test_random *random)
{
    enum { MOST_ROWS = 9 };
    for (int round = 0; round < 40; round++) {
        const int32_t rows = (int32_t)test_random_int(random, 0, MOST_ROWS),
                      columns = 16 * (int32_t)test_random_int(random, 0, 9);
        const float scale2 = 0.4f;
        test_tensor s = rows_of(random, QUERN_F32, rows, columns, round % 2 ? TEST_STRIDED : TEST_UNALIGNED);
        test_tensor acc = row_of(random, QUERN_F32, columns, TEST_UNALIGNED);
        int32_t seen[MOST_ROWS];
        float lse2[MOST_ROWS];
        for (int32_t r = 0; r < rows; r++) {
            seen[r] = r == 0 ? 0 : r == 1 ? columns : (int32_t)test_random_int(random, 0, columns);
            lse2[r] = r == 0 ? INFINITY : (float)(2 + test_random_normal(random));
        }
        double *x = test_tensor_get(&s), *old = test_tensor_get(&acc);
        kernels->add_probabilities(s.view.data, s.view.strides[0], rows, seen, columns, scale2, lse2,
                                   acc.view.data);
        test_tensor_check_guards(&acc, "add_probabilities");
        test_tensor_check_unchanged(&s, "scores");
        double *got = test_tensor_get(&acc);
        for (int32_t c = 0; c < columns; c++) {
            double sum = old[c], bound = bound_of(kernels, "add_probabilities", rows, 0) * fabs(sum);
            for (int32_t r = 0; r < rows; r++) {
                if (c >= seen[r]) continue;
                const double scaled = x[r * columns + c] * (double)scale2, p = exp2(scaled - (double)lse2[r]);
                sum += p;
                bound +=
                    bound_of(kernels, "add_probabilities", rows, fabs(scaled) + fabs((double)lse2[r])) * p;
            }
            expect(kernels, "add_probabilities", QUERN_F32, columns, c, got[c], sum, bound);
        }
        TEST_TIME("nsa", "add_probabilities", kernels->level, 4 * (int64_t)rows * columns,
                  kernels->add_probabilities(s.view.data, s.view.strides[0], rows, seen, columns, scale2,
                                             lse2, acc.view.data));
        free(x), free(old), free(got);
        test_tensor_free(&s), test_tensor_free(&acc);
    }
}

static void row_maxima(const nsa_kernels *kernels, test_random *random)
{
    enum { MOST_ROWS = 37 };
    for (int round = 0; round < 200; round++) {
        const int32_t rows = (int32_t)test_random_int(random, 0, MOST_ROWS),
                      columns = (int32_t)test_random_int(random, 0, 140);
        const test_layout layout = round % 2 ? TEST_STRIDED : TEST_UNALIGNED;
        test_tensor s = rows_of(random, QUERN_F32, rows, columns, layout),
                    best = rows_of(random, QUERN_F32, rows, 3, TEST_CONTIGUOUS);
        int32_t seen[MOST_ROWS];
        double *x = test_tensor_get(&s), *most = test_tensor_get(&best);
        for (int64_t i = 0; i < (int64_t)rows * columns && round % 4 == 1; i++)
            if (test_random_one_in(random, 9))
                x[i] = test_random_one_in(random, 4)   ? NAN
                       : test_random_one_in(random, 2) ? INFINITY
                                                       : -INFINITY;
        test_tensor_set(&s, x);
        for (int32_t r = 0; r < rows; r++) {
            seen[r] = r % 5 == 0 ? columns : (int32_t)test_random_int(random, -3, columns + 9);
            most[3 * r + 1] = r % 7 == 3 ? NAN : r % 2 ? -INFINITY : test_random_normal(random);
        }
        test_tensor_set(&best, most);
        assert_true(bound_of(kernels, "row_maxima", 0, 0) == 0);
        kernels->row_maxima(s.view.data, s.view.strides[0], rows, seen, columns,
                            (float *)best.view.data + (rows > 0), 3);
        test_tensor_check_unchanged(&s, "scores");
        test_tensor_check_guards(&best, "row_maxima");
        double *got = test_tensor_get(&best);
        for (int32_t r = 0; r < rows; r++) {
            double expected = test_round(QUERN_F32, most[3 * r + 1]);
            for (int32_t c = 0; c < columns && c < seen[r]; c++) {
                const double v = test_round(QUERN_F32, x[(int64_t)r * columns + c]);
                expected = isnan(v) || isnan(expected) ? NAN : fmax(v, expected);
            }
            most[3 * r + 1] = expected;
        }
        for (int32_t i = 0; i < 3 * rows; i++)
            expect(kernels, "row_maxima", QUERN_F32, columns, i, got[i], test_round(QUERN_F32, most[i]), 0);
        TEST_TIME("nsa", "row_maxima", kernels->level, 4 * (int64_t)rows * columns,
                  kernels->row_maxima(s.view.data, s.view.strides[0], rows, seen, columns,
                                      (float *)best.view.data + (rows > 0), 3));
        free(x), free(most), free(got);
        test_tensor_free(&s), test_tensor_free(&best);
    }
}

/* Whether index i stands before index j: the greater score, NaN last, of equal ones the lower index. */
static bool stands_before(const float *scores, int64_t i, int64_t j)
{
    const float a = scores[i], b = scores[j];
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b) ? i < j : isnan(b);
    return a > b || (a == b && i < j);
}

static void best_of(const nsa_kernels *kernels, test_random *random)
{
    enum { MOST = 400 };
    for (int round = 0; round < 300; round++) {
        const int64_t to = test_random_int(random, 0, MOST),
                      from = test_random_int(random, 0, to < 20 ? to : 20);
        const int64_t want = test_random_int(random, 0, 40), there = to - from,
                      count = want < there ? want : there;
        test_tensor t = row_of(random, QUERN_F32, to, TEST_UNALIGNED);
        float *scores = t.view.data;
        for (int64_t i = 0; i < to; i++) {
            if (round % 4 == 1) scores[i] = (float)test_random_int(random, -2, 2); /* ties, and both zeros */
            if (round % 4 == 1 && scores[i] == 0 && i % 2) scores[i] = -0.0f;
            if (round % 4 == 2 && test_random_one_in(random, 3))
                scores[i] = test_random_one_in(random, 2) ? NAN : -INFINITY;
            if (round % 4 == 3) scores[i] = NAN;
        }
        uint64_t best[40 + 1];
        assert_true(bound_of(kernels, "best_of", 0, 0) == 0);
        best[count] = 0xfeedfacecafebeefu;
        assert_int_equal(kernels->best_of(scores, from, to, want, best), count);
        assert_true(best[count] == 0xfeedfacecafebeefu);
        for (int64_t b = 0; b < count; b++) {
            const int64_t i = rank_index(best[b]);
            int64_t before = 0; /* how many stand before it: its place */
            assert_true(i >= from && i < to);
            for (int64_t j = from; j < to; j++) before += stands_before(scores, j, i);
            if (before != b)
                fail_msg("%s best_of round %d: place %lld holds index %lld, which belongs at %lld",
                         quern_cpu_level_name(kernels->level), round, (long long)b, (long long)i,
                         (long long)before);
        }
        if (want <= 16 && round % 4 == 0)
            TEST_TIME("nsa", "best_of", kernels->level, 4 * there,
                      kernels->best_of(scores, from, to, want, best));
        test_tensor_free(&t);
    }
}

static void divergence(const nsa_kernels *kernels, test_random *random)
{
    enum { MOST = 160 };
    for (int round = 0; round < 60; round++) {
        const int32_t columns = 16 * (int32_t)test_random_int(random, 0, MOST / 16),
                      lo = round % 3 ? 0 : (int32_t)test_random_int(random, 0, columns),
                      hi = (int32_t)test_random_int(random, lo, columns);
        const float scale = 0.3f, lse = 3.5f, weight = 1.0f / 3.0f;
        test_tensor s = row_of(random, QUERN_F32, columns, TEST_UNALIGNED),
                    teacher = row_of(random, QUERN_F32, columns, TEST_UNALIGNED);
        double *t = test_tensor_get(&teacher), sum = 0, slack = 0;
        for (int32_t c = 0; c < columns; c++) /* from 1 to far below 1e-10, and 0 */
            t[c] = c % 11 == 3 ? 0 : c == lo ? 3 : 3 * exp(-9 * fabs(t[c]));
        test_tensor_set(&teacher, t);
        double *x = test_tensor_get(&s), *given = test_tensor_get(&teacher);
        float sums[2];
        double total = 0, total_slack = 0;
        kernels->divergence(s.view.data, teacher.view.data, lo, hi, columns, scale, lse, weight, sums);
        double *got = test_tensor_get(&s);
        test_tensor_check_guards(&s, "divergence");
        test_tensor_check_unchanged(&teacher, "teacher");
        for (int32_t c = 0; c < columns; c++) {
            const bool seen = c >= lo && c < hi;
            const double part = given[c] * (double)weight, log_t = log(fmax(part, 1e-10)),
                         log_p = x[c] * (double)scale - (double)lse, p = exp(log_p),
                         argument = fabs(x[c] * (double)scale) + (double)lse;
            expect(kernels, "divergence", QUERN_F32, columns, c, got[c], seen ? p - part : 0,
                   seen ? bound_of(kernels, "divergence", 1, argument) * (p + part) : 0);
            if (!seen) continue;
            sum += part * (log_t - log_p);
            total += part;
            total_slack += bound_of(kernels, "divergence", hi - lo, 0) * part;
            slack += bound_of(kernels, "divergence", hi - lo, 0) * part * (fabs(log_t) + argument + 1);
        }
        expect(kernels, "divergence", QUERN_F32, columns, -1, (double)sums[0], sum, slack);
        expect(kernels, "divergence", QUERN_F32, columns, -2, (double)sums[1], total, total_slack);
        TEST_TIME(
            "nsa", "divergence", kernels->level, 8 * (int64_t)columns,
            kernels->divergence(s.view.data, teacher.view.data, lo, hi, columns, scale, lse, weight, sums));
        free(t), free(x), free(given), free(got);
        test_tensor_free(&s), test_tensor_free(&teacher);
    }
    /* NaN shows where it is seen, and nowhere else. */
    float s[32] = {[3] = NAN, [20] = NAN}, teacher[32] = {[21] = NAN}, sums[2];
    kernels->divergence(s, teacher, 4, 20, 32, 1, 3, 1, sums);
    assert_true(isfinite(sums[0]) && isfinite(sums[1]) && s[3] == 0 && s[20] == 0 && s[21] == 0);
    s[5] = NAN;
    kernels->divergence(s, teacher, 4, 20, 32, 1, 3, 1, sums);
    assert_true(isnan(sums[0]) && isnan(s[5]));
    teacher[6] = NAN, s[5] = 0;
    kernels->divergence(s, teacher, 4, 20, 32, 1, 3, 1, sums);
    assert_true(isnan(sums[0]) && isnan(sums[1]) && isnan(s[6]));
}

static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("nsa_rows", 1);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        test_random random = {seed};
        test->run(cpu_kernels_for(level)->nsa, &random);
    }
}

int main(int argc, char **argv)
{
    char program[] = "nsa_rows_test";
    kernel_test sum = {sum_rows}, spread = {spread_row}, gates = {gate_rows}, gradients = {gate_backward},
                weights = {gate_weight}, probabilities = {add_probabilities}, maxima = {row_maxima},
                divergences = {divergence}, best = {best_of};
    const struct CMUnitTest tests[] = {
        {"sum_rows", at_every_level, NULL, NULL, &sum},
        {"spread_row", at_every_level, NULL, NULL, &spread},
        {"gate_rows", at_every_level, NULL, NULL, &gates},
        {"gate_backward", at_every_level, NULL, NULL, &gradients},
        {"gate_weight", at_every_level, NULL, NULL, &weights},
        {"add_probabilities", at_every_level, NULL, NULL, &probabilities},
        {"row_maxima", at_every_level, NULL, NULL, &maxima},
        {"divergence", at_every_level, NULL, NULL, &divergences},
        {"best_of", at_every_level, NULL, NULL, &best},
        {"every_kernel", test_every_kernel, NULL, NULL, program},
    };
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
