/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_causality_test.c - in strictly causal settings no token after t changes a bit of any result of tokens 0
 * ... t. Strictly causal are tile 1 with `complete` visibility, and any tile where the lists are handed in.
 * Of a varlen batch, one document's tokens 0 ... t keep their bits whatever the others hold. */
#include "cmocka_c11.h"
#include "nsa_random.h"
#include "nsa_reference.h"
#include "oracle/nsa.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the future is replaced by. */
typedef enum future { OTHER_NUMBERS, HUGE_NUMBERS, NOT_NUMBERS, FUTURES } future;

static double future_value(test_random *random, future kind)
{
    const double x = test_random_normal(random);
    return kind == OTHER_NUMBERS ? x : kind == HUGE_NUMBERS ? 1e4 * x : NAN;
}

/* The past: tokens 0 ... last of one sequence, as rows of the case's tensors. */
typedef struct past {
    nsa_sequence sequence;
    int64_t tokens, entries, tiles;
} past;

static past past_of(const nsa_case *c, int64_t sequence, int64_t last)
{
    const oracle_nsa one = {c->config.params, last + 1,    c->config.h,
                            c->config.hkv,    c->config.d, c->config.dv};
    return (past){nsa_sequence_of(c, sequence), last + 1, oracle_nsa_entries(&one),
                  last / c->config.params.tile + 1};
}

/* Replaces the rows of an input, [1, rows, ...] or [rows, ...], except `count` rows from `first` on. */
static void perturb(nsa_case *c, nsa_slot slot, int64_t first, int64_t count, test_random *random,
                    future kind)
{
    test_tensor *t = &c->tensor[slot];
    if (t->buffer == NULL || test_tensor_count(t) == 0) return;
    const int64_t rows = t->view.shape[c->config.varlen ? 0 : 1], width = test_tensor_count(t) / rows;
    double *values = test_tensor_get(t);
    for (int64_t i = 0; i < rows * width; i++)
        if (i < first * width || i >= (first + count) * width) values[i] = future_value(random, kind);
    test_tensor_set(t, values);
    free(values);
}

/* Elements of the past in a result: [1, N, ...] or, for statistics and lists, [1, heads, N or tiles, ...];
 * varlen without the 1. */
static void compare_past(const nsa_case *c, nsa_slot slot, const test_tensor *before, const past *p,
                         const char *what)
{
    const bool per_head = slot >= NSA_LSE_CMP && slot <= NSA_LSE_WIN;
    const bool list = slot >= NSA_BLOCK_IDX && slot <= NSA_GROUP_IDX,
               entry = slot == NSA_K_CMP || slot == NSA_V_CMP;
    const quern_tensor *v = &before->view;
    const int dim = (per_head || list ? 2 : 1) - (c->config.varlen ? 1 : 0);
    const int64_t rows = v->shape[dim], outer = per_head || list ? v->shape[dim - 1] : 1;
    const int64_t first = list ? p->sequence.list : entry ? p->sequence.entry : p->sequence.row;
    const int64_t count = list ? p->tiles : entry ? p->entries : p->tokens;
    const int64_t width = rows * outer > 0 ? test_tensor_count(before) / (rows * outer) : 0;
    double *old_values = list ? NULL : test_tensor_get(before);
    double *new_values = list ? NULL : test_tensor_get(&c->tensor[slot]);
    int32_t *old_list = list ? test_tensor_get_i32(before) : NULL;
    int32_t *new_list = list ? test_tensor_get_i32(&c->tensor[slot]) : NULL;
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = (o * rows + first) * width; i < (o * rows + first + count) * width; i++) {
            const bool same = list ? old_list[i] == new_list[i]
                                   : memcmp(&old_values[i], &new_values[i], sizeof(double)) == 0;
            if (!same)
                fail_msg(
                    "%s: %s entry %lld changed with what is not in the past of token %lld: %.9g, then %.9g",
                    what, nsa_slot_name(slot), (long long)i, (long long)p->tokens - 1,
                    list ? old_list[i] : old_values[i], list ? new_list[i] : new_values[i]);
        }
    }
    free(old_values);
    free(new_values);
    free(old_list);
    free(new_list);
}

static void perturb_future(nsa_case *c, const past *p, test_random *random, future kind)
{
    const nsa_slot tokens[] = {NSA_Q, NSA_K, NSA_V, NSA_K_SLC, NSA_V_SLC, NSA_K_WIN, NSA_V_WIN};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++)
        perturb(c, tokens[i], p->sequence.row, p->tokens, random, kind);
    if (c->config.params.compress == QUERN_NSA_COMPRESS_GIVEN) {
        perturb(c, NSA_K_CMP, p->sequence.entry, p->entries, random, kind);
        perturb(c, NSA_V_CMP, p->sequence.entry, p->entries, random, kind);
    }
    if (c->config.params.gate == QUERN_NSA_GATE_GIVEN)
        perturb(c, NSA_GATES, p->sequence.row, p->tokens, random, kind);
}

static nsa_config strictly_causal(test_random *random)
{
    nsa_config config = nsa_config_random(random, 80);
    quern_nsa_params *p = &config.params;
    if (config.varlen) {
        config.lens[0] += 2; /* some document has a future */
    } else {
        config.batch = 1;
        config.n =
            test_random_int(random, 20, 100) + (p->max_compressed_groups > 0 ? 300 * p->block_size : 0);
    }
    p->causal = true;
    p->compressed_visibility = QUERN_NSA_VISIBLE_COMPLETE;
    p->branches = QUERN_NSA_BRANCH_ALL;
    p->selection = p->groups = QUERN_NSA_LIST_COMPUTED;
    if (test_random_one_in(random, 4)) { /* any tile, with lists handed in */
        p->selection = QUERN_NSA_LIST_GIVEN;
        if (p->max_compressed_groups > 0) p->groups = QUERN_NSA_LIST_GIVEN;
    } else {
        p->tile = 1;
        if (p->max_compressed_groups > 0) p->max_compressed_groups = 1;
    }
    p->num_selected = nsa_least_selected(p) + test_random_int(random, 0, 4);
    return config;
}

static void the_future_changes_no_bit(void **state)
{
    const uint64_t seed = test_seed("the_future_changes_no_bit", 41);
    (void)state;
    for (int trial = 0; trial < test_trials(90); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = strictly_causal(&random);
        const quern_cpu_level level = test_random_level(&random);
        const future kind = (future)(trial % FUTURES);
        int64_t sequence = config.varlen ? test_random_int(&random, 0, config.batch - 1) : 0;
        if (config.varlen && config.lens[sequence] < 2) sequence = 0;
        const int64_t last =
            test_random_int(&random, 0, (config.varlen ? config.lens[sequence] : config.n) - 2);
        char text[600], what[700];
        snprintf(what, sizeof what, "QUERN_TEST_TRIAL=%d %s [%s]", trial, quern_cpu_level_name(level),
                 nsa_config_describe(&config, text));
        quern_context *ctx = test_context(level, 2);
        nsa_case *c = nsa_case_random(&config, &random);
        nsa_set outputs = nsa_forward_outputs(c);
        if (test_random_one_in(&random, 2)) outputs = NSA_BIT(NSA_O); /* the inference path */
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), outputs);
        test_tensor before[NSA_SLOTS];
        nsa_copy(c, outputs, before);
        const past p = past_of(c, sequence, last);
        perturb_future(c, &p, &random, kind);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), outputs);
        for (int i = 0; i < NSA_SLOTS; i++)
            if ((outputs & NSA_BIT(i)) != 0 && i != NSA_CU_SEQLENS_CMP)
                compare_past(c, (nsa_slot)i, &before[i], &p, what);
        nsa_free_copies(before);
        nsa_case_free(c);
        quern_context_destroy(ctx);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_future_changes_no_bit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
