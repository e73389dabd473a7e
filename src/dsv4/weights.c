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
                                         .alpha = 1.0f,
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
