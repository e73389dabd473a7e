/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.c - the CPU's rows of the stage table. */
#include "cpu/cpu.h"

#include "cpu/e4m3/stages.h"
#include "cpu/gemm.h"
#include "cpu/gemm4/stages.h"
#include "cpu/grouped_dense/stages.h"
#include "cpu/hyper/stages.h"
#include "cpu/levels.h"
#include "cpu/permute/stages.h"
#include "cpu/quantise/stages.h"
#include "cpu/route/route.h"
#include "cpu/stages.h"
#include "cpu/swiglu/stages.h"

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
    .choose_level = cpu_choose_level,
    .attend_forward = {NULL, cpu_attend_forward_workspace, cpu_attend_forward, cpu_attend_kernel},
    .attend_backward = {NULL, cpu_attend_backward_workspace, cpu_attend_backward, cpu_attend_kernel},
    .compress_forward = {NULL, cpu_compress_workspace, cpu_compress, cpu_compress_kernel},
    .compress_backward = {NULL, cpu_compress_backward_workspace, cpu_compress_backward,
                          cpu_compress_backward_kernel},
    .select = {NULL, cpu_select_workspace, cpu_select, cpu_select_kernel},
    .gate_forward = {NULL, NULL, cpu_gate_forward, cpu_gate_kernel},
    .gate_backward = {NULL, cpu_gate_backward_workspace, cpu_gate_backward, cpu_gate_kernel},
    .convert = {NULL, NULL, cpu_convert, cpu_convert_kernel},
    .rowdot = {NULL, NULL, cpu_rowdot, cpu_rowdot_kernel},
    .list_convert = {NULL, NULL, cpu_list_convert, cpu_list_convert_kernel},
    .validate_lists = {NULL, NULL, cpu_validate_lists, NULL},
    .attend_gate_forward = {NULL, cpu_attend_gate_workspace, cpu_attend_gate, cpu_attend_gate_kernel},
    .quantise = {NULL, cpu_quantise_workspace, cpu_quantise, NULL},
    .dequantise = {NULL, NULL, cpu_dequantise, NULL},
    .widen_blocks = {NULL, NULL, cpu_widen_blocks, NULL},
    .fused_quantise = {NULL, cpu_fused_quantise_workspace, cpu_fused_quantise, NULL},
    .from_mxfp4 = {NULL, NULL, cpu_from_mxfp4, NULL},
    .swizzle = {NULL, NULL, cpu_swizzle, NULL},
    .interleave = {NULL, NULL, cpu_interleave, NULL},
    .prepack = {NULL, NULL, cpu_prepack, NULL},
    .repacked_bytes = cpu_repacked_bytes,
    .grouped_gemm = {NULL, cpu_grouped_gemm_workspace, cpu_grouped_gemm, NULL},
    .grouped_gemm_backward = {NULL, cpu_grouped_gemm_backward_workspace, cpu_grouped_gemm_backward, NULL},
    .grouped_dense = {NULL, cpu_grouped_dense_workspace, cpu_grouped_dense, NULL},
    .grouped_outer = {NULL, cpu_grouped_outer_workspace, cpu_grouped_outer, NULL},
    .permute = {NULL, NULL, cpu_permute, NULL},
    .combine = {NULL, cpu_combine_workspace, cpu_combine, NULL},
    .swiglu_forward = {NULL, NULL, cpu_swiglu, NULL},
    .swiglu_backward = {NULL, NULL, cpu_swiglu_backward, NULL},
    .expert_sums = {NULL, cpu_expert_sums_workspace, cpu_expert_sums, NULL},
    .route_forward = {NULL, cpu_route_workspace, cpu_route, NULL},
    .route_backward = {NULL, cpu_route_backward_workspace, cpu_route_backward, NULL},
    .gemm = {NULL, cpu_gemm_workspace, cpu_gemm, NULL},
    .pool_forward = {NULL, cpu_pool_workspace, cpu_pool, cpu_pool_kernel},
    .pool_backward = {NULL, cpu_pool_backward_workspace, cpu_pool_backward, cpu_pool_kernel},
    .pool_append = {NULL, cpu_pool_append_workspace, cpu_pool_append, NULL},
    .store_rows = {NULL, cpu_store_rows_workspace, cpu_store_rows, NULL},
    .norm_rope_forward = {NULL, cpu_norm_rope_workspace, cpu_norm_rope, NULL},
    .norm_rope_backward = {NULL, cpu_norm_rope_workspace, cpu_norm_rope_backward, NULL},
    .indexer = {NULL, cpu_indexer_workspace, cpu_indexer, cpu_indexer_kernel},
    .copy_rows = {NULL, NULL, cpu_copy_rows, NULL},
    .cache_copy = {NULL, NULL, cpu_cache_copy, NULL},
    .cache_compress = {NULL, cpu_cache_compress_workspace, cpu_cache_compress, NULL},
    .copy_pages = {NULL, NULL, cpu_copy_pages, NULL},
    .pack_rows = {NULL, NULL, cpu_pack_rows, NULL},
    .step_tokens = {NULL, NULL, cpu_step_tokens, NULL},
    .step_places = {NULL, NULL, cpu_step_places, NULL},
    .step_check = {NULL, NULL, cpu_step_check, NULL},
    .clear_rows = {NULL, NULL, cpu_clear_rows, NULL},
    .decode = {NULL, cpu_decode_workspace, cpu_decode, NULL},
    .block_index = {NULL, cpu_block_index_workspace, cpu_block_index, cpu_block_index_kernel},
    .index_loss = {NULL, cpu_index_loss_workspace, cpu_index_loss, cpu_index_loss_kernel},
    .e4m3_gemm = {NULL, cpu_e4m3_gemm_workspace, cpu_e4m3_gemm, cpu_e4m3_gemm_kernel},
    .e4m3_round = {NULL, cpu_e4m3_round_workspace, cpu_e4m3_round, NULL},
    .e4m3_weights = {NULL, NULL, cpu_e4m3_weights, NULL},
    .indexer_loss = {NULL, cpu_indexer_loss_workspace, cpu_indexer_loss, cpu_indexer_loss_kernel},
    .hyper_forward = {NULL, cpu_hyper_workspace, cpu_hyper, cpu_hyper_kernel},
    .hyper_backward = {NULL, cpu_hyper_backward_workspace, cpu_hyper_backward, cpu_hyper_kernel},
    .nsa_decode = {NULL, cpu_nsa_decode_workspace, cpu_nsa_decode, NULL},
    .index_decode = {NULL, cpu_index_decode_workspace, cpu_index_decode, NULL},
    .attend_mqa_forward = {cpu_attend_mqa_supports, cpu_attend_mqa_workspace, cpu_attend_mqa,
                           cpu_attend_mqa_kernel},
    .attend_mqa_backward = {cpu_attend_mqa_supports, cpu_attend_mqa_backward_workspace,
                            cpu_attend_mqa_backward, cpu_attend_mqa_kernel},
};
