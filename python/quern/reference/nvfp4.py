# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NVFP4: values to codes and back, layouts, and products.

Codes, scales, globals and layouts are the library's to the bit and have no gradient. Products are in float64;
gradients pass through them and, straight, through the quantisation of their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._nvfp4_layout import interleave, prepack, swizzle, unpack_weights, unswizzle
from ._nvfp4_quantize import as_bytes, dequantize, e4m3, from_mxfp4, quantize, straight_through, through

__all__ = [
    "dequantize",
    "fp8_columns",
    "fp8_rows",
    "from_mxfp4",
    "fused_quantize",
    "gemm",
    "grouped_mm",
    "int8_rows",
    "interleave",
    "prepack",
    "quantize",
    "straight_through",
    "swiglu",
    "swizzle",
    "unpack_weights",
    "unswizzle",
]


def swiglu(x: Tensor, granularity: int, limit: float = 0.0, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """[.., 2I] of gate and up in runs that alternate → [.., I]."""
    runs = x.unflatten(-1, (-1, 2, granularity))
    gate, up = runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


def fused_quantize(
    x: Tensor,
    gate_global: Tensor | None = None,
    up_global: Tensor | None = None,
    *,
    activation: str = "none",
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    granularity: int = 8,
    profile: str = "rne",
) -> tuple[Tensor, ...]:
    """As quern.nvfp4.fused_quantize, in bytes: to the bit without an activation; SwiGLU, in float64 and
    rounded once to f32, may differ in its last bit."""
    if activation == "swiglu":
        gate = swiglu(x.double(), granularity, limit, alpha, beta)
        return quantize(gate, global_scale=gate_global, profile=profile)[:2]
    made: tuple[Tensor, ...] = ()
    halves = interleave(x, granularity=granularity, inverse=True).chunk(2, -1)
    for part, one in zip(halves, (gate_global, up_global)):
        made += () if one is None else quantize(part, global_scale=one, profile=profile)[:2]
    return made


def int8_rows(a: Tensor) -> Tensor:
    """a [T, K] rounded to int8 with one scale a row, amax / 127 in f32, times that scale; gradients pass as
    if it were a."""
    x = a.detach().float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return through(a, (x / scale).round().double() * scale.double())


def fp8_rows(a: Tensor) -> Tensor:
    """a [T, K] rounded to e4m3 by row and 128 of K with the scale amax / 448 in f32, times that scale;
    gradients pass as if it were a."""
    groups = []
    for x in a.detach().float().split(128, -1):
        scale = x.abs().amax(-1, keepdim=True) / 448
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        groups.append(e4m3(x / scale).double() * scale.double())
    return through(a, torch.cat(groups, -1)) if groups else a


def fp8_columns(b: Tensor, scales: Tensor) -> Tensor:
    """Weights [E, K, N] rounded to e4m3 with one power of two a column, by their scales [E, K/16, N]."""
    largest = as_bytes(scales).view(torch.float8_e4m3fn).double().amax(1, keepdim=True)
    power = torch.exp2(torch.ceil(torch.log2(6 * largest / 448)))
    power = torch.where(largest == 0, torch.ones_like(power), power)
    return e4m3((b / power).float()).double() * power


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The rows of each expert, a [T, K], times its weights, b [E, K, N] → [T, N]; rows past the last give
    0."""
    out, first = [], 0
    for e, last in enumerate(offsets.tolist()):
        product = a[first:last] @ b[e]
        out.append(product if bias is None else product + bias[e])
        first = last
    return torch.cat((*out, a.new_zeros(a.shape[0] - first, b.shape[2])))


def _columns_of(one: Tensor | None, experts: int, columns: int, granularity: int) -> Tensor:
    """B's global of every expert and column."""
    if one is None:
        return torch.ones(experts, columns)
    if one.dim() < 2:
        return one.reshape(-1, 1).expand(experts, columns)
    return one[:, torch.arange(columns) // granularity % 2]


def _rows_of(one: Tensor | None, rows: int, offsets: Tensor, per: str) -> Tensor:
    """A's global of every row."""
    if one is None or one.dim() == 0:
        return (torch.ones(()) if one is None else one).expand(rows)
    if per == "row":
        return one
    expert = torch.searchsorted(offsets, torch.arange(rows), right=True)
    return torch.cat((one, one.new_ones(1)))[expert]


def gemm(
    a: Tensor,
    b: Tensor,
    b_scales: Tensor,
    offsets: Tensor,
    *,
    a_scales: Tensor | None = None,
    a_global: Tensor | None = None,
    b_global: Tensor | None = None,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    activation: str = "none",
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    granularity: int = 8,
    c_global: Tensor | None = None,
    profile: str = "rne",
    a_global_per: str = "tensor",
    a8: bool | str = False,
) -> Tensor | tuple[Tensor, ...]:
    """As quern.nvfp4.grouped_mm with weights [E, K/2, N] and linear scales → float64 [T, N], or [T, N/2]
    with activation "swiglu"; with c_global codes and scales of that, rounded to f32, as bytes. It is
    differentiable by a in floats, bias and c."""
    if a_scales is not None:
        values = dequantize(a, a_scales)
    else:
        values = a.double()
        values = fp8_rows(values) if a8 == "fp8" else int8_rows(values) if a8 in (True, "int8") else values
    weights = dequantize(b, b_scales, weight=True)
    experts, _, columns = weights.shape
    # The globals' product is rounded to f32, as the format says.
    of_rows = _rows_of(a_global, values.shape[0], offsets, a_global_per)
    of_columns = _columns_of(b_global, experts, columns, granularity)
    expert = torch.searchsorted(offsets, torch.arange(values.shape[0]), right=True)
    used = expert < experts
    expert = expert.clamp(max=experts - 1)
    out = grouped_mm(values, weights, offsets)
    if a8 == "fp8":
        out = through(out, grouped_mm(values.detach(), fp8_columns(weights, b_scales), offsets))
    out = out * (of_rows[:, None] * of_columns[expert]).double()
    if bias is not None:
        out = out + bias.double()[expert] * used[:, None]
    if c is not None:
        out = out + c.double()
    if activation == "swiglu":
        out = swiglu(out, granularity, limit, alpha, beta)
    if c_global is not None:
        return quantize(out, global_scale=c_global, profile=profile)[:2]
    return out
