# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A cache to decode from with native sparse attention, for every framework."""

from __future__ import annotations

import struct
from typing import Any, Sequence

from . import _arrays
from . import _operations as ops
from ._batch import lists_of
from ._nsa import settings_of

_KINDS = ("mean", "linear")


class NSACache:
    """Keys and values of `sequences` sequences of at most `capacity` tokens, and their compressed entries.

    Tokens are appended, to all sequences or to some, and the newest ones attend; each block is compressed
    once, when it is whole. Row t is that of quern.nsa over the whole sequence. block_size, stride and
    compress are as in quern.nsa. separate_slc, separate_win: the branch has its own keys and values; those
    of the window are kept for `window` tokens, and a call may then append at most `step` to a sequence. page
    64 with `pages`: the rows are in pages, which a table of each call names (see quern/cache.h); 0: they are
    contiguous.

    The first append says the rows' dtype, f32, f16 or bf16, and shapes. The CPU alone; without gradients. One
    thread at a time may use a cache.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        *,
        block_size: int = 64,
        stride: int | None = None,
        compress: str = "mean",
        separate_slc: bool = False,
        separate_win: bool = False,
        window: int = 512,
        step: int = 1,
        page: int = 0,
        pages: int = 0,
    ) -> None:
        if compress not in _KINDS:
            raise ValueError(f"compress is '{compress}': 'mean' and 'linear' are accepted")
        self.sequences, self.capacity = sequences, capacity
        self._before = (page, pages, block_size, stride or 0, _KINDS.index(compress))
        self._after = (int(separate_slc), int(separate_win), window, step)
        self._compression = {"block_size": block_size, "stride": stride, "compress": compress}
        self._handle = 0
        self._fields = b""
        self._memory: Any = None
        self._rows: Any = None

    def __reduce__(self) -> Any:
        raise TypeError("an NSACache is neither copied nor pickled: a new one is accepted")

    def _open(self, k: Any, v: Any) -> None:
        """Makes the cache for such rows."""
        dtype = ops.DTYPES.index(str(k.dtype).removeprefix("torch."))
        shape = (k.shape[-2], k.shape[-1], v.shape[-1])
        numbers = (dtype, self.sequences, *shape, self.capacity, *self._before, *self._after)
        self._fields = struct.pack("15q", *numbers)
        sizes = struct.unpack("2q", bytes(ops.library.cache_size(self._fields)))
        self._memory, self._rows = (_arrays.empty_like(k, (size,), "uint8") for size in sizes)
        self._handle = ops.library.cache_create(self._fields, self._memory, self._rows)

    def append(
        self,
        k: Any,
        v: Any,
        *,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        table: Any = None,
        k_slc: Any = None,
        v_slc: Any = None,
        k_win: Any = None,
        v_win: Any = None,
        w_k: Any = None,
        w_v: Any = None,
        pe_k: Any = None,
        pe_v: Any = None,
    ) -> None:
        """k [B, n, Hkv, D], v [B, n, Hkv, Dv]: n tokens to each of the B sequences, 0 to B - 1 where none are
        named; or k [T, Hkv, D] with counts, the tokens of each sequence. The weights are those of
        quern.nsa."""
        given = (k, v, k_slc, v_slc, k_win, v_win, w_k, w_v, pe_k, pe_v)
        _arrays.need_plain("NSACache.append", *given)
        batch = lists_of(k, 4, sequences, counts)
        if not self._handle:
            self._open(k, v)
        packed = [t if t is None else t.reshape(-1, *t.shape[-2:]) for t in given[:6]]
        ops.library.cache_append(self._handle, *batch, table, *packed, *given[6:])

    def attend(
        self,
        q: Any,
        *,
        gate: Any = None,
        gates: Any = None,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        table: Any = None,
        return_lists: bool = False,
        **settings: Any,
    ) -> Any:
        """q [B, n, H, D], the newest n tokens of each sequence, which are appended already → o [B, n, H,
        Dv]; or [T, H, D] with counts. With return_lists → o, block_idx int32 [Hs, T, num_selected].

        gate, gates and the settings (num_selected, window, scope, metric, forced_first, ...) are those of
        quern.nsa.
        """
        if not self._handle:
            raise ValueError("the cache is empty: attend is accepted after append")
        _arrays.need_plain("NSACache.attend", q, gate, gates)
        chosen = settings_of(gate=gate, gates=gates, **{**self._compression, **settings})
        params = ops.params_from("nsa", ops.lines(chosen))
        batch = lists_of(q, 4, sequences, counts)
        rows = q.reshape(-1, *q.shape[-2:])
        dtype = str(q.dtype).removeprefix("torch.")
        dim_v = struct.unpack("15q", self._fields)[4]
        o = _arrays.empty_like(q, (*rows.shape[:2], dim_v), dtype)
        idx = count = None
        if return_lists:
            named = dict(chosen)
            heads = rows.shape[1] if named.get("scope") == "head" else struct.unpack("15q", self._fields)[2]
            idx = _arrays.empty_like(q, (heads, rows.shape[0], named["num_selected"]), "int32")
            count = _arrays.empty_like(q, (heads, rows.shape[0]), "int32")
        flat = None if gates is None else gates.reshape(-1, *gates.shape[-2:])
        ops.library.cache_decode(
            self._handle, 1, params, *batch, table, rows, o, None, gate, flat, idx, count
        )
        o = o.reshape(*q.shape[:-1], dim_v)
        return (o, idx) if return_lists else o

    def rollback(self, n: int, sequence: int | None = None) -> None:
        """Takes back the last n tokens, at most 8, of a sequence or of all."""
        for i in range(self.sequences) if sequence is None else (sequence,):
            self._need(ops.library.cache_rollback, i, n)

    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, or all."""
        for i in range(self.sequences) if sequence is None else (sequence,):
            self._need(ops.library.cache_reset, i)

    def fork(self, source: int, to: int, *, table: Any = None) -> None:
        """Gives sequence `to`, whatever it held, the tokens of sequence `source`."""
        self._need(ops.library.cache_fork, source, to, table)

    def save(self, sequence: int, *, table: Any = None) -> bytes:
        """A sequence as bytes, with a version and a checksum."""
        return bytes(self._need(ops.library.cache_save, sequence, table))

    def restore(self, sequence: int, saved: bytes, *, table: Any = None) -> None:
        """Gives a sequence, whatever it held, the tokens of save(), of a cache like this one."""
        self._need(ops.library.cache_restore, sequence, table, saved)

    def _need(self, function: Any, *arguments: Any) -> Any:
        if not self._handle:
            raise ValueError("the cache is empty: append comes first")
        return function(self._handle, *arguments)

    def length(self, sequence: int = 0) -> int:
        """Tokens of a sequence."""
        return self._length(sequence)[0]

    def entries(self, sequence: int = 0) -> int:
        """Compressed entries of a sequence."""
        return self._length(sequence)[1]

    def _length(self, sequence: int) -> tuple[int, int]:
        if not self._handle:
            return 0, 0
        tokens, entries = struct.unpack("2q", bytes(ops.library.cache_length(self._handle, sequence)))
        return tokens, entries

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that the sequences hold."""
        return int(ops.library.cache_held(self._handle)) if self._handle else 0

    def table_columns(self, tokens: int | None = None) -> dict[str, int]:
        """Where the runs of a page table start, and its columns; with tokens, the pages that so many need."""
        if not self._handle:
            raise ValueError("the cache is empty: append comes first")
        found = bytes(ops.library.cache_columns(self._fields, -1 if tokens is None else tokens))
        return dict(zip(("tokens", "entries", "slc", "win", "columns"), struct.unpack("5q", found)))
