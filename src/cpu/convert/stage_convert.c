/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_convert.c - the convert stage: a tensor in another dtype, row by row; rows past the end of the last
 * sequence become 0. Limit: reading in and writing out once. */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/nsa_kernels.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

enum { CONVERT_TOKENS = 32 };

typedef struct convert_job {
    const convert_args *args;
    const nsa_kernels *kernels;
    int64_t rows, pieces;
} convert_job;

static void convert_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const convert_job *job = arg;
    const quern_tensor *in = &job->args->in, *out = &job->args->out;
    const int64_t b = index / job->pieces, first = index % job->pieces * CONVERT_TOKENS;
    const int64_t end = first + CONVERT_TOKENS < job->rows ? first + CONVERT_TOKENS : job->rows;
    const int64_t joined = heads_joined(in) > 1 && heads_joined(out) > 1 ? in->shape[2] : 1;
    for (int64_t n = first; n < end; n++)
        for (int64_t h = 0; h < in->shape[2]; h += joined)
            job->kernels->rows->convert(row_at(in, b, n, h), in->dtype, row_at(out, b, n, h), out->dtype,
                                        in->shape[3] * joined);
}

quern_status cpu_convert(const stage_exec *exec, const convert_args *args, void *workspace)
{
    const quern_status status = check_queries(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    (void)workspace;
    const int64_t rows = args->seqs.cu_q.data != NULL ? token_rows(&args->seqs) : args->in.shape[1];
    convert_job job = {args, cpu_kernels_for(exec->cpu_level)->nsa, rows,
                       (rows + CONVERT_TOKENS - 1) / CONVERT_TOKENS};
    parallel_for(exec, args->in.shape[0] * job.pieces, convert_piece, &job);
    if (rows < args->out.shape[1]) zero_rows(&args->out, rows);
    return QUERN_OK;
}

void cpu_convert_kernel(const stage_exec *exec, const convert_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "convert", false, cpu_kernels_for(exec->cpu_level)->nsa->level);
}
