# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Mixtures of experts over NVFP4 weights: the router, and the whole layer, for PyTorch and NumPy.

NVFP4 experts are frozen: gradients go to the tokens, the router, the routing weights, the biases and
experts in floats. NVFP4 codes and scales may be torch.float4_e2m1fn_x2 and torch.float8_e4m3fn, or uint8.
"""

from __future__ import annotations

from typing import Any

from ._faces import run
from .nvfp4 import as_bytes

__all__ = ["layer", "route"]


def route(
    logits: Any = None,
    *,
    hidden: Any = None,
    weight: Any = None,
    bias: Any = None,
    input_ids: Any = None,
    tid2eid: Any = None,
    top_k: int = 1,
    score: str = "softmax",
    renormalize: bool = False,
    route_scale: float = 1.0,
) -> tuple[Any, Any, Any, Any]:
    """→ experts int32 [T, top_k], weights f32 [T, top_k], offsets int32 [E], permutation int32 [T·top_k].

    logits [T, E], or hidden [T, D] and weight [E, D]. score "softmax", "sqrtsoftplus" or "sigmoid". bias
    f32 [E] moves the choice alone. input_ids [T] and tid2eid [V, top_k], int32 or int64: from a table.
    Weights are the chosen scores, divided by their sum where `renormalize`, times route_scale. permutation
    lists slots t · top_k + j by expert; offsets say where each expert's end. With torch the weights are
    differentiable by logits, or hidden and weight.
    """
    settings = (
        ("score", score),
        ("top_k", top_k),
        ("renormalize", renormalize),
        ("route_scale", route_scale),
    )
    tensors = {"logits": logits, "hidden": hidden, "weight": weight, "bias": bias}
    tensors.update(input_ids=input_ids, tid2eid=tid2eid)
    experts, weights, offsets, permutation = run(
        "moe-route", settings, tensors, ("experts", "weights", "offsets", "permutation")
    )
    return experts, weights, offsets, permutation


def layer(
    hidden: Any,
    weight: Any = None,
    *,
    logits: Any = None,
    bias: Any = None,
    input_ids: Any = None,
    tid2eid: Any = None,
    experts: Any = None,
    weights: Any = None,
    gate_up_codes: Any = None,
    gate_up_scales: Any = None,
    gate_up_repacked: Any = None,
    gate_up_global: Any = None,
    down_codes: Any = None,
    down_scales: Any = None,
    down_repacked: Any = None,
    down_global: Any = None,
    gate_up: Any = None,
    down: Any = None,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    gate_up_input_global: Any = None,
    down_input_global: Any = None,
    shared_gate: Any = None,
    shared_up: Any = None,
    shared_down: Any = None,
    shared_gate_up_codes: Any = None,
    shared_gate_up_scales: Any = None,
    shared_gate_up_repacked: Any = None,
    shared_gate_up_global: Any = None,
    shared_down_codes: Any = None,
    shared_down_scales: Any = None,
    shared_down_repacked: Any = None,
    shared_down_global: Any = None,
    top_k: int = 1,
    score: str = "softmax",
    renormalize: bool = False,
    route_scale: float = 1.0,
    limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    granularity: int = 8,
    a4: bool = False,
    intermediate: int = 0,
    shared_intermediate: int = 0,
    return_routing: bool = False,
) -> Any:
    """Σ_j weights[t, j] · expert(experts[t, j])(hidden[t]) + shared(hidden[t]) → out like hidden [.., D];
    with return_routing → out, experts int32 [T, top_k], weights f32 [T, top_k].

    The router: weight [E, D] or logits f32 [.., E], and route()'s parameters; or instead the routing: experts
    int32 or int64 [T, top_k] and weights f32 [T, top_k], which are taken as they are. Experts in NVFP4:
    gate_up_codes [E, D/2, 2I], its columns interleaved by `granularity`, gate_up_scales [E, D/16, 2I],
    gate_up_global [], [E] or [E, 2]; down_codes [E, I/2, D], down_scales, down_global; or *_repacked of
    nvfp4.prepack() with `intermediate`. In floats: gate_up [E, 2I, D] in halves, down [E, D, I].
    gate_up_bias [E, 2I], down_bias [E, D]. The shared expert alike, without E. SwiGLU: min(g, L) · σ(alpha ·
    min(g, L)) · (clamp(u, ±L) + beta), L `limit` (0: none). a4: activations are quantised to NVFP4, by
    *_input_global f32 [E] or a computed global a row.

    With torch it is differentiable by hidden, weight, logits, weights, the biases, gate_up and down; the
    routing that is returned carries no gradient.
    """
    settings = (
        ("score", score),
        ("top_k", top_k),
        ("renormalize", renormalize),
        ("route_scale", route_scale),
        ("limit", limit),
        ("alpha", alpha),
        ("beta", beta),
        ("granularity", granularity),
        ("a4", a4),
        ("intermediate", intermediate),
        ("shared_intermediate", shared_intermediate),
    )
    tensors = {
        "hidden": hidden,
        "logits": logits,
        "weight": weight,
        "bias": bias,
        "input_ids": input_ids,
        "tid2eid": tid2eid,
        "experts": experts,
        "weights": weights,
        "gate_up_codes": as_bytes(gate_up_codes),
        "gate_up_scales": as_bytes(gate_up_scales),
        "gate_up_repacked": gate_up_repacked,
        "gate_up_global": gate_up_global,
        "down_codes": as_bytes(down_codes),
        "down_scales": as_bytes(down_scales),
        "down_repacked": down_repacked,
        "down_global": down_global,
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "gate_up_input_global": gate_up_input_global,
        "down_input_global": down_input_global,
        "shared_gate": shared_gate,
        "shared_up": shared_up,
        "shared_down": shared_down,
        "shared_gate_up_codes": as_bytes(shared_gate_up_codes),
        "shared_gate_up_scales": as_bytes(shared_gate_up_scales),
        "shared_gate_up_repacked": shared_gate_up_repacked,
        "shared_gate_up_global": shared_gate_up_global,
        "shared_down_codes": as_bytes(shared_down_codes),
        "shared_down_scales": as_bytes(shared_down_scales),
        "shared_down_repacked": shared_down_repacked,
        "shared_down_global": shared_down_global,
    }
    handed = experts is not None and weights is not None
    results = ("out", "experts", "weights") if return_routing and not handed else ("out",)
    made = run("moe", settings, tensors, results)
    if return_routing and handed:
        return made[0], experts, weights
    return made if return_routing else made[0]
