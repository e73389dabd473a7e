/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_fused_quantise.c - a product's interleaved output to quantised gate and up, or to quantised SwiGLU.
 *
 * Nothing may be written before every value is known to be finite. Gate and up are read twice for that; a
 * strip of a row goes through a buffer of f32 in L1. SwiGLU is read once: its codes and scales, a seventh of
 * x in bf16, wait in the workspace until all rows are done. Limit: the reads of x.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/rows/finite.h"
#include "cpu/kernels/formats/globals.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"
#include "cpu/quantise/stages.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum { STRIP = 1024 }; /* columns of a buffer: a multiple of every level's group of blocks */

typedef struct fused_job fused_job;
typedef void fused_row(const fused_job *job, int64_t row);

struct fused_job {
    const fused_quantise_args *args;
    const cpu_kernels *kernels;
    uint32_t *bits; /* [M] */
    /* SwiGLU's results until all rows are known to be finite: rows of `blocks` scales, 8 times the codes */
    uint8_t *codes, *scales;
    int64_t blocks;
    fused_row *row; /* what a task does with each of its rows */
    int64_t rows_a_task;
};

/* Without up, its columns may hold anything, so only the gate's are checked. */
static bool reads_all(const fused_quantise_args *args)
{
    return args->codes[0].ndim > 0 && args->codes[1].ndim > 0;
}

static void carve(fused_job *job, arena *a)
{
    const quern_tensor *x = &job->args->x;
    job->blocks = (x->shape[1] / 2 + 15) / 16;
    if (!job->args->swiglu) {
        job->bits = arena_take(a, row_magnitudes_bytes(x));
        return;
    }
    job->bits = arena_take(a, (size_t)x->shape[0] * sizeof *job->bits);
    job->codes = arena_take(a, (size_t)(8 * x->shape[0] * job->blocks));
    job->scales = arena_take(a, (size_t)(x->shape[0] * job->blocks));
}

size_t cpu_fused_quantise_workspace(const stage_exec *exec, const fused_quantise_args *args)
{
    (void)exec;
    fused_job job = {.args = args};
    arena a = arena_on(NULL);
    carve(&job, &a);
    return a.used;
}

static void quantise_strip(const fused_job *job, int part, const float *h, int64_t row, int64_t column,
                           int64_t n)
{
    const fused_quantise_args *args = job->args;
    const quantise_rule rule = {args->profile, QUANTISE_SCALES_RNE, *(const float *)args->global[part].data};
    job->kernels->formats->quantise_row(&rule, h, QUERN_F32, n,
                                        (uint8_t *)view_row(&args->codes[part], row) + column / 2,
                                        (uint8_t *)view_row(&args->scales[part], row) + column / 16);
}

static void rows_task(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const fused_job *job = arg;
    const int64_t rows = job->args->x.shape[0], first = index * job->rows_a_task;
    for (int64_t row = first; row < rows && row < first + job->rows_a_task; row++) job->row(job, row);
}

/* Calls `row` for every row, on all threads. */
static void for_rows(const stage_exec *exec, fused_job *job, fused_row *row)
{
    const int64_t columns = job->args->x.shape[1], rows = columns > 0 ? job->args->x.shape[0] : 0,
                  together = columns > 0 ? piece_values(rows, columns) / columns : 1;
    job->row = row;
    job->rows_a_task = together > 1 ? together : 1;
    parallel_for(exec, (rows + job->rows_a_task - 1) / job->rows_a_task, rows_task, job);
}

static void quantise_parts(const fused_job *job, int64_t row)
{
    const fused_quantise_args *args = job->args;
    const void *x = view_row(&args->x, row);
    const int64_t width = args->x.shape[1] / 2, q = args->rule.granularity;
    float part[STRIP];
    for (int64_t column = 0; column < width; column += STRIP) {
        const int64_t n = width - column < STRIP ? width - column : STRIP;
        for (int p = 0; p < 2; p++) {
            if (args->codes[p].ndim == 0) continue;
            job->kernels->swiglu->part_row(x, args->x.dtype, column, p == 1, q, n, part);
            quantise_strip(job, p, part, row, column, n);
        }
    }
}

static void swiglu_row(const fused_job *job, int64_t row)
{
    const fused_quantise_args *args = job->args;
    const quantise_rule to = {args->profile, QUANTISE_SCALES_RNE, *(const float *)args->global[0].data};
    job->bits[row] = job->kernels->swiglu->swiglu_quantise(
        &args->rule, &to, view_row(&args->x, row), args->x.dtype, args->rule.granularity,
        args->x.shape[1] / 2, job->codes + 8 * row * job->blocks, job->scales + row * job->blocks);
}

static void copy_row(const fused_job *job, int64_t row)
{
    memcpy(view_row(&job->args->codes[0], row), job->codes + 8 * row * job->blocks,
           (size_t)(8 * job->blocks));
    memcpy(view_row(&job->args->scales[0], row), job->scales + row * job->blocks, (size_t)job->blocks);
}

static quern_status quantise_swiglu(const stage_exec *exec, fused_job *job)
{
    const quern_tensor *x = &job->args->x;
    for_rows(exec, job, swiglu_row);
    for (int64_t row = 0; row < x->shape[0]; row++)
        for (int64_t c = 0; job->bits[row] >= 0x7f800000u && c < x->shape[1]; c++)
            if (!isfinite(element_of(view_row(x, row), x->dtype, c)))
                return report_not_finite(exec, x, row, c);
    for_rows(exec, job, copy_row);
    return QUERN_OK;
}

/* The column of x that is column c of the part. */
static int64_t part_column(const fused_quantise_args *args, int64_t c)
{
    const int64_t q = args->rule.granularity;
    return c / q * 2 * q + c % q + (args->codes[1].ndim > 0 ? q : 0);
}

static void measure_part(const fused_job *job, int64_t row)
{
    const fused_quantise_args *args = job->args;
    const int64_t element = (int64_t)quern_dtype_size(args->x.dtype), q = args->rule.granularity;
    uint32_t most = 0;
    for (int64_t c = 0; c < args->x.shape[1] / 2; c += q) {
        const char *run = (const char *)view_row(&args->x, row) + part_column(args, c) * element;
        const uint32_t bits = job->kernels->rows->magnitude(run, args->x.dtype, q);
        if (bits > most) most = bits;
    }
    job->bits[row] = most;
}

/* Only the columns of the part count. */
static quern_status check_part(const stage_exec *exec, fused_job *job)
{
    const fused_quantise_args *args = job->args;
    for_rows(exec, job, measure_part);
    for (int64_t row = 0; row < args->x.shape[0]; row++)
        for (int64_t c = 0; job->bits[row] >= 0x7f800000u && c < args->x.shape[1] / 2; c++)
            if (!isfinite(element_of(view_row(&args->x, row), args->x.dtype, part_column(args, c))))
                return report_not_finite(exec, &args->x, row, part_column(args, c));
    return QUERN_OK;
}

quern_status cpu_fused_quantise(const stage_exec *exec, const fused_quantise_args *args, void *workspace)
{
    fused_job job = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level)};
    arena a = arena_on(workspace);
    carve(&job, &a);
    for (int part = 0; part < 2; part++) {
        const quern_status good = check_global_scales(exec, &args->global[part]);
        if (good != QUERN_OK) return good;
    }
    if (args->swiglu) return quantise_swiglu(exec, &job);
    row_magnitudes m = {.bits = job.bits};
    const quern_status status =
        reads_all(args) ? row_magnitudes_of(exec, &args->x, args->x.shape[0], &m) : check_part(exec, &job);
    if (status != QUERN_OK) return status;
    for_rows(exec, &job, quantise_parts);
    return QUERN_OK;
}
