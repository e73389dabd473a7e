/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* matrix.c - rows of each encoding as values. */
#include "quantize/matrix.h"

#include "core/half.h"

#include <math.h>
#include <string.h>

static const float e2m1_values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

float e8m0_value(uint8_t byte)
{
    return byte == 0xff ? NAN : float_from_bits(byte > 0 ? (uint32_t)byte << 23 : 0x00400000u);
}

float e4m3_byte_value(uint8_t byte)
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float value = exponent > 0 ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((byte & 0x7f) == 0x7f) value = NAN;
    return byte & 0x80 ? -value : value;
}

static float float_at(const uint8_t *bytes)
{
    float value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

size_t matrix_buffer_bytes(const matrix *m, int64_t rows)
{
    return (size_t)(rows * m->columns) * sizeof(float);
}

int64_t matrix_bytes(const matrix *m)
{
    switch (m->encoding) {
    case ENCODING_FLOATS: return m->rows * m->columns * (int64_t)quern_dtype_size(m->dtype);
    case ENCODING_NVFP4: return m->rows * (m->columns / 2 + m->columns / 16);
    case ENCODING_MXFP4: return m->rows * (m->columns / 2 + m->columns / 32);
    default: return m->rows * m->columns;
    }
}

/* Tiles of 64 columns, so that the lines of the source that a tile touches stay in the cache. */
static void turn(const matrix *m, int64_t first, int64_t count, size_t element, char *to)
{
    enum { TILE = 64 };
    for (int64_t column = 0; column < m->columns; column += TILE) {
        const int64_t end = column + TILE < m->columns ? column + TILE : m->columns;
        for (int64_t r = 0; r < count; r++) {
            const uint8_t *from = m->data + (first + r) * m->row_bytes;
            for (int64_t c = column; c < end; c++) {
                char *at = to + (size_t)(r * m->columns + c) * element;
                if (element == 2) memcpy(at, from + c * m->turned, 2);
                else memcpy(at, from + c * m->turned, 4);
            }
        }
    }
}

static matrix_values read_floats(const matrix *m, int64_t first, int64_t count, void *buffer)
{
    const size_t element = quern_dtype_size(m->dtype);
    const uint8_t *from = m->data + first * m->row_bytes;
    if (m->turned == 0 && (uintptr_t)from % element == 0 && m->row_bytes % (int64_t)element == 0)
        return (matrix_values){from, m->dtype, m->row_bytes / (int64_t)element};
    if (m->turned != 0) turn(m, first, count, element, buffer);
    for (int64_t r = 0; m->turned == 0 && r < count; r++)
        memcpy((char *)buffer + (size_t)(r * m->columns) * element, from + r * m->row_bytes,
               (size_t)m->columns * element);
    return (matrix_values){buffer, m->dtype, m->columns};
}

static void read_codes(const uint8_t *codes, int64_t count, float scale, float global, float *to)
{
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = e2m1_values[i] * scale * global;
    for (int64_t i = 0; i < count / 2; i++) {
        to[2 * i] = values[codes[i] & 15];
        to[2 * i + 1] = values[codes[i] >> 4];
    }
}

/* Blocks of `block` codes; NVFP4's values are fl(fl(code scale) G), or code fl(scale / R). */
static void read_blocks(const matrix *m, int64_t row, int64_t block, float *to)
{
    const uint8_t *codes = m->data + row * m->row_bytes, *scales = m->scales + row * m->scales_row_bytes;
    for (int64_t b = 0; b * block < m->columns; b++) {
        float scale = 0, global = 1.0f;
        if (m->encoding == ENCODING_MXFP4) {
            scale = e8m0_value(scales[b]);
        } else {
            scale = scales[b] & 0x80 ? NAN : e4m3_byte_value(scales[b]);
            if (m->reciprocal) scale /= m->global;
            else global = m->global;
        }
        read_codes(codes + b * block / 2, block, scale, global, to + b * block);
    }
}

static float fp8_scale(const matrix *m, int64_t row, int64_t column)
{
    const int64_t across = m->block > 0 ? (m->columns + m->block - 1) / m->block : 0;
    const int64_t at = m->block > 0 ? row / m->block * across + column / m->block : 0;
    return m->e8m0 ? e8m0_value(m->scales[at]) : float_at(m->scales + 4 * at);
}

static void read_fp8(const matrix *m, int64_t row, const float values[256], float *to)
{
    const uint8_t *from = m->data + row * m->row_bytes;
    const int64_t run = m->block > 0 ? m->block : m->columns;
    for (int64_t column = 0; column < m->columns; column += run) {
        const int64_t end = m->columns - column < run ? m->columns : column + run;
        const float scale = fp8_scale(m, row, column);
        for (int64_t c = column; c < end; c++) to[c] = values[from[c]] * scale;
    }
}

matrix_values matrix_read(const matrix *m, int64_t first, int64_t count, void *buffer)
{
    float values[256], *to = buffer;
    if (m->encoding == ENCODING_FLOATS) return read_floats(m, first, count, buffer);
    for (int i = 0; i < 256 && m->encoding == ENCODING_FP8; i++) values[i] = e4m3_byte_value((uint8_t)i);
    for (int64_t r = 0; r < count; r++, to += m->columns) {
        if (m->encoding == ENCODING_FP8) read_fp8(m, first + r, values, to);
        else read_blocks(m, first + r, m->encoding == ENCODING_MXFP4 ? 32 : 16, to);
    }
    return (matrix_values){buffer, QUERN_F32, m->columns};
}
