/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.c - the gradient of the grouped product's A: d_a = (d_c G_B) B^T. A task is a unit of 64 of K and
 * up to PRODUCT_ROWS rows of one expert: it decodes that unit of some panels of N, turns each so that N runs
 * along its rows, and multiplies all its rows by them, until N ends. A row's sums are cut by N alone, so its
 * bits depend on nothing but the row.
 *
 * Where gate and up have globals of their own, d_c's columns are scaled by each one's ratio to the larger
 * before they are rounded to the product's dtype (a ratio of 1 changes nothing); the larger multiplies the
 * sums.
 *
 * Limit: the dot product.
 */
#include "core/parallel.h"
#include "cpu/gemm4/product.h"
#include "cpu/gemm4/stages.h"
#include "cpu/kernels/formats/globals.h"
#include "cpu/kernels/formats/contents.h"

#include <math.h>
#include <string.h>

/* The stride of the converted rows of d_c is no multiple of CACHE_WAY: such rows would share few sets of the
 * L1 cache. */
enum { ROWS_A_TASK = 8, CACHE_WAY = 4096 };

static product_job plan(const stage_exec *exec, const grouped_gemm_args *args)
{
    product_job job = product_plan(exec, args);
    job.kind = args->d_c.dtype == QUERN_BF16 && job.kernels->decode_bf16 != NULL ? PRODUCT_BF16 : PRODUCT_F32;
    return job;
}

static int64_t width_of(const product_job *job)
{
    return panels_of(job->args->n) * GEMM4_PANEL;
}

static size_t element_size(const product_job *job)
{
    return job->kind == PRODUCT_BF16 ? 2 : 4;
}

static int64_t row_bytes(const product_job *job)
{
    const int64_t bytes = width_of(job) * (int64_t)element_size(job);
    return bytes % CACHE_WAY > 0 ? bytes : bytes + CACHE_WAY / 8;
}

static void carve(const stage_exec *exec, product_job *job, arena *a)
{
    job->a = arena_take(a, (size_t)(job->args->tokens * row_bytes(job)));
    job->first_task = arena_take(a, (size_t)(job->experts + 1) * sizeof(int64_t));
    job->row_power = arena_take(a, (size_t)job->args->tokens * sizeof(float));
    job->scratch = arena_take(a, (size_t)exec->threads * sizeof(product_scratch));
}

size_t cpu_grouped_gemm_backward_workspace(const stage_exec *exec, const grouped_gemm_args *args)
{
    product_job job = plan(exec, args);
    arena a = arena_on(NULL);
    carve(exec, &job, &a);
    return a.used;
}

/* The global of gate's (or up's) columns of an expert. */
static float global_of(const product_job *job, int64_t expert, int64_t part)
{
    const quern_tensor *g = &job->args->b_global;
    if (g->ndim == 0) return 1.0f;
    const int64_t row = g->shape[0] > 1 ? expert * g->strides[0] : 0;
    return ((const float *)g->data)[row + (g->shape[1] == 2 ? part : 0)];
}

static float larger_global(const product_job *job, int64_t expert)
{
    return fmaxf(global_of(job, expert, 0), global_of(job, expert, 1));
}

static int64_t expert_at(const product_job *job, int64_t row)
{
    return job->args->offsets.ndim > 0 ? expert_of_row(&job->args->offsets, row) : 0;
}

/* Converts a row of d_c to the product's dtype, padded with zeros to whole panels. */
static void ready_row(const product_job *job, int64_t row, float *room)
{
    const grouped_gemm_args *args = job->args;
    const int64_t expert = expert_at(job, row), width = width_of(job), q = args->rule.granularity;
    const float larger = larger_global(job, expert);
    const float ratio[2] = {global_of(job, expert, 0) / larger, global_of(job, expert, 1) / larger};
    char *out = job->a + row * row_bytes(job);
    const row_source whole = {view_row(&args->d_c, row), args->d_c.dtype, 0, 1, args->n};
    const float power = row_power_of(job, job->dense->rows->magnitude(whole.data, whole.dtype, whole.dim));
    job->row_power[row] = power;
    if (ratio[0] == 1.0f && ratio[1] == 1.0f) {
        if (job->kind == PRODUCT_BF16) pack_words(job, &whole, power, width, (uint16_t *)(void *)out);
        else job->dense->pack_rows_f32(&whole, power, (float *)(void *)out, width);
        return;
    }
    for (int64_t c = 0; c < width; c += GEMM4_PANEL) {
        const int64_t n = args->n - c < GEMM4_PANEL ? args->n - c : GEMM4_PANEL;
        for (int64_t i = 0; i < GEMM4_PANEL; i++)
            room[i] =
                i < n ? element_of(whole.data, whole.dtype, c + i) * power * ratio[(c + i) / q % 2] : 0.0f;
        job->dense->rows->convert(room, QUERN_F32, out + c * (int64_t)element_size(job),
                                  job->kind == PRODUCT_BF16 ? QUERN_BF16 : QUERN_F32, GEMM4_PANEL);
    }
}

static void ready_task(void *arg, int64_t index, int32_t thread)
{
    const product_job *job = arg;
    const int64_t rows = rows_with_expert(&job->args->offsets, job->args->tokens),
                  first = index * ROWS_A_TASK;
    const int64_t end = first + ROWS_A_TASK < rows ? first + ROWS_A_TASK : rows;
    for (int64_t row = first; row < end; row++) ready_row(job, row, job->scratch[thread].row);
}

/* Requests unit u of the panels that the next call decodes: each lies a panel's K away. */
static void request_panels(const product_job *job, const uint8_t *unit, int64_t count)
{
    const uint8_t *next = unit + count * job->units * GEMM4_UNIT_BYTES;
    if (job->args->b_repacked.ndim == 0) return;
    for (int64_t line = 0; line < GEMM4_UNIT_BYTES; line += 64) __builtin_prefetch(next + line, 0, 2);
}

/* Decodes unit u of panels [panel, panel + count) into `turned`, N along the rows. */
static void turn_panels(const product_job *job, product_scratch *s, int64_t expert, int64_t u, int64_t panel,
                        int64_t count)
{
    const int32_t across = job->dense->panel;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *unit = product_units(job, s, expert, panel + i, u, 1);
        request_panels(job, unit, count);
        if (job->kind == PRODUCT_BF16) {
            uint32_t *words = (uint32_t *)(void *)s->decoded, *to = (uint32_t *)(void *)s->turned;
            job->kernels->decode_bf16(unit, 1, words);
            job->kernels->turn_bf16(words, to + i * GEMM4_PANEL / 2 * GEMM4_UNIT);
            continue;
        }
        job->kernels->decode_f32(unit, 1, s->decoded);
        for (int64_t k = 0; k < GEMM4_UNIT; k += across) {
            const row_source src = {s->decoded + k * GEMM4_PANEL, QUERN_F32, GEMM4_PANEL, across,
                                    GEMM4_PANEL};
            job->dense->pack_keys_f32(&src, across,
                                      s->turned + (k * PRODUCT_UNITS_F32 + i * across) * GEMM4_PANEL);
        }
    }
}

static void multiply(const product_job *job, product_scratch *s, int64_t row, int64_t rows, int64_t panel,
                     int64_t count)
{
    const int64_t across = job->dense->panel, depth = count * GEMM4_PANEL, words = row_bytes(job) / 4;
    const void *a = job->a + row * row_bytes(job) + panel * GEMM4_PANEL * (int64_t)element_size(job);
    if (job->kind == PRODUCT_BF16) {
        job->dense->mm_bf16(rows, GEMM4_UNIT, depth / 2, a, words, 1, s->turned, GEMM4_UNIT, s->c[0],
                            GEMM4_UNIT, panel > 0);
        return;
    }
    for (int64_t k = 0; k < GEMM4_UNIT; k += across)
        job->dense->mm_f32(rows, across, depth, a, words, 1, s->turned + k * PRODUCT_UNITS_F32 * GEMM4_PANEL,
                           across, s->c[0] + k, GEMM4_UNIT, panel > 0);
}

static void store_rows(const product_job *job, product_scratch *s, int64_t expert, int64_t row, int64_t rows,
                       int64_t u)
{
    const grouped_gemm_args *args = job->args;
    const int64_t left = args->k - u * GEMM4_UNIT, n = left < GEMM4_UNIT ? left : GEMM4_UNIT;
    for (int64_t r = 0; r < rows; r++) {
        const float given =
            args->a_global.ndim > 0 ? global_at(&args->a_global, args->a_per, row + r, expert) : 1.0f;
        const float global = given * larger_global(job, expert);
        float *sums = s->c[0] + r * GEMM4_UNIT;
        const float power = job->row_power[row + r];
        for (int64_t c = 0; c < n; c++)
            sums[c] = power == 1.0f ? sums[c] * global : without_power(sums[c], power, global);
        job->dense->rows->convert(sums, QUERN_F32, view_at(&args->d_a, row + r, u * GEMM4_UNIT),
                                  args->d_a.dtype, n);
    }
}

static void backward_task(void *arg, int64_t index, int32_t thread)
{
    const product_job *job = arg;
    product_scratch *s = &job->scratch[thread];
    const int64_t expert = product_expert(job, index), task = index - job->first_task[expert],
                  u = task % job->units;
    const int64_t row = (expert > 0 ? job->ends[expert - 1] : 0) + task / job->units * PRODUCT_ROWS;
    const int64_t left = job->ends[expert] - row, rows = left < PRODUCT_ROWS ? left : PRODUCT_ROWS;
    const int64_t panels = panels_of(job->args->n),
                  group = job->kind == PRODUCT_BF16 ? PRODUCT_UNITS_BF16 : PRODUCT_UNITS_F32;
    for (int64_t p = 0; p < panels; p += group) {
        const int64_t count = panels - p < group ? panels - p : group;
        turn_panels(job, s, expert, u, p, count);
        multiply(job, s, row, rows, p, count);
    }
    if (panels == 0) memset(s->c[0], 0, (size_t)rows * GEMM4_UNIT * sizeof *s->c[0]);
    store_rows(job, s, expert, row, rows, u);
}

quern_status cpu_grouped_gemm_backward(const stage_exec *exec, const grouped_gemm_args *args, void *workspace)
{
    product_job job = plan(exec, args);
    arena a = arena_on(workspace);
    quern_status status = product_check_data(exec, args);
    carve(exec, &job, &a);
    product_ends(&job);
    if (status == QUERN_OK && args->b_repacked.ndim == 0)
        status = check_scale_bytes(exec, &args->b_scales, view_rows(&args->b_scales));
    if (status != QUERN_OK) return status;
    const int64_t rows = rows_with_expert(&args->offsets, args->tokens);
    parallel_for(exec, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, ready_task, &job);
    parallel_for(exec, product_tasks(&job, job.units), backward_task, &job);
    for (int64_t row = rows; row < args->tokens; row++)
        memset(view_row(&args->d_a, row), 0, (size_t)args->k * quern_dtype_size(args->d_a.dtype));
    return QUERN_OK;
}
