/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_hyper_backward.c - the hyper_backward stage.
 *
 * Tokens go by tiles of 24, in three sweeps over each: the sums over fn again; token by token the gradients
 * of the weights, of f and of the collapsed copies; then, 256 channels at a time, the gradient of x and the
 * tile's share of fn's,
 *
 *   D = a fn, d_fn += a^T x        a: the gradient of the sums
 *   d_x_i = D_i + p_i d_c + b x_i + sum_k comb[i, k] d_out_k
 *
 * where two products of depth 24 take most of the time. Tiles follow one another in shares, which have sums
 * of fn's gradient, of the norm's, base's and scale's; at least 8 tiles to a share, so that a share's 24 x
 * 16384 sums are added rarely, and at most 64 shares, by the number of tokens alone. The shares are added in
 * order: bits do not depend on the threads. Limit: 2 (3 J n + 2 n n + 6 n) C f32 operations a token.
 */
#include "cpu/hyper/stages.h"

#include "core/parallel.h"
#include "cpu/hyper/hyper.h"

#include <string.h>

enum { SHARE_TILES = 8, SHARES = 64, TOKEN_CHANNELS = 512 /* of a token that L1 holds of all its rows */ };

/* What a share sums. */
typedef struct share_sums {
    float *d_fn;     /* [n chunks][CHUNK / PART][J][PART_LD] */
    float *d_weight; /* [width] */
    double *d_base, *d_scale;
} share_sums;

typedef struct backward_tile {
    hyper_tile tile;
    float *d_weights, *d_sums; /* [TILE_TOKENS][ld] */
    float *d_collapsed;        /* [TILE_TOKENS][width] */
    float *x, *d_x;            /* [TILE_TOKENS][PART_LD]; [n][TILE_TOKENS][PART_LD] */
    float *rows_out;           /* [HYPER_COPIES][CHUNK_LD]: of d_out, widened */
    float *row_f;              /* [CHUNK_LD] */
    float *trace;
} backward_tile;

typedef struct backward_job {
    hyper_job job;
    int64_t tiles, share_tiles, shares;
    int64_t parts; /* of a chunk's channels */
    backward_tile *threads;
    share_sums *sums;
} backward_job;

static int64_t fn_floats(const backward_job *b)
{
    return b->job.copies * b->job.chunks * b->parts * b->job.weights * PART_LD;
}

static void carve_thread(const backward_job *b, arena *a, backward_tile *t)
{
    const hyper_job *job = &b->job;
    const size_t floats = (size_t)(TILE_TOKENS * job->ld) * sizeof(float);
    hyper_carve_tile(job, a, &t->tile);
    t->d_weights = arena_take(a, floats);
    t->d_sums = arena_take(a, floats);
    t->d_collapsed = arena_take(a, (size_t)(TILE_TOKENS * round_up16(job->width)) * sizeof(float));
    t->x = arena_take(a, (size_t)(TILE_TOKENS * PART_LD) * sizeof(float));
    t->d_x = arena_take(a, (size_t)(job->copies * TILE_TOKENS * PART_LD) * sizeof(float));
    t->rows_out = arena_take(a, (size_t)(HYPER_COPIES * CHUNK_LD) * sizeof(float));
    t->row_f = arena_take(a, CHUNK_LD * sizeof(float));
    t->trace = arena_take(a, (size_t)hyper_trace_floats(job->copies, job->args->iterations) * sizeof(float));
}

static backward_job carve(const stage_exec *exec, const hyper_args *args, arena *a)
{
    backward_job b = {.job = hyper_plan(exec, args)};
    hyper_job *job = &b.job;
    job->norm = carve_rows(&args->weight, a);
    job->beside = args->d_out;
    if (job->mixes) hyper_carve_packed(job, a);
    b.tiles = (job->tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    b.shares = least((b.tiles + SHARE_TILES - 1) / SHARE_TILES, SHARES);
    b.share_tiles = b.shares > 0 ? (b.tiles + b.shares - 1) / b.shares : 0;
    b.parts = (least(job->width, CHUNK) + PART - 1) / PART;
    b.threads = arena_take(a, (size_t)exec->threads * sizeof *b.threads);
    for (int32_t i = 0; i < exec->threads && job->tokens > 0; i++) {
        backward_tile t;
        carve_thread(&b, a, &t);
        if (b.threads != NULL) b.threads[i] = t;
    }
    b.sums = arena_take(a, (size_t)b.shares * sizeof *b.sums);
    for (int64_t i = 0; i < b.shares; i++) {
        share_sums s = {NULL, NULL, NULL, NULL};
        if (is_present(&args->d_fn)) s.d_fn = arena_take(a, (size_t)fn_floats(&b) * sizeof(float));
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
    hyper_collapse(job, token, hyper_pre(job, &t->tile, i), 0, job->width, t->tile.collapsed);
    job->kernels->rows->convert(token_row(&args->d_h, token, 0, 0), args->d_h.dtype, d, QUERN_F32,
                                job->width);
    job->kernels->rows->norm_backward(t->tile.collapsed, job->norm.data, args->rms_eps, job->width, d,
                                      s->d_weight);
}

static void give_d_f(const hyper_job *job, int64_t token, const float *post, int64_t channel, int64_t n)
{
    const hyper_args *args = job->args;
    hyper_rows rows = {.from = args->d_out.dtype,
                       .ins = (int32_t)job->copies,
                       .m = post,
                       .out = {(void *)(uintptr_t)token_row(&args->d_f, token, 0, channel)},
                       .to = args->d_f.dtype,
                       .outs = 1,
                       .n = n};
    for (int64_t k = 0; k < job->copies; k++) rows.in[k] = token_row(&args->d_out, token, k, channel);
    job->kernels->hyper->combine(&rows);
}

/* d [J] of the token: what d_h and d_out say. Also its d_f. */
static void dot_token(const hyper_job *job, backward_tile *t, int64_t i, float *d)
{
    const hyper_args *args = job->args;
    const hyper_kernels *kernels = job->kernels->hyper;
    const bool out = is_present(&args->d_out), h = is_present(&args->d_h);
    const int64_t n = job->copies, token = t->tile.token0 + i;
    const float *d_c = t->d_collapsed + i * round_up16(job->width);
    for (int64_t channel = 0, count; channel < job->width && (out || h); channel += count) {
        int64_t ld_x, ld_out, ld_f;
        count = least(job->width - channel, TOKEN_CHANNELS);
        const float *x = hyper_widen(job, &args->x, token, channel, count, t->tile.rows, &ld_x);
        if (h) kernels->dots(n, 1, count, x, ld_x, d_c + channel, 0, d, 1, NULL);
        if (!out) continue;
        const float *d_out = hyper_widen(job, &args->d_out, token, channel, count, t->rows_out, &ld_out),
                    *f = hyper_widen(job, &args->f, token, channel, count, t->row_f, &ld_f);
        kernels->dots(n, n, count, x, ld_x, d_out, ld_out, d + 2 * n, n, NULL);
        kernels->dots(1, n, count, f, ld_f, d_out, ld_out, d + n, n, NULL);
        if (is_present(&args->d_f)) give_d_f(job, token, t->tile.weights + i * job->ld + n, channel, count);
    }
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
        memset((void *)(uintptr_t)token_row(&args->d_f, token, 0, 0), 0,
               (size_t)job->width * quern_dtype_size(args->d_f.dtype));
    if (is_present(&args->pre_in)) {
        for (int64_t k = 0; k < n && is_present(&args->d_pre_in); k++)
            float_row(&args->d_pre_in, token)[k] = d[k];
        memset(d, 0, (size_t)n * sizeof *d);
    }
    add_given(job, token, d);
}

/* ---- a part of the channels: the gradients of x and fn ---- */

/* The tile's rows of one copy, and zeros up to a multiple of 16. */
static void take_x(const hyper_job *job, const backward_tile *t, int64_t copy, int64_t channel, int64_t n)
{
    const quern_tensor *x = &job->args->x;
    for (int64_t i = 0; i < t->tile.tokens; i++) {
        float *to = t->x + i * PART_LD;
        job->kernels->rows->convert(token_row(x, t->tile.token0 + i, copy, channel), x->dtype, to, QUERN_F32,
                                    n);
        memset(to + n, 0, (size_t)(round_up16(n) - n) * sizeof *to);
    }
}

/* D of a copy, and the share of fn's gradient. */
static void multiply(const backward_job *b, const backward_tile *t, const share_sums *s, int64_t copy,
                     int64_t channel, int64_t n, float *d_x)
{
    const hyper_job *job = &b->job;
    const attention_kernels *kernels = job->kernels->attention;
    const int64_t chunk = copy * job->chunks + channel / CHUNK, at = channel % CHUNK, width = round_up16(n);
    const float *fn = job->packed + chunk * job->weights * CHUNK_LD + at;
    float *d_fn = s->d_fn != NULL ? s->d_fn + (chunk * b->parts + at / PART) * job->weights * PART_LD : NULL;
    for (int64_t column = 0; column < width; column += kernels->panel) {
        const int64_t columns = least(width - column, kernels->panel);
        kernels->mm_f32(t->tile.tokens, columns, job->weights, t->d_sums, job->ld, 1, fn + column, CHUNK_LD,
                        d_x + column, PART_LD, false);
        if (d_fn != NULL)
            kernels->mm_f32(job->weights, columns, t->tile.tokens, t->d_sums, 1, job->ld, t->x + column,
                            PART_LD, d_fn + column, PART_LD, true);
    }
}

/* The token's gradient of x. */
static void give_d_x(const hyper_job *job, const backward_tile *t, int64_t i, int64_t channel, int64_t n)
{
    const hyper_args *args = job->args;
    const int64_t copies = job->copies, token = t->tile.token0 + i;
    hyper_rows rows = {.from = args->x.dtype,
                       .ins = is_present(&args->d_out) ? (int32_t)copies : 0,
                       .m = t->tile.weights + i * job->ld + 2 * copies,
                       .ldm = copies,
                       .to = args->x.dtype,
                       .outs = (int32_t)copies,
                       .shared = t->d_collapsed + i * round_up16(job->width) + channel,
                       .shared_m = hyper_pre(job, &t->tile, i),
                       .own_m = job->mixes ? t->d_sums[i * job->ld + job->weights] : 0.0f,
                       .n = n,
                       .stream = true};
    for (int64_t k = 0; k < copies; k++) {
        rows.out[k] = (void *)(uintptr_t)token_row(&args->d_x, token, k, channel);
        rows.own[k] = token_row(&args->x, token, k, channel);
        if (rows.ins > 0) rows.in[k] = token_row(&args->d_out, token, k, channel);
        if (job->mixes) rows.add[k] = t->d_x + (k * TILE_TOKENS + i) * PART_LD;
        rows.stream = rows.stream && may_stream(rows.out[k], rows.to, n);
    }
    job->kernels->hyper->combine(&rows);
}

static void run_part(const backward_job *b, const backward_tile *t, const share_sums *s, int64_t channel)
{
    const hyper_job *job = &b->job;
    const int64_t n = least(job->width - channel, PART);
    for (int64_t copy = 0; copy < job->copies && job->mixes; copy++) {
        take_x(job, t, copy, channel, n);
        multiply(b, t, s, copy, channel, n, t->d_x + copy * TILE_TOKENS * PART_LD);
    }
    for (int64_t i = 0; i < t->tile.tokens; i++) give_d_x(job, t, i, channel, n);
}

/* ---- shares ---- */

static void run_tile(const backward_job *b, backward_tile *t, const share_sums *s, int64_t index)
{
    const hyper_job *job = &b->job;
    t->tile.token0 = index * TILE_TOKENS;
    t->tile.tokens = least(job->tokens - t->tile.token0, TILE_TOKENS);
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
    for (int64_t channel = 0; channel < job->width; channel += PART) run_part(b, t, s, channel);
}

static void run_share(void *arg, int64_t index, int32_t thread)
{
    const backward_job *b = arg;
    const hyper_job *job = &b->job;
    const share_sums *s = &b->sums[index];
    backward_tile t = b->threads[thread];
    if (s->d_fn != NULL) memset(s->d_fn, 0, (size_t)fn_floats(b) * sizeof *s->d_fn);
    memset(s->d_weight, 0, (size_t)job->width * sizeof *s->d_weight);
    for (int64_t j = 0; j < job->weights; j++) s->d_base[j] = 0;
    for (int j = 0; j < 3; j++) s->d_scale[j] = 0;
    const int64_t end = least((index + 1) * b->share_tiles, b->tiles);
    for (int64_t tile = index * b->share_tiles; tile < end; tile++) run_tile(b, &t, s, tile);
    job->kernels->rows->fence();
}

/* A chunk's channels of fn's gradient, of all shares. */
static void add_fn(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const backward_job *b = arg;
    const hyper_job *job = &b->job;
    const int64_t chunk = index / b->parts, copy = chunk / job->chunks,
                  channel = chunk % job->chunks * CHUNK + index % b->parts * PART,
                  n = least(job->width - channel, PART);
    for (int64_t j = 0; j < job->weights && n > 0; j++) {
        float *to = float_row(&job->args->d_fn, j) + copy * job->width + channel;
        memset(to, 0, (size_t)n * sizeof *to);
        for (int64_t s = 0; s < b->shares; s++)
            job->kernels->rows->add_scaled(to, b->sums[s].d_fn + (index * job->weights + j) * PART_LD, 1.0f,
                                           n);
    }
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
    if (is_present(&args->d_fn) && job->tokens > 0)
        parallel_for(exec, job->copies * job->chunks * b.parts, add_fn, &b);
    else if (is_present(&args->d_fn)) zero_fn(job);
    add_small(&b);
    return QUERN_OK;
}
