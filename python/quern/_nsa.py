# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NSA with gradients for torch: which tensors a training forward saves, and which the backward reads and
writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _operations as ops

# What the caller hands in, in the order of NsaFunction's arguments after the two params structs.
INPUTS = ("q", "k", "v", "w_k", "w_v", "w_gate", "cu_seqlens", "block_idx", "group_idx")
_DIFFERENTIABLE = INPUTS[:6]
_SAVED = ("k_cmp", "v_cmp", "gates", "o_cmp", "o_slc", "o_win", "lse_cmp", "lse_slc", "lse_win")


def forward(
    params: bytes, tensors: dict[str, Tensor | None], groups: bool, save: bool
) -> dict[str, Tensor | None]:
    """The output `o`; with `save` also every tensor that the backward reads."""
    names = ["o"]
    if save:
        names += _SAVED
        names += ["block_idx"] if tensors.get("block_idx") is None else []
        names += ["group_idx"] if groups and tensors.get("group_idx") is None else []
        names += ["cu_seqlens_cmp"] if tensors.get("cu_seqlens") is not None else []
    return {**tensors, **dict(zip(names, ops.call("nsa", params, tensors, names)))}


class NsaFunction(torch.autograd.Function):
    """(params, params_given, groups, the tensors of INPUTS) → o.

    params_given are the same settings with both lists handed in, which is how the backward finds them.
    """

    @staticmethod
    def forward(ctx: Any, params: bytes, params_given: bytes, groups: bool, *inputs: Tensor | None) -> Tensor:
        save = any(ctx.needs_input_grad)
        result = forward(params, dict(zip(INPUTS, inputs)), groups, save)
        o = result["o"]
        if save:
            del result["o"]
            ctx.params, ctx.names = params_given, tuple(result)
            ctx.save_for_backward(*result.values())
        return o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        tensors = dict(zip(ctx.names, ctx.saved_tensors))
        present = [name for name in _DIFFERENTIABLE if tensors[name] is not None]
        grads = ops.call(
            "nsa",
            ctx.params,
            {**tensors, "d_o": d_o.contiguous()},
            [f"d_{name}" for name in present],
            backward=True,
        )
        by_name = {name: grad.to(tensors[name].dtype) for name, grad in zip(present, grads)}
        return (None, None, None, *(by_name.get(name) for name in INPUTS))
