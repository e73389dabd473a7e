/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * graph.c - DeepSeek-V4's attention of one new token a sequence, from a paged cache on a GPU, as a CUDA
 * graph that is recorded once and launched for each token. What changes from step to step is data: the
 * sequences' positions, which the graph reads from device memory.
 *
 *   cc graph.c $(pkg-config --cflags --libs quern) -I$CUDA/include -L$CUDA/lib64 -lcudart -o graph
 */
#include <quern/cuda.h>
#include <quern/dsv4.h>

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 4, H = 64, D = 512, PAGE = 64, COLUMNS = 16, STEPS = 32, FIRST = 500 };

static void need(quern_status status)
{
    if (status == QUERN_OK) return;
    fprintf(stderr, "%s\n", quern_last_error(NULL));
    exit(1);
}

static void cuda(cudaError_t error)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

/* A contiguous tensor in device memory, its bytes 0. */
static quern_tensor make(quern_dtype dtype, size_t element, int32_t ndim, const int64_t *shape)
{
    size_t bytes = element;
    void *data;
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    need(quern_cuda_allocate(0, bytes, &data));
    need(quern_cuda_fill(0, data, 0, bytes, NULL));
    quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    t.device = QUERN_CUDA;
    return t;
}

int main(void)
{
    need(quern_cuda_check(0));
    quern_context *ctx;
    need(quern_context_create(NULL, &ctx));
    cudaStream_t stream;
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    /* Every sequence has COLUMNS pages of one pool; an engine fills rows and table. */
    quern_tensor q = make(QUERN_BF16, 2, 4, (const int64_t[]){BATCH, 1, H, D});
    quern_tensor o = make(QUERN_BF16, 2, 4, (const int64_t[]){BATCH, 1, H, D});
    quern_tensor kv = make(QUERN_BF16, 2, 3, (const int64_t[]){BATCH * COLUMNS, PAGE, D});
    quern_tensor table = make(QUERN_I32, 4, 2, (const int64_t[]){BATCH, COLUMNS});
    quern_tensor positions = make(QUERN_I32, 4, 1, (const int64_t[]){BATCH});
    quern_tensor status = make(QUERN_I32, 4, 1, (const int64_t[]){1});
    int32_t pages[BATCH * COLUMNS], at[BATCH], bits;
    for (int i = 0; i < BATCH * COLUMNS; i++) pages[i] = i;
    need(quern_cuda_copy(0, table.data, pages, sizeof pages, stream));

    quern_dsv4_attention_params params = QUERN_DSV4_ATTENTION_PARAMS_INIT; /* a window of 128 */
    params.page = PAGE;
    quern_dsv4_attention_tensors t = QUERN_DSV4_ATTENTION_TENSORS_INIT;
    t.q = &q;
    t.o = &o;
    t.kv = &kv;
    t.kv_table = &table;
    t.start_positions = &positions;
    const quern_exec exec = {sizeof exec, stream, &status};
    size_t bytes;
    void *workspace;
    need(quern_dsv4_attention_workspace(ctx, &params, &t, &bytes));
    need(quern_cuda_allocate(0, bytes + 1, &workspace));

    /* Memory and addresses are as they will be: the call allocates nothing, and its kernels are recorded. */
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    need(quern_dsv4_attention(ctx, &exec, &params, &t, workspace, bytes));
    cuda(cudaStreamEndCapture(stream, &graph));
    cuda(cudaGraphInstantiate(&ready, graph, 0));

    for (int step = 0; step < STEPS; step++) {
        for (int b = 0; b < BATCH; b++) at[b] = FIRST + b + step;
        need(quern_cuda_copy(0, positions.data, at, sizeof at, stream)); /* the graph's only new input */
        cuda(cudaGraphLaunch(ready, stream));
    }
    need(quern_cuda_copy(0, &bits, status.data, sizeof bits, stream));
    need(quern_cuda_synchronize(0, stream));
    printf("%d steps of %d sequences; faults: %s\n", STEPS, BATCH,
           bits != 0 ? quern_cuda_fault_name(bits) : "none");

    cuda(cudaGraphExecDestroy(ready));
    cuda(cudaGraphDestroy(graph));
    void *owned[] = {q.data, o.data, kv.data, table.data, positions.data, status.data, workspace};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) need(quern_cuda_free(0, owned[i]));
    cuda(cudaStreamDestroy(stream));
    quern_context_destroy(ctx);
    return bits == 0 ? 0 : 1;
}
