# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What native sparse attention selects: lists of blocks, and of groups of compressed entries. A choice has no
gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 128  # entries


def first_seen(entries: int, block_size: int, stride: int, complete: bool) -> Tensor:
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
    scope: str = "group",
    metric: str = "softmax",
    forced_first: int = 1,
    forced_local: int = 2,
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
    newest = first_seen(keys.shape[1], block_size, stride, complete)
    token = torch.arange(n)
    seen = newest[None, :] <= token[:, None] if causal else torch.ones(n, keys.shape[1], dtype=torch.bool)
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


def index(
    q_index: Tensor,
    k_index: Tensor,
    *,
    select_block: int = 128,
    num_selected: int = 16,
    forced_first: int = 0,
    forced_local: int = 1,
    query_offset: int = -1,
) -> tuple[Tensor, Tensor]:
    """The block indexer: the blocks of every query, bool [B, Hs, N, blocks], and their scores, -inf where a
    block is no candidate. k_index [B, S, D] or [B, S, Hs, D]."""
    n, s = q_index.shape[1], k_index.shape[1]
    keys = k_index if k_index.dim() == 4 else k_index[:, :, None].expand(-1, -1, q_index.shape[2], -1)
    position = torch.arange(n) + (query_offset if query_offset >= 0 else s - n)
    dots = torch.einsum("bnhd,bshd->bhns", q_index, keys)
    dots = dots.masked_fill(torch.arange(s) > position[:, None], -math.inf)
    dots = torch.nn.functional.pad(dots, (0, -s % select_block), value=-math.inf)
    scores = dots.unflatten(-1, (-1, select_block)).amax(-1)
    block = torch.arange(scores.shape[-1])
    candidates = (block * select_block <= position[:, None]) & (position[:, None] >= 0)
    behind = position[:, None].div(select_block, rounding_mode="floor") - block
    forced = candidates & ((block < forced_first) | ((behind >= 0) & (behind < forced_local)))
    ranked = scores.masked_fill(forced, math.inf).masked_fill(~candidates, -math.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :num_selected]
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & candidates, scores


def index_loss(
    q_index: Tensor,
    k_index: Tensor,
    q: Tensor,
    k: Tensor,
    block_idx: Tensor,
    *,
    select_block: int = 128,
    query_offset: int = -1,
    lambda_: float = 1.0,
    scale: float | None = None,
    index_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The block indexer's loss [] and that of every row [B, Hs, N], for lists [B, Hs, N, k]. Differentiable
    by q_index and k_index."""
    n, s, lists = q_index.shape[1], k_index.shape[1], q_index.shape[2]
    keys = k_index if k_index.dim() == 4 else k_index[:, :, None].expand(-1, -1, lists, -1)
    position = torch.arange(n) + (query_offset if query_offset >= 0 else s - n)
    blocks = chosen_blocks(block_idx, -(-s // select_block))
    seen = blocks.repeat_interleave(select_block, -1)[..., :s] & (torch.arange(s) <= position[:, None])
    some = seen.any(-1, keepdim=True)
    out = ~seen & some
    student = torch.einsum("bnhd,bshd->bhns", q_index, keys) * (index_scale or q_index.shape[-1] ** -0.5)
    log_p = student.masked_fill(out, -math.inf).log_softmax(-1)
    heads = q.detach().unflatten(2, (lists, -1))
    scores = torch.einsum("bnhgd,bshd->bhgns", heads, k.detach()) * (scale or q.shape[-1] ** -0.5)
    teacher = scores.masked_fill(out[:, :, None], -math.inf).softmax(-1).mean(2)
    terms = teacher * (teacher.clamp_min(1e-10).log() - log_p)
    rows = terms.masked_fill(~seen, 0).sum(-1)
    count = max(1, int(some[..., 0].any(1).sum()))
    return lambda_ * rows.sum() / (lists * count), rows


def chosen_blocks(block_idx: Tensor, blocks: int) -> Tensor:
    """Lists [.., k] → bool [.., blocks]; entries that are no block, or come twice, count for nothing."""
    inside = (block_idx >= 0) & (block_idx < blocks)
    chosen = torch.zeros(*block_idx.shape[:-1], blocks + 1, dtype=torch.bool, device=block_idx.device)
    return chosen.scatter_(-1, torch.where(inside, block_idx, blocks).long(), True)[..., :blocks]


def select_groups(
    q: Tensor,
    k_cmp: Tensor,
    block_size: int,
    max_groups: int,
    tile: int = 1,
    causal: bool = True,
    complete: bool = True,
    *,
    scope: str = "group",
) -> Tensor:
    """The groups of 128 entries that every tile attends, of greatest mean of mean_logit over the entries that
    the tile's last query sees: bool [B, Hs, tiles, groups]. The groups of the newest entries of its first and
    last query are always among them where causal."""
    batch, n, heads, _ = q.shape
    entries = k_cmp.shape[1]
    tiles, groups = -(-n // tile), -(-entries // GROUP)
    lists = heads if scope == "head" else k_cmp.shape[2]
    keys = k_cmp.repeat_interleave(heads // k_cmp.shape[2], 2)
    newest = first_seen(entries, block_size, block_size, complete)
    chosen = torch.zeros(batch, lists, tiles, groups, dtype=torch.bool)
    for t in range(tiles):
        rows = slice(t * tile, min((t + 1) * tile, n))
        counts = [int((newest <= row).sum()) if causal else entries for row in (rows.start, rows.stop - 1)]
        logits = torch.einsum("bhd,bihd->bhi", q[:, rows].mean(1), keys[:, : counts[1]])
        logits = logits.unflatten(1, (lists, heads // lists)).mean(2)
        if not counts[1]:
            continue
        scores = torch.stack([part.mean(-1) for part in logits.split(GROUP, -1)], -1)
        if causal:
            scores[..., [(count - 1) // GROUP for count in counts if count]] = math.inf
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :max_groups]
        chosen[:, :, t].scatter_(-1, order, True)
    return chosen


def listed(chosen: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """bool [.., blocks] → int32 [.., length] of what is chosen, ascending and padded with -1, and how many
    [..]."""
    blocks = chosen.shape[-1]
    places = torch.where(chosen, torch.arange(blocks), blocks).sort(-1).values
    places = torch.nn.functional.pad(places, (0, max(length - blocks, 0)), value=blocks)[..., :length]
    return places.masked_fill(places == blocks, -1).int(), chosen.sum(-1).clamp(max=length).int()


def convert_blocks(block_idx: Tensor, block_size: int, to: int, n: int) -> tuple[Tensor, Tensor]:
    """As quern.convert_blocks."""
    chosen = chosen_blocks(block_idx, -(-n // block_size))
    tokens = chosen.repeat_interleave(block_size, -1)[..., :n]
    whole = torch.nn.functional.pad(tokens, (0, -n % to)).unflatten(-1, (-1, to)).any(-1)
    return listed(whole, block_idx.shape[-1] * max(block_size // to, 1))
