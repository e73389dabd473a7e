/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* row_formats.c - rows of caches to bytes and back. Scales are powers of two from a float's bits, or true
 * quotients; only the format rounds. */
#include "cpu/kernels/formats/row_formats.h"

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/e8m0.h"
#include "cpu/kernels/formats/format_kernels.h"

#include <math.h>
#include <string.h>

enum { ROW584_TILE = 64, ROW584_TILES = 7, ROW584_CODES = ROW584_TILE * ROW584_TILES, ROW584_PLAIN = 64 };
enum { FP4_BLOCKS_MOST = MAX_DIM / FP4_BLOCK };

int64_t row_bytes(entry_format format, int64_t width, quern_dtype dtype)
{
    const int64_t data = row_data_bytes(format, width, dtype);
    switch (format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: return data + (int64_t)sizeof(float);
    case ENTRY_FP4: return data + width / FP4_BLOCK;
    case ENTRY_ROW584: return data + ROW584_SCALES;
    case ENTRY_ROWS: break;
    }
    return data;
}

int64_t row_data_bytes(entry_format format, int64_t width, quern_dtype dtype)
{
    switch (format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: return width;
    case ENTRY_FP4: return width / 2;
    case ENTRY_ROW584: return ROW584_DATA;
    case ENTRY_ROWS: break;
    }
    return width * (int64_t)quern_dtype_size(dtype);
}

bool row_is_encodable(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width)
{
    return format == ENTRY_ROWS || kernels->rows->magnitude(row, QUERN_F32, width) < 0x7f800000u;
}

/* The largest magnitude, or `least`. */
static float largest_of(const cpu_kernels *kernels, const float *row, int64_t n, float least)
{
    const float largest = float_from_bits(kernels->rows->magnitude(row, QUERN_F32, n));
    return largest > least ? largest : least;
}

static void encode_fp8(const cpu_kernels *kernels, bool power, const float *row, int64_t width, uint8_t *to)
{
    const float quotient = largest_of(kernels, row, width, 1e-4f) / 448.0f,
                scale = power ? power_above(quotient) : quotient;
    kernels->formats->quantise_e4m3(row, scale, width, to);
    const uint32_t bits = bits_from_float(scale);
    for (int i = 0; i < 4; i++) to[width + i] = (uint8_t)(bits >> (8 * i));
}

static void encode_fp4(const cpu_kernels *kernels, const float *row, int64_t width, uint8_t *to)
{
    for (int64_t i = 0; i < width; i += FP4_BLOCK) {
        const float scale = power_above(largest_of(kernels, row + i, FP4_BLOCK, 6 * 0x1p-126f) / 6.0f);
        kernels->formats->quantise_e2m1(row + i, scale, FP4_BLOCK, to + i / 2);
        to[width / 2 + i / FP4_BLOCK] = e8m0_of(scale);
    }
}

static void encode_row584(const cpu_kernels *kernels, const float *row, uint8_t *to)
{
    for (int i = 0; i < ROW584_TILES; i++) {
        const float *tile = row + ROW584_TILE * i;
        const float scale = power_above(largest_of(kernels, tile, ROW584_TILE, 1e-4f) / 448.0f);
        kernels->formats->quantise_e4m3(tile, scale, ROW584_TILE, to + ROW584_TILE * i);
        to[ROW584_DATA + i] = e8m0_of(scale);
    }
    kernels->rows->convert(row + ROW584_CODES, QUERN_F32, to + ROW584_CODES, QUERN_BF16, ROW584_PLAIN);
    to[ROW584_DATA + ROW584_TILES] = 0;
}

void encode_row(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width, void *to,
                quern_dtype dtype)
{
    switch (format) {
    case ENTRY_FP8:
    case ENTRY_FP8_POWER: encode_fp8(kernels, format == ENTRY_FP8_POWER, row, width, to); return;
    case ENTRY_FP4: encode_fp4(kernels, row, width, to); return;
    case ENTRY_ROW584: encode_row584(kernels, row, to); return;
    case ENTRY_ROWS: break;
    }
    kernels->rows->convert(row, QUERN_F32, to, dtype, width);
}

float decode_fp8_codes(const cpu_kernels *kernels, const void *data, const void *scales, int64_t width,
                       float *row)
{
    float scale;
    memcpy(&scale, scales, sizeof scale);
    kernels->formats->widen_e4m3(data, width, row);
    if (!signbit(scale)) return scale;
    for (int64_t i = 0; i < width; i++) row[i] = -row[i];
    return -scale;
}

float decode_fp4_codes(const cpu_kernels *kernels, const void *data, const void *scales, int64_t width,
                       float *row)
{
    const uint8_t *exponent = scales;
    float ratio[FP4_BLOCKS_MOST];
    int most = 0;
    for (int64_t i = 0; i < width / FP4_BLOCK; i++) most = exponent[i] > most ? exponent[i] : most;
    for (int64_t i = 0; i < width / FP4_BLOCK; i++) ratio[i] = ldexpf(1.0f, exponent[i] - most);
    kernels->formats->widen_e2m1(data, ratio, width, row);
    return ldexpf(1.0f, most - 127);
}

void decode_row584(const cpu_kernels *kernels, const void *data, const void *scales, float row[ROW584_WIDTH])
{
    const uint8_t *codes = data, *exponent = scales;
    uint16_t plain[ROW584_PLAIN];
    kernels->formats->widen_e4m3(codes, ROW584_CODES, row);
    for (int64_t i = 0; i < ROW584_TILES; i++)
        kernels->attention->scale_row(row + i * ROW584_TILE, e8m0_value(exponent[i]), ROW584_TILE);
    memcpy(plain, codes + ROW584_CODES, sizeof plain);
    kernels->rows->convert(plain, QUERN_BF16, row + ROW584_CODES, QUERN_F32, ROW584_PLAIN);
}
