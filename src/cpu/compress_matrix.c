/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress_matrix.c - weights for the micro-kernel, and the rows that meet them. */
#include "core/parallel.h"
#include "cpu/compress.h"

#include <string.h>

static int64_t step_rows(const quern_tensor *w, int64_t steps)
{
    return steps > 0 ? w->shape[1] / steps : 0;
}

compress_matrix carve_matrix(const quern_tensor *w, int64_t steps, bool transposed, arena *a)
{
    compress_matrix m = {0};
    if (!is_present(w)) return m;
    const int64_t rows = step_rows(w, steps), columns = w->shape[2];
    m.width = round_up16(transposed ? rows : columns);
    if (!transposed && w->dtype == QUERN_F32 && columns % 16 == 0) {
        m.data = w->data;
        m.ld = w->strides[1];
        m.head_stride = w->strides[0];
        m.step_stride = rows * m.ld;
        return m;
    }
    m.ld = m.width;
    m.step_stride = (transposed ? round_up16(columns) : rows) * m.ld;
    m.head_stride = steps * m.step_stride;
    m.data = m.copy = arena_take(a, (size_t)(w->shape[0] * m.head_stride) * sizeof(float));
    return m;
}

typedef struct pack_job {
    const compress_matrix *m;
    const quern_tensor *w;
    const nsa_kernels *kernels;
    int64_t steps;
    bool transposed;
} pack_job;

static void pack_step(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const pack_job *job = arg;
    const quern_tensor *w = job->w;
    const int64_t h = index / job->steps, step = index % job->steps, rows = step_rows(w, job->steps), columns = w->shape[2];
    float *dst = job->m->copy + h * job->m->head_stride + step * job->m->step_stride;
    memset(dst, 0, (size_t)job->m->step_stride * sizeof *dst);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = h * w->strides[0] + (step * rows + r) * w->strides[1];
        const char *src = (const char *)w->data + at * (int64_t)quern_dtype_size(w->dtype);
        float row[256];
        float *to = job->transposed ? row : dst + r * job->m->ld;
        job->kernels->convert_row(src, w->dtype, to, QUERN_F32, columns);
        if (job->transposed)
            for (int64_t c = 0; c < columns; c++) dst[c * job->m->ld + r] = row[c];
    }
}

void pack_matrix(const quern_exec *exec, const compress_matrix *m, const quern_tensor *w, int64_t steps, bool transposed)
{
    if (m->copy == NULL || !is_present(w)) return;
    pack_job job = {m, w, nsa_kernels_for(exec->cpu_level), steps, transposed};
    parallel_for(exec->threads, w->shape[0] * steps, pack_step, &job);
}

void multiply(const attention_kernels *k, int64_t m, int64_t width, int64_t depth, const float *a, int64_t a_row, int64_t a_k, const float *b,
              int64_t ldb, float *c, int64_t ldc, bool accumulate)
{
    for (int64_t j = 0; j < width; j += k->panel)
        k->mm_f32(m, width - j < k->panel ? width - j : k->panel, depth, a, a_row, a_k, b + j, ldb, c + j, ldc, accumulate);
}

void mean_of_entry(const nsa_kernels *k, const compress_args *args, const quern_tensor *x, const sequence_rows *seq, int64_t i, int64_t h,
                   int64_t joined, float *out)
{
    row_source src = rows_at(x, seq->view_b, seq->token0 + i * args->stride, h, args->block_size);
    src.dim *= joined;
    k->sum_rows(&src, out);
    k->spread_row(out, 1.0f / (float)args->block_size, src.dim, QUERN_F32, out, 0, 1, false);
}

void gather_position(const nsa_kernels *k, const compress_args *args, const quern_tensor *x, const quern_tensor *pe, const sequence_rows *seq,
                     int64_t first, int64_t count, int64_t p, int64_t h, float *out)
{
    const int64_t dim = x->shape[3];
    float shift[256];
    if (is_present(pe)) {
        const int64_t at = h * pe->strides[0] + p * pe->strides[1];
        k->convert_row((const char *)pe->data + at * (int64_t)quern_dtype_size(pe->dtype), pe->dtype, shift, QUERN_F32, dim);
    }
    for (int64_t i = 0; i < count; i++) {
        float *row = out + i * dim;
        k->convert_row(row_at(x, seq->view_b, seq->token0 + (first + i) * args->stride + p, h), x->dtype, row, QUERN_F32, dim);
        if (is_present(pe)) k->add_scaled(shift, 1.0f, dim, row);
    }
}
