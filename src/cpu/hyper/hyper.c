/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - a tile's sums over the channels of its tokens' copies, and the weights that follow from them. */
#include "cpu/hyper/hyper.h"

#include "core/parallel.h"

#include <string.h>

hyper_job hyper_plan(const stage_exec *exec, const hyper_args *args, bool packs, arena *a)
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
    job.tiles = (job.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    job.piece = packs ? PIECE : PIECE_IN_PLACE;
    job.pieces = (job.width + job.piece - 1) / job.piece;
    job.piece_floats = hyper_packed_floats(job.kernels->hyper, least(job.piece, job.width), job.weights);
    if (packs && job.mixes && job.tokens > 0)
        job.packed = arena_take(a, (size_t)(job.copies * job.pieces * job.piece_floats) * sizeof(float));
    return job;
}

static void pack_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const hyper_job *job = arg;
    const int64_t copy = index / job->pieces, channel = index % job->pieces * job->piece;
    job->kernels->hyper->pack(float_row(&job->args->fn, 0) + copy * job->width + channel,
                              job->args->fn.strides[0], job->weights, least(job->width - channel, job->piece),
                              job->args->x.dtype, job->packed + index * job->piece_floats);
}

void hyper_pack(const stage_exec *exec, hyper_job *job)
{
    if (job->packed != NULL) parallel_for(exec, job->copies * job->pieces, pack_piece, job);
}

void hyper_carve_tile(const hyper_job *job, arena *a, hyper_tile *tile)
{
    const int64_t lanes = (job->weights + 1) * job->kernels->hyper->lanes;
    tile->lanes = arena_take(a, (size_t)(TILE_TOKENS * lanes) * sizeof(float));
    tile->sums = arena_take(a, (size_t)(TILE_TOKENS * job->ld) * sizeof(float));
    tile->weights = arena_take(a, (size_t)(TILE_TOKENS * job->ld) * sizeof(float));
    tile->collapsed = arena_take(a, (size_t)round_up16(job->width) * sizeof(float));
}

void hyper_take_tile(const hyper_job *job, int64_t index, hyper_tile *tile)
{
    const int64_t block = job->kernels->hyper->dot_rows, blocks = (job->tokens + block - 1) / block;
    tile->token0 = blocks * index / job->tiles * block;
    tile->tokens = least(blocks * (index + 1) / job->tiles * block, job->tokens) - tile->token0;
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

/* What the same tokens' sums take next, their next piece, of this copy or the next, and what is read after
 * them. Rows of a piece are too short for the prefetchers to run ahead of them. */
static hyper_ahead after(const hyper_job *job, int64_t token, int64_t copy, int64_t piece)
{
    const quern_tensor *x = &job->args->x, *beside = &job->beside;
    const int64_t element = (int64_t)quern_dtype_size(x->dtype);
    const bool last = piece + 1 == job->pieces, end = last && copy + 1 == job->copies;
    hyper_ahead a = {{NULL, NULL}, {0, 0}};
    if (!end) {
        a.rows[0] = token_row(x, token, last ? copy + 1 : copy, last ? 0 : (piece + 1) * job->piece);
        a.stride[0] = x->strides[0] * element;
    }
    if (is_present(beside) && (copy == 0 || beside->ndim > 2)) {
        a.rows[1] = token_row(beside, token, copy, piece * job->piece);
        a.stride[1] = beside->strides[0] * element;
    }
    return a;
}

static void add_piece(const hyper_job *job, const hyper_tile *tile, int64_t copy, int64_t piece)
{
    const quern_tensor *x = &job->args->x;
    const int64_t channel = piece * job->piece;
    const float *fn = job->packed != NULL ? job->packed + (copy * job->pieces + piece) * job->piece_floats
                                          : float_row(&job->args->fn, 0) + copy * job->width + channel;
    const hyper_products p = {.x = token_row(x, tile->token0, copy, channel),
                              .from = x->dtype,
                              .rows = tile->tokens,
                              .ld_x = x->strides[0],
                              .n = least(job->width - channel, job->piece),
                              .fn = fn,
                              .ld_fn = job->packed != NULL ? 0 : job->args->fn.strides[0],
                              .columns = job->weights,
                              .lanes = tile->lanes,
                              .ahead = after(job, tile->token0, copy, piece)};
    job->kernels->hyper->add_products(&p);
}

static int64_t lanes_of(const hyper_job *job, int64_t tokens)
{
    return tokens * (job->weights + 1) * job->kernels->hyper->lanes;
}

void hyper_carve_parts(hyper_job *job, arena *a)
{
    job->parts =
        arena_take(a, (size_t)(job->copies * job->pieces * lanes_of(job, job->tokens)) * sizeof(float));
}

/* A piece of fn in place is runs of its rows, far apart: they are requested one after the other. */
static void add_part(void *arg, int64_t part, int32_t thread)
{
    (void)thread;
    const hyper_job *job = arg;
    const int64_t copy = part / job->pieces, piece = part % job->pieces, channel = piece * job->piece,
                  bytes = least(job->width - channel, job->piece) * (int64_t)sizeof(float);
    const hyper_tile all = {.tokens = job->tokens, .lanes = job->parts + part * lanes_of(job, job->tokens)};
    memset(all.lanes, 0, (size_t)lanes_of(job, job->tokens) * sizeof(float));
    for (int64_t j = 0; j < job->weights; j++) {
        const char *row = (const char *)(float_row(&job->args->fn, j) + copy * job->width + channel);
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
    add_piece(job, &all, copy, piece);
}

void hyper_add_parts(const stage_exec *exec, hyper_job *job)
{
    if (job->parts != NULL) parallel_for(exec, job->copies * job->pieces, add_part, job);
}

/* The pieces' sums, in order, as add_products() adds them. */
static void take_parts(const hyper_job *job, const hyper_tile *tile)
{
    for (int64_t part = 0; part < job->copies * job->pieces; part++)
        job->kernels->rows->add_scaled(
            tile->lanes, job->parts + part * lanes_of(job, job->tokens) + lanes_of(job, tile->token0), 1.0f,
            lanes_of(job, tile->tokens));
}

void hyper_weigh(const hyper_job *job, const hyper_tile *tile)
{
    if (!job->mixes) return;
    memset(tile->lanes, 0, (size_t)lanes_of(job, tile->tokens) * sizeof(float));
    if (job->parts != NULL) take_parts(job, tile);
    for (int64_t copy = 0; copy < job->copies && job->parts == NULL; copy++)
        for (int64_t piece = 0; piece < job->pieces; piece++) add_piece(job, tile, copy, piece);
    job->kernels->hyper->fold(tile->lanes, tile->tokens, job->weights, tile->sums, job->ld);
    const hyper_weights w = hyper_weights_of(job, tile);
    job->kernels->hyper->weights(&w);
}

const float *hyper_pre(const hyper_job *job, const hyper_tile *tile, int64_t token)
{
    if (is_present(&job->args->pre_in)) return float_row(&job->args->pre_in, tile->token0 + token);
    return tile->weights + token * job->ld;
}
