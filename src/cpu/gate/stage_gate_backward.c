/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_gate_backward.c - the gate_backward stage. With r_b = d_o . o_b per row:
 *
 *   delta_b = g_b r_b               d_o_b = g_b d_o
 *   d_gates = r_b, or dl_b = r_b g_b (1 - g_b)
 *   d_q (+)= sum_b dl_b w_b         d_w_b = sum over tokens of dl_b q
 *
 * The tokens are cut into at most 64 parts by shape alone. A part sums d_w over 64 tokens at a time and adds
 * these sums up (long f32 sums keep their precision); the parts' sums are added in order. Limit: the copy
 * bandwidth on d_o, o_b, q and d_q.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/gate/gate.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { MAX_PARTS = 64, SUM_TOKENS = 64 };

typedef struct backward_job {
    const gate_args *args;
    const nsa_kernels *kernels;
    float *parts_sum;  /* [parts][heads][3][dim] */
    float *thread_sum; /* [threads][heads][3][dim] */
    float *factors;    /* [threads][SUM_TOKENS][heads][3]: dl */
    int64_t rows, views, heads, dim, parts, part_rows;
    bool stream[4]; /* d_o_b, d_q */
    bool prefetch_l2;
} backward_job;

static backward_job carve(const stage_exec *exec, const gate_args *args, arena *a)
{
    backward_job job = {
        .args = args, .kernels = cpu_kernels_for(exec->cpu_level)->nsa, .prefetch_l2 = exec->prefetch_l2};
    job.views = args->d_o.shape[0];
    job.rows = args->d_o.shape[1];
    job.heads = args->d_o.shape[2];
    const int64_t total = job.views * job.rows;
    job.parts = (total + SUM_TOKENS - 1) / SUM_TOKENS;
    if (job.parts > MAX_PARTS) job.parts = MAX_PARTS;
    job.part_rows = job.parts > 0 ? (total + job.parts - 1) / job.parts : 0;
    for (int i = 0; i < 3; i++) job.stream[i] = all_may_stream(&args->d_o_b[i]);
    job.stream[3] = !args->accumulate && all_may_stream(&args->d_q);
    if (args->kind != GATE_WEIGHTS) return job;
    job.dim = args->q.shape[3];
    job.factors = arena_take(a, (size_t)(exec->threads * SUM_TOKENS * job.heads * 3) * sizeof(float));
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

/* Writes zeros to rows that belong to no token. */
static void clear_row(const backward_job *job, int64_t b, int64_t n, int64_t h)
{
    const gate_args *args = job->args;
    enum { OUTPUTS = 6 };
    const quern_tensor *const outputs[OUTPUTS] = {&args->d_o_b[0], &args->d_o_b[1], &args->d_o_b[2],
                                                  &args->d_gates,  &args->d_q,      &args->gates};
    for (int i = 0; i < OUTPUTS; i++) {
        const quern_tensor *t = outputs[i];
        if (!is_present(t) || (t == &args->d_q && (args->kind != GATE_WEIGHTS || args->accumulate)) ||
            (t == &args->gates && args->kind != GATE_NONE))
            continue;
        memset(row_at(t, b, n, h), 0, (size_t)t->shape[3] * quern_dtype_size(t->dtype));
    }
    for (int i = 0; i < 3; i++)
        if (is_present(&args->delta[i])) *statistic_at(&args->delta[i], b, h, n) = 0.0f;
}

static row_grid statistics_at(const quern_tensor *t, int64_t b, int64_t n)
{
    if (!is_present(t)) return (row_grid){NULL, 0, 0};
    return (row_grid){statistic_at(t, b, 0, n), t->strides[2], t->strides[1]};
}

/* Runs tokens n ... n + tokens - 1 of a view; adds their shares of d_w to `few`. */
static void run_tokens(const backward_job *job, int64_t b, int64_t n, int64_t tokens, int32_t thread,
                       float *few)
{
    const gate_args *args = job->args;
    gate_backward_block t = {.dtype = args->d_o.dtype,
                             .tokens = tokens,
                             .heads = job->heads,
                             .dim = job->dim,
                             .dim_v = args->d_o.shape[3],
                             .d_o = grid_at(&args->d_o, b, n, 0),
                             .d_gates = grid_at(&args->d_gates, b, n, 0),
                             .prefetch_l2 = job->prefetch_l2};
    for (int i = 0; i < 3; i++) {
        t.o[i] = grid_at(&args->o_b[i], b, n, 0);
        t.d_o_b[i] = grid_at(&args->d_o_b[i], b, n, 0);
        t.delta[i] = statistics_at(&args->delta[i], b, n);
    }
    memcpy(t.stream, job->stream, sizeof t.stream);
    if (args->kind != GATE_NONE) {
        t.gates = grid_at(&args->gates, b, n, 0);
    } else if (is_present(&args->gates)) {
        for (int64_t i = 0; i < tokens * job->heads; i++)
            for (int k = 0; k < 3; k++)
                ((float *)row_at(&args->gates, b, n + i / job->heads, i % job->heads))[k] = 1.0f / 3.0f;
    }
    if (args->kind == GATE_WEIGHTS) {
        t.w = gate_weights_at(args, 0);
        t.d_q = grid_at(&args->d_q, b, n, 0);
        t.d_q_dtype = args->d_q.dtype;
        t.accumulate = args->accumulate;
        t.dl = job->factors + thread * SUM_TOKENS * job->heads * 3;
    }
    job->kernels->gate_backward(&t);
    if (few == NULL) return;
    const row_grid q = grid_at(&args->q, b, n, 0);
    job->kernels->gate_weight(t.dl, &q, args->q.dtype, tokens, job->heads, job->dim, few, job->prefetch_l2);
}

static void run_part(void *arg, int64_t part, int32_t thread)
{
    const backward_job *job = arg;
    const gate_args *args = job->args;
    const int64_t first = part * job->part_rows, total = job->views * job->rows,
                  valid = args->seqs.cu_q.data != NULL ? token_rows(&args->seqs) : job->rows;
    const int64_t end = first + job->part_rows < total ? first + job->part_rows : total,
                  floats = job->heads * 3 * job->dim;
    float *sum = job->parts_sum != NULL ? job->parts_sum + part * floats : NULL;
    float *few = job->thread_sum != NULL ? job->thread_sum + thread * floats : NULL;
    if (sum != NULL) memset(sum, 0, (size_t)floats * sizeof *sum);
    for (int64_t at = first; at < end; at += SUM_TOKENS) {
        const int64_t stop = at + SUM_TOKENS < end ? at + SUM_TOKENS : end;
        if (few != NULL) memset(few, 0, (size_t)floats * sizeof *few);
        for (int64_t i = at; i < stop;) { /* a view's tokens, then the rows without a token */
            const int64_t b = i / job->rows, n = i % job->rows, bound = n < valid ? valid : job->rows;
            const int64_t tokens = bound - n < stop - i ? bound - n : stop - i;
            if (n < valid) run_tokens(job, b, n, tokens, thread, few);
            for (int64_t k = 0; n >= valid && k < tokens * job->heads; k++)
                clear_row(job, b, n + k / job->heads, k % job->heads);
            i += tokens;
        }
        if (sum != NULL) job->kernels->rows->add_scaled(sum, few, 1.0f, floats);
    }
    job->kernels->rows->fence();
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
            job->kernels->rows->add_scaled(dst, job->parts_sum + ((part * job->heads + h) * 3 + i) * job->dim,
                                           1.0f, job->dim);
    }
}

size_t cpu_gate_backward_workspace(const stage_exec *exec, const gate_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_gate_backward(const stage_exec *exec, const gate_args *args, void *workspace)
{
    const quern_status status = check_queries(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    parallel_for(exec, job.parts, run_part, &job);
    if (job.parts_sum != NULL) parallel_for(exec, job.heads, reduce_head, &job);
    return QUERN_OK;
}
