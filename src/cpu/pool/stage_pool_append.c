/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_pool_append.c - the pool_append stage: tokens into states, token by token. The sums of a state lag
 * behind by the rows in its ring.
 *
 * A call merges the rows that leave the ring; where a block becomes whole, it merges the ring's rows too,
 * into a copy of the sums, and emits the entry. Where a format may refuse an entry the stage works on
 * copies: it writes states and outputs after it has checked every entry of both compressors. Rows are merged
 * in order, some at a time, which gives the bits of one by one. A token costs the merges of a row; an entry
 * those of up to `ring` rows more, without series a of entries that are out, and a copy of the sums (at most
 * 12 KiB at C 512). A task is a sequence of one compressor.
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
    int64_t position, end; /* of the first new token, of the one after these */
    int64_t merged, left;  /* rows in the sums: before and after the call */
    int64_t entry, made;   /* its first one in the call's outputs; how many */
    bool anew;             /* its sums are cleared first */
    float *data;
} append_state;

/* What a compressor of the call needs. */
typedef struct append_job {
    const pool_append_args *args;
    const pool_append_part *part;
    const cpu_kernels *kernels;
    f32_rows bias_a, bias_b;
    entry_plan entry;
    int64_t batch, width, columns, sums_floats; /* of both accumulators */
    int64_t entries;                            /* that become whole */
    char *bytes; /* a stored row before its page takes its data and its scales */
    append_state *states;
    float *work;              /* [batch]: sums with the ring's rows, the state's new sums */
    float *rows;              /* a thread's: a row, angles */
    float *finished, *pooled; /* entries and pooled rows before they are stored, or NULL */
} append_job;

typedef struct append_call {
    int parts;
    append_job job[POOL_PARTS];
} append_call;

static float *ring_row(const append_job *job, const append_state *s, int64_t q)
{
    return s->data + job->sums_floats + q % job->args->ring * job->columns;
}

/* Entries of the call, at most. */
static int64_t most_entries(const pool_append_args *args, const pool_append_part *part)
{
    return is_present(&part->table) ? part->proj.shape[0] / args->ratio + args->step.slots.shape[0]
                                    : part->out.shape[0];
}

/* `careful`: some entry of the call may be refused. */
static void carve_part(const stage_exec *exec, const pool_append_args *args, const pool_append_part *part,
                       bool careful, arena *a, append_job *job)
{
    *job = (append_job){.args = args, .part = part, .kernels = cpu_kernels_for(exec->cpu_level)};
    job->batch = args->step.slots.shape[0];
    job->width = part->width;
    job->columns = pool_row_columns(args->overlap, part->width);
    job->sums_floats = pool_sums_floats(args->overlap, part->width);
    job->bias_a = carve_rows(&part->bias_a, a);
    job->bias_b = carve_rows(&part->bias_b, a);
    job->entry = carve_entry(&part->entry, job->kernels, job->width, args->ratio, a);
    job->states = arena_take(a, (size_t)job->batch * sizeof *job->states);
    job->work = arena_take(a, (size_t)(2 * job->batch * job->sums_floats) * sizeof(float));
    job->rows = arena_take(a, (size_t)(2 * job->width * exec->threads) * sizeof(float));
    /* Pages of bytes are written by one thread, as store_rows writes them. */
    const bool waits = careful || is_present(&part->table);
    const size_t waiting = waits ? (size_t)(most_entries(args, part) * job->width) * sizeof(float) : 0;
    if (waiting > 0) job->finished = arena_take(a, waiting);
    if (waiting > 0 && is_present(&part->pooled)) job->pooled = arena_take(a, waiting);
    if (is_present(&part->table) && part->out.ndim == 2)
        job->bytes = arena_take(a, (size_t)(part->out.shape[1] / part->page));
}

static void carve(const stage_exec *exec, const pool_append_args *args, arena *a, append_call *call)
{
    bool careful = false;
    call->parts = args->part[1].width > 0 ? 2 : 1;
    for (int i = 0; i < call->parts; i++) careful = careful || args->part[i].entry.format != ENTRY_ROWS;
    for (int i = 0; i < call->parts; i++)
        carve_part(exec, args, &args->part[i], careful, a, &call->job[i]);
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

/* A compressor's data of a sequence with tokens: the position is one that the state's rows come to, the table
 * of angles has its entries' positions, and pages are the pool's. */
static quern_status check_part(const stage_exec *exec, const pool_append_args *args,
                               const pool_append_part *part, const step_run *run)
{
    const int64_t r = args->ratio, end = run->first + run->count, whole = end / r, before = run->first / r,
                  last = (whole - 1) * r + (part->entry.rope_last ? r - 1 : 0);
    const quern_tensor *angles = &part->entry.cos_sin;
    stage_fault fault = {QUERN_STATUS_BAD_POSITION, &args->step.positions, run->b, .most = INT32_MAX};
    if (run->first < 0 || end > INT32_MAX ||
        (is_present(angles) && whole > before && last >= angles->shape[0]))
        return stage_report(exec, fault);
    const int64_t merged = run->first > 0 ? i32_at(&part->merged, run->slot, 0) : 0;
    fault.least = merged;
    fault.most = merged + args->ring;
    if (run->first > 0 && (merged < 0 || run->first < merged || run->first - merged > args->ring))
        return stage_report(exec, fault);
    if (!is_present(&part->table) || whole == before) return QUERN_OK;
    return check_pages(exec, &part->table, run->b, before / part->page, (whole - 1) / part->page + 1,
                       part->out.shape[0]);
}

/* Sequence b of a step: its state is one of each compressor's, and no other's. */
static quern_status check_sequence(const stage_exec *exec, const pool_append_args *args, int64_t b)
{
    const step_run run = step_run_at(&args->step, b);
    const int64_t slots = args->part[0].state.shape[0];
    const stage_fault fault = {QUERN_STATUS_BAD_POSITION, &args->step.slots, b, .least = -1,
                               .most = slots - 1};
    if (run.slot < -1 || run.slot >= slots) return stage_report(exec, fault);
    if (run.count == 0) return QUERN_OK;
    if (stands_before(&args->step, b, run.slot)) return stage_report(exec, fault);
    quern_status status = QUERN_OK;
    for (int i = 0; i < POOL_PARTS && status == QUERN_OK; i++)
        if (args->part[i].width > 0) status = check_part(exec, args, &args->part[i], &run);
    return status;
}

/* Whether a sequence of a step goes on, or its fault, old or new, stops it. */
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

/* Sequence b of a compressor. `goes_on`: its state takes in the tokens. */
static void find_state(append_job *job, int64_t b, bool goes_on)
{
    const pool_append_args *args = job->args;
    const pool_append_part *part = job->part;
    const step_run run = step_run_at(&args->step, b);
    const int32_t *rows = (const int32_t *)args->step.rows.data + b * args->step.rows.strides[0];
    const int64_t first = run.first > 0 ? run.first : 0, count = rows[args->step.rows.strides[1]] - rows[0];
    append_state *s = &job->states[b];
    *s = (append_state){.run = run, .position = first, .end = first + count, .entry = job->entries};
    s->anew = first == 0;
    if (goes_on) s->data = (float *)part->state.data + run.slot * part->state.strides[0];
    if (goes_on && !s->anew) s->merged = i32_at(&part->merged, run.slot, 0);
    s->left = s->end - args->ring > s->merged ? s->end - args->ring : s->merged;
    s->made = s->end / job->args->ratio - s->position / job->args->ratio;
    job->entries += s->made;
}

static void find_states(append_call *call, step_faults *faults)
{
    const pool_append_args *args = call->job[0].args;
    for (int64_t b = 0; b < call->job[0].batch; b++) {
        const step_run run = step_run_at(&args->step, b);
        const bool live = goes_on(args, &run, faults);
        for (int i = 0; i < call->parts; i++) find_state(&call->job[i], b, live);
    }
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
    const quern_tensor *proj = &job->part->proj;
    if (proj->dtype != QUERN_F32 || first + rows > s->run.count ||
        (rows > 1 && proj->strides[0] != job->columns))
        return 0;
    const float *row = (const float *)proj->data + (s->run.row + first) * proj->strides[0];
    return (int64_t)((uintptr_t)row - (uintptr_t)at);
}

static row_run rows_from(const append_job *job, const append_state *s, int64_t q, int64_t end)
{
    const int64_t ring = job->args->ring;
    const quern_tensor *proj = &job->part->proj;
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
    else if (is_present(&job->part->pooled))
        memcpy(out_row(&job->part->pooled, n), row, (size_t)width * sizeof *row);
    finish_entry(&job->entry, row, position, row + width);
    if (job->finished != NULL) memcpy(job->finished + n * width, row, (size_t)width * sizeof *row);
    else
        encode_row(job->kernels, job->part->entry.format, row, width, out_row(&job->part->out, n),
                   job->part->out.dtype);
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
        const int64_t j = q % r, whole = q - j + r, block = q / r;
        const row_run run = rows_from(job, s, q, whole < end ? whole : end);
        const bool final = last && whole == end;
        if (whole > end || block >= emitted) merge_run(job, 0, &run, j, sums);
        if (overlap && !final) merge_run(job, 1, &run, j, sums + 3 * job->width);
        q += run.rows;
        if (q < whole) continue;
        if (block >= emitted) emit(job, sums, n++, block * r, row);
        if (!final) begin_next(job, overlap, sums);
    }
    return n;
}

/* The memory of a state's new sums: the state itself, if the format accepts every entry. */
static float *sums_to_keep(const append_job *job, int64_t b)
{
    return job->finished == NULL ? job->states[b].data : job->work + (2 * b + 1) * job->sums_floats;
}

/* Copies of the sums what the ring's rows up to `last`, the end of a block, need: series a of an emitted
 * block, and series b of the last, are not. */
static void copy_ahead(const append_job *job, const append_state *s, int64_t last, int64_t emitted,
                       const float *sums, float *ahead)
{
    const int64_t r = job->args->ratio, block = s->left / r, series = 3 * job->width;
    const bool own = block >= emitted, next = job->args->overlap && (block + 1) * r < last;
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

static void append_one(void *arg, int64_t index, int32_t thread)
{
    const append_call *call = arg;
    const append_job *job = &call->job[index / call->job[0].batch];
    const int64_t b = index % job->batch;
    const append_state *s = &job->states[b];
    const int64_t emitted = s->position / job->args->ratio, blocks = s->end / job->args->ratio,
                  last = blocks * job->args->ratio; /* rows from here on are in no whole block */
    float *kept = sums_to_keep(job, b), *ahead = job->work + 2 * b * job->sums_floats,
          *row = job->rows + 2 * thread * job->width;
    if (s->data == NULL) return;
    if (s->anew) clear_all(job, kept);
    else if (kept != s->data) memcpy(kept, s->data, (size_t)job->sums_floats * sizeof *kept);
    const int64_t n = advance(job, s, s->merged, s->left, false, emitted, s->entry, kept, row);
    if (blocks == emitted || s->left >= last) return;
    copy_ahead(job, s, last, emitted, kept, ahead);
    advance(job, s, s->left, last, true, emitted, n, ahead, row);
}

/* Writes a state. */
static void commit_one(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const append_call *call = arg;
    const append_job *job = &call->job[index / call->job[0].batch];
    const int64_t b = index % job->batch;
    const append_state *s = &job->states[b];
    const quern_tensor *proj = &job->part->proj, *merged = &job->part->merged;
    const int64_t size = (int64_t)quern_dtype_size(proj->dtype);
    const float *sums = sums_to_keep(job, b);
    if (s->data == NULL) return;
    if (sums != s->data) memcpy(s->data, sums, (size_t)job->sums_floats * sizeof *sums);
    for (int64_t q = s->left > s->position ? s->left : s->position; q < s->end; q++) {
        const int64_t row = s->run.row + q - s->position;
        job->kernels->rows->convert((const char *)proj->data + row * proj->strides[0] * size, proj->dtype,
                                    ring_row(job, s, q), QUERN_F32, job->columns);
    }
    ((int32_t *)merged->data)[s->run.slot * merged->strides[0]] = (int32_t)s->left;
}

/* Every entry of a sequence is finite before it is quantised. A format may have fewer bytes than the row has
 * columns. */
static quern_status check_entries(const stage_exec *exec, const append_job *job, const append_state *s)
{
    const quern_tensor *out = &job->part->out;
    const int64_t bytes = row_bytes(job->part->entry.format, job->width, out->dtype);
    for (int64_t n = s->entry; s->data != NULL && n < s->entry + s->made; n++) {
        const float *row = job->finished + n * job->width;
        if (row_is_encodable(job->kernels, job->part->entry.format, row, job->width)) continue;
        int64_t column = 0;
        while ((row[column] - row[column]) == 0.0f) column++;
        return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_NOT_FINITE,
                                                .tensor = out,
                                                .index = n * bytes + (column < bytes ? column : bytes - 1)});
    }
    return QUERN_OK;
}

/* The same of all sequences; those of which one is not stop, in both compressors. */
static void check_all_entries(append_call *call, step_faults *faults)
{
    const quern_tensor *fault = &call->job[0].args->fault;
    for (int64_t b = 0; b < call->job[0].batch; b++) {
        bool bad = false;
        for (int i = 0; i < call->parts; i++) {
            const append_job *job = &call->job[i];
            const append_state *s = &job->states[b];
            int32_t *word = is_present(fault) && s->data != NULL
                                ? (int32_t *)fault->data + s->run.slot * fault->strides[0]
                                : NULL;
            if (job->finished != NULL && step_faults_take(faults, check_entries(&faults->exec, job, s), word))
                bad = true;
        }
        for (int i = 0; i < call->parts && bad; i++) call->job[i].states[b].data = NULL;
    }
}

/* Stores the entries of a sequence, which all have waited. */
static void store_entries(const append_job *job, const append_state *s)
{
    const pool_append_part *part = job->part;
    const quern_tensor *table = &part->table;
    const int64_t first = s->position / job->args->ratio;
    for (int64_t i = 0; i < s->made; i++) {
        const int64_t n = s->entry + i, e = first + i;
        const float *row = job->finished + n * job->width;
        if (job->pooled != NULL)
            memcpy(out_row(&part->pooled, n), job->pooled + n * job->width, (size_t)job->width * sizeof *row);
        if (!is_present(table)) {
            encode_row(job->kernels, part->entry.format, row, job->width, out_row(&part->out, n),
                       part->out.dtype);
            continue;
        }
        const int64_t page =
            ((const int32_t *)table->data)[s->run.b * table->strides[0] + e / part->page * table->strides[1]];
        store_in_page(job->kernels, part->entry.format, row, job->width, &part->out, part->page,
                      page * part->page + e % part->page, job->bytes);
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
    static const quern_tensor none;
    const bool pages = is_present(&job->part->table);
    const quern_tensor *const outs[] = {pages ? &none : &job->part->out, &job->part->pooled};
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
    append_call call;
    carve(exec, args, &a, &call);
    return arena_size(&a);
}

static void fill_biases(append_job *job)
{
    const row_kernels *rows = job->kernels->rows;
    fill_rows(rows, &job->part->bias_a, &job->bias_a);
    fill_rows(rows, &job->part->bias_b, &job->bias_b);
    fill_rows(rows, &job->part->entry.norm_weight, &job->entry.norm);
}

quern_status cpu_pool_append(const stage_exec *exec, const pool_append_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    append_call call;
    carve(exec, args, &a, &call);
    const int64_t batch = call.job[0].batch;
    step_faults faults;
    quern_status status = check_step_rows(exec, &args->step, args->part[0].proj.shape[0]);
    if (status != QUERN_OK) return status;
    step_faults_begin(&faults, exec, is_present(&args->fault));
    find_states(&call, &faults);
    if ((status = step_faults_end(&faults, exec)) != QUERN_OK) return status;
    for (int i = 0; i < call.parts; i++) fill_biases(&call.job[i]);
    parallel_for(exec, call.parts * batch, append_one, &call);
    check_all_entries(&call, &faults);
    if ((status = step_faults_end(&faults, exec)) != QUERN_OK) return status;
    for (int i = 0; i < call.parts; i++) {
        const append_job *job = &call.job[i];
        for (int64_t b = 0; b < batch && job->finished != NULL; b++)
            if (job->states[b].data != NULL) store_entries(job, &job->states[b]);
        zero_unused(job);
    }
    parallel_for(exec, call.parts * batch, commit_one, &call);
    return QUERN_OK;
}
