/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "faults_case.h"

#include "cmocka_c11.h"

quern_context *ctx;
static quern_tensor status;

quern_tensor on_device(const void *from, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    size_t bytes = quern_dtype_size(dtype);
    for (int32_t i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    OK(quern_cuda_allocate(0, bytes + 1, &t.data));
    OK(quern_cuda_copy(0, t.data, from, bytes, NULL));
    t.device = QUERN_CUDA;
    return t;
}

void to_host(void *to, const quern_tensor *t, size_t bytes)
{
    OK(quern_cuda_copy(0, to, t->data, bytes, NULL));
    OK(quern_cuda_synchronize(0, NULL));
}

void *workspace_of(size_t bytes)
{
    void *p = NULL;
    OK(quern_cuda_allocate(0, bytes + 1, &p));
    return p;
}

int32_t faults(void)
{
    int32_t bits, zero = 0;
    to_host(&bits, &status, sizeof bits);
    OK(quern_cuda_copy(0, status.data, &zero, sizeof zero, NULL));
    return bits;
}

quern_exec with_status(void)
{
    quern_exec exec = QUERN_EXEC_INIT;
    exec.status = &status;
    return exec;
}

int start(void **unused)
{
    const int32_t zero = 0;
    const int64_t one = 1;
    (void)unused;
    OK(quern_context_create(NULL, &ctx));
    status = on_device(&zero, QUERN_I32, 1, &one);
    return 0;
}
