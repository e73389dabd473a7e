/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_fused_quantise.c - a product's interleaved output to quantised gate and up, or to quantised SwiGLU,
 * in one pass: a strip of a row goes through a buffer of f32 in L1. Limit: x read twice (the first time to
 * find nonfinite values) and 9/16 byte a column written.
 */
#include "core/parallel.h"
#include "cpu/quantise/finite.h"
#include "cpu/quantise/globals.h"
#include "cpu/quantise/stages.h"

#include <math.h>

enum { STRIP = 1024 }; /* columns of a buffer: a multiple of every level's group of blocks */

typedef struct fused_job {
    const fused_quantise_args *args;
    const quantise_kernels *kernels;
    uint32_t *bits; /* [M] */
} fused_job;

/* Without up, its columns may hold anything, so only the gate's are checked. */
static bool reads_all(const fused_quantise_args *args)
{
    return args->swiglu || (args->codes[0].ndim > 0 && args->codes[1].ndim > 0);
}

size_t cpu_fused_quantise_workspace(const stage_exec *exec, const fused_quantise_args *args)
{
    (void)exec;
    return row_magnitudes_bytes(&args->x);
}

static void quantise_strip(const fused_job *job, int part, const float *h, int64_t row, int64_t column,
                           int64_t n)
{
    const fused_quantise_args *args = job->args;
    const quantise_rule rule = {args->profile, QUANTISE_SCALES_RNE, *(const float *)args->global[part].data};
    job->kernels->quantise_row(&rule, h, QUERN_F32, n,
                               (uint8_t *)view_row(&args->codes[part], row) + column / 2,
                               (uint8_t *)view_row(&args->scales[part], row) + column / 16);
}

static void fused_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const fused_job *job = arg;
    const fused_quantise_args *args = job->args;
    const void *x = view_row(&args->x, row);
    const int64_t width = args->x.shape[1] / 2, q = args->granularity;
    float part[2][STRIP];
    for (int64_t column = 0; column < width; column += STRIP) {
        const int64_t n = width - column < STRIP ? width - column : STRIP;
        for (int p = 0; p < 2; p++)
            if (args->swiglu || args->codes[p].ndim > 0)
                job->kernels->part_row(x, args->x.dtype, column, p == 1, q, n, part[p]);
        if (args->swiglu) {
            const swiglu_rule rule = {args->limit, args->alpha, args->beta};
            job->kernels->swiglu_row(&rule, part[0], part[1], n, part[0]);
        }
        for (int p = 0; p < 2; p++)
            if (args->codes[p].ndim > 0) quantise_strip(job, p, part[p], row, column, n);
    }
}

/* The column of x that is column c of the part. */
static int64_t part_column(const fused_quantise_args *args, int64_t c)
{
    const int64_t q = args->granularity;
    return c / q * 2 * q + c % q + (args->codes[1].ndim > 0 ? q : 0);
}

static void measure_part(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const fused_job *job = arg;
    const fused_quantise_args *args = job->args;
    const int64_t element = (int64_t)quern_dtype_size(args->x.dtype), q = args->granularity;
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
    parallel_for(exec, args->x.shape[0], measure_part, job);
    for (int64_t row = 0; row < args->x.shape[0]; row++)
        for (int64_t c = 0; job->bits[row] >= 0x7f800000u && c < args->x.shape[1] / 2; c++)
            if (!isfinite(element_of(view_row(&args->x, row), args->x.dtype, part_column(args, c))))
                return report_not_finite(&args->x, row, part_column(args, c), "x");
    return QUERN_OK;
}

quern_status cpu_fused_quantise(const stage_exec *exec, const fused_quantise_args *args, void *workspace)
{
    row_magnitudes m = {.bits = workspace};
    fused_job job = {args, quantise_kernels_for(exec->cpu_level), workspace};
    const quern_status status = reads_all(args) ? row_magnitudes_of(exec, &args->x, args->x.shape[0], "x", &m)
                                                : check_part(exec, &job);
    if (status != QUERN_OK) return status;
    parallel_for(exec, args->x.shape[0], fused_row, &job);
    return QUERN_OK;
}
