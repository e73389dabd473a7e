/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe_case.c - makes random layers. Weights have a variance that keeps rows at their size. */
#include "moe_case.h"

#include "cmocka_c11.h"
#include "oracle/nvfp4.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static test_layout any_layout(test_random *random)
{
    return (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
}

static void add(moe_case *c, test_random *random, int tensor, quern_dtype dtype, int32_t ndim,
                const int64_t *shape)
{
    c->t[tensor] = test_tensor_make(random, dtype, ndim, shape, any_layout(random));
}

static void add_normal(moe_case *c, test_random *random, int tensor, quern_dtype dtype, int32_t ndim,
                       const int64_t *shape, double sigma)
{
    add(c, random, tensor, dtype, ndim, shape);
    test_tensor_normal(&c->t[tensor], random, sigma);
    c->values[tensor] = test_tensor_get(&c->t[tensor]);
}

static quern_dtype any_float(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    return dtypes[test_random_int(random, 0, 2)];
}

/* A stack of NVFP4 matrices [E, K, N], or one: codes, scales, perhaps a global. Returns the values. */
static double *add_nvfp4(moe_case *c, test_random *random, int codes, int64_t experts, int64_t k, int64_t n,
                         bool stack, int parts)
{
    const int64_t blocks = k / 16, code_shape[] = {experts, k / 2, n}, scale_shape[] = {experts, blocks, n},
                  global_shape[] = {experts, parts};
    const int32_t ndim = stack ? 3 : 2, first = stack ? 0 : 1;
    double *bytes = test_doubles(experts * k / 2 * n), *scales = test_doubles(experts * blocks * n),
           *values = test_doubles(experts * k * n);
    double global[2 * 64];
    const int32_t global_dims = (int32_t)test_random_int(random, 0, stack ? (parts > 1 ? 2 : 1) : parts > 1);
    for (int i = 0; i < 2 * 64; i++)
        global[i] = test_round(QUERN_F32, 0.6 / sqrt((double)k) * (0.7 + 0.6 * test_random_uniform(random)));
    for (int64_t i = 0; i < experts * blocks * n; i++)
        scales[i] = (double)test_random_int(random, 0x28, 0x38);
    for (int64_t i = 0; i < experts * k * n; i++) {
        const int64_t e = i / (k * n), row = i / n % k, column = i % n,
                      part = column / c->params.granularity % 2;
        const int code = (int)test_random_int(random, 0, 15);
        const double scale = (double)oracle_e4m3((int)scales[(e * blocks + row / 16) * n + column]);
        const int64_t at = global_dims == 0 ? 0 : !stack ? part : global_dims == 1 ? e : 2 * e + part;
        bytes[(e * (k / 2) + row / 2) * n + column] += code * (row % 2 ? 16 : 1);
        values[i] = (double)oracle_e2m1(code) * scale * global[at];
    }
    add(c, random, codes, QUERN_U8, ndim, code_shape + first);
    add(c, random, codes + 1, QUERN_U8, ndim, scale_shape + first);
    test_tensor_set(&c->t[codes], bytes);
    test_tensor_set(&c->t[codes + 1], scales);
    add(c, random, codes + 3, QUERN_F32, global_dims, stack ? global_shape : global_shape + 1);
    test_tensor_set(&c->t[codes + 3], global);
    free(bytes), free(scales);
    return values;
}

/* Codes and scales become repacked ones. */
static void repack(moe_case *c, test_random *random, int codes, int64_t n, int64_t k, bool stack)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
    const int64_t bytes = test_repacked_bytes(n, k), shape[] = {stack ? c->experts : bytes, bytes};
    c->t[codes + 2] = test_tensor_make(random, QUERN_U8, stack ? 2 : 1, shape, TEST_UNALIGNED);
    quern_tensor view[] = {c->t[codes].view, c->t[codes + 1].view, c->t[codes + 2].view};
    for (int i = 0; i < 3 && !stack; i++) {
        for (int32_t d = view[i].ndim++; d > 0; d--) {
            view[i].shape[d] = view[i].shape[d - 1];
            view[i].strides[d] = view[i].strides[d - 1];
        }
        view[i].shape[0] = 1;
    }
    t.b_codes = &view[0];
    t.b_scales = &view[1];
    t.b_repacked = &view[2];
    if (quern_moe_prepack(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK)
        fail_msg("prepack: %s", quern_last_error(ctx));
    quern_context_destroy(ctx);
    double *written = test_tensor_get(&c->t[codes + 2]);
    test_tensor_set(&c->t[codes + 2], written); /* takes the snapshot */
    free(written);
    test_tensor_free(&c->t[codes]), test_tensor_free(&c->t[codes + 1]);
    c->t[codes] = c->t[codes + 1] = (test_tensor){0};
}

/* Matrices [E, K, N] of interleaved columns as [E, 2 I, K] in halves; without granularity as [E, N, K]. */
static double *turned(const double *values, int64_t experts, int64_t k, int64_t n, int64_t granularity)
{
    double *out = test_doubles(experts * n * k);
    for (int64_t e = 0; e < experts; e++)
        for (int64_t r = 0; r < n; r++) {
            const int64_t at =
                granularity == 0 ? r : oracle_interleaved_at(r % (n / 2), r >= n / 2, granularity);
            for (int64_t i = 0; i < k; i++) out[(e * n + r) * k + i] = values[(e * k + i) * n + at];
        }
    return out;
}

static void add_routed(moe_case *c, test_random *random)
{
    const int64_t e = c->experts, d = c->dim, i = c->width, up[] = {e, 2 * i, d}, down[] = {e, d, i};
    if (c->routed == MOE_FLOATS) {
        add_normal(c, random, M(gate_up), any_float(random), 3, up, 1 / sqrt((double)d));
        add_normal(c, random, M(down), any_float(random), 3, down, 1 / sqrt((double)i));
        return;
    }
    double *values = add_nvfp4(c, random, M(gate_up_codes), e, d, 2 * i, true, 2);
    c->values[M(gate_up)] = turned(values, e, d, 2 * i, c->params.granularity);
    free(values);
    values = add_nvfp4(c, random, M(down_codes), e, i, d, true, 1);
    c->values[M(down)] = turned(values, e, i, d, 0);
    free(values);
    if (c->routed != MOE_REPACKED) return;
    repack(c, random, M(gate_up_codes), 2 * i, d, true);
    repack(c, random, M(down_codes), d, i, true);
    c->params.intermediate = i;
}

static void add_shared(moe_case *c, test_random *random)
{
    const int64_t d = c->dim, i = c->shared_width, up[] = {i, d}, down[] = {d, i};
    if (c->shared == MOE_NONE) return;
    if (c->shared == MOE_FLOATS) {
        add_normal(c, random, M(shared_gate), any_float(random), 2, up, 1 / sqrt((double)d));
        add_normal(c, random, M(shared_up), any_float(random), 2, up, 1 / sqrt((double)d));
        add_normal(c, random, M(shared_down), any_float(random), 2, down, 1 / sqrt((double)i));
        return;
    }
    double *values = add_nvfp4(c, random, M(shared_gate_up_codes), 1, d, 2 * i, false, 2);
    double *halves = turned(values, 1, d, 2 * i, c->params.granularity);
    c->values[M(shared_gate)] = test_doubles(i * d);
    c->values[M(shared_up)] = test_doubles(i * d);
    memcpy(c->values[M(shared_gate)], halves, sizeof *halves * (size_t)(i * d));
    memcpy(c->values[M(shared_up)], halves + i * d, sizeof *halves * (size_t)(i * d));
    free(values), free(halves);
    values = add_nvfp4(c, random, M(shared_down_codes), 1, i, d, false, 1);
    c->values[M(shared_down)] = turned(values, 1, i, d, 0);
    free(values);
    if (c->shared != MOE_REPACKED) return;
    repack(c, random, M(shared_gate_up_codes), 2 * i, d, false);
    repack(c, random, M(shared_down_codes), d, i, false);
    c->params.shared_intermediate = i;
}

static void add_biases(moe_case *c, test_random *random)
{
    const int64_t e = c->experts, n = 2 * c->width, up[] = {e, n}, down[] = {e, c->dim};
    add_normal(c, random, M(gate_up_bias), any_float(random), 2, up, 0.3);
    add_normal(c, random, M(down_bias), any_float(random), 2, down, 0.3);
    if (c->routed == MOE_FLOATS) return;
    double *interleaved = c->values[M(gate_up_bias)];
    c->values[M(gate_up_bias)] = turned(interleaved, e, 1, n, c->params.granularity);
    free(interleaved);
}

/* Tokens: [T, .], or for an even number [2, T/2, .]. */
static int32_t token_shape(const moe_case *c, int64_t last, int64_t shape[3])
{
    const int32_t leads = c->tokens > 0 && c->tokens % 2 == 0 ? 2 : 1;
    shape[0] = leads == 2 ? 2 : c->tokens;
    shape[1] = leads == 2 ? c->tokens / 2 : last;
    shape[leads] = last;
    return leads + 1;
}

/* Routing that is handed in: any experts, the same one twice too, and weights of both signs. */
static void add_routing(moe_case *c, test_random *random)
{
    const int64_t shape[] = {c->tokens, c->params.top_k}, count = c->tokens * c->params.top_k;
    int32_t *ids = calloc((size_t)count + 1, sizeof *ids);
    assert_non_null(ids);
    for (int64_t i = 0; i < count; i++) ids[i] = (int32_t)test_random_int(random, 0, c->experts - 1);
    add(c, random, M(experts), QUERN_I32, 2, shape);
    test_tensor_set_i32(&c->t[M(experts)], ids);
    add_normal(c, random, M(weights), QUERN_F32, 2, shape, 0.7);
    free(ids);
}

static void add_router(moe_case *c, test_random *random, const moe_wish *w)
{
    int64_t shape[3];
    const int32_t ndim = token_shape(c, c->experts, shape);
    const int64_t weight[] = {c->experts, c->dim}, table[] = {50, c->params.top_k};
    if (w->routed_by_hand) {
        add_routing(c, random);
        return;
    }
    if (w->logits) add_normal(c, random, M(logits), QUERN_F32, ndim, shape, 2);
    else add_normal(c, random, M(weight), any_float(random), 2, weight, 2 / sqrt((double)c->dim));
    if (!w->table) {
        if (test_random_one_in(random, 2)) add_normal(c, random, M(bias), QUERN_F32, 1, &c->experts, 0.2);
        return;
    }
    int32_t *ids = calloc((size_t)c->tokens + 1, sizeof *ids),
            *rows = calloc((size_t)(50 * c->params.top_k), sizeof *rows);
    assert_true(ids != NULL && rows != NULL);
    for (int64_t t = 0; t < c->tokens; t++) ids[t] = (int32_t)test_random_int(random, 0, 49);
    const int64_t step = c->params.renormalize ? 1 : 2; /* else a row may name an expert twice */
    for (int64_t r = 0; r < 50; r++)
        for (int64_t j = 0; j < c->params.top_k; j++)
            rows[r * c->params.top_k + j] = (int32_t)((r * 7 + j * step) % c->experts);
    add(c, random, M(input_ids), QUERN_I32, ndim - 1, shape);
    add(c, random, M(tid2eid), QUERN_I32, 2, table);
    test_tensor_set_i32(&c->t[M(input_ids)], ids);
    test_tensor_set_i32(&c->t[M(tid2eid)], rows);
    free(ids), free(rows);
}

/* f32, or the weight's where the bound of what is computed holds for a rounding to it. */
static quern_dtype weight_gradient_dtype(const moe_case *c, test_random *random, int weight)
{
    const quern_dtype own = c->t[weight].view.dtype;
    const bool fits = own == QUERN_F32 || c->dtype == QUERN_BF16 || own == c->dtype;
    return fits && test_random_one_in(random, 2) ? own : QUERN_F32;
}

static void add_results(moe_case *c, test_random *random)
{
    int64_t shape[3];
    const int64_t slots[] = {c->tokens, c->params.top_k}, flat = c->tokens * c->params.top_k, e = c->experts;
    const int64_t weight[] = {e, c->dim}, up[] = {e, 2 * c->width};
    const int32_t ndim = token_shape(c, c->dim, shape);
    add(c, random, M(out), c->dtype, ndim, shape);
    if (!c->routed_by_hand) add(c, random, M(experts), QUERN_I32, 2, slots);
    if (!c->routed_by_hand) add(c, random, M(weights), QUERN_F32, 2, slots);
    add(c, random, M(offsets), QUERN_I32, 1, &e);
    add(c, random, M(permutation), QUERN_I32, 1, &flat);
    add_normal(c, random, M(d_out), c->dtype, ndim, shape, 1);
    add(c, random, M(d_hidden), c->dtype, ndim, shape);
    add(c, random, M(d_weights), QUERN_F32, 2, slots);
    if (c->t[M(weight)].buffer != NULL) add(c, random, M(d_weight), QUERN_F32, 2, weight);
    if (c->t[M(gate_up_bias)].buffer != NULL) add(c, random, M(d_gate_up_bias), QUERN_F32, 2, up);
    if (c->t[M(down_bias)].buffer != NULL) add(c, random, M(d_down_bias), QUERN_F32, 2, weight);
    if (c->routed == MOE_FLOATS) {
        const int64_t gate_up[] = {e, 2 * c->width, c->dim}, down_shape[] = {e, c->dim, c->width};
        add(c, random, M(d_gate_up), weight_gradient_dtype(c, random, M(gate_up)), 3, gate_up);
        add(c, random, M(d_down), weight_gradient_dtype(c, random, M(down)), 3, down_shape);
    }
    token_shape(c, e, shape);
    if (c->t[M(logits)].buffer != NULL) add(c, random, M(d_logits), QUERN_F32, ndim, shape);
}

static void add_hidden(moe_case *c, test_random *random)
{
    int64_t shape[3];
    const int32_t ndim = token_shape(c, c->dim, shape);
    add_normal(c, random, M(hidden), c->dtype, ndim, shape, 1);
}

static void set_params(moe_case *c, test_random *random, const moe_wish *w)
{
    static const float limits[] = {0, 0.75f, 7}, alphas[] = {1, 1.702f};
    quern_moe_params *p = &c->params;
    *p = (quern_moe_params)QUERN_MOE_PARAMS_INIT;
    p->score = (quern_moe_score)test_random_int(random, 0, 2);
    p->top_k = test_random_int(random, 1, c->experts < 4 ? c->experts : 4);
    /* One renormalised weight is 1 whatever the logits: its gradient is rounding, to which no relative bound
     * applies. */
    p->renormalize = p->top_k > 1 && test_random_one_in(random, 2);
    p->route_scale = 1.5f;
    p->a4 = w->a4;
    p->limit = limits[test_random_int(random, 0, 2)];
    p->alpha = alphas[test_random_int(random, 0, 1)];
    p->beta = test_random_one_in(random, 2) ? 1.0f : 0.0f;
    p->granularity = (int64_t)1 << test_random_int(random, 0, 5);
}

moe_case moe_make(test_random *random, const moe_wish *w)
{
    const bool any = w->routed == MOE_FLOATS && (w->shared == MOE_FLOATS || w->shared == MOE_NONE);
    moe_case c = {.tokens = w->tokens,
                  .dtype = w->dtype,
                  .routed = w->routed,
                  .shared = w->shared,
                  .routed_by_hand = w->routed_by_hand,
                  .experts = test_random_int(random, 1, 9)};
    set_params(&c, random, w);
    c.dim = any ? test_random_int(random, 1, 90) : 16 * test_random_int(random, 1, 9);
    c.width = c.routed == MOE_FLOATS ? test_random_int(random, 1, 70) : 32 * test_random_int(random, 1, 5);
    c.shared_width =
        c.shared == MOE_FLOATS ? test_random_int(random, 1, 70) : 32 * test_random_int(random, 1, 5);
    add_hidden(&c, random);
    add_router(&c, random, w);
    add_routed(&c, random);
    add_shared(&c, random);
    if (w->bias) add_biases(&c, random);
    for (int i = M(gate_up_input_global); i <= M(down_input_global) && w->a4; i++) {
        if (test_random_one_in(random, 2)) continue;
        double given[9];
        for (int e = 0; e < 9; e++) given[e] = 0.001 + 0.002 * test_random_uniform(random);
        add(&c, random, i, QUERN_F32, 1, &c.experts);
        test_tensor_set(&c.t[i], given);
        c.values[i] = test_tensor_get(&c.t[i]);
    }
    add_results(&c, random);
    return c;
}

void moe_free(moe_case *c)
{
    for (int i = 0; i < MOE_TENSORS; i++) {
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
        free(c->values[i]);
    }
    free(c->chosen);
}

/* Tensors whose rows are tokens. */
static bool is_by_token(const moe_case *c, int tensor)
{
    if (c->routed_by_hand && (tensor == M(experts) || tensor == M(weights))) return true;
    return tensor == M(hidden) || tensor == M(logits) || tensor == M(input_ids) || tensor == M(d_out);
}

static bool is_of_tokens(const moe_case *c, int tensor)
{
    return is_by_token(c, tensor) || moe_is_result(c, tensor);
}

bool moe_is_result(const moe_case *c, int tensor)
{
    if (c->routed_by_hand && (tensor == M(experts) || tensor == M(weights))) return false;
    return (tensor >= M(out) && tensor <= M(permutation)) || tensor > M(d_out);
}

moe_case moe_subset(const moe_case *c, test_random *random, const bool *kept, int64_t count)
{
    moe_case s = *c;
    s.tokens = count;
    s.chosen = NULL;
    for (int i = 0; i < MOE_TENSORS; i++) {
        const test_tensor *t = &c->t[i];
        if (!is_of_tokens(c, i)) continue;
        s.t[i] = (test_tensor){0};
        s.values[i] = NULL;
        if (!is_by_token(c, i) || t->buffer == NULL) continue;
        const bool ids = t->view.dtype == QUERN_I32, flat = i == M(experts) || i == M(weights);
        const int64_t width = i == M(input_ids) ? 1 : t->view.shape[t->view.ndim - 1];
        double *all = ids ? NULL : test_tensor_get(t), *some = test_doubles(count * width);
        int32_t *all_ids = ids ? test_tensor_get_i32(t) : NULL,
                *some_ids = calloc((size_t)(count * width) + 1, sizeof *some_ids);
        int64_t shape[3] = {count, width}, to = 0;
        assert_non_null(some_ids);
        const int32_t ndim = flat ? 2 : token_shape(&s, width, shape) - (i == M(input_ids));
        for (int64_t r = 0; r < c->tokens; r++) {
            if (!kept[r]) continue;
            if (ids) memcpy(some_ids + to * width, all_ids + r * width, sizeof *some_ids * (size_t)width);
            else memcpy(some + to * width, all + r * width, sizeof *some * (size_t)width);
            to++;
        }
        add(&s, random, i, t->view.dtype, ndim, shape);
        if (ids) test_tensor_set_i32(&s.t[i], some_ids);
        else test_tensor_set(&s.t[i], some);
        free(all), free(some), free(all_ids), free(some_ids);
    }
    const test_tensor d_out = s.t[M(d_out)];
    add_results(&s, random);
    test_tensor_free(&s.t[M(d_out)]);
    free(s.values[M(d_out)]);
    s.values[M(d_out)] = NULL;
    s.t[M(d_out)] = d_out;
    return s;
}

void moe_subset_free(moe_case *c)
{
    for (int i = 0; i < MOE_TENSORS; i++) {
        if (!is_of_tokens(c, i)) continue;
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
        free(c->values[i]);
    }
    free(c->chosen);
}
