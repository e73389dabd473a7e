# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""torch.compile and torch.export with lengths and settings that change: one graph serves them."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import torch._dynamo.testing  # noqa: E402, F811

import quern  # noqa: E402
from quern import dsv4, moe, nn, nvfp4  # noqa: E402

Q, K, V = (torch.randn(2, 40, h, 32, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 3))
V = V[:, :, :2]


def graphs_of(function, cases, **options):
    """How many graphs serve the cases, lists of arguments; each result is that of the function."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, **options)
    for case in cases:
        got, want = (f(*case) for f in (compiled, function))
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, want))):
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.equal(nvfp4.as_bytes(a), nvfp4.as_bytes(b))
    return counter.frame_count


NUMBERS = {
    "query_offset": (lambda n: quern.attention(Q[:, :5], K, V, query_offset=n), (3, 4, 5, 6)),
    "attention scale": (lambda s: quern.attention(Q, K, V, scale=s), (0.1, 0.2, 0.3, 0.4)),
    "nsa scale": (lambda s: quern.nsa(Q, K, V, block_size=8, scale=s), (0.1, 0.2, 0.3, 0.4)),
    "window": (lambda n: quern.attention(Q, K, V, window=n), (2, 3, 4, 5)),
    "num_selected": (lambda n: quern.nsa(Q, K, V, block_size=8, num_selected=n), (4, 5, 6)),
    "lists": (lambda n: quern.nsa_select(Q, K[:, :5], block_size=8, num_selected=n), (4, 5, 6)),
    "start_abs_pos": (lambda n: dsv4.attention(Q, K[:, :, 0], start_abs_pos=n, window=8), (2, 3, 4)),
    "top_k": (lambda n: moe.route(Q[0, :, 0], top_k=n), (2, 3, 4)),
    "route_scale": (lambda s: moe.route(Q[0, :, 0], top_k=2, route_scale=s), (0.5, 1.5, 2.5)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name):
    """The first value is taken for a constant, the second for a symbol."""
    function, values = NUMBERS[name]
    assert graphs_of(function, [(value,) for value in values]) <= 2
    assert graphs_of(function, [(value,) for value in values], dynamic=True) == 1


def test_numbers_that_follow_from_extents():
    halves = [(Q[:, :n], K[:, :n], V[:, :n]) for n in (40, 30, 20)]
    assert graphs_of(lambda q, k, v: quern.attention(q, k, v, window=q.shape[1] // 2), halves) <= 2
    one = torch.ones(())
    rows = [(*nvfp4.quantize(x)[:2], x) for x in (torch.randn(3, n) for n in (20, 40, 50))]
    assert graphs_of(lambda c, s, x: nvfp4.dequantize(c, s, one, columns=x.shape[-1]), rows) <= 2


def test_inductor():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, s, n: quern.attention(q, K, V, scale=s, window=n) * 2, fullgraph=True)
    for s, n in ((0.1, 5), (0.2, 6), (0.3, 7)):
        torch.testing.assert_close(compiled(Q, s, n), quern.attention(Q, K, V, scale=s, window=n) * 2)


def _dsv4_weights(series, width=16, ratio=4, channels=8):
    make = torch.Generator().manual_seed(0)
    w = torch.randn(width, 2 * series * channels, generator=make)
    return w, *(torch.randn(ratio, channels, generator=make) for _ in range(series))


CSA, HCA = _dsv4_weights(2), _dsv4_weights(1)
TABLE = dsv4.rope_table(256, 8, like=torch.empty(0))
EXPERTS = nvfp4.quantize(torch.randn(4, 32, 48), weight=True, global_per="expert")
X = torch.randn(128, 32, generator=torch.Generator().manual_seed(9))


def _ends(x):
    """Where each expert's rows end."""
    return torch.arange(1, 5, dtype=torch.int32) * (x.shape[0] // 4)


def _batches(*shapes):
    return [(torch.randn(*shape, generator=torch.Generator().manual_seed(1)),) for shape in shapes]


ROWS = _batches((12, 32), (20, 32), (64, 32))
TOKENS = _batches((2, 40, 16), (3, 24, 16), (5, 32, 16))
CODES, SCALES, GLOBAL = EXPERTS
ONE = torch.ones(())
GATE_UP, DOWN = torch.randn(4, 48, 32), torch.randn(4, 32, 24)
FP8_W, FP8_BIAS = torch.randn(16, 256), torch.randn(4, 128)
DYNAMIC = {
    "route": (lambda x: moe.route(x, top_k=2, route_scale=2.5), ROWS),
    "layer": (
        lambda x: moe.layer(x, logits=x[..., :4], gate_up=GATE_UP, down=DOWN, top_k=2, return_routing=True),
        _batches((2, 12, 32), (3, 20, 32)),
    ),
    "compress CSA": (lambda x: dsv4.compress(x=x, w=CSA[0], b_a=CSA[1], b_b=CSA[2]), TOKENS),
    "compress HCA": (lambda x: dsv4.compress(x=x, w=HCA[0], b_a=HCA[1], return_pooled=True), TOKENS),
    "compress fp8": (lambda x: dsv4.compress(x @ FP8_W, FP8_BIAS, format="fp8"), TOKENS),
    "index": (
        lambda x: dsv4.index(x[..., None, :], x[:, :6], x[..., :1], top_k=4, return_scores=True),
        TOKENS,
    ),
    "grouped_mm": (lambda x: nvfp4.grouped_mm(x, CODES, SCALES, _ends(x), b_global=GLOBAL), ROWS),
    "grouped_mm SwiGLU": (lambda x: nvfp4.grouped_mm(x, CODES, SCALES, _ends(x), activation="swiglu"), ROWS),
    "grouped_mm codes": (
        lambda x: nvfp4.grouped_mm(x, CODES, SCALES, _ends(x), output="nvfp4", c_global=ONE),
        ROWS,
    ),
    "fused_quantize": (lambda x: nvfp4.fused_quantize(x, ONE, ONE), ROWS),
    "quantize": (lambda x: nvfp4.quantize(x, global_per="row"), ROWS),
    "quantize weight": (lambda x: nvfp4.quantize(x, weight=True), _batches((32, 20), (48, 30))),
    "dequantize": (lambda x: nvfp4.dequantize(*nvfp4.quantize(x)), ROWS),
    "interleave": (lambda x: nvfp4.interleave(x), _batches((3, 40), (5, 52), (7, 64))),
    "swizzle": (lambda x: nvfp4.swizzle(nvfp4.quantize(x)[1]), ROWS),
    "nsa": (lambda x: quern.nsa(*_heads(x), block_size=8, num_selected=4, window=8), TOKENS),
    "nsa parts": (lambda x: _parts(*_heads(x)), TOKENS),
    "nsa index": (lambda x: quern.nsa_index(x[:, :, None], x, select_block=8, return_scores=True), TOKENS),
    "nsa index loss": (lambda x: _index_loss(x[:, :, None], x), TOKENS),
    "nsa tiles": (lambda x: quern.nsa_select(*_tiles(x), preset="tile256", block_size=8), TOKENS),
    "convert_blocks": (
        lambda x: quern.convert_blocks(x[..., :2].int().clamp(0, 1), 8, 4, x.shape[1]),
        TOKENS,
    ),
}


def _heads(x):
    return [x[..., None, : 8 * n].unflatten(-1, (n, 8)).flatten(2, 3) for n in (2, 1, 1)]


def _tiles(x):
    q, k, v = _heads(x)
    return q, quern.nsa_compress(k, v, block_size=8)[0]


def _parts(q, k, v):
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=8)
    lists, count = quern.nsa_select(q, k_cmp, block_size=8, num_selected=4)
    branches = quern.nsa_attend(q, k, v, k_cmp, v_cmp, lists, block_size=8, window=8, return_lse=True)
    return (k_cmp, v_cmp, lists, count, *branches, *quern.nsa_gate(q, *branches[:3]))


def _index_loss(q, k):
    lists, _ = quern.nsa_index(q, k, select_block=8, num_selected=3)
    return quern.nsa_index_loss(q, k, q.detach(), q.detach(), lists, select_block=8)


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(name):
    """One graph for all lengths and batches."""
    function, cases = DYNAMIC[name]
    for case in cases:
        for d in range(case[0].dim()):
            if len({other[0].shape[d] for other in cases}) > 1:
                torch._dynamo.maybe_mark_dynamic(case[0], d)
    assert graphs_of(function, cases, dynamic=True) == 1


def _layers():
    shared = {"q_lora": 24, "groups": 2, "o_lora": 16, "window": 8}
    yield nn.HeavilyCompressedAttention(64, heads=4, head_dim=32, ratio=8, **shared), (TABLE,)
    yield (
        nn.CompressedSparseAttention(
            64, heads=4, head_dim=32, index_heads=16, index_dim=16, top_k=4, **shared
        ),
        (TABLE,),
    )
    yield nn.NSAttention(64, heads=4, kv_heads=2, block_size=8, num_selected=4, window=8, scale=0.3), ()
    tiles = {"block_size": 8, "num_selected": 4, "window": 8, "stride": 4, "compress": "mean"}
    yield nn.NSAttention(64, heads=4, save_branches=True, **tiles), ()
    experts = nn.NVFP4Experts(64, inner=32, experts=8, top_k=2, route_scale=2.5)
    yield experts.quantize_(torch.randn(8, 64, 64), torch.randn(8, 64, 32)), ()


LAYERS = ("HCA", "CSA", "NSA", "NSA strided", "experts")


@pytest.mark.parametrize("which", range(len(LAYERS)), ids=LAYERS)
@pytest.mark.parametrize("marked", [False, True])
def test_training_with_other_batches_and_lengths(which, marked, near):
    """Forward and backward: two graphs where the second batch says what changes, one where the first does."""
    layer, more = list(_layers())[which]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for batch, length in ((2, 40), (3, 50), (4, 64), (5, 33)):
        x = torch.randn(batch, length, 64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        if marked:
            for d in range(2):
                torch._dynamo.mark_dynamic(inputs[0], d)
        outs = [f(t, *more) for f, t in zip((compiled, layer), inputs)]
        gradients = [
            torch.autograd.grad(o.sin().sum(), (t, *layer.parameters()), allow_unused=True)
            for o, t in zip(outs, inputs)
        ]
        near(outs[0], outs[1], 2e-6)
        for got, want in zip(*gradients):
            assert (got is None) == (want is None)
            if want is not None:
                near(got, want, 1e-5)
    assert counter.frame_count <= (1 if marked else 2)


@pytest.mark.parametrize("which", range(len(LAYERS)), ids=LAYERS)
@pytest.mark.parametrize("strict", [False, True])
def test_export(which, strict, near):
    """In grad mode, with batch and length as dimensions."""
    layer, more = list(_layers())[which]
    shapes = (
        {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=16, max=200)},
        *(None for _ in more),
    )
    program = torch.export.export(
        layer, (torch.randn(2, 40, 64), *more), dynamic_shapes=shapes, strict=strict
    )
    for batch, length in ((2, 40), (5, 33), (3, 128)):
        x = torch.randn(batch, length, 64)
        near(program.module()(x, *more), layer(x, *more), 2e-6)


def test_opcheck_of_open_numbers():
    settings = (
        "window=#\nscale=~\nquery_offset=#\n",
        "o + lse",
        [5, 7],
        torch.tensor([0.25], dtype=torch.float64),
    )
    inputs = [t.clone().requires_grad_() for t in (Q[:1, :9], K[:1], V[:1])] + [None] * 5
    torch.library.opcheck(torch.ops.quern.attention.default, (*inputs, *settings))
    got = torch.ops.quern.attention(*inputs, *settings)[0]
    assert torch.equal(got, quern.attention(*inputs[:3], window=5, scale=0.25, query_offset=7))


def test_updates_in_place():
    """The schema says which tensor an operator writes; graphs keep what it held."""
    x, slots = Q[0, :3, 0], torch.tensor([4, -1, 0], dtype=torch.int32)
    schema = torch.ops.quern.v4_store.default._schema
    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    assert written["cache"] and not written["x"] and not schema.returns
    torch.library.opcheck(torch.ops.quern.v4_store.default, (x, slots, torch.zeros(5, 32), "", ""))

    def stored(cache, rows, at):
        kept = cache * 2
        dsv4.store(rows, at, kept)
        return kept + 1

    cache = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    expected = cache * 2 + 1
    expected[4], expected[0] = x[0] + 1, x[2] + 1
    assert torch.equal(stored(cache, x, slots), expected)
    assert graphs_of(stored, [(cache, x, slots)]) == 1
    with pytest.raises(ValueError, match="cache"):
        dsv4.store(x, slots, cache.t().contiguous().t())  # not a copy of it


def test_unknown_extents_are_fixed():
    """Where it is not known how a result's extents follow from a symbol, each length has its graph."""

    def both(x):
        ids, counts = nvfp4.quantize(x)[1], torch.tensor([3, 5], dtype=torch.int32)
        return nvfp4.swizzle(ids, tokens_per_expert=counts)[1]

    assert 1 <= graphs_of(both, [ROWS[0], ROWS[1]], dynamic=True) <= 2


def test_import_loads_no_compiler():
    code = "import torch, sys; import quern; print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    without = "import torch, sys; print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    done = [
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True).stdout
        for c in (code, without)
    ]
    assert done[0] == done[1]
