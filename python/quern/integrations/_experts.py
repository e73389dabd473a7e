# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Experts of the transformers package, with the routing that its router has made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import moe, nvfp4

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
    if isinstance(module, Quantized):
        return None
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
    routing = {"experts": top_k_index, "weights": top_k_weights.float(), "top_k": top_k_index.shape[-1]}
    if isinstance(module, Quantized):
        return moe.layer(hidden_states, **routing, **module.quern_weights())
    trained = module.gate_up_proj.requires_grad or module.down_proj.requires_grad
    if trained and torch.is_grad_enabled():
        return type(module).forward.__wrapped__(module, hidden_states, top_k_index, top_k_weights)
    reason = refusal(module)
    if reason is not None:
        raise ValueError(f"experts quern: {type(module).__name__}: {reason}")
    weights = {"gate_up": module.gate_up_proj, "down": module.down_proj}
    return moe.layer(hidden_states, **routing, **weights, **gate_of(module))


class Quantized(nn.Module):
    """Experts whose weights are frozen NVFP4: in memory as products read them fastest, in state_dict codes,
    scales and a global an expert, by the names of quern.moe.layer."""

    quern_gate: dict[str, float]
    quern_rows: dict[str, tuple[int, int]]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts(self, hidden_states, top_k_index, top_k_weights)

    def quern_weights(self) -> dict[str, Any]:
        made = {f"{name}_repacked": getattr(self, f"{name}_repacked") for name in self.quern_rows}
        made |= {f"{name}_global": getattr(self, f"{name}_global") for name in self.quern_rows}
        return {**made, **self.quern_gate, "intermediate": self.quern_rows["down"][0]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (rows, columns) in self.quern_rows.items():
            pair = nvfp4.unpack(getattr(self, f"{name}_repacked"), columns, rows)
            for kind, t in zip(("codes", "scales"), pair):
                destination[f"{prefix}{name}_{kind}"] = nvfp4.as_bytes(t)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any, **named: Any) -> None:
        pairs = {
            name: [state_dict.pop(f"{prefix}{name}_{kind}", None) for kind in ("codes", "scales")]
            for name in self.quern_rows
        }
        super()._load_from_state_dict(state_dict, prefix, *more, **named)
        missing = more[2]
        for name, pair in pairs.items():
            if all(t is not None for t in pair):
                getattr(self, f"{name}_repacked").copy_(nvfp4.prepack(*pair))
            else:
                missing.append(f"{prefix}{name}_codes")

    def _apply(self, *given: Any, **named: Any) -> Any:
        """What to() and half() do: halves would change what the codes stand for."""
        before = {name: getattr(self, f"{name}_global") for name in self.quern_rows}
        super()._apply(*given, **named)
        for name, kept in before.items():
            setattr(self, f"{name}_global", kept.to(getattr(self, f"{name}_repacked").device))
        return self


_CLASSES: dict[type, type] = {}


@torch.no_grad()
def quantize_(module: Any) -> None:
    """Rounds a module's experts, in floats, to NVFP4, one by one, in place."""
    gate = gate_of(module)
    weights = {"gate_up": module.gate_up_proj, "down": module.down_proj}
    made: dict[str, list[list[Tensor]]] = {}
    for name, stack in weights.items():
        made[name] = [[], []]
        for one in stack.detach():
            matrix = one.t().contiguous()
            matrix = nvfp4.interleave(matrix) if name == "gate_up" else matrix
            codes, scales, scale = nvfp4.quantize(matrix[None], weight=True, global_per="expert")
            made[name][0].append(nvfp4.prepack(codes, scales))
            made[name][1].append(scale)
    module.quern_rows = {name: (stack.shape[2], stack.shape[1]) for name, stack in weights.items()}
    del module.gate_up_proj, module.down_proj
    for name, (repacked, scale) in made.items():
        module.register_buffer(f"{name}_repacked", torch.cat(repacked), persistent=False)
        module.register_buffer(f"{name}_global", torch.cat(scale))
    module.quern_gate = gate
    base = type(module)
    module.__class__ = _CLASSES.setdefault(base, type(f"NVFP4{base.__name__}", (Quantized, base), {}))
