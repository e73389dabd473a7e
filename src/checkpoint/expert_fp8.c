/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* expert_fp8.c - E4M3 weights with their scales as bf16: fl(value scale) in f32, rounded once more. */
#include "checkpoint/experts.h"

#include "core/error.h"
#include "core/half.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const stored_tensor *find_scales(const layer_experts *l, const stored_tensor *t)
{
    static const name_role roles[] = {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE};
    const stored_tensor *scales = NULL;
    for (size_t i = 0; i < sizeof roles / sizeof *roles && scales == NULL; i++)
        scales = checkpoint_beside(l->checkpoint, t, roles[i]);
    return scales;
}

static int64_t blocks_of(int64_t extent, int64_t block)
{
    return extent / block + (extent % block != 0);
}

/* Whether the scales are one for each block of `side` x `side`. */
static bool are_of_blocks(const stored_tensor *scales, const expert_matrix *m, int64_t side)
{
    return scales->ndim == 2 && scales->shape[0] == blocks_of(m->rows, side) &&
           scales->shape[1] == blocks_of(m->columns, side);
}

quern_status experts_fp8_scales(const layer_experts *l, const stored_tensor *t, expert_matrix *m)
{
    const stored_tensor *scales = find_scales(l, t); /* they are there: else the format were another */
    const bool e8m0 = strcmp(scales->dtype, "F8_E8M0") == 0;
    const int64_t size = e8m0 ? 1 : (int64_t)sizeof(float), count = (int64_t)scales->bytes / size;
    const bool numbers = e8m0 || strcmp(scales->dtype, "F32") == 0;
    m->block_columns = m->columns;
    if (t->format == QUERN_FORMAT_FP8_BLOCKS)
        m->block_columns = are_of_blocks(scales, m, 128) ? 128 : are_of_blocks(scales, m, 32) ? 32 : 0;
    m->block_rows = t->format == QUERN_FORMAT_FP8_BLOCKS ? m->block_columns
                    : t->format == QUERN_FORMAT_FP8_ROWS ? 1
                                                         : m->rows;
    const bool fits = t->format == QUERN_FORMAT_FP8_BLOCKS ? m->block_columns > 0
                                                           : count == blocks_of(m->rows, m->block_rows);
    if (!numbers || !fits)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%s' is %s of %zu bytes: F32 or F8_E8M0 is accepted, one scale for each "
                         "block of 128 x 128 or 32 x 32 of [%" PRId64 ", %" PRId64
                         "], for each row, or for all",
                         TEXT_NAME(scales->name), scales->dtype, scales->bytes, m->rows, m->columns);
    m->scales = scales->data;
    m->e8m0 = e8m0;
    m->scales_row_bytes = blocks_of(m->columns, m->block_columns) * size;
    return QUERN_OK;
}

/* NaN where it is no number. */
static float scale_at(const expert_matrix *m, int64_t row, int64_t column)
{
    const uint8_t *at = m->scales + row / m->block_rows * m->scales_row_bytes;
    float scale;
    if (m->e8m0) {
        const uint8_t byte = at[column / m->block_columns];
        return byte == 0xff ? NAN : ldexpf(1.0f, byte - 127);
    }
    memcpy(&scale, at + column / m->block_columns * (int64_t)sizeof scale, sizeof scale);
    return scale;
}

static float e4m3_value(uint8_t byte)
{
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float magnitude = (byte & 0x7f) == 0x7f ? NAN
                            : exponent > 0        ? ldexpf((float)(8 + mantissa), exponent - 10)
                                                  : ldexpf((float)mantissa, -9);
    return byte & 0x80 ? -magnitude : magnitude;
}

bool experts_fp8_rows(const expert_matrix *m, int64_t first, int64_t end, uint16_t *to)
{
    float values[256];
    bool good = true;
    for (int i = 0; i < 256; i++) values[i] = e4m3_value((uint8_t)i);
    for (int64_t r = first; r < end; r++, to += m->columns) {
        const uint8_t *row = m->data + r * m->row_bytes;
        for (int64_t column = 0; column < m->columns; column += m->block_columns) {
            const int64_t left = m->columns - column, run = left < m->block_columns ? left : m->block_columns;
            const float scale = scale_at(m, r, column);
            uint16_t any = 0;
            for (int64_t c = column; c < column + run; c++) {
                to[c] = bf16_from_float(values[row[c]] * scale);
                any |= (uint16_t)((to[c] & 0x7f80) == 0x7f80);
            }
            good = good && scale > 0.0f && any == 0;
        }
    }
    return good;
}
