# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Projections of a few rows, as decoding has them, which read bf16 weights once and in place: on a Zen 4 at
20 GB/s a thread, where PyTorch's product of one row reads 10."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import linear

ROWS = 8
WEIGHTS_MIN = 1 << 20  # of fewer the call is most of the time


class Linear(nn.Linear):
    """The same product, by the library where the rows are few, the numbers bf16 and no gradient is wanted."""

    def _few(self, x: Tensor) -> bool:
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling() or type(x) is not Tensor or x.dtype is not torch.bfloat16:
            return False
        if weight.dtype is not torch.bfloat16 or not (x.is_cpu and weight.is_cpu):
            return False
        if not 0 < x.numel() <= ROWS * x.shape[-1]:
            return False
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
            return False
        return not torch.is_autocast_enabled("cpu")

    def forward(self, x: Tensor) -> Tensor:
        if not self._few(x):
            return super().forward(x)
        rows = x.reshape(-1, x.shape[-1])
        return linear(rows, self.weight, self.bias).reshape(*x.shape[:-1], -1)


def replace(model: nn.Module) -> None:
    """Gives a model's large linear layers this forward, where the processor multiplies bf16, and says so."""
    if not torch.cpu._is_avx512_bf16_supported():
        return
    plain = [m for m in model.modules() if type(m) is nn.Linear]
    found = [m for m in plain if m.weight.is_cpu and m.weight.numel() >= WEIGHTS_MIN]
    for module in found:
        module.__class__ = Linear
    if found:
        print(f"quern: {len(found)} Linear replaced, for up to {ROWS} rows of bfloat16")
