/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* call.h - what NVFP4's operations share: a call's backend and workspace, and checks of its tensors'
 * contents. */
#ifndef QUERN_NVFP4_CALL_H
#define QUERN_NVFP4_CALL_H

#include "backend.h"

#include "core/op.h"

#include <quern/nvfp4.h>

extern const op_family nvfp4_dequantize_family, nvfp4_quantize_family, nvfp4_from_mxfp4_family,
    nvfp4_fused_quantize_family;

/* The words of enum parameters that several operations have. */
extern const char *const nvfp4_profile_words[], *const nvfp4_global_words[], *const nvfp4_layout_words[];

typedef struct nvfp4_call {
    const quern_backend *backend;
    stage_exec exec;
    quern_tensor like; /* of the call's device */
} nvfp4_call;

/* Sets the call's backend, that of `like`'s device. The caller has checked the tensors. */
quern_status nvfp4_begin(quern_context *ctx, const quern_exec *exec, const quern_tensor *like,
                         nvfp4_call *call);
/* An error that names `what` unless the backend has the stage. */
quern_status nvfp4_check_stage(const nvfp4_call *call, bool has, const char *what);

/* The workspace that a call asks for when its stage needs `bytes`. */
size_t nvfp4_workspace_bytes(size_t bytes);
quern_status nvfp4_give_bytes(size_t needed, size_t *bytes);
/* Checks the workspace and aligns it into *aligned. */
quern_status nvfp4_check_workspace(const nvfp4_call *call, void *workspace, size_t given, size_t needed,
                                   void **aligned);

quern_status nvfp4_check_profile(quern_nvfp4_profile profile);
quern_status nvfp4_check_global_per(quern_nvfp4_global per, bool weight);
/* i32 [E] in the CPU's memory: never falling, from 0 to at most `rows`. */
quern_status nvfp4_check_offsets(const quern_tensor *offsets, int64_t rows);
/* The same for E offsets in an array. */
quern_status nvfp4_check_ends(const int32_t *ends, int64_t experts, int64_t rows);
/* A view that nvfp4_global_view() made, in the CPU's memory: finite and above 0. */
quern_status nvfp4_check_globals(const quern_tensor *global, const char *name);
/* A trailing extent of 1, which the stages want; NULL gives the absent view. */
quern_tensor nvfp4_global_view(const quern_tensor *global);

/* The same of a view of op_view(), where [] is [1]. */
quern_tensor nvfp4_tail_view(const quern_tensor *t);
/* Derives the extents of codes, scales and global (lead[1 ... 3]) from x's (lead[0]), whose block dimension
 * it checks. */
quern_status nvfp4_derive_coded(op_call *call, bool weight, quern_nvfp4_global per, int64_t experts);

/* ceil(columns / 16). */
static inline int64_t nvfp4_blocks(int64_t columns)
{
    return columns / QUERN_NVFP4_BLOCK + (columns % QUERN_NVFP4_BLOCK != 0);
}

#endif
