/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gradients.c - carves, clears and writes the gradients of keys or values. */
#include "cpu/kernels/attend/gradients.h"

#include "core/parallel.h"
#include "cpu/rows_at.h"

#include <string.h>

gradient_rows gradient_carve(const quern_tensor *t, arena *a)
{
    if (t->ndim == 0) return (gradient_rows){NULL, {0, 0, 0}};
    if (t->dtype == QUERN_F32) return (gradient_rows){t->data, {t->strides[0], t->strides[1], t->strides[2]}};
    const int64_t row = t->shape[3], token = row * t->shape[2], batch = token * t->shape[1];
    return (gradient_rows){arena_take(a, (size_t)(t->shape[0] * batch) * sizeof(float)), {batch, token, row}};
}

typedef struct gradient_job {
    const quern_tensor *t;
    const gradient_rows *g;
    const row_kernels *kernels;
} gradient_job;

static void clear_token(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gradient_job *job = arg;
    const quern_tensor *t = job->t;
    for (int64_t h = 0; h < t->shape[2]; h++)
        memset(gradient_at(job->g, index / t->shape[1], index % t->shape[1], h), 0,
               (size_t)t->shape[3] * sizeof(float));
}

static void write_token(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const gradient_job *job = arg;
    const quern_tensor *t = job->t;
    const int64_t b = index / t->shape[1], n = index % t->shape[1];
    for (int64_t h = 0; h < t->shape[2]; h++)
        job->kernels->convert(gradient_at(job->g, b, n, h), QUERN_F32, row_at(t, b, n, h), t->dtype,
                              t->shape[3]);
}

void gradient_clear(const stage_exec *exec, const quern_tensor *t, const gradient_rows *g)
{
    gradient_job job = {t, g, NULL};
    if (g->data != NULL) parallel_for(exec, t->shape[0] * t->shape[1], clear_token, &job);
}

void gradient_write(const stage_exec *exec, const quern_tensor *t, const gradient_rows *g,
                    const row_kernels *kernels)
{
    gradient_job job = {t, g, kernels};
    if (g->data != NULL && t->dtype != QUERN_F32)
        parallel_for(exec, t->shape[0] * t->shape[1], write_token, &job);
}
