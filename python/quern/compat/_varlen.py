# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Between the padded rows of other libraries' varlen tensors and the rows of Quern's, one sequence after the
other, on the tensors' device."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from .. import _torch


@overload
def dense(tensor: Tensor) -> Tensor: ...


@overload
def dense(tensor: None) -> None: ...


@overload
def dense(tensor: Tensor | None) -> Tensor | None: ...


def dense(tensor: Tensor | None) -> Tensor | None:
    """The tensor with a contiguous last dimension, which is all that Quern asks. What is none is refused by
    the call."""
    return _torch.dense(tensor) if isinstance(tensor, Tensor) and tensor.dim() > 0 else tensor


def lengths(cu_seqlens: Tensor) -> Tensor:
    """[B+1] offsets → [B] lengths."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def offsets(counts: Tensor) -> Tensor:
    """[B] counts → int32 [B+1] offsets."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def entry_offsets(cu_seqlens: Tensor, block_size: int) -> Tensor:
    """Where each sequence's whole blocks start: int32 [B+1]."""
    return offsets(lengths(cu_seqlens) // block_size)


def longest(cu_seqlens: Tensor, max_seqlen: int | None) -> int:
    """max_seqlen, or what the offsets say (which waits for the device)."""
    if max_seqlen is not None:
        return int(max_seqlen)
    return int(lengths(cu_seqlens).max()) if cu_seqlens.numel() > 1 else 0


def pad(packed: Tensor, starts: Tensor, rows: int, fill: float = 0, dim: int = 0) -> Tensor:
    """Varlen rows along `dim` → [B, ..] with `rows` rows a sequence, those without one filled."""
    packed = packed.movedim(dim, 0)
    place = torch.arange(rows, device=packed.device)
    there = place[None, :] < lengths(starts)[:, None]
    index = (starts[:-1, None] + place[None, :]).clamp(max=max(packed.shape[0] - 1, 0))
    if packed.shape[0] == 0:
        padded = packed.new_full((starts.shape[0] - 1, rows, *packed.shape[1:]), fill)
    else:
        padded = packed[index.long()]
        padded = padded.masked_fill(~there.view(*there.shape, *[1] * (packed.dim() - 1)), fill)
    return padded.movedim(1, dim + 1)


def pack(padded: Tensor, starts: Tensor, rows: int) -> Tensor:
    """[B, max, ..] → [rows, ..]: the sequences' rows one after the other, zeros after the last."""
    place = torch.arange(rows, device=padded.device)
    there = place < starts[-1]
    if padded.shape[0] == 0 or padded.shape[1] == 0:
        return padded.new_zeros((rows, *padded.shape[2:]))
    sequence = torch.searchsorted(starts[1:].contiguous(), place.to(starts.dtype), right=True)
    sequence = sequence.clamp(max=padded.shape[0] - 1)
    row = (place - starts[:-1][sequence]).clamp(0, padded.shape[1] - 1)
    packed = padded[sequence, row]
    return packed.masked_fill(~there.view(-1, *[1] * (padded.dim() - 2)), 0)
