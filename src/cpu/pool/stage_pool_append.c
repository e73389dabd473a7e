/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_pool_append.c - the pool_append stage: tokens into states, token by token. The sums of a state lag
 * behind by the rows in its ring.
 *
 * A call merges the rows that leave the ring; where a block becomes whole, it merges the ring's rows too,
 * into a copy of the sums, and emits the entry. With formats that may refuse an entry the stage works on
 * copies: it writes states and outputs after it has checked every entry. Rows are merged in order, some at
 * a time, which gives the bits of one by one. A token costs the merges of a row; an entry those of up to
 * `ring` rows more, without series a of entries that are out, and a copy of the sums (at most 12 KiB at C
 * 512).
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/pool/pool.h"
#include "cpu/step_faults.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

/* A sequence of the call. */
typedef struct append_state {
    step_run run;
    int64_t origin, position, end; /* of the first token, of the first new one, of the one after these */
    int64_t merged, left;          /* rows in the sums: before and after the call */
    int64_t entry, made;           /* its first one in the call's outputs; how many */
    bool anew;                     /* its sums are cleared first */
    float *data;
} append_state;

typedef struct append_job {
    const pool_append_args *args;
    const cpu_kernels *kernels;
    f32_rows bias_a, bias_b;
    entry_plan entry;
    int64_t batch, width, columns, sums_floats; /* of both accumulators */
    int64_t entries;                            /* that become whole */
    append_state *states;
    float *work;              /* [batch]: sums with the ring's rows, the state's new sums */
    float *rows;              /* a thread's: a row, angles */
    float *finished, *pooled; /* entries and pooled rows before they are stored, or NULL */
} append_job;

static int64_t entries_before(const append_job *job, const append_state *s, int64_t position)
{
    return (position - s->origin) / job->args->ratio;
}

static float *ring_row(const append_job *job, const append_state *s, int64_t q)
{
    return s->data + job->sums_floats + q % job->args->ring * job->columns;
}

static append_job carve(const stage_exec *exec, const pool_append_args *args, arena *a)
{
    append_job job = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level)};
    job.batch = args->step.slots.shape[0];
    job.width = args->width;
    job.columns = pool_row_columns(args->overlap, args->width);
    job.sums_floats = pool_sums_floats(args->overlap, args->width);
    job.bias_a = carve_rows(&args->bias_a, a);
    job.bias_b = carve_rows(&args->bias_b, a);
    job.entry = carve_entry(&args->entry, job.kernels, job.width, args->ratio, a);
    job.states = arena_take(a, (size_t)job.batch * sizeof *job.states);
    job.work = arena_take(a, (size_t)(2 * job.batch * job.sums_floats) * sizeof(float));
    job.rows = arena_take(a, (size_t)(2 * job.width * exec->threads) * sizeof(float));
    const size_t waiting =
        args->entry.format != ENTRY_ROWS ? (size_t)(args->out.shape[0] * job.width) * sizeof(float) : 0;
    if (waiting > 0) job.finished = arena_take(a, waiting);
    if (waiting > 0 && is_present(&args->pooled)) job.pooled = arena_take(a, waiting);
    return job;
}

/* Whether an earlier sequence of the step has tokens and the same slot. */
static bool stands_before(const stage_step *step, int64_t b, int64_t slot)
{
    bool found = false;
    for (int64_t i = 0; i < b && !found; i++) {
        const step_run run = step_run_at(step, i);
        found = run.slot == slot && run.count > 0;
    }
    return found;
}

/* Sequence b of a step that names slots: its state is one of `state`, its position is one that the state's
 * rows come to, and the table has its entries' positions. */
static quern_status check_sequence(const stage_exec *exec, const pool_append_args *args, int64_t b)
{
    const step_run run = step_run_at(&args->step, b);
    const int64_t r = args->ratio, end = run.first + run.count, slots = args->state.shape[0],
                  last = (end / r - 1) * r + (args->entry.rope_last ? r - 1 : 0);
    const quern_tensor *table = &args->entry.cos_sin;
    stage_fault fault = {QUERN_STATUS_BAD_POSITION, &args->step.slots, b, .least = -1, .most = slots - 1};
    if (run.slot < -1 || run.slot >= slots) return stage_report(exec, fault);
    if (run.count == 0) return QUERN_OK;
    if (stands_before(&args->step, b, run.slot)) return stage_report(exec, fault);
    fault = (stage_fault){QUERN_STATUS_BAD_POSITION, &args->step.positions, b, .most = INT32_MAX};
    if (run.first < 0 || end > INT32_MAX ||
        (is_present(table) && end / r > run.first / r && last >= table->shape[0]))
        return stage_report(exec, fault);
    const int64_t merged = run.first > 0 ? i32_at(&args->merged, run.slot, 0) : 0;
    fault.least = merged;
    fault.most = merged + args->ring;
    if (run.first > 0 && (merged < 0 || run.first < merged || run.first - merged > args->ring))
        return stage_report(exec, fault);
    return QUERN_OK;
}

/* Whether a sequence of a step that names slots goes on, or its fault, old or new, stops it. */
static bool goes_on(const pool_append_args *args, const step_run *run, step_faults *faults)
{
    const bool known = is_present(&args->fault) && run->slot >= 0 && run->slot < args->fault.shape[0];
    int32_t *fault = known ? (int32_t *)args->fault.data + run->slot * args->fault.strides[0] : NULL;
    if (known && run->count > 0 && run->first > 0 && *fault != 0) return false;
    const quern_status status = check_sequence(&faults->exec, args, run->b);
    const bool of_slots = faults->now.tensor == &args->step.slots; /* the slot's own sequence goes on */
    if (step_faults_take(faults, status, of_slots ? NULL : fault)) return false;
    if (known && run->count > 0) *fault = 0;
    return run->slot >= 0 && run->count > 0;
}

static void find_states(append_job *job, step_faults *faults)
{
    const pool_append_args *args = job->args;
    const bool by_slot = args->by_slot;
    int64_t entry = 0;
    for (int64_t b = 0; b < job->batch; b++) {
        const step_run run = step_run_at(&args->step, b);
        const int32_t *rows = (const int32_t *)args->step.rows.data + b * args->step.rows.strides[0];
        const int64_t first = run.first > 0 ? run.first : 0,
                      count = rows[args->step.rows.strides[1]] - rows[0];
        append_state *s = &job->states[b];
        *s = (append_state){.run = run, .position = first, .end = first + count, .entry = entry};
        s->origin = i32_at(&args->origins, b, 0);
        s->anew = by_slot && first == 0;
        if (by_slot ? goes_on(args, &run, faults) : run.slot >= 0)
            s->data = (float *)args->state.data + run.slot * args->state.strides[0];
        if (s->data != NULL && !s->anew) s->merged = i32_at(&args->merged, by_slot ? run.slot : b, 0);
        s->left = s->end - args->ring > s->merged ? s->end - args->ring : s->merged;
        s->made = entries_before(job, s, s->end) - entries_before(job, s, s->position);
        entry += s->made;
    }
    job->entries = entry;
}

/* Contiguous rows from q on: in the ring up to its end, or in proj. */
typedef struct row_run {
    const void *data;
    quern_dtype dtype;
    int64_t stride, rows;
    int64_t ahead; /* to the memory that is requested meanwhile, in bytes; 0: none */
} row_run;

/* While old rows are merged, which lie in the caches, as many of the call's are requested: these may come
 * from memory. `at` is the oldest row of a run of the ring, `first` its number there. */
static int64_t ahead_of(const append_job *job, const append_state *s, const float *at, int64_t first,
                        int64_t rows)
{
    const quern_tensor *proj = &job->args->proj;
    if (proj->dtype != QUERN_F32 || first + rows > s->run.count ||
        (rows > 1 && proj->strides[0] != job->columns))
        return 0;
    const float *row = (const float *)proj->data + (s->run.row + first) * proj->strides[0];
    return (int64_t)((uintptr_t)row - (uintptr_t)at);
}

static row_run rows_from(const append_job *job, const append_state *s, int64_t q, int64_t end)
{
    const int64_t ring = job->args->ring;
    const quern_tensor *proj = &job->args->proj;
    if (q >= s->position) {
        const int64_t row = s->run.row + q - s->position;
        return (row_run){(const char *)proj->data +
                             row * proj->strides[0] * (int64_t)quern_dtype_size(proj->dtype),
                         proj->dtype, proj->strides[0], end - q, 0};
    }
    if (end > s->position) end = s->position;
    const int64_t to_the_end = ring - q % ring, rows = end - q < to_the_end ? end - q : to_the_end;
    const float *at = ring_row(job, s, q);
    return (row_run){at, QUERN_F32, job->columns, rows, ahead_of(job, s, at, q - s->merged, rows)};
}

/* Merges a run's rows, which begin with token j of a block. */
static void merge_run(const append_job *job, int series, const row_run *run, int64_t j, float *sums)
{
    const f32_rows *bias = series == 0 ? &job->bias_a : &job->bias_b;
    const pool_sums own = sums_at(sums, job->width);
    pool_rows rows = series_rows(run->data, run->dtype, run->stride, job->width, series, bias, 0, run->rows);
    rows.bias = bias->data + j * bias->stride;
    rows.ahead = run->ahead;
    rows.l2 = true; /* L1 holds what is merged meanwhile */
    merge_block(job->kernels, &rows, job->width, &own);
}

static char *out_row(const quern_tensor *t, int64_t n)
{
    return (char *)t->data + n * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
}

static void emit(const append_job *job, const float *sums, int64_t n, int64_t position, float *row)
{
    const int64_t width = job->width;
    const pool_sums own = {(float *)(uintptr_t)sums, (float *)(uintptr_t)(sums + width),
                           (float *)(uintptr_t)(sums + 2 * width)};
    job->kernels->pool->pooled_row(&own, width, row, NULL);
    if (job->pooled != NULL) memcpy(job->pooled + n * width, row, (size_t)width * sizeof *row);
    else if (is_present(&job->args->pooled))
        memcpy(out_row(&job->args->pooled, n), row, (size_t)width * sizeof *row);
    finish_entry(&job->entry, row, position, row + width);
    if (job->finished != NULL) memcpy(job->finished + n * width, row, (size_t)width * sizeof *row);
    else
        encode_row(job->kernels, job->args->entry.format, row, width, out_row(&job->args->out, n),
                   job->args->out.dtype);
}

/* Ends a whole block and begins the next one. */
static void begin_next(const append_job *job, bool overlap, float *sums)
{
    const int64_t width = job->width;
    const pool_sums next = sums_at(overlap ? sums + 3 * width : sums, width);
    if (overlap) memcpy(sums, sums + 3 * width, 3 * (size_t)width * sizeof *sums);
    clear_sums(&next, width);
}

/* Merges rows q ... end - 1 of a sequence into sums and emits the entries from block `emitted` on, as the
 * n-th and later ones of the call. Series a of a block that ends here and was emitted before is not needed.
 * `last`: no block follows, so the sums that one would begin with are not needed. Returns the n that comes
 * next. */
static int64_t advance(const append_job *job, const append_state *s, int64_t q, int64_t end, bool last,
                       int64_t emitted, int64_t n, float *sums, float *row)
{
    const int64_t r = job->args->ratio;
    const bool overlap = job->args->overlap;
    while (q < end) {
        const int64_t j = (q - s->origin) % r, whole = q - j + r, block = (q - s->origin) / r;
        const row_run run = rows_from(job, s, q, whole < end ? whole : end);
        const bool final = last && whole == end;
        if (whole > end || block >= emitted) merge_run(job, 0, &run, j, sums);
        if (overlap && !final) merge_run(job, 1, &run, j, sums + 3 * job->width);
        q += run.rows;
        if (q < whole) continue;
        if (block >= emitted) emit(job, sums, n++, s->origin + block * r, row);
        if (!final) begin_next(job, overlap, sums);
    }
    return n;
}

/* The memory of a state's new sums: the state itself, if the format accepts every entry. */
static float *sums_to_keep(const append_job *job, int64_t b)
{
    return job->finished == NULL ? job->states[b].data : job->work + (2 * b + 1) * job->sums_floats;
}

static void merge_prev(const append_job *job, int64_t b, float *sums)
{
    const quern_tensor *prev = &job->args->prev_b;
    const char *first =
        (const char *)prev->data + b * prev->strides[0] * (int64_t)quern_dtype_size(prev->dtype);
    const pool_rows before =
        series_rows(first, prev->dtype, prev->strides[1], job->width, 0, &job->bias_b, 0, job->args->ratio);
    const pool_sums own = sums_at(sums, job->width);
    merge_block(job->kernels, &before, job->width, &own);
}

/* Copies of the sums what the ring's rows up to `last`, the end of a block, need: series a of an emitted
 * block, and series b of the last, are not. */
static void copy_ahead(const append_job *job, const append_state *s, int64_t last, int64_t emitted,
                       const float *sums, float *ahead)
{
    const int64_t r = job->args->ratio, block = (s->left - s->origin) / r, series = 3 * job->width;
    const bool own = block >= emitted, next = job->args->overlap && s->origin + (block + 1) * r < last;
    if (own) memcpy(ahead, sums, (size_t)series * sizeof *sums);
    if (next) memcpy(ahead + series, sums + series, (size_t)series * sizeof *sums);
}

static void clear_all(const append_job *job, float *sums)
{
    for (int64_t i = 0; i < job->sums_floats; i += 3 * job->width) {
        const pool_sums own = sums_at(sums + i, job->width);
        clear_sums(&own, job->width);
    }
}

static void append_one(void *arg, int64_t b, int32_t thread)
{
    const append_job *job = arg;
    const append_state *s = &job->states[b];
    const int64_t emitted = entries_before(job, s, s->position), blocks = entries_before(job, s, s->end),
                  last = s->origin + blocks * job->args->ratio; /* rows from here on are in no whole block */
    float *kept = sums_to_keep(job, b), *ahead = job->work + 2 * b * job->sums_floats,
          *row = job->rows + 2 * thread * job->width;
    if (s->data == NULL) return;
    if (s->anew) clear_all(job, kept);
    else if (kept != s->data) memcpy(kept, s->data, (size_t)job->sums_floats * sizeof *kept);
    if (is_present(&job->args->prev_b)) merge_prev(job, b, kept);
    const int64_t n = advance(job, s, s->merged, s->left, false, emitted, s->entry, kept, row);
    if (blocks == emitted || s->left >= last) return;
    copy_ahead(job, s, last, emitted, kept, ahead);
    advance(job, s, s->left, last, true, emitted, n, ahead, row);
}

/* Writes a state. */
static void commit_one(void *arg, int64_t b, int32_t thread)
{
    (void)thread;
    const append_job *job = arg;
    const append_state *s = &job->states[b];
    const quern_tensor *proj = &job->args->proj, *merged = &job->args->merged;
    const int64_t size = (int64_t)quern_dtype_size(proj->dtype);
    const float *sums = sums_to_keep(job, b);
    if (s->data == NULL) return;
    if (sums != s->data) memcpy(s->data, sums, (size_t)job->sums_floats * sizeof *sums);
    for (int64_t q = s->left > s->position ? s->left : s->position; q < s->end; q++) {
        const int64_t row = s->run.row + q - s->position;
        job->kernels->rows->convert((const char *)proj->data + row * proj->strides[0] * size, proj->dtype,
                                    ring_row(job, s, q), QUERN_F32, job->columns);
    }
    ((int32_t *)merged->data)[(job->args->by_slot ? s->run.slot : b) * merged->strides[0]] = (int32_t)s->left;
}

/* Every entry of a sequence is finite before it is quantised. A format may have fewer bytes than the row has
 * columns. */
static quern_status check_entries(const stage_exec *exec, const append_job *job, const append_state *s)
{
    const int64_t bytes = job->args->out.shape[job->args->out.ndim - 1];
    for (int64_t n = s->entry; s->data != NULL && n < s->entry + s->made; n++) {
        const float *row = job->finished + n * job->width;
        if (row_is_encodable(job->kernels, job->args->entry.format, row, job->width)) continue;
        int64_t column = 0;
        while ((row[column] - row[column]) == 0.0f) column++;
        return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_NOT_FINITE,
                                                .tensor = &job->args->out,
                                                .index = n * bytes + (column < bytes ? column : bytes - 1)});
    }
    return QUERN_OK;
}

/* The same of all sequences; those of which one is not stop. */
static void check_all_entries(const append_job *job, step_faults *faults)
{
    const quern_tensor *fault = &job->args->fault;
    for (int64_t b = 0; b < job->batch; b++) {
        append_state *s = &job->states[b];
        int32_t *word = is_present(fault) && s->data != NULL
                            ? (int32_t *)fault->data + s->run.slot * fault->strides[0]
                            : NULL;
        if (step_faults_take(faults, check_entries(&faults->exec, job, s), word)) s->data = NULL;
    }
}

/* Stores the entries of a format that may refuse some. */
static void store_entries(const append_job *job)
{
    const pool_append_args *args = job->args;
    const int64_t width = job->width;
    for (int64_t b = 0; b < job->batch; b++) {
        const append_state *s = &job->states[b];
        for (int64_t n = s->entry; s->data != NULL && n < s->entry + s->made; n++) {
            encode_row(job->kernels, args->entry.format, job->finished + n * width, width,
                       out_row(&args->out, n), args->out.dtype);
            if (job->pooled != NULL)
                memcpy(out_row(&args->pooled, n), job->pooled + n * width, (size_t)width * sizeof(float));
        }
    }
}

static void zero(const quern_tensor *t, int64_t first, int64_t end)
{
    for (int64_t n = first; is_present(t) && n < end && n < t->shape[0]; n++)
        memset(out_row(t, n), 0, (size_t)t->shape[1] * quern_dtype_size(t->dtype));
}

/* Rows behind the entries, and those of sequences that do not go on. */
static void zero_unused(const append_job *job)
{
    const quern_tensor *const outs[] = {&job->args->out, &job->args->pooled};
    for (int i = 0; i < 2; i++) {
        for (int64_t b = 0; b < job->batch; b++) {
            const append_state *s = &job->states[b];
            if (s->data == NULL) zero(outs[i], s->entry, s->entry + s->made);
        }
        zero(outs[i], job->entries, INT64_MAX);
    }
}

size_t cpu_pool_append_workspace(const stage_exec *exec, const pool_append_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_pool_append(const stage_exec *exec, const pool_append_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    append_job job = carve(exec, args, &a);
    step_faults faults;
    quern_status status = args->by_slot ? check_step_rows(exec, &args->step, args->proj.shape[0]) : QUERN_OK;
    if (status != QUERN_OK) return status;
    step_faults_begin(&faults, exec, is_present(&args->fault));
    find_states(&job, &faults);
    if ((status = step_faults_end(&faults, exec)) != QUERN_OK) return status;
    fill_rows(job.kernels->rows, &args->bias_a, &job.bias_a);
    fill_rows(job.kernels->rows, &args->bias_b, &job.bias_b);
    fill_rows(job.kernels->rows, &args->entry.norm_weight, &job.entry.norm);
    parallel_for(exec, job.batch, append_one, &job);
    if (job.finished != NULL) {
        check_all_entries(&job, &faults);
        if ((status = step_faults_end(&faults, exec)) != QUERN_OK) return status;
        store_entries(&job);
    }
    if (args->by_slot) zero_unused(&job);
    parallel_for(exec, job.batch, commit_one, &job);
    return QUERN_OK;
}
