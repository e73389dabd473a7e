/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - a tile's sums over the channels of its tokens' copies, and the weights that follow from them. */
#include "cpu/hyper/hyper.h"

#include "core/parallel.h"

#include <string.h>

hyper_job hyper_plan(const stage_exec *exec, const hyper_args *args)
{
    hyper_job job = {.args = args,
                     .kernels = cpu_kernels_for(exec->cpu_level),
                     .tokens = args->x.shape[0],
                     .copies = args->x.shape[1],
                     .width = args->x.shape[2],
                     .mixes = is_present(&args->fn),
                     .takes_f = is_present(&args->f)};
    job.weights = args->head ? job.copies : job.copies * (job.copies + 2);
    job.ld = round_up16(job.weights + 1);
    job.chunks = job.tokens > 0 ? (job.width + CHUNK - 1) / CHUNK : 0;
    return job;
}

void hyper_carve_packed(hyper_job *job, arena *a)
{
    job->packed =
        arena_take(a, (size_t)(job->copies * job->chunks * job->weights * CHUNK_LD) * sizeof *job->packed);
}

static void pack_chunk(void *arg, int64_t chunk, int32_t thread)
{
    (void)thread;
    const hyper_job *job = arg;
    const int64_t copy = chunk / job->chunks, channel = chunk % job->chunks * CHUNK,
                  n = least(job->width - channel, CHUNK);
    float *to = job->packed + chunk * job->weights * CHUNK_LD;
    for (int64_t j = 0; j < job->weights; j++, to += CHUNK_LD) {
        memcpy(to, float_row(&job->args->fn, j) + copy * job->width + channel, (size_t)n * sizeof *to);
        memset(to + n, 0, (size_t)(CHUNK_LD - n) * sizeof *to);
    }
}

void hyper_pack(const stage_exec *exec, hyper_job *job)
{
    if (job->mixes && job->packed != NULL) parallel_for(exec, job->copies * job->chunks, pack_chunk, job);
}

void hyper_carve_tile(const hyper_job *job, arena *a, hyper_tile *tile)
{
    tile->sums = arena_take(a, (size_t)(TILE_TOKENS * job->ld) * sizeof(float));
    tile->weights = arena_take(a, (size_t)(TILE_TOKENS * job->ld) * sizeof(float));
    tile->rows = arena_take(a, (size_t)(HYPER_COPIES * CHUNK_LD) * sizeof(float));
    tile->collapsed = arena_take(a, (size_t)round_up16(job->width) * sizeof(float));
}

hyper_weights hyper_weights_of(const hyper_job *job, const hyper_tile *tile)
{
    return (hyper_weights){.tokens = tile->tokens,
                           .copies = (int32_t)job->copies,
                           .iterations = (int32_t)job->args->iterations,
                           .head = job->args->head,
                           .width = job->copies * job->width,
                           .eps = job->args->eps,
                           .rms_eps = job->args->rms_eps,
                           .sums = tile->sums,
                           .ld = job->ld,
                           .base = job->args->base.data,
                           .scale = job->args->scale.data,
                           .weights = tile->weights};
}

/* Rows of one copy of the tokens from `token` on. */
static const float *widen_tokens(const hyper_job *job, int64_t token, int64_t rows, int64_t copy,
                                 int64_t channel, int64_t n, float *to, int64_t *ld)
{
    const quern_tensor *x = &job->args->x;
    *ld = x->strides[0];
    if (x->dtype == QUERN_F32) return token_row(x, token, copy, channel);
    *ld = CHUNK_LD;
    for (int64_t i = 0; i < rows; i++)
        job->kernels->rows->convert(token_row(x, token + i, copy, channel), x->dtype, to + i * CHUNK_LD,
                                    QUERN_F32, n);
    return to;
}

const float *hyper_widen(const hyper_job *job, const quern_tensor *t, int64_t token, int64_t channel,
                         int64_t n, float *to, int64_t *ld)
{
    const int64_t rows = t->ndim > 2 ? t->shape[1] : 1;
    *ld = t->ndim > 2 ? t->strides[1] : 0;
    if (t->dtype == QUERN_F32) return token_row(t, token, 0, channel);
    *ld = CHUNK_LD;
    for (int64_t i = 0; i < rows; i++)
        job->kernels->rows->convert(token_row(t, token, i, channel), t->dtype, to + i * CHUNK_LD, QUERN_F32,
                                    n);
    return to;
}

/* What the same tokens' sums take next, their next chunk, of this copy or the next, and what is read after
 * them. Rows of a chunk are too short for the prefetchers to run ahead of them. */
static hyper_ahead after(const hyper_job *job, int64_t token, int64_t copy, int64_t chunk)
{
    const quern_tensor *x = &job->args->x, *beside = &job->beside;
    const int64_t element = (int64_t)quern_dtype_size(x->dtype);
    const bool last = chunk + 1 == job->chunks, end = last && copy + 1 == job->copies;
    hyper_ahead a = {.element = element};
    if (!end) {
        a.rows[0] = token_row(x, token, last ? copy + 1 : copy, last ? 0 : (chunk + 1) * CHUNK);
        a.stride[0] = x->strides[0] * element;
    }
    if (is_present(beside)) {
        a.rows[1] = token_row(beside, token, copy, chunk * CHUNK);
        a.stride[1] = beside->strides[0] * element;
    }
    return a;
}

static void add_chunk(const hyper_job *job, const hyper_tile *tile, int64_t copy, int64_t chunk)
{
    const int64_t channel = chunk * CHUNK, n = least(job->width - channel, CHUNK);
    const bool packed = job->packed != NULL;
    const float *fn = packed ? job->packed + (copy * job->chunks + chunk) * job->weights * CHUNK_LD
                             : float_row(&job->args->fn, 0) + copy * job->width + channel;
    const int64_t ld_fn = packed ? CHUNK_LD : job->args->fn.strides[0];
    const int64_t group = least(job->kernels->hyper->dot_rows, TILE_GROUP);
    for (int64_t first = 0; first < tile->tokens; first += group) {
        const int64_t rows = least(tile->tokens - first, group);
        int64_t ld;
        const float *x = widen_tokens(job, tile->token0 + first, rows, copy, channel, n, tile->rows, &ld);
        const hyper_ahead ahead = after(job, tile->token0 + first, copy, chunk);
        float *sums = tile->sums + first * job->ld;
        job->kernels->hyper->dots(rows, job->weights, n, x, ld, fn, ld_fn, sums, job->ld, &ahead);
        for (int64_t i = 0; i < rows; i++)
            sums[i * job->ld + job->weights] += job->kernels->hyper->squares(x + i * ld, n);
    }
}

void hyper_carve_parts(hyper_job *job, arena *a)
{
    job->parts =
        arena_take(a, (size_t)(job->copies * job->chunks * job->tokens * job->ld) * sizeof *job->parts);
}

typedef struct parts_job {
    const hyper_job *job;
    const hyper_tile *tiles; /* a thread's */
} parts_job;

/* A chunk of fn is pieces of its rows, far apart: they are requested one after the other. */
static void add_part(void *arg, int64_t part, int32_t thread)
{
    const parts_job *parts = arg;
    const hyper_job *job = parts->job;
    const int64_t copy = part / job->chunks, chunk = part % job->chunks, channel = chunk * CHUNK,
                  bytes = least(job->width - channel, CHUNK) * (int64_t)sizeof(float);
    hyper_tile tile = parts->tiles[thread];
    tile.token0 = 0;
    tile.tokens = job->tokens;
    tile.sums = job->parts + part * job->tokens * job->ld;
    memset(tile.sums, 0, (size_t)(job->tokens * job->ld) * sizeof *tile.sums);
    for (int64_t j = 0; j < job->weights; j++) {
        const char *row = (const char *)(float_row(&job->args->fn, j) + copy * job->width + channel);
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    add_chunk(job, &tile, copy, chunk);
}

void hyper_add_parts(const stage_exec *exec, const hyper_job *job, const hyper_tile *tiles)
{
    parts_job parts = {job, tiles};
    if (job->parts != NULL) parallel_for(exec, job->copies * job->chunks, add_part, &parts);
}

/* The chunks' sums, in order. */
static void take_parts(const hyper_job *job, const hyper_tile *tile)
{
    const int64_t floats = job->tokens * job->ld;
    for (int64_t part = 0; part < job->copies * job->chunks; part++)
        job->kernels->rows->add_scaled(tile->sums, job->parts + part * floats, 1.0f, floats);
}

void hyper_weigh(const hyper_job *job, const hyper_tile *tile)
{
    if (!job->mixes) return;
    memset(tile->sums, 0, (size_t)(tile->tokens * job->ld) * sizeof(float));
    if (job->parts != NULL) take_parts(job, tile);
    for (int64_t copy = 0; copy < job->copies && job->parts == NULL; copy++)
        for (int64_t chunk = 0; chunk < job->chunks; chunk++) add_chunk(job, tile, copy, chunk);
    const hyper_weights w = hyper_weights_of(job, tile);
    job->kernels->hyper->weights(&w);
}

const float *hyper_pre(const hyper_job *job, const hyper_tile *tile, int64_t token)
{
    if (is_present(&job->args->pre_in)) return float_row(&job->args->pre_in, tile->token0 + token);
    return tile->weights + token * job->ld;
}

void hyper_collapse(const hyper_job *job, int64_t token, const float *pre, int64_t channel, int64_t n,
                    float *out)
{
    hyper_rows rows = {.from = job->args->x.dtype,
                       .ins = (int32_t)job->copies,
                       .m = pre,
                       .out = {out},
                       .to = QUERN_F32,
                       .outs = 1,
                       .n = n};
    for (int64_t i = 0; i < job->copies; i++) rows.in[i] = token_row(&job->args->x, token, i, channel);
    job->kernels->hyper->combine(&rows);
}
