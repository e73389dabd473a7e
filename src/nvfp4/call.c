/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "nvfp4/call.h"

#include "core/arena.h"
#include "core/context.h"
#include "core/error.h"
#include "core/view.h"

#include <math.h>

quern_status nvfp4_begin(quern_context *ctx, const quern_exec *exec, const quern_tensor *like,
                         nvfp4_call *call)
{
    quern_exec how;
    const quern_status status = op_exec(exec, &how);
    if (status != QUERN_OK) return status;
    call->like = *like;
    call->backend = context_backend(ctx, like->device, like->device_id, how.stream, &call->exec);
    return call->backend != NULL ? QUERN_OK : error_status();
}

quern_status nvfp4_check_stage(const nvfp4_call *call, bool has, const char *what)
{
    if (has) return QUERN_OK;
    return error_set(QUERN_ERR_UNSUPPORTED, "%s on device %s: cpu is accepted", what, call->backend->name);
}

size_t nvfp4_workspace_bytes(size_t bytes)
{
    arena a = arena_on(NULL);
    if (bytes > 0) arena_take(&a, bytes);
    return arena_size(&a);
}

quern_status nvfp4_give_bytes(size_t needed, size_t *bytes)
{
    if (bytes == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "bytes is NULL: a place for the size is needed");
    *bytes = needed;
    return QUERN_OK;
}

quern_status nvfp4_check_workspace(const nvfp4_call *call, void *workspace, size_t given, size_t needed,
                                   void **aligned)
{
    const quern_status status = view_check_workspace(workspace, given, needed, &call->like);
    *aligned = status == QUERN_OK && needed > 0 ? arena_on(workspace).base : NULL;
    return status;
}

quern_status nvfp4_check_profile(quern_nvfp4_profile profile)
{
    if (profile >= QUERN_NVFP4_PROFILE_RNE && profile <= QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS)
        return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "profile is %d: 0 (rne) to %d (compressed_tensors) is accepted", (int)profile,
                     QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS);
}

quern_status nvfp4_check_global_per(quern_nvfp4_global per, bool weight)
{
    if (per < QUERN_NVFP4_GLOBAL_TENSOR || per > QUERN_NVFP4_GLOBAL_ROW)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "global_per is %d: 0 (tensor), 1 (expert) or 2 (row) is accepted", (int)per);
    if (weight && per == QUERN_NVFP4_GLOBAL_ROW)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "global_per is 2 (row) for a weight: 0 (tensor) or 1 (expert) is accepted");
    return QUERN_OK;
}

const char *const nvfp4_profile_words[] = {"rne", "halfstep", "modelopt", "compressed_tensors", NULL},
                  *const nvfp4_global_words[] = {"tensor", "expert", "row", NULL},
                  *const nvfp4_layout_words[] = {"activation", "weight", NULL};

quern_status nvfp4_check_offsets(const quern_tensor *offsets, int64_t rows)
{
    if (offsets->device != QUERN_CPU) return QUERN_OK; /* device contents are bounded in the kernels */
    return nvfp4_check_ends(offsets->data, offsets->shape[0], rows);
}

quern_status nvfp4_check_ends(const int32_t *p, int64_t experts, int64_t rows)
{
    for (int64_t e = 0; e < experts; e++) {
        const int32_t before = e > 0 ? p[e - 1] : 0;
        if (p[e] < before)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "offsets[%lld] is %d after %d: it may not fall",
                             (long long)e, p[e], before);
        if (p[e] > rows)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "offsets[%lld] is %d: at most the %lld rows are accepted", (long long)e, p[e],
                             (long long)rows);
    }
    return QUERN_OK;
}

static int64_t row_offset(const quern_tensor *t, int64_t row)
{
    int64_t at = 0;
    for (int32_t i = t->ndim - 2; i >= 0; row /= t->shape[i], i--) at += row % t->shape[i] * t->strides[i];
    return at;
}

quern_status nvfp4_check_globals(const quern_tensor *global, const char *name)
{
    if (global->ndim == 0 || global->device != QUERN_CPU) return QUERN_OK;
    for (int64_t i = 0; i < view_elements(global); i++) {
        const float g = ((const float *)global->data)[row_offset(global, i)];
        if (!(g > 0.0f) || isinf(g))
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "%s[%lld] is %g: a global above 0 and finite is accepted", name, (long long)i,
                             (double)g);
    }
    return QUERN_OK;
}

quern_tensor nvfp4_global_view(const quern_tensor *global)
{
    if (global == NULL) return (quern_tensor){0};
    quern_tensor v = *global;
    if (v.ndim == 0) {
        v.shape[v.ndim] = 1;
        v.strides[v.ndim++] = 1;
    } /* [] as [1, 1] */
    v.shape[v.ndim] = 1;
    v.strides[v.ndim++] = 1;
    return v;
}

quern_tensor nvfp4_tail_view(const quern_tensor *t)
{
    quern_tensor v = *t;
    if (v.ndim == 0) return v;
    v.shape[v.ndim] = 1;
    v.strides[v.ndim++] = 1;
    return v;
}

quern_status nvfp4_derive_coded(op_call *call, bool weight, quern_nvfp4_global per, int64_t experts)
{
    const op_extents *x = &call->lead[0];
    op_extents *global = &call->lead[3];
    const int32_t along = weight ? x->count - 2 : x->count - 1;
    const int64_t blocks = nvfp4_blocks(x->extent[along]);
    if (weight && x->extent[along] % QUERN_NVFP4_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x.shape[%d] is %lld: a weight's K, a multiple of 16, is accepted", along,
                         (long long)x->extent[along]);
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && x->count != (weight ? 3 : 2))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x has %d dimensions: %s are accepted with a global an expert", x->count,
                         weight ? "3 ([E, K, N])" : "2 ([T, D])");
    call->lead[1] = call->lead[2] = *global = *x;
    call->lead[1].extent[along] = blocks * QUERN_NVFP4_BLOCK / 2;
    call->lead[2].extent[along] = blocks;
    if (per == QUERN_NVFP4_GLOBAL_TENSOR) global->count = 0;
    else if (per == QUERN_NVFP4_GLOBAL_ROW) global->count = x->count - 1;
    else global->count = 1;
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && !weight) global->extent[0] = experts;
    return QUERN_OK;
}
