/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_backward.c - the attend_backward stage, one pass over the scores.
 *
 * Every (sequence, unit) is cut into chunks of query rows whose size depends on the shape alone. A task owns
 * one chunk's dQ. It walks the keys that the chunk sees in ascending order, tile by tile, multiplies all the
 * chunk's rows with a tile of keys, and then adds the tile's dK and dV to the f32 gradients in memory. With
 * lists it walks block by block, with the rows that list the block.
 *
 * The tasks of a head add to a key in turns (turns.h), so the bits do not depend on the number of threads,
 * nothing is summed twice, and there are no partial gradients.
 *
 * A chunk of 768 rows (D = 128) streams through L2 and L3 once per 192 keys, and dK and dV travel to memory
 * once per 768 rows: each takes 1 to 2% of the time. With lists a chunk is large enough that the rows that
 * choose a block fill tiles. Late chunks of a causal sequence see the most keys and go first.
 */
#include "core/parallel.h"
#include "cpu/attend/attend_backward.h"
#include "cpu/kernels/attend/turns.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

enum {
    CHUNK_BYTES = 1400 << 10 /* of q, d_q and d_o: 768 rows at D = 128 */,
    LISTED_LEAST = 2048,
    LISTED_MOST = 8192 /* rows */
};
enum { GATHER_BELOW = 48 /* rows that share a list */, ROWS_AHEAD = 8 };

typedef struct backward_thread {
    backward_rows chunk, gathered; /* gathered: for lists that few rows share */
    backward_scratch scratch;
    backward_keys keys;
    int32_t *rows; /* [BACKWARD_ROWS]: the chunk's rows that were gathered */
    attend_lists lists;
} backward_thread;

typedef struct backward_job {
    backward_plan plan;
    backward_thread *threads;
    bool listed, gathers;
    int64_t chunk_rows, slots; /* slots: chunks of one unit, over all sequences */
    int32_t turns;             /* units of a kv head */
    turn *turn_of;             /* [kv_heads][slots * turns] */
    turn *passed;              /* [kv_heads]: all tasks before this one have finished */
} backward_job;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* D or Dv rounded up so that a row of floats is an odd number of cache lines. */
static int64_t odd_lines(int64_t dim)
{
    return (round_up(dim, 16) / 16 | 1) * 16;
}

static int64_t rows_of_chunk(const backward_plan *p, bool listed)
{
    const int64_t bytes = 4 * (2 * p->key_ld + p->value_ld),
                  fit = CHUNK_BYTES / bytes / BACKWARD_ROWS * BACKWARD_ROWS;
    if (!listed) return fit < BACKWARD_ROWS ? BACKWARD_ROWS : fit;
    /* Enough rows that, with random lists, a tile of them lists each block of the longest sequence. */
    const attend_args *args = p->attend.args;
    const int64_t per_tile = args->tile * p->attend.hs, blocks = args->seqs.n_kv / p->attend.list_block + 1;
    const int64_t length = args->list.shape[3] > 0 ? args->list.shape[3] : 1;
    const int64_t rows = BACKWARD_ROWS * blocks / length;
    return round_up(rows < LISTED_LEAST ? LISTED_LEAST : rows > LISTED_MOST ? LISTED_MOST : rows, per_tile);
}

static backward_plan plan_of(const stage_exec *exec, const attend_args *args, arena *a)
{
    backward_plan p = {.attend = attend_plan_of(exec, args)};
    const attend_plan *f = &p.attend;
    p.value_words = f->bf16 ? f->dim_v / 2 : f->dim_v;
    p.key_width = round_up(f->dim_k, 16);
    p.value_width = round_up(f->dim_v, 16);
    p.key_ld = odd_lines(f->dim_k);
    p.value_ld = odd_lines(f->dim_v);
    p.key_panel = attend_row_panel(f, f->dim_k);
    const size_t rows = (size_t)f->packed_rows * (size_t)f->kv_heads;
    p.keys = arena_take(a, rows * (size_t)f->key_words * 4);
    p.values = arena_take(a, rows * (size_t)p.value_words * 4);
    p.key_rows = arena_take(a, rows * (size_t)round_up(p.key_width, p.key_panel) * (f->bf16 ? 2 : 4));
    p.nonfinite = arena_take(a, rows / KEY_ALIGN);
    p.d_k = gradient_carve(&args->d_k, a);
    p.d_v = gradient_carve(&args->d_v, a);
    return p;
}

static backward_job carve(const stage_exec *exec, const attend_args *args, arena *a)
{
    backward_job job = {.plan = plan_of(exec, args, a)};
    const backward_plan *p = &job.plan;
    const int64_t per_tile = args->tile * p->attend.hs, batch = args->seqs.batch;
    job.listed = args->list.ndim > 0;
    job.gathers = job.listed && (per_tile < GATHER_BELOW || per_tile % 2 != 0);
    job.chunk_rows = rows_of_chunk(p, job.listed);
    const int64_t rows = batch > 0 ? args->seqs.n_q * p->attend.hs : 0; /* varlen: rows past all sequences */
    job.slots = args->seqs.cu_q.ndim > 0 ? rows / job.chunk_rows + batch
                                         : batch * ((rows + job.chunk_rows - 1) / job.chunk_rows);
    job.turns = p->attend.kv_heads > 0 ? p->attend.units / p->attend.kv_heads : 1;
    job.turn_of = arena_take(a, sizeof(turn) * (size_t)(p->attend.units * job.slots));
    job.passed = arena_take(a, sizeof(turn) * (size_t)p->attend.kv_heads);
    job.threads = arena_take(a, sizeof *job.threads * (size_t)exec->threads);
    for (int32_t i = 0; i < exec->threads; i++) {
        backward_thread t = {.rows = NULL};
        backward_rows_carve(p, job.chunk_rows + 1, a, &t.chunk);
        backward_scratch_carve(p, a, &t.scratch);
        t.keys.d_k = arena_take(a, (size_t)(BACKWARD_KEYS * p->key_ld) * sizeof(float));
        t.keys.d_v = arena_take(a, (size_t)(BACKWARD_KEYS * p->value_ld) * sizeof(float));
        if (job.gathers) {
            backward_rows_carve(p, BACKWARD_ROWS, a, &t.gathered);
            t.rows = arena_take(a, BACKWARD_ROWS * sizeof *t.rows);
        }
        attend_lists_carve(&p->attend, job.chunk_rows, a, &t.lists);
        if (a->base != NULL) job.threads[i] = t;
    }
    return job;
}

static void pack_all(const stage_exec *exec, const backward_plan *p)
{
    const attend_args *args = p->attend.args;
    const attend_pack_target targets[] = {
        {&args->k, p->keys, p->key_rows, p->nonfinite, (int32_t)p->key_panel},
        {&args->v, p->values, NULL, NULL, 0}};
    attend_pack_all(exec, &p->attend, targets, 2);
}

/* The first slot of sequence b. */
static int64_t slot_of(const backward_job *job, int64_t b)
{
    const attend_args *args = job->plan.attend.args;
    if (args->seqs.cu_q.data == NULL) return b * (job->slots / args->seqs.batch);
    return ((const int32_t *)args->seqs.cu_q.data)[b] * (int64_t)job->plan.attend.hs / job->chunk_rows + b;
}

/* One task while it runs. */
typedef struct backward_task {
    backward_job *job;
    backward_thread *own;
    attend_sequence seq;
    int64_t row0, rows;
    int32_t unit, kv_head;
    turn *turns;
    int64_t first, self; /* indices into turns: the first task of this sequence and head, and this task */
    bool weighs;         /* the walk over the keys weighs coarse rows, before the gradients' walk */
} backward_task;

static void begin_keys(const backward_task *t, int64_t key0, int64_t key1)
{
    backward_keys *keys = &t->own->keys;
    keys->seq = &t->seq;
    keys->head = t->kv_head;
    keys->key0 = key0;
    keys->key1 = key1;
    for (int32_t i = 0; i < BACKWARD_KEYS / KEY_ALIGN; i++) keys->fresh[i] = true;
}

static void step(const backward_task *t, const backward_rows *rows, int64_t n)
{
    backward_thread *own = t->own;
    const int32_t count = (int32_t)least(n, BACKWARD_ROWS);
    if (t->weighs) backward_weigh(&t->job->plan, rows, count, &own->keys, &own->scratch);
    else backward_step(&t->job->plan, rows, count, &own->keys, &own->scratch);
}

/* Waits for the task's turn, adds the tile's dK and dV to memory, and lets the next task go on. */
static void end_keys(const backward_task *t)
{
    if (t->weighs) return;
    const backward_plan *p = &t->job->plan;
    const attention_kernels *k = p->attend.kernels;
    const backward_keys *keys = &t->own->keys;
    turn_wait(t->turns, &t->job->passed[t->kv_head], t->first, t->self, keys->key1);
    const int64_t base = keys->key0 & ~(int64_t)15;
    for (int64_t key = keys->key0; key < keys->key1; key++) {
        const int64_t c = key - base, token = t->seq.k0 + key;
        if (keys->fresh[c / KEY_ALIGN]) continue;
        if (p->d_k.data != NULL)
            k->rows->add_scaled(gradient_at(&p->d_k, t->seq.view_b, token, t->kv_head),
                                keys->d_k + c * p->key_ld, p->attend.args->scale, p->attend.dim_k);
        if (p->d_v.data != NULL)
            k->rows->add_scaled(gradient_at(&p->d_v, t->seq.view_b, token, t->kv_head),
                                keys->d_v + c * p->value_ld, 1.0f, p->attend.dim_v);
    }
    turn_pass(&t->turns[t->self], keys->key1);
}

static void run_range(const backward_task *t)
{
    const backward_plan *p = &t->job->plan;
    const backward_rows *chunk = &t->own->chunk;
    int64_t lo = t->seq.nk, end = 0;
    for (int64_t r = 0; r < t->rows; r++) {
        if (chunk->lo[r] < chunk->hi[r] && chunk->lo[r] < lo) lo = chunk->lo[r];
        if (chunk->lo[r] < chunk->hi[r] && chunk->hi[r] > end) end = chunk->hi[r];
    }
    for (int64_t key = lo / KEY_ALIGN * KEY_ALIGN; key < end; key += BACKWARD_KEYS) {
        begin_keys(t, key, least(key + BACKWARD_KEYS, end));
        for (int64_t r = 0; r < t->rows; r += BACKWARD_ROWS) {
            const backward_rows tile = backward_rows_from(p, chunk, r);
            step(t, &tile, t->rows - r);
        }
        end_keys(t);
    }
}

static void prefetch(const float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i, 1);
}

/* Runs the gathered rows against the current tile of keys and adds their dQ to the chunk's, or hands back
 * what was weighed. */
static void step_gathered(const backward_task *t, int32_t n)
{
    const backward_plan *p = &t->job->plan;
    const backward_rows *g = &t->own->gathered, *chunk = &t->own->chunk;
    backward_rows_pair(p, g, n);
    memset(g->d_q, 0, (size_t)(n * p->key_ld) * sizeof(float));
    step(t, g, n);
    for (int32_t i = 0; i < n && t->weighs; i++) {
        chunk->max[t->own->rows[i]] = g->max[i];
        chunk->sum[t->own->rows[i]] = g->sum[i];
        chunk->mean[t->own->rows[i]] = g->mean[i];
    }
    for (int32_t i = 0; i < n && !t->weighs; i++) {
        if (i + ROWS_AHEAD < n) prefetch(chunk->d_q + t->own->rows[i + ROWS_AHEAD] * p->key_ld, p->key_width);
        p->attend.kernels->rows->add_scaled(chunk->d_q + t->own->rows[i] * p->key_ld, g->d_q + i * p->key_ld,
                                            1.0f, p->key_width);
    }
}

/* Runs the rows of the tiles that list a block against the block's keys. */
static void run_block(const backward_task *t, const int32_t *entries, int32_t n)
{
    const backward_job *job = t->job;
    const backward_plan *p = &job->plan;
    const backward_rows *chunk = &t->own->chunk;
    const int64_t per_tile = p->attend.args->tile * p->attend.hs;
    const int32_t ahead = (int32_t)(ROWS_AHEAD / per_tile) + 1;
    int32_t gathered = 0;
    for (int32_t e = 0; e < n; e++) {
        if (job->gathers && e + ahead < n)
            for (int64_t r = entries[e + ahead] * per_tile, end = least(r + per_tile, t->rows); r < end; r++)
                backward_rows_prefetch(p, chunk, r);
        const int64_t from = entries[e] * per_tile, to = least(from + per_tile, t->rows);
        if (!job->gathers) {
            for (int64_t r = from; r < to; r += BACKWARD_ROWS) {
                const backward_rows tile = backward_rows_from(p, chunk, r);
                step(t, &tile, to - r);
            }
            continue;
        }
        for (int64_t r = from; r < to; r++) {
            if (chunk->hi[r] <= t->own->keys.key0) continue;
            t->own->rows[gathered] = (int32_t)r;
            backward_rows_copy(p, chunk, r, &t->own->gathered, gathered);
            if (++gathered == BACKWARD_ROWS) {
                step_gathered(t, gathered);
                gathered = 0;
            }
        }
    }
    if (gathered > 0) step_gathered(t, gathered);
}

static void run_lists(const backward_task *t)
{
    const attend_plan *f = &t->job->plan.attend;
    backward_thread *own = t->own;
    const int64_t blocks =
        attend_lists_invert(f, &t->seq, t->unit, t->row0, (int32_t)t->rows, own->chunk.hi, &own->lists);
    const int32_t *start = own->lists.start;
    for (int64_t x = 0; x < blocks; x++) {
        if (start[x] == start[x + 1]) continue;
        const int64_t end = least((x + 1) * f->list_block, t->seq.nk);
        for (int64_t key = x * f->list_block; key < end;) {
            const int64_t stop = least((key & ~(int64_t)15) + BACKWARD_KEYS, end);
            begin_keys(t, key, stop);
            run_block(t, own->lists.entries + start[x], start[x + 1] - start[x]);
            end_keys(t);
            key = stop;
        }
    }
}

static void walk(const backward_task *t)
{
    if (!t->job->listed) run_range(t);
    else if (attend_list_length(&t->job->plan.attend) > 0) run_lists(t);
}

static void run_task(void *arg, int64_t index, int32_t thread)
{
    backward_job *job = arg;
    const backward_plan *p = &job->plan;
    const attend_plan *f = &p->attend;
    const int64_t slot = job->slots - 1 - index / f->units;
    backward_task t = {.job = job, .own = &job->threads[thread], .unit = (int32_t)(index % f->units)};
    int64_t low = 0, high = f->sequences; /* the sequence: slot_of(low) <= slot < slot_of(high) */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (slot_of(job, middle) <= slot) low = middle;
        else high = middle;
    }
    t.seq = attend_sequence_at(f, low);
    t.kv_head = t.unit / job->turns;
    t.turns = job->turn_of + t.kv_head * job->slots * job->turns;
    t.self = (job->slots - 1 - slot) * job->turns + t.unit % job->turns;
    const int64_t next = low + 1 < f->sequences ? slot_of(job, low + 1) : job->slots;
    t.first = (job->slots - next) * job->turns;
    t.row0 = (slot - slot_of(job, low)) * job->chunk_rows;
    t.rows = least(t.seq.nq * f->hs - t.row0, job->chunk_rows);
    if (t.rows > 0) {
        t.weighs = backward_rows_load(p, &t.seq, t.unit, t.row0, t.rows, &t.own->chunk);
        if (t.weighs) {
            walk(&t);
            backward_rows_settle(p, t.unit, t.row0, t.rows, &t.own->chunk);
            t.weighs = false;
        }
        walk(&t);
        backward_rows_store(p, &t.seq, t.unit, t.row0, t.rows, &t.own->chunk);
    }
    turn_pass(&t.turns[t.self], TURN_DONE);
}

/* d_sink of one head from its rows' shares, which stand in delta. */
static void sum_sink(void *arg, int64_t head, int32_t thread)
{
    (void)thread;
    const attend_args *args = arg;
    const quern_tensor *shares = &args->delta;
    const int64_t tokens = token_rows(&args->seqs);
    double sum = 0;
    for (int64_t b = 0; b < shares->shape[0]; b++)
        for (int64_t n = 0; n < tokens; n++) sum += (double)*(const float *)row_at(shares, b, head, n);
    ((float *)args->d_sink.data)[head] = (float)-sum;
}

size_t cpu_attend_backward_workspace(const stage_exec *exec, const attend_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_attend_backward(const stage_exec *exec, const attend_args *args, void *workspace)
{
    const quern_status status = attend_check(exec, args);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    const attend_plan *f = &job.plan.attend;
    if (!args->accumulate_k) gradient_clear(exec, &args->d_k, &job.plan.d_k);
    if (!args->accumulate_v) gradient_clear(exec, &args->d_v, &job.plan.d_v);
    for (int64_t i = 0; i < f->units * job.slots; i++) atomic_init(&job.turn_of[i], 0);
    for (int32_t i = 0; i < f->kv_heads; i++) atomic_init(&job.passed[i], 0);
    pack_all(exec, &job.plan);
    parallel_for(exec, job.slots * f->units, run_task, &job);
    gradient_write(exec, &args->d_k, &job.plan.d_k, f->kernels->rows);
    gradient_write(exec, &args->d_v, &job.plan.d_v, f->kernels->rows);
    if (is_present(&args->d_sink))
        parallel_for(exec, args->d_sink.shape[0], sum_sink, (void *)(uintptr_t)args);
    if (is_present(&args->d_q) && !args->accumulate_q) zero_rows(&args->d_q, token_rows(&args->seqs));
    return QUERN_OK;
}
