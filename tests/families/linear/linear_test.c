/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* linear_test.c - projections of every kind of weight: random calls against float64 at every CPU level, a
 * row's bits whatever the other rows and the threads, NaN weights, empty calls, and what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/linear.h"
#include "oracle/nvfp4.h"

#include <quern/linear.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In the order of quern_linear_tensors. */
enum { X, W, W_SCALE, W_CODES, W_SCALES, W_GLOBAL, BIAS, Y, D_Y, D_X, D_W, D_BIAS, TENSORS };
typedef enum weight_kind { FLOATS, FP8, NVFP4, WEIGHT_KINDS } weight_kind;

typedef struct linear_shape {
    quern_linear_params params;
    weight_kind kind;
    quern_dtype dtype, w_dtype, scale_dtype; /* u8: powers of two */
    bool one, bias;                          /* one: a scale for all of W */
    int64_t rows, n, k;
    test_layout layout;
} linear_shape;

typedef struct linear_case {
    linear_shape shape;
    test_tensor t[TENSORS];
    double *w;        /* as stored */
    double *used, *x; /* as the product takes them */
} linear_case;

static int64_t blocks(int64_t n, int64_t block)
{
    return (n + block - 1) / block;
}

static void draw_bytes(test_tensor *t, test_random *random, int64_t least, int64_t most)
{
    const int64_t count = test_tensor_count(t);
    double *bytes = test_doubles(count);
    for (int64_t i = 0; i < count; i++) bytes[i] = (double)test_random_int(random, least, most);
    test_tensor_set(t, bytes);
    free(bytes);
}

/* Bytes of e4m3 without NaN. */
static void draw_e4m3(test_tensor *t, test_random *random)
{
    const int64_t count = test_tensor_count(t);
    double *bytes = test_doubles(count);
    for (int64_t i = 0; i < count; i++)
        bytes[i] = (double)(test_random_int(random, 0, 126) + 128 * test_random_int(random, 0, 1));
    test_tensor_set(t, bytes);
    free(bytes);
}

static double *fp8_values(const linear_case *c)
{
    const linear_shape *h = &c->shape;
    const int64_t rows = h->params.groups * h->n, across = blocks(h->k, h->params.block);
    double *w = test_tensor_get(&c->t[W]), *scale = test_tensor_get(&c->t[W_SCALE]);
    for (int64_t i = 0; i < rows * h->k; i++) {
        const int64_t at = h->one ? 0 : i / h->k / h->params.block * across + i % h->k / h->params.block;
        w[i] = oracle_e4m3_of_byte((int)w[i]) *
               (h->scale_dtype == QUERN_F32 ? scale[at] : ldexp(1, (int)scale[at] - 127));
    }
    free(scale);
    return w;
}

/* The values without the global; rounded as by a8. */
static double *nvfp4_values(const linear_case *c, bool rounded, double global)
{
    const linear_shape *h = &c->shape;
    const int64_t rows = h->params.groups * h->n;
    double *codes = test_tensor_get(&c->t[W_CODES]), *scales = test_tensor_get(&c->t[W_SCALES]),
           *w = test_doubles(rows * h->k);
    for (int64_t r = 0; r < rows; r++) {
        double largest = 0;
        for (int64_t i = 0; i < h->k; i++) {
            const int byte = (int)codes[r * h->k / 2 + i / 2];
            const double scale = (double)oracle_e4m3((int)scales[r * h->k / 16 + i / 16]);
            w[r * h->k + i] = (double)oracle_e2m1(i % 2 == 0 ? byte & 15 : byte >> 4) * scale;
            largest = fmax(largest, scale);
        }
        if (rounded) oracle_linear_round_weights(w + r * h->k, h->k, largest);
        for (int64_t i = 0; i < h->k; i++) w[r * h->k + i] *= global;
    }
    free(codes), free(scales);
    return w;
}

static void find_operands(linear_case *c)
{
    const linear_shape *h = &c->shape;
    const bool a8 = h->params.a8 == QUERN_LINEAR_A8_FP8;
    double *global = h->kind == NVFP4 ? test_tensor_get(&c->t[W_GLOBAL]) : NULL;
    c->x = test_tensor_get(&c->t[X]);
    for (int64_t i = 0; a8 && i < h->rows * h->params.groups; i++)
        for (int64_t k = 0; k < h->k; k += 128)
            oracle_linear_round(c->x + i * h->k + k, h->k - k < 128 ? h->k - k : 128);
    c->w = h->kind == FLOATS ? test_tensor_get(&c->t[W])
           : h->kind == FP8  ? fp8_values(c)
                             : nvfp4_values(c, false, global[0]);
    c->used = h->kind == NVFP4 && a8 ? nvfp4_values(c, true, global[0]) : c->w;
    free(global);
}

static linear_case make(const linear_shape *h, test_random *random)
{
    linear_case c = {.shape = *h};
    const int64_t gk = h->params.groups * h->k, gn = h->params.groups * h->n;
    const struct {
        bool there;
        quern_dtype dtype;
        int32_t ndim;
        int64_t extent[2];
    } all[TENSORS] = {{true, h->dtype, 2, {h->rows, gk}},
                      {h->kind != NVFP4, h->kind == FP8 ? QUERN_U8 : h->w_dtype, 2, {gn, h->k}},
                      {h->kind == FP8,
                       h->scale_dtype,
                       h->one ? 0 : 2,
                       {blocks(gn, h->params.block), blocks(h->k, h->params.block)}},
                      {h->kind == NVFP4, QUERN_U8, 2, {gn, h->k / 2}},
                      {h->kind == NVFP4, QUERN_U8, 2, {gn, h->k / 16}},
                      {h->kind == NVFP4, QUERN_F32, 0, {0}},
                      {h->bias, test_random_one_in(random, 2) ? h->dtype : QUERN_F32, 1, {gn}},
                      {true, h->dtype, 2, {h->rows, gn}},
                      {true, h->dtype, 2, {h->rows, gn}},
                      {true, h->dtype, 2, {h->rows, gk}},
                      {h->kind == FLOATS, QUERN_F32, 2, {gn, h->k}},
                      {h->bias, QUERN_F32, 1, {gn}}};
    for (int i = 0; i < TENSORS; i++) {
        if (!all[i].there) continue;
        c.t[i] = test_tensor_make(random, all[i].dtype, all[i].ndim, all[i].extent,
                                  all[i].ndim == 2 ? h->layout : TEST_UNALIGNED);
        if (all[i].dtype != QUERN_U8) test_tensor_normal(&c.t[i], random, 1);
    }
    if (h->kind == FP8) draw_e4m3(&c.t[W], random);
    if (h->kind == FP8 && h->scale_dtype == QUERN_U8) draw_bytes(&c.t[W_SCALE], random, 119, 125);
    if (h->kind == NVFP4)
        draw_bytes(&c.t[W_CODES], random, 0, 255), draw_bytes(&c.t[W_SCALES], random, 0, 126);
    if (h->kind == NVFP4) test_tensor_set(&c.t[W_GLOBAL], (double[]){0.01});
    find_operands(&c);
    return c;
}

static void release(linear_case *c)
{
    if (c->used != c->w) free(c->used);
    free(c->w), free(c->x);
    for (int i = 0; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
}

static void run(linear_case *c, quern_context *ctx, quern_op_pass pass)
{
    quern_linear_tensors t = QUERN_LINEAR_TENSORS_INIT;
    op_case_bind("linear", c->t, TENSORS, OP_CASE_ALL, &t);
    op_case_run(ctx, "linear", pass, &c->shape.params, &t, c->t, TENSORS);
}

static linear_shape draw_shape(test_random *random, int trial)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    linear_shape h = {.params = QUERN_LINEAR_PARAMS_INIT,
                      .kind = (weight_kind)(trial % WEIGHT_KINDS),
                      .dtype = dtypes[test_random_int(random, 0, 2)],
                      .w_dtype = dtypes[test_random_int(random, 0, 2)],
                      .scale_dtype = test_random_one_in(random, 2) ? QUERN_F32 : QUERN_U8,
                      .one = test_random_one_in(random, 4),
                      .bias = test_random_one_in(random, 2),
                      .rows = test_random_int(random, 1, test_random_one_in(random, 8) ? 530 : 20),
                      .n = test_random_int(random, 1, 150),
                      .k = test_random_int(random, 1, 300),
                      .layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1)};
    h.params.block = test_random_one_in(random, 2) ? 128 : 32;
    h.params.groups = test_random_one_in(random, 2) ? 1 : test_random_int(random, 2, 3);
    if (h.kind != FLOATS && test_random_one_in(random, 3)) h.params.a8 = QUERN_LINEAR_A8_FP8;
    if (h.kind == NVFP4) h.k = (h.k + 15) / 16 * 16;
    if (test_random_one_in(random, 2)) { /* what a GPU reads in bulk */
        h.k = (h.k + 15) / 16 * (test_random_one_in(random, 2) || h.rows > 20 ? 16 : 128);
        h.layout = TEST_CONTIGUOUS;
        h.params.block = 128;
        if (h.dtype == QUERN_F32) h.dtype = QUERN_BF16;
        if (test_random_one_in(random, 2)) { /* and cuBLASLt multiplies */
            h.n = (h.n + 7) / 8 * 8;
            h.w_dtype = h.dtype;
        }
    }
    return h;
}

/* Products of FP8 on a GPU may sum in 13 bits; the bound is that of nvfp4's a8. */
static void check_rounded(const linear_case *c, const double *y, const double *expected, const double *size)
{
    const linear_shape *h = &c->shape;
    for (int64_t i = 0; i < h->rows * h->params.groups * h->n; i++) {
        const double bound = (0x1p-6 + (double)blocks(h->k, 128) * 0x1p-23) * size[i] +
                             0.5 * fabs(expected[i]) * (h->dtype == QUERN_BF16 ? 0x1p-7 : 0x1p-10) +
                             (h->dtype == QUERN_F16 ? 0x1p-25 : 0);
        if (!(fabs(y[i] - expected[i]) <= bound))
            fail_msg("y[%lld] is %g, expected %g", (long long)i, y[i], expected[i]);
    }
    test_check("y", y, expected, h->rows * h->params.groups * h->n, 5e-4 + test_forward_bound(h->dtype));
}

static void check_forward(linear_case *c, quern_context *ctx, const oracle_linear *o)
{
    const int64_t count = o->rows * o->groups * o->n;
    double *expected = test_doubles(count), *size = test_doubles(count);
    oracle_linear_forward(o, expected, size);
    test_tensor_reset(&c->t[Y]);
    run(c, ctx, QUERN_OP_FORWARD);
    double *y = test_tensor_get(&c->t[Y]);
    if (c->shape.params.a8 != QUERN_LINEAR_A8_NONE) check_rounded(c, y, expected, size);
    else test_check("y", y, expected, count, test_forward_bound(c->shape.dtype));
    free(expected), free(size), free(y);
}

static void check_gradient(const linear_case *c, int tensor, const double *expected, int64_t count)
{
    if (c->t[tensor].buffer == NULL) return;
    double *d = test_tensor_get(&c->t[tensor]);
    test_check(op_case_field("linear", tensor), d, expected, count, test_gradient_bound(c->shape.dtype));
    free(d);
}

static void check_backward(linear_case *c, quern_context *ctx, const oracle_linear *o)
{
    const int64_t outputs = o->groups * o->n, inputs = o->rows * o->groups * o->k;
    double *d_y = test_tensor_get(&c->t[D_Y]), *d_x = test_doubles(inputs),
           *d_w = test_doubles(outputs * o->k), *d_bias = test_doubles(outputs);
    oracle_linear as_stored = *o;
    as_stored.w = c->w;
    oracle_linear_backward(&as_stored, d_y, d_x, d_w, d_bias);
    for (int i = D_X; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_reset(&c->t[i]);
    run(c, ctx, QUERN_OP_BACKWARD);
    check_gradient(c, D_X, d_x, inputs);
    check_gradient(c, D_W, d_w, outputs * o->k);
    check_gradient(c, D_BIAS, d_bias, outputs);
    free(d_y), free(d_x), free(d_w), free(d_bias);
}

static void against_float64(void **state)
{
    const uint64_t seed = test_seed("linear", 41);
    (void)state;
    for (int trial = 0; trial < test_trials(180); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const linear_shape h = draw_shape(&random, trial);
        linear_case c = make(&h, &random);
        double *bias = h.bias ? test_tensor_get(&c.t[BIAS]) : NULL;
        const oracle_linear o = {h.rows, h.params.groups, h.n, h.k, c.x, c.used, bias};
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, (int32_t)test_random_int(&random, 1, 3));
            check_forward(&c, ctx, &o);
            check_backward(&c, ctx, &o);
            quern_context_destroy(ctx);
        }
        free(bias);
        release(&c);
    }
}

/* The oracle's gradients, against differences of its own sums. */
static void gradients_are_differences(void **state)
{
    enum {
        ROWS = 3,
        GROUPS = 2,
        N_ = 4,
        K_ = 5,
        INPUTS = ROWS * GROUPS * K_,
        WEIGHTS = GROUPS * N_ * K_,
        OUTPUTS = ROWS * GROUPS * N_
    };
    test_random random = {test_seed("linear differences", 42)};
    double x[INPUTS], w[WEIGHTS], bias[GROUPS * N_], d_y[OUTPUTS], y[OUTPUTS], d_x[INPUTS], d_w[WEIGHTS],
        d_bias[GROUPS * N_];
    (void)state;
    double *const inputs[] = {x, w, bias}, *const gradients[] = {d_x, d_w, d_bias};
    const int counts[] = {INPUTS, WEIGHTS, GROUPS * N_};
    for (int p = 0; p < 3; p++)
        for (int i = 0; i < counts[p]; i++) inputs[p][i] = test_random_normal(&random);
    for (int i = 0; i < OUTPUTS; i++) d_y[i] = test_random_normal(&random);
    const oracle_linear o = {ROWS, GROUPS, N_, K_, x, w, bias};
    oracle_linear_backward(&o, d_y, d_x, d_w, d_bias);
    for (int p = 0; p < 3; p++)
        for (int i = 0; i < counts[p]; i++) {
            double loss[2] = {0};
            for (int side = 0; side < 2; side++) {
                inputs[p][i] += side == 0 ? -1e-3 : 2e-3;
                oracle_linear_forward(&o, y, NULL);
                for (int j = 0; j < OUTPUTS; j++) loss[side] += d_y[j] * y[j];
            }
            inputs[p][i] -= 1e-3;
            assert_true(fabs((loss[1] - loss[0]) / 2e-3 - gradients[p][i]) < 1e-9);
        }
}

/* Any rows, alone, have the bits that they have among all; so have they on any number of threads. */
static void check_rows_alone(linear_shape *h, int trial, test_random *random)
{
    linear_case c = make(h, random);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *one = test_context(level, 1), *three = test_context(level, 3);
        run(&c, one, QUERN_OP_FORWARD);
        test_tensor all = test_tensor_copy(&c.t[Y]);
        const int64_t first = test_random_int(random, 0, h->rows - 1),
                      count = test_random_int(random, 1, h->rows - first);
        linear_case part = c;
        for (int i = X; i <= Y; i += Y - X) {
            quern_tensor *view = &part.t[i].view;
            view->data =
                (char *)view->data + first * view->strides[0] * (int64_t)quern_dtype_size(view->dtype);
            view->shape[0] = count;
        }
        quern_linear_tensors t = QUERN_LINEAR_TENSORS_INIT;
        test_tensor_reset(&c.t[Y]);
        op_case_bind("linear", part.t, Y + 1, OP_CASE_ALL, &t);
        op_case_call(three, "linear", QUERN_OP_FORWARD, &h->params, &t);
        test_tensor expected = all;
        expected.view.data =
            (char *)all.view.data + first * all.view.strides[0] * (int64_t)quern_dtype_size(all.view.dtype);
        expected.view.shape[0] = count;
        if (!test_tensor_same_bits(&part.t[Y], &expected))
            fail_msg("trial %d, %s: rows %lld + %lld differ among others", trial, quern_cpu_level_name(level),
                     (long long)first, (long long)count);
        test_tensor_free(&all);
        quern_context_destroy(one), quern_context_destroy(three);
    }
    release(&c);
}

static void rows_do_not_depend_on_others(void **state)
{
    const uint64_t seed = test_seed("linear rows", 43);
    (void)state;
    for (int trial = 0; trial < test_trials(90); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        linear_shape h = draw_shape(&random, trial);
        if (h.kind == FLOATS) h.bias = trial % 2 == 0;
        check_rows_alone(&h, trial, &random);
    }
}

/* Of FP8 weights, rows and groups that no GPU's kernel of one kind can all take. */
static void rows_that_few_kernels_take(void **state)
{
    static const struct {
        quern_dtype dtype;
        int64_t k, groups;
        test_layout layout;
    } of[] = {{QUERN_F16, 272, 2, TEST_CONTIGUOUS},
              {QUERN_BF16, 144, 3, TEST_CONTIGUOUS},
              {QUERN_BF16, 256, 1, TEST_UNALIGNED},
              {QUERN_F16, 128, 1, TEST_SPACED}};
    test_random random = {test_seed("rows that few kernels take", 47)};
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int64_t rows = 2; rows <= 17; rows += 5) {
            linear_shape h = {.params = QUERN_LINEAR_PARAMS_INIT,
                              .kind = FP8,
                              .dtype = of[i].dtype,
                              .w_dtype = of[i].dtype,
                              .scale_dtype = QUERN_F32,
                              .rows = rows,
                              .n = 48,
                              .k = of[i].k,
                              .layout = of[i].layout};
            h.params.block = 128;
            h.params.groups = of[i].groups;
            check_rows_alone(&h, i, &random);
        }
}

/* A NaN byte of FP8 makes its output NaN and no other; subnormal weights count. */
static void single_weights(void **state)
{
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int bf16 = 0; bf16 < 2; bf16++)
            for (int byte = 0; byte < 256; byte++) {
                enum { N_ = 18 };
                const int64_t k = bf16 ? 112 : 70; /* the first is what a GPU reads in bulk */
                test_random random = {(uint64_t)byte + 7};
                linear_shape h = {.params = QUERN_LINEAR_PARAMS_INIT,
                                  .kind = FP8,
                                  .dtype = bf16 ? QUERN_BF16 : QUERN_F32,
                                  .scale_dtype = QUERN_U8,
                                  .rows = 1,
                                  .n = N_,
                                  .k = k};
                linear_case c = make(&h, &random);
                double *w = test_doubles(N_ * k), *x = test_doubles(k);
                const int64_t row = byte % N_, column = byte % k;
                w[row * k + column] = byte;
                x[column] = 1;
                test_tensor_set(&c.t[W], w), test_tensor_set(&c.t[X], x);
                test_tensor_set(&c.t[W_SCALE], (double[]){127});
                quern_context *ctx = test_context(level, 1);
                run(&c, ctx, QUERN_OP_FORWARD);
                double *y = test_tensor_get(&c.t[Y]);
                for (int64_t j = 0; j < N_; j++) {
                    const double expected = j == row ? oracle_e4m3_of_byte(byte) : 0;
                    if (isnan(expected) ? !isnan(y[j]) : y[j] != expected)
                        fail_msg("%s, byte %d: %g, expected %g", quern_cpu_level_name(level), byte, y[j],
                                 expected);
                }
                free(w), free(x), free(y);
                quern_context_destroy(ctx);
                release(&c);
            }
}

static void empty_calls(void **state)
{
    static const int64_t sizes[][3] = {{0, 5, 16}, {3, 0, 16}, {3, 5, 0}};
    (void)state;
    for (int kind = 0; kind < WEIGHT_KINDS; kind++)
        for (int i = 0; i < 3; i++) {
            test_random random = {11};
            linear_shape h = {.params = QUERN_LINEAR_PARAMS_INIT,
                              .kind = (weight_kind)kind,
                              .scale_dtype = QUERN_F32,
                              .one = i == 2,
                              .bias = true,
                              .rows = sizes[i][0],
                              .n = sizes[i][1],
                              .k = sizes[i][2]};
            linear_case c = make(&h, &random);
            double *bias = test_tensor_get(&c.t[BIAS]);
            const oracle_linear o = {h.rows, 1, h.n, h.k, c.x, c.used, bias};
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
            check_forward(&c, ctx, &o);
            check_backward(&c, ctx, &o);
            quern_context_destroy(ctx);
            free(bias);
            release(&c);
        }
}

/* ---- refusals ---- */

#ifdef QUERN_TEST_GPU
enum { ON_GPU = true };
#else
enum { ON_GPU = false };
#endif

static void refused(quern_context *ctx, linear_case *c, quern_op_pass pass, const char *words)
{
    const quern_op *op = quern_op_named("linear");
    quern_linear_tensors t = QUERN_LINEAR_TENSORS_INIT;
    static char room[1 << 22];
    op_case_bind("linear", c->t, TENSORS, OP_CASE_ALL, &t);
    for (int i = Y; i < TENSORS; i++)
        if (i != D_Y && c->t[i].buffer != NULL) test_tensor_reset(&c->t[i]);
    if (quern_op_run(ctx, NULL, op, pass, &c->shape.params, &t, room, sizeof room) !=
        QUERN_ERR_INVALID_ARGUMENT)
        fail_msg("\"%s\" is not refused", words);
    if (strstr(quern_last_error(ctx), words) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words);
    for (int i = Y; i < TENSORS; i++)
        if (i != D_Y && c->t[i].buffer != NULL) test_tensor_check_unchanged(&c->t[i], words);
}

static void bad_calls(void **state)
{
    static const struct {
        weight_kind kind;
        const char *words;
        bool of_data; /* which a GPU's call does not read on the host */
    } cases[] = {
        {FP8, "block is 64: 128 or 32 is accepted", false},
        {FP8, "groups is 0", false},
        {FLOATS, "x.shape is 48 where groups divide it: a multiple of the 5 groups is accepted", false},
        {FLOATS, "a8 is fp8 with w in floats", false},
        {FLOATS, "w: dtype u8 without w_scale", false},
        {FP8, "w: dtype f32 with w_scale: e4m3 and u8 are accepted", false},
        {FP8, "w_scale: dtype f16: f32, e8m0 and u8 are accepted", false},
        {FP8, "w_scale.shape[0] is 2: 1 is accepted", false},
        {FP8, "w_scale[0] is the scale byte 0xFF: 0x00 to", true},
        {FP8, "w_scale[0] is the scale byte 0xFE: 0x00 to 0xF6 are accepted", true},
        {NVFP4, "w_scales[1] is the scale byte 0x7F", true},
        {NVFP4, "w_global[0] is 0: a global above 0 and finite is accepted", true},
        {NVFP4, "w_global is NULL: a tensor is needed", false},
        {NVFP4, "w is given with w_codes: one or the other is accepted", false},
        {FP8, "x[3] (row 0, column 3) is nan: finite numbers are accepted", true},
        {FLOATS, "w is NULL: w or w_codes is needed", false},
        {FP8, "w_scale[0] is the scale inf", true},
        {FLOATS, "bias.shape[0] is 47: 48 is accepted", false},
        {FLOATS, "y: dtype bf16: f32 is accepted", false}};
    test_random random = {5};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    for (int i = 0; i < (int)(sizeof cases / sizeof *cases); i++) {
        const linear_shape h = {.params = QUERN_LINEAR_PARAMS_INIT,
                                .kind = cases[i].kind,
                                .scale_dtype = i == 16 ? QUERN_F32 : QUERN_U8,
                                .bias = true,
                                .rows = 2,
                                .n = 48,
                                .k = 48};
        linear_case c = make(&h, &random);
        test_tensor extra = test_tensor_make(&random, QUERN_F32, 2, (int64_t[]){48, 48}, TEST_CONTIGUOUS);
        const bool left_out = cases[i].of_data && ON_GPU;
        quern_tensor *w = &c.t[W].view;
        switch (i) {
        case 0: c.shape.params.block = 64; break;
        case 1: c.shape.params.groups = 0; break;
        case 2: c.shape.params.groups = 5; break;
        case 3: c.shape.params.a8 = QUERN_LINEAR_A8_FP8; break;
        case 4: w->dtype = QUERN_U8; break;
        case 5: w->dtype = QUERN_F32, w->data = extra.view.data; break;
        case 6: c.t[W_SCALE].view.dtype = QUERN_F16; break;
        case 7: c.t[W_SCALE].view.shape[0] = 2; break;
        case 8: test_tensor_set(&c.t[W_SCALE], (double[]){255}); break;
        case 9:
            test_tensor_set(&c.t[W_SCALE], (double[]){254});
            *(uint8_t *)w->data = 0x7e;
            break;
        case 10:
            ((uint8_t *)c.t[W_SCALES].view.data)[1] = 0x7f;
            c.shape.params.a8 = QUERN_LINEAR_A8_FP8;
            break;
        case 11: test_tensor_set(&c.t[W_GLOBAL], (double[]){0}); break;
        case 12: test_tensor_free(&c.t[W_GLOBAL]); break;
        case 13: c.t[W] = extra; break;
        case 14:
            ((float *)c.t[X].view.data)[3] = NAN;
            c.shape.params.a8 = QUERN_LINEAR_A8_FP8;
            break;
        case 15: test_tensor_free(&c.t[W]); break;
        case 16: test_tensor_set(&c.t[W_SCALE], (double[]){INFINITY}); break;
        case 17: c.t[BIAS].view.shape[0] = 47; break;
        default: c.t[Y].view.dtype = QUERN_BF16; break;
        }
        if (!left_out) refused(ctx, &c, QUERN_OP_FORWARD, cases[i].words);
        if (i == 13) memset(&c.t[W], 0, sizeof c.t[W]);
        test_tensor_free(&extra);
        release(&c);
    }
    linear_shape h = {
        .params = QUERN_LINEAR_PARAMS_INIT, .kind = FP8, .scale_dtype = QUERN_U8, .rows = 2, .n = 8, .k = 8};
    linear_case c = make(&h, &random);
    c.t[D_W] = test_tensor_make(&random, QUERN_F32, 2, (int64_t[]){8, 8}, TEST_CONTIGUOUS);
    refused(ctx, &c, QUERN_OP_BACKWARD, "d_w is given with a quantised weight");
    test_tensor_free(&c.t[D_W]);
    c.t[D_BIAS] = test_tensor_make(&random, QUERN_F32, 1, (int64_t[]){8}, TEST_CONTIGUOUS);
    refused(ctx, &c, QUERN_OP_BACKWARD, "d_bias is given and bias is NULL");
    release(&c);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(against_float64),
        cmocka_unit_test(rows_do_not_depend_on_others),
        cmocka_unit_test(rows_that_few_kernels_take),
        cmocka_unit_test(single_weights),
        cmocka_unit_test(empty_calls),
        cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
