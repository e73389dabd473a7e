/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_compress.c - the compress_forward stage.
 *
 * mean: tasks of a few entries. An entry sums its block's rows in f32, all heads at once where they are
 * neighbours in memory, K then V, so both are read once. Where blocks overlap, runs of d tokens are summed
 * once, and an entry adds the sums of its l/d runs in the order of the run's number modulo l/d, so that its
 * bits do not depend on the task. Limit: read bandwidth. A projection multiplies a task's f32 means by W.
 *
 * linear: tasks of 256 entries of one head. Step by step (compress.h) the rows K[i d + p] + pe[p] are
 * gathered into a tile, multiplied by the step's rows of W, and added up in f32 in the order of the steps.
 * Limit: FMA; gathering takes 1/D of the time. bf16 tokens with bf16 weights are multiplied as bf16. Then the
 * encodings enter as a row of their own, pe W, because bf16 cannot hold K + pe.
 */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/compress/compress.h"
#include "cpu/stages.h"
#include "cpu/levels.h"

#include <string.h>

enum { MEAN_ENTRIES = 24, MOST_RUNS = 64 /* most runs of an entry whose sums are kept */ };

typedef struct side {
    const quern_tensor *x, *y, *pe, *w;
    compress_matrix matrix;
    float *bias; /* pe W [heads][D], where K + pe is not formed */
} side;

typedef struct compress_job {
    const compress_args *args;
    const nsa_kernels *kernels;
    const attention_kernels *pack;
    side sides[2]; /* K, V */
    char *scratch; /* per thread: gathered rows or means, encodings or sums of runs, the product, oneDNN's */
    size_t rows_bytes, shift_bytes, sum_bytes, scratch_bytes;
    int64_t pieces, piece;
} compress_job;

static bool as_bf16(const compress_job *job, const quern_tensor *x, const quern_tensor *w)
{
    return job->args->kind == COMPRESS_LINEAR && x->dtype == QUERN_BF16 && w->dtype == QUERN_BF16 &&
           job->pack->mm_bf16 != NULL;
}

static size_t aligned(int64_t floats)
{
    return ((size_t)floats * sizeof(float) + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
}

static size_t greater(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Runs of d tokens whose sums an entry adds; 1: entries sum their rows. */
static int64_t runs_of_entry(const compress_args *args)
{
    const int64_t runs = args->block_size / args->stride;
    return runs <= MOST_RUNS ? runs : 1;
}

static void carve_side(const stage_exec *exec, compress_job *job, side *s, arena *a)
{
    if (!is_present(s->x) || s->x->shape[0] == 0 || s->x->shape[1] == 0)
        return; /* without tokens there may be any number of heads */
    const bool linear = job->args->kind == COMPRESS_LINEAR, bf16 = as_bf16(job, s->x, s->w);
    const int64_t positions = linear ? job->args->block_size : 1, heads = s->x->shape[2],
                  dim = s->x->shape[3];
    const int64_t width = step_group(positions, dim, STEP_WIDTH) * dim;
    s->matrix = carve_matrix(exec, s->w, bf16 ? QUERN_BF16 : QUERN_F32, positions, positions, false,
                             job->piece, linear ? width : heads * dim, 0, a);
    if (bf16 && is_present(s->pe)) s->bias = arena_take(a, (size_t)(heads * dim) * sizeof(float));
    job->rows_bytes =
        greater(job->rows_bytes, aligned(linear ? job->piece * width : job->piece * heads * dim));
    job->shift_bytes =
        greater(job->shift_bytes, aligned(linear ? width : runs_of_entry(job->args) * heads * dim));
    job->sum_bytes = greater(job->sum_bytes, aligned(job->piece * round_up16(dim)));
    job->scratch_bytes = greater(job->scratch_bytes, (s->matrix.product.scratch_bytes + ARENA_ALIGN - 1) /
                                                         ARENA_ALIGN * ARENA_ALIGN);
}

static compress_job carve(const stage_exec *exec, const compress_args *args, arena *a)
{
    compress_job job = {.args = args,
                        .kernels = cpu_kernels_for(exec->cpu_level)->nsa,
                        .pack = cpu_kernels_for(exec->cpu_level)->attention};
    /* oneDNN takes full tiles only: an entry's bits would depend on the number of entries. */
    stage_exec own = *exec;
    own.gemm = NULL;
    job.piece = args->kind == COMPRESS_LINEAR
                    ? COMPRESS_ENTRIES
                    : MEAN_ENTRIES * (runs_of_entry(args) < 4 ? runs_of_entry(args) : 4);
    job.sides[0] = (side){&args->k, &args->k_cmp, &args->pe_k, &args->w_k, {0}, NULL};
    job.sides[1] = (side){&args->v, &args->v_cmp, &args->pe_v, &args->w_v, {0}, NULL};
    for (int i = 0; i < 2 && args->kind != COMPRESS_GIVEN; i++) carve_side(&own, &job, &job.sides[i], a);
    job.scratch_bytes += job.rows_bytes + job.shift_bytes + job.sum_bytes;
    job.scratch = arena_take(a, job.scratch_bytes * (size_t)exec->threads);
    return job;
}

/* Means of overlapping entries for heads h ... h + joined - 1, `step` floats apart.
 * runs: [l/d][joined dim]. */
static void mean_of_runs(const compress_job *job, const quern_tensor *x, const sequence_rows *seq,
                         int64_t first, int64_t count, int64_t h, int64_t joined, float *means, int64_t step,
                         float *runs)
{
    const int64_t d = job->args->stride, kept = runs_of_entry(job->args), width = joined * x->shape[3];
    const row_source sums = {runs, QUERN_F32, width, kept, width};
    for (int64_t run = first; run < first + count + kept - 1; run++) {
        row_source tokens = rows_at(x, seq->view_b, seq->token0 + run * d, h, d);
        tokens.dim = width;
        job->kernels->sum_rows(&tokens, runs + run % kept * width);
        const int64_t i = run - first - kept + 1; /* the entry whose last run this is */
        if (i < 0) continue;
        job->kernels->sum_rows(&sums, means + i * step);
        job->kernels->spread_row(means + i * step, 1.0f / (float)job->args->block_size, width, QUERN_F32,
                                 means + i * step, 0, 1, false);
    }
}

static void mean_side(const compress_job *job, const side *s, const sequence_rows *seq, int64_t first,
                      int64_t count, char *scratch)
{
    const int64_t heads = s->x->shape[2], dim = s->x->shape[3], joined = heads_joined(s->x);
    float *means = (float *)(void *)scratch,
          *product = (float *)(void *)(scratch + job->rows_bytes + job->shift_bytes);
    for (int64_t h = 0; h < heads; h += joined) {
        if (runs_of_entry(job->args) > 1)
            mean_of_runs(job, s->x, seq, first, count, h, joined, means + h * dim, heads * dim,
                         (float *)(void *)(scratch + job->rows_bytes));
        for (int64_t i = 0; i < count && runs_of_entry(job->args) == 1; i++)
            mean_of_entry(job->kernels, job->args, s->x, seq, first + i, h, joined,
                          means + (i * heads + h) * dim);
    }
    for (int64_t h = 0; h < heads; h++) {
        const float *rows = means + h * dim;
        int64_t stride = heads * dim;
        if (s->matrix.data != NULL) {
            multiply_step(&s->matrix, h, 0, count, rows, product, false, (char *)product + job->sum_bytes);
            rows = product;
            stride = round_up16(dim);
        }
        for (int64_t i = 0; i < count; i++)
            job->kernels->rows->convert(rows + i * stride, QUERN_F32,
                                        row_at(s->y, seq->view_b, seq->entry0 + first + i, h), s->y->dtype,
                                        dim);
    }
}

static void mean_piece(void *arg, int64_t index, int32_t thread)
{
    const compress_job *job = arg;
    const sequence_rows seq = sequence_at(&job->args->seqs, index / job->pieces);
    const int64_t first = index % job->pieces * job->piece, left = seq.entries - first;
    char *scratch = job->scratch + (size_t)thread * job->scratch_bytes;
    for (int i = 0; i < 2 && left > 0; i++)
        if (is_present(job->sides[i].x))
            mean_side(job, &job->sides[i], &seq, first, left < job->piece ? left : job->piece, scratch);
}

static void linear_piece(void *arg, int64_t index, int32_t thread)
{
    const compress_job *job = arg;
    const side *s = &job->sides[index % 2];
    const int64_t heads = is_present(s->x) ? s->x->shape[2] : 0;
    if (heads == 0) return;
    const int64_t h = index / 2 % heads, piece = index / 2 / heads;
    const sequence_rows seq = sequence_at(&job->args->seqs, piece / job->pieces);
    const int64_t first = piece % job->pieces * COMPRESS_ENTRIES, left = seq.entries - first,
                  dim = s->x->shape[3];
    if (left <= 0) return;
    const int64_t count = left < COMPRESS_ENTRIES ? left : COMPRESS_ENTRIES, width = round_up16(dim);
    const compress_matrix *m = &s->matrix;
    const quern_tensor none = {0};
    const tile_source source = {job->args, job->pack, job->kernels, s->x, s->bias != NULL ? &none : s->pe,
                                m->dtype};
    char *tile = job->scratch + (size_t)thread * job->scratch_bytes;
    float *shift = (float *)(void *)(tile + job->rows_bytes),
          *sum = (float *)(void *)((char *)shift + job->shift_bytes);
    for (int64_t step = 0; step < m->steps; step++) {
        gather_tile(&source, &seq, h, first, count, step_first(m, step), step_positions(m, step), tile,
                    m->group * dim, shift);
        multiply_step(m, h, step, count, tile, sum, step > 0, (char *)sum + job->sum_bytes);
    }
    for (int64_t i = 0; i < count; i++) {
        if (s->bias != NULL) job->kernels->rows->add_scaled(sum + i * width, s->bias + h * dim, 1.0f, dim);
        job->kernels->rows->convert(sum + i * width, QUERN_F32,
                                    row_at(s->y, seq.view_b, seq.entry0 + first + i, h), s->y->dtype, dim);
    }
}

/* pe W of one head. */
static void encode(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const compress_job *job = arg;
    const side *s = &job->sides[index % 2];
    const int64_t h = index / 2, dim = is_present(s->x) ? s->x->shape[3] : 0;
    if (s->bias == NULL || h >= s->x->shape[2]) return;
    float row[MAX_DIM], shift[MAX_DIM], part[MAX_DIM], *bias = s->bias + h * dim;
    memset(bias, 0, (size_t)dim * sizeof *bias);
    for (int64_t p = 0; p < job->args->block_size; p++) {
        const int64_t at = h * s->pe->strides[0] + p * s->pe->strides[1];
        job->kernels->rows->convert((const char *)s->pe->data + at * (int64_t)quern_dtype_size(s->pe->dtype),
                                    s->pe->dtype, shift, QUERN_F32, dim);
        memset(part, 0, (size_t)dim * sizeof *part);
        for (int64_t c = 0; c < dim; c++) {
            const uint16_t *w =
                (const uint16_t *)s->w->data + h * s->w->strides[0] + (p * dim + c) * s->w->strides[1];
            job->kernels->rows->convert(w, QUERN_BF16, row, QUERN_F32, dim);
            job->kernels->rows->add_scaled(part, row, shift[c], dim);
        }
        job->kernels->rows->add_scaled(bias, part, 1.0f, dim);
    }
}

/* Writes cu_seqlens of the compressed rows. */
static void write_cu_seqlens(const compress_args *args)
{
    const int32_t *cu = args->seqs.cu_q.data;
    int32_t *out = args->seqs.cu_kv.data;
    if (cu == NULL || out == NULL) return;
    out[0] = 0;
    for (int64_t b = 0; b < args->seqs.batch; b++)
        out[b + 1] = out[b] + (int32_t)entries_of(args, cu[b + 1] - cu[b]);
}

/* K and V have products of one kind: W_k and W_v share a dtype. */
void cpu_compress_kernel(const stage_exec *exec, const compress_args *args, char text[STAGE_NAME_BYTES])
{
    const compress_job job = {.args = args,
                              .kernels = cpu_kernels_for(exec->cpu_level)->nsa,
                              .pack = cpu_kernels_for(exec->cpu_level)->attention};
    const bool products = is_present(&args->w_k) || is_present(&args->w_v), k = is_present(&args->w_k);
    const bool bf16 = products && as_bf16(&job, k ? &args->k : &args->v, k ? &args->w_k : &args->w_v);
    cpu_name_kernels(text, "compress", bf16, products ? job.pack->level : job.kernels->level);
}

size_t cpu_compress_workspace(const stage_exec *exec, const compress_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_compress(const stage_exec *exec, const compress_args *args, void *workspace)
{
    const quern_status status = check_queries(exec, &args->seqs);
    if (status != QUERN_OK) return status;
    write_cu_seqlens(args);
    if (args->kind == COMPRESS_GIVEN || (args->seqs.cu_q.data == NULL && args->seqs.n_kv == 0))
        return QUERN_OK; /* no entries */
    arena a = arena_on(workspace);
    compress_job job = carve(exec, args, &a);
    const int64_t most = entries_of(args, longest_sequence(&args->seqs)),
                  heads = is_present(&args->k) ? args->k.shape[2] : args->v.shape[2];
    job.pieces = (most + job.piece - 1) / job.piece;
    for (int i = 0; i < 2; i++) pack_matrix(exec, &job.sides[i].matrix, job.sides[i].w);
    if (args->kind == COMPRESS_LINEAR) {
        if (job.sides[0].bias != NULL || job.sides[1].bias != NULL)
            parallel_for(exec, heads * 2, encode, &job);
        parallel_for(exec, args->seqs.batch * job.pieces * heads * 2, linear_piece, &job);
    } else {
        parallel_for(exec, args->seqs.batch * job.pieces, mean_piece, &job);
    }
    if (args->seqs.cu_q.data != NULL)
        for (int i = 0; i < 2; i++)
            if (is_present(job.sides[i].y))
                zero_rows(job.sides[i].y, ((const int32_t *)args->seqs.cu_kv.data)[args->seqs.batch]);
    return QUERN_OK;
}
