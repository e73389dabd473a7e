# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.dsv4.layer and Cache against the golden vectors of whole layers."""

import pytest

torch = pytest.importorskip("torch")

from quern import _operations as ops  # noqa: E402
from quern import _torch, dsv4, nvfp4  # noqa: E402
from quern._dsv4_layer import WEIGHTS  # noqa: E402
from quern.nn import CompressedSparseAttention  # noqa: E402
from quern.reference import dsv4 as reference  # noqa: E402

BOUND = 2e-6
GRADIENT = 1e-5
V4 = 5e-6  # of the golden vectors, whose oracle computes in f32


def golden_layer(golden, kind):
    file = golden(f"v4_tiny_{kind}")
    names = file.names()
    weights = {name: file.torch(f"w.{name}") for name in WEIGHTS if f"w.{name}" in names}
    top_k = file.torch("idx.topk").shape[-1] if kind == "csa" else 512
    rope = "rope.main" if kind == "swa" else "rope.compress"
    table = torch.cat(file.torch(f"{rope}.cos", f"{rope}.sin"), -1)
    return file, table, weights, {"kind": kind, "window": 8, "top_k": top_k}


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_golden_layer(golden, close, kind):
    file, table, weights, settings = golden_layer(golden, kind)
    hidden = file.torch("hidden")
    named = ("q_residual", "q", "kv_rows", "core", "core_irope") + (("idx_topk",) if kind == "csa" else ())
    out, *made = dsv4.layer(hidden, table, weights, **settings, results=named)
    close(out, file.torch("out"), V4)
    for name, got in zip(named, made):
        if name == "idx_topk":
            chosen = file.torch("idx.topk")  # -1, absent, comes last in an ascending list
            none = got.shape[-1] + 11
            assert torch.equal(
                got,
                chosen.masked_fill(chosen < 0, none)
                .sort(-1)
                .values.masked_fill_(chosen.sort(-1, descending=True).values < 0, -1),
            )
        else:
            close(got, file.torch("kv" if name == "kv_rows" else name).view_as(got), V4)


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
@pytest.mark.parametrize("pieces", [[45], [20, 1, 1, 23], [7] * 6 + [3]])
def test_any_chunking(golden, close, kind, pieces):
    file, table, weights, settings = golden_layer(golden, kind)
    hidden = file.torch("hidden")
    cache = dsv4.Cache(**settings, sequences=3, capacity=64, ring=4)
    made, first = [], 0
    for n in pieces:
        made.append(cache.append(hidden[:, first : first + n], table, weights))
        first += n
    close(torch.cat(made, 1), file.torch("out"), V4)
    cache.rollback(2, 0)
    cache.fork(0, 2)
    again = cache.append(hidden[0, 43:], table, weights, sequences=[2], counts=[2])
    close(again, file.torch("out")[0, 43:], V4)
    assert [cache.length(i) for i in range(3)] == [43, 45, 45]


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
@pytest.mark.parametrize("cut", [0, 3, 26])
def test_save_and_restore(golden, close, kind, cut):
    """In a cache that has no sequence yet, and in one that has others."""
    file, table, weights, settings = golden_layer(golden, kind)
    hidden = file.torch("hidden")
    cache = dsv4.Cache(**settings, sequences=2, capacity=64, ring=4)
    cache.append(hidden[:, :cut], table, weights)
    saved = cache.save(1)
    for sequences in (1, 3):
        other = dsv4.Cache(**settings, sequences=sequences, capacity=45, ring=4)
        if sequences == 3:
            other.append(hidden[:, :7], table, weights, sequences=[0, 2])
        other.restore(0, saved)
        out = other.append(hidden[1, cut:], table, weights, sequences=[0], counts=[45 - cut])
        close(out, file.torch("out")[1, cut:], V4)
        assert other.length() == 45
        with pytest.raises(RuntimeError, match="capacity 8"):
            dsv4.Cache(**settings, sequences=1, capacity=8, ring=4).restore(0, other.save(0))
    held = other.length(0)
    for i in (0, 20, len(saved) // 2, len(saved) - 1):
        with pytest.raises(RuntimeError, match="damaged"):
            other.restore(0, saved[:i] + bytes([saved[i] ^ 1]) + saved[i + 1 :])
        with pytest.raises(RuntimeError, match="damaged"):
            other.restore(0, saved[:i])
    assert other.length(0) == held
    for another in ({"window": 9}, {"ring": 3}, {"key_format": "fp8"}):
        with pytest.raises(ValueError, match="kind"):
            dsv4.Cache(**{**settings, "ring": 4, **another}, sequences=1, capacity=64).restore(0, saved)


def large_layer(width=64, tokens=40):
    """A layer whose rows may be row584."""
    torch.manual_seed(11)
    sizes = {"q_lora": 24, "groups": 2, "o_lora": 16, "index_heads": 16, "index_dim": 64}
    made = CompressedSparseAttention(width, 2, 512, **sizes, window=8, top_k=20)
    table = dsv4.rope_table(64, 64, base=160000.0, factor=16.0, like=torch.empty(0))
    return made, torch.randn(2, tokens, width), table


def decoded(cache, made, x, table, pieces):
    with torch.no_grad():
        return torch.cat([made(part, table, cache=cache) for part in x.split(pieces, 1)], 1)


STORED = {
    "rows": ({}, 2e-6),
    "bfloat16": ({"dtype": torch.bfloat16}, 1e-2),
    "row584": ({"format": "row584"}, 1e-1),
    "fp8 keys": ({"key_format": "fp8"}, 2e-6),  # every entry is chosen, whatever its key
    "power keys": ({"key_format": "fp8-power"}, 2e-6),
    "all": ({"format": "row584", "key_format": "fp4", "ring": 4}, 1e-1),
}


@pytest.mark.parametrize("case", STORED)
def test_stored_formats(near, case):
    """The layer's output up to the rounding of what is stored, however sequences are cut; pages and a saved
    sequence change nothing."""
    stored, bound = STORED[case]
    made, x, table = large_layer()
    want = made(x, table).detach()
    cache = made.make_cache(2, 48, **stored)
    got = decoded(cache, made, x, table, [40])
    near(got, want, bound)
    if bound > 1e-5:
        assert (got - want).norm() > bound / 100 * want.norm()
    if case != "rows":
        plain = made.make_cache(2, 48, **{**stored, "dtype": None, "format": "rows", "key_format": "rows"})
        decoded(plain, made, x, table, [40])
        assert len(cache.save(1)) < len(plain.save(1))
    near(decoded(made.make_cache(2, 48, **stored), made, x, table, [17, 1, 22]), got, 2e-6)
    paged = made.make_cache(2, 48, **stored, page=4, pages=6)
    paged.open(x, made.state_dict())
    assert paged.pages(48) == (3, 6) and paged.pages(0) == (0, 6)
    near(decoded(paged, made, x, table, [17, 1, 22]), got, 2e-6)
    assert paged.pages(40) == (3, 0) and paged.length(1) == 40
    other = made.make_cache(1, 48, **stored)
    other.restore(0, paged.save(1))
    more = torch.randn(1, 3, 64)
    weights = made.state_dict()
    last = other.append(more, table, weights)
    assert torch.equal(last, paged.append(more, table, weights, sequences=[1]))


def test_sentences_of_stored_formats():
    made, x, table = large_layer()
    with pytest.raises(ValueError, match="format is 'fp9'"):
        made.make_cache(1, 8, format="fp9")
    with pytest.raises(ValueError, match="dtype"):
        made.make_cache(1, 8, dtype="float128")
    with pytest.raises(ValueError, match="format"):
        made.make_cache(1, 8, format="fp4").open(x, made.state_dict())
    paged = made.make_cache(2, 48, page=4, pages=5)
    with pytest.raises(ValueError, match="empty"):
        paged.pages(1)
    paged.open(x, made.state_dict())
    with pytest.raises(ValueError, match="tokens is 49"):
        paged.pages(49)
    with pytest.raises(ValueError, match="lacks 1 pages"):
        decoded(paged, made, x, table, [40])
    assert paged.length() == 0


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_reference_is_the_golden_layer(golden, close, kind):
    file, table, weights, settings = golden_layer(golden, kind)
    weights = {name: t.double() for name, t in weights.items()}
    out = reference.layer(file.torch("hidden").double(), table.double(), weights, **settings)
    close(out, file.torch("out"), V4)


@pytest.mark.parametrize("kind", ["csa", "hca", "swa"])
def test_against_float64(golden, near, kind):
    """Values and gradients, with the layer's own choice of entries."""
    file, table, weights, settings = golden_layer(golden, kind)
    leaves = {"hidden": file.torch("hidden"), **weights}
    trained = [name for name in leaves if "indexer" not in name]
    wide = {name: t.double().requires_grad_(name in trained) for name, t in leaves.items()}
    for name in trained:
        leaves[name].requires_grad_()
    plain = {**leaves}
    results = ("idx_topk",) if kind == "csa" else ()
    made = dsv4.layer(plain.pop("hidden"), table, plain, **settings, results=results)
    got, idx = made if results else (made, None)
    given = {**wide}
    want = reference.layer(given.pop("hidden"), table.double(), given, **settings, idx=idx)
    near(got, want, BOUND)
    d_out = torch.randn_like(want)
    grads = torch.autograd.grad(want, [wide[name] for name in trained], d_out)
    found = torch.autograd.grad(got, [leaves[name] for name in trained], d_out.float())
    for a, b in zip(found, grads):
        near(a, b, GRADIENT)


def packed_weight(format, both):
    """A weight [outputs, inputs] as bytes, and what they mean."""
    if format == "nvfp4":
        made = nvfp4.quantize(both.T.contiguous(), weight=True)
        return dict(zip(("codes", "scales", "global"), made)), nvfp4.dequantize(*made, weight=True).T
    scales = torch.rand(-(-both.shape[0] // 128), -(-both.shape[1] // 128)) / 8 + 0.01
    if format == "fp8_power":
        scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(both), : both.shape[1]]
    codes = (both / wide).to(torch.float8_e4m3fn)
    return {"fp8": codes, "fp8_scales": scales}, codes.float() * wide


def pack(weights, name, format):
    """The weights with those of a compressor packed, and the same weights in floats."""
    kv, gate = f"{name}kv_proj.weight", f"{name}gate_proj.weight"
    series = weights[f"{name}position_bias"].shape[-1] // len(weights[f"{name}kv_norm.weight"])
    parts = [part for pair in zip(weights[kv].chunk(series), weights[gate].chunk(series)) for part in pair]
    packed, exact = packed_weight(format, torch.cat(parts[2:] + parts[:2] if series == 2 else parts))
    means = exact.chunk(2 * series)
    means = means[2:] + means[:2] if series == 2 else means
    rest = {key: t for key, t in weights.items() if key not in (kv, gate)}
    floats = {kv: torch.cat(means[0::2]), gate: torch.cat(means[1::2])}
    return {**rest, **{f"{name}{key}": t for key, t in packed.items()}}, {**rest, **floats}


def indexer(weights):
    return {key: t for key, t in weights.items() if "indexer" in key}


@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("format", ["fp8", "fp8_power", "nvfp4"])
def test_packed_weights(golden, near, kind, format):
    """The layer of the weights that the bytes mean; its gradient; the same from a cache; in a graph."""
    file, table, weights, settings = golden_layer(golden, kind)
    settings["top_k"] = 512  # every entry, however its score is rounded
    packed, floats = pack(weights, "compressor.", format)
    if kind == "csa":
        codes, wide = pack(weights, "compressor.indexer.", format)
        packed = {**{key: t for key, t in packed.items() if "indexer" not in key}, **indexer(codes)}
        floats.update(indexer(wide))
    hidden = file.torch("hidden").requires_grad_()
    got, want = (dsv4.layer(hidden, table, given, **settings) for given in (packed, floats))
    near(got, want, BOUND)
    d_out = torch.randn_like(got)
    near(*(torch.autograd.grad(t, hidden, d_out, retain_graph=True)[0] for t in (got, want)), GRADIENT)
    cache = dsv4.Cache(**settings, sequences=len(hidden), capacity=64)
    with torch.no_grad():
        made = [cache.append(part, table, packed) for part in hidden.split([20, 1, 24], 1)]
    near(torch.cat(made, 1), got, BOUND)

    def whole(x):
        return dsv4.layer(x, table, packed, **settings)

    assert torch.equal(torch.compile(whole, fullgraph=True, backend="aot_eager")(hidden), got)
    plain = floats["compressor.kv_proj.weight"]
    with pytest.raises(ValueError, match="one weight is accepted"):
        dsv4.layer(hidden, table, {**packed, "compressor.kv_proj.weight": plain}, **settings)


def test_opcheck_and_compile(golden, near):
    file, table, weights, settings = golden_layer(golden, "csa")
    hidden = file.torch("hidden")
    fields = {WEIGHTS[name]: t for name, t in weights.items()}
    trained = {name: t.requires_grad_() for name, t in fields.items() if not name.startswith("indexer")}
    tensors = {"x": hidden.requires_grad_(), "cos_sin": table, **fields, **trained}
    operator = _torch.OPERATORS["v4-layer"]
    arguments = [tensors.get(field) for field in operator.inputs]
    lines = ops.lines(tuple(settings.items()))
    torch.library.opcheck(operator.call, (*arguments, lines, "out idx_topk"))

    def whole(x):
        return dsv4.layer(x, table, weights, **settings).sin()

    got, want = torch.compile(whole, fullgraph=True, backend="aot_eager")(hidden), whole(hidden)
    near(got, want, 1e-6)
    near(*(torch.autograd.grad(t.sum(), hidden)[0] for t in (got, want)), 1e-6)


def test_sentences(golden):
    file, table, weights, settings = golden_layer(golden, "swa")
    hidden = file.torch("hidden")
    with pytest.raises(ValueError, match="q_c_proj"):
        dsv4.layer(hidden, table, {**weights, "q_c_proj": table}, **settings)
    with pytest.raises(ValueError, match="kind|compressor"):
        dsv4.layer(hidden, table, weights, kind="csa", window=8)
    with pytest.raises(ValueError, match="kind"):
        dsv4.Cache("mla", 1, 8)
    cache = dsv4.Cache("swa", 1, 8, window=8)
    with pytest.raises(ValueError, match="empty"):
        cache.rollback(1)
    with pytest.raises(ValueError, match="capacity|8"):
        cache.append(hidden[:1], table, weights)
