/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_gate_backward.c - the gate_backward stage. With r_b = d_o . o_b per row:
 *
 *   delta_b = g_b r_b    d_o_b = g_b d_o    d_gates = r_b, or
 *   dl_b = r_b g_b (1 - g_b)    d_q (+)= sum_b dl_b w_b    d_w_b = sum over tokens of dl_b q
 *
 * The tokens are cut into at most 64 parts by shape alone. A part sums d_w over 64 tokens at a time and adds
 * these up (long f32 sums keep their precision); the parts' sums are added in order. Limit: the copy bandwidth on
 * d_o, o_b, q and d_q.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/gate.h"
#include "cpu/stages.h"

#include <string.h>

enum { MAX_PARTS = 64, SUM_TOKENS = 64 };

typedef struct backward_job {
    const gate_args *args;
    const nsa_kernels *kernels;
    float *parts_sum;  /* [parts][heads][3][dim] */
    float *thread_sum; /* [threads][heads][3][dim] */
    int64_t rows, views, heads, dim, parts, part_rows;
} backward_job;

static backward_job carve(const quern_exec *exec, const gate_args *args, arena *a)
{
    backward_job job = {.args = args, .kernels = nsa_kernels_for(exec->cpu_level)};
    job.views = args->d_o.shape[0];
    job.rows = args->d_o.shape[1];
    job.heads = args->d_o.shape[2];
    const int64_t total = job.views * job.rows;
    job.parts = (total + SUM_TOKENS - 1) / SUM_TOKENS;
    if (job.parts > MAX_PARTS) job.parts = MAX_PARTS;
    job.part_rows = job.parts > 0 ? (total + job.parts - 1) / job.parts : 0;
    if (args->kind != QUERN_NSA_GATE_WEIGHTS) return job;
    job.dim = args->q.shape[3];
    const size_t floats = (size_t)(job.heads * 3 * job.dim);
    if (is_present(&args->d_w_gate)) {
        job.parts_sum = arena_take(a, (size_t)job.parts * floats * sizeof(float));
        job.thread_sum = arena_take(a, (size_t)exec->threads * floats * sizeof(float));
    }
    return job;
}

static float *statistic_at(const quern_tensor *t, int64_t b, int64_t h, int64_t n)
{
    return (float *)t->data + b * t->strides[0] + h * t->strides[1] + n * t->strides[2];
}

/* One row: everything but the sums of d_w, whose factors dl it returns. */
static void row_backward(const backward_job *job, int64_t b, int64_t n, int64_t h, bool valid, float dl[3])
{
    const gate_args *args = job->args;
    const nsa_kernels *k = job->kernels;
    const void *o_b[3];
    float dots[3] = {0}, gates[3] = {1.0f / 3.0f, 1.0f / 3.0f, 1.0f / 3.0f};
    for (int i = 0; i < 3; i++) o_b[i] = is_present(&args->o_b[i]) ? row_at(&args->o_b[i], b, n, h) : NULL;
    if (valid) k->gate_dots(row_at(&args->d_o, b, n, h), o_b, args->d_o.dtype, args->d_o.shape[3], dots);
    if (is_present(&args->gates)) {
        float *g = row_at(&args->gates, b, n, h);
        for (int i = 0; i < 3; i++) {
            if (args->kind == QUERN_NSA_GATE_NONE) g[i] = valid ? gates[i] : 0.0f;
            else gates[i] = g[i];
        }
    }
    for (int i = 0; i < 3; i++) {
        dl[i] = valid ? dots[i] * gates[i] * (1.0f - gates[i]) : 0.0f;
        if (is_present(&args->delta[i])) *statistic_at(&args->delta[i], b, h, n) = valid ? gates[i] * dots[i] : 0.0f;
        if (is_present(&args->d_o_b[i])) {
            const void *const from[3] = {valid ? row_at(&args->d_o, b, n, h) : NULL, NULL, NULL};
            k->gate_combine(from, args->d_o.dtype, &gates[i], args->d_o.shape[3], row_at(&args->d_o_b[i], b, n, h), false);
        }
    }
    if (is_present(&args->d_gates)) memcpy(row_at(&args->d_gates, b, n, h), dots, sizeof dots);
    if (args->kind != QUERN_NSA_GATE_WEIGHTS || !is_present(&args->d_q)) return;
    float row[256];
    void *d_q = row_at(&args->d_q, b, n, h);
    const bool direct = args->d_q.dtype == QUERN_F32;
    if (!valid) {
        if (!args->accumulate) memset(d_q, 0, (size_t)job->dim * quern_dtype_size(args->d_q.dtype));
        return;
    }
    k->gate_query(dl, gate_weights_at(args, h), args->w_gate.dtype, args->w_gate.strides[1], job->dim, direct ? d_q : row, args->accumulate);
    if (!direct) k->convert_row(row, QUERN_F32, d_q, args->d_q.dtype, job->dim);
}

static void run_part(void *arg, int64_t part, int32_t thread)
{
    const backward_job *job = arg;
    const gate_args *args = job->args;
    const int64_t first = part * job->part_rows, total = job->views * job->rows, valid = args->seqs.cu_q.data != NULL ? token_rows(&args->seqs) : job->rows;
    const int64_t end = first + job->part_rows < total ? first + job->part_rows : total, floats = job->heads * 3 * job->dim;
    float *sum = job->parts_sum != NULL ? job->parts_sum + part * floats : NULL;
    float *few = job->thread_sum != NULL ? job->thread_sum + thread * floats : NULL;
    if (sum != NULL) memset(sum, 0, (size_t)floats * sizeof *sum);
    for (int64_t at = first; at < end; at += SUM_TOKENS) {
        const int64_t stop = at + SUM_TOKENS < end ? at + SUM_TOKENS : end;
        if (few != NULL) memset(few, 0, (size_t)floats * sizeof *few);
        for (int64_t i = at; i < stop; i++)
            for (int64_t h = 0; h < job->heads; h++) {
                const int64_t b = i / job->rows, n = i % job->rows;
                float dl[3];
                row_backward(job, b, n, h, n < valid, dl);
                if (few != NULL && n < valid) job->kernels->gate_weight(dl, row_at(&args->q, b, n, h), args->q.dtype, job->dim, few + h * 3 * job->dim, job->dim);
            }
        if (sum != NULL) job->kernels->add_scaled(few, 1.0f, floats, sum);
    }
}

static void reduce_head(void *arg, int64_t h, int32_t thread)
{
    (void)thread;
    const backward_job *job = arg;
    const quern_tensor *d_w = &job->args->d_w_gate;
    for (int64_t i = 0; i < 3; i++) {
        float *dst = (float *)d_w->data + h * d_w->strides[0] + i * d_w->strides[1];
        memset(dst, 0, (size_t)job->dim * sizeof *dst);
        for (int64_t part = 0; part < job->parts; part++)
            job->kernels->add_scaled(job->parts_sum + ((part * job->heads + h) * 3 + i) * job->dim, 1.0f, job->dim, dst);
    }
}

size_t cpu_gate_backward_workspace(const quern_exec *exec, const gate_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_gate_backward(const quern_exec *exec, const gate_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    parallel_for(exec->threads, job.parts, run_part, &job);
    if (job.parts_sum != NULL) parallel_for(exec->threads, job.heads, reduce_head, &job);
    return QUERN_OK;
}
