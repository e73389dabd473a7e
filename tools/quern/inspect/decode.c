/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "inspect/decode.h"

#include "core/half.h"
#include "io/gguf.h"

#include <math.h>
#include <string.h>

/* Little-endian words at any address. */
static uint32_t word32(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static uint16_t word16(const uint8_t *at)
{
    uint16_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static float f32_at(const uint8_t *at)
{
    float value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* An 8-bit float: sign, `bits` of exponent, the rest mantissa. `finite` says what its highest codes are:
 * 0 infinities and NaN (e5m2), 1 one NaN a sign (e4m3fn), 2 NaN at -0 alone (fnuz). */
static float float8(uint8_t byte, int bits, int bias, int finite)
{
    const int mantissa_bits = 7 - bits, exponent = byte >> mantissa_bits & ((1 << bits) - 1);
    const int mantissa = byte & ((1 << mantissa_bits) - 1), top = (1 << bits) - 1;
    const float sign = byte >> 7 != 0 ? -1.0f : 1.0f;
    if (finite == 2 && byte == 0x80) return NAN;
    if (finite == 1 && (byte & 0x7f) == 0x7f) return NAN;
    if (finite == 0 && exponent == top) return mantissa == 0 ? sign * INFINITY : NAN;
    if (exponent == 0) return sign * ldexpf((float)mantissa, 1 - bias - mantissa_bits);
    return sign * ldexpf((float)(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
}

static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static float exponent_value(uint8_t byte)
{
    return byte == 0xff ? NAN : ldexpf(1.0f, byte - 127);
}

/* What an element of `dtype` is worth. */
static float plain_value(quern_dtype dtype, const uint8_t *at)
{
    uint64_t word;
    double number;
    switch (dtype) {
    case QUERN_F32: return f32_at(at);
    case QUERN_F16: return float_from_f16(word16(at));
    case QUERN_BF16: return float_from_bf16(word16(at));
    case QUERN_F64: memcpy(&number, at, sizeof number); return (float)number;
    case QUERN_I8: return (float)(int8_t)*at;
    case QUERN_U8:
    case QUERN_BOOL: return (float)*at;
    case QUERN_I16: return (float)(int16_t)word16(at);
    case QUERN_U16: return (float)word16(at);
    case QUERN_I32: return (float)(int32_t)word32(at);
    case QUERN_U32: return (float)word32(at);
    case QUERN_I64: memcpy(&word, at, sizeof word); return (float)(int64_t)word;
    case QUERN_U64: memcpy(&word, at, sizeof word); return (float)word;
    case QUERN_E4M3: return float8(*at, 4, 7, 1);
    case QUERN_E5M2: return float8(*at, 5, 15, 0);
    case QUERN_E4M3FNUZ: return float8(*at, 4, 8, 2);
    case QUERN_E5M2FNUZ: return float8(*at, 5, 16, 2);
    case QUERN_E8M0: return exponent_value(*at);
    default: return NAN;
    }
}

static quern_dtype dtype_of(const quern_checkpoint_tensor *t)
{
    static const struct {
        const char *name;
        quern_dtype dtype;
    } all[] = {{"F32", QUERN_F32},
               {"F16", QUERN_F16},
               {"BF16", QUERN_BF16},
               {"F64", QUERN_F64},
               {"I8", QUERN_I8},
               {"I16", QUERN_I16},
               {"I32", QUERN_I32},
               {"I64", QUERN_I64},
               {"U8", QUERN_U8},
               {"U16", QUERN_U16},
               {"U32", QUERN_U32},
               {"U64", QUERN_U64},
               {"BOOL", QUERN_BOOL},
               {"F8_E4M3", QUERN_E4M3},
               {"F8_E5M2", QUERN_E5M2},
               {"F8_E4M3FNUZ", QUERN_E4M3FNUZ},
               {"F8_E5M2FNUZ", QUERN_E5M2FNUZ},
               {"F8_E8M0", QUERN_E8M0}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i].name, t->dtype) == 0) return all[i].dtype;
    return (quern_dtype)-1;
}

/* A float, a power of two, or an 8-bit float, at `index` of a tensor of scales. */
static float scale_at(const quern_checkpoint_tensor *scales, int64_t index)
{
    const quern_dtype dtype = strcmp(scales->dtype, "U8") == 0 ? QUERN_E8M0 : dtype_of(scales);
    return plain_value(dtype, (const uint8_t *)scales->data + index * (int64_t)quern_dtype_size(dtype));
}

static int64_t bytes_of(const quern_checkpoint_tensor *t)
{
    return (int64_t)t->bytes;
}

static int64_t extent(const quern_checkpoint_tensor *t, int32_t from_end)
{
    return t->ndim > from_end ? t->shape[t->ndim - 1 - from_end] : 1;
}

static bool begin_codes(decoder *d, const statistics_source *s, int64_t block)
{
    const quern_checkpoint_tensor *t = s->tensor;
    /* two codes a byte; gpt-oss' last two extents are a row */
    if (bytes_of(t) == 0) return false; /* its extents may be any */
    int64_t row_bytes = extent(t, 0);
    if (t->format == QUERN_FORMAT_MXFP4_BLOCKS) row_bytes *= extent(t, 1);
    if (strcmp(t->dtype, "F4") == 0 && row_bytes > 0) {
        int64_t counted = 1;
        for (int32_t i = 0; i < t->ndim; i++) counted *= t->shape[i];
        row_bytes = row_bytes * bytes_of(t) / counted; /* the shape counts elements or pairs */
    }
    if (row_bytes <= 0 || s->scales == NULL) return false;
    d->columns = 2 * row_bytes;
    d->rows = bytes_of(t) / row_bytes;
    return d->columns % block == 0 && bytes_of(s->scales) == d->rows * (d->columns / block);
}

/* A side of FP8's blocks: what 128 or 32 makes of the extents. */
static int64_t fp8_block(const decoder *d, const quern_checkpoint_tensor *scales)
{
    static const int64_t sides[] = {128, 32};
    for (size_t i = 0; i < sizeof sides / sizeof *sides; i++)
        if (extent(scales, 1) == (d->rows + sides[i] - 1) / sides[i] &&
            extent(scales, 0) == (d->columns + sides[i] - 1) / sides[i])
            return sides[i];
    return 0;
}

static bool begin_fp8(decoder *d, const statistics_source *s)
{
    if (s->scales == NULL) return false;
    const size_t size =
        quern_dtype_size(strcmp(s->scales->dtype, "U8") == 0 ? QUERN_E8M0 : dtype_of(s->scales));
    if (size == 0) return false;
    const int64_t scales = bytes_of(s->scales) / (int64_t)size;
    if (s->tensor->format == QUERN_FORMAT_FP8_TENSOR) return scales == 1;
    if (s->tensor->ndim != 2) return false;
    if (s->tensor->format == QUERN_FORMAT_FP8_ROWS) return scales == d->rows;
    d->block = fp8_block(d, s->scales);
    return d->block > 0;
}

bool decoder_begin(const statistics_source *s, decoder *d)
{
    const quern_checkpoint_tensor *t = s->tensor;
    *d = (decoder){.source = s, .columns = extent(t, 0), .rows = 1};
    for (int i = 0; i < 256; i++) d->e4m3[i] = float8((uint8_t)i, 4, 7, 1);
    for (int32_t i = 0; i + 1 < t->ndim; i++) d->rows *= t->shape[i];
    bool good;
    switch (t->format) {
    case QUERN_FORMAT_NVFP4_MODELOPT:
    case QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS: good = begin_codes(d, s, 16) && s->global != NULL; break;
    case QUERN_FORMAT_MXFP4:
    case QUERN_FORMAT_MXFP4_BLOCKS: good = begin_codes(d, s, 32); break;
    case QUERN_FORMAT_FP8_BLOCKS:
    case QUERN_FORMAT_FP8_ROWS:
    case QUERN_FORMAT_FP8_TENSOR: good = begin_fp8(d, s); break;
    case QUERN_FORMAT_NVFP4_GGUF:
    case QUERN_FORMAT_MXFP4_GGUF: good = true; break;
    case QUERN_FORMAT_GGML: good = false; break;
    default: good = (int)dtype_of(t) >= 0;
    }
    d->values = d->rows * d->columns;
    d->matrix_rows = d->rows;
    const int64_t globals = s->global != NULL ? bytes_of(s->global) / 4 : 0;
    if (globals > 1 && d->rows % globals == 0) d->matrix_rows = d->rows / globals;
    return good && d->values > 0 && (globals <= 1 || t->format == QUERN_FORMAT_NVFP4_GGUF);
}

/* NVFP4's blocks of 16 from `block` on. */
static void decode_nvfp4(const decoder *d, int64_t first, int64_t count, const uint8_t *codes,
                         const uint8_t *scales, float *values, statistics *s)
{
    const statistics_source *from = d->source;
    for (int64_t b = 0; b < count / 16; b++) {
        const int64_t row = (first + 16 * b) / d->columns;
        const uint8_t scale = scales[b];
        float global = from->global != NULL
                           ? f32_at((const uint8_t *)from->global->data + 4 * (row / d->matrix_rows))
                           : 1.0f;
        float table[16];
        const bool reciprocal = from->tensor->format == QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS;
        const bool bad = scale >= 0x7f;
        const float factor = bad ? NAN : d->e4m3[scale];
        for (int i = 0; i < 16; i++)
            table[i] = reciprocal ? e2m1[i] * (factor / global) : e2m1[i] * factor * global;
        for (int i = 0; i < 8; i++) {
            values[16 * b + 2 * i] = table[codes[8 * b + i] & 15];
            values[16 * b + 2 * i + 1] = table[codes[8 * b + i] >> 4];
        }
        s->blocks++;
        s->saturated += scale == 0x7e;
        s->bad_scales += bad;
    }
}

/* MXFP4's blocks of 32. */
static void decode_mxfp4(int64_t count, const uint8_t *codes, const uint8_t *exponents, float *values,
                         statistics *s)
{
    for (int64_t b = 0; b < count / 32; b++) {
        const float factor = exponent_value(exponents[b]);
        for (int i = 0; i < 16; i++) {
            values[32 * b + 2 * i] = e2m1[codes[16 * b + i] & 15] * factor;
            values[32 * b + 2 * i + 1] = e2m1[codes[16 * b + i] >> 4] * factor;
        }
        s->blocks++;
        s->bad_scales += exponents[b] == 0xff;
    }
}

static void decode_fp8(const decoder *d, int64_t first, int64_t count, float *values)
{
    const statistics_source *s = d->source;
    const int64_t across = d->block > 0 ? (d->columns + d->block - 1) / d->block : 1;
    for (int64_t i = 0; i < count;) { /* as far as one scale goes */
        const int64_t row = (first + i) / d->columns, column = (first + i) % d->columns;
        int64_t run = d->columns - column, which = s->tensor->format == QUERN_FORMAT_FP8_ROWS ? row : 0;
        if (d->block > 0) {
            which = row / d->block * across + column / d->block;
            if (run > d->block - column % d->block) run = d->block - column % d->block;
        }
        if (run > count - i) run = count - i;
        const float scale = scale_at(s->scales, which);
        const uint8_t *bytes = (const uint8_t *)s->tensor->data + first + i;
        for (int64_t j = 0; j < run; j++) values[i + j] = d->e4m3[bytes[j]] * scale;
        i += run;
    }
}

static void decode_plain(const quern_checkpoint_tensor *t, int64_t first, int64_t count, float *values)
{
    const quern_dtype dtype = dtype_of(t);
    const int64_t size = (int64_t)quern_dtype_size(dtype);
    const uint8_t *at = (const uint8_t *)t->data + first * size;
    if (dtype == QUERN_BF16) { /* most of what there is */
        for (int64_t i = 0; i < count; i++) values[i] = float_from_bf16(word16(at + 2 * i));
        return;
    }
    for (int64_t i = 0; i < count; i++) values[i] = plain_value(dtype, at + i * size);
}

void decode(const decoder *d, int64_t first, int64_t count, float *values, statistics *s)
{
    const statistics_source *from = d->source;
    const uint8_t *data = from->tensor->data;
    uint8_t codes[DECODE_VALUES / 2], scales[DECODE_VALUES / 16];
    switch (from->tensor->format) {
    case QUERN_FORMAT_NVFP4_MODELOPT:
    case QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS:
        decode_nvfp4(d, first, count, data + first / 2, (const uint8_t *)from->scales->data + first / 16,
                     values, s);
        break;
    case QUERN_FORMAT_NVFP4_GGUF:
        gguf_split_nvfp4(data + first / 64 * 36, (size_t)(count / 64), codes, scales);
        decode_nvfp4(d, first, count, codes, scales, values, s);
        break;
    case QUERN_FORMAT_MXFP4:
    case QUERN_FORMAT_MXFP4_BLOCKS:
        decode_mxfp4(count, data + first / 2, (const uint8_t *)from->scales->data + first / 32, values, s);
        break;
    case QUERN_FORMAT_MXFP4_GGUF:
        gguf_split_mxfp4(data + first / 32 * 17, (size_t)(count / 32), codes, scales);
        decode_mxfp4(count, codes, scales, values, s);
        break;
    case QUERN_FORMAT_FP8_BLOCKS:
    case QUERN_FORMAT_FP8_ROWS:
    case QUERN_FORMAT_FP8_TENSOR: decode_fp8(d, first, count, values); break;
    default: decode_plain(from->tensor, first, count, values);
    }
}
