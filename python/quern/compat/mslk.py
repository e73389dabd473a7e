# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NSA under the names, argument orders and shapes of the MSLK kernels.

Q is [B, N, H, D], K and V are [B, N, Hkv, D]; where a function takes cu_seqlens (int32 [B+1]) they may also
be [T, H, D] and [T, Hkv, D]. The rules are those of MSLK's reference functions: W keys in the window, only
the chosen blocks, absent blocks contribute nothing. `chunk_size` and other arguments that tune kernels are
ignored. Of these functions nsa and nsa_forward_reference carry gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch, reference
from . import _mslk_parts as _parts
from ._mslk_parts import (  # noqa: F401
    BlockSparseTensors,
    build_fa4_block_sparse_tensors,
    compress_kv,
    compute_gates,
    fused_compress_kv,
    fused_compress_kv_backward,
    fused_gate_and_combine,
    fused_gating_backward,
    fused_score_and_select_all,
    fused_score_and_select_blocks,
    gate_and_combine,
    score_and_select_blocks,
)
from ._varlen import dense

# True: the rules that MSLK's fused kernels are read to follow, for models that were trained with them: W + 1
# keys in the window, and every 128-token tile that holds a chosen block attended whole.
KERNEL_RULES = False
_KERNEL_TILE = 128


def _kernel_lists(
    q: Tensor, tensors: dict[str, Tensor | None], settings: dict[str, Any]
) -> dict[str, Tensor]:
    """The block lists in whole 128-token tiles, and the group lists, as KERNEL_RULES attends them."""
    block, tokens = settings["block_size"], q.shape[-3]
    varlen = tensors["cu_seqlens"] is not None
    alone = tuple((name, value) for name, value in settings.items() if name != "gate")
    cmp_names = ("k_cmp", "v_cmp") + (("cu_seqlens_cmp",) if varlen else ())
    inputs = {name: tensors[name] for name in ("k", "v", "w_k", "w_v", "cu_seqlens")}
    made = dict(zip(cmp_names, _torch.run("nsa-compress", alone, inputs, cmp_names)))
    chosen = {
        "q": q,
        "k_cmp": made["k_cmp"],
        "cu_seqlens": tensors["cu_seqlens"],
        "cu_seqlens_cmp": made.get("cu_seqlens_cmp"),
    }
    names = ("block_idx",) + (("group_idx",) if settings["max_compressed_groups"] else ())
    lists = dict(zip(names, _torch.run("nsa-select", alone, chosen, names)))
    if block % _KERNEL_TILE != 0:
        given, tiles = lists["block_idx"], (("from", block), ("to", _KERNEL_TILE), ("n", tokens))
        asked = (("k_out", given.shape[-1]),)
        (lists["block_idx"],) = _torch.run("nsa-list-convert", tiles, {"in": given}, ("out",), asked=asked)
    return lists


def _whole(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    compress_block_size: int,
    num_selected_blocks: int,
    window_size: int,
    W_k_compress: Tensor | None,
    W_v_compress: Tensor | None,
    gate_proj_weight: Tensor | None,
    causal: bool,
    softmax_scale: float | None,
    q_tile_size: int,
    cu_seqlens: Tensor | None,
    num_cmp_selected_blocks: int | None,
) -> Tensor:
    """O. The backward takes the branches' outputs, which are kept for it."""
    settings = _parts.settings(
        compress_block_size, num_selected_blocks, causal, q_tile_size, softmax_scale, num_cmp_selected_blocks
    )
    settings.update(window=window_size, gate="none" if gate_proj_weight is None else "weights")
    tensors: dict[str, Tensor | None] = {"q": dense(Q), "k": dense(K), "v": dense(V)}
    tensors.update(cu_seqlens=dense(cu_seqlens))
    tensors.update(w_k=dense(W_k_compress), w_v=dense(W_v_compress), w_gate=dense(gate_proj_weight))
    if KERNEL_RULES:
        with torch.no_grad():
            lists = _kernel_lists(dense(Q), tensors, settings)
        tensors.update(lists)
        settings.update(window=window_size + 1, num_selected=lists["block_idx"].shape[-1])
        settings.update(selection="given", groups="given" if num_cmp_selected_blocks else None)
        if compress_block_size % _KERNEL_TILE != 0:
            settings.update(select_block=_KERNEL_TILE)
    return _torch.run("nsa", tuple(settings.items()), tensors, ("o",), ("o_cmp", "o_slc", "o_win"))[0]


def nsa_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Tensor | None = None,
    W_v_compress: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    n_block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    num_cmp_selected_blocks: int | None = None,
) -> Tensor:
    """Compress, select, attend over three branches, gate → O, shaped like Q. n_block_size and max_seqlen are
    ignored."""
    with torch.no_grad():
        return _whole(
            Q,
            K,
            V,
            compress_block_size,
            num_selected_blocks,
            window_size,
            W_k_compress,
            W_v_compress,
            gate_proj_weight,
            causal,
            softmax_scale,
            q_tile_size,
            cu_seqlens,
            num_cmp_selected_blocks,
        )


def nsa(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Tensor | None = None,
    W_v_compress: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    n_block_size: int = 128,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    num_cmp_selected_blocks: int | None = None,
) -> Tensor:
    """nsa_forward with gradients for Q, K, V, W_k_compress, W_v_compress and gate_proj_weight."""
    return _whole(
        Q,
        K,
        V,
        compress_block_size,
        num_selected_blocks,
        window_size,
        W_k_compress,
        W_v_compress,
        gate_proj_weight,
        causal,
        softmax_scale,
        q_tile_size,
        cu_seqlens,
        num_cmp_selected_blocks,
    )


def nsa_forward_reference(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Tensor | None = None,
    W_v_compress: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    _block_indices: Tensor | None = None,
) -> Tensor:
    """nsa_forward in float64 with dense masks, differentiable → O in Q's dtype. _block_indices [B, H, tiles,
    k]: attend these blocks; entries that are no block, or come twice, count for nothing."""
    with Q.device:  # the masks are made where the tensors are
        o = reference.nsa(
            Q.double(),
            K.double(),
            V.double(),
            block_size=compress_block_size,
            num_selected=num_selected_blocks,
            window=window_size,
            tile=q_tile_size,
            w_k=None if W_k_compress is None else W_k_compress.double(),
            w_v=None if W_v_compress is None else W_v_compress.double(),
            w_gate=None if gate_proj_weight is None else gate_proj_weight.double(),
            causal=causal,
            scale=softmax_scale,
            complete=False,
            scope="head",
            metric="mean_logit",
            forced_first=0,
            forced_local=0,
            block_idx=_block_indices,
        )
    return o.to(Q.dtype)


def nsa_backward_reference(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    dO: Tensor,
    compress_block_size: int = 64,
    num_selected_blocks: int = 16,
    window_size: int = 512,
    W_k_compress: Tensor | None = None,
    W_v_compress: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    q_tile_size: int = 256,
    _block_indices: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Gradients of nsa_forward_reference in float64: dQ, dK, dV, dW_k_compress, dW_v_compress,
    dgate_proj_weight, each in its input's dtype, None for a weight that is absent."""
    given = {
        "Q": Q,
        "K": K,
        "V": V,
        "W_k_compress": W_k_compress,
        "W_v_compress": W_v_compress,
        "gate_proj_weight": gate_proj_weight,
    }
    leaves = {name: t.detach().double().requires_grad_() for name, t in given.items() if t is not None}
    with torch.enable_grad():
        o = nsa_forward_reference(
            leaves["Q"],
            leaves["K"],
            leaves["V"],
            compress_block_size,
            num_selected_blocks,
            window_size,
            leaves.get("W_k_compress"),
            leaves.get("W_v_compress"),
            leaves.get("gate_proj_weight"),
            causal,
            softmax_scale,
            q_tile_size,
            _block_indices,
        )
    grads = dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), dO.double(), allow_unused=True)))
    return {
        f"d{name}": None if t is None else _or_zero(grads[name], t).to(t.dtype) for name, t in given.items()
    }


def _or_zero(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of what nothing was computed from (sequences without a whole block) is zero."""
    return torch.zeros_like(like) if grad is None else grad
