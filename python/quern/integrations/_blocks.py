# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Attention over lists of blocks, MiniMax-M3's: handed in, or chosen by queries and keys of an indexer. Those
that are chosen here are counted from a sequence's first token, wherever padding puts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import attention, nsa, nsa_index
from ._masks import rows_at, to_front

FEW = 8  # Tokens of a step whose blocks are gathered; more are attended as the last ones of whole sequences.


class Chooser(NamedTuple):
    """What chooses blocks: queries [B, N, Hs, D_I] and keys [B, S, D_I], rotated."""

    q: Tensor
    k: Tensor
    block: int
    count: int
    local: int

    def lists(self, q: Tensor, k: Tensor, **varlen: Any) -> Tensor:
        """The blocks of each query, int32 [B, Hs, N, count]."""
        settings = {"select_block": self.block, "num_selected": self.count, "forced_local": self.local}
        return nsa_index(q, k, **settings, **varlen)[0]

    def takes_all(self, tokens: int) -> bool:
        """Whether every query of so many tokens chooses every block that it sees."""
        return tokens <= self.block * self.count


def attend_from(rows: list[Tensor], first: Tensor | None, **settings: Any) -> Tensor:
    """Attention of sequences that begin at these keys, None: at 0. A GPU's fast kernels, and its backward,
    take sequences that begin at 0: whole ones are moved there and back."""
    tokens = rows[0].shape[1]
    if first is None or not rows[0].is_cuda or tokens != rows[1].shape[1]:
        return attention(*rows, **settings, kv_first=first)
    there, back = to_front(first, tokens)
    return rows_at(attention(*(rows_at(t, there) for t in rows), **settings), back)


def attend_lists(
    rows: list[Tensor], lists: Tensor, block: int, scale: float | None, **varlen: Any
) -> Tensor:
    """Over the blocks of each token's list [B, Hs, N, k]: of the last N tokens, where a cache has more."""
    q, k, v = rows
    more = 0 if varlen else k.shape[1] - q.shape[1]
    if more:
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, more, 0))
        lists = torch.nn.functional.pad(lists, (0, 0, more, 0), value=-1)
    chosen = {"block_idx": lists, "select_block": block, "num_selected": lists.shape[-1]}
    o = nsa(q, k, v, preset="msa", **chosen, scale=scale, **varlen)
    return o[:, more:] if more else o


def attend_chosen(
    rows: list[Tensor],
    chooser: Chooser,
    scale: float | None,
    first: Tensor | None,
    starts: Tensor | None,
) -> Tensor:
    """q [B, N, H, D], k, v [B, S, Hkv, ·], the queries the last ones of S → [B, N, H, Dv]."""
    q, k, v = rows
    tokens, keys = q.shape[1], k.shape[1]
    if starts is not None:
        return _packed(rows, chooser, scale, starts)
    if chooser.takes_all(keys):
        return attend_from(rows, first, scale=scale)
    if tokens == keys:
        return _whole(rows, chooser, scale, first)
    if first is None and tokens > FEW:
        return attend_lists(rows, chooser.lists(chooser.q, chooser.k), chooser.block, scale)
    if tokens > FEW:
        return _row_by_row(rows, chooser, scale, first.tolist())
    return _step(rows, chooser, scale, first)


def _packed(rows: list[Tensor], chooser: Chooser, scale: float | None, starts: Tensor) -> Tensor:
    if rows[0].shape[1] != rows[1].shape[1]:
        raise ValueError("attention quern: packed sequences go on in a cache: whole ones are accepted")
    flat = [t.reshape(-1, *t.shape[2:]) for t in rows]
    lists = chooser.lists(chooser.q.flatten(0, 1), chooser.k.flatten(0, 1), cu_seqlens_q=starts)
    o = attend_lists(flat, lists, chooser.block, scale, cu_seqlens=starts)
    return o.reshape(*rows[0].shape[:3], o.shape[-1])


def _whole(rows: list[Tensor], chooser: Chooser, scale: float | None, first: Tensor | None) -> Tensor:
    if first is None:
        return attend_lists(rows, chooser.lists(chooser.q, chooser.k), chooser.block, scale)
    there, back = to_front(first, rows[0].shape[1])
    lists = chooser.lists(rows_at(chooser.q, there), rows_at(chooser.k, there))
    return rows_at(attend_lists([rows_at(t, there) for t in rows], lists, chooser.block, scale), back)


def _row_by_row(rows: list[Tensor], chooser: Chooser, scale: float | None, firsts: list[int]) -> Tensor:
    """A chunk of sequences that begin at different keys."""
    q, k, v = rows
    past = k.shape[1] - q.shape[1]
    made = q.new_zeros((*q.shape[:3], v.shape[-1]))
    for b, first in enumerate(firsts):
        at, row = max(0, first - past), slice(b, b + 1)
        if at == q.shape[1]:
            continue
        own = Chooser(chooser.q[row, at:], chooser.k[row, first:], *chooser[2:])
        given = [q[row, at:], k[row, first:], v[row, first:]]
        made[row, at:] = attend_chosen(given, own, scale, None, None)
    return made


def _step(rows: list[Tensor], chooser: Chooser, scale: float | None, first: Tensor | None) -> Tensor:
    """A few tokens of each sequence: the rows of their blocks are gathered, and attended as sequences of one
    token each."""
    q, k, v = rows
    batch, tokens, heads = q.shape[:3]
    keys, kv_heads = k.shape[1:3]
    if first is None:
        lists = chooser.lists(chooser.q, chooser.k)
        first = lists.new_zeros(batch)
    else:
        pairs = zip(chooser.q.split(1), chooser.k.split(1), first.tolist())
        lists = torch.cat([_lists_from(chooser, q_row, k_row, at) for q_row, k_row, at in pairs])
    # Token j of entry i of a list, [B, Hkv, N, k, block]; entries ascend, so those that exist come first.
    inside = torch.arange(chooser.block, device=q.device)
    at = lists[..., None].long() * chooser.block + inside + first.long().view(-1, 1, 1, 1, 1)
    own = torch.arange(keys - tokens, keys, device=q.device).view(1, 1, -1, 1, 1)
    seen = (lists[..., None] >= 0) & (at <= own)
    count = seen.flatten(-2).sum(-1).int()
    at = at.clamp(0, keys - 1).flatten(-2)
    row = torch.arange(batch, device=q.device).view(-1, 1, 1, 1)
    head = torch.arange(kv_heads, device=q.device).view(1, -1, 1, 1)
    gathered = [t[row, at, head].flatten(0, 2)[:, :, None] for t in (k, v)]
    queries = q.view(batch, tokens, kv_heads, heads // kv_heads, -1).transpose(1, 2).flatten(0, 2)[:, None]
    o = attention(queries, *gathered, scale=scale, kv_count=count.flatten())
    return o.view(batch, kv_heads, tokens, heads // kv_heads, -1).transpose(1, 2).flatten(2, 3)


def _lists_from(chooser: Chooser, q: Tensor, k: Tensor, first: int) -> Tensor:
    """A sequence's lists, counted from its first key; those of queries before it are empty."""
    more = max(0, q.shape[1] - (k.shape[1] - first))
    lists = chooser.lists(q[:, more:], k[:, first:])
    return torch.nn.functional.pad(lists, (0, 0, more, 0), value=-1) if more else lists
