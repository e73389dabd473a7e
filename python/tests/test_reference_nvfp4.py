# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The quantisers of quern.reference: every profile and choice of scales to the bit; what has gradients."""

import pytest

torch = pytest.importorskip("torch")

from quern import nvfp4, reference  # noqa: E402

CHOICES = [
    (profile, scales)
    for profile in ("rne", "halfstep", "modelopt", "compressed-tensors")
    for scales in ("rne", "four-over-six", "search")
    if profile != "halfstep" or scales == "rne"
]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(*(t.view(torch.uint8) if t.element_size() == 1 else t for t in (a, b)))


def values(*shape, size=1.0, dtype=torch.float32):
    """Of many magnitudes, with ties, zeros, and a block of zeros."""
    x = torch.randn(shape) * torch.exp(2 * torch.randn(shape)) * size
    x.view(-1)[:3] = 0
    x[..., -16:] = 0
    x[0, ..., :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]) * size
    return x.to(dtype)


@pytest.mark.parametrize("profile,scales", CHOICES)
def test_activations(profile, scales):
    torch.manual_seed(1)
    choice = {"profile": profile, "scales": scales}
    for shape in ((7, 64), (3, 2, 37)):
        for size, dtype in ((1.0, torch.float32), (1e-6, torch.bfloat16), (1e30, torch.float32)):
            x = values(*shape, size=size, dtype=dtype)
            for per in ("tensor", "row"):
                made = nvfp4.quantize(x, **choice, global_per=per)
                same(made, reference.nvfp4.quantize(x, **choice, global_per=per))
                back = nvfp4.dequantize(*made, profile=profile, global_per=per, columns=shape[-1])
                exact = reference.nvfp4.dequantize(*made, profile=profile, columns=shape[-1])
                assert exact.dtype == torch.float64 and torch.equal(back, exact.float())
    one = torch.tensor(3e-5)  # too small: scales saturate
    given = {**choice, "global_scale": 1 / one if profile == "compressed_tensors" else one}
    x = values(7, 64)
    same(nvfp4.quantize(x, **given), reference.nvfp4.quantize(x, **given))


@pytest.mark.parametrize("profile,scales", CHOICES)
def test_weights_and_experts(profile, scales):
    torch.manual_seed(2)
    choice = {"profile": profile, "scales": scales}
    w = values(3, 64, 40)
    w[1] = 0
    for per in ("tensor", "expert"):
        made = nvfp4.quantize(w, **choice, weight=True, global_per=per)
        same(made, reference.nvfp4.quantize(w, **choice, weight=True, global_per=per))
        back = nvfp4.dequantize(*made, profile=profile, weight=True, global_per=per)
        assert torch.equal(back, reference.nvfp4.dequantize(*made, profile=profile, weight=True).float())
    x, offsets = values(9, 48), torch.tensor([3, 3, 7], dtype=torch.int32)
    per_expert = {**choice, "global_per": "expert", "offsets": offsets}
    made = nvfp4.quantize(x, **per_expert)
    same(made, reference.nvfp4.quantize(x, **per_expert))
    back = nvfp4.dequantize(*made, profile=profile, global_per="expert", offsets=offsets)
    assert torch.equal(back, reference.nvfp4.dequantize(*made, profile=profile, offsets=offsets).float())


def test_unknown_quantisers():
    for choice in ({"profile": "best"}, {"profile": "halfstep", "scales": "search"}):
        with pytest.raises(ValueError, match="profile"):
            reference.nvfp4.quantize(torch.ones(2, 16), **choice)


def test_gradients():
    """Straight through what is quantised, saturated or not; none for codes, scales and bytes of rows."""
    x = torch.randn(4, 24, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(4, 24, dtype=torch.float64)
    for quantized in (
        reference.nvfp4.straight_through(x),
        reference.nvfp4.straight_through(x, profile="modelopt", global_per="row"),
        reference.nvfp4.straight_through(x, global_scale=torch.tensor(1e-6)),
        reference.nvfp4.int8_rows(x),
        reference.dsv4.stored(x, "fp8"),
    ):
        assert quantized.dtype == torch.float64 and not torch.equal(quantized, x)
        assert torch.equal(torch.autograd.grad(quantized, x, seed)[0], seed)
    rounded = reference.nvfp4.straight_through(x)
    assert torch.equal(rounded.float(), nvfp4.dequantize(*nvfp4.quantize(x.detach().float()), columns=24))
    assert not any(t.requires_grad for t in reference.nvfp4.quantize(x))
    assert not reference.dsv4.store(x, "fp8").requires_grad
    runs = reference.nvfp4.interleave(x)
    assert torch.equal(torch.autograd.grad(runs, x, runs.detach())[0], x)


@pytest.mark.parametrize("a", ["floats", "int8", "fp8"])
def test_gradient_of_a_product(near, a):
    codes, scales, one = nvfp4.quantize(torch.randn(3, 64, 32), weight=True, global_per="expert")
    offsets = torch.tensor([4, 4, 9], dtype=torch.int32)
    more = {"b_global": one, "activation": "swiglu", "a8": "none" if a == "floats" else a}
    x = torch.randn(10, 64, requires_grad=True)
    got = nvfp4.grouped_mm(x, codes, scales, offsets, **more)
    wide = x.detach().double().requires_grad_()
    want = reference.nvfp4.gemm(wide, codes, scales, offsets, **more)
    near(got, want, 2e-6)
    d_c = torch.randn_like(want)
    near(torch.autograd.grad(got, x, d_c.float())[0], torch.autograd.grad(want, wide, d_c)[0], 1e-5)
