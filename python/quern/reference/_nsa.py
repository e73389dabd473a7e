# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Native sparse attention and its steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._attention import masked_attention, window_mask


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
    if x.shape[1] < block_size:
        return x[:, :0]
    blocks = x.unfold(1, block_size, stride or block_size).movedim(-1, 3)  # [B, Nc, Hkv, l, D]
    if linear:
        shifted = blocks if pe is None else blocks + pe
        return torch.einsum("bihc,hce->bihe", shifted.flatten(3), weight)
    mean = blocks.mean(3)
    return mean if weight is None else torch.einsum("bihc,hce->bihe", mean, weight)


def _first_seen(entries: int, block_size: int, stride: int, complete: bool) -> Tensor:
    return torch.arange(entries) * stride + (block_size - 1 if complete else 0)


def _softmax_scores(
    q: Tensor,
    keys: Tensor,
    seen: Tensor,
    scale: float | None,
    length: int,
    stride: int,
    blocks: int,
    ratio: int,
) -> Tensor:
    """[B, H, N, blocks]: each query's probabilities of compressed entries, gathered by overlap in space."""
    scores = torch.einsum("bnhd,bihd->bhni", q, keys) * (scale or 1 / math.sqrt(q.shape[-1]))
    some = seen.any(-1, keepdim=True)
    p = scores.masked_fill(~seen & some, -math.inf).softmax(-1).masked_fill(~some, 0)
    out = q.new_zeros(*p.shape[:-1], blocks)
    for block in range(blocks):
        for m in range(ratio):
            for n in range(length // stride):
                entry = ratio * block + m - n
                if 0 <= entry < p.shape[-1]:
                    out[..., block] += p[..., entry]
    return out


def select(
    q: Tensor,
    k_cmp: Tensor,
    block_size: int,
    num_selected: int,
    tile: int = 1,
    causal: bool = True,
    complete: bool = True,
    *,
    stride: int | None = None,
    select_block: int | None = None,
    scope: str = "head",
    metric: str = "mean_logit",
    forced_first: int = 0,
    forced_local: int = 0,
    scale: float | None = None,
) -> Tensor:
    """The blocks of greatest score of every tile: bool [B, Hs, tiles, blocks of N tokens].

    A block without a compressed entry that counts scores 0 (softmax) or -inf (mean_logit) and fills last, the
    lowest first. Ties go to the lowest block.
    """
    batch, n, heads, _ = q.shape
    stride, length = stride or block_size, select_block or block_size
    tiles, blocks = -(-n // tile), -(-n // length)
    share = heads // k_cmp.shape[2]
    keys = k_cmp.repeat_interleave(share, 2)
    first_seen = _first_seen(keys.shape[1], block_size, stride, complete)
    token = torch.arange(n)
    seen = first_seen[None, :] <= token[:, None] if causal else torch.ones(n, keys.shape[1], dtype=torch.bool)
    if metric == "softmax":
        each = _softmax_scores(q, keys, seen, scale, block_size, stride, blocks, length // stride)
    lists = heads if scope == "head" else k_cmp.shape[2]
    chosen = torch.zeros(batch, lists, tiles, blocks, dtype=torch.bool)
    for t in range(tiles):
        rows = slice(t * tile, min((t + 1) * tile, n))
        last = rows.stop - 1
        if metric == "softmax":
            scores = each[:, :, rows].sum(2)
        else:
            logits = torch.einsum("bhd,bihd->bhi", q[:, rows].mean(1), keys)
            scores = torch.full((batch, heads, blocks), -math.inf, dtype=q.dtype)
            counting = int(seen[last].sum())
            scores[:, :, :counting] = logits[:, :, :counting]
        if scope != "head":
            scores = scores.unflatten(1, (lists, share)).mean(2)
        candidates = last // length + 1 if causal else blocks
        local = (
            range(max(rows.start // length - forced_local + 1, 0), candidates)
            if forced_local and causal
            else ()
        )
        forced = sorted({*range(min(forced_first, candidates)), *local})
        scores[:, :, forced] = math.inf
        order = scores[:, :, :candidates].sort(dim=-1, descending=True, stable=True).indices
        chosen[:, :, t].scatter_(-1, order[..., :num_selected], True)
    return chosen


def chosen_blocks(block_idx: Tensor, blocks: int) -> Tensor:
    """Lists [.., k] → bool [.., blocks]; entries that are no block, or come twice, count for nothing."""
    inside = (block_idx >= 0) & (block_idx < blocks)
    chosen = torch.zeros(*block_idx.shape[:-1], blocks + 1, dtype=torch.bool, device=block_idx.device)
    return chosen.scatter_(-1, torch.where(inside, block_idx, blocks).long(), True)[..., :blocks]


def gate(
    q: Tensor,
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    w_gate: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Σ_b gates[.., b] · o_b, the gates sigmoid(q · w_gate), or handed in, or a third each."""
    if w_gate is not None:
        gates = torch.einsum("bnhd,hgd->bnhg", q, w_gate).sigmoid()
    if gates is None:
        return (o_cmp + o_slc + o_win) / 3
    return gates[..., :1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:] * o_win


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
    pe_k: Tensor | None = None,
    pe_v: Tensor | None = None,
    linear: bool = False,
    w_gate: Tensor | None = None,
    gates: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    complete: bool = True,
    stride: int | None = None,
    select_block: int | None = None,
    scope: str = "head",
    metric: str = "mean_logit",
    forced_first: int = 0,
    forced_local: int = 0,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    block_idx: Tensor | None = None,
    group_idx: Tensor | None = None,
) -> Tensor:
    """NSA → o [B, N, H, Dv]; its selection is by default that of preset "tile256", without forced blocks.

    complete: a compressed entry is seen once its whole block has passed, else as soon as it has begun. k_cmp,
    v_cmp: entries instead of compressing; k_slc, v_slc, k_win, v_win: keys and values of a branch alone.
    block_idx [B, H or Hkv, tiles, k]: attend these blocks of select_block tokens instead of selecting.
    group_idx [B, H, tiles, c]: the compressed branch attends these groups of 128 entries alone.
    """
    n, heads = q.shape[1], q.shape[2]
    token = torch.arange(n)
    if k_cmp is None or v_cmp is None:
        k_cmp = compress(k, block_size, w_k, stride=stride, pe=pe_k, linear=linear)
        v_cmp = compress(v, block_size, w_v, stride=stride, pe=pe_v, linear=linear)
    length = select_block or block_size
    if block_idx is None:
        chosen = select(
            q.detach(),
            k_cmp.detach(),
            block_size,
            num_selected,
            tile,
            causal,
            complete,
            stride=stride,
            select_block=select_block,
            scope=scope,
            metric=metric,
            forced_first=forced_first,
            forced_local=forced_local,
            scale=scale,
        )
    else:
        chosen = chosen_blocks(block_idx, -(-n // length))
    chosen = chosen.repeat_interleave(heads // chosen.shape[1], 1)
    selected = chosen[:, :, token // tile][..., token // length]
    compressed = torch.ones(n, k_cmp.shape[1], dtype=torch.bool)
    if causal:
        selected = selected & (token[None, :] <= token[:, None])
        first_seen = _first_seen(k_cmp.shape[1], block_size, stride or block_size, complete)
        compressed = first_seen[None, :] <= token[:, None]
    if group_idx is not None:
        entry = torch.arange(k_cmp.shape[1])
        groups = chosen_blocks(group_idx, -(-k_cmp.shape[1] // 128))
        compressed = compressed & groups[:, :, token // tile][..., entry // 128]
    o_cmp = masked_attention(q, k_cmp, v_cmp, compressed, scale)
    o_slc = masked_attention(q, k if k_slc is None else k_slc, v if v_slc is None else v_slc, selected, scale)
    k, v = k if k_win is None else k_win, v if v_win is None else v_win
    o_win = masked_attention(q, k, v, window_mask(n, window, causal), scale)
    return gate(q, o_cmp, o_slc, o_win, w_gate, gates)
