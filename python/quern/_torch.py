# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The operations as PyTorch operators, torch.ops.quern.<name>, made from what quern/op.h says of them.

    quern::<name>(Tensor? <input>, ..., str settings, str results, SymInt[] integers=[], Tensor? floats=None)
        -> Tensor[]
    quern::<name>_out(Tensor? <input>, ..., str settings, Tensor(a!)? <result>, ...) -> ()
    quern::<name>(Tensor? <input>, ..., Tensor(a!)? <updated>, str settings, ...) -> ()
    quern::narrowed(str name, Tensor integers) -> Tensor
    quern::backward(str name, Tensor[] tensors, str fields, str results, str settings, SymInt[] integers=[],
        Tensor? floats=None) -> Tensor[]

The last form is of operations that write tensors in place and have no other results. `settings` are
parameters as lines of name=value, and extents that no input says as lines of ?name=extent.
Where a graph is to serve many values, "#" stands for the next of the integers, "~" for the next of the
floats, f64 on the CPU. `results` are the names of the results wanted; after a "+", which adds what a backward
needs, those that it may keep. A result has a gradient where the operation's backward pass takes one; all
others, and lists of indices, have none.
"""

from __future__ import annotations

import functools
from keyword import iskeyword
from typing import Any, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _arrays
from . import _operations as ops
from ._extents import Extents, hint

_LIBRARY = torch.library.Library("quern", "FRAGMENT")
_PT2 = (torch.Tag.pt2_compliant_tag,)
_NUMBERS = {getattr(torch, name): i for i, name in enumerate(ops.DTYPES) if hasattr(torch, name)}
_CAST = ("act", "stored")  # classes of tensors that autocast casts
_MOVES_VALUES = ("nvfp4-interleave", "nvfp4-dequantize")  # without a gradient, yet to floats
# What decides a choice alone has no gradient.
_INDEXER = ("bias", "kv", "gate", "norm", "q_b", "heads")
_CHOOSES = {
    "moe": ("bias",),
    "moe-route": ("bias",),
    "v4-layer": tuple(f"indexer_{name}" for name in _INDEXER),
}
_OPEN = "SymInt[] integers=[], Tensor? floats=None"
_SIZED_BY_DATA = ("nvfp4-swizzle",)  # operations whose results' extents depend on what a tensor holds


def dense(tensor: Tensor) -> Tensor:
    """With a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _dense(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dim() == 0 else dense(tensor)


@functools.lru_cache(maxsize=1024)
def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# ---- shapes without data ----


def _known(settings: str, integers: Sequence[int] = (), floats: Tensor | None = None) -> str:
    """The settings of a call."""
    return ops.filled(settings, integers, () if floats is None else floats.tolist())


def _example(settings: str, integers: Sequence[Any] = (), floats: Tensor | None = None) -> str:
    """Settings of which graphs are made: neither roles nor extents follow from a float."""
    return ops.filled(settings, [hint(n) for n in integers], [1.0] * (0 if floats is None else len(floats)))


def _fake(
    name: str,
    backward: bool,
    tensors: Mapping[str, Tensor],
    settings: str,
    results: str,
    integers: Sequence[Any] = (),
    floats: Tensor | None = None,
) -> list[Tensor]:
    """Empty results. Their extents follow from the symbols of the inputs' extents and of the integers; where
    it is not known how, those are fixed."""
    operation = ops.OPERATIONS[name]
    _arrays.are_meta(tensors)
    views = {
        field: (_NUMBERS[t.dtype], int(t.device.type == "cuda"), tuple(hint(n) for n in t.shape))
        for field, t in tensors.items()
    }
    stated = _example(settings, integers, floats)
    expected = ops.expect_of(name, backward, stated, views)
    symbols = [n for t in tensors.values() for n in t.shape if not isinstance(n, int)]
    symbols += [n for n in integers if not isinstance(n, int)]
    extents = Extents(operation, tensors, ops.values(settings, integers)) if symbols else None
    made = []
    for field in _all_results(name, stated, tuple(tensors), results):
        dtype, shape = expected[field]
        found = shape if extents is None else extents.shape(field, shape)
        if found is None:
            for n in symbols:
                int(n)
        like = next(iter(tensors.values()))
        made.append(like.new_empty(found or shape, dtype=getattr(torch, ops.DTYPES[dtype])))
    return made


@functools.lru_cache(maxsize=1024)
def _all_results(name: str, settings: str, present: tuple[str, ...], results: str) -> tuple[str, ...]:
    """The results wanted, then what the backward needs of the forward, then what it may keep."""
    wanted, plus, keep = results.partition("+")
    if not plus:
        return _words(wanted)
    found = ops.roles(name, True, settings, (*present, *OPERATORS[name].triggers.values()))
    fields = ops.OPERATIONS[name].fields
    needed = (
        field
        for field, role in found.items()
        if fields[field].results[0]
        and field not in present
        and field not in _words(wanted)
        and (role == ops.NEEDED or (role == ops.OPTIONAL and field in _words(keep)))
    )
    return (*_words(wanted), *needed)


# ---- the operators ----


class Operator:
    """One operation as operators."""

    def __init__(self, name: str) -> None:
        fields = ops.OPERATIONS[name].fields
        self.name, self.word = name, name.replace("-", "_")
        self.inputs = tuple(f for f, t in fields.items() if t.input)
        self.gradients = {t.gradient_of: f for f, t in fields.items() if t.gradient_of and t.results[1]}
        self.triggers = {t.gradient_of: f for f, t in fields.items() if t.gradient_of and t.trigger}
        self.updated = tuple(f for f, t in fields.items() if t.updated)
        self.results = tuple(f for f, t in fields.items() if t.results[0] and not t.updated)
        # What is of any floats goes by its first input; what only moves bytes is not cast.
        activations = tuple(f for f in self.inputs if fields[f].dtype in _CAST and f not in self.updated)
        self.cast = self.inputs[:1] if fields[self.inputs[0]].dtype == "float" else activations
        self._define()
        self.call = getattr(torch.ops.quern, self.word).default
        if self.results:
            self.write = getattr(torch.ops.quern, f"{self.word}_out").default

    def _define(self) -> None:
        inputs = "".join(
            f"Tensor{f'(u{i}!)' * (field in self.updated)}? {field}{'_' * iskeyword(field)}, "
            for i, field in enumerate(self.inputs)
        )
        outs = "".join(f", Tensor(a{i}!)? out_{field}" for i, field in enumerate(self.results))
        made = "Tensor[]" if self.results else "()"
        _LIBRARY.define(f"{self.word}({inputs}str settings, str results, {_OPEN}) -> {made}", tags=_PT2)
        if self.results:
            _LIBRARY.define(f"{self.word}_out({inputs}str settings{outs}) -> ()", tags=_PT2)
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(self.word, self._forward if self.results else self._update, device)
            if self.results:
                _LIBRARY.impl(f"{self.word}_out", self._write, device)
        qualified = f"quern::{self.word}"
        nothing = lambda *arguments: None  # noqa: E731
        torch.library.register_fake(qualified, self._shapes if self.results else nothing, lib=_LIBRARY)
        if self.results:
            torch.library.register_fake(f"{qualified}_out", nothing, lib=_LIBRARY)
        if self.triggers:
            torch.library.register_autograd(
                qualified, self._backward, setup_context=self._setup, lib=_LIBRARY
            )

    def _forward(self, *arguments: Any) -> list[Tensor]:
        tensors, (settings, results, *more) = self._split(arguments)
        given = {field: _dense(t) for field, t in tensors.items()}
        stated = _known(settings, *more)
        params, asked = ops.params_from(self.name, stated), ops.asked_of(stated)
        names = _all_results(self.name, stated, tuple(given), results)
        if self.name in _SIZED_BY_DATA:  # a graph knows the most that they can take
            given.update(zip(names, _fake(self.name, False, given, stated, results)))
        return list(ops.call(self.name, params, given, names, asked=asked))

    def _update(self, *arguments: Any) -> None:
        tensors, (settings, _, *more) = self._split(arguments)
        given = {field: t if field in self.updated else _dense(t) for field, t in tensors.items()}
        ops.call(self.name, ops.params_from(self.name, _known(settings, *more)), given, ())

    def _split(self, arguments: tuple[Any, ...]) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        count = len(self.inputs)
        tensors = {field: t for field, t in zip(self.inputs, arguments) if t is not None}
        return tensors, arguments[count:]

    def _write(self, *arguments: Any) -> None:
        count = len(self.inputs)
        given = {field: _dense(t) for field, t in zip(self.inputs, arguments) if t is not None}
        outs = zip(self.results, arguments[count + 1 :])
        given.update((field, t) for field, t in outs if t is not None)
        ops.call(self.name, ops.params_from(self.name, arguments[count]), given, ())

    def _shapes(self, *arguments: Any) -> list[Tensor]:
        given, rest = self._split(arguments)
        return _fake(self.name, False, given, *rest)

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        kept, (settings, results, integers, floats) = self._split(inputs)
        stated = _example(settings, integers, floats)
        made = dict(zip(_all_results(self.name, stated, tuple(kept), results), output))
        ctx.mark_non_differentiable(*[t for field, t in made.items() if field not in self.triggers])
        wanted = tuple(f for f, need in zip(self.inputs, ctx.needs_input_grad) if need)
        ctx.results, needed = gradients_of(self.name, stated, tuple(kept), tuple(made), wanted)
        ctx.dtypes = {field: t.dtype for field, t in kept.items()}
        kept.update((field, t) for field, t in made.items() if field in needed)
        ctx.fields = " ".join((*kept, *(self.triggers[f] for f in made if f in self.triggers)))
        ctx.differentiable = tuple(i for i, field in enumerate(made) if field in self.triggers)
        ctx.settings, ctx.integers = settings, integers
        ctx.save_for_backward(*kept.values(), floats)

    def _backward(self, ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        *kept, floats = ctx.saved_tensors
        tensors = [*kept, *(grads[i] for i in ctx.differentiable)]
        made = torch.ops.quern.backward(
            self.name, tensors, ctx.fields, ctx.results, ctx.settings, ctx.integers, floats
        )
        found = dict(zip(_words(ctx.results), made))
        given = (
            found[self.gradients[field]].to(ctx.dtypes[field]) if self.gradients.get(field) in found else None
            for field in self.inputs
        )
        rest = (None, None, None if ctx.integers else [], None)  # as many as the call had arguments
        return (*given, *rest)[: len(ctx.needs_input_grad)]


@functools.lru_cache(maxsize=1024)
def gradients_of(
    name: str, settings: str, inputs: tuple[str, ...], results: tuple[str, ...], wanted: tuple[str, ...]
) -> tuple[str, frozenset[str]]:
    """The gradients that a backward makes for the wanted inputs, and the tensors it reads."""
    operator = OPERATORS[name]
    triggers = tuple(operator.triggers[field] for field in results if field in operator.triggers)
    found = ops.roles(name, True, settings, (*inputs, *results, *triggers))
    made = (
        gradient
        for source, gradient in operator.gradients.items()
        if found[gradient] == ops.RESULT or (found[gradient] == ops.OPTIONAL_RESULT and source in wanted)
    )
    return " ".join(made), frozenset(f for f, role in found.items() if role in (ops.NEEDED, ops.OPTIONAL))


_LIBRARY.define(
    f"backward(str name, Tensor[] tensors, str fields, str results, str settings, {_OPEN}) -> Tensor[]",
    tags=_PT2,
)


def _backward(
    name: str, tensors: list[Tensor], fields: str, results: str, settings: str, *more: Any
) -> list[Tensor]:
    given = {field: _dense(t) for field, t in zip(_words(fields), tensors)}
    params = ops.params_from(name, _known(settings, *more))
    return list(ops.call(name, params, given, _words(results), backward=True))


def _backward_shapes(
    name: str, tensors: list[Tensor], fields: str, results: str, settings: str, *more: Any
) -> list[Tensor]:
    return _fake(name, True, dict(zip(_words(fields), tensors)), settings, results, *more)


def _no_second(ctx: Any, grads: list[Tensor]) -> tuple[None, ...]:
    raise NotImplementedError("quern's backward passes have no backward pass of their own")


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("backward", _backward, _device)
torch.library.register_fake("quern::backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_autograd("quern::backward", _no_second, lib=_LIBRARY)


def _narrowed(name: str, integers: Tensor) -> Tensor:
    _arrays.need_int32(name, integers)
    return integers.to(torch.int32)


_LIBRARY.define("narrowed(str name, Tensor integers) -> Tensor", tags=_PT2)
_LIBRARY.impl("narrowed", _narrowed, "CPU")
_LIBRARY.impl("narrowed", lambda name, integers: integers.clamp(*_arrays.INT32).to(torch.int32), "CUDA")
torch.library.register_fake(
    "quern::narrowed",
    lambda name, integers: integers.new_empty(integers.shape, dtype=torch.int32),
    lib=_LIBRARY,
)
narrowed = torch.ops.quern.narrowed.default

# Operations with an input and a result; the rest copy bytes and need no operator.
OPERATORS = {
    name: Operator(name)
    for name, operation in ops.OPERATIONS.items()
    if any(t.input for t in operation.fields.values())
}


# ---- calls ----


def _numbers(
    settings: tuple[tuple[str, Any], ...], asked: tuple[tuple[str, Any], ...]
) -> tuple[str, list[Any], Tensor | None]:
    """Settings as the operators take them while a graph is made: numbers that it leaves open apart."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    text, integers, floats = "", [], []
    for name, value in (*settings, *((f"{ops.ASKED}{name}", extent) for name, extent in asked)):
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not has_static_value(value):
            real = isinstance(value, (float, torch.SymFloat))
            (floats if real else integers).append(value)
            text += f"{name}={'~' if real else '#'}\n"
        else:
            symbol = isinstance(value, (torch.SymInt, torch.SymFloat))  # of one value
            text += ops.line(name, value.node.pytype(value) if symbol else value)
    if not floats:
        return text, integers, None
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return text, integers, torch.stack([one * value for value in floats])  # a product stays symbolic


def _makes_graph(settings: tuple[tuple[str, Any], ...], asked: tuple[tuple[str, Any], ...]) -> bool:
    """Whether numbers may be symbols."""
    if torch.compiler.is_compiling():
        return True
    return any(isinstance(value, (torch.SymInt, torch.SymFloat)) for _, value in (*settings, *asked))


def _trains(operator: Operator, tensors: Mapping[str, Tensor | None]) -> bool:
    if not torch.is_grad_enabled():
        return False
    found = (tensors.get(field) for field in operator.gradients)
    return any(t is not None and t.requires_grad for t in found)


def autocast(operator: Operator, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Activations in autocast's dtype where it is on. Weights may be f32 and stay as they are."""
    found = dict(tensors)
    kind = next(t.device.type for t in tensors.values() if t is not None)
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        for field in operator.cast:
            t = found.get(field)
            if t is not None and t.is_floating_point() and t.element_size() > 1:
                found[field] = t.to(dtype)
    return found


def _need_gradients(operator: Operator, tensors: Mapping[str, Tensor | None]) -> None:
    """ValueError where a tensor asks for a gradient that it would silently not get."""
    if not torch.is_grad_enabled() or not (operator.triggers or operator.name in _MOVES_VALUES):
        return
    for field, t in tensors.items():
        if t is None or not t.requires_grad or field in operator.gradients:
            continue
        if field not in _CHOOSES.get(operator.name, ()):
            raise ValueError(
                f"{field} requires a gradient, which {operator.name} does not compute: {field}.detach(), or "
                "torch.no_grad(), is accepted"
            )


def _need_no_tangents(tensors: Mapping[str, Tensor | None]) -> None:
    """NotImplementedError in forward-mode differentiation, which would take tangents for zeros."""
    if forward_ad._current_level < 0:
        return
    for field, t in tensors.items():
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(f"{field} has a tangent: reverse mode, backward(), is accepted")


def run(
    name: str,
    settings: tuple[tuple[str, Any], ...],
    tensors: Mapping[str, Tensor | None],
    results: tuple[str, ...],
    keep: tuple[str, ...] = (),
    asked: tuple[tuple[str, int], ...] = (),
) -> tuple[Tensor, ...]:
    """The operator; it keeps what a backward needs only where there will be one."""
    operator = OPERATORS[name]
    _arrays.need_torch(**tensors)
    if not torch.compiler.is_compiling():
        _need_no_tangents(tensors)
    given = autocast(operator, tensors)
    _need_gradients(operator, given)
    if not operator.triggers:
        given = {field: t if t is None else t.detach() for field, t in given.items()}
    wanted = " ".join(results)
    if _trains(operator, given):
        wanted += " + " + " ".join(keep)
    inputs = [given.get(field) for field in operator.inputs]
    if _makes_graph(settings, asked):
        text, integers, floats = _numbers(settings, asked)
        made = operator.call(*inputs, text, wanted, integers, floats)
    else:
        made = operator.call(*inputs, ops.lines(settings) + ops.asked_lines(asked), wanted)
    return tuple(made[: len(results)]) if operator.results else ()


class _Scaled(torch.autograd.Function):
    """A loss whose gradients are known: a backward multiplies them by the loss's own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, inputs: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[inputs:])
        ctx.dtypes = [t.dtype for t in tensors[:inputs]]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors
        scaled = [(t * grad).to(dtype) for t, dtype in zip(known, ctx.dtypes)]
        return None, None, *scaled, *(None,) * len(known)


def with_gradients(loss: Tensor, inputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> Tensor:
    """`loss` as a function of the inputs that has these gradients."""
    return _Scaled.apply(loss, len(inputs), *inputs, *gradients)
