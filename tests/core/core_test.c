/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* core_test.c - the core: context, levels, arena, parallel loop, half floats. */
#include "cmocka_c11.h"

#include "core/arena.h"
#include "core/half.h"
#include "core/parallel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <quern/quern.h>

static void a_level_can_be_forced_and_a_wrong_one_is_an_error(void **unused)
{
    (void)unused;
    quern_context *ctx = NULL;
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    setenv("QUERN_CPU", "portable", 1);
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    assert_int_equal(quern_context_cpu_level(ctx), QUERN_CPU_LEVEL_PORTABLE);
    quern_context_destroy(ctx);
    setenv("QUERN_CPU", "avx9", 1);
    ctx = NULL;
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_ERR_INVALID_ARGUMENT);
    assert_null(ctx);
    assert_non_null(strstr(quern_last_error(NULL), "avx9"));
    unsetenv("QUERN_CPU");
    params.threads = -1;
    assert_int_equal(quern_context_create(&params, &ctx), QUERN_ERR_INVALID_ARGUMENT);
    params.threads = 3;
    params.size = 1;
    assert_int_equal(quern_context_create(&params, &ctx), QUERN_ERR_INVALID_ARGUMENT);
    params.size = sizeof params;
    assert_int_equal(quern_context_create(&params, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_context_create(&params, &ctx), QUERN_OK);
    assert_int_equal(quern_context_threads(ctx), 3);
    quern_context_destroy(ctx);
    quern_context_destroy(NULL);
}

static void an_arena_sizes_and_carves_alike(void **unused)
{
    (void)unused;
    char memory[1000];
    arena size = {NULL, 0}, carve = arena_on(memory + 1);
    for (int i = 0; i < 2; i++) {
        arena *a = i == 0 ? &size : &carve;
        char *p = arena_take(a, 100), *q = arena_take(a, 0), *r = arena_take(a, 65);
        if (i == 0) {
            assert_null(p);
            continue;
        }
        assert_true((uintptr_t)p % ARENA_ALIGN == 0 && (uintptr_t)r % ARENA_ALIGN == 0);
        assert_true(q >= p + 100 && r >= q && r + 65 <= memory + 1 + arena_size(&size));
    }
    assert_int_equal(size.used, carve.used);
    arena none = {NULL, 0};
    assert_int_equal(arena_size(&none), 0);
}

static void count_up(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    ((int *)arg)[index]++;
}

static void every_index_runs_once(void **unused)
{
    (void)unused;
    for (int32_t threads = 1; threads <= 5; threads++) {
        int seen[97] = {0};
        parallel_for(&(stage_exec){.threads = threads}, 97, count_up, seen);
        for (int i = 0; i < 97; i++) assert_int_equal(seen[i], 1);
    }
    parallel_for(&(stage_exec){.threads = 4}, 0, count_up, NULL);
}

static void a_child_of_fork_computes_alone(void **unused)
{
    (void)unused;
    const stage_exec exec = {.threads = 2};
    int seen[8] = {0};
    parallel_for(&exec, 8, count_up, seen);
    const pid_t child = fork();
    if (child == 0) {
        parallel_for(&exec, 8, count_up, seen);
        _exit(seen[7] == 2 ? 0 : 1);
    }
    int status = 1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Every 16-bit value survives the round trip, and midpoints between neighbours go to the even one. */
static void halves_round_to_nearest_even(void **unused)
{
    (void)unused;
    for (uint32_t h = 0; h < 65536; h++) {
        const float a = float_from_f16((uint16_t)h), b = float_from_bf16((uint16_t)h);
        if (isnan(a)) assert_true(isnan(float_from_f16(f16_from_float(a))));
        else assert_int_equal(f16_from_float(a), h);
        if (isnan(b)) assert_true(isnan(float_from_bf16(bf16_from_float(b))));
        else assert_int_equal(bf16_from_float(b), h);
        if ((h & 0x7fff) < 0x7bff) { /* a finite f16 with a finite neighbour */
            const float middle = (float)(((double)a + (double)float_from_f16((uint16_t)(h + 1))) / 2.0);
            assert_int_equal(f16_from_float(middle), h & 1 ? h + 1 : h);
            assert_int_equal(f16_from_float(nextafterf(middle, 2.0f * middle)), h + 1);
            assert_int_equal(f16_from_float(nextafterf(middle, 0.0f)), h);
        }
    }
    assert_int_equal(f16_from_float(65520.0f), 0x7c00);
    assert_int_equal(f16_from_float(65519.0f), 0x7bff);
    assert_int_equal(f16_from_float(1e-10f), 0);
    assert_int_equal(bf16_from_float(3.4e38f), 0x7f80);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_level_can_be_forced_and_a_wrong_one_is_an_error),
        cmocka_unit_test(an_arena_sizes_and_carves_alike),
        cmocka_unit_test(every_index_runs_once),
        cmocka_unit_test(a_child_of_fork_computes_alone),
        cmocka_unit_test(halves_round_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
