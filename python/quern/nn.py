# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Layers for PyTorch models: NSAttention, CompressedSparseAttention, HeavilyCompressedAttention,
NVFP4Experts, NVFP4Linear."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Collection

import torch
from torch import Tensor, nn

from . import _operations as ops
from . import dsv4, moe, nvfp4
from ._caches import NSACache
from ._nsa import nsa, settings_of

__all__ = [
    "CompressedSparseAttention",
    "HeavilyCompressedAttention",
    "NSAttention",
    "NVFP4Experts",
    "NVFP4Linear",
]


def _take(
    module: nn.Module, function: Callable[..., Any], given: dict[str, Any], per_call: Collection[str]
) -> dict[str, Any]:
    """Settings of a function that a module keeps, less those that it makes or that each call has. Tensors
    among them become its parameters and buffers, and are left out."""
    named = inspect.signature(function).parameters.values()
    known = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name not in per_call]
    for name in given:
        if name not in known:
            raise TypeError(f"{type(module).__name__} has no setting {name}: {', '.join(known)} are accepted")
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    for name, value in tensors.items():
        if isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, nvfp4.as_bytes(value))
    return {name: value for name, value in given.items() if name not in tensors}


_NSA_PER_CALL = (
    *("gate", "gates", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "block_idx", "group_idx"),
    *("cu_seqlens", "cu_seqlens_cmp"),
)
_NSA_WEIGHTS = ("w_k", "w_v", "pe_k", "pe_v")


class NSAttention(nn.Module):
    """Self-attention by native sparse attention: x [B, N, width] → [B, N, width], or varlen [T, width] with
    cu_seqlens.

    A drop-in for a layer of projections around scaled_dot_product_attention: q_proj, k_proj, v_proj, o_proj,
    and `gate` [heads, 3, head_dim], the weights of the branches' gates. The settings are those of quern.nsa
    for tiles of one query, whose choice needs no later one; w_k, w_v, pe_k and pe_v become parameters.
    rotary: called with q or k [.., heads, head_dim] and the tokens' positions in their sequences, returns
    them rotated.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        rotary: Any = None,
        device: Any = None,
        dtype: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.head_dim = head_dim or width // heads
        self.settings, self.rotary = _take(self, nsa, settings, _NSA_PER_CALL), rotary
        numbers = {name: value for name, value in self.settings.items() if name != "save_branches"}
        ops.params_of("nsa", settings_of(**numbers))
        tile = numbers.get("tile") or (256 if numbers.get("preset") == "tile256" else 1)
        if tile != 1:
            raise ValueError(f"tile is {tile}: NSAttention, which decodes, accepts 1; quern.nsa takes tiles")
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias, **made)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=bias, **made)
        self.gate = nn.Parameter(torch.zeros(heads, 3, self.head_dim, **made))

    def _positions(self, x: Tensor, cu_seqlens: Tensor | None, cache: NSACache | None) -> Tensor:
        """Of x's tokens in their sequences."""
        positions = torch.arange(x.shape[-2], device=x.device)
        if cache is not None:
            first = {cache.length(i) for i in range(min(x.shape[0], cache.sequences))}
            if len(first) > 1:
                raise ValueError(f"the cache's sequences have {sorted(first)} tokens: one length is accepted")
            return positions + sum(first)
        if cu_seqlens is not None:
            sequence = torch.searchsorted(cu_seqlens[1:], positions.to(cu_seqlens.dtype), right=True)
            return positions - cu_seqlens[sequence]
        return positions

    def _project(
        self, x: Tensor, cu_seqlens: Tensor | None, cache: NSACache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        if self.rotary is not None:
            positions = self._positions(x, cu_seqlens, cache)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        return q, k, v

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, cache: NSACache | None = None) -> Tensor:
        """cache: x holds the newest tokens of its sequences, all of one length; they are appended. It needs
        torch.no_grad()."""
        q, k, v = self._project(x, cu_seqlens, cache)
        weights = {name: getattr(self, name) for name in _NSA_WEIGHTS if hasattr(self, name)}
        if cache is None:
            o = nsa(q, k, v, gate=self.gate, cu_seqlens=cu_seqlens, **weights, **self.settings)
        else:
            cache.append(k, v, **weights)
            settings = {name: value for name, value in self.settings.items() if name != "save_branches"}
            o = cache.attend(q, gate=self.gate, **settings)
        return self.o_proj(o.flatten(-2))

    def make_cache(self, sequences: int, capacity: int) -> NSACache:
        """An empty cache for forward()."""
        decodes = {"causal": True, "compressed_visibility": "complete", "max_compressed_groups": 0}
        for name, accepted in decodes.items():
            if self.settings.get(name) not in (None, accepted):
                raise ValueError(f"{name} is {self.settings[name]}: a layer that decodes has {accepted}")
        names = ("block_size", "stride", "compress")
        kept = {name: self.settings[name] for name in names if name in self.settings}
        return NSACache(sequences, capacity, **kept)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {self.settings}"


class _Group(nn.Module):
    """Parameters under a common prefix."""


class _CompressedAttention(nn.Module):
    """A whole layer of DeepSeek-V4; parameters have the names of checkpoints."""

    kind = ""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], *, window: int, top_k: int, eps: float, made: Any
    ) -> None:
        super().__init__()
        self.window, self.top_k, self.eps = window, top_k, eps
        for name, shape in shapes.items():
            *path, last = name.split(".")
            group: nn.Module = self
            for word in path:
                if not hasattr(group, word):
                    group.add_module(word, _Group())
                group = getattr(group, word)
            norm = name.endswith("norm.weight")
            initial = torch.ones(shape, **made) if norm else torch.zeros(shape, **made)
            if len(shape) == 2 and not norm:
                nn.init.normal_(initial, std=shape[1] ** -0.5)
            group.register_parameter(last, nn.Parameter(initial))

    def forward(self, x: Tensor, cos_sin: Tensor, cache: dsv4.Cache | None = None) -> Tensor:
        """x [B, T, width], cos_sin [P, R] of dsv4.rope_table() → [B, T, width]. cache: x holds the newest
        tokens of its sequences; it needs torch.no_grad()."""
        weights = dict(self.named_parameters())
        if cache is not None:
            return cache.append(x, cos_sin, weights)
        return dsv4.layer(
            x, cos_sin, weights, kind=self.kind, window=self.window, top_k=self.top_k, eps=self.eps
        )

    def make_cache(self, sequences: int, capacity: int, ring: int = 0, **stored: Any) -> dsv4.Cache:
        """An empty cache for forward(). stored: format, key_format, dtype, page and pages of dsv4.Cache; a
        cache with pages needs its open(x, layer.state_dict()) and pages for its sequences before
        forward()."""
        settings: dict[str, Any] = {"window": self.window, "top_k": self.top_k, "eps": self.eps}
        return dsv4.Cache(self.kind, sequences, capacity, ring=ring, **settings, **stored)


def _shared_shapes(
    width: int, heads: int, head_dim: int, q_lora: int, groups: int, o_lora: int
) -> dict[str, tuple[int, ...]]:
    return {
        "sinks": (heads,),
        "q_a_proj.weight": (q_lora, width),
        "q_a_norm.weight": (q_lora,),
        "q_b_proj.weight": (heads * head_dim, q_lora),
        "kv_proj.weight": (head_dim, width),
        "kv_norm.weight": (head_dim,),
        "o_a_proj.weight": (groups * o_lora, heads // groups * head_dim),
        "o_b_proj.weight": (width, groups * o_lora),
    }


def _compressor_shapes(
    prefix: str, width: int, channels: int, ratio: int, series: int
) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.position_bias": (ratio, series * channels),
        f"{prefix}.kv_proj.weight": (series * channels, width),
        f"{prefix}.gate_proj.weight": (series * channels, width),
        f"{prefix}.kv_norm.weight": (channels,),
    }


class CompressedSparseAttention(_CompressedAttention):
    """DeepSeek-V4's CSA: an entry for every `ratio` tokens, overlapping, of which an indexer selects top_k.

    state_dict has the names of quern.dsv4.layer's weights, which are those of transformers'
    DeepseekV4Attention.
    """

    kind = "csa"

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int = 512,
        *,
        q_lora: int = 1024,
        groups: int = 8,
        o_lora: int = 1024,
        ratio: int = 4,
        index_heads: int = 64,
        index_dim: int = 128,
        window: int = 128,
        top_k: int = 512,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        indexer = "compressor.indexer"
        shapes = {
            **_shared_shapes(width, heads, head_dim, q_lora, groups, o_lora),
            **_compressor_shapes("compressor", width, head_dim, ratio, 2),
            **_compressor_shapes(indexer, width, index_dim, ratio, 2),
            f"{indexer}.q_b_proj.weight": (index_heads * index_dim, q_lora),
            f"{indexer}.scorer.weights_proj.weight": (index_heads, width),
        }
        made = {"device": device, "dtype": dtype}
        super().__init__(shapes, window=window, top_k=top_k, eps=eps, made=made)


class HeavilyCompressedAttention(_CompressedAttention):
    """DeepSeek-V4's HCA: an entry for every `ratio` tokens, all of them attended."""

    kind = "hca"

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int = 512,
        *,
        q_lora: int = 1024,
        groups: int = 8,
        o_lora: int = 1024,
        ratio: int = 128,
        window: int = 128,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shapes = {
            **_shared_shapes(width, heads, head_dim, q_lora, groups, o_lora),
            **_compressor_shapes("compressor", width, head_dim, ratio, 1),
        }
        made = {"device": device, "dtype": dtype}
        super().__init__(shapes, window=window, top_k=512, eps=eps, made=made)


_EXPERTS = tuple(
    f"{matrix}_{kind}" for matrix in ("gate_up", "down") for kind in ("codes", "scales", "repacked", "global")
)
_MOE_PER_CALL = ("logits", "bias", "input_ids", "tid2eid", "experts", "weights", "return_routing")
_MOE_OWN = ("gate_up", "down", "intermediate", *_EXPERTS)


class NVFP4Experts(nn.Module):
    """A mixture of experts whose weights are frozen NVFP4: hidden [.., width] → [.., width].

    The router `weight` [experts, width] trains. gate_up and down are buffers of codes, scales and globals
    (uint8 and f32), which quantize_() fills from floats, and which state_dict keeps; to() moves them and
    leaves their dtypes. repack() adds, in memory alone, the layout that products read fastest on the device
    of the weights. The settings are those of quern.moe.layer (score, renormalize, limit, a4, ...). Tensors
    among them are kept as given: parameters (gate_up_bias, down_bias) train, others are buffers. quantize_()
    interleaves the weights; gate_up_bias is given interleaved, by nvfp4.interleave().
    """

    def __init__(
        self,
        width: int,
        inner: int,
        experts: int,
        top_k: int,
        *,
        device: Any = None,
        dtype: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        given = {"top_k": top_k, **settings}
        self.inner, self.settings = inner, _take(self, moe.layer, given, (*_MOE_PER_CALL, *_MOE_OWN))
        ops.params("moe", **self.settings)
        self._given = tuple(name for name in given if name not in self.settings)
        self.weight = nn.Parameter(torch.empty(experts, width, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=width**-0.5)
        for name, rows, columns in (("gate_up", width, 2 * inner), ("down", inner, width)):
            for kind, divisor in (("codes", 2), ("scales", 16)):
                zeros = torch.zeros(experts, rows // divisor, columns, dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_{kind}", zeros)
            self.register_buffer(f"{name}_global", torch.ones(experts, device=device, dtype=torch.float32))
            self.register_buffer(f"{name}_repacked", None, persistent=False)

    @torch.no_grad()
    def quantize_(
        self, gate_up: Tensor, down: Tensor, *, profile: str = "rne", scales: str = "rne"
    ) -> NVFP4Experts:
        """Takes experts in floats: gate_up [E, 2·inner, width], gate's rows then up's, and down [E, width,
        inner]."""
        granularity = self.settings.get("granularity", 8)
        interleaved = nvfp4.interleave(gate_up.transpose(1, 2).contiguous(), granularity=granularity)
        for name, matrix in (("gate_up", interleaved), ("down", down.transpose(1, 2).contiguous())):
            made = nvfp4.quantize(matrix, weight=True, global_per="expert", profile=profile, scales=scales)
            for kind, tensor in zip(("codes", "scales", "global"), made):
                getattr(self, f"{name}_{kind}").copy_(tensor if kind == "global" else nvfp4.as_bytes(tensor))
            setattr(self, f"{name}_repacked", None)
        return self

    @torch.no_grad()
    def repack(self) -> NVFP4Experts:
        """Repacks the weights as they are now."""
        for name in ("gate_up", "down"):
            pair = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales")
            setattr(self, f"{name}_repacked", nvfp4.prepack(*pair))
        return self

    def forward(self, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
        """bias f32 [experts]: moves the choice alone."""
        given: dict[str, Any] = {name: getattr(self, name) for name in self._given}
        for name in ("gate_up", "down"):
            given[f"{name}_global"] = getattr(self, f"{name}_global")
            repacked = getattr(self, f"{name}_repacked")
            if repacked is not None:
                given[f"{name}_repacked"] = repacked
                given["intermediate"] = self.inner
                continue
            for kind in ("codes", "scales"):
                given[f"{name}_{kind}"] = getattr(self, f"{name}_{kind}")
        return moe.layer(hidden, self.weight, bias=bias, **given, **self.settings)

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        self.gate_up_repacked = self.down_repacked = None
        super()._load_from_state_dict(*arguments, **named)

    def _apply(self, *arguments: Any, **named: Any) -> NVFP4Experts:
        """What to(), half(), cuda() and so on do."""
        globals = {name: t for name, t in self.named_buffers() if name.endswith("_global")}
        super()._apply(*arguments, **named)
        for name, before in globals.items():
            moved = getattr(self, name)
            if moved.dtype != before.dtype:  # halves would change what the codes stand for
                setattr(self, name, before.to(moved.device))
            if moved.device != before.device and name in ("gate_up_global", "down_global"):
                setattr(self, name.replace("global", "repacked"), None)
        return self


class NVFP4Linear(nn.Module):
    """nn.Linear whose weight is frozen NVFP4: x [.., in_features] → [.., out_features].

    In memory the weight has the layout that products read fastest on its device; `state_dict` has codes
    [in_features/2, out_features], scales [in_features/16, out_features] and the global f32 []. x is f32, bf16
    or f16; x and the bias have gradients. a8: as grouped_mm()'s.
    from_linear() takes a layer's weight, nvfp4.quantize_() those of a model.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        a8: bool | str = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if in_features % 16:
            raise ValueError(f"in_features is {in_features}: a multiple of 16 is accepted")
        self.in_features, self.out_features, self.a8 = in_features, out_features, a8
        codes = torch.zeros(1, in_features // 2, out_features, dtype=torch.uint8, device=device)
        scales = torch.zeros(1, in_features // 16, out_features, dtype=torch.uint8, device=device)
        self.register_buffer("repacked", nvfp4.prepack(codes, scales), persistent=False)
        self.register_buffer("weight_global", torch.ones((), dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, *, profile: str = "rne", scales: str = "rne", a8: bool = False
    ) -> NVFP4Linear:
        """The same layer with its weight rounded to NVFP4 and its own bias."""
        weight = linear.weight.detach()
        made = cls(linear.in_features, linear.out_features, False, a8=a8, device=weight.device)
        quantized = nvfp4.quantize(weight.t().contiguous()[None], weight=True, profile=profile, scales=scales)
        made.repacked = nvfp4.prepack(*quantized[:2])
        one = quantized[2].reshape(())
        made.weight_global = one.reciprocal() if profile.replace("_", "-") == "compressed-tensors" else one
        made.bias = linear.bias
        return made.train(linear.training)

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """The weight [out_features, in_features] in f32."""
        codes, scales = nvfp4.unpack(self.repacked, self.out_features, self.in_features)
        return nvfp4.dequantize(codes[0], scales[0], self.weight_global, weight=True).t()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        codes, scales = nvfp4.unpack(self.repacked, self.out_features, self.in_features)
        destination[prefix + "weight_codes"] = nvfp4.as_bytes(codes[0])
        destination[prefix + "weight_scales"] = nvfp4.as_bytes(scales[0])

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any, **named: Any) -> None:
        names = [prefix + "weight_codes", prefix + "weight_scales"]
        pair = [state_dict.pop(name, None) for name in names]
        super()._load_from_state_dict(state_dict, prefix, *arguments, **named)
        if all(t is not None for t in pair):
            codes, scales = (nvfp4.as_bytes(t).to(self.repacked.device)[None] for t in pair)
            self.repacked = nvfp4.prepack(codes, scales)
            state_dict.update(zip(names, pair))
        else:
            arguments[2].extend(name for name, t in zip(names, pair) if t is None)  # the missing keys

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
        y = nvfp4.grouped_mm(
            rows,
            self.repacked,
            offsets=ends,
            b_global=self.weight_global,
            columns=self.out_features,
            a8=self.a8,
        )
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, *arguments: Any, **named: Any) -> NVFP4Linear:
        """What to(), half(), cuda() and so on do."""
        one, before = self.weight_global, self.repacked
        super()._apply(*arguments, **named)
        if self.weight_global.dtype != one.dtype:  # half of it would change what the codes stand for
            self.weight_global = one.to(self.weight_global.device)
        if self.repacked.device.type != before.device.type:  # each device has a layout of its own
            codes, scales = nvfp4.unpack(before, self.out_features, self.in_features)
            pair = (nvfp4.as_bytes(t).to(self.repacked.device) for t in (codes, scales))
            self.repacked = nvfp4.prepack(*pair)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, a8={self.a8}"
        )
