/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * pool_backward.c - gradients of projections, biases, norm weights and the block before.
 *
 * A block's sums are pooled again; its series a and the series b of the block before then get their gradients
 * from them. So the rows of block i need the sums of blocks i and i + 1. A task keeps both: it pools block i
 * + 1 and writes the gradients of block i while their rows are in the cache. Without a series b (HCA) they
 * need their own sums alone: block i + 1, half of L2 at ratio 128 and C 512, is read after the gradients of
 * block i. Limit: copy bandwidth (stores past the caches where rows allow it).
 *
 * Gradients of biases and norm weights are sums over all blocks. The call's blocks are cut into 64 runs, or
 * 16 with long biases, by their number alone. Each run has its own sums, which are added in order, so the
 * bits do not depend on the threads.
 */
#include "core/parallel.h"
#include "cpu/pool/pool.h"
#include "cpu/levels.h"

#include <string.h>

enum { SLOTS = 64, FEW_SLOTS = 16, LONG_RATIO = 32 };

typedef struct backward_job {
    const pool_args *args;
    const cpu_kernels *kernels;
    bool prefetch_l2;
    f32_rows bias_a, bias_b;
    entry_plan entry;
    int64_t blocks, runs; /* of all sequences */
    float *scratch;       /* a thread's: two blocks' statistics, an accumulator, two rows */
    int64_t scratch_floats, slot_floats;
    float *slots; /* [runs]: d_bias_a, d_bias_b, d_norm */
} backward_job;

/* What the gradients of a block's rows need; each `width` floats. */
typedef struct block_statistics {
    float *sums, *pooled, *inverse_sum, *d;
} block_statistics;
enum { STATISTICS_ROWS = 6 }; /* sums are three of them */

static int64_t bias_floats(const pool_args *args)
{
    return args->ratio * args->width;
}

/* The offset of d_norm in a slot. */
static int64_t norm_at(const pool_args *args)
{
    return (args->overlap ? 2 : 1) * bias_floats(args);
}

static backward_job carve(const stage_exec *exec, const pool_args *args, arena *a)
{
    backward_job job = {
        .args = args, .kernels = cpu_kernels_for(exec->cpu_level), .prefetch_l2 = exec->prefetch_l2};
    job.bias_a = carve_rows(&args->bias_a, a);
    job.bias_b = carve_rows(&args->bias_b, a);
    job.entry = carve_entry(&args->entry, job.kernels, args->width, args->ratio, a);
    job.scratch_floats = round_up16((2 * STATISTICS_ROWS + 2) * args->width);
    job.scratch = arena_take(a, (size_t)(job.scratch_floats * exec->threads) * sizeof(float));
    job.slot_floats = round_up16(norm_at(args) + args->width);
    job.runs = args->ratio < LONG_RATIO ? SLOTS : FEW_SLOTS;
    job.slots = arena_take(a, (size_t)(job.runs * job.slot_floats) * sizeof(float));
    return job;
}

static block_statistics statistics_at(float *scratch, int64_t width)
{
    return (block_statistics){scratch, scratch + 3 * width, scratch + 4 * width, scratch + 5 * width};
}

/* Pools block i again and takes the gradient of its pooled row from d_out. d_norm: NULL where another task
 * counts it. */
static void compute_statistics(const backward_job *job, const pool_sequence *s, int64_t i,
                               const block_statistics *to, float *d_norm, float *scratch)
{
    const pool_args *args = job->args;
    const int64_t r = args->ratio, width = args->width, stride = args->proj.strides[1];
    const pool_sums sums = sums_at(to->sums, width);
    clear_sums(&sums, width);
    if (args->overlap && (i > 0 || args->continued)) {
        pool_rows b = series_rows(pool_row(&args->proj, s->view_b, s->token0 + (i - 1) * r), args->proj.dtype,
                                  stride, width, 1, &job->bias_b, 0, r);
        b.ahead = pool_ahead(args);
        b.l2 = job->prefetch_l2;
        merge_block(job->kernels, &b, width, &sums);
    } else if (args->overlap && s->prev != NULL) {
        const pool_rows b =
            series_rows(s->prev, args->prev_b.dtype, s->prev_stride, width, 0, &job->bias_b, 0, r);
        merge_block(job->kernels, &b, width, &sums);
    }
    pool_rows a = series_rows(pool_row(&args->proj, s->view_b, s->token0 + i * r), args->proj.dtype, stride,
                              width, 0, &job->bias_a, 0, r);
    a.ahead = pool_ahead(args);
    a.l2 = job->prefetch_l2;
    merge_block(job->kernels, &a, width, &sums);
    job->kernels->pool->pooled_row(&sums, width, to->pooled, to->inverse_sum);
    job->kernels->rows->convert(pool_row(&args->d_out, s->view_b, s->entry0 + i), args->d_out.dtype, to->d,
                                QUERN_F32, width);
    entry_backward(&job->entry, to->pooled, s->position + i * r, to->d, d_norm, scratch);
}

/* Writes the gradients of a block's rows of one series; `to` is the row of its first token, `stride` elements
 * before the next. Row by row, so that memory is written in the order of its addresses. */
static void spread(const backward_job *job, const pool_rows *rows, const block_statistics *from, char *to,
                   quern_dtype dtype, int64_t stride, float *d_bias)
{
    const int64_t width = job->args->width, size = (int64_t)quern_dtype_size(dtype),
                  step = rows->stride * (int64_t)quern_dtype_size(rows->dtype);
    const bool stream = stride > 0 && may_stream(to, dtype, width) && stride * size % 64 == 0;
    pool_rows row = *rows;
    row.rows = 1;
    for (int64_t j = 0; j < rows->rows; j++, to += stride * size) {
        const pool_gradient g = {
            from->sums, from->inverse_sum, from->pooled, from->d,
            to,         to + width * size, dtype,        d_bias != NULL ? d_bias + j * width : NULL,
            stream};
        row.value = (const char *)rows->value + j * step;
        row.logit = (const char *)rows->logit + j * step;
        row.bias = rows->bias + j * rows->bias_stride;
        job->kernels->pool->pool_backward(&row, width, &g);
    }
}

/* Clears `columns` columns of a block's rows. */
static void clear_rows(char *to, const quern_tensor *d, int64_t stride, int64_t rows, int64_t columns)
{
    const int64_t size = (int64_t)quern_dtype_size(d->dtype);
    for (int64_t j = 0; j < rows; j++) memset(to + j * stride * size, 0, (size_t)(columns * size));
}

/* If the call has no gradient of the projections, its rows go to the scratch, one over the other; only the
 * sums over them are kept. */
static void spread_series(const backward_job *job, const pool_rows *rows, const block_statistics *from,
                          char *to, float *d_bias, float *scratch)
{
    const quern_tensor *d = &job->args->d_proj;
    if (to != NULL) spread(job, rows, from, to, d->dtype, d->strides[1], d_bias);
    else spread(job, rows, from, (char *)scratch, QUERN_F32, 0, d_bias);
}

static void block_gradients(const backward_job *job, const pool_sequence *s, int64_t i,
                            const block_statistics *own, const block_statistics *next, float *slot,
                            float *scratch)
{
    const pool_args *args = job->args;
    const int64_t r = args->ratio, width = args->width, stride = args->proj.strides[1],
                  row = s->token0 + i * r;
    const char *token = pool_row(&args->proj, s->view_b, row);
    char *to = is_present(&args->d_proj) ? pool_row(&args->d_proj, s->view_b, row) : NULL;
    const pool_rows a = series_rows(token, args->proj.dtype, stride, width, 0, &job->bias_a, 0, r);
    spread_series(job, &a, own, to, slot, scratch);
    if (!args->overlap) return;
    char *to_b = to != NULL ? to + 2 * width * (int64_t)quern_dtype_size(args->d_proj.dtype) : NULL;
    if (next != NULL) {
        const pool_rows b = series_rows(token, args->proj.dtype, stride, width, 1, &job->bias_b, 0, r);
        spread_series(job, &b, next, to_b, slot + bias_floats(args), scratch);
    } else if (to_b != NULL) {
        clear_rows(to_b, &args->d_proj, args->d_proj.strides[1], r, 2 * width);
    }
}

static void prev_gradients(const backward_job *job, const pool_sequence *s, int64_t b,
                           const block_statistics *first, float *slot, float *scratch)
{
    const pool_args *args = job->args;
    const pool_rows rows = series_rows(s->prev, args->prev_b.dtype, s->prev_stride, args->width, 0,
                                       &job->bias_b, 0, args->ratio);
    if (is_present(&args->d_prev_b))
        spread(job, &rows, first, pool_row(&args->d_prev_b, b, 0), args->d_prev_b.dtype,
               args->d_prev_b.strides[1], slot + bias_floats(args));
    else spread_series(job, &rows, first, NULL, slot + bias_floats(args), scratch);
}

/* Blocks first ... end - 1 of sequence b. */
static void backward_run(const backward_job *job, int64_t b, int64_t first, int64_t end, float *slot,
                         float *scratch)
{
    const pool_args *args = job->args;
    const pool_sequence s = pool_sequence_at(args, b);
    float *rows = scratch + 2 * STATISTICS_ROWS * args->width, *d_norm = slot + norm_at(args);
    block_statistics own = statistics_at(scratch, args->width),
                     next = statistics_at(scratch + STATISTICS_ROWS * args->width, args->width);
    compute_statistics(job, &s, first, &own, d_norm, rows);
    if (first == 0 && !args->continued && args->overlap && s.prev != NULL)
        prev_gradients(job, &s, b, &own, slot, rows);
    for (int64_t i = first; i < end; i++) {
        const bool more = i + 1 < s.blocks || args->followed, needed = more && (args->overlap || i + 1 < end);
        float *const d_norm_next = i + 1 < end ? d_norm : NULL;
        if (needed && args->overlap) compute_statistics(job, &s, i + 1, &next, d_norm_next, rows);
        block_gradients(job, &s, i, &own, more ? &next : NULL, slot, rows);
        if (needed && !args->overlap) compute_statistics(job, &s, i + 1, &next, d_norm_next, rows);
        const block_statistics swapped = own;
        own = next;
        next = swapped;
    }
    job->kernels->rows->fence();
}

/* A run of the call's blocks. */
static void slot_of_blocks(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    int64_t first = job->blocks * index / job->runs, left = job->blocks * (index + 1) / job->runs - first;
    float *slot = job->slots + index * job->slot_floats;
    memset(slot, 0, (size_t)job->slot_floats * sizeof *slot);
    for (int64_t b = 0; b < job->args->batch && left > 0; b++) {
        const int64_t blocks = pool_sequence_at(job->args, b).blocks,
                      here = blocks - first < left ? blocks - first : left;
        if (here > 0) {
            backward_run(job, b, first, first + here, slot, job->scratch + thread * job->scratch_floats);
            first += here;
            left -= here;
        }
        first -= blocks;
    }
}

/* Row r of out = (or +=) the slots' sums at `offset`, in order. */
static void add_slots(const backward_job *job, const quern_tensor *out, int64_t offset, int64_t r)
{
    if (!is_present(out)) return;
    const int64_t width = job->args->width;
    float *to = (float *)out->data + (out->ndim > 1 ? r * out->strides[0] : 0);
    if (!job->args->accumulate) memset(to, 0, (size_t)width * sizeof *to);
    for (int64_t n = 0; n < job->runs; n++) {
        const float *part = job->slots + n * job->slot_floats + offset + r * width;
        for (int64_t c = 0; c < width; c++) to[c] += part[c];
    }
}

/* Row `index` of the biases' gradients; the norm weight's with the first. */
static void add_row(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const backward_job *job = arg;
    add_slots(job, &job->args->d_bias_a, 0, index);
    add_slots(job, &job->args->d_bias_b, bias_floats(job->args), index);
    if (index == 0) add_slots(job, &job->args->d_norm_weight, norm_at(job->args), 0);
}

/* Clears the rows of d_proj that belong to no block, and d_prev_b if there is no predecessor. */
static void clear_unused(const pool_args *args)
{
    const quern_tensor *d = &args->d_proj;
    int64_t end = 0;
    for (int64_t b = 0; b < args->batch; b++) {
        const pool_sequence s = pool_sequence_at(args, b);
        const int64_t last = s.token0 + s.blocks * args->ratio;
        end = s.row0 + s.rows;
        if (is_present(&args->d_prev_b) && (s.prev == NULL || s.blocks == 0))
            clear_rows(pool_row(&args->d_prev_b, b, 0), &args->d_prev_b, args->d_prev_b.strides[1],
                       args->ratio, 2 * args->width);
        if (!is_present(d) || args->continued || args->followed) continue;
        clear_rows(pool_row(d, s.view_b, s.row0), d, d->strides[1], s.token0 - s.row0, pool_columns(args));
        clear_rows(pool_row(d, s.view_b, last), d, d->strides[1], end - last, pool_columns(args));
    }
    if (is_present(d) && is_present(&args->cu_seqlens))
        clear_rows(pool_row(d, 0, end), d, d->strides[1], d->shape[1] - end, pool_columns(args));
}

size_t pool_backward_workspace(const stage_exec *exec, const pool_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

void pool_backward(const stage_exec *exec, const pool_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    fill_rows(job.kernels->rows, &args->bias_a, &job.bias_a);
    fill_rows(job.kernels->rows, &args->bias_b, &job.bias_b);
    fill_rows(job.kernels->rows, &args->entry.norm_weight, &job.entry.norm);
    for (int64_t b = 0; b < args->batch; b++) job.blocks += pool_sequence_at(args, b).blocks;
    parallel_for(exec, job.runs, slot_of_blocks, &job);
    clear_unused(args);
    parallel_for(exec, args->ratio, add_row, &job);
}
