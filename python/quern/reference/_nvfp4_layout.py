# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Layouts of NVFP4: the order of tensor cores, alternating gate and up, repacked weights. Bytes move and keep
their values; interleave() is differentiable."""

from __future__ import annotations

import torch
from torch import Tensor

from ._nvfp4_quantize import as_bytes, unpack


def _places(rows: int, columns: int) -> Tensor:
    """Where the scale of each row and column stands, in bytes."""
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    return (r // 128 * -(-columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def _swizzled_bytes(rows: int, columns: int) -> int:
    return -(-rows // 128) * -(-columns // 4) * 512


def swizzle(
    scales: Tensor, *, tokens_per_expert: Tensor | None = None, weight: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """As quern.nvfp4.swizzle, in bytes."""
    scales = as_bytes(scales)
    if weight:
        return torch.stack([torch.as_tensor(swizzle(matrix.T)) for matrix in scales])
    if tokens_per_expert is not None:
        counts = tokens_per_expert.tolist()
        parts = [torch.as_tensor(swizzle(part)) for part in scales[: sum(counts)].split(counts)]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + -(-count // 128) * 128)
        return torch.cat(parts), torch.tensor(starts, dtype=torch.int32)
    out = scales.new_zeros(_swizzled_bytes(*scales.shape))
    out[_places(*scales.shape)] = scales
    return out


def unswizzle(
    swizzled: Tensor,
    rows: int,
    columns: int,
    *,
    tokens_per_expert: Tensor | None = None,
    weight: bool = False,
) -> Tensor:
    """swizzle() back → scales [rows, columns], or a weight's [E, columns, rows]."""
    swizzled = as_bytes(swizzled)
    if weight:
        return torch.stack([unswizzle(matrix, rows, columns).T for matrix in swizzled])
    if tokens_per_expert is None:
        return swizzled[_places(rows, columns)]
    out, first, start = swizzled.new_zeros(rows, columns), 0, 0
    for count in tokens_per_expert.tolist():
        out[first : first + count] = unswizzle(swizzled[start:], count, columns)
        first, start = first + count, start + _swizzled_bytes(count, columns)
    return out


def interleave(x: Tensor, *, granularity: int = 8, inverse: bool = False) -> Tensor:
    """As quern.nvfp4.interleave."""
    if inverse:
        return x.unflatten(-1, (-1, 2, granularity)).transpose(-3, -2).flatten(-3)
    half = x.shape[-1] // 2
    halves = torch.nn.functional.pad(x.unflatten(-1, (2, half)), (0, -half % granularity))
    return halves.unflatten(-1, (-1, granularity)).transpose(-3, -2).flatten(-3)


# ---- repacked weights ----

# Bytes of a panel's scales by those of E4M3: descending with the value, 0 for 0.
_SCALE_BYTES = torch.tensor([0, 144, 136, 132, 128, 126, 124, 122, *(128 - s for s in range(8, 127))])
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the order of 8 of K in a word


def prepack(codes: Tensor, scales: Tensor) -> Tensor:
    """As quern.nvfp4.prepack on the CPU, version 3: codes [E, K/2, N] and scales [E, K/16, N] → uint8 [E,
    bytes]. Panels of 64 columns hold units of 64 of K, each four strips of 16 columns: a line of 4 · 16
    scales, then 8 lines of 16 words of 8 codes."""
    codes = unpack(as_bytes(codes).transpose(1, 2)).transpose(1, 2)
    missing = [(0, -codes.shape[2] % 64, 0, -codes.shape[1] % 64)]
    missing.append((0, -codes.shape[2] % 64, 0, -codes.shape[1] % 64 // 16))
    codes = torch.nn.functional.pad(codes, missing[0])
    scales = torch.nn.functional.pad(_SCALE_BYTES[as_bytes(scales).long()].byte(), missing[1])
    words = codes.unflatten(1, (-1, 8, 8))[:, :, :, list(_NIBBLES)]  # [E, units, lines, nibbles, N]
    words = (words[:, :, :, 0::2] | words[:, :, :, 1::2] << 4).unflatten(-1, (-1, 4, 16))
    lines = words.permute(0, 4, 1, 5, 2, 6, 3).flatten(4)  # [E, panels, units, strips, bytes]
    first = scales.unflatten(2, (-1, 4, 16)).unflatten(1, (-1, 4)).permute(0, 3, 1, 4, 2, 5).flatten(4)
    return torch.cat((first, lines), -1).flatten(1)


def unpack_weights(repacked: Tensor, columns: int, rows: int) -> tuple[Tensor, Tensor]:
    """prepack() back → codes [E, rows/2, columns], scales [E, rows/16, columns]."""
    units, panels = -(-rows // 64), -(-columns // 64)
    strips = repacked.unflatten(1, (panels, units, 4, 576))
    back = torch.zeros(256, dtype=torch.uint8)
    back[_SCALE_BYTES] = torch.arange(127, dtype=torch.uint8)
    scales = back[strips[..., :64].unflatten(-1, (4, 16)).long()].permute(0, 2, 4, 1, 3, 5)
    nibbles = unpack(strips[..., 64:].unflatten(-1, (8, 16, 4)))[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    packed = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).permute(0, 2, 4, 6, 1, 3, 5)
    packed = packed.flatten(1, 3).flatten(2)[:, : rows // 2, :columns]
    return packed, scales.flatten(1, 2).flatten(2)[:, : rows // 16, :columns]
