/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.c - a compressor's projection weight in the formats that it may have.
 *
 *   floats  the pooling stages multiply by it, some tokens at a time
 *   FP8     [widen_blocks]: becomes such a weight in the workspace, bf16 where x is and scales are powers of
 *           two
 *   NVFP4   [permute] grouped_gemm: projections of all tokens; where the weight itself is wanted: dequantise
 */
#include "dsv4/weights.h"

#include "core/error.h"
#include "core/view.h"

#include <stdio.h>

/* A global [] as [1, 1]. */
static quern_tensor one_by_one(const quern_tensor *t)
{
    static const int64_t shape[] = {1, 1};
    return view_on(t, t->data, t->dtype, 2, shape);
}

enum { FP8, FP8_SCALES, CODES, SCALES, GLOBAL, PACKED };

dsv4_weight_given dsv4_weight_views(const op_call *call, const dsv4_weight_row *row)
{
    return (dsv4_weight_given){.w = op_view(call, row->floats[0], false),
                               .w_fp8 = op_view(call, row->fp8, false),
                               .w_fp8_scales = op_view(call, row->fp8 + FP8_SCALES, false),
                               .w_codes = op_view(call, row->fp8 + CODES, false),
                               .w_scales = op_view(call, row->fp8 + SCALES, false),
                               .w_global = op_view(call, row->fp8 + GLOBAL, false)};
}

void dsv4_weight_roles(op_call *call, const dsv4_weight_row *row, bool wanted)
{
    uint8_t *r = call->role + row->fp8;
    const bool fp8 = call->given[row->fp8] != NULL, codes = call->given[row->fp8 + CODES] != NULL;
    for (int i = 0; i < 2; i++)
        if (row->floats[i] != OP_NONE)
            call->role[row->floats[i]] = !wanted ? OP_REFUSED : fp8 || codes ? OP_OPTIONAL : OP_NEEDED;
    for (int i = 0; i < PACKED; i++) r[i] = OP_REFUSED;
    if (!wanted) return;
    r[FP8] = r[CODES] = OP_OPTIONAL;
    if (fp8) r[FP8_SCALES] = OP_NEEDED;
    if (codes) r[SCALES] = r[GLOBAL] = OP_NEEDED;
}

bool dsv4_weight_has(const dsv4_weight_row *row, int32_t tensor)
{
    return tensor >= row->fp8 && tensor < row->fp8 + PACKED;
}

const char *dsv4_weight_refuse(const op_call *call, const dsv4_weight_row *row, int32_t tensor,
                               char text[OP_REASON])
{
    const int32_t beside = row->fp8 + (tensor == row->fp8 + FP8_SCALES ? FP8 : CODES);
    snprintf(text, OP_REASON, ": it stands beside %s", call->family->tensors[beside].field);
    return text;
}

quern_status dsv4_weight_check(const op_call *call, const dsv4_weight_row *row, int64_t in)
{
    const op_tensor *tensors = call->family->tensors, *packed = tensors + row->fp8;
    const bool fp8 = op_uses(call, row->fp8), codes = op_uses(call, row->fp8 + CODES);
    const quern_tensor *scales =
        op_uses(call, row->fp8 + FP8_SCALES) ? call->given[row->fp8 + FP8_SCALES] : NULL;
    int beside = fp8 && codes ? row->fp8 + CODES : OP_NONE;
    for (int i = 0; i < 2 && (fp8 || codes) && beside == OP_NONE; i++)
        if (row->floats[i] != OP_NONE && op_uses(call, row->floats[i])) beside = row->floats[i];
    if (beside != OP_NONE)
        return error_argument("%s is given beside %s: one weight is accepted",
                              packed[fp8 ? FP8 : CODES].field, tensors[beside].field);
    if (scales != NULL && scales->dtype != QUERN_F32 && scales->dtype != QUERN_E8M0 &&
        scales->dtype != QUERN_U8)
        return error_argument("%s has dtype %s: f32, e8m0 and u8 are accepted", packed[FP8_SCALES].field,
                              quern_dtype_name(scales->dtype));
    if (codes && in % QUANTISE_BLOCK != 0)
        return error_argument("x has %lld channels and %s is given: multiples of %d are accepted",
                              (long long)in, packed[CODES].field, QUANTISE_BLOCK);
    return QUERN_OK;
}

/* That no scale of an FP8 weight is the byte that is NaN. */
static quern_status check_powers(const quern_tensor *scales, const void *data, const char *name)
{
    enum { E8M0_NAN = 255 };
    if (scales->ndim == 0 || scales->dtype == QUERN_F32) return QUERN_OK;
    for (int64_t n = 0; n < scales->shape[0]; n++)
        for (int64_t k = 0; k < scales->shape[1]; k++)
            if (((const uint8_t *)data)[n * scales->strides[0] + k * scales->strides[1]] == E8M0_NAN)
                return error_argument("%s[%lld, %lld] is the scale byte 0xFF: 0x00 to 0xFE are accepted",
                                      name, (long long)n, (long long)k);
    return QUERN_OK;
}

quern_status dsv4_weight_check_data(const op_call *call, const dsv4_weight_row *row,
                                    const dsv4_weight_given *given, void *const *data)
{
    const op_tensor *tensors = call->family->tensors + row->fp8;
    void *const *at = data + row->fp8;
    const quern_tensor global = one_by_one(&given->w_global);
    const quern_status status = check_powers(&given->w_fp8_scales, at[FP8_SCALES], tensors[FP8_SCALES].field);
    if (status != QUERN_OK || at[GLOBAL] == NULL) return status;
    return view_check_globals(at[GLOBAL], &global, tensors[GLOBAL].field);
}

static quern_tensor widened(op_build *b, const quern_tensor *x, const dsv4_weight_given *given)
{
    const bool exact = x->dtype == QUERN_BF16 && given->w_fp8_scales.dtype != QUERN_F32;
    const quern_tensor w =
        op_matrix(b, exact ? QUERN_BF16 : QUERN_F32, given->w_fp8.shape[1], given->w_fp8.shape[0]);
    *OP_ADD(b, widen_blocks) =
        (widen_blocks_args){.codes = given->w_fp8, .scales = given->w_fp8_scales, .out = w};
    return w;
}

static quern_tensor dequantised(op_build *b, int64_t in, const dsv4_weight_given *given)
{
    const quern_tensor w = op_matrix(b, QUERN_F32, in, given->w_codes.shape[1]);
    *OP_ADD(b, dequantise) = (dequantise_args){.columns = true,
                                               .per = QUANTISE_GLOBAL_EXPERT,
                                               .codes = view_with_batch(&given->w_codes),
                                               .scales = view_with_batch(&given->w_scales),
                                               .global = one_by_one(&given->w_global),
                                               .out = view_with_batch(&w)};
    return w;
}

/* x by an NVFP4 weight. */
static quern_tensor product(op_build *b, const quern_tensor *x, const dsv4_weight_given *given)
{
    const int64_t k = x->shape[x->ndim - 1], n = given->w_codes.shape[1];
    int64_t rows = 1;
    for (int32_t i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    quern_tensor flat;
    if (!view_flatten(x, &flat)) {
        flat = op_matrix(b, x->dtype, rows, k);
        op_copy(b, x, &flat);
    }
    const quern_tensor proj = op_matrix(b, QUERN_F32, rows, n);
    *OP_ADD(b, grouped_gemm) = (grouped_gemm_args){.tokens = rows,
                                                   .n = n,
                                                   .k = k,
                                                   .a = flat,
                                                   .b_codes = view_with_batch(&given->w_codes),
                                                   .b_scales = view_with_batch(&given->w_scales),
                                                   .b_global = one_by_one(&given->w_global),
                                                   .c = proj};
    return proj;
}

dsv4_weight dsv4_weight_add(op_build *b, const quern_tensor *x, const dsv4_weight_given *given, bool floats)
{
    if (given->w_fp8.ndim > 0) return (dsv4_weight){.w = widened(b, x, given)};
    if (given->w_codes.ndim == 0) return (dsv4_weight){.w = given->w};
    if (floats) return (dsv4_weight){.w = dequantised(b, x->shape[x->ndim - 1], given)};
    return (dsv4_weight){.proj = product(b, x, given)};
}
