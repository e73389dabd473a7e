# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Native sparse attention and its steps: compress, attend, gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._attention import attention_and_lse, window_mask
from ._nsa_select import GROUP, chosen_blocks, first_seen, select


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


def gates_of(q: Tensor, w_gate: Tensor) -> Tensor:
    """q [B, N, H, D], w_gate [H, 3, D] → gates [B, N, H, 3], in the order cmp, slc, win."""
    return torch.einsum("bnhd,hgd->bnhg", q, w_gate).sigmoid()


def combine(o_cmp: Tensor, o_slc: Tensor, o_win: Tensor, gates: Tensor | None = None) -> Tensor:
    """Σ_b gates[.., b] · o_b; without gates a third each."""
    if gates is None:
        return (o_cmp + o_slc + o_win) / 3
    return gates[..., :1] * o_cmp + gates[..., 1:2] * o_slc + gates[..., 2:] * o_win


def gate(
    q: Tensor,
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    w_gate: Tensor | None = None,
    gates: Tensor | None = None,
) -> Tensor:
    """Σ_b gates[.., b] · o_b, the gates sigmoid(q · w_gate), or handed in, or a third each."""
    return combine(o_cmp, o_slc, o_win, gates if w_gate is None else gates_of(q, w_gate))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    chosen: Tensor,
    *,
    block_size: int = 64,
    window: int = 512,
    tile: int = 1,
    causal: bool = True,
    scale: float | None = None,
    complete: bool = True,
    stride: int | None = None,
    select_block: int | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    group_idx: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The branches' outputs [B, N, H, Dv] and lse [B, H, N], in the order cmp, slc, win.

    chosen: the blocks of select(), or lists of them. group_idx [B, H or Hkv, tiles, c]: the compressed branch
    attends these groups of 128 entries alone. k_slc, v_slc, k_win, v_win: keys and values of a branch alone.
    """
    n, heads, token = q.shape[1], q.shape[2], torch.arange(q.shape[1])
    length = select_block or block_size
    if chosen.dtype != torch.bool:
        chosen = chosen_blocks(chosen, -(-n // length))
    chosen = chosen.repeat_interleave(heads // chosen.shape[1], 1)
    selected = chosen[:, :, token // tile][..., token // length]
    compressed = torch.ones(n, k_cmp.shape[1], dtype=torch.bool)
    if causal:
        selected = selected & (token[None, :] <= token[:, None])
        newest = first_seen(k_cmp.shape[1], block_size, stride or block_size, complete)
        compressed = newest[None, :] <= token[:, None]
    if group_idx is not None:
        entry = torch.arange(k_cmp.shape[1])
        groups = chosen_blocks(group_idx, -(-k_cmp.shape[1] // GROUP))
        groups = groups.repeat_interleave(heads // groups.shape[1], 1)
        compressed = compressed & groups[:, :, token // tile][..., entry // GROUP]
    k_slc, v_slc = k if k_slc is None else k_slc, v if v_slc is None else v_slc
    k_win, v_win = k if k_win is None else k_win, v if v_win is None else v_win
    o_cmp, lse_cmp = attention_and_lse(q, k_cmp, v_cmp, compressed, scale)
    o_slc, lse_slc = attention_and_lse(q, k_slc, v_slc, selected, scale)
    o_win, lse_win = attention_and_lse(q, k_win, v_win, window_mask(n, window, causal), scale)
    return (o_cmp, o_slc, o_win), (lse_cmp, lse_slc, lse_win)


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
    scope: str = "group",
    metric: str = "softmax",
    forced_first: int = 1,
    forced_local: int = 2,
    k_cmp: Tensor | None = None,
    v_cmp: Tensor | None = None,
    k_slc: Tensor | None = None,
    v_slc: Tensor | None = None,
    k_win: Tensor | None = None,
    v_win: Tensor | None = None,
    block_idx: Tensor | None = None,
    group_idx: Tensor | None = None,
) -> Tensor:
    """NSA → o [B, N, H, Dv], by default as quern.nsa.

    complete: a compressed entry is seen once its whole block has passed, else as soon as it has begun. k_cmp,
    v_cmp: entries instead of compressing; k_slc, v_slc, k_win, v_win: keys and values of a branch alone.
    block_idx [B, H or Hkv, tiles, k]: attend these blocks of select_block tokens instead of selecting.
    group_idx [B, H, tiles, c]: the compressed branch attends these groups of 128 entries alone.
    """
    if k_cmp is None or v_cmp is None:
        k_cmp = compress(k, block_size, w_k, stride=stride, pe=pe_k, linear=linear)
        v_cmp = compress(v, block_size, w_v, stride=stride, pe=pe_v, linear=linear)
    blocks: dict[str, Any] = {"stride": stride, "select_block": select_block, "scale": scale}
    if block_idx is None:
        chosen = select(
            q.detach(),
            k_cmp.detach(),
            block_size,
            num_selected,
            tile,
            causal,
            complete,
            scope=scope,
            metric=metric,
            forced_first=forced_first,
            forced_local=forced_local,
            **blocks,
        )
    branches, _ = attend(
        q,
        k,
        v,
        k_cmp,
        v_cmp,
        chosen if block_idx is None else block_idx,
        block_size=block_size,
        window=window,
        tile=tile,
        causal=causal,
        complete=complete,
        k_slc=k_slc,
        v_slc=v_slc,
        k_win=k_win,
        v_win=v_win,
        group_idx=group_idx,
        **blocks,
    )
    return gate(q, *branches, w_gate, gates)
