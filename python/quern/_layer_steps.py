# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What a layer of DeepSeek-V4 keeps of its sequences on a GPU: rows in torch's tensors there, the books of a
ledger here."""

from __future__ import annotations

import struct
import sys
from typing import Any, Mapping

from . import _arrays
from . import _operations as ops
from ._batch import named, numbers_of

_BLOCK = struct.Struct("18q")
_STEP = ("slots", "positions", "cu", "raw_table", "entries_table", "copies")
_POOLS = ("raw", "entries", "keys", "states", "merged", "indexer_states", "indexer_merged")
_ROW584 = 584


def _bytes_of(dim: int, key_format: str) -> int:
    """Of a stored row in a format of bytes."""
    return {"row584": _ROW584, "fp4": dim // 2 + dim // 32}.get(key_format, dim + 4)


class Steps:
    """Of sequences of one kind of layer. numbers: the fields of a cache's params; formats: those of raw rows
    and entries, and of keys, by name; settings: the layer's parameters."""

    def __init__(
        self,
        numbers: Mapping[str, int],
        formats: tuple[str, str],
        settings: tuple[tuple[str, Any], ...],
        device: Any,
    ) -> None:
        self._numbers, self._formats, self.device = numbers, formats, device
        text = named(numbers)
        bytes_, *pages = struct.unpack("6q", bytes(ops.library.layer_ledger_size(text)))
        self._books = _arrays.room(bytes_)
        self._ledger = ops.library.layer_ledger_create(text, self._books)
        self._pools = self._make(pages)
        of_rows = (("format", formats[0]), ("key_format", formats[1]))
        self._params = ops.params_of("v4-layer-step", (*settings, *of_rows))
        self._packing = (("ratio", numbers["ratio"]), *of_rows)

    def _make(self, pages: list[int]) -> dict[str, Any]:
        torch = sys.modules["torch"]
        raw_pages, ring, entry_pages, page, slots = pages
        dim, key_dim, m = (self._numbers[name] for name in ("dim", "index_dim", "ring"))
        rows = getattr(torch, ops.DTYPES[self._numbers["dtype"]])

        def pool(pages: int, page: int, dim: int, name: str) -> Any:
            if name == "rows":
                return torch.empty((pages, page, dim), dtype=rows, device=self.device)
            shape = (pages, page * _bytes_of(dim, name))
            return torch.empty(shape, dtype=torch.uint8, device=self.device)

        raw = pool(raw_pages, ring, dim, self._formats[0])
        made = {"raw": raw if raw.ndim == 3 else raw.view(raw_pages, ring, _ROW584)}
        if not entry_pages:
            return made
        made["entries"] = pool(entry_pages, page, dim, self._formats[0])
        if key_dim:
            made["keys"] = pool(entry_pages, page, key_dim, self._formats[1])
        series = 2 if key_dim else 1
        for prefix, width in (("", dim), ("indexer_", key_dim)):
            if width:
                floats = series * width * (3 + 2 * m)
                made[f"{prefix}states"] = torch.zeros((slots, floats), device=self.device)
                made[f"{prefix}merged"] = torch.zeros(slots, dtype=torch.int32, device=self.device)
        return made

    def _fill(self, function: Any, lists: tuple[bytes, bytes]) -> dict[str, Any]:
        """A step's tensors on the device."""
        torch = sys.modules["torch"]
        size = ops.library.layer_ledger_block(self._ledger, len(lists[0]) // 4)
        block = torch.empty(size, dtype=torch.uint8)
        places = _BLOCK.unpack(bytes(function(self._ledger, *lists, block)))
        there = block.to(self.device).view(torch.int32)
        made = {}
        for i, name in enumerate(_STEP):
            at, rows, columns = places[3 * i : 3 * i + 3]
            if rows and (name != "entries_table" or "entries" in self._pools):
                found = there[at // 4 : at // 4 + rows * columns]
                made[name] = found if i < 3 else found.view(rows, columns)
        return made

    def append(self, tensors: Mapping[str, Any], lists: tuple[bytes, bytes]) -> None:
        """A step of the layer's tensors, x and out among them."""
        tokens, rows = sum(struct.unpack(f"{len(lists[1]) // 8}q", lists[1])), tensors["x"].shape[0]
        if rows < tokens:
            raise ValueError(f"x has {rows} tokens: the {tokens} of the counts are accepted")
        step = self._fill(ops.library.layer_ledger_begin, lists)
        try:
            ops.call("v4-layer-step", self._params, {**tensors, **step, **self._pools}, ())
        except BaseException:
            ops.library.layer_ledger_abort(self._ledger)
            raise
        ops.library.layer_ledger_commit(self._ledger)

    def length(self, sequence: int) -> bytes:
        return bytes(ops.library.layer_ledger_length(self._ledger, sequence))

    def rollback(self, sequence: int, n: int) -> None:
        ops.library.layer_ledger_rollback(self._ledger, sequence, n)

    def reset(self, sequence: int) -> None:
        ops.library.layer_ledger_reset(self._ledger, sequence)

    def fork(self, source: int, to: int) -> None:
        ops.library.layer_ledger_fork(self._ledger, source, to)

    def pages(self, tokens: int) -> bytes:
        ratio, page = self._numbers["ratio"], self._numbers["page"] or 64
        needed = -(-(tokens // ratio) // page) if ratio else 0
        return struct.pack("2q", needed, ops.library.layer_ledger_free(self._ledger) if ratio else 0)

    # ---- copies of a sequence ----

    def _tables(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors with which a sequence is packed."""
        made = {**self._pools, "raw_table": step["raw_table"].view(-1)}
        if "entries" in self._pools:
            made |= {"entries_table": step["entries_table"].view(-1), "slot": step["slots"]}
        return made

    def _packed(self, tokens: int) -> bytes:
        return ops.params_of("v4-layer-pack", (("tokens", tokens), *self._packing))

    def taken(self, sequence: int) -> tuple[int, Any]:
        """A sequence's tokens, and what is kept of them, on the device."""
        tokens, _ = struct.unpack("2q", self.length(sequence))
        if not tokens:
            return 0, None
        lists = numbers_of("sequences", [sequence], "i"), numbers_of("counts", [0], "q")
        tensors = self._tables(self._fill(ops.library.layer_ledger_newest, lists))
        return tokens, ops.call("v4-layer-pack", self._packed(tokens), tensors, ("packed",))[0]

    def give(self, sequence: int, taken: tuple[int, Any]) -> None:
        """Gives a sequence, whatever it held, the tokens of taken(), of any such cache."""
        tokens, packed = taken
        self.reset(sequence)
        if not tokens:
            return
        lists = numbers_of("sequences", [sequence], "i"), numbers_of("counts", [tokens], "q")
        tensors = self._tables(self._fill(ops.library.layer_ledger_begin, lists))
        try:
            packed = packed.to(self.device)
            ops.call("v4-layer-unpack", self._packed(tokens), {**tensors, "packed": packed}, ())
        except BaseException:
            ops.library.layer_ledger_abort(self._ledger)
            raise
        ops.library.layer_ledger_commit(self._ledger)

    def save(self, sequence: int) -> bytes:
        tokens, packed = self.taken(sequence)
        return struct.pack("q", tokens) + (packed.cpu().numpy().tobytes() if tokens else b"")

    def restore(self, sequence: int, saved: bytes) -> None:
        torch = sys.modules["torch"]
        (tokens,) = struct.unpack_from("q", saved)
        packed = torch.frombuffer(bytearray(saved[8:]) or bytearray(1), dtype=torch.uint8)
        self.give(sequence, (tokens, packed[: len(saved) - 8]))
