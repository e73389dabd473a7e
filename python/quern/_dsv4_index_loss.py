# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""The loss of DeepSeek-V4's indexer for every framework."""

from __future__ import annotations

from typing import Any

from . import _arrays
from ._faces import run


def index_loss(
    q_index: Any,
    k_index: Any,
    w: Any,
    q: Any,
    kv_cmp: Any,
    lse_win: Any,
    *,
    sink: Any = None,
    idx: Any = None,
    ratio: int = 4,
    start_abs_pos: int = 0,
    lambda_: float = 1.0,
    return_rows: bool = False,
) -> Any:
    """How far the indexer's weights P are from attention's T over the entries that a query sees, or with idx
    [B, T, k] those of them that it names → f32 []; with return_rows (loss, row_loss f32 [B, T]).

    q_index [B, T, Hi, C], k_index [B, S, C] and w [B, T, Hi] are the indexer's, as index() takes them; q [B,
    T, H, D], kv_cmp [B, S, D] and sink [H] the attention's, lse_win f32 [B, H, T] its log-sum over the window
    without the sink (attention(return_lse_win=True)). T sums the heads' probabilities and is normalised over
    the entries; a row's loss is Σ T (log max(T, 1e-10) − log P), and loss is lambda_ times their mean over
    the queries that have an entry.

    With torch loss is differentiable by q_index, k_index and w; the rest and row_loss carry no gradient.
    """
    settings = (("ratio", ratio), ("start_abs_pos", start_abs_pos), ("lambda", lambda_))
    tensors = {"q_index": q_index, "k_index": k_index, "w": w, "q": q, "kv_cmp": kv_cmp, "lse_win": lse_win}
    tensors.update(sink=sink, idx=idx)
    trains = _arrays.train(q_index, k_index, w)
    gradients = ("d_q_index", "d_k_index", "d_w") if trains else ()
    made = run("v4-index-loss", settings, tensors, ("loss", "row_loss", *gradients))
    loss, rows = made[:2]
    if trains:
        from . import _torch

        loss = _torch.with_gradients(loss, (q_index, k_index, w), made[2:])
    return (loss, rows) if return_rows else loss
