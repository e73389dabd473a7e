# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Small made checkpoints, the command that converts them, and NVFP4 and MXFP4 in a few lines of torch."""

import json
import os
import pathlib
import shutil
import subprocess

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = os.environ.get("QUERN_COMMAND", str(ROOT / "build" / "release" / "quern"))
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def have_command():
    return shutil.which(COMMAND) is not None


def quantize(*arguments, code=0):
    """Runs `quern quantize`; what it printed."""
    done = subprocess.run(
        [COMMAND, "quantize", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def save_model(folder, shards, config):
    """A folder with its shards, an index where there are several, and config.json."""
    folder.mkdir()
    places = {}
    for i, tensors in enumerate(shards):
        name = (
            f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return {name: tensor for tensors in shards for name, tensor in tensors.items()}


def load_model(folder):
    """Every tensor of a folder, as the package safetensors reads it."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})
    return found


def same_bytes(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def nibbles(packed):
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def values_of_codes(packed):
    return E2M1[nibbles(packed).long()]


def by_blocks(scales, size):
    return scales.repeat_interleave(size, -1)


def nearest_codes(y):
    """E2M1, ties to even."""
    borders = [
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5, False),
    ]
    code = torch.zeros(y.shape, dtype=torch.uint8)
    for border, included in borders:
        code += ((y.abs() >= border) if included else (y.abs() > border)).to(torch.uint8)
    return code + 8 * (y < 0).to(torch.uint8)


def modelopt(weight, largest):
    """Codes, scales and G of ModelOpt's rule."""
    blocks = weight.float().view(weight.shape[0], -1, 16)
    g = torch.clamp(largest.float() / 2688, min=2.0**-149)
    p = blocks.abs().amax(-1) / (6 * g)
    p = torch.where(p == 0, torch.ones_like(p), p).clamp(2**-9, 448)
    scales = p.to(torch.float8_e4m3fn)
    return nearest_codes(blocks / (scales.float() * g)[..., None]).flatten(1), scales, g


def compressed_tensors(weight, largest):
    """Codes, scales and R of compressed-tensors' rule."""
    blocks = weight.float().view(weight.shape[0], -1, 16)
    r = (1 / largest.float()) * 2688
    scales = (r * (blocks.abs().amax(-1) / 6)).clamp(max=448).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, torch.tensor(0.125), scales.float()).to(
        torch.float8_e4m3fn
    )
    y = blocks / (scales.float() / r)[..., None]
    return nearest_codes(y.clamp(-6, 6)).flatten(1), scales, r


def modelopt_values(model, module, dtype=torch.float64):
    """Values of an NVFP4 module; in f32 each product is rounded as everywhere."""
    scales = by_blocks(model[f"{module}.weight_scale"].to(dtype), 16)
    return (
        values_of_codes(model[f"{module}.weight"]).to(dtype)
        * scales
        * model[f"{module}.weight_scale_2"].to(dtype)
    )


def compressed_values(model, module):
    step = model[f"{module}.weight_scale"].float() / model[f"{module}.weight_global_scale"]
    return values_of_codes(model[f"{module}.weight_packed"]) * by_blocks(step, 16)


def random_mxfp4(rows, columns, low=108, high=126):
    codes = torch.randint(0, 256, (*rows, columns // 2), dtype=torch.uint8)
    return codes, torch.randint(low, high, (*rows, columns // 32), dtype=torch.uint8)


def mxfp4_values(codes, exponents):
    exponents = exponents.view(torch.uint8).double()
    return values_of_codes(codes).double() * by_blocks(torch.exp2(exponents - 127), 32)


DENSE_GROUPS = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]


def make_dense(folder, dtype=torch.bfloat16, hidden=128, inner=192, layers=2):
    shapes = {
        "q_proj": (hidden, hidden),
        "k_proj": (64, hidden),
        "v_proj": (64, hidden),
        "o_proj": (hidden, hidden),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shards = []
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {
            f"{prefix}self_attn.{n}.weight": torch.randn(s) * 0.05 for n, s in shapes.items()
        }
        tensors.update({f"{prefix}mlp.{n}.weight": torch.randn(s) * 0.05 for n, s in mlp.items()})
        tensors[f"{prefix}input_layernorm.weight"] = torch.rand(hidden)
        shards.append({name: tensor.to(dtype) for name, tensor in tensors.items()})
    shards[0]["model.embed_tokens.weight"] = torch.randn(80, hidden).to(dtype)
    shards[-1]["lm_head.weight"] = torch.randn(80, hidden).to(dtype)
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
    }
    return save_model(folder, shards, config)


def make_gpt_oss(folder, experts=3, inner=96, hidden=128):
    tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp."
        for name, rows, columns in (
            ("gate_up_proj", 2 * inner, hidden),
            ("down_proj", hidden, inner),
        ):
            codes, exponents = random_mxfp4((experts, rows), columns)
            tensors[f"{prefix}experts.{name}_blocks"] = codes.view(
                experts, rows, columns // 32, 16
            ).contiguous()
            tensors[f"{prefix}experts.{name}_scales"] = exponents
            tensors[f"{prefix}experts.{name}_bias"] = torch.randn(experts, rows).bfloat16()
        tensors[f"{prefix}router.weight"] = torch.randn(experts, hidden).bfloat16()
    config = {
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_local_experts": experts,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    return save_model(folder, [tensors], config)


def make_deepseek_v4(folder, hidden=256, inner=128, experts=4, layers=2):
    tensors = {}

    def fp8(name, rows, columns):
        tensors[f"{name}.weight"] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        scales = torch.randint(118, 126, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
        tensors[f"{name}.scale"] = scales.view(torch.float8_e8m0fnu)

    def layer(prefix, hashed):
        fp8(f"{prefix}attn.wq_a", 96, hidden)
        fp8(f"{prefix}attn.wkv", 64, hidden)
        tensors[f"{prefix}attn.attn_sink"] = torch.randn(4)
        tensors[f"{prefix}ffn.gate.weight"] = torch.randn(experts, hidden).bfloat16()
        if hashed:
            tensors[f"{prefix}ffn.gate.tid2eid"] = torch.randint(0, experts, (16, 2))
        for name, rows, columns in (
            ("w1", inner, hidden),
            ("w2", hidden, inner),
            ("w3", inner, hidden),
        ):
            fp8(f"{prefix}ffn.shared_experts.{name}", rows, columns)
            for e in range(experts):  # of expert 2 some blocks lie below the range of the scales
                codes, exponents = random_mxfp4((rows,), columns, 98 if e == 2 else 110)
                tensors[f"{prefix}ffn.experts.{e}.{name}.weight"] = codes.view(torch.int8)
                tensors[f"{prefix}ffn.experts.{e}.{name}.scale"] = exponents.view(
                    torch.float8_e8m0fnu
                )

    for i in range(layers):
        layer(f"layers.{i}.", i == 0)
    layer("mtp.0.", False)
    tensors["embed.weight"] = torch.randn(16, hidden).bfloat16()
    tensors["head.weight"] = torch.randn(16, hidden).bfloat16()
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    config = {
        "model_type": "deepseek_v4",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "n_routed_experts": experts,
        "moe_intermediate_size": inner,
        "num_nextn_predict_layers": 1,
        "vocab_size": 16,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    return save_model(folder, [{name: tensors[name] for name in half} for half in halves], config)
