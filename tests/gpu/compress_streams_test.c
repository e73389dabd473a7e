/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress_streams_test.c - linear compression's products in the cases that are hardest for its library: the
 * process's first product inside a stream's capture, and four threads with a stream each, going through more
 * shapes than the plugin's table of chosen algorithms has places, in different orders. Every result is the
 * same bits as a plain call's.
 */
#include "backend.h"
#include "cmocka_c11.h"
#include "core/error.h"
#include "runtime/cuda_plugin.h"
#include "tensor.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { L = 8, STEP = 4, HEADS = 2, D = 64, ENTRIES = 100, SHAPES = 40, THREADS = 4, OUTPUTS = 3 };
static const int64_t N = (ENTRIES + SHAPES) * STEP + L;

quern_cuda_plugin_entry quern_cuda_backend;

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t code_ = (call);                                                                    \
        if (code_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(code_));                      \
    } while (0)

/* A stream and what its calls read and write. */
typedef struct lane {
    stage_exec exec;
    cudaStream_t stream;
    compress_args forward, backward;
    void *workspace;
    uint64_t wanted[SHAPES], got[SHAPES];
    int number;
    bool failed;
} lane;

static const quern_backend *backend;

static quern_tensor make(quern_dtype dtype, int32_t ndim, const int64_t *shape, bool random)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    const size_t bytes = (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype);
    t.device = QUERN_CUDA;
    CHECK(cudaMalloc(&t.data, bytes));
    CHECK(cudaMemset(t.data, 0xff, bytes));
    if (!random) return t;
    test_random seed = {(uint64_t)ndim * 100 + (uint64_t)dtype};
    test_tensor host = test_tensor_make(&seed, dtype, ndim, shape, TEST_CONTIGUOUS);
    test_tensor_normal(&host, &seed, 1);
    CHECK(cudaMemcpy(t.data, host.view.data, bytes, cudaMemcpyHostToDevice));
    test_tensor_free(&host);
    return t;
}

/* The call's first `entries` entries, of as many tokens as these take. */
static void resize(lane *x, int64_t entries)
{
    compress_args *const both[] = {&x->forward, &x->backward};
    for (int i = 0; i < 2; i++) {
        both[i]->seqs.n_q = both[i]->k.shape[1] = entries * STEP + L - STEP;
        both[i]->seqs.n_kv = entries;
    }
    x->forward.k_cmp.shape[1] = x->backward.d_k_cmp.shape[1] = entries;
    x->backward.d_k.shape[1] = x->backward.k.shape[1];
}

static lane lane_make(int number)
{
    const int64_t x[] = {1, N, HEADS, D}, y[] = {1, ENTRIES + SHAPES, HEADS, D}, w[] = {HEADS, L * D, D};
    lane a = {.exec = {.device = QUERN_CUDA}, .number = number};
    CHECK(cudaStreamCreateWithFlags(&a.stream, cudaStreamNonBlocking));
    a.exec.stream = a.stream;
    a.forward =
        (compress_args){.kind = COMPRESS_LINEAR, .block_size = L, .stride = STEP, .seqs = {.batch = 1}};
    a.forward.k = make(QUERN_BF16, 4, x, true);
    a.forward.w_k = make(QUERN_BF16, 3, w, true);
    a.backward = a.forward;
    a.forward.k_cmp = make(QUERN_BF16, 4, y, false);
    a.backward.d_k_cmp = make(QUERN_F32, 4, y, true);
    a.backward.d_k = make(QUERN_F32, 4, x, false);
    a.backward.d_w_k = make(QUERN_F32, 3, w, false);
    resize(&a, ENTRIES + SHAPES);
    const size_t forward = backend->compress_forward.workspace(&a.exec, &a.forward);
    const size_t back = backend->compress_backward.workspace(&a.exec, &a.backward);
    CHECK(cudaMalloc(&a.workspace, (forward > back ? forward : back) + 1));
    CHECK(cudaDeviceSynchronize());
    return a;
}

static void lane_free(lane *a)
{
    void *const all[] = {
        a->forward.k.data,    a->forward.w_k.data,    a->forward.k_cmp.data, a->backward.d_k_cmp.data,
        a->backward.d_k.data, a->backward.d_w_k.data, a->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) CHECK(cudaFree(all[i]));
    CHECK(cudaStreamDestroy(a->stream));
}

static bool call(lane *a)
{
    return backend->compress_forward.run(&a->exec, &a->forward, a->workspace) == QUERN_OK &&
           backend->compress_backward.run(&a->exec, &a->backward, a->workspace) == QUERN_OK;
}

/* A hash of the outputs' bits; 0: they could not be read. */
static uint64_t digest(const lane *a)
{
    const quern_tensor *const outputs[OUTPUTS] = {&a->forward.k_cmp, &a->backward.d_k, &a->backward.d_w_k};
    uint64_t sum = 14695981039346656037u;
    for (int i = 0; i < OUTPUTS; i++) {
        const quern_tensor *t = outputs[i];
        const size_t bytes =
            (size_t)(t->ndim == 4 ? t->shape[1] * t->strides[1] : t->shape[0] * t->strides[0]) *
            quern_dtype_size(t->dtype);
        unsigned char *host = malloc(bytes);
        const bool ok =
            host != NULL &&
            cudaMemcpyAsync(host, t->data, bytes, cudaMemcpyDeviceToHost, a->stream) == cudaSuccess &&
            cudaStreamSynchronize(a->stream) == cudaSuccess;
        for (size_t k = 0; ok && k < bytes; k++) sum = (sum ^ host[k]) * 1099511628211u;
        free(host);
        if (!ok) return 0;
    }
    return sum;
}

static void poison(const lane *a)
{
    CHECK(cudaMemset(a->forward.k_cmp.data, 0xff, (size_t)(a->forward.k_cmp.shape[1] * HEADS * D) * 2));
    CHECK(cudaMemset(a->backward.d_k.data, 0xff, (size_t)(a->backward.d_k.shape[1] * HEADS * D) * 4));
    CHECK(cudaMemset(a->backward.d_w_k.data, 0xff, (size_t)(HEADS * L * D * D) * 4));
    CHECK(cudaDeviceSynchronize());
}

static void the_first_product_is_captured(void **state)
{
    (void)state;
    lane a = lane_make(0);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK(cudaStreamBeginCapture(a.stream, cudaStreamCaptureModeGlobal));
    if (!call(&a)) fail_msg("%s", quern_last_error(NULL));
    CHECK(cudaStreamEndCapture(a.stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    uint64_t seen[2];
    for (int i = 0; i < 2; i++) {
        poison(&a);
        CHECK(cudaGraphLaunch(replay, a.stream));
        seen[i] = digest(&a);
    }
    poison(&a);
    const uint64_t poisoned = digest(&a);
    if (!call(&a)) fail_msg("%s", quern_last_error(NULL));
    const uint64_t plain = digest(&a);
    assert_true(plain != 0 && plain != poisoned);
    assert_true(seen[0] == plain && seen[1] == plain);
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    lane_free(&a);
}

static void *go_through_shapes(void *given)
{
    lane *a = given;
    for (int i = 0; i < SHAPES && !a->failed; i++) {
        const int shape = (i + a->number * SHAPES / THREADS) % SHAPES;
        resize(a, ENTRIES + shape);
        a->failed = !call(a);
        if (!a->failed) a->got[shape] = digest(a);
    }
    return NULL;
}

static void threads_agree(void **state)
{
    (void)state;
    lane lanes[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) lanes[i] = lane_make(i);
    for (int shape = 0; shape < SHAPES; shape++) {
        resize(&lanes[0], ENTRIES + shape);
        if (!call(&lanes[0])) fail_msg("%s", quern_last_error(NULL));
        lanes[0].wanted[shape] = digest(&lanes[0]);
        assert_true(lanes[0].wanted[shape] != 0);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, go_through_shapes, &lanes[i]), 0);
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < THREADS; i++) {
        assert_true(!lanes[i].failed);
        for (int shape = 0; shape < SHAPES; shape++)
            if (lanes[i].got[shape] != lanes[0].wanted[shape])
                fail_msg("thread %d, %d entries: other bits", i, ENTRIES + shape);
        lane_free(&lanes[i]);
    }
}

int main(void)
{
    const quern_cuda_plugin *plugin = quern_cuda_backend(error_set);
    backend = plugin->backend;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_product_is_captured),
        cmocka_unit_test(threads_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
