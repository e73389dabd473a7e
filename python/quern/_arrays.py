# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The little that differs between frameworks: where results get their memory, and a tensor without its
history."""

from __future__ import annotations

import sys
from typing import Any, Sequence


class Torch:
    """Memory like that of a torch tensor."""

    def __init__(self, like: Any) -> None:
        self.device = like.device

    def plain(self, tensor: Any) -> Any:
        return tensor.detach() if tensor.requires_grad else tensor

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)


class Namespace:
    """Memory like that of a NumPy or CuPy array."""

    def __init__(self, like: Any) -> None:
        self.module = sys.modules[type(like).__module__.partition(".")[0]]

    def plain(self, tensor: Any) -> Any:
        return tensor

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        if not hasattr(self.module, dtype):
            raise TypeError(
                f"{self.module.__name__} has no {dtype}: a tensor for the result, or torch, is accepted"
            )
        return self.module.empty(shape, getattr(self.module, dtype))


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


def _framework(tensor: Any) -> str:
    return "torch" if is_torch(tensor) else type(tensor).__module__.partition(".")[0]


def check(name: str, tensor: Any, like: Any) -> Any:
    """The first tensor's framework, after a look at whether this one is of the same. TypeError where it is
    not."""
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{name} is a {type(tensor).__name__}: tensors that have __dlpack__ are accepted")
    framework = _framework(tensor)
    if like is None:
        like = Torch(tensor) if framework == "torch" else Namespace(tensor)
        like.framework = framework
    elif framework != like.framework:
        raise TypeError(
            f"{name} is of {framework}, the first tensor of {like.framework}: one framework is accepted"
        )
    return like
