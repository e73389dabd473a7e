# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The transformers package's DeepSeek-V4 modules, with random small configs, against quern.dsv4 and
quern.moe."""

import pytest

torch = pytest.importorskip("torch")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from transformers import DeepseekV4Config  # noqa: E402

import quern.nn  # noqa: E402
from quern import dsv4, moe  # noqa: E402

BOUND = 5e-6  # both compute in f32
KINDS = {
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
    "swa": "sliding_attention",
}
CONFIGS = [
    {
        "heads": 4,
        "head_dim": 32,
        "q_lora": 24,
        "groups": 2,
        "o_lora": 16,
        "window": 8,
        "top_k": 4,
        "ratio": 8,
    },
    {
        "heads": 6,
        "head_dim": 64,
        "q_lora": 40,
        "groups": 3,
        "o_lora": 24,
        "window": 13,
        "top_k": 5,
        "ratio": 16,
    },
]


def config_of(kind, heads, head_dim, q_lora, groups, o_lora, window, top_k, ratio):
    return DeepseekV4Config(
        vocab_size=64,
        hidden_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        head_dim=head_dim,
        q_lora_rank=q_lora,
        num_experts_per_tok=3,
        n_routed_experts=8,
        layer_types=[KINDS[kind]],
        mlp_layer_types=["moe"],
        compress_rates={KINDS["csa"]: 4, KINDS["hca"]: ratio},
        sliding_window=window,
        o_groups=groups,
        o_lora_rank=o_lora,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=top_k,
        partial_rotary_factor=0.25,
        attn_implementation="eager",
    )


def randomize(module):
    torch.manual_seed(5)
    with torch.no_grad():
        for name, t in module.named_parameters():
            if name.endswith("norm.weight"):
                t.uniform_(0.5, 1.5)
            else:
                t.normal_(std=t.shape[-1] ** -0.5 if t.dim() > 1 else 0.5)
    return module


def layer_of(kind, settings, tokens=45):
    config = config_of(kind, **settings)
    layer = randomize(v4.DeepseekV4Attention(config, 0)).eval()
    x, positions = torch.randn(2, tokens, 48), torch.arange(tokens)[None]
    rope = v4.DeepseekV4RotaryEmbedding(config)
    tables = {name: rope(x, positions, layer_type=name) for name in ("main", "compress")}
    table = torch.cat([t[0] for t in tables["main" if kind == "swa" else "compress"]], -1)
    near = positions[0][None, :] - positions[0][:, None]
    mask = torch.zeros(tokens, tokens).masked_fill((near > 0) | (near <= -settings["window"]), -torch.inf)

    def theirs(x):
        return layer(x, tables, positions.expand(2, -1), mask.expand(2, 1, -1, -1), None)[0]

    weights = {name: t for name, t in layer.named_parameters() if "q_b_norm" not in name}
    return x, theirs, table, weights, {"kind": kind, "window": settings["window"], "top_k": settings["top_k"]}


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(close, kind, settings):
    x, theirs, table, weights, ours = layer_of(kind, settings)
    x.requires_grad_()
    want, got = theirs(x), dsv4.layer(x, table, weights, **ours)
    close(got, want, BOUND)
    trained = [x, *(t for name, t in weights.items() if "indexer" not in name)]
    d_out = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, trained, d_out), torch.autograd.grad(want, trained, d_out)):
        close(a, b, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[20, 25], [9, 1, 1, 1, 33]])
def test_attention_in_chunks(close, kind, pieces):
    x, theirs, table, weights, ours = layer_of(kind, CONFIGS[0])
    with torch.no_grad():
        cache = dsv4.Cache(**ours, sequences=2, capacity=64)
        made = [cache.append(part, table, weights) for part in x.split(pieces, 1)]
        close(torch.cat(made, 1), theirs(x), BOUND)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_modules_load_their_state(close, kind):
    settings = dict(CONFIGS[1])
    x, theirs, table, weights, ours = layer_of(kind, settings)
    window, top_k, ratio = (settings.pop(name) for name in ("window", "top_k", "ratio"))
    if kind == "csa":
        layer = quern.nn.CompressedSparseAttention(
            48, **settings, window=window, top_k=top_k, index_heads=16, index_dim=16
        )
    else:
        layer = quern.nn.HeavilyCompressedAttention(48, **settings, window=window, ratio=ratio)
    layer.load_state_dict(weights)
    close(layer(x, table), theirs(x), BOUND)


@pytest.mark.parametrize("limit", [10.0, 0.5])
@pytest.mark.parametrize("hashed", [False, True])
def test_router_and_experts(close, hashed, limit):
    config = config_of("swa", **CONFIGS[0])
    config.mlp_layer_types, config.swiglu_limit = ["hash_moe" if hashed else "moe"], limit
    block = randomize(v4.DeepseekV4SparseMoeBlock(config, 0)).eval()
    hidden, ids = torch.randn(2, 12, 48, requires_grad=True), torch.randint(64, (2, 12))
    settings = {"top_k": 3, "score": "sqrtsoftplus", "renormalize": True, "limit": limit}
    settings["route_scale"] = config.routed_scaling_factor
    given = {"gate_up": block.experts.gate_up_proj, "down": block.experts.down_proj}
    given.update(
        (f"shared_{n}", getattr(block.shared_experts, f"{n}_proj").weight) for n in ("gate", "up", "down")
    )
    given = {name: t.detach() for name, t in given.items()}
    if hashed:
        table = torch.stack([torch.randperm(8)[:3] for _ in range(64)])
        block.gate.tid2eid.copy_(table)
        given.update(input_ids=ids.int(), tid2eid=table.int())
    else:
        block.gate.e_score_correction_bias.normal_()
        given.update(bias=block.gate.e_score_correction_bias)
    want = block(hidden, ids)
    got, experts, weights = moe.layer(hidden, block.gate.weight, **given, **settings, return_routing=True)
    close(got, want, BOUND)
    _, their_weights, their_experts = block.gate(hidden, *([ids] if hashed else []))
    order = torch.arange(3).expand_as(their_experts) if hashed else their_experts.argsort(-1)
    assert torch.equal(experts, their_experts.gather(1, order).int())
    close(weights, their_weights.gather(1, order), BOUND)
    leaves, d_out = (hidden, block.gate.weight), torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, leaves, d_out), torch.autograd.grad(want, leaves, d_out)):
        close(a, b, 2e-5)
