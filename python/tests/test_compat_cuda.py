# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.compat on a GPU: mslk's functions against the CPU's, and what the GPU lacks."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import quern  # noqa: E402
from quern import reference  # noqa: E402
from quern.compat import bridge, csa, mslk  # noqa: E402

try:
    quern.attention(*(torch.zeros(1, 1, 1, 64, device="cuda") for _ in range(3)))
except NotImplementedError as error:
    pytest.skip(f"the package has no GPU backend: {error}", allow_module_level=True)

# Relative L2 errors of outputs and gradients.
BOUNDS = {torch.bfloat16: (4e-3, 1e-2), torch.float16: (1e-3, 2.5e-3)}
BLOCK = 64
LENGTHS = [300, 0, 1, 517, 40]
CU = torch.tensor([0, 300, 300, 301, 818, 858], dtype=torch.int32)


def cuda(*tensors):
    return [None if t is None else t.detach().cuda() for t in tensors]


def inputs(dtype=torch.bfloat16, n=700, lead=(2,)):
    """Keys of a block have much in common, so that no rounding changes which blocks are chosen."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(*lead, n, heads, 64) for heads in (4, 2, 2))
    common = torch.randn(*lead, -(-n // BLOCK), 2, 64).repeat_interleave(BLOCK, -3)[..., :n, :, :]
    weights = [torch.randn(2, 64, 64) / 8, torch.randn(2, 64, 64) / 8, torch.randn(4, 3, 64) / 4]
    return [t.to(dtype) for t in (q, k + 2 * common, v, *weights)]


def test_compress(near):
    k, v, w_k, w_v = inputs()[1:5]
    made = mslk.compress_kv(*cuda(k, v), BLOCK, *cuda(w_k, w_v))
    for a, b in zip(made, mslk.compress_kv(k, v, BLOCK, w_k, w_v)):
        assert a.is_cuda and a.dtype == torch.bfloat16
        near(a.cpu(), b, 8e-3)
    k, v, w_k, w_v = inputs(n=858, lead=())[1:5]
    want = mslk.fused_compress_kv(k, v, BLOCK, w_k, w_v, CU, max(LENGTHS))
    got = mslk.fused_compress_kv(*cuda(k, v), BLOCK, *cuda(w_k, w_v, CU), max(LENGTHS))
    d_k, d_v = (torch.randn(t.shape).bfloat16() for t in want)
    for a, b in zip(got, want):
        near(a.cpu(), b, 8e-3)
    want = mslk.fused_compress_kv_backward(d_k, d_v, k, v, BLOCK, w_k, w_v, CU)
    got = mslk.fused_compress_kv_backward(*cuda(d_k, d_v, k, v), BLOCK, *cuda(w_k, w_v, CU))
    for a, b in zip(got, want):
        assert a.dtype == torch.bfloat16
        near(a.cpu(), b, 2e-2)


@pytest.mark.parametrize("causal", [True, False])
def test_select(causal):
    q, k, v = inputs()[:3]
    k_cmp, _ = mslk.compress_kv(k, v, BLOCK)
    for selected in (3, 99):
        want = mslk.score_and_select_blocks(q, k_cmp, selected, BLOCK, causal)
        got = mslk.score_and_select_blocks(*cuda(q, k_cmp), selected, BLOCK, causal)
        assert got.is_cuda and torch.equal(got.cpu(), want)
    q, k, v = inputs(n=858, lead=())[:3]
    k_cmp, _ = mslk.fused_compress_kv(k, v, BLOCK, cu_seqlens=CU)
    want = mslk.fused_score_and_select_blocks(q, k_cmp, 3, BLOCK, causal, cu_seqlens=CU)
    got = mslk.fused_score_and_select_blocks(*cuda(q, k_cmp), 3, BLOCK, causal, cu_seqlens=CU.cuda())
    assert torch.equal(got.cpu(), want)
    for seqlen_k in (None, 517):
        plain = mslk.build_fa4_block_sparse_tensors(want, BLOCK, seqlen_k=seqlen_k)
        made = mslk.build_fa4_block_sparse_tensors(got, BLOCK, seqlen_k=seqlen_k)
        assert made.block_size == plain.block_size
        for a, b in zip(made[:4], plain[:4]):
            assert a.is_cuda and torch.equal(a.cpu(), b)


def test_gates(near):
    q, *_, gate = inputs()
    branches = [torch.randn(2, 700, 4, 64).bfloat16() for _ in range(3)]
    d_o = torch.randn(2, 700, 4, 64).bfloat16()
    gates = mslk.compute_gates(q, gate)
    near(mslk.compute_gates(*cuda(q, gate)).cpu(), gates, 1e-4)
    want = mslk.gate_and_combine(*branches, gates)
    near(mslk.gate_and_combine(*cuda(*branches, gates)).cpu(), want, 8e-3)
    for a, b in zip(mslk.fused_gate_and_combine(*cuda(q, *branches, gate)), (want, gates)):
        near(a.cpu(), b, 8e-3)
    third = sum(t.float() for t in branches) / 3
    near(mslk.fused_gate_and_combine(*cuda(q, *branches))[0].cpu(), third, 8e-3)
    want = mslk.fused_gating_backward(q, d_o, *branches, gates, gate)
    got = mslk.fused_gating_backward(*cuda(q, d_o, *branches, gates, gate))
    for a, b in zip(got, want):
        assert a.dtype == torch.bfloat16
        near(a.cpu(), b, 2e-2)


def both(near, got, leaves, want, wide, bounds):
    near(got.cpu(), want, 2 * bounds[0])
    d_o = torch.randn(got.shape).to(got.dtype)
    grads = torch.autograd.grad(want, wide, d_o.double())
    for a, b in zip(torch.autograd.grad(got, leaves, d_o.cuda()), grads):
        near(a.cpu(), b, 2 * bounds[1])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("causal", [True, False])
def test_nsa(near, dtype, causal):
    given = inputs(dtype)
    settings = {"num_selected_blocks": 4, "window_size": 100, "causal": causal}
    names = ("W_k_compress", "W_v_compress", "gate_proj_weight")
    leaves = [t.requires_grad_() for t in cuda(*given)]
    wide = [t.double().requires_grad_() for t in given]
    want = mslk.nsa_forward_reference(*wide[:3], **settings, **dict(zip(names, wide[3:])))
    got = mslk.nsa(*leaves[:3], **settings, **dict(zip(names, leaves[3:])))
    assert got.dtype == dtype
    both(near, got, leaves, want, wide, BOUNDS[dtype])
    forward = mslk.nsa_forward(*leaves[:3], **settings, **dict(zip(names, leaves[3:])))
    near(forward.cpu(), want, 2 * BOUNDS[dtype][0])
    on_gpu = mslk.nsa_forward_reference(*leaves[:3], **settings, **dict(zip(names, leaves[3:])))
    near(on_gpu.cpu(), want, BOUNDS[dtype][0])
    grads = mslk.nsa_backward_reference(*leaves[:3], on_gpu.detach(), **settings)
    assert grads["dQ"].is_cuda and grads["dK"].isfinite().all()


def test_varlen(near):
    given = inputs(n=858, lead=())
    leaves = [t.requires_grad_() for t in cuda(*given[:3])]
    settings = {"num_selected_blocks": 3, "window_size": 100}
    got = mslk.nsa(*leaves, **settings, cu_seqlens=CU.cuda(), max_seqlen=max(LENGTHS))
    wide = [t.double().requires_grad_() for t in given[:3]]
    pieces = zip(*(t[None].split(LENGTHS, 1) for t in wide))
    want = [mslk.nsa_forward_reference(*one, **settings) for one in pieces if one[0].shape[1]]
    both(near, got, leaves, torch.cat(want, 1)[0], wide, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("causal", [True, False])
def test_kernel_rules(near, monkeypatch, causal):
    given = inputs()[:3]
    leaves = [t.requires_grad_() for t in cuda(*given)]
    settings = {"num_selected_blocks": 2, "window_size": 41, "causal": causal}
    monkeypatch.setattr(mslk, "KERNEL_RULES", True)
    k_cmp, _ = mslk.compress_kv(*given[1:], BLOCK)
    chosen = mslk.score_and_select_blocks(given[0], k_cmp, 2, BLOCK, causal)
    wide = [t.double().requires_grad_() for t in given]
    rules = {"block_size": BLOCK, "window": 42, "tile": 256, "causal": causal, "complete": False}
    want = reference.nsa(*wide, **rules, select_block=128, block_idx=chosen * BLOCK // 128)
    both(near, mslk.nsa(*leaves, **settings), leaves, want, wide, BOUNDS[torch.bfloat16])


def test_what_the_gpu_lacks_is_a_sentence():
    x = torch.randn(16, 64, device="cuda")
    for call in (bridge.quantize_to_nvfp4, bridge.quantize_weight_to_nvfp4, bridge.interleave_l1_weights):
        with pytest.raises(NotImplementedError, match="cuda"):
            call(x)
    with pytest.raises(NotImplementedError, match="cuda"):
        bridge.warmup_compilation(2, 32, 64, "cuda")
    proj, bias, table, out = cuda(*(torch.ones(s) for s in ((256, 1024), (128, 512), (300, 64), (2, 512))))
    for stream in (None, 0, torch.cuda.current_stream()):
        with pytest.raises(NotImplementedError, match="cuda"):
            csa.launch_hca_compress_projected(proj, bias, table, out, 2, 0, 0, stream)
    assert (out == 1).all()
