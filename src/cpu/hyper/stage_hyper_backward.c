/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_hyper_backward.c - the hyper_backward stage.
 *
 * Tokens go by tiles of 48, in three sweeps over each: the sums over fn again; token by token the gradients
 * of the weights, of f and of the collapsed copies; then, 256 channels at a time, the gradient of x and the
 * tile's share of fn's,
 *
 *   D = a fn, d_fn += a^T x        a: the gradient of the sums
 *   d_x_i = D_i + p_i d_c + b x_i + sum_k comb[i, k] d_out_k
 *
 * where two products of depth 24 and 48 take most of the time. fn, its gradient and D stay packed, in the
 * order in which rows of x are widened. Tiles follow one another in shares, which have sums of fn's gradient,
 * of the norm's, base's and scale's; some 4 tiles to a share, so that a share's 24 x 16384 sums are added
 * rarely, and at most 64 shares, by the number of tokens alone. The shares are added in order: bits do not
 * depend on the threads. Limit: 2 (3 J n + 2 n n + 6 n) C f32 operations a token.
 */
#include "cpu/hyper/stages.h"

#include "core/parallel.h"
#include "cpu/hyper/hyper.h"

#include <string.h>

enum {
    SHARE_TILES = 4,
    SHARES = 64,
    PART = 256,
    PART_LD = PART + 16 /* rows 1 KB apart would share sets of L1 */
};

/* What a share sums. */
typedef struct share_sums {
    float *d_fn;     /* [n pieces][piece_floats] */
    float *d_weight; /* [width] */
    double *d_base, *d_scale;
} share_sums;

typedef struct backward_tile {
    hyper_tile tile;
    float *d_weights, *d_sums; /* [TILE_TOKENS][ld] */
    float *d_collapsed;        /* [TILE_TOKENS][width] */
    float *d_x;                /* [n][TILE_TOKENS][PART_LD] */
    float *trace;
} backward_tile;

typedef struct backward_job {
    hyper_job job;
    int64_t shares;
    backward_tile *threads;
    share_sums *sums;
} backward_job;

static int64_t fn_floats(const hyper_job *job)
{
    return job->copies * job->pieces * job->piece_floats;
}

static void carve_thread(const hyper_job *job, arena *a, backward_tile *t)
{
    const size_t floats = (size_t)(TILE_TOKENS * job->ld) * sizeof(float);
    hyper_carve_tile(job, a, &t->tile);
    t->d_weights = arena_take(a, floats);
    t->d_sums = arena_take(a, floats);
    t->d_collapsed = arena_take(a, (size_t)(TILE_TOKENS * round_up16(job->width)) * sizeof(float));
    t->d_x = arena_take(a, (size_t)(job->copies * TILE_TOKENS * PART_LD) * sizeof(float));
    t->trace = arena_take(a, (size_t)hyper_trace_floats(job->copies, job->args->iterations) * sizeof(float));
}

static backward_job carve(const stage_exec *exec, const hyper_args *args, arena *a)
{
    backward_job b = {.job = hyper_plan(exec, args, true, a)};
    hyper_job *job = &b.job;
    job->norm = carve_rows(&args->weight, a);
    job->beside = args->d_out;
    b.shares = least((job->tiles + SHARE_TILES - 1) / SHARE_TILES, SHARES);
    b.threads = arena_take(a, (size_t)exec->threads * sizeof *b.threads);
    for (int32_t i = 0; i < exec->threads && job->tokens > 0; i++) {
        backward_tile t;
        carve_thread(job, a, &t);
        if (b.threads != NULL) b.threads[i] = t;
    }
    b.sums = arena_take(a, (size_t)b.shares * sizeof *b.sums);
    for (int64_t i = 0; i < b.shares; i++) {
        share_sums s = {NULL, NULL, NULL, NULL};
        if (is_present(&args->d_fn)) s.d_fn = arena_take(a, (size_t)fn_floats(job) * sizeof(float));
        s.d_weight = arena_take(a, (size_t)round_up16(job->width) * sizeof(float));
        s.d_base = arena_take(a, (size_t)job->weights * sizeof(double));
        s.d_scale = arena_take(a, 3 * sizeof(double));
        if (b.sums != NULL) b.sums[i] = s;
    }
    return b;
}

/* ---- a token: the gradients of its weights ---- */

/* The collapsed copies' gradient, from d_h; 0 without it. */
static void take_d_h(const hyper_job *job, backward_tile *t, const share_sums *s, int64_t i)
{
    const hyper_args *args = job->args;
    const int64_t token = t->tile.token0 + i;
    float *d = t->d_collapsed + i * round_up16(job->width);
    if (!is_present(&args->d_h)) {
        memset(d, 0, (size_t)job->width * sizeof *d);
        return;
    }
    hyper_mix rows = {.copies = (int32_t)job->copies,
                      .dtype = args->x.dtype,
                      .n = job->width,
                      .pre = hyper_pre(job, &t->tile, i),
                      .collapsed = t->tile.collapsed};
    for (int64_t k = 0; k < job->copies; k++) rows.x[k] = token_row(&args->x, token, k, 0);
    (void)job->kernels->hyper->mix(&rows);
    job->kernels->rows->convert(token_row(&args->d_h, token, 0, 0), args->d_h.dtype, d, QUERN_F32,
                                job->width);
    job->kernels->rows->norm_backward(t->tile.collapsed, job->norm.data, args->rms_eps, job->width, d,
                                      s->d_weight);
}

/* d [J] of the token: what d_h and d_out say. Also its d_f. */
static void dot_token(const hyper_job *job, const backward_tile *t, int64_t i, float *d)
{
    const hyper_args *args = job->args;
    const int64_t n = job->copies, token = t->tile.token0 + i;
    hyper_token rows = {.copies = (int32_t)n,
                        .from = args->x.dtype,
                        .n = job->width,
                        .post = t->tile.weights + i * job->ld + n,
                        .d = d};
    if (is_present(&args->d_h)) rows.d_collapsed = t->d_collapsed + i * round_up16(job->width);
    for (int64_t k = 0; k < n; k++) rows.x[k] = token_row(&args->x, token, k, 0);
    for (int64_t k = 0; k < n && is_present(&args->d_out); k++)
        rows.d_out[k] = token_row(&args->d_out, token, k, 0);
    if (is_present(&args->d_out)) rows.f = token_row(&args->f, token, 0, 0);
    if (is_present(&args->d_out) && is_present(&args->d_f)) rows.d_f = token_row(&args->d_f, token, 0, 0);
    job->kernels->hyper->dots(&rows);
}

/* Adds what the caller has of the weights' gradients. */
static void add_given(const hyper_job *job, int64_t token, float *d)
{
    const hyper_args *args = job->args;
    const int64_t n = job->copies;
    for (int64_t k = 0; k < n; k++) {
        if (is_present(&args->d_pre)) d[k] += float_row(&args->d_pre, token)[k];
        if (is_present(&args->d_post)) d[n + k] += float_row(&args->d_post, token)[k];
        for (int64_t j = 0; j < n && is_present(&args->d_comb); j++)
            d[2 * n + k * n + j] += (float_row(&args->d_comb, token) + k * args->d_comb.strides[1])[j];
    }
}

static void run_token(const hyper_job *job, backward_tile *t, const share_sums *s, int64_t i)
{
    const hyper_args *args = job->args;
    const int64_t n = job->copies, token = t->tile.token0 + i;
    float *d = t->d_weights + i * job->ld;
    memset(d, 0, (size_t)job->ld * sizeof *d);
    take_d_h(job, t, s, i);
    dot_token(job, t, i, d);
    if (is_present(&args->d_f) && !is_present(&args->d_out))
        memset(token_row(&args->d_f, token, 0, 0), 0, (size_t)job->width * quern_dtype_size(args->d_f.dtype));
    if (is_present(&args->pre_in)) {
        for (int64_t k = 0; k < n && is_present(&args->d_pre_in); k++)
            float_row(&args->d_pre_in, token)[k] = d[k];
        memset(d, 0, (size_t)n * sizeof *d);
    }
    add_given(job, token, d);
}

/* ---- a part of the channels: the gradients of x and fn ---- */

/* D of a copy, and the share of fn's gradient. */
static void multiply(const hyper_job *job, const backward_tile *t, const share_sums *s, int64_t copy,
                     int64_t channel, int64_t n)
{
    const quern_tensor *x = &job->args->x;
    const int64_t piece = channel / PIECE, at = (copy * job->pieces + piece) * job->piece_floats;
    const hyper_outer o = {.a = t->d_sums,
                           .rows = t->tile.tokens,
                           .columns = job->weights,
                           .lda = job->ld,
                           .first = channel % PIECE,
                           .n = n,
                           .piece = least(job->width - piece * PIECE, PIECE),
                           .fn = job->packed + at,
                           .out = t->d_x + copy * TILE_TOKENS * PART_LD,
                           .ld_out = PART_LD,
                           .x = token_row(x, t->tile.token0, copy, channel),
                           .from = x->dtype,
                           .ld_x = x->strides[0],
                           .d_fn = s->d_fn != NULL ? s->d_fn + at : NULL};
    job->kernels->hyper->times_fn(&o);
    if (s->d_fn != NULL) job->kernels->hyper->add_outer(&o);
}

/* The token's gradient of x. */
static void give_d_x(const hyper_job *job, const backward_tile *t, int64_t i, int64_t channel, int64_t n)
{
    const hyper_args *args = job->args;
    const int64_t copies = job->copies, token = t->tile.token0 + i;
    hyper_gradient rows = {.copies = (int32_t)copies,
                           .dtype = args->x.dtype,
                           .n = n,
                           .pre = hyper_pre(job, &t->tile, i),
                           .comb = t->tile.weights + i * job->ld + 2 * copies,
                           .d_collapsed = t->d_collapsed + i * round_up16(job->width) + channel,
                           .square = job->mixes ? t->d_sums[i * job->ld + job->weights] : 0.0f,
                           .d_sums = job->mixes ? t->d_x + i * PART_LD : NULL,
                           .ld_sums = TILE_TOKENS * PART_LD,
                           .stream = true};
    for (int64_t k = 0; k < copies; k++) {
        rows.x[k] = token_row(&args->x, token, k, channel);
        if (is_present(&args->d_out)) rows.d_out[k] = token_row(&args->d_out, token, k, channel);
        rows.d_x[k] = token_row(&args->d_x, token, k, channel);
        rows.stream = rows.stream && may_stream(rows.d_x[k], rows.dtype, n);
    }
    job->kernels->hyper->mix_backward(&rows);
}

static void run_part(const hyper_job *job, const backward_tile *t, const share_sums *s, int64_t channel)
{
    const int64_t n = least(job->width - channel, PART);
    for (int64_t copy = 0; copy < job->copies && job->mixes; copy++) multiply(job, t, s, copy, channel, n);
    for (int64_t i = 0; i < t->tile.tokens; i++) give_d_x(job, t, i, channel, n);
}

/* ---- shares ---- */

static void run_tile(const hyper_job *job, backward_tile *t, const share_sums *s, int64_t index)
{
    hyper_take_tile(job, index, &t->tile);
    hyper_weigh(job, &t->tile);
    for (int64_t i = 0; i < t->tile.tokens; i++) run_token(job, t, s, i);
    if (job->mixes) {
        hyper_weights w = hyper_weights_of(job, &t->tile);
        w.d_weights = t->d_weights;
        w.d_sums = t->d_sums;
        w.trace = t->trace;
        w.d_base = s->d_base;
        w.d_scale = s->d_scale;
        job->kernels->hyper->weights_backward(&w);
    }
    for (int64_t channel = 0; channel < job->width; channel += PART) run_part(job, t, s, channel);
}

static void run_share(void *arg, int64_t index, int32_t thread)
{
    const backward_job *b = arg;
    const hyper_job *job = &b->job;
    const share_sums *s = &b->sums[index];
    backward_tile t = b->threads[thread];
    if (s->d_fn != NULL) memset(s->d_fn, 0, (size_t)fn_floats(job) * sizeof *s->d_fn);
    memset(s->d_weight, 0, (size_t)job->width * sizeof *s->d_weight);
    for (int64_t j = 0; j < job->weights; j++) s->d_base[j] = 0;
    for (int j = 0; j < 3; j++) s->d_scale[j] = 0;
    const int64_t end = job->tiles * (index + 1) / b->shares;
    for (int64_t tile = job->tiles * index / b->shares; tile < end; tile++) run_tile(job, &t, s, tile);
    job->kernels->rows->fence();
}

/* A piece of fn's gradient, of all shares. */
static void add_fn(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const backward_job *b = arg;
    const hyper_job *job = &b->job;
    const int64_t copy = index / job->pieces, channel = index % job->pieces * PIECE,
                  n = least(job->width - channel, PIECE), at = index * job->piece_floats;
    float *sum = b->sums[0].d_fn + at;
    for (int64_t s = 1; s < b->shares; s++)
        job->kernels->rows->add_scaled(sum, b->sums[s].d_fn + at, 1.0f,
                                       hyper_packed_floats(job->kernels->hyper, n, job->weights));
    job->kernels->hyper->unpack(sum, job->weights, n, job->args->x.dtype,
                                float_row(&job->args->d_fn, 0) + copy * job->width + channel,
                                job->args->d_fn.strides[0]);
}

static void add_small(const backward_job *b)
{
    const hyper_args *args = b->job.args;
    float *weight = args->d_weight.data, *base = args->d_base.data, *scale = args->d_scale.data;
    if (is_present(&args->d_weight)) memset(weight, 0, (size_t)b->job.width * sizeof *weight);
    for (int64_t s = 0; s < b->shares && is_present(&args->d_weight); s++)
        b->job.kernels->rows->add_scaled(weight, b->sums[s].d_weight, 1.0f, b->job.width);
    for (int64_t j = 0; j < b->job.weights && is_present(&args->d_base); j++) {
        double sum = 0;
        for (int64_t s = 0; s < b->shares; s++) sum += b->sums[s].d_base[j];
        base[j] = (float)sum;
    }
    for (int64_t j = 0; j < (args->head ? 1 : 3) && is_present(&args->d_scale); j++) {
        double sum = 0;
        for (int64_t s = 0; s < b->shares; s++) sum += b->sums[s].d_scale[j];
        scale[j] = (float)sum;
    }
}

/* Without tokens. */
static void zero_fn(const hyper_job *job)
{
    for (int64_t j = 0; j < job->weights; j++)
        memset(float_row(&job->args->d_fn, j), 0, (size_t)(job->copies * job->width) * sizeof(float));
}

size_t cpu_hyper_backward_workspace(const stage_exec *exec, const hyper_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_hyper_backward(const stage_exec *exec, const hyper_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    backward_job b = carve(exec, args, &a);
    hyper_job *job = &b.job;
    if (job->tokens > 0) {
        fill_rows(job->kernels->rows, &args->weight, &job->norm);
        hyper_pack(exec, job);
        parallel_for(exec, b.shares, run_share, &b);
    }
    if (is_present(&args->d_fn) && job->tokens > 0) parallel_for(exec, job->copies * job->pieces, add_fn, &b);
    else if (is_present(&args->d_fn)) zero_fn(job);
    add_small(&b);
    return QUERN_OK;
}
