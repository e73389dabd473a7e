# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Experts of the transformers package, with the routing that its router has made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import moe

_READ = ("limit", "swiglu_limit", "alpha", "swiglu_alpha")


def _gated(gate_up: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def gate_of(module: Any) -> dict[str, float] | None:
    """limit, alpha and beta of quern.moe.layer with which a module's gate agrees; None: there are none."""
    known = tuple(getattr(module, name, None) for name in _READ)
    kept = module.__dict__.get("_quern_gate")
    if kept is not None and kept[0] == known:
        return kept[1]
    limits = {0.0, *(float(n) for n in known[:2] if n)}
    slopes = [(1.0, 0.0), *((float(n), 1.0) for n in known[2:] if n)]
    probe = 3 * max(1.0, *limits) * torch.linspace(-1, 1, 514).reshape(-1, 2)
    probe = torch.cat((probe, probe.flip(-1), -probe.roll(7, 0)))
    with torch.no_grad():
        made = module._apply_gate(probe)
    found = None
    for limit in sorted(limits):
        for alpha, beta in slopes:
            if torch.allclose(made, _gated(probe, limit, alpha, beta), rtol=1e-4, atol=1e-5):
                found = {"limit": limit, "alpha": alpha, "beta": beta}
    module.__dict__["_quern_gate"] = (known, found)
    return found


def refusal(module: Any) -> str | None:
    """Why experts cannot be computed here."""
    if not module.has_gate or module.has_bias or getattr(module, "has_post_expert_norm", False):
        return "they have biases, a norm or no gate: gated experts alone are accepted"
    if module.is_transposed or not module.is_concatenated:
        return "gate_up_proj is transposed or interleaved: [experts, 2 · inner, hidden], halves, is accepted"
    if getattr(module, "_is_expert_parallel", False):
        return "they are spread over processes: whole ones are accepted"
    if module.gate_up_proj.device.type != "cpu":
        return f"they are on {module.gate_up_proj.device.type}, the cpu is accepted so far"
    if not module.gate_up_proj.is_floating_point() or module.gate_up_proj.element_size() < 2:
        return f"gate_up_proj is {module.gate_up_proj.dtype}: bfloat16, float16 and float32 are accepted"
    if gate_of(module) is None:
        return "their gate is none of SiLU(gate) · up, the same with a limit, with alpha and beta"
    return None


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts function: hidden [T, D], experts [T, k] and their weights → [T, D]. Experts whose weights
    require gradients are computed by the module's own forward."""
    trained = module.gate_up_proj.requires_grad or module.down_proj.requires_grad
    if trained and torch.is_grad_enabled():
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    reason = refusal(module)
    if reason is not None:
        raise ValueError(f"experts quern: {type(module).__name__}: {reason}")
    routing = {"experts": top_k_index, "weights": top_k_weights.float(), "top_k": top_k_index.shape[-1]}
    weights = {"gate_up": module.gate_up_proj, "down": module.down_proj}
    return moe.layer(hidden_states, **routing, **weights, **gate_of(module))
