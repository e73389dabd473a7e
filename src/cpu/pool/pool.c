/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pool.c - sequences and accumulators of the pooling stages. */
#include "cpu/check_data.h"
#include "cpu/pool/pool.h"

#include <math.h>

static int64_t at_least_0(int64_t n)
{
    return n > 0 ? n : 0;
}

pool_sequence pool_sequence_at(const pool_args *args, int64_t b)
{
    const int64_t start = i32_at(&args->start_tokens, b, args->start_token), r = args->ratio;
    const int32_t *cu = args->cu_seqlens.data;
    const quern_tensor *out = is_present(&args->out)      ? &args->out
                              : is_present(&args->pooled) ? &args->pooled
                                                          : &args->d_out;
    pool_sequence s = {.view_b = b,
                       .rows = (is_present(&args->x) ? &args->x : &args->proj)->shape[1],
                       .entries = out->shape[1]};
    s.position = i32_at(&args->start_positions, b, args->start_position);
    if (cu != NULL) {
        s.view_b = 0;
        s.row0 = cu[b];
        s.rows = cu[b + 1] - cu[b];
        s.entries = s.rows / r;
        for (int64_t i = 0; i < b; i++) s.entry0 += (cu[i + 1] - cu[i]) / r;
    }
    s.token0 = s.row0 + start;
    s.blocks =
        i32_at(&args->block_counts, b, args->blocks > 0 ? args->blocks : at_least_0(s.rows - start) / r);
    if (is_present(&args->prev_b) && i32_at(&args->has_prev, b, 1) != 0) {
        s.prev = (const char *)args->prev_b.data +
                 b * args->prev_b.strides[0] * (int64_t)quern_dtype_size(args->prev_b.dtype);
        s.prev_stride = args->prev_b.strides[1];
    }
    return s;
}

/* First token, blocks and positions of sequence b. */
static quern_status check_sequence(const stage_exec *exec, const pool_args *args, int64_t b)
{
    const quern_tensor *x = is_present(&args->x) ? &args->x : &args->proj, *cu = &args->cu_seqlens;
    const int32_t *at = cu->data;
    const int64_t rows = at != NULL ? at[b + 1] - at[b] : x->shape[1], r = args->ratio,
                  start = i32_at(&args->start_tokens, b, args->start_token), whole = (rows - start) / r,
                  blocks = i32_at(&args->block_counts, b, args->blocks > 0 ? args->blocks : whole),
                  position = i32_at(&args->start_positions, b, args->start_position);
    const quern_tensor *table = &args->entry.cos_sin, *bad = NULL;
    const int64_t last = position + (blocks - 1) * r + (args->entry.rope_last ? r - 1 : 0);
    if (start < 0 || start > rows) bad = &args->start_tokens;
    else if (blocks < 0 || blocks > whole) bad = &args->block_counts;
    else if (position < 0 || (!args->entry.rope_last && position % r != 0) ||
             (is_present(table) && blocks > 0 && last >= table->shape[0]))
        bad = &args->start_positions;
    if (bad == NULL) return QUERN_OK;
    return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_POSITION,
                                            .tensor = is_present(bad) ? bad : cu,
                                            .index = b,
                                            .most = bad == &args->start_tokens   ? rows
                                                    : bad == &args->block_counts ? whole
                                                                                 : INT32_MAX});
}

quern_status pool_check(const stage_exec *exec, const pool_args *args)
{
    const quern_tensor *x = is_present(&args->x) ? &args->x : &args->proj;
    quern_status status = check_cu(exec, &args->cu_seqlens, args->batch, x->shape[1]);
    for (int64_t b = 0; b < args->batch && is_present(&args->cu_seqlens) && status == QUERN_OK; b++)
        status = check_sequence(exec, args, b);
    return status;
}

void clear_sums(const pool_sums *sums, int64_t width)
{
    for (int64_t i = 0; i < width; i++) {
        sums->max[i] = -INFINITY;
        sums->sum[i] = 0.0f;
        sums->weighted[i] = 0.0f;
    }
}

pool_rows series_rows(const void *first, quern_dtype dtype, int64_t stride, int64_t width, int series,
                      const f32_rows *bias, int64_t j, int64_t rows)
{
    const int64_t size = (int64_t)quern_dtype_size(dtype);
    const char *value = (const char *)first + (j * stride + 2 * series * width) * size;
    return (pool_rows){.value = value,
                       .logit = value + width * size,
                       .dtype = dtype,
                       .stride = stride,
                       .rows = rows,
                       .bias = bias->data + j * bias->stride,
                       .bias_stride = bias->stride};
}

void merge_block(const cpu_kernels *kernels, const pool_rows *rows, int64_t width, const pool_sums *sums)
{
    enum { ROWS = 4 };
    const int64_t step = rows->stride * (int64_t)quern_dtype_size(rows->dtype);
    for (int64_t r = 0; r < rows->rows; r += ROWS) {
        pool_rows some = *rows;
        some.value = (const char *)rows->value + r * step;
        some.logit = (const char *)rows->logit + r * step;
        some.bias = rows->bias + r * rows->bias_stride;
        some.rows = rows->rows - r < ROWS ? rows->rows - r : ROWS;
        kernels->pool->merge(&some, width, sums);
    }
}

void pool_write_offsets(const pool_args *args)
{
    if (!is_present(&args->cu_entries)) return;
    int32_t *cu = args->cu_entries.data;
    cu[0] = 0;
    for (int64_t b = 0; b < args->batch; b++) cu[b + 1] = cu[b] + (int32_t)pool_sequence_at(args, b).entries;
}
