# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.nsa_compress, nsa_select, nsa_attend, nsa_gate: together they are quern.nsa, forward and backward."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import quern  # noqa: E402
from quern import _operations as ops  # noqa: E402
from quern import _torch, reference  # noqa: E402

BOUND = 2e-6
GRADIENT = 1e-5
SELECT = {"block_size": 16, "num_selected": 4, "forced_first": 1, "forced_local": 2}
WINDOW = 20


def inputs(n=130, varlen=False):
    torch.manual_seed(7)
    shapes = {"q": (4, 16), "k": (2, 16), "v": (2, 24), "w_k": None, "w_v": None, "gate": None}
    lead = (n,) if varlen else (2, n)
    given = {name: torch.randn(*lead, *tail) for name, tail in shapes.items() if tail}
    given.update(w_k=torch.randn(2, 16, 16) / 4, w_v=torch.randn(2, 24, 24) / 5, gate=torch.randn(4, 3, 16))
    return {name: t.requires_grad_() for name, t in given.items()}


def parts(q, k, v, w_k, w_v, gate, cu_seqlens=None):
    k_cmp, v_cmp, *cu = quern.nsa_compress(k, v, block_size=16, w_k=w_k, w_v=w_v, cu_seqlens=cu_seqlens)
    lengths = {"cu_seqlens": cu_seqlens, "cu_seqlens_cmp": cu[0] if cu else None}
    block_idx, _ = quern.nsa_select(q, k_cmp, **SELECT, **lengths)
    branches = quern.nsa_attend(q, k, v, k_cmp, v_cmp, block_idx, block_size=16, window=WINDOW, **lengths)
    return quern.nsa_gate(q, *branches, gate=gate, cu_seqlens=cu_seqlens)[0]


@pytest.mark.parametrize("varlen", [False, True])
def test_the_parts_are_the_whole(near, varlen):
    given = inputs(varlen=varlen)
    cu = torch.tensor([0, 50, 50, 130], dtype=torch.int32) if varlen else None
    got = parts(**given, cu_seqlens=cu)
    want = quern.nsa(**given, **SELECT, window=WINDOW, cu_seqlens=cu)
    near(got, want, BOUND)
    d_o = torch.randn_like(got)
    leaves = list(given.values())
    for a, b in zip(torch.autograd.grad(got, leaves, d_o), torch.autograd.grad(want, leaves, d_o)):
        near(a, b, GRADIENT)


def test_numpy_is_torch():
    given = {name: t.detach() for name, t in inputs().items()}
    k_cmp, v_cmp = quern.nsa_compress(given["k"].numpy(), given["v"].numpy(), block_size=16)
    for got, want in zip((k_cmp, v_cmp), quern.nsa_compress(given["k"], given["v"], block_size=16)):
        assert np.array_equal(got, want.numpy())
    idx, count = quern.nsa_select(given["q"].numpy(), k_cmp, **SELECT)
    assert idx.shape == (2, 2, 130, 4) and np.array_equal((idx >= 0).sum(-1), count)


def test_lse_and_branches():
    given = inputs()
    (o_win, lse_win) = quern.nsa_attend(given["q"], given["k"], given["v"], window=WINDOW, return_lse=True)
    want, lse = quern.attention(given["q"], given["k"], given["v"], window=WINDOW, return_lse=True)
    assert torch.allclose(o_win, want, atol=1e-6) and torch.allclose(lse_win, lse, atol=1e-5)
    assert o_win.requires_grad and not lse_win.requires_grad


def test_gate_against_float64(near):
    q, gate = (t.detach().double() for t in (inputs()["q"], inputs()["gate"]))
    branches = [torch.randn(2, 130, 4, 24, dtype=torch.float64) for _ in range(3)]
    wide = [t.requires_grad_() for t in (q, gate, *branches)]
    plain = [t.detach().float().requires_grad_() for t in wide]
    gates = torch.einsum("bnhd,hgd->bnhg", q, gate).sigmoid()
    want = sum(gates[..., i : i + 1] * o for i, o in enumerate(branches))
    got, made = quern.nsa_gate(plain[0], *plain[2:], gate=plain[1])
    near(got, want, BOUND)
    near(made, gates, BOUND)
    d_o = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, plain, d_o.float()), torch.autograd.grad(want, wide, d_o)):
        near(a, b, GRADIENT)
    handed_in = made.detach().requires_grad_()
    o, same = quern.nsa_gate(plain[0], *plain[2:], gates=handed_in)
    assert same is handed_in
    near(o, want, BOUND)
    near(
        torch.autograd.grad(o, handed_in, d_o.float())[0],
        torch.stack([(d_o * b).sum(-1) for b in branches], -1),
        GRADIENT,
    )


def test_compress_linear_against_float64(near):
    """φ linear, stride below the block: d_pe and d_W of the standalone call."""
    torch.manual_seed(2)
    k, v = torch.randn(2, 50, 2, 8), torch.randn(2, 50, 2, 8)
    weights = [
        torch.randn(2, 64, 8) / 8,
        torch.randn(2, 64, 8) / 8,
        torch.randn(2, 8, 8),
        torch.randn(2, 8, 8),
    ]
    plain = [t.requires_grad_() for t in (k, v, *weights)]
    wide = [t.detach().double().requires_grad_() for t in plain]
    names = ("w_k", "w_v", "pe_k", "pe_v")
    settings = {"block_size": 8, "stride": 4, "compress": "linear"}
    got = quern.nsa_compress(*plain[:2], **settings, **dict(zip(names, plain[2:])))
    want = [
        reference.compress(t, 8, w, stride=4, pe=pe, linear=True)
        for t, w, pe in zip(wide[:2], wide[2:4], wide[4:])
    ]
    for a, b in zip(got, want):
        near(a, b, BOUND)
    d_o = [torch.randn_like(t) for t in want]
    grads = torch.autograd.grad(got, plain, [t.float() for t in d_o])
    for a, b in zip(grads, torch.autograd.grad(want, wide, d_o)):
        near(a, b, GRADIENT)


def opcheck(name, tensors, settings, results, **options):
    operator = _torch.OPERATORS[name]
    arguments = [tensors.get(field) for field in operator.inputs]
    torch.library.opcheck(operator.call, (*arguments, ops.lines(tuple(settings.items())), results), **options)


def test_opcheck():
    given = inputs(40)
    opcheck("nsa-compress", given, {"block_size": 16}, "k_cmp v_cmp")
    k_cmp, v_cmp = (t.detach() for t in quern.nsa_compress(given["k"], given["v"], block_size=16))
    opcheck("nsa-select", {**given, "k_cmp": k_cmp}, SELECT, "block_idx block_count")
    idx, _ = quern.nsa_select(given["q"], k_cmp, **SELECT)
    more = {**given, "k_cmp": k_cmp.requires_grad_(), "v_cmp": v_cmp.requires_grad_(), "block_idx": idx}
    attend = {"block_size": 16, "window": WINDOW, "selection": "given", "num_selected": 4}
    names = "o_cmp o_slc o_win lse_cmp lse_slc lse_win"
    opcheck("nsa-attend", more, attend, names)
    branches = {f"o_{b}": torch.randn(2, 40, 4, 24, requires_grad=True) for b in ("cmp", "slc", "win")}
    gated = {"q": given["q"], "w_gate": given["gate"], **branches}
    opcheck("nsa-gate", gated, {"gate": "weights"}, "o gates")


def test_compile(near):
    given = inputs()
    compiled = torch.compile(lambda t: parts(**t), fullgraph=True, backend="aot_eager")
    got, want = compiled(given), parts(**given)
    near(got, want, BOUND)
    leaves = list(given.values())
    for a, b in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves)):
        near(a, b, BOUND)


def test_out():
    q, k, v = (inputs()[name].detach() for name in ("q", "k", "v"))
    o = torch.empty(2, 130, 4, 24)
    assert quern.attention(q, k, v, out=o) is o and torch.equal(o, quern.attention(q, k, v))
    again = torch.empty_like(o)
    torch.ops.quern.attention_out(q, k, v, *[None] * 5, settings="", out_o=again, out_lse=None)
    assert torch.equal(again, o)
    with pytest.raises(ValueError, match="no gradient"):
        quern.attention(q.requires_grad_(), k, v, out=o)


def test_autocast():
    given = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        o = quern.nsa(**given, **SELECT, window=WINDOW)
        dense = quern.attention(given["q"], given["k"], given["v"])
    assert o.dtype == dense.dtype == torch.bfloat16
    (o.sum() + dense.sum()).backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.isfinite().all() for t in given.values())


def test_no_second_derivative():
    q = inputs()["q"]
    k, v = (inputs()[name].detach() for name in ("k", "v"))
    (grad,) = torch.autograd.grad(quern.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="backward"):
        grad.sum().backward()


@pytest.mark.parametrize("tile", [1, 16])
def test_block_mask_is_the_selected_branch(near, tile):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.detach() for t in list(inputs(128).values())[:3])
    settings = {"tile": tile, "block_size": 16}
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=16)
    idx, count = quern.nsa_select(q, k_cmp, **settings, num_selected=4)
    (o,) = quern.nsa_attend(q, k, v, None, None, idx, **settings, branches="slc")
    mask = quern.block_mask(idx, 16, 128, tile=tile, heads=4)
    turned = (t.transpose(1, 2) for t in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    scores_seen = mask.to_dense().repeat_interleave(tile, 2).repeat_interleave(16, 3)[..., :128, :128].bool()
    seen = scores_seen & torch.ones(128, 128, dtype=torch.bool).tril()
    near(o, reference.masked_attention(q.double(), k.double(), v.double(), seen), BOUND)
    near(flex_attention(*turned, block_mask=mask).transpose(1, 2), o, BOUND)


def test_heads_that_share_no_lists_evenly():
    with pytest.raises(ValueError, match="heads is 5"):
        quern.block_mask(torch.zeros(1, 2, 8, 1, dtype=torch.int32), 16, 128, tile=16, heads=5)


def test_convert_blocks():
    lists = np.array([[[[0, 3, -1], [1, 2, 3]]]], np.int32)
    index, count = quern.convert_blocks(lists, 16, 32, 64)
    assert index[..., :2].tolist() == [[[[0, 1], [0, 1]]]] and count.tolist() == [[[2, 2]]]
    index, count = quern.convert_blocks(lists, 16, 8, 60)  # the ragged last block has one half alone
    assert index[0, 0, 1].tolist()[:6] == [2, 3, 4, 5, 6, 7] and count.tolist() == [[[4, 6]]]
    given = torch.from_numpy(lists)
    opcheck("nsa-list-convert", {"in": given}, {"from": 16, "to": 32, "n": 64, "?k_out": 3}, "out count")
    compiled = torch.compile(quern.convert_blocks, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(given, 16, 8, 60), (index, count)):
        assert np.array_equal(a.numpy(), b)
