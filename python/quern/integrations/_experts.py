# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Experts of the transformers package, with the routing that its router has made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import moe, nvfp4

_READ = ("limit", "swiglu_limit", "alpha", "swiglu_alpha")


def _halves(t: Tensor, module: Any, dim: int) -> Tensor:
    """Gates before ups along dimension `dim` < 0, as quern.moe.layer takes them."""
    if module.is_concatenated:
        return t
    pairs = t.unflatten(dim, (-1, 2))
    return torch.cat(pairs.unbind(dim), dim)


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
    probe = 3 * max(1.0, *limits) * torch.linspace(-1, 1, 516).reshape(-1, 4)
    probe = torch.cat((probe, probe.flip(-1), -probe.roll(7, 0)))
    halves = _halves(probe, module, -1)
    with torch.no_grad():
        made = module._apply_gate(probe)
    found = None
    for limit in sorted(limits):
        for alpha, beta in slopes:
            if torch.allclose(made, _gated(halves, limit, alpha, beta), rtol=1e-4, atol=1e-5):
                found = {"limit": limit, "alpha": alpha, "beta": beta}
    module.__dict__["_quern_gate"] = (known, found)
    return found


def refusal(module: Any) -> str | None:
    """Why experts cannot be computed here."""
    if isinstance(module, Quantized):
        return None
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return "they have a norm or no gate: gated experts without a norm are accepted"
    if getattr(module, "_is_expert_parallel", False):
        return "they are spread over processes: whole ones are accepted"
    if module.gate_up_proj.device.type not in ("cpu", "cuda"):
        return f"they are on {module.gate_up_proj.device.type}: the cpu and cuda are accepted"
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
    return moe.layer(hidden_states, **routing, **_weights(module), **_biases(module), **gate_of(module))


def copies(module: Any) -> bool:
    """Whether a module's weights are laid out anew, in a copy that is kept beside them."""
    return not isinstance(module, Quantized) and (module.is_transposed or not module.is_concatenated)


def _laid_out(module: Any, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Of all experts, or of one: gate_up [.., 2 · inner, hidden] in halves, down [.., hidden, inner]."""
    if module.is_transposed:
        gate_up, down = gate_up.transpose(-1, -2), down.transpose(-1, -2)
    return _halves(gate_up, module, -2).contiguous(), down.contiguous()


def _weights(module: Any) -> dict[str, Tensor]:
    """Weights as quern.moe.layer takes them. A copy serves as long as nobody writes into them."""
    pair = (module.gate_up_proj, module.down_proj)
    if not copies(module):
        return dict(zip(("gate_up", "down"), pair))
    if torch.compiler.is_compiling() or any(t.is_inference() for t in pair):
        return dict(zip(("gate_up", "down"), _laid_out(module, *pair)))
    known = tuple((t.data_ptr(), t._version, t.dtype, t.device) for t in pair)
    kept = module.__dict__.get("_quern_weights")
    if kept is None or kept[0] != known:
        with torch.no_grad():
            kept = known, dict(zip(("gate_up", "down"), _laid_out(module, *pair)))
        module.__dict__["_quern_weights"] = kept
    return kept[1]


def _biases(module: Any) -> dict[str, Tensor]:
    if not module.has_bias:
        return {}
    gate_up = _halves(module.gate_up_proj_bias, module, -1)
    return {"gate_up_bias": gate_up, "down_bias": module.down_proj_bias}


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
        biases = _biases(self)
        if biases:  # with the columns' order
            made |= {**biases, "gate_up_bias": nvfp4.interleave(biases["gate_up_bias"])}
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
                held = getattr(self, f"{name}_repacked")
                held.copy_(nvfp4.prepack(*(t.to(held.device) for t in pair)))
            else:
                missing.append(f"{prefix}{name}_codes")

    def _apply(self, *given: Any, **named: Any) -> Any:
        """What to() and half() do: halves would change what the codes stand for, and devices have layouts of
        their own."""
        before = {name: getattr(self, f"{name}_global") for name in self.quern_rows}
        packed = {name: getattr(self, f"{name}_repacked") for name in self.quern_rows}
        super()._apply(*given, **named)
        for name, kept in before.items():
            made, old = getattr(self, f"{name}_repacked"), packed[name]
            setattr(self, f"{name}_global", kept.to(made.device))
            if made.device.type != old.device.type:
                rows, columns = self.quern_rows[name]
                pair = (nvfp4.as_bytes(t).to(made.device) for t in nvfp4.unpack(old, columns, rows))
                setattr(self, f"{name}_repacked", nvfp4.prepack(*pair))
        return self


_CLASSES: dict[type, type] = {}


@torch.no_grad()
def quantize_(module: Any) -> None:
    """Rounds a module's experts, in floats, to NVFP4, one by one, in place."""
    gate = gate_of(module)
    made: dict[str, list[list[Tensor]]] = {"gate_up": [[], []], "down": [[], []]}
    for pair in zip(module.gate_up_proj.detach(), module.down_proj.detach()):
        for name, one in zip(made, _laid_out(module, *pair)):
            matrix = one.t().contiguous()
            matrix = nvfp4.interleave(matrix) if name == "gate_up" else matrix
            codes, scales, scale = nvfp4.quantize(matrix[None], weight=True, global_per="expert")
            made[name][0].append(nvfp4.prepack(codes, scales))
            made[name][1].append(scale)
    hidden, inner = (module.down_proj.shape[n] for n in ((2, 1) if module.is_transposed else (1, 2)))
    module.quern_rows = {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
    del module.gate_up_proj, module.down_proj
    module.__dict__.pop("_quern_weights", None)
    for name, (repacked, scale) in made.items():
        module.register_buffer(f"{name}_repacked", torch.cat(repacked), persistent=False)
        module.register_buffer(f"{name}_global", torch.cat(scale))
    module.quern_gate = gate
    base = type(module)
    module.__class__ = _CLASSES.setdefault(base, type(f"NVFP4{base.__name__}", (Quantized, base), {}))
