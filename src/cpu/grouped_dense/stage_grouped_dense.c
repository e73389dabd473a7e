/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_grouped_dense.c - the grouped product with matrices of floats. A task is up to DENSE_ROWS rows of one
 * expert and up to DENSE_WIDE panels of columns; both operands are packed into a thread's own memory
 * DENSE_DEPTH of K at a time, the rows once for all panels. A row's sums are cut by K alone, so its bits do
 * not depend on the other rows. If both operands are bf16 and the level has the dot product, they are
 * multiplied as bf16; else both are widened to f32. Few rows
 * of bf16 read weights [N, K] in place, since packing them would cost more than their products; the bits are
 * the same. Limit: the dot product; with few rows, reading the weights.
 */
#include "cpu/grouped_dense/stages.h"

#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/levels.h"

#include <string.h>

enum {
    DENSE_ROWS = 256,
    DENSE_DEPTH = ACROSS_DEPTH,
    DENSE_PANEL = 64, /* no level's panel is wider */
    DENSE_WIDE = 4,   /* so that a task's sums and rows stay in L2 */
    TASKS_A_THREAD = 8
};

typedef struct dense_scratch {
    float a[DENSE_ROWS * DENSE_DEPTH], b[DENSE_DEPTH * DENSE_PANEL], c[DENSE_WIDE][DENSE_ROWS * DENSE_PANEL];
    float bias[DENSE_PANEL];
} dense_scratch;

typedef struct dense_job {
    const grouped_dense_args *args;
    const attention_kernels *kernels;
    bool pairs; /* of bf16 */
    int64_t n, k, experts, panels;
    int64_t wide, tasks_a_block; /* panels of a task, and tasks of DENSE_ROWS rows */
    const int32_t *ends;
    int32_t all;            /* without offsets, the only expert's end */
    int64_t *first_task;    /* [experts + 1] */
    dense_scratch *scratch; /* [threads] */
} dense_job;

static dense_job plan(const stage_exec *exec, const grouped_dense_args *args)
{
    dense_job job = {.args = args,
                     .kernels = cpu_kernels_for(exec->cpu_level)->attention,
                     .n = args->c.shape[1],
                     .k = args->a.shape[1],
                     .experts = args->offsets.ndim > 0 ? args->offsets.shape[0] : 1,
                     .all = (int32_t)args->a.shape[0]};
    job.pairs = args->a.dtype == QUERN_BF16 && args->b.dtype == QUERN_BF16 && job.kernels->mm_bf16 != NULL &&
                job.k % 2 == 0;
    job.panels = (job.n + job.kernels->panel - 1) / job.kernels->panel;
    return job;
}

static void carve(const stage_exec *exec, dense_job *job, arena *a)
{
    job->first_task = arena_take(a, (size_t)(job->experts + 1) * sizeof *job->first_task);
    job->scratch = arena_take(a, (size_t)exec->threads * sizeof *job->scratch);
}

size_t cpu_grouped_dense_workspace(const stage_exec *exec, const grouped_dense_args *args)
{
    dense_job job = plan(exec, args);
    arena a = arena_on(NULL);
    carve(exec, &job, &a);
    return a.used;
}

/* Rows and columns of a view whose rows are `stride` elements apart. */
static row_source block_of(const quern_tensor *t, int64_t at, int64_t stride, int64_t rows, int64_t columns)
{
    return (row_source){(const char *)t->data + at * (int64_t)quern_dtype_size(t->dtype), t->dtype, stride,
                        rows, columns};
}

/* Rows [k, k + depth) of B, columns [column, column + n), as the kernels' operand. */
static void pack_b(const dense_job *job, dense_scratch *s, int64_t expert, int64_t k, int64_t depth,
                   int64_t column, int64_t n)
{
    const attention_kernels *kernels = job->kernels;
    const quern_tensor *b = &job->args->b;
    const int64_t from = expert * b->strides[0], stride = b->strides[1];
    const int32_t panel = kernels->panel;
    if (job->args->b_transposed) {
        const row_source src = block_of(b, from + column * stride + k, stride, n, depth);
        if (job->pairs) kernels->pack_keys_bf16(&src, panel, (uint32_t *)(void *)s->b);
        else kernels->pack_keys_f32(&src, panel, s->b);
        return;
    }
    const row_source src = block_of(b, from + k * stride + column, stride, depth, n);
    if (job->pairs) kernels->pack_values_bf16(&src, panel, (uint32_t *)(void *)s->b, 0);
    else kernels->pack_rows_f32(&src, 1.0f, s->b, panel);
}

/* Packs rows of a, columns [k, k + depth). */
static void pack_a(const dense_job *job, dense_scratch *s, int64_t row, int64_t rows, int64_t k,
                   int64_t depth)
{
    const quern_tensor *a = &job->args->a;
    const row_source src = block_of(a, row * a->strides[0] + k, a->strides[0], rows, depth);
    if (job->pairs) job->kernels->pack_rows_bf16(&src, (uint16_t *)(void *)s->a, depth);
    else job->kernels->pack_rows_f32(&src, 1.0f, s->a, depth);
}

static void multiply(const dense_job *job, dense_scratch *s, int64_t rows, int64_t depth, float *c,
                     bool accumulate)
{
    const attention_kernels *kernels = job->kernels;
    const int32_t panel = kernels->panel;
    if (job->pairs)
        kernels->mm_weights_bf16(rows, panel, depth / 2, s->a, depth / 2, 1, s->b, panel, c, panel,
                                 accumulate);
    else kernels->mm_f32(rows, panel, depth, s->a, depth, 1, s->b, panel, c, panel, accumulate);
}

/* Up to DENSE_ROWS rows of an expert, and columns that they meet. */
typedef struct dense_tile {
    int64_t expert, row, rows, column, columns;
} dense_tile;

static int64_t columns_of(const dense_job *job, const dense_tile *t, int64_t at)
{
    const int64_t panel = job->kernels->panel;
    return t->columns - at < panel ? t->columns - at : panel;
}

static void multiply_across(const dense_job *job, dense_scratch *s, const dense_tile *t)
{
    const quern_tensor *a = &job->args->a, *b = &job->args->b;
    const int64_t panel = job->kernels->panel;
    for (int64_t at = 0; at < t->columns; at += panel) {
        const int64_t from = t->expert * b->strides[0] + (t->column + at) * b->strides[1];
        const row_source src = block_of(b, from, b->strides[1], columns_of(job, t, at), job->k);
        job->kernels->across_weights_bf16(t->rows, view_row(a, t->row), a->strides[0], &src, s->c[at / panel],
                                          panel);
    }
}

static void multiply_packed(const dense_job *job, dense_scratch *s, const dense_tile *t)
{
    const int64_t panel = job->kernels->panel;
    for (int64_t k = 0; k < job->k; k += DENSE_DEPTH) {
        const int64_t depth = job->k - k < DENSE_DEPTH ? job->k - k : DENSE_DEPTH;
        pack_a(job, s, t->row, t->rows, k, depth);
        for (int64_t at = 0; at < t->columns; at += panel) {
            pack_b(job, s, t->expert, k, depth, t->column + at, columns_of(job, t, at));
            multiply(job, s, t->rows, depth, s->c[at / panel], k > 0);
        }
    }
    for (int64_t at = 0; job->k == 0 && at < t->columns; at += panel)
        memset(s->c[at / panel], 0, (size_t)(t->rows * panel) * sizeof(float));
}

/* Rounds and stores a panel's sums. */
static void finish(const dense_job *job, dense_scratch *s, const dense_tile *t, int64_t at)
{
    const grouped_dense_args *args = job->args;
    const row_kernels *kernels = job->kernels->rows;
    const int64_t column = t->column + at, n = columns_of(job, t, at);
    float *sums = s->c[at / job->kernels->panel];
    if (args->bias.ndim > 0)
        kernels->convert(view_at(&args->bias, t->expert, column), args->bias.dtype, s->bias, QUERN_F32, n);
    for (int64_t r = 0; r < t->rows; r++, sums += job->kernels->panel) {
        for (int64_t c = 0; args->bias.ndim > 0 && c < n; c++) sums[c] += s->bias[c];
        void *to = view_at(&args->c, t->row + r, column);
        const float *old = to;
        for (int64_t c = 0; args->accumulate && c < n; c++) sums[c] += old[c];
        kernels->convert(sums, QUERN_F32, to, args->c.dtype, n);
    }
}

/* The last expert whose first task is at most the index; it has tasks. */
static int64_t expert_of_task(const dense_job *job, int64_t index)
{
    int64_t low = 0, high = job->experts;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (job->first_task[middle] <= index) low = middle;
        else high = middle;
    }
    return low;
}

static void dense_task(void *arg, int64_t index, int32_t thread)
{
    const dense_job *job = arg;
    dense_scratch *s = &job->scratch[thread];
    const int64_t panel = job->kernels->panel, most = job->wide * panel;
    dense_tile t = {.expert = expert_of_task(job, index)};
    const int64_t task = index - job->first_task[t.expert];
    t.row = (t.expert > 0 ? job->ends[t.expert - 1] : 0) + task / job->tasks_a_block * DENSE_ROWS;
    t.rows = job->ends[t.expert] - t.row < DENSE_ROWS ? job->ends[t.expert] - t.row : DENSE_ROWS;
    t.column = task % job->tasks_a_block * most;
    t.columns = job->n - t.column < most ? job->n - t.column : most;
    if (job->pairs && job->args->b_transposed && t.rows <= ACROSS_ROWS) multiply_across(job, s, &t);
    else multiply_packed(job, s, &t);
    for (int64_t at = 0; at < t.columns; at += panel) finish(job, s, &t, at);
}

/* Cuts the work into tasks, of several panels where every thread has enough of these. */
static int64_t cut(dense_job *job, int32_t threads)
{
    int64_t blocks = 0;
    for (int64_t e = 0; e < job->experts; e++) {
        job->first_task[e] = blocks;
        blocks += (job->ends[e] - (e > 0 ? job->ends[e - 1] : 0) + DENSE_ROWS - 1) / DENSE_ROWS;
    }
    job->first_task[job->experts] = blocks;
    job->wide = blocks * job->panels >= (int64_t)DENSE_WIDE * TASKS_A_THREAD * threads ? DENSE_WIDE : 1;
    job->tasks_a_block = (job->panels + job->wide - 1) / job->wide;
    for (int64_t e = 0; e <= job->experts; e++) job->first_task[e] *= job->tasks_a_block;
    return job->first_task[job->experts];
}

quern_status cpu_grouped_dense(const stage_exec *exec, const grouped_dense_args *args, void *workspace)
{
    const quern_status status = check_ends(exec, &args->offsets, args->a.shape[0]);
    if (status != QUERN_OK) return status;
    dense_job job = plan(exec, args);
    arena a = arena_on(workspace);
    carve(exec, &job, &a);
    job.ends = args->offsets.ndim > 0 ? args->offsets.data : &job.all;
    parallel_for(exec, cut(&job, exec->threads), dense_task, &job);
    return QUERN_OK;
}
