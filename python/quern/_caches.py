# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Caches to decode from, with native sparse attention and with dense attention, for every framework."""

from __future__ import annotations

import struct
from typing import Any, Sequence

from . import _arrays
from . import _operations as ops
from ._batch import OF_ONE, closed_again, integer, lists_of, named, packed
from ._faces import cast
from ._nsa import settings_of

_KINDS = ("mean", "linear")


# Numbers of quern_cache_params, in the order in which save() writes them.
_SHAPE = ("dtype", "sequences", "kv_heads", "dim", "dim_v", "capacity")
_NAMES = (*_SHAPE, "page", "pages", "block_size", "stride", "compress")
_NAMES += ("separate_slc", "separate_win", "window", "step", "index_heads", "index_dim")
_SAVED = struct.Struct(f"{len(_NAMES)}q")


def _tensor(name: str, tensor: Any) -> Any:
    if tensor is None:
        raise TypeError(f"{name} is None: a tensor is needed")
    return tensor


class _Cache:
    """Rows of keys and values of sequences."""

    def __init__(
        self, sequences: int, capacity: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> None:
        self.sequences, self.capacity = sequences, capacity
        self._before, self._after = before, after
        self._handle = 0
        self._fields: dict[str, int] = {}
        self._memory: Any = None
        self._rows: Any = None

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} is neither copied nor pickled: fork() and save() copy a sequence"
        )

    def _open(self, dtype: int, kv_heads: int, dim: int, dim_v: int, index: tuple[int, int]) -> None:
        shape = (dtype, self.sequences, kv_heads, dim, dim_v, self.capacity)
        values = _SAVED.unpack(packed(_SAVED, (*shape, *self._before, *self._after, *index)))
        self._fields = dict(zip(_NAMES, values))
        text = named(self._fields)
        sizes = struct.unpack("2q", bytes(ops.library.cache_size(text)))
        self._memory, self._rows = (_arrays.room(size) for size in sizes)
        self._handle = ops.library.cache_create(text, self._memory, self._rows)

    def _append(
        self,
        sequences: Sequence[int] | None,
        counts: Sequence[int] | None,
        rows: dict[str, Any],
        weights: dict[str, Any],
        k_index: Any = None,
    ) -> None:
        _arrays.need_tensors({**rows, **weights, "k_index": k_index})
        _arrays.need_plain(f"{type(self).__name__}.append", *rows.values(), *weights.values(), k_index)
        if k_index is not None and len(k_index.shape) == len(rows["k"].shape) - 1:
            k_index = k_index.reshape(*k_index.shape[:-1], 1, k_index.shape[-1])
        rows = {**rows, "k_index": k_index}
        rows = dict(cast("nsa", rows))
        k, v = (_tensor(name, rows[name]) for name in ("k", "v"))
        batch = lists_of(k, 4, sequences, counts)
        for name, t in rows.items():
            if t is not None and len(t.shape) != len(k.shape):
                raise ValueError(
                    f"{name} has {len(t.shape)} dimensions, k has {len(k.shape)}: as many are accepted"
                )
        *flat, index = (t if t is None else t.reshape(-1, *t.shape[-2:]) for t in rows.values())
        given = [_arrays.readable(t) for t in (*flat, *weights.values(), index)]
        with closed_again(self):
            if not self._handle:
                heads = (0, 0) if index is None else tuple(index.shape[1:])
                self._open(ops.dtype_number(k.dtype), k.shape[-2], k.shape[-1], v.shape[-1], heads)
            ops.library.cache_append(self._handle, *batch, *given)

    def _shape(self) -> tuple[int, int]:
        """Key/value heads, and a value's channels."""
        return self._fields["kv_heads"], self._fields["dim_v"]

    def _attended(self, q: Any, *tensors: Any) -> tuple[Any, Any]:
        """The queries laid end to end, and memory for their results."""
        if not self._handle:
            raise ValueError("the cache is empty: attend is accepted after append")
        _arrays.need_tensors(dict(zip(("q", "gate", "gates", "q_index"), (_tensor("q", q), *tensors))))
        _arrays.need_plain(f"{type(self).__name__}.attend", q, *tensors)
        if len(q.shape) < 3:
            raise ValueError(f"q has {len(q.shape)} dimensions: 4, or 3 with counts, are accepted")
        q = cast("nsa", {"q": q})["q"]
        rows = q.reshape(-1, *q.shape[-2:])
        dtype = str(q.dtype).removeprefix("torch.")
        return rows, _arrays.empty_like(q, (*rows.shape[:2], self._shape()[1]), dtype)

    def rollback(self, n: int, sequence: int | None = None) -> None:
        """Takes back the last n tokens, at most 8, of a sequence or of all."""
        n = integer("n", n, OF_ONE)
        before = None if sequence is not None or self._memory is None else self._memory + 0
        try:
            for i in range(self.sequences) if sequence is None else (sequence,):
                self._need(ops.library.cache_rollback, i, n)
        except BaseException:
            if before is not None:
                self._memory[:] = before  # where one sequence cannot, none does
            raise

    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, or all."""
        for i in range(self.sequences) if sequence is None else (sequence,):
            self._need(ops.library.cache_reset, i)

    def fork(self, source: int, to: int) -> None:
        """Gives sequence `to`, whatever it held, the tokens of sequence `source`. They share pages until one
        of them is written."""
        self._need(ops.library.cache_fork, source, integer("to", to))

    def save(self, sequence: int) -> bytes:
        """A sequence as bytes, with a version and a checksum."""
        body = bytes(self._need(ops.library.cache_save, sequence))
        return _SAVED.pack(*self._fields.values()) + body

    def restore(self, sequence: int, saved: bytes) -> None:
        """Gives a sequence, whatever it held, the tokens of save(), of a cache like this one; sequences,
        capacity and pages may differ. Damaged bytes are a RuntimeError."""
        if len(saved) < _SAVED.size:
            raise RuntimeError("the saved sequence is cut off: what save() returned is accepted")
        with closed_again(self):
            if not self._handle:
                dtype, _, kv_heads, dim, dim_v, *_ = _SAVED.unpack_from(saved)
                if not 0 <= dtype < len(ops.DTYPES):
                    raise RuntimeError("the saved sequence is damaged: what save() returned is accepted")
                self._open(dtype, kv_heads, dim, dim_v, _SAVED.unpack_from(saved)[-2:])
            self._need(ops.library.cache_restore, sequence, saved[_SAVED.size :])

    def _need(self, function: Any, *arguments: Any) -> Any:
        if not self._handle:
            raise ValueError("the cache is empty: append comes first")
        whole = [integer("sequence", arguments[0]), *arguments[1:]]
        return function(self._handle, *whole)

    def length(self, sequence: int = 0) -> int:
        """Tokens of a sequence."""
        return self._length(sequence)[0]

    def entries(self, sequence: int = 0) -> int:
        """Compressed entries of a sequence."""
        return self._length(sequence)[1]

    def _length(self, sequence: int) -> tuple[int, int]:
        if not self._handle:
            return 0, 0
        tokens, entries = struct.unpack(
            "2q", bytes(ops.library.cache_length(self._handle, integer("sequence", sequence)))
        )
        return tokens, entries

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that the sequences hold."""
        return int(ops.library.cache_held(self._handle)) if self._handle else 0


class NSACache(_Cache):
    """Keys and values of `sequences` sequences of at most `capacity` tokens, and their compressed entries.

    Tokens are appended, to all sequences or to some, and the newest ones attend; each block is compressed
    once, when it is whole. Row t is that of quern.nsa over the whole sequence. block_size, stride and
    compress are as in quern.nsa. separate_slc, separate_win: the branch has its own keys and values; those
    of the window are kept for `window` tokens, and a call may then append at most `step` to a sequence. page
    64 with `pages`: room for so many pages of 64 tokens; 0: for the capacity of all sequences. Where an
    indexer chooses the blocks, its keys are appended with the rest; with block_size 0 there are no entries
    (preset "msa" needs none).

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
        before = (page, pages, block_size, stride or 0, _KINDS.index(compress))
        super().__init__(sequences, capacity, before, (int(separate_slc), int(separate_win), window, step))
        self._compression: dict[str, Any] = {}
        if block_size:
            self._compression = {"block_size": block_size, "stride": stride, "compress": compress}

    def append(
        self,
        k: Any,
        v: Any,
        *,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        k_slc: Any = None,
        v_slc: Any = None,
        k_win: Any = None,
        v_win: Any = None,
        w_k: Any = None,
        w_v: Any = None,
        pe_k: Any = None,
        pe_v: Any = None,
        k_index: Any = None,
    ) -> None:
        """k [B, n, Hkv, D], v [B, n, Hkv, Dv]: n tokens to each of the B sequences, 0 to B - 1 where none are
        named; or k [T, Hkv, D] with counts, the tokens of each sequence. The weights are those of
        quern.nsa; k_index [B, n, D_I] or [B, n, Hs, D_I] are the indexer's keys."""
        rows = {"k": k, "v": v, "k_slc": k_slc, "v_slc": v_slc, "k_win": k_win, "v_win": v_win}
        weights = {"w_k": w_k, "w_v": w_v, "pe_k": pe_k, "pe_v": pe_v}
        self._append(sequences, counts, rows, weights, k_index)

    def attend(
        self,
        q: Any,
        *,
        gate: Any = None,
        gates: Any = None,
        q_index: Any = None,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        return_lists: bool = False,
        **settings: Any,
    ) -> Any:
        """q [B, n, H, D], the newest n tokens of each sequence, which are appended already → o [B, n, H,
        Dv]; or [T, H, D] with counts. With return_lists → o, block_idx int32 [Hs, T, num_selected].

        gate, gates, q_index [B, n, Hs, D_I], with which the indexer chooses, and the settings (num_selected,
        window, scope, metric, forced_first, preset, ...) are those of quern.nsa.
        """
        rows, o = self._attended(q, gate, gates, q_index)
        chosen = settings_of(gate=gate, gates=gates, q_index=q_index, **{**self._compression, **settings})
        params = ops.params_from("nsa", ops.lines(chosen))
        batch = lists_of(q, 4, sequences, counts)
        idx = count = None
        if return_lists:
            named = dict(chosen)
            heads = rows.shape[1] if named.get("scope") == "head" else self._shape()[0]
            idx = _arrays.empty_like(q, (heads, rows.shape[0], named["num_selected"]), "int32")
            count = _arrays.empty_like(q, (heads, rows.shape[0]), "int32")
        if q_index is not None:
            q_index = cast("nsa", {"q_index": q_index})["q_index"]
        flat = (t if t is None else t.reshape(-1, *t.shape[-2:]) for t in (gates, q_index))
        queries, weight, given, index = (_arrays.readable(t) for t in (rows, gate, *flat))
        results = (_arrays.exported(o), None, weight, given, idx, count, None, index)
        ops.library.cache_decode(self._handle, 1, params, *batch, queries, *results)
        o = o.reshape(*q.shape[:-1], o.shape[-1])
        return (o, idx) if return_lists else o


class KVCache(_Cache):
    """Keys and values of `sequences` sequences of at most `capacity` tokens, for dense attention.

    Tokens are appended, to all sequences or to some, and the newest ones attend. Row t is that of
    quern.attention over the whole sequence. page 64 with `pages`: room for so many pages of 64
    tokens; 0: for the capacity of all sequences.

    The first append says the rows' dtype, f32, f16 or bf16, and shapes. The CPU alone; without gradients. One
    thread at a time may use a cache.
    """

    def __init__(self, sequences: int, capacity: int, *, page: int = 0, pages: int = 0) -> None:
        super().__init__(sequences, capacity, (page, pages, 0, 0, 0), (0, 0, 0, 0))

    def append(
        self,
        k: Any,
        v: Any,
        *,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> None:
        """k [B, n, Hkv, D], v [B, n, Hkv, Dv]: n tokens to each of the B sequences, 0 to B - 1 where none are
        named; or k [T, Hkv, D] with counts, the tokens of each sequence."""
        rows = {"k": k, "v": v, **dict.fromkeys(("k_slc", "v_slc", "k_win", "v_win"))}
        weights = dict.fromkeys(("w_k", "w_v", "pe_k", "pe_v"))
        self._append(sequences, counts, rows, weights)

    def attend(
        self,
        q: Any,
        *,
        window: int = 0,
        scale: float | None = None,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        sink: Any = None,
        return_lse: bool = False,
    ) -> Any:
        """q [B, n, H, D], the newest n tokens of each sequence, which are appended already → o [B, n, H, Dv],
        or (o, lse f32 [B, H, n]); or [T, H, D] with counts → o [T, H, Dv], lse [H, T]. window, scale and sink
        f32 [H] are those of quern.attention."""
        rows, o = self._attended(q)
        params = ops.params("attention", window=window, scale=scale)
        batch = lists_of(q, 4, sequences, counts)
        lse = _arrays.empty_like(q, (rows.shape[1], rows.shape[0]), "float32") if return_lse else None
        queries, sink = (_arrays.readable(t) for t in (rows, sink))
        results = (_arrays.exported(o), lse, None, None, None, None, sink, None)
        ops.library.cache_decode(self._handle, 0, params, *batch, queries, *results)
        o = o.reshape(*q.shape[:-1], o.shape[-1])
        if lse is not None and counts is None:
            lse = lse.reshape(-1, *q.shape[:2]).swapaxes(0, 1)
        return o if lse is None else (o, lse)
