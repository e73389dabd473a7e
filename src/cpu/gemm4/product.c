/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* product.c - the extents of a grouped product, its tasks, and the addresses of its weights. */
#include "cpu/gemm4/product.h"
#include "cpu/levels.h"

#include "core/half.h"

product_job product_plan(const stage_exec *exec, const grouped_gemm_args *args)
{
    return (product_job){.args = args,
                         .kernels = cpu_kernels_for(exec->cpu_level)->gemm4,
                         .dense = cpu_kernels_for(exec->cpu_level)->attention,
                         .formats = cpu_kernels_for(exec->cpu_level)->formats,
                         .swiglu = cpu_kernels_for(exec->cpu_level)->swiglu,
                         .units = units_of(args->k),
                         .experts = args->offsets.ndim > 0 ? args->offsets.shape[0] : 1};
}

/* Each expert's scales in the order of tensor cores lie within a_scales and start at a tile. */
static quern_status check_padding(const stage_exec *exec, const grouped_gemm_args *args)
{
    enum { TILE_ROWS = 128, TILE_COLUMNS = 4 };
    const int32_t *pad = args->pad_row_offsets.data, *ends = args->offsets.data;
    const int64_t row_bytes = (args->k / QUANTISE_BLOCK + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_COLUMNS;
    const int64_t all = row_bytes > 0 ? args->a_scales.shape[0] / row_bytes : INT32_MAX;
    for (int64_t e = 0; args->pad_row_offsets.ndim > 0 && e < args->offsets.shape[0]; e++) {
        const int64_t rows = ends[e] - (e > 0 ? ends[e - 1] : 0);
        const int64_t most = all - (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        if (pad[e] < 0 || pad[e] % TILE_ROWS != 0 || pad[e] > most)
            return stage_report(
                exec, (stage_fault){QUERN_STATUS_BAD_OFFSETS, &args->pad_row_offsets, e, 0, most, TILE_ROWS});
    }
    return QUERN_OK;
}

quern_status product_check_data(const stage_exec *exec, const grouped_gemm_args *args)
{
    quern_status status = check_ends(exec, &args->offsets, args->tokens);
    if (status == QUERN_OK) status = check_padding(exec, args);
    if (status == QUERN_OK) status = check_global_scales(exec, &args->a_global);
    if (status == QUERN_OK) status = check_global_scales(exec, &args->b_global);
    return status == QUERN_OK ? check_global_scales(exec, &args->c_global) : status;
}

void product_ends(product_job *job)
{
    job->all = (int32_t)job->args->tokens;
    job->ends = job->args->offsets.ndim > 0 ? job->args->offsets.data : &job->all;
}

int64_t product_tasks(product_job *job, int64_t across)
{
    int64_t tasks = 0;
    for (int64_t e = 0; e < job->experts; e++) {
        const int64_t rows = job->ends[e] - (e > 0 ? job->ends[e - 1] : 0);
        job->first_task[e] = tasks;
        tasks += (rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS * across;
    }
    job->first_task[job->experts] = tasks;
    return tasks;
}

/* The last expert whose first task is at most the index; it has tasks. */
int64_t product_expert(const product_job *job, int64_t index)
{
    int64_t low = 0, high = job->experts;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (job->first_task[middle] <= index) low = middle;
        else high = middle;
    }
    return low;
}

void pack_words(const product_job *job, const row_source *src, float power, int64_t padded, uint16_t *out)
{
    job->dense->pack_rows_bf16(src, out, padded);
    for (int64_t i = 0; power != 1.0f && i < src->dim; i++)
        out[i] = bf16_from_float(float_from_bf16(out[i]) * power);
}

bool row_is_alone(const product_job *job, int64_t row)
{
    const int64_t expert = job->args->offsets.ndim > 0 ? expert_of_row(&job->args->offsets, row) : 0;
    const int64_t end = job->ends[expert], first = expert > 0 ? job->ends[expert - 1] : 0;
    return row == end - 1 && (row - first) % PRODUCT_ROWS == 0;
}

const uint8_t *product_units(const product_job *job, product_scratch *s, int64_t expert, int64_t panel,
                             int64_t first, int64_t count)
{
    const grouped_gemm_args *args = job->args;
    if (args->b_repacked.ndim > 0)
        return (const uint8_t *)args->b_repacked.data + expert * args->b_repacked.strides[0] +
               (panel * job->units + first) * GEMM4_UNIT_BYTES;
    const weight_view w =
        weight_of(&args->b_codes, &args->b_scales, args->k_major, args->order, args->n, args->k, expert);
    pack_units(&w, panel, first, count, s->packed);
    return s->packed;
}
