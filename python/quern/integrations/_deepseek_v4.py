# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's attention in the transformers package: whole layers of quern.dsv4, whose caches stand in
cache.layers. Positions, windows and blocks are counted from a sequence's first token, wherever padding puts
it."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    STATIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    StaticLayer,
)
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

from .. import dsv4
from .._dsv4_layer import WEIGHTS
from ._linears import Linear
from ._masks import Lengths, apart, restarts, rows_at, to_front

KINDS = {
    "sliding_attention": "swa",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
REPLACED = (DynamicSlidingWindowLayer, v4.DeepseekV4HCACache, v4.DeepseekV4CSACache)
LEAST = 1024  # Tokens for which a cache has room at first; memory that no token has reached costs nothing.


class Table:
    """Cosines and sines of a model's positions, for all its layers of one rope type, as dsv4.layer takes
    them."""

    def __init__(self, rotary: nn.Module, kind: str) -> None:
        self.rotary, self.kind = rotary, kind
        self.made: Tensor | None = None
        self.of: Tensor | None = None
        self.read: dict[int, tuple[Tensor, int, Tensor]] = {}

    def upto(self, positions: int) -> Tensor:
        """[at least so many, R] f32."""
        frequencies = getattr(self.rotary, f"{self.kind}_inv_freq")
        if self.made is None or len(self.made) < positions or self.of is not frequencies:
            device = frequencies.device
            every = torch.arange(max(LEAST, 1 << (positions - 1).bit_length()), device=device)[None]
            with torch.no_grad():
                halves = self.rotary(torch.empty(0, device=device), every, layer_type=self.kind)
            self.made, self.of = torch.cat(halves, -1)[0].contiguous(), frequencies
        return self.made

    def here(self, numbers: Tensor) -> Tensor:
        """Positions, or first tokens, on the CPU: all layers are handed the same ones, and a GPU is waited
        for once."""
        if not numbers.is_cuda:
            return numbers
        if numbers.is_inference():  # which has no version
            return numbers.cpu()
        kept = self.read.get(numbers.dim())
        if kept is None or kept[0] is not numbers or kept[1] != numbers._version:
            kept = self.read[numbers.dim()] = numbers, numbers._version, numbers.cpu()
        return kept[2]


class Rows(CacheLayerMixin):
    """What an attention layer keeps of a batch's sequences: a dsv4.Cache that grows. Slots count padding,
    the sequences of the dsv4.Cache begin behind it."""

    is_sliding = True  # Masks have the window of these layers.

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        self.cache: dsv4.Cache | None = None
        self.slots = 0
        self.first: list[int] = []
        self.offset: Tensor | None = None
        self.spent: str | None = None

    def lazy_initialization(self, *given: Any) -> None:
        pass

    def update(self, *given: Any, **named: Any) -> Any:
        raise ValueError("accelerate: keys are handed to a cache of compressed rows: tokens are accepted")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, 0

    def get_seq_length(self) -> int:
        return self.slots

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None:
        pass

    def prefetch(self) -> None:
        pass

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError("accelerate: tokens are taken back: caches that only grow are accepted")

    def _room(self, batch: int, tokens: int) -> dsv4.Cache:
        """The cache, with room for so many tokens a sequence."""
        if self.cache is None:
            self.cache = dsv4.Cache(sequences=batch, capacity=max(LEAST, 2 * tokens), **self.settings)
            self.first = [0] * batch
        elif self.cache.sequences != batch:
            raise ValueError(
                f"accelerate: the cache has {self.cache.sequences} sequences, the input {batch}: as many are "
                "accepted"
            )
        elif self.cache.capacity < tokens:
            self._take(range(batch), 2 * tokens)
        return self.cache

    def _take(self, rows: Any, capacity: int) -> None:
        """A cache with these of the sequences, in this order."""
        old, rows = self.cache, list(rows)
        made = dsv4.Cache(sequences=len(rows), capacity=capacity, **self.settings)
        for row in set(rows):
            if old.length(row):
                old.copy_to(made, row, *(to for to, of in enumerate(rows) if of == row))
        self.cache = made

    def _choose(self, rows: list[int]) -> None:
        if self.cache is None or rows == list(range(self.cache.sequences)):
            return
        self._take(rows, self.cache.capacity)
        self.first = [self.first[row] for row in rows]
        if self.offset is not None:
            self.offset = self.offset[rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self._choose([row for row in range(self.cache.sequences) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.cache is not None:
            self._choose(torch.arange(self.cache.sequences)[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        copied = Rows(self.settings)
        copied.__dict__.update({**self.__dict__, "first": list(self.first)})
        if self.cache is not None:
            copied._take(range(self.cache.sequences), self.cache.capacity)
        return copied

    def _begins(self, batch: int, tokens: int, first: Tensor | None) -> list[int]:
        """Of a chunk of so many slots, the first that each sequence's tokens stand in."""
        found = [0] * batch if first is None else [min(at, self.slots + tokens) for at in first.tolist()]
        if self.slots and any(min(a, self.slots) != min(b, self.slots) for a, b in zip(found, self.first)):
            raise ValueError(
                "accelerate: attention_mask begins elsewhere than in the call before: that of the whole "
                "sequences is accepted"
            )
        self.first = found
        return [max(0, at - self.slots) for at in found]

    def _follow(self, positions: Tensor | None, tokens: int) -> None:
        """Refuses positions of a chunk that do not go on; its slots are counted."""
        if positions is None:
            return
        offset = positions[:, -1] - torch.tensor([self.slots - 1 - at for at in self.first])
        if self.offset is not None:
            begun = torch.tensor([self.slots - tokens > at for at in self.first])
            if bool((begun & (self.offset != offset)).any()):
                raise ValueError("accelerate: position_ids leap between calls: consecutive ones are accepted")
        self.offset = offset

    def append(self, x: Tensor, first: Tensor | None, positions: Tensor | None, **given: Any) -> Tensor:
        """The layer's output for a chunk x [B, n, Dm]."""
        batch, tokens = x.shape[:2]
        cache = self._room(batch, self.slots + tokens)
        begins = self._begins(batch, tokens, first)
        _need_consecutive(positions, begins)
        self.slots += tokens
        self._follow(positions, tokens)
        if not any(begins):
            return cache.append(x, **given)
        at = (torch.arange(tokens)[None] >= torch.tensor(begins)[:, None]).to(x.device)
        out = torch.zeros_like(x)
        rows = [row for row in range(batch) if begins[row] < tokens]
        if rows:
            counts = [tokens - begins[row] for row in rows]
            out[at] = cache.append(x[at], sequences=rows, counts=counts, **given)
        return out


class NoStaticRows(StaticLayer):
    """Stands where the library has no static cache of compressed rows, whose KeyError says nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        raise ValueError(
            "accelerate: a StaticCache of DeepSeek-V4 is made, which has no room for compressed rows: "
            "DynamicCache(config=model.config) is accepted"
        )


for _kind in ("compressed_sparse_attention", "heavily_compressed_attention"):
    STATIC_LAYER_TYPE_MAPPING.setdefault(_kind, NoStaticRows)


def _need_consecutive(positions: Tensor | None, begins: list[int]) -> None:
    if positions is None or positions.shape[-1] < 2:
        return
    leaps = positions[:, 1:] - positions[:, :-1] != 1
    if any(begins):
        leaps &= torch.arange(leaps.shape[1])[None] >= torch.tensor(begins)[:, None]
    if bool(leaps.any()):
        raise ValueError("accelerate: position_ids leap: consecutive ones are accepted")


class Attention(v4.DeepseekV4Attention):
    """A whole layer by quern.dsv4."""

    quern_table: Table

    @torch.compiler.disable
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        position_ids: Tensor | None = None,
        attention_mask: Lengths | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """x [B, N, Dm] → [B, N, Dm]; the mask is what lengths_of() makes."""
        if cache is None:
            cache = past_key_values
        self._check(attention_mask, kwargs)
        batch, tokens = hidden_states.shape[:2]
        lengths = Lengths(0) if attention_mask is None else attention_mask
        positions = None if position_ids is None else self.quern_table.here(position_ids)
        if positions is not None:
            positions = positions.view(-1, tokens).expand(batch, -1)
        starts = kwargs.get("cu_seq_lens_q")
        if starts is None:
            starts = lengths.starts
        layer = None if cache is None else self._layer_of(cache)
        if starts is not None and (layer is None or not layer.slots):
            starts = apart(starts, batch, tokens)
        first = None if lengths.first is None else self.quern_table.here(lengths.first)
        if starts is None and lengths.first is None and (layer is None or not layer.slots):
            starts = restarts(positions, batch, tokens)
        why = "packed sequences" if starts is not None else None
        if torch.is_grad_enabled() and (hidden_states.requires_grad or self.q_a_proj.weight.requires_grad):
            why = why or "gradients"
        if layer is None or why is not None:
            if layer is not None:
                self._spend(layer, tokens, why)
            return self._whole(hidden_states, lengths.first, first, starts, positions), None
        if layer.spent:
            raise ValueError(
                f"accelerate: the cache was filled with {layer.spent}, which leave it empty: {_WITHOUT}"
            )
        given = {"cos_sin": self.quern_table.upto(layer.slots + tokens), "weights": self._weights()}
        return layer.append(hidden_states, first, positions, **given), None

    def _check(self, mask: Any, more: dict[str, Any]) -> None:
        if mask is not None and not isinstance(mask, Lengths):
            raise ValueError(
                f"accelerate: the mask is a {type(mask).__name__}: attn_implementation 'quern' with "
                "attention_mask [batch, tokens], or none, is accepted"
            )
        if mask is not None and mask.window not in (0, self.sliding_window):
            raise ValueError(
                f"accelerate: the mask has a window of {mask.window}, the layer one of "
                f"{self.sliding_window}: the same is accepted"
            )
        if self.training and self.attention_dropout:
            raise ValueError(f"accelerate: dropout is {self.attention_dropout}: 0 is accepted")
        if more.get("output_attentions") or getattr(self.config, "output_attentions", False):
            raise ValueError("accelerate: output_attentions is set: weights are not kept, False is accepted")

    def _weights(self) -> dict[str, Tensor]:
        found = {name: t for name, t in self.named_parameters() if name in WEIGHTS}
        found["sinks"] = found["sinks"].float()
        return found

    def _settings(self) -> dict[str, Any]:
        indexer = getattr(self.compressor, "indexer", None)
        settings = {"kind": KINDS[self.layer_type], "window": self.sliding_window}
        settings["eps"] = self.q_a_norm.variance_epsilon
        return settings if indexer is None else {**settings, "top_k": indexer.index_topk}

    def _layer_of(self, cache: Any) -> Rows:
        """This layer's place in a cache; the library's, while it is empty, is replaced."""
        layers = getattr(cache, "layers", ())
        found = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        if isinstance(found, Rows):
            return found
        if type(found) not in REPLACED:
            what = type(found).__name__ if found is not None else f"no layer {self.layer_idx}"
            raise ValueError(
                f"accelerate: {type(cache).__name__} has {what}: DynamicCache(config=model.config) is "
                "accepted"
            )
        if found.get_seq_length():
            raise ValueError(
                "accelerate: the cache has tokens of another attention: an empty one is accepted"
            )
        layers[self.layer_idx] = Rows(self._settings())
        return layers[self.layer_idx]

    def _spend(self, layer: Rows, tokens: int, why: str) -> None:
        if layer.slots:
            raise ValueError(f"accelerate: {why} go through a cache that has tokens: {_WITHOUT}")
        layer.spent = why
        layer.slots += tokens

    def _whole(
        self,
        x: Tensor,
        there: Tensor | None,
        first: Tensor | None,
        starts: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        """Whole sequences, without a cache. Their first tokens by x, `there`, and on the CPU."""
        if starts is not None and first is not None:
            raise ValueError("accelerate: packed sequences with padding are given: one of them is accepted")
        weights, table = self._weights(), self.quern_table.upto(x.shape[1])
        layer = partial(dsv4.layer, cos_sin=table, weights=weights, **self._settings())
        if starts is not None:
            flat, ends = x.flatten(0, 1), starts.tolist()
            made = [layer(flat[a:b][None])[0] for a, b in zip(ends, ends[1:]) if b > a]
            return torch.cat(made).view(x.shape)
        if first is None:
            _need_consecutive(positions, [0])
            return layer(x)
        _need_consecutive(positions, first.tolist())
        front, back = to_front(there, x.shape[1])
        return rows_at(layer(rows_at(x, front)), back)


MADE = Attention
_WITHOUT = "torch.no_grad() or use_cache=False is accepted"


def refusal(module: v4.DeepseekV4Attention) -> str | None:
    """Why an attention layer cannot be replaced."""
    weight = module.sinks
    if weight.is_cuda and weight.element_size() > 2:
        return f"it is in {weight.dtype} on a GPU: bfloat16 and float16 are accepted there"
    if type(module) is not v4.DeepseekV4Attention:
        return f"it is a {type(module).__name__}"
    if module.layer_type not in KINDS:
        return f"layer_type is {module.layer_type}: {', '.join(KINDS)} are accepted"
    for name, part in module.named_modules():
        if name.endswith("_proj") and type(part) not in (nn.Linear, Linear, v4.DeepseekV4GroupedLinear):
            return f"{name} is a {type(part).__name__}: Linear is accepted"
        if getattr(part, "bias", None) is not None:
            return f"{name} has a bias: projections without are accepted"
    kind = module.config.rope_parameters[module.rope_layer_type].get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3"):
        return f"rope_type is {kind}, whose angles depend on the length: default, linear, yarn, llama3 are"
    return None


def changer(model: nn.Module) -> Callable[[nn.Module], None]:
    """What replaces a layer of this model."""
    rotary = next(part for part in model.modules() if isinstance(part, v4.DeepseekV4RotaryEmbedding))
    tables: dict[str, Table] = {}

    def change(module: nn.Module) -> None:
        kind = module.rope_layer_type
        module.__class__ = Attention
        module.quern_table = tables.setdefault(kind, Table(rotary, kind))

    return change
