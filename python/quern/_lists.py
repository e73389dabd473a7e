# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Block lists as other kernels take them."""

from __future__ import annotations

from typing import Any

from . import _arrays
from . import _operations as ops


def convert_blocks(block_idx: Any, block_size: int, to: int, n: int) -> tuple[Any, Any]:
    """Lists int32 [.., k] of blocks of block_size tokens, of sequences of n tokens → (index, count): lists
    of blocks of `to` tokens [.., k'], ascending and padded with -1, and how many [..]. One length divides
    the other."""
    wide = block_idx.shape[-1] * max(block_size // to, 1)
    params = ops.params("nsa-list-convert", **{"from": block_size}, to=to, n=n)
    index, count = ops.call(
        "nsa-list-convert", params, {"in": block_idx}, ("out", "count"), asked={"k_out": wide}
    )
    return index, count


def block_mask(block_idx: Any, block_size: int, n: int, *, tile: int = 1, heads: int | None = None) -> Any:
    """Causal FlexAttention over the chosen blocks: lists int32 [B, Hs, tiles, k] of tiles of `tile` queries
    → a torch.nn.attention.flex_attention.BlockMask of blocks of (tile, block_size), for `heads` query heads
    (None: Hs)."""
    from torch.nn.attention.flex_attention import BlockMask

    _arrays.need_torch(block_idx=block_idx)
    index, count = convert_blocks(block_idx.contiguous(), block_size, block_size, n)
    share = 1 if heads is None else heads // block_idx.shape[1]
    index, count = index.clamp(min=0).repeat_interleave(share, 1), count.repeat_interleave(share, 1)

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    return BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=(tile, block_size), mask_mod=seen, seq_lengths=(n, n)
    )
