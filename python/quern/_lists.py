# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Block lists as other kernels take them."""

from __future__ import annotations

from typing import Any

from . import _arrays
from ._faces import run


def convert_blocks(block_idx: Any, block_size: int, to: int, n: int) -> tuple[Any, Any]:
    """Lists int32 [.., k] of blocks of block_size tokens, of sequences of n tokens → (index, count): lists
    of blocks of `to` tokens [.., k'], ascending and padded with -1, and how many [..]. One length divides
    the other."""
    _arrays.check("block_idx", block_idx, block_idx)
    length = block_idx.shape[-1] if len(block_idx.shape) else 0
    wide = length * max(block_size // max(to, 1), 1)
    settings = (("from", block_size), ("to", to), ("n", n))
    asked = (("k_out", wide),)
    index, count = run("nsa-list-convert", settings, {"in": block_idx}, ("out", "count"), asked=asked)
    return index, count


def block_mask(block_idx: Any, block_size: int, n: int, *, tile: int = 1, heads: int | None = None) -> Any:
    """Causal FlexAttention over the chosen blocks: lists int32 [B, Hs, tiles, k] of tiles of `tile` queries
    → a torch.nn.attention.flex_attention.BlockMask of blocks of (tile, block_size), for `heads` query heads
    (None: Hs)."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    _arrays.need_torch(block_idx=block_idx)
    index, count = convert_blocks(block_idx.contiguous(), block_size, block_size, n)
    share = 1 if heads is None else heads // max(block_idx.shape[1], 1)
    if heads is not None and share * block_idx.shape[1] != heads:
        raise ValueError(f"heads is {heads}: a multiple of the {block_idx.shape[1]} of block_idx is accepted")
    index, count = index.repeat_interleave(share, 1), count.repeat_interleave(share, 1)
    blocks = -(-n // block_size)
    chosen = torch.zeros(*index.shape[:-1], blocks + 1, dtype=torch.bool, device=index.device)
    chosen.scatter_(-1, torch.where(index < 0, blocks, index).long(), True)
    places = torch.nn.functional.pad(index.clamp(min=0), (0, blocks - index.shape[-1]))  # one for every block

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return chosen[batch, head, query // tile, key // block_size] & (key <= query)

    return BlockMask.from_kv_blocks(
        count, places, BLOCK_SIZE=(tile, block_size), mask_mod=seen, seq_lengths=(n, n)
    )
