# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Tiny random models of the transformers package, and what tests ask of them."""

import copy

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


def minimax(index_heads=2):
    index = {"index_n_heads": index_heads, "index_head_dim": 16, "index_block_size": 8}
    config = m3.MiniMaxM3VLTextConfig(
        **SIZES,
        **EXPERTS,
        **index,
        index_topk_blocks=3,
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


def tokens(batch=3, n=40, device=None):
    torch.manual_seed(5)
    return torch.randint(2, 97, (batch, n)).to(device)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def check_bf16(kind, exact, eager, quern):
    """Rounded to bf16, logits are off by at most 1.5 times what eager ones are; of MiniMax-M3 those of so few
    tokens that every block is chosen, since rounding may choose others."""
    ids = tokens(n=24 if kind == "minimax_m3" else 40, device=exact.device)
    low, ours = eager.bfloat16(), quern.bfloat16()
    with torch.no_grad():
        want = exact(ids).logits
        assert error(ours(ids).logits, want) <= 1.5 * error(low(ids).logits, want)


def alone(model, prompt, count):
    """Greedy tokens of one prompt, and which of them are decided by more than rounding."""
    kept = {"output_logits": True, "return_dict_in_generate": True}
    made = model.generate(prompt[None], max_new_tokens=count, do_sample=False, **kept)
    logits = torch.cat(made.logits)
    top = logits.topk(2).values
    sure = top[:, 0] - top[:, 1] > 1e-4 * logits.abs().amax(-1)
    return made.sequences[0, len(prompt) :].tolist(), sure.tolist()


def check_greedy(eager, quern, lengths):
    """Greedy tokens of prompts that are padded on the left, each against its prompt alone."""
    prompts, mask = tokens(len(lengths), device=eager.device), torch.ones(len(lengths), 40, dtype=torch.long)
    mask = mask.to(eager.device)
    for row, length in enumerate(lengths):
        prompts[row, : 40 - length] = mask[row, : 40 - length] = 0
    made = quern.generate(prompts, attention_mask=mask, max_new_tokens=64, do_sample=False)[:, 40:]
    for row, length in enumerate(lengths):
        want, sure = alone(eager, prompts[row, 40 - length :], 64)
        for i in range(64):
            if not sure[i]:
                break
            assert int(made[row, i]) == want[i]
        assert i > 8


def check_packed(eager, quern):
    """Sequences in a row, told apart by positions that restart or by their offsets."""
    parts = (5, 20, 15)
    device = eager.device
    positions = torch.cat([torch.arange(n, device=device) for n in parts])[None]
    starts = torch.tensor([0, 5, 25, 40], dtype=torch.int32, device=device)
    named = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 20, "max_length_k": 20}
    row, exact = tokens(1, device=device), copy.deepcopy(eager).double()
    with torch.no_grad():
        want = torch.cat([exact(part).logits for part in row.split(parts, 1)], 1)
        assert error(quern(row, position_ids=positions, use_cache=False).logits, want) < 5e-6
        assert error(quern(row, position_ids=positions, **named).logits, want) < 5e-6


def check_fine_tuning(eager, quern):
    """Losses of 50 steps within 1%."""
    losses = []
    for model in (eager, quern):
        torch.manual_seed(1)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        found = []
        for _ in range(50):
            ids = tokens(device=model.device)
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        losses.append(found)
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert all(abs(a - b) <= 0.01 * abs(a) for a, b in zip(*losses))
