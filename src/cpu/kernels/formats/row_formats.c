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

enum { GROUPS_MOST = MAX_DIM / 32, PLAIN_MOST = 64 };

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

/* Stores a scale; returns where the next one goes. */
static uint8_t *put_scale(row_scales scales, float scale, uint8_t *to)
{
    const uint32_t bits = bits_from_float(scale);
    if (scales == SCALES_E8M0) {
        *to = e8m0_of(scale);
        return to + 1;
    }
    for (int i = 0; i < 4; i++) to[i] = (uint8_t)(bits >> (8 * i));
    return to + 4;
}

void encode_row(const cpu_kernels *kernels, entry_format format, const float *row, int64_t width, void *to,
                quern_dtype dtype)
{
    const row_format *f = row_format_of(format);
    const int64_t coded = width - f->plain, group = f->group > 0 ? f->group : coded;
    const bool e2m1 = f->codes == CODES_E2M1;
    uint8_t *codes = to, *scales = codes + row_data_bytes(format, width, dtype);
    if (f->codes == CODES_NONE) {
        kernels->rows->convert(row, QUERN_F32, to, dtype, width);
        return;
    }
    for (int64_t i = 0; i < coded; i += group) {
        const float quotient = largest_of(kernels, row + i, group, f->least) / (e2m1 ? 6.0f : 448.0f),
                    scale = f->scales == SCALES_F32 ? quotient : power_above(quotient);
        if (e2m1) kernels->formats->quantise_e2m1(row + i, scale, group, codes + i / 2);
        else kernels->formats->quantise_e4m3(row + i, scale, group, codes + i);
        scales = put_scale(f->scales, scale, scales);
    }
    memset(scales, 0, (size_t)f->tail);
    kernels->rows->convert(row + coded, QUERN_F32, codes + coded, QUERN_BF16, f->plain);
}

/* e4m3 by one f32 scale. */
static float decode_whole(const cpu_kernels *kernels, const void *data, const void *scales, int64_t width,
                          float *row)
{
    float scale;
    memcpy(&scale, scales, sizeof scale);
    kernels->formats->widen_e4m3(data, width, row);
    if (!signbit(scale)) return scale;
    for (int64_t i = 0; i < width; i++) row[i] = -row[i];
    return -scale;
}

/* e2m1: a code is multiplied by the ratio of its scale to the row's largest. */
static float decode_ratios(const cpu_kernels *kernels, const void *data, const uint8_t *exponent,
                           int64_t groups, int64_t width, float *row)
{
    float ratio[GROUPS_MOST];
    int most = 0;
    for (int64_t i = 0; i < groups; i++) most = exponent[i] > most ? exponent[i] : most;
    for (int64_t i = 0; i < groups; i++) ratio[i] = ldexpf(1.0f, exponent[i] - most);
    kernels->formats->widen_e2m1(data, ratio, width, row);
    return ldexpf(1.0f, most - 127);
}

float decode_row(const cpu_kernels *kernels, entry_format format, const void *data, const void *scales,
                 int64_t width, float *row)
{
    const row_format *f = row_format_of(format);
    const int64_t coded = width - f->plain;
    if (f->scales != SCALES_E8M0) return decode_whole(kernels, data, scales, width, row);
    if (f->codes == CODES_E2M1) return decode_ratios(kernels, data, scales, width / f->group, width, row);
    kernels->formats->widen_e4m3(data, coded, row);
    for (int64_t i = 0; i < coded; i += f->group)
        kernels->attention->scale_row(row + i, e8m0_value(((const uint8_t *)scales)[i / f->group]), f->group);
    uint16_t plain[PLAIN_MOST];
    memcpy(plain, (const uint8_t *)data + coded, (size_t)f->plain * sizeof *plain);
    kernels->rows->convert(plain, QUERN_BF16, row + coded, QUERN_F32, f->plain);
    return 1.0f;
}
