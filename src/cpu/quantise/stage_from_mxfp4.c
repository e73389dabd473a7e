/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_from_mxfp4.c - MXFP4 (a power of two for each 32 codes) to NVFP4. The global is the power of two that
 * makes the largest block's scale 2^8. E4M3 represents 2^8 to 2^-9, so blocks within 17 binades of the
 * largest keep their codes. A block below that gets the least scale, and its codes are rounded. Limit: codes
 * read and written once.
 */
#include "core/mxfp4.h"
#include "core/parallel.h"
#include "cpu/first_fault.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/quantise/stages.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

typedef struct mx_job {
    const from_mxfp4_args *args;
    row_cut cut;        /* of blocks */
    atomic_int largest; /* the largest exponent byte of a nonzero block; -1: there is none */
    first_fault bad;    /* a block */
    atomic_int_fast64_t rounded;
} mx_job;

static void scan_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    mx_job *job = arg;
    const row_piece p = piece_at(&job->cut, index);
    int largest = -1;
    for (int64_t row = p.first; row < p.end; row++) {
        const uint8_t *exponents = (const uint8_t *)view_row(&job->args->exponents, row) + p.column;
        const uint8_t *codes = (const uint8_t *)view_row(&job->args->codes_in, row) + p.column * MX_BYTES;
        for (int64_t b = 0; b < p.columns; b++, codes += MX_BYTES) {
            if (mx_is_bad(codes, exponents[b]))
                first_fault_note(&job->bad, row * job->cut.columns + p.column + b);
            if (exponents[b] > largest && !mx_is_zero(codes)) largest = exponents[b];
        }
    }
    int seen = atomic_load(&job->largest);
    while (largest > seen && !atomic_compare_exchange_weak(&job->largest, &seen, largest)) {
    }
}

static quern_status report(const stage_exec *exec, const from_mxfp4_args *args, int64_t block)
{
    const int64_t blocks = view_columns(&args->exponents);
    const uint8_t *codes =
        (const uint8_t *)view_row(&args->codes_in, block / blocks) + block % blocks * MX_BYTES;
    return stage_report(exec, (stage_fault){QUERN_STATUS_BAD_SCALE, &args->exponents, block,
                                            .most = mx_most_exponent(codes)});
}

static void convert_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    mx_job *job = arg;
    const row_piece p = piece_at(&job->cut, index);
    const int largest = atomic_load(&job->largest);
    int64_t rounded = 0;
    for (int64_t row = p.first; row < p.end; row++) {
        const uint8_t *exponents = (const uint8_t *)view_row(&job->args->exponents, row) + p.column;
        const uint8_t *in = (const uint8_t *)view_row(&job->args->codes_in, row) + p.column * MX_BYTES;
        uint8_t *codes = (uint8_t *)view_row(&job->args->codes, row) + p.column * MX_BYTES;
        uint8_t *scales = (uint8_t *)view_row(&job->args->scales, row) + 2 * p.column;
        memcpy(codes, in, (size_t)(p.columns * MX_BYTES));
        for (int64_t b = 0; b < p.columns; b++, codes += MX_BYTES) {
            const int power = exponents[b] - largest + MX_LARGEST_POWER;
            uint8_t scale = 0;
            if (!mx_is_zero(codes)) scale = power < MX_LEAST_POWER ? 1 : mx_scale_of(power);
            if (scale != 0 && power < MX_LEAST_POWER) {
                mx_lower_block(codes, MX_LEAST_POWER - power);
                rounded++;
            }
            scales[2 * b] = scales[2 * b + 1] = scale;
        }
    }
    atomic_fetch_add(&job->rounded, rounded);
}

quern_status cpu_from_mxfp4(const stage_exec *exec, const from_mxfp4_args *args, void *workspace)
{
    (void)workspace;
    mx_job job = {.args = args, .cut = cut_rows(view_rows(&args->exponents), view_columns(&args->exponents))};
    atomic_store(&job.largest, -1);
    atomic_store(&job.bad, NO_FAULT);
    parallel_for(exec, job.cut.pieces, scan_piece, &job);
    const int64_t bad = atomic_load(&job.bad);
    if (bad != NO_FAULT) return report(exec, args, bad);
    parallel_for(exec, job.cut.pieces, convert_piece, &job);
    const int largest = atomic_load(&job.largest);
    *(float *)args->global.data = mx_global(largest);
    if (args->rounded_blocks.ndim > 0) *(int64_t *)args->rounded_blocks.data = atomic_load(&job.rounded);
    return QUERN_OK;
}
