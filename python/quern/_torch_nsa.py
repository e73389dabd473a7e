# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""NSA as PyTorch operators: quern::nsa and its backward, which share lists of optional tensors by name.

`settings` are the C library's parameters as lines of name=value, all of them, so that an operator's arguments
say what it computes. Selection carries no gradient; of an operator's results only the first, o, has one.
"""

from __future__ import annotations

import functools
from typing import Any, List, Optional

import torch
from torch import Tensor

from . import _arrays
from . import _operations as ops

# The operator's tensors, in order. Those up to `gates` are differentiable.
INPUTS = (
    *("q", "k", "v", "k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp"),
    *("w_k", "w_v", "pe_k", "pe_v", "w_gate", "gates"),
    *("block_idx", "group_idx", "cu_seqlens", "cu_seqlens_cmp"),
)
_DIFFERENTIABLE = INPUTS[:15]
_F32 = ("w_k", "w_v", "pe_k", "pe_v", "w_gate", "gates")  # whose gradients are f32
NOTHING, STATISTICS, BRANCHES = 0, 1, 2  # what a forward keeps for the backward


@functools.lru_cache(maxsize=256)
def parse(settings: str) -> dict[str, str]:
    """The lines of settings as a dict."""
    return dict(line.split("=", 1) for line in settings.splitlines())


@torch.compiler.assume_constant_result
def settings_of(preset: str | None, fields: tuple[tuple[str, Any], ...]) -> str:
    """All parameters, from a preset and the fields that differ from it."""
    return ops.settings("nsa", ops.params("nsa", preset, **dict(fields)))


def _branches(settings: str) -> tuple[str, ...]:
    named = parse(settings)["branches"]
    return ("cmp", "slc", "win") if named == "all" else tuple(named.split(","))


def result_names(settings: str, present: frozenset[str], save: int) -> tuple[str, ...]:
    """What the forward operator returns, given which inputs are there."""
    if save == NOTHING:
        return ("o",)
    on = _branches(settings)
    names = ["o", *(f"lse_{b}" for b in on), *(f"o_{b}" for b in on if save == BRANCHES), "gates"]
    if "cmp" in on:
        names += ["k_cmp", "v_cmp", "cu_seqlens_cmp"]
    if "slc" in on:
        names += ["block_idx"]
    if "cmp" in on and parse(settings)["max_compressed_groups"] != "0":
        names += ["group_idx"]
    absent = set() if "cu_seqlens" in present else {"cu_seqlens_cmp"}
    return tuple(name for name in names if name not in present and name not in absent)


def _dense(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


@torch.library.custom_op("quern::nsa", mutates_args=())
def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_slc: Optional[Tensor],
    v_slc: Optional[Tensor],
    k_win: Optional[Tensor],
    v_win: Optional[Tensor],
    k_cmp: Optional[Tensor],
    v_cmp: Optional[Tensor],
    w_k: Optional[Tensor],
    w_v: Optional[Tensor],
    pe_k: Optional[Tensor],
    pe_v: Optional[Tensor],
    w_gate: Optional[Tensor],
    gates: Optional[Tensor],
    block_idx: Optional[Tensor],
    group_idx: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    cu_seqlens_cmp: Optional[Tensor],
    settings: str,
    save: int,
) -> List[Tensor]:
    """→ the tensors of result_names()."""
    given = (q, k, v, k_slc, v_slc, k_win, v_win, k_cmp, v_cmp, w_k, w_v, pe_k, pe_v, w_gate, gates)
    lists = (block_idx, group_idx, cu_seqlens, cu_seqlens_cmp)
    tensors = {name: _dense(t) for name, t in zip(INPUTS, (*given, *lists)) if t is not None}
    names = result_names(settings, frozenset(tensors), save)
    return list(ops.call("nsa", ops.params_from("nsa", settings), tensors, names))


@nsa.register_fake
def _(*arguments: Any) -> list[Tensor]:
    tensors = {name: t for name, t in zip(INPUTS, arguments) if t is not None}
    return _fake_results(tensors, *arguments[len(INPUTS) :])


def _fake_results(tensors: dict[str, Tensor], settings: str, save: int) -> list[Tensor]:
    fields = parse(settings)
    q, k, v, cu = tensors["q"], tensors["k"], tensors["v"], tensors.get("cu_seqlens")
    n, heads, kv_heads = q.shape[-3], q.shape[-2], k.shape[-2]
    block, tile = int(fields["block_size"]), int(fields["tile"])
    stride = int(fields["stride"]) or block
    lists = heads if fields["scope"] == "head" else kv_heads
    if cu is None:
        entries = 0 if n < block else (n - block) // stride + 1
        lead, rows, tiles = (q.shape[0], entries), (q.shape[0], heads, n), (q.shape[0], lists, -(-n // tile))
    else:
        lead, rows, tiles = (n // stride,), (heads, n), (lists, n // tile + cu.shape[0] - 1)

    def fake(name: str) -> Tensor:
        if name in ("o", "o_cmp", "o_slc", "o_win"):
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        if name.startswith("lse"):
            return q.new_empty(rows, dtype=torch.float32)
        if name == "gates":
            return q.new_empty((*q.shape[:-1], 3), dtype=torch.float32)
        if name in ("k_cmp", "v_cmp"):
            return q.new_empty((*lead, kv_heads, tensors[name[0]].shape[-1]))
        if name == "cu_seqlens_cmp":
            return cu.new_empty(cu.shape)
        width = fields["num_selected"] if name == "block_idx" else fields["max_compressed_groups"]
        return q.new_empty((*tiles, int(width)), dtype=torch.int32)

    return [fake(name) for name in result_names(settings, frozenset(tensors), save)]


@torch.library.custom_op("quern::nsa_backward", mutates_args=())
def nsa_backward(d_o: Tensor, tensors: List[Tensor], names: str, results: str, settings: str) -> List[Tensor]:
    """The gradients of the inputs in `results`, from the tensors of `names`, both lists of words."""
    given = {name: _dense(t) for name, t in zip(names.split(), tensors)}
    given["d_o"] = _dense(d_o)
    wanted = [f"d_{name}" for name in results.split()]
    return list(ops.call("nsa", ops.params_from("nsa", settings), given, wanted, backward=True))


@nsa_backward.register_fake
def _(d_o: Tensor, tensors: List[Tensor], names: str, results: str, settings: str) -> list[Tensor]:
    given = dict(zip(names.split(), tensors))

    def fake(name: str) -> Tensor:
        dtype = torch.float32 if name in _F32 else given[name].dtype
        return given[name].new_empty(given[name].shape, dtype=dtype)

    return [fake(name) for name in results.split()]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    settings, save = inputs[len(INPUTS) :]
    tensors = {name: t for name, t in zip(INPUTS, inputs) if t is not None}
    needed = {name for name, need in zip(_DIFFERENTIABLE, ctx.needs_input_grad) if need} | {"q", "k", "v"}
    ctx.results = " ".join(name for name in _DIFFERENTIABLE if name in needed)
    made = result_names(settings, frozenset(tensors), save)
    kept = {**tensors, **{name: t for name, t in zip(made, output) if name != "o"}}
    ctx.names, ctx.settings = " ".join(kept), settings
    ctx.dtypes = {name: t.dtype for name, t in tensors.items()}
    ctx.save_for_backward(*kept.values())


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    lines = {**parse(ctx.settings), "selection": "given"}
    if lines["max_compressed_groups"] != "0":
        lines["groups"] = "given"
    settings = "".join(f"{name}={value}\n" for name, value in lines.items())
    words = ctx.results.split()
    made = torch.ops.quern.nsa_backward(grads[0], list(ctx.saved_tensors), ctx.names, ctx.results, settings)
    found = {name: grad.to(ctx.dtypes[name]) for name, grad in zip(words, made)}
    return (*(found.get(name) for name in INPUTS), None, None)


nsa.register_autograd(_backward, setup_context=_setup)


def run(settings: str, tensors: dict[str, Tensor | None], keep_branches: bool = True) -> list[Tensor]:
    """The operator; it keeps what a backward needs only where there will be one."""
    _arrays.need_torch(**tensors)
    differentiable = (tensors.get(name) for name in _DIFFERENTIABLE)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable)
    save = (BRANCHES if keep_branches else STATISTICS) if trains else NOTHING
    return torch.ops.quern.nsa(*(tensors.get(name) for name in INPUTS), settings, save)
