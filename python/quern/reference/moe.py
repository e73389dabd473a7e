# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .nvfp4 import grouped_mm, straight_through, swiglu


def route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    experts: Tensor | None = None,
    renormalize: bool = False,
    route_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """→ experts [T, top_k] ascending, weights [T, top_k]. experts: handed in instead of chosen."""
    scores = {
        "softmax": lambda x: x.softmax(-1),
        "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x, threshold=1e9).sqrt(),
        "sigmoid": torch.sigmoid,
    }[score](logits)
    if experts is None:
        ranked = scores.detach() if bias is None else scores.detach() + bias
        experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(-1).values
    weights = scores.gather(1, experts.long())
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * route_scale


def permutation_of(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """experts [T, top_k], of `count` → offsets int32 [count], where each expert's rows end, and permutation
    int32 [T · top_k], the slots t · top_k + j by expert, then by number."""
    slots = experts.flatten().long()
    offsets = torch.bincount(slots, minlength=count).cumsum(0)
    return offsets.int(), slots.sort(stable=True).indices.int()


def permute(hidden: Tensor, permutation: Tensor, top_k: int) -> Tensor:
    """hidden [T, D] → the experts' rows [T · top_k, D]."""
    return hidden[permutation.long() // top_k]


def unpermute(rows: Tensor, permutation: Tensor, weights: Tensor) -> Tensor:
    """The experts' rows [T · top_k, D] → Σ_j weights[t, j] · the row of slot t · top_k + j, [T, D]."""
    slots = torch.zeros_like(rows).index_copy(0, permutation.long(), rows)
    return (slots.unflatten(0, weights.shape) * weights[..., None]).sum(1)


def layer(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    granularity: int | None = None,
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    a4: bool = False,
    gate_up_input_global: Tensor | None = None,
    down_input_global: Tensor | None = None,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Σ_j weights[t, j] · expert(hidden[t]) → [T, D]. gate_up [E, D, 2I] in runs of `granularity` columns
    (None: in halves), down [E, I, D].

    a4: the experts' products take NVFP4 activations, by *_input_global f32 [E] or a computed global a row;
    gradients pass straight through. shared: gate_up [D, 2Is] and down [Is, D] of an expert that every token
    goes to.
    """
    swiglu_by = {"limit": limit, "alpha": alpha, "beta": beta}
    offsets, permutation = permutation_of(experts, gate_up.shape[0])
    rows = permute(hidden, permutation, experts.shape[1])

    def product(x: Tensor, matrices: Tensor, bias: Tensor | None, input_global: Tensor | None) -> Tensor:
        if a4 and input_global is None:
            x = straight_through(x, global_per="row")
        elif a4:
            x = straight_through(x, global_per="expert", offsets=offsets, global_scale=input_global)
        return grouped_mm(x, matrices, offsets, bias)

    runs = granularity or gate_up.shape[-1] // 2
    y = swiglu(product(rows, gate_up, gate_up_bias, gate_up_input_global), runs, **swiglu_by)
    out = unpermute(product(y, down, down_bias, down_input_global), permutation, weights)
    if shared is not None:
        out = out + swiglu(hidden @ shared[0], granularity or shared[1].shape[0], **swiglu_by) @ shared[1]
    return out
