/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_widen_blocks.c - the widen_blocks stage. A task is a block of 128 x 128: its rows are widened into a
 * thread's stack (64 KiB), and its columns written as rows of `out`. A power of two times an e4m3 is exact in
 * f32, and in bf16 down to 2^-133. Limit: codes read and out written once.
 */
#include "core/parallel.h"
#include "cpu/kernels/formats/e8m0.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/quantise/stages.h"
#include "cpu/levels.h"

typedef struct widen_job {
    const widen_blocks_args *args;
    const cpu_kernels *kernels;
    int64_t across; /* blocks of a row of blocks */
} widen_job;

static float scale_at(const quern_tensor *t, int64_t n, int64_t k)
{
    const int64_t at = n * t->strides[0] + k * t->strides[1];
    if (t->dtype == QUERN_F32) return ((const float *)t->data)[at];
    return e8m0_value(((const uint8_t *)t->data)[at]);
}

static void widen_block(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const widen_job *job = arg;
    const quern_tensor *codes = &job->args->codes, *out = &job->args->out;
    const int64_t n0 = index / job->across * WIDEN_BLOCK, k0 = index % job->across * WIDEN_BLOCK;
    const int64_t rows = codes->shape[0] - n0 < WIDEN_BLOCK ? codes->shape[0] - n0 : WIDEN_BLOCK,
                  columns = codes->shape[1] - k0 < WIDEN_BLOCK ? codes->shape[1] - k0 : WIDEN_BLOCK;
    const float scale = scale_at(&job->args->scales, n0 / WIDEN_BLOCK, k0 / WIDEN_BLOCK);
    float block[WIDEN_BLOCK][WIDEN_BLOCK], row[WIDEN_BLOCK];
    for (int64_t n = 0; n < rows; n++)
        job->kernels->formats->widen_e4m3((const uint8_t *)codes->data + (n0 + n) * codes->strides[0] + k0,
                                          columns, block[n]);
    for (int64_t k = 0; k < columns; k++) {
        for (int64_t n = 0; n < rows; n++) row[n] = block[n][k] * scale;
        char *to =
            (char *)out->data + ((k0 + k) * out->strides[0] + n0) * (int64_t)quern_dtype_size(out->dtype);
        job->kernels->rows->convert(row, QUERN_F32, to, out->dtype, rows);
    }
}

/* No scale is the byte that is NaN. */
static quern_status check_scales(const stage_exec *exec, const quern_tensor *scales)
{
    for (int64_t n = 0; scales->dtype != QUERN_F32 && n < scales->shape[0]; n++)
        for (int64_t k = 0; k < scales->shape[1]; k++)
            if (((const uint8_t *)scales->data)[n * scales->strides[0] + k * scales->strides[1]] > 0xFE)
                return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_SCALE,
                                                        .tensor = scales,
                                                        .index = n * scales->shape[1] + k,
                                                        .most = 0xFE});
    return QUERN_OK;
}

quern_status cpu_widen_blocks(const stage_exec *exec, const widen_blocks_args *args, void *workspace)
{
    (void)workspace;
    const quern_status status = check_scales(exec, &args->scales);
    if (status != QUERN_OK) return status;
    const int64_t down = (args->codes.shape[0] + WIDEN_BLOCK - 1) / WIDEN_BLOCK,
                  across = (args->codes.shape[1] + WIDEN_BLOCK - 1) / WIDEN_BLOCK;
    widen_job job = {args, cpu_kernels_for(exec->cpu_level), across};
    parallel_for(exec, down * across, widen_block, &job);
    return QUERN_OK;
}
