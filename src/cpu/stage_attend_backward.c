/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_backward.c - the attend_backward stage. Work is cut by shape alone: each (sequence, kv head)
 * into a few parts of rows, each part a task that owns its rows' dQ and one f32 sum of dK and dV over its
 * keys. The parts' sums are then added in part order, scaled, and converted: the bits do not depend on the
 * number of threads.
 */
#include "core/parallel.h"
#include "cpu/attend_backward.h"
#include "cpu/stages.h"

#include <string.h>

enum { TASKS_WANTED = 16, MAX_PARTS = 4, REDUCE_KEYS = 64 };

typedef struct backward_job {
    attend_plan plan;
    backward_packed packed;
    backward_chunk *chunks;
    backward_scratch *scratch;
    float *d_k, *d_v; /* [sequences' rows][kv heads][parts] ... see sums_of() */
    int64_t chunk_rows, part_rows, parts, grad_width;
} backward_job;

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static backward_job carve(const quern_exec *exec, const attend_args *args, arena *a)
{
    backward_job job = {.plan = attend_plan_of(exec, args)};
    const attend_plan *p = &job.plan;
    job.grad_width = round_up(p->dim_k, 16);
    job.chunk_rows = backward_chunk_rows(p);
    const int64_t rows = args->seqs.n_q * p->hs, tasks = p->sequences * p->kv_heads;
    job.parts = tasks > 0 ? (TASKS_WANTED + tasks - 1) / tasks : 1;
    if (job.parts > MAX_PARTS) job.parts = MAX_PARTS;
    if (job.parts > rows / job.chunk_rows) job.parts = rows / job.chunk_rows;
    if (job.parts < 1) job.parts = 1;
    job.part_rows = round_up((rows + job.parts - 1) / job.parts, job.chunk_rows);
    const size_t key_rows = (size_t)(p->packed_rows * p->kv_heads * job.parts);
    backward_packed_carve(p, a, &job.packed);
    job.d_k = arena_take(a, key_rows * (size_t)job.grad_width * sizeof(float));
    job.d_v = arena_take(a, key_rows * (size_t)p->value_width * sizeof(float));
    job.chunks = arena_take(a, sizeof *job.chunks * (size_t)exec->threads);
    job.scratch = arena_take(a, sizeof *job.scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        backward_chunk chunk;
        backward_scratch scratch;
        backward_chunk_carve(p, job.chunk_rows, a, &chunk);
        backward_scratch_carve(p, job.chunk_rows, a, &scratch);
        if (a->base != NULL) job.chunks[i] = chunk, job.scratch[i] = scratch;
    }
    return job;
}

/* Key rows of one (kv head, part): packed rows, each sequence at its packed0. */
static backward_sums sums_of(const backward_job *job, const attend_sequence *seq, int64_t kv_head, int64_t part)
{
    const int64_t row = (kv_head * job->parts + part) * job->plan.packed_rows + seq->packed0;
    return (backward_sums){job->d_k + row * job->grad_width, job->d_v + row * job->plan.value_width};
}

/* The keys that rows of a part can reach: [*lo, *hi). */
static bool part_keys(const backward_job *job, const attend_sequence *seq, int64_t part, int64_t *row0, int64_t *row1, int64_t *lo, int64_t *hi)
{
    const attend_plan *p = &job->plan;
    const int64_t rows = seq->nq * p->hs;
    int64_t ignore;
    *row0 = part * job->part_rows;
    *row1 = *row0 + job->part_rows < rows ? *row0 + job->part_rows : rows;
    if (*row0 >= *row1) return false;
    attend_interval(p->args, seq, *row0 / p->hs, lo, &ignore);
    attend_interval(p->args, seq, (*row1 - 1) / p->hs, &ignore, hi);
    return *lo < *hi;
}

static void run_part(void *arg, int64_t index, int32_t thread)
{
    backward_job *job = arg;
    const attend_plan *p = &job->plan;
    const int64_t tasks = p->sequences * p->kv_heads, part = job->parts - 1 - index / tasks; /* the longest first */
    const int64_t b = index % tasks / p->kv_heads, kv_head = index % p->kv_heads;
    const attend_sequence seq = attend_sequence_at(p, b);
    const backward_sums sums = sums_of(job, &seq, kv_head, part);
    int64_t row0, row1, lo = 0, hi = 0;
    const bool any = part_keys(job, &seq, part, &row0, &row1, &lo, &hi);
    if (any) {
        memset(sums.d_k + lo * job->grad_width, 0, (size_t)((hi - lo) * job->grad_width) * sizeof(float));
        memset(sums.d_v + lo * p->value_width, 0, (size_t)((hi - lo) * p->value_width) * sizeof(float));
    }
    const int32_t units = p->units / p->kv_heads;
    backward_chunk *chunk = &job->chunks[thread];
    for (int32_t u = 0; u < units; u++)
        for (int64_t row = row0; row < row1; row += job->chunk_rows) {
            backward_chunk_begin(p, b, (int32_t)kv_head * units + u, row, (int32_t)(row1 - row < job->chunk_rows ? row1 - row : job->chunk_rows), chunk);
            if (any) backward_chunk_run(p, &job->packed, chunk, &sums, &job->scratch[thread]);
            backward_chunk_store(p, chunk);
        }
}

static void store(const attend_plan *p, const quern_tensor *t, bool accumulate, const attend_sequence *seq, int64_t key, int64_t head, float *row, int64_t n)
{
    const int64_t at = seq->view_b * t->strides[0] + (seq->k0 + key) * t->strides[1] + head * t->strides[2];
    if (accumulate) p->kernels->scale_add_row((float *)t->data + at, 1.0f, row, n);
    else p->kernels->store_row(row, t->dtype, t->data, at, n);
}

/* Keys [64 i, 64 i + 64) of a (sequence, kv head): the parts' sums in part order, to d_k and d_v. */
static void reduce_keys(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const backward_job *job = arg;
    const attend_plan *p = &job->plan;
    const int64_t pieces = (p->args->seqs.n_kv + REDUCE_KEYS - 1) / REDUCE_KEYS;
    const int64_t kv_head = index / pieces % p->kv_heads;
    const attend_sequence seq = attend_sequence_at(p, index / pieces / p->kv_heads);
    const float k_scale = p->bf16 ? p->args->scale : 0.693147180559945309417f;
    float d_k[256], d_v[256];
    int64_t row0, row1, lo[MAX_PARTS], hi[MAX_PARTS];
    for (int64_t part = 0; part < job->parts; part++)
        if (!part_keys(job, &seq, part, &row0, &row1, &lo[part], &hi[part])) lo[part] = hi[part] = 0;
    const int64_t first = index % pieces * REDUCE_KEYS, end = first + REDUCE_KEYS < seq.nk ? first + REDUCE_KEYS : seq.nk;
    for (int64_t key = first; key < end; key++) {
        memset(d_k, 0, sizeof d_k);
        memset(d_v, 0, sizeof d_v);
        for (int64_t part = 0; part < job->parts; part++) {
            if (key < lo[part] || key >= hi[part]) continue;
            const backward_sums sums = sums_of(job, &seq, kv_head, part);
            p->kernels->scale_add_row(d_k, 1.0f, sums.d_k + key * job->grad_width, p->dim_k);
            p->kernels->scale_add_row(d_v, 1.0f, sums.d_v + key * p->value_width, p->dim_v);
        }
        p->kernels->scale_row(d_k, k_scale, p->dim_k);
        store(p, &p->args->d_k, p->args->accumulate_k, &seq, key, kv_head, d_k, p->dim_k);
        store(p, &p->args->d_v, p->args->accumulate_v, &seq, key, kv_head, d_v, p->dim_v);
    }
}

/* Rows past the last border of a packed batch have no gradient. */
static void fill_tail(const attend_plan *p, const quern_tensor *t, const quern_tensor *cu, int64_t rows)
{
    const float zero[256] = {0};
    for (int64_t n = ((const int32_t *)cu->data)[p->args->seqs.batch]; n < rows; n++)
        for (int64_t h = 0; h < t->shape[2]; h++)
            p->kernels->store_row(zero, t->dtype, t->data, n * t->strides[1] + h * t->strides[2], t->shape[3]);
}

size_t cpu_attend_backward_workspace(const quern_exec *exec, const attend_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_attend_backward(const quern_exec *exec, const attend_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    const attend_plan *p = &job.plan;
    backward_pack(exec, p, &job.packed);
    const int64_t tasks = p->sequences * p->kv_heads;
    parallel_for(exec->threads, tasks * job.parts, run_part, &job);
    parallel_for(exec->threads, tasks * ((args->seqs.n_kv + REDUCE_KEYS - 1) / REDUCE_KEYS), reduce_keys, &job);
    if (args->seqs.cu_q.data != NULL) {
        const quern_tensor *cu_kv = args->seqs.cu_kv.data != NULL ? &args->seqs.cu_kv : &args->seqs.cu_q;
        if (!args->accumulate_q) fill_tail(p, &args->d_q, &args->seqs.cu_q, args->seqs.n_q);
        if (!args->accumulate_k) fill_tail(p, &args->d_k, cu_kv, args->seqs.n_kv);
        if (!args->accumulate_v) fill_tail(p, &args->d_v, cu_kv, args->seqs.n_kv);
    }
    return QUERN_OK;
}
