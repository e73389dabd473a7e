# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.compat.mslk against the golden vectors and against float64 references."""

import pytest

torch = pytest.importorskip("torch")

from quern import reference  # noqa: E402
from quern.compat import mslk  # noqa: E402

BOUND = 2e-6
GRADIENT = 1e-5
SHAPE = {"compress_block_size": 32, "num_selected_blocks": 3, "window_size": 64, "q_tile_size": 64}
CASES = {
    "full": ("W_k", "W_v", "gate"),
    "nogate": ("W_k", "W_v"),
    "noproj": ("gate",),
    "noncausal": ("W_k", "W_v", "gate"),
}
KEYWORDS = {"W_k": "W_k_compress", "W_v": "W_v_compress", "gate": "gate_proj_weight"}


def arguments(file, case):
    q, k, v = file.torch("Q", "K", "V")
    weights = {KEYWORDS[name]: file.torch(name) for name in CASES[case]}
    return (q, k, v), {**SHAPE, **weights, "causal": case != "noncausal"}


@pytest.mark.parametrize("case", CASES)
def test_nsa_forward(golden, close, case):
    file = golden("nsa_small")
    inputs, settings = arguments(file, case)
    expected = file.torch(f"{case}.mslk.O")
    close(mslk.nsa_forward(*inputs, **settings), expected, BOUND)
    close(mslk.nsa_forward_reference(*inputs, **settings), expected, BOUND)


@pytest.mark.parametrize("case", CASES)
def test_nsa_gradients(golden, close, case):
    file = golden("nsa_small")
    inputs, settings = arguments(file, case)
    leaves = [t.requires_grad_() for t in (*inputs, *(settings[KEYWORDS[name]] for name in CASES[case]))]
    mslk.nsa(*inputs, **settings).backward(file.torch("dO"))
    names = ["dQ", "dK", "dV", *(f"d{name}" for name in CASES[case])]
    for name, leaf in zip(names, leaves):
        close(leaf.grad, file.torch(f"{case}.mslk.{name}"), GRADIENT)


@pytest.mark.parametrize("case", CASES)
def test_nsa_backward_reference(golden, close, case):
    file = golden("nsa_small")
    inputs, settings = arguments(file, case)
    grads = mslk.nsa_backward_reference(*inputs, file.torch("dO"), **settings)
    for name in ("dQ", "dK", "dV"):
        close(grads[name], file.torch(f"{case}.mslk.{name}"), BOUND)
    for name, keyword in KEYWORDS.items():
        if name in CASES[case]:
            close(grads[f"d{keyword}"], file.torch(f"{case}.mslk.d{name}"), BOUND)
        else:
            assert grads[f"d{keyword}"] is None


@pytest.mark.parametrize("case", ["full", "noproj", "noncausal"])
def test_selected_blocks(golden, case):
    file = golden("nsa_small")
    (q, k, v), settings = arguments(file, case)
    k_cmp, _ = mslk.compress_kv(k, v, 32, settings.get("W_k_compress"), settings.get("W_v_compress"))
    idx = mslk.score_and_select_blocks(q, k_cmp, 3, 32, causal=settings["causal"], q_tile_size=64)
    expected = file.torch(f"{case}.block_idx_sorted")
    assert idx.dtype == torch.int32 and idx.shape == expected.shape
    assert (idx.diff(dim=-1) >= 0).all()
    for got, want in zip(idx.view(-1, 3).tolist(), expected.view(-1, 3).tolist()):
        assert sorted(set(got)) == [block for block in want if block >= 0]
    both, groups = mslk.fused_score_and_select_all(q, k_cmp, 3, 32, causal=settings["causal"], q_tile_size=64)
    assert torch.equal(both, idx) and groups is None
    assert mslk.score_and_select_blocks(q, k_cmp, 99, 32, q_tile_size=64).shape[-1] == 6


@pytest.mark.parametrize("causal", [True, False])
def test_lists_of_more_blocks_than_there_are(causal):
    """Every whole block once, after fillers of the lowest; not the ragged block at the end, which has no
    entry."""
    torch.manual_seed(2)
    q, k = torch.randn(1, 200, 4, 16), torch.randn(1, 200, 2, 16)
    k_cmp, _ = mslk.compress_kv(k, k, 32)
    assert k_cmp.shape[1] == 6
    for selected in (6, 7, 99):
        idx = mslk.score_and_select_blocks(q, k_cmp, selected, 32, causal, 64)
        for tile, blocks in enumerate((2, 4, 6, 6) if causal else (6, 6, 6, 6)):
            want = [0] * (6 - blocks) + list(range(blocks))
            assert idx[0, :, tile].tolist() == [want] * 4
    assert mslk.score_and_select_blocks(q, k_cmp, 0, 32, causal, 64).shape == (1, 4, 4, 0)
    short = mslk.score_and_select_blocks(q[:, :20], k_cmp[:, :0], 3, 32, causal, 64)
    assert short.shape == (1, 4, 1, 0) and short.dtype == torch.int32


def test_weights_gradients_have_the_weights_dtype(golden, close):
    file = golden("nsa_compress_varlen")
    k, v, cu, dk, dv, w_k, w_v = (
        t.bfloat16() if t.is_floating_point() else t
        for t in file.torch("K", "V", "cu_seqlens", "dK_cmp", "dV_cmp", "W_k", "W_v")
    )
    grads = mslk.fused_compress_kv_backward(dk, dv, k, v, 32, w_k, w_v, cu)
    for name, grad in zip(("dK", "dV", "dW_k", "dW_v"), grads):
        assert grad.dtype == torch.bfloat16
        close(grad, file.torch(f"proj.{name}"), 2e-2)
    *_, one, none = mslk.fused_compress_kv_backward(dk, dv, k, v, 32, w_k, None, cu)
    assert torch.equal(one, grads[2]) and none is None
    file = golden("nsa_gating")
    q, a, b, c, w, d_o = (t.bfloat16() for t in file.torch("Q", "O_cmp", "O_slc", "O_sld", "W", "dO"))
    gates = mslk.compute_gates(q, w)
    assert gates.dtype == torch.float32
    grads = mslk.fused_gating_backward(q, d_o, a, b, c, gates, w)
    for name, grad in zip(("dO_cmp", "dO_slc", "dO_sld", "dQ", "dW"), grads):
        assert grad.dtype == torch.bfloat16
        close(grad, file.torch(name), 2e-2)


@pytest.mark.parametrize("projected", [True, False])
def test_compress_varlen(golden, close, projected):
    file = golden("nsa_compress_varlen")
    k, v, cu, dk, dv = file.torch("K", "V", "cu_seqlens", "dK_cmp", "dV_cmp")
    weights = file.torch("W_k", "W_v") if projected else (None, None)
    case = "proj" if projected else "noproj"
    for max_seqlen in (None, 300):
        k_cmp, v_cmp = mslk.fused_compress_kv(k, v, 32, *weights, cu_seqlens=cu, max_seqlen=max_seqlen)
        close(k_cmp, file.torch(f"{case}.K_cmp"), BOUND)
        close(v_cmp, file.torch(f"{case}.V_cmp"), BOUND)
    grads = mslk.fused_compress_kv_backward(dk, dv, k, v, 32, *weights, cu_seqlens=cu)
    for name, grad in zip(("dK", "dV", "dW_k", "dW_v"), grads):
        if grad is None:
            assert not projected
        else:
            close(grad, file.torch(f"{case}.{name}"), GRADIENT)


def test_varlen_is_each_sequence_alone(close):
    torch.manual_seed(1)
    lengths = [100, 64, 0, 300, 31]
    cu = torch.tensor([0, 100, 164, 164, 464, 495], dtype=torch.int32)
    q, k, v = torch.randn(495, 4, 32), torch.randn(495, 2, 32), torch.randn(495, 2, 32)
    gate = torch.randn(4, 3, 32) / 6
    leaves = [t.clone().requires_grad_() for t in (q, k, v, gate)]
    o = mslk.nsa(*leaves[:3], **SHAPE, gate_proj_weight=leaves[3], cu_seqlens=cu)
    d_o = torch.randn_like(o)
    o.backward(d_o)
    d_gate = torch.zeros_like(gate)
    k_cmp, _ = mslk.fused_compress_kv(k, v, 32, cu_seqlens=cu)
    idx = mslk.fused_score_and_select_blocks(q, k_cmp, 3, 32, q_tile_size=64, cu_seqlens=cu)
    assert idx.shape == (5, 4, 5, 3)
    for b, n in enumerate(lengths):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        one = [t[None, rows].clone().requires_grad_() for t in (q, k, v)]
        weight = gate.clone().requires_grad_()
        alone = mslk.nsa(*one, **SHAPE, gate_proj_weight=weight)
        close(o[None, rows], alone, BOUND)
        alone.backward(d_o[None, rows])
        d_gate += weight.grad
        for whole, part in zip(leaves, one):
            close(whole.grad[None, rows], part.grad, BOUND)
        tiles = -(-n // 64)
        assert (idx[b, :, tiles:] == -1).all()
        if n >= 96:
            expected = mslk.score_and_select_blocks(
                one[0], mslk.compress_kv(*one[1:], 32)[0], 3, 32, q_tile_size=64
            )
            assert torch.equal(idx[b, :, :tiles], expected[0])
    close(leaves[3].grad, d_gate, GRADIENT)


def test_gates(golden, close):
    file = golden("nsa_gating")
    q, a, b, c, w, d_o = file.torch("Q", "O_cmp", "O_slc", "O_sld", "W", "dO")
    gates = mslk.compute_gates(q, w)
    close(gates, file.torch("gates"), BOUND)
    close(mslk.gate_and_combine(a, b, c, gates), file.torch("out"), BOUND)
    for fused, expected in zip(mslk.fused_gate_and_combine(q, a, b, c, w), file.torch("out", "gates")):
        close(fused, expected, BOUND)
    third = mslk.compute_gates(q)
    close(mslk.gate_and_combine(a, b, c, third), file.torch("out_nogate"), BOUND)
    close(mslk.fused_gate_and_combine(q, a, b, c)[0], file.torch("out_nogate"), BOUND)
    grads = mslk.fused_gating_backward(q, d_o, a, b, c, gates, w)
    for name, grad in zip(("dO_cmp", "dO_slc", "dO_sld", "dQ", "dW"), grads):
        close(grad, file.torch(name), GRADIENT)
    flat = mslk.fused_gating_backward(*(t[0] for t in (q, d_o, a, b, c, gates)), w)
    for grad, one in zip(grads, flat):
        assert torch.equal(grad.view(one.shape), one)
    without = mslk.fused_gating_backward(q, d_o, a, b, c, third, None)
    close(without[0], d_o / 3, BOUND)
    assert without[3] is None and without[4] is None


def test_block_sparse_tensors():
    lists = torch.tensor([[[[0, 1, 5], [2, -1, -1]]]], dtype=torch.int32)
    made = mslk.build_fa4_block_sparse_tensors(lists, 64, 128, seqlen_k=400)
    assert made.full_block_cnt.tolist() == [[[2, 1]]]
    assert not made.mask_block_cnt.any() and made.mask_block_idx.shape == made.full_block_idx.shape
    assert made.full_block_idx[0, 0].tolist() == [[0, 2, 0], [1, 0, 0]]  # past the count 0
    assert made.block_size == (200, 128)  # queries of a tile, keys of a block
    assert all(t.dtype == torch.int32 for t in made[:4])
    finer = mslk.build_fa4_block_sparse_tensors(lists, 256, 128)
    assert finer.full_block_cnt.tolist() == [[[6, 2]]]
    assert finer.full_block_idx[0, 0, 0].tolist() == [0, 1, 2, 3, 10, 11]


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_kernel_rules(monkeypatch, close, block, causal):
    """W + 1 keys, and the 128-token tiles that hold a chosen block."""
    torch.manual_seed(2)
    inputs = [torch.randn(2, 700, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    settings = {
        "compress_block_size": block,
        "num_selected_blocks": 2,
        "window_size": 41,
        "q_tile_size": 64,
        "causal": causal,
    }
    plain = mslk.nsa_forward(*inputs, **settings)
    monkeypatch.setattr(mslk, "KERNEL_RULES", True)
    k_cmp, _ = mslk.compress_kv(*inputs[1:], block)
    chosen = mslk.score_and_select_blocks(inputs[0], k_cmp, 2, block, causal, 64)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = reference.nsa(
        *wide,
        block_size=block,
        window=42,
        tile=64,
        causal=causal,
        complete=False,
        select_block=128,
        block_idx=chosen * block // 128,
    )
    got = mslk.nsa(*inputs, **settings)
    close(got, expected, BOUND)
    close(mslk.nsa_forward(*inputs, **settings), expected, BOUND)
    assert (got - plain).abs().max() > 0.01
    d_o = torch.randn_like(got)
    got.backward(d_o)
    expected.backward(d_o.double())
    for leaf, wanted in zip(inputs, wide):
        close(leaf.grad, wanted.grad, GRADIENT)


@pytest.mark.parametrize("rules", [False, True])
def test_compile(monkeypatch, close, rules):
    torch.manual_seed(2)
    monkeypatch.setattr(mslk, "KERNEL_RULES", rules)
    given = [torch.randn(1, 200, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    compiled = torch.compile(lambda *t: mslk.nsa(*t, **SHAPE), fullgraph=True, backend="aot_eager")
    got, want = compiled(*given), mslk.nsa(*given, **SHAPE)
    close(got, want, BOUND)
    for a, b in zip(*(torch.autograd.grad(o.sin().sum(), given) for o in (got, want))):
        close(a, b, BOUND)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_kernel_rules_of_varlen_batches(monkeypatch, close, block):
    """Tiles are those of a sequence, not of the batch."""
    torch.manual_seed(5)
    monkeypatch.setattr(mslk, "KERNEL_RULES", True)
    lengths = [300, 0, 1, 517, 40]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    inputs = [torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    settings = {
        "compress_block_size": block,
        "num_selected_blocks": 2,
        "window_size": 41,
        "q_tile_size": 64,
    }
    got = mslk.nsa(*inputs, **settings, cu_seqlens=cu, max_seqlen=max(lengths))
    d_o = torch.randn_like(got)
    found = torch.autograd.grad(got, inputs, d_o)
    for first, last in zip(cu.tolist(), cu.tolist()[1:]):
        if first == last:
            continue
        one = [t.detach()[None, first:last].requires_grad_() for t in inputs]
        want = mslk.nsa(*one, **settings)
        close(got[None, first:last], want, BOUND)
        grads = torch.autograd.grad(want, one, d_o[None, first:last])
        for a, b in zip(found, grads):
            close(a[None, first:last], b, GRADIENT)


def test_compressed_groups(close):
    """With as many groups as there are, nothing changes; with fewer, the lists say which."""
    torch.manual_seed(3)
    inputs = [torch.randn(1, 1200, 2, 16) for _ in range(3)]
    settings = {"compress_block_size": 4, "num_selected_blocks": 4, "window_size": 32, "q_tile_size": 64}
    plain = mslk.nsa_forward(*inputs, **settings)
    close(mslk.nsa_forward(*inputs, **settings, num_cmp_selected_blocks=3), plain, BOUND)
    assert (mslk.nsa_forward(*inputs, **settings, num_cmp_selected_blocks=2) - plain).abs().max() > 1e-3
    k_cmp, _ = mslk.compress_kv(*inputs[1:], 4)
    idx, groups = mslk.fused_score_and_select_all(inputs[0], k_cmp, 4, 4, 2, q_tile_size=64)
    assert idx.shape == (1, 2, 19, 4) and groups.shape == (1, 2, 19, 2)
    assert groups[0, 0, -1].max() == 2
    with pytest.raises(ValueError, match="cmp_n_block_size 64"):
        mslk.fused_score_and_select_all(inputs[0], k_cmp, 4, 4, 2, 64)


def test_references_are_computed_where_the_tensors_are():
    q, k = torch.empty(1, 100, 4, 16, device="meta"), torch.empty(1, 100, 2, 16, device="meta")
    lists = torch.empty(1, 4, 2, 3, dtype=torch.int32, device="meta")
    o = mslk.nsa_forward_reference(q, k, k, **SHAPE, _block_indices=lists)
    assert o.shape == q.shape and o.device == q.device
    grads = mslk.nsa_backward_reference(q, k, k, o, **SHAPE, _block_indices=lists)
    assert grads["dK"].shape == k.shape and grads["dK"].device == q.device


def test_any_layout(close):
    q, k, v = (torch.randn(1, 16, 100, heads).transpose(1, 2).transpose(2, 3) for heads in (4, 2, 2))
    assert q.stride(-1) != 1
    settings = {"compress_block_size": 16, "num_selected_blocks": 2, "window_size": 20, "q_tile_size": 16}
    whole = [t.contiguous() for t in (q, k, v)]
    assert torch.equal(mslk.nsa_forward(q, k, v, **settings), mslk.nsa_forward(*whole, **settings))
    cu = torch.tensor([0, 40, 100], dtype=torch.int32)
    apart = torch.stack((cu, cu), 1)[:, 0]
    assert apart.stride(0) == 2

    def rows(t):
        return t[:8].unflatten(0, (2, 4))

    for find in (
        lambda q, k, v, cu: mslk.nsa_forward(q, k, v, **settings, cu_seqlens=cu),
        lambda q, k, v, cu: mslk.fused_compress_kv(k, v, 16, cu_seqlens=cu)[0],
        lambda q, k, v, cu: mslk.fused_compress_kv_backward(rows(v), rows(v), k, v, 16, cu_seqlens=cu)[0],
        lambda q, k, v, cu: mslk.fused_score_and_select_blocks(q, rows(k), 2, 16, cu_seqlens=cu),
    ):
        assert torch.equal(find(q[0], k[0], v[0], apart), find(*(t[0] for t in whole), cu))


def test_sentences():
    q = torch.randn(1, 64, 4, 16)
    with pytest.raises(ValueError, match="k.shape"):
        mslk.nsa_forward(q, q[..., :8], q[..., :8])
    with pytest.raises(ValueError, match="tile"):
        mslk.nsa_forward(q, q, q, q_tile_size=512)
    with pytest.raises(TypeError, match="one framework"):
        mslk.nsa_forward(q, q.numpy(), q)
