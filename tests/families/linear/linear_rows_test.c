/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* linear_rows_test.c - RMS norm and rotation of rows: random calls against float64 at every CPU level, the
 * oracle's gradients against differences, empty calls, and what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/linear.h"

#include <quern/linear.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};

/* In the order of the structs. */
enum { N_X, N_WEIGHT, N_Y, N_D_Y, N_D_X, N_D_WEIGHT, N_TENSORS };
enum { R_X, R_COS_SIN, R_POSITIONS, R_Y, R_D_Y, R_D_X, R_TENSORS };

static test_layout any_layout(test_random *random)
{
    return (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
}

static void release(test_tensor *t, int count)
{
    for (int i = 0; i < count; i++)
        if (t[i].buffer != NULL) test_tensor_free(&t[i]);
}

static void compare(const char *op, const test_tensor *t, int tensor, const double *expected, double bound)
{
    if (t[tensor].buffer == NULL) return;
    double *out = test_tensor_get(&t[tensor]);
    test_check(op_case_field(op, tensor), out, expected, test_tensor_count(&t[tensor]), bound);
    free(out);
}

static void norm_trial(test_random *random)
{
    const quern_dtype dtype = dtypes[test_random_int(random, 0, 2)];
    const int64_t rows = test_random_int(random, 0, test_random_one_in(random, 5) ? 1500 : 40),
                  width = test_random_int(random, 1, 200), shape[] = {rows, width};
    const bool weighted = test_random_one_in(random, 2);
    const quern_dtype weight_dtype = test_random_one_in(random, 2) ? dtype : QUERN_F32;
    test_tensor t[N_TENSORS] = {{.buffer = NULL}};
    quern_rms_norm_params p = QUERN_RMS_NORM_PARAMS_INIT;
    p.eps = test_random_one_in(random, 2) ? 0.0f : 0.01f;
    for (int i = 0; i < N_TENSORS; i++) {
        const bool of_weight = i == N_WEIGHT || i == N_D_WEIGHT;
        if (of_weight && !weighted) continue;
        t[i] = test_tensor_make(random,
                                i == N_D_WEIGHT ? QUERN_F32
                                : of_weight     ? weight_dtype
                                                : dtype,
                                of_weight ? 1 : 2, of_weight ? shape + 1 : shape, any_layout(random));
        test_tensor_normal(&t[i], random, 1);
    }
    double *x = test_tensor_get(&t[N_X]), *w = weighted ? test_tensor_get(&t[N_WEIGHT]) : NULL,
           *d_y = test_tensor_get(&t[N_D_Y]), *y = test_doubles(rows * width),
           *d_x = test_doubles(rows * width), *d_w = test_doubles(width);
    const double eps = p.eps > 0 ? (double)p.eps : (double)1e-6f;
    oracle_rms_norm(x, w, eps, rows, width, y);
    oracle_rms_norm_backward(x, w, eps, rows, width, d_y, d_x, d_w);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, (int32_t)test_random_int(random, 1, 3));
        quern_rms_norm_tensors views = QUERN_RMS_NORM_TENSORS_INIT;
        op_case_bind("rms-norm", t, N_TENSORS, OP_CASE_ALL, &views);
        test_tensor_reset(&t[N_Y]), test_tensor_reset(&t[N_D_X]);
        if (weighted) test_tensor_reset(&t[N_D_WEIGHT]);
        op_case_run(ctx, "rms-norm", QUERN_OP_FORWARD, &p, &views, t, N_TENSORS);
        op_case_run(ctx, "rms-norm", QUERN_OP_BACKWARD, &p, &views, t, N_TENSORS);
        compare("rms-norm", t, N_Y, y, test_forward_bound(dtype));
        compare("rms-norm", t, N_D_X, d_x, test_gradient_bound(dtype));
        compare("rms-norm", t, N_D_WEIGHT, d_w, test_gradient_bound(dtype));
        quern_context_destroy(ctx);
    }
    free(x), free(w), free(d_y), free(y), free(d_x), free(d_w);
    release(t, N_TENSORS);
}

static void norms_against_float64(void **state)
{
    const uint64_t seed = test_seed("rms norm", 44);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (test_trial(seed, trial, &random)) norm_trial(&random);
    }
}

static void norm_gradients_are_differences(void **state)
{
    enum { ROWS = 3, WIDTH = 7 };
    test_random random = {test_seed("rms norm differences", 45)};
    double x[ROWS * WIDTH], w[WIDTH], d_y[ROWS * WIDTH], y[ROWS * WIDTH], d_x[ROWS * WIDTH], d_w[WIDTH];
    (void)state;
    for (int i = 0; i < ROWS * WIDTH; i++)
        x[i] = test_random_normal(&random), d_y[i] = test_random_normal(&random);
    for (int i = 0; i < WIDTH; i++) w[i] = test_random_normal(&random);
    oracle_rms_norm_backward(x, w, 1e-3, ROWS, WIDTH, d_y, d_x, d_w);
    for (int i = 0; i < ROWS * WIDTH + WIDTH; i++) {
        double *at = i < ROWS * WIDTH ? &x[i] : &w[i - ROWS * WIDTH], loss[2] = {0};
        const double saved = *at, expected = i < ROWS * WIDTH ? d_x[i] : d_w[i - ROWS * WIDTH];
        for (int side = 0; side < 2; side++) {
            *at = saved + (side == 0 ? -1e-5 : 1e-5);
            oracle_rms_norm(x, w, 1e-3, ROWS, WIDTH, y);
            for (int j = 0; j < ROWS * WIDTH; j++) loss[side] += d_y[j] * y[j];
        }
        *at = saved;
        assert_true(fabs((loss[1] - loss[0]) / 2e-5 - expected) < 1e-7);
    }
}

static void rotated(const test_tensor *t, int tensor, const int64_t *positions, const quern_rope_params *p,
                    bool inverse, double *out)
{
    const quern_tensor *x = &t[tensor].view;
    const int64_t width = x->shape[2], turned = t[R_COS_SIN].view.shape[1];
    double *values = test_tensor_get(&t[tensor]), *table = test_tensor_get(&t[R_COS_SIN]);
    for (int64_t i = 0; i < x->shape[0] * x->shape[1]; i++) {
        const int64_t token = i / x->shape[1],
                      position = positions != NULL ? positions[token] : p->start_abs_pos + token;
        oracle_rope(values + i * width, table + position * turned, width, turned, inverse);
    }
    memcpy(out, values, sizeof *out * (size_t)test_tensor_count(&t[tensor]));
    free(values), free(table);
}

static void rope_trial(test_random *random)
{
    const quern_dtype dtype = dtypes[test_random_int(random, 0, 2)];
    const int64_t rows = test_random_int(random, 0, 30), heads = test_random_int(random, 1, 5),
                  width = test_random_int(random, 1, 90),
                  table[] = {rows + test_random_int(random, 1, 9), test_random_int(random, 0, width / 2) * 2},
                  shape[] = {rows, heads, width};
    const bool placed = test_random_one_in(random, 2);
    int64_t positions[31];
    int32_t given[31];
    test_tensor t[R_TENSORS] = {{.buffer = NULL}};
    quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
    p.inverse = test_random_one_in(random, 2);
    p.start_abs_pos = placed ? 0 : test_random_int(random, 0, table[0] - rows);
    for (int i = 0; i < R_TENSORS; i++) {
        if (i == R_POSITIONS) continue;
        t[i] = test_tensor_make(random, i == R_COS_SIN && placed ? QUERN_F32 : dtype, i == R_COS_SIN ? 2 : 3,
                                i == R_COS_SIN ? table : shape, any_layout(random));
        test_tensor_normal(&t[i], random, 1);
    }
    for (int64_t i = 0; i < rows; i++)
        given[i] = (int32_t)(positions[i] = test_random_int(random, 0, table[0] - 1));
    if (placed) {
        t[R_POSITIONS] = test_tensor_make(random, QUERN_I32, 1, shape, TEST_UNALIGNED);
        test_tensor_set_i32(&t[R_POSITIONS], given);
    }
    double *y = test_doubles(rows * heads * width), *d_x = test_doubles(rows * heads * width);
    rotated(t, R_X, placed ? positions : NULL, &p, p.inverse, y);
    rotated(t, R_D_Y, placed ? positions : NULL, &p, !p.inverse, d_x);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, (int32_t)test_random_int(random, 1, 3));
        quern_rope_tensors views = QUERN_ROPE_TENSORS_INIT;
        op_case_bind("rope", t, R_TENSORS, OP_CASE_ALL, &views);
        test_tensor_reset(&t[R_Y]), test_tensor_reset(&t[R_D_X]);
        op_case_run(ctx, "rope", QUERN_OP_FORWARD, &p, &views, t, R_TENSORS);
        op_case_run(ctx, "rope", QUERN_OP_BACKWARD, &p, &views, t, R_TENSORS);
        compare("rope", t, R_Y, y, test_forward_bound(dtype));
        compare("rope", t, R_D_X, d_x, test_gradient_bound(dtype));
        quern_context_destroy(ctx);
    }
    free(y), free(d_x);
    release(t, R_TENSORS);
}

static void rotations_against_float64(void **state)
{
    const uint64_t seed = test_seed("rope", 46);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (test_trial(seed, trial, &random)) rope_trial(&random);
    }
}

static void refused(quern_context *ctx, const char *op, const void *params, const void *views,
                    const test_tensor *out, const char *words)
{
    static char room[1 << 16];
    if (quern_op_run(ctx, NULL, quern_op_named(op), QUERN_OP_FORWARD, params, views, room, sizeof room) !=
        QUERN_ERR_INVALID_ARGUMENT)
        fail_msg("\"%s\" is not refused", words);
    if (strstr(quern_last_error(ctx), words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words);
    test_tensor_check_unchanged(out, words);
}

#ifdef QUERN_TEST_GPU /* which reads no contents on the host */
enum { FIRST_WORDS = 2 };
#else
enum { FIRST_WORDS = 0 };
#endif

static void bad_calls(void **state)
{
    static const char *const words[] = {
        "positions[1] is 6: 0 to 5, the table's last row, is accepted",
        "positions[1] is -1: 0 to 5",
        "positions is given with start_abs_pos 2: one or the other is accepted",
        "cos_sin.shape[0] is 6: at least 7, the position past the last token",
        "cos_sin.shape[1] is 3: an even number of up to the 8 channels",
        "x is NULL: a tensor is needed",
        "x has 2 dimensions: 3 are accepted"};
    test_random random = {3};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    for (int i = FIRST_WORDS; i < (int)(sizeof words / sizeof *words); i++) {
        test_tensor t[R_TENSORS] = {{.buffer = NULL}};
        quern_rope_params p = QUERN_ROPE_PARAMS_INIT;
        quern_rope_tensors views = QUERN_ROPE_TENSORS_INIT;
        t[R_X] = test_tensor_make(&random, QUERN_F32, 3, (int64_t[]){3, 2, 8}, TEST_CONTIGUOUS);
        t[R_Y] = test_tensor_make(&random, QUERN_F32, 3, (int64_t[]){3, 2, 8}, TEST_CONTIGUOUS);
        t[R_COS_SIN] = test_tensor_make(&random, QUERN_F32, 2, (int64_t[]){6, 4}, TEST_CONTIGUOUS);
        t[R_POSITIONS] = test_tensor_make(&random, QUERN_I32, 1, (int64_t[]){3}, TEST_CONTIGUOUS);
        test_tensor_set_i32(&t[R_POSITIONS], (int32_t[]){0, i == 0 ? 6 : i == 1 ? -1 : 5, 1});
        if (i == 2) p.start_abs_pos = 2;
        if (i == 3) p.start_abs_pos = 4, test_tensor_free(&t[R_POSITIONS]);
        if (i == 4) t[R_COS_SIN].view.shape[1] = 3;
        if (i == 6) t[R_X].view.ndim = 2;
        op_case_bind("rope", t, R_TENSORS, i == 5 ? ~(uint64_t)1 : OP_CASE_ALL, &views);
        refused(ctx, "rope", &p, &views, &t[R_Y], words[i]);
        release(t, R_TENSORS);
    }
    test_tensor t[N_TENSORS] = {{.buffer = NULL}};
    quern_rms_norm_params p = QUERN_RMS_NORM_PARAMS_INIT;
    quern_rms_norm_tensors views = QUERN_RMS_NORM_TENSORS_INIT;
    t[N_X] = test_tensor_make(&random, QUERN_F32, 2, (int64_t[]){3, 8}, TEST_CONTIGUOUS);
    t[N_Y] = test_tensor_make(&random, QUERN_F32, 2, (int64_t[]){3, 8}, TEST_CONTIGUOUS);
    op_case_bind("rms-norm", t, N_TENSORS, OP_CASE_ALL, &views);
    p.eps = -1;
    refused(ctx, "rms-norm", &p, &views, &t[N_Y], "eps is -1");
    p.eps = 1e-6f;
    t[N_Y].view.shape[1] = 7;
    refused(ctx, "rms-norm", &p, &views, &t[N_Y], "y.shape[1] is 7: 8 is accepted");
    release(t, N_TENSORS);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_gradients_are_differences),
        cmocka_unit_test(norms_against_float64),
        cmocka_unit_test(rotations_against_float64),
        cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
