/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress_matrix.c - the operands of a compression's products: panels of weights, tiles of tokens. */
#include "core/parallel.h"
#include "cpu/compress/compress.h"
#include "cpu/levels.h"

compress_matrix carve_matrix(const stage_exec *exec, const quern_tensor *w, quern_dtype dtype,
                             int64_t positions, int64_t run, bool transposed, int64_t rows, int64_t lda,
                             int64_t ldc, arena *a)
{
    compress_matrix m = {0};
    if (!is_present(w)) return m;
    const attention_kernels *kernels = cpu_kernels_for(exec->cpu_level)->attention;
    const int64_t panel = kernels->panel;
    m.dtype = dtype;
    m.transposed = transposed;
    m.dim = w->shape[1] / positions;
    m.columns = w->shape[2];
    m.run = run;
    m.group = step_group(run, m.dim, STEP_WIDTH);
    m.run_steps = (run + m.group - 1) / m.group;
    m.steps = positions / run * m.run_steps;
    const int64_t width = m.group * m.dim, depth = transposed ? m.columns : width,
                  n = transposed ? width : m.columns;
    if (!transposed && dtype == QUERN_F32 && w->dtype == QUERN_F32 && m.columns % 16 == 0) {
        m.data = w->data;
        m.ld = w->strides[1];
        m.panel_stride = panel;
        m.head_stride = w->strides[0];
        m.step_stride = width * m.ld;
    } else {
        m.ld = panel;
        m.panel_stride = (dtype == QUERN_BF16 ? depth / 2 : depth) * panel;
        m.step_stride = round_up(n, panel) / panel * m.panel_stride;
        m.head_stride = m.steps * m.step_stride;
        m.data = m.copy = arena_take(a, (size_t)(w->shape[0] * m.head_stride) * sizeof(float));
    }
    const gemm_shape shape = {.dtype = dtype,
                              .m = rows,
                              .n = n,
                              .k = depth,
                              .lda = lda,
                              .ldb = m.ld,
                              .panel_stride = m.panel_stride,
                              .ldc = ldc > 0 ? ldc : round_up16(n)};
    m.product = gemm_plan(exec, &shape);
    return m;
}

typedef struct pack_job {
    const compress_matrix *m;
    const quern_tensor *w;
    const attention_kernels *kernels;
} pack_job;

static void pack_step(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const pack_job *job = arg;
    const compress_matrix *m = job->m;
    const quern_tensor *w = job->w;
    const int64_t h = index / m->steps, step = index % m->steps, rows = step_positions(m, step) * m->dim,
                  panel = job->kernels->panel;
    const int64_t at = h * w->strides[0] + step_first(m, step) * m->dim * w->strides[1],
                  element = (int64_t)quern_dtype_size(w->dtype);
    float *dst = (float *)m->copy + h * m->head_stride + step * m->step_stride;
    row_source src = {(const char *)w->data + at * element, w->dtype, w->strides[1], rows, m->columns};
    if (!m->transposed) {
        if (m->dtype == QUERN_BF16)
            job->kernels->pack_values_bf16(&src, (int32_t)panel, (uint32_t *)(void *)dst, m->panel_stride);
        else job->kernels->pack_values_f32(&src, (int32_t)panel, dst, m->panel_stride);
        return;
    }
    for (int64_t r = 0; r < rows; r += panel, dst += m->panel_stride) {
        src.data = (const char *)w->data + (at + r * w->strides[1]) * element;
        src.rows = rows - r < panel ? rows - r : panel;
        job->kernels->pack_keys_f32(&src, (int32_t)panel, dst);
    }
}

void pack_matrix(const stage_exec *exec, const compress_matrix *m, const quern_tensor *w)
{
    if (m->copy == NULL || !is_present(w)) return;
    pack_job job = {m, w, cpu_kernels_for(exec->cpu_level)->attention};
    parallel_for(exec, w->shape[0] * m->steps, pack_step, &job);
}

void multiply_step(const compress_matrix *m, int64_t h, int64_t step, int64_t rows, const void *a, float *c,
                   bool accumulate, void *scratch)
{
    const int64_t width = step_positions(m, step) * m->dim;
    gemm_run(&m->product, rows, m->transposed ? width : m->columns, m->transposed ? m->columns : width, a,
             (const float *)m->data + h * m->head_stride + step * m->step_stride, c, accumulate, scratch);
}

void mean_of_entry(const nsa_kernels *k, const compress_args *args, const quern_tensor *x,
                   const sequence_rows *seq, int64_t i, int64_t h, int64_t joined, float *out)
{
    row_source src = rows_at(x, seq->view_b, seq->token0 + i * args->stride, h, args->block_size);
    src.dim *= joined;
    k->sum_rows(&src, out);
    k->spread_row(out, 1.0f / (float)args->block_size, src.dim, QUERN_F32, out, 0, 1, false);
}

/* Prefetches an entry's rows: the next entry's lie l rows ahead, which hardware prefetchers do not follow. */
static void prefetch_rows(const row_source *src)
{
    const int64_t element = (int64_t)quern_dtype_size(src->dtype);
    for (int64_t r = 0; r < src->rows; r++)
        for (int64_t at = 0; at < src->dim * element; at += 64)
            __builtin_prefetch((const char *)src->data + r * src->stride * element + at);
}

void gather_tile(const tile_source *s, const sequence_rows *seq, int64_t h, int64_t first, int64_t count,
                 int64_t p0, int64_t positions, void *out, int64_t ld, float *shift)
{
    const int64_t dim = s->x->shape[3], width = positions * dim;
    const bool shifted = is_present(s->pe);
    for (int64_t p = 0; p < positions && shifted; p++) {
        const int64_t at = h * s->pe->strides[0] + (p0 + p) * s->pe->strides[1];
        s->kernels->rows->convert((const char *)s->pe->data + at * (int64_t)quern_dtype_size(s->pe->dtype),
                                  s->pe->dtype, shift + p * dim, QUERN_F32, dim);
    }
    for (int64_t i = 0; i < count; i++) {
        const row_source src =
            rows_at(s->x, seq->view_b, seq->token0 + (first + i) * s->args->stride + p0, h, positions);
        if (i + 1 < count) {
            const row_source next = rows_at(
                s->x, seq->view_b, seq->token0 + (first + i + 1) * s->args->stride + p0, h, positions);
            prefetch_rows(&next);
        }
        if (s->dtype == QUERN_BF16) {
            s->pack->pack_rows_bf16(&src, (uint16_t *)out + i * ld, dim);
            continue;
        }
        float *row = (float *)out + i * ld;
        for (int64_t p = 0; p < positions; p++)
            s->kernels->rows->convert(
                row_at(s->x, seq->view_b, seq->token0 + (first + i) * s->args->stride + p0 + p, h),
                s->x->dtype, row + p * dim, QUERN_F32, dim);
        if (shifted) s->kernels->rows->add_scaled(row, shift, 1.0f, width);
    }
}
