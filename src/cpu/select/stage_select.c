/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_select.c - the select stage: packs the compressed keys, then runs tasks of a few tiles of one list
 * head, late tiles (which see the most entries) first. */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/rows_at.h"
#include "cpu/kernels/select/select.h"
#include "cpu/stages.h"

typedef struct select_job {
    const select_plan *plan;
    void *keys;
    select_scratch *scratch; /* one per thread */
    int64_t pieces;
} select_job;

static void carve(const stage_exec *exec, const select_plan *plan, arena *a, select_job *job)
{
    job->plan = plan;
    job->keys = select_keys_carve(plan, a);
    job->scratch = arena_take(a, sizeof *job->scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        select_scratch s;
        select_scratch_carve(plan, a, &s);
        if (a->base != NULL) job->scratch[i] = s;
    }
}

static int64_t tiles_of(const select_plan *p, int64_t n)
{
    return mask_blocks(n, p->tile);
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    const select_job *job = arg;
    const select_plan *p = job->plan;
    const int64_t lists = p->args->seqs.batch * p->list_heads, b = index % lists / p->list_heads,
                  list_head = index % p->list_heads;
    const attend_sequence seq = attend_sequence_at(&p->attention, b);
    const int64_t tile0 = (job->pieces - 1 - index / lists) * p->tiles, left = tiles_of(p, seq.nq) - tile0;
    if (left <= 0) return;
    const int64_t count = left < p->tiles ? left : p->tiles,
                  row0 = first_list_row(&p->args->seqs, p->tile, b) + tile0;
    select_scratch *s = &job->scratch[thread];
    select_score(p, job->keys, b, list_head, tile0, count, s);
    for (int64_t i = 0; i < count; i++)
        select_choose(p, &seq, list_head, tile0 + i, row0 + i, s->entries + i * p->width, s);
}

/* Rows of varlen lists that belong to no tile: -1, count 0. */
static void fill_unused(const select_plan *p)
{
    const quern_tensor *lists[] = {&p->args->blocks, &p->args->groups}, *counts = &p->args->count;
    const int64_t used = first_list_row(&p->args->seqs, p->tile, p->args->seqs.batch);
    for (int i = 0; i < 2; i++) {
        if (!is_present(lists[i])) continue;
        for (int64_t r = used; r < lists[i]->shape[2]; r++)
            for (int64_t h = 0; h < lists[i]->shape[1]; h++)
                for (int64_t e = 0; e < lists[i]->shape[3]; e++)
                    ((int32_t *)row_at(lists[i], 0, h, r))[e] = -1;
    }
    for (int64_t r = used; is_present(counts) && r < counts->shape[2]; r++)
        for (int64_t h = 0; h < counts->shape[1]; h++) *(int32_t *)row_at(counts, 0, h, r) = 0;
}

void cpu_select_kernel(const stage_exec *exec, const select_args *args, char text[STAGE_NAME_BYTES])
{
    select_plan plan;
    select_plan_make(exec, args, &plan);
    cpu_name_kernels(text, "select", plan.attention.bf16, plan.attention.kernels->level);
}

size_t cpu_select_workspace(const stage_exec *exec, const select_args *args)
{
    arena a = {NULL, 0};
    select_plan plan;
    select_job job;
    select_plan_make(exec, args, &plan);
    carve(exec, &plan, &a, &job);
    return arena_size(&a);
}

quern_status cpu_select(const stage_exec *exec, const select_args *args, void *workspace)
{
    const quern_status status = check_seqs(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    select_plan plan;
    select_job job;
    select_plan_make(exec, args, &plan);
    carve(exec, &plan, &a, &job);
    select_keys_pack(exec, &plan, job.keys);
    job.pieces = (tiles_of(&plan, longest_sequence(&args->seqs)) + plan.tiles - 1) / plan.tiles;
    parallel_for(exec, args->seqs.batch * plan.list_heads * job.pieces, run_task, &job);
    if (args->seqs.cu_q.data != NULL) fill_unused(&plan);
    return QUERN_OK;
}
