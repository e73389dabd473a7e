# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NVFP4: values of codes, and products with them."""

from __future__ import annotations

import torch
from torch import Tensor

_CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _bytes(t: Tensor) -> Tensor:
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def dequantize(
    codes: Tensor, scales: Tensor, global_scale: Tensor | float = 1.0, *, weight: bool = False
) -> Tensor:
    """code · scale · global in float64, not rounded between: an activation [.., D], or a weight [.., K,
    N]."""
    codes, scales = _bytes(codes), _bytes(scales).view(torch.float8_e4m3fn).double()
    if weight:
        codes, scales = codes.transpose(-2, -1), scales.transpose(-2, -1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    table = torch.tensor((*_CODES, *(-c for c in _CODES)), dtype=torch.float64)
    values = table[nibbles] * scales.repeat_interleave(16, -1)
    if weight:
        values = values.transpose(-2, -1)
    one = torch.as_tensor(global_scale, dtype=torch.float64)
    return values * one.reshape(*one.shape, *[1] * (values.dim() - one.dim()))


def swiglu(x: Tensor, granularity: int, limit: float = 0.0, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """[.., 2I] of gate and up in runs that alternate → [.., I]."""
    runs = x.unflatten(-1, (-1, 2, granularity))
    gate, up = runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + beta)


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """The rows of each expert, a [T, K], times its weights, b [E, K, N] → [T, N]; rows past the last give
    0."""
    out, first = [], 0
    for e, last in enumerate(offsets.tolist()):
        product = a[first:last] @ b[e]
        out.append(product if bias is None else product + bias[e])
        first = last
    return torch.cat((*out, a.new_zeros(a.shape[0] - first, b.shape[2])))
