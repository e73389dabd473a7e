# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""What a model of the transformers package hands to its layers in a mask's place: where sequences begin."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils


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


def _traced(mask: Callable[..., Any], batch: int, tokens: int, window: int, device: Any = None) -> Tensor:
    """While a graph is made, which hides what a mask function is made of: the number of its sequence for each
    token, from who sees the token before it. The graph fails where others than the last `window` tokens of a
    sequence, 0: all, are seen."""
    at = torch.arange(tokens, device=device)[None]
    row = torch.arange(batch, device=device)[:, None]
    head = torch.zeros_like(at)
    begins = (at == 0) | ~mask(row, head, at, (at - 1).clamp(min=0))
    start = torch.where(begins, at, 0).cummax(-1).values
    least = torch.maximum(start, at - window + 1) if window else start
    before, after = (least - 1).clamp(min=0), (at + 1).clamp(max=tokens - 1)
    causal = mask(row, head, at, at) & (~mask(row, head, at, after) | (after == at))
    alike = causal & mask(row, head, at, least) & (~mask(row, head, at, before) | (before == least))
    torch._assert_async(alike.all(), "attention quern: the mask is not causal: causal masks are accepted")
    return begins.cumsum(-1).expand(batch, -1)


def _pattern_of(
    mask: Callable[..., Any], batch: int, tokens: int, more: dict[str, Any]
) -> tuple[int, Tensor | None]:
    """_pattern(), also while a graph of a call without a cache is made."""
    if mask is masking_utils.causal_mask_function or not torch.compiler.is_compiling():
        return _pattern(mask)
    window = more.get("local_size") or 0
    return window, _traced(mask, batch, tokens, window, more.get("device"))


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
    whole = isinstance(q_offset, int) and q_offset == kv_offset == 0 and attention_mask is None
    if whole and q_length == kv_length:
        window, sequence = _pattern_of(mask_function, batch_size, q_length, kwargs)
    else:
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


def restarts(positions: Any, batch: int, tokens: int) -> Tensor | None:
    """cu_seqlens of sequences whose positions start again, which not every model tells its mask function; of
    a graph, which cannot look, always."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != tokens:
        return None
    follows = torch.ones_like(positions, dtype=torch.bool)
    follows[:, 1:] = positions[:, 1:] - positions[:, :-1] == 1
    if not torch.compiler.is_compiling() and bool(follows.all()):
        return None
    return _starts((~follows).cumsum(-1).expand(batch, -1))


def apart(starts: Tensor, batch: int, tokens: int) -> Tensor | None:
    """cu_seqlens of packed sequences; None: each row is one sequence, as a graph may say, too."""
    return starts if len(starts.unique()) != batch + 1 or bool((starts % tokens != 0).any()) else None


def to_front(first: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Indices [B, tokens] that move each sequence's padding from the left to the right, and those that move
    it back."""
    at, by = torch.arange(tokens, device=first.device)[None], first[:, None].long()
    return (at + by) % tokens, (at - by) % tokens


def rows_at(t: Tensor, index: Tensor) -> Tensor:
    """Of t [B, N, ..] the rows at index [B, n]."""
    return t[torch.arange(len(t), device=t.device)[:, None], index]
