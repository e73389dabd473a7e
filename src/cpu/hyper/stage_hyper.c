/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_hyper.c - the hyper_forward stage.
 *
 * A task is up to 48 tokens. Their sums over fn come first, by pieces of 1024 channels, so that fn, which no
 * L2 holds, is read once for 48 tokens: 32 KB a token of 4 x 4096 channels, as much as its copies in bf16.
 * Then each token's copies, which L2 or L3 still has, become its input and the new copies in one pass. fn is
 * packed first where there are many tokens. For few the pieces are tasks of their own, so that all threads
 * read fn; their sums are added in order, as a tile adds them. Memory is read ahead while the sums are made,
 * and new rows go past the caches.
 *
 * Limit: the slower of the copies read and written once and 2 (J n + n + n (n + 1)) C f32 operations a token.
 */
#include "cpu/hyper/stages.h"

#include "core/parallel.h"
#include "cpu/hyper/hyper.h"
#include "cpu/stages.h"

#include <math.h>

enum { FEW_TOKENS = 24, TILE_LEAST = 4 }; /* up to so many read fn in place */

typedef struct forward_job {
    hyper_job job;
    hyper_tile *tiles; /* a thread's */
} forward_job;

static forward_job carve(const stage_exec *exec, const hyper_args *args, arena *a)
{
    forward_job f = {.job = hyper_plan(exec, args, args->x.shape[0] > FEW_TOKENS, a)};
    if (f.job.mixes && f.job.tokens <= FEW_TOKENS && exec->threads > 1) {
        hyper_carve_parts(&f.job, a);
        f.job.tiles = least(exec->threads, (f.job.tokens + TILE_LEAST - 1) / TILE_LEAST);
    }
    f.job.beside = args->f;
    f.job.norm = carve_rows(&args->weight, a);
    f.tiles = arena_take(a, (size_t)exec->threads * sizeof *f.tiles);
    for (int32_t i = 0; i < exec->threads && f.job.tokens > 0; i++) {
        hyper_tile tile;
        hyper_carve_tile(&f.job, a, &tile);
        if (f.tiles != NULL) f.tiles[i] = tile;
    }
    return f;
}

/* The collapsed copies, and with f the new ones; returns the sum of the former's squares. */
static float mix(const hyper_job *job, const hyper_tile *tile, int64_t i)
{
    const hyper_args *args = job->args;
    const int64_t n = job->copies, token = tile->token0 + i;
    const float *w = tile->weights + i * job->ld;
    float m[HYPER_COPIES * HYPER_INPUTS];
    hyper_mix rows = {.copies = (int32_t)n,
                      .dtype = args->x.dtype,
                      .n = job->width,
                      .pre = hyper_pre(job, tile, i),
                      .m = m,
                      .collapsed = tile->collapsed,
                      .stream = true};
    for (int64_t k = 0; k < n; k++) rows.x[k] = token_row(&args->x, token, k, 0);
    for (int64_t k = 0; k < n && job->takes_f; k++) {
        for (int64_t j = 0; j < n; j++) m[k * HYPER_INPUTS + j] = w[2 * n + j * n + k];
        m[k * HYPER_INPUTS + n] = w[n + k];
        rows.out[k] = token_row(&args->out, token, k, 0);
        rows.stream = rows.stream && may_stream(rows.out[k], rows.dtype, job->width);
    }
    if (job->takes_f) rows.f = token_row(&args->f, token, 0, 0);
    return job->kernels->hyper->mix(&rows);
}

static void give(const quern_tensor *t, int64_t token, const float *from, int64_t n)
{
    if (!is_present(t)) return;
    for (int64_t i = 0; i < n; i++)
        if (t->ndim == 2) float_row(t, token)[i] = from[i];
        else
            for (int64_t k = 0; k < n; k++) (float_row(t, token) + i * t->strides[1])[k] = from[i * n + k];
}

static void run_token(const hyper_job *job, const hyper_tile *tile, int64_t i)
{
    const hyper_args *args = job->args;
    const int64_t n = job->copies, token = tile->token0 + i;
    const float *w = tile->weights + i * job->ld;
    void *h = token_row(&args->h, token, 0, 0);
    const float scale = 1.0f / sqrtf(mix(job, tile, i) / (float)job->width + args->rms_eps);
    job->kernels->hyper->scale_row(tile->collapsed, job->norm.data, scale, job->width, h, args->h.dtype,
                                   may_stream(h, args->h.dtype, job->width));
    give(&args->pre, token, w, n);
    give(&args->post, token, w + n, n);
    give(&args->comb, token, w + 2 * n, n);
}

static void run_tile(void *arg, int64_t index, int32_t thread)
{
    const forward_job *f = arg;
    hyper_tile tile = f->tiles[thread];
    hyper_take_tile(&f->job, index, &tile);
    hyper_weigh(&f->job, &tile);
    for (int64_t i = 0; i < tile.tokens; i++) run_token(&f->job, &tile, i);
    f->job.kernels->rows->fence();
}

void cpu_hyper_kernel(const stage_exec *exec, const hyper_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "hyper", false, cpu_kernels_for(exec->cpu_level)->hyper->level);
}

size_t cpu_hyper_workspace(const stage_exec *exec, const hyper_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_hyper(const stage_exec *exec, const hyper_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    forward_job f = carve(exec, args, &a);
    if (f.job.tokens == 0) return QUERN_OK;
    fill_rows(f.job.kernels->rows, &args->weight, &f.job.norm);
    hyper_pack(exec, &f.job);
    hyper_add_parts(exec, &f.job);
    parallel_for(exec, f.job.tiles, run_tile, &f);
    return QUERN_OK;
}
