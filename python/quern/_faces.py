# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A call of an operation for every framework: torch's tensors go through torch.ops, all others straight to
the library."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from typing import Any, Mapping

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


class Short:
    """A short way for calls of torch.Tensors that repeat and have no gradient: past torch.ops, straight to
    the library. settings: the parameters' names; inputs: the tensors', queries, keys and values first;
    result: its one. It does what run() does, or says that run() has to look closer."""

    def __init__(self, name: str, settings: tuple[str, ...], inputs: tuple[str, ...], result: str) -> None:
        operation = ops.OPERATIONS[name]
        places = [operation.fields[field].place for field in (*inputs, result)]
        self._integers = [i for i, field in enumerate(inputs) if operation.fields[field].dtype == "i32"]
        self._call = ops.library.call

        @functools.lru_cache(maxsize=1024, typed=True)
        def params(*values: Any) -> bytes:
            return ops.params_of(name, tuple(zip(settings, values)))

        @functools.lru_cache(maxsize=1024)
        def named(given: tuple[bool, ...]) -> bytes:
            return bytes((operation.number, *itertools.compress(places, (*given, True))))

        self._params = params
        self._named = named
        self._alone = named((True, True, True, *(False,) * (len(inputs) - 3)))

    def _name(self, inputs: tuple[Any, ...], tensors: list[Any]) -> bytes:
        """What library.call() takes of the operation and the tensors that are there."""
        if len(tensors) == 3 and all(map(operator.is_, tensors, inputs)):
            return self._alone
        return self._named(tuple([t is not None for t in inputs]))

    def _takes(self, torch: Any, inputs: tuple[Any, ...], tensors: list[Any]) -> bool:
        """Whether they are torch's own tensors, without a gradient, and no int64."""
        kind, trains = torch.Tensor, torch.is_grad_enabled()
        for tensor in tensors:
            if type(tensor) is not kind or (trains and tensor.requires_grad):
                return False
        if len(tensors) > 3:
            for i in self._integers:
                if inputs[i] is not None and inputs[i].dtype is torch.int64:
                    return False
        return True

    def write(self, values: tuple[Any, ...], inputs: tuple[Any, ...], out: Any) -> bool:
        """run(out=..); False: run() has to look closer."""
        torch = sys.modules.get("torch")
        if torch is None or type(out) is not torch.Tensor or out.is_meta or out.requires_grad:
            return False
        tensors = [t for t in inputs if t is not None]
        if inputs[0] is None or not self._takes(torch, inputs, tensors) or inputs[0].is_meta:
            return False
        try:
            stated = self._params(*values)
        except TypeError:  # no number
            return False
        self._call(self._name(inputs, tensors), stated, *tensors, out)
        return True

    def make(self, values: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
        """The result of run() of such tensors, shaped as the queries with the values' channels; None: run()
        has to look closer, which finds the sentence for what is wrong, too."""
        torch = sys.modules.get("torch")
        if torch is None or torch.compiler.is_compiling() or not _alone(torch):
            return None
        tensors = [t for t in inputs if t is not None]
        try:
            if not self._takes(torch, inputs, tensors):
                return None
            query, width = inputs[0], inputs[2].shape[-1]
            if query.shape[-1] == width and query.is_contiguous():  # a third of the time of new_empty()
                out = torch.empty_like(query)
            else:
                out = query.new_empty((*query.shape[:-1], width))
            named, stated = self._name(inputs, tensors), self._params(*values)
        except Exception:
            return None
        try:
            self._call(named, stated, *tensors, out)
        except (TypeError, ValueError, NotImplementedError):  # refused: nothing has run
            return None
        except RuntimeError:  # a device's failure, or a tensor that has no address
            if all(t.layout is torch.strided and not (t.is_nested or t.is_meta) for t in tensors):
                raise
            return None
        return out


def _alone(torch: Any) -> bool:
    """Whether nothing looks on: no autocast, mode, tracer or transform of functions."""
    c = torch._C
    return not (
        c._is_any_autocast_enabled()
        or c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or torch.autograd.forward_ad._current_level >= 0
        or c._get_tracing_state() is not None
        or c._functorch.peek_interpreter_stack() is not None
    )
