/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* entry.c - turns pooled rows into stored entries, and back for gradients. Scales are powers of two from a
 * float's bits, or true quotients; only the format rounds. */
#include "core/half.h"
#include "cpu/pool/pool.h"

#include <string.h>

enum { FP4_BLOCK = 32, ROW584_TILE = 64, ROW584_TILES = 7, ROW584_PLAIN = 64 };

entry_plan carve_entry(const entry_args *args, const pool_kernels *kernels, int64_t width, int64_t ratio,
                       arena *a)
{
    return (entry_plan){args, kernels, width, ratio, carve_rows(&args->norm_weight, a)};
}

int64_t entry_bytes(const entry_args *args, int64_t width, quern_dtype dtype)
{
    switch (args->format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: return width + 4;
    case ENTRY_FP4: return width / 2 + width / FP4_BLOCK;
    case ENTRY_ROW584: return 584;
    case ENTRY_ROWS: break;
    }
    return width * (int64_t)quern_dtype_size(dtype);
}

int64_t entry_data_bytes(const entry_args *args, int64_t width)
{
    switch (args->format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: return width;
    case ENTRY_FP4: return width / 2;
    case ENTRY_ROW584: return ROW584_TILE * ROW584_TILES + 2 * ROW584_PLAIN;
    case ENTRY_ROWS: break;
    }
    return 0;
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
    p->kernels->rotate_row(row + p->width - dim, angles, angles + dim / 2, dim, inverse);
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
    if (p->norm.data != NULL) p->kernels->norm_row(row, p->norm.data, p->args->eps, p->width, row);
    rotate(p, row, position, false, angles);
    if (p->args->hadamard) p->kernels->hadamard_row(row, p->width);
}

void entry_backward(const entry_plan *p, const float *pooled, int64_t position, float *d, float *d_norm,
                    float *scratch)
{
    if (p->args->hadamard) p->kernels->hadamard_row(d, p->width);
    rotate(p, d, position, true, scratch);
    if (p->norm.data == NULL) return;
    const float *x = pooled;
    if (p->args->round_bf16) {
        memcpy(scratch, pooled, (size_t)p->width * sizeof *scratch);
        round_to_bf16(p, scratch);
        x = scratch;
    }
    p->kernels->norm_backward(x, p->norm.data, p->args->eps, p->width, d, d_norm);
}

bool entry_is_storable(const entry_plan *p, const float *row)
{
    return p->args->format == ENTRY_ROWS ||
           p->kernels->rows->magnitude(row, QUERN_F32, p->width) < 0x7f800000u;
}

static float larger_of(float a, float b)
{
    return a > b ? a : b;
}

static float largest_of(const entry_plan *p, const float *row, int64_t n)
{
    return float_from_bits(p->kernels->rows->magnitude(row, QUERN_F32, n));
}

/* The least power of two that is not below x, a normal number. */
static float power_above(float x)
{
    const uint32_t bits = bits_from_float(x);
    return float_from_bits((bits + 0x7fffffu) & 0x7f800000u);
}

static uint8_t exponent_byte(float power)
{
    return (uint8_t)(bits_from_float(power) >> 23);
}

static void store_fp8(const entry_plan *p, const float *row, uint8_t *to)
{
    float scale = larger_of(largest_of(p, row, p->width), 1e-4f) / 448.0f;
    if (p->args->format == ENTRY_FP8_POWER) scale = power_above(scale);
    p->kernels->quantise_e4m3(row, scale, p->width, to);
    const uint32_t bits = bits_from_float(scale);
    for (int i = 0; i < 4; i++) to[p->width + i] = (uint8_t)(bits >> (8 * i));
}

static void store_fp4(const entry_plan *p, const float *row, uint8_t *to)
{
    for (int64_t i = 0; i < p->width; i += FP4_BLOCK) {
        const float scale = power_above(larger_of(largest_of(p, row + i, FP4_BLOCK), 6 * 0x1p-126f) / 6.0f);
        p->kernels->quantise_e2m1(row + i, scale, FP4_BLOCK, to + i / 2);
        to[p->width / 2 + i / FP4_BLOCK] = exponent_byte(scale);
    }
}

static void store_row584(const entry_plan *p, const float *row, uint8_t *to)
{
    enum { CODES = ROW584_TILE * ROW584_TILES, SCALES = CODES + 2 * ROW584_PLAIN };
    for (int i = 0; i < ROW584_TILES; i++) {
        const float *tile = row + ROW584_TILE * i;
        const float scale = power_above(larger_of(largest_of(p, tile, ROW584_TILE), 1e-4f) / 448.0f);
        p->kernels->quantise_e4m3(tile, scale, ROW584_TILE, to + ROW584_TILE * i);
        to[SCALES + i] = exponent_byte(scale);
    }
    p->kernels->rows->convert(row + CODES, QUERN_F32, to + CODES, QUERN_BF16, ROW584_PLAIN);
    to[SCALES + ROW584_TILES] = 0;
}

void store_entry(const entry_plan *p, const float *row, void *to, quern_dtype dtype)
{
    switch (p->args->format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: store_fp8(p, row, to); return;
    case ENTRY_FP4: store_fp4(p, row, to); return;
    case ENTRY_ROW584: store_row584(p, row, to); return;
    case ENTRY_ROWS: break;
    }
    p->kernels->rows->convert(row, QUERN_F32, to, dtype, p->width);
}
