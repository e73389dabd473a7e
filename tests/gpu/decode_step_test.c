/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * decode_step_test.c - dense attention of a step over pages in any order, on the tensor cores where pages are
 * aligned, else on the f32 cores: against the oracle, at the head dims and groups that kernels differ in, of
 * sequences that are cut into shares and such that are not. A sequence's bits are those that it has alone,
 * and those of its tokens one by one.
 */
#include "attention.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "levels.h"
#include "tensor.h"

#include <quern/cache.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 3, PAGE = QUERN_CACHE_PAGE };

typedef struct step_case {
    int64_t length[BATCH], count[BATCH]; /* of a sequence with the step's tokens, and these */
    int64_t h, hkv, d, dv, window;
    quern_dtype dtype;
    bool sink, aligned;
} step_case;

/* The step's tensors, and the sequences as the oracle takes them. */
typedef struct step {
    const step_case *c;
    quern_context *ctx;
    int64_t columns, tokens;
    test_tensor pool, q, o, lse, sink;
    int32_t slots[BATCH], positions[BATCH], cu[BATCH + 1], *table;
    double *k[BATCH], *v[BATCH], *q_of, *sink_of;
} step;

static double *rounded(test_random *random, quern_dtype dtype, int64_t n)
{
    double *x = test_doubles(n);
    for (int64_t i = 0; i < n; i++) x[i] = test_round(dtype, test_random_normal(random));
    return x;
}

/* Pages of the pool in an order of their own; what no token stands in is NaN. */
static void fill_pool(step *s, test_random *random)
{
    const step_case *c = s->c;
    const int64_t pages = BATCH * s->columns, shape[] = {pages, c->hkv, PAGE * (c->d + c->dv)};
    s->pool = test_tensor_make(random, c->dtype, 3, shape, c->aligned ? TEST_CONTIGUOUS : TEST_UNALIGNED);
    s->table = calloc((size_t)pages, sizeof *s->table);
    double *rows = test_doubles(pages * shape[1] * shape[2]);
    for (int64_t i = 0; i < pages * shape[1] * shape[2]; i++) rows[i] = (double)NAN;
    for (int64_t i = 0; i < pages; i++)
        s->table[i] = (int32_t)(i * 7 % pages); /* 7 divides no number of them */
    for (int64_t b = 0; b < BATCH; b++) {
        s->k[b] = rounded(random, c->dtype, c->length[b] * c->hkv * c->d);
        s->v[b] = rounded(random, c->dtype, c->length[b] * c->hkv * c->dv);
        for (int64_t t = 0; t < c->length[b]; t++)
            for (int64_t h = 0; h < c->hkv; h++) {
                double *page = rows + (s->table[b * s->columns + t / PAGE] * c->hkv + h) * shape[2];
                memcpy(page + t % PAGE * c->d, s->k[b] + (t * c->hkv + h) * c->d,
                       (size_t)c->d * sizeof *page);
                memcpy(page + PAGE * c->d + t % PAGE * c->dv, s->v[b] + (t * c->hkv + h) * c->dv,
                       (size_t)c->dv * sizeof *page);
            }
    }
    test_tensor_set(&s->pool, rows);
    free(rows);
}

static step step_make(const step_case *c, uint64_t seed)
{
    test_random random = {seed};
    step s = {.c = c, .ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1)};
    for (int64_t b = 0; b < BATCH; b++) {
        s.slots[b] = (int32_t)b;
        s.positions[b] = (int32_t)(c->length[b] - c->count[b]);
        s.cu[b + 1] = s.cu[b] + (int32_t)c->count[b];
        if ((c->length[b] + PAGE - 1) / PAGE > s.columns) s.columns = (c->length[b] + PAGE - 1) / PAGE;
    }
    while (s.columns % 7 == 0) s.columns++;
    s.tokens = s.cu[BATCH];
    fill_pool(&s, &random);
    const int64_t q[] = {s.tokens, c->h, c->d}, o[] = {s.tokens, c->h, c->dv}, lse[] = {c->h, s.tokens};
    s.q = test_tensor_make(&random, c->dtype, 3, q, c->aligned ? TEST_SPACED : TEST_UNALIGNED);
    s.o = test_tensor_make(&random, c->dtype, 3, o, c->aligned ? TEST_SPACED : TEST_STRIDED);
    s.lse = test_tensor_make(&random, QUERN_F32, 2, lse, TEST_STRIDED);
    s.sink = test_tensor_make(&random, QUERN_F32, 1, &c->h, TEST_CONTIGUOUS);
    s.q_of = rounded(&random, c->dtype, s.tokens * c->h * c->d);
    s.sink_of = rounded(&random, QUERN_F32, c->h);
    test_tensor_set(&s.q, s.q_of);
    test_tensor_set(&s.sink, s.sink_of);
    return s;
}

static void step_free(step *s)
{
    test_tensor_free(&s->pool), test_tensor_free(&s->q), test_tensor_free(&s->o);
    test_tensor_free(&s->lse), test_tensor_free(&s->sink);
    for (int64_t b = 0; b < BATCH; b++) free(s->k[b]), free(s->v[b]);
    free(s->table), free(s->q_of), free(s->sink_of);
    quern_context_destroy(s->ctx);
}

/* Rows [row, row + tokens) of the step in a call of `batch` sequences from b on, whose numbers these are. */
static void run(step *s, int64_t b, int64_t batch, int32_t *positions, int32_t *cu, int64_t row,
                int64_t tokens)
{
    const step_case *c = s->c;
    const int64_t more = batch + 1, table[] = {batch, s->columns};
    const quern_tensor slots = quern_tensor_contiguous(s->slots + b, QUERN_I32, 1, &batch),
                       at = quern_tensor_contiguous(positions, QUERN_I32, 1, &batch),
                       ends = quern_tensor_contiguous(cu, QUERN_I32, 1, &more),
                       pages = quern_tensor_contiguous(s->table + b * s->columns, QUERN_I32, 2, table);
    quern_tensor q = s->q.view, o = s->o.view, lse = s->lse.view;
    const int64_t size = (int64_t)quern_dtype_size(c->dtype);
    q.data = (char *)q.data + row * q.strides[0] * size;
    o.data = (char *)o.data + row * o.strides[0] * size;
    lse.data = (float *)lse.data + row * lse.strides[1];
    q.shape[0] = o.shape[0] = lse.shape[1] = tokens;
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    quern_decode_tensors t = QUERN_DECODE_TENSORS_INIT;
    p.window = c->window;
    t.q = &q;
    t.o = &o;
    t.lse = &lse;
    if (c->sink) t.sink = &s->sink.view;
    t.slots = &slots;
    t.positions = &at;
    t.cu = &ends;
    t.tokens = &s->pool.view;
    t.tokens_table = &pages;
    size_t bytes;
    if (quern_attention_decode_step_workspace(s->ctx, &p, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(s->ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_attention_decode_step(s->ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(s->ctx));
    test_workspace_close(&w);
}

static void check_oracle(const step *s, int trial)
{
    const step_case *c = s->c;
    double *o = test_doubles(s->tokens * c->h * c->dv), *lse = test_doubles(c->h * s->tokens);
    for (int64_t b = 0; b < BATCH; b++) {
        const int64_t n = c->count[b], row = s->cu[b];
        const oracle_dense dense = {.batch = 1,
                                    .nq = n,
                                    .nkv = c->length[b],
                                    .h = c->h,
                                    .hkv = c->hkv,
                                    .d = c->d,
                                    .dv = c->dv,
                                    .causal = true,
                                    .window = c->window,
                                    .query_offset = -1};
        const oracle_sinks sinks = {s->sink_of, NULL, NULL};
        const oracle_dense_extras extras = {c->sink ? &sinks : NULL, NULL, NULL};
        double *own = test_doubles(c->h * n);
        oracle_dense_forward_with(&dense, &extras, s->q_of + row * c->h * c->d, s->k[b], s->v[b],
                                  o + row * c->h * c->dv, own);
        for (int64_t h = 0; h < c->h; h++)
            memcpy(lse + h * s->tokens + row, own + h * n, (size_t)n * sizeof *own);
        free(own);
    }
    char name[160];
    snprintf(name, sizeof name, "o [%d: %s, H %d/%d D %d/%d W %d]", trial, quern_dtype_name(c->dtype),
             (int)c->h, (int)c->hkv, (int)c->d, (int)c->dv, (int)c->window);
    double *got = test_tensor_get(&s->o), *got_lse = test_tensor_get(&s->lse);
    test_check(name, got, o, s->tokens * c->h * c->dv, test_forward_bound(c->dtype));
    test_check("lse", got_lse, lse, c->h * s->tokens, test_forward_bound(QUERN_F32));
    free(o), free(lse), free(got), free(got_lse);
}

static void check(const step_case *c, int trial)
{
    step s = step_make(c, (uint64_t)trial + 400);
    run(&s, 0, BATCH, s.positions, s.cu, 0, s.tokens);
    check_oracle(&s, trial);
    test_tensor first = test_tensor_copy(&s.o);
    for (int64_t b = 0; b < BATCH; b++) {
        int32_t cu[] = {0, (int32_t)c->count[b]};
        run(&s, b, 1, s.positions + b, cu, s.cu[b], c->count[b]);
    }
    assert_true(test_tensor_same_bits(&first, &s.o));
    for (int64_t b = 0; b < BATCH; b++)
        for (int32_t i = 0; i < c->count[b] && c->count[b] <= 8; i++) {
            int32_t cu[] = {0, 1}, position = s.positions[b] + i;
            run(&s, b, 1, &position, cu, s.cu[b] + i, 1);
        }
    assert_true(test_tensor_same_bits(&first, &s.o));
    test_tensor_check_guards(&s.o, "o"), test_tensor_check_guards(&s.lse, "lse");
    test_tensor_free(&first);
    step_free(&s);
}

static void steps_are_those_of_the_whole(void **state)
{
    static const struct {
        int64_t h, hkv, d, dv;
    } shapes[] = {{8, 2, 128, 128}, {8, 2, 64, 64},  {4, 4, 128, 64}, {17, 1, 64, 128}, {6, 2, 192, 128},
                  {4, 1, 256, 256}, {32, 2, 40, 72}, {5, 1, 96, 88},  {4, 2, 512, 264}};
    static const quern_dtype dtypes[] = {QUERN_BF16, QUERN_F16, QUERN_F32};
    (void)state;
    for (int trial = 0; trial < 36; trial++) {
        const int shape = trial % 9;
        step_case c = {.length = {trial % 4 == 1 ? 2100 : 600, 70 + trial, 1},
                       .count = {1 + trial % 3, trial % 5 == 0 ? 12 : 1, trial % 2},
                       .h = shapes[shape].h,
                       .hkv = shapes[shape].hkv,
                       .d = shapes[shape].d,
                       .dv = shapes[shape].dv,
                       .window = trial % 3 == 2 ? 30 + 61 * trial : 0,
                       .dtype = dtypes[trial / 3 % 3],
                       .sink = trial % 2,
                       .aligned = trial % 7 != 3};
        if (trial == 10) c.length[0] = 17000; /* as many shares as there can be */
        if (trial == 11) { /* the second has more shares than a window of 16384 keys anywhere in a page */
            c.length[0] = 17000;
            c.length[1] = c.window = 16384;
        }
        check(&c, trial);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(steps_are_those_of_the_whole)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
