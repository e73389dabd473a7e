/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* device.c - memory of the CPU or of a GPU, tensors in it, and a step as a graph. */
#include "v4.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef V4_GRAPHS
#include <cuda_runtime_api.h>
#endif

enum { HUGE = 2 << 20 };

void *host_take(size_t bytes)
{
    void *p = calloc(bytes + 1, 1);
    if (p == NULL) fail("no memory for %zu bytes", bytes);
    return p;
}

void *device_take(const v4_model *m, size_t bytes)
{
    void *p = NULL;
    const bool huge = bytes >= HUGE; /* rows of a projection are a page apart: large pages, fewer misses */
    if (m->cuda) check(quern_cuda_allocate(0, bytes + 1, &p));
    else if (posix_memalign(&p, huge ? HUGE : 64, bytes + 1) != 0) fail("no memory for %zu bytes", bytes);
    if (huge && !m->cuda) (void)madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

void device_copy(const v4_model *m, void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && !m->cuda) memcpy(to, from, bytes);
    if (bytes > 0 && m->cuda) check(quern_cuda_copy(0, to, from, bytes, m->exec.stream));
}

void device_read(const v4_model *m, void *to, const void *from, size_t bytes)
{
    device_copy(m, to, from, bytes);
    if (m->cuda) check(quern_cuda_synchronize(0, m->exec.stream));
}

void *device_room(v4_model *m, int i, size_t bytes)
{
    if (m->room[i] != NULL && bytes <= m->room_bytes[i]) return m->room[i];
    m->recorded = 0; /* a graph has the addresses */
    if (m->cuda) check(quern_cuda_free(0, m->room[i]));
    else free(m->room[i]);
    m->room_bytes[i] = bytes;
    return m->room[i] = device_take(m, bytes);
}

quern_tensor view(const v4_model *m, const void *data, quern_dtype dtype, const int64_t *shape)
{
    int32_t ndim = 0;
    while (shape[ndim] != 0) ndim++;
    quern_tensor t = quern_tensor_contiguous((void *)data, dtype, ndim, shape);
    t.device = m->cuda ? QUERN_CUDA : QUERN_CPU;
    return t;
}

size_t tensor_bytes(const quern_tensor *t)
{
    size_t bytes = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) bytes *= (size_t)t->shape[i];
    return bytes;
}

quern_tensor make(const v4_model *m, quern_dtype dtype, const int64_t *shape)
{
    quern_tensor t = view(m, NULL, dtype, shape);
    t.data = device_take(m, tensor_bytes(&t));
    return t;
}

quern_tensor room(v4_model *m, int i, const int64_t *shape)
{
    const quern_dtype dtype = i < IDS ? m->act : i < LOGITS ? QUERN_I32 : QUERN_F32;
    quern_tensor t = view(m, NULL, dtype, shape);
    t.data = device_room(m, i, tensor_bytes(&t));
    return t;
}

void widen(const v4_model *m, const quern_tensor *from, const quern_tensor *to)
{
    const size_t n = tensor_bytes(from) / quern_dtype_size(from->dtype);
    float *values = host_take(n * sizeof *values);
    for (size_t i = 0; i < n; i++) values[i] = number(from->data, from->dtype, (int64_t)i);
    device_copy(m, to->data, values, n * sizeof *values);
    free(values);
}

bool graph(v4_model *m, enum graph_call call)
{
#ifdef V4_GRAPHS
    cudaError_t error = cudaSuccess;
    cudaGraph_t made;
    if (!m->cuda) return false;
    if (call == BEGIN) error = cudaStreamBeginCapture(m->exec.stream, cudaStreamCaptureModeThreadLocal);
    if (call == LAUNCH) error = cudaGraphLaunch(m->graph, m->exec.stream);
    if (call == END) error = cudaStreamEndCapture(m->exec.stream, &made);
    if (call == END && error == cudaSuccess)
        error = cudaGraphInstantiate((cudaGraphExec_t *)&m->graph, made, 0); /* few are made, and kept */
    if (error != cudaSuccess) fail("a step as a graph: %s", cudaGetErrorString(error));
    return true;
#else
    return (void)m, (void)call, false;
#endif
}
