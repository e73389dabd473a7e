/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_swiglu.c - SwiGLU and its gradient, a row a task, a strip of columns at a time. Limit: h read once.
 */
#include "core/parallel.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/swiglu/stages.h"
#include "cpu/levels.h"

enum { STRIP = 512, PARTS = 16 /* sums of a row's product, by column modulo their number */ };

typedef struct swiglu_job {
    const swiglu_args *args;
    const swiglu_kernels *kernels;
    const row_kernels *rows;
    int64_t width; /* I */
} swiglu_job;

static swiglu_job job_of(const stage_exec *exec, const swiglu_args *args)
{
    return (swiglu_job){args, cpu_kernels_for(exec->cpu_level)->swiglu,
                        cpu_kernels_for(exec->cpu_level)->rows, args->h.shape[1] / 2};
}

static int64_t strip_of(const swiglu_job *job, int64_t column)
{
    return job->width - column < STRIP ? job->width - column : STRIP;
}

static void read_parts(const swiglu_job *job, int64_t row, int64_t column, int64_t n, float part[2][STRIP])
{
    const quern_tensor *h = &job->args->h;
    for (int up = 0; up < 2; up++)
        job->kernels->part_row(view_row(h, row), h->dtype, column, up, job->args->rule.granularity, n,
                               part[up]);
}

static void forward_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const swiglu_job *job = arg;
    const quern_tensor *act = &job->args->act;
    float part[2][STRIP];
    for (int64_t column = 0; column < job->width; column += STRIP) {
        const int64_t n = strip_of(job, column);
        read_parts(job, row, column, n, part);
        job->kernels->swiglu_row(&job->args->rule, part[0], part[1], n, part[0]);
        job->rows->convert(part[0], QUERN_F32, view_at(act, row, column), act->dtype, n);
    }
}

quern_status cpu_swiglu(const stage_exec *exec, const swiglu_args *args, void *workspace)
{
    (void)workspace;
    swiglu_job job = job_of(exec, args);
    if (job.width > 0) parallel_for(exec, args->h.shape[0], forward_row, &job);
    return QUERN_OK;
}

/* Writes the parts of a strip to their columns of d_h. */
static void write_parts(const swiglu_job *job, int64_t row, int64_t column, int64_t n, float part[2][STRIP])
{
    const quern_tensor *d_h = &job->args->d_h;
    const int64_t q = job->args->rule.granularity;
    for (int64_t c = 0; c < n;) {
        const int64_t in_run = (column + c) % q, left = q - in_run, run = left < n - c ? left : n - c;
        const int64_t at = (column + c - in_run) * 2 + in_run;
        job->rows->convert(part[0] + c, QUERN_F32, view_at(d_h, row, at), d_h->dtype, run);
        job->rows->convert(part[1] + c, QUERN_F32, view_at(d_h, row, at + q), d_h->dtype, run);
        c += run;
    }
}

/* Adds the product of n values of d and of act from `column` on, by column modulo PARTS. */
static void add_product(const quern_tensor *act, int64_t row, int64_t column, int64_t n, const float *d,
                        float part[PARTS])
{
    const void *x = view_row(act, row);
    for (int64_t c = 0; c < n; c++) part[c % PARTS] += d[c] * element_of(x, act->dtype, column + c);
}

static void backward_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const swiglu_job *job = arg;
    const swiglu_args *args = job->args;
    const bool by_slot = args->permutation.ndim > 0;
    const int64_t slot = by_slot ? ((const int32_t *)args->permutation.data)[row] : 0;
    const int64_t per = by_slot ? args->weights.shape[1] : 1, token = slot / per, j = slot % per;
    const float weight =
        by_slot ? ((const float *)args->weights.data)[token * args->weights.strides[0] + j] : 1.0f;
    float part[2][STRIP], d[STRIP], product[PARTS] = {0}, sum = 0.0f;
    for (int64_t column = 0; column < job->width; column += STRIP) {
        const int64_t n = strip_of(job, column);
        job->rows->convert(view_at(&args->d_act, row, column), args->d_act.dtype, d, QUERN_F32, n);
        if (args->d_weights.ndim > 0) add_product(&args->act, row, column, n, d, product);
        for (int64_t c = 0; c < n; c++) d[c] *= weight;
        read_parts(job, row, column, n, part);
        job->kernels->swiglu_backward_row(&job->args->rule, d, n, part[0], part[1]);
        write_parts(job, row, column, n, part);
    }
    for (int64_t i = 0; i < PARTS; i++) sum += product[i];
    if (args->d_weights.ndim > 0)
        ((float *)args->d_weights.data)[token * args->d_weights.strides[0] + j] = sum;
}

quern_status cpu_swiglu_backward(const stage_exec *exec, const swiglu_args *args, void *workspace)
{
    (void)workspace;
    swiglu_job job = job_of(exec, args);
    parallel_for(exec, args->h.shape[0], backward_row, &job);
    return QUERN_OK;
}
