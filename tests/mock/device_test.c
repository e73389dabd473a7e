/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* device_test.c - the mock device itself: what it keeps from the host, and what it hands back. */
#include "device.h"

#include "cmocka_c11.h"

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/plan.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

static sigjmp_buf fault;

static void on_fault(int number)
{
    (void)number;
    siglongjmp(fault, 1);
}

/* Whether the host can read a byte. */
static bool readable(const void *p)
{
    struct sigaction own, before;
    bool can = false;
    memset(&own, 0, sizeof own);
    own.sa_handler = on_fault;
    sigaction(SIGSEGV, &own, &before);
    if (sigsetjmp(fault, 1) == 0) {
        (void)*(const volatile char *)p;
        can = true;
    }
    sigaction(SIGSEGV, &before, NULL);
    return can;
}

static void memory_is_closed_to_the_host(void **state)
{
    void *p;
    char bytes[100];
    (void)state;
    memset(bytes, 7, sizeof bytes);
    OK(quern_cuda_allocate(0, sizeof bytes, &p));
    assert_false(readable(p));
    OK(quern_cuda_copy(0, p, bytes, sizeof bytes, NULL));
    assert_false(readable(p));
    memset(bytes, 0, sizeof bytes);
    OK(quern_cuda_copy(0, bytes, p, sizeof bytes, NULL));
    for (size_t i = 0; i < sizeof bytes; i++) assert_int_equal(bytes[i], 7);
    OK(quern_cuda_free(0, p));
}

static quern_tensor on_device(const void *from, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    size_t bytes = quern_dtype_size(dtype);
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    OK(quern_cuda_allocate(0, bytes, &t.data));
    OK(quern_cuda_copy(0, t.data, from, bytes, NULL));
    t.device = QUERN_CUDA;
    return t;
}

/* A tensor's place in a plan's data. */
#define AT(field) (offsetof(quern_attention_tensors, field) / sizeof(void *) - 1)

enum { TOKENS = 5, HEADS = 2, DIM = 8, ROWS = TOKENS * HEADS * DIM, RUNS = 6 };

/* Calls and plans that are made again run from a recording, with what their tensors hold then; other
 * addresses are seen. */
static void replays_read_what_is_there_now(void **state)
{
    static const int64_t shape[] = {1, TOKENS, HEADS, DIM};
    float x[ROWS], first[ROWS], o[ROWS];
    quern_context *ctx;
    quern_plan *plan;
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    void *workspace;
    size_t bytes;
    (void)state;
    for (int i = 0; i < ROWS; i++) x[i] = (float)(i % 13) / 8;
    OK(quern_context_create(NULL, &ctx));
    quern_tensor q = on_device(x, QUERN_F32, 4, shape), k = on_device(x, QUERN_F32, 4, shape),
                 v = on_device(x, QUERN_F32, 4, shape), out = on_device(x, QUERN_F32, 4, shape),
                 other = on_device(x, QUERN_F32, 4, shape);
    t.q = &q, t.k = &k, t.v = &v, t.o = &out;
    OK(quern_attention_forward_workspace(ctx, &p, &t, &bytes));
    OK(quern_cuda_allocate(0, bytes, &workspace));
    OK(quern_plan_create(ctx, QUERN_OP_ATTENTION_FORWARD, &p, &t, &plan));
    for (int run = 0; run < RUNS; run++) {
        void *data[sizeof t / sizeof(void *)] = {NULL};
        data[AT(q)] = q.data;
        data[AT(k)] = k.data;
        data[AT(v)] = run < RUNS - 1 ? v.data : other.data;
        data[AT(o)] = out.data;
        const long replayed = mock_stages_replayed();
        if (run % 2 == 0) OK(quern_attention_forward(ctx, NULL, &p, &t, workspace, bytes));
        else OK(quern_plan_run(plan, NULL, data, workspace, bytes));
        if (run > 0) assert_true(mock_stages_replayed() > replayed);
        OK(quern_cuda_copy(0, o, out.data, sizeof o, NULL));
        if (run == 0) memcpy(first, o, sizeof o);
        for (int i = 0; i < ROWS; i++)
            assert_true(o[i] == (run < RUNS - 1 ? (float)(1 << run) : 1) * first[i]);
        for (int i = 0; i < ROWS; i++) x[i] *= 2;
        OK(quern_cuda_copy(0, v.data, x, sizeof x, NULL));
    }
    quern_plan_destroy(plan);
    quern_context_destroy(ctx);
    OK(quern_cuda_free(0, workspace));
    OK(quern_cuda_free(0, q.data));
    OK(quern_cuda_free(0, k.data));
    OK(quern_cuda_free(0, v.data));
    OK(quern_cuda_free(0, out.data));
    OK(quern_cuda_free(0, other.data));
}

static void memory_of_the_host_is_refused(void **state)
{
    static const int64_t shape[] = {1, TOKENS, HEADS, DIM};
    static float x[ROWS];
    quern_context *ctx;
    quern_attention_params p = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    (void)state;
    OK(quern_context_create(NULL, &ctx));
    quern_tensor q = on_device(x, QUERN_F32, 4, shape), out = on_device(x, QUERN_F32, 4, shape), k = q;
    k.data = x;
    t.q = &q, t.k = t.v = &k, t.o = &out;
    assert_int_equal(quern_attention_forward(ctx, NULL, &p, &t, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "k is "));
    quern_context_destroy(ctx);
    OK(quern_cuda_free(0, q.data));
    OK(quern_cuda_free(0, out.data));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(memory_is_closed_to_the_host),
                                       cmocka_unit_test(replays_read_what_is_there_now),
                                       cmocka_unit_test(memory_of_the_host_is_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
