# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""quern.nvfp4 against the golden vectors, with NumPy and with torch."""

import numpy as np
import pytest

from quern import nvfp4

PROFILES = {"seed": "halfstep", "rne": "rne", "modelopt": "modelopt", "ct": "compressed_tensors"}
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def e4m3(scales):
    """E4M3 bytes as f32."""
    exponent, mantissa = scales >> 3, scales & 7
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


def values(codes, scales, scale, along=-1):
    """code · scale · global in f32, each product rounded."""
    nibbles = (
        np.stack((codes & 15, codes >> 4), -1)
        if along == -1
        else np.stack((codes & 15, codes >> 4), along + 1)
    )
    shape = list(codes.shape)
    shape[along] *= 2
    nibbles = nibbles.reshape(shape)
    signed = CODES[nibbles & 7] * np.where(nibbles >> 3, np.float32(-1), np.float32(1))
    return signed * np.repeat(e4m3(scales), 16, along) * np.float32(scale)


@pytest.mark.parametrize("name", ["gauss_s1", "wide_s3", "zero_blocks_s1", "ties_s5", "max_s3"])
@pytest.mark.parametrize("profile", PROFILES)
def test_numpy(golden, profile, name):
    file = golden("nvfp4_quant")
    codes, scales, scale = nvfp4.quantize(file[f"in.{name}"], profile=PROFILES[profile])
    assert np.array_equal(codes, file[f"{profile}.codes.{name}"])
    assert np.array_equal(scales, file[f"{profile}.scales.{name}"])
    assert scale == file[f"{profile}.gscale.{name}"]
    back = nvfp4.dequantize(codes, scales, scale, profile=PROFILES[profile])
    if profile != "ct":
        assert np.array_equal(back, values(codes, scales, scale))
    again = nvfp4.quantize(file[f"in.{name}"], profile=PROFILES[profile], global_scale=scale)
    assert np.array_equal(again[0], codes)


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_torch_weights(golden, name):
    torch = pytest.importorskip("torch")
    file = golden("nvfp4_weights_scales")
    codes, scales, scale = nvfp4.quantize(file.torch(f"in.{name}"), profile="halfstep", weight=True)
    assert codes.dtype == torch.float4_e2m1fn_x2 and scales.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.view(torch.uint8), file.torch(f"seed.codes.{name}"))
    assert torch.equal(scales.view(torch.uint8), file.torch(f"seed.scales.{name}"))
    back = nvfp4.dequantize(codes, scales, scale, weight=True)
    plain = [t.view(torch.uint8).numpy() for t in (codes, scales)]
    assert np.array_equal(back.numpy(), values(*plain, float(scale), 0))
    half = torch.empty_like(back, dtype=torch.bfloat16)
    assert nvfp4.dequantize(codes, scales, scale, weight=True, out=half) is half
    assert torch.equal(half, back.bfloat16())


def test_columns_that_are_no_whole_blocks():
    x = np.random.default_rng(0).standard_normal((3, 21)).astype(np.float32)
    codes, scales, scale = nvfp4.quantize(x, global_per="row")
    assert codes.shape == (3, 16) and scales.shape == (3, 2) and scale.shape == (3,)
    back = nvfp4.dequantize(codes, scales, scale, global_per="row", columns=21)
    assert back.shape == x.shape and np.abs(back - x).max() < 0.5


@pytest.mark.parametrize("quantized", [False, True])
def test_grouped_mm(quantized):
    random = np.random.default_rng(1)
    offsets = np.array([4, 4, 9], np.int32)
    a = random.standard_normal((10, 64)).astype(np.float32)
    codes, scales, scale = nvfp4.quantize(random.standard_normal((3, 64, 32)).astype(np.float32), weight=True)
    bias = random.standard_normal((3, 32)).astype(np.float32)
    extra = {}
    given = a
    if quantized:
        given, extra["a_scales"], extra["a_global"] = nvfp4.quantize(a)
        a = nvfp4.dequantize(given, extra["a_scales"], extra["a_global"])
    got = nvfp4.grouped_mm(given, codes, scales, offsets, b_global=scale, bias=bias, **extra)
    b = values(codes, scales, scale, 1).astype(np.float64)
    assert got.dtype == np.float32 and got.shape == (10, 32) and not got[9].any()
    for e, rows in enumerate((slice(0, 4), slice(4, 4), slice(4, 9))):
        exact, size = (
            a[rows].astype(np.float64) @ b[e] + bias[e],
            np.abs(a[rows]) @ np.abs(b[e]) + np.abs(bias[e]),
        )
        assert (np.abs(got[rows] - exact) <= (64 + 8) * 2.0**-24 * size + 2.0**-24 * np.abs(exact)).all()


def test_layouts_and_outputs_of_grouped_mm():
    """The same bits whatever the layout; sums and codes of the plain result."""
    random = np.random.default_rng(2)
    offsets, tokens = np.array([4, 4, 9], np.int32), np.array([4, 0, 5], np.int32)
    a, a_scales, a_global = nvfp4.quantize(random.standard_normal((9, 128)).astype(np.float32))
    b, b_scales, b_global = nvfp4.quantize(
        random.standard_normal((3, 128, 64)).astype(np.float32), weight=True
    )
    globals = {"a_global": a_global, "b_global": b_global}
    want = nvfp4.grouped_mm(a, b, b_scales, offsets, a_scales=a_scales, **globals)
    swizzled, starts = nvfp4.swizzle(a_scales, tokens_per_expert=tokens)
    turned = [np.ascontiguousarray(t.transpose(0, 2, 1)) for t in (b, b_scales)]
    side = nvfp4.swizzle(b_scales, weight=True)
    for got in (
        nvfp4.grouped_mm(
            a, b, b_scales, offsets, a_scales=swizzled, a_layout="swizzled", pad_row_offsets=starts, **globals
        ),
        nvfp4.grouped_mm(
            a,
            *turned,
            offsets,
            a_scales=a_scales,
            b_layout="k-major",
            b_scales_layout="k-major",
            **globals,
        ),
        nvfp4.grouped_mm(a, b, side, offsets, a_scales=a_scales, b_scales_layout="swizzled", **globals),
    ):
        assert np.array_equal(got, want)
    c = random.standard_normal(want.shape).astype(np.float32)
    got = nvfp4.grouped_mm(a, b, b_scales, offsets, a_scales=a_scales, c=c, **globals)
    assert np.array_equal(got, want + c)
    one = np.array(np.abs(want).max() / 2688, np.float32)
    codes, scales = nvfp4.grouped_mm(
        a, b, b_scales, offsets, a_scales=a_scales, output="nvfp4", c_global=one, **globals
    )
    again = nvfp4.quantize(want, global_scale=one)
    assert np.array_equal(codes, again[0]) and np.array_equal(scales, again[1])
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="no gradient"):
        given = [torch.from_numpy(t) for t in (a, b, b_scales, offsets)]
        nvfp4.grouped_mm(*given, a_scales=torch.from_numpy(a_scales), c=torch.zeros(9, 64).requires_grad_())


def test_swizzle(golden):
    file = golden("nvfp4_weights_scales")
    swizzled, starts = nvfp4.swizzle(file["asm.raw2d"], tokens_per_expert=file["asm.tokens_per_expert"])
    assert np.array_equal(swizzled, file["asm.assembled2d"])
    assert np.array_equal(starts, file["asm.pad_row_offsets"])
    assert np.array_equal(nvfp4.swizzle(file["asm.raw3d"], weight=True), file["asm.assembled3d"])
    file = golden("nvfp4_quant")
    scales = file["seed.scales.gauss_bf16_s2"]
    assert np.array_equal(nvfp4.swizzle(scales), file["seed.scales_swizzled.gauss_bf16_s2"])


def test_interleave():
    x = np.tile(np.arange(24, dtype=np.float32), (2, 3, 1))
    runs = nvfp4.interleave(x, granularity=4)
    assert runs[1, 2].tolist() == [
        *range(4),
        *range(12, 16),
        *range(4, 8),
        *range(16, 20),
        *range(8, 12),
        *range(20, 24),
    ]
    assert np.array_equal(nvfp4.interleave(runs, granularity=4, inverse=True), x)
    assert nvfp4.interleave(x.astype(np.uint8)).shape == (2, 3, 32)
    torch = pytest.importorskip("torch")
    codes = torch.from_numpy(x).to(torch.uint8).view(torch.float4_e2m1fn_x2)
    made = nvfp4.interleave(codes, granularity=4)
    assert made.dtype == codes.dtype and np.array_equal(made.view(torch.uint8).numpy(), runs.astype(np.uint8))


def test_what_is_wider_than_a_byte_is_no_code():
    torch = pytest.importorskip("torch")
    codes, scales, one = nvfp4.quantize(torch.randn(4, 64))
    words = codes.view(torch.uint8).view(torch.float32)
    with pytest.raises(ValueError, match="codes"):
        nvfp4.dequantize(words, scales, one)


def test_sentences():
    x = np.ones((2, 16), np.float32)
    with pytest.raises(ValueError, match="profile"):
        nvfp4.quantize(x, profile="best")
    with pytest.raises(ValueError, match="finite"):
        nvfp4.quantize(x * np.inf)
    with pytest.raises(ValueError, match="offsets"):
        nvfp4.quantize(x, global_per="expert")
