# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Rows of DeepSeek-V4's caches as bytes, and pages of them. Bytes are computed in f32, step by step, are the
library's to the bit, and have no gradient; stored() is what training sees."""

from __future__ import annotations

import torch
from torch import Tensor

from ._nvfp4_quantize import as_bytes, e2m1, e2m1_values, e4m3, pack, spelt, through, unpack


def _power(x: Tensor) -> Tensor:
    """The exponent of the least power of two that is x > 0 or above, int32."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).int()


def _two_to(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, dtype=torch.float64), exponent.double())


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).to(torch.uint8)


def _e4m3_bytes(x: Tensor) -> Tensor:
    return as_bytes(e4m3(x).to(torch.float8_e4m3fn))


def _largest(x: Tensor, least: float) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=least)


def store(x: Tensor, format: str) -> Tensor:
    """Rows [.., C] → uint8 [.., bytes of a row]: "fp8", "fp8-power", "fp4" or "row584"."""
    x, format = x.detach().float(), spelt(format)
    if format in ("fp8", "fp8-power"):
        scale = _largest(x, 1e-4) / 448
        scale = _two_to(_power(scale)).float() if format == "fp8-power" else scale
        return torch.cat((_e4m3_bytes(x / scale), scale.contiguous().view(torch.uint8)), -1)
    if format == "fp4":
        blocks = x.unflatten(-1, (-1, 32))
        exponent = _power(_largest(blocks, 6 * 2.0**-126) / 6)
        codes = e2m1((blocks / _two_to(exponent).float()).clamp(-6, 6))
        return torch.cat((pack(codes.flatten(-2)), _e8m0(exponent[..., 0])), -1)
    tiles, turned = x[..., :448].unflatten(-1, (7, 64)), x[..., 448:].bfloat16()
    exponent = _power(_largest(tiles, 1e-4) / 448)
    scales = torch.nn.functional.pad(_e8m0(exponent[..., 0]), (0, 1))
    data = _e4m3_bytes(tiles / _two_to(exponent).float()).flatten(-2)
    return torch.cat((data, turned.contiguous().view(torch.uint8), scales), -1)


def load(rows: Tensor, format: str) -> Tensor:
    """store() back, in float64, exactly."""

    def e4m3_values(data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float8_e4m3fn).double()

    def powers(scales: Tensor) -> Tensor:
        return _two_to(scales.int() - 127)

    format = spelt(format)
    if format in ("fp8", "fp8-power"):
        return e4m3_values(rows[..., :-4]) * rows[..., -4:].contiguous().view(torch.float32).double()
    if format == "fp4":
        blocks = rows.shape[-1] // 17
        scales = powers(rows[..., -blocks:]).repeat_interleave(32, -1)
        return e2m1_values(unpack(rows[..., :-blocks])).double() * scales
    data = e4m3_values(rows[..., :448]) * powers(rows[..., 576:583]).repeat_interleave(64, -1)
    return torch.cat((data, rows[..., 448:576].contiguous().view(torch.bfloat16).double()), -1)


def stored(x: Tensor, format: str) -> Tensor:
    """x as its rows in the format stand for it; gradients pass as if it were x."""
    return through(x, load(store(x, format), format))


# Bytes of a slot's data, which in a page stand before the scales of all slots, by a row's bytes.
_DATA = {
    "fp8": lambda size: size - 4,
    "fp8-power": lambda size: size - 4,
    "fp4": lambda size: size // 17 * 16,
    "row584": lambda size: 576,
}


def _by_row(pool: Tensor, page: int, format: str) -> Tensor:
    """Pages [pages, page · bytes] → the bytes of each slot [pages, page, bytes]."""
    cut = page * _DATA[spelt(format)](pool.shape[1] // page)
    return torch.cat([part.unflatten(1, (page, -1)) for part in (pool[:, :cut], pool[:, cut:])], -1)


def _by_page(rows: Tensor, format: str) -> Tensor:
    """_by_row() back."""
    cut = _DATA[spelt(format)](rows.shape[2])
    return torch.cat((rows[..., :cut].flatten(1), rows[..., cut:].flatten(1)), 1)


def write_slots(x: Tensor, slots: Tensor, cache: Tensor, format: str = "rows", page: int = 0) -> Tensor:
    """Rows x [n, D] and slots [n], -1 for a row that is left out → the cache with them in their slots."""
    split = page > 0 and format != "rows"
    rows = _by_row(cache, page, format) if split else cache.clone()
    made = x.to(cache.dtype) if format == "rows" else store(x, format)
    rows.flatten(0, -2)[slots[slots >= 0].long()] = made[slots >= 0]
    return _by_page(rows, format) if split else rows


def gather_pages(pool: Tensor, table: Tensor, page: int, format: str = "rows") -> Tensor:
    """A pool [pages, page, D], or uint8 [pages, page · bytes], and the pages of each sequence [B, columns] →
    the rows of the sequences [B, columns · page, D or bytes]."""
    if format != "rows":
        pool = _by_row(pool, page, format)
    return pool[table.long()].flatten(1, 2)
