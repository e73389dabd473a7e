# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The steps of native sparse attention, for every framework: compress, select or index, attend, gate; the
indexer's loss.

Their parameters are those of quern.nsa, by the same names.
"""

from __future__ import annotations

from typing import Any

from . import _arrays
from ._faces import run


def nsa_compress(
    k: Any,
    v: Any,
    *,
    block_size: int = 64,
    stride: int | None = None,
    compress: str = "mean",
    w_k: Any = None,
    w_v: Any = None,
    pe_k: Any = None,
    pe_v: Any = None,
    cu_seqlens: Any = None,
) -> tuple[Any, ...]:
    """k [B, N, Hkv, D], v [B, N, Hkv, Dv] → k_cmp [B, Nc, Hkv, D], v_cmp [B, Nc, Hkv, Dv], one entry for each
    block of block_size tokens that is whole.

    Varlen, k [T, Hkv, D] with cu_seqlens int32 [B+1] → k_cmp [T // stride, Hkv, D], v_cmp and cu_seqlens_cmp
    int32 [B+1]; rows past the last entry are 0. With torch it is differentiable by k, v and the weights.
    """
    settings = (("block_size", block_size), ("stride", stride), ("compress", compress))
    tensors = {"k": k, "v": v, "w_k": w_k, "w_v": w_v, "pe_k": pe_k, "pe_v": pe_v, "cu_seqlens": cu_seqlens}
    varlen = () if cu_seqlens is None else ("cu_seqlens_cmp",)
    return run("nsa-compress", settings, tensors, ("k_cmp", "v_cmp", *varlen))


def nsa_select(
    q: Any,
    k_cmp: Any,
    *,
    preset: str | None = None,
    block_size: int = 64,
    num_selected: int = 16,
    stride: int | None = None,
    select_block: int | None = None,
    tile: int | None = None,
    scope: str | None = None,
    metric: str | None = None,
    compressed_visibility: str | None = None,
    forced_first: int | None = None,
    forced_local: int | None = None,
    max_compressed_groups: int = 0,
    causal: bool = True,
    scale: float | None = None,
    lse_cmp: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_cmp: Any = None,
) -> tuple[Any, ...]:
    """q [B, N, H, D], k_cmp [B, Nc, Hkv, D] → block_idx int32 [B, Hs, tiles, num_selected], ascending and
    padded with -1, block_count int32 [B, Hs, tiles]; with max_compressed_groups also group_idx int32 [B, Hs,
    tiles, max_compressed_groups].

    Hs is Hkv (scope "group") or H ("head"). Varlen, with cu_seqlens and cu_seqlens_cmp: [Hs, T // tile + B,
    num_selected]. lse_cmp f32 [B, H, N]: that of the compressed branch, which metric "softmax" otherwise
    computes first. It has no gradient.
    """
    settings = {
        "preset": preset,
        "block_size": block_size,
        "num_selected": num_selected,
        "stride": stride,
        "select_block": select_block,
        "tile": tile,
        "scope": scope,
        "metric": metric,
        "compressed_visibility": compressed_visibility,
        "forced_first": forced_first,
        "forced_local": forced_local,
        "max_compressed_groups": max_compressed_groups,
        "causal": causal,
        "scale": scale,
    }
    tensors = {
        "q": q,
        "k_cmp": k_cmp,
        "lse_cmp": lse_cmp,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_cmp": cu_seqlens_cmp,
    }
    groups = ("group_idx",) if max_compressed_groups else ()
    return run("nsa-select", tuple(settings.items()), tensors, ("block_idx", "block_count", *groups))


def nsa_index(
    q_index: Any,
    k_index: Any,
    *,
    select_block: int = 128,
    num_selected: int = 16,
    forced_first: int = 0,
    forced_local: int = 1,
    query_offset: int = -1,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    return_scores: bool = False,
) -> tuple[Any, ...]:
    """MiniMax's block indexer: q_index [B, N, Hs, D_I], k_index [B, S, D_I] or, a key a list, [B, S, Hs, D_I]
    → block_idx int32 [B, Hs, N, num_selected], ascending and padded with -1, block_count int32 [B, Hs, N];
    with return_scores also block_score f32 [B, Hs, N, ⌈S / select_block⌉], -inf where a block is no
    candidate.

    A block's score is the maximum of q_index · k_index over its tokens up to the query's own. Query t stands
    at S - N + t, or at query_offset + t. Always chosen are the first forced_first blocks and the forced_local
    that end with the query's own. Varlen, with cu_seqlens_q (and cu_seqlens_kv): [T, ·, ·], and lists [Hs,
    T + B, num_selected]. It has no gradient.
    """
    settings = {
        "select_block": select_block,
        "num_selected": num_selected,
        "forced_first": forced_first,
        "forced_local": forced_local,
        "query_offset": query_offset,
    }
    tensors = {
        "q_index": q_index,
        "k_index": k_index,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }
    scores = ("block_score",) if return_scores else ()
    return run("nsa-index", tuple(settings.items()), tensors, ("block_idx", "block_count", *scores))


def nsa_index_loss(
    q_index: Any,
    k_index: Any,
    q: Any,
    k: Any,
    block_idx: Any,
    *,
    select_block: int = 128,
    query_offset: int = -1,
    lambda_: float = 1.0,
    scale: float | None = None,
    index_scale: float | None = None,
    lse_slc: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    return_rows: bool = False,
) -> Any:
    """The block indexer's loss: how far its weights are from attention's over the tokens of the listed blocks
    up to the query's own → f32 []; with return_rows (loss, row_loss f32 [B, Hs, N]).

    q_index [B, N, Hs, D_I], k_index [B, S, D_I] or [B, S, Hs, D_I], q [B, N, H, D], k [B, S, Hs, D],
    block_idx int32 [B, Hs, N, ·], entries in any order. T is the mean over a list's heads of softmax(scale
    · q kᵀ), P is softmax(index_scale · q_index k_indexᵀ), a row's loss Σ T (log max(T, 1e-10) − log P), and
    loss is lambda_ times their sum over Hs and over the queries that see a token. scale None: 1/√D,
    index_scale None: 1/√D_I. lse_slc f32 [B, H, N]: of attention over the same lists; None: it is computed.
    Varlen, with cu_seqlens_q (and cu_seqlens_kv): [T, ·, ·], lists and row_loss [Hs, T + B, ·].

    With torch loss is differentiable by q_index and k_index; q, k and row_loss carry no gradient.
    """
    settings = {
        "select_block": select_block,
        "query_offset": query_offset,
        "lambda": lambda_,
        "scale": scale,
        "index_scale": index_scale,
    }
    tensors = {
        "q_index": q_index,
        "k_index": k_index,
        "q": q,
        "k": k,
        "block_idx": block_idx,
        "lse_slc": lse_slc,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
    }
    trains = _arrays.train(q_index, k_index)
    gradients = ("d_q_index", "d_k_index") if trains else ()
    made = run("nsa-index-loss", tuple(settings.items()), tensors, ("loss", "row_loss", *gradients))
    loss, rows = made[:2]
    if trains:
        from . import _torch

        loss = _torch.with_gradients(loss, (q_index, k_index), made[2:])
    return (loss, rows) if return_rows else loss


def nsa_attend(
    q: Any,
    k: Any,
    v: Any,
    k_cmp: Any = None,
    v_cmp: Any = None,
    block_idx: Any = None,
    *,
    preset: str | None = None,
    block_size: int = 64,
    window: int = 512,
    stride: int | None = None,
    select_block: int | None = None,
    tile: int | None = None,
    scope: str | None = None,
    compressed_visibility: str | None = None,
    causal: bool = True,
    scale: float | None = None,
    branches: str | None = None,
    k_slc: Any = None,
    v_slc: Any = None,
    k_win: Any = None,
    v_win: Any = None,
    group_idx: Any = None,
    cu_seqlens: Any = None,
    cu_seqlens_cmp: Any = None,
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """The branches' outputs [B, N, H, Dv] in the order cmp, slc, win; with return_lse then their lse f32 [B,
    H, N].

    branches: "all", or some of "cmp,slc,win"; None: win, and those whose k_cmp and block_idx are given. With
    torch it is differentiable by the outputs and all keys and values; lse carries no gradient.
    """
    if branches is None:
        given = (("cmp", k_cmp), ("slc", block_idx), ("win", q))
        branches = ",".join(name for name, tensor in given if tensor is not None)
    on = ("cmp", "slc", "win") if branches == "all" else tuple(branches.split(","))
    settings = {
        "preset": preset,
        "block_size": block_size,
        "window": window,
        "stride": stride,
        "select_block": select_block,
        "tile": tile,
        "scope": scope,
        "compressed_visibility": compressed_visibility,
        "causal": causal,
        "scale": scale,
        "branches": branches,
        "selection": None if block_idx is None else "given",
        "num_selected": _length(block_idx),
    }
    if group_idx is not None:
        settings.update(groups="given", metric="mean_logit", max_compressed_groups=_length(group_idx))
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "k_cmp": k_cmp,
        "v_cmp": v_cmp,
        "block_idx": block_idx,
        "k_slc": k_slc,
        "v_slc": v_slc,
        "k_win": k_win,
        "v_win": v_win,
        "group_idx": group_idx,
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_cmp": cu_seqlens_cmp,
    }
    lse = tuple(f"lse_{name}" for name in on) if return_lse else ()
    return run("nsa-attend", tuple(settings.items()), tensors, (*(f"o_{name}" for name in on), *lse))


def _length(lists: Any) -> int | None:
    """Entries of each list; the call refuses what are no lists."""
    shape = getattr(lists, "shape", ())
    return int(shape[-1]) if len(shape) else None


def nsa_gate(
    q: Any, o_cmp: Any, o_slc: Any, o_win: Any, *, gate: Any = None, gates: Any = None, cu_seqlens: Any = None
) -> tuple[Any, Any]:
    """Σ_b gates[.., b] · o_b → o [B, N, H, Dv], gates f32 [B, N, H, 3], in the order cmp, slc, win.

    gate: weights [H, 3, D] of the gates sigmoid(q · w); gates: the gates themselves; neither: a third each. A
    branch that is None counts as 0. With torch it is differentiable by q, the branches, gate and gates.
    """
    kind = "weights" if gate is not None else "given" if gates is not None else "none"
    tensors = {"q": q if gate is not None else None, "w_gate": gate, "gates": gates, "cu_seqlens": cu_seqlens}
    tensors.update(o_cmp=o_cmp, o_slc=o_slc, o_win=o_win)
    if gates is not None:
        return run("nsa-gate", (("gate", kind),), tensors, ("o",))[0], gates
    o, made = run("nsa-gate", (("gate", kind),), tensors, ("o", "gates"))
    return o, made
