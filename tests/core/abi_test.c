/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* abi_test.c - values that callers were compiled against. */
#include "cmocka_c11.h"

#include <quern/attention.h>
#include <quern/cache.h>
#include <quern/cuda.h>
#include <quern/dsv4_hyper.h>
#include <quern/dsv4_layer.h>
#include <quern/nsa.h>
#include <quern/linear.h>
#include <quern/moe.h>
#include <quern/nvfp4.h>
#include <quern/plan.h>
#include <quern/safetensors.h>

#include <string.h>

static void steps_of_layers_are_pinned(void **state)
{
    (void)state;
    assert_int_equal(QUERN_OP_DSV4_APPEND_STEP, 56);
    assert_int_equal(QUERN_OP_DSV4_LAYER_STEP, 57);
    assert_int_equal(QUERN_OP_DSV4_LAYER_PACK, 58);
    assert_int_equal(QUERN_OP_DSV4_LAYER_UNPACK, 59);
    assert_int_equal(QUERN_DSV4_RAW, 0);
    assert_int_equal(QUERN_DSV4_ENTRIES, 1);
}

static void enum_values_are_pinned(void **unused)
{
    (void)unused;
    assert_int_equal(QUERN_OK, 0);
    assert_int_equal(QUERN_ERR_INVALID_ARGUMENT, 1);
    assert_int_equal(QUERN_ERR_UNSUPPORTED, 2);
    assert_int_equal(QUERN_ERR_WORKSPACE, 3);
    assert_int_equal(QUERN_ERR_OUT_OF_MEMORY, 4);
    assert_int_equal(QUERN_ERR_IO, 5);
    assert_int_equal(QUERN_ERR_FORMAT, 6);
    assert_int_equal(QUERN_ERR_DEVICE, 7);
    assert_int_equal(QUERN_ERR_INTERNAL, 8);
    assert_int_equal(QUERN_F32, 0);
    assert_int_equal(QUERN_F16, 1);
    assert_int_equal(QUERN_BF16, 2);
    assert_int_equal(QUERN_I32, 3);
    assert_int_equal(QUERN_U8, 4);
    assert_int_equal(QUERN_I64, 5);
    assert_int_equal(QUERN_F64, 6);
    assert_int_equal(QUERN_E4M3, 7);
    assert_int_equal(QUERN_E5M2, 8);
    assert_int_equal(QUERN_E8M0, 9);
    assert_int_equal(QUERN_E2M1X2, 10);
    assert_int_equal(QUERN_I8, 11);
    assert_int_equal(QUERN_I16, 12);
    assert_int_equal(QUERN_U16, 13);
    assert_int_equal(QUERN_U32, 14);
    assert_int_equal(QUERN_U64, 15);
    assert_int_equal(QUERN_BOOL, 16);
    assert_int_equal(QUERN_C64, 17);
    assert_int_equal(QUERN_E4M3FNUZ, 18);
    assert_int_equal(QUERN_E5M2FNUZ, 19);
    assert_int_equal(QUERN_CPU, 0);
    assert_int_equal(QUERN_CUDA, 1);
    assert_int_equal(QUERN_CPU_LEVEL_AVX512BF16, 4);
    assert_int_equal(QUERN_CPU_LEVEL_AMX, 5);
    assert_int_equal(QUERN_NSA_COMPRESS_GIVEN, 2);
    assert_int_equal(QUERN_NSA_SCOPE_HEAD, 1);
    assert_int_equal(QUERN_NSA_METRIC_MEAN_LOGIT, 1);
    assert_int_equal(QUERN_NSA_VISIBLE_STARTED, 1);
    assert_int_equal(QUERN_NSA_GATE_GIVEN, 2);
    assert_int_equal(QUERN_NSA_LIST_GIVEN, 1);
    assert_int_equal(QUERN_NSA_LIST_INDEXED, 2);
    assert_int_equal(QUERN_NSA_BRANCH_ALL, 7);
    assert_int_equal(QUERN_DSV4_HCA, 1);
    assert_int_equal(QUERN_DSV4_ROW584, 4);
    assert_int_equal(QUERN_DSV4_LAYER_SWA, 2);
    assert_int_equal(QUERN_OP_DSV4_LAYER, 54);
    assert_int_equal(QUERN_OP_DSV4_LAYER_BACKWARD, 55);
    assert_int_equal(QUERN_OP_DSV4_HYPER, 60);
    assert_int_equal(QUERN_OP_DSV4_HYPER_BACKWARD, 61);
    assert_int_equal(QUERN_OP_DSV4_INDEX_LOSS, 62);
    assert_int_equal(QUERN_NVFP4_PROFILE_RNE, 0);
    assert_int_equal(QUERN_NVFP4_PROFILE_HALFSTEP, 1);
    assert_int_equal(QUERN_NVFP4_PROFILE_MODELOPT, 2);
    assert_int_equal(QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS, 3);
    assert_int_equal(QUERN_NVFP4_SCALES_SEARCH, 2);
    assert_int_equal(QUERN_NVFP4_GLOBAL_ROW, 2);
    assert_int_equal(QUERN_NVFP4_CODES_K_MAJOR, 1);
    assert_int_equal(QUERN_NVFP4_LAYOUT_SWIZZLED, 2);
    assert_int_equal(QUERN_NVFP4_ACTIVATION_SWIGLU, 1);
    assert_int_equal(QUERN_MOE_PREPACK_VERSION, 3);
    assert_int_equal(QUERN_MOE_SCORE_SIGMOID, 2);
    assert_int_equal(QUERN_OP_ATTENTION_FORWARD, 1);
    assert_int_equal(QUERN_OP_ATTENTION_BACKWARD, 2);
    assert_int_equal(QUERN_OP_NSA_FORWARD, 16);
    assert_int_equal(QUERN_OP_NSA_BACKWARD, 17);
    assert_int_equal(QUERN_OP_NSA_COMPRESS, 18);
    assert_int_equal(QUERN_OP_NSA_COMPRESS_BACKWARD, 19);
    assert_int_equal(QUERN_OP_NSA_SELECT, 20);
    assert_int_equal(QUERN_OP_NSA_ATTEND, 21);
    assert_int_equal(QUERN_OP_NSA_ATTEND_BACKWARD, 22);
    assert_int_equal(QUERN_OP_NSA_GATES, 23);
    assert_int_equal(QUERN_OP_NSA_COMBINE, 24);
    assert_int_equal(QUERN_OP_NSA_GATE, 25);
    assert_int_equal(QUERN_OP_NSA_GATE_BACKWARD, 26);
    assert_int_equal(QUERN_OP_NSA_LIST_CONVERT, 32);
    assert_int_equal(QUERN_OP_NSA_INDEX, 33);
    assert_int_equal(QUERN_OP_NSA_INDEX_LOSS, 34);
    assert_int_equal(QUERN_OP_NVFP4_QUANTIZE, 64);
    assert_int_equal(QUERN_OP_NVFP4_DEQUANTIZE, 65);
    assert_int_equal(QUERN_OP_NVFP4_FROM_MXFP4, 66);
    assert_int_equal(QUERN_OP_NVFP4_FUSED_QUANTIZE, 67);
    assert_int_equal(QUERN_OP_NVFP4_SWIZZLE, 68);
    assert_int_equal(QUERN_OP_NVFP4_INTERLEAVE, 69);
    assert_int_equal(QUERN_OP_NVFP4_GEMM, 72);
    assert_int_equal(QUERN_OP_NVFP4_GEMM_BACKWARD, 73);
    assert_int_equal(QUERN_OP_MOE_FORWARD, 96);
    assert_int_equal(QUERN_OP_MOE_BACKWARD, 97);
    assert_int_equal(QUERN_OP_MOE_ROUTE, 98);
    assert_int_equal(QUERN_OP_MOE_ROUTE_BACKWARD, 99);
    assert_int_equal(QUERN_OP_MOE_PREPACK, 100);
    assert_int_equal(QUERN_OP_LINEAR_FORWARD, 112);
    assert_int_equal(QUERN_OP_LINEAR_BACKWARD, 113);
    assert_int_equal(QUERN_OP_RMS_NORM_FORWARD, 114);
    assert_int_equal(QUERN_OP_RMS_NORM_BACKWARD, 115);
    assert_int_equal(QUERN_OP_ROPE_FORWARD, 116);
    assert_int_equal(QUERN_OP_ROPE_BACKWARD, 117);
}

static void faults_are_pinned_and_have_names(void **unused)
{
    (void)unused;
    assert_int_equal(QUERN_STATUS_BAD_INDEX, 1);
    assert_int_equal(QUERN_STATUS_BAD_GROUP, 2);
    assert_int_equal(QUERN_STATUS_BAD_OFFSETS, 4);
    assert_int_equal(QUERN_STATUS_BAD_POSITION, 8);
    assert_int_equal(QUERN_STATUS_BAD_PAGE, 16);
    assert_int_equal(QUERN_STATUS_BAD_ID, 32);
    assert_int_equal(QUERN_STATUS_BAD_SCALE, 64);
    assert_int_equal(QUERN_STATUS_BAD_GLOBAL, 128);
    assert_int_equal(QUERN_STATUS_NOT_FINITE, 256);
    assert_string_equal(quern_cuda_fault_name(0), "");
    assert_string_equal(quern_cuda_fault_name(512), "?");
    assert_non_null(strstr(quern_cuda_fault_name(QUERN_STATUS_BAD_PAGE), "page"));
    assert_non_null(strstr(quern_cuda_fault_name(QUERN_STATUS_BAD_SCALE | 512), "scale"));
    assert_non_null(strstr(quern_cuda_fault_name(QUERN_STATUS_BAD_GLOBAL), "global"));
    assert_non_null(strstr(quern_cuda_fault_name(QUERN_STATUS_NOT_FINITE), "finite"));
}

/* On 64-bit machines, which are the only ones so far. */
static void structs_keep_their_layout(void **unused)
{
    (void)unused;
    assert_int_equal(sizeof(quern_tensor), 120);
    assert_int_equal(sizeof(quern_context_params), 32);
    assert_int_equal(sizeof(quern_exec), 24);
    assert_int_equal(offsetof(quern_exec, status), 16);
    assert_int_equal(sizeof(quern_attention_params), 40);
    assert_int_equal(sizeof(quern_attention_tensors), 128);
    assert_int_equal(sizeof(quern_nsa_params), 128);
    assert_int_equal(sizeof(quern_dsv4_compress_params), 72);
    assert_int_equal(offsetof(quern_dsv4_compress_params, rope_last), 48);
    assert_int_equal(sizeof(quern_dsv4_compress_tensors), 400);
    assert_int_equal(offsetof(quern_dsv4_compress_tensors, d_out), 136);
    assert_int_equal(sizeof(quern_dsv4_append_tensors), 304);
    assert_int_equal(sizeof(quern_dsv4_rope_params), 32);
    assert_int_equal(sizeof(quern_dsv4_index_params), 56);
    assert_int_equal(offsetof(quern_dsv4_index_params, key_format), 32);
    assert_int_equal(sizeof(quern_dsv4_index_tensors), 72);
    assert_int_equal(sizeof(quern_cache_params), 128);
    assert_int_equal(offsetof(quern_cache_params, separate_slc), 92);
    assert_int_equal(sizeof(quern_ledger_params), 208);
    assert_int_equal(sizeof(quern_cache_batch), 32);
    assert_int_equal(sizeof(quern_cache_tensors), 192);
    assert_int_equal(sizeof(quern_cache_step_params), 32);
    assert_int_equal(sizeof(quern_cache_pack_params), 40);
    assert_int_equal(sizeof(quern_cache_pack_tensors), 80);
    assert_int_equal(sizeof(quern_decode_tensors), 168);
    assert_int_equal(sizeof(quern_dsv4_attention_params), 48);
    assert_int_equal(offsetof(quern_dsv4_attention_params, start_abs_pos), 24);
    assert_int_equal(sizeof(quern_dsv4_attention_tensors), 160);
    assert_int_equal(offsetof(quern_dsv4_attention_tensors, d_o), 96);
    assert_int_equal(sizeof(quern_dsv4_store_params), 24);
    assert_int_equal(sizeof(quern_dsv4_store_tensors), 32);
    assert_int_equal(sizeof(quern_dsv4_layer_params), 40);
    assert_int_equal(sizeof(quern_dsv4_layer_tensors), 456);
    assert_int_equal(offsetof(quern_dsv4_layer_tensors, out), 168);
    assert_int_equal(offsetof(quern_dsv4_layer_tensors, d_out), 264);
    assert_int_equal(offsetof(quern_dsv4_layer_tensors, compressor_fp8), 376);
    assert_int_equal(sizeof(quern_dsv4_layer_cache_params), 96);
    assert_int_equal(sizeof(quern_dsv4_layer_step_params), 48);
    assert_int_equal(sizeof(quern_dsv4_layer_step_tensors), 456);
    assert_int_equal(sizeof(quern_dsv4_layer_pack_params), 32);
    assert_int_equal(sizeof(quern_dsv4_layer_pack_tensors), 96);
    const quern_dsv4_attention_params core = QUERN_DSV4_ATTENTION_PARAMS_INIT;
    assert_int_equal(core.size, sizeof core);
    assert_int_equal(core.start_abs_pos, -1);
    assert_int_equal(offsetof(quern_nsa_params, compress), 56);
    assert_int_equal(offsetof(quern_nsa_params, branches), 104);
    assert_int_equal(sizeof(quern_nsa_tensors), 392);
    assert_int_equal(sizeof(quern_nsa_list_params), 32);
    assert_int_equal(sizeof(quern_nsa_list_tensors), 32);
    assert_int_equal(sizeof(quern_nsa_index_params), 48);
    assert_int_equal(sizeof(quern_nsa_index_tensors), 64);
    assert_int_equal(sizeof(quern_nsa_index_loss_params), 40);
    assert_int_equal(sizeof(quern_nsa_index_loss_tensors), 104);
    assert_int_equal(offsetof(quern_nsa_tensors, d_o), 224);
    assert_int_equal(sizeof(quern_cuda_device), 312);
    assert_int_equal(sizeof(quern_safetensors_item), 16);
    assert_int_equal(sizeof(quern_safetensors_pair), 16);
    assert_int_equal(sizeof(quern_nvfp4_quantize_params), 24);
    assert_int_equal(sizeof(quern_nvfp4_quantize_tensors), 56);
    assert_int_equal(sizeof(quern_nvfp4_dequantize_params), 24);
    assert_int_equal(sizeof(quern_nvfp4_dequantize_tensors), 48);
    assert_int_equal(sizeof(quern_nvfp4_fused_quantize_params), 40);
    assert_int_equal(sizeof(quern_nvfp4_fused_quantize_tensors), 64);
    assert_int_equal(sizeof(quern_nvfp4_from_mxfp4_params), 8);
    assert_int_equal(sizeof(quern_nvfp4_from_mxfp4_tensors), 56);
    assert_int_equal(sizeof(quern_nvfp4_swizzle_params), 16);
    assert_int_equal(offsetof(quern_nvfp4_swizzle_params, experts), 10);
    assert_int_equal(sizeof(quern_nvfp4_swizzle_tensors), 40);
    assert_int_equal(sizeof(quern_nvfp4_interleave_params), 24);
    assert_int_equal(sizeof(quern_nvfp4_interleave_tensors), 72);
    assert_int_equal(sizeof(quern_nvfp4_gemm_params), 80);
    assert_int_equal(sizeof(quern_nvfp4_gemm_tensors), 152);
    assert_int_equal(sizeof(quern_moe_params), 80);
    assert_int_equal(sizeof(quern_moe_tensors), 368);
    assert_int_equal(sizeof(quern_moe_prepack_params), 24);
    assert_int_equal(sizeof(quern_moe_prepack_tensors), 32);
    assert_int_equal(sizeof(quern_moe_route_params), 32);
    assert_int_equal(sizeof(quern_moe_route_tensors), 120);
    assert_int_equal(sizeof(quern_dsv4_index_loss_params), 32);
    assert_int_equal(sizeof(quern_dsv4_index_loss_tensors), 112);
    assert_int_equal(sizeof(quern_dsv4_hyper_params), 32);
    assert_int_equal(sizeof(quern_dsv4_hyper_tensors), 200);
    assert_int_equal(sizeof(quern_linear_params), 32);
    assert_int_equal(sizeof(quern_linear_tensors), 104);
    assert_int_equal(sizeof(quern_rms_norm_params), 16);
    assert_int_equal(sizeof(quern_rms_norm_tensors), 56);
    assert_int_equal(sizeof(quern_rope_params), 24);
    assert_int_equal(sizeof(quern_rope_tensors), 56);
}

#define ENDS(type, last) assert_int_equal(offsetof(type, last) + sizeof((type){0}.last), sizeof(type))

/* Nothing clears bytes between the last field and the end of a struct. A later field in them would read
 * what an older caller's stack held; an older library would find them set in a newer caller's struct. (The
 * structs of tensors hold pointers alone.) */
static void the_last_field_ends_a_struct(void **unused)
{
    (void)unused;
    ENDS(quern_context_params, parallel_for_arg);
    ENDS(quern_exec, status);
    ENDS(quern_attention_params, query_offset);
    ENDS(quern_nsa_params, reserved);
    ENDS(quern_nsa_list_params, n);
    ENDS(quern_nsa_index_params, query_offset);
    ENDS(quern_nsa_index_loss_params, reserved);
    ENDS(quern_cache_params, index_dim);
    ENDS(quern_ledger_params, pools);
    ENDS(quern_step, copies);
    ENDS(quern_cache_step_params, reserved);
    ENDS(quern_cache_pack_params, stride);
    ENDS(quern_cache_batch, counts);
    ENDS(quern_dsv4_compress_params, reserved);
    ENDS(quern_dsv4_index_params, reserved);
    ENDS(quern_dsv4_attention_params, page);
    ENDS(quern_dsv4_store_params, page);
    ENDS(quern_dsv4_rope_params, reserved);
    ENDS(quern_dsv4_layer_params, reserved);
    ENDS(quern_dsv4_index_loss_params, reserved);
    ENDS(quern_dsv4_hyper_params, reserved);
    ENDS(quern_dsv4_layer_cache_params, pages);
    ENDS(quern_dsv4_layer_step_params, reserved);
    ENDS(quern_dsv4_layer_pack_params, key_format);
    ENDS(quern_nvfp4_quantize_params, reserved);
    ENDS(quern_nvfp4_dequantize_params, reserved);
    ENDS(quern_nvfp4_fused_quantize_params, granularity);
    ENDS(quern_nvfp4_from_mxfp4_params, size);
    ENDS(quern_nvfp4_swizzle_params, reserved);
    ENDS(quern_nvfp4_interleave_params, granularity);
    ENDS(quern_nvfp4_gemm_params, reserved);
    ENDS(quern_moe_route_params, route_scale);
    ENDS(quern_linear_params, reserved);
    ENDS(quern_rms_norm_params, reserved);
    ENDS(quern_rope_params, reserved);
    ENDS(quern_moe_prepack_params, reserved);
    ENDS(quern_moe_params, shared_intermediate);
}

static void initialisers_set_size_and_nothing_to_read(void **unused)
{
    (void)unused;
    const quern_context_params context = QUERN_CONTEXT_PARAMS_INIT;
    const quern_attention_params attention = QUERN_ATTENTION_PARAMS_INIT;
    const quern_nsa_params nsa = QUERN_NSA_PARAMS_INIT;
    const quern_nsa_tensors tensors = QUERN_NSA_TENSORS_INIT;
    const quern_exec exec = QUERN_EXEC_INIT;
    const quern_nsa_list_params list = QUERN_NSA_LIST_PARAMS_INIT;
    assert_int_equal(context.size, sizeof context);
    assert_int_equal(attention.size, sizeof attention);
    assert_int_equal(nsa.size, sizeof nsa);
    assert_int_equal(tensors.size, sizeof tensors);
    assert_null(tensors.q);
    assert_null(tensors.d_gates);
    assert_int_equal(exec.size, sizeof exec);
    assert_null(exec.stream);
    assert_null(exec.status);
    assert_int_equal(list.size, sizeof list);
    assert_null(context.parallel_for);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(enum_values_are_pinned),
        cmocka_unit_test(steps_of_layers_are_pinned),
        cmocka_unit_test(faults_are_pinned_and_have_names),
        cmocka_unit_test(structs_keep_their_layout),
        cmocka_unit_test(the_last_field_ends_a_struct),
        cmocka_unit_test(initialisers_set_size_and_nothing_to_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
