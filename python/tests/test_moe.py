# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.moe and the gradients of quern.nvfp4: golden vectors, float64, opcheck, torch.compile, NumPy."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quern import _operations as ops  # noqa: E402
from quern import _torch, moe, nvfp4, reference  # noqa: E402

BOUND = 2e-6
GRADIENT = 1e-5
V4 = 5e-6  # of the golden vectors, whose oracle computes in f32


def golden_layer(file, kind):
    names = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    shared = [f"shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")]
    weight, gate_up, down, *three = file.torch(*(f"{kind}.w.{n}" for n in (*names, *shared)))
    given = {"weight": weight, "gate_up": gate_up, "down": down}
    given.update(zip(("shared_gate", "shared_up", "shared_down"), three))
    if kind == "hash":
        given.update(input_ids=file.torch("input_ids"), tid2eid=file.torch("hash.w.gate.tid2eid"))
    else:
        given.update(bias=file.torch("topk.w.gate.e_score_correction_bias"))
    return given


SETTINGS = {"top_k": 3, "score": "sqrtsoftplus", "renormalize": True, "route_scale": 1.5}


@pytest.mark.parametrize("kind", ["topk", "hash"])
def test_golden_layer(golden, close, kind):
    file = golden("v4_moe")
    given = golden_layer(file, kind)
    hidden = file.torch("hidden")
    scale = float(file.torch(f"{kind}.weights").sum(-1)[0])  # renormalised weights sum to it
    settings = {**SETTINGS, "route_scale": scale}
    out, experts, weights = moe.layer(hidden, **given, **settings, limit=10.0, return_routing=True)
    close(out, file.torch(f"{kind}.out"), V4)
    order = "indices" if kind == "hash" else "indices_sorted"
    assert torch.equal(experts, file.torch(f"{kind}.{order}"))
    close(weights, file.torch(f"{kind}.{order.replace('indices', 'weights')}"), V4)
    routed = {name: t for name, t in given.items() if name in ("weight", "bias", "tid2eid")}
    if kind == "hash":
        routed["input_ids"] = given["input_ids"].flatten()
    again = moe.route(hidden=hidden.view(-1, 64), **routed, **settings)
    assert torch.equal(again[0], experts)
    close(again[1], weights, V4)


@pytest.mark.parametrize("score", ["softmax", "sqrtsoftplus", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_against_float64(near, score, renormalize):
    torch.manual_seed(1)
    logits, bias = torch.randn(30, 8, requires_grad=True), torch.randn(8)
    settings = {"top_k": 3, "score": score, "renormalize": renormalize, "route_scale": 2.5}
    experts, weights, offsets, permutation = moe.route(logits, bias=bias, **settings)
    wide = logits.detach().double().requires_grad_()
    want_experts, want = reference.moe.route(wide, bias=bias.double(), **settings)
    assert torch.equal(experts, want_experts.int())
    near(weights, want, BOUND)
    d_weights = torch.randn_like(want)
    (got,) = torch.autograd.grad(weights, logits, d_weights.float())
    near(got, torch.autograd.grad(want, wide, d_weights)[0], GRADIENT)
    assert torch.equal(offsets, experts.flatten().bincount(minlength=8).cumsum(0).int())
    assert torch.equal(permutation, experts.flatten().sort(stable=True).indices.int())


def quantized(experts=4, width=64, inner=32):
    """Experts in NVFP4, and what the codes stand for, in float64."""
    torch.manual_seed(2)
    made, exact = {}, []
    for name, shape in (("gate_up", (experts, width, 2 * inner)), ("down", (experts, inner, width))):
        codes, scales, one = nvfp4.quantize(torch.randn(shape), weight=True, global_per="expert")
        made.update({f"{name}_codes": codes, f"{name}_scales": scales, f"{name}_global": one})
        exact.append(reference.nvfp4.dequantize(codes, scales, one, weight=True))
    return made, exact


def as_bytes(codes):
    return {name: nvfp4.as_bytes(t) if t.element_size() == 1 else t for name, t in codes.items()}


@pytest.mark.parametrize("limit,alpha,beta", [(0.0, 1.0, 0.0), (2.0, 1.702, 1.0)])
def test_layer_against_float64(near, limit, alpha, beta):
    codes, (gate_up, down) = quantized()
    plain = {
        "hidden": torch.randn(2, 9, 64),
        "weight": torch.randn(4, 64) / 8,
        "gate_up_bias": torch.randn(4, 64),
        "down_bias": torch.randn(4, 64),
    }
    plain = {name: t.requires_grad_() for name, t in plain.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in plain.items()}
    swiglu = {"limit": limit, "alpha": alpha, "beta": beta}
    out, experts, _ = moe.layer(**plain, **codes, **swiglu, top_k=2, renormalize=True, return_routing=True)
    tokens = wide["hidden"].view(-1, 64)
    _, weights = reference.moe.route(tokens @ wide["weight"].T, 2, experts=experts, renormalize=True)
    biases = {name: wide[name] for name in ("gate_up_bias", "down_bias")}
    want = reference.moe.layer(tokens, experts, weights, gate_up, down, **biases, **swiglu, granularity=8)
    near(out, want.view_as(out), BOUND)
    d_out = torch.randn_like(want)
    grads = torch.autograd.grad(out, list(plain.values()), d_out.float().view_as(out))
    for a, b in zip(grads, torch.autograd.grad(want, list(wide.values()), d_out)):
        near(a, b, GRADIENT)


def test_layer_by_routing_that_is_handed_in(near):
    codes, matrices = quantized()
    chosen = torch.randint(4, (9, 3))
    given = torch.randn(9, 64, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    wide = [t.detach().double().requires_grad_() for t in given]
    out, *routing = moe.layer(
        given[0], experts=chosen, weights=given[1], **codes, top_k=3, return_routing=True
    )
    assert routing[0] is chosen and routing[1] is given[1]
    want = reference.moe.layer(wide[0], chosen, wide[1], *matrices, granularity=8)
    near(out, want, BOUND)
    d_out = torch.randn_like(want)
    exact = torch.autograd.grad(want, wide, d_out)
    for a, b in zip(torch.autograd.grad(out, given, d_out.float()), exact):
        near(a, b, GRADIENT)
    plain = {name: t.numpy() for name, t in as_bytes(codes).items()}
    again = moe.layer(
        given[0].detach().numpy(),
        experts=chosen.int().numpy(),
        weights=given[1].detach().numpy(),
        **plain,
        top_k=3,
    )
    assert np.array_equal(again, out.detach().numpy())
    with pytest.raises(ValueError, match="experts"):
        moe.layer(given[0], experts=torch.full((9, 3), 4), weights=given[1], **codes, top_k=3)


def test_experts_in_floats_train(near):
    shapes = {"hidden": (9, 24), "logits": (9, 4), "gate_up": (4, 20, 24), "down": (4, 24, 10)}
    plain = {name: torch.randn(shape).requires_grad_() for name, shape in shapes.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in plain.items()}
    out, experts, _ = moe.layer(**plain, top_k=2, return_routing=True)
    _, weights = reference.moe.route(wide["logits"], 2, experts=experts)
    matrices = (wide[name].transpose(1, 2) for name in ("gate_up", "down"))
    want = reference.moe.layer(wide["hidden"], experts, weights, *matrices)
    near(out, want, BOUND)
    d_out = torch.randn_like(want)
    exact = torch.autograd.grad(want, list(wide.values()), d_out)
    for a, b in zip(torch.autograd.grad(out, list(plain.values()), d_out.float()), exact):
        near(a, b, GRADIENT)
    opcheck("moe", plain, {"top_k": 2}, "out")


def test_repacked_weights_give_the_same_bits():
    codes, _ = quantized()
    hidden, weight = torch.randn(9, 64), torch.randn(4, 64)
    want = moe.layer(hidden, weight, **codes, top_k=2)
    repacked = {name: t for name, t in codes.items() if name.endswith("global")}
    for name, rows, columns in (("gate_up", 64, 64), ("down", 32, 64)):
        pair = codes[f"{name}_codes"], codes[f"{name}_scales"]
        bytes_ = repacked[f"{name}_repacked"] = nvfp4.prepack(*pair)
        for got, original in zip(nvfp4.unpack(bytes_, columns, rows), pair):
            assert got.dtype == original.dtype
            assert torch.equal(got.view(torch.uint8), original.view(torch.uint8))
    assert torch.equal(moe.layer(hidden, weight, **repacked, top_k=2, intermediate=32), want)


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_gradient_of_products(near, activation):
    codes, (gate_up, _) = quantized()
    a, offsets = torch.randn(20, 64, requires_grad=True), torch.tensor([5, 5, 12, 18], dtype=torch.int32)
    wide = a.detach().double().requires_grad_()
    b = codes["gate_up_codes"], codes["gate_up_scales"]
    one = codes["gate_up_global"]
    got = nvfp4.grouped_mm(a, *b, offsets, b_global=one, activation=activation)
    want = reference.nvfp4.grouped_mm(wide, gate_up, offsets)
    if activation == "swiglu":
        want = reference.nvfp4.swiglu(want, 8)
    near(got, want, BOUND)
    d_c = torch.randn_like(want)
    (grad,) = torch.autograd.grad(got, a, d_c.float())
    near(grad, torch.autograd.grad(want, wide, d_c)[0], GRADIENT)
    repacked = nvfp4.prepack(*b)
    again = nvfp4.grouped_mm(
        a, repacked, offsets=offsets, b_global=one, activation=activation, columns=b[0].shape[2]
    )
    assert torch.equal(again, got)


def test_mxfp4_is_exact():
    random = np.random.default_rng(3)
    codes = random.integers(0, 256, (6, 32), dtype=np.uint8)
    exponents = random.integers(120, 130, (6, 2), dtype=np.uint8)
    made, scales, one, rounded = nvfp4.from_mxfp4(codes, exponents)
    assert rounded == 0 and np.array_equal(made, codes)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(6, 64)
    values = table[nibbles & 7] * np.where(nibbles & 8, -1, 1)
    values = values * np.repeat(np.ldexp(1.0, exponents.astype(int) - 127), 32, 1)
    assert np.array_equal(nvfp4.dequantize(made, scales, one), values.astype(np.float32))
    e8m0 = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
    as_torch = nvfp4.from_mxfp4(torch.from_numpy(codes).view(torch.float4_e2m1fn_x2), e8m0)
    assert as_torch[0].dtype == torch.float4_e2m1fn_x2 and as_torch[1].dtype == torch.float8_e4m3fn
    assert np.array_equal(as_torch[1].view(torch.uint8).numpy(), scales)


def test_fused_quantize_is_quantize_of_its_parts():
    x = torch.randn(7, 64)
    runs = x.unflatten(1, (-1, 2, 8))
    gate, up = (runs[:, :, i].flatten(1) for i in (0, 1))
    one, two = torch.tensor(0.003), torch.tensor(0.002)
    made = nvfp4.fused_quantize(x, one, two)
    for part, scale, pair in ((gate, one, made[:2]), (up, two, made[2:])):
        want = nvfp4.quantize(part.contiguous(), global_scale=scale)
        for a, b in zip(pair, want):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    codes, scales = nvfp4.fused_quantize(x, one, activation="swiglu")
    exact = reference.nvfp4.swiglu(x.double(), 8)
    back = reference.nvfp4.dequantize(codes, scales, one)
    assert codes.shape == (7, 16) and (back - exact).norm() < 0.15 * exact.norm()


def opcheck(name, tensors, settings, results):
    operator = _torch.OPERATORS[name]
    arguments = [tensors.get(field) for field in operator.inputs]
    torch.library.opcheck(operator.call, (*arguments, ops.lines(tuple(settings.items())), results))


def test_opcheck():
    codes = as_bytes(quantized()[0])
    hidden, weight = torch.randn(6, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    opcheck("moe", {"hidden": hidden, "weight": weight, **codes}, {"top_k": 2}, "out experts weights")
    handed = {"experts": torch.randint(4, (6, 2), dtype=torch.int32), "weights": torch.rand(6, 2)}
    handed["weights"].requires_grad_()
    opcheck("moe", {"hidden": hidden, **handed, **codes}, {"top_k": 2}, "out")
    opcheck(
        "moe-route", {"hidden": hidden, "weight": weight}, {"top_k": 2}, "weights experts offsets permutation"
    )
    product = {"a": hidden, "offsets": torch.tensor([1, 3, 4, 6], dtype=torch.int32)}
    product.update((f"b_{name}", codes[f"gate_up_{name}"]) for name in ("codes", "scales", "global"))
    opcheck("nvfp4-gemm", product, {}, "c")
    opcheck("nvfp4-quantize", {"x": hidden.detach()}, {}, "codes scales global")
    opcheck("nvfp4-gemm", {**product, "c_old": torch.randn(6, 64)}, {}, "c")
    one = torch.tensor(0.01)
    opcheck("nvfp4-gemm", {**product, "c_global": one}, {"output": "nvfp4"}, "c_codes c_scales")


def test_opcheck_of_what_has_no_gradient():
    x = torch.randn(6, 64)
    codes, scales, one = (nvfp4.as_bytes(t) if t.dim() else t for t in nvfp4.quantize(x))
    opcheck("nvfp4-dequantize", {"codes": codes, "scales": scales, "global": one}, {}, "x")
    opcheck("nvfp4-swizzle", {"linear": scales}, {}, "swizzled")
    counts = torch.tensor([4, 0, 2], dtype=torch.int32)
    opcheck(
        "nvfp4-swizzle",
        {"linear": scales, "tokens_per_expert": counts},
        {"experts": True},
        "swizzled pad_row_offsets",
    )
    opcheck("nvfp4-interleave", {"x": x}, {}, "out")
    exponents = torch.full((6, 2), 127, dtype=torch.uint8)
    mx = {"mx_codes": codes, "exponents": exponents}
    opcheck("nvfp4-from-mxfp4", mx, {}, "codes scales global rounded_blocks")
    names = "gate_codes gate_scales up_codes up_scales"
    opcheck("nvfp4-fused-quantize", {"x": x, "gate_global": one, "up_global": one}, {}, names)
    weights = nvfp4.quantize(torch.randn(2, 32, 64), weight=True)
    pair = dict(zip(("b_codes", "b_scales"), map(nvfp4.as_bytes, weights)))
    opcheck("moe-prepack", pair, {}, "b_repacked")
    (repacked,) = ops.call("moe-prepack", ops.params("moe-prepack"), pair, ("b_repacked",))
    opcheck(
        "moe-prepack", {"b_repacked": repacked}, {"inverse": True, "?n": 32, "?k": 32}, "b_codes b_scales"
    )
    q, branches = torch.randn(1, 6, 2, 8), [torch.randn(1, 6, 2, 8) for _ in range(3)]
    gate = torch.randn(2, 3, 8)
    opcheck("nsa-gates", {"q": q, "w_gate": gate}, {"gate": "weights"}, "gates")
    gated = dict(zip(("o_cmp", "o_slc", "o_win"), branches), gates=torch.rand(1, 6, 2, 3))
    opcheck("nsa-combine", gated, {"gate": "given"}, "o")


def test_autocast_of_products_and_routes():
    a = torch.randn(6, 64, requires_grad=True)
    codes, scales, one = nvfp4.quantize(torch.randn(2, 64, 32), weight=True)
    logits, offsets = torch.randn(6, 4, requires_grad=True), torch.tensor([2, 6], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        y = nvfp4.grouped_mm(a, codes, scales, offsets, b_global=one)
        weights = moe.route(logits, top_k=2)[1]
    assert y.dtype == torch.bfloat16 and weights.dtype == torch.float32
    (y.sum() + weights.sin().sum()).backward()
    assert a.grad.dtype == logits.grad.dtype == torch.float32


def test_compile_of_layouts():
    x = torch.randn(6, 64)

    def there_and_back(x):
        codes, scales, one = nvfp4.quantize(nvfp4.interleave(x))
        return nvfp4.dequantize(codes, scales, one).sin(), nvfp4.swizzle(scales).view(torch.uint8)

    def of_extents(x):
        """Results of extents that no input says."""
        codes, scales, one = nvfp4.quantize(x[:, :40])
        back = nvfp4.unswizzle(nvfp4.swizzle(scales), 6, 3)
        return nvfp4.dequantize(codes, back, one, columns=40).sin(), back.view(torch.uint8)

    def repacked(x):
        codes, scales, _ = nvfp4.quantize(x.T[None].contiguous(), weight=True)
        return [t.view(torch.uint8) for t in nvfp4.unpack(nvfp4.prepack(codes, scales), 6, 64)]

    def of_experts(x):
        """The products by scales of experts' tiles: of any counts, which the graph does not know."""
        rows = nvfp4.quantize(x)
        columns = nvfp4.quantize(x.T[None].expand(2, 64, 6).contiguous(), weight=True)
        swizzled, starts = nvfp4.swizzle(rows[1], tokens_per_expert=counts)
        options = {"a_scales": swizzled, "a_layout": "swizzled", "pad_row_offsets": starts}
        y = nvfp4.grouped_mm(rows[0], *columns[:2], counts.cumsum(0, dtype=torch.int32), **options)
        return y, starts

    with torch.autocast("cpu", torch.bfloat16):
        assert nvfp4.interleave(x).dtype == torch.float32
    for given in ([4, 2], [0, 5]):
        counts = torch.tensor(given, dtype=torch.int32)
        compiled = torch.compile(of_experts, fullgraph=True, backend="aot_eager")
        for a, b in zip(compiled(x), of_experts(x)):
            assert torch.equal(a, b)
    for function in (there_and_back, of_extents, repacked):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(x)
        for a, b in zip(got, function(x)):
            assert torch.equal(a, b)


def test_compile(near):
    codes = as_bytes(quantized()[0])
    given = torch.randn(6, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)

    def layer(hidden, weight):
        return moe.layer(hidden, weight, **codes, top_k=2).sin()

    got, want = torch.compile(layer, fullgraph=True, backend="aot_eager")(*given), layer(*given)
    near(got, want, BOUND)
    for a, b in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        near(a, b, BOUND)


def test_autocast():
    codes, _ = quantized()
    hidden, weight = torch.randn(6, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe.layer(hidden, weight, **codes, top_k=2)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_numpy_is_torch():
    codes, _ = quantized()
    hidden, weight = torch.randn(6, 64), torch.randn(4, 64)
    plain = {name: t.numpy() for name, t in as_bytes(codes).items()}
    want = moe.layer(hidden, weight, **codes, top_k=2)
    assert np.array_equal(moe.layer(hidden.numpy(), weight.numpy(), **plain, top_k=2), want.numpy())


def test_sentences():
    codes, _ = quantized()
    hidden, weight = torch.randn(6, 64), torch.randn(4, 64)
    with pytest.raises(ValueError, match="top_k"):
        moe.layer(hidden, weight, **codes, top_k=9)
    with pytest.raises(ValueError, match="score"):
        moe.route(hidden=hidden, weight=weight, score="best")
    with pytest.raises(ValueError, match="offsets"):
        nvfp4.grouped_mm(hidden, codes["gate_up_codes"], codes["gate_up_scales"])
