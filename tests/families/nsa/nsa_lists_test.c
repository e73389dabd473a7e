/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_lists_test.c - lists of blocks: converted between block sizes, handed in, and out of range. */
#include "cmocka_c11.h"
#include "context.h"
#include "compare.h"
#include "nsa_reference.h"

#include <quern/cuda.h>

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static int32_t any_entry(test_random *random, int64_t blocks)
{
    switch (test_random_int(random, 0, 9)) {
    case 0: return -1;
    case 1: return (int32_t)(test_random_one_in(random, 2) ? INT32_MIN : INT32_MAX);
    case 2: return (int32_t)(blocks + test_random_int(random, 0, 2));
    default: return (int32_t)test_random_int(random, 0, blocks - 1);
    }
}

static quern_status convert(const quern_tensor *in, int64_t from, const quern_tensor *out,
                            const quern_tensor *count, int64_t to, int64_t n, const quern_tensor *status)
{
    const quern_nsa_list_params params = {sizeof params, from, to, n};
    const quern_nsa_list_tensors tensors = {sizeof tensors, in, out, count};
    const quern_exec exec = {sizeof exec, NULL, status};
    size_t bytes = 1;
    if (quern_nsa_list_convert_workspace(ctx, &params, &tensors, &bytes) != QUERN_OK)
        return QUERN_ERR_INVALID_ARGUMENT;
    assert_int_equal(bytes, 0);
    return quern_nsa_list_convert(ctx, &exec, &params, &tensors, NULL, 0);
}

/* The bits that the call set in its status word. */
static int32_t convert_or_fail(const quern_tensor *in, int64_t from, const quern_tensor *out,
                               const quern_tensor *count, int64_t to, int64_t n)
{
    int32_t words[3] = {0x5a5a5a5a, 1 << 20, 0x5a5a5a5a};
    const quern_tensor word = quern_tensor_contiguous(&words[1], QUERN_I32, 1, (int64_t[]){1});
    if (convert(in, from, out, count, to, n, &word) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    assert_true(words[0] == 0x5a5a5a5a && words[2] == 0x5a5a5a5a && (words[1] & 1 << 20) != 0);
    return words[1] & ~(1 << 20);
}

static bool entry_outside(const int32_t *list, int64_t count, int64_t blocks)
{
    for (int64_t i = 0; i < count; i++)
        if (list[i] < -1 || list[i] >= blocks) return true;
    return false;
}

static void conversion_agrees_with_the_oracle(void **state)
{
    test_random random = {test_seed("conversion_agrees_with_the_oracle", 61)};
    (void)state;
    for (int trial = 0; trial < 300; trial++) {
        const int64_t small = test_random_int(&random, 1, 40), ratio = test_random_int(&random, 1, 5);
        const bool expand = trial % 2 == 0;
        const int64_t from = expand ? small * ratio : small, to = expand ? small : small * ratio;
        const int64_t n = test_random_int(&random, 1, 400), k_in = test_random_int(&random, 1, 9);
        const int64_t k_out = from > to ? k_in * (from / to) : k_in;
        const int64_t in_shape[] = {2, 3, k_in}, out_shape[] = {2, 3, k_out};
        const test_layout layout = (test_layout)(trial / 2 % TEST_LAYOUTS);
        test_tensor in = test_tensor_make(&random, QUERN_I32, 3, in_shape, layout);
        test_tensor out = test_tensor_make(&random, QUERN_I32, 3, out_shape, layout);
        test_tensor count = test_tensor_make(&random, QUERN_I32, 2, in_shape, layout);
        int32_t list[6 * 9], expected[64];
        for (int64_t i = 0; i < 6 * k_in; i++) list[i] = any_entry(&random, (n + from - 1) / from);
        test_tensor_set_i32(&in, list);
        const bool with_count = trial % 5 != 0;
        const int32_t bad = entry_outside(list, 6 * k_in, (n + from - 1) / from) ? QUERN_STATUS_BAD_INDEX : 0;
        assert_int_equal(convert_or_fail(&in.view, from, &out.view, with_count ? &count.view : NULL, to, n),
                         bad);
        int32_t *got = test_tensor_get_i32(&out), *counts = test_tensor_get_i32(&count);
        for (int64_t row = 0; row < 6; row++) {
            const int32_t taken =
                oracle_nsa_list_convert(list + row * k_in, k_in, from, expected, k_out, to, n);
            if (memcmp(got + row * k_out, expected, sizeof *got * (size_t)k_out) != 0 ||
                (with_count && counts[row] != taken))
                fail_msg("trial %d: row %" PRId64 " from %" PRId64 " to %" PRId64 " n %" PRId64, trial, row,
                         from, to, n);
        }
        test_tensor_check_unchanged(&in, "in");
        test_tensor_check_guards(&out, "out");
        test_tensor_check_guards(&count, "count");
        free(got);
        free(counts);
        test_tensor_free(&in);
        test_tensor_free(&out);
        test_tensor_free(&count);
    }
}

static void conversion_refuses_block_sizes_that_do_not_divide(void **state)
{
    static const int64_t bad[][3] = {{6, 4, 10}, {0, 4, 10}, {4, 0, 10}, {-4, 4, 10}, {4, 4, -1}};
    int32_t in[4] = {0, 1, 2, 3}, out[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    const quern_tensor in_view = quern_tensor_contiguous(in, QUERN_I32, 1, (int64_t[]){4});
    const quern_tensor out_view = quern_tensor_contiguous(out, QUERN_I32, 1, (int64_t[]){4});
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(convert(&in_view, bad[i][0], &out_view, NULL, bad[i][1], bad[i][2], NULL),
                         QUERN_ERR_INVALID_ARGUMENT);
        for (int j = 0; j < 8; j++) assert_int_equal(out[j], 7);
    }
}

static void conversion_takes_any_stride_of_a_single_list(void **state)
{
    int32_t in[] = {0, 1, 2, 3}, out[] = {7, 7, 7, 7};
    quern_tensor in_view = quern_tensor_contiguous(in, QUERN_I32, 3, (int64_t[]){2, 1, 2});
    const quern_tensor out_view = quern_tensor_contiguous(out, QUERN_I32, 3, (int64_t[]){2, 1, 2});
    (void)state;
    in_view.strides[1] = 999; /* along a dimension of one */
    assert_int_equal(convert_or_fail(&in_view, 4, &out_view, NULL, 4, 16), 0);
    assert_memory_equal(out, in, sizeof in);
    in_view.shape[2] = INT64_MAX / 8;
    assert_int_equal(convert(&in_view, 1024, &out_view, NULL, 1, 16, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "in.shape[2] is 1152921504606846975"));
}

/* Lists with invalid entries of every kind give the bits of clean lists. */
static void bad_entries_are_skipped(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {test_seed("bad_entries_are_skipped", 62)};
    (void)state;
    config.params.selection = QUERN_NSA_LIST_GIVEN;
    config.params.num_selected = 8;
    config.params.tile = 4;
    nsa_case *c = nsa_case_new(&config, &random);
    const nsa_set forward = nsa_forward_outputs(c), backward = nsa_backward_outputs(c);
    const int64_t count = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]), blocks = (config.n + 7) / 8;
    int32_t *dirty = malloc(sizeof *dirty * (size_t)count), *clean = malloc(sizeof *clean * (size_t)count);
    for (int64_t i = 0; i < count; i++) dirty[i] = any_entry(&random, blocks);
    for (int64_t row = 0; row < count / 8; row++)
        oracle_nsa_list_convert(dirty + row * 8, 8, 8, clean + row * 8, 8, 8, config.n);
    unsigned char *first[NSA_SLOTS] = {NULL};
    for (int run = 0; run < 2; run++) {
        test_tensor_set_i32(&c->tensor[NSA_BLOCK_IDX], run == 0 ? clean : dirty);
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), forward);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), backward);
        for (int i = 0; i < NSA_SLOTS; i++) {
            if (((forward | backward) & NSA_BIT(i)) == 0) continue;
            if (run == 0) {
                first[i] = malloc(c->tensor[i].bytes);
                memcpy(first[i], c->tensor[i].buffer, c->tensor[i].bytes);
            } else {
                if (memcmp(first[i], c->tensor[i].buffer, c->tensor[i].bytes) != 0)
                    fail_msg("%s changed with entries that should be skipped", nsa_slot_name(i));
                free(first[i]);
            }
        }
    }
    free(dirty);
    free(clean);
    nsa_case_free(c);
}

/* A list that the library computed, handed back in, gives the same result as computing it. */
static void lists_handed_back_reproduce_the_call(void **state)
{
    nsa_config config = nsa_config_small();
    test_random random = {63};
    (void)state;
    config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    config.params.block_size = 2;
    config.n = 600;
    config.batch = 1;
    config.h = config.hkv = 1;
    config.params.max_compressed_groups = 2;
    nsa_case *c = nsa_case_new(&config, &random);
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    double *before = test_tensor_get(&c->tensor[NSA_O]);
    c->config.params.selection = c->config.params.groups = QUERN_NSA_LIST_GIVEN;
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), NSA_BIT(NSA_O));
    double *after = test_tensor_get(&c->tensor[NSA_O]);
    test_check("o", after, before, test_tensor_count(&c->tensor[NSA_O]), test_forward_bound(QUERN_F32));
    free(after);
    int32_t *groups = test_tensor_get_i32(&c->tensor[NSA_GROUP_IDX]);
    c->config.params.groups = QUERN_NSA_LIST_COMPUTED; /* the groups alone, too */
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), NSA_BIT(NSA_O) | NSA_BIT(NSA_GROUP_IDX));
    after = test_tensor_get(&c->tensor[NSA_O]);
    int32_t *again = test_tensor_get_i32(&c->tensor[NSA_GROUP_IDX]);
    test_check("o", after, before, test_tensor_count(&c->tensor[NSA_O]), test_forward_bound(QUERN_F32));
    assert_memory_equal(again, groups, sizeof *groups * (size_t)test_tensor_count(&c->tensor[NSA_GROUP_IDX]));
    free(groups);
    free(again);
    free(before);
    free(after);
    nsa_case_free(c);
}

/* One call with a status word that starts as `before`; the word afterwards. An old caller's exec ends before
 * it. */
static int32_t status_after(nsa_case *c, nsa_call call, nsa_set set, int32_t before, bool by_an_old_caller)
{
    int32_t words[3] = {0x5a5a5a5a, before, 0x5a5a5a5a};
    const quern_tensor word = quern_tensor_contiguous(&words[1], QUERN_I32, 1, (int64_t[]){1});
    const quern_nsa_tensors tensors = nsa_bind(c, nsa_present(c, set));
    quern_exec exec = {sizeof exec, NULL, &word};
    size_t bytes = 0;
    if (call.workspace(ctx, &c->config.params, &tensors, &bytes) != QUERN_OK)
        fail_msg("%s: %s", call.name, quern_last_error(ctx));
    void *workspace = malloc(bytes + 1);
    assert_non_null(workspace);
    if (by_an_old_caller) {
        exec.size = offsetof(quern_exec, status);
        if (call.run(ctx, &exec, &c->config.params, &tensors, workspace, bytes) != QUERN_OK)
            fail_msg("%s: %s", call.name, quern_last_error(ctx));
        assert_int_equal(words[1], before);
        exec.size = sizeof exec;
    }
    if (call.run(ctx, &exec, &c->config.params, &tensors, workspace, bytes) != QUERN_OK)
        fail_msg("%s: %s", call.name, quern_last_error(ctx));
    free(workspace);
    assert_true(words[0] == 0x5a5a5a5a && words[2] == 0x5a5a5a5a);
    return words[1];
}

/* Sets `list` to random entries of its rows' sequences, padding, duplicates and entries of the future; then,
 * where `bad` is not -1, to that in one place. `per` is the tokens that an entry stands for. */
static void fill_list(nsa_case *c, test_random *random, int slot, int64_t k, int64_t per, int32_t bad)
{
    const nsa_config *f = &c->config;
    const int64_t count = test_tensor_count(&c->tensor[slot]), rows = count / k / c->list_rows;
    int32_t *list = malloc(sizeof *list * (size_t)count);
    assert_non_null(list);
    for (int64_t i = 0; i < count; i++)
        list[i] = f->varlen ? INT32_MAX : 0; /* rows that belong to no tile are not read */
    int64_t used = 0;
    for (int64_t b = 0; b < f->batch; b++) {
        const int64_t n = f->varlen ? f->lens[b] : f->n,
                      entries = slot == NSA_GROUP_IDX ? n / f->params.block_size : n;
        const int64_t blocks = (entries + per - 1) / per, tiles = (n + f->params.tile - 1) / f->params.tile;
        for (int64_t head = 0; head < (f->varlen ? rows : rows / f->batch); head++)
            for (int64_t i = 0; i < tiles * k; i++) {
                const int64_t row =
                    f->varlen ? head * c->list_rows + used : (b * (rows / f->batch) + head) * c->list_rows;
                list[row * k + i] = blocks == 0 || test_random_one_in(random, 4)
                                        ? -1
                                        : (int32_t)test_random_int(random, 0, blocks - 1);
                if (bad != -1 && b == f->batch - 1 && head == 0 && i == tiles * k - 1)
                    list[row * k + i] = bad == 0 ? (int32_t)blocks : bad;
            }
        used += tiles;
    }
    test_tensor_set_i32(&c->tensor[slot], list);
    free(list);
}

static void bad_entries_set_their_bit(void **state)
{
    (void)state;
    test_random random = {test_seed("bad_entries_set_their_bit", 64)};
    static const int32_t wrong[] = {-1, 0, -2, INT32_MAX, INT32_MIN}; /* none; one past the end; ... */
    for (int trial = 0; trial < test_trials(20); trial++) {
        nsa_config config = nsa_config_small();
        const bool varlen = trial % 2 != 0, old = trial == 1, groups = trial / 2 % 2;
        const int32_t bad = wrong[trial % 5];
        config.params.selection = QUERN_NSA_LIST_GIVEN;
        config.params.num_selected = 3;
        config.params.tile = 4;
        config.params.scope = (quern_nsa_scope)(trial / 3 % 2);
        config.n = groups ? 560 : 75;
        if (varlen) {
            config.varlen = true;
            config.batch = 4;
            config.lens[1] = 9;
            config.lens[2] = 1;
            config.lens[3] = config.n;
            config.spare = 12;
        }
        if (groups) {
            config.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
            config.params.block_size = config.params.stride = config.params.select_block = 2;
            config.params.groups = QUERN_NSA_LIST_GIVEN;
            config.params.max_compressed_groups = 2;
        }
        const int64_t per =
            config.params.select_block > 0 ? config.params.select_block : config.params.block_size;
        nsa_case *c = nsa_case_new(&config, &random);
        for (int which = 0; which < (groups ? 2 : 1); which++) {
            fill_list(c, &random, NSA_BLOCK_IDX, config.params.num_selected, per, which == 0 ? bad : -1);
            if (groups) fill_list(c, &random, NSA_GROUP_IDX, 2, 128, which == 1 ? bad : -1);
            const int32_t bit = bad == -1 ? 0 : which == 0 ? QUERN_STATUS_BAD_INDEX : QUERN_STATUS_BAD_GROUP;
            const nsa_set attend = nsa_attend_inputs(c) | nsa_attend_outputs(c);
            assert_int_equal(status_after(c, nsa_call_forward, nsa_forward_inputs(c) | nsa_forward_outputs(c),
                                          1 << 20, old),
                             1 << 20 | bit);
            assert_int_equal(
                status_after(c, nsa_call_backward, nsa_backward_inputs(c) | nsa_backward_outputs(c), 0, old),
                bit);
            assert_int_equal(status_after(c, nsa_call_attend, attend, 0, old), bit);
            const nsa_set d_o_b = NSA_BIT(NSA_D_O_CMP) | NSA_BIT(NSA_D_O_SLC) | NSA_BIT(NSA_D_O_WIN);
            assert_int_equal(
                status_after(c, nsa_call_attend_backward, attend | d_o_b | nsa_attend_gradients(c), 8, old),
                8 | bit);
        }
        nsa_case_free(c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(conversion_agrees_with_the_oracle),
        cmocka_unit_test(conversion_refuses_block_sizes_that_do_not_divide),
        cmocka_unit_test(conversion_takes_any_stride_of_a_single_list),
        cmocka_unit_test(bad_entries_are_skipped),
        cmocka_unit_test(lists_handed_back_reproduce_the_call),
        cmocka_unit_test(bad_entries_set_their_bit),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
