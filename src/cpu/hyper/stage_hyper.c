/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_hyper.c - the hyper_forward stage.
 *
 * A task is 24 tokens. Their sums over fn come first, chunk by chunk of 1024 channels, so that fn, which no
 * L2 holds, is read once for 24 tokens: 64 KB a token of 4 x 4096 channels, as much as its copies in f32.
 * Then each token's copies, which L2 or L3 still has, become its input and the new copies, 1024 channels at
 * a time. fn is packed by chunks first (its rows would share their places in the caches), where there is more
 * than one task. The chunks of up to TILE_GROUP tokens are tasks of their own; their sums are added in order,
 * as a tile adds them. Limit: the slower of the copies read and written once and 2 (J n + n + n (n + 1)) C
 * f32 operations a token.
 */
#include "cpu/hyper/stages.h"

#include "core/parallel.h"
#include "cpu/hyper/hyper.h"
#include "cpu/stages.h"

#include <string.h>

typedef struct forward_job {
    hyper_job job;
    hyper_tile *tiles; /* a thread's */
} forward_job;

static forward_job carve(const stage_exec *exec, const hyper_args *args, arena *a)
{
    forward_job f = {.job = hyper_plan(exec, args)};
    if (f.job.mixes && f.job.tokens > TILE_TOKENS) hyper_carve_packed(&f.job, a);
    if (f.job.mixes && f.job.tokens <= TILE_GROUP && exec->threads > 1) hyper_carve_parts(&f.job, a);
    f.tiles = arena_take(a, (size_t)exec->threads * sizeof *f.tiles);
    for (int32_t i = 0; i < exec->threads && f.job.tokens > 0; i++) {
        hyper_tile tile;
        hyper_carve_tile(&f.job, a, &tile);
        if (f.tiles != NULL) f.tiles[i] = tile;
    }
    return f;
}

/* The new copies of a token, [channel, channel + n). m [n][n + 1]: by copy, then f. */
static void expand(const hyper_job *job, int64_t token, const float *m, int64_t channel, int64_t n)
{
    const hyper_args *args = job->args;
    hyper_rows rows = {.from = args->x.dtype,
                       .ins = (int32_t)job->copies + 1,
                       .m = m,
                       .ldm = HYPER_INPUTS,
                       .to = args->x.dtype,
                       .outs = (int32_t)job->copies,
                       .n = n,
                       .stream = true};
    for (int64_t i = 0; i < job->copies; i++) {
        rows.in[i] = token_row(&args->x, token, i, channel);
        rows.out[i] = (void *)(uintptr_t)token_row(&args->out, token, i, channel);
        rows.stream = rows.stream && may_stream(rows.out[i], rows.to, n);
    }
    rows.in[job->copies] = token_row(&args->f, token, 0, channel);
    job->kernels->hyper->combine(&rows);
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
    float m[HYPER_COPIES * HYPER_INPUTS];
    for (int64_t k = 0; k < n && job->takes_f; k++) {
        for (int64_t j = 0; j < n; j++) m[k * HYPER_INPUTS + j] = w[2 * n + j * n + k];
        m[k * HYPER_INPUTS + n] = w[n + k];
    }
    for (int64_t channel = 0; channel < job->width; channel += CHUNK) {
        const int64_t count = least(job->width - channel, CHUNK);
        hyper_collapse(job, token, hyper_pre(job, tile, i), channel, count, tile->collapsed + channel);
        if (job->takes_f) expand(job, token, m, channel, count);
    }
    const row_kernels *rows = job->kernels->rows;
    rows->norm_row(tile->collapsed, job->norm.data, args->rms_eps, job->width, tile->collapsed);
    rows->convert(tile->collapsed, QUERN_F32, (void *)(uintptr_t)token_row(&args->h, token, 0, 0),
                  args->h.dtype, job->width);
    give(&args->pre, token, w, n);
    give(&args->post, token, w + n, n);
    give(&args->comb, token, w + 2 * n, n);
}

static void run_tile(void *arg, int64_t index, int32_t thread)
{
    const forward_job *f = arg;
    hyper_tile tile = f->tiles[thread];
    tile.token0 = index * TILE_TOKENS;
    tile.tokens = least(f->job.tokens - tile.token0, TILE_TOKENS);
    hyper_weigh(&f->job, &tile);
    for (int64_t i = 0; i < tile.tokens; i++) run_token(&f->job, &tile, i);
    f->job.kernels->rows->fence();
}

void cpu_hyper_kernel(const stage_exec *exec, const hyper_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "hyper", false, cpu_kernels_for(exec->cpu_level)->hyper->level);
}

static forward_job plan(const stage_exec *exec, const hyper_args *args, arena *a)
{
    forward_job f = carve(exec, args, a);
    f.job.norm = carve_rows(&args->weight, a);
    return f;
}

size_t cpu_hyper_workspace(const stage_exec *exec, const hyper_args *args)
{
    arena a = {NULL, 0};
    plan(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_hyper(const stage_exec *exec, const hyper_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    forward_job f = plan(exec, args, &a);
    if (f.job.tokens == 0) return QUERN_OK;
    fill_rows(f.job.kernels->rows, &args->weight, &f.job.norm);
    hyper_pack(exec, &f.job);
    hyper_add_parts(exec, &f.job, f.tiles);
    parallel_for(exec, (f.job.tokens + TILE_TOKENS - 1) / TILE_TOKENS, run_tile, &f);
    return QUERN_OK;
}
