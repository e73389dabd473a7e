/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm_stage_test.c - the gemm stage against double in every dtype and orientation, and that a row's bits do
 * not depend on how many rows there are, in this stage and in the grouped one. */
#include "cpu/cpu.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};

static void run(const stage_exec *exec, const gemm_args *args)
{
    test_workspace w = test_workspace_make(quern_backend_cpu.gemm.workspace(exec, args));
    assert_int_equal(quern_backend_cpu.gemm.run(exec, args, w.data), QUERN_OK);
    test_workspace_close(&w);
}

/* The same product as the grouped stage's, of one expert. */
static void run_grouped(const stage_exec *exec, const gemm_args *args)
{
    grouped_dense_args grouped = {.b_transposed = args->b_transposed,
                                  .accumulate = args->accumulate,
                                  .a = args->a,
                                  .b = args->b,
                                  .c = args->c};
    grouped.b.ndim = 3;
    for (int i = 2; i > 0; i--) {
        grouped.b.shape[i] = args->b.shape[i - 1];
        grouped.b.strides[i] = args->b.strides[i - 1];
    }
    grouped.b.shape[0] = 1;
    test_workspace w = test_workspace_make(quern_backend_cpu.grouped_dense.workspace(exec, &grouped));
    assert_int_equal(quern_backend_cpu.grouped_dense.run(exec, &grouped, w.data), QUERN_OK);
    test_workspace_close(&w);
}

/* c (+)= a b in double; c holds what it was before. */
static void multiply(const gemm_args *args, const double *a, const double *b, double *c)
{
    const int64_t m = args->c.shape[0], n = args->c.shape[1],
                  k = args->a_transposed ? args->a.shape[0] : args->a.shape[1];
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = args->accumulate ? c[i * n + j] : 0;
            for (int64_t p = 0; p < k; p++)
                sum += (args->a_transposed ? a[p * m + i] : a[i * k + p]) *
                       (args->b_transposed ? b[j * k + p] : b[p * n + j]);
            c[i * n + j] = sum;
        }
    }
}

static void random_products(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("random_products", 31);
    for (int trial = 0; trial < test_trials(200); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const int64_t most = test_random_one_in(&random, 4) ? 300 : 40;
        const int64_t m = test_random_int(&random, 0, most), n = test_random_int(&random, 1, most),
                      k = test_random_int(&random, 0, most);
        const int orientation = (int)test_random_int(&random, 0, 2);
        const quern_dtype da = dtypes[test_random_int(&random, 0, 2)],
                          db = dtypes[test_random_int(&random, 0, 2)];
        const bool accumulate = test_random_one_in(&random, 3);
        test_tensor a = test_tensor_matrix(&random, da, orientation == 1 ? k : m, orientation == 1 ? m : k);
        test_tensor b = test_tensor_matrix(&random, db, orientation == 2 ? n : k, orientation == 2 ? k : n);
        test_tensor c = test_tensor_matrix(
            &random, accumulate ? QUERN_F32 : dtypes[test_random_int(&random, 0, 2)], m, n);
        const gemm_args args = {a.view, b.view, c.view, orientation == 1, orientation == 2, accumulate};
        const stage_exec exec = {.threads = (int32_t)test_random_int(&random, 1, 3),
                                 .cpu_level = test_random_level(&random)};
        double *x = test_tensor_get(&a), *y = test_tensor_get(&b), *expected = test_tensor_get(&c);
        multiply(&args, x, y, expected);
        run(&exec, &args);
        double *out = test_tensor_get(&c);
        test_tensor_check_unchanged(&a, "a"), test_tensor_check_unchanged(&b, "b"),
            test_tensor_check_guards(&c, "c");
        test_check("c", out, expected, m * n, test_forward_bound(c.view.dtype));
        free(x), free(y), free(expected), free(out);
        test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&c);
    }
}

/* Rows computed in pieces have the bits of rows computed in one call. */
static void rows_do_not_depend_on_their_number(void **state)
{
    (void)state;
    for (int trial = 0; trial < 144; trial++) {
        test_random random = {(uint64_t)trial + 1};
        static const int64_t depths[] = {97, 260, 260, 97, 260, 2048, 5000}; /* 2048: rows share sets of L1 */
        const int64_t m = 131, n = trial % 2 ? 112 : 70, k = depths[trial % 7];
        const quern_dtype dtype = dtypes[trial % 3];
        const bool transposed = trial % 72 >= 36;
        void (*product)(const stage_exec *, const gemm_args *) = trial < 72 ? run : run_grouped;
        test_tensor a = test_tensor_matrix(&random, dtype, m, k),
                    b = test_tensor_matrix(&random, trial % 4 < 2 ? dtype : QUERN_F32, transposed ? n : k,
                                           transposed ? k : n);
        test_tensor whole = test_tensor_matrix(&random, QUERN_F32, m, n),
                    pieces = test_tensor_matrix(&random, QUERN_F32, m, n);
        const stage_exec exec = {.threads = 2, .cpu_level = test_level(trial)};
        gemm_args args = {.a = a.view, .b = b.view, .c = whole.view, .b_transposed = transposed};
        product(&exec, &args);
        for (int64_t row = 0, rows; row < m; row += rows) {
            rows = test_random_int(&random, 1, test_random_one_in(&random, 3) ? 100 : 5);
            if (rows > m - row) rows = m - row;
            args.a.shape[0] = args.c.shape[0] = rows;
            args.a.data = (char *)a.view.data + row * a.view.strides[0] * (int64_t)quern_dtype_size(dtype);
            args.c = pieces.view;
            args.c.shape[0] = rows;
            args.c.data = (char *)pieces.view.data + row * pieces.view.strides[0] * (int64_t)sizeof(float);
            product(&exec, &args);
        }
        double *x = test_tensor_get(&whole), *y = test_tensor_get(&pieces);
        assert_memory_equal(x, y, (size_t)(m * n) * sizeof *x);
        free(x), free(y);
        test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&whole), test_tensor_free(&pieces);
    }
}

/* The grouped stage's tasks are several panels wide where one thread has many of them, and one where many
 * threads share them: the bits are the same, those of the last, narrow panel too. */
static void width_of_tasks_changes_no_bit(void **state)
{
    (void)state;
    enum { M = 300, N = 2093, MANY = 3 };
    for (int trial = 0; trial < 12; trial++) {
        test_random random = {(uint64_t)trial + 1};
        const int64_t k = trial % 4 == 0 ? 260 : trial % 4 == 1 ? 31 : trial % 4 == 2 ? 0 : 514;
        const quern_dtype dtype = dtypes[trial % 3];
        const bool transposed = trial >= 6, accumulate = trial % 5 == 0;
        test_tensor a = test_tensor_matrix(&random, dtype, M, k),
                    b = test_tensor_matrix(&random, dtype, transposed ? N : k, transposed ? k : N),
                    wide = test_tensor_matrix(&random, QUERN_F32, M, N),
                    narrow = test_tensor_matrix(&random, QUERN_F32, M, N);
        double *zeros = calloc(M * N, sizeof *zeros);
        test_tensor_set(&wide, zeros), test_tensor_set(&narrow, zeros);
        stage_exec exec = {.threads = 1, .cpu_level = test_level(trial)};
        gemm_args args = {a.view, b.view, wide.view, false, transposed, accumulate};
        run_grouped(&exec, &args);
        exec.threads = MANY;
        args.c = narrow.view;
        run_grouped(&exec, &args);
        double *x = test_tensor_get(&wide), *y = test_tensor_get(&narrow);
        assert_memory_equal(x, y, (size_t)(M * N) * sizeof *x);
        test_tensor_check_guards(&wide, "wide");
        free(x), free(y), free(zeros);
        test_tensor_free(&a), test_tensor_free(&b), test_tensor_free(&wide), test_tensor_free(&narrow);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_products),
                                       cmocka_unit_test(rows_do_not_depend_on_their_number),
                                       cmocka_unit_test(width_of_tasks_changes_no_bit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
