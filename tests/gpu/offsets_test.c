/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * offsets_test.c - element offsets above 2^31 on the device: 4M tokens, heads 8/2, D 128. The tokens repeat
 * with a period of 1024, and every stage here looks at most 128 tokens back, so all periods but the first and
 * the last have the same results, bit for bit, as long as no offset wraps. The last whole period is compared
 * with the second.
 */
#include "backend.h"
#include "cmocka_c11.h"
#include "core/error.h"
#include "runtime/cuda_plugin.h"
#include "tensor.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PERIOD = 1024, H = 8, HKV = 2, D = 128, BLOCK = 64 };
static const int64_t N = (int64_t)4 << 20;

quern_cuda_plugin_entry quern_cuda_backend;

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        const cudaError_t code_ = (call);                                                                    \
        if (code_ != cudaSuccess) fail_msg("%s: %s", #call, cudaGetErrorString(code_));                      \
    } while (0)

static quern_tensor make(quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    t.device = QUERN_CUDA;
    CHECK(cudaMalloc(&t.data, (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype)));
    CHECK(cudaMemset(t.data, 0xff, (size_t)(t.strides[0] * shape[0]) * quern_dtype_size(dtype)));
    return t;
}

static quern_tensor tokens(int64_t heads, int64_t dim)
{
    return make(QUERN_BF16, 4, (const int64_t[]){1, N, heads, dim});
}

/* Random tokens that repeat. */
static quern_tensor repeating(test_random *random, int64_t heads, int64_t dim)
{
    const int64_t shape[] = {PERIOD, heads, dim};
    test_tensor one = test_tensor_make(random, QUERN_BF16, 3, shape, TEST_CONTIGUOUS);
    test_tensor_normal(&one, random, 1);
    const quern_tensor t = tokens(heads, dim);
    const size_t bytes = (size_t)(PERIOD * heads * dim) * 2;
    CHECK(cudaMemcpy(t.data, one.view.data, bytes, cudaMemcpyHostToDevice));
    for (size_t done = bytes; done < bytes * (size_t)(N / PERIOD); done *= 2)
        CHECK(cudaMemcpy((char *)t.data + done, t.data, done, cudaMemcpyDeviceToDevice));
    test_tensor_free(&one);
    return t;
}

/* `rows` rows of a period, each `row` bytes: the second period against the last but one. */
static void compare(const char *name, const quern_tensor *t, int64_t rows, size_t row)
{
    const size_t bytes = (size_t)rows * row, last = (size_t)(N / PERIOD - 2);
    char *a = malloc(bytes), *b = malloc(bytes);
    if (a == NULL || b == NULL) fail_msg("the test is out of memory");
    CHECK(cudaMemcpy(a, (char *)t->data + bytes, bytes, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(b, (char *)t->data + last * bytes, bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i])
            fail_msg("%s: byte %zu of a period differs between the second and the last but one", name, i);
    size_t set = 0;
    for (size_t i = 0; i < bytes; i++) set += a[i] != 0 && a[i] != (char)0xff;
    if (set < bytes / 2) fail_msg("%s: hardly written", name);
    free(a);
    free(b);
}

static void drop(quern_tensor *t)
{
    CHECK(cudaFree(t->data));
    memset(t, 0, sizeof *t);
}

static void run(quern_status status)
{
    if (status != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    CHECK(cudaDeviceSynchronize());
}

static void run_forward(const quern_backend *b, const stage_exec *exec, const attend_args *args)
{
    void *workspace;
    CHECK(cudaMalloc(&workspace, b->attend_forward.workspace(exec, args) + 1));
    run(b->attend_forward.run(exec, args, workspace));
    CHECK(cudaFree(workspace));
}

static void four_million_tokens(void **state)
{
    (void)state;
    test_random random = {test_seed("four_million_tokens", 7)};
    const quern_cuda_plugin *plugin = quern_cuda_backend(error_set);
    const quern_backend *b = plugin->backend;
    stage_exec exec = {.device = QUERN_CUDA};
    run(plugin->properties(0, &exec));
    const size_t row = D * 2;
    attend_args a = {.mask = ATTEND_RANGE,
                     .seqs = {1, N, N, {0}, {0}},
                     .causal = true,
                     .scale = 1.0f / sqrtf(D),
                     .window = 100,
                     .query_offset = 0,
                     .tile = 1};
    a.q = repeating(&random, H, D);
    a.k = repeating(&random, HKV, D);
    a.v = repeating(&random, HKV, D);
    a.o = tokens(H, D);
    a.lse = make(QUERN_F32, 3, (const int64_t[]){1, H, N});
    run_forward(b, &exec, &a);
    compare("window, o", &a.o, PERIOD, H * row);

    const int64_t tiles = N / BLOCK;
    int32_t *list = malloc(sizeof *list * (size_t)(HKV * tiles * 2));
    if (list == NULL) fail_msg("the test is out of memory");
    for (int64_t i = 0; i < HKV * tiles; i++) {
        list[2 * i] = (int32_t)(i % tiles) - 1;
        list[2 * i + 1] = (int32_t)(i % tiles);
    }
    attend_args blocks = a;
    blocks.mask = ATTEND_BLOCKS;
    blocks.block_size = blocks.tile = BLOCK;
    blocks.window = 0;
    blocks.list = make(QUERN_I32, 4, (const int64_t[]){1, HKV, tiles, 2});
    CHECK(
        cudaMemcpy(blocks.list.data, list, sizeof *list * (size_t)(HKV * tiles * 2), cudaMemcpyHostToDevice));
    free(list);
    run_forward(b, &exec, &blocks);
    compare("selected, o", &blocks.o, PERIOD, H * row);

    attend_args *const backward[] = {&blocks, &a}; /* the forward that stands in o and lse comes first */
    for (int i = 0; i < 2; i++) {
        attend_args *x = backward[i];
        if (i == 1) run_forward(b, &exec, x);
        x->d_o = a.q;
        x->delta = make(QUERN_F32, 3, (const int64_t[]){1, H, N});
        run(b->rowdot.run(&exec, &(rowdot_args){x->seqs, x->d_o, x->o, x->delta}, NULL));
        x->d_q = tokens(H, D);
        x->d_k = tokens(HKV, D);
        x->d_v = tokens(HKV, D);
        void *workspace;
        CHECK(cudaMalloc(&workspace, b->attend_backward.workspace(&exec, x) + 1));
        run(b->attend_backward.run(&exec, x, workspace));
        compare(i == 0 ? "selected, d_q" : "window, d_q", &x->d_q, PERIOD, H * row);
        compare(i == 0 ? "selected, d_k" : "window, d_k", &x->d_k, PERIOD, HKV * row);
        compare(i == 0 ? "selected, d_v" : "window, d_v", &x->d_v, PERIOD, HKV * row);
        CHECK(cudaFree(workspace));
        drop(&x->delta), drop(&x->d_q), drop(&x->d_k), drop(&x->d_v);
    }

    compress_args c = {
        .kind = COMPRESS_MEAN, .seqs = a.seqs, .block_size = BLOCK, .stride = BLOCK, .k = a.k, .v = a.v};
    c.k_cmp = make(QUERN_BF16, 4, (const int64_t[]){1, tiles, HKV, D});
    c.v_cmp = make(QUERN_BF16, 4, (const int64_t[]){1, tiles, HKV, D});
    run(b->compress_forward.run(&exec, &c, NULL));
    compare("k_cmp", &c.k_cmp, PERIOD / BLOCK, HKV * row);
    compare("v_cmp", &c.v_cmp, PERIOD / BLOCK, HKV * row);
    c.d_k_cmp = c.k_cmp;
    c.d_v_cmp = c.v_cmp;
    c.d_k = tokens(HKV, D);
    c.d_v = tokens(HKV, D);
    run(b->compress_backward.run(&exec, &c, NULL));
    compare("compress, d_k", &c.d_k, PERIOD, HKV * row);
    compare("compress, d_v", &c.d_v, PERIOD, HKV * row);

    gate_args g = {.seqs = a.seqs, .kind = GATE_NONE, .o_b = {a.q, a.q, a.q}, .o = a.o};
    run(b->gate_forward.run(&exec, &g, NULL));
    compare("gate, o", &g.o, PERIOD, H * row);
    CHECK(cudaDeviceReset());
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(four_million_tokens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
