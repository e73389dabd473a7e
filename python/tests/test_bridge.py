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
    with pytest.raises(ValueError, match=r"expert_offsets\[1\] is 4294967339: integers of 32 bits"):
        bridge.compute_expert_offsets([3, 2**32 + 40], 2, "cpu")


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


VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def values(codes, scales, along):
    """What codes and scales mean, without a global, in float64; blocks of 16 lie along a dimension."""
    codes = codes.view(torch.uint8)
    nibbles = torch.stack((codes & 15, codes >> 4), along + 1).flatten(along, along + 1).int()
    signed = VALUES[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    return signed * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, along)


class Product:
    """Random operands of a product and what it is in float64."""

    def __init__(self, counts, k, n, past=0):
        torch.manual_seed(len(counts) + k)
        self.offsets = bridge.compute_expert_offsets(counts, len(counts), "cpu")
        rows = sum(counts) + past
        self.a, self.a_scales, self.a_global = bridge.quantize_to_nvfp4(torch.randn(rows, k))
        weights = [bridge.quantize_weight_to_nvfp4(torch.randn(k, n) * (i + 1)) for i in range(len(counts))]
        self.b, self.b_scales, self.b_global = (torch.stack([w[i] for w in weights]) for i in range(3))
        self.counts, a, b = counts, values(self.a, self.a_scales, 1), values(self.b, self.b_scales, 1)
        self.exact, self.size = torch.zeros(rows, n).double(), torch.zeros(rows, n).double()
        end = 0
        for e, count in enumerate(counts):
            here, end = slice(end, end + count), end + count
            scale = (self.a_global * self.b_global[e]).double()
            self.exact[here] = a[here] @ b[e] * scale
            self.size[here] = a[here].abs() @ b[e].abs() * scale

    def operands(self, swizzled=False, k_major=False):
        b = bridge.make_b_k_major(self.b) if k_major else self.b
        if not swizzled:
            return self.a, b, self.a_scales, self.b_scales, self.offsets, self.a_global, self.b_global
        rows = self.a_scales[: sum(self.counts)].split(self.counts)
        scales = bridge.assemble_scales_2d_side(rows), bridge.assemble_scales_3d_side(self.b_scales.unbind())
        return self.a, b, *scales, self.offsets, self.a_global, self.b_global


@pytest.mark.parametrize("counts,k,n", [([5, 0, 130, 64], 96, 48), ([1], 16, 7), ([0, 0], 32, 16)])
def test_grouped_gemm(counts, k, n):
    product = Product(counts, k, n, past=3)
    got = bridge.run_nvfp4_grouped_gemm(*product.operands())
    assert got.dtype == torch.bfloat16 and got.shape == product.exact.shape
    bound = (4 + k / 16) * 2**-23 * product.size + 2**-8 * product.exact.abs()
    assert ((got.double() - product.exact).abs() <= bound).all()
    assert not got[sum(counts) :].any()
    assert torch.equal(bridge.run_nvfp4_grouped_gemm(*product.operands(k_major=True)), got)
    assert torch.equal(bridge.run_nvfp4_grouped_gemm(*product.operands(True, True)), got)
    product.offsets = torch.stack((product.offsets, product.offsets), 1)[:, 0]
    assert torch.equal(bridge.run_nvfp4_grouped_gemm(*product.operands(True)), got)


def test_globals_of_rows_and_experts():
    product = Product([3, 4], 32, 16)
    a, b, *middle, one, many = product.operands()
    expected = bridge.run_nvfp4_grouped_gemm(a, b, *middle, one, many)
    for given in (one.expand(7), one.expand(2)):
        assert torch.equal(bridge.run_nvfp4_grouped_gemm(a, b, *middle, given, many), expected)
    for given in (one.reshape(1), one.reshape(1, 1), one.expand(7, 1)):
        assert torch.equal(bridge.run_nvfp4_grouped_gemm(a, b, *middle, given, many[:, None]), expected)
    assert torch.equal(
        bridge.run_nvfp4_grouped_gemm(a, b, *middle, one, many[:1]),
        bridge.run_nvfp4_grouped_gemm(a, b, *middle, one, many[:1].expand(2).contiguous()),
    )
    plain = bridge.run_nvfp4_grouped_gemm(a, b, *middle)
    unit = bridge.run_nvfp4_grouped_gemm(a, b, *middle, torch.ones(()), torch.ones(2))
    assert torch.equal(plain, unit)


def test_rows_and_experts_of_one_number():
    """[E] is of experts, [T, 1] of rows."""
    product = Product([3, 0, 0], 32, 16)
    a, b, *middle, _, many = product.operands()
    scales = torch.tensor([1.0, 2.0, 4.0])
    rows = bridge.run_nvfp4_grouped_gemm(a, b, *middle, scales[:, None], many)
    experts = bridge.run_nvfp4_grouped_gemm(a, b, *middle, scales, many)
    assert torch.equal(rows, experts * scales[:, None].bfloat16()) and not torch.equal(rows, experts)


def test_globals_of_quantisers():
    x = torch.randn(5, 40)
    per_row = torch.rand(5) / 1000 + 1e-3
    want = bridge.quantize_activation_nvfp4(x, per_row)
    for a, b in zip(bridge.quantize_activation_nvfp4(x, per_row[:, None]), want):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    want = bridge.quantize_activation_nvfp4(x, 0.002)
    for one in (torch.tensor(0.002), torch.tensor([0.002]), torch.tensor([[0.002]])):
        for a, b in zip(bridge.quantize_activation_nvfp4(x, one), want):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_without_rows():
    product = Product([0, 0], 32, 16)
    assert bridge.run_nvfp4_grouped_gemm(*product.operands()).shape == (0, 16)
    assert bridge.run_nvfp4_grouped_gemm(*product.operands(True, True)).shape == (0, 16)
    assert bridge.run_fused_swiglu_grouped_gemm(*product.operands()).shape == (0, 16)
    codes, scales = bridge.deinterleave_quantize_nvfp4_cuda(torch.empty(0, 64), 32, torch.tensor(1.0))
    assert codes.shape == (0, 16) and scales.shape == (0, 2)


def test_what_is_wider_than_a_byte_is_no_code():
    a, b, *middle = Product([3, 4], 64, 16).operands()
    words = a.view(torch.uint8).view(torch.float32)
    with pytest.raises(ValueError, match="a_codes"):
        bridge.run_nvfp4_grouped_gemm(words, b, *middle)


@pytest.mark.parametrize("limit", [0.0, 0.75])
def test_fused_swiglu(limit):
    product = Product([9, 0, 20], 64, 64)
    got = bridge.run_fused_swiglu_grouped_gemm(*product.operands(), limit)
    runs = product.exact.unflatten(1, (-1, 2, 8))
    gate, up = runs[:, :, 0], runs[:, :, 1]
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = (torch.nn.functional.silu(gate) * up).flatten(1)
    split = got.unflatten(1, (-1, 2, 8))
    assert got.shape == (29, 64) and not split[:, :, 1].any()
    assert torch.allclose(split[:, :, 0].flatten(1).double(), expected, rtol=2**-7, atol=1e-5)
    codes, scales = bridge.deinterleave_quantize_nvfp4_cuda(got, 32, torch.tensor(0.01))
    want = bridge.quantize_activation_nvfp4(split[:, :, 0].flatten(1), torch.tensor(0.01))
    assert torch.equal(codes.view(torch.uint8), want[0].view(torch.uint8))
    every = bridge.run_fused_swiglu_grouped_gemm(*product.operands(), limit, paired=False)
    x = product.exact.clamp(max=limit) if limit else product.exact
    assert torch.allclose(every.double(), torch.nn.functional.silu(x), rtol=2**-7, atol=1e-5)


def test_warmup():
    bridge.warmup_compilation(256, 3584, 4096, "cpu")
    bridge.warmup_fused_swiglu_compilation(8, 32, 64, "cpu", 10.0)
    with pytest.raises(ValueError, match="K"):
        bridge.warmup_compilation(2, 5, 8, "cpu")


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
