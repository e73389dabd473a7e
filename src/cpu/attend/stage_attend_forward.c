/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_forward.c - the attend_forward stage: packs keys and values, cuts every (sequence, unit) into
 * chunks of query rows and runs them in parallel, the chunks with the most keys first. A chunk's result
 * depends only on its rows, so it does not change with the number of threads.
 *
 * A pass takes few enough heads that their panels of keys and values fit into the last-level cache, and
 * enough to keep all threads at work. Packing then writes to that cache and not to memory.
 */
#include "core/parallel.h"
#include "core/view.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <math.h>

enum { PASS_BYTES = 8 << 20, CHUNKS_A_THREAD = 16 };

typedef struct forward_job {
    attend_plan plan;
    attend_packed packed;
    attend_chunk *chunks; /* one a thread */
    attend_scratch *scratch;
    int64_t chunk_rows, pieces; /* pieces: chunks of the longest sequence's unit */
    int32_t threads;
} forward_job;

static int64_t chunk_rows_of(const attend_plan *p)
{
    return p->args->list.ndim > 0 ? attend_chunk_rows(p) : TILE_ROWS;
}

static int64_t pieces_of(const attend_plan *p)
{
    return (p->args->seqs.n_q * p->hs + chunk_rows_of(p) - 1) / chunk_rows_of(p);
}

static forward_job carve(const stage_exec *exec, const attend_args *args, arena *a)
{
    forward_job job = {.plan = attend_plan_of(exec, args)};
    const attend_plan *p = &job.plan;
    job.chunk_rows = chunk_rows_of(p);
    job.pieces = pieces_of(p);
    job.threads = exec->threads;
    attend_packed_carve(p, a, &job.packed);
    job.chunks = arena_take(a, sizeof *job.chunks * (size_t)exec->threads);
    job.scratch = arena_take(a, sizeof *job.scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        attend_chunk chunk;
        attend_scratch scratch;
        attend_chunk_carve(p, (int32_t)job.chunk_rows, a, &chunk);
        attend_scratch_carve(p, (int32_t)job.chunk_rows, a, &scratch);
        if (a->base != NULL) {
            job.chunks[i] = chunk;
            job.scratch[i] = scratch;
        }
    }
    return job;
}

/* Key/value heads of a pass. */
static int64_t heads_of_pass(const stage_exec *exec, const attend_args *args)
{
    const attend_plan p = attend_plan_of(exec, args);
    if (p.kv_heads == 0) return 0;
    const int64_t bytes =
        p.packed_rows * (p.key_words * 4 + attend_row_panels(&p, p.dim_v) * p.value_panel * (p.bf16 ? 2 : 4));
    const int64_t chunks = p.sequences * pieces_of(&p) * (p.units / p.kv_heads),
                  wanted = (int64_t)CHUNKS_A_THREAD * exec->threads;
    int64_t heads = bytes > 0 ? PASS_BYTES / bytes : p.kv_heads;
    if (chunks > 0 && heads < (wanted + chunks - 1) / chunks) heads = (wanted + chunks - 1) / chunks;
    return heads < 1 ? 1 : heads < p.kv_heads ? heads : p.kv_heads;
}

/* The call restricted to kv heads [first, first + count): itself where these are all, else *pass. */
static const attend_args *pass_of(const attend_args *args, int64_t first, int64_t count, attend_args *pass)
{
    if (count == args->k.shape[2]) return args;
    *pass = *args;
    const int64_t group = args->k.shape[2] > 0 ? args->q.shape[2] / args->k.shape[2] : 1,
                  lists = args->scope == LIST_BY_HEAD ? group : 1;
    view_narrow(&pass->q, 2, first * group, count * group);
    view_narrow(&pass->o, 2, first * group, count * group);
    view_narrow(&pass->lse, 1, first * group, count * group);
    view_narrow(&pass->sink, 0, first * group, count * group);
    view_narrow(&pass->k, 2, first, count);
    view_narrow(&pass->v, 2, first, count);
    view_narrow(&pass->list, 1, first * lists, count * lists);
    return pass;
}

static void run_chunk(void *arg, int64_t index, int32_t thread)
{
    forward_job *job = arg;
    const attend_plan *p = &job->plan;
    const int64_t b = index / job->pieces / p->units;
    const int32_t unit = (int32_t)(index / job->pieces % p->units);
    const attend_sequence seq = attend_sequence_at(p, b);
    const int64_t row0 = (job->pieces - 1 - index % job->pieces) * job->chunk_rows,
                  rows = seq.nq * p->hs - row0;
    if (rows <= 0) return;
    attend_chunk *chunk = &job->chunks[thread];
    attend_chunk_begin(p, b, unit, row0, (int32_t)(rows < job->chunk_rows ? rows : job->chunk_rows), chunk);
    attend_chunk_reset(p, chunk);
    job->scratch[thread].expected = attend_expect(p, index + job->threads, job->pieces, job->chunk_rows);
    attend_chunk_run(p, &job->packed, chunk, &job->scratch[thread]);
    attend_chunk_finish(p, chunk);
    attend_chunk_store(p, chunk);
}

void attend_store_unused(const attend_plan *p)
{
    const attend_args *a = p->args;
    const int64_t first = token_rows(&a->seqs);
    if (is_present(&a->o)) zero_rows(&a->o, first);
    for (int64_t n = first; is_present(&a->lse) && n < a->seqs.n_q; n++)
        for (int32_t h = 0; h < p->heads; h++) *(float *)row_at(&a->lse, 0, h, n) = -INFINITY;
}

void cpu_attend_kernel(const stage_exec *exec, const attend_args *args, char text[STAGE_NAME_BYTES])
{
    const attend_plan plan = attend_plan_of(exec, args);
    cpu_name_kernels(text, "attend", plan.bf16, plan.kernels->level);
}

size_t cpu_attend_forward_workspace(const stage_exec *exec, const attend_args *args)
{
    arena a = {NULL, 0};
    attend_args pass;
    carve(exec, pass_of(args, 0, heads_of_pass(exec, args), &pass), &a);
    return arena_size(&a);
}

quern_status cpu_attend_forward(const stage_exec *exec, const attend_args *args, void *workspace)
{
    const quern_status status = attend_check(exec, args);
    if (status != QUERN_OK) return status;
    const int64_t kv_heads = args->k.shape[2], most = heads_of_pass(exec, args); /* 0: no queries */
    for (int64_t first = 0; most > 0 && first < kv_heads; first += most) {
        attend_args pass;
        const int64_t count = first + most < kv_heads ? most : kv_heads - first;
        arena a = arena_on(workspace);
        forward_job job = carve(exec, pass_of(args, first, count, &pass), &a);
        attend_pack(exec, &job.plan, &job.packed);
        parallel_for(exec, job.plan.sequences * job.plan.units * job.pieces, run_chunk, &job);
        attend_store_unused(&job.plan);
    }
    return QUERN_OK;
}
