# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Values to NVFP4 and back.

What the format defines by its bits, codes, scales and globals, is computed in f32, step by step, and has no
gradient; straight_through() is the quantiser that training sees.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BELOW = (0.25, 1.25, 2.5, 5.0)  # a tie goes to the code below
_ABOVE = (0.75, 1.75, 3.5)  # a tie goes to the code above
_HALVES = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7)
_UNDERFLOW = 6 * 2.0**-9
_PROFILES = ("rne", "halfstep", "modelopt", "compressed-tensors")


def spelt(choice: str) -> str:
    """A choice's name; as everywhere it may have underscores for hyphens."""
    return choice.replace("_", "-")


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a tensor of any 8-bit dtype."""
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 values, in f32; beyond 448 they are 448."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def e2m1(y: Tensor) -> Tensor:
    """The nearest E2M1 codes, ties to even, bit 3 where y is below 0."""
    m = y.abs()
    code = sum((m > edge).int() for edge in _BELOW) + sum((m >= edge).int() for edge in _ABOVE)
    return torch.as_tensor(code + 8 * (y < 0).int()).to(torch.uint8)


def e2m1_values(codes: Tensor) -> Tensor:
    """Codes to their values, in f32."""
    table = torch.tensor((*VALUES, *(-v for v in VALUES)))
    return table[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """Codes [.., n] to bytes [.., n/2], the first in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Bytes [.., n/2] to codes [.., n]."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# ---- globals ----


def _spread(one: Tensor, shape: torch.Size, offsets: Tensor | None) -> Tensor:
    """A global for each row of `shape`. One for each expert: by offsets, or one for each matrix."""
    if offsets is None:
        return one.reshape(*one.shape, *[1] * (len(shape) - one.dim())).expand(shape)
    expert = torch.searchsorted(offsets, torch.arange(shape[0]), right=True)
    return torch.cat((one, one.new_ones(1)))[expert]


def _global_of(amax: Tensor, profile: str) -> Tensor:
    if profile == "compressed-tensors":
        reciprocal = 1 / amax * 2688
        return torch.where(reciprocal.isfinite(), reciprocal, torch.ones_like(amax))
    if profile == "modelopt":
        return torch.where(amax == 0, torch.ones_like(amax), (amax / 2688).clamp(min=2.0**-149))
    return amax.clamp(min=1e-8) / 2688


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _globals(x: Tensor, profile: str, per: str, offsets: Tensor | None) -> Tensor:
    """x [.., n], with its blocks along n."""
    if per == "row":
        return _global_of(x.abs().amax(-1), profile)
    if per == "tensor":
        return _global_of(_largest(x), profile)
    ends = [] if offsets is None else offsets.tolist()
    parts = list(x) if offsets is None else [x[a:b] for a, b in zip([0, *ends[:-1]], ends)]
    made = [_global_of(_largest(part), profile) if part.numel() else x.new_ones(()) for part in parts]
    return torch.stack(made)


# ---- scales and codes of blocks ----


def _squares(xn: Tensor, scale: Tensor) -> Tensor:
    """The squared error of blocks [.., 16] under scales [.., 1], summed in the order of the block."""
    error = torch.zeros_like(scale[..., 0])
    for i in range(16):
        apart = e2m1_values(e2m1(xn[..., i] / scale[..., 0])) * scale[..., 0] - xn[..., i]
        error = error + apart * apart
    return torch.where(error.isfinite(), error, torch.full_like(error, math.inf))


def _best_scale(xn: Tensor, a: Tensor, scales: str) -> Tensor:
    plain = e4m3(a / 6)
    if scales == "rne":
        return plain
    if scales == "four-over-six":
        candidates = [plain, e4m3(a / 4)]
    else:
        first = as_bytes(plain.to(torch.float8_e4m3fn)).int()
        codes = [(first + step).clamp(1, 126).to(torch.uint8) for step in range(-3, 9)]
        candidates = [code.view(torch.float8_e4m3fn).float() for code in codes]
    best, least = plain, torch.full_like(plain[..., 0], math.inf)
    for candidate in candidates:
        error = _squares(xn, candidate)
        better = error < least
        best = torch.where(better[..., None], candidate, best)
        least = torch.where(better, error, least)
    return best


def _normalised(x: Tensor, one: Tensor, profile: str, scales: str) -> tuple[Tensor, Tensor]:
    """By rne's rules of underflow and codes: codes and scales of blocks x [.., 16]."""
    xn = x / one
    a = xn.abs().amax(-1, keepdim=True)
    some = a >= _UNDERFLOW
    scale = torch.where(some, _best_scale(xn, a, scales), torch.ones_like(a))
    y = xn / scale
    if profile == "halfstep":
        code = torch.tensor(_HALVES)[(2 * y.abs().clamp(max=6)).round().long()] + 8 * (y < 0)
    else:
        code = e2m1(y)
    return code.to(torch.uint8) * some, scale * some


def _modelopt(x: Tensor, one: Tensor) -> tuple[Tensor, Tensor]:
    p = x.abs().amax(-1, keepdim=True) / (6 * one)
    scale = e4m3(torch.where(p == 0, torch.ones_like(p), p).clamp(2.0**-9, 448))
    step = scale * one
    return e2m1(x / step) * (step != 0), scale


def _compressed_tensors(x: Tensor, reciprocal: Tensor) -> tuple[Tensor, Tensor]:
    scale = e4m3((reciprocal * (x.abs().amax(-1, keepdim=True) / 6)).clamp(max=448))
    scale = torch.where(scale == 0, torch.full_like(scale, 0.125), scale)
    return e2m1((x / (scale / reciprocal)).clamp(-6, 6)), scale


def quantize(
    x: Tensor,
    *,
    profile: str = "rne",
    scales: str = "rne",
    global_per: str = "tensor",
    global_scale: Tensor | None = None,
    offsets: Tensor | None = None,
    weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ codes and scales as bytes, global f32: those of quern.nvfp4.quantize, to the bit."""
    profile, scales = spelt(profile), spelt(scales)
    if profile not in _PROFILES or (profile == "halfstep" and scales != "rne"):
        raise ValueError(f"no quantiser has profile {profile!r} with scales {scales!r}")
    x = x.detach().float()
    x = x.transpose(-2, -1) if weight else x
    one = _globals(x, profile, global_per, offsets) if global_scale is None else global_scale
    of_row = _spread(one, x.shape[:-1], offsets)
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    g = of_row[..., None, None].expand(*blocks.shape[:-1], 1)
    if scales == "rne" and profile == "modelopt":
        codes, made = _modelopt(blocks, g)
    elif scales == "rne" and profile == "compressed-tensors":
        codes, made = _compressed_tensors(blocks, g)
    else:
        g = 1 / g if profile == "compressed-tensors" else g
        codes, made = _normalised(blocks, g, profile, scales)
    packed, written = pack(codes.flatten(-2)), as_bytes(made[..., 0].to(torch.float8_e4m3fn))
    if offsets is not None:
        packed[int(offsets[-1]) :], written[int(offsets[-1]) :] = 0, 0
    if weight:
        packed, written = packed.transpose(-2, -1).contiguous(), written.transpose(-2, -1).contiguous()
    return packed, written, one


def dequantize(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | float = 1.0,
    *,
    profile: str = "rne",
    offsets: Tensor | None = None,
    weight: bool = False,
    columns: int | None = None,
) -> Tensor:
    """code · scale · global in float64, an activation [.., D] or a weight [.., K, N]. Rounded once, it is
    what quern.nvfp4.dequantize returns. The global is [], an expert's, or a row's, as its shape says."""
    codes, scales = as_bytes(codes), as_bytes(scales).view(torch.float8_e4m3fn).float()
    profile = spelt(profile)
    if weight:
        codes, scales = codes.transpose(-2, -1), scales.transpose(-2, -1)
    one = _spread(torch.as_tensor(global_scale, dtype=torch.float32), scales.shape[:-1], offsets)[..., None]
    steps = (scales / one).double() if profile == "compressed-tensors" else scales.double() * one.double()
    values = e2m1_values(unpack(codes)).double() * steps.repeat_interleave(16, -1)
    if offsets is not None:
        values[int(offsets[-1]) :] = 0
    values = values if columns is None else values[..., :columns]
    return values.transpose(-2, -1) if weight else values


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, becomes: Tensor) -> Tensor:
        return becomes.to(x.dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def through(x: Tensor, becomes: Tensor) -> Tensor:
    """The values of `becomes`, with the gradient of x."""
    result: Tensor = _Through.apply(x, becomes)
    return result


def straight_through(x: Tensor, *, weight: bool = False, **settings: object) -> Tensor:
    """x as its NVFP4 stands for it, in x's dtype; gradients pass as if it were x. The settings are those of
    quantize()."""
    codes, scales, one = quantize(x, weight=weight, **settings)  # type: ignore[arg-type]
    kept = {name: settings[name] for name in ("profile", "offsets") if name in settings}
    columns = None if weight else x.shape[-1]
    given = dict(weight=weight, columns=columns, **kept)
    return through(x, dequantize(codes, scales, one, **given))  # type: ignore[arg-type]


def from_mxfp4(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """MXFP4, codes [.., K/2] and exponents [.., K/32] → codes, scales [.., K/16], global [] and the number
    of blocks that are rounded: those of quern.nvfp4.from_mxfp4, to the bit."""
    blocks = unpack(as_bytes(codes)).unflatten(-1, (-1, 32))
    power = as_bytes(exponents).int() - 127
    some = (blocks & 7 != 0).any(-1)
    if not some.any():
        return as_bytes(codes), torch.zeros_like(power).repeat_interleave(2, -1).byte(), torch.ones(()), 0
    largest = int(power[some].max())
    low = some & (power < largest - 17)
    tiny = torch.ldexp(e2m1_values(blocks & 7).double(), (power - largest + 17)[..., None])
    blocks = torch.where(low[..., None], e2m1(tiny) | blocks & 8, blocks)
    scale = torch.ldexp(torch.ones(power.shape), (power - largest + 8).clamp(-9, 8)) * some
    bytes_of = as_bytes(scale.to(torch.float8_e4m3fn)).repeat_interleave(2, -1)
    one = torch.tensor(math.ldexp(1.0, largest - 8))
    return pack(blocks.flatten(-2)), bytes_of, one, int(low.sum())
