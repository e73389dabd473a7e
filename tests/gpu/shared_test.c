/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared_test.c - what a GPU with less shared memory takes: the stages' `supports` refuse with a sentence
 * what its blocks cannot hold, and nothing else. The device's own limit is overridden by that of an sm_86.
 */
#include "one_stage.h"

#include <stdio.h>
#include <string.h>

enum { LIMIT = 99 * 1024, N = 512, H = 4 };

static quern_tensor shaped(quern_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, 4, (int64_t[]){a, b, c, d});
    t.device = QUERN_CUDA;
    return t;
}

static void check(bool taken, bool expected, const char *why, const char *what, quern_dtype dtype, int dim,
                  size_t limit)
{
    if (taken != expected)
        fail_msg("%s, %s, dim %d, %zu bytes: %s: %s", what, quern_dtype_name(dtype), dim, limit,
                 taken ? "taken" : "refused", why);
    if (!taken)
        assert_true(strstr(why, "shared memory") != NULL && strstr(why, "offers") != NULL &&
                    strlen(why) < STAGE_WHY_BYTES - 1);
}

static void a_smaller_gpu_refuses_with_a_sentence(void **state)
{
    (void)state;
    static const int dims[] = {64, 128, 256};
    static const quern_dtype dtypes[] = {QUERN_BF16, QUERN_F16, QUERN_F32};
    static const size_t limits[] = {0, LIMIT, 1024};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 3; j++)
            for (int listed = 0; listed < 2; listed++)
                for (int k = 0; k < 3; k++) {
                    const quern_dtype dtype = dtypes[j];
                    stage_exec exec = exec_here;
                    if (limits[k] > 0) exec.shared_bytes = limits[k];
                    attend_args a = {.mask = listed ? ATTEND_BLOCKS : ATTEND_RANGE,
                                     .seqs = {1, N, N, {0}, {0}},
                                     .causal = true,
                                     .scale = 1,
                                     .query_offset = -1,
                                     .block_size = 64,
                                     .stride = 64,
                                     .tile = 128};
                    a.q = a.o = a.d_o = a.d_q = shaped(dtype, 1, N, H, dims[i]);
                    a.k = a.v = a.d_k = a.d_v = a.q;
                    if (listed) a.list = shaped(QUERN_I32, 1, H, N / 128, 16);
                    char why[STAGE_WHY_BYTES] = "";
                    const bool forward = cuda->attend_forward.supports(&exec, &a, why);
                    check(forward, k == 0 || (k == 1 && dims[i] <= 64), why, "forward", dtype, dims[i],
                          limits[k]);
                    check(cuda->attend_backward.supports(&exec, &a, why), k == 0 || (k == 1 && dims[i] <= 64),
                          why, "backward", dtype, dims[i], limits[k]);
                    if (listed) continue;
                    select_args s = {.seqs = {1, N, N / 64, {0}, {0}},
                                     .rule = {.scale = 1,
                                              .block_size = 64,
                                              .stride = 64,
                                              .select_block = 64,
                                              .k = 16,
                                              .forced_first = 1,
                                              .forced_local = 2},
                                     .tile = 1,
                                     .causal = true};
                    s.q = a.q;
                    s.keys = shaped(dtype, 1, N / 64, H, dims[i]);
                    s.lse = quern_tensor_contiguous(NULL, QUERN_F32, 3, (int64_t[]){1, H, N});
                    s.blocks = shaped(QUERN_I32, 1, H, N, 16);
                    const bool chosen = cuda->select.supports(&exec, &s, why);
                    if (k != 1) check(chosen, k == 0, why, "select", dtype, dims[i], limits[k]);
                }
}

/* Head dims that views may have and that the GPU's kernels lack. */
static void wide_heads_are_refused_with_a_sentence(void **state)
{
    (void)state;
    const stage_exec exec = exec_here;
    for (int wide = 0; wide < 2; wide++) {
        const int dim_k = wide == 0 ? 264 : 64, dim_v = wide == 0 ? 64 : 512;
        attend_args a = {.mask = ATTEND_RANGE,
                         .seqs = {1, N, N, {0}, {0}},
                         .causal = true,
                         .scale = 1,
                         .query_offset = -1};
        a.q = a.k = shaped(QUERN_BF16, 1, N, H, dim_k);
        a.v = a.o = shaped(QUERN_BF16, 1, N, H, dim_v);
        char why[STAGE_WHY_BYTES] = "", expected[STAGE_WHY_BYTES];
        snprintf(expected, sizeof expected,
                 "head dims %d and %d: the cuda backend takes multiples of 8 up to 256", dim_k, dim_v);
        assert_false(cuda->attend_forward.supports(&exec, &a, why));
        assert_string_equal(why, expected);
        assert_false(cuda->attend_backward.supports(&exec, &a, why));
        assert_string_equal(why, expected);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_smaller_gpu_refuses_with_a_sentence),
                                       cmocka_unit_test(wide_heads_are_refused_with_a_sentence)};
    return cmocka_run_group_tests(tests, open_backend, NULL);
}
