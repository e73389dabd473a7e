/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_core.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void fill_lists(core_case *c, test_random *random)
{
    const int64_t rows = c->shape.queries * (c->varlen ? 1 : c->batch), k = c->shape.chosen;
    int32_t *idx = malloc((size_t)(rows * k + 1) * sizeof *idx),
            *count = malloc((size_t)(rows + 1) * sizeof *count);
    for (int64_t row = 0; row < rows; row++) {
        const bool rising = test_random_one_in(random, 2);
        for (int64_t i = 0; i < k; i++) {
            int32_t x =
                (int32_t)test_random_int(random, -1, c->shape.entries - 1 < 0 ? 0 : c->shape.entries - 1);
            if (rising) x = (int32_t)(i < c->shape.entries ? i : -1);
            if (test_random_one_in(random, 40))
                x = test_random_one_in(random, 2) ? -7 : (int32_t)c->shape.entries + 3;
            idx[row * k + i] = x;
        }
        count[row] = (int32_t)test_random_int(random, 0, k);
    }
    test_tensor_set_i32(&c->t[CORE_IDX], idx);
    if (c->t[CORE_COUNT].buffer != NULL) test_tensor_set_i32(&c->t[CORE_COUNT], count);
    free(idx), free(count);
}

core_case core_case_make(test_random *random, const oracle_core *shape, int64_t batch, const int32_t *cu,
                         quern_dtype dtype, const core_parts *parts)
{
    dtype = core_dtype(dtype);
    core_case c = {.shape = *shape, .varlen = cu != NULL, .batch = batch, .dtype = dtype};
    if (cu != NULL) memcpy(c.cu, cu, (size_t)(batch + 1) * sizeof *cu);
    const int64_t t = shape->queries, n = shape->raw, h = shape->heads, d = shape->dim, s = shape->entries,
                  k = shape->chosen;
    const int64_t positions = cu != NULL ? t : shape->start + t;
    const int64_t full[CORE_TENSORS][4] = {{batch, t, h, d},
                                           {batch, n, d},
                                           {batch, s, d},
                                           {batch, t, k},
                                           {batch, t},
                                           {h},
                                           {positions, shape->rope_dim},
                                           {batch + 1},
                                           {batch, t, h, d},
                                           {batch, h, t},
                                           {batch, h, t},
                                           {batch, t, h, d},
                                           {batch, t, h, d},
                                           {batch, n, d},
                                           {batch, s, d},
                                           {h}};
    const int32_t ndim[CORE_TENSORS] = {4, 3, 3, 3, 2, 1, 2, 1, 4, 3, 3, 4, 4, 3, 3, 1};
    const bool present[CORE_TENSORS] = {
        true, true, parts->entries, parts->list, parts->count, parts->sink, parts->rope,    cu != NULL,
        true, true, true,           true,        true,         true,        parts->entries, parts->sink};
    for (int i = 0; i < CORE_TENSORS; i++) {
        if (!present[i]) continue;
        const bool whole = i == CORE_IDX || i == CORE_COUNT || i == CORE_CU,
                   varlen =
                       cu != NULL && i != CORE_SINK && i != CORE_COS_SIN && i != CORE_CU && i != CORE_D_SINK;
        const quern_dtype type = whole ? QUERN_I32
                                 : i == CORE_SINK || i == CORE_LSE || i == CORE_LSE_WIN || i == CORE_D_SINK
                                     ? QUERN_F32
                                     : dtype;
        c.t[i] = test_tensor_make(random, type, ndim[i] - varlen, full[i] + varlen,
                                  (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
        if (i == CORE_Q || i == CORE_KV || i == CORE_KV_CMP || i == CORE_SINK || i == CORE_D_O)
            test_tensor_normal(&c.t[i], random, 1);
    }
    if (cu != NULL) test_tensor_set_i32(&c.t[CORE_CU], cu);
    if (parts->rope) {
        double *table = test_doubles(positions * shape->rope_dim);
        oracle_dsv4_rope_table(positions, shape->rope_dim, 1000, 0, 0, 0, 0, table);
        test_tensor_set(&c.t[CORE_COS_SIN], table);
        free(table);
    }
    if (parts->list) fill_lists(&c, random);
    if (parts->sink && test_random_one_in(random, 3)) {
        double *sink = test_tensor_get(&c.t[CORE_SINK]);
        sink[0] = test_random_one_in(random, 2) ? INFINITY : -INFINITY;
        test_tensor_set(&c.t[CORE_SINK], sink);
        free(sink);
    }
    return c;
}

core_case core_case_random(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16, QUERN_BF16};
    const bool long_one = test_random_one_in(random, 12), varlen = !long_one && test_random_one_in(random, 3);
    oracle_core x = {.queries = test_random_int(random, test_random_one_in(random, 9) ? 0 : 1, 30),
                     .heads = test_random_int(random, 1, 9),
                     .dim = 8 * test_random_int(random, 1, 9),
                     .window = test_random_int(random, 1, 20),
                     .ratio = test_random_int(random, 1, 6),
                     .chosen = -1};
    if (test_random_one_in(random, 8)) x.heads = test_random_int(random, 16, 70);
    if (test_random_one_in(random, 8)) x.dim = 8 * test_random_int(random, 10, 64);
    if (test_random_one_in(random, 8)) x.dim = 512;
    x.rope_dim = 2 * test_random_int(random, 1, x.dim / 2);
    int32_t cu[CORE_SEQUENCES + 1] = {0};
    int64_t batch = varlen ? test_random_int(random, 1, CORE_SEQUENCES)
                           : test_random_int(random, test_random_one_in(random, 9) ? 0 : 1, 3);
    if (long_one) {
        x.queries = test_random_int(random, 1, 3);
        batch = 1;
    }
    if (varlen) {
        for (int64_t b = 0; b < batch; b++) cu[b + 1] = cu[b] + (int32_t)test_random_int(random, 0, 20);
        x.queries = x.raw = cu[batch] + test_random_int(random, 0, 3);
        x.entries = x.queries / x.ratio;
    } else {
        x.start = test_random_int(random, 0, long_one ? 9000 : 60);
        x.raw = test_random_int(random, 0, x.start + x.queries < 4000 ? x.start + x.queries : 4000);
        x.entries = test_random_int(random, 0, (x.start + x.queries) / x.ratio + 2);
        if (long_one) x.window = test_random_int(random, 1, 1500);
    }
    core_parts parts = {.entries = !test_random_one_in(random, 5),
                        .sink = test_random_one_in(random, 2),
                        .rope = test_random_one_in(random, 2)};
    parts.list = parts.entries && test_random_one_in(random, 2);
    parts.count = parts.list && test_random_one_in(random, 2);
    if (parts.list) x.chosen = test_random_int(random, 0, test_random_one_in(random, 6) ? 300 : 12);
    return core_case_make(random, &x, batch, varlen ? cu : NULL, dtypes[test_random_int(random, 0, 3)],
                          &parts);
}

void core_case_free(core_case *c)
{
    for (int i = 0; i < CORE_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
}

quern_dsv4_attention_params core_case_params(const core_case *c)
{
    quern_dsv4_attention_params p = QUERN_DSV4_ATTENTION_PARAMS_INIT;
    p.ratio = c->shape.ratio;
    p.window = c->shape.window;
    p.start_abs_pos = c->varlen ? -1 : c->shape.start;
    return p;
}

quern_dsv4_attention_tensors core_case_tensors(const core_case *c)
{
    quern_dsv4_attention_tensors t;
    op_case_bind("v4-attention", c->t, CORE_TENSORS, OP_CASE_ALL, &t);
    return t;
}

static void call(const core_case *c, quern_context *ctx, quern_op_pass pass)
{
    const quern_dsv4_attention_params p = core_case_params(c);
    const quern_dsv4_attention_tensors t = core_case_tensors(c);
    op_case_call(ctx, "v4-attention", pass, &p, &t);
}

void core_case_forward(const core_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_FORWARD);
}

void core_case_backward(const core_case *c, quern_context *ctx)
{
    call(c, ctx, QUERN_OP_BACKWARD);
}

/* The rows of [H, T] of one sequence, gathered from and put back into [H, all]. */
static void put_stats(double *to, const double *from, int64_t heads, int64_t all, int64_t first, int64_t n)
{
    for (int64_t h = 0; h < heads; h++) memcpy(to + h * all + first, from + h * n, (size_t)n * sizeof *to);
}

static void check_sequence(const core_case *c, int64_t b, double *const value[CORE_TENSORS],
                           const int32_t *idx, const int32_t *count, double *const expected[CORE_TENSORS],
                           int64_t *entry)
{
    oracle_core x = c->shape;
    const int64_t all = x.queries, hd = x.heads * x.dim;
    const int64_t token0 = c->varlen ? c->cu[b] : b * x.queries, raw0 = c->varlen ? c->cu[b] : b * x.raw;
    if (c->varlen) {
        x.queries = x.raw = c->cu[b + 1] - c->cu[b];
        x.entries = x.queries / x.ratio;
        x.start = 0;
    }
    const int64_t stats = x.heads * x.queries;
    double *lse = test_doubles(stats), *win = test_doubles(stats);
    const bool entries = value[CORE_KV_CMP] != NULL;
    oracle_core_arrays a = {.q = value[CORE_Q] + token0 * hd,
                            .kv = value[CORE_KV] + raw0 * x.dim,
                            .kv_cmp = entries ? value[CORE_KV_CMP] + *entry * x.dim : NULL,
                            .sink = value[CORE_SINK],
                            .cos_sin = value[CORE_COS_SIN],
                            .idx = idx != NULL ? idx + token0 * x.chosen : NULL,
                            .count = count != NULL ? count + token0 : NULL,
                            .o = expected[CORE_O] + token0 * hd,
                            .lse = lse,
                            .lse_win = win,
                            .d_o = value[CORE_D_O] + token0 * hd,
                            .d_q = expected[CORE_D_Q] + token0 * hd,
                            .d_kv = expected[CORE_D_KV] + raw0 * x.dim,
                            .d_kv_cmp = entries ? expected[CORE_D_KV_CMP] + *entry * x.dim : NULL,
                            .d_sink = expected[CORE_D_SINK]};
    oracle_dsv4_attend(&x, &a);
    a.o = value[CORE_O] + token0 * hd;
    oracle_dsv4_attend_backward(&x, &a);
    const int64_t base = c->varlen ? 0 : b * x.heads * all;
    put_stats(expected[CORE_LSE] + base, lse, x.heads, all, c->varlen ? c->cu[b] : 0, x.queries);
    put_stats(expected[CORE_LSE_WIN] + base, win, x.heads, all, c->varlen ? c->cu[b] : 0, x.queries);
    *entry += x.entries;
    free(lse), free(win);
}

/* dsink is a sum of products of both signs over channels and queries. Its rounding is relative to the sum of
 * their absolute values, so the bound is, too: with one head and one query there is no other element to
 * measure against. */
static void check_d_sink(const core_case *c, double *const value[CORE_TENSORS],
                         double *const expected[CORE_TENSORS])
{
    const int64_t heads = c->shape.heads, dim = c->shape.dim, all = c->shape.queries,
                  rows = c->varlen ? all : c->batch * all;
    double error = 0, size = 0;
    for (int64_t h = 0; h < heads; h++) {
        double sum = 0;
        for (int64_t row = 0; row < rows; row++) {
            const double lse = expected[CORE_LSE][(row / all * heads + h) * all + row % all],
                         sink = value[CORE_SINK][h];
            for (int64_t i = (row * heads + h) * dim; i < (row * heads + h + 1) * dim && lse != -INFINITY;
                 i++)
                sum += fabs(value[CORE_D_O][i] * value[CORE_O][i]) / (1 + exp(lse - sink));
        }
        size += sum * sum;
        error += (value[CORE_D_SINK][h] - expected[CORE_D_SINK][h]) *
                 (value[CORE_D_SINK][h] - expected[CORE_D_SINK][h]);
    }
    const double least = 0x1p-149 * (double)heads; /* of f32's numbers */
    if (!(sqrt(error) <= test_gradient_bound(c->dtype) * sqrt(size) + least))
        fail_msg("d_sink is off by %.3g, its terms are %.3g", sqrt(error), sqrt(size));
}

void core_case_check(const core_case *c, bool backward)
{
    double *value[CORE_TENSORS] = {NULL}, *expected[CORE_TENSORS] = {NULL};
    int32_t *idx = c->t[CORE_IDX].buffer != NULL ? test_tensor_get_i32(&c->t[CORE_IDX]) : NULL;
    int32_t *count = c->t[CORE_COUNT].buffer != NULL ? test_tensor_get_i32(&c->t[CORE_COUNT]) : NULL;
    for (int i = 0; i < CORE_TENSORS; i++) {
        if (c->t[i].buffer == NULL || c->t[i].view.dtype == QUERN_I32) continue;
        value[i] = test_tensor_get(&c->t[i]);
        if (i >= CORE_O) expected[i] = test_doubles(test_tensor_count(&c->t[i]));
        for (int64_t k = 0; (i == CORE_LSE || i == CORE_LSE_WIN) && k < test_tensor_count(&c->t[i]); k++)
            expected[i][k] = -INFINITY;
    }
    int64_t entry = 0;
    for (int64_t b = 0; b < c->batch; b++) check_sequence(c, b, value, idx, count, expected, &entry);
    for (int i = 0; i < CORE_TENSORS; i++) {
        if (c->t[i].buffer == NULL) continue;
        const char *name = op_case_field("v4-attention", i);
        const bool gradient = i >= CORE_D_Q, result = (i >= CORE_O && i <= CORE_LSE_WIN) || gradient;
        if (i == CORE_D_SINK && backward) check_d_sink(c, value, expected);
        else if (result && (!gradient || backward))
            test_check(name, value[i], expected[i], test_tensor_count(&c->t[i]),
                       gradient ? test_gradient_bound(c->dtype)
                                : test_forward_bound(c->t[i].view.dtype == QUERN_F32 ? c->dtype
                                                                                     : c->t[i].view.dtype));
        if (result) test_tensor_check_guards(&c->t[i], name);
        else test_tensor_check_unchanged(&c->t[i], name);
    }
    for (int i = 0; i < CORE_TENSORS; i++) free(value[i]), free(expected[i]);
    free(idx), free(count);
}
