/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kept_calls_test.c - calls that are made again: which are kept, that nothing but addresses may differ, and
 * that what follows from addresses is checked each time. every_operation_test.c makes each operation's calls
 * again. */
#include "cmocka_c11.h"
#include "random.h"
#include "tensor.h"

#include "attention/attention.h"
#include "core/op.h"
#include "runtime/context.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 9, HEADS = 2, DIM = 16, ELEMENTS = ROWS * HEADS * DIM, ARRAYS = 4 };

/* A call on memory of its own: q, k, v, o. */
typedef struct small_call {
    float memory[ARRAYS][ELEMENTS + 4];
    quern_tensor view[ARRAYS];
    quern_attention_params params;
    quern_attention_tensors tensors;
    _Alignas(16) char workspace[1 << 19];
} small_call;

static void point(small_call *c)
{
    c->tensors = (quern_attention_tensors)QUERN_ATTENTION_TENSORS_INIT;
    c->tensors.q = &c->view[0];
    c->tensors.k = &c->view[1];
    c->tensors.v = &c->view[2];
    c->tensors.o = &c->view[3];
}

static small_call *make(uint64_t seed)
{
    static const int64_t shape[] = {1, ROWS, HEADS, DIM};
    test_random random = {seed};
    small_call *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    assert_non_null(c);
    c->params = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    for (int i = 0; i < ARRAYS; i++) {
        for (int k = 0; k < ELEMENTS + 4; k++) c->memory[i][k] = (float)test_random_normal(&random);
        c->view[i] = quern_tensor_contiguous(c->memory[i], QUERN_F32, 4, shape);
    }
    point(c);
    return c;
}

static quern_status run(small_call *c, quern_context *on)
{
    return quern_attention_forward(on, NULL, &c->params, &c->tensors, c->workspace, sizeof c->workspace);
}

static quern_context *fresh(void)
{
    return test_context(QUERN_CPU_LEVEL_AUTO, 2);
}

/* The call gives on a context what it gives on one that sees it first: the bits, or the refusal. */
static void check(small_call *c, quern_context *on)
{
    float o[ELEMENTS + 4];
    char sentence[400];
    quern_context *first = fresh();
    memset(c->memory[3], 0x5a, sizeof c->memory[3]);
    const quern_status expected = run(c, first);
    memcpy(o, c->memory[3], sizeof o);
    snprintf(sentence, sizeof sentence, "%s", quern_last_error(first));
    memset(c->memory[3], 0x5a, sizeof c->memory[3]);
    assert_int_equal(run(c, on), expected);
    assert_memory_equal(o, c->memory[3], sizeof o);
    if (expected != QUERN_OK) assert_string_equal(sentence, quern_last_error(on));
    quern_context_destroy(first);
}

static small_call *kept_call_on(quern_context *on)
{
    small_call *c = make(1);
    for (int i = 0; i < 3; i++) assert_int_equal(run(c, on), QUERN_OK);
    return c;
}

static void a_call_is_kept_when_it_is_seen_again(void **state)
{
    (void)state;
    quern_context *on = fresh();
    small_call *c = make(1);
    const call_request request = {&attention_family, 0, &c->params, &c->tensors};
    const op_call *call;
    const op_used *used;
    assert_null(kept_calls_take(&on->calls, &request, &call, &used));
    kept_call *slot = kept_calls_take(&on->calls, &request, &call, &used);
    assert_non_null(slot);
    assert_null(call);
    assert_null(kept_calls_take(&on->calls, &request, &call, &used)); /* another thread has it */
    kept_call_release(slot);
    assert_int_equal(run(c, on), QUERN_OK);
    slot = kept_calls_take(&on->calls, &request, &call, &used);
    assert_non_null(slot);
    assert_non_null(call);
    assert_int_equal(used->count, 4);
    kept_call_release(slot);
    kept_call_release(NULL);
    free(c);
    quern_context_destroy(on);
}

static void a_refused_call_is_not_kept(void **state)
{
    (void)state;
    quern_context *on = fresh();
    small_call *c = make(1);
    c->view[1].shape[3] = DIM - 1;
    for (int i = 0; i < 4; i++) check(c, on);
    const call_request request = {&attention_family, 0, &c->params, &c->tensors};
    const op_call *call;
    const op_used *used;
    kept_call_release(kept_calls_take(&on->calls, &request, &call, &used));
    assert_null(call);
    free(c);
    quern_context_destroy(on);
}

static void other_memory_and_numbers_give_their_own_result(void **state)
{
    (void)state;
    quern_context *on = fresh();
    small_call *c = kept_call_on(on);
    for (uint64_t seed = 2; seed < 6; seed++) {
        small_call *other = make(seed);
        check(other, on);
        free(other);
    }
    free(c);
    quern_context_destroy(on);
}

/* Each differs from the kept call in one thing. */
static void a_call_that_differs_is_not_the_kept_one(void **state)
{
    (void)state;
    quern_context *on = fresh();
    small_call *c = kept_call_on(on);
    for (int what = 0; what < 12; what++) {
        small_call *other = make(1);
        if (what == 0) other->params.causal = !other->params.causal;
        if (what == 1) other->params.scale = 0.5f;
        if (what == 2) other->view[0].shape[1] = other->view[3].shape[1] = ROWS - 2;
        if (what == 3) other->view[1].shape[1] = other->view[2].shape[1] = ROWS - 2;
        if (what == 4) other->view[1].strides[1] = 0;
        if (what == 5) other->view[1].dtype = QUERN_BF16;
        if (what == 6) other->view[2].ndim = 3;
        if (what == 7) other->view[2].device = QUERN_CUDA;
        if (what == 8) other->tensors.v = NULL;
        if (what == 9) other->tensors.lse = &other->view[0];
        if (what == 10) other->params.size = 8;
        if (what == 11) other->view[0].data = other->memory[0] + 1; /* aligned to 4 bytes alone */
        for (int i = 0; i < 3; i++) check(other, on);
        check(c, on);
        free(other);
    }
    free(c);
    quern_context_destroy(on);
}

static void addresses_are_checked_each_time(void **state)
{
    (void)state;
    quern_context *on = fresh();
    small_call *c = kept_call_on(on);
    for (int i = 0; i < ARRAYS; i++) {
        void *const right = c->view[i].data;
        c->view[i].data = NULL;
        check(c, on);
        c->view[i].data = (char *)right + 2;
        check(c, on);
        c->view[i].data = (void *)(UINTPTR_MAX - 15); // NOLINT(performance-no-int-to-ptr)
        check(c, on);
        c->view[i].data = right;
        check(c, on);
    }
    c->view[3].data = c->memory[2] + 4;
    check(c, on);
    assert_non_null(strstr(quern_last_error(on), "shares memory"));
    c->view[3].data = c->memory[3];
    quern_exec exec = QUERN_EXEC_INIT;
    const quern_tensor word = quern_tensor_contiguous(c->memory[0], QUERN_I32, 1, (const int64_t[]){1});
    exec.status = &word;
    assert_int_equal(quern_attention_forward(on, &exec, &c->params, &c->tensors, c->workspace,
                                             sizeof c->workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(on), "exec.status shares memory with q"));
    assert_int_equal(quern_attention_forward(on, NULL, &c->params, &c->tensors, NULL, 0),
                     QUERN_ERR_WORKSPACE);
    check(c, on);
    free(c);
    quern_context_destroy(on);
}

/* More calls than there are slots. */
static void many_calls_take_each_others_place(void **state)
{
    (void)state;
    quern_context *on = fresh();
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 3 * KEPT_CALLS; i++) {
            small_call *c = make(1);
            c->params.scale = (float)(i + 1);
            check(c, on);
            check(c, on);
            free(c);
        }
    quern_context_destroy(on);
}

typedef struct runner {
    quern_context *on;
    small_call *call;
    float o[ELEMENTS + 4];
    int failures;
} runner;

static void *run_often(void *arg)
{
    runner *r = arg;
    for (int i = 0; i < 300; i++) {
        memset(r->call->memory[3], 0, sizeof r->call->memory[3]);
        r->failures += run(r->call, r->on) != QUERN_OK || memcmp(r->call->memory[3], r->o, sizeof r->o) != 0;
    }
    return NULL;
}

static void threads_share_a_context(void **state)
{
    enum { THREADS = 3 };
    static runner runners[THREADS];
    pthread_t threads[THREADS];
    (void)state;
    quern_context *on = fresh(), *first = fresh();
    for (int i = 0; i < THREADS; i++) {
        runner *r = &runners[i];
        *r = (runner){.on = on, .call = make((uint64_t)i)};
        memset(r->call->memory[3], 0, sizeof r->call->memory[3]);
        assert_int_equal(run(r->call, first), QUERN_OK);
        memcpy(r->o, r->call->memory[3], sizeof r->o);
        assert_int_equal(pthread_create(&threads[i], NULL, run_often, r), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(runners[i].failures, 0);
        free(runners[i].call);
    }
    quern_context_destroy(first);
    quern_context_destroy(on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_is_kept_when_it_is_seen_again),
        cmocka_unit_test(a_refused_call_is_not_kept),
        cmocka_unit_test(other_memory_and_numbers_give_their_own_result),
        cmocka_unit_test(a_call_that_differs_is_not_the_kept_one),
        cmocka_unit_test(addresses_are_checked_each_time),
        cmocka_unit_test(many_calls_take_each_others_place),
        cmocka_unit_test(threads_share_a_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
