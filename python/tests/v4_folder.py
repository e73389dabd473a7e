# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A small random model in DeepSeek-V4's released layout, and the same with its weights in floats, as the
transformers package loads it."""

import json

import torch
from safetensors.torch import save_file

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
VOCABULARY, WIDTH, HEADS, DIM, Q_LORA, GROUPS, O_LORA = 160, 128, 4, 64, 64, 2, 32
INDEX_HEADS, INDEX_DIM, EXPERTS, TOP, INNER, HASH_LAYERS = 16, 32, 8, 3, 64, 1
RATIOS = (0, 4, 8, 4, 0)
CONFIG = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": HEADS,
    "head_dim": DIM,
    "qk_rope_head_dim": 16,
    "q_lora_rank": Q_LORA,
    "o_groups": GROUPS,
    "o_lora_rank": O_LORA,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": TOP,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": HASH_LAYERS,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_DIM,
    "index_topk": 8,
    "sliding_window": 16,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "num_nextn_predict_layers": 1,
}
YARN = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}


class Folder:
    """`files` holds the tensors as they are released, `values` what they mean, in f32."""

    def __init__(self, seed=0, fp8_experts=False):
        self.random = torch.Generator().manual_seed(seed)
        self.files, self.values = {}, {}
        self.floats("embed.weight", (VOCABULARY, WIDTH), 1.0)
        self.floats("head.weight", (VOCABULARY, WIDTH))
        self.floats("norm.weight", (WIDTH,), 0.2, 1.0)
        self.hyper("hc_head", 4, 1)
        for i, ratio in enumerate(RATIOS):
            self.attention(f"layers.{i}.", ratio)
            self.experts(f"layers.{i}.ffn.", i < HASH_LAYERS, fp8_experts)
        self.files["mtp.0.e_proj.weight"] = torch.zeros(4, 4)

    def normal(self, shape):
        return torch.randn(shape, generator=self.random)

    def floats(self, name, shape, scale=None, mean=0.0, dtype=torch.bfloat16):
        scale = shape[-1] ** -0.5 if scale is None else scale
        self.files[name] = (mean + scale * self.normal(shape)).to(dtype)
        self.values[name] = self.files[name].float()

    def exponents(self, shape, middle):
        return torch.randint(middle - 1, middle + 2, shape, generator=self.random)

    def fp8(self, module, n, k):
        weight = (64 * self.normal((n, k))).to(torch.float8_e4m3fn)
        bytes = self.exponents((-(-n // 128), -(-k // 128)), 121 - round(k.bit_length() / 2))
        scale = torch.exp2(bytes.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
        self.put(module, weight, bytes, weight.float() * scale[:n, :k])

    def fp4(self, module, n, k):
        codes = torch.randint(16, (n, k), generator=self.random)
        bytes = self.exponents((n, k // 32), 126 - round(k.bit_length() / 2))
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
        self.put(
            module, packed, bytes, E2M1[codes] * torch.exp2(bytes.float() - 127).repeat_interleave(32, 1)
        )

    def put(self, module, weight, bytes, values):
        self.files[module + ".weight"], self.values[module + ".weight"] = weight, values.contiguous()
        self.files[module + ".scale"] = bytes.to(torch.uint8).view(torch.float8_e8m0fnu)

    def hyper(self, prefix, rows, scales):
        self.floats(prefix + "_fn", (rows, 4 * WIDTH), 0.5 * WIDTH**-0.5, dtype=torch.float32)
        self.floats(prefix + "_base", (rows,), 0.5, dtype=torch.float32)
        self.floats(prefix + "_scale", (scales,), 0.3, 1.0, dtype=torch.float32)

    def compressor(self, prefix, ratio, width):
        columns = width * (2 if ratio == 4 else 1)
        self.floats(prefix + "wkv.weight", (columns, WIDTH))
        self.floats(prefix + "wgate.weight", (columns, WIDTH))
        self.floats(prefix + "ape", (ratio, columns), 1.0, dtype=torch.float32)
        self.floats(prefix + "norm.weight", (width,), 0.2, 1.0)

    def attention(self, layer, ratio):
        for name in ("attn", "ffn"):
            self.floats(f"{layer}{name}_norm.weight", (WIDTH,), 0.2, 1.0)
            self.hyper(f"{layer}hc_{name}", 24, 3)
        a = layer + "attn."
        self.fp8(a + "wq_a", Q_LORA, WIDTH)
        self.fp8(a + "wq_b", HEADS * DIM, Q_LORA)
        self.fp8(a + "wkv", DIM, WIDTH)
        self.fp8(a + "wo_a", GROUPS * O_LORA, HEADS * DIM // GROUPS)
        self.fp8(a + "wo_b", WIDTH, GROUPS * O_LORA)
        self.floats(a + "q_norm.weight", (Q_LORA,), 0.2, 1.0)
        self.floats(a + "kv_norm.weight", (DIM,), 0.2, 1.0)
        self.floats(a + "attn_sink", (HEADS,), 1.0, dtype=torch.float32)
        if ratio:
            self.compressor(a + "compressor.", ratio, DIM)
        if ratio == 4:
            self.fp8(a + "indexer.wq_b", INDEX_HEADS * INDEX_DIM, Q_LORA)
            self.floats(a + "indexer.weights_proj.weight", (INDEX_HEADS, WIDTH))
            self.compressor(a + "indexer.compressor.", ratio, INDEX_DIM)

    def experts(self, prefix, hashed, fp8_experts):
        self.floats(prefix + "gate.weight", (EXPERTS, WIDTH))
        if hashed:
            rows = [torch.randperm(EXPERTS, generator=self.random)[:TOP] for _ in range(VOCABULARY)]
            self.files[prefix + "gate.tid2eid"] = self.values[prefix + "gate.tid2eid"] = torch.stack(rows)
        else:
            self.floats(prefix + "gate.bias", (EXPERTS,), 0.1, dtype=torch.float32)
        for part, (n, k) in {"w1": (INNER, WIDTH), "w2": (WIDTH, INNER), "w3": (INNER, WIDTH)}.items():
            for e in range(EXPERTS):
                (self.fp8 if fp8_experts else self.fp4)(f"{prefix}experts.{e}.{part}", n, k)
            self.fp8(f"{prefix}shared_experts.{part}", n, k)

    def write(self, folder, shards=3):
        """As it is released."""
        config = CONFIG | {"compress_ratios": [*RATIOS, 0], "rope_scaling": {"type": "yarn"} | YARN}
        names, places = sorted(self.files), {}
        folder.mkdir()
        for s in range(shards):
            file = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
            save_file({name: self.files[name].contiguous() for name in names[s::shards]}, folder / file)
            places.update(dict.fromkeys(names[s::shards], file))
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(config))

    def write_values(self, folder):
        """As transformers reads it."""
        kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 8: "heavily_compressed_attention"}
        rates = {kinds[4]: 4, kinds[8]: 8}
        config = CONFIG | {"layer_types": [kinds[r] for r in RATIOS], "compress_rates": rates}
        folder.mkdir()
        (folder / "config.json").write_text(
            json.dumps(config | {"rope_parameters": {"rope_type": "yarn"} | YARN})
        )
        save_file(self.values, folder / "model.safetensors", metadata={"format": "pt"})
