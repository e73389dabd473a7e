# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Tiny random models of the transformers package, and what tests ask of them."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def gpt_oss():
    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = GptOssConfig(**SIZES, **EXPERTS, sliding_window=8, layer_types=kinds, rope_parameters=rope)
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def minimax():
    index = {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3}
    config = m3.MiniMaxM3VLTextConfig(
        **SIZES,
        **EXPERTS,
        **index,
        rotary_dim=16,
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention", "minimax_m3_sparse"],
    )
    return m3.MiniMaxM3VLForCausalLM(config)


def deepseek():
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    sizes = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "head_dim")}
    config = v4.DeepseekV4Config(
        **{**sizes, "num_hidden_layers": 3, "num_key_value_heads": 1},
        head_dim=32,
        moe_intermediate_size=48,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=kinds,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={kinds[1]: 4, kinds[2]: 16},
        sliding_window=8,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=6,
        partial_rotary_factor=0.25,
        hc_sinkhorn_iters=4,
        rope_parameters=rope,
    )
    model = v4.DeepseekV4ForCausalLM(config)
    with torch.no_grad():
        for name, t in model.named_parameters():
            if name.endswith(("sinks", "position_bias", "base")):
                t.normal_()
            elif "self_attn" in name and not name.endswith("norm.weight"):
                t.normal_(std=t.shape[-1] ** -0.5)
        for name, t in model.named_buffers():
            if name.endswith("tid2eid"):
                t.copy_(torch.stack([torch.randperm(4)[:2] for _ in t]))
    return model


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


MODELS = {"llama": llama, "gpt_oss": gpt_oss, "minimax_m3": minimax, "deepseek_v4": deepseek}


def tokens(batch=3, n=40):
    torch.manual_seed(5)
    return torch.randint(2, 97, (batch, n))


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def alone(model, prompt, count):
    """Greedy tokens of one prompt, and which of them are decided by more than rounding."""
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(prompt[None], max_new_tokens=count, do_sample=False, **kept)
    logits = torch.cat(made.logits)
    top = logits.topk(2).values
    sure = top[:, 0] - top[:, 1] > 1e-4 * logits.abs().amax(-1)
    return made.sequences[0, len(prompt) :].tolist(), sure.tolist()
