# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The C library's operations by name, on tensors of any framework that speaks DLPack. Nothing is copied."""

from __future__ import annotations

import functools
import pathlib
import struct
from typing import Any, Iterable, Mapping, NamedTuple

import tvm_ffi

from . import _arrays

_library = tvm_ffi.load_module(str(next(pathlib.Path(__file__).parent.glob("quern_ffi*.so"))))
_parameters, _expect, _run = _library.parameters, _library.expect, _library.run

# The order of quern_dtype.
DTYPES = (
    "float32",
    "float16",
    "bfloat16",
    "int32",
    "uint8",
    "int64",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int8",
    "int16",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "complex64",
)
_RESULTS = (3, 4)  # QUERN_OP_RESULT, QUERN_OP_OPTIONAL_RESULT
_EXPECTED = struct.Struct("9q")


class Operation(NamedTuple):
    """One operation: its number, its tensors' fields with their places, the extents that a caller states."""

    number: int
    tensors: dict[str, int]
    asked: tuple[str, ...]


def _read_operations() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    number = 0
    for line in _library.operations().splitlines():
        kind, name, *rest = line.split("\t")
        if kind == "op":
            operation = Operation(number, {}, tuple(rest[1:]))
            found.setdefault(name, operation)
            number += 1
        elif kind == "tensor":
            operation.tensors[name] = len(operation.tensors)
    return found


OPERATIONS = _read_operations()


def version() -> str:
    """The C library's version."""
    return str(_library.version())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


@functools.lru_cache(maxsize=1024)
def _params(number: int, preset: str, settings: tuple[tuple[str, Any], ...]) -> bytes:
    return bytes(_parameters(number, preset, "".join(f"{name}={_text(value)}\n" for name, value in settings)))


def params(name: str, preset: str | None = None, **settings: Any) -> bytes:
    """A params struct: the preset's fields, then those given. None leaves a field as it is."""
    given = tuple(item for item in settings.items() if item[1] is not None)
    return _params(OPERATIONS[name].number, preset or "", given)


@functools.lru_cache(maxsize=1024)
def params_from(name: str, settings: str) -> bytes:
    """A params struct from lines of name=value."""
    return bytes(_parameters(OPERATIONS[name].number, "", settings))


def settings(name: str, parameters: bytes) -> str:
    """All parameters of a params struct as lines of name=value."""
    return str(_library.settings(OPERATIONS[name].number, parameters))


def call(
    name: str,
    parameters: bytes,
    tensors: Mapping[str, Any],
    results: Iterable[str],
    *,
    backward: bool = False,
    asked: Mapping[str, int] | None = None,
) -> tuple[Any, ...]:
    """Runs an operation and returns its `results`, in that order, in memory of the inputs' framework.

    tensors: by their fields in the C struct, None for those that are absent; those that are results already
    are written where they stand. asked: extents that no input says.
    """
    operation = OPERATIONS[name]
    places = operation.tensors
    slots: list[Any] = [None] * len(places)
    first = kind = None
    for field, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) is not kind:  # a look at each type that comes is enough
            kind = type(tensor)
            first = tensor if first is None else first
            _arrays.check(field, tensor, first)
        slots[places[field]] = tensor
    if first is None:
        raise TypeError(f"{name}: no tensor is given")
    wanted = [places[field] for field in results]
    missing = [slot for slot in wanted if slots[slot] is None]
    if missing:
        memory = _arrays.Memory(first)
        extents = struct.pack("4q", *([(asked or {}).get(e, 0) for e in operation.asked] + [0] * 4)[:4])
        expected = bytes(_expect(operation.number, int(backward), parameters, extents, *slots))
        for slot in missing:
            role, dtype, ndim, *shape = _EXPECTED.unpack_from(expected, slot * _EXPECTED.size)
            if role in _RESULTS:
                slots[slot] = memory.empty(shape[:ndim], DTYPES[dtype])
    _run(operation.number, int(backward), parameters, *slots)
    return tuple([slots[slot] for slot in wanted])
