/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_grouped_gemm.c - the grouped product. A task is one or a few panels of 64 columns and up to
 * PRODUCT_ROWS rows of one expert: it decodes a few units of the panel into a cache and multiplies all its
 * rows by them, until K ends. Few rows skip the buffer and take the values from registers. Every row's sums
 * take the same steps in either case (units of K summed from zero, then added), so a row's bits depend on
 * nothing but the row; tasks are cut by shape, not by threads.
 *
 * bf16 activations at the level with bf16 dot products: code * scale is exact in bf16. Else f32. NVFP4 or
 * int8 activations: integers within a block of 16, f32 across. e4m3 (fp8.c): f32 products of rounded
 * operands.
 *
 * Limit: with few rows, reading the weights; with many, the dot product.
 */
#include "core/error.h"
#include "core/parallel.h"
#include "cpu/gemm4/product.h"
#include "cpu/gemm4/stages.h"
#include "cpu/kernels/formats/contents.h"

#include <string.h>

enum { FIRST_UNITS = 8 };

static product_job plan(const stage_exec *exec, const grouped_gemm_args *args)
{
    product_job job = product_plan(exec, args);
    job.kind = args->fp8 ? PRODUCT_FP8 : args->int8 || args->a_codes.ndim > 0 ? PRODUCT_I8 : PRODUCT_F32;
    if (job.kind == PRODUCT_F32 && args->a.dtype == QUERN_BF16 && job.kernels->decode_bf16 != NULL)
        job.kind = PRODUCT_BF16;
    return job;
}

/* int8, e4m3 and a quantised output cannot represent nonfinite values. */
static bool a_must_be_finite(const grouped_gemm_args *args)
{
    return args->a.ndim > 0 && (args->int8 || args->fp8 || args->c.ndim == 0);
}

static bool bias_must_be_finite(const grouped_gemm_args *args)
{
    return args->bias.ndim > 0 && args->c.ndim == 0;
}

static size_t magnitudes_bytes(const grouped_gemm_args *args)
{
    const size_t a = a_must_be_finite(args) ? row_magnitudes_bytes(&args->a) : 0,
                 bias = bias_must_be_finite(args) ? row_magnitudes_bytes(&args->bias) : 0;
    return a > bias ? a : bias;
}

static void carve(const stage_exec *exec, product_job *job, arena *a)
{
    const int64_t tokens = job->args->tokens, blocks = tokens * ready_row_bytes(job) / 16;
    job->a = arena_take(a, (size_t)(tokens * ready_row_bytes(job)));
    job->first_task = arena_take(a, (size_t)(job->experts + 1) * sizeof(int64_t));
    job->scratch = arena_take(a, (size_t)exec->threads * sizeof(product_scratch));
    if (job->kind == PRODUCT_I8) {
        job->a_scale = arena_take(a, (size_t)blocks * sizeof(float));
        job->start = arena_take(a, (size_t)blocks * sizeof(int32_t));
        job->row_global = arena_take(a, (size_t)tokens * sizeof(float));
    }
    if (job->kind == PRODUCT_FP8) {
        const int64_t groups = (job->units + PRODUCT_UNITS_FP8 - 1) / PRODUCT_UNITS_FP8;
        job->a_scale = arena_take(a, (size_t)(tokens * groups) * sizeof(float));
        job->column_power =
            arena_take(a, (size_t)(job->experts * panels_of(job->args->n) * GEMM4_PANEL) * sizeof(float));
    }
    if (job->kind != PRODUCT_I8) job->row_power = arena_take(a, (size_t)tokens * sizeof(float));
    if (job->kind == PRODUCT_F32 && job->args->a.dtype == QUERN_BF16)
        job->blocks = arena_take(a, (size_t)(tokens * job->units * GEMM4_BLOCKS) * sizeof(gemm4_a_block));
    job->magnitudes = arena_take(a, magnitudes_bytes(job->args));
}

size_t cpu_grouped_gemm_workspace(const stage_exec *exec, const grouped_gemm_args *args)
{
    product_job job = plan(exec, args);
    arena a = arena_on(NULL);
    carve(exec, &job, &a);
    return a.used;
}

/* A product takes its rows in blocks, and between them requests the units that come next: all at once the
 * requests would wait for one another, and the product for them. Returns the rows of the block at `row`. */
static int64_t next_block(const uint8_t *units, int64_t count, int64_t row, int64_t rows)
{
    const int64_t some = rows - row >= 20 ? 12 : rows - row, bytes = count * GEMM4_UNIT_BYTES,
                  lines = bytes / 64;
    for (int64_t line = lines * row / rows; line < lines * (row + some) / rows; line++)
        __builtin_prefetch(units + bytes + 64 * line, 0, 2);
    return some;
}

static void multiply_f32(const product_job *job, product_scratch *s, const uint8_t *units, int64_t first,
                         int64_t count, int64_t row, int64_t rows, float *sums)
{
    const int64_t k = ready_row_bytes(job) / 4;
    const float *a = (const float *)(const void *)job->a + row * k + first * GEMM4_UNIT;
    if (rows == 1 && job->blocks != NULL) {
        const gemm4_a_block *blocks = job->blocks + (row * job->units + first) * GEMM4_BLOCKS;
        job->kernels->row_blocks(units, count, a, blocks, sums, first > 0);
        return;
    }
    if (rows == 1) {
        job->kernels->row_f32(units, count, a, sums, first > 0);
        return;
    }
    job->kernels->decode_blocks(units, count, s->decoded, s->scales);
    gemm4_f32_tile t = {.blocks = count * GEMM4_BLOCKS,
                        .a = a,
                        .lda = k,
                        .codes = s->decoded,
                        .scales = s->scales,
                        .c = sums,
                        .accumulate = first > 0};
    for (int64_t r = 0; r < rows; r += t.rows) {
        t.rows = next_block(units, count, r, rows);
        job->kernels->mm_blocks(&t);
        t.a += t.rows * k;
        t.c += t.rows * GEMM4_PANEL;
    }
}

static void multiply_bf16(const product_job *job, product_scratch *s, const uint8_t *units, int64_t first,
                          int64_t count, int64_t row, int64_t rows, float *sums)
{
    const int64_t words = ready_row_bytes(job) / 4;
    const uint32_t *a = (const uint32_t *)(const void *)job->a + row * words + first * GEMM4_UNIT / 2;
    uint32_t *decoded = (uint32_t *)(void *)s->decoded;
    if (rows <= GEMM4_FEW_ROWS) {
        job->kernels->rows_bf16(units, count, rows, a, words, sums, first > 0);
        return;
    }
    job->kernels->decode_bf16(units, count, decoded);
    for (int64_t r = 0, some; r < rows; r += some) {
        some = next_block(units, count, r, rows);
        job->dense->mm_bf16(some, GEMM4_PANEL, count * GEMM4_UNIT / 2, a + r * words, words, 1, decoded,
                            GEMM4_PANEL, sums + r * GEMM4_PANEL, GEMM4_PANEL, first > 0);
    }
}

static void multiply_i8(const product_job *job, product_scratch *s, const uint8_t *units, int64_t first,
                        int64_t count, int64_t row, int64_t rows, float *sums)
{
    const int64_t blocks = ready_row_bytes(job) / 16, at = row * blocks + first * GEMM4_BLOCKS;
    uint32_t *decoded = (uint32_t *)(void *)s->decoded;
    job->kernels->decode_i8(units, count, decoded, s->scales);
    gemm4_i8_tile t = {.blocks = count * GEMM4_BLOCKS,
                       .a = (const uint32_t *)(const void *)job->a + 4 * at,
                       .a_scale = job->a_scale + at,
                       .start = job->start + at,
                       .lda = blocks,
                       .b = decoded,
                       .b_scale = s->scales,
                       .c = sums,
                       .accumulate = first > 0};
    for (int64_t r = 0; r < rows; r += t.rows) {
        t.rows = next_block(units, count, r, rows);
        job->kernels->mm_i8(&t);
        t.a += 4 * t.rows * blocks;
        t.a_scale += t.rows * blocks;
        t.start += t.rows * blocks;
        t.c += t.rows * GEMM4_PANEL;
    }
}

/* Panels of a task. Many rows share the reads of the rows. Few rows read their panels one after the other,
 * and the request for the units that come next reaches into the next panel; the threads need tasks enough. */
static int64_t panels_a_task(const stage_exec *exec, const product_job *job)
{
    int64_t experts = 0;
    if (job->args->tokens > 32 * job->experts) return PRODUCT_PANELS;
    for (int64_t e = 0; e < job->experts; e++) experts += job->ends[e] > (e > 0 ? job->ends[e - 1] : 0);
    const int64_t panels = experts * panels_of(job->args->n) / (16 * exec->threads);
    return panels < 1 ? 1 : panels < PRODUCT_PANELS ? panels : PRODUCT_PANELS;
}

static int64_t tasks_across(const product_job *job)
{
    return (panels_of(job->args->n) + job->panels - 1) / job->panels;
}

/* A few units of K, times a task's rows. */
static void multiply_units(const product_job *job, product_scratch *s, int64_t expert, int64_t panel,
                           int64_t first, int64_t count, int64_t row, int64_t rows, float *sums)
{
    const uint8_t *units = product_units(job, s, expert, panel, first, count);
    if (job->kind == PRODUCT_BF16) multiply_bf16(job, s, units, first, count, row, rows, sums);
    else if (job->kind == PRODUCT_F32) multiply_f32(job, s, units, first, count, row, rows, sums);
    else if (job->kind == PRODUCT_FP8)
        fp8_multiply(job, s, units, first, count, expert, panel, row, rows, sums);
    else multiply_i8(job, s, units, first, count, row, rows, sums);
}

/* Units that are taken at once: as many as fit the buffers, and for one row in f32, whose sums do not depend
 * on it, all if they need no buffer. */
static int64_t units_at_once(const product_job *job, int64_t rows)
{
    static const int64_t most[] = {[PRODUCT_F32] = PRODUCT_UNITS_F32,
                                   [PRODUCT_BF16] = PRODUCT_UNITS_BF16,
                                   [PRODUCT_I8] = PRODUCT_UNITS_I8,
                                   [PRODUCT_FP8] = PRODUCT_UNITS_FP8};
    const bool all = job->kind == PRODUCT_F32 && rows == 1 && job->args->b_repacked.ndim > 0;
    return all ? job->units : most[job->kind];
}

/* All of K for panels [panel, panel + count). */
static void multiply_panels(const product_job *job, product_scratch *s, int64_t expert, int64_t panel,
                            int64_t count, int64_t row, int64_t rows,
                            float (*sums)[PRODUCT_ROWS * GEMM4_PANEL])
{
    const int64_t most = units_at_once(job, rows);
    for (int64_t u = 0; u < job->units; u += most) {
        const int64_t units = job->units - u < most ? job->units - u : most;
        for (int64_t p = 0; p < count; p++)
            multiply_units(job, s, expert, panel + p, u, units, row, rows, sums[p]);
    }
}

/* Requests what the kernels of few rows, which request the units that follow, would find missing. */
static void request_task(const product_job *job, int64_t index)
{
    const grouped_gemm_args *args = job->args;
    if (args->b_repacked.ndim == 0 || index >= job->first_task[job->experts]) return;
    const int64_t expert = product_expert(job, index), across = tasks_across(job),
                  panel = (index - job->first_task[expert]) % across * job->panels,
                  units = job->units < FIRST_UNITS ? job->units : FIRST_UNITS;
    const uint8_t *from = product_units(job, NULL, expert, panel, 0, units);
    for (int64_t at = 0; at < units * GEMM4_UNIT_BYTES; at += 64) __builtin_prefetch(from + at, 0, 2);
}

static void product_task(void *arg, int64_t index, int64_t next, int32_t thread)
{
    const product_job *job = arg;
    product_scratch *s = &job->scratch[thread];
    const int64_t expert = product_expert(job, index), task = index - job->first_task[expert];
    const int64_t across = tasks_across(job), first = task % across * job->panels,
                  all = panels_of(job->args->n);
    const int64_t panels = all - first < job->panels ? all - first : job->panels;
    const int64_t begin = (expert > 0 ? job->ends[expert - 1] : 0) + task / across * PRODUCT_ROWS;
    const int64_t left = job->ends[expert] - begin, rows = left < PRODUCT_ROWS ? left : PRODUCT_ROWS;
    const int64_t together = rows <= GEMM4_FEW_ROWS ? 1 : panels;
    for (int64_t p = 0; p < panels; p += together) {
        if (p + together >= panels && rows <= GEMM4_FEW_ROWS) request_task(job, next);
        multiply_panels(job, s, expert, first + p, together, begin, rows, &s->c[p]);
    }
    for (int64_t p = 0; p < panels; p++) {
        if (job->units == 0) memset(s->c[p], 0, (size_t)rows * GEMM4_PANEL * sizeof *s->c[p]);
        if (job->kind == PRODUCT_FP8) fp8_scale_columns(job, expert, first + p, rows, s->c[p]);
        finish_rows(job, s, s->c[p], expert, begin, rows, first + p);
    }
}

/* Checks the tensors' contents before anything is written. */
static quern_status check(const stage_exec *exec, const product_job *job, int64_t rows)
{
    const grouped_gemm_args *args = job->args;
    quern_status status = QUERN_OK;
    if (args->b_repacked.ndim == 0)
        status = check_scale_bytes(exec, &args->b_scales, view_rows(&args->b_scales));
    if (status == QUERN_OK && args->a_scales.ndim > 0)
        status = check_scale_bytes(exec, &args->a_scales,
                                   args->pad_row_offsets.ndim > 0 ? view_rows(&args->a_scales) : rows);
    row_magnitudes m = {.bits = job->magnitudes};
    if (status == QUERN_OK && a_must_be_finite(args)) status = row_magnitudes_of(exec, &args->a, rows, &m);
    if (status == QUERN_OK && bias_must_be_finite(args))
        status = row_magnitudes_of(exec, &args->bias, view_rows(&args->bias), &m);
    return status;
}

quern_status cpu_grouped_gemm(const stage_exec *exec, const grouped_gemm_args *args, void *workspace)
{
    product_job job = plan(exec, args);
    arena a = arena_on(workspace);
    carve(exec, &job, &a);
    quern_status status = product_check_data(exec, args);
    if (status != QUERN_OK) return status;
    product_ends(&job);
    const int64_t rows = rows_with_expert(&args->offsets, args->tokens);
    if ((status = check(exec, &job, rows)) != QUERN_OK) return status;
    ready_rows(exec, &job, rows);
    if (job.kind == PRODUCT_FP8) fp8_powers(exec, &job);
    job.panels = panels_a_task(exec, &job);
    parallel_for_ahead(exec, product_tasks(&job, tasks_across(&job)), product_task, &job);
    zero_output(&job, rows);
    return QUERN_OK;
}
