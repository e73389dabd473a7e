/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * moe_allocation_test.c - a plan of the layer allocates when it is made and never when it runs.
 *
 * The linker sends the library's allocations through the __wrap functions below.
 */
#include "cmocka_c11.h"
#include "moe_case.h"

#include <quern/plan.h>

#include <stdatomic.h>
#include <stdlib.h>

static atomic_long allocations;

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);

void *__wrap_malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __real_calloc(count, size);
}

void *__wrap_realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __real_realloc(old, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __real_aligned_alloc(alignment, size);
}

/* Runs a plan twice. */
static void check_runs(quern_context *ctx, quern_operation operation, const void *params, const void *tensors,
                       void *const *data)
{
    size_t bytes = 0;
    quern_plan *plan = NULL;
    atomic_store(&allocations, 0);
    if (quern_plan_create(ctx, operation, params, tensors, &plan) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    assert_true(atomic_load(&allocations) > 0); /* they are seen */
    assert_int_equal(quern_plan_workspace(plan, &bytes), QUERN_OK);
    test_workspace space = test_workspace_make(bytes);
    atomic_store(&allocations, 0);
    for (int run = 0; run < 2; run++)
        if (quern_plan_run(plan, NULL, data, space.data, bytes) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
    assert_int_equal(atomic_load(&allocations), 0);
    test_workspace_close(&space);
    quern_plan_destroy(plan);
}

static void the_layer(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    static const int64_t tokens[] = {0, 1, 8, 33};
    test_random random = {test_seed("moe allocations", 61)};
    (void)state;
    for (int trial = 0; trial < 36; trial++) {
        moe_wish w = {.tokens = tokens[trial % 4],
                      .dtype = dtypes[trial / 4 % 3],
                      .routed = (moe_weights)test_random_int(&random, MOE_FLOATS, MOE_REPACKED),
                      .shared = (moe_weights)test_random_int(&random, MOE_NONE, MOE_REPACKED),
                      .bias = trial % 2};
        w.a4 = w.routed != MOE_FLOATS && trial % 3 == 0;
        moe_case c = moe_make(&random, &w);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        moe_call_forward(&c, ctx); /* what the backward pass takes from it */
        for (int backward = 0; backward < 2; backward++) {
            const quern_moe_tensors t = moe_bind(&c, backward);
            void *data[MOE_TENSORS] = {NULL};
            for (int i = 0; i < MOE_TENSORS; i++)
                if ((&t.hidden)[i] != NULL) data[i] = c.t[i].view.data;
            check_runs(ctx, backward ? QUERN_OP_MOE_BACKWARD : QUERN_OP_MOE_FORWARD, &c.params, &t, data);
        }
        quern_context_destroy(ctx);
        moe_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_layer)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
