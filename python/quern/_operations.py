# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The C library's operations by name, on tensors of any framework that speaks DLPack. Nothing is copied."""

from __future__ import annotations

import atexit
import functools
import numbers
import operator
import pathlib
import pkgutil
import struct
import sys
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import tvm_ffi

from . import _arrays
from ._batch import packed

tvm_ffi.register_error("NotImplementedError", NotImplementedError)


def _load() -> Any:
    """The C library's functions: beside these files, or, where these are the sources, wherever Python finds
    the package installed."""
    for folder in pkgutil.extend_path(list(sys.modules[__package__].__path__), __package__):
        for file in pathlib.Path(folder).glob("quern_ffi*.so"):
            return tvm_ffi.load_module(str(file))
    raise ImportError("quern has no quern_ffi.so: a package that pip has installed is accepted")


library = _load()
atexit.register(library.keep_plans)
_parameters, _expect, _expect_of, _run = (
    library.parameters,
    library.expect,
    library.expect_of,
    library.run,
)

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
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)


def dtype_number(dtype: Any) -> int:
    """The number of a dtype, of any framework or by its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {name}: {', '.join(DTYPES)} are accepted")
    return DTYPES.index(name)


UNUSED, NEEDED, OPTIONAL, RESULT, OPTIONAL_RESULT = range(5)  # quern_op_role
_EXPECTED = struct.Struct("9q")
_EXTENTS = struct.Struct("4q")
_NO_EXTENTS = bytes(_EXTENTS.size)
ASKED = "?"
_ABSENT = _EXPECTED.pack(-1, *[0] * 8)


class Field(NamedTuple):
    """A tensor of an operation, as quern_op_tensor says."""

    place: int
    name: str
    dtype: str
    gradient_of: str | None
    input: bool
    trigger: bool
    results: tuple[bool, bool]
    updated: bool
    fixed: tuple[str, ...]
    varlen: tuple[str, ...]


class Operation(NamedTuple):
    """One operation: its number, its tensors by their fields, the extents that a caller states."""

    number: int
    fields: dict[str, Field]
    backward: bool
    varlen_by: int
    asked: tuple[str, ...]

    def shape_of(self, field: str, present: Iterable[str]) -> tuple[str, ...]:
        """The names of a tensor's extents, given which tensors are there."""
        described = self.fields[field]
        varlen = any(self.fields[name].place == self.varlen_by for name in present)
        return described.varlen if varlen and described.varlen else described.fixed


def _read_fields(rows: list[list[str]]) -> dict[str, Field]:
    names = [row[1] for row in rows]
    fields = {}
    for place, (_, name, file_name, dtype, source, *flags, fixed, varlen) in enumerate(rows):
        named = name[2:] if name.startswith("d_") and name[2:] in names else None
        gradient_of = names[int(source)] if int(source) >= 0 else named
        is_input, trigger, forward, backward, updated = (flag == "1" for flag in flags)
        shapes = tuple(fixed.split()), tuple(varlen.split())
        fields[name] = Field(
            place, file_name, dtype, gradient_of, is_input, trigger, (forward, backward), updated, *shapes
        )
    return fields


def _read_operations() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    described = library.operations().split("op\t")[1:]
    for number, text in enumerate(described):
        (name, backward, varlen_by, *asked), *rows = (line.split("\t") for line in text.splitlines())
        operation = Operation(number, _read_fields(rows), backward == "1", int(varlen_by), tuple(asked))
        found.setdefault(name, operation)
    return found


OPERATIONS = _read_operations()


def version() -> str:
    """The C library's version."""
    return str(library.version())


def _text(value: Any) -> str:
    text = repr(float(value)) if isinstance(value, float) else str(value)  # NumPy's repr has its type's name
    if text in ("True", "False"):
        return text.lower()
    if "\n" in text:
        raise ValueError(f"{text!r} is given for a parameter: one line is accepted")
    return text


def line(name: str, value: Any) -> str:
    """A parameter as a line of name=value. None leaves it as it is."""
    if value is None:
        return ""
    if isinstance(value, (str, numbers.Number)) or type(value).__name__ in ("bool", "bool_"):
        return f"{name}={_text(value)}\n"
    if hasattr(value, "item"):
        raise TypeError(f"{name} is a {type(value).__name__}: a number, such as its item(), is accepted")
    pair = "; of (left, 0) that is left + 1, with the query's own" if name == "window" else ""
    raise TypeError(f"{name} is {value!r}: one number or word is accepted{pair}")


@functools.lru_cache(maxsize=1024)
def _lines(settings: tuple[tuple[str, Any], ...]) -> str:
    return "".join(line(name, value) for name, value in settings)


def lines(settings: tuple[tuple[str, Any], ...]) -> str:
    """Parameters as lines of name=value; a preset comes first."""
    try:
        return _lines(settings)
    except TypeError:  # a value that has no hash: its line says what is wrong with it
        return "".join(line(name, value) for name, value in settings)


@functools.lru_cache(maxsize=1024)
def params_from(name: str, settings: str) -> bytes:
    """A params struct from lines of name=value; those of extents say nothing of it."""
    stated = "".join(line for line in settings.splitlines(True) if not line.startswith(ASKED))
    try:
        return bytes(_parameters(OPERATIONS[name].number, stated))
    except ValueError:
        _lines.cache_clear()  # to it 1, 1.0 and True are one setting: the text of another may be accepted
        raise


def filled(settings: str, integers: Sequence[Any], floats: Sequence[Any]) -> str:
    """Such lines with the numbers that a graph left open, in their order, for the values "#" and "~"."""
    if not integers and not floats:
        return settings
    left = {"#": iter(integers), "~": iter(floats)}
    parts = (line.rpartition("=") for line in settings.splitlines())
    return "".join(f"{name}={next(left[v]) if v in left else v}\n" for name, _, v in parts)


def values(settings: str, integers: Sequence[Any]) -> dict[str, Any]:
    """What such lines say, by name: numbers, symbols where a graph left an integer open, and words."""
    left, found = iter(integers), {}
    for text in settings.splitlines():
        name, _, value = text.removeprefix(ASKED).partition("=")
        number = value.removeprefix("-").isdigit()
        found[name] = next(left) if value == "#" else int(value) if number else value
    return found


def asked_lines(asked: Iterable[tuple[str, int]]) -> str:
    """Extents of results that no input says, as lines beside the parameters."""
    return "".join(f"{ASKED}{name}={operator.index(extent)}\n" for name, extent in asked)


@functools.lru_cache(maxsize=1024)
def asked_of(settings: str) -> Mapping[str, int] | None:
    """The extents of asked_lines()."""
    found = (line[1:].split("=") for line in settings.splitlines() if line.startswith(ASKED))
    return {name: int(extent) for name, extent in found} or None


def params_of(name: str, settings: tuple[tuple[str, Any], ...]) -> bytes:
    """A params struct of these settings, which lines() takes."""
    return params_from(name, lines(settings))


def params(name: str, **settings: Any) -> bytes:
    """A params struct: the preset's fields, then those given. None leaves a field as it is."""
    return params_of(name, tuple(settings.items()))


@functools.lru_cache(maxsize=1024)
def roles(name: str, backward: bool, settings: str, present: tuple[str, ...]) -> dict[str, int]:
    """What each tensor is to a pass, given which tensors are there."""
    operation = OPERATIONS[name]
    there = bytes(field in present for field in operation.fields)
    found = library.roles(operation.number, int(backward), params_from(name, settings), there)
    return dict(zip(operation.fields, bytes(found)))


def _extents(operation: Operation, asked: Mapping[str, int] | None) -> bytes:
    if asked is None:
        return _NO_EXTENTS
    return packed(_EXTENTS, ([asked.get(name, 0) for name in operation.asked] + [0] * 4)[:4])


def _unpack(expected: bytes, place: int) -> tuple[int, int, tuple[int, ...]]:
    """The role, the dtype's number and the shape."""
    row = _EXPECTED.unpack_from(expected, place * _EXPECTED.size)
    return row[0], row[1], row[3 : 3 + row[2]]


def expect_of(
    name: str, backward: bool, settings: str, views: Mapping[str, tuple[int, int, tuple[int, ...]]]
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The dtype's number and the shape that a call expects of every tensor, from the dtype's number, the
    device and the shape of those that are there."""
    operation = OPERATIONS[name]
    rows = b"".join(
        packed(_EXPECTED, (*views[f][:2], len(views[f][2]), *(*views[f][2], *[0] * 6)[:6]))
        if f in views
        else _ABSENT
        for f in operation.fields
    )
    asked = _extents(operation, asked_of(settings))
    expected = bytes(_expect_of(operation.number, int(backward), params_from(name, settings), asked, rows))
    return {field: _unpack(expected, described.place)[1:] for field, described in operation.fields.items()}


def check(name: str, parameters: bytes, tensors: Mapping[str, Any]) -> None:
    """Refuses what call() would refuse of these shapes and dtypes, results' among them."""
    operation = OPERATIONS[name]
    library.check(operation.number, 0, parameters, *[tensors.get(field) for field in operation.fields])


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
    fields = operation.fields
    slots: list[Any] = [None] * len(fields)
    first = kind = None
    for field, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) is not kind:  # a look at each type that comes is enough
            kind = type(tensor)
            first = tensor if first is None else first
            _arrays.check(field, tensor, first)
        slots[fields[field].place] = tensor
    if first is None:
        raise TypeError(f"{name}: no tensor is given")
    source = type(first).__module__
    passed = list(slots)
    if source == "jaxlib._jax":
        _arrays.wait_for(slots)
    elif source == "numpy":
        for field, tensor in tensors.items():
            if tensor is not None:
                _arrays.check(field, tensor, first)
                given = fields[field].results[backward]
                passed[fields[field].place] = (_arrays.exported if given else _arrays.readable)(tensor)
    wanted = [fields[field].place for field in results]
    missing = [slot for slot in wanted if slots[slot] is None]
    if missing:
        extents = _extents(operation, asked)
        expected = bytes(_expect(operation.number, int(backward), parameters, extents, *passed))
        for slot in missing:
            role, dtype, shape = _unpack(expected, slot)
            if role == RESULT or role == OPTIONAL_RESULT:
                slots[slot] = _arrays.empty_like(first, shape, DTYPES[dtype])
                passed[slot] = _arrays.exported(slots[slot])
    if source.startswith("cupy"):
        with _arrays.on_stream_of(first):
            _run(operation.number, int(backward), parameters, *passed)
    else:
        _run(operation.number, int(backward), parameters, *passed)
    return tuple([slots[slot] for slot in wanted])
