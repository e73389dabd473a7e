/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_e4m3_gemm.c - products with e4m3 weights, by the micro-kernel of every other product.
 *
 * The sum is cut into runs of up to 128 elements that share a scale (32, with blocks of 32). A task is a
 * panel of columns and up to CHUNK rows: it decodes a run of its panel into L1 (32 KiB of floats, 16 of
 * bf16), multiplies all rows by it, and adds what comes out, times the columns' scales, to its tile of c in
 * L2 (128 KiB). a is packed once a chunk, a run of all rows after the other, so that a task reads it in one
 * stream. bf16 rows meet bf16 weights, which are exact, where the level has the dot product; others are
 * floats. The cuts depend on the weight's shape alone, so a row's bits do not depend on the other rows.
 *
 * Limits: the dot product; with one row, whose panel is one call, reading the weights. The rows of a panel
 * are as many streams as it has columns, and memory gives these two thirds of what it gives one: so the panel
 * that a thread takes next is prefetched row after row.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/e4m3/e4m3_kernels.h"
#include "cpu/e4m3/scales.h"
#include "cpu/e4m3/stages.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/levels.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

enum { RUN = E4M3_GROUP, CHUNK = 512, PANEL_MOST = 64, AHEAD = 256, FIRST = 1024 };

typedef struct e4m3_scratch {
    float c[CHUNK * PANEL_MOST], panel[RUN * PANEL_MOST], widened[RUN * PANEL_MOST];
    float scales[PANEL_MOST], bias[PANEL_MOST];
} e4m3_scratch;

typedef struct e4m3_job {
    const e4m3_gemm_args *args;
    const attention_kernels *dense;
    const e4m3_kernels *kernels;
    const format_kernels *widen;
    bool pairs; /* bf16 products */
    int32_t threads;
    int64_t in, out;       /* of a group: the length of the sum, and columns of c */
    int64_t run, runs;     /* most elements of a run; runs of a group, of which the last may be empty */
    int64_t panels;        /* of a group */
    int64_t columns;       /* of a task with one row */
    int64_t row, rows;     /* the chunk */
    char *packed;          /* [groups][runs][rows][run] */
    e4m3_scratch *scratch; /* [threads] */
} e4m3_job;

static e4m3_job carve(const stage_exec *exec, const e4m3_gemm_args *args, arena *a)
{
    e4m3_job job = {.args = args,
                    .dense = cpu_kernels_for(exec->cpu_level)->attention,
                    .kernels = cpu_kernels_for(exec->cpu_level)->e4m3,
                    .widen = cpu_kernels_for(exec->cpu_level)->formats,
                    .threads = exec->threads};
    const int64_t n = args->codes.shape[0] / args->groups, k = args->codes.shape[1],
                  block = args->rows ? args->block_rows : args->block_columns;
    job.in = args->rows ? n : k;
    job.out = args->rows ? k : n;
    job.run = block < RUN ? block : RUN;
    /* A group of rows may begin within a run. */
    job.runs = (job.in + job.run - 1) / job.run + (args->rows && args->groups > 1 && n % job.run != 0);
    job.panels = (job.out + job.dense->panel - 1) / job.dense->panel;
    job.pairs = args->a.dtype == QUERN_BF16 && job.dense->mm_scaled_bf16 != NULL && job.in % 2 == 0 &&
                job.run % 2 == 0;
    job.columns = job.pairs ? job.dense->panel : ROW_F32_COLUMNS;
    job.rows = args->c.shape[0] < CHUNK ? args->c.shape[0] : CHUNK;
    job.packed = arena_take(a, (size_t)(args->groups * job.runs * job.rows * job.run) *
                                   (job.pairs ? sizeof(uint16_t) : sizeof(float)));
    job.scratch = arena_take(a, (size_t)exec->threads * sizeof *job.scratch);
    return job;
}

size_t cpu_e4m3_gemm_workspace(const stage_exec *exec, const e4m3_gemm_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

/* Elements [first, first + depth) of a group's sum; depth may be 0. */
typedef struct e4m3_run {
    int64_t first, depth;
} e4m3_run;

static e4m3_run run_at(const e4m3_job *job, int64_t group, int64_t index)
{
    const int64_t before = job->args->rows ? group * job->in % job->run : 0, at = index * job->run - before,
                  first = at > 0 ? at : 0, end = at + job->run < job->in ? at + job->run : job->in;
    return (e4m3_run){first, end > first ? end - first : 0};
}

static char *packed_run(const e4m3_job *job, int64_t group, int64_t index)
{
    const int64_t element = job->pairs ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
    return job->packed + (group * job->runs + index) * job->rows * job->run * element;
}

/* Packs a run of the chunk's rows. */
static void pack_run(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const e4m3_job *job = arg;
    const quern_tensor *a = &job->args->a;
    const int64_t group = index / job->runs;
    const e4m3_run run = run_at(job, group, index % job->runs);
    const int64_t at = job->row * a->strides[0] + group * job->in + run.first;
    const row_source src = {(const char *)a->data + at * (int64_t)quern_dtype_size(a->dtype), a->dtype,
                            a->strides[0], job->rows, run.depth};
    void *to = packed_run(job, group, index % job->runs);
    if (run.depth == 0) return;
    if (job->pairs) job->dense->pack_rows_bf16(&src, to, job->run);
    else job->dense->pack_rows_f32(&src, 1.0f, to, job->run);
}

/* The scales of `n` columns of c from `column` on, in a run; 0 in the others of `width`. */
static void fill_scales(const e4m3_job *job, int64_t group, int64_t first, int64_t column, int64_t n,
                        int64_t width, float *scales)
{
    const e4m3_gemm_args *args = job->args;
    const int64_t block = args->rows ? args->block_columns : args->block_rows,
                  along =
                      args->rows ? (group * job->in + first) / args->block_rows : first / args->block_columns,
                  at = args->rows ? column : group * job->out + column;
    for (int64_t j = 0; j < n;) {
        const int64_t across = (at + j) / block, left = block - (at + j) % block,
                      end = n - j < left ? n : j + left;
        const float scale = args->rows ? e4m3_scale_at(&args->scales, along, across)
                                       : e4m3_scale_at(&args->scales, across, along);
        for (; j < end; j++) scales[j] = scale;
    }
    for (int64_t j = n; j < width; j++) scales[j] = 0.0f;
}

/* The codes of a run of rows of W, which become columns. */
static e4m3_rows rows_of_run(const e4m3_job *job, int64_t group, e4m3_run run, int64_t column, int64_t n)
{
    const quern_tensor *codes = &job->args->codes;
    const int64_t stride = codes->strides[0], left = job->in - run.first;
    return (e4m3_rows){
        .codes = (const uint8_t *)codes->data + (group * job->out + column) * stride + run.first,
        .stride = stride,
        .rows = n,
        .depth = run.depth,
        .ahead = left > AHEAD || column + n == job->out ? AHEAD : AHEAD - job->in + n * stride};
}

/* The weights of a run: rows of W become columns. */
static void decode_across(const e4m3_job *job, int64_t group, e4m3_run run, int64_t column, int64_t n,
                          float *panel)
{
    const e4m3_rows rows = rows_of_run(job, group, run, column, n);
    if (job->pairs) job->kernels->panel_bf16(&rows, job->dense->panel, (uint32_t *)(void *)panel);
    else job->kernels->panel_f32(&rows, job->dense->panel, panel);
}

/* The same where rows of W are the rows of the panel. For pairs a row is widened in the second half of
 * `widened` and stands in bf16, which is exact, in the first. */
static void decode_rows(const e4m3_job *job, int64_t group, e4m3_run run, int64_t column, int64_t n,
                        float *widened, float *panel)
{
    const quern_tensor *codes = &job->args->codes;
    const int64_t width = job->dense->panel;
    uint16_t *words = (uint16_t *)(void *)widened;
    for (int64_t r = 0; r < run.depth; r++) {
        const int64_t row = group * job->in + run.first + r;
        float *to = job->pairs ? widened + width * RUN / 2 : panel + r * width;
        job->widen->widen_e4m3((const uint8_t *)codes->data + row * codes->strides[0] + column, n, to);
        for (int64_t j = n; j < width; j++) to[j] = 0.0f;
        if (job->pairs) job->dense->rows->convert(to, QUERN_F32, words + r * width, QUERN_BF16, width);
    }
    const row_source src = {words, QUERN_BF16, width, run.depth, width};
    if (job->pairs)
        job->dense->pack_values_bf16(&src, (int32_t)width, (uint32_t *)(void *)panel, width * RUN / 2);
}

static void store(const e4m3_job *job, e4m3_scratch *s, int64_t column, int64_t n)
{
    const e4m3_gemm_args *args = job->args;
    const row_kernels *rows = job->dense->rows;
    const int64_t size = (int64_t)quern_dtype_size(args->c.dtype);
    const bool bias = is_present(&args->bias);
    const float global = is_present(&args->global) ? *(const float *)args->global.data : 1.0f;
    if (bias)
        rows->convert((const char *)args->bias.data + column * (int64_t)quern_dtype_size(args->bias.dtype),
                      args->bias.dtype, s->bias, QUERN_F32, n);
    for (int64_t r = 0; r < job->rows; r++) {
        float *sums = s->c + r * job->dense->panel;
        if (is_present(&args->global))
            for (int64_t j = 0; j < n; j++) sums[j] *= global;
        if (bias)
            for (int64_t j = 0; j < n; j++) sums[j] += s->bias[j];
        rows->convert(sums, QUERN_F32,
                      (char *)args->c.data + ((job->row + r) * args->c.strides[0] + column) * size,
                      args->c.dtype, n);
    }
}

static void multiply_panel(void *arg, int64_t index, int32_t thread)
{
    const e4m3_job *job = arg;
    e4m3_scratch *s = &job->scratch[thread];
    const int64_t group = index / job->panels, panel = job->dense->panel,
                  column = index % job->panels * panel,
                  n = job->out - column < panel ? job->out - column : panel;
    if (job->in == 0) memset(s->c, 0, sizeof s->c);
    for (int64_t i = 0; i < job->runs; i++) {
        const e4m3_run run = run_at(job, group, i);
        const void *a = packed_run(job, group, i);
        if (run.depth == 0) continue;
        fill_scales(job, group, run.first, column, n, panel, s->scales);
        if (job->args->rows) decode_rows(job, group, run, column, n, s->widened, s->panel);
        else decode_across(job, group, run, column, n, s->panel);
        mm_scaled_kernel *mm = job->pairs ? job->dense->mm_scaled_bf16 : job->dense->mm_scaled_f32;
        mm(job->rows, round_up16(n), job->pairs ? run.depth / 2 : run.depth, a,
           job->pairs ? job->run / 2 : job->run, 1, s->panel, panel, s->scales, s->c, panel, run.first > 0);
    }
    store(job, s, group * job->out + column, n);
}

/* ---- one row ---- */

/* Whether one row is multiplied without panels of values, run by run as they stand. */
static bool is_direct(const e4m3_job *job)
{
    const bool fits = job->pairs || job->run % 16 == 0 || job->runs == 1;
    return fits && job->rows == 1 && !job->args->rows && job->in > 0;
}

static int64_t panels_of_row(const e4m3_job *job)
{
    return (job->out + job->columns - 1) / job->columns;
}

/* The panel's codes; `most` of each row at first. */
static e4m3_rows rows_of_panel(const e4m3_job *job, int64_t index, int64_t most)
{
    const int64_t panels = panels_of_row(job), column = index % panels * job->columns,
                  left = job->out - column, stride = job->args->codes.strides[0];
    const uint8_t *codes = job->args->codes.data;
    return (e4m3_rows){.codes = codes + (index / panels * job->out + column) * stride,
                       .stride = stride,
                       .rows = left < job->columns ? left : job->columns,
                       .depth = job->in < most ? job->in : most};
}

/* Nobody asks for the codes of a thread's first panel in time but this. */
static void request_first(const e4m3_rows *rows)
{
    const int64_t bytes = rows->depth < FIRST ? rows->depth : FIRST;
    for (int64_t j = 0; j < rows->rows; j++)
        for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(rows->codes + j * rows->stride + k, 0, 2);
}

/* The panel of a task. Threads that take turns read shares of the panels that lie apart: beside each other
 * they would get three quarters of the bandwidth, since what is read ahead of one is the other's. */
static int64_t panel_of_task(const e4m3_job *job, int64_t task)
{
    return parallel_in_runs(job->args->groups * panels_of_row(job), job->threads, task);
}

/* The runs in one call, or as many as s->panel has room for scales of. */
static void multiply_row(void *arg, int64_t task, int64_t next, int32_t thread)
{
    const e4m3_job *job = arg;
    const int64_t index = panel_of_task(job, task);
    e4m3_scratch *s = &job->scratch[thread];
    const int64_t columns = job->columns, most = RUN * PANEL_MOST / columns * job->run,
                  panels = panels_of_row(job), group = index / panels, column = index % panels * columns;
    const e4m3_rows first = rows_of_panel(job, index, most);
    const bool last = next == job->args->groups * panels;
    if (task < job->threads) request_first(&first);
    for (int64_t k = 0; k < job->in; k += most) {
        e4m3_rows rows = first;
        rows.codes += k;
        rows.depth = job->in - k < most ? job->in - k : most;
        rows.cold = k == 0 && task < job->threads;
        if (k + most < job->in) rows.ahead = most;
        else if (!last) rows.ahead = rows_of_panel(job, panel_of_task(job, next), most).codes - rows.codes;
        for (int64_t at = 0; at < rows.depth; at += job->run)
            fill_scales(job, group, k + at, column, rows.rows, columns, s->panel + at / job->run * columns);
        const void *values = packed_run(job, group, k / job->run);
        if (job->pairs) job->kernels->row_bf16(&rows, job->run, values, s->panel, s->c, k > 0);
        else job->kernels->row_f32(&rows, job->run, values, s->panel, s->c, k > 0);
    }
    store(job, s, group * job->out + column, first.rows);
}

quern_status cpu_e4m3_gemm(const stage_exec *exec, const e4m3_gemm_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    e4m3_job job = carve(exec, args, &a);
    const int64_t tokens = args->c.shape[0];
    quern_status status = e4m3_check_scales(exec, args);
    if (status == QUERN_OK) status = check_global_scales(exec, &args->global);
    for (job.row = 0; status == QUERN_OK && job.row < tokens; job.row += CHUNK) {
        job.rows = tokens - job.row < CHUNK ? tokens - job.row : CHUNK;
        if (is_direct(&job)) {
            for (int64_t i = 0; i < args->groups * job.runs; i++) pack_run(&job, i, 0);
            parallel_for_ahead(exec, args->groups * panels_of_row(&job), multiply_row, &job);
            continue;
        }
        parallel_for(exec, args->groups * job.runs, pack_run, &job);
        parallel_for(exec, args->groups * job.panels, multiply_panel, &job);
    }
    return status;
}

void cpu_e4m3_gemm_kernel(const stage_exec *exec, const e4m3_gemm_args *args, char text[STAGE_NAME_BYTES])
{
    arena a = {NULL, 0};
    cpu_name_kernels(text, "e4m3_gemm", carve(exec, args, &a).pairs, exec->cpu_level);
}
