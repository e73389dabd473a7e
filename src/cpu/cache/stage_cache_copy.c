/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_cache_copy.c - the cache_copy stage: copies rows of tokens to their blocks and back. A task is the
 * rows of one run in one block, of all heads. Limit: the copy bandwidth; a decoded token's rows are one task.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

typedef struct copy_job {
    const cache_copy_args *args;
    int64_t pieces; /* of the longest run */
} copy_job;

static int64_t blocks_of(const step_run *run)
{
    return run->count > 0 ? (run->first + run->count - 1) / CACHE_BLOCK - run->first / CACHE_BLOCK + 1 : 0;
}

static void copy_rows(const cache_copy_args *args, const step_run *run, int64_t block)
{
    const cache_plane *p = &args->plane;
    const int64_t from = run->first > block * CACHE_BLOCK ? run->first : block * CACHE_BLOCK;
    const int64_t last = run->first + run->count,
                  end = (block + 1) * CACHE_BLOCK < last ? (block + 1) * CACHE_BLOCK : last;
    const size_t size = quern_dtype_size(p->blocks.dtype), key = (size_t)p->dim * size,
                 value = (size_t)p->dim_v * size;
    for (int64_t h = 0; h < p->blocks.shape[1]; h++) {
        char *keys = cache_block(p, run->b, h, block) + (size_t)(from % CACHE_BLOCK) * key;
        char *values =
            keys + (size_t)(CACHE_BLOCK - from % CACHE_BLOCK) * key + (size_t)(from % CACHE_BLOCK) * value;
        for (int64_t t = from; t < end; t++, keys += key, values += value) {
            char *k = row_at(&args->k, 0, run->row + t - run->first, h);
            memcpy(args->from_cache ? k : keys, args->from_cache ? keys : k, key);
            if (value == 0) continue;
            char *v = row_at(&args->v, 0, run->row + t - run->first, h);
            memcpy(args->from_cache ? v : values, args->from_cache ? values : v, value);
        }
    }
}

static void copy_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const copy_job *job = arg;
    const step_run run = step_run_at(&job->args->step, index / job->pieces);
    const int64_t piece = index % job->pieces;
    if (piece < blocks_of(&run)) copy_rows(job->args, &run, run.first / CACHE_BLOCK + piece);
}

quern_status cpu_cache_copy(const stage_exec *exec, const cache_copy_args *args, void *workspace)
{
    quern_status status = check_step(exec, &args->step, args->k.shape[1]);
    if (status == QUERN_OK) status = check_plane(exec, &args->plane, &args->step, 0, 0);
    if (status != QUERN_OK) return status;
    (void)workspace;
    copy_job job = {args, 0};
    const int64_t batch = args->step.slots.shape[0];
    for (int64_t b = 0; b < batch; b++) {
        const step_run run = step_run_at(&args->step, b);
        if (blocks_of(&run) > job.pieces) job.pieces = blocks_of(&run);
    }
    parallel_for(exec, batch * job.pieces, copy_piece, &job);
    return QUERN_OK;
}
