# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern's attention inside the transformers package (5.20 and newer): importing this module registers the
attention function and the mask function "quern", which `attn_implementation="quern"` and
`model.set_attn_implementation("quern")` name. Models that do not ask for it stay as they are.

Causal attention with padding on the left or right, sliding windows, sinks, lists of blocks (MiniMax-M3's),
and packed sequences (cu_seq_lens_q and _k, or positions that start again). What it cannot do as the model
asks is refused with a sentence.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .. import attention, nsa

__all__ = ["attend", "lengths_of"]

NAME = "quern"


class Lengths(NamedTuple):
    """What a model hands to its layers in a mask's place. first: int32 [B], the key with which each sequence
    begins; starts: int32 [sequences + 1], of packed ones, laid end to end. window: 0: none."""

    window: int
    first: Tensor | None = None
    starts: Tensor | None = None


def _made_by(mask: Callable[..., Any], maker: str) -> dict[str, Any] | None:
    """The variables of a mask function that masking_utils.<maker> has made."""
    own = getattr(mask, "__module__", "") == masking_utils.__name__
    if not own or not mask.__qualname__.startswith(f"{maker}.<locals>."):
        return None
    return dict(zip(mask.__code__.co_freevars, (cell.cell_contents for cell in mask.__closure__ or ())))


def _pattern(mask: Callable[..., Any]) -> tuple[int, Tensor | None]:
    """A causal mask's window, 0: none, and the number of its sequence for each token of packed ones."""
    if mask is masking_utils.causal_mask_function:
        return 0, None
    made = _made_by(mask, "sliding_window_overlay")
    if made is not None:
        return int(made["sliding_window"]), None
    made = _made_by(mask, "packed_sequence_mask_function")
    if made is not None:
        return 0, made["packed_sequence_mask"]
    made = _made_by(mask, "remap_positions_for_packed_sequence")
    if made is not None:
        return _pattern(made["mask_function"])
    made = _made_by(mask, "and_masks")
    if made is None:
        raise ValueError(
            f"attention quern: the mask {getattr(mask, '__qualname__', mask)} is given: causal masks, with a "
            "sliding window or packed sequences, are accepted"
        )
    found = [_pattern(part) for part in made["mask_functions"]]
    windows = [window for window, _ in found if window > 0]
    packed = [sequence for _, sequence in found if sequence is not None]
    return min(windows, default=0), packed[0] if packed else None


def _first_keys(mask: Tensor) -> Tensor | None:
    """Of a padding mask bool [B, S]: where each sequence begins; None: all at 0. Keys on the right that no
    token before them sees need no mask."""
    if bool(mask.all()):
        return None
    ones = mask.long()
    first, last = ones.argmax(-1), mask.shape[1] - 1 - ones.flip(-1).argmax(-1)
    count = ones.sum(-1)
    if bool(((count > 0) & (last - first + 1 != count)).any()):
        raise ValueError(
            "attention quern: attention_mask has zeros between ones: padding on the left or right is accepted"
        )
    first = torch.where(count > 0, first, torch.full_like(first, mask.shape[1]))
    return None if bool((first == 0).all()) else first.int()


def _starts(sequence: Tensor) -> Tensor:
    """cu_seqlens of packed sequences, whose rows are laid end to end; a graph's holds empty ones, too."""
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    flat = begins.flatten()
    if not torch.compiler.is_compiling():
        at = flat.nonzero().flatten()
        return torch.cat((at, at.new_tensor([flat.numel()]))).int()
    places = torch.arange(flat.numel(), device=flat.device)
    at = torch.where(flat, places, torch.full_like(places, flat.numel())).sort().values
    return torch.cat((at, torch.full_like(at[:1], flat.numel()))).int()


def lengths_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Lengths | None:
    """The mask function: what attend() needs to know in a mask's place; None: a plain causal mask."""
    window, sequence = _pattern(mask_function)
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            "attention quern: the cache has room behind its tokens (StaticCache): caches that grow are "
            "accepted"
        )
    if sequence is not None:
        return Lengths(window, starts=_starts(sequence))
    first = None
    if attention_mask is not None:
        if attention_mask.shape[-1] != kv_offset + kv_length:
            raise ValueError(
                f"attention quern: attention_mask has {attention_mask.shape[-1]} tokens: the "
                f"{kv_offset + kv_length} of cache and input are accepted"
            )
        first = _first_keys(attention_mask[:, kv_offset:])
    return Lengths(window, first) if window or first is not None else None


def _restarts(positions: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """cu_seqlens of sequences whose positions start again, which not every model tells its mask function."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or torch.compiler.is_compiling():
        return None
    if positions.shape[1] != query.shape[2] or query.shape[2] != key.shape[2]:
        return None
    follows = torch.ones_like(positions, dtype=torch.bool)
    follows[:, 1:] = positions[:, 1:] - positions[:, :-1] == 1
    return None if bool(follows.all()) else _starts((~follows).cumsum(-1).expand(query.shape[0], -1))


# What changes the result and is not computed here.
_REFUSED = ("softcap", "position_bias", "head_mask", "read_index", "write_index", "block_table")


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
    if more.get("output_attentions"):
        raise ValueError("attention quern: output_attentions is set: weights are not kept, False is accepted")
    for name in _REFUSED:
        if more.get(name) is not None:
            raise ValueError(f"attention quern: {name} is given: attention without it is accepted")


def _attend_blocks(module: Any, rows: list[Tensor], lists: Tensor, scale: float | None) -> Tensor:
    """Over the blocks of each token's list [B, Hs, N, k]: of the last N tokens, where a cache has more."""
    q, k, v = rows
    tokens, more = k.shape[1], k.shape[1] - q.shape[1]
    if more:
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, more, 0))
        lists = torch.nn.functional.pad(lists, (0, 0, more, 0), value=-1)
    size = module.indexer.block_size
    chosen = {"block_idx": lists, "select_block": size, "num_selected": lists.shape[-1]}
    o = nsa(q, k, v, preset="msa", **chosen, scale=scale)
    return o[:, tokens - rows[0].shape[1] :]


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
    if lists is not None:
        if window or s_aux is not None or starts is not None or lengths.first is not None:
            raise ValueError(
                "attention quern: block_indices with a window, sinks, packed sequences or padding on the "
                "left are given: block_indices alone are accepted"
            )
        return _attend_blocks(module, rows, lists, scaling), None
    if starts is None:
        starts = starts_kv = lengths.starts
    if starts is None and lengths.first is None:
        starts = starts_kv = _restarts(kwargs.get("position_ids"), query, key)
    if starts is None:
        return attention(*rows, **settings, kv_first=lengths.first), None
    if lengths.first is not None:
        raise ValueError("attention quern: packed sequences with padding are given: one of them is accepted")
    flat = [t.reshape(-1, *t.shape[2:]) for t in rows]
    o = attention(*flat, **settings, cu_seqlens_q=starts, cu_seqlens_kv=starts_kv)
    return o.reshape(*rows[0].shape[:3], o.shape[-1]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lengths_of)
