/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_combine.c - the combine stage: inverts the permutation, then sums a token's rows, a token a task, a
 * strip of columns at a time in a thread's own memory. Limit: y read once.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/permute/stages.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/levels.h"

#include <string.h>

enum { STRIP = 1024 };

typedef struct combine_job {
    const combine_args *args;
    const row_kernels *kernels;
    int32_t *row_of; /* [T per], by slot */
} combine_job;

size_t cpu_combine_workspace(const stage_exec *exec, const combine_args *args)
{
    (void)exec;
    return (size_t)args->permutation.shape[0] * sizeof(int32_t);
}

static const float *row_f32(const quern_tensor *t, int64_t row)
{
    return (const float *)t->data + row * t->strides[0];
}

static void add_row(float *sum, const quern_tensor *t, int64_t row, int64_t column, int64_t n)
{
    const float *x = row_f32(t, row) + column;
    for (int64_t c = 0; c < n; c++) sum[c] += x[c];
}

static void combine_token(void *arg, int64_t token, int32_t thread)
{
    (void)thread;
    const combine_job *job = arg;
    const combine_args *args = job->args;
    const int32_t *rows = job->row_of + token * args->per;
    const float *weights = args->weights.ndim > 0 ? row_f32(&args->weights, token) : NULL;
    float sum[STRIP];
    for (int64_t column = 0; column < args->y.shape[1]; column += STRIP) {
        const int64_t left = args->y.shape[1] - column, n = left < STRIP ? left : STRIP;
        memset(sum, 0, sizeof sum);
        for (int64_t j = 0; j < args->per; j++) {
            const float *y = row_f32(&args->y, rows[j]) + column;
            const float w = weights != NULL ? weights[j] : 1.0f;
            for (int64_t c = 0; c < n; c++) sum[c] += w * y[c];
        }
        if (args->plus.ndim > 0) add_row(sum, &args->plus, token, column, n);
        if (args->plus_too.ndim > 0) add_row(sum, &args->plus_too, token, column, n);
        job->kernels->convert(sum, QUERN_F32, view_at(&args->out, token, column), args->out.dtype, n);
    }
}

quern_status cpu_combine(const stage_exec *exec, const combine_args *args, void *workspace)
{
    combine_job job = {args, cpu_kernels_for(exec->cpu_level)->rows, workspace};
    const quern_status status =
        check_permutation(exec, &args->permutation, args->permutation.shape[0], job.row_of);
    if (status != QUERN_OK) return status;
    parallel_for(exec, view_rows(&args->out), combine_token, &job);
    return QUERN_OK;
}
