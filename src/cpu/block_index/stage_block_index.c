/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_block_index.c - the block_index stage: packs the keys, then runs tasks of up to 48 query rows.
 *
 * Where all heads share their keys, the heads of a query are rows of one task, so a panel of keys in L1
 * serves them all. 128 scores of each row are computed at a time, into 24 KB; of these only the maxima of the
 * blocks are kept. Limit: the products' (2 D a score); the maxima take a twentieth of their time at D = 128.
 * Where every candidate finds room in a list, nothing is scored.
 *
 * A score is a sum of one order over D and a maximum: it depends on its query and its block's keys alone, so
 * lists do not depend on how a sequence is cut.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/rows_at.h"
#include "cpu/kernels/select/select.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { SCORE_BYTES = 4 << 20 /* most bytes of a task's block scores, where several rows share it */ };

typedef struct index_scratch {
    attend_chunk chunk;
    float *s;    /* [rows][SELECT_KEYS] */
    float *best; /* [rows][width] */
    int32_t *seen, *tile_seen;
    uint64_t *keys;
    int32_t *chosen;
} index_scratch;

typedef struct index_job {
    const block_index_args *args;
    attend_args attend;
    attend_plan attention;
    const nsa_kernels *kernels;
    int64_t width, rows, pieces; /* blocks of the longest sequence; of a task; of a sequence */
    void *panels;
    index_scratch *scratch; /* one per thread */
} index_job;

static void carve_scratch(const index_job *job, arena *a, index_scratch *s)
{
    const size_t rows = (size_t)job->rows, width = (size_t)job->width;
    memset(s, 0, sizeof *s);
    s->chunk.q = arena_take(a, rows * (size_t)job->attention.key_words * 4);
    s->s = arena_take(a, rows * SELECT_KEYS * sizeof *s->s);
    s->best = arena_take(a, rows * width * sizeof *s->best);
    s->seen = arena_take(a, rows * sizeof *s->seen);
    s->tile_seen = arena_take(a, rows * sizeof *s->tile_seen);
    const size_t k = (size_t)(job->args->rule.k < job->width ? job->args->rule.k : job->width);
    s->keys = arena_take(a, k * sizeof *s->keys);
    s->chosen = arena_take(a, k * sizeof *s->chosen);
}

/* Never copy or move the job: it points into itself. */
static void carve(const stage_exec *exec, const block_index_args *args, arena *a, index_job *job)
{
    memset(job, 0, sizeof *job);
    job->args = args;
    job->attend = (attend_args){.mask = ATTEND_RANGE,
                                .seqs = args->seqs,
                                .causal = true,
                                .query_offset = args->query_offset,
                                .tile = 1,
                                .q = args->q,
                                .k = args->keys,
                                .v = args->keys};
    job->attention = attend_plan_of(exec, &job->attend);
    job->kernels = cpu_kernels_for(exec->cpu_level)->nsa;
    job->width = mask_blocks(args->seqs.n_kv, args->rule.block_size);
    const int64_t most = job->width > 0 ? SCORE_BYTES / 4 / job->width : SELECT_ROWS;
    job->rows = most > SELECT_ROWS ? SELECT_ROWS : most > 0 ? most : 1;
    const attend_plan *p = &job->attention;
    job->panels = arena_take(a, (size_t)(p->kv_heads * p->packed_rows * p->key_words) * 4);
    job->scratch = arena_take(a, sizeof *job->scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        index_scratch s;
        carve_scratch(job, a, &s);
        if (a->base != NULL) job->scratch[i] = s;
    }
}

/* The scores of the chunk's rows and keys [first, first + columns); first is a multiple of a panel. */
static void products(const index_job *job, int64_t first, int64_t columns, const index_scratch *s)
{
    const attend_plan *p = &job->attention;
    const attend_chunk *c = &s->chunk;
    const int64_t panel = p->kernels->panel;
    const float *keys =
        (const float *)job->panels + (c->kv_head * p->packed_rows + c->seq.packed0 + first) * p->key_words;
    mm_kernel *mm = p->bf16 ? p->kernels->mm_bf16 : p->kernels->mm_f32;
    for (int64_t j = 0; j < columns; j += panel)
        mm(c->rows, columns - j < panel ? columns - j : panel, p->key_words, c->q, p->key_words, 1,
           keys + j * p->key_words, panel, s->s + j, SELECT_KEYS, false);
}

/* The block scores of the chunk's rows, which see keys before `end`. */
static void score_blocks(const index_job *job, int64_t end, index_scratch *s)
{
    const int64_t size = job->args->rule.block_size;
    for (int64_t first = 0; first < end; first += SELECT_KEYS) {
        const int64_t stop = end - first < SELECT_KEYS ? end : first + SELECT_KEYS;
        products(job, first, stop - first, s);
        for (int64_t from = first, block = first / size; from < stop; block++) {
            const int64_t to = (block + 1) * size < stop ? (block + 1) * size : stop;
            for (int32_t r = 0; r < s->chunk.rows; r++) s->tile_seen[r] = s->seen[r] - (int32_t)from;
            job->kernels->row_maxima(s->s + (from - first), SELECT_KEYS, s->chunk.rows, s->tile_seen,
                                     (int32_t)(to - from), s->best + block, job->width);
            from = to;
        }
    }
}

static int64_t position_of(const index_job *job, const attend_sequence *seq, int64_t query)
{
    return query + (job->args->query_offset >= 0 ? job->args->query_offset : seq->nk - seq->nq);
}

/* The blocks that begin at or before a position. */
static int64_t candidates_at(const index_job *job, const attend_sequence *seq, int64_t position)
{
    const int64_t size = job->args->rule.block_size, blocks = mask_blocks(seq->nk, size);
    if (position < 0) return 0;
    return position / size + 1 < blocks ? position / size + 1 : blocks;
}

/* Writes row r's list, count and scores. */
static void choose(const index_job *job, int32_t r, index_scratch *s)
{
    const block_index_args *n = job->args;
    const attend_chunk *c = &s->chunk;
    const int64_t hs = job->attention.hs, query = (c->row0 + r) / hs, head = c->head0 + (c->row0 + r) % hs,
                  view_b = c->seq.view_b, row = c->seq.q0 + query,
                  position = position_of(job, &c->seq, query),
                  candidates = candidates_at(job, &c->seq, position);
    const float *scores = s->best + r * job->width;
    const int32_t count = select_index_list(job->kernels, &n->rule, scores, position, candidates, s->keys,
                                            s->chosen, row_at(&n->blocks, view_b, head, row));
    if (is_present(&n->count)) *(int32_t *)row_at(&n->count, view_b, head, row) = count;
    if (is_present(&n->scores))
        memcpy(row_at(&n->scores, view_b, head, row), scores, (size_t)job->width * sizeof *scores);
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    const index_job *job = arg;
    const attend_plan *p = &job->attention;
    const int64_t lists = p->sequences * p->units, b = index % lists / p->units, unit = index % p->units;
    const attend_sequence seq = attend_sequence_at(p, b);
    const int64_t row0 = (job->pieces - 1 - index / lists) * job->rows, left = seq.nq * p->hs - row0;
    index_scratch *s = &job->scratch[thread];
    if (left <= 0) return;
    const int32_t rows = (int32_t)(left < job->rows ? left : job->rows);
    const int64_t last = (row0 + rows - 1) / p->hs;
    attend_chunk_begin(p, b, (int32_t)unit, row0, rows, &s->chunk);
    if (is_present(&job->args->scores) ||
        candidates_at(job, &seq, position_of(job, &seq, last)) > job->args->rule.k) {
        for (int64_t i = 0; i < rows * job->width; i++) s->best[i] = -INFINITY;
        for (int32_t r = 0; r < rows; r++) {
            int64_t lo, hi;
            attend_interval(&job->attend, &seq, (row0 + r) / p->hs, &lo, &hi);
            s->seen[r] = (int32_t)hi;
        }
        score_blocks(job, s->seen[rows - 1], s);
    }
    for (int32_t r = 0; r < rows; r++) choose(job, r, s);
}

/* Rows of varlen lists that belong to no query: -1, count 0. */
static void fill_unused(const block_index_args *n)
{
    const quern_tensor *lists = &n->blocks, *counts = &n->count;
    for (int64_t r = token_rows(&n->seqs); r < lists->shape[2]; r++)
        for (int64_t h = 0; h < lists->shape[1]; h++) {
            int32_t *list = row_at(lists, 0, h, r);
            for (int64_t e = 0; e < lists->shape[3]; e++) list[e] = -1;
            if (is_present(counts)) *(int32_t *)row_at(counts, 0, h, r) = 0;
        }
}

void cpu_block_index_kernel(const stage_exec *exec, const block_index_args *args, char text[STAGE_NAME_BYTES])
{
    arena a = {NULL, 0};
    index_job job;
    carve(exec, args, &a, &job);
    cpu_name_kernels(text, "block_index", job.attention.bf16, job.attention.kernels->level);
}

size_t cpu_block_index_workspace(const stage_exec *exec, const block_index_args *args)
{
    arena a = {NULL, 0};
    index_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_block_index(const stage_exec *exec, const block_index_args *args, void *workspace)
{
    const quern_status status = check_seqs(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    index_job job;
    carve(exec, args, &a, &job);
    const attend_plan *p = &job.attention;
    const attend_pack_target target = {&job.attend.k, job.panels, NULL, NULL, 0};
    attend_pack_all(exec, p, &target, 1);
    job.pieces = mask_blocks(longest_sequence(&args->seqs) * p->hs, job.rows);
    parallel_for(exec, p->sequences * p->units * job.pieces, run_task, &job);
    if (args->seqs.cu_q.data != NULL) fill_unused(args);
    return QUERN_OK;
}
