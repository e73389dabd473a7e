# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Checkpoints: safetensors files, model folders and GGUF, mapped, and the experts of their layers."""

from __future__ import annotations

import os
import weakref
from typing import Any, Iterator, Mapping, NamedTuple

import tvm_ffi

from . import _arrays
from . import _operations as ops

tvm_ffi.register_error("OSError", OSError)

# What NumPy calls a dtype; what it lacks comes as unsigned integers of the same width.
_NUMPY = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
}


class _Stored(NamedTuple):
    """Where a tensor stands, and what it is."""

    dtype: str
    number: int
    format: str
    shard: str
    address: int
    shape: tuple[int, ...]


class _Owner:
    """The open checkpoint, closed when neither the mapping of names nor an array is left."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, ops.library.checkpoint_close, handle).atexit = False


class _Mapped:
    """Memory of a checkpoint, which lives as long as an array of it. NumPy reads the interface."""

    def __init__(self, owner: Any, address: int, size: int, readonly: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, readonly),
        }


def _shape_of(text: bytes) -> tuple[int, ...]:
    return tuple(int(extent) for extent in text.split(b",")) if text else ()


def _text(name: bytes) -> str:
    return name.replace(b"\xc0\x80", b"\0").decode("utf-8", "replace")


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _as(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Bytes of either framework as a tensor."""
    if _arrays.is_torch(data):
        import torch

        return data.view(getattr(torch, dtype)).reshape(shape)
    return data.view(_NUMPY.get(dtype, dtype)).reshape(shape)


class Checkpoint(Mapping[str, Any]):
    """The tensors of a checkpoint by their names, as they are stored.

    They are views of the mapped files: read-only, and good as long as one of them lives. NumPy's arrays say
    that they are read-only; a write to one of torch's ends the process. Of dtypes that NumPy lacks it gets
    unsigned integers: bfloat16 as uint16, 4- and 8-bit floats as uint8. What no framework has (ggml's
    blocks) comes as bytes.
    """

    def __init__(self, path: str | os.PathLike[str], like: Any = None) -> None:
        self._like = like
        self._owner = _Owner(ops.library.checkpoint_open(os.fspath(path)))
        rows = bytes(ops.library.checkpoint_tensors(self._owner.handle)).split(b"\0")[:-1]
        self._tensors = {}
        for name, dtype, number, form, shard, at, shape in zip(*(rows[i::7] for i in range(7))):
            stored = _Stored(_text(dtype), int(number), _text(form), _text(shard), int(at), _shape_of(shape))
            self._tensors[_text(name)] = stored

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> Any:
        t = self._tensors[name]
        dtype = ops.DTYPES[t.number] if t.number >= 0 else "uint8"
        return self._view(t.address, dtype, t.shape)

    def __reduce__(self) -> Any:
        raise TypeError("a Checkpoint is neither copied nor pickled: open its path again")

    def dtype(self, name: str) -> str:
        """The file's own name for a tensor's dtype: "BF16", "F8_E4M3", "Q4_K"."""
        return self._tensors[name].dtype

    def format(self, name: str) -> str:
        """How its numbers are stored: "plain", "nvfp4 modelopt", "mxfp4 blocks", "scales" and so on."""
        return self._tensors[name].format

    def shard(self, name: str) -> str:
        """The name of its file."""
        return self._tensors[name].shard

    def _view(self, address: int, dtype: str, shape: tuple[int, ...]) -> Any:
        import numpy

        width = numpy.dtype(_NUMPY.get(dtype, dtype)).itemsize
        size = _elements(shape) * width
        if size == 0:
            data = numpy.empty(0, numpy.uint8)
        else:
            data = numpy.asarray(_Mapped(self._owner, address, size, not _arrays.is_torch(self._like)))
        if _arrays.is_torch(self._like):
            import torch

            data = torch.from_numpy(data)
        return _as(data, dtype, shape)

    def experts(self, layer: int, *, repacked: bool = False, a4: bool = False) -> dict[str, Any]:
        """The routed experts of a layer as keyword arguments of quern.moe.layer, whatever format they are
        stored in: gate and up interleaved, globals in the layer's sense, biases with them, the router's
        weight, correction bias or table, and the shared expert, where the checkpoint has these. A shared
        expert with a gate of its own (Qwen's shared_expert_gate) is left out: the layer computes none.

        repacked: in the layout that products read fastest. a4: with the activations' globals, which the
        checkpoint must have, so that the layer quantises its activations by them.
        """
        import numpy

        which = self._owner.handle, layer, int(repacked)
        size = ops.library.checkpoint_experts(*which, None)
        if _arrays.is_torch(self._like):
            import torch

            memory: Any = torch.empty(size, dtype=torch.uint8)
            begin = memory.data_ptr()
        else:
            memory = numpy.empty(size, numpy.uint8)
            begin = memory.__array_interface__["data"][0]
        rows = bytes(ops.library.checkpoint_experts(*which, memory)).split(b"\0")[:-1]
        found: dict[str, Any] = {}
        for name, number, address, extents in zip(*(rows[i::4] for i in range(4))):
            field, shape = name.decode(), _shape_of(extents)
            if field in ("intermediate", "shared_intermediate"):
                found.update({field: int(number)} if repacked else {})
                continue
            dtype, at = ops.DTYPES[int(number)], int(address)
            width = numpy.dtype(_NUMPY.get(dtype, dtype)).itemsize
            if begin <= at < begin + size:
                place = at - begin
                found[field] = _as(memory[place : place + _elements(shape) * width], dtype, shape)
            else:
                found[field] = self._view(at, dtype, shape)
        inputs = ("gate_up_input_global", "down_input_global")
        if a4 and not all(name in found for name in inputs):
            raise ValueError(f"a4 is true and layer {layer} has no input scales: a4=False is accepted")
        for name in inputs:
            if not a4:
                found.pop(name, None)
        return {**found, "a4": True} if a4 else found


def load_nvfp4(path: str | os.PathLike[str], *, like: Any = None) -> Checkpoint:
    """Opens a safetensors file, a model's folder (an index and its shards, or one file) or a GGUF file:
    NVFP4 of ModelOpt, compressed-tensors or GGUF, MXFP4, FP8 or floats. Nothing is read until it is asked
    for.

    like: a tensor of torch, for tensors of torch; else arrays of NumPy. A file that cannot be read is
    OSError, one that is malformed, or an index that does not say what its shards hold, ValueError.
    """
    return Checkpoint(path, like)
