/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_nsa_test.c - the float64 NSA oracle: its gradients against central differences for every
 * compression and gate, selections worked by hand, and its judgement of lists. */
#include "cmocka_c11.h"
#include "oracle/nsa.h"
#include "tensor.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 14 };
static const char *const input_names[INPUTS] = {"q",     "k",     "v",   "k_slc", "v_slc", "k_win", "v_win",
                                                "k_cmp", "v_cmp", "w_k", "w_v",   "pe_k",  "pe_v",  "w_gate"};

typedef struct problem {
    oracle_nsa a;
    bool project, pe, separate;
    int64_t counts[INPUTS + 1]; /* the last: gates handed in */
    double *x[INPUTS + 1], *grad[INPUTS + 1];
    double *d_o;
    int32_t *block_idx, *block_count, *group_idx;
} problem;

static void size_inputs(problem *p)
{
    const oracle_nsa *a = &p->a;
    const bool given = a->params.compress == QUERN_NSA_COMPRESS_GIVEN;
    const bool linear = a->params.compress == QUERN_NSA_COMPRESS_LINEAR;
    const int64_t l = a->params.block_size, nc = oracle_nsa_entries(a), rows = a->n * a->hkv;
    const int64_t w = linear ? l : p->project ? 1 : 0;
    const int64_t counts[INPUTS + 1] = {
        a->n * a->h * a->d,
        rows * a->d,
        rows * a->dv,
        p->separate ? rows * a->d : 0,
        p->separate ? rows * a->dv : 0,
        p->separate ? rows * a->d : 0,
        p->separate ? rows * a->dv : 0,
        given ? nc * a->hkv * a->d : 0,
        given ? nc * a->hkv * a->dv : 0,
        a->hkv * w * a->d * a->d,
        a->hkv * w * a->dv * a->dv,
        p->pe ? a->hkv * l * a->d : 0,
        p->pe ? a->hkv * l * a->dv : 0,
        a->params.gate == QUERN_NSA_GATE_WEIGHTS ? a->h * 3 * a->d : 0,
        a->params.gate == QUERN_NSA_GATE_GIVEN ? a->n * a->h * 3 : 0,
    };
    memcpy(p->counts, counts, sizeof counts);
}

/* The arrays of a call on inputs x; *owned are to be freed. */
static oracle_nsa_arrays bind(const problem *p, double *const *x, double *owned[10])
{
    const oracle_nsa *a = &p->a;
    const int64_t nc = oracle_nsa_entries(a), out = a->n * a->h * a->dv;
    for (int i = 0; i < 3; i++) {
        owned[i] = test_doubles(out);
        owned[3 + i] = test_doubles(a->n * a->h);
    }
    owned[6] = test_doubles(out);
    owned[7] = test_doubles(a->n * a->h * 3);
    owned[8] = test_doubles(nc * a->hkv * a->d);
    owned[9] = test_doubles(nc * a->hkv * a->dv);
    const oracle_nsa_arrays b = {
        .q = x[0],
        .k = x[1],
        .v = x[2],
        .k_slc = x[3],
        .v_slc = x[4],
        .k_win = x[5],
        .v_win = x[6],
        .k_cmp = x[7] != NULL ? x[7] : owned[8],
        .v_cmp = x[8] != NULL ? x[8] : owned[9],
        .w_k = x[9],
        .w_v = x[10],
        .pe_k = x[11],
        .pe_v = x[12],
        .w_gate = x[13],
        .gates = x[14] != NULL ? x[14] : owned[7],
        .block_idx = p->block_idx,
        .group_idx = p->group_idx,
        .o = owned[6],
        .o_b = {owned[0], owned[1], owned[2]},
        .lse_b = {owned[3], owned[4], owned[5]},
        .d_o = p->d_o,
    };
    if (x[7] == NULL) {
        oracle_nsa_compress(a, a->d, b.k, b.w_k, b.pe_k, owned[8]);
        oracle_nsa_compress(a, a->dv, b.v, b.w_v, b.pe_v, owned[9]);
    }
    return b;
}

static double loss(const problem *p)
{
    double *owned[10], sum = 0;
    const oracle_nsa_arrays b = bind(p, p->x, owned);
    oracle_nsa_forward(&p->a, &b);
    for (int64_t i = 0; i < p->a.n * p->a.h * p->a.dv; i++) sum += b.o[i] * p->d_o[i];
    for (int i = 0; i < 10; i++) free(owned[i]);
    return sum;
}

static void check_gradients(problem *p, test_random *random)
{
    const oracle_nsa *a = &p->a;
    const int64_t lists = oracle_nsa_lists(a) * oracle_nsa_tiles(a);
    double *owned[10];
    size_inputs(p);
    for (int i = 0; i <= INPUTS; i++) {
        p->x[i] = p->counts[i] > 0 ? test_doubles(p->counts[i]) : NULL;
        p->grad[i] = p->counts[i] > 0 ? test_doubles(p->counts[i]) : NULL;
        for (int64_t j = 0; j < p->counts[i]; j++)
            p->x[i][j] = i == INPUTS ? test_random_uniform(random) : test_random_normal(random);
    }
    p->d_o = test_doubles(a->n * a->h * a->dv);
    for (int64_t i = 0; i < a->n * a->h * a->dv; i++) p->d_o[i] = test_random_normal(random);
    p->block_idx = malloc(sizeof(int32_t) * (size_t)(lists * a->params.num_selected));
    p->group_idx = malloc(sizeof(int32_t) * (size_t)(lists * (a->params.max_compressed_groups + 1)));
    oracle_nsa_arrays b = bind(p, p->x, owned);
    oracle_nsa_select(a, b.q, b.k_cmp, 0, p->block_idx, NULL, p->group_idx);
    oracle_nsa_forward(a, &b);
    double *d_k_cmp = test_doubles(oracle_nsa_entries(a) * a->hkv * a->d);
    double *d_v_cmp = test_doubles(oracle_nsa_entries(a) * a->hkv * a->dv);
    b.d_q = p->grad[0];
    b.d_k = p->grad[1];
    b.d_v = p->grad[2];
    b.d_k_slc = p->grad[3];
    b.d_v_slc = p->grad[4];
    b.d_k_win = p->grad[5];
    b.d_v_win = p->grad[6];
    b.d_k_cmp = p->grad[7] != NULL ? p->grad[7] : d_k_cmp;
    b.d_v_cmp = p->grad[8] != NULL ? p->grad[8] : d_v_cmp;
    b.d_w_k = p->grad[9];
    b.d_w_v = p->grad[10];
    b.d_pe_k = p->grad[11];
    b.d_pe_v = p->grad[12];
    b.d_w_gate = p->grad[13];
    b.d_gates = p->grad[14];
    oracle_nsa_backward(a, &b);
    for (int i = 0; i <= INPUTS; i++) {
        const int64_t sampled = p->counts[i] < 24 ? p->counts[i] : 24;
        for (int64_t s = 0; s < sampled; s++) {
            const int64_t j = test_random_int(random, 0, p->counts[i] - 1);
            const double step = 1e-5, value = p->x[i][j];
            p->x[i][j] = value + step;
            const double above = loss(p);
            p->x[i][j] = value - step;
            const double difference = (above - loss(p)) / (2 * step);
            p->x[i][j] = value;
            if (!(fabs(difference - p->grad[i][j]) <= 1e-7 * (1 + fabs(difference))))
                fail_msg("d_%s, entry %lld: gradient %.12g, difference %.12g",
                         i < INPUTS ? input_names[i] : "gates", (long long)j, p->grad[i][j], difference);
        }
    }
    for (int i = 0; i < 10; i++) free(owned[i]);
    for (int i = 0; i <= INPUTS; i++) {
        free(p->x[i]);
        free(p->grad[i]);
    }
    free(d_k_cmp);
    free(d_v_cmp);
    free(p->d_o);
    free(p->block_idx);
    free(p->group_idx);
}

static problem base_problem(void)
{
    problem p = {.a = {QUERN_NSA_PARAMS_INIT, 27, 4, 2, 3, 2}};
    p.a.params.block_size = 4;
    p.a.params.num_selected = 3;
    p.a.params.window = 5;
    return p;
}

static void gradients_match_central_differences(void **state)
{
    test_random random = {test_seed("gradients_match_central_differences", 4)};
    (void)state;
    problem p = base_problem();
    check_gradients(&p, &random); /* mean, no gate */
    p.project = true;
    p.a.params.gate = QUERN_NSA_GATE_WEIGHTS;
    p.a.params.tile = 3;
    check_gradients(&p, &random);
    p.a.params.scope = QUERN_NSA_SCOPE_HEAD;
    p.a.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    p.a.params.compressed_visibility = QUERN_NSA_VISIBLE_STARTED;
    p.separate = true;
    check_gradients(&p, &random);
    p = base_problem(); /* linear with overlapping blocks */
    p.a.params.stride = 2;
    p.a.params.select_block = 6;
    p.a.params.compress = QUERN_NSA_COMPRESS_LINEAR;
    p.a.params.gate = QUERN_NSA_GATE_GIVEN;
    check_gradients(&p, &random);
    p.pe = true;
    p.separate = true;
    check_gradients(&p, &random);
    p = base_problem();
    p.a.params.compress = QUERN_NSA_COMPRESS_GIVEN;
    p.a.params.gate = QUERN_NSA_GATE_WEIGHTS;
    p.a.params.causal = false;
    p.a.params.scale = 0.5f;
    check_gradients(&p, &random);
    p = base_problem(); /* some groups of compressed entries left out */
    p.a.n = 300;
    p.a.h = 2;
    p.a.params.block_size = 1;
    p.a.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    p.a.params.max_compressed_groups = 2;
    check_gradients(&p, &random);
}

/* One query head, d = 1, scale 1, so that scores are products of two numbers. */
static oracle_nsa scalar_problem(int64_t n, int64_t block, int64_t k)
{
    oracle_nsa a = {QUERN_NSA_PARAMS_INIT, n, 1, 1, 1, 1};
    a.params.block_size = block;
    a.params.num_selected = k;
    a.params.scale = 1;
    return a;
}

static void selection_by_hand(void **state)
{
    oracle_nsa a = scalar_problem(12, 2, 3);
    const double ones[12] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, k_cmp[6] = {0, 5, 1, 3, 2, 9};
    int32_t idx[12 * 3], count[12];
    (void)state;
    a.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    oracle_nsa_select(&a, ones, k_cmp, 0, idx, count, NULL);
    /* Query 11 stands in block 5: forced 0, 4, 5. Query 0: block 0 alone. Query 7 (block 3): 0, 2, 3. */
    assert_memory_equal(idx + 33, ((int32_t[]){0, 4, 5}), 12);
    assert_memory_equal(idx, ((int32_t[]){0, -1, -1}), 12);
    assert_memory_equal(idx + 21, ((int32_t[]){0, 2, 3}), 12);
    assert_true(count[0] == 1 && count[2] == 2 && count[11] == 3);
    /* Nothing forced: the best blocks whose entries are complete; block 5 is complete at query 11 only. */
    a.params.forced_first = a.params.forced_local = 0;
    oracle_nsa_select(&a, ones, k_cmp, 0, idx, count, NULL);
    assert_memory_equal(idx + 33, ((int32_t[]){1, 3, 5}), 12);
    assert_memory_equal(idx + 30, ((int32_t[]){1, 3, 4}), 12);
    /* Query 4: blocks 0 and 1 count; block 2 has begun, scores -inf and fills last. */
    assert_memory_equal(idx + 12, ((int32_t[]){0, 1, 2}), 12);
    a.params.num_selected = 2;
    oracle_nsa_select(&a, ones, k_cmp, 0, idx, count, NULL);
    assert_memory_equal(idx + 8, ((int32_t[]){0, 1}), 8);
    /* A tie goes to the lower index. */
    const double tied[6] = {7, 1, 7, 7, 7, 7};
    oracle_nsa_select(&a, ones, tied, 0, idx, count, NULL);
    assert_memory_equal(idx + 22, ((int32_t[]){0, 2}), 8);
}

static void overlap_reaches_back(void **state)
{
    /* l = 4, d = 2, l' = 4: block J overlaps the entries 2J - 1, 2J, 2J + 1 (2J twice). Entry 3 (tokens
     * 6 ... 9) takes all the mass, so blocks 1 and 2 score 1, and the entry 4 beside it nothing. */
    oracle_nsa a = scalar_problem(16, 4, 1);
    const double q[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const double k_cmp[7] = {0, 0, 0, 800, 0, 0, 0};
    oracle_choice choices[4];
    (void)state;
    a.params.stride = 2;
    oracle_nsa_block_choices(&a, q, k_cmp, 0, 15, choices);
    assert_true(choices[0].score == 0 && choices[1].score == 1 && choices[2].score == 1 &&
                choices[3].score == 0);
    const double other[7] = {0, 0, 800, 0, 0, 0, 0};
    oracle_nsa_block_choices(&a, q, other, 0, 15, choices);
    assert_true(choices[0].score == 0 && choices[1].score == 2 && choices[2].score == 0);
}

static void judgement_follows_the_rule(void **state)
{
    const oracle_choice clear[] = {{3, true, false, true},
                                   {1, true, false, true},
                                   {2, true, false, true},
                                   {0, true, true, true},
                                   {9, false, false, true}};
    const oracle_choice close[] = {{1, true, false, true},
                                   {1 + 1e-6, true, false, true},
                                   {3, true, false, true},
                                   {0, true, false, false},
                                   {0, true, false, false}};
    const oracle_choice none[] = {{-INFINITY, true, false, false},
                                  {-INFINITY, true, false, false},
                                  {2, true, false, true},
                                  {NAN, true, false, true}};
    char why[200];
    (void)state;
    assert_true(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 2, 3}, why));
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 1, 3}, why));  /* 1 scores less than 2 */
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 1, 2}, why));  /* forced 3 missing */
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 3, 2}, why));  /* not ascending */
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 3, -1}, why)); /* too few */
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 3, 4}, why));  /* no candidate */
    assert_false(oracle_nsa_accepts(clear, 5, 3, (int32_t[]){0, 3, 3}, why));  /* twice */
    assert_true(oracle_nsa_accepts(close, 5, 2, (int32_t[]){0, 2}, why));
    assert_true(oracle_nsa_accepts(close, 5, 2, (int32_t[]){1, 2}, why));
    assert_false(oracle_nsa_accepts(close, 5, 2, (int32_t[]){0, 1}, why));
    assert_true(oracle_nsa_accepts(close, 5, 4, (int32_t[]){0, 1, 2, 3}, why));
    assert_false(oracle_nsa_accepts(close, 5, 4, (int32_t[]){0, 1, 2, 4}, why)); /* lowest first */
    assert_true(oracle_nsa_accepts(none, 4, 2, (int32_t[]){0, 2}, why));
    assert_false(oracle_nsa_accepts(none, 4, 2, (int32_t[]){1, 2}, why));
    assert_false(oracle_nsa_accepts(none, 4, 2, (int32_t[]){2, 3}, why)); /* NaN comes after -inf */
}

static void lists_convert_by_hand(void **state)
{
    const int32_t in[] = {5, 2, -1, 2, 99, -7};
    int32_t out[12];
    (void)state;
    assert_int_equal(oracle_nsa_list_convert(in, 6, 64, out, 12, 32, 350), 3); /* block 11 starts at 352 */
    assert_memory_equal(out, ((int32_t[]){4, 5, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1}), sizeof out);
    assert_int_equal(oracle_nsa_list_convert(in, 6, 16, out, 6, 64, 90), 2);
    assert_memory_equal(out, ((int32_t[]){0, 1, -1, -1, -1, -1}), 24);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_central_differences),
        cmocka_unit_test(selection_by_hand),
        cmocka_unit_test(overlap_reaches_back),
        cmocka_unit_test(judgement_follows_the_rule),
        cmocka_unit_test(lists_convert_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
