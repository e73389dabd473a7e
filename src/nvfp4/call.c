/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4/call.h"

#include "core/error.h"

const char *const nvfp4_profile_words[] = {"rne", "halfstep", "modelopt", "compressed-tensors", NULL},
                  *const nvfp4_global_words[] = {"tensor", "expert", "row", NULL},
                  *const nvfp4_layout_words[] = {"activation", "weight", NULL},
                  *const nvfp4_codes_words[] = {"linear", "k-major", NULL},
                  *const nvfp4_scales_words[] = {"linear", "k-major", "swizzled", NULL};

quern_status nvfp4_check_global_per(quern_nvfp4_global per, bool weight)
{
    if (per < QUERN_NVFP4_GLOBAL_TENSOR || per > QUERN_NVFP4_GLOBAL_ROW)
        return error_argument("global_per is %d: 0 (tensor), 1 (expert) or 2 (row) is accepted", (int)per);
    if (weight && per == QUERN_NVFP4_GLOBAL_ROW)
        return error_argument("global_per is 2 (row) for a weight: 0 (tensor) or 1 (expert) is accepted");
    return QUERN_OK;
}

static bool has_rows(const quern_tensor *global, const nvfp4_kinds *kinds)
{
    const int32_t dims = kinds->row_dims;
    if (kinds->rows == NULL || global->ndim < dims || global->ndim > dims + 1) return false;
    if (global->ndim > dims && global->shape[dims] != 1) return false;
    for (int32_t i = 0; i < dims; i++)
        if (global->shape[i] != kinds->rows->shape[i]) return false;
    return true;
}

quern_nvfp4_global nvfp4_global_kind(const quern_tensor *global, quern_nvfp4_global per,
                                     const nvfp4_kinds *kinds)
{
    if (global == NULL || global->ndim < 0 || global->ndim > QUERN_MAX_DIMS) return per;
    const bool one = op_is_one(global);
    const bool fits[] = {kinds->tensor && one,
                         (global->ndim == 1 && global->shape[0] == kinds->experts) ||
                             (one && kinds->experts == 1),
                         has_rows(global, kinds)};
    const int count = fits[0] + fits[1] + fits[2];
    if (count != 1) return per;
    return fits[0] ? QUERN_NVFP4_GLOBAL_TENSOR : fits[1] ? QUERN_NVFP4_GLOBAL_EXPERT : QUERN_NVFP4_GLOBAL_ROW;
}

nvfp4_kinds nvfp4_kinds_of(const quern_tensor *x, const quern_tensor *offsets, bool weight)
{
    nvfp4_kinds kinds = {.tensor = offsets == NULL, .experts = -1};
    if (x == NULL || x->ndim < 1 || x->ndim > QUERN_MAX_DIMS) return kinds;
    if (offsets == NULL && x->ndim == 3) kinds.experts = x->shape[0];
    if (offsets != NULL && offsets->ndim == 1) kinds.experts = offsets->shape[0];
    if (offsets == NULL && !weight) kinds.rows = x;
    kinds.row_dims = x->ndim - 1;
    return kinds;
}

bool nvfp4_needs_offsets(quern_nvfp4_global per, bool weight, const quern_tensor *x)
{
    return per == QUERN_NVFP4_GLOBAL_EXPERT && !weight && (x == NULL || x->ndim != 3);
}

const char *const nvfp4_beside_offsets = ": it is accepted with an activation [T, D] and a global an expert";

quern_status nvfp4_check_dims(const quern_tensor *x, const char *name, bool weight)
{
    if (x->ndim >= (weight ? 2 : 1) && x->ndim <= (weight ? 3 : QUERN_MAX_DIMS - 1)) return QUERN_OK;
    return error_argument("%s has %d dimensions: %s are accepted", name, x->ndim,
                          weight ? "2 or 3 for a weight" : "1 to 5");
}

quern_tensor nvfp4_matrices(const op_call *call, int32_t tensor, bool weight)
{
    const quern_tensor t = op_view(call, tensor, false);
    return weight && t.ndim == 2 ? view_with_batch(&t) : t;
}

quern_status nvfp4_check_kind(const quern_tensor *global, quern_nvfp4_global per, const char *name)
{
    if (global == NULL || per != QUERN_NVFP4_GLOBAL_TENSOR || op_is_one(global)) return QUERN_OK;
    return error_argument("%s has %d dimensions and its shape does not say what shares each number: one "
                          "number, [] or [1], or one for each expert or row is accepted",
                          name, global->ndim);
}

quern_tensor nvfp4_tail_view(const quern_tensor *t)
{
    quern_tensor v = *t;
    if (v.ndim == 0) return v;
    v.shape[v.ndim] = 1;
    v.strides[v.ndim++] = 1;
    return v;
}

bool nvfp4_is_k_major(const quern_tensor *codes, quern_tensor *turned)
{
    if (codes == NULL || codes->ndim != 3) return false;
    if (codes->strides[2] == 1 || codes->shape[2] <= 1 || (codes->strides[1] != 1 && codes->shape[1] != 1))
        return false;
    *turned = *codes;
    turned->shape[1] = codes->shape[2];
    turned->strides[1] = codes->strides[2];
    turned->shape[2] = codes->shape[1];
    turned->strides[2] = 1;
    return true;
}

op_extents nvfp4_scales_extents(quern_nvfp4_scales_layout layout, int64_t experts, int64_t blocks, int64_t n)
{
    switch (layout) {
    case QUERN_NVFP4_LAYOUT_SWIZZLED:
        return (op_extents){2, {experts, (n + 127) / 128 * 128 * ((blocks + 3) / 4 * 4)}};
    case QUERN_NVFP4_LAYOUT_K_MAJOR: return (op_extents){3, {experts, n, blocks}};
    default: return (op_extents){3, {experts, blocks, n}};
    }
}

quern_status nvfp4_derive_coded(op_call *call, bool weight, quern_nvfp4_global per, int64_t experts)
{
    const op_extents *x = &call->lead[0];
    op_extents *global = &call->lead[3];
    const int32_t along = weight ? x->count - 2 : x->count - 1;
    const int64_t blocks = nvfp4_blocks(x->extent[along]);
    if (weight && x->extent[along] % QUERN_NVFP4_BLOCK != 0)
        return error_argument("x.shape[%d] is %lld: a weight's K, a multiple of 16, is accepted", along,
                              (long long)x->extent[along]);
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && x->count != 3 && (weight || x->count != 2))
        return error_argument("x has %d dimensions: %s are accepted with a global an expert", x->count,
                              weight ? "3 ([E, K, N])" : "2 ([T, D]) or 3 ([E, n, D])");
    call->lead[1] = call->lead[2] = *global = *x;
    call->lead[1].extent[along] = blocks * QUERN_NVFP4_BLOCK / 2;
    call->lead[2].extent[along] = blocks;
    if (per == QUERN_NVFP4_GLOBAL_TENSOR) global->count = 0;
    else if (per == QUERN_NVFP4_GLOBAL_ROW) global->count = x->count - 1;
    else global->count = 1;
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && x->count == 2) global->extent[0] = experts;
    return QUERN_OK;
}
