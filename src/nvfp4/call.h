/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.h - what NVFP4's operations share: words of their parameters, shapes that follow from others. */
#ifndef QUERN_NVFP4_CALL_H
#define QUERN_NVFP4_CALL_H

#include "backend.h"

#include "core/op.h"

#include <quern/nvfp4.h>

extern const op_family nvfp4_dequantize_family, nvfp4_quantize_family, nvfp4_from_mxfp4_family,
    nvfp4_fused_quantize_family, nvfp4_swizzle_family, nvfp4_interleave_family, moe_prepack_family;

/* The words of parameters that several operations have. */
extern const char *const nvfp4_profile_words[],
    *const nvfp4_global_words[], *const nvfp4_layout_words[], *const nvfp4_codes_words[],
                                                                  *const nvfp4_scales_words[];

/* The kinds of global that a call's other tensors allow. */
typedef struct nvfp4_kinds {
    bool tensor;
    int64_t experts; /* -1: none is one an expert */
    const quern_tensor
        *rows; /* whose first `row_dims` extents are those of the rows; NULL: none is one a row */
    int32_t row_dims;
} nvfp4_kinds;

/* The kind of a global, or NULL, by its shape where one kind alone fits, else `per`. Nothing of the tensors
 * has been checked. */
quern_nvfp4_global nvfp4_global_kind(const quern_tensor *global, quern_nvfp4_global per,
                                     const nvfp4_kinds *kinds);
/* The kinds that a global of x, values or codes, may be of. */
nvfp4_kinds nvfp4_kinds_of(const quern_tensor *x, const quern_tensor *offsets, bool weight);
/* Whether rows of x, values or codes, need offsets: experts one after the other do, those of a stack
 * [E, n, D] do not. */
bool nvfp4_needs_offsets(quern_nvfp4_global per, bool weight, const quern_tensor *x);
/* Why offsets that are not needed are refused. */
extern const char *const nvfp4_beside_offsets;
/* That x, values or codes, has as many dimensions as an activation or a weight may. */
quern_status nvfp4_check_dims(const quern_tensor *x, const char *name, bool weight);
/* A tensor's view for the stages; a weight's as [E, K, N]. */
quern_tensor nvfp4_matrices(const op_call *call, int32_t tensor, bool weight);
/* Refuses a global of several numbers of which the shape does not say what they are of. */
quern_status nvfp4_check_kind(const quern_tensor *global, quern_nvfp4_global per, const char *name);
quern_status nvfp4_check_global_per(quern_nvfp4_global per, bool weight);
/* A global as the stages want it: a view of op_view(), where [] is [1], with a trailing extent of 1. */
quern_tensor nvfp4_tail_view(const quern_tensor *t);
/* Derives the extents of codes, scales and global (lead[1 ... 3]) from x's (lead[0]), whose block dimension
 * it checks. */
quern_status nvfp4_derive_coded(op_call *call, bool weight, quern_nvfp4_global per, int64_t experts);

/* Whether a weight's codes, a view [E, K/2, N] or NULL, are [E, N, K/2] in memory; *turned is then that
 * view. */
bool nvfp4_is_k_major(const quern_tensor *codes, quern_tensor *turned);
/* The shape of the scales of E weights [K, N] with `blocks` blocks along K. */
op_extents nvfp4_scales_extents(quern_nvfp4_scales_layout layout, int64_t experts, int64_t blocks, int64_t n);

/* ceil(columns / 16). */
static inline int64_t nvfp4_blocks(int64_t columns)
{
    return columns / QUERN_NVFP4_BLOCK + (columns % QUERN_NVFP4_BLOCK != 0);
}

#endif
