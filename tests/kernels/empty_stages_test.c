/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* empty_stages_test.c - the CPU's stages on views without elements whose other extents are huge: each returns
 * at once, asks for little workspace, and reads nothing. (The alarm ends a test that spins.) */
#include "cpu/cpu.h"
#include "cmocka_c11.h"

#include <stdlib.h>
#include <unistd.h>

enum { SECONDS = 20, LITTLE = 64 << 20 };

static const int64_t many = (int64_t)3 << 30; /* more than 32 bits hold */

static quern_tensor view(quern_dtype dtype, int32_t ndim, int64_t s0, int64_t s1, int64_t s2, int64_t s3)
{
    return quern_tensor_contiguous(NULL, dtype, ndim, (const int64_t[]){s0, s1, s2, s3});
}

static int32_t word; /* of faults: there are none */
static const stage_exec exec = {.threads = 2, .cpu_level = QUERN_CPU_LEVEL_PORTABLE, .status = &word};

#define RUN(stage, args)                                                                                     \
    do {                                                                                                     \
        const size_t bytes_ = STAGE_WORKSPACE(quern_backend_cpu.stage, &exec, args);                         \
        if (bytes_ > LITTLE) fail_msg(#stage ": %zu bytes of workspace for nothing", bytes_);                \
        void *workspace_ = malloc(bytes_ + 1);                                                               \
        assert_int_equal(quern_backend_cpu.stage.run(&exec, args, workspace_), QUERN_OK);                    \
        free(workspace_);                                                                                    \
    } while (0)

/* No sequence of many heads; no token of many heads; no token of many sequences. */
static const struct {
    int64_t batch, heads;
} empties[] = {{0, (int64_t)3 << 30}, {1, (int64_t)3 << 30}, {(int64_t)3 << 30, 2}};
enum { EMPTIES = sizeof empties / sizeof *empties };

static void attention(void **state)
{
    (void)state;
    alarm(SECONDS);
    for (int i = 0; i < EMPTIES; i++)
        for (int mask = ATTEND_RANGE; mask <= ATTEND_BLOCKS; mask++) {
            const int64_t b = empties[i].batch, h = empties[i].heads;
            attend_args a = {.mask = (attend_mask)mask,
                             .seqs = {.batch = b},
                             .causal = true,
                             .scale = 1,
                             .query_offset = -1,
                             .block_size = 8,
                             .stride = 8,
                             .tile = 1};
            a.q = a.k = a.v = a.o = a.d_o = a.d_q = a.d_k = a.d_v = view(QUERN_BF16, 4, b, 0, h, 16);
            a.lse = a.delta = view(QUERN_F32, 3, b, h, 0, 0);
            if (mask == ATTEND_BLOCKS) a.list = view(QUERN_I32, 4, b, h, 0, 3);
            RUN(attend_forward, &a);
            RUN(attend_backward, &a);
        }
    alarm(0);
}

static void rows(void **state)
{
    (void)state;
    alarm(SECONDS);
    for (int i = 0; i < EMPTIES; i++) {
        const int64_t b = empties[i].batch, h = empties[i].heads;
        const quern_tensor x = view(QUERN_F16, 4, b, 0, h, 8), f = view(QUERN_F32, 4, b, 0, h, 8),
                           s = view(QUERN_F32, 3, b, h, 0, 0);
        const convert_args convert = {.seqs = {.batch = b}, .in = f, .out = x};
        const rowdot_args rowdot = {.seqs = {.batch = b}, .a = x, .b = x, .out = s};
        const gate_args gate = {.seqs = {.batch = b}, .o_b = {x, x, x}, .o = x, .d_o = x, .delta = {s, s, s}};
        const compress_args compress = {.seqs = {.batch = b},
                                        .block_size = 8,
                                        .stride = 8,
                                        .k = x,
                                        .v = x,
                                        .k_cmp = x,
                                        .v_cmp = x,
                                        .d_k_cmp = x,
                                        .d_v_cmp = x,
                                        .d_k = x,
                                        .d_v = x};
        RUN(convert, &convert);
        RUN(rowdot, &rowdot);
        RUN(gate_forward, &gate);
        RUN(gate_backward, &gate);
        RUN(compress_forward, &compress);
        RUN(compress_backward, &compress);
    }
    alarm(0);
}

static void lists(void **state)
{
    (void)state;
    alarm(SECONDS);
    const quern_tensor none = view(QUERN_I32, 2, many * 1000, 0, 0, 0);
    const list_convert_args convert = {.in = none, .out = none, .from = 8, .to = 16, .n = 100};
    RUN(list_convert, &convert);
    for (int i = 0; i < EMPTIES; i++) {
        const int64_t b = empties[i].batch, h = empties[i].heads;
        validate_lists_args validate = {.seqs = {.batch = b},
                                        .blocks = view(QUERN_I32, 4, b, h, 0, 3),
                                        .tile = 1,
                                        .select_block = 8,
                                        .block_size = 8,
                                        .stride = 8};
        RUN(validate_lists, &validate);
        select_args select = {.seqs = {.batch = b},
                              .q = view(QUERN_F32, 4, b, 0, h, 8),
                              .keys = view(QUERN_F32, 4, b, 0, h, 8)};
        select.rule.block_size = select.rule.stride = select.rule.select_block = 8;
        select.rule.k = 3;
        select.tile = 1;
        select.causal = true;
        select.rule.scale = 1;
        select.blocks = view(QUERN_I32, 4, b, h, 0, 3);
        select.count = view(QUERN_I32, 3, b, h, 0, 0);
        RUN(select, &select);
        const block_index_args index = {.seqs = {.batch = b},
                                        .rule = {.block_size = 8, .k = 3},
                                        .query_offset = -1,
                                        .q = view(QUERN_F32, 4, b, 0, h, 8),
                                        .keys = view(QUERN_F32, 4, b, 0, 1, 8),
                                        .blocks = view(QUERN_I32, 4, b, h, 0, 3)};
        RUN(block_index, &index);
        const index_loss_args loss = {.seqs = {.batch = b},
                                      .block_size = 8,
                                      .query_offset = -1,
                                      .scale = 1,
                                      .scale_index = 1,
                                      .lambda = 1,
                                      .list = view(QUERN_I32, 4, b, h, 0, 3),
                                      .q_index = view(QUERN_F32, 4, b, 0, h, 8),
                                      .keys_index = view(QUERN_F32, 4, b, 0, 1, 8),
                                      .q = view(QUERN_F32, 4, b, 0, h, 8),
                                      .keys = view(QUERN_F32, 4, b, 0, h, 8),
                                      .d_q_index = view(QUERN_F32, 4, b, 0, h, 8),
                                      .d_keys_index = view(QUERN_F32, 4, b, 0, 1, 8)};
        RUN(index_loss, &loss);
    }
    assert_int_equal(word, 0);
    alarm(0);
}

static void hyper_connections(void **state)
{
    (void)state;
    alarm(SECONDS);
    const quern_tensor x = view(QUERN_BF16, 3, 0, 4, many / 4, 0),
                       row = view(QUERN_BF16, 2, 0, many / 4, 0, 0);
    const hyper_args a = {.iterations = 20,
                          .x = x,
                          .fn = view(QUERN_F32, 2, 24, many, 0, 0),
                          .base = view(QUERN_F32, 1, 24, 0, 0, 0),
                          .scale = view(QUERN_F32, 1, 3, 0, 0, 0),
                          .weight = view(QUERN_F32, 1, many / 4, 0, 0, 0),
                          .f = row,
                          .h = row,
                          .out = x,
                          .d_h = row,
                          .d_out = x,
                          .d_x = x,
                          .d_f = row};
    RUN(hyper_forward, &a);
    RUN(hyper_backward, &a);
    alarm(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(attention), cmocka_unit_test(rows),
                                       cmocka_unit_test(lists), cmocka_unit_test(hyper_connections)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
