# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Keys and values in pages: a step's rows into them, attention from them, a sequence as rows.

A page [Hkv, 64 (D + Dv)] holds 64 keys, then 64 values, of each head. Row i of a sequence stands in page
table[i // 64]; a ring's columns repeat.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._attention import masked_attention, window_mask
from ._nsa import compress, nsa

__all__ = ["append_step", "attention_step", "nsa_step", "pack", "unpack"]

PAGE = 64


def read(pool: Tensor, table: Tensor, first: int, last: int, dim: int) -> tuple[Tensor, Tensor]:
    """Rows first ... last - 1 of a sequence: keys [n, Hkv, D], values [n, Hkv, Dv]."""
    at = torch.arange(first, last)
    pages = pool[table[at // PAGE % len(table)].long()]  # [n, Hkv, 64 (D + Dv)]
    keys, values = pages[..., : PAGE * dim], pages[..., PAGE * dim :]
    n, heads = pages.shape[:2]
    row = torch.arange(n), slice(None), at % PAGE
    return keys.reshape(n, heads, PAGE, dim)[row], values.reshape(n, heads, PAGE, -1)[row]


def write(pool: Tensor, table: Tensor, first: int, k: Tensor, v: Tensor) -> None:
    """Rows first and on of a sequence become k [n, Hkv, D], v [n, Hkv, Dv]."""
    dim = k.shape[-1]
    for i in range(len(k)):
        page, slot = pool[int(table[(first + i) // PAGE % len(table)])], (first + i) % PAGE
        page[:, : PAGE * dim].unflatten(-1, (PAGE, dim))[:, slot] = k[i]
        page[:, PAGE * dim :].unflatten(-1, (PAGE, -1))[:, slot] = v[i]


def sequences(slots: Tensor, positions: Tensor, cu: Tensor) -> list[tuple[int, int, int, int]]:
    """(its row of the tables, tokens before the step, first and last row of the call) of each sequence."""
    rows = zip(slots.tolist(), positions.tolist(), cu[:-1].tolist(), cu[1:].tolist())
    return [(b, at, first, last) for b, (slot, at, first, last) in enumerate(rows) if slot >= 0]


def append_step(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    cu: Tensor,
    tokens: Tensor,
    tokens_table: Tensor,
    *,
    entries: Tensor | None = None,
    entries_table: Tensor | None = None,
    copies: Tensor | None = None,
    block_size: int = 0,
    stride: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """→ the pools of tokens and of entries after the step; entries are means."""
    dim, stride = k.shape[-1], stride or block_size
    pools = [t if t is None else t.clone() for t in (tokens, entries)]
    for pool, source, to in [] if copies is None else copies.tolist():
        if pool in (0, 1):
            pools[pool][to] = pools[pool][source].clone()
    for b, at, first, last in sequences(slots, positions, cu):
        write(pools[0], tokens_table[b], at, k[first:last], v[first:last])
        if entries is None:
            continue
        end = at + last - first
        old, new = (max(0, (n - block_size) // stride + 1) for n in (at, end))
        whole = read(pools[0], tokens_table[b], 0, end, dim)
        made = [compress(t[None], block_size, stride=stride)[0, old:new] for t in whole]
        write(pools[1], entries_table[b], old, *made)
    return pools[0], pools[1]


def attention_step(
    q: Tensor,
    slots: Tensor,
    positions: Tensor,
    cu: Tensor,
    tokens: Tensor,
    tokens_table: Tensor,
    *,
    window: int = 0,
    sink: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] → [T, H, Dv]; rows of no sequence are 0."""
    dim = q.shape[-1]
    o = q.new_zeros(*q.shape[:2], tokens.shape[-1] // PAGE - dim)
    for b, at, first, last in sequences(slots, positions, cu):
        k, v = (t[None] for t in read(tokens, tokens_table[b], 0, at + last - first, dim))
        seen = window_mask(last - first, window, True, k.shape[1])
        o[first:last] = masked_attention(q[None, first:last], k, v, seen, sink=sink)[0]
    return o


def nsa_step(
    q: Tensor,
    slots: Tensor,
    positions: Tensor,
    cu: Tensor,
    tokens: Tensor,
    tokens_table: Tensor,
    **settings: object,
) -> Tensor:
    """The same by native sparse attention of the whole sequences, whose entries are made anew."""
    dim = q.shape[-1]
    o = q.new_zeros(*q.shape[:2], tokens.shape[-1] // PAGE - dim)
    for b, at, first, last in sequences(slots, positions, cu):
        k, v = (t[None] for t in read(tokens, tokens_table[b], 0, at + last - first, dim))
        queries = torch.cat((q.new_zeros(at, *q.shape[1:]), q[first:last]))[None]
        made = nsa(queries, k, v, **settings)
        o[first:last] = (made[0] if isinstance(made, tuple) else made)[0, at:]
    return o


def pack(tokens: Tensor, tokens_table: Tensor, n: int, dim: int) -> Tensor:
    """The first n rows of a sequence [n, Hkv, D + Dv], as they follow each other in packed bytes."""
    return torch.cat(read(tokens, tokens_table, 0, n, dim), -1)


def unpack(rows: Tensor, tokens: Tensor, tokens_table: Tensor, dim: int) -> Tensor:
    """The pool with such rows in the sequence's pages."""
    pool = tokens.clone()
    write(pool, tokens_table, 0, rows[..., :dim], rows[..., dim:])
    return pool
