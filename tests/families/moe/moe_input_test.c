/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_input_test.c - what the layer refuses: one sentence that names the argument, and outputs as they were.
 * Under a4 the layer is its parts, to the bit. */
#include "cmocka_c11.h"
#include "context.h"
#include "moe_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Both calls of the case with other parameters and tensors must fail with a sentence that holds `says`;
 * nothing is written. */
static void refused(moe_case *c, const quern_moe_params *p, const quern_moe_tensors *forward,
                    const quern_moe_tensors *backward, const char *says)
{
    for (int i = 0; i < 2; i++) {
        const quern_moe_tensors *t = i == 0 ? forward : backward;
        if (t == NULL) continue;
        size_t room = 0; /* of data that is refused; what is refused at shapes needs none */
        (void)(i == 0 ? quern_moe_forward_workspace(ctx, p, t, &room)
                      : quern_moe_backward_workspace(ctx, p, t, &room));
        test_workspace w = test_workspace_make(room);
        const quern_status status = i == 0 ? quern_moe_forward(ctx, NULL, p, t, w.data, w.bytes)
                                           : quern_moe_backward(ctx, NULL, p, t, w.data, w.bytes);
        assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), says) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), says);
        for (int k = 0; k < MOE_TENSORS; k++)
            if (moe_is_result(c, k) && c->t[k].buffer != NULL)
                test_tensor_check_unchanged(&c->t[k], "a result");
        test_workspace_close(&w);
    }
}

static moe_case usual(moe_weights routed, moe_weights shared, bool a4)
{
    test_random random = {7};
    const moe_wish w = {
        .tokens = 6, .dtype = QUERN_F32, .routed = routed, .shared = shared, .a4 = a4, .bias = true};
    return moe_make(&random, &w);
}

static void refused_params(moe_case *c, const quern_moe_params *p, const char *says)
{
    const quern_moe_tensors forward = moe_bind(c, false), backward = moe_bind(c, true);
    refused(c, p, &forward, &backward, says);
}

static void parameters(void **state)
{
    (void)state;
    moe_case c = usual(MOE_NVFP4, MOE_NONE, false), floats = usual(MOE_FLOATS, MOE_NONE, false);
    quern_moe_params p = c.params;
#define WITH(field, value, says) p = c.params, p.field = (value), refused_params(&c, &p, says)
    WITH(score, (quern_moe_score)3, "score is 3");
    WITH(top_k, 0, "top_k is 0");
    WITH(top_k, c.experts + 1, "top_k is ");
    WITH(route_scale, INFINITY, "route_scale is inf");
    WITH(limit, -1.0f, "limit is -1");
    WITH(limit, NAN, "limit is nan");
    WITH(alpha, NAN, "alpha is nan");
    WITH(beta, -INFINITY, "beta is -inf");
    WITH(granularity, 0, "granularity is 0");
    WITH(granularity, 12, "granularity is 12: a divisor of 32");
    WITH(intermediate, 24, "intermediate is 24: a multiple of");
    WITH(intermediate, -1, "intermediate is -1");
    WITH(size, 3, "size");
#undef WITH
    p = floats.params;
    p.a4 = true;
    refused_params(&floats, &p, "a4 is true with gate_up in floats");
    moe_free(&c), moe_free(&floats);
}

/* Calls with one tensor replaced (NULL: absent). */
static void refused_tensor(moe_case *c, int tensor, const quern_tensor *with, const char *says)
{
    quern_moe_tensors forward = moe_bind(c, false), backward = moe_bind(c, true);
    (&forward.hidden)[tensor] = (&backward.hidden)[tensor] = with;
    refused(c, &c->params, tensor < M(d_out) ? &forward : NULL,
            tensor < M(out) || tensor >= M(d_out) ? &backward : NULL, says);
}

static quern_tensor shaped(const moe_case *c, int tensor, int32_t dim, int64_t extent)
{
    quern_tensor t = c->t[tensor].view;
    t.shape[dim] = extent;
    return t;
}

static void tensors(void **state)
{
    (void)state;
    static const int needed[] = {M(hidden),      M(gate_up_codes), M(gate_up_scales), M(down_codes),
                                 M(down_scales), M(out),           M(d_out)};
    moe_case c = usual(MOE_NVFP4, MOE_NVFP4, false), floats = usual(MOE_FLOATS, MOE_FLOATS, false);
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        refused_tensor(&c, needed[i], NULL, "is NULL");
    quern_moe_tensors without = moe_bind(&c, false);
    without.weight = without.experts = without.weights = NULL;
    refused(&c, &c.params, &without, NULL, "weight is NULL: the router's weight, or logits, or experts");
    refused_tensor(&floats, M(down), NULL, "down is NULL");
    refused_tensor(&floats, M(shared_down), NULL, "shared_down is NULL");
    refused_tensor(&floats, M(gate_up_codes), &c.t[M(gate_up_codes)].view,
                   "gate_up_codes is given with experts in floats");
    refused_tensor(&c, M(logits), &c.t[M(hidden)].view, "weight is given with logits");
    refused_tensor(&c, M(input_ids), &c.t[M(offsets)].view, "input_ids is given without tid2eid");
    refused_tensor(&c, M(gate_up_input_global), &c.t[M(down_global)].view,
                   "gate_up_input_global is given and a4 is false");
    refused_tensor(&c, M(d_logits), &c.t[M(d_weights)].view, "d_logits is given and logits is NULL");
    quern_tensor t = shaped(&c, M(weight), 1, c.dim + 1);
    refused_tensor(&c, M(weight), &t, "weight.shape[1] is");
    t = shaped(&c, M(down_codes), 2, c.dim - 1);
    refused_tensor(&c, M(down_codes), &t, "down_codes.shape[2] is");
    t = shaped(&c, M(gate_up_scales), 1, c.dim / 16 - 1);
    refused_tensor(&c, M(gate_up_scales), &t, "gate_up_scales.shape[1] is");
    t = shaped(&c, M(d_hidden), 0, 1);
    refused_tensor(&c, M(d_hidden), &t, "d_hidden.shape[0] is");
    t = c.t[M(out)].view;
    t.dtype = QUERN_BF16;
    refused_tensor(&c, M(out), &t, "out: dtype bf16");
    t = c.t[M(gate_up_codes)].view;
    t.dtype = QUERN_I32;
    refused_tensor(&c, M(gate_up_codes), &t, "gate_up_codes: dtype i32");
    t = c.t[M(hidden)].view;
    t.ndim = 1;
    refused_tensor(&c, M(hidden), &t, "hidden has 1 dimension");
    t = c.t[M(hidden)].view;
    refused_tensor(&c, M(out), &t, "shares memory with");
    moe_free(&c), moe_free(&floats);
}

/* Routing that is handed in, and what does not go with it. */
static void routing(void **state)
{
    (void)state;
    test_random random = {11};
    const moe_wish w = {
        .tokens = 6, .dtype = QUERN_F32, .routed = MOE_NVFP4, .shared = MOE_NONE, .routed_by_hand = true};
    moe_case c = moe_make(&random, &w);
    const int64_t k = c.params.top_k;
    static const int router[] = {M(bias), M(input_ids), M(tid2eid)};
    for (int i = 0; i < 3; i++)
        refused_tensor(&c, router[i], &c.t[M(offsets)].view, "is given with experts and weights");
    refused_tensor(&c, M(experts), NULL, "experts is NULL");
    refused_tensor(&c, M(weights), NULL, "weights is NULL");
    refused_tensor(&c, M(gate_up_codes), NULL, "gate_up_codes is NULL");
    refused_tensor(&c, M(d_weight), &c.t[M(d_weights)].view, "d_weight is given and weight is NULL");
    quern_tensor t = shaped(&c, M(experts), 0, 5);
    refused_tensor(&c, M(experts), &t, "experts.shape[0] is 5");
    t = shaped(&c, M(weights), 1, k + 1);
    refused_tensor(&c, M(weights), &t, "weights.shape[1] is");
    t = c.t[M(experts)].view;
    t.dtype = QUERN_F32;
    refused_tensor(&c, M(experts), &t, "experts: dtype f32");
    const int32_t bad[] = {-1, (int32_t)c.experts, INT32_MIN, INT32_MAX};
    for (int i = 0; i < 4; i++) {
        int32_t *ids = test_tensor_get_i32(&c.t[M(experts)]), good = ids[3 * k];
        char says[60];
        ids[3 * k] = bad[i];
        test_tensor_set_i32(&c.t[M(experts)], ids);
        snprintf(says, sizeof says, "experts[3, 0] is %d", bad[i]);
        refused_params(&c, &c.params, says);
        ids[3 * k] = good;
        test_tensor_set_i32(&c.t[M(experts)], ids);
        free(ids);
    }
    moe_free(&c);
}

static void put_f32(test_tensor *t, int64_t index, double value)
{
    double *values = test_tensor_get(t);
    values[index] = value;
    test_tensor_set(t, values);
    free(values);
}

static void contents(void **state)
{
    (void)state;
    static const double bad[] = {0, -1, (double)INFINITY, (double)NAN};
    for (int i = 0; i < 4; i++) {
        moe_case c = usual(MOE_NVFP4, MOE_NVFP4, false);
        put_f32(&c.t[M(down_global)], 0, bad[i]);
        refused_params(&c, &c.params, "down_global[0] is");
        moe_free(&c);
    }
    static const int scales[] = {M(gate_up_scales), M(down_scales), M(shared_gate_up_scales),
                                 M(shared_down_scales)};
    for (int i = 0; i < 4; i++) {
        moe_case c = usual(MOE_NVFP4, MOE_NVFP4, false);
        put_f32(&c.t[scales[i]], test_tensor_count(&c.t[scales[i]]) - 1, 0x7f);
        refused_params(&c, &c.params, "is the scale byte 0x7F");
        moe_free(&c);
    }
    moe_case c = usual(MOE_REPACKED, MOE_FLOATS, true);
    put_f32(&c.t[M(hidden)], 3 * c.dim + 5, (double)NAN);
    refused_params(&c, &c.params, "(row 3, column 5) is");
    moe_free(&c);
    test_random random = {9};
    const moe_wish w = {
        .tokens = 6, .dtype = QUERN_BF16, .routed = MOE_FLOATS, .shared = MOE_NONE, .table = true};
    moe_case table = moe_make(&random, &w);
    int32_t ids[] = {0, 1, 50, 3, 4, 5};
    test_tensor_set_i32(&table.t[M(input_ids)], ids);
    refused_params(&table, &table.params, "input_ids[2] is 50");
    int32_t *rows = test_tensor_get_i32(&table.t[M(tid2eid)]);
    rows[4 * table.params.top_k] = (int32_t)table.experts;
    ids[2] = 2;
    test_tensor_set_i32(&table.t[M(input_ids)], ids), test_tensor_set_i32(&table.t[M(tid2eid)], rows);
    refused_params(&table, &table.params, "tid2eid[4, 0] is");
    free(rows);
    moe_free(&table);
}

static void fill_zeros(test_tensor *t)
{
    double *zeros = test_doubles(test_tensor_count(t));
    test_tensor_set(t, zeros);
    free(zeros);
}

/* Calls that warm an engine up are of zeros: tokens, then weights too. */
static void zeros_are_numbers(void **state)
{
    static const int weights[] = {M(gate_up_codes),     M(gate_up_scales),       M(down_codes),
                                  M(down_scales),       M(shared_gate_up_codes), M(shared_gate_up_scales),
                                  M(shared_down_codes), M(shared_down_scales)};
    (void)state;
    for (int i = 0; i < 4; i++) {
        moe_case c = usual(MOE_NVFP4, MOE_NVFP4, i % 2);
        fill_zeros(&c.t[M(hidden)]);
        for (size_t w = 0; i >= 2 && w < sizeof weights / sizeof *weights; w++) fill_zeros(&c.t[weights[w]]);
        moe_call_forward(&c, ctx), moe_call_backward(&c, ctx);
        for (int k = 0; k < MOE_TENSORS; k++) {
            if (!moe_is_result(&c, k) || c.t[k].buffer == NULL || c.t[k].view.dtype != QUERN_F32) continue;
            double *values = test_tensor_get(&c.t[k]);
            for (int64_t n = 0; n < test_tensor_count(&c.t[k]); n++) assert_true(isfinite(values[n]));
            free(values);
        }
        moe_free(&c);
    }
}

static void workspace_is_checked(void **state)
{
    (void)state;
    moe_case c = usual(MOE_NVFP4, MOE_NONE, false);
    const quern_moe_tensors t = moe_bind(&c, false);
    size_t bytes = 0;
    char one;
    assert_int_equal(quern_moe_forward_workspace(ctx, &c.params, &t, &bytes), QUERN_OK);
    assert_int_equal(quern_moe_forward(ctx, NULL, &c.params, &t, &one, bytes - 1), QUERN_ERR_WORKSPACE);
    assert_int_equal(quern_moe_forward(ctx, NULL, &c.params, &t, NULL, bytes), QUERN_ERR_INVALID_ARGUMENT);
    test_tensor_check_unchanged(&c.t[M(out)], "out");
    moe_free(&c);
}

/* ---- a4 from the public parts ---- */

typedef struct coded_rows {
    uint8_t *codes, *scales;
    float *global;
    quern_tensor codes_view, scales_view, global_view;
} coded_rows;

static void *need(size_t bytes)
{
    void *p = calloc(bytes + 1, 1);
    assert_non_null(p);
    return p;
}

static coded_rows quantise(const moe_case *c, float *x, int64_t rows, int64_t k, int given)
{
    const bool by_expert = c->t[given].buffer != NULL;
    const int64_t shape[] = {rows, k}, codes[] = {rows, k / 2}, scales[] = {rows, k / 16};
    coded_rows r = {
        need((size_t)(rows * k / 2)), need((size_t)(rows * k / 16)), need((size_t)rows * 4), {0}, {0}, {0}};
    const quern_tensor view = quern_tensor_contiguous(x, QUERN_F32, 2, shape);
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    size_t bytes = 0;
    r.codes_view = quern_tensor_contiguous(r.codes, QUERN_U8, 2, codes);
    r.scales_view = quern_tensor_contiguous(r.scales, QUERN_U8, 2, scales);
    r.global_view = by_expert ? c->t[given].view : quern_tensor_contiguous(r.global, QUERN_F32, 1, &rows);
    t.x = &view;
    t.codes = &r.codes_view;
    t.scales = &r.scales_view;
    p.global_per = by_expert ? QUERN_NVFP4_GLOBAL_EXPERT : QUERN_NVFP4_GLOBAL_ROW;
    if (by_expert) {
        t.given_global = &r.global_view;
        t.offsets = &c->t[M(offsets)].view;
    } else t.global = &r.global_view;
    assert_int_equal(quern_nvfp4_quantize_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    if (quern_nvfp4_quantize(ctx, NULL, &p, &t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    return r;
}

static float *multiply(const moe_case *c, const coded_rows *a, int64_t rows, int64_t n, int codes, int bias,
                       int given, bool swiglu)
{
    const int64_t shape[] = {rows, swiglu ? n / 2 : n};
    float *out = need((size_t)(rows * n) * sizeof *out);
    const quern_tensor view = quern_tensor_contiguous(out, QUERN_F32, 2, shape);
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    size_t bytes = 0;
    p.a_global_per = c->t[given].buffer != NULL ? QUERN_NVFP4_GLOBAL_EXPERT : QUERN_NVFP4_GLOBAL_ROW;
    p.activation = swiglu ? QUERN_NVFP4_ACTIVATION_SWIGLU : QUERN_NVFP4_ACTIVATION_NONE;
    p.limit = c->params.limit;
    p.alpha = c->params.alpha;
    p.beta = c->params.beta;
    p.granularity = c->params.granularity;
    t.a_codes = &a->codes_view;
    t.a_scales = &a->scales_view;
    t.a_global = &a->global_view;
    t.offsets = &c->t[M(offsets)].view;
    t.b_codes = &c->t[codes].view;
    t.b_scales = &c->t[codes + 1].view;
    t.b_global = &c->t[codes + 3].view;
    t.c = &view;
    if (c->t[bias].buffer != NULL) t.bias = &c->t[bias].view;
    assert_int_equal(quern_nvfp4_gemm_workspace(ctx, &p, &t, &bytes), QUERN_OK);
    test_workspace w = test_workspace_make(bytes);
    if (quern_nvfp4_gemm(ctx, NULL, &p, &t, w.data, w.bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
    return out;
}

static void free_rows(coded_rows *r)
{
    free(r->codes), free(r->scales), free(r->global);
}

static void a4_is_its_parts(void **state)
{
    test_random random = {test_seed("a4_is_its_parts", 46)};
    (void)state;
    for (int trial = 0; trial < test_trials(16); trial++) {
        const moe_wish w = {.tokens = 9,
                            .dtype = QUERN_F32,
                            .routed = MOE_NVFP4,
                            .shared = MOE_NONE,
                            .a4 = true,
                            .bias = trial % 2};
        moe_case c = moe_make(&random, &w);
        moe_call_forward(&c, ctx);
        const int64_t k = c.params.top_k, rows = c.tokens * k;
        int32_t *slots = test_tensor_get_i32(&c.t[M(permutation)]), *row_of = need((size_t)rows * 4);
        double *x = test_tensor_get(&c.t[M(hidden)]), *out = test_tensor_get(&c.t[M(out)]),
               *weights = test_tensor_get(&c.t[M(weights)]);
        float *gathered = need((size_t)(rows * c.dim) * sizeof *gathered);
        for (int64_t r = 0; r < rows; r++) {
            row_of[slots[r]] = (int32_t)r;
            for (int64_t d = 0; d < c.dim; d++) gathered[r * c.dim + d] = (float)x[slots[r] / k * c.dim + d];
        }
        coded_rows first = quantise(&c, gathered, rows, c.dim, M(gate_up_input_global));
        float *act = multiply(&c, &first, rows, 2 * c.width, M(gate_up_codes), M(gate_up_bias),
                              M(gate_up_input_global), true);
        coded_rows second = quantise(&c, act, rows, c.width, M(down_input_global));
        float *y =
            multiply(&c, &second, rows, c.dim, M(down_codes), M(down_bias), M(down_input_global), false);
        for (int64_t t = 0; t < c.tokens; t++)
            for (int64_t d = 0; d < c.dim; d++) {
                float sum = 0;
                for (int64_t j = 0; j < k; j++) {
                    const float term = (float)weights[t * k + j] * y[row_of[t * k + j] * c.dim + d];
                    sum += term;
                }
                if ((double)sum != out[t * c.dim + d])
                    fail_msg("trial %d, token %lld: %.9g, by parts %.9g", trial, (long long)t,
                             out[t * c.dim + d], (double)sum);
            }
        free_rows(&first), free_rows(&second);
        free(slots), free(row_of), free(x), free(out), free(weights), free(gathered), free(act), free(y);
        moe_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters),        cmocka_unit_test(tensors),
        cmocka_unit_test(routing),           cmocka_unit_test(contents),
        cmocka_unit_test(zeros_are_numbers), cmocka_unit_test(workspace_is_checked),
        cmocka_unit_test(a4_is_its_parts),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
