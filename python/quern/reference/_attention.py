# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Dense attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """q [B, N, H, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv], seen bool, broadcast to [B, H, N, S], sink [H], of
    the denominator alone → [B, N, H, Dv].

    A query that sees no key gives 0 and takes part in no gradient.
    """
    return attention_and_lse(q, k, v, seen, scale, sink)[0]


def attention_and_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """masked_attention() and the logarithms of its sums without the sink [B, H, N], -inf where no key is
    seen."""
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("bnhd,bshd->bhns", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    seen = seen.expand_as(scores)
    some = seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen & some, -math.inf).softmax(-1).masked_fill(~some, 0)
    if sink is not None:
        sums = scores.masked_fill(~seen & some, -math.inf).logsumexp(-1, keepdim=True)
        weights = weights * torch.sigmoid(sums - sink[:, None, None])
    lse = scores.detach().masked_fill(~seen, -math.inf).logsumexp(-1)
    return torch.einsum("bhns,bshd->bnhd", weights, v), lse


def window_mask(
    n: int, window: int, causal: bool, keys: int | None = None, first: int | None = None
) -> Tensor:
    """bool [n, keys]: which keys (columns) a query (row) sees within a window; 0: no window. Queries stand
    from position `first` on (None: they are the last)."""
    keys = n if keys is None else keys
    q = torch.arange(n)[:, None] + (keys - n if first is None else first)
    key = torch.arange(keys)[None, :]
    if causal:
        return (key <= q) & (key > q - window) if window else key <= q
    return (q - key).abs() <= window // 2 if window else torch.ones(n, keys, dtype=torch.bool)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    query_offset: int | None = None,
    sink: Tensor | None = None,
    kv_first: Tensor | None = None,
    kv_count: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """quern.attention of one fixed length."""
    keys, seen = k.shape[1], torch.zeros(q.shape[0], 1, q.shape[1], k.shape[1], dtype=torch.bool)
    for b in range(q.shape[0]):
        first = 0 if kv_first is None else int(kv_first[b])
        end = keys if kv_count is None else int(kv_count[b])
        seen[b, 0, :, first:end] = window_mask(q.shape[1], window, causal, end - first, query_offset)
    made = attention_and_lse(q, k, v, seen, scale, sink)
    return made if return_lse else made[0]
