/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_from_mxfp4.c - MXFP4 (a power of two for each 32 codes) to NVFP4. The global is the power of two that
 * makes the largest block's scale 2^8. E4M3 represents 2^8 to 2^-9, so blocks within 17 binades of the
 * largest keep their codes. A block below that gets the least scale, and its codes are rounded. Limit: codes
 * read and written once.
 */
#include "core/error.h"
#include "core/parallel.h"
#include "cpu/quantise/rows.h"
#include "cpu/quantise/stages.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum { MX_BLOCK = 32, MX_BYTES = MX_BLOCK / 2, BIAS = 127, LARGEST_POWER = 8, LEAST_POWER = -9 };

typedef struct mx_job {
    const from_mxfp4_args *args;
    row_cut cut;        /* of blocks */
    atomic_int largest; /* the largest exponent byte of a nonzero block; -1: there is none */
    atomic_bool bad;
    atomic_int_fast64_t rounded;
} mx_job;

static bool is_zero(const uint8_t *codes)
{
    uint8_t any = 0;
    for (int i = 0; i < MX_BYTES; i++) any |= codes[i] & 0x77;
    return any == 0;
}

/* Exponent byte 0xFF is NaN. Values of 2^128 and more are beyond f32: 4 and 6 (codes 6 and 7) with 0xFD,
 * 2^126, and 2 to 6 (codes 4 to 7) with 0xFE, 2^127. */
static bool is_bad(const uint8_t *codes, uint8_t exponent)
{
    if (exponent < 0xFD) return false;
    const int least = exponent == 0xFD ? 6 : 4;
    for (int i = 0; i < MX_BYTES; i++)
        if (exponent == 0xFF || (codes[i] & 7) >= least || (codes[i] >> 4 & 7) >= least) return true;
    return false;
}

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
            if (is_bad(codes, exponents[b])) atomic_store(&job->bad, true);
            if (exponents[b] > largest && !is_zero(codes)) largest = exponents[b];
        }
    }
    int seen = atomic_load(&job->largest);
    while (largest > seen && !atomic_compare_exchange_weak(&job->largest, &seen, largest)) {
    }
}

static quern_status report(const mx_job *job)
{
    const int64_t blocks = view_columns(&job->args->exponents);
    for (int64_t i = 0;; i++) {
        const uint8_t exponent = ((const uint8_t *)view_row(&job->args->exponents, i / blocks))[i % blocks];
        if (is_bad((const uint8_t *)view_row(&job->args->codes_in, i / blocks) + i % blocks * MX_BYTES,
                   exponent))
            return error_set(
                QUERN_ERR_INVALID_ARGUMENT,
                "exponents[%lld] is 0x%02X: 0x00 to 0xFC, 0xFD with codes of magnitude up to 3 and "
                "0xFE with codes of magnitude up to 1.5 (less than 2^128) are accepted",
                (long long)i, exponent);
    }
}

/* The code that magnitude m * 2^-down rounds to, ties to even; down > 0. */
static uint8_t lowered(uint8_t code, int down)
{
    static const uint8_t table[5][8] = {{0, 0, 1, 2, 2, 3, 4, 5},
                                        {0, 0, 0, 1, 1, 2, 2, 3},
                                        {0, 0, 0, 0, 0, 1, 1, 2},
                                        {0, 0, 0, 0, 0, 0, 0, 1},
                                        {0}};
    return (uint8_t)(table[down < 5 ? down - 1 : 4][code & 7] | (code & 8));
}

static void lower_block(uint8_t *codes, int down)
{
    for (int i = 0; i < MX_BYTES; i++)
        codes[i] = (uint8_t)(lowered(codes[i] & 15, down) | lowered(codes[i] >> 4, down) << 4);
}

/* The E4M3 byte of 2^power. */
static uint8_t scale_of(int power)
{
    return (uint8_t)(power >= -6 ? (power + 7) * 8 : 1 << (power + 9));
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
            const int power = exponents[b] - largest + LARGEST_POWER;
            uint8_t scale = 0;
            if (!is_zero(codes)) scale = power < LEAST_POWER ? 1 : scale_of(power);
            if (scale != 0 && power < LEAST_POWER) {
                lower_block(codes, LEAST_POWER - power);
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
    parallel_for(exec, job.cut.pieces, scan_piece, &job);
    if (atomic_load(&job.bad)) return report(&job);
    parallel_for(exec, job.cut.pieces, convert_piece, &job);
    const int largest = atomic_load(&job.largest);
    *(float *)args->global.data = largest < 0 ? 1.0f : ldexpf(1.0f, largest - BIAS - LARGEST_POWER);
    if (args->rounded_blocks.ndim > 0) *(int64_t *)args->rounded_blocks.data = atomic_load(&job.rounded);
    return QUERN_OK;
}
