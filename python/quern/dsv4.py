# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's compressed attention: whole layers and their caches, compressors and their streaming states,
the indexer, the attention core.

CSA turns every 4 tokens into an entry, overlapping, and attends the entries that an indexer selects; HCA
turns every 128 into one, and attends all. Names are those of quern/dsv4.h. The CPU alone, for PyTorch and
NumPy.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import Any, Mapping, Sequence

from . import _arrays
from . import _operations as ops
from ._batch import integer, numbers_of, packed
from ._dsv4_hyper import Hyper, hyper
from ._dsv4_index_loss import index_loss
from ._dsv4_layer import Cache, layer
from ._faces import cast, run
from .nvfp4 import as_bytes

__all__ = [
    "Cache",
    "State",
    "append",
    "attention",
    "compress",
    "index",
    "layer",
    "pack_checkpoint",
    "pack_weights",
    "rope_table",
    "store",
]


_APPEND = "v4-append-step"
_CODES = ("fp8", "fp8_scales", "codes", "scales", "global")
_OF_ONE_CALL = ("start_token", "start_abs_pos", "n_blocks")  # Settings of compress() that an append has not.
_RING_MOST = 8
_SAVED = b"quern-state-2"
_NUMBERS = struct.Struct("8q")  # CSA, ratio, width, ring, start, next row, rows in the sums, rows before


def compress(
    proj: Any = None,
    b_a: Any = None,
    b_b: Any = None,
    *,
    x: Any = None,
    w: Any = None,
    prev_b: Any = None,
    norm_weight: Any = None,
    cos_sin: Any = None,
    ratio: int = 0,
    start_token: int = 0,
    start_abs_pos: int = 0,
    n_blocks: int = 0,
    rope_at: str = "first",
    round_bf16: bool = False,
    hadamard: bool = False,
    eps: float = 1e-6,
    format: str = "rows",
    cu_seqlens: Any = None,
    start_tokens: Any = None,
    start_positions: Any = None,
    block_counts: Any = None,
    has_prev: Any = None,
    index_proj: Any = None,
    index_b_a: Any = None,
    index_b_b: Any = None,
    index_w: Any = None,
    index_prev_b: Any = None,
    index_norm_weight: Any = None,
    index_hadamard: bool = False,
    index_format: str = "rows",
    return_pooled: bool = False,
) -> Any:
    """Every `ratio` tokens to one entry → out [.., n, C], or (out, pooled f32 [.., n, C]) with return_pooled.

    CSA: proj [.., T, 4C] with columns C_a, Z_a, C_b, Z_b, b_a and b_b [r, C]. HCA, without b_b: proj [.., T,
    2C] with columns C, Z, b_a [r, C]. Or x [.., T, Dm] and w [Dm, 4C or 2C] instead of proj. ratio 0: the
    rows of b_a. prev_b [.., r, 2C]: C_b and Z_b of the block before. norm_weight [C]; cos_sin [P, R], see
    rope_table(). format "rows": in proj's dtype; "fp8", "fp8-power", "fp4", "row584": bytes. Varlen, with
    cu_seqlens int32 [B+1]: proj [T, ·] → out [T // r, C]; start_tokens, start_positions, block_counts,
    has_prev int32 [B].

    w may be a tuple and has no gradient then: FP8, e4m3 [4C or 2C, Dm] with a scale, f32 or e8m0, for every
    128 × 128 of it; or NVFP4, what nvfp4.quantize(weight=True) returned.

    index_b_a, index_b_b [r, C_I]: the indexer's compressor too, in the same call, of index_proj [.., T, 4C_I]
    or of x and index_w → out, index_out [.., n, C_I], with return_pooled then pooled, index_pooled. Its
    tensors are the main compressor's of the same name; the table and where blocks start are shared.

    With torch it is differentiable by proj, x, w, prev_b, the biases and norm_weight, straight through
    roundings; pooled carries no gradient.
    """
    both = index_b_a is not None
    if both and b_b is None:
        raise ValueError("index_b_a is given: HCA, without b_b, has no indexer")
    name = "hca-compress" if b_b is None else "csa-compress"
    settings = (
        ("ratio", ratio or int((getattr(b_a, "shape", None) or (0,))[0])),
        ("start_token", start_token),
        ("start_abs_pos", start_abs_pos),
        ("n_blocks", n_blocks),
        ("rope_last", rope_at),
        ("round_bf16", round_bf16),
        ("hadamard", hadamard),
        ("eps", eps),
        ("format", None if format == "rows" else format),
        ("index_hadamard", index_hadamard if both else None),
        ("index_format", index_format if both else None),
    )
    tensors = {
        "proj": proj,
        "x": x,
        **_weight("w", w),
        "b_a": b_a,
        "b_b": b_b,
        "prev_b": prev_b,
        "norm_weight": norm_weight,
        "cos_sin": cos_sin,
        "cu_seqlens": cu_seqlens,
        "start_tokens": start_tokens,
        "start_positions": start_positions,
        "block_counts": block_counts,
        "has_prev": has_prev,
        "index_proj": index_proj,
        "index_b_a": index_b_a,
        "index_b_b": index_b_b,
        **_weight("index_w", index_w),
        "index_prev_b": index_prev_b,
        "index_norm_weight": index_norm_weight,
    }
    wanted = ["out", "index_out"] if both else ["out"]
    if return_pooled:
        wanted += ["pooled", "index_pooled"] if both else ["pooled"]
    made = run(name, settings, tensors, tuple(wanted))
    return made if len(made) > 1 else made[0]


def _weight(name: str, w: Any) -> dict[str, Any]:
    """The library's tensors of a projection weight, by the name of the plain one."""
    if not isinstance(w, tuple):
        return {name: w}
    if len(w) == 2:
        return {f"{name}_fp8": w[0], f"{name}_fp8_scales": w[1]}
    if len(w) != 3:
        raise ValueError(f"{name} is a tuple of {len(w)}: 2 (FP8) and 3 (NVFP4) are accepted")
    return {f"{name}_codes": as_bytes(w[0]), f"{name}_scales": as_bytes(w[1]), f"{name}_global": w[2]}


def index(
    q: Any,
    k: Any,
    w: Any,
    *,
    ratio: int = 4,
    top_k: int = 512,
    start_abs_pos: int = 0,
    key_format: str = "rows",
    products: str = "exact",
    return_scores: bool = False,
) -> tuple[Any, ...]:
    """The top_k entries of every query → idx int32 [B, T, top_k], ascending and padded with -1, count int32
    [B, T]; with return_scores also scores f32 [B, T, S].

    q [B, T, Hi, C], k [B, S, C] or bytes in key_format, w [B, T, Hi]: the score of entry s is C^-½ Hi^-½ Σ_h
    w[t, h] · relu(q[t, h] · k[s]). Query t, at position start_abs_pos + t, sees entries of whole blocks. It
    has no gradient. products "fp8", beside keys in FP8, rounds each head of q to FP8 (quern/dsv4.h).
    """
    settings = (
        ("ratio", ratio),
        ("top_k", top_k),
        ("start_abs_pos", start_abs_pos),
        ("key_format", key_format),
        ("products", products),
    )
    results = ("idx", "count", "scores") if return_scores else ("idx", "count")
    return run("v4-index", settings, {"q": q, "k": k, "w": w}, results)


def attention(
    q: Any,
    kv: Any,
    kv_cmp: Any = None,
    idx: Any = None,
    *,
    count: Any = None,
    sink: Any = None,
    cos_sin: Any = None,
    ratio: int = 0,
    window: int = 128,
    start_abs_pos: int | None = None,
    format: str = "rows",
    page: int = 0,
    cu_seqlens: Any = None,
    start_positions: Any = None,
    kv_table: Any = None,
    kv_cmp_table: Any = None,
    return_lse: bool = False,
    return_lse_win: bool = False,
) -> Any:
    """Attention over the window's raw rows and the compressed entries → o [B, T, H, D], or a tuple with lse
    f32 [B, H, T] and lse_win, of the window's keys alone.

    q [B, T, H, D]; kv [B, N, D], one row for all heads, key and value at once; kv_cmp [B, S, D] entries of
    `ratio` tokens (0: 4 with idx, else 128); idx int32 [B, T, k]: those attended (None: every visible one).
    Or varlen with cu_seqlens: q [T, H, D], kv [T, D], kv_cmp [T // ratio, D], idx [T, k]. sink f32 [H]: of
    the softmax's denominator. cos_sin [P, R]: o is rotated back by its position. start_abs_pos: where query
    0 stands (None: N - T). format "row584" and pages (kv_table, kv_cmp_table int32 [B, columns]): see
    quern/dsv4.h.

    With torch it is differentiable by q, kv, kv_cmp and sink; the choice and lse carry no gradient.
    """
    settings = (
        ("ratio", ratio),
        ("window", window),
        ("start_abs_pos", -1 if start_abs_pos is None else start_abs_pos),
        ("format", format),
        ("page", page),
    )
    tensors = {
        "q": q,
        "kv": kv,
        "kv_cmp": kv_cmp,
        "idx": idx,
        "count": count,
        "sink": sink,
        "cos_sin": cos_sin,
        "cu_seqlens": cu_seqlens,
        "start_positions": start_positions,
        "kv_table": kv_table,
        "kv_cmp_table": kv_cmp_table,
    }
    more = ("lse",) * return_lse + ("lse_win",) * return_lse_win
    made = run("v4-attention", settings, tensors, ("o", *more))
    return made if more else made[0]


def store(x: Any, slots: Any, cache: Any, *, format: str = "rows", page: int = 0) -> None:
    """Writes rows x [n, D] into a cache that attention() or index() reads: row i to slot slots[i], int32 [n],
    counted over all pages; -1: not stored. cache: [rows, D] or [pages, page, D]; with a format uint8 [rows,
    bytes of a row] or [pages, page · bytes]."""
    _arrays.need_tensors({"x": x, "slots": slots, "cache": cache})
    _arrays.need_writable("cache", cache)
    settings = (("format", format), ("page", page))
    run("v4-store", settings, {"x": x, "slots": slots, "cache": cache}, ())


# ---- tables and weights ----


def rope_table(
    positions: int,
    channels: int,
    *,
    base: float = 10000.0,
    factor: float = 0.0,
    original_length: float = 65536.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    like: Any = None,
) -> Any:
    """[positions, channels] f32: cosines, then as many sines, of interleaved pairs; factor > 0: YaRN. base
    10000 serves window layers; base 160000, factor 16 the CSA and HCA layers. A torch.Tensor beside `like`,
    on the CPU or without data on "meta"; without it an array of NumPy."""
    table = _arrays.empty_like(
        _arrays.numpy_like() if like is None else like, (positions, channels), "float32"
    )
    numbers = packed(struct.Struct("5f"), (base, factor, original_length, beta_fast, beta_slow))
    if not _arrays.is_meta(table):
        ops.library.rope_table(numbers, table)
    return table


def _matrices(tensors: Mapping[str, Any]) -> None:
    for name, t in tensors.items():
        _arrays.check(name, t, t)
        if len(t.shape) != 2:
            raise ValueError(f"{name} has {len(t.shape)} dimensions: 2 are accepted")


def pack_weights(w_a_kv: Any, w_a_z: Any, w_b_kv: Any = None, w_b_z: Any = None) -> Any:
    """A compressor's weights [Dm, C], two for HCA, four for CSA → w [Dm, 2C or 4C] of compress()."""
    given = {"w_a_kv": w_a_kv, "w_a_z": w_a_z, "w_b_kv": w_b_kv, "w_b_z": w_b_z}
    _matrices({name: t for name, t in given.items() if t is not None or name[2] == "a"})
    parts = [part for part in given.values() if part is not None]
    _arrays.need_plain("dsv4.pack_weights", *parts)
    shape = (w_a_kv.shape[0], len(parts) * w_a_kv.shape[1])
    w = _arrays.empty_like(w_a_kv, shape, _dtype(w_a_kv))
    read = [_arrays.readable(part) for part in given.values()]
    if not _arrays.is_meta(w):
        ops.library.pack_weights(int(w_b_kv is None), *read, _arrays.exported(w))
    return w


def pack_checkpoint(wkv: Any, wgate: Any, ape: Any, *, kind: str = "csa") -> tuple[Any, ...]:
    """A checkpoint's compressor, wkv and wgate [S·C, Dm], ape [r, S·C] with S 2 for "csa", 1 for "hca" → w
    [Dm, 2S·C], b_a [r, C] and, for CSA, b_b."""
    if kind not in ("csa", "hca"):
        raise ValueError(f"kind is '{kind}': 'csa' and 'hca' are accepted")
    _matrices({"wkv": wkv, "wgate": wgate, "ape": ape})
    _arrays.need_plain("dsv4.pack_checkpoint", wkv, wgate, ape)
    series = 2 if kind == "csa" else 1
    width = wkv.shape[0] // series
    w = _arrays.empty_like(wkv, (wkv.shape[1], 2 * wkv.shape[0]), _dtype(wkv))
    biases = [_arrays.empty_like(ape, (ape.shape[0], width), _dtype(ape)) for _ in range(series)]
    given = [_arrays.readable(part) for part in (wkv, wgate, ape)]
    if not _arrays.is_meta(w):
        written = [_arrays.exported(t) for t in (w, *biases, *[None] * (2 - series))]
        ops.library.pack_checkpoint(series % 2, *given, *written)
    return (w, *biases)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# ---- streaming ----


class State:
    """What one sequence's compressor keeps between calls: softmax sums, and the last `ring` rows, which can
    be taken back.

    kind "csa" or "hca", width C. However a sequence is cut, its entries are those of compress(), to the bit.
    The settings are those of compress(). One thread at a time may use a state.
    """

    def __init__(
        self,
        kind: str,
        width: int,
        *,
        ratio: int = 0,
        ring: int = 0,
        start_abs_pos: int = 0,
        like: Any = None,
        **settings: Any,
    ) -> None:
        if kind not in ("csa", "hca"):
            raise ValueError(f"kind is '{kind}': 'csa' and 'hca' are accepted")
        if not 0 <= integer("ring", ring) <= _RING_MOST:
            raise ValueError(f"ring is {ring}: 0 to {_RING_MOST} rows are accepted")
        if hasattr(like, "__dlpack_device__") and like.__dlpack_device__()[0] != 1:
            raise NotImplementedError("like is on a GPU: states are on the cpu")
        self.kind, self.width, self.ring, self.like = kind, integer("width", width), ring, like
        settings["rope_last"] = settings.pop("rope_at", None)
        if settings.get("format") == "rows":
            del settings["format"]
        stated = {"ratio": ratio, "start_abs_pos": start_abs_pos, **settings}
        self._settings = stated
        name, series = f"{kind}-compress", 2 if kind == "csa" else 1
        self.ratio = integer("ratio", ratio) or (4 if kind == "csa" else 128)
        shapes = {"proj": (self.ratio, 2 * series * width), "b_a": (self.ratio, width)}
        if kind == "csa":
            shapes["b_b"] = (self.ratio, width)
        views = {field: (0, 0, shape) for field, shape in shapes.items()}
        dtype, shape = ops.expect_of(name, False, ops.lines(tuple(stated.items())), views)["out"]
        self.row_shape, self.row_dtype = shape[1:], ops.DTYPES[dtype] if "format" in settings else None
        step = {key: value for key, value in stated.items() if key not in _OF_ONE_CALL}
        self.params = ops.params(_APPEND, kind=kind, **step)
        # In the operation's count, which begins with the rows of a block before: the next row, and how many
        # the sums contain.
        self._next = self._merged = self._before = 0
        self._memory = bytearray(4 * series * width * (3 + 2 * ring))

    def _again(self, start: int) -> State:
        named = {name: value for name, value in self._settings.items() if name != "rope_last"}
        named.update(rope_at=self._settings["rope_last"], start_abs_pos=start)
        return State(self.kind, self.width, ring=self.ring, like=self.like, **named)

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self._first_row() + self._next

    @property
    def held(self) -> int:
        """How many of the last tokens can be taken back."""
        return min(self._next - self._merged, self._next - self._before)

    def _first_row(self) -> int:
        """The position of row 0."""
        return int(self._settings["start_abs_pos"]) - self._before

    def _form(self) -> tuple[Any, ...]:
        return self.kind, self.ratio, self.width, self.ring

    def rollback(self, n: int) -> None:
        """Takes back the last n tokens."""
        if not 0 <= integer("n", n) <= self.held:
            raise ValueError(f"n is {n}: 0 to {self.held} tokens, those in the ring, are accepted")
        self._next -= integer("n", n)

    def fork(self) -> State:
        """An independent copy."""
        copy = self._again(self._settings["start_abs_pos"])
        copy._next, copy._merged, copy._before = self._next, self._merged, self._before
        copy._memory[:] = self._memory
        return copy

    def __deepcopy__(self, memo: Any) -> State:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("a State is not pickled: save() and restored() are accepted")

    def save(self) -> bytes:
        """The state as bytes, with a version and a checksum."""
        kind, *numbers = self._form()
        start = int(self._settings["start_abs_pos"])
        body = _SAVED + _NUMBERS.pack(
            kind == "csa", *numbers, start, self._next, self._merged, self._before
        )
        body += self._memory
        return body + struct.pack("I", zlib.crc32(body))

    def restored(self, saved: bytes) -> State:
        """A state like this one from save()'s bytes."""
        saved = bytes(saved)
        body, end, at = saved[:-4], saved[-4:], len(_SAVED)
        if len(body) < at + _NUMBERS.size or body[:at] != _SAVED or struct.pack("I", zlib.crc32(body)) != end:
            raise RuntimeError("the saved state is damaged: what State.save() returned is accepted")
        csa, *form, start, following, merged, before = _NUMBERS.unpack_from(body, at)
        given, own = ("csa" if csa else "hca", *form), self._form()
        if given != own:
            raise RuntimeError(f"the saved state is of kind, ratio, width, ring {given}: {own} are accepted")
        state = self._again(start)
        state._next, state._merged, state._before = following, merged, before
        state._memory[:] = body[at + _NUMBERS.size :]
        return state

    def append(self, proj: Any = None, b_a: Any = None, b_b: Any = None, **tensors: Any) -> Any:
        """proj [T, 4C or 2C], or x [T, Dm] and w → the entries that become whole [n, C]. See append()."""
        rows = _rows_of(proj, tensors.get("x"))
        return append([self], [rows.shape[0]], proj, b_a, b_b, **tensors)


def _rows_of(proj: Any, x: Any) -> Any:
    rows = x if proj is None else proj
    if not len(getattr(rows, "shape", ())):
        raise TypeError("neither proj nor x is a tensor of rows: one of them is needed")
    return rows


class _Step:
    """States while tokens go into copies of them: memory, next rows, rows in the sums."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states, self.first = states, states[0]
        self.memory = bytearray().join(state._memory for state in states)
        self.next = [state._next for state in states]
        self.merged = bytearray(struct.pack(f"{len(states)}i", *[state._merged for state in states]))
        self.before = [state._before for state in states]

    def run(self, counts: Sequence[int], tensors: Mapping[str, Any], pooled: bool) -> list[Any]:
        """The entries, and the pooled rows where they are asked for; rows behind them are cut off."""
        first, rows, batch = self.first, _rows_of(tensors.get("proj"), tensors.get("x")), len(counts)
        offsets = list(itertools.accumulate(counts, initial=0))
        n = rows.shape[0] // first.ratio + batch
        made = [_arrays.empty_like(rows, (n, *first.row_shape), first.row_dtype or _dtype(rows))]
        if pooled:
            made.append(_arrays.empty_like(rows, (n, first.width), "float32"))
        if _arrays.framework(rows) == "jax":
            _arrays.wait_for(tensors.values())
        given = {name: _arrays.readable(t) for name, t in tensors.items()}
        given.update(zip(("out", "pooled"), map(_arrays.exported, made)))
        for name, numbers in (("slots", range(batch)), ("positions", self.next), ("cu", offsets)):
            given[name] = _arrays.over(bytearray(numbers_of(name, numbers, "i")), "int32", len(numbers))
        given["states"] = _arrays.over(self.memory, "float32", batch, -1)
        given["merged"] = _arrays.over(self.merged, "int32", batch)
        operation = ops.OPERATIONS[_APPEND]
        ops.library.run(operation.number, 0, first.params, *map(given.get, operation.fields))
        whole = sum((at + count) // first.ratio - at // first.ratio for at, count in zip(self.next, counts))
        self.next = [at + count for at, count in zip(self.next, counts)]
        return [t[:whole] for t in made]

    def begin(self, prev_b: Any, b_a: Any, b_b: Any) -> None:
        """Rows of a block before: 0, but for series b. Its entries are not kept."""
        ratio, width = self.first.ratio, self.first.width
        if any(self.next):
            raise ValueError("prev_b is given, and a state has begun: empty states are accepted")
        if tuple(prev_b.shape) != (len(self.next), ratio, 2 * width) or self.first.kind != "csa":
            raise ValueError(f"prev_b has shape {tuple(prev_b.shape)}: [B, r, 2C] of CSA is accepted")
        prev, *biases = (_arrays.widened(t) for t in (prev_b, b_a, b_b))
        proj = _arrays.joined((_arrays.zeros_like(prev), prev), 2).reshape(-1, 4 * width)
        self.run([ratio] * len(self.next), {"proj": proj, **dict(zip(("b_a", "b_b"), biases))}, False)
        self.before = [ratio] * len(self.next)

    def commit(self) -> None:
        size, merged = len(self.first._memory), struct.unpack(f"{len(self.next)}i", self.merged)
        for i, state in enumerate(self.states):
            state._memory[:] = self.memory[i * size : (i + 1) * size]
            state._next, state._merged, state._before = self.next[i], merged[i], self.before[i]


def append(
    states: Sequence[State],
    counts: Sequence[int],
    proj: Any = None,
    b_a: Any = None,
    b_b: Any = None,
    *,
    x: Any = None,
    w: Any = None,
    prev_b: Any = None,
    norm_weight: Any = None,
    cos_sin: Any = None,
    return_pooled: bool = False,
) -> Any:
    """counts[b] tokens to states[b], laid end to end in proj [T, 4C or 2C] or x [T, Dm] → the entries that
    become whole, state after state: out [n, C], or (out, pooled f32 [n, C]). The tensors are those of
    compress(); prev_b [B, r, 2C] is for states without a token yet."""
    weights = _weight("w", w)
    codes = [weights.get(f"w_{kind}") for kind in _CODES]
    _rows_of(proj, x)
    named = {"proj": proj, "x": x, "w": weights.get("w"), "b_a": b_a, "b_b": b_b, "prev_b": prev_b}
    named.update(norm_weight=norm_weight, cos_sin=cos_sin)
    _arrays.need_tensors(named)
    named = dict(cast("csa-compress", named))
    _arrays.need_plain("dsv4.append", *named.values())
    if not states or not all(isinstance(state, State) for state in states):
        raise TypeError(f"states is {states!r}: one State or more are accepted")
    lengths = struct.unpack(f"{len(counts)}i", numbers_of("counts", counts, "i"))
    named.update(zip((f"w_{kind}" for kind in _CODES), codes))
    rows = "x" if named["proj"] is None else "proj"
    _need_batch(states, lengths, named[rows].shape[0])
    steps, made, at = [], [], 0
    for first, batch in _batches(states, prev_b is not None):
        step, end = _Step([states[b] for b in batch]), at + sum(lengths[b] for b in batch)
        own = {**named, rows: named[rows][at:end]}
        before = own.pop("prev_b")
        if before is not None:
            step.begin(before[batch.start : batch.stop], named["b_a"], named["b_b"])
        if cos_sin is not None:
            own["cos_sin"] = _table(named["cos_sin"], first)
        made.append(step.run([lengths[b] for b in batch], own, return_pooled))
        steps.append(step)
        at = end
    for step in steps:
        step.commit()
    out, *pooled = (_arrays.joined(parts) for parts in zip(*made))
    return (out, *pooled) if return_pooled else out


def _need_batch(states: Sequence[State], counts: Sequence[int], rows: int) -> None:
    if len(counts) != len(states) or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"counts is {list(counts)}: 0 or more of each of {len(states)} states, {rows} in all, are "
            "accepted"
        )
    if len({id(state) for state in states}) < len(states):
        raise ValueError("a state is given twice: each is accepted once")
    form = states[0]._form()
    for state in states:
        if state._form() != form:
            raise ValueError(
                f"a state is of kind, ratio, width, ring {state._form()}: {form}, those of the first, are "
                "accepted"
            )


def _batches(states: Sequence[State], begins: bool) -> list[tuple[int, range]]:
    """The states that a step takes, and the position of their row 0: all, where it is one."""
    firsts = [state._first_row() - (state.ratio if begins else 0) for state in states]
    if len(set(firsts)) == 1:
        return [(firsts[0], range(len(states)))]
    return [(first, range(b, b + 1)) for b, first in enumerate(firsts)]


def _table(cos_sin: Any, first: int) -> Any:
    """Angles from a position on; those of a block that would begin before position 0 are not read."""
    if first >= 0:
        return cos_sin[first:]
    missing = _arrays.empty_like(cos_sin, (-first, *cos_sin.shape[1:]), _dtype(cos_sin))
    return _arrays.joined((missing, cos_sin))
