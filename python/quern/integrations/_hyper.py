# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's hyper-connections in the transformers package: a layer's copies of the residual stream by
quern.dsv4.hyper, the sub-layer's norm with them."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from ..dsv4 import hyper

MOST = 8  # copies


def _through(x: Tensor, connection: Any, norm: Any, sub_layer: Callable[[Tensor], Tensor]) -> Tensor:
    """The copies x [B, N, n, Dm] after a sub-layer."""
    copies = x.flatten(0, 1)
    weights = (norm.weight, *(t.float() for t in (connection.fn, connection.base, connection.scale)))
    settings = {"iters": connection.hc_sinkhorn_iters, "eps": connection.hc_eps}
    settings["rms_eps"] = norm.variance_epsilon
    h = hyper(copies, *weights, **settings).h.view(*x.shape[:2], -1)
    return hyper(copies, *weights, sub_layer(h).flatten(0, 1), **settings).new.view(x.shape)


class Layer(v4.DeepseekV4DecoderLayer):
    """A layer whose attention and experts stay what they are."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Copies [B, N, n, Dm] → [B, N, n, Dm]."""
        attended = _through(
            hidden_states, self.attn_hc, self.input_layernorm, lambda h: self.self_attn(h, **kwargs)[0]
        )
        return _through(
            attended, self.ffn_hc, self.post_attention_layernorm, lambda h: self.mlp(h, input_ids=input_ids)
        )


MADE = Layer


def refusal(module: v4.DeepseekV4DecoderLayer) -> str | None:
    """Why a layer cannot be replaced."""
    if type(module) is not v4.DeepseekV4DecoderLayer:
        return f"it is a {type(module).__name__}"
    if module.attn_hc.hc_mult > MOST:
        return f"hc_mult is {module.attn_hc.hc_mult}: 1 to {MOST} copies are accepted"
    for name, kind in (("hc", v4.DeepseekV4HyperConnection), ("norm", v4.DeepseekV4RMSNorm)):
        for part_name, part in module.named_children():
            if part_name.endswith(name) and type(part) is not kind:
                return f"{part_name} is a {type(part).__name__}: {kind.__name__} is accepted"
    return None


def changer(model: torch.nn.Module) -> Callable[[torch.nn.Module], None]:
    """What replaces a layer of this model."""

    def change(module: torch.nn.Module) -> None:
        module.__class__ = Layer

    return change
