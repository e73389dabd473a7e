# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""DeepSeek-V4's compressed attention: compressors, the indexer, the attention core, the layer.

A row from a cache, however its sequence was cut into calls, is that of the whole sequence.
store(), load(), write_slots() and gather_pages() are the caches' rows.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ._dsv4_formats import gather_pages, load, store, stored, write_slots
from ._dsv4_hyper import hyper
from ._nvfp4_quantize import through

__all__ = [
    "append_step",
    "attention",
    "compress",
    "gather_pages",
    "hadamard_transform",
    "hyper",
    "index",
    "index_loss",
    "layer",
    "layer_pack",
    "layer_step",
    "layer_unpack",
    "load",
    "rotate",
    "store",
    "stored",
    "visible",
    "write_slots",
]


def rotate(x: Tensor, cos_sin: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Turns interleaved pairs of the last channels of x [.., T, D] by the positions [T]; cos_sin [P, R]."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions, :half], cos_sin[positions, half:]
    sin = -sin if inverse else sin
    plain, turned = x[..., : -2 * half], x[..., -2 * half :].unflatten(-1, (half, 2))
    even, odd = turned[..., 0], turned[..., 1]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((plain, pairs.flatten(-2)), -1)


def hadamard_transform(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of the last channels, in Sylvester's order, over the root of their
    number."""
    matrix, pair = torch.ones(1, 1, dtype=x.dtype), torch.tensor([[1, 1], [1, -1]], dtype=x.dtype)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.kron(pair, matrix)
    return x @ matrix * x.shape[-1] ** -0.5


def compress(
    proj: Tensor,
    b_a: Tensor,
    b_b: Tensor | None = None,
    *,
    prev_b: Tensor | None = None,
    norm_weight: Tensor | None = None,
    cos_sin: Tensor | None = None,
    start_token: int = 0,
    start_abs_pos: int = 0,
    n_blocks: int = 0,
    rope_at: str = "first",
    round_bf16: bool = False,
    hadamard: bool = False,
    eps: float = 1e-6,
    format: str = "rows",
) -> Tensor:
    """proj [.., T, 4C or 2C] → entries [.., n, C]; b_b and prev_b for CSA. With a format, what its rows stand
    for: store() has their bytes. Gradients pass straight through rounding and formats."""
    ratio, width = b_a.shape
    proj = proj[..., start_token:, :]
    n = n_blocks or proj.shape[-2] // ratio
    series = proj[..., : n * ratio, :].unflatten(-2, (n, ratio)).unflatten(-1, (-1, width))
    values, logits = series[..., 0, :], series[..., 1, :] + b_a
    if b_b is not None:
        before = torch.cat((series[..., 2, :], series[..., 3, :]), -1)  # [.., n, r, 2C]
        first = torch.zeros_like(before[..., :1, :, :]) if prev_b is None else prev_b.unsqueeze(-3)
        before = torch.cat((first, before[..., :-1, :, :]), -3)
        earlier = before[..., width:] + b_b
        if prev_b is None:
            none = torch.zeros(n, 1, 1, dtype=torch.bool)
            none[:1] = True
            earlier = earlier.masked_fill(none, -math.inf)
        values, logits = torch.cat((values, before[..., :width]), -2), torch.cat((logits, earlier), -2)
    some = ~logits.isneginf().all(-2, keepdim=True)
    out = (logits.masked_fill(~some, 0).softmax(-2).masked_fill(~some, 0) * values).sum(-2)
    positions = start_abs_pos + torch.arange(n) * ratio + (ratio - 1 if rope_at == "last" else 0)
    return finish(out, positions, norm_weight, cos_sin, round_bf16, hadamard, eps, format)


def finish(
    out: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None,
    cos_sin: Tensor | None,
    round_bf16: bool,
    hadamard: bool,
    eps: float,
    format: str,
) -> Tensor:
    """What follows pooling, for rows [.., n, C] at the positions [n]."""
    if round_bf16:
        out = through(out, out.bfloat16())
    if norm_weight is not None:
        out = out * (out.square().mean(-1, keepdim=True) + eps).rsqrt() * norm_weight
    if cos_sin is not None:
        out = rotate(out, cos_sin, positions)
    if hadamard:
        out = hadamard_transform(out)
    return out if format == "rows" else stored(out, format)


def merge(sums: Tensor, value: Tensor, logit: Tensor) -> Tensor:
    """Sums [3, C] (greatest logit, sum of weights, weighted sum) with one more token."""
    most = torch.maximum(sums[0], logit)
    shift = most.masked_fill(most.isneginf(), 0)
    old, new = (sums[0] - shift).exp(), (logit - shift).exp()
    return torch.stack((most, sums[1] * old + new, sums[2] * old + value * new))


def append_step(
    proj: Tensor,
    b_a: Tensor,
    slots: Tensor,
    positions: Tensor,
    cu: Tensor,
    states: Tensor,
    merged: Tensor,
    *,
    b_b: Tensor | None = None,
    norm_weight: Tensor | None = None,
    cos_sin: Tensor | None = None,
    rope_at: str = "first",
    round_bf16: bool = False,
    hadamard: bool = False,
    eps: float = 1e-6,
    format: str = "rows",
) -> tuple[Tensor, Tensor, Tensor]:
    """A step's tokens into states [slots, floats]: entries [T // r + B, C], states, merged. A state holds the
    open block's sums, with b_b those of its series b, then a ring of projected rows."""
    ratio, width = b_a.shape
    count, states, merged = 1 if b_b is None else 2, states.clone(), merged.clone()
    ring = (states.shape[1] - 3 * count * width) // proj.shape[1]
    empty = torch.tensor([-math.inf, 0, 0], dtype=states.dtype)[:, None].expand(3, width)
    pooled, at = [], []
    for slot, position, first, last in zip(slots.tolist(), positions.tolist(), cu[:-1], cu[1:]):
        end = position + int(last - first)
        if slot < 0 or end == position:
            continue
        sums = list(states[slot, : 3 * count * width].view(count, 3, width).clone())
        kept = states[slot, 3 * count * width :].view(ring, proj.shape[1])
        start = int(merged[slot]) if position > 0 else 0
        if position == 0:
            sums = [empty] * count
        old = [kept[q % ring].clone() for q in range(start, position)]
        rows = old + list(proj[first:last].to(states.dtype))
        now, left = sums, max(start, end - ring)
        for q in range(start, end):
            series, j = rows[q - start].unflatten(-1, (-1, width)), q % ratio
            if q == left:
                now = list(sums)
            sums[0] = merge(sums[0], series[0], series[1] + b_a[j])
            if b_b is not None:
                sums[1] = merge(sums[1], series[2], series[3] + b_b[j])
            if j == ratio - 1:
                if q >= position:
                    some = sums[0][1] > 0
                    pooled.append(sums[0][2].where(some, 0) / sums[0][1].where(some, 1))
                    at.append(q if rope_at == "last" else q - j)
                sums = sums[1:] + [empty]
        states[slot, : 3 * count * width] = torch.stack(sums if left == end else now).flatten()
        for q in range(max(left, position), end):
            kept[q % ring] = rows[q - start]
        merged[slot] = left
    out = proj.new_zeros(len(proj) // ratio + len(slots), width)
    if pooled:
        rows = torch.stack(pooled)
        out[: len(at)] = finish(
            rows, torch.tensor(at), norm_weight, cos_sin, round_bf16, hadamard, eps, format
        )
    return out, states, merged


def visible(tokens: int, entries: int, ratio: int, start: int = 0) -> Tensor:
    """bool [T, S]: an entry is seen once its last token is."""
    position = start + torch.arange(tokens)
    return torch.arange(entries)[None, :] < ((position + 1) // ratio)[:, None]


def index(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    *,
    ratio: int = 4,
    top_k: int = 512,
    start_abs_pos: int = 0,
    key_format: str = "rows",
) -> tuple[Tensor, Tensor]:
    """→ idx [B, T, top_k], ascending and padded with -1, and the scores [B, T, S], -inf where not seen. k: in
    a format bytes. The choice has no gradient."""
    k = k if key_format == "rows" else load(k, key_format)
    dots = torch.einsum("bthc,bsc->bths", q, k).relu()
    scores = torch.einsum("bth,bths->bts", w, dots) * (q.shape[2] * q.shape[3]) ** -0.5
    scores = scores.masked_fill(~visible(q.shape[1], k.shape[1], ratio, start_abs_pos), -math.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)
    kept = best.indices[..., :top_k].masked_fill(best.values[..., :top_k].isneginf(), k.shape[1])
    kept = kept.sort(-1).values
    idx = torch.full((*q.shape[:2], top_k), -1, dtype=torch.int32)
    idx[..., : kept.shape[-1]] = kept.masked_fill(kept == k.shape[1], -1).int()
    return idx, scores


def index_loss(
    q_index: Tensor,
    k_index: Tensor,
    w: Tensor,
    q: Tensor,
    kv_cmp: Tensor,
    lse_win: Tensor,
    *,
    sink: Tensor | None = None,
    idx: Tensor | None = None,
    ratio: int = 4,
    start_abs_pos: int = 0,
    lambda_: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The indexer's loss [] and that of every row [B, T]. Differentiable by q_index, k_index and w."""
    seen = visible(q.shape[1], kv_cmp.shape[1], ratio, start_abs_pos).expand(q.shape[0], -1, -1)
    if idx is not None:
        inside = (idx >= 0) & (idx < kv_cmp.shape[1])
        named = torch.zeros(*idx.shape[:2], kv_cmp.shape[1] + 1, dtype=torch.bool)
        named = named.scatter_(-1, torch.where(inside, idx, kv_cmp.shape[1]).long(), True)
        seen = seen & named[..., :-1]
    some = seen.any(-1, keepdim=True)
    out = ~seen & some
    a = torch.einsum("bthd,bsd->bhts", q, kv_cmp) * q.shape[-1] ** -0.5
    a = a.masked_fill(out[:, None], -math.inf)
    rest = lse_win if sink is None else torch.logaddexp(lse_win, sink[:, None])
    norm = torch.logaddexp(a.logsumexp(-1), rest)
    teacher = torch.exp(a - norm[..., None]).sum(1)
    teacher = (teacher / teacher.sum(-1, keepdim=True).clamp_min(2.0**-126)).detach()
    dots = torch.einsum("bthc,bsc->bths", q_index, k_index).relu()
    scores = torch.einsum("bth,bths->bts", w, dots) * (q_index.shape[2] * q_index.shape[3]) ** -0.5
    log_p = scores.masked_fill(out, -math.inf).log_softmax(-1)
    terms = teacher * (teacher.clamp_min(1e-10).log() - log_p)
    rows = terms.masked_fill(~seen, 0).sum(-1)
    return lambda_ * rows.sum() / max(1, int(some.sum())), rows


def attention(
    q: Tensor,
    kv: Tensor,
    kv_cmp: Tensor | None = None,
    idx: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    cos_sin: Tensor | None = None,
    ratio: int = 0,
    window: int = 128,
    start_abs_pos: int | None = None,
    format: str = "rows",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], kv [B, N, D], kv_cmp [B, S, D], idx [B, T, k] → o [B, T, H, D]; with return_lse also
    lse [B, H, T] and lse_win, of the window's keys alone. kv and kv_cmp: in a format bytes. ratio 0: 4
    with idx, else 128."""
    if format != "rows":
        kv, kv_cmp = load(kv, format), None if kv_cmp is None else load(kv_cmp, format)
    batch, tokens, heads, dim = q.shape
    start = kv.shape[1] - tokens if start_abs_pos is None else start_abs_pos
    position = start + torch.arange(tokens)
    key = start + tokens - kv.shape[1] + torch.arange(kv.shape[1])
    seen = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
    seen = seen.expand(batch, -1, -1)
    keys = kv
    if kv_cmp is not None:
        ratio = ratio or (128 if idx is None else 4)
        entries = visible(tokens, kv_cmp.shape[1], ratio, start).expand(batch, -1, -1)
        if idx is not None:
            listed = torch.zeros(batch, tokens, kv_cmp.shape[1] + 1, dtype=torch.bool)
            listed.scatter_(-1, torch.where(idx < 0, kv_cmp.shape[1], idx).long(), True)
            entries = entries & listed[..., :-1]
        keys, seen = torch.cat((kv, kv_cmp), 1), torch.cat((seen, entries), -1)
    scores = torch.einsum("bthd,bsd->bhts", q, keys) * dim**-0.5
    seen = seen[:, None].expand_as(scores)
    some = seen.any(-1, keepdim=True)
    sums = scores.detach().masked_fill(~seen, -math.inf)
    scores = scores.masked_fill(~seen & some, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, -1, 1, 1).expand(batch, heads, tokens, 1)), -1)
    p = scores.softmax(-1)[..., : keys.shape[1]].masked_fill(~some, 0)
    o = torch.einsum("bhts,bsd->bthd", p, keys)
    if cos_sin is not None:
        o = rotate(o.transpose(1, 2), cos_sin, position, inverse=True).transpose(1, 2)
    return (o, sums.logsumexp(-1), sums[..., : kv.shape[1]].logsumexp(-1)) if return_lse else o


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x if weight is None else x * weight


def _entries(x: Tensor, cos_sin: Tensor, weights: Mapping[str, Tensor], prefix: str, eps: float) -> Tensor:
    """What the compressor of that name in checkpoints makes of x [B, T, Dm]."""
    kv, gate = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in ("kv", "gate"))
    bias, norm = weights[f"{prefix}.position_bias"], weights[f"{prefix}.kv_norm.weight"]
    width = norm.shape[0]
    if bias.shape[1] == width:
        return compress(torch.cat((kv, gate), -1), bias, norm_weight=norm, cos_sin=cos_sin, eps=eps)
    # Checkpoints have the series that the next block reads first.
    parts = (kv[..., width:], gate[..., width:], kv[..., :width], gate[..., :width])
    biases = bias[:, width:], bias[:, :width]
    return compress(torch.cat(parts, -1), *biases, norm_weight=norm, cos_sin=cos_sin, eps=eps)


def layer(
    x: Tensor,
    cos_sin: Tensor,
    weights: Mapping[str, Tensor],
    *,
    kind: str = "csa",
    window: int = 128,
    top_k: int = 512,
    eps: float = 1e-6,
    idx: Tensor | None = None,
) -> Tensor:
    """x [B, T, Dm] → [B, T, Dm]; the weights are those of quern.dsv4.layer, by the names of checkpoints.

    kind "csa", "hca" or "swa". idx [B, T, k]: the entries that CSA attends, instead of choosing them.
    """
    batch, tokens, _ = x.shape
    dim, position = weights["kv_norm.weight"].shape[0], torch.arange(tokens)
    latent = _norm(x @ weights["q_a_proj.weight"].T, weights["q_a_norm.weight"], eps)
    q = (latent @ weights["q_b_proj.weight"].T).unflatten(-1, (-1, dim))
    q = rotate(_norm(q, None, eps).transpose(1, 2), cos_sin, position).transpose(1, 2)
    kv = rotate(_norm(x @ weights["kv_proj.weight"].T, weights["kv_norm.weight"], eps), cos_sin, position)
    entries, ratio = None, 0
    if kind != "swa":
        entries = _entries(x, cos_sin, weights, "compressor", eps)
        ratio = weights["compressor.position_bias"].shape[0]
    if kind == "csa" and idx is None:
        indexer = "compressor.indexer"
        keys = _entries(x, cos_sin, weights, indexer, eps)
        query = (latent @ weights[f"{indexer}.q_b_proj.weight"].T).unflatten(-1, (-1, keys.shape[-1]))
        query = rotate(query.transpose(1, 2), cos_sin, position).transpose(1, 2)
        of_heads = x @ weights[f"{indexer}.scorer.weights_proj.weight"].T
        idx = index(query, keys, of_heads, ratio=ratio, top_k=top_k)[0]
    o, *_ = attention(
        q,
        kv,
        entries,
        idx,
        sink=weights["sinks"],
        cos_sin=cos_sin,
        ratio=ratio or 1,
        window=window,
        return_lse=True,
    )
    o_a = weights["o_a_proj.weight"]
    groups = q.shape[2] * dim // o_a.shape[1]
    mixed = torch.einsum(
        "btgc,goc->btgo", o.reshape(batch, tokens, groups, -1), o_a.unflatten(0, (groups, -1))
    )
    return mixed.flatten(-2) @ weights["o_b_proj.weight"].T


def layer_step(
    x: Tensor,
    cu: Tensor,
    cos_sin: Tensor,
    weights: Mapping[str, Tensor],
    before: Sequence[Tensor],
    **settings: Any,
) -> Tensor:
    """A step's rows x [T, Dm], sequence after sequence by cu [B + 1], behind the tokens [n, Dm] that each
    sequence has: the rows of the whole sequences."""
    made = []
    for old, first, last in zip(before, cu[:-1].tolist(), cu[1:].tolist()):
        whole = torch.cat((old, x[first:last]))[None]
        made.append(layer(whole, cos_sin, weights, **settings)[0, len(old) :])
    return torch.cat(made)


def _kept(
    tokens: int, ratio: int, raw: Tensor, raw_table: Tensor, pools: Sequence[Tensor], table: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Where a sequence's rows stand: pool, page, slot; raw rows first."""
    row = torch.arange(max(0, tokens - raw.shape[1]), tokens)
    yield raw, raw_table[0].expand(len(row)).long(), row % raw.shape[1]
    for pool in pools:
        entry, page = torch.arange(tokens // ratio), pool.shape[1]
        yield pool, table[entry // page].long(), entry % page


def layer_pack(
    raw: Tensor,
    raw_table: Tensor,
    tokens: int,
    ratio: int = 1,
    pools: Sequence[Tensor] = (),
    table: Tensor | None = None,
    states: Sequence[Tensor] = (),
    slot: int = 0,
) -> Tensor:
    """What a layer keeps of a sequence, as bytes. pools: entries and keys, as rows; states: states, merged,
    and those of the indexer."""
    rows = [pool[page, at] for pool, page, at in _kept(tokens, ratio, raw, raw_table, pools, table)]
    rows += [t[slot : slot + 1] for t in states if tokens]
    return torch.cat([t.contiguous().flatten().view(torch.uint8) for t in rows])


def layer_unpack(
    packed: Tensor,
    raw: Tensor,
    raw_table: Tensor,
    tokens: int,
    ratio: int = 1,
    pools: Sequence[Tensor] = (),
    table: Tensor | None = None,
    states: Sequence[Tensor] = (),
    slot: int = 0,
) -> None:
    """The reverse: writes such bytes into the tensors."""
    for pool, page, at in _kept(tokens, ratio, raw, raw_table, pools, table):
        size = len(at) * pool.shape[2] * pool.element_size()
        pool[page, at] = packed[:size].clone().view(pool.dtype).view(len(at), pool.shape[2])
        packed = packed[size:]
    for t in states if tokens else ():
        size = t[slot].numel() * t.element_size()
        t[slot] = packed[:size].clone().view(t.dtype).view(t[slot].shape)
        packed = packed[size:]
