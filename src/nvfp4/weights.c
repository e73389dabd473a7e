/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4/weights.h"

#include "core/error.h"

/* Whether a view [E, K/2, N] is [E, N, K/2] in memory: its pairs of K are contiguous. */
static bool is_transposed(const quern_tensor *codes)
{
    return codes->strides[2] != 1 && codes->shape[2] > 1 && (codes->strides[1] == 1 || codes->shape[1] == 1);
}

static void transpose(quern_tensor *codes)
{
    const int64_t pairs = codes->shape[1];
    codes->shape[1] = codes->shape[2];
    codes->strides[1] = codes->strides[2];
    codes->shape[2] = pairs;
    codes->strides[2] = 1;
}

quern_status nvfp4_weights_of(const quern_tensor *codes, const quern_tensor *scales,
                              quern_nvfp4_codes_layout codes_layout, quern_nvfp4_scales_layout scales_layout,
                              bool output, nvfp4_weights *w, view_rule rules[NVFP4_WEIGHT_RULES])
{
    const bool swizzled = scales_layout == QUERN_NVFP4_LAYOUT_SWIZZLED;
    if (codes_layout < QUERN_NVFP4_CODES_LINEAR || codes_layout > QUERN_NVFP4_CODES_K_MAJOR)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "b_codes' layout is %d: 0 (linear) or 1 (k_major) is accepted", (int)codes_layout);
    if (scales_layout < QUERN_NVFP4_LAYOUT_LINEAR || scales_layout > QUERN_NVFP4_LAYOUT_SWIZZLED ||
        (swizzled && output))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "b_scales' layout is %d: 0 (linear)%s is accepted",
                         (int)scales_layout, output ? " or 1 (k_major)" : ", 1 (k_major) or 2 (swizzled)");
    if (codes == NULL || scales == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed",
                         codes == NULL ? "b_codes" : "b_scales");
    if (codes->ndim != 3)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "b_codes has %d dimensions: 3 are accepted",
                         codes->ndim);
    *w = (nvfp4_weights){.codes = *codes, .scales = *scales, .order = (scale_order)scales_layout};
    w->k_major = codes_layout == QUERN_NVFP4_CODES_K_MAJOR || is_transposed(codes);
    if (codes_layout == QUERN_NVFP4_CODES_LINEAR && w->k_major) transpose(&w->codes);
    const int64_t pairs = w->codes.shape[w->k_major ? 2 : 1];
    w->experts = w->codes.shape[0];
    w->n = w->codes.shape[w->k_major ? 1 : 2];
    if (pairs % (QUERN_NVFP4_BLOCK / 2) != 0 || pairs > INT32_MAX || w->n > INT32_MAX)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "b_codes hold K = 2 x %lld, N = %lld: K a multiple of 16, both below 2^31, is accepted",
            (long long)pairs, (long long)w->n);
    w->k = 2 * pairs;
    const int64_t blocks = w->k / QUERN_NVFP4_BLOCK,
                  bytes = (w->n + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
    const bool scales_k_major = scales_layout == QUERN_NVFP4_LAYOUT_K_MAJOR;
    rules[0] = (view_rule){
        "b_codes", &w->codes, VIEW_U8, 3, {w->experts, w->codes.shape[1], w->codes.shape[2]}, false, output};
    rules[1] = (view_rule){"b_scales",
                           &w->scales,
                           VIEW_SCALE,
                           3,
                           {w->experts, scales_k_major ? w->n : blocks, scales_k_major ? blocks : w->n},
                           false,
                           output};
    if (swizzled)
        rules[1] = (view_rule){"b_scales", &w->scales, VIEW_SCALE, 2, {w->experts, bytes}, false, output};
    return QUERN_OK;
}
