/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * ready.c - converts rows of A for the tile kernels: to the product's dtype, padded with zeros to whole
 * units. Integers: NVFP4 codes doubled (|2 code| <= 12), or values rounded to int8; four of K a word, in the
 * order in which decode_i8 lays out the weights.
 */
#include "core/half.h"
#include "core/parallel.h"
#include "cpu/gemm4/product.h"

#include <math.h>
#include <string.h>

/* The k that byte i of a block's 16 holds. */
static const uint8_t k_of_byte[16] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

typedef struct ready_job {
    const product_job *product;
    int64_t rows;
} ready_job;

/* The stride of rows is no multiple of CACHE_WAY: such rows would share few sets of the L1 cache. */
enum { ROWS_A_TASK = 8, WEIGHT_OFFSET = 12, CACHE_WAY = 4096 };

int64_t ready_row_bytes(const product_job *job)
{
    const int64_t k = job->units * GEMM4_UNIT, bytes = job->kind == PRODUCT_F32    ? 4 * k
                                                       : job->kind == PRODUCT_FP8  ? 4 * k
                                                       : job->kind == PRODUCT_BF16 ? 2 * k
                                                                                   : k;
    return bytes % CACHE_WAY > 0 ? bytes : bytes + CACHE_WAY / 8;
}

static float e4m3(uint8_t byte)
{
    return byte < 8 ? (float)byte * 0x1p-9f : float_from_bits(((uint32_t)byte << 20) + (120u << 23));
}

/* The scale byte of a row's block. */
static uint8_t a_scale_at(const grouped_gemm_args *args, int64_t row, int64_t block)
{
    const uint8_t *data = args->a_scales.data;
    if (args->pad_row_offsets.ndim == 0) return data[row * args->a_scales.strides[0] + block];
    const int64_t expert = expert_of_row(&args->offsets, row);
    const int64_t first = expert > 0 ? ((const int32_t *)args->offsets.data)[expert - 1] : 0;
    const int64_t r = ((const int32_t *)args->pad_row_offsets.data)[expert] + row - first,
                  tiles = (args->k / 16 + 3) / 4;
    return data[(r / 128 * tiles + block / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4];
}

static void start_block(const product_job *job, int64_t at, int32_t sum, float scale)
{
    job->start[at] = -WEIGHT_OFFSET * sum;
    job->a_scale[at] = scale;
}

/* A byte's two codes, doubled, in bytes 0 and 2 of a word. */
#define MAGNITUDE(c) ((c) % 8 < 5 ? (c) % 8 : (c) % 8 == 5 ? 6 : (c) % 8 == 6 ? 8 : 12)
#define DOUBLED(c) ((uint32_t)((c) < 8 ? MAGNITUDE(c) : -MAGNITUDE(c)) & 0xff)
#define WORD(low, high) (DOUBLED(low) | DOUBLED(high) << 16)
#define WORDS(high)                                                                                          \
    WORD(0, high), WORD(1, high), WORD(2, high), WORD(3, high), WORD(4, high), WORD(5, high), WORD(6, high), \
        WORD(7, high), WORD(8, high), WORD(9, high), WORD(10, high), WORD(11, high), WORD(12, high),         \
        WORD(13, high), WORD(14, high), WORD(15, high)
static const uint32_t doubled[256] = {WORDS(0),  WORDS(1),  WORDS(2),  WORDS(3), WORDS(4),  WORDS(5),
                                      WORDS(6),  WORDS(7),  WORDS(8),  WORDS(9), WORDS(10), WORDS(11),
                                      WORDS(12), WORDS(13), WORDS(14), WORDS(15)};

/* The sum of four signed bytes. */
static int32_t sum_of_bytes(uint32_t word)
{
    return (int8_t)word + (int8_t)(word >> 8) + (int8_t)(word >> 16) + (int8_t)(word >> 24);
}

/* A block's four words: each takes the byte of its first two k and the one two bytes on. 0.25: both sides'
 * codes are doubled. */
static void ready_codes(const product_job *job, int64_t row)
{
    const grouped_gemm_args *args = job->args;
    const uint8_t *codes = (const uint8_t *)args->a_codes.data + row * args->a_codes.strides[0];
    const int64_t blocks = job->units * GEMM4_BLOCKS, first = row * ready_row_bytes(job) / 16,
                  there = args->k / 16;
    uint32_t *out = (uint32_t *)(void *)job->a + 4 * first;
    for (int64_t b = 0; b < there; b++, out += 4, codes += 8) {
        int32_t sum = 0;
        for (int w = 0; w < 4; w++) {
            const uint8_t *byte = codes + w / 2 * 4 + w % 2;
            out[w] = doubled[byte[0]] | doubled[byte[2]] << 8;
            sum += sum_of_bytes(out[w]);
        }
        start_block(job, first + b, sum, 0.25f * e4m3(a_scale_at(args, row, b)));
    }
    memset(out, 0, (size_t)(16 * (blocks - there)));
    for (int64_t b = there; b < blocks; b++) start_block(job, first + b, 0, 0.0f);
}

/* The nearest integer to x / scale. A subnormal scale is so coarse that it may lie beyond 127. */
static int8_t int8_of(float x, float scale)
{
    const float q = rintf(x / scale);
    return (int8_t)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
}

/* To int8 by the row's largest magnitude, whose 127th may be 0; 0.5: the weights' codes are doubled. */
static void ready_int8(const product_job *job, int64_t row)
{
    const grouped_gemm_args *args = job->args;
    const void *values = view_row(&args->a, row);
    const float amax = float_from_bits(job->dense->rows->magnitude(values, args->a.dtype, args->k));
    const float scale = amax / 127.0f > 0.0f ? amax / 127.0f : 1.0f;
    const int64_t blocks = job->units * GEMM4_BLOCKS, first = row * ready_row_bytes(job) / 16;
    int8_t *out = (int8_t *)job->a + 16 * first;
    job->row_global[row] = scale;
    for (int64_t b = 0; b < blocks; b++, out += 16) {
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) {
            out[i] = 16 * b < args->k
                         ? int8_of(element_of(values, args->a.dtype, 16 * b + k_of_byte[i]), scale)
                         : 0;
            sum += out[i];
        }
        start_block(job, first + b, sum, 0.5f);
    }
}

static void ready_floats(const product_job *job, int64_t row)
{
    const grouped_gemm_args *args = job->args;
    const row_source src = {view_row(&args->a, row), args->a.dtype, 0, 1, args->k};
    const int64_t padded = job->units * GEMM4_UNIT;
    char *out = job->a + row * ready_row_bytes(job);
    const uint32_t largest = job->dense->rows->magnitude(src.data, src.dtype, src.dim);
    const float power = row_power_of(job, largest);
    job->row_power[row] = power;
    if (job->kind == PRODUCT_BF16) {
        pack_words(job, &src, power, padded, (uint16_t *)(void *)out);
        return;
    }
    job->dense->pack_rows_f32(&src, power, (float *)(void *)out, padded);
    if (job->blocks != NULL && row_is_alone(job, row))
        job->kernels->integer_blocks((const float *)(const void *)out, padded / 16,
                                     job->blocks + row * (padded / 16));
}

static void ready_task(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const ready_job *job = arg;
    const int64_t first = index * ROWS_A_TASK,
                  end = first + ROWS_A_TASK < job->rows ? first + ROWS_A_TASK : job->rows;
    for (int64_t row = first; row < end; row++) {
        if (job->product->kind == PRODUCT_FP8) fp8_ready_row(job->product, row);
        else if (job->product->kind != PRODUCT_I8) ready_floats(job->product, row);
        else if (job->product->args->int8) ready_int8(job->product, row);
        else ready_codes(job->product, row);
    }
}

void ready_rows(const stage_exec *exec, const product_job *job, int64_t rows)
{
    ready_job ready = {job, rows};
    parallel_for(exec, (rows + ROWS_A_TASK - 1) / ROWS_A_TASK, ready_task, &ready);
}
