/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_attend_gate.c - the attend_gate_forward stage: o = sum_b g_b o_b over the compressed, selected and
 * window branches, chunk by chunk, so that o_b reaches memory only if the caller wants it.
 *
 * Passes. A pass packs the keys and values of its branches, then runs every chunk of query rows against these
 * branches. It packs Q once, normalises each branch's O in place, scales it by its gate and adds it up in
 * f32. Non-temporal stores write the sum. All branches share one pass where they can. A new one starts
 *   - after the compressed branch, where its probabilities (softmax) choose the lists: selection needs its
 *     LSE for all rows of a tile and all heads of a group first;
 *   - where the next branch reads keys and values of its own, so that only one pair of panels exists at a
 *     time;
 *   - after the compressed branch, where its panels are larger than one LSE of the call (short strides), so
 *     that they are not in memory together with the tokens' panels.
 * A later pass starts its sums from o. In bf16 and f16 that rounds o once more; with o_b in memory it would
 * be rounded three times.
 *
 * Chunks and slices. Q is packed by chunks. Lists that are walked key by key run over a whole chunk, because
 * each block of keys is read once a chunk; a chunk has as many rows as fit q and their o into 3 MiB.
 * Everything else runs slice by slice: about 200 rows whose o, sums and gates stay in L2 from the products to
 * the store of o. Where no branch is walked by key, a chunk is one slice. A pass with lists by head has rows
 * of one head, for all of its branches. A chunk's result depends only on its rows.
 *
 * Limit: that of attend_tile.c, plus 1% for gates (three dot products a row) and sums (in L2). Against
 * separate stages this saves the traffic of o_b (written and read) and of Q, and a second packing of K and V:
 * 3 to 6% at 32k.
 */
#include "core/parallel.h"
#include "core/view.h"
#include "cpu/check_data.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/kernels/gate/gate.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { CMP, SLC, WIN, BRANCHES };
enum {
    CHUNK_BYTES = 3 << 20,
    CHUNK_MOST = 4096 /* rows */,
    SLICE_LEAST = 256,
    SLICE_MOST = 768 /* rows of lists walked by tile */
};

/* A thread's buffers. The branches share one scratch, because they run one after the other. */
typedef struct gated_space {
    attend_chunk chunk[BRANCHES]; /* by position in the pass; only the first one's q is used */
    attend_chunk slice;           /* has no q of its own */
    attend_scratch scratch[BRANCHES];
    float *sum;   /* [slice_rows][value_width] */
    float *gates; /* [slice_rows][3] */
} gated_space;

typedef struct gated_pass {
    int32_t branch[BRANCHES], count;
    bool wide[BRANCHES];            /* runs over a whole chunk */
    attend_packed packed[BRANCHES]; /* branches over the tokens may share one */
    int64_t chunk_rows, slice_rows, pieces;
    gated_space *spaces;
} gated_pass;

/* Never copy or move a job: its plans point into it. */
typedef struct gated_job {
    const attend_gate_args *args;
    const nsa_kernels *kernels;
    attend_args attend[BRANCHES];
    attend_plan plan[BRANCHES];
    select_args select;
    bool select_first, select_late;
    gated_pass pass[BRANCHES];
    int32_t passes, current, threads;
    void *scratch; /* used by selection and by the passes in turn */
} gated_job;

static bool is_on(const gated_job *job, int branch)
{
    return (job->args->branches & (1u << branch)) != 0;
}

static size_t packed_bytes(const attend_plan *plan)
{
    arena a = {NULL, 0};
    attend_packed packed;
    attend_packed_carve(plan, &a, &packed);
    return arena_size(&a);
}

/* Whether a branch can join the branches of a pass. */
static bool joins(const gated_job *job, const gated_pass *pass, int branch)
{
    const int last = pass->branch[pass->count - 1];
    if (last != CMP) return !job->args->separate[last] && !job->args->separate[branch];
    const quern_tensor *q = &job->attend[CMP].q;
    return !job->select_late &&
           packed_bytes(&job->plan[CMP]) <= (size_t)(q->shape[0] * q->shape[1] * q->shape[2]) * sizeof(float);
}

/* Whether the pass's i-th branch reads the same panels as the one before it. */
static bool shares_packed(const gated_pass *pass, int32_t i)
{
    return i > 0 && pass->branch[i - 1] != CMP;
}

/* Rows of chunks and slices: whole tiles, except that lists walked tile by tile may have larger tiles. */
static void size_chunks(const gated_job *job, gated_pass *pass)
{
    const attend_plan *first = &job->plan[pass->branch[0]];
    const int64_t tile = first->args->tile * first->hs;
    int64_t row_bytes = 4 * first->key_words, wide = 0, length = 0;
    for (int32_t i = 0; i < pass->count; i++) {
        const attend_plan *p = &job->plan[pass->branch[i]];
        pass->wide[i] = attend_walks_by_key(p);
        if (attend_list_length(p) > length) length = attend_list_length(p);
        if (!pass->wide[i]) continue;
        wide++;
        row_bytes += 4 * (p->value_width + 4);
    }
    if (wide > 0 || length == 0) pass->slice_rows = TILE_ROWS;
    else if (tile < SLICE_LEAST) pass->slice_rows = SLICE_LEAST / tile * tile;
    else pass->slice_rows = tile < SLICE_MOST ? tile : SLICE_MOST;
    pass->chunk_rows = pass->slice_rows;
    if (wide == 0) return;
    row_bytes += 4 * (length / tile + 1);
    pass->chunk_rows = CHUNK_BYTES / row_bytes < CHUNK_MOST ? CHUNK_BYTES / row_bytes : CHUNK_MOST;
    pass->chunk_rows = pass->chunk_rows < tile ? tile : pass->chunk_rows / tile * tile;
}

/* Carves a chunk's running softmax, without q. */
static void carve_rows(const attend_plan *p, int64_t rows, arena *a, attend_chunk *c)
{
    const size_t n = (size_t)rows * sizeof(float);
    *c = (attend_chunk){.capacity = (int32_t)rows,
                        .o = arena_take(a, n * (size_t)p->value_width),
                        .max = arena_take(a, n),
                        .sum = arena_take(a, n)};
    c->lo = arena_take(a, n);
    c->hi = arena_take(a, n);
}

static void carve_space(const gated_job *job, const gated_pass *pass, arena *a, gated_space *s)
{
    const attend_plan *first = &job->plan[pass->branch[0]];
    void *q = arena_take(a, (size_t)(pass->chunk_rows * first->key_words) * 4);
    for (int32_t i = 0; i < pass->count; i++) {
        if (pass->wide[i]) carve_rows(first, pass->chunk_rows, a, &s->chunk[i]);
        else s->chunk[i] = (attend_chunk){.capacity = (int32_t)pass->chunk_rows};
        s->chunk[i].q = q;
    }
    carve_rows(first, pass->slice_rows, a, &s->slice);
    s->sum = arena_take(a, (size_t)(pass->slice_rows * first->value_width) * sizeof(float));
    s->gates = arena_take(a, (size_t)pass->slice_rows * 3 * sizeof(float));
    size_t end = a->used;
    for (int32_t i = 0; i < pass->count; i++) {
        arena shared = *a;
        attend_scratch_carve(&job->plan[pass->branch[i]], (int32_t)pass->chunk_rows, &shared, &s->scratch[i]);
        if (shared.used > end) end = shared.used;
    }
    a->used = end;
}

/* Lays out a pass from `a` on; passes share their memory. Returns where it ends. */
static size_t carve_pass(const stage_exec *exec, const gated_job *job, gated_pass *pass, arena a)
{
    const attend_plan *plan = &job->plan[pass->branch[0]];
    size_chunks(job, pass);
    pass->pieces = (plan->args->seqs.n_q * plan->hs + pass->chunk_rows - 1) / pass->chunk_rows;
    for (int32_t i = 0; i < pass->count; i++) {
        if (shares_packed(pass, i)) pass->packed[i] = pass->packed[i - 1];
        else attend_packed_carve(&job->plan[pass->branch[i]], &a, &pass->packed[i]);
    }
    for (int32_t thread = 0; thread < exec->threads; thread++) {
        gated_space space;
        carve_space(job, pass, &a, &space);
        if (a.base != NULL) pass->spaces[thread] = space;
    }
    return a.used;
}

/* Fills the job except for what the workspace holds. */
static void plan_job(const stage_exec *exec, const attend_gate_args *args, arena *a, gated_job *job)
{
    const bool softmax = args->select.rule.scorer == SELECT_PROBABILITY;
    *job = (gated_job){.args = args,
                       .kernels = cpu_kernels_for(exec->cpu_level)->nsa,
                       .select = args->select,
                       .threads = exec->threads};
    for (int i = 0; i < BRANCHES; i++) job->attend[i] = args->branch[i];
    job->select_late = !args->select_given && softmax && is_on(job, CMP);
    job->select_first = !args->select_given && !job->select_late;
    quern_tensor *lse = &job->attend[CMP].lse;
    if (job->select_late) {
        if (!is_present(lse)) {
            const quern_tensor *q = &args->branch[CMP].q;
            const int64_t shape[] = {q->shape[0], q->shape[2], q->shape[1]};
            *lse = view_on(q, arena_take(a, (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float)),
                           QUERN_F32, 3, shape);
        }
        job->select.lse = *lse;
    }
    for (int i = 0; i < BRANCHES; i++) {
        if (!is_on(job, i)) continue;
        job->plan[i] = attend_plan_of(exec, &job->attend[i]);
        gated_pass *last = job->passes > 0 ? &job->pass[job->passes - 1] : NULL;
        if (last == NULL || !joins(job, last, i)) last = &job->pass[job->passes++];
        last->branch[last->count++] = i;
    }
    for (int32_t n = 0; n < job->passes; n++) {
        const gated_pass *pass = &job->pass[n];
        bool by_head = false;
        for (int32_t i = 0; i < pass->count; i++) by_head = by_head || job->plan[pass->branch[i]].hs == 1;
        for (int32_t i = 0; i < pass->count && by_head; i++) {
            attend_plan *p = &job->plan[pass->branch[i]];
            p->hs = 1;
            p->units = p->heads;
        }
    }
}

static void carve(const stage_exec *exec, const attend_gate_args *args, arena *a, gated_job *job)
{
    plan_job(exec, args, a, job);
    for (int32_t i = 0; i < job->passes; i++)
        job->pass[i].spaces = arena_take(a, sizeof(gated_space) * (size_t)exec->threads);
    const size_t start = a->used;
    size_t end = start + (args->select_given ? 0 : cpu_select_workspace(exec, &job->select));
    job->scratch = a->base != NULL ? a->base + start : NULL;
    for (int32_t i = 0; i < job->passes; i++) {
        const size_t used = carve_pass(exec, job, &job->pass[i], *a);
        if (used > end) end = used;
    }
    a->used = end;
}

/* Loads the rows' gates and starts their sums: from 0, or from what earlier passes left in o. */
static void begin_rows(const gated_job *job, const attend_plan *p, const attend_chunk *c, gated_space *s)
{
    const quern_tensor *o = &job->args->gate.o;
    if (job->current == 0) memset(s->sum, 0, (size_t)(c->rows * p->value_width) * sizeof *s->sum);
    /* Whole queries at once; the first and the last may be cut between heads. */
    for (int32_t r = 0, end; r < c->rows; r = end) {
        const int64_t query = c->seq.q0 + (c->row0 + r) / p->hs, first = (c->row0 + r) % p->hs,
                      left = c->rows - r;
        const bool whole = first == 0 && left >= p->hs;
        const int64_t tokens = whole ? left / p->hs : 1, heads = whole                  ? p->hs
                                                                 : left < p->hs - first ? left
                                                                                        : p->hs - first;
        end = r + (int32_t)(tokens * heads);
        gate_make(&job->args->gate, job->kernels, c->seq.view_b, query, tokens, c->head0 + first, heads,
                  s->gates + 3 * r);
        for (int32_t i = r; i < end && job->current > 0; i++) {
            const int64_t row = c->row0 + i;
            job->kernels->rows->convert(
                row_at(o, c->seq.view_b, c->seq.q0 + row / p->hs, c->head0 + row % p->hs), o->dtype,
                s->sum + i * p->value_width, QUERN_F32, p->dim_v);
        }
    }
}

static void store_rows(const gated_job *job, const attend_plan *p, const attend_chunk *c,
                       const gated_space *s)
{
    const quern_tensor *o = &job->args->gate.o;
    for (int32_t r = 0; r < c->rows; r++) {
        void *dst =
            row_at(o, c->seq.view_b, c->seq.q0 + (c->row0 + r) / p->hs, c->head0 + (c->row0 + r) % p->hs);
        job->kernels->spread_row(s->sum + r * p->value_width, 1.0f, p->dim_v, o->dtype, dst, p->dim_v, 1,
                                 may_stream(dst, o->dtype, p->dim_v));
    }
    job->kernels->rows->fence();
}

/* Rows [first, first + n) of a chunk, with the state of `rows`, or with the chunk's own if NULL. */
static attend_chunk slice_of(const attend_plan *p, const attend_chunk *c, int32_t first, int32_t n,
                             const attend_chunk *rows)
{
    attend_chunk slice = rows != NULL ? *rows : *c;
    const int32_t at = rows != NULL ? 0 : first;
    slice.seq = c->seq;
    slice.unit = c->unit;
    slice.kv_head = c->kv_head;
    slice.head0 = c->head0;
    slice.row0 = c->row0 + first;
    slice.rows = n;
    slice.q = (float *)c->q + first * p->key_words;
    slice.o += at * p->value_width;
    slice.max += at;
    slice.sum += at;
    slice.lo += at;
    slice.hi += at;
    return slice;
}

static void run_slice(const gated_job *job, const gated_pass *pass, int32_t first, int32_t n, gated_space *s)
{
    const attend_plan *plan = &job->plan[pass->branch[0]];
    const attend_chunk rows = slice_of(plan, &s->chunk[0], first, n, &s->slice);
    begin_rows(job, plan, &rows, s);
    for (int32_t i = 0; i < pass->count; i++) {
        const int branch = pass->branch[i];
        const attend_plan *p = &job->plan[branch];
        attend_chunk slice = slice_of(p, &s->chunk[i], first, n, pass->wide[i] ? NULL : &s->slice);
        if (!pass->wide[i]) {
            attend_chunk_reset(p, &slice);
            attend_chunk_run(p, &pass->packed[i], &slice, &s->scratch[i]);
        }
        attend_chunk_finish(p, &slice);
        attend_chunk_store(p, &slice);
        for (int32_t r = 0; r < n; r++)
            p->kernels->rows->add_scaled(s->sum + r * p->value_width, slice.o + r * p->value_width,
                                         s->gates[3 * r + branch], p->value_width);
    }
    store_rows(job, plan, &rows, s);
}

static void run_chunk(void *arg, int64_t index, int32_t thread)
{
    const gated_job *job = arg;
    const gated_pass *pass = &job->pass[job->current];
    const attend_plan *plan = &job->plan[pass->branch[0]];
    const int64_t b = index / pass->pieces / plan->units;
    const int32_t unit = (int32_t)(index / pass->pieces % plan->units);
    const int64_t row0 = (pass->pieces - 1 - index % pass->pieces) * pass->chunk_rows,
                  left = attend_sequence_at(plan, b).nq * plan->hs - row0;
    if (left <= 0) return;
    gated_space *s = &pass->spaces[thread];
    const int32_t rows = (int32_t)(left < pass->chunk_rows ? left : pass->chunk_rows),
                  slice_rows = (int32_t)pass->slice_rows;
    attend_chunk_begin(plan, b, unit, row0, rows, &s->chunk[0]);
    if (pass->chunk_rows == pass->slice_rows) /* a longer chunk has many tiles, more than a cache keeps */
        s->scratch[pass->count - 1].expected =
            attend_expect(plan, index + job->threads, pass->pieces, pass->chunk_rows);
    for (int32_t i = 0; i < pass->count; i++) {
        const attend_plan *p = &job->plan[pass->branch[i]];
        attend_chunk *c = &s->chunk[i];
        c->unit = unit;
        c->kv_head = s->chunk[0].kv_head;
        c->head0 = s->chunk[0].head0;
        c->row0 = row0;
        c->rows = rows;
        c->seq = attend_sequence_at(p, b);
        if (!pass->wide[i]) continue;
        attend_chunk_reset(p, c);
        attend_chunk_run(p, &pass->packed[i], c, &s->scratch[i]);
    }
    for (int32_t first = 0; first < rows; first += slice_rows)
        run_slice(job, pass, first, rows - first < slice_rows ? rows - first : slice_rows, s);
}

void cpu_attend_gate_kernel(const stage_exec *exec, const attend_gate_args *args, char text[STAGE_NAME_BYTES])
{
    cpu_attend_kernel(exec, &args->branch[CMP], text);
}

size_t cpu_attend_gate_workspace(const stage_exec *exec, const attend_gate_args *args)
{
    arena a = {NULL, 0};
    gated_job job;
    carve(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_attend_gate(const stage_exec *exec, const attend_gate_args *args, void *workspace)
{
    if (args->gate.seqs.n_q == 0) return QUERN_OK; /* every output has a row per query */
    arena a = arena_on(workspace);
    gated_job job;
    carve(exec, args, &a, &job);
    quern_status status = check_queries(exec, &args->gate.seqs);
    for (int i = 0; i < BRANCHES && status == QUERN_OK; i++)
        if (is_on(&job, i)) status = attend_check(exec, &args->branch[i]);
    if (status == QUERN_OK && (job.select_first || job.select_late))
        status = check_seqs(exec, &args->select.seqs);
    if (status != QUERN_OK) return status;
    if (job.select_first) cpu_select(exec, &job.select, job.scratch);
    for (job.current = 0; job.current < job.passes; job.current++) {
        const gated_pass *pass = &job.pass[job.current];
        const attend_plan *first = &job.plan[pass->branch[0]];
        for (int32_t i = 0; i < pass->count; i++)
            if (!shares_packed(pass, i)) attend_pack(exec, &job.plan[pass->branch[i]], &pass->packed[i]);
        parallel_for(exec, first->sequences * first->units * pass->pieces, run_chunk, &job);
        if (job.current == 0 && job.select_late) cpu_select(exec, &job.select, job.scratch);
    }
    if (args->gate.seqs.cu_q.data == NULL) return QUERN_OK;
    const int64_t rows = token_rows(&args->gate.seqs);
    for (int i = 0; i < BRANCHES; i++)
        if (is_on(&job, i)) attend_store_unused(&job.plan[i]);
    zero_rows(&args->gate.o, rows);
    if (is_present(&args->gate.gates) && args->gate.kind != GATE_GIVEN) zero_rows(&args->gate.gates, rows);
    return QUERN_OK;
}
