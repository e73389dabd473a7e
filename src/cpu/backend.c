/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.c - the CPU's rows of the stage table. */
#include "cpu/gemm.h"
#include "cpu/gemm4/stages.h"
#include "cpu/quantise/stages.h"
#include "cpu/route/route.h"
#include "cpu/stages.h"

#include <stdlib.h>

static void *open_kept(void)
{
    gemm_cache *cache = malloc(sizeof *cache);
    if (cache != NULL) gemm_cache_open(cache);
    return cache;
}

static void close_kept(void *kept)
{
    gemm_cache_close(kept);
    free(kept);
}

const quern_backend quern_backend_cpu = {
    .name = "cpu",
    .open = open_kept,
    .close = close_kept,
    .attend_forward = {cpu_attend_supports, cpu_attend_forward_workspace, cpu_attend_forward},
    .attend_backward = {cpu_attend_supports, cpu_attend_backward_workspace, cpu_attend_backward},
    .compress_forward = {cpu_compress_supports, cpu_compress_workspace, cpu_compress},
    .compress_backward = {cpu_compress_supports, cpu_compress_backward_workspace, cpu_compress_backward},
    .select = {cpu_select_supports, cpu_select_workspace, cpu_select},
    .gate_forward = {cpu_gate_supports, NULL, cpu_gate_forward},
    .gate_backward = {cpu_gate_supports, cpu_gate_backward_workspace, cpu_gate_backward},
    .convert = {NULL, NULL, cpu_convert},
    .rowdot = {NULL, NULL, cpu_rowdot},
    .list_convert = {NULL, NULL, cpu_list_convert},
    .check = {NULL, NULL, cpu_check},
    .attend_gate_forward = {cpu_attend_gate_supports, cpu_attend_gate_workspace, cpu_attend_gate},
    .quantise = {NULL, cpu_quantise_workspace, cpu_quantise},
    .dequantise = {NULL, NULL, cpu_dequantise},
    .fused_quantise = {NULL, cpu_fused_quantise_workspace, cpu_fused_quantise},
    .from_mxfp4 = {NULL, NULL, cpu_from_mxfp4},
    .swizzle = {NULL, NULL, cpu_swizzle},
    .interleave = {NULL, NULL, cpu_interleave},
    .prepack = {NULL, NULL, cpu_prepack},
    .grouped_gemm = {NULL, cpu_grouped_gemm_workspace, cpu_grouped_gemm},
    .route_forward = {NULL, cpu_route_workspace, cpu_route},
    .route_backward = {NULL, cpu_route_backward_workspace, cpu_route_backward},
    .gemm = {NULL, cpu_gemm_workspace, cpu_gemm},
    .pool_forward = {NULL, cpu_pool_workspace, cpu_pool},
    .pool_backward = {NULL, cpu_pool_backward_workspace, cpu_pool_backward},
    .pool_append = {NULL, cpu_pool_append_workspace, cpu_pool_append},
};
