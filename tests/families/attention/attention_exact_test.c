/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_exact_test.c - what dense attention promises bit by bit: the same result at any thread count, in
 * every run, in a child of fork and through any strides; nonfinite values only where they are seen; offsets
 * past 2^31 elements.
 */
#include "attention_case.h"
#include "cmocka_c11.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const int32_t ragged[] = {0, 0, 1, 160, 161, 390};
static const oracle_dense cases[] = {
    {1, 300, 300, 4, 2, 64, 64, true, 0, -1, 0, NULL, NULL},
    {3, 70, 150, 6, 2, 40, 24, true, 50, -1, 0, NULL, NULL},
    {2, 100, 100, 2, 2, 128, 128, false, 0, -1, 0, NULL, NULL},
    {5, 400, 400, 4, 1, 32, 16, true, 0, -1, 0, ragged, NULL},
    {2, 90, 60, 2, 1, 16, 16, true, 0, -1, 0, NULL, NULL}, /* 30 rows see no key */
};
static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};

enum { OUTPUTS = 5 };

/* On the GPU (tests/gpu) rows that are not aligned to 16 bytes take other kernels, whose sums have another
 * order. */
#ifdef QUERN_TEST_GPU
static const test_layout layouts[] = {TEST_SPACED};
#else
static const test_layout layouts[] = {TEST_SPACED, TEST_STRIDED};
#endif

static void run(attention_case *c, quern_cpu_level level, int32_t threads)
{
    quern_context *ctx = test_context(level, threads);
    attention_case_reset(c);
    attention_case_forward(c, ctx);
    attention_case_backward(c, ctx);
    quern_context_destroy(ctx);
}

static void outputs_of(attention_case *c, test_tensor *out[OUTPUTS])
{
    test_tensor *const all[OUTPUTS] = {&c->o, &c->lse, &c->d_q, &c->d_k, &c->d_v};
    memcpy(out, all, sizeof all);
}

static void check_same(attention_case *a, attention_case *b, const char *label)
{
    static const char *const names[OUTPUTS] = {"o", "lse", "d_q", "d_k", "d_v"};
    test_tensor *x[OUTPUTS], *y[OUTPUTS];
    outputs_of(a, x);
    outputs_of(b, y);
    for (int i = 0; i < OUTPUTS; i++)
        if (!test_tensor_same_bits(x[i], y[i])) fail_msg("%s: %s differs", label, names[i]);
}

/* Two cases with the same inputs: the second of layout `layout`. */
static void make_pair(attention_case pair[2], const oracle_dense *dense, quern_dtype dtype,
                      test_layout layout, test_random *random)
{
    attention_case_make(&pair[0], dense, dtype, TEST_CONTIGUOUS, random);
    attention_case_make(&pair[1], dense, dtype, layout, random);
    test_tensor *const from[] = {&pair[0].q, &pair[0].k, &pair[0].v, &pair[0].d_o};
    test_tensor *const to[] = {&pair[1].q, &pair[1].k, &pair[1].v, &pair[1].d_o};
    for (int i = 0; i < 4; i++) {
        double *values = test_tensor_get(from[i]);
        test_tensor_set(to[i], values);
        free(values);
    }
}

static void bits_do_not_depend_on_threads_runs_or_strides(void **state)
{
    test_random random = {test_seed("attention_exact", 1)};
    uint64_t index = 0;
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int d = 0; d < 3 * (int)(sizeof layouts / sizeof *layouts); d++) {
            attention_case pair[2];
            if (!test_in_share(index++)) continue;
            make_pair(pair, &cases[i], dtypes[d % 3], layouts[d / 3], &random);
            for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
                run(&pair[0], level, 1);
                for (int32_t threads = 1; threads <= 3; threads++) {
                    char label[100];
                    snprintf(label, sizeof label, "case %zu, %s, %s, %s, %d threads", i,
                             quern_dtype_name(dtypes[d % 3]), test_layout_name(layouts[d / 3]),
                             quern_cpu_level_name(level), threads);
                    run(&pair[1], level, threads);
                    check_same(&pair[0], &pair[1], label);
                }
            }
            attention_case_free(&pair[0]);
            attention_case_free(&pair[1]);
        }
    }
}

/* Threads that were started before the fork are not in the child, which must compute on its own. */
static void a_child_of_fork_computes_the_same(void **state)
{
    test_random random = {1};
    attention_case c, again;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    attention_case_make(&c, &cases[0], QUERN_F32, TEST_CONTIGUOUS, &random);
    size_t forward = 0, backward = 0;
    assert_int_equal(quern_attention_forward_workspace(ctx, &c.params, &c.tensors, &forward), QUERN_OK);
    assert_int_equal(quern_attention_backward_workspace(ctx, &c.params, &c.tensors, &backward), QUERN_OK);
    attention_case_forward(&c, ctx);
    attention_case_backward(&c, ctx);
    random.state = 1;
    attention_case_make(&again, &cases[0], QUERN_F32, TEST_CONTIGUOUS, &random);
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        void *workspace = malloc(forward > backward ? forward : backward);
        test_tensor *x[OUTPUTS], *y[OUTPUTS];
        alarm(60);
        int code =
            quern_attention_forward(ctx, NULL, &again.params, &again.tensors, workspace, forward) != QUERN_OK;
        code |= quern_attention_backward(ctx, NULL, &again.params, &again.tensors, workspace, backward) !=
                QUERN_OK;
        outputs_of(&c, x);
        outputs_of(&again, y);
        for (int i = 0; i < OUTPUTS; i++) code |= !test_tensor_same_bits(x[i], y[i]) << 1;
        _exit(code);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("the child came back with status %#x", (unsigned)status);
    attention_case_free(&c);
    attention_case_free(&again);
    quern_context_destroy(ctx);
}

/* Without lse, o is the same; a window that holds every key is no window. */
static void options_that_change_nothing(void **state)
{
    test_random random = {test_seed("attention_exact", 1)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        attention_case pair[2];
        make_pair(pair, &cases[i], QUERN_F32, TEST_UNALIGNED, &random);
        if (pair[1].params.window == 0) pair[1].params.window = INT64_MAX;
        run(&pair[0], QUERN_CPU_LEVEL_AUTO, 1);
        run(&pair[1], QUERN_CPU_LEVEL_AUTO, 1);
        check_same(&pair[0], &pair[1], "window of 2^63 - 1");
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
        attention_case_reset(&pair[1]);
        pair[1].tensors.lse = NULL;
        attention_case_forward(&pair[1], ctx);
        assert_true(test_tensor_same_bits(&pair[0].o, &pair[1].o));
        test_tensor_check_unchanged(&pair[1].lse, "lse");
        quern_context_destroy(ctx);
        attention_case_free(&pair[0]);
        attention_case_free(&pair[1]);
    }
}

/* Puts `value` into element [0][row][0][column] of a tensor [1, n, heads, dim]. */
static void plant(test_tensor *t, int64_t row, int64_t column, double value)
{
    double *x = test_tensor_get(t);
    x[row * t->view.shape[2] * t->view.shape[3] + column] = value;
    test_tensor_set(t, x);
    free(x);
}

static void check_finite_alike(const test_tensor *t, const double *reference, const char *name,
                               const char *label)
{
    double *x = test_tensor_get(t);
    for (int64_t i = 0; i < test_tensor_count(t); i++)
        if (isfinite(x[i]) != isfinite(reference[i]))
            fail_msg("%s: %s[%lld] is %g, the oracle's %g", label, name, (long long)i, x[i], reference[i]);
    free(x);
}

/* NaN and infinity in a key, a value, a query or a gradient row: each element is finite exactly where the
 * oracle's is. A causal window leaves rows on both sides that do not see the key; with 32 heads to a key
 * head, the rows of one query fill a tile. */
static void check_nonfinite(const oracle_dense *dense, int64_t row, quern_dtype dtype, double nonfinite,
                            int where, test_random *random)
{
    static const char *const names[] = {"k", "v", "q", "d_o"};
    attention_case c;
    attention_case_make(&c, dense, dtype, TEST_CONTIGUOUS, random);
    test_tensor *const planted[] = {&c.k, &c.v, &c.q, &c.d_o};
    plant(planted[where], row, 3, nonfinite);
    attention_reference r = attention_case_reference(&c);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        char label[100];
        snprintf(label, sizeof label, "%g in %s[%lld], g %lld, %s, %s", nonfinite, names[where],
                 (long long)row, (long long)(dense->h / dense->hkv), quern_dtype_name(dtype),
                 quern_cpu_level_name(level));
        run(&c, level, 1);
        check_finite_alike(&c.o, r.o, "o", label);
        check_finite_alike(&c.d_q, r.d_q, "d_q", label);
        check_finite_alike(&c.d_k, r.d_k, "d_k", label);
        check_finite_alike(&c.d_v, r.d_v, "d_v", label);
    }
    attention_reference_free(&r);
    attention_case_free(&c);
}

static void nonfinite_values_reach_only_rows_that_see_them(void **state)
{
    static const oracle_dense by_heads[] = {
        {1, 120, 120, 2, 1, 32, 24, true, 40, -1, 0, NULL, NULL},
        {1, 40, 40, 32, 1, 16, 16, true, 0, -1, 0, NULL, NULL},
    };
    static const double nonfinite[] = {NAN, INFINITY, -INFINITY};
    test_random random = {test_seed("attention_nonfinite", 1)};
    uint64_t index = 0;
    (void)state;
    for (int where = 0; where < 4; where++)
        for (int s = 0; s < 3; s++)
            for (int d = 0; d < 3; d++)
                for (int row = 0; row < 2; row++) {
                    if (!test_in_share(index++)) continue;
                    check_nonfinite(&by_heads[0], 77 + row, dtypes[d], nonfinite[s], where, &random);
                    check_nonfinite(&by_heads[1], 20 + row, dtypes[d], nonfinite[s], where, &random);
                }
}

static void gradients_at_the_largest_scale_are_finite(void **state)
{
    const oracle_dense dense = {1, 120, 120, 2, 1, 64, 32, true, 0, -1, 65536, NULL, NULL};
    test_random random = {5};
    (void)state;
    for (int d = 0; d < 3; d++)
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            attention_case c;
            attention_case_make(&c, &dense, dtypes[d], TEST_CONTIGUOUS, &random);
            run(&c, level, 1);
            const test_tensor *const gradients[] = {&c.d_q, &c.d_k, &c.d_v};
            for (int i = 0; i < 3; i++) {
                double *x = test_tensor_get(gradients[i]);
                for (int64_t j = 0; j < test_tensor_count(gradients[i]); j++)
                    assert_true(dtypes[d] == QUERN_F16 ? !isnan(x[j]) : isfinite(x[j]));
                free(x);
            }
            attention_case_free(&c);
        }
}

/* A view of the same shape whose strides reach past 2^31 elements, in a mapping that takes memory only for
 * the pages touched. */
static test_tensor spread(const test_tensor *t, char **next)
{
    test_tensor far = *t;
    const int64_t row = ((int64_t)1 << 31) / (t->view.shape[t->view.ndim - 3] - 1) + 40;
    far.buffer = far.snapshot = t->buffer; /* of no bytes: nothing to compare outside the elements */
    far.bytes = 0;
    far.view.data = *next;
    if (t->view.ndim == 4) {
        far.view.strides[0] = t->view.shape[1] * row;
        far.view.strides[1] = row;
    } else {
        far.view.strides[0] = t->view.shape[1] * row;
        far.view.strides[1] = row;
    } /* lse [B, H, N] */
    *next += (far.view.strides[0] * t->view.shape[0] + 64) * (int64_t)quern_dtype_size(t->view.dtype);
    return far;
}

static void offsets_past_2_to_the_31(void **state)
{
    const oracle_dense dense = {2, 5, 5, 2, 1, 16, 8, true, 0, -1, 0, NULL, NULL};
    const size_t bytes = (size_t)1 << 39;
    test_random random = {1};
    (void)state;
    char *memory =
             mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0),
         *next = memory;
    if (memory == MAP_FAILED) {
        print_message("no address space for this test on this machine\n");
        skip();
    }
    for (int d = 0; d < 3; d++) {
        attention_case c;
        attention_case_make(&c, &dense, dtypes[d], TEST_CONTIGUOUS, &random);
        run(&c, QUERN_CPU_LEVEL_AUTO, 2);
        test_tensor *near[] = {&c.q, &c.k, &c.v, &c.d_o, &c.o, &c.lse, &c.d_q, &c.d_k, &c.d_v};
        const quern_tensor **slots[] = {&c.tensors.q,   &c.tensors.k,   &c.tensors.v,
                                        &c.tensors.d_o, &c.tensors.o,   &c.tensors.lse,
                                        &c.tensors.d_q, &c.tensors.d_k, &c.tensors.d_v};
        test_tensor far[9];
        for (int i = 0; i < 9; i++) {
            far[i] = spread(near[i], &next);
            *slots[i] = &far[i].view;
            assert_true(next < memory + bytes);
            if (i >= 4) continue;
            double *values = test_tensor_get(near[i]);
            test_tensor_set(&far[i], values);
            free(values);
        }
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        size_t forward = 0, backward = 0;
        assert_int_equal(quern_attention_forward_workspace(ctx, &c.params, &c.tensors, &forward), QUERN_OK);
        assert_int_equal(quern_attention_backward_workspace(ctx, &c.params, &c.tensors, &backward), QUERN_OK);
        void *workspace = malloc(forward > backward ? forward : backward);
        if (quern_attention_forward(ctx, NULL, &c.params, &c.tensors, workspace, forward) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        if (quern_attention_backward(ctx, NULL, &c.params, &c.tensors, workspace, backward) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        for (int i = 4; i < 9; i++) assert_true(test_tensor_same_bits(near[i], &far[i]));
        free(workspace);
        quern_context_destroy(ctx);
        attention_case_free(&c);
        madvise(memory, bytes, MADV_DONTNEED);
        next = memory;
    }
    munmap(memory, bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_of_fork_computes_the_same),
        cmocka_unit_test(bits_do_not_depend_on_threads_runs_or_strides),
        cmocka_unit_test(options_that_change_nothing),
        cmocka_unit_test(nonfinite_values_reach_only_rows_that_see_them),
        cmocka_unit_test(gradients_at_the_largest_scale_are_finite),
        cmocka_unit_test(offsets_past_2_to_the_31),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
