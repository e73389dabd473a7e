/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* inits.c - every _INIT macro as an initialiser, without a warning, in C11 and in C++17. */
#include <quern/attention.h>
#include <quern/cache.h>
#include <quern/checkpoint.h>
#include <quern/cuda.h>
#include <quern/dsv4.h>
#include <quern/dsv4_hyper.h>
#include <quern/dsv4_layer.h>
#include <quern/linear.h>
#include <quern/moe.h>
#include <quern/nsa.h>
#include <quern/nvfp4.h>
#include <quern/safetensors.h>

#define CHECK(type, init)                                                                                    \
    do {                                                                                                     \
        type t = init;                                                                                       \
        static const type constant = init;                                                                   \
        wrong |= t.size != sizeof(type) || constant.size != t.size;                                          \
    } while (0)

int main(void)
{
    int wrong = 0;
    CHECK(quern_attention_params, QUERN_ATTENTION_PARAMS_INIT);
    CHECK(quern_attention_tensors, QUERN_ATTENTION_TENSORS_INIT);
    CHECK(quern_cache_params, QUERN_CACHE_PARAMS_INIT);
    CHECK(quern_ledger_params, QUERN_LEDGER_PARAMS_INIT);
    CHECK(quern_step, QUERN_STEP_INIT);
    CHECK(quern_cache_step_params, QUERN_CACHE_STEP_PARAMS_INIT);
    CHECK(quern_cache_pack_params, QUERN_CACHE_PACK_PARAMS_INIT);
    CHECK(quern_cache_pack_tensors, QUERN_CACHE_PACK_TENSORS_INIT);
    CHECK(quern_cache_batch, QUERN_CACHE_BATCH_INIT);
    CHECK(quern_cache_tensors, QUERN_CACHE_TENSORS_INIT);
    CHECK(quern_decode_tensors, QUERN_DECODE_TENSORS_INIT);
    CHECK(quern_checkpoint_tensor, QUERN_CHECKPOINT_TENSOR_INIT);
    CHECK(quern_checkpoint_moe, QUERN_CHECKPOINT_MOE_INIT);
    CHECK(quern_cuda_device, QUERN_CUDA_DEVICE_INIT);
    CHECK(quern_dsv4_compress_params, QUERN_DSV4_COMPRESS_PARAMS_INIT);
    CHECK(quern_dsv4_compress_tensors, QUERN_DSV4_COMPRESS_TENSORS_INIT);
    CHECK(quern_dsv4_append_tensors, QUERN_DSV4_APPEND_TENSORS_INIT);
    CHECK(quern_dsv4_index_params, QUERN_DSV4_INDEX_PARAMS_INIT);
    CHECK(quern_dsv4_index_tensors, QUERN_DSV4_INDEX_TENSORS_INIT);
    CHECK(quern_dsv4_attention_params, QUERN_DSV4_ATTENTION_PARAMS_INIT);
    CHECK(quern_dsv4_attention_tensors, QUERN_DSV4_ATTENTION_TENSORS_INIT);
    CHECK(quern_dsv4_store_params, QUERN_DSV4_STORE_PARAMS_INIT);
    CHECK(quern_dsv4_store_tensors, QUERN_DSV4_STORE_TENSORS_INIT);
    CHECK(quern_dsv4_rope_params, QUERN_DSV4_ROPE_PARAMS_INIT);
    CHECK(quern_dsv4_layer_params, QUERN_DSV4_LAYER_PARAMS_INIT);
    CHECK(quern_dsv4_layer_tensors, QUERN_DSV4_LAYER_TENSORS_INIT);
    CHECK(quern_dsv4_layer_cache_params, QUERN_DSV4_LAYER_CACHE_PARAMS_INIT);
    CHECK(quern_dsv4_layer_step_params, QUERN_DSV4_LAYER_STEP_PARAMS_INIT);
    CHECK(quern_dsv4_layer_step_tensors, QUERN_DSV4_LAYER_STEP_TENSORS_INIT);
    CHECK(quern_dsv4_layer_pack_params, QUERN_DSV4_LAYER_PACK_PARAMS_INIT);
    CHECK(quern_dsv4_layer_pack_tensors, QUERN_DSV4_LAYER_PACK_TENSORS_INIT);
    CHECK(quern_dsv4_index_loss_params, QUERN_DSV4_INDEX_LOSS_PARAMS_INIT);
    CHECK(quern_dsv4_index_loss_tensors, QUERN_DSV4_INDEX_LOSS_TENSORS_INIT);
    CHECK(quern_dsv4_hyper_params, QUERN_DSV4_HYPER_PARAMS_INIT);
    CHECK(quern_dsv4_hyper_tensors, QUERN_DSV4_HYPER_TENSORS_INIT);
    CHECK(quern_linear_params, QUERN_LINEAR_PARAMS_INIT);
    CHECK(quern_linear_tensors, QUERN_LINEAR_TENSORS_INIT);
    CHECK(quern_rms_norm_params, QUERN_RMS_NORM_PARAMS_INIT);
    CHECK(quern_rms_norm_tensors, QUERN_RMS_NORM_TENSORS_INIT);
    CHECK(quern_rope_params, QUERN_ROPE_PARAMS_INIT);
    CHECK(quern_rope_tensors, QUERN_ROPE_TENSORS_INIT);
    CHECK(quern_moe_route_params, QUERN_MOE_ROUTE_PARAMS_INIT);
    CHECK(quern_moe_route_tensors, QUERN_MOE_ROUTE_TENSORS_INIT);
    CHECK(quern_moe_prepack_params, QUERN_MOE_PREPACK_PARAMS_INIT);
    CHECK(quern_moe_prepack_tensors, QUERN_MOE_PREPACK_TENSORS_INIT);
    CHECK(quern_moe_params, QUERN_MOE_PARAMS_INIT);
    CHECK(quern_moe_tensors, QUERN_MOE_TENSORS_INIT);
    CHECK(quern_nsa_params, QUERN_NSA_PARAMS_INIT);
    CHECK(quern_nsa_tensors, QUERN_NSA_TENSORS_INIT);
    CHECK(quern_nsa_index_params, QUERN_NSA_INDEX_PARAMS_INIT);
    CHECK(quern_nsa_index_tensors, QUERN_NSA_INDEX_TENSORS_INIT);
    CHECK(quern_nsa_index_loss_params, QUERN_NSA_INDEX_LOSS_PARAMS_INIT);
    CHECK(quern_nsa_index_loss_tensors, QUERN_NSA_INDEX_LOSS_TENSORS_INIT);
    CHECK(quern_nsa_list_params, QUERN_NSA_LIST_PARAMS_INIT);
    CHECK(quern_nsa_list_tensors, QUERN_NSA_LIST_TENSORS_INIT);
    CHECK(quern_safetensors_data, QUERN_SAFETENSORS_DATA_INIT);
    CHECK(quern_nvfp4_quantize_params, QUERN_NVFP4_QUANTIZE_PARAMS_INIT);
    CHECK(quern_nvfp4_quantize_tensors, QUERN_NVFP4_QUANTIZE_TENSORS_INIT);
    CHECK(quern_nvfp4_dequantize_params, QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT);
    CHECK(quern_nvfp4_dequantize_tensors, QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT);
    CHECK(quern_nvfp4_fused_quantize_params, QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT);
    CHECK(quern_nvfp4_fused_quantize_tensors, QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT);
    CHECK(quern_nvfp4_from_mxfp4_params, QUERN_NVFP4_FROM_MXFP4_PARAMS_INIT);
    CHECK(quern_nvfp4_from_mxfp4_tensors, QUERN_NVFP4_FROM_MXFP4_TENSORS_INIT);
    CHECK(quern_nvfp4_swizzle_params, QUERN_NVFP4_SWIZZLE_PARAMS_INIT);
    CHECK(quern_nvfp4_swizzle_tensors, QUERN_NVFP4_SWIZZLE_TENSORS_INIT);
    CHECK(quern_nvfp4_interleave_params, QUERN_NVFP4_INTERLEAVE_PARAMS_INIT);
    CHECK(quern_nvfp4_interleave_tensors, QUERN_NVFP4_INTERLEAVE_TENSORS_INIT);
    CHECK(quern_nvfp4_gemm_params, QUERN_NVFP4_GEMM_PARAMS_INIT);
    CHECK(quern_nvfp4_gemm_tensors, QUERN_NVFP4_GEMM_TENSORS_INIT);
    CHECK(quern_context_params, QUERN_CONTEXT_PARAMS_INIT);
    CHECK(quern_exec, QUERN_EXEC_INIT);
    return wrong;
}
