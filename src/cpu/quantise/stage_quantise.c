/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_quantise.c - the quantise stage: a pass for the largest magnitudes, which also finds nonfinite
 * values, then one that writes. It goes back from the end, which the caches still hold. Limit: x read twice
 * and 9/16 byte a value written.
 */
#include "core/parallel.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/rows/finite.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/formats/globals.h"
#include "cpu/quantise/stages.h"
#include "cpu/levels.h"

#include <string.h>

typedef struct quantise_job {
    const quantise_args *args;
    const format_kernels *kernels;
    row_cut cut;
    int64_t rows; /* that belong to an expert */
} quantise_job;

size_t cpu_quantise_workspace(const stage_exec *exec, const quantise_args *args)
{
    (void)exec;
    return row_magnitudes_bytes(&args->x);
}

/* The row of x for row r of the codes. */
static int64_t source_row(const quantise_args *args, int64_t r)
{
    return args->slots.ndim > 0 ? ((const int32_t *)args->slots.data)[r] / args->slots_a_row : r;
}

static void set_global(const quern_tensor *global, int64_t index, float value)
{
    float *to = view_row(global, index);
    *to = value;
}

/* Experts' rows: a matrix each of a stack, or the rows between offsets. */
static void expert_globals(const quantise_args *args, const row_magnitudes *m)
{
    int64_t first = 0;
    for (int64_t e = 0; e < args->global.shape[0]; e++) {
        const int64_t end =
            args->offsets.ndim == 0 ? first + args->x.shape[1] : ((const int32_t *)args->offsets.data)[e];
        set_global(&args->global, e,
                   end > first ? global_from_largest(args->profile, largest_of_rows(m, first, end)) : 1.0f);
        first = end;
    }
}

static void write_globals(const quantise_args *args, const row_magnitudes *m, int64_t rows)
{
    if (args->per == QUANTISE_GLOBAL_EXPERT) {
        expert_globals(args, m);
    } else if (args->per == QUANTISE_GLOBAL_ROW) {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t x = source_row(args, r);
            set_global(&args->global, r, global_from_largest(args->profile, largest_of_rows(m, x, x + 1)));
        }
    } else {
        set_global(&args->global, 0, global_from_largest(args->profile, largest_of_rows(m, 0, rows)));
    }
}

static void copy_globals(const quantise_args *args)
{
    for (int64_t i = 0; args->global.ndim > 0 && i < view_rows(&args->global); i++)
        set_global(&args->global, i, *(const float *)view_row(&args->given, i));
}

static const quern_tensor *globals_of(const quantise_args *args)
{
    return args->given.ndim > 0 ? &args->given : &args->global;
}

static row_piece piece_from_end(const row_cut *cut, int64_t index)
{
    return piece_at(cut, cut->pieces - 1 - index);
}

static void quantise_rows_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const quantise_job *job = arg;
    const quantise_args *args = job->args;
    const row_piece p = piece_from_end(&job->cut, index);
    const int64_t element = (int64_t)quern_dtype_size(args->x.dtype), blocks = (p.columns + 15) / 16;
    for (int64_t row = p.first; row < p.end; row++) {
        uint8_t *codes = (uint8_t *)view_row(&args->codes, row) + p.column / 2,
                *scales = (uint8_t *)view_row(&args->scales, row) + p.column / 16;
        if (row >= job->rows) {
            memset(codes, 0, (size_t)(8 * blocks));
            memset(scales, 0, (size_t)blocks);
            continue;
        }
        const int64_t expert = expert_in(&args->offsets, args->per, &args->x, row);
        const quantise_rule rule = {args->profile, args->choice,
                                    global_at(globals_of(args), args->per, row, expert)};
        job->kernels->quantise_row(
            &rule, (const char *)view_row(&args->x, source_row(args, row)) + p.column * element,
            args->x.dtype, p.columns, codes, scales);
    }
}

/* Here a row of the cut is one of 16 rows of x: a row of scales. */
static void quantise_columns_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const quantise_job *job = arg;
    const quantise_args *args = job->args;
    const row_piece p = piece_from_end(&job->cut, index);
    const int64_t element = (int64_t)quern_dtype_size(args->x.dtype), blocks = args->x.shape[1] / 16;
    for (int64_t block = p.first; block < p.end; block++) {
        const quantise_rule rule = {args->profile, args->choice,
                                    global_at(globals_of(args), args->per, 0, block / blocks)};
        job->kernels->quantise_columns(
            &rule, (const char *)view_row(&args->x, 16 * block) + p.column * element, args->x.dtype,
            args->x.strides[1], p.columns, (uint8_t *)view_row(&args->codes, 8 * block) + p.column,
            args->codes.strides[1], (uint8_t *)view_row(&args->scales, block) + p.column);
    }
}

quern_status cpu_quantise(const stage_exec *exec, const quantise_args *args, void *workspace)
{
    const int64_t rows = args->slots.ndim > 0 ? args->slots.shape[0] : view_rows(&args->x);
    quern_status status = check_ends(exec, &args->offsets, rows);
    if (status == QUERN_OK) status = check_global_scales(exec, &args->given);
    if (status != QUERN_OK) return status;
    const int64_t used = rows_with_expert(&args->offsets, rows);
    row_magnitudes m = {.bits = workspace};
    status = row_magnitudes_of(exec, &args->x, args->slots.ndim > 0 ? view_rows(&args->x) : used, &m);
    if (status != QUERN_OK) return status;
    if (args->given.ndim == 0) write_globals(args, &m, used);
    else copy_globals(args);
    quantise_job job = {args, cpu_kernels_for(exec->cpu_level)->formats,
                        cut_rows(args->columns ? rows / 16 : rows, view_columns(&args->x)), used};
    parallel_for(exec, job.cut.pieces, args->columns ? quantise_columns_piece : quantise_rows_piece, &job);
    return QUERN_OK;
}
