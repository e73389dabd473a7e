/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_rows_test.c - the row kernels of NSA's own stages at every level, entry by entry against double.
 *
 * Bounds are those of src/cpu/kernels.inc.
 */
#include "cmocka_c11.h"
#include "cpu/nsa_kernels.h"
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

static test_tensor rows_of(test_random *random, quern_dtype dtype, int64_t rows, int64_t n, test_layout layout)
{
    const int64_t shape[] = {rows, n};
    test_tensor t = test_tensor_make(random, dtype, 2, shape, layout);
    test_tensor_normal(&t, random, 1);
    return t;
}

static void expect(const nsa_kernels *kernels, const char *what, quern_dtype dtype, int64_t n, int64_t at, double out, double expected, double bound)
{
    bound += test_kernel_rounding(dtype, expected);
    if (isnan(expected) ? isnan(out) : out == expected || (isfinite(expected) && fabs(out - expected) <= bound)) return;
    fail_msg("%s %s %s, n %lld: [%lld] is %.9g, expected %.9g within %.3g", quern_cpu_level_name(kernels->level), what, quern_dtype_name(dtype),
             (long long)n, (long long)at, out, expected, bound);
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
            for (int64_t r = 0; r < rows; r++) sum += x[r * n + c], size += fabs(x[r * n + c]);
            expect(kernels, "sum_rows", QUERN_F32, n, c, got[c], sum, bound_of(kernels, "sum_rows", (double)rows, 0) * size);
        }
        free(x), free(got);
        test_tensor_free(&in), test_tensor_free(&out);
    }
}

static void spread_row(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        const bool stream = i % 2;
        const quern_dtype dtype = activations[i / 2 % 3];
        const int64_t n = stream ? (lengths[i / 6] + 15) / 16 * 16 : lengths[i / 6], rows = test_random_int(random, 0, 9);
        test_tensor row = row_of(random, QUERN_F32, n, TEST_UNALIGNED);
        test_tensor out = rows_of(random, dtype, rows, n, stream ? TEST_CONTIGUOUS : TEST_STRIDED);
        double *x = test_tensor_get(&row);
        kernels->spread_row(row.view.data, 0.125f, n, dtype, out.view.data, out.view.strides[0], rows, stream);
        kernels->fence();
        test_tensor_check_guards(&out, "spread_row");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < rows * n; j++)
            expect(kernels, "spread_row", QUERN_F32, n, j, got[j], test_round(dtype, x[j % n] * 0.125),
                   bound_of(kernels, "spread_row", 0, 0) + (stream ? bound_of(kernels, "fence", 0, 0) : 0));
        free(x), free(got);
        test_tensor_free(&row), test_tensor_free(&out);
    }
}

static void convert_row(const nsa_kernels *kernels, test_random *random)
{
    static const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 65519, 65520, 0x1p-24, 0x1p-25, 0x3p-25, 1 + 0x1p-8, 1 + 0x3p-8, 1e-40};
    for (int i = 0; i < 9 * LENGTHS; i++) {
        const quern_dtype from = activations[i % 3], to = activations[i / 3 % 3];
        const int64_t n = lengths[i / 9];
        test_tensor in = row_of(random, from, n, TEST_UNALIGNED), out = row_of(random, to, n, TEST_UNALIGNED);
        double *x = test_tensor_get(&in);
        for (int64_t j = 0; j < n; j += 2) x[j] = special[j / 2 % (int64_t)(sizeof special / sizeof *special)];
        test_tensor_set(&in, x);
        free(x);
        x = test_tensor_get(&in);
        kernels->convert_row(in.view.data, from, out.view.data, to, n);
        test_tensor_check_guards(&out, "convert_row");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < n; j++) {
            const double expected = test_round(to, x[j]);
            assert_true(bound_of(kernels, "convert_row", 0, 0) == 0);
            if (isnan(expected) ? !isnan(got[j]) : got[j] != expected || signbit(got[j]) != signbit(expected))
                fail_msg("%s convert_row %s -> %s: %.9g became %.9g, expected %.9g", quern_cpu_level_name(kernels->level), quern_dtype_name(from),
                         quern_dtype_name(to), x[j], got[j], expected);
        }
        free(x), free(got);
        test_tensor_free(&in), test_tensor_free(&out);
    }
}

static void add_scaled(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < LENGTHS; i++) {
        const int64_t n = lengths[i];
        test_tensor src = row_of(random, QUERN_F32, n, TEST_UNALIGNED), dst = row_of(random, QUERN_F32, n, TEST_UNALIGNED);
        double *x = test_tensor_get(&src), *old = test_tensor_get(&dst);
        kernels->add_scaled(src.view.data, 0.7f, n, dst.view.data);
        test_tensor_check_guards(&dst, "add_scaled");
        double *got = test_tensor_get(&dst);
        for (int64_t c = 0; c < n; c++) {
            const double term = (double)0.7f * x[c];
            expect(kernels, "add_scaled", QUERN_F32, n, c, got[c], old[c] + term,
                   bound_of(kernels, "add_scaled", 0, 0) * (fabs(old[c]) + fabs(term)));
        }
        free(x), free(old), free(got);
        test_tensor_free(&src), test_tensor_free(&dst);
    }
}

/* A gate's operands: q, d_o and a branch's output in the activations' dtype; w in it or f32; one branch may be absent. */
typedef struct gate_case {
    quern_dtype dtype, w_dtype;
    int64_t n, ldw;
    test_tensor q, w, o;
    double *q_values, *w_values, *o_values;
    const void *branch[3];
} gate_case;

static gate_case gate_make(test_random *random, int i, test_layout layout, int64_t n)
{
    gate_case c = {.dtype = activations[i % 3], .n = n};
    c.w_dtype = i / 3 % 2 ? QUERN_F32 : c.dtype;
    c.q = row_of(random, c.dtype, n, TEST_UNALIGNED);
    c.w = rows_of(random, c.w_dtype, 3, n, TEST_STRIDED);
    c.o = rows_of(random, c.dtype, 3, n, layout);
    c.ldw = c.w.view.strides[0];
    if (i % 5 == 1 && n > 0) { /* special values in one column */
        double *q = test_tensor_get(&c.q), *o = test_tensor_get(&c.o);
        q[n - 1] = i % 2 ? NAN : INFINITY;
        o[n / 2] = -INFINITY;
        o[2 * n + n / 3] = NAN;
        test_tensor_set(&c.q, q);
        test_tensor_set(&c.o, o);
        free(q), free(o);
    }
    c.q_values = test_tensor_get(&c.q);
    c.w_values = test_tensor_get(&c.w);
    c.o_values = test_tensor_get(&c.o);
    const int absent = (int)test_random_int(random, 0, 3); /* 3: none */
    for (int b = 0; b < 3; b++)
        c.branch[b] = b == absent ? NULL : (const char *)c.o.view.data + b * c.o.view.strides[0] * (int64_t)quern_dtype_size(c.dtype);
    return c;
}

static void gate_free(gate_case *c)
{
    test_tensor_check_unchanged(&c->q, "q");
    test_tensor_check_unchanged(&c->w, "w");
    test_tensor_check_unchanged(&c->o, "o");
    free(c->q_values), free(c->w_values), free(c->o_values);
    test_tensor_free(&c->q), test_tensor_free(&c->w), test_tensor_free(&c->o);
}

static void gate_dot_products(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        gate_case c = gate_make(random, i, TEST_STRIDED, lengths[i / 6]);
        float logits[3], dots[3];
        kernels->gate_logits(c.q.view.data, c.dtype, c.w.view.data, c.w_dtype, c.ldw, c.n, logits);
        kernels->gate_dots(c.q.view.data, c.branch, c.dtype, c.n, dots);
        for (int b = 0; b < 3; b++) {
            double logit = 0, logit_size = 0, dot = 0, dot_size = 0;
            for (int64_t j = 0; j < c.n; j++) {
                const double t = c.q_values[j] * c.w_values[b * c.n + j], u = c.q_values[j] * c.o_values[b * c.n + j];
                logit += t, logit_size += fabs(t), dot += u, dot_size += fabs(u);
            }
            if (c.branch[b] == NULL) dot = dot_size = 0;
            expect(kernels, "gate_logits", QUERN_F32, c.n, b, logits[b], logit, bound_of(kernels, "gate_logits", (double)c.n, 0) * logit_size);
            expect(kernels, "gate_dots", QUERN_F32, c.n, b, dots[b], dot, bound_of(kernels, "gate_dots", (double)c.n, 0) * dot_size);
        }
        gate_free(&c);
    }
}

static void gate_combine(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        const bool stream = i % 2;
        const int64_t n = stream ? (lengths[i / 6] + 15) / 16 * 16 : lengths[i / 6];
        gate_case c = gate_make(random, i, TEST_STRIDED, n);
        test_tensor out = row_of(random, c.dtype, n, stream ? TEST_CONTIGUOUS : TEST_UNALIGNED);
        const float gates[] = {0.25f, 0.7f, 0.1f};
        kernels->gate_combine(c.branch, c.dtype, gates, n, out.view.data, stream);
        kernels->fence();
        test_tensor_check_guards(&out, "gate_combine");
        double *got = test_tensor_get(&out);
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, size = 0;
            for (int b = 0; b < 3; b++) {
                const double term = c.branch[b] != NULL ? (double)gates[b] * c.o_values[b * n + j] : 0;
                sum += term, size += fabs(term);
            }
            expect(kernels, "gate_combine", c.dtype, n, j, got[j], sum, bound_of(kernels, "gate_combine", 3, 0) * size);
        }
        free(got);
        test_tensor_free(&out);
        gate_free(&c);
    }
}

static void gate_gradients(const nsa_kernels *kernels, test_random *random)
{
    for (int i = 0; i < 6 * LENGTHS; i++) {
        gate_case c = gate_make(random, i, TEST_STRIDED, lengths[i / 6]);
        const float s[] = {0.3f, -1.1f, 0.05f};
        const bool accumulate = i % 2;
        test_tensor d_q = row_of(random, QUERN_F32, c.n, TEST_UNALIGNED), d_w = rows_of(random, QUERN_F32, 3, c.n, TEST_STRIDED);
        double *old_q = test_tensor_get(&d_q), *old_w = test_tensor_get(&d_w);
        kernels->gate_query(s, c.w.view.data, c.w_dtype, c.ldw, c.n, d_q.view.data, accumulate);
        kernels->gate_weight(s, c.q.view.data, c.dtype, c.n, d_w.view.data, d_w.view.strides[0]);
        test_tensor_check_guards(&d_q, "gate_query");
        test_tensor_check_guards(&d_w, "gate_weight");
        double *got_q = test_tensor_get(&d_q), *got_w = test_tensor_get(&d_w);
        for (int64_t j = 0; j < c.n; j++) {
            double sum = accumulate ? old_q[j] : 0, size = fabs(sum);
            for (int b = 0; b < 3; b++) {
                const int64_t at = b * c.n + j;
                const double term = (double)s[b] * c.w_values[at], share = (double)s[b] * c.q_values[j];
                sum += term, size += fabs(term);
                expect(kernels, "gate_weight", QUERN_F32, c.n, at, got_w[at], old_w[at] + share,
                       bound_of(kernels, "gate_weight", 0, 0) * (fabs(old_w[at]) + fabs(share)));
            }
            expect(kernels, "gate_query", QUERN_F32, c.n, j, got_q[j], sum, bound_of(kernels, "gate_query", 4, 0) * size);
        }
        free(old_q), free(old_w), free(got_q), free(got_w);
        test_tensor_free(&d_q), test_tensor_free(&d_w);
        gate_free(&c);
    }
}

static void sigmoid(const nsa_kernels *kernels, test_random *random)
{
    static const double special[] = {0.0, INFINITY, NAN, 20, -20, 60, -60};
    for (int i = 0; i < LENGTHS; i++) {
        const int64_t n = lengths[i];
        test_tensor t = row_of(random, QUERN_F32, n, TEST_UNALIGNED);
        test_tensor_normal(&t, random, 4);
        double *x = test_tensor_get(&t);
        for (int64_t j = 0; j < n; j += 3) x[j] = special[j / 3 % (int64_t)(sizeof special / sizeof *special)];
        test_tensor_set(&t, x);
        kernels->sigmoid(t.view.data, n);
        test_tensor_check_guards(&t, "sigmoid");
        double *got = test_tensor_get(&t);
        for (int64_t j = 0; j < n; j++) {
            const double expected = 1 / (1 + exp(-x[j]));
            expect(kernels, "sigmoid", QUERN_F32, n, j, got[j], expected, isfinite(x[j]) ? bound_of(kernels, "sigmoid", 0, x[j]) * expected : 0);
        }
        free(x), free(got);
        test_tensor_free(&t);
    }
}

static void add_probabilities(const nsa_kernels *kernels, test_random *random)
{
    enum { MOST_ROWS = 9 };
    for (int round = 0; round < 40; round++) {
        const int32_t rows = (int32_t)test_random_int(random, 0, MOST_ROWS), columns = 16 * (int32_t)test_random_int(random, 0, 9);
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
        kernels->add_probabilities(s.view.data, s.view.strides[0], rows, seen, columns, scale2, lse2, acc.view.data);
        test_tensor_check_guards(&acc, "add_probabilities");
        test_tensor_check_unchanged(&s, "scores");
        double *got = test_tensor_get(&acc);
        for (int32_t c = 0; c < columns; c++) {
            double sum = old[c], bound = bound_of(kernels, "add_probabilities", rows, 0) * fabs(sum);
            for (int32_t r = 0; r < rows; r++) {
                if (c >= seen[r]) continue;
                const double scaled = x[r * columns + c] * (double)scale2, p = exp2(scaled - (double)lse2[r]);
                sum += p, bound += bound_of(kernels, "add_probabilities", rows, fabs(scaled) + fabs((double)lse2[r])) * p;
            }
            expect(kernels, "add_probabilities", QUERN_F32, columns, c, got[c], sum, bound);
        }
        free(x), free(old), free(got);
        test_tensor_free(&s), test_tensor_free(&acc);
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
        const int64_t to = test_random_int(random, 0, MOST), from = test_random_int(random, 0, to < 20 ? to : 20);
        const int64_t want = test_random_int(random, 0, 40), there = to - from, count = want < there ? want : there;
        test_tensor t = row_of(random, QUERN_F32, to, TEST_UNALIGNED);
        float *scores = t.view.data;
        for (int64_t i = 0; i < to; i++) {
            if (round % 4 == 1) scores[i] = (float)test_random_int(random, -2, 2); /* ties, and both zeros */
            if (round % 4 == 1 && scores[i] == 0 && i % 2) scores[i] = -0.0f;
            if (round % 4 == 2 && test_random_one_in(random, 3)) scores[i] = test_random_one_in(random, 2) ? NAN : -INFINITY;
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
                fail_msg("%s best_of round %d: place %lld holds index %lld, which belongs at %lld", quern_cpu_level_name(kernels->level), round,
                         (long long)b, (long long)i, (long long)before);
        }
        test_tensor_free(&t);
    }
}

static void at_every_level(void **state)
{
    const kernel_test *test = *state;
    const uint64_t seed = test_seed("nsa_rows", 1);
    for (int level = QUERN_CPU_LEVEL_PORTABLE; level <= (int)quern_cpu_level_detect(); level++) {
        test_random random = {seed};
        test->run(nsa_kernels_for((quern_cpu_level)level), &random);
    }
}

int main(void)
{
    char program[] = "nsa_rows_test";
    kernel_test sum = {sum_rows}, spread = {spread_row}, convert = {convert_row}, add = {add_scaled}, dots = {gate_dot_products},
                combine = {gate_combine}, gradients = {gate_gradients}, gates = {sigmoid}, probabilities = {add_probabilities}, best = {best_of};
    const struct CMUnitTest tests[] = {
        {"sum_rows", at_every_level, NULL, NULL, &sum},
        {"spread_row", at_every_level, NULL, NULL, &spread},
        {"convert_row", at_every_level, NULL, NULL, &convert},
        {"add_scaled", at_every_level, NULL, NULL, &add},
        {"gate_dot_products", at_every_level, NULL, NULL, &dots},
        {"gate_combine", at_every_level, NULL, NULL, &combine},
        {"gate_gradients", at_every_level, NULL, NULL, &gradients},
        {"sigmoid", at_every_level, NULL, NULL, &gates},
        {"add_probabilities", at_every_level, NULL, NULL, &probabilities},
        {"best_of", at_every_level, NULL, NULL, &best},
        {"every_kernel", test_every_kernel, NULL, NULL, program},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
