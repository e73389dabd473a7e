# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern's attention inside the transformers package (5.20 and newer): importing this module registers the
attention function, the mask function and the experts function "quern", which `attn_implementation="quern"`,
`model.set_attn_implementation("quern")` and `model.set_experts_implementation("quern")` name. Models that do
not ask for them stay as they are.

Causal attention with padding on the left or right, sliding windows, sinks, lists of blocks (MiniMax-M3's),
and packed sequences (cu_seq_lens_q and _k, or positions that start again). What it cannot do as the model
asks is refused with a sentence. Experts in floats, with biases or without, whose gate is SiLU(gate) · up, the
same with a limit, or with alpha and beta; those whose weights require gradients are computed eagerly.
accelerate() does this for a model and replaces what these functions do not reach: MiniMax-M3's indexer,
DeepSeek-V4's attention and hyper-connections.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .. import attention
from . import _experts, _linears
from ._blocks import attend_chosen, attend_from, attend_lists
from ._experts import experts
from ._masks import Lengths, lengths_of, restarts

__all__ = ["accelerate", "attend", "experts", "lengths_of"]

NAME = "quern"


# What changes the result and is not computed here, by the names of the library's models.
_REFUSED = ("softcap", "position_bias", "head_mask", "indices", "sinks")
_REFUSED += ("read_index", "write_index", "block_table")


def _check(module: Any, mask: Any, dropout: float, is_causal: bool | None, more: dict[str, Any]) -> None:
    """ValueError for what would not be what the model asks for."""
    if dropout:
        raise ValueError(f"attention quern: dropout is {dropout}: 0 is accepted")
    if mask is not None and not isinstance(mask, Lengths):
        raise ValueError(
            f"attention quern: the mask is a {type(mask).__name__}: attention_mask [batch, tokens], or none, "
            "is accepted"
        )
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(
            f"attention quern: {type(module).__name__} is not causal: causal attention is accepted"
        )
    if getattr(module, "compressor", None) is not None:
        raise ValueError(
            f"attention quern: {type(module).__name__} has compressed keys, whose bias does not come here: "
            "eager is accepted"
        )
    config = getattr(module, "config", None)
    if more.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError("attention quern: output_attentions is set: weights are not kept, False is accepted")
    for name in _REFUSED:
        if more.get(name) is not None:
            raise ValueError(f"attention quern: {name} is given: attention without it is accepted")


def _starts_of(lengths: Lengths, positions: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """Where packed sequences begin, by the mask or, if that says nothing, by their positions; in a graph,
    where a mask always says something, by both."""
    starts = lengths.starts
    if lengths.first is not None or query.shape[2] != key.shape[2]:
        return starts
    if starts is None:
        return restarts(positions, query.shape[0], query.shape[2])
    again = restarts(positions, query.shape[0], query.shape[2]) if torch.compiler.is_compiling() else None
    return starts if again is None else torch.cat((starts, again)).sort().values


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Lengths | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query [B, H, N, D], key, value [B, Hkv, S, ·] → [B, N, H, Dv]."""
    _check(module, attention_mask, dropout, is_causal, kwargs)
    window = sliding_window or 0
    lengths = attention_mask if attention_mask is not None else Lengths(0)
    if lengths.window and lengths.window != window:
        raise ValueError(
            f"attention quern: the mask has a window of {lengths.window}, {type(module).__name__} one of "
            f"{window}: the same is accepted"
        )
    rows = [t.transpose(1, 2) for t in (query, key, value)]
    settings = {"window": window, "scale": scaling, "sink": None if s_aux is None else s_aux.float()}
    starts, starts_kv = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    lists = kwargs.get("block_indices")
    if lists is not None and (window or s_aux is not None):
        raise ValueError(
            "attention quern: block_indices with a window or sinks are given: block_indices alone are "
            "accepted"
        )
    if isinstance(lists, Tensor):
        if starts is not None or lengths.first is not None or lengths.starts is not None:
            raise ValueError(
                "attention quern: block_indices with packed sequences or padding on the left are given: "
                "accelerate() counts blocks from where sequences begin"
            )
        return attend_lists(rows, lists, module.indexer.block_size, scaling), None
    if starts is None:
        starts = starts_kv = _starts_of(lengths, kwargs.get("position_ids"), query, key)
    if starts is not None and lengths.first is not None:
        raise ValueError("attention quern: packed sequences with padding are given: one of them is accepted")
    if lists is not None:
        return attend_chosen(rows, lists, scaling, lengths.first, starts), None
    if starts is None:
        return attend_from(rows, lengths.first, **settings), None
    flat = [t.reshape(-1, *t.shape[2:]) for t in rows]
    o = attention(*flat, **settings, cu_seqlens_q=starts, cu_seqlens_kv=starts_kv)
    return o.reshape(*rows[0].shape[:3], o.shape[-1]), None


def _text_alone(model: Any) -> Any:
    """What set_attn_implementation() takes: models that see, too, keep their own attention for that."""
    return {"text_config": NAME} if "text_config" in model.config.sub_configs else NAME


def _replace(name: str, modules: list[Any], model: Any, ours: Any, together: bool) -> bool:
    """Replaces those of one kind that can be, and says how many they are; whether all are. together: all or
    none."""
    change = ours.changer(model)
    reasons: dict[str, int] = {}
    accepted = []
    for module in modules:
        device = next(module.parameters()).device.type
        known = device in ("cpu", "cuda")
        reason = ours.refusal(module) if known else f"it is on {device}: the cpu and cuda are accepted"
        if reason is None:
            accepted.append(module)
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    if together and reasons:
        accepted = []
    for module in accepted:
        change(module)
    why = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    print(f"quern: {len(accepted)} of {len(modules)} {name} replaced{why}")
    return not reasons


# Classes of the library, where they are defined, and the module with what takes their place.
_NEEDED = "DeepseekV4Attention"
_REPLACED = {
    _NEEDED: ("deepseek_v4.modeling_deepseek_v4", "._deepseek_v4"),
    "DeepseekV4DecoderLayer": ("deepseek_v4.modeling_deepseek_v4", "._hyper"),
    "MiniMaxM3VLIndexer": ("minimax_m3_vl.modeling_minimax_m3_vl", "._minimax_m3"),
}


def _give_experts(model: Any, nvfp4: bool) -> None:
    """Gives a model's experts the experts function, where it takes all of them, and says so."""
    found = [m for m in model.modules() if hasattr(m, "_apply_gate") and hasattr(m, "is_concatenated")]
    if not found:
        return
    reasons = {f"{type(m).__name__}: {reason}": m for m in found if (reason := _experts.refusal(m))}
    if not reasons:
        model.set_experts_implementation(NAME)
    if nvfp4 and not reasons:
        for module in found:
            if not isinstance(module, _experts.Quantized):
                _experts.quantize_(module)
        print(f"quern: {len(found)} {type(found[0]).__name__} quantised")
        return
    now = found[0].config._experts_implementation
    why = "".join(f"; {reason}" for reason in reasons) or "; while their weights require gradients, eager"
    if not reasons and any(_experts.copies(m) for m in found):
        why += "; else by a copy of them, laid out anew"
    print(f"quern: experts_implementation of {type(model).__name__} is {now}{why}")


def accelerate(model: Any, *, experts: str | None = None) -> Any:
    """Gives a model of the transformers package Quern's attention, and returns it.

    attn_implementation becomes "quern" (that of a model's text alone). Of MiniMax-M3 the indexer is replaced:
    blocks are chosen and attended without a mask, and count from each sequence's first token. Of DeepSeek-V4
    the attention is, by whole layers of quern.dsv4, which keep caches of their own in cache.layers, and the
    hyper-connections. Modules keep their names, parameters and state_dict. experts_implementation becomes
    "quern" where the experts function takes the model's; experts="nvfp4" also rounds their weights to NVFP4,
    in place and for good: state_dict then has codes, scales and globals. On CPUs that multiply bf16, large
    linear layers read their weights in place where a step meets them with a few rows. One line a kind says
    how many were replaced, and why others were not: of DeepSeek-V4's attention layers all are or none, and
    attn_implementation stays. On the CPU and on GPUs, where DeepSeek-V4 has 16 bits.
    """
    if experts not in (None, "nvfp4"):
        raise ValueError(f"accelerate: experts is {experts!r}: None and 'nvfp4' are accepted")
    whole = True
    for name, (library, ours) in _REPLACED.items():
        loaded = sys.modules.get(f"transformers.models.{library}")
        if loaded is None:
            continue
        module = import_module(ours, __package__)
        found = [m for m in model.modules() if isinstance(m, getattr(loaded, name))]
        found = [m for m in found if not isinstance(m, module.MADE)]
        together = name == _NEEDED
        if found and not _replace(name, found, model, module, together):
            whole &= not together
    if whole:
        model.set_attn_implementation(_text_alone(model))
        now = model.config.get_text_config()._attn_implementation
        print(f"quern: attn_implementation of {type(model).__name__} is {now}")
    _give_experts(model, experts == "nvfp4")
    _linears.replace(model)
    return model


ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lengths_of)
