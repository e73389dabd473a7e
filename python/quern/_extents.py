# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Shapes of results where extents of the inputs, or parameters, are symbols of torch.compile or
torch.export."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ._operations import Operation


def hint(extent: Any) -> int:
    """The number that a symbol has while a graph is made."""
    if isinstance(extent, int):
        return extent
    known = extent.node.hint
    return int(extent) if known is None else int(known)


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


def _shapes(names: Sequence[str]) -> list[list[str]]:
    """The shapes that a description accepts: "... D|... K N" and "bytes|E bytes..." are two, "Hkv D|l*D D" is
    one, with an extent of either kind."""
    text = " ".join(names)
    if text[-3:] != "..." and "|..." not in text:
        return [list(names)]
    if text[-3:] == "..." and text[-4:-3].isalnum():  # after a name they stand for no extents
        text = text[:-3]
    return [shape.split() for shape in text.split("|")]


def _extended(shape: Sequence[str], dims: int) -> list[str] | None:
    """A name for each of `dims` dimensions: ".0", ".1" and so on where "..." stands. Returns None if the
    shape describes another number of dimensions."""
    if shape[:1] == ["..."]:
        rest = list(shape[1:])
        return [f".{i}" for i in range(dims - len(rest))] + rest if dims >= len(rest) else None
    return list(shape) if len(shape) == dims else None


class Extents:
    """The extents of a call by their names, and those that follow from them."""

    def __init__(
        self, operation: Operation, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
    ) -> None:
        self._operation, self._tensors, self._settings = operation, tensors, settings
        self._known: dict[str, list[Any]] = {}
        for field, t in tensors.items():
            for shape in _shapes(operation.shape_of(field, tensors)):
                for name, extent in zip(_extended(shape, t.dim()) or (), t.shape):
                    for each in name.split("|"):
                        self._known.setdefault(each, []).append(extent)

    def shape(self, field: str, expected: Sequence[int]) -> tuple[Any, ...] | None:
        """The shape of a result in the symbols of the inputs. `expected` is the same shape in numbers: what
        the library answers for the numbers that the symbols have while the graph is made. Returns None if
        no rule below gives one of its extents."""
        source = self._operation.fields[field].gradient_of
        if source in self._tensors:
            shape = tuple(self._tensors[source].shape)
            return shape if [hint(n) for n in shape] == list(expected) else None
        for names in _shapes(self._operation.shape_of(field, self._tensors)):
            extended = _extended(names, len(expected))
            if extended is not None:
                found = [self._one(name, n) for name, n in zip(extended, expected)]
                if None not in found:
                    return tuple(found)
        return None

    def _one(self, name: str, expected: int) -> Any:
        for each in name.split("|"):
            if each.isdigit() and int(each) == expected:
                return expected
            for value in (*self._derived(each, expected), *self._known.get(each, ())):
                if hint(value) == expected:
                    return value
        return None

    def __getitem__(self, name: str) -> Any:
        return self._known[name][0]

    def _derived(self, name: str, expected: int) -> Iterator[Any]:
        try:
            yield from self._follows(name, expected)
        except KeyError:
            return  # of an extent that is not there

    def _follows(self, name: str, expected: int) -> Iterator[Any]:
        """What the headers' rules allow for an extent. The caller takes the first that has the expected
        number while the graph is made."""
        stated, known = self._settings, self._known
        if name in stated and type(stated[name]) is not str:
            yield stated[name]
        if name == "B":
            yield self["B+1"] - 1
        elif name == "Hs":
            yield from (*known.get("Hkv", ()), *known.get("H", ()))
        elif name == "Nc":
            size = stated["block_size"]
            yield torch.sym_max(0, (self["N"] - size) // stated.get("stride", size) + 1)
        elif name == "Tc":
            yield self["T"] // stated.get("stride", stated["block_size"])
        elif name in ("tiles", "rows"):
            for tile in (stated["tile"],) if "tile" in stated else (1, 256):  # the preset's
                yield _ceil(self["N"], tile) if name == "tiles" else self["T"] // tile + self["B+1"] - 1
        elif name == "blocks":
            yield _ceil(self["S"], stated["select_block"])
        elif name == "k":
            yield from (stated[each] for each in ("num_selected", "top_k") if each in stated)
        elif name == "c":
            yield stated["max_compressed_groups"]
        elif name == "n":
            yield stated.get("n_blocks", 0)
            yield (self["T"] - stated.get("start_token", 0)) // self["r"]
        elif name == "S":
            yield self["T"] // self["r"] if "r" in known else self[f".{self._tensors['k'].dim() - 2}"]
        elif name == "T":
            yield self._tokens()
        elif name == "Tk":
            yield (self["T"] if "T" in known else self._tokens()) * stated["top_k"]
        else:
            yield from self._of_bytes(name, expected)

    def _tokens(self) -> Any:
        product = 1
        for i in range(self._tensors["hidden"].dim() - 1):
            product = product * self[f".{i}"]
        return product

    def _of_bytes(self, name: str, expected: int) -> Iterator[Any]:
        """Extents of codes, scales and rows of bytes, and of what they stand for."""
        known = self._known
        if name in ("8*ceil(D/16)", "ceil(D/16)"):
            yield _ceil(self["D"], 16) * (8 if name[0] == "8" else 1)
        elif name == "D":
            yield from (self._settings["columns"],) if "columns" in self._settings else ()
            yield 2 * self["8*ceil(D/16)"]
        elif name in ("K/2", "K/16") and ("K" in known or "K/32" in known):
            whole = self["K"] if "K" in known else 32 * self["K/32"]
            yield _ceil(whole, int(name[2:]))
        elif name == "K":
            yield 2 * self["K/2"]
        elif name in ("8*ceil(I/16)", "ceil(I/16)"):
            yield _ceil(self["2I"] // 2, 16) * (8 if name[0] == "8" else 1)
        elif name == "2q*ceil(I/q)":
            runs = self._settings["granularity"]
            yield 2 * runs * _ceil(self["2I"] // 2, runs)
        elif name in ("N/2", "C/2", "C/16"):
            for columns in known.get("N", ()):
                yield from (columns // int(name[2:]), columns // 2 // int(name[2:]))
        elif name == "E+1":
            yield self["E"] + 1
        elif name == "bytes" and "rows" in known:
            yield 128 * _ceil(self["rows"], 128) * 4 * _ceil(self["columns"], 4)
        elif name in ("bytes", "G", "o_lora"):  # they follow from weights, whose extents do not change
            for each in ("C", "C_I", "G*o_lora", "HD"):
                for extent in known.get(each, ()):
                    int(extent)
            yield expected
