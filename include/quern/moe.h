/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* moe.h - mixture-of-experts layers over NVFP4 weights. */
#ifndef QUERN_MOE_H
#define QUERN_MOE_H

#include <quern/nvfp4.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Experts' weights, repacked once into the layout that quern_nvfp4_gemm reads fastest, and exactly back. The layout is the
 * backend's; its version changes when its bytes do. Version 1, on the CPU: panels of 64 columns; 2304 bytes for 64 of K.
 */
enum { QUERN_MOE_PREPACK_VERSION = 1 };

typedef struct quern_moe_prepack_params {
    size_t size;
    bool inverse;                       /* from b_repacked to b_codes and b_scales */
    quern_nvfp4_codes_layout b_codes;
    quern_nvfp4_scales_layout b_scales;
} quern_moe_prepack_params;
#define QUERN_MOE_PREPACK_PARAMS_INIT QUERN_SIZED(quern_moe_prepack_params)

typedef struct quern_moe_prepack_tensors {
    size_t size;
    const quern_tensor *b_codes, *b_scales; /* as for quern_nvfp4_gemm, swizzled scales excepted where they are written */
    const quern_tensor *b_repacked;         /* u8 [E, quern_moe_prepack_bytes(N, K)] */
} quern_moe_prepack_tensors;
#define QUERN_MOE_PREPACK_TENSORS_INIT QUERN_SIZED(quern_moe_prepack_tensors)

/* Bytes of one expert's repacked matrix [K, N]; 0 where n or k is negative. */
QUERN_API int64_t quern_moe_prepack_bytes(int64_t n, int64_t k);
QUERN_API quern_status quern_moe_prepack_workspace(quern_context *ctx, const quern_moe_prepack_params *params,
                                                   const quern_moe_prepack_tensors *tensors, size_t *bytes);
QUERN_API quern_status quern_moe_prepack(quern_context *ctx, const quern_exec *exec, const quern_moe_prepack_params *params,
                                         const quern_moe_prepack_tensors *tensors, void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
