/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_dsv4_attend_test.c - the float64 oracle of the indexer and the attention core against golden
 * vectors, central differences, and cases worked by hand. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void golden_scores(void **state)
{
    (void)state;
    dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, 0);
    const oracle_indexer *x = &l.indexer;
    const int64_t n = x->queries * x->entries, k = l.core.chosen;
    for (int64_t b = 0; b < DSV4_LAYER_BATCH; b++) {
        double *scores = test_doubles(n), *expected = test_doubles(n);
        oracle_dsv4_scores(x, l.idx_q + b * x->queries * x->heads * x->width,
                           l.idx_k + b * x->entries * x->width, l.idx_w + b * x->queries * x->heads, scores);
        for (int64_t t = 0; t < x->queries; t++) {
            const int64_t seen = oracle_dsv4_visible(x->entries, x->ratio, t);
            int32_t best[8];
            memcpy(expected + t * x->entries, l.idx_score + b * n + t * x->entries,
                   (size_t)seen * sizeof *expected);
            const int64_t count = oracle_dsv4_best(scores + t * x->entries, seen, k, best);
            const int32_t *golden = l.idx + (b * x->queries + t) * k;
            int64_t found = 0, chosen = 0;
            for (int64_t i = 0; i < k; i++) {
                chosen += golden[i] >= 0;
                for (int64_t j = 0; j < count; j++) found += golden[i] == best[j];
            }
            assert_int_equal(count, seen < k ? seen : k);
            assert_int_equal(chosen, count);
            assert_int_equal(found, count);
        }
        test_check_golden("idx.score", scores, expected, n, DSV4_TINY_BOUND);
        free(scores), free(expected);
    }
    dsv4_layer_free(&l);
}

static void golden_cores(void **state)
{
    (void)state;
    for (int i = 0; i < DSV4_LAYERS; i++) {
        dsv4_layer l = dsv4_layer_read(QUERN_TEST_VECTORS, i);
        const oracle_core *c = &l.core;
        const int64_t n = c->queries * c->heads * c->dim;
        for (int64_t b = 0; b < DSV4_LAYER_BATCH; b++) {
            const oracle_core_arrays x = {.q = l.q + b * n,
                                          .kv = l.kv + b * c->raw * c->dim,
                                          .kv_cmp =
                                              l.kv_cmp != NULL ? l.kv_cmp + b * c->entries * c->dim : NULL,
                                          .sink = l.sink,
                                          .cos_sin = l.cos_sin,
                                          .idx = l.idx != NULL ? l.idx + b * c->queries * c->chosen : NULL,
                                          .o = test_doubles(n),
                                          .lse = test_doubles(c->heads * c->queries)};
            oracle_dsv4_attend(c, &x);
            test_check_golden(l.name, x.o, l.o + b * n, n, DSV4_TINY_BOUND);
            free(x.o), free(x.lse);
        }
        dsv4_layer_free(&l);
    }
}

enum { INPUTS = 4 }; /* q, kv, kv_cmp, sink */

typedef struct problem {
    oracle_core c;
    int64_t counts[INPUTS];
    double *x[INPUTS], *grad[INPUTS], *cos_sin, *d_o;
    int32_t *idx, *count;
} problem;

static oracle_core_arrays arrays_of(const problem *p, double *o, double *lse)
{
    return (oracle_core_arrays){.q = p->x[0],
                                .kv = p->x[1],
                                .kv_cmp = p->x[2],
                                .sink = p->x[3],
                                .cos_sin = p->cos_sin,
                                .idx = p->idx,
                                .count = p->count,
                                .o = o,
                                .lse = lse,
                                .d_o = p->d_o,
                                .d_q = p->grad[0],
                                .d_kv = p->grad[1],
                                .d_kv_cmp = p->grad[2],
                                .d_sink = p->grad[3]};
}

static double loss(const problem *p)
{
    const int64_t n = p->c.queries * p->c.heads * p->c.dim;
    double *o = test_doubles(n), *lse = test_doubles(p->c.heads * p->c.queries), sum = 0;
    const oracle_core_arrays x = arrays_of(p, o, lse);
    oracle_dsv4_attend(&p->c, &x);
    for (int64_t i = 0; i < n; i++) sum += o[i] * p->d_o[i];
    free(o), free(lse);
    return sum;
}

static problem random_problem(test_random *random, int trial)
{
    problem p = {.c = {.queries = 9,
                       .raw = 9 + trial % 3 * 2,
                       .entries = 4,
                       .heads = 2,
                       .dim = 8,
                       .window = 3 + trial % 4,
                       .ratio = 3,
                       .start = trial % 3 * 2,
                       .rope_dim = 4,
                       .chosen = trial % 2 ? 3 : -1}};
    if (trial % 5 == 4) {
        p.c.raw = 6;
        p.c.start = 3;
    } /* the first queries see no row of their own */
    const int64_t counts[INPUTS] = {9 * 2 * 8, p.c.raw * 8, trial % 7 ? 4 * 8 : 0, trial % 3 ? 2 : 0};
    memcpy(p.counts, counts, sizeof counts);
    for (int i = 0; i < INPUTS; i++) {
        p.x[i] = counts[i] > 0 ? test_doubles(counts[i]) : NULL;
        p.grad[i] = counts[i] > 0 ? test_doubles(counts[i]) : NULL;
        for (int64_t k = 0; k < counts[i]; k++) p.x[i][k] = test_random_normal(random);
    }
    p.d_o = test_doubles(9 * 2 * 8);
    for (int64_t k = 0; k < 9 * 2 * 8; k++) p.d_o[k] = test_random_normal(random);
    p.cos_sin = trial % 4 ? test_doubles(16 * 4) : NULL;
    if (p.cos_sin != NULL) oracle_dsv4_rope_table(16, 4, 100, 0, 0, 0, 0, p.cos_sin);
    if (p.c.chosen > 0) {
        p.idx = malloc(9 * 3 * sizeof *p.idx);
        p.count = malloc(9 * sizeof *p.count);
        for (int64_t i = 0; i < 9 * 3; i++) p.idx[i] = (int32_t)test_random_int(random, -1, 3);
        for (int64_t i = 0; i < 9; i++) p.count[i] = (int32_t)test_random_int(random, 0, 3);
    }
    return p;
}

static void gradients(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("gradients", 31);
    const double step = 1e-5;
    for (int trial = 0; trial < 30; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        problem p = random_problem(&random, trial);
        double *o = test_doubles(p.c.queries * p.c.heads * p.c.dim),
               *lse = test_doubles(p.c.heads * p.c.queries);
        const oracle_core_arrays x = arrays_of(&p, o, lse);
        oracle_dsv4_attend(&p.c, &x);
        oracle_dsv4_attend_backward(&p.c, &x);
        for (int i = 0; i < INPUTS; i++) {
            for (int64_t k = 0; k < p.counts[i]; k++) {
                const double kept = p.x[i][k];
                p.x[i][k] = kept + step;
                const double above = loss(&p);
                p.x[i][k] = kept - step;
                const double slope = (above - loss(&p)) / (2 * step);
                p.x[i][k] = kept;
                if (fabs(slope - p.grad[i][k]) > 1e-7 * (1 + fabs(slope)))
                    fail_msg("trial %d, input %d [%lld]: %.12g, by differences %.12g", trial, i, (long long)k,
                             p.grad[i][k], slope);
            }
        }
        for (int i = 0; i < INPUTS; i++) free(p.x[i]), free(p.grad[i]);
        free(p.d_o), free(p.cos_sin), free(p.idx), free(p.count), free(o), free(lse);
    }
}

/* Ties, NaN and too few. */
static void best_by_hand(void **state)
{
    (void)state;
    const double scores[] = {1, NAN, 3, 1, -INFINITY, 3, NAN};
    int32_t idx[9];
    assert_int_equal(oracle_dsv4_best(scores, 7, 3, idx), 3);
    assert_true(idx[0] == 0 && idx[1] == 2 && idx[2] == 5);
    assert_int_equal(oracle_dsv4_best(scores, 7, 6, idx), 6);
    assert_true(idx[0] == 0 && idx[1] == 1 && idx[4] == 4 && idx[5] == 5);
    assert_int_equal(oracle_dsv4_best(scores, 2, 4, idx), 2);
    assert_true(idx[1] == 1 && idx[2] == -1 && idx[3] == -1);
}

/* With one key the output is that key times one minus the sink's weight. With none it is 0, and the LSE
 * -inf. */
static void cores_by_hand(void **state)
{
    (void)state;
    const oracle_core c = {
        .queries = 2, .raw = 1, .heads = 1, .dim = 1, .window = 5, .ratio = 4, .start = 3, .chosen = -1};
    const double q[] = {7, 2}, kv[] = {3}, sink[] = {6};
    double o[2], lse[2], win[2];
    const oracle_core_arrays x = {.q = q, .kv = kv, .sink = sink, .o = o, .lse = lse, .lse_win = win};
    oracle_dsv4_attend(&c, &x);
    assert_true(o[0] == 0 && lse[0] == -INFINITY && win[0] == -INFINITY);
    assert_true(fabs(o[1] - 1.5) < 1e-12 && lse[1] == 6 && win[1] == 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_scores), cmocka_unit_test(golden_cores),
                                       cmocka_unit_test(gradients), cmocka_unit_test(best_by_hand),
                                       cmocka_unit_test(cores_by_hand)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
