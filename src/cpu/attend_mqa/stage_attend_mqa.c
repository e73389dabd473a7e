/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_mqa.c - the forward stage: for each query, blockwise softmax attention of all its heads over
 * its keys.
 *
 * A query is a product of [heads x D] by [D x keys] and back. Its keys are cut into spans of 1024. Each span
 * has a softmax of its own, and the spans are merged in order. A result therefore depends only on its query,
 * whether spans run one after the other (prefill) or at once (few queries over a long context).
 *
 * Per tile of 192 keys at D = 512, bf16: copying its rows and pairs moves 384 KB through L2, 3% of the
 * products' time with 64 heads; softmax takes 5%. Limit: that of the products.
 */
#include "core/parallel.h"
#include "cpu/attend_mqa/mqa.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SPAN = 1024, TASK_QUERIES = 8, TASKS_A_THREAD = 8 };

/* The running softmax of a query's heads over some of its keys. */
typedef struct mqa_state {
    float *o;                 /* [heads][width], times `sum` */
    float *max, *sum;         /* [columns]; of unscaled scores */
    float *win_max, *win_sum; /* of the raw rows alone */
} mqa_state;

typedef struct mqa_scratch {
    mqa_tile tile;
    float *columns, *s, *shrink, *angles;
    int32_t *list;
    mqa_state state, all;
    int64_t until;             /* where the keys end that the thread takes of a query */
    mqa_ahead keys, following; /* of its next tile; of the query that follows */
} mqa_scratch;

typedef struct forward_job {
    mqa_plan plan;
    mqa_starts starts;
    mqa_scratch *scratch; /* one per thread */
    int32_t threads;
    int64_t queries;      /* queries of a task */
    int64_t spans;        /* most spans of a query; separate tasks where `partial` is not NULL */
    mqa_state *partial;   /* [queries of the call][spans] */
} forward_job;

static void carve_state(const mqa_plan *p, arena *a, mqa_state *s)
{
    const size_t columns = (size_t)p->columns * sizeof(float);
    s->o = arena_take(a, (size_t)(p->heads * p->width) * sizeof(float));
    float **const stats[] = {&s->max, &s->sum, &s->win_max, &s->win_sum};
    for (int i = 0; i < 4; i++) *stats[i] = arena_take(a, columns);
}

static void carve_scratch(const mqa_plan *p, arena *a, mqa_scratch *s)
{
    mqa_tile_carve(p, a, &s->tile);
    s->columns = arena_take(a, mqa_columns_bytes(p));
    s->s = arena_take(a, (size_t)(MQA_TILE * p->columns) * sizeof *s->s);
    s->shrink = arena_take(a, (size_t)p->columns * sizeof *s->shrink);
    s->angles = arena_take(a, (size_t)p->rope * sizeof *s->angles);
    s->list = arena_take(a, (size_t)(p->list > 0 ? p->list : 0) * sizeof *s->list);
    carve_state(p, a, &s->state);
    carve_state(p, a, &s->all);
}

static forward_job carve(const stage_exec *exec, const attend_mqa_args *args, arena *a)
{
    forward_job job = {.plan = mqa_plan_of(exec, args), .threads = exec->threads};
    const mqa_plan *p = &job.plan;
    const int64_t rows = args->q.shape[0] * args->q.shape[1],
                  share = rows / ((int64_t)TASKS_A_THREAD * exec->threads);
    job.queries = share < 1 ? 1 : share < TASK_QUERIES ? share : TASK_QUERIES;
    job.spans = (mqa_keys_most(p) + SPAN - 1) / SPAN;
    mqa_starts_carve(p, a, &job.starts);
    job.scratch = arena_take(a, sizeof *job.scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        mqa_scratch s;
        carve_scratch(p, a, &s);
        if (a->base != NULL) job.scratch[i] = s;
    }
    if (job.spans > 1 && rows < 2 * (int64_t)exec->threads) {
        mqa_state *partial = arena_take(a, (size_t)(rows * job.spans) * sizeof *partial);
        for (int64_t i = 0; i < rows * job.spans; i++) {
            mqa_state s;
            carve_state(p, a, &s);
            if (a->base != NULL) partial[i] = s;
        }
        job.partial = partial;
    }
    return job;
}

static void reset_stats(const mqa_plan *p, float *max, float *sum)
{
    for (int64_t i = 0; i < p->columns; i++) max[i] = -INFINITY;
    memset(sum, 0, (size_t)p->columns * sizeof *sum);
}

/* Keeps the statistics of the raw rows, once all of them are done. */
static void keep_window(const mqa_plan *p, mqa_state *s)
{
    memcpy(s->win_max, s->max, (size_t)p->columns * sizeof *s->max);
    memcpy(s->win_sum, s->sum, (size_t)p->columns * sizeof *s->sum);
}

/* What is requested while the tile before `key` is multiplied. */
static mqa_ahead *ahead_of(const mqa_plan *p, const mqa_sequence *seq, const mqa_keys *keys, int64_t key,
                           mqa_scratch *x)
{
    if (key >= x->until) return &x->following;
    mqa_ahead_clear(&x->keys);
    mqa_ahead_keys(p, seq, keys, key, x->until - key < MQA_TILE ? x->until : key + MQA_TILE, &x->keys);
    return &x->keys;
}

/* Runs keys [first, end) of a query into a fresh state. */
static void run_span(const mqa_plan *p, const mqa_sequence *seq, const mqa_keys *keys, int64_t first,
                     int64_t end, mqa_scratch *x, mqa_state *s)
{
    reset_stats(p, s->max, s->sum);
    reset_stats(p, s->win_max, s->win_sum);
    for (int64_t key = first, n; key < end; key += n) {
        /* A tile never mixes raw rows and entries. */
        const int64_t stop = key < keys->raw && keys->raw < end ? keys->raw : end;
        n = stop - key < MQA_TILE ? stop - key : MQA_TILE;
        mqa_tile_fill(p, seq, keys, key, n, &x->tile);
        mqa_ahead *ahead = ahead_of(p, seq, keys, key + n, x);
        mqa_scores(p, &x->tile, x->columns, x->s, ahead);
        const mqa_softmax soft = {x->s,   (int32_t)n, (int32_t)p->columns, p->scale2, s->max,
                                  s->sum, x->shrink};
        if (p->bf16) p->rows->mqa_softmax_bf16(&soft);
        else p->rows->mqa_softmax_f32(&soft);
        for (int64_t h = 0; h < p->heads && key > first; h++)
            if (x->shrink[h] != 1.0f) p->kernels->scale_row(s->o + h * p->width, x->shrink[h], p->width);
        mqa_values(p, &x->tile, x->s, s->o, key > first, ahead);
        if (key + n <= keys->raw) keep_window(p, s);
    }
}

/* Merges max and sum of both. *from and *to are the factors of either one's O. */
static void merge_stats(const mqa_plan *p, float *max, float *sum, const float *max_b, const float *sum_b,
                        int64_t h, float *to, float *from)
{
    const float most = max_b[h] > max[h] ? max_b[h] : max[h];
    *to = max[h] == most ? 1.0f : exp2f((max[h] - most) * p->scale2);
    *from = max_b[h] == most ? 1.0f : exp2f((max_b[h] - most) * p->scale2);
    max[h] = most;
    sum[h] = sum[h] * *to + sum_b[h] * *from;
}

static void merge(const mqa_plan *p, const mqa_state *from, mqa_state *to)
{
    float a, b;
    for (int64_t h = 0; h < p->heads; h++) {
        float *o = to->o + h * p->width;
        const float *add = from->o + h * p->width;
        merge_stats(p, to->win_max, to->win_sum, from->win_max, from->win_sum, h, &a, &b);
        merge_stats(p, to->max, to->sum, from->max, from->sum, h, &a, &b);
        for (int64_t d = 0; d < p->width; d++) o[d] = o[d] * a + add[d] * b;
    }
}

static float natural_lse(const mqa_plan *p, float max, float sum)
{
    return sum == 0.0f ? -INFINITY : (float)((double)max * (double)p->args->scale + log((double)sum));
}

static float *stat_at(const quern_tensor *t, int64_t b, int64_t h, int64_t n)
{
    return row_at(t, b, h, n);
}

/* Divides by the sum including the sink, rotates back and stores. */
static void finish(const mqa_plan *p, const mqa_sequence *seq, int64_t query, bool any, mqa_scratch *x,
                   mqa_state *s)
{
    const attend_mqa_args *a = p->args;
    const int64_t row = seq->query0 + query;
    if (p->rope > 0) mqa_angles(p, seq->position + query, x->angles);
    for (int64_t h = 0; h < p->heads; h++) {
        float *o = s->o + h * p->width;
        const float lse = any ? natural_lse(p, s->max[h], s->sum[h]) : -INFINITY;
        const double sink = is_present(&a->sink) ? (double)((const float *)a->sink.data)[h] : -INFINITY;
        if (lse == -INFINITY || sink == INFINITY) memset(o, 0, (size_t)p->width * sizeof *o);
        else
            p->kernels->scale_row(o, (float)(1.0 / (double)s->sum[h] / (1.0 + exp(sink - (double)lse))),
                                  p->width);
        if (p->rope > 0)
            p->level->rows->rotate_row(o + p->dim - p->rope, x->angles, x->angles + p->rope / 2, p->rope,
                                       true);
        if (is_present(&a->o)) {
            const int64_t at = seq->view_b * a->o.strides[0] + row * a->o.strides[1] + h * a->o.strides[2];
            mqa_store(p, o, &a->o, at);
        }
        if (is_present(&a->lse)) *stat_at(&a->lse, seq->view_b, h, row) = lse;
        if (is_present(&a->lse_win))
            *stat_at(&a->lse_win, seq->view_b, h, row) =
                any ? natural_lse(p, s->win_max[h], s->win_sum[h]) : -INFINITY;
    }
}

static int64_t span_end(const mqa_keys *keys, int64_t span)
{
    return (span + 1) * SPAN < keys->n ? (span + 1) * SPAN : keys->n;
}

static void run_query(const forward_job *job, const mqa_sequence *seq, int64_t query, mqa_scratch *x)
{
    const mqa_plan *p = &job->plan;
    const mqa_keys keys = mqa_keys_of(p, seq, query, x->list);
    const row_source heads = mqa_heads(&p->args->q, seq->view_b, seq->query0 + query);
    x->until = keys.n;
    if (keys.n > 0) {
        mqa_pack_columns(p, &heads, x->columns);
        run_span(p, seq, &keys, 0, span_end(&keys, 0), x, &x->all);
    }
    for (int64_t span = 1; span * SPAN < keys.n; span++) {
        run_span(p, seq, &keys, span * SPAN, span_end(&keys, span), x, &x->state);
        merge(p, &x->state, &x->all);
    }
    finish(p, seq, query, keys.n > 0, x, &x->all);
}

/* A task's sequence, and the first of its queries. */
static mqa_sequence task_at(const forward_job *job, int64_t index, int64_t *query)
{
    const int64_t b = mqa_task_sequence(&job->plan, &job->starts, index);
    *query = (job->starts.task[b + 1] - 1 - index) *
             job->queries; /* the last queries, with the most keys, first */
    return mqa_sequence_at(&job->plan, &job->starts, b);
}

/* The heads and raw rows of a query that follows; its list is not read yet. */
static void follow(const mqa_plan *p, const mqa_sequence *seq, int64_t query, mqa_ahead *ahead)
{
    const mqa_keys raw = mqa_raw_keys_of(p, seq, query);
    const row_source heads = mqa_heads(&p->args->q, seq->view_b, seq->query0 + query);
    mqa_ahead_heads(&heads, ahead);
    mqa_ahead_keys(p, seq, &raw, 0, raw.n, ahead);
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    forward_job *job = arg;
    mqa_scratch *x = &job->scratch[thread];
    int64_t first, other;
    const mqa_sequence seq = task_at(job, index, &first);
    const int64_t after = index + job->threads; /* the thread's next one, most likely */
    for (int64_t query = first; query < first + job->queries && query < seq.queries; query++) {
        mqa_ahead_clear(&x->following);
        if (query + 1 < first + job->queries && query + 1 < seq.queries) {
            follow(&job->plan, &seq, query + 1, &x->following);
        } else if (after < job->starts.task[job->plan.batch]) {
            const mqa_sequence next = task_at(job, after, &other);
            follow(&job->plan, &next, other, &x->following);
        }
        run_query(job, &seq, query, x);
    }
}

/* Runs one span of one query, in tasks of one query each. */
static void run_partial(void *arg, int64_t index, int32_t thread)
{
    forward_job *job = arg;
    const mqa_plan *p = &job->plan;
    const int64_t task = index / job->spans, span = index % job->spans,
                  b = mqa_task_sequence(p, &job->starts, task);
    const mqa_sequence seq = mqa_sequence_at(p, &job->starts, b);
    mqa_scratch *x = &job->scratch[thread];
    const int64_t query = task - job->starts.task[b];
    const mqa_keys keys = mqa_keys_of(p, &seq, query, x->list);
    const row_source heads = mqa_heads(&p->args->q, seq.view_b, seq.query0 + query);
    if (span * SPAN >= keys.n) return;
    x->until = span_end(&keys, span);
    mqa_ahead_clear(&x->following);
    mqa_pack_columns(p, &heads, x->columns);
    run_span(p, &seq, &keys, span * SPAN, span_end(&keys, span), x, &job->partial[index]);
}

static void merge_partial(void *arg, int64_t task, int32_t thread)
{
    forward_job *job = arg;
    const mqa_plan *p = &job->plan;
    const int64_t b = mqa_task_sequence(p, &job->starts, task), query = task - job->starts.task[b];
    const mqa_sequence seq = mqa_sequence_at(p, &job->starts, b);
    mqa_state *spans = job->partial + task * job->spans;
    const mqa_keys keys = mqa_keys_of(p, &seq, query, job->scratch[thread].list);
    for (int64_t span = 1; span * SPAN < keys.n; span++) merge(p, &spans[span], &spans[0]);
    finish(p, &seq, query, keys.n > 0, &job->scratch[thread], &spans[0]);
}

/* Rows of a varlen batch past its last sequence. */
static void store_unused(const mqa_plan *p)
{
    const attend_mqa_args *a = p->args;
    const int64_t first = token_rows(&a->seqs);
    const quern_tensor *const stats[] = {&a->lse, &a->lse_win};
    if (is_present(&a->o)) zero_rows(&a->o, first);
    for (int i = 0; i < 2; i++)
        for (int64_t n = first; is_present(stats[i]) && n < a->seqs.n_q; n++)
            for (int64_t h = 0; h < p->heads; h++) *stat_at(stats[i], 0, h, n) = -INFINITY;
}

bool cpu_attend_mqa_supports(const stage_exec *exec, const attend_mqa_args *args, char why[STAGE_WHY_BYTES])
{
    (void)exec;
    if (args->q.shape[3] <= MQA_DIM_MOST) return true;
    snprintf(why, STAGE_WHY_BYTES, "head dim %lld: the cpu backend takes multiples of 8 up to %d",
             (long long)args->q.shape[3], MQA_DIM_MOST);
    return false;
}

void cpu_attend_mqa_kernel(const stage_exec *exec, const attend_mqa_args *args, char text[STAGE_NAME_BYTES])
{
    cpu_name_kernels(text, "attend_mqa", mqa_by_bf16(exec, args),
                     cpu_kernels_for(exec->cpu_level)->attention->level);
}

size_t cpu_attend_mqa_workspace(const stage_exec *exec, const attend_mqa_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_attend_mqa(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    const quern_status status = mqa_check(exec, args);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    forward_job job = carve(exec, args, &a);
    const int64_t tasks = mqa_starts_fill(&job.plan, job.queries, &job.starts);
    if (job.partial != NULL) {
        parallel_for(exec, tasks * job.spans, run_partial, &job);
        parallel_for(exec, tasks, merge_partial, &job);
    } else {
        parallel_for(exec, tasks, run_task, &job);
    }
    if (args->seqs.cu_q.data != NULL) store_unused(&job.plan);
    return QUERN_OK;
}
