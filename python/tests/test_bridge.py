# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.compat.bridge against the golden vectors, bit for bit."""

import pytest

torch = pytest.importorskip("torch")

from quern.compat import bridge  # noqa: E402

INPUTS = (
    "gauss_s1",
    "gauss_s3",
    "laplace_s1",
    "laplace_s3",
    "wide_s1",
    "wide_s3",
    "wide_s4",
    "zero_blocks_s1",
    "all_zero_s3",
    "all_negzero_s3",
    "ties_s5",
    "negative_tiny_s1",
    "max_s3",
    "all_equal_s3",
    "tiny_amax_s3",
    "gauss_bf16_s2",
)
PROFILES = {"seed": "halfstep", "rne": "rne", "modelopt": "modelopt", "ct": "compressed_tensors"}


def same(codes, scales, file, profile, name):
    assert codes.dtype == torch.float4_e2m1fn_x2 and scales.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.view(torch.uint8), file.torch(f"{profile}.codes.{name}"))
    assert torch.equal(scales.view(torch.uint8), file.torch(f"{profile}.scales.{name}"))


# ModelOpt divides 0 by 0 there: it has no vector.
CASES = [
    (profile, name)
    for profile in PROFILES
    for name in INPUTS
    if profile != "modelopt" or name not in ("all_zero_s3", "all_negzero_s3")
]


@pytest.mark.parametrize("profile,name", CASES)
def test_quantize(golden, monkeypatch, profile, name):
    file = golden("nvfp4_quant")
    x, scale = file.torch(f"in.{name}", f"{profile}.gscale.{name}")
    assert bridge.PROFILE == "halfstep"
    monkeypatch.setattr(bridge, "PROFILE", PROFILES[profile])
    codes, scales, got = bridge.quantize_to_nvfp4(x)
    same(codes, scales, file, profile, name)
    assert torch.equal(got, scale)
    same(*bridge.quantize_activation_nvfp4(x, scale), file, profile, name)
    same(*bridge.quantize_activation_nvfp4(x, scale.expand(x.shape[:-1]).contiguous()), file, profile, name)
    same(*bridge.quantize_activation_nvfp4(x, float(scale)), file, profile, name)


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_quantize_weight(golden, name):
    file = golden("nvfp4_weights_scales")
    codes, scales, scale = bridge.quantize_weight_to_nvfp4(file.torch(f"in.{name}"))
    same(codes, scales, file, "seed", name)
    assert torch.equal(scale, file.torch(f"seed.gscale.{name}"))
    one = bridge.assemble_scales_3d_side([scales])[0]
    assert torch.equal(one.view(torch.uint8), file.torch(f"seed.scales_swizzled.{name}"))


def test_assembly(golden):
    file = golden("nvfp4_weights_scales")
    raw, tokens = file.torch("asm.raw2d", "asm.tokens_per_expert")
    side = bridge.assemble_scales_2d_side(raw.split(tokens.tolist()))
    assert torch.equal(side.view(torch.uint8), file.torch("asm.assembled2d"))
    side = bridge.assemble_scales_3d_side(list(file.torch("asm.raw3d").view(torch.float8_e4m3fn)))
    assert torch.equal(side.view(torch.uint8), file.torch("asm.assembled3d"))
    offsets = bridge.compute_expert_offsets(tokens, 4, device="cpu")
    assert offsets.dtype == torch.int32 and offsets.tolist() == [5, 5, 135, 199]
    assert bridge.compute_expert_offsets(tokens.tolist(), 4, "cpu").tolist() == [5, 5, 135, 199]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float4_e2m1fn_x2]
)
def test_interleave(dtype):
    column = torch.arange(48).repeat(2, 3, 1)
    weights = column.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else column.to(dtype)
    runs = bridge.interleave_l1_weights(weights)
    assert runs.dtype == dtype
    plain = runs.view(torch.uint8) if dtype.itemsize == 1 else runs
    assert plain[1, 2].int().tolist() == [
        *range(8),
        *range(24, 32),
        *range(8, 16),
        *range(32, 40),
        *range(16, 24),
        *range(40, 48),
    ]
    back = bridge.deinterleave_l1_weights(runs)
    assert torch.equal(*(t.view(torch.uint8) for t in (back, weights)))
    assert bridge.interleave_l1_weights(weights, 16).shape == (2, 3, 64)


def test_make_b_k_major():
    codes = torch.randint(0, 256, (3, 8, 5), dtype=torch.uint8)
    for b in (codes, codes.view(torch.float4_e2m1fn_x2)):
        major = bridge.make_b_k_major(b)
        assert major.dtype == b.dtype and major.shape == b.shape and major.stride() == (40, 1, 8)
        assert torch.equal(major.view(torch.uint8), codes)


def test_deinterleave_quantize(golden):
    """What stands in the gate columns is quantised as quantize_activation_nvfp4 does, whatever the up columns
    hold."""
    torch.manual_seed(0)
    gate = torch.randn(37, 64, dtype=torch.bfloat16)
    fused = bridge.interleave_l1_weights(torch.cat((gate, torch.full_like(gate, torch.nan)), 1)[None])[0]
    scale = torch.tensor(0.002)
    expected = bridge.quantize_activation_nvfp4(gate, scale)
    got = bridge.deinterleave_quantize_nvfp4_cuda(fused, 64, scale)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_sentences():
    x = torch.ones(4, 32)
    assert bridge.ceil_div(7, 2) == 4 and bridge.round_up(7, 4) == 8
    with pytest.raises(ValueError, match="block_size 32: 16 is accepted"):
        bridge.quantize_to_nvfp4(x, 32)
    with pytest.raises(ValueError, match="finite"):
        bridge.quantize_to_nvfp4(x / 0)
    with pytest.raises(ValueError, match="global"):
        bridge.quantize_activation_nvfp4(x, 0.0)
    with pytest.raises(ValueError, match="32 columns: 128"):
        bridge.deinterleave_quantize_nvfp4_cuda(x, 64, torch.tensor(1.0))
    with pytest.raises(ValueError, match="granularity"):
        bridge.interleave_l1_weights(x, 0)
    with pytest.raises(ValueError, match="a multiple of 16"):
        bridge.quantize_weight_to_nvfp4(torch.ones(20, 4))
