/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_nsa_decode.c - the nsa_decode stage: the newest tokens over compressed entries, selected blocks and
 * window.
 *
 * A task is one query and one key/value head: it scores the entries once and keeps the scores for the
 * selection, then attends the selected blocks, then the window. It adds each branch's O, times its gate, to
 * one sum. A head's queries follow each other, because they share entries and window. Scores, lse and the
 * order of all sums that lead to the choice are those of the forward (select_score.c, attend_tile.c): steps
 * of 384 entries where the compressed branch is on, whose lse selects, else of 128; so the lists have the
 * same bits.
 *
 * Limit: the read bandwidth on Nc + k l' + W rows (panels.c). What is read next is prefetched while a panel
 * is computed: after the entries a block that is always chosen, after the blocks the window, after that the
 * entries of the task that this thread probably takes next. Rows of blocks that do not fill a panel are
 * gathered. Lists that are given take the place of the entries' scores.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/decode/panels.h"
#include "cpu/kernels/gate/gate.h"
#include "cpu/kernels/select/select.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <math.h>
#include <string.h>

enum { CMP, SLC, WIN, SCORE_PANELS = SELECT_KEYS / PANEL_KEYS };

typedef struct nsa_space {
    decode_rows rows;
    decode_scratch scratch;
    select_scratch select;
    float *sum;    /* [group][value_width] */
    float *gates;  /* [group][3] */
    float *scores; /* [group][width]: of entries */
    float *mean;   /* [lists][D]: mean_logit */
    float *keys;   /* a panel in f32: mean_logit */
    float *lse2;
    int32_t *seen;
    decode_panel pending; /* n 0: none */
    decode_panel after;   /* the first of the task that the thread will probably take next */
    int64_t gathered;     /* rows in scratch.gathered */
} nsa_space;

/* Must not be copied: its plan points into it. */
typedef struct nsa_job {
    const nsa_decode_args *args;
    decode_shape shape;
    const nsa_kernels *kernels;
    select_args select;
    select_plan plan;
    gate_args gate;
    bool cmp, slc, win, softmax, chooses; /* chooses: the selected branch's lists, by entries */
    int64_t group, lists, width;          /* lists: of a key/value head */
    int32_t threads;
    int64_t batch;
    step_run *runs; /* [batch] */
    int64_t *tasks; /* [batch + 1]: each run's first task */
    nsa_space *spaces;
} nsa_job;

/* A task's query and head. */
typedef struct nsa_query {
    const step_run *run;
    int64_t head, row, position, seen; /* seen: entries */
} nsa_query;

static void carve_space(const nsa_job *job, arena *a, nsa_space *s)
{
    const size_t n = (size_t)job->group * sizeof(float);
    memset(s, 0, sizeof *s);
    decode_rows_carve(&job->shape, job->group, a, &s->rows);
    decode_scratch_carve(&job->shape, job->group, a, &s->scratch);
    s->sum = arena_take(a, n * (size_t)job->shape.value_width);
    s->gates = arena_take(a, 3 * n);
    s->lse2 = arena_take(a, n);
    s->seen = arena_take(a, n);
    if (!job->chooses) return;
    select_scratch_carve(&job->plan, a, &s->select);
    s->scores = arena_take(a, n * (size_t)job->width);
    if (job->softmax) return;
    s->mean = arena_take(a, n * (size_t)job->shape.dim_k);
    s->keys = arena_take(a, (size_t)(PANEL_KEYS * job->shape.dim_k) * sizeof(float));
}

static void carve(const stage_exec *exec, const nsa_decode_args *args, arena *a, nsa_job *job)
{
    const cache_plane *plane = &args->plane[SLC];
    const int64_t entries = mask_entries(args->capacity, args->rule.block_size, args->rule.stride);
    const int64_t heads = plane->blocks.shape[1], keys[] = {1, entries, heads, plane->dim};
    *job =
        (nsa_job){.args = args, .kernels = cpu_kernels_for(exec->cpu_level)->nsa, .threads = exec->threads};
    job->shape = decode_shape_of(exec, plane->blocks.dtype, plane->dim, plane->dim_v, args->rule.scale);
    job->cmp = (args->branches & 1u << CMP) != 0;
    job->slc = (args->branches & 1u << SLC) != 0;
    job->win = (args->branches & 1u << WIN) != 0;
    job->chooses = job->slc && !args->listed;
    job->softmax = args->rule.scorer == SELECT_PROBABILITY;
    job->group = args->q.shape[2] / heads;
    job->lists = args->rule.scope == LIST_BY_HEAD ? job->group : 1;
    job->gate = (gate_args){
        .kind = args->gate, .q = args->q, .w_gate = args->w_gate, .gates = args->gates, .o = args->o};
    job->select = (select_args){.seqs = {.batch = 1, .n_q = args->capacity, .n_kv = entries},
                                .rule = args->rule,
                                .causal = true,
                                .visibility = ENTRY_COMPLETE,
                                .tile = 1,
                                .q = args->q,
                                .keys = quern_tensor_contiguous(NULL, plane->blocks.dtype, 4, keys),
                                .blocks = args->blocks,
                                .count = args->block_count};
    if (job->chooses) select_plan_make(exec, &job->select, &job->plan);
    job->plan.tiles = 1;
    job->width = round_up16(entries + 1) + STEP_KEYS;
    job->batch = args->step.slots.shape[0];
    job->runs = arena_take(a, (size_t)job->batch * sizeof *job->runs);
    job->tasks = arena_take(a, (size_t)(job->batch + 1) * sizeof *job->tasks);
    job->spaces = arena_take(a, sizeof *job->spaces * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        nsa_space space;
        carve_space(job, a, &space);
        if (a->base != NULL) job->spaces[i] = space;
    }
}

static void find_runs(const nsa_job *job)
{
    job->tasks[0] = 0;
    for (int64_t b = 0; b < job->batch; b++) {
        job->runs[b] = step_run_at(&job->args->step, b);
        job->tasks[b + 1] = job->tasks[b] + job->runs[b].count * job->args->plane[SLC].blocks.shape[1];
    }
}

/* The mean queries of the head's lists, scale folded in. */
static void make_means(const nsa_job *job, const nsa_query *q, nsa_space *s)
{
    const int64_t dim = job->shape.dim_k, rows = job->group / job->lists;
    float one[MAX_DIM];
    for (int64_t j = 0; j < job->lists; j++) {
        memset(s->mean + j * dim, 0, (size_t)dim * sizeof *s->mean);
        for (int64_t r = 0; r < rows; r++) {
            const row_source src = rows_at(&job->args->q, 0, q->row, q->head * job->group + j * rows + r, 1);
            job->kernels->sum_rows(&src, one);
            job->kernels->rows->add_scaled(s->mean + j * dim, one, job->args->rule.scale / (float)rows, dim);
        }
    }
}

/* scores[list][key ...] of a panel's entries by the mean queries. */
static void score_means(const nsa_job *job, const decode_panel *panel, int64_t key, nsa_space *s)
{
    const attention_kernels *k = job->shape.kernels;
    const int64_t dim = job->shape.dim_k;
    for (int64_t c = 0; c < panel->n; c += k->panel) {
        const int64_t n = panel->n - c < k->panel ? panel->n - c : k->panel;
        const row_source src = {panel->keys + c * dim * (int64_t)quern_dtype_size(job->shape.dtype),
                                job->shape.dtype, dim, n, dim};
        k->pack_keys_f32(&src, k->panel, s->keys);
        k->mm_f32(job->lists, round_up16(n), dim, s->mean, dim, 1, s->keys, k->panel, s->scores + key + c,
                  job->width, false);
    }
}

static void close_branch(const nsa_job *job, int branch, nsa_space *s)
{
    const int64_t width = job->shape.value_width;
    decode_rows_finish(&job->shape, &s->rows);
    for (int32_t r = 0; r < s->rows.n; r++)
        job->shape.kernels->rows->add_scaled(s->sum + r * width, s->rows.o + r * width,
                                             s->gates[3 * r + branch], width);
}

/* The panel of keys from `key` on. */
static decode_panel peek(const cache_plane *plane, const nsa_query *q, int64_t key, int64_t end)
{
    return decode_next_panel(plane, q->run->b, q->head, &key, end);
}

static decode_panel window_start(const nsa_job *job, const nsa_query *q)
{
    return peek(&job->args->plane[WIN], q, mask_window_first(q->position, job->args->window),
                q->position + 1);
}

/* What is read after the entries: a block that is known to be attended, or the window. */
static decode_panel after_entries(const nsa_job *job, const nsa_query *q)
{
    if (job->slc && job->args->listed) {
        const int32_t *list = row_at(&job->args->blocks, 0, q->head * job->lists, q->row);
        return peek(&job->args->plane[SLC], q, list[0] * job->args->rule.select_block, q->position + 1);
    }
    if (job->slc && job->args->rule.forced_first > 0)
        return peek(&job->args->plane[SLC], q, 0, q->position + 1);
    return job->win ? window_start(job, q) : (decode_panel){NULL, NULL, 0};
}

/* The entries that the query sees: their scores for the selection, and the compressed branch. */
static void run_entries(const nsa_job *job, const nsa_query *q, nsa_space *s)
{
    const int32_t most = job->cmp ? STEP_PANELS : SCORE_PANELS;
    const bool by_rows = job->cmp || job->softmax;
    decode_rows_reset(&s->rows, (int32_t)job->group);
    if (job->chooses && !job->softmax) make_means(job, q, s);
    for (int64_t key = 0, first = 0; key < q->seen; first = key) {
        const cache_plane *plane = &job->args->plane[CMP];
        decode_panel panels[STEP_PANELS];
        int32_t count = 0, keys;
        while (count < most && key < q->seen) {
            const int64_t at = key;
            panels[count] = decode_next_panel(plane, q->run->b, q->head, &key, q->seen);
            if (job->chooses && !job->softmax) score_means(job, &panels[count], at, s);
            count++;
        }
        if (!by_rows) continue;
        keys = decode_scores(&job->shape, &s->rows, panels, count, true, &s->scratch);
        for (int64_t r = 0; r < job->group && job->chooses && job->softmax; r++)
            memcpy(s->scores + r * job->width + first, s->scratch.s + r * STEP_KEYS,
                   (size_t)round_up16(keys) * sizeof *s->scores);
        s->scratch.ahead = key < q->seen ? peek(plane, q, key, q->seen) : after_entries(job, q);
        decode_add(&job->shape, &s->rows, panels, count, keys, job->cmp, &s->scratch);
        s->scratch.ahead.n = 0;
    }
    if (!job->cmp) {
        for (int64_t r = 0; r < job->group; r++)
            s->lse2[r] = s->rows.max[r] * job->shape.scale2 + log2f(s->rows.sum[r]);
        return;
    }
    close_branch(job, CMP, s);
    for (int64_t r = 0; r < job->group; r++) s->lse2[r] = log2_e * s->rows.sum[r];
}

static void choose(const nsa_job *job, const nsa_query *q, nsa_space *s)
{
    const int64_t rows = job->group / job->lists, cleared = round_up16(q->seen + 16);
    const attend_sequence seq = {.nq = q->position + 1, .nk = q->seen};
    for (int64_t j = 0; j < job->lists; j++) {
        float *entries = s->scores + j * job->width;
        if (job->softmax) {
            entries = s->select.entries;
            memset(entries, 0,
                   (size_t)(cleared < job->plan.width ? cleared : job->plan.width) * sizeof *entries);
            for (int64_t r = 0; r < rows; r++) s->seen[r] = (int32_t)q->seen;
            job->kernels->add_probabilities(s->scores + j * rows * job->width, job->width, (int32_t)rows,
                                            s->seen, (int32_t)round_up16(q->seen), job->shape.scale2,
                                            s->lse2 + j * rows, entries);
        }
        select_choose(&job->plan, &seq, q->head * job->lists + j, q->position, q->row, entries, &s->select);
    }
}

static void step(const nsa_job *job, const decode_panel *panel, nsa_space *s)
{
    const int32_t keys = decode_scores(&job->shape, &s->rows, panel, 1, false, &s->scratch);
    decode_add(&job->shape, &s->rows, panel, 1, keys, true, &s->scratch);
}

/* `after`: what is read next. */
static void run_pending(const nsa_job *job, decode_panel after, nsa_space *s)
{
    s->scratch.ahead = after;
    if (s->pending.n > 0) step(job, &s->pending, s);
    s->scratch.ahead.n = 0;
    s->pending.n = 0;
}

static void run_gathered(const nsa_job *job, nsa_space *s)
{
    const int64_t size = (int64_t)quern_dtype_size(job->shape.dtype);
    const decode_panel panel = {s->scratch.gathered,
                                s->scratch.gathered + PANEL_KEYS * job->shape.dim_k * size, s->gathered};
    if (s->gathered > 0) step(job, &panel, s);
    s->gathered = 0;
}

static void gather(const nsa_job *job, decode_panel panel, nsa_space *s)
{
    const int64_t size = (int64_t)quern_dtype_size(job->shape.dtype), key = job->shape.dim_k * size,
                  value = job->shape.dim_v * size;
    while (panel.n > 0) {
        const int64_t room = PANEL_KEYS - s->gathered, n = panel.n < room ? panel.n : room;
        memcpy(s->scratch.gathered + s->gathered * key, panel.keys, (size_t)(n * key));
        memcpy(s->scratch.gathered + PANEL_KEYS * key + s->gathered * value, panel.values,
               (size_t)(n * value));
        panel.keys += n * key;
        panel.values += n * value;
        panel.n -= n;
        s->gathered += n;
        if (s->gathered == PANEL_KEYS) run_gathered(job, s);
    }
}

/* Keys [from, end) of a plane. */
static void run_tokens(const nsa_job *job, const nsa_query *q, int branch, int64_t from, int64_t end,
                       nsa_space *s)
{
    while (from < end) {
        const decode_panel panel =
            decode_next_panel(&job->args->plane[branch], q->run->b, q->head, &from, end);
        if (panel.n < PANEL_KEYS) {
            gather(job, panel, s);
            continue;
        }
        run_pending(job, panel, s);
        s->pending = panel;
    }
}

static void run_selected(const nsa_job *job, const nsa_query *q, nsa_space *s)
{
    const int64_t length = job->args->rule.select_block, rows = job->group / job->lists;
    decode_rows_reset(&s->rows, (int32_t)job->group);
    const decode_rows all = s->rows;
    for (int64_t j = 0; j < job->lists; j++) {
        const int32_t *list = row_at(&job->args->blocks, 0, q->head * job->lists + j, q->row);
        s->rows.q = (float *)all.q + j * rows * job->shape.key_words;
        s->rows.o = all.o + j * rows * job->shape.value_width;
        s->rows.max = all.max + j * rows;
        s->rows.sum = all.sum + j * rows;
        s->rows.n = (int32_t)rows;
        s->rows.fresh = true;
        for (int64_t i = 0; i < job->args->rule.k && list[i] >= 0; i++) {
            const int64_t end = (list[i] + 1) * length;
            run_tokens(job, q, SLC, list[i] * length, end < q->position + 1 ? end : q->position + 1, s);
        }
        run_pending(job, job->win ? window_start(job, q) : s->after, s);
        run_gathered(job, s);
    }
    s->rows = all;
    s->rows.fresh = false;
    close_branch(job, SLC, s);
}

static void run_window(const nsa_job *job, const nsa_query *q, nsa_space *s)
{
    const int64_t low = mask_window_first(q->position, job->args->window);
    decode_rows_reset(&s->rows, (int32_t)job->group);
    run_tokens(job, q, WIN, low, q->position + 1, s);
    run_pending(job, s->after, s);
    run_gathered(job, s);
    close_branch(job, WIN, s);
}

static nsa_query query_at(const nsa_job *job, int64_t index)
{
    const nsa_decode_args *args = job->args;
    int64_t b = 0, high = job->batch;
    while (high - b > 1) {
        const int64_t middle = (b + high) / 2;
        if (job->tasks[middle] <= index) b = middle;
        else high = middle;
    }
    const step_run *run = &job->runs[b];
    const int64_t task = index - job->tasks[b], query = task % run->count, position = run->first + query;
    return (nsa_query){.run = run,
                       .head = task / run->count,
                       .row = run->row + query,
                       .position = position,
                       .seen = mask_entries(position + 1, args->rule.block_size, args->rule.stride)};
}

/* The first panel of the task that is taken next where every thread takes one in turn. */
static decode_panel first_of_next(const nsa_job *job, int64_t index)
{
    const int64_t next = index + job->threads;
    if (next >= job->tasks[job->batch]) return (decode_panel){NULL, NULL, 0};
    const nsa_query q = query_at(job, next);
    if ((job->cmp || job->chooses) && q.seen > 0) return peek(&job->args->plane[CMP], &q, 0, q.seen);
    return after_entries(job, &q);
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    const nsa_job *job = arg;
    const nsa_decode_args *args = job->args;
    const int64_t width = job->shape.value_width;
    const nsa_query q = query_at(job, index);
    nsa_space *s = &job->spaces[thread];
    s->after = first_of_next(job, index);
    decode_rows_pack(&job->shape, &args->q, q.row, q.head * job->group, job->group, 0, &s->rows);
    memset(s->sum, 0, (size_t)(job->group * width) * sizeof *s->sum);
    if (args->ungated)
        for (int64_t i = 0; i < 3 * job->group; i++) s->gates[i] = 1.0f;
    else gate_make(&job->gate, job->kernels, 0, q.row, 1, q.head * job->group, job->group, s->gates);
    if (job->cmp || job->chooses) run_entries(job, &q, s);
    if (job->chooses) choose(job, &q, s);
    if (job->slc) run_selected(job, &q, s);
    if (job->win) run_window(job, &q, s);
    for (int64_t r = 0; r < job->group; r++)
        job->shape.kernels->rows->convert(s->sum + r * width, QUERN_F32,
                                          row_at(&args->o, 0, q.row, q.head * job->group + r), args->o.dtype,
                                          job->shape.dim_v);
}

size_t cpu_nsa_decode_workspace(const stage_exec *exec, const nsa_decode_args *args)
{
    arena a = {NULL, 0};
    nsa_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_nsa_decode(const stage_exec *exec, const nsa_decode_args *args, void *workspace)
{
    quern_status status = check_step(exec, &args->step, args->q.shape[1]);
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        if (is_present(&args->plane[i].blocks))
            status = check_plane(exec, &args->plane[i], &args->step, i == CMP ? args->rule.block_size : 0,
                                 args->rule.stride);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    nsa_job job;
    carve(exec, args, &a, &job);
    find_runs(&job);
    parallel_for(exec, job.tasks[job.batch], run_task, &job);
    return QUERN_OK;
}
