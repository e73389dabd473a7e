/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_mqa_backward.c - the backward stage. With P = e^(s - lse'), lse' = log(e^lse + e^sink), and dO
 * rotated:
 *
 *   delta = rowsum(dO o O);  dS = P o (dO K^T - delta) scale;  dQ = dS K;  dK = dS^T Q + P^T dO;
 *   dsink = -sum e^(sink - lse') delta
 *
 * Two rounds of tasks process a chunk of a sequence's queries. In the first every query is a task: it makes
 * P, dS and dQ, and packs its heads of Q and dO as the B of the other product. In the second every panel of
 * channels is a task: for each row that the queries attended to it adds their contributions in the order of
 * the queries. The owner of a sum computes it, so there is one order of additions and no atomic. P and dS of
 * a query with 64 heads and 640 keys take 160 KB in bf16. They are read once per panel, 8 times at D = 512,
 * and the last-level cache holds a chunk's. Limit: the products, five against the forward's two.
 */
#include "core/parallel.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/attend_mqa/mqa.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <math.h>
#include <string.h>

enum { CHUNK_BYTES = 16 << 20, CHUNK_MOST = 1024, OWNER_KEYS = 96 };

/* What the second round needs of a query of a chunk. */
typedef struct mqa_slot {
    mqa_keys keys;
    int32_t *list;
    void *p, *ds; /* [keys][columns], bf16 or floats */
    float *q,
        *d_o; /* B of products over heads: [panels][columns / 2][panel] words, or [columns][pitch] floats */
    float *sink_terms; /* [columns] */
} mqa_slot;

typedef struct mqa_work {
    mqa_tile tile;
    float *q_columns, *d_o_columns, *dp, *d_q;
    uint32_t *ds_pairs;
    float *rows, *row, *angles; /* rows: [columns][pitch] words; row: two of f32 */
    float *lse, *top, *factor, *delta, *max, *sum, *mean, *shrink; /* [columns] */
    float *sums;                                                   /* [OWNER_KEYS][panel] */
} mqa_work;

typedef struct backward_job {
    mqa_plan plan;
    mqa_starts starts;
    mqa_work *work; /* one per thread */
    mqa_slot *slots;
    int64_t chunk;            /* slots */
    float *d_raw, *d_entries; /* [rows][width] of the current sequence; NULL: not wanted */
    double *d_sink;
    mqa_sequence seq;
    int64_t first; /* query of slot 0 */
    int64_t count; /* slots in use */
} backward_job;

static int64_t panels_of(const mqa_plan *p)
{
    return (p->width + p->panel - 1) / p->panel;
}

static size_t heads_bytes(const mqa_plan *p)
{
    return (size_t)(p->bf16 ? panels_of(p) * p->columns / 2 * p->panel : p->columns * p->pitch) *
           sizeof(float);
}

static void carve_slot(const mqa_plan *p, arena *a, mqa_slot *s)
{
    const size_t scores =
        (size_t)(mqa_keys_most(p) * p->columns) * (p->bf16 ? sizeof(uint16_t) : sizeof(float));
    s->list = arena_take(a, (size_t)(p->list > 0 ? p->list : 0) * sizeof *s->list);
    s->p = arena_take(a, scores);
    s->ds = arena_take(a, scores);
    s->q = arena_take(a, heads_bytes(p));
    s->d_o = arena_take(a, heads_bytes(p));
    s->sink_terms = arena_take(a, (size_t)p->columns * sizeof *s->sink_terms);
}

static void carve_work(const mqa_plan *p, arena *a, mqa_work *w)
{
    const size_t scores = (size_t)(MQA_TILE * p->columns) * sizeof(float),
                 columns = (size_t)p->columns * sizeof(float);
    mqa_tile_carve(p, a, &w->tile);
    w->q_columns = arena_take(a, mqa_columns_bytes(p));
    w->d_o_columns = arena_take(a, mqa_columns_bytes(p));
    w->dp = arena_take(a, p->bf16 ? 2 * scores : 0); /* with S; floats stand in the slot */
    w->ds_pairs = arena_take(a, p->bf16 ? scores / 2 : 0);
    w->d_q = arena_take(a, (size_t)(p->heads * p->width) * sizeof *w->d_q);
    w->rows = arena_take(a, (size_t)(p->columns * p->pitch) * sizeof *w->rows);
    w->row = arena_take(a, (size_t)(2 * p->width) * sizeof *w->row);
    w->angles = arena_take(a, (size_t)p->rope * sizeof *w->angles);
    float **of_heads[] = {&w->lse, &w->top, &w->factor, &w->delta, &w->max, &w->sum, &w->mean, &w->shrink};
    for (size_t i = 0; i < sizeof of_heads / sizeof *of_heads; i++) *of_heads[i] = arena_take(a, columns);
    w->sums = arena_take(a, (size_t)(OWNER_KEYS * p->panel) * sizeof *w->sums);
}

static backward_job carve(const stage_exec *exec, const attend_mqa_args *args, arena *a)
{
    backward_job job = {.plan = mqa_plan_of(exec, args)};
    const mqa_plan *p = &job.plan;
    arena one = {NULL, 0};
    mqa_slot slot;
    carve_slot(p, &one, &slot);
    job.chunk = CHUNK_BYTES / (int64_t)(one.used + 1);
    if (job.chunk > CHUNK_MOST) job.chunk = CHUNK_MOST;
    if (job.chunk > args->seqs.n_q) job.chunk = args->seqs.n_q;
    if (job.chunk < 1) job.chunk = 1;
    mqa_starts_carve(p, a, &job.starts);
    job.work = arena_take(a, sizeof *job.work * (size_t)exec->threads);
    job.slots = arena_take(a, sizeof *job.slots * (size_t)job.chunk);
    for (int32_t i = 0; i < exec->threads; i++) {
        mqa_work w;
        carve_work(p, a, &w);
        if (a->base != NULL) job.work[i] = w;
    }
    for (int64_t i = 0; i < job.chunk; i++) {
        carve_slot(p, a, &slot);
        if (a->base != NULL) job.slots[i] = slot;
    }
    if (is_present(&args->d_kv))
        job.d_raw = arena_take(a, (size_t)(args->seqs.n_kv * p->width) * sizeof *job.d_raw);
    if (is_present(&args->d_entries))
        job.d_entries = arena_take(a, (size_t)(args->entries.shape[1] * p->width) * sizeof *job.d_entries);
    job.d_sink = arena_take(a, (size_t)p->heads * sizeof *job.d_sink);
    return job;
}

/* ---- a query ---- */

static double sink_of(const attend_mqa_args *a, int64_t h)
{
    return is_present(&a->sink) ? (double)((const float *)a->sink.data)[h] : -INFINITY;
}

/* Sets top and factor of a head, so that P = exp2((s - top) scale2) factor is over the sum of lse and the
 * sink, and its share of dsink. `top`: close to lse / scale. */
static void take_lse(const backward_job *job, int64_t h, float top, double lse, mqa_work *w, mqa_slot *slot)
{
    const mqa_plan *p = &job->plan;
    const double sink = sink_of(p->args, h), above = (double)top - lse / (double)p->args->scale;
    w->top[h] = top;
    w->factor[h] = (float)(exp2(above * (double)p->scale2) / (1 + exp(sink - lse)));
    slot->sink_terms[h] = (float)((double)w->delta[h] / (1 + exp(lse - sink)));
}

/* Reads a head's lse: that of no keys where the sink leaves them nothing. Returns whether it is coarse. */
static bool head_terms(const backward_job *job, int64_t row, int64_t h, float delta, mqa_work *w,
                       mqa_slot *slot)
{
    const attend_mqa_args *a = job->plan.args;
    const float lse =
        sink_of(a, h) == INFINITY ? -INFINITY : *(const float *)row_at(&a->lse, job->seq.view_b, h, row);
    w->lse[h] = lse;
    w->top[h] = INFINITY;
    w->factor[h] = 0.0f;
    w->delta[h] = delta;
    slot->sink_terms[h] = 0.0f;
    if (lse != -INFINITY) take_lse(job, h, lse / a->scale, (double)lse, w, slot);
    return lse_is_coarse(lse, a->q.dtype);
}

/* Packs rows of heads as the B of products over heads; a head that sees nothing is 0. */
static void pack_heads(const mqa_plan *p, mqa_work *w, float *rows, float *to)
{
    for (int64_t h = 0; h < p->columns; h++)
        if (w->top[h] == INFINITY) memset(rows + h * p->pitch, 0, (size_t)p->pitch * sizeof *rows);
    const int64_t panel_words = p->columns / 2 * p->panel;
    for (int64_t c = 0; p->bf16 && c < p->dim; c += MAX_DIM) {
        const int64_t dim = p->dim - c < MAX_DIM ? p->dim - c : MAX_DIM;
        const row_source src = {(const uint16_t *)rows + c, QUERN_BF16, 2 * p->pitch, p->columns, dim};
        p->kernels->pack_values_bf16(&src, (int32_t)p->panel, (uint32_t *)to + c / p->panel * panel_words,
                                     panel_words);
    }
    if (!p->bf16) memcpy(to, rows, (size_t)(p->columns * p->pitch) * sizeof *to);
}

static void copy_heads(const mqa_plan *p, const row_source *src, float *to)
{
    if (p->bf16) p->kernels->pack_rows_bf16(src, (uint16_t *)to, 2 * p->pitch);
    else p->kernels->pack_rows_f32(src, 1.0f, to, p->pitch);
}

/* Writes rotated dO as rows in the dtype of the products, and delta of every head. Returns whether some head
 * is coarse. */
static bool take_d_o(const backward_job *job, int64_t row, int64_t position, mqa_work *w, mqa_slot *slot)
{
    const mqa_plan *p = &job->plan;
    const row_source d_o = mqa_heads(&p->args->d_o, job->seq.view_b, row),
                     o = mqa_heads(&p->args->o, job->seq.view_b, row);
    bool coarse = false;
    if (p->rope > 0) mqa_angles(p, position, w->angles);
    for (int64_t h = p->heads; h < p->columns; h++) {
        w->lse[h] = -INFINITY;
        w->top[h] = INFINITY;
        w->factor[h] = w->delta[h] = 0.0f;
    }
    for (int64_t h = 0; h < p->heads; h++) {
        const int64_t element = (int64_t)quern_dtype_size(d_o.dtype);
        const row_source a = {(const char *)d_o.data + h * d_o.stride * element, d_o.dtype, p->dim, 1,
                              p->dim};
        const row_source b = {(const char *)o.data + h * o.stride * element, o.dtype, p->dim, 1, p->dim};
        float lanes[16] = {0}, delta = 0.0f, *x = w->row, *y = w->row + p->width;
        p->kernels->pack_rows_f32(&a, 1.0f, x, p->width);
        p->kernels->pack_rows_f32(&b, 1.0f, y, p->width);
        for (int64_t c = 0; c < p->width; c += 16)
            for (int i = 0; i < 16; i++) lanes[i] += x[c + i] * y[c + i];
        for (int i = 0; i < 16; i++) delta += lanes[i];
        coarse |= head_terms(job, row, h, delta, w, slot);
        if (p->rope > 0)
            p->level->rows->rotate_row(x + p->dim - p->rope, w->angles, w->angles + p->rope / 2, p->rope,
                                       false);
        p->level->rows->convert(x, QUERN_F32, w->rows + h * p->pitch, p->bf16 ? QUERN_BF16 : QUERN_F32,
                                p->dim);
    }
    return coarse;
}

/* A tile's S and dP: in the slot, or for bf16 beside it. */
static void tile_scores(const mqa_plan *p, int64_t first, const mqa_work *w, const mqa_slot *slot, float **s,
                        float **dp)
{
    *s = p->bf16 ? w->dp + MQA_TILE * p->columns : (float *)slot->p + first * p->columns;
    *dp = p->bf16 ? w->dp : (float *)slot->ds + first * p->columns;
    mqa_scores(p, &w->tile, w->q_columns, *s, NULL);
    mqa_scores(p, &w->tile, w->d_o_columns, *dp, NULL);
}

static void fill_tile(const backward_job *job, const mqa_slot *slot, int64_t first, mqa_work *w)
{
    const int64_t rest = slot->keys.n - first;
    mqa_tile_fill(&job->plan, &job->seq, &slot->keys, first, rest < MQA_TILE ? rest : MQA_TILE, &w->tile);
}

/* Runs through the query's keys for the largest score, the sum of P and the mean of dP of every head. Coarse
 * heads take their lse and delta from them. */
static void weigh(const backward_job *job, mqa_work *w, mqa_slot *slot)
{
    const mqa_plan *p = &job->plan;
    for (int64_t h = 0; h < p->columns; h++) {
        w->max[h] = -INFINITY;
        w->sum[h] = w->mean[h] = 0.0f;
    }
    for (int64_t first = 0; first < slot->keys.n; first += MQA_TILE) {
        float *s, *dp;
        fill_tile(job, slot, first, w);
        tile_scores(p, first, w, slot, &s, &dp);
        const mqa_softmax soft = {s,      (int32_t)w->tile.n, (int32_t)p->columns, p->scale2, w->max,
                                  w->sum, w->shrink};
        p->rows->mqa_softmax_f32(&soft);
        for (int64_t h = 0; h < p->columns; h++) w->mean[h] *= w->shrink[h];
        for (int64_t i = 0; i < w->tile.n; i++)
            for (int64_t h = 0; h < p->columns; h++)
                w->mean[h] += s[i * p->columns + h] * dp[i * p->columns + h];
    }
    for (int64_t h = 0; h < p->heads; h++) {
        if (!lse_is_coarse(w->lse[h], p->args->q.dtype)) continue;
        const double sum = (double)w->sum[h], sink = sink_of(p->args, h),
                     lse = (double)w->max[h] * (double)p->args->scale + log(sum);
        w->delta[h] = (float)((double)w->mean[h] / sum / (1 + exp(sink - lse)));
        take_lse(job, h, w->max[h], lse, w, slot);
    }
}

/* Writes P and dS of a tile of keys from `first` on into the slot. Returns dS as the A of dQ = dS K. */
static const float *tile_gradient(const mqa_plan *p, int64_t first, mqa_work *w, mqa_slot *slot)
{
    const int64_t at = first * p->columns;
    float *s, *dp;
    tile_scores(p, first, w, slot, &s, &dp);
    /* One key without a sink: P is exactly 1 and dS 0. */
    for (int64_t h = 0; h < p->heads && slot->keys.n == 1; h++)
        if (sink_of(p->args, h) == -INFINITY) w->delta[h] = dp[h];
    mqa_gradient g = {.s = s,
                      .dp = dp,
                      .keys = (int32_t)w->tile.n,
                      .heads = (int32_t)p->columns,
                      .scale2 = p->scale2,
                      .scale = p->args->scale,
                      .top = w->top,
                      .factor = w->factor,
                      .delta = w->delta,
                      .ds_pairs = w->ds_pairs};
    if (!p->bf16) {
        p->rows->mqa_gradient_f32(&g);
        return dp;
    }
    g.p = (uint16_t *)slot->p + at;
    g.ds = (uint16_t *)slot->ds + at;
    p->rows->mqa_gradient_bf16(&g);
    return (const float *)w->ds_pairs;
}

static void store_d_q(const backward_job *job, int64_t row, bool any, mqa_work *w)
{
    const mqa_plan *p = &job->plan;
    const quern_tensor *t = &p->args->d_q;
    for (int64_t h = 0; is_present(t) && h < p->heads; h++) {
        float *d_q = w->d_q + h * p->width;
        if (!any || w->top[h] == INFINITY) memset(d_q, 0, (size_t)p->width * sizeof *d_q);
        mqa_store(p, d_q, t, job->seq.view_b * t->strides[0] + row * t->strides[1] + h * t->strides[2]);
    }
}

static void run_query(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const mqa_plan *p = &job->plan;
    mqa_work *w = &job->work[thread];
    mqa_slot *slot = &job->slots[index];
    const int64_t query = job->first + index, row = job->seq.query0 + query;
    const row_source q = mqa_heads(&p->args->q, job->seq.view_b, row);
    slot->keys = mqa_keys_of(p, &job->seq, query, slot->list);
    const bool coarse = take_d_o(job, row, job->seq.position + query, w, slot);
    const row_source d_o = {w->rows, p->bf16 ? QUERN_BF16 : QUERN_F32, p->bf16 ? 2 * p->pitch : p->pitch,
                            p->heads, p->dim};
    if (slot->keys.n > 0) {
        mqa_pack_columns(p, &q, w->q_columns);
        mqa_pack_columns(p, &d_o, w->d_o_columns);
        pack_heads(p, w, w->rows, slot->d_o);
        copy_heads(p, &q, w->rows);
        pack_heads(p, w, w->rows, slot->q);
    }
    if (coarse && slot->keys.n > 0) weigh(job, w, slot);
    for (int64_t first = 0; first < slot->keys.n; first += MQA_TILE) {
        fill_tile(job, slot, first, w);
        const float *ds = tile_gradient(p, first, w, slot);
        if (is_present(&p->args->d_q)) mqa_values(p, &w->tile, ds, w->d_q, first > 0, NULL);
    }
    store_d_q(job, row, slot->keys.n > 0, w);
}

/* ---- a panel of channels ---- */

/* sums [n][panel] of the channels from c on = P^T dO + dS^T Q, for keys from `first` on. */
static void key_sums(const mqa_plan *p, const mqa_slot *slot, int64_t first, int64_t n, int64_t c,
                     float *sums)
{
    const int64_t width = p->width - c < p->panel ? p->width - c : p->panel, at = first * p->columns;
    const int64_t offset = p->bf16 ? c / p->panel * (p->columns / 2 * p->panel) : c;
    if (p->bf16) {
        p->kernels->mm_bf16(n, width, p->columns / 2, (const uint16_t *)slot->p + at, p->columns / 2, 1,
                            slot->d_o + offset, p->panel, sums, p->panel, false);
        p->kernels->mm_bf16(n, width, p->columns / 2, (const uint16_t *)slot->ds + at, p->columns / 2, 1,
                            slot->q + offset, p->panel, sums, p->panel, true);
    } else {
        p->kernels->mm_f32(n, width, p->heads, (const float *)slot->p + at, p->columns, 1, slot->d_o + offset,
                           p->pitch, sums, p->panel, false);
        p->kernels->mm_f32(n, width, p->heads, (const float *)slot->ds + at, p->columns, 1, slot->q + offset,
                           p->pitch, sums, p->panel, true);
    }
}

/* The row that sums the gradient of key i of a query; NULL: not wanted. */
static float *owned_row(const backward_job *job, const mqa_keys *keys, int64_t i)
{
    if (i < keys->raw) return job->d_raw != NULL ? job->d_raw + (keys->raw0 + i) * job->plan.width : NULL;
    const int64_t entry = keys->list != NULL ? keys->list[i - keys->raw] : i - keys->raw;
    return job->d_entries != NULL ? job->d_entries + entry * job->plan.width : NULL;
}

static void run_panel(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const mqa_plan *p = &job->plan;
    float *sums = job->work[thread].sums;
    const int64_t c = index * p->panel, width = p->width - c < p->panel ? p->width - c : p->panel;
    for (int64_t i = 0; i < job->count; i++) {
        const mqa_slot *slot = &job->slots[i];
        for (int64_t first = 0, n; first < slot->keys.n; first += n) {
            n = slot->keys.n - first < OWNER_KEYS ? slot->keys.n - first : OWNER_KEYS;
            for (int64_t k = 0; k < n; k++) {
                const float *to = owned_row(job, &slot->keys, first + k);
                for (int64_t d = 0; to != NULL && d < width; d += 16) __builtin_prefetch(to + c + d, 1);
            }
            key_sums(p, slot, first, n, c, sums);
            for (int64_t k = 0; k < n; k++) {
                float *to = owned_row(job, &slot->keys, first + k);
                for (int64_t d = 0; to != NULL && d < width; d++) to[c + d] += sums[k * p->panel + d];
            }
        }
    }
}

/* ---- a sequence ---- */

static void store_rows(const mqa_plan *p, const float *sums, const quern_tensor *t, int64_t b, int64_t first,
                       int64_t rows)
{
    for (int64_t n = 0; sums != NULL && n < rows; n++)
        mqa_store(p, sums + n * p->width, t, b * t->strides[0] + (first + n) * t->strides[1]);
}

static void run_sequence(const stage_exec *exec, backward_job *job, int64_t b)
{
    const mqa_plan *p = &job->plan;
    job->seq = mqa_sequence_at(p, &job->starts, b);
    const mqa_sequence *s = &job->seq;
    if (job->d_raw != NULL) memset(job->d_raw, 0, (size_t)(s->raw * p->width) * sizeof *job->d_raw);
    if (job->d_entries != NULL)
        memset(job->d_entries, 0, (size_t)(s->entries * p->width) * sizeof *job->d_entries);
    for (job->first = 0; job->first < s->queries; job->first += job->count) {
        job->count = s->queries - job->first < job->chunk ? s->queries - job->first : job->chunk;
        parallel_for(exec, job->count, run_query, job);
        if (job->d_raw != NULL || job->d_entries != NULL) parallel_for(exec, panels_of(p), run_panel, job);
        for (int64_t i = 0; i < job->count; i++)
            for (int64_t h = 0; h < p->heads; h++) job->d_sink[h] -= (double)job->slots[i].sink_terms[h];
    }
    store_rows(p, job->d_raw, &p->args->d_kv, s->view_b, s->raw0, s->raw);
    store_rows(p, job->d_entries, &p->args->d_entries, s->view_b, s->entry0, s->entries);
}

/* Rows of a [1,N,D] view, from `first` on. */
static void clear_rows(const quern_tensor *t, int64_t first)
{
    for (int64_t n = first; is_present(t) && n < t->shape[1]; n++)
        memset(mqa_row(t, 0, n), 0, (size_t)t->shape[2] * quern_dtype_size(t->dtype));
}

size_t cpu_attend_mqa_backward_workspace(const stage_exec *exec, const attend_mqa_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_attend_mqa_backward(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    const quern_status status = mqa_check(exec, args);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    const mqa_plan *p = &job.plan;
    mqa_starts_fill(p, 1, &job.starts);
    for (int64_t h = 0; h < p->heads; h++) job.d_sink[h] = 0;
    for (int64_t b = 0; b < p->batch; b++) run_sequence(exec, &job, b);
    for (int64_t h = 0; is_present(&args->d_sink) && h < p->heads; h++)
        ((float *)args->d_sink.data)[h] = (float)job.d_sink[h];
    if (args->seqs.cu_q.data == NULL) return QUERN_OK;
    if (is_present(&args->d_q)) zero_rows(&args->d_q, token_rows(&args->seqs));
    clear_rows(&args->d_kv, token_rows(&args->seqs));
    clear_rows(&args->d_entries, job.starts.entry[p->batch]);
    return QUERN_OK;
}
