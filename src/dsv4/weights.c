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

static quern_tensor room(arena *a, const quern_tensor *like, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    return view_on(like, arena_take(a, (size_t)(rows * columns) * quern_dtype_size(dtype)), dtype, 2, shape);
}

/* A global [] as [1, 1]. */
static quern_tensor one_by_one(const quern_tensor *t)
{
    static const int64_t shape[] = {1, 1};
    return view_on(t, t->data, t->dtype, 2, shape);
}

enum { FP8, FP8_SCALES, CODES, SCALES, GLOBAL, PACKED };

bool dsv4_weight_roles(op_call *call, int w_fp8)
{
    uint8_t *r = call->role + w_fp8;
    const bool fp8 = call->given[w_fp8] != NULL, codes = call->given[w_fp8 + CODES] != NULL;
    for (int i = 0; i < PACKED; i++) r[i] = OP_REFUSED;
    r[FP8] = r[CODES] = OP_OPTIONAL;
    if (fp8) r[FP8_SCALES] = OP_NEEDED;
    if (codes) r[SCALES] = r[GLOBAL] = OP_NEEDED;
    return fp8 || codes;
}

quern_status dsv4_weight_refuse(const op_call *call, int tensor, int w_fp8)
{
    const op_tensor *tensors = call->family->tensors;
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: it stands beside %s", tensors[tensor].field,
                     tensors[tensor == w_fp8 + FP8_SCALES ? w_fp8 : w_fp8 + CODES].field);
}

int64_t dsv4_weight_blocks(int64_t extent)
{
    return extent / WIDEN_BLOCK + (extent % WIDEN_BLOCK != 0);
}

quern_status dsv4_weight_check(const op_call *call, const int *floats, int w_fp8, int64_t in)
{
    const op_tensor *tensors = call->family->tensors;
    const bool fp8 = op_uses(call, w_fp8), codes = op_uses(call, w_fp8 + CODES);
    const quern_tensor *scales = op_uses(call, w_fp8 + FP8_SCALES) ? call->given[w_fp8 + FP8_SCALES] : NULL;
    int beside = fp8 && codes ? w_fp8 + CODES : OP_NONE;
    for (int i = 0; floats[i] != OP_NONE && (fp8 || codes) && beside == OP_NONE; i++)
        if (op_uses(call, floats[i])) beside = floats[i];
    if (beside != OP_NONE)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given beside %s: one weight is accepted",
                         tensors[fp8 ? w_fp8 : w_fp8 + CODES].field, tensors[beside].field);
    if (scales != NULL && scales->dtype != QUERN_F32 && scales->dtype != QUERN_E8M0 &&
        scales->dtype != QUERN_U8)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s has dtype %s: f32, e8m0 and u8 are accepted",
                         tensors[w_fp8 + FP8_SCALES].field, quern_dtype_name(scales->dtype));
    if (codes && in % QUANTISE_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x has %lld channels and %s is given: multiples of %d are accepted", (long long)in,
                         tensors[w_fp8 + CODES].field, QUANTISE_BLOCK);
    return QUERN_OK;
}

quern_status dsv4_weight_check_global(const quern_tensor *global, const void *data, const char *name)
{
    if (global->ndim == 0) return QUERN_OK;
    const quern_tensor view = one_by_one(global);
    return view_check_globals(data, &view, name);
}

quern_status dsv4_weight_check_powers(const quern_tensor *scales, const void *data, const char *name)
{
    enum { E8M0_NAN = 255 };
    if (scales->ndim == 0 || scales->dtype == QUERN_F32) return QUERN_OK;
    for (int64_t n = 0; n < scales->shape[0]; n++)
        for (int64_t k = 0; k < scales->shape[1]; k++)
            if (((const uint8_t *)data)[n * scales->strides[0] + k * scales->strides[1]] == E8M0_NAN)
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "%s[%lld, %lld] is the scale byte 0xFF: 0x00 to 0xFE are accepted", name,
                                 (long long)n, (long long)k);
    return QUERN_OK;
}

dsv4_weight dsv4_weight_of(const quern_tensor *x, const dsv4_weight_given *given, bool floats, arena *a)
{
    dsv4_weight weight = {.w = given->w};
    if (given->w_fp8.ndim > 0) {
        const bool exact = x->dtype == QUERN_BF16 && given->w_fp8_scales.dtype != QUERN_F32;
        weight.w = room(a, x, exact ? QUERN_BF16 : QUERN_F32, given->w_fp8.shape[1], given->w_fp8.shape[0]);
        weight.widen =
            (widen_blocks_args){.codes = given->w_fp8, .scales = given->w_fp8_scales, .out = weight.w};
    }
    if (given->w_codes.ndim == 0) return weight;
    const int64_t k = x->shape[x->ndim - 1], n = given->w_codes.shape[1];
    int64_t rows = 1;
    for (int32_t i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    const quern_tensor codes = view_with_batch(&given->w_codes), scales = view_with_batch(&given->w_scales),
                       global = weight.global = one_by_one(&given->w_global);
    if (floats) {
        weight.w = room(a, x, QUERN_F32, k, n);
        weight.dequantise = (dequantise_args){.columns = true,
                                              .per = QUANTISE_GLOBAL_EXPERT,
                                              .codes = codes,
                                              .scales = scales,
                                              .global = global,
                                              .out = view_with_batch(&weight.w)};
        return weight;
    }
    quern_tensor flat;
    if (!view_flatten(x, &flat)) {
        flat = room(a, x, x->dtype, rows, k);
        weight.rows = (permute_args){.per = 1, .x = *x, .out = flat};
    }
    weight.proj = room(a, x, QUERN_F32, rows, n);
    weight.product = (grouped_gemm_args){.tokens = rows,
                                         .n = n,
                                         .k = k,
                                         .a = flat,
                                         .b_codes = codes,
                                         .b_scales = scales,
                                         .b_global = global,
                                         .c = weight.proj};
    return weight;
}

const char *dsv4_weight_missing(const quern_backend *backend, const stage_exec *exec,
                                const dsv4_weight *weight, size_t *bytes)
{
    char why[STAGE_WHY_BYTES] = "";
#define SIZE(stage, args, output)                                                                            \
    if (weight->args.output.ndim > 0) {                                                                      \
        if (backend->stage.run == NULL || !STAGE_TAKES(backend->stage, exec, &weight->args, why))            \
            return #stage;                                                                                   \
        const size_t needed = STAGE_WORKSPACE(backend->stage, exec, &weight->args);                          \
        if (needed > *bytes) *bytes = needed;                                                                \
    }
    DSV4_WEIGHT_STEPS(SIZE)
#undef SIZE
    return NULL;
}
