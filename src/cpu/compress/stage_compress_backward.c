/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_compress_backward.c - the compress_backward stage. Y = compress(X); G is dY as f32 rows.
 *
 *   mean, X:    every run of d tokens gets the sum of R over the l/d entries that cover it, R = dY/l or
 *               dY W^T/l. Limit: write bandwidth, with non-temporal stores unless the result is added.
 *   mean, W:    dW = M^T G with M the recomputed means. A task owns 32 rows of dW and walks all entries.
 *   linear, X:  a task owns the tokens of 96 runs. For every step of positions r ... < d (compress.h) it
 *               multiplies the G rows of the l/d entries over the tokens j d + r by W[r + m d]^T, in the
 *               order of m.
 *   linear, W:  a task owns the dW of a group of positions, 512 rows of it, in cache. It walks all entries in
 *               tiles of 128 gathered ones.
 *   linear, pe: dpe[p] = W[p] S, with S the sum of G over batch and entries.
 *
 * No task shares an output and every sum runs in entry order, so the bits do not depend on the number of
 * threads.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/compress/compress.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { WEIGHT_ROWS = 32, DEPTH = 128, RUNS = 96, MEAN_RUNS = 32 };
/* Padding of a gathered tile's rows. They are read by columns: rows 2 KiB apart would share two sets of
 * L1. */
enum { TILE_GAP = 16 };

typedef struct side {
    const quern_tensor *x, *y, *pe, *w, *d_x, *d_w, *d_pe;
    compress_matrix back;  /* w transposed */
    gemm weights;          /* X^T G, or M^T G */
    quern_tensor g;        /* [B][entries][heads][width]: dY */
    quern_tensor means, r; /* mean with w: M; dY W^T */
    float *sum;            /* [heads][width]: S */
    int64_t heads, dim, width;
} side;

typedef struct backward_job {
    const compress_args *args;
    const nsa_kernels *kernels;
    const attention_kernels *pack;
    side sides[2];
    side *s;        /* the side that the tasks work on */
    float *scratch; /* per thread: a tile, encodings, a sum, oneDNN's */
    int64_t tile_floats, shift_floats, sum_floats, scratch_floats;
    int64_t pieces, total; /* total: entry rows of a batch view */
} backward_job;

static quern_tensor carve_rows(const quern_tensor *y, int64_t width, arena *a)
{
    const int64_t shape[] = {y->shape[0], y->shape[1], y->shape[2], width};
    quern_tensor t = quern_tensor_contiguous(NULL, QUERN_F32, 4, shape);
    t.data = arena_take(a, (size_t)(shape[0] * shape[1] * shape[2] * shape[3]) * sizeof(float));
    return t;
}

static int64_t greater(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Positions of W whose gradient one task owns. */
static int64_t linear_group(const backward_job *job, const side *s)
{
    return step_group(job->args->block_size, s->dim, STEP_WIDTH);
}

static void carve_weights(const stage_exec *exec, backward_job *job, side *s, arena *a)
{
    const compress_args *args = job->args;
    const bool linear = args->kind == COMPRESS_LINEAR;
    const int64_t row = s->heads * s->width, group = linear ? linear_group(job, s) * s->dim : s->dim;
    s->back = carve_matrix(exec, s->w, QUERN_F32, linear ? args->block_size : 1, linear ? args->stride : 1,
                           true, linear ? RUNS : MEAN_RUNS, row, linear ? 0 : row, a);
    s->g = carve_rows(s->y, s->width, a);
    s->sum = arena_take(a, (size_t)row * sizeof(float));
    if (!linear) {
        s->r = carve_rows(s->y, s->width, a);
        if (is_present(s->d_w)) s->means = carve_rows(s->y, s->dim, a);
    }
    const gemm_shape shape = {.dtype = QUERN_F32,
                              .m = linear ? group : WEIGHT_ROWS,
                              .n = s->width,
                              .k = DEPTH,
                              .lda = linear ? group + TILE_GAP : s->heads * s->dim,
                              .a_transposed = true,
                              .ldb = row,
                              .panel_stride = job->pack->panel,
                              .ldc = s->width};
    s->weights = gemm_plan(exec, &shape);
    const size_t bytes = s->back.product.scratch_bytes > s->weights.scratch_bytes
                             ? s->back.product.scratch_bytes
                             : s->weights.scratch_bytes;
    job->scratch_floats = greater(job->scratch_floats, (int64_t)(bytes / sizeof(float) + 1));
    job->tile_floats = greater(job->tile_floats, linear ? DEPTH * (group + TILE_GAP) : 0);
    job->shift_floats = greater(job->shift_floats, linear ? group : 0);
    const int64_t tokens = round_up16(s->back.group * s->dim); /* of a run */
    job->sum_floats = greater(job->sum_floats, greater(linear ? RUNS * tokens : tokens, group * s->width));
}

static backward_job carve(const stage_exec *exec, const compress_args *args, arena *a)
{
    backward_job job = {.args = args,
                        .kernels = cpu_kernels_for(exec->cpu_level)->nsa,
                        .pack = cpu_kernels_for(exec->cpu_level)->attention};
    job.sides[0] = (side){.x = &args->k,
                          .y = &args->d_k_cmp,
                          .pe = &args->pe_k,
                          .w = &args->w_k,
                          .d_x = &args->d_k,
                          .d_w = &args->d_w_k,
                          .d_pe = &args->d_pe_k};
    job.sides[1] = (side){.x = &args->v,
                          .y = &args->d_v_cmp,
                          .pe = &args->pe_v,
                          .w = &args->w_v,
                          .d_x = &args->d_v,
                          .d_w = &args->d_w_v,
                          .d_pe = &args->d_pe_v};
    for (int i = 0; i < 2 && args->kind != COMPRESS_GIVEN; i++) {
        side *s = &job.sides[i];
        if (!is_present(s->y)) continue;
        s->heads = s->y->shape[2];
        s->dim = s->y->shape[3];
        s->width = round_up16(s->dim);
        job.total = s->y->shape[1];
        if (args->seqs.batch > 0 && args->seqs.n_q > 0)
            job.sum_floats = greater(job.sum_floats, s->heads * s->width); /* mean: one run's row */
        if (is_present(s->w)) carve_weights(exec, &job, s, a);
    }
    job.tile_floats = round_up16(job.tile_floats);
    job.shift_floats = round_up16(job.shift_floats);
    job.sum_floats = round_up16(job.sum_floats);
    job.scratch_floats = round_up16(job.tile_floats + job.shift_floats + job.sum_floats + job.scratch_floats);
    job.scratch = arena_take(a, (size_t)(job.scratch_floats * exec->threads) * sizeof(float));
    return job;
}

/* The parts of a thread's scratch. */
typedef struct thread_scratch {
    float *tile, *shift, *sum, *product;
} thread_scratch;

static thread_scratch scratch_of(const backward_job *job, int32_t thread)
{
    float *tile = job->scratch + thread * job->scratch_floats,
          *sum = tile + job->tile_floats + job->shift_floats;
    return (thread_scratch){tile, tile + job->tile_floats, sum, sum + job->sum_floats};
}

/* Writes G and, where wanted, M and R of 32 entry rows of a batch view. */
static void prepare(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const side *s = job->s;
    const int64_t per_view = (job->total + MEAN_RUNS - 1) / MEAN_RUNS, b = index / per_view,
                  first = index % per_view * MEAN_RUNS;
    const int64_t end = first + MEAN_RUNS < job->total ? first + MEAN_RUNS : job->total;
    for (int64_t n = first; n < end; n++)
        for (int64_t h = 0; h < s->heads; h++) {
            float *row = row_at(&s->g, b, n, h);
            memset(row + s->dim, 0, (size_t)(s->width - s->dim) * sizeof *row);
            job->kernels->rows->convert(row_at(s->y, b, n, h), s->y->dtype, row, QUERN_F32, s->dim);
        }
    if (is_present(&s->r))
        for (int64_t h = 0; h < s->heads && first < end; h++)
            multiply_step(&s->back, h, 0, end - first, row_at(&s->g, b, first, h), row_at(&s->r, b, first, h),
                          false, scratch_of(job, thread).product);
}

static void prepare_means(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const backward_job *job = arg;
    const side *s = job->s;
    const sequence_rows seq = sequence_at(&job->args->seqs, index / job->pieces);
    const int64_t first = index % job->pieces * MEAN_RUNS,
                  end = first + MEAN_RUNS < seq.entries ? first + MEAN_RUNS : seq.entries,
                  joined = heads_joined(s->x);
    for (int64_t i = first; i < end; i++)
        for (int64_t h = 0; h < s->heads; h += joined)
            mean_of_entry(job->kernels, job->args, s->x, &seq, i, h, joined,
                          row_at(&s->means, seq.view_b, seq.entry0 + i, h));
}

/* The gradient of tokens [t0, t1): scale * row, stored or added. */
static void put(const backward_job *job, const side *s, const sequence_rows *seq, int64_t t0, int64_t t1,
                int64_t h, const float *row, float scale, int64_t n)
{
    const quern_tensor *d = s->d_x;
    char *dst = row_at(d, seq->view_b, seq->token0 + t0, h);
    if (job->args->accumulate) {
        for (int64_t t = t0; t < t1; t++)
            job->kernels->rows->add_scaled((float *)dst + (t - t0) * d->strides[1], row, scale, n);
        return;
    }
    const bool stream =
        may_stream(dst, d->dtype, n) && d->strides[1] * (int64_t)quern_dtype_size(d->dtype) % 64 == 0;
    job->kernels->spread_row(row, scale, n, d->dtype, dst, d->strides[1], t1 - t0, stream);
}

/* mean: the tokens of 32 runs. */
static void spread_runs(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const compress_args *args = job->args;
    const side *s = job->s;
    const sequence_rows seq = sequence_at(&args->seqs, index / job->pieces);
    const int64_t d = args->stride, cover = args->block_size / d, first = index % job->pieces * MEAN_RUNS;
    const quern_tensor *g = is_present(&s->r) ? &s->r : s->y;
    const int64_t joined =
        heads_joined(s->d_x) > 1 && heads_joined(g) > 1 && g->shape[3] == s->dim ? s->heads : 1;
    float *row = scratch_of(job, thread).sum;
    for (int64_t j = first; j < first + MEAN_RUNS && j * d < seq.tokens; j++) {
        const int64_t from = j - cover + 1 > 0 ? j - cover + 1 : 0,
                      to = j + 1 < seq.entries ? j + 1 : seq.entries;
        const int64_t end = (j + 1) * d < seq.tokens ? (j + 1) * d : seq.tokens;
        for (int64_t h = 0; h < s->heads; h += joined) {
            if (from < to) {
                row_source src = rows_at(g, seq.view_b, seq.entry0 + from, h, to - from);
                src.dim = s->dim * joined;
                job->kernels->sum_rows(&src, row);
            } else {
                memset(row, 0, (size_t)(s->dim * joined) * sizeof *row);
            }
            put(job, s, &seq, j * d, end, h, row, 1.0f / (float)args->block_size, s->dim * joined);
        }
    }
    job->kernels->rows->fence();
}

/* linear: the tokens of 96 runs of one head. */
static void linear_runs(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const compress_args *args = job->args;
    const side *s = job->s;
    const compress_matrix *w = &s->back;
    const int64_t h = index % s->heads, d = args->stride, cover = args->block_size / d;
    const sequence_rows seq = sequence_at(&args->seqs, index / s->heads / job->pieces);
    const int64_t first = index / s->heads % job->pieces * RUNS, ld = w->product.shape.ldc;
    const thread_scratch scratch = scratch_of(job, thread);
    for (int64_t step = 0; step < w->run_steps; step++) {
        const int64_t r0 = step_first(w, step), positions = step_positions(w, step);
        int64_t runs = 0; /* runs with a token at r0 or later */
        while (runs < RUNS && (first + runs) * d + r0 < seq.tokens) runs++;
        const int64_t left = seq.entries > first ? seq.entries - first : 0,
                      covered = left < runs ? left : runs; /* by their own entry */
        memset(scratch.sum + covered * ld, 0, (size_t)((runs - covered) * ld) * sizeof *scratch.sum);
        for (int64_t m = 0; m < cover; m++) {
            const int64_t from = first > m ? first : m,
                          end = first + runs < seq.entries + m ? first + runs : seq.entries + m;
            if (from >= end) continue;
            multiply_step(w, h, m * w->run_steps + step, end - from,
                          row_at(&s->g, seq.view_b, seq.entry0 + from - m, h),
                          scratch.sum + (from - first) * ld, m > 0, scratch.product);
        }
        for (int64_t j = 0; j < runs; j++)
            for (int64_t r = 0; r < positions && (first + j) * d + r0 + r < seq.tokens; r++) {
                const int64_t t = (first + j) * d + r0 + r;
                put(job, s, &seq, t, t + 1, h, scratch.sum + j * ld + r * s->dim, 1.0f, s->dim);
            }
    }
    job->kernels->rows->fence();
}

/* Writes rows of dW from a tile's C [rows][width], times scale. */
static void store_weights(const side *s, int64_t h, int64_t row, int64_t rows, const float *c)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy((float *)s->d_w->data + h * s->d_w->strides[0] + (row + i) * s->d_w->strides[1],
               c + i * s->width, (size_t)s->dim * sizeof(float));
}

static void mean_weights(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const side *s = job->s;
    const int64_t blocks = (s->dim + WEIGHT_ROWS - 1) / WEIGHT_ROWS, h = index / blocks,
                  row = index % blocks * WEIGHT_ROWS;
    const int64_t rows = s->dim - row < WEIGHT_ROWS ? s->dim - row : WEIGHT_ROWS;
    const thread_scratch scratch = scratch_of(job, thread);
    float *c = scratch.sum;
    memset(c, 0, (size_t)(rows * s->width) * sizeof *c);
    for (int64_t b = 0; b < job->args->seqs.batch; b++) {
        const sequence_rows seq = sequence_at(&job->args->seqs, b);
        for (int64_t i = 0; i < seq.entries; i += DEPTH) {
            const int64_t depth = seq.entries - i < DEPTH ? seq.entries - i : DEPTH;
            const float *m = row_at(&s->means, seq.view_b, seq.entry0 + i, h);
            gemm_run(&s->weights, rows, s->width, depth, m + row,
                     row_at(&s->g, seq.view_b, seq.entry0 + i, h), c, true, scratch.product);
        }
    }
    store_weights(s, h, row, rows, c);
}

static void linear_weights(void *arg, int64_t index, int32_t thread)
{
    const backward_job *job = arg;
    const side *s = job->s;
    const int64_t l = job->args->block_size, group = linear_group(job, s), groups = (l + group - 1) / group;
    const int64_t h = index / groups, p0 = index % groups * group,
                  positions = l - p0 < group ? l - p0 : group;
    const tile_source source = {job->args, job->pack, job->kernels, s->x, s->pe, QUERN_F32};
    const thread_scratch scratch = scratch_of(job, thread);
    memset(scratch.sum, 0, (size_t)(positions * s->dim * s->width) * sizeof *scratch.sum);
    for (int64_t b = 0; b < job->args->seqs.batch; b++) {
        const sequence_rows seq = sequence_at(&job->args->seqs, b);
        for (int64_t i = 0; i < seq.entries; i += DEPTH) {
            const int64_t count = seq.entries - i < DEPTH ? seq.entries - i : DEPTH;
            gather_tile(&source, &seq, h, i, count, p0, positions, scratch.tile, s->weights.shape.lda,
                        scratch.shift);
            gemm_run(&s->weights, positions * s->dim, s->width, count, scratch.tile,
                     row_at(&s->g, seq.view_b, seq.entry0 + i, h), scratch.sum, true, scratch.product);
        }
    }
    store_weights(s, h, p0 * s->dim, positions * s->dim, scratch.sum);
}

/* Sums S of one head in two levels, so that long sums keep their precision; then dpe. */
static void linear_encodings(void *arg, int64_t h, int32_t thread)
{
    const backward_job *job = arg;
    const side *s = job->s;
    const thread_scratch scratch = scratch_of(job, thread);
    float *part = scratch.sum, *sum = s->sum + h * s->width;
    memset(sum, 0, (size_t)s->width * sizeof *sum);
    for (int64_t b = 0; b < job->args->seqs.batch; b++) {
        const sequence_rows seq = sequence_at(&job->args->seqs, b);
        for (int64_t i = 0; i < seq.entries; i += DEPTH) {
            const row_source src = rows_at(&s->g, seq.view_b, seq.entry0 + i, h,
                                           seq.entries - i < DEPTH ? seq.entries - i : DEPTH);
            job->kernels->sum_rows(&src, part);
            job->kernels->rows->add_scaled(sum, part, 1.0f, s->width);
        }
    }
    for (int64_t step = 0; step < s->back.steps; step++) {
        multiply_step(&s->back, h, step, 1, sum, part, false, scratch.product);
        for (int64_t p = 0; p < step_positions(&s->back, step); p++)
            memcpy((float *)s->d_pe->data + h * s->d_pe->strides[0] +
                       (step_first(&s->back, step) + p) * s->d_pe->strides[1],
                   part + p * s->dim, (size_t)s->dim * sizeof *part);
    }
}

size_t cpu_compress_backward_workspace(const stage_exec *exec, const compress_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

void cpu_compress_backward_kernel(const stage_exec *exec, const compress_args *args,
                                  char text[STAGE_NAME_BYTES])
{
    const bool products = is_present(&args->w_k) || is_present(&args->w_v);
    cpu_name_kernels(text, "compress", false,
                     products ? cpu_kernels_for(exec->cpu_level)->attention->level
                              : cpu_kernels_for(exec->cpu_level)->nsa->level);
}

static void clear_tokens(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const quern_tensor *d = ((const backward_job *)arg)->s->d_x;
    const int64_t b = index / d->shape[1], n = index % d->shape[1];
    for (int64_t h = 0; h < d->shape[2]; h++)
        memset(row_at(d, b, n, h), 0, (size_t)d->shape[3] * quern_dtype_size(d->dtype));
}

/* No gradient comes through the compression. */
static void clear_side(const stage_exec *exec, backward_job *job)
{
    const quern_tensor *d = job->s->d_x, *const weights[] = {job->s->d_w, job->s->d_pe};
    if (is_present(d) && !job->args->accumulate)
        parallel_for(exec, d->shape[0] * d->shape[1], clear_tokens, job);
    for (int i = 0; i < 2; i++) {
        const quern_tensor *w = weights[i];
        if (!is_present(w)) continue;
        for (int64_t row = 0; row < w->shape[0] * w->shape[1]; row++)
            memset((float *)w->data + row / w->shape[1] * w->strides[0] + row % w->shape[1] * w->strides[1],
                   0, (size_t)w->shape[2] * sizeof(float));
    }
}

static void run_side(const stage_exec *exec, backward_job *job)
{
    side *s = job->s;
    const compress_args *args = job->args;
    const bool linear = args->kind == COMPRESS_LINEAR;
    const int64_t longest = longest_sequence(&args->seqs), batch = args->seqs.batch;
    if (is_present(s->w)) {
        pack_matrix(exec, &s->back, s->w);
        parallel_for(exec, s->y->shape[0] * ((job->total + MEAN_RUNS - 1) / MEAN_RUNS), prepare, job);
    }
    const int64_t runs = (longest + args->stride - 1) / args->stride, per_task = linear ? RUNS : MEAN_RUNS;
    if (is_present(s->d_x)) {
        job->pieces = (runs + per_task - 1) / per_task;
        parallel_for(exec, batch * job->pieces * (linear ? s->heads : 1), linear ? linear_runs : spread_runs,
                     job);
        if (args->seqs.cu_q.data != NULL && !args->accumulate) zero_rows(s->d_x, token_rows(&args->seqs));
    }
    if (is_present(s->d_w) && linear) {
        const int64_t group = linear_group(job, s);
        parallel_for(exec, s->heads * ((args->block_size + group - 1) / group), linear_weights, job);
    }
    if (is_present(s->d_w) && !linear) {
        job->pieces = (entries_of(args, longest) + MEAN_RUNS - 1) / MEAN_RUNS;
        parallel_for(exec, batch * job->pieces, prepare_means, job);
        parallel_for(exec, s->heads * ((s->dim + WEIGHT_ROWS - 1) / WEIGHT_ROWS), mean_weights, job);
    }
    if (is_present(s->d_pe)) parallel_for(exec, s->heads, linear_encodings, job);
}

quern_status cpu_compress_backward(const stage_exec *exec, const compress_args *args, void *workspace)
{
    quern_status status = check_queries(exec, &args->seqs);
    if (status == QUERN_OK) status = check_cu(exec, &args->seqs.cu_kv, args->seqs.batch, args->seqs.n_kv);
    if (status != QUERN_OK) return status;
    arena a = arena_on(workspace);
    backward_job job = carve(exec, args, &a);
    for (int i = 0; i < 2; i++) {
        job.s = &job.sides[i];
        if (args->kind == COMPRESS_GIVEN || !is_present(job.s->y)) clear_side(exec, &job);
        else run_side(exec, &job);
    }
    return QUERN_OK;
}
