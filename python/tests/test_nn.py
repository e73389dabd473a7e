# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.nn: layers, their state_dict, caches, checkpointing, compilation, and a small decoder that learns."""

import pathlib

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import quern.nn  # noqa: E402
from quern import dsv4, moe, reference  # noqa: E402

SPARSE = {"block_size": 8, "num_selected": 4, "window": 16}
SMALL = {"head_dim": 32, "q_lora": 24, "groups": 2, "o_lora": 16, "window": 8}


def attention():
    torch.manual_seed(1)
    layer = quern.nn.NSAttention(32, 4, 2, **SPARSE)
    nn.init.normal_(layer.gate, std=0.3)
    return layer


def compressed(kind):
    torch.manual_seed(1)
    if kind == "csa":
        return quern.nn.CompressedSparseAttention(64, 4, index_heads=16, index_dim=16, top_k=3, **SMALL)
    return quern.nn.HeavilyCompressedAttention(64, 4, ratio=8, **SMALL)


def experts():
    torch.manual_seed(1)
    layer = quern.nn.NVFP4Experts(32, 16, 4, 2, renormalize=True)
    return layer.quantize_(torch.randn(4, 32, 32), torch.randn(4, 32, 16))


def linear():
    torch.manual_seed(1)
    return quern.nn.NVFP4Linear.from_linear(nn.Linear(32, 24))


TABLE = dsv4.rope_table(64, 8, like=torch.empty(0))
LAYERS = {
    "nsa": (attention, 32, ()),
    "csa": (lambda: compressed("csa"), 64, (TABLE,)),
    "hca": (lambda: compressed("hca"), 64, (TABLE,)),
    "experts": (experts, 32, ()),
    "linear": (linear, 32, ()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_state_dict(name):
    make, width, more = LAYERS[name]
    layer, x = make(), torch.randn(2, 40, width)
    want = layer(x, *more)
    torch.manual_seed(9)
    fresh = make()
    with torch.no_grad():
        for tensor in fresh.state_dict().values():
            tensor.zero_()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x, *more), want)


@pytest.mark.parametrize("name", LAYERS)
def test_checkpoint_and_compile(near, name):
    make, width, more = LAYERS[name]
    layer, x = make(), torch.randn(2, 40, width, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def gradients(function):
        return torch.autograd.grad(function(x, *more).sin().sum(), leaves, allow_unused=True)

    want = gradients(layer)
    assert sum(grad is not None and bool(grad.any()) for grad in want) >= 2
    again = gradients(lambda *given: checkpoint(layer, *given, use_reentrant=False))
    compiled = gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for a, b, c in zip(want, again, compiled):
        if a is None:
            assert b is None and c is None
            continue
        assert torch.equal(a, b)
        near(c, a, 1e-6) if a.any() else None


@pytest.mark.parametrize("name", ["nsa", "csa", "hca"])
def test_decoding_is_the_forward_pass(near, name):
    make, width, more = LAYERS[name]
    layer, x = make(), torch.randn(2, 40, width)
    with torch.no_grad():
        want = layer(x, *more)
        cache = layer.make_cache(2, 64)
        made = [layer(x[:, first:last], *more, cache=cache) for first, last in ((0, 25), (25, 26), (26, 40))]
    near(torch.cat(made, 1), want, 5e-6)


def test_varlen_attention(near):
    layer, x = attention(), torch.randn(50, 32)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    want = torch.cat((layer(x[None, :20]), layer(x[None, 20:])), 1)[0]
    near(layer(x, cu), want, 2e-6)


def turned(x, positions):
    """By a table of few positions, and not by their differences alone."""
    table = torch.linspace(0.5, 2, 32)
    return x * table[positions][:, None, None]


def test_positions_are_those_of_sequences(near):
    layer, x = attention(), torch.randn(50, 32)
    layer.rotary = turned
    cu = torch.tensor([0, 20, 20, 48], dtype=torch.int32)
    want = torch.cat((layer(x[None, :20]), layer(x[None, 20:48])), 1)[0]
    near(layer(x, cu)[:48], want, 2e-6)
    near(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, cu)[:48], want, 2e-6)
    with torch.no_grad():
        cache = layer.make_cache(2, 64)
        layer(x[:20].view(2, 10, 32), cache=cache)
        cache.rollback(3, 1)
        with pytest.raises(ValueError, match=r"\[7, 10\] tokens"):
            layer(x[:2].view(2, 1, 32), cache=cache)


def test_a_layer_that_keeps_branches_decodes(near):
    layer, x = attention(), torch.randn(1, 20, 32)
    layer.settings["save_branches"] = True
    want = layer(x)
    with torch.no_grad():
        near(layer(x, cache=layer.make_cache(1, 20)), want, 5e-6)


@pytest.mark.parametrize("name", LAYERS)
def test_half_precision(near, name):
    make, width, more = LAYERS[name]
    layer, x = make(), torch.randn(2, 40, width)
    want = layer(x.bfloat16().float(), *more)
    x = x.bfloat16().requires_grad_()
    got = layer.bfloat16()(x, *more)
    assert got.dtype == torch.bfloat16
    near(got, want, 6e-2)
    got.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all()


def test_experts_move_as_they_are():
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert experts().down_global.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    layer = experts().repack()
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    layer.half()
    assert layer.weight.dtype == torch.float16 and layer.gate_up_repacked is not None
    for name, t in layer.state_dict().items():
        assert name == "weight" or torch.equal(t, before[name])
    layer.to("meta")
    assert layer.gate_up_repacked is None and layer.down_global.is_meta


def test_names_of_checkpoints():
    for kind in ("csa", "hca"):
        layer = compressed(kind)
        assert set(layer.state_dict()) <= set(quern._dsv4_layer.WEIGHTS)


def test_experts_are_their_codes(near):
    layer, hidden = experts(), torch.randn(7, 32)
    out = layer(hidden)
    exact = [
        reference.nvfp4.dequantize(
            getattr(layer, f"{name}_codes"),
            getattr(layer, f"{name}_scales"),
            getattr(layer, f"{name}_global"),
            weight=True,
        )
        for name in ("gate_up", "down")
    ]
    logits = hidden.double() @ layer.weight.detach().double().T
    chosen, weights = reference.moe.route(logits, 2, renormalize=True)
    want = reference.moe.layer(hidden.double(), chosen, weights, *exact, granularity=8)
    near(out, want, 2e-6)
    assert torch.equal(layer.repack()(hidden), out)
    assert "gate_up_repacked" not in layer.state_dict()
    assert moe.layer(
        hidden, layer.weight, gate_up=torch.zeros(4, 32, 32), down=torch.zeros(4, 32, 16)
    ).shape == (7, 32)


class Dense(nn.Module):
    """The layer that NSAttention takes the place of."""

    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        positions = torch.arange(x.shape[1])
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        o = functional.scaled_dot_product_attention(*turned, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(-2))


def rotary(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10000.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Decoder(nn.Module):
    def __init__(self, attend, width=64, layers=1):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.attends = nn.ModuleList(attend() for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 128, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for attend, norm, mlp in zip(self.attends, self.norms, self.mlps):
            x = x + attend(norm(x))
            x = x + mlp(x)
        return self.head(self.norm(x))


def train(model, text, steps=200, length=128, batch=2):
    """The mean loss of the last quarter of `steps` steps: fewer depend more on the text that they see."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[s : s + length + 1] for s in starts.tolist()])
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-(steps // 4) :]) / (steps // 4)


def test_a_decoder_learns_as_with_dense_attention():
    pages = sorted((pathlib.Path(__file__).parents[2] / "docs").glob("*.md"))
    text = torch.tensor([min(c, 127) for page in pages for c in page.read_bytes()])
    width, heads = 64, 4

    def sparse():
        return quern.nn.NSAttention(width, heads, rotary=rotary, block_size=16, num_selected=4, window=64)

    made = []
    for attend in (sparse, lambda: Dense(width, heads, rotary)):
        torch.manual_seed(0)
        made.append(Decoder(attend))
    dense, shared = made[1], made[0].state_dict()
    dense.load_state_dict({name: t for name, t in shared.items() if not name.endswith("gate")})
    with_sparse, with_dense = (train(model, text) for model in made)
    assert with_dense < 3.5, with_dense
    assert abs(with_sparse - with_dense) <= 0.02 * with_dense, (with_sparse, with_dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows,columns", [(64, 33), (16, 8), (144, 96)])
def test_nvfp4_linear(near, rows, columns, bias, dtype):
    """The product with the rounded weight, which is that of nvfp4.quantize; x's gradient is that weight's."""
    torch.manual_seed(2)
    plain = nn.Linear(rows, columns, bias, dtype=dtype)
    layer = quern.nn.NVFP4Linear.from_linear(plain)
    made = quern.nvfp4.quantize(plain.weight.detach().t().contiguous(), weight=True)
    weight = quern.nvfp4.dequantize(*made, weight=True).t()
    assert torch.equal(layer.dequantize(), weight)
    x = torch.randn(2, 5, rows, dtype=dtype, requires_grad=True)
    want = functional.linear(x.double(), weight.double(), plain.bias.double() if bias else None)
    bound = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    got = layer(x)
    assert got.dtype == dtype
    near(got, want, bound)
    (grad,) = torch.autograd.grad(got.sum(), x)
    near(grad, weight.double().sum(0).expand_as(x), bound)
    if bias:
        (grad,) = torch.autograd.grad(layer(x).sum(), layer.bias)
        near(grad, torch.full((columns,), 10.0), bound)
    assert layer(x[:, :0]).shape == (2, 0, columns)
    assert layer.half().weight_global.dtype == torch.float32


@pytest.mark.parametrize("profile", ["compressed-tensors", "compressed_tensors"])
def test_nvfp4_linear_of_a_profile(near, profile):
    plain = nn.Linear(32, 24)
    layer = quern.nn.NVFP4Linear.from_linear(plain, profile=profile)
    near(layer.dequantize(), plain.weight, 0.2)


def test_nvfp4_linear_state_dict():
    layer, other = linear(), quern.nn.NVFP4Linear(32, 24)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "weight_codes", "weight_global", "weight_scales"]
    assert state["weight_codes"].shape == (16, 24) and state["weight_scales"].shape == (2, 24)
    other.load_state_dict(state)
    assert torch.equal(other.repacked, layer.repacked)
    del state["weight_scales"]
    with pytest.raises(RuntimeError, match="weight_scales"):
        other.load_state_dict(state)
    assert other.load_state_dict(state, strict=False).missing_keys == ["weight_scales"]
    with pytest.raises(ValueError, match="a multiple of 16"):
        quern.nn.NVFP4Linear(24, 8)


def test_quantize_model():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.Linear(32, 16)), "c": nn.Linear(10, 3)})
    quern.nvfp4.quantize_(model, lambda layer, name: name != "b.1" and layer.in_features == 32)
    assert type(model["a"]) is quern.nn.NVFP4Linear and model["b"][0] is model["a"]
    assert type(model["b"][1]) is nn.Linear and type(model["c"]) is nn.Linear
    quern.nvfp4.quantize_(model)
    assert type(model["b"][1]) is quern.nn.NVFP4Linear and type(model["c"]) is nn.Linear
    with pytest.raises(TypeError, match="from_linear"):
        quern.nvfp4.quantize_(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="a multiple of 16"):
        quern.nvfp4.quantize_(nn.Sequential(nn.Linear(10, 3)), lambda layer, name: True)
