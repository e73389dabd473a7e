/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* code_rows.h - rows of e4m3 and e2m1 codes and back, written once over the level's vectors. */
#ifndef QUERN_CPU_CODE_ROWS_H
#define QUERN_CPU_CODE_ROWS_H

#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/kernels/formats/lanes.h"
#include "cpu/kernels/vector_dtype.h"

typedef uint8_t vbyte __attribute__((vector_size(LANES)));

/* The codes of n - at or LANES channels. */
INLINE vbyte e4m3_codes(const float *row, float scale, int64_t at, int64_t n)
{
    const vfloat x = load_some(row, QUERN_F32, at, n) / scale;
    const vuint code = (vuint)saturated_e4m3(magnitude_of(x)) | ((vuint)x >> 31) << 7;
    return __builtin_convertvector(code, vbyte);
}

static void quantise_e4m3(const float *row, float scale, int64_t n, uint8_t *codes)
{
    for (int64_t at = 0; at < n; at += LANES) {
        const vbyte code = e4m3_codes(row, scale, at, n);
        if (at + LANES <= n) memcpy(codes + at, &code, LANES);
        else memcpy(codes + at, &code, (size_t)(n - at));
    }
}

static void quantise_e2m1(const float *row, float scale, int64_t n, uint8_t *codes)
{
    for (int64_t at = 0; at < n; at += LANES) {
        const vfloat x = load_some(row, QUERN_F32, at, n), y = x / scale;
        const vuint negative = (vuint)(x < 0) & 8u;
        const vuint code = (vuint)saturated_e2m1(magnitude_of(y)) | negative;
        uint32_t lanes[LANES];
        memcpy(lanes, &code, sizeof lanes);
        for (int64_t i = 0; i < LANES && at + i < n; i += 2)
            codes[(at + i) / 2] = (uint8_t)(lanes[i] | lanes[i + 1] << 4);
    }
}

static void widen_e4m3(const uint8_t *codes, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += LANES) {
        const vint code = load_bytes(codes + i, n - i), size = code & 127;
        const vfloat value = v_select(size == 127, v_splat(NAN), e4m3_value(size));
        store_some(out, QUERN_F32, i, n, (vfloat)((vint)value | (code & 128) << 24));
    }
}

static void widen_e2m1(const uint8_t *codes, const float *scales, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i += LANES)
        store_some(out, QUERN_F32, i, n, signed_e2m1(load_nibbles(codes + i / 2, n - i)) * scales[i / 32]);
}

#define CODE_ROW_KERNELS                                                                                     \
    .quantise_e4m3 = quantise_e4m3, .quantise_e2m1 = quantise_e2m1, .widen_e4m3 = widen_e4m3,                \
    .widen_e2m1 = widen_e2m1

#endif
