/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * replay_test.c - calls that are made again. A plan's runs and ordinary calls that start as a graph give the
 * bits of a call whose stages start one by one: with other addresses, other parameters on the same addresses,
 * other strides, on several threads and streams, and where the caller captures. Launches are counted.
 */
#include "cmocka_c11.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>
#include <quern/plan.h>

enum { N = 300, H = 8, HKV = 2, D = 64, Q = N * H * D, KV = N * HKV * D, ROUNDS = 4 };

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)
#define CUDA(call) assert_int_equal(call, cudaSuccess)

static quern_context *ctx;

/* A call's tensors, in one block of device memory. */
typedef struct layer {
    char *memory;
    quern_tensor q, k, v, o, w;
    quern_nsa_tensors tensors;
    quern_nsa_params params;
    void *workspace;
    size_t bytes;
} layer;

static quern_tensor tensor_at(char **p, int32_t ndim, const int64_t *shape)
{
    size_t bytes = 4;
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    quern_tensor t = quern_tensor_contiguous(*p, QUERN_F32, ndim, shape);
    t.device = QUERN_CUDA;
    *p += (bytes + 255) & ~(size_t)255;
    return t;
}

static void layer_make(layer *l, unsigned seed)
{
    const int64_t q[] = {1, N, H, D}, k[] = {1, N, HKV, D}, w[] = {H, 3, D};
    const size_t values = 2 * Q + 2 * KV + H * 3 * D + 1024;
    float *random = malloc(values * sizeof *random);
    assert_non_null(random);
    for (size_t i = 0; i < values; i++) {
        seed = seed * 1664525u + 1013904223u;
        random[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    OK(quern_cuda_allocate(0, values * sizeof *random, (void **)&l->memory));
    OK(quern_cuda_copy(0, l->memory, random, values * sizeof *random, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    free(random);
    char *p = l->memory;
    l->q = tensor_at(&p, 4, q);
    l->k = tensor_at(&p, 4, k);
    l->v = tensor_at(&p, 4, k);
    l->o = tensor_at(&p, 4, q);
    l->w = tensor_at(&p, 3, w);
    l->params = (quern_nsa_params)QUERN_NSA_PARAMS_INIT;
    l->params.gate = QUERN_NSA_GATE_WEIGHTS;
    l->params.block_size = 16;
    l->params.num_selected = 4;
    l->params.window = 40;
    l->tensors = (quern_nsa_tensors)QUERN_NSA_TENSORS_INIT;
    l->tensors.q = &l->q;
    l->tensors.k = &l->k;
    l->tensors.v = &l->v;
    l->tensors.o = &l->o;
    l->tensors.w_gate = &l->w;
    OK(quern_nsa_forward_workspace(ctx, &l->params, &l->tensors, &l->bytes));
    OK(quern_cuda_allocate(0, l->bytes, &l->workspace));
}

static void layer_free(layer *l)
{
    OK(quern_cuda_free(0, l->memory));
    OK(quern_cuda_free(0, l->workspace));
}

/* Calls once, as an ordinary call in `in` or by the plan, and fetches o. */
static float *call_once(const layer *l, quern_context *in, const quern_plan *plan, void *stream)
{
    const quern_exec exec = {sizeof exec, stream, NULL};
    void *data[64] = {NULL};
    const quern_tensor *const *given = &l->tensors.q;
    for (size_t i = 0; i < (sizeof l->tensors - sizeof(size_t)) / sizeof(void *); i++)
        data[i] = given[i] != NULL ? given[i]->data : NULL;
    float *o = malloc(Q * sizeof *o);
    assert_non_null(o);
    OK(quern_cuda_fill(0, l->o.data, 0xff, Q * sizeof *o, stream));
    if (plan != NULL) OK(quern_plan_run(plan, &exec, data, l->workspace, l->bytes));
    else OK(quern_nsa_forward(in, &exec, &l->params, &l->tensors, l->workspace, l->bytes));
    OK(quern_cuda_copy(0, o, l->o.data, Q * sizeof *o, stream));
    OK(quern_cuda_synchronize(0, stream));
    return o;
}

/* What a context's first such call gives: its stages start one by one. */
static float *call_first(const layer *l)
{
    quern_context *fresh = NULL;
    OK(quern_context_create(NULL, &fresh));
    float *o = call_once(l, fresh, NULL, NULL);
    quern_context_destroy(fresh);
    return o;
}

static void expect_same(float *o, const float *expected)
{
    const bool same = memcmp(o, expected, Q * sizeof *o) == 0;
    free(o);
    assert_true(same);
}

static quern_plan *plan_of(const layer *l)
{
    quern_plan *plan = NULL;
    OK(quern_plan_create(ctx, QUERN_OP_NSA_FORWARD, &l->params, &l->tensors, &plan));
    return plan;
}

static void a_plan_runs_on_the_same_and_on_other_addresses(void **state)
{
    (void)state;
    layer l[2];
    float *expected[2];
    for (int i = 0; i < 2; i++) {
        layer_make(&l[i], 7u + (unsigned)i);
        expected[i] = call_first(&l[i]);
    }
    assert_true(memcmp(expected[0], expected[1], Q * sizeof(float)) != 0);
    quern_plan *plan = plan_of(&l[0]);
    static const int order[] = {0, 0, 1, 1, 0, 1, 0, 0};
    for (size_t r = 0; r < sizeof order / sizeof *order; r++)
        expect_same(call_once(&l[order[r]], NULL, plan, NULL), expected[order[r]]);
    quern_plan_destroy(plan);
    for (int i = 0; i < 2; i++) {
        layer_free(&l[i]);
        free(expected[i]);
    }
}

/* More addresses than a replay keeps graphs of: each at its first sight, again at once, after all others, and
 * after some. */
static void a_plan_meets_many_addresses(void **state)
{
    (void)state;
    enum { PLACES = 100 };
    layer l;
    char *results = NULL;
    layer_make(&l, 9);
    float *expected = call_first(&l);
    quern_plan *plan = plan_of(&l);
    OK(quern_cuda_allocate(0, (size_t)PLACES * Q * sizeof(float), (void **)&results));
    for (int r = 0; r < 6 * PLACES; r++) {
        const int round = r / PLACES, i = r % PLACES;
        const int place = round < 3 ? i : round == 3 ? i / 2 : round == 4 ? i % 3 : i * i % PLACES;
        l.o.data = results + (size_t)place * Q * sizeof(float);
        expect_same(call_once(&l, ctx, r % 7 == 0 ? NULL : plan, NULL), expected);
    }
    quern_plan_destroy(plan);
    OK(quern_cuda_free(0, results));
    layer_free(&l);
    free(expected);
}

/* Calls that differ in a parameter, in strides or in their stages alone, on the same addresses, in turns. */
static void ordinary_calls_on_the_same_addresses_stay_apart(void **state)
{
    (void)state;
    enum { KINDS = 5 };
    layer l[KINDS];
    float *expected[KINDS];
    layer_make(&l[0], 3);
    for (int i = 1; i < KINDS; i++) {
        l[i] = l[0];
        l[i].tensors.q = &l[i].q;
        l[i].tensors.k = &l[i].k;
        l[i].tensors.v = &l[i].v;
        l[i].tensors.o = &l[i].o;
        l[i].tensors.w_gate = &l[i].w;
    }
    l[1].params.scale = 0.5f;
    l[2].params.window = 41;
    l[3].params.branches = QUERN_NSA_BRANCH_WIN;
    l[4].q.strides[1] = D; /* heads and tokens change places */
    l[4].q.strides[2] = (int64_t)N * D;
    for (int i = 0; i < KINDS; i++) expected[i] = call_first(&l[i]);
    for (int i = 1; i < KINDS; i++) assert_true(memcmp(expected[0], expected[i], Q * sizeof(float)) != 0);
    for (int r = 0; r < ROUNDS * KINDS; r++)
        expect_same(call_once(&l[r % KINDS], ctx, NULL, NULL), expected[r % KINDS]);
    for (int r = 0; r < ROUNDS * KINDS; r++)
        expect_same(call_once(&l[r / ROUNDS], ctx, NULL, NULL), expected[r / ROUNDS]);
    layer_free(&l[0]);
    for (int i = 0; i < KINDS; i++) free(expected[i]);
}

/* More kinds of calls than a context keeps. */
static void a_context_meets_many_calls(void **state)
{
    (void)state;
    layer l;
    layer_make(&l, 5);
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < 100; i++) {
            l.params.scale = 0.1f + 0.01f * (float)i;
            float *expected = call_first(&l);
            expect_same(call_once(&l, ctx, NULL, NULL), expected);
            free(expected);
        }
    }
    layer_free(&l);
}

typedef struct share {
    layer layer;
    const quern_plan *plan;
    const float *expected;
    void *stream;
    bool same;
} share;

static void *run_share(void *arg)
{
    share *s = arg;
    s->same = true;
    for (int r = 0; r < 50; r++) {
        float *o = call_once(&s->layer, ctx, r % 2 == 0 ? s->plan : NULL, s->stream);
        s->same = s->same && memcmp(o, s->expected, Q * sizeof *o) == 0;
        free(o);
    }
    return NULL;
}

static void threads_share_a_plan_and_a_context(void **state)
{
    (void)state;
    enum { THREADS = 4 };
    share s[THREADS];
    pthread_t thread[THREADS];
    float *expected[THREADS];
    for (int i = 0; i < THREADS; i++) {
        layer_make(&s[i].layer, 11u + (unsigned)i);
        expected[i] = call_first(&s[i].layer);
        s[i].expected = expected[i];
        s[i].stream = NULL;
        if (i % 2 == 1) OK(quern_cuda_stream_create(0, &s[i].stream));
    }
    quern_plan *plan = plan_of(&s[0].layer);
    for (int i = 0; i < THREADS; i++) {
        s[i].plan = plan;
        assert_int_equal(pthread_create(&thread[i], NULL, run_share, &s[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(thread[i], NULL), 0);
    quern_plan_destroy(plan);
    for (int i = 0; i < THREADS; i++) {
        assert_true(s[i].same);
        OK(quern_cuda_stream_destroy(0, s[i].stream));
        layer_free(&s[i].layer);
        free(expected[i]);
    }
}

/* The kernels and fills of a graph. */
static size_t launches_of(cudaGraph_t graph)
{
    cudaGraphNode_t node[64];
    size_t count = 64;
    CUDA(cudaGraphGetNodes(graph, node, &count));
    return count;
}

/* Runs l in a capture and returns its graph. */
static cudaGraph_t capture(const layer *l, const quern_plan *plan, cudaStream_t stream)
{
    const quern_exec exec = {sizeof exec, stream, NULL};
    void *data[64] = {NULL};
    const quern_tensor *const *given = &l->tensors.q;
    cudaGraph_t graph = NULL;
    for (size_t i = 0; i < (sizeof l->tensors - sizeof(size_t)) / sizeof(void *); i++)
        data[i] = given[i] != NULL ? given[i]->data : NULL;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    if (plan != NULL) OK(quern_plan_run(plan, &exec, data, l->workspace, l->bytes));
    else OK(quern_nsa_forward(ctx, &exec, &l->params, &l->tensors, l->workspace, l->bytes));
    CUDA(cudaStreamEndCapture(stream, &graph));
    return graph;
}

/* A caller's capture gets the kernels themselves, before and after a plan has its graph. */
static void a_plan_is_captured(void **state)
{
    (void)state;
    layer l;
    void *stream = NULL;
    OK(quern_cuda_stream_create(0, &stream));
    layer_make(&l, 23);
    float *expected = call_first(&l), *o = malloc(Q * sizeof *o);
    assert_non_null(o);
    quern_plan *plan = plan_of(&l);
    for (int r = 0; r < 2; r++) {
        cudaGraphExec_t exec;
        cudaGraph_t graph = capture(&l, plan, stream);
        assert_true(launches_of(graph) > 2);
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        OK(quern_cuda_fill(0, l.o.data, 0xff, Q * sizeof *o, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        OK(quern_cuda_copy(0, o, l.o.data, Q * sizeof *o, stream));
        OK(quern_cuda_synchronize(0, stream));
        assert_true(memcmp(o, expected, Q * sizeof *o) == 0);
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
        expect_same(call_once(&l, NULL, plan, stream), expected);
    }
    quern_plan_destroy(plan);
    layer_free(&l);
    free(o);
    free(expected);
    OK(quern_cuda_stream_destroy(0, stream));
}

/* Plans that are made, run and freed, and a context's calls, while another stream is captured in the mode
 * that forbids all threads what might touch it. */
static void plans_come_and_go_beside_a_capture(void **state)
{
    (void)state;
    enum { RUNS = 6 };
    layer l;
    void *captured = NULL, *stream = NULL, *data[64] = {NULL};
    char *results = NULL;
    cudaGraph_t graph = NULL;
    quern_context *fresh = NULL;
    OK(quern_cuda_stream_create(0, &captured));
    OK(quern_cuda_stream_create(0, &stream));
    layer_make(&l, 29);
    float *expected = call_first(&l), *o = malloc(Q * sizeof *o);
    const quern_exec exec = {sizeof exec, stream, NULL};
    assert_non_null(o);
    OK(quern_cuda_allocate(0, 2 * RUNS * Q * sizeof *o, (void **)&results));
    CUDA(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    OK(quern_context_create(NULL, &fresh));
    quern_plan *plan = plan_of(&l);
    for (int r = 0; r < 2 * RUNS; r++) { /* addresses that come again get graphs of their own */
        l.o.data = results + (size_t)(r < RUNS ? r / 2 : r) * Q * sizeof *o;
        const quern_tensor *const *given = &l.tensors.q;
        for (size_t i = 0; i < (sizeof l.tensors - sizeof(size_t)) / sizeof(void *); i++)
            data[i] = given[i] != NULL ? given[i]->data : NULL;
        if (r % 3 < 2) OK(quern_plan_run(plan, &exec, data, l.workspace, l.bytes));
        else OK(quern_nsa_forward(fresh, &exec, &l.params, &l.tensors, l.workspace, l.bytes));
    }
    quern_plan_destroy(plan);
    quern_context_destroy(fresh);
    CUDA(cudaStreamEndCapture(captured, &graph));
    OK(quern_cuda_copy(0, o, l.o.data, Q * sizeof *o, stream));
    OK(quern_cuda_synchronize(0, stream));
    expect_same(o, expected);
    CUDA(cudaGraphDestroy(graph));
    OK(quern_cuda_free(0, results));
    layer_free(&l);
    free(expected);
    OK(quern_cuda_stream_destroy(0, stream));
    OK(quern_cuda_stream_destroy(0, captured));
}

/* A stage without work launches nothing. */
static void launches_are_those_of_the_branches(void **state)
{
    (void)state;
    static const struct {
        uint32_t branches;
        int64_t n;
        size_t launches;
    } cases[] = {
        {QUERN_NSA_BRANCH_ALL, N, 6},
        {QUERN_NSA_BRANCH_CMP | QUERN_NSA_BRANCH_WIN, N, 4},
        {QUERN_NSA_BRANCH_SLC | QUERN_NSA_BRANCH_WIN, N, 6}, /* select computes its own lse */
        {QUERN_NSA_BRANCH_CMP, N, 3},
        {QUERN_NSA_BRANCH_WIN, N, 2},
        {QUERN_NSA_BRANCH_ALL, 60, 5}, /* k l' = 64: every block is chosen */
        {QUERN_NSA_BRANCH_ALL, 40, 4}, /* W = 40: the window is the selected branch */
        {QUERN_NSA_BRANCH_ALL, 15, 2}, /* l = 16: no entry */
        {QUERN_NSA_BRANCH_ALL, 0, 0},
    };
    void *stream = NULL;
    OK(quern_cuda_stream_create(0, &stream));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        layer l;
        layer_make(&l, 31);
        l.params.branches = cases[i].branches;
        quern_tensor *rows[] = {&l.q, &l.k, &l.v, &l.o};
        for (int t = 0; t < 4; t++) rows[t]->shape[1] = cases[i].n;
        cudaGraph_t graph = capture(&l, NULL, stream);
        if (launches_of(graph) != cases[i].launches)
            fail_msg("branches %u of %lld tokens: %zu launches, not %zu", cases[i].branches,
                     (long long)cases[i].n, launches_of(graph), cases[i].launches);
        CUDA(cudaGraphDestroy(graph));
        layer_free(&l);
    }
    OK(quern_cuda_stream_destroy(0, stream));
}

static int start(void **state)
{
    (void)state;
    return quern_context_create(NULL, &ctx) == QUERN_OK && quern_cuda_check(0) == QUERN_OK ? 0 : 1;
}

static int finish(void **state)
{
    (void)state;
    quern_context_destroy(ctx);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_runs_on_the_same_and_on_other_addresses),
        cmocka_unit_test(a_plan_meets_many_addresses),
        cmocka_unit_test(ordinary_calls_on_the_same_addresses_stay_apart),
        cmocka_unit_test(a_context_meets_many_calls),
        cmocka_unit_test(threads_share_a_plan_and_a_context),
        cmocka_unit_test(a_plan_is_captured),
        cmocka_unit_test(plans_come_and_go_beside_a_capture),
        cmocka_unit_test(launches_are_those_of_the_branches),
    };
    return cmocka_run_group_tests(tests, start, finish);
}
