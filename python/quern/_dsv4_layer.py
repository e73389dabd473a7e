# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A whole attention layer of DeepSeek-V4, and its cache, for every framework."""

from __future__ import annotations

import struct
import zlib
from typing import Any, Mapping, Sequence

from . import _arrays
from . import _operations as ops
from ._batch import OF_ONE, closed_again, integer, lists_of, named, numbers_of, packed
from ._faces import cast, run
from ._layer_steps import Steps
from .nvfp4 import as_bytes

KINDS = ("csa", "hca", "swa")
_FIELDS = ops.OPERATIONS["v4-layer"].fields
# The weights' names in checkpoints, "q_a_proj.weight", and the library's fields.
WEIGHTS = {t.name.removeprefix("w."): field for field, t in _FIELDS.items() if t.input and t.name[:2] == "w."}
# Numbers of quern_dsv4_layer_cache_params, in the order in which save() writes them.
_NAMES = ("kind", "dtype", "sequences", "capacity", "dim", "window", "ratio", "index_dim", "ring")
_NAMES += ("format", "key_format", "page", "pages")
_FIELDS_OF = struct.Struct(f"{len(_NAMES)}q")
_SAVED = b"quern-layer-3"
FORMATS = ("rows", "fp8", "fp8-power", "fp4", "row584")  # The order of quern_dsv4_format.
RESULTS = tuple(field for field, t in _FIELDS.items() if t.results[0] and field != "out")


def tensors_of(x: Any, cos_sin: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a layer; weights by their names in checkpoints, or by the library's fields."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}: tensors by their names are accepted")
    unknown = [name for name in weights if name not in WEIGHTS and name not in WEIGHTS.values()]
    if unknown:
        raise ValueError(f"weights has '{unknown[0]}': {', '.join(WEIGHTS)} are accepted")
    fields = {WEIGHTS.get(name, name): t for name, t in weights.items()}
    codes = {field: as_bytes(t) for field, t in fields.items() if field.endswith("_codes")}
    return {"x": x, "cos_sin": cos_sin, **fields, **codes}


def format_of(name: str) -> int:
    """The number of a format; as everywhere a name may have underscores for hyphens."""
    spelt = name.replace("_", "-") if isinstance(name, str) else name
    if spelt not in FORMATS:
        raise ValueError(f"format is '{name}': {', '.join(FORMATS)} are accepted")
    return FORMATS.index(spelt)


def settings_of(kind: str, window: int, top_k: int, eps: float) -> tuple[tuple[str, Any], ...]:
    """The parameters of the operation v4-layer."""
    return (("kind", kind), ("window", window), ("top_k", top_k), ("eps", eps))


def layer(
    x: Any,
    cos_sin: Any,
    weights: Mapping[str, Any],
    *,
    kind: str = "csa",
    window: int = 128,
    top_k: int = 512,
    eps: float = 1e-6,
    results: Sequence[str] = (),
) -> Any:
    """x [B, T, Dm] → out [B, T, Dm], or (out, *results).

    kind "csa", "hca" or "swa", the window alone. cos_sin [P, R], see rope_table(). weights: tensors [out,
    in] by the names of checkpoints: sinks, q_a_proj.weight, q_a_norm.weight, q_b_proj.weight, kv_proj.weight,
    kv_norm.weight, o_a_proj.weight, o_b_proj.weight; CSA and HCA: compressor.{position_bias, kv_proj.weight,
    gate_proj.weight, kv_norm.weight}; CSA: compressor.indexer.{the same, q_b_proj.weight,
    scorer.weights_proj.weight}. Heads, groups and the ratio follow from them. top_k: entries that CSA's
    indexer chooses. results: what the layer goes through: q_residual, q, kv_rows, compressed, idx_k, idx_q,
    idx_score, idx_topk, core, core_irope, o_a_out.

    A compressor's kv_proj.weight and gate_proj.weight, or its indexer's, may be one weight in FP8 or NVFP4,
    whose outputs are C_a Z_a C_b Z_b (HCA: C Z), C of kv_proj and Z of gate_proj, series a the second half
    of each: compressor.{fp8 [outputs, Dm] in float8_e4m3fn, fp8_scales [⌈outputs / 128⌉, ⌈Dm / 128⌉] in f32
    or float8_e8m0fnu}, or compressor.{codes, scales, global} of quern.nvfp4.quantize(.., weight=True) of [Dm,
    outputs]; compressor.indexer.{the same}.

    With torch it is differentiable by x and all weights but those in FP8 and NVFP4 and the indexer's, whose
    choice has no gradient; what the layer goes through carries none.
    """
    made = run(
        "v4-layer",
        settings_of(kind, window, top_k, eps),
        tensors_of(x, cos_sin, weights),
        ("out", *results),
    )
    return made if results else made[0]


class Cache:
    """What a layer keeps of `sequences` sequences of at most `capacity` tokens: the last raw rows, all
    entries, the indexer's keys, the compressors' states.

    kind, window, top_k and eps are those of layer(). ring: tokens of a sequence that can be taken back, at
    most 8. format "rows" or "row584": of raw rows and entries; key_format "rows", "fp8", "fp8-power" or
    "fp4": of the indexer's keys. dtype: of rows that have no format, "float32", "bfloat16" or "float16",
    x's where it is not said. Entries and keys stand in `pages` pages of `page` slots, 64 where that is 0; 0
    pages: as many as all sequences can need.

    However a sequence is cut into calls, its rows are those of layer(), but for the rounding of formats and
    dtype. The first call says the rows' shapes, and where they are: on the CPU, or with torch on a GPU, where
    x has 16 bits. Without gradients. One thread at a time may use a cache.
    """

    def __init__(
        self,
        kind: str,
        sequences: int,
        capacity: int,
        *,
        window: int = 128,
        top_k: int = 512,
        eps: float = 1e-6,
        ring: int = 0,
        format: str = "rows",
        key_format: str = "rows",
        dtype: Any = None,
        page: int = 0,
        pages: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is '{kind}': {', '.join(KINDS)} are accepted")
        self.kind, self.sequences, self.capacity = kind, sequences, capacity
        self._window, self._ring, self._pages = window, ring, (page, pages)
        self._formats = (format_of(format), format_of(key_format))
        self._dtype = None if dtype is None else ops.dtype_number(dtype)
        self._settings = settings_of(kind, window, top_k, eps)
        self._params = ops.params("v4-layer", **dict(self._settings))
        self._handle = 0  # of a cache on a GPU the books are in _steps
        self._steps: Steps | None = None
        self._fields: dict[str, int] = {}
        self._memory: Any = None
        self._rows: Any = None

    def __reduce__(self) -> Any:
        raise TypeError("a Cache is neither copied nor pickled: fork() and save() copy a sequence")

    def _open(self, dtype: int, dim: int, ratio: int, index_dim: int, device: Any) -> None:
        kind = KINDS.index(self.kind)
        numbers = (kind, dtype, self.sequences, self.capacity, dim, self._window, ratio, index_dim)
        values = packed(_FIELDS_OF, (*numbers, self._ring, *self._formats, *self._pages))
        self._fields = dict(zip(_NAMES, _FIELDS_OF.unpack(values)))
        self._steps = None
        if device is not None:
            formats = FORMATS[self._formats[0]], FORMATS[self._formats[1]]
            self._steps = Steps(self._fields, formats, self._settings, device)
            self._handle = -1
            return
        text = named(self._fields)
        sizes = struct.unpack("2q", bytes(ops.library.layer_cache_size(text)))
        self._memory, self._rows = (_arrays.room(size) for size in sizes)
        self._handle = ops.library.layer_cache_create(text, self._memory, self._rows)

    def _open_for(self, tensors: Mapping[str, Any]) -> None:
        _arrays.need_tensors(tensors)
        x, kinds = tensors["x"], ("kv_norm", "compressor_bias", "indexer_norm")
        found = (tensors.get(name) for name in kinds)
        extents = [0 if t is None or not len(t.shape) else t.shape[0] for t in found]
        if x is None or not extents[0]:
            raise ValueError("x and kv_norm.weight say what a cache's rows are: both are needed")
        dtype = ops.dtype_number(x.dtype) if self._dtype is None else self._dtype
        self._open(dtype, *extents, _arrays.gpu_of(x))

    def open(self, x: Any, weights: Mapping[str, Any]) -> None:
        """Makes room for the rows that such tensors make, once; the first append() does it otherwise."""
        if not self._handle:
            self._open_for(tensors_of(x, None, weights))

    def pages(self, tokens: int) -> tuple[int, int]:
        """How many pages a sequence of so many tokens needs, and how many no sequence holds."""
        if not self._handle:
            raise ValueError("the cache is empty: append comes first")
        needed, free = struct.unpack("2q", bytes(self._do("pages", integer("tokens", tokens))))
        return needed, free

    def append(
        self,
        x: Any,
        cos_sin: Any,
        weights: Mapping[str, Any],
        *,
        sequences: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Any:
        """The layer's output for new tokens, x [B, n, Dm] of the B sequences, 0 to B - 1 where none are
        named; or [T, Dm] with counts, the tokens of each sequence. The weights are those of layer()."""
        given = tensors_of(x, cos_sin, weights)
        _arrays.need_tensors(given)
        if x is None:
            raise TypeError("x is None: a tensor is needed")
        tensors = cast("v4-layer", given)
        _arrays.need_plain("dsv4.Cache.append", *tensors.values())
        batch = lists_of(x, 3, sequences, counts)
        rows = tensors["x"].reshape(-1, x.shape[-1])
        out = _arrays.empty_like(x, rows.shape, str(rows.dtype).removeprefix("torch."))
        passed = {name: _arrays.readable(t) for name, t in {**tensors, "x": rows}.items()}
        passed["out"] = _arrays.exported(out)
        slots = [passed.get(field) for field in _FIELDS]
        with closed_again(self):
            if not self._handle:
                self._open_for(tensors)
            if self._steps is not None:
                self._steps.append(passed, batch)
            else:
                ops.library.layer_decode(self._handle, self._params, *batch, *slots)
        return out.reshape(x.shape)

    def _do(self, what: str, *arguments: Any) -> Any:
        if self._steps is not None:
            return getattr(self._steps, what)(*arguments)
        return getattr(ops.library, f"layer_cache_{what}")(self._handle, *arguments)

    def _need(self, what: str, *arguments: Any) -> Any:
        if not self._handle:
            raise ValueError("the cache is empty: append comes first")
        return self._do(what, integer("sequence", arguments[0]), *arguments[1:])

    def length(self, sequence: int = 0) -> int:
        """Tokens of a sequence."""
        return self._length(sequence)[0]

    def _held(self, sequence: int) -> int:
        """Tokens of a sequence that can be taken back."""
        return self._length(sequence)[1]

    def _length(self, sequence: int) -> tuple[int, int]:
        if not self._handle:
            return 0, 0
        tokens, held = struct.unpack("2q", bytes(self._do("length", integer("sequence", sequence))))
        return tokens, held

    def rollback(self, n: int, sequence: int | None = None) -> None:
        """Takes back the last n tokens of a sequence, or of all."""
        n = integer("n", n, OF_ONE)
        # Of all: the one that can give back the fewest is the first, so that where it cannot none does.
        every = range(self.sequences) if sequence is None else (sequence,)
        for i in sorted(every, key=self._held):
            self._need("rollback", i, n)

    def reset(self, sequence: int | None = None) -> None:
        """Empties a sequence, or all."""
        for i in range(self.sequences) if sequence is None else (sequence,):
            self._need("reset", i)

    def fork(self, source: int, to: int) -> None:
        """Gives sequence `to` the tokens of sequence `source`. They share pages until one of them is
        written; neither sees what happens to the other."""
        self._need("fork", source, integer("to", to))

    def save(self, sequence: int) -> bytes:
        """A sequence as bytes, with a version and a checksum."""
        body = _SAVED + _FIELDS_OF.pack(*self._fields.values())
        body += bytes(self._need("save", sequence))
        return body + struct.pack("I", zlib.crc32(body))

    def restore(self, sequence: int, saved: bytes) -> None:
        """Gives a sequence, whatever it held, the tokens of save(), of a cache like this one; sequences,
        capacity and pages may differ. Damaged bytes, and more tokens than the capacity, are a
        RuntimeError."""
        start = len(_SAVED) + _FIELDS_OF.size
        body, end = saved[:-4], saved[-4:]
        if len(body) < start or body[: len(_SAVED)] != _SAVED or struct.pack("I", zlib.crc32(body)) != end:
            raise RuntimeError("the saved sequence is damaged: what dsv4.Cache.save() returned is accepted")
        fields = dict(zip(_NAMES, _FIELDS_OF.unpack_from(body, len(_SAVED))))
        dtype, dim, ratio, index_dim = (fields[name] for name in ("dtype", "dim", "ratio", "index_dim"))
        kind, window, ring, *formats = (
            fields[name] for name in ("kind", "window", "ring", "format", "key_format")
        )
        given, own = (kind, window, ring, *formats), (KINDS.index(self.kind), self._window, self._ring)
        if given != (*own, *self._formats):
            raise ValueError(
                "the saved sequence is of kind, window, ring, format and key_format "
                f"{_named(*given)}: {_named(*own, *self._formats)} are accepted"
            )
        with closed_again(self):
            if not self._handle:
                self._open(dtype, dim, ratio, index_dim, None)
            self._need("restore", sequence, body[start:])

    def copy_to(self, other: Cache, sequence: int, *to: int) -> None:
        """Gives sequences of another cache of the kind, dims, window and formats the tokens of one of this;
        the capacity and pages of the other may differ."""
        if self._steps is None:
            saved = self.save(sequence)
            for one in to:
                other.restore(one, saved)
            return
        numbers = self._fields
        with closed_again(other):
            if not other._handle:
                dims = (numbers[name] for name in ("dtype", "dim", "ratio", "index_dim"))
                other._open(*dims, self._steps.device)
            taken = self._steps.taken(integer("sequence", sequence))
            for one in to:
                other._need("give", one, taken)


def _named(kind: int, window: int, ring: int, *formats: int) -> tuple[str | int, ...]:
    return (KINDS[kind], window, ring, *(FORMATS[f] for f in formats))
