/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/rows_nvfp4.h"

static quern_tensor rows_view(const void *data, quern_dtype dtype, int64_t rows, int64_t columns,
                              int64_t stride)
{
    quern_tensor t =
        quern_tensor_contiguous((void *)(uintptr_t)data, dtype, 2, (const int64_t[]){rows, columns});
    t.strides[0] = stride;
    return t;
}

/* The views of one call. */
typedef struct quantise_views {
    quern_tensor x, given, codes, scales;
    quern_nvfp4_quantize_params params;
    quern_nvfp4_quantize_tensors tensors;
} quantise_views;

static void fill(quantise_views *v, const conversion *c, const matrix_values *x, int64_t rows,
                 int64_t columns, const float *global, uint8_t *codes, uint8_t *scales)
{
    v->x = rows_view(x->data, x->dtype, rows, columns, x->stride);
    v->given = quern_tensor_contiguous((void *)(uintptr_t)global, QUERN_F32, 0, NULL);
    v->codes = rows_view(codes, QUERN_U8, rows, columns / 2, columns / 2);
    v->scales = rows_view(scales, QUERN_U8, rows, columns / 16, columns / 16);
    v->params = (quern_nvfp4_quantize_params)QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    v->params.profile = conversion_profile(c);
    v->params.scales = (quern_nvfp4_scales)c->options->scales;
    v->tensors = (quern_nvfp4_quantize_tensors)QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    v->tensors.x = &v->x;
    v->tensors.given_global = &v->given;
    v->tensors.codes = &v->codes;
    v->tensors.scales = &v->scales;
}

quern_status quantise_rows_bytes(const conversion *c, int64_t rows, int64_t columns, size_t *bytes)
{
    const float global = 1.0f;
    quantise_views v;
    fill(&v, c, &(matrix_values){NULL, QUERN_F32, columns}, rows, columns, &global, NULL, NULL);
    return quern_nvfp4_quantize_workspace(c->ctx, &v.params, &v.tensors, bytes);
}

quern_status quantise_rows(const conversion *c, const matrix_values *x, int64_t rows, int64_t columns,
                           float global, uint8_t *codes, uint8_t *scales, void *workspace, size_t bytes)
{
    quantise_views v;
    fill(&v, c, x, rows, columns, &global, codes, scales);
    return quern_nvfp4_quantize(c->ctx, NULL, &v.params, &v.tensors, workspace, bytes);
}

quern_status dequantise_rows(const conversion *c, const matrix *m, int64_t rows, void *out, quern_dtype dtype)
{
    quern_nvfp4_dequantize_params params = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors tensors = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    const quern_tensor codes = rows_view(m->data, QUERN_U8, rows, m->columns / 2, m->row_bytes),
                       scales = rows_view(m->scales, QUERN_U8, rows, m->columns / 16, m->scales_row_bytes),
                       global = quern_tensor_contiguous((void *)(uintptr_t)&m->global, QUERN_F32, 0, NULL),
                       x = rows_view(out, dtype, rows, m->columns, m->columns);
    params.profile = m->reciprocal ? QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS : QUERN_NVFP4_PROFILE_RNE;
    tensors.codes = &codes;
    tensors.scales = &scales;
    tensors.global = &global;
    tensors.x = &x;
    return quern_nvfp4_dequantize(c->ctx, NULL, &params, &tensors, NULL, 0);
}
