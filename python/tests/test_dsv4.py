# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.dsv4: float64 references with gradients, streaming, opcheck, torch.compile, NumPy."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from quern import _operations as ops  # noqa: E402
from quern import _torch, dsv4, nvfp4  # noqa: E402
from quern.reference import dsv4 as reference  # noqa: E402
from quern.reference import nvfp4 as nvfp4_reference  # noqa: E402

BOUND = 2e-6
GRADIENT = 1e-5


def doubles(tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def both_gradients(near, got, plain, want, wide):
    d_o = torch.randn_like(want)
    grads = torch.autograd.grad(want, wide, d_o)
    for a, b in zip(torch.autograd.grad(got, plain, d_o.to(got.dtype)), grads):
        near(a, b, GRADIENT)


def compressor(kind, tokens=45, width=16, ratio=4, batch=()):
    torch.manual_seed(3)
    columns = (4 if kind == "csa" else 2) * width
    made = [torch.randn(*batch, tokens, columns), torch.randn(ratio, width)]
    made += [torch.randn(ratio, width)] if kind == "csa" else []
    return [t.requires_grad_() for t in made]


@pytest.mark.parametrize("rope_at", ["first", "last"])
@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_compress_against_float64(near, kind, rope_at):
    plain = [*compressor(kind, batch=(2,)), torch.rand(16).requires_grad_()]
    table = dsv4.rope_table(64, 8, like=plain[0])
    more = {"norm_weight": plain[-1], "cos_sin": table, "rope_at": rope_at, "start_abs_pos": 8}
    got, pooled = dsv4.compress(*plain[:-1], **more, return_pooled=True)
    assert got.shape == pooled.shape == (2, 11, 16) and not pooled.requires_grad
    wide = doubles(plain)
    more.update(norm_weight=wide[-1], cos_sin=table.double())
    want = reference.compress(*wide[:-1], **more)
    near(got, want, BOUND)
    both_gradients(near, got, plain, want, wide)


def test_previous_block_and_hidden_states(near):
    """From X, with the block before: dX, dW, dprev_b."""
    torch.manual_seed(0)
    x, w, prev_b = torch.randn(20, 12), torch.randn(12, 64) / 4, torch.randn(4, 32)
    plain = [t.requires_grad_() for t in (x, w, prev_b)] + compressor("csa")[1:]
    wide = doubles(plain)
    got = dsv4.compress(None, *plain[3:], x=plain[0], w=plain[1], prev_b=plain[2])
    want = reference.compress(wide[0] @ wide[1], *wide[3:], prev_b=wide[2])
    near(got, want, BOUND)
    both_gradients(near, got, plain, want, wide)


@pytest.mark.parametrize("hidden", [False, True])
def test_main_and_indexer_in_one_call(near, hidden):
    """The entries of two calls; gradients by float64, also where one result is not used."""
    main, other = compressor("csa", batch=(2,)), compressor("csa", width=8, batch=(2,))
    table = dsv4.rope_table(64, 8, like=main[0])
    plain, more = [*main, *other], {"cos_sin": table, "start_abs_pos": 8}
    if hidden:
        x = torch.randn(2, 45, 12).requires_grad_()
        weights = [(torch.randn(12, 4 * width) / 4).requires_grad_() for width in (16, 8)]
        plain = [weights[0], *main[1:], weights[1], *other[1:], x]

    def pair(w, b_a, b_b, index_w, index_b_a, index_b_b, x=None):
        given = {"index_b_a": index_b_a, "index_b_b": index_b_b, **more}
        if x is None:
            return dsv4.compress(w, b_a, b_b, index_proj=index_w, **given)
        return dsv4.compress(None, b_a, b_b, x=x, w=w, index_w=index_w, **given)

    wide = doubles(plain)
    first, second = wide[:3], wide[3:6]
    if hidden:
        first[0], second[0] = wide[6] @ wide[0], wide[6] @ wide[3]
    more_wide = {**more, "cos_sin": table.double()}
    want = [reference.compress(*t, **more_wide) for t in (first, second)]
    got = pair(*plain)
    for a, b in zip(got, want):
        near(a, b, BOUND)
    d_o = [torch.randn_like(t) for t in want]
    grads = torch.autograd.grad(want, wide, d_o, retain_graph=True)
    for a, b in zip(torch.autograd.grad(got, plain, [t.float() for t in d_o]), grads):
        near(a, b, GRADIENT)
    main_alone = torch.autograd.grad(want[0], first[1:], d_o[0])
    for a, b in zip(torch.autograd.grad(pair(*plain)[0], plain[1:3], d_o[0].float()), main_alone):
        near(a, b, GRADIENT)
    made = dsv4.compress(
        *(t.detach().numpy() for t in main),
        index_proj=other[0].detach().numpy(),
        index_b_a=other[1].detach().numpy(),
        index_b_b=other[2].detach().numpy(),
        index_hadamard=True,
        index_format="fp8",
        return_pooled=True,
    )
    assert [t.shape for t in made] == [(2, 11, 16), (2, 11, 12), (2, 11, 16), (2, 11, 8)]
    assert made[1].dtype == np.uint8


@pytest.mark.parametrize("kind", ["csa", "hca"])
@pytest.mark.parametrize("format", ["fp8", "fp8_power", "nvfp4"])
def test_packed_weights(near, kind, format):
    """The entries of the weight that the bytes stand for; in pieces the same bits; dX."""
    torch.manual_seed(2)
    _, *biases = compressor(kind, width=64)
    plain = torch.randn(144, (4 if kind == "csa" else 2) * 64) / 12
    if format == "nvfp4":
        w = nvfp4.quantize(plain, weight=True)
        exact = nvfp4_reference.dequantize(*w, weight=True)
    else:
        scales = torch.rand(-(-plain.shape[1] // 128), 2) / 8 + 0.01
        if format == "fp8_power":
            scales = scales.log2().round().exp2().to(torch.float8_e8m0fnu)
        w = plain.T.contiguous().mul(8).to(torch.float8_e4m3fn), scales
        wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = (w[0].double() * wide[: plain.shape[1], :144]).T
    x = torch.randn(20, 144, requires_grad=True)
    leaves = [x, *biases]
    wide = doubles(leaves)
    got = dsv4.compress(None, *biases, x=x, w=w)
    want = reference.compress(wide[0] @ exact, *wide[1:])
    near(got, want, BOUND)
    both_gradients(near, got, leaves, want, wide)
    state = dsv4.State(kind, 64, ratio=4, like=x)
    rows, still = x.detach(), [t.detach() for t in biases]
    made = [state.append(None, *still, x=part, w=w) for part in rows.split([3, 9, 8])]
    assert torch.equal(torch.cat(made), got)
    with pytest.raises(ValueError, match="tuple of 1"):
        dsv4.compress(None, *biases, x=x, w=(plain,))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_state_is_one_shot_to_the_bit(kind):
    given = [t.detach() for t in compressor(kind)]
    want = dsv4.compress(*given)
    state = dsv4.State(kind, 16, ratio=4, ring=8, like=given[0])
    made, first = [], 0
    for n in (3, 1, 10, 0, 7, 24):
        rows = given[0][first : first + n]
        made.append(state.append(rows, *given[1:]))
        if n > 3:
            state.rollback(3)
            entries = sum(len(part) for part in made)
            kept = torch.cat(made)[: state.position // 4]
            made = [kept, state.append(rows[-3:], *given[1:])]
            assert sum(len(part) for part in made) == entries
        first += n
    assert state.position == 45 and torch.equal(torch.cat(made), want)


def test_states_fork_save_restore():
    given = compressor("csa")
    proj, biases = given[0].detach(), [t.detach() for t in given[1:]]
    state = dsv4.State("csa", 16, ratio=4, ring=2, like=proj)
    state.append(proj[:18], *biases)
    again = state.restored(state.save())
    other = copy.deepcopy(state)
    want = state.append(proj[18:], *biases)
    assert torch.equal(again.append(proj[18:], *biases), want)
    assert torch.equal(other.append(proj[18:], *biases), want)
    damaged = bytearray(state.save())
    damaged[-1] ^= 1
    with pytest.raises(RuntimeError):
        state.restored(bytes(damaged))
    for saved in (b"", state.save()[:-9], bytes(state.save()[:-4]) + b"1234"):
        with pytest.raises(RuntimeError, match="damaged"):
            state.restored(saved)
    with pytest.raises(RuntimeError, match=r"ratio, width, ring \('csa', 4, 16, 2\)"):
        dsv4.State("csa", 16, ratio=4, ring=3).restored(state.save())
    first, second = (dsv4.State("csa", 16, ratio=4, like=proj) for _ in range(2))
    out = dsv4.append([first, second], [10, 8], proj[:18], *biases)
    alone = torch.cat((dsv4.compress(proj[:10], *biases), dsv4.compress(proj[10:18], *biases)))
    assert torch.equal(out, alone)


@pytest.mark.parametrize("starts", [(0, 0), (4, 4), (8, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_begin_after_a_block(starts, dtype):
    torch.manual_seed(3)
    proj, prev = torch.randn(2, 22, 64).to(getattr(torch, dtype)), torch.randn(2, 4, 32)
    shapes = (4, 16), (4, 16), (16,), (64, 8)
    b_a, b_b, norm, table = (torch.randn(*shape).to(proj.dtype) for shape in shapes)
    prev[0, 1] = -float("inf")
    more = {"norm_weight": norm, "cos_sin": table}
    states = [dsv4.State("csa", 16, ratio=4, ring=3, start_abs_pos=start) for start in starts]
    assert not len(dsv4.append(states, [0, 0], proj[0, :0], b_a, b_b, prev_b=prev, **more))
    for first, n in ((0, 3), (3, 8), (11, 11)):
        for i, state in enumerate(states):
            state.append(proj[i, first : first + n], b_a, b_b, **more)
            held = state.held
            assert held == min(3, first + n) and state.position == starts[i] + first + n
            state.rollback(held)
        rows = proj[:, first + n - held : first + n].reshape(-1, 64)
        dsv4.append(states, [held, held], rows, b_a, b_b, **more)
    for i, state in enumerate(states):
        with pytest.raises(ValueError, match="has begun"):
            state.append(proj[i, :4], b_a, b_b, prev_b=prev[i : i + 1])
        whole = dsv4.State("csa", 16, ratio=4, start_abs_pos=starts[i])
        want = dsv4.compress(proj[i], b_a, b_b, prev_b=prev[i], start_abs_pos=starts[i], **more)
        assert torch.equal(whole.append(proj[i], b_a, b_b, prev_b=prev[i : i + 1], **more), want)
    fresh = [dsv4.State("csa", 16, ratio=4, start_abs_pos=start) for start in starts]
    got, pooled = dsv4.append(
        fresh, [22, 9], torch.cat((proj[0], proj[1, :9])), b_a, b_b, prev_b=prev, return_pooled=True, **more
    )
    alone = [
        dsv4.compress(rows, b_a, b_b, prev_b=prev[i], start_abs_pos=starts[i], **more)
        for i, rows in enumerate((proj[0], proj[1, :9]))
    ]
    assert torch.equal(got, torch.cat(alone)) and pooled.shape == got.shape
    last = dsv4.append(states, [2, 2], proj[:, :2].reshape(-1, 64), b_a, b_b, **more)
    longer = (torch.cat((proj[i], proj[i, :2])) for i in range(2))
    whole = [
        dsv4.compress(rows, b_a, b_b, prev_b=prev[i], start_abs_pos=starts[i], **more)[-1:]
        for i, rows in enumerate(longer)
    ]
    assert torch.equal(last, torch.cat(whole))


def test_appends_that_are_refused_change_no_state():
    proj, *biases = (t.detach() for t in compressor("csa"))
    pair = [dsv4.State("csa", 16, ratio=4, format="fp8") for _ in range(2)]
    dsv4.append(pair, [5, 6], proj[:11], *biases)
    saved = [state.save() for state in pair]
    bad = proj[:8].clone()
    bad[4, 3] = float("nan")  # of the second state
    for counts, rows, word in (
        ([4, 4], bad, "nan|NaN|column"),
        ([4, 3], bad, "8 in all"),
        ([9, -1], bad, "8 in all"),
        ([8], bad, "of 2 states"),
    ):
        with pytest.raises(ValueError, match=word):
            dsv4.append(pair, counts, rows, *biases)
    with pytest.raises(ValueError, match="given twice"):
        dsv4.append([pair[0]] * 2, [4, 4], proj[:8], *biases)
    with pytest.raises(ValueError, match="kind, ratio, width, ring"):
        dsv4.append([pair[0], dsv4.State("csa", 16, ratio=4, ring=1)], [4, 4], proj[:8], *biases)
    with pytest.raises(ValueError, match="ring is 9"):
        dsv4.State("csa", 16, ratio=4, ring=9)
    assert saved == [state.save() for state in pair]


@pytest.mark.parametrize("format,row", [("fp8", 36), ("fp4", 17), ("fp8_power", 36)])
def test_formats(format, row):
    proj, *biases = (t.detach().numpy() for t in compressor("csa", width=32))
    rows = dsv4.compress(proj, *biases, format=format)
    assert rows.dtype == np.uint8 and rows.shape == (11, row)
    state = dsv4.State("csa", 32, ratio=4, format=format)
    assert np.array_equal(state.append(proj, *biases), rows)
    cache = np.zeros((20, row), np.uint8)
    dsv4.store(dsv4.compress(proj, *biases), np.arange(11, dtype=np.int32), cache, format=format)
    assert np.array_equal(cache[:11], rows) and not cache[11:].any()


def indexer(heads=16):
    torch.manual_seed(9)
    return torch.randn(2, 40, heads, 32), torch.randn(2, 12, 32), torch.randn(2, 40, heads)


def test_index_against_float64(near):
    q, k, w = indexer()
    idx, count, scores = dsv4.index(q, k, w, top_k=5, start_abs_pos=10, return_scores=True)
    want, exact = reference.index(q.double(), k.double(), w.double(), top_k=5, start_abs_pos=10)
    assert torch.equal(idx, want) and torch.equal(count, (want >= 0).sum(-1).int())
    assert torch.equal(scores.isneginf(), exact.isneginf())
    near(scores[~exact.isneginf()], exact[~exact.isneginf()], BOUND)
    plain = dsv4.index(*(t.numpy() for t in (q, k, w)), top_k=5, start_abs_pos=10)
    assert np.array_equal(plain[0], idx.numpy())


def core(tokens=40, keys=None):
    torch.manual_seed(4)
    made = torch.randn(2, tokens, 4, 32), torch.randn(2, keys or tokens, 32), torch.randn(2, 10, 32)
    return [t.requires_grad_() for t in (*made, torch.randn(4))]


@pytest.mark.parametrize("listed", [False, True])
def test_attention_against_float64(near, listed):
    plain = core()
    table = dsv4.rope_table(64, 8, like=plain[0])
    idx = dsv4.index(*indexer(), top_k=3)[0] if listed else None
    more = {"idx": idx, "ratio": 4, "window": 6}
    wide = doubles(plain)
    got, lse = dsv4.attention(*plain[:3], sink=plain[3], cos_sin=table, **more, return_lse=True)
    want = reference.attention(*wide[:3], sink=wide[3], cos_sin=table.double(), **more)
    assert lse.shape == (2, 4, 40) and not lse.requires_grad
    near(got, want, BOUND)
    both_gradients(near, got, plain, want, wide)


def test_later_queries_of_longer_caches(near):
    q, kv, kv_cmp, sink = (t.detach() for t in core(tokens=7, keys=40))
    got = dsv4.attention(q, kv, kv_cmp, ratio=4, window=6, sink=sink)
    want = reference.attention(
        q.double(), kv.double(), kv_cmp.double(), ratio=4, window=6, sink=sink.double()
    )
    near(got, want, BOUND)


def opcheck(name, tensors, settings, results):
    operator = _torch.OPERATORS[name]
    arguments = [tensors.get(field) for field in operator.inputs]
    torch.library.opcheck(operator.call, (*arguments, ops.lines(tuple(settings.items())), results))


def test_opcheck():
    for kind in ("csa", "hca"):
        tensors = dict(zip(("proj", "b_a", "b_b"), compressor(kind)))
        opcheck(f"{kind}-compress", tensors, {"ratio": 4}, "out pooled")
    tensors = dict(zip(("proj", "b_a", "b_b"), compressor("csa")))
    tensors.update(zip(("index_proj", "index_b_a", "index_b_b"), compressor("csa", width=8)))
    opcheck("csa-compress", tensors, {"ratio": 4}, "out index_out")
    opcheck("v4-index", dict(zip("qkw", indexer())), {"top_k": 5}, "idx count scores")
    tensors = dict(zip(("q", "kv", "kv_cmp", "sink"), core()))
    opcheck("v4-attention", tensors, {"ratio": 4, "window": 6}, "o lse lse_win")


def test_compile(near):
    proj, b_a, b_b = compressor("csa", tokens=40, width=32, batch=(2,))
    q, kv, _, sink = core()
    kv.requires_grad_()

    def layer(proj, q, kv, sink):
        entries = dsv4.compress(proj, b_a, b_b)
        idx = dsv4.index(q, entries, q.sum(-1), top_k=3)[0]
        return dsv4.attention(q, kv, entries, idx, sink=sink, window=6)

    given = (proj, q, kv, sink)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got, want = compiled(*given), layer(*given)
    near(got, want, BOUND)
    for a, b in zip(torch.autograd.grad(got.sum(), given), torch.autograd.grad(want.sum(), given)):
        near(a, b, BOUND)


def test_weights_and_tables():
    parts = [torch.randn(12, 16) for _ in range(4)]
    assert torch.equal(dsv4.pack_weights(*parts), torch.cat(parts, 1))
    assert torch.equal(dsv4.pack_weights(*parts[:2]), torch.cat(parts[:2], 1))
    wkv, wgate, ape = torch.randn(32, 12), torch.randn(32, 12), torch.randn(4, 32)
    w, b_a, b_b = dsv4.pack_checkpoint(wkv, wgate, ape)
    assert torch.equal(w, torch.cat((wkv[16:], wgate[16:], wkv[:16], wgate[:16])).T)
    assert torch.equal(b_a, ape[:, 16:]) and torch.equal(b_b, ape[:, :16])
    table = dsv4.rope_table(100, 8)
    angle = np.arange(100)[:, None] / 10000.0 ** (np.arange(4) / 4)
    assert np.abs(table - np.concatenate((np.cos(angle), np.sin(angle)), 1)).max() < 1e-5


def test_sentences():
    proj, b_a, b_b = (t.detach() for t in compressor("csa"))
    with pytest.raises(ValueError, match="start_token"):
        dsv4.compress(proj, b_a, b_b, start_token=99)
    with pytest.raises(ValueError, match="index_proj"):
        dsv4.compress(proj, b_a, b_b, index_b_a=b_a, index_b_b=b_b)
    for given in (proj[:, :32], proj[:, :32].numpy()):
        with pytest.raises(ValueError, match="indexer"):
            like = b_a if isinstance(given, torch.Tensor) else b_a.numpy()
            dsv4.compress(given, like, index_proj=given, index_b_a=like)
    with pytest.raises(ValueError, match="kind"):
        dsv4.State("mla", 16)
    with pytest.raises(ValueError, match="top_k"):
        dsv4.index(*indexer(), top_k=5000)
    state = dsv4.State("csa", 16, ratio=4, like=proj)
    state.append(proj[:6], b_a, b_b)
    with pytest.raises(ValueError, match="rollback|n is"):
        state.rollback(1)
    with pytest.raises(ValueError, match="no gradient"):
        state.append(proj.clone().requires_grad_(), b_a, b_b)
