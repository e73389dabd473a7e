/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* finish.c - the epilogue of a grouped product, on 64 columns of a row at a time: globals, bias, what C held,
 * SwiGLU, and the output's dtype or its quantisation. */
#include "core/half.h"
#include "cpu/gemm4/product.h"
#include "cpu/kernels/formats/globals.h"

#include <string.h>

/* The address of column c of a row. */
static char *output_at(const quern_tensor *t, int64_t row, int64_t column)
{
    return (char *)t->data + (row * t->strides[0] + column) * (int64_t)quern_dtype_size(t->dtype);
}

static void store_row(const product_job *job, const quern_tensor *c, int64_t row, int64_t column,
                      const float *values, int64_t n)
{
    job->dense->rows->convert(values, QUERN_F32, output_at(c, row, column), c->dtype, n);
}

static void quantise_output(const product_job *job, int64_t expert, int64_t row, int64_t column,
                            const float *values, int64_t n)
{
    const grouped_gemm_args *args = job->args;
    const float *global = view_row(&args->c_global, args->c_global.shape[0] > 1 ? expert : 0);
    const quantise_rule rule = {args->profile, QUANTISE_SCALES_RNE, *global};
    job->formats->quantise_row(&rule, values, QUERN_F32, n,
                               (uint8_t *)output_at(&args->c_codes, row, column / 2),
                               (uint8_t *)output_at(&args->c_scales, row, column / 16));
}

static void put_row(const product_job *job, product_scratch *s, int64_t expert, int64_t row, int64_t column,
                    int64_t n)
{
    const grouped_gemm_args *args = job->args;
    const float *values = s->row;
    if (args->swiglu) {
        n /= 2;
        column /= 2;
        job->swiglu->part_row(s->row, QUERN_F32, 0, false, args->rule.granularity, n, s->part[0]);
        job->swiglu->part_row(s->row, QUERN_F32, 0, true, args->rule.granularity, n, s->part[1]);
        job->swiglu->swiglu_row(&args->rule, s->part[0], s->part[1], n, s->part[0]);
        values = s->part[0];
    }
    if (args->c.ndim > 0) store_row(job, &args->c, row, column, values, n);
    else quantise_output(job, expert, row, column, values, n);
}

/* The factor and the bias of each column of a panel. */
static void column_values(const product_job *job, int64_t expert, int64_t column, int64_t n, float *global,
                          float *bias)
{
    const grouped_gemm_args *args = job->args;
    const quern_tensor *g = &args->b_global;
    for (int64_t c = 0; c < n; c++) {
        const int64_t part = g->ndim > 0 && g->shape[1] == 2 ? (column + c) / args->rule.granularity % 2 : 0;
        global[c] = g->ndim == 0
                        ? 1.0f
                        : ((const float *)g->data)[(g->shape[0] > 1 ? expert * g->strides[0] : 0) + part];
        if (args->bias.ndim > 0)
            bias[c] = element_of(view_row(&args->bias, expert), args->bias.dtype, column + c);
    }
}

static float row_global(const product_job *job, int64_t expert, int64_t row)
{
    const grouped_gemm_args *args = job->args;
    const float given = args->a_global.ndim > 0 ? global_at(&args->a_global, args->a_per, row, expert) : 1.0f;
    return args->int8 ? job->row_global[row] * given : given;
}

void finish_rows(const product_job *job, product_scratch *s, float *sums, int64_t expert, int64_t row,
                 int64_t rows, int64_t panel)
{
    const grouped_gemm_args *args = job->args;
    const int64_t column = panel * GEMM4_PANEL;
    const int64_t n = args->n - column < GEMM4_PANEL ? args->n - column : GEMM4_PANEL;
    float global[GEMM4_PANEL], bias[GEMM4_PANEL];
    column_values(job, expert, column, n, global, bias);
    for (int64_t r = 0; r < rows; r++) {
        const float a_global = row_global(job, expert, row + r), *sum = sums + r * GEMM4_PANEL,
                    *add = args->bias.ndim > 0 ? bias : NULL;
        const float power = job->row_power != NULL ? job->row_power[row + r] : 1.0f;
        if (power == 1.0f) job->kernels->scale_row(sum, a_global, global, add, n, s->row);
        for (int64_t c = 0; power != 1.0f && c < n; c++) {
            s->row[c] = without_power(sum[c], power, global[c] * a_global);
            if (add != NULL) s->row[c] += add[c];
        }
        for (int64_t c = 0; args->c_old.ndim > 0 && c < n; c++)
            s->row[c] += element_of(output_at(&args->c_old, row + r, 0), args->c_old.dtype, column + c);
        put_row(job, s, expert, row + r, column, n);
    }
}

static void zero_rows_of(const quern_tensor *t, int64_t first)
{
    for (int64_t row = first; t->ndim > 0 && row < t->shape[0]; row++)
        memset(output_at(t, row, 0), 0, (size_t)t->shape[1] * quern_dtype_size(t->dtype));
}

void zero_output(const product_job *job, int64_t first)
{
    const quern_tensor *c = &job->args->c, *old = &job->args->c_old;
    for (int64_t row = first; old->ndim > 0 && old->data != c->data && row < c->shape[0]; row++)
        memcpy(output_at(c, row, 0), output_at(old, row, 0),
               (size_t)c->shape[1] * quern_dtype_size(c->dtype));
    if (old->ndim > 0) return;
    zero_rows_of(&job->args->c, first);
    zero_rows_of(&job->args->c_codes, first);
    zero_rows_of(&job->args->c_scales, first);
}
