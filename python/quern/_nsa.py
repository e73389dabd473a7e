# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Native sparse attention for every framework."""

from __future__ import annotations

from typing import Any

from ._faces import Short, run


def settings_of(
    *,
    preset: str | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    window: int = 512,
    gate: Any = None,
    gates: Any = None,
    block_idx: Any = None,
    group_idx: Any = None,
    q_index: Any = None,
    **others: Any,
) -> tuple[tuple[str, Any], ...]:
    """The parameters of the operation nsa; the preset comes first."""
    return (
        ("preset", preset),
        ("block_size", block_size),
        ("num_selected", num_selected),
        ("window", window),
        *others.items(),
        *zip(_KINDS, _kinds_of(gate, gates, block_idx, group_idx, q_index)),
    )


_KINDS = ("gate", "selection", "groups")


def _kinds_of(gate: Any, gates: Any, block_idx: Any, group_idx: Any, q_index: Any) -> tuple[Any, ...]:
    """How gates, lists of blocks and those of groups come."""
    if gate is not None and gates is not None:
        raise ValueError("gate and gates are given: one of them is accepted")
    return (
        "weights" if gate is not None else "given" if gates is not None else "none",
        "given" if block_idx is not None else "indexed" if q_index is not None else None,
        None if group_idx is None else "given",
    )


_SETTINGS = ("preset", "block_size", "num_selected", "window", "stride", "select_block", "tile", "compress")
_SETTINGS += ("scope", "metric", "compressed_visibility", "forced_first", "forced_local")
_SETTINGS += ("max_compressed_groups", "causal", "scale", "branches", *_KINDS)
_INPUTS = ("q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp", "w_k", "w_v", "pe_k", "pe_v")
_INPUTS += ("w_gate", "gates", "block_idx", "group_idx", "q_index", "k_index", "cu_seqlens", "cu_seqlens_cmp")
_SHORT = Short("nsa", _SETTINGS, _INPUTS, "o")


def nsa(
    q: Any,
    k: Any,
    v: Any,
    *,
    gate: Any = None,
    gates: Any = None,
    preset: str | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    window: int = 512,
    stride: int | None = None,
    select_block: int | None = None,
    tile: int | None = None,
    compress: str = "mean",
    scope: str | None = None,
    metric: str | None = None,
    compressed_visibility: str | None = None,
    forced_first: int | None = None,
    forced_local: int | None = None,
    max_compressed_groups: int = 0,
    causal: bool = True,
    scale: float | None = None,
    branches: str | None = None,
    w_k: Any = None,
    w_v: Any = None,
    pe_k: Any = None,
    pe_v: Any = None,
    k_cmp: Any = None,
    v_cmp: Any = None,
    k_slc: Any = None,
    v_slc: Any = None,
    k_win: Any = None,
    v_win: Any = None,
    block_idx: Any = None,
    group_idx: Any = None,
    q_index: Any = None,
    k_index: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_cmp: Any = None,
    save_branches: bool = False,
) -> Any:
    """Native sparse attention: compress, select, attend over three branches, gate → o [B, N, H, Dv].

    q [B, N, H, D], k [B, N, Hkv, D], v [B, N, Hkv, Dv]; or varlen, [T, ·, ·] with cu_seqlens int32 [B+1].
    f32, f16 or bf16; query head h reads head h // (H / Hkv) of k and v.

    gate: weights [H, 3, D] of the gates sigmoid(q · w), in the order cmp, slc, win; gates: gates f32 [B, N,
    H, 3] instead; neither: a third each. preset "tile256" sets tile, scope, metric, visibility and forced
    blocks; what is given beside it overrides it.

    block_size, stride, select_block: tokens of a compressed block, from one to the next, of a selection block
    (None: block_size). num_selected: blocks that a tile of `tile` queries selects, the first forced_first and
    the newest forced_local among them. window: keys, the query's own included. compress: "mean" with optional
    w_k [Hkv, D, D], w_v [Hkv, Dv, Dv]; "linear" with w_k [Hkv, l·D, D], w_v and optional pe_k [Hkv, l, D],
    pe_v; "given" with k_cmp, v_cmp [B, Nc, Hkv, ·] (varlen: and cu_seqlens_cmp). scope "group" or "head";
    metric "softmax" or "mean-logit"; compressed_visibility "complete" or "started". max_compressed_groups:
    groups of 128 entries that a tile attends, 0 all. branches: "all", or some of "cmp,slc,win"; None: all, or
    the preset's. k_slc, v_slc,
    k_win, v_win: keys and values of these branches alone. block_idx [B, Hs, tiles, num_selected], group_idx:
    lists instead of selecting. scale None: 1/√D.

    preset "msa" is MiniMax Sparse Attention: the selected branch alone, without gates, over blocks of 128
    that q_index [B, N, Hs, D_I] and k_index [B, N, D_I] or [B, N, Hs, D_I] choose as in quern.nsa_index, or
    that block_idx names. The two may choose for any branches; they have no gradient.

    With torch it is differentiable by every tensor of floats; weights' gradients are computed in f32. A
    training forward keeps the statistics, gates, compressed keys and lists; with save_branches also the
    branches' outputs, which the backward otherwise computes again. Selection carries no gradient.
    """
    values = (preset, block_size, num_selected, window, stride, select_block, tile, compress)
    values += (scope, metric, compressed_visibility, forced_first, forced_local, max_compressed_groups)
    values += (causal, scale, branches) + _kinds_of(gate, gates, block_idx, group_idx, q_index)
    inputs = (q, k, v, k_slc, v_slc, k_win, v_win, k_cmp, v_cmp, w_k, w_v, pe_k, pe_v)
    inputs += (gate, gates, block_idx, group_idx, q_index, k_index, cu_seqlens, cu_seqlens_cmp)
    made = _SHORT.make(values, inputs)
    if made is not None:
        return made
    settings, tensors = tuple(zip(_SETTINGS, values)), dict(zip(_INPUTS, inputs))
    kept = ("o_cmp", "o_slc", "o_win") if save_branches else ()
    return run("nsa", settings, tensors, ("o",), keep=kept)[0]
