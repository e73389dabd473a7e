# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The little that differs between frameworks: where results get their memory."""

from __future__ import annotations

import ctypes
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
    if dtype == "bfloat16" and module.__name__ == "numpy" and "ml_dtypes" in sys.modules:
        return module.empty(shape, sys.modules["ml_dtypes"].bfloat16)
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


class _BFloat16:
    """An array of ml_dtypes' bfloat16, which NumPy's DLPack does not know: its bits under their own name."""

    def __init__(self, array: Any) -> None:
        self._bits = array.view("uint16")

    def __dlpack_device__(self) -> Any:
        return self._bits.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        capsule = self._bits.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        address = pointer(capsule, b"dltensor")
        ctypes.c_uint8.from_address(address + _DTYPE_CODE).value = _BFLOAT
        return capsule


# Of a DLTensor: after its data, device and ndim stands the dtype's code; kDLBfloat.
_DTYPE_CODE, _BFLOAT = 20, 4


def over(memory: bytearray, dtype: str, *shape: int) -> Any:
    """A tensor of this memory, in a framework that is there."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.frombuffer(memory, dtype=getattr(torch, dtype)).reshape(shape)
    import numpy

    return numpy.frombuffer(memory, dtype).reshape(shape)


def _module_of(tensor: Any) -> Any:
    """What has the framework's functions."""
    module = sys.modules[framework(tensor)]
    return module.numpy if module.__name__ == "jax" else module


def joined(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Tensors of one framework, laid end to end."""
    return tensors[0] if len(tensors) == 1 else _module_of(tensors[0]).concatenate(tensors, axis)


def zeros_like(tensor: Any) -> Any:
    return _module_of(tensor).zeros_like(tensor)


def widened(tensor: Any) -> Any:
    """The same numbers in float32."""
    return tensor.float() if is_torch(tensor) else tensor.astype("float32")


def exported(array: Any) -> Any:
    """An array that DLPack takes."""
    if type(array).__module__ == "numpy" and array.dtype.name == "bfloat16":
        return _BFloat16(array)
    return array


def readable(array: Any) -> Any:
    """An array that DLPack takes, which has no way to say that memory is read-only; inputs may be."""
    if type(array).__module__ != "numpy":
        return array
    if not array.flags.writeable:
        bits = array.view("uint16") if array.dtype.name == "bfloat16" else array
        array = sys.modules["numpy"].asarray(_Readable(bits)).view(array.dtype)
    return exported(array)


def need_writable(name: str, array: Any) -> None:
    """ValueError where a result's memory cannot be written."""
    if framework(array) == "jax":
        raise ValueError(f"{name} is a JAX array, which cannot be written: a call without it is accepted")
    if type(array).__module__ == "numpy" and not array.flags.writeable:
        raise ValueError(f"{name} is read-only: an array that can be written, such as a copy(), is accepted")


def on_stream_of(tensor: Any) -> Any:
    """A context in which calls run on CuPy's current stream. That of torch goes with its tensors."""
    import tvm_ffi

    stream = sys.modules["cupy"].cuda.get_current_stream()
    return tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", tensor.device.id), stream.ptr)


def is_torch(tensor: Any) -> bool:
    """Whether it is a torch.Tensor; does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def gpu_of(tensor: Any) -> Any:
    """The GPU that a torch.Tensor is on; None: it is on the CPU."""
    return tensor.device if is_torch(tensor) and tensor.is_cuda else None


def is_int64(tensor: Any) -> bool:
    """Whether these are the integers that frameworks make by themselves."""
    return str(getattr(tensor, "dtype", "")).removeprefix("torch.") == "int64"


INT32 = (-(2**31), 2**31 - 1)


def narrowed(name: str, tensor: Any) -> Any:
    """int64 as the int32 that the library takes; ValueError for a number that int32 does not hold. Nobody
    waits for a GPU: such a number becomes the nearest there, which is as far out of every range."""
    if is_torch(tensor):
        from . import _torch

        return _torch.narrowed(name, tensor)
    if tensor.__dlpack_device__()[0] == 1:
        need_int32(name, tensor)
    return tensor.clip(*INT32).astype("int32")


def need_int32(name: str, tensor: Any) -> None:
    """ValueError for integers on the CPU that int32 does not hold."""
    beyond = (tensor < INT32[0]) | (tensor > INT32[1])
    if not beyond.any():
        return
    index = int((beyond.reshape(-1) * 1).argmax())
    number, place = int(tensor.reshape(-1)[index]), []
    for extent in reversed(tensor.shape):
        index, at = divmod(index, extent)
        place.insert(0, at)
    raise ValueError(f"{name}{place or ''} is {number}: integers of 32 bits are accepted")


def is_meta(tensor: Any) -> bool:
    """Whether it is a torch.Tensor that has a shape and no data."""
    return is_torch(tensor) and bool(tensor.is_meta)


def are_meta(tensors: Mapping[str, Any]) -> bool:
    """Whether they have shapes and no data; ValueError where only some do."""
    found = {is_meta(t): name for name, t in tensors.items() if t is not None}
    if len(found) > 1:
        raise ValueError(
            f"{found[True]} is on the device meta, {found[False]} is not: one device is accepted"
        )
    return True in found


def has_no_data(tensor: Any) -> bool:
    """Whether torch.compile traces the call, or the tensor has a shape alone."""
    return is_meta(tensor) or (is_torch(tensor) and bool(sys.modules["torch"].compiler.is_compiling()))


def need_torch(**tensors: Any) -> None:
    """TypeError where one of them is no torch.Tensor, which the first one is."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not is_torch(tensor):
            raise TypeError(
                f"{name} is a {type(tensor).__name__} beside a torch.Tensor: one framework is accepted"
            )
        _need_strides(name, tensor)


def _need_strides(name: str, tensor: Any) -> None:
    """TypeError where a torch.Tensor's elements do not stand at strides."""
    if tensor.is_nested:
        raise TypeError(
            f"{name} is a nested tensor: its sequences laid end to end, values(), with cu_seqlens, the "
            "offsets(), or a padded tensor, are accepted"
        )
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"{name} is sparse: to_dense() is accepted")


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
    if given == "torch":
        _need_strides(name, tensor)
    elif given == "numpy" and not tensor.dtype.isnative:
        raise TypeError(
            f"{name} is in the other byte order: astype({name}.dtype.newbyteorder('=')) is accepted"
        )


def need_tensors(tensors: Mapping[str, Any]) -> None:
    """TypeError where one that is given is no tensor with data, or not of the first one's framework."""
    first = None
    for name, tensor in tensors.items():
        if tensor is not None:
            first = tensor if first is None else first
            check(name, tensor, first)
            if is_meta(tensor):
                raise TypeError(f"{name} is on the device meta: tensors with data are accepted")


def train(*tensors: Any) -> bool:
    """Whether one of them asks for a gradient, where gradients are recorded."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    return any(getattr(tensor, "requires_grad", False) for tensor in tensors)


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
