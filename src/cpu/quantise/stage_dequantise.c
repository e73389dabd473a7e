/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_dequantise.c - the dequantise stage. Limit: codes and scales read and out written once. */
#include "core/parallel.h"
#include "cpu/kernels/formats/globals.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/quantise/stages.h"
#include "cpu/levels.h"

#include <string.h>

typedef struct dequantise_job {
    const dequantise_args *args;
    const format_kernels *kernels;
    row_cut cut;
    int64_t rows;
} dequantise_job;

static void rows_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const dequantise_job *job = arg;
    const dequantise_args *args = job->args;
    const row_piece p = piece_at(&job->cut, index);
    const int64_t element = (int64_t)quern_dtype_size(args->out.dtype);
    for (int64_t row = p.first; row < p.end; row++) {
        char *out = (char *)view_row(&args->out, row) + p.column * element;
        if (row >= job->rows) {
            memset(out, 0, (size_t)(p.columns * element));
            continue;
        }
        const int64_t expert = expert_in(&args->offsets, args->per, &args->out, row);
        const quantise_rule rule = {args->profile, QUANTISE_SCALES_RNE,
                                    global_at(&args->global, args->per, row, expert)};
        job->kernels->dequantise_row(&rule, (const uint8_t *)view_row(&args->codes, row) + p.column / 2,
                                     (const uint8_t *)view_row(&args->scales, row) + p.column / 16, p.columns,
                                     out, args->out.dtype);
    }
}

static void columns_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const dequantise_job *job = arg;
    const dequantise_args *args = job->args;
    const row_piece p = piece_at(&job->cut, index);
    const int64_t element = (int64_t)quern_dtype_size(args->out.dtype), blocks = args->out.shape[1] / 16;
    for (int64_t block = p.first; block < p.end; block++) {
        const quantise_rule rule = {args->profile, QUANTISE_SCALES_RNE,
                                    global_at(&args->global, args->per, 0, block / blocks)};
        job->kernels->dequantise_columns(
            &rule, (const uint8_t *)view_row(&args->codes, 8 * block) + p.column, args->codes.strides[1],
            (const uint8_t *)view_row(&args->scales, block) + p.column, p.columns,
            (char *)view_row(&args->out, 16 * block) + p.column * element, args->out.dtype,
            args->out.strides[1]);
    }
}

quern_status cpu_dequantise(const stage_exec *exec, const dequantise_args *args, void *workspace)
{
    (void)workspace;
    const int64_t rows = view_rows(&args->out);
    quern_status status = check_ends(exec, &args->offsets, rows);
    if (status == QUERN_OK) status = check_global_scales(exec, &args->global);
    if (status != QUERN_OK) return status;
    const int64_t used = rows_with_expert(&args->offsets, rows);
    status = check_scale_bytes(exec, &args->scales, args->columns ? view_rows(&args->scales) : used);
    if (status != QUERN_OK) return status;
    dequantise_job job = {args, cpu_kernels_for(exec->cpu_level)->formats,
                          cut_rows(args->columns ? rows / 16 : rows, view_columns(&args->out)), used};
    parallel_for(exec, job.cut.pieces, args->columns ? columns_piece : rows_piece, &job);
    return QUERN_OK;
}
