/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * build_id.h - a number that two builds share where a stage's arguments have the same fields at the same places: a hash
 * of the name, offset and size of every field that the stage headers list. libquern and libquern_cuda compute it each
 * from its own headers.
 */
#ifndef QUERN_BUILD_ID_H
#define QUERN_BUILD_ID_H

#include "cuda_plugin.h"

#include <stddef.h>

/* FNV-1a over a text and two numbers. */
static inline uint64_t build_id_add(uint64_t hash, const char *text, size_t offset, size_t size)
{
    const uint64_t prime = 0x100000001b3u;
    for (; *text != '\0'; text++) hash = (hash ^ (unsigned char)*text) * prime;
    for (int i = 0; i < 8; i++) hash = (hash ^ (offset >> 8 * i & 255)) * prime;
    for (int i = 0; i < 8; i++) hash = (hash ^ (size >> 8 * i & 255)) * prime;
    return hash;
}

#define BUILD_ID_FIELD(field) h = build_id_add(h, #field, offsetof(ARGS, field), sizeof(((ARGS *)0)->field));
#define BUILD_ID_TABLE_ROW(stage, name) h = build_id_add(h, #stage, offsetof(quern_backend, stage), sizeof(name##_args));

static inline uint64_t build_id(void)
{
    uint64_t h = 0xcbf29ce484222325u;
    BACKEND_STAGES(BUILD_ID_TABLE_ROW)
    h = build_id_add(h, "backend", 0, sizeof(quern_backend));
#define ARGS quern_tensor
    BUILD_ID_FIELD(data) BUILD_ID_FIELD(dtype) BUILD_ID_FIELD(device) BUILD_ID_FIELD(device_id) BUILD_ID_FIELD(ndim)
    BUILD_ID_FIELD(shape) BUILD_ID_FIELD(strides)
#undef ARGS
#define ARGS quern_cuda_plugin
    PLUGIN_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS stage_exec
    STAGE_EXEC_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS attend_args
    ATTEND_TENSORS(BUILD_ID_FIELD) ATTEND_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS compress_args
    COMPRESS_TENSORS(BUILD_ID_FIELD) COMPRESS_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS select_args
    SELECT_TENSORS(BUILD_ID_FIELD) SELECT_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS gate_args
    GATE_TENSORS(BUILD_ID_FIELD) GATE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS convert_args
    CONVERT_TENSORS(BUILD_ID_FIELD) CONVERT_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS rowdot_args
    ROWDOT_TENSORS(BUILD_ID_FIELD) ROWDOT_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS list_convert_args
    LIST_CONVERT_TENSORS(BUILD_ID_FIELD) LIST_CONVERT_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS check_args
    CHECK_TENSORS(BUILD_ID_FIELD) CHECK_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS attend_gate_args
    ATTEND_GATE_MEMBERS(BUILD_ID_FIELD) ATTEND_GATE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS quantise_args
    QUANTISE_TENSORS(BUILD_ID_FIELD) QUANTISE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS dequantise_args
    DEQUANTISE_TENSORS(BUILD_ID_FIELD) DEQUANTISE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS fused_quantise_args
    FUSED_QUANTISE_TENSORS(BUILD_ID_FIELD) FUSED_QUANTISE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS from_mxfp4_args
    FROM_MXFP4_TENSORS(BUILD_ID_FIELD) FROM_MXFP4_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS swizzle_args
    SWIZZLE_TENSORS(BUILD_ID_FIELD) SWIZZLE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS interleave_args
    INTERLEAVE_TENSORS(BUILD_ID_FIELD) INTERLEAVE_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS prepack_args
    PREPACK_TENSORS(BUILD_ID_FIELD) PREPACK_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS grouped_gemm_args
    GROUPED_GEMM_TENSORS(BUILD_ID_FIELD) GROUPED_GEMM_VALUES(BUILD_ID_FIELD)
#undef ARGS
#define ARGS route_args
    ROUTE_TENSORS(BUILD_ID_FIELD) ROUTE_VALUES(BUILD_ID_FIELD)
#undef ARGS
    return h;
}

#endif
