/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index_case.c - calls of the block indexer. */
#include "nsa_index_case.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/nsa.h"

#include <math.h>
#include <stdlib.h>

int64_t block_index_query0(const block_index_shape *shape, int64_t b)
{
    int64_t at = shape->varlen ? 0 : b * shape->n[0];
    for (int64_t i = 0; shape->varlen && i < b; i++) at += shape->n[i];
    return at;
}

int64_t block_index_key0(const block_index_shape *shape, int64_t b)
{
    int64_t at = shape->varlen ? 0 : b * shape->s[0];
    for (int64_t i = 0; shape->varlen && i < b; i++) at += shape->s[i];
    return at;
}

static void fill_starts(block_index_case *c)
{
    int32_t starts[2][BLOCK_INDEX_BATCH + 1];
    for (int64_t b = 0; b <= c->shape.batch; b++) {
        starts[0][b] = (int32_t)block_index_query0(&c->shape, b);
        starts[1][b] = (int32_t)block_index_key0(&c->shape, b);
    }
    test_tensor_set_i32(&c->t[BLOCK_INDEX_CU_Q], starts[0]);
    test_tensor_set_i32(&c->t[BLOCK_INDEX_CU_KV], starts[1]);
}

block_index_case block_index_case_make(const block_index_shape *shape, test_random *random)
{
    const quern_nsa_index_params *p = &shape->params;
    const bool varlen = shape->varlen;
    const int64_t b = shape->batch, k = p->num_selected, lists = shape->lists,
                  n = varlen ? block_index_query0(shape, b) + shape->spare : shape->n[0],
                  s = varlen ? block_index_key0(shape, b) + shape->spare : shape->s[0],
                  rows = varlen ? n + b : n, blocks = (s + p->select_block - 1) / p->select_block;
    block_index_case c = {.shape = *shape, .list_rows = rows};
    const struct {
        quern_dtype dtype;
        int32_t ndim;
        int64_t extent[4];
    } all[BLOCK_INDEX_TENSORS] = {
        {shape->dtype, 4, {b, n, lists, shape->d}},
        {shape->dtype, shape->shared ? 3 : 4, {b, s, shape->shared ? shape->d : lists, shape->d}},
        {QUERN_I32, 2, {0, b + 1}},
        {QUERN_I32, 2, {0, b + 1}},
        {QUERN_I32, 4, {b, lists, rows, k}},
        {QUERN_I32, 3, {b, lists, rows}},
        {QUERN_F32, 4, {b, lists, n, blocks}}};
    for (int i = 0; i < BLOCK_INDEX_TENSORS; i++) {
        const bool starts = i == BLOCK_INDEX_CU_Q || i == BLOCK_INDEX_CU_KV, cut = varlen || starts;
        if ((starts && !varlen) || (i == BLOCK_INDEX_SCORE && !shape->scores)) continue;
        c.t[i] = test_tensor_make(random, all[i].dtype, all[i].ndim - cut, all[i].extent + cut,
                                  starts ? TEST_CONTIGUOUS : shape->layout);
        if (i <= BLOCK_INDEX_K) test_tensor_normal(&c.t[i], random, 1);
    }
    if (varlen) fill_starts(&c);
    return c;
}

void block_index_case_free(block_index_case *c)
{
    for (int i = 0; i < BLOCK_INDEX_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
}

void block_index_case_run(block_index_case *c, quern_context *ctx)
{
    quern_nsa_index_tensors t = QUERN_NSA_INDEX_TENSORS_INIT;
    for (int i = BLOCK_INDEX_IDX; i < BLOCK_INDEX_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_reset(&c->t[i]);
    op_case_bind("nsa-index", c->t, BLOCK_INDEX_TENSORS, OP_CASE_ALL, &t);
    op_case_run(ctx, "nsa-index", QUERN_OP_FORWARD, &c->shape.params, &t, c->t, BLOCK_INDEX_TENSORS);
}

typedef struct results {
    double *q, *k, *score, *expected; /* scores; NULL where the case has none */
    int32_t *idx, *count;
} results;

/* One list of row t of sequence b. */
static void check_list(const block_index_case *c, const results *x, int64_t b, int64_t list, int64_t t,
                       oracle_choice *choices, const char *what)
{
    const block_index_shape *h = &c->shape;
    const int64_t i = h->varlen ? b : 0, keys = h->shared ? 1 : h->lists, k = h->params.num_selected,
                  blocks = (h->s[i] + h->params.select_block - 1) / h->params.select_block,
                  row = h->varlen ? list * c->list_rows + block_index_query0(h, b) + t
                                  : (b * h->lists + list) * c->list_rows + t;
    const oracle_nsa_index oracle = {h->params, h->n[i], h->s[i], h->lists, h->d, h->shared};
    char why[200] = "";
    oracle_nsa_index_choices(&oracle, x->q + block_index_query0(h, b) * h->lists * h->d,
                             x->k + block_index_key0(h, b) * keys * h->d, list, t, choices);
    int32_t *expected = malloc((size_t)k * sizeof *expected);
    if (!oracle_nsa_accepts(choices, blocks, k, x->idx + row * k, why) ||
        x->count[row] != oracle_nsa_pick(choices, blocks, k, expected))
        fail_msg("%s: sequence %lld list %lld row %lld, count %d: %s", what, (long long)b, (long long)list,
                 (long long)t, x->count[row], why);
    free(expected);
    for (int64_t j = 0; x->score != NULL && j < blocks; j++) x->expected[row * blocks + j] = choices[j].score;
}

void block_index_case_check(const block_index_case *c, const char *what)
{
    const block_index_shape *h = &c->shape;
    const int64_t scores = h->scores ? test_tensor_count(&c->t[BLOCK_INDEX_SCORE]) : 0;
    const results x = {test_tensor_get(&c->t[BLOCK_INDEX_Q]),
                       test_tensor_get(&c->t[BLOCK_INDEX_K]),
                       h->scores ? test_tensor_get(&c->t[BLOCK_INDEX_SCORE]) : NULL,
                       h->scores ? test_doubles(scores) : NULL,
                       test_tensor_get_i32(&c->t[BLOCK_INDEX_IDX]),
                       test_tensor_get_i32(&c->t[BLOCK_INDEX_COUNT])};
    const int64_t k = h->params.num_selected;
    int64_t longest = 0;
    for (int64_t b = 0; b < BLOCK_INDEX_BATCH; b++) longest = h->s[b] > longest ? h->s[b] : longest;
    oracle_choice *choices = malloc((size_t)(longest + 1) * sizeof *choices);
    for (int64_t b = 0; b < h->batch; b++)
        for (int64_t list = 0; list < h->lists; list++)
            for (int64_t t = 0; t < h->n[h->varlen ? b : 0]; t++)
                check_list(c, &x, b, list, t, choices, what);
    if (h->scores)
        test_check("block_score", x.score, x.expected, scores, h->dtype == QUERN_F32 ? 2e-6 : 1e-5);
    for (int64_t list = 0; h->varlen && list < h->lists; list++)
        for (int64_t r = block_index_query0(h, h->batch); r < c->list_rows; r++) {
            assert_int_equal(x.count[list * c->list_rows + r], 0);
            for (int64_t e = 0; e < k; e++) assert_int_equal(x.idx[(list * c->list_rows + r) * k + e], -1);
        }
    free(choices), free(x.q), free(x.k), free(x.score), free(x.expected), free(x.idx), free(x.count);
}
