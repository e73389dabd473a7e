# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A call of an operation for every framework: torch's tensors go through torch.ops, all others straight to
the library."""

from __future__ import annotations

import functools
import operator
import sys
from typing import Any, Callable, Mapping

from . import _arrays
from . import _operations as ops


def run(
    name: str,
    settings: tuple[tuple[str, Any], ...],
    tensors: Mapping[str, Any],
    results: tuple[str, ...],
    *,
    keep: tuple[str, ...] = (),
    out: Mapping[str, Any] | None = None,
    asked: tuple[tuple[str, int], ...] = (),
) -> tuple[Any, ...]:
    """→ the results, in order. keep: what a backward may take beside what it needs. out: results that are
    given, and written where they stand; such a call has no gradient. asked: extents that no input says.
    Offsets and lists may be int64."""
    fields = ops.OPERATIONS[name].fields
    wide = [f for f, t in tensors.items() if fields[f].dtype == "i32" and _arrays.is_int64(t)]
    if wide:
        tensors = {**tensors, **{field: _arrays.narrowed(field, tensors[field]) for field in wide}}
    if out is not None:
        _arrays.need_plain(name, *tensors.values())
        for field, tensor in out.items():
            _arrays.need_writable(field, tensor)
        if _arrays.are_meta({**tensors, **out}):
            return tuple(out[field] for field in results)
        tensors = {**tensors, **out}
    elif any(_arrays.is_torch(t) for t in tensors.values()):
        from . import _torch

        return _torch.run(name, settings, tensors, results, keep, asked)
    extents = dict(asked) if asked else None
    return ops.call(name, ops.params_of(name, settings), tensors, results, asked=extents)


def cast(name: str, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Activations in the dtype of torch's autocast where it is on, as run() takes them."""
    if not any(_arrays.is_torch(t) for t in tensors.values()):
        return tensors
    from . import _torch

    return _torch.autocast(_torch.OPERATORS[name], tensors)


def writer(
    name: str, settings: tuple[str, ...], fields: tuple[str, ...]
) -> Callable[[tuple[Any, ...], tuple[Any, ...]], bool]:
    """A short way for calls that repeat: write(values of the settings, (None, *tensors of the fields)), the
    results among them, does what run(out=..) does, or returns False where that has to look closer."""
    operation = ops.OPERATIONS[name]
    number, places = operation.number, {field: i + 1 for i, field in enumerate(fields)}
    slots = operator.itemgetter(*(places.get(field, 0) for field in operation.fields))
    integers = [place for field, place in places.items() if operation.fields[field].dtype == "i32"]
    call = ops.library.run

    @functools.lru_cache(maxsize=1024)
    def params(*values: Any) -> bytes:
        return ops.params_of(name, tuple(zip(settings, values)))

    def write(values: tuple[Any, ...], tensors: tuple[Any, ...]) -> bool:
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        kind, trains = torch.Tensor, torch.is_grad_enabled()
        for tensor in tensors:
            if tensor is not None and (type(tensor) is not kind or (trains and tensor.requires_grad)):
                return False
        wide = any(getattr(tensors[place], "dtype", None) is torch.int64 for place in integers)
        if wide or tensors[-1].is_meta:
            return False
        try:
            stated = params(*values)
        except TypeError:  # no number
            return False
        call(number, 0, stated, *slots(tensors))
        return True

    return write
