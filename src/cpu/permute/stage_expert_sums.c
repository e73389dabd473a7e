/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_expert_sums.c - the expert_sums stage. A task is an expert and a strip of columns: it walks the
 * expert's rows in order, with the strip's sums in a thread's own memory. The products with the bias are a
 * task a row. Limit: x read once for each of the two.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/permute/stages.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/levels.h"

#include <string.h>

enum { STRIP = 512, PARTS = 16 /* sums of a row's product, by column modulo their number */ };

typedef struct sums_job {
    const expert_sums_args *args;
    const row_kernels *kernels;
    int64_t columns, strips, per;
    float (*scratch)[2][STRIP]; /* [threads] */
} sums_job;

size_t cpu_expert_sums_workspace(const stage_exec *exec, const expert_sums_args *args)
{
    (void)args;
    return (size_t)exec->threads * sizeof(float[2][STRIP]);
}

/* Columns of a row of any dtype, in f32. */
static const float *widened(const sums_job *job, const quern_tensor *t, int64_t row, int64_t column,
                            int64_t n, float *room)
{
    const void *from = view_at(t, row, column);
    if (t->dtype == QUERN_F32) return from;
    job->kernels->convert(from, t->dtype, room, QUERN_F32, n);
    return room;
}

/* The address of a slot in a view [T, per]. */
static float *slot_at(const sums_job *job, const quern_tensor *t, int64_t row)
{
    const int64_t slot = ((const int32_t *)job->args->permutation.data)[row];
    return (float *)t->data + slot / job->per * t->strides[0] + slot % job->per;
}

static void sum_task(void *arg, int64_t index, int32_t thread)
{
    const sums_job *job = arg;
    const expert_sums_args *args = job->args;
    const int32_t all = (int32_t)args->x.shape[0], *ends = args->offsets.ndim > 0 ? args->offsets.data : &all;
    const int64_t expert = index / job->strips, column = index % job->strips * STRIP,
                  left = job->columns - column;
    const int64_t n = left < STRIP ? left : STRIP;
    float *sum = job->scratch[thread][0];
    memset(sum, 0, sizeof job->scratch[thread][0]);
    for (int64_t r = expert > 0 ? ends[expert - 1] : 0; r < ends[expert]; r++) {
        const float *x = widened(job, &args->x, r, column, n, job->scratch[thread][1]);
        const float w = args->weights.ndim > 0 ? *slot_at(job, &args->weights, r) : 1.0f;
        for (int64_t c = 0; c < n; c++) sum[c] += w * x[c];
    }
    memcpy(view_at(&args->sums, expert, column), sum, (size_t)n * sizeof *sum);
}

static void product_task(void *arg, int64_t row, int32_t thread)
{
    const sums_job *job = arg;
    const expert_sums_args *args = job->args;
    const int64_t expert = expert_of_row(&args->offsets, row);
    float part[PARTS] = {0}, sum = 0.0f;
    for (int64_t column = 0; column < job->columns; column += STRIP) {
        const int64_t left = job->columns - column, n = left < STRIP ? left : STRIP;
        const float *x = widened(job, &args->x, row, column, n, job->scratch[thread][0]);
        const float *b = widened(job, &args->bias, expert, column, n, job->scratch[thread][1]);
        int64_t c = 0;
        for (; c + PARTS <= n; c += PARTS)
            for (int64_t i = 0; i < PARTS; i++) part[i] += x[c + i] * b[c + i];
        for (; c < n; c++) part[c % PARTS] += x[c] * b[c];
    }
    for (int64_t i = 0; i < PARTS; i++) sum += part[i];
    *slot_at(job, &args->d_weights, row) += sum;
}

quern_status cpu_expert_sums(const stage_exec *exec, const expert_sums_args *args, void *workspace)
{
    const int64_t columns = args->x.shape[1], rows = args->x.shape[0];
    const int64_t tokens = args->d_weights.ndim > 0 ? args->d_weights.shape[0]
                           : args->weights.ndim > 0 ? args->weights.shape[0]
                                                    : rows;
    sums_job job = {.args = args,
                    .kernels = cpu_kernels_for(exec->cpu_level)->rows,
                    .columns = columns,
                    .strips = (columns + STRIP - 1) / STRIP,
                    .per = tokens > 0 ? rows / tokens : 1,
                    .scratch = workspace};
    quern_status status = check_ends(exec, &args->offsets, rows);
    if (status == QUERN_OK && (args->weights.ndim > 0 || args->d_weights.ndim > 0))
        status = check_each(exec, QUERN_STATUS_BAD_ID, &args->permutation, rows, 0, tokens * job.per - 1);
    if (status != QUERN_OK) return status;
    if (args->sums.ndim > 0) parallel_for(exec, args->sums.shape[0] * job.strips, sum_task, &job);
    if (args->bias.ndim > 0 && args->d_weights.ndim > 0)
        parallel_for(exec, rows_with_expert(&args->offsets, rows), product_task, &job);
    return QUERN_OK;
}
