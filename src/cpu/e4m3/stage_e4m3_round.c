/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_e4m3_round.c - activations and NVFP4 weights rounded to e4m3. A task is some rows. Limit: x read
 * twice, first for what is not finite, and the result written once.
 */
#include "core/arena.h"
#include "core/parallel.h"
#include "cpu/e4m3/stages.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/formats/e8m0.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/rows/finite.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/levels.h"

typedef struct round_job {
    const e4m3_round_args *args;
    const row_kernels *rows;
    const format_kernels *formats;
} round_job;

size_t cpu_e4m3_round_workspace(const stage_exec *exec, const e4m3_round_args *args)
{
    (void)exec;
    return row_magnitudes_bytes(&args->x);
}

static void round_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    const round_job *job = arg;
    const quern_tensor *x = &job->args->x;
    const int64_t width = x->shape[1] / job->args->groups;
    float values[E4M3_GROUP];
    uint8_t codes[E4M3_GROUP];
    for (int64_t column = 0; column < x->shape[1];) {
        const int64_t left = width - column % width, n = left < E4M3_GROUP ? left : E4M3_GROUP;
        const void *from = view_at(x, row, column);
        float *to = view_at(&job->args->out, row, column);
        float scale = float_from_bits(job->rows->magnitude(from, x->dtype, n)) / 448.0f;
        if (scale == 0.0f) scale = 1.0f;
        job->rows->convert(from, x->dtype, values, QUERN_F32, n);
        job->formats->quantise_e4m3(values, scale, n, codes);
        job->formats->widen_e4m3(codes, n, to);
        for (int64_t i = 0; i < n; i++) to[i] *= scale;
        column += n;
    }
}

quern_status cpu_e4m3_round(const stage_exec *exec, const e4m3_round_args *args, void *workspace)
{
    row_magnitudes finite = {.bits = workspace};
    round_job job = {args, cpu_kernels_for(exec->cpu_level)->rows, cpu_kernels_for(exec->cpu_level)->formats};
    const quern_status status = row_magnitudes_of(exec, &args->x, args->x.shape[0], &finite);
    if (status == QUERN_OK) parallel_for(exec, args->x.shape[0], round_row, &job);
    return status;
}

typedef struct weights_job {
    const e4m3_weights_args *args;
    const format_kernels *formats;
} weights_job;

/* The smallest power of two with which the largest product of code and scale is in e4m3's range. */
static float power_of(const uint8_t *scales, int64_t blocks)
{
    uint8_t most = 0;
    for (int64_t i = 0; i < blocks; i++) most = scales[i] > most ? scales[i] : most;
    const float magnitude =
        most < 8 ? (float)most * 0x1p-9f : float_from_bits((uint32_t)most << 20) * 0x1p120f;
    return most > 0 ? power_above(6.0f * magnitude / 448.0f) : 1.0f;
}

static void weights_row(void *arg, int64_t row, int32_t thread)
{
    (void)thread;
    enum { PIECE = 512 };
    const weights_job *job = arg;
    const e4m3_weights_args *args = job->args;
    const quantise_rule rule = {QUANTISE_PROFILE_RNE, QUANTISE_SCALES_RNE, 1.0f};
    const int64_t k = args->out.shape[1];
    const uint8_t *codes = view_row(&args->codes, row), *scales = view_row(&args->scales, row);
    const float power = power_of(scales, k / QUANTISE_BLOCK);
    float values[PIECE];
    for (int64_t c = 0; c < k; c += PIECE) {
        const int64_t n = k - c < PIECE ? k - c : PIECE;
        job->formats->dequantise_row(&rule, codes + c / 2, scales + c / QUANTISE_BLOCK, n, values, QUERN_F32);
        job->formats->quantise_e4m3(values, power, n, view_at(&args->out, row, c));
    }
    *(float *)view_row(&args->powers, row) = power;
}

quern_status cpu_e4m3_weights(const stage_exec *exec, const e4m3_weights_args *args, void *workspace)
{
    (void)workspace;
    weights_job job = {args, cpu_kernels_for(exec->cpu_level)->formats};
    const quern_status status = check_scale_bytes(exec, &args->scales, args->scales.shape[0]);
    if (status == QUERN_OK) parallel_for(exec, args->out.shape[0], weights_row, &job);
    return status;
}
