# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Mixtures of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .nvfp4 import swiglu


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
) -> Tensor:
    """Σ_j weights[t, j] · expert(hidden[t]) → [T, D]. gate_up [E, D, 2I] in runs of `granularity` columns
    (None: in halves), down [E, I, D]."""
    runs = granularity or gate_up.shape[-1] // 2
    out = torch.zeros_like(hidden)
    for e in range(gate_up.shape[0]):
        token, slot = (experts == e).nonzero(as_tuple=True)
        x = hidden[token] @ gate_up[e]
        if gate_up_bias is not None:
            x = x + gate_up_bias[e]
        y = swiglu(x, runs, limit, alpha, beta) @ down[e]
        if down_bias is not None:
            y = y + down_bias[e]
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out
