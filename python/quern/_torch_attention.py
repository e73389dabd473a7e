# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Dense attention as PyTorch operators, quern::attention and its backward."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from . import _operations as ops


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


@torch.library.custom_op("quern::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Optional[Tensor],  # noqa: UP045: the operator's schema is read from these
    cu_seqlens_kv: Optional[Tensor],  # noqa: UP045
    causal: bool,
    window: int,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor]:
    """→ o, lse."""
    params = ops.params("attention", causal=causal, window=window, scale=scale, query_offset=query_offset)
    tensors = {"q": _dense(q), "k": _dense(k), "v": _dense(v)}
    tensors.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    o, lse = ops.call("attention", params, tensors, ("o", "lse"))
    return o, lse


@attention.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_kv, causal, window, scale, query_offset):
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return o, q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("quern::attention_backward", mutates_args=())
def attention_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens_q: Optional[Tensor],  # noqa: UP045
    cu_seqlens_kv: Optional[Tensor],  # noqa: UP045
    causal: bool,
    window: int,
    scale: float,
    query_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ d_q, d_k, d_v."""
    params = ops.params("attention", causal=causal, window=window, scale=scale, query_offset=query_offset)
    tensors = {"q": _dense(q), "k": _dense(k), "v": _dense(v), "o": o, "lse": lse, "d_o": _dense(d_o)}
    tensors.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    d_q, d_k, d_v = ops.call("attention", params, tensors, ("d_q", "d_k", "d_v"), backward=True)
    return d_q, d_k, d_v


@attention_backward.register_fake
def _(d_o, q, k, v, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.settings = inputs[5:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_o: Tensor | None, d_lse: None) -> tuple[Tensor | None, ...]:
    if d_o is None:
        return (None,) * 9
    return (*torch.ops.quern.attention_backward(d_o, *ctx.saved_tensors, *ctx.settings), *(None,) * 6)


attention.register_autograd(_backward, setup_context=_setup)
