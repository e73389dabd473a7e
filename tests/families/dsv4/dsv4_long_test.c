/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_long_test.c - compressors on sequences that a call cuts into tasks and into chunks of projections:
 * pieces give the bits of one shot, and batches with blocks before them and starts of their own what the
 * float64 oracle gives.
 */
#include "cmocka_c11.h"
#include "dsv4_case.h"
#include "dsv4_states.h"
#include "dsv4_weights.h"
#include "op_case.h"

#include <stdlib.h>
#include <string.h>

enum { TOKENS = 3 * 1536 + 777, IN = 40, WIDTH = 24, ROPE = 8, RING = 3 };

/* A compressor, its tokens as hidden states or projections, and the entries of one shot. */
typedef struct stream {
    quern_dsv4_compress_params params;
    int64_t entries;
    test_tensor rows, w, b_a, b_b, norm_weight, cos_sin, out, pooled;
    bool projected;
} stream;

static stream stream_make(test_random *random, quern_dsv4_kind kind, int64_t ratio, quern_dtype dtype,
                          bool projected)
{
    const int64_t columns = (kind == QUERN_DSV4_CSA ? 4 : 2) * WIDTH, width = WIDTH;
    stream s = {.params = QUERN_DSV4_COMPRESS_PARAMS_INIT, .entries = TOKENS / ratio, .projected = projected};
    s.params.kind = kind;
    s.params.ratio = ratio;
    s.rows = dsv4_weight_rows(random, dtype, TOKENS, projected ? columns : IN);
    s.w = dsv4_weight_rows(random, dtype, IN, columns);
    s.b_a = dsv4_weight_rows(random, QUERN_F32, ratio, WIDTH);
    s.b_b = dsv4_weight_rows(random, QUERN_F32, ratio, WIDTH);
    s.norm_weight = test_tensor_make(random, QUERN_F32, 1, &width, TEST_UNALIGNED);
    test_tensor_normal(&s.norm_weight, random, 1);
    s.cos_sin = dsv4_weight_rows(random, QUERN_F32, TOKENS, ROPE);
    s.out = dsv4_weight_rows(random, QUERN_F32, s.entries, WIDTH);
    s.pooled = dsv4_weight_rows(random, QUERN_F32, s.entries, WIDTH);
    return s;
}

static void one_shot(const stream *s, quern_context *ctx)
{
    quern_dsv4_compress_tensors t = QUERN_DSV4_COMPRESS_TENSORS_INIT;
    const bool csa = s->params.kind == QUERN_DSV4_CSA;
    t.proj = s->projected ? &s->rows.view : NULL;
    t.x = s->projected ? NULL : &s->rows.view;
    t.w = s->projected ? NULL : &s->w.view;
    t.b_a = &s->b_a.view;
    t.b_b = csa ? &s->b_b.view : NULL;
    t.norm_weight = &s->norm_weight.view;
    t.cos_sin = &s->cos_sin.view;
    t.out = &s->out.view;
    t.pooled = &s->pooled.view;
    op_case_call(ctx, csa ? "csa-compress" : "hca-compress", QUERN_OP_FORWARD, &s->params, &t);
}

static quern_tensor rows_of(const quern_tensor *t, int64_t first, int64_t count)
{
    quern_tensor v = *t;
    v.data = (char *)t->data + first * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    v.shape[0] = count;
    return v;
}

static void append(const stream *s, quern_context *ctx, dsv4_states *states, int64_t count,
                   const test_tensor *out, const test_tensor *pooled)
{
    const int64_t r = s->params.ratio, at = states->position[0], entry = at / r, made = count / r + 1;
    const int32_t slot = 0;
    const quern_tensor rows = rows_of(&s->rows.view, at, count), o = rows_of(&out->view, entry, made),
                       p = rows_of(&pooled->view, entry, made);
    quern_dsv4_append_tensors t = QUERN_DSV4_APPEND_TENSORS_INIT;
    t.proj = s->projected ? &rows : NULL;
    t.x = s->projected ? NULL : &rows;
    t.w = s->projected ? NULL : &s->w.view;
    t.b_a = &s->b_a.view;
    t.b_b = s->params.kind == QUERN_DSV4_CSA ? &s->b_b.view : NULL;
    t.norm_weight = &s->norm_weight.view;
    t.cos_sin = &s->cos_sin.view;
    t.out = &o;
    t.pooled = &p;
    if (dsv4_states_append(states, ctx, &slot, &count, 1, &t) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
}

/* Pieces from one token to a few thousand, with roll-backs between them. */
static void append_all(const stream *s, quern_context *ctx, test_random *random)
{
    test_tensor out = dsv4_weight_rows(random, QUERN_F32, s->entries + 1, WIDTH),
                pooled = dsv4_weight_rows(random, QUERN_F32, s->entries + 1, WIDTH);
    dsv4_states states = dsv4_states_make(&s->params, WIDTH, RING, 1);
    while (states.position[0] < TOKENS) {
        static const int64_t sizes[] = {7, 130, 900, 3000};
        const int64_t left = TOKENS - states.position[0], most = sizes[test_random_int(random, 0, 3)],
                      count = test_random_int(random, 1, left < most ? left : most);
        append(s, ctx, &states, count, &out, &pooled);
        if (count < left && test_random_one_in(random, 3))
            states.position[0] -= (int32_t)test_random_int(random, 0, dsv4_states_held(&states, 0));
    }
    out.view.shape[0] = pooled.view.shape[0] = s->entries;
    assert_true(test_tensor_same_bits(&s->out, &out) && test_tensor_same_bits(&s->pooled, &pooled));
    out.view.shape[0] = pooled.view.shape[0] = s->entries + 1;
    dsv4_states_free(&states);
    test_tensor_free(&out), test_tensor_free(&pooled);
}

static void pieces_give_the_bits_of_one_shot(void **state)
{
    static const struct {
        quern_dsv4_kind kind;
        int64_t ratio;
    } compressors[] = {{QUERN_DSV4_CSA, 4}, {QUERN_DSV4_CSA, 7}, {QUERN_DSV4_HCA, 128}, {QUERN_DSV4_HCA, 3}};
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    (void)state;
    for (int n = 0; n < 4 * 3 * 2; n++) {
        test_random random = {(uint64_t)n + 5};
        stream s = stream_make(&random, compressors[n % 4].kind, compressors[n % 4].ratio, dtypes[n / 4 % 3],
                               n / 12 == 1);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            if (!test_in_share((uint64_t)n * 5 + (uint64_t)level)) continue;
            quern_context *one = test_context(level, 3), *many = test_context(level, 2);
            one_shot(&s, one);
            append_all(&s, many, &random);
            quern_context_destroy(one), quern_context_destroy(many);
        }
        test_tensor *all[] = {&s.rows, &s.w, &s.b_a, &s.b_b, &s.norm_weight, &s.cos_sin, &s.out, &s.pooled};
        for (int i = 0; i < 8; i++) test_tensor_free(all[i]);
    }
}

/* ---- batches, by the oracle ---- */

enum { BATCH = 3, SPARE = 9, HIDDEN = 5, NARROW = 8 };

static void make(dsv4_case *c, test_random *random, dsv4_tensor which, int32_t ndim, const int64_t *shape)
{
    c->t[which] = test_tensor_make(random, QUERN_F32, ndim, shape,
                                   (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    test_tensor_normal(&c->t[which], random, which == DSV4_W ? 0.5 : 1);
}

static void make_i32(dsv4_case *c, test_random *random, dsv4_tensor which, int64_t count,
                     const int32_t *values)
{
    c->t[which] = test_tensor_make(random, QUERN_I32, 1, &count, TEST_UNALIGNED);
    test_tensor_set_i32(&c->t[which], values);
}

/* Three sequences from hidden states: a long one with a block before it, a short one, a long one without. */
static dsv4_case varlen_case(test_random *random, bool csa, int64_t ratio)
{
    const int32_t cu[] = {0, 3333, 3338, 5115}, starts[] = {3, 0, 1}, prev[] = {1, 1, 0},
                  positions[] = {(int32_t)(2 * ratio), 0, (int32_t)ratio};
    dsv4_case c;
    memset(&c, 0, sizeof c);
    c.shape = (oracle_compressor){.ratio = ratio,
                                  .width = NARROW,
                                  .overlap = csa,
                                  .rope_dim = 4,
                                  .rope_last = ratio % 2 == 1,
                                  .eps = 1e-6};
    c.kind = DSV4_VARLEN;
    c.batch = BATCH;
    c.tokens = cu[BATCH] + SPARE;
    c.in = HIDDEN;
    c.max_pos = 3333 + 3 * ratio;
    const int64_t columns = (csa ? 4 : 2) * NARROW, x[] = {c.tokens, HIDDEN}, w[] = {HIDDEN, columns},
                  bias[] = {ratio, NARROW}, before[] = {BATCH, ratio, 2 * NARROW}, norm[] = {NARROW},
                  table[] = {c.max_pos, 4}, out[] = {c.tokens / ratio, NARROW};
    const struct {
        dsv4_tensor which;
        int32_t ndim;
        const int64_t *shape;
        bool csa;
    } made[] = {{DSV4_X, 2, x, false},
                {DSV4_W, 2, w, false},
                {DSV4_BIAS_A, 2, bias, false},
                {DSV4_BIAS_B, 2, bias, true},
                {DSV4_PREV_B, 3, before, true},
                {DSV4_NORM_WEIGHT, 1, norm, false},
                {DSV4_COS_SIN, 2, table, false},
                {DSV4_POOLED, 2, out, false},
                {DSV4_OUT, 2, out, false},
                {DSV4_D_OUT, 2, out, false},
                {DSV4_D_X, 2, x, false},
                {DSV4_D_W, 2, w, false},
                {DSV4_D_BIAS_A, 2, bias, false},
                {DSV4_D_BIAS_B, 2, bias, true},
                {DSV4_D_PREV_B, 3, before, true},
                {DSV4_D_NORM_WEIGHT, 1, norm, false}};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++)
        if (csa || !made[i].csa) make(&c, random, made[i].which, made[i].ndim, made[i].shape);
    make_i32(&c, random, DSV4_CU_SEQLENS, BATCH + 1, cu);
    make_i32(&c, random, DSV4_START_TOKENS, BATCH, starts);
    make_i32(&c, random, DSV4_START_POSITIONS, BATCH, positions);
    if (csa) make_i32(&c, random, DSV4_HAS_PREV, BATCH, prev);
    return c;
}

static void long_batches(void **state)
{
    static const int64_t ratios[] = {4, 7, 128};
    (void)state;
    for (int n = 0; n < 6; n++) {
        test_random random = {(uint64_t)n + 60};
        dsv4_case c = varlen_case(&random, n % 2 == 0, ratios[n / 2]);
        dsv4_case_reference(&c, NULL);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            dsv4_case_run(&c, ctx);
            dsv4_case_check(&c);
            quern_context_destroy(ctx);
        }
        dsv4_case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pieces_give_the_bits_of_one_shot),
                                       cmocka_unit_test(long_batches)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
