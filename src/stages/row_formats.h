/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * row_formats.h - the formats of a cache's rows, as a table: entry_format is the number of a row of it.
 *
 * A row is the codes of its first channels, then the others in bf16, then a scale for each group of codes; in
 * a page of bytes the data of all rows stand before the scales of all.
 */
#ifndef QUERN_STAGES_ROW_FORMATS_H
#define QUERN_STAGES_ROW_FORMATS_H

#include "stages/pool.h"

typedef enum row_codes { CODES_NONE, CODES_E4M3, CODES_E2M1 } row_codes;
typedef enum row_scales {
    SCALES_F32,
    SCALES_F32_POWER, /* f32, the next power of two */
    SCALES_E8M0
} row_scales;

typedef struct row_format {
    const char *name;
    int32_t width, rope; /* the channels that a row has, and how many are rotated; 0: any */
    row_codes codes;     /* NONE: all channels in the cache's dtype */
    int32_t plain;       /* the last channels, in bf16 */
    int32_t group;       /* codes of a scale; 0: all */
    row_scales scales;
    float least;  /* a group's largest magnitude counts as at least this */
    int32_t tail; /* bytes of 0 behind the scales */
} row_format;

/*      name      width rope codes    plain group scales        least  tail */
#define ROW_FORMATS(ROW)                                                                                     \
    ROW("rows", 0, 0, CODES_NONE, 0, 0, SCALES_F32, 0.0f, 0)                                                 \
    ROW("fp8", 0, 0, CODES_E4M3, 0, 0, SCALES_F32, 1e-4f, 0)                                                 \
    ROW("fp8-power", 0, 0, CODES_E4M3, 0, 0, SCALES_F32_POWER, 1e-4f, 0)                                     \
    ROW("fp4", 0, 0, CODES_E2M1, 0, 32, SCALES_E8M0, 6 * 0x1p-126f, 0)                                       \
    ROW("row584", 512, 64, CODES_E4M3, 64, 64, SCALES_E8M0, 1e-4f, 1)

static inline const row_format *row_format_of(entry_format format)
{
#define ROW_OF(...) {__VA_ARGS__},
    static const row_format formats[] = {ROW_FORMATS(ROW_OF)};
#undef ROW_OF
    return &formats[format];
}

/* Bytes of a row of `width` channels before the scales; `dtype` counts for rows alone. */
static inline int64_t row_data_bytes(entry_format format, int64_t width, quern_dtype dtype)
{
    const row_format *f = row_format_of(format);
    if (f->codes == CODES_NONE) return width * (int64_t)quern_dtype_size(dtype);
    const int64_t coded = width - f->plain;
    return (f->codes == CODES_E2M1 ? coded / 2 : coded) + f->plain * (int64_t)sizeof(uint16_t);
}

static inline int64_t row_scale_bytes(entry_format format, int64_t width)
{
    const row_format *f = row_format_of(format);
    if (f->codes == CODES_NONE) return 0;
    const int64_t scales = f->group > 0 ? (width - f->plain) / f->group : 1;
    return scales * (f->scales == SCALES_E8M0 ? 1 : (int64_t)sizeof(float)) + f->tail;
}

static inline int64_t row_bytes(entry_format format, int64_t width, quern_dtype dtype)
{
    return row_data_bytes(format, width, dtype) + row_scale_bytes(format, width);
}

/* Channels of a row of so many bytes. */
static inline int64_t row_width(entry_format format, int64_t bytes)
{
    const row_format *f = row_format_of(format);
    if (f->width > 0) return f->width;
    return f->group > 0 ? bytes / row_bytes(format, f->group, QUERN_U8) * f->group
                        : bytes - row_scale_bytes(format, 0);
}

#endif
