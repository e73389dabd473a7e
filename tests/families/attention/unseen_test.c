/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * unseen_test.c - no bit of a result depends on what it does not see: one row of one input is replaced, by
 * NaN, an infinity, huge numbers or its own negative, and every element that the oracle does not derive from
 * this row keeps its bits. The oracle, run with NaN in the row, tells which elements these are: those that
 * are not NaN.
 */
#include "attention_case.h"
#include "cmocka_c11.h"
#include "kernels.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
static const double replacements[] = {NAN, INFINITY, -INFINITY, 3e38, -1};
enum { REPLACEMENTS = sizeof replacements / sizeof *replacements, NEGATIVE = REPLACEMENTS - 1 };

/* Row `row` of `rows` of a tensor becomes the replacement in its even columns (all: where `every`). */
static void replace_row(test_tensor *t, int64_t row, int64_t rows, int kind, bool every)
{
    const int64_t width = test_tensor_count(t) / rows;
    double *x = test_tensor_get(t);
    for (int64_t i = row * width; i < (row + 1) * width; i++)
        if (every || i % 2 == 0) x[i] = kind == NEGATIVE ? -x[i] : replacements[kind];
    test_tensor_set(t, x);
    free(x);
}

static void check_unseen(const char *label, const char *name, const test_tensor *t, const double *before,
                         const double *oracle)
{
    double *after = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++)
        if (!isnan(oracle[i]) && memcmp(&after[i], &before[i], sizeof *after) != 0)
            fail_msg("%s: %s[%lld] does not see the row and was %.9g, now is %.9g", label, name, (long long)i,
                     before[i], after[i]);
    free(after);
}

/* ---- dense attention ---- */

enum { O, LSE, D_Q, D_K, D_V, RESULTS };

static void results_of(attention_case *c, test_tensor *of[RESULTS])
{
    test_tensor *const all[] = {&c->o, &c->lse, &c->d_q, &c->d_k, &c->d_v};
    memcpy(of, all, sizeof all);
}

static void run_dense(attention_case *c, quern_cpu_level level)
{
    quern_context *ctx = test_context(level, 2);
    attention_case_reset(c);
    attention_case_forward(c, ctx);
    attention_case_backward(c, ctx);
    quern_context_destroy(ctx);
}

/* Makes values so small that products underflow, to zeros of either sign. */
static void make_tiny(test_tensor *t)
{
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++) x[i] *= 1e-38;
    test_tensor_set(t, x);
    free(x);
}

static void check_dense(const oracle_dense *dense, quern_dtype dtype, int where, int64_t row, bool tiny,
                        test_random *random)
{
    static const char *const inputs[] = {"k", "v", "q", "d_o"}, *const names[RESULTS] = {"o", "lse", "d_q",
                                                                                         "d_k", "d_v"};
    attention_case c;
    attention_case_make(&c, dense, dtype, TEST_CONTIGUOUS, random);
    if (tiny) make_tiny(&c.v), make_tiny(&c.d_o);
    test_tensor *const planted[] = {&c.k, &c.v, &c.q, &c.d_o}, *of[RESULTS];
    const int64_t batches = dense->cu_q != NULL ? 1 : dense->batch,
                  rows = batches * (where < 2 ? dense->nkv : dense->nq);
    results_of(&c, of);
    double *before[TEST_LEVEL_NUMBERS][RESULTS], *original = test_tensor_get(planted[where]);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        run_dense(&c, level);
        for (int i = 0; i < RESULTS; i++) before[level][i] = test_tensor_get(of[i]);
    }
    replace_row(planted[where], row, rows, 0, true);
    attention_reference r = attention_case_reference(&c);
    const double *const oracle[RESULTS] = {r.o, r.lse, r.d_q, r.d_k, r.d_v};
    for (int kind = 0; kind < REPLACEMENTS; kind++) {
        test_tensor_set(planted[where], original);
        replace_row(planted[where], row, rows, kind, kind % 2 == 0);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            char label[200];
            snprintf(label, sizeof label,
                     "%g in %s[%lld], Nq %lld Nkv %lld H %lld/%lld window %lld%s, %s, %s", replacements[kind],
                     inputs[where], (long long)row, (long long)dense->nq, (long long)dense->nkv,
                     (long long)dense->h, (long long)dense->hkv, (long long)dense->window,
                     tiny ? " tiny" : "", quern_dtype_name(dtype), quern_cpu_level_name(level));
            run_dense(&c, level);
            for (int i = 0; i < RESULTS; i++)
                check_unseen(label, names[i], of[i], before[level][i], oracle[i]);
        }
    }
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (int i = 0; i < RESULTS; i++) free(before[level][i]);
    free(original);
    attention_reference_free(&r);
    attention_case_free(&c);
}

static void dense_attention(void **state)
{
    static const int32_t cu_q[] = {0, 70, 71, 71, 150}, cu_kv[] = {0, 90, 100, 100, 181};
    static const oracle_dense cases[] = {
        {1, 120, 120, 2, 1, 32, 24, true, 40, -1, 0, NULL,
         NULL}, /* rows on both sides that do not see the key */
        {1, 40, 40, 32, 1, 16, 16, true, 0, -1, 0, NULL, NULL},   /* the rows of one query fill a tile */
        {2, 90, 101, 2, 2, 16, 80, false, 31, -1, 0, NULL, NULL}, /* two panels of values */
        {4, 150, 181, 3, 1, 24, 16, true, 0, -1, 0, cu_q, cu_kv},
        {1, 200, 200, 2, 1, 192, 128, true, 90, -1, 0, NULL, NULL}, /* wide heads, several tiles */
        {1, 200, 200, 2, 1, 256, 256, true, 90, -1, 0, NULL, NULL},
    };
    static const int64_t rows[] = {77, 23, 58, 83, 101, 101};
    test_random random = {test_seed("dense_attention", 1)};
    uint64_t index = 0;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int where = 0; where < 4; where++)
            for (int d = 0; d < 3; d++)
                for (int next = d == 2 ? 0 : where % 2; next < 2;
                     next += 1 + (d != 2)) /* bf16: both halves of a pair */
                    if (test_in_share(index++))
                        check_dense(&cases[i], dtypes[d], where, rows[i] + next, d != 1 && next == 1,
                                    &random);
}

/* ---- NSA ---- */

enum { TRIALS = 24, ROWS = 2 };

/* Everything that is not computed from keys is handed in. */
static nsa_config lists_given(test_random *random)
{
    nsa_config config;
    do config = nsa_config_random(random, 150);
    while (config.params.max_compressed_groups > 0 &&
           config.params.block_size > 1); /* else too long for the oracle */
    quern_nsa_params *p = &config.params;
    p->compress = QUERN_NSA_COMPRESS_GIVEN;
    p->selection = QUERN_NSA_LIST_GIVEN;
    if (p->max_compressed_groups > 0) p->groups = QUERN_NSA_LIST_GIVEN;
    if (p->gate == QUERN_NSA_GATE_WEIGHTS) p->gate = QUERN_NSA_GATE_GIVEN;
    config.project_k = config.project_v = config.pe_k = config.pe_v = false;
    return config;
}

static void run_nsa(nsa_case *c, quern_context *ctx)
{
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
}

/* A row of one of the inputs in `set` that has rows. */
static bool draw_row(const nsa_case *c, test_random *random, nsa_set set, nsa_slot *slot, int64_t *row,
                     int64_t *rows)
{
    static const nsa_slot slots[] = {NSA_K,     NSA_V,     NSA_K_CMP, NSA_V_CMP, NSA_K_SLC,
                                     NSA_V_SLC, NSA_K_WIN, NSA_V_WIN, NSA_Q,     NSA_D_O};
    for (int tries = 0; tries < 100; tries++) {
        *slot = slots[test_random_int(random, 0, (int64_t)(sizeof slots / sizeof *slots) - 1)];
        if ((set & NSA_BIT(*slot)) == 0) continue;
        const quern_tensor *v = &c->tensor[*slot].view;
        *rows = c->config.varlen ? v->shape[0] : v->shape[0] * v->shape[1];
        if (*rows == 0) continue;
        *row = test_random_int(random, 0, *rows - 1);
        return true;
    }
    return false;
}

static void check_nsa(nsa_case *c, quern_cpu_level level, test_random *random, const char *what)
{
    const nsa_set outputs = nsa_forward_outputs(c) | nsa_backward_outputs(c);
    nsa_slot slot;
    int64_t row, rows;
    if (!draw_row(c, random, nsa_backward_inputs(c), &slot, &row, &rows)) return;
    quern_context *ctx = test_context(level, 2);
    double *before[NSA_SLOTS] = {NULL}, *original = test_tensor_get(&c->tensor[slot]);
    run_nsa(c, ctx);
    for (int i = 0; i < NSA_SLOTS; i++)
        if (outputs & NSA_BIT(i)) before[i] = test_tensor_get(&c->tensor[i]);
    replace_row(&c->tensor[slot], row, rows, 0, true);
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    nsa_reference_backward(r);
    for (int kind = 0; kind < REPLACEMENTS; kind++) {
        char label[900];
        snprintf(label, sizeof label, "%g in %s[%lld]: %s", replacements[kind], nsa_slot_name(slot),
                 (long long)row, what);
        test_tensor_set(&c->tensor[slot], original);
        replace_row(&c->tensor[slot], row, rows, kind, kind % 2 == 0);
        run_nsa(c, ctx);
        for (int i = 0; i < NSA_SLOTS; i++)
            if (before[i] != NULL)
                check_unseen(label, nsa_slot_name(i), &c->tensor[i], before[i], r->value[i]);
    }
    for (int i = 0; i < NSA_SLOTS; i++) free(before[i]);
    free(original);
    nsa_reference_free(r);
    quern_context_destroy(ctx);
}

static void sparse_attention(void **state)
{
    const uint64_t seed = test_seed("sparse_attention", 1);
    const int trials = test_trials(TRIALS);
    (void)state;
    for (int trial = 0; trial < trials; trial++) {
        test_random random;
        char text[600], what[700];
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = lists_given(&random);
        const quern_cpu_level level = test_random_level(&random);
        nsa_case *c = nsa_case_random(&config, &random);
        snprintf(what, sizeof what, "QUERN_TEST_TRIAL=%d %s [%s]", trial, quern_cpu_level_name(level),
                 nsa_config_describe(&config, text));
        for (int i = 0; i < ROWS; i++) check_nsa(c, level, &random, what);
        nsa_case_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_attention),
        cmocka_unit_test(sparse_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
