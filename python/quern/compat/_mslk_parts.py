# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The steps of quern.compat.mslk: compress, select, gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _operations as ops
from . import _varlen
from ._varlen import dense

_GROUP = 128  # compressed entries that num_cmp_selected_blocks counts as one


# ---- compress ----


def compress_kv(
    K: Tensor, V: Tensor, block_size: int, W_k: Tensor | None = None, W_v: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Means of blocks, times W [Hkv, D, D] where given → K_cmp, V_cmp [B, N // block_size, Hkv, D]."""
    params = ops.params("nsa-compress", block_size=block_size)
    tensors = {"k": dense(K), "v": dense(V), "w_k": dense(W_k), "w_v": dense(W_v)}
    k_cmp, v_cmp = ops.call("nsa-compress", params, tensors, ("k_cmp", "v_cmp"))
    return k_cmp, v_cmp


def fused_compress_kv(
    K: Tensor,
    V: Tensor,
    block_size: int,
    W_k: Tensor | None = None,
    W_v: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As compress_kv; with cu_seqlens K, V are [T, Hkv, D] and the result is padded: [B, max_Nc, Hkv, D]."""
    if cu_seqlens is None:
        return compress_kv(K, V, block_size, W_k, W_v)
    cu_seqlens = dense(cu_seqlens)
    params = ops.params("nsa-compress", block_size=block_size)
    tensors = {"k": dense(K), "v": dense(V), "w_k": dense(W_k), "w_v": dense(W_v), "cu_seqlens": cu_seqlens}
    k_cmp, v_cmp, starts = ops.call("nsa-compress", params, tensors, ("k_cmp", "v_cmp", "cu_seqlens_cmp"))
    rows = _varlen.longest(cu_seqlens, max_seqlen) // block_size
    return _varlen.pad(k_cmp, starts, rows), _varlen.pad(v_cmp, starts, rows)


def fused_compress_kv_backward(
    dK_cmp: Tensor,
    dV_cmp: Tensor,
    K: Tensor,
    V: Tensor,
    block_size: int,
    W_k: Tensor | None = None,
    W_v: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """→ dK, dV shaped like K, V, and dW_k, dW_v [Hkv, D, D], computed in f32, in the dtype of W; None without
    W."""
    params = ops.params("nsa-compress", block_size=block_size)
    tensors = {"k": dense(K), "v": dense(V), "w_k": dense(W_k), "w_v": dense(W_v)}
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens)
        starts = _varlen.entry_offsets(cu_seqlens, block_size)
        rows = K.shape[0] // block_size
        dK_cmp, dV_cmp = _varlen.pack(dK_cmp, starts, rows), _varlen.pack(dV_cmp, starts, rows)
        tensors.update(cu_seqlens=cu_seqlens, cu_seqlens_cmp=starts)
    tensors.update(d_k_cmp=dense(dK_cmp), d_v_cmp=dense(dV_cmp))
    names = ["d_k", "d_v"] + ["d_w_k"] * (W_k is not None) + ["d_w_v"] * (W_v is not None)
    grads = dict(zip(names, ops.call("nsa-compress", params, tensors, names, backward=True)))
    d_w_k = None if W_k is None else grads["d_w_k"].to(W_k.dtype)
    d_w_v = None if W_v is None else grads["d_w_v"].to(W_v.dtype)
    return grads["d_k"], grads["d_v"], d_w_k, d_w_v


# ---- select ----


def settings(
    block_size: int,
    k: int,
    causal: bool,
    q_tile_size: int,
    softmax_scale: float | None,
    num_cmp_selected_blocks: int | None = None,
) -> dict[str, Any]:
    """The preset tile256 without gates, for ops.params."""
    return {
        "preset": "tile256",
        "block_size": block_size,
        "num_selected": k,
        "causal": causal,
        "tile": q_tile_size,
        "scale": softmax_scale,
        "max_compressed_groups": num_cmp_selected_blocks,
        "gate": "none",
    }


def _filled(lists: Tensor) -> Tensor:
    """Ascending lists with the padding, -1, replaced by the lowest selectable block, which is 0."""
    return lists.clamp(min=0).sort(dim=-1).values


def _padded_lists(lists: Tensor, cu_seqlens: Tensor, tile: int, max_seqlen: int | None) -> Tensor:
    """[H, rows, k] → [B, H, tiles of the longest, k]; -1 in rows of no tile."""
    tiles = _varlen.offsets(-(-_varlen.lengths(cu_seqlens) // tile))
    padded = _varlen.pad(lists, tiles, -(-_varlen.longest(cu_seqlens, max_seqlen) // tile), -1, dim=1)
    there = torch.arange(padded.shape[2], device=lists.device)[None, :] < _varlen.lengths(tiles)[:, None]
    return torch.where(there[:, None, :, None], _filled(padded), padded)


def fused_score_and_select_all(
    Q: Tensor,
    K_cmp: Tensor,
    num_selected_blocks: int,
    compress_block_size: int,
    num_cmp_selected_blocks: int | None = None,
    cmp_n_block_size: int = 128,
    causal: bool = True,
    q_tile_size: int = 256,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """→ chosen blocks int32 [B, H, tiles, min(k, N_cmp)], and groups of 128 compressed entries [B, H, tiles,
    min(c, groups)] or None. Ascending. With cu_seqlens, tiles are those of the longest sequence and K_cmp is
    padded [B, max_Nc, Hkv, D]; rows of no tile are -1."""
    if num_cmp_selected_blocks is not None and cmp_n_block_size != _GROUP:
        raise ValueError(f"cmp_n_block_size {cmp_n_block_size}: {_GROUP} is accepted")
    # Of as many blocks as there are entries: a ragged last block, which has none, would else be chosen too.
    entries = K_cmp.shape[1]
    blocks = min(num_selected_blocks, entries)
    chosen = settings(
        compress_block_size, max(blocks, 1), causal, q_tile_size, softmax_scale, num_cmp_selected_blocks
    )
    tensors = {"q": dense(Q), "k_cmp": dense(K_cmp)}
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens)
        starts = _varlen.entry_offsets(cu_seqlens, compress_block_size)
        packed = _varlen.pack(K_cmp, starts, Q.shape[0] // compress_block_size)
        tensors.update(k_cmp=dense(packed), cu_seqlens=cu_seqlens, cu_seqlens_cmp=starts)
    names = ["block_idx"] + ["group_idx"] * (num_cmp_selected_blocks is not None)
    lists = list(ops.call("nsa-select", ops.params("nsa-select", **chosen), tensors, names))
    if cu_seqlens is None:
        lists = [_filled(one) for one in lists]
    else:
        lists = [_padded_lists(one, cu_seqlens, q_tile_size, max_seqlen) for one in lists]
    # _filled() puts the fillers first: those of more groups than there are are cut off.
    widths = (blocks, min(num_cmp_selected_blocks or 0, -(-entries // _GROUP)))
    lists = [one[..., one.shape[-1] - width :] for one, width in zip(lists, widths)]
    return lists[0], lists[1] if len(lists) > 1 else None


def fused_score_and_select_blocks(
    Q: Tensor,
    K_cmp: Tensor,
    num_selected_blocks: int,
    compress_block_size: int,
    causal: bool = True,
    q_tile_size: int = 256,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """The first result of fused_score_and_select_all."""
    return fused_score_and_select_all(
        Q,
        K_cmp,
        num_selected_blocks,
        compress_block_size,
        causal=causal,
        q_tile_size=q_tile_size,
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )[0]


def score_and_select_blocks(
    Q: Tensor,
    K_cmp: Tensor,
    num_selected_blocks: int,
    compress_block_size: int,
    causal: bool = True,
    q_tile_size: int = 256,
    softmax_scale: float | None = None,
) -> Tensor:
    """→ int32 [B, H, tiles, min(k, N_cmp)], ascending."""
    return fused_score_and_select_blocks(
        Q, K_cmp, num_selected_blocks, compress_block_size, causal, q_tile_size, softmax_scale
    )


class BlockSparseTensors(NamedTuple):
    """What a block-sparse attention kernel reads: of every tile, how many blocks and which; the queries of a
    tile and the keys of a block."""

    full_block_cnt: Tensor
    full_block_idx: Tensor
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    block_size: tuple[int, int]


def build_fa4_block_sparse_tensors(
    block_indices: Tensor, compress_block_size: int, n_block_size: int = 128, seqlen_k: int | None = None
) -> BlockSparseTensors:
    """Lists [B, H, tiles, k] of compress_block_size tokens → lists of n_block_size tokens: counts [B, H,
    tiles], indices [B, H, tiles, selected], 0 past the count; every chosen block in full, the mask counts 0.
    block_size is (seqlen_k // tiles, n_block_size), without seqlen_k (compress_block_size, n_block_size)."""
    larger = max(compress_block_size, n_block_size)
    tokens = seqlen_k if seqlen_k is not None else 2**31 - larger - (2**31 - larger) % larger
    wide = block_indices.shape[-1] * max(compress_block_size // n_block_size, 1)
    params = ops.params("nsa-list-convert", **{"from": compress_block_size}, to=n_block_size, n=tokens)
    idx, count = ops.call(
        "nsa-list-convert", params, {"in": dense(block_indices)}, ("out", "count"), asked={"k_out": wide}
    )
    tile = compress_block_size if seqlen_k is None else seqlen_k // max(block_indices.shape[-2], 1)
    idx = idx.clamp(min=0)
    return BlockSparseTensors(
        count, idx, torch.zeros_like(count), torch.zeros_like(idx), (tile, n_block_size)
    )


# ---- gate ----


def _batched(*tensors: Tensor | None) -> list[Tensor | None]:
    """[T, ..] → [1, T, ..], with a contiguous last dimension; a gate is the same for all tokens."""
    return [None if t is None else dense(t if t.dim() == 4 else t.unsqueeze(0)) for t in tensors]


def compute_gates(Q: Tensor, gate_proj_weight: Tensor | None = None, chunk_size: int | None = None) -> Tensor:
    """sigmoid(Q · W), W [H, 3, D] → f32 [.., H, 3] in the order cmp, slc, sld; without W ⅓ each."""
    if gate_proj_weight is None:
        return torch.full((*Q.shape[:-1], 3), 1 / 3, dtype=torch.float32, device=Q.device)
    params = ops.params("nsa-gates", gate="weights")
    (gates,) = ops.call(
        "nsa-gates", params, {"q": _batched(Q)[0], "w_gate": dense(gate_proj_weight)}, ("gates",)
    )
    return gates.view(*Q.shape[:-1], 3)


def gate_and_combine(
    O_cmp: Tensor, O_slc: Tensor, O_sld: Tensor, gates: Tensor, chunk_size: int | None = None
) -> Tensor:
    """Σ gates[.., b] · O_b → O [.., H, D]."""
    o_cmp, o_slc, o_win, gates_ = _batched(O_cmp, O_slc, O_sld, gates.float())
    params = ops.params("nsa-combine", gate="given")
    (o,) = ops.call(
        "nsa-combine", params, {"o_cmp": o_cmp, "o_slc": o_slc, "o_win": o_win, "gates": gates_}, ("o",)
    )
    return o.view(O_cmp.shape)


def fused_gate_and_combine(
    Q: Tensor, O_cmp: Tensor, O_slc: Tensor, O_sld: Tensor, gate_proj_weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """compute_gates and gate_and_combine in one pass → (O, gates)."""
    q, o_cmp, o_slc, o_win = _batched(Q, O_cmp, O_slc, O_sld)
    params = ops.params("nsa-gate", gate="none" if gate_proj_weight is None else "weights")
    tensors = {"q": q, "w_gate": dense(gate_proj_weight), "o_cmp": o_cmp, "o_slc": o_slc, "o_win": o_win}
    o, gates = ops.call("nsa-gate", params, tensors, ("o", "gates"))
    return o.view(O_cmp.shape), gates.view(*Q.shape[:-1], 3)


def fused_gating_backward(
    Q: Tensor,
    dO: Tensor,
    O_cmp: Tensor,
    O_slc: Tensor,
    O_sld: Tensor,
    gates: Tensor,
    gate_proj_weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """→ dO_cmp, dO_slc, dO_sld, the gate's share of dQ, dW_gate, computed in f32, in the weight's dtype; the
    last two None without a weight."""
    q, d_o, o_cmp, o_slc, o_win = _batched(Q, dO, O_cmp, O_slc, O_sld)
    gates_ = _batched(gates.float())[0]
    weight = gate_proj_weight is not None
    params = ops.params("nsa-gate", gate="weights" if weight else "given")
    tensors = {
        "q": q,
        "w_gate": dense(gate_proj_weight),
        "gates": gates_,
        "o_cmp": o_cmp,
        "o_slc": o_slc,
        "o_win": o_win,
        "d_o": d_o,
    }
    names = ["d_o_cmp", "d_o_slc", "d_o_win"] + ["d_q", "d_w_gate"] * weight
    grads = ops.call("nsa-gate", params, tensors, names, backward=True)
    branches = tuple(grad.view(O_cmp.shape) for grad in grads[:3])
    if gate_proj_weight is None:
        return (*branches, None, None)
    return (*branches, grads[3].view(Q.shape), grads[4].to(gate_proj_weight.dtype))
