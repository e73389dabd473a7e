/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* replays_test.c - which calls find a replay, with a backend that only counts. */
#include "cmocka_c11.h"

#include "attention/attention.h"
#include "core/op.h"
#include "runtime/replays.h"
#include "nsa/call.h"
#include "tensor.h"

#include <pthread.h>
#include <string.h>

typedef struct own_call {
    op_call call;
    int32_t stride; /* a part of the call that no key covers */
} own_call;

static const op_family family = {.call_size = sizeof(own_call), .program_at = sizeof(own_call)};
static atomic_int opened, closed;
static bool memory_is_short;

static void *open_replay(const stage_exec *exec, size_t bytes)
{
    static char opened_ones[1000];
    (void)exec;
    assert_int_equal(bytes, OP_ADDRESSES_BYTES);
    return memory_is_short ? NULL : &opened_ones[atomic_fetch_add(&opened, 1)];
}

static void close_replay(void *replay)
{
    assert_non_null(replay);
    atomic_fetch_add(&closed, 1);
}

static quern_status run_replay(void *replay, const stage_exec *exec, const void *addresses, backend_run *run,
                               const void *arg)
{
    (void)replay;
    (void)addresses;
    return run(arg, exec);
}

static const quern_backend with_replays = {
    .replay_open = open_replay, .replay_close = close_replay, .replay = run_replay};
static const quern_backend without_replays = {.name = "none"};

/* A call of n tokens. */
static own_call call_of(int64_t n)
{
    own_call c;
    memset(&c, 0, sizeof c);
    c.call.family = &family;
    c.call.backend = &with_replays;
    c.call.symbol[0] = n;
    return c;
}

static int start(void **state)
{
    (void)state;
    opened = 0;
    closed = 0;
    memory_is_short = false;
    return 0;
}

static void a_call_that_is_made_again_finds_a_replay(void **state)
{
    (void)state;
    static replays all;
    const own_call a = call_of(7), b = call_of(8);
    assert_null(replays_find(&all, &a.call, NULL));
    void *const of_a = replays_find(&all, &a.call, NULL);
    assert_null(replays_find(&all, &b.call, NULL)); /* where a was seen once, b might have taken its slot */
    void *const of_b = replays_find(&all, &b.call, NULL);
    assert_non_null(of_a);
    assert_non_null(of_b);
    assert_ptr_not_equal(of_a, of_b);
    for (int i = 0; i < 3; i++) {
        assert_ptr_equal(replays_find(&all, &a.call, NULL), of_a);
        assert_ptr_equal(replays_find(&all, &b.call, NULL), of_b);
    }
    assert_int_equal(opened, 2);
    replays_close(&all);
    assert_int_equal(closed, 2);
}

/* Launches of one graph wait for each other: streams need not. */
static void each_stream_has_its_own(void **state)
{
    (void)state;
    static replays all;
    const own_call a = call_of(7);
    const char stream[2] = {0, 0};
    void *of[2];
    for (int i = 0; i < 2; i++) {
        assert_null(replays_find(&all, &a.call, &stream[i]));
        of[i] = replays_find(&all, &a.call, &stream[i]);
        assert_non_null(of[i]);
    }
    assert_ptr_not_equal(of[0], of[1]);
    replays_close(&all);
}

static void a_call_with_anothers_key_gets_no_replay_of_it(void **state)
{
    (void)state;
    static replays all;
    own_call a = call_of(7), b = call_of(7);
    b.stride = 1;
    (void)replays_find(&all, &a.call, NULL);
    void *const of_a = replays_find(&all, &a.call, NULL);
    assert_non_null(of_a);
    for (int i = 0; i < 5; i++) {
        assert_ptr_not_equal(replays_find(&all, &b.call, NULL), of_a);
        assert_ptr_equal(replays_find(&all, &a.call, NULL), of_a);
    }
    replays_close(&all);
    assert_int_equal(opened, closed);
}

static void the_number_of_replays_is_bounded(void **state)
{
    (void)state;
    static replays all;
    for (int64_t n = 0; n < 10000; n++) { /* lengths that come once leave no replay behind */
        const own_call c = call_of(n);
        assert_null(replays_find(&all, &c.call, NULL));
    }
    assert_int_equal(opened, 0);
    for (int64_t n = 0; n < 500; n++)
        for (int i = 0; i < 3; i++) {
            const own_call c = call_of(n);
            (void)replays_find(&all, &c.call, NULL);
        }
    assert_true(opened > REPLAYS_MAX / 2 && opened <= REPLAYS_MAX);
    replays_close(&all);
    assert_int_equal(opened, closed);
}

static void without_memory_or_support_there_is_none(void **state)
{
    (void)state;
    static replays all;
    own_call a = call_of(7);
    memory_is_short = true;
    for (int i = 0; i < 3; i++) assert_null(replays_find(&all, &a.call, NULL));
    memory_is_short = false;
    assert_non_null(replays_find(&all, &a.call, NULL));
    a.call.backend = &without_replays;
    for (int i = 0; i < 3; i++) assert_null(replays_find(&all, &a.call, NULL));
    replays_close(&all);
    assert_int_equal(opened, closed);
}

static void *look_often(void *arg)
{
    for (int64_t i = 0; i < 20000; i++) {
        const own_call c = call_of(i % 90);
        (void)replays_find(arg, &c.call, NULL);
    }
    return NULL;
}

static void threads_look_at_once(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    static replays all;
    pthread_t thread[THREADS];
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&thread[i], NULL, look_often, &all), 0);
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
    assert_true(opened - closed <= REPLAYS_MAX);
    replays_close(&all);
    assert_int_equal(opened, closed);
}

/* The CPU's stages, with replays. */
static void use_replays(op_call *call)
{
    static quern_backend backend; /* must outlive the call */
    backend = *call->backend;
    backend.replay_open = open_replay;
    backend.replay_close = close_replay;
    backend.replay = run_replay;
    call->backend = &backend;
}

static void build_attention(op_build *b)
{
    use_replays(b->call);
    attention_build(b);
}

static void build_nsa(op_build *b)
{
    use_replays(b->call);
    nsa_build_program(b);
}

/* The same call with all its memory elsewhere each time: it is known from the second on. */
static void call_elsewhere(const op_family *of, const void *params, quern_tensor *const views[], int count,
                           const void *tensors)
{
    enum { CALLS = 4, MOST = 1 << 16 };
    static _Alignas(64) char memory[CALLS][6][MOST], workspace[CALLS][1 << 22];
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    for (int i = 0; i < CALLS; i++) {
        for (int t = 0; t < count; t++) views[t]->data = memory[i][t];
        if (op_run(of, 0, ctx, NULL, params, tensors, workspace[i], sizeof workspace[i]) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        assert_int_equal(opened, i > 0);
    }
    quern_context_destroy(ctx);
    assert_int_equal(closed, 1);
}

static void a_call_at_other_addresses_finds_its_replay(void **state)
{
    (void)state;
    const int64_t q_shape[] = {1, 16, 4, 16}, k_shape[] = {1, 16, 2, 16};
    quern_tensor q = quern_tensor_contiguous(NULL, QUERN_F32, 4, q_shape), o = q,
                 k = quern_tensor_contiguous(NULL, QUERN_F32, 4, k_shape), v = k;
    quern_tensor *const views[] = {&q, &k, &v, &o};
    op_family dense = attention_family, sparse = nsa_family;
    const quern_attention_params attention_params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors of_attention = QUERN_ATTENTION_TENSORS_INIT;
    quern_nsa_params nsa_params = QUERN_NSA_PARAMS_INIT;
    quern_nsa_tensors of_nsa = QUERN_NSA_TENSORS_INIT;
    dense.build = build_attention;
    sparse.build = build_nsa;
    of_attention.q = of_nsa.q = &q;
    of_attention.k = of_nsa.k = &k;
    of_attention.v = of_nsa.v = &v;
    of_attention.o = of_nsa.o = &o;
    nsa_params.block_size = 4;
    call_elsewhere(&dense, &attention_params, views, 4, &of_attention);
    (void)start(state);
    call_elsewhere(&sparse, &nsa_params, views, 4, &of_nsa);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_call_that_is_made_again_finds_a_replay, start),
        cmocka_unit_test_setup(each_stream_has_its_own, start),
        cmocka_unit_test_setup(a_call_with_anothers_key_gets_no_replay_of_it, start),
        cmocka_unit_test_setup(the_number_of_replays_is_bounded, start),
        cmocka_unit_test_setup(without_memory_or_support_there_is_none, start),
        cmocka_unit_test_setup(threads_look_at_once, start),
        cmocka_unit_test_setup(a_call_at_other_addresses_finds_its_replay, start),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
