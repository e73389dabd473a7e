/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_indexer.c - the indexer stage: scores queries against panels of keys and keeps the best as it goes.
 *
 * A task is up to eight queries of a sequence and a range of its entries. A panel of keys is packed once for
 * the task's queries and stays in L1; packing takes as long as one query's heads. The next panel's keys are
 * prefetched while the last query, which sees the most, is scored. Where there are few queries
 * (decode), ranges of entries are tasks of their own, each keeps its best, and the best of these are the best
 * of all: a score depends on its query and key alone, and the order of scores is total, so the choice does
 * not depend on how the work was cut.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/first_fault.h"
#include "cpu/indexer/best.h"
#include "cpu/indexer/key_panel.h"
#include "cpu/kernels/formats/row_formats.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum { TASK_QUERIES = 8, TASKS_A_THREAD = 4, RANGE_PANELS = 16, WIDTH_MOST = 256 };

typedef struct indexer_scratch {
    key_panel panel;
    void *q;      /* [TASK_QUERIES][heads][words] */
    float *w;     /* [TASK_QUERIES][heads] */
    float *score; /* [panel] */
    indexer_best best[TASK_QUERIES];
} indexer_scratch;

/* A sequence's queries in the views. */
typedef struct indexer_sequence {
    int64_t b, view_b, query0, queries;
} indexer_sequence;

typedef struct indexer_job {
    const indexer_args *args;
    const cpu_kernels *level;
    const indexer_kernels *kernels;
    const attention_kernels *packing;
    bool bf16;
    int64_t batch, queries, heads, width, entries, k, room; /* queries: the most of a sequence */
    int64_t blocks, ranges;                /* tasks of a sequence: blocks times ranges of entries */
    indexer_scratch *scratch;              /* one a thread */
    int32_t *partial_rank, *partial_index; /* [B][T][ranges][k], where there are several */
    int64_t *partial_n;
} indexer_job;

static void carve_scratch(const indexer_job *job, arena *a, indexer_scratch *s)
{
    s->panel = (key_panel){.level = job->level,
                           .kernels = job->kernels,
                           .packing = job->packing,
                           .args = job->args,
                           .width = job->width,
                           .row = row_size_of(job->args->format, job->width, job->args->keys.dtype),
                           .bf16 = job->bf16};
    key_panel_carve(&s->panel, a);
    const size_t queries = (size_t)(job->queries < TASK_QUERIES ? job->queries : TASK_QUERIES),
                 heads = (size_t)job->heads;
    s->q = arena_take(a, queries * heads * (size_t)key_panel_words(&s->panel) * sizeof(float));
    s->w = arena_take(a, queries * heads * sizeof *s->w);
    s->score = arena_take(a, (size_t)job->kernels->panel * sizeof *s->score);
    for (size_t i = 0; i < queries; i++) {
        s->best[i].rank = arena_take(a, (size_t)job->room * sizeof *s->best[i].rank);
        s->best[i].index = arena_take(a, (size_t)job->room * sizeof *s->best[i].index);
    }
}

/* Whether the products are of bf16 values: queries and keys are exact in bf16. */
static bool by_bf16(const indexer_kernels *kernels, const indexer_args *args)
{
    const bool exact = args->format != ENTRY_ROWS || args->keys.dtype == QUERN_BF16;
    return kernels->score_bf16 != NULL && args->q.dtype == QUERN_BF16 && exact;
}

static indexer_job carve(const stage_exec *exec, const indexer_args *args, arena *a)
{
    indexer_job job = {.args = args,
                       .level = cpu_kernels_for(exec->cpu_level),
                       .kernels = cpu_kernels_for(exec->cpu_level)->indexer,
                       .packing = cpu_kernels_for(exec->cpu_level)->attention};
    const quern_tensor *q = &args->q;
    job.bf16 = by_bf16(job.kernels, args);
    job.batch = is_present(&args->cu) ? args->cu.shape[0] - 1 : q->shape[0];
    job.queries = q->shape[1];
    job.heads = q->shape[2];
    job.width = q->shape[3];
    job.entries = args->page > 0 ? args->table.shape[1] * args->page : args->keys.shape[1];
    job.k = args->idx.shape[2];
    job.room = best_room(job.k, job.kernels->panel);
    job.blocks = (job.queries + TASK_QUERIES - 1) / TASK_QUERIES;
    const int64_t panels = (job.entries + job.kernels->panel - 1) / job.kernels->panel,
                  tasks =
                      is_present(&args->cu) && job.batch > job.blocks ? job.batch : q->shape[0] * job.blocks;
    const int64_t wanted = exec->threads > 1 ? (int64_t)TASKS_A_THREAD * exec->threads : 1,
                  most = (panels + RANGE_PANELS - 1) / RANGE_PANELS;
    job.ranges = tasks >= wanted || tasks == 0 ? 1 : (wanted + tasks - 1) / tasks;
    if (job.ranges > most) job.ranges = most < 1 ? 1 : most;
    job.scratch = arena_take(a, sizeof *job.scratch * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        indexer_scratch s;
        carve_scratch(&job, a, &s);
        if (a->base != NULL) job.scratch[i] = s;
    }
    if (job.ranges > 1) {
        const size_t lists = (size_t)(q->shape[0] * job.queries * job.ranges);
        job.partial_rank = arena_take(a, lists * (size_t)job.k * sizeof *job.partial_rank);
        job.partial_index = arena_take(a, lists * (size_t)job.k * sizeof *job.partial_index);
        job.partial_n = arena_take(a, lists * sizeof *job.partial_n);
    }
    return job;
}

static indexer_sequence sequence_of(const indexer_job *job, int64_t b)
{
    const int32_t *cu = job->args->cu.data;
    if (!is_present(&job->args->cu)) return (indexer_sequence){b, b, 0, job->queries};
    return (indexer_sequence){b, 0, cu[b], cu[b + 1] - cu[b]};
}

/* The sequence of a row of all queries. */
static indexer_sequence sequence_with(const indexer_job *job, int64_t row)
{
    const int32_t *cu = job->args->cu.data;
    int64_t low = 0, high = job->batch;
    if (!is_present(&job->args->cu)) return sequence_of(job, row / job->queries);
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (cu[middle] <= row) low = middle;
        else high = middle;
    }
    return sequence_of(job, low);
}

/* Entries that a query sees. */
static int64_t seen_by(const indexer_job *job, int64_t b, int64_t query)
{
    const indexer_args *a = job->args;
    const int64_t start = is_present(&a->positions) ? ((const int32_t *)a->positions.data)[b] : a->position,
                  whole = mask_entries(start + query + 1, a->ratio, a->ratio);
    return whole < job->entries ? whole : job->entries;
}

/* A head as the codes of a row of FP8, into w[0 ... width - 1]; returns the codes' scale. */
static float round_head(const indexer_job *job, const row_source *head, float *to)
{
    uint8_t row[WIDTH_MOST + sizeof(float)];
    job->packing->pack_rows_f32(head, 1.0f, to, job->width);
    encode_row(job->level, ENTRY_FP8, to, job->width, row, QUERN_U8);
    return decode_row(job->level, ENTRY_FP8, row, row + job->width, job->width, to);
}

/* Rounds the heads of a query, whose weights take their scales. */
static void pack_rounded(const indexer_job *job, const row_source *heads, void *to, float *w)
{
    const size_t size = quern_dtype_size(heads->dtype), word = job->bf16 ? sizeof(uint16_t) : sizeof(float);
    float values[WIDTH_MOST];
    for (int64_t h = 0; h < job->heads; h++) {
        const row_source head = {(const char *)heads->data + (size_t)(h * heads->stride) * size, heads->dtype,
                                 heads->stride, 1, job->width};
        w[h] *= round_head(job, &head, values);
        job->packing->rows->convert(values, QUERN_F32, (char *)to + (size_t)(h * job->width) * word,
                                    job->bf16 ? QUERN_BF16 : QUERN_F32, job->width);
    }
}

static void pack_queries(const indexer_job *job, const indexer_sequence *seq, int64_t first, int64_t n,
                         indexer_scratch *s)
{
    const int64_t words = key_panel_words(&s->panel);
    const quern_tensor *q = &job->args->q, *w = &job->args->w;
    for (int64_t i = 0; i < n; i++) {
        const row_source heads = {row_at(q, seq->view_b, seq->query0 + first + i, 0), q->dtype, q->strides[2],
                                  job->heads, job->width};
        const row_source weights = {row_at(w, seq->view_b, seq->query0 + first + i, 0), w->dtype, job->heads,
                                    1, job->heads};
        float *to = (float *)s->q + i * job->heads * words;
        job->packing->pack_rows_f32(&weights, 1.0f, s->w + i * job->heads, job->heads);
        if (job->args->rounded) pack_rounded(job, &heads, to, s->w + i * job->heads);
        else if (job->bf16) job->packing->pack_rows_bf16(&heads, (uint16_t *)to, job->width);
        else job->packing->pack_rows_f32(&heads, 1.0f, to, words);
    }
}

/* One query against the panel that holds entries first ... first + n - 1, all of which it sees. `ahead`:
 * prefetched meanwhile. */
static void score_panel(const indexer_job *job, const indexer_sequence *seq, int64_t query, int64_t slot,
                        int64_t first, int64_t n, key_bytes ahead, indexer_scratch *s)
{
    const int64_t words = key_panel_words(&s->panel);
    indexer_best *best = &s->best[slot];
    const indexer_tile tile = {(const float *)s->q + slot * job->heads * words,
                               s->w + slot * job->heads,
                               job->heads,
                               words,
                               s->panel.words,
                               s->score,
                               ahead.data,
                               ahead.bytes};
    (job->bf16 ? job->kernels->score_bf16 : job->kernels->score_f32)(&tile);
    job->kernels->scale_scores(s->score, s->panel.scale, job->args->scale, n);
    const quern_tensor *scores = &job->args->scores;
    if (is_present(scores))
        memcpy((float *)row_at(scores, seq->view_b, seq->query0 + query, 0) + first, s->score,
               (size_t)n * sizeof *s->score);
    if (best->n + n > job->room) job->kernels->cut(best, job->k);
    job->kernels->collect(s->score, n, (int32_t)first, best);
}

static void give(const indexer_job *job, const indexer_sequence *seq, int64_t query, indexer_best *best)
{
    const quern_tensor *count = &job->args->count;
    const int64_t b = seq->view_b, row = seq->query0 + query;
    int32_t *idx = row_at(&job->args->idx, b, row, 0);
    job->kernels->cut(best, job->k);
    memcpy(idx, best->index, (size_t)best->n * sizeof *idx);
    for (int64_t i = best->n; i < job->k; i++) idx[i] = -1;
    ((int32_t *)count->data)[b * count->strides[0] + row * count->strides[1]] = (int32_t)best->n;
    const quern_tensor *scores = &job->args->scores;
    const int64_t end =
        is_present(&job->args->cu) ? seen_by(job, seq->b, seq->queries - 1) : scores->shape[2];
    for (int64_t e = seen_by(job, seq->b, query); is_present(scores) && e < end; e++)
        ((float *)row_at(scores, b, row, 0))[e] = -INFINITY;
}

/* `row`: of all queries. */
static void keep_partial(const indexer_job *job, int64_t row, int64_t range, indexer_best *best)
{
    const int64_t list = row * job->ranges + range;
    job->kernels->cut(best, job->k);
    memcpy(job->partial_rank + list * job->k, best->rank, (size_t)best->n * sizeof *best->rank);
    memcpy(job->partial_index + list * job->k, best->index, (size_t)best->n * sizeof *best->index);
    job->partial_n[list] = best->n;
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    indexer_job *job = arg;
    indexer_scratch *s = &job->scratch[thread];
    const int64_t b = index / job->ranges / job->blocks, range = index % job->ranges,
                  panel = job->kernels->panel;
    const int64_t query0 =
        (job->blocks - 1 - index / job->ranges % job->blocks) * TASK_QUERIES; /* the longest first */
    const indexer_sequence seq = sequence_of(job, b);
    const int64_t n = seq.queries - query0 < TASK_QUERIES ? seq.queries - query0 : TASK_QUERIES;
    if (n <= 0) return;
    const int64_t last = seen_by(job, b, query0 + n - 1), share = (last + job->ranges - 1) / job->ranges,
                  length = round_up(share, panel), from = range * length,
                  stop = from + length < last ? from + length : last;
    pack_queries(job, &seq, query0, n, s);
    for (int64_t i = 0; i < n; i++) best_reset(&s->best[i]);
    for (int64_t first = from; first < stop; first += panel) {
        const int64_t next = first + panel;
        key_bytes ahead = key_panel_bytes(&s->panel, b, next, stop - next < panel ? stop - next : panel);
        key_panel_fill(&s->panel, b, first, stop - first < panel ? stop - first : panel);
        for (int64_t i = n - 1; i >= 0; i--) {
            const int64_t seen = seen_by(job, b, query0 + i) - first;
            if (seen > 0) score_panel(job, &seq, query0 + i, i, first, seen < panel ? seen : panel, ahead, s);
            ahead.bytes = 0;
        }
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = seq.view_b * job->queries + seq.query0 + query0 + i;
        if (job->ranges > 1) keep_partial(job, row, range, &s->best[i]);
        else give(job, &seq, query0 + i, &s->best[i]);
    }
}

/* Lays a query's lists end to end. */
static void merge_query(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const indexer_job *job = arg;
    const int64_t list = index * job->ranges;
    indexer_best all = {job->partial_rank + list * job->k, job->partial_index + list * job->k, 0, 0};
    for (int64_t r = 0; r < job->ranges; r++) {
        const size_t bytes = (size_t)job->partial_n[list + r] * sizeof *all.rank;
        memmove(all.rank + all.n, job->partial_rank + (list + r) * job->k, bytes);
        memmove(all.index + all.n, job->partial_index + (list + r) * job->k, bytes);
        all.n += job->partial_n[list + r];
    }
    const indexer_sequence seq = sequence_with(job, index);
    give(job, &seq, index - seq.view_b * job->queries - seq.query0, &all);
}

void cpu_indexer_kernel(const stage_exec *exec, const indexer_args *args, char text[STAGE_NAME_BYTES])
{
    const indexer_kernels *kernels = cpu_kernels_for(exec->cpu_level)->indexer;
    cpu_name_kernels(text, "indexer", by_bf16(kernels, args), kernels->level);
}

size_t cpu_indexer_workspace(const stage_exec *exec, const indexer_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

/* The entries that the last query of a sequence sees, and with it any. */
static int64_t seen_by_all(const indexer_job *job, int64_t b)
{
    const int64_t queries = sequence_of(job, b).queries;
    return queries > 0 ? seen_by(job, b, queries - 1) : 0;
}

enum { CHECKED = 1024 }; /* entries of a task */

typedef struct check_job {
    const indexer_job *job;
    int64_t chunks;   /* of a sequence */
    first_fault *bad; /* the first entry with a bad scale, of all sequences */
} check_job;

static void check_entries(void *arg, int64_t index, int32_t thread)
{
    const check_job *c = arg;
    const indexer_job *job = c->job;
    const int64_t b = index / c->chunks, first = index % c->chunks * CHECKED, seen = seen_by_all(job, b),
                  end = seen - first < CHECKED ? seen : first + CHECKED;
    for (int64_t s = first; s < end; s++) {
        if (key_panel_bad_scale(&job->scratch[thread].panel, b, s) < 0) continue;
        first_fault_note(c->bad, b * job->entries + s);
        return;
    }
}

/* Before an output is written: FP4 keys that are seen have scales that are numbers. */
static quern_status check_scales(const stage_exec *exec, const indexer_job *job)
{
    first_fault bad = NO_FAULT;
    const check_job c = {job, (job->entries + CHECKED - 1) / CHECKED, &bad};
    if (row_format_of(job->args->format)->scales != SCALES_E8M0) return QUERN_OK;
    parallel_for(exec, job->batch * c.chunks, check_entries, (void *)(uintptr_t)&c);
    const int64_t at = atomic_load(&bad);
    if (at == NO_FAULT) return QUERN_OK;
    const int64_t byte = key_panel_bad_scale(&job->scratch[0].panel, at / job->entries, at % job->entries);
    return stage_report(exec, (stage_fault){QUERN_STATUS_BAD_SCALE, &job->args->keys, byte, .most = 0xFE});
}

typedef struct finite_job {
    const indexer_job *job;
    first_fault *bad;
} finite_job;

static void check_query(void *arg, int64_t index, int32_t thread)
{
    const finite_job *c = arg;
    const indexer_job *job = c->job;
    const quern_tensor *q = &job->args->q;
    float row[WIDTH_MOST];
    (void)thread;
    for (int64_t h = 0; h < job->heads; h++) {
        const row_source head = {row_at(q, index / q->shape[1], index % q->shape[1], h), q->dtype, 0, 1,
                                 job->width};
        job->packing->pack_rows_f32(&head, 1.0f, row, job->width);
        for (int64_t i = 0; i < job->width; i++)
            if (!isfinite(row[i])) {
                first_fault_note(c->bad, (index * job->heads + h) * job->width + i);
                return;
            }
    }
}

/* Before an output is written: queries that are rounded have numbers. */
static quern_status check_rounded(const stage_exec *exec, const indexer_job *job)
{
    first_fault bad = NO_FAULT;
    const finite_job c = {job, &bad};
    const quern_tensor *q = &job->args->q;
    if (!job->args->rounded) return QUERN_OK;
    parallel_for(exec, q->shape[0] * q->shape[1], check_query, (void *)(uintptr_t)&c);
    const int64_t at = atomic_load(&bad);
    if (at == NO_FAULT) return QUERN_OK;
    return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_NOT_FINITE, .tensor = q, .index = at});
}

/* Offsets, positions, and the pages of the entries that are seen. */
static quern_status check_sequences(const stage_exec *exec, const indexer_job *job)
{
    const indexer_args *args = job->args;
    quern_status status = check_cu(exec, &args->cu, job->batch, job->queries);
    for (int64_t b = 0; b < job->batch && status == QUERN_OK; b++) {
        const int64_t start = i32_at(&args->positions, b, args->position),
                      queries = sequence_of(job, b).queries, entries = (start + queries) / args->ratio;
        if (start < 0 || entries > INT32_MAX)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_POSITION,
                                                    .tensor = &args->positions,
                                                    .index = b,
                                                    .most = INT32_MAX});
        if (args->page > 0 && queries > 0)
            status = check_pages(exec, &args->table, b, 0, (entries + args->page - 1) / args->page,
                                 args->keys.shape[0]);
    }
    return status;
}

quern_status cpu_indexer(const stage_exec *exec, const indexer_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    indexer_job job = carve(exec, args, &a);
    const int64_t rows = args->q.shape[0] * args->q.shape[1];
    quern_status status = check_sequences(exec, &job);
    if (status == QUERN_OK) status = check_scales(exec, &job);
    if (status == QUERN_OK) status = check_rounded(exec, &job);
    if (status != QUERN_OK) return status;
    parallel_for(exec, job.batch * job.blocks * job.ranges, run_task, &job);
    if (job.ranges > 1) parallel_for(exec, rows, merge_query, &job);
    return QUERN_OK;
}
