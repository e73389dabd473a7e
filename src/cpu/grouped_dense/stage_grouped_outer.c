/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_grouped_outer.c - the gradient of experts' matrices. A task is up to OUTER_ROWS rows and a panel
 * of columns of one expert's matrix. It walks the expert's rows in order, OUTER_DEPTH at a time: both
 * operands are packed into a thread's own memory and multiplied there, so an element's sum has one order,
 * whatever the number of threads. If both operands are bf16 and the level has the dot product, they are
 * multiplied as bf16; else both are widened to f32. Limit: the dot product; with few rows, writing the
 * gradient.
 */
#include "cpu/grouped_dense/stages.h"

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/levels.h"

enum {
    OUTER_ROWS = 192,
    OUTER_PART = 64, /* of these rows, packed at once */
    OUTER_DEPTH = 256,
    OUTER_PANEL = 64 /* no level's panel is wider */
};

typedef struct outer_scratch {
    float a[OUTER_DEPTH * OUTER_PART], b[OUTER_DEPTH * OUTER_PANEL], c[OUTER_ROWS * OUTER_PANEL];
    uint16_t weighted[OUTER_DEPTH * OUTER_PART]; /* rows of a, times their weights, in bf16 */
} outer_scratch;

typedef struct outer_job {
    const grouped_outer_args *args;
    const attention_kernels *kernels;
    bool pairs; /* of bf16 */
    int64_t n, k, per, blocks, panels;
    const int32_t *ends;
    int32_t all; /* without offsets, the only expert's end */
    outer_scratch *scratch;
} outer_job;

size_t cpu_grouped_outer_workspace(const stage_exec *exec, const grouped_outer_args *args)
{
    (void)args;
    return (size_t)exec->threads * sizeof(outer_scratch);
}

static row_source columns_of(const quern_tensor *t, int64_t row, int64_t rows, int64_t column, int64_t n)
{
    return (row_source){view_at(t, row, column), t->dtype, t->strides[0], rows, n};
}

static float weight_of(const outer_job *job, int64_t row)
{
    const quern_tensor *weights = &job->args->weights;
    const int64_t slot = ((const int32_t *)job->args->permutation.data)[row];
    return ((const float *)weights->data)[slot / job->per * weights->strides[0] + slot % job->per];
}

/* Columns of rows of a, transposed, as the kernels' operand. */
static void pack_a(const outer_job *job, outer_scratch *s, int64_t row, int64_t rows, int64_t column,
                   int64_t n)
{
    const attention_kernels *kernels = job->kernels;
    const quern_tensor *a = &job->args->a;
    const bool weighted = job->args->weights.ndim > 0;
    row_source src = columns_of(a, row, rows, column, n);
    for (int64_t r = 0; weighted && r < rows; r++) {
        const row_source one = columns_of(a, row + r, 1, column, n);
        float *to = s->a + (job->pairs ? 0 : r * OUTER_PART);
        kernels->pack_rows_f32(&one, weight_of(job, row + r), to, OUTER_PART);
        if (job->pairs) kernels->rows->convert(to, QUERN_F32, s->weighted + r * OUTER_PART, QUERN_BF16, n);
    }
    if (weighted) src = (row_source){s->weighted, QUERN_BF16, OUTER_PART, rows, n};
    if (job->pairs) kernels->pack_values_bf16(&src, OUTER_PART, (uint32_t *)(void *)s->a, 0);
    else if (!weighted) kernels->pack_rows_f32(&src, 1.0f, s->a, OUTER_PART);
}

static void multiply(const outer_job *job, outer_scratch *s, int64_t depth, float *c, bool accumulate)
{
    const attention_kernels *kernels = job->kernels;
    if (job->pairs)
        kernels->mm_bf16(OUTER_PART, kernels->panel, (depth + 1) / 2, s->a, 1, OUTER_PART, s->b,
                         kernels->panel, c, kernels->panel, accumulate);
    else
        kernels->mm_f32(OUTER_PART, kernels->panel, depth, s->a, 1, OUTER_PART, s->b, kernels->panel, c,
                        kernels->panel, accumulate);
}

static void outer_task(void *arg, int64_t index, int32_t thread)
{
    const outer_job *job = arg;
    const grouped_outer_args *args = job->args;
    const attention_kernels *kernels = job->kernels;
    outer_scratch *s = &job->scratch[thread];
    const int64_t panel = kernels->panel, column = index % job->panels * panel,
                  n0 = index / job->panels % job->blocks * OUTER_ROWS,
                  expert = index / job->panels / job->blocks;
    const int64_t columns = job->k - column < panel ? job->k - column : panel,
                  n = job->n - n0 < OUTER_ROWS ? job->n - n0 : OUTER_ROWS;
    const int64_t first = expert > 0 ? job->ends[expert - 1] : 0, end = job->ends[expert];
    for (int64_t row = first; row < end; row += OUTER_DEPTH) {
        const int64_t depth = end - row < OUTER_DEPTH ? end - row : OUTER_DEPTH;
        const row_source b = columns_of(&args->b, row, depth, column, columns);
        if (job->pairs) kernels->pack_values_bf16(&b, (int32_t)panel, (uint32_t *)(void *)s->b, 0);
        else kernels->pack_rows_f32(&b, 1.0f, s->b, panel);
        for (int64_t part = 0; part < n; part += OUTER_PART) {
            pack_a(job, s, row, depth, n0 + part, n - part < OUTER_PART ? n - part : OUTER_PART);
            multiply(job, s, depth, s->c + part * panel, row > first);
        }
    }
    for (int64_t i = 0; first == end && i < n * panel; i++) s->c[i] = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = expert * args->c.strides[0] + (n0 + i) * args->c.strides[1] + column;
        kernels->rows->convert(s->c + i * panel, QUERN_F32,
                               (char *)args->c.data + at * (int64_t)quern_dtype_size(args->c.dtype),
                               args->c.dtype, columns);
    }
}

quern_status cpu_grouped_outer(const stage_exec *exec, const grouped_outer_args *args, void *workspace)
{
    const attention_kernels *kernels = cpu_kernels_for(exec->cpu_level)->attention;
    const int64_t rows = args->a.shape[0], tokens = args->weights.ndim > 0 ? args->weights.shape[0] : rows;
    outer_job job = {.args = args,
                     .kernels = kernels,
                     .pairs = args->a.dtype == QUERN_BF16 && args->b.dtype == QUERN_BF16 &&
                              kernels->mm_bf16 != NULL,
                     .n = args->c.shape[1],
                     .k = args->c.shape[2],
                     .per = tokens > 0 ? rows / tokens : 1,
                     .all = (int32_t)rows,
                     .scratch = workspace};
    job.blocks = (job.n + OUTER_ROWS - 1) / OUTER_ROWS;
    job.panels = (job.k + kernels->panel - 1) / kernels->panel;
    job.ends = args->offsets.ndim > 0 ? args->offsets.data : &job.all;
    parallel_for(exec, args->c.shape[0] * job.blocks * job.panels, outer_task, &job);
    return QUERN_OK;
}
