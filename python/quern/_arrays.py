# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The little that differs between frameworks: where results get their memory."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Mapping, Sequence


def empty_like(like: Any, shape: Sequence[int], dtype: str) -> Any:
    """A new tensor beside `like`, in its framework and on its device, of what the framework calls the
    dtype."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    module = sys.modules[framework(like)]
    if module.__name__ == "jax":
        numbers = module.numpy
        return numbers.zeros(shape, getattr(numbers, dtype), device=like.device).block_until_ready()
    if not hasattr(module, dtype):
        raise TypeError(f"{module.__name__} has no {dtype}: a tensor for the result is accepted")
    return module.empty(shape, dtype=getattr(module, dtype))


def numpy_like() -> Any:
    """An array of NumPy, where nothing says which framework is meant."""
    import numpy

    return numpy.empty(0)


def room(size: int) -> Any:
    """Bytes for the library, in a framework that is there."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    import numpy

    return numpy.empty(size, numpy.uint8)


class _Readable:
    """The memory of a read-only array of NumPy."""

    def __init__(self, array: Any) -> None:
        found = array.__array_interface__
        self.array, self.__array_interface__ = array, {**found, "data": (found["data"][0], False)}


def readable(array: Any) -> Any:
    """An array that DLPack takes: it has no way to say that memory is read-only, which inputs may be."""
    if type(array).__module__ != "numpy" or array.flags.writeable:
        return array
    return sys.modules["numpy"].asarray(_Readable(array))


def on_stream_of(tensor: Any) -> Any:
    """A context in which calls run on CuPy's current stream. That of torch goes with its tensors."""
    import tvm_ffi

    stream = sys.modules["cupy"].cuda.get_current_stream()
    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", tensor.device.id), stream.ptr)


def is_torch(tensor: Any) -> bool:
    """Whether it is a torch.Tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def is_int64(tensor: Any) -> bool:
    """Whether these are the integers that frameworks make by themselves."""
    return str(getattr(tensor, "dtype", "")).removeprefix("torch.") == "int64"


def narrowed(tensor: Any) -> Any:
    """int64 as the int32 that the library takes. What int32 does not hold becomes its least or greatest
    number, which is as far out of every range: the library refuses it, on a GPU too."""
    least, most = -(2**31), 2**31 - 1
    if is_torch(tensor):
        return tensor.clamp(least, most).to(sys.modules["torch"].int32)
    return tensor.clip(least, most).astype("int32")


def is_compiling(tensor: Any) -> bool:
    """Whether torch.compile traces the call."""
    return is_torch(tensor) and bool(sys.modules["torch"].compiler.is_compiling())


def need_torch(**tensors: Any) -> None:
    """TypeError where one of them is no torch.Tensor, which the first one is."""
    for name, tensor in tensors.items():
        if tensor is not None and not is_torch(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__} beside a torch.Tensor: one framework is accepted"
            )


def framework(tensor: Any) -> str:
    """The name of the module that the tensor is of."""
    name = "torch" if is_torch(tensor) else type(tensor).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def wait_for(tensors: Iterable[Any]) -> None:
    """JAX computes an array after it has returned it, on a stream that only it knows."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.__dlpack_device__()[0] != 1:
            raise NotImplementedError("a JAX array is on a GPU: JAX arrays on the CPU are accepted")
        tensor.block_until_ready()


def check(name: str, tensor: Any, first: Any) -> None:
    """TypeError where it is no tensor, or not of the first tensor's framework."""
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{name} is a {type(tensor).__name__}: tensors that have __dlpack__ are accepted")
    if hasattr(tensor, "mask"):
        raise TypeError(f"{name} is a {type(tensor).__name__}: arrays without a mask are accepted")
    given, accepted = framework(tensor), framework(first)
    if given != accepted:
        raise TypeError(f"{name} is of {given}, the first tensor of {accepted}: one framework is accepted")


def need_tensors(tensors: Mapping[str, Any]) -> None:
    """TypeError where one that is given is no tensor, or not of the first one's framework."""
    first = None
    for name, tensor in tensors.items():
        if tensor is not None:
            first = tensor if first is None else first
            check(name, tensor, first)


def need_plain(what: str, *tensors: Any) -> None:
    """ValueError where one of them asks for a gradient, which `what` has not."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor is not None and getattr(tensor, "requires_grad", False):
            raise ValueError(
                f"{what} has no gradient here: tensors without one, or torch.no_grad(), are accepted"
            )
