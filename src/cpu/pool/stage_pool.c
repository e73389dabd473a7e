/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_pool.c - the pool_forward and pool_backward stages, from projections or from hidden states.
 *
 * From hidden states x the projections x w are made for CHUNK_TOKENS tokens at a time (8 tiles of the
 * product) and pooled while they are in L3; memory never holds all of them, and w is packed once. An
 * overlapping chunk projects the block before it again, which gives the same bits (stage_gemm.c), and in the
 * backward pass the block after it. Limit: the product's.
 *
 * Formats that accept finite values only are stored last: all rows are first computed in the workspace, so
 * that an error leaves the outputs unchanged.
 */
#include "core/parallel.h"
#include "cpu/pool/pool.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { CHUNK_TOKENS = 1536 };

/* ---- entries computed in the workspace first ---- */

typedef struct waiting_job {
    const pool_args *args;
    const cpu_kernels *kernels;
    pool_args inner; /* the same call with outputs in the workspace */
} waiting_job;

static bool entries_wait(const pool_args *args)
{
    return args->entry.format != ENTRY_ROWS && is_present(&args->out);
}

static quern_tensor waiting_view(const pool_args *args, arena *a)
{
    const int64_t shape[] = {args->out.shape[0], args->out.shape[1], args->width};
    return quern_tensor_contiguous(arena_take(a, (size_t)(shape[0] * shape[1] * shape[2]) * sizeof(float)),
                                   QUERN_F32, 3, shape);
}

static waiting_job carve_waiting(const stage_exec *exec, const pool_args *args, arena *a)
{
    waiting_job job = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level), .inner = *args};
    if (!entries_wait(args)) return job;
    job.inner.out = waiting_view(args, a);
    if (is_present(&args->pooled)) job.inner.pooled = waiting_view(args, a);
    job.inner.entry.format = ENTRY_ROWS;
    return job;
}

/* Every entry is finite before it is quantised. A format may have fewer bytes than the row has columns. */
static quern_status check_waiting(const stage_exec *exec, const waiting_job *job)
{
    const quern_tensor *out = &job->args->out;
    for (int64_t b = 0; b < job->args->batch; b++) {
        const pool_sequence s = pool_sequence_at(job->args, b);
        for (int64_t i = 0; i < s.blocks; i++) {
            const float *row = (const float *)(const void *)pool_row(&job->inner.out, s.view_b, s.entry0 + i);
            if (row_is_encodable(job->kernels, job->args->entry.format, row, job->args->width)) continue;
            int64_t column = 0;
            while ((row[column] - row[column]) == 0.0f) column++;
            const int64_t at = s.view_b * out->shape[1] + s.entry0 + i, bytes = out->shape[2];
            return stage_report(exec,
                                (stage_fault){.kind = QUERN_STATUS_NOT_FINITE,
                                              .tensor = out,
                                              .index = at * bytes + (column < bytes ? column : bytes - 1)});
        }
    }
    return QUERN_OK;
}

/* Stores a sequence's entries and clears its other rows. */
static void store_sequence(void *arg, int64_t b, int32_t thread)
{
    (void)thread;
    const waiting_job *job = arg;
    const pool_sequence s = pool_sequence_at(job->args, b);
    const int64_t bytes = row_bytes(job->args->entry.format, job->args->width, QUERN_U8);
    for (int64_t i = s.entry0; i < s.entry0 + s.entries; i++) {
        char *to = pool_row(&job->args->out, s.view_b, i);
        if (i < s.entry0 + s.blocks)
            encode_row(job->kernels, job->args->entry.format,
                       (const float *)(const void *)pool_row(&job->inner.out, s.view_b, i), job->args->width,
                       to, QUERN_U8);
        else memset(to, 0, (size_t)bytes);
    }
}

static void store_waiting(const stage_exec *exec, waiting_job *job)
{
    const quern_tensor *out = &job->args->out, *pooled = &job->args->pooled;
    parallel_for(exec, job->args->batch, store_sequence, job);
    int64_t end = 0;
    for (int64_t b = 0; b < job->args->batch; b++) {
        const pool_sequence s = pool_sequence_at(job->args, b);
        end = s.entry0 + s.entries;
    }
    for (int64_t i = end; is_present(&job->args->cu_seqlens) && i < out->shape[1]; i++)
        memset(pool_row(out, 0, i), 0,
               (size_t)row_bytes(job->args->entry.format, job->args->width, QUERN_U8));
    for (int64_t b = 0; is_present(pooled) && b < pooled->shape[0]; b++)
        for (int64_t i = 0; i < pooled->shape[1]; i++)
            memcpy(pool_row(pooled, b, i), pool_row(&job->inner.pooled, b, i),
                   (size_t)job->args->width * sizeof(float));
}

/* ---- projections by chunks ---- */

/* The projections of a chunk's blocks, of one block before and one after. */
typedef struct chunk_job {
    const pool_args *args;
    int64_t blocks, rows; /* of a full chunk; rows with the blocks around it */
    quern_tensor proj, d_proj;
    void *scratch, *panels; /* of all stages but the projection, and of that */
    bool packed;            /* the panels of w are there */
} chunk_job;

/* A sequence's part of the call. */
typedef struct chunk {
    pool_args pool;
    int64_t row0, rows, owned0, owned; /* rows of x: those to project, and the chunk's own */
} chunk;

static quern_tensor f32_view(arena *a, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {1, rows, columns};
    return quern_tensor_contiguous(arena_take(a, (size_t)(rows * columns) * sizeof(float)), QUERN_F32, 3,
                                   shape);
}

/* Rows first ... first + count - 1 of a [B, rows, columns] view as a matrix. */
static quern_tensor rows_of(const quern_tensor *t, int64_t b, int64_t first, int64_t count)
{
    quern_tensor m = *t;
    m.ndim = 2;
    m.shape[0] = count;
    m.shape[1] = t->shape[2];
    m.strides[0] = t->strides[1];
    m.strides[1] = 1;
    m.data = t->data != NULL ? pool_row(t, b, first) : NULL;
    return m;
}

static gemm_args project_args(const chunk_job *job, const quern_tensor *x)
{
    return (gemm_args){.a = *x, .b = job->args->w, .c = rows_of(&job->proj, 0, 0, x->shape[0])};
}

static gemm_args d_input_args(const chunk_job *job, const quern_tensor *d_x, int64_t first)
{
    return (gemm_args){.a = rows_of(&job->d_proj, 0, first, d_x->shape[0]),
                       .b = job->args->w,
                       .c = *d_x,
                       .b_transposed = true,
                       .accumulate = job->args->accumulate_x};
}

static gemm_args d_weight_args(const chunk_job *job, const quern_tensor *x, int64_t first)
{
    return (gemm_args){.a = *x,
                       .b = rows_of(&job->d_proj, 0, first, x->shape[0]),
                       .c = job->args->d_w,
                       .a_transposed = true,
                       .accumulate = true};
}

static pool_args chunk_pool(const chunk_job *job, int64_t first_row, int64_t rows, int64_t blocks)
{
    pool_args p = *job->args;
    const quern_tensor none = {0};
    p.batch = 1;
    p.cu_seqlens = p.start_tokens = p.start_positions = p.block_counts = p.has_prev = p.cu_entries = p.x =
        p.w = p.d_x = p.d_w = none;
    p.start_token = first_row;
    p.blocks = blocks;
    p.proj = job->proj;
    p.proj.shape[1] = rows;
    p.d_proj = job->d_proj;
    if (is_present(&p.d_proj)) p.d_proj.shape[1] = rows;
    p.accumulate = true;
    return p;
}

static size_t largest(const size_t *bytes, int count)
{
    size_t most = 0;
    for (int i = 0; i < count; i++) most = bytes[i] > most ? bytes[i] : most;
    return most;
}

static chunk_job carve_chunks(const stage_exec *exec, const pool_args *args, bool backward, arena *a)
{
    chunk_job job = {.args = args};
    const int64_t around = args->overlap ? (backward ? 2 : 1) : 0, whole = args->x.shape[1] / args->ratio;
    job.blocks = CHUNK_TOKENS / args->ratio > around ? CHUNK_TOKENS / args->ratio - around : 1;
    const int64_t most = whole < job.blocks + around ? whole : job.blocks + around;
    job.rows = most * args->ratio;
    job.proj = f32_view(a, job.rows, pool_columns(args));
    if (backward) job.d_proj = f32_view(a, job.rows, pool_columns(args));
    const quern_tensor x = rows_of(&args->x, 0, 0, job.rows);
    const gemm_args project = project_args(&job, &x);
    const pool_args pool = chunk_pool(&job, 0, job.rows, job.blocks);
    size_t bytes[3] = {backward ? pool_backward_workspace(exec, &pool) : pool_forward_workspace(exec, &pool)};
    if (backward && is_present(&args->d_x)) {
        const quern_tensor d_x = rows_of(&args->d_x, 0, 0, job.rows);
        const gemm_args d_input = d_input_args(&job, &d_x, 0);
        bytes[1] = cpu_gemm_workspace(exec, &d_input);
    }
    if (backward && is_present(&args->d_w)) {
        const gemm_args d_weight = d_weight_args(&job, &x, 0);
        bytes[2] = cpu_gemm_workspace(exec, &d_weight);
    }
    job.panels = arena_take(a, cpu_gemm_workspace(exec, &project));
    job.scratch = arena_take(a, largest(bytes, 3));
    return job;
}

/* Narrows a view of entries to the `count` of sequence s from `first` on. */
static void narrow_entries(quern_tensor *t, const pool_sequence *s, int64_t first, int64_t count)
{
    if (!is_present(t)) return;
    t->data = pool_row(t, s->view_b, s->entry0 + first);
    t->shape[0] = 1;
    t->shape[1] = count;
}

/* The chunk of blocks first ... first + count - 1 of sequence b. */
static chunk chunk_at(const chunk_job *job, const pool_sequence *s, int64_t b, int64_t first, int64_t count,
                      bool backward)
{
    const pool_args *args = job->args;
    const int64_t r = args->ratio;
    const bool before = args->overlap && first > 0,
               after = backward && args->overlap && first + count < s->blocks;
    chunk c = {.owned0 = s->token0 + first * r, .owned = count * r};
    c.row0 = c.owned0 - (before ? r : 0);
    c.rows = c.owned + (before ? r : 0) + (after ? r : 0);
    c.pool = chunk_pool(job, before ? r : 0, c.rows, count);
    c.pool.continued = before;
    c.pool.followed = after;
    c.pool.start_position = s->position + first * r;
    const quern_tensor none = {0};
    if (s->prev == NULL || before) {
        c.pool.prev_b = c.pool.d_prev_b = none;
    } else {
        c.pool.prev_b.data = (void *)(uintptr_t)s->prev;
        if (is_present(&c.pool.d_prev_b)) c.pool.d_prev_b.data = pool_row(&c.pool.d_prev_b, b, 0);
    }
    narrow_entries(&c.pool.out, s, first, count);
    narrow_entries(&c.pool.pooled, s, first, count);
    narrow_entries(&c.pool.d_out, s, first, count + (after ? 1 : 0));
    return c;
}

static void project(const stage_exec *exec, chunk_job *job, const pool_sequence *s, const chunk *c)
{
    const quern_tensor x = rows_of(&job->args->x, s->view_b, c->row0, c->rows);
    const gemm_args args = project_args(job, &x);
    cpu_gemm_repeated(exec, &args, job->panels, &job->packed);
}

static void clear_view(const quern_tensor *t)
{
    if (!is_present(t)) return;
    const int64_t batch = t->ndim == 3 ? t->shape[0] : 1, rows = t->ndim == 1 ? 1 : t->shape[t->ndim - 2];
    const int64_t size = (int64_t)quern_dtype_size(t->dtype),
                  step = t->ndim == 1 ? 0 : t->strides[t->ndim - 2];
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < rows; i++)
            memset((char *)t->data + ((t->ndim == 3 ? b * t->strides[0] : 0) + i * step) * size, 0,
                   (size_t)(t->shape[t->ndim - 1] * size));
}

static void forward_chunks(const stage_exec *exec, const pool_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    chunk_job job = carve_chunks(exec, args, false, &a);
    clear_view(&args->pooled); /* rows without a block stay zero */
    clear_view(&args->out);
    for (int64_t b = 0; b < args->batch; b++) {
        const pool_sequence s = pool_sequence_at(args, b);
        for (int64_t first = 0; first < s.blocks; first += job.blocks) {
            const chunk c = chunk_at(&job, &s, b, first,
                                     s.blocks - first < job.blocks ? s.blocks - first : job.blocks, false);
            project(exec, &job, &s, &c);
            pool_forward(exec, &c.pool, job.scratch);
        }
    }
}

static void backward_chunks(const stage_exec *exec, const pool_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    chunk_job job = carve_chunks(exec, args, true, &a);
    const quern_tensor *const sums[] = {&args->d_x,      &args->d_w,      &args->d_prev_b,
                                        &args->d_bias_a, &args->d_bias_b, &args->d_norm_weight};
    for (int i = args->accumulate_x ? 1 : 0; i < 6; i++) clear_view(sums[i]);
    for (int64_t b = 0; b < args->batch; b++) {
        const pool_sequence s = pool_sequence_at(args, b);
        for (int64_t first = 0; first < s.blocks; first += job.blocks) {
            const chunk c = chunk_at(&job, &s, b, first,
                                     s.blocks - first < job.blocks ? s.blocks - first : job.blocks, true);
            const quern_tensor x = rows_of(&args->x, s.view_b, c.owned0, c.owned);
            project(exec, &job, &s, &c);
            pool_backward(exec, &c.pool, job.scratch);
            if (is_present(&args->d_x)) {
                const quern_tensor d_x = rows_of(&args->d_x, s.view_b, c.owned0, c.owned);
                const gemm_args d_input = d_input_args(&job, &d_x, c.owned0 - c.row0);
                cpu_gemm(exec, &d_input, job.scratch);
            }
            if (is_present(&args->d_w)) {
                const gemm_args d_weight = d_weight_args(&job, &x, c.owned0 - c.row0);
                cpu_gemm(exec, &d_weight, job.scratch);
            }
        }
    }
}

/* ---- the stages ---- */

static void *carve_forward(const stage_exec *exec, const pool_args *args, arena *a, waiting_job *job)
{
    *job = carve_waiting(exec, args, a);
    arena inner = {NULL, 0};
    if (is_present(&args->x)) carve_chunks(exec, &job->inner, false, &inner);
    return arena_take(a,
                      is_present(&args->x) ? arena_size(&inner) : pool_forward_workspace(exec, &job->inner));
}

void cpu_pool_kernel(const stage_exec *exec, const pool_args *args, char text[STAGE_NAME_BYTES])
{
    (void)args;
    cpu_name_kernels(text, "pool", false, cpu_kernels_for(exec->cpu_level)->pool->level);
}

size_t cpu_pool_workspace(const stage_exec *exec, const pool_args *args)
{
    arena a = {NULL, 0};
    waiting_job job;
    carve_forward(exec, args, &a, &job);
    return arena_size(&a);
}

quern_status cpu_pool(const stage_exec *exec, const pool_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    waiting_job job;
    void *scratch = carve_forward(exec, args, &a, &job);
    quern_status status = pool_check(exec, args);
    if (status != QUERN_OK) return status;
    if (is_present(&args->x)) forward_chunks(exec, &job.inner, scratch);
    else pool_forward(exec, &job.inner, scratch);
    if (entries_wait(args)) {
        status = check_waiting(exec, &job);
        if (status != QUERN_OK) return status;
        store_waiting(exec, &job);
    }
    pool_write_offsets(args);
    return QUERN_OK;
}

size_t cpu_pool_backward_workspace(const stage_exec *exec, const pool_args *args)
{
    arena a = {NULL, 0};
    if (!is_present(&args->x)) return pool_backward_workspace(exec, args);
    carve_chunks(exec, args, true, &a);
    return arena_size(&a);
}

quern_status cpu_pool_backward(const stage_exec *exec, const pool_args *args, void *workspace)
{
    const quern_status status = pool_check(exec, args);
    if (status != QUERN_OK) return status;
    if (is_present(&args->x)) backward_chunks(exec, args, workspace);
    else pool_backward(exec, args, workspace);
    return QUERN_OK;
}
