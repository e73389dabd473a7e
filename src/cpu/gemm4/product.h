/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* product.h - what the grouped product and its gradient share: the plan of a call and its tasks, the
 * conversion of A's rows, and the epilogue. */
#ifndef QUERN_CPU_GEMM4_PRODUCT_H
#define QUERN_CPU_GEMM4_PRODUCT_H

#include "core/arena.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/gemm4/panels.h"
#include "cpu/kernels/formats/contents.h"
#include "cpu/kernels/rows/finite.h"
#include "cpu/kernels/swiglu/swiglu_kernels.h"

#include <math.h>

/* The arithmetic of a call, by A's dtype and the level: bf16 words, f32, integers, or e4m3 as f32. */
typedef enum product_kind { PRODUCT_F32, PRODUCT_BF16, PRODUCT_I8, PRODUCT_FP8 } product_kind;

enum {
    PRODUCT_ROWS = 384,     /* of a task: they share the decoding of a panel, and their sums stay in L2 */
    PRODUCT_PANELS = 4,     /* of a task of many rows: they share the reads of those rows */
    PRODUCT_BUFFER = 32768, /* bytes of decoded weights */
    PRODUCT_UNITS_F32 = 2,  /* units that are summed from zero and then added, by kind */
    PRODUCT_UNITS_BF16 = 4,
    PRODUCT_UNITS_I8 = 4,
    PRODUCT_UNITS_FP8 = 2 /* 128 of K, which share a scale of A */
};

/* A thread's own memory. */
typedef struct product_scratch {
    uint8_t packed[4 * GEMM4_UNIT_BYTES]; /* units in the repacked layout, where the caller did not repack */
    float decoded[PRODUCT_BUFFER / 4], turned[PRODUCT_BUFFER / 4];
    float scales[4 * GEMM4_BLOCKS * GEMM4_PANEL];
    float c[PRODUCT_PANELS][PRODUCT_ROWS * GEMM4_PANEL];
    float row[GEMM4_PANEL], part[2][GEMM4_PANEL];
} product_scratch;

typedef struct product_job {
    const grouped_gemm_args *args;
    const gemm4_kernels *kernels;
    const attention_kernels *dense;
    const format_kernels *formats;
    const swiglu_kernels *swiglu;
    product_kind kind;
    int64_t units, experts, panels; /* panels: of a task */
    const int32_t *ends;            /* [experts] */
    int32_t all;                    /* without offsets, the only end */
    /* A converted, rows of `units` units: f32, bf16, or words of four int8 with a scale and a start a
     * block. */
    char *a;
    float *a_scale;
    int32_t *start;
    float *row_global;     /* int8: the scale of each row */
    float *column_power;   /* e4m3: [experts][panels of 64], what the weights of a column were divided by */
    float *row_power;      /* floats: the power of two that a row was multiplied by (row_power_of()) */
    gemm4_a_block *blocks; /* f32 from bf16: rows of 4 * units, set of rows alone in their task */
    int64_t *first_task;   /* [experts + 1] */
    uint32_t *magnitudes;  /* of A, then of the bias, where a nonfinite value is an error */
    product_scratch *scratch; /* [threads] */
} product_job;

/* The extents and kernels of a call. */
product_job product_plan(const stage_exec *exec, const grouped_gemm_args *args);
/* Sets the end of each expert's rows. */
/* Whether offsets and globals are what they may be. */
quern_status product_check_data(const stage_exec *exec, const grouped_gemm_args *args);
void product_ends(product_job *job);
/* Numbers the tasks, `across` for each PRODUCT_ROWS rows of an expert: sets each expert's first task and
 * returns how many there are. */
int64_t product_tasks(product_job *job, int64_t across);
/* The expert of a task. */
int64_t product_expert(const product_job *job, int64_t index);
/* Units [first, first + count) of an expert's panel, in the repacked layout. */
const uint8_t *product_units(const product_job *job, product_scratch *s, int64_t expert, int64_t panel,
                             int64_t first, int64_t count);

/* Whether a row of A is the only one of its task. */
bool row_is_alone(const product_job *job, int64_t row);
/* The power of two that brings a row of values of at most `largest` (its bits) into the range of the product:
 * sums of huge values, and of a block that mm_blocks makes, would overflow; the dot product of bf16 takes
 * numbers below 2^-126, sums too, for 0. */
static inline float row_power_of(const product_job *job, uint32_t largest)
{
    const bool huge = largest >= 0x5f800000u;                                             /* 2^64 */
    const bool small = job->kind == PRODUCT_BF16 && largest > 0 && largest < 0x21800000u; /* 2^-60 */
    return huge ? 0x1p-32f : small ? 0x1p64f : 1.0f;
}

/* A row's sum with the power taken out, times its global. f32 may hold the result and not the sum. */
static inline float without_power(float sum, float power, float global)
{
    const float whole = sum / power;
    return isfinite(whole) ? whole * global : sum * global / power;
}

/* Converts a row to bf16 words, times a power of two, padded with zeros. */
void pack_words(const product_job *job, const row_source *src, float power, int64_t padded, uint16_t *out);

/* Bytes of a converted row of A. */
int64_t ready_row_bytes(const product_job *job);
/* Converts A's rows; does not read rows past the last offset. */
void ready_rows(const stage_exec *exec, const product_job *job, int64_t rows);

/* In fp8.c: the powers of two of all columns; a row of A as e4m3 values and a scale for each 128 of them; the
 * product of up to 128 of K, added to the sums; these times the powers. */
void fp8_powers(const stage_exec *exec, const product_job *job);
void fp8_ready_row(const product_job *job, int64_t row);
void fp8_multiply(const product_job *job, product_scratch *s, const uint8_t *units, int64_t first,
                  int64_t count, int64_t expert, int64_t panel, int64_t row, int64_t rows, float *sums);
void fp8_scale_columns(const product_job *job, int64_t expert, int64_t panel, int64_t rows, float *sums);

/* Writes the sums of `rows` rows from `row` on, of a panel's columns, to the output. */
void finish_rows(const product_job *job, product_scratch *s, float *sums, int64_t expert, int64_t row,
                 int64_t rows, int64_t panel);
/* Writes zeros, or c_old, to the output's rows from `first` on. */
void zero_output(const product_job *job, int64_t first);

#endif
