/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* entry.c - turns pooled rows into entries, and back for gradients. */
#include "cpu/pool/pool.h"

#include <string.h>

entry_plan carve_entry(const entry_args *args, const cpu_kernels *kernels, int64_t width, int64_t ratio,
                       arena *a)
{
    return (entry_plan){args, kernels, width, ratio, carve_rows(&args->norm_weight, a)};
}

/* The cosines and sines of a block in f32, dim / 2 each. */
static void angles_of(const entry_plan *p, int64_t position, float *angles)
{
    const quern_tensor *table = &p->args->cos_sin;
    const int64_t row = position + (p->args->rope_last ? p->ratio - 1 : 0);
    const char *at =
        (const char *)table->data + row * table->strides[0] * (int64_t)quern_dtype_size(table->dtype);
    p->kernels->rows->convert(at, table->dtype, angles, QUERN_F32, table->shape[1]);
}

static void rotate(const entry_plan *p, float *row, int64_t position, bool inverse, float *angles)
{
    if (!is_present(&p->args->cos_sin)) return;
    const int64_t dim = p->args->cos_sin.shape[1];
    angles_of(p, position, angles);
    p->kernels->rows->rotate_row(row + p->width - dim, angles, angles + dim / 2, dim, inverse);
}

static void round_to_bf16(const entry_plan *p, float *row)
{
    uint16_t halves[64];
    for (int64_t i = 0; i < p->width; i += 64) {
        const int64_t n = p->width - i < 64 ? p->width - i : 64;
        p->kernels->rows->convert(row + i, QUERN_F32, halves, QUERN_BF16, n);
        p->kernels->rows->convert(halves, QUERN_BF16, row + i, QUERN_F32, n);
    }
}

void finish_entry(const entry_plan *p, float *row, int64_t position, float *angles)
{
    if (p->args->round_bf16) round_to_bf16(p, row);
    if (p->norm.data != NULL) p->kernels->rows->norm_row(row, p->norm.data, p->args->eps, p->width, row);
    rotate(p, row, position, false, angles);
    if (p->args->hadamard) p->kernels->rows->hadamard_row(row, p->width);
}

void store_in_page(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width,
                   const quern_tensor *pages, int64_t page, int64_t slot, char *bytes)
{
    const int64_t size = (int64_t)quern_dtype_size(pages->dtype), at = slot % page;
    char *base = (char *)pages->data + slot / page * pages->strides[0] * size;
    if (bytes == NULL) {
        encode_row(kernels, format, row, width, base + at * pages->strides[1] * size, pages->dtype);
        return;
    }
    const int64_t data = row_data_bytes(format, width, pages->dtype), scales = pages->shape[1] / page - data;
    encode_row(kernels, format, row, width, bytes, QUERN_U8);
    memcpy(base + at * data, bytes, (size_t)data);
    memcpy(base + page * data + at * scales, bytes + data, (size_t)scales);
}

void entry_backward(const entry_plan *p, const float *pooled, int64_t position, float *d, float *d_norm,
                    float *scratch)
{
    if (p->args->hadamard) p->kernels->rows->hadamard_row(d, p->width);
    rotate(p, d, position, true, scratch);
    if (p->norm.data == NULL) return;
    const float *x = pooled;
    if (p->args->round_bf16) {
        memcpy(scratch, pooled, (size_t)p->width * sizeof *scratch);
        round_to_bf16(p, scratch);
        x = scratch;
    }
    p->kernels->rows->norm_backward(x, p->norm.data, p->args->eps, p->width, d, d_norm);
}
