# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Dense attention for every framework."""

from __future__ import annotations

from typing import Any

from ._faces import Short, run

_SETTINGS = ("causal", "window", "scale", "query_offset")
_INPUTS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv", "sink", "kv_first", "kv_count")
_SHORT = Short("attention", _SETTINGS, _INPUTS, "o")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int = 0,
    scale: float | None = None,
    query_offset: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    sink: Any = None,
    kv_first: Any = None,
    kv_count: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """softmax(scale · q kᵀ) v over the keys that each query sees → o, or (o, lse).

    q [B, Nq, H, D], k [B, Nkv, Hkv, D], v [B, Nkv, Hkv, Dv] → o [B, Nq, H, Dv], lse f32 [B, H, Nq]; or
    varlen, q [Tq, H, D], k [Tkv, Hkv, D], v [Tkv, Hkv, Dv] → o [Tq, H, Dv], lse [H, Tq], with cu_seqlens
    int32 [B+1] (cu_seqlens_kv None: the same). f32, f16 or bf16. Query head h reads head h // (H / Hkv) of k
    and v.

    The queries are the last Nq positions, unless query_offset is the position of the first. causal: keys up
    to the query, and with a window the last `window` of them; else all, or those at most window // 2 away.
    scale None: 1/√D. A query that sees no key gives 0 and lse -inf.

    sink f32 [H]: logits that join the denominator alone, o · 1 / (1 + e^(sink − lse)). kv_first, kv_count
    int32 [B], of fixed lengths: keys kv_first … kv_count − 1 of a sequence exist, and positions count from
    kv_first (batches padded on the left, caches with room); on a GPU such calls have no gradient.

    With torch it is differentiable by q, k, v and sink; lse carries no gradient. out: o's memory, for calls
    without gradients.
    """
    values = causal, window, scale, query_offset
    inputs = q, k, v, cu_seqlens_q, cu_seqlens_kv, sink, kv_first, kv_count
    if not return_lse:
        if out is None:
            made = _SHORT.make(values, inputs)
            if made is not None:
                return made
        elif _SHORT.write(values, inputs, out):
            return out
    settings, tensors = tuple(zip(_SETTINGS, values)), dict(zip(_INPUTS, inputs))
    written = None if out is None else {"o": out}
    results = run("attention", settings, tensors, ("o", "lse") if return_lse else ("o",), out=written)
    return results if return_lse else results[0]
