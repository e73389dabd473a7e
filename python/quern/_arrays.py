# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The little that differs between frameworks: where results get their memory."""

from __future__ import annotations

import sys
from typing import Any, Sequence


class Memory:
    """Makes results beside a tensor: in its framework, on its device."""

    def __init__(self, like: Any) -> None:
        self.module = sys.modules[framework(like)]
        self.where = {"device": like.device} if is_torch(like) else {}

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new tensor of what its framework calls the dtype."""
        if not hasattr(self.module, dtype):
            raise TypeError(f"{self.module.__name__} has no {dtype}: a tensor for the result is accepted")
        return self.module.empty(shape, dtype=getattr(self.module, dtype), **self.where)


def is_torch(tensor: Any) -> bool:
    """Whether it is a torch.Tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def need_torch(**tensors: Any) -> None:
    """TypeError where one of them is no torch.Tensor, which the first one is."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_torch(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__} beside a torch.Tensor: one framework is accepted"
            )


def framework(tensor: Any) -> str:
    """The name of the module that the tensor is of."""
    return "torch" if is_torch(tensor) else type(tensor).__module__.partition(".")[0]


def check(name: str, tensor: Any, first: Any) -> None:
    """TypeError where it is no tensor, or not of the first tensor's framework."""
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{name} is a {type(tensor).__name__}: tensors that have __dlpack__ are accepted")
    given, accepted = framework(tensor), framework(first)
    if given != accepted:
        raise TypeError(f"{name} is of {given}, the first tensor of {accepted}: one framework is accepted")
