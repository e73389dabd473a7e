/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_parts_test.c - every NSA operation called alone, forward and backward, against the float64 oracle
 * over random shapes and parameters. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_random.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const nsa_set entries = NSA_BIT(NSA_K_CMP) | NSA_BIT(NSA_V_CMP);
static const nsa_set cu_seqlens = NSA_BIT(NSA_CU_SEQLENS) | NSA_BIT(NSA_CU_SEQLENS_CMP);
static const nsa_set branches_o = NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN);
static const nsa_set branches_d_o = NSA_BIT(NSA_D_O_CMP) | NSA_BIT(NSA_D_O_SLC) | NSA_BIT(NSA_D_O_WIN);

/* Runs `body` on random cases; `adjust` narrows the configuration to what the operation takes. */
static void for_random_cases(const char *name, uint64_t fallback, void (*adjust)(nsa_config *),
                             void (*body)(nsa_case *c, quern_context *ctx))
{
    const uint64_t seed = test_seed(name, fallback);
    for (int trial = 0; trial < test_trials(24); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        nsa_config config = nsa_config_random(&random, 80);
        const quern_cpu_level level = test_random_level(&random);
        char text[600];
        adjust(&config);
        printf("QUERN_TEST_TRIAL=%d: %s: %s\n", trial, quern_cpu_level_name(level),
               nsa_config_describe(&config, text));
        fflush(stdout);
        quern_context *ctx = test_context(level, 2);
        nsa_case *c = nsa_case_random(&config, &random);
        body(c, ctx);
        nsa_case_free(c);
        quern_context_destroy(ctx);
    }
}

static void keep(nsa_config *config)
{
    (void)config;
}

static void not_given(nsa_config *config)
{
    if (config->params.compress == QUERN_NSA_COMPRESS_GIVEN)
        config->params.compress = QUERN_NSA_COMPRESS_MEAN;
}

static void compress_case(nsa_case *c, quern_context *ctx)
{
    const nsa_set weights = NSA_BIT(NSA_W_K) | NSA_BIT(NSA_W_V) | NSA_BIT(NSA_PE_K) | NSA_BIT(NSA_PE_V);
    const nsa_set d_weights =
        NSA_BIT(NSA_D_W_K) | NSA_BIT(NSA_D_W_V) | NSA_BIT(NSA_D_PE_K) | NSA_BIT(NSA_D_PE_V);
    const nsa_set inputs = NSA_BIT(NSA_K) | NSA_BIT(NSA_V) | weights | NSA_BIT(NSA_CU_SEQLENS);
    nsa_reference *r = nsa_reference_new(c, false);
    nsa_reference_compress_backward(r);
    nsa_run(c, ctx, nsa_call_compress, inputs, entries | NSA_BIT(NSA_CU_SEQLENS_CMP));
    nsa_check(r, entries);
    const nsa_set outputs = NSA_BIT(NSA_D_K) | NSA_BIT(NSA_D_V) | d_weights;
    nsa_run(c, ctx, nsa_call_compress_backward,
            inputs | NSA_BIT(NSA_CU_SEQLENS_CMP) | NSA_BIT(NSA_D_K_CMP) | NSA_BIT(NSA_D_V_CMP), outputs);
    nsa_check(r, outputs);
    nsa_reference_free(r);
}

static void compress_alone(void **state)
{
    (void)state;
    for_random_cases("compress_alone", 31, not_given, compress_case);
}

static void computed_lists(nsa_config *config)
{
    config->params.compress = QUERN_NSA_COMPRESS_GIVEN; /* k_cmp is random, not a mean of k */
    config->params.selection = config->params.groups = QUERN_NSA_LIST_COMPUTED;
}

static const nsa_set lists = NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT) | NSA_BIT(NSA_GROUP_IDX);

static void select_case(nsa_case *c, quern_context *ctx)
{
    const nsa_set inputs = NSA_BIT(NSA_Q) | NSA_BIT(NSA_K_CMP) | cu_seqlens;
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_run(c, ctx, nsa_call_select, inputs, lists);
    nsa_check_lists(r, true);
    if (c->config.params.metric == QUERN_NSA_METRIC_SOFTMAX) { /* once more, with the branch's statistics */
        const uint32_t branches = c->config.params.branches;
        c->config.params.branches = QUERN_NSA_BRANCH_CMP;
        nsa_run(c, ctx, nsa_call_attend, inputs | NSA_BIT(NSA_V_CMP),
                NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_LSE_CMP));
        c->config.params.branches = branches;
        nsa_run(c, ctx, nsa_call_select, inputs | NSA_BIT(NSA_LSE_CMP), lists);
        nsa_check_lists(r, true);
    }
    nsa_reference_free(r);
}

static void select_alone(void **state)
{
    (void)state;
    for_random_cases("select_alone", 32, computed_lists, select_case);
}

/* Lists of 4, 8 and 16 rows of 16-bit inputs, of more entries than a step of a kernel. */
static void lists_of_few_rows(nsa_config *config)
{
    quern_nsa_params *p = &config->params;
    const int64_t rows = 4 << config->d / 8 % 3, tile = p->scope == QUERN_NSA_SCOPE_HEAD ? rows : rows / 4;
    computed_lists(config);
    p->metric = QUERN_NSA_METRIC_SOFTMAX;
    p->max_compressed_groups = 0;
    p->tile = p->tile == 1 && p->scope == QUERN_NSA_SCOPE_GROUP ? 1 : tile;
    p->num_selected = nsa_least_selected(p) + 3;
    if (p->scope == QUERN_NSA_SCOPE_GROUP) config->h = config->hkv * (rows / p->tile);
    config->dtype = config->d % 16 == 0 ? QUERN_F16 : QUERN_BF16;
    config->layout = TEST_CONTIGUOUS;
    config->d *= 4;
    config->n *= 3;
    for (int64_t b = 0; config->varlen && b < config->batch; b++) config->lens[b] *= 3;
}

static void select_by_few_rows(void **state)
{
    (void)state;
    for_random_cases("select_by_few_rows", 37, lists_of_few_rows, select_case);
}

/* Means of wide heads; tile 1: so many lists that kernels may share entries among them. */
static void means(nsa_config *config)
{
    quern_nsa_params *p = &config->params;
    computed_lists(config);
    p->metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    p->stride = p->select_block = p->block_size;
    config->d *= 6;
    if (p->tile == 1) {
        config->d = 8 * (config->d % 16 + 1);
        p->scope = QUERN_NSA_SCOPE_HEAD;
        config->hkv = 2;
        config->h = 40;
        config->n *= 3;
        for (int64_t b = 0; config->varlen && b < config->batch; b++) config->lens[b] *= 3;
    }
    p->num_selected = nsa_least_selected(p) + 3;
}

static void select_by_means(void **state)
{
    (void)state;
    for_random_cases("select_by_means", 38, means, select_case);
}

static void attend_case(nsa_case *c, quern_context *ctx)
{
    const nsa_set inputs = nsa_attend_inputs(c), outputs = nsa_attend_outputs(c);
    const nsa_set d_outputs = nsa_attend_gradients(c);
    nsa_set d_o_b = 0;
    for (int b = 0; b < 3; b++)
        if (outputs & NSA_BIT(NSA_O_CMP + b)) d_o_b |= NSA_BIT(NSA_D_O_CMP + b);
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_take_lists(r);
    nsa_reference_forward(r);
    nsa_reference_attend_backward(r);
    nsa_run(c, ctx, nsa_call_attend, inputs, outputs);
    nsa_check(r, outputs);
    nsa_run(c, ctx, nsa_call_attend_backward, inputs | outputs | d_o_b, d_outputs);
    nsa_check(r, d_outputs);
    nsa_reference_free(r);
}

static void all_given(nsa_config *config)
{
    config->params.compress = QUERN_NSA_COMPRESS_GIVEN;
    config->params.selection = QUERN_NSA_LIST_GIVEN;
    if (config->params.max_compressed_groups > 0) config->params.groups = QUERN_NSA_LIST_GIVEN;
}

static void attend_alone(void **state)
{
    (void)state;
    for_random_cases("attend_alone", 33, all_given, attend_case);
}

/* Lists that many rows share, of 16-bit inputs, in blocks of several sizes. */
static void lists_of_many_rows(nsa_config *config)
{
    static const int64_t blocks[] = {1, 2, 3, 4, 8, 16};
    quern_nsa_params *p = &config->params;
    p->max_compressed_groups = 0;
    p->groups = QUERN_NSA_LIST_COMPUTED;
    all_given(config);
    p->metric = QUERN_NSA_METRIC_SOFTMAX;
    p->branches = QUERN_NSA_BRANCH_SLC;
    p->scope = QUERN_NSA_SCOPE_GROUP;
    p->tile = 64 << config->d / 8 % 3;
    p->block_size = p->stride = 16;
    p->select_block = 16 * blocks[(config->d + config->dv) / 8 % 6];
    p->num_selected = nsa_least_selected(p) + 9;
    config->h = config->hkv * (config->batch > 1 ? 512 : 1024) / p->tile;
    config->dtype = config->dv % 16 == 0 ? QUERN_F16 : QUERN_BF16;
    config->layout = TEST_CONTIGUOUS;
    config->d *= 3;
    config->n *= 3;
    for (int64_t b = 0; config->varlen && b < config->batch; b++) config->lens[b] *= 3;
}

static void attend_by_many_rows(void **state)
{
    (void)state;
    for_random_cases("attend_by_many_rows", 39, lists_of_many_rows, attend_case);
}

/* Lists of 4 to 32 rows of 16-bit inputs, in blocks of 64 and 128 keys. */
static void lists_of_a_token(nsa_config *config)
{
    quern_nsa_params *p = &config->params;
    const int64_t rows = 4 << config->d / 8 % 4;
    p->max_compressed_groups = 0;
    p->groups = QUERN_NSA_LIST_COMPUTED;
    all_given(config);
    p->metric = QUERN_NSA_METRIC_SOFTMAX;
    p->branches = QUERN_NSA_BRANCH_SLC;
    p->tile = p->scope == QUERN_NSA_SCOPE_HEAD ? rows : p->tile > 16 ? 2 : 1;
    p->block_size = p->stride = 16;
    p->select_block = config->dv % 16 == 0 ? 64 : 128;
    p->num_selected = nsa_least_selected(p) + 5;
    if (p->scope == QUERN_NSA_SCOPE_GROUP) {
        config->hkv = rows > 8 ? 1 : config->hkv;
        config->h = config->hkv * rows / p->tile;
    }
    config->dtype = config->d % 16 == 0 ? QUERN_F16 : QUERN_BF16;
    config->layout = TEST_CONTIGUOUS;
    config->d *= 4;
    config->n *= 3;
    for (int64_t b = 0; config->varlen && b < config->batch; b++) config->lens[b] *= 3;
}

static void attend_by_token(void **state)
{
    (void)state;
    for_random_cases("attend_by_token", 40, lists_of_a_token, attend_case);
}

static void gate_case(nsa_case *c, quern_context *ctx)
{
    const bool given = c->config.params.gate == QUERN_NSA_GATE_GIVEN;
    const bool weights = c->config.params.gate == QUERN_NSA_GATE_WEIGHTS;
    const nsa_set gates_in = NSA_BIT(NSA_Q) | NSA_BIT(NSA_W_GATE) | NSA_BIT(NSA_CU_SEQLENS);
    const nsa_set gates = NSA_BIT(NSA_GATES);
    c->config.params.branches = QUERN_NSA_BRANCH_ALL;
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_gate(r);
    if (weights) {
        nsa_run(c, ctx, nsa_call_gates, gates_in, gates);
        nsa_check(r, gates);
    }
    nsa_run(c, ctx, nsa_call_gate, gates_in | branches_o | (given ? gates : 0),
            NSA_BIT(NSA_O) | (given ? 0 : gates));
    nsa_check(r, NSA_BIT(NSA_O) | gates);
    nsa_run(c, ctx, nsa_call_combine, branches_o | gates | NSA_BIT(NSA_CU_SEQLENS), NSA_BIT(NSA_O));
    nsa_check(r, NSA_BIT(NSA_O));
    nsa_reference_gate_backward(r);
    const nsa_set outputs = branches_d_o | (given ? NSA_BIT(NSA_D_GATES) : 0) |
                            (weights ? NSA_BIT(NSA_D_Q) | NSA_BIT(NSA_D_W_GATE) : 0);
    nsa_run(c, ctx, nsa_call_gate_backward, gates_in | branches_o | gates | NSA_BIT(NSA_D_O), outputs);
    nsa_check(r, nsa_present(c, outputs));
    nsa_reference_free(r);
}

static void gate_alone(void **state)
{
    (void)state;
    for_random_cases("gate_alone", 34, keep, gate_case);
}

/* No head, more heads than a piece of the work has rows, and odd numbers between. */
static void gate_of_any_number_of_heads(void **state)
{
    static const int64_t heads[] = {0, 1, 3, 5, 513, 1024, 1100};
    uint64_t index = 0;
    (void)state;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);)
        for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
            for (int kind = 0; kind < 3; kind++) {
                nsa_config config = nsa_config_small();
                test_random random = {77};
                if (!test_in_share(index++)) continue;
                config.h = config.hkv = heads[i];
                config.d = config.dv = 8;
                config.n = heads[i] > 100 ? 3 : 300;
                config.params.gate = (quern_nsa_gate_kind)kind;
                quern_context *ctx = test_context(level, 2);
                nsa_case *c = nsa_case_new(&config, &random);
                gate_case(c, ctx);
                nsa_case_free(c);
                quern_context_destroy(ctx);
            }
}

/* Without a gate each branch weighs a third whatever `gates` a backward is given, and the call does not write
 * `gates`. d_gates is that of given gates of one third. */
static void gates_are_no_output_of_a_backward(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {36};
    (void)state;
    nsa_case *c = nsa_case_new(&config, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    const nsa_set gates = NSA_BIT(NSA_GATES), d_gates = NSA_BIT(NSA_D_GATES),
                  inputs = branches_o | gates | NSA_BIT(NSA_D_O);
    const nsa_set forward = nsa_forward_outputs(c) & ~gates;
    const int64_t count = test_tensor_count(&c->tensor[NSA_GATES]);
    double *thirds = test_doubles(count), *d_given[2], *d_none[2];
    for (int64_t i = 0; i < count; i++) thirds[i] = 1.0f / 3.0f;
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
    for (int given = 0; given < 2; given++) { /* first beside gates that are no thirds */
        double **d = given ? d_given : d_none;
        c->config.params.gate = given ? QUERN_NSA_GATE_GIVEN : QUERN_NSA_GATE_NONE;
        if (given) test_tensor_set(&c->tensor[NSA_GATES], thirds);
        nsa_run(c, ctx, nsa_call_gate_backward, inputs, branches_d_o | d_gates);
        d[0] = test_tensor_get(&c->tensor[NSA_D_GATES]);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c) | gates, nsa_backward_outputs(c) | d_gates);
        d[1] = test_tensor_get(&c->tensor[NSA_D_GATES]);
    }
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(d_none[i], d_given[i], (size_t)count * sizeof(double));
        free(d_none[i]);
        free(d_given[i]);
    }
    free(thirds);
    nsa_case_free(c);
    quern_context_destroy(ctx);
}

/* Each branch by itself: the others' tensors are there but not written. */
static void branch_case(nsa_case *c, quern_context *ctx)
{
    nsa_reference *r = nsa_reference_new(c, true);
    nsa_reference_take_lists(r);
    for (int b = 0; b < 3; b++) {
        c->config.params.branches = 1u << b;
        nsa_reference_forward(r);
        nsa_run(c, ctx, nsa_call_attend, nsa_attend_inputs(c), nsa_attend_outputs(c));
        nsa_check(r, nsa_attend_outputs(c));
    }
    nsa_reference_free(r);
}

static void one_branch_alone(void **state)
{
    (void)state;
    for_random_cases("one_branch_alone", 35, all_given, branch_case);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compress_alone),
        cmocka_unit_test(select_alone),
        cmocka_unit_test(select_by_few_rows),
        cmocka_unit_test(select_by_means),
        cmocka_unit_test(attend_alone),
        cmocka_unit_test(attend_by_many_rows),
        cmocka_unit_test(attend_by_token),
        cmocka_unit_test(gate_alone),
        cmocka_unit_test(gate_of_any_number_of_heads),
        cmocka_unit_test(one_branch_alone),
        cmocka_unit_test(gates_are_no_output_of_a_backward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
