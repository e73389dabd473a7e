/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_compress.c - the compress_forward stage.
 *
 * mean: tasks of a few entries; an entry sums its block's rows, all heads at once where they are neighbours in
 * memory, in f32, K then V, so both are read once (l/d times, the repeats from cache, where blocks overlap).
 * Limit: read bandwidth. A projection multiplies the f32 means of a task by W.
 * linear: tasks of 96 entries of one head; position by position the rows K[i d + p] + pe[p] are gathered (96 x D,
 * in L1/L2) and multiplied by W[p], added up in f32 in the order of p. Limit: FMA; gathering is 1/D of it.
 */
#include "core/parallel.h"
#include "cpu/compress.h"
#include "cpu/stages.h"

#include <string.h>

enum { MEAN_ENTRIES = 24 };

typedef struct side {
    const quern_tensor *x, *y, *pe;
    compress_matrix w;
} side;

typedef struct compress_job {
    const compress_args *args;
    const nsa_kernels *kernels;
    const attention_kernels *mm;
    side sides[2]; /* K, V */
    char *scratch; /* a thread's */
    size_t scratch_bytes;
    int64_t pieces, piece;
} compress_job;

static compress_job carve(const quern_exec *exec, const compress_args *args, arena *a)
{
    compress_job job = {.args = args, .kernels = nsa_kernels_for(exec->cpu_level), .mm = attention_kernels_for(exec->cpu_level)};
    const bool linear = args->kind == QUERN_NSA_COMPRESS_LINEAR;
    const int64_t steps = linear ? args->block_size : 1;
    job.sides[0] = (side){&args->k, &args->k_cmp, &args->pe_k, carve_matrix(&args->w_k, steps, false, a)};
    job.sides[1] = (side){&args->v, &args->v_cmp, &args->pe_v, carve_matrix(&args->w_v, steps, false, a)};
    job.piece = linear ? COMPRESS_ENTRIES : MEAN_ENTRIES;
    int64_t floats = 0;
    for (int i = 0; i < 2; i++) {
        const quern_tensor *x = job.sides[i].x;
        if (!is_present(x)) continue;
        const int64_t rows = linear ? COMPRESS_ENTRIES : MEAN_ENTRIES * x->shape[2];
        const int64_t need = rows * x->shape[3] + job.piece * round_up16(x->shape[3]);
        if (need > floats) floats = need;
    }
    job.scratch_bytes = ((size_t)floats * sizeof(float) + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    job.scratch = arena_take(a, job.scratch_bytes * (size_t)exec->threads);
    return job;
}

static void mean_side(const compress_job *job, const side *s, const sequence_rows *seq, int64_t first, int64_t count, float *scratch)
{
    const int64_t heads = s->x->shape[2], dim = s->x->shape[3], joined = heads_joined(s->x);
    float *product = scratch + MEAN_ENTRIES * heads * dim;
    for (int64_t i = 0; i < count; i++)
        for (int64_t h = 0; h < heads; h += joined)
            mean_of_entry(job->kernels, job->args, s->x, seq, first + i, h, joined, scratch + (i * heads + h) * dim);
    for (int64_t h = 0; h < heads; h++) {
        const float *rows = scratch + h * dim;
        int64_t stride = heads * dim;
        if (s->w.data != NULL) {
            multiply(job->mm, count, s->w.width, dim, rows, stride, 1, s->w.data + h * s->w.head_stride, s->w.ld, product, s->w.width, false);
            rows = product;
            stride = s->w.width;
        }
        for (int64_t i = 0; i < count; i++)
            job->kernels->convert_row(rows + i * stride, QUERN_F32, row_at(s->y, seq->view_b, seq->entry0 + first + i, h), s->y->dtype, dim);
    }
}

static void mean_piece(void *arg, int64_t index, int32_t thread)
{
    const compress_job *job = arg;
    const sequence_rows seq = sequence_at(&job->args->seqs, index / job->pieces);
    const int64_t first = index % job->pieces * MEAN_ENTRIES, left = seq.entries - first;
    float *scratch = (float *)(job->scratch + (size_t)thread * job->scratch_bytes);
    for (int i = 0; i < 2 && left > 0; i++)
        if (is_present(job->sides[i].x)) mean_side(job, &job->sides[i], &seq, first, left < MEAN_ENTRIES ? left : MEAN_ENTRIES, scratch);
}

static void linear_piece(void *arg, int64_t index, int32_t thread)
{
    const compress_job *job = arg;
    const side *s = &job->sides[index % 2];
    const int64_t heads = is_present(s->x) ? s->x->shape[2] : 0;
    if (heads == 0) return;
    const int64_t h = index / 2 % heads, piece = index / 2 / heads;
    const sequence_rows seq = sequence_at(&job->args->seqs, piece / job->pieces);
    const int64_t first = piece % job->pieces * COMPRESS_ENTRIES, left = seq.entries - first, dim = s->x->shape[3];
    if (left <= 0) return;
    const int64_t count = left < COMPRESS_ENTRIES ? left : COMPRESS_ENTRIES;
    float *rows = (float *)(job->scratch + (size_t)thread * job->scratch_bytes), *sum = rows + COMPRESS_ENTRIES * dim;
    for (int64_t p = 0; p < job->args->block_size; p++) {
        gather_position(job->kernels, job->args, s->x, s->pe, &seq, first, count, p, h, rows);
        multiply(job->mm, count, s->w.width, dim, rows, dim, 1, s->w.data + h * s->w.head_stride + p * s->w.step_stride, s->w.ld, sum, s->w.width,
                 p > 0);
    }
    for (int64_t i = 0; i < count; i++)
        job->kernels->convert_row(sum + i * s->w.width, QUERN_F32, row_at(s->y, seq.view_b, seq.entry0 + first + i, h), s->y->dtype, dim);
}

/* Borders of the compressed rows, from those of the tokens. */
static void write_borders(const compress_args *args)
{
    const int32_t *cu = args->seqs.cu_q.data;
    int32_t *out = args->seqs.cu_kv.data;
    if (cu == NULL || out == NULL) return;
    out[0] = 0;
    for (int64_t b = 0; b < args->seqs.batch; b++) out[b + 1] = out[b] + (int32_t)entries_of(args, cu[b + 1] - cu[b]);
}

bool cpu_compress_supports(const quern_exec *exec, const compress_args *args, char why[STAGE_WHY_BYTES])
{
    (void)exec;
    (void)args;
    (void)why;
    return true;
}

size_t cpu_compress_workspace(const quern_exec *exec, const compress_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_compress(const quern_exec *exec, const compress_args *args, void *workspace)
{
    write_borders(args);
    if (args->kind == QUERN_NSA_COMPRESS_GIVEN) return QUERN_OK;
    arena a = arena_on(workspace);
    compress_job job = carve(exec, args, &a);
    const int64_t most = entries_of(args, longest_sequence(&args->seqs)), heads = is_present(&args->k) ? args->k.shape[2] : args->v.shape[2];
    job.pieces = (most + job.piece - 1) / job.piece;
    if (args->kind == QUERN_NSA_COMPRESS_LINEAR) {
        pack_matrix(exec, &job.sides[0].w, &args->w_k, args->block_size, false);
        pack_matrix(exec, &job.sides[1].w, &args->w_v, args->block_size, false);
        parallel_for(exec->threads, args->seqs.batch * job.pieces * heads * 2, linear_piece, &job);
    } else {
        pack_matrix(exec, &job.sides[0].w, &args->w_k, 1, false);
        pack_matrix(exec, &job.sides[1].w, &args->w_v, 1, false);
        parallel_for(exec->threads, args->seqs.batch * job.pieces, mean_piece, &job);
    }
    if (args->seqs.cu_q.data != NULL)
        for (int i = 0; i < 2; i++)
            if (is_present(job.sides[i].y)) zero_rows(job.sides[i].y, ((const int32_t *)args->seqs.cu_kv.data)[args->seqs.batch]);
    return QUERN_OK;
}
