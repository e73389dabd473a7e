/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_rowdot.c - the rowdot stage: the dot product of two activations, row by row, in f32 over 16 lanes.
 * Limit: reading both tensors once. */
#include "core/parallel.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

typedef struct rowdot_job {
    const rowdot_args *args;
    const attention_kernels *kernels;
    int64_t valid; /* tokens of the batch view up to the end of the last sequence */
} rowdot_job;

/* All heads of one token. */
static void token(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const rowdot_job *job = arg;
    const quern_tensor *a = &job->args->a, *out = &job->args->out;
    const int64_t b = index / a->shape[1], n = index % a->shape[1], dim = a->shape[3];
    float x[MAX_DIM], y[MAX_DIM];
    for (int64_t h = 0; h < a->shape[2]; h++) {
        float *dst = row_at(out, b, h, n);
        if (n >= job->valid) {
            *dst = 0.0f;
            continue;
        }
        const row_source rx = rows_at(a, b, n, h, 1), ry = rows_at(&job->args->b, b, n, h, 1);
        job->kernels->pack_rows_f32(&rx, 1.0f, x, dim);
        job->kernels->pack_rows_f32(&ry, 1.0f, y, dim);
        float lanes[16] = {0}, sum = 0.0f;
        for (int64_t c = 0; c < dim; c++) lanes[c % 16] += x[c] * y[c];
        for (int i = 0; i < 16; i++) sum += lanes[i];
        *dst = sum;
    }
}

quern_status cpu_rowdot(const stage_exec *exec, const rowdot_args *args, void *workspace)
{
    (void)workspace;
    rowdot_job job = {args, cpu_kernels_for(exec->cpu_level)->attention, token_rows(&args->seqs)};
    parallel_for(exec, args->a.shape[0] * args->a.shape[1], token, &job);
    return QUERN_OK;
}

void cpu_rowdot_kernel(const stage_exec *exec, const rowdot_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "rowdot", false, cpu_kernels_for(exec->cpu_level)->attention->level);
}
