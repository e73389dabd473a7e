# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What the operations compute, in float64 PyTorch with dense masks: differentiable, slow, short enough to
read.

It shares no code with the library. Memory grows with N²; use it up to a few thousand tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """q [B, N, H, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv], seen bool, broadcast to [B, H, N, S] → [B, N, H,
    Dv].

    A query that sees no key gives 0 and takes part in no gradient.
    """
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bnhd,bshd->bhns", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    seen = seen.expand_as(scores)
    some = seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & some, -math.inf).softmax(-1).masked_fill(~some, 0)
    return torch.einsum("bhns,bshd->bnhd", weights, v)


def window_mask(n: int, window: int, causal: bool) -> Tensor:
    """bool [N, N]: which keys (columns) a query (row) sees in the window branch."""
    q, key = torch.arange(n)[:, None], torch.arange(n)[None, :]
    return (key <= q) & (key > q - window) if causal else (q - key).abs() <= window // 2


def compress(
    x: Tensor,
    block_size: int,
    weight: Tensor | None = None,
    *,
    stride: int | None = None,
    pe: Tensor | None = None,
    linear: bool = False,
) -> Tensor:
    """[B, N, Hkv, D] → an entry for each whole block [B, Nc, Hkv, D]: the mean, times weight [Hkv, D, D]
    where given; linear: (block + pe [Hkv, l, D]) flattened, times weight [Hkv, l·D, D]."""
    blocks = x.unfold(1, block_size, stride or block_size).movedim(-1, 3)  # [B, Nc, Hkv, l, D]
    if linear:
        shifted = blocks if pe is None else blocks + pe
        return torch.einsum("bihc,hce->bihe", shifted.flatten(3), weight)
    mean = blocks.mean(3)
    return mean if weight is None else torch.einsum("bihc,hce->bihe", mean, weight)


def select(
    q: Tensor,
    k_cmp: Tensor,
    block_size: int,
    num_selected: int,
    tile: int,
    causal: bool = True,
    complete: bool = True,
) -> Tensor:
    """The blocks of greatest mean logit of every tile and head: bool [B, H, tiles, blocks of N tokens].

    A block without a compressed entry that the tile's last query sees is chosen last, the lowest first.
    """
    batch, n, heads, _ = q.shape
    tiles, blocks = -(-n // tile), -(-n // block_size)
    share = heads // k_cmp.shape[2]
    chosen = torch.zeros(batch, heads, tiles, blocks, dtype=torch.bool)
    scores = torch.full((batch, heads, tiles, blocks), -math.inf, dtype=q.dtype)
    keys = k_cmp.repeat_interleave(share, 2)
    for t in range(tiles):
        mean = q[:, t * tile : (t + 1) * tile].mean(1)
        last = min((t + 1) * tile, n) - 1
        counting = keys.shape[1] if not (causal and complete) else (last + 1) // block_size
        scores[:, :, t, :counting] = torch.einsum("bhd,bihd->bhi", mean, keys[:, :counting])
        candidates = last // block_size + 1 if causal else blocks
        order = scores[:, :, t, :candidates].sort(dim=-1, descending=True, stable=True).indices
        chosen[:, :, t].scatter_(-1, order[..., :num_selected], True)
    return chosen


def chosen_blocks(block_idx: Tensor, blocks: int) -> Tensor:
    """Lists [.., k] → bool [.., blocks]; entries that are no block, or come twice, count for nothing."""
    inside = (block_idx >= 0) & (block_idx < blocks)
    chosen = torch.zeros(*block_idx.shape[:-1], blocks + 1, dtype=torch.bool, device=block_idx.device)
    return chosen.scatter_(-1, torch.where(inside, block_idx, blocks).long(), True)[..., :blocks]


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int = 64,
    num_selected: int = 16,
    window: int = 512,
    tile: int = 1,
    w_k: Tensor | None = None,
    w_v: Tensor | None = None,
    w_gate: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    complete: bool = True,
    select_block: int | None = None,
    block_idx: Tensor | None = None,
) -> Tensor:
    """NSA with mean compression, mean-logit selection per query head and no forced blocks → o [B, N, H, Dv].

    complete: a compressed entry is seen once its whole block has passed, else as soon as it has begun.
    block_idx [B, H or Hkv, tiles, k]: attend these blocks of select_block tokens instead of selecting.
    """
    n, heads = q.shape[1], q.shape[2]
    token = torch.arange(n)
    k_cmp, v_cmp = compress(k, block_size, w_k), compress(v, block_size, w_v)
    length = select_block or block_size
    if block_idx is None:
        chosen = select(q.detach(), k_cmp.detach(), block_size, num_selected, tile, causal, complete)
    else:
        chosen = chosen_blocks(block_idx, -(-n // length))
    chosen = chosen.repeat_interleave(heads // chosen.shape[1], 1)
    selected = chosen[:, :, token // tile][..., token // length]
    first_seen = torch.arange(k_cmp.shape[1]) * block_size + (block_size - 1 if complete else 0)
    compressed = torch.ones(n, k_cmp.shape[1], dtype=torch.bool)
    if causal:
        selected = selected & (token[None, :] <= token[:, None])
        compressed = first_seen[None, :] <= token[:, None]
    o_cmp = masked_attention(q, k_cmp, v_cmp, compressed, scale)
    o_slc = masked_attention(q, k, v, selected, scale)
    o_win = masked_attention(q, k, v, window_mask(n, window, causal), scale)
    if w_gate is None:
        return (o_cmp + o_slc + o_win) / 3
    gates = torch.einsum("bnhd,hgd->bnhg", q, w_gate).sigmoid()
    return gates[..., :1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:] * o_win
