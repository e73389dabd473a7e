/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_mistakes_test.c - mistakes known from other implementations of NSA, each a test with its name.
 * (32-bit offsets: nsa_offsets_test.c.)
 *
 * With q = 0 every key that is seen weighs the same, so lse is the logarithm of their number: most
 * mistakes are counted rather than compared.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "compare.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static nsa_case *new_case(const nsa_config *config, bool zero_q)
{
    test_random random = {77};
    nsa_case *c = nsa_case_new(config, &random);
    double *zeros = test_doubles(test_tensor_count(&c->tensor[NSA_Q]));
    if (zero_q) test_tensor_set(&c->tensor[NSA_Q], zeros);
    free(zeros);
    return c;
}

static void forward(nsa_case *c)
{
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
}

/* exp(lse) of one token and head of a sequence: the number of keys seen where q = 0. */
static double keys_seen(const nsa_case *c, nsa_slot slot, int64_t sequence, int64_t head, int64_t token)
{
    const nsa_sequence s = nsa_sequence_of(c, sequence);
    double *lse = test_tensor_get(&c->tensor[slot]);
    const double seen = exp(lse[s.lse + head * s.lse_stride + token]);
    free(lse);
    return seen;
}

static void assert_keys(const nsa_case *c, nsa_slot slot, int64_t sequence, int64_t token, int64_t keys)
{
    for (int64_t head = 0; head < c->config.h; head++) {
        const double seen = keys_seen(c, slot, sequence, head, token);
        if (!(fabs(seen - (double)keys) < 1e-3))
            fail_msg("%s: token %lld of sequence %lld, head %lld sees %.3f keys, not %lld",
                     nsa_slot_name(slot), (long long)token, (long long)sequence, (long long)head, seen,
                     (long long)keys);
    }
}

static void future_leak_through_the_incomplete_block(void **state)
{
    nsa_config config = nsa_config_small();
    (void)state;
    config.n = 40;
    nsa_case *c = new_case(&config, true);
    forward(c);
    for (int64_t t = 0; t < 40; t++) assert_keys(c, NSA_LSE_CMP, 1, t, (t + 1) / 8);
    nsa_case_free(c);
    config.params.compressed_visibility = QUERN_NSA_VISIBLE_STARTED; /* leaks by its definition */
    c = new_case(&config, true);
    forward(c);
    for (int64_t t = 0; t < 40; t++) assert_keys(c, NSA_LSE_CMP, 1, t, t / 8 + 1);
    nsa_case_free(c);
}

static void paddings_duplicate_of_block_0_counted_twice(void **state)
{
    static const int32_t lists[4][5] = {
        {0, -1, -1, -1, -1}, {0, 0, 0, 0, 0}, {0, 2, 0, -1, 2}, {-1, -1, 1, -1, 0}};
    static const int64_t blocks_seen[4] = {1, 1, 2, 2};
    nsa_config config = nsa_config_small();
    (void)state;
    config.n = 64;
    config.params.selection = QUERN_NSA_LIST_GIVEN;
    nsa_case *c = new_case(&config, true);
    const int64_t rows = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]) / 5;
    int32_t *idx = malloc(sizeof *idx * (size_t)rows * 5);
    for (int i = 0; i < 4; i++) {
        for (int64_t row = 0; row < rows; row++) memcpy(idx + row * 5, lists[i], sizeof lists[i]);
        test_tensor_set_i32(&c->tensor[NSA_BLOCK_IDX], idx);
        forward(c);
        assert_keys(c, NSA_LSE_SLC, 0, 63, 8 * blocks_seen[i]);
    }
    free(idx);
    nsa_case_free(c);
    /* Computed lists: where fewer blocks exist than k, the surplus is absent, not block 0 again. */
    config.params.selection = QUERN_NSA_LIST_COMPUTED;
    c = new_case(&config, true);
    forward(c);
    for (int64_t t = 0; t < 40; t++) assert_keys(c, NSA_LSE_SLC, 0, t, t + 1);
    nsa_case_free(c);
}

static void whole_tiles_of_128_attended_where_blocks_of_64_were_chosen(void **state)
{
    nsa_config config = nsa_config_small();
    (void)state;
    config.batch = 1;
    config.n = 520;
    config.params.block_size = 64;
    config.params.num_selected = 2;
    config.params.selection = QUERN_NSA_LIST_GIVEN;
    for (int64_t tile = 1; tile <= 128; tile *= 128) {
        config.params.tile = tile;
        nsa_case *c = new_case(&config, true);
        const int64_t rows = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]) / 2;
        int32_t *idx = malloc(sizeof *idx * (size_t)rows * 2);
        for (int64_t row = 0; row < rows; row++) {
            idx[row * 2] = 1;
            idx[row * 2 + 1] = 4;
        }
        test_tensor_set_i32(&c->tensor[NSA_BLOCK_IDX], idx);
        forward(c);
        assert_keys(c, NSA_LSE_SLC, 0, 63, 0);
        assert_keys(c, NSA_LSE_SLC, 0, 64, 1);
        assert_keys(c, NSA_LSE_SLC, 0, 130, 64);
        assert_keys(c, NSA_LSE_SLC, 0, 300, 64 + 300 - 255);
        assert_keys(c, NSA_LSE_SLC, 0, 519, 128);
        free(idx);
        nsa_case_free(c);
    }
}

static void zero_padded_compressed_rows_attended_in_varlen(void **state)
{
    nsa_config config = nsa_config_small();
    (void)state;
    config.varlen = true;
    config.batch = 4;
    config.spare = 9;
    memcpy(config.lens, (int64_t[]){30, 7, 64, 17}, 4 * sizeof(int64_t));
    for (int causal = 0; causal < 2; causal++) {
        config.params.causal = causal;
        nsa_case *c = new_case(&config, true);
        forward(c);
        for (int64_t b = 0; b < 4; b++) {
            for (int64_t t = 0; t < config.lens[b]; t++)
                assert_keys(c, NSA_LSE_CMP, b, t, causal ? (t + 1) / 8 : config.lens[b] / 8);
        }
        double *k_cmp = test_tensor_get(&c->tensor[NSA_K_CMP]);
        const int64_t used = 3 + 0 + 8 + 2, width = config.hkv * config.d;
        for (int64_t i = used * width; i < c->entries * width; i++) assert_true(k_cmp[i] == 0);
        free(k_cmp);
        nsa_case_free(c);
    }
}

static void nan_on_rows_without_keys(void **state)
{
    nsa_config config = nsa_config_small();
    (void)state;
    config.n = 30;
    for (int dtype = QUERN_F32; dtype <= QUERN_BF16; dtype++) {
        config.dtype = (quern_dtype)dtype;
        config.params.branches = QUERN_NSA_BRANCH_CMP; /* the first 7 tokens see nothing at all */
        nsa_case *c = new_case(&config, false);
        nsa_check_whole(c, ctx);
        double *o = test_tensor_get(&c->tensor[NSA_O_CMP]), *lse = test_tensor_get(&c->tensor[NSA_LSE_CMP]);
        double *d_q = test_tensor_get(&c->tensor[NSA_D_Q]);
        for (int64_t i = 0; i < 7 * config.h * config.d; i++) assert_true(o[i] == 0 && d_q[i] == 0);
        for (int64_t t = 0; t < 7; t++) assert_true(lse[t] == -INFINITY);
        free(o);
        free(lse);
        free(d_q);
        nsa_case_free(c);
    }
}

static void w_versus_w_plus_1_keys(void **state)
{
    static const int64_t windows[] = {1, 2, 16, 31, 32, 33, 100};
    nsa_config config = nsa_config_small();
    (void)state;
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        for (int causal = 0; causal < 2; causal++) {
            const int64_t w = windows[i], half = w / 2, n = config.n;
            config.params.window = w;
            config.params.causal = causal;
            nsa_case *c = new_case(&config, true);
            forward(c);
            for (int64_t t = 0; t < n; t++) {
                const int64_t low = t - half > 0 ? t - half : 0, high = t + half < n - 1 ? t + half : n - 1;
                assert_keys(c, NSA_LSE_WIN, 1, t, causal ? (t + 1 < w ? t + 1 : w) : high - low + 1);
            }
            nsa_case_free(c);
        }
    }
}

static void gates_rounded_to_bf16_before_use(void **state)
{
    /* o = g_cmp 1000 - g_slc 1000 with gates that differ by less than bf16 can tell. */
    nsa_config config = nsa_config_small();
    (void)state;
    config.dtype = QUERN_BF16;
    config.params.gate = QUERN_NSA_GATE_GIVEN;
    nsa_case *c = new_case(&config, false);
    const int64_t rows = c->rows * config.h;
    double *gates = test_doubles(rows * 3), *values = test_doubles(rows * config.dv);
    for (int64_t i = 0; i < rows; i++) {
        gates[i * 3] = 0.75 + 0x1p-12;
        gates[i * 3 + 1] = 0.75;
    }
    test_tensor_set(&c->tensor[NSA_GATES], gates);
    const nsa_slot branches[] = {NSA_O_CMP, NSA_O_SLC, NSA_O_WIN};
    for (int b = 0; b < 3; b++) {
        for (int64_t i = 0; i < rows * config.dv; i++) values[i] = b == 0 ? 1024 : b == 1 ? -1024 : 7;
        test_tensor_set(&c->tensor[branches[b]], values);
    }
    const nsa_set inputs = NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN) | NSA_BIT(NSA_GATES);
    nsa_run(c, ctx, nsa_call_combine, inputs, NSA_BIT(NSA_O));
    double *o = test_tensor_get(&c->tensor[NSA_O]);
    for (int64_t i = 0; i < rows * config.dv; i++) assert_true(o[i] == 0.25);
    free(o);
    free(gates);
    free(values);
    nsa_case_free(c);
    /* Computed from bf16 weights they come back with f32's precision. */
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    config.weight_dtype = QUERN_BF16;
    c = new_case(&config, false);
    nsa_check_whole(c, ctx);
    nsa_case_free(c);
}

static void documents_of_length_0_1_less_than_l_and_ragged(void **state)
{
    static const int64_t batches[][NSA_MAX_BATCH] = {
        {0, 1, 7, 8, 9, 0, 61, 0}, {1, 1, 1, 40, 1, 1, 1, 1}, {13, 0, 0, 5, 8, 16, 3, 29}};
    nsa_config config = nsa_config_small();
    (void)state;
    config.varlen = true;
    config.batch = 8;
    for (int i = 0; i < 3; i++) {
        memcpy(config.lens, batches[i], sizeof config.lens);
        for (int mode = 0; mode < 8; mode++) {
            config.spare = mode & 1 ? 5 : 0;
            config.params.tile = mode & 2 ? 16 : 1;
            config.params.num_selected = 6;
            config.params.causal = mode < 6;
            config.params.compress = mode & 4 ? QUERN_NSA_COMPRESS_LINEAR : QUERN_NSA_COMPRESS_MEAN;
            config.params.gate = mode & 1 ? QUERN_NSA_GATE_WEIGHTS : QUERN_NSA_GATE_NONE;
            config.params.metric = mode & 2 ? QUERN_NSA_METRIC_MEAN_LOGIT : QUERN_NSA_METRIC_SOFTMAX;
            nsa_case *c = new_case(&config, false);
            nsa_check_whole(c, ctx);
            nsa_case_free(c);
        }
    }
}

/* g = 1, 3, 16, one key/value head; head h reads h / g. (h mod Hkv differs wherever Hkv and g exceed 1.) */
static void group_sizes_and_heads_mapped_by_modulo(void **state)
{
    static const int64_t heads[][2] = {{2, 2}, {6, 2}, {16, 1}, {32, 2}, {3, 1}, {1, 1}, {15, 5}};
    nsa_config config = nsa_config_small();
    (void)state;
    config.batch = 1;
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        for (int scope = 0; scope < 2; scope++) {
            config.h = heads[i][0];
            config.hkv = heads[i][1];
            config.params.scope = (quern_nsa_scope)scope;
            config.params.tile = scope ? 16 : 1;
            config.params.num_selected = 6;
            nsa_case *c = new_case(&config, false);
            nsa_check_whole(c, ctx);
            nsa_case_free(c);
        }
    }
}

static void one_delta_for_three_gated_branches(void **state)
{
    /* Gates far apart: a Delta shared by the branches would be off by their ratio. */
    nsa_config config = nsa_config_small();
    (void)state;
    config.params.gate = QUERN_NSA_GATE_GIVEN;
    nsa_case *c = new_case(&config, false);
    const int64_t rows = c->rows * config.h;
    double *gates = test_doubles(rows * 3);
    for (int64_t i = 0; i < rows; i++) {
        gates[i * 3 + i % 3] = 1;
        gates[i * 3 + (i + 1) % 3] = 0.01;
    }
    test_tensor_set(&c->tensor[NSA_GATES], gates);
    nsa_check_whole(c, ctx);
    free(gates);
    nsa_case_free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(future_leak_through_the_incomplete_block),
        cmocka_unit_test(paddings_duplicate_of_block_0_counted_twice),
        cmocka_unit_test(whole_tiles_of_128_attended_where_blocks_of_64_were_chosen),
        cmocka_unit_test(zero_padded_compressed_rows_attended_in_varlen),
        cmocka_unit_test(nan_on_rows_without_keys),
        cmocka_unit_test(w_versus_w_plus_1_keys),
        cmocka_unit_test(gates_rounded_to_bf16_before_use),
        cmocka_unit_test(documents_of_length_0_1_less_than_l_and_ragged),
        cmocka_unit_test(group_sizes_and_heads_mapped_by_modulo),
        cmocka_unit_test(one_delta_for_three_gated_branches),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
