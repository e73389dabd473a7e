/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool_forward.c - entries from projections.
 *
 * A task is a run of blocks of one sequence, some 256 tokens. It begins with the series b of the block before
 * and then reads each row once: series a into the block's sums, series b into the next block's. The order of
 * the additions is that of the tokens, whatever the tasks, and the same as token by token
 * (stage_pool_append.c). Limit: read bandwidth; an overlapping task reads half of one more block.
 */
#include "core/parallel.h"
#include "cpu/pool/pool.h"
#include "cpu/levels.h"

#include <string.h>

enum { TASK_TOKENS = 256 };

typedef struct pool_job {
    const pool_args *args;
    const cpu_kernels *kernels;
    bool prefetch_l2;
    f32_rows bias_a, bias_b;
    entry_plan entry;
    int64_t task_blocks, pieces;
    float *scratch; /* a thread's: two accumulators, a row, angles */
    int64_t scratch_floats;
} pool_job;

static pool_job carve(const stage_exec *exec, const pool_args *args, arena *a)
{
    pool_job job = {
        .args = args, .kernels = cpu_kernels_for(exec->cpu_level), .prefetch_l2 = exec->prefetch_l2};
    job.bias_a = carve_rows(&args->bias_a, a);
    job.bias_b = carve_rows(&args->bias_b, a);
    job.entry = carve_entry(&args->entry, job.kernels, args->width, args->ratio, a);
    job.task_blocks = args->ratio < TASK_TOKENS ? TASK_TOKENS / args->ratio : 1;
    job.scratch_floats = round_up16(8 * args->width);
    job.scratch = arena_take(a, (size_t)(job.scratch_floats * exec->threads) * sizeof(float));
    return job;
}

static void emit(const pool_job *job, const pool_sequence *s, int64_t i, const pool_sums *sums, float *row,
                 float *angles)
{
    const pool_args *args = job->args;
    job->kernels->pool->pooled_row(sums, args->width, row, NULL);
    if (is_present(&args->pooled))
        memcpy(pool_row(&args->pooled, s->view_b, s->entry0 + i), row, (size_t)args->width * sizeof(float));
    if (!is_present(&args->out)) return;
    finish_entry(&job->entry, row, s->position + i * args->ratio, angles);
    encode_row(job->kernels, args->entry.format, row, args->width,
               pool_row(&args->out, s->view_b, s->entry0 + i), args->out.dtype);
}

static const char *row_of(const pool_args *args, const pool_sequence *s, int64_t row)
{
    return pool_row(&args->proj, s->view_b, row);
}

/* The series b of the block before block i, into `sums`. */
static void begin(const pool_job *job, const pool_sequence *s, int64_t i, const pool_sums *sums)
{
    const pool_args *args = job->args;
    const int64_t r = args->ratio, width = args->width;
    clear_sums(sums, width);
    if (!args->overlap) return;
    if (i > 0 || args->continued) {
        const pool_rows rows = series_rows(row_of(args, s, s->token0 + (i - 1) * r), args->proj.dtype,
                                           args->proj.strides[1], width, 1, &job->bias_b, 0, r);
        merge_block(job->kernels, &rows, width, sums);
    } else if (s->prev != NULL) {
        const pool_rows rows =
            series_rows(s->prev, args->prev_b.dtype, s->prev_stride, width, 0, &job->bias_b, 0, r);
        merge_block(job->kernels, &rows, width, sums);
    }
}

static void pool_piece(void *arg, int64_t index, int32_t thread)
{
    const pool_job *job = arg;
    const pool_args *args = job->args;
    const pool_sequence s = pool_sequence_at(args, index / job->pieces);
    const int64_t first = index % job->pieces * job->task_blocks, r = args->ratio, width = args->width;
    const int64_t end = s.blocks - first < job->task_blocks ? s.blocks : first + job->task_blocks;
    float *scratch = job->scratch + thread * job->scratch_floats, *row = scratch + 6 * width;
    const int64_t ahead = pool_ahead(args);
    if (first >= end) return;
    begin(job, &s, first, &(pool_sums){scratch, scratch + width, scratch + 2 * width});
    for (int64_t i = first; i < end; i++) {
        const pool_sums own = sums_at(scratch + (i - first) % 2 * 3 * width, width),
                        next = sums_at(scratch + (i - first + 1) % 2 * 3 * width, width);
        const char *token = row_of(args, &s, s.token0 + i * r);
        pool_rows a =
            series_rows(token, args->proj.dtype, args->proj.strides[1], width, 0, &job->bias_a, 0, r);
        a.ahead = ahead;
        a.l2 = job->prefetch_l2;
        merge_block(job->kernels, &a, width, &own);
        clear_sums(&next, width);
        if (args->overlap && i + 1 < end) {
            pool_rows b =
                series_rows(token, args->proj.dtype, args->proj.strides[1], width, 1, &job->bias_b, 0, r);
            b.ahead = ahead;
            b.l2 = job->prefetch_l2;
            merge_block(job->kernels, &b, width, &next);
        }
        emit(job, &s, i, &own, row, row + width);
    }
}

/* Clears the rows of a view that no block writes. */
static void zero_unused(const pool_args *args, const quern_tensor *t, int64_t row_bytes)
{
    if (!is_present(t)) return;
    int64_t end = 0;
    for (int64_t b = 0; b < args->batch; b++) {
        const pool_sequence s = pool_sequence_at(args, b);
        for (int64_t i = s.blocks; i < s.entries; i++)
            memset(pool_row(t, s.view_b, s.entry0 + i), 0, (size_t)row_bytes);
        end = s.entry0 + s.entries;
    }
    for (int64_t n = end; is_present(&args->cu_seqlens) && n < t->shape[1]; n++)
        memset(pool_row(t, 0, n), 0, (size_t)row_bytes);
}

size_t pool_forward_workspace(const stage_exec *exec, const pool_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

void pool_forward(const stage_exec *exec, const pool_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    pool_job job = carve(exec, args, &a);
    int64_t most = 0;
    fill_rows(job.kernels->rows, &args->bias_a, &job.bias_a);
    fill_rows(job.kernels->rows, &args->bias_b, &job.bias_b);
    fill_rows(job.kernels->rows, &args->entry.norm_weight, &job.entry.norm);
    for (int64_t b = 0; b < args->batch; b++) {
        const int64_t blocks = pool_sequence_at(args, b).blocks;
        most = blocks > most ? blocks : most;
    }
    job.pieces = (most + job.task_blocks - 1) / job.task_blocks;
    parallel_for(exec, args->batch * job.pieces, pool_piece, &job);
    zero_unused(args, &args->pooled, args->width * (int64_t)sizeof(float));
    zero_unused(args, &args->out, row_bytes(args->entry.format, args->width, args->out.dtype));
}
