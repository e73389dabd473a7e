# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.compat has the names, the argument orders and the defaults of the functions that it stands for."""

import inspect

import pytest

pytest.importorskip("torch")

from quern.compat import bridge, csa, mslk  # noqa: E402

SELECT = "num_selected_blocks, compress_block_size"
SCORE = "causal=True, q_tile_size=256, softmax_scale=None"
VARLEN = "cu_seqlens=None, max_seqlen=None"
TUNING = "mma_tiler_mn=(128, 128), cluster_shape_mn=(1, 1)"
WHOLE = (
    "compress_block_size=64, num_selected_blocks=16, window_size=512, W_k_compress=None, W_v_compress=None, "
    "gate_proj_weight=None, causal=True, softmax_scale=None, q_tile_size=256"
)
GEMM = "mat_a, mat_b, scale_a, scale_b, expert_offsets, global_scale_a=None, global_scale_b=None"
NAMES = {
    mslk: {
        "compress_kv": "K, V, block_size, W_k=None, W_v=None",
        "fused_compress_kv": f"K, V, block_size, W_k=None, W_v=None, {VARLEN}",
        "fused_compress_kv_backward": "dK_cmp, dV_cmp, K, V, block_size, W_k=None, W_v=None, cu_seqlens=None",
        "score_and_select_blocks": f"Q, K_cmp, {SELECT}, {SCORE}",
        "fused_score_and_select_blocks": f"Q, K_cmp, {SELECT}, {SCORE}, {VARLEN}",
        "fused_score_and_select_all": (
            f"Q, K_cmp, {SELECT}, num_cmp_selected_blocks=None, cmp_n_block_size=128, {SCORE}, {VARLEN}"
        ),
        "compute_gates": "Q, gate_proj_weight=None, chunk_size=None",
        "gate_and_combine": "O_cmp, O_slc, O_sld, gates, chunk_size=None",
        "fused_gate_and_combine": "Q, O_cmp, O_slc, O_sld, gate_proj_weight=None",
        "fused_gating_backward": "Q, dO, O_cmp, O_slc, O_sld, gates, gate_proj_weight",
        "build_fa4_block_sparse_tensors": (
            "block_indices, compress_block_size, n_block_size=128, seqlen_k=None"
        ),
        "nsa_forward": f"Q, K, V, {WHOLE}, n_block_size=128, {VARLEN}, num_cmp_selected_blocks=None",
        "nsa": f"Q, K, V, {WHOLE}, n_block_size=128, {VARLEN}, num_cmp_selected_blocks=None",
        "nsa_forward_reference": f"Q, K, V, {WHOLE}, _block_indices=None",
        "nsa_backward_reference": f"Q, K, V, dO, {WHOLE}, _block_indices=None",
    },
    csa: {
        "launch_csa_compress_projected": (
            "proj_main, proj_indexer, prev_main_b, prev_indexer_b, B_a, B_b, B_I_a, B_I_b, cos_sin_cache, "
            "kv_out, indexer_out, n_blocks, start_token_in_proj, start_abs_pos, has_external_prev, "
            "stream=None, M=4, C=512, C_I=128, NOPE=448, ROPE=64, COLS_PER_CTA=128"
        ),
        "launch_hca_compress_projected": (
            "proj, B, cos_sin_cache, kv_out, n_blocks, start_token_in_proj, start_abs_pos, stream=None, "
            "M=128, C=512, NOPE=448, ROPE=64, COLS_PER_CTA=128"
        ),
        "pack_csa_main_weights": "W_a_KV, W_a_Z, W_b_KV, W_b_Z",
        "pack_csa_indexer_weights": "W_I_a_KV, W_I_a_Z, W_I_b_KV, W_I_b_Z",
        "pack_hca_weights": "W_KV, W_Z",
        "make_dummy_prev_b": "M, OUT, *, device, dtype",
    },
    bridge: {
        "ceil_div": "a, b",
        "round_up": "a, b",
        "quantize_to_nvfp4": "x_bf16, block_size=16",
        "quantize_activation_nvfp4": "x_bf16, global_scale, block_size=16",
        "quantize_weight_to_nvfp4": "w_bf16, block_size=16",
        "interleave_l1_weights": "w_ekn, granularity_bf16=8",
        "deinterleave_l1_weights": "w_ekn, granularity_bf16=8",
        "assemble_scales_2d_side": "scales",
        "assemble_scales_3d_side": "scales",
        "make_b_k_major": "b_tensor",
        "compute_expert_offsets": "tokens_per_expert, num_experts, device='cuda'",
        "warmup_compilation": f"num_experts, K_packed, N_packed, device, {TUNING}",
        "warmup_fused_swiglu_compilation": (
            f"num_experts, K_packed, N_packed, device, swiglu_limit=0.0, {TUNING}"
        ),
        "run_nvfp4_grouped_gemm": f"{GEMM}, {TUNING}",
        "run_fused_swiglu_grouped_gemm": f"{GEMM}, swiglu_limit=0.0, {TUNING}, *, paired=True",
        "deinterleave_quantize_nvfp4_cuda": "fused_bf16, intermediate, global_scale, granularity=8",
    },
}


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_signatures(module):
    for name, arguments in NAMES[module].items():
        found = inspect.signature(getattr(module, name))
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
        assert str(inspect.Signature(plain)) == f"({arguments})", name
