/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stored.c - the encodings by their tensors' names, dtypes and shapes:
 *   floats       X.weight BF16, F16, F32 [N, K]; a stack X [E, N, K], of gpt-oss [E, K, N]
 *   NVFP4        X.weight U8 [N, K/2], .weight_scale F8_E4M3 [N, K/16], .weight_scale_2 F32 [] (ModelOpt), or
 *                X.weight_packed, .weight_scale, .weight_global_scale F32 [1] (compressed-tensors)
 *   MXFP4        X_blocks U8 [E, N, K/32, 16], X_scales U8 [E, N, K/32] (gpt-oss), or
 *                X.weight I8 [N, K/2], .scale F8_E8M0 [N, K/32] (DeepSeek-V4)
 *   FP8          X.weight F8_E4M3 [N, K], .scale, .weight_scale_inv or .weight_scale, F32 or F8_E8M0:
 *                [ceil(N/b), ceil(K/b)] with b 128 or 32, or one number
 */
#include "quantize/stored.h"

#include <string.h>

static bool is(const model_tensor *t, const char *dtype)
{
    return t != NULL && strcmp(t->dtype, dtype) == 0;
}

static bool has_shape(const model_tensor *t, int32_t ndim, int64_t a, int64_t b)
{
    return t->ndim == ndim && t->shape[0] == a && (ndim < 2 || t->shape[1] == b);
}

/* [] or [1]. */
static bool is_one(const model_tensor *t)
{
    return t->ndim == 0 || (t->ndim == 1 && t->shape[0] == 1);
}

static float first_float(const model_tensor *t)
{
    float value;
    memcpy(&value, t->data, sizeof value);
    return value;
}

static bool refuse(stored_weight *s, const char *why)
{
    s->unreadable = why;
    return true;
}

static bool float_dtype(const model_tensor *t, quern_dtype *dtype)
{
    *dtype = is(t, "BF16") ? QUERN_BF16 : is(t, "F16") ? QUERN_F16 : QUERN_F32;
    return is(t, "BF16") || is(t, "F16") || is(t, "F32");
}

static bool check_bias(stored_weight *s)
{
    quern_dtype dtype;
    const model_tensor *bias = s->of[NAME_BIAS];
    if (bias == NULL || !s->stack ||
        (float_dtype(bias, &dtype) && has_shape(bias, 2, s->experts, s->first.rows)))
        return true;
    return refuse(s, "its bias is [E, N] in BF16, F16 or F32");
}

/* A stack of floats; gate_up of gpt-oss has gate and up in turns, and its matrices are transposed. */
static bool read_stack(stored_weight *s, bool gpt_oss)
{
    const model_tensor *t = s->tensor;
    matrix *m = &s->first;
    s->stack = true;
    s->experts = t->shape[0];
    s->split = s->name.part != NAME_GATE_UP ? SPLIT_NONE : gpt_oss ? SPLIT_EVEN_ODD : SPLIT_HALVES;
    if (!float_dtype(t, &m->dtype)) return refuse(s, "BF16, F16 and F32 are accepted of a stack of experts");
    const int64_t element = (int64_t)quern_dtype_size(m->dtype);
    m->rows = t->shape[gpt_oss ? 2 : 1];
    m->columns = t->shape[gpt_oss ? 1 : 2];
    m->row_bytes = gpt_oss ? element : m->columns * element;
    m->turned = gpt_oss ? m->rows * element : 0;
    m->data = t->data;
    s->expert_bytes = m->rows * m->columns * element;
    if (s->split != SPLIT_NONE && m->rows % 2 != 0)
        return refuse(s, "gate and up are two halves of an even extent");
    return check_bias(s);
}

static bool read_blocks(stored_weight *s)
{
    const model_tensor *t = s->tensor, *scales = s->of[NAME_SCALES];
    const int32_t lead = t->ndim - 3; /* 1: [E, ...] */
    matrix *m = &s->first;
    m->encoding = ENCODING_MXFP4;
    if (scales == NULL) return refuse(s, "its _scales are missing");
    if (!is(t, "U8") || !is(scales, "U8") || lead < 0 || lead > 1 || t->shape[t->ndim - 1] != 16 ||
        scales->ndim != t->ndim - 1 ||
        memcmp(t->shape, scales->shape, (size_t)scales->ndim * sizeof *t->shape) != 0)
        return refuse(s, "U8 blocks [E, N, K/32, 16] with U8 scales [E, N, K/32] are accepted");
    s->stack = lead == 1;
    s->experts = lead == 1 ? t->shape[0] : 1;
    s->split = !s->stack || s->name.part != NAME_GATE_UP ? SPLIT_NONE : SPLIT_EVEN_ODD;
    m->rows = t->shape[lead];
    m->columns = t->shape[lead + 1] * 32;
    m->data = t->data;
    m->row_bytes = m->columns / 2;
    m->scales = scales->data;
    m->scales_row_bytes = m->columns / 32;
    s->expert_bytes = m->rows * m->row_bytes;
    s->expert_scale_bytes = m->rows * m->scales_row_bytes;
    if (s->split != SPLIT_NONE && m->rows % 2 != 0)
        return refuse(s, "gate and up alternate in an even number of rows");
    return check_bias(s);
}

static bool read_nvfp4(stored_weight *s, const model_tensor *global, bool reciprocal)
{
    const model_tensor *t = s->tensor, *scales = s->of[NAME_WEIGHT_SCALE];
    matrix *m = &s->first;
    m->encoding = ENCODING_NVFP4;
    m->rows = t->shape[0];
    m->columns = 2 * t->shape[1];
    if (scales == NULL || global == NULL) return refuse(s, "its NVFP4 scales are missing");
    if (!is(scales, "F8_E4M3") || m->columns % 16 != 0 || !has_shape(scales, 2, m->rows, m->columns / 16))
        return refuse(s, "NVFP4's .weight_scale is F8_E4M3 [N, K/16]");
    if (!is(global, "F32") || !is_one(global)) return refuse(s, "NVFP4's global scale is one F32 number");
    m->data = t->data;
    m->row_bytes = m->columns / 2;
    m->scales = scales->data;
    m->scales_row_bytes = m->columns / 16;
    m->global = first_float(global);
    m->reciprocal = reciprocal;
    if (!(m->global > 0.0f && m->global <= 3.402823466e38f))
        return refuse(s, "its global scale is not above 0 and finite");
    return true;
}

static bool read_mxfp4(stored_weight *s)
{
    const model_tensor *t = s->tensor, *scales = s->of[NAME_SCALE];
    matrix *m = &s->first;
    m->encoding = ENCODING_MXFP4;
    m->rows = t->shape[0];
    m->columns = 2 * t->shape[1];
    if (m->columns % 32 != 0 || !has_shape(scales, 2, m->rows, m->columns / 32))
        return refuse(s, "MXFP4's .scale is F8_E8M0 [N, K/32]");
    m->data = t->data;
    m->row_bytes = m->columns / 2;
    m->scales = scales->data;
    m->scales_row_bytes = m->columns / 32;
    return true;
}

static int64_t blocks_of(int64_t extent, int64_t block)
{
    return extent / block + (extent % block != 0);
}

static bool read_fp8(stored_weight *s)
{
    static const int64_t sizes[] = {128, 32};
    const model_tensor *t = s->tensor, *scales = s->of[NAME_SCALE] != NULL ? s->of[NAME_SCALE]
                                                 : s->of[NAME_WEIGHT_SCALE_INV] != NULL
                                                     ? s->of[NAME_WEIGHT_SCALE_INV]
                                                     : s->of[NAME_WEIGHT_SCALE];
    matrix *m = &s->first;
    m->encoding = ENCODING_FP8;
    m->rows = t->shape[0];
    m->columns = t->shape[1];
    m->data = t->data;
    m->row_bytes = m->columns;
    if (scales == NULL) return refuse(s, "its FP8 scales are missing");
    m->scales = scales->data;
    m->e8m0 = is(scales, "F8_E8M0");
    if (!m->e8m0 && !is(scales, "F32")) return refuse(s, "FP8 scales in F32 or F8_E8M0 are accepted");
    if (is_one(scales)) return true;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && m->block == 0; i++)
        if (has_shape(scales, 2, blocks_of(m->rows, sizes[i]), blocks_of(m->columns, sizes[i])))
            m->block = sizes[i];
    if (m->block > 0) return true;
    return refuse(s, "FP8 scales for blocks of 128 x 128 or 32 x 32, or one for all, are accepted");
}

static bool read_floats(stored_weight *s)
{
    const model_tensor *t = s->tensor;
    matrix *m = &s->first;
    if (!float_dtype(t, &m->dtype))
        return refuse(s, "BF16, F16, F32, MXFP4, FP8 and NVFP4 weights are accepted");
    m->rows = t->shape[0];
    m->columns = t->shape[1];
    m->data = t->data;
    m->row_bytes = m->columns * (int64_t)quern_dtype_size(m->dtype);
    return true;
}

bool stored_read(stored_weight *s, bool gpt_oss)
{
    const model_tensor *t = s->tensor;
    for (int32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return false;
    if (s->name.role == NAME_BLOCKS) return read_blocks(s);
    if (t->ndim == 3 && s->name.stacked && (s->name.role == NAME_OTHER || s->name.role == NAME_WEIGHT))
        return read_stack(s, gpt_oss);
    if (t->ndim != 2 || s->name.role == NAME_OTHER) return false;
    s->first.rows = t->shape[0];
    s->first.columns = t->shape[1];
    if (s->name.role == NAME_WEIGHT_PACKED) return read_nvfp4(s, s->of[NAME_WEIGHT_GLOBAL_SCALE], true);
    if (is(t, "U8") && s->of[NAME_WEIGHT_SCALE_2] != NULL)
        return read_nvfp4(s, s->of[NAME_WEIGHT_SCALE_2], false);
    if ((is(t, "I8") || is(t, "U8")) && is(s->of[NAME_SCALE], "F8_E8M0")) return read_mxfp4(s);
    if (is(t, "F8_E4M3")) return read_fp8(s);
    return read_floats(s);
}
