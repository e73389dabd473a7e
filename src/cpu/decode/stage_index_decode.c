/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_index_decode.c - the index_decode stage: the block indexer's lists of a step's tokens over the keys
 * in their sequences' pages.
 *
 * Tokens of a sequence are cut into chunks of up to 48 query rows, a sequence's keys into shares. A task is
 * one chunk and one share: it writes the maxima of the share's blocks to memory. Then a task chooses the
 * lists of a chunk. A block stands in one share and its score is a maximum, so the cut changes no bit; the
 * products are the prefill's (panels.c), so that lists are equal. Chunks go in waves, for scores to stay in
 * cache.
 *
 * Limit: the read bandwidth on a sequence's keys for one query; the products' for many.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/decode/panels.h"
#include "cpu/kernels/select/select.h"
#include "cpu/levels.h"
#include "cpu/stages.h"

#include <math.h>
#include <string.h>

enum { SCORE_BYTES = 8 << 20 /* a wave's scores, at most, unless one chunk has more */, SHARE_KEYS = 8192 };

typedef struct index_space {
    decode_rows rows;
    decode_scratch scratch;
    int32_t *seen; /* [rows]: columns of the range at hand that a row sees */
    uint64_t *best;
    int32_t *chosen;
} index_space;

typedef struct index_job {
    const index_decode_args *args;
    decode_shape shape;
    const nsa_kernels *kernels;
    int64_t heads, units;   /* query heads that share a key; heads of keys */
    int64_t tokens, rows;   /* of a chunk, at most */
    int64_t width;          /* blocks of the longest sequence */
    int64_t share, shares;  /* blocks of a share; shares of the longest sequence */
    int64_t wave, first;    /* chunks of a wave; the wave's first */
    int64_t batch, *chunks; /* [batch + 1]: each sequence's first chunk */
    float *scores;          /* [wave][rows][width] */
    index_space *spaces;    /* one per thread */
} index_job;

/* Tokens of one sequence, and the heads that share its key head `unit`. */
typedef struct index_chunk {
    int64_t b, unit, row, position, count; /* of the first token; tokens */
    float *scores;
} index_chunk;

static void carve_space(const index_job *job, arena *a, index_space *s)
{
    const size_t found = (size_t)(job->args->rule.k < job->width ? job->args->rule.k : job->width);
    memset(s, 0, sizeof *s);
    decode_rows_carve(&job->shape, job->rows, a, &s->rows);
    decode_scratch_carve(&job->shape, job->rows, a, &s->scratch);
    s->seen = arena_take(a, (size_t)job->rows * sizeof *s->seen);
    s->best = arena_take(a, found * sizeof *s->best);
    s->chosen = arena_take(a, found * sizeof *s->chosen);
}

static void carve(const stage_exec *exec, const index_decode_args *args, arena *a, index_job *job)
{
    const int64_t lists = args->q.shape[2], size = args->rule.block_size;
    *job = (index_job){.args = args, .kernels = cpu_kernels_for(exec->cpu_level)->nsa};
    job->shape = decode_shape_of(exec, args->keys.blocks.dtype, args->keys.dim, 1, 1.0f);
    job->units = args->keys.blocks.shape[1];
    job->heads = lists / job->units;
    job->tokens = job->heads < SELECT_ROWS ? SELECT_ROWS / job->heads : 1;
    job->rows = job->tokens * job->heads;
    job->width = mask_blocks(args->capacity, size);
    job->share = size < SHARE_KEYS ? SHARE_KEYS / size : 1;
    job->shares = mask_blocks(job->width, job->share);
    job->batch = args->step.slots.shape[0];
    const int64_t most = SCORE_BYTES / 4 / job->rows / (job->width > 0 ? job->width : 1),
                  chunks = (args->q.shape[1] / job->tokens + job->batch) * job->units;
    job->wave = most > chunks ? chunks : most > 0 ? most : 1;
    job->chunks = arena_take(a, (size_t)(job->batch + 1) * sizeof *job->chunks);
    job->scores = arena_take(a, (size_t)(job->wave * job->rows * job->width) * sizeof *job->scores);
    job->spaces = arena_take(a, sizeof *job->spaces * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        index_space s;
        carve_space(job, a, &s);
        if (a->base != NULL) job->spaces[i] = s;
    }
}

static void find_chunks(const index_job *job)
{
    job->chunks[0] = 0;
    for (int64_t b = 0; b < job->batch; b++) {
        const int64_t count = step_run_at(&job->args->step, b).count;
        job->chunks[b + 1] = job->chunks[b] + mask_blocks(count, job->tokens) * job->units;
    }
}

/* Chunk `index` of the wave. */
static index_chunk chunk_at(const index_job *job, int64_t index)
{
    int64_t b = 0, high = job->batch;
    while (high - b > 1) {
        const int64_t middle = (b + high) / 2;
        if (job->chunks[middle] <= job->first + index) b = middle;
        else high = middle;
    }
    const step_run run = step_run_at(&job->args->step, b);
    const int64_t at = job->first + index - job->chunks[b], token = at / job->units * job->tokens,
                  left = run.count - token;
    return (index_chunk){b,
                         at % job->units,
                         run.row + token,
                         run.first + token,
                         left < job->tokens ? left : job->tokens,
                         job->scores + index * job->rows * job->width};
}

/* The candidates of the chunk's last token: blocks that begin at or before it. */
static int64_t candidates_of(const index_job *job, const index_chunk *c)
{
    return (c->position + c->count - 1) / job->args->rule.block_size + 1;
}

/* Raises the chunk's block scores by those of keys [base, end), whose first column is that of `base`; blocks
 * before `from` are left out. */
static void raise(const index_job *job, const index_chunk *c, int64_t base, int64_t from, int64_t end,
                  index_space *s)
{
    const int64_t size = job->args->rule.block_size;
    for (int64_t at = base > from ? base : from; at < end;) {
        const int64_t block = at / size, to = (block + 1) * size < end ? (block + 1) * size : end;
        for (int64_t t = 0; t < c->count; t++)
            for (int64_t h = 0; h < job->heads; h++)
                s->seen[t * job->heads + h] = (int32_t)(c->position + t + 1 - at);
        job->kernels->row_maxima(s->scratch.s + (at - base), STEP_KEYS, s->rows.n, s->seen,
                                 (int32_t)(to - at), c->scores + block, job->width);
        at = to;
    }
}

static void score_share(void *arg, int64_t index, int32_t thread)
{
    const index_job *job = arg;
    const index_chunk c = chunk_at(job, index / job->shares);
    const int64_t size = job->args->rule.block_size, first = index % job->shares * job->share,
                  candidates = candidates_of(job, &c), seen = c.position + c.count,
                  last = first + job->share < candidates ? first + job->share : candidates,
                  from = first * size, end = last * size < seen ? last * size : seen;
    index_space *s = &job->spaces[thread];
    if (candidates <= job->args->rule.k || first >= last) return; /* all find room */
    s->rows.n = (int32_t)(c.count * job->heads);
    for (int64_t t = 0; t < c.count; t++)
        decode_rows_pack(&job->shape, &job->args->q, c.row + t, c.unit * job->heads, job->heads,
                         (int32_t)(t * job->heads), &s->rows);
    for (int64_t r = 0; r < s->rows.n; r++)
        for (int64_t j = first; j < last; j++) c.scores[r * job->width + j] = -INFINITY;
    for (int64_t key = from - from % PANEL_KEYS, base = key; key < end; base = key) {
        decode_panel panels[STEP_PANELS];
        int32_t count = 0;
        while (count < STEP_PANELS && key < end)
            panels[count++] = decode_next_panel(&job->args->keys, c.b, c.unit, &key, end);
        decode_scores(&job->shape, &s->rows, panels, count, true, &s->scratch);
        raise(job, &c, base, from, key, s);
    }
}

static void choose(void *arg, int64_t index, int32_t thread)
{
    const index_job *job = arg;
    const index_decode_args *n = job->args;
    const index_chunk c = chunk_at(job, index);
    index_space *s = &job->spaces[thread];
    for (int64_t r = 0; r < c.count * job->heads; r++) {
        const int64_t position = c.position + r / job->heads, row = c.row + r / job->heads,
                      head = c.unit * job->heads + r % job->heads;
        const int32_t count = select_index_list(job->kernels, &n->rule, c.scores + r * job->width, position,
                                                position / n->rule.block_size + 1, s->best, s->chosen,
                                                row_at(&n->blocks, 0, head, row));
        if (is_present(&n->count)) *(int32_t *)row_at(&n->count, 0, head, row) = count;
    }
}

size_t cpu_index_decode_workspace(const stage_exec *exec, const index_decode_args *args)
{
    arena a = {NULL, 0};
    index_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_index_decode(const stage_exec *exec, const index_decode_args *args, void *workspace)
{
    quern_status status = check_step(exec, &args->step, args->q.shape[1]);
    if (status == QUERN_OK) status = check_plane(exec, &args->keys, &args->step, 0, 0);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    index_job job;
    carve(exec, args, &a, &job);
    find_chunks(&job);
    for (const int64_t chunks = job.chunks[job.batch]; job.first < chunks; job.first += job.wave) {
        const int64_t n = chunks - job.first < job.wave ? chunks - job.first : job.wave;
        parallel_for(exec, n * job.shares, score_share, &job);
        parallel_for(exec, n, choose, &job);
    }
    return QUERN_OK;
}
