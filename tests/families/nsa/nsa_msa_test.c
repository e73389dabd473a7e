/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_msa_test.c - preset msa: the golden vector, forward and backward; the bits of the parts that it is made
 * of; the indexer with all branches; what is not read; what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"
#include "nsa_case.h"
#include "op_case.h"

#include <stdlib.h>
#include <string.h>

static nsa_config msa_config(void)
{
    nsa_config c = nsa_config_small();
    c.params = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    assert_int_equal(quern_nsa_params_preset(&c.params, "msa"), QUERN_OK);
    c.params.selection = QUERN_NSA_LIST_INDEXED;
    c.d_index = 32;
    return c;
}

static void the_preset_sets_its_fields(void **state)
{
    (void)state;
    const quern_nsa_params p = msa_config().params;
    assert_true(p.select_block == 128 && p.num_selected == 16 && p.tile == 1 && p.forced_first == 0);
    assert_true(p.forced_local == 1 && p.scope == QUERN_NSA_SCOPE_GROUP && p.causal && p.ungated);
    assert_true(p.branches == QUERN_NSA_BRANCH_SLC && p.gate == QUERN_NSA_GATE_NONE);
}

static void set_golden(nsa_case *c, nsa_slot slot, const quern_safetensors *file, const char *name)
{
    double *values = golden_get(file, "", name, test_tensor_count(&c->tensor[slot]));
    test_tensor_set(&c->tensor[slot], values);
    free(values);
}

static void check_golden(const nsa_case *c, nsa_slot slot, const quern_safetensors *file, const char *name)
{
    const int64_t count = test_tensor_count(&c->tensor[slot]);
    double *expected = golden_get(file, "", name, count), *got = test_tensor_get(&c->tensor[slot]);
    test_check_golden(name, got, expected, count, GOLDEN_BOUND);
    free(expected), free(got);
}

/* tests/vectors/msa_tiny.safetensors, by the indexer and by its lists. */
static void the_golden_vector(void **state)
{
    (void)state;
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "msa_tiny");
    for (int given = 0; given < 2; given++) {
        test_random random = {1};
        nsa_config f = msa_config();
        f.batch = 1, f.n = 150, f.h = 8, f.hkv = 2, f.d = f.dv = 32;
        f.params.select_block = 16, f.params.num_selected = 3;
        if (given) f.params.selection = QUERN_NSA_LIST_GIVEN;
        nsa_case *c = nsa_case_new(&f, &random);
        const int64_t lists = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]);
        int32_t *idx = golden_get_i32(file, "", "block_idx", lists);
        set_golden(c, NSA_Q, file, "Q"), set_golden(c, NSA_K, file, "K"), set_golden(c, NSA_V, file, "V");
        set_golden(c, NSA_Q_INDEX, file, "q_I"), set_golden(c, NSA_K_INDEX, file, "k_I");
        set_golden(c, NSA_D_O, file, "dO");
        if (given) test_tensor_set_i32(&c->tensor[NSA_BLOCK_IDX], idx);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
            check_golden(c, NSA_O, file, "O");
            int32_t *got = test_tensor_get_i32(&c->tensor[NSA_BLOCK_IDX]);
            assert_memory_equal(got, idx, (size_t)lists * sizeof *idx);
            nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
            check_golden(c, NSA_D_Q, file, "dQ");
            check_golden(c, NSA_D_K, file, "dK");
            check_golden(c, NSA_D_V, file, "dV");
            free(got);
            quern_context_destroy(ctx);
        }
        free(idx);
        nsa_case_free(c);
    }
    quern_safetensors_close(file);
}

static nsa_config drawn_config(int i, test_random *random)
{
    nsa_config f = msa_config();
    f.dtype = i % 2 ? QUERN_BF16 : QUERN_F32;
    f.layout = (test_layout)(i % TEST_LAYOUTS);
    f.params.select_block = i % 3 ? 16 : 8;
    f.params.num_selected = i % 5 == 4 ? 16 : 3; /* 16: every block */
    f.params.scope = i % 4 == 3 ? QUERN_NSA_SCOPE_HEAD : QUERN_NSA_SCOPE_GROUP;
    f.separate_slc = i % 4 == 2;
    f.varlen = i % 3 == 1;
    for (int b = 0; b < f.batch; b++) f.lens[b] = test_random_int(random, 0, 90);
    f.spare = f.varlen ? 2 : 0;
    return f;
}

/* The lists of nsa-index, the output and the gradients of nsa-attend over them. */
static void parts_give_the_same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 24; i++) {
        test_random random = {(uint64_t)i + 5};
        const nsa_config f = drawn_config(i, &random);
        nsa_case *c = nsa_case_new(&f, &random);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        test_tensor kept[NSA_SLOTS] = {{.buffer = NULL}}, grads[NSA_SLOTS] = {{.buffer = NULL}};
        const nsa_set lists = NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT),
                      forward = NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_LSE_SLC);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        assert_true(test_tensor_same_bits(&c->tensor[NSA_O], &c->tensor[NSA_O_SLC]));
        nsa_copy(c, lists | forward, kept);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
        nsa_copy(c, nsa_backward_outputs(c), grads);
        /* with O in place of O_slc, and with neither */
        for (int o = 0; o < 2; o++) {
            const nsa_set inputs = (nsa_backward_inputs(c) & ~NSA_BIT(NSA_O_SLC)) | (o ? NSA_BIT(NSA_O) : 0);
            nsa_run(c, ctx, nsa_call_backward, inputs, nsa_backward_outputs(c));
            nsa_check_same_bits(c, nsa_backward_outputs(c), grads, "backward without O_slc");
        }
        quern_nsa_index_params p = QUERN_NSA_INDEX_PARAMS_INIT;
        const quern_nsa_index_tensors t = {sizeof t,
                                           &c->tensor[NSA_Q_INDEX].view,
                                           &c->tensor[NSA_K_INDEX].view,
                                           f.varlen ? &c->tensor[NSA_CU_SEQLENS].view : NULL,
                                           NULL,
                                           &c->tensor[NSA_BLOCK_IDX].view,
                                           &c->tensor[NSA_BLOCK_COUNT].view,
                                           NULL};
        p.select_block = f.params.select_block, p.num_selected = f.params.num_selected;
        test_tensor_reset(&c->tensor[NSA_BLOCK_IDX]), test_tensor_reset(&c->tensor[NSA_BLOCK_COUNT]);
        op_case_call(ctx, "nsa-index", QUERN_OP_FORWARD, &p, &t);
        nsa_run(c, ctx, nsa_call_attend, nsa_attend_inputs(c), nsa_attend_outputs(c));
        if (f.params.num_selected < 16) nsa_check_same_bits(c, forward, kept, "parts");
        nsa_check_same_bits(c, lists, kept, "lists");
        double *d_o = test_tensor_get(&c->tensor[NSA_D_O]);
        test_tensor_set(&c->tensor[NSA_D_O_SLC], d_o);
        for (int s = NSA_O_SLC; s <= NSA_LSE_SLC; s += NSA_LSE_SLC - NSA_O_SLC)
            memcpy(c->tensor[s].buffer, kept[s].buffer, c->tensor[s].bytes);
        nsa_run(c, ctx, nsa_call_attend_backward, nsa_attend_inputs(c) | forward | NSA_BIT(NSA_D_O_SLC),
                nsa_attend_gradients(c));
        nsa_check_same_bits(c, nsa_backward_outputs(c), grads, "parts");
        free(d_o);
        nsa_free_copies(kept), nsa_free_copies(grads);
        quern_context_destroy(ctx);
        nsa_case_free(c);
    }
}

/* The indexer chooses for all three branches and a gate as lists that are handed in do. */
static void the_indexer_serves_every_branch(void **state)
{
    (void)state;
    for (int i = 0; i < 12; i++) {
        test_random random = {(uint64_t)i + 50};
        nsa_config f = drawn_config(i, &random);
        f.params.ungated = false;
        f.params.branches = i % 3 == 2 ? QUERN_NSA_BRANCH_SLC | QUERN_NSA_BRANCH_WIN : QUERN_NSA_BRANCH_ALL;
        f.params.gate = i % 2 ? QUERN_NSA_GATE_WEIGHTS : QUERN_NSA_GATE_NONE;
        f.params.block_size = 8, f.params.num_selected = 3, f.params.window = 9;
        nsa_case *c = nsa_case_new(&f, &random);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        test_tensor kept[NSA_SLOTS] = {{.buffer = NULL}};
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        c->config.params.selection = QUERN_NSA_LIST_GIVEN;
        const nsa_set outputs = nsa_forward_outputs(c);
        nsa_copy(c, outputs, kept);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), outputs);
        nsa_check_same_bits(c, outputs, kept, "lists handed in");
        nsa_free_copies(kept);
        quern_context_destroy(ctx);
        nsa_case_free(c);
    }
}

/* Where nothing is compressed: lengths that fit nothing, and a compression without its weights. */
static void compression_is_not_read(void **state)
{
    (void)state;
    test_random random = {3};
    nsa_config f = msa_config();
    f.params.select_block = 24, f.params.num_selected = 2;
    nsa_case *c = nsa_case_new(&f, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    test_tensor kept[NSA_SLOTS] = {{.buffer = NULL}};
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    nsa_copy(c, nsa_forward_outputs(c), kept);
    c->config.params.block_size = 50, c->config.params.stride = 7;
    c->config.params.compress = QUERN_NSA_COMPRESS_LINEAR;
    c->config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    nsa_check_same_bits(c, nsa_forward_outputs(c), kept, "other lengths");
    nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
    nsa_free_copies(kept);
    quern_context_destroy(ctx);
    nsa_case_free(c);
}

static void bad_calls_are_refused(void **state)
{
    static const struct {
        const char *sentence;
        int32_t selection, gate;
        uint32_t branches;
        int64_t tile, local;
        nsa_set without;
    } cases[] = {
        {"ungated with selection computed: q_index and k_index (indexed), or block_idx (given)", 0, 0, 2, 1,
         1, 0},
        {"ungated with branches 6, gate none", 2, 0, 6, 1, 1, 0},
        {"ungated with branches 2, gate given", 2, 2, 2, 1, 1, 0},
        {"selection is indexed with tile 4", 2, 0, 2, 4, 1, 0},
        {"num_selected is 3: at least the 4 forced blocks", 2, 0, 2, 1, 4, 0},
        {"q_index is NULL", 2, 0, 2, 1, 1, NSA_BIT(NSA_Q_INDEX)},
        {"k_index is NULL", 2, 0, 2, 1, 1, NSA_BIT(NSA_K_INDEX)},
        {"block_idx is NULL", 1, 0, 2, 1, 1, NSA_BIT(NSA_BLOCK_IDX)},
    };
    (void)state;
    test_random random = {3};
    nsa_config f = msa_config();
    f.params.select_block = 16, f.params.num_selected = 3;
    nsa_case *c = nsa_case_new(&f, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const nsa_set all = nsa_forward_inputs(c) | nsa_forward_outputs(c);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        quern_nsa_params *p = &c->config.params;
        *p = f.params;
        p->selection = (quern_nsa_list)cases[i].selection;
        p->gate = (quern_nsa_gate_kind)cases[i].gate;
        p->branches = cases[i].branches;
        p->tile = cases[i].tile;
        p->forced_local = cases[i].local;
        assert_int_equal(nsa_try(c, ctx, nsa_call_forward, all & ~cases[i].without),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), cases[i].sentence) == NULL)
            fail_msg("'%s' does not say '%s'", quern_last_error(ctx), cases[i].sentence);
        test_tensor_check_unchanged(&c->tensor[NSA_O], "o of a refused call");
    }
    *(&c->config.params) = f.params;
    test_tensor heads = c->tensor[NSA_Q_INDEX];
    c->tensor[NSA_Q_INDEX].view.shape[2] = 1;
    assert_int_equal(nsa_try(c, ctx, nsa_call_forward, all), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "q_index.shape[2] is 1: 2 is accepted"));
    c->tensor[NSA_Q_INDEX] = heads;
    quern_context_destroy(ctx);
    nsa_case_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_preset_sets_its_fields), cmocka_unit_test(the_golden_vector),
        cmocka_unit_test(parts_give_the_same_bits),   cmocka_unit_test(the_indexer_serves_every_branch),
        cmocka_unit_test(compression_is_not_read),    cmocka_unit_test(bad_calls_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
