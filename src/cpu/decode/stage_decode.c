/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_decode.c - the decode stage: dense attention of the newest tokens over a cache.
 *
 * A task is one key/value head of one sequence, up to 96 query rows of it (whole queries), and a share of the
 * keys. Up to 8 queries a sequence, the keys are cut into at most 32 shares of 1024 or more, by the
 * sequence's length alone; their results (o, maximum, sum) meet in the workspace and are added in order. So
 * neither the number of threads nor the rest of the batch changes a bit. More queries make enough tasks
 * without shares.
 *
 * Panels that every query of a task sees are packed once for all of them; the others are cut to the keys that
 * each query sees. Limit: the read bandwidth on keys and values (panels.c).
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/decode/panels.h"
#include "cpu/stages.h"

#include <math.h>
#include <string.h>

enum {
    ROWS_MOST = 96,
    QUERIES_SPLIT = 8,
    SHARES_MOST = 32,
    SHARE_KEYS = 1024,
    TOGETHER_MOST = 16,
    CHUNKS_A_THREAD = 16
};

/* A run's first task and tile, and its shares' results in the workspace. */
typedef struct run_place {
    step_run run;
    int64_t task, tile, part; /* part: in rows */
} run_place;

typedef struct decode_space {
    decode_rows rows;
    decode_scratch scratch;
} decode_space;

typedef struct decode_job {
    const decode_args *args;
    decode_shape shape;
    int64_t batch, group, tile_queries, shares_most, together;
    run_place *places; /* [batch + 1] */
    float *parts;      /* [rows][value_width + 2]: o, maximum, sum */
    decode_space *spaces;
} decode_job;

static int64_t lesser(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t shares_of(int64_t keys)
{
    const int64_t shares = (keys + SHARE_KEYS - 1) / SHARE_KEYS;
    return shares < 1 ? 1 : lesser(shares, SHARES_MOST);
}

static int64_t tiles_of(const decode_job *job, const step_run *run)
{
    return (run->count + job->tile_queries - 1) / job->tile_queries;
}

/* The number of tasks for each of a run's tiles; 1: a task computes a whole tile. */
static int64_t shares_laid_out(const decode_job *job, const step_run *run)
{
    return run->count <= QUERIES_SPLIT ? job->shares_most : 1;
}

/* Query rows of a full tile of the run. */
static int64_t tile_rows(const decode_job *job, const step_run *run)
{
    return lesser(run->count, job->tile_queries) * job->group;
}

/* The most rows of parts that the call can need: a tile that is not full takes the room of a full one. */
static int64_t part_rows(const decode_job *job)
{
    const int64_t batch = job->args->step.slots.shape[0], queries = job->args->q.shape[1],
                  split = lesser(queries, batch * QUERIES_SPLIT),
                  spare = job->tile_queries < QUERIES_SPLIT ? batch * (job->tile_queries - 1) : 0;
    return job->shares_most > 1 ? (split + spare) * job->args->q.shape[2] * job->shares_most : 0;
}

static void carve(const stage_exec *exec, const decode_args *args, arena *a, decode_job *job)
{
    const cache_plane *plane = &args->tokens;
    *job = (decode_job){
        .args = args,
        .shape = decode_shape_of(exec, plane->blocks.dtype, plane->dim, plane->dim_v, args->scale)};
    job->batch = args->step.slots.shape[0];
    job->group = args->q.shape[2] / plane->blocks.shape[1];
    job->tile_queries = job->group < ROWS_MOST ? ROWS_MOST / job->group : 1;
    const bool windowed = args->window > 0 && args->window < args->capacity;
    job->shares_most = shares_of(windowed ? lesser(args->window + PANEL_KEYS + QUERIES_SPLIT, args->capacity)
                                          : args->capacity);
    job->places = arena_take(a, (size_t)(job->batch + 1) * sizeof *job->places);
    job->parts = arena_take(a, (size_t)(part_rows(job) * (job->shape.value_width + 2)) * sizeof(float));
    job->spaces = arena_take(a, sizeof *job->spaces * (size_t)exec->threads);
    const int64_t most = lesser(args->q.shape[1], job->tile_queries) * job->group;
    for (int32_t i = 0; i < exec->threads; i++) {
        decode_space space;
        decode_rows_carve(&job->shape, most, a, &space.rows);
        decode_scratch_carve(&job->shape, most, a, &space.scratch);
        if (a->base != NULL) job->spaces[i] = space;
    }
}

static void find_places(const decode_job *job)
{
    run_place at = {.task = 0};
    for (int64_t b = 0; b < job->batch; b++) {
        at.run = step_run_at(&job->args->step, b);
        const step_run *run = &at.run;
        const int64_t tiles = tiles_of(job, run) * job->args->tokens.blocks.shape[1],
                      shares = shares_laid_out(job, run);
        job->places[b] = at;
        at.task += tiles * shares;
        at.tile += tiles;
        if (shares > 1) at.part += tiles * shares * tile_rows(job, run);
    }
    job->places[job->batch] = at;
}

/* A tile of a run's queries and the keys that they see. */
typedef struct query_tile {
    const step_run *run;
    int64_t head, first, queries; /* the first query's number in the run */
    int64_t start, end;           /* of the keys */
    int64_t share_keys, shares;
} query_tile;

static int64_t low_of(const decode_args *args, int64_t position)
{
    return mask_window_first(position, args->window);
}

static query_tile tile_at(const decode_job *job, const step_run *run, int64_t tile)
{
    query_tile t = {.run = run, .head = tile / tiles_of(job, run)};
    t.first = tile % tiles_of(job, run) * job->tile_queries;
    t.queries = lesser(run->count - t.first, job->tile_queries);
    t.start = low_of(job->args, run->first + t.first) / PANEL_KEYS * PANEL_KEYS;
    t.end = run->first + t.first + t.queries;
    t.shares = shares_laid_out(job, run) > 1 ? shares_of(t.end - t.start) : 1;
    t.share_keys = round_up((t.end - t.start + t.shares - 1) / t.shares, PANEL_KEYS);
    return t;
}

/* Computes a panel that not every query sees whole, query by query. `key`: the panel's first. */
static void run_edge(const decode_job *job, const query_tile *t, const decode_panel *panel, int64_t key,
                     decode_space *s)
{
    const int64_t size = (int64_t)quern_dtype_size(job->shape.dtype);
    for (int64_t i = 0; i < t->queries; i++) {
        const int64_t position = t->run->first + t->first + i, low = low_of(job->args, position);
        const int64_t from = low > key ? low - key : 0, to = lesser(position + 1 - key, panel->n);
        if (from >= to) continue;
        const decode_panel seen = {panel->keys + from * job->shape.dim_k * size,
                                   panel->values + from * job->shape.dim_v * size, to - from};
        decode_rows rows = s->rows;
        rows.q = (float *)rows.q + i * job->group * job->shape.key_words;
        rows.o += i * job->group * job->shape.value_width;
        rows.max += i * job->group;
        rows.sum += i * job->group;
        rows.n = (int32_t)job->group;
        const int32_t keys = decode_scores(&job->shape, &rows, &seen, 1, false, &s->scratch);
        decode_add(&job->shape, &rows, &seen, 1, keys, true, &s->scratch);
    }
}

/* `after`: the panel that the thread will read next. */
static void run_keys(const decode_job *job, const query_tile *t, int64_t from, int64_t to,
                     const decode_panel *after, decode_space *s)
{
    const cache_plane *plane = &job->args->tokens;
    const int64_t first = t->run->first + t->first, low = low_of(job->args, first + t->queries - 1);
    int64_t next_key = from;
    decode_panel next = *after;
    if (from < to) next = decode_next_panel(plane, t->run->b, t->head, &next_key, to);
    for (int64_t key = from; key < to;) {
        const decode_panel panel = next;
        next = next_key < to ? decode_next_panel(plane, t->run->b, t->head, &next_key, to) : *after;
        s->scratch.ahead = next;
        if (low <= key && first + 1 >= key + panel.n) {
            const int32_t keys = decode_scores(&job->shape, &s->rows, &panel, 1, false, &s->scratch);
            decode_add(&job->shape, &s->rows, &panel, 1, keys, true, &s->scratch);
        } else {
            run_edge(job, t, &panel, key, s);
        }
        key += panel.n;
    }
}

/* Leaves to the keys what a sink leaves of the denominator. */
static void take_sinks(const decode_job *job, const query_tile *t, const decode_rows *rows)
{
    const double ln2 = 0.69314718055994530942;
    const int64_t width = job->shape.value_width;
    for (int32_t r = 0; r < rows->n; r++) {
        const float sink = ((const float *)job->args->sink.data)[t->head * job->group + r % job->group];
        const double lse = (double)rows->max[r] * (double)job->shape.scale2 * ln2 + log((double)rows->sum[r]);
        if (sink == INFINITY) memset(rows->o + r * width, 0, (size_t)width * sizeof *rows->o);
        else if (sink != -INFINITY && rows->sum[r] != 0.0f)
            job->shape.kernels->scale_row(rows->o + r * width, (float)attend_keys_share(lse, sink), width);
    }
}

static void store(const decode_job *job, const query_tile *t, decode_rows *rows)
{
    const decode_args *args = job->args;
    if (is_present(&args->sink)) take_sinks(job, t, rows);
    decode_rows_finish(&job->shape, rows);
    for (int32_t r = 0; r < rows->n; r++) {
        const int64_t row = t->run->row + t->first + r / job->group,
                      head = t->head * job->group + r % job->group;
        job->shape.kernels->rows->convert(rows->o + r * job->shape.value_width, QUERN_F32,
                                          row_at(&args->o, 0, row, head), args->o.dtype, job->shape.dim_v);
        if (is_present(&args->lse)) *(float *)row_at(&args->lse, 0, head, row) = rows->sum[r];
    }
}

/* The run whose tasks (or, by_tile, tiles) hold `index`. */
static int64_t run_of(const decode_job *job, int64_t index, bool by_tile)
{
    int64_t low = 0, high = job->batch;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if ((by_tile ? job->places[middle].tile : job->places[middle].task) <= index) low = middle;
        else high = middle;
    }
    return low;
}

static float *part_at(const decode_job *job, int64_t run, int64_t task)
{
    return job->parts + (job->places[run].part + task * tile_rows(job, &job->places[run].run)) *
                            (job->shape.value_width + 2);
}

/* A share of a tile's keys: [from, to). */
typedef struct key_share {
    int64_t b, task, share; /* task: its number in the run */
    query_tile tile;
    int64_t from, to;
} key_share;

static key_share share_at(const decode_job *job, int64_t index)
{
    key_share k = {.b = run_of(job, index, false)};
    const step_run *run = &job->places[k.b].run;
    const int64_t laid_out = shares_laid_out(job, run);
    k.task = index - job->places[k.b].task;
    k.tile = tile_at(job, run, k.task / laid_out);
    k.share = k.task % laid_out;
    k.from = k.tile.start + k.share * k.tile.share_keys;
    k.to = lesser(k.from + k.tile.share_keys, k.tile.end);
    return k;
}

static void run_share(const decode_job *job, const key_share *k, const decode_panel *after, decode_space *s)
{
    const query_tile *t = &k->tile;
    const int64_t width = job->shape.value_width;
    for (int64_t i = 0; i < t->queries; i++)
        decode_rows_pack(&job->shape, &job->args->q, t->run->row + t->first + i, t->head * job->group,
                         job->group, (int32_t)(i * job->group), &s->rows);
    decode_rows_reset(&s->rows, (int32_t)(t->queries * job->group));
    memset(s->rows.o, 0, (size_t)(s->rows.n * width) * sizeof(float));
    s->rows.fresh = false;
    run_keys(job, t, k->from, k->to, after, s);
    if (shares_laid_out(job, t->run) == 1) {
        store(job, t, &s->rows);
        return;
    }
    float *part = part_at(job, k->b, k->task);
    for (int32_t r = 0; r < s->rows.n; r++, part += width + 2) {
        memcpy(part, s->rows.o + r * width, (size_t)width * sizeof *part);
        part[width] = s->rows.max[r];
        part[width + 1] = s->rows.sum[r];
    }
}

/* A thread takes tasks that follow each other, whose keys mostly follow each other in memory: one stream. */
static void run_tasks(void *arg, int64_t index, int32_t thread)
{
    const decode_job *job = arg;
    const int64_t first = index * job->together,
                  end = lesser(first + job->together, job->places[job->batch].task);
    key_share now, next = share_at(job, first);
    for (int64_t i = first; i < end; i++) {
        decode_panel after = {NULL, NULL, 0};
        now = next;
        if (i + 1 < end) {
            next = share_at(job, i + 1);
            int64_t key = next.from;
            if (key < next.to)
                after =
                    decode_next_panel(&job->args->tokens, next.tile.run->b, next.tile.head, &key, next.to);
        }
        if (now.share < now.tile.shares) run_share(job, &now, &after, &job->spaces[thread]);
    }
}

/* Adds a tile's shares in order. */
static void run_combine(void *arg, int64_t index, int32_t thread)
{
    const decode_job *job = arg;
    const int64_t b = run_of(job, index, true), tile = index - job->places[b].tile,
                  width = job->shape.value_width;
    const step_run *run = &job->places[b].run;
    const int64_t laid_out = shares_laid_out(job, run);
    if (laid_out == 1) return;
    const query_tile t = tile_at(job, run, tile);
    decode_rows *rows = &job->spaces[thread].rows;
    decode_rows_reset(rows, (int32_t)(t.queries * job->group));
    memset(rows->o, 0, (size_t)(rows->n * width) * sizeof *rows->o);
    rows->fresh = false;
    for (int32_t r = 0; r < rows->n; r++) {
        for (int64_t i = 0; i < t.shares; i++) {
            const float most = (part_at(job, b, tile * laid_out + i) + r * (width + 2))[width];
            if (most > rows->max[r]) rows->max[r] = most;
        }
        for (int64_t i = 0; i < t.shares; i++) {
            const float *part = part_at(job, b, tile * laid_out + i) + r * (width + 2);
            if (part[width] == -INFINITY && part[width + 1] == 0.0f) continue; /* no key; NaN has a sum */
            const float factor = exp2f((part[width] - rows->max[r]) * job->shape.scale2);
            job->shape.kernels->rows->add_scaled(rows->o + r * width, part, factor, width);
            rows->sum[r] += factor * part[width + 1];
        }
    }
    store(job, &t, rows);
}

size_t cpu_decode_workspace(const stage_exec *exec, const decode_args *args)
{
    arena a = {NULL, 0};
    decode_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_decode(const stage_exec *exec, const decode_args *args, void *workspace)
{
    quern_status status = check_step(exec, &args->step, args->q.shape[1]);
    if (status == QUERN_OK) status = check_plane(exec, &args->tokens, &args->step, 0, 0);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    decode_job job;
    carve(exec, args, &a, &job);
    find_places(&job);
    const int64_t tasks = job.places[job.batch].task,
                  share = tasks / ((int64_t)exec->threads * CHUNKS_A_THREAD);
    job.together = share < 1 ? 1 : lesser(share, TOGETHER_MOST);
    parallel_for(exec, (tasks + job.together - 1) / job.together, run_tasks, &job);
    if (job.places[job.batch].part > 0) parallel_for(exec, job.places[job.batch].tile, run_combine, &job);
    return QUERN_OK;
}
