# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.attention for torch: values, gradients, torch.library, torch.compile."""

import math

import pytest

torch = pytest.importorskip("torch")

import quern  # noqa: E402
from quern import reference  # noqa: E402

CASES = {
    "causal": {},
    "window": {"window": 17},
    "all": {"causal": False},
    "band": {"causal": False, "window": 9, "scale": 0.3},
    "offset": {"query_offset": 5},
}


def inputs(dtype=torch.float32, nq=70, nkv=90):
    torch.manual_seed(0)
    shapes = ((2, nq, 6, 32), (2, nkv, 2, 32), (2, nkv, 2, 16))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def seen(nq, nkv, causal=True, window=0, query_offset=None, scale=None):
    q = torch.arange(nq)[:, None] + (nkv - nq if query_offset is None else query_offset)
    key = torch.arange(nkv)[None, :]
    if causal:
        return (key <= q) & (key > q - window) if window else key <= q
    near = (q - key).abs() <= window // 2 if window else torch.ones(nq, nkv, dtype=torch.bool)
    return near & (q >= 0)  # a query before position 0 sees nothing


# Relative L2 errors of the output and of the gradients.
BOUNDS = {torch.float32: (2e-6, 1e-5), torch.bfloat16: (4e-3, 1e-2), torch.float16: (1e-3, 2.5e-3)}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES)
def test_against_float64(near, case, dtype):
    given = inputs(dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    o = quern.attention(*given, **CASES[case])
    expected = reference.masked_attention(*wide, seen(70, 90, **CASES[case]), CASES[case].get("scale"))
    assert o.dtype == dtype
    near(o, expected, BOUNDS[dtype][0])
    d_o = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, wide, d_o.double())
    for got, want in zip(torch.autograd.grad(o, given, d_o), wanted):
        assert got.dtype == dtype
        near(got, want, BOUNDS[dtype][1])


def test_lse_and_rows_without_keys(close):
    q, k, v = (t.detach() for t in inputs(nq=20, nkv=12))
    o, lse = quern.attention(q, k, v, return_lse=True)
    scores = torch.einsum("bnhd,bshd->bhns", q, k.repeat_interleave(3, 2)) / math.sqrt(32)
    close(lse, scores.masked_fill(~seen(20, 12), -math.inf).logsumexp(-1), 1e-5)
    assert not o[:, :8].any() and lse[:, :, :8].isneginf().all()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_sinks_and_keys_that_exist(near, dtype):
    given = inputs(dtype)
    sink = torch.tensor([0.5, -1, 3, 30, -2, 0], requires_grad=True)
    settings = {"kv_first": torch.tensor([0, 31]), "kv_count": torch.tensor([90, 84], dtype=torch.int32)}
    wide = [t.detach().double().requires_grad_() for t in (*given, sink)]
    o = quern.attention(*given, sink=sink, window=40, **settings)
    expected = reference.attention(*wide[:3], sink=wide[3], window=40, **settings)
    near(o, expected, BOUNDS[dtype][0])
    d_o = torch.randn_like(o)
    wanted = torch.autograd.grad(expected, wide, d_o.double())
    for got, want, of in zip(torch.autograd.grad(o, (*given, sink), d_o), wanted, (*given, sink)):
        assert got.dtype == of.dtype
        near(got, want, BOUNDS[dtype][1])
    with pytest.raises(ValueError, match=r"kv_first\[1\] is 85"):
        quern.attention(*given, kv_first=torch.tensor([0, 85]), kv_count=settings["kv_count"])


def test_varlen_is_each_sequence_alone(close):
    torch.manual_seed(1)
    cu = torch.tensor([0, 40, 40, 103], dtype=torch.int32)
    packed = [torch.randn(103, heads, 32, requires_grad=True) for heads in (4, 2, 2)]
    o = quern.attention(*packed, cu_seqlens_q=cu)
    for b in range(3):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        close(o[None, rows], quern.attention(*(t[None, rows] for t in packed)), 1e-6)


def test_opcheck():
    none, settings = (None,) * 3, ("window=5\n", "o lse")
    operator = torch.ops.quern.attention.default
    torch.library.opcheck(operator, (*inputs(nq=8, nkv=8), None, None, *none, *settings))
    sink, some = torch.randn(6, requires_grad=True), torch.tensor([2, 5], dtype=torch.int32)
    torch.library.opcheck(operator, (*inputs(nq=8, nkv=8), None, None, sink, some, None, *settings))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = [t.detach()[0].requires_grad_() for t in inputs(nq=8, nkv=8)]
    torch.library.opcheck(operator, (*packed, cu, None, *none, *settings))
    plain = [t.detach() for t in inputs(nq=8, nkv=8)]
    outs = torch.empty_like(quern.attention(*plain)), None
    written = torch.ops.quern.attention_out.default
    torch.library.opcheck(written, (*plain, None, None, *none, settings[0], *outs))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(close, backend):
    given = inputs()
    compiled = torch.compile(lambda *t: quern.attention(*t, window=20).sin(), fullgraph=True, backend=backend)
    got, want = compiled(*given), quern.attention(*given, window=20).sin()
    close(got, want, 1e-6)
    for a, b in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        close(a, b, 1e-6)


def test_any_layout(close):
    q, k, v = (t.detach() for t in inputs())
    odd = [t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for t in (q, k, v)]
    assert odd[0].stride(-1) != 1
    assert torch.equal(quern.attention(*odd), quern.attention(q, k, v))


def test_sentences():
    q, k, v = (t.detach() for t in inputs())
    with pytest.raises(ValueError, match="k.shape"):
        quern.attention(q, k[..., :24], v)
    with pytest.raises(ValueError, match="bf16"):
        quern.attention(q, k.bfloat16(), v)
    with pytest.raises(ValueError, match="window"):
        quern.attention(q, k, v, window=-1)
    with pytest.raises(TypeError, match="one framework"):
        quern.attention(q, k.numpy(), v)


def test_given_results():
    """The same bits with every setting, whatever is a tensor, with and without gradients in force."""
    q, k, v = (t.detach() for t in inputs(nkv=70))
    out = torch.empty(2, 70, 6, 16)
    for settings in (*CASES.values(), *CASES.values()):
        assert quern.attention(q, k, v, out=out.fill_(math.nan), **settings) is out
        assert torch.equal(out, quern.attention(q, k, v, **settings))
    want = quern.attention(q, k, v)
    ends = torch.tensor([0, 70, 140], dtype=torch.int32)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    for keys in (None, ends):
        quern.attention(*packed, cu_seqlens_q=ends, cu_seqlens_kv=keys, out=out.zero_().flatten(0, 1))
        assert torch.equal(out, want)
    weight = torch.nn.Parameter(q)
    with pytest.raises(ValueError, match="no gradient"):
        quern.attention(weight, k, v, out=out)
    with torch.no_grad():
        quern.attention(weight, k.clone().requires_grad_(), v, out=out.zero_())
        assert torch.equal(out, want)
        made, lse = quern.attention(q, k, v, out=out.zero_(), return_lse=True)
    assert made is out and torch.equal(out, want) and lse.shape == (2, 6, 70)
    for other in (k.numpy(), k.tolist(), "k"):
        with pytest.raises(TypeError, match="^k is "):
            quern.attention(q, other, v, out=out)
