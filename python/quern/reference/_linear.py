# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Projections, RMS norm and rotation."""

from __future__ import annotations

import torch
from torch import Tensor


def fp8_weight(w: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """The values of e4m3 bytes [N, K] with a scale, or one a block × block: f32, or powers of two."""
    values = w.view(torch.float8_e4m3fn).double()
    if scale.element_size() == 1:
        scale = torch.exp2(scale.view(torch.uint8).double() - 127)
    scale = scale.double()
    if scale.numel() > 1 or scale.ndim == 2:
        scale = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
        scale = scale[: w.shape[0], : w.shape[1]]
    return values * scale


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, groups: int = 1) -> Tensor:
    """x Wᵀ + bias, by groups of x's columns and w's rows; w of any kind as values."""
    parts = zip(x.chunk(groups, 1), w.chunk(groups, 0))
    y = torch.cat([a @ b.T for a, b in parts], 1)
    return y if bias is None else y + bias


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """x [T, H, D] by the rows of cos_sin that positions [T] name."""
    turned = cos_sin.shape[1]
    cosine, sine = (t[:, None] for t in cos_sin[positions.long()].chunk(2, 1))
    sine = -sine if inverse else sine
    even, odd = x[..., x.shape[-1] - turned :: 2], x[..., x.shape[-1] - turned + 1 :: 2]
    pairs = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - turned], pairs), -1)
