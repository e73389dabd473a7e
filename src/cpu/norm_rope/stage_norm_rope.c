/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_norm_rope.c - the norm_rope_forward and norm_rope_backward stages.
 *
 * A row is widened to f32, takes its steps while it is in L1, and is stored in the output's dtype. A task is
 * 16 rows of heads, or as many as are worth waking a thread. The weight's gradient is a sum over all rows:
 * these are cut into at most 64 runs by their number alone, each run has its own sum, and the sums are added
 * in order, so the bits do not depend on the threads. Limit: copy bandwidth.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/rows/f32_rows.h"
#include "cpu/levels.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

enum { TASK_ROWS = 16, TASK_VALUES = 1 << 15, RUNS = 64 };

typedef struct norm_rope_job {
    const norm_rope_args *args;
    const row_kernels *kernels;
    int64_t rows, width, rotated;
    int64_t runs, run_rows; /* tasks, and the rows of each */
    f32_rows weight;        /* with norm */
    float *scratch;         /* a thread's: a row of x, one of d, angles */
    int64_t scratch_floats;
    float *sums; /* [runs, width]: shares of d_weight, or NULL */
} norm_rope_job;

static norm_rope_job carve(const stage_exec *exec, const norm_rope_args *args, arena *a)
{
    norm_rope_job job = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level)->rows};
    job.rows = args->x.shape[0] * args->x.shape[1] * args->x.shape[2];
    job.width = args->x.shape[3];
    job.rotated = is_present(&args->cos_sin) ? args->cos_sin.shape[1] : 0;
    job.run_rows = TASK_ROWS;
    if (!is_present(&args->d_weight) && job.width > 0 && job.run_rows * job.width < TASK_VALUES)
        job.run_rows = TASK_VALUES / job.width;
    if (is_present(&args->d_weight) && (job.rows + RUNS - 1) / RUNS > TASK_ROWS)
        job.run_rows = (job.rows + RUNS - 1) / RUNS;
    job.runs = (job.rows + job.run_rows - 1) / job.run_rows;
    job.weight = carve_rows(&args->weight, a);
    if (args->norm && !is_present(&args->weight))
        job.weight.data = job.weight.copy = arena_take(a, (size_t)job.width * sizeof(float));
    job.scratch_floats = round_up16(2 * job.width + job.rotated);
    job.scratch = arena_take(a, (size_t)(job.scratch_floats * exec->threads) * sizeof(float));
    if (is_present(&args->d_weight)) job.sums = arena_take(a, (size_t)(job.runs * job.width) * sizeof(float));
    return job;
}

static void fill_weight(norm_rope_job *job)
{
    if (is_present(&job->args->weight)) fill_rows(job->kernels, &job->args->weight, &job->weight);
    else if (job->weight.copy != NULL)
        for (int64_t c = 0; c < job->width; c++) job->weight.copy[c] = 1.0f;
}

/* Row i of a [B, T, H, C] view. */
static void *numbered_row(const quern_tensor *t, int64_t i)
{
    const int64_t token = i / t->shape[2];
    return row_at(t, token / t->shape[1], token % t->shape[1], i % t->shape[2]);
}

static void widen(const norm_rope_job *job, const quern_tensor *t, int64_t i, float *row)
{
    job->kernels->convert(numbered_row(t, i), t->dtype, row, QUERN_F32, job->width);
}

static void rotate(const norm_rope_job *job, float *row, int64_t i, bool inverse, float *angles)
{
    const quern_tensor *table = &job->args->cos_sin;
    const int64_t n = job->rotated;
    if (n == 0) return;
    const int64_t token = i / job->args->x.shape[2] % job->args->x.shape[1],
                  position = i32_at(&job->args->positions, token, token);
    const char *from =
        (const char *)table->data + position * table->strides[0] * (int64_t)quern_dtype_size(table->dtype);
    job->kernels->convert(from, table->dtype, angles, QUERN_F32, n);
    job->kernels->rotate_row(row + job->width - n, angles, angles + n / 2, n, inverse);
}

static void forward_run(void *arg, int64_t run, int32_t thread)
{
    const norm_rope_job *job = arg;
    const norm_rope_args *args = job->args;
    float *row = job->scratch + thread * job->scratch_floats, *angles = row + 2 * job->width;
    const int64_t end = (run + 1) * job->run_rows < job->rows ? (run + 1) * job->run_rows : job->rows;
    for (int64_t i = run * job->run_rows; i < end; i++) {
        widen(job, &args->x, i, row);
        if (args->norm) job->kernels->norm_row(row, job->weight.data, args->eps, job->width, row);
        rotate(job, row, i, args->inverse, angles);
        job->kernels->convert(row, QUERN_F32, numbered_row(&args->out, i), args->out.dtype, job->width);
    }
}

static void backward_run(void *arg, int64_t run, int32_t thread)
{
    const norm_rope_job *job = arg;
    const norm_rope_args *args = job->args;
    float *x = job->scratch + thread * job->scratch_floats, *d = x + job->width, *angles = d + job->width;
    float *sum = job->sums != NULL ? job->sums + run * job->width : NULL;
    const int64_t end = (run + 1) * job->run_rows < job->rows ? (run + 1) * job->run_rows : job->rows;
    if (sum != NULL) memset(sum, 0, (size_t)job->width * sizeof *sum);
    for (int64_t i = run * job->run_rows; i < end; i++) {
        widen(job, &args->d_out, i, d);
        rotate(job, d, i, !args->inverse, angles);
        if (args->norm) {
            widen(job, &args->x, i, x);
            job->kernels->norm_backward(x, job->weight.data, args->eps, job->width, d, sum);
        }
        job->kernels->convert(d, QUERN_F32, numbered_row(&args->d_x, i), args->d_x.dtype, job->width);
    }
}

size_t cpu_norm_rope_workspace(const stage_exec *exec, const norm_rope_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

/* Every token's position is a row of the table. */
static quern_status check_positions(const stage_exec *exec, const norm_rope_args *args)
{
    return check_each(exec, QUERN_STATUS_BAD_POSITION, &args->positions, args->x.shape[1], 0,
                      args->cos_sin.shape[0] - 1);
}

quern_status cpu_norm_rope(const stage_exec *exec, const norm_rope_args *args, void *workspace)
{
    const quern_status status = check_positions(exec, args);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    norm_rope_job job = carve(exec, args, &a);
    fill_weight(&job);
    parallel_for(exec, job.runs, forward_run, &job);
    return QUERN_OK;
}

quern_status cpu_norm_rope_backward(const stage_exec *exec, const norm_rope_args *args, void *workspace)
{
    const quern_status status = check_positions(exec, args);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    norm_rope_job job = carve(exec, args, &a);
    fill_weight(&job);
    parallel_for(exec, job.runs, backward_run, &job);
    float *total = args->d_weight.data;
    if (job.sums == NULL) return QUERN_OK;
    memset(total, 0, (size_t)job.width * sizeof *total);
    for (int64_t run = 0; run < job.runs; run++)
        job.kernels->add_scaled(total, job.sums + run * job.width, 1.0f, job.width);
    return QUERN_OK;
}
